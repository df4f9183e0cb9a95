"""Real kills of real processes: whatever happens, the same command ends with the same bytes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_corpus import content, make_text

from electra import cli
from electra.data.corpus import Corpus, prepare
from electra.data.tokenizer import Tokenizer
from electra.errors import ElectraError
from electra.files import exclusive
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


def command(corpus: Corpus, out: Path, steps: int = STEPS) -> list[str]:
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
        "run.train-steps": steps,
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


def wait_for_lines(
    process: subprocess.Popen[bytes], out: Path, more: int, seconds: float = math.inf
) -> None:
    """Until the running process has written `more` lines of metrics, or has ended, or so long."""
    end = time.monotonic() + seconds
    before = lines(out)
    lowest = before  # a resumed run first cuts off what it will do again
    while process.poll() is None and time.monotonic() < end:
        now = lines(out)
        lowest = min(lowest, now)
        if now >= lowest + more and now != before:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.002)


def outcome(out: Path, steps: int = STEPS) -> tuple[str, list[dict[str, Any]]]:
    model = out / "checkpoints" / f"step-{steps:08d}" / "model.safetensors"
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
            if kill % 5 == 4:  # some before there is anything to lose; a fast one is not let go on
                wait_for_lines(process, out, 9, draw.uniform(0.0, 2.0))
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


def test_a_second_run_on_the_same_directory_is_refused_and_the_first_unharmed(
    corpus: Corpus,
    tmp_path: Path,
    uninterrupted: tuple[str, list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    first = start(corpus, out)
    for _ in range(3):
        wait_for_lines(first, out, 3)
        began = time.process_time()  # other work on the machine stretches the clock
        code = cli.run(command(corpus, out)[3:])
        assert time.process_time() - began < 1
        assert first.poll() is None
        assert code == 2
        assert "Another process" in capsys.readouterr().err
    assert first.wait(120) == 0
    assert outcome(out) == uninterrupted


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1, signal.SIGTERM])
def test_a_run_saves_and_lets_go_when_its_torchrun_is_killed(
    corpus: Corpus, tmp_path: Path, number: signal.Signals
) -> None:
    """Any parent will do for that, and a small one is there sooner. A signal that can be caught
    goes to the whole job: the run hears it, and then of its parent's end."""
    out = tmp_path / "run"
    start_and_wait = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    parent = subprocess.Popen(
        [sys.executable, "-c", start_and_wait, *command(corpus, out, steps=20_000)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TORCHELASTIC_RUN_ID": "1"},
        start_new_session=True,
    )
    wait_for_lines(parent, out, 5)
    assert parent.poll() is None
    if number == signal.SIGKILL:
        parent.kill()
    else:
        os.killpg(parent.pid, number)
    assert parent.wait(60) == -number
    end = time.monotonic() + 60
    while True:
        try:
            with exclusive(out):
                break
        except ElectraError:  # the run still holds its directory
            assert time.monotonic() < end
            time.sleep(0.01)
    newest = max(int(p.name[5:]) for p in (out / "checkpoints").glob("step-*"))
    assert newest == read_metrics(out)[-1]["step"]


# ---------------------------------------------------------------------- signals at any moment

# One process imports everything and forks the rest: a start costs seconds, a fork nothing. A child
# gets its signal from itself at a named place, or from outside after some share of a whole run.
SIGNALLED = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
import torch.utils.tensorboard
from electra import checkpoint, cli, pretrain
from electra.data import corpus

def at(module, name, number, times):
    function = getattr(module, name)
    def signalled(*args, **kwargs):
        at.left -= 1
        if at.left == 0:
            (work / f"{i}.at").write_text(str(time.monotonic()))
            os.kill(os.getpid(), number)
        return function(*args, **kwargs)
    at.left = times
    setattr(module, name, signalled)

PLACES = {
    "corpus": (corpus.Corpus, "open"),
    "record": (pretrain.Trainer, "record"),
    "run directory": (pretrain, "enter_run"),
    "evaluation": (pretrain, "evaluate"),
    "first step": (pretrain.Trainer, "train_step"),
    "save": (checkpoint, "save_file"),
    "prune": (checkpoint.Saver, "_prune"),
    "log": (pretrain.Run, "log_training"),
}
work, argv, moments, draw = Path(sys.argv[1]), sys.argv[3:], int(sys.argv[2]), random.Random(5)
i, stopped = -1, 0
while stopped < moments:
    i += 1
    number = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)[i % 3]
    place = [*PLACES, None, None][i % (len(PLACES) + 2)]
    forked, child = time.monotonic(), os.fork()
    if child == 0:
        os.dup2(os.open(work / f"{i}.log", os.O_CREAT | os.O_WRONLY), 2)
        if place:
            at(*PLACES[place], number, draw.randint(1, 2) if place in ("evaluation", "save") else 1)
        cli.main(argv)
    if not place:
        time.sleep(draw.uniform(0, whole))
        os.kill(child, number)
    began = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ended, told = time.monotonic(), work / f"{i}.at"
    seconds = ended - (float(told.read_text()) if told.exists() else began)
    stopped += code == 75
    if i == 0:
        whole = 2 * (ended - forked)  # from the start until well into the training
    run = Path(argv[argv.index("--out") + 1])
    steps = [int(p.name[5:]) for p in (run / "checkpoints").glob("step-*")]
    log = run / "metrics.jsonl"
    lines = map(json.loads, log.read_text().splitlines() if log.exists() else [])
    logged = max((m["step"] for m in lines if m["kind"] == "train"), default=0)
    print(json.dumps({"place": place, "code": code, "seconds": seconds, "logged": logged,
        "saved": max(steps, default=0)}), flush=True)
    if code == 0:
        os.rename(run, work / f"run-{i}")
