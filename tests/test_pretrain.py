"""The training loop: repeatable to the last bit, exact after any stop, honest about what it saw."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import math
import random
import signal
import threading
import weakref
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import runtime
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from electra import micro_batch, rundir
from electra import optim as optimizer
from electra import pretrain as loop
from electra import runtime as runtimes
from electra import trainer as trainers
from electra.batches import Batches
from electra.checkpoint import load_newest, saved_steps
from electra.config import PretrainConfig, RunConfig, from_dict, to_dict
from electra.data.corpus import Corpus, prepare
from electra.data.tokenizer import Tokenizer, train_tokenizer
from electra.errors import CorruptError, ElectraError, NumericError, Stopped
from electra.evaluate import (
    Evaluation,
    diagnose,
    evaluate,
    roc_auc,
    token_counts,
    unigram_entropy,
)
from electra.files import exclusive
from electra.objectives import (
    Batch,
    Losses,
    ReplacedTokenDetection,
    SpecialIds,
    WithGenerator,
    build_objective,
)
from electra.pretrain import pretrain
from electra.randomness import StepRng, shuffled
from electra.recipes import RECIPES, recipe
from electra.rundir import load_run
from electra.runlog import read_metrics
from electra.runtime import Runtime, is_out_of_memory, usable_memory
from electra.studies.report import report

TIMING = {"seconds", "tokens_per_second", "mfu"}


def with_run(config: PretrainConfig, **changes: Any) -> PretrainConfig:
    return replace(config, run=replace(config.run, **changes))


def metrics(out: Path) -> list[dict[str, Any]]:
    """What was logged, without what a clock decides."""
    return [{k: v for k, v in m.items() if k not in TIMING} for m in read_metrics(out)]


def final_tensors(out: Path) -> dict[str, Tensor]:
    saved = load_newest(out / "checkpoints")
    assert saved is not None
    return {f"{f}/{n}": t for f, group in saved.tensors.items() for n, t in group.items()}


def assert_same_run(a: Path, b: Path) -> None:
    one, two = final_tensors(a), final_tensors(b)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name
    assert metrics(a) == metrics(b)


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """A run that gets a signal to stop in its `steps`-th step."""
    step, done = loop.Trainer.step, [0]

    def signalled(self: loop.Trainer) -> None:
        step(self)
        done[0] += 1
        if done[0] == steps:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(loop.Trainer, "step", signalled)


def dropping(config: PretrainConfig) -> PretrainConfig:
    return replace(config, encoder=replace(config.encoder, dropout=0.1, attention_dropout=0.1))


def mlm(config: PretrainConfig) -> PretrainConfig:
    return replace(config, objective=replace(config.objective, kind="mlm"))


def rare_lines(config: PretrainConfig) -> PretrainConfig:
    """A line of metrics that spans the stop."""
    return with_run(config, log_every=7)


def all_new(config: PretrainConfig) -> PretrainConfig:
    """Muon, an average, a rate per network, another schedule and a head start at once."""
    optim = replace(
        config.optim, kind="muon", average=0.9, generator_rate=0.5, schedule="wsd", muon_rate=0.01
    )
    start = replace(config.objective, disc_start_percent=30.0)  # rises while it is stopped
    return replace(config, optim=optim, objective=start)


def in_few_seconds(patch: pytest.MonkeyPatch) -> None:
    """torch.compile traces as ever, but runs what it has traced instead of generating code."""
    compiled = torch.compile
    patch.setattr(torch, "compile", lambda *a, **k: compiled(*a, **{**k, "backend": "eager"}))


def as_it_is(config: PretrainConfig) -> PretrainConfig:
    return config


VARIANTS: list[Callable[[PretrainConfig], PretrainConfig]] = [
    as_it_is,
    dropping,
    mlm,
    rare_lines,
    all_new,
]


# ---------------------------------------------------------------------- repeatable


@pytest.mark.parametrize("kind", ["packed", "segments"])
def test_two_runs_are_equal_to_the_last_bit(
    micro: PretrainConfig, corpus: Corpus, segments: Corpus, tmp_path: Path, kind: str
) -> None:
    for name in ("a", "b"):
        pretrain(micro, corpus if kind == "packed" else segments, tmp_path / name, quiet=True)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    train = [m for m in metrics(tmp_path / "a") if m["kind"] == "train"]
    assert [m["step"] for m in train] == list(range(1, 21))
    assert [m["step"] for m in metrics(tmp_path / "a") if m["kind"] == "eval"] == [6, 12, 18, 20]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_stopped_run_continues_exactly(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variant: Callable[[PretrainConfig], PretrainConfig],
) -> None:
    config = variant(micro)
    pretrain(config, corpus, tmp_path / "whole", quiet=True)
    for steps in (5, 4, 1):  # stops at 5, at 9, at 10
        stop_after(monkeypatch, steps)
        with pytest.raises(Stopped):
            pretrain(config, corpus, tmp_path / "parts", quiet=True)
        monkeypatch.undo()
    saved = load_newest(tmp_path / "parts" / "checkpoints")
    assert saved is not None
    assert saved.step == 10
    pretrain(config, corpus, tmp_path / "parts", quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("evaluation", [1, 3, 4])
def test_a_stop_inside_an_evaluation_is_made_up_for(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    evaluation: int,
) -> None:
    """The first, one whose step is saved anyway, and the one at the end."""
    config = with_run(micro, save_every=9)
    pretrain(config, corpus, tmp_path / "whole", quiet=True)
    predict, seen = ReplacedTokenDetection.predict, [0]

    def signalled(self: ReplacedTokenDetection, *args: Any, training: bool) -> Any:
        if not training:
            seen[0] += 1
            if seen[0] == 2 * evaluation - 1:  # before the second of its two batches
                signal.raise_signal(signal.SIGUSR1)
        return predict(self, *args, training=training)

    with monkeypatch.context() as patch:
        patch.setattr(ReplacedTokenDetection, "predict", signalled)
        with pytest.raises(Stopped):
            pretrain(config, corpus, tmp_path / "parts", quiet=True)
    saved = load_newest(tmp_path / "parts" / "checkpoints")
    assert saved is not None
    assert saved.step == {1: 6, 3: 18, 4: 20}[evaluation]
    assert len([m for m in metrics(tmp_path / "parts") if m["kind"] == "eval"]) == evaluation - 1
    pretrain(config, corpus, tmp_path / "parts", quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("phase", ["train", "held_out", "save"])
def test_a_run_that_dies_at_its_end_finishes_to_the_same_record(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
) -> None:
    """The last evaluation belongs to the run as much as the last checkpoint."""
    pretrain(micro, corpus, tmp_path / "whole", quiet=True)

    class Died(BaseException):
        pass

    def dying_evaluate(*args: Any, **kwargs: Any) -> Evaluation:
        result = evaluate(*args, **kwargs)
        calls.append(1)
        if len(calls) == 4:
            raise Died
        return result

    def dying_save(self: Any, step: int, *args: Any) -> None:
        if step == 20:
            raise Died
        save(self, step, *args)

    calls: list[int] = []
    save = loop.Saver.save
    if phase == "train":
        stop_after(monkeypatch, 20)
    elif phase == "held_out":
        monkeypatch.setattr(loop, "evaluate", dying_evaluate)
    else:
        monkeypatch.setattr(loop.Saver, "save", dying_save)
    try:
        pretrain(micro, corpus, tmp_path / "died", quiet=True)
    except (Died, Stopped):
        pass
    else:
        assert phase == "train"  # too late to stop: it may as well end
    monkeypatch.undo()
    pretrain(micro, corpus, tmp_path / "died", quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "died")


def test_a_damaged_checkpoint_costs_time_and_nothing_else(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pretrain(micro, corpus, tmp_path / "whole", quiet=True)
    stop_after(monkeypatch, 10)
    with pytest.raises(Stopped):
        pretrain(micro, corpus, tmp_path / "damaged", quiet=True)
    monkeypatch.undo()
    newest = tmp_path / "damaged" / "checkpoints" / "step-00000010" / "optimizer.safetensors"
    content = bytearray(newest.read_bytes())
    content[-1] ^= 1
    newest.write_bytes(content)
    pretrain(micro, corpus, tmp_path / "damaged")
    assert "damaged-step-00000010" in capsys.readouterr().err
    assert_same_run(tmp_path / "whole", tmp_path / "damaged")


def test_without_an_intact_checkpoint_nothing_starts_anew(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    pretrain(micro, corpus, tmp_path, quiet=True)
    for path in (tmp_path / "checkpoints").iterdir():
        (path / "state.json").unlink()
    for _ in range(2):
        with pytest.raises(CorruptError):
            pretrain(micro, corpus, tmp_path, quiet=True)


def test_a_completed_run_does_nothing_when_run_again(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    pretrain(micro, corpus, tmp_path, quiet=True)
    before = {p: p.read_bytes() for p in (tmp_path / "checkpoints").rglob("*") if p.is_file()}
    lines = (tmp_path / "metrics.jsonl").read_text()
    pretrain(micro, corpus, tmp_path, quiet=True)
    assert {p: p.read_bytes() for p in before} == before
    assert (tmp_path / "metrics.jsonl").read_text() == lines


def test_a_continued_run_lets_go_of_the_checkpoint_that_it_read(
    micro: PretrainConfig, corpus: Corpus, stopped_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors map files: once they are pruned, their room on the disk would stay taken."""
    read, step = loop.load_newest, loop.Trainer.step
    found, alive = list[weakref.ref[Any]](), list[bool]()

    def remembered(*args: Any, **kwargs: Any) -> Any:
        saved = read(*args, **kwargs)
        found.append(weakref.ref(saved))
        return saved

    def watched(self: loop.Trainer) -> None:
        alive.append(found[0]() is not None)
        step(self)

    monkeypatch.setattr(loop, "load_newest", remembered)
    monkeypatch.setattr(loop.Trainer, "step", watched)
    pretrain(micro, corpus, stopped_run, quiet=True)
    assert len(found) == 1
    assert alive
    assert not any(alive)


