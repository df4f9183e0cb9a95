"""Raw text in, documents out, in flat memory whatever the files look like.

Comes in: files, directories and globs of plain text, JSON lines, Parquet, Arrow, web archives or
Wikipedia dumps, also compressed, and datasets of the Hub (`sources.py`). Goes out: a stream of
`Document`s in the order of the sorted paths, and a `TextStats` that says what was seen and
repaired. Nothing is dropped or guessed silently: docs/errors.md has a table of everything that can
be odd about an input, with what is repaired, skipped and counted, or refused with its place.
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
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..errors import ElectraError
from .sources import REPAIR, HubDataset, Texts, warc_texts, wiki_texts

MAX_LINE = 1 << 16  # characters
MAX_DOCUMENT = 1 << 18  # characters
MAX_ROW = 1 << 26  # characters of one JSON row or record, which can only be parsed whole
_BLOCK = 1 << 20  # bytes

Source = Path | HubDataset

_FORMATS = {
    **dict.fromkeys(("", ".txt", ".text", ".md"), "plain"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    **dict.fromkeys((".warc", ".wet"), "warc"),
    ".xml": "wiki",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_OF_DATASETS = ("dataset_info.json", "dataset_dict.json", "state.json")  # describe a saved dataset


def _open_zstd(path: Path) -> BinaryIO:
    # Arrow's reader rather than that of `zstandard`, which takes a truncated file for a whole one.
    import pyarrow as pa

    return pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")


_OPEN: dict[str, Callable[[Path], Any]] = {  # by the suffix that says the compression
    "": partial(open, mode="rb"),
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}
_SUFFIXES = f"{' '.join(filter(None, _FORMATS))}, each also with {' '.join(filter(None, _OPEN))}"
_UNREADABLE = (EOFError, OSError, zlib.error, lzma.LZMAError)


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
    other_records: int = 0
    """Records of a web archive that are no text, pages of a dump that are no article."""
    carriage_returns: int = 0
    byte_order_marks: int = 0
    nul_removed: int = 0
    long_lines_cut: int = 0
    long_documents_cut: int = 0


def expand_inputs(inputs: Sequence[str | Path]) -> list[Source]:
    """The files behind paths, directories and globs: sorted, each file once, all of them regular.

    A directory stands for the files below it whose suffix is known; hidden ones are left out. A
    file that is named outright must have a known suffix or none. hf:NAME is a dataset of the Hub.
    """
    found: list[Source] = []
    for given in map(str, inputs):
        if given.startswith("hf:"):
            found.append(HubDataset.open(given))
            continue
        if given == "-":
            fix = "write it to a file first; prepare, tokenizer and pretrain read a pipe"
            raise ElectraError("What is piped in cannot be read here.", given, fix)
        is_pattern = glob.has_magic(given) and not os.path.lexists(given)
        matches = glob.glob(given, recursive=True) if is_pattern else [given]
        if not matches:
            raise ElectraError("No file matches the pattern.", given, "check the pattern")
        for match in matches:
            files = list(_files_of(Path(match)))
            if not files:
                fix = f"known suffixes are {_SUFFIXES}; name files without a suffix one by one"
                raise ElectraError("The directory holds no text file.", match, fix)
            found += files
    if not found:
        raise ElectraError("No input was given.", "", "name at least one text file or directory")
    unique: dict[object, Source] = {}
    for source in sorted(found, key=str):
        status = file_status(source) if isinstance(source, Path) else None
        unique.setdefault((status.st_dev, status.st_ino) if status else str(source), source)
    return list(unique.values())


def state_of(source: Source) -> tuple[int, int | str]:
    """Its size, 0 where nobody knows it, and what changes when its content does."""
    if isinstance(source, HubDataset):
        return 0, source.version
    status = file_status(source)
    return status.st_size, status.st_mtime_ns


def read_documents(
    paths: Iterable[Source], *, column: str = "text", stats: TextStats
) -> Iterator[Document]:
    """Documents of all files in order; `stats` is complete when the iterator is exhausted.

    A document longer than `MAX_DOCUMENT` characters comes as several consecutive ones, cut between
    lines, so that a whole library in one file without blank lines still runs in flat memory.
    """
    path = None
    for path in paths:
        before, documents = state_of(path), stats.documents
        yield from _assemble(path, _document_lines(path, column, stats), stats)
        if state_of(path) != before:
            fix = "wait until whatever writes it is done, then give the same command again"
            raise ElectraError("The file changed while it was read.", path, fix)
        stats.files += 1
        stats.empty_files += stats.documents == documents
    if stats.documents == 0:
        where = f"{path} and {stats.files - 1} other files" if stats.files > 1 else path
        what = "There is no text: only empty files and blank lines."
        raise ElectraError(what, where, "check that these are the right files")


# ---------------------------------------------------------------- files


def _files_of(path: Path, above: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    status = file_status(path)
    here = (status.st_dev, status.st_ino)
    if stat.S_ISREG(status.st_mode):
        _format_of(path)
        yield path
    elif not stat.S_ISDIR(status.st_mode):
        fix = "write the text to a file first: it is read more than once"
        raise ElectraError("This is a pipe, socket or device, not a file.", path, fix)
    elif here in above:
        fix = "remove the link, or name the files themselves"
        raise ElectraError("A symbolic link leads back to a directory above it.", path, fix)
    else:
        names = _names_in(path)
        is_saved = "dataset_info.json" in names or "dataset_dict.json" in names
        for name in names:
            if is_saved and name in _OF_DATASETS:
                continue
            suffix, child = split_suffix(Path(name))[0], path / name
            is_known = suffix != "" and suffix in _FORMATS
            if not name.startswith(".") and (is_known or os.path.isdir(child)):
                yield from _files_of(child, (*above, here))


def _names_in(directory: Path) -> list[str]:
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        what = f"The directory cannot be read: {error.strerror}."
        raise ElectraError(what, directory, "check who may read it") from error
    for name in names:
        if name != name.encode(errors="ignore").decode():
            what, fix = "The name of a file is not valid UTF-8.", "rename the file"
            raise ElectraError(what, ascii(str(directory / name)), fix)
    return names


def file_status(path: Path) -> os.stat_result:
    """What the system knows of a file; raises an ElectraError if there is none."""
    try:
        return os.stat(path)
    except OSError as error:
        what = f"Cannot open: {error.strerror or error}."
        raise ElectraError(what, path, "check the path") from error


def split_suffix(path: Path) -> tuple[str, str]:
    """The suffixes that say format and compression, in lower case; either can be empty."""
    # The parts of a large dump are called pages-articles1.xml-p1p297012.bz2 and so on.
    name = Path(re.sub(r"\.xml-p\d+p\d+", ".xml", path.name.lower()))
    return (Path(name.stem).suffix, name.suffix) if name.suffix in _OPEN else (name.suffix, "")


def _format_of(path: Path) -> str:
    suffix, compression = split_suffix(path)
    if suffix not in _FORMATS:
        fix = f"rename or convert it; known suffixes are {_SUFFIXES}"
        raise ElectraError(f"The format of '{suffix}' files is not known.", path, fix)
    kind = _FORMATS[suffix]
    if kind in ("parquet", "arrow") and compression:
        what = f"A{'n Arrow' if kind == 'arrow' else ' Parquet'} file cannot be read through an "
        fix = f"decompress it: Parquet compresses inside, '{compression}' around it gains little"
        raise ElectraError(what + "outer compression.", path, fix)
    return kind


# ---------------------------------------------------------------- documents

# Every format becomes one stream of (line number, line), in which an empty line ends a document.
_Lines = Iterator[tuple[int, str]]


def _assemble(path: Source, lines: _Lines, stats: TextStats) -> Iterator[Document]:
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


def _document_lines(source: Source, column: str, stats: TextStats) -> _Lines:
    kind = _format_of(source) if isinstance(source, Path) else "hub"
    if kind == "plain":
        for number, line in read_lines(cast(Path, source), stats, cut=True):
            is_blank = line.isspace() or not line
            stats.blank_lines += is_blank
            yield number, "" if is_blank else line
        return
    rows = {
        "json": _json_rows,
        "parquet": _column_rows,
        "arrow": _column_rows,
        "warc": partial(_record_rows, warc_texts),
        "wiki": partial(_record_rows, wiki_texts),
        "hub": _hub_rows,
    }[kind]
    for number, value, where in rows(cast(Any, source), column, stats):
        for line in _row_lines(value, column, where, stats):
            if kind != "json":  # `read_lines` has counted those
                stats.bytes += len(line.encode())
            yield number, line


_Rows = Iterator[tuple[int, object, str]]  # number, value of the column, and where it stands


def _json_rows(path: Path, column: str, stats: TextStats) -> _Rows:
    for number, row in read_lines(path, stats):
        where = f"{path}, line {number}"
        if row.isspace() or not row:
            stats.blank_lines += 1
            continue
        try:
            fields = json.loads(row)
        except (ValueError, RecursionError) as error:
            at = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            fix = "write one JSON object per line"
            raise ElectraError(f"Broken JSON: {error}.", where + at, fix) from error
        if not isinstance(fields, dict):
            what = f"The row is a JSON {type(fields).__name__}, not an object."
            raise ElectraError(what, where, f'write rows such as {{"{column}": "..."}}')
        _require_column(column, cast(dict[str, Any], fields), where)
        yield number, fields[column], where


def _column_rows(path: Path, column: str, _: TextStats) -> _Rows:
    """Of a Parquet file, or of the stream of Arrow batches that `datasets` writes to disk."""
    import pyarrow as pa
    from pyarrow import ipc, parquet

    kind, number = _format_of(path).capitalize(), 0
    try:
        with ExitStack() as opened:
            if kind == "Parquet":
                # A buffered stream instead of whole column chunks: flat memory for any row group.
                file = parquet.ParquetFile(path, buffer_size=_BLOCK, pre_buffer=False)
                names = opened.enter_context(file).schema_arrow.names
                batches: Iterable[Any] = file.iter_batches(batch_size=64, columns=[column])
            else:
                batches = ipc.open_stream(opened.enter_context(pa.OSFile(str(path))))
                names = batches.schema.names
            _require_column(column, names, path)
            for batch in batches:
                if kind == "Arrow":
                    batch.validate(full=True)  # a damaged one would be read outside of its bytes
                for value in batch.column(column):
                    number += 1
                    yield number, value.as_py(), f"{path}, row {number}"
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        what, where = f"The {kind} file cannot be read: {error}.", f"{path}, row {number + 1}"
        fix = f"the file is damaged or not {kind}; copy or write it again"
        raise ElectraError(what, where, fix) from error


def _record_rows(read: Callable[..., Texts], path: Path, _: str, stats: TextStats) -> _Rows:
    last = 0
    try:
        with closing(_OPEN[split_suffix(path)[1]](path)) as file:
            for number, text in read(file, path, MAX_ROW):
                if text is None:
                    stats.other_records += 1
                    continue
                last = number
                yield number, text, f"{path}, record {number}"
    except _UNREADABLE as error:
        raise _cut_short(error, f"{path}, after record {last}") from error


def _hub_rows(source: HubDataset, column: str, _: TextStats) -> _Rows:
    for number, row in source.rows(column):
        where = f"{source}, row {number}"
        _require_column(column, row, where)
        yield number, row[column], where


def _require_column(column: str, present: Iterable[str], where: object) -> None:
    if column not in present:
        names = ", ".join(sorted(map(str, present))) or "none"
        what = f"There is no column '{column}'; the columns are: {names}."
        raise ElectraError(what, where, "name the column that holds the text")


def _row_lines(value: object, column: str, where: str, stats: TextStats) -> Iterator[str]:
    """The lines of one row, then an empty one, since a row is a document."""
    if not isinstance(value, str):
        what = f"Column '{column}' is {'null' if value is None else type(value).__name__} here"
        fix = "remove the row, or write the text into it"
        raise ElectraError(f"{what}, not a string.", where, fix)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        what = "The text holds half of a surrogate pair, which is not a character."
        where = f"{where}, character {error.start + 1} of column '{column}'"
        raise ElectraError(what, where, "write the row again as proper UTF-8") from error
    stats.nul_removed += value.count("\0")
    stats.carriage_returns += value.count("\r")
    text = value.replace("\0", "").replace("\r\n", "\n").replace("\r", "\n")
    stats.empty_rows += not text or text.isspace()
    for line in text.split("\n"):
        if line and not line.isspace():
            yield from _cut(line, stats)
    yield ""


# ---------------------------------------------------------------- lines


def read_lines(path: Path, stats: TextStats | None = None, *, cut: bool = False) -> _Lines:
    """Number and text of each line of a UTF-8 file, which may be compressed.

    So that memory stays flat, a line over MAX_LINE characters comes in parts with `cut`, and one
    over MAX_ROW is refused without.
    """
    stats = stats or TextStats()
    decoder = codecs.getincrementaldecoder("utf-8")()
    number, consumed, rest = 1, 0, ""

    def parts(line: str) -> list[str]:
        if cut:
            return _cut(line, stats)
        if len(line) > MAX_ROW:
            what = f"The row has more than {MAX_ROW:,} characters."
            fix = "write one JSON object per line, one document per object"
            raise ElectraError(what, f"{path}, line {number}", fix)
        return [line]

    try:
        # `closing`, since a reader that stops half way must not leave the file open.
        with closing(_OPEN[split_suffix(path)[1]](path)) as file:
            for block in _blocks(file):
                is_first = consumed == 0
                if is_first:
                    _refuse_other_encodings(path, block)
                _refuse_binary(path, block, number, consumed)
                consumed += len(block)
                text = decoder.decode(block, final=not block)
                if is_first and text.startswith("\ufeff"):
                    stats.byte_order_marks += 1
                    text = text[1:]
                if "\r" in text:
                    stats.carriage_returns += text.count("\r")
                    text = text.replace("\r\n", "\n").replace("\r", "\n")
                *lines, rest = (rest + text).split("\n")
                for line in lines:
                    for part in [line] if len(line) <= MAX_LINE else parts(line):
                        yield number, part
                    number += 1
                if len(rest) > MAX_LINE:
                    *whole, rest = parts(rest)
                    for part in whole:
                        yield number, part
    except UnicodeDecodeError as error:
        raise _not_utf8(error, path, number, consumed) from error
    except _UNREADABLE as error:
        raise _cut_short(error, f"{path}, line {number}") from error
    stats.bytes += consumed
    if rest:
        yield number, rest


def _cut_short(error: Exception, where: str) -> ElectraError:
    if isinstance(error, IsADirectoryError | PermissionError | FileNotFoundError):
        what, fix = f"Cannot open: {error.strerror}.", "name a file, and check who may read it"
        return ElectraError(what, where.rpartition(", ")[0], fix)
    return ElectraError(f"The file cannot be read to its end: {error}.", where, REPAIR)


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    """Blocks of a file, none of which ends between CR and LF; then an empty one."""
    held = b""
    while block := file.read(_BLOCK):
        block = held + block
        held = b"\r" if block.endswith(b"\r") else b""
        if len(block) > len(held):
            yield block[: len(block) - len(held)]
    if held:
        yield held
    yield b""


def _refuse_other_encodings(path: Path, block: bytes) -> None:
    for name in ("UTF-32", "UTF-16"):  # in this order: one mark of UTF-32 begins as one of UTF-16
        if block.startswith(("\ufeff".encode(f"{name}LE"), "\ufeff".encode(f"{name}BE"))):
            fix = f"convert it: iconv -f {name} -t UTF-8 OLD > NEW"
            raise ElectraError(f"The file is {name}, not UTF-8.", path, fix)


def _refuse_binary(path: Path, block: bytes, line: int, consumed: int) -> None:
    if (nul := block.find(b"\0")) >= 0:
        what = "A NUL byte: this is a binary file, or text that is not UTF-8."
        where = f"{path}, line {line + _line_ends(block[:nul])}, byte {consumed + nul}"
        fix = "give only text files; to remove stray ones: tr -d '\\000' < OLD > NEW"
        raise ElectraError(what, where, fix)


def _not_utf8(error: UnicodeDecodeError, path: Path, line: int, consumed: int) -> ElectraError:
    before, wrong = error.object[: error.start], error.object[error.start]
    what = f"The text is not valid UTF-8: byte 0x{wrong:02x}, {error.reason}."
    offset = consumed - len(error.object) + error.start
    where = f"{path}, line {line + _line_ends(before)}, byte {offset}"
    fix = "convert it, for example: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW"
    return ElectraError(what, where, fix)


def _line_ends(data: bytes) -> int:
    return data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")


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
