"""What a model reads of a labelled data set: padded arrays, and the batches cut out of them.

    Examples (tasks.py) or questions (squad.py)  ->  Features  ->  DeviceFeatures  ->  TaskBatch

Shapes: N rows · L tokens of the longest row · S steps · B rows of a batch · T tokens of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.tokenizer import LineEncoder, Tokenizer, flatten

Padding = Literal["bucketed", "dynamic", "full"]

# Lengths of recorded batches: few, because each takes a CUDA graph, and close for short texts.
BUCKETS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_WINDOW = 64  # batches whose rows are sorted by length together
_PART = 8192  # texts that are encoded together
_FEW = 256  # texts for which it does not pay to make a LineEncoder, which takes 20 ms


@dataclass(frozen=True)
class Features:
    """One split, ready for the device."""

    tokens: NDArray[np.int32]  # (N, L), padded behind the end
    lengths: NDArray[np.int32]  # (N,)
    first: NDArray[np.int32]  # (N,) tokens of segment 0: [CLS], the first text, its [SEP]
    targets: dict[str, NDArray[Any]]  # (N,) or (N, L) each, by the names the head reads
    example: NDArray[np.int32]  # (N,) the example a row belongs to

    def __len__(self) -> int:
        return len(self.lengths)


class TaskBatch(NamedTuple):
    """Rows of Features as a model reads them."""

    x: Tensor  # (B, T) int64
    segment: Tensor  # (B, T) int64
    mask: Tensor  # (B, T) bool, true on tokens
    targets: dict[str, Tensor]  # (B,) or (B, T) each


# ---------------------------------------------------------------------- text to arrays


def encode_texts(
    texts: Sequence[tuple[str, ...]], labels: NDArray[Any], tokenizer: Tokenizer, length: int
) -> Features:
    """[CLS] a [SEP] or [CLS] a [SEP] b [SEP]; the longer text of a pair is cut first.

    labels: (N,) class indices or floats; the target `label`.
    """
    columns = [_encode(column, tokenizer) for column in list(zip(*texts, strict=True)) or [()]]
    room, counts = length - 1 - len(columns), [column.counts for column in columns]
    kept = [np.minimum(counts[0], room)]
    if len(counts) == 2:
        kept = _fit_pairs(counts[0], counts[1], room)
    ends = 1 + np.cumsum([count + 1 for count in kept], 0)  # (1 or 2, N) behind each [SEP]
    row, lengths = np.arange(len(texts)), ends[-1]
    tokens = np.full((len(texts), _width(lengths, length)), tokenizer.pad_id, np.int32)
    tokens[:, 0] = tokenizer.cls_id
    for column, count, end in zip(columns, kept, ends, strict=True):
        _place(tokens, column, count, end - 1 - count)
        tokens[row, end - 1] = tokenizer.sep_id
    lengths, first, row = (array.astype(np.int32) for array in (lengths, ends[0], row))
    return Features(tokens, lengths, first, {"label": labels}, row)


def encode_words(
    sentences: Sequence[tuple[str, ...]],
    labels: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    length: int,
) -> Features:
    """[CLS] pieces of the words [SEP]; a sentence that is too long goes on in the next row.

    The target `labels` holds a word's label at its first piece and −1 elsewhere. Without labels
    the first pieces hold 0, so that the words of a sentence are found again.
    """
    words = _encode([word for sentence in sentences for word in sentence], tokenizer)
    rows, marks, owners = list[list[int]](), list[list[int]](), list[int]()

    def begin(owner: int) -> None:
        rows.append([tokenizer.cls_id])
        marks.append([-1])
        owners.append(owner)

    word = 0
    for i, sentence in enumerate(sentences):
        begin(i)
        for j in range(len(sentence)):
            pieces = (words.of(word).tolist() or [tokenizer.unk_id])[: length - 2]
            word += 1
            if len(rows[-1]) + len(pieces) > length - 1:
                begin(i)
            rows[-1] += pieces
            marks[-1] += [labels[i][j] if labels else 0, *[-1] * (len(pieces) - 1)]
    closed, ends = [[*row, tokenizer.sep_id] for row in rows], [[*mark, -1] for mark in marks]
    return marked(closed, ends, owners, tokenizer, length)


def marked(
    rows: Sequence[Sequence[int]],
    marks: Sequence[Sequence[int]],
    owners: Sequence[int],
    tokenizer: Tokenizer,
    length: int,
) -> Features:
    """Rows of one segment, the target `labels` being their marks: −1 on tokens without one."""
    lengths = np.array([len(row) for row in rows], np.int32)
    shape = (len(rows), _width(lengths, length))
    tokens, target = np.full(shape, tokenizer.pad_id, np.int32), np.full(shape, -1, np.int64)
    for i, (row, mark) in enumerate(zip(rows, marks, strict=True)):
        tokens[i, : len(row)], target[i, : len(row)] = row, mark
    return Features(tokens, lengths, lengths, {"labels": target}, np.array(owners, np.int32))


def _width(lengths: NDArray[Any], limit: int) -> int:
    """The longest row, up to the next multiple of 8 (attention kernels want that) or the limit."""
    longest = int(lengths.max(initial=2))
    return max(longest, min(-(-longest // 8) * 8, limit))


class _Encoded(NamedTuple):
    """Ids of many texts back to back."""

    ids: NDArray[np.uint32]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]

    def of(self, i: int) -> NDArray[np.uint32]:
        return self.ids[self.starts[i] : self.starts[i] + self.counts[i]]


def _encode(texts: Sequence[str], tokenizer: Tokenizer) -> _Encoded:
    if len(texts) < _FEW:
        encodings = tokenizer.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        parts = [flatten([encoding.ids for encoding in encodings])] if texts else []
    else:
        encoder = LineEncoder(tokenizer)
        parts = [encoder.encode_lines(texts[i : i + _PART]) for i in range(0, len(texts), _PART)]
    if not parts:
        return _Encoded(np.zeros(0, np.uint32), *(np.zeros(0, np.int64) for _ in range(2)))
    counts = np.concatenate([c for _, c in parts])
    return _Encoded(np.concatenate([ids for ids, _ in parts]), np.cumsum(counts) - counts, counts)


def _fit_pairs(
    a: NDArray[np.int64], b: NDArray[np.int64], room: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lengths after tokens were taken off the longer text, one by one, until both fit."""
    excess = np.maximum(a + b - room, 0)
    longer = np.minimum(excess, np.abs(a - b))  # until both are equally long
    rest = excess - longer  # then in turns, the second text first
    a_cut = np.where(a > b, longer, 0) + rest // 2
    b_cut = np.where(a > b, 0, longer) + rest - rest // 2
    return a - a_cut, b - b_cut


