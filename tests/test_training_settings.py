"""Settings that short runs try: rates, starts, optimizers and averages, seen in whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch_of, built, gradients, rng, settings
from torch import Tensor

from electra.checkpoint import read_checkpoint
from electra.config import PretrainConfig
from electra.data.corpus import Corpus
from electra.evaluate import Evaluation, evaluate
from electra.objectives import SpecialIds, build_objective, disc_share
from electra.pretrain import pretrain
from electra.rundir import load_run
from electra.runlog import read_metrics


def changed(config: PretrainConfig, **groups: dict[str, Any]) -> PretrainConfig:
    new = {name: replace(getattr(config, name), **values) for name, values in groups.items()}
    return replace(config, **new)


def trained(config: PretrainConfig, corpus: Corpus, out: Path) -> dict[str, dict[str, Tensor]]:
    """The tensors of the last checkpoint of a run."""
    pretrain(config, corpus, out, quiet=True)
    return read_checkpoint(out / "checkpoints" / f"step-{config.run.train_steps:08d}").tensors


def evaluations(out: Path) -> list[dict[str, Any]]:
    return [m for m in read_metrics(out) if m["kind"] == "eval"]


# ---------------------------------------------------------------------- a falling temperature


def test_held_out_text_is_judged_where_a_falling_temperature_ends(
    micro: PretrainConfig, corpus: Corpus
) -> None:
    """Whatever the step: an evaluation has the random numbers of step 0, not its temperature."""
    special = SpecialIds(**corpus.special_ids)

    def judged(**generator: Any) -> Evaluation:
        objective = build_objective(changed(micro, generator=generator), corpus.vocab_size, special)
        return evaluate(objective, corpus.held_out, batches=4)

    falling = judged(temperature=0.001, temperature_steps=10)
    assert falling == judged()
    assert falling != judged(temperature=0.001)


# ---------------------------------------------------------------------- a rate per network


def test_the_generator_moves_by_its_own_rate_and_the_rest_by_the_other(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    one = changed(micro, run={"train_steps": 1}, optim={"weight_decay": 0.0})
    start = trained(changed(one, optim={"learning_rate": 1e-30}), corpus, tmp_path / "start")
    even = trained(one, corpus, tmp_path / "even")["model"]
    half = trained(changed(one, optim={"generator_rate": 0.5}), corpus, tmp_path / "half")["model"]
    for name, before in start["model"].items():
        share = 0.5 if name.startswith(("generator.", "generator_head.")) else 1.0
        torch.testing.assert_close(half[name] - before, share * (even[name] - before))
    assert not torch.equal(even["generator_head.bias"], start["model"]["generator_head.bias"])


# ---------------------------------------------------------------------- the average


def test_the_average_is_what_is_evaluated_and_exported(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    config = changed(micro, optim={"average": 0.9})
    plain = trained(micro, corpus, tmp_path / "plain")
    saved = trained(config, corpus, tmp_path / "run")
    for name, tensor in plain["model"].items():
        assert torch.equal(saved["model"][name], tensor)  # the run itself is the same
    loaded = load_run(tmp_path / "run").objective
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, saved["average"][name])
        assert not torch.equal(parameter, saved["model"][name])
    held_out = evaluate(loaded, corpus.held_out, batches=config.run.eval_batches)
    logged = evaluations(tmp_path / "run")[-1]
    assert logged["mlm_loss"] == held_out.mlm_loss
    assert logged["mlm_loss"] != evaluations(tmp_path / "plain")[-1]["mlm_loss"]


# ---------------------------------------------------------------------- the generator's head start


@pytest.mark.parametrize(
    ("progress", "share"),
    [(0.0, 0.0), (0.1, 0.0), (0.2, 0.0), (0.25, 0.25), (0.3, 0.5), (0.4, 1.0), (1.0, 1.0)],
)
def test_the_share_of_the_discriminators_loss_rises_after_the_start(
    progress: float, share: float
) -> None:
    assert disc_share(20.0, progress) == pytest.approx(share)
    assert disc_share(0.0, progress) == 1.0


def test_the_share_weighs_the_discriminators_gradients_and_no_others() -> None:
    config = settings(generator_sharing="none")
    objective, batch = built(config), batch_of(config)
    full = gradients(objective, objective(batch, rng()).total)
    share = batch._replace(disc_share=torch.tensor(0.25))
    part = gradients(objective, objective(share, rng()).total)
    for name, gradient in full.items():
        factor = 1.0 if name in objective.generators_own() else 0.25
        torch.testing.assert_close(part[name], factor * gradient)


def test_the_discriminator_waits_for_the_generator(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    """20 steps, of which 5 are the head start; a step at 0 moves nothing that has no decay."""
    config = changed(
        micro,
        objective={"disc_start_percent": 25.0},
        run={"save_every": 1, "keep_checkpoints": 20},
    )
    pretrain(config, corpus, tmp_path, quiet=True)

    def at(step: int) -> dict[str, Tensor]:
        return read_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}").tensors["model"]

    for name in ("discriminator_head.w.bias", "discriminator.blocks.0.up.bias"):
        assert not at(6)[name].any()  # after steps 0 to 5, at 0 to 25 % of the run
        assert at(7)[name].all()
    assert at(1)["generator_head.bias"].any()
