"""The corpus on disk: what its files hold, and the reader that training uses.

Comes in: a directory written by `corpus.prepare`. Goes out: examples by their number, gathered from
memory-mapped files, so that a corpus may be larger than memory. The manifest holds size and xxh3 of
every file; nothing is read that does not match it.

    train-00000.tokens.bin     tokens of all examples back to back with [CLS] and [SEP], no padding:
                               uint16, or uint32 for a vocabulary over 65,536, little endian
    train-00000.examples.bin   per example two uint16: its length, and the length of its segment 0
                               ([CLS] A [SEP]; equal to the length where there is no segment 1)
    held-out-00000.*           the same for documents that are kept from training
    tokenizer/                 the tokenizer, as transformers loads it
    manifest.json              settings, counts, size and xxh3 of every file; written last
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CorruptError, ElectraError
from ..files import json_bytes, json_sha256, reading, xxh3_file
from .pieces import PARTS, Counts, Part, token_dtype

FORMAT = 1
_FIX = "prepare the corpus again, or copy it again"


class Corpus:
    """A prepared corpus, checked when it is opened, but for what that was asked to leave."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.fingerprint = manifest.fingerprint
        self.tokenizer_hash = manifest.tokenizer_hash
        self.tokenizer_dir = path / "tokenizer"
        self.vocab_size = manifest.vocab_size
        self.sequence_length: int = manifest.settings["sequence_length"]
        self.special_ids = manifest.special_ids
        self.train, self.held_out = (Examples(path, manifest, part) for part in PARTS)
        self.unchecked: tuple[FileSum, ...] = ()  # whose content somebody has yet to `check`

    @property
    def whole(self) -> Examples:
        """The examples of all documents, those for training first."""
        return Examples(self.path, self.manifest, *PARTS)

    @classmethod
    def open(cls, path: Path, *, verify: bool = True, defer: bool = False) -> Corpus:
        """Checks names and sizes of all files and, with `verify`, every byte of them.

        defer: the content of the tokens, nearly all there is to read, is left to the caller: they
        are `unchecked`. The tables of the examples are read here, and therefore checked.
        """
        path = Path(path)
        try:
            stored = (path / "manifest.json").read_bytes()
        except OSError as error:
            what, fix = "There is no corpus here.", "check the path"
            if (path / "progress.json").exists():
                what, fix = "The corpus is not complete.", "give the same `prepare` command again"
            raise ElectraError(what, path, fix) from error
        with reading(path / "manifest.json", _FIX):
            manifest = Manifest.from_dict(json.loads(stored))
            for shard in manifest.shards:
                check_file(path, shard.tokens, verify=verify and not defer)
                check_file(path, shard.examples, verify=verify)
            for file in manifest.tokenizer_files:
                check_file(path / "tokenizer", file, verify=verify)
            corpus = cls(path, manifest)
        if defer:
            corpus.unchecked = corpus.token_files
        return corpus

    @property
    def token_files(self) -> tuple[FileSum, ...]:
        return tuple(shard.tokens for shard in self.manifest.shards)

    def check(self, file: FileSum) -> None:
        """Every byte of a file that is `unchecked`."""
        with reading(self.path / file.name, _FIX):
            check_file(self.path, file, verify=True)


def check_file(directory: Path, file: FileSum, *, verify: bool) -> None:
    path = directory / file.name
    if Path(file.name).name != file.name or file.name in ("", ".", ".."):
        problem = "its name is not a plain file name"
    elif not path.is_file():
        problem = "it is missing"
    elif path.stat().st_size != file.size:
        problem = f"it has {path.stat().st_size:,} bytes instead of {file.size:,}"
    elif verify and xxh3_file(path) != file.xxh3:
        problem = "its checksum is wrong"
    else:
        return
    raise CorruptError(f"The file is not what was written: {problem}.", path, _FIX)


