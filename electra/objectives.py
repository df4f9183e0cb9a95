"""The paper's objectives; each is a short class whose difference to its neighbour is visible.

| paper                                 | class                  | what the kept encoder learns    |
|---------------------------------------|------------------------|---------------------------------|
| section 2, replaced token detection   | ReplacedTokenDetection | every token: original or not    |
| 3.5, ELECTRA 15 %, and its control    | the same               | the masked, or 15 % other, ones |
| 3.5, Replace MLM                      | ReplaceMLM             | masked tokens from x_corrupt    |
| 3.5, All-Tokens MLM                   | AllTokensMLM           | every token, or to copy it      |
| 3.3, BERT baseline                    | MaskedLM               | masked tokens from x_masked     |
| 3.2 and appendix F, adversarial       | Adversarial            | as RTD; the generator differs   |
| Electric (Clark et al. 2020b)         | Electric               | an energy for every token       |

Sign convention, stated once: the paper's D(x, t) is the probability that a token is *original*.
Here d is the logit of *replaced*, as in the released code and in transformers: D = 1 − σ(d).

Losses are means over the *global* batch: a micro-batch divides by the counts of the whole step
(`Batch.masked`, `Batch.tokens`), so gradients of micro-batches and processes simply add up.
"""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from typing import Literal, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .config import PretrainConfig
from .corruption import (
    Positions,
    choose_positions,
    lay_out,
    mask_tokens,
    proposal_logits,
    replace,
    resolve_duplicates,
    sample,
)
from .encoder import (
    DiscriminatorHead,
    Embeddings,
    Encoder,
    GeneratorHead,
    TwoTowers,
    initialise,
    wide,
)
from .gpu import fused
from .randomness import Purpose, StepRng

DISCRIMINATOR_SITES = 1000  # dropout keys of the discriminator begin here
POSITIONS_AT_ONCE = 4096  # whose vocabulary logits are held at a time, in losses over all


class Batch(NamedTuple):
    """Sequences of one micro-batch and the counts of the global batch they belong to."""

    x: Tensor  # (B, T) int64, padded
    segment: Tensor  # (B, T) int64, 0 or 1
    length: Tensor  # (B,) int64
    tokens: Tensor  # () float32, tokens of the global batch
    masked: Tensor  # () float32, masked positions of the global batch
    parts: Tensor | None = None  # (B, P) int64, lengths of the examples that share a sequence
    disc_share: Tensor | None = None  # () float32, of λ, where the generator has a head start


class Losses(NamedTuple):
    """Terms of the loss, each its share of the mean over the global batch, and what happened."""

    total: Tensor  # ()
    mlm: Tensor  # () L_MLM
    disc: Tensor  # () L_Disc, or what stands in its place; zero where there is but one network
    mlm_correct: Tensor  # () masked positions the generator's best guess gets right
    replaced: Tensor  # () tokens that differ from the original
    disc_correct: Tensor  # () positions of L_Disc that are answered correctly
    scored: Tensor  # () positions of L_Disc


class Predictions(NamedTuple):
    """Everything an evaluation wants to look at, position by position."""

    m: Positions
    x_masked: Tensor  # (B, T)
    mlm_logits: Tensor  # (B, M, V)
    x_corrupt: Tensor  # (B, T)
    d: Tensor | None = None  # (B, T) logits of replaced
    replaced: Tensor | None = None  # (B, T) bool, what d is to tell


