"""The Transformer encoder of the paper, its two heads, and how they are initialised.

One class serves as generator, discriminator and BERT baseline: post-norm blocks, exact GELU,
learned positions, factorised embeddings with a projection when their width differs from the hidden
size, no pooler (appendix A; model details from the released code). Shapes use the legend of
`corruption.py`: B sequences · T tokens · M masked slots · V vocabulary · D hidden · E embedding ·
F feed-forward · H heads · K head size.

Parameters are float32 or, for the linear layers of a bf16 run, bfloat16 working copies that the
optimizer refreshes from float32 (`optim.py`); layer norms, softmaxes and losses are float32 always.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import EncoderConfig, room_for_neighbours
from .gpu import fused
from .randomness import SeededDropout, StepRng
from .runtime import whole_vectors

Rng = StepRng | SeededDropout

NEVER = -1e30  # a score of what is not attended to


class Encoder(nn.Module):
    """x ↦ h(x) = [h_1, …, h_n]: token ids (B, T) to hidden states (B, T, D)."""

    def __init__(self, config: EncoderConfig, embeddings: Embeddings, *, site: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embeddings = embeddings
        E, D = config.embedding_size, config.hidden_size
        self.project = nn.Linear(E, D) if E != D else None
        self.blocks = nn.ModuleList(
            Block(config, site=site + 3 * i + 1, layer=i) for i in range(config.layers)
        )
        self.site = site  # first dropout key; every dropout in the encoder has its own
        self.narrow: torch.dtype | None = None  # set from outside: FSDP2 keeps float32 weights

    @property
    def working_dtype(self) -> torch.dtype:
        """The type the linear layers compute in."""
        first = self.blocks[0]
        assert isinstance(first, Block)
        return self.narrow or first.up.weight.dtype

    def forward(
        self,
        x: Tensor,
        segment: Tensor,
        mask: Tensor | None,
        rng: Rng | None,
        *,
        position: Tensor | None = None,
        only_first: bool = False,
    ) -> Tensor:
        """Hidden states (B, T, D).

        x, segment: (B, T). mask: (B, T) bool, true on tokens, or None when nothing is padded;
        (B, T) int32, where tokens see those of the same number; (B, T, T) bool, where each token
        sees others. position: (B, T), if it does not simply count the T tokens.
        rng: draws dropout when given; None means evaluation. only_first: return the state of
        [CLS] alone, (B, 1, D), and let the last block compute no other.
        """
        h = self.embeddings(x, segment, position)  # (B, T, E)
        h = dropout(h, self.config.dropout, rng, self.site)
        h = h.to(self.working_dtype)
        if self.project is not None:
            h = self.project(h)  # (B, T, D)
        if mask is not None:
            ours = self.blocks[0].fused and fused.takes(h, mask)
            if mask.dtype != torch.bool and not ours:
                mask = mask[:, :, None] == mask[:, None]
            mask = mask[:, None] if mask.dim() == 3 else mask[:, None, None]
        c = self.config
        keys: list[Tensor | None] = [None] * c.layers
        if self.blocks[0].fused and isinstance(rng, StepRng) and (c.dropout or c.attention_dropout):
            # All at once: one Philox to compile, not one for each block.
            keys = [*rng.keys(self.site + 1, 3 * c.layers).view(c.layers, 3, -1)]
        for i, block in enumerate(self.blocks[:-1]):
            h = block(h, mask, rng, keys=keys[i])
        return self.blocks[-1](h, mask, rng, 1 if only_first else None, keys[-1])


def _lookup(rows: int, size: int) -> nn.Embedding:
    """nn.Embedding(rows, size), without its random draw on the meta device (used when a model is
    read): there the draw would import torch's compiler, as slow as importing torch itself."""
    weight = torch.empty(rows, size)
    if not weight.is_meta:
        nn.init.normal_(weight)
    return nn.Embedding.from_pretrained(weight, freeze=False)


