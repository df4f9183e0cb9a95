"""Fine-tuning: the paper's settings, the steps of a plain loop, the same bytes however it ends."""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peers
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import runtime
from safetensors.numpy import load_file
from scipy.stats import spearmanr
from torch import Tensor, nn

from electra import cli, recipes
from electra import runtime as runtimes
from electra.config import EncoderConfig, FinetuneConfig, to_dict
from electra.data.tokenizer import Tokenizer
from electra.encoder import Embeddings, Encoder, initialise
from electra.errors import CorruptError, ElectraError, Stopped
from electra.finetuning import finetune as module
from electra.finetuning import squad, tasks
from electra.finetuning.features import Features
from electra.finetuning.finetune import finetune, resolve, without_effect
from electra.finetuning.glue import SQUAD, answer_texts
from electra.finetuning.heads import TaskModel, build_head, empty_model
from electra.finetuning.step import SquadData, TextData, Trainer, layer_multipliers, predict
from electra.finetuning.tasks import GLUE, Examples, Loaded, Task
from electra.formats import hf, layout
from electra.formats.hf import LoadedEncoder
from electra.optim import Adam
from electra.runlog import read_metrics
from electra.studies.report import report

ROOT = Path(__file__).parents[1]
NOUNS = ["river", "stone", "bird", "house", "wind", "child", "tree", "song", "road", "fire"]
CONFIG = EncoderConfig(
    layers=2,
    hidden_size=20,
    ffn_size=28,
    attention_heads=2,
    embedding_size=14,
    max_positions=80,
    dropout=0.0,
    attention_dropout=0.0,
)
RULE = Task(name="rule", kind="classification", metric="accuracy", labels=("dry", "wet"))
SHARE = Task(name="share", kind="regression", metric="spearman", scale=5.0)
TAGS = Task(name="tags", kind="tagging", metric="accuracy", labels=("O", "V"), texts=("words",))
SETTINGS = FinetuneConfig(
    learning_rate=3e-3,
    layer_decay=1.0,
    epochs=2.0,
    batch_size=8,
    length=24,
    device="cpu",
    threads=1,
)
TIMES = {"seconds", "examples_per_second", "environment"}


def words(draw: random.Random) -> list[str]:
    return [draw.choice(NOUNS[1:]) for _ in range(draw.randint(2, 9))]


def examples(task: Task, n: int, seed: int, *, known: bool = True) -> Examples:
    """Is there a river? How many of five? Which words are one?"""
    draw = random.Random(seed)
    texts, labels = list[tuple[str, ...]](), list[Any]()
    for _ in range(n):
        row = words(draw)
        for place in draw.sample(range(len(row)), draw.choice([0, 0, 1, min(3, len(row))])):
            row[place] = NOUNS[0]
        tags = [int(word == NOUNS[0]) for word in row]
        texts.append(tuple(row) if task.kind == "tagging" else (" ".join(row),))
        labels.append(
            {"classification": max(tags), "regression": float(sum(tags)), "tagging": tags}[
                task.kind
            ]
        )
    return Examples(texts, labels if known else [], [str(i) for i in range(n)])


def loaded(task: Task = RULE, train: int = 43, dev: int = 37, seed: int = 0) -> Loaded:
    splits = {
        "train": examples(task, train, seed),
        "dev": examples(task, dev, seed + 1),
        "test": examples(task, 11, seed + 2, known=False),
    }
    return Loaded(task, splits)


def encoder_of(tokenizer: Tokenizer, noise: float = 0.0, seed: int = 0) -> LoadedEncoder:
    """Random weights; noise makes them so large that every part matters."""
    network = Encoder(CONFIG, Embeddings(CONFIG, tokenizer.vocab_size))
    initialise(network, "paper", seed)
    draw = torch.Generator().manual_seed(seed + 1)
    tensors = {
        name: t + noise * torch.randn(t.shape, generator=draw)
        for name, t in network.state_dict().items()
    }
    return LoadedEncoder(CONFIG, tokenizer.vocab_size, tensors, tokenizer, "random")


def settings(task: Task = RULE, **changes: Any) -> FinetuneConfig:
    return resolve(replace(SETTINGS, **changes), CONFIG, task)


Tune = Callable[..., dict[str, Any]]


@pytest.fixture
def tune(tokenizer: Tokenizer) -> Tune:
    def run(
        out: Path,
        *,
        data: Loaded | None = None,
        encoder: LoadedEncoder | None = None,
        **changes: Any,
    ) -> dict[str, Any]:
        data = data or loaded()
        config = settings(data.task, **changes)
        prepared = TextData(data, tokenizer, config)
        return finetune(config, encoder or encoder_of(tokenizer), prepared, out, quiet=True)

    return run


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("hidden", "rate", "decay"), [(256, 3e-4, 0.8), (768, 1e-4, 0.8), (1024, 5e-5, 0.9)]
)
def test_rate_and_decay_follow_from_the_size(hidden: int, rate: float, decay: float) -> None:
    encoder = EncoderConfig(hidden_size=hidden, attention_heads=4, embedding_size=128)
    config = resolve(FinetuneConfig(), encoder, GLUE["mnli"])
    assert (config.learning_rate, config.layer_decay) == (rate, decay)


@pytest.mark.parametrize(
    ("task", "epochs", "length", "both_orders"),
    [
        *((GLUE[name], 3, 128, False) for name in ("cola", "sst2", "qqp", "mnli", "qnli")),
        (GLUE["mrpc"], 3, 128, True),
        (GLUE["stsb"], 10, 128, True),
        (GLUE["rte"], 10, 128, False),
        (SQUAD["squad1"], 2, 512, False),
        (SQUAD["squad2"], 2, 512, False),
    ],
)
def test_epochs_and_length_follow_from_the_task(
    task: Task, epochs: float, length: int, both_orders: bool
) -> None:
    config = resolve(FinetuneConfig(), EncoderConfig(), task)
    assert (config.epochs, config.length, config.both_orders) == (epochs, length, both_orders)


def test_what_the_paper_fixes_for_all() -> None:
    c = resolve(FinetuneConfig(), EncoderConfig(), GLUE["rte"])
    assert (c.batch_size, c.warmup_percent, c.schedule, c.weight_decay) == (32, 10.0, "then", 0.0)
    assert (c.dropout, c.attention_dropout, c.max_grad_norm) == (0.1, 0.1, 1.0)


def test_what_is_given_stays() -> None:
    given = FinetuneConfig(
        learning_rate=1e-5,
        layer_decay=1.0,
        epochs=0.5,
        length=9,
        both_orders=False,
        dropout=0.3,
        attention_dropout=0.0,
        eval_every="epoch",
    )
    assert resolve(given, EncoderConfig(), GLUE["stsb"]) == given


def test_dropout_is_that_of_pre_training() -> None:
    never = EncoderConfig(dropout=0.0, attention_dropout=0.05)
    c = resolve(FinetuneConfig(), never, GLUE["cola"])
    assert (c.dropout, c.attention_dropout) == (0.0, 0.05)


def test_rows_are_no_longer_than_the_model_reads() -> None:
    assert resolve(FinetuneConfig(), CONFIG, SQUAD["squad2"]).length == CONFIG.max_positions
    asked = FinetuneConfig(length=CONFIG.max_positions + 1)
    with pytest.raises(ElectraError, match="are asked for"):
        resolve(asked, CONFIG, GLUE["cola"])


@pytest.mark.parametrize(
    ("levels", "top", "bottom", "embeddings"), [("one_each", 1, 12, 13), ("released", 2, 13, 14)]
)
def test_layer_wise_rates(levels: Any, top: int, bottom: int, embeddings: int) -> None:
    config = replace(CONFIG, layers=12)
    head = build_head("classification", config, 2, "hf")
    model = TaskModel(Encoder(config, Embeddings(config, 7)), head)
    factors = layer_multipliers(model, 0.8, levels)
    found = {
        part: {round(np.log(f) / np.log(0.8), 6) for name, f in factors.items() if part in name}
        for part in ("head.", "blocks.11.", "blocks.0.", "embeddings.", "project.")
    }
    assert list(found.values()) == [{0}, {top}, {bottom}, {embeddings}, {embeddings}]
    assert factors.keys() == dict(model.named_parameters()).keys()


def test_the_released_profile() -> None:
    paper, released = (to_dict(recipes.tuning_profile(name)) for name in ("paper", "released"))
    assert paper == to_dict(FinetuneConfig())
    assert {key: value for key, value in released.items() if value != paper[key]} == {
        "learning_rate": 1e-4,
        "layer_levels": "released",
        "schedule": "times",
        "weight_decay": 0.01,
        "bias_correction": False,
        "loss": "sum",
        "padding": "dynamic",
    }
    with pytest.raises(ElectraError, match="no profile 'best'"):
        recipes.tuning_profile("best")


