"""Documents to training examples: the pure part of preparing a corpus.

Comes in: documents in order. Goes out: examples `[CLS] A [SEP] B [SEP]` as arrays of token ids. The
documents are divided into a training and a held-out part, each part is cut into pieces of about a
million characters, and what a piece becomes depends only on the piece, the tokenizer and (seed,
part, piece number): pieces can be built anywhere in any order with the same result. Two builders
decide where an example begins and where A ends: `segments` is the released code's, `packed` wastes
no token. Both make some examples short: networks trained on full ones alone did badly on short
texts.
"""

from __future__ import annotations

import itertools
import operator
import random
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ..errors import ElectraError
from .text import Document, draw
from .tokenizer import LineEncoder, Tokenizer, take_runs

Builder = Literal["segments", "packed"]
Part = Literal["train", "held-out"]
PARTS: tuple[Part, ...] = get_args(Part)
SHORT_PERCENT: dict[Builder, float] = {"segments": 5.0, "packed": 10.0}  # 5: the released code's
SHORTEST = 5  # tokens of a short example, with [CLS] and [SEP]
Span = tuple[int, int]
Segments = tuple[list[Span], list[Span]]


@dataclass(frozen=True, slots=True)
class Counts:
    """What a piece, a shard or a whole part holds."""

    documents: int = 0
    lines: int = 0
    tokens: int = 0
    """Tokens of the text, without [CLS] and [SEP]."""
    unknown: int = 0
    thrown_away: int = 0
    """Tokens of the text that are in no example."""
    examples: int = 0
    stored: int = 0
    """Tokens of the examples, with [CLS] and [SEP]."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(operator.add, astuple(self), astuple(other)))


class Piece(NamedTuple):
    """Consecutive documents of one part, the unit of work."""

    part: Part
    number: int
    text: str
    """Lines joined by a line end, documents by a blank line."""


class BuiltPiece(NamedTuple):
    """A piece as it goes to disk."""

    part: Part
    tokens: bytes
    examples: bytes
    counts: Counts


class PieceBuilder:
    """The pure function from piece to examples; its only state is the encoder's cache."""

    def __init__(
        self,
        tokenizer_json: str,
        builder: Builder,
        max_length: int,
        seed: int,
        short_percent: float,
    ) -> None:
        self.tokenizer = Tokenizer.from_json(tokenizer_json)
        self.encoder = LineEncoder(self.tokenizer)
        self.build = {"segments": segments, "packed": packed}[builder]
        self.max_length, self.seed, self.short_percent = max_length, seed, short_percent
        self.dtype = token_dtype(self.tokenizer.vocab_size)

    def __call__(self, piece: Piece) -> BuiltPiece:
        lines, document_ends = list[str](), list[int]()
        for document in piece.text.split("\n\n"):
            lines += document.split("\n")
            document_ends.append(len(lines))
        ids, lengths = self.encoder.encode_lines(lines)
        rng = random.Random(f"{self.seed}/{piece.part}/{piece.number}")

        # [CLS] and [SEP] lie behind the text, so that an example is nothing but spans of ids.
        source = np.append(ids, np.array([self.tokenizer.cls_id, self.tokenizer.sep_id], np.uint32))
        cls, sep = (len(ids), len(ids) + 1), (len(ids) + 1, len(ids) + 2)
        spans, borders = list[Span](), [0]  # borders: where in `spans` each segment ends
        settings = self.max_length, rng, self.short_percent
        for first, second in self.build(lengths.tolist(), document_ends, *settings):
            spans += [cls, *first, sep]
            borders.append(len(spans))
            if second:
                spans += [*second, sep]
            borders.append(len(spans))
        starts, stops = np.array(spans, np.int64).reshape(-1, 2).T
        tokens = take_runs(source, starts, stops - starts)
        ends = np.concatenate([[0], np.cumsum(stops - starts)])[borders]  # in `tokens`
        examples = np.stack([ends[2::2] - ends[:-1:2], ends[1::2] - ends[:-1:2]], axis=1)
        counts = Counts(
            documents=len(document_ends),
            lines=len(lines),
            tokens=len(ids),
            unknown=int(np.count_nonzero(ids == self.tokenizer.unk_id)),
            thrown_away=len(ids) - int((stops - starts)[starts < len(ids)].sum()),
            examples=len(examples),
            stored=len(tokens),
        )
        stored = tokens.astype(self.dtype).tobytes()
        return BuiltPiece(piece.part, stored, examples.astype("<u2").tobytes(), counts)


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def pieces_of(
    documents: Iterator[Document], size: int, held_out_percent: float, seed: int
) -> Iterator[Piece]:
    """Whole documents in pieces of at least `size` characters, numbered within each part."""
    waiting: dict[Part, list[str]] = {part: [] for part in PARTS}
    sizes, numbers = Counter[Part](), Counter[Part]()

    def cut(part: Part) -> Piece:
        piece = Piece(part, numbers[part], "\n\n".join(waiting[part]))
        waiting[part], sizes[part] = [], 0
        numbers[part] += 1
        return piece

    for part, lines in divide(documents, held_out_percent, seed):
        text = "\n".join(lines)
        waiting[part].append(text)
        sizes[part] += len(text)
        if sizes[part] >= size:
            yield cut(part)
    yield from (cut(part) for part in PARTS if waiting[part])


