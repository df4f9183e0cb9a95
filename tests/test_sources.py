"""Web archives, Wikipedia dumps, datasets and pipes: the same text as from files, or an error."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import commands_of, language
from hypothesis import given, settings
from hypothesis import strategies as st
from test_text import COMPRESS, fails, read

import electra.data.text
from electra import cli
from electra.data.corpus import prepare
from electra.data.sources import plain_text
from electra.data.text import MAX_DOCUMENT, TextStats, expand_inputs, read_documents
from electra.data.tokenizer import Tokenizer
from electra.errors import EXIT_STOPPED, EXIT_USER, ElectraError, Stopped
from electra.rundir import load_run

# ---------------------------------------------------------------- web archives


def record(
    body: bytes, kind: str = "conversion", media: str = "text/plain", length: object = None
) -> bytes:
    size = len(body) if length is None else length
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Type: {media}\r\nContent-Length: {size}\r\n"
    return head.encode() + b"\r\n" + body + b"\r\n\r\n"


INFO = record(b"software: x\r\n", "warcinfo", "application/warc-fields")
WET = [INFO, record("Zwölf Uhr\r\n\r\nund mehr\n".encode()), record(b"two\0\n"), record(b" \n")]


def archive(path: Path, *records: bytes) -> Path:
    """As crawlers write it: each record is a gzip member of its own."""
    path.write_bytes(b"".join(map(gzip.compress, records)))
    return path


def test_the_text_of_a_web_archive(tmp_path: Path) -> None:
    documents, stats = read(archive(tmp_path / "CC-MAIN-0.warc.wet.gz", *WET))
    assert documents == [("Zwölf Uhr", "und mehr"), ("two",)]
    assert (stats.other_records, stats.nul_removed, stats.empty_rows) == (1, 1, 1)


@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_an_archive_under_any_compression(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.warc{suffix}"
    path.write_bytes(COMPRESS.get(suffix, bytes)(b"".join(WET)))
    documents, _ = read(path)
    assert documents == [("Zwölf Uhr", "und mehr"), ("two",)]
    place = next(read_documents([path], stats=TextStats()))
    assert (place.file, place.line) == (str(path), 2)


@pytest.mark.parametrize(
    ("records", "what", "where"),
    [
        ([record(b"text", length=3)], "another length than it says", "record 1"),
        ([record(b"text", length=5)], "another length than it says", "record 1"),
        ([record(b"text", "metadata", length=10**17)], "another length", "record 1"),
        ([INFO, record(b"text", length=-4)], "does not say how long", "record 2"),
        ([INFO, record(b"text", length="4 4")], "does not say how long", "record 2"),
        ([INFO, record(b"text", length=10**19)], "does not say how long", "record 2"),
        ([record(b"text", length=1 << 27)], "more than 67,108,864 bytes", "record 1"),
        ([record(b"text")[:30]], "has no end", "record 1"),
        ([b"WARC/1.0\r\nX: " + b"x" * (1 << 17)], "has no end", "record 1"),
        ([b"WARC/1.0\r\n" + b"x: y\r\n" * (1 << 15)], "has no end", "record 1"),
        ([b"just some text\n"], "No record of a web archive begins", "record 1"),
        ([INFO, b"\r\n"], "No record of a web archive begins", "record 2"),
        ([INFO, record(b"caf\xe9")], "not valid UTF-8 at byte 3", "record 2"),
        ([INFO, record(b"HTTP/1.1 200 OK", "response")], "web page as it was sent", "record 2"),
    ],
)
def test_a_damaged_or_hostile_archive(
    tmp_path: Path, records: list[bytes], what: str, where: str
) -> None:
    fails(archive(tmp_path / "a.warc.gz", *records), what, where)


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9, 0.99])
def test_half_an_archive(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "a.warc.gz"
    data = gzip.compress(b"".join(WET))
    path.write_bytes(data[: int(kept * len(data))])
    fails(path, "cannot be read to its end", "record")


@settings(max_examples=50, deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=4))
def test_any_text_comes_back_from_an_archive(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = tmp_path_factory.mktemp("warc") / "a.warc"
    path.write_bytes(b"".join([record(b"one"), *(record(text.encode()) for text in texts)]))
    rows = path.with_suffix(".jsonl")
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["one", *texts]))
    assert read(path)[0] == read(rows)[0]


FLAT = """
import resource, sys
from pathlib import Path
from electra.errors import ElectraError
from electra.data.text import TextStats, read_documents
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for _ in read_documents([Path(sys.argv[1])], stats=TextStats()):
        pass
