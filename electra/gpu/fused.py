"""An encoder block as two operators, forward and backward, for NVIDIA GPUs.

Comes in: the hidden states, the tensors of a `Block` and the keys of its dropout. Goes out: what
`Block.forward` computes, and its gradients. What is between matrix products is a kernel of
`kernels`, and so are products whose rows fit a tile with what is done to them; the others are
cuBLAS's:

    qkv = x Wᵀ + b │ o = attention(qkv) │ a = o Wᵀ + b │ s = x + a, h = LN(s)
    pre = h Wᵀ + b, act = gelu(pre)     │ f = act Wᵀ + b │ s' = h + f, y = LN(s')

The backward pass keeps qkv, o, s, pre and s' of it; the attention probabilities are computed again,
and so are h and act where they would take too much memory (`KEPT`). What dropout leaves of the
probabilities, a and f is drawn again. Attention over more than `LONGEST` tokens is torch's own,
without dropout; only the rest is ours then. To the compiler both are one opaque call each, so that
24 blocks take no longer to compile than one. `Block` itself is the definition: tests hold this file
against it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import EncoderConfig, PretrainConfig
from . import kernels

LONGEST = 128  # tokens: the attention of one head fits on one multiprocessor

DROPOUT = False  # whether recipes with dropout fit: not until it was timed on a GPU

# Bytes of h and act that a network keeps for the backward pass. With batch 128 all layers of
# `small` do, in 0.5 GiB. With batch 1,024 that would be 3.7 GiB, and 13.1 in all: 8 of 12 do, which
# stays below 12 GiB. (With 7 a step took 1.8 % longer than with all.)
KEPT = 10 * 2**28


def unfit(config: PretrainConfig, dtype: torch.dtype, *, padded: bool) -> str | None:
    """What in a recipe these kernels do not support, on any device; None if they fit.

    padded: whether some sequences of the corpus are shorter than others, alone or in shared rows.
    """
    if config.data.sequence_length > LONGEST and padded:
        return f"padding in sequences longer than {LONGEST} tokens"
    is_one = config.objective.kind == "mlm"
    for e in (config.encoder, config.encoder if is_one else config.generator_encoder):
        if e.head_size not in (16, 32, 64):
            return f"attention heads of {e.head_size}"
        if e.hidden_size % 16 or e.hidden_size > 1024:
            return f"hidden states of {e.hidden_size}"
        if e.ffn_size % 8:  # the copy engine takes rows of whole 16 bytes
            return f"feed-forward parts of {e.ffn_size}"
    if dtype != torch.bfloat16:
        return f"{dtype} instead of bfloat16"
    p, p_attention = config.encoder.dropout, config.encoder.attention_dropout
    if (p or p_attention) and not DROPOUT:
        return "dropout"
    if p_attention and config.data.sequence_length > LONGEST:
        return f"attention dropout in sequences longer than {LONGEST} tokens"
    return None


def takes(x: Tensor, mask: Tensor | None) -> bool:
    """Whether `block` supports it: above LONGEST it uses torch's attention, without padding."""
    return x.shape[1] <= LONGEST or mask is None


