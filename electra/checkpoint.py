"""Checkpoints: safetensors and JSON in one directory per step, whole or absent.

    checkpoints/step-00001000/model.safetensors      parameters, float32
                              optimizer.safetensors  Adam's moments and the running meters
                              average.safetensors    of the parameters, if asked for (optim.average)
                              state.json             step, seconds trained, what belongs together
                              MANIFEST.json          size and SHA-256 of each, and its own

A checkpoint is written beside its final name, synced to the disk, renamed, and only then are old
ones pruned; a crash at any point leaves the newest complete one in place. Loading verifies every
byte, walks from the newest to the oldest, and sets damaged ones aside under another name.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .errors import CorruptError, DiskFull, ElectraError, NumericError
from .files import (
    UNFIT,
    fsync_dir,
    json_bytes,
    json_sha256,
    sha256_file,
    storage_errors,
    write_atomic,
)

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")
_PIECE = 16 * 2**20  # bytes that are on their way from a GPU at once
Tensors = dict[str, dict[str, Tensor]]  # file -> name -> tensor


@dataclass(frozen=True)
class Checkpoint:
    """What one verified checkpoint holds."""

    step: int
    tensors: Tensors
    state: dict[str, Any]


class Saver:
    """Writes checkpoints of one run; the writing happens in a thread beside the training."""

    def __init__(self, directory: Path, *, keep: int, keep_every: int | None = None) -> None:
        """Of older ones than the newest `keep`, only the multiples of `keep_every` stay."""
        self.directory, self.keep, self.keep_every = directory, keep, keep_every
        # Called when there is no room; the save is tried again when it returns.
        self.on_full: Callable[[DiskFull], object] | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._copies: dict[int, Tensor] = {}  # place of a buffer -> its bytes
        self._stage = torch.empty(0, dtype=torch.uint8)  # pinned, where the buffers are on a GPU
        with storage_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        for left_over in directory.glob(".tmp-*"):
            shutil.rmtree(left_over)

    def save(self, step: int, tensors: Tensors, state: dict[str, Any]) -> None:
        """Take a copy of everything now, on its device, and write it in the background.

        Waits for the save before it. A non-finite number is an error, raised by the next `wait`.
        """
        self.wait()
        # Whole buffers are copied, a few long ones, and taken apart in the thread: many copies
        # would hold up the training for longer than a step.
        buffers = self.reserve(tensors)
        for place, copy in self._copies.items():
            copy.copy_(buffers[place], non_blocking=True)
        copies, ready = self._copies, None
        if any(buffer.is_cuda for buffer in copies.values()):
            ready = torch.cuda.Event()  # nobody waits here: the copy is made when its turn comes
            ready.record()
        arguments = (step, tensors, copies, ready, state)
        self._thread = threading.Thread(target=self._write, args=arguments)
        self._thread.start()

    def reserve(self, tensors: Tensors) -> dict[int, Tensor]:
        """Allocate the copies, which are reused by every save; returns the buffers by address.

        Called before training begins: a driver busy with allocation launches no step.
        """
        storages = {t.untyped_storage() for group in tensors.values() for t in group.values()}
        buffers = {storage.data_ptr(): _whole(storage) for storage in storages}
        sizes = {place: len(buffer) for place, buffer in buffers.items()}
        if {place: len(copy) for place, copy in self._copies.items()} != sizes:
            self._copies = {place: torch.empty_like(b) for place, b in buffers.items()}
        if not len(self._stage) and any(buffer.is_cuda for buffer in buffers.values()):
            self._stage = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)
        return buffers

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way, or waits for room on the disk."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until the save under way is on the disk; raises what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(
        self,
        step: int,
        tensors: Tensors,
        copies: dict[int, Tensor],
        ready: torch.cuda.Event | None,
        state: dict[str, Any],
    ) -> None:
        _short_turns.begin()
        try:
            if ready is not None:
                device = next(b.device for b in copies.values() if b.is_cuda)
                with torch.cuda.stream(torch.cuda.Stream(device)):  # beside the training
                    ready.synchronize()
                    copies = {place: _to_host(b, self._stage) for place, b in copies.items()}

            def copied(t: Tensor) -> Tensor:
                storage = copies[t.untyped_storage().data_ptr()].untyped_storage()
                view = torch.empty(0, dtype=t.dtype)
                return view.set_(storage, t.storage_offset(), t.shape, t.stride()).contiguous()

            tensors = {f: {n: copied(t) for n, t in g.items()} for f, g in tensors.items()}
            for name, tensor in (item for group in tensors.values() for item in group.items()):
                if not torch.isfinite(tensor).all():
                    what = f"{name} is not finite, so nothing was saved."
                    fix = "continue from the checkpoint before with a lower learning rate"
                    raise NumericError(what, f"{self.directory}, step {step}", fix)
            while True:
                try:
                    write_checkpoint(self.directory, step, tensors, state)
                    break
                except DiskFull as full:
                    if self.on_full is None:
                        raise
                    self.on_full(full)
            self._prune()
        except BaseException as error:
            self._error = error
        finally:
            _short_turns.end()

    def _prune(self) -> None:
        for step, path in [*saved_steps(self.directory).items()][self.keep :]:
            if self.keep_every is not None and step % self.keep_every == 0:
                continue
            fault_point("before_prune")
            # Renamed first, so that a crash in the middle never leaves half a checkpoint by name.
            doomed = path.with_name(f".tmp-pruned-{path.name}")
            with storage_errors(path), contextlib.suppress(FileNotFoundError):  # deleted already
                os.replace(path, doomed)
            fault_point("during_prune")
            shutil.rmtree(doomed, ignore_errors=True)


class _ShortTurns:
    """While any save is written: the training asks for Python's lock at every step and would wait
    5 ms for it each time. Saves of several seeds overlap: the last one puts back what was there."""

    def __init__(self) -> None:
        self._lock, self._saves, self._before = threading.Lock(), 0, 0.0

    def begin(self) -> None:
        with self._lock:
            if self._saves == 0:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, 2e-4))
            self._saves += 1

    def end(self) -> None:
        with self._lock:
            self._saves -= 1
            if self._saves == 0:
                sys.setswitchinterval(self._before)


_short_turns = _ShortTurns()


def _to_host(buffer: Tensor, stage: Tensor) -> Tensor:
    """`buffer` (n,) in the host's memory, by way of `stage`, a little of it that is pinned.

    A direct copy into unpinned memory would hold the driver until it ends, and no other thread
    could launch a step meanwhile.
    """
    host = torch.empty(buffer.shape, dtype=buffer.dtype)
    for source, goal in zip(buffer.split(len(stage)), host.split(len(stage)), strict=True):
        stage[: len(source)].copy_(source, non_blocking=True)
        if buffer.is_cuda:
            arrived = torch.cuda.Event(blocking=True)
            arrived.record()
            arrived.synchronize()
        goal.copy_(stage[: len(source)])
    return host


def _whole(storage: torch.UntypedStorage) -> Tensor:
    """Its bytes as a tensor: copying the storage itself would hold Python's lock (GIL)."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def write_checkpoint(directory: Path, step: int, tensors: Tensors, state: dict[str, Any]) -> Path:
    """Write one checkpoint and return its path; it appears under its name only when complete."""
    final = directory / f"step-{step:08d}"
    if final.is_dir():  # saved a moment ago, then asked to stop: never take down what is complete
        return final
    temporary = directory / f".tmp-{final.name}"
    with storage_errors(final, needed=size_of(tensors)), _no_half(temporary):
        temporary.mkdir(parents=True)
        fault_point("after_mkdir")
        for file, group in tensors.items():
            path = temporary / f"{file}.safetensors"
            try:
                save_file(group, path, metadata={"format": "pt"})
            except SafetensorError as error:  # a full disk arrives here, its number in the text
                number = re.search(r"os error (\d+)", str(error))
                code = int(number[1]) if number else errno.EIO
                raise OSError(code, os.strerror(code)) from error
            fault_point(f"unsynced_{file}")
            with open(path, "rb") as written:
                os.fsync(written.fileno())
            # safetensors lets the owner alone read; what the umask leaves is seen at the directory.
            path.chmod(temporary.stat().st_mode & 0o666)
            fault_point(f"after_{file}")
        write_atomic(temporary / "state.json", json_bytes({**state, "step": step}, indent=1))
        fault_point("before_manifest")
        files = {
            path.name: {"size": path.stat().st_size, "sha256": sha256_file(path)}
            for path in temporary.iterdir()
        }
        manifest: dict[str, Any] = {"format": FORMAT, "step": step, "files": files}
        manifest["checksum"] = json_sha256(manifest)
        write_atomic(temporary / "MANIFEST.json", json_bytes(manifest, indent=1))
        fault_point("after_manifest")
        fsync_dir(temporary)
        fault_point("before_rename")
        os.replace(temporary, final)
        fault_point("after_rename")
        fsync_dir(directory)
        fault_point("after_sync")
    return final


