"""Lines of text to vectors: one for each line, in the order of the lines.

Comes in: whatever `hf.load_encoder` reads, and lines. Goes out: float32 vectors (N, D), the mean of
the hidden states of a line's tokens with [CLS] and [SEP], or the state of [CLS] alone, as an array
or as a file that is whole or absent, in memory that does not grow with it:

    .npy       an array (N, D); numpy.load(path, mmap_mode="r")
    .parquet   a column `vector` of D numbers each

A line without a token, an empty one above all, gets zeros, so that row i stays line i; how many
there were is told. Lines are sorted by length within a part of the text, so that a batch is hardly
padded, and each batch is computed by one thread while others work on the next ones: nothing waits
at barriers, and the number of threads does not change a bit of the result.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.text import file_status, read_lines
from ..data.tokenizer import LineEncoder, take_runs
from ..errors import ElectraError, Stopped
from ..files import fsync_dir, json_bytes, storage_errors, write_atomic
from ..formats.hf import LoadedEncoder, load_encoder
from ..runtime import whole_vectors

Pooling = Literal["mean", "cls"]
Vectors = NDArray[np.float32]
_Work = tuple[Vectors, list[Future[None]]]

_PART = 1 << 14  # lines that are sorted together,
_CHARACTERS = 1 << 22  # or fewer, if they are long
_BATCH_TOKENS = {"cpu": 1 << 12, "cuda": 1 << 16}


class Embedded(NamedTuple):
    """What was written."""

    lines: int
    empty: int  # of these, lines without a token
    width: int


def embed(model: Path | str | LoadedEncoder, lines: Iterable[str], **settings: Any) -> Vectors:
    """(N, D): the vectors of some lines; settings as for `Embedder`."""
    embedder = Embedder(model, **settings)
    return np.concatenate([np.zeros((0, embedder.width), np.float32), *embedder(lines)])


def embed_file(
    model: Path,
    source: str,
    out: Path,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[str], object] = lambda _: None,
    **settings: Any,
) -> Embedded:
    """Write the vectors of a text file's lines; source: a UTF-8 file, also compressed, or -.

    Raises Stopped soon after `should_stop` says so; there is nothing at `out` then.
    """
    if out.suffix not in (".npy", ".parquet"):
        what = f"Vectors cannot be written as '{out.suffix}'."
        raise ElectraError(what, where=str(out), fix="name a file that ends in .npy or .parquet")
    path = Path("/dev/stdin" if source == "-" else source)
    file_status(path)
    embedder, rows, begin = Embedder(model, **settings), 0, time.perf_counter()
    with storage_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with _writing(out, embedder.width) as write:
        for vectors in embedder((line for _, line in read_lines(path)), should_stop):
            write(vectors)
            rows += len(vectors)
            progress(f"{rows:,} lines, {rows / (time.perf_counter() - begin):,.0f} lines/s")
        if not rows:
            what, fix = "There is no line to embed.", "check that this is the right file"
            raise ElectraError(what, where=source, fix=fix)
    return Embedded(rows, embedder.empty, embedder.width)


class Embedder:
    """An encoder that is ready: lines in, vectors out, part by part.

    length: tokens of a line that are read, 128 unless the model reads fewer. batch_tokens: tokens
    with padding that are computed together; other numbers round differently, by 1e-6 or so.
    """

    def __init__(
        self,
        model: Path | str | LoadedEncoder,
        *,
        pooling: Pooling = "mean",
        length: int | None = None,
        batch_tokens: int | None = None,
        threads: int | None = None,
    ) -> None:
        if pooling not in get_args(Pooling):
            what, fix = f"There is no pooling {pooling!r}.", f"use {' or '.join(get_args(Pooling))}"
            raise ElectraError(what, where="pooling", fix=fix)
        loaded = model if isinstance(model, LoadedEncoder) else load_encoder(Path(model))
        longest = loaded.config.max_positions
        self.length = min(128, longest) if length is None else length
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = self._device.type == "cuda"
        most = _BATCH_TOKENS[self._device.type]
        cores = 1 if on_gpu else len(os.sched_getaffinity(0))
        self._batch_tokens = most if batch_tokens is None else batch_tokens
        self._threads = cores if on_gpu or threads is None else threads
        for name, value, low, limit in (
            ("length", self.length, 2, longest),
            ("batch_tokens", self._batch_tokens, 1, 1 << 30),
            ("threads", self._threads, 1, 1 << 10),
        ):
            if not low <= value <= limit:
                what = f"{name} is {value:,}."
                raise ElectraError(what, where=name, fix=f"use {low} to {limit:,} with this model")
        self._encoder = loaded.build().to(self._device)
        self._tokenizer, self._lines = loaded.tokenizer, LineEncoder(loaded.tokenizer)
        self._only_first, self.width = pooling == "cls", loaded.config.hidden_size
        self.empty = 0  # lines without a token so far

    def __call__(
        self, lines: Iterable[str], should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[Vectors]:
        """Vectors of consecutive lines, some thousand at a time."""
        pool = ThreadPoolExecutor(self._threads, "embed", torch.set_num_threads, (1,))
        waiting: deque[_Work] = deque()

        def finished() -> Vectors:
            vectors, futures = waiting.popleft()
            for future in futures:
                future.result()
                if should_stop():
                    raise Stopped
            return vectors

        try:
            for part in _parts(lines):
                waiting.append(self._start(part, pool))
                if len(waiting) > 1:  # so that one is read while another is computed
                    yield finished()
            while waiting:
                yield finished()
        finally:
            pool.shutdown(cancel_futures=True)

    def _start(self, lines: list[str], pool: ThreadPoolExecutor) -> _Work:
        """The vectors of a part, and the work after which they are there."""
        ids, counts = self._lines.encode_lines(lines)
        starts, kept = np.cumsum(counts) - counts, np.minimum(counts, self.length - 2)
        order = np.argsort(kept, kind="stable")
        order = order[np.searchsorted(kept[order], 1) :]
        self.empty += len(lines) - len(order)
        vectors = np.zeros((len(lines), self.width), np.float32)

        def compute(rows: NDArray[np.int64]) -> None:
            tokens = take_runs(ids, starts[rows], kept[rows])
            vectors[rows] = self._pooled(tokens, kept[rows])

        futures: list[Future[None]] = []
        end = len(order)
        while end:  # the longest first: short work is left for when threads run out of it
            begin = max(0, end - max(1, self._batch_tokens // int(kept[order[end - 1]] + 2)))
            futures.append(pool.submit(compute, order[begin:end]))
            end = begin
        return vectors, futures

    @whole_vectors
    @torch.inference_mode()
    def _pooled(self, tokens: NDArray[np.uint32], counts: NDArray[np.int64]) -> Vectors:
        """(B, D) of B lines, whose tokens without [CLS] and [SEP] come back to back."""
        t, B, T = self._tokenizer, len(counts), int(counts.max()) + 2
        position = np.arange(T)
        x = np.full((B, T), t.pad_id, np.int64)
        x[:, 0] = t.cls_id
        x[(position > 0) & (position <= counts[:, None])] = tokens
        x[np.arange(B), counts + 1] = t.sep_id
        mask = torch.from_numpy(position < counts[:, None] + 2).to(self._device)  # (B, T)
        given = torch.from_numpy(x).to(self._device)
        needed = None if counts.min() == counts.max() else mask
        first = self._only_first
        h = self._encoder(given, torch.zeros_like(given), needed, None, only_first=first)
        if first:  # h is (B, 1, D), else (B, T, D)
            return h[:, 0].cpu().numpy()
        share = mask / mask.sum(1, keepdim=True)  # (B, T)
        return torch.bmm(share[:, None], h)[:, 0].cpu().numpy()


def _parts(lines: Iterable[str]) -> Iterator[list[str]]:
    part, characters = list[str](), 0
    for line in lines:
        part.append(line)
        characters += len(line)
        if len(part) == _PART or characters > _CHARACTERS:
            yield part
            part, characters = [], 0
    if part:
        yield part


@contextmanager
def _writing(out: Path, width: int) -> Generator[Callable[[Vectors], object]]:
    """A function that adds vectors to a file, which takes its name when the block ends."""
    temporary = out.with_name(f".{out.name}.tmp")
    with storage_errors(out):
        try:
            with open(temporary, "wb") as file:
                if out.suffix == ".npy":
                    about: dict[str, Any] = {"descr": "<f4", "fortran_order": False}
                    # numpy leaves room in it for as many rows as there may be at the end
                    write_header = np.lib.format.write_array_header_1_0
                    write_header(file, about | {"shape": (0, width)})
                    start = file.tell()
                    yield lambda vectors: file.write(vectors.astype("<f4", copy=False).data)
                    rows = (file.tell() - start) // (4 * width)
                    file.seek(0)
                    write_header(file, about | {"shape": (rows, width)})
                else:
                    import pyarrow as pa
                    from pyarrow import parquet

                    kind: Any = pa.list_(pa.float32(), width)
                    schema = pa.schema([pa.field("vector", kind)])

                    def write(vectors: Vectors) -> None:
                        column = pa.FixedSizeListArray.from_arrays(vectors.reshape(-1), width)
                        writer.write_table(pa.table([column], schema=schema))

                    with parquet.ParquetWriter(file, schema, use_dictionary=False) as writer:
                        yield write
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, out)
            fsync_dir(out.parent)
        finally:
            temporary.unlink(missing_ok=True)


# ---------------------------------------------------------------------- sentence-transformers


def for_sentence_transformers(directory: Path) -> None:
    """Make a directory that transformers loads one that `SentenceTransformer` loads as well.

    It gives the vectors of `embed`, except that it takes [CLS] and [SEP] of an empty line for text.
    """
    c = load_encoder(directory).config
    parts = ("", "Transformer"), ("1_Pooling", "Pooling")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(parts)
    ]
    modes = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    reading = {"max_seq_length": min(128, c.max_positions), "do_lower_case": False}
    files = {
        "1_Pooling/config.json": {"word_embedding_dimension": c.hidden_size, **modes},
        "sentence_bert_config.json": reading,
        "modules.json": modules,  # last, for it is what makes the directory one
    }
    (directory / "1_Pooling").mkdir(exist_ok=True)
    for name, values in files.items():
        write_atomic(directory / name, json_bytes(values, indent=2))
