"""Models written for transformers, and the proof that both compute the same.

Comes in: a run, an objective or a fine-tuned model in memory. Goes out: what was pre-trained, or
the model of a task,

    OUT/electra.json         what was trained: settings, step, tokenizer hash
    OUT/discriminator/       loads as ElectraForPreTraining (and AutoModel for fine-tuning)
    OUT/generator/           loads as ElectraForMaskedLM; the only one of a masked language model
        config.json  model.safetensors  tokenizer.json …  README.md  curves.png
        or model-00001-of-N.safetensors … with model.safetensors.index.json

    OUT/electra.json         the task, its results, and a digest of each file that is read again
    OUT/head.safetensors     our own head to the last bit, in whatever form transformers has it
    OUT/config.json  model.safetensors  tokenizer.json …  README.md  curves.png

A directory is read back and compared before it takes its name; transformers, if it is installed,
has to compute the same logits and the same token ids.
"""

from __future__ import annotations

import importlib
import math
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor

from .. import __version__
from ..config import PretrainConfig, to_dict
from ..data.tokenizer import Tokenizer
from ..errors import CorruptError, ElectraError
from ..files import (
    fsync_dir,
    json_bytes,
    read_json,
    storage_errors,
    write_atomic,
    xxh3_file,
)
from ..finetuning import heads
from ..finetuning.tasks import Task
from ..objectives import (
    Objective,
)
from ..studies.records import code
from . import card
from .hf import load_finetuned, load_pretrained, read_model
from .layout import (
    CLASSES,
    FIELDS,
    FIXED,
    INDEX,
    WEIGHTS,
    Network,
    Tensors,
    networks_of,
    tensors_of,
    to_transformers,
    with_prefix,
)

# Of logits, relative to the largest where that is above 1. Rounding alone gives 1e-6 in tiny models
# and 1e-5 in large ones of 24 layers; a tensor under a wrong name gives 1e-1.
_TOLERANCE = 1e-4
_TEXTS = (
    "The Quick Brown Fox isn't lazy; it jumped 3.5 times over ELECTRA's dog!",
    "Ångström aß crème brûlée à São Paulo, naïve Straße",
    "東京は日本の首都です。 한국어 text עברית",
    "a",
)


class ExportReport(NamedTuple):
    """What was written, and how it was checked."""

    directories: tuple[Path, ...]
    checks: tuple[str, ...]
    max_difference: float | None  # of logits to transformers; None where it is not installed


class Storage(NamedTuple):
    """How the weights of an export lie on the disk."""

    half: bool = False  # as float16 instead of float32
    shard_bytes: int | None = None  # a file has at most so many bytes of tensors, or one tensor


WHOLE = Storage()
# What an export has, and what `electra onnx` puts beside it: a new one replaces nothing else.
_OWN = {
    *("electra.json", "discriminator", "generator", "README.md", card.PICTURE, "config.json"),
    *(
        WEIGHTS,
        "head.safetensors",
        "model.onnx",
        "model_quantized.onnx",
        "vocab.txt",
        "tokenizer.json",
    ),
    *("tokenizer_config.json", "special_tokens_map.json"),
}


def export_run(
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    license: str = "unknown",
    storage: Storage = WHOLE,
) -> ExportReport:
    """Export the newest checkpoint of a run directory, or that of `step`."""
    from ..rundir import load_run  # imports the whole of training, which no reader here needs

    loaded = load_run(run, step=step)
    told: dict[str, Any] = {"step": loaded.step, "run": run, "license": license, "storage": storage}
    return export(loaded.objective, loaded.config, loaded.tokenizer_dir, out, **told)


def export(
    objective: Objective,
    config: PretrainConfig,
    tokenizer_dir: Path,
    out: Path,
    *,
    step: int | None = None,
    run: Path | None = None,
    license: str = "unknown",
    storage: Storage = WHOLE,
) -> ExportReport:
    """Write the networks of `objective` for transformers and check them.

    run: the directory whose story the model card tells. An earlier export at `out` is replaced;
    anything else there is left alone, with an error.
    """
    tokenizer = Tokenizer.load(tokenizer_dir)
    record = {"version": __version__, "step": step, "config": to_dict(config)}
    story = card.of_pretraining(config, step, run)
    return export_networks(networks_of(objective), tokenizer, out, record, story, license, storage)


