"""Fine-tuning: the discriminator's encoder under a task's head, once per seed.

    RUN/finetune.json    settings, task, what it started from, machine
    RUN/metrics.jsonl    losses and scores, seed by seed
    RUN/seed-N/          result.json, predictions.safetensors, weights if they are kept
    RUN/results.json     scores of all seeds, their median, mean, best and spread, the ensemble
    RUN/model/           the best seed in the layout of transformers, with a card
    RUN/test/            answers to the test set, as the task's server wants them

The whole run of a seed is planned on the host beforehand (which rows, how long, what rate) and lies
on the device; the step in `Trainer.train_step` then needs nothing from the host. On a GPU it is
recorded once per batch length and replayed, for all seeds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save as arrays_bytes
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save as tensors_bytes
from torch import Tensor

from . import __version__, metrics, squad, tasks
from . import runtime as runtimes
from .checkpoint import Saver, load_newest
from .config import EncoderConfig, FinetuneConfig, RunConfig, to_dict
from .encoder import Embeddings, Encoder
from .errors import CorruptError, ElectraError, NumericError, Stopped, StopRequest
from .features import BUCKETS, DeviceFeatures, Features, Plan, encode_texts, encode_words
from .files import exclusive, json_bytes, read_json, reading, write_atomic
from .heads import LinearSpanHead, SpanHead, TaskModel, build_head, initialise_head
from .hf import LoadedEncoder, export_finetuned
from .optim import Adam, learning_rate
from .randomness import SeededDropout
from .rundir import differences
from .runlog import RunLog, read_metrics
from .runtime import Runtime
from .tasks import Examples, Loaded, Task
from .tokenizer import Tokenizer

Predictions = dict[str, NDArray[Any]]

_MAY_CHANGE = (
    *("seeds", "keep", "save_every", "at_once", "license"),
    *("device", "precision", "compile", "deterministic", "threads"),
)
_COMPILE_FROM = 15_000  # steps of all seeds from which it pays
_AT_ONCE = 5  # seeds at once on a GPU


def resolve(config: FinetuneConfig, encoder: EncoderConfig, task: Task) -> FinetuneConfig:
    """`config` with everything decided (paper, table 7: by size and by task)."""
    if encoder.hidden_size <= 256:
        rate, decay = 3e-4, 0.8
    elif encoder.hidden_size <= 768:
        rate, decay = 1e-4, 0.8
    else:
        rate, decay = 5e-5, 0.9

    def chosen(value: Any, default: Any) -> Any:
        return default if value is None else value

    return dataclasses.replace(
        config,
        learning_rate=chosen(config.learning_rate, rate),
        layer_decay=chosen(config.layer_decay, decay),
        epochs=chosen(config.epochs, float(task.epochs)),
        length=min(chosen(config.length, task.length), encoder.max_positions),
        both_orders=chosen(config.both_orders, task.both_orders),
        dropout=chosen(config.dropout, encoder.dropout),
        attention_dropout=chosen(config.attention_dropout, encoder.attention_dropout),
    )


def layer_multipliers(
    model: TaskModel, decay: float, levels: Literal["one_each", "released"] = "one_each"
) -> dict[str, float]:
    """Layer-wise learning rates: decay^level, level 0 for the head and growing downwards.

    one_each: the top layer has level 1, the embeddings L + 1. released: the code still counts a
    pooler that is not there, so the top layer has level 2 and the embeddings L + 2.
    """
    L = model.encoder.config.layers
    gap = 1 if levels == "released" else 0
    result: dict[str, float] = {}
    for name, _ in model.named_parameters():
        if name.startswith("encoder.blocks."):
            level = L - int(name.split(".")[2]) + gap
        else:
            level = 0 if name.startswith("head.") else L + 1 + gap
        result[name] = decay**level
    return result


# ---------------------------------------------------------------------- data of a task


class Data(Protocol):
    """What training needs to know of a task."""

    task: Task
    train: Features
    splits: dict[str, Features]  # the first one is reported

    @property
    def outputs(self) -> int: ...
    def score(self, split: str, predictions: Predictions) -> dict[str, float]: ...
    def failed(self, split: str, predictions: Predictions) -> bool: ...
    def ensemble(self, predictions: Sequence[Predictions]) -> Predictions | None: ...
    def write_test(self, split: str, predictions: Predictions, out: Path) -> None: ...


class TextData:
    """Classification, regression and tagging."""

    def __init__(self, loaded: Loaded, tokenizer: Tokenizer, config: FinetuneConfig) -> None:
        """config: resolved."""
        self.task, self.examples = loaded.task, loaded.splits
        self._tokenizer, self._length = tokenizer, config.length or loaded.task.length
        train = loaded.splits["train"]
        if config.max_train is not None:
            train = Examples(*(part[: config.max_train] for part in dataclasses.astuple(train)))
        if config.both_orders and len(self.task.texts) == 2:
            swapped = [(b, a) for a, b in train.texts]
            train = Examples(train.texts + swapped, train.labels * 2, train.ids * 2)
        self.train = self.encode(train)
        self.splits = {n: self.encode(e) for n, e in loaded.splits.items() if n != "train"}

    @property
    def outputs(self) -> int:
        return 1 if self.task.kind == "regression" else len(self.task.labels)

    def encode(self, examples: Examples) -> Features:
        if self.task.kind == "tagging":
            return encode_words(examples.texts, examples.labels, self._tokenizer, self._length)
        if self.task.kind == "regression":
            known = np.array(examples.labels, np.float32) / self.task.scale
        else:
            known = np.array(examples.labels, np.int64)
        labels = known if examples.labels else np.zeros(len(examples.texts), known.dtype)
        return encode_texts(examples.texts, labels, self._tokenizer, self._length)

    def answers(self, predictions: Predictions, features: Features) -> list[Any]:
        """Class indices, numbers in the data's own unit, or the tag indices of each sentence."""
        logits = predictions["logits"]
        if self.task.kind == "regression":
            return (logits[:, 0] * self.task.scale).tolist()
        best = logits.argmax(-1)
        if self.task.kind == "classification":
            return best.tolist()
        words = (features.targets["labels"] >= 0).sum(1)  # of each row
        owner = np.repeat(features.example, words)
        ends = np.searchsorted(owner, np.arange(int(features.example.max(initial=-1)) + 2))
        return [best[a:b].tolist() for a, b in itertools.pairwise(ends)]

    def score(self, split: str, predictions: Predictions) -> dict[str, float]:
        labels = self.examples[split].labels
        if not labels:
            return {}
        return metrics.score(self.task, self.answers(predictions, self.splits[split]), labels)

    def failed(self, split: str, predictions: Predictions) -> bool:
        return metrics.is_degenerate(
            self.task,
            self.answers(predictions, self.splits[split]),
            self.examples[split].labels,
        )

    def ensemble(self, predictions: Sequence[Predictions]) -> Predictions | None:
        """Mean probability of each class, or mean value."""
        logits = np.stack([p["logits"] for p in predictions]).astype(np.float64)
        if self.task.kind != "regression":
            logits -= logits.max(-1, keepdims=True)
            logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
            return {"logits": np.log(np.exp(logits).mean(0))}
        return {"logits": logits.mean(0)}

    def write_test(self, split: str, predictions: Predictions, out: Path) -> None:
        answers = self.answers(predictions, self.splits[split])
        out.mkdir(parents=True, exist_ok=True)
        tasks.write_predictions(self.task, split, self.examples[split].ids, answers, out)


