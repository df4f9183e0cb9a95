"""Every kernel of electra/gpu/kernels: is it right, and how long does it take? And cuBLAS.

    python benchmarks/kernels.py [--only NAME ...] [--out FILE.json]
    TRITON_INTERPRET=1 python benchmarks/kernels.py --small       without a GPU: the values alone
    python benchmarks/kernels.py --compile [--only NAME ...]      without a GPU: registers, spills
    python benchmarks/kernels.py --dropout [...]                  those with dropout and without

Each entry is first compared with plain PyTorch in float32, then timed against plain PyTorch, eager
and compiled, in bfloat16: 20 calls in a CUDA graph, the median of five replays. An entry is a
process of its own: all compile side by side, then take turns on the device, and one that fails does
not take the others with it. The table comes last. GB/s count every byte that has to be read or
written once. An empty configuration is what the product does, where that is several kernels.
`products` times each matrix product of a block, in the ways PyTorch can ask for it, against the
larger of its floors: operations at 790 TFLOP/s, bytes at 4.3 TB/s (both measured on an H200).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from electra import optim
from electra.corruption import sample
from electra.gpu import fused, kernels
from electra.randomness import StepRng

CALLS, REPLAYS = 20, 5
FLOPS, BYTES = 790e12, 4.3e12  # a second
PATIENCE = 75  # seconds for an entry to compile, and again to be timed
READY = "ready to be timed"
RECORD = "record "  # a line of JSON for the parent
Like = dict[str, Any]  # dtype and device
Config = dict[str, Any]


class Case(NamedTuple):
    inputs: tuple[Any, ...]
    ours: Callable[..., tuple[Tensor, ...]]  # (*inputs, config=)
    plain: Callable[..., tuple[Tensor, ...]]  # (*inputs), the same things
    moved: int


class Entry(NamedTuple):
    make: Callable[..., Case]  # (*size, like)
    sizes: list[tuple[int, ...]]
    small: tuple[int, ...]
    configs: list[Config]  # the product's first
    compiled: bool = True  # time plain PyTorch compiled, too


# Dropout: with a rate, and without


def dropout(
    B: int, rate: float, like: Like
) -> tuple[list[kernels.Dropout | None], Callable[[Tensor, int], Tensor]]:
    """Of B sequences at three sites, for our kernels and for plain PyTorch: the same bits."""
    device = like["device"]
    rng = StepRng(0, torch.ones((), dtype=torch.int64, device=device), torch.arange(B).to(device))

    def plain(x: Tensor, site: int) -> Tensor:
        return rng.dropout(x.view(B, -1), rate, site).view_as(x) if rate else x

    return [kernels.Dropout(keys, rate) if rate else None for keys in rng.keys(0, 3)], plain


# Layer norm and GELU: N rows, D hidden, F feed-forward


def add_norm(N: int, D: int, like: Like, *, rate: float = 0.0) -> Case:
    (drop, *_), dropped = dropout(N // math.gcd(N, 128), rate, like)

    def plain(x: Tensor, a: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        s = x + dropped(a, 0)
        y, mean, rstd = torch.native_layer_norm(s.float(), (D,), gamma, beta, 1e-6)
        return y.to(x.dtype), s, mean[:, 0], rstd[:, 0]

    def ours(*inputs: Tensor, config: Config) -> tuple[Tensor, ...]:
        return kernels.add_norm(*inputs, 1e-6, config=config, drop=drop)

    x, a = torch.randn(2, N, D, **like)
    gamma, beta = torch.randn(2, D, device=x.device)
    return Case((x, a, gamma, beta), ours, plain, 4 * x.nbytes)


def add_norm_backward(N: int, D: int, like: Like, *, two: bool = False, rate: float = 0.0) -> Case:
    (drop, *_), dropped = dropout(N // math.gcd(N, 128), rate, like)
    (s, dy, gamma, beta), *_ = add_norm(N, D, like)
    s32 = s.float()
    mean = s32.mean(1)
    rstd = (s32.var(1, correction=0) + 1e-6).rsqrt()
    dy2 = torch.randn_like(dy) if two else None

    def plain(
        dy: Tensor, dy2: Tensor | None, s: Tensor, mean: Tensor, rstd: Tensor, gamma: Tensor
    ) -> tuple[Tensor, ...]:
        if dy2 is not None:
            dy = dy + dy2
        ds, dgamma, dbeta = torch.ops.aten.native_layer_norm_backward(
            dy.float(), s.float(), (D,), mean[:, None], rstd[:, None], gamma, beta, [True] * 3
        )
        da = dropped(ds, 0)
        return ds.to(s.dtype), da.to(s.dtype), dgamma, dbeta, da.sum(0)

    def ours(*inputs: Tensor | None, config: Config) -> tuple[Tensor, ...]:
        ds, da, sums = kernels.add_norm_backward(*inputs, config, drop=drop)
        return ds, da, *kernels.column_sums([sums])[0].view(3, D)

    inputs = (dy, dy2, s, mean, rstd, gamma)
    return Case(inputs, ours, plain, (3 + two + (rate > 0)) * s.nbytes)


def product_add_norm(N: int, D: int, like: Like, *, times: int, rate: float = 0.0) -> Case:
    """From `times` D columns; beside it cuBLAS and `add_norm`, which the product takes."""
    (drop, *_), dropped = dropout(N // math.gcd(N, 128), rate, like)

    def plain(*inputs: Tensor) -> tuple[Tensor, ...]:
        x, w, b, h, gamma, beta = inputs
        s = h + dropped(F.linear(x, w, b), 0)
        y, mean, rstd = torch.native_layer_norm(s.float(), (D,), gamma, beta, 1e-6)
        return y.to(x.dtype), s, mean[:, 0], rstd[:, 0]

    def ours(*inputs: Tensor, config: Config) -> tuple[Tensor, ...]:
        x, w, b, h, gamma, beta = inputs
        if not config:
            return kernels.add_norm(h, torch.addmm(b, x, w.t()), gamma, beta, 1e-6, drop=drop)
        return kernels.product_add_norm(*inputs, 1e-6, config=config, drop=drop)

    x, h = torch.randn(N, times * D, **like), torch.randn(N, D, **like)
    w, b = torch.randn(D, times * D, **like) / (times * D) ** 0.5, torch.randn(D, **like)
    gamma, beta = torch.randn(2, D, device=x.device)
    return Case((x, w, b, h, gamma, beta), ours, plain, x.nbytes + 3 * h.nbytes + w.nbytes)


def gelu(N: int, D: int, like: Like) -> Case:
    pre = 2 * torch.randn(N, 4 * D, **like)

    def ours(pre: Tensor, config: Config) -> tuple[Tensor, ...]:
        return (kernels.gelu(pre, config),)

    return Case((pre,), ours, lambda pre: (F.gelu(pre),), 2 * pre.nbytes)


def plain_gelu_backward(pre: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    dpre = torch.ops.aten.gelu_backward(g, pre)
    return dpre, F.gelu(pre), dpre.sum(0, dtype=torch.float32)


def gelu_backward(N: int, D: int, like: Like, *, kept: bool = False) -> Case:
    pre, g = torch.randn(2, N, 4 * D, **like)
    act = F.gelu(2 * pre) if kept else None

    def ours(*inputs: Tensor, config: Config) -> tuple[Tensor, ...]:
        *out, sums = kernels.gelu_backward(*inputs, config, act=act)
        return *out, kernels.column_sums([sums])[0]

    return Case((2 * pre, g), ours, plain_gelu_backward, (3 if kept else 4) * pre.nbytes)


def product_gelu(N: int, D: int, like: Like) -> Case:
    """An empty config is cuBLAS and `gelu`."""

    def plain(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        pre = F.linear(x, w, b)
        return pre, F.gelu(pre)

    def ours(x: Tensor, w: Tensor, b: Tensor, config: Config) -> tuple[Tensor, ...]:
        if config:
            return kernels.product_gelu(x, w, b, config)
        pre = torch.addmm(b, x, w.t())
        return pre, kernels.gelu(pre)

    x, w, b = torch.randn(N, D, **like), torch.randn(4 * D, D, **like), torch.randn(4 * D, **like)
    return Case((x, w / D**0.5, b), ours, plain, x.nbytes + w.nbytes + 8 * x.nbytes)


def product_gelu_backward(N: int, D: int, like: Like) -> Case:
    """With act kept. An empty config is cuBLAS and `gelu_backward`."""

    def plain(ds: Tensor, w: Tensor, pre: Tensor) -> tuple[Tensor, ...]:
        dpre, _, sums = plain_gelu_backward(pre, ds @ w)
        return dpre, sums

    def ours(ds: Tensor, w: Tensor, pre: Tensor, config: Config) -> tuple[Tensor, ...]:
        if config:
            dpre, sums = kernels.product_gelu_backward(ds, w, pre, config)
        else:
            dpre, _, sums = kernels.gelu_backward(pre, ds @ w, act=act)
        return dpre, kernels.column_sums([sums])[0]

    ds, w = torch.randn(N, D, **like), torch.randn(D, 4 * D, **like) / D**0.5
    pre = 2 * torch.randn(N, 4 * D, **like)
    act = F.gelu(pre)
    return Case((ds, w, pre), ours, plain, ds.nbytes + w.nbytes + 2 * pre.nbytes)


def column_sums(P: int, C: int, like: Like) -> Case:
    """Those of a block, (P, C) each but for the last, which is wider."""

    def ours(*x: Tensor, config: Config) -> tuple[Tensor, ...]:
        del config
        return (kernels.column_sums(list(x))[0],)

    def plain(*x: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat([p.sum(0) for p in x]),)

    x = [torch.randn(P, n * C, device=like["device"]) for n in (3, 3, 3, 4)]
    return Case(tuple(x), ours, plain, sum(p.nbytes for p in x))


# Attention: B, T, H, K; every fourth sequence is padded


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rate: float, dropped: Any
) -> Tensor:
    """(B, H, T, K) each; mask: (B, T); written out where something is dropped."""
    seen = mask[:, None, None]
    if not rate:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    score = (q @ k.mT).float() / math.sqrt(q.shape[3])
    p = dropped(score.masked_fill(~seen, -math.inf).softmax(-1), 2)
    return p.to(v.dtype) @ v


def attention(B: int, T: int, H: int, K: int, like: Like, *, rate: float = 0.0) -> Case:
    (*_, drop), dropped = dropout(B, rate, like)

    def plain(qkv: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        o = plain_attention(q, k, v, mask, rate, dropped)
        return (o.transpose(1, 2).flatten(2),)

    def ours(qkv: Tensor, mask: Tensor, config: Config) -> tuple[Tensor, ...]:
        return (kernels.attention(qkv, mask, config, drop),)

    qkv = torch.randn(B, T, 3, H, K, **like)
    length = torch.where(torch.arange(B) % 4 == 1, torch.randint(1, T + 1, (B,)), T)
    mask = (torch.arange(T) < length[:, None]).to(qkv.device)
    return Case((qkv, mask), ours, plain, 4 * B * T * H * K * qkv.itemsize)


def attention_and_backward(
    B: int, T: int, H: int, K: int, like: Like, *, rate: float = 0.0
) -> Case:
    forward = attention(B, T, H, K, like, rate=rate)
    (*_, drop), _ = dropout(B, rate, like)

    def plain(qkv: Tensor, mask: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        qkv = qkv.detach().requires_grad_()
        (o,) = forward.plain(qkv, mask)
        (dqkv,) = torch.autograd.grad(o, qkv, do)
        return o, dqkv, dqkv.sum((0, 1), dtype=torch.float32).flatten()

    def ours(qkv: Tensor, mask: Tensor, do: Tensor, config: Config) -> tuple[Tensor, ...]:
        o = kernels.attention(qkv, mask, drop=drop)
        dqkv, sums = kernels.attention_backward(qkv, mask, do, config, drop)
        return o, dqkv, kernels.column_sums([sums])[0]

    do = torch.randn(B, T, H * K, **like)
    return Case((*forward.inputs, do), ours, plain, forward.moved + 7 * do.numel() * do.itemsize)


def attention_backward(
    B: int, T: int, H: int, K: int, like: Like, *, padded: bool = True, rate: float = 0.0
) -> Case:
    """Not padded: no mask, as in training on full sequences."""
    whole = attention_and_backward(B, T, H, K, like, rate=rate)
    qkv, mask, do = whole.inputs
    (*_, drop), _ = dropout(B, rate, like)

    def plain(qkv: Tensor, mask: Tensor | None, do: Tensor) -> tuple[Tensor, ...]:
        seen = torch.ones_like(qkv[:, :, 0, 0, 0], dtype=torch.bool) if mask is None else mask
        return whole.plain(qkv, seen, do)[1:]

    def ours(qkv: Tensor, mask: Tensor | None, do: Tensor, config: Config) -> tuple[Tensor, ...]:
        dqkv, sums = kernels.attention_backward(qkv, mask, do, config, drop)
        return dqkv, kernels.column_sums([sums])[0]

    return Case((qkv, mask if padded else None, do), ours, plain, 7 * do.nbytes)


# A whole layer: B sequences of T tokens, D hidden, one head, 4 D feed-forward


def layer(B: int, T: int, D: int, like: Like, *, rate: float = 0.0) -> Case:
    """Forward. An empty config is the product's block of products and kernels."""
    drops, dropped = dropout(B, rate, like)

    def plain(x: Tensor, mask: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        wqkv, bqkv, wo, bo, w1, b1, w2, b2, g1, c1, g2, c2 = weights
        q, k, v = F.linear(x, wqkv, bqkv).view(B, T, 3, D).unbind(2)
        q, k, v = (t[:, None] for t in (q, k, v))
        a = plain_attention(q, k, v, mask, rate, dropped)[:, 0]
        s = x + dropped(F.linear(a, wo, bo), 0)
        h = F.layer_norm(s.float(), (D,), g1, c1, 1e-6).to(x.dtype)
        f = dropped(F.linear(F.gelu(F.linear(h, w1, b1)), w2, b2), 1)
        return (F.layer_norm((h + f).float(), (D,), g2, c2, 1e-6).to(x.dtype),)

    def ours(x: Tensor, mask: Tensor, *weights: Tensor, config: Config) -> tuple[Tensor, ...]:
        if not config:
            return (fused.block(x, mask, list(weights), *draws(drops), 1, 1e-6, True)[0],)
        return (kernels.layer(x, mask, list(weights), 1e-6, config, drops)[0],)

    x = torch.randn(B, T, D, **like)
    (_, mask), *_ = attention(B, T, 1, 16, like)
    sizes = ((3 * D, D), (3 * D,), (D, D), (D,), (4 * D, D), (4 * D,), (D, 4 * D), (D,))
    weights = [torch.randn(*n, **like) * (n[-1] ** -0.5 if n[1:] else 0.1) for n in sizes]
    norms = [1 + 0.1 * torch.randn(D, device=x.device) for _ in range(4)]
    return Case((x, mask, *weights, *norms), ours, plain, 5 * x.nbytes)


def draws(drops: list[kernels.Dropout | None]) -> tuple[Tensor | None, list[float]]:
    """As the operators take them."""
    keys = [drop.keys for drop in drops if drop]
    return torch.stack(keys) if keys else None, [drop.rate if drop else 0.0 for drop in drops]


def layer_backward(B: int, T: int, D: int, like: Like, *, rate: float = 0.0) -> Case:
    forward = layer(B, T, D, like, rate=rate)
    drops, _ = dropout(B, rate, like)
    x, mask, *weights = forward.inputs
    dy = torch.randn_like(x)
    kept: dict[bool, list[Tensor]] = {
        True: list(fused.block(x, mask, weights, *draws(drops), 1, 1e-6, True)[1:]),
        False: list(kernels.layer(x, mask, weights, 1e-6, drops=drops)[1:]),
    }

    def plain(dy: Tensor, x: Tensor, mask: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in (x, *weights)]
        (y,) = forward.plain(leaves[0], mask, *leaves[1:])
        dx, *gradients = torch.autograd.grad(y, leaves, dy)
        return dx, *(g.float() for g in gradients[:8:2])

    def ours(
        dy: Tensor, x: Tensor, mask: Tensor, *weights: Tensor, config: Config
    ) -> tuple[Tensor, ...]:
        if not config:
            out = fused.block_backward(dy, x, mask, list(weights), kept[True], *draws(drops), 1)
            return out[:5]
        dx, sums, _ = kernels.layer_backward(
            dy, x, mask, list(weights), kept[False], 1e-6, config, drops
        )
        parts = sums.split([w.numel() for w in weights])
        return dx, *(g.view_as(w) for g, w in zip(parts[:8:2], weights[:8:2], strict=True))

    return Case((dy, *forward.inputs), ours, plain, 7 * x.nbytes)


# The optimizer: flat buffers of S numbers, of which the stretch from A to Z has working copies


def adam(S: int, A: int, Z: int, like: Like) -> Case:
    """Norm, clip and update. The plain way is what torch has kernels for, as `optim` calls them."""
    where, device = slice(A, Z), like["device"]
    p, wide, m, v = (torch.randn(S, device=device) for _ in range(4))
    v = v.abs()
    narrow, copy = torch.randn(Z - A, **like), torch.zeros(Z - A, **like)
    groups = torch.tensor([[1.0, 0.01]], device=device).repeat(S // kernels.CHUNK, 1)
    rate, steps = torch.tensor(1e-2, device=device), torch.tensor(7.0, device=device)

    def scalars(square: Tensor) -> tuple[Tensor, Tensor]:
        norm = square.sqrt()
        return norm.clamp(min=1.0), (~norm.isfinite()).float()

    def ours(*inputs: Tensor, config: Config) -> tuple[Tensor, ...]:
        p, wide, narrow, m, v, copy = inputs
        squares = kernels.sums_of_squares(wide, narrow, where, config.get("SQUARES", SQUARES))
        divisor, skip = scalars(squares.sum())
        kernels.adam(
            p, wide, narrow, m, v, copy, where, groups, (rate, divisor, skip, steps),
            (0.9, 0.999), 1e-6, config.get("ADAM", ADAM),
        )  # fmt: skip
        return p, m, v, copy

    def plain(*inputs: Tensor) -> tuple[Tensor, ...]:
        p, wide, narrow, m, v, copy = inputs
        wide[where].copy_(narrow)
        divisor, skip = scalars(wide.norm().square())
        torch._fused_adamw_(
            [p], [wide], [m], [v], [], [steps], lr=rate, beta1=0.9, beta2=0.999,
            weight_decay=0.01, eps=1e-6, amsgrad=False, maximize=False, grad_scale=divisor,
            found_inf=skip,
        )  # fmt: skip
        copy.copy_(p[where])
        return p, m, v, copy

    moved = 2 * (p.nbytes + m.nbytes + v.nbytes) + 2 * (wide.nbytes - (Z - A) * 4)
    return Case((p, wide, narrow, m, v, copy), ours, plain, moved + 3 * narrow.nbytes)


# Cross-entropy: N rows, V tokens, in rows of W; E with the products


def cross_entropy(N: int, V: int, W: int, like: Like) -> Case:
    def plain(logits: Tensor, targets: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        logits = logits[:, :V]
        nll = F.cross_entropy(logits.float(), targets, reduction="none")
        return nll, sample(logits.float(), u), logits.argmax(-1)

    def ours(logits: Tensor, targets: Tensor, u: Tensor, config: Config) -> tuple[Tensor, ...]:
        return kernels.cross_entropy_and_sample(logits, targets, u, V, config)[:3]

    logits = 3 * torch.randn(N, W, **like)
    targets = torch.randint(V, (N,), device=logits.device)
    u = torch.rand(N, device=logits.device)
    return Case((logits, targets, u), ours, plain, N * V * logits.itemsize)


def cross_entropy_backward(N: int, V: int, W: int, like: Like) -> Case:
    (logits, targets, u), *_, moved = cross_entropy(N, V, W, like)
    lse = torch.logsumexp(logits[:, :V].float(), 1)

    def plain(logits: Tensor, targets: Tensor, lse: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        p = torch.exp(logits[:, :V].float() - lse[:, None])
        p = p.scatter_add(1, targets[:, None], torch.full_like(p[:, :1], -1))
        g = F.pad(p * u[:, None], (0, W - V)).to(logits.dtype)
        return g, g[:, :V].sum(0, dtype=torch.float32)

    def ours(*inputs: Tensor, config: Config) -> tuple[Tensor, ...]:
        return kernels.cross_entropy_backward(*inputs, V, config)

    return Case((logits, targets, lse, u), ours, plain, 2 * moved)


def linear_cross_entropy(N: int, V: int, E: int, like: Like) -> Case:
    """The head's last product too, and everything backward."""

    def run(
        loss: Callable[..., tuple[Tensor, ...]], e: Tensor, table: Tensor, bias: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (e, table, bias)]
        nll, x_hat, best = loss(*leaves, *rest)
        return nll, x_hat, best, *torch.autograd.grad(nll.mean(), leaves)

    def product(
        e: Tensor, table: Tensor, bias: Tensor, targets: Tensor, u: Tensor
    ) -> tuple[Tensor, ...]:
        logits = F.linear(e, table.to(e.dtype), bias.to(e.dtype))
        nll = F.cross_entropy(logits.float(), targets, reduction="none")
        return nll, sample(logits.detach().float(), u), logits.argmax(-1)

    def ours(*inputs: Any, config: Config) -> tuple[Tensor, ...]:
        del config
        return run(lambda *x: fused.guess(*x)[:3], *inputs)

    e = torch.randn(N, E, **like)
    table = 0.3 * torch.randn(V, E, device=e.device)
    bias = torch.randn(V, device=e.device)
    targets = torch.randint(V, (N,), device=e.device)
    u = torch.rand(N, device=e.device)
    return Case((e, table, bias, targets, u), ours, partial(run, product), 6 * N * V * e.itemsize)


# The gradient of a look-up: N tokens, V of them differ, E columns


def word_gradient(N: int, V: int, E: int, like: Like) -> Case:
    """Float32, as the table is. Compiled, the plain way adds in any order."""

    def plain(rows: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        return (rows.new_zeros(V, E).index_put((ids,), rows, accumulate=True),)

    def ours(rows: Tensor, ids: Tensor, config: Config) -> tuple[Tensor, ...]:
        return (kernels.table_gradient(rows, ids, V, config),)

    # As in text: 15 % are one token, the others as Zipf says.
    ids = torch.multinomial(1 / torch.arange(1.0, V + 1), N, replacement=True)
    ids = torch.where(torch.rand(N) < 0.15, min(103, V - 1), torch.randperm(V)[ids])
    rows = torch.randn(N, E, device=like["device"])
    moved = rows.nbytes + 2 * ids.nbytes + V * E * rows.itemsize
    return Case((rows, ids.to(rows.device)), ours, plain, moved)


def orthogonal(n: int, rows: int, columns: int, like: Like) -> Case:
    """The plain way is Muon's by rounds on x: in bfloat16 on a GPU, where ours is in float16."""

    def plain(u: Tensor) -> tuple[Tensor, ...]:
        return (optim.orthogonal(u, torch.bfloat16 if u.is_cuda else torch.float32),)

    def ours(u: Tensor, config: Config) -> tuple[Tensor, ...]:
        return (kernels.orthogonal(u, torch.float16, optim.QUINTIC, config),)

    u = torch.randn(n, rows, columns, device=like["device"])
    return Case((u,), ours, plain, u.nbytes + u.nbytes // 2)


def symmetric(n: int, side: int, other: int, like: Like) -> Case:
    """A Gram matrix, tall where `other` is the larger, and the polynomial of it in a round."""
    a, b, c = optim.QUINTIC

    def plain(x: Tensor) -> tuple[Tensor, ...]:
        gram = x.mT @ x
        by = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        by.diagonal(dim1=1, dim2=2).add_(a)
        return gram, by

    def ours(x: Tensor, config: Config) -> tuple[Tensor, ...]:
        gram = kernels.symmetric(x.mT, x, config=config)
        return gram, kernels.symmetric(gram, gram, by=c, plus=(b, gram), unit=a, config=config)

    # The interpreter does not take bfloat16, and Muon's type on a GPU is float16.
    dtype = torch.float32 if like["dtype"] == torch.float32 else torch.float16
    x = torch.randn(n, other, side, device=like["device"]).to(dtype) / (side * other) ** 0.5
    return Case((x,), ours, plain, x.nbytes + 3 * n * side * side * x.itemsize)


ROWS = [(16384, 256), (131072, 256), (16384, 64), (131072, 64)]
LN, LN_BACK, GELU_BACK = kernels.ADD_NORM, kernels.ADD_NORM_BACKWARD, kernels.GELU_BACKWARD
LN_BACKS = [
    LN_BACK,
    LN_BACK | {"PROGRAMS": 528},
    LN_BACK | {"PROGRAMS": 2112},
    LN_BACK | {"STAGES": 4},
    LN_BACK | {"ELEMENTS": 1024},
    LN_BACK | {"ELEMENTS": 1024, "PROGRAMS": 528, "num_warps": 2},
    LN_BACK | {"ELEMENTS": 2048, "PROGRAMS": 264, "num_warps": 4},
]
LAYER_BACK = kernels.LAYER_BACKWARD
ADAM, SQUARES, SYMMETRIC = kernels.ADAM, kernels.SQUARES, kernels.SYMMETRIC
TABLE = kernels.TABLE_GRADIENT
HEADS = [(128, 128, 4, 64), (1024, 128, 4, 64), (128, 128, 1, 64)]
LAYERS = [(128, 128, 64), (1024, 128, 64)]
PRODUCTS = [{}, kernels.PRODUCT_ADD_NORM, kernels.PRODUCT_ADD_NORM | {"num_stages": 3}]
LOGITS = [(2560, 30522, 30528), (20480, 30522, 30528)]
ENTRIES = {
    "add_norm": Entry(
        add_norm,
        ROWS,
        (9, 48),
        [LN, *(LN | {"ELEMENTS": e, "num_warps": w} for e, w in ((1024, 4), (4096, 4), (512, 1)))],
    ),
    "add_norm_backward": Entry(add_norm_backward, ROWS, (9, 48), LN_BACKS),
    "add_norm_backward of two": Entry(
        partial(add_norm_backward, two=True), ROWS, (9, 48), LN_BACKS[:3]
    ),
    "gelu": Entry(
        gelu, ROWS, (9, 48), [kernels.GELU, *(kernels.GELU | {"ELEMENTS": e} for e in (1024, 4096))]
    ),
    "gelu_backward": Entry(
        gelu_backward,
        ROWS,
        (9, 48),
        [
            GELU_BACK,
            GELU_BACK | {"STAGES": 2},
            GELU_BACK | {"STAGES": 4},
            GELU_BACK | {"PROGRAMS": 1056},
        ],
    ),
    "gelu_backward, act kept": Entry(
        partial(gelu_backward, kept=True),
        ROWS[:2],
        (9, 48),
        [
            GELU_BACK,
            GELU_BACK | {"STAGES": 4},
            GELU_BACK | {"ROWS": 32, "num_warps": 8},
        ],
        compiled=False,
    ),
    "product and gelu": Entry(
        product_gelu, ROWS[:2], (70, 48), [{}, kernels.PRODUCT_GELU], compiled=False
    ),
    "product and gelu_backward": Entry(
        product_gelu_backward,
        ROWS[:2],
        (70, 48),
        [{}, kernels.PRODUCT_GELU_BACKWARD],
        compiled=False,
    ),
    "column_sums": Entry(column_sums, [(128, 256), (512, 256)], (9, 48), [{}]),
    "attention": Entry(
        attention,
        HEADS,
        (2, 20, 2, 16),
        [
            kernels.ATTENTION,
            kernels.ATTENTION | {"PROGRAMS": 10**6, "STAGES": 1, "maxnreg": None},
        ],
    ),
    "attention and backward": Entry(
        attention_and_backward, HEADS, (2, 20, 2, 16), [kernels.ATTENTION_BACKWARD]
    ),
    "attention backward": Entry(
        attention_backward,
        HEADS[:2],
        (2, 32, 2, 16),
        [kernels.ATTENTION_BACKWARD],
        compiled=False,
    ),
    "attention backward, not padded": Entry(
        partial(attention_backward, padded=False),
        HEADS[:2],
        (2, 32, 2, 16),
        [kernels.ATTENTION_BACKWARD],
        compiled=False,
    ),
    "product and add_norm, out": Entry(
        partial(product_add_norm, times=1), ROWS[:2], (9, 48), PRODUCTS, compiled=False
    ),
    "product and add_norm, down": Entry(
        partial(product_add_norm, times=4), ROWS[:2], (9, 48), PRODUCTS, compiled=False
    ),
    "layer": Entry(layer, LAYERS, (2, 20, 16), [{}, kernels.LAYER], compiled=False),
    "layer backward": Entry(
        layer_backward,
        LAYERS,
        (2, 20, 16),
        [
            {},
            LAYER_BACK,
            *(
                LAYER_BACK | {kernel: LAYER_BACK[kernel] | change}
                for kernel, change in (
                    ("FEED", {"maxnreg": None}),
                    ("FEED", {"ROWS": 128, "num_warps": 8, "maxnreg": None}),
                    ("ATTEND", {"maxnreg": None}),
                    ("WEIGHTS", {"STRIPS": 66}),
                )
            ),
        ],
        compiled=False,
    ),
    "adam": Entry(
        adam,
        [(14_254_080, 3_972_480, 14_111_744)],  # of `small`
        (1024, 128, 896),
        [
            {"ADAM": ADAM},
            *({"ADAM": ADAM | {"ROWS": r, "num_warps": w}} for r, w in ((8, 4), (16, 4), (32, 8))),
            {"SQUARES": SQUARES | {"PROGRAMS": 264}},
            {"SQUARES": SQUARES | {"PROGRAMS": 1056, "ROWS": 32, "num_warps": 4}},
        ],
        compiled=False,
    ),
    "orthogonal": Entry(
        orthogonal,
        [(48, 64, 64), (12, 256, 64), (12, 64, 256)],  # of the generator of `small`
        (2, 48, 80),
        [kernels.ORTHOGONAL, kernels.ORTHOGONAL | {"num_warps": 8}],
        compiled=False,
    ),
    "symmetric": Entry(
        symmetric,
        [(72, 256, 256), (12, 256, 1024)],  # of the discriminator of `small`
        (2, 40, 70),
        [
            SYMMETRIC,
            SYMMETRIC | {"maxnreg": None},
            SYMMETRIC | {"num_stages": 4, "maxnreg": None},
            SYMMETRIC | {"num_warps": 4, "maxnreg": None},
            SYMMETRIC | {"TILE": 64, "num_warps": 4, "maxnreg": None},
        ],
        compiled=False,
    ),
    "cross-entropy and sample": Entry(
        cross_entropy,
        LOGITS,
        (6, 90, 96),
        [
            kernels.CROSS_ENTROPY,
            kernels.CROSS_ENTROPY | {"STAGES": 1},
            kernels.CROSS_ENTROPY | {"WIDTH": 4096, "STAGES": 1, "num_warps": 8},
            kernels.CROSS_ENTROPY | {"WIDTH": 4096, "STAGES": 2, "num_warps": 8},
        ],
    ),
    "cross-entropy backward": Entry(
        cross_entropy_backward,
        LOGITS,
        (6, 90, 96),
        [
            kernels.CROSS_ENTROPY_BACKWARD,
            kernels.CROSS_ENTROPY_BACKWARD | {"STAGES": 1},
            kernels.CROSS_ENTROPY_BACKWARD | {"ROWS": 8, "STAGES": 1},
            kernels.CROSS_ENTROPY_BACKWARD | {"GROUPS": 64},
        ],
    ),
    "linear, cross-entropy, sample and backward": Entry(
        linear_cross_entropy, [(2560, 30522, 128), (20480, 30522, 128)], (6, 90, 32), [{}]
    ),
    "word gradient": Entry(
        word_gradient,
        [(16384, 30522, 128), (131072, 30522, 128)],
        (300, 50, 48),
        [
            TABLE,
            TABLE | {"ROWS": {"ROWS": 32, "num_warps": 1}},
            TABLE | {"ROWS": {"ROWS": 32, "num_warps": 2}},
            TABLE | {"RUNS": TABLE["RUNS"] | {"STAGES": 3}},
            TABLE | {"RUNS": {"PARTS": 32, "STAGES": 3, "num_warps": 4}},
            TABLE | {"RUNS": {"PARTS": 16, "STAGES": 4, "num_warps": 2}},
        ],
    ),
}

RATE = 0.1
# The product's way alone, and where a row fits no tile.
DROPPING = {
    f"{name}, dropout": entry._replace(
        make=partial(entry.make, rate=RATE),
        sizes=entry.sizes[:2],
        small=(12, 48) if len(entry.small) == 2 else entry.small,
        configs=entry.configs[: 1 if entry.configs[0] else 2],
    )
    for name, entry in ENTRIES.items()
    if re.match("add_norm|attention|product and add_norm|layer", name)
}
ENTRIES |= DROPPING


# The products of a block


def products(N: int, D: int) -> None:
    sizes = {"qkv": (D, 3 * D), "out": (D, D), "up": (D, 4 * D), "down": (4 * D, D)}
    for kind in ("forward", "to inputs", "to weights"):
        for name, (before, after) in sizes.items():
            x, dy, residual = (_random(N, C) for C in (before, after, before))
            w, b = _random(after, before), _random(after)
            operations, moved = 2 * N * before * after, x.nbytes + dy.nbytes + w.nbytes
            floor = max(operations / FLOPS, moved / BYTES) * 1e6
            times: dict[str, float] = {}
            for label, way in _ways(kind, x, dy, w, b, residual).items():
                attempt(label, partial(_time, times, label, way))
            best = min(times.values())
            print(
                f"{kind}, {name}: N {N}, {before} -> {after}: {best:.1f} µs,"
                f" {operations / best / 1e6:.0f} TFLOP/s, {moved / best / 1e3:.0f} GB/s,"
                f" {floor / best:.0%} of what could be;",
                ", ".join(f"{label} {t:.1f}" for label, t in times.items()),
                flush=True,
            )


def _ways(
    kind: str, x: Tensor, dy: Tensor, w: Tensor, b: Tensor, residual: Tensor
) -> dict[str, Callable[[], Any]]:
    turned = w.t().contiguous()
    if kind == "forward":
        out = torch.empty_like(dy)
        return {
            "addmm": lambda: torch.addmm(b, x, w.t()),
            "mm": lambda: x @ w.t(),
            "turned": lambda: torch.addmm(b, x, turned),
            "out=": lambda: torch.addmm(b, x, w.t(), out=out),
        }
    if kind == "to inputs":
        out = torch.empty_like(x)
        return {
            "mm": lambda: dy @ w,
            "turned": lambda: dy @ turned.t(),
            "out=": lambda: torch.mm(dy, w, out=out),
            "transposed": lambda: (w.t() @ dy.t()).t(),
            "residual": lambda: torch.addmm(residual, dy, w),
            "residual, turned": lambda: torch.addmm(residual, dy, turned.t()),
            "residual, in place": lambda: residual.addmm_(dy, w, beta=0.5),
        }

    def parts(n: int) -> Tensor:
        y = torch.bmm(dy.view(n, -1, dy.shape[1]).mT, x.view(n, -1, x.shape[1]))
        return y.sum(0, dtype=torch.float32)

    return {
        "mm": lambda: dy.t() @ x,
        "transposed": lambda: (x.t() @ dy).t(),
        "float32": lambda: torch.mm(dy.t(), x, out_dtype=torch.float32),
        "8 parts": lambda: parts(8),
        "32 parts": lambda: parts(32),
    }


def _time(times: dict[str, float], label: str, way: Callable[[], Any]) -> None:
    times[label] = microseconds(way)


def _random(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.bfloat16, device="cuda")


# Comparing and timing


def difference(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> str:
    """Of each output: the largest error over the largest value, or the share that is another."""
    said: list[str] = []
    for a, b in zip(got, expected, strict=True):
        if b.is_floating_point():
            error = (a.double() - b.double()).abs().max() / b.double().abs().max()
            said.append(f"{error.item():.1e}")
        else:
            said.append(f"{(a != b).double().mean().item():.2%} other")
    return ", ".join(said)


def microseconds(call: Callable[[], Any]) -> float:
    """Of one call, recorded in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times: list[float] = []
    for _ in range(REPLAYS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(times[1:])


def attempt(label: str, do: Callable[[], str | None]) -> bool:
    """Print what is found; say nothing about None."""
    try:
        if (found := do()) is not None:
            print(f"  {label:<91} {found}", flush=True)
    except Exception as error:  # a kernel that does not compile must not hide the others
        lines = str(error).strip().splitlines()[:6]
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = " | ".join([type(error).__name__, *lines, f"{where.filename}:{where.lineno}"])
        print(f"  {label:<91} failed: {said}", flush=True)
        return False
    return True


def compare(case: Case, config: Config) -> str:
    exact = (
        x.to(torch.float32, copy=True) if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in case.inputs
    )
    expected = case.plain(*exact)
    inputs = (x.clone() if isinstance(x, Tensor) else x for x in case.inputs)
    return "differs by " + difference(case.ours(*inputs, config=config), expected)


def child(name: str, small: bool) -> None:
    """Compare an entry at all its sizes, then, when told, time what worked."""
    cuda = torch.cuda.is_available()
    like: Like = {
        "device": torch.device("cuda" if cuda else "cpu"),
        # The interpreter multiplies the bits of bfloat16 as integers.
        "dtype": torch.bfloat16 if cuda else torch.float32,
    }
    timed: list[tuple[str, Case, dict[str, Callable[..., Any]]]] = []
    if name != "products":
        entry = ENTRIES[name]
        usual = entry.sizes[0][1:]  # compiling takes seconds: others get the product's config only
        for size in [entry.small] if small else entry.sizes:
            torch.manual_seed(0)
            print(f"{name} {size}")
            case = entry.make(*size, like)
            ways = {
                str(config): partial(case.ours, config=config)
                for config in entry.configs[
                    : len(entry.configs) if small or size[1:] == usual else 1
                ]
                if attempt(str(config), partial(compare, case, config))
            }
            if small or not cuda:
                continue
            compiled = torch.compile(case.plain, dynamic=False)
            ways["plain"] = case.plain
            if entry.compiled and attempt(
                "plain, compiled", lambda c=case, f=compiled: f(*c.inputs) and "ran"
            ):
                ways["plain, compiled"] = compiled
            timed.append((f"{name} {size}", case, ways))
    if small or not cuda:
        return
    torch.cuda.empty_cache()
    print(READY, flush=True)
    input()
    if name == "products":
        for size in ROWS:
            products(*size)
    for title, case, ways in timed:
        print(title)
        for label, way in ways.items():

            def speed(
                way: Callable[..., Any] = way,
                case: Case = case,
                what: tuple[str, str] = (title, label),
            ) -> str:
                t = microseconds(lambda: way(*case.inputs))
                rate = case.moved / t / 1000
                row = {"entry": what[0], "way": what[1], "microseconds": t, "gb_per_s": rate}
                print(RECORD + json.dumps(row))
                return f"{t:8.1f} µs {rate:8.0f} GB/s"

            attempt(label, speed)


def compile_for_h200(name: str) -> None:
    """What every configuration of an entry compiles to: registers, bytes spilled, shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    said: list[str] = []

    def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Instead of a launch. Tensors have no memory here, only a type."""
        del grid, warmup
        names = kernel.arg_names
        given = {p.name: p.default for p in kernel.params} | dict(zip(names, args, strict=False))
        given |= {k: v for k, v in kwargs.items() if k in names}
        types, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(kernel.params):
            value = given[parameter.name]
            short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
            short |= {torch.bool: "i1", torch.int16: "i16", torch.int32: "i32"}
            aligned = isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
            if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
                types[parameter.name], constants[(i,)] = "constexpr", value
                continue
            if aligned:
                attributes[(i,)] = [["tt.divisibility", 16]]
            if isinstance(value, Tensor):
                types[parameter.name] = "*" + short.get(value.dtype, "i64")
            elif isinstance(value, int | float):
                types[parameter.name] = "i32" if isinstance(value, int) else "fp32"
            else:
                shape = list(value.block_shape)
                types[parameter.name] = f"tensordesc<{short[value.base.dtype]}{shape}>"
        options = {k: v for k, v in kwargs.items() if k not in names}
        source = ASTSource(kernel, types, constants, attributes)
        result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        limit = options.get("maxnreg")
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
            ptx.write(result.asm["ptx"])
            ptx.flush()
            command = [tool, "-v", "--gpu-name=sm_90a", ptx.name, "-o", os.devnull]
            command += [f"--maxrregcount={limit}"] if limit else []
            told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        registers = re.search(r"Used (\d+) registers", told)
        spilled = re.search(r"(\d+) bytes spill stores", told)
        assert registers, told
        assert spilled, told
        said.append(
            f"{registers[1]} registers, {spilled[1]} B spilled, {result.metadata.shared} B shared"
        )

    triton.runtime.jit.JITFunction.run = compiled
    entry = ENTRIES[name]
    for size in entry.sizes:
        case = entry.make(*size, {"device": torch.device("meta"), "dtype": torch.bfloat16})
        print(f"{name} {size}")
        for config in entry.configs:

            def work(case: Case = case, config: Config = config) -> str:
                said.clear()
                case.ours(*case.inputs, config=config)
                return "; ".join(said)

            attempt(str(config), work)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and time the kernels.")
    names = [*ENTRIES, "products"]
    parser.add_argument(
        "--dropout",
        dest="only",
        default=names,
        action="store_const",
        const=[n for name in DROPPING for n in (name.removesuffix(", dropout"), name)],
        help="only what can drop, with and without",
    )
    parser.add_argument("--small", action="store_true", help="tiny sizes, values only")
    parser.add_argument("--only", nargs="*", default=names, choices=names)
    parser.add_argument("--compile", action="store_true", help="for an H200, without one")
    parser.add_argument("--out", type=Path, help="where to write the times as JSON")
    parser.add_argument("--child", choices=names, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.compile:
        for name in a.only:
            if name != "products":
                compile_for_h200(name)
        return
    if a.child or a.small or not torch.cuda.is_available():
        for name in [a.child] if a.child else a.only:
            child(name, a.small)
        return
    with tempfile.TemporaryDirectory() as folder:
        running: dict[str, tuple[subprocess.Popen[str], Path]] = {}
        for name in a.only:
            log = Path(folder) / name
            with open(log, "w") as out:
                running[name] = (
                    subprocess.Popen(
                        [sys.executable, "-u", __file__, "--child", name],
                        stdin=subprocess.PIPE,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        text=True,
                        env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"},
                    ),
                    log,
                )
        deadline = time.monotonic() + PATIENCE
        for process, log in running.values():
            while process.poll() is None and READY not in log.read_text():
                if time.monotonic() > deadline:
                    process.kill()
                time.sleep(0.1)
        rows: list[dict[str, Any]] = []
        for name, (process, log) in running.items():
            try:
                process.communicate("go\n", timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
            for line in log.read_text().splitlines():
                if line.startswith(RECORD):
                    rows.append(json.loads(line[len(RECORD) :]))
                else:
                    print(line)
            print(f"{name}: exit code {process.wait()}\n", flush=True)
    for row in rows:
        print(f"{row['entry']:<48} {row['microseconds']:9.1f} µs  {row['way']}")
    if a.out:
        record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "times": rows}
        a.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