"""


def signalled_runs(corpus: Corpus, work: Path, moments: int) -> list[dict[str, Any]]:
    argv = command(corpus, work / "run")[3:]
    (work / "logs").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, str(work / "logs"), str(moments), *argv],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("moments", [10, pytest.param(50, marks=pytest.mark.long)])
def test_a_signal_at_any_moment_costs_no_step(
    corpus: Corpus,
    tmp_path: Path,
    uninterrupted: tuple[str, list[dict[str, Any]]],
    moments: int,
    request: pytest.FixtureRequest,
) -> None:
    runs = signalled_runs(corpus, tmp_path, moments)
    stopped = [run for run in runs if run["code"] == 75]
    slowest = max(run["seconds"] for run in stopped)
    request.node.user_properties.append(("seconds from signal to end", f"{slowest:.2f}"))
    lost = sum(run["logged"] - run["saved"] for run in stopped)
    told = f"{len(stopped)} of {moments} ended with code 75, {lost} steps lost"
    request.node.user_properties.append(("counted", told))
    assert len(stopped) == moments >= 0.7 * len(runs)  # the others were complete before it came
    for i, run in enumerate(runs):
        assert run["code"] == 75 or (run["code"], run["saved"]) == (0, STEPS), (i, run)
        assert run["saved"] == run["logged"], (i, run)
        was_done = run["place"] and run["code"] == 0  # perhaps it never came there
        assert was_done or run["seconds"] < 10, (i, run)  # torchrun would wait for 30
    assert start(corpus, tmp_path / "run").wait(120) == 0
    for run in (tmp_path / "run", *(tmp_path / "logs").glob("run-*")):
        assert outcome(run) == uninterrupted


# Each child is the leader of a group, as a shell makes one of a command, and gets its signal when
# the compiler of its first step has started a compiler of C++.
COMPILING = """
import json, os, signal, sys, time
from pathlib import Path
import psutil, torch
torch.set_num_threads(1)
import torch.utils.tensorboard
from electra import cli, pretrain

def is_compiler(process):
    try:
        return process.name() == "cc1plus"
    except psutil.NoSuchProcess:  # it has ended since the list was made
        return False

