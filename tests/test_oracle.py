"""Google's own numbers: forward pass, losses, gradients, optimizer, masking and sampling.

The arrays in tests/oracle were produced by running the released TensorFlow code on a tiny model
(tests/oracle/README.md). Tolerances are a little above what a float64 re-implementation shows
against those float32 arrays; a wrong formula is off by a hundred times as much.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from electra.config import (
    DataConfig,
    EncoderConfig,
    GeneratorConfig,
    ObjectiveConfig,
    OptimConfig,
    PretrainConfig,
)
from electra.corruption import (
    Positions,
    choose_positions,
    mask_tokens,
    num_masked,
    proposal_logits,
    replace,
    resolve_duplicates,
    sample,
)
from electra.objectives import Batch, ReplacedTokenDetection, SpecialIds
from electra.optim import Adam, is_decayed, learning_rate
from electra.randomness import Purpose, StepRng

ORACLE = Path(__file__).parent / "oracle"
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
RELEASED = ObjectiveConfig(
    mask_count="round",
    mask_positions="with_replacement",
    duplicate_draws="average",
    mask_token_percent=85.0,
)
ENCODER = EncoderConfig(
    layers=3,
    hidden_size=20,
    ffn_size=44,
    attention_heads=2,
    embedding_size=12,
    max_positions=40,
    dropout=0.0,
    attention_dropout=0.0,
)
GENERATOR = EncoderConfig(
    layers=3,
    hidden_size=8,
    ffn_size=16,
    attention_heads=2,
    embedding_size=12,
    max_positions=40,
    dropout=0.0,
    attention_dropout=0.0,
)


class OracleConfig(PretrainConfig):
    """The oracle's generator has sizes that no fraction of its discriminator gives."""

    @property
    def generator_encoder(self) -> EncoderConfig:
        return GENERATOR


class FedRng(StepRng):
    """Draws that show [MASK] exactly where the oracle's input shows it."""

    def uniform(self, purpose: Purpose, columns: int) -> Tensor:
        assert purpose == Purpose.SHOWN
        return torch.where(self.rows == SPECIAL.mask, 0.0, 0.99)[:, :columns]


class FedObjective(ReplacedTokenDetection):
    """Replaced token detection with the oracle's positions and sampled tokens."""

    def __init__(self, arrays: dict[str, Tensor]) -> None:
        config = OracleConfig(
            encoder=ENCODER,
            generator=GeneratorConfig(width=0.4),
            objective=RELEASED,
            data=DataConfig(sequence_length=24, batch_size=3),
        )
        super().__init__(config, 97, SPECIAL)
        self.arrays = arrays
        mask = arrays["in/input_mask"]
        weights = arrays["in/masked_lm_weights"]
        x, segment = arrays["in/input_ids"].long(), arrays["in/segment_ids"].long()
        length = mask.sum(1).long()
        self.batch = Batch(x, segment, length, mask.sum().float(), weights.sum())
        at = arrays["in/masked_lm_positions"].long()
        self.m = Positions(at, weights > 0)
        shown = arrays["in/masked_input_ids"].gather(1, at)
        self.rng = FedRng(0, torch.zeros((), dtype=torch.int64), shown)
        weights_by_name = ours(load("weights.npz"))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(weights_by_name[name])

    def choose(self, batch: Batch, rng: StepRng) -> Positions:  # noqa: ARG002
        return self.m

    def sample(self, g: Tensor, m: Positions, batch: Batch, rng: StepRng, training: bool) -> Tensor:
        del g, batch, rng, training
        return resolve_duplicates(m, self.arrays["in/sampled_ids"].long(), self.config.objective)


@cache
def load(name: str) -> dict[str, Tensor]:
    with np.load(ORACLE / name) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def under(arrays: dict[str, Tensor], prefix: str, suffix: str = "") -> dict[str, Tensor]:
    return {
        key.removeprefix(prefix).removesuffix(suffix): value
        for key, value in arrays.items()
        if key.startswith(prefix) and key.endswith(suffix)
    }