def test_the_second_stage_begins_without_the_optimizer_of_the_first(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_stage, record = loop.Trainer.second_stage, loop.Trainer.record
    first, alive = list[weakref.ref[Any]](), list[bool]()

    def remembered(self: loop.Trainer) -> loop.Trainer:
        first.append(weakref.ref(self.optimizer))
        return second_stage(self)

    def watched(self: loop.Trainer) -> None:
        alive.extend(ref() is not None for ref in first)
        record(self)

    monkeypatch.setattr(loop.Trainer, "second_stage", remembered)
    monkeypatch.setattr(loop.Trainer, "record", watched)
    objective = replace(micro.objective, algorithm="two_stage", stage_two="fresh")
    config = replace(micro, objective=objective, generator=replace(micro.generator, sharing="none"))
    pretrain(with_run(config, train_steps=4), corpus, tmp_path / "run", quiet=True)
    assert alive == [False]


def test_lines_behind_the_checkpoint_are_cut_off_when_it_continues(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain(micro, corpus, tmp_path / "whole", quiet=True)
    stop_after(monkeypatch, 7)
    with pytest.raises(Stopped):
        pretrain(micro, corpus, tmp_path / "parts", quiet=True)
    monkeypatch.undo()
    with open(tmp_path / "parts" / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "step": 8, "loss": 1}\n{"kind": "train", "step": 9, "lo')
    pretrain(micro, corpus, tmp_path / "parts", quiet=True)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_averages_stay_right_when_the_interval_changes_on_resume(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain(micro, corpus, tmp_path / "fine", quiet=True)
    losses = {m["step"]: m["loss"] for m in metrics(tmp_path / "fine") if m["kind"] == "train"}
    stop_after(monkeypatch, 10)
    with pytest.raises(Stopped):
        pretrain(with_run(micro, log_every=20), corpus, tmp_path / "run", quiet=True)
    monkeypatch.undo()
    pretrain(with_run(micro, log_every=4), corpus, tmp_path / "run", quiet=True)
    logged = {m["step"]: m["loss"] for m in metrics(tmp_path / "run") if m["kind"] == "train"}
    assert sorted(logged) == [12, 16, 20]
    assert logged[12] == pytest.approx(np.mean([losses[s] for s in range(1, 13)]))
    assert logged[16] == pytest.approx(np.mean([losses[s] for s in range(13, 17)]))


@pytest.mark.parametrize("size", [1, 3, 8])
def test_micro_batches_give_the_same_losses(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, size: int
) -> None:
    config = with_run(micro, train_steps=8)
    pretrain(config, corpus, tmp_path / "whole", quiet=True)
    parts = replace(config, data=replace(config.data, micro_batch=size))
    pretrain(parts, corpus, tmp_path / "parts", quiet=True)
    for a, b in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "parts"), strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            if isinstance(value, float):
                assert b[name] == pytest.approx(value, rel=1e-5), name
            else:
                assert b[name] == value


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_it_learns_the_language(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, kind: Any
) -> None:
    """On a language with a rule, both networks beat what needs no context."""
    wider = {"hidden_size": 32, "embedding_size": 32, "ffn_size": 64, "attention_heads": 4}
    config = replace(
        micro,
        encoder=replace(micro.encoder, **wider),
        generator=replace(micro.generator, width=1.0),
        optim=replace(micro.optim, learning_rate=5e-3, kind=kind, muon_rate=5e-3),
        data=replace(micro.data, batch_size=32),
    )
    config = with_run(config, train_steps=300, log_every=100, eval_every=1000, save_every=1000)
    pretrain(with_run(config, eval_batches=8), corpus, tmp_path, quiet=True)
    (last,) = [m for m in metrics(tmp_path) if m["kind"] == "eval"]
    assert last["mlm_loss"] < last["unigram_entropy"] - 0.1
    assert last["disc_auc"] > 0.6


def test_muon_by_gram_matrices_trains_alike(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty steps, with a rate per network, whose matrices share their products; also with the
    momentum compiled, that is traced and run as it is."""
    rates = {"kind": "muon", "learning_rate": 5e-3, "muon_rate": 5e-3, "generator_rate": 0.5}
    config = replace(micro, optim=replace(micro.optim, **rates))
    config = with_run(config, train_steps=40, log_every=10, eval_every=1000, save_every=1000)
    turned, calls = optimizer.orthogonal_by_gram, list[int]()

    def noted(us: list[Tensor], dtype: torch.dtype, *, kernel: bool) -> list[Tensor]:
        calls.append(len(us))
        return turned(us, dtype, kernel=kernel)

    monkeypatch.setattr(optimizer, "orthogonal_by_gram", noted)
    in_few_seconds(monkeypatch)
    found: list[list[float]] = []
    for way, gram, compile in (
        ("plain", False, "no"),
        ("gram", True, "no"),
        ("traced", True, "yes"),
    ):
        monkeypatch.setattr(optimizer, "by_gram", lambda _, gram=gram: gram)
        monkeypatch.setattr(trainers, "by_gram", lambda _, gram=gram: gram)
        calls.clear()
        pretrain(with_run(config, compile=compile), corpus, tmp_path / way, quiet=True)
        assert max(calls, default=0) > 1 if gram else not calls  # shapes or rates side by side
        lines = [m for m in metrics(tmp_path / way) if m["kind"] == "train"]
        found.append([m[key] for m in lines for key in ("mlm_loss", "disc_loss", "grad_norm")])
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[1] == pytest.approx(found[2], rel=1e-3)
    assert found[0] != found[1]


# ---------------------------------------------------------------------- time


def test_minutes_end_the_run_and_take_the_rate_to_zero(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that advances by a hundredth of a second whenever it is looked at."""
    now = [0.0]

    def tick() -> float:
        now[0] += 0.01
        return now[0]

    monkeypatch.setattr(loop.time, "perf_counter", tick)
    config = with_run(micro, train_steps=10**6, minutes=2 / 60, eval_every=10**6, save_every=10**6)
    pretrain(config, corpus, tmp_path, quiet=True)
    rates = [m["learning_rate"] for m in read_metrics(tmp_path) if m["kind"] == "train"]
    assert 50 < len(rates) <= 200
    peak = rates.index(max(rates))
    assert max(rates) == pytest.approx(3e-3, rel=0.05)
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 0.05 * max(rates)


def test_few_steps_are_under_way_on_a_gpu(
    micro: PretrainConfig, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the clock would be read blocks too early, and a signal heard blocks too late."""
    ended: list[int] = []
    asked = itertools.count()

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self) -> None:
            self.step = next(asked)

        def synchronize(self) -> None:
            ended.append(self.step)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    here = runtime()
    objective = build_objective(micro, corpus.vocab_size, SpecialIds(**corpus.special_ids))
    trainer = loop.Trainer(objective, Batches(corpus.train, micro, here), micro, here)
    most = trainers.steps_under_way(trainer.rows * micro.data.sequence_length)
    for step in range(most + 5):
        trainer._keep_pace()
        assert ended == list(range(step + 1 - most))  # the oldest first, and no more than needed
    assert [trainers.steps_under_way(tokens) for tokens in (2**10, 2**14, 2**17, 2**20)] == [
        64,
        16,
        2,
        2,
    ]


def test_a_run_that_the_clock_ends_is_logged_to_its_end(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    """Also where not one line was due: its report calls it finished."""
    config = with_run(micro, train_steps=10**6, minutes=0.3 / 60, log_every=10**5)
    pretrain(config, corpus, tmp_path / "run", quiet=True)
    (line,) = [m for m in read_metrics(tmp_path / "run") if m["kind"] == "train"]
    assert line["step"] == load_run(tmp_path / "run").step > 0
    assert line["seconds"] >= 0.3
    assert "| finished |" in report([tmp_path / "run"])


@pytest.mark.parametrize("minutes", [None, 5.0])
def test_a_warm_up_that_outlasts_the_run_is_told_once(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    minutes: float | None,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(loop.RunLog, "warn", lambda _, text: told.append(text))
    optim = replace(micro.optim, warmup_percent=None, warmup_steps=100)
    config = with_run(replace(micro, optim=optim), train_steps=20, minutes=minutes)
    pretrain(config, corpus, tmp_path, quiet=True)
    assert sum("the warm-up of 100 steps is longer than this run" in text for text in told) == 1


def test_seconds_go_on_counting_after_a_resume(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(monkeypatch, 10)
    with pytest.raises(Stopped):
        pretrain(micro, corpus, tmp_path, quiet=True)
    monkeypatch.undo()
    pretrain(micro, corpus, tmp_path, quiet=True)
    seconds = [m["seconds"] for m in read_metrics(tmp_path) if m["kind"] == "train"]
    assert len(seconds) == 20
    assert seconds == sorted(seconds)


# ---------------------------------------------------------------------- refusals


def changed(config: PretrainConfig, path: str, value: Any) -> PretrainConfig:
    section, name = path.split(".")
    return replace(config, **{section: replace(getattr(config, section), **{name: value})})


@pytest.fixture
def stopped_run(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    stop_after(monkeypatch, 3)
    with pytest.raises(Stopped):
        pretrain(micro, corpus, tmp_path / "run", quiet=True)
    monkeypatch.undo()
    return tmp_path / "run"


def test_changed_settings_are_refused_and_listed(
    micro: PretrainConfig, corpus: Corpus, stopped_run: Path
) -> None:
    config = changed(changed(micro, "encoder.layers", 3), "run.seed", 8)
    config = changed(changed(config, "data.batch_size", 4), "run.log_every", 5)
    with pytest.raises(ElectraError) as caught:
        pretrain(config, corpus, stopped_run, quiet=True)
    for line in ("encoder.layers: 2 → 3", "run.seed: 7 → 8", "data.batch_size: 8 → 4"):
        assert line in caught.value.what
    assert "log_every" not in caught.value.what
    assert caught.value.where == str(stopped_run)
    assert json.loads((stopped_run / "config.json").read_bytes()) == to_dict(micro)


def test_what_does_not_make_another_experiment_may_change(
    micro: PretrainConfig, corpus: Corpus, stopped_run: Path
) -> None:
    config = changed(changed(micro, "optim.learning_rate", 1e-3), "data.micro_batch", 4)
    config = with_run(config, train_steps=6, save_every=2, keep_checkpoints=1)
    pretrain(config, corpus, stopped_run, quiet=True)
    saved = load_newest(stopped_run / "checkpoints")
    assert saved is not None
    assert saved.step == 6
    assert json.loads((stopped_run / "run.json").read_bytes())["config"] == to_dict(config)


def test_checkpoints_at_multiples_stay_for_as_long_as_that_is_asked_for(
    micro: PretrainConfig, corpus: Corpus, stopped_run: Path
) -> None:
    """A continued run may begin with it, and leave it again."""

    def kept(**run: Any) -> list[int]:
        pretrain(with_run(micro, **run), corpus, stopped_run, quiet=True)
        return sorted(saved_steps(stopped_run / "checkpoints"))

    assert sorted(saved_steps(stopped_run / "checkpoints")) == [3]
    assert kept(train_steps=20, keep_every=8) == [8, 16, 20]
    assert kept(train_steps=28, keep_every=8) == [8, 16, 24, 28]
    assert kept(train_steps=32) == [28, 32]


def test_what_changed_is_in_the_log_and_in_the_record(
    micro: PretrainConfig, corpus: Corpus, stopped_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_run(changed(micro, "optim.learning_rate", 1e-3), train_steps=6)
    lines = ["optim.learning_rate: 0.003 → 0.001", "run.train_steps: 20 → 6"]
    pretrain(config, corpus, stopped_run)
    told = capsys.readouterr().err
    assert all(f"changed: {line}" in told for line in lines)
    events = [m for m in metrics(stopped_run) if m["kind"] == "event"]
    assert [(m["step"], m["changed"]) for m in events if "changed" in m] == [(3, x) for x in lines]
    record = json.loads((stopped_run / "run.json").read_bytes())
    assert record["history"] == [{"step": 3, "changed": lines, "force": False}]
    pretrain(with_run(config, train_steps=7), corpus, stopped_run, quiet=True)
    history = json.loads((stopped_run / "run.json").read_bytes())["history"]
    assert [h["step"] for h in history] == [3, 6]


def test_force_continues_another_experiment_and_says_so(
    micro: PretrainConfig, corpus: Corpus, segments: Corpus, stopped_run: Path
) -> None:
    config = changed(changed(micro, "run.seed", 8), "data.batch_size", 4)
    with pytest.raises(ElectraError) as caught:
        pretrain(config, corpus, stopped_run, quiet=True)
    assert "--force" in caught.value.fix
    pretrain(config, segments, stopped_run, quiet=True, force=True)
    (entry,) = json.loads((stopped_run / "run.json").read_bytes())["history"]
    assert entry["force"] is True
    assert entry["step"] == 3
    assert entry["changed"][:2] == ["data.batch_size: 8 → 4", "run.seed: 7 → 8"]
    assert entry["changed"][2].startswith(f"corpus: {corpus.fingerprint[:12]}… → ")
    assert [m["changed"] for m in metrics(stopped_run) if "changed" in m] == entry["changed"]
    saved = load_newest(stopped_run / "checkpoints")
    assert saved is not None
    assert saved.step == 20


def test_who_goes_from_muon_to_adam_is_told_that_its_moments_are_empty(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = "second moments of Muon's matrices begin at zero"
    for kind, other, is_told in (("muon", "adam", True), ("adam", "muon", False)):
        out = tmp_path / kind
        with monkeypatch.context() as patch:
            stop_after(patch, 3)
            with pytest.raises(Stopped):
                pretrain(changed(micro, "optim.kind", kind), corpus, out, quiet=True)
        config = with_run(changed(micro, "optim.kind", other), train_steps=4)
        with pytest.raises(ElectraError, match=f"{kind} → {other}") as caught:
            pretrain(config, corpus, out, quiet=True)
        assert (told in caught.value.what) == is_told
        capsys.readouterr()
        pretrain(config, corpus, out, force=True)
        assert (told in " ".join(capsys.readouterr().err.split())) == is_told
        saved = load_newest(out / "checkpoints")
        assert saved is not None
        assert saved.step == 4


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("encoder.layers", 1),
        ("encoder.attention_heads", 4),
        ("encoder.max_positions", 31),
        ("generator.sharing", "none"),
        ("objective.kind", "mlm"),
        ("objective.disc_head", "linear"),
    ],
)
def test_force_cannot_make_another_model_of_it(
    micro: PretrainConfig, corpus: Corpus, stopped_run: Path, path: str, value: Any
) -> None:
    before = (stopped_run / "run.json").read_bytes()
    with pytest.raises(ElectraError, match=path) as caught:
        pretrain(changed(micro, path, value), corpus, stopped_run, quiet=True, force=True)
    assert "--force" not in caught.value.fix
    assert (stopped_run / "run.json").read_bytes() == before


def test_force_cannot_change_the_tokenizer(
    micro: PretrainConfig, corpus: Corpus, stopped_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "tokenizer_hash", "f" * 64)
    monkeypatch.setattr(corpus, "fingerprint", "e" * 64)
    with pytest.raises(ElectraError, match="another tokenizer"):
        pretrain(micro, corpus, stopped_run, quiet=True, force=True)


def test_the_record_says_where_the_first_weights_came_from(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_run(micro, train_steps=2)
    pretrain(config, corpus, tmp_path / "random", quiet=True)
    assert json.loads((tmp_path / "random" / "run.json").read_bytes())["init"] is None
    weights = dict(load_run(tmp_path / "random").objective.named_parameters())
    initial = {name: tensor.detach() for name, tensor in weights.items()}
    out = tmp_path / "run"
    pretrain(config, corpus, out, initial=initial, initial_from="models/mine", quiet=True)
    pretrain(with_run(config, train_steps=3), corpus, out, quiet=True)
    assert json.loads((out / "run.json").read_bytes())["init"] == "models/mine"
    capsys.readouterr()
    again = {"initial": initial, "initial_from": "models/other"}
    pretrain(with_run(config, train_steps=4), corpus, out, **again)
    assert json.loads((out / "run.json").read_bytes())["init"] == "models/mine"
    assert "init: models/mine → models/other (without effect" in capsys.readouterr().err


def test_a_run_that_saved_nothing_begins_again_as_anything(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a refusal advises can be done in the same directory, and the record is of what was."""
    config, out = with_run(micro, train_steps=2), tmp_path / "run"
    generator = replace(config.generator, sharing="none", frozen=True)
    frozen = replace(config, generator=generator)
    with pytest.raises(ElectraError, match="frozen generator"):
        pretrain(frozen, corpus, out, quiet=True)
    pretrain(config, corpus, tmp_path / "random", quiet=True)
    weights = dict(load_run(tmp_path / "random").objective.named_parameters())
    initial = {name: tensor.detach() for name, tensor in weights.items()}

    def broken(_: loop.Trainer) -> None:
        raise RuntimeError

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", broken)
        with pytest.raises(RuntimeError):  # after the look at what it starts from
            pretrain(config, corpus, out, initial=initial, initial_from="a", quiet=True)
    again = {"initial": initial, "initial_from": "b", "quiet": True}
    pretrain(changed(config, "run.seed", 8), corpus, out, **again)
    record = json.loads((out / "run.json").read_bytes())
    assert (record["init"], record["config"]["run"]["seed"], record["history"]) == ("b", 8, [])
    assert [m["step"] for m in metrics(out) if m["kind"] == "eval"].count(0) == 1


def test_a_generator_of_no_whole_size_leaves_no_run(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    config = changed(micro, "generator.depth", 0.3)
    with pytest.raises(ElectraError, match="gives layers"):
        pretrain(config, corpus, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_tokenizer_that_is_not_the_run_s_is_not_taken_for_it(
    micro: PretrainConfig, corpus: Corpus, text: Path, tmp_path: Path
) -> None:
    """Nothing of another's is deleted, and no run ends with words that it never read."""
    other = train_tokenizer([text], vocab_size=60)
    other.save(tmp_path / "run" / "tokenizer")
    with pytest.raises(ElectraError, match="another tokenizer") as caught:
        pretrain(micro, corpus, tmp_path / "run", quiet=True)
    assert caught.value.fix == "choose another --out"
    assert Tokenizer.load(tmp_path / "run" / "tokenizer").hash == other.hash


def test_what_a_run_starts_from_is_looked_at_once(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    config = with_run(micro, train_steps=2, save_every=1, eval_every=1)
    pretrain(config, corpus, tmp_path / "random", quiet=True)
    weights = dict(load_run(tmp_path / "random").objective.named_parameters())
    initial = {name: tensor.detach() for name, tensor in weights.items()}
    for out, given in ((tmp_path / "random", None), (tmp_path / "run", initial)):
        pretrain(config, corpus, out, initial=given, quiet=True)
        looks = [m for m in read_metrics(out) if m["kind"] == "eval"]
        assert [m["step"] for m in looks] == ([1, 2] if given is None else [0, 1, 2])
    before, after = (read_metrics(tmp_path / name) for name in ("random", "run"))
    last, first = ([m for m in all_ if m["kind"] == "eval"] for all_ in (before, after))
    assert first[0]["mlm_loss"] == pytest.approx(last[-1]["mlm_loss"], rel=0.05)
    pretrain(with_run(config, train_steps=3), corpus, tmp_path / "run", initial=initial, quiet=True)
    again = [m["step"] for m in read_metrics(tmp_path / "run") if m["kind"] == "eval"]
    assert again == [0, 1, 2, 3]


def test_a_run_goes_on_without_its_past(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    """As the error on a damaged metrics.jsonl advises, also where an evaluation was due."""
    config = with_run(micro, train_steps=2, save_every=1, eval_every=1)
    pretrain(config, corpus, tmp_path, quiet=True)
    (tmp_path / "metrics.jsonl").unlink()
    pretrain(with_run(config, train_steps=3), corpus, tmp_path, quiet=True)
    assert [m["step"] for m in read_metrics(tmp_path) if m["kind"] == "eval"] == [2, 3]


def test_another_corpus_is_refused(
    micro: PretrainConfig, segments: Corpus, stopped_run: Path
) -> None:
    with pytest.raises(ElectraError, match="another corpus"):
        pretrain(micro, segments, stopped_run, quiet=True)


def test_another_tokenizer_is_refused(
    micro: PretrainConfig,
    corpus: Corpus,
    stopped_run: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(corpus, "tokenizer_hash", "f" * 64)
    with pytest.raises(ElectraError, match="another tokenizer") as caught:
        pretrain(micro, corpus, stopped_run, quiet=True)
    assert "ffffffffffff" in caught.value.what


def test_another_sequence_length_is_refused(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    config = changed(micro, "data.sequence_length", 17)
    with pytest.raises(ElectraError, match="23") as caught:
        pretrain(config, corpus, tmp_path / "run", quiet=True)
    assert "--length 17" in caught.value.fix
    assert not (tmp_path / "run").exists()


def test_a_directory_in_use_is_refused_and_left_alone(
    micro: PretrainConfig, corpus: Corpus, stopped_run: Path
) -> None:
    before = (stopped_run / "metrics.jsonl").read_bytes()
    with exclusive(stopped_run), pytest.raises(ElectraError, match="Another process"):
        pretrain(micro, corpus, stopped_run, quiet=True)
    assert (stopped_run / "metrics.jsonl").read_bytes() == before


def test_the_others_are_told_that_the_directory_is_in_use(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would say of the main process that it does not answer."""
    told = list[str]()
    monkeypatch.setattr(Runtime, "report", lambda _, word: told.append(word))
    leave = Runtime.leave
    monkeypatch.setattr(Runtime, "leave", lambda self: (told.append("left"), leave(self)))
    (tmp_path / "run").mkdir()
    with exclusive(tmp_path / "run"), pytest.raises(ElectraError, match="Another process"):
        pretrain(micro, corpus, tmp_path / "run", quiet=True)
    word, left = told
    assert word.startswith("ElectraError: Another process")
    assert left == "left"


def test_a_file_in_the_way_of_the_run_is_a_clear_error(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ElectraError) as caught:
        pretrain(micro, corpus, tmp_path / "file", quiet=True)
    assert str(tmp_path / "file") in caught.value.where
    assert (tmp_path / "file").read_text() == "mine"


def test_checkpoints_without_their_record_are_refused(
    micro: PretrainConfig, corpus: Corpus, stopped_run: Path
) -> None:
    (stopped_run / "run.json").unlink()
    with pytest.raises(ElectraError, match=r"no run\.json"):
        pretrain(micro, corpus, stopped_run, quiet=True)


def test_a_corpus_without_examples_is_refused(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus.train, "lengths", corpus.train.lengths[:0])
    with pytest.raises(ElectraError, match="no training example"):
        pretrain(micro, corpus, tmp_path, quiet=True)


def test_a_crash_while_the_tokenizer_is_copied_leaves_no_half_of_it(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = rundir.write_atomic

    def dies(path: Path, data: bytes) -> None:
        if path.name == "tokenizer.json":
            path.write_bytes(data[:100])
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(rundir, "write_atomic", dies)
    with pytest.raises(KeyboardInterrupt):
        pretrain(with_run(micro, train_steps=1), corpus, tmp_path / "run", quiet=True)
    monkeypatch.undo()
    pretrain(with_run(micro, train_steps=1), corpus, tmp_path / "run", quiet=True)
    assert Tokenizer.load(tmp_path / "run" / "tokenizer").hash == corpus.tokenizer_hash


# ---------------------------------------------------------------------- not a number


def poison(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[int], bool]) -> None:
    """Losses that are not numbers at the given steps, counted from 0."""
    learn = ReplacedTokenDetection.learn

    def poisoned(self: ReplacedTokenDetection, *given: Any) -> Losses:
        losses = learn(self, *given)
        if is_bad(int(given[-1].step)):
            nan = float("nan")
            return losses._replace(total=losses.total * nan, disc=losses.disc * nan)
        return losses

    monkeypatch.setattr(ReplacedTokenDetection, "learn", poisoned)


def weights_at(out: Path, step: int) -> dict[str, Tensor]:
    from electra.checkpoint import read_checkpoint

    saved = read_checkpoint(out / "checkpoints" / f"step-{step:08d}")
    return {**saved.tensors["model"], **dict(saved.tensors["optimizer"].items())}


def test_bad_steps_do_not_touch_the_weights_and_are_counted(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda step: step in (4, 5, 11))
    config = with_run(micro, save_every=1, keep_checkpoints=99)
    pretrain(config, corpus, tmp_path, quiet=True)
    for before, after in ((4, 6), (11, 12)):
        a, b = weights_at(tmp_path, before), weights_at(tmp_path, after)
        for name, tensor in a.items():
            if name not in ("bad_steps", "bad_in_a_row", "worst_in_a_row", "meter"):
                assert torch.equal(tensor, b[name]), name
    a, b = weights_at(tmp_path, 6), weights_at(tmp_path, 7)
    assert not torch.equal(
        a["discriminator.embeddings.word.weight"], b["discriminator.embeddings.word.weight"]
    )
    lines = {m["step"]: m for m in metrics(tmp_path) if m["kind"] == "train"}
    assert lines[5]["loss"] == lines[5]["grad_norm"] == "nan"  # never left out
    assert [lines[s]["bad_steps"] for s in (4, 5, 6, 11, 12, 20)] == [0, 1, 2, 2, 3, 3]


def test_a_bad_step_between_two_lines_does_not_end_the_run(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of the log are not finite when it is saved; the weights are."""
    poison(monkeypatch, lambda step: step == 5)
    pretrain(with_run(micro, log_every=20), corpus, tmp_path, quiet=True)
    (line,) = [m for m in metrics(tmp_path) if m["kind"] == "train"]
    assert line["bad_steps"] == 1
    for name, tensor in final_tensors(tmp_path).items():
        assert torch.isfinite(tensor).all(), name


def test_a_stop_after_a_bad_step_still_saves(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, lambda step: step == 5)
    config = with_run(micro, log_every=20)
    pretrain(config, corpus, tmp_path / "whole", quiet=True)
    stop_after(monkeypatch, 6)
    with pytest.raises(Stopped):
        pretrain(config, corpus, tmp_path / "parts", quiet=True)
    monkeypatch.undo()
    poison(monkeypatch, lambda step: step == 5)
    pretrain(config, corpus, tmp_path / "parts", quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("log_every", [1, 20])
def test_too_many_bad_steps_in_a_row_end_the_run_with_good_weights(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log_every: int,
) -> None:
    poison(monkeypatch, lambda step: step >= 9)
    config = with_run(micro, log_every=log_every, save_every=2, keep_checkpoints=99)
    with pytest.raises(NumericError, match="not finite") as caught:
        pretrain(config, corpus, tmp_path, quiet=True)
    assert caught.value.exit_code == 4
    if log_every == 1:
        assert "step 12" in caught.value.where
    for path in (tmp_path / "checkpoints").iterdir():
        for name, tensor in weights_at(tmp_path, int(path.name[5:])).items():
            assert torch.isfinite(tensor).all(), (path, name)
    assert (tmp_path / "checkpoints" / "step-00000008").is_dir()


def test_fifty_broken_losses_and_gradients_never_reach_the_weights(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    steps = 150
    draw = random.Random(12)
    ways = itertools.product(("loss", "gradient"), (math.nan, math.inf, -math.inf))
    bad = dict(zip(sorted(draw.sample(range(steps), 50)), itertools.cycle(ways), strict=False))
    grad, step = torch.autograd.grad, loop.Trainer.step

    def broken_grad(total: Tensor, parameters: list[Tensor], **options: Any) -> list[Tensor]:
        way, value = bad.get(now[0], ("", 0.0))
        grads = list(grad(total * value if way == "loss" else total, parameters, **options))
        if way == "gradient":
            # Each of the two passes leads to some parameters only.
            one = draw.choice([i for i, given in enumerate(grads) if given is not None])
            broken = grads[one] = grads[one].clone()
            broken.view(-1)[draw.randrange(broken.numel())] = value
        return grads

    def compared(self: loop.Trainer) -> None:
        now[0] = int(self.counter)
        before = [t.clone() for t in (self.optimizer.master, self.optimizer.m, self.optimizer.v)]
        step(self)
        after = [self.optimizer.master, self.optimizer.m, self.optimizer.v]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert same == (now[0] in bad), now[0]
        untouched[0] += same

    now, untouched = [0], [0]
    monkeypatch.setattr(torch.autograd, "grad", broken_grad)
    monkeypatch.setattr(loop.Trainer, "step", compared)
    config = with_run(micro, train_steps=steps, max_bad_steps=50, save_every=9, eval_every=steps)
    pretrain(with_run(config, keep_checkpoints=99), corpus, tmp_path, quiet=True)
    for path in (tmp_path / "checkpoints").iterdir():
        for name, tensor in weights_at(tmp_path, int(path.name[5:])).items():
            assert torch.isfinite(tensor).all(), (path, name)
    told = [m["step"] - 1 for m in metrics(tmp_path) if "left out" in m.get("warning", "")]
    assert told == sorted(bad)
    counted = f"{untouched[0]} of {len(bad)} left weights and moments untouched"
    request.node.user_properties.append(("counted", counted))
    assert [m["bad_steps"] for m in metrics(tmp_path) if m["kind"] == "train"][-1] == 50


@pytest.mark.parametrize("log_every", [1, 20])
def test_bad_steps_in_a_row_are_counted_across_a_resume(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log_every: int,
) -> None:
    """Otherwise a run that is restarted often enough would never notice."""
    config = with_run(micro, log_every=log_every, max_bad_steps=3)
    poison(monkeypatch, lambda step: step in (4, 5, 6))
    with monkeypatch.context() as patch:
        stop_after(patch, 6)
        with pytest.raises(Stopped):
            pretrain(config, corpus, tmp_path, quiet=True)
    with pytest.raises(NumericError, match="3 steps in a row"):
        pretrain(config, corpus, tmp_path, quiet=True)


def test_a_spike_is_left_out_and_its_rule_survives_a_resume(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = ReplacedTokenDetection.learn

    def spiking(self: ReplacedTokenDetection, *given: Any) -> Losses:
        losses = learn(self, *given)
        return losses._replace(total=losses.total * (100 if int(given[-1].step) == 140 else 1))

    monkeypatch.setattr(ReplacedTokenDetection, "learn", spiking)
    config = with_run(micro, train_steps=145, eval_every=145, save_every=145)
    assert not config.optim.skip_spikes  # nobody has it who does not ask for it
    assert not any(settings().optim.skip_spikes for settings in RECIPES.values())
    config = changed(config, "optim.skip_spikes", True)
    pretrain(config, corpus, tmp_path / "whole", quiet=True)
    lines = {m["step"]: m for m in metrics(tmp_path / "whole") if m["kind"] == "train"}
    assert (lines[140]["spikes"], lines[141]["spikes"], lines[145]["bad_steps"]) == (0, 1, 1)
    (told,) = [m for m in metrics(tmp_path / "whole") if m["kind"] == "event" and m["step"] == 141]
    assert "far too large" in told["warning"]
    with monkeypatch.context() as patch:
        stop_after(patch, 135)
        with pytest.raises(Stopped):
            pretrain(config, corpus, tmp_path / "parts", quiet=True)
    pretrain(config, corpus, tmp_path / "parts", quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own
def test_a_spike_in_a_compiled_step_is_left_out(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the step that is compiled beforehand is no part of what a norm is judged by."""
    in_few_seconds(monkeypatch)
    monkeypatch.setattr(optimizer, "_WINDOW", 16)
    learn = ReplacedTokenDetection.learn

    def spiking(
        self: ReplacedTokenDetection,
        k: Any,
        mlm: Tensor,
        mlm_correct: Tensor,
        batch: Batch,
        rng: StepRng,
    ) -> Losses:
        losses = learn(self, k, mlm, mlm_correct, batch, rng)
        # The step is a number of the device: compiled once.
        return losses._replace(total=losses.total * torch.where(rng.step == 20, 100.0, 1.0))

    monkeypatch.setattr(ReplacedTokenDetection, "learn", spiking)
    weights: list[Tensor] = []
    step = loop.Trainer.step

    def watched(self: loop.Trainer) -> None:
        step(self)
        weights.append(self.optimizer.master.clone())

    monkeypatch.setattr(loop.Trainer, "step", watched)
    config = with_run(micro, train_steps=24, eval_every=99, save_every=99, compile="yes")
    pretrain(changed(config, "optim.skip_spikes", True), corpus, tmp_path, quiet=True)
    lines = {m["step"]: m for m in metrics(tmp_path) if m["kind"] == "train"}
    assert (lines[20]["spikes"], lines[21]["spikes"], lines[24]["bad_steps"]) == (0, 1, 1)
    for i in range(1, 24):
        assert torch.equal(weights[i], weights[i - 1]) == (i == 20), i
    norms = final_tensors(tmp_path)["optimizer/good_norms"]
    assert int(final_tensors(tmp_path)["optimizer/good_steps"]) == 23
    assert norms.max() < 10 * norms.min()


@pytest.mark.parametrize("way", ["two stages", "head start"])
def test_gradients_of_another_loss_are_no_spikes(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    """L_Disc has 50 times the weight of L_MLM and comes late here."""
    monkeypatch.setattr(optimizer, "_WINDOW", 16)
    objective, generator = replace(micro.objective, disc_start_percent=40.0), micro.generator
    if way == "two stages":
        objective = replace(micro.objective, algorithm="two_stage", stage_two="fresh")
        generator = replace(generator, sharing="none")
    config = with_run(micro, train_steps=60, eval_every=60, save_every=60)
    skipping = replace(config.optim, skip_spikes=True)
    config = replace(config, optim=skipping, objective=objective, generator=generator)
    pretrain(config, corpus, tmp_path, quiet=True)
    train = [m for m in metrics(tmp_path) if m["kind"] == "train"]
    assert [m["spikes"] for m in train] == [0] * 60
    assert train[-1]["grad_norm"] > 5 * train[20]["grad_norm"]


# ---------------------------------------------------------------------- no memory


@pytest.mark.parametrize("moment", ["record", "train_step"])
@pytest.mark.parametrize("micro_batch", [None, 6, 1])
def test_a_device_without_memory_gets_a_smaller_micro_batch_proposed(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    micro_batch: int | None,
) -> None:
    def no_room(_: loop.Trainer) -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        finally:
            if moment == "record":  # what ending a capture adds on its way out
                raise RuntimeError("capture failed")

    monkeypatch.setattr(loop.Trainer, moment, no_room)
    with pytest.raises(ElectraError, match="no memory left") as caught:
        pretrain(changed(micro, "data.micro_batch", micro_batch), corpus, tmp_path, quiet=True)
    assert caught.value.exit_code == 2
    proposal = {None: "--data.micro-batch 4 ", 6: "--data.micro-batch 3 ", 1: "smaller model"}
    assert proposal[micro_batch] in caught.value.fix


def room_for(monkeypatch: pytest.MonkeyPatch, limit: int | dict[str, int]) -> list[tuple[str, int]]:
    """A device that runs out of memory in the middle of a step with more than `limit` sequences at
    once, by stage if it says so; what was tried is told."""
    forward, add = ReplacedTokenDetection.forward, trainers.Meter.add_losses
    generate = ReplacedTokenDetection.generate_alone
    tried: list[tuple[str, int]] = []

    def watched(self: ReplacedTokenDetection, batch: Batch, rng: StepRng) -> Losses:
        tried.append((self.stage, len(batch.x)))
        return forward(self, batch, rng)

    def watched_first(self: ReplacedTokenDetection, batch: Batch, rng: StepRng) -> Any:
        tried.append((self.stage, len(batch.x)))
        return generate(self, batch, rng)

    def add_losses(self: trainers.Meter, losses: Losses) -> None:
        add(self, losses)
        stage, rows = tried[-1]
        if rows > (limit if isinstance(limit, int) else limit[stage]):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(ReplacedTokenDetection, "forward", watched)
    monkeypatch.setattr(ReplacedTokenDetection, "generate_alone", watched_first)
    monkeypatch.setattr(trainers.Meter, "add_losses", add_losses)
    return tried


def found(out: Path) -> dict[str, int]:
    return json.loads((out / "run.json").read_bytes())["micro_batch"]


def without_events(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] != "event"]


def spiky(config: PretrainConfig) -> PretrainConfig:
    return changed(config, "optim.skip_spikes", True)


@pytest.mark.parametrize(
    ("variant", "limit", "size"),
    [(as_it_is, 99, 8), (dropping, 7, 4), (spiky, 3, 2), (all_new, 1, 1), (all_new, 99, 8)],
)
def test_the_micro_batch_that_fits_is_found_and_the_run_is_that_of_the_number_by_hand(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variant: Callable[[PretrainConfig], PretrainConfig],
    limit: int,
    size: int,
) -> None:
    config = with_run(variant(micro), train_steps=5)
    by_hand = changed(config, "data.micro_batch", size)
    pretrain(by_hand, corpus, tmp_path / "hand", quiet=True)
    tried = room_for(monkeypatch, limit)
    pretrain(changed(config, "data.micro_batch", "auto"), corpus, tmp_path / "auto", quiet=True)
    sizes = [rows for _, rows in tried]
    halves = [n for n in (8, 4, 2, 1) if n >= size]
    assert sizes[: len(halves)] == halves  # each breaks off after its first part, but for the last
    assert set(sizes[len(halves) :]) == {size}
    assert found(tmp_path / "auto") == {"joint": size}
    one, two = final_tensors(tmp_path / "hand"), final_tensors(tmp_path / "auto")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name
    lines = metrics(tmp_path / "auto")
    assert without_events(lines) == without_events(metrics(tmp_path / "hand"))
    told = {"kind": "event", "step": 0, "micro_batch": size, "rows": 8}
    assert [m for m in lines if "micro_batch" in m] == [told]


class Looks(TorchDispatchMode):
    """Names of what makes a host wait for its device: a number or a size that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if torch.Tag.data_dependent_output in func.tags or (
            torch.Tag.dynamic_output_shape in func.tags
        ):
            self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", [as_it_is, dropping, spiky, all_new])
def test_no_number_of_a_step_is_looked_at_by_the_host(
    micro: PretrainConfig, corpus: Corpus, variant: Callable[[PretrainConfig], PretrainConfig]
) -> None:
    config = changed(variant(micro), "data.micro_batch", 4)
    objective = build_objective(config, corpus.vocab_size, SpecialIds(**corpus.special_ids))
    here = runtime()
    trainer = loop.Trainer(objective, Batches(corpus.train, config, here), config, here)
    looks = Looks()
    for step in range(3):  # judged to be finite, clipped, counted and noted
        trainer.load_block(step, [1e-3])
        with looks:
            trainer.train_step()
    assert not looks.seen
    with looks:
        assert float(trainer.meter.sums.sum()) != 0  # which is such a look
    assert looks.seen


def test_a_process_that_may_use_a_part_of_a_gpu_spares_of_that_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = SimpleNamespace(total_memory=100_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 0.05)
    assert usable_memory(torch.device("cuda")) == 5_000


def test_sizes_that_cannot_fit_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe("small")
    trainer: Any = SimpleNamespace(
        config=replace(config, encoder=replace(config.encoder, dropout=0, attention_dropout=0)),
        objective=SimpleNamespace(stage="joint"),
        runtime=SimpleNamespace(device=torch.device("cuda")),
    )
    # 9.47 GiB were measured with 1,024 sequences, weights and all, and 2.00 with 128.
    for memory, most in ((10, 1024), (140, 8192), (2.1, 128)):
        monkeypatch.setattr(micro_batch, "usable_memory", lambda _, gib=memory: gib * 2**30)
        assert not micro_batch._hopeless(trainer, most)
        assert micro_batch._hopeless(trainer, 3 * most)
    trainer.objective.stage = "generator"  # which is smaller
    assert not micro_batch._hopeless(trainer, 10**6)
    trainer.objective.stage, trainer.runtime.device = "joint", torch.device("cpu")
    assert not micro_batch._hopeless(trainer, 10**6)


def test_a_continued_run_keeps_the_micro_batch_that_was_found(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Even where more would fit now: other parts would be other sums."""
    config = changed(dropping(micro), "data.micro_batch", "auto")
    with monkeypatch.context() as patch:
        room_for(patch, 3)
        pretrain(config, corpus, tmp_path / "whole", quiet=True)
    with monkeypatch.context() as patch:
        room_for(patch, 3)
        stop_after(patch, 7)
        with pytest.raises(Stopped):
            pretrain(config, corpus, tmp_path / "parts")
    told = "".join(capsys.readouterr())
    assert "4 sequences at once do not fit in the memory" in told
    assert "micro-batch: 2 of 8 sequences at once" in told
    with monkeypatch.context() as patch:
        tried = room_for(patch, 99)
        pretrain(config, corpus, tmp_path / "parts", quiet=True)
    assert {rows for _, rows in tried} == {2}
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert found(tmp_path / "parts") == {"joint": 2}


def test_a_continued_run_takes_less_on_a_smaller_device_and_what_is_asked_for_by_hand(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    automatic = changed(micro, "data.micro_batch", "auto")

    def go_on(config: PretrainConfig, limit: int, steps: int) -> list[int]:
        with monkeypatch.context() as patch:
            tried = room_for(patch, limit)
            pretrain(with_run(config, train_steps=steps), corpus, tmp_path, quiet=True)
        return [rows for _, rows in tried]

    assert go_on(automatic, 4, 2)[:2] == [8, 4]
    assert found(tmp_path) == {"joint": 4}
    assert go_on(automatic, 2, 4)[:2] == [4, 2]
    assert found(tmp_path) == {"joint": 2}
    assert [(m["step"], m["micro_batch"]) for m in metrics(tmp_path) if "micro_batch" in m] == [
        (0, 4),
        (2, 2),
    ]
    assert set(go_on(changed(micro, "data.micro_batch", 8), 8, 6)) == {8}
    assert found(tmp_path) == {}
    assert go_on(automatic, 4, 8)[:2] == [8, 4]  # tried anew after a number by hand


def test_each_of_two_stages_has_a_micro_batch_of_its_own(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while the second stage looks for its own: not a step is lost."""
    objective = replace(micro.objective, algorithm="two_stage", stage_two="fresh")
    config = replace(micro, objective=objective, generator=replace(micro.generator, sharing="none"))
    config = with_run(config, train_steps=10, save_every=100)
    config = changed(config, "data.micro_batch", "auto")
    limits = {"generator": 4, "discriminator": 1}
    with monkeypatch.context() as patch:
        room_for(patch, limits)
        pretrain(config, corpus, tmp_path / "whole", quiet=True)
    assert found(tmp_path / "whole") == limits
    with monkeypatch.context() as patch:
        room_for(patch, limits)
        fits = loop.Trainer.fits

        def signalled(self: loop.Trainer, glance: Callable[[], None]) -> bool:
            if self.objective.stage == "discriminator" and self.at_once == 4:
                signal.raise_signal(signal.SIGTERM)
            return fits(self, glance)

        patch.setattr(loop.Trainer, "fits", signalled)
        with pytest.raises(Stopped):
            pretrain(config, corpus, tmp_path / "parts", quiet=True)
    saved = load_newest(tmp_path / "parts" / "checkpoints")
    assert saved is not None
    assert saved.step == 5
    with monkeypatch.context() as patch:
        room_for(patch, limits)
        pretrain(config, corpus, tmp_path / "parts", quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_device_without_room_for_one_sequence_says_so(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(micro, "data.micro_batch", "auto")
    with monkeypatch.context() as patch:
        tried = room_for(patch, 0)
        with pytest.raises(ElectraError, match="Not even one sequence") as caught:
            pretrain(config, corpus, tmp_path, quiet=True)
    assert caught.value.exit_code == 2
    assert [rows for _, rows in tried] == [8, 4, 2, 1]
    assert found(tmp_path) == {}
    pretrain(config, corpus, tmp_path, quiet=True)  # with room again: the same command
    assert found(tmp_path) == {"joint": 8}


def test_a_model_without_room_says_so(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(trainers, "Adam", no_room)
    with pytest.raises(ElectraError, match="no memory for the model and its optimizer"):
        pretrain(micro, corpus, tmp_path, quiet=True)


def test_an_evaluation_has_to_fit_too_and_takes_as_few_sequences_as_a_step(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []

    def watched(objective: Any, *args: Any, at_once: int, **named: Any) -> Evaluation:
        rows.append(at_once)
        if at_once > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return evaluate(objective, *args, at_once=at_once, **named)

    monkeypatch.setattr(loop, "evaluate", watched)
    pretrain(changed(micro, "data.micro_batch", "auto"), corpus, tmp_path, quiet=True)
    assert found(tmp_path) == {"joint": 4}
    assert rows[0] == 8
    assert set(rows[1:]) == {4}


def test_a_signal_between_two_tries_ends_before_the_first_step(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = changed(micro, "data.micro_batch", "auto")
    with monkeypatch.context() as patch:
        room_for(patch, 1)
        compact, now = gc.collect, signal.SIGUSR1
        patch.setattr(gc, "collect", lambda: (signal.raise_signal(now), compact()))
        with pytest.raises(Stopped):
            pretrain(config, corpus, tmp_path / "run", quiet=True)
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    for name in ("run", "whole"):
        with monkeypatch.context() as patch:
            room_for(patch, 1)
            pretrain(config, corpus, tmp_path / name, quiet=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("value", [{"joint": 0}, {"joint": "8"}, [8], 8, None])
def test_a_micro_batch_that_makes_no_sense_is_damage(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, value: Any
) -> None:
    config = changed(with_run(micro, train_steps=1), "data.micro_batch", "auto")
    pretrain(config, corpus, tmp_path, quiet=True)
    record = json.loads((tmp_path / "run.json").read_bytes())
    (tmp_path / "run.json").write_text(json.dumps({**record, "micro_batch": value}))
    with pytest.raises(CorruptError, match="cannot be read"):
        pretrain(with_run(config, train_steps=2), corpus, tmp_path, quiet=True)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.OutOfMemoryError, "CUDA out of memory."),
        (RuntimeError, "Triton Error [CUDA]: out of memory"),
        (
            RuntimeError,
            "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ),
        (RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_memory_runs_out_under_several_names(error: type[RuntimeError], words: str) -> None:
    assert is_out_of_memory(error(words))
    outer = RuntimeError("capture failed")
    outer.__context__ = error(words)
    assert is_out_of_memory(outer)
    assert not is_out_of_memory(RuntimeError("illegal address"))


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own
@pytest.mark.parametrize(
    ("batch", "sizes"),
    [(4, [4]), pytest.param(300, [300, 150, 75, 38, 19, 10, 5, 3], marks=pytest.mark.long)],
)
def test_a_compiled_step_tries_each_size_anew(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batch: int,
    sizes: list[int],
) -> None:
    """In the long one as many as torch lets one function have (8) and one more."""
    in_few_seconds(monkeypatch)
    config = with_run(micro, train_steps=2, compile="yes", eval_every=9)
    config = changed(config, "data.batch_size", batch)
    pretrain(changed(config, "data.micro_batch", 2), corpus, tmp_path / "hand", quiet=True)
    block_batch, tried = trainers.Block.batch, list[int]()

    def batch_of(self: trainers.Block, slot: Tensor, rows: slice, config: PretrainConfig) -> Batch:
        if rows.stop is not None:  # else it is an evaluation
            tried.append(rows.stop - rows.start)
        return block_batch(self, slot, rows, config)

    def short_of_memory(work: Callable[..., None]) -> Callable[..., None]:
        def tried_at_last(*args: Any, **kwargs: Any) -> None:
            if tried[-1] > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            work(*args, **kwargs)

        return tried_at_last

    monkeypatch.setattr(trainers.Block, "batch", batch_of)
    for name in ("accumulate", "finish"):  # neither is compiled: each would be for each length
        work = short_of_memory(getattr(trainers.Adam, name))
        monkeypatch.setattr(trainers.Adam, name, work)
    pretrain(changed(config, "data.micro_batch", "auto"), corpus, tmp_path / "auto", quiet=True)
    assert tried[: len(sizes) + 1] == [*sizes, 2]
    assert found(tmp_path / "auto") == {"joint": 2}
    one, two = final_tensors(tmp_path / "hand"), final_tensors(tmp_path / "auto")
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name
    auto = without_events(metrics(tmp_path / "auto"))
    assert auto == without_events(metrics(tmp_path / "hand"))


def test_other_errors_of_the_device_stay_what_they_are(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: loop.Trainer) -> None:
        raise RuntimeError("illegal address")

    monkeypatch.setattr(loop.Trainer, "train_step", broken)
    with pytest.raises(RuntimeError, match="illegal address"):
        pretrain(micro, corpus, tmp_path, quiet=True)


# ---------------------------------------------------------------------- what is left behind


def test_a_run_leaves_its_record_and_a_picture(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    pretrain(micro, corpus, tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    stored = json.loads((tmp_path / "config.json").read_bytes())
    assert from_dict(PretrainConfig, stored, where="config.json") == micro
    record = json.loads((tmp_path / "run.json").read_bytes())
    assert record["corpus_fingerprint"] == corpus.fingerprint
    assert record["tokenizer_hash"] == corpus.tokenizer_hash
    assert Tokenizer.load(tmp_path / "tokenizer").hash == corpus.tokenizer_hash
    loaded = load_run(tmp_path)
    assert (loaded.config, loaded.step) == (micro, 20)
    final = final_tensors(tmp_path)
    for name, parameter in loaded.objective.named_parameters():
        assert torch.equal(parameter, final[f"model/{name}"])


def test_every_line_has_what_the_paper_and_a_reader_want(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    pretrain(micro, corpus, tmp_path, quiet=True)
    for line in read_metrics(tmp_path):
        if line["kind"] == "train":
            total = line["mlm_loss"] + 50 * line["disc_loss"]
            assert line["loss"] == pytest.approx(total)
            assert 0 < line["replaced_percent"] < 100 * 4 / 23 + 1e-9
            assert 0 <= line["disc_accuracy"] <= 1
            assert line["tokens_per_second"] > 0
        elif line["kind"] == "eval":
            assert line["unigram_entropy"] > 0
            assert 0 <= line["disc_auc"] <= 1


def test_a_directory_that_is_no_run_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ElectraError, match="not a run"):
        load_run(tmp_path)


# ---------------------------------------------------------------------- batches


def test_an_epoch_of_batches_is_every_sequence_once(
    micro: PretrainConfig, segments: Corpus
) -> None:
    batches = Batches(segments.train, micro, runtime())
    assert batches.padded
    steps = len(segments.train) // 8
    block = batches.block(0, steps)
    seen = sorted(map(tuple, block.x.flatten(0, 1).tolist()))
    ids, _, _ = segments.train.gather(np.arange(len(segments.train)))
    every = sorted(map(tuple, ids.tolist()))
    left_over = len(every) - len(seen)
    assert left_over == len(segments.train) % 8
    for row in seen:
        every.remove(row)
    assert len(every) == left_over


def test_what_is_compiled_for_one_seed_serves_the_others(
    micro: PretrainConfig, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        traced.append(graph.code)
        return graph.forward

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **k: compiled(*a, **{**k, "backend": backend}))
    here = replace(runtime(), compiled=True)
    for seed in (0, 1):
        config = replace(micro, run=replace(micro.run, seed=seed))
        objective = build_objective(config, corpus.vocab_size, SpecialIds(**corpus.special_ids))
        trainer = loop.Trainer(objective, Batches(corpus.train, config, here), config, here)
        trainer.load_block(0, [1e-3])
        trainer.train_step()
    assert len(traced) == 12  # both networks' parts, and four around them
    assert traced[:6] == traced[6:]


@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_generator_that_learns_first_makes_the_same_step(
    micro: PretrainConfig,
    corpus: Corpus,
    micro_batch: int | None,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And by the time the discriminator begins, nothing holds what its backward pass needed."""
    if compiled:
        work = torch.compile
        eager = {"backend": "eager"}
        monkeypatch.setattr(torch, "compile", lambda *a, **k: work(*a, **{**k, **eager}))
        torch._dynamo.reset()
    here = replace(runtime(), compiled=compiled)
    config = replace(micro, data=replace(micro.data, micro_batch=micro_batch))
    found: list[tuple[Tensor, Tensor]] = []
    for first in (False, True):
        monkeypatch.setattr(WithGenerator, "generator_is_first", first)
        objective = build_objective(config, corpus.vocab_size, SpecialIds(**corpus.special_ids))
        trainer = loop.Trainer(objective, Batches(corpus.train, config, here), config, here)
        assert (trainer.parts is not None) == first
        trainer.load_block(0, [1e-3])
        trainer.train_step()
        found.append((trainer.optimizer.grad.clone(), trainer.meter.sums.clone()))
    (grad, sums), (again, same) = found
    assert (again - grad).abs().max() <= 1e-6 * grad.abs().max()
    torch.testing.assert_close(same, sums, rtol=1e-6, atol=0)


def test_what_is_compiled_around_the_networks_counts_as_before(
    micro: PretrainConfig, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts, losses, bad steps, the places of the next step: three steps, the second one bad."""
    work, traced = torch.compile, list[str]()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        traced.append(graph.code)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda *a, **k: work(*a, **{**k, "backend": backend}))
    torch._dynamo.reset()
    config = replace(micro, optim=replace(micro.optim, skip_spikes=True))
    found: list[list[Tensor]] = []
    for around in (False, True):
        here = replace(runtime(), compiled=around)
        objective = build_objective(config, corpus.vocab_size, SpecialIds(**corpus.special_ids))
        trainer = loop.Trainer(objective, Batches(corpus.train, config, here), config, here)
        trainer.forward, trainer.parts = objective, None
        for step in range(3):
            trainer.load_block(step, [1e-3])
            with torch.no_grad():
                gain = trainer.optimizer.master[:7]
                before = gain.clone()
                if step == 1:
                    gain.fill_(float("nan"))
            trainer.train_step()
            if step == 1:
                gain.copy_(before)
        counters = trainer.optimizer.counters().values()
        found.append([trainer.meter.sums, trainer.slot, trainer.counter, *counters])
        found[-1].append(trainer.optimizer.master.clone())
    assert len(traced) == 4
    assert int(found[0][2]) == 3
    assert int(found[0][3]) == 1  # of the bad steps
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_process_compiles_as_many_runs_as_it_likes(
    micro: PretrainConfig, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch gives up at the ninth version of a function."""
    work, eager = torch.compile, {"backend": "eager"}
    monkeypatch.setattr(torch, "compile", lambda *a, **k: work(*a, **{**k, **eager}))
    here = replace(runtime(), compiled=True)
    for batch_size in range(1, 11):
        config = replace(micro, data=replace(micro.data, batch_size=batch_size))
        objective = build_objective(config, corpus.vocab_size, SpecialIds(**corpus.special_ids))
        trainer = loop.Trainer(objective, Batches(corpus.train, config, here), config, here)
        trainer.forward, trainer.parts = objective, None  # these would take long
        trainer.load_block(0, [1e-3])
        trainer.train_step()
        assert int(trainer.counter) == 1


def test_the_generators_activations_are_gone_before_the_discriminator_begins(
    micro: PretrainConfig, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[Tensor]] = []
    left: list[int] = []
    states, learn = ReplacedTokenDetection.states_at, ReplacedTokenDetection.learn

    def remembered(self: ReplacedTokenDetection, *args: Any, **kwargs: Any) -> Tensor:
        h = states(self, *args, **kwargs)
        alive.append(weakref.ref(h))
        return h

    def counted(self: ReplacedTokenDetection, *args: Any) -> Losses:
        left.append(sum(h() is not None for h in alive))
        return learn(self, *args)

    monkeypatch.setattr(ReplacedTokenDetection, "states_at", remembered)
    monkeypatch.setattr(ReplacedTokenDetection, "learn", counted)
    for first in (False, True):
        monkeypatch.setattr(WithGenerator, "generator_is_first", first)
        objective = build_objective(micro, corpus.vocab_size, SpecialIds(**corpus.special_ids))
        trainer = loop.Trainer(objective, Batches(corpus.train, micro, runtime()), micro, runtime())
        trainer.load_block(0, [1e-3])
        alive.clear()
        trainer.train_step()
        assert len(alive) == 1
    assert left == [1, 0]


def test_a_deterministic_run_does_not_fill_memory_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        runtime = runtimes.start(RunConfig(device="cpu", threads=1, deterministic=True))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.empty(2**16).isnan().all()
        runtime.leave()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("before", [False, True])
def test_deterministic_mode_ends_with_the_run_that_began_it(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: bool,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(before)
    try:
        pretrain(with_run(micro, deterministic=True), corpus, tmp_path, quiet=True)
        assert torch.are_deterministic_algorithms_enabled() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_logged_loss_is_what_is_minimised(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    """Not yet λ L_Disc while the generator has its head start, and L_MLM in no second stage."""
    late = changed(micro, "objective.disc_start_percent", 25.0)
    pretrain(late, corpus, tmp_path / "late", quiet=True)
    lines = [m for m in metrics(tmp_path / "late") if m["kind"] == "train"]
    assert lines[0]["loss"] == pytest.approx(lines[0]["mlm_loss"])
    assert lines[-1]["loss"] == pytest.approx(lines[-1]["mlm_loss"] + 50 * lines[-1]["disc_loss"])
    objective = replace(micro.objective, algorithm="two_stage", stage_two="fresh")
    stages = replace(micro, objective=objective, generator=replace(micro.generator, sharing="none"))
    pretrain(stages, corpus, tmp_path / "stages", quiet=True)
    lines = [m for m in metrics(tmp_path / "stages") if m["kind"] == "train"]
    assert lines[0]["loss"] == pytest.approx(lines[0]["mlm_loss"])
    assert lines[-1]["loss"] == pytest.approx(50 * lines[-1]["disc_loss"])


class _NoAnswers(TorchDispatchMode):
    """Refuses what would bring a number to the host: on a GPU that waits for all steps before."""

    ASKS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert not any(word in str(func) for word in self.ASKS), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _strictly() -> Generator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_nothing_waits_for_the_device_between_two_lines(
    kind: Any, micro: PretrainConfig, corpus: Corpus
) -> None:
    """On a GPU torch itself watches (its sync debug mode), a recorded graph included."""
    on_gpu = torch.cuda.is_available()
    here = runtimes.start(RunConfig(compile="no")) if on_gpu else runtime()
    config = replace(micro, optim=replace(micro.optim, kind=kind, skip_spikes=True))
    batches = Batches(corpus.train, config, here)
    objective = build_objective(config, corpus.vocab_size, SpecialIds(**corpus.special_ids))
    trainer = loop.Trainer(objective.to(here.device), batches, config, here)
    trainer.record()
    steps = 2 * trainer.block_steps + 3
    trainer.load_block(0, [1e-3] * trainer.block_steps)
    with _strictly() if on_gpu else _NoAnswers():
        for step in range(steps):
            if trainer.needs_block:
                ahead = [1e-3] * trainer.block_steps
                trainer.load_block(step, ahead, [1.0] * trainer.block_steps)
            trainer.step()
    assert int(trainer.counter) == steps


def test_steps_that_are_large_come_to_the_gpu_in_small_numbers() -> None:
    sizes = (128 * 128, 2**18, 2**21, 2**23, 2**26)
    assert [trainers.steps_ahead(tokens) for tokens in sizes] == [32, 32, 4, 1, 1]


def test_a_rehearsal_has_the_next_batches_beside_what_a_step_keeps(
    micro: PretrainConfig, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come before the step and, as in training, once more behind it."""
    objective = build_objective(micro, corpus.vocab_size, SpecialIds(**corpus.special_ids))
    here = runtime()
    trainer = loop.Trainer(objective, Batches(corpus.train, micro, here), micro, here)
    order: list[str] = []

    def told(name: str, real: Callable[..., None], *given: Any) -> None:
        order.append(name)
        real(*given)

    for name in ("load_block", "train_step"):
        monkeypatch.setattr(trainer, name, functools.partial(told, name, getattr(trainer, name)))
    assert trainer.fits(lambda: order.append("glance"))
    assert order == ["load_block", "train_step", "load_block", "glance"]


def test_blocks_of_any_size_hold_the_same_batches(micro: PretrainConfig, corpus: Corpus) -> None:
    batches = Batches(corpus.train, micro, runtime())
    together = batches.block(3, 5)
    for i in range(5):
        alone = batches.block(3 + i, 1)
        for a, b in zip(together, alone, strict=True):
            assert torch.equal(a[i], b[0])


def test_processes_share_the_batch_without_overlap(micro: PretrainConfig, segments: Corpus) -> None:
    whole = Batches(segments.train, micro, runtime()).block(0, 3)
    parts = [Batches(segments.train, micro, runtime(r, 2)).block(0, 3) for r in range(2)]
    assert torch.equal(whole.x, torch.cat([part.x for part in parts], dim=1))
    for part in parts:
        assert torch.equal(part.all_lengths, whole.length)


def test_a_batch_knows_its_segments_and_the_counts_of_the_step(
    micro: PretrainConfig, segments: Corpus
) -> None:
    block = Batches(segments.train, micro, runtime()).block(0, 2)
    batch = block.batch(torch.tensor(1), slice(2, 5), micro)
    assert batch.x.shape == (3, 23)
    split_of = segments.train.splits[shuffled(np.arange(10, 13), len(segments.train), 7)]
    for row in range(3):
        length, split = int(batch.length[row]), int(split_of[row])
        expected = [0] * split + [1] * (length - split) + [0] * (23 - length)
        assert batch.segment[row].tolist() == expected
    assert float(batch.tokens) == int(block.length[1].sum())
    assert float(batch.masked) == sum(math.ceil(0.15 * int(n)) for n in block.length[1])


def test_a_full_corpus_needs_no_padding(micro: PretrainConfig, corpus: Corpus) -> None:
    lengths = corpus.train.lengths
    assert 0.99 * len(lengths) <= (lengths == 23).sum()
    batches = Batches(corpus.train, micro, runtime())
    assert not batches.padded
    assert (batches.block(0, 40).length == 23).all()


# ---------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("levels", [2, 7, 10**6])
def test_the_area_under_the_curve_is_scikit_learns(levels: int) -> None:
    draw = np.random.default_rng(levels)
    score = draw.integers(0, levels, 997).astype(float)  # few levels: many ties
    positive = draw.random(997) < 0.1 + 0.3 * score / levels
    assert roc_auc(score, positive) == pytest.approx(roc_auc_score(positive, score), abs=1e-12)


def test_the_area_without_both_classes_is_a_half() -> None:
    assert roc_auc(np.arange(3.0), np.ones(3, bool)) == 0.5
    assert roc_auc(np.arange(3.0), np.zeros(3, bool)) == 0.5


def test_the_unigram_entropy_is_that_of_the_counted_tokens(corpus: Corpus) -> None:
    ids, _, lengths = corpus.train.gather(np.arange(len(corpus.train)))
    special = tuple(corpus.special_ids.values())
    counts: dict[int, int] = {}
    for row, length in zip(ids.tolist(), lengths.tolist(), strict=True):
        for token in row[:length]:
            if token not in special:
                counts[token] = counts.get(token, 0) + 1
    total = sum(counts.values())
    expected = -sum(n / total * math.log(n / total) for n in counts.values())
    counted = token_counts(corpus.train, special, corpus.vocab_size)
    assert unigram_entropy(counted) == pytest.approx(expected)


@pytest.mark.parametrize("batch_size", [4, 8])
def test_an_evaluation_is_that_of_all_its_tokens_together(
    micro: PretrainConfig, segments: Corpus, batch_size: int
) -> None:
    config = changed(micro, "data.batch_size", batch_size)
    special = SpecialIds(**segments.special_ids)
    objective = build_objective(config, segments.vocab_size, special)
    result = evaluate(objective, segments.held_out, batches=24 // batch_size)
    d, labels, right, nll = [], [], [], []
    index = np.linspace(0, len(segments.held_out) - 1, 24).astype(np.int64)
    ids, segment, lengths = segments.held_out.gather(index)
    length = torch.from_numpy(lengths).long()
    batch = Batch(
        torch.from_numpy(ids).long(),
        torch.from_numpy(segment).long(),
        length,
        length.sum().float(),
        torch.tensor(1.0),
    )
    rng = StepRng(20_200_323, torch.tensor(0), torch.arange(24))
    with torch.no_grad():
        p = objective.predict(batch, rng, training=False)
    assert p.d is not None
    for b in range(24):
        for t in range(int(length[b])):
            d.append(float(p.d[b, t]))
            labels.append(bool(p.x_corrupt[b, t] != batch.x[b, t]))
        for slot in range(p.m.at.shape[1]):
            if p.m.valid[b, slot]:
                token = int(batch.x[b, p.m.at[b, slot]])
                nll.append(-float(p.mlm_logits[b, slot].log_softmax(0)[token]))
                right.append(int(p.mlm_logits[b, slot].argmax()) == token)
    called = np.array(d) > 0
    assert result.tokens == len(d)
    assert result.mlm_loss == pytest.approx(np.mean(nll), rel=1e-5)
    assert result.mlm_accuracy == pytest.approx(np.mean(right))
    assert result.disc_auc == pytest.approx(roc_auc_score(labels, d), abs=1e-3)
    assert result.replaced_percent == pytest.approx(100 * np.mean(labels))
    assert result.disc_precision == pytest.approx(np.mean(np.array(labels)[called]), abs=1e-3)
    assert result.disc_recall == pytest.approx(np.mean(called[np.array(labels)]), abs=1e-3)


def test_an_evaluation_without_discriminator_says_so(micro: PretrainConfig, corpus: Corpus) -> None:
    special = SpecialIds(**corpus.special_ids)
    result = evaluate(
        build_objective(mlm(micro), corpus.vocab_size, special), corpus.held_out, batches=1
    )
    assert result.disc_auc is result.disc_loss is None
    assert result.mlm_loss > 0


ALIVE = Evaluation(
    mlm_loss=3.0,
    mlm_accuracy=0.4,
    disc_loss=0.3,
    disc_auc=0.8,
    disc_precision=0.5,
    disc_recall=0.5,
    replaced_percent=9.0,
    tokens=100,
)


def test_a_living_run_is_not_blamed() -> None:
    assert diagnose(ALIVE, 4.0, 0.5) == []
    assert diagnose(replace(ALIVE, disc_auc=None), 4.0, 0.5) == []


def test_a_dead_generator_and_a_blind_discriminator_are_named() -> None:
    (generator,) = diagnose(replace(ALIVE, mlm_loss=3.95), 4.0, 0.5)
    assert "token frequencies" in generator
    (discriminator,) = diagnose(replace(ALIVE, disc_auc=0.51), 4.0, 0.5)
    assert "AUC 0.51" in discriminator
    dead = replace(ALIVE, mlm_loss=5.0, disc_auc=0.5)
    assert len(diagnose(dead, 4.0, 0.1)) == 2
    assert diagnose(dead, 4.0, 0.05) == []
    assert len(diagnose(dead, 4.0, 0.55, 0.5)) == 1  # it has only just begun
    assert len(diagnose(dead, 4.0, 0.65, 0.5)) == 2


def test_a_dead_run_is_warned_about_in_its_metrics(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    frozen = changed(micro, "optim.learning_rate", 1e-12)
    pretrain(frozen, corpus, tmp_path, quiet=True)
    events = [m for m in metrics(tmp_path) if m["kind"] == "event"]
    assert any("token frequencies" in m["warning"] for m in events)


@pytest.mark.parametrize("waits", ["two_stage", "head start"])
def test_a_discriminator_that_does_not_learn_yet_is_not_blamed(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    waits: str,
) -> None:
    monkeypatch.setattr(loop, "evaluate", lambda *_, **__: replace(ALIVE, disc_auc=0.5))
    if waits == "two_stage":
        objective = replace(micro.objective, algorithm="two_stage", stage_two="fresh")
        generator = replace(micro.generator, sharing="none")
        config = replace(micro, objective=objective, generator=generator)
    else:
        config = changed(micro, "objective.disc_start_percent", 50.0)
    pretrain(with_run(config, eval_every=3), corpus, tmp_path, quiet=True)
    blamed = [m["step"] for m in metrics(tmp_path) if "AUC" in m.get("warning", "")]
    assert blamed == [12, 15, 18, 20]  # of 20 steps


def test_a_run_in_another_thread_is_the_same_run(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    """Where Python lets nobody say what a signal does."""
    config, failed = with_run(micro, train_steps=3), list[BaseException]()

    def work() -> None:
        try:
            pretrain(config, corpus, tmp_path / "thread", quiet=True)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []
    pretrain(config, corpus, tmp_path / "main", quiet=True)
    assert_same_run(tmp_path / "thread", tmp_path / "main")


def test_a_setting_without_effect_is_told_at_the_start(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    idle = changed(changed(micro, "optim.muon_rate", 3e-3), "run.train_steps", 1)
    pretrain(idle, corpus, tmp_path)
    assert "optim.muon_rate 0.003 has no effect" in "".join(capsys.readouterr())


def test_a_corpus_prepared_elsewhere_continues_the_run(
    micro: PretrainConfig,
    corpus: Corpus,
    text: Path,
    stopped_run: Path,
    tmp_path: Path,
) -> None:
    """The fingerprint is that of the content, not of the place."""
    tokenizer = train_tokenizer([text], vocab_size=97)
    again = tmp_path / "again"
    prepare(
        [text],
        tokenizer,
        again,
        sequence_length=23,
        short_percent=0,
        held_out_percent=10.0,
        workers=1,
    )
    other = Corpus.open(again)
    assert other.fingerprint == corpus.fingerprint
    pretrain(micro, other, stopped_run, quiet=True)
