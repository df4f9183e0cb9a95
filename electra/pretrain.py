"""Pre-training: build the networks, run the loop, leave a directory that continues and exports.

The loop stands in `_train` and the optimizer step in `Trainer.train_step`; both are meant to be
read. A checkpoint holds weights, moments and the step: order, masks, samples and dropout follow
from the step, so continuing is exact.
"""

from __future__ import annotations

import contextlib
import gc
import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import fused, kernels
from . import runtime as runtimes
from .batches import Batches, Block
from .checkpoint import Saver, load_newest, size_of
from .config import PretrainConfig
from .corpus import Corpus
from .encoder import Block as EncoderBlock
from .encoder import Embeddings
from .errors import (
    BrokenOff,
    DiskFull,
    ElectraError,
    LostProcess,
    NumericError,
    Stopped,
    StopRequest,
)
from .evaluate import Evaluation, diagnose, evaluate, token_counts, unigram_entropy
from .exchange import Exchange, compiler_in_parts
from .files import exclusive, read_json, reading
from .flops import matmul_flops_per_token
from .objectives import (
    Batch,
    Losses,
    Objective,
    ReplacedTokenDetection,
    SpecialIds,
    WithGenerator,
    build_objective,
    disc_share,
)
from .optim import Adam, added, by_gram, learning_rate
from .plan import make_plan
from .randomness import StepRng
from .rundir import (
    check_fits,
    check_room,
    enter_run,
    found_micro_batch,
    keep_micro_batch,
    was_evaluated,
)
from .runlog import RunLog, draw_curves
from .runtime import Runtime, is_out_of_memory, refuse_undetermined, sent, usable_memory

_POLL_SECONDS = 5.0  # between two looks whether a full disk has room again
_SPARE = 0.02  # of the memory a process may use, left by a micro-batch found by trying


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
    before = read_json(out / "run.json")
    runtime = runtimes.start(config.run, threads=before.get("threads"))
    if config.data.batch_size % runtime.world:
        raise ElectraError(
            f"A global batch of {config.data.batch_size} cannot be split over "
            f"{runtime.world} processes.",
            where="data.batch_size",
            fix="use a batch size that is a multiple of the number of processes",
        )
    with StopRequest() as stop:
        try:
            with exclusive(out) if runtime.is_main else contextlib.nullcontext():
                changed: list[str] = []
                if runtime.is_main:
                    changed = enter_run(config, corpus, out, runtime, before, initial_from, force)
                runtime.agree(0.0)  # the others wait until the directory is there
                _train(config, corpus, out, runtime, stop, initial, changed, quiet)
        except (LostProcess, Stopped):
            raise
        except BaseException as error:
            runtime.report(f"{type(error).__name__}: {error}")
            raise
        finally:
            runtime.leave()