class SquadData:
    """Questions on passages."""

    def __init__(
        self,
        questions: dict[str, list[squad.Question]],
        task: Task,
        tokenizer: Tokenizer,
        config: FinetuneConfig,
    ) -> None:
        """config: resolved."""
        self.task, self.questions = task, questions
        length = config.length or task.length
        train = questions["train"][: config.max_train]
        self.train, _ = squad.windows(train, tokenizer, length=length, training=True)
        self.splits: dict[str, Features] = {}
        self._windows: dict[str, list[squad.Window]] = {}
        for name, asked in questions.items():
            if name != "train":
                self.splits[name], self._windows[name] = squad.windows(
                    asked, tokenizer, length=length, training=False
                )

    @property
    def outputs(self) -> int:
        return 2

    @property
    def _threshold(self) -> float | None:
        return squad.RELEASED_THRESHOLD if self.task.name == "squad2" else None

    def _answers(self, split: str, predictions: Predictions) -> squad.Answers:
        return squad.answers(self.questions[split], self._windows[split], predictions)

    def score(self, split: str, predictions: Predictions) -> dict[str, float]:
        try:
            given = self._answers(split, predictions)
        except NumericError:  # a seed that diverged has failed; the others go on
            return {"exact": 0.0, "f1": 0.0, self.task.metric: 0.0}
        scores = squad.evaluate(self.questions[split], given, self._threshold)
        return {n: v if n.endswith("threshold") else v / 100 for n, v in scores.items()}

    def failed(self, split: str, predictions: Predictions) -> bool:
        """Whether it hardly finds an answer: F1 below 10 of 100 where there is one."""
        scores = self.score(split, predictions)
        return scores.get("has_ans_f1", scores["f1"]) < 0.1

    def ensemble(self, predictions: Sequence[Predictions]) -> Predictions | None:
        del predictions  # beams of different seeds hold different spans
        return None

    def write_test(self, split: str, predictions: Predictions, out: Path) -> None:
        squad.write_predictions(out, self._answers(split, predictions), self._threshold)