def test_flags_go_before_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    given = "finetune --model m --data d --out o --dry-run --profile released --loss mean"
    assert cli.run(given.split()) == 0
    shown = capsys.readouterr().out
    assert "loss = mean\n" in shown
    assert "weight_decay = 0.01\n" in shown


# ---------------------------------------------------------------------- against a plain loop

STEPS = 50


def questions(n: int, seed: int = 0) -> list[squad.Question]:
    """What follows the river? Some passages have none."""
    draw = random.Random(seed)
    found = list[squad.Question]()
    for i in range(n):
        row = [draw.choice(NOUNS[1:]) for _ in range(draw.randint(6, 18))]
        answers, start = tuple[str, ...](), -1
        if i % 4:
            place = draw.randrange(len(row) - 1)
            row[place] = NOUNS[0]
            answers, start = (row[place + 1],), len(" ".join(row[: place + 1])) + 1
        found.append(squad.Question(f"q{i}", "all river", " ".join(row), answers, start))
    return found


def trainer_of(
    tokenizer: Tokenizer, features: Features, task: Task, outputs: int, **changes: Any
) -> Trainer:
    """At its first step, without dropout, with weights that are large."""
    off = {"dropout": 0.0, "attention_dropout": 0.0}
    per_epoch = -(-len(features) // 4)
    given = {"batch_size": 4, "epochs": STEPS / per_epoch, "layer_decay": 0.8} | off | changes
    config = settings(task, learning_rate=5e-3, weight_decay=0.01, **given)
    trainer = Trainer(encoder_of(tokenizer), features, task, outputs, config, runtime())
    assert trainer.steps == STEPS
    return begun(trainer)


def begun(trainer: Trainer) -> Trainer:
    trainer.begin(3)
    draw = torch.Generator().manual_seed(4)
    noise = {
        name: t + 0.3 * torch.randn(t.shape, generator=draw)
        for name, t in trainer.weights().items()
    }
    trainer.optimizer.load({"model": noise})
    return trainer


def all_losses(trainer: Trainer) -> list[float]:
    while trainer.step_number < trainer.steps:
        trainer.step()
    return trainer.losses.tolist()


def real_rows(trainer: Trainer, step: int) -> list[int]:
    """Rows of a batch, without those that only fill it up."""
    return trainer.rows[step][trainer.weight[step] > 0].tolist()


def plain_optimizer(named: Sequence[tuple[str, nn.Parameter]], config: FinetuneConfig) -> Any:
    """torch's AdamW with a group per parameter, and its schedule: 10 % warm-up, then linear."""
    groups = list[dict[str, Any]]()
    for name, parameter in named:
        level = 0
        if "encoder.layer." in name:
            level = CONFIG.layers - int(name.split("encoder.layer.")[1].split(".")[0])
        elif "embeddings" in name:
            level = CONFIG.layers + 1
        decays = not (name.endswith("bias") or "LayerNorm" in name)
        groups.append(
            {
                "params": [parameter],
                "lr": config.learning_rate * config.layer_decay**level,
                "weight_decay": 0.01 if decays else 0.0,
            }
        )
    optimizer = torch.optim.AdamW(groups, eps=1e-6)
    warm = STEPS // 10

    def rate(step: int) -> float:
        return (step + 1) / warm if step < warm else (STEPS - step) / (STEPS - warm)

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def plain_losses(
    trainer: Trainer,
    named: Sequence[tuple[str, nn.Parameter]],
    loss_of: Callable[[list[int]], Tensor],
) -> list[float]:
    optimizer, schedule = plain_optimizer(named, trainer.config)
    parameters = [parameter for _, parameter in named]
    losses = list[float]()
    for step in range(STEPS):
        loss = loss_of(real_rows(trainer, step))
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    return losses


@pytest.fixture
def features_of(tokenizer: Tokenizer) -> Callable[[Task], Features]:
    def make(task: Task) -> Features:
        if task.kind == "qa":
            return squad.windows(
                questions(30), tokenizer, length=24, query=6, stride=9, training=True
            )[0]
        return TextData(loaded(task, 43), tokenizer, settings(task)).train

    return make


QA = SQUAD["squad2"]
CASES = [
    (RULE, 2, transformers.ElectraForSequenceClassification),
    (SHARE, 1, transformers.ElectraForSequenceClassification),
    (TAGS, 2, transformers.ElectraForTokenClassification),
    (QA, 2, transformers.ElectraForQuestionAnswering),
]


@pytest.mark.parametrize(("task", "outputs", "kind"), CASES, ids=[c[0].kind for c in CASES])
def test_fifty_steps_of_transformers(
    task: Task,
    outputs: int,
    kind: Any,
    tokenizer: Tokenizer,
    features_of: Callable[[Task], Features],
) -> None:
    f = features_of(task)
    trainer = trainer_of(tokenizer, f, task, outputs, head="hf")
    theirs = kind(peers.electra_config(CONFIG, tokenizer.vocab_size, num_labels=outputs))
    network = layout.Network(task.kind, CONFIG, tokenizer.vocab_size, trainer.weights())
    assert not any(theirs.load_state_dict(layout.to_transformers(network)))
    # The vector of [PAD] learns only where padding is an outcome; transformers then holds it fixed.
    theirs.electra.embeddings.word_embeddings.padding_idx = None
    theirs.train()

    def loss_of(rows: list[int]) -> Tensor:
        T = int(f.lengths[rows].max())
        if task.kind == "qa":  # padding is an outcome there, so as much of it as we have
            T = trainer.lengths[len(done)]
        done.append(T)
        position = np.arange(T)
        given = {
            "input_ids": torch.tensor(f.tokens[rows, :T]).long(),
            "attention_mask": torch.tensor(position < f.lengths[rows, None]).long(),
            "token_type_ids": torch.tensor(
                (position >= f.first[rows, None]) & (position < f.lengths[rows, None])
            ).long(),
        }
        if task.kind == "qa":
            targets = {
                f"{name}_positions": torch.tensor(f.targets[name][rows])
                for name in ("start", "end")
            }
        elif task.kind == "tagging":
            labels = torch.tensor(f.targets["labels"][rows, :T])
            targets = {"labels": labels.masked_fill(labels < 0, -100)}
        else:
            targets = {"labels": torch.tensor(f.targets["label"][rows])}
        return theirs(**given, **targets).loss

    done = list[int]()
    expected = plain_losses(trainer, list(theirs.named_parameters()), loss_of)
    losses = all_losses(trainer)
    assert losses == pytest.approx(expected, abs=1e-4)
    assert max(losses) - min(losses) > 0.1
    assert any(len(real_rows(trainer, s)) < 4 for s in range(STEPS))  # batches that are filled up


def slow_span_loss(h: Tensor, first: int, head: nn.ModuleDict, target: dict[str, Any]) -> Tensor:
    """The released loss of one row (T, D) without padding, token by token."""
    allowed = [0, *range(first, len(h))]

    def log_prob(logits: list[Tensor], at: int) -> Tensor:
        return torch.cat(logits).log_softmax(0)[allowed.index(at)]

    gold = h[target["start"]]
    starts = [head["start"](h[t]) for t in allowed]
    ends = [head["end"](F.gelu(head["end_hidden"](torch.cat([gold, h[t]])))) for t in allowed]
    span = -(log_prob(starts, target["start"]) + log_prob(ends, target["end"])) / 2
    weight = torch.cat(starts).softmax(0)
    pooled = sum((w * h[t] for w, t in zip(weight, allowed, strict=True)), torch.zeros(len(gold)))
    impossible = head["answer"](F.gelu(head["answer_hidden"](torch.cat([h[0], pooled])))).sigmoid()
    correct = impossible if target["impossible"] else 1 - impossible
    return span - 0.5 * correct.log().squeeze()


def test_fifty_steps_of_a_slow_joint_head(
    tokenizer: Tokenizer, features_of: Callable[[Task], Features]
) -> None:
    f = features_of(QA)
    assert ((f.targets["start"] == 0) & (f.targets["impossible"] == 0)).any()  # answer elsewhere
    trainer = trainer_of(tokenizer, f, QA, 2, head="paper")
    weights = trainer.weights()
    network = layout.Network("encoder", CONFIG, tokenizer.vocab_size, weights)
    electra = transformers.ElectraModel(
        peers.electra_config(CONFIG, tokenizer.vocab_size, num_labels=2)
    )
    state = {k.removeprefix("electra."): t for k, t in layout.to_transformers(network).items()}
    assert not any(electra.load_state_dict(state))
    head = nn.ModuleDict()
    for name in ("start", "end_hidden", "end", "answer_hidden", "answer"):
        w, b = weights[f"head.{name}.weight"], weights[f"head.{name}.bias"]
        layer = nn.Linear(w.shape[1], w.shape[0])
        layer.load_state_dict({"weight": w, "bias": b})
        head[name] = layer

    def loss_of(rows: list[int]) -> Tensor:
        losses = list[Tensor]()
        for row in rows:
            n, first = int(f.lengths[row]), int(f.first[row])
            segment = [0] * first + [1] * (n - first)
            given = {"input_ids": f.tokens[row, :n].tolist(), "token_type_ids": segment}
            h = electra(**{k: torch.tensor([v]) for k, v in given.items()}).last_hidden_state[0]
            target = {name: values[row].item() for name, values in f.targets.items()}
            losses.append(slow_span_loss(h, first, head, target))
        return torch.stack(losses).mean()

    named = [*electra.named_parameters(), *head.named_parameters()]
    expected = plain_losses(trainer, named, loss_of)
    losses = all_losses(trainer)
    assert losses == pytest.approx(expected, abs=1e-4)
    assert max(losses) - min(losses) > 0.5


@pytest.mark.parametrize("padding", ["bucketed", "dynamic"])
@pytest.mark.parametrize("task", [RULE, TAGS, QA], ids=lambda task: task.kind)
def test_padding_does_not_leak(
    task: Task, padding: str, tokenizer: Tokenizer, features_of: Callable[[Task], Features]
) -> None:
    f = features_of(task)
    trainer = trainer_of(tokenizer, f, task, 2, padding=padding)
    longest = f.tokens.shape[1]
    assert min(trainer.lengths) < longest
    short = all_losses(trainer)
    begun(trainer)
    trainer.lengths = [longest] * STEPS
    assert all_losses(trainer) == pytest.approx(short, abs=1e-4)


def test_the_sum_is_the_mean_times_the_rows(
    tokenizer: Tokenizer, features_of: Callable[[Task], Features]
) -> None:
    f = features_of(RULE)
    mean, total = (trainer_of(tokenizer, f, RULE, 2, loss=how) for how in ("mean", "sum"))
    rows = len(real_rows(mean, 0))
    mean.step()
    total.step()
    assert total.losses[0].item() == pytest.approx(rows * mean.losses[0].item(), rel=1e-6)


def test_every_step_draws_its_own_dropout(
    tokenizer: Tokenizer, features_of: Callable[[Task], Features]
) -> None:
    trainer = trainer_of(tokenizer, features_of(RULE), RULE, 2, dropout=0.2, padding="full")
    trainer.rates.zero_()

    def losses(seed: int) -> list[float]:
        """Of the same rows again and again."""
        begun(trainer)
        trainer.rows[:], trainer.weight[:] = torch.arange(4), 1.0
        trainer.seed = seed
        return all_losses(trainer)

    first = losses(3)
    assert len(set(first)) > STEPS / 2
    assert losses(3) == first
    assert losses(4) != first


def test_every_seed_has_its_own_head_and_order(
    tokenizer: Tokenizer, features_of: Callable[[Task], Features]
) -> None:
    trainer = trainer_of(tokenizer, features_of(RULE), RULE, 2)
    heads, orders = list[Tensor](), list[Tensor]()
    for seed in range(2):
        trainer.begin(seed)
        heads.append(trainer.weights()["head.out.weight"])
        orders.append(trainer.rows.clone())
    assert not torch.equal(*heads)
    assert not torch.equal(*orders)


def test_only_the_first_rows(tokenizer: Tokenizer) -> None:
    few = settings(max_train=5)
    assert len(TextData(loaded(), tokenizer, few).train) == 5
    asked = {"train": questions(9), "dev": questions(7)}
    config = settings(QA, max_train=5, length=None)
    data = SquadData(asked, QA, tokenizer, config)
    assert len(set(data.train.example)) == 5
    assert len(set(data.splits["dev"].example)) == 7


def test_training_on_both_orders(tokenizer: Tokenizer) -> None:
    pairs = Examples([("river", "stone bird"), ("tree", "road")], [0, 1], ["0", "1"])
    task = replace(RULE, texts=("a", "b"))
    data = Loaded(task, {"train": pairs, "dev": pairs})
    both = TextData(data, tokenizer, settings(task, both_orders=True))
    assert len(both.splits["dev"]) == 2
    swapped = Examples([(b, a) for a, b in pairs.texts], pairs.labels, pairs.ids)
    other = TextData(replace(data, splits={"train": swapped}), tokenizer, settings(task)).train
    assert both.train.tokens[2:].tolist() == other.tokens.tolist()
    assert both.train.targets["label"].tolist() == [0, 1, 0, 1]


# ---------------------------------------------------------------------- the same bytes


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in TIMES}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def outcome(out: Path) -> dict[str, Any]:
    """Everything a run leaves that is not a time."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in out.rglob("*") if p.is_file() and "tensorboard" not in p.parts):
        name = str(path.relative_to(out))
        if path.suffix == ".json":
            found[name] = without_times(json.loads(path.read_bytes()))
        elif path.name != "README.md":  # the card of the model: its numbers are those of the record
            found[name] = path.read_bytes()
    record = found["model/electra.json"]
    assert record.pop("files").keys() >= {"model.safetensors"}
    return found


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if a[name] != b[name]] == []


@pytest.mark.parametrize("task", [RULE, SHARE, TAGS], ids=lambda task: task.kind)
def test_the_same_bytes_twice(task: Task, tune: Tune, tmp_path: Path) -> None:
    for name in "ab":
        tune(tmp_path / name, data=loaded(task), seeds=2, keep="all")
    found = outcome(tmp_path / "a")
    assert_same(found, outcome(tmp_path / "b"))
    weights = [found[f"seed-{seed}/weights.safetensors"] for seed in range(2)]
    assert weights[0] != weights[1]
    assert [m["seed"] for m in read_metrics(tmp_path / "a") if m["kind"] == "eval"] == [0, 0, 1, 1]


@pytest.fixture
def stopped(tune: Tune, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A run that gets a SIGTERM after so many steps of this call."""

    def run(out: Path, after: int, **changes: Any) -> None:
        left = [after]

        def step(self: Trainer) -> None:
            original(self)
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGTERM)

        original = Trainer.step
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "step", step)
            with pytest.raises(Stopped):
                tune(out, **changes)

    return run


