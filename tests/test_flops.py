"""FLOPs: the published totals, the operations torch executes, and a slow count by shapes."""

from __future__ import annotations

import typing
from collections import Counter
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from electra import cli
from electra.config import EncoderConfig, ObjectiveConfig, PretrainConfig
from electra.flops import KINDS, _encoder, _heads, matmul_flops_per_token, paper_flops
from electra.objectives import Batch, SpecialIds, build_objective
from electra.randomness import StepRng
from electra.recipes import recipe

ALL_KINDS = typing.get_args(typing.get_type_hints(ObjectiveConfig)["kind"])
V = 101
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


def changed(config: PretrainConfig, **changes: Any) -> PretrainConfig:
    """`config` with section_field=value."""
    for path, value in changes.items():
        section, name = path.split("_", 1)
        group = replace(getattr(config, section), **{name: value})
        config = replace(config, **{section: group})
    return config


# ---------------------------------------------------------------------- what was published

# What the script released with the paper prints, and what the paper's tables say. Steps and batch
# are the script's; its BERT-Large is Google's own, 1M steps of 256 sequences.
PUBLISHED: list[tuple[str, dict[str, Any], float, str]] = [
    ("small", {}, 1.293743798272e18, "1.3e+18"),  # the paper: 1.4e18
    ("base", {}, 6.424541834277683e19, "6.4e+19"),
    ("large", {}, 7.117606040895488e20, "7.1e+20"),
    ("large-1.75m", {}, 3.113952642891776e21, "3.1e+21"),
    ("bert-small", {}, 1.4187399146496e18, "1.4e+18"),
    ("bert-base", {}, 6.428335104e19, "6.4e+19"),
    (
        "bert-large",
        {"data_batch_size": 256, "run_train_steps": 1_000_000},
        1.91720905883648e20,
        "1.9e+20",
    ),
]


@pytest.mark.parametrize(("name", "changes", "printed", "table"), PUBLISHED)
def test_totals_are_those_the_published_script_prints(
    name: str, changes: dict[str, Any], printed: float, table: str
) -> None:
    total = paper_flops(changed(recipe(name), **changes), 30_522)
    assert total == pytest.approx(printed, rel=1e-12)
    assert f"{total:.1e}" == table


def test_others_that_the_script_counts_come_out_as_well() -> None:
    roberta = changed(recipe("bert-large"), data_batch_size=8000)
    most = paper_flops(roberta, 50_265, 500_000)
    assert most == pytest.approx(3.187221435776e21, rel=1e-12)
    gpt = changed(recipe("bert-base"), data_batch_size=128)
    total = paper_flops(gpt, 40_000, 960_800, output_fraction=1)
    assert total == pytest.approx(3.968752230785352e19, rel=1e-12)
    # What the abstract says of compute, and the paper map repeats.
    assert round(total / paper_flops(recipe("small"), 30_522)) == 31
    shares = [paper_flops(recipe(name), 30_522) / most for name in ("large", "large-1.75m")]
    assert [round(share, 2) for share in shares] == [0.22, 0.98]
    albert = changed(
        recipe("bert-large"),
        encoder_layers=12,
        encoder_hidden_size=4096,
        encoder_ffn_size=4 * 4096,
        encoder_attention_heads=64,
        encoder_embedding_size=128,
        data_batch_size=4096,
    )
    total = paper_flops(albert, 30_000, 1_500_000)
    assert total == pytest.approx(3.113923955392512e22, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "length", "printed", "table"),
    [
        ("small", 128, 3_677_281_792, "3.7e+09"),
        ("base", 128, None, "2.9e+10"),
        ("base", 512, 122_298_857_472, None),
        ("large", 512, 370_347_667_456, None),
    ],
)
def test_so_does_inference_on_one_sequence(
    name: str, length: int, printed: int | None, table: str | None
) -> None:
    c = recipe(name).encoder
    parts = (*_encoder(c, length, 30_522), *_heads(c, "dense", 30_522)["replaced"])
    total = length * sum(parts)
    assert printed in (None, total)
    assert table in (None, f"{total:.1e}")


def test_what_the_docstring_says_of_the_rules_is_so() -> None:
    small, large = recipe("small"), recipe("large")
    total = paper_flops(small, 30_522)
    assert paper_flops(small, 30_522, dense_lookup=False) == pytest.approx(7.8e17, rel=5e-3)
    assert 1 - paper_flops(small, 30_522, dense_lookup=False) / total == pytest.approx(
        0.4, abs=5e-3
    )
    more = paper_flops(large, 30_522, output_fraction=0.25) / paper_flops(large, 30_522)
    assert more == pytest.approx(1.007, abs=1e-4)
    # The paper's own BERT-Large, made for equal compute with ELECTRA-400K: 7.1e20 in table 2.
    assert f"{paper_flops(recipe('bert-large'), 30_522):.1e}" == "7.1e+20"


