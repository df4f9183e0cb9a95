"""Attention: softmax(q kᵀ / √K) v over all heads, in one program for a sequence's head or a few."""

# pyright: basic, reportMissingImports=false, reportOptionalMemberAccess=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .launch import (
    LOG2_E,
    MOST_TOKENS,
    Config,
    Dropout,
    TensorDescriptor,
    dropout_of_shares,
    is_kept,
    jit,
    precision_of,
    tl,
    triton,
)

ATTENTION: Config = {
    "ROWS": 128, "PROGRAMS": 264, "STAGES": 2, "num_warps": 8, "num_stages": 1, "maxnreg": 128
}  # fmt: skip
# Heads that are read ahead fill the memory of a multiprocessor: one program on each.
ATTENTION_BACKWARD: Config = {"PROGRAMS": 132, "STAGES": 3, "num_warps": 8, "num_stages": 1}


def attention(
    qkv: Tensor, mask: Tensor | None, config: Config = ATTENTION, drop: Dropout | None = None
) -> Tensor:
    """softmax(q kᵀ / √K) v over all heads, (B, T, H K); drop: of the probabilities.

    qkv: (B, T, 3, H, K), T ≤ MOST_TOKENS, K 16, 32 or 64. mask: (B, T) bool, true on tokens, or
    None when nothing is padded; int32: tokens see those of the same number, 0 or more. A query that
    sees no key gets zeros.
    """
    B, T, _, H, K = qkv.shape
    o = torch.empty(B, T, H * K, dtype=qkv.dtype, device=qkv.device)
    shape, rows, tensors = _attention_way(qkv, mask, config, (qkv, o))
    keys, dropping = dropout_of_shares(drop, qkv.shape[1])
    wide = qkv.dtype == torch.float32  # operands of twice the size: 128 rows would not fit
    shape["ROWS"] = min(shape["TILE"], 32 if wide else config["ROWS"])
    if shape["ROWS"] < shape["TILE"]:
        shape["WHOLE"], tensors = False, (qkv, o)
    if shape["PACKED"]:  # whose numbers take the registers that the next sequence would need
        shape["STAGES"] = 1
    grid = (rows * H, triton.cdiv(T, shape["ROWS"]))
    _attention[grid](*tensors, mask, keys, B, T, LOG2_E / math.sqrt(K), **shape, **dropping)
    return o


