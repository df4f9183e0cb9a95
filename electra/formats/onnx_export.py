"""A model as ONNX, checked in onnxruntime before it takes its name.

Comes in: a fine-tuned model, an export, or a directory of transformers. Goes out, beside it or in a
directory of its own with config.json and the tokenizer,

    model.onnx             input_ids, attention_mask, token_type_ids (B, T), int64, of any B and T
                           -> logits, start_logits and end_logits, or last_hidden_state
    model.onnx.data        its weights, where a file would grow beyond the 2 GB of the format
    model_quantized.onnx   the same with 8-bit weights, on demand

as transformers names them all. Each is written under another name first.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.tokenizer import Tokenizer
from ..encoder import DiscriminatorHead, Encoder, GeneratorHead
from ..errors import ElectraError
from ..files import fsync_dir, storage_errors, write_atomic
from ..finetuning import tasks
from ..finetuning.features import encode_texts
from ..finetuning.heads import LinearSpanHead, SentenceHead, TaggingHead
from . import hf, hf_export, layout

Part = Literal["model", "encoder"]
Rows = tuple[Tensor, Tensor, Tensor]  # input_ids, attention_mask, token_type_ids
Run = Callable[[Rows], list[NDArray[Any]]]

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_BESIDE = ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
_SHAPES = ((1, 2), (1, 9), (2, 5), (3, 16), (4, 31), (5, 64), (2, 512))  # T up to what it reads
_FILES = ("model_quantized.onnx.data", "model_quantized.onnx", "model.onnx.data", "model.onnx")
_ONE_FILE = 1_900_000_000  # bytes of weights; protobuf ends at 2 GiB


class OnnxReport(NamedTuple):
    """What was written, and how far it is from our own outputs."""

    files: tuple[Path, ...]
    opset: int
    difference: float  # the largest, over all shapes
    int8: dict[str, float]  # largest, mean; with data accuracy and accuracy_int8


class _Graph(nn.Module):
    """What the class of transformers gives, from inputs as it takes them."""

    def __init__(self, encoder: Encoder, head: nn.Module | None) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    @property
    def outputs(self) -> tuple[str, ...]:
        if self.head is None:
            return ("last_hidden_state",)
        is_span = isinstance(self.head, LinearSpanHead)
        return ("start_logits", "end_logits") if is_span else ("logits",)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor
    ) -> tuple[Tensor, ...]:
        head = self.head
        first = isinstance(head, SentenceHead)
        h = self.encoder(input_ids, token_type_ids, attention_mask.bool(), None, only_first=first)
        if isinstance(head, GeneratorHead):
            return (head(h, self.encoder.embeddings.word.weight),)
        if isinstance(head, SentenceHead | TaggingHead):
            return (head.logits(h, None),)
        if isinstance(head, LinearSpanHead):
            return head.logits(h)
        return (h if head is None else head(h),)


def export_onnx(
    model: Path,
    out: Path | None = None,
    *,
    part: Part = "model",
    int8: bool = False,
    data: Path | None = None,
) -> OnnxReport:
    """Write a model, or its encoder alone, as ONNX; by default beside its other files.

    data: labelled rows for a classifier, on which the cost of int8 is counted.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read when onnxruntime is imported
    needed = ("onnxruntime", "onnx", "onnxscript", "onnxruntime.quantization")
    *_, quantization = map(_extra, needed)
    directory = _directory(model)
    graph, tokenizer, tuned = _load(directory, part)
    if data is not None and (tuned is None or tuned.task.kind != "classification" or not int8):
        what, fix = "Data is only used to score a classifier in int8.", "leave it out, or add int8"
        raise ElectraError(what, where=str(data), fix=fix)
    labelled = None if data is None or tuned is None else _labelled(tuned, data)
    out = directory if out is None else out
    longest = graph.encoder.config.max_positions
    checks = [_rows(tokenizer, B, min(T, longest)) for B, T in _SHAPES]
    with _beside(out) as temporary, _quietly():
        plain, small = temporary / "model.onnx", temporary / "model_quantized.onnx"
        is_large = sum(4 * p.numel() for p in graph.parameters()) > _ONE_FILE
        opset = _write(graph, checks[3], plain, is_large)
        apart = _differences(graph, _session(plain), checks)
        largest = max(1.0, *(float(o.abs().max()) for rows in checks for o in graph(*rows)))
        is_close = apart.max() <= hf_export._TOLERANCE * largest
        hf_export._require(is_close, f"outputs differ by {apart.max():.1e} in onnxruntime")
        cost: dict[str, float] = {}
        if int8:
            options = {"per_channel": True, "use_external_data_format": is_large}
            kind = quantization.QuantType.QInt8
            quantization.quantize_dynamic(plain, small, weight_type=kind, **options)
            rounded = _differences(graph, _session(small), checks)
            cost = {"largest": float(rounded.max()), "mean": float(rounded.mean())}
            if labelled is not None:
                cost["accuracy"] = _accuracy(_session(plain), *labelled)
                cost["accuracy_int8"] = _accuracy(_session(small), *labelled)
        names = [name for name in reversed(_FILES) if (temporary / name).is_file()]
    if out != directory:
        for name in _BESIDE:
            if (directory / name).is_file():
                write_atomic(out / name, (directory / name).read_bytes())
    return OnnxReport(tuple(out / n for n in names), opset, float(apart.max()), cost)


