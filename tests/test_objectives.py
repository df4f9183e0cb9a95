"""The objectives: losses by hand, who learns from what, what is shared, how it all begins."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from conftest import (
    LAYERS,
    LENGTHS,
    SPECIAL,
    B,
    D,
    T,
    V,
    batch_of,
    built,
    gradients,
    rng,
    settings,
)
from torch import Tensor, nn

from electra.config import (
    EncoderConfig,
    GeneratorConfig,
    PretrainConfig,
    RunConfig,
)
from electra.encoder import Block, GeneratorHead
from electra.errors import ElectraError
from electra.objectives import (
    Batch,
    MaskedLM,
    Objective,
    ReplacedTokenDetection,
    build_objective,
)
from electra.optim import Adam, is_decayed, learning_rate
from electra.randomness import StepRng
from electra.recipes import recipe
from electra.studies.plan import count_parameters

# ---------------------------------------------------------------------- losses


def test_both_losses_are_those_of_the_loops() -> None:
    config = settings()
    objective = built(config).double()
    batch = batch_of(config)
    p = objective.predict(batch, rng(), training=False)
    losses = objective(batch, rng())
    assert p.d is not None
    mlm = reference.mlm_loss(
        p.mlm_logits.detach().numpy(), batch.x.numpy(), p.m.at.numpy(), p.m.valid.numpy()
    )
    disc = reference.disc_loss(
        p.d.detach().numpy(), batch.x.numpy(), p.x_corrupt.numpy(), batch.length.numpy()
    )
    assert float(losses.mlm) == pytest.approx(mlm, rel=1e-12)
    assert float(losses.disc) == pytest.approx(disc, rel=1e-12)
    assert float(losses.total.detach()) == pytest.approx(mlm + 50 * disc, rel=1e-12)


def test_the_counts_are_those_of_the_loops() -> None:
    config = settings()
    objective = built(config)
    batch = batch_of(config)
    p = objective.predict(batch, rng(), training=False)
    losses = objective(batch, rng())
    assert p.d is not None
    replaced = right = guessed = 0
    for b, length in enumerate(LENGTHS):
        for t in range(length):
            is_replaced = bool(p.x_corrupt[b, t] != batch.x[b, t])
            replaced += is_replaced
            right += bool(p.d[b, t] > 0) == is_replaced
        for slot in range(p.m.at.shape[1]):
            best = int(p.mlm_logits[b, slot].argmax())
            guessed += bool(p.m.valid[b, slot]) and best == int(batch.x[b, p.m.at[b, slot]])
    assert (int(losses.replaced), int(losses.disc_correct)) == (replaced, right)
    assert int(losses.mlm_correct) == guessed
    assert replaced > 0


def test_masked_language_modelling_is_that_of_the_loops() -> None:
    config = settings(objective_kind="mlm", objective_mask_token_percent=80.0)
    objective = built(config).double()
    batch = batch_of(config)
    p = objective.predict(batch, rng(), training=False)
    losses = objective(batch, rng())
    expected = reference.mlm_loss(
        p.mlm_logits.detach().numpy(), batch.x.numpy(), p.m.at.numpy(), p.m.valid.numpy()
    )
    assert float(losses.total.detach()) == pytest.approx(expected, rel=1e-12)
    assert float(losses.disc) == 0
    assert p.d is None


@pytest.mark.parametrize("kind", ["rtd", "mlm"])
def test_micro_batches_add_up_to_the_whole_batch(kind: str) -> None:
    config = settings(objective_kind=kind)
    objective = built(config).double()
    batch = batch_of(config)
    whole = objective(batch, rng())
    expected = gradients(objective, whole.total)
    summed = {name: torch.zeros_like(g) for name, g in expected.items()}
    totals = torch.zeros(len(whole), dtype=torch.float64)
    for rows in (slice(0, 2), slice(2, 3), slice(3, 5)):
        part = Batch(batch.x[rows], batch.segment[rows], batch.length[rows], *batch[3:])
        losses = objective(part, rng()._replace(rows=torch.arange(B)[rows]))
        totals += torch.stack([term.detach().double() for term in losses])
        for name, g in gradients(objective, losses.total).items():
            summed[name] += g
    torch.testing.assert_close(totals, torch.stack([t.detach().double() for t in whole]))
    for name, g in expected.items():
        torch.testing.assert_close(summed[name], g, rtol=1e-9, atol=1e-12)


def test_only_masked_positions_reach_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    original = GeneratorHead.forward

    def watched(self: GeneratorHead, h: Tensor, table: Tensor) -> Tensor:
        logits = original(self, h, table)
        seen.append(logits.shape)
        return logits

    monkeypatch.setattr(GeneratorHead, "forward", watched)
    for kind in ("rtd", "mlm"):
        config = settings(objective_kind=kind)
        built(config)(batch_of(config), rng())
    assert seen == [(B, config.masked_slots, V)] * 2
    assert config.masked_slots == 6


def test_full_rows_need_no_attention_mask() -> None:
    config = settings()
    batch = batch_of(config, (T,) * B)
    with_mask, without = built(config, padded=True), built(config, padded=False)
    a, b = with_mask(batch, rng()), without(batch, rng())
    torch.testing.assert_close(a.total, b.total)
    assert int(a.replaced) == int(b.replaced)


def test_padding_has_no_influence() -> None:
    config = settings()
    objective = built(config).double()
    batch = batch_of(config)
    other = batch.x.clone()
    for row, length in enumerate(LENGTHS):
        other[row, length:] = 77
    a = objective(batch, rng()).total
    b = objective(batch._replace(x=other), rng()).total
    torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_a_sequence_without_candidates_is_harmless() -> None:
    config = settings()
    batch = batch_of(config, (2, 2, 2, 2, 2))
    losses = built(config)(batch, rng())
    assert all(torch.isfinite(term) for term in losses)
    assert float(losses.mlm) == 0


# ---------------------------------------------------------------------- who learns from what


def own(objective: Objective, part: str) -> set[str]:
    """Parameters of one network alone, without the shared embeddings."""
    return {
        name
        for name, _ in objective.named_parameters()
        if name.startswith(part) and ".embeddings." not in name
    }


def test_the_discriminators_loss_leaves_the_generator_alone() -> None:
    objective = built(settings(objective_gen_weight=0.0))
    grads = gradients(objective, objective(batch_of(objective.config), rng()).total)
    assert own(objective, "generator")
    assert own(objective, "discriminator")
    for name in own(objective, "generator"):
        assert not grads[name].any(), name
    for name in own(objective, "discriminator") - {"discriminator_head.w.bias"}:
        assert grads[name].any(), name
    assert grads["discriminator.embeddings.word.weight"].any()


def test_the_generators_loss_leaves_the_discriminator_alone() -> None:
    objective = built(settings(objective_disc_weight=0.0))
    grads = gradients(objective, objective(batch_of(objective.config), rng()).total)
    for name in own(objective, "discriminator"):
        assert not grads[name].any(), name
    for name in own(objective, "generator"):
        assert grads[name].any(), name
    assert grads["discriminator.embeddings.word.weight"].any()


def test_no_gradient_flows_through_the_samples() -> None:
    config = settings(generator_sharing="none")
    objective = built(config)
    assert isinstance(objective, ReplacedTokenDetection)
    p = objective.predict(batch_of(config), rng(), training=True)
    assert p.d is not None
    grads = gradients(objective, p.d.sum())
    for name, g in grads.items():
        if name.startswith("generator"):
            assert not g.any(), name
    assert grads["discriminator.embeddings.word.weight"].any()


# ---------------------------------------------------------------------- what is shared


def storages(module: nn.Module) -> dict[str, int]:
    return {n: p.data_ptr() for n, p in module.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("sharing", ["none", "embeddings", "all"])
def test_sharing_shares_exactly_what_it_says(sharing: str) -> None:
    size = {"generator_width": 1.0} if sharing == "all" else {}
    objective = built(settings(**size, generator_sharing=sharing))
    assert isinstance(objective, ReplacedTokenDetection)
    Adam(objective, objective.config.optim)  # what moves the tensors must not part them
    g, d = storages(objective.generator), storages(objective.discriminator)
    shared = {name for name in g if g[name] == d.get(name)}
    embeddings = {name for name in d if name.startswith("embeddings.")}
    assert len(embeddings) == 5
    assert shared == {"none": set(), "embeddings": embeddings, "all": set(d)}[sharing]


def test_shared_embeddings_learn_from_both_losses() -> None:
    config = settings()
    name = "discriminator.embeddings.word.weight"
    parts = []
    for weights in ({"objective_gen_weight": 0.0}, {"objective_disc_weight": 0.0}, {}):
        objective = built(settings(**weights)).double()
        parts.append(gradients(objective, objective(batch_of(config), rng()).total)[name])
    torch.testing.assert_close(parts[0] + parts[1], parts[2])


# ---------------------------------------------------------------------- sizes and beginnings


@pytest.mark.parametrize(
    ("name", "kept"), [("small", 13_549_057), ("base", 109_483_009), ("large", 335_142_913)]
)
def test_parameters_are_as_many_as_published(name: str, kept: int) -> None:
    config = recipe(name)
    with torch.device("meta"):
        objective = ReplacedTokenDetection(config, 30_522, SPECIAL)
    counted = sum(
        p.numel()
        for part in (objective.discriminator, objective.discriminator_head)
        for p in part.parameters()
    )
    added = sum(p.numel() for p in objective.parameters()) - counted
    assert counted == kept
    assert (counted, added) == count_parameters(config, 30_522)
    if name == "small":
        assert added == 647_162


@pytest.mark.parametrize(
    "config",
    [
        settings(),
        settings(generator_sharing="none", objective_disc_head="linear"),
        settings(generator_width=1.0, generator_sharing="all"),
        settings(objective_kind="mlm"),
        settings(encoder_embedding_size=D),
    ],
)
def test_the_plan_counts_what_is_built(config: PretrainConfig) -> None:
    total = sum(p.numel() for p in built(config).parameters())
    assert sum(count_parameters(config, V)) == total


def test_the_first_loss_of_small_is_near_45() -> None:
    config = recipe("small")
    config = replace(config, data=replace(config.data, batch_size=2))
    objective = build_objective(config, 30_522, SPECIAL)
    x = torch.randint(5, 30_522, (2, 128), generator=torch.Generator().manual_seed(0))
    x[:, 0], x[:, -1] = SPECIAL.cls, SPECIAL.sep
    length = torch.tensor([128, 128])
    batch = Batch(x, torch.zeros_like(x), length, torch.tensor(256.0), torch.tensor(40.0))
    with torch.no_grad():
        losses = objective(batch, rng(2))
    assert float(losses.mlm) == pytest.approx(math.log(30_522), abs=0.3)
    assert float(losses.disc) == pytest.approx(math.log(2), abs=0.05)
    assert float(losses.total) == pytest.approx(45, abs=3)


def init_of(init: str) -> dict[str, Tensor]:
    """A model wide enough that the spread of every tensor can be told."""
    config = PretrainConfig(
        encoder=EncoderConfig(
            layers=3, hidden_size=88, ffn_size=134, attention_heads=2, embedding_size=62, init=init
        ),
        generator=GeneratorConfig(width=0.5),
    )
    objective = build_objective(config, 997, SPECIAL)
    return {name: p.detach() for name, p in objective.named_parameters()}


def test_every_tensor_begins_as_the_table_says() -> None:
    cut = 0.8796  # std of a standard normal that is cut at ±2
    kinds = set()
    for name, value in init_of("paper").items():
        if name.endswith("bias"):
            kinds.add("bias")
            assert not value.any(), name
        elif "norm" in name:
            kinds.add("norm")
            assert (value == 1).all(), name
        elif name.endswith(("project.weight", ".w.weight")):
            kinds.add("glorot")
            bound = math.sqrt(6 / sum(value.shape))
            assert value.abs().max() <= bound, name
            assert value.std() == pytest.approx(bound / math.sqrt(3), rel=0.2), name
        else:
            kinds.add("embedding" if ".embeddings." in name else "matrix")
            assert value.abs().max() <= 2 * 0.02, name
            spread = cut * 0.02
            assert value.std() == pytest.approx(spread, rel=5 / math.sqrt(value.numel())), name
            assert abs(value.mean()) < 5 * spread / math.sqrt(value.numel()), name
    assert kinds == {"bias", "norm", "glorot", "embedding", "matrix"}


@pytest.mark.parametrize("width", [0.25, 0.5, 1.0])
def test_a_local_start_lets_both_networks_look_at_their_neighbours(width: float) -> None:
    """Before any training, each head gives its own neighbour many times an even share."""
    config = PretrainConfig(
        encoder=EncoderConfig(
            layers=1,
            hidden_size=128,
            ffn_size=136,
            attention_heads=4,
            embedding_size=128,
            init="local",
        ),
        generator=GeneratorConfig(width=width),
    )
    objective = build_objective(config, 997, SPECIAL)
    assert isinstance(objective, ReplacedTokenDetection)
    x = torch.randint(5, 997, (7, 61), generator=torch.Generator().manual_seed(1))
    inner = torch.arange(5, 56)
    for encoder in (objective.discriminator, objective.generator):
        with torch.no_grad():
            h = encoder.embeddings(x, torch.zeros_like(x))
            h = h if encoder.project is None else encoder.project(h)
            q, k, _ = encoder.blocks[0].qkv(h).view(7, 61, 3, -1, 32).permute(2, 0, 3, 1, 4)
            p = (q @ k.transpose(-1, -2) / math.sqrt(32)).softmax(-1).mean(0)  # (H, T, T)
        for head, offset in zip(range(len(p)), (-1, 1, -2, 2), strict=False):
            share = float(p[head, inner, inner + offset].mean())
            assert share > 10 / 61, (encoder.config.hidden_size, head, share)


def test_a_local_start_of_networks_without_room_is_refused() -> None:
    """`tiny` asks for it, and someone may make that smaller yet."""
    config = settings(encoder_init="local")
    narrow = replace(config.encoder, hidden_size=16, attention_heads=16)
    with pytest.raises(ElectraError, match="too narrow") as caught:
        built(replace(config, encoder=narrow, generator=GeneratorConfig(width=1.0)))
    assert caught.value.where == "encoder.init"


def test_the_seed_alone_decides_the_beginning() -> None:
    config = settings(encoder_init="paper")
    one = built(config)
    torch.rand(3)
    same, other = built(config), built(replace(config, run=RunConfig(seed=1)))
    for name, p in one.named_parameters():
        assert torch.equal(p, same.get_parameter(name))
        if is_decayed(name):
            assert not torch.equal(p, other.get_parameter(name)), name


# ---------------------------------------------------------------------- switches


def changed(**changes: Any) -> tuple[Objective, Objective, Batch]:
    before, after = settings(), settings(**changes)
    return built(before), built(after), batch_of(before)


def predicted(objective: Objective, step: int = 0) -> Any:
    return objective.predict(batch_of(objective.config), rng(step=step), training=False)


def positions_repeat(**changes: Any) -> None:
    before, after, _ = changed(**changes)
    repeats = {True: 0, False: 0}
    for step in range(9):
        for objective in (before, after):
            m = predicted(objective, step).m
            for at, valid in zip(m.at, m.valid, strict=True):
                used = at[valid].tolist()
                repeats[objective is after] += len(used) - len(set(used))
    assert repeats[False] == 0
    assert repeats[True] > 0


def counts_round(**changes: Any) -> None:
    before, after, _ = changed(**changes)
    assert predicted(before).m.valid.sum(1).tolist() == [6, 4, 3, 6, 1]  # ceil(0.3 n)
    assert predicted(after).m.valid.sum(1).tolist() == [5, 4, 2, 5, 1]  # at most int(0.305 T)


def some_tokens_stay(**changes: Any) -> None:
    before, after, batch = changed(**changes)
    kept = {}
    for objective in (before, after):
        p = predicted(objective)
        chosen = p.x_masked.gather(1, p.m.at)[p.m.valid]
        kept[objective is after] = int((chosen == batch.x.gather(1, p.m.at)[p.m.valid]).sum())
    assert kept[False] == 0
    assert kept[True] > 0


def some_tokens_are_random(**changes: Any) -> None:
    _, after, batch = changed(**changes)
    p = predicted(after)
    chosen, original = (z.gather(1, p.m.at)[p.m.valid] for z in (p.x_masked, batch.x))
    assert ((chosen != original) & (chosen != SPECIAL.mask)).any()


def ids_are_averaged(**changes: Any) -> None:
    first = built(settings(objective_mask_positions="with_replacement"))
    average = built(settings(objective_mask_positions="with_replacement", **changes))
    differ = 0
    for step in range(9):
        a, b = predicted(first, step), predicted(average, step)
        assert torch.equal(a.m.at, b.m.at)
        for row in range(B):
            for t in (a.x_corrupt[row] != b.x_corrupt[row]).nonzero().flatten().tolist():
                assert (a.m.at[row][a.m.valid[row]] == t).sum() > 1
                differ += 1
    assert differ > 0


def head_is_linear(**changes: Any) -> None:
    _, after, batch = changed(**changes)
    assert isinstance(after, ReplacedTokenDetection)
    head = after.discriminator_head
    assert head.dense is None
    p = predicted(after)
    h = after.discriminator(p.x_corrupt, batch.segment, after.attention_mask(batch), None)
    torch.testing.assert_close(p.d, h @ head.w.weight[0] + head.w.bias[0])


def generator_has_width(**changes: Any) -> None:
    before, after, _ = changed(**changes)
    assert isinstance(before, ReplacedTokenDetection)
    assert isinstance(after, ReplacedTokenDetection)
    assert before.generator.config.hidden_size == D // 2
    assert after.generator.config.hidden_size == D


def generator_has_depth(**changes: Any) -> None:
    _, after, _ = changed(**changes)
    assert isinstance(after, ReplacedTokenDetection)
    assert len(after.generator.blocks) == 1
    assert len(after.discriminator.blocks) == LAYERS


def only_one_encoder(**changes: Any) -> None:
    _, after, _ = changed(**changes)
    assert isinstance(after, MaskedLM)
    assert after.encoder.config.hidden_size == D


def weighs(term: str, factor: float) -> Callable[..., None]:
    def check(**changes: Any) -> None:
        _, after, batch = changed(**changes)
        losses = after(batch, rng())
        weights = {"mlm": 1.0, "disc": 50.0} | {term: factor}
        expected = weights["mlm"] * losses.mlm + weights["disc"] * losses.disc
        torch.testing.assert_close(losses.total.detach(), expected)

    return check


def the_original_is_never_sampled(**changes: Any) -> None:
    before, after, batch = changed(generator_temperature=0.01, **changes)
    for step in range(5):
        p = predicted(after, step)
        at_m, original = (z.gather(1, p.m.at)[p.m.valid] for z in (p.x_corrupt, batch.x))
        assert (at_m != original).all()
    assert before.config.generator.disallow_correct is False


def a_cold_generator_takes_its_best_guess(**changes: Any) -> None:
    before, after, _ = changed(**changes)
    shares = {}
    for objective in (before, after):
        p = predicted(objective)
        sampled = p.x_corrupt.gather(1, p.m.at)[p.m.valid]
        shares[objective is after] = (sampled == p.mlm_logits.argmax(-1)[p.m.valid]).float().mean()
    assert shares[False] < 1
    assert shares[True] == 1


def dropout_is_drawn(**changes: Any) -> None:
    before, after, batch = changed(**changes)
    assert float(before(batch, rng()).disc) == float(before(batch, rng(seed=0)).disc)
    assert float(after(batch, rng()).disc) != float(before(batch, rng()).disc)


def masks_change_with_percent(**changes: Any) -> None:
    _, after, _ = changed(**changes)
    assert after.config.masked_slots == 10
    assert predicted(after).m.valid.sum(1).tolist() == [10, 7, 4, 10, 1]


SWITCHES: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (positions_repeat, {"objective_mask_positions": "with_replacement"}),
    (counts_round, {"objective_mask_count": "round"}),
    (masks_change_with_percent, {"objective_mask_percent": 50.0}),
    (some_tokens_stay, {"objective_mask_token_percent": 60.0}),
    (
        some_tokens_are_random,
        {"objective_mask_token_percent": 10.0, "objective_random_token_percent": 80.0},
    ),
    (ids_are_averaged, {"objective_duplicate_draws": "average"}),
    (head_is_linear, {"objective_disc_head": "linear"}),
    (only_one_encoder, {"objective_kind": "mlm"}),
    (weighs("disc", 20.0), {"objective_disc_weight": 20.0}),
    (weighs("mlm", 3.0), {"objective_gen_weight": 3.0}),
    (generator_has_width, {"generator_width": 1.0}),
    (generator_has_depth, {"generator_depth": 1 / 3}),
    (the_original_is_never_sampled, {"generator_disallow_correct": True}),
    (a_cold_generator_takes_its_best_guess, {"generator_temperature": 1e-6}),
    (dropout_is_drawn, {"encoder_dropout": 0.3}),
    (dropout_is_drawn, {"encoder_attention_dropout": 0.3}),
]


@pytest.mark.parametrize(
    ("effect", "switch"), SWITCHES, ids=["-".join(switch) for _, switch in SWITCHES]
)
def test_every_switch_has_its_documented_effect(
    effect: Callable[..., None], switch: dict[str, Any]
) -> None:
    effect(**switch)


def test_schedule_and_bias_correction_are_switches_too() -> None:
    optim = recipe("small").optim
    released = recipe("small", "released").optim
    assert (optim.schedule, optim.bias_correction) == ("then", True)
    assert (released.schedule, released.bias_correction) == ("times", False)
    at = (20_000, 0.02, 1_000_000)
    assert learning_rate(released, *at) == pytest.approx(5e-4 * 0.98)
    assert learning_rate(optim, *at) == pytest.approx(5e-4 * 0.98 / 0.99)


# ---------------------------------------------------------------------- dropout and attention


def block_and_input(p: float) -> tuple[Block, Tensor, Tensor]:
    config = replace(settings().encoder, attention_dropout=p)
    draw = torch.Generator().manual_seed(3)
    block = Block(config, site=1).double()
    h = torch.randn(B, T, D, generator=draw, dtype=torch.float64)
    mask = (torch.arange(T) < torch.tensor(LENGTHS)[:, None])[:, None, None, :]
    return block, h, mask


def test_attention_written_out_is_the_fused_one_when_nothing_is_dropped() -> None:
    block, h, mask = block_and_input(1e-12)
    fused, written = block.attend(h, mask, None), block.attend(h, mask, rng())
    # The written form takes its softmax in float32.
    torch.testing.assert_close(fused, written, rtol=1e-5, atol=1e-6)


def test_attention_is_the_formula() -> None:
    block, h, mask = block_and_input(0.0)
    q, k, v = (F.linear(h, w, b) for w, b in zip(*split_qkv(block), strict=True))
    K = D // 2
    expected = torch.zeros_like(h)
    for b, length in enumerate(LENGTHS):
        for head in range(2):
            of = slice(head * K, (head + 1) * K)
            for t in range(T):
                score = k[b, :length, of] @ q[b, t, of] / math.sqrt(K)
                expected[b, t, of] = score.softmax(0) @ v[b, :length, of]
    torch.testing.assert_close(block.attend(h, mask, None), expected)


def split_qkv(block: Block) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return block.qkv.weight.chunk(3), block.qkv.bias.chunk(3)


def test_training_drops_and_evaluation_does_not() -> None:
    config = settings(encoder_dropout=0.2, encoder_attention_dropout=0.2)
    objective, batch = built(config), batch_of(config)
    trained = [objective.predict(batch, rng(), training=True).mlm_logits for _ in range(2)]
    judged = [objective.predict(batch, rng(), training=False).mlm_logits for _ in range(2)]
    assert torch.equal(*trained)  # a function of the step
    assert torch.equal(*judged)
    assert not torch.allclose(trained[0], judged[0])
    dry = built(settings()).predict(batch, rng(), training=True).mlm_logits
    assert torch.equal(judged[0], dry)


def test_a_row_is_computed_the_same_in_any_micro_batch_with_dropout() -> None:
    config = settings(encoder_dropout=0.2, encoder_attention_dropout=0.2)
    objective, batch = built(config).double(), batch_of(config)
    whole = objective.predict(batch, rng(), training=True)
    part = Batch(batch.x[3:], batch.segment[3:], batch.length[3:], *batch[3:])
    alone = objective.predict(part, rng()._replace(rows=torch.tensor([3, 4])), training=True)
    assert torch.equal(whole.x_corrupt[3:], alone.x_corrupt)
    torch.testing.assert_close(whole.d[3:], alone.d, rtol=1e-5, atol=1e-6)  # type: ignore[index]


def test_no_two_places_share_their_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    sites: list[int] = []
    original = StepRng.dropout

    def watched(self: StepRng, x: Tensor, p: float, site: int) -> Tensor:
        sites.append(site)
        return original(self, x, p, site)

    monkeypatch.setattr(StepRng, "dropout", watched)
    config = settings(encoder_dropout=0.2, encoder_attention_dropout=0.2)
    built(config)(batch_of(config), rng())
    assert len(sites) == len(set(sites)) == 2 * (1 + 3 * LAYERS)


def test_an_encoder_that_is_both_networks_drops_independently_in_its_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: dict[int, list[Tensor]] = {}
    original = StepRng.dropout

    def watched(self: StepRng, x: Tensor, p: float, site: int) -> Tensor:
        lost.setdefault(site, []).append(original(self, torch.ones_like(x), p, site) == 0)
        return original(self, x, p, site)

    monkeypatch.setattr(StepRng, "dropout", watched)
    config = settings(
        encoder_dropout=0.2,
        encoder_attention_dropout=0.2,
        generator_width=1.0,
        generator_sharing="all",
    )
    built(config)(batch_of(config), rng())
    assert len(lost) == 1 + 3 * LAYERS
    for site, (generators, discriminators) in lost.items():
        both = (generators & discriminators).float().mean()
        assert both == pytest.approx(0.2 * 0.2, abs=0.02), site


def test_generator_and_discriminator_drop_independently() -> None:
    """Two encoders with the same weights and the same input give two different outputs."""
    config = settings(encoder_dropout=0.2, generator_width=1.0, generator_sharing="none")
    objective, batch = built(config), batch_of(config)
    assert isinstance(objective, ReplacedTokenDetection)
    objective.generator.load_state_dict(objective.discriminator.state_dict())
    mask = objective.attention_mask(batch)
    g = objective.generator(batch.x, batch.segment, mask, rng())
    d = objective.discriminator(batch.x, batch.segment, mask, rng())
    assert not torch.allclose(g, d)
    sites = [m.site for m in objective.modules() if isinstance(m, Block)]
    assert len(np.unique(sites)) == 2 * LAYERS
