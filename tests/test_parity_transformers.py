"""Losses and all gradients against transformers, with the same weights, masks and samples.

Our objective draws the masks and the replacements; a plain pair of ElectraForMaskedLM and
ElectraForPreTraining then computes both losses from the same tokens. In float64 there is no
rounding to hide a difference behind.
"""

from __future__ import annotations

from typing import Any

import peers
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from electra.config import (
    DataConfig,
    EncoderConfig,
    GeneratorConfig,
    ObjectiveConfig,
    PretrainConfig,
    Sharing,
)
from electra.formats import layout
from electra.objectives import Batch, Objective, SpecialIds, build_objective
from electra.randomness import StepRng

# Pairwise different, so that no transposed or swapped axis can pass.
B, T, V, E, D, F, LAYERS, POSITIONS = 5, 19, 101, 14, 22, 34, 3, 29
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
LENGTHS = (19, 13, 7, 19, 3)
PRECISIONS = [(torch.float64, 1e-12), (torch.float32, 1e-5)]


def settings(sharing: Sharing, embedding_size: int, **objective: Any) -> PretrainConfig:
    scale = 1.0 if sharing == "all" else 0.5
    return PretrainConfig(
        encoder=EncoderConfig(
            layers=LAYERS,
            hidden_size=D,
            ffn_size=F,
            attention_heads=2,
            embedding_size=embedding_size,
            max_positions=POSITIONS,
            dropout=0.0,
            attention_dropout=0.0,
        ),
        generator=GeneratorConfig(width=scale, depth=1.0, sharing=sharing),
        objective=ObjectiveConfig(mask_percent=30.0, **objective),
        data=DataConfig(sequence_length=T, batch_size=B),
    )


def objective_of(config: PretrainConfig) -> Objective:
    """With weights large enough that every part of the networks matters."""
    objective = build_objective(config, V, SPECIAL)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    return objective


