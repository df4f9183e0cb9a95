"""When memory runs out: the largest micro-batch that fits, and errors that name a smaller one.

A micro-batch splits a process's share of the batch into parts that go through the networks one
after another. Gradients add up, so training stays what it was; only memory and speed change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from .errors import ElectraError, Stopped, StopRequest
from .rundir import found_micro_batch, keep_micro_batch
from .runlog import RunLog
from .runtime import Runtime, is_out_of_memory, refuse_undetermined, usable_memory
from .studies.plan import make_plan
from .trainer import Trainer


def find_micro_batch(
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
            with compiling(runtime, stop):
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
    """Whether even a low estimate of the activations exceeds the memory: then nothing has to be
    compiled to find out."""
    device, joint = trainer.runtime.device, trainer.objective.stage == "joint"
    if device.type != "cuda" or not joint:  # one network alone needs less
        return False
    each = make_plan(trainer.config, vocab_size=8).kernel_bytes_per_sequence  # next to no logits
    return 0.7 * each * size > usable_memory(device)


def compiling(runtime: Runtime, stop: StopRequest) -> contextlib.AbstractContextManager[None]:
    """Lets a signal abort a compilation, which may take minutes, in a single process. Of several
    none may: the others would take it for lost."""
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
def device_errors(trainer: Callable[[], Trainer | None]) -> Generator[None]:
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
            fix = "use a smaller model or a device with more memory, or more processes with "
            fix += "--run.sharding weights"
            raise ElectraError(what, where="encoder", fix=fix) from error
        size = at_work.at_once
        fix = f"--data.micro-batch {size // 2} gives the same gradients in less memory"
        if size == 1:
            fix = "use a smaller model or shorter sequences: one sequence does not fit"
        elif at_work.config.data.micro_batch != "auto" and not at_work.in_shares:
            fix += ", and --data.micro-batch auto finds what fits"
        what = f"The device has no memory left with {size} sequences at once."
        raise ElectraError(what, where="data.micro_batch", fix=fix) from error
