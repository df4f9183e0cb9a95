"""Settings of a pre-training run: frozen dataclasses, nothing else.

Comes in: a recipe (`recipes.py`), a TOML or JSON file, dotted values of the command line. Goes out:
one `PretrainConfig` that holds every number of the run and is stored whole in it. Field names are
those of the paper's hyper-parameter tables; the docstring under a field is its help on the command
line. No field is changed after construction and none is read with a default at the point of use.
A field's annotation says which values make sense; `Settings` refuses the others by name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tomllib
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from .errors import ElectraError, nearest

Sharing = Literal["none", "embeddings", "disentangled", "all"]


@dataclass(frozen=True)
class _Rule:
    """The values a setting may take: a test, and how an error names them ("use ...")."""

    holds: Callable[[Any], bool]
    use: str


Count = Annotated[int, _Rule(lambda v: 1 <= v < 1 << 63, "at least 1, below 2^63")]
# Far above any real model, yet low enough that a hostile config.json cannot exhaust the memory.
Layers = Annotated[int, _Rule(lambda v: 1 <= v <= 1000, "1 to 1000")]
Size = Annotated[int, _Rule(lambda v: 1 <= v < 1 << 20, "1 to 1048575")]
Whole = Annotated[int, _Rule(lambda v: 0 <= v < 1 << 63, "0 or more, below 2^63")]
Seed = Annotated[int, _Rule(lambda v: 0 <= v < 2**32, "0 to 4294967295")]
Positive = Annotated[float, _Rule(lambda v: 0 < v < math.inf, "a positive number")]
NotNegative = Annotated[float, _Rule(lambda v: 0 <= v < math.inf, "0 or a positive number")]
Portion = Annotated[float, _Rule(lambda v: 0 <= v < 1, "a number from 0 to below 1")]
Percent = Annotated[float, _Rule(lambda v: 0 <= v <= 100, "a percentage from 0 to 100")]
HalfPercent = Annotated[float, _Rule(lambda v: 0 <= v <= 50, "a percentage from 0 to 50")]
MaskPercent = Annotated[
    float, _Rule(lambda v: 0.001 <= v < 100, "a percentage such as 15 (paper), or 25 for large")
]
Length = Annotated[int, _Rule(lambda v: 8 <= v < 1 << 63, "at least 8, below 2^63")]
ShortLength = Annotated[int, _Rule(lambda v: 4 <= v < 1 << 63, "at least 4, below 2^63")]
LICENSE = _Rule(
    lambda v: re.fullmatch(r"[a-z0-9][a-z0-9.+-]{0,63}", v) is not None,
    "a name that the Hub knows, such as apache-2.0, cc-by-sa-4.0 or other",
)
License = Annotated[str, LICENSE]


@cache
def _rules(cls: type) -> list[tuple[str, _Rule, tuple[Any, ...]]]:
    """The rules in a class's annotations, optional fields and unions with words included:
    (setting, rule, values that are exempt from the rule)."""
    found: list[tuple[str, _Rule, tuple[Any, ...]]] = []
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        parts = (hint, *typing.get_args(hint))
        words = [word for p in parts if typing.get_origin(p) is Literal for word in p.__args__]
        rules = [rule for p in parts for rule in getattr(p, "__metadata__", ())]
        found += [(name, rule, (None, *words)) for rule in rules]
    return found


class Settings:
    """Base of all groups of settings: refuses values that break a rule."""

    _group = ""

    def __post_init__(self) -> None:
        for name, rule, others in _rules(type(self)):
            value = getattr(self, name)
            if value not in others and not rule.holds(value):
                where = f"{self._group}{name}"
                raise ElectraError(f"{name} is {value}.", where=where, fix=f"use {rule.use}")


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(Settings):
    """The discriminator, or the one encoder of a BERT baseline."""

    _group = "encoder."
    layers: Layers = 12
    """Transformer layers."""
    hidden_size: Size = 256
    """Width of the hidden states."""
    ffn_size: Size = 1024
    """Width inside the feed-forward layers."""
    attention_heads: Size = 4
    """Attention heads; their size is hidden_size / attention_heads."""
    embedding_size: Size = 128
    """Width of the token embeddings; projected to hidden_size when the two differ."""
    max_positions: Size = 512
    """Learned position embeddings, the longest sequence the model can ever read."""
    dropout: Portion = 0.1
    """Dropout on embeddings and on the output of both sub-layers."""
    attention_dropout: Portion = 0.1
    """Dropout on the attention probabilities."""
    layer_norm_eps: Positive = 1e-12
    """Epsilon inside the layer normalisation."""
    init: Literal["paper", "local"] = "paper"
    """paper: truncated normal 0.02. local: also lets the first attention heads start on the
    neighbouring tokens, which spares short runs the long plateau at token frequencies."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.attention_heads:
            what = f"hidden_size {self.hidden_size} is no multiple of {self.attention_heads} heads."
            fix = "choose a number of heads that divides hidden_size"
            raise ElectraError(what, where="encoder.attention_heads", fix=fix)

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.attention_heads


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig(Settings):
    """The small masked language model that proposes replacements (paper, section 3.2)."""

    _group = "generator."
    width: Positive = 0.25
    """Hidden size, feed-forward size and heads as a fraction of the discriminator's."""
    depth: Positive = 1.0
    """Layers of the generator as a fraction of the discriminator's."""
    kind: Literal["network", "uniform", "unigram"] = "network"
    """network: a masked language model. uniform, unigram: tokens drawn without looking at the
    text, all alike or as often as the corpus has them."""
    sharing: Sharing = "embeddings"
    """Weights shared with the discriminator: none; embeddings (the whole embedding block);
    disentangled (the discriminator adds a difference of its own to the generator's tables, which it
    does not train); all (needs width and depth 1)."""
    temperature: Positive = 1.0
    """Divides the generator's logits before sampling."""
    temperature_steps: Whole = 0
    """Time constant, in steps, of the temperature's exponential decay towards 1; 0: no decay. Where
    it decays, held-out text is sampled at 1."""
    disallow_correct: bool = False
    """Never sample the original token."""
    frozen: bool = False
    """The generator is a trained one (--init) and stays as it is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sharing == "all" and not self.width == self.depth == 1:
            what = "Sharing all weights needs a generator of the discriminator's size."
            fix = "set generator.width and generator.depth to 1, or share only the embeddings"
            raise ElectraError(what, where="generator.sharing", fix=fix)
        if self.frozen and self.sharing != "none":
            what = "A frozen generator cannot share weights that the discriminator trains."
            raise ElectraError(what, where="generator.frozen", fix="set generator.sharing to none")


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Settings):
    """What is minimised, and each point on which the paper and the released code differ."""

    _group = "objective."
    kind: Literal["rtd", "mlm", "replace_mlm", "all_tokens_mlm", "electric"] = "rtd"
    """rtd: replaced token detection. mlm: masked language modelling (BERT). replace_mlm: MLM on the
    generator's samples instead of [MASK]. all_tokens_mlm: the same for every token, with a copy
    gate. electric: an energy for every token, against a two-tower generator. For the two in
    the middle the paper's study sets disc_weight (electra ablate efficiency --dry-run)."""
    disc_positions: Literal["all", "masked", "other", "random"] = "all"
    """Tokens in the discriminator's loss. masked: the masked ones (ELECTRA 15 %). other: as many
    unmasked ones, none of them replaced (the paper's control, taken literally). random: as many,
    drawn independently of the masks (the control as it may have been meant)."""
    algorithm: Literal["joint", "two_stage", "adversarial"] = "joint"
    """joint: both losses at once. two_stage: the generator for half of the steps, then, with the
    generator frozen, the discriminator. adversarial: the generator is rewarded for the
    discriminator's mistakes (REINFORCE)."""
    stage_two: Literal["copy", "fresh"] = "copy"
    """Where the discriminator of two_stage starts: at the generator's weights, or at new ones."""
    disc_weight: NotNegative = 50.0
    """λ, the weight of the discriminator's loss."""
    disc_start_percent: HalfPercent = 0.0
    """Head start of the generator: λ is 0 for this share of the run, then rises for as long."""
    gen_weight: NotNegative = 1.0
    """Weight of the generator's loss."""
    mask_percent: MaskPercent = 15.0
    """Share of the tokens that is chosen for masking."""
    mask_count: Literal["ceil", "round"] = "ceil"
    """k of a sequence of n tokens: ceil(p n), or round(p n) with at most int((p + 0.005) T)."""
    mask_positions: Literal["distinct", "with_replacement"] = "distinct"
    """Positions are a set, or k independent draws in which a position can come up twice."""
    duplicate_draws: Literal["first", "average"] = "first"
    """A position drawn twice takes the first sample, or the integer mean of the sampled token ids
    (what the released code does)."""
    mask_token_percent: Percent = 100.0
    """Share of the chosen positions that shows [MASK]."""
    random_token_percent: Percent = 0.0
    """Share of the chosen positions that shows a random token; the rest keeps its own."""
    disc_head: Literal["dense", "linear"] = "dense"
    """dense: dense layer and GELU, then w. linear: sigmoid(w h), the paper's formula."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_token_percent + self.random_token_percent > 100:
            what = "mask_token_percent and random_token_percent are more than 100 together."
            fix = "use 100 and 0 (paper), 85 and 0 (released code) or 80 and 10 (BERT)"
            raise ElectraError(what, where="objective.mask_token_percent", fix=fix)


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Settings):
    """Adam and its schedule (paper, appendix A)."""

    _group = "optim."
    kind: Literal["adam", "muon"] = "adam"
    """adam: for all parameters. muon: orthogonalised momentum for the matrices inside the blocks of
    both encoders, Adam for everything else."""
    learning_rate: Positive = 5e-4
    """Peak learning rate."""
    muon_rate: Positive = 1.5e-3
    """Peak learning rate of Muon's matrices; it follows the same schedule. An update is as large as
    Adam's with that rate would be (root mean square 0.2)."""
    muon_momentum: Portion = 0.95
    """Momentum of Muon's matrices, Nesterov's form."""
    generator_rate: Positive = 1.0
    """Learning rate of what belongs to the generator alone, as a multiple of the discriminator's;
    shared embeddings have the discriminator's."""
    warmup_steps: Whole = 10_000
    """Steps of linear warm-up; setting only this overrides the recipe's warmup_percent."""
    warmup_percent: Percent | None = None
    """Warm-up as a share of the whole run instead, for runs limited by minutes."""
    schedule: Literal["then", "times", "cosine", "wsd"] = "then"
    """then: warm-up, then linear decay to zero. times: the decay runs from step 0 and multiplies
    the warm-up (released code). cosine: warm-up, then half a cosine to zero. wsd: warm-up, constant
    (stable), then linear decay to zero over the last decay_percent."""
    decay_percent: Percent = 20.0
    """Last share of the run, over which wsd decays."""
    bias_correction: bool = True
    """Correct Adam's moments for their zero start; the released code does not."""
    beta1: Portion = 0.9
    """Decay of the first moment."""
    beta2: Portion = 0.999
    """Decay of the second moment."""
    epsilon: Positive = 1e-6
    """Adam's epsilon."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay; layer norms and biases are excluded."""
    max_grad_norm: Positive = 1.0
    """Clip of the global gradient norm over generator and discriminator together."""
    average: Portion = 0.0
    """Decay of a moving average of the weights, such as 0.999, which is evaluated and exported in
    their place; 0 is off. Early on it forgets faster: step t has at least the weight 9/(10 + t)."""
    skip_spikes: bool = False
    """Leave out a step whose gradient norm lies more than 6 standard deviations above the mean of
    the last 128 good steps; it counts as a bad step (run.max_bad_steps). The window
    starts anew when the loss changes: at the second of two stages, and while λ rises."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(Settings):
    """Batches of a step."""

    _group = "data."
    sequence_length: Length = 128
    """Tokens of a sequence; the corpus has to be prepared with the same length."""
    batch_size: Count = 128
    """Sequences of one optimizer step over all processes: the global batch."""
    examples_per_row: Count = 1
    """Most examples of the corpus that share one sequence, where they fit whole; none sees another,
    and each counts positions and masked tokens as it would alone. 1: each is padded (paper)."""
    micro_batch: Count | Literal["auto"] | None = None
    """Sequences that go through the model at once on one process; smaller values save memory and
    give the same gradients. Default: the process's whole share. auto: before the first step, try
    all of it, a half, a quarter, … and take the first that fits on every GPU; a continued run keeps
    it. On a CPU: all of it."""
    on_device: Literal["auto", "yes", "no"] = "auto"
    """Keep the token array in GPU memory: auto does so when it takes less than a quarter of it."""

    def at_once(self, rows: int) -> int:
        """The micro-batch of a process with `rows` sequences; all of them for None and "auto"."""
        return min(self.micro_batch, rows) if isinstance(self.micro_batch, int) else rows


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """How long, how often, with what precision."""

    _group = "run."
    train_steps: Count = 1_000_000
    """Optimizer steps of the whole run."""
    minutes: Positive | None = None
    """Wall-clock budget of training; the schedule follows whichever of steps and minutes ends
    first."""
    seed: Seed = 0
    """Seed of initialisation, order, masks, samples and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU when there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: bf16 on a GPU, fp32 on a CPU. bf16 on a CPU is probed in a child process first."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """torch.compile; auto compiles on a GPU only."""
    cuda_graph: Literal["auto", "yes", "no"] = "auto"
    """Record the whole step as one CUDA graph; auto does so on one GPU."""
    kernels: Literal["auto", "yes", "no"] = "auto"
    """Own kernels for whole blocks of the encoders; auto uses them on an H100, H200 or B200 where
    they fit."""
    sharding: Literal["none", "optimizer", "weights"] = "none"
    """With several processes, optimizer: each has a share of Adam's moments and updates that share
    of the weights; the same run in less memory. weights: each has a share of the weights and
    gradients as well (FSDP2); in the least memory, but not compiled, and slower."""
    deterministic: bool = False
    """Bit-equal repeats on a GPU as well (a CPU gives them for equal run.threads); slower."""
    threads: Count | None = None
    """CPU threads; default: measured at the start, one or all."""
    log_every: Count = 50
    """Steps between two lines of metrics."""
    eval_every: Count = 1000
    """Steps between two evaluations on held-out text."""
    eval_batches: Count = 8
    """Batches of an evaluation."""
    save_every: Count = 1000
    """Steps between two checkpoints."""
    keep_checkpoints: Count = 2
    """Newest checkpoints that are kept."""
    keep_every: Count | None = None
    """Checkpoints whose step is a multiple of it are kept as well, all of them: a multiple of
    save_every, at whose steps they are made."""
    tracker: Literal["auto", "none", "tensorboard", "trackio", "wandb", "mlflow"] = "auto"
    """Where the numbers go besides metrics.jsonl; auto: TensorBoard if installed. Nothing leaves
    the machine unless the tracker's own environment variables ask for it (docs/trackers.md)."""
    max_bad_steps: Count = 3
    """Non-finite steps in a row that end the run, looked at every log_every steps; none of them
    reaches the weights."""
    on_disk_full: Literal["stop", "pause"] = "stop"
    """stop ends the run with its last checkpoint intact; pause waits for room, then goes on."""
    timeout_seconds: Positive = 600.0
    """With several processes: how long one may keep the others waiting until the run ends."""


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """Everything a pre-training run depends on, besides its corpus."""

    name: str = "small"
    """The recipe these settings started from."""
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        length, longest = self.data.sequence_length, self.encoder.max_positions
        if length > longest:
            what = f"sequence_length {length} is longer than max_positions {longest}."
            fix = "raise encoder.max_positions or shorten the sequences"
            raise ElectraError(what, where="data.sequence_length", fix=fix)
        o, g = self.objective, self.generator
        if o.algorithm != "joint" and (o.kind, g.kind) != ("rtd", "network"):
            what = f"{o.algorithm} is a way to train a generator and a discriminator."
            fix = "use it with objective.kind rtd and generator.kind network"
            raise ElectraError(what, where="objective.algorithm", fix=fix)
        if o.algorithm == "two_stage":
            self._check_stages()
        if o.kind == "electric" and g.sharing == "all":
            what = "The two towers of electric read in one direction, the discriminator in both."
            fix = "set generator.sharing to embeddings"
            raise ElectraError(what, where="generator.sharing", fix=fix)
        if self.optim.kind == "muon" and self.run.sharding != "none":
            what = "Muon turns whole matrices, of which a share of the optimizer has parts."
            fix = "set run.sharding to none, or optim.kind to adam"
            raise ElectraError(what, where="run.sharding", fix=fix)
        if self.run.sharding == "weights":
            self._check_weights_in_shares()
        if o.kind == "electric" and self.data.examples_per_row > 1:
            what = "The two towers of electric read a sequence from end to end."
            fix = "set data.examples_per_row to 1"
            raise ElectraError(what, where="data.examples_per_row", fix=fix)
        self._check_generator()

    def _check_stages(self) -> None:
        """Those of two_stage."""
        g = self.generator
        if g.sharing != "none":
            what = "The frozen generator of two_stage cannot share weights."
            raise ElectraError(what, "generator.sharing", "set generator.sharing to none")
        if self.objective.stage_two == "copy" and (g.width, g.depth) != (1, 1):
            what = "Only a generator of the discriminator's size can be copied into it."
            fix = "set generator.width and generator.depth to 1, or objective.stage_two to fresh"
            raise ElectraError(what, where="objective.stage_two", fix=fix)
        if self.run.minutes is not None:
            what = "two_stage changes over at half of the steps, which minutes do not tell."
            raise ElectraError(what, where="run.minutes", fix="use run.train-steps alone")

    def _check_weights_in_shares(self) -> None:
        """What takes weights as a whole, or the step as one."""
        for name in ("compile", "cuda_graph", "kernels"):
            if getattr(self.run, name) == "yes":
                what = "Weights in shares are gathered layer by layer, in the middle of the step."
                fix = "leave it at auto, or set run.sharding to optimizer"
                raise ElectraError(what, where=f"run.{name}", fix=fix)
        if self.objective.algorithm == "two_stage":
            what = "The second stage starts from a copy of whole weights."
            raise ElectraError(what, where="run.sharding", fix="set run.sharding to optimizer")
        if self.data.micro_batch == "auto":
            what = "Processes that share weights cannot try sizes each by itself."
            raise ElectraError(what, where="data.micro_batch", fix="give a number")

    def _check_generator(self) -> None:
        """What is asked of the generator, or of its place beside the discriminator."""
        o, g = self.objective, self.generator
        trains_both = o.kind != "mlm" and g.kind == "network" and not g.frozen
        if g.frozen and (o.algorithm != "joint" or o.kind == "mlm"):
            what = "Only a generator that is trained beside a discriminator can stay as it is."
            fix = "set objective.algorithm to joint, and objective.kind to another than mlm"
            raise ElectraError(what, where="generator.frozen", fix=fix)
        if self.optim.generator_rate != 1 and not trains_both:
            what = "There is no generator in training that could have a rate of its own."
            raise ElectraError(what, where="optim.generator_rate", fix="leave it at 1")
        if o.disc_start_percent > 0 and not (trains_both and o.algorithm == "joint"):
            what = "Only a generator that is trained beside the discriminator can begin before it."
            fix = "use it with objective.algorithm joint and generator.kind network, or leave it at"
            raise ElectraError(what, where="objective.disc_start_percent", fix=f"{fix} 0")
        if o.disc_positions != "all" and o.kind not in ("rtd", "electric"):
            what = f"{o.kind} has no discriminator whose tokens could be chosen."
            fix = "use it with objective.kind rtd"
            raise ElectraError(what, where="objective.disc_positions", fix=fix)
        needs_network = g.frozen or g.disallow_correct or g.sharing == "disentangled"
        needs_network |= (g.temperature, g.temperature_steps) != (1, 0) or o.kind == "electric"
        if g.kind != "network" and needs_network:
            what = "This needs a generator that is a network."
            raise ElectraError(what, where="generator.kind", fix="set generator.kind to network")

    def without_effect(self, start: PretrainConfig | None = None) -> Iterator[str]:
        """A sentence for every setting that has another value than its default and does nothing, or
        less than it says.

        start: a recipe, whose own values were not asked for.
        """
        values, defaults = flat(to_dict(self)), flat(to_dict(PretrainConfig()))
        begun = flat(to_dict(start)) if start is not None else defaults
        needed = {
            "optim.muon_rate": ("optim.kind", "muon"),
            "optim.muon_momentum": ("optim.kind", "muon"),
            "optim.decay_percent": ("optim.schedule", "wsd"),
            "objective.stage_two": ("objective.algorithm", "two_stage"),
            "objective.duplicate_draws": ("objective.mask_positions", "with_replacement"),
        }
        idle = {name: f"{k} {v}" for name, (k, v) in needed.items() if values[k] != v}
        if values["generator.temperature"] == 1:
            idle["generator.temperature_steps"] = "a generator.temperature other than 1"
        if self.objective.kind == "mlm":
            alone = [name for name in values if name.startswith("generator.")]
            idle |= dict.fromkeys(
                [*alone, "objective.disc_weight"], "another objective.kind than mlm"
            )
        elif self.generator.kind != "network":
            own = ("generator.width", "generator.depth", "generator.sharing")
            idle |= dict.fromkeys([*own, "objective.gen_weight"], "generator.kind network")
        for name, missing in idle.items():
            if values[name] not in (defaults[name], begun[name]):
                yield f"{name} {values[name]} has no effect: it needs {missing}"
        if self.run.keep_every is not None:
            yield from self._keeps_less(self.run.keep_every)

    def _keeps_less(self, keep_every: int) -> Iterator[str]:
        """What `run.keep_every` does not do, as checkpoints are made every save_every steps."""
        name, save_every = f"run.keep_every {keep_every}", self.run.save_every
        both = math.lcm(keep_every, save_every)
        made = f"checkpoints are made every {save_every:,} steps (run.save_every)"
        if both >= self.run.train_steps:
            yield f"{name} has no effect: {made}, none of them before the end at a multiple of it"
        elif both > keep_every:
            yield f"{name} keeps the checkpoints of every {both:,} steps only: {made}"

    @property
    def generator_encoder(self) -> EncoderConfig:
        """The generator's own encoder settings: the discriminator's, made narrower and shallower.

        As in the released code the head size stays, so the number of heads shrinks with the width.
        """
        d, g = self.encoder, self.generator
        hidden = _fraction_of(d.hidden_size, g.width, "hidden_size")
        heads = max(1, round(d.attention_heads * g.width))
        while hidden % heads:
            heads -= 1
        return dataclasses.replace(
            d,
            layers=_fraction_of(d.layers, g.depth, "layers"),
            hidden_size=hidden,
            ffn_size=_fraction_of(d.ffn_size, g.width, "ffn_size"),
            attention_heads=heads,
        )

    def check_sizes(self) -> None:
        """Refuse, before any of them is built, networks that cannot be: a fraction that gives the
        generator no whole sizes, a start that its width has no room for."""
        encoders = [self.encoder]
        if self.objective.kind != "mlm":
            own = self.generator_encoder
            encoders += [own] if self.generator.kind == "network" else []
        if self.encoder.init == "local":
            room_for_neighbours(encoders)

    def check_start(self, *, from_model: bool) -> None:
        """Refuse to start from new weights with a generator that would keep them."""
        if self.generator.frozen and not from_model:
            what = "A frozen generator has to be a trained one."
            fix = "give its run or export as --init"
            raise ElectraError(what, where="generator.frozen", fix=fix)

    @property
    def masked_slots(self) -> int:
        """M: the most positions that are chosen in one sequence (a static shape)."""
        n = self.data.sequence_length
        if self.objective.mask_count == "round":
            return max(1, int((self.objective.mask_percent / 100 + 0.005) * n))
        return -(-n * round(self.objective.mask_percent * 1000) // 100_000)  # as num_masked

    @property
    def switch_step(self) -> int | None:
        """Where two_stage changes from the generator to the discriminator."""
        return self.run.train_steps // 2 if self.objective.algorithm == "two_stage" else None

    @property
    def tokens_per_step(self) -> int:
        return self.data.batch_size * self.data.sequence_length


def room_for_neighbours(encoders: Iterable[EncoderConfig]) -> int:
    """Frequencies of positions for which all of them have channels, as encoder.init local wants.

    They may share position embeddings: the smallest one sets their form.
    """
    room = min(min(c.head_size // 2, c.embedding_size // 4, c.hidden_size // 4) for c in encoders)
    if room < 1:
        what = "The networks are too narrow to begin with the neighbours of a token."
        fix = "use encoder.init paper, or 2 channels a head and 4 of embeddings and states"
        raise ElectraError(what, where="encoder.init", fix=fix)
    return room


def _fraction_of(size: int, fraction: float, name: str) -> int:
    """size · fraction, which has to be whole; a rounded fraction such as 0.333 is read as 1/3."""
    exact = Fraction(fraction).limit_denominator(64) * size
    if exact < 1 or exact.denominator != 1:
        what = f"A generator fraction of {fraction} gives {name} {float(exact):g}."
        fits = [f"1/{n}" for n in (4, 2) if size % n == 0] or ["1"]
        fix = f"choose a fraction that divides {size}, such as {' or '.join(fits)}"
        raise ElectraError(what, where="generator.width, generator.depth", fix=fix)
    return int(exact)


# ------------------------------------------------------------------ fine-tuning


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig(Settings):
    """Fine-tuning (paper, table 7). What is not set follows from the model's size or the task."""

    learning_rate: Positive | None = None
    """Peak learning rate; default by size: 3e-4 small, 1e-4 base, 5e-5 large."""
    layer_decay: Positive | None = None
    """The rate of a layer is that of the layer above times this; default 0.8, large 0.9; 1 is
    off."""
    layer_levels: Literal["one_each", "released"] = "one_each"
    """one_each: head 0, top layer 1, and so on down. released: a level is missing between head and
    top layer, so every layer gets one decay more."""
    epochs: Positive | None = None
    """Passes over the training set; default by task: 10 for RTE and STS-B, 2 for SQuAD, else 3."""
    batch_size: Count = 32
    """Examples of a step."""
    warmup_percent: Percent = 10.0
    """Share of the steps over which the rate rises."""
    schedule: Literal["then", "times"] = "then"
    """then: warm-up, then linear decay. times: the decay runs from step 0 (released code)."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay; 0.01 in the released code."""
    max_grad_norm: Positive = 1.0
    """Clip of the global gradient norm."""
    bias_correction: bool = True
    """Correct Adam's moments for their zero start; the released code does not."""
    loss: Literal["mean", "sum"] = "mean"
    """How the losses of a batch are combined; the released code sums, so it nearly always clips."""
    dropout: Portion | None = None
    """Dropout of hidden states and of the head's input; default: what the model was pre-trained
    with. Dropout ruins a model pre-trained without it (docs/log.md)."""
    attention_dropout: Portion | None = None
    """Dropout of attention probabilities; default as above."""
    head: Literal["paper", "hf"] = "paper"
    """paper: a linear layer on [CLS], joint start and end for questions. hf: what transformers'
    classes have."""
    length: ShortLength | None = None
    """Tokens of an example at most; default by task: 128, tagging 256, SQuAD 512."""
    padding: Literal["bucketed", "dynamic", "full"] = "bucketed"
    """bucketed: examples of similar length share a batch. dynamic: random batches, padded to their
    longest. full: random batches of full length."""
    both_orders: bool | None = None
    """Train on (a, b) and (b, a); default by task: MRPC and STS-B."""
    max_train: Count | None = None
    """Use only the first examples of the training set."""
    seed: Seed = 0
    """First seed: of the head's start, the order and dropout."""
    seeds: Count = 1
    """Number of runs, with this seed and the ones that follow."""
    at_once: Count | None = None
    """Seeds that a GPU trains at the same time; default 5. They do not depend on each other."""
    keep: Literal["best", "all"] = "best"
    """Seeds whose weights are kept."""
    eval_every: Literal["epoch", "end"] | None = None
    """When the dev set is scored; default: after every epoch of your own data, at the end of GLUE
    and SQuAD. Training is the same to the last bit."""
    keep_epoch: Literal["last", "best"] = "last"
    """Epoch whose weights a seed keeps. best: the one with the highest dev score, of equal ones the
    first; that score is then optimistic."""
    patience: Count | None = None
    """With keep_epoch best: end a seed after so many epochs in a row without a better score."""
    license: License = "unknown"
    """Licence that the model card states."""
    save_every: Count | None = None
    """Steps between two checkpoints of a run under way; default: one a minute."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU when there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: bf16 on a GPU, fp32 on a CPU."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """Compile the encoder's block: half a minute that pays on a GPU for more than 15,000 steps."""
    deterministic: bool = False
    """Bit-equal repeats on a GPU as well; slower."""
    threads: Count | None = None
    """CPU threads; default: measured at the start, one or all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_epoch == "best" and self.eval_every == "end":
            what, fix = "The best epoch is not known if only the end is scored.", "use epoch"
            raise ElectraError(what, where="eval_every", fix=fix)
        if self.patience is not None and self.keep_epoch == "last":
            what = "Patience ends a seed after its best epoch, of which nothing would be kept."
            raise ElectraError(what, where="patience", fix="add --keep-epoch best")

    @property
    def optim(self) -> OptimConfig:
        """The optimizer's own settings."""
        return OptimConfig(
            learning_rate=self.learning_rate or 3e-4,
            warmup_percent=self.warmup_percent,
            schedule=self.schedule,
            bias_correction=self.bias_correction,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )


# ------------------------------------------------------------------ files and dictionaries

T = TypeVar("T")


def to_dict(config: Any) -> dict[str, Any]:
    """A settings object as plain JSON types."""
    return dataclasses.asdict(config)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim": {"beta1": 0.9}} as {"optim.beta1": 0.9}."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        result |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return result


def from_dict(cls: type[T], values: dict[str, Any], *, where: str, base: T | None = None) -> T:
    """Settings of class `cls` from nested dictionaries; keys that are missing come from `base`.

    Unknown keys and wrong types are refused, with the nearest name and the place.
    """
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    changed: dict[str, Any] = {}
    if "warmup_steps" in values and "warmup_percent" in names:
        changed["warmup_percent"] = None  # asked for in steps: a share from before would hide it
    for key, value in values.items():
        if key not in names:
            what = f"There is no setting {key!r}."
            raise ElectraError(what, where=where, fix=nearest(key, names))
        hint, place = hints[key], f"{where}: {key}"
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                what = f"{key} is a group of settings, not {value!r}."
                raise ElectraError(what, where=place, fix="use a table")
            inner = getattr(base, key) if base is not None else None
            changed[key] = from_dict(typing.cast(Any, hint), value, where=place, base=inner)
        else:
            changed[key] = _typed(value, hint, place)
    if base is not None:
        return dataclasses.replace(base, **changed)  # pyright: ignore[reportArgumentType]
    return cls(**changed)


def _typed(value: Any, hint: Any, where: str) -> Any:
    """`value` if it fits the annotation; integers pass as floats, nothing else is converted."""
    options = typing.get_args(hint) or (hint,)  # of a union, or the values of a Literal
    choices = [choice for option in options for choice in typing.get_args(option) or (option,)]
    if type(value) in choices or value in choices:  # a bool is no int here
        return value
    if type(value) is int and float in choices and abs(value) < 2**1023:
        return float(value)
    wanted = " or ".join(c.__name__ if isinstance(c, type) else repr(c) for c in choices)
    wanted = wanted.replace("NoneType", "None")
    raise ElectraError(f"{value!r} is not {wanted}.", where=where, fix="give a value of that type")


def read_settings_file(path: Path) -> dict[str, Any]:
    """The nested dictionary in a .toml or .json file."""
    kind, parse = ("JSON", json.loads) if path.suffix == ".json" else ("TOML", tomllib.loads)
    try:
        values = parse(path.read_bytes().decode())
    except OSError as error:
        what = f"The settings file cannot be read: {error.strerror}."
        raise ElectraError(what, where=str(path), fix="check the path") from error
    except (ValueError, RecursionError) as error:
        what, fix = f"The settings file is not valid {kind}.", "correct the line named above"
        raise ElectraError(what, where=f"{path}: {error}", fix=fix) from error
    if not isinstance(values, dict):
        what = "The settings file has to hold a table."
        raise ElectraError(what, where=str(path), fix="see docs/settings.md")
    return typing.cast(dict[str, Any], values)
