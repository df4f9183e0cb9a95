"""Checkpoints: whole or absent, verified to the last bit, never lost to a crash in a save."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import disk_events
from torch import Tensor

from electra import checkpoint
from electra.checkpoint import (
    Saver,
    load_newest,
    read_checkpoint,
    saved_steps,
    write_checkpoint,
)
from electra.errors import CorruptError, ElectraError, NumericError
from electra.files import json_bytes

ROOT = Path(__file__).parents[1]


def tensors(step: int) -> dict[str, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(step)
    return {
        "model": {
            "word.weight": torch.randn(13, 7, generator=draw),
            "dense.bias": torch.randn(11, generator=draw),
        },
        "optimizer": {
            "m.word.weight": torch.randn(13, 7, generator=draw),
            "meter": torch.randn(8, generator=draw, dtype=torch.float64),
            "bad_steps": torch.tensor(step),
        },
    }


def written(directory: Path, *steps: int) -> list[Path]:
    directory.mkdir(exist_ok=True)
    return [write_checkpoint(directory, s, tensors(s), {"seconds": s / 3}) for s in steps]


def assert_is(found: Any, step: int) -> None:
    assert found.step == found.state["step"] == step
    assert found.state["seconds"] == step / 3
    for file, group in tensors(step).items():
        assert found.tensors[file].keys() == group.keys()
        for name, tensor in group.items():
            assert torch.equal(found.tensors[file][name], tensor), name
            assert found.tensors[file][name].dtype == tensor.dtype


# ---------------------------------------------------------------------- there and back


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    (path,) = written(tmp_path, 12)
    assert path.name == "step-00000012"
    assert_is(read_checkpoint(path), 12)
    assert sorted(file.name for file in path.iterdir()) == [
        "MANIFEST.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    (one,), (two,) = written(tmp_path / "a", 12), written(tmp_path / "b", 12)
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes()


def test_the_newest_is_the_one_with_the_highest_step(tmp_path: Path) -> None:
    written(tmp_path, 9, 100_000_000, 10)
    found = load_newest(tmp_path)
    assert_is(found, 100_000_000)


def test_no_checkpoint_is_not_an_error(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "missing") is None
    assert load_newest(tmp_path) is None


def test_a_step_can_be_written_again(tmp_path: Path) -> None:
    written(tmp_path, 4)
    (path,) = written(tmp_path, 4)
    assert_is(read_checkpoint(path), 4)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_writing_a_step_again_never_takes_down_the_one_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop can come right after a save; dying in the second save must not cost the first."""
    written(tmp_path, 4)

    rename = os.replace

    def dies(source: Path, target: Path) -> None:
        if target.name == "step-00000004":
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(checkpoint.os, "replace", dies)
    with contextlib.suppress(KeyboardInterrupt):
        written(tmp_path, 4)
    monkeypatch.undo()
    assert_is(load_newest(tmp_path), 4)


