"""Residual and layer norm: LN(x + a), by itself and behind the product that makes a."""

# pyright: basic, reportMissingImports=false, reportOptionalMemberAccess=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
from torch import Tensor

from .launch import (
    Config,
    Dropout,
    TensorDescriptor,
    check,
    dropout_of_rows,
    dropped,
    jit,
    precision_of,
    rows_of,
    strips_of,
    tl,
    triton,
)

ADD_NORM: Config = {"ELEMENTS": 2048, "num_warps": 4}
# Warps that work alone: sums of rows do not travel between them.
ADD_NORM_BACKWARD: Config = {"ELEMENTS": 512, "PROGRAMS": 1056, "STAGES": 3, "num_warps": 1}
PRODUCT_ADD_NORM: Config = {"ROWS": 128, "INNER": 64, "num_warps": 8, "num_stages": 4}


def add_norm(
    x: Tensor,
    a: Tensor,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
    config: Config = ADD_NORM,
    statistics: Tensor | None = None,
    drop: Dropout | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y = LN(s), s = x + a in their type; the mean and 1/std of every row, (N,) float32.

    The last two are the rows of `statistics`, (2, N), which may be given. drop: of a.
    """
    check(x, a, gamma, beta)
    N, D = x.shape
    y, s = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = gamma.new_empty(2, N) if statistics is None else statistics
    kernel, rows = rows_of(config, D)
    keys, shape = dropout_of_rows(drop, N)
    grid = (triton.cdiv(N, rows["ROWS"]),)
    _add_norm[grid](
        x, a, keys, gamma, beta, y, s, mean, rstd, N, eps, D, **shape, **rows, **kernel
    )  # fmt: skip
    return y, s, mean, rstd


@jit
def _add_norm(
    x, a, keys, gamma, beta, y, s, mean, rstd, N, eps, D: tl.constexpr, T: tl.constexpr,
    RATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    in_rows = row < N - first
    in_columns = column < D
    ok = in_rows[:, None] & in_columns[None, :]
    at = first * D + (row[:, None] * D + column[None, :])
    total = tl.load(x + at, ok, 0.0).to(tl.float32)
    branch = tl.load(a + at, ok, 0.0).to(tl.float32)
    total += dropped(branch, keys, first, N, T, D, RATE)
    total = total.to(s.dtype.element_ty)
    tl.store(s + at, total, ok)
    total = total.to(tl.float32)
    mu = tl.sum(total, 1) / D
    centred = tl.where(in_columns[None, :], total - mu[:, None], 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / D + eps)
    g = tl.load(gamma + column, in_columns, 0.0).to(tl.float32)
    b = tl.load(beta + column, in_columns, 0.0).to(tl.float32)
    out = centred * scale[:, None] * g[None, :] + b[None, :]
    tl.store(y + at, out.to(y.dtype.element_ty), ok)
    tl.store(mean + first + row, mu, in_rows)
    tl.store(rstd + first + row, scale, in_rows)


def add_norm_backward(
    dy: Tensor,
    dy2: Tensor | None,
    s: Tensor,
    mean: Tensor,
    rstd: Tensor,
    gamma: Tensor,
    config: Config = ADD_NORM_BACKWARD,
    again: tuple[Tensor, Tensor] | None = None,
    drop: Dropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """ds and da of y = LN(s), s = x + a, for the gradient dy + dy2; partial sums, (P, 3 D), of
    dgamma, dbeta and da.

    With `again`, (beta, y), y is computed once more. drop: of a; da is ds itself without.
    """
    check(dy, s, mean, rstd, gamma, *(() if dy2 is None else (dy2,)))
    beta, y = again or (None, None)
    N, D = s.shape
    ds = torch.empty_like(s)
    da = ds if drop is None else torch.empty_like(s)
    keys, shape = dropout_of_rows(drop, N)
    kernel, rows = rows_of(config, D)
    warps = max(1, rows["WIDTH"] // config["ELEMENTS"])  # of a row that is more than one holds
    kernel["num_warps"] *= warps
    many = 1 if N < 65536 else 2  # few programs write fewer sums, many read faster
    most = many * kernel.pop("PROGRAMS") // warps
    programs, steps = strips_of(N, rows["ROWS"], most)
    partial = torch.empty(programs, 3 * D, dtype=torch.float32, device=s.device)
    _add_norm_backward[(programs,)](
        dy, dy2, s, mean, rstd, gamma, beta, ds, None if drop is None else da, keys, y, partial,
        N, D, STEPS=steps, **shape, **rows, **kernel,
    )  # fmt: skip
    return ds, da, partial


@jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@jit
def _add_norm_backward(
    dy, dy2, s, mean, rstd, gamma, beta, ds, da, keys, y, partial, N, D: tl.constexpr,
    T: tl.constexpr, RATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)
    in_columns = column < D
    g = tl.load(gamma + column, in_columns, 0.0).to(tl.float32)
    # Sums stay apart for each row of a tile until the end: no exchange between threads inside.
    dgamma = tl.zeros((ROWS, WIDTH), tl.float32)
    dbeta = tl.zeros((ROWS, WIDTH), tl.float32)
    dbias = tl.zeros((ROWS, WIDTH), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        first = (step * tl.num_programs(0) + tl.program_id(0)) * ROWS
        row = first + tl.arange(0, ROWS)
        in_rows = row < N
        ok = in_rows[:, None] & in_columns[None, :]
        at = row.to(tl.int64)[:, None] * D + column[None, :]
        gradient = tl.load(dy + at, ok, 0.0).to(tl.float32)
        if dy2 is not None:
            gradient += tl.load(dy2 + at, ok, 0.0).to(tl.float32)
        mu = tl.load(mean + row, in_rows, 0.0)
        scale = tl.load(rstd + row, in_rows, 0.0)
        normal = (tl.load(s + at, ok, 0.0).to(tl.float32) - mu[:, None]) * scale[:, None]
        if y is not None:
            c = tl.load(beta + column, in_columns, 0.0).to(tl.float32)
            again = normal * g[None, :] + c[None, :]
            tl.store(y + at, again.to(y.dtype.element_ty), ok)
        dgamma += gradient * normal
        dbeta += gradient
        gradient *= g[None, :]
        # Both sums travel between threads together.
        along, level = tl.reduce((gradient * normal, gradient), 1, _add_pairs)
        along /= D
        level /= D
        out = (gradient - level[:, None] - normal * along[:, None]) * scale[:, None]
        branch = dropped(out, keys, first, N, T, D, RATE)
        dbias += branch
        tl.store(ds + at, out.to(ds.dtype.element_ty), ok)
        if da is not None:
            tl.store(da + at, branch.to(da.dtype.element_ty), ok)
    partial += tl.program_id(0) * (3 * D) + column
    tl.store(partial, tl.sum(dgamma, 0), in_columns)
    tl.store(partial + D, tl.sum(dbeta, 0), in_columns)
    tl.store(partial + 2 * D, tl.sum(dbias, 0), in_columns)


def product_add_norm(
    x: Tensor,
    w: Tensor,
    b: Tensor,
    h: Tensor,
    gamma: Tensor,
    beta: Tensor,
    eps: float,
    config: Config = PRODUCT_ADD_NORM,
    statistics: Tensor | None = None,
    drop: Dropout | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`add_norm(h, x wᵀ + b, …)` of x (N, C) and w (D, C), D ≤ 256; the product is not stored."""
    check(x, w, b, h, gamma, beta)
    (N, C), D = x.shape, len(w)
    y, s = torch.empty_like(h), torch.empty_like(h)
    mean, rstd = gamma.new_empty(2, N) if statistics is None else statistics
    kernel, width = dict(config), max(16, triton.next_power_of_2(D))
    rows, inner = kernel.pop("ROWS"), min(kernel.pop("INNER"), C & -C)  # divides C
    keys, shape = dropout_of_rows(drop, N)
    # The copy engine reads zeros past the end of a tensor and writes nothing there.
    tiles = ((x, rows, inner), (w, width, inner), *((t, rows, width) for t in (h, y, s)))
    _product_add_norm[(triton.cdiv(N, rows),)](
        *(TensorDescriptor.from_tensor(t, list(tile)) for t, *tile in tiles),
        b, keys, gamma, beta, mean, rstd, N, eps, C, D, rows, width, inner,
        precision_of(x), **shape, **kernel,
    )  # fmt: skip
    return y, s, mean, rstd


@jit
def _product_add_norm(
    x, w, h, y, s, b, keys, gamma, beta, mean, rstd, N, eps, C: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr, RATE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for k in range(0, C, INNER):
        left = x.load([first, k])
        total = tl.dot(left, w.load([0, k]).T, total, input_precision=PRECISION)
    column = tl.arange(0, WIDTH)
    in_columns = column < D
    total += tl.load(b + column, in_columns, 0.0).to(tl.float32)[None, :]
    total = dropped(total, keys, first, N, T, D, RATE)
    total = (total + h.load([first, 0]).to(tl.float32)).to(s.dtype)
    s.store([first, 0], total)
    total = total.to(tl.float32)
    mu = tl.sum(total, 1) / D
    total = tl.where(in_columns[None, :], total - mu[:, None], 0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(total * total, 1) / D + eps)
    g = tl.load(gamma + column, in_columns, 0.0)
    c = tl.load(beta + column, in_columns, 0.0)
    y.store([first, 0], (total * scale[:, None] * g[None, :] + c[None, :]).to(y.dtype))
    row = first + tl.arange(0, ROWS)
    tl.store(mean + row, mu, row < N)
    tl.store(rstd + row, scale, row < N)
