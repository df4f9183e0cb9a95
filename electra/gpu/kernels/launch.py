"""What the kernels share: Triton if there is one, dropout, sums of columns, sizes of grids."""

# pyright: basic, reportMissingImports=false, reportOptionalMemberAccess=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # builds of torch for the CPU come without it
    triton = tl = TensorDescriptor = None

Config = dict[str, Any]

LOG2_E = 1.4426950408889634
MOST_TOKENS = 128  # whose attention one program holds on chip


def available() -> bool:
    return triton is not None


def jit(kernel: Any) -> Any:
    return kernel if triton is None else triton.jit(kernel)


# Dropout: drawn again on the way back, nothing is stored


class Dropout(NamedTuple):
    """Of each sequence's elements at one place, as `StepRng.dropout` counts and draws them."""

    keys: Tensor  # (B,) int32, of `StepRng.keys`
    rate: float


Drops = Sequence[Dropout | None]  # attention's output, the feed-forward's, the probabilities
NOTHING: Drops = (None, None, None)


def dropout_of_rows(drop: Dropout | None, rows: int) -> tuple[Tensor | None, Config]:
    """What kernels take for it that see but rows: the keys; the rate, and the rows of a key."""
    keys, rate = drop or (None, 0.0)
    return keys, {"RATE": rate, "T": 1 if keys is None else rows // len(keys)}


def dropout_of_shares(drop: Dropout | None, T: int) -> tuple[Tensor | None, Config]:
    """What those of attention take: the keys; the rate, and whether T is a power of two."""
    keys, rate = drop or (None, 0.0)
    return keys, {"RATE": rate, "POWER": keys is not None and T & (T - 1) == 0}


@jit
def is_kept(key, row, column, WIDTH, POWER: tl.constexpr, RATE: tl.constexpr):
    """(rows, columns) bool: whether dropout leaves elements row WIDTH + column of sequences with
    these keys: whether 24 bits of `randomness._hash32`(element ^ key) are at least so many.

    POWER: WIDTH is a power of two, so that the sum is one of bits, as is the hash's first step:
    that of whole rows is taken with their keys. Its last one, word ^ (word >> 16), changes the
    lower half, which decides where the upper one is that of `least`: this one's serves for all.
    """
    least: tl.constexpr = int(RATE * 2**24) * 2**8
    number = column[None, :]
    key += tl.zeros_like(row)
    if POWER:
        key ^= row * WIDTH
    else:
        number += (row * WIDTH)[:, None]
        number ^= number >> 16
    key = key.to(tl.uint32, bitcast=True)
    word = (key ^ (key >> 16))[:, None] ^ number.to(tl.uint32)
    word *= 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return (word ^ (least >> 16)) >= least


@jit
def dropped(x, keys, first, N, T, D: tl.constexpr, RATE: tl.constexpr):
    """x, float32, after dropout: the rows from `first` on of N with D columns; T have one key."""
    if RATE > 0:
        row = first.to(tl.int32) + tl.arange(0, x.shape[0])
        key = tl.load(keys + row // T, row < N, 0)
        kept = is_kept(key, row % T, tl.arange(0, x.shape[1]), D, D & (D - 1) == 0, RATE)
        x = tl.where(kept, x * (1.0 / (1.0 - RATE)), 0.0)
    return x


# Sums over rows, and sizes


def column_sums(partial: list[Tensor], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Σ over the rows of up to four (P, C), one behind the other: in float32, and in dtype."""
    rows, widths = zip(*(p.shape for p in partial), strict=True)
    total, device = sum(widths), partial[0].device
    out, narrow = (torch.empty(total, dtype=d, device=device) for d in (torch.float32, dtype))
    tall = min(256, triton.next_power_of_2(max(rows)))
    tile = (tall, 4096 // tall)
    tiles = [triton.cdiv(width, tile[1]) for width in widths]
    none = 4 - len(partial)
    starts = [sum(tiles[:n]) for n in range(1, len(tiles))] + [sum(tiles)] * none
    _column_sums[(sum(tiles),)](
        *partial, *partial[:1] * none, *rows, *[0] * none, *widths, *[0] * none, *starts,
        out, narrow, triton.next_power_of_2(triton.cdiv(max(rows), tile[0])), *tile, num_warps=8,
    )  # fmt: skip
    return out, narrow


@jit
def _column_sums(
    a, b, c, d, a_rows, b_rows, c_rows, d_rows, a_width, b_width, c_width, d_width,
    b_start, c_start, d_start, out, narrow, STEPS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of one of the four."""
    program = tl.program_id(0)
    rows = a_rows
    width = a_width
    start = 0
    first = 0
    if program >= b_start:
        a = b
        rows = b_rows
        width = b_width
        start = b_start
        first = a_width
    if program >= c_start:
        a = c
        rows = c_rows
        width = c_width
        start = c_start
        first = a_width + b_width
    if program >= d_start:
        a = d
        rows = d_rows
        width = d_width
        start = d_start
        first = a_width + b_width + c_width
    column = (program - start) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(STEPS):
        row = step * ROWS + tl.arange(0, ROWS)
        ok = (row < rows)[:, None] & (column < width)[None, :]
        total += tl.load(a + row[:, None] * width + column[None, :], ok, 0.0)
    result = tl.sum(total, 0)
    tl.store(out + first + column, result, column < width)
    tl.store(narrow + first + column, result.to(narrow.dtype.element_ty), column < width)


def check(*tensors: Tensor) -> None:
    assert all(t.is_contiguous() for t in tensors), "kernels take contiguous tensors"


def rows_of(config: Config, D: int) -> tuple[Config, Config]:
    """Options of a kernel that takes whole rows, and how many of what width make a tile."""
    kernel, width = dict(config), triton.next_power_of_2(D)
    return kernel, {"ROWS": max(1, kernel.pop("ELEMENTS") // width), "WIDTH": width}


def strips_of(N: int, rows: int, programs: int) -> tuple[int, int]:
    """How many programs share N rows, and in how many steps of `rows` each.

    The steps are compiled in: a power of two, so that few kernels serve all batches.
    """
    tiles = triton.cdiv(N, rows)
    steps = triton.next_power_of_2(triton.cdiv(tiles, programs))
    return triton.cdiv(tiles, steps), steps


def precision_of(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"  # bfloat16's products are exact anyway