work, argv = Path(sys.argv[1]), sys.argv[2:]
for way in ("one", "group", "two"):
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(work / f"{way}.log", os.O_CREAT | os.O_WRONLY), 2)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work / way)  # where nothing is compiled yet
        cli.main([*argv, "--out", str(work / f"run-{way}")])
    below, compilers = psutil.Process(child), []
    while not compilers and below.status() != psutil.STATUS_ZOMBIE:
        compilers = [p for p in below.children(recursive=True) if is_compiler(p)]
        time.sleep(0.05)
    began = time.monotonic()
    if way == "group":
        os.killpg(child, signal.SIGINT)
    elif way == "two":  # both are there before it can react to the first
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGUSR1, signal.SIGCONT):
            os.kill(child, number)
    else:
        os.kill(child, signal.SIGTERM)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    told = {"way": way, "code": code, "seconds": time.monotonic() - began}
    psutil.wait_procs(compilers, timeout=60)  # they belong to nobody now
    print(json.dumps(told), flush=True)
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no compiler for C++")
def test_a_signal_during_the_first_compilation_ends_at_once_and_damages_nothing(
    corpus: Corpus, tmp_path: Path, uninterrupted: tuple[str, list[dict[str, Any]]]
) -> None:
    argv = [*command(corpus, tmp_path)[3:], "--run.compile", "yes"]
    place = argv.index("--out")
    del argv[place : place + 2]
    done = subprocess.run(
        [sys.executable, "-c", COMPILING, str(tmp_path), *argv],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stderr
    seen = {run["way"]: run for run in map(json.loads, done.stdout.splitlines())}
    quit_at_once = {128 + signal.SIGTERM, 128 + signal.SIGUSR1}
    for way, codes in {"one": {75}, "group": {75}, "two": quit_at_once}.items():
        told = (tmp_path / f"{way}.log").read_text()
        assert seen[way]["code"] in codes, (seen[way], told)
        assert "Traceback" not in told
        assert seen[way]["seconds"] < (30 if way == "two" else 10), seen[way]
        out = tmp_path / f"run-{way}"
        assert not list((out / "checkpoints").iterdir())
        assert not [p for p in out.rglob("*") if ".tmp" in p.name]
    # The rest of this run is not compiled, which may change and takes minutes.
    out = tmp_path / "run-one"
    assert start(corpus, out).wait(120) == 0
    weights, logged = outcome(out)
    assert (weights, [m for m in logged if "changed" not in m]) == uninterrupted


SIGNALLED_PREPARE = """
import json, os, random, signal, sys, time
from pathlib import Path
from electra import cli
from electra.data import corpus

corpus.prepare.__kwdefaults__["shard_bytes"] = 6000
out, moments, argv, draw = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:], random.Random(5)

def shards():
    return len(list(out.glob("train-*.tokens.bin")))

def listens(child):  # as the kernel tells
    mask = Path(f"/proc/{child}/status").read_text().split("SigCgt:")[1].split()[0]
    return int(mask, 16) >> (signal.SIGTERM - 1) & 1

for i in range(moments):
    wanted = shards() + (draw.randint(1, 5) if i % 3 else 0)  # or while its workers are started
    child = os.fork()
    if child == 0:
        cli.main([*argv, "--workers", str(1 + i % 2)])
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while not (listens(child) and shards() >= wanted) and not os.waitid(os.P_PID, child, ended):
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.02))
    os.kill(child, (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)[i % 3])
    began = time.monotonic()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    told = {"code": code, "seconds": time.monotonic() - began, "shards": shards()}
    print(json.dumps(told), flush=True)  # or the next child would print it once more
"""


@pytest.mark.parametrize("moments", [6, pytest.param(24, marks=pytest.mark.long)])
def test_a_signal_to_prepare_at_any_moment_costs_no_full_shard(
    tokenizer_dir: Path, tmp_path: Path, moments: int, request: pytest.FixtureRequest
) -> None:
    text, out = make_text(tmp_path / "text", documents=80 * moments), tmp_path / "stopped"
    flags = ["prepare", "--input", str(text), "--tokenizer", str(tokenizer_dir), "--length", "32"]

    def prepared(out: Path, moments: int) -> list[dict[str, Any]]:
        arguments = [str(out), str(moments), *flags, "--out", str(out)]
        done = subprocess.run(
            [sys.executable, "-c", SIGNALLED_PREPARE, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=590,
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    runs = prepared(out, moments)
    stops = sum(run["code"] == 75 for run in runs)
    told = f"{stops} of {moments} ended with code 75"
    request.node.user_properties.append(("counted", told))
    assert [run["code"] for run in runs] == [75] * moments
    kept = [run["shards"] for run in runs]
    assert kept == sorted(kept)
    assert kept[-1] > 0
    for place in (out, tmp_path / "whole"):
        prepare(
            [text],
            Tokenizer.load(tokenizer_dir),
            place,
            workers=1,
            sequence_length=32,
            shard_bytes=6000,
        )
    assert content(out) == content(tmp_path / "whole")


def test_a_signal_while_torch_is_imported_ends_at_once(corpus: Corpus, tmp_path: Path) -> None:
    process = start(corpus, tmp_path / "run")
    status = Path(f"/proc/{process.pid}/status")
    while not catches(status, signal.SIGTERM):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert not (tmp_path / "run" / "checkpoints").exists()


def catches(status: Path, number: signal.Signals) -> bool:
    """Whether a process has a handler for the signal, as the kernel tells."""
    mask = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(mask.split()[1], 16) >> (number - 1) & 1)


def test_a_second_signal_quits_at_once_without_damage(
    corpus: Corpus, tmp_path: Path, uninterrupted: tuple[str, list[dict[str, Any]]]
) -> None:
    out = tmp_path / "run"
    process = start(corpus, out)
    wait_for_lines(process, out, 5)
    process.send_signal(signal.SIGSTOP)  # both are there before it can react to the first
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) in (128 + signal.SIGTERM, 128 + signal.SIGINT)
    assert start(corpus, out).wait(120) == 0
    assert outcome(out) == uninterrupted