def test_a_plan_shows_the_papers_flops(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "small", "--tokens-per-second", "1000000"]) == 0
    assert "1.29e+18" in capsys.readouterr().out


def test_flops_grow_with_the_steps() -> None:
    small = recipe("small")
    assert paper_flops(small, 30_522, 0) == 0
    quarter = paper_flops(small, 30_522, 250_000)
    assert 4 * quarter == pytest.approx(paper_flops(small, 30_522), rel=1e-12)


# ---------------------------------------------------------------------- what torch executes

SHAPES: list[dict[str, Any]] = [
    {},
    {"objective_disc_head": "linear"},
    {"generator_sharing": "none", "generator_width": 1.0},
    {"generator_width": 1.0, "generator_depth": 1.0, "generator_sharing": "all"},
    {"encoder_embedding_size": 20},  # no projection in the discriminator
    {"encoder_embedding_size": 10, "objective_mask_percent": 40.0},  # none in the generator
    {"objective_mask_count": "round", "objective_mask_positions": "with_replacement"},
    {"data_sequence_length": 29, "encoder_layers": 4, "encoder_attention_heads": 5},
]


def executed(
    config: PretrainConfig, *, padded: bool, backward: bool = True, stage: Any = None
) -> int:
    """Products that torch does in one forward and backward pass of the real objective."""
    B, T = 3, config.data.sequence_length
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(5, V, (B, T), generator=draw)
    length = torch.tensor([T, T - 4, 8] if padded else [T] * B)
    x[torch.arange(T) >= length[:, None]] = SPECIAL.pad
    tokens = length.sum().float()
    batch = Batch(x, torch.zeros_like(x), length, tokens, 0.15 * tokens)
    objective = build_objective(config, V, SPECIAL, padded=padded)
    objective.stage = stage or objective.stage
    with FlopCounterMode(display=False) as counter:
        losses = objective(batch, StepRng(0, torch.tensor(0), torch.arange(B)))
        if backward:
            losses.total.backward()
    return counter.get_total_flops()


def counted(config: PretrainConfig) -> float:
    return matmul_flops_per_token(config, V) * 3 * config.data.sequence_length


def repeated(config: PretrainConfig) -> int:
    """Logits over the vocabulary that are computed more than once, in three sequences."""
    E, T = config.encoder.embedding_size, config.data.sequence_length
    D, G = config.encoder.hidden_size, config.generator_encoder.hidden_size
    if config.objective.kind == "all_tokens_mlm":  # not kept for the gradient
        return 3 * T * 2 * E * (D + V)
    if config.objective.kind == "electric":  # the same; for q of x_corrupt; for the samples
        return 3 * (2 * T + config.masked_slots) * 2 * E * (2 * G + V)
    return 0


def possible(kind: str, changes: dict[str, Any]) -> bool:
    return kind != "electric" or changes.get("generator_sharing") != "all"


CASES = [(kind, changes) for kind in ALL_KINDS for changes in SHAPES if possible(kind, changes)]


def test_every_objective_has_its_row() -> None:
    assert set(KINDS) == set(ALL_KINDS)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_matrix_products_are_those_that_torch_executes(
    micro: PretrainConfig, kind: str, changes: dict[str, Any], padded: bool
) -> None:
    config = changed(micro, objective_kind=kind, **changes)
    with sdpa_kernel(SDPBackend.MATH):  # torch's counter sees through no fused attention on a CPU
        seen = executed(config, padded=padded) - repeated(config)
    assert seen == pytest.approx(counted(config), rel=1e-12)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_matrix_products_of_attention_with_dropout_are_counted_too(
    micro: PretrainConfig, kind: str
) -> None:
    config = changed(micro, objective_kind=kind, encoder_dropout=0.1, encoder_attention_dropout=0.1)
    seen = executed(config, padded=True) - repeated(config)
    assert seen == pytest.approx(counted(config), rel=1e-12)