def import_model(
    path: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    allow_bin: bool = False,
    license: str = "unknown",
) -> ExportReport:
    """Write what `load_pretrained` reads as an export; allow_bin: from a pickle, if need be."""
    model = read_model(path, with_heads=True, allow_bin=allow_bin)
    own = Tokenizer.load(tokenizer) if tokenizer else model.needed_tokenizer()
    networks = tuple(n for n in (model.discriminator, model.generator) if n)
    record = {"version": __version__, "imported_from": str(path)}
    story = card.Story({"Training": f"Imported from {code(path.name)}."})
    return export_networks(networks, own, out, record, story, license)


def export_networks(
    networks: tuple[Network, ...],
    tokenizer: Tokenizer,
    out: Path,
    record: Any,
    story: card.Story,
    license: str = "unknown",
    storage: Storage = WHOLE,
) -> ExportReport:
    """Write these networks; record goes into electra.json, story into the model cards."""
    record = {**record, "tokenizer_hash": tokenizer.hash}
    if storage.half:
        networks = tuple(replace(n, tensors=_rounded(n.tensors)) for n in networks)
    differences: list[float] = []
    with _replacing(out, of_task=False) as temporary:
        for network in networks:
            _write(temporary / network.kind, network, tokenizer, story, license, storage=storage)
        write_atomic(temporary / "electra.json", json_bytes(record, indent=1))
        again = load_pretrained(temporary)
        for network in networks:
            read: Network = getattr(again, network.kind)
            is_same = replace(read.config, init=network.config.init) == network.config
            is_same &= again.needed_tokenizer().hash == tokenizer.hash
            _require_same(read.tensors, network.tensors, is_same, network.kind)
            differences += _compare(temporary / network.kind, network, network.modules, tokenizer)
    checks = ["read back bit for bit"]
    if differences:
        checks.append(f"logits and token ids equal in transformers {version('transformers')}")
    places = tuple(out / network.kind for network in networks)
    return ExportReport(places, tuple(checks), max(differences, default=None))


def export_finetuned(
    model: heads.TaskModel,
    task: Task,
    form: heads.Form,
    tokenizer: Tokenizer,
    out: Path,
    *,
    results: dict[str, Any],
    length: int,
    run: Path | None = None,
) -> None:
    """Write a fine-tuned model (float32) so that transformers predicts the same, and check it.

    The head goes into the class that transformers has for the task. It has none for the joint head
    of question answering, nor for a linear one of very many outputs: there it loads the encoder
    alone. `results` is what the model card reports: results.json, or its summary; `run` has the
    losses that it shows.
    """
    head, c, tensors = model.head, model.encoder.config, tensors_of(model)
    if task.kind == "regression":  # to the data's own unit
        tensors |= {n: task.scale * t for n, t in with_prefix(tensors, "head.out.").items()}
        tensors["head.out.bias"] = tensors["head.out.bias"] + task.offset
    record = {"format": 1, "version": __version__, "form": form, "length": length}
    record |= {"head": head.options, "results": results}
    record |= {"scale_in_head": task.scale, "offset_in_head": task.offset}
    task = replace(task, scale=1.0, offset=0.0)
    record["task"] = to_dict(task)
    # A linear layer on [CLS] takes two units of the dense one per output.
    is_linear = isinstance(head, heads.SentenceHead) and head.dense is None
    has_class = not isinstance(head, heads.SpanHead)
    has_class &= not is_linear or 2 * max(1, len(task.labels)) <= c.hidden_size
    vocab_size = model.encoder.embeddings.word.num_embeddings
    network = Network(task.kind if has_class else "encoder", c, vocab_size, tensors)
    problems = {"classification": "single_label_classification", "regression": "regression"}
    labels = task.labels or (("start", "end") if task.kind == "qa" else ("LABEL_0",))
    settings = {
        "id2label": dict(enumerate(labels)),
        "label2id": {name: i for i, name in enumerate(labels)},
        "problem_type": problems.get(task.kind),
    }
    with _replacing(out, of_task=True) as temporary:
        story = card.of_finetuning(task, results, length, has_class=has_class, run=run)
        license = dict(results.get("settings", {})).get("license", "unknown")
        _write(temporary, network, tokenizer, story, license, settings, length)
        write_atomic(temporary / "head.safetensors", to_safetensors(with_prefix(tensors, "head.")))
        for_people = ("README.md", card.PICTURE)  # who may add to it
        files = [path for path in temporary.iterdir() if path.name not in for_people]
        record["files"] = {path.name: xxh3_file(path) for path in files}
        write_atomic(temporary / "electra.json", json_bytes(record, indent=1))
        again = load_finetuned(temporary)
        is_same = (again.task, again.form, again.length) == (task, form, length)
        is_same &= again.tokenizer.hash == tokenizer.hash
        _require_same(tensors_of(again.model), tensors, is_same, "model")
        _compare(temporary, network, again.model, tokenizer)