# ---------------------------------------------------------------------- the trainer


class Trainer:
    """The optimizer steps of one seed after another, with one model and one set of graphs."""

    def __init__(
        self,
        encoder: LoadedEncoder,
        features: Features,
        task: Task,
        outputs: int,
        config: FinetuneConfig,
        runtime: Runtime,
        *,
        data: DeviceFeatures | None = None,
    ) -> None:
        """config: resolved. data: `features` on the device, if they are there already."""
        assert config.layer_decay is not None
        assert config.dropout is not None
        assert config.attention_dropout is not None
        self.config, self.runtime, self.features = config, runtime, features
        self.encoder_tensors = encoder.tensors
        settings = dataclasses.replace(
            encoder.config, dropout=config.dropout, attention_dropout=config.attention_dropout
        )
        self._new_head = lambda: build_head(task.kind, settings, outputs, config.head)
        network = Encoder(settings, Embeddings(settings, encoder.vocab_size))
        self.model = TaskModel(network, self._new_head()).to(runtime.device)
        if runtime.compiled:
            compile_blocks(network)
        self.optimizer = Adam(
            self.model,
            config.optim,
            working_dtype=runtime.dtype,
            multipliers=layer_multipliers(self.model, config.layer_decay, config.layer_levels),
        )
        device = runtime.device
        self.data = data or DeviceFeatures(features, device)
        self.dropout = SeededDropout(device)
        # Several trainers work side by side, each in a stream of its own: one alone leaves most
        # of a large GPU idle.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        S = self._plan(config.seed).rows.shape[0]
        self.steps, B = S, config.batch_size
        self.rows = torch.zeros(S, B, dtype=torch.int32, device=device)
        self.weight = torch.zeros(S, B, device=device)
        self.losses = torch.zeros(S, device=device)
        rates = [learning_rate(config.optim, s, s / S, S) for s in range(S)]
        self.rates = torch.tensor(rates, device=device)
        self.slot = torch.zeros((), dtype=torch.int64, device=device)  # steps done
        self.lengths: list[int] = []  # T of each step
        self.seed, self.step_number = config.seed, 0
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def _plan(self, seed: int) -> Plan:
        assert self.config.epochs is not None
        on_gpu = self.runtime.device.type == "cuda"
        return Plan.make(
            self.features,
            batch=self.config.batch_size,
            epochs=self.config.epochs,
            seed=seed,
            padding=self.config.padding,
            # A GPU replays a graph per length; a CPU can as well compute just what is there.
            buckets=BUCKETS if on_gpu else range(2, self.features.tokens.shape[1]),
        )

    # ------------------------------------------------------------------ the step

    def train_step(self, T: int) -> None:
        """One optimizer step on a batch of T tokens; all it needs is on the device."""
        slot = self.slot.view(1)
        rows = self.rows.index_select(0, slot)[0]  # (B,)
        weight = self.weight.index_select(0, slot)[0]
        batch = self.data.batch(rows, T)
        batch.targets["weight"] = weight
        losses = self.model.loss(batch, self.dropout)  # (B,)
        loss = (losses * weight).sum()
        if self.config.loss == "mean":
            loss = loss / weight.sum()
        grads = torch.autograd.grad(loss, self.optimizer.parameters)
        self.optimizer.accumulate(grads, first=True)
        self.optimizer.step(self.rates.index_select(0, slot)[0], self.slot)
        self.losses.index_copy_(0, slot, loss.detach().view(1))
        self.slot += 1

    def step(self) -> None:
        T = self.lengths[self.step_number]
        if self.runtime.cuda_graph and T not in self._graphs:
            self.record(T)
        self.dropout.seed(self.seed, self.step_number)
        with self.at_work():
            if self.runtime.cuda_graph:
                self._graphs[T].replay()
            else:
                with self.dropout.in_use():
                    self.train_step(T)
        self.step_number += 1

    # ------------------------------------------------------------------ around it

    def at_work(self) -> contextlib.AbstractContextManager[Any]:
        """What happens inside the block happens in this trainer's stream."""
        return torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext()

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.stream is not None:
            self.stream.synchronize()

    def record(self, T: int) -> None:
        """Record the step for batches of T tokens; training state stays as it was."""
        with self.at_work(), self.dropout.in_use():
            self.optimizer.live.fill_(False)
            # Libraries make their handles and workspaces in the first steps, and a length that is
            # new is compiled: neither can happen while recording.
            if not self._graphs or self.runtime.compiled:
                for _ in range(2):
                    self.train_step(T)
                    self.slot.fill_(self.step_number)
                self.wait()
            graph = torch.cuda.CUDAGraph()
            # Nothing outlives a replay but what lies in our own buffers, so all may share memory.
            pool = next(iter(self._graphs.values())).pool() if self._graphs else None
            graph.capture_begin(pool=pool)
            self.train_step(T)
            graph.capture_end()
            self._graphs[T] = graph
            self.optimizer.live.fill_(True)

    def begin(self, seed: int) -> None:
        """Back to the pre-trained encoder under a new head."""
        self.seed, self.step_number = seed, 0
        head = self._new_head()
        initialise_head(head, seed)
        fresh = {f"head.{name}": tensor for name, tensor in head.state_dict().items()}
        encoder = {f"encoder.{name}": tensor for name, tensor in self.encoder_tensors.items()}
        plan = self._plan(seed)
        self.lengths = plan.lengths
        with self.at_work():
            self.optimizer.load({"model": {**encoder, **fresh}})
            for moment in (self.optimizer.m, self.optimizer.v, self.optimizer.bad_steps):
                moment.zero_()
            self.rows.copy_(torch.from_numpy(plan.rows))
            self.weight.copy_(torch.from_numpy(plan.weight))
            self.losses.zero_()
            self.slot.zero_()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Tensors of a checkpoint, by file."""
        self.wait()
        # Losses of bad steps are not finite, which a checkpoint refuses: their bits are saved.
        log = {"losses": self.losses.view(torch.int32), "bad_steps": self.optimizer.bad_steps}
        return {**self.optimizer.state(), "log": log}

    def load(self, tensors: dict[str, dict[str, Tensor]], step: int) -> None:
        with self.at_work():
            self.optimizer.load({key: tensors[key] for key in ("model", "m", "v")})
            self.losses.copy_(tensors["log"]["losses"].view(torch.float32))
            self.optimizer.bad_steps.copy_(tensors["log"]["bad_steps"])
            self.slot.fill_(step)
        self.step_number = step

    def weights(self) -> dict[str, Tensor]:
        """The model's state in float32 on the CPU."""
        self.wait()
        state = self.optimizer.state()["model"]
        return {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}


