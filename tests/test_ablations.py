"""Every objective and training algorithm of the paper, against loops, limits and enumeration."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from conftest import LENGTHS, B, V, batch_of, built, gradients, rng, settings
from safetensors.torch import load_file
from scipy.stats import chisquare
from test_cli import MICRO
from test_pretrain import assert_same_run, metrics, stop_after, with_run
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from electra import cli, objectives
from electra import pretrain as loop
from electra.config import GeneratorConfig, ObjectiveConfig, PretrainConfig
from electra.data.corpus import Corpus
from electra.encoder import GeneratorHead
from electra.errors import ElectraError, Stopped
from electra.evaluate import token_counts
from electra.formats import hf, hf_export
from electra.objectives import Batch, Corruption, MaskedLM, Objective
from electra.optim import Adam, added
from electra.pretrain import pretrain
from electra.randomness import Purpose, StepRng
from electra.rundir import load_run
from electra.studies.plan import count_parameters

# Every kind of objective, as changes to the settings.
KINDS: dict[str, dict[str, Any]] = {
    "rtd": {},
    "masked": {"objective_disc_positions": "masked"},
    "other": {"objective_disc_positions": "other"},
    "random": {"objective_disc_positions": "random"},
    "uniform": {"generator_kind": "uniform"},
    "unigram": {"generator_kind": "unigram"},
    "disallow": {"generator_disallow_correct": True},
    "temperature": {"generator_temperature": 2.0, "generator_temperature_steps": 5},
    "disentangled": {"generator_sharing": "disentangled"},
    "frozen": {"generator_sharing": "none", "generator_frozen": True},
    "adversarial": {"objective_algorithm": "adversarial"},
    "two_stage": {
        "objective_algorithm": "two_stage",
        "generator_sharing": "none",
        "generator_width": 1.0,
        "generator_depth": 1.0,
    },
    "mlm": {"objective_kind": "mlm"},
    "bert": {
        "objective_kind": "mlm",
        "objective_mask_token_percent": 80.0,
        "objective_random_token_percent": 10.0,
    },
    "replace_mlm": {"objective_kind": "replace_mlm"},
    "all_tokens_mlm": {"objective_kind": "all_tokens_mlm"},
    "electric": {"objective_kind": "electric"},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def stirred(config: PretrainConfig, vocab_size: int = V, **options: Any) -> Any:
    """In float64, with weights large enough that every part of the networks matters."""
    objective = built(config, vocab_size, **options).double()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    return objective


def corrupted(objective: Any, batch: Batch, step: int = 0) -> Corruption:
    """What the step of the same number sees."""
    return objective.corrupt(batch, rng(len(batch.x), step), training=True)


def force(objective: Any, monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    """The generator samples nothing but this."""
    monkeypatch.setattr(objective, "sample", lambda _, m, *__: torch.full_like(m.at, token))


# ---------------------------------------------------------------------- losses against loops


class Slow:
    """The networks of an objective by NumPy, one sequence without its padding at a time."""

    def __init__(self, objective: Any, batch: Batch) -> None:
        self.objective, self.length = objective, batch.length.tolist()
        self.x, self.segment = batch.x.numpy(), batch.segment.numpy()
        self.weights = {n: t.detach().numpy() for n, t in objective.state_dict().items()}
        if objective.config.generator.sharing == "disentangled":
            for name in ("word", "position", "segment"):
                table = f"discriminator.embeddings.{name}.weight"
                self.weights[table] = self.weights[table] + self.weights[f"generator{table[13:]}"]

    def part(self, name: str) -> dict[str, np.ndarray]:
        prefix = f"{name}."
        return {n[len(prefix) :]: w for n, w in self.weights.items() if n.startswith(prefix)}

    def states(self, name: str, b: int, x: np.ndarray, sees: np.ndarray | None = None) -> Any:
        """(n, D) of x (n,), which takes the place of row b."""
        n = self.length[b]
        sees = np.ones((n, n), dtype=bool) if sees is None else sees
        K = self.objective.get_submodule(name).config.head_size
        return reference.encode(self.part(name), x[:n], self.segment[b, :n], sees, K)

    def words(self, name: str, head: str, h: np.ndarray) -> np.ndarray:
        """(n, V) log-probabilities."""
        table = self.weights[f"{name}.embeddings.word.weight"]
        return reference.vocabulary_log_probabilities(self.part(head), h, table)

    def mlm(self, name: str, head: str, at: Any, shown: np.ndarray) -> float:
        """−log p(x_t | shown), summed over the places (b, t)."""
        rows = sorted({b for b, _ in at})
        log_p = {b: self.words(name, head, self.states(name, b, shown[b])) for b in rows}
        return -math.fsum(log_p[b][t, self.x[b, t]] for b, t in at)

    def d(self, x_corrupt: np.ndarray) -> np.ndarray:
        """(B, T) logits of replaced, NaN on padding."""
        d = np.full(x_corrupt.shape, np.nan)
        for b, n in enumerate(self.length):
            h = self.states("discriminator", b, x_corrupt[b])
            d[b, :n] = reference.detector_logits(self.part("discriminator_head"), h)
        return d


def places(at: Tensor, valid: Tensor) -> list[tuple[int, int]]:
    return [(b, int(t)) for b in range(len(at)) for t in at[b][valid[b]]]


def all_places(batch: Batch) -> list[tuple[int, int]]:
    return [(b, t) for b, n in enumerate(batch.length.tolist()) for t in range(n)]


@pytest.mark.parametrize("which", ["all", "masked", "other", "random"])
@pytest.mark.parametrize("sharing", ["embeddings", "disentangled"])
def test_detection_is_that_of_the_loops_on_every_choice_of_positions(
    which: str, sharing: str
) -> None:
    config = settings(objective_disc_positions=which, generator_sharing=sharing)
    objective, batch = stirred(config), batch_of(config)
    k, slow = corrupted(objective, batch), Slow(objective, batch)
    losses = objective(batch, rng())
    masked = places(k.m.at, k.m.valid)
    scored, count = objective.scored(k.m, batch, rng())
    chosen = [(b, t) for b, t in all_places(batch) if scored[b, t]]
    if which == "all":
        assert chosen == all_places(batch)
        assert float(count) == sum(LENGTHS)
    elif which == "masked":
        assert chosen == sorted(masked)
    else:
        assert all(int(batch.x[place]) > 4 for place in chosen)
        assert set(chosen) != set(masked)
        per_row = [sum(b == row for b, _ in masked) for row in range(B)]
        # The short rows have fewer than that left.
        taken = per_row if which == "other" else [0] * B
        left = [max(0, n - 2 - k) for n, k in zip(LENGTHS, taken, strict=True)]
        wanted = [min(n, k) for n, k in zip(left, per_row, strict=True)]
        assert [sum(b == row for b, _ in chosen) for row in range(B)] == wanted
        assert bool(set(chosen) & set(masked)) == (which == "random")
    x_corrupt = k.x_corrupt.numpy()
    assert {(b, t) for b, t in all_places(batch) if slow.x[b, t] != x_corrupt[b, t]} <= set(masked)
    d = slow.d(x_corrupt)
    disc = reference.disc_loss_at(d, slow.x, x_corrupt, chosen)
    disc /= sum(LENGTHS) if which == "all" else len(masked)
    mlm = slow.mlm("generator", "generator_head", masked, k.x_masked.numpy()) / len(masked)
    assert float(losses.disc) == pytest.approx(disc, rel=1e-6)
    assert float(losses.mlm) == pytest.approx(mlm, rel=1e-6)
    assert float(losses.total.detach()) == pytest.approx(mlm + 50 * disc, rel=1e-6)
    right = sum((d[place] > 0) == (x_corrupt[place] != slow.x[place]) for place in chosen)
    assert (int(losses.disc_correct), int(losses.scored)) == (right, len(chosen))


@pytest.mark.parametrize(
    "kind", ["rtd", "uniform", "unigram", "disallow", "temperature", "frozen", "two_stage"]
)
def test_samples_of_every_generator_and_the_loss_on_them_are_those_of_the_loops(kind: str) -> None:
    config, step = settings(**KINDS[kind]), 3
    counts = torch.arange(V).double() ** 2
    objective, batch = stirred(config, frequencies=counts), batch_of(config)
    objective.stage = "discriminator" if kind == "two_stage" else objective.stage
    k, slow = corrupted(objective, batch, step), Slow(objective, batch)
    x_corrupt, shown = k.x_corrupt.numpy(), k.x_masked.numpy()
    u = rng(step=step).uniform(Purpose.SAMPLE, k.m.at.shape[1])
    for b, slot in k.m.valid.nonzero().tolist():
        t = int(k.m.at[b, slot])
        if kind in ("uniform", "unigram"):
            logits = np.log(np.maximum(counts.numpy() if kind == "unigram" else np.ones(V), 1e-300))
        else:
            h = slow.states("generator", b, shown[b])[t : t + 1]
            logits = slow.words("generator", "generator_head", h)[0]
        if kind == "temperature":
            logits = logits / (1 + math.exp(-step / 5))  # 2 at first
        if kind == "disallow":
            logits[slow.x[b, t]] = -math.inf
        # On a border between two tokens rounding may decide either way.
        at = [min(max(float(u[b, slot]) + e, 0.0), 1.0) for e in (-2e-6, 0, 2e-6)]
        assert x_corrupt[b, t] in {reference.inverse_cdf(logits.tolist(), each) for each in at}
    losses, masked = objective(batch, rng(step=step)), places(k.m.at, k.m.valid)
    mlm = 0.0
    if objective.generator is not None:
        mlm = slow.mlm("generator", "generator_head", masked, shown) / len(masked)
    disc = reference.disc_loss_at(slow.d(x_corrupt), slow.x, x_corrupt, all_places(batch))
    disc /= sum(LENGTHS)
    learns = kind in ("rtd", "disallow", "temperature")
    assert float(losses.mlm) == pytest.approx(mlm, rel=1e-6)
    assert float(losses.disc) == pytest.approx(disc, rel=1e-6)
    assert float(losses.total.detach()) == pytest.approx(mlm * learns + 50 * disc, rel=1e-6)
    if kind == "two_stage":
        objective.stage = "generator"
        first = objective(batch, rng(step=step))
        assert float(first.total.detach()) == pytest.approx(mlm, rel=1e-6)


def test_replace_mlm_is_that_of_the_loops() -> None:
    config = settings(objective_kind="replace_mlm")
    objective, batch = stirred(config), batch_of(config)
    k, slow = corrupted(objective, batch), Slow(objective, batch)
    losses = objective(batch, rng())
    at = places(k.m.at, k.m.valid)
    mlm = slow.mlm("generator", "generator_head", at, k.x_masked.numpy()) / len(at)
    main = slow.mlm("discriminator", "main_head", at, k.x_corrupt.numpy()) / len(at)
    assert float(losses.disc) == pytest.approx(main, rel=1e-6)
    assert float(losses.total.detach()) == pytest.approx(mlm + 50 * main, rel=1e-6)
    assert int(losses.scored) == len(at)


@pytest.mark.parametrize(
    ("gate", "unlikely"),
    [(0, 0), (40, 0), (-40, 0), (900, 0), (-900, 0), (900, 1500), (-900, 1500), (1500, 900)],
)
def test_all_tokens_mlm_is_that_of_the_loops(gate: float, unlikely: float) -> None:
    """Also where D or 1 − D is no float64 any more, or the softmax's share, or both at once."""
    config = settings(objective_kind="all_tokens_mlm")
    objective, batch = stirred(config), batch_of(config)
    with torch.no_grad():
        objective.discriminator_head.w.bias += gate
        objective.main_head.bias[5:] -= unlikely
    k, slow = corrupted(objective, batch), Slow(objective, batch)
    x_corrupt = k.x_corrupt.numpy()
    d, terms = slow.d(x_corrupt), []
    for b, n in enumerate(LENGTHS):
        h = slow.states("discriminator", b, x_corrupt[b])
        log_p = slow.words("discriminator", "main_head", h)
        for t in range(n):
            same = bool(slow.x[b, t] == x_corrupt[b, t])
            terms.append(reference.copy_gate_nll(d[b, t], log_p[t, slow.x[b, t]], same))
    losses = objective(batch, rng())
    assert float(losses.disc) == pytest.approx(math.fsum(terms) / sum(LENGTHS), rel=1e-6)
    grads = gradients(objective, losses.total)
    assert all(torch.isfinite(g).all() for g in grads.values())


