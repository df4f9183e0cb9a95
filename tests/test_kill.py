"""Real kills of real processes: whatever happens, the same command ends with the same bytes."""

from __future__ import annotations

import contextlib
import hashlib
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from electra.corpus import Corpus
from electra.runlog import read_metrics

ROOT = Path(__file__).parents[1]
STEPS, KILLS = 130, 20
TIMING = {"seconds", "tokens_per_second", "mfu"}
FAULTS = [
    "after_mkdir",
    "after_model",
    "after_optimizer",
    "before_manifest",
    "before_rename",
    "after_rename",
    "before_prune",
    "during_prune",
]


def command(corpus: Corpus, out: Path) -> list[str]:
    settings = {
        "encoder.layers": 1,
        "encoder.hidden-size": 20,
        "encoder.ffn-size": 28,
        "encoder.attention-heads": 2,
        "encoder.embedding-size": 14,
        "encoder.max-positions": 29,
        "encoder.dropout": 0.1,
        "generator.width": 0.5,
        "generator.depth": 1.0,
        "optim.warmup-percent": 10,
        "data.sequence-length": 23,
        "data.batch-size": 8,
        "run.train-steps": STEPS,
        "run.threads": 1,
        "run.device": "cpu",
        "run.log-every": 1,
        "run.eval-every": 20,
        "run.eval-batches": 1,
        "run.save-every": 3,
    }
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    head = [sys.executable, "-m", "electra", "pretrain", "small", "--quiet"]
    return [*head, "--corpus", str(corpus.path), "--out", str(out), *flags]


def start(corpus: Corpus, out: Path, fault: str = "") -> subprocess.Popen[bytes]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if fault:
        environment["ELECTRA_FAULT"] = fault
    return subprocess.Popen(command(corpus, out), env=environment, cwd=out.parent)


def lines(out: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def wait_for_lines(process: subprocess.Popen[bytes], out: Path, more: int) -> None:
    """Until the running process has written `more` lines of metrics, or has ended."""
    before = lines(out)
    lowest = before  # a resumed run first cuts off what it will do again
    while process.poll() is None:
        now = lines(out)
        lowest = min(lowest, now)
        if now >= lowest + more and now != before:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.002)


def outcome(out: Path) -> tuple[str, list[dict[str, Any]]]:
    model = out / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors"
    logged = [{k: v for k, v in m.items() if k not in TIMING} for m in read_metrics(out)]
    return hashlib.sha256(model.read_bytes()).hexdigest(), logged


@pytest.fixture(scope="module")
def uninterrupted(
    corpus: Corpus, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("whole") / "run"
    assert start(corpus, out).wait(120) == 0
    result = outcome(out)
    assert [m["step"] for m in result[1] if m["kind"] == "train"] == list(range(1, STEPS + 1))
    return result


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(
    corpus: Corpus, tmp_path: Path, uninterrupted: tuple[str, list[dict[str, Any]]]
) -> None:
    draw = random.Random(20)
    out = tmp_path / "run"
    killed_in_save = 0
    for kill in range(KILLS):
        if kill % 5 < 2:  # two in five inside a save, the second or third time it gets there
            fault = f"{FAULTS[killed_in_save % len(FAULTS)]}:{draw.randint(2, 3)}"
            process = start(corpus, out, fault)
            code = process.wait(120)
            killed_in_save += 1
        else:
            process = start(corpus, out)
            if kill % 5 == 4:  # some before there is anything to lose
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(draw.uniform(0.0, 2.0))
            else:
                wait_for_lines(process, out, draw.randint(1, 9))
            process.kill()
            code = process.wait(120)
        assert code == -signal.SIGKILL, f"kill {kill} came too late"
    assert killed_in_save >= KILLS / 4
    assert start(corpus, out).wait(120) == 0
    assert outcome(out) == uninterrupted
    assert not [p for p in out.rglob(".*") if p.name != ".lock"]
    assert not list(out.rglob("damaged-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_request_to_stop_saves_and_the_same_command_goes_on(
    corpus: Corpus,
    tmp_path: Path,
    uninterrupted: tuple[str, list[dict[str, Any]]],
    number: signal.Signals,
) -> None:
    out = tmp_path / "run"
    process = start(corpus, out)
    wait_for_lines(process, out, 11)
    process.send_signal(number)
    assert process.wait(60) == 75
    newest = max(int(p.name[5:]) for p in (out / "checkpoints").glob("step-*"))
    assert newest == read_metrics(out)[-1]["step"]  # not a step is lost
    assert start(corpus, out).wait(120) == 0
    assert outcome(out) == uninterrupted