def _train(
    config: PretrainConfig,
    corpus: Corpus,
    out: Path,
    runtime: Runtime,
    stop: StopRequest,
    initial: dict[str, Tensor] | None,
    changed: list[str],
    quiet: bool,
) -> None:
    run = config.run
    special = SpecialIds(**corpus.special_ids)
    counts = token_counts(corpus.train, tuple(special), corpus.vocab_size)
    with _device_errors(lambda: None):
        batches = Batches(corpus.train, config, runtime)
        objective = build_objective(
            config,
            corpus.vocab_size,
            special,
            padded=batches.padded,
            frequencies=torch.from_numpy(counts),
        ).to(runtime.device)
    saver = Saver(out / "checkpoints", keep=run.keep_checkpoints) if runtime.is_main else None
    pauses = run.on_disk_full == "pause"
    early_warnings: list[str] = []
    if not runtime.is_main:  # the main process looks first: it sets damaged checkpoints aside
        runtime.agree(0.0)
    saved = load_newest(out / "checkpoints", warn=early_warnings.append)
    if runtime.is_main:
        runtime.agree(0.0)
    first_step, switch = saved.step if saved else 0, config.switch_step
    if switch is not None:
        objective.stage = "generator" if first_step <= switch else "discriminator"
    with _device_errors(lambda: None):
        trainer = Trainer(objective, batches, config, runtime)
    seconds = lap = 0.0
    if saved is not None:
        with reading(out / "checkpoints" / f"step-{saved.step:08d}"):
            trainer.load(saved.tensors, saved.step)
            seconds, lap = float(saved.state["seconds"]), float(saved.state["lap"])
    elif initial is not None:
        trainer.optimizer.load({"model": initial})
    elif config.generator.frozen:
        what = "A frozen generator has to be a trained one."
        fix = "give its run or export as --init"
        raise ElectraError(what, where="generator.frozen", fix=fix)
    del saved  # its tensors map the files: pruned ones would keep their room on the disk
    if runtime.any(runtime.agree(float(first_step)) != float(first_step)):
        raise ElectraError(
            "The processes see different checkpoints.",
            where=str(out),
            fix="put --out on a file system that all nodes share",
        )

    def progress_at(step: int, clock: float) -> float:
        """Share of the run that is done, by steps or by the clock, whichever is further."""
        by_clock = clock / (60 * run.minutes) if run.minutes else 0.0
        return min(1.0, max(step / run.train_steps, by_clock))

    def rate_at(step: int, progress: float, total: float) -> float:
        """The learning rate; each of two stages has the whole schedule."""
        if switch is not None:
            begin, end = (0, switch) if step < switch else (switch, run.train_steps)
            step, total = step - begin, float(end - begin)
            progress = step / total
        return learning_rate(config.optim, step, progress, total)

    # A stop can come between a step and its evaluation, which is then made up for. What training
    # starts from is looked at too if it is a model: only so does one see what the run changes.
    is_due = first_step % run.eval_every == 0 or progress_at(first_step, seconds) >= 1.0
    is_due = is_due and (first_step > 0 or initial is not None)
    owes = runtime.is_main and is_due and not was_evaluated(out, first_step)
    owes = runtime.any(owes and len(corpus.held_out) > 0)
    if progress_at(first_step, seconds) >= 1.0 and not owes:
        return  # done before
    unigram = unigram_entropy(counts)
    size = size_of(trainer.state())
    if saver is not None:
        check_room(saver.directory, size)
    log = RunLog(
        out,
        active=runtime.is_main,
        from_step=first_step,
        quiet=quiet,
        patient=pauses,
        tracker=run.tracker,
    )
    for text in (*early_warnings, *config.without_effect()):
        log.warn(text)
    for text in changed:
        log.note(f"changed: {text}")
        log.write("event", first_step, {"changed": text})
    log.note(
        f"{config.name}: step {first_step:,} of {run.train_steps:,}"
        + (f", at most {run.minutes:g} minutes" if run.minutes else "")
        + f" · {runtime.describe()['device']}, {runtime.describe()['dtype']}"
    )
    warn_of_warmup = config.optim.warmup_percent is None
    if warn_of_warmup and config.optim.warmup_steps >= run.train_steps:
        warn_of_warmup = False
        log.warn(_long_warmup(config))
    flops = matmul_flops_per_token(config, corpus.vocab_size)
    peak = runtimes.matmul_rate(runtime.device, runtime.dtype) * runtime.world

    told = -math.inf

    def wait_for_room(full: DiskFull) -> None:
        """In the thread that saves: until there may be room, unless the run is to stop."""
        nonlocal told
        if time.monotonic() - told > 60:
            told = time.monotonic()
            log.warn(f"waiting for room: {full}")
        while True:
            for _ in range(10):
                if stop():
                    raise full
                time.sleep(_POLL_SECONDS / 10)
            if shutil.disk_usage(out).free >= size:
                return

    if saver is not None and pauses:
        saver.on_full = wait_for_room

    def save(step: int) -> None:
        # All wait together: one that waits alone would look frozen to the others.
        while runtime.any(saver is not None and saver.is_busy):
            time.sleep(0.05)
        trainer.collect()
        if saver is not None:
            saver.save(step, trainer.state(), {"seconds": clock.read(), "lap": clock.lap_start})

    def judge(batches: int, asked: Callable[[], bool]) -> Evaluation:
        # Who has memory for few sequences at once has it for few of these as well.
        few = config.data.micro_batch is not None
        at_once = min(64, trainer.at_once) if few else 64
        return evaluate(
            objective, corpus.held_out, batches=batches, at_once=at_once, should_stop=asked
        )

    def glance() -> None:
        """The first part of an evaluation, for the memory that it takes."""
        if runtime.is_main and len(corpus.held_out):
            answers = iter((False,))
            with contextlib.suppress(Stopped), trainer.optimizer.averaged():
                judge(1, lambda: next(answers, True))

    def make_ready(step: int) -> None:
        """What comes before a trainer's first step and is no part of the budget: it is called
        where everything is saved, and may end with Stopped."""
        try:
            with _device_errors(lambda: trainer):
                if config.data.micro_batch == "auto":
                    _find_micro_batch(trainer, out, log, step, glance, stop)
                with _compiling(runtime, stop):
                    trainer.record()
                if saver is not None:
                    saver.reserve(trainer.state())
        except (BrokenOff, Exception) as error:
            # A signal to all processes of a terminal or of torchrun ends the compiler's as well.
            if stop() and not isinstance(error, ElectraError):
                raise Stopped(broke_off=True) from error
            raise

    def held_out(step: int, progress: float) -> bool:
        """Whether the evaluation came to its end, as far as this process knows."""
        if not runtime.is_main or not len(corpus.held_out):
            return True
        asked = stop if trainer.may_stop else lambda: False
        try:
            with trainer.optimizer.averaged():
                result = judge(run.eval_batches, asked)
        except Stopped:
            return False
        log.write("eval", step, {**result.as_dict(), "unigram_entropy": unigram})
        shown = f"step {step:,} held out: generator {result.mlm_loss:.3f} nats"
        shown += f" (token frequencies alone {unigram:.3f})"
        shown += f", {100 * result.mlm_accuracy:.1f} % right"
        if result.disc_auc is not None:
            shown += f", discriminator AUC {result.disc_auc:.3f}"
            shown += f", precision {result.disc_precision:.2f}, recall {result.disc_recall:.2f}"
        log.note(shown)
        floor = unigram if config.generator.kind == "network" else math.inf
        begin = config.objective.disc_start_percent / 100
        if switch is not None:
            begin = switch / run.train_steps
        for text in diagnose(result, floor, progress, begin):
            log.warn(text)
            log.write("event", step, {"warning": text})
        return True

    step, progress = first_step, progress_at(first_step, seconds)
    clock = Clock(seconds, lap_start=lap)
    try:
        if not runtime.any(stop()):
            make_ready(step)
        if owes and progress < 1.0:
            held_out(step, progress)
        with clock, _device_errors(lambda: trainer):
            while progress < 1.0:
                if trainer.may_stop and runtime.any(stop()):
                    if step > first_step:
                        save(step)
                    raise Stopped
                if step == switch:
                    if step > first_step and step % run.save_every:
                        save(step)
                    if saver is not None:  # the second stage may be stopped before its first step
                        saver.wait()
                    with clock.paused():
                        trainer = trainer.second_stage()
                        gc.collect()  # the optimizer before refers to itself, and is large
                        make_ready(step)
                if trainer.needs_block:
                    seconds = runtime.agree(clock.read())
                    progress = progress_at(step, seconds)
                    if progress >= 1.0:  # the clock ends the run between two lines
                        if step > first_step and step % run.log_every:
                            _log_training(trainer, log, clock, step, 1.0, flops, peak)
                        break
                    total = float(run.train_steps)
                    if run.minutes and step > 0:  # the clock may end the run first
                        total = max(step, step / progress)
                        if warn_of_warmup and progress > 0.02:
                            warn_of_warmup = False
                            if config.optim.warmup_steps >= total:
                                log.warn(_long_warmup(config))
                    ahead = range(step, step + trainer.block_steps)
                    after = [progress_at(s, seconds) for s in ahead]
                    trainer.load_block(
                        step,
                        [rate_at(s, p, total) for s, p in zip(ahead, after, strict=True)],
                        [disc_share(config.objective.disc_start_percent, p) for p in after],
                    )
                trainer.step()
                step += 1
                progress = progress_at(step, seconds)

                # Once in a while: look, judge, save.
                if step % run.log_every == 0 or progress >= 1.0:
                    _log_training(trainer, log, clock, step, progress, flops, peak)
                if step % run.eval_every == 0 and progress < 1.0:
                    with clock.paused():
                        held_out(step, progress)
                if step % run.save_every == 0 and progress < 1.0:
                    save(step)
        if step > first_step or owes:
            # Before the save: what a checkpoint ends is logged to its end.
            finished = runtime.agree(float(held_out(step, 1.0)))
            save(step)
            if not finished:
                raise Stopped
    finally:
        try:
            if saver is not None:
                saver.wait()  # raises what went wrong in the last save
        finally:
            log.close()
    if runtime.is_main and not quiet:
        draw_curves(out)


