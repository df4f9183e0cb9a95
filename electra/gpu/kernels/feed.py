"""GELU: by itself, and in the kernel of the product before it."""

# pyright: basic, reportMissingImports=false, reportOptionalMemberAccess=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
from torch import Tensor

from .launch import Config, TensorDescriptor, check, jit, precision_of, strips_of, tl, triton

GELU: Config = {"ELEMENTS": 2048, "num_warps": 4}
GELU_BACKWARD: Config = {
    "ROWS": 16, "COLUMNS": 128, "PROGRAMS": 528, "STAGES": 3, "num_warps": 4
}  # fmt: skip
# Rows held in registers while the columns' weights go by; weights that stay on chip as rows go by.
PRODUCT_GELU: Config = {
    "ROWS": 128, "COLUMNS": 64, "PROGRAMS": 256, "STAGES": 3, "num_warps": 4, "num_stages": 1
}  # fmt: skip
PRODUCT_GELU_BACKWARD: Config = {
    "ROWS": 64, "COLUMNS": 128, "PROGRAMS": 264, "STAGES": 1,
    "num_warps": 8, "num_stages": 1, "maxnreg": 128,
}  # fmt: skip


def gelu(pre: Tensor, config: Config = GELU) -> Tensor:
    """x Φ(x), as F.gelu."""
    check(pre)
    act = torch.empty_like(pre)
    grid = (triton.cdiv(pre.numel(), config["ELEMENTS"]),)
    _gelu[grid](pre, act, pre.numel(), **config)
    return act