def ours(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """TensorFlow's variables under our names and in our layout; every one has to be used."""
    left = dict(tensors)

    def dense(ours: str, *theirs: str) -> dict[str, Tensor]:
        return {
            f"{ours}.weight": torch.cat([left.pop(f"{t}/kernel").T for t in theirs]),
            f"{ours}.bias": torch.cat([left.pop(f"{t}/bias") for t in theirs]),
        }

    def norm(ours: str, theirs: str) -> dict[str, Tensor]:
        return {
            f"{ours}.weight": left.pop(f"{theirs}/gamma"),
            f"{ours}.bias": left.pop(f"{theirs}/beta"),
        }

    result = {
        f"discriminator.embeddings.{name}.weight": left.pop(f"electra/embeddings/{theirs}")
        for name, theirs in (
            ("word", "word_embeddings"),
            ("position", "position_embeddings"),
            ("segment", "token_type_embeddings"),
        )
    }
    result |= norm("discriminator.embeddings.norm", "electra/embeddings/LayerNorm")
    for network, scope in (("discriminator", "electra"), ("generator", "generator")):
        result |= dense(f"{network}.project", f"{scope}/embeddings_project")
        for i in range(3):
            block, layer = f"{network}.blocks.{i}", f"{scope}/encoder/layer_{i}"
            attention = f"{layer}/attention"
            parts = (f"{attention}/self/{part}" for part in ("query", "key", "value"))
            result |= dense(f"{block}.qkv", *parts)
            result |= dense(f"{block}.out", f"{attention}/output/dense")
            result |= norm(f"{block}.attention_norm", f"{attention}/output/LayerNorm")
            result |= dense(f"{block}.up", f"{layer}/intermediate/dense")
            result |= dense(f"{block}.down", f"{layer}/output/dense")
            result |= norm(f"{block}.ffn_norm", f"{layer}/output/LayerNorm")
    result |= dense("discriminator_head.dense", "discriminator_predictions/dense")
    result |= dense("discriminator_head.w", "discriminator_predictions/dense_1")
    result |= dense("generator_head.dense", "generator_predictions/dense")
    result |= norm("generator_head.norm", "generator_predictions/LayerNorm")
    result["generator_head.bias"] = left.pop("generator_predictions/output_bias")
    assert not left
    return result


def assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=0, atol=tolerance)


@pytest.fixture(params=["pretrain_forward.npz", "pretrain_forward_duplicates.npz"])
def objective(request: pytest.FixtureRequest) -> FedObjective:
    return FedObjective(load(request.param))


# ---------------------------------------------------------------------- the model


def test_corrupted_input_and_labels(objective: FedObjective) -> None:
    p = objective.predict(objective.batch, objective.rng)
    expected = objective.arrays
    assert torch.equal(p.x_masked, expected["in/masked_input_ids"].long())
    assert torch.equal(p.x_corrupt, expected["out/corrupted_ids"].long())
    labels = expected["out/disc_labels"].bool()
    assert torch.equal(p.x_corrupt != objective.batch.x, labels)
    assert labels.any()
    assert not labels.all()


def test_every_layer_of_both_networks(objective: FedObjective) -> None:
    seen: dict[str, list[Tensor]] = {}
    for prefix, encoder in (("gen", objective.generator), ("disc", objective.discriminator)):
        seen[prefix] = states = []
        encoder.blocks[0].register_forward_pre_hook(lambda _, given, s=states: s.append(given[0]))
        for block in encoder.blocks:
            block.register_forward_hook(lambda _, __, output, s=states: s.append(output))
    objective.predict(objective.batch, objective.rng)
    for prefix, states in seen.items():
        assert_near(states[0], objective.arrays[f"out/{prefix}_embedding_output"], 2e-6)
        assert_near(torch.stack(states[1:]), objective.arrays[f"out/{prefix}_all_layers"], 4e-6)