def attention_backward(
    qkv: Tensor,
    mask: Tensor | None,
    do: Tensor,
    config: Config = ATTENTION_BACKWARD,
    drop: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradient of `attention`: dqkv like qkv, and partial sums of its columns, (rows, 3 H K).

    The probabilities are computed again from qkv: nothing else of the forward pass is kept. About
    PROGRAMS programs share the heads, and read the next one while they compute.
    """
    dqkv = torch.empty_like(qkv)
    shape, rows, tensors = _attention_way(qkv, mask, config, (qkv, do, dqkv))
    keys, dropping = dropout_of_shares(drop, qkv.shape[1])
    if drop is not None:  # nobody reads do into registers early: in threes it would not fit
        shape["STAGES"] = min(2, shape["STAGES"])
    B, T, _, H, K = qkv.shape
    partial = torch.empty(rows, 3 * H * K, dtype=torch.float32, device=qkv.device)
    _attention_backward[(rows * H,)](
        *tensors, mask, keys, partial, B, T, 1 / math.sqrt(K), **shape, **dropping
    )
    return dqkv, partial


def _attention_way(
    qkv: Tensor, mask: Tensor | None, config: Config, tensors: tuple[Tensor, ...]
) -> tuple[Config, int, tuple[Any, ...]]:
    """What a kernel is compiled for, how many programs share a head, and what it reads and writes.

    By the copy engine if WHOLE. Else it would take tokens of the next sequence; and beside the
    tiles as it lays them there is no room for the numbers of packed examples.
    """
    B, T, _, H, K = qkv.shape
    shape = _attention_shape(qkv, mask, config)
    rows = triton.cdiv(B, triton.cdiv(B, max(1, shape.pop("PROGRAMS") // H)))
    newer = qkv.is_cuda and torch.cuda.get_device_capability(qkv.device)[0] > 9
    if newer or qkv.dtype == torch.float32:  # whose products, or operands, leave the next no room
        shape["STAGES"] = 1
    shape["WHOLE"] = shape["TILE"] == T and not shape["PACKED"]
    if not shape["WHOLE"]:
        return shape, rows, tensors
    views = (t.view(B, T, -1) for t in tensors)
    return shape, rows, tuple(TensorDescriptor.from_tensor(t, [1, T, K]) for t in views)


def _attention_shape(qkv: Tensor, mask: Tensor | None, config: Config) -> Config:
    """What the kernels are compiled for: T is padded to a power of two."""
    _, T, _, H, K = qkv.shape
    assert qkv.is_contiguous()
    assert T <= MOST_TOKENS, T
    tile = max(16, triton.next_power_of_2(T))
    shape = {"H": H, "K": K, "TILE": tile, "PRECISION": precision_of(qkv)}
    return {**config, **shape, "PACKED": is_packed(mask)}


def is_packed(mask: Tensor | None) -> bool:
    assert mask is None or mask.is_contiguous()
    return mask is not None and mask.dtype != torch.bool


@jit
def _load_head(x, token, T, column, ROW: tl.constexpr):
    """(tokens, K) of one head: rows lie ROW elements apart, those from T on are zero."""
    return tl.load(x + token[:, None] * ROW + column[None, :], mask=token[:, None] < T, other=0.0)


@jit
def keys_seen(mask, b, token, T, PACKED: tl.constexpr):
    """(tokens,) bool: keys that are tokens."""
    seen = token < T
    if mask is not None and not PACKED:
        seen = seen & (tl.load(mask + b * T + token, mask=seen, other=0) != 0)
    return seen


@jit
def is_seen(keys, mask, b, query, key, T, PACKED: tl.constexpr):
    """(1, keys) bool: `keys` by all queries alike; (queries, keys): those of the same number."""
    seen = keys[None, :]
    if PACKED:
        own = tl.load(mask + b * T + query, mask=query < T, other=-1)
        other = tl.load(mask + b * T + key, mask=keys, other=-1)
        seen = seen & (own[:, None] == other[None, :])
    return seen


@jit
def softmax(q, k, seen, scale, ALL: tl.constexpr, PRECISION: tl.constexpr):
    """exp(q kᵀ scale − top), zero where not seen, its row sums, and top; scale is in base 2.

    ALL: every key is seen.
    """
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if not ALL:
        score = tl.where(seen, score, float("-inf"))
    top = tl.max(score, 1) * scale
    if not ALL:
        top = tl.where(top == float("-inf"), 0.0, top)  # nothing is seen: zeros, not NaN
    p = tl.exp2(score * scale - top[:, None])
    total = tl.sum(p, 1)
    if not ALL:
        total = tl.where(total == 0.0, 1.0, total)
    return p, total, top


@jit
def kept_shares(keys, b, h, query, key, T, POWER: tl.constexpr, RATE: tl.constexpr):
    """(queries, keys) bool: which probabilities of head h of sequence b are not dropped."""
    return is_kept(tl.load(keys + b), h * T + query, key, T, POWER, RATE)


@jit
def marked(p, keys, b, h, token, T, dtype: tl.constexpr, POWER: tl.constexpr, RATE: tl.constexpr):
    """Probabilities p, of type dtype, dropped ones as their negative; and those after dropout, but
    for a factor. They are a sum of rounded ones, so that no float32 waits for what comes later.
    """
    left = p.to(dtype)
    scale: tl.constexpr = 0.5 / (1.0 - RATE) if RATE > 0 else 1.0
    if RATE > 0:
        p = tl.where(kept_shares(keys, b, h, token, token, T, POWER, RATE), p, -p)
        left += p.to(dtype)
    return p.to(dtype), left, scale


@jit
def widened(x):
    """float32. Of bfloat16 by hand: the compiler would widen early, and its registers overflow."""
    wide = x.to(tl.float32)
    if x.dtype == tl.bfloat16:
        wide = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x],
            dtype=tl.float32, is_pure=False, pack=2,
        )  # fmt: skip
    return wide


@jit
def _head(x, b, part, token, T, K: tl.constexpr, ROW: tl.constexpr, WHOLE: tl.constexpr):
    """(tokens, K) of sequence b: columns from part K on of rows of ROW elements."""
    if WHOLE:
        y = x.load([b, 0, part * K]).reshape(token.shape[0], K)
    else:
        y = _load_head(x + b.to(tl.int64) * T * ROW + part * K, token, T, tl.arange(0, K), ROW)
    return y


@jit
def _put_head(x, y, b, part, token, T, ROW: tl.constexpr, WHOLE: tl.constexpr):
    """What `_head` would read."""
    K: tl.constexpr = y.shape[1]
    if WHOLE:
        x.store([b, 0, part * K], y.reshape(1, token.shape[0], K))
    else:
        at = token[:, None] * ROW + tl.arange(0, K)[None, :]
        tl.store(x + b.to(tl.int64) * T * ROW + part * K + at, y, token[:, None] < T)


@jit
def _attention(
    qkv, o, mask, keys, B, T, scale, H: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr,
    STAGES: tl.constexpr, POWER: tl.constexpr, RATE: tl.constexpr,
):  # fmt: skip
    """One program: some rows of one head of several sequences."""
    h = tl.program_id(0) % H
    first = tl.program_id(0) // H
    key = tl.arange(0, TILE)
    query = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if WHOLE:
        T = TILE
    for i in tl.range(0, B - first, tl.num_programs(0) // H, num_stages=STAGES):
        b = first + i
        q = _head(qkv, b, h, query, T, K, 3 * H * K, WHOLE)
        k = _head(qkv, b, H + h, key, T, K, 3 * H * K, WHOLE)
        v = _head(qkv, b, 2 * H + h, key, T, K, 3 * H * K, WHOLE)
        place = b.to(tl.int64)
        tokens = keys_seen(mask, place, key, T, PACKED)
        seen = is_seen(tokens, mask, place, query, key, T, PACKED)
        p, total, _ = softmax(q, k, seen, scale, WHOLE and mask is None, PRECISION)
        if RATE > 0:
            kept = kept_shares(keys, b, h, query, key, T, POWER, RATE)
            p *= tl.where(kept, 1.0 / (1.0 - RATE), 0.0)  # as numbers: else bfloat16 is taken apart
        a = tl.dot(p.to(v.dtype), v, input_precision=PRECISION) * (1.0 / total)[:, None]
        _put_head(o, a.to(v.dtype), b, h, query, T, H * K, WHOLE)


@jit
def _attention_backward(
    qkv, do, dqkv, mask, keys, partial, B, T, slope, H: tl.constexpr, K: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, WHOLE: tl.constexpr,
    STAGES: tl.constexpr, POWER: tl.constexpr, RATE: tl.constexpr,
):  # fmt: skip
    """One program: one head of several sequences.

    Every value is stored as soon as it is known, and the probabilities wait as bfloat16: the
    registers hold one matrix of 128 x 128 float32 and little else.
    """
    h = tl.program_id(0) % H
    first = tl.program_id(0) // H
    token = tl.arange(0, TILE)
    if WHOLE:
        T = TILE
    # Rows that lie in the same thread are added up at once, the others after the last sequence.
    all_given = tl.zeros((TILE // 16, 8, K) if RATE > 0 else (TILE // 4, K), tl.float32)
    all_dq = tl.zeros((TILE // 16, 8, K), tl.float32)
    steep = slope * (1.0 / (1.0 - RATE))
    for i in tl.range(0, B - first, tl.num_programs(0) // H, num_stages=STAGES):
        b = first + i
        tokens = keys_seen(mask, b.to(tl.int64), token, T, PACKED)
        seen = is_seen(tokens, mask, b.to(tl.int64), token, token, T, PACKED)
        q = _head(qkv, b, h, token, T, K, 3 * H * K, WHOLE)
        k = _head(qkv, b, H + h, token, T, K, 3 * H * K, WHOLE)
        v = _head(qkv, b, 2 * H + h, token, T, K, 3 * H * K, WHOLE)
        da = _head(do, b, h, token, T, K, H * K, WHOLE)
        all_seen: tl.constexpr = WHOLE and mask is None
        p, total, _ = softmax(q, k, seen, slope * 1.4426950408889634, all_seen, PRECISION)
        p *= (1.0 / total)[:, None]
        p, left, scale = marked(p, keys, b, h, token, T, q.dtype, POWER, RATE)
        dv = tl.dot(tl.trans(left), da, input_precision=PRECISION) * scale
        _put_head(dqkv, dv.to(q.dtype), b, 2 * H + h, token, T, 3 * H * K, WHOLE)
        # Shares of anything add up to 1: all values together get all of da. And what all keys have
        # in common changes no share: it has no gradient.
        if RATE > 0:  # what is left of the shares
            all_given += tl.sum(dv.reshape(TILE // 16, 2, 8, K), 1)
        else:
            given = da.to(tl.float32)
            if mask is not None:
                given *= tl.max(tokens.to(tl.float32), 0)
            all_given += tl.sum(given.reshape(4, TILE // 4, K), 0)
        dp = tl.dot(da, tl.trans(v), input_precision=PRECISION)
        share = widened(p)
        if RATE > 0:
            dp = tl.where(share > 0.0, dp, 0.0)
            p = tl.abs(p)
        level = tl.sum(share * dp, 1) * steep
        ds = p * (dp * steep - level[:, None]).to(q.dtype)
        dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION)
        _put_head(dqkv, dk.to(q.dtype), b, H + h, token, T, 3 * H * K, WHOLE)
        dq = tl.dot(ds, k, input_precision=PRECISION)
        _put_head(dqkv, dq.to(q.dtype), b, h, token, T, 3 * H * K, WHOLE)
        all_dq += tl.sum(dq.reshape(TILE // 16, 2, 8, K), 1)
    sums = partial + first.to(tl.int64) * (3 * H * K) + h * K + tl.arange(0, K)
    tl.store(sums, tl.sum(tl.sum(all_dq, 0), 0))
    tl.store(sums + H * K, tl.zeros((K,), tl.float32))
    sums += 2 * H * K
    all_given = tl.sum(all_given, 0)
    tl.store(sums, tl.sum(all_given, 0) if RATE > 0 else all_given)
