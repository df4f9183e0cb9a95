"""Text that does not lie in plain files: web archives, Wikipedia dumps, the Hub, standard input.

Comes in: an open file, the name of a dataset, or what is piped in. Goes out: the texts of its
records one after another, in an order that never changes, so that the readers of `text.py` treat
them as the rows of a file. What cannot be read is refused with its place, in flat memory and in
time that grows with the input alone, whoever wrote it.
"""

from __future__ import annotations

import html
import importlib
import io
import os
import re
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from xml.parsers import expat

from ..errors import ElectraError, Stopped
from ..files import AtomicFile, exclusive, json_sha256, xxh3_file

_BLOCK = 1 << 20  # bytes
_HEAD = 1 << 16  # bytes of the head of a web archive's record at most
_DEPTH = 40  # marks of wikitext inside one another; deeper ones are taken as text
REPAIR = "it is damaged or was cut short; copy or download it again"

# Number of the record, counted from 1, and its text; None of one that is left out.
Texts = Iterator[tuple[int, str | None]]


# ---------------------------------------------------------------- web archives


def warc_texts(file: BinaryIO, where: object, limit: int) -> Texts:
    """The text records of a web archive, such as all of a WET file.

    Records that are about others are left out. A web page as it was sent is refused: what of it is
    text is a question that tools of its own answer, and better than a parser of tags would.
    """
    # Read here and not by a library: it is thirty lines, every record's length is checked against
    # what follows it, and gzip members are the standard library's business.
    number = 0

    def error(what: str, fix: str = REPAIR) -> ElectraError:
        return ElectraError(what, f"{where}, record {number}", fix)

    with io.BufferedReader(file, _BLOCK) as buffered:  # pyright: ignore[reportArgumentType]
        while head := buffered.readline(_HEAD):
            number += 1
            if not re.fullmatch(rb"WARC/[0-9.]{1,9}\r?\n", head):
                what = "No record of a web archive begins here, or the one before has another "
                raise error(what + "length than it says.")
            fields, left = dict[bytes, bytes](), _HEAD
            while (line := buffered.readline(_HEAD)) not in (b"\r\n", b"\n"):
                left -= len(line)
                if not line.endswith(b"\n") or left < 0:
                    raise error("The head of the record has no end.")
                name, _, value = line.partition(b":")
                fields[name.strip().lower()] = value.strip()
            kind, size = fields.get(b"warc-type", b""), fields.get(b"content-length", b"")
            if not re.fullmatch(rb"[0-9]{1,18}", size):
                raise error("The record does not say how long it is.")
            length = int(size)
            if kind == b"response":
                fix = "give the WET files of the crawl, or extract the text into JSON lines first"
                raise error("The record is a web page as it was sent, not text.", fix)
            media = fields.get(b"content-type", b"").lower()
            if kind in (b"conversion", b"resource") and media.startswith(b"text/plain"):
                if length > limit:
                    raise error(f"The record has more than {limit:,} bytes.", "take it out")
                body = buffered.read(length)
                length -= len(body)
                try:
                    yield number, body.decode()
                except UnicodeDecodeError as wrong:
                    what = f"The text is not valid UTF-8 at byte {wrong.start} of the record."
                    raise error(what, "convert the record to UTF-8, or take it out") from wrong
            else:
                while length and (body := buffered.read(min(length, _BLOCK))):
                    length -= len(body)
                yield number, None
            if length or buffered.read(4) != b"\r\n\r\n":
                raise error("The record has another length than it says.")


# ---------------------------------------------------------------- Wikipedia dumps


def wiki_texts(file: BinaryIO, where: object, limit: int) -> Texts:
    """The articles of a MediaWiki dump (pages-articles.xml) as plain text.

    Pages of other name spaces and redirections are left out. Of several revisions the last is
    taken.
    """
    dump, fed = _Dump(where, limit), 0
    try:
        while True:
            block = file.read(_BLOCK)
            fed += len(block)
            dump.parser.Parse(block, not block)
            if fed - dump.parser.CurrentByteIndex > 4 * _BLOCK:
                raise dump.error("A tag does not end.")
            for number, text in dump.pages:
                yield number, None if text is None else plain_text(text, dump.hidden)
            dump.pages.clear()
            if not block:
                return
    except expat.ExpatError as error:
        raise dump.error(f"The XML is broken: {error}.") from error