def kept_layers(config: EncoderConfig, tokens: int) -> int:
    """How many layers keep h and act of so many tokens: the last ones, which need them first."""
    each = 2 * tokens * (config.hidden_size + config.ffn_size)  # bytes in bfloat16
    return min(config.layers, KEPT // each)


# All twelve tensors of a block, in this order, are `weights`:
#   qkv.weight, qkv.bias, out.weight, out.bias, up.weight, up.bias, down.weight, down.bias in the
#   working type, then the gains and biases of both layer norms in float32: attention, feed-forward.
# `keys` (3, B) of `StepRng.keys` and `rates` are those of dropout of a, f and the probabilities; no
#   keys in evaluation.


def _drops(keys: Tensor | None, rates: list[float]) -> kernels.Drops:
    if keys is None:
        return kernels.NOTHING
    return [kernels.Dropout(*drop) if drop[1] else None for drop in zip(keys, rates, strict=True)]


@torch.library.custom_op("electra::block", mutates_args=())
def block(
    x: Tensor,
    mask: Tensor | None,
    weights: list[Tensor],
    keys: Tensor | None,
    rates: list[float],
    heads: int,
    eps: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y (B, T, D), and for the backward pass qkv, o, log Σ exp of the scores (B, H, T), s, h, pre,
    act, s' and statistics (4, B T).

    keep: h and act as well; else they are empty. So is log Σ exp up to `LONGEST` tokens.
    """
    wqkv, bqkv, wo, bo, w1, b1, w2, b2, g1, c1, g2, c2 = weights
    B, T, D = x.shape
    x = x.reshape(B * T, D)
    statistics = g1.new_empty(4, B * T)
    drop_a, drop_f, drop_p = _drops(keys, rates)
    qkv = torch.addmm(bqkv, x, wqkv.t())
    o, lse = _attention(qkv.view(B, T, 3, heads, D // heads), mask, drop_p)
    o = o.view(B * T, D)
    h, s1 = _add_norm(x, o, wo, bo, g1, c1, eps, statistics[:2], drop_a)
    if _fits_tile(h):
        pre, act = kernels.product_gelu(h, w1, b1)
    else:
        pre = torch.addmm(b1, h, w1.t())
        act = kernels.gelu(pre)
    y, s2 = _add_norm(h, act, w2, b2, g2, c2, eps, statistics[2:], drop_f)
    h, act = (h, act) if keep else (x.new_empty(0), x.new_empty(0))
    return y.view(B, T, D), qkv, o, lse, s1, h, pre, act, s2, statistics


def _add_norm(
    h: Tensor,
    x: Tensor,
    w: Tensor,
    b: Tensor,
    g: Tensor,
    c: Tensor,
    eps: float,
    statistics: Tensor,
    drop: kernels.Dropout | None,
) -> tuple[Tensor, Tensor]:
    """LN(s) and s = h + x wᵀ + b, after dropout of the product."""
    if _fits_tile(h):
        y, s, *_ = kernels.product_add_norm(x, w, b, h, g, c, eps, statistics=statistics, drop=drop)
    else:
        a = torch.addmm(b, x, w.t())
        y, s, *_ = kernels.add_norm(h, a, g, c, eps, statistics=statistics, drop=drop)
    return y, s


def _fits_tile(h: Tensor) -> bool:
    """Whole rows are a side of a tile, so that what follows a product can be done in its kernel."""
    return h.shape[1] <= 256 and h.dtype != torch.float32


def _attention(
    qkv: Tensor, mask: Tensor | None, drop: kernels.Dropout | None = None
) -> tuple[Tensor, Tensor]:
    """o (B, T, H K) and log Σ exp of the scores (B, H, T), empty where it is not kept."""
    B, T, _, H, K = qkv.shape
    if T <= LONGEST:
        return kernels.attention(qkv, mask, drop=drop), qkv.new_empty(0, dtype=torch.float32)
    assert mask is None, "torch's attention knows no padding"
    assert drop is None, "torch's attention has draws of its own"
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, K) each
    if _has_flash(qkv):
        o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
    else:
        q, k, v = q.float(), k.float(), v.float()
        score = q @ k.mT / math.sqrt(K)
        lse = score.logsumexp(-1)
        o = ((score - lse[..., None]).exp() @ v).to(qkv.dtype)
    # It lies as (B, T, H, K) where q does: no copy.
    return o.transpose(1, 2).reshape(B, T, H * K), lse


def _attention_backward(
    qkv: Tensor,
    mask: Tensor | None,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    drop: kernels.Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """dqkv (B, T, 3, H, K) and partial sums of its columns, (rows, 3 H K). o, do: (B, T, H K)."""
    B, T, _, H, K = qkv.shape
    if T <= LONGEST:
        return kernels.attention_backward(qkv, mask, do, drop=drop)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, K) each
    o, do = (t.view(B, T, H, K).transpose(1, 2) for t in (o, do))
    if _has_flash(qkv):
        drawn = torch.empty(0, dtype=torch.uint64, device=qkv.device)  # for dropout: not read
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        grads = backward(do, q, k, v, o, lse, None, None, T, T, 0.0, False, drawn, drawn)
    else:
        q, k, v, o, do = (t.float() for t in (q, k, v, o, do))
        p = (q @ k.mT / math.sqrt(K) - lse[..., None]).exp()
        ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True)) / math.sqrt(K)
        grads = [t.to(qkv.dtype) for t in (ds @ k, ds.mT @ q, p.mT @ do)]
    dqkv = torch.stack([g.transpose(1, 2) for g in grads], 2)
    return dqkv, dqkv.view(B * T, -1).sum(0, keepdim=True, dtype=torch.float32)


def _has_flash(x: Tensor) -> bool:
    """False in tests only, where attention is written out."""
    return x.is_cuda and x.dtype != torch.float32


@block.register_fake
def _(x: Tensor, mask: Tensor | None, weights: list[Tensor], *others: Any) -> Any:
    del mask
    *_, heads, _, keep = others
    B, T, D = x.shape
    wide, inner = x.new_empty(B * T, 3 * D), x.new_empty(B * T, weights[4].shape[0])
    one = [x.new_empty(B * T, D) for _ in range(4)]
    statistics = x.new_empty(4, B * T, dtype=torch.float32)
    lse = x.new_empty((B, heads, T) if T > LONGEST else (0,), dtype=torch.float32)
    h, act = (one[2], torch.empty_like(inner)) if keep else (x.new_empty(0), x.new_empty(0))
    return x.new_empty(B, T, D), wide, one[0], lse, one[1], h, inner, act, one[3], statistics


@torch.library.custom_op("electra::block_backward", mutates_args=())
def block_backward(
    dy: Tensor,
    x: Tensor,
    mask: Tensor | None,
    weights: list[Tensor],
    kept: list[Tensor],
    keys: Tensor | None,
    rates: list[float],
    heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, the gradients of the four matrices, and those of all vectors in one, in float32 and
    in the working type; `_backward` takes them apart."""
    wqkv, _, wo, _, w1, _, w2, _, g1, c1, g2, _ = weights
    qkv, o, lse, s1, h, pre, act, s2, statistics = kept
    mean1, rstd1, mean2, rstd2 = statistics
    B, T, D = x.shape
    x, dy = x.reshape(B * T, D), dy.reshape(B * T, D)
    drop_a, drop_f, drop_p = _drops(keys, rates)
    ds2, df, norm2 = kernels.add_norm_backward(dy, None, s2, mean2, rstd2, g2, drop=drop_f)
    again = act.numel() == 0
    if _fits_tile(df) and not again:  # with act to write as well its kernel would be slower
        dpre, inner = kernels.product_gelu_backward(df, w2, pre)
    else:
        dpre, act, inner = kernels.gelu_backward(pre, df @ w2, act=None if again else act)
    dw2 = df.t() @ act
    del act, df  # act is the largest there is: gone before attention's gradients come
    h = torch.empty_like(s1) if again else h
    ds1, da, norm1 = kernels.add_norm_backward(
        dpre @ w1, ds2, s1, mean1, rstd1, g1, again=(c1, h) if again else None, drop=drop_a
    )
    dw1 = dpre.t() @ h
    del dpre
    dwo = da.t() @ o
    packed = qkv.view(B, T, 3, heads, D // heads)
    do = (da @ wo).view(B, T, D)
    dqkv, projected = _attention_backward(packed, mask, o.view(B, T, D), lse, do, drop_p)
    dqkv = dqkv.view(B * T, 3 * D)
    dwqkv = dqkv.t() @ x
    dx = ds1.addmm_(dqkv, wqkv).view(B, T, D)
    return dx, dwqkv, dwo, dw1, dw2, *kernels.column_sums([norm2, norm1, projected, inner], x.dtype)


@block_backward.register_fake
def _(dy: Tensor, x: Tensor, mask: Tensor | None, weights: list[Tensor], *others: Any) -> Any:
    del mask, others
    matrices = [torch.empty_like(w) for w in weights[:8:2]]
    sums = dy.new_empty(9 * x.shape[2] + len(weights[4]), dtype=torch.float32)
    return torch.empty_like(x), *matrices, sums, torch.empty_like(sums, dtype=dy.dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, mask, weights, keys, ctx.rates, ctx.heads, _, _ = inputs
    ctx.many = len(weights)
    ctx.set_materialize_grads(False)  # only y is used by others
    ctx.save_for_backward(x, mask, keys, *weights, *output[1:])


def _backward(ctx: Any, dy: Tensor, *others: Any) -> Any:
    del others
    x, mask, keys, *rest = ctx.saved_tensors
    weights, kept = rest[: ctx.many], rest[ctx.many :]
    dx, wqkv, wo, w1, w2, sums, half = block_backward(
        dy, x, mask, weights, kept, keys, ctx.rates, ctx.heads
    )
    D = x.shape[2]
    parts = (D, D, D, D, D, D, 3 * D, len(w1))
    g2, c2, _, g1, c1, _, _, _ = sums.split(parts)
    _, _, b2, _, _, bo, bqkv, b1 = half.split(parts)
    return dx, None, [wqkv, bqkv, wo, bo, w1, b1, w2, b2, g1, c1, g2, c2], *[None] * 5


block.register_autograd(_backward, setup_context=_keep)


# The same for layers that fit on one multiprocessor: one kernel forward, four backward.


def stays_on_chip(x: Tensor, config: EncoderConfig) -> bool:
    one_head = config.attention_heads == 1 and config.hidden_size == 64 and x.shape[1] <= LONGEST
    return one_head and config.ffn_size % 64 == 0 and x.dtype != torch.float32


@torch.library.custom_op("electra::layer", mutates_args=())
def layer(
    x: Tensor,
    mask: Tensor | None,
    weights: list[Tensor],
    keys: Tensor | None,
    rates: list[float],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y (B, T, D), and for the backward pass o, s, s' and log Σ exp of the scores, (B, T)."""
    return kernels.layer(x.contiguous(), mask, weights, eps, drops=_drops(keys, rates))


@layer.register_fake
def _(x: Tensor, *others: Any) -> Any:
    del others
    return *(x.new_empty(x.shape) for _ in range(4)), x.new_empty(x.shape[:2], dtype=torch.float32)


@torch.library.custom_op("electra::layer_backward", mutates_args=())
def layer_backward(
    dy: Tensor,
    x: Tensor,
    mask: Tensor | None,
    weights: list[Tensor],
    kept: list[Tensor],
    keys: Tensor | None,
    rates: list[float],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and the gradients of all weights in one, in float32 and in the working type."""
    dy, x, drops = dy.contiguous(), x.contiguous(), _drops(keys, rates)
    return kernels.layer_backward(dy, x, mask, weights, kept, eps, drops=drops)


@layer_backward.register_fake
def _(dy: Tensor, x: Tensor, mask: Tensor | None, weights: list[Tensor], *others: Any) -> Any:
    del mask, others
    sums = dy.new_empty(sum(w.numel() for w in weights), dtype=torch.float32)
    return x.new_empty(x.shape), sums, torch.empty_like(sums, dtype=dy.dtype)


def _keep_layer(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, mask, weights, keys, ctx.rates, ctx.eps = inputs
    ctx.many = len(weights)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, mask, keys, *weights, *output[1:])


def _layer_backward(ctx: Any, dy: Tensor, *others: Any) -> Any:
    del others
    x, mask, keys, *rest = ctx.saved_tensors
    weights, kept = rest[: ctx.many], rest[ctx.many :]
    dx, sums, half = layer_backward(dy, x, mask, weights, kept, keys, ctx.rates, ctx.eps)
    sizes = [w.numel() for w in weights]
    parts = [*half.split(sizes)[:8], *sums.split(sizes)[8:]]
    return dx, None, [g.view_as(w) for g, w in zip(parts, weights, strict=True)], *[None] * 3


layer.register_autograd(_layer_backward, setup_context=_keep_layer)


@torch.library.custom_op("electra::guess", mutates_args=())
def guess(
    e: Tensor, table: Tensor, bias: Tensor, original: Tensor, u: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the generator's head says of N masked tokens, in one pass over the N x V logits.

    e: (N, E) what the head makes of the states. table: (V, E) and bias: (V,) float32. original,
    u: (N,). −log p_G(original), x̂ ~ p_G by u, the likeliest token; log Σ exp and logits are kept.
    """
    logits = torch.addmm(_aligned(bias, e.dtype), e, _aligned(table, e.dtype).t())  # (N, W)
    nll, x_hat, best, lse = kernels.cross_entropy_and_sample(logits, original, u, len(table))
    return nll, x_hat, best, lse, logits


@guess.register_fake
def _(e: Tensor, table: Tensor, bias: Tensor, original: Tensor, u: Tensor) -> Any:
    del bias
    nll, lse = torch.empty_like(u), torch.empty_like(u)
    x_hat, best = torch.empty_like(original), torch.empty_like(original)
    return nll, x_hat, best, lse, e.new_empty(len(e), _width(len(table)))


@torch.library.custom_op("electra::guess_backward", mutates_args=())
def guess_backward(
    dnll: Tensor, e: Tensor, table: Tensor, original: Tensor, lse: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    V = len(table)
    dlogits, dbias = kernels.cross_entropy_backward(logits, original, lse, dnll, V)
    dtable = (dlogits.t() @ e)[:V].to(table.dtype)
    return dlogits @ _aligned(table, e.dtype), dtable, dbias


@guess_backward.register_fake
def _(dnll: Tensor, e: Tensor, table: Tensor, original: Tensor, lse: Tensor, logits: Tensor) -> Any:
    del dnll, original, lse, logits
    return torch.empty_like(e), torch.empty_like(table), table.new_empty(len(table))


def _width(vocab_size: int) -> int:
    """Columns of logits: rows that begin at multiples of 128 bytes are read and written fast."""
    return -(-vocab_size // 64) * 64


def _aligned(values: Tensor, dtype: torch.dtype) -> Tensor:
    """In the working type, with rows of zeros up to the width of the logits."""
    out = values.new_zeros(_width(len(values)), *values.shape[1:], dtype=dtype)
    out[: len(values)] = values
    return out


def _keep_guess(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    e, table, _, original, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(e, table, original, *output[3:])


def _guess_backward(ctx: Any, dnll: Tensor, *_: Any) -> Any:
    de, dtable, dbias = guess_backward(dnll.contiguous(), *ctx.saved_tensors)
    return de, dtable, dbias, None, None


guess.register_autograd(_guess_backward, setup_context=_keep_guess)


# In deterministic mode the compiler leaves the gradient of a look-up to a kernel of torch that adds
# the rows of a token one by one, and [MASK] has thousands.


@torch.library.custom_op("electra::look_up", mutates_args=())
def look_up(ids: Tensor, table: Tensor) -> Tensor:
    """Rows (..., E) of a table (V, E); their gradients are added up in a fixed order."""
    return F.embedding(ids, table)


@look_up.register_fake
def _(ids: Tensor, table: Tensor) -> Tensor:
    return table.new_empty(*ids.shape, table.shape[1])


@torch.library.custom_op("electra::look_up_backward", mutates_args=())
def look_up_backward(dy: Tensor, ids: Tensor, rows: int) -> Tensor:
    return kernels.table_gradient(dy.reshape(-1, dy.shape[-1]), ids.reshape(-1), rows)


@look_up_backward.register_fake
def _(dy: Tensor, ids: Tensor, rows: int) -> Tensor:
    del ids
    return dy.new_empty(rows, dy.shape[-1])


def _keep_ids(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ids, table = inputs
    ctx.rows = len(table)
    ctx.save_for_backward(ids)


def _look_up_backward(ctx: Any, dy: Tensor) -> Any:
    (ids,) = ctx.saved_tensors
    return None, look_up_backward(dy.contiguous(), ids.contiguous(), ctx.rows)


look_up.register_autograd(_look_up_backward, setup_context=_keep_ids)
