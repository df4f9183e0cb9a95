"""The optimizer: Adam on flat buffers, and the products of Muon."""

# pyright: basic, reportMissingImports=false, reportOptionalMemberAccess=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import math

import torch
from torch import Tensor

from .launch import Config, check, jit, precision_of, strips_of, tl, triton

CHUNK = 64  # of flat buffers: parameters begin at multiples of it
MOST_PLACES = 2**31 - 1  # of a flat buffer, which the kernels of the optimizer can tell apart
SQUARES: Config = {"ROWS": 64, "PROGRAMS": 528, "STAGES": 1, "num_warps": 8}
ADAM: Config = {"ROWS": 16, "num_warps": 8}  # 16 bytes of float32 a thread, one way to lie
MOST_TURNED = 64, 256  # sides of a matrix that one program holds on chip, with all of `orthogonal`
ORTHOGONAL: Config = {"num_warps": 4, "num_stages": 1}
SYMMETRIC: Config = {
    "TILE": 128, "INNER": 64, "num_warps": 8, "num_stages": 3, "maxnreg": 128
}  # fmt: skip


# The optimizer: flat buffers in chunks, whose parameters have one rate and one decay each


def sums_of_squares(
    wide: Tensor, narrow: Tensor | None, where: slice, config: Config = SQUARES
) -> Tensor:
    """Partial sums of g², (P,) float32. g: (S,) float32 is `wide`; if `narrow` is given, it has the
    stretch `where` instead, in its own type."""
    check(wide, *(() if narrow is None else (narrow,)))
    begin, end, chunks = _chunks(wide, narrow, where)
    kernel = dict(config)
    programs, steps = strips_of(chunks, kernel["ROWS"], kernel.pop("PROGRAMS"))
    partial = torch.empty(programs, dtype=torch.float32, device=wide.device)
    _sums_of_squares[(programs,)](wide, narrow, partial, chunks, begin, end, steps, CHUNK, **kernel)
    return partial