class SpecialIds(NamedTuple):
    """Token ids with a meaning of their own."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int


class Objective(nn.Module):
    """Base of all objectives: the networks, and forward(batch, rng) -> Losses.

    stage: joint trains all networks; generator or discriminator trains that network alone.
    """

    stage: Literal["joint", "generator", "discriminator"] = "joint"

    def __init__(
        self,
        config: PretrainConfig,
        vocab_size: int,
        special: SpecialIds,
        *,
        padded: bool = True,
        frequencies: Tensor | None = None,
    ) -> None:
        """frequencies: (V,) of the corpus, which the unigram generator needs for sampling."""
        super().__init__()
        self.config, self.vocab_size, self.special = config, vocab_size, special
        self.padded = padded  # false: sequences in training are full, attention needs no mask
        self.fused = False  # set from outside: guess and sample by the kernels of `fused`
        self.build(frequencies)

    @abstractmethod
    def build(self, frequencies: Tensor | None) -> None:
        """Make the networks."""

    @abstractmethod
    def predict(self, batch: Batch, rng: StepRng, *, training: bool = False) -> Predictions:
        """Corrupt the batch and run the networks on it."""

    @abstractmethod
    def forward(self, batch: Batch, rng: StepRng) -> Losses:
        """The losses of a training step."""

    @property
    @abstractmethod
    def encoder(self) -> Encoder:
        """The encoder that is kept after pre-training."""

    def idle(self) -> set[str]:
        """Names of the parameters that the present stage leaves as they are."""
        return set()

    def generators_own(self) -> set[str]:
        """Names of the parameters that only a generator beside the kept encoder has."""
        return set()

    # The steps of the method, named as in the paper.

    def candidates(self, batch: Batch) -> Tensor:
        """(B, T) bool: all tokens but [PAD], [CLS], [SEP] and [MASK]."""
        x, s = batch.x, self.special
        special = (x == s.pad) | (x == s.cls) | (x == s.sep) | (x == s.mask)
        return ~special & self.attention_mask(batch)

    def choose(
        self,
        batch: Batch,
        rng: StepRng,
        purpose: Purpose = Purpose.POSITIONS,
        *,
        besides: Tensor | None = None,
    ) -> Positions:
        """m, uniform over the candidates, without those that `besides` (B, T) marks."""
        candidates, config = self.candidates(batch), self.config
        length = batch.length if batch.parts is None else batch.parts
        if besides is not None:
            candidates &= ~besides
        return choose_positions(
            candidates, length, config.masked_slots, config.objective, rng, purpose
        )

    def mask(self, batch: Batch, rng: StepRng) -> tuple[Positions, Tensor]:
        """m, with m_i ~ unif{1, n} (B, M), and x_masked = REPLACE(x, m, [MASK]) (B, T)."""
        m, o = self.choose(batch, rng), self.config.objective
        return m, mask_tokens(batch.x, m, self.special.mask, self.vocab_size, o, rng)

    def attention_mask(self, batch: Batch) -> Tensor:
        """(B, T) bool, true on tokens."""
        return torch.arange(batch.x.shape[1], device=batch.x.device) < batch.length[:, None]

    def encode(
        self, encoder: Encoder, x: Tensor, batch: Batch, rng: StepRng, *, training: bool
    ) -> Tensor:
        mask, position = None, None
        if batch.parts is not None:
            example, position = lay_out(batch.parts, x.shape[1])
            mask = example.int()
        elif self.padded or not training:
            mask = self.attention_mask(batch)
        return encoder(x, batch.segment, mask, rng if training else None, position=position)

    def states_at(
        self,
        encoder: Encoder,
        x: Tensor,
        m: Positions,
        batch: Batch,
        rng: StepRng,
        *,
        training: bool,
    ) -> Tensor:
        """h(x) at the positions m only, (B, M, D)."""
        h = self.encode(encoder, x, batch, rng, training=training)  # (B, T, D)
        return h.gather(1, m.at[:, :, None].expand(-1, -1, h.shape[2]))

    def mlm_loss(
        self, logits: Tensor, m: Positions, batch: Batch, guess: Guess | None = None
    ) -> tuple[Tensor, Tensor]:
        """L_MLM = E(Σ_{i in m} −log p_G(x_i | x_masked)), and how many guesses are right."""
        original = batch.x.gather(1, m.at)  # (B, M)
        if guess is None:
            logits = wide(logits)  # before argmax, too: a CPU searches bfloat16 one by one
            nll = F.cross_entropy(logits.flatten(0, 1), original.flatten(), reduction="none")
            guess = Guess(nll.view_as(original), logits.argmax(-1))
        loss = (guess.nll * m.valid).sum() / batch.masked.clamp(min=1)
        return loss, ((guess.best == original) & m.valid).sum()

    def mlm_alone(self, logits: Tensor, m: Positions, batch: Batch) -> Losses:
        """The losses of a step in which one network predicts masked tokens, and no other learns."""
        mlm, correct = self.mlm_loss(logits, m, batch)
        zero = torch.zeros_like(mlm.detach())
        total = self.config.objective.gen_weight * mlm
        return Losses(total, mlm.detach(), zero, correct, *[zero.long()] * 3)


class Guess(NamedTuple):
    """What the fused kernel tells of the masked tokens, in place of their logits."""

    nll: Tensor  # (B, M) −log p_G(x_i | x_masked)
    best: Tensor  # (B, M) the likeliest token


class Corruption(NamedTuple):
    """How x became x_corrupt."""

    m: Positions
    x_masked: Tensor  # (B, T)
    h: Tensor | None  # (B, M, D_G), the generator's states at m
    g: Tensor  # (B, M, V) logits of p_G(x_i | x_masked)
    x_hat: Tensor  # (B, M) samples
    x_corrupt: Tensor  # (B, T)
    guess: Guess | None = None  # of the fused kernel; g is empty then


class Main(NamedTuple):
    """The loss of the encoder that is kept."""

    loss: Tensor  # ()
    correct: Tensor  # () right answers
    scored: Tensor  # () positions that count
    each: Tensor | None = None  # (B, T), token by token, where the loss is over tokens


class WithGenerator(Objective):
    """Base of the objectives with a generator: corrupting x, and the stages."""

    proposal: Tensor  # (V,) probabilities of a generator that is no network

    def build(self, frequencies: Tensor | None) -> None:
        config, vocab_size = self.config, self.vocab_size
        c, d, g = config.generator, config.encoder, config.generator_encoder
        if c.frozen or c.kind != "network":
            self.stage = "discriminator"
        embeddings = Embeddings(d, vocab_size)
        own = Embeddings(d, vocab_size, embeddings) if c.sharing == "disentangled" else embeddings
        self.discriminator = Encoder(d, own, site=DISCRIMINATOR_SITES)
        self.generator: Encoder | TwoTowers | None = None
        if c.kind == "network":
            if c.sharing == "none":
                embeddings = Embeddings(g, vocab_size)
            self.generator = self.build_generator(embeddings)
        else:
            counted = frequencies if c.kind == "unigram" else None
            p = torch.ones(vocab_size) if counted is None else counted
            self.register_buffer("proposal", (p / p.sum()).float(), persistent=False)  # (V,)
        self.build_heads()
        self.generator_head = self.build_generator_head() if self.generator is not None else None

    def build_generator(self, embeddings: Embeddings) -> Encoder | TwoTowers:
        if self.config.generator.sharing == "all":
            return self.discriminator
        return Encoder(self.config.generator_encoder, embeddings)

    def build_generator_head(self) -> GeneratorHead:
        return GeneratorHead(self.config.generator_encoder, self.vocab_size)

    @abstractmethod
    def build_heads(self) -> None:
        """The heads of the encoder that is kept."""

    @property
    def encoder(self) -> Encoder:
        return self.discriminator

    def generators_own(self) -> set[str]:
        own = ("generator.", "generator_head.")
        return {name for name, _ in self.named_parameters() if name.startswith(own)}

    def idle(self) -> set[str]:
        if self.stage == "joint":
            return set()
        names, generator = {name for name, _ in self.named_parameters()}, self.generators_own()
        return generator if self.stage == "discriminator" else names - generator

    def corrupt(self, batch: Batch, rng: StepRng, *, training: bool) -> Corruption:
        c, x = self.config, batch.x
        m, x_masked = self.mask(batch, rng)  # (B, M), (B, T)
        if self.fused and training:
            h, x_hat, guess = self.guess(x_masked, m, batch, rng)
            return Corruption(m, x_masked, h, h[:0], x_hat, replace(x, m, x_hat), guess)
        if self.generator is None:
            # A token that was never counted is unlikely, not impossible.
            h, g = None, self.proposal.clamp(min=1e-12).log().expand(*m.at.shape, -1)  # (B, M, V)
            u = rng.uniform(Purpose.SAMPLE, m.at.shape[1])
            total = self.proposal.double().cumsum(0)
            x_hat = torch.searchsorted(total, u.double() * total[-1], right=True)
            x_hat = resolve_duplicates(m, x_hat.clamp(max=self.vocab_size - 1), c.objective)
        else:
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.stage != "discriminator"):
                h, g = self.propose(x_masked, m, batch, rng, training=training)
            x_hat = self.sample(g, m, batch, rng, training)  # (B, M)
        return Corruption(m, x_masked, h, g, x_hat, replace(x, m, x_hat))

    def propose(
        self, x_masked: Tensor, m: Positions, batch: Batch, rng: StepRng, *, training: bool
    ) -> tuple[Tensor, Tensor]:
        """The generator's states (B, M, D_G) and the logits of p_G(x_i | x_masked) (B, M, V)."""
        assert isinstance(self.generator, Encoder)
        rng = self.generators_draws(rng)
        h = self.states_at(self.generator, x_masked, m, batch, rng, training=training)
        return h, self.generator_logits(h)

    def generators_draws(self, rng: StepRng) -> StepRng:
        """For the generator's dropout. An encoder that is both networks would drop the same units
        in both passes, so the generator draws as if at a step that no run reaches."""
        is_one = self.config.generator.sharing == "all"
        return StepRng(rng.seed, rng.step + (1 << 62), rng.rows) if is_one else rng

    def guess(
        self, x_masked: Tensor, m: Positions, batch: Batch, rng: StepRng
    ) -> tuple[Tensor, Tensor, Guess]:
        """States, samples and losses of the masked tokens; only one kernel sees the logits."""
        assert isinstance(self.generator, Encoder)
        assert self.generator_head is not None
        draws = self.generators_draws(rng)
        h = self.states_at(self.generator, x_masked, m, batch, draws, training=True)  # (B, M, D_G)
        e = self.generator_head.words(h.flatten(0, 1))  # (B M, E)
        original = batch.x.gather(1, m.at)
        u = rng.uniform(Purpose.SAMPLE, m.at.shape[1])
        table = self.generator.embeddings.table("word")
        bias = self.generator_head.bias
        nll, x_hat, best, *_ = fused.guess(e, table, bias, original.flatten(), u.flatten())
        x_hat = resolve_duplicates(m, x_hat.view_as(m.at), self.config.objective)
        return h, x_hat, Guess(nll.view_as(m.at), best.view_as(m.at))

    def generator_logits(self, h: Tensor) -> Tensor:
        """(B, M, V) of the generator's states (B, M, D_G)."""
        assert self.generator is not None
        assert self.generator_head is not None
        return self.generator_head(h, self.generator.embeddings.table("word"))

    @torch.no_grad()
    def sample(self, g: Tensor, m: Positions, batch: Batch, rng: StepRng, training: bool) -> Tensor:
        """x̂_i ~ p_G(x_i | x_masked), (B, M); no gradient flows through it."""
        logits = self.proposal_logits(g, m, batch, rng if training else None)
        u = rng.uniform(Purpose.SAMPLE, m.at.shape[1])  # (B, M)
        x_hat = sample(logits.flatten(0, 1), u.flatten()).view_as(m.at)
        return resolve_duplicates(m, x_hat, self.config.objective)

    def proposal_logits(self, g: Tensor, m: Positions, batch: Batch, rng: StepRng | None) -> Tensor:
        """The logits that are sampled from, (B, M, V). rng None means evaluation, whose step is no
        step of the training: a temperature that falls has reached its end there."""
        c = self.config.generator
        temperature: float | Tensor = c.temperature
        if c.temperature_steps:  # T = 1 + (T_0 − 1) e^(−step / τ)
            temperature = 1.0
            if rng is not None:
                temperature += (c.temperature - 1) * torch.exp(-rng.step / c.temperature_steps)
        return proposal_logits(g, batch.x.gather(1, m.at), temperature, c.disallow_correct)

    def forward(self, batch: Batch, rng: StepRng) -> Losses:
        if self.stage == "generator":  # of two: the discriminator is not even computed
            m, x_masked = self.mask(batch, rng)
            return self.mlm_alone(self.propose(x_masked, m, batch, rng, training=True)[1], m, batch)
        return self.learn(*self.generate(batch, rng), batch, rng)

    @property
    def generator_is_first(self) -> bool:
        """Whether the generator's loss is L_MLM, which needs nothing of the other network.

        Then a step can take its gradient before that network is computed, so that the activations
        of both are never held at once: `generate_alone`, backward, `learn`, backward.
        """
        is_mlm = type(self).generator_loss is WithGenerator.generator_loss
        return is_mlm and self.stage == "joint" and self.generator is not None

    def generate(self, batch: Batch, rng: StepRng) -> tuple[Corruption, Tensor, Tensor]:
        """What the generator makes of the batch, L_MLM, and how many guesses are right."""
        k = self.corrupt(batch, rng, training=True)
        zero = torch.zeros((), device=batch.x.device)
        if self.generator is None:
            return k, zero, zero.long()
        return k, *self.mlm_loss(k.g, k.m, batch, k.guess)

    def generate_alone(self, batch: Batch, rng: StepRng) -> tuple[Corruption, Tensor, Tensor]:
        """`generate`, detached from the generator but for L_MLM, so that `learn` may come later."""
        k, mlm, mlm_correct = self.generate(batch, rng)
        nothing = batch.x.new_empty(0)
        # Not _replace: torch 2.11 does not compile a tuple that was made so and is returned.
        alone = Corruption(k.m, k.x_masked, None, nothing, k.x_hat, k.x_corrupt)
        return alone, mlm, mlm_correct

    def learn(
        self, k: Corruption, mlm: Tensor, mlm_correct: Tensor, batch: Batch, rng: StepRng
    ) -> Losses:
        """The losses, given what the generator made."""
        c = self.config.objective
        main = self.main_loss(k, batch, rng)
        total = c.disc_weight * main.loss
        if batch.disc_share is not None:
            total = total * batch.disc_share
        if self.stage == "joint":
            total = total + c.gen_weight * self.generator_loss(k, mlm, main, batch, rng)
        return Losses(
            total=total,
            mlm=mlm.detach(),
            disc=main.loss.detach(),
            mlm_correct=mlm_correct,
            replaced=(k.x_corrupt != batch.x).sum(),
            disc_correct=main.correct,
            scored=main.scored,
        )

    def generator_loss(
        self, k: Corruption, mlm: Tensor, main: Main, batch: Batch, rng: StepRng
    ) -> Tensor:
        """What the generator minimises: the paper's choice is L_MLM, maximum likelihood."""
        return mlm

    @abstractmethod
    def main_loss(self, k: Corruption, batch: Batch, rng: StepRng) -> Main:
        """What the encoder that is kept learns from x_corrupt."""


