"""Raw text in, documents out, in flat memory whatever the files look like.

Comes in: files, directories and globs of plain text, JSON lines or Parquet, also compressed. Goes
out: a stream of `Document`s in the order of the sorted paths, and a `TextStats` that says what was
seen and repaired. Nothing is dropped or guessed silently; every outcome is one of these:

| what is found                                | outcome                                          |
|----------------------------------------------|--------------------------------------------------|
| LF, CRLF or CR                               | line end; carriage returns are counted           |
| U+2028, U+2029, U+0085, form feed            | kept: part of the line, not a line end           |
| blank line in plain text                     | ends the document; counted                       |
| end of file, with or without a line end      | ends the document                                |
| UTF-8 byte order mark                        | removed and counted                              |
| line over 65,536 characters                  | cut at white space if there is any; counted      |
| document over 262,144 characters             | cut between lines into consecutive documents     |
| NUL inside a JSON or Parquet string          | removed and counted                              |
| empty or blank file, empty JSON/Parquet text | skipped and counted                              |
| the same file given twice                    | read once                                        |
| no text in any of the files                  | error                                            |
| invalid UTF-8                                | error with file, line and byte                   |
| UTF-16 or UTF-32, NUL byte, binary file      | error with file and, for NUL, line and byte      |
| damaged or truncated .gz .bz2 .xz .zst       | error with file and the line reached             |
| broken JSON, not an object, lone surrogate   | error with file and line                         |
| column missing, null or not a string         | error with file and line or row, and the columns |
| JSON row over 64 MiB of characters           | error with file and line                         |
| missing path, FIFO, socket, device           | error with the path                              |
| directory without text, loop of links        | error with the path                              |
| file that changes while it is read           | error with the path                              |
"""

from __future__ import annotations

import bz2
import codecs
import glob
import gzip
import hashlib
import json
import lzma
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from .errors import ElectraError

MAX_LINE = 1 << 16  # characters
MAX_DOCUMENT = 1 << 18  # characters
MAX_ROW = 1 << 26  # characters of one JSON row, which can only be parsed whole
_BLOCK = 1 << 20  # bytes