def test_logits_and_losses(objective: FedObjective) -> None:
    p = objective.predict(objective.batch, objective.rng)
    assert p.d is not None
    expected, batch, m = objective.arrays, objective.batch, objective.m
    assert_near(p.mlm_logits, expected["out/gen_logits"], 1e-5)
    assert_near(p.d, expected["out/disc_logits"], 1e-6)

    original = batch.x.gather(1, m.at)
    nll = F.cross_entropy(p.mlm_logits.flatten(0, 1), original.flatten(), reduction="none")
    # In unused slots the released code takes token 0 for the original.
    expected_nll = expected["out/mlm_per_position_loss"]
    assert_near(nll.view_as(original)[m.valid], expected_nll[m.valid], 4e-6)

    losses = objective(batch, objective.rng)
    assert_near(losses.mlm, expected["out/mlm_loss"], 4e-6)
    assert_near(losses.disc, expected["out/disc_loss"], 1e-6)
    # λ = 50 magnifies what the released code's 1e-6 in the denominator changes.
    assert_near(losses.total, expected["out/total_loss"], 1e-5)
    assert losses.replaced == expected["out/disc_labels"].sum()


def test_gradients(objective: FedObjective) -> None:
    objective(objective.batch, objective.rng).total.backward()
    grads = {name: p.grad for name, p in objective.named_parameters()}
    expected = ours(under(objective.arrays, "grad/"))
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert grad is not None
        assert_near(grad, expected[name], 1e-5)
    norm = torch.stack([g.norm() for g in grads.values() if g is not None]).norm()
    assert norm.item() == pytest.approx(float(objective.arrays["out/grad_global_norm"]), rel=1e-6)


# ---------------------------------------------------------------------- the optimizer


OPTIM = OptimConfig(
    learning_rate=5e-4, warmup_steps=3, schedule="times", bias_correction=False, epsilon=1e-6
)


def train(config: OptimConfig, steps: int) -> tuple[Adam, dict[str, list[float]]]:
    """`steps` steps on the oracle's batch, of a run of ten."""
    objective = FedObjective(load("pretrain_forward.npz"))
    optimizer = Adam(objective, config)
    log: dict[str, list[float]] = {"rates": [], "norms": [], "total": [], "mlm": [], "disc": []}
    for step in range(steps):
        losses = objective(objective.batch, objective.rng)
        optimizer.accumulate(torch.autograd.grad(losses.total, optimizer.parameters), first=True)
        rate = learning_rate(config, step, step / 10, 10)
        norm = optimizer.step(torch.tensor([rate]), torch.tensor(step))
        log["rates"].append(rate)
        log["norms"].append(norm.item())
        for key in ("total", "mlm", "disc"):
            log[key].append(getattr(losses, key).item())
    return optimizer, log