class ReplacedTokenDetection(WithGenerator):
    """min  L_MLM(x, θ_G) + λ · L_Disc(x, θ_D)          (paper, section 2)"""

    def build_heads(self) -> None:
        self.discriminator_head = DiscriminatorHead(
            self.config.encoder, self.config.objective.disc_head
        )

    def predict(self, batch: Batch, rng: StepRng, *, training: bool = False) -> Predictions:
        k = self.corrupt(batch, rng, training=training)
        d = self.detect(k, batch, rng, training=training)
        return Predictions(k.m, k.x_masked, k.g, k.x_corrupt, d, self.replaced(k, batch))

    def detect(self, k: Corruption, batch: Batch, rng: StepRng, *, training: bool) -> Tensor:
        """d (B, T):  σ(d) = P(replaced) = 1 − D(x_corrupt, t)"""
        h = self.encode(self.discriminator, k.x_corrupt, batch, rng, training=training)  # (B, T, D)
        return self.discriminator_head(h)

    def replaced(self, k: Corruption, batch: Batch) -> Tensor:
        """(B, T) bool: a lucky guess counts as original."""
        return k.x_corrupt != batch.x

    def main_loss(self, k: Corruption, batch: Batch, rng: StepRng) -> Main:
        """L_Disc = E(Σ_t −1(x_t^corrupt = x_t) log D(t) − 1(≠) log(1 − D(t)))"""
        d = self.detect(k, batch, rng, training=True)  # (B, T)
        replaced = self.replaced(k, batch)
        bce = F.binary_cross_entropy_with_logits(d, replaced.to(d.dtype), reduction="none")
        scored, count = self.scored(k.m, batch, rng)
        loss = (bce * scored).sum() / count.clamp(min=1)
        return Main(loss, (((d > 0) == replaced) & scored).sum(), scored.sum(), bce)

    def scored(self, m: Positions, batch: Batch, rng: StepRng) -> tuple[Tensor, Tensor]:
        """(B, T) bool, where L_Disc is taken, and how many that are in the global batch."""
        which = self.config.objective.disc_positions
        if which == "all":
            return self.attention_mask(batch), batch.tokens
        at_m = marked(m, batch.x)
        if which == "masked":
            return at_m, batch.masked
        besides = at_m if which == "other" else None
        other = self.choose(batch, rng, Purpose.OTHER_POSITIONS, besides=besides)
        return marked(other, batch.x), batch.masked


