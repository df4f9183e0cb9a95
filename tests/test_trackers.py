"""Trackers: the numbers of metrics.jsonl in the real packages, on this machine, at no risk."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from electra import trackers
from electra.config import PretrainConfig, RunConfig, to_dict
from electra.data.corpus import Corpus
from electra.errors import CorruptError, ElectraError
from electra.pretrain import pretrain
from electra.runlog import read_metrics
from electra.trackers import Kind, Tracker

Seen = dict[tuple[str, int], float]
SECRETS = {
    "WANDB_API_KEY": "f" * 33 + "planted",
    "HF_TOKEN": "hf_planted0secret0of0nobody",
    "MLFLOW_TRACKING_PASSWORD": "planted-password",
    "AWS_SECRET_ACCESS_KEY": "planted-aws-secret",
    "MY_OWN": "planted-own-value",
}

WRITE = """
import sys
from pathlib import Path
from electra.trackers import Tracker

def warn(text):
    print("warned:", text)

kind, directory, first, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
tracker = Tracker(kind, directory, first, warn)
for step in range(first, last):
    tracker.write("train", step, {"loss": 1 / (step + 1), "grad_norm": float("nan"), "why": "text"})
tracker.write("eval", last - 1, {"auc": last / 100})
tracker.write("event", last - 1, {"changed": "only words"})
tracker.close()
print("closed")
"""


@cache
def without_network() -> list[str]:
    """A command that runs another where there is no network, if this system allows it."""
    prefix = [shutil.which("unshare") or "", "--map-root-user", "--net"]
    allowed = prefix[0] and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    return prefix if allowed else []


def in_tensorboard(directory: Path) -> Seen:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(directory / "tensorboard"))
    board.Reload()
    names = board.Tags()["scalars"]
    return {(name, e.step): e.value for name in names for e in board.Scalars(name)}


def in_trackio(directory: Path) -> Seen:
    with sqlite3.connect(directory / "trackio" / "electra.db") as base:
        rows = base.execute("select run_name, step, metrics from metrics").fetchall()
        assert base.execute("select count(distinct run_id) from metrics").fetchone() == (1,)
    assert {name for name, *_ in rows} == {identity(directory)}
    return {
        (name, step): float(value)
        for _, step, text in rows
        for name, value in json.loads(text).items()
        if "/" in name
    }


def in_wandb(directory: Path) -> Seen:
    """Its files are logs of LevelDB: seven bytes, then records, all within one block here."""
    from wandb.proto import wandb_internal_pb2

    seen: Seen = {}
    for file in sorted(directory.glob("wandb/offline-run-*/run-*.wandb")):
        assert file.name == f"run-{identity(directory)}.wandb"
        data, position = file.read_bytes(), 7
        while position < len(data):
            size, kind = (
                int.from_bytes(data[position + 4 : position + 6], "little"),
                data[position + 6],
            )
            assert kind == 1
            record = wandb_internal_pb2.Record.FromString(data[position + 7 :][:size])
            position += 7 + size
            items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
            for name, value in items.items():
                if not name.startswith("_"):
                    seen[name, int(items["_step"])] = float(json.loads(value))
    return seen


def in_mlflow(directory: Path) -> Seen:
    with sqlite3.connect(directory / "mlflow.db") as base:
        rows = base.execute("select key, value, step, is_nan from metrics").fetchall()
        runs = base.execute("select name, status from runs").fetchall()
        settings = dict(base.execute("select key, value from params").fetchall())
    assert runs == [(identity(directory), "FINISHED")]
    assert settings == {"a.b": "1"}
    return {(name, step): math.nan if is_nan else value for name, value, step, is_nan in rows}


READ = {  # TensorBoard is looked at in a run below
    "trackio": in_trackio,
    "wandb": in_wandb,
    "mlflow": in_mlflow,
}
assert {*READ, "tensorboard"} == set(get_args(Kind))


def identity(directory: Path) -> str:
    return json.loads((directory / "tracker.json").read_text())["id"]


@pytest.mark.parametrize("kind", READ)
def test_a_tracker_gets_the_numbers_and_continues_its_run(kind: Kind, tmp_path: Path) -> None:
    for package in {"mlflow": ("mlflow", "sqlalchemy")}.get(kind, (kind,)):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"extra {kind} is not installed")
    directory, home = tmp_path / "run", tmp_path / "home"
    directory.mkdir()
    home.mkdir()
    (directory / "config.json").write_text('{"a": {"b": 1}}')
    ours = {
        n: v for n, v in os.environ.items() if n.split("_")[0] not in ("WANDB", "MLFLOW", "TRACKIO")
    }
    environment = {**ours, **SECRETS, "HOME": str(home), "OMP_NUM_THREADS": "1"}
    for first, last in ((1, 4), (4, 6)):
        command = [sys.executable, "-c", WRITE, kind, str(directory), str(first), str(last)]
        done = subprocess.run(
            [*without_network(), *command],
            capture_output=True,
            text=True,
            timeout=300,
            env=environment,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert "closed" in done.stdout
        assert "warned" not in done.stdout
    seen = READ[kind](directory)
    expected = {("train/loss", step): 1 / (step + 1) for step in range(1, 6)}
    expected |= {("train/grad_norm", step): math.nan for step in range(1, 6)}
    expected |= {("eval/auc", 3): 0.04, ("eval/auc", 5): 0.06}
    assert seen == pytest.approx(expected, nan_ok=True, rel=1e-6)
    for file in (file for file in tmp_path.rglob("*") if file.is_file()):
        data = file.read_bytes()
        for name, value in SECRETS.items():
            assert value.encode() not in data, f"{name} in {file}"
    # Below the run directory, and nowhere else but for caches of the packages themselves.
    assert {p.name for p in tmp_path.iterdir()} == {"run", "home"}


# ---------------------------------------------------------------- in a run


def test_a_run_has_its_numbers_in_the_tracker(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    run = replace(micro.run, train_steps=6, eval_every=3, save_every=3, tracker="tensorboard")
    pretrain(replace(micro, run=run), corpus, tmp_path / "run", quiet=True)
    longer = replace(run, train_steps=8, tracker="auto")  # may change in a continued run
    pretrain(replace(micro, run=longer), corpus, tmp_path / "run", quiet=True)
    expected = {
        (f"{m['kind']}/{name}", m["step"]): value
        for m in read_metrics(tmp_path / "run")
        for name, value in m.items()
        if name not in ("kind", "step") and isinstance(value, int | float)
    }
    assert len({step for _, step in expected}) == 8
    assert in_tensorboard(tmp_path / "run") == pytest.approx(expected, rel=1e-6)


def weights_after(micro: PretrainConfig, corpus: Corpus, out: Path, **run: Any) -> bytes:
    settings: RunConfig = replace(micro.run, train_steps=4, save_every=4, eval_every=9, **run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("electra.studies.figures.draw_curves", lambda _: None)
        pretrain(replace(micro, run=settings), corpus, out, quiet=False)
    return (out / "checkpoints" / "step-00000004" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("fault", ["at the start", "at a line", "at the end"])
def test_a_tracker_that_fails_is_one_warning(
    fault: str,
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "planted-value")

    def fail(*_: object) -> None:
        raise OSError("the server says no to planted-value")

    def opened(*_: object) -> Any:
        if fault == "at the start":
            fail()
        ends = fail if fault == "at the end" else lambda: None
        return (fail if fault == "at a line" else lambda *_: None), ends

    monkeypatch.setitem(trackers._OPEN, "tensorboard", opened)
    weights = weights_after(micro, corpus, tmp_path / "a", tracker="tensorboard")
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.count("tensorboard gets no more lines: OSError: the server says no") == 1
    assert "planted-value" not in shown
    assert weights == weights_after(micro, corpus, tmp_path / "b", tracker="none")
    assert [m["step"] for m in read_metrics(tmp_path / "a") if m["kind"] == "train"] == [1, 2, 3, 4]


@pytest.mark.parametrize("hangs", ["at the start", "at a line"])
def test_a_tracker_that_hangs_holds_nothing_up(
    hangs: str,
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for_ever = threading.Event()
    monkeypatch.setattr(trackers, "_PATIENCE", 0.1)
    monkeypatch.setattr(trackers, "_GRACE", 0.1)

    def wait(*_: object) -> None:
        for_ever.wait()

    def opened(*_: object) -> Any:
        if hangs == "at the start":
            wait()
        return wait, lambda: None

    monkeypatch.setitem(trackers._OPEN, "tensorboard", opened)
    weights_after(micro, corpus, tmp_path / "a", tracker="tensorboard")
    shown = " ".join(capsys.readouterr().err.split())
    for_ever.set()
    assert shown.count("tensorboard gets no more lines: it does not finish") == 1
    assert len(read_metrics(tmp_path / "a")) >= 4


def test_a_tracker_that_does_not_keep_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for_ever, warnings = threading.Event(), list[str]()
    opened = (lambda *_: for_ever.wait(), lambda: None)
    monkeypatch.setitem(trackers._OPEN, "tensorboard", lambda *_: opened)
    tracker = Tracker("tensorboard", tmp_path, 0, warnings.append)
    begin = time.monotonic()
    for step in range(100_100):
        tracker.write("train", step, {"loss": 1.0})
    tracker.close()
    assert time.monotonic() - begin < 30
    for_ever.set()
    assert warnings == ["tensorboard gets no more lines: it does not keep up"]


def test_a_run_that_cannot_be_continued_leaves_no_thread(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path
) -> None:
    """It would write its last lines minutes later, wherever the process is by then."""
    pytest.importorskip("tensorboard")
    weights_after(micro, corpus, tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    before = set(threading.enumerate())
    with pytest.raises(CorruptError):
        pretrain(replace(micro, run=replace(micro.run, train_steps=6)), corpus, tmp_path)
    assert set(threading.enumerate()) <= before


def test_a_tracker_that_is_not_installed(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(ElectraError, match="wandb is not installed") as caught:
        weights_after(micro, corpus, tmp_path / "a", tracker="wandb")
    assert "electra[wandb]" in caught.value.fix
    assert weights_after(micro, corpus, tmp_path / "b")  # auto takes what is there
    assert not (tmp_path / "b" / "tensorboard").exists()
    assert to_dict(micro.run)["tracker"] == "auto"


def test_tensorboard_stays_with_its_run_when_the_working_directory_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    warnings, here, there = list[str](), tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    tracker = Tracker("tensorboard", Path("run"), 0, warnings.append)
    monkeypatch.chdir(there)
    tracker.write("train", 1, {"loss": 1.0})
    tracker.close()
    assert not warnings
    assert not list(there.iterdir())
    [events] = (here / "run" / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()
