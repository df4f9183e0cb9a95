"""Fine-tuning: the discriminator's encoder under a task's head, once per seed.

    RUN/finetune.json    settings, task, what it started from, machine
    RUN/metrics.jsonl    losses and scores, seed by seed
    RUN/seed-N/          result.json, predictions.safetensors, weights if they are kept
    RUN/results.json     scores of all seeds, their median, mean, best and spread, the ensemble;
                         of a user's classes also how many rows of which got which answer
    RUN/model/           the best seed in the layout of transformers, with a card
    RUN/test/            answers to the test set, as the task's server wants them

Comes in: settings, a pre-trained encoder, the data of a task. Goes out: that directory, in which
the same call continues after a kill. The step itself is `Trainer` in `step.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save as arrays_bytes
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save as tensors_bytes
from torch import Tensor

from .. import __version__
from .. import runtime as runtimes
from ..checkpoint import Saver, has_any, load_newest
from ..config import EncoderConfig, FinetuneConfig, RunConfig, to_dict
from ..errors import CorruptError, ElectraError, Stopped, StopRequest
from ..files import exclusive, json_bytes, read_json, reading, refuse_another, write_atomic
from ..formats.hf import LoadedEncoder
from ..formats.hf_export import export_finetuned, refuse_foreign
from ..rundir import differences
from ..runlog import RunLog, read_metrics
from ..runtime import Runtime
from . import metrics, tasks
from .features import DeviceFeatures, Features
from .heads import empty_model
from .step import Data, Predictions, TextData, Trainer, predict
from .tasks import Task

_MAY_CHANGE = (
    *("seeds", "keep", "eval_every", "save_every", "at_once", "license"),
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

    is_known = task.kind == "qa" or task == tasks.GLUE.get(task.name)
    is_at_end = is_known and config.keep_epoch == "last"
    defaults = {
        "learning_rate": rate,
        "layer_decay": decay,
        "epochs": float(task.epochs),
        "both_orders": task.both_orders,
        "dropout": encoder.dropout,
        "attention_dropout": encoder.attention_dropout,
        "eval_every": "end" if is_at_end else "epoch",
    }
    unset: dict[str, Any] = {n: v for n, v in defaults.items() if getattr(config, n) is None}
    if config.length is not None and config.length > (longest := encoder.max_positions):
        what = f"The model reads {longest} tokens at most, {config.length} are asked for."
        raise ElectraError(what, where="length", fix=f"use --length {longest} or less")
    length = config.length or min(task.length, encoder.max_positions)
    return dataclasses.replace(config, length=length, **unset)


# ---------------------------------------------------------------------- a run


def finetune(
    config: FinetuneConfig, encoder: LoadedEncoder, data: Data, out: Path, *, quiet: bool = False
) -> dict[str, Any]:
    """All seeds of one task; the same call again continues. Returns what results.json holds.

    config: resolved. Raises Stopped after a signal, once everything is saved.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        what = "Several processes cannot share a fine-tuning."
        fix = "start it without torchrun; one GPU trains several seeds at once"
        raise ElectraError(what, where="WORLD_SIZE", fix=fix)
    refuse_another(out, "finetune.json")  # before hours of work, not behind them
    refuse_foreign(out / "model", of_task=True)
    before = read_json(out / "finetune.json")
    if not _has_past(out):
        before = {}
    steps = len(data.train) / config.batch_size * (config.epochs or 1) * config.seeds
    pays = config.compile != "auto" or steps >= _COMPILE_FROM
    names = ("device", "precision", "deterministic", "threads")
    same = {name: getattr(config, name) for name in names}
    runtime = runtimes.start(
        RunConfig(compile=config.compile if pays else "no", **same), threads=before.get("threads")
    )
    run = _Run(config, encoder, data, runtime, out)
    with runtime.at_leave, exclusive(out), StopRequest() as stop:
        run.enter(before)
        done = {seed: result for seed in run.seeds if (result := run.result(seed))}
        for seed in done:  # a kill may have come before they were deleted
            shutil.rmtree(run.place(seed) / "checkpoints", ignore_errors=True)
        if left := [seed for seed in run.seeds if seed not in done]:
            _keep_finished(out, {*done})
            log = RunLog(out, active=True, from_step=config.seeds * 10**9, quiet=quiet)
            try:
                on_gpu = runtime.device.type == "cuda"
                at_once = min(len(left), config.at_once or _AT_ONCE) if on_gpu else 1
                with _device_errors(config, at_once):
                    done |= _train_seeds(run, left, at_once, log, stop)
            finally:
                log.close()
        return run.finish([done[seed] for seed in run.seeds])