def slow_log_q(slow: Slow, b: int, x: np.ndarray, t: int) -> np.ndarray:
    """(V,) log q(. | t): one tower has read what is before t, the other what is behind it."""
    n = slow.length[b]
    D = slow.objective.generator.config.hidden_size
    before, after = np.zeros(D), np.zeros(D)
    at = np.arange(n)
    if t > 0:
        sees = at[None, :] <= at[:, None]
        unread = np.where(at < t, x[:n], 77)
        before = slow.states("generator.left", b, unread, sees)[t - 1]
    if t < n - 1:
        sees = at[None, :] >= at[:, None]
        unread = np.where(at > t, x[:n], 77)
        after = slow.states("generator.right", b, unread, sees)[t + 1]
    both = np.concatenate([before, after])[None]
    return slow.words("generator.left", "generator_head", both)[0]


def test_electric_is_that_of_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample counts as noise, also where it is the original: the first of each row is."""
    config = settings(objective_kind="electric", encoder_layers=1)
    lengths = (9, 7, 3)  # every row is padded, or the last token has no right neighbour
    config = replace(config, data=replace(config.data, sequence_length=9))
    objective, batch = stirred(config), batch_of(config, lengths)
    drawn = objective.sample

    def lucky(g: Tensor, m: Any, *rest: Any) -> Tensor:
        first = torch.arange(m.at.shape[1]) == 0
        return torch.where(first, batch.x.gather(1, m.at), drawn(g, m, *rest))

    monkeypatch.setattr(objective, "sample", lucky)
    k, slow = corrupted(objective, batch), Slow(objective, batch)
    x_corrupt, masked = k.x_corrupt.numpy(), places(k.m.at, k.m.valid)
    assert 0 < (x_corrupt != slow.x).sum() == len(masked) - len(lengths)
    p = config.objective.mask_percent / 100
    energy, nll, expected = slow.d(x_corrupt), [], np.zeros(x_corrupt.shape)
    for b, t in all_places(batch):
        log_q = slow_log_q(slow, b, slow.x[b], t)  # the towers read x, which x_t is not part of
        expected[b, t] = energy[b, t] + log_q[x_corrupt[b, t]] + math.log(p / (1 - p))
        if slow.x[b, t] > 4:
            nll.append(-log_q[slow.x[b, t]])
    with torch.no_grad():
        d, replaced = objective.predict(batch, rng(3), training=False)[-2:]
    assert {place for place in all_places(batch) if replaced[place]} == set(masked)
    for place in all_places(batch):
        assert float(d[place]) == pytest.approx(expected[place], rel=1e-6, abs=1e-6), place
    losses = objective(batch, rng(3))
    signs = {place: 1 if place in masked else -1 for place in all_places(batch)}
    terms = [math.log(1 + math.exp(-signs[place] * expected[place])) for place in signs]
    disc = math.fsum(terms) / sum(lengths)
    right = sum(signs[place] * expected[place] > 0 for place in signs)
    assert (int(losses.disc_correct), int(losses.replaced)) == (right, len(masked) - len(lengths))
    assert float(losses.disc) == pytest.approx(disc, rel=1e-6)
    total = 50 * disc + math.fsum(nll) / sum(lengths)
    assert float(losses.total.detach()) == pytest.approx(total, rel=1e-6)


def test_the_two_towers_do_not_see_the_token_they_speak_of() -> None:
    objective = stirred(settings(objective_kind="electric"))
    batch = batch_of(objective.config)
    mask = objective.attention_mask(batch)
    before = objective.generator(batch.x, batch.segment, mask, None)
    for t in range(1, 18):
        x = batch.x.clone()
        x[:, t] = 5 + (x[:, t] + 41) % (V - 5)
        after = objective.generator(x, batch.segment, mask, None)
        assert torch.equal(after[:, t], before[:, t])
        assert not torch.equal(after[0, t - 1], before[0, t - 1])  # of the neighbours it is told
        assert not torch.equal(after[0, t + 1], before[0, t + 1])


def test_the_adversarial_loss_and_its_baseline_are_those_of_the_loops() -> None:
    config = settings(objective_algorithm="adversarial", generator_sharing="none")
    objective, batch = stirred(config), batch_of(config)
    k, slow = corrupted(objective, batch), Slow(objective, batch)
    x_corrupt, at = k.x_corrupt.numpy(), places(k.m.at, k.m.valid)
    d, terms = slow.d(x_corrupt), []
    shown = k.x_masked.numpy()
    for b, t in at:
        h = slow.states("generator", b, shown[b])[t : t + 1]
        log_p = slow.words("generator", "generator_head", h)[0, x_corrupt[b, t]]
        truth = 1 / (1 + math.exp(d[b, t] if x_corrupt[b, t] == slow.x[b, t] else -d[b, t]))
        believed = 1 / (1 + math.exp(-float(reference.linear(slow.weights, "baseline", h)[0, 0])))
        surprise = -truth * math.log(believed) - (1 - truth) * math.log(1 - believed)
        terms.append(surprise - (math.log(believed) - math.log(truth)) * log_p)
    losses = objective(batch, rng())
    disc = reference.disc_loss_at(d, slow.x, x_corrupt, all_places(batch)) / sum(LENGTHS)
    mlm = slow.mlm("generator", "generator_head", at, shown) / len(at)
    assert float(losses.total.detach()) == pytest.approx(
        math.fsum(terms) / len(at) + 50 * disc, rel=1e-6
    )
    assert float(losses.mlm) == pytest.approx(mlm, rel=1e-6)  # for comparison, not minimised


@pytest.mark.parametrize("kind", ["mlm", "bert"])
def test_masked_language_modelling_is_that_of_the_loops(kind: str) -> None:
    config = settings(**KINDS[kind])
    objective, batch = stirred(config), batch_of(config)
    p, slow = objective.predict(batch, rng(), training=True), Slow(objective, batch)
    at, shown = places(p.m.at, p.m.valid), p.x_masked.numpy()
    mlm = slow.mlm("generator", "generator_head", at, shown) / len(at)
    assert float(objective(batch, rng()).total.detach()) == pytest.approx(mlm, rel=1e-6)
    unmasked = set(all_places(batch)) - set(at)
    assert all(shown[place] == slow.x[place] for place in unmasked)


def test_bert_shows_eighty_ten_ten() -> None:
    config = settings(**KINDS["bert"])
    objective, batch = built(config), batch_of(config, (19,) * 64)
    shares = np.zeros(3)
    for step in range(20):
        p = objective.predict(batch, rng(64, step), training=False)
        shown, x = (z.gather(1, p.m.at)[p.m.valid] for z in (p.x_masked, batch.x))
        kinds = (shown == 4, (shown != 4) & (shown != x), shown == x)
        shares += [float(kind.sum()) for kind in kinds]
    # A random token is the original, or [MASK], once in V times.
    expected = np.array([80 + 10 / V, 10 - 20 / V, 10 + 10 / V]) / 100
    assert chisquare(shares, expected * shares.sum()).pvalue > 1e-3


@every_kind
def test_micro_batches_add_up_and_padding_says_nothing(kind: str) -> None:
    config = settings(**KINDS[kind])
    objective, batch = stirred(config), batch_of(config)
    whole = objective(batch, rng())
    expected = gradients(objective, whole.total)
    x = torch.where(objective.attention_mask(batch), batch.x, 77)
    summed = {name: torch.zeros_like(g) for name, g in expected.items()}
    totals = torch.zeros(len(whole), dtype=torch.float64)
    for rows in (slice(0, 2), slice(2, 5)):
        part = Batch(x[rows], batch.segment[rows], batch.length[rows], *batch[3:])
        losses = objective(part, rng()._replace(rows=torch.arange(B)[rows]))
        totals += torch.stack([term.detach().double() for term in losses])
        for name, g in gradients(objective, losses.total).items():
            summed[name] += g
    torch.testing.assert_close(totals, torch.stack([t.detach().double() for t in whole]))
    for name, g in expected.items():
        torch.testing.assert_close(summed[name], g, rtol=1e-6, atol=1e-9)


@every_kind
def test_no_two_places_share_their_dropout(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sites: list[int] = []
    original = StepRng.dropout

    def watched(self: StepRng, x: Tensor, p: float, site: int) -> Tensor:
        sites.append(site)
        return original(self, x, p, site)

    monkeypatch.setattr(StepRng, "dropout", watched)
    config = settings(**KINDS[kind], encoder_dropout=0.2, encoder_attention_dropout=0.2)
    built(config)(batch_of(config), rng())
    assert len(sites) == len(set(sites))
    assert sites


# ---------------------------------------------------------------------- who learns from what

KEPT = {"discriminator", "discriminator tables"}
GENERATOR = {"generator", "generator tables", "generator_head"}
LEARNERS: dict[str, tuple[set[str], set[str]]] = {  # kind: what each of the two losses reaches
    "rtd": (KEPT | {"discriminator_head"}, GENERATOR),
    "masked": (KEPT | {"discriminator_head"}, GENERATOR),
    "other": (KEPT | {"discriminator_head"}, GENERATOR),
    "random": (KEPT | {"discriminator_head"}, GENERATOR),
    "uniform": (KEPT | {"discriminator_head"}, set()),
    "unigram": (KEPT | {"discriminator_head"}, set()),
    "disallow": (KEPT | {"discriminator_head"}, GENERATOR),
    "temperature": (KEPT | {"discriminator_head"}, GENERATOR),
    "adversarial": (KEPT | {"discriminator_head"}, GENERATOR | {"baseline"}),
    "disentangled": (KEPT | {"discriminator_head"}, GENERATOR),
    "frozen": (KEPT | {"discriminator_head"}, set()),
    "mlm": (set(), GENERATOR),
    "bert": (set(), GENERATOR),
    "replace_mlm": (KEPT | {"main_head"}, GENERATOR),
    "all_tokens_mlm": (KEPT | {"main_head", "discriminator_head"}, GENERATOR),
    "electric": (KEPT | {"discriminator_head"}, GENERATOR),
}


def learners(objective: Objective, total: Tensor) -> set[str]:
    """Modules with a gradient; each has one for all of its parameters, or for none."""
    reached: dict[str, set[bool]] = {}
    if total.requires_grad:
        for name, g in gradients(objective, total).items():
            module = name.split(".")[0] + " tables" * (".embeddings." in name)
            reached.setdefault(module, set()).add(bool(g.any()))
    assert all(len(values) == 1 for values in reached.values()), reached
    return {module for module, values in reached.items() if True in values}


def test_every_kind_is_looked_at() -> None:
    assert set(LEARNERS) == set(KINDS) - {"two_stage"}  # whose stages are looked at below


SHARINGS = {s: {"generator_sharing": s} for s in ("none", "embeddings", "disentangled")}
SHARINGS["all"] = {"generator_sharing": "all", "generator_width": 1.0, "generator_depth": 1.0}


@pytest.mark.parametrize("kind", [*KINDS, *SHARINGS])
def test_the_generator_can_learn_before_the_other_network_is_computed(kind: str) -> None:
    config = settings(**(KINDS | SHARINGS)[kind])
    objective, batch = stirred(config), batch_of(config)
    parameters = dict(objective.named_parameters())
    if not getattr(objective, "generator_is_first", False):
        two = {"adversarial", "electric"}  # its reward, or its own q, is of both networks
        assert kind in two or objective.stage != "joint" or isinstance(objective, MaskedLM)
        return
    whole = objective(batch, rng())
    expected = torch.autograd.grad(whole.total, list(parameters.values()))
    k, mlm, correct = objective.generate_alone(batch, rng())
    weighted = config.objective.gen_weight * mlm
    first = torch.autograd.grad(weighted, list(parameters.values()), allow_unused=True)
    losses = objective.learn(k, mlm.detach(), correct, batch, rng())
    second = torch.autograd.grad(losses.total, list(parameters.values()), allow_unused=True)
    for name, a, b in zip(whole._fields, losses, whole, strict=True):
        assert float(a.detach()) == float(b.detach()), name
    own = objective.generators_own()
    for name, b in zip(parameters, second, strict=True):
        assert name not in own or b is None, name  # the second pass leaves the generator alone
    for got, right in zip(added(first, second), expected, strict=True):
        assert (got - right).abs().max() <= 1e-13 * right.abs().max()


@pytest.mark.parametrize("kind", LEARNERS)
def test_each_loss_reaches_its_own_modules_and_no_others(kind: str) -> None:
    changes = {"generator_sharing": "none"} | KINDS[kind]
    for kept in (True, False):
        weight = {"objective_gen_weight" if kept else "objective_disc_weight": 0.0}
        objective = stirred(settings(**changes, **weight))
        total = objective(batch_of(objective.config), rng()).total
        assert learners(objective, total) == LEARNERS[kind][not kept], weight


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("generator", GENERATOR),
        ("discriminator", KEPT | {"discriminator_head"}),
        ("joint", GENERATOR | KEPT | {"discriminator_head"}),
    ],
)
def test_a_stage_trains_one_network_and_names_the_other(stage: str, expected: set[str]) -> None:
    objective = stirred(settings(generator_sharing="none"))
    objective.stage = stage
    total = objective(batch_of(objective.config), rng()).total
    assert learners(objective, total) == expected
    k = corrupted(objective, batch_of(objective.config))
    assert k.g.requires_grad == (stage != "discriminator")  # nothing is kept for a backward pass
    moving = {name for name, _ in objective.named_parameters()} - objective.idle()
    assert {n.split(".")[0] + " tables" * (".embeddings." in n) for n in moving} == expected


def test_what_is_detected_has_no_gradient_in_the_generator() -> None:
    """Neither through the samples nor, in Electric, through log q."""
    for kind in ("rtd", "electric", "adversarial"):
        objective = stirred(settings(**KINDS[kind], generator_sharing="none"))
        d = objective.predict(batch_of(objective.config), rng(), training=True).d
        assert learners(objective, d.sum()) == KEPT | {"discriminator_head"}


def test_shared_tables_learn_as_the_sharing_says() -> None:
    """Joint: from both losses. Disentangled: the generator's from its own loss alone."""
    for sharing, from_disc, from_gen in (
        ("embeddings", {"discriminator"}, {"discriminator"}),
        ("disentangled", {"discriminator"}, {"generator"}),
    ):
        for weight, expected in (("gen_weight", from_disc), ("disc_weight", from_gen)):
            changes = {f"objective_{weight}": 0.0}
            objective = stirred(settings(generator_sharing=sharing, **changes))
            grads = gradients(objective, objective(batch_of(objective.config), rng()).total)
            tables = [name for name in grads if ".embeddings." in name]
            assert {n.split(".")[0] for n in tables if grads[n].any()} == expected


