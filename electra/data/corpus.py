"""Text to a corpus on disk.

Comes in: text files and a tokenizer. Goes out: a directory of token shards that is the same, byte
for byte, for any number of workers, any order of the inputs and any number of interruptions: pieces
of the text (`pieces.py`) are built in any number of processes and written in order. Full shards are
noted in `progress.json`; the same command goes on behind them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

from ..errors import ElectraError, Stopped
from ..files import AtomicFile, exclusive, json_bytes, json_sha256, reading, write_atomic, xxh3_file
from .cluster import build_in_order
from .pieces import PARTS, SHORT_PERCENT, Builder, BuiltPiece, Counts, Part, PieceBuilder, pieces_of
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
    short = float(SHORT_PERCENT.get(builder, 0.0) if short_percent is None else short_percent)
    settings = {
        "sequence_length": sequence_length,
        "builder": builder,
        "short_percent": short,
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
    with exclusive(out):
        if (out / "manifest.json").exists():
            return _complete(out, job)
        stats = TextStats()
        documents = read_documents(paths, column=column, stats=stats)
        pieces = pieces_of(documents, min(PIECE_CHARACTERS, shard_bytes), held_out_percent, seed)
        make = partial(PieceBuilder, tokenizer.to_json(), builder, sequence_length, seed, short)
        with closing(_Writer(out, job, max(1, shard_bytes // PIECE_CHARACTERS))) as writer:
            tokenizer.save(out / "tokenizer")
            tokens = sum(shard.counts.tokens for shard in writer.shards)
            to_do = (piece for piece in pieces if piece.number >= writer.next_piece[piece.part])
            with closing(build_in_order(to_do, make, workers, cluster, should_stop)) as done:
                for built in done:
                    writer.write(built)
                    tokens += built.counts.tokens
                    progress(
                        f"file {min(stats.files + 1, len(paths)):,} of {len(paths):,}, "
                        f"{stats.documents:,} documents, {tokens:,} tokens"
                    )
                    if should_stop():
                        raise Stopped
            return writer.finish(tokenizer, stats, described)


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
    digest, total = hashlib.sha256(b"["), 0  # of the JSON of all rows, without holding it
    files: list[dict[str, Any]] = []
    for i, path in enumerate(paths):
        size, version = state_of(path)
        digest.update((b"," if i else b"") + json_bytes([str(path), size, version]))
        total += size
        if i < 1000:
            files.append({"path": str(path), "size": size})
    digest.update(b"]")
    count = len(paths)
    return {"identity": digest.hexdigest(), "count": count, "bytes": total, "files": files}


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
        fix = "choose another --out, or delete the directory to prepare it anew"
        raise ElectraError(f"The directory holds another corpus: {'; '.join(changed)}.", out, fix)


class _Writer:
    """Writes built pieces in order; every `pieces_per_shard` of a part make a shard.

    `progress.json` has the job and its complete shards, which are not done a second time.
    """

    def __init__(self, out: Path, job: dict[str, Any], pieces_per_shard: int) -> None:
        self.out, self.job, self.pieces_per_shard = out, job, pieces_per_shard
        self.progress = out / "progress.json"
        self.shards: list[Shard] = []
        self.next_piece = Counter[Part]()
        self._open: dict[Part, tuple[list[AtomicFile], list[Counts]]] = {}  # what is not yet full
        if not self.progress.exists():
            self._note()
            return
        with reading(self.progress, "delete the directory and prepare it anew"):
            stored = json.loads(self.progress.read_bytes())
            if stored.pop("checksum") != json_sha256(stored):
                raise ValueError("their checksum is wrong")
            self.shards = [Shard.from_dict(shard) for shard in stored["shards"]]
            _same_job(out, job, stored["job"])
            for shard in self.shards:
                self.next_piece[shard.part] += shard.pieces
                for file in shard.files:
                    check_file(out, file, verify=True)

    def write(self, built: BuiltPiece) -> None:
        part = built.part
        if part not in self._open:
            number = sum(shard.part == part for shard in self.shards)
            names = (f"{part}-{number:05d}.{kind}.bin" for kind in ("tokens", "examples"))
            self._open[part] = [AtomicFile(self.out / name) for name in names], []
        files, counts = self._open[part]
        for file, data in zip(files, (built.tokens, built.examples), strict=True):
            file.write(data)
        counts.append(built.counts)
        if len(counts) == self.pieces_per_shard:
            self._complete(part)

    def finish(self, tokenizer: Tokenizer, stats: TextStats, inputs: dict[str, Any]) -> Manifest:
        """Makes shards of what is left, and a corpus of all shards."""
        for part in PARTS:
            if part in self._open:
                self._complete(part)
        manifest = Manifest(
            settings=self.job["settings"],
            vocab_size=tokenizer.vocab_size,
            special_ids=tokenizer.special_names,
            tokenizer_hash=tokenizer.hash,
            tokenizer_files=tuple(
                FileSum(path.name, path.stat().st_size, xxh3_file(path))
                for path in _listing(self.out / "tokenizer")
            ),
            shards=tuple(s for part in PARTS for s in self.shards if s.part == part),
            text=asdict(stats),
            inputs=inputs,
        )
        if not manifest.counts("train").examples:
            what = "The text gives no example: the tokenizer finds no token in it."
            where, fix = inputs["files"][0]["path"], "check that tokenizer and text belong together"
            raise ElectraError(what, where, fix)
        write_atomic(self.out / "manifest.json", json_bytes(manifest.to_dict(), indent=1))
        self.progress.unlink()
        return manifest

    def close(self) -> None:
        """Drops the shards that are not full."""
        for file in (file for files, _ in self._open.values() for file in files):
            file.close()

    def _complete(self, part: Part) -> None:
        files, counts = self._open[part]
        for file in files:
            file.commit()
        sums = (FileSum(file.path.name, file.size, file.xxh3) for file in files)
        self.shards.append(Shard(part, len(counts), sum(counts, Counts()), *sums))
        self._note()
        del self._open[part]

    def _note(self) -> None:
        content = {"job": self.job, "shards": [asdict(shard) for shard in self.shards]}
        signed = {**content, "checksum": json_sha256(content)}
        write_atomic(self.progress, json_bytes(signed, indent=1))