@dataclass
class Meter:
    """Sums over the finite steps since the last line of metrics, kept on the device."""

    sums: Tensor  # (FIELDS,) float64

    FIELDS = (
        *("mlm", "disc", "mlm_correct", "replaced", "disc_correct"),  # this process's share
        *("masked", "tokens", "norm", "steps"),  # of the whole step
        "scored",  # this process's share again
    )

    def __post_init__(self) -> None:
        self._losses = torch.zeros_like(self.sums[:6])  # of the step under way
        self.shares = (self.sums[:5], self.sums[-1:])  # what is of this process

    def add_losses(self, losses: Losses) -> None:
        """The share of one micro-batch."""
        self._losses.add_(torch.stack([p.detach().double() for p in losses[1:]]))

    def add_step(self, counts: tuple[Tensor, Tensor], norm: Tensor) -> None:
        """What is known of the step as a whole: masked positions, tokens, gradient norm."""
        whole = torch.stack([p.double() for p in (*counts, norm, torch.ones_like(norm))])
        parts = torch.cat([self._losses[:5], whole, self._losses[5:]])
        self.sums.add_(torch.where(parts.isfinite().all(), parts, 0.0))
        self.forget()

    def forget(self) -> None:
        """The step under way."""
        self._losses.zero_()


def close_step(
    meter: Meter, block: Block, norm: Tensor, slot: Tensor, counter: Tensor, config: PretrainConfig
) -> None:
    """After an update: what the step as a whole was, and on to the next."""
    meter.add_step(block.counts(slot, config), norm)
    slot.add_(1)
    counter.add_(1)