class _Dump:
    """Gathers the pages of a dump while expat reads it."""

    def __init__(self, where: object, limit: int) -> None:
        self.where, self.limit = where, limit
        self.pages: list[tuple[int, str | None]] = []
        self.hidden = {"file", "image", "category"}  # name spaces whose links show no text
        self._number, self._is_begun = 0, False
        self._page: dict[str, str] = {}
        self._parts: list[str] | None = None  # of the element whose text is wanted
        self._size = 0
        self.parser = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._text
        self.parser.StartDoctypeDeclHandler = self._refuse  # entities could unfold without end

    def error(self, what: str) -> ElectraError:
        fix = "give a dump of MediaWiki, pages-articles.xml; " + REPAIR
        return ElectraError(what, f"{self.where}, page {self._number}", fix)

    def _refuse(self, *_: object) -> None:
        raise self.error("The XML has a document type of its own, which no dump has.")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        if not self._is_begun and name != "mediawiki":
            raise self.error(f"This is no dump of MediaWiki: the XML begins with <{name:.40}>.")
        self._is_begun = True
        is_hidden = name == "namespace" and attributes.get("key") in ("6", "14")
        if name == "page":
            self._page = {}
            self._number += 1
        elif name == "redirect":
            self._page["redirect"] = ""
        elif name in ("ns", "text") or is_hidden:
            self._parts, self._size = [], 0

    def _text(self, data: str) -> None:
        if self._parts is not None:
            self._size += len(data)
            if self._size > self.limit:
                raise self.error(f"The page has more than {self.limit:,} characters.")
            self._parts.append(data)

    def _end(self, name: str) -> None:
        text, self._parts = "".join(self._parts or ()), None
        if name == "namespace" and text:
            self.hidden.add(text.lower())
        elif name == "page":
            is_article = self._page.get("ns") == "0" and "redirect" not in self._page
            self.pages.append((self._number, self._page.get("text", "") if is_article else None))
        elif name in ("ns", "text"):
            self._page[name] = text


# What stands in these elements is no prose.
_ELEMENTS = "ref gallery math chem score timeline syntaxhighlight source imagemap hiero mapframe"
_NAMES = "|".join(_ELEMENTS.split())
# Every branch begins with a fixed character, so that the search can skip all others.
_MARK = re.compile(
    r"\{\{|\}\}|\[\[|\]\]|\{\||\|\}(?!\})"
    rf"|<(?P<begin>(?i:{_NAMES}))\b[^<>]*>|</(?P<end>(?i:{_NAMES}))\s*>"
)
_CLOSING = {"{{": "}}", "[[": "]]", "{|": "|}"}
_LINK = re.compile(r"\[(?:https?:|ftp:)?//[^\s\[\]]+ ?([^\[\]\n]*)\]")
_BREAK, _TAG = re.compile(r"<br\b[^<>]*>", re.IGNORECASE), re.compile(r"</?[A-Za-z][^<>]*>")
_SWITCH = re.compile(r"__[A-Z]{3,20}__|'{2,}")


def plain_text(wikitext: str, hidden: set[str]) -> str:
    """Paragraphs and list items of an article, one a line, without its marks.

    Templates, tables, references, comments and headings are left out, and with them what they
    would show; of a link its label stays, unless its name space is one of `hidden`. One pass: the
    time is linear, whatever the text.
    """
    before, *commented = wikitext.split("<!--")
    wikitext = before + "".join(part.partition("-->")[2] for part in commented)
    # What ends each open mark, and the text since; a mark that is never ended is text itself.
    stack: list[tuple[str, list[str]]] = [("", [])]
    position = 0
    for mark in _MARK.finditer(wikitext):
        stack[-1][1].append(wikitext[position : mark.start()])
        position = mark.end()
        begin, end = mark["begin"], mark["end"]
        if closing := f"</{begin.lower()}>" if begin else _CLOSING.get(mark[0]):
            if len(stack) < _DEPTH and not mark[0].endswith("/>"):
                stack.append((closing, [mark[0]]))
            continue
        token = f"</{end.lower()}>" if end else mark[0]
        if token not in [closing for closing, _ in stack]:
            continue
        closing, parts = stack.pop()
        while closing != token:
            stack[-1][1].append("".join(parts))
            closing, parts = stack.pop()
        if token == "]]":
            inside = "".join(parts)
            target, _, label = inside[2:].partition("|")
            space = target.partition(":")[0].strip().lower() if ":" in target else ""
            if space not in hidden:
                stack[-1][1].append(label.rpartition("|")[2] or target.strip(" :"))
    text = "".join(part for _, parts in stack for part in parts) + wikitext[position:]
    text = _SWITCH.sub("", _TAG.sub("", _BREAK.sub("\n", _LINK.sub(r"\1", text))))
    lines = (line.lstrip("*#:; ").strip() for line in html.unescape(text).split("\n"))
    return "\n".join(line for line in lines if line and not (line[0] == line[-1] == "="))