class Embeddings(nn.Module):
    """Word + position + segment embeddings, normalised, at embedding size. The shareable block.

    With `base` the tables hold what is added to those of another block, which get no gradient
    from here (gradient-disentangled sharing).
    """

    def __init__(
        self, config: EncoderConfig, vocab_size: int, base: Embeddings | None = None
    ) -> None:
        super().__init__()
        self._base = (base,)  # a tuple hides it: its parameters belong to the other block
        self.in_order = False  # set from outside: gradients of look-ups by the kernels of `fused`
        E = config.embedding_size
        self.word = _lookup(vocab_size, E)
        self.position = _lookup(config.max_positions, E)
        self.segment = _lookup(2, E)
        self.norm = LayerNorm(E, config.layer_norm_eps)

    @property
    def base(self) -> Embeddings | None:
        return self._base[0]

    def table(self, name: Literal["word", "position", "segment"]) -> Tensor:
        """The table as it is looked up."""
        own: Tensor = getattr(self, name).weight
        return own if self.base is None else own + getattr(self.base, name).weight.detach()

    def forward(self, x: Tensor, segment: Tensor, position: Tensor | None = None) -> Tensor:
        word = fused.look_up(x, self.word.weight) if self.in_order else self.word(x)
        if self.base is not None:  # two look-ups instead of a sum of two tables
            word = word + F.embedding(x, self.base.word.weight.detach())
        table, look_up = self.table("position"), fused.look_up if self.in_order else F.embedding
        place = table[: x.shape[1]] if position is None else look_up(position, table)
        # torch.where, no look-up: in the gradient of two rows all additions would queue up.
        first, second = self.table("segment")
        kind = torch.where(segment[..., None] == 0, first, second)  # (B, T, E)
        return self.norm(word + place + kind)  # (B, T, E)