def test_disentangled_tables_begin_as_the_generators_and_move_with_them() -> None:
    objective = built(settings(generator_sharing="disentangled"))
    own, base = objective.discriminator.embeddings, objective.generator.embeddings
    with torch.no_grad():
        base.word.weight += 1.0
    for name in ("word", "position", "segment"):
        assert torch.equal(own.table(name), getattr(base, name).weight)
        assert not getattr(own, name).weight.any()


def test_reinforce_expects_the_gradient_of_the_expected_reward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One masked position and seven tokens: every sample can be tried, weighted by its p."""
    words = 7
    config = settings(
        objective_algorithm="adversarial",
        objective_mask_percent=15.0,
        objective_disc_weight=0.0,
        generator_sharing="none",
        data_sequence_length=8,
    )
    objective = stirred(config, words)
    batch = batch_of(config, (5,), vocab_size=words)
    k = corrupted(objective, batch)
    assert k.m.valid.tolist() == [[True, False]]
    p = k.g[0, 0].softmax(-1)
    rewards, expected = [], {n: torch.zeros_like(w) for n, w in objective.named_parameters()}
    for token in range(words):
        force(objective, monkeypatch, token)
        forced = corrupted(objective, batch)
        assert int(forced.x_corrupt[0, k.m.at[0, 0]]) == token
        each = objective.main_loss(forced, batch, rng(1)).each.detach()
        rewards.append(float(each[0, k.m.at[0, 0]]))
        for name, g in gradients(objective, objective(batch, rng(1)).total).items():
            expected[name] += p[token].detach() * g
    direct = gradients(objective, -(p * torch.tensor(rewards, dtype=p.dtype)).sum())
    spread = max(float(g.abs().max()) for g in direct.values())
    assert spread > 1e-2
    for name, g in direct.items():
        if name.startswith("generator"):
            torch.testing.assert_close(expected[name], g, rtol=1e-5, atol=1e-6 * spread)
        elif not name.startswith("baseline"):
            assert not expected[name].any(), name


def test_the_baseline_learns_the_truth_and_nobody_learns_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Samples that do not depend on the generator leave nothing but the baseline's own loss."""
    config = settings(objective_algorithm="adversarial", objective_disc_weight=0.0)
    objective, batch = stirred(config), batch_of(config)
    monkeypatch.setattr(objective, "proposal_logits", lambda g, *_: torch.zeros_like(g))
    grads = gradients(objective, objective(batch, rng()).total)
    assert {name for name, g in grads.items() if g.any()} == {"baseline.weight", "baseline.bias"}
    k = corrupted(objective, batch)
    reward = objective.main_loss(k, batch, rng()).each.gather(1, k.m.at)[k.m.valid].detach()

    def wrong() -> Tensor:
        z = objective.baseline(k.h[k.m.valid]).squeeze(-1).sigmoid()
        return -(torch.exp(-reward) * z.log() + (1 - torch.exp(-reward)) * (1 - z).log()).mean()

    direct = gradients(objective, wrong())
    torch.testing.assert_close(grads["baseline.weight"], direct["baseline.weight"])
    torch.testing.assert_close(grads["baseline.bias"], direct["baseline.bias"])