class Trainer:
    """One process's share of the optimizer steps, eager or as a recorded CUDA graph."""

    def __init__(
        self, objective: Objective, batches: Batches, config: PretrainConfig, runtime: Runtime
    ) -> None:
        self.objective, self.batches = objective, batches
        self.config, self.runtime = config, runtime
        self.idle = objective.idle()
        self.has_kernels = _use_kernels(objective, config, runtime)
        # The first step that this optimizer makes: the second of two stages has one of its own.
        self.first_step = (config.switch_step or 0) if objective.stage == "discriminator" else 0
        self.optimizer = Adam(
            objective,
            config.optim,
            working_dtype=runtime.dtype,
            multipliers={
                **dict.fromkeys(objective.generators_own(), config.optim.generator_rate),
                **dict.fromkeys(self.idle, 0.0),
            },
            exchange=Exchange(runtime, sharded=config.run.sharding == "optimizer"),
            kernel=self.has_kernels,
        )
        self.forward: Callable[[Batch, StepRng], Losses] = objective
        # The same in two parts, where the generator learns first.
        self.parts: tuple[Callable[..., Any], Callable[..., Losses]] | None = None
        self.read: Callable[..., Batch] = Block.batch
        self.note: Callable[[Meter, Losses], None] = Meter.add_losses
        self.close: Callable[..., None] = close_step
        self._compile()
        self.rows = config.data.batch_size // runtime.world
        self.split(config.data.at_once(self.rows))
        # A GPU is fed many steps ahead so that it never waits for Python.
        on_gpu = runtime.device.type == "cuda"
        self.block_steps = steps_ahead(self.rows * config.data.sequence_length) if on_gpu else 1
        device = runtime.device
        self.seed: int | Tensor = config.run.seed
        if runtime.compiled:  # what was compiled for one seed is found again by the others
            self.seed = torch.tensor(config.run.seed % 2**32, device=device)
        self.slot = torch.zeros((), dtype=torch.int64, device=device)  # place in the block
        self.counter = torch.zeros((), dtype=torch.int64, device=device)  # steps done
        self.rates = torch.zeros(self.block_steps, device=device)
        self.shares = torch.ones(self.block_steps, device=device)  # of λ
        self.row = torch.arange(batches.rows.start, batches.rows.stop, device=device)
        self.meter = Meter(torch.zeros(len(Meter.FIELDS), dtype=torch.float64, device=device))
        self.block: Block | None = None
        self._left = 0  # steps left in the block
        self._under_way: deque[torch.cuda.Event] = deque()  # ends of steps that a GPU was asked for
        self._graph: torch.cuda.CUDAGraph | None = None

    def _compile(self) -> None:
        o = self.objective
        if self.runtime.compiled:  # no more than eight versions of a function, says torch
            torch.compiler.reset()

        def compiled(work: Callable[..., Any]) -> Callable[..., Any]:
            if not self.runtime.compiled:
                return work
            backend = compiler_in_parts(o) if self.runtime.world > 1 else "inductor"
            return torch.compile(work, fullgraph=True, dynamic=False, backend=backend)

        self.forward = compiled(o)
        if isinstance(o, WithGenerator) and o.generator_is_first:
            self.parts = compiled(o.generate_alone), compiled(o.learn)
        if self.runtime.world == 1:  # the some seventy small operations around the networks
            self.read, self.note = compiled(Block.batch), compiled(Meter.add_losses)
            self.close = compiled(close_step)
            self.optimizer.judge = compiled(self.optimizer.judge_norm)
            if by_gram(self.runtime.device):  # one pass over long vectors instead of four
                self.optimizer.momentum = compiled(self.optimizer.nesterov)

    # ------------------------------------------------------------------ the step

    def train_step(self) -> None:
        """One optimizer step; every number it needs is already on the device."""
        assert self.block is not None
        alone = len(self.micro_batches) == 1  # else each would be compiled anew
        for i, rows in enumerate(self.micro_batches):
            read = self.read if alone else Block.batch
            batch = read(self.block, self.slot, rows, self.config)
            if self.config.objective.disc_start_percent:
                share = self.shares.index_select(0, self.slot.view(1))[0]
                batch = batch._replace(disc_share=share)
                self.optimizer.good_steps *= share >= 1  # norms grow with λ: that is no spike
            rng = StepRng(self.seed, self.counter, self.row[rows])
            earlier = None
            if self.parts is None:
                losses = self.forward(batch, rng)
            else:  # what the generator's gradient needs is gone before the discriminator begins
                generate, learn = self.parts
                k, mlm, correct = generate(batch, rng)
                earlier = torch.autograd.grad(
                    self.config.objective.gen_weight * mlm,
                    self.optimizer.parameters,
                    allow_unused=True,
                )
                losses = learn(k, mlm.detach(), correct, batch, rng)
            if last := i == len(self.micro_batches) - 1:
                self.optimizer.expect(first=i == 0, earlier=earlier)
            grads = torch.autograd.grad(
                losses.total,
                self.optimizer.parameters,
                allow_unused=bool(self.idle or earlier),
                materialize_grads=bool(self.idle),
            )
            self.note(self.meter, losses)
            if last:  # of all processes: losses are shares of the global mean, so they add up
                self.optimizer.finish(grads)
            else:
                self.optimizer.accumulate(added(earlier, grads), first=i == 0)
        rate = self.rates.index_select(0, self.slot.view(1))[0]
        norm = self.optimizer.step(rate, self.counter - self.first_step)
        self.close(self.meter, self.block, norm, self.slot, self.counter, self.config)

    # ------------------------------------------------------------------ around it

    @property
    def needs_block(self) -> bool:
        return self._left == 0

    @property
    def may_stop(self) -> bool:
        """Whether all processes are at the same place and can agree on stopping."""
        return self.runtime.world == 1 or self.needs_block

    @property
    def at_once(self) -> int:
        """The most sequences of this process that go through the model together."""
        return self.micro_batches[0].stop

    def split(self, size: int) -> None:
        """Send so many sequences of this process through the model at once."""
        ends = range(size, self.rows + size, size)
        self.micro_batches = [slice(end - size, min(end, self.rows)) for end in ends]

    def load_block(self, step: int, rates: list[float], shares: list[float] | None = None) -> None:
        """Bring the batches, learning rates and shares of λ of the next steps to the device.

        Asked for while a GPU works on the block before, so that it never waits.
        """
        block, device = self.batches.block(step, self.block_steps), self.runtime.device
        if self.block is None:
            self.block = block
        else:  # a recorded graph reads these addresses
            for old, new in zip(self.block, block, strict=True):
                old.copy_(new)
        self.rates.copy_(sent(torch.tensor(rates), device))
        if shares is not None:
            self.shares.copy_(sent(torch.tensor(shares), device))
        self.slot.zero_()
        self._left = self.block_steps

    def step(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self.train_step()
        self._left -= 1
        if self.runtime.device.type == "cuda":
            self._keep_pace()

    def _keep_pace(self) -> None:
        """Wait until few steps are under way: the clock that is read, and a signal that is heard,
        are so many steps ahead of the device."""
        end = torch.cuda.Event(blocking=True)  # a core that waits is free for others
        end.record()
        self._under_way.append(end)
        if len(self._under_way) > steps_under_way(self.rows * self.config.data.sequence_length):
            self._under_way.popleft().synchronize()

    def second_stage(self) -> Trainer:
        """Half-way of two_stage: the generator is frozen, the discriminator starts at its weights.

        Other parameters move from here on, so the optimizer is a new one.
        """
        weights = {name: t.clone() for name, t in self.optimizer.state()["model"].items()}
        if self.config.objective.stage_two == "copy":
            for name in [name for name in weights if name.startswith("discriminator.")]:
                weights[name] = weights[name.replace("discriminator.", "generator.", 1)]
        self.objective.stage = "discriminator"
        for hook in self.optimizer.hooks:
            hook.remove()
        second = Trainer(self.objective, self.batches, self.config, self.runtime)
        second.optimizer.load({"model": weights})
        second.counter.copy_(self.counter)
        second.meter.sums.copy_(self.meter.sums)
        for name, counter in second.optimizer.counters().items():
            if not name.startswith("good"):  # norms of another loss judge none of these
                counter.copy_(self.optimizer.counters()[name])
        return second

    def record(self) -> None:
        """Compile the step and record it as a CUDA graph; training state stays as it was."""
        if not (self.runtime.compiled or self.runtime.cuda_graph):
            return
        with self._without_effect():
            if self.runtime.cuda_graph:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(3):
                        self.train_step()
                torch.cuda.current_stream().wait_stream(side)
                self._graph = torch.cuda.CUDAGraph()
                # Other threads may use the device meanwhile: NCCL's watchdog, a save.
                with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                    self.train_step()
            else:
                self.train_step()

    @contextlib.contextmanager
    def _without_effect(self) -> Generator[None]:
        """Steps inside leave the training as it was, whether or not they come to their end."""
        saved_step = int(self.counter)
        kept = [(t, t.clone()) for t in (self.meter.sums, *self.optimizer.counters().values())]
        self.load_block(saved_step, [0.0] * self.block_steps)
        self.optimizer.live.fill_(False)
        try:
            yield
        finally:
            self.optimizer.live.fill_(True)
            self.optimizer.forget()
            self.meter.forget()
            self.counter.fill_(saved_step)
            for tensor, value in kept:
                tensor.copy_(value)
            self._left = 0

    def fits(self, glance: Callable[[], None]) -> bool:
        """Whether every process has the memory for a step, beside it for what a save copies, and
        for `glance`, which is a part of an evaluation. Afterwards nothing of it is left."""
        ran_out = False
        try:
            # Nothing is sent: a process that runs out of memory must not keep the others waiting.
            with self.optimizer.exchange.alone():
                self._rehearse(glance)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            ran_out = True
        # Only here is the error gone, which held on to every tensor of the step.
        failed = self.runtime.any(ran_out)
        if failed:
            self._compile()  # what there is was for this size alone
        gc.collect()
        if self.runtime.device.type == "cuda":
            torch.cuda.empty_cache()
        return not failed

    def _rehearse(self, glance: Callable[[], None]) -> None:
        device, beside = self.runtime.device, list[Tensor]()

        def occupy(size: int) -> None:
            beside.append(torch.empty(size, dtype=torch.uint8, device=device))

        if on_gpu := device.type == "cuda":
            occupy(int(_SPARE * usable_memory(device)))  # for what is not seen here
            tensors = [t for group in self.state().values() for t in group.values()]
            copied = {t.untyped_storage() for t in tensors if t.is_cuda}
            if self.runtime.is_main:
                occupy(sum(storage.nbytes() for storage in copied))
            torch.cuda.reset_peak_memory_stats(device)
        with self._without_effect():
            self.train_step()
        if on_gpu and self.runtime.cuda_graph:  # a graph keeps for itself what its step needs
            occupy(torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device))
        with self._without_effect():  # the next block of batches comes beside all that
            pass
        glance()

    def collect(self) -> None:
        """Before `state` on the main process, on all of them: it gets what each has a share of."""
        self.optimizer.collect()
        for share in self.meter.shares:
            self.runtime.sum_(share)
            share.mul_(self.runtime.is_main)  # the others go on from nothing

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Tensors of a checkpoint, by file."""
        state = self.optimizer.state()
        moments = {f"{key}.{name}": t for key in ("m", "v") for name, t in state[key].items()}
        extra = {"meter": self.meter.sums, **self.optimizer.counters()}
        average = {"average": state["average"]} if "average" in state else {}
        return {"model": state["model"], "optimizer": {**moments, **extra}, **average}

    def load(self, tensors: dict[str, dict[str, Tensor]], step: int) -> None:
        optimizer = tensors["optimizer"]
        self.optimizer.load(
            {
                **{key: tensors[key] for key in ("model", "average") if key in tensors},
                **{
                    key: {n[2:]: t for n, t in optimizer.items() if n.startswith(f"{key}.")}
                    for key in ("m", "v")
                },
            }
        )
        meter = optimizer["meter"]  # written before "scored" was counted, it is shorter
        self.meter.sums[: len(meter)].copy_(meter)
        for share in self.meter.shares:
            share.mul_(self.runtime.is_main)
        for name, counter in self.optimizer.counters().items():
            if name in optimizer:  # early checkpoints have only bad_steps
                counter.copy_(optimizer[name])
        self.counter.fill_(step)


def _use_kernels(objective: Objective, config: PretrainConfig, runtime: Runtime) -> bool:
    """Let the blocks compute with their own kernels, where that is wanted and they fit."""
    reasons = [fused.unfit(config, runtime.dtype, padded=objective.padded)]
    if not kernels.available():
        reasons.append("anything without Triton")
    if runtime.device.type != "cuda":
        reasons.append("a device that is no GPU")
    elif torch.version.hip or torch.cuda.get_device_capability(runtime.device)[0] not in (9, 10):
        # Others, also newer ones for desktops, have too little memory on a multiprocessor. AMD's
        # count in their own way: an MI300 says 9 as well.
        reasons.append("GPUs other than H100, H200, B200 and their like")
    reason = next((r for r in reasons if r is not None), None)
    if config.run.kernels == "yes" and reason is not None:
        raise ElectraError(
            f"The blocks' own kernels do not do {reason}.",
            where="run.kernels",
            fix="use --run.kernels auto, which takes them where they fit",
        )
    wanted = config.run.kernels != "no" and reason is None
    in_order = torch.are_deterministic_algorithms_enabled()
    for part in objective.modules():
        if isinstance(part, EncoderBlock):
            part.fused = wanted
        elif isinstance(part, Embeddings):
            part.in_order = wanted and in_order
    g = config.generator
    is_plain = g.temperature == 1.0 and not g.temperature_steps and not g.disallow_correct
    joint = type(objective) is ReplacedTokenDetection and objective.stage == "joint"
    objective.fused = wanted and is_plain and joint
    return wanted


def steps_ahead(tokens: int) -> int:
    """How many steps of so many tokens come to the GPU at a time: 32, unless that takes memory
    (about 50 bytes a token for a moment)."""
    return max(1, min(32, 2**23 // tokens))


def steps_under_way(tokens: int) -> int:
    """How many steps of so many tokens a GPU is asked for before one has ended: on a fast one work
    for a tenth of a second, in which the host prepares a block, and always another step."""
    return max(2, min(64, 2**18 // tokens))


def _find_micro_batch(
    trainer: Trainer,
    out: Path,
    log: RunLog,
    step: int,
    glance: Callable[[], None],
    stop: StopRequest,
) -> None:
    """Split the batch into as few parts as fit in memory; the training stays as it was.

    Begins with what was found when the run was started, so that a continued run has the same sums;
    on another machine that may be too much.
    """
    runtime, stage, rows = trainer.runtime, trainer.objective.stage, trainer.rows
    before = (found_micro_batch(out, stage) if runtime.is_main else None) or 0
    before = int(runtime.agree(float(before)))
    first = min(before or rows, rows)
    for size in _halves(first):
        trainer.split(size)
        fits = not runtime.any(_hopeless(trainer, size))
        if fits:
            with _compiling(runtime, stop):
                fits = trainer.fits(glance)
        if fits:
            break
        log.note(f"{size:,} sequences at once do not fit in the memory")
        if runtime.any(stop()):
            raise Stopped
    else:
        raise ElectraError(
            "Not even one sequence at once fits in the device's memory.",
            where="data.micro_batch",
            fix="use a smaller model, shorter sequences or a device with more memory",
        )
    if size == first and before:
        return
    if runtime.is_main:
        keep_micro_batch(out, stage, size)
    log.note(f"micro-batch: {size:,} of {rows:,} sequences at once")
    log.write("event", step, {"micro_batch": size, "rows": rows})


def _hopeless(trainer: Trainer, size: int) -> bool:
    """Whether what the encoders keep of so many sequences, reckoned low, is more than there is;
    then nothing has to be compiled to see it."""
    device, joint = trainer.runtime.device, trainer.objective.stage == "joint"
    if device.type != "cuda" or not joint:  # one network alone needs less
        return False
    each = make_plan(trainer.config, vocab_size=8).kernel_bytes_per_sequence  # next to no logits
    return 0.7 * each * size > usable_memory(device)


def _compiling(runtime: Runtime, stop: StopRequest) -> contextlib.AbstractContextManager[None]:
    """For minutes, perhaps, in which nobody looks whether the run is to stop. Several processes
    have to come to the end of it: one that breaks off would be a lost one to the others."""
    return stop.breaking_off() if runtime.world == 1 else contextlib.nullcontext()


def _halves(size: int) -> Iterator[int]:
    """size, a half of it, a quarter, … down to 1, rounded up: n parts are never more than n."""
    parts = 1
    while True:
        yield -(-size // parts)
        if parts >= size:
            return
        parts *= 2


@contextlib.contextmanager
def _device_errors(trainer: Callable[[], Trainer | None]) -> Generator[None]:
    """A device without room becomes an error that names a smaller micro-batch; one that cannot do
    an operator in deterministic mode, an error that names it."""
    try:
        yield
    except RuntimeError as error:
        refuse_undetermined(error)
        if not is_out_of_memory(error):
            raise
        if (at_work := trainer()) is None:
            what = "The device has no memory for the model and its optimizer."
            fix = "use a smaller model or a device with more memory; several processes can share "
            fix += "Adam's moments (--run.sharding optimizer)"
            raise ElectraError(what, where="encoder", fix=fix) from error
        size = at_work.at_once
        fix = f"--data.micro-batch {size // 2} gives the same gradients in less memory"
        if size == 1:
            fix = "use a smaller model or shorter sequences: one sequence does not fit"
        elif at_work.config.data.micro_batch != "auto":
            fix += ", and --data.micro-batch auto finds what fits"
        what = f"The device has no memory left with {size} sequences at once."
        raise ElectraError(what, where="data.micro_batch", fix=fix) from error


def _long_warmup(config: PretrainConfig) -> str:
    return (
        f"the warm-up of {config.optim.warmup_steps:,} steps is longer than this run: the learning "
        "rate will neither reach its peak nor fall. Use --optim.warmup-percent 10."
    )


def _log_training(
    trainer: Trainer,
    log: RunLog,
    clock: Clock,
    step: int,
    progress: float,
    flops: float,
    peak: float,
) -> None:
    """Averages since the last call, to the metrics and the terminal; stops a run that is broken."""
    config = trainer.config
    for share in trainer.meter.shares:
        trainer.runtime.sum_(share)
    sums = dict(zip(Meter.FIELDS, trainer.meter.sums.tolist(), strict=True))
    bad, in_a_row = int(trainer.optimizer.bad_steps), int(trainer.optimizer.worst_in_a_row)
    trainer.optimizer.worst_in_a_row.zero_()
    trainer.meter.sums.zero_()
    steps = sums["steps"] or math.nan  # all steps bad: every average is not a number
    masked, tokens = max(1.0, sums["masked"]), max(1.0, sums["tokens"])
    o = config.objective
    loss = o.gen_weight * sums["mlm"] + o.disc_weight * sums["disc"]
    seconds, rate = clock.lap(tokens)
    values = {
        "loss": loss / steps,
        "mlm_loss": sums["mlm"] / steps,
        "mlm_accuracy": sums["mlm_correct"] / masked,
        "learning_rate": float(trainer.rates[max(0, int(trainer.slot) - 1)]),
        "grad_norm": sums["norm"] / steps,
        "bad_steps": bad,
        **({"spikes": int(trainer.optimizer.spikes)} if config.optim.skip_spikes else {}),
        "seconds": seconds,
        "tokens_per_second": rate,
        "mfu": rate * flops / peak,
    }
    if o.kind != "mlm":
        values["disc_loss"] = sums["disc"] / steps
        values["disc_accuracy"] = sums["disc_correct"] / max(1.0, sums["scored"])
        values["replaced_percent"] = 100 * sums["replaced"] / tokens
    log.write("train", step, values)
    left = seconds * (1 - progress) / progress if progress > 0 else 0.0
    line = f"step {step:,}  loss {values['loss']:.3f}  mlm {values['mlm_loss']:.3f}"
    if o.kind != "mlm":
        line += f"  disc {values['disc_loss']:.4f}  replaced {values['replaced_percent']:.1f} %"
    line += (
        f"  gen right {100 * values['mlm_accuracy']:.1f} %  lr {values['learning_rate']:.2e}"
        f"  {rate:,.0f} tokens/s  MFU {100 * values['mfu']:.1f} %  left {_duration(left)}"
    )
    log.progress(progress, line)
    kind = "not finite" + (" or far too large" if config.optim.skip_spikes else "")
    if in_a_row:
        text = f"steps with a gradient that is {kind} were left out: {bad} so far, {in_a_row} of "
        text += "them in a row"
        log.warn(text)
        log.write("event", step, {"warning": text})
    if in_a_row >= config.run.max_bad_steps:
        raise NumericError(
            f"{in_a_row} steps in a row gave a gradient that is {kind}; none of them reached "
            "the weights.",
            where=f"step {step}",
            fix="continue with a lower --optim.learning-rate, or --run.precision fp32",
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
