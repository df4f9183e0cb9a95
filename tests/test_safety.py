"""What must not be lost when the disk, the place, the user or an older version gets in the way."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from artefacts import Artefacts, make_artefacts
from safetensors.torch import load_file
from test_checkpoint import assert_is, tensors
from test_pretrain import assert_same_run, with_run

from electra import cli, files
from electra import pretrain as loop
from electra.checkpoint import Saver, load_newest, saved_steps, size_of
from electra.config import PretrainConfig, RunConfig, from_dict
from electra.data.corpus import Corpus, prepare
from electra.data.tokenizer import Tokenizer
from electra.errors import DiskFull, ElectraError, Stopped
from electra.formats import hf_export, onnx_export
from electra.pretrain import pretrain
from electra.rundir import kept_for_good, load_run
from electra.runlog import RunLog, read_metrics
from electra.trackers import Tracker

ROOT = Path(__file__).parents[1]
OLD_RUN = ROOT / "tests" / "fixtures" / "run-0.1.0"


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to let a file grow beyond `size`: no root, no mount, but a real error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path, leave: int) -> Path:
    """Takes all room but `leave` bytes."""
    ballast = disk / "ballast"
    with contextlib.suppress(OSError):  # a save beside it was faster: then there is no room at all
        ballast.write_bytes(bytes(max(0, shutil.disk_usage(disk).free - leave)))
    return ballast


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, action: Any) -> None:
    """`action()` once, when the run has done `number` steps."""
    step = loop.Trainer.step

    def watched(self: loop.Trainer) -> None:
        step(self)
        if int(self.counter) == number:
            action()

    monkeypatch.setattr(loop.Trainer, "step", watched)


# ---------------------------------------------------------------------- no room


def test_the_checkpoint_before_survives_fifty_saves_without_room(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    draw, survived = random.Random(8), 0
    saver = Saver(tmp_path, keep=1)
    saver.save(4, tensors(4), {"seconds": 4 / 3})
    saver.wait()
    largest = max(f.stat().st_size for f in (tmp_path / "step-00000004").iterdir())
    for step in range(5, 55):
        with files_of_at_most(draw.randrange(largest)):
            saver.save(step, tensors(step), {"seconds": step / 3})
            with pytest.raises(DiskFull) as caught:
                saver.wait()
        assert caught.value.exit_code == 2
        assert str(tmp_path) in caught.value.where
        assert f"{size_of(tensors(step)):,} are needed" in caught.value.what
        assert "bytes are free" in caught.value.what
        assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]
        assert_is(load_newest(tmp_path), 4)
        survived += 1
    request.node.user_properties.append(("counted", f"{survived} of 50 saves without room"))


@pytest.mark.parametrize("times", [10, pytest.param(50, marks=pytest.mark.long)])
def test_full_disks_cost_no_checkpoint(
    micro: PretrainConfig,
    corpus: Corpus,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    times: int,
    request: pytest.FixtureRequest,
) -> None:
    """The disk fills up to a random degree at a random step; with room again the run goes on."""
    draw = random.Random(50)
    out = small_disk / "run"
    config = with_run(micro, train_steps=10**6, save_every=2, log_every=5, eval_every=10**6)
    newest = survived = 0
    for _ in range(times):
        with monkeypatch.context() as patch:
            at = newest + draw.randint(3, 8)
            leave = draw.randrange(100_000)
            at_step(patch, at, lambda leave=leave: fill(small_disk, leave))
            with pytest.raises(DiskFull):
                pretrain(config, corpus, out, quiet=True)
        saved = load_newest(out / "checkpoints", warn=pytest.fail)
        assert saved is not None
        assert saved.step >= newest
        newest = saved.step
        assert not list(out.rglob(".tmp-*"))
        (small_disk / "ballast").unlink()
        survived += 1
    request.node.user_properties.append(("counted", f"{survived} of {times} full disks"))


def test_a_full_disk_ends_the_run_and_room_lets_it_go_on(
    micro: PretrainConfig, corpus: Corpus, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain(micro, corpus, small_disk / "whole", quiet=True)

    def fill_after_the_save() -> None:
        while not (small_disk / "run" / "checkpoints" / "step-00000004").exists():
            time.sleep(0.01)
        fill(small_disk, 50_000)

    with monkeypatch.context() as patch:
        at_step(patch, 6, fill_after_the_save)
        with pytest.raises(DiskFull, match=r"disk is full: [\d,]+ bytes are free, [\d,]+ are"):
            pretrain(micro, corpus, small_disk / "run", quiet=True)
    assert [p.name for p in (small_disk / "run" / "checkpoints").iterdir()] == ["step-00000004"]
    (small_disk / "ballast").unlink()
    pretrain(micro, corpus, small_disk / "run", quiet=True)
    assert_same_run(small_disk / "whole", small_disk / "run")


# TensorBoard writes in a thread of its own, which ends when there is no room.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("room", [0, 50_000])
def test_a_run_can_wait_until_there_is_room(
    micro: PretrainConfig,
    corpus: Corpus,
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    room: int,
) -> None:
    """Without any room even lines of metrics have to wait."""
    micro = with_run(micro, save_every=4 if room else 20)
    pretrain(micro, corpus, small_disk / "whole", quiet=True)
    monkeypatch.setattr(loop, "_POLL_SECONDS", 0.1)
    told: list[str] = []

    def make_room(_: RunLog, text: str) -> None:
        if "waiting for room" in text:
            told.append(text)
            (small_disk / "ballast").unlink()

    monkeypatch.setattr(RunLog, "warn", make_room)
    at_step(monkeypatch, 6, lambda: fill(small_disk, room))
    config = with_run(micro, on_disk_full="pause")
    pretrain(config, corpus, small_disk / "run", quiet=True)
    assert len(told) == 1
    assert str(small_disk / "run") in told[0]
    assert_same_run(small_disk / "whole", small_disk / "run")


def test_a_limit_on_files_pauses_and_a_stop_ends_the_waiting(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "_POLL_SECONDS", 0.1)
    asked = [False]
    monkeypatch.setattr(loop.StopRequest, "__call__", lambda _: asked[0])
    monkeypatch.setattr(RunLog, "warn", lambda *_: asked.__setitem__(0, True))
    config = with_run(micro, on_disk_full="pause")
    with files_of_at_most(30_000), pytest.raises(DiskFull, match="may not become so large"):
        pretrain(config, corpus, tmp_path, quiet=True)
    assert load_newest(tmp_path / "checkpoints") is None


def test_a_disk_without_room_for_two_checkpoints_is_refused_at_the_start(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain(with_run(micro, train_steps=1), corpus, tmp_path / "a", quiet=True)
    saved = load_newest(tmp_path / "a" / "checkpoints")
    assert saved is not None
    needed = 2 * size_of(saved.tensors)
    usage = shutil.disk_usage(tmp_path)
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, f=free: usage._replace(free=f))
        if fits:
            pretrain(with_run(micro, train_steps=1), corpus, tmp_path / "b", quiet=True)
            continue
        with pytest.raises(DiskFull, match=f"{free:,} bytes are free, {needed:,} are") as caught:
            pretrain(micro, corpus, tmp_path / "c", quiet=True)
        assert caught.value.exit_code == 2
        assert str(tmp_path / "c") in caught.value.where
        pretrain(with_run(micro, train_steps=1), corpus, tmp_path / "b", quiet=True)  # it is done


def test_checkpoints_that_stay_need_room_from_the_start(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain(with_run(micro, train_steps=1), corpus, tmp_path / "a", quiet=True)
    saved = load_newest(tmp_path / "a" / "checkpoints")
    assert saved is not None
    size, usage, lacking = size_of(saved.tensors), shutil.disk_usage(tmp_path), 0

    def disk_usage(_: Path) -> Any:
        return usage._replace(free=enough - lacking)

    # 4, 8 and 12 stay beside the last two, 16 and 18.
    enough = 5 * size
    run = with_run(micro, train_steps=18, save_every=2, keep_every=4, keep_checkpoints=1)
    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    lacking = 1
    with pytest.raises(DiskFull, match="two checkpoints and the 3 more that run") as told:
        pretrain(run, corpus, tmp_path / "b", quiet=True)
    assert f"{enough - 1:,} bytes are free, {enough:,} are needed" in told.value.what
    assert "--run.keep-every" in told.value.fix
    assert not list((tmp_path / "b" / "checkpoints").iterdir())
    lacking = 0
    pretrain(run, corpus, tmp_path / "b", quiet=True)
    assert sorted(saved_steps(tmp_path / "b" / "checkpoints")) == [4, 8, 12, 16, 18]
    # Continued, it needs room for what is still to come: 20 and 24, beside 28 and 30.
    run = with_run(run, train_steps=30)
    enough, lacking = 4 * size, 1
    with pytest.raises(DiskFull, match="and the 2 more that run"):
        pretrain(run, corpus, tmp_path / "b", quiet=True)
    lacking = 0
    pretrain(run, corpus, tmp_path / "b", quiet=True)
    # Where room is waited for, or nobody knows how many there will be, two have to fit as ever.
    enough = 2 * size
    for number, more in enumerate(({"on_disk_full": "pause"}, {"minutes": 0.01})):
        pretrain(with_run(run, **more), corpus, tmp_path / f"c{number}", quiet=True)


@pytest.mark.parametrize("keep_every", [None, 1, 2, 3, 4, 6, 10, 40])
@pytest.mark.parametrize("save_every", [1, 2, 5])
def test_the_checkpoints_that_stay_are_counted_as_they_are_pruned(
    keep_every: int | None, save_every: int
) -> None:
    run = RunConfig(train_steps=23, save_every=save_every, keep_every=keep_every)
    for end, first in itertools.product(range(1, 24), range(24)):
        steps = [s for s in range(first + 1, end) if s % save_every == 0] + [end] * (first < end)
        stay = [s for s in steps[:-2] if keep_every is not None and s % keep_every == 0]
        assert kept_for_good(run, first, end) == len(stay), (first, end)


@pytest.fixture(scope="module")
def made(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Artefacts:
    return make_artefacts(tmp_path_factory.mktemp("made"), corpus)


INTO_A_FILE = ("embed", "evaluate", "predict")  # others have a directory of their own
WRITERS: dict[str, str] = {
    "tokenizer": "--input {text} --out {out} --vocab-size 97",
    "prepare": "--input {text} --tokenizer {tokenizer} --out {out} --length 23 --workers {workers}",
    "evaluate": "{made.run} --corpus {made.corpus} --out {out}/numbers.json",
    "export": "{made.run} --out {out}",
    "finetune": "--model {made.export} --data {made.table} --out {out} --quiet --epochs 1"
    " --device cpu --threads 1",
    "embed": "--model {made.export} --input {text} --out {out}/vectors.npy",
    "pretrain": "--config {made.run}/config.json --corpus {made.corpus} --out {out} --quiet",
    "import": "{made.export} --out {out}",
    "extend": "{made.export} --input {text} --out {out} --tokens 2",
    "predict": "--model {made.tuned} --input {made.table} --out {out}/answers.csv",
    "report": "{made.run} {made.tuned} --out {out}",
    "onnx": "--model {made.tuned} --out {out}",
}


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *((name, 1) for name in WRITERS if name != "onnx"),
        ("prepare", 2),
        pytest.param("onnx", 1, marks=pytest.mark.long),  # each export takes seconds
    ],
)
def test_a_command_without_room_says_so_and_does_it_all_when_given_again(
    made: Artefacts,
    text: Path,
    tokenizer_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    workers: int,
) -> None:
    # Its import is slow, and it writes nothing.
    monkeypatch.setattr(hf_export, "_compare", lambda *_: [])

    def written(out: Path, limit: int | None = None) -> dict[str, bytes]:
        flags = WRITERS[name].format(
            text=text, tokenizer=tokenizer_dir, out=out, made=made, workers=workers
        )
        if name in INTO_A_FILE:
            out.mkdir(exist_ok=True)
        with files_of_at_most(limit) if limit is not None else contextlib.nullcontext():
            assert cli.run([name, *flags.split()]) == (0 if limit is None else 2)
        told = capsys.readouterr().err
        assert "Traceback" not in told
        assert limit is None or "may not become so large" in told, told
        assert limit is None or out.name in told.split("where:")[1]
        return content_of(out)

    whole = written(tmp_path / "whole")
    largest = max(map(len, whole.values()))
    for limit in (largest - 1, random.Random(8).randrange(largest), 40):
        written(tmp_path / f"{limit}", limit)
        assert written(tmp_path / f"{limit}") == whole


def content_of(out: Path) -> dict[str, bytes]:
    """What a command made, but for files that hold dates and seconds; nothing may be left over."""
    found = {str(p.relative_to(out)): p for p in out.rglob("*") if p.is_file()}
    beside = [p for p in out.parent.iterdir() if p.name.startswith(f".{out.name}")]
    assert not [path for path in found if ".tmp" in path or "damaged-" in path] + beside
    timeless = (".safetensors", ".bin", ".npy", ".onnx", "tokenizer.json", "manifest.json")
    timeless += ("answers.csv", "numbers.json", "report.md")
    return {path: p.read_bytes() for path, p in found.items() if path.endswith(timeless)}


# A command that dies at some of its changes of the disk, each time in a place of its own, and is
# given again. One process imports everything and forks the rest.
DYING = """
import builtins, json, os, random, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import torch.utils.tensorboard
from electra import checkpoint, cli
from electra.formats import hf_export