# ---------------------------------------------------------------------- limits


@pytest.mark.parametrize("kind", ["rtd", "adversarial", "electric", "all_tokens_mlm"])
def test_at_temperature_zero_the_sample_is_the_best_guess(kind: str) -> None:
    objective = stirred(settings(**KINDS[kind], generator_temperature=1e-9))
    batch = batch_of(objective.config)
    for step in range(3):
        k = corrupted(objective, batch, step)
        assert torch.equal(k.x_hat[k.m.valid], k.g.argmax(-1)[k.m.valid])


def test_a_falling_temperature_begins_at_its_value_and_tends_to_one() -> None:
    config = settings(generator_temperature=3.0, generator_temperature_steps=10)
    objective, batch = stirred(config), batch_of(config)
    k = corrupted(objective, batch)

    def at(step: int) -> float:
        logits = objective.proposal_logits(k.g, k.m, batch, rng(step=step))
        ratio = (k.g.float() / logits).detach()
        assert float(ratio.std()) < 1e-5
        return float(ratio.median())

    assert at(0) == pytest.approx(3.0)
    assert at(10) == pytest.approx(1 + 2 / math.e)
    assert at(300) == pytest.approx(1.0)


def test_a_copy_gate_that_is_shut_leaves_plain_cross_entropy() -> None:
    config = settings(objective_kind="all_tokens_mlm")
    objective, batch = stirred(config), batch_of(config)
    head = objective.discriminator_head.w
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(1e4)
    k, token = corrupted(objective, batch), objective.attention_mask(batch)
    h = objective.discriminator(k.x_corrupt, batch.segment, token, None)
    table = objective.discriminator.embeddings.table("word")
    plain = F.cross_entropy(objective.main_head(h[token], table), batch.x[token])
    shut = objective(batch, rng())
    torch.testing.assert_close(shut.disc, plain.detach())
    (ours,) = torch.autograd.grad(shut.total, [objective.main_head.dense.weight])
    (theirs,) = torch.autograd.grad(50 * plain, [objective.main_head.dense.weight])
    torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        head.bias.fill_(-1e4)  # open: what is unchanged is copied, which costs nothing
    each = objective.main_loss(k, batch, rng()).each
    same = k.x_corrupt == batch.x
    assert not each[token & same].any()
    assert (each[token & ~same] >= 1e4).all()


