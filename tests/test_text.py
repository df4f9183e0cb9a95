"""Readers: every outcome of the table of inputs in docs/errors.md, and flat memory."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import electra.data.text
from electra.data.text import MAX_DOCUMENT, MAX_LINE, TextStats, draw, expand_inputs, read_documents
from electra.errors import EXIT_USER, ElectraError

Write = Callable[[str, bytes | str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, content: bytes | str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def read(*paths: Path, column: str = "text") -> tuple[list[tuple[str, ...]], TextStats]:
    stats = TextStats()
    documents = list(read_documents(expand_inputs(paths), column=column, stats=stats))
    assert stats.documents == len(documents)
    assert stats.lines == sum(len(document.lines) for document in documents)
    return [document.lines for document in documents], stats


def fails(path: Path, what: str, where: str = "", column: str = "text") -> ElectraError:
    """Reading must fail with this message, naming the file and `where`, and say what to do."""
    with pytest.raises(ElectraError, match=what) as caught:
        read(path, column=column)
    assert str(path) in caught.value.where
    assert where in caught.value.where
    assert caught.value.fix
    assert caught.value.exit_code == EXIT_USER
    return caught.value


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


# ---------------------------------------------------------------- plain text


def test_blank_lines_and_file_ends_end_documents(write: Write) -> None:
    a = write("a.txt", "one\ntwo\n\n \t\n\nthree")
    b = write("b.txt", "four\n")
    documents, stats = read(a, b)
    assert documents == [("one", "two"), ("three",), ("four",)]
    assert (stats.files, stats.blank_lines, stats.bytes) == (2, 3, 23)


def test_documents_know_where_they_begin(write: Write) -> None:
    path = write("a.txt", "\r\none\r\ntwo\r\r\nthree")
    documents = list(read_documents([path], stats=TextStats()))
    assert [(document.file, document.line) for document in documents] == [
        (str(path), 2),
        (str(path), 5),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_of_every_system(write: Write, end: str) -> None:
    documents, stats = read(write("a.txt", end.join(["one", "two", "", "three", ""])))
    assert documents == [("one", "two"), ("three",)]
    assert stats.carriage_returns == ("\r" in end) * 4


def test_a_line_end_on_the_border_of_two_blocks(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "one\r\ntwo\r\r\nzwölf\rdrei 😀\r\n"
    for size in range(1, len(text.encode()) + 1):
        monkeypatch.setattr(electra.data.text, "_BLOCK", size)
        assert read(write("a.txt", text))[0] == [("one", "two"), ("zwölf", "drei 😀")]


def test_only_line_ends_end_lines(write: Write) -> None:
    line = "a\u2028b\u2029c\u0085d\x0ce\x0bf\x1cg\u200dh"
    assert read(write("a.txt", line + "\n"))[0] == [(line,)]


def test_a_byte_order_mark_is_removed_and_counted(write: Write) -> None:
    documents, stats = read(write("a.txt", b"\xef\xbb\xbfone"), write("b.txt", "two"))
    assert documents == [("one",), ("two",)]
    assert stats.byte_order_marks == 1


def test_unusual_but_valid_text_is_kept(write: Write) -> None:
    line = "👩\u200d👩\u200d👧 שלום \u202eabc\u202c \U000e0fff e\u0301 \U0010ffff"
    assert read(write("a.txt", line))[0] == [(line,)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"]))))
def test_any_text_comes_back(tmp_path_factory: pytest.TempPathFactory, lines: list[str]) -> None:
    path = tmp_path_factory.mktemp("any") / "a.txt"
    path.write_bytes("\n".join(["x", *lines]).encode())
    found = [line for document in read(path)[0] for line in document]
    assert found == ["x", *(line for line in lines if line and not line.isspace())]


def test_long_documents_are_cut_between_lines(write: Write) -> None:
    lines = [f"{number} " + "x" * 999 for number in range(1000)]
    documents, stats = read(write("a.txt", "\n".join(lines)))
    assert [line for document in documents for line in document] == lines
    assert len(documents) == 4
    assert all(sum(map(len, document)) <= MAX_DOCUMENT for document in documents)
    assert stats.long_documents_cut == 3


def test_long_lines_are_cut_at_white_space(write: Write) -> None:
    words = [str(number) for number in range(60_000)]
    documents, stats = read(write("a.txt", " ".join(words) + "\nend"))
    lines = [line for document in documents for line in document]
    assert [word for line in lines for word in line.split()] == [*words, "end"]
    assert max(map(len, lines)) <= MAX_LINE
    assert stats.long_lines_cut == len(lines) - 2


def test_a_long_line_without_white_space_is_cut_anyway(write: Write) -> None:
    documents, _ = read(write("a.txt", "é" * (3 * MAX_LINE)))
    assert [len(line) for document in documents for line in document] == [MAX_LINE] * 3


# ---------------------------------------------------------------- text that cannot be read


def test_invalid_utf8_names_line_and_byte(write: Write) -> None:
    fails(write("a.txt", b"one\r\ntwo\rthr\xe9e\n"), "0xe9", "line 3, byte 12")


def test_invalid_utf8_is_placed_across_blocks(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"\xef\xbb\xbf" + "zwölf\n".encode() * 10 + b"ab\xffcd"
    path = write("a.txt", content)
    for size in range(3, 30):
        monkeypatch.setattr(electra.data.text, "_BLOCK", size)
        fails(path, "0xff", f"line 11, byte {content.index(255)}")


def test_a_character_cut_off_at_the_end(write: Write) -> None:
    fails(write("a.txt", "one\nü".encode()[:-1]), "unexpected end", "line 2, byte 4")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-16-be", "utf-32-le"])
def test_other_unicode_encodings_say_how_to_convert(write: Write, encoding: str) -> None:
    text = "\ufeffwords" if encoding[-3] == "-" else "words"
    error = fails(write("a.txt", text.encode(encoding)), "not UTF-8")
    assert f"iconv -f {encoding[:6].upper()}" in error.fix


def test_a_nul_byte_names_line_and_byte(write: Write) -> None:
    fails(write("a.txt", b"one\ntw\0o"), "NUL", "line 2, byte 6")


def test_a_picture_is_refused(write: Write) -> None:
    picture = b"\xff\xd8\xff\xe0\x00\x10JFIF" + random.Random(0).randbytes(5000)
    fails(write("picture.txt", picture), "binary|UTF-8")


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n\t", b"\xef\xbb\xbf"])
def test_a_file_without_text(write: Write, content: bytes) -> None:
    empty = write("empty.txt", content)
    fails(empty, "no text")
    documents, stats = read(empty, write("full.txt", "one"))
    assert documents == [("one",)]
    assert (stats.files, stats.empty_files) == (2, 1)


def test_a_file_that_grows_while_it_is_read(write: Write) -> None:
    path = write("a.txt", "one\n\ntwo\n")
    documents = read_documents([path], stats=TextStats())
    next(documents)
    with path.open("a") as file:
        file.write("three\n")
    with pytest.raises(ElectraError, match="changed while"):
        list(documents)


# ---------------------------------------------------------------- compression


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_text_of_several_streams(write: Write, suffix: str) -> None:
    compress = COMPRESS[suffix]
    path = write(f"a.txt{suffix}", compress(b"one\ntw") + compress(b"o\n\nthree\n"))
    assert read(path)[0] == [("one", "two"), ("three",)]


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kept", [0.3, 0.7, 0.99])
def test_truncated_compressed_text(write: Write, suffix: str, kept: float) -> None:
    text = "\n".join(str(random.Random(i).random()) for i in range(20_000)).encode()
    data = COMPRESS[suffix](text)
    fails(write(f"a.txt{suffix}", data[: int(len(data) * kept)]), "cannot be read to its end")


@pytest.mark.parametrize("suffix", COMPRESS)
def test_what_is_not_compressed_at_all(write: Write, suffix: str) -> None:
    fails(write(f"a.txt{suffix}", b"just some plain text"), "cannot be read to its end", "line 1")


# ---------------------------------------------------------------- JSON lines and Parquet


def test_json_rows_are_documents(write: Write) -> None:
    rows = [{"text": "one\r\ntwo\n\nthree", "id": 1}, {"text": ""}, {"text": "four\0!"}]
    content = "\n".join(map(json.dumps, rows)) + "\n\n"
    documents, stats = read(write("a.jsonl", content))
    assert documents == [("one", "two", "three"), ("four!",)]
    assert (stats.empty_rows, stats.nul_removed, stats.carriage_returns) == (1, 1, 1)
    assert read(write("b.ndjson.gz", gzip.compress(content.encode())))[0] == documents


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ('{"text": "one"', "Broken JSON"),
        ("[" * 100_000, "Broken JSON"),
        ('["one"]', "not an object"),
        ('{"body": "one", "id": 3}', "no column 'text'; the columns are: body, id"),
        ('{"text": null}', "is null here"),
        ('{"text": 3}', "is int here"),
        ('{"text": ["one"]}', "is list here"),
        (r'{"text": "a\ud800b"}', "surrogate"),
        ('{"text": ' + "1" * 5000 + "}", "Broken JSON"),
    ],
)
def test_bad_json_names_file_and_line(write: Write, row: str, what: str) -> None:
    fails(write("a.jsonl", '{"text": "fine"}\r\n' + row + "\n"), what, "line 2")


def test_a_json_row_without_end(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(electra.data.text, "MAX_ROW", 1 << 17)
    fails(write("a.json", '{"text": "' + "x" * (1 << 18)), "more than 131,072", "line 1")


def write_parquet(path: Path, **columns: list[object]) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", body=["one\ntwo", "", "three"], n=[1, 2, 3])
    documents, stats = read(path, column="body")
    assert documents == [("one", "two"), ("three",)]
    assert (stats.empty_rows, stats.bytes) == (1, 11)


def test_bad_parquet_names_file_and_row(tmp_path: Path, write: Write) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=["one", "two", None], n=[1, 2, 3])
    fails(path, "is null here", "row 3")
    fails(path, "is int here", "row 1", column="n")
    fails(path, "no column 'body'; the columns are: n, text", column="body")
    fails(write("b.parquet", path.read_bytes()[:-20]), "cannot be read")
    fails(write("c.parquet", b"one\ntwo"), "cannot be read")
    fails(write("d.parquet.gz", b""), "outer compression")


# ---------------------------------------------------------------- inputs


def test_inputs_in_any_order_give_the_same_list(write: Write, tmp_path: Path) -> None:
    files = [write(name, "x") for name in ("b/2.txt", "b/1.jsonl", "a.md", "c/d/e.txt.gz")]
    write("b/notes.csv", "not text")
    write("b/.hidden.txt", "x")
    (tmp_path / "link.txt").symlink_to(files[0])
    expected = sorted(files, key=str)
    assert expand_inputs([tmp_path]) == expected
    given = [tmp_path / "c", str(tmp_path / "*.md"), files[0], tmp_path / "b", files[0]]
    assert expand_inputs(given) == expected
    assert expand_inputs(given[::-1]) == expected
    assert expand_inputs([str(tmp_path / "**/*.txt*")]) == [files[0], files[3]]


def test_inputs_that_are_no_files(write: Write, tmp_path: Path) -> None:
    def refuses(what: str, *inputs: Path) -> None:
        with pytest.raises(ElectraError, match=what) as caught:
            expand_inputs(inputs)
        assert caught.value.fix

    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "again").symlink_to(tmp_path / "up")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s.txt"))
        refuses("pipe, socket or device", tmp_path / "s.txt")
    refuses("No such file", tmp_path / "none.txt")
    refuses("pipe, socket or device", tmp_path / "pipe.txt")
    refuses("symbolic links|symbolic link", tmp_path / "loop.txt")
    refuses("back to a directory above", tmp_path / "up")
    refuses("no text file", tmp_path / "empty")
    refuses("No file matches", tmp_path / "*.parquet")
    refuses("'.csv' files is not known", write("a.csv", "x"))
    refuses("No input")


def test_draws_are_uniform_and_depend_on_every_argument() -> None:
    draws = [draw(0, "held-out", number) for number in range(20_000)]
    assert all(0 <= value < 1 for value in draws)
    assert abs(sum(value < 0.1 for value in draws) / 20_000 - 0.1) < 0.01
    assert draw(0, "held-out", 7) == draws[7]
    assert len({draw(0, "a", 1), draw(1, "a", 1), draw(0, "b", 1), draw(0, "a", 2)}) == 4


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("shape", ["one line", "one document", "gzip"])
def test_memory_is_flat_in_the_size_of_the_input(tmp_path: Path, shape: str) -> None:
    code = """
import re, sys
from pathlib import Path
from electra.data.text import TextStats, read_documents
stats = TextStats()
for _ in read_documents([Path(sys.argv[1])], stats=stats):
    pass
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(stats.characters, peak // 1024)
"""
    peaks = list[int]()
    for megabytes in (2, 60):
        path = tmp_path / ("a.txt.gz" if shape == "gzip" else "a.txt")
        line = b"word " * 40 + (b"\n" if shape == "one document" else b"")
        with (gzip.open if shape == "gzip" else open)(path, "wb") as file:
            for _ in range(megabytes * 5000):
                file.write(line)
        printed = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(electra.data.text.__file__).parents[2],
        ).stdout
        characters, peak = map(int, printed.split())
        assert characters == megabytes * 5000 * 200
        peaks.append(peak)
    assert peaks[1] < peaks[0] + 10
    assert peaks[1] < 100
