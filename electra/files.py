"""Files that are either whole or absent, and the digests that prove it.

Comes in: bytes and the path they belong at. Goes out: a file that appears under its name only after
every byte is on the disk, so a crash or a full disk never leaves half a file that looks complete.
Each path has one writer at a time (see `exclusive`), which is why the temporary name is fixed: what
a killed process left behind is overwritten by the next one instead of piling up.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

import xxhash

from .errors import CorruptError, DiskFull, ElectraError

# Weights of 28 MB are for whoever has the checkout; a wheel is for those with a model of their own.
SHIPPED = Path(__file__).parents[1] / "models" / "small-en"
Bytes = bytes | bytearray | memoryview
# What parsing a file with unexpected content can raise.
UNFIT = (
    *(OSError, LookupError, TypeError, ValueError),
    *(AttributeError, ArithmeticError, RecursionError),
)


class AtomicFile:
    """A file that grows under a temporary name and takes its own name in `commit`.

    `size` and `xxh3` describe what was written so far, so that nothing has to be read back.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._digest = xxhash.xxh3_128()
        with storage_errors(path):
            self._file = open(self._temporary, "wb", buffering=0)  # noqa: SIM115

    @property
    def xxh3(self) -> str:
        return self._digest.hexdigest()

    def write(self, data: Bytes) -> None:
        rest = memoryview(data).cast("B") if len(data) else memoryview(b"")
        self._digest.update(rest)
        self.size += len(rest)
        with storage_errors(self.path):
            while rest:  # an unbuffered write may take only a part, close to a full disk
                rest = rest[self._file.write(rest) :]

    def commit(self) -> None:
        with storage_errors(self.path):
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._temporary, self.path)
            fsync_dir(self.path.parent)

    def close(self) -> None:
        """Leaves nothing behind, unless `commit` came before."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def write_atomic(path: Path, data: Bytes) -> None:
    """Writes a file so that a reader sees the old content or the new, never a mixture."""
    with closing(AtomicFile(path)) as file:
        file.write(data)
        file.commit()


def fsync_dir(path: Path) -> None:
    """Makes the names in a directory survive a power cut, as fsync does for a file's content."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def xxh3_file(path: Path) -> str:
    """xxh3-128 of a file as hex: fast enough (GB/s) to check every shard at every start."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 of a file as hex, where collisions on purpose matter."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_bytes(value: Any, *, indent: int | None = None) -> bytes:
    """Canonical JSON: sorted keys, UTF-8, no NaN; the same value always gives the same bytes.

    With `indent` it is for people to read, otherwise it has no white space and is fit for hashing.
    """
    form: dict[str, Any] = {"sort_keys": True, "ensure_ascii": False, "allow_nan": False}
    if indent is None:
        return json.dumps(value, separators=(",", ":"), **form).encode()
    return (json.dumps(value, indent=indent, **form) + "\n").encode()


def json_sha256(value: Any) -> str:
    """SHA-256 of a value's canonical JSON, as hex."""
    return hashlib.sha256(json_bytes(value)).hexdigest()


@contextmanager
def exclusive(directory: Path) -> Generator[None]:
    """Holds a directory for one process; the kernel lets go of it however the process ends."""
    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock = open(directory / ".lock", "wb")  # noqa: SIM115
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            what = "Another process is writing to this directory."
            raise ElectraError(what, directory, "wait, or choose another") from error
        yield


_FULL = {
    errno.ENOSPC: "The disk is full",
    errno.EDQUOT: "The disk quota is used up",
    errno.EFBIG: "The file may not become so large",
}


@contextmanager
def storage_errors(path: Path, needed: int | None = None) -> Generator[None]:
    """Turns what the operating system refuses into an error that names the place and the room.

    needed: bytes that were to be written, where they are known.
    """
    try:
        yield
    except (OSError, DiskFull) as raised:
        error = raised if isinstance(raised, OSError) else raised.__cause__
        assert isinstance(error, OSError)
        if full := _FULL.get(error.errno or 0):
            what = f"{full}: {shutil.disk_usage(existing(path.parent)).free:,} bytes are free"
            what += f", {needed:,} are needed." if needed else "."
            fix = "make room, then give the same command again: what is complete is kept"
            raise DiskFull(what, path, fix) from error
        fix = "check that the directory exists and may be written to"
        raise ElectraError(f"Cannot write: {error.strerror or error}.", path, fix) from error


def existing(path: Path) -> Path:
    """`path`, or the nearest of its parents that is there."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if os.path.lexists(p))


# What the file of each kind of directory says of it.
_MARKS = {
    "run.json": "a run of pre-training",
    "finetune.json": "a fine-tuning",
    "electra.json": "an exported model",
    "manifest.json": "a corpus",
}


def refuse_another(directory: Path, own: str) -> None:
    """Refuses a directory that is something else of ours than what has the file `own`: the two
    would mix, and overwrite each other's files."""
    for name, what in _MARKS.items():
        if name != own and (directory / name).is_file():
            fix = "choose another --out"
            raise ElectraError(f"There is {what} in this directory.", directory, fix)


def check_place(directory: Path) -> None:
    """Refuses a place where no directory can be made or written, before anything is read."""
    place = existing(directory)
    with storage_errors(directory):
        try:  # a file without a name: nothing stays, whenever the process is killed
            os.close(os.open(place, os.O_TMPFILE | os.O_WRONLY, 0o600))
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
                raise
            tempfile.TemporaryDirectory(prefix=".electra-", dir=place).cleanup()


def read_json(path: Path, *, fix: str = "restore it from a backup") -> dict[str, Any]:
    """The object in a JSON file, or an empty one if there is no such file."""
    try:
        values = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        what = f"The file cannot be read: {error.strerror}."
        raise ElectraError(what, path, "check the path") from error
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"The file is not valid JSON: {error}.", path, fix) from error
    if not isinstance(values, dict):
        raise CorruptError("The file holds no JSON object.", path, fix)
    return cast(dict[str, Any], values)


@contextmanager
def reading(path: Path, fix: str = "restore it from a backup") -> Generator[None]:
    """What goes wrong in the block is the fault of this file, whoever wrote it."""
    try:
        yield
    except UNFIT as error:
        what = f"The file cannot be read as what it should be: {type(error).__name__}: {error}."
        raise CorruptError(what, path, fix) from error


def shipped_model() -> Path:
    """The English model of a checkout, which is taken where no other is named."""
    if not (SHIPPED / "electra.json").is_file():
        fix = "name a model; or take electra from its repository, which has this one, and "
        fix += "install it from there with pip install --editable ."
        raise ElectraError("No model is named, and the English one is not here.", SHIPPED, fix)
    return SHIPPED