class Block(nn.Module):
    """h ← LN(h + Attention(h)); h ← LN(h + FFN(h))."""

    def __init__(self, config: EncoderConfig, *, site: int, layer: int = 0) -> None:
        super().__init__()
        self.config, self.site, self.layer = config, site, layer
        self.fused = False  # set from outside: compute by the kernels of `fused`
        D, F_ = config.hidden_size, config.ffn_size
        self.qkv = nn.Linear(D, 3 * D)  # rows: queries, keys, values
        self.out = nn.Linear(D, D)
        self.attention_norm = LayerNorm(D, config.layer_norm_eps)
        self.up = nn.Linear(D, F_)
        self.down = nn.Linear(F_, D)
        self.ffn_norm = LayerNorm(D, config.layer_norm_eps)

    def forward(
        self,
        h: Tensor,
        mask: Tensor | None,
        rng: Rng | None,
        only: int | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """(B, T, D), or the first `only` of the T states; mask: (B, 1, 1 or T, T), as Encoder's.

        keys: (3, B) of `rng` for the three sites of dropout, where own kernels draw them.
        """
        c = self.config
        alike = mask is None or mask.shape[2] == 1  # every query sees the same keys
        if self.fused and only is None and alike and fused.takes(h, mask):
            mask = None if mask is None else mask[:, 0, 0]  # (B, T)
            rates = [c.dropout, c.dropout, c.attention_dropout]
            assert keys is not None or rng is None or not any(rates), "dropout without its keys"
            same = h, mask, self.tensors(), keys, rates
            if fused.stays_on_chip(h, c):
                return fused.layer(*same, c.layer_norm_eps)[0]
            kept = fused.kept_layers(c, h.shape[0] * h.shape[1])
            keep = self.layer >= c.layers - kept
            return fused.block(*same, c.attention_heads, c.layer_norm_eps, keep)[0]
        a = self.out(self.attend(h, mask, rng, only))  # (B, T, D)
        h = self.attention_norm(h[:, :only] + dropout(a, c.dropout, rng, self.site))
        f = self.down(F.gelu(self.up(h)))  # (B, T, F) inside
        return self.ffn_norm(h + dropout(f, c.dropout, rng, self.site + 1))

    def tensors(self) -> list[Tensor]:
        """All weights, in the order in which `fused` takes them."""
        linears = (self.qkv, self.out, self.up, self.down)
        norms = (self.attention_norm, self.ffn_norm)
        return [t for part in (*linears, *norms) for t in (part.weight, part.bias)]

    def attend(
        self, h: Tensor, mask: Tensor | None, rng: Rng | None, only: int | None = None
    ) -> Tensor:
        """softmax(q kᵀ / √K) v over all heads, (B, T, D)."""
        B, T, D = h.shape
        H, K = self.config.attention_heads, self.config.head_size
        if only is None:
            q, k, v = self.qkv(h).view(B, T, 3, H, K).permute(2, 0, 3, 1, 4)  # 3 x (B, H, T, K)
        else:
            weight, bias = self.qkv.weight, self.qkv.bias
            q = F.linear(h[:, :only], weight[:D], bias[:D]).view(B, only, H, K).transpose(1, 2)
            k, v = F.linear(h, weight[D:], bias[D:]).view(B, T, 2, H, K).permute(2, 0, 3, 1, 4)
        p = self.config.attention_dropout if rng is not None else 0.0
        # torch's attention draws dropout from a state of its own; and where oneDNN multiplies, its
        # small products take up to five times as long as whole ones.
        written_out = p > 0 and not (h.is_cuda and isinstance(rng, SeededDropout))
        if h.device.type == "cpu" and q.dtype == torch.float32 and T <= 512:
            written_out |= whole_vectors.active
        if not written_out:
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        else:
            score = wide((q / math.sqrt(K)) @ k.mT)  # (B, H, T, T)
            if mask is not None:
                score = score + score.new_zeros(mask.shape).masked_fill_(~mask, NEVER)
            probability = dropout(score.softmax(-1), p, rng, self.site + 2)
            a = probability.to(v.dtype) @ v  # (B, H, T, K)
        return a.transpose(1, 2).reshape(B, -1, D)


class TwoTowers(nn.Module):
    """p(x_t | all other tokens) for every t at once: Electric's generator.

    One encoder reads from the left, one from the right, and what is said about t comes from the
    first at t − 1 and the second at t + 1, so that x_t itself is never seen.
    """

    def __init__(self, config: EncoderConfig, embeddings: Embeddings, *, site: int = 0) -> None:
        super().__init__()
        self.config = config
        self.left = Encoder(config, embeddings, site=site)
        self.right = Encoder(config, embeddings, site=site + 3 * config.layers + 1)

    @property
    def embeddings(self) -> Embeddings:
        return self.left.embeddings

    def forward(self, x: Tensor, segment: Tensor, mask: Tensor | None, rng: Rng | None) -> Tensor:
        """(B, T, 2 D)."""
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        seen = seen.expand(len(x), -1, -1)
        left, right = seen, seen.mT  # (B, T, T)
        if mask is not None:  # a padded place sees itself, so that no row is empty
            own = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
            left, right = (s & (mask[:, None] | own) for s in (left, right))
        before = self.left(x, segment, left, rng)  # (B, T, D)
        after = self.right(x, segment, right, rng)
        if mask is not None:  # behind the last token is nothing, padded or not
            after = after * mask[:, :, None]
        before, after = F.pad(before[:, :-1], (0, 0, 1, 0)), F.pad(after[:, 1:], (0, 0, 0, 1))
        return torch.cat([before, after], 2)


class LayerNorm(nn.Module):
    """Layer normalisation over the last axis, computed in float32, returned in the input's type."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, h: Tensor) -> Tensor:
        normed = F.layer_norm(wide(h), self.weight.shape, self.weight, self.bias, self.eps)
        return normed.to(h.dtype)


class GeneratorHead(nn.Module):
    """p_G(x_t | x) = softmax over e(x')ᵀ h_G(x)_t, with the token embeddings e as output table."""

    def __init__(self, config: EncoderConfig, vocab_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)
        self.norm = LayerNorm(config.embedding_size, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, h: Tensor, table: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D); table (V, E) holds the token embeddings."""
        e = self.words(h)
        return F.linear(e, table.to(e.dtype), self.bias.to(e.dtype))

    def words(self, h: Tensor) -> Tensor:
        """Hidden states (..., D) in the space of the token embeddings, (..., E)."""
        return self.norm(F.gelu(self.dense(h)))


class DiscriminatorHead(nn.Module):
    """Logits of P(replaced) = 1 − D(x, t) for every token; D(x, t) = sigmoid(wᵀ h_D(x)_t).

    Positive means *replaced*, as in the released code and in transformers; the paper's D is the
    probability of *original*.
    """

    def __init__(self, config: EncoderConfig, kind: Literal["dense", "linear"]) -> None:
        super().__init__()
        D = config.hidden_size
        self.dense = nn.Linear(D, D) if kind == "dense" else None
        self.w = nn.Linear(D, 1)

    def forward(self, h: Tensor) -> Tensor:
        """(B, T, D) -> (B, T) float32."""
        if self.dense is not None:
            h = F.gelu(self.dense(h))
        return wide(self.w(h).squeeze(-1))


def wide(h: Tensor) -> Tensor:
    """bfloat16 as float32; float32, and the float64 of the tests, as they are."""
    return h.float() if h.dtype == torch.bfloat16 else h


def dropout(h: Tensor, p: float, rng: Rng | None, site: int) -> Tensor:
    """Dropout in training (rng given), the identity in evaluation."""
    return h if rng is None or p == 0 else rng.dropout(h, p, site)


@torch.no_grad()
def initialise(module: nn.Module, init: Literal["paper", "local"], seed: int) -> None:
    """Draw all weights of `module`, in the order of its parameters, from one seed.

    | tensors                                          | start                                 |
    |--------------------------------------------------|---------------------------------------|
    | embeddings, linear layers of blocks and heads    | truncated normal, std 0.02            |
    | embedding projection, the discriminator's last w | Glorot uniform                        |
    | biases / layer-norm gains                        | 0 / 1                                 |

    That is the released code (transformers uses a plain normal of 0.02 everywhere). `local` adds
    what `_look_at_neighbours` says.
    """
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        value = torch.empty(parameter.shape)
        if name.endswith("bias"):
            value.zero_()
        elif "norm" in name:
            value.fill_(1.0)
        elif name.endswith(("project.weight", ".w.weight")):
            nn.init.xavier_uniform_(value, generator=draw)
        else:
            _truncated_normal(value, 0.02, draw)
        parameter.copy_(value)
    if init == "local":
        encoders = [part for part in module.modules() if isinstance(part, Encoder)]
        P = min(FREQUENCIES, room_for_neighbours(encoder.config for encoder in encoders))
        for encoder in encoders:
            _look_at_neighbours(encoder, P, draw)
    for part in module.modules():
        if isinstance(part, Embeddings) and part.base is not None:
            for difference in (part.word, part.position, part.segment):
                difference.weight.zero_()


NEIGHBOURS = (-1, 1, -2, 2)  # one offset per head, over as many of the first blocks as it takes
FREQUENCIES = 16  # of the positions' sines and cosines, at most
LOGIT = 8.0  # attention logit of the neighbour above that of other places


def _look_at_neighbours(encoder: Encoder, P: int, draw: torch.Generator) -> None:
    """Let the first heads attend to the tokens beside their own, instead of to all tokens alike.

    A masked position knows nothing but its place, so a generator stays at the frequencies of
    single tokens until attention has found the neighbours; that takes thousands of steps. Here the
    first C = 2 P channels start as sines and cosines of the position, free of word embeddings.
    Keys read them as they are, queries turned by f δ for each frequency f, so that place s seen
    from t scores Σ_f cos(f (t + δ − s)), highest at t + δ. The values of these heads start at full
    size, so that what they find is seen above. The architecture is the paper's; only the start of
    training differs.
    """
    c = encoder.config
    E, D, H, K = c.embedding_size, c.hidden_size, c.attention_heads, c.head_size
    C = 2 * P
    # Multiples of the golden ratio spread over (0, π) without a common period.
    f = math.pi * ((torch.arange(P) + 1) * 0.6180339887 % 1)
    angle = torch.arange(c.max_positions)[:, None] * f  # (max_positions, P)
    position = encoder.embeddings.position.weight
    position.zero_()
    position[:, :C] = (0.02 * math.sqrt(2) * torch.cat([angle.sin(), angle.cos()], 1)).to(position)
    encoder.embeddings.word.weight[:, :C] = 0
    if encoder.project is not None:  # keeps the position channels apart
        project = torch.zeros(D, E)
        project[:C, :C] = torch.eye(C)
        _truncated_normal(project[C:, C:], (E - C) ** -0.5, draw)
        encoder.project.weight.copy_(project)

    scale = math.sqrt(LOGIT * math.sqrt(K) / C)
    blocks = encoder.blocks[: -(-len(NEIGHBOURS) // H)]
    for number, block in enumerate(blocks):
        assert isinstance(block, Block)
        qkv, out = torch.zeros(3, H, K, D), torch.zeros(D, D)
        for head in range(H):
            turn = f * NEIGHBOURS[(number * H + head) % len(NEIGHBOURS)]
            cos, sin = turn.cos().diag(), turn.sin().diag()
            qkv[0, head, :C, :C] = scale * torch.cat(
                [torch.cat([cos, sin], 1), torch.cat([-sin, cos], 1)]
            )
            qkv[1, head, :C, :C] = scale * torch.eye(C)
        _truncated_normal(qkv[2, :, :, C:], (D - C) ** -0.5, draw)
        _truncated_normal(out[C:], D**-0.5, draw)
        block.qkv.weight.copy_(qkv.view(3 * D, D))
        block.out.weight.copy_(out)


def _truncated_normal(value: Tensor, std: float, draw: torch.Generator) -> None:
    """Normal, cut at two standard deviations."""
    nn.init.trunc_normal_(value, std=std, a=-2 * std, b=2 * std, generator=draw)