@jit
def _load_gradient(wide, narrow, row, ok, begin, end, CHUNK: tl.constexpr):
    """(rows, CHUNK) float32: rows from begin to end are the narrow ones, if there are any."""
    at = row[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    if narrow is None:
        g = tl.load(wide + at, ok, 0.0)
    else:
        works = ((row >= begin) & (row < end))[:, None]
        others = ((row < begin) | (row >= end))[:, None]
        g = tl.load(wide + at, ok & others, 0.0)
        g += tl.load(narrow + at - begin * CHUNK, ok & works, 0.0).to(tl.float32)
    return g


@jit
def _sums_of_squares(
    wide, narrow, partial, N, begin, end, STEPS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((ROWS, CHUNK), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        row = (step * tl.num_programs(0) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
        g = _load_gradient(wide, narrow, row, (row < N)[:, None], begin, end, CHUNK)
        total += g * g
    tl.store(partial + tl.program_id(0), tl.sum(tl.sum(total, 1), 0))


def adam(
    p: Tensor,
    wide: Tensor,
    narrow: Tensor | None,
    m: Tensor,
    v: Tensor,
    copy: Tensor,
    where: slice,
    groups: Tensor,
    scalars: tuple[Tensor, Tensor, Tensor, Tensor],
    betas: tuple[float, float],
    eps: float,
    config: Config = ADAM,
) -> None:
    """One step of Adam with decoupled weight decay on p, m, v (S,), in place, as torch's fused one.

    The gradient is as in `sums_of_squares`. copy: p of the stretch `where` in its working type.
    groups: (S / CHUNK, 2) float32, factor of the rate and weight decay of each chunk. scalars, ()
    float32 each: rate, what the gradient is divided by, 1 if nothing is to change, steps so far.
    """
    check(p, wide, m, v, copy, groups, *(() if narrow is None else (narrow,)))
    begin, end, chunks = _chunks(wide, copy, where)
    assert narrow is None or len(narrow) == len(copy), (narrow.shape, copy.shape)
    assert len(groups) == chunks, (groups.shape, chunks)
    logs = tuple(math.log(beta) if beta else -1e9 for beta in betas)
    _adam[(triton.cdiv(chunks, config["ROWS"]),)](
        p, wide, narrow, m, v, copy, groups, *scalars, chunks, begin, end,
        *(1 - beta for beta in betas), *logs, eps, CHUNK, **config,
    )  # fmt: skip


def _chunks(wide: Tensor, narrow: Tensor | None, where: slice) -> tuple[int, int, int]:
    """First and last of the narrow chunks, and how many there are in all."""
    assert len(wide) <= MOST_PLACES, "places are 32 bits wide"
    assert narrow is None or len(narrow) == where.stop - where.start, (narrow.shape, where)
    assert all(place % CHUNK == 0 for place in (len(wide), where.start, where.stop)), where
    return where.start // CHUNK, where.stop // CHUNK, len(wide) // CHUNK


@jit
def _correction(steps, log):
    """1 − exp(steps · log), also where that is tiny; log < 0."""
    y = steps * log
    small = tl.maximum(y, -0.5)
    series = 1.0 + small * (1.0 / 9)
    for k in tl.static_range(8, 1, -1):
        series = 1.0 + small * (1.0 / k) * series
    return tl.where(y > -0.5, -small * series, 1.0 - tl.exp(y))


@jit
def _adam(
    p, wide, narrow, m, v, copy, groups, rate, divisor, skip, steps, N, begin, end,
    beta1, beta2, log1, log2, eps, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: ROWS chunks. beta1 and beta2 are 1 − β."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_rows = row < tl.where(tl.load(skip) == 0.0, N, 0)
    ok = in_rows[:, None]
    at = row[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    t = tl.load(steps)
    size = tl.load(rate) * tl.load(groups + 2 * row, in_rows, 0.0)
    decay = size * tl.load(groups + 2 * row + 1, in_rows, 0.0)
    size = size / _correction(t, log1)
    slope = 1.0 / tl.sqrt_rn(_correction(t, log2))
    g = _load_gradient(wide, narrow, row, ok, begin, end, CHUNK) / tl.load(divisor)
    first = tl.load(m + at, ok, 0.0)
    first += (g - first) * beta1
    tl.store(m + at, first, ok)
    second = tl.load(v + at, ok, 0.0)
    second += (g * g - second) * beta2
    tl.store(v + at, second, ok)
    x = tl.load(p + at, ok, 0.0)
    x -= decay[:, None] * x
    x -= size[:, None] * first / (tl.sqrt_rn(second) * slope + eps)
    tl.store(p + at, x, ok)
    works = ((row >= begin) & (row < end))[:, None]
    tl.store(copy + at - begin * CHUNK, x.to(copy.dtype.element_ty), ok & works)


# Muon


def turns(u: Tensor) -> bool:
    """Whether matrices (n, rows, columns) are small enough for `orthogonal`."""
    return all(size <= most for size, most in zip(sorted(u.shape[1:]), MOST_TURNED, strict=True))


def orthogonal(
    u: Tensor,
    dtype: torch.dtype,
    coefficients: tuple[float, float, float],
    config: Config = ORTHOGONAL,
) -> Tensor:
    """`optim.orthogonal` of u (n, rows, columns), float32, with the rounds on Gram matrices.

    As `optim.orthogonal_by_gram`, which says why in this way: operands of all products and the
    result are of type dtype, float16 (or float32).
    """
    check(u)
    assert turns(u), u.shape
    n, rows, columns = u.shape
    out = torch.empty_like(u, dtype=dtype)
    tile = [max(16, triton.next_power_of_2(size)) for size in sorted((rows, columns))]
    _orthogonal[(n,)](
        u, out, *coefficients, rows, columns, *tile, rows > columns, precision_of(out), **config
    )
    return out


@jit
def _orthogonal(
    u, out, a, b, c, R: tl.constexpr, C: tl.constexpr, SHORT: tl.constexpr, LONG: tl.constexpr,
    TALL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: one matrix. It lies as (SHORT, LONG), zero outside; so does all that follows."""
    short = tl.arange(0, SHORT)[:, None]
    long = tl.arange(0, LONG)[None, :]
    if TALL:
        at = long * C + short
        ok = (long < R) & (short < C)
    else:
        at = short * C + long
        ok = (short < R) & (long < C)
    u += tl.program_id(0).to(tl.int64) * (R * C)
    out += tl.program_id(0).to(tl.int64) * (R * C)
    narrow = out.dtype.element_ty
    wide = tl.load(u + at, ok, 0.0)
    norm = tl.sqrt_rn(tl.sum(tl.sum(wide * wide, 1), 0))
    x = tl.div_rn(wide, tl.maximum(norm, 1e-7)).to(narrow)
    unit = tl.where(short == tl.arange(0, SHORT)[None, :], a, 0.0)
    for part in tl.static_range(2):  # three rounds, then two
        gram = tl.dot(x, tl.trans(x), input_precision=PRECISION)
        product = gram.to(narrow)
        for i in tl.static_range(3 - part):
            operand = gram.to(narrow)
            square = tl.dot(operand, operand, input_precision=PRECISION)
            by = (unit + b * gram + c * square).to(narrow)
            product = tl.dot(by, product, input_precision=PRECISION).to(narrow) if i else by
            if i + part < 2:
                half = tl.dot(operand, by, input_precision=PRECISION).to(narrow)
                gram = tl.dot(by, half, input_precision=PRECISION)
        x = tl.dot(product, x, input_precision=PRECISION).to(narrow)
    tl.store(out + at, x, ok)


def symmetric(
    x: Tensor,
    y: Tensor,
    *,
    by: float = 1.0,
    plus: tuple[float, Tensor] | None = None,
    unit: float = 0.0,
    out: Tensor | None = None,
    config: Config = SYMMETRIC,
) -> Tensor:
    """by · x y, plus a multiple of a third matrix and of the unit matrix, known to be symmetric.

    x: (n, S, K), y: (n, K, S), also as views that are transposed. plus: factor and (n, S, S). Only
    the tiles on and below the diagonal are computed, the others are their mirror images.
    """
    n, S, K = x.shape
    assert y.shape == (n, K, S), (x.shape, y.shape)
    if out is None:
        out = torch.empty(n, S, S, dtype=x.dtype, device=x.device)
    factor, z = plus or (0.0, None)
    check(out, *(() if z is None else (z,)))
    tile = min(config["TILE"], max(16, triton.next_power_of_2(S)))
    inner = min(config["INNER"], max(16, triton.next_power_of_2(K)))
    rows = triton.cdiv(S, tile)
    shape = {"TILE": tile, "INNER": inner, "ROWS": rows, "PRECISION": precision_of(x)}
    shape["WHOLE"] = S % tile == 0 and K % inner == 0
    _symmetric[(n * rows * (rows + 1) // 2,)](
        x, y, z, out, *x.stride(), *y.stride(), S, K, by, factor, unit, **{**config, **shape}
    )
    return out


@jit
def _symmetric(
    x, y, z, out, x_batch, x_row, x_column, y_batch, y_row, y_column, S, K, by, factor, unit,
    TILE: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: one tile, and its mirror image."""
    TILES: tl.constexpr = ROWS * (ROWS + 1) // 2
    n = (tl.program_id(0) // TILES).to(tl.int64)
    tile = tl.program_id(0) % TILES
    i = tl.full((), 0, tl.int32)
    for number in tl.static_range(1, ROWS):
        i += (tile >= number * (number + 1) // 2).to(tl.int32)
    j = tile - i * (i + 1) // 2
    row = i * TILE + tl.arange(0, TILE)
    column = j * TILE + tl.arange(0, TILE)
    inner = tl.arange(0, INNER)
    left = (x + n * x_batch) + (row[:, None] * x_row + inner[None, :] * x_column)
    right = (y + n * y_batch) + (inner[:, None] * y_row + column[None, :] * y_column)
    total = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, K, INNER):
        if WHOLE:
            a = tl.load(left)
            b = tl.load(right)
        else:
            a = tl.load(left, (row[:, None] < S) & (inner[None, :] < K - k), 0.0)
            b = tl.load(right, (inner[:, None] < K - k) & (column[None, :] < S), 0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        left += INNER * x_column
        right += INNER * y_row
    total = by * total + tl.where(row[:, None] == column[None, :], unit, 0.0)
    ok = (row[:, None] < S) & (column[None, :] < S)
    at = row[:, None] * S + column[None, :]
    if z is not None:
        total += factor * tl.load((z + n * S * S) + at, ok, 0.0).to(tl.float32)
    out += n * S * S
    result = total.to(out.dtype.element_ty)
    tl.store(out + at, result, ok)
    if i != j:
        mirror = column[:, None] * S + row[None, :]
        tl.store(out + mirror, tl.trans(result), (column[:, None] < S) & (row[None, :] < S))