@pytest.mark.parametrize(
    "changes",
    [{"generator_sharing": "none", "generator_frozen": True}, {"generator_kind": "unigram"}],
)
def test_a_generator_that_does_not_learn_costs_no_backward_pass(
    micro: PretrainConfig, changes: dict[str, Any]
) -> None:
    config = changed(micro, **changes)
    with sdpa_kernel(SDPBackend.MATH):
        assert executed(config, padded=False) == pytest.approx(counted(config), rel=1e-12)
    assert counted(config) < counted(changed(micro, generator_sharing="none"))


def test_two_stages_cost_the_mean_of_both(micro: PretrainConfig) -> None:
    joint = changed(micro, generator_sharing="none", generator_width=1.0, generator_depth=1.0)
    staged = changed(joint, objective_algorithm="two_stage")
    frozen = counted(changed(joint, generator_frozen=True))
    first = counted(changed(micro, objective_kind="mlm"))  # the generator is as large
    assert counted(staged) == pytest.approx((first + frozen) / 2, rel=1e-12)
    with sdpa_kernel(SDPBackend.MATH):
        seen = [executed(staged, padded=False, stage=s) for s in ("generator", "discriminator")]
    assert counted(staged) == pytest.approx(sum(seen) / 2, rel=1e-12)


def test_of_adversarial_training_only_the_logit_of_its_baseline_is_not_counted(
    micro: PretrainConfig,
) -> None:
    config = changed(micro, objective_algorithm="adversarial")
    with sdpa_kernel(SDPBackend.MATH):
        seen = executed(config, padded=False)
    # One number from a state, and the gradient of its weights: nothing goes on into the state.
    baseline = 3 * config.masked_slots * 2 * config.generator_encoder.hidden_size * 2
    assert seen == pytest.approx(counted(config) + baseline, rel=1e-12)


def test_fused_attention_hides_from_torch_exactly_the_products_of_attention(
    micro: PretrainConfig,
) -> None:
    T = micro.data.sequence_length
    encoders = (micro.encoder, micro.generator_encoder)
    scores_and_average = sum(2 * 2 * T * T * c.hidden_size * c.layers for c in encoders)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        seen = executed(micro, padded=False)
    assert seen == pytest.approx(counted(micro) - 3 * 3 * scores_and_average, rel=1e-12)


# ---------------------------------------------------------------------- a slow count by shapes

Shape = tuple[int, ...]


class Transcript:
    """Walks one sequence through the networks, operation by operation, and keeps count."""

    def __init__(self, config: PretrainConfig, rows: int) -> None:
        self.config, self.rows = config, rows  # rows: positions that reach the vocabulary
        self.products = self.other = self.words = 0
        self.elements = Counter[str]()
        getattr(self, config.objective.kind)()

    def rtd(self) -> None:
        self.vocabulary(self.encoder(self.config.generator_encoder), self.config.encoder)
        self.replaced(self.encoder(self.config.encoder))

    def mlm(self) -> None:
        self.vocabulary(self.encoder(self.config.encoder), self.config.encoder)

    def replace_mlm(self) -> None:
        self.vocabulary(self.encoder(self.config.generator_encoder), self.config.encoder)
        self.vocabulary(self.encoder(self.config.encoder), self.config.encoder)

    def all_tokens_mlm(self) -> None:
        self.vocabulary(self.encoder(self.config.generator_encoder), self.config.encoder)
        h = self.encoder(self.config.encoder)
        self.replaced(h)
        self.rows = h[0]
        self.vocabulary(h, self.config.encoder)

    def electric(self) -> None:
        T, D = self.encoder(self.config.generator_encoder)
        assert self.encoder(self.config.generator_encoder) == (T, D)
        self.rows = T
        self.vocabulary((T, 2 * D), self.config.encoder)
        self.replaced(self.encoder(self.config.encoder))

    def product(self, a: Shape, b: Shape) -> Shape:
        (n, k), (k_, m) = a, b
        assert k == k_
        self.products += 2 * n * k * m
        return n, m

    def each(self, shape: Shape, cost: int, name: str = "") -> None:
        n, m = shape
        self.other += cost * n * m
        self.elements[name] += n * m

    def linear(self, a: Shape, size: int) -> Shape:
        out = self.product(a, (a[1], size))
        self.each(out, 1)  # bias
        return out

    def encoder(self, c: EncoderConfig) -> Shape:
        T, E = self.config.data.sequence_length, c.embedding_size
        h = (T, E)
        self.words += 2 * T * V * E  # (T, V) one-hot @ (V, E)
        self.other += 2 * T * T * E  # (T, T) one-hot positions @ (T, E)
        self.other += 2 * T * 2 * E  # (T, 2) one-hot segments @ (2, E)
        self.each(h, 1)  # + position
        self.each(h, 1)  # + segment
        self.each(h, 5, "layer norm")
        self.each(h, 4, "dropout")
        if c.hidden_size != E:
            h = self.linear(h, c.hidden_size)
        for _ in range(c.layers):
            h = self.block(h, c)
        return h

    def block(self, h: Shape, c: EncoderConfig) -> Shape:
        T = h[0]
        for _ in range(c.attention_heads):
            q = k = v = (T, c.head_size)
            for part in (q, k, v):
                assert self.linear(h, c.head_size) == part
            score = self.product(q, (k[1], k[0]))
            self.each(score, 1)  # / sqrt(K)
            self.each(score, 5, "softmax")
            self.each(score, 4, "dropout")
            assert self.product(score, v) == q
        a = self.linear(h, c.hidden_size)
        self.each(a, 4, "dropout")
        self.each(a, 1)  # residual
        self.each((T, 1), 5)  # layer norm, by the paper's script once per token
        f = self.linear(a, c.ffn_size)
        self.each(f, 8, "GELU")
        o = self.linear(f, c.hidden_size)
        self.each(o, 4, "dropout")
        self.each(o, 1)  # residual
        self.each(o, 5, "layer norm")
        return o

    def vocabulary(self, h: Shape, table: EncoderConfig) -> None:
        e = self.linear((self.rows, h[1]), table.embedding_size)
        self.each(e, 8, "GELU")
        self.each(e, 5, "layer norm")
        logits = self.product(e, (e[1], V))
        self.each(logits, 5, "softmax")
        self.each(logits, 2)  # product with the one-hot target

    def replaced(self, h: Shape) -> None:
        if self.config.objective.disc_head == "dense":
            h = self.linear(h, h[1])
            self.each(h, 8, "GELU")
        self.product(h, (h[1], 1))