class Examples:
    """The examples of some parts. Tokens stay on disk (memory-mapped) until they are asked for."""

    def __init__(self, path: Path, manifest: Manifest, *parts: Part) -> None:
        shards = [s for s in manifest.shards if s.part in parts and s.counts.examples]
        self.tokens_dtype = token_dtype(manifest.vocab_size)
        self.sequence_length: int = manifest.settings["sequence_length"]
        self.pad_id, self.vocab_size = manifest.special_ids["pad"], manifest.vocab_size
        self._path = path
        self.short_percent: float = manifest.settings.get("short_percent", 0.0)
        tables = [_map(path / shard.examples.name, np.dtype("<u2")) for shard in shards]
        table = np.concatenate([*tables, np.empty(0, "<u2")]).reshape(-1, 2)
        self.lengths: NDArray[np.uint16] = np.ascontiguousarray(table[:, 0])
        self.splits: NDArray[np.uint16] = np.ascontiguousarray(table[:, 1])
        self.offsets: NDArray[np.int64] = np.zeros(len(table) + 1, np.int64)
        np.cumsum(self.lengths, out=self.offsets[1:])
        self._tokens = [_map(path / shard.tokens.name, self.tokens_dtype) for shard in shards]
        self._first_token = np.cumsum([0] + [len(tokens) for tokens in self._tokens])
        fits = (self.splits <= self.lengths) & (self.lengths <= self.sequence_length)
        if self.offsets[-1] != self._first_token[-1] or not fits.all():
            of = " and ".join(parts)
            raise CorruptError(f"The examples of '{of}' do not fit its tokens.", path, _FIX)

    def __len__(self) -> int:
        return len(self.lengths)

    def read_all(self) -> NDArray[Any]:
        """All tokens back to back, for keeping on a device; `offsets` tells the examples apart."""
        tokens = np.concatenate([*self._tokens, np.empty(0, self.tokens_dtype)])
        self._require_known(tokens)
        return tokens

    def _require_known(self, ids: NDArray[Any]) -> None:
        """Refuse ids outside the vocabulary, which a valid checksum does not rule out."""
        if ids.max(initial=0) >= self.vocab_size:
            what = f"A token has the id {ids.max():,}, the vocabulary ends at {self.vocab_size:,}."
            raise CorruptError(what, self._path, _FIX)

    def gather(
        self, indices: NDArray[np.integer[Any]]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Token ids (B, T) padded with [PAD], segments (B, T), 0 on padding, and lengths (B,)."""
        lengths = self.lengths[indices].astype(np.int32)
        starts = self.offsets[indices]
        column = np.arange(self.sequence_length)
        real = column < lengths[:, None]
        ids = np.full(real.shape, self.pad_id, np.int32)
        shard_of = np.searchsorted(self._first_token, starts, side="right") - 1
        for shard in np.unique(shard_of):
            rows = np.flatnonzero(shard_of == shard)
            places = (starts[rows] - self._first_token[shard])[:, None] + column
            chosen = real[rows]
            block = np.full(chosen.shape, self.pad_id, np.int32)
            block[chosen] = self._tokens[shard][places[chosen]]
            ids[rows] = block
        self._require_known(ids)
        segment = (real & (column >= self.splits[indices][:, None])).astype(np.int32)
        return ids, segment, lengths


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


@dataclass(frozen=True, slots=True)
class FileSum:
    """A file by its base name, with what proves its content."""

    name: str
    size: int
    xxh3: str

    def __post_init__(self) -> None:
        if [type(value) for value in (self.name, self.size, self.xxh3)] != [str, int, str]:
            raise TypeError(f"{self} is no entry of a file")


@dataclass(frozen=True, slots=True)
class Shard:
    """Two files that hold the examples of some consecutive pieces of one part."""

    part: Part
    pieces: int
    counts: Counts
    tokens: FileSum
    examples: FileSum

    @property
    def files(self) -> tuple[FileSum, FileSum]:
        return self.tokens, self.examples

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Shard:
        """Raises KeyError, TypeError or ValueError if this is no shard."""
        if stored["part"] not in PARTS:
            raise ValueError(f"unknown part {stored['part']}")
        numbers = (stored["pieces"], *stored["counts"].values())
        if not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError("its counts are no whole numbers")
        files = (FileSum(**stored[name]) for name in ("tokens", "examples"))
        return cls(stored["part"], stored["pieces"], Counts(**stored["counts"]), *files)


@dataclass(frozen=True, slots=True)
class Manifest:
    """All there is to know about a prepared corpus."""

    settings: dict[str, Any]
    vocab_size: int
    special_ids: dict[str, int]
    tokenizer_hash: str
    tokenizer_files: tuple[FileSum, ...]
    shards: tuple[Shard, ...]
    text: dict[str, int]
    inputs: dict[str, Any]
    format: int = FORMAT

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what determines the content: equal wherever and whenever it was prepared."""
        files = [asdict(file) for shard in self.shards for file in shard.files]
        content = {"format": self.format, "settings": self.settings, "files": files}
        return json_sha256({**content, "tokenizer": self.tokenizer_hash})

    def counts(self, part: Part) -> Counts:
        return sum((shard.counts for shard in self.shards if shard.part == part), Counts())

    def padding_share(self, part: Part) -> float:
        """Share of padding in batches of `sequence_length`."""
        counts = self.counts(part)
        slots = counts.examples * self.settings["sequence_length"]
        return 1 - counts.stored / slots if slots else 0.0

    def summary(self) -> str:
        """A few lines for people: what went in, what came out, what was lost."""
        text, train, held_out = self.text, self.counts("train"), self.counts("held-out")
        lost = (train.thrown_away + held_out.thrown_away) / (train.tokens + held_out.tokens)
        plain = ("files", "bytes", "documents", "lines", "characters")
        odd = [f"{n:,} {k.replace('_', ' ')}" for k, n in text.items() if n and k not in plain]
        return (
            f"read      {text['files']:,} files, {text['documents']:,} documents, "
            f"{text['lines']:,} lines, {text['bytes'] / 1e6:,.1f} MB\n"
            f"noticed   {', '.join(odd) or 'nothing odd'}\n"
            f"train     {train.examples:,} examples, {train.tokens:,} tokens, "
            f"{self.padding_share('train'):.1%} padding\n"
            f"held out  {held_out.examples:,} examples, {held_out.tokens:,} tokens\n"
            f"thrown away {lost:.1%} of the tokens, unknown {train.unknown / train.tokens:.2%}"
        )

    def to_dict(self) -> dict[str, Any]:
        parts = {
            part: {**asdict(self.counts(part)), "padding_share": self.padding_share(part)}
            for part in PARTS
        }
        content = {**asdict(self), "parts": parts, "fingerprint": self.fingerprint}
        return {**content, "checksum": json_sha256(content)}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Manifest:
        """Raises one of several errors if this is not exactly what was written."""
        if stored["format"] != FORMAT:
            raise ValueError(f"its format is {stored['format']}, and {FORMAT} is known here")
        values = {field.name: stored[field.name] for field in fields(cls)}
        values["tokenizer_files"] = tuple(FileSum(**file) for file in stored["tokenizer_files"])
        values["shards"] = tuple(map(Shard.from_dict, stored["shards"]))
        manifest = cls(**values)
        if json_bytes(manifest.to_dict()) != json_bytes(stored):
            raise ValueError("its checksum is wrong")
        ids = manifest.special_ids.values()
        if not all(type(i) is int and 0 <= i < manifest.vocab_size for i in ids):
            raise ValueError(f"its special ids are {manifest.special_ids}")
        if not 5 <= manifest.settings["sequence_length"] < 1 << 16:
            raise ValueError(f"its sequence_length is {manifest.settings['sequence_length']}")
        return manifest