def refuse_foreign(out: Path, *, of_task: bool) -> None:
    """Nothing but an earlier export of the same sort is replaced by another one."""
    record, found = dict[str, Any](), ""
    is_export = (out / "electra.json").is_file()
    if is_export:
        with suppress(CorruptError):  # a damaged one may be replaced
            record = read_json(out / "electra.json")
    if record and ("task" in record) != of_task:
        found = "a pre-trained model" if of_task else "a model of a task"
    elif out.is_dir():
        kept = _OWN | record.get("files", {}).keys() if is_export else set[str]()
        found = ", ".join(sorted({path.name for path in out.iterdir()} - kept)[:3])
    elif out.exists():
        found = "a file"
    if found:
        what = f"There is something else at the place of the export: {found}."
        fix = "choose a new or empty directory, or an earlier export, which is replaced"
        raise ElectraError(what, where=str(out), fix=fix)


@contextmanager
def _replacing(out: Path, *, of_task: bool) -> Generator[Path]:
    """A directory beside `out` that takes its place when the block ends, or vanishes with it."""
    if out.is_symlink():  # what it leads to is replaced: the link is somebody's, and stays
        out = out.resolve()
    temporary, before = (out.with_name(f".{out.name}.{end}") for end in ("tmp", "before.tmp"))

    def put_back() -> None:
        """What was there, unless its successor is: something failed, or died, between the two."""
        if before.exists() and not out.exists():
            os.replace(before, out)

    with storage_errors(out):
        put_back()
    refuse_foreign(out, of_task=of_task)
    try:
        with storage_errors(out):
            for left_over in (temporary, before):
                shutil.rmtree(left_over, ignore_errors=True)
            temporary.mkdir(parents=True)
        yield temporary
        with storage_errors(out):
            if out.exists():  # never deleted under its name: half of it would be in the way
                os.replace(out, before)
            os.replace(temporary, out)
            fsync_dir(out.parent)
    finally:
        with storage_errors(out):
            put_back()
        for left_over in (temporary, before):
            shutil.rmtree(left_over, ignore_errors=True)


def _write(
    directory: Path,
    network: Network,
    tokenizer: Tokenizer,
    story: card.Story,
    license: str,
    settings: dict[str, Any] | None = None,
    length: int | None = None,
    storage: Storage = WHOLE,
) -> None:
    """One directory that transformers loads, as float32 whatever lies there."""
    c, name = network.config, CLASSES[network.kind][0]
    values = FIXED | {theirs: getattr(c, ours) for ours, theirs in FIELDS.items()}
    values |= {"architectures": [name], "vocab_size": network.vocab_size, "dtype": "float32"}
    values |= {"pad_token_id": tokenizer.pad_id, "tie_word_embeddings": True, **(settings or {})}
    text = card.readme(network.kind, name, c, network.vocab_size, story, license)
    tokenizer.save(directory, max_length=length or c.max_positions)
    tensors = to_transformers(network)
    if storage.half:
        tensors = {name: tensor.half() for name, tensor in tensors.items()}
    write_atomic(directory / "config.json", json_bytes(values, indent=2))
    files = _shards(tensors, storage.shard_bytes)
    for file, part in files.items():
        write_atomic(directory / file, to_safetensors(part, metadata={"format": "pt"}))
    if len(files) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        places = {name: file for file, part in files.items() for name in part}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_atomic(directory / INDEX, json_bytes(index, indent=1))
    write_atomic(directory / "README.md", text)
    if story.picture:
        write_atomic(directory / card.PICTURE, story.picture)