# ---------------------------------------------------------------------- damage


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def flip_a_bit(name: str, place: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[int(place * len(content))] ^= 4
        (path / name).write_bytes(content)

    return damage


def zero_a_block(path: Path) -> None:
    content = (path / "optimizer.safetensors").read_bytes()
    (path / "optimizer.safetensors").write_bytes(content[:-64] + bytes(64))


def delete(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def swap_files(path: Path) -> None:
    os.rename(path / "model.safetensors", path / "x")
    os.rename(path / "optimizer.safetensors", path / "model.safetensors")
    os.rename(path / "x", path / "optimizer.safetensors")


def take_another_steps_files(path: Path) -> None:
    shutil.copy(path.with_name("step-00000004") / "state.json", path / "state.json")


def take_another_steps_manifest(path: Path) -> None:
    for file in path.with_name("step-00000004").iterdir():
        shutil.copy(file, path / file.name)


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        manifest = json.loads((path / "MANIFEST.json").read_bytes())
        result = change(manifest)
        (path / "MANIFEST.json").write_bytes(json_bytes(manifest if result is None else result))

    return damage


def path_name(name: str) -> Callable[[Path], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = manifest["files"]["state.json"]

    return edited(change)


def longer(manifest: dict[str, Any]) -> None:
    manifest["files"]["model.safetensors"]["size"] += 1


def other_sum(manifest: dict[str, Any]) -> None:
    manifest["files"]["model.safetensors"]["sha256"] = "0" * 64


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncate": truncate,
    "empty": lambda path: os.truncate(path / "model.safetensors", 0),
    "zero a block": zero_a_block,
    **{
        f"flip a bit of {name} at {place}": flip_a_bit(name, place)
        for name in ("model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json")
        for place in (0.0, 0.3, 0.6, 0.99)
    },
    **{
        f"delete {name}": delete(name)
        for name in ("model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json")
    },
    "swap": swap_files,
    "state of another step": take_another_steps_files,
    "all of another step": take_another_steps_manifest,
    "manifest: size": edited(longer),
    "manifest: checksum": edited(other_sum),
    "manifest: step": edited(lambda m: m.update(step=13)),
    "manifest: format": edited(lambda m: m.update(format=99)),
    "manifest: without optimizer": edited(lambda m: m["files"].pop("optimizer.safetensors") and m),
    "manifest: without model": edited(lambda m: m["files"].pop("model.safetensors") and m),
    "manifest: a list": edited(lambda m: [m]),
    "manifest: no files": edited(lambda m: m.update(files=None)),
    "manifest: ../x": path_name("../step-00000004/state.json"),
    "manifest: absolute": path_name("/etc/hostname"),
    "manifest: hidden": path_name(".."),
    "manifest: no JSON": lambda path: (path / "MANIFEST.json").write_bytes(b"\xff{"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_noticed_and_the_checkpoint_before_is_taken(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    written(tmp_path, 4, 8, 12)
    damage(tmp_path / "step-00000012")
    warnings: list[str] = []
    assert_is(load_newest(tmp_path, warn=warnings.append), 8)
    assert len(warnings) == 1
    assert "step-00000012" in warnings[0]
    assert (tmp_path / "damaged-step-00000012").is_dir()
    assert not (tmp_path / "step-00000012").exists()


def test_damaged_ones_are_kept_beside_each_other(tmp_path: Path) -> None:
    written(tmp_path, 4)
    for _ in range(3):
        written(tmp_path, 8)
        truncate(tmp_path / "step-00000008")
        assert_is(load_newest(tmp_path, warn=lambda _: None), 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "damaged-step-00000008",
        "damaged-step-00000008-2",
        "damaged-step-00000008-3",
        "step-00000004",
    ]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_disk_that_cannot_be_read_for_now_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    written(tmp_path, 4, 8)

    def fails(_: Path) -> str:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "sha256_file", fails)
        with pytest.raises(ElectraError, match="could not be read") as caught:
            load_newest(tmp_path, warn=lambda _: None)
    assert not isinstance(caught.value, CorruptError)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004", "step-00000008"]
    assert_is(load_newest(tmp_path, warn=lambda _: None), 8)


def test_none_good_is_an_error_however_often_it_is_asked(tmp_path: Path) -> None:
    """A second try must not take the empty directory for a new run."""
    written(tmp_path, 4, 8)
    for name in ("step-00000004", "step-00000008"):
        truncate(tmp_path / name)
    for _ in range(2):
        with pytest.raises(CorruptError) as caught:
            load_newest(tmp_path, warn=lambda _: None)
        assert caught.value.exit_code == 3
        assert "damaged-step-00000008" in caught.value.where


def test_another_format_that_is_intact_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    (path,) = written(tmp_path, 4)
    monkeypatch.undo()
    with pytest.raises(ElectraError, match="format 2") as caught:
        load_newest(tmp_path)
    assert not isinstance(caught.value, CorruptError)
    assert path.is_dir()


# ---------------------------------------------------------------------- saving beside the training


def test_a_state_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep=2)
    saver.save(4, tensors(4), {"seconds": 4 / 3})
    for file, name in (("model", "dense.bias"), ("optimizer", "m.word.weight")):
        broken = tensors(8)
        broken[file][name].view(-1)[3] = float("nan")
        saver.save(8, broken, {"seconds": 8 / 3})
        with pytest.raises(NumericError, match=re.escape(name)):
            saver.wait()
    assert_is(load_newest(tmp_path), 4)


def test_the_copy_is_taken_at_once(tmp_path: Path) -> None:
    state = tensors(4)
    saver = Saver(tmp_path, keep=2)
    saver.save(4, state, {"seconds": 4 / 3})
    for group in state.values():
        for tensor in group.values():
            tensor.zero_()
    saver.wait()
    assert_is(load_newest(tmp_path), 4)


def test_threads_take_short_turns_while_a_save_is_written_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, during = sys.getswitchinterval(), list[float]()

    def write(*_: Any) -> Path:
        during.append(sys.getswitchinterval())
        if len(during) == 2:
            raise OSError(5, "no such luck")
        return tmp_path

    monkeypatch.setattr(checkpoint, "write_checkpoint", write)
    saver = Saver(tmp_path, keep=2)
    saver.save(4, tensors(4), {})
    saver.wait()
    saver.save(8, tensors(8), {})
    with pytest.raises(OSError, match="luck"):
        saver.wait()
    assert max(during) < before / 10
    assert sys.getswitchinterval() == before


def test_saves_that_overlap_leave_the_turns_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds that are fine-tuned at once save each by itself; the first to begin ends first."""
    before, during = sys.getswitchinterval(), list[float]()
    begun, ended = threading.Event(), threading.Event()

    def write(directory: Path, *_: Any) -> Path:
        if directory.name == "one":
            assert begun.wait(30)
        else:
            begun.set()
            assert ended.wait(30)
            during.append(sys.getswitchinterval())
        return directory

    monkeypatch.setattr(checkpoint, "write_checkpoint", write)
    one, other = (Saver(tmp_path / name, keep=2) for name in ("one", "other"))
    one.save(4, tensors(4), {})
    other.save(4, tensors(4), {})
    one.wait()
    ended.set()
    other.wait()
    assert during[0] < before / 10
    assert sys.getswitchinterval() == before


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep=2)
    for step in (4, 8, 12, 16):
        saver.save(step, tensors(step), {"seconds": step / 3})
    saver.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000012", "step-00000016"]


def test_multiples_are_kept_beside_the_newest(tmp_path: Path) -> None:
    def saved(*steps: int, **kept: int) -> list[int]:
        saver = Saver(tmp_path, **kept)
        for step in steps:
            saver.save(step, tensors(step), {"seconds": step / 3})
        saver.wait()
        return sorted(saved_steps(tmp_path))

    assert saved(4, 8, 12, 16, 20, keep=2, keep_every=8) == [8, 16, 20]
    assert saved(24, 28, keep=2, keep_every=8) == [8, 16, 24, 28]
    assert saved(32, keep=3, keep_every=16) == [16, 24, 28, 32]  # also what was kept before goes
    for step in saved_steps(tmp_path):
        assert_is(read_checkpoint(tmp_path / f"step-{step:08d}"), step)
    assert saved(36, keep=2) == [32, 36]


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    written(tmp_path, 4)
    (tmp_path / ".tmp-step-00000008").mkdir()
    (tmp_path / ".tmp-step-00000008" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-pruned-step-00000001").mkdir()
    Saver(tmp_path, keep=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000004"]


def test_an_error_of_the_background_reaches_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = Saver(tmp_path / "run", keep=2)
    monkeypatch.setattr(checkpoint, "save_file", _full_disk)
    saver.save(4, tensors(4), {"seconds": 4 / 3})
    with pytest.raises(ElectraError, match="disk is full"):
        saver.wait()
    monkeypatch.undo()
    saver.save(8, tensors(8), {"seconds": 8 / 3})
    saver.wait()
    assert_is(load_newest(tmp_path / "run"), 8)


def _full_disk(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


# ---------------------------------------------------------------------- dying in a save


def fault_points() -> list[str]:
    """Every name in the source, those made from the files' names filled in."""
    source = Path(checkpoint.__file__).read_text()
    names: list[str] = []
    for is_pattern, name in re.findall(r"fault_point\((f?)\"([^\"]+)\"\)", source):
        names += [name.replace("{file}", f) for f in tensors(0)] if is_pattern else [name]
    return names


def test_there_are_fault_points_all_over_a_save() -> None:
    assert {"after_mkdir", "after_model", "before_rename", "after_rename", "during_prune"} <= set(
        fault_points()
    )
    assert len(set(fault_points())) >= 12


# In the middle of a file no line of Python runs: there the kernel ends the process, by a limit on
# the size of a file that the model's does not keep.
IN_A_FILE = "in_a_file"
SAVE_THREE = """
import os, resource, signal, sys
from pathlib import Path
from electra.checkpoint import Saver
from test_checkpoint import IN_A_FILE, tensors
saver = Saver(Path(sys.argv[1]), keep=int(sys.argv[2]), keep_every=int(sys.argv[3]) or None)
name, _, count = os.environ["ELECTRA_FAULT"].partition(":")
for step in (4, 8, 12):
    if name == IN_A_FILE and step == 4 * int(count):
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
    saver.save(step, tensors(step), {"seconds": step / 3})
    saver.wait()
    print(step, flush=True)
"""


@pytest.mark.parametrize(("keep", "every"), [(1, 0), (2, 0), (1, 8)])
def test_a_crash_at_any_point_leaves_a_good_checkpoint(
    tmp_path: Path, keep: int, every: int, request: pytest.FixtureRequest
) -> None:
    """Every point, the first to the third time it is passed; all children run at once."""
    (tmp_path / "done").mkdir()
    children = {}
    for name in (*fault_points(), IN_A_FILE):
        for count in (1, 2, 3):
            directory = tmp_path / f"{name}-{count}"
            children[directory] = name, count
    # One process imports torch and forks the rest: a start costs seconds, a fork nothing.
    driver = f"""
import os, sys
import torch
torch.set_num_threads(1)
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
code = compile({SAVE_THREE!r}, "save", "exec")
import electra.checkpoint, test_checkpoint
for name, count, directory in {[(n, c, str(d)) for d, (n, c) in children.items()]!r}:
    child = os.fork()
    if child == 0:
        os.environ["ELECTRA_FAULT"] = f"{{name}}:{{count}}"
        sys.argv = ["save", directory, "{keep}", "{every}"]
        os.dup2(os.open(directory + ".log", os.O_CREAT | os.O_WRONLY), 1)
        exec(code)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(directory, status, flush=True)
"""
    result = subprocess.run(
        [sys.executable, "-c", driver], capture_output=True, text=True, timeout=120, check=True
    )
    statuses = dict(line.rsplit(" ", 1) for line in result.stdout.splitlines())
    assert statuses.keys() == {str(directory) for directory in children}
    killed = Counter[str]()
    for directory, (name, count) in children.items():
        ended_by = int(statuses[str(directory)]) & 0x7F
        assert ended_by in ((signal.SIGXFSZ,) if name == IN_A_FILE else (0, signal.SIGKILL))
        killed[name] += ended_by != 0
        saved = directory.with_name(f"{directory.name}.log").read_text().split()
        if not saved and name not in ("after_rename", "after_sync"):
            assert load_newest(directory) is None
            continue
        warnings: list[str] = []
        found = load_newest(directory, warn=warnings.append)
        newest = int(saved[-1]) if saved else 0
        assert found is not None, (name, count)
        assert found.step in (newest, newest + 4), (name, count)
        assert_is(found, found.step)
        assert not warnings, (name, count)
        assert not every or "8" not in saved or 8 in saved_steps(directory), (name, count)
        Saver(directory, keep=keep)
        assert not list(directory.glob(".*"))
    # A save passes those of pruning only when there is something to prune.
    assert all(killed[name] >= (1 if "prune" in name else 3) for name, _ in children.values())
    points = f"{sum(killed[name] > 0 for name in fault_points())} of {len(fault_points())} points"
    request.node.user_properties.append(("counted", f"{points}, {killed.total()} deaths"))


def test_what_has_its_name_is_on_the_disk_and_nothing_goes_before_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the power is cut and no kill can show it: the order of syncs and renames."""
    saver = Saver(tmp_path, keep=1)
    saver.save(4, tensors(4), {"seconds": 4 / 3})
    saver.wait()
    with monkeypatch.context() as patch:
        seen = disk_events(patch)
        saver.save(8, tensors(8), {"seconds": 8 / 3})
        saver.wait()
    done = [what for what, *_ in seen]
    new = tmp_path / "step-00000008"
    complete, is_there = done.index("MANIFEST.json"), done.index(new.name)
    pruned = done.index(".tmp-pruned-step-00000004")
    assert complete < is_there < pruned
    files = {path.name: path.stat() for path in new.iterdir()}
    assert len(files) == 4
    for name, about in files.items():
        assert ("synced", about.st_ino, about.st_size) in seen[:is_there], name
    names = [(what, inode) for what, inode, _ in seen]
    assert ("synced", new.stat().st_ino) in names[complete:is_there]
    assert ("synced", tmp_path.stat().st_ino) in names[is_there:pruned]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 65])
def test_what_travels_in_pieces_arrives_whole(size: int) -> None:
    bytes_ = torch.arange(size).to(torch.uint8)
    stage = torch.empty(8, dtype=torch.uint8)
    assert torch.equal(checkpoint._to_host(bytes_, stage), bytes_)


def test_memory_for_copies_is_there_before_the_first_save(tmp_path: Path) -> None:
    tensors = {"model": {"a": torch.arange(6.0), "b": torch.ones(3)}}
    saver = Saver(tmp_path, keep=1)
    saver.reserve(tensors)
    places = {copy.data_ptr() for copy in saver._copies.values()}
    assert len(places) == 2
    for step in (1, 2):
        saver.save(step, tensors, {})
        saver.wait()
        assert {copy.data_ptr() for copy in saver._copies.values()} == places
    newest = load_newest(tmp_path)
    assert newest is not None
    assert torch.equal(newest.tensors["model"]["a"], torch.arange(6.0))