def divide(
    documents: Iterator[Document], percent: float, seed: int
) -> Iterator[tuple[Part, Sequence[str]]]:
    """Which part each document belongs to.

    A hash of the document's number decides, with two exceptions that keep small corpora usable
    without reading ahead: the first document is always trained on and the second is always held
    out. A lone document is divided instead: its last lines are held out.
    """
    start = list(itertools.islice(documents, 2))
    if percent and len(start) == 1:
        lines = start[0].lines
        if len(lines) < 2:
            what = "The text is a single line, from which nothing can be held out."
            fix = "write one sentence or paragraph per line, or set held_out_percent to 0"
            raise ElectraError(what, f"{start[0].file}, line {start[0].line}", fix)
        kept = len(lines) - max(1, round(len(lines) * percent / 100))
        yield "train", lines[:kept]
        yield "held-out", lines[kept:]
        return
    for number, document in enumerate(itertools.chain(start, documents)):
        is_held_out = percent > 0 and (
            number == 1 or (number > 1 and draw(seed, "held-out", number) < percent / 100)
        )
        yield "held-out" if is_held_out else "train", document.lines


def segments(
    lengths: Sequence[int],
    document_ends: Sequence[int],
    max_length: int,
    rng: random.Random,
    short_percent: float = SHORT_PERCENT["segments"],
) -> Iterator[Segments]:
    """Spans of A and B of each example; with the default, exactly as the released code builds them.

    `lengths` counts the tokens of each line, `document_ends` the lines up to the end of each
    document; spans are (start, stop) in the stream of tokens. Lines are collected until they reach
    the target length or the document ends, then shared out between A and B and trimmed; what is
    trimmed is lost. The calls of `rng` are those of the released code
    (`build_pretraining_dataset.py`), one for one.
    """
    target, position, line = max_length, 0, 0
    for end in document_ends:
        pending, size = list[Span](), 0
        while line < end:
            stop = position + lengths[line]
            pending.append((position, stop))
            size += lengths[line]
            position, line = stop, line + 1
            if size and (size >= target or line == end):
                yield _share_out(pending, target, max_length, rng)
                # A few examples are short, so that fine-tuning on short texts is nothing new.
                target = _target(max_length, rng, short_percent)
                pending, size = [], 0


def _share_out(lines: list[Span], target: int, max_length: int, rng: random.Random) -> Segments:
    # One segment in ten examples, as in classification of single sentences.
    first_target = 100_000 if rng.random() < 0.1 else (target - 3) // 2
    first, second = list[Span](), list[Span]()
    first_size = 0
    for start, stop in lines:
        size = stop - start
        if (
            first_size == 0
            or first_size + size < first_target
            or (not second and first_size < first_target and rng.random() < 0.5)
        ):
            first.append((start, stop))
            first_size += size
        else:
            second.append((start, stop))
    first_size = min(first_size, max_length - 2)
    return _trim(first, first_size), _trim(second, max_length - first_size - 3)


def _trim(spans: list[Span], limit: int) -> list[Span]:
    """The first `limit` tokens of the spans."""
    kept = list[Span]()
    for start, stop in spans:
        stop = min(stop, start + limit)
        if stop > start:
            kept.append((start, stop))
            limit -= stop - start
    return kept


def _target(max_length: int, rng: random.Random, short_percent: float) -> int:
    short = rng.random() < short_percent / 100
    return rng.randint(SHORTEST, max_length) if short else max_length


def packed(
    lengths: Sequence[int],
    document_ends: Sequence[int],
    max_length: int,
    rng: random.Random,
    short_percent: float = SHORT_PERCENT["packed"],
) -> Iterator[Segments]:
    """Spans of A and B of examples that hold every token once, in order.

    Arguments as for `segments`. Examples are full, but for the last one and `short_percent` of the
    others, whose length is drawn uniformly. A ends where a document ends, if one does inside the
    window (the one nearest to its middle); else at the line end nearest to a point drawn uniformly;
    else at that point. One window in ten without a document end is a single segment.
    """
    line_ends = list(itertools.accumulate(lengths))
    document_stops = [line_ends[end - 1] for end in document_ends]
    total = line_ends[-1] if line_ends else 0
    start = 0
    while start < total:
        # With short_percent 0 nothing is drawn, so such a corpus equals those of earlier versions.
        target = _target(max_length, rng, short_percent) if short_percent else max_length
        stop = min(start + target - 2, total)
        if rng.random() < 0.1 and _nearest(document_stops, start, stop, start) is None:
            yield [(start, stop)], []
            start = stop
            continue
        stop = min(start + target - 3, total)
        split = _nearest(document_stops, start, stop, (start + stop) // 2)
        if split is None and stop - start > 1:
            point = rng.randrange(start + 1, stop)
            split = _nearest(line_ends, start, stop, point) or point
        yield ([(start, split)], [(split, stop)]) if split else ([(start, stop)], [])
        start = stop


def _nearest(positions: list[int], low: int, high: int, point: int) -> int | None:
    """The position strictly between `low` and `high` that lies nearest to `point`."""
    left, right = bisect_right(positions, low), bisect_left(positions, high)
    if left >= right:
        return None
    after = min(max(bisect_left(positions, point), left), right - 1)
    before = max(after - 1, left)
    return min(positions[before], positions[after], key=lambda position: abs(position - point))