def batch_and_rng(objective: Objective) -> tuple[Batch, StepRng]:
    length = torch.tensor(LENGTHS)
    position = torch.arange(T)
    x = torch.randint(5, V, (B, T), generator=torch.Generator().manual_seed(3))
    x[:, 0] = SPECIAL.cls
    x = x.scatter(1, length[:, None] - 1, SPECIAL.sep)
    x = torch.where(position < length[:, None], x, SPECIAL.pad)
    segment = ((position >= length[:, None] // 2) & (position < length[:, None])).long()
    rng = StepRng(5, torch.tensor(7), torch.arange(B))
    batch = Batch(x, segment, length, length.sum().float(), torch.ones(()))
    masked = objective.choose(batch, rng).valid.sum().float()
    return batch._replace(masked=masked), rng


def in_transformers(network: layout.Network, dtype: torch.dtype) -> Any:
    """The same network as a model of transformers, which ties its own output table."""
    config = peers.electra_config(network.config, network.vocab_size)
    classes = {
        "discriminator": transformers.ElectraForPreTraining,
        "generator": transformers.ElectraForMaskedLM,
    }
    model = classes[network.kind](config)
    result = model.load_state_dict(layout.to_transformers(network), strict=False)
    assert set(result.missing_keys) <= {"generator_lm_head.weight"}
    assert not result.unexpected_keys
    return model.to(dtype)


def gradients(objective: Objective, models: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients of the models of transformers under our parameters' names."""
    found: dict[str, Tensor] = {}
    names = {parameter: name for name, parameter in objective.named_parameters()}
    for kind, pair in layout.pairs_of(objective).items():
        model = models[kind]
        theirs = {
            name: p.grad
            for name, p in model.named_parameters(remove_duplicate=False)
            if p.grad is not None
        }
        for name, parameter in pair.named_parameters():
            found[names[parameter]] = torch.cat(
                [theirs[part] for part in layout.names_of(kind, name)]
            )
    return found


def assert_same_gradients(objective: nn.Module, expected: dict[str, Tensor], rtol: float) -> None:
    grads = {name: p.grad for name, p in objective.named_parameters()}
    assert grads.keys() == expected.keys()
    norm = torch.stack([g.norm() for g in expected.values()]).norm().item()
    assert norm > 1
    for name, grad in grads.items():
        assert grad is not None
        torch.testing.assert_close(
            grad, expected[name], rtol=0, atol=rtol * norm, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(("dtype", "rtol"), PRECISIONS)
@pytest.mark.parametrize("embedding_size", [E, D])
@pytest.mark.parametrize("sharing", ["none", "embeddings", "all"])
def test_replaced_token_detection(
    sharing: Sharing, embedding_size: int, dtype: torch.dtype, rtol: float
) -> None:
    objective = objective_of(settings(sharing, embedding_size))
    batch, rng = batch_and_rng(objective)
    models = {n.kind: in_transformers(n, dtype) for n in layout.networks_of(objective)}
    generator, discriminator = models["generator"], models["discriminator"]
    if sharing == "all":
        generator.electra = discriminator.electra
    elif sharing == "embeddings":
        generator.electra.embeddings = discriminator.electra.embeddings
    generator.generator_lm_head.weight = generator.electra.embeddings.word_embeddings.weight

    objective = objective.to(dtype)
    p = objective.predict(batch, rng, training=True)
    losses = objective(batch, rng)
    losses.total.backward()

    position = torch.arange(T)
    mask = (position < batch.length[:, None]).long()
    chosen = torch.zeros_like(batch.x, dtype=torch.bool).scatter(1, p.m.at, p.m.valid)
    given = {"attention_mask": mask, "token_type_ids": batch.segment}
    mlm = generator(input_ids=p.x_masked, labels=torch.where(chosen, batch.x, -100), **given)
    disc = discriminator(input_ids=p.x_corrupt, labels=(p.x_corrupt != batch.x).long(), **given)
    # transformers takes this loss in float32 whatever the model is, so from its logits again.
    is_token = mask.bool()
    replaced = (p.x_corrupt != batch.x)[is_token].to(dtype)
    disc_loss = binary_cross_entropy_with_logits(disc.logits[is_token], replaced)
    assert disc_loss.item() == pytest.approx(disc.loss.item(), rel=1e-6)
    total = mlm.loss + 50 * disc_loss
    total.backward()

    assert losses.mlm.dtype == losses.disc.dtype == dtype
    assert losses.mlm.item() == pytest.approx(mlm.loss.item(), rel=rtol)
    assert losses.disc.item() == pytest.approx(disc_loss.item(), rel=rtol)
    assert losses.total.item() == pytest.approx(total.item(), rel=rtol)
    assert_same_gradients(objective, gradients(objective, models), rtol)


@pytest.mark.parametrize(("dtype", "rtol"), PRECISIONS)
def test_masked_language_modelling(dtype: torch.dtype, rtol: float) -> None:
    """The BERT baseline, with 80 % [MASK], 10 % random tokens and 10 % left as they are."""
    config = settings("none", E, kind="mlm", mask_token_percent=80.0, random_token_percent=10.0)
    objective = objective_of(config)
    batch, rng = batch_and_rng(objective)
    (network,) = layout.networks_of(objective)
    model = in_transformers(network, dtype)

    objective = objective.to(dtype)
    p = objective.predict(batch, rng, training=True)
    losses = objective(batch, rng)
    losses.total.backward()

    chosen = torch.zeros_like(batch.x, dtype=torch.bool).scatter(1, p.m.at, p.m.valid)
    mlm = model(
        input_ids=p.x_masked,
        labels=torch.where(chosen, batch.x, -100),
        attention_mask=(torch.arange(T) < batch.length[:, None]).long(),
        token_type_ids=batch.segment,
    )
    mlm.loss.backward()

    assert losses.total.dtype == dtype
    assert losses.total.item() == pytest.approx(mlm.loss.item(), rel=rtol)
    assert_same_gradients(objective, gradients(objective, {"generator": model}), rtol)


def test_defaults_are_those_of_transformers() -> None:
    """`hf` reads what a config.json leaves out as our default."""
    ours, theirs = EncoderConfig(), transformers.ElectraConfig()
    for field, name in layout.FIELDS.items():
        assert getattr(ours, field) == getattr(theirs, name), field
    for name, value in layout.FIXED.items():
        assert getattr(theirs, name, value) == value, name
    assert theirs.vocab_size == 30522
