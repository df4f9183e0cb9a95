"""Atomic files: whole or absent, whatever happens in between."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
from conftest import disk_events
from hypothesis import given
from hypothesis import strategies as st

from electra import files
from electra.errors import ElectraError
from electra.files import AtomicFile, exclusive, json_bytes, sha256_file, write_atomic, xxh3_file


def test_a_file_appears_only_when_it_is_committed(tmp_path: Path) -> None:
    path = tmp_path / "shard.bin"
    file = AtomicFile(path)
    file.write(b"abc")
    assert not path.exists()
    file.write(memoryview(b"def"))
    file.write(b"")
    file.commit()
    assert path.read_bytes() == b"abcdef"
    assert (file.size, file.xxh3) == (6, xxhash.xxh3_128_hexdigest(b"abcdef"))
    assert os.listdir(tmp_path) == ["shard.bin"]


def test_a_file_is_on_the_disk_before_it_has_its_name_and_so_is_the_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = disk_events(monkeypatch)
    write_atomic(tmp_path / "x", b"data")
    inode, directory = (tmp_path / "x").stat().st_ino, tmp_path.stat().st_ino
    assert [event[:2] for event in seen] == [
        ("synced", inode),
        ("x", inode),
        ("synced", directory),
    ]
    assert seen[0][2] == 4  # all of it


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, b"old")
    with pytest.raises(TypeError):
        write_atomic(path, "new")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_full_disk_names_the_directory_and_the_free_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(ElectraError, match=r"disk is full: [\d,]+ bytes") as caught:
        write_atomic(tmp_path / "x", b"data")
    assert str(tmp_path) in caught.value.where
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_write_that_the_kernel_refuses_is_a_full_disk(tmp_path: Path) -> None:
    # The temporary name leads to /dev/full, where every write really fails with ENOSPC.
    (tmp_path / ".x.tmp").symlink_to("/dev/full")
    with pytest.raises(ElectraError, match="disk is full"):
        write_atomic(tmp_path / "x", b"data")
    assert os.listdir(tmp_path) == []


def test_a_missing_directory_is_an_error_to_act_on(tmp_path: Path) -> None:
    with pytest.raises(ElectraError, match="Cannot write") as caught:
        write_atomic(tmp_path / "none" / "x", b"")
    assert caught.value.fix


@given(st.binary(max_size=3000))
def test_digests_are_those_of_the_content(data: bytes) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        path = Path(file.name)
        assert xxh3_file(path) == xxhash.xxh3_128_hexdigest(data)
        assert sha256_file(path) == hashlib.sha256(data).hexdigest()


def test_json_is_canonical() -> None:
    assert json_bytes({"b": 1, "a": [1, "ü"]}) == '{"a":[1,"ü"],"b":1}'.encode()
    assert json_bytes({"a": 1}, indent=1) == b'{\n "a": 1\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_bytes(float("nan"))


def test_a_directory_has_one_writer_until_that_one_ends(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from electra.files import exclusive\n"
        "with exclusive(pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(files.__file__).parents[1],
    )
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ElectraError, match="Another process"), exclusive(tmp_path):
            pass
        holder.kill()
    with exclusive(tmp_path):
        pass
