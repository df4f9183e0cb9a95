"""Over the vocabulary: cross-entropy and a sample in one pass; the gradient of a look-up."""

# pyright: basic, reportMissingImports=false, reportOptionalMemberAccess=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
from torch import Tensor

from .launch import Config, check, column_sums, jit, tl, triton

CROSS_ENTROPY: Config = {"WIDTH": 2048, "STAGES": 3, "num_warps": 4}
CROSS_ENTROPY_BACKWARD: Config = {
    "WIDTH": 1024, "ROWS": 4, "GROUPS": 32, "STAGES": 1, "num_warps": 4
}  # fmt: skip
# A warp alone again: a run of equal ids is a sum within its threads. Long runs are read ahead.
TABLE_GRADIENT: Config = {
    "ROWS": {"ROWS": 16, "num_warps": 1}, "RUNS": {"PARTS": 16, "STAGES": 4, "num_warps": 4}
}  # fmt: skip


# Cross-entropy and sampling over the vocabulary


def cross_entropy_and_sample(
    logits: Tensor, targets: Tensor, u: Tensor, vocab_size: int, config: Config = CROSS_ENTROPY
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """−log p(target), a sample x̂ ~ p, the likeliest token, and log Σ exp for the way back.

    logits: (N, W) with W ≥ V = vocab_size; columns behind the vocabulary are not looked at, so that
    rows can be aligned. targets: (N,) int64. u: (N,) float32, uniform in [0, 1). All four (N,):
    float32, int64, int64, float32. One pass over the logits.

    The sample inverts the cumulative distribution in the order of the vocabulary, as
    `corruption.sample` does with the same u. Sums are taken in another order, so where u lies
    within rounding of the border between two tokens it can be the other one. There is no
    temperature, and the target is not ruled out: for these, `corruption.sample`.
    """
    N, W = logits.shape
    assert logits.is_contiguous()
    width = min(config["WIDTH"], triton.next_power_of_2(vocab_size))
    tiles = triton.cdiv(vocab_size, width)
    shape = {**config, "WIDTH": width, "USED": tiles, "TILES": triton.next_power_of_2(tiles)}
    nll, lse = (torch.empty(N, dtype=torch.float32, device=logits.device) for _ in range(2))
    x_hat, best = (torch.empty_like(targets) for _ in range(2))
    _cross_entropy[(N,)](logits, targets, u, nll, x_hat, best, lse, vocab_size, W, **shape)
    return nll, x_hat, best, lse


def cross_entropy_backward(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    dnll: Tensor,
    vocab_size: int,
    config: Config = CROSS_ENTROPY_BACKWARD,
) -> tuple[Tensor, Tensor]:
    """The gradient (p − 1(target)) dnll of logits (N, W), and its column sums (V,) float32.

    Columns behind the vocabulary are 0.
    """
    N, W = logits.shape
    assert logits.is_contiguous()
    shape = {**config, "WIDTH": min(config["WIDTH"], triton.next_power_of_2(W))}
    shape["TURNS"] = triton.cdiv(N, shape["ROWS"] * shape.pop("GROUPS"))
    groups = triton.cdiv(N, shape["ROWS"] * shape["TURNS"])
    out = torch.empty_like(logits)
    partial = torch.empty(groups, W, dtype=torch.float32, device=logits.device)
    grid = (triton.cdiv(W, shape["WIDTH"]), groups)
    _cross_entropy_backward[grid](
        logits, targets, lse, dnll.contiguous(), out, partial, N, vocab_size, W, **shape
    )
    return out, column_sums([partial])[0][:vocab_size]


@jit
def _load_logits(x, column, V, W):
    """Float32, −inf behind the vocabulary; bounded by W, whose factors let loads be wide."""
    z = tl.load(x + column, mask=column < W, other=0.0).to(tl.float32)
    return tl.where(column < V, z, float("-inf"))


@jit
def _pick(mass, index, want):
    """First index whose running mass exceeds `want`, or the last that has mass; the mass before."""
    running = tl.cumsum(mass, 0)
    first = tl.sum((running <= want).to(tl.int32), 0)
    last = tl.max(tl.where(mass > 0.0, index, 0), 0)
    chosen = tl.minimum(first, last)
    return chosen, tl.max(tl.where(index < chosen, running, 0.0), 0)


@jit
def _cross_entropy(
    logits, targets, uniforms, nll, x_hat, best, lse, V, W,
    WIDTH: tl.constexpr, STAGES: tl.constexpr, USED: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """One program: one row, WIDTH logits at a time."""
    row = tl.program_id(0)
    x = logits + row.to(tl.int64) * W
    column = tl.arange(0, WIDTH)
    tile = tl.arange(0, TILES)
    tops = tl.full((TILES,), float("-inf"), tl.float32)
    mass = tl.zeros((TILES,), tl.float32)
    for n in tl.range(0, USED, num_stages=STAGES):
        z = _load_logits(x, n * WIDTH + column, V, W)
        top = tl.max(z, 0)
        tops = tl.where(tile == n, top, tops)
        mass = tl.where(tile == n, tl.sum(tl.exp(z - top), 0), mass)
    top = tl.max(tops, 0)
    mass = mass * tl.exp(tops - top)
    total = tl.sum(mass, 0)
    log_total = top + tl.log(total)
    correct = tl.load(x + tl.load(targets + row)).to(tl.float32)
    tl.store(lse + row, log_total)
    tl.store(nll + row, log_total - correct)
    # Two tiles are looked at again: that of the sample and that of the maximum.
    want = tl.load(uniforms + row) * total
    chosen, before = _pick(mass, tile, want)
    z = _load_logits(x, chosen * WIDTH + column, V, W)
    token, _ = _pick(tl.exp(z - top), column, want - before)
    tl.store(x_hat + row, tl.minimum(chosen * WIDTH + token, V - 1).to(tl.int64))
    chosen = tl.min(tl.where(tops == top, tile, TILES - 1), 0)
    z = _load_logits(x, chosen * WIDTH + column, V, W)
    token = tl.min(tl.where(z == top, column, WIDTH - 1), 0)
    tl.store(best + row, tl.minimum(chosen * WIDTH + token, V - 1).to(tl.int64))


@jit
def _cross_entropy_backward(
    logits, targets, lse, dnll, out, partial, N, V, W,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """One program: WIDTH columns of TURNS times ROWS rows."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        row = (tl.program_id(1) * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        log_total = tl.load(lse + row, mask=row < N, other=0.0)
        target = tl.load(targets + row, mask=row < N, other=0).to(tl.int32)
        slope = tl.load(dnll + row, mask=row < N, other=0.0)
        at = row.to(tl.int64)[:, None] * W + column[None, :]
        inside = (row < N)[:, None] & (column < W)[None, :]
        z = tl.load(logits + at, mask=inside, other=0.0).to(tl.float32)
        p = tl.exp(z - log_total[:, None])
        p = p - (column[None, :] == target[:, None]).to(tl.float32)
        g = tl.where(inside & (column < V)[None, :], p * slope[:, None], 0.0)
        tl.store(out + at, g.to(out.dtype.element_ty), mask=inside)
        total += tl.sum(g, 0)
    tl.store(partial + tl.program_id(1) * W + column, total, mask=column < W)


# The gradient of a look-up in a table


def table_gradient(rows: Tensor, ids: Tensor, size: int, config: Config = TABLE_GRADIENT) -> Tensor:
    """Σ of the rows of each id, (V = size, E) in the type of `rows`, added up in float32.

    rows: (N, E). ids: (N,) int64 from 0 to V − 1. The order of every sum follows from the ids
    alone. The rows are taken by id, ROWS at a time: a run of equal ids within these is summed at
    once, and what a run has in several of them is added afterwards, so that no sum, however
    frequent its id, is made row by row.
    """
    check(rows, ids)
    N, E = rows.shape
    many = config["ROWS"]["ROWS"]
    width = min(128, triton.next_power_of_2(E))
    grid = (triton.cdiv(N, many), triton.cdiv(E, width))
    # A sort takes a pass for each byte, and most vocabularies need but two.
    narrow = torch.int16 if size <= 2**15 else torch.int32
    ids, places = torch.sort(ids.to(narrow), stable=True)
    grad = torch.zeros(size, E, dtype=rows.dtype, device=rows.device)
    partial = torch.empty(grid[0], 2, E, dtype=torch.float32, device=rows.device)
    _sum_rows[grid](rows, ids, places, grad, partial, N, E, width, **config["ROWS"])
    _sum_runs[grid](ids, partial, grad, N, E, width, many, **config["RUNS"])
    return grad


@jit
def _sum_rows(
    rows, ids, places, grad, partial, N, E: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """One program: WIDTH columns of ROWS rows in the order of their ids.

    A run that is whole goes to grad. Else, if it began before these rows, to the first of their
    two places in `partial`, and if it only goes on behind them to the second.
    """
    tile = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at = tile * ROWS + tl.arange(0, ROWS)
    ok = at < N
    own = tl.load(ids + at, ok, -1)
    before = tl.load(ids + at - 1, ok & (at > 0), -1)
    place = tl.load(places + at, ok, 0)
    inside = ok[:, None] & (column < E)[None, :]
    x = tl.load(rows + place[:, None] * E + column[None, :], inside, 0.0).to(tl.float32)
    # Runs that begin here count from 1; behind the last id there is nothing, which adds nothing.
    run = tl.cumsum((ok & (own != before)).to(tl.int32), 0)
    last = tl.max(run, 0)
    behind = (tile + 1) * ROWS
    goes_on = tl.load(ids + behind, behind < N, -1) == tl.max(own, 0)
    run_of = run[:, None]  # laid out as x, once
    for n in range(tl.min(run, 0), last + 1):
        total = tl.sum(tl.where(run_of == n, x, 0.0), 0)
        if (n == 0) | ((n == last) & goes_on):
            second = tl.where(n == 0, 0, 1)
            tl.store(partial + (tile.to(tl.int64) * 2 + second) * E + column, total, column < E)
        else:
            word = tl.max(tl.where(run == n, own, -1), 0).to(tl.int64)
            tl.store(grad + word * E + column, total.to(grad.dtype.element_ty), column < E)


@jit
def _sum_runs(
    ids, partial, grad, N, E: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: WIDTH columns of the run that begins in a tile and goes on behind it, if any.

    Its own part is the second that the tile has in `partial`, its others are the first of the next.
    """
    tile = tl.program_id(0)
    behind = (tile + 1) * ROWS
    if behind < N:
        own = tl.load(ids + behind)
        before = tl.load(ids + tile * ROWS - 1, tile > 0, -1)
        if (tl.load(ids + behind - 1) == own) & (before != own):
            column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
            ok = column < E
            begun = tl.load(partial + (tile.to(tl.int64) * 2 + 1) * E + column, ok, 0.0)
            end = tile + 1
            more = True
            while more:  # up to the first tile that begins with another id
                at = (end + tl.arange(0, 256)) * ROWS
                many = tl.sum((tl.load(ids + at, at < N, -1) == own).to(tl.int32), 0)
                end += many
                more = many == 256
            # Read ahead: else the compiler, to spare registers, lets one load wait for another.
            total = tl.zeros((PARTS, WIDTH), tl.float32)
            for first in tl.range(tile + 1, end, PARTS, num_stages=STAGES):
                part = first + tl.arange(0, PARTS)
                sums = partial + part.to(tl.int64)[:, None] * (2 * E) + column[None, :]
                total += tl.load(sums, (part < end)[:, None] & ok[None, :], 0.0)
            total = begun + tl.sum(total, 0)
            word = grad + own.to(tl.int64) * E + column
            tl.store(word, total.to(grad.dtype.element_ty), ok)