def test_replace_mlm_that_is_shown_masks_is_masked_language_modelling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replacing = stirred(settings(objective_kind="replace_mlm"))
    masking = stirred(settings(objective_kind="mlm"))
    masking.generator.load_state_dict(replacing.discriminator.state_dict())
    masking.generator_head.load_state_dict(replacing.main_head.state_dict())
    batch = batch_of(masking.config)
    assert float(replacing(batch, rng()).disc) != pytest.approx(float(masking(batch, rng()).mlm))
    force(replacing, monkeypatch, masking.special.mask)
    torch.testing.assert_close(replacing(batch, rng()).disc, masking(batch, rng()).mlm)


def test_when_all_is_masked_the_masked_positions_are_all() -> None:
    changes = {"objective_mask_percent": 99.9}
    some = stirred(settings(**changes, objective_disc_positions="masked"))
    every = stirred(settings(**changes))
    batch = batch_of(some.config)
    k = corrupted(some, batch)
    scored, count = some.scored(k.m, batch, rng())
    assert torch.equal(scored, some.candidates(batch))
    each = every.main_loss(corrupted(every, batch), batch, rng()).each
    expected = each[every.candidates(batch)].sum() / count
    torch.testing.assert_close(some(batch, rng()).disc, expected.detach())


def test_when_all_is_masked_and_the_gate_is_shut_all_tokens_mlm_is_replace_mlm() -> None:
    every = stirred(settings(objective_kind="all_tokens_mlm", objective_mask_percent=99.9))
    some = stirred(settings(objective_kind="replace_mlm", objective_mask_percent=99.9))
    some.load_state_dict({n: t for n, t in every.state_dict().items() if n in some.state_dict()})
    batch = batch_of(some.config)
    k = corrupted(every, batch)
    assert torch.equal(k.x_corrupt, corrupted(some, batch).x_corrupt)

    def mean_over_masked() -> Tensor:
        each = every.main_loss(k, batch, rng()).each
        return each[every.candidates(batch)].sum() / batch.masked

    open_gate = mean_over_masked()
    with torch.no_grad():
        every.discriminator_head.w.bias.fill_(1e4)
    replaced = some.main_loss(k, batch, rng()).loss
    torch.testing.assert_close(mean_over_masked(), replaced)
    assert float(open_gate.detach()) != pytest.approx(float(replaced.detach()), rel=1e-3)


def test_unigram_with_equal_frequencies_is_uniform() -> None:
    config = settings(generator_kind="unigram")
    unigram = stirred(config, frequencies=torch.full((V,), 17.0))
    uniform = stirred(settings(generator_kind="uniform"))
    batch = batch_of(config)
    for step in range(3):
        a, b = corrupted(unigram, batch, step), corrupted(uniform, batch, step)
        assert torch.equal(a.x_corrupt, b.x_corrupt)
        assert (a.x_corrupt != batch.x).any()
    assert torch.equal(unigram(batch, rng()).total, uniform(batch, rng()).total)


# ---------------------------------------------------------------------- tokens without a network