@final
class Adversarial(ReplacedTokenDetection):
    """max over θ_G instead: the generator is rewarded with the discriminator's loss (appendix F).

    The sample is a choice without a gradient, so the generator follows REINFORCE: the gradient of
    log p_G(x̂_t) times R_t − b_t. R_t is −log of the probability that the discriminator gives the
    truth about token t, and only t's own sample counts for it. The baseline b_t = −log σ(wᵀ h_G)
    learns that probability by cross-entropy.
    """

    def build_heads(self) -> None:
        super().build_heads()
        self.baseline = nn.Linear(self.config.generator_encoder.hidden_size, 1)

    def generator_loss(
        self, k: Corruption, mlm: Tensor, main: Main, batch: Batch, rng: StepRng
    ) -> Tensor:
        assert k.h is not None
        assert main.each is not None
        reward = main.each.detach().gather(1, k.m.at)  # (B, M)
        z = wide(self.baseline(k.h.detach())).squeeze(-1)  # (B, M)
        proposal = self.proposal_logits(k.g, k.m, batch, rng)
        log_p = proposal.log_softmax(-1).gather(2, k.x_hat[:, :, None]).squeeze(-1)
        advantage = reward + F.logsigmoid(z.detach())  # R − b
        truth = F.binary_cross_entropy_with_logits(z, torch.exp(-reward), reduction="none")
        loss = (truth - advantage * log_p) * k.m.valid
        return loss.sum() / batch.masked.clamp(min=1)


