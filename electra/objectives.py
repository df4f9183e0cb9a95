"""The paper's objectives; each is a short class whose difference to its neighbour is visible.

| paper                               | class                  | what is trained             |
|-------------------------------------|------------------------|-----------------------------|
| section 2, replaced token detection | ReplacedTokenDetection | generator by MLM, and       |
|                                     |                        | discriminator on its output |
| section 3.3, BERT baseline          | MaskedLM               | one encoder by MLM          |

Sign convention, stated once: the paper's D(x, t) is the probability that a token is *original*.
Here d is the logit of *replaced*, as in the released code and in transformers: D = 1 − σ(d).

Losses are means over the *global* batch: a micro-batch divides by the counts of the whole step
(`Batch.masked`, `Batch.tokens`), so gradients of micro-batches and processes simply add up.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import PretrainConfig
from .corruption import (
    Positions,
    choose_positions,
    mask_tokens,
    proposal_logits,
    replace,
    resolve_duplicates,
    sample,
)
from .encoder import DiscriminatorHead, Embeddings, Encoder, GeneratorHead, initialise, wide
from .randomness import Purpose, StepRng

DISCRIMINATOR_SITES = 1000  # dropout keys of the discriminator begin here


class Batch(NamedTuple):
    """Sequences of one micro-batch and the counts of the global batch they belong to."""

    x: Tensor  # (B, T) int64, padded
    segment: Tensor  # (B, T) int64, 0 or 1
    length: Tensor  # (B,) int64
    tokens: Tensor  # () float32, tokens of the global batch
    masked: Tensor  # () float32, masked positions of the global batch


class Losses(NamedTuple):
    """Terms of the loss, each its share of the mean over the global batch, and what happened."""

    total: Tensor  # ()
    mlm: Tensor  # () L_MLM
    disc: Tensor  # () L_Disc, zero where there is no discriminator
    mlm_correct: Tensor  # () masked positions the generator's best guess gets right
    replaced: Tensor  # () tokens that differ from the original
    disc_correct: Tensor  # () tokens the discriminator classifies correctly


class Predictions(NamedTuple):
    """Everything an evaluation wants to look at, position by position."""

    m: Positions
    x_masked: Tensor  # (B, T)
    mlm_logits: Tensor  # (B, M, V)
    x_corrupt: Tensor  # (B, T)
    d: Tensor | None  # (B, T) logits of replaced


class SpecialIds(NamedTuple):
    """Token ids with a meaning of their own."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


class Objective(nn.Module):
    """Base of all objectives: the networks, and forward(batch, rng) -> Losses."""

    def __init__(
        self, config: PretrainConfig, vocab_size: int, special: SpecialIds, *, padded: bool
    ) -> None:
        super().__init__()
        self.config, self.vocab_size, self.special = config, vocab_size, special
        self.padded = padded  # false: sequences in training are full, attention needs no mask

    @abstractmethod
    def predict(self, batch: Batch, rng: StepRng, *, training: bool) -> Predictions:
        """Corrupt the batch and run the networks on it."""

    @abstractmethod
    def forward(self, batch: Batch, rng: StepRng) -> Losses:
        """The losses of a training step."""

    @property
    @abstractmethod
    def encoder(self) -> Encoder:
        """The encoder that is kept after pre-training."""

    # The steps of the method, named as in the paper.

    def choose(self, batch: Batch, rng: StepRng) -> Positions:
        """m, uniform over all tokens but [PAD], [CLS], [SEP] and [MASK]."""
        x, s = batch.x, self.special
        candidates = (x != s.pad) & (x != s.cls) & (x != s.sep) & (x != s.mask)
        candidates &= self.attention_mask(batch)
        config = self.config
        return choose_positions(
            candidates, batch.length, config.masked_slots, config.objective, rng
        )

    def attention_mask(self, batch: Batch) -> Tensor:
        """(B, T) bool, true on tokens."""
        return torch.arange(batch.x.shape[1], device=batch.x.device) < batch.length[:, None]

    def encode(
        self, encoder: Encoder, x: Tensor, batch: Batch, rng: StepRng, *, training: bool
    ) -> Tensor:
        mask = self.attention_mask(batch) if self.padded or not training else None
        return encoder(x, batch.segment, mask, rng if training else None)

    def mlm_logits(
        self,
        encoder: Encoder,
        head: GeneratorHead,
        x_masked: Tensor,
        m: Positions,
        batch: Batch,
        rng: StepRng,
        *,
        training: bool,
    ) -> Tensor:
        """Logits of p_G(x_i | x_masked) at the masked positions only, (B, M, V)."""
        h = self.encode(encoder, x_masked, batch, rng, training=training)  # (B, T, D)
        h = h.gather(1, m.at[:, :, None].expand(-1, -1, h.shape[2]))  # (B, M, D)
        return head(h.flatten(0, 1), encoder.embeddings.word.weight).unflatten(0, m.at.shape)

    def mlm_loss(self, logits: Tensor, m: Positions, batch: Batch) -> tuple[Tensor, Tensor]:
        """L_MLM = E(Σ_{i in m} −log p_G(x_i | x_masked)), and how many guesses are right."""
        original = batch.x.gather(1, m.at)  # (B, M)
        nll = F.cross_entropy(wide(logits).flatten(0, 1), original.flatten(), reduction="none")
        loss = (nll * m.valid.flatten()).sum() / batch.masked.clamp(min=1)
        correct = ((logits.argmax(-1) == original) & m.valid).sum()
        return loss, correct


