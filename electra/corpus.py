"""Text to a corpus on disk.

Comes in: text files and a tokenizer. Goes out: a directory of token shards that is the same, byte
for byte, for any number of workers, any order of the inputs and any number of interruptions: pieces
of the text (`pieces.py`) are built in any number of processes and written in order. Full shards are
noted in `progress.json`; the same command goes on behind them.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from multiprocessing import connection, get_context, parent_process
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast, get_args

from .cluster import Submit, connect
from .errors import ElectraError, LostWorker, Stopped
from .files import AtomicFile, exclusive, json_bytes, json_sha256, reading, write_atomic, xxh3_file
from .pieces import (
    PARTS,
    SHORT_PERCENT,
    Builder,
    BuiltPiece,
    Counts,
    Part,
    Piece,
    PieceBuilder,
    cut_pieces,
    divide,
)
from .shards import Corpus, Examples, FileSum, Manifest, Shard, check_file
from .sources import receive
from .text import Source, TextStats, expand_inputs, read_documents, state_of
from .tokenizer import Tokenizer

__all__ = ["Corpus", "Examples", "Manifest", "prepare"]

PIECE_CHARACTERS = 1 << 20


def prepare(
    inputs: Sequence[str | Path],
    tokenizer: Tokenizer,
    out: Path,
    *,
    sequence_length: int = 128,
    builder: Builder = "packed",
    short_percent: float | None = None,
    held_out_percent: float = 1.0,
    seed: int = 0,
    workers: int | None = None,
    cluster: str | None = None,
    column: str = "text",
    shard_bytes: int = 256 << 20,
    progress: Callable[[str], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Manifest:
    """Prepares a corpus in `out`, or goes on where an earlier call with the same arguments ended.

    `short_percent` of the sequences get a random shorter length, by default as many as
    SHORT_PERCENT says of the builder. `workers` processes encode (all cores by default; 1 works in
    this process), or as many tasks on the Ray cluster at the address `cluster` (all its CPUs by
    default); `shard_bytes` is the text, in characters, behind one shard. Raises `Stopped` soon
    after `should_stop` says so; full shards are kept.
    """
    if short_percent is None:
        short_percent = SHORT_PERCENT.get(builder, 0.0)
    settings = {
        "sequence_length": sequence_length,
        "builder": builder,
        "short_percent": float(short_percent),
        "held_out_percent": float(held_out_percent),
        "seed": seed,
        "column": column,
        "shard_bytes": shard_bytes,
    }
    _check_settings({**settings, "workers": workers})
    out = Path(out)
    _refuse_foreign(out)
    paths = expand_inputs(receive(inputs, out, should_stop))
    described = _describe(paths)
    job = {"settings": settings, "tokenizer": tokenizer.hash, "inputs": described["identity"]}
    with exclusive(out), _single_threaded_tokenizers():
        if (out / "manifest.json").exists():
            return _complete(out, job)
        journal = _Journal(out, job)
        tokenizer.save(out / "tokenizer")
        stats = TextStats()
        documents = read_documents(paths, column=column, stats=stats)
        parts = divide(documents, held_out_percent, seed)
        pieces = cut_pieces(parts, min(PIECE_CHARACTERS, shard_bytes))
        per_shard = max(1, shard_bytes // PIECE_CHARACTERS)
        writers: dict[Part, _PartWriter] = {p: _PartWriter(p, journal, per_shard) for p in PARTS}
        to_do = (piece for piece in pieces if piece.number >= writers[piece.part].next_piece)
        make = partial(
            PieceBuilder, tokenizer.to_json(), builder, sequence_length, seed, short_percent
        )
        if cluster is None:
            place = _processes(make, workers or len(os.sched_getaffinity(0)))
        else:
            place = connect(cluster, make, workers, should_stop)
        tokens = sum(shard.counts.tokens for shard in journal.shards)
        try:
            with place as (submit, count):
                for built in _build_in_order(to_do, submit, count):
                    writers[built.part].write(built)
                    tokens += built.counts.tokens
                    progress(
                        f"file {min(stats.files + 1, len(paths)):,} of {len(paths):,}, "
                        f"{stats.documents:,} documents, {tokens:,} tokens"
                    )
                    if should_stop():
                        raise Stopped
            for writer in writers.values():
                writer.close_shard()
        finally:
            for writer in writers.values():
                writer.close()
        manifest = Manifest(
            settings=settings,
            vocab_size=tokenizer.vocab_size,
            special_ids=tokenizer.special_names,
            tokenizer_hash=tokenizer.hash,
            tokenizer_files=tuple(
                FileSum(path.name, path.stat().st_size, xxh3_file(path))
                for path in _listing(out / "tokenizer")
            ),
            shards=tuple(shard for writer in writers.values() for shard in writer.shards),
            text=asdict(stats),
            inputs=described,
        )
        if not manifest.counts("train").examples:
            what = "The text gives no example: the tokenizer finds no token in it."
            raise ElectraError(what, paths[0], "check that tokenizer and text belong together")
        write_atomic(out / "manifest.json", json_bytes(manifest.to_dict(), indent=1))
        journal.path.unlink()
        return manifest


def _check_settings(given: dict[str, Any]) -> None:
    rules = {
        "sequence_length": (5 <= given["sequence_length"] < 1 << 16, "5 to 65,535"),
        "builder": (given["builder"] in get_args(Builder), " or ".join(get_args(Builder))),
        "short_percent": (0 <= given["short_percent"] <= 100, "0 to 100"),
        "held_out_percent": (0 <= given["held_out_percent"] <= 50, "0 to 50"),
        "shard_bytes": (given["shard_bytes"] >= 1, "a positive number"),
        "workers": (given["workers"] is None or given["workers"] >= 1, "1 or more"),
    }
    for name, (holds, fix) in rules.items():
        if not holds:
            raise ElectraError(f"{name} is {given[name]}.", name, f"use {fix}")


def _describe(paths: list[Source]) -> dict[str, Any]:
    """The input files: a digest that notices changes, and the first of them by name."""
    rows = [(str(path), *state_of(path)) for path in paths]
    return {
        "identity": json_sha256(rows),
        "count": len(rows),
        "bytes": sum(size for _, size, _ in rows),
        "files": [{"path": path, "size": size} for path, size, _ in rows[:1000]],
    }


def _listing(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if not path.name.startswith("."))


def _refuse_foreign(out: Path) -> None:
    what = ""
    if out.exists() and not out.is_dir():
        what = "There is a file in the way."
    elif out.exists() and not any((out / n).exists() for n in ("manifest.json", "progress.json")):
        names = [path.name for path in _listing(out) if path.name != "stdin.txt"]
        others = ", ".join(names[:3])
        what = f"The directory is not empty and holds no corpus: {others}." if others else ""
    if what:
        raise ElectraError(what, out, "choose another --out")


def _complete(out: Path, job: dict[str, Any]) -> Manifest:
    manifest = Corpus.open(out, verify=False).manifest
    tokenizer, inputs = manifest.tokenizer_hash, manifest.inputs["identity"]
    _same_job(out, job, {"settings": manifest.settings, "tokenizer": tokenizer, "inputs": inputs})
    (out / "progress.json").unlink(missing_ok=True)  # a kill can come just before this
    return manifest


def _same_job(out: Path, job: dict[str, Any], begun: dict[str, Any]) -> None:
    """Refuses to go on with something else than what was begun."""
    changed = [
        f"{name} was {begun['settings'].get(name)} and is now {value}"
        for name, value in job["settings"].items()
        if begun["settings"].get(name) != value
    ]
    if begun["tokenizer"] != job["tokenizer"]:
        changed.append("the tokenizer is another")
    if begun["inputs"] != job["inputs"]:
        changed.append("the input files are others or were changed")
    if changed:
        what = f"The directory holds another corpus: {'; '.join(changed)}."
        fix = "choose another --out, or delete the directory to prepare it anew"
        raise ElectraError(what, out, fix)


class _Journal:
    """`progress.json`: the job and its complete shards, which are not done a second time."""

    def __init__(self, out: Path, job: dict[str, Any]) -> None:
        self.out, self.job, self.path = out, job, out / "progress.json"
        self.shards: list[Shard] = []
        if not self.path.exists():
            self._write()
            return
        with reading(self.path, "delete the directory and prepare it anew"):
            stored = json.loads(self.path.read_bytes())
            if stored.pop("checksum") != json_sha256(stored):
                raise ValueError("their checksum is wrong")
            self.shards = [Shard.from_dict(shard) for shard in stored["shards"]]
            _same_job(out, job, stored["job"])
            for file in (file for shard in self.shards for file in shard.files):
                check_file(out, file, verify=True)

    def add(self, shard: Shard) -> None:
        self.shards.append(shard)
        self._write()

    def _write(self) -> None:
        content = {"job": self.job, "shards": [asdict(shard) for shard in self.shards]}
        signed = {**content, "checksum": json_sha256(content)}
        write_atomic(self.path, json_bytes(signed, indent=1))


class _PartWriter:
    """Writes the pieces of one part in order; every `pieces_per_shard` of them make a shard."""

    def __init__(self, part: Part, journal: _Journal, pieces_per_shard: int) -> None:
        self.part: Part = part
        self.journal, self.pieces_per_shard = journal, pieces_per_shard
        self.shards = [shard for shard in journal.shards if shard.part == part]
        self.next_piece = sum(shard.pieces for shard in self.shards)
        self._files: list[AtomicFile] = []  # of the shard that is not full: tokens, examples
        self._pieces, self._counts = 0, Counts()

    def write(self, built: BuiltPiece) -> None:
        if not self._files:
            stem = f"{self.journal.out}/{self.part}-{len(self.shards):05d}"
            self._files = [AtomicFile(Path(f"{stem}.{n}.bin")) for n in ("tokens", "examples")]
        for file, data in zip(self._files, (built.tokens, built.examples), strict=True):
            file.write(data)
        self._pieces += 1
        self._counts += built.counts
        if self._pieces == self.pieces_per_shard:
            self.close_shard()

    def close_shard(self) -> None:
        if not self._files:
            return
        for file in self._files:
            file.commit()
        sums = (FileSum(file.path.name, file.size, file.xxh3) for file in self._files)
        shard = Shard(self.part, self._pieces, self._counts, *sums)
        self.shards.append(shard)
        self.journal.add(shard)
        self._files, self._pieces, self._counts = [], 0, Counts()

    def close(self) -> None:
        """Drops a shard that is not full."""
        for file in self._files:
            file.close()


def _build_in_order(pieces: Iterator[Piece], submit: Submit, workers: int) -> Iterator[BuiltPiece]:
    """Built pieces in the order of `pieces`, with only a few of them in memory."""
    running: deque[Callable[[], BuiltPiece]] = deque()
    for piece in pieces:
        running.append(submit(piece))
        if len(running) > 2 * workers:
            yield running.popleft()()
    while running:
        yield running.popleft()()


@contextmanager
def _processes(make: partial[PieceBuilder], workers: int) -> Generator[tuple[Submit, int]]:
    """What hands a piece to a process of this machine, and how many there are."""
    if workers == 1:
        build = make()
        yield (lambda piece: partial(build, piece)), 0
        return
    # Processes are spawned: a fork would copy the threads and devices of whoever calls this.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (make,))
    try:
        yield (lambda piece: pool.submit(_build_in_worker, piece).result), workers
    except BrokenProcessPool as error:
        what = "A worker process ended by itself, most likely for want of memory."
        fix = "give the same command again: full shards are kept; "
        raise LostWorker(what, "workers", fix + "with fewer workers if that repeats") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: PieceBuilder | None = None


def _start_worker(make: Callable[[], PieceBuilder]) -> None:
    global _worker
    # Ctrl-C reaches the whole process group, but only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = make()


def _end_with_parent() -> None:
    """A killed parent cannot end its workers, and they would wait for work for ever."""
    connection.wait([cast(BaseProcess, parent_process()).sentinel])
    os._exit(1)


def _build_in_worker(piece: Piece) -> BuiltPiece:
    return cast(PieceBuilder, _worker)(piece)


@contextmanager
def _single_threaded_tokenizers() -> Generator[None]:
    """`workers` is the number of cores in use: the library must not start threads of its own."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