def without_effect(
    asked: FinetuneConfig, config: FinetuneConfig, data: Data, out: Path
) -> list[str]:
    """A sentence for every setting that was asked for and does nothing here.

    asked: before it was resolved to `config`.
    """
    said, texts = list[str](), len(data.task.texts)
    if asked.both_orders and (texts != 2 or data.task.kind == "qa"):
        said.append("both_orders True has no effect: it needs two texts that can change places")
    epochs = math.ceil(config.epochs or 1)
    if config.patience is not None and config.patience >= epochs - 1:
        told = f"patience {config.patience} has no effect in {epochs} epochs"
        said.append(f"{told}: it needs {config.patience + 2} or more")
    if config.keep == "all":
        places = [out / f"seed-{config.seed + i}" for i in range(config.seeds)]
        gone = [
            place.name
            for place in places
            if (place / "result.json").exists() and not (place / "weights.safetensors").exists()
        ]
        if gone:
            told = f"keep all has no effect on {', '.join(gone)}: the weights are gone"
            said.append(f"{told}; delete the folders in {out}, and they are trained again")
    return said


def _has_past(out: Path) -> bool:
    """Whether anything was saved; a run without it begins again as whatever is asked for, perhaps
    with the smaller batch that an error advised."""
    is_done = any(any(out.glob(name)) for name in ("results.json", "seed-*/result.json"))
    return is_done or any(map(has_any, out.glob("seed-*/checkpoints")))


