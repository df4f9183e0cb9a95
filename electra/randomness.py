"""Random numbers as a function of (seed, step, purpose, row, column).

Nothing here has a state: the mask of row 7 at step 1000 is the same on a CPU and on a GPU, in one
process and in eight, in the first run and after a resume. The bits are Philox4x32-10 (Salmon et
al. 2011) written in int64 tensor operations, none of which leaves 64 bits;
`step` may be a device tensor, so that a recorded CUDA graph draws new numbers at every replay.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Generator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_WORD = 0xFFFFFFFF
_ROUND_0, _ROUND_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85


class Purpose(enum.IntEnum):
    """What a draw is for: its key. Dropout sites take the numbers between the last two."""

    POSITIONS = 0  # which positions are masked
    SHOWN = 1  # [MASK], a random token or the token itself
    RANDOM_TOKEN = 2  # which random token (BERT's 10 %)
    SAMPLE = 3  # the generator's samples
    DROPOUT = 4  # sites follow from here: DROPOUT + site
    OTHER_POSITIONS = 1 << 20  # the control of ELECTRA 15 %


class StepRng(NamedTuple):
    """The key of one step: draws for the rows `rows` of its global batch."""

    seed: int | Tensor  # as a () int64 tensor it is no constant of what is compiled
    step: Tensor  # () int64
    rows: Tensor  # (B,) int64, place of each sequence in the global batch

    def uniform(self, purpose: Purpose, columns: int) -> Tensor:
        """Uniform numbers in [0, 1) with 24 random bits each, (B, columns) float32."""
        return (self.bits(purpose, columns) >> 8).float() * 2.0**-24

    def bits(self, purpose: int, columns: int) -> Tensor:
        """Random 32-bit words as int64, (B, columns)."""
        blocks = (columns + 3) // 4
        column = torch.arange(blocks, device=self.rows.device).expand(len(self.rows), blocks)
        row = self.rows[:, None].expand_as(column)
        step_low, step_high = self.step & _WORD, (self.step >> 32) & _WORD
        counter = (row, column, step_low.expand_as(column), step_high.expand_as(column))
        words = philox(counter, (self.seed & _WORD, int(purpose)))
        return torch.stack(words, dim=-1).flatten(1)[:, :columns]

    def keys(self, site: int, sites: int) -> Tensor:
        """(sites, B) int32: of every row its key for dropout at `site` and those behind it.

        `bits(DROPOUT + site, 1)` for all at once: one Philox to compile instead of one for each.
        """
        row = self.rows.expand(sites, -1)
        purpose = torch.arange(sites, device=row.device)[:, None] + (Purpose.DROPOUT + site)
        step_low, step_high = (word.expand_as(row) for word in (self.step & _WORD, self.step >> 32))
        counter = (row, torch.zeros_like(row), step_low, step_high & _WORD)
        return philox(counter, (self.seed & _WORD, purpose.expand_as(row)))[0].int()

    def dropout(self, x: Tensor, p: float, site: int) -> Tensor:
        """x with each element zeroed with probability p and the rest scaled by 1 / (1 − p).

        Every row gets a Philox key; its elements are told apart by an integer hash, which costs
        a handful of 32-bit operations where Philox would cost a hundred.
        """
        key = self.bits(Purpose.DROPOUT + site, 1).int().view(-1, *[1] * (x.dim() - 1))
        element = torch.arange(x[0].numel(), device=x.device, dtype=torch.int32)
        word = _hash32(element.view(1, *x.shape[1:]) ^ key)
        kept = (word >> 8).bitwise_and_(0xFFFFFF) >= int(p * 2**24)
        return torch.where(kept, x / (1.0 - p), 0.0).to(x.dtype)


class SeededDropout:
    """Dropout by torch's own kernels, one launch per site, for steps that are not compiled.

    Whoever trains calls `seed` before every step, so that the draws are a function of (seed, step)
    here too, though not the same ones on a CPU and on a GPU. A recorded CUDA graph reads the seed
    at each replay; several of these, each with a state of its own, can be at work at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._default = self._own = torch.default_generator
        if device.type == "cuda":
            self._default = torch.cuda.default_generators[device.index or 0]
            self._own = self._default.clone_state()

    def seed(self, seed: int, step: int) -> None:
        """Reseed: the draws that follow are those of this step."""
        word = _mix64(np.array([(seed * 0x9E3779B97F4A7C15 + step) % 2**64], dtype=np.uint64))
        self._own.manual_seed(int(word[0]) & 0x7FFFFFFFFFFFFFFF)

    @contextlib.contextmanager
    def in_use(self) -> Generator[None]:
        """Inside the block torch draws from this generator, also in a graph recorded there."""
        if self._own is self._default:
            yield
            return
        before = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self._own)
        try:
            yield
        finally:
            self._default.graphsafe_set_state(before)

    def dropout(self, x: Tensor, p: float, site: int) -> Tensor:
        del site  # the order of the calls tells the places apart
        if x.is_cuda:
            return F.dropout(x, p)
        # torch draws one number per element on one core; here a draw serves four, 16 bits each.
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        lost = round(p * 2**16)
        kept = (words.view(torch.int16)[: x.numel()] >= lost - 2**15).view(x.shape)
        return x * (kept.to(x.dtype) * (2**16 / (2**16 - lost)))


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int | Tensor, int | Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of a counter of four 32-bit words (int64 tensors) under a two-word key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        (high_0, low_0), (high_1, low_1) = _product(c0, _ROUND_0), _product(c2, _ROUND_1)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _WEYL_0) & _WORD, (k1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


def _product(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of a product of 32-bit words, in steps that stay below 2^49.

    The full product overflows int64: PyTorch's own kernels wrap around, but in code compiled for a
    CPU signed overflow is undefined behaviour.
    """
    upper, lower = (x >> 16) * factor, (x & 0xFFFF) * factor
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)


def _hash32(x: Tensor) -> Tensor:
    """A bijective mix of int32 words (two multiply-xorshift rounds), in place: x is overwritten."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= -2073254261  # 0x846CA68B
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def shuffled(position: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Example at each place of an endless, per-epoch reshuffled pass over `size` examples.

    `position` counts examples since the start of training; epoch e is a permutation of
    range(size) keyed by (seed, e). A Feistel network with cycle walking finds any place in
    constant time and memory, so there is no order to store and none to restore.
    """
    epoch, index = np.divmod(position.astype(np.uint64), np.uint64(size))
    half = max(1, (int(size - 1).bit_length() + 1) // 2)
    low = np.uint64((1 << half) - 1)
    key = _mix64(epoch + np.uint64(seed * 0x9E3779B97F4A7C15 % 2**64))
    outside = np.ones(index.shape, dtype=bool)  # not yet walked back into range(size)
    while outside.any():
        left, right = index[outside] >> np.uint64(half), index[outside] & low
        for turn in range(6):
            left, right = right, left ^ (_mix64(right + key[outside] + np.uint64(turn << 56)) & low)
        index[outside] = (left << np.uint64(half)) | right
        outside = index >= size
    return index.astype(np.int64)


def _mix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 on uint64 words, which wrap."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
