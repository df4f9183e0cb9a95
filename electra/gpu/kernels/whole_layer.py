"""A whole layer of one head, whose states stay on chip: the generator's."""

# pyright: basic, reportMissingImports=false, reportOptionalMemberAccess=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import math

import torch
from torch import Tensor

from .attend import is_packed, is_seen, kept_shares, keys_seen, marked, softmax, widened
from .feed import gelu_of
from .launch import (
    LOG2_E,
    MOST_TOKENS,
    NOTHING,
    Config,
    Drops,
    check,
    column_sums,
    dropout_of_shares,
    dropped,
    jit,
    precision_of,
    strips_of,
    tl,
    triton,
)

LAYER: Config = {"STAGES": 1, "num_warps": 8, "num_stages": 1, "maxnreg": 128}
# Its weights' gradients, summed on chip, would fill the registers: one program on a multiprocessor
# would wait for itself. What they are made of, written out, leaves room for several.
LAYER_BACKWARD: Config = {
    "FEED": {"ROWS": 64, "STAGES": 2, "num_warps": 4, "num_stages": 1, "maxnreg": 168},
    "ATTEND": {"num_warps": 8, "num_stages": 1, "maxnreg": 128},
    "WEIGHTS": {"ROWS": 64, "STRIPS": 33, "STAGES": 4, "num_warps": 4},
}