def _extra(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        what, fix = f"{name} is not installed.", "install the extra: pip install 'electra[onnx]'"
        raise ElectraError(what, where="electra onnx", fix=fix) from error


def _directory(model: Path) -> Path:
    """The one directory with config.json that `model` stands for."""
    places = [model, model / "model", model / "discriminator", model / "generator"]
    found = [place for place in places if (place / "config.json").is_file()]
    if not found:
        what = "There is no exported model: no config.json here, in model or in discriminator."
        fix = "give a run, an export, or a fine-tuned model"
        raise ElectraError(what, where=str(model), fix=fix)
    return found[0]


def _load(directory: Path, part: Part) -> tuple[_Graph, Tokenizer, hf.FineTuned | None]:
    tuned, head = None, None
    if part == "encoder":
        loaded = hf.load_encoder(directory)
        encoder, tokenizer = loaded.build(), loaded.tokenizer
    elif (directory / "head.safetensors").is_file():
        tuned = hf.load_finetuned(directory)
        encoder, head, tokenizer = tuned.model.encoder, tuned.model.head, tuned.tokenizer
    else:
        pretrained = hf.load_pretrained(directory)
        tokenizer = pretrained.needed_tokenizer()
        if pretrained.discriminator is not None:
            encoder, head = layout.build_discriminator(pretrained.discriminator)
        else:
            encoder, head = layout.build_generator(pretrained.network("generator"))
    known = (DiscriminatorHead, GeneratorHead, SentenceHead, TaggingHead, LinearSpanHead)
    if head is not None and not isinstance(head, known):
        what = "The joint head of question answering is a search, which has no form in ONNX."
        fix = "export the encoder alone, or fine-tune with --head hf"
        raise ElectraError(what, where=str(directory), fix=fix)
    return _Graph(encoder, head).eval().requires_grad_(False), tokenizer, tuned


def _rows(tokenizer: Tokenizer, B: int, T: int) -> Rows:
    """Text of many scripts in B rows of T tokens, each shorter than the one before it."""
    stream = [i for text in hf_export._TEXTS for i in tokenizer.encode(text)]
    x, position = np.full((B, T), tokenizer.pad_id, np.int64), torch.arange(T)
    length = T - (T - 1) * torch.arange(B)[:, None] // B  # (B, 1)
    for i, n in enumerate(length[:, 0].tolist()):
        x[i, :n] = np.resize(np.roll(stream, -7 * i), n)
    mask = position < length
    return torch.from_numpy(x), mask.long(), (mask & (position >= length // 2)).long()


def _trace(graph: _Graph, rows: Rows) -> Any:
    length = torch.export.Dim("length", max=graph.encoder.config.max_positions)
    shapes = [{0: torch.export.Dim("batch"), 1: length}] * 3
    names: Any = {"input_names": _INPUTS, "output_names": graph.outputs}
    return torch.onnx.export(
        graph, rows, dynamo=True, dynamic_shapes=shapes, verbose=False, **names
    )


def _write(graph: _Graph, rows: Rows, file: Path, is_large: bool) -> int:
    """The graph as a file; returns the opset of ONNX that it needs."""
    onnx, program = _extra("onnx"), _trace(graph, rows)
    program.save(file, external_data=is_large)
    proto = onnx.load(file, load_external_data=False)
    # Shapes that the quantiser would contradict, and where this code lay on this machine.
    for told in (proto.graph.value_info, *(n.metadata_props for n in proto.graph.node)):
        del told[:]
    onnx.save(proto, file)
    return int(program.model.opset_imports[""])


def _session(file: Path) -> Run:
    runtime = _extra("onnxruntime")
    ready = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return lambda rows: ready.run(
        None, {name: t.numpy() for name, t in zip(_INPUTS, rows, strict=True)}
    )


@torch.no_grad()
def _differences(graph: _Graph, run: Run, checks: list[Rows]) -> NDArray[np.float64]:
    """|theirs − ours| of every number that is not on padding."""
    found: list[NDArray[np.float64]] = []
    for rows in checks:
        mask = rows[1].bool().numpy()
        for ours, theirs in zip(graph(*rows), run(rows), strict=True):
            apart = np.abs(ours.double().numpy() - theirs)
            found.append(apart if isinstance(graph.head, SentenceHead) else apart[mask])
    return np.concatenate([apart.reshape(-1) for apart in found])


def _labelled(tuned: hf.FineTuned, data: Path) -> tuple[list[Rows], list[int]]:
    """The rows of a data set one by one, and the output that is right for each; −1: none is."""
    task = tuned.task
    loaded = tasks.load(None, data, texts=task.texts, label=task.label, kind=task.kind)
    parts = [loaded.splits[name] for name in (("dev",) if data.is_dir() else ("train", "dev"))]
    names = [loaded.task.labels[label] for part in parts for label in part.labels]
    texts = [text for part in parts for text in part.texts]
    features = encode_texts(texts, np.zeros(len(texts)), tuned.tokenizer, tuned.length)
    every = zip(features.tokens, features.lengths, features.first, strict=True)
    rows: list[Rows] = []
    for x, n, first in every:
        mask = torch.ones(1, n, dtype=torch.int64)
        segment = (torch.arange(n) >= first).long()[None]
        rows.append((torch.from_numpy(x[None, :n].astype(np.int64)), mask, segment))
    codes = {name: i for i, name in enumerate(task.labels)}
    return rows, [codes.get(name, -1) for name in names]


def _accuracy(run: Run, rows: list[Rows], labels: list[int]) -> float:
    return float(np.mean(np.array([run(row)[0].argmax() for row in rows]) == labels))


@contextmanager
def _beside(out: Path) -> Generator[Path]:
    """A directory in `out` whose files move up when the block ends, or vanish with it."""
    temporary = out / ".onnx.tmp"
    try:
        with storage_errors(out):  # in the block too: the exporter and the quantiser write there
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            for name in _FILES:  # weights before what needs them
                if (path := temporary / name).is_file():
                    with open(path, "rb") as file:
                        os.fsync(file.fileno())
                    os.replace(path, out / name)
                else:  # of an earlier model
                    (out / name).unlink(missing_ok=True)
            fsync_dir(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _quietly() -> Generator[None]:
    """Without what the exporter and the quantiser say about themselves and absent packages."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
