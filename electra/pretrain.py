"""Pre-training: build the networks, run the loop, leave a directory that continues and exports.

The loop is `Run.train`, the optimizer step in it `trainer.Trainer.train_step`: both are meant to be
read. A checkpoint holds weights, moments and the step; order, masks, samples and dropout follow
from the step, so continuing is exact.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import runtime as runtimes
from .batches import Batches
from .checkpoint import Saver, load_newest, size_of
from .config import PretrainConfig
from .data.corpus import Corpus
from .errors import (
    BrokenOff,
    CorruptError,
    DiskFull,
    ElectraError,
    LostProcess,
    NumericError,
    Stopped,
    StopRequest,
)
from .evaluate import Evaluation, diagnose, evaluate, token_counts, unigram_entropy
from .files import exclusive, json_bytes, reading
from .flops import matmul_flops_per_token
from .micro_batch import compiling, device_errors, find_micro_batch
from .objectives import SpecialIds, build_objective, disc_share
from .optim import learning_rate
from .recipes import RECIPES
from .rundir import check_fits, check_room, enter_run, kept_for_good, record_of, was_evaluated
from .runlog import RunLog
from .runtime import Runtime
from .trainer import Meter, Trainer, shares_weights

_POLL_SECONDS = 5.0  # between two looks whether a full disk has room again


def open_corpus(path: Path) -> Corpus:
    """For `pretrain`, which has the tokens checked by one process of each machine where there are
    several: each of them would read the whole corpus."""
    return Corpus.open(path, defer=int(os.environ.get("WORLD_SIZE", 1)) > 1)


def pretrain(
    config: PretrainConfig,
    corpus: Corpus,
    out: Path,
    *,
    initial: dict[str, Tensor] | None = None,
    initial_from: str | None = None,
    force: bool = False,
    quiet: bool = False,
) -> None:
    """Train until the steps or the minutes are used up; the same call again continues.

    initial: parameters by name to start from instead of a random draw (an imported model), which
    come from `initial_from`. force: continue although the settings or the corpus have changed.
    Raises Stopped after a signal, once everything is saved.
    """
    check_fits(config, corpus)
    # Read before the run is entered, so that a resumed run computes with the same thread count.
    before = record_of(out)
    runtime = runtimes.start(config.run, threads=before.get("threads"))
    with StopRequest() as stop:
        try:
            if config.data.batch_size % runtime.world:
                what = f"A global batch of {config.data.batch_size} cannot be split over "
                what += f"{runtime.world} processes."
                fix = "use a batch size that is a multiple of the number of processes"
                raise ElectraError(what, where="data.batch_size", fix=fix)
            _check_tokens(corpus, runtime, stop)
            with exclusive(out) if runtime.is_main else contextlib.nullcontext():
                changed: list[str] = []
                if runtime.is_main:
                    changed = enter_run(config, corpus, out, runtime, before, initial_from, force)
                runtime.agree(0.0)  # the others wait until the directory is there
                # No reference is kept: tensors and graphs are freed before the process group ends.
                _carry_out(Run(config, corpus, out, runtime, stop, initial), changed, quiet)
        except (LostProcess, Stopped):
            raise
        except BaseException as error:
            runtime.report(f"{type(error).__name__}: {error}")
            raise
        finally:
            runtime.leave()


def _check_tokens(corpus: Corpus, runtime: Runtime, stop: StopRequest) -> None:
    """Check what `Corpus.open` left unchecked; what one process finds ends all, in its words.

    All meet after each file, so that none waits for another one for longer than a file takes.
    """
    number = float(int(corpus.fingerprint[:12], 16))  # exact: 48 of its bits
    if runtime.any(runtime.agree(number) != number):
        raise ElectraError(
            "The processes see different corpora.",
            where=str(corpus.path),
            fix="give the same --corpus on all nodes, or the same copy of it",
        )
    if not runtime.any(len(corpus.unchecked) > 0):
        return
    for file in corpus.token_files:
        if runtime.any(stop()):
            raise Stopped
        found: CorruptError | None = None
        if runtime.is_first_here and file in corpus.unchecked:
            try:
                corpus.check(file)
            except CorruptError as error:
                found = error
        word = json_bytes([found.what, found.where, found.fix]).decode() if found else ""
        rank, word = runtime.first_word(word)
        if found is not None:
            raise found
        if word:
            what, where, fix = json.loads(word)
            raise CorruptError(what, f"{where} (process {rank} found it)", fix)
    corpus.unchecked = ()


def _carry_out(run: Run, changed: list[str], quiet: bool) -> None:
    if run.is_done:
        return
    run.open_log(changed, quiet)
    complete = False
    try:
        run.train()
        complete = True
    except Stopped as stopped:
        complete = not stopped.broke_off
        raise
    finally:
        if complete:
            run.settle()
        run.close()
        if complete:  # a launcher may end all with the first that leaves: none does before the save
            run.runtime.agree(0.0)
    if run.runtime.is_main and not quiet:
        from .studies.figures import draw_curves  # imports matplotlib

        draw_curves(run.out)


class Run:
    """A run of pre-training: what it is made of, where it stands, and the loop."""

    log: RunLog

    def __init__(
        self,
        config: PretrainConfig,
        corpus: Corpus,
        out: Path,
        runtime: Runtime,
        stop: StopRequest,
        initial: dict[str, Tensor] | None,
    ) -> None:
        """Build the networks and set them to the newest checkpoint, or else to `initial`."""
        self.config, self.corpus, self.out = config, corpus, out
        self.runtime, self.stop = runtime, stop
        special = SpecialIds(**corpus.special_ids)
        counts = token_counts(corpus.train, tuple(special), corpus.vocab_size)
        with device_errors(lambda: None):
            batches = Batches(corpus.train, config, runtime)
            self.objective = build_objective(
                config,
                corpus.vocab_size,
                special,
                padded=batches.padded,
                frequencies=torch.from_numpy(counts),
            )
            if not shares_weights(config, runtime):  # else each process brings only its rows there
                self.objective.to(runtime.device)
        checkpoints = out / "checkpoints"
        keep, every = config.run.keep_checkpoints, config.run.keep_every
        self.saver: Saver | None = None
        if runtime.is_main:
            self.saver = Saver(checkpoints, keep=keep, keep_every=every)
        self.early_warnings: list[str] = []
        if not runtime.is_main:  # the main process looks first: it sets damaged checkpoints aside
            runtime.agree(0.0)
        saved = load_newest(checkpoints, warn=self.early_warnings.append, set_aside=runtime.is_main)
        if runtime.is_main:
            runtime.agree(0.0)
        self.first_step = self.step = saved.step if saved else 0
        self.switch = config.switch_step
        if self.switch is not None:
            first_stage = self.step <= self.switch
            self.objective.stage = "generator" if first_stage else "discriminator"
        with device_errors(lambda: None):
            self.trainer = Trainer(self.objective, batches, config, runtime)
        self.seconds = lap = 0.0  # of training, as of the last look at the clock
        if saved is not None:
            with reading(checkpoints / f"step-{saved.step:08d}"):
                self.trainer.load(saved.tensors, saved.step)
                self.seconds, lap = float(saved.state["seconds"]), float(saved.state["lap"])
        elif initial is not None:
            self.trainer.optimizer.load({"model": initial})
        else:
            config.check_start(from_model=False)
        del saved  # its tensors map the files: pruned ones would keep their room on the disk
        if runtime.any(runtime.agree(float(self.step)) != float(self.step)):
            raise ElectraError(
                "The processes see different checkpoints.",
                where=str(out),
                fix="put --out on a file system that all nodes share",
            )
        self.clock = Clock(self.seconds, lap_start=lap)
        self.unigram = unigram_entropy(counts)
        self.owes_evaluation = self._owes_evaluation(from_model=initial is not None)

    def _owes_evaluation(self, *, from_model: bool) -> bool:
        """Whether an evaluation is missing: a stop came between a step and its evaluation, or the
        run starts from a model, whose scores show what training changes."""
        due = self.step % self.config.run.eval_every == 0 or self.progress >= 1.0
        due = due and (self.step > 0 or from_model)
        owes = self.runtime.is_main and due and not was_evaluated(self.out, self.step)
        return self.runtime.any(owes and len(self.corpus.held_out) > 0)

    @property
    def progress(self) -> float:
        return self.progress_at(self.step)

    def progress_at(self, step: int) -> float:
        """Share of the run that is done, by steps or by the clock, whichever is further."""
        run = self.config.run
        by_clock = self.seconds / (60 * run.minutes) if run.minutes else 0.0
        return min(1.0, max(step / run.train_steps, by_clock))

    @property
    def is_done(self) -> bool:
        return self.progress >= 1.0 and not self.owes_evaluation

    def open_log(self, changed: list[str], quiet: bool) -> None:
        """Check that there is room for checkpoints, and tell what is about to run."""
        config, run = self.config, self.config.run
        self.checkpoint_size = size_of(self.trainer.state())
        if self.saver is not None:
            check_room(self.saver.directory, self.checkpoint_size, self._kept_for_good())
        patient = run.on_disk_full == "pause"
        self.log = RunLog(
            self.out,
            active=self.runtime.is_main,
            from_step=self.step,
            quiet=quiet,
            patient=patient,
            tracker=run.tracker,
        )
        start = RECIPES[config.name]() if config.name in RECIPES else None
        for text in (*self.early_warnings, *config.without_effect(start)):
            self.log.warn(text)
        for text in changed:
            self.log.note(f"changed: {text}")
            self.log.write("event", self.step, {"changed": text})
        self.log.note(
            f"{config.name}: step {self.step:,} of {run.train_steps:,}"
            + (f", at most {run.minutes:g} minutes" if run.minutes else "")
            + f" · {self.runtime.describe()['device']}, {self.runtime.describe()['dtype']}"
        )
        self._judges_warmup = config.optim.warmup_percent is None
        if self._judges_warmup:
            self._judge_warmup(run.train_steps)
        self._told_of_disk = -math.inf
        self.flops = matmul_flops_per_token(config, self.corpus.vocab_size)
        self.peak = runtimes.matmul_rate(self.runtime.device, self.runtime.dtype)
        self.peak *= self.runtime.world
        if self.saver is not None and patient:
            self.saver.on_full = self.wait_for_room

    def _kept_for_good(self) -> int:
        """Checkpoints to come that stay, and need room before the end; as far as is known: a clock
        says nothing of steps before the first one."""
        run, end = self.config.run, float(self.config.run.train_steps)
        if run.on_disk_full == "pause" or (run.minutes and self.step == 0):
            return 0
        if run.minutes:
            end = min(end, self.step / self.progress)
        return kept_for_good(run, self.step, end)

    # ------------------------------------------------------------------ the loop

    def train(self) -> None:
        """Steps until the steps or the minutes are used up; once in a while look, judge, save."""
        run = self.config.run
        if not self.runtime.any(self.stop()):
            self.make_ready()
        if self.owes_evaluation and self.progress < 1.0:
            self.held_out()
        with self.clock, device_errors(lambda: self.trainer):
            while self.progress < 1.0:
                if self.trainer.may_stop and self.runtime.any(self.stop()):
                    if self.step > self.first_step:
                        self.save()
                    raise Stopped
                if self.step == self.switch:
                    self.begin_second_stage()
                if self.trainer.needs_block and not self.load_block():
                    break  # the clock has ended the run
                self.trainer.step()
                self.step += 1

                if self.step % run.log_every == 0 or self.progress >= 1.0:
                    self.log_training()
                if self.step % run.eval_every == 0 and self.progress < 1.0:
                    with self.clock.paused():
                        self.held_out()
                if self.step % run.save_every == 0 and self.progress < 1.0:
                    self.save()
        if self.step > self.first_step or self.owes_evaluation:
            # Before the save, so that the log is complete up to the checkpoint.
            finished = self.runtime.agree(float(self.held_out()))
            self.save()
            if not finished:
                raise Stopped

    def load_block(self) -> bool:
        """Bring batches, learning rates and shares of λ of the next steps to the device; False
        where the clock, which is read here, has ended the run."""
        trainer, step = self.trainer, self.step
        self.seconds = self.runtime.agree(self.clock.read())
        if self.progress >= 1.0:
            if step > self.first_step and step % self.config.run.log_every:
                self.log_training()
            return False
        total = float(self.config.run.train_steps)
        if self.config.run.minutes and step > 0:  # the clock may end the run first
            total = max(step, step / self.progress)
            if self._judges_warmup and self.progress > 0.02:
                self._judge_warmup(total)
                self._judges_warmup = False
        ahead = range(step, step + trainer.block_steps)
        start = self.config.objective.disc_start_percent
        trainer.load_block(
            step,
            [self.rate_at(s, total) for s in ahead],
            [disc_share(start, self.progress_at(s)) for s in ahead],
        )
        return True

    def rate_at(self, step: int, total: float) -> float:
        """The learning rate; each of two stages has the whole schedule."""
        progress = self.progress_at(step)
        if self.switch is not None:
            last = self.config.run.train_steps
            begin, end = (0, self.switch) if step < self.switch else (self.switch, last)
            step, total = step - begin, float(end - begin)
            progress = step / total
        return learning_rate(self.config.optim, step, progress, total)

    def begin_second_stage(self) -> None:
        if self.step > self.first_step and self.step % self.config.run.save_every:
            self.save()
        if self.saver is not None:  # the second stage may be stopped before its first step
            self.saver.wait()
        with self.clock.paused():
            self.trainer = self.trainer.second_stage()
            gc.collect()  # the optimizer before refers to itself, and is large
            self.make_ready()

    def make_ready(self) -> None:
        """What comes before a trainer's first step and is no part of the budget: it is called
        where everything is saved, and may end with Stopped."""
        try:
            with device_errors(lambda: self.trainer):
                if self.config.data.micro_batch == "auto":
                    find_micro_batch(
                        self.trainer, self.out, self.log, self.step, self._glance, self.stop
                    )
                with compiling(self.runtime, self.stop):
                    self.trainer.record()
                if self.saver is not None:
                    self.saver.reserve(self.trainer.state())
        except (BrokenOff, Exception) as error:
            # A signal to all processes of a terminal or of torchrun ends the compiler's as well.
            if self.stop() and not isinstance(error, ElectraError):
                raise Stopped(broke_off=True) from error
            raise

    # ------------------------------------------------------------------ look, judge, save

    def log_training(self) -> None:
        """Averages since the last call, to the metrics and the terminal; stops a run that is
        broken."""
        trainer, step, progress = self.trainer, self.step, self.progress
        in_a_row = int(trainer.optimizer.worst_in_a_row)
        values = self._averages()
        self.log.write("train", step, values)
        self.log.progress(progress, _line(step, progress, values))
        if not in_a_row:
            return
        kind = "not finite" + (" or far too large" if self.config.optim.skip_spikes else "")
        text = f"steps with a gradient that is {kind} were left out: {values['bad_steps']} so far, "
        text += f"{in_a_row} of them in a row"
        self.log.warn(text)
        self.log.write("event", step, {"warning": text})
        if in_a_row >= self.config.run.max_bad_steps:
            raise NumericError(
                f"{in_a_row} steps in a row gave a gradient that is {kind}; none of them reached "
                "the weights.",
                where=f"step {step}",
                fix="continue with a lower --optim.learning-rate, or --run.precision fp32",
            )

    def _averages(self) -> dict[str, Any]:
        """What the meter has summed up since the last call, as averages; the sums begin anew."""
        config, trainer = self.config, self.trainer
        for share in trainer.meter.shares:
            self.runtime.sum_(share)
        sums = dict(zip(Meter.FIELDS, trainer.meter.sums.tolist(), strict=True))
        bad = int(trainer.optimizer.bad_steps)
        trainer.optimizer.worst_in_a_row.zero_()
        trainer.meter.sums.zero_()
        steps = sums["steps"] or math.nan  # all steps bad: every average is not a number
        masked, tokens = max(1.0, sums["masked"]), max(1.0, sums["tokens"])
        o = config.objective
        seconds, rate = self.clock.lap(tokens)
        values = {
            "loss": sums["total"] / steps,  # what is minimised
            "mlm_loss": sums["mlm"] / steps,
            "mlm_accuracy": sums["mlm_correct"] / masked,
            "learning_rate": float(trainer.rates[max(0, int(trainer.slot) - 1)]),
            "grad_norm": sums["norm"] / steps,
            "bad_steps": bad,
            **({"spikes": int(trainer.optimizer.spikes)} if config.optim.skip_spikes else {}),
            "seconds": seconds,
            "tokens_per_second": rate,
            "mfu": rate * self.flops / self.peak,
        }
        if o.kind != "mlm":
            values["disc_loss"] = sums["disc"] / steps
            values["disc_accuracy"] = sums["disc_correct"] / max(1.0, sums["scored"])
            values["replaced_percent"] = 100 * sums["replaced"] / tokens
        return values

    def held_out(self) -> bool:
        """Evaluate on held-out text, in the main process, or in all where each has but a share of
        the weights; False if a signal cut that short."""
        in_shares = self.trainer.in_shares
        if not (self.runtime.is_main or in_shares) or not len(self.corpus.held_out):
            return True

        def asked() -> bool:
            if not self.trainer.may_stop:
                return False
            return self.runtime.any(self.stop()) if in_shares else self.stop()

        all_at_work = self.runtime.together() if in_shares else contextlib.nullcontext()
        try:
            with all_at_work, self.trainer.optimizer.averaged():
                result = self._judge(self.config.run.eval_batches, asked)
        except Stopped:
            return False
        step, unigram = self.step, self.unigram
        self.log.write("eval", step, {**asdict(result), "unigram_entropy": unigram})
        shown = f"step {step:,} held out: generator {result.mlm_loss:.3f} nats"
        shown += f" (token frequencies alone {unigram:.3f})"
        shown += f", {100 * result.mlm_accuracy:.1f} % right"
        if result.disc_auc is not None:
            shown += f", discriminator AUC {result.disc_auc:.3f}"
            shown += f", precision {result.disc_precision:.2f}, recall {result.disc_recall:.2f}"
        self.log.note(shown)
        floor = unigram if self.config.generator.kind == "network" else math.inf
        begin = self.config.objective.disc_start_percent / 100
        if self.switch is not None:
            begin = self.switch / self.config.run.train_steps
        for text in diagnose(result, floor, self.progress, begin):
            self.log.warn(text)
            self.log.write("event", step, {"warning": text})
        return True

    def _judge(self, batches: int, asked: Callable[[], bool]) -> Evaluation:
        # Where the micro-batch is limited, memory is short for evaluations too.
        few = self.config.data.micro_batch is not None
        at_once = min(64, self.trainer.at_once) if few else 64
        try:
            return evaluate(
                self.objective,
                self.corpus.held_out,
                batches=batches,
                at_once=at_once,
                should_stop=asked,
            )
        finally:
            self.trainer.forget_whole_weights()

    def _glance(self) -> None:
        """Run the first part of an evaluation, to see whether it fits in memory."""
        if self.runtime.is_main and len(self.corpus.held_out):
            answers = iter((False,))
            with contextlib.suppress(Stopped), self.trainer.optimizer.averaged():
                self._judge(1, lambda: next(answers, True))

    def settle(self) -> None:
        """Until no save is under way. All wait together: one that waits alone would look frozen to
        the others."""
        while self.runtime.any(self.saver is not None and self.saver.is_busy):
            time.sleep(0.05)

    def save(self) -> None:
        self.settle()
        self.trainer.collect()
        if self.saver is not None:
            times = {"seconds": self.clock.read(), "lap": self.clock.lap_start}
            self.saver.save(self.step, self.trainer.state(), times)

    def wait_for_room(self, full: DiskFull) -> None:
        """In the thread that saves: until there may be room, unless the run is to stop."""
        if time.monotonic() - self._told_of_disk > 60:
            self._told_of_disk = time.monotonic()
            self.log.warn(f"waiting for room: {full}")
        while True:
            for _ in range(10):
                if self.stop():
                    raise full
                time.sleep(_POLL_SECONDS / 10)
            if shutil.disk_usage(self.out).free >= self.checkpoint_size:
                return

    def close(self) -> None:
        try:
            if self.saver is not None:
                self.saver.wait()  # raises what went wrong in the last save
        finally:
            self.log.close()

    def _judge_warmup(self, total: float) -> None:
        """Tell of a warm-up that is longer than a run of `total` steps."""
        steps = self.config.optim.warmup_steps
        if steps >= total:
            self._judges_warmup = False
            self.log.warn(
                f"the warm-up of {steps:,} steps is longer than this run: the learning rate will "
                "neither reach its peak nor fall. Use --optim.warmup-percent 10."
            )


def _line(step: int, progress: float, values: dict[str, Any]) -> str:
    """What the terminal shows of `Run._averages`."""
    line = f"step {step:,}  loss {values['loss']:.3f}  mlm {values['mlm_loss']:.3f}"
    if "disc_loss" in values:
        line += f"  disc {values['disc_loss']:.4f}  replaced {values['replaced_percent']:.1f} %"
    left = values["seconds"] * (1 - progress) / progress if progress > 0 else 0.0
    return line + (
        f"  gen right {100 * values['mlm_accuracy']:.1f} %  lr {values['learning_rate']:.2e}"
        f"  {values['tokens_per_second']:,.0f} tokens/s  MFU {100 * values['mfu']:.1f} %"
        f"  left {_duration(left)}"
    )


class Clock:
    """Seconds of training: runs while entered, stands still while paused, survives a resume."""

    def __init__(self, seconds: float, *, lap_start: float) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self.lap_start = lap_start

    def __enter__(self) -> Clock:
        self._since = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds, self._since = self.read(), None

    def read(self) -> float:
        running = time.perf_counter() - self._since if self._since is not None else 0.0
        return self._seconds + running

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def lap(self, amount: float) -> tuple[float, float]:
        """Seconds so far, and `amount` per second since the last lap."""
        now = self.read()
        rate = amount / max(1e-9, now - self.lap_start)
        self.lap_start = now
        return now, rate


def _duration(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m:02d} min" if hours else f"{m} min {s:02d} s"