hf_export._compare = lambda *_: []
work, argv, tries = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])

def run(number, at=0):
    place = work / str(number) / "out"
    place.parent.mkdir(exist_ok=True)
    if "FOLDER" in argv:
        place.mkdir(exist_ok=True)
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    done, opened = [0], open

    def counted(function):
        def change(*given, **named):
            done[0] += 1
            if done[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*given, **named)
        return change

    def counted_open(file, mode="r", *more, **named):
        writes = set(mode) & set("wax+")
        return (counted(opened) if writes else opened)(file, mode, *more, **named)

    for name in ("replace", "unlink", "rmdir", "mkdir", "fsync"):
        setattr(os, name, counted(getattr(os, name)))
    builtins.open, checkpoint.save_file = counted_open, counted(checkpoint.save_file)
    code = cli.run([part.replace("OUT", str(place)) for part in argv if part != "FOLDER"])
    (work / "changes").write_text(str(done[0]))
    os._exit(code)

assert run(0) == 0
changes = int((work / "changes").read_text())
for at in sorted(random.Random(3).sample(range(1, changes + 1), min(tries, changes))):
    codes = run(at, at), run(at)
    assert codes == (-signal.SIGKILL, 0), (at, codes)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in WRITERS if name != "onnx"])
def test_a_command_that_dies_at_any_change_of_the_disk_does_it_all_when_given_again(
    made: Artefacts, text: Path, tokenizer_dir: Path, tmp_path: Path, name: str
) -> None:
    flags = WRITERS[name].format(
        text=text, tokenizer=tokenizer_dir, out="OUT", made=made, workers=1
    )
    folder = ["FOLDER"] if name in INTO_A_FILE else []
    argv = [name, *flags.split(), *folder]
    (tmp_path / "places").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", DYING, str(tmp_path / "places"), json.dumps(argv), "14"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, done.stderr
    whole, *others = (content_of(path) for path in sorted((tmp_path / "places").glob("*/out")))
    assert whole
    assert len(others) >= 5
    assert others == [whole] * len(others)