def test_five_steps_log_the_same_numbers() -> None:
    _, log = train(OPTIM, 5)
    expected = load("optimizer_trajectory.npz")
    assert log["rates"] == pytest.approx(expected["learning_rates"].tolist(), rel=1e-6)
    assert log["norms"] == pytest.approx(expected["grad_global_norms"].tolist(), rel=2e-6)
    assert log["total"] == pytest.approx(expected["total_losses"].tolist()[:5], rel=1e-6)
    assert log["mlm"] == pytest.approx(expected["mlm_losses"].tolist()[:5], rel=1e-6)
    assert log["disc"] == pytest.approx(expected["disc_losses"].tolist()[:5], rel=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_parameters_and_moments_after(steps: int) -> None:
    state = train(OPTIM, steps)[0].state()
    expected = load("optimizer_trajectory.npz")
    # The first step has a rate of zero: the moments move, the parameters do not.
    after = ours(load("weights.npz") if steps == 1 else under(expected, f"step{steps}/"))
    assert state["model"].keys() == after.keys()
    for name, parameter in state["model"].items():
        assert_near(parameter, after[name], 0 if steps == 1 else 5e-7)
    for key in ("m", "v") if steps != 2 else ():
        moments = ours(under(expected, f"slots_step{steps}/", f"/adam_{key}"))
        for name, moment in state[key].items():
            assert_near(moment, moments[name], {"m": 5e-8, "v": 2e-10}[key])


@pytest.mark.parametrize(
    ("wrong", "at_least"),
    [
        ({"bias_correction": True}, 1e-4),
        ({"weight_decay": 0.0}, 1.5e-6),
        ({"schedule": "then"}, 1e-4),
        ({"max_grad_norm": 1e9}, 1e-4),
        ({"epsilon": 1e-8}, 1e-4),
    ],
)
def test_other_readings_of_the_optimizer_stand_out(wrong: dict[str, Any], at_least: float) -> None:
    state = train(dataclasses.replace(OPTIM, **wrong), 2)[0].state()["model"]
    expected = ours(under(load("optimizer_trajectory.npz"), "step2/"))
    assert max(float((state[n] - expected[n]).abs().max()) for n in state) > at_least


def test_weight_decay_spares_what_the_released_code_spares() -> None:
    spared = {"LayerNorm", "layer_norm", "bias"}
    # A tensor of ours is one or three of theirs; each one knows whether its own name is spared.
    marks = {
        name: torch.full_like(value, float(any(part in name for part in spared)))
        for name, value in load("weights.npz").items()
    }
    for name, mark in ours(marks).items():
        assert bool(mark.all()) == bool(mark.any()) == (not is_decayed(name)), name


# ---------------------------------------------------------------------- masking and sampling


@pytest.mark.parametrize("percent", [15.0, 25.0])
def test_number_of_masked_positions(percent: float) -> None:
    arrays = load("num_to_predict.npz")
    config = PretrainConfig(
        objective=ObjectiveConfig(mask_percent=percent, mask_count="round"),
        data=DataConfig(sequence_length=128),
    )
    key = f"{percent / 100:.2f}"
    assert config.masked_slots == int(arrays[f"max_predictions_{key}"])
    k = num_masked(arrays["lengths"], config.masked_slots, config.objective)
    assert torch.equal(k, arrays[f"num_to_predict_{key}"].long())


def test_writing_tokens_back() -> None:
    arrays = {key: value.long() for key, value in load("scatter_gather.npz").items()}
    m = Positions(arrays["positions"], arrays["positions"] > 0)
    tokens = resolve_duplicates(m, arrays["updates"], RELEASED)
    assert torch.equal(replace(arrays["sequence"], m, tokens), arrays["updated"])
    assert torch.equal(arrays["sequence"].gather(1, m.at), arrays["gathered"])
    written = replace(torch.zeros_like(arrays["sequence"]), m, torch.ones_like(m.at))
    assert torch.equal(written, arrays["update_mask"])


def test_candidates_and_counts_of_the_masking() -> None:
    arrays = load("mask_draws.npz")
    x, length = arrays["input_ids"].long(), arrays["input_mask"].sum(1).long()
    config = PretrainConfig(objective=RELEASED, data=DataConfig(sequence_length=128))
    objective = ReplacedTokenDetection(config, 97, SPECIAL)
    counts = torch.ones(())
    batch = Batch(x, arrays["segment_ids"].long(), length, counts, counts)
    chosen = torch.zeros_like(x, dtype=torch.bool)
    for step in range(200):
        m = objective.choose(batch, StepRng(7, torch.tensor(step), torch.arange(4)))
        assert torch.equal(m.valid, arrays["masked_lm_weights"][step] > 0)
        chosen |= torch.zeros_like(chosen).scatter(1, m.at, m.valid)
    # 200 draws of at least 0.15 n positions leave no candidate out (chance below 1e-12).
    assert torch.equal(chosen, arrays["candidates_mask"])


def test_rates_of_the_masking() -> None:
    """[MASK] among positions drawn once, and repeated slots, within 4.5 standard deviations."""
    arrays = load("mask_draws.npz")
    x, length = arrays["input_ids"].long(), arrays["input_mask"].sum(1).long()
    theirs = Positions(
        arrays["masked_lm_positions"].long().flatten(0, 1),
        arrays["masked_lm_weights"].flatten(0, 1) > 0,
    )
    drawn, shown = [], []
    for step in range(200):
        rng = StepRng(3, torch.tensor(step), torch.arange(4))
        m = choose_positions(arrays["candidates_mask"], length, 19, RELEASED, rng)
        drawn.append(m)
        shown.append(mask_tokens(x, m, SPECIAL.mask, 97, RELEASED, rng))
    mine = Positions(torch.cat([m.at for m in drawn]), torch.cat([m.valid for m in drawn]))

    rate, repeats, count = masking_rates(mine, torch.cat(shown), x.repeat(200, 1))
    assert rate == pytest.approx(0.85, abs=4.5 * (0.85 * 0.15 / count) ** 0.5)
    their_rate, their_repeats, _ = masking_rates(
        theirs, arrays["masked_input_ids"].long().flatten(0, 1), x.repeat(200, 1)
    )
    assert their_rate == pytest.approx(0.85, abs=4.5 * (0.85 * 0.15 / count) ** 0.5)
    # About 8,300 slots of which 6.5 % repeat a position: a standard deviation of 0.003 each.
    assert repeats == pytest.approx(their_repeats, abs=4.5 * 0.003 * 2**0.5)
    assert 0.05 < repeats < 0.08


def masking_rates(m: Positions, shown: Tensor, x: Tensor) -> tuple[float, float, int]:
    """Share of [MASK] among positions drawn once, share of repeating slots, positions counted."""
    same = (m.at[:, :, None] == m.at[:, None, :]) & m.valid[:, None, :] & m.valid[:, :, None]
    once = m.valid & (same.sum(-1) == 1)
    now = shown.gather(1, m.at)
    assert ((now == SPECIAL.mask) | (now == x.gather(1, m.at)))[m.valid].all()
    is_repeat = torch.tril(same, -1).any(-1)
    rows = (m.valid.sum(1) > 2)[:, None]  # a row with one or two slots can hardly repeat
    rate = (now == SPECIAL.mask)[once].float().mean().item()
    return rate, (is_repeat & rows).sum().item() / (m.valid & rows).sum().item(), int(once.sum())


@pytest.mark.parametrize(
    ("name", "temperature", "disallow_correct"),
    [("plain", 1.0, False), ("temperature2", 2.0, False), ("disallow_correct", 1.0, True)],
)
def test_what_is_sampled_from(name: str, temperature: float, disallow_correct: bool) -> None:
    arrays = load("sampling.npz")
    original = arrays["masked_lm_ids"].long()
    logits = proposal_logits(arrays["logits"], original, temperature, disallow_correct)
    noise = -(-(arrays["uniform_noise"] + 1e-9).log() + 1e-9).log()
    sampled = arrays[f"sampled_{name}"].long()
    assert torch.equal((logits + noise).argmax(-1), sampled)
    assert not disallow_correct or not (sampled == original).any()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_samples_follow_the_softmax(temperature: float) -> None:
    """Chi-square of 50,000 samples per row, 18 rows with 96 degrees of freedom each."""
    logits = load("sampling.npz")["logits"].flatten(0, 1)  # (18, 97)
    logits = proposal_logits(logits, torch.zeros(18, dtype=torch.int64), temperature, False)
    n = 50_000
    rng = StepRng(11, torch.tensor(0), torch.arange(18))
    u = rng.uniform(Purpose.SAMPLE, n)
    tokens = torch.stack([sample(row.expand(n, -1), u_) for row, u_ in zip(logits, u, strict=True)])
    counts = torch.stack([row.bincount(minlength=97) for row in tokens]).double()
    expected = n * logits.double().softmax(-1)
    assert counts.shape == expected.shape
    common = expected >= 5  # the usual condition of the test
    chi = ((counts - expected) ** 2 / expected * common).sum()
    freedom = int(common.sum()) - 18
    # The chi-square of f degrees of freedom has mean f and variance 2 f.
    assert abs(chi.item() - freedom) < 4.5 * (2 * freedom) ** 0.5