def compile_blocks(encoder: Encoder) -> None:
    """Compile the encoder's block once, for all its copies and all lengths.

    That takes a fraction of the time of compiling the whole step, and what lies around the blocks
    hardly matters.
    """
    # Blocks differ in the number of their dropout site, which the compiler would take for another
    # program in each of them.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True  # pyright: ignore[reportPrivateImportUsage]
    for block in encoder.blocks:
        block.compile(dynamic=True)


@torch.no_grad()
def predict(
    model: TaskModel,
    features: Features,
    device: torch.device,
    *,
    batch: int = 128,
    padding: int | None = None,
) -> Predictions:
    """What the head says of every row, in the order of the rows.

    A forward pass has `batch` rows of similar length; or fewer, if the next one is so much longer
    that more than `padding` tokens had to be added to the others, and a pass of its own is cheaper.
    """
    if len(features) == 0:
        return {}
    data = DeviceFeatures(features, device)
    order = np.argsort(features.lengths, kind="stable")
    per_row: dict[str, list[NDArray[Any]]] = {}
    # Beams have the same size in every batch only if no batch is shorter than a beam.
    shortest = model.head.beam if isinstance(model.head, SpanHead | LinearSpanHead) else 0
    step = 8 if device.type == "cuda" else 1  # its attention kernels want that
    widest, lengths, end = features.tokens.shape[1], features.lengths[order], 0
    while end < len(order):
        begin, end = end, end + 1
        while end < min(begin + batch, len(order)) and (
            padding is None or (end - begin) * (lengths[end] - lengths[end - 1]) <= padding
        ):
            end += 1
        rows = order[begin:end]
        needed = max(shortest, -(-int(lengths[end - 1]) // step) * step)
        cut = data.batch(torch.from_numpy(rows).to(device), min(needed, widest))
        with torch.compiler.set_stance("force_eager"):
            found_now = model.predict(cut)
        for name, scores in found_now.items():
            array = scores.float().cpu().numpy() if scores.is_floating_point() else scores.cpu()
            per_row.setdefault(name, []).extend(np.asarray(array))
    back = np.argsort(order)
    result: Predictions = {}
    for name, found in per_row.items():
        in_order = [found[j] for j in back]
        if "labels" in features.targets:  # tagging: the first piece of each word
            first = features.targets["labels"] >= 0
            in_order = [row[first[i, : len(row)]] for i, row in enumerate(in_order)]
            result[name] = np.concatenate(in_order)
        else:
            result[name] = np.stack(in_order)
    return result


# ---------------------------------------------------------------------- a run


def finetune(
    config: FinetuneConfig,
    encoder: LoadedEncoder,
    data: Data,
    out: Path,
    *,
    quiet: bool = False,
) -> dict[str, Any]:
    """All seeds of one task; the same call again continues. Returns what results.json holds.

    config: resolved. Raises Stopped after a signal, once everything is saved.
    """
    record_path = out / "finetune.json"
    before = read_json(record_path)
    steps = len(data.train) / config.batch_size * (config.epochs or 1) * config.seeds
    compiled = config.compile
    if compiled == "auto" and steps < _COMPILE_FROM:
        compiled = "no"
    runtime = runtimes.start(
        RunConfig(
            device=config.device,
            precision=config.precision,
            compile=compiled,
            deterministic=config.deterministic,
            threads=config.threads,
        ),
        threads=before.get("threads"),
    )
    with exclusive(out), StopRequest() as stop:
        _enter_run(before, config, encoder, data, runtime, record_path)
        seeds = range(config.seed, config.seed + config.seeds)
        done = {seed: _read_result(out, seed) for seed in seeds}
        left = [seed for seed in seeds if not done[seed]]
        for seed in set(seeds) - set(left):  # a kill may have come before they were deleted
            shutil.rmtree(out / f"seed-{seed}" / "checkpoints", ignore_errors=True)
        if left:
            _keep_finished(out, {seed for seed in seeds if done[seed]})
            log = RunLog(out, active=True, from_step=len(seeds) * 10**9, quiet=quiet)
            try:
                done |= _train_seeds(config, encoder, data, runtime, left, out, log, stop)
            finally:
                log.close()
        return _finish(config, encoder, data, [done[seed] for seed in seeds], runtime, out)


def _train_seeds(
    config: FinetuneConfig,
    encoder: LoadedEncoder,
    data: Data,
    runtime: Runtime,
    seeds: Sequence[int],
    out: Path,
    log: RunLog,
    stop: StopRequest,
) -> dict[int, dict[str, Any]]:
    """Train and score these seeds, on a GPU several at once; their results."""
    on_gpu = runtime.device.type == "cuda"
    at_once = min(len(seeds), config.at_once or _AT_ONCE) if on_gpu else 1
    features = DeviceFeatures(data.train, runtime.device)
    idle = [
        Trainer(encoder, data.train, data.task, data.outputs, config, runtime, data=features)
        for _ in range(at_once)
    ]
    waiting, running = list(seeds), list[_SeedRun]()
    done: dict[int, dict[str, Any]] = {}
    total, begin = len(seeds) * idle[0].steps, time.perf_counter()
    steps, last_look = 0, begin
    while waiting or running:
        while waiting and idle:
            running.append(_SeedRun(idle.pop(), waiting.pop(0), out, config, log))
        for run in running:
            run.trainer.step()
            steps += 1
        now = time.perf_counter()
        if now - last_look > 0.5:
            last_look = now
            rate = steps / (now - begin)
            ahead = sum(r.trainer.steps - r.trainer.step_number for r in running)
            ahead += len(waiting) * running[0].trainer.steps
            shown = ", ".join(str(run.seed) for run in running)
            log.progress(
                1 - ahead / total,
                f"{data.task.name} seed {shown}  step {running[0].trainer.step_number:,} of "
                f"{running[0].trainer.steps:,}  {rate * config.batch_size:,.0f} examples/s  "
                f"left {ahead / rate:,.0f} s",
            )
        stopping = stop()  # looked at once: a signal from here on is seen after the next step
        for run in list(running):
            run.save_if_due(now, stopping=stopping)
            if run.trainer.step_number == run.trainer.steps:
                done[run.seed] = run.finish(data, log, at_once)
                running.remove(run)
                idle.append(run.trainer)
        if stopping and running:
            for run in running:
                run.saver.wait()
            raise Stopped
    return done


class _SeedRun:
    """One seed on its way through a trainer."""

    def __init__(
        self, trainer: Trainer, seed: int, out: Path, config: FinetuneConfig, log: RunLog
    ) -> None:
        self.trainer, self.seed, self.config = trainer, seed, config
        self.out, self.here = out, out / f"seed-{seed}"
        self.saver = Saver(self.here / "checkpoints", keep=1)
        self.spent = 0.0
        trainer.begin(seed)
        saved = load_newest(self.here / "checkpoints", warn=log.warn)
        if saved is not None:
            with reading(self.here / "checkpoints" / f"step-{saved.step:08d}"):
                trainer.load(saved.tensors, saved.step)
                self.spent = float(saved.state["seconds"])
        self.since = self.last_save = time.perf_counter()

    def save_if_due(self, now: float, *, stopping: bool) -> None:
        step, every = self.trainer.step_number, self.config.save_every
        due = step % every == 0 if every else now - self.last_save > 60
        if (due or stopping) and step < self.trainer.steps:
            self.last_save = now
            state = {"seconds": self.spent + now - self.since}
            self.saver.save(step, self.trainer.state(), state)

    def finish(self, data: Data, log: RunLog, at_once: int) -> dict[str, Any]:
        """Score the seed and write everything about it; returns what its result.json holds."""
        trainer, config = self.trainer, self.config
        self.saver.wait()
        trainer.wait()
        seconds = self.spent + time.perf_counter() - self.since
        predictions = {
            split: predict(trainer.model, features, trainer.runtime.device)
            for split, features in data.splits.items()
        }
        reported = next(iter(data.splits))
        scores = {split: data.score(split, found) for split, found in predictions.items()}
        bad = int(trainer.optimizer.bad_steps)
        result: dict[str, Any] = {
            "seed": self.seed,
            "score": scores[reported][data.task.metric],
            "failed": data.failed(reported, predictions[reported]),
            "scores": {split: values for split, values in scores.items() if values},
            "steps": trainer.steps,
            "bad_steps": bad,
            "seconds": round(seconds, 3),
            "seeds_at_once": at_once,
            "examples_per_second": round(trainer.steps * config.batch_size / seconds, 1),
        }
        first = (self.seed - config.seed) * trainer.steps
        losses = trainer.losses.cpu()
        for i, part in enumerate(losses.split(20)):
            values = {"seed": self.seed, "loss": float(part.mean())}
            log.write("train", first + min(20 * i + 20, trainer.steps), values)
        log.write("eval", first + trainer.steps, {"seed": self.seed, **scores[reported]})
        log.note(
            f"{data.task.name} seed {self.seed}: {data.task.metric} {100 * result['score']:.2f}"
            + (" (failed: it learned nothing)" if result["failed"] else "")
            + f" · {seconds:.1f} s, {result['examples_per_second']:,.0f} examples/s"
            + (f", {at_once} seeds at once" if at_once > 1 else "")
        )
        if bad:
            log.warn(f"{bad} steps gave a gradient that is not finite; they were left out")
        flat = {
            f"{split}.{name}": np.ascontiguousarray(array)  # safetensors overlooks strides
            for split, found in predictions.items()
            for name, array in found.items()
        }
        write_atomic(self.here / "predictions.safetensors", arrays_bytes(flat))
        seeds = range(config.seed, config.seed + config.seeds)
        others = [_read_result(self.out, s) for s in seeds]
        is_best = _best([*filter(None, others), result]) is result
        if config.keep == "all" or is_best:
            write_atomic(self.here / "weights.safetensors", tensors_bytes(trainer.weights()))
        write_atomic(self.here / "result.json", json_bytes(result, indent=1))
        if config.keep == "best" and is_best:
            for path in self.out.glob("seed-*/weights.safetensors"):
                if path.parent != self.here:
                    path.unlink()
        shutil.rmtree(self.here / "checkpoints")
        return result


def _keep_finished(out: Path, seeds: set[int]) -> None:
    """Cut the lines of seeds that will be written again from the metrics."""
    if (out / "metrics.jsonl").exists():
        kept = [json.dumps(m) + "\n" for m in read_metrics(out) if m.get("seed") in seeds]
        write_atomic(out / "metrics.jsonl", "".join(kept).encode())


def _best(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The highest score; of equal ones the lowest seed."""
    return max(results, key=lambda r: (r["score"], -r["seed"]))


def _finish(
    config: FinetuneConfig,
    encoder: LoadedEncoder,
    data: Data,
    results: list[dict[str, Any]],
    runtime: Runtime,
    out: Path,
) -> dict[str, Any]:
    """Summary, ensemble, test files and the exported model."""
    best = _best(results)
    predictions = [_read_predictions(out / f"seed-{r['seed']}") for r in results]
    ensemble: dict[str, dict[str, float]] = {}
    combined: dict[str, Predictions | None] = {}
    for split in data.splits:
        of_split = [p[split] for p in predictions if split in p]
        combined[split] = data.ensemble(of_split) if len(results) > 1 and of_split else None
        if (together := combined[split]) is not None and (scores := data.score(split, together)):
            ensemble[split] = scores
    record: dict[str, Any] = {
        "format": 1,
        "version": __version__,
        "task": json.loads(json_bytes(to_dict(data.task))),
        "model": encoder.description,
        "settings": to_dict(config),
        "train_rows": len(data.train),
        "seeds": results,
        "summary": metrics.summary(
            [r["score"] for r in results], [bool(r["failed"]) for r in results]
        ),
        "ensemble": ensemble or None,
        "environment": runtime.describe(),
    }
    mine = predictions[results.index(best)]
    for split in data.splits:
        # Without labels it is a test set; the answers to SQuAD's are wanted for its dev set too.
        if split in mine and (split not in best["scores"] or data.task.kind == "qa"):
            data.write_test(split, combined[split] or mine[split], out / "test")
    model = out / "model"
    if read_json(out / "results.json") != record or not model.exists():
        head = build_head(data.task.kind, encoder.config, data.outputs, config.head)
        with torch.device("meta"):
            network = Encoder(encoder.config, Embeddings(encoder.config, encoder.vocab_size))
        task_model = TaskModel(network, head)
        weights = _read_weights(out / f"seed-{best['seed']}" / "weights.safetensors")
        task_model.load_state_dict(weights, assign=True)
        export_finetuned(
            task_model,
            data.task,
            config.head,
            encoder.tokenizer,
            model,
            results=record,
            length=config.length or data.task.length,
            run=out,
        )
        write_atomic(out / "results.json", json_bytes(record, indent=1))
    return record


def _enter_run(
    before: dict[str, Any],
    config: FinetuneConfig,
    encoder: LoadedEncoder,
    data: Data,
    runtime: Runtime,
    path: Path,
) -> None:
    """Write what the run is, or make sure that the one in the directory is the same."""
    record: dict[str, Any] = {
        "format": 1,
        "version": __version__,
        "settings": to_dict(config),
        "task": json.loads(json_bytes(to_dict(data.task))),
        "model": encoder.description,
        "encoder": encoder.fingerprint,
        "tokenizer": encoder.tokenizer.hash,
        "data": _fingerprint([data.train, *data.splits.values()]),
        "environment": runtime.describe(),
        "threads": runtime.threads,
    }
    if before:
        with reading(path):
            changed = differences(before["settings"], record["settings"])
        forbidden = [line for key, line in changed.items() if key not in _MAY_CHANGE]
        for key in ("task", "encoder", "tokenizer", "data"):
            if before.get(key) != record[key]:
                forbidden.append(f"another {key if key != 'encoder' else 'model'}")
        if forbidden:
            raise ElectraError(
                "This directory holds a fine-tuning with other settings: "
                + "; ".join(forbidden)
                + ".",
                where=str(path.parent),
                fix="give the settings it began with, or choose another --out",
            )
    write_atomic(path, json_bytes(record, indent=1))


def _fingerprint(features: Sequence[Features]) -> str:
    digest = hashlib.sha256()
    for part in features:
        for array in (part.tokens, part.lengths, part.first, *part.targets.values()):
            digest.update(f"{array.shape} {array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _read_result(out: Path, seed: int) -> dict[str, Any]:
    """What a finished seed left, or nothing."""
    path = out / f"seed-{seed}" / "result.json"
    return read_json(path, fix=f"delete {path.parent}; the same command trains this seed again")


def _read_predictions(directory: Path) -> dict[str, Predictions]:
    path = directory / "predictions.safetensors"
    try:
        flat = load_arrays(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error
    result: dict[str, Predictions] = {}
    for key, array in flat.items():
        split, _, name = key.partition(".")
        result.setdefault(split, {})[name] = array
    return result


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return load_tensors(path)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CorruptError:
    return CorruptError(
        f"The file cannot be read: {error}.",
        where=str(path),
        fix=f"delete {path.parent}; the same command trains this seed again",
    )
