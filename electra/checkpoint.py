"""Checkpoints: safetensors and JSON in one directory per step, whole or absent.

    checkpoints/step-00001000/model.safetensors      parameters, float32
                              optimizer.safetensors  Adam's moments and the running meters
                              state.json             step, seconds trained, what belongs together
                              MANIFEST.json          size and SHA-256 of each, and its own

A checkpoint is written beside its final name, synced to the disk, renamed, and only then are old
ones pruned; a crash at any point leaves the newest complete one in place. Loading verifies every
byte, walks from the newest to the oldest, and sets damaged ones aside under another name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .errors import CorruptError, ElectraError, NumericError
from .files import fsync_dir, json_bytes, sha256_file, storage_errors, write_atomic

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")
Tensors = dict[str, dict[str, Tensor]]  # file -> name -> tensor


@dataclass(frozen=True)
class Checkpoint:
    """What one verified checkpoint holds."""

    path: Path
    step: int
    tensors: Tensors
    state: dict[str, Any]


class Saver:
    """Writes checkpoints of one run; the writing happens in a thread beside the training."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self.directory, self.keep = directory, keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        with storage_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        for left_over in directory.glob(".tmp-*"):
            shutil.rmtree(left_over)

    def save(self, step: int, tensors: Tensors, state: dict[str, Any]) -> None:
        """Take a copy of everything now and write it in the background.

        Waits for the save before it. A state with a non-finite number is refused.
        """
        self.wait()
        copies: Tensors = {
            file: {name: t.detach().to("cpu", copy=True) for name, t in group.items()}
            for file, group in tensors.items()
        }
        for file, group in copies.items():
            for name, tensor in group.items():
                if not torch.isfinite(tensor).all():
                    raise NumericError(
                        f"{name} is not finite, so nothing was saved.",
                        where=f"{self.directory}, step {step}, {file}",
                        fix="continue from the checkpoint before with a lower learning rate",
                    )
        self._thread = threading.Thread(target=self._write, args=(step, copies, state))
        self._thread.start()

    def wait(self) -> None:
        """Until the save under way is on the disk; raises what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, step: int, tensors: Tensors, state: dict[str, Any]) -> None:
        try:
            write_checkpoint(self.directory, step, tensors, state)
            self._prune()
        except BaseException as error:
            self._error = error

    def _prune(self) -> None:
        for path in _steps(self.directory)[self.keep :]:
            fault_point("before_prune")
            # Renamed first, so that a crash in the middle never leaves half a checkpoint by name.
            doomed = path.with_name(f".tmp-pruned-{path.name}")
            os.replace(path, doomed)
            fault_point("during_prune")
            shutil.rmtree(doomed)


def write_checkpoint(directory: Path, step: int, tensors: Tensors, state: dict[str, Any]) -> Path:
    """Write one checkpoint and return its path; it appears under its name only when complete."""
    final = directory / f"step-{step:08d}"
    if final.is_dir():  # saved a moment ago, then asked to stop: never take down what is complete
        return final
    temporary = directory / f".tmp-{final.name}"
    with storage_errors(final):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        fault_point("after_mkdir")
        files: dict[str, dict[str, Any]] = {}
        for file, group in tensors.items():
            path = temporary / f"{file}.safetensors"
            try:
                save_file(group, path, metadata={"format": "pt"})
            except SafetensorError as error:  # a full disk arrives here, without its number
                raise OSError(28 if "space" in str(error) else 5, str(error)) from error
            _sync(path)
            fault_point(f"after_{file}")
            files[path.name] = _describe(path)
        path = temporary / "state.json"
        write_atomic(path, json_bytes({**state, "step": step}, indent=1))
        files[path.name] = _describe(path)
        fault_point("before_manifest")
        manifest: dict[str, Any] = {"format": FORMAT, "step": step, "files": files}
        manifest["checksum"] = _checksum(manifest)
        write_atomic(temporary / "MANIFEST.json", json_bytes(manifest, indent=1))
        fsync_dir(temporary)
        fault_point("before_rename")
        os.replace(temporary, final)
        fault_point("after_rename")
        fsync_dir(directory)
        fault_point("after_sync")
    return final


def load_newest(
    directory: Path, *, warn: Callable[[str], object] = print, set_aside: bool = True
) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None if there is none at all.

    Damaged ones are renamed to damaged-step-… with a warning, unless the caller only reads
    (`set_aside` false). If there were checkpoints and none is good, that is an error: training
    must not silently start again from nothing.
    """
    for path in _steps(directory):
        try:
            return read_checkpoint(path)
        except CorruptError as error:
            if not set_aside:
                warn(f"checkpoint {path.name} is damaged ({error.what}), an older one is taken")
                continue
            aside = path.with_name(f"damaged-{path.name}")
            number = 1
            while aside.exists():
                number += 1
                aside = path.with_name(f"damaged-{path.name}-{number}")
            os.replace(path, aside)
            warn(f"checkpoint {path.name} is damaged ({error.what}) and was kept as {aside.name}")
    if damaged := sorted(path.name for path in directory.glob("damaged-step-*")):
        raise CorruptError(
            "No checkpoint is intact.",
            where=f"{directory}: {', '.join(damaged)}",
            fix="restore one from a backup, or start a new run in another directory",
        )
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`; raises CorruptError if a single byte is not as written."""

    def damaged(what: str) -> CorruptError:
        return CorruptError(what, where=str(path), fix="use an older checkpoint")

    try:
        manifest = json.loads((path / "MANIFEST.json").read_bytes())
        if manifest.pop("checksum") != _checksum(manifest):
            raise damaged("its manifest does not match its own checksum")
        files, step = manifest["files"], int(manifest["step"])
        if manifest["format"] != FORMAT:
            raise ElectraError(
                f"The checkpoint has format {manifest['format']}, this program writes {FORMAT}.",
                where=str(path),
                fix="use the version of electra that wrote it",
            )
        if f"step-{step:08d}" != path.name.removeprefix("damaged-"):
            raise damaged(f"its manifest is that of step {step}")
        if "state.json" not in files or "model.safetensors" not in files:
            raise damaged("its manifest lacks files")
        for name, entry in files.items():
            if Path(name).name != name or name.startswith("."):
                raise damaged(f"its manifest names {name!r}")
            if (path / name).stat().st_size != entry["size"]:
                raise damaged(f"{name} has the wrong size")
            if sha256_file(path / name) != entry["sha256"]:
                raise damaged(f"{name} does not match its checksum")
        tensors = {
            name.removesuffix(".safetensors"): load_file(path / name)
            for name in files
            if name.endswith(".safetensors")
        }
        state = json.loads((path / "state.json").read_bytes())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise damaged(f"{type(error).__name__}: {error}") from error
    return Checkpoint(path, step, tensors, state)


def fault_point(name: str) -> None:
    """Dies here, without cleaning up, when a test asks for it by ELECTRA_FAULT=name[:count]."""
    wanted, _, count = os.environ.get("ELECTRA_FAULT", "").partition(":")
    if wanted == name:
        if count and int(count) > 1:
            os.environ["ELECTRA_FAULT"] = f"{name}:{int(count) - 1}"
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def _steps(directory: Path) -> list[Path]:
    """Checkpoints by name, newest first; none where there is no directory yet."""
    if not directory.is_dir():
        return []
    found = [(int(m[1]), p) for p in directory.iterdir() if (m := _NAME.fullmatch(p.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _checksum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json_bytes(manifest)).hexdigest()


def _describe(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": sha256_file(path)}


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