class ReplacedTokenDetection(Objective):
    """min  L_MLM(x, θ_G) + λ · L_Disc(x, θ_D)          (paper, section 2)"""

    def __init__(
        self, config: PretrainConfig, vocab_size: int, special: SpecialIds, *, padded: bool = True
    ) -> None:
        super().__init__(config, vocab_size, special, padded=padded)
        d, g = config.encoder, config.generator_encoder
        embeddings = Embeddings(d, vocab_size)
        self.discriminator = Encoder(d, embeddings, site=DISCRIMINATOR_SITES)
        if config.generator.sharing == "all":
            self.generator = self.discriminator
        else:
            shared = config.generator.sharing == "embeddings"
            self.generator = Encoder(g, embeddings if shared else Embeddings(g, vocab_size))
        self.discriminator_head = DiscriminatorHead(d, config.objective.disc_head)
        self.generator_head = GeneratorHead(g, vocab_size)

    @property
    def encoder(self) -> Encoder:
        return self.discriminator

    def predict(self, batch: Batch, rng: StepRng, *, training: bool = False) -> Predictions:
        c, x = self.config, batch.x
        m = self.choose(batch, rng)  # (B, M)     m_i ~ unif{1, n}
        x_masked = mask_tokens(x, m, self.special.mask, self.vocab_size, c.objective, rng)  # (B, T)
        g = self.mlm_logits(
            self.generator, self.generator_head, x_masked, m, batch, rng, training=training
        )  # (B, M, V)  logits of p_G(x_i | x_masked)
        x_corrupt = replace(x, m, self.sample(g, m, batch, rng))  # (B, T)
        h = self.encode(self.discriminator, x_corrupt, batch, rng, training=training)  # (B, T, D)
        d = self.discriminator_head(h)  # (B, T)     σ(d) = P(replaced) = 1 − D(x_corrupt, t)
        return Predictions(m, x_masked, g, x_corrupt, d)

    @torch.no_grad()
    def sample(self, g: Tensor, m: Positions, batch: Batch, rng: StepRng) -> Tensor:
        """x̂_i ~ p_G(x_i | x_masked), (B, M); no gradient flows through it."""
        c = self.config.generator
        original = batch.x.gather(1, m.at)
        logits = proposal_logits(g, original, c.temperature, c.disallow_correct)
        u = rng.uniform(Purpose.SAMPLE, m.at.shape[1])  # (B, M)
        x_hat = sample(logits.flatten(0, 1), u.flatten()).view_as(m.at)
        return resolve_duplicates(m, x_hat, self.config.objective)

    def forward(self, batch: Batch, rng: StepRng) -> Losses:
        c = self.config.objective
        p = self.predict(batch, rng, training=True)
        assert p.d is not None
        mlm, mlm_correct = self.mlm_loss(p.mlm_logits, p.m, batch)
        is_token = self.attention_mask(batch)
        replaced = p.x_corrupt != batch.x  # (B, T)     a lucky guess counts as original
        bce = F.binary_cross_entropy_with_logits(p.d, replaced.to(p.d.dtype), reduction="none")
        disc = (bce * is_token).sum() / batch.tokens.clamp(min=1)
        return Losses(
            total=c.gen_weight * mlm + c.disc_weight * disc,
            mlm=mlm.detach(),
            disc=disc.detach(),
            mlm_correct=mlm_correct,
            replaced=replaced.sum(),
            disc_correct=(((p.d > 0) == replaced) & is_token).sum(),
        )


class MaskedLM(Objective):
    """min  L_MLM(x, θ)          one encoder, the BERT baseline (paper, sections 3.3 and 3.4)"""

    def __init__(
        self, config: PretrainConfig, vocab_size: int, special: SpecialIds, *, padded: bool = True
    ) -> None:
        super().__init__(config, vocab_size, special, padded=padded)
        self.generator = Encoder(config.encoder, Embeddings(config.encoder, vocab_size))
        self.generator_head = GeneratorHead(config.encoder, vocab_size)

    @property
    def encoder(self) -> Encoder:
        return self.generator

    def predict(self, batch: Batch, rng: StepRng, *, training: bool = False) -> Predictions:
        c, x = self.config, batch.x
        m = self.choose(batch, rng)  # (B, M)
        x_masked = mask_tokens(x, m, self.special.mask, self.vocab_size, c.objective, rng)  # (B, T)
        logits = self.mlm_logits(
            self.generator, self.generator_head, x_masked, m, batch, rng, training=training
        )  # (B, M, V)
        return Predictions(m, x_masked, logits, x, None)

    def forward(self, batch: Batch, rng: StepRng) -> Losses:
        p = self.predict(batch, rng, training=True)
        mlm, mlm_correct = self.mlm_loss(p.mlm_logits, p.m, batch)
        zero = torch.zeros_like(mlm.detach())
        total = self.config.objective.gen_weight * mlm
        return Losses(total, mlm.detach(), zero, mlm_correct, zero.long(), zero.long())


def build_objective(
    config: PretrainConfig, vocab_size: int, special: SpecialIds, *, padded: bool = True
) -> Objective:
    """The objective that `config.objective.kind` names, initialised from the run's seed."""
    kinds: dict[str, type[ReplacedTokenDetection | MaskedLM]] = {
        "rtd": ReplacedTokenDetection,
        "mlm": MaskedLM,
    }
    objective = kinds[config.objective.kind](config, vocab_size, special, padded=padded)
    initialise(objective, config.encoder.init, config.run.seed)
    return objective