def test_the_unigram_generator_draws_as_often_as_the_corpus_has_it(corpus: Corpus) -> None:
    special = tuple(corpus.special_ids.values())
    counts = token_counts(corpus.train, special, corpus.vocab_size)
    config = settings(generator_kind="unigram")
    objective = built_for(config, corpus, frequencies=torch.from_numpy(counts))
    batch = batch_of(config, (19,) * 256, vocab_size=corpus.vocab_size)
    drawn = np.zeros(corpus.vocab_size)
    for step in range(30):
        k = corrupted(objective, batch, step)
        drawn += np.bincount(k.x_hat[k.m.valid].numpy(), minlength=corpus.vocab_size)
    assert drawn.sum() == 30 * 256 * 6
    assert not drawn[counts == 0].any()
    expected = counts / counts.sum() * drawn.sum()
    used = expected > 5
    assert used.sum() > 30
    rest = [values[~used].sum() for values in (drawn, expected)]
    enough = int(rest[1] > 5)
    seen, wanted = (
        np.append(values[used], [left] * enough)
        for values, left in zip((drawn, expected), rest, strict=True)
    )
    assert chisquare(seen, wanted * seen.sum() / wanted.sum()).pvalue > 1e-3


def built_for(config: PretrainConfig, corpus: Corpus, **options: Any) -> Any:
    special = objectives.SpecialIds(**corpus.special_ids)
    return objectives.build_objective(config, corpus.vocab_size, special, **options)


