"""The numbers of a run for the trackers people have: TensorBoard, trackio, W&B, MLflow.

Comes in: what metrics.jsonl gets. Goes out: the same numbers in one tracker, below the run
directory unless the tracker's own environment variables name another place. Nothing leaves the
machine unless they ask for that. A thread does the writing, so that a tracker which fails, hangs
or is slow is a warning and costs the training nothing; metrics.jsonl holds everything anyway.
"""

from __future__ import annotations

import importlib
import os
import queue
import re
import threading
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from .config import flat
from .errors import ElectraError
from .files import json_bytes, read_json, write_atomic

Kind = Literal["tensorboard", "trackio", "wandb", "mlflow"]
Numbers = dict[str, float]  # by kind/name
Opened = tuple[Callable[[Numbers, int], object], Callable[[], object]]  # log, finish

_MODULES = {"tensorboard": "torch.utils.tensorboard.writer"}
_PATIENCE = 30.0  # seconds that a run waits for a tracker to open
_GRACE = 10.0  # seconds that it waits at its end, for the last lines


class Tracker:
    """One tracker of one run directory; the same directory continues the same run in it."""

    def __init__(
        self, kind: Kind, directory: Path, from_step: int, warn: Callable[[str], None]
    ) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("TRACKIO_DIR", str(directory.resolve() / "trackio"))
        try:
            module = importlib.import_module(_MODULES.get(kind, kind))
        except ImportError as error:
            what, fix = f"The package {kind} is not installed.", f"pip install 'electra[{kind}]'"
            raise ElectraError(what, where="run.tracker", fix=fix) from error
        self._kind, self._warn, self._is_lost = kind, warn, False
        self._lines: queue.Queue[tuple[Numbers, int] | None] = queue.Queue(100_000)
        self._is_open = threading.Event()
        begin = partial(_OPEN[kind], module, directory, from_step)
        self._thread = threading.Thread(target=self._work, args=(begin,), daemon=True)
        self._thread.start()
        self._is_open.wait(_PATIENCE)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Hand over one moment; numbers alone, whatever else it has."""
        numbers = {f"{kind}/{k}": float(v) for k, v in values.items() if isinstance(v, int | float)}
        if numbers and not self._is_lost:
            try:
                self._lines.put_nowait((numbers, step))
            except queue.Full:
                self._lose("it does not keep up")

    def close(self) -> None:
        if not self._is_lost:
            self._lines.put(None)
            self._thread.join(_GRACE)
            if self._thread.is_alive():
                self._lose("it does not finish")

    def _work(self, begin: Callable[[], Opened]) -> None:
        try:
            log, finish = begin()
            self._is_open.set()
            while (line := self._lines.get()) is not None:
                log(*line)
            finish()
        except BaseException as error:  # wandb and mlflow also end threads by SystemExit
            self._lose(f"{type(error).__name__}: {error}")
            self._is_open.set()

    def _lose(self, why: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._warn(f"{self._kind} gets no more lines: {_without_secrets(why)}")


def _without_secrets(text: str) -> str:
    """Messages of a server can repeat what it was sent."""
    for name, value in os.environ.items():
        if re.search("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL|URI|URL", name) and len(value) > 3:
            text = text.replace(value, f"${name}")
    return text[:500]


def _identity(directory: Path) -> str:
    """A name of this run that no other has, kept with it."""
    path = directory / "tracker.json"
    if not (identity := read_json(path).get("id")):
        identity = f"{directory.resolve().name}-{uuid.uuid4().hex[:8]}"
        write_atomic(path, json_bytes({"id": identity}))
    return str(identity)


def _settings(directory: Path) -> dict[str, Any]:
    return flat(read_json(directory / "config.json"))


def _tensorboard(module: Any, directory: Path, from_step: int) -> Opened:
    place = (directory / "tensorboard").resolve()  # its thread opens the file again and again
    if threading.excepthook is not _told_elsewhere:
        _OTHERS.append(threading.excepthook)
        threading.excepthook = _told_elsewhere
    writer = module.SummaryWriter(str(place), purge_step=from_step + 1)

    def log(numbers: Numbers, step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    def finish() -> None:
        writer.flush()  # raises what ended its thread; closing would not
        writer.close()

    return log, finish


_OTHERS: list[Callable[[threading.ExceptHookArgs], object]] = []  # what was there before


def _told_elsewhere(args: threading.ExceptHookArgs) -> None:
    """No traceback of TensorBoard's thread, which a full disk ends: whoever hands it the next line
    gets that error and tells it as a `Tracker` does."""
    if not type(args.thread).__module__.startswith("tensorboard."):
        _OTHERS[-1](args)


def _trackio(module: Any, directory: Path, _: int) -> Opened:
    run = module.init(
        project=os.environ.get("TRACKIO_PROJECT", "electra"),
        name=_identity(directory),
        config=_settings(directory),
        resume="allow",
        embed=False,
        **dict.fromkeys(("auto_log_cpu", "auto_log_gpu"), False),
    )
    return run.log, run.finish


def _wandb(module: Any, directory: Path, _: int) -> Opened:
    # Of the machine and its user it learns nothing.
    on = dict.fromkeys(("disable_git", "silent", "x_disable_meta", "x_disable_stats"), True)
    off = dict.fromkeys(("save_code", "x_save_requirements"), False)
    run = module.init(
        project=os.environ.get("WANDB_PROJECT", "electra"),
        id=_identity(directory),
        resume="allow",
        dir=os.environ.get("WANDB_DIR", directory),
        mode=os.environ.get("WANDB_MODE", "offline"),
        config=_settings(directory),
        settings=module.Settings(console="off", **on, **off),
    )
    return run.log, run.finish


def _mlflow(module: Any, directory: Path, _: int) -> Opened:
    place = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{directory.resolve()}/mlflow.db")
    client, identity = module.MlflowClient(tracking_uri=place), _identity(directory)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "electra")
    known = client.get_experiment_by_name(name)
    experiment = known.experiment_id if known else client.create_experiment(name)
    if found := client.search_runs([experiment], f"tags.electra = '{identity}'"):
        run = found[0].info.run_id
        client.update_run(run, status="RUNNING")
    else:
        tags = {"electra": identity}
        run = client.create_run(experiment, tags=tags, run_name=identity).info.run_id
        for key, value in _settings(directory).items():
            client.log_param(run, key, value)

    def log(numbers: Numbers, step: int) -> None:
        client.log_batch(run, [module.entities.Metric(n, v, 0, step) for n, v in numbers.items()])

    return log, lambda: client.set_terminated(run)


_OPEN: dict[str, Callable[[Any, Path, int], Opened]] = {
    "tensorboard": _tensorboard,
    "trackio": _trackio,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
assert set(_OPEN) == set(get_args(Kind))