def _place(
    tokens: NDArray[np.int32],
    text: _Encoded,
    counts: NDArray[np.int64],
    column: NDArray[np.int64],
) -> None:
    """The first `counts` tokens of each text into its row of `tokens`, from `column` on."""
    row = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    tokens[row, column[row] + within] = text.ids[text.starts[row] + within]


# ---------------------------------------------------------------------- arrays to batches


class Plan(NamedTuple):
    """The batches of a whole run."""

    rows: NDArray[np.int32]  # (S, B)
    weight: NDArray[np.float32]  # (S, B), 0 on the rows that fill up an epoch's last batch
    lengths: list[int]  # S values of T

    @classmethod
    def make(
        cls,
        features: Features,
        *,
        batch: int,
        epochs: float,
        seed: int,
        padding: Padding,
        buckets: Sequence[int],
    ) -> Plan:
        """A pure function of its arguments: nothing of it has to be saved.

        bucketed: rows of similar length share a batch (sorted within 64 batches after the
        shuffle, the batches in random order). dynamic: random batches, as long as their longest
        row. full: random batches, as long as the longest row of all.
        """
        n, per_epoch = len(features), math.ceil(len(features) / batch)
        steps = max(1, round(per_epoch * epochs))
        longest = features.tokens.shape[1]
        rows, weight = list[NDArray[np.int32]](), list[NDArray[np.float32]]()
        for epoch in range(math.ceil(epochs)):
            draw = np.random.Generator(np.random.Philox(key=[seed, epoch]))
            order = draw.permutation(n).astype(np.int32)
            if padding == "bucketed":
                size = batch * _WINDOW
                for i in range(0, n, size):
                    part = order[i : i + size]
                    order[i : i + size] = part[np.argsort(features.lengths[part], kind="stable")]
            full = np.resize(order, (per_epoch, batch))
            real = (np.arange(per_epoch * batch) < n).astype(np.float32).reshape(full.shape)
            shuffle = draw.permutation(per_epoch)
            rows.append(full[shuffle])
            weight.append(real[shuffle])
        all_rows, all_weight = np.concatenate(rows)[:steps], np.concatenate(weight)[:steps]
        needed = features.lengths[all_rows].max(1)
        if padding == "full":
            needed[:] = longest
        limits = np.array([*(size for size in buckets if size < longest), longest])
        return cls(all_rows, all_weight, limits[np.searchsorted(limits, needed)].tolist())


class DeviceFeatures:
    """Features on the device, from which a batch is cut without the host."""

    def __init__(self, features: Features, device: torch.device) -> None:
        def move(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        self.tokens, self.lengths = move(features.tokens), move(features.lengths)
        self.first = move(features.first)
        self.targets = {name: move(target) for name, target in features.targets.items()}

    def batch(self, rows: Tensor, T: int) -> TaskBatch:
        """The rows (B,) up to token T."""

        def cut(source: Tensor) -> Tensor:
            return (source[:, :T] if source.dim() == 2 else source).index_select(0, rows)

        position = torch.arange(T, device=rows.device)
        mask = position < cut(self.lengths)[:, None]  # (B, T)
        segment = (position >= cut(self.first)[:, None]) & mask
        targets = {name: cut(target) for name, target in self.targets.items()}
        return TaskBatch(cut(self.tokens).long(), segment.long(), mask, targets)