class Elements(TorchDispatchMode):
    """How many elements come out of what the paper's rule has a price for."""

    NAMES: ClassVar[dict[Any, str]] = {
        torch.ops.aten.gelu.default: "GELU",
        torch.ops.aten.native_layer_norm.default: "layer norm",
        torch.ops.aten._softmax.default: "softmax",
        torch.ops.aten._log_softmax.default: "softmax",
    }

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if name := self.NAMES.get(func):
            self.seen[name] += (result[0] if isinstance(result, tuple) else result).numel()
        return result


@pytest.mark.parametrize("kind", ["rtd", "mlm", "replace_mlm"])
@pytest.mark.parametrize("changes", SHAPES)
def test_the_slow_count_has_the_elements_that_torch_executes(
    micro: PretrainConfig, monkeypatch: pytest.MonkeyPatch, kind: str, changes: dict[str, Any]
) -> None:
    config = changed(micro, objective_kind=kind, encoder_dropout=0.1, encoder_attention_dropout=0.1)
    config = changed(config, **changes)
    drop, dropped = StepRng.dropout, Counter[str]()

    def counted_drop(self: StepRng, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        dropped["dropout"] += x.numel()
        return drop(self, x, *rest)

    monkeypatch.setattr(StepRng, "dropout", counted_drop)
    with Elements() as torchs:
        executed(config, padded=False, backward=False)
    slow, T = Transcript(config, config.masked_slots), config.data.sequence_length
    expected = {n: 3 * slow.elements[n] for n in ("GELU", "layer norm", "softmax", "dropout")}
    # The norm after attention, which the script counts once per token, is not in them.
    encoders = [config.encoder] + [config.generator_encoder] * (kind != "mlm")
    expected["layer norm"] += 3 * sum(c.layers * T * c.hidden_size for c in encoders)
    assert torchs.seen + dropped == expected


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_both_rules_equal_the_slow_count(
    micro: PretrainConfig, kind: str, changes: dict[str, Any]
) -> None:
    config = changed(micro, objective_kind=kind, **changes)
    T, B, steps = config.data.sequence_length, config.data.batch_size, 11
    slow = Transcript(config, config.masked_slots)
    assert matmul_flops_per_token(config, V) == pytest.approx(3 * slow.products / T, rel=1e-12)

    def total(*, dense: bool) -> float:
        share = config.masked_slots / T
        return paper_flops(config, V, steps, dense_lookup=dense, output_fraction=share)

    sparse = 2 * B * steps * (slow.products + slow.other)
    assert total(dense=False) == pytest.approx(sparse, rel=1e-12)
    assert total(dense=True) == pytest.approx(sparse + 2 * B * steps * slow.words, rel=1e-12)
