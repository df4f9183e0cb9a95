"""Which examples share a row.

Comes in: the lengths of all examples. Goes out: rows of at most so many tokens and so many examples
that hold every example once. Rows are made for counts of lengths, not for examples, by best fit
from the longest length down (bin packing over a histogram, as in Krell et al. 2021): as many steps
as there are lengths, whatever the size of the corpus, and nothing to store but the examples sorted
by length. The rows depend on the lengths alone, so every process and every resumed run has the same
ones; their order is shuffled like that of examples.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Packing:
    """The rows; len() counts them."""

    def __init__(self, lengths: NDArray[np.integer[Any]], tokens: int, most: int) -> None:
        """Rows of up to `tokens` tokens and `most` examples."""
        counts = np.bincount(lengths, minlength=tokens + 1)
        self._by_length = np.argsort(lengths, kind="stable")
        kinds = _kinds(counts, tokens, most)
        # Rows of one kind lie together. Slot s of row r of a kind is example first[kind, s] + r of
        # those sorted by length, −1 for an empty slot: neighbours in the corpus do not meet.
        self._first = np.full((len(kinds), most), -1)
        self._rows = np.cumsum([0] + [rows for rows, _ in kinds])
        at = np.cumsum(counts) - counts
        for kind, (rows, parts) in enumerate(kinds):
            for slot, length in enumerate(parts):
                self._first[kind, slot] = at[length]
                at[length] += rows

    def __len__(self) -> int:
        return int(self._rows[-1])

    def examples(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        """The examples of rows of any shape (...), (..., most), −1 where there are fewer."""
        kind = np.searchsorted(self._rows, row, side="right") - 1
        first = self._first[kind]
        place = first + (row - self._rows[kind])[..., None]
        return np.where(first >= 0, self._by_length[np.where(first >= 0, place, 0)], -1)


def _kinds(counts: NDArray[np.int64], tokens: int, most: int) -> list[tuple[int, list[int]]]:
    """Kinds of rows: how many of each, and the lengths of their examples, longest first.

    An example goes where the least room is left that it fits into, else into a new row.
    """
    done: list[tuple[int, list[int]]] = []
    open_: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)  # by the room left
    for length in np.flatnonzero(counts[1:])[::-1].tolist():
        length += 1
        left = int(counts[length])
        while left:
            room = min((r for r in open_ if r >= length and open_[r]), default=tokens)
            rows, parts = open_[room].pop() if room < tokens else (left, [])
            each = min(room // length, most - len(parts), left)
            filled = min(rows, left // each)
            if filled < rows and room < tokens:
                open_[room].append((rows - filled, parts))
            parts = [*parts, *[length] * each]
            room -= each * length
            (open_[room] if len(parts) < most and room else done).append((filled, parts))
            left -= each * filled
    return done + [kind for kinds in open_.values() for kind in kinds]
