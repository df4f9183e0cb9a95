"""Triton kernels for what PyTorch would do in several passes over memory.

In: contiguous CUDA tensors, bfloat16 (or float32); out: the tensors each function names, without
autograd, so that who calls them decides what is kept (`fused`). Arithmetic is float32; column sums
(gradients of biases and layer norms) are partial sums in a fixed order, without atomics, so a step
is bitwise repeatable. Each function has a fixed `config`; benchmarks/kernels.py tries others.

    B sequences · T tokens · H heads · K head size · N rows · D hidden · F feed-forward ·
    V vocabulary · E embedding
"""

# pyright: basic, reportMissingImports=false, reportOptionalMemberAccess=false
# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportReturnType=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import math
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

MOST_TOKENS = 128  # whose attention one program holds on chip
LOG2_E = 1.4426950408889634

ATTENTION: Config = {
    "ROWS": 128, "PROGRAMS": 264, "STAGES": 2, "num_warps": 8, "num_stages": 1, "maxnreg": 128
}  # fmt: skip
# Heads that are read ahead fill the memory of a multiprocessor: one program on each.
ATTENTION_BACKWARD: Config = {"PROGRAMS": 132, "STAGES": 3, "num_warps": 8, "num_stages": 1}
CROSS_ENTROPY: Config = {"WIDTH": 2048, "STAGES": 3, "num_warps": 4}
CROSS_ENTROPY_BACKWARD: Config = {
    "WIDTH": 1024, "ROWS": 4, "GROUPS": 32, "STAGES": 1, "num_warps": 4
}  # fmt: skip
ADD_NORM: Config = {"ELEMENTS": 2048, "num_warps": 4}
# Warps that work alone: sums of rows do not travel between them.
ADD_NORM_BACKWARD: Config = {"ELEMENTS": 512, "PROGRAMS": 1056, "STAGES": 3, "num_warps": 1}
PRODUCT_ADD_NORM: Config = {"ROWS": 128, "INNER": 64, "num_warps": 8, "num_stages": 4}
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
LAYER: Config = {"STAGES": 1, "num_warps": 8, "num_stages": 1, "maxnreg": 128}
# Its weights' gradients, summed on chip, would fill the registers: one program on a multiprocessor
# would wait for itself. What they are made of, written out, leaves room for several.
LAYER_BACKWARD: Config = {
    "FEED": {"ROWS": 64, "STAGES": 2, "num_warps": 4, "num_stages": 1, "maxnreg": 168},
    "ATTEND": {"num_warps": 8, "num_stages": 1, "maxnreg": 128},
    "WEIGHTS": {"ROWS": 64, "STRIPS": 33, "STAGES": 4, "num_warps": 4},
}
# A warp alone again: a run of equal ids is a sum within its threads. Long runs are read ahead.
TABLE_GRADIENT: Config = {
    "ROWS": {"ROWS": 16, "num_warps": 1}, "RUNS": {"PARTS": 16, "STAGES": 4, "num_warps": 4}
}  # fmt: skip
CHUNK = 64  # of flat buffers: parameters begin at multiples of it
MOST_PLACES = 2**31 - 1  # of a flat buffer, which the kernels of the optimizer can tell apart
SQUARES: Config = {"ROWS": 64, "PROGRAMS": 528, "STAGES": 1, "num_warps": 8}
ADAM: Config = {"ROWS": 16, "num_warps": 8}  # 16 bytes of float32 a thread, one way to lie
MOST_TURNED = 64, 256  # sides of a matrix that one program holds on chip, with all of `orthogonal`
ORTHOGONAL: Config = {"num_warps": 4, "num_stages": 1}
SYMMETRIC: Config = {
    "TILE": 128, "INNER": 64, "num_warps": 8, "num_stages": 3, "maxnreg": 128
}  # fmt: skip


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


