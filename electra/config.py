"""Settings of a pre-training run: frozen dataclasses, nothing else.

Comes in: a recipe (`recipes.py`), a TOML or JSON file, dotted values of the command line. Goes out:
one `PretrainConfig` that holds every number of the run and is stored whole in it. Field names are
those of the paper's hyper-parameter tables; the docstring under a field is its help on the command
line. No field is changed after construction and none is read with a default at the point of use.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, TypeVar

from .errors import ElectraError

Sharing = Literal["none", "embeddings", "all"]


def _require(condition: bool, what: str, where: str, fix: str) -> None:
    if not condition:
        raise ElectraError(what, where=where, fix=fix)


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The discriminator, or the one encoder of a BERT baseline."""

    layers: int = 12
    """Transformer layers."""
    hidden_size: int = 256
    """Width of the hidden states."""
    ffn_size: int = 1024
    """Width inside the feed-forward layers."""
    attention_heads: int = 4
    """Attention heads; their size is hidden_size / attention_heads."""
    embedding_size: int = 128
    """Width of the token embeddings; projected to hidden_size when the two differ."""
    max_positions: int = 512
    """Learned position embeddings, the longest sequence the model can ever read."""
    dropout: float = 0.1
    """Dropout on embeddings and on the output of both sub-layers."""
    attention_dropout: float = 0.1
    """Dropout on the attention probabilities."""
    layer_norm_eps: float = 1e-12
    """Epsilon inside the layer normalisation."""
    init: Literal["paper", "local"] = "paper"
    """paper: truncated normal 0.02. local: also lets the first attention heads start on the
    neighbouring tokens, which spares short runs the long plateau at token frequencies."""

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "hidden_size",
            "ffn_size",
            "attention_heads",
            "embedding_size",
            "max_positions",
        ):
            value = getattr(self, name)
            _require(value >= 1, f"{name} is {value}.", f"encoder.{name}", "use at least 1")
        _require(
            self.hidden_size % self.attention_heads == 0,
            f"hidden_size {self.hidden_size} is not a multiple of attention_heads "
            f"{self.attention_heads}.",
            "encoder.attention_heads",
            "choose a number of heads that divides hidden_size",
        )
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            _require(
                0.0 <= value < 1.0,
                f"{name} is {value}.",
                f"encoder.{name}",
                "use a probability from 0 to below 1",
            )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.attention_heads


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """The small masked language model that proposes replacements (paper, section 3.2)."""

    width: float = 0.25
    """Hidden size, feed-forward size and heads as a fraction of the discriminator's."""
    depth: float = 1.0
    """Layers of the generator as a fraction of the discriminator's."""
    sharing: Sharing = "embeddings"
    """Weights shared with the discriminator: none, embeddings (the whole embedding block) or all
    (needs width and depth 1)."""
    temperature: float = 1.0
    """Divides the generator's logits before sampling."""
    disallow_correct: bool = False
    """Never sample the original token."""

    def __post_init__(self) -> None:
        _require(
            self.width > 0 and self.depth > 0,
            f"generator width {self.width} and depth {self.depth} must be positive.",
            "generator.width, generator.depth",
            "use fractions such as 0.25 and 1.0",
        )
        _require(
            self.sharing != "all" or (self.width == 1 and self.depth == 1),
            "Sharing all weights needs a generator of the discriminator's size.",
            "generator.sharing",
            "set generator.width and generator.depth to 1, or share only the embeddings",
        )
        _require(
            self.temperature > 0,
            f"temperature is {self.temperature}.",
            "generator.temperature",
            "use a positive number; 1 samples from the generator as it is",
        )


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is minimised, and each point on which the paper and the released code differ."""

    kind: Literal["rtd", "mlm"] = "rtd"
    """rtd: replaced token detection. mlm: masked language modelling (BERT)."""
    disc_weight: float = 50.0
    """λ, the weight of the discriminator's loss."""
    gen_weight: float = 1.0
    """Weight of the generator's loss."""
    mask_percent: float = 15.0
    """Share of the tokens that is chosen for masking."""
    mask_count: Literal["ceil", "round"] = "ceil"
    """k of a sequence of n tokens: ceil(p n), or round(p n) with at most int((p + 0.005) T)."""
    mask_positions: Literal["distinct", "with_replacement"] = "distinct"
    """Positions are a set, or k independent draws in which a position can come up twice."""
    duplicate_draws: Literal["first", "average"] = "first"
    """A position drawn twice takes the first sample, or the integer mean of the sampled token ids
    (what the released code does)."""
    mask_token_percent: float = 100.0
    """Share of the chosen positions that shows [MASK]."""
    random_token_percent: float = 0.0
    """Share of the chosen positions that shows a random token; the rest keeps its own."""
    disc_head: Literal["dense", "linear"] = "dense"
    """dense: dense layer and GELU, then w. linear: sigmoid(w h), the paper's formula."""

    def __post_init__(self) -> None:
        _require(
            0 < self.mask_percent < 100,
            f"mask_percent is {self.mask_percent}.",
            "objective.mask_percent",
            "use a percentage above 0 and below 100; the paper uses 15, and 25 for large",
        )
        _require(
            self.mask_token_percent >= 0
            and self.random_token_percent >= 0
            and self.mask_token_percent + self.random_token_percent <= 100,
            f"mask_token_percent {self.mask_token_percent} and random_token_percent "
            f"{self.random_token_percent} do not fit into 100.",
            "objective.mask_token_percent",
            "use 100 and 0 (paper), 85 and 0 (released code) or 80 and 10 (BERT)",
        )
        for name in ("disc_weight", "gen_weight"):
            value = getattr(self, name)
            _require(
                0 <= value < math.inf, f"{name} is {value}.", f"objective.{name}", "use 0 or more"
            )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Adam and its schedule (paper, appendix A)."""

    learning_rate: float = 5e-4
    """Peak learning rate."""
    warmup_steps: int = 10_000
    """Steps of linear warm-up."""
    warmup_percent: float | None = None
    """Warm-up as a share of the whole run instead, for runs limited by minutes."""
    schedule: Literal["then", "times"] = "then"
    """then: warm-up, then linear decay to zero. times: the decay runs from step 0 and multiplies
    the warm-up (released code)."""
    bias_correction: bool = True
    """Correct Adam's moments for their zero start; the released code does not."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    epsilon: float = 1e-6
    """Adam's epsilon."""
    weight_decay: float = 0.01
    """Decoupled weight decay; layer norms and biases are excluded."""
    max_grad_norm: float = 1.0
    """Clip of the global gradient norm over generator and discriminator together."""

    def __post_init__(self) -> None:
        _require(
            self.learning_rate > 0,
            f"learning_rate is {self.learning_rate}.",
            "optim.learning_rate",
            "use a positive number such as 5e-4",
        )
        _require(
            self.warmup_steps >= 0
            and (self.warmup_percent is None or 0 <= self.warmup_percent <= 100),
            "The warm-up is outside the run.",
            "optim.warmup_steps, optim.warmup_percent",
            "use a number of steps, or a percentage from 0 to 100",
        )
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"{name} is {value}.", f"optim.{name}", "use 0.9 or 0.999")
        for name in ("epsilon", "max_grad_norm"):
            value = getattr(self, name)
            _require(value > 0, f"{name} is {value}.", f"optim.{name}", "use a positive number")
        _require(
            self.weight_decay >= 0,
            f"weight_decay is {self.weight_decay}.",
            "optim.weight_decay",
            "use 0 or a positive number such as 0.01",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Batches of a step."""

    sequence_length: int = 128
    """Tokens of a sequence; the corpus has to be prepared with the same length."""
    batch_size: int = 128
    """Sequences of one optimizer step over all processes: the global batch."""
    micro_batch: int | None = None
    """Sequences that go through the model at once on one process; smaller values save memory and
    give the same gradients. Default: all of the process's share."""
    on_device: Literal["auto", "yes", "no"] = "auto"
    """Keep the token array in GPU memory: auto does so when it takes less than a quarter of it."""

    def __post_init__(self) -> None:
        _require(
            self.sequence_length >= 8,
            f"sequence_length is {self.sequence_length}.",
            "data.sequence_length",
            "use at least 8",
        )
        _require(
            self.batch_size >= 1 and (self.micro_batch is None or self.micro_batch >= 1),
            "Batches need at least one sequence.",
            "data.batch_size, data.micro_batch",
            "use positive numbers",
        )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How long, how often, with what precision."""

    train_steps: int = 1_000_000
    """Optimizer steps of the whole run."""
    minutes: float | None = None
    """Wall-clock budget of training; the schedule follows whichever of steps and minutes ends
    first."""
    seed: int = 0
    """Seed of initialisation, order, masks, samples and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU when there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: bf16 on a GPU, fp32 on a CPU. bf16 on a CPU is probed in a child process first."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """torch.compile; auto compiles on a GPU only."""
    cuda_graph: Literal["auto", "yes", "no"] = "auto"
    """Record the whole step as one CUDA graph; auto does so on one GPU."""
    deterministic: bool = False
    """Bit-equal repeats on a GPU as well (a CPU gives them for equal run.threads); slower."""
    threads: int | None = None
    """CPU threads; default: measured at the start, one or all."""
    log_every: int = 50
    """Steps between two lines of metrics."""
    eval_every: int = 1000
    """Steps between two evaluations on held-out text."""
    eval_batches: int = 8
    """Batches of an evaluation."""
    save_every: int = 1000
    """Steps between two checkpoints."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    max_bad_steps: int = 3
    """Non-finite steps in a row that end the run, looked at every log_every steps; none of them
    reaches the weights."""

    def __post_init__(self) -> None:
        for name in (
            "train_steps",
            "threads",
            "log_every",
            "eval_every",
            "eval_batches",
            "save_every",
            "keep_checkpoints",
            "max_bad_steps",
        ):
            value = getattr(self, name)
            _require(
                value is None or value >= 1, f"{name} is {value}.", f"run.{name}", "use at least 1"
            )
        _require(0 <= self.seed < 2**32, f"seed is {self.seed}.", "run.seed", "use 0 to 4294967295")
        _require(
            self.minutes is None or self.minutes > 0,
            f"minutes is {self.minutes}.",
            "run.minutes",
            "use a positive number of minutes",
        )


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
        _require(
            self.data.sequence_length <= self.encoder.max_positions,
            f"sequence_length {self.data.sequence_length} is longer than max_positions "
            f"{self.encoder.max_positions}.",
            "data.sequence_length",
            "raise encoder.max_positions or shorten the sequences",
        )

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

    @property
    def masked_slots(self) -> int:
        """M: the most positions that are chosen in one sequence (a static shape)."""
        p, n = self.objective.mask_percent / 100, self.data.sequence_length
        if self.objective.mask_count == "round":
            return max(1, int((p + 0.005) * n))
        return math.ceil(round(p * n, 6))

    @property
    def tokens_per_step(self) -> int:
        return self.data.batch_size * self.data.sequence_length


def _fraction_of(size: int, fraction: float, name: str) -> int:
    """size · fraction where that is (nearly) whole; 1/3 is understood although 0.333 is not 1/3."""
    exact = Fraction(fraction).limit_denominator(64) * size
    result = round(float(exact))
    _require(
        result >= 1 and abs(float(exact) - result) < 1e-6,
        f"A generator fraction of {fraction} gives {name} {float(exact):g}.",
        "generator.width, generator.depth",
        f"choose a fraction that divides {size}, such as 1/4 or 1/2",
    )
    return result


# ------------------------------------------------------------------ fine-tuning


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Fine-tuning (paper, table 7). What is not set follows from the model's size or the task."""

    learning_rate: float | None = None
    """Peak learning rate; default by size: 3e-4 small, 1e-4 base, 5e-5 large."""
    layer_decay: float | None = None
    """The rate of a layer is that of the layer above times this; default 0.8, large 0.9; 1 is
    off."""
    layer_levels: Literal["one_each", "released"] = "one_each"
    """one_each: head 0, top layer 1, and so on down. released: a level is missing between head and
    top layer, so every layer gets one decay more."""
    epochs: float | None = None
    """Passes over the training set; default by task: 10 for RTE and STS-B, 2 for SQuAD, else 3."""
    batch_size: int = 32
    """Examples of a step."""
    warmup_percent: float = 10.0
    """Share of the steps over which the rate rises."""
    schedule: Literal["then", "times"] = "then"
    """then: warm-up, then linear decay. times: the decay runs from step 0 (released code)."""
    weight_decay: float = 0.0
    """Decoupled weight decay; 0.01 in the released code."""
    max_grad_norm: float = 1.0
    """Clip of the global gradient norm."""
    bias_correction: bool = True
    """Correct Adam's moments for their zero start; the released code does not."""
    loss: Literal["mean", "sum"] = "mean"
    """Of the examples of a batch; the released code sums, so that its clip is nearly always on."""
    dropout: float = 0.1
    """Dropout of hidden states and of the head's input."""
    attention_dropout: float = 0.1
    """Dropout of attention probabilities."""
    head: Literal["paper", "hf"] = "paper"
    """paper: a linear layer on [CLS], joint start and end for questions. hf: what transformers'
    classes have."""
    length: int | None = None
    """Tokens of an example at most; default by task: 128, tagging 256, SQuAD 512."""
    padding: Literal["bucketed", "dynamic", "full"] = "bucketed"
    """bucketed: examples of similar length share a batch. dynamic: random batches, padded to their
    longest. full: random batches of full length."""
    both_orders: bool | None = None
    """Train on (a, b) and (b, a); default by task: MRPC and STS-B."""
    max_train: int | None = None
    """Use only the first examples of the training set."""
    seed: int = 0
    """First seed: of the head's start, the order and dropout."""
    seeds: int = 1
    """Number of runs, with this seed and the ones that follow."""
    at_once: int | None = None
    """Seeds that a GPU trains at the same time; default 5. They do not depend on each other."""
    keep: Literal["best", "all"] = "best"
    """Whose weights are kept."""
    save_every: int | None = None
    """Steps between two checkpoints of a run under way; default: one a minute."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPU when there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: bf16 on a GPU, fp32 on a CPU."""
    compile: Literal["auto", "yes", "no"] = "auto"
    """Compile the encoder's block: half a minute that pays on a GPU for more than 15,000 steps."""
    deterministic: bool = False
    """Bit-equal repeats on a GPU as well; slower."""
    threads: int | None = None
    """CPU threads; default: measured at the start, one or all."""

    def __post_init__(self) -> None:
        for name in (
            *("batch_size", "seeds", "at_once", "length", "max_train", "save_every", "threads"),
        ):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"{name} is {value}.", name, "use at least 1")
        for name in ("learning_rate", "layer_decay", "epochs", "max_grad_norm"):
            value = getattr(self, name)
            _require(
                value is None or 0 < value < math.inf,
                f"{name} is {value}.",
                name,
                "use a positive number",
            )
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"{name} is {value}.", name, "use 0 or a part of 1")
        _require(
            0 <= self.warmup_percent <= 100 and 0 <= self.weight_decay < math.inf,
            f"warmup_percent is {self.warmup_percent}, weight_decay {self.weight_decay}.",
            "warmup_percent, weight_decay",
            "use a percentage from 0 to 100, and 0 or a small positive number",
        )
        _require(0 <= self.seed < 2**32, f"seed is {self.seed}.", "seed", "use 0 to 4294967295")

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