def _rounded(tensors: Tensors) -> Tensors:
    """As float16 has them."""
    rounded = {name: tensor.half().float() for name, tensor in tensors.items()}
    if large := [n for n, t in tensors.items() if t.isfinite().all() and rounded[n].isinf().any()]:
        what = f"{large[0]} has numbers above 65,504, which float16 does not have."
        raise ElectraError(what, where="--half", fix="export without it")
    return rounded


def _shards(tensors: Tensors, limit: int | None) -> dict[str, Tensors]:
    """The files of a model by their names, filled in the order of the tensors."""
    parts: list[Tensors] = [{}]
    size = math.inf if limit is None else limit
    room = size
    for name, tensor in tensors.items():
        if tensor.nbytes > room and parts[-1]:
            parts.append({})
            room = size
        parts[-1][name] = tensor
        room -= tensor.nbytes
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    stem = WEIGHTS.removesuffix(".safetensors")
    return {f"{stem}-{i:05}-of-{len(parts):05}.safetensors": p for i, p in enumerate(parts, 1)}


# ---------------------------------------------------------------------- proof


def _require(condition: bool, what: str) -> None:
    if not condition:
        fix = "this is a bug or a broken disk; please report it with this message"
        raise CorruptError(f"The export was not kept: {what}.", fix=fix)


def _require_same(read: Tensors, written: Tensors, is_same: bool, what: str) -> None:
    is_same = is_same and read.keys() == written.keys()
    is_same = is_same and all(torch.equal(read[name], t) for name, t in written.items())
    _require(is_same, f"the {what} reads back otherwise")


def _logits(network: Network, model: Any, x: Tensor, segment: Tensor, mask: Tensor) -> Tensor:
    """What the class of transformers gives, by our own modules."""
    h, head = model.encoder(x, segment, mask, None), model.head
    if network.kind in ("classification", "regression", "tagging"):
        return head.logits(h, None)
    if network.kind == "qa":
        return torch.stack(head.logits(h), -1)
    table = (model.encoder.embeddings.word.weight,) if network.kind == "generator" else ()
    return h if network.kind == "encoder" else head(h, *table)


@torch.no_grad()
def _compare(directory: Path, network: Network, model: Any, tokenizer: Tokenizer) -> list[float]:
    """[largest difference of logits]; raises if it, or a single token id, is wrong.

    transformers is a second opinion: nothing where it is not installed, or not for this torch.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:
        return []
    logging = transformers.utils.logging
    has_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
        other, info = getattr(transformers, CLASSES[network.kind][0]).from_pretrained(
            directory, local_files_only=True, output_loading_info=True, dtype=torch.float32
        )
    finally:
        if has_bars:
            logging.enable_progress_bar()
    _require(not any(info.values()), f"transformers finds other tensors: {info}")
    pairs = list(zip(_TEXTS, reversed(_TEXTS), strict=True))
    batch = theirs(pairs, padding=True, verbose=False, return_tensors="pt")
    for pair, row, mask in zip(pairs, batch["input_ids"], batch["attention_mask"], strict=True):
        is_same = row[mask == 1].tolist() == tokenizer.encode(*pair)
        _require(is_same, f"transformers gives other token ids for {pair}")
    given = {name: value[:, : network.config.max_positions] for name, value in batch.items()}
    mask = given["attention_mask"].bool()
    ours = _logits(network, model, given["input_ids"], given["token_type_ids"], mask)
    output = other.eval()(**given)
    logits = torch.stack(output.to_tuple()[:2], -1) if network.kind == "qa" else output[0]
    if network.kind not in ("classification", "regression"):
        ours, logits = ours[mask], logits[mask]
    # A model that diverged has scores that are no numbers; they have to be so on both sides.
    difference = float((ours.nan_to_num() - logits.nan_to_num()).abs().max())
    is_close = difference <= _TOLERANCE * max(1.0, float(ours.nan_to_num().abs().max()))
    _require(is_close, f"the {network.kind}'s logits differ by {difference:.1e} in transformers")
    return [difference]
