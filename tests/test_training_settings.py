"""Settings that short runs try: rates, starts, optimizers and averages, seen in whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from electra.checkpoint import read_checkpoint
from electra.config import PretrainConfig
from electra.corpus import Corpus
from electra.pretrain import pretrain


def changed(config: PretrainConfig, **groups: dict[str, Any]) -> PretrainConfig:
    new = {name: replace(getattr(config, name), **values) for name, values in groups.items()}
    return replace(config, **new)


def trained(config: PretrainConfig, corpus: Corpus, out: Path) -> dict[str, dict[str, Tensor]]:
    """The tensors of the last checkpoint of a run."""
    pretrain(config, corpus, out, quiet=True)
    return read_checkpoint(out / "checkpoints" / f"step-{config.run.train_steps:08d}").tensors


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