def from_dict(cls: type[T], values: dict[str, Any], *, where: str, base: T | None = None) -> T:
    """Settings of class `cls` from nested dictionaries; keys that are missing come from `base`.

    Unknown keys and wrong types are refused, with the nearest name and the place.
    """
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    changed: dict[str, Any] = {}
    for key, value in values.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
            raise ElectraError(
                f"There is no setting {key!r}.",
                where=where,
                fix=f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(names)}",
            )
        hint, place = hints[key], f"{where}: {key}"
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise ElectraError(
                    f"{key} is a group of settings, not {value!r}.", where=place, fix="use a table"
                )
            inner = getattr(base, key) if base is not None else None
            changed[key] = from_dict(typing.cast(Any, hint), value, where=place, base=inner)
        else:
            changed[key] = _typed(value, hint, place)
    if base is not None:
        return dataclasses.replace(base, **changed)  # pyright: ignore[reportArgumentType]
    return cls(**changed)


def _typed(value: Any, hint: Any, where: str) -> Any:
    """`value` if it fits the annotation; integers pass as floats, nothing else is converted."""
    origin = typing.get_origin(hint)
    options = typing.get_args(hint) if origin is types.UnionType else (hint,)
    for option in options:
        if option is type(None) and value is None:
            return None
        if typing.get_origin(option) is Literal and value in typing.get_args(option):
            return value
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if option is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if option in (bool, str) and isinstance(value, option):
            return value
    wanted = str(hint).replace("typing.", "") if origin else hint.__name__
    raise ElectraError(f"{value!r} is not {wanted}.", where=where, fix="give a value of that type")


def read_settings_file(path: Path) -> dict[str, Any]:
    """The nested dictionary in a .toml or .json file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ElectraError(
            f"The settings file cannot be read: {error.strerror}.",
            where=str(path),
            fix="check the path",
        ) from error
    try:
        text = content.decode()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ElectraError(
            f"The settings file is not valid {'JSON' if path.suffix == '.json' else 'TOML'}.",
            where=f"{path}: {error}",
            fix="correct the line named above",
        ) from error
    if not isinstance(values, dict):
        raise ElectraError(
            "The settings file has to hold a table.", where=str(path), fix="see docs/settings.md"
        )
    return typing.cast(dict[str, Any], values)