@jit
def _gelu(pre, act, size, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    x = tl.load(pre + at, at < size, 0.0).to(tl.float32)
    y, _ = gelu_of(x)
    tl.store(act + at, y.to(act.dtype.element_ty), at < size)


def gelu_backward(
    pre: Tensor,
    g: Tensor,
    config: Config = GELU_BACKWARD,
    act: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dpre in the place of g, the gradient of act; act = gelu(pre); partial sums, (P, F), of dpre.

    act is computed once more, unless it is given.
    """
    check(pre, g)
    N, F = pre.shape
    again = act is None
    act = torch.empty_like(pre) if act is None else act
    kernel = dict(config)
    kernel["COLUMNS"] = min(kernel["COLUMNS"], triton.next_power_of_2(F))
    columns = triton.cdiv(F, kernel["COLUMNS"])
    strips, steps = strips_of(N, kernel["ROWS"], triton.cdiv(kernel.pop("PROGRAMS"), columns))
    partial = torch.empty(strips, F, dtype=torch.float32, device=pre.device)
    _gelu_backward[(columns, strips)](
        pre, g, act, partial, N, F, AGAIN=again, STEPS=steps, **kernel
    )
    return g, act, partial


@jit
def _gelu_backward(
    pre, g, act, partial, N, F: tl.constexpr, AGAIN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < F
    dbias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        row = (step * tl.num_programs(1) + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
        ok = (row < N)[:, None] & in_columns[None, :]
        at = row.to(tl.int64)[:, None] * F + column[None, :]
        x = tl.load(pre + at, ok, 0.0).to(tl.float32)
        y, slope = gelu_of(x)
        out = tl.load(g + at, ok, 0.0).to(tl.float32) * slope
        dbias += out
        tl.store(g + at, out.to(g.dtype.element_ty), ok)
        if AGAIN:
            tl.store(act + at, y.to(act.dtype.element_ty), ok)
    tl.store(partial + tl.program_id(1) * F + column, tl.sum(dbias, 0), in_columns)


@jit
def gelu_of(x):
    """gelu(x) = x Φ(x) and its slope Φ(x) + x Φ'(x), both to 4e-7 (float32's own F.gelu: 1e-6).

    log2 Φ(−|x|) is a polynomial of degree 8, minimax in both errors up to |x| = 6; beyond, Φ(−|x|)
    is below 1e-9 and goes on falling. It takes a third of erf's instructions, which would otherwise
    be the limit.
    """
    z = tl.abs(x)
    tail = -3.1040079e-7 * z + 4.9603887e-6
    tail = tail * z + 2.2229208e-6
    tail = tail * z - 6.661925e-4
    tail = tail * z + 7.8727016e-3
    tail = tail * z - 5.3154837e-2
    tail = tail * z - 4.5895103e-1
    tail = tail * z - 1.1511421
    tail = tl.exp2(tail * z - 0.99999917)  # Φ(−|x|)
    slope = tail - z * tl.exp2(-0.72134752 * x * x - 1.3257481)
    return tl.maximum(x, 0.0) - z * tail, tl.where(x > 0, 1.0 - slope, slope)


# GELU in the kernel of the product before it


def product_gelu(
    x: Tensor, w: Tensor, b: Tensor, config: Config = PRODUCT_GELU
) -> tuple[Tensor, Tensor]:
    """pre = x wᵀ + b and act = gelu(pre), both (N, F), of x (N, D) and w (F, D).

    GELU sees pre before it is rounded. The copy engine reads zeros past the end of a tensor and
    writes nothing there, so that no tile has to fit.
    """
    check(x, w, b)
    N, (F, D) = len(x), w.shape
    pre, act = x.new_empty(N, F), x.new_empty(N, F)
    kernel, tile, inner = _feed_tile(config, D, F)
    rows, columns = tile.values()
    tall = triton.cdiv(N, rows)
    beside, steps = strips_of(F, columns, triton.cdiv(kernel.pop("PROGRAMS"), tall))
    tiles = ((x, rows, inner), (w, columns, inner), (pre, rows, columns), (act, rows, columns))
    _product_gelu[(beside, tall)](
        *(TensorDescriptor.from_tensor(t, list(size)) for t, *size in tiles),
        b, F, STEPS=steps, **tile, PRECISION=precision_of(x), **kernel,
    )  # fmt: skip
    return pre, act


def product_gelu_backward(
    ds: Tensor, w: Tensor, pre: Tensor, config: Config = PRODUCT_GELU_BACKWARD
) -> tuple[Tensor, Tensor]:
    """Of `gelu_backward(pre, ds w)`, ds (N, D) and w (D, F): dpre and the partial sums.

    The product is neither stored nor rounded.
    """
    check(ds, w, pre)
    N, (D, F) = len(ds), w.shape
    dpre = torch.empty_like(pre)
    kernel, tile, inner = _feed_tile(config, D, F)
    rows, columns = tile.values()
    wide = triton.cdiv(F, columns)
    strips, steps = strips_of(N, rows, triton.cdiv(kernel.pop("PROGRAMS"), wide))
    partial = torch.empty(strips, F, dtype=torch.float32, device=pre.device)
    tiles = ((ds, rows, inner), (w, inner, columns), (pre, rows, columns), (dpre, rows, columns))
    _product_gelu_backward[(wide, strips)](
        *(TensorDescriptor.from_tensor(t, list(size)) for t, *size in tiles),
        partial, F, STEPS=steps, **tile, PRECISION=precision_of(ds), **kernel,
    )  # fmt: skip
    return dpre, partial


def _feed_tile(config: Config, D: int, F: int) -> tuple[Config, Config, int]:
    """Options, the tile, and the width that holds all of D."""
    kernel = dict(config)
    columns = min(kernel.pop("COLUMNS"), max(16, triton.next_power_of_2(F)))
    tile = {"ROWS": kernel.pop("ROWS"), "COLUMNS": columns}
    return kernel, tile, max(16, triton.next_power_of_2(D))


@jit
def _product_gelu(
    x, w, pre, act, b, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows. Those beside each other take turns with the columns."""
    row = tl.program_id(1) * ROWS
    # What is computed is in registers: shared memory is left to the weights.
    left = x.load([row, 0])
    left += tl.zeros(left.shape, left.dtype)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        column = (step * tl.num_programs(0) + tl.program_id(0)) * COLUMNS
        total = tl.dot(left, w.load([column, 0]).T, input_precision=PRECISION)
        at = column + tl.arange(0, COLUMNS)
        total += tl.load(b + at, at < F, 0.0).to(tl.float32)[None, :]
        pre.store([row, column], total.to(pre.dtype))
        y, _ = gelu_of(total)
        act.store([row, column], y.to(act.dtype))


@jit
def _product_gelu_backward(
    ds, w, pre, dpre, partial, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEPS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: COLUMNS columns of many rows; rows past the end have no gradient."""
    column = tl.program_id(0) * COLUMNS
    right = w.load([0, column])
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        row = (step * tl.num_programs(1) + tl.program_id(1)) * ROWS
        g = tl.dot(ds.load([row, 0]), right, input_precision=PRECISION)
        # Nothing is below: this is x, but threads have of it what they have of g.
        x = tl.where(g < float("-inf"), g, pre.load([row, column]).to(tl.float32))
        _, slope = gelu_of(x)
        out = g * slope
        dpre.store([row, column], out.to(dpre.dtype))
        sums += out
    at = column + tl.arange(0, COLUMNS)
    tl.store(partial + tl.program_id(1) * F + at, tl.sum(sums, 0), at < F)