def newest(out: Path, seed: int) -> int:
    return max(int(p.name[5:]) for p in out.glob(f"seed-{seed}/checkpoints/step-*"))


def test_stops_at_many_places_change_nothing(
    tune: Tune, stopped: Callable[..., None], tmp_path: Path
) -> None:
    steps = tune(tmp_path / "whole", seeds=2)["seeds"][0]["steps"]
    out = tmp_path / "run"
    stopped(out, 1, seeds=2)
    assert newest(out, 0) == 1
    stopped(out, 5, seeds=2)
    assert newest(out, 0) == 6
    stopped(out, steps - 6, seeds=2)  # the seed is done, so it is written; the next one begins
    assert newest(out, 1) == 1
    stopped(out, 3, seeds=2)
    tune(out, seeds=2)
    assert_same(outcome(out), outcome(tmp_path / "whole"))


def test_a_late_signal_loses_no_step(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look whether to save and the look whether to end."""

    def save_if_due(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.trainer.step_number == 4:
            signal.raise_signal(signal.SIGTERM)

    original = module._SeedRun.save_if_due
    monkeypatch.setattr(module._SeedRun, "save_if_due", save_if_due)
    with pytest.raises(Stopped):
        tune(tmp_path)
    assert newest(tmp_path, 0) >= 4


def test_a_save_is_made_between_the_steps_of_its_own_stream(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any other stream the next step could change what is still being copied."""
    inside, seen = list[bool](), list[bool]()

    @contextlib.contextmanager
    def at_work(_: Trainer) -> Generator[None]:
        inside.append(True)
        yield
        inside.pop()

    def save(self: Any, *args: Any) -> None:
        seen.append(bool(inside))
        original(self, *args)

    original = module.Saver.save
    monkeypatch.setattr(Trainer, "at_work", at_work)
    monkeypatch.setattr(module.Saver, "save", save)
    tune(tmp_path, save_every=3)
    assert len(seen) > 2
    assert all(seen)


def test_recording_bears_saves_of_other_seeds(
    tokenizer: Tokenizer,
    features_of: Callable[[Task], Features],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They run in threads: a graph that forbids them to use the device breaks the run."""
    modes = list[Any]()

    class Graph:
        def capture_begin(self, **settings: Any) -> None:
            modes.append(settings.get("capture_error_mode"))

        def capture_end(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    trainer = trainer_of(tokenizer, features_of(RULE), RULE, 2)
    trainer.record(trainer.lengths[0])
    assert modes == ["thread_local"]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("table"))


def write_table(directory: Path) -> Path:
    for split, part in loaded(RULE, 120, 40).splits.items():
        rows = zip(part.texts, part.labels or [""] * len(part.texts), strict=True)
        with open(directory / f"{split}.csv", "w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *((t[0], y) for t, y in rows)])
    return directory


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), tokenizer)


def write_model(directory: Path, tokenizer: Tokenizer) -> Path:
    """A directory as transformers writes it."""
    torch.manual_seed(0)
    network = transformers.ElectraModel(
        peers.electra_config(CONFIG, tokenizer.vocab_size, num_labels=2)
    )
    network.save_pretrained(directory)
    tokenizer.save(directory)
    return directory


def command(model: Path, table: Path, out: Path) -> list[str]:
    places = ["--model", str(model), "--data", str(table), "--out", str(out)]
    flags = "--learning-rate 3e-3 --epochs 5 --batch-size 8 --seeds 2 --save-every 3 --quiet"
    flags += " --keep-epoch best"
    return ["finetune", *places, *flags.split(), "--threads", "1", "--device", "cpu"]


def start(arguments: list[str], fault: str = "") -> subprocess.Popen[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "electra", *arguments],
        env=environment | ({"ELECTRA_FAULT": fault} if fault else {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    while process.poll() is None and not condition():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.002)


@pytest.fixture(scope="module")
def uninterrupted(
    model: Path, table: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("uninterrupted")
    assert cli.run(command(model, table, out)) == 0
    found = outcome(out)
    assert all(seed["kept_epoch"] < 5 for seed in found["results.json"]["seeds"])
    return found


def test_a_request_to_stop_ends_with_its_own_code(
    model: Path, table: Path, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    arguments = command(model, table, tmp_path)
    process = start(arguments)
    wait_for(process, lambda: any(tmp_path.glob("seed-*/checkpoints/step-*")))
    process.terminate()
    _, told = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "stopped and saved; the same command continues" in told
    assert cli.run(arguments) == 0
    assert_same(outcome(tmp_path), uninterrupted)


def test_six_kills_change_nothing(
    model: Path, table: Path, uninterrupted: dict[str, Any], tmp_path: Path
) -> None:
    draw = random.Random(6)
    arguments = command(model, table, tmp_path)

    def saved(seed: int, more: int) -> Callable[[], bool]:
        def newest_of() -> int:
            places = tmp_path.glob(f"seed-{seed}/checkpoints/step-*")
            return max((int(p.name[5:]) for p in places), default=0)

        before = newest_of()
        return lambda: newest_of() >= before + 3 * more

    moments: list[str | Callable[[], bool]] = [
        saved(0, draw.randint(1, 6)),
        f"before_rename:{draw.randint(2, 3)}",
        saved(0, draw.randint(1, 6)),
        (tmp_path / "seed-0" / "result.json").is_file,
        f"during_prune:{draw.randint(2, 3)}",
        (tmp_path / "seed-1" / "result.json").is_file,
    ]
    for moment in moments:
        process = start(arguments, moment if isinstance(moment, str) else "")
        if not isinstance(moment, str):
            wait_for(process, moment)
            process.kill()
        _, told = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, told
    assert not (tmp_path / "results.json").exists()
    assert cli.run(arguments) == 0
    assert_same(outcome(tmp_path), uninterrupted)


def test_a_crash_while_a_seed_is_written(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines are in the metrics already; they are cut, and written once."""

    def fails(path: Path, data: Any) -> None:
        if path.match("seed-1/result.json"):
            raise OSError("no power")
        original(path, data)

    original = module.write_atomic
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_atomic", fails)
        with pytest.raises(OSError, match="no power"):
            tune(tmp_path / "run", seeds=2)
    assert len(read_metrics(tmp_path / "run")) == 6
    tune(tmp_path / "run", seeds=2)
    tune(tmp_path / "whole", seeds=2)
    assert_same(outcome(tmp_path / "run"), outcome(tmp_path / "whole"))


def test_a_seed_knows_nothing_of_the_one_before(tune: Tune, tmp_path: Path) -> None:
    tune(tmp_path / "both", seeds=2, keep="all")
    tune(tmp_path / "second", seed=1)
    name = "seed-1/weights.safetensors"
    assert (tmp_path / "both" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_more_seeds_keep_the_first(tune: Tune, tmp_path: Path) -> None:
    def files(out: Path) -> dict[str, int]:
        return {str(p.relative_to(out)): p.stat().st_mtime_ns for p in out.glob("seed-[01]/*")}

    out = tmp_path / "grown"
    tune(out, seeds=2, keep="all")
    before, metrics = files(out), (out / "metrics.jsonl").read_bytes()
    assert tune(out, seeds=3, keep="all")["summary"]["seeds"] == 3
    assert files(out) == before
    assert (out / "metrics.jsonl").read_bytes().startswith(metrics)
    tune(tmp_path / "at once", seeds=3, keep="all")
    assert_same(outcome(out), outcome(tmp_path / "at once"))


def test_fewer_seeds_than_before(tune: Tune, tmp_path: Path) -> None:
    tune(tmp_path, seeds=3, keep="all")
    assert tune(tmp_path, seeds=1, keep="all")["summary"]["seeds"] == 1


def test_fewer_seeds_whose_best_was_not_kept(tune: Tune, tmp_path: Path) -> None:
    """Nothing is written, and both ways out that are told lead out."""
    scores = [seed["score"] for seed in tune(tmp_path / "a", **DIFFERENT)["seeds"]]
    assert max(scores[:2]) < scores[2]
    best = scores.index(max(scores[:2]))
    before = outcome(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "results.json").unlink()  # as after a kill at the end of the last seed
    for name in "ab":
        with pytest.raises(ElectraError, match="best of these 2 seeds were not kept") as caught:
            tune(tmp_path / name, **DIFFERENT | {"seeds": 2})
        place = tmp_path / name / f"seed-{best}"
        assert caught.value.where == str(place)
        assert caught.value.fix.startswith(f"ask for 3 seeds as before, or delete {place};")
        if name == "a":
            assert_same(outcome(tmp_path / name), before)
        tune(tmp_path / name, **DIFFERENT)
        assert_same(outcome(tmp_path / name), before)
    shutil.rmtree(place)
    assert tune(tmp_path / "b", **DIFFERENT | {"seeds": 2})["summary"]["best"] == scores[best]
    # The weights of the third seed are still there.
    assert tune(tmp_path / "b", **DIFFERENT)["summary"]["best"] == scores[2]


def test_a_run_that_is_done_is_left_alone(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tune(tmp_path)
    before = (tmp_path / "model").stat().st_mtime_ns
    monkeypatch.delattr(Trainer, "step")
    assert tune(tmp_path) == first
    assert (tmp_path / "model").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"learning_rate": 2e-3}, "learning_rate"),
        ({"epochs": 1.0, "seed": 5}, "epochs.*seed"),
        ({"data": loaded(seed=9)}, "another data"),
        (
            {"data": loaded(replace(RULE, labels=("a", "b")))},
            r"task.labels: \['dry', 'wet'\] → \['a', 'b'\]",
        ),
        ({"data": loaded(replace(RULE, name="b"), seed=9)}, "another data; task.name: rule → b"),
    ],
)
def test_another_run_is_refused(
    changes: dict[str, Any], told: str, tune: Tune, tmp_path: Path
) -> None:
    tune(tmp_path)
    before = outcome(tmp_path)
    with pytest.raises(ElectraError, match=f"other settings: .*{told}") as caught:
        tune(tmp_path, **changes)
    assert caught.value.where == str(tmp_path)
    assert "another --out" in caught.value.fix
    assert_same(outcome(tmp_path), before)