except ElectraError as error:
    print(error.what)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.parametrize("shape", ["skipped record", "head", "tag"])
def test_a_bomb_takes_no_memory(tmp_path: Path, shape: str) -> None:
    size = 200 << 20
    path = tmp_path / ("a.xml.gz" if shape == "tag" else "a.warc.gz")
    with gzip.open(path, "wb", compresslevel=1) as file:
        if shape == "tag":
            file.write(b"<mediawiki><page ")
        elif shape == "head":
            file.write(b"WARC/1.0\r\n")
        else:
            file.write(record(b"", "metadata", length=size)[:-4])
        for _ in range(size >> 20):
            file.write(b"x" * (1 << 20))
        file.write(b"\r\n\r\n" + record(b"text"))
    done = subprocess.run(
        [sys.executable, "-c", FLAT, str(path)], capture_output=True, text=True, timeout=300
    )
    *what, megabytes = done.stdout.splitlines()
    expected = {"skipped record": [], "head": ["has no end"], "tag": ["does not end"]}[shape]
    assert [end in text for end, text in zip(expected, what, strict=True)] == [True] * len(what)
    assert int(megabytes) < 100, done.stdout + done.stderr


# ---------------------------------------------------------------- Wikipedia dumps

SITE = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="de">
<siteinfo><namespaces><namespace key="0" /><namespace key="6">Datei</namespace>
<namespace key="14">Kategorie</namespace></namespaces></siteinfo>
"""
ARTICLE = """{{Infobox
| a = {{b|c=|}} [[d]]
}}
[[Datei:x.jpg|thumb|Ein [[Bild]] von ''x''.]]
Die '''Elektra''' ist eine [[Griechische Mythologie|griechische]] [[Figur]].&lt;ref name="a">Buch,
S. 3.&lt;/ref> Mehr&amp;nbsp;dazu&lt;ref name="a" /> steht [https://example.org hier]. &lt;!-- nicht
{{das]] -->
{| class="wikitable"
| Zelle || 2
|}
== Werke ==
* ''Elektra'' von [[Sophokles]]&lt;br />und andere
# [[:Kategorie:Drama|Drama]] &lt;small>klein&lt;/small>
:Formel &lt;math>x^2&lt;/math> hier
__TOC__
[[Kategorie:Figur]]
"""


def page(title: str, text: str, ns: int = 0, extra: str = "") -> str:
    revision = f'<revision><text bytes="1">{text}</text></revision>'
    return f"<page><title>{title}</title><ns>{ns}</ns>{extra}{revision}</page>\n"


def dump(*pages: str) -> str:
    return f"{SITE}{''.join(pages)}</mediawiki>\n"


def test_the_articles_of_a_wikipedia_dump(tmp_path: Path) -> None:
    pages = dump(
        page("Elektra", ARTICLE),
        page("Electra", "#REDIRECT [[Elektra]]", extra='<redirect title="Elektra" />'),
        page("Diskussion:Elektra", "Frage", ns=1),
        page("Leer", "{{nur eine Vorlage}}"),
        page("Berg", "Ein Berg."),
    ).encode()
    half = len(pages) // 2
    # Multistream dumps are several bz2 streams back to back; large ones come in numbered parts.
    for name in ("dewiki-pages-articles.xml.bz2", "dewiki-pages-articles1.xml-p1p5.bz2"):
        path = tmp_path / name
        path.write_bytes(bz2.compress(pages[:half]) + bz2.compress(pages[half:]))
        documents, stats = read(path)
        assert documents == [
            (
                "Die Elektra ist eine griechische Figur. Mehr\xa0dazu steht hier.",
                "Elektra von Sophokles",
                "und andere",
                "Drama klein",
                "Formel  hier",
            ),
            ("Ein Berg.",),
        ]
        assert (stats.other_records, stats.empty_rows) == (2, 1)


LAUGHS = (
    '<!DOCTYPE m [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]><mediawiki>&b;</mediawiki>'
)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (LAUGHS, "document type of its own"),
        ("<html><body>text</body></html>", "no dump of MediaWiki: the XML begins with <html>"),
        (dump(page("A", "text"))[:-20], "The XML is broken: unclosed token"),
        (dump(page("A", "text <b>")), "The XML is broken: mismatched tag"),
        ("", "The XML is broken"),
        ("plain text", "The XML is broken"),
        (dump(page("A", "&unknown;")), "The XML is broken: undefined entity"),
        (dump(page("A", "x" * 3000)), "The page has more than 2,048 characters"),
    ],
)
def test_what_is_no_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, what: str
) -> None:
    monkeypatch.setattr(electra.data.text, "MAX_ROW", 2048)
    path = tmp_path / "a.xml"
    path.write_text(text)
    fails(path, what)


def test_the_commands_of_the_page_on_wikipedia(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pages = [page(f"Seite {i}", text) for i, text in enumerate(language(60).split("\n\n"))]
    data = bz2.compress(dump(*pages, page("Elektra", ARTICLE)).encode())
    (tmp_path / "dewiki-latest-pages-articles.xml.bz2").write_bytes(data)
    short = ["--run.train-steps", "2", "--data.batch-size", "2", "--run.device", "cpu", "--quiet"]
    sizes = ["--encoder.layers", "1", "--encoder.hidden-size", "64", "--encoder.ffn-size", "64"]
    more = {"pretrain": [*short, *sizes, "--generator.depth", "1"], "prepare": ["--workers", "1"]}
    for command in commands_of("wikipedia.md"):
        code = cli.run([*command, *more.get(command[0], [])])
        assert code == 0, capsys.readouterr().err
    assert load_run(tmp_path / "run").step == 2


@pytest.mark.parametrize(
    ("wikitext", "plain"),
    [
        ("a {{b never closed", "a {{b never closed"),
        ("a [[b {{c]] d", "a b {{c d"),
        ("a }} b ]] c", "a  b  c"),
        ("[[a|b [[c|d]] e]]", "b d e"),
        ("a<ref>b {{c</ref> d", "a d"),
        ("[[image:x.png|[[y]]]]z", "z"),
        ("[[a|]]", "a"),
        ("1 < 2 > 1", "1 < 2 > 1"),
        ("'''''x''''' it's", "x it's"),
    ],
)
def test_marks_that_are_odd(wikitext: str, plain: str) -> None:
    assert plain_text(wikitext, {"file", "image"}) == plain


@pytest.mark.parametrize(
    "part",
    ["[[a", "{{", "[[a|]]", "]]", "<ref>", "<ref", "<!--", "''", "[http://a ", "\n{|", "__A"],
)
def test_any_wikitext_takes_linear_time(part: str) -> None:
    text = part * (300_000 // len(part))
    begin = time.process_time()
    plain_text(text + text.replace("[", "]").replace("{", "}"), {"file"})
    assert time.process_time() - begin < 20  # about 0.2 s; quadratic time would be much more


# ---------------------------------------------------------------- datasets


def table(texts: list[Any], column: str = "text") -> pa.Table:
    return pa.table({column: texts, "n": list(range(len(texts)))})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A dataset as it lies on the Hub, without any script: two configurations in Parquet."""
    path = tmp_path / "repository"
    for config, shards in {"de": 3, "fr": 1}.items():
        (path / config).mkdir(parents=True)
        for shard in range(shards):
            rows = [f"{config} text {shard} {i}\nline two" for i in range(40)]
            name = f"train-{shard:05d}-of-{shards:05d}.parquet"
            pq.write_table(table(rows), path / config / name, row_group_size=7)
    pq.write_table(table(["a test"]), path / "de" / "test-00000-of-00001.parquet")
    configs = "".join(
        f"- config_name: {config}\n  data_files:\n"
        + "".join(f"  - split: {s}\n    path: {config}/{s}-*\n" for s in splits)
        for config, splits in {"de": ["train", "test"], "fr": ["train"]}.items()
    )
    (path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return path


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    library = pytest.importorskip("datasets", reason="extra datasets is not installed")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    library.disable_progress_bars()
    return library


def hub_texts(name: str, column: str = "text") -> list[tuple[str, ...]]:
    stats = TextStats()
    return [d.lines for d in read_documents(expand_inputs([name]), column=column, stats=stats)]


@pytest.mark.usefixtures("datasets")
def test_a_dataset_is_read_shard_by_shard(repository: Path) -> None:
    expected = [(f"de text {s} {i}", "line two") for s in range(3) for i in range(40)]
    assert hub_texts(f"hf:{repository}:de") == expected
    assert hub_texts(f"hf:{repository}:de:train") == expected
    assert hub_texts(f"hf:{repository}:de:test") == [("a test",)]
    assert hub_texts(f"hf:{repository}:fr")[0] == ("fr text 0 0", "line two")


def test_a_dataset_from_the_cache_without_a_network(datasets: Any, repository: Path) -> None:
    cache = datasets.config.HF_DATASETS_CACHE
    datasets.load_dataset(str(repository), "fr", cache_dir=str(cache))
    shutil.move(cache / "repository", cache / "someone___some")
    for file in cache.rglob("repository-*.arrow"):
        file.rename(file.with_name(file.name.replace("repository", "some")))
    assert hub_texts("hf:someone/some:fr") == hub_texts(f"hf:{repository}:fr")


@pytest.mark.usefixtures("datasets")
@pytest.mark.parametrize(
    ("name", "column", "what"),
    [
        ("hf:nobody/nothing", "text", "cannot be opened: .*nobody/nothing"),
        ("hf:{}", "text", "cannot be opened: .*Config name is missing"),
        ("hf:{}:en", "text", "cannot be opened: .*'en' not found. Available: .*de"),
        ("hf:{}:de:dev", "text", "cannot be opened: Bad split: dev. Available splits: .*train"),
        ("hf:", "text", "names no dataset"),
        ("hf:{}:de:train:1", "text", "names no dataset"),
        ("hf:{}:de", "body", "no column 'body'; the columns are: n, text"),
        ("hf:{}:de", "n", "Column 'n' is int here"),
    ],
)
def test_a_dataset_that_cannot_be_read(repository: Path, name: str, column: str, what: str) -> None:
    with pytest.raises(ElectraError, match=what) as caught:
        hub_texts(name.format(repository), column)
    assert caught.value.where.startswith("hf:")
    assert caught.value.fix


@pytest.mark.usefixtures("datasets")
def test_a_damaged_shard_of_a_dataset(repository: Path) -> None:
    file = repository / "de" / "train-00001-of-00003.parquet"
    data = bytearray(file.read_bytes())
    data[4:400] = bytes(396)
    file.write_bytes(data)
    with pytest.raises(ElectraError, match="cannot be read to its end") as caught:
        hub_texts(f"hf:{repository}:de")
    assert caught.value.where.endswith("row 41")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ElectraError, match="datasets is not installed") as caught:
        expand_inputs(["hf:a/b"])
    assert "electra[datasets]" in caught.value.fix


def shards(corpus: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(corpus.glob("*.bin"))}


@pytest.mark.usefixtures("datasets")
def test_workers_and_interruptions_change_nothing_in_a_dataset(
    repository: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    name = f"hf:{repository}:de"
    options: dict[str, Any] = {"sequence_length": 23, "held_out_percent": 10.0, "shard_bytes": 200}
    manifest = prepare([name], tokenizer, tmp_path / "one", workers=1, **options)
    assert manifest.inputs["files"] == [{"path": name, "size": 0}]
    prepare([name], tokenizer, tmp_path / "two", workers=2, **options)
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls == 8

    with pytest.raises(Stopped):
        prepare([name], tokenizer, tmp_path / "three", workers=1, should_stop=stop, **options)
    assert 0 < len(shards(tmp_path / "three")) < len(shards(tmp_path / "one"))
    prepare([name], tokenizer, tmp_path / "three", workers=1, **options)
    for other in ("two", "three"):
        assert shards(tmp_path / other) == shards(tmp_path / "one")
    # The rows are those of the files themselves.
    files = str(repository / "de" / "train-*")
    prepare([files], tokenizer, tmp_path / "files", workers=1, **options)
    assert shards(tmp_path / "files") == shards(tmp_path / "one")
    # Another revision is another corpus.
    file = repository / "de" / "train-00002-of-00003.parquet"
    pq.write_table(table(["new"]), file)
    with pytest.raises(ElectraError, match="the input files are others or were changed"):
        prepare([name], tokenizer, tmp_path / "one", workers=1, **options)


def test_a_folder_that_datasets_saved(datasets: Any, tmp_path: Path) -> None:
    texts = [f"text {i}\nmore" for i in range(30)]
    splits = {"train": datasets.Dataset.from_dict({"text": texts}).shuffle(seed=1)}
    folder = tmp_path / "saved"
    datasets.DatasetDict(splits).save_to_disk(folder, num_shards={"train": 3})
    documents, stats = read(folder)
    assert documents == [tuple(text.split("\n")) for text in splits["train"]["text"]]
    assert stats.files == 3


def arrow(path: Path, *batches: pa.RecordBatch) -> Path:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return path


def test_arrow_streams(tmp_path: Path) -> None:
    rows = [pa.record_batch({"text": ["one\r\ntwo", ""]}), pa.record_batch({"text": ["three"]})]
    path = arrow(tmp_path / "a.arrow", *rows)
    documents, stats = read(path)
    assert documents == [("one", "two"), ("three",)]
    assert stats.empty_rows == 1
    fails(path, "no column 'body'; the columns are: text", column="body")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    fails(path, "The Arrow file cannot be read", "row")
    fails(arrow(tmp_path / "b.arrow", pa.record_batch({"text": ["a", None]})), "is null", "row 2")
    (tmp_path / "c.arrow").write_bytes(b"no arrow at all")
    fails(tmp_path / "c.arrow", "The Arrow file cannot be read", "row 1")
    wrong = pa.StringArray.from_buffers(
        1, pa.py_buffer(b"\0\0\0\0\4\0\0\0"), pa.py_buffer(b"\xff" * 4)
    )
    bad = arrow(tmp_path / "d.arrow", pa.RecordBatch.from_arrays([wrong], ["text"]))
    fails(bad, "The Arrow file cannot be read", "row 1")


# ---------------------------------------------------------------- standard input


def piped(
    arguments: list[str | Path], text: bytes, cwd: Path
) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "electra", *map(str, arguments)]
    return subprocess.run(command, input=text, capture_output=True, timeout=300, cwd=cwd)


def test_text_from_a_pipe(text: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    def arguments(out: str, given: str | Path) -> list[str | Path]:
        options = ["--tokenizer", tokenizer_dir, "--length", "23", "--workers", "2"]
        return ["prepare", "--input", given, "--out", tmp_path / out, *options]

    data = text.read_bytes()
    done = piped(arguments("pipe", "-"), data, tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    assert piped(arguments("file", text), b"", tmp_path).returncode == 0
    assert shards(tmp_path / "pipe") == shards(tmp_path / "file")
    # The same command again: with the same text it is done, with another it is refused.
    assert piped(arguments("pipe", "-"), data, tmp_path).returncode == 0
    done = piped(arguments("pipe", "-"), data + b"more", tmp_path)
    assert done.returncode == EXIT_USER
    assert b"Other text was piped in before" in done.stderr
    assert sorted(p.name for p in (tmp_path / "pipe").glob(".*")) == [".lock"]
    done = piped(["check", "--input", "-"], data, tmp_path)
    assert done.returncode == EXIT_USER
    assert b"cannot be read here" in done.stdout + done.stderr


def test_a_tokenizer_from_a_pipe(text: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments: list[str | Path] = ["tokenizer", "--input", "-", "--out", out, "--vocab-size", "97"]
    done = piped(arguments, text.read_bytes(), tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    assert (out / "vocab.txt").read_bytes() == (tokenizer_dir / "vocab.txt").read_bytes()
    assert not (out / "stdin.txt").exists()


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGKILL])
def test_a_stop_while_the_pipe_is_silent(
    kind: signal.Signals, text: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    data, out = text.read_bytes(), tmp_path / "out"
    options = ["--tokenizer", str(tokenizer_dir), "--length", "23", "--workers", "1"]
    command = [sys.executable, "-m", "electra", "prepare", "--input", "-", "--out", str(out)]
    with subprocess.Popen([*command, *options], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(data[:1000])
        process.stdin.flush()
        waiting = out / ".stdin.txt.tmp"
        while not (waiting.exists() and waiting.stat().st_size == 1000):
            assert process.poll() is None
            time.sleep(0.01)
        os.kill(process.pid, kind)
        expected = EXIT_STOPPED if kind == signal.SIGTERM else -signal.SIGKILL
        assert process.wait(timeout=60) == expected
    assert not (out / "stdin.txt").exists()
    assert piped([*command[3:], *options], data, tmp_path).returncode == 0
    assert (out / "stdin.txt").read_bytes() == data


def test_a_long_record_is_cut_like_any_document(tmp_path: Path) -> None:
    body = b"\n".join([b"x" * 1000] * 600)
    documents, stats = read(archive(tmp_path / "a.warc.gz", record(body)))
    assert stats.long_documents_cut == 2
    assert all(sum(map(len, lines)) <= MAX_DOCUMENT for lines in documents)


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz", "a.xml", "a.xml.bz2", "a.arrow"])
def test_any_damage_is_an_error_of_ours_or_harmless(name: str, tmp_path: Path) -> None:
    path, draw = tmp_path / name, random.Random(name)
    if name == "a.arrow":
        arrow(path, *[pa.record_batch({"text": ["one", "two\nthree", "four"]})] * 3)
    else:
        data = b"".join(WET) if "warc" in name else dump(*[page("A", ARTICLE)] * 3).encode()
        path.write_bytes(COMPRESS.get(path.suffix, bytes)(data))
    whole = path.read_bytes()
    for _ in range(250):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(data))
            change = draw.choice(["flip", "cut", "double", "number"])
            if change == "flip":
                data[at] ^= 1 << draw.randrange(8)
            elif change == "cut":
                del data[at : at + draw.randint(1, 40)]
            elif change == "double":
                data[at:at] = data[at : at + 40]
            else:
                data[at : at + 1] = draw.choice([b"9" * 12, b"\0", b"\xff\xff\xff\x7f", b"<", b"&"])
            data = data or bytearray(b"x")
        path.write_bytes(data)
        with contextlib.suppress(ElectraError):
            read(path)