@final
class ReplaceMLM(WithGenerator):
    """min  L_MLM(x, θ_G) + λ · E(Σ_{i in m} −log p(x_i | x_corrupt))          MLM without [MASK]"""

    def build_heads(self) -> None:
        self.main_head = GeneratorHead(self.config.encoder, self.vocab_size)

    def predict(self, batch: Batch, rng: StepRng, *, training: bool = False) -> Predictions:
        k = self.corrupt(batch, rng, training=training)
        return Predictions(k.m, k.x_masked, k.g, k.x_corrupt)

    def main_loss(self, k: Corruption, batch: Batch, rng: StepRng) -> Main:
        h = self.states_at(self.discriminator, k.x_corrupt, k.m, batch, rng, training=True)
        logits = self.main_head(h, self.discriminator.embeddings.table("word"))  # (B, M, V)
        loss, right = self.mlm_loss(logits, k.m, batch)
        return Main(loss, right, k.m.valid.sum())


@final
class AllTokensMLM(ReplacedTokenDetection):
    """min  L_MLM(x, θ_G) + λ · E(Σ_t −log p(x_t | x_corrupt)) over every token, with a copy gate:

    p(x_t | x_corrupt) = D(t) · 1(x_t = x_t^corrupt) + (1 − D(t)) · softmax(e(x_t)ᵀ h_D(t))
    """

    def build_heads(self) -> None:
        super().build_heads()
        self.main_head = GeneratorHead(self.config.encoder, self.vocab_size)

    def main_loss(self, k: Corruption, batch: Batch, rng: StepRng) -> Main:
        h = self.encode(self.discriminator, k.x_corrupt, batch, rng, training=True)  # (B, T, D)
        d = self.discriminator_head(h)  # (B, T)     log D = log σ(−d), log(1 − D) = log σ(d)
        table = self.discriminator.embeddings.table("word")
        log_p = log_softmax_at(self.main_head, h.flatten(0, 1), table, batch.x.view(-1, 1))
        said = F.logsigmoid(d) + log_p.view_as(d)  # (B, T)
        copied = torch.logaddexp(F.logsigmoid(-d), said)
        nll = -torch.where(k.x_corrupt == batch.x, copied, said)
        is_token = self.attention_mask(batch)
        loss = (nll * is_token).sum() / batch.tokens.clamp(min=1)
        right = ((d > 0) == (k.x_corrupt != batch.x)) & is_token  # of the gate
        return Main(loss, right.sum(), is_token.sum(), nll)