_FORMATS = {
    "": "plain",
    ".txt": "plain",
    ".text": "plain",
    ".md": "plain",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
}
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_BYTE_ORDER_MARKS = {  # UTF-32 first: its little-endian mark begins with that of UTF-16
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


@dataclass(frozen=True, slots=True)
class Document:
    """Lines of text that belong together, none of them blank, and where they begin."""

    lines: tuple[str, ...]
    file: str
    line: int
    """1-based line of the file, or row of a Parquet file."""


@dataclass
class TextStats:
    """What the readers saw, what they repaired and what they skipped."""

    files: int = 0
    bytes: int = 0
    """Bytes of text after decompression."""
    documents: int = 0
    lines: int = 0
    characters: int = 0
    blank_lines: int = 0
    empty_files: int = 0
    empty_rows: int = 0
    carriage_returns: int = 0
    byte_order_marks: int = 0
    nul_removed: int = 0
    long_lines_cut: int = 0
    long_documents_cut: int = 0

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def expand_inputs(inputs: Sequence[str | Path]) -> list[Path]:
    """The files behind paths, directories and globs: sorted, each file once, all of them regular.

    A directory stands for the files below it whose suffix is known; hidden ones are left out. A
    file that is named outright must have a known suffix or none.
    """
    found: set[Path] = set()
    for given in inputs:
        path = Path(given)
        if not os.path.lexists(path) and glob.has_magic(str(given)):
            matches = [Path(match) for match in glob.glob(str(given), recursive=True)]
            if not matches:
                raise ElectraError(
                    "No file matches the pattern.", where=str(given), fix="check the pattern"
                )
        else:
            matches = [path]
        for match in matches:
            found.update(_files_of(match))
    if not found:
        raise ElectraError("No input was given.", fix="name at least one text file or directory")
    unique: dict[tuple[int, int], Path] = {}
    for path in sorted(found, key=str):
        status = _status(path)
        unique.setdefault((status.st_dev, status.st_ino), path)
    return list(unique.values())


def read_documents(
    paths: Iterable[Path], *, column: str = "text", stats: TextStats
) -> Iterator[Document]:
    """Documents of all files in order; `stats` is complete when the iterator is exhausted.

    A document longer than `MAX_DOCUMENT` characters comes as several consecutive ones, cut between
    lines, so that a whole library in one file without blank lines still runs in flat memory.
    """
    last: Path | None = None
    for path in paths:
        before = _status(path)
        documents = stats.documents
        yield from _assemble(path, _numbered_lines(path, column, stats), stats)
        after = _status(path)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise ElectraError(
                "The file changed while it was read.",
                where=str(path),
                fix="wait until whatever writes it is done, then give the same command again",
            )
        stats.files += 1
        stats.empty_files += stats.documents == documents
        last = path
    if stats.documents == 0:
        more = f" and {stats.files - 1} other files" if stats.files > 1 else ""
        raise ElectraError(
            "There is no text: only empty files and blank lines.",
            where=f"{last}{more}",
            fix="check that these are the right files",
        )


def _files_of(path: Path, above: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    status = _status(path)
    if stat.S_ISREG(status.st_mode):
        _format_of(path)
        yield path
        return
    if not stat.S_ISDIR(status.st_mode):
        raise ElectraError(
            "This is a pipe, socket or device, not a file.",
            where=str(path),
            fix="write the text to a file first: it is read more than once",
        )
    here = (status.st_dev, status.st_ino)
    if here in above:
        raise ElectraError(
            "A symbolic link leads back to a directory above it.",
            where=str(path),
            fix="remove the link, or name the files themselves",
        )
    found = False
    for entry in sorted(os.listdir(path)):
        child = path / entry
        if entry.startswith("."):
            continue
        if stat.S_ISDIR(_status(child).st_mode):
            files = list(_files_of(child, (*above, here)))
        elif _known_suffix(child):
            files = list(_files_of(child))
        else:
            continue
        found |= bool(files)
        yield from files
    if not found and not above:
        raise ElectraError(
            "The directory holds no text file.",
            where=str(path),
            fix=f"known suffixes are {_suffixes()}; name files without a suffix one by one",
        )


def _status(path: Path) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise ElectraError(
            f"Cannot open: {error.strerror or error}.", where=str(path), fix="check the path"
        ) from error


def _split_suffix(path: Path) -> tuple[str, str]:
    """The suffixes that say format and compression, in lower case."""
    name = Path(path.name.lower())
    compression = name.suffix if name.suffix in _COMPRESSIONS else ""
    return Path(name.stem).suffix if compression else name.suffix, compression


def _known_suffix(path: Path) -> bool:
    suffix, _ = _split_suffix(path)
    return bool(suffix) and suffix in _FORMATS


def _suffixes() -> str:
    formats = " ".join(suffix for suffix in _FORMATS if suffix)
    return f"{formats}, each also with {' '.join(_COMPRESSIONS)}"


def _format_of(path: Path) -> tuple[str, str]:
    suffix, compression = _split_suffix(path)
    if suffix not in _FORMATS:
        raise ElectraError(
            f"The format of '{suffix}' files is not known.",
            where=str(path),
            fix=f"rename or convert it; known suffixes are {_suffixes()}",
        )
    if suffix == ".parquet" and compression:
        raise ElectraError(
            "A Parquet file cannot be read through an outer compression.",
            where=str(path),
            fix=f"decompress it: Parquet compresses inside, '{compression}' around it gains little",
        )
    return _FORMATS[suffix], compression


# Every format becomes one stream of (line number, line), in which an empty line ends a document.
_Lines = Iterator[tuple[int, str]]


def _numbered_lines(path: Path, column: str, stats: TextStats) -> _Lines:
    kind, compression = _format_of(path)
    if kind == "parquet":
        return _parquet_lines(path, column, stats)
    if kind == "json":
        return _json_lines(path, compression, column, stats)
    return _plain_lines(path, compression, stats)


def _assemble(path: Path, lines: _Lines, stats: TextStats) -> Iterator[Document]:
    name, collected, size, first = str(path), list[str](), 0, 1

    def document() -> Document:
        stats.documents += 1
        stats.lines += len(collected)
        stats.characters += size
        return Document(tuple(collected), name, first)

    for number, line in lines:
        if collected and (not line or size + len(line) > MAX_DOCUMENT):
            stats.long_documents_cut += bool(line)
            yield document()
            collected, size = [], 0
        if line:
            if not collected:
                first = number
            collected.append(line)
            size += len(line)
    if collected:
        yield document()


def _plain_lines(path: Path, compression: str, stats: TextStats) -> _Lines:
    for number, line in _decoded_lines(path, compression, stats, cut=True):
        if line.isspace() or not line:
            stats.blank_lines += 1
            line = ""
        yield number, line


def _json_lines(path: Path, compression: str, column: str, stats: TextStats) -> _Lines:
    for number, row in _decoded_lines(path, compression, stats, cut=False):
        where = f"{path}, line {number}"
        if row.isspace() or not row:
            stats.blank_lines += 1
            continue
        try:
            fields = json.loads(row)
        except (ValueError, RecursionError) as error:
            at = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            raise ElectraError(
                f"Broken JSON: {error}.", where=where + at, fix="write one JSON object per line"
            ) from error
        if not isinstance(fields, dict):
            raise ElectraError(
                f"The row is a JSON {type(fields).__name__}, not an object.",
                where=where,
                fix=f'write rows such as {{"{column}": "..."}}',
            )
        fields = cast(dict[str, Any], fields)
        if column not in fields:
            raise _missing_column(column, fields, where)
        yield from _row_lines(number, fields[column], column, where, stats)


def _parquet_lines(path: Path, column: str, stats: TextStats) -> _Lines:
    import pyarrow as pa
    from pyarrow import parquet

    number = 0
    try:
        # A buffered stream instead of whole column chunks keeps memory flat for any row group.
        with parquet.ParquetFile(path, buffer_size=_BLOCK, pre_buffer=False) as file:
            schema = file.schema_arrow
            if column not in schema.names:
                raise _missing_column(column, schema.names, str(path))
            for batch in file.iter_batches(batch_size=64, columns=[column]):
                for value in batch.column(0):
                    number += 1
                    where = f"{path}, row {number}"
                    for row, line in _row_lines(number, value.as_py(), column, where, stats):
                        stats.bytes += len(line.encode())
                        yield row, line
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ElectraError(
            f"The Parquet file cannot be read: {error}.",
            where=f"{path}, row {number + 1}",
            fix="the file is damaged or not Parquet; copy or write it again",
        ) from error


def _row_lines(number: int, value: object, column: str, where: str, stats: TextStats) -> _Lines:
    """The lines of one row, then an empty one, since a row is a document."""
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        raise ElectraError(
            f"Column '{column}' is {kind} here, not a string.",
            where=where,
            fix="remove the row, or write the text into it",
        )
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ElectraError(
                "The text holds half of a surrogate pair, which is not a character.",
                where=f"{where}, character {error.start + 1} of column '{column}'",
                fix="write the row again as proper UTF-8",
            ) from error
    if "\0" in value:
        stats.nul_removed += value.count("\0")
        value = value.replace("\0", "")
    stats.carriage_returns += value.count("\r")
    empty = True
    for line in value.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        if line and not line.isspace():
            empty = False
            for part in _cut(line, stats):
                yield number, part
    stats.empty_rows += empty
    yield number, ""


def _missing_column(column: str, present: Iterable[str], where: str) -> ElectraError:
    names = ", ".join(sorted(map(str, present))) or "none"
    return ElectraError(
        f"There is no column '{column}'; the columns are: {names}.",
        where=where,
        fix="name the column that holds the text",
    )


def _decoded_lines(path: Path, compression: str, stats: TextStats, *, cut: bool) -> _Lines:
    """Lines of a UTF-8 file; one too long is cut (`cut`) or refused, so the rest stays small."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    number, consumed, rest = 1, 0, ""
    try:
        # `closing`, since a reader that stops half way must not leave the file open.
        with closing(_open(path, compression)) as file:
            for block in _blocks(file):
                if consumed == 0:
                    marked = block
                    block = _without_mark(path, block, stats)
                    consumed = len(marked) - len(block)
                if (nul := block.find(b"\0")) >= 0:
                    raise _nul_byte(path, number + _line_ends(block[:nul]), consumed + nul)
                try:
                    text = decoder.decode(block)
                except UnicodeDecodeError as error:
                    raise _not_utf8(path, error, number, consumed + len(block)) from error
                consumed += len(block)
                if "\r" in text:
                    stats.carriage_returns += text.count("\r")
                    text = text.replace("\r\n", "\n").replace("\r", "\n")
                *lines, rest = (rest + text).split("\n")
                for line in lines:
                    if len(line) <= MAX_LINE:
                        yield number, line
                    else:
                        for part in _long_line(line, path, number, stats, cut):
                            yield number, part
                    number += 1
                if len(rest) > MAX_LINE:
                    *parts, rest = _long_line(rest, path, number, stats, cut)
                    for part in parts:
                        yield number, part
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        raise ElectraError(
            f"The file cannot be read to its end: {error}.",
            where=f"{path}, line {number}",
            fix="it is damaged or was cut short; copy or download it again",
        ) from error
    stats.bytes += consumed
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error, number, consumed) from error
    if rest:
        yield number, rest


def _open(path: Path, compression: str) -> BinaryIO:
    if compression == ".gz":
        return cast(BinaryIO, gzip.open(path))
    if compression == ".bz2":
        return cast(BinaryIO, bz2.open(path))
    if compression == ".xz":
        return cast(BinaryIO, lzma.open(path))
    if compression == ".zst":
        # Arrow's reader rather than that of `zstandard`, which takes a truncated file for a whole.
        import pyarrow as pa

        return pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")
    return open(path, "rb")


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """Blocks of a file that never end between CR and LF."""
    held = b""
    while block := file.read(_BLOCK):
        block = held + block
        held = b"\r" if block.endswith(b"\r") else b""
        yield block[: len(block) - len(held)]
    if held:
        yield held


def _without_mark(path: Path, block: bytes, stats: TextStats) -> bytes:
    if block.startswith(codecs.BOM_UTF8):
        stats.byte_order_marks += 1
        return block[len(codecs.BOM_UTF8) :]
    for mark, name in _BYTE_ORDER_MARKS.items():
        if block.startswith(mark):
            raise ElectraError(
                f"The file is {name}, not UTF-8.",
                where=str(path),
                fix=f"convert it: iconv -f {name} -t UTF-8 OLD > NEW",
            )
    return block


def _nul_byte(path: Path, line: int, offset: int) -> ElectraError:
    return ElectraError(
        "A NUL byte: this is a binary file, or text that is not UTF-8.",
        where=f"{path}, line {line}, byte {offset}",
        fix="give only text files; stray NUL bytes can be removed with: tr -d '\\000' < OLD > NEW",
    )


def _not_utf8(path: Path, error: UnicodeDecodeError, line: int, end: int) -> ElectraError:
    offset = end - len(error.object) + error.start
    value = error.object[error.start]
    return ElectraError(
        f"The text is not valid UTF-8: byte 0x{value:02x}, {error.reason}.",
        where=f"{path}, line {line + _line_ends(error.object[: error.start])}, byte {offset}",
        fix="convert it, for example: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW",
    )


def _line_ends(data: bytes) -> int:
    return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")


def _long_line(line: str, path: Path, number: int, stats: TextStats, cut: bool) -> list[str]:
    if cut:
        return _cut(line, stats)
    if len(line) > MAX_ROW:
        raise ElectraError(
            f"The row has more than {MAX_ROW:,} characters.",
            where=f"{path}, line {number}",
            fix="write one JSON object per line, one document per object",
        )
    return [line]


def _cut(line: str, stats: TextStats) -> list[str]:
    """A line in parts of at most MAX_LINE characters, between words where there are any."""
    parts, start = list[str](), 0
    while len(line) - start > MAX_LINE:
        low, high = start + MAX_LINE // 2, start + MAX_LINE
        space = max(line.rfind(character, low, high) for character in " \t\u3000")
        end = space + 1 if space >= 0 else high
        parts.append(line[start:end])
        start = end
    stats.long_lines_cut += len(parts)
    return [*parts, line[start:]]


def draw(seed: int, purpose: str, number: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments.

    Documents are chosen by it (held-out part, tokenizer sample), so the choice is the same in any
    process, after any interruption and for any number of workers.
    """
    key = hashlib.blake2b(f"{seed}/{purpose}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(key, "little") / 2**64