def test_a_task_may_be_called_otherwise(tune: Tune, tmp_path: Path) -> None:
    """As a table in memory is, which has no file's name; the run and its files keep theirs."""
    tune(tmp_path)
    before = outcome(tmp_path)
    tune(tmp_path, data=loaded(replace(RULE, name="data")))
    assert_same(outcome(tmp_path), before)


def test_the_unit_of_a_table_s_numbers_changes_nothing(tune: Tune, tmp_path: Path) -> None:
    """Nor where they begin: years and degrees are learned as well as shares."""
    found = list[tuple[Any, float]]()
    train = loaded(SHARE).splits["train"]
    texts = [*zip(train.texts, train.labels, strict=True)]
    for name, unit, zero in (("share", 1.0, 0.0), ("year", 3.0, 2000.0), ("cold", 0.5, -300.0)):
        rows = [json.dumps({"text": a, "label": zero + unit * (y + 0.5)}) for (a,), y in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
        data = tasks.load(None, tmp_path / f"{name}.jsonl", kind="regression")
        results = tune(tmp_path / name, data=data)
        model = hf.load_finetuned(tmp_path / name)
        answer = answer_texts(model, [("one river",)], torch.device("cpu"))[0]["prediction"]
        found.append((results["seeds"][0]["scores"]["dev"]["pearson"], (answer - zero) / unit))
    assert found[1] == pytest.approx(found[0], abs=1e-3)
    assert found[2] == pytest.approx(found[0], abs=1e-3)


def test_a_record_from_before_tasks_had_an_offset(tune: Tune, tmp_path: Path) -> None:
    tune(tmp_path, data=loaded(SHARE))
    record = json.loads((tmp_path / "finetune.json").read_bytes())
    del record["task"]["offset"]
    (tmp_path / "finetune.json").write_text(json.dumps(record))
    assert tune(tmp_path, data=loaded(SHARE), seeds=2)["summary"]["seeds"] == 2


def test_a_run_that_saved_nothing_takes_other_settings(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a refusal advises, such as a smaller batch, can be done in the same directory."""

    def no_memory(_: Trainer) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", no_memory)
        with pytest.raises(ElectraError, match="no memory"):
            tune(tmp_path / "run", batch_size=16)
    tune(tmp_path / "run", batch_size=4)
    tune(tmp_path / "new", batch_size=4)
    assert_same(outcome(tmp_path / "run"), outcome(tmp_path / "new"))


def test_what_lies_at_the_place_of_the_model_is_seen_before_training(
    tune: Tune, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").touch()
    with pytest.raises(ElectraError, match="something else at the place of the export"):
        tune(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_another_model_is_refused(tokenizer: Tokenizer, tune: Tune, tmp_path: Path) -> None:
    tune(tmp_path)
    with pytest.raises(ElectraError, match="another model"):
        tune(tmp_path, encoder=encoder_of(tokenizer, seed=1))


def test_what_does_not_matter_may_change(tune: Tune, tmp_path: Path) -> None:
    tune(tmp_path)
    tune(tmp_path, seeds=2, keep="all", save_every=5, at_once=2)


def test_a_continued_run_keeps_its_threads(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what another measurement finds: sums would be rounded otherwise."""
    tune(tmp_path, threads=1)
    monkeypatch.setattr(runtimes, "fastest_threads", lambda: 2)
    tune(tmp_path, threads=None, seeds=2)
    assert json.loads((tmp_path / "finetune.json").read_bytes())["threads"] == 1


@pytest.mark.parametrize("name", ["result.json", "predictions.safetensors", "weights.safetensors"])
def test_damage_is_told_and_its_advice_helps(name: str, tune: Tune, tmp_path: Path) -> None:
    tune(tmp_path, seeds=2, keep="all")
    before = outcome(tmp_path)
    best = max(range(2), key=lambda i: before["results.json"]["seeds"][i]["score"])
    file = tmp_path / f"seed-{best}" / name
    file.write_bytes(file.read_bytes()[:-9])
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(CorruptError) as caught:
        tune(tmp_path, seeds=2, keep="all")
    assert caught.value.where == str(file)
    assert f"delete {file.parent};" in caught.value.fix
    shutil.rmtree(file.parent)
    tune(tmp_path, seeds=2, keep="all")
    after = outcome(tmp_path)
    lines = [sorted(found.pop("metrics.jsonl").splitlines()) for found in (after, before)]
    assert lines[0] == lines[1]
    assert_same(after, before)


# ---------------------------------------------------------------------- scores by epoch

# In its fourth epoch of five it is better than in the last one.
UNSTEADY: dict[str, Any] = {"data": loaded(dev=200), "seed": 1, "epochs": 5.0, "dropout": 0.1}


@pytest.mark.parametrize("task", [*GLUE.values(), *SQUAD.values()], ids=lambda task: task.name)
def test_the_tasks_of_the_paper_are_scored_at_the_end(task: Task) -> None:
    assert resolve(FinetuneConfig(), CONFIG, task).eval_every == "end"
    best = FinetuneConfig(keep_epoch="best")
    assert resolve(best, CONFIG, task).eval_every == "epoch"


@pytest.mark.parametrize("task", [RULE, SHARE, TAGS, replace(RULE, name="cola")])
def test_a_table_of_ones_own_is_scored_after_every_epoch(task: Task) -> None:
    assert resolve(FinetuneConfig(), CONFIG, task).eval_every == "epoch"
    assert resolve(FinetuneConfig(eval_every="end"), CONFIG, task).eval_every == "end"


@pytest.mark.parametrize(
    ("given", "where", "fix"),
    [
        ({"keep_epoch": "best", "eval_every": "end"}, "eval_every", "use epoch"),
        ({"patience": 2}, "patience", "--keep-epoch best"),
        ({"patience": 0, "keep_epoch": "best"}, "patience", "at least 1"),
    ],
)
def test_settings_that_contradict_each_other(given: Any, where: str, fix: str) -> None:
    with pytest.raises(ElectraError) as caught:
        FinetuneConfig(**given)
    assert caught.value.where == where
    assert fix in caught.value.fix


def test_several_processes_are_refused(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ElectraError, match="Several processes"):
        tune(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("task", [RULE, SHARE, TAGS], ids=lambda task: task.kind)
def test_scoring_changes_no_bit(task: Task, tune: Tune, tmp_path: Path) -> None:
    """Of the weights, of the answers, of the losses and of what is said of the end."""
    found = dict[str, dict[str, Any]]()
    for when in ("epoch", "end"):
        changes: dict[str, Any] = {"epochs": 2.4, "dropout": 0.1, "attention_dropout": 0.1}
        tune(tmp_path / when, data=loaded(task), seeds=2, keep="all", eval_every=when, **changes)
        found[when] = outcome(tmp_path / when)
    for seed in range(2):
        for name in ("weights.safetensors", "predictions.safetensors"):
            assert found["epoch"][f"seed-{seed}/{name}"] == found["end"][f"seed-{seed}/{name}"]
        result, plain = (found[when][f"seed-{seed}/result.json"] for when in found)
        epochs = result.pop("epochs")
        assert result == plain
        assert [(epoch["epoch"], epoch["step"]) for epoch in epochs] == [(1, 6), (2, 12), (3, 14)]
        assert epochs[-1]["score"] == plain["score"]
        assert epochs[-1]["scores"] == plain["scores"]["dev"]
    lines = {when: read_metrics(tmp_path / when) for when in found}
    scored = {when: [m for m in lines[when] if m["kind"] == "eval"] for when in lines}
    assert [m["step"] for m in scored["epoch"]] == [6, 12, 14, 20, 26, 28]
    assert scored["end"] == [m for m in scored["epoch"] if m["step"] in (14, 28)]
    losses = [[m for m in lines[when] if m["kind"] == "train"] for when in lines]
    assert losses[0] == losses[1]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], dict[str, Tensor]]:
    """The weights after every step, by seed and step."""
    found: dict[tuple[int, int], dict[str, Tensor]] = {}

    def step(self: Trainer) -> None:
        original(self)
        found[self.seed, self.step_number] = self.weights()

    original = Trainer.step
    monkeypatch.setattr(Trainer, "step", step)
    return found


def same_weights(file: Path, weights: dict[str, Tensor]) -> bool:
    kept = load_file(file)
    assert kept.keys() == weights.keys()
    return all((kept[name] == tensor.numpy()).all() for name, tensor in weights.items())


def test_the_best_epoch_is_kept(
    tune: Tune, seen: dict[tuple[int, int], dict[str, Tensor]], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    results = tune(tmp_path, keep_epoch="best", **UNSTEADY)
    (seed,) = results["seeds"]
    # Every score is that of the weights of its moment, told by a model of their own.
    config = settings(RULE, **{k: v for k, v in UNSTEADY.items() if k != "data"})
    data = TextData(UNSTEADY["data"], tokenizer, config)
    for epoch in seed["epochs"]:
        alone = empty_model("classification", CONFIG, tokenizer.vocab_size, 2, "paper")
        alone.load_state_dict(seen[1, epoch["step"]], assign=True)
        said = predict(alone, data.splits["dev"], torch.device("cpu"))
        assert epoch["scores"] == data.score("dev", said)
    scores = [epoch["score"] for epoch in seed["epochs"]]
    assert len(scores) == 5
    assert seed["kept_epoch"] == 1 + scores.index(max(scores)) == 4
    assert (seed["score"], seed["last_score"]) == (max(scores), scores[-1])
    assert seed["scores"]["dev"] == seed["epochs"][3]["scores"]
    assert (seed["steps"], results["summary"]["best"]) == (30, max(scores))
    # What is exported, answered and told is of that epoch.
    assert same_weights(tmp_path / "seed-1" / "weights.safetensors", seen[1, 24])
    assert not same_weights(tmp_path / "seed-1" / "weights.safetensors", seen[1, 30])
    exported = load_file(tmp_path / "model" / "head.safetensors")["head.out.weight"]
    assert (exported == seen[1, 24]["head.out.weight"].numpy()).all()
    right = predictions(tmp_path, 1, "dev").argmax(1) == UNSTEADY["data"].splits["dev"].labels
    assert right.mean() == pytest.approx(max(scores))
    assert "optimistic" in json.loads((tmp_path / "results.json").read_bytes())["epoch_choice"]
    card = (tmp_path / "model" / "README.md").read_text()
    assert results["epoch_choice"] in card
    assert f"| 4 of 5 | {100 * scores[-1]:.1f} |" in card
    assert "median of 1 seeds, epochs chosen by it" in card
    assert results["epoch_choice"] in report([tmp_path])


def test_the_last_epoch_is_kept_unless_asked(
    tune: Tune, seen: dict[tuple[int, int], dict[str, Tensor]], tmp_path: Path
) -> None:
    results = tune(tmp_path, **UNSTEADY)
    assert same_weights(tmp_path / "seed-1" / "weights.safetensors", seen[1, 30])
    assert results["summary"]["best"] == results["seeds"][0]["epochs"][-1]["score"]
    assert not {"kept_epoch", "last_score"} & results["seeds"][0].keys()
    assert "epoch_choice" not in results
    for text in ((tmp_path / "model" / "README.md").read_text(), report([tmp_path])):
        assert "optimistic" not in text
        assert "chosen" not in text


def test_of_several_seeds_each_keeps_its_best_epoch(
    tune: Tune, seen: dict[tuple[int, int], dict[str, Tensor]], tmp_path: Path
) -> None:
    results = tune(tmp_path, keep_epoch="best", keep="all", seeds=3, **UNSTEADY)
    kept = [seed["kept_epoch"] for seed in results["seeds"]]
    assert len(set(kept)) > 1
    for seed, epoch in zip(results["seeds"], kept, strict=True):
        weights = tmp_path / f"seed-{seed['seed']}" / "weights.safetensors"
        assert same_weights(weights, seen[seed["seed"], 6 * epoch])
        assert seed["score"] == max(e["score"] for e in seed["epochs"])
    assert results["summary"]["best"] == max(seed["score"] for seed in results["seeds"])


@pytest.mark.parametrize("name", ["squad1", "squad2"])
def test_the_best_epoch_of_questions(name: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    task = SQUAD[name]
    asked = [q for q in questions(120) if name == "squad2" or q.answers]
    changes: dict[str, Any] = {"length": None, "learning_rate": 5e-3, "batch_size": 16}
    config = settings(task, keep_epoch="best", epochs=4.0, **changes)
    data = SquadData({"train": asked[:60], "dev": asked[60:]}, task, tokenizer, config)
    (seed,) = finetune(config, encoder_of(tokenizer), data, tmp_path, quiet=True)["seeds"]
    f1 = [epoch["scores"][task.metric] for epoch in seed["epochs"]]
    assert len(f1) == 4
    assert seed["kept_epoch"] == 1 + f1.index(max(f1))
    assert seed["score"] == max(f1) > 0


def scripted(monkeypatch: pytest.MonkeyPatch, scores: Sequence[float]) -> None:
    """The dev score of a seed's epochs is what the script says, whatever the weights."""

    def score_epoch(self: Any) -> None:
        now[0] = self.trainer.step_number // self.trainer.per_epoch
        original(self)
        now[0] = 0

    def score(self: TextData, split: str, predictions: Any) -> dict[str, float]:
        found = real(self, split, predictions)
        return found | {"accuracy": scores[now[0] - 1]} if now[0] else found

    now, original, real = [0], module._SeedRun.score_epoch, TextData.score
    monkeypatch.setattr(module._SeedRun, "score_epoch", score_epoch)
    monkeypatch.setattr(TextData, "score", score)


@pytest.mark.parametrize(
    ("scores", "patience", "epochs", "kept"),
    [
        ((0.5, 0.6, 0.6, 0.5, 0.9), None, 5, 5),
        ((0.5, 0.6, 0.6, 0.5, 0.9), 3, 5, 5),
        ((0.5, 0.6, 0.6, 0.5, 0.9), 2, 4, 2),  # an equal score is no better one
        ((0.5, 0.6, 0.6, 0.5, 0.9), 1, 3, 2),
        ((0.7, 0.6, 0.7, 0.7, 0.7), None, 5, 1),  # of equal ones the first
        ((0.5, 0.4, 0.6, 0.4, 0.7), 2, 5, 5),  # a better one begins the count anew
    ],
)
def test_patience_and_ties(
    scores: tuple[float, ...],
    patience: int | None,
    epochs: int,
    kept: int,
    tune: Tune,
    seen: dict[tuple[int, int], dict[str, Tensor]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted(monkeypatch, scores)
    results = tune(tmp_path, epochs=5.0, keep_epoch="best", patience=patience, save_every=3)
    (seed,) = results["seeds"]
    assert [epoch["score"] for epoch in seed["epochs"]] == [*scores[:epochs]]
    assert (seed["kept_epoch"], seed["last_score"]) == (kept, scores[epochs - 1])
    assert seed["steps"] == max(step for _, step in seen) == 6 * epochs
    assert same_weights(tmp_path / "seed-0" / "weights.safetensors", seen[0, 6 * kept])
    lines = [m["step"] for m in read_metrics(tmp_path) if m["kind"] == "train"]
    assert lines == [*range(20, 6 * epochs, 20), 6 * epochs]  # none of steps that were not made
    assert not (tmp_path / "seed-0" / "checkpoints").exists()


def test_a_seed_that_lost_patience_leaves_the_next_one_alone(
    tune: Tune,
    stopped: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted(monkeypatch, (0.6, 0.5, 0.4, 0.3, 0.2))
    given: dict[str, Any] = {"epochs": 5.0, "keep_epoch": "best", "patience": 2, "keep": "all"}
    tune(tmp_path / "both", seeds=2, **given)
    tune(tmp_path / "second", seed=1, **given)
    name = "seed-1/weights.safetensors"
    assert (tmp_path / "both" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    out = tmp_path / "run"
    for after in (12, 6, 1):  # after the second epoch; at the end of the seed; in the next one
        stopped(out, after, seeds=2, **given)
    tune(out, seeds=2, **given)
    assert_same(outcome(out), outcome(tmp_path / "both"))


@pytest.fixture(scope="module")
def unsteady(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run without an interruption leaves."""
    out = tmp_path_factory.mktemp("unsteady")
    config = settings(RULE, **{k: v for k, v in UNSTEADY.items() if k != "data"}, keep_epoch="best")
    data = TextData(UNSTEADY["data"], tokenizer, config)
    finetune(config, encoder_of(tokenizer), data, out, quiet=True)
    return outcome(out)


def without_frequency(found: dict[str, Any]) -> dict[str, Any]:
    for record in ("finetune.json", "results.json"):
        found[record]["settings"].pop("save_every", None)
    found["model/electra.json"]["results"]["settings"].pop("save_every", None)
    return found


@pytest.mark.parametrize("every", [1, 6, 7])  # steps; an epoch has 6
@pytest.mark.parametrize(
    ("owner", "name", "count"),
    [
        (module, "predict", 4),  # the fourth epoch, the best, while it is scored
        (Trainer, "weights", 3),  # scored, and not yet kept: it is the third that was the best
        (module.RunLog, "write", 4),  # kept, not yet in the log
        (module.Saver, "save", 4),  # in the log, not yet in a checkpoint
        (module, "predict", 6),  # all steps are done, the best weights are back
        (module._SeedRun, "_tell", 1),
    ],
    ids=["scoring", "keeping", "logging", "saving", "the end", "telling"],
)
def test_a_crash_around_a_score_changes_nothing(
    every: int,
    owner: Any,
    name: str,
    count: int,
    tune: Tune,
    unsteady: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left, original = [count], getattr(owner, name)

    def fails(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise OSError("no power")
        return original(*args, **kwargs)

    given, before = {**UNSTEADY, "keep_epoch": "best", "save_every": every}, threading.enumerate()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        with pytest.raises(OSError, match="no power"):
            tune(tmp_path, **given)
    for thread in {*threading.enumerate()} - {*before}:  # a save that a kill would have ended
        thread.join()
    tune(tmp_path, **given)
    assert_same(without_frequency(outcome(tmp_path)), without_frequency(unsteady))


def test_stops_around_epochs_change_nothing(
    tune: Tune, stopped: Callable[..., None], unsteady: dict[str, Any], tmp_path: Path
) -> None:
    given = {**UNSTEADY, "keep_epoch": "best"}
    # Before the end of the first epoch, at it; at that of the fourth, after it; at the last step.
    for after in (5, 1, 18, 1, 4):
        stopped(tmp_path, after, **given)
    tune(tmp_path, **given)
    assert_same(without_frequency(outcome(tmp_path)), without_frequency(unsteady))


def test_damaged_best_weights_are_not_taken(
    tune: Tune, stopped: Callable[..., None], tmp_path: Path
) -> None:
    given = {**UNSTEADY, "keep_epoch": "best"}
    stopped(tmp_path, 25, **given)
    file = tmp_path / "seed-1" / "checkpoints" / "step-00000025" / "best.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="No checkpoint is intact"):
        tune(tmp_path, **given)


def test_a_run_from_before_there_were_epochs_goes_on(
    tune: Tune, stopped: Callable[..., None], tmp_path: Path
) -> None:
    """Its record and its checkpoint know nothing of them."""
    stopped(tmp_path / "run", 8, eval_every="end")
    record = tmp_path / "run" / "finetune.json"
    known = json.loads(record.read_bytes())
    for name in ("eval_every", "keep_epoch", "patience"):
        known["settings"].pop(name)
    record.write_text(json.dumps(known))
    state = tmp_path / "run" / "seed-0" / "checkpoints" / "step-00000008" / "state.json"
    assert json.loads(state.read_bytes())["epochs"] == []
    with pytest.raises(ElectraError, match="keep_epoch: last → best"):
        tune(tmp_path / "run", keep_epoch="best")
    (seed,) = tune(tmp_path / "run")["seeds"]
    assert [epoch["epoch"] for epoch in seed["epochs"]] == [2]
    tune(tmp_path / "whole")
    name = "seed-0/weights.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_scores_that_stop_before_the_end(
    tune: Tune, stopped: Callable[..., None], tmp_path: Path
) -> None:
    """Asked for the end alone in the middle of a seed, it still has the score of its end."""
    stopped(tmp_path, 8)
    (seed,) = tune(tmp_path, eval_every="end")["seeds"]
    assert [epoch["epoch"] for epoch in seed["epochs"]] == [1]
    scored = [m for m in read_metrics(tmp_path) if m["kind"] == "eval"]
    assert [m["step"] for m in scored] == [6, 12]
    assert scored[-1]["accuracy"] == seed["score"]


def test_what_is_scored_has_been_computed(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device is told the steps ahead of time: a score waits for them, and so does what it reads
    of weights that are put back, which happens in the trainer's own stream."""
    done = list[str]()

    def watch(owner: Any, name: str) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            done.append(name)
            return original(*args, **kwargs)

        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, call)

    @contextlib.contextmanager
    def at_work(_: Trainer) -> Generator[None]:
        done.append("begin")
        yield
        done.append("end")

    monkeypatch.setattr(Trainer, "at_work", at_work)
    watch(Trainer, "wait")
    watch(Adam, "load")
    watch(module, "predict")
    tune(tmp_path, keep_epoch="best")
    scored = [i for i, name in enumerate(done) if name == "predict"]
    assert len(scored) == 4  # two epochs; at the end dev and test
    assert [done[i - 1] for i in scored] == ["wait", "wait", "wait", "predict"]
    assert done[scored[2] - 4 : scored[2]] == ["begin", "load", "end", "wait"]


def test_every_epoch_is_told(tokenizer: Tokenizer, tmp_path: Path, capsys: Any) -> None:
    config = settings(RULE, keep_epoch="best", epochs=2.0)
    data = TextData(loaded(), tokenizer, config)
    (seed,) = finetune(config, encoder_of(tokenizer), data, tmp_path)["seeds"]
    told = capsys.readouterr().err
    for epoch in seed["epochs"]:
        shown = f"rule seed 0 epoch {epoch['epoch']} of 2: accuracy {100 * epoch['score']:.2f}"
        assert shown in told
    best = f"accuracy {100 * seed['score']:.2f} of epoch {seed['kept_epoch']}, the best"
    assert f"rule seed 0: {best}" in told


# ---------------------------------------------------------------------- learning


@pytest.mark.parametrize(
    ("task", "at_least"),
    [(RULE, 0.95), (SHARE, 0.85), (TAGS, 0.95)],  # half of the numbers are 0: ranks are rough
    ids=["classification", "regression", "tagging"],
)
def test_a_rule_is_learned(task: Task, at_least: float, tune: Tune, tmp_path: Path) -> None:
    results = tune(tmp_path, data=loaded(task, 320, 100), epochs=6.0, batch_size=16)
    assert results["summary"]["failed"] == 0
    assert results["summary"]["median"] > at_least
    losses = [m["loss"] for m in read_metrics(tmp_path) if m["kind"] == "train"]
    assert losses[-1] < losses[0] / 2


def test_answers_to_questions_are_learned(tokenizer: Tokenizer, tmp_path: Path) -> None:
    task, asked = SQUAD["squad1"], [q for q in questions(500) if q.answers]
    still = {"dropout": 0.0, "attention_dropout": 0.0, "length": None}
    config = settings(task, learning_rate=5e-3, epochs=25.0, batch_size=16, **still)
    data = SquadData({"train": asked[:300], "dev": asked[300:]}, task, tokenizer, config)
    results = finetune(config, encoder_of(tokenizer), data, tmp_path, quiet=True)
    assert results["summary"]["median"] > 0.75
    assert results["ensemble"] is None


def test_a_hopeless_run_is_counted_and_kept(tune: Tune, tmp_path: Path) -> None:
    results = tune(tmp_path, learning_rate=1e-9, seeds=2)
    assert [seed["failed"] for seed in results["seeds"]] == [True, True]
    assert (results["summary"]["failed"], results["summary"]["seeds"]) == (2, 2)
    assert "2 failed" in report([tmp_path])


def spoiled() -> Loaded:
    """One row of training gives a gradient that is not finite."""
    data = loaded(SHARE)
    data.splits["train"].labels[5] = float("inf")
    return data


def test_a_bad_step_does_not_reach_the_weights(tune: Tune, tmp_path: Path) -> None:
    results = tune(tmp_path, data=spoiled(), epochs=3.0)
    assert results["seeds"][0]["bad_steps"] == 3
    weights = load_file(tmp_path / "seed-0" / "weights.safetensors")
    assert all(np.isfinite(array).all() for array in weights.values())
    assert results["summary"]["failed"] == 0
    losses = [m["loss"] for m in read_metrics(tmp_path) if m["kind"] == "train"]
    assert losses == ["inf"]


def test_bad_steps_outlive_a_stop(tune: Tune, stopped: Callable[..., None], tmp_path: Path) -> None:
    tune(tmp_path / "whole", data=spoiled(), epochs=3.0)
    stopped(tmp_path / "run", 12, data=spoiled(), epochs=3.0)
    tune(tmp_path / "run", data=spoiled(), epochs=3.0)
    assert_same(outcome(tmp_path / "run"), outcome(tmp_path / "whole"))


@pytest.mark.parametrize(("at_once", "fix"), [(1, "--batch-size"), (5, "--at-once 2")])
def test_a_device_without_memory_is_told_what_takes_less(
    tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, fix: str
) -> None:
    def without_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Trainer, "train_step", without_memory)
    with pytest.raises(ElectraError, match="no memory left with batches of 8") as caught:
        tune(tmp_path / "run")
    assert "--batch-size" in caught.value.fix
    with pytest.raises(ElectraError) as caught, module._device_errors(SETTINGS, at_once):
        without_memory()
    assert fix in caught.value.fix
    with pytest.raises(RuntimeError, match="illegal"), module._device_errors(SETTINGS, at_once):
        raise RuntimeError("illegal address")


def test_a_rate_that_is_far_too_high(
    tokenizer: Tokenizer, features_of: Callable[[Task], Features]
) -> None:
    trainer = trainer_of(tokenizer, features_of(RULE), RULE, 2)
    trainer.rates.fill_(1e30)
    all_losses(trainer)
    assert int(trainer.optimizer.bad_steps) == STEPS - 1
    assert all(t.isfinite().all() for t in trainer.weights().values())
    trainer.begin(3)
    assert int(trainer.optimizer.bad_steps) == 0


# ---------------------------------------------------------------------- what a run leaves


DIFFERENT: dict[str, Any] = {"data": loaded(dev=200), "epochs": 6.0, "seeds": 3}  # scores


def predictions(out: Path, seed: int, split: str) -> Any:
    return load_file(out / f"seed-{seed}" / "predictions.safetensors")[f"{split}.logits"]


@pytest.mark.parametrize(("keep", "kept"), [("best", 1), ("all", 3)])
def test_weights_that_are_kept(keep: str, kept: int, tune: Tune, tmp_path: Path) -> None:
    results = tune(tmp_path, keep=keep, **DIFFERENT)
    scores = [seed["score"] for seed in results["seeds"]]
    best = scores.index(max(scores))
    assert len(set(scores)) > 1
    files = sorted(tmp_path.glob("seed-*/weights.safetensors"))
    assert len(files) == kept
    assert tmp_path / f"seed-{best}" / "weights.safetensors" in files
    head = load_file(tmp_path / "model" / "head.safetensors")["head.out.weight"]
    assert (head == load_file(files[best if kept > 1 else 0])["head.out.weight"]).all()
    assert not list(tmp_path.glob("seed-*/checkpoints"))


def test_what_does_nothing_is_said(tokenizer: Tokenizer, tune: Tune, tmp_path: Path) -> None:
    def said(data: Loaded, **changes: Any) -> list[str]:
        asked = FinetuneConfig(**{"epochs": 2.0, "length": 20, **changes})
        config = resolve(asked, encoder_of(tokenizer).config, data.task)
        return without_effect(asked, config, TextData(data, tokenizer, config), tmp_path)

    one = DIFFERENT["data"]
    pairs = [(a, b) for (a,), (b,) in itertools.pairwise(one.splits["train"].texts)]
    labels = one.splits["train"].labels[1:]
    two = replace(
        one,
        task=replace(one.task, texts=("a", "b")),
        splits=dict.fromkeys(("train", "dev"), Examples(pairs, labels, list(map(str, labels)))),
    )
    assert said(one, keep="all") == []  # nothing is there yet
    (told,) = said(one, both_orders=True)
    assert told.startswith("both_orders True has no effect")
    for data, value in ((two, True), (one, False), (one, None)):
        assert said(data, both_orders=value) == []
    for epochs, patience, idle in (
        (4.0, 2, False),
        (3.0, 2, True),
        (2.5, 2, True),
        (3.0, 1, False),
    ):
        found = said(one, keep_epoch="best", epochs=epochs, patience=patience)
        assert [text.partition(" in ")[0] for text in found] == (
            [f"patience {patience} has no effect"] if idle else []
        )
        assert all(f"it needs {patience + 2} or more" in text for text in found)

    results = tune(tmp_path, **DIFFERENT)
    scores = [seed["score"] for seed in results["seeds"]]
    gone = [f"seed-{i}" for i in range(3) if i != scores.index(max(scores))]
    assert said(one, seeds=3) == []
    (told,) = said(one, seeds=3, keep="all")
    assert f"keep all has no effect on {', '.join(gone)}: the weights are gone" in told
    for name in gone:  # as it says
        shutil.rmtree(tmp_path / name)
    tune(tmp_path, keep="all", **DIFFERENT)
    assert said(one, seeds=3, keep="all") == []
    assert len(list(tmp_path.glob("seed-*/weights.safetensors"))) == 3


def test_a_seed_beyond_those_asked_for_does_not_count(tune: Tune, tmp_path: Path) -> None:
    """It was better, so that the weights of the others are gone."""
    tune(tmp_path)
    better = shutil.copytree(tmp_path / "seed-0", tmp_path / "seed-1") / "result.json"
    better.write_text(json.dumps(json.loads(better.read_bytes()) | {"seed": 1, "score": 2.0}))
    shutil.rmtree(tmp_path / "seed-0")
    shutil.rmtree(tmp_path / "model")
    assert tune(tmp_path)["summary"]["best"] <= 1
    assert (tmp_path / "seed-0" / "weights.safetensors").is_file()


def test_an_ensemble_is_the_mean_of_probabilities(tune: Tune, tmp_path: Path) -> None:
    results = tune(tmp_path, **DIFFERENT)
    mean = np.zeros((200, 2))
    for seed in range(3):
        e = np.exp(predictions(tmp_path, seed, "dev").astype(np.float64))
        mean += e / e.sum(1, keepdims=True) / 3
    right = (mean.argmax(1) == np.array(DIFFERENT["data"].splits["dev"].labels)).mean()
    assert results["ensemble"]["dev"]["accuracy"] == pytest.approx(right)


def test_a_sure_seed_does_not_outvote_two(tokenizer: Tokenizer) -> None:
    """As it would by the mean of logits."""
    data = TextData(loaded(), tokenizer, settings())
    given = [{"logits": np.array([row], np.float32)} for row in ((0, 10), (4, 0), (4, 0))]
    together = data.ensemble(given)
    assert together is not None
    expected = (1 / (1 + np.exp(10.0)) + 2 / (1 + np.exp(-4.0))) / 3
    assert np.exp(together["logits"]) == pytest.approx(np.array([[expected, 1 - expected]]))


def test_an_ensemble_of_numbers_is_their_mean(tune: Tune, tmp_path: Path) -> None:
    data = loaded(SHARE)
    results = tune(tmp_path, data=data, seeds=2)
    dev, test = (
        np.mean([predictions(tmp_path, seed, split)[:, 0] for seed in range(2)], 0)
        for split in ("dev", "test")
    )
    expected = spearmanr(dev, data.splits["dev"].labels).statistic
    assert results["ensemble"]["dev"]["spearman"] == pytest.approx(expected, abs=1e-9)
    written = (tmp_path / "test" / "share-test.tsv").read_text().splitlines()
    assert [float(line.split("\t")[1]) for line in written[1:]] == pytest.approx(
        (5 * test).tolist(), abs=6e-4
    )


@pytest.mark.parametrize(
    ("task", "known"),
    [(RULE, {"dry", "wet"}), (TAGS, {"O", "V"})],
    ids=["classification", "tagging"],
)
def test_answers_to_a_test_set(task: Task, known: set[str], tune: Tune, tmp_path: Path) -> None:
    data = loaded(task)
    results = tune(tmp_path, data=data)
    head, *lines = (tmp_path / "test" / f"{task.name}-test.tsv").read_text().splitlines()
    assert head == "index\tprediction"
    assert [line.split("\t")[0] for line in lines] == data.splits["test"].ids
    answers = [line.split("\t")[1].split(" ") for line in lines]
    assert {answer for row in answers for answer in row} <= known
    if task is TAGS:
        assert [len(row) for row in answers] == [len(t) for t in data.splits["test"].texts]
    assert results["ensemble"] is None
    assert list(results["seeds"][0]["scores"]) == ["dev"]
    assert [p.name for p in (tmp_path / "test").iterdir()] == [f"{task.name}-test.tsv"]


def test_the_report_reads_the_results(tune: Tune, tmp_path: Path) -> None:
    results = tune(tmp_path / "run", seeds=3)
    report([tmp_path / "run"], tmp_path / "report")
    with open(tmp_path / "report" / "report.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    for key, value in results["summary"].items():
        assert float(row[key]) == pytest.approx(value), key
    assert float(row["ensemble"]) == pytest.approx(results["ensemble"]["dev"]["accuracy"])
    assert (row["task"], row["metric"], row["state"]) == ("rule", "accuracy", "finished")
    assert json.loads((tmp_path / "run" / "results.json").read_bytes()) == results


def test_a_sentence_of_many_rows_is_answered_whole(tokenizer: Tokenizer) -> None:
    long = tuple(random.Random(0).choices(NOUNS, k=50))
    part = Examples([("river",), long, ("stone", "river")], [[0], [0] * 50, [0, 1]], list("abc"))
    data = TextData(Loaded(TAGS, {"train": part, "dev": part}), tokenizer, settings(TAGS))
    assert len(data.splits["dev"]) > 3
    encoder = encoder_of(tokenizer, noise=0.3)
    trainer = Trainer(encoder, data.train, TAGS, 2, settings(TAGS), runtime())
    found = predict(trainer.model, data.splits["dev"], torch.device("cpu"), batch=2)
    answers = data.answers(found, data.splits["dev"])
    assert [len(row) for row in answers] == [1, 50, 2]
    alone = TextData(
        Loaded(TAGS, {"train": part, "dev": Examples([long], [[0] * 50], ["b"])}),
        tokenizer,
        settings(TAGS),
    )
    again = predict(trainer.model, alone.splits["dev"], torch.device("cpu"))
    assert alone.answers(again, alone.splits["dev"]) == [answers[1]]
    assert len(set(answers[1])) == 2


@pytest.mark.parametrize("name", ["squad1", "squad2"])
def test_a_seed_that_diverged_on_questions_has_failed(name: str, tokenizer: Tokenizer) -> None:
    task = SQUAD[name]
    asked = [q for q in questions(40) if name == "squad2" or not q.impossible]
    config = settings(task, length=None)
    data = SquadData({"train": asked[:20], "dev": asked[20:]}, task, tokenizer, config)
    windows = len(data.splits["dev"])
    beam = {"start_index": (windows, 5), "end_index": (windows, 5, 5)}
    scores = {"start_log_probs": (windows, 5), "end_log_probs": (windows, 5, 5)}
    predictions: dict[str, Any] = {n: np.zeros(shape, np.int64) for n, shape in beam.items()}
    predictions |= {n: np.full(shape, np.nan, np.float32) for n, shape in scores.items()}
    predictions["answerable"] = np.full(windows, np.nan, np.float32)
    assert data.score("dev", predictions)[task.metric] == 0.0
    assert data.failed("dev", predictions)