@final
class Electric(ReplacedTokenDetection):
    """Noise-contrastive estimation of an energy E(x)_t ∝ −log p(x_t | all other tokens).

    The generator gives q(x_t | all other tokens) for every t, and a token that is noise with
    probability q p / (q p + e^(−E) (1 − p)), p being the share of masked tokens, is what the
    discriminator has to tell: d = E + log q + log(p / (1 − p)).
    """

    def build_generator(self, embeddings: Embeddings) -> Encoder | TwoTowers:
        return TwoTowers(self.config.generator_encoder, embeddings)

    def build_generator_head(self) -> GeneratorHead:
        g = self.config.generator_encoder
        both = dataclasses.replace(g, hidden_size=2 * g.hidden_size)
        return GeneratorHead(both, self.vocab_size)

    def propose(
        self, x_masked: Tensor, m: Positions, batch: Batch, rng: StepRng, *, training: bool
    ) -> tuple[Tensor, Tensor]:
        """Reads x as it is: what it says about t does not depend on x_t."""
        mask = self.attention_mask(batch) if self.padded or not training else None
        assert isinstance(self.generator, TwoTowers)
        h = self.generator(batch.x, batch.segment, mask, rng if training else None)  # (B, T, 2 D_G)
        at_m = h.gather(1, m.at[:, :, None].expand(-1, -1, h.shape[2]))
        return h, self.generator_logits(at_m)

    def log_q(self, k: Corruption, x: Tensor) -> Tensor:
        """log q(x_t | all other tokens) of each of `x` (B, T, n)."""
        assert k.h is not None
        assert self.generator is not None
        assert self.generator_head is not None
        head, table = self.generator_head, self.generator.embeddings.table("word")
        return log_softmax_at(head, k.h.flatten(0, 1), table, x.flatten(0, 1)).view_as(x)

    def detect(self, k: Corruption, batch: Batch, rng: StepRng, *, training: bool) -> Tensor:
        energy = super().detect(k, batch, rng, training=training)  # (B, T)
        p = self.config.objective.mask_percent / 100
        log_q = self.log_q(k, k.x_corrupt[:, :, None]).squeeze(-1).detach()
        return energy + log_q + math.log(p / (1 - p))

    def replaced(self, k: Corruption, batch: Batch) -> Tensor:
        """A sample is noise even where it equals the original: d are the log-odds of that."""
        return marked(k.m, batch.x)

    def generator_loss(
        self, k: Corruption, mlm: Tensor, main: Main, batch: Batch, rng: StepRng
    ) -> Tensor:
        """The generator learns from every token but the special ones."""
        nll = -self.log_q(k, batch.x[:, :, None]).squeeze(-1)
        return (nll * self.candidates(batch)).sum() / batch.tokens.clamp(min=1)


