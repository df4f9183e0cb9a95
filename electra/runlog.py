"""What a run tells: metrics.jsonl always, the terminal while it runs, a tracker (`trackers.py`).

One line of metrics.jsonl is one moment: {"kind": "train" | "eval" | "event", "step": …, values}.
Non-finite numbers are written as strings, never dropped. After a resume the lines of steps that
will be trained again are cut off, so the file reads like that of an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from .errors import DiskFull, ElectraError
from .files import reading, storage_errors, write_atomic
from .trackers import Kind, Tracker

Choice = Kind | Literal["auto", "none"]


class RunLog:
    """Metrics of one run directory; on all but the main process every method does nothing."""

    def __init__(
        self,
        directory: Path,
        *,
        active: bool,
        from_step: int,
        quiet: bool,
        patient: bool = False,
        tracker: Choice = "auto",
    ) -> None:
        """patient: lines for which the disk has no room wait in memory instead of failing.

        tracker: auto is TensorBoard where it is installed.
        """
        self.directory, self.active, self._patient = directory, active, patient
        self._waiting = b""
        self._progress: Progress | None = None
        self._last_line = -math.inf
        if not active:
            return
        # A notebook gets the plain lines as well, instead of a display of its own for each.
        self.console = Console(file=sys.stderr, highlight=False, quiet=quiet, force_jupyter=False)
        self.path = directory / "metrics.jsonl"
        kept = [m for m in read_metrics(directory) if m["step"] <= from_step]
        write_atomic(self.path, "".join(json.dumps(m) + "\n" for m in kept).encode())
        # Only now: a file that is refused leaves no thread behind.
        self._tracker = self._track(tracker, from_step)
        with storage_errors(self.path):
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        if self.console.is_terminal and not quiet:
            self._progress = Progress(
                BarColumn(bar_width=20),
                TextColumn("{task.percentage:>5.1f} %  {task.fields[line]}"),
                console=self.console,
            )
            self._task = self._progress.add_task("", total=1.0, line="compiling the step …")
            self._progress.start()

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Append one moment."""
        if not self.active:
            return
        line = {"kind": kind, "step": step, **in_json(values)}
        self._waiting += (json.dumps(line) + "\n").encode()
        try:
            self._write_waiting()
        except DiskFull:
            if not self._patient:
                raise
        if self._tracker is not None:
            self._tracker.write(kind, step, values)

    def _track(self, choice: Choice, from_step: int) -> Tracker | None:
        kind = "tensorboard" if choice == "auto" else choice
        try:
            return None if kind == "none" else Tracker(kind, self.directory, from_step, self.warn)
        except ElectraError:
            if choice != "auto":
                raise
            return None  # an optional extra; metrics.jsonl holds the same numbers

    def _write_waiting(self) -> None:
        with storage_errors(self.path):
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]

    def progress(self, share: float, line: str) -> None:
        """Show how far the run is; without a terminal at most one line in five seconds."""
        if not self.active:
            return
        if self._progress is not None:
            self._progress.update(self._task, completed=share, line=line)
        elif time.monotonic() - self._last_line > 5 or share >= 1:
            self._last_line = time.monotonic()
            self.console.print(f"{100 * share:5.1f} %  {line}", soft_wrap=True)

    def note(self, text: str) -> None:
        """A sentence for the person watching."""
        if self.active:
            self.console.print(text, soft_wrap=True, markup=False)

    def warn(self, text: str) -> None:
        """A warning for the person watching."""
        if self.active:
            self.console.print(f"[bold yellow]warning[/]: {escape(text)}", soft_wrap=True)

    def close(self) -> None:
        if not self.active:
            return
        if self._progress is not None:
            self._progress.stop()
        try:
            self._write_waiting()
        finally:
            self._file.close()
            if self._tracker is not None:
                self._tracker.close()


def in_json(values: dict[str, Any]) -> dict[str, Any]:
    """With numbers that are not finite as strings: JSON has no such numbers."""
    return {
        k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()
    }


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """All complete lines of a run's metrics, none if it has not begun; a last line that a crash cut
    off is left out."""
    metrics: list[dict[str, Any]] = []
    path = directory / "metrics.jsonl"
    if not path.is_file():
        return metrics
    with reading(path, "restore it from a backup, or delete it: the run goes on without its past"):
        *lines, last = path.read_text(encoding="utf-8").split("\n")
        with contextlib.suppress(ValueError):  # cut off, or empty
            json.loads(last)
            lines.append(last)
        for line in filter(None, lines):
            one = json.loads(line)
            metrics.append({**one, "kind": str(one["kind"]), "step": int(one["step"])})
    return metrics