def _of_rows(drop: Dropout | None, rows: int) -> tuple[Tensor | None, Config]:
    """What kernels take for it that see but rows: the keys; the rate, and the rows of a key."""
    keys, rate = drop or (None, 0.0)
    return keys, {"RATE": rate, "T": 1 if keys is None else rows // len(keys)}


def _of_shares(drop: Dropout | None, T: int) -> tuple[Tensor | None, Config]:
    """What those of attention take: the keys; the rate, and whether T is a power of two."""
    keys, rate = drop or (None, 0.0)
    return keys, {"RATE": rate, "POWER": keys is not None and T & (T - 1) == 0}


@jit
def _kept(key, row, column, WIDTH, POWER: tl.constexpr, RATE: tl.constexpr):
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
def _drop(x, keys, first, N, T, D: tl.constexpr, RATE: tl.constexpr):
    """x, float32, after dropout: the rows from `first` on of N with D columns; T have one key."""
    if RATE > 0:
        row = first.to(tl.int32) + tl.arange(0, x.shape[0])
        key = tl.load(keys + row // T, row < N, 0)
        kept = _kept(key, row % T, tl.arange(0, x.shape[1]), D, D & (D - 1) == 0, RATE)
        x = tl.where(kept, x * (1.0 / (1.0 - RATE)), 0.0)
    return x


# Attention


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
    keys, dropping = _of_shares(drop, qkv.shape[1])
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
    keys, dropping = _of_shares(drop, qkv.shape[1])
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
    shape = {"H": H, "K": K, "TILE": tile, "PRECISION": _precision(qkv)}
    return {**config, **shape, "PACKED": _packed(mask)}


def _packed(mask: Tensor | None) -> bool:
    assert mask is None or mask.is_contiguous()
    return mask is not None and mask.dtype != torch.bool


@jit
def _load_head(x, token, T, column, ROW: tl.constexpr):
    """(tokens, K) of one head: rows lie ROW elements apart, those from T on are zero."""
    return tl.load(x + token[:, None] * ROW + column[None, :], mask=token[:, None] < T, other=0.0)


@jit
def _keys_seen(mask, b, token, T, PACKED: tl.constexpr):
    """(tokens,) bool: keys that are tokens."""
    seen = token < T
    if mask is not None and not PACKED:
        seen = seen & (tl.load(mask + b * T + token, mask=seen, other=0) != 0)
    return seen


@jit
def _seen(keys, mask, b, query, key, T, PACKED: tl.constexpr):
    """(1, keys) bool: `keys` by all queries alike; (queries, keys): those of the same number."""
    seen = keys[None, :]
    if PACKED:
        own = tl.load(mask + b * T + query, mask=query < T, other=-1)
        other = tl.load(mask + b * T + key, mask=keys, other=-1)
        seen = seen & (own[:, None] == other[None, :])
    return seen


@jit
def _softmax(q, k, seen, scale, ALL: tl.constexpr, PRECISION: tl.constexpr):
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
def _kept_shares(keys, b, h, query, key, T, POWER: tl.constexpr, RATE: tl.constexpr):
    """(queries, keys) bool: which probabilities of head h of sequence b are not dropped."""
    return _kept(tl.load(keys + b), h * T + query, key, T, POWER, RATE)


@jit
def _marked(p, keys, b, h, token, T, dtype: tl.constexpr, POWER: tl.constexpr, RATE: tl.constexpr):
    """Probabilities p, of type dtype, dropped ones as their negative; and those after dropout, but
    for a factor. They are a sum of rounded ones, so that no float32 waits for what comes later.
    """
    left = p.to(dtype)
    scale: tl.constexpr = 0.5 / (1.0 - RATE) if RATE > 0 else 1.0
    if RATE > 0:
        p = tl.where(_kept_shares(keys, b, h, token, token, T, POWER, RATE), p, -p)
        left += p.to(dtype)
    return p.to(dtype), left, scale


@jit
def _widened(x):
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
        tokens = _keys_seen(mask, place, key, T, PACKED)
        seen = _seen(tokens, mask, place, query, key, T, PACKED)
        p, total, _ = _softmax(q, k, seen, scale, WHOLE and mask is None, PRECISION)
        if RATE > 0:
            kept = _kept_shares(keys, b, h, query, key, T, POWER, RATE)
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
        tokens = _keys_seen(mask, b.to(tl.int64), token, T, PACKED)
        seen = _seen(tokens, mask, b.to(tl.int64), token, token, T, PACKED)
        q = _head(qkv, b, h, token, T, K, 3 * H * K, WHOLE)
        k = _head(qkv, b, H + h, token, T, K, 3 * H * K, WHOLE)
        v = _head(qkv, b, 2 * H + h, token, T, K, 3 * H * K, WHOLE)
        da = _head(do, b, h, token, T, K, H * K, WHOLE)
        all_seen: tl.constexpr = WHOLE and mask is None
        p, total, _ = _softmax(q, k, seen, slope * 1.4426950408889634, all_seen, PRECISION)
        p *= (1.0 / total)[:, None]
        p, left, scale = _marked(p, keys, b, h, token, T, q.dtype, POWER, RATE)
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
        share = _widened(p)
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


# Residual and layer norm


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
    _check(x, a, gamma, beta)
    N, D = x.shape
    y, s = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = gamma.new_empty(2, N) if statistics is None else statistics
    kernel, rows = _rows_of(config, D)
    keys, shape = _of_rows(drop, N)
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
    total += _drop(branch, keys, first, N, T, D, RATE)
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
    _check(dy, s, mean, rstd, gamma, *(() if dy2 is None else (dy2,)))
    beta, y = again or (None, None)
    N, D = s.shape
    ds = torch.empty_like(s)
    da = ds if drop is None else torch.empty_like(s)
    keys, shape = _of_rows(drop, N)
    kernel, rows = _rows_of(config, D)
    warps = max(1, rows["WIDTH"] // config["ELEMENTS"])  # of a row that is more than one holds
    kernel["num_warps"] *= warps
    many = 1 if N < 65536 else 2  # few programs write fewer sums, many read faster
    most = many * kernel.pop("PROGRAMS") // warps
    programs, steps = _strips(N, rows["ROWS"], most)
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
        branch = _drop(out, keys, first, N, T, D, RATE)
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
    _check(x, w, b, h, gamma, beta)
    (N, C), D = x.shape, len(w)
    y, s = torch.empty_like(h), torch.empty_like(h)
    mean, rstd = gamma.new_empty(2, N) if statistics is None else statistics
    kernel, width = dict(config), max(16, triton.next_power_of_2(D))
    rows, inner = kernel.pop("ROWS"), min(kernel.pop("INNER"), C & -C)  # divides C
    keys, shape = _of_rows(drop, N)
    # The copy engine reads zeros past the end of a tensor and writes nothing there.
    tiles = ((x, rows, inner), (w, width, inner), *((t, rows, width) for t in (h, y, s)))
    _product_add_norm[(triton.cdiv(N, rows),)](
        *(TensorDescriptor.from_tensor(t, list(tile)) for t, *tile in tiles),
        b, keys, gamma, beta, mean, rstd, N, eps, C, D, rows, width, inner,
        _precision(x), **shape, **kernel,
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
    total = _drop(total, keys, first, N, T, D, RATE)
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


# GELU


def gelu(pre: Tensor, config: Config = GELU) -> Tensor:
    """x Φ(x), as F.gelu."""
    _check(pre)
    act = torch.empty_like(pre)
    grid = (triton.cdiv(pre.numel(), config["ELEMENTS"]),)
    _gelu[grid](pre, act, pre.numel(), **config)
    return act


@jit
def _gelu(pre, act, size, ELEMENTS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    x = tl.load(pre + at, at < size, 0.0).to(tl.float32)
    y, _ = _gelu_of(x)
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
    _check(pre, g)
    N, F = pre.shape
    again = act is None
    act = torch.empty_like(pre) if act is None else act
    kernel = dict(config)
    kernel["COLUMNS"] = min(kernel["COLUMNS"], triton.next_power_of_2(F))
    columns = triton.cdiv(F, kernel["COLUMNS"])
    strips, steps = _strips(N, kernel["ROWS"], triton.cdiv(kernel.pop("PROGRAMS"), columns))
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
        y, slope = _gelu_of(x)
        out = tl.load(g + at, ok, 0.0).to(tl.float32) * slope
        dbias += out
        tl.store(g + at, out.to(g.dtype.element_ty), ok)
        if AGAIN:
            tl.store(act + at, y.to(act.dtype.element_ty), ok)
    tl.store(partial + tl.program_id(1) * F + column, tl.sum(dbias, 0), in_columns)


@jit
def _gelu_of(x):
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
    _check(x, w, b)
    N, (F, D) = len(x), w.shape
    pre, act = x.new_empty(N, F), x.new_empty(N, F)
    kernel, tile, inner = _feed_tile(config, D, F)
    rows, columns = tile.values()
    tall = triton.cdiv(N, rows)
    beside, steps = _strips(F, columns, triton.cdiv(kernel.pop("PROGRAMS"), tall))
    tiles = ((x, rows, inner), (w, columns, inner), (pre, rows, columns), (act, rows, columns))
    _product_gelu[(beside, tall)](
        *(TensorDescriptor.from_tensor(t, list(size)) for t, *size in tiles),
        b, F, STEPS=steps, **tile, PRECISION=_precision(x), **kernel,
    )  # fmt: skip
    return pre, act


def product_gelu_backward(
    ds: Tensor, w: Tensor, pre: Tensor, config: Config = PRODUCT_GELU_BACKWARD
) -> tuple[Tensor, Tensor]:
    """Of `gelu_backward(pre, ds w)`, ds (N, D) and w (D, F): dpre and the partial sums.

    The product is neither stored nor rounded.
    """
    _check(ds, w, pre)
    N, (D, F) = len(ds), w.shape
    dpre = torch.empty_like(pre)
    kernel, tile, inner = _feed_tile(config, D, F)
    rows, columns = tile.values()
    wide = triton.cdiv(F, columns)
    strips, steps = _strips(N, rows, triton.cdiv(kernel.pop("PROGRAMS"), wide))
    partial = torch.empty(strips, F, dtype=torch.float32, device=pre.device)
    tiles = ((ds, rows, inner), (w, inner, columns), (pre, rows, columns), (dpre, rows, columns))
    _product_gelu_backward[(wide, strips)](
        *(TensorDescriptor.from_tensor(t, list(size)) for t, *size in tiles),
        partial, F, STEPS=steps, **tile, PRECISION=_precision(ds), **kernel,
    )  # fmt: skip
    return dpre, partial


def _feed_tile(config: Config, D: int, F: int) -> tuple[Config, Config, int]:
    """Options, the tile, and the width that holds all of D."""
    kernel = dict(config)
    columns = min(kernel.pop("COLUMNS"), max(16, triton.next_power_of_2(F)))
    tile = {"ROWS": kernel.pop("ROWS"), "COLUMNS": columns}
    return kernel, tile, max(16, triton.next_power_of_2(D))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"  # bfloat16's products are exact anyway


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
        y, _ = _gelu_of(total)
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
        _, slope = _gelu_of(x)
        out = g * slope
        dpre.store([row, column], out.to(dpre.dtype))
        sums += out
    at = column + tl.arange(0, COLUMNS)
    tl.store(partial + tl.program_id(1) * F + at, tl.sum(sums, 0), at < F)


# A whole layer of one head, whose states stay on chip


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
    _check(x, *weights)
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
    _check(dy, x, *kept, *weights)
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
    strips, steps = _strips(N, tile["ROWS"], tile.pop("STRIPS"))
    partial = x.new_empty(strips, size, dtype=torch.float32)
    _weights_backward[(4 + 2 * F // D, strips)](
        x, o, left, right, norms, partial, N, len(norms), STEPS=steps,
        SHARE=triton.next_power_of_2(triton.cdiv(len(norms), strips)), **tile,
    )  # fmt: skip
    return dx, *column_sums([partial], x.dtype)


def _of_layer(drops: Drops, T: int) -> tuple[list[Tensor | None], tuple[Config, Config]]:
    """The keys; the rates of both parts' outputs; and what `_of_shares` says."""
    (out, a), (down, f) = (drop or (None, 0.0) for drop in drops[:2])
    keys, shares = _of_shares(drops[2], T)
    return [out, down, keys], ({"OUT": a, "DOWN": f}, shares)


def _layer_shape(x: Tensor, mask: Tensor | None, weights: list[Tensor], config: Config) -> Config:
    _, T, D = x.shape
    F = len(weights[4])
    assert T <= MOST_TOKENS, T
    assert D in (16, 32, 64), D
    assert F % D == 0, F
    tile = max(16, triton.next_power_of_2(T))
    shape = {"D": D, "F": F, "TILE": tile, "PRECISION": _precision(x)}
    return {**config, **shape, "PACKED": _packed(mask)}


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
    seen = _seen(_keys_seen(mask, b, token, T, PACKED), mask, b, token, token, T, PACKED)
    p, total, top = _softmax(q, k, seen, scale, False, PRECISION)
    if RATE > 0:
        kept = _kept_shares(keys, b, 0, token, token, T, POWER, RATE)
        p *= tl.where(kept, 1.0 / (1.0 - RATE), 0.0)
    a = tl.dot(p.to(h.dtype), v, input_precision=PRECISION) * (1.0 / total)[:, None]
    a = a.to(h.dtype)
    tl.store(lse + b * T + token, top + tl.log2(total), token < T)
    tl.store(o + at, a, ok)
    s, N = h.to(tl.float32), tl.num_programs(0) * T
    s += _drop(_linear(a, wo, bo, 0, D, PRECISION), out_keys, b * T, N, T, D, OUT)
    s = s.to(h.dtype)
    tl.store(s1 + at, s, ok)
    h = _norm(s, g1, c1, eps, D).to(h.dtype)
    f = h.to(tl.float32)
    if DOWN > 0:  # what is added to h is dropped, once it is known
        f = tl.zeros(f.shape, tl.float32)
    f += tl.load(b2 + column).to(tl.float32)[None, :]
    for c in tl.range(0, F, D, num_stages=STAGES):
        act, _ = _gelu_of(_linear(h, w1, b1, c, D, PRECISION))
        w = _square(w2, 0, c, F, D)
        f = tl.dot(act.to(h.dtype), tl.trans(w), f, input_precision=PRECISION)
    if DOWN > 0:
        f = h.to(tl.float32) + _drop(f, down_keys, b * T, N, T, D, DOWN)
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
    da = _drop(dh, down_keys, first, N, T, D, DOWN).to(s.dtype)
    tl.store(left + 4 * D + F, da, ok)
    h = _norm(tl.load(s1 + at, ok, 0.0), g1, c1, eps, D).to(s.dtype)
    tl.store(right, h, ok)
    for c in tl.range(0, F, D, num_stages=STAGES):
        up = _square(w1, c, 0, D, D)
        bias = tl.load(b1 + c + column).to(tl.float32)
        pre = tl.dot(h, tl.trans(up), input_precision=PRECISION) + bias[None, :]
        act, rise = _gelu_of(pre)
        tl.store(right + D + c, act.to(s.dtype), ok)
        dpre = tl.dot(da, _square(w2, 0, c, F, D), input_precision=PRECISION) * rise
        dpre = dpre.to(s.dtype)
        tl.store(left + 4 * D + c, dpre, ok)
        dh = tl.dot(dpre, up, dh, input_precision=PRECISION)
    s = tl.load(s1 + at, ok, 0.0)
    dh = _normal_backward(dh, s, g1, eps, norms, D)
    if ds is not None:
        tl.store(ds + at, dh.to(s.dtype), ok)
    da = _drop(dh, out_keys, first, N, T, D, OUT).to(s.dtype)
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
    seen = _seen(_keys_seen(mask, b, token, T, PACKED), mask, b, token, token, T, PACKED)
    top = tl.load(lse + b * T + token, token < T, float("inf"))
    p = _probabilities(q, k, seen, top, slope * 1.4426950408889634, PRECISION)
    p, kept, scale = _marked(p, keys, b, 0, token, T, h.dtype, POWER, RATE)
    dv = tl.dot(tl.trans(kept), da, input_precision=PRECISION)
    tl.store(left + 2 * D, (dv * scale).to(h.dtype), ok)
    dp = tl.dot(da, tl.trans(v), input_precision=PRECISION)
    if RATE > 0:
        dp = tl.where(_widened(p) > 0.0, dp * (1.0 / (1.0 - RATE)), 0.0)
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
    _check(rows, ids)
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


# The optimizer: flat buffers in chunks, whose parameters have one rate and one decay each


def sums_of_squares(
    wide: Tensor, narrow: Tensor | None, where: slice, config: Config = SQUARES
) -> Tensor:
    """Partial sums of g², (P,) float32. g: (S,) float32 is `wide`; if `narrow` is given, it has the
    stretch `where` instead, in its own type."""
    _check(wide, *(() if narrow is None else (narrow,)))
    begin, end, chunks = _chunks(wide, narrow, where)
    kernel = dict(config)
    programs, steps = _strips(chunks, kernel["ROWS"], kernel.pop("PROGRAMS"))
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
    _check(p, wide, m, v, copy, groups, *(() if narrow is None else (narrow,)))
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
    _check(u)
    assert turns(u), u.shape
    n, rows, columns = u.shape
    out = torch.empty_like(u, dtype=dtype)
    tile = [max(16, triton.next_power_of_2(size)) for size in sorted((rows, columns))]
    _orthogonal[(n,)](
        u, out, *coefficients, rows, columns, *tile, rows > columns, _precision(out), **config
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
    _check(out, *(() if z is None else (z,)))
    tile = min(config["TILE"], max(16, triton.next_power_of_2(S)))
    inner = min(config["INNER"], max(16, triton.next_power_of_2(K)))
    rows = triton.cdiv(S, tile)
    shape = {"TILE": tile, "INNER": inner, "ROWS": rows, "PRECISION": _precision(x)}
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


# What they share


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


def _check(*tensors: Tensor) -> None:
    assert all(t.is_contiguous() for t in tensors), "kernels take contiguous tensors"


def _rows_of(config: Config, D: int) -> tuple[Config, Config]:
    """Options of a kernel that takes whole rows, and how many of what width make a tile."""
    kernel, width = dict(config), triton.next_power_of_2(D)
    return kernel, {"ROWS": max(1, kernel.pop("ELEMENTS") // width), "WIDTH": width}


def _strips(N: int, rows: int, programs: int) -> tuple[int, int]:
    """How many programs share N rows, and in how many steps of `rows` each.

    The steps are compiled in: a power of two, so that few kernels serve all batches.
    """
    tiles = triton.cdiv(N, rows)
    steps = triton.next_power_of_2(triton.cdiv(tiles, programs))
    return triton.cdiv(tiles, steps), steps