# ---------------------------------------------------------------- the Hub


@dataclass(frozen=True)
class HubDataset:
    """One split of a dataset that the `datasets` library opens, read row by row as it comes."""

    name: str
    """As it was given: hf:NAME[:config][:split]."""
    version: str
    """A digest of the revision and the files behind it."""
    _rows: Any = field(compare=False, repr=False)

    def __str__(self) -> str:
        return self.name

    @classmethod
    def open(cls, name: str) -> HubDataset:
        path, config, split, *more = [*name.removeprefix("hf:").split(":"), "", ""]
        if not path or any(more):
            fix = "write hf:NAME, hf:NAME:config, hf:NAME:config:split or hf:NAME::split"
            raise ElectraError("This names no dataset.", name, fix)
        split = split or "train"
        try:
            datasets: Any = importlib.import_module("datasets")
        except ImportError as error:
            what, fix = "The package datasets is not installed.", "pip install 'electra[datasets]'"
            raise ElectraError(what, name, fix) from error
        try:
            builder: Any = datasets.load_dataset_builder(path, config or None)
            rows: Any = builder.as_streaming_dataset(split=split)
        except Exception as error:  # of any kind: the library, the Hub, the network
            what = f"The dataset cannot be opened: {_message(error)}."
            fix = "check name, config, split and the network; a private one needs HF_TOKEN"
            raise ElectraError(what, name, fix) from error
        files: Any = (builder.config.data_files or {}).get(split, [])
        origin = [list(map(str, one)) for one in getattr(files, "origin_metadata", [])]
        facts = [builder.hash, builder.config.name, split, list(map(str, files)), origin]
        return cls(name, json_sha256(facts), rows)

    def rows(self, column: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Number and fields of each row: shard after shard, in the order of their names."""
        rows, number = self._rows, 0
        if column in (rows.column_names or ()):
            rows = rows.select_columns([column])  # pictures beside the text need not be decoded
        try:
            for number, row in enumerate(rows, 1):
                yield number, row
        except Exception as error:
            what = f"The dataset cannot be read to its end: {_message(error)}."
            fix = "give the same command again; full shards are kept"
            raise ElectraError(what, f"{self}, row {number + 1}", fix) from error


def _message(error: Exception) -> str:
    return (str(error).strip().split("\n")[0] or type(error).__name__)[:300].rstrip(".")


# ---------------------------------------------------------------- standard input


def receive(
    inputs: Sequence[str | Path], directory: Path, should_stop: Callable[[], bool]
) -> list[str | Path]:
    """The inputs, where - has become the file that holds what was piped in, directory/stdin.txt.

    It is read more than once, so it has to lie somewhere. The same command again has to bring the
    same text, which is compared with the file and not written a second time. A directory inside of
    an input is refused: what is written there would be text the next time.
    """
    for given in inputs:
        if os.path.isdir(given) and directory.resolve().is_relative_to(Path(given).resolve()):
            what = f"The output lies inside of {given}, and would be read as text the next time."
            raise ElectraError(what, directory, "choose another --out, beside the text")
    if "-" not in map(str, inputs):
        return list(inputs)
    path, source = directory / "stdin.txt", sys.stdin.buffer.fileno()
    if os.isatty(source):
        fix = "pipe the text in: zcat FILES | electra …"
        raise ElectraError("Standard input is a terminal.", "-", fix)
    with exclusive(directory), closing(AtomicFile(path)) as file:
        while not should_stop():
            # A pipe may stay silent for hours, and a signal must be heeded all the same.
            if select.select([source], [], [], 0.2)[0]:
                if not (block := os.read(source, _BLOCK)):
                    break
                file.write(block)
        else:
            raise Stopped
        if not path.exists():
            file.commit()
        elif (path.stat().st_size, xxh3_file(path)) != (file.size, file.xxh3):
            fix = "pipe in the same text, choose another --out, or delete the directory"
            raise ElectraError("Other text was piped in before.", path, fix)
    return [path if str(given) == "-" else given for given in inputs]