def test_what_the_exporter_of_onnx_cannot_write_is_told(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("of before")
    with (
        files_of_at_most(5),
        pytest.raises(DiskFull, match="may not become so large") as caught,
        onnx_export._beside(tmp_path) as place,
    ):
        (place / "model.onnx").write_text("a large one")
    assert caught.value.where == str(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_text() == "of before"


def test_tensorboard_without_room_is_a_warning_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    told: list[str] = []
    tracker = Tracker("tensorboard", tmp_path, 0, told.append)
    with files_of_at_most(10):
        tracker.write("train", 1, {"loss": 1.0})
        tracker.close()
    (line,) = told
    assert "tensorboard gets no more lines: OSError" in line
    assert "Traceback" not in capsys.readouterr().err


# An export that takes the place of an earlier one and dies at the n-th change of the disk.
REPLACING = """
import os, shutil, sys
from pathlib import Path
from electra.formats.hf_export import _replacing

def write(out, text):
    with _replacing(out, of_task=False) as folder:
        for name in ("electra.json", "README.md", "config.json"):
            (folder / name).write_text(text)

def dying(function):
    def counted(*given, **named):
        counted.left[0] -= 1
        if counted.left[0] == 0:
            os._exit(9)
        return function(*given, **named)
    counted.left = left
    return counted

work, at, code, left = Path(sys.argv[1]), 0, 9, [0]
while code == 9:
    at += 1
    write(work / str(at), "old")
    child = os.fork()
    if child == 0:
        left[0] = at
        for name in ("replace", "unlink", "rmdir", "mkdir"):
            setattr(os, name, dying(getattr(os, name)))
        write(work / str(at), "new")
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert code == 0
print(at)
"""


def test_an_export_that_dies_while_it_replaces_another_leaves_one_of_them(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REPLACING, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 4
    states: set[str] = set()
    for at in range(1, int(done.stdout) + 1):
        out = tmp_path / str(at)
        found = {path.read_text() for path in out.iterdir()} if out.exists() else {"none"}
        assert len(found) == 1, at  # never of both
        assert not out.exists() or len(list(out.iterdir())) == 3, at  # nor a part of one
        states |= found
        if found == {"none"}:  # between the two renames; the next try is refused half way
            with pytest.raises(KeyError), hf_export._replacing(out, of_task=False):
                raise KeyError
            assert (out / "README.md").read_text() == "old"
        with hf_export._replacing(out, of_task=False) as folder:
            (folder / "electra.json").write_text("newest")
        assert [path.read_text() for path in out.iterdir()] == ["newest"]
    assert states == {"old", "new", "none"}
    assert not list(tmp_path.glob(".*"))


# ---------------------------------------------------------------------- no place

COMMANDS = {
    "tokenizer": ["--input", "/none"],
    "prepare": ["--input", "/none", "--tokenizer", "/none"],
    "pretrain": ["tiny", "--corpus", "/none"],
    "evaluate": ["/none", "--corpus", "/none"],
    "export": ["/none"],
    "import": ["/none"],
    "finetune": ["--model", "/none", "--data", "/none"],
    "glue": ["--model", "/none", "--data", "/none"],
    "predict": ["--model", "/none", "--input", "/none"],
    "extend": ["/none", "--input", "/none"],
    "ablate": ["efficiency", "--corpus", "/none", "--data", "/none"],
    "report": ["/none"],
    "embed": ["--model", "/none", "--input", "/none"],
    "onnx": ["--model", "/none"],
    "demo": [],
}


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's power over permissions."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    "case", ["a file", "below a file", "a system file", "no permission", "read-only disk"]
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    name: str,
    case: str,
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "closed").mkdir()
    out = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "a" / "b",
        "a system file": Path("/proc/electra/run"),
        "no permission": tmp_path / "closed" / "run",
        "read-only disk": tmp_path / "disk" / "run",
    }[case]
    if name in INTO_A_FILE:
        out = out / "answers.csv"
    if case == "read-only disk":
        remount = ["mount", "-o", "remount,ro", str(request.getfixturevalue("small_disk"))]
        subprocess.run(remount, check=True)
    (tmp_path / "closed").chmod(0o555)
    with as_nobody() if case == "no permission" else contextlib.nullcontext():
        code = cli.run([name, *COMMANDS[name], "--out", str(out)])
    told = capsys.readouterr().err
    assert code == 2
    assert "Cannot write" in told, told  # and nothing of the input that is not there
    assert str(out.parent if name in INTO_A_FILE else out) in told
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_that_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "a" / "b"):
        files.check_place(place)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "way", "words"),
    [
        *((name, "a file", "Cannot write") for name in COMMANDS),
        ("pretrain", "in use", "Another process"),
    ],
)
def test_refusing_a_place_takes_no_heavy_import(
    tmp_path: Path, name: str, way: str, words: str
) -> None:
    """Which is what takes seconds; the rest is less than one of a processor's."""
    out = tmp_path / "out"
    written = out / "answers.csv" if name in INTO_A_FILE else out
    argv = [name, *COMMANDS[name], "--out", str(written)]
    code = f"import sys; from electra import cli; print(cli.run({argv!r}), 'torch' in sys.modules)"
    if way == "a file":
        out.touch()
    held = contextlib.nullcontext() if way == "a file" else files.exclusive(out)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with held:
        done = refused(code)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout == "2 False\n", done.stderr
    assert words in done.stderr
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 1