@contextlib.contextmanager
def _no_half(temporary: Path) -> Generator[None]:
    """Removes what an earlier attempt left, and what this one wrote if it fails."""
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        yield
    except (OSError, ElectraError):
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def size_of(tensors: Tensors) -> int:
    """Bytes that the tensors of a checkpoint take on the disk, its small files left out."""
    return sum(t.nbytes for group in tensors.values() for t in group.values())


def load_newest(
    directory: Path, *, warn: Callable[[str], object] = print, set_aside: bool = True
) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None if there is none at all.

    Damaged ones are renamed to damaged-step-… with a warning, unless the caller only reads
    (`set_aside` false). If there were checkpoints and none is good, that is an error: training
    must not silently start again from nothing.
    """
    damaged = set(directory.glob("damaged-step-*"))
    for path in saved_steps(directory).values():
        try:
            return read_checkpoint(path)
        except CorruptError as error:
            outcome, aside = "an older one is looked for", path
            if set_aside:
                aside, number = path.with_name(f"damaged-{path.name}"), 2
                while aside.exists():
                    aside, number = path.with_name(f"damaged-{path.name}-{number}"), number + 1
                os.replace(path, aside)
                outcome = f"kept as {aside.name}"
            damaged.add(aside)
            warn(f"checkpoint {path.name} is damaged ({error.what}): {outcome}")
    if damaged:
        where = f"{directory}: {', '.join(sorted(path.name for path in damaged))}"
        fix = "restore one from a backup, or start a new run in another directory"
        raise CorruptError("No checkpoint is intact.", where, fix)
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`; raises CorruptError if a single byte is not as written."""
    older = "use an older checkpoint"

    def require(holds: bool, otherwise: str) -> None:
        if not holds:
            raise CorruptError(otherwise, path, older)

    try:
        manifest = json.loads((path / "MANIFEST.json").read_bytes())
        checksum = manifest.pop("checksum")
        require(checksum == json_sha256(manifest), "its manifest does not match its own checksum")
        files, step, form = manifest["files"], int(manifest["step"]), manifest["format"]
        if form != FORMAT:
            what = f"The checkpoint has format {form}, this program writes {FORMAT}."
            raise ElectraError(what, path, "use the electra that wrote it")
        name = path.name.removeprefix("damaged-")
        require(name == f"step-{step:08d}", f"its manifest is that of step {step}")
        require({"state.json", "model.safetensors"} <= files.keys(), "its manifest lacks files")
        for name, entry in files.items():
            is_plain = Path(name).name == name and not name.startswith(".")
            require(is_plain, f"its manifest names {name!r}")
            require((path / name).stat().st_size == entry["size"], f"{name} has the wrong size")
            require(sha256_file(path / name) == entry["sha256"], f"{name} has the wrong checksum")
        tensors = {
            name.removesuffix(".safetensors"): load_file(path / name)
            for name in files
            if name.endswith(".safetensors")
        }
        state = json.loads((path / "state.json").read_bytes())
        require(isinstance(state, dict), "its state.json holds no object")
    except UNFIT as error:
        missing = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
        if isinstance(error, OSError) and not isinstance(error, missing):
            # The disk, the network or a limit of the process: the bytes may be as written.
            what = f"A checkpoint could not be read: {error.strerror or error}."
            fix = "find out why, then give the same command again; nothing was changed"
            raise ElectraError(what, where=path, fix=fix) from error
        raise CorruptError(f"{type(error).__name__}: {error}", path, older) from error
    except SafetensorError as error:
        raise CorruptError(f"the tensors cannot be read: {error}", path, older) from error
    return Checkpoint(step, tensors, state)


def fault_point(name: str) -> None:
    """Dies here, without cleaning up, when a test asks for it by ELECTRA_FAULT=name[:count]."""
    wanted, _, count = os.environ.get("ELECTRA_FAULT", "").partition(":")
    if wanted == name:
        if count and int(count) > 1:
            os.environ["ELECTRA_FAULT"] = f"{name}:{int(count) - 1}"
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def has_any(directory: Path) -> bool:
    """Whether a checkpoint was ever saved there, damaged ones among them."""
    return any(not path.name.startswith(".") for path in directory.glob("*step-*"))


def saved_steps(directory: Path) -> dict[int, Path]:
    """Checkpoints by their step, newest first; none where there is no directory yet."""
    if not directory.is_dir():
        return {}
    found = {int(m[1]): p for p in directory.iterdir() if (m := _NAME.fullmatch(p.name))}
    return dict(sorted(found.items(), reverse=True))