@dataclasses.dataclass(frozen=True)
class _Run:
    """A fine-tuning and its directory."""

    config: FinetuneConfig  # resolved
    encoder: LoadedEncoder
    data: Data
    runtime: Runtime
    out: Path

    @property
    def seeds(self) -> range:
        return range(self.config.seed, self.config.seed + self.config.seeds)

    def place(self, seed: int) -> Path:
        return self.out / f"seed-{seed}"

    def result(self, seed: int) -> dict[str, Any]:
        """What a finished seed left, or nothing."""
        return read_json(self.place(seed) / "result.json", fix=_again(self.place(seed)))

    def _facts(self) -> dict[str, Any]:
        """What is said of the run at its beginning and at its end."""
        return {
            "format": 1,
            "version": __version__,
            "settings": to_dict(self.config),
            "task": json.loads(json_bytes(to_dict(self.data.task))),
            "model": self.encoder.description,
            "environment": self.runtime.describe(),
        }

    def enter(self, before: dict[str, Any]) -> None:
        """Write what the run is, or make sure that the one in the directory is the same."""
        path = self.out / "finetune.json"
        record: dict[str, Any] = self._facts() | {
            "encoder": self.encoder.fingerprint,
            "tokenizer": self.encoder.tokenizer.hash,
            "data": _fingerprint([self.data.train, *self.data.splits.values()]),
            "threads": self.runtime.threads,
        }
        if before:
            with reading(path):
                # A setting newer than the record had its default.
                old = to_dict(FinetuneConfig()) | before["settings"]
                changed = differences(old, record["settings"])
                task = {"offset": 0.0} | before["task"]
                named, of_task = task["name"], differences({"task": task}, {"task": record["task"]})
            forbidden = [line for key, line in changed.items() if key not in _MAY_CHANGE]
            for key in ("encoder", "tokenizer", "data"):
                if before.get(key) != record[key]:
                    forbidden.append(f"another {key if key != 'encoder' else 'model'}")
            if forbidden or of_task.keys() - {"task.name"}:
                told = "; ".join([*forbidden, *of_task.values()])
                what = f"This directory holds a fine-tuning with other settings: {told}."
                fix = "give the settings it began with, or choose another --out"
                raise ElectraError(what, where=str(self.out), fix=fix)
            if old["seeds"] != self.config.seeds:
                self._refuse_gone(old["seeds"])
            # A table has another name in memory than in its file: the one it began with stays.
            record["task"]["name"] = named
            self.data.task = dataclasses.replace(self.data.task, name=named)
        write_atomic(path, json_bytes(record, indent=1))

    def _refuse_gone(self, before: int) -> None:
        """Of fewer seeds than before another one may be the best, whose weights were not kept."""
        results = [self.result(seed) for seed in self.seeds]
        best = self.place(_best(results)["seed"]) if all(results) else None
        if best is not None and not (best / "weights.safetensors").exists():
            what = f"The weights of the best of these {len(results)} seeds were not kept."
            fix = f"ask for {before} seeds as before, or {_again(best)}"
            raise ElectraError(what, where=str(best), fix=fix)

    def finish(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        """Summary, ensemble, test files and the exported model."""
        data, best = self.data, _best(results)
        predictions = [_read_predictions(self.place(r["seed"])) for r in results]
        mine = predictions[results.index(best)]
        ensemble: dict[str, dict[str, float]] = {}
        for split in data.splits:
            of_split = [p[split] for p in predictions if split in p]
            together = data.ensemble(of_split) if len(results) > 1 and of_split else None
            if together is not None and (scores := data.score(split, together)):
                ensemble[split] = scores
            # Without labels it is a test set; the answers to SQuAD's are wanted for its dev set.
            if split in mine and (split not in best["scores"] or data.task.kind == "qa"):
                data.write_test(split, together or mine[split], self.out / "test")
        scores = [r["score"] for r in results]
        record = self._facts() | {
            "train_rows": len(data.train),
            "seeds": results,
            "summary": metrics.summary(scores, [bool(r["failed"]) for r in results]),
            "ensemble": ensemble or None,
        }
        if isinstance(data, TextData) and metrics.is_own(data.task):  # of the model that is kept
            tables = {split: data.confusion(split, mine[split]) for split in best["scores"]}
            record["confusion"] = tables
        if self.config.keep_epoch == "best":
            record["epoch_choice"] = metrics.EPOCH_CHOICE
        model = self.out / "model"
        if read_json(self.out / "results.json") != record or not model.exists():
            self._export(self.place(best["seed"]) / "weights.safetensors", model, record)
            write_atomic(self.out / "results.json", json_bytes(record, indent=1))
        return record

    def _export(self, weights: Path, out: Path, results: dict[str, Any]) -> None:
        config, task, e = self.config, self.data.task, self.encoder
        model = empty_model(task.kind, e.config, e.vocab_size, self.data.outputs, config.head)
        with _whole(weights):
            model.load_state_dict(load_tensors(weights), assign=True)
        length = config.length or task.length
        told: dict[str, Any] = {"results": results, "length": length, "run": self.out}
        export_finetuned(model, task, config.head, e.tokenizer, out, **told)


@contextlib.contextmanager
def _device_errors(config: FinetuneConfig, at_once: int) -> Generator[None]:
    """A device without room becomes an error that names what takes less of it; one that cannot do
    an operator in deterministic mode, an error that names it."""
    try:
        yield
    except RuntimeError as error:
        runtimes.refuse_undetermined(error)
        if not runtimes.is_out_of_memory(error):
            raise
        what = f"The device has no memory left with batches of {config.batch_size}"
        fix = "use a smaller model, shorter texts (--length) or a smaller --batch-size"
        where = "batch_size"
        if at_once > 1:
            what, where = f"{what} and {at_once} seeds at once", "at_once"
            fix = f"--at-once {at_once // 2} trains each seed as before in less memory"
        raise ElectraError(f"{what}.", where=where, fix=fix) from error


def _train_seeds(
    run: _Run, seeds: Sequence[int], at_once: int, log: RunLog, stop: StopRequest
) -> dict[int, dict[str, Any]]:
    """Train and score these seeds, `at_once` at a time; their results."""
    config, data, runtime = run.config, run.data, run.runtime
    features = DeviceFeatures(data.train, runtime.device)
    told = (run.encoder, data.train, data.task, data.outputs, config, runtime)
    idle = [Trainer(*told, data=features) for _ in range(at_once)]
    waiting, running = list(seeds), list[_SeedRun]()
    done: dict[int, dict[str, Any]] = {}
    each, begin = idle[0].steps, time.perf_counter()  # steps of a seed
    steps, last_look = 0, begin
    while waiting or running:
        while waiting and idle:
            running.append(_SeedRun(run, idle.pop(), waiting.pop(0), log))
        for one in running:
            one.trainer.step()
            steps += 1
        for one in running:
            one.score_epoch()
        now = time.perf_counter()
        if now - last_look > 0.5:
            last_look = now
            rate = steps / (now - begin)
            ahead = sum(each - one.trainer.step_number for one in running) + len(waiting) * each
            log.progress(
                1 - ahead / (len(seeds) * each),
                f"{data.task.name} seed {', '.join(str(one.seed) for one in running)}  "
                f"step {running[0].trainer.step_number:,} of {each:,}  "
                f"{rate * config.batch_size:,.0f} examples/s  left {ahead / rate:,.0f} s",
            )
        stopping = stop()  # looked at once: a signal from here on is seen after the next step
        for one in list(running):
            one.save_if_due(now, stopping=stopping)
            if one.is_over:
                done[one.seed] = one.finish(at_once)
                running.remove(one)
                idle.append(one.trainer)
        if stopping and running:
            for one in running:
                one.saver.wait()
            raise Stopped
    return done


class _SeedRun:
    """One seed on its way through a trainer."""

    def __init__(self, run: _Run, trainer: Trainer, seed: int, log: RunLog) -> None:
        self.run, self.trainer, self.seed, self.log = run, trainer, seed, log
        self.here, self.first = run.place(seed), (seed - run.config.seed) * trainer.steps
        checkpoints = self.here / "checkpoints"
        self.saver = Saver(checkpoints, keep=1)
        self.spent = 0.0
        self.epochs: list[dict[str, Any]] = []  # those that were scored
        self.kept: dict[str, Tensor] = {}  # weights of the best of them, if that is asked for
        trainer.begin(seed)
        saved = load_newest(checkpoints, warn=log.warn)
        if saved is not None:
            with reading(checkpoints / f"step-{saved.step:08d}"):
                trainer.load(saved.tensors, saved.step)
                self.spent = float(saved.state["seconds"])
                for epoch in saved.state.get("epochs", []):  # none before there were scores
                    self.epochs.append(epoch)
                    self._log_scores(epoch["step"], epoch["scores"])
                best = saved.tensors.get("best", {})  # in a file that will be deleted
                self.kept = {name: tensor.clone() for name, tensor in best.items()}
        self.since = self.last_save = time.perf_counter()

    def _best_epoch(self) -> dict[str, Any]:
        return max(self.epochs, key=lambda epoch: epoch["score"])  # of equal ones the first

    @property
    def is_over(self) -> bool:
        patience, epochs = self.run.config.patience, self.epochs
        if patience and epochs and epochs[-1]["epoch"] - self._best_epoch()["epoch"] >= patience:
            return True
        return self.trainer.step_number == self.trainer.steps

    def score_epoch(self) -> None:
        """After the last step of an epoch, if asked for: score it, keep the weights if it is the
        best. What a checkpoint then holds belongs together, so a kill loses nothing of it."""
        trainer, config, data = self.trainer, self.run.config, self.run.data
        step, reported = trainer.step_number, next(iter(data.splits))
        if config.eval_every == "end" or (step % trainer.per_epoch and step < trainer.steps):
            return
        trainer.wait()
        found = predict(trainer.model, data.splits[reported], trainer.runtime.device)
        scores = dict(sorted(data.score(reported, found).items()))  # as a checkpoint has them
        score, metric = scores[data.task.metric], data.task.metric
        number, of = (math.ceil(n / trainer.per_epoch) for n in (step, trainer.steps))
        self.epochs.append({"epoch": number, "step": step, "score": score, "scores": scores})
        if config.keep_epoch == "best" and self._best_epoch()["step"] == step:
            self.kept = trainer.weights()
        self._log_scores(step, scores)
        told = f"{data.task.name} seed {self.seed} epoch {number} of {of}"
        self.log.note(f"{told}: {metric} {100 * score:.2f}")

    def _log_scores(self, step: int, scores: dict[str, float]) -> None:
        self.log.write("eval", self.first + step, {"seed": self.seed, **scores})

    def save_if_due(self, now: float, *, stopping: bool) -> None:
        step, every = self.trainer.step_number, self.run.config.save_every
        due = step % every == 0 if every else now - self.last_save > 60
        if (due or stopping) and not self.is_over:
            self.last_save = now
            state = {"seconds": self.spent + now - self.since, "epochs": [*self.epochs]}
            best = {"best": self.kept} if self.kept else {}
            with self.trainer.at_work():  # the next step must not overtake the copies
                self.saver.save(step, self.trainer.state() | best, state)

    def finish(self, at_once: int) -> dict[str, Any]:
        """Score the seed and write everything about it; returns what its result.json holds."""
        trainer, config, data = self.trainer, self.run.config, self.run.data
        self.saver.wait()
        trainer.wait()
        seconds = self.spent + time.perf_counter() - self.since
        if self.kept:
            with trainer.at_work():
                trainer.optimizer.load({"model": self.kept})
            trainer.wait()
        predictions = {
            split: predict(trainer.model, features, trainer.runtime.device)
            for split, features in data.splits.items()
        }
        reported = next(iter(data.splits))
        scores = {split: data.score(split, found) for split, found in predictions.items()}
        result: dict[str, Any] = {
            "seed": self.seed,
            "score": scores[reported][data.task.metric],
            "failed": data.failed(reported, predictions[reported]),
            "scores": {split: values for split, values in scores.items() if values},
            "steps": trainer.step_number,
            "bad_steps": int(trainer.optimizer.bad_steps),
            "seconds": round(seconds, 3),
            "seeds_at_once": at_once,
            "examples_per_second": round(trainer.step_number * config.batch_size / seconds, 1),
        }
        if self.epochs:
            result["epochs"] = self.epochs
        if self.kept:
            last = self.epochs[-1]["score"]
            result |= {"kept_epoch": self._best_epoch()["epoch"], "last_score": last}
        self._tell(result, scores[reported])
        flat = {
            f"{split}.{name}": np.ascontiguousarray(array)  # safetensors overlooks strides
            for split, found in predictions.items()
            for name, array in found.items()
        }
        write_atomic(self.here / "predictions.safetensors", arrays_bytes(flat))
        others = [self.run.result(seed) for seed in self.run.seeds]
        is_best = _best([*filter(None, others), result]) is result
        if config.keep == "all" or is_best:
            write_atomic(self.here / "weights.safetensors", tensors_bytes(trainer.weights()))
        write_atomic(self.here / "result.json", json_bytes(result, indent=1))
        if config.keep == "best" and is_best:
            for other in self.run.seeds:  # of more seeds than these another one may be the best
                if other != self.seed:
                    (self.run.place(other) / "weights.safetensors").unlink(missing_ok=True)
        shutil.rmtree(self.here / "checkpoints")
        return result

    def _tell(self, result: dict[str, Any], scores: dict[str, float]) -> None:
        """The seed's losses and scores, in the metrics and on the screen."""
        trainer, task, log = self.trainer, self.run.data.task, self.log
        done = trainer.step_number
        for i, part in enumerate(trainer.losses[:done].cpu().split(20)):
            values = {"seed": self.seed, "loss": float(part.mean())}
            log.write("train", self.first + min(20 * i + 20, done), values)
        if not self.epochs or self.epochs[-1]["step"] < done:
            self._log_scores(done, scores)
        at_once = result["seeds_at_once"]
        log.note(
            f"{task.name} seed {self.seed}: {task.metric} {100 * result['score']:.2f}"
            + (f" of epoch {result['kept_epoch']}, the best" if self.kept else "")
            + (" (failed: it learned nothing)" if result["failed"] else "")
            + f" · {result['seconds']:.1f} s, {result['examples_per_second']:,.0f} examples/s"
            + (f", {at_once} seeds at once" if at_once > 1 else "")
        )
        if bad := result["bad_steps"]:
            log.warn(f"{bad} steps gave a gradient that is not finite; they were left out")


def _keep_finished(out: Path, seeds: set[int]) -> None:
    """Cut the lines of seeds that will be written again from the metrics."""
    kept = [json.dumps(m) + "\n" for m in read_metrics(out) if m.get("seed") in seeds]
    write_atomic(out / "metrics.jsonl", "".join(kept).encode())


def _best(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The highest score; of equal ones the lowest seed."""
    return max(results, key=lambda r: (r["score"], -r["seed"]))


def _fingerprint(features: Sequence[Features]) -> str:
    digest = hashlib.sha256()
    for part in features:
        for array in (part.tokens, part.lengths, part.first, *part.targets.values()):
            digest.update(f"{array.shape} {array.dtype}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _read_predictions(directory: Path) -> dict[str, Predictions]:
    path = directory / "predictions.safetensors"
    result: dict[str, Predictions] = {}
    with _whole(path):
        for key, array in load_arrays(path).items():
            split, _, name = key.partition(".")
            result.setdefault(split, {})[name] = array
    return result


@contextlib.contextmanager
def _whole(path: Path) -> Generator[None]:
    """Names the seed to train again where one of its files cannot be read; the others stay."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        what = f"The file cannot be read: {error}."
        raise CorruptError(what, where=str(path), fix=_again(path.parent)) from error


def _again(directory: Path) -> str:
    return f"delete {directory}; the same command trains this seed again"