def refused(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["fsync", "replace", "replace that was done"])
def test_a_file_system_of_the_network_that_fails_at_any_call_costs_no_checkpoint(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What NFS does and a disk seldom: a sync fails late, a server forgets a file, or it renames
    and the answer is lost. Not NFS itself: that a second machine sees what was renamed."""
    saver = Saver(tmp_path, keep=2)
    saver.save(1, tensors(1), {"seconds": 1 / 3})
    saver.wait()
    name, good, failed = call.partition(" ")[0], 1, 0
    real = getattr(os, name)
    for at in itertools.count():
        step, left = at + 2, itertools.count()

        def broken(*given: Any, at: int = at, left: Any = left, **named: Any) -> Any:
            fails = next(left) == at
            if fails and not call.endswith("done"):
                raise OSError(code, os.strerror(code))
            result = real(*given, **named)
            if fails:
                raise OSError(code, os.strerror(code))
            return result

        with monkeypatch.context() as patch:
            patch.setattr(os, name, broken)
            saver.save(step, tensors(step), {"seconds": step / 3})
            error = None
            try:
                saver.wait()
            except ElectraError as raised:
                error = raised
        if error is not None:
            assert error.exit_code == 2
            assert os.strerror(code) in error.what
            assert str(tmp_path) in error.where
        newest = load_newest(tmp_path, set_aside=False)
        assert newest is not None
        assert newest.step in ((good, step) if error else (step,))
        assert_is(newest, newest.step)
        good, failed = newest.step, failed + (error is not None)
        if next(left) <= at:  # there are fewer calls than that
            break
    assert failed >= 1


# ---------------------------------------------------------------------- what users and clocks do


@pytest.mark.parametrize("what", ["the newest", "all", "the directory"])
def test_checkpoints_that_someone_deletes_do_not_end_the_run(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    pretrain(micro, corpus, tmp_path / "whole", quiet=True)
    place = tmp_path / "run" / "checkpoints"

    def delete() -> None:
        while list(place.glob(".tmp-*")):  # a save is under way, which is another story
            time.sleep(0.01)
        found = sorted(place.glob("step-*"))
        assert found
        for path in {"the newest": found[-1:], "all": found}.get(what, [place]):
            shutil.rmtree(path)

    at_step(monkeypatch, 10, delete)
    pretrain(micro, corpus, tmp_path / "run", quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_checkpoint_deleted_while_it_is_pruned_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from electra import checkpoint

    saver = Saver(tmp_path, keep=1)
    saver.save(4, tensors(4), {"seconds": 4 / 3})
    saver.wait()

    def delete_first(name: str) -> None:
        if name == "before_prune":
            shutil.rmtree(tmp_path / "step-00000004")

    monkeypatch.setattr(checkpoint, "fault_point", delete_first)
    saver.save(8, tensors(8), {"seconds": 8 / 3})
    saver.wait()
    assert_is(load_newest(tmp_path), 8)


def test_a_clock_that_is_set_back_changes_nothing(
    micro: PretrainConfig, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrain(micro, corpus, tmp_path / "whole", quiet=True)
    past = itertools.count(2e9, -86_400.0)  # every look at the calendar is a day earlier
    monkeypatch.setattr(time, "time", lambda: next(past))
    config = with_run(micro, minutes=600.0)  # the clock of the budget runs as well
    at_step(monkeypatch, 9, lambda: os.kill(os.getpid(), 15))
    with pytest.raises(Stopped):
        pretrain(config, corpus, tmp_path / "run", quiet=True)
    pretrain(config, corpus, tmp_path / "run", quiet=True)
    seconds = [m["seconds"] for m in read_metrics(tmp_path / "run") if m["kind"] == "train"]
    assert seconds == sorted(seconds)
    assert len(seconds) == 20
    assert all(0 <= s < 600 for s in seconds)


# ---------------------------------------------------------------------- another tokenizer

USES: dict[str, tuple[str, str]] = {  # where the tokenizer lies, and who reads it there
    "resume": ("corpus/tokenizer", ""),
    "export": ("run/tokenizer", "export {here}/run --out {here}/out"),
    "finetune from a run": ("run/tokenizer", "finetune --model {here}/run --data {here}/table.csv"),
    "finetune": ("export/discriminator", "finetune --model {here}/export --data {here}/table.csv"),
    "detect": ("export/discriminator", "detect one --model {here}/export/discriminator"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("way", ["two tokens swapped", "a token less", "other special", "cased"])
def test_another_tokenizer_is_refused_and_both_are_named(
    made: Artefacts, tmp_path: Path, capsys: pytest.CaptureFixture[str], use: str, way: str
) -> None:
    place, command = USES[use]
    for path in (made.run, made.export, made.corpus):
        shutil.copytree(path, tmp_path / ("corpus" if path == made.corpus else path.name))
    shutil.copy(made.table, tmp_path)
    tokenizer = Tokenizer.load(tmp_path / place)
    vocabulary = (tmp_path / place / "vocab.txt").read_text().split("\n")[:-1]
    if way == "two tokens swapped":
        vocabulary[-2:] = reversed(vocabulary[-2:])
    elif way == "a token less":
        vocabulary.pop()
    elif way == "other special":
        sep, cls = (vocabulary.index(f"[{name}]") for name in ("SEP", "CLS"))
        vocabulary[sep], vocabulary[cls] = vocabulary[cls], vocabulary[sep]
    (tmp_path / "vocab.txt").write_text("".join(f"{token}\n" for token in vocabulary))
    other = Tokenizer.load(tmp_path / "vocab.txt", lowercase=way != "cased")
    assert other.hash != tokenizer.hash
    if use == "resume":  # a corpus made with it, by all its own checksums
        text = tmp_path / "text.txt"
        text.write_text("one river\n" * 99)
        prepare([text], other, tmp_path / "other", sequence_length=23, workers=1)
        command = "pretrain --config {here}/run/config.json --corpus {here}/other --out {here}/run"
        command += " --run.train-steps 4 --force --quiet"
    else:
        other.save(tmp_path / place)
    flags = " --quiet --device cpu --threads 1 --out {here}/out"
    command += flags if command.startswith("finetune") else ""
    code = cli.run(command.format(here=tmp_path).split())
    told = capsys.readouterr().err
    assert code == 2, told
    assert "okenizer" in told
    assert tokenizer.hash[:12] in told
    assert other.hash[:12] in told


# ---------------------------------------------------------------------- older versions


def test_a_run_of_the_first_version_still_loads_and_continues(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Written before checkpoints held more than one counter and settings had today's fields."""
    weights = load_file(OLD_RUN / "checkpoints" / "step-00000004" / "model.safetensors")
    loaded = load_run(OLD_RUN)
    assert loaded.step == 4
    for name, parameter in loaded.objective.named_parameters():
        assert torch.equal(parameter, weights[name]), name

    out = tmp_path / "run"
    shutil.copytree(OLD_RUN, out)
    record = json.loads((out / "run.json").read_bytes())
    # The corpus is made here and now; its bytes are another test's business.
    record |= {
        "corpus_fingerprint": corpus.fingerprint,
        "tokenizer_hash": corpus.tokenizer_hash,
        "vocab_size": corpus.vocab_size,
    }
    (out / "run.json").write_text(json.dumps(record))
    config = from_dict(PretrainConfig, record["config"], where="fixture")
    pretrain(replace(config, run=replace(config.run, train_steps=8)), corpus, out, quiet=True)
    saved = load_newest(out / "checkpoints", warn=pytest.fail)
    assert saved is not None
    assert saved.step == 8
    assert not torch.equal(
        saved.tensors["model"]["discriminator.embeddings.word.weight"],
        weights["discriminator.embeddings.word.weight"],
    )


def test_the_fixture_of_the_first_version_is_what_that_version_wrote() -> None:
    """Nobody makes it pass by writing it anew."""
    manifest = json.loads(
        (OLD_RUN / "checkpoints" / "step-00000004" / "MANIFEST.json").read_bytes()
    )
    assert (
        manifest["checksum"] == "079d84fc56126684be49d4dd8e400720e36a24198216300bc26b8566189af110"
    )
    saved = load_newest(OLD_RUN / "checkpoints", set_aside=False)
    assert saved is not None
    assert "bad_in_a_row" not in saved.tensors["optimizer"]
    with pytest.raises(ElectraError, match="no setting"):
        from_dict(PretrainConfig, {"run": {"never": 1}}, where="x")