def layer(
    x: Tensor,
    mask: Tensor | None,
    weights: list[Tensor],
    eps: float,
    config: Config = LAYER,
    drops: Drops = NOTHING,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `fused.block` computes, for one head of 16, 32 or 64: y, o, s and s', all (B, T, D).

    And log2 Σ exp of the scores, (B, T) float32. The feed-forward layer is as wide as a multiple
    of D. Weights are read from the L2 cache.
    """
    B, T, D = x.shape
    check(x, *weights)
    y, o, s1, s2 = (torch.empty_like(x) for _ in range(4))
    lse = torch.empty(B, T, dtype=torch.float32, device=x.device)
    shape = _layer_shape(x, mask, weights, config)
    keys, dropping = _of_layer(drops, T)
    _layer[(B,)](
        x, mask, *weights, *keys, y, o, s1, s2, lse, T, eps, LOG2_E / math.sqrt(D), **shape,
        **dropping[0], **dropping[1],
    )  # fmt: skip
    return y, o, s1, s2, lse


def layer_backward(
    dy: Tensor,
    x: Tensor,
    mask: Tensor | None,
    weights: list[Tensor],
    kept: list[Tensor],
    eps: float,
    config: Config = LAYER_BACKWARD,
    drops: Drops = NOTHING,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and the gradients of all weights one behind the other, in float32 and in x's type.

    What `layer` gave besides y is `kept`; all else is computed again. Two kernels leave the factors
    of all weights' gradients: as `left`, (N, 5 D + F), those of qkv, s, pre and s', as `right`,
    (N, D + F), h and act. A third multiplies strips of them, a fourth adds up the strips.
    """
    (B, T, D), N = x.shape, x.shape[0] * x.shape[1]
    check(dy, x, *kept, *weights)
    o, s1, s2, lse = kept
    wqkv, bqkv, wo, _, w1, b1, w2, _, g1, c1, g2, _ = weights
    shape = _layer_shape(x, mask, weights, {})
    keys, (hidden, shares) = _of_layer(drops, T)
    dx = torch.empty_like(x)
    ds = dx if hidden["OUT"] else None  # that of s waits here: `left` has what dropout leaves of it
    whole, tile = {k: shape.pop(k) for k in ("PACKED", "TILE")}, {**shape, **config["WEIGHTS"]}
    F, size = shape["F"], sum(w.numel() for w in weights)
    left, right = x.new_empty(N, 5 * D + F), x.new_empty(N, D + F)
    do, level = torch.empty_like(x), torch.empty_like(lse)
    feed = {**shape, **config["FEED"]}
    norms = x.new_empty(triton.cdiv(N, feed["ROWS"]), 4 * D, dtype=torch.float32)
    _feed_backward[(len(norms),)](
        dy, o, s1, s2, wo, w1, b1, w2, g1, c1, g2, *keys[:2], left, right, ds, do, level, norms,
        N, eps, T=T if any(hidden.values()) else 1, **hidden, **feed,
    )  # fmt: skip
    _attend_backward[(B,)](
        x, mask, ds, do, level, lse, wqkv, bqkv, keys[2], left, dx, T, 1 / math.sqrt(D),
        **shares, **shape, **whole, **config["ATTEND"],
    )  # fmt: skip
    strips, steps = strips_of(N, tile["ROWS"], tile.pop("STRIPS"))
    partial = x.new_empty(strips, size, dtype=torch.float32)
    _weights_backward[(4 + 2 * F // D, strips)](
        x, o, left, right, norms, partial, N, len(norms), STEPS=steps,
        SHARE=triton.next_power_of_2(triton.cdiv(len(norms), strips)), **tile,
    )  # fmt: skip
    return dx, *column_sums([partial], x.dtype)


def _of_layer(drops: Drops, T: int) -> tuple[list[Tensor | None], tuple[Config, Config]]:
    """The keys; the rates of both parts' outputs; and what `dropout_of_shares` says."""
    (out, a), (down, f) = (drop or (None, 0.0) for drop in drops[:2])
    keys, shares = dropout_of_shares(drops[2], T)
    return [out, down, keys], ({"OUT": a, "DOWN": f}, shares)


def _layer_shape(x: Tensor, mask: Tensor | None, weights: list[Tensor], config: Config) -> Config:
    _, T, D = x.shape
    F = len(weights[4])
    assert T <= MOST_TOKENS, T
    assert D in (16, 32, 64), D
    assert F % D == 0, F
    tile = max(16, triton.next_power_of_2(T))
    shape = {"D": D, "F": F, "TILE": tile, "PRECISION": precision_of(x)}
    return {**config, **shape, "PACKED": is_packed(mask)}


@jit
def _probabilities(q, k, seen, lse, scale, PRECISION: tl.constexpr):
    """Of every key for every query (rows), from log2 Σ exp of the forward pass."""
    score = tl.where(seen, tl.dot(q, tl.trans(k), input_precision=PRECISION), float("-inf"))
    return tl.exp2(score * scale - lse[:, None])


@jit
def _square(w, row, column, WIDTH: tl.constexpr, D: tl.constexpr):
    """(D, D) of a matrix with rows of WIDTH."""
    i = tl.arange(0, D)
    return tl.load(w + (row + i)[:, None] * WIDTH + (column + i)[None, :])


@jit
def _linear(x, w, b, row, D: tl.constexpr, PRECISION: tl.constexpr):
    """x wᵀ + b, float32, for the D outputs from `row` on."""
    bias = tl.load(b + row + tl.arange(0, D)).to(tl.float32)
    w = _square(w, row, 0, D, D)
    return tl.dot(x, tl.trans(w), input_precision=PRECISION) + bias[None, :]


@jit
def _normal(s, eps, D: tl.constexpr):
    """Rows with mean 0 and variance 1, float32, and 1/std."""
    s = s.to(tl.float32)
    s -= (tl.sum(s, 1) * (1.0 / D))[:, None]
    rstd = tl.rsqrt(tl.sum(s * s, 1) * (1.0 / D) + eps)
    return s * rstd[:, None], rstd


@jit
def _norm(s, gamma, beta, eps, D: tl.constexpr):
    column = tl.arange(0, D)
    normal, _ = _normal(s, eps, D)
    return normal * tl.load(gamma + column)[None, :] + tl.load(beta + column)[None, :]


@jit
def _normal_backward(dy, s, gamma, eps, sums, D: tl.constexpr):
    """ds of LN(s); the sums for dgamma and dbeta are written, one behind the other."""
    normal, rstd = _normal(s, eps, D)
    column = tl.arange(0, D)
    tl.store(sums + column, tl.sum(dy * normal, 0))
    tl.store(sums + D + column, tl.sum(dy, 0))
    dy *= tl.load(gamma + column)[None, :]
    along = tl.sum(dy * normal, 1) * (1.0 / D)
    level = tl.sum(dy, 1) * (1.0 / D)
    return (dy - level[:, None] - normal * along[:, None]) * rstd[:, None]


@jit
def _layer(
    x, mask, wqkv, bqkv, wo, bo, w1, b1, w2, b2, g1, c1, g2, c2, out_keys, down_keys, keys,
    y, o, s1, s2, lse, T, eps, scale, D: tl.constexpr, F: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr,
    OUT: tl.constexpr, DOWN: tl.constexpr, POWER: tl.constexpr, RATE: tl.constexpr,
):  # fmt: skip
    """One program: one sequence."""
    b = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, TILE)
    column = tl.arange(0, D)
    at = b * T * D + token[:, None] * D + column[None, :]
    ok = token[:, None] < T
    h = tl.load(x + at, ok, 0.0)
    q = _linear(h, wqkv, bqkv, 0, D, PRECISION).to(h.dtype)
    k = _linear(h, wqkv, bqkv, D, D, PRECISION).to(h.dtype)
    v = _linear(h, wqkv, bqkv, 2 * D, D, PRECISION).to(h.dtype)
    seen = is_seen(keys_seen(mask, b, token, T, PACKED), mask, b, token, token, T, PACKED)
    p, total, top = softmax(q, k, seen, scale, False, PRECISION)
    if RATE > 0:
        kept = kept_shares(keys, b, 0, token, token, T, POWER, RATE)
        p *= tl.where(kept, 1.0 / (1.0 - RATE), 0.0)
    a = tl.dot(p.to(h.dtype), v, input_precision=PRECISION) * (1.0 / total)[:, None]
    a = a.to(h.dtype)
    tl.store(lse + b * T + token, top + tl.log2(total), token < T)
    tl.store(o + at, a, ok)
    s, N = h.to(tl.float32), tl.num_programs(0) * T
    s += dropped(_linear(a, wo, bo, 0, D, PRECISION), out_keys, b * T, N, T, D, OUT)
    s = s.to(h.dtype)
    tl.store(s1 + at, s, ok)
    h = _norm(s, g1, c1, eps, D).to(h.dtype)
    f = h.to(tl.float32)
    if DOWN > 0:  # what is added to h is dropped, once it is known
        f = tl.zeros(f.shape, tl.float32)
    f += tl.load(b2 + column).to(tl.float32)[None, :]
    for c in tl.range(0, F, D, num_stages=STAGES):
        act, _ = gelu_of(_linear(h, w1, b1, c, D, PRECISION))
        w = _square(w2, 0, c, F, D)
        f = tl.dot(act.to(h.dtype), tl.trans(w), f, input_precision=PRECISION)
    if DOWN > 0:
        f = h.to(tl.float32) + dropped(f, down_keys, b * T, N, T, D, DOWN)
    s = f.to(h.dtype)
    tl.store(s2 + at, s, ok)
    tl.store(y + at, _norm(s, g2, c2, eps, D).to(h.dtype), ok)


@jit
def _feed_backward(
    dy, o, s1, s2, wo, w1, b1, w2, g1, c1, g2, out_keys, down_keys, left, right, ds, do, level,
    norms, N, eps, D: tl.constexpr, F: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, OUT: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """One program: ROWS tokens, back to ds; sums for both layer norms."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    token = first + tl.arange(0, ROWS)
    column = tl.arange(0, D)
    ok = token[:, None] < N
    at = token[:, None] * D + column[None, :]
    left += token[:, None] * (5 * D + F) + column[None, :]
    right += token[:, None] * (D + F) + column[None, :]
    norms += tl.program_id(0) * (4 * D)
    s = tl.load(s2 + at, ok, 0.0)
    dh = tl.load(dy + at, ok, 0.0).to(tl.float32)
    dh = _normal_backward(dh, s, g2, eps, norms + 2 * D, D)
    da = dropped(dh, down_keys, first, N, T, D, DOWN).to(s.dtype)
    tl.store(left + 4 * D + F, da, ok)
    h = _norm(tl.load(s1 + at, ok, 0.0), g1, c1, eps, D).to(s.dtype)
    tl.store(right, h, ok)
    for c in tl.range(0, F, D, num_stages=STAGES):
        up = _square(w1, c, 0, D, D)
        bias = tl.load(b1 + c + column).to(tl.float32)
        pre = tl.dot(h, tl.trans(up), input_precision=PRECISION) + bias[None, :]
        act, rise = gelu_of(pre)
        tl.store(right + D + c, act.to(s.dtype), ok)
        dpre = tl.dot(da, _square(w2, 0, c, F, D), input_precision=PRECISION) * rise
        dpre = dpre.to(s.dtype)
        tl.store(left + 4 * D + c, dpre, ok)
        dh = tl.dot(dpre, up, dh, input_precision=PRECISION)
    s = tl.load(s1 + at, ok, 0.0)
    dh = _normal_backward(dh, s, g1, eps, norms, D)
    if ds is not None:
        tl.store(ds + at, dh.to(s.dtype), ok)
    da = dropped(dh, out_keys, first, N, T, D, OUT).to(s.dtype)
    tl.store(left + 3 * D, da, ok)
    da = tl.dot(da, _square(wo, 0, 0, D, D), input_precision=PRECISION)
    tl.store(do + at, da.to(s.dtype), ok)
    a = tl.load(o + at, ok, 0.0).to(tl.float32)
    tl.store(level + token, tl.sum(a * da, 1), token < N)


@jit
def _attend_backward(
    x, mask, residual, do, levels, lse, wqkv, bqkv, keys, left, dx, T, slope,
    D: tl.constexpr, F: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
    PACKED: tl.constexpr, POWER: tl.constexpr, RATE: tl.constexpr,
):  # fmt: skip
    """One program: one sequence, from ds to dx."""
    b = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, TILE)
    column = tl.arange(0, D)
    ok = token[:, None] < T
    at = b * T * D + token[:, None] * D + column[None, :]
    left += b * T * (5 * D + F) + token[:, None] * (5 * D + F) + column[None, :]
    h = tl.load(x + at, ok, 0.0)
    q = _linear(h, wqkv, bqkv, 0, D, PRECISION).to(h.dtype)
    k = _linear(h, wqkv, bqkv, D, D, PRECISION).to(h.dtype)
    v = _linear(h, wqkv, bqkv, 2 * D, D, PRECISION).to(h.dtype)
    da = tl.load(do + at, ok, 0.0)
    seen = is_seen(keys_seen(mask, b, token, T, PACKED), mask, b, token, token, T, PACKED)
    top = tl.load(lse + b * T + token, token < T, float("inf"))
    p = _probabilities(q, k, seen, top, slope * 1.4426950408889634, PRECISION)
    p, kept, scale = marked(p, keys, b, 0, token, T, h.dtype, POWER, RATE)
    dv = tl.dot(tl.trans(kept), da, input_precision=PRECISION)
    tl.store(left + 2 * D, (dv * scale).to(h.dtype), ok)
    dp = tl.dot(da, tl.trans(v), input_precision=PRECISION)
    if RATE > 0:
        dp = tl.where(widened(p) > 0.0, dp * (1.0 / (1.0 - RATE)), 0.0)
        p = tl.abs(p)
    level = tl.load(levels + b * T + token, token < T, 0.0)
    ds = p * ((dp - level[:, None]) * slope).to(h.dtype)
    dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION)
    tl.store(left + D, dk.to(h.dtype), ok)
    dq = tl.dot(ds, k, input_precision=PRECISION)
    tl.store(left, dq.to(h.dtype), ok)
    tl.debug_barrier()  # what is stored before it is loaded behind it
    if residual is None:
        residual = left + 3 * D
    else:
        residual += at
    out = tl.load(residual, ok, 0.0).to(tl.float32)
    for i in tl.static_range(3):
        dy = tl.load(left + i * D, ok, 0.0)
        out = tl.dot(dy, _square(wqkv, i * D, 0, D, D), out, input_precision=PRECISION)
    tl.store(dx + at, out.to(h.dtype), ok)


@jit
def _weights_backward(
    x, o, left, right, norms, partial, N, P, D: tl.constexpr, F: tl.constexpr,
    ROWS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, SHARE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: what a strip of tokens gives to D x D of one weight, and to their biases.

    Three parts of qkv, one of out, F / D of up and as many of down, which share their left factor.
    The first four also take a share of the sums for one vector of the layer norms.
    """
    part = tl.program_id(0)
    down: tl.constexpr = 4 + F // D  # the first part of it
    to_wo: tl.constexpr = 3 * D * (D + 1)
    to_w1: tl.constexpr = to_wo + D * (D + 1)
    to_w2: tl.constexpr = to_w1 + F * (D + 1)
    weight = part * D * D
    bias = 3 * D * D + part * D
    row = D  # of the right factor
    width = D  # of the weight
    if part == 3:
        x = o
        weight = to_wo
        bias = to_wo + D * D
    if part > 3:
        x = right
        row = D + F
        weight = to_w1 + (part - 4) * (D * D)
        bias = to_w1 + F * D + (part - 4) * D
    if part >= down:
        x = right + (part - down + 1) * D
        weight = to_w2 + (part - down) * D
        bias = to_w2 + F * D
        width = F
    left += tl.minimum(part, down) * D
    column = tl.arange(0, D)
    total = tl.zeros((D, D), tl.float32)
    # Sums of columns are a product with ones. Were `a` also read into registers, the compiler
    # (Triton 3.6) would let a later step's copy overwrite it while the product still reads it.
    ones = tl.full((ROWS, 16), 1.0, x.dtype.element_ty)
    along = tl.zeros((D, 16), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        token = (step * tl.num_programs(1) + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
        ok = token[:, None] < N
        token = token.to(tl.int64)[:, None]
        a = tl.load(left + token * (5 * D + F) + column[None, :], ok, 0.0)
        b = tl.load(x + token * row + column[None, :], ok, 0.0)
        along = tl.dot(tl.trans(a), ones, along, input_precision=PRECISION)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    partial += tl.program_id(1).to(tl.int64) * (to_w2 + D * (F + 5))
    tl.store(partial + weight + column[:, None] * width + column[None, :], total)
    if part <= down:
        tl.store(partial + bias + column, tl.max(along, 1))  # 16 equal ones
    if part < 4:
        share = tl.program_id(1) * SHARE + tl.arange(0, SHARE)[:, None]
        norm = tl.load(norms + share * (4 * D) + part * D + column[None, :], share < P, 0.0)
        tl.store(partial + to_w2 + D * (F + 1) + part * D + column, tl.sum(norm, 0))