def marked(m: Positions, x: Tensor) -> Tensor:
    """(B, T) bool, true at the positions m of x."""
    return torch.zeros_like(x, dtype=torch.bool).scatter(1, m.at, m.valid)


def disc_share(start_percent: float, progress: float) -> float:
    """Share of λ that counts when `progress` (0 to 1) of a run is done: 0, then rising to 1."""
    start = start_percent / 100
    return min(1.0, max(0.0, progress / start - 1)) if start > 0 else 1.0


def log_softmax_at(head: GeneratorHead, h: Tensor, table: Tensor, targets: Tensor) -> Tensor:
    """log softmax(logits) at `targets` (N, n) of states (N, D), for some positions at a time.

    The logits (N, V) of all positions would be most of the memory of a step: those of
    POSITIONS_AT_ONCE are computed, used, and computed again for the gradient.
    """

    def some(h: Tensor, targets: Tensor) -> Tensor:
        logits = wide(head(h, table))
        return logits.gather(1, targets) - logits.logsumexp(-1, keepdim=True)

    parts = zip(h.split(POSITIONS_AT_ONCE), targets.split(POSITIONS_AT_ONCE), strict=True)
    return torch.cat(
        [checkpoint(some, *p, use_reentrant=False, preserve_rng_state=False) for p in parts]
    )