def test_a_run_takes_the_frequencies_from_its_corpus(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def watched(*args: Any, **kwargs: Any) -> Objective:
        made.append(objectives.build_objective(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(loop, "build_objective", watched)
    config = replace(micro, generator=GeneratorConfig(kind="unigram"))
    pretrain(with_run(config, train_steps=1), corpus, tmp_path, quiet=True)
    counts = np.zeros(corpus.vocab_size)
    for row in range(len(corpus.train)):
        ids, _, lengths = corpus.train.gather(np.array([row]))
        for token in ids[0][: int(lengths[0])]:
            counts[int(token)] += int(token) not in corpus.special_ids.values()
    proposal = made[0].proposal.double().numpy()
    np.testing.assert_allclose(proposal, counts / counts.sum(), rtol=1e-6)


# ---------------------------------------------------------------------- the vocabulary in parts


@pytest.mark.parametrize("size", [1, 7, 32, 53, 4096])
def test_log_softmax_in_parts_is_that_of_the_whole(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objectives, "POSITIONS_AT_ONCE", size)
    config = settings().encoder
    head, table = GeneratorHead(config, V).double(), nn.Embedding(V, config.embedding_size)
    table = table.double().weight
    draw = torch.Generator().manual_seed(4)
    h = torch.randn(53, config.hidden_size, generator=draw, dtype=torch.float64) * 9
    h.requires_grad_()
    targets = torch.randint(V, (53, 3), generator=draw)
    weight = torch.randn(53, 3, generator=draw, dtype=torch.float64)
    ours = objectives.log_softmax_at(head, h, table, targets)
    direct = head(h, table).log_softmax(-1).gather(1, targets)
    torch.testing.assert_close(ours, direct)
    inputs = [h, table, *head.parameters()]
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((direct * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


class Sizes(TorchDispatchMode):
    """The most rows of V columns that any tensor has while this is on."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.rows = vocab_size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.shape[-1:] == (self.vocab_size,):
                self.rows = max(self.rows, tensor.numel() // self.vocab_size)
        return result


@pytest.mark.parametrize("kind", ["all_tokens_mlm", "electric"])
def test_no_more_logits_live_at_once_than_one_part_has(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, backward and kept for it: memory has no term in length times vocabulary."""
    monkeypatch.setattr(objectives, "POSITIONS_AT_ONCE", 32)
    words, kept = 1009, {}
    for length in (61, 122):
        config = settings(
            **KINDS[kind],
            objective_mask_percent=1.0,
            encoder_layers=1,
            encoder_max_positions=122,
            data_sequence_length=length,
        )
        objective = built(config, words)
        batch = batch_of(config, (length,) * 3, vocab_size=words)
        held: list[int] = []

        def keep(tensor: Tensor, held: list[int] = held) -> Tensor:
            if tensor.shape[-1:] == (words,):
                held.append(tensor.numel())
            return tensor

        with Sizes(words) as sizes:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                total = objective(batch, rng(3)).total
            torch.autograd.grad(total, list(objective.parameters()))
        assert sizes.rows == 32
        kept[length] = sum(held)
    # What is kept over the vocabulary belongs to the few masked positions and to the tables.
    assert kept[122] <= 2 * kept[61] < 61 * words


def test_memory_of_all_tokens_mlm_grows_with_the_length_as_that_of_detection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Measured, bytes alive at once in a step: linearly, and by nothing for the vocabulary."""
    words, lengths = 5003, (64, 128, 256)

    def growth(kind: str, at_once: int = 32) -> list[int]:
        monkeypatch.setattr(objectives, "POSITIONS_AT_ONCE", at_once)
        peaks = []
        for length in lengths:
            config = settings(
                objective_kind=kind,
                objective_mask_percent=1.0,
                encoder_max_positions=256,
                data_sequence_length=length,
            )
            objective = built(config, words)
            batch = batch_of(config, (length,) * 3, vocab_size=words)
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                objective(batch, rng(3)).total.backward()
            seen.export_chrome_trace(str(tmp_path / "trace.json"))
            events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
            events = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
            peaks.append(max(accumulate(e["args"]["Bytes"] for e in events)))
        return [after - before for before, after in pairwise(peaks)]

    ours, detection = growth("all_tokens_mlm"), growth("rtd")
    assert ours[1] == pytest.approx(2 * ours[0], rel=0.25)
    assert ours[1] < 1.2 * detection[1]
    logits = 3 * (lengths[2] - lengths[1]) * words * 4
    assert ours[1] < logits < growth("all_tokens_mlm", at_once=10_000)[1]


# ---------------------------------------------------------------------- two stages


@pytest.fixture
def two_stage(micro: PretrainConfig) -> PretrainConfig:
    """Changes over at step 6 of 12; every step is logged and saved."""
    config = replace(
        micro,
        generator=GeneratorConfig(width=1.0, sharing="none"),
        objective=ObjectiveConfig(algorithm="two_stage"),
    )
    return with_run(config, train_steps=12, save_every=1, keep_checkpoints=12, eval_every=4)


def weights_at(run: Path, step: int) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def unlike(a: dict[str, Tensor], b: dict[str, Tensor]) -> set[str]:
    """Modules in which any parameter has changed."""
    return {name.split(".")[0] for name in a if not torch.equal(a[name], b[name])}


@pytest.mark.parametrize("start", ["copy", "fresh"])
def test_each_stage_moves_one_network_and_the_second_starts_as_it_says(
    two_stage: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: str,
) -> None:
    switched: list[dict[str, Tensor]] = []
    original = loop.Trainer.second_stage

    def watched(self: loop.Trainer) -> loop.Trainer:
        second = original(self)
        switched.append({n: t.clone() for n, t in second.optimizer.state()["model"].items()})
        return second

    monkeypatch.setattr(loop.Trainer, "second_stage", watched)
    config = replace(two_stage, objective=replace(two_stage.objective, stage_two=start))
    config = replace(config, optim=replace(config.optim, weight_decay=0.5))
    pretrain(config, corpus, tmp_path, quiet=True)
    first, half, last = (weights_at(tmp_path, step) for step in (1, 6, 12))
    assert unlike(first, half) == {"generator", "generator_head"}
    (begin,) = switched
    fresh = dict(built_for(config, corpus).named_parameters())
    for name, tensor in begin.items():
        if name.startswith("discriminator.") and start == "copy":
            assert torch.equal(tensor, half["generator." + name.removeprefix("discriminator.")])
        elif name.startswith("discriminator"):  # its decay too waits for the second stage
            assert torch.equal(tensor, fresh[name]), name
    assert unlike(begin, half) == ({"discriminator"} if start == "copy" else set())
    assert unlike(begin, last) == {"discriminator", "discriminator_head"}


def test_a_run_of_two_stages_continues_exactly_from_anywhere(
    two_stage: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain(two_stage, corpus, tmp_path / "whole", quiet=True)
    for steps in (4, 2, 3):  # stops at 4, at the switch, at 9
        stop_after(monkeypatch, steps)
        with pytest.raises(Stopped):
            pretrain(two_stage, corpus, tmp_path / "parts", quiet=True)
        monkeypatch.undo()
    pretrain(two_stage, corpus, tmp_path / "parts", quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    for step in range(1, 13):
        whole, parts = (weights_at(tmp_path / name, step) for name in ("whole", "parts"))
        assert not unlike(whole, parts), step


def test_the_second_stage_has_a_schedule_and_an_optimizer_of_its_own(
    two_stage: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    pretrain(two_stage, corpus, tmp_path, quiet=True)
    lines = [m for m in metrics(tmp_path) if m["kind"] == "train"]
    rates = [m["learning_rate"] for m in lines]
    assert rates[:6] == rates[6:]
    assert len(set(rates[:6])) > 1
    assert all(m["disc_loss"] == 0 for m in lines[:6])
    assert all(m["disc_loss"] > 0 for m in lines[6:])
    # Adam's first step is as long as the rate: its moments are corrected for starting at zero.
    before, after = weights_at(tmp_path, 6), weights_at(tmp_path, 7)
    for name in ("discriminator_head.w.weight", "discriminator_head.dense.weight"):
        step = float((after[name] - before[name]).abs().max())
        assert step == pytest.approx(rates[6], rel=0.05), name


def test_the_switch_of_a_run_cannot_be_moved(
    two_stage: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(monkeypatch, 8)
    with pytest.raises(Stopped):
        pretrain(two_stage, corpus, tmp_path, quiet=True)
    monkeypatch.undo()
    for force in (False, True):
        with pytest.raises(ElectraError, match="train_steps"):
            pretrain(with_run(two_stage, train_steps=24), corpus, tmp_path, force=force, quiet=True)


def test_a_frozen_generator_stays_to_the_last_bit(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    generator = GeneratorConfig(width=0.5, sharing="none", frozen=True)
    config = replace(micro, generator=generator, optim=replace(micro.optim, weight_decay=0.5))
    begin = {n: p.detach().clone() for n, p in built_for(config, corpus).named_parameters()}
    pretrain(with_run(config, train_steps=4), corpus, tmp_path, initial=begin, quiet=True)
    assert unlike(begin, weights_at(tmp_path, 4)) == {"discriminator", "discriminator_head"}
    with pytest.raises(ElectraError) as caught:
        pretrain(config, corpus, tmp_path / "untrained", quiet=True)
    assert caught.value.where == "generator.frozen"
    hf_export.export_run(tmp_path, tmp_path / "out")
    for kind in ("discriminator", "generator"):
        pretrained = hf.load_pretrained(tmp_path / "out" / kind)
        if kind == "discriminator":
            with pytest.raises(ElectraError, match="There is no generator here"):
                hf.initial_state(pretrained, config, corpus.vocab_size)
        else:  # a masked language model is all it takes
            state = hf.initial_state(pretrained, config, corpus.vocab_size)
            assert unlike(state.parameters, weights_at(tmp_path, 4)) == {
                "discriminator",
                "discriminator_head",
            }


def test_fast_electra_reads_a_trained_generator_and_lets_its_temperature_fall(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the paper map writes the command: trained once, frozen, hot at first."""
    places = ["--corpus", str(corpus.path), "--quiet"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert cli.run(["pretrain", *MICRO, *places, "--out", str(first)]) == 0
    made, temperatures = objectives.proposal_logits, dict[int, float]()
    sample = objectives.WithGenerator.sample

    def watched(g: Tensor, original: Tensor, temperature: Any, disallow: bool) -> Tensor:
        temperatures[len(temperatures)] = float(temperature)
        return made(g, original, temperature, disallow)

    def looked_at(
        self: Any, g: Tensor, m: Any, batch: Batch, at: StepRng, training: bool
    ) -> Tensor:
        steps.append(int(at.step) if training else 10**6)  # held-out text is judged at the end's
        return sample(self, g, m, batch, at, training)

    steps: list[int] = []
    monkeypatch.setattr(objectives, "proposal_logits", watched)
    monkeypatch.setattr(objectives.WithGenerator, "sample", looked_at)
    sizes = [*MICRO[:1], *MICRO[MICRO.index("--data.sequence-length") :]]
    flags = "--generator.frozen --generator.sharing none --generator.temperature 3"
    flags += " --generator.temperature-steps 4"
    init = ["--init", str(first), *flags.split()]
    assert cli.run(["pretrain", *sizes, *places, *init, "--out", str(second)]) == 0
    seen = dict(zip(steps, temperatures.values(), strict=True))
    again = [*MICRO, *places, *flags.split(), "--out", str(second)]
    assert cli.run(["pretrain", *again]) == 0  # from its own checkpoint
    assert {*range(12), 10**6} <= set(seen)
    for step, temperature in seen.items():
        assert temperature == pytest.approx(1 + 2 * math.exp(-step / 4), rel=1e-6), step
    trained, ours = (load_run(run).objective for run in (first, second))
    assert isinstance(trained, objectives.WithGenerator)
    assert isinstance(ours, objectives.WithGenerator)
    x = torch.randint(5, corpus.vocab_size, (3, 11), generator=torch.Generator().manual_seed(0))
    for name in ("generator", "discriminator"):
        before, after = (
            getattr(objective, name)(x, torch.zeros_like(x), None, None)
            for objective in (trained, ours)
        )
        assert torch.equal(before, after) == (name == "generator")


# ---------------------------------------------------------------------- from a run to the next use


def sized(micro: PretrainConfig, kind: str) -> PretrainConfig:
    """The micro model as one of the kinds."""
    config = settings(**KINDS[kind])
    generator = config.generator
    if kind != "two_stage":
        generator = replace(generator, depth=micro.generator.depth)
    config = replace(micro, generator=generator, objective=config.objective)
    return with_run(config, train_steps=2, save_every=1, eval_every=1)


LAYOUTS = {  # what transformers has a class for
    "mlm": {"generator"},
    "bert": {"generator"},
    "replace_mlm": {"generator"},
    "uniform": {"discriminator"},
    "unigram": {"discriminator"},
    "electric": {"discriminator"},
}


@every_kind
def test_every_kind_trains_exports_and_can_be_fine_tuned_from(
    kind: str, micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    config = sized(micro, kind)
    initial = built_for(config, corpus).state_dict() if kind == "frozen" else None
    pretrain(config, corpus, tmp_path / "run", initial=initial, quiet=True)
    lines = metrics(tmp_path / "run")
    assert {m["step"] for m in lines if m["kind"] == "train"} == {1, 2}
    assert all(math.isfinite(m["loss"]) for m in lines if m["kind"] == "train")
    objective: Any = load_run(tmp_path / "run").objective
    report = hf_export.export_run(tmp_path / "run", tmp_path / "out")
    assert {path.name for path in report.directories} == LAYOUTS.get(
        kind, {"discriminator", "generator"}
    )
    assert report.max_difference is not None
    assert report.max_difference < 1e-4
    x = torch.randint(5, corpus.vocab_size, (3, 11), generator=torch.Generator().manual_seed(0))
    segment = torch.zeros_like(x)
    expected = objective.encoder(x, segment, None, None)
    for path in (tmp_path / "run", tmp_path / "out"):
        loaded = hf.load_encoder(path)
        assert loaded.config.hidden_size == config.encoder.hidden_size
        table = loaded.tensors["embeddings.word.weight"]
        assert torch.equal(table, objective.encoder.embeddings.table("word"))
        fresh = objectives.Encoder(
            loaded.config, objectives.Embeddings(loaded.config, loaded.vocab_size)
        )
        fresh.load_state_dict(loaded.tensors)
        torch.testing.assert_close(fresh(x, segment, None, None), expected)


def test_disentangled_tables_are_merged_in_an_export_from_which_training_continues(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    config = with_run(sized(micro, "disentangled"), train_steps=6)
    pretrain(config, corpus, tmp_path / "run", quiet=True)
    weights = weights_at(tmp_path / "run", 6)
    hf_export.export_run(tmp_path / "run", tmp_path / "out")
    for name, theirs in (
        ("word", "word_embeddings"),
        ("position", "position_embeddings"),
        ("segment", "token_type_embeddings"),
    ):
        difference = weights[f"discriminator.embeddings.{name}.weight"]
        base = weights[f"generator.embeddings.{name}.weight"]
        assert difference.any()
        for kind, table in (("discriminator", base + difference), ("generator", base)):
            exported = load_file(tmp_path / "out" / kind / "model.safetensors")
            assert torch.equal(exported[f"electra.embeddings.{theirs}.weight"], table)
    before: Any = load_run(tmp_path / "run").objective
    pretrained = hf.load_pretrained(tmp_path / "out")
    parameters, notes = hf.initial_state(pretrained, config, corpus.vocab_size)
    assert notes == ()
    after: Any = built_for(config, corpus)
    Adam(after, config.optim).load({"model": parameters})
    batch = batch_of(config, (23, 17, 9), vocab_size=corpus.vocab_size)
    for objective in (before, after):
        objective.special = objectives.SpecialIds(**corpus.special_ids)
    one, two = (o.predict(batch, rng(3), training=False) for o in (before, after))
    torch.testing.assert_close(one.mlm_logits, two.mlm_logits)
    assert torch.equal(one.x_corrupt, two.x_corrupt)
    torch.testing.assert_close(one.d, two.d, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- settings and sizes


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        (KINDS["two_stage"] | {"objective_kind": "mlm"}, "objective.algorithm"),
        (KINDS["two_stage"] | {"generator_kind": "uniform"}, "objective.algorithm"),
        (KINDS["adversarial"] | {"objective_kind": "electric"}, "objective.algorithm"),
        (KINDS["adversarial"] | {"objective_kind": "replace_mlm"}, "objective.algorithm"),
        (KINDS["adversarial"] | {"generator_kind": "unigram"}, "objective.algorithm"),
        ({"objective_algorithm": "two_stage"}, "generator.sharing"),
        (
            {"objective_algorithm": "two_stage", "generator_sharing": "none"},
            "objective.stage_two",
        ),
        (KINDS["two_stage"] | {"run_minutes": 1.0}, "run.minutes"),
        ({"generator_kind": "uniform", "generator_disallow_correct": True}, "generator.kind"),
        ({"generator_kind": "unigram", "objective_kind": "electric"}, "generator.kind"),
        (KINDS["frozen"] | {"generator_kind": "uniform"}, "generator.kind"),
        (KINDS["disentangled"] | {"generator_kind": "uniform"}, "generator.kind"),
        (KINDS["temperature"] | {"generator_kind": "unigram"}, "generator.kind"),
        (KINDS["two_stage"] | {"generator_frozen": True}, "generator.frozen"),
        (KINDS["frozen"] | KINDS["adversarial"], "generator.frozen"),
        (KINDS["frozen"] | KINDS["mlm"], "generator.frozen"),
        ({"generator_frozen": True}, "generator.frozen"),
        ({"generator_frozen": True, "generator_sharing": "disentangled"}, "generator.frozen"),
        ({"generator_sharing": "all"}, "generator.sharing"),
        (
            {
                "objective_kind": "electric",
                "generator_sharing": "all",
                "generator_width": 1.0,
            },
            "generator.sharing",
        ),
        (KINDS["masked"] | {"objective_kind": "all_tokens_mlm"}, "objective.disc_positions"),
        (KINDS["other"] | {"objective_kind": "mlm"}, "objective.disc_positions"),
        ({"optim_generator_rate": 0.5, "objective_kind": "mlm"}, "optim.generator_rate"),
        ({"optim_generator_rate": 0.5, "generator_kind": "unigram"}, "optim.generator_rate"),
        (KINDS["frozen"] | {"optim_generator_rate": 0.5}, "optim.generator_rate"),
        (KINDS["mlm"] | {"objective_disc_start_percent": 5.0}, "objective.disc_start_percent"),
        (
            KINDS["two_stage"] | {"objective_disc_start_percent": 5.0},
            "objective.disc_start_percent",
        ),
        ({"run_sharding": "optimizer", "optim_kind": "muon"}, "run.sharding"),
        ({"run_sharding": "weights", "optim_kind": "muon"}, "run.sharding"),
        (KINDS["two_stage"] | {"run_sharding": "weights"}, "run.sharding"),
        ({"run_sharding": "weights", "run_compile": "yes"}, "run.compile"),
        ({"run_sharding": "weights", "run_cuda_graph": "yes"}, "run.cuda_graph"),
        ({"run_sharding": "weights", "run_kernels": "yes"}, "run.kernels"),
        ({"run_sharding": "weights", "data_micro_batch": "auto"}, "data.micro_batch"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    changes: dict[str, Any], where: str
) -> None:
    with pytest.raises(ElectraError) as caught:
        settings(**changes)
    assert caught.value.where == where
    assert caught.value.what
    assert caught.value.fix


@every_kind
@pytest.mark.parametrize("sharing", ["none", "embeddings", "disentangled", "all"])
def test_the_plan_counts_the_parameters_of_every_kind(kind: str, sharing: str) -> None:
    size = {"generator_width": 1.0, "generator_depth": 1.0} if sharing == "all" else {}
    changes = {"generator_sharing": sharing} | size | KINDS[kind]
    if sharing == "disentangled" and kind in ("uniform", "unigram"):
        changes["generator_sharing"] = "embeddings"  # refused
    if sharing == "all" and kind == "electric":
        changes["generator_sharing"] = "none"  # refused
    config = settings(**changes)
    objective = built(config)
    kept, added = count_parameters(config, V)
    parameters = dict(objective.named_parameters())
    assert kept + added == sum(p.numel() for p in parameters.values())
    head = {"mlm": "generator_head", "replace_mlm": "main_head"}.get(config.objective.kind)
    parts = (objective.encoder, getattr(objective, head or "discriminator_head"))
    assert kept == sum(p.numel() for part in parts for p in part.parameters())
