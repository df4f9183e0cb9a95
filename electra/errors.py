"""Errors a person can act on: what happened, where, and what to do.

Every command ends with one of the exit codes below. An `ElectraError` is printed as three short
lines without a traceback; anything else is a bug and keeps its traceback. Being asked to stop is no
error, but ends a command in the same way.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import signal
import threading
import time
from collections.abc import Generator, Iterable
from types import FrameType
from typing import Any

EXIT_OK = 0
EXIT_BUG = 1  # also: another process of the run was lost
EXIT_USER = 2  # wrong input, wrong setting, missing file
EXIT_CORRUPT = 3  # a corpus or checkpoint does not match its checksums
EXIT_NUMERIC = 4  # the run stopped itself after repeated non-finite steps
EXIT_STOPPED = 75  # stopped, with everything saved: the same command continues


class ElectraError(Exception):
    """What went wrong, where (file, line, byte or setting) and what to do about it."""

    exit_code = EXIT_USER

    def __init__(self, what: str, where: object = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.fix = what, str(where), fix

    def __str__(self) -> str:
        where = f"\n  where: {self.where}" if self.where else ""
        fix = f"\n  to do: {self.fix}" if self.fix else ""
        return self.what + where + fix


def nearest(name: str, known: Iterable[object]) -> str:
    """What to do about a name that is not among the known ones."""
    names = [str(each)[:99] for each in known]  # comparing takes the square of the length
    near = difflib.get_close_matches(name[:99], names, n=1, cutoff=0.4)
    return f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(names[:20])}"


class DiskFull(ElectraError):
    """There is no room for a file; what was complete before still is."""


class LostProcess(ElectraError):
    """Another process of the run failed or does not answer."""

    exit_code = EXIT_BUG


class LostWorker(ElectraError):
    """A worker process died; what was complete is kept, and the same command goes on."""

    exit_code = EXIT_STOPPED


class CorruptError(ElectraError):
    """Bytes on disk are not the bytes that were written."""

    exit_code = EXIT_CORRUPT


class NumericError(ElectraError):
    """Losses or gradients stayed non-finite; the weights were not touched."""

    exit_code = EXIT_NUMERIC


class Stopped(Exception):
    """Raised once all is saved after SIGTERM, SIGINT or SIGUSR1.

    broke_off: something is still at work that nobody waits for, such as a compiler.
    """

    exit_code = EXIT_STOPPED

    def __init__(self, *, broke_off: bool = False) -> None:
        super().__init__()
        self.broke_off = broke_off


class BrokenOff(BaseException):
    """Raised inside `StopRequest.breaking_off`; nothing on its way takes it for an error."""


class StopRequest:
    """Turns the first SIGTERM, SIGINT or SIGUSR1 into a flag; a second one ends at once.

    Under torchrun one request arrives as several signals: whoever stops a job signals all of its
    processes, torchrun passes its own signal on, and its end is a signal as well (`cli.main`). So
    there a second one counts only after `PATIENCE` seconds, in which the processes save.

    Signals come to the main thread alone, and what they do there is for the program to say that
    started another one: in another thread nothing is turned.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    PATIENCE = 20.0  # torchrun itself kills what has not ended after 30

    def __init__(self) -> None:
        self.requested = False
        self._patient_until = 0.0
        self._breaks_off = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self) -> bool:
        return self.requested

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.requested:
            if time.monotonic() < self._patient_until:
                return
            os._exit(128 + number)
        self.requested = True
        if "TORCHELASTIC_RUN_ID" in os.environ:
            self._patient_until = time.monotonic() + self.PATIENCE
        if self._breaks_off:
            raise BrokenOff

    @contextlib.contextmanager
    def breaking_off(self) -> Generator[None]:
        """The first signal inside breaks off what is under way there, by BrokenOff: for what takes
        long, cannot look at the flag and has nothing to save."""
        self._breaks_off = True
        try:
            if self.requested:  # just before
                raise BrokenOff
            yield
        finally:
            self._breaks_off = False