@final
class MaskedLM(Objective):
    """min  L_MLM(x, θ)          one encoder, the BERT baseline (paper, sections 3.3 and 3.4)"""

    def build(self, frequencies: Tensor | None) -> None:
        del frequencies
        c, vocab_size = self.config.encoder, self.vocab_size
        self.generator = Encoder(c, Embeddings(c, vocab_size))
        self.generator_head = GeneratorHead(c, vocab_size)

    @property
    def encoder(self) -> Encoder:
        return self.generator

    def predict(self, batch: Batch, rng: StepRng, *, training: bool = False) -> Predictions:
        m, x_masked = self.mask(batch, rng)  # (B, M), (B, T)
        h = self.states_at(self.generator, x_masked, m, batch, rng, training=training)  # (B, M, D)
        logits = self.generator_head(h, self.generator.embeddings.table("word"))  # (B, M, V)
        return Predictions(m, x_masked, logits, batch.x)

    def forward(self, batch: Batch, rng: StepRng) -> Losses:
        p = self.predict(batch, rng, training=True)
        return self.mlm_alone(p.mlm_logits, p.m, batch)


def objective_class(config: PretrainConfig) -> type[MaskedLM | WithGenerator]:
    """The class that the settings name."""
    if config.objective.algorithm == "adversarial":
        return Adversarial
    kinds: dict[str, type[MaskedLM | WithGenerator]] = {
        "rtd": ReplacedTokenDetection,
        "mlm": MaskedLM,
        "replace_mlm": ReplaceMLM,
        "all_tokens_mlm": AllTokensMLM,
        "electric": Electric,
    }
    return kinds[config.objective.kind]


def build_objective(
    config: PretrainConfig,
    vocab_size: int,
    special: SpecialIds,
    *,
    padded: bool = True,
    frequencies: Tensor | None = None,
) -> Objective:
    """The objective that the settings name, initialised from the run's seed."""
    objective = objective_class(config)(
        config, vocab_size, special, padded=padded, frequencies=frequencies
    )
    initialise(objective, config.encoder.init, config.run.seed)
    return objective
