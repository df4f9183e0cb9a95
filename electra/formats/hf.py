"""Models in the layout of transformers: export, import, and the proof that they agree.

Comes in: a run, an objective or a fine-tuned model in memory, or a directory that transformers
wrote. Goes out: what was pre-trained, or the model of a task,

    OUT/electra.json         what was trained: settings, step, tokenizer hash
    OUT/discriminator/       loads as ElectraForPreTraining (and AutoModel for fine-tuning)
    OUT/generator/           loads as ElectraForMaskedLM; the only one of a masked language model
        config.json  model.safetensors  tokenizer.json …  README.md  curves.png
        or model-00001-of-N.safetensors … with model.safetensors.index.json

    OUT/electra.json         the task, its results, and a digest of each file that is read again
    OUT/head.safetensors     our own head to the last bit, in whatever form transformers has it
    OUT/config.json  model.safetensors  tokenizer.json …  README.md  curves.png

or the same tensors under our own names, from which training continues (`load_pretrained`,
`load_encoder`) and inference starts (`load_finetuned`). A directory is read back and compared
before it takes its name; transformers, if it is installed, has to compute the same logits and the
same token ids. Only safetensors and JSON are read, and TensorFlow's checkpoints; a pickle only by
`import_model`, when it is told to.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from .. import __version__
from ..config import EncoderConfig, PretrainConfig, Sharing, from_dict, read_settings_file, to_dict
from ..data.tokenizer import Tokenizer
from ..encoder import DiscriminatorHead, Embeddings, Encoder, GeneratorHead
from ..errors import CorruptError, ElectraError
from ..files import (
    fsync_dir,
    json_bytes,
    read_json,
    reading,
    storage_errors,
    write_atomic,
    xxh3_file,
)
from ..finetuning import heads, tasks
from ..finetuning.tasks import Task
from ..objectives import (
    MaskedLM,
    Objective,
    ReplacedTokenDetection,
    ReplaceMLM,
    SpecialIds,
    build_objective,
    objective_class,
)
from ..studies.report import code
from . import card, tf_checkpoint

Kind = Literal["discriminator", "generator"]
DiscHead = Literal["dense", "linear"]
Layout = Kind | tasks.Kind | Literal["encoder"]
Tensors = dict[str, Tensor]

_REWARM = 6.0  # percent of a run that goes on from a model ("Don't Stop Pretraining", ACL 2020)
# Our settings and what transformers calls them. Defaults agree on both sides, so a config.json
# that leaves out what is at its default reads right.
_FIELDS = {
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_size": "intermediate_size",
    "attention_heads": "num_attention_heads",
    "embedding_size": "embedding_size",
    "max_positions": "max_position_embeddings",
    "layer_norm_eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}
# Values of config.json that this encoder requires.
_FIXED: dict[str, Any] = {
    "model_type": "electra",
    "hidden_act": "gelu",
    "type_vocab_size": 2,
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
# Our module names and theirs: of the encoder, where our qkv stacks three of theirs, and of the
# heads, with the class. `head` itself holds only the generator's bias: its table is that of the
# embeddings.
_BLOCK = "electra.encoder.layer.{i}"
_MODULES = {
    "encoder.embeddings.word": "electra.embeddings.word_embeddings",
    "encoder.embeddings.position": "electra.embeddings.position_embeddings",
    "encoder.embeddings.segment": "electra.embeddings.token_type_embeddings",
    "encoder.embeddings.norm": "electra.embeddings.LayerNorm",
    "encoder.project": "electra.embeddings_project",
    "encoder.blocks.{i}.qkv": f"{_BLOCK}.attention.self.{{qkv}}",
    "encoder.blocks.{i}.out": f"{_BLOCK}.attention.output.dense",
    "encoder.blocks.{i}.attention_norm": f"{_BLOCK}.attention.output.LayerNorm",
    "encoder.blocks.{i}.up": f"{_BLOCK}.intermediate.dense",
    "encoder.blocks.{i}.down": f"{_BLOCK}.output.dense",
    "encoder.blocks.{i}.ffn_norm": f"{_BLOCK}.output.LayerNorm",
}
_RTD, _MLM = "discriminator_predictions", "generator_predictions"
_PRETRAINING = {"head.dense": f"{_RTD}.dense", "head.w": f"{_RTD}.dense_prediction"}
_MASKED = {"head.dense": f"{_MLM}.dense", "head.norm": f"{_MLM}.LayerNorm"}
_SENTENCE = {"head.dense": "classifier.dense", "head.out": "classifier.out_proj"}
_CLASSES: dict[Layout, tuple[str, dict[str, str]]] = {
    "discriminator": ("ElectraForPreTraining", _PRETRAINING),
    "generator": ("ElectraForMaskedLM", _MASKED | {"head": "generator_lm_head"}),
    "classification": ("ElectraForSequenceClassification", _SENTENCE),
    "regression": ("ElectraForSequenceClassification", _SENTENCE),
    "tagging": ("ElectraForTokenClassification", {"head.out": "classifier"}),
    "qa": ("ElectraForQuestionAnswering", {"head.out": "qa_outputs"}),
    "encoder": ("ElectraModel", {}),  # for a head that transformers does not have
}
_WORDS, _TABLE = "electra.embeddings.word_embeddings.weight", "generator_lm_head.weight"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_BUFFERS = {"electra.embeddings.position_ids", "electra.embeddings.token_type_ids"}  # in old files
# Of logits, relative to the largest where that is above 1. Rounding alone gives 1e-6 in tiny models
# and 1e-5 in large ones of 24 layers; a tensor under a wrong name gives 1e-1.
_TOLERANCE = 1e-4
_TEXTS = (
    "The Quick Brown Fox isn't lazy; it jumped 3.5 times over ELECTRA's dog!",
    "Ångström aß crème brûlée à São Paulo, naïve Straße",
    "東京は日本の首都です。 한국어 text עברית",
    "a",
)


@dataclass(frozen=True)
class Network:
    """One encoder with its head: tensors under our names, `encoder.…` and `head.…`."""

    kind: Layout
    config: EncoderConfig
    vocab_size: int
    tensors: Tensors

    @property
    def disc_head(self) -> DiscHead:
        return "dense" if "head.dense.weight" in self.tensors else "linear"

    @cached_property
    def modules(self) -> Any:
        """Encoder and head, ready for inference."""
        pair = _empty(self.config, self.vocab_size, self.kind, self.disc_head)
        pair.load_state_dict(self.tensors, assign=True)
        return pair.requires_grad_(False).eval()


@dataclass(frozen=True)
class Pretrained:
    """What a directory holds: at least one of the networks, and the tokenizer if it is there."""

    path: Path
    discriminator: Network | None
    generator: Network | None
    tokenizer: Tokenizer | None
    note: str = ""  # on what else the files hold

    def network(self, kind: Kind) -> Network:
        """The network of that kind; an error that says so when it is not there."""
        network = self.discriminator if kind == "discriminator" else self.generator
        if network is None:
            fix = f"give a directory that holds one, saved as {_CLASSES[kind][0]}"
            raise ElectraError(f"There is no {kind} here.", where=str(self.path), fix=fix)
        return network

    def needed_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            what = "The model has no tokenizer beside it."
            fix = "copy its tokenizer.json or vocab.txt into the directory"
            raise ElectraError(what, where=str(self.path), fix=fix)
        return self.tokenizer

    @cached_property
    def row_length(self) -> int:
        """Tokens of a row in pre-training, where the export or run says it; else the positions of
        the discriminator, of which it may have seen fewer."""
        positions = self.network("discriminator").config.max_positions
        for name in ("electra.json", "run.json"):
            if config := read_json(self.path / name).get("config"):
                with reading(self.path / name):
                    return min(int(config["data"]["sequence_length"]), positions)
        return positions


@dataclass(frozen=True)
class LoadedEncoder:
    """What fine-tuning starts from. Tensors are named as in `Encoder`, without a prefix."""

    config: EncoderConfig
    vocab_size: int
    tensors: Tensors
    tokenizer: Tokenizer
    description: str

    @property
    def fingerprint(self) -> str:
        """SHA-256 over names, shapes and values."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()

    def build(self) -> Encoder:
        """The encoder itself, ready for inference."""
        encoder = _empty(self.config, self.vocab_size, "encoder")["encoder"]
        encoder.load_state_dict(self.tensors, assign=True)
        return encoder.requires_grad_(False).eval()


class FineTuned(NamedTuple):
    """A model of a task: float32, on the CPU, not in training.

    A regression gives the data's own unit, as in transformers, which knows no other: the scale and
    the offset it was trained with are in its last layer, `task.scale` is 1 and `task.offset` 0.
    """

    model: heads.TaskModel
    task: Task
    form: heads.Form
    tokenizer: Tokenizer
    length: int  # tokens of a row at most
    results: dict[str, Any]


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


class InitialState(NamedTuple):
    """Parameters to start from, and what is new in them."""

    parameters: Tensors
    notes: tuple[str, ...]


def _pairs(objective: Objective) -> dict[Kind, Any]:
    """The networks that transformers has a class for; a lone masked language model is a generator.

    Heads without such a class (a copy gate's vocabulary, a baseline, two towers) stay in the run.
    Names in the state of a pair are those of `Network.tensors`.
    """
    pairs: dict[Kind, tuple[Encoder, nn.Module]] = {}
    if isinstance(objective, MaskedLM):
        pairs["generator"] = objective.generator, objective.generator_head
    elif isinstance(objective, ReplaceMLM):
        pairs["generator"] = objective.discriminator, objective.main_head
    else:
        assert isinstance(objective, ReplacedTokenDetection)
        pairs["discriminator"] = objective.discriminator, objective.discriminator_head
        if isinstance(objective.generator, Encoder) and objective.generator_head is not None:
            pairs["generator"] = objective.generator, objective.generator_head
    return {kind: nn.ModuleDict({"encoder": e, "head": h}) for kind, (e, h) in pairs.items()}


def _empty(c: EncoderConfig, vocab_size: int, kind: Layout, disc_head: DiscHead = "dense") -> Any:
    """The modules of a network, shapes without memory."""
    with torch.device("meta"):
        is_generator = kind == "generator"
        head = GeneratorHead(c, vocab_size) if is_generator else DiscriminatorHead(c, disc_head)
        return nn.ModuleDict({"encoder": Encoder(c, Embeddings(c, vocab_size)), "head": head})


def build_discriminator(network: Network) -> tuple[Encoder, DiscriminatorHead]:
    return network.modules["encoder"], network.modules["head"]


def build_generator(network: Network) -> tuple[Encoder, GeneratorHead]:
    return network.modules["encoder"], network.modules["head"]


def _tensors(module: nn.Module) -> Tensors:
    """A copy of its state, float32 on the CPU."""
    state = module.state_dict().items()
    return {n: t.detach().to("cpu", torch.float32, copy=True).contiguous() for n, t in state}


def _part(tensors: Tensors, prefix: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def networks_of(objective: Objective) -> tuple[Network, ...]:
    """The networks of an objective, each with its own copy of what they share."""
    networks: list[Network] = []
    for kind, pair in _pairs(objective).items():
        tensors = _tensors(pair)
        for name in ("word", "position", "segment"):  # a difference becomes the table it stands for
            table = pair.encoder.embeddings.table(name).detach()
            tensors[f"encoder.embeddings.{name}.weight"] = table.to("cpu", torch.float32, copy=True)
        networks.append(Network(kind, pair.encoder.config, objective.vocab_size, tensors))
    return tuple(networks)


# ---------------------------------------------------------------------- export


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
    model = _load(path, with_heads=True, allow_bin=allow_bin)
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
    with _replacing(out) as temporary:
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
    head, c, tensors = model.head, model.encoder.config, _tensors(model)
    if task.kind == "regression":  # to the data's own unit
        tensors |= {n: task.scale * t for n, t in _part(tensors, "head.out.").items()}
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
    with _replacing(out) as temporary:
        story = card.of_finetuning(task, results, length, has_class=has_class, run=run)
        license = dict(results.get("settings", {})).get("license", "unknown")
        _write(temporary, network, tokenizer, story, license, settings, length)
        write_atomic(temporary / "head.safetensors", to_safetensors(_part(tensors, "head.")))
        for_people = ("README.md", card.PICTURE)  # who may add to it
        files = [path for path in temporary.iterdir() if path.name not in for_people]
        record["files"] = {path.name: xxh3_file(path) for path in files}
        write_atomic(temporary / "electra.json", json_bytes(record, indent=1))
        again = load_finetuned(temporary)
        is_same = (again.task, again.form, again.length) == (task, form, length)
        is_same &= again.tokenizer.hash == tokenizer.hash
        _require_same(_tensors(again.model), tensors, is_same, "model")
        _compare(temporary, network, again.model, tokenizer)


def refuse_foreign(out: Path) -> None:
    """Nothing but an earlier export is replaced by another one."""
    is_export = (out / "electra.json").is_file()
    if out.exists() and not is_export and (not out.is_dir() or any(out.iterdir())):
        what = "There is something else at the place of the export."
        fix = "choose a new or empty directory, or an earlier export, which is replaced"
        raise ElectraError(what, where=str(out), fix=fix)


@contextmanager
def _replacing(out: Path) -> Generator[Path]:
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
    refuse_foreign(out)
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
    c, name = network.config, _CLASSES[network.kind][0]
    values = _FIXED | {theirs: getattr(c, ours) for ours, theirs in _FIELDS.items()}
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
        write_atomic(directory / _INDEX, json_bytes(index, indent=1))
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
        return {_WEIGHTS: parts[0]}
    stem = _WEIGHTS.removesuffix(".safetensors")
    return {f"{stem}-{i:05}-of-{len(parts):05}.safetensors": p for i, p in enumerate(parts, 1)}


def _names(kind: Layout, ours: str) -> tuple[str, ...]:
    """The tensors of transformers that our tensor `ours` consists of."""
    module, end = ours.rsplit(".", 1)
    i = "".join(filter(str.isdigit, module))  # of the block
    theirs = (_MODULES | _CLASSES[kind][1])[module.replace(i, "{i}") if i else module]
    parts = ("query", "key", "value") if "{qkv}" in theirs else ("",)
    return tuple(f"{theirs.format(i=i, qkv=part)}.{end}" for part in parts)


def to_transformers(network: Network) -> Tensors:
    """The tensors of `network` as transformers names and shapes them."""
    tensors, kind = network.tensors, network.kind
    last = "head.w" if kind == "discriminator" else "head.out"
    needs_dense = "head.dense" in _CLASSES[kind][1] and "head.dense.weight" not in tensors
    if kind == "encoder":
        tensors = _part(tensors, "encoder.")
    elif needs_dense and f"{last}.weight" in tensors:
        tensors = tensors | _dense_head(tensors, last)
    result: Tensors = {}
    for ours, tensor in tensors.items():
        names = _names(kind, ours)
        result |= zip(names, (t.contiguous() for t in tensor.chunk(len(names))), strict=True)
    return result


def _dense_head(tensors: Tensors, last: str) -> Tensors:
    """The linear head y = W h + b as the dense one that transformers has, dense → GELU → dense.

    GELU(y) − GELU(−y) = y Φ(y) + y Φ(−y) = y holds for every y. So C units compute y, C more −y,
    all others 0, and the last layer takes the differences. It is exact up to the rounding of
    Φ(y) + Φ(−y), and W (C, D) and b (C,) are found in it again to the last bit.
    """
    w, b = tensors[f"{last}.weight"], tensors[f"{last}.bias"]
    C, D = w.shape
    rest, one = torch.zeros(max(0, D - 2 * C), D), torch.eye(C)
    return {
        "head.dense.weight": torch.cat([w, -w, rest]),  # (D, D)
        "head.dense.bias": torch.cat([b, -b, rest[:, 0]]),
        f"{last}.weight": torch.cat([one, -one, rest[:, :C].T], 1),  # (C, D)
        f"{last}.bias": torch.zeros(C),
    }


def _without_dense_head(tensors: Tensors) -> Tensors:
    """Undoes `_dense_head` of a discriminator; any other head stays as it is."""
    ends = ("weight", "bias")
    w = {f"head.w.{end}": tensors[f"head.dense.{end}"][:1].clone() for end in ends}
    dense = _dense_head(w, "head.w")
    if all(name in tensors and torch.equal(tensors[name], t) for name, t in dense.items()):
        return {name: t for name, t in tensors.items() if name not in dense} | w
    return tensors


# ---------------------------------------------------------------------- import


def load_pretrained(path: Path) -> Pretrained:
    """The networks of an export, a transformers directory, a run or a TensorFlow checkpoint."""
    return _load(Path(path), with_heads=True)


def load_encoder(path: Path) -> LoadedEncoder:
    """The encoder of anything that `load_pretrained` reads, and of models with another head.

    These are directories of any ElectraFor… class, and what fine-tuning made: a run of it or its
    export. Where there are a discriminator and a generator, it is the discriminator's.
    """
    model = _model_of(Path(path))
    if (model / "electra.json").is_file() and (model / "config.json").is_file():
        _read_record(model)  # refuses damaged files
    return encoder_of(replace(_load(model, with_heads=False), path=Path(path)))


def encoder_of(pretrained: Pretrained) -> LoadedEncoder:
    """Its encoder, the discriminator's if there is one."""
    network = pretrained.discriminator or pretrained.network("generator")
    encoder = _part(network.tensors, "encoder.").items()
    tensors = {name.removeprefix("encoder."): tensor for name, tensor in encoder}
    tokenizer, text = pretrained.needed_tokenizer(), f"{pretrained.path} {pretrained.note}"
    return LoadedEncoder(network.config, network.vocab_size, tensors, tokenizer, text.rstrip())


def load_finetuned(path: Path) -> FineTuned:
    """The model that `export_finetuned` wrote, or that of a fine-tuning run."""
    path = _model_of(Path(path))
    record, place = _read_record(path), str(path / "electra.json")
    encoder = load_encoder(path)
    tensors = {f"encoder.{name}": t for name, t in encoder.tensors.items()}
    tensors |= _read_tensors(path / "head.safetensors")
    try:
        values, lists = dict(record["task"]), ("texts", "labels")
        names = {key: tuple(map(str, values.pop(key))) for key in lists}
        task = replace(from_dict(Task, values, where=place), **names)
        form, length, results = record["form"], int(record["length"]), dict(record["results"])
        if form not in get_args(heads.Form):
            raise ValueError(f"form {form}")
        c, outputs = encoder.config, len(task.labels) or 1
        if not 4 <= length <= c.max_positions:
            raise ValueError(f"length {length}")
        model = heads.empty_model(task.kind, c, encoder.vocab_size, outputs, form, **record["head"])
        model.load_state_dict(tensors, assign=True)
    except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
        what = f"The record does not fit the model: {type(error).__name__}: {error}."
        fix = "get the directory again, or fine-tune again"
        raise CorruptError(what, where=place, fix=fix) from error
    return FineTuned(model.eval(), task, form, encoder.tokenizer, length, results)


def _model_of(path: Path) -> Path:
    """The exported model of a fine-tuning run; any other path as it is."""
    inside = path / "model"
    is_run = (inside / "electra.json").is_file() and not (path / "run.json").is_file()
    return inside if is_run else path


def _read_record(directory: Path) -> dict[str, Any]:
    """electra.json of a fine-tuned model whose files are those that were written."""
    place = directory / "electra.json"
    record = read_settings_file(place) if place.is_file() else {}
    files = record.get("files")
    if record.get("format") != 1 or not isinstance(files, dict):
        what = "This is no fine-tuned model: there is no electra.json that lists its files."
        fix = "give a run of `electra finetune`, or the folder model in it"
        raise ElectraError(what, where=str(directory), fix=fix)
    needed = {"config.json", "model.safetensors", "head.safetensors", "tokenizer.json", *files}
    fix = "get the directory again; without electra.json its encoder alone can be read"
    with reading(place, fix):
        for name in sorted(needed):
            file = directory / Path(name).name
            if file.name != name or not file.is_file() or xxh3_file(file) != files.get(name):
                what = "The file is not the one that was written."
                raise CorruptError(what, where=str(file), fix=fix)
    return record


def _load(path: Path, *, with_heads: bool, allow_bin: bool = False) -> Pretrained:
    places = (path, path / "discriminator", path / "generator")
    directories = [place for place in places if (place / "config.json").is_file()]
    tokenizer, beside, note = None, None, ""
    if (path / "run.json").is_file():
        from ..rundir import load_run  # as in export_run

        run = load_run(path)
        networks, tokenizer = networks_of(run.objective), Tokenizer.load(run.tokenizer_dir)
    elif prefix := tf_checkpoint.find(path):
        found, note = tf_checkpoint.read_networks(prefix)
        networks = tuple(
            _network(prefix, *_read_config(prefix, values), tensors, with_heads=with_heads)
            for values, tensors in found
        )
        beside = prefix.parent
    elif directories:
        options = {"with_heads": with_heads, "allow_bin": allow_bin}
        networks = tuple(_read_network(place, **options) for place in directories)
        beside = directories[0]
    else:
        what = "This is no model: no config.json, neither here nor in discriminator and generator."
        fix = "give a run, an export, or a directory written by transformers' save_pretrained"
        raise ElectraError(what, where=str(path), fix=fix)
    if beside and any((beside / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
        tokenizer = Tokenizer.load(beside)
        record = read_json(beside.parent / "electra.json") if beside.name in get_args(Kind) else {}
        if "tokenizer_hash" in record:  # of an export
            tokenizer.require(record["tokenizer_hash"], where=beside)
    smallest = min(network.vocab_size for network in networks)
    if tokenizer is not None and tokenizer.vocab_size > smallest:
        what = f"The tokenizer has {tokenizer.vocab_size} tokens, the model embeds only {smallest}."
        fix = "use the tokenizer the model was trained with"
        raise ElectraError(what, where=str(path), fix=fix)
    d, g = (next((n for n in networks if n.kind == k), None) for k in get_args(Kind))
    return Pretrained(path, d, g, tokenizer, note)


def load_discriminator(path: Path) -> tuple[Encoder, DiscriminatorHead, Tokenizer]:
    """Encoder, head and tokenizer, ready for inference; `path` as for `load_pretrained`."""
    pretrained = load_pretrained(path)
    return *build_discriminator(pretrained.network("discriminator")), pretrained.needed_tokenizer()


def load_generator(path: Path) -> tuple[Encoder, GeneratorHead, Tokenizer]:
    """As `load_discriminator`."""
    pretrained = load_pretrained(path)
    return *build_generator(pretrained.network("generator")), pretrained.needed_tokenizer()


def _read_tensors(path: Path) -> Tensors:
    try:
        return {name: tensor.float() for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        fix = "get the file again"
        if pickles := sorted(p.name for p in path.parent.glob("*.bin")):
            fix = f"{pickles[0]} is a pickle, which can run code: if you trust it, "
            fix += "`electra import` with --allow-bin makes model.safetensors of it, or "
            fix += "transformers' save_pretrained"
        what = f"The weights cannot be read: {error}."
        raise ElectraError(what, where=str(path), fix=fix) from error


def _read_network(directory: Path, *, with_heads: bool, allow_bin: bool) -> Network:
    """The one network of a transformers directory."""
    path, place = directory / "config.json", directory / _WEIGHTS
    sizes = _read_config(path, read_settings_file(path))
    pickled = directory / "pytorch_model.bin"
    if allow_bin and pickled.is_file() and not place.exists():
        place, tensors = pickled, _unpickled(pickled)
    elif (index := directory / _INDEX).is_file() and not place.exists():
        place, tensors = index, _read_shards(index)
    else:
        tensors = _read_tensors(place)
    return _network(place, *sizes, tensors, with_heads=with_heads)


def _read_shards(index: Path) -> Tensors:
    """The tensors of a model in several files, which lie beside their list."""
    listed, fix = read_settings_file(index).get("weight_map"), "get the directory again"
    if not isinstance(listed, dict):
        raise ElectraError("There is no weight_map in it.", where=str(index), fix=fix)
    places = {str(name): str(file) for name, file in listed.items()}
    files = sorted(set(places.values()))
    if strange := [file for file in files if Path(file).name != file]:
        what = f"It names {strange[0]!a}, which is no file beside it."
        raise ElectraError(what, where=str(index), fix=fix)
    read = {file: _read_tensors(index.parent / file) for file in files}
    if lost := [name for name, file in places.items() if name not in read[file]]:
        what = f"{lost[0]!a} is not in the file that it names, {places[lost[0]]!a}."
        raise ElectraError(what, where=str(index), fix=fix)
    return {name: read[file][name] for name, file in places.items()}


def _unpickled(path: Path) -> Tensors:
    """The tensors of a pickle, read by a process that can do little else (unpickle.py)."""
    command = [sys.executable, "-I", str(Path(__file__).with_name("unpickle.py")), str(path)]
    done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    try:
        return {n: t.float() for n, t in from_safetensors(done.stdout).items()}
    except SafetensorError as error:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        what = f"The weights cannot be read: {last[:300]!a}."
        fix = "get the file again, or a model.safetensors"
        raise ElectraError(what, where=str(path), fix=fix) from error


def _network(
    place: Path, config: EncoderConfig, vocab_size: int, given: Tensors, *, with_heads: bool
) -> Network:
    """The network that transformers has under these names; they tell which one it is."""
    kind: Kind = "generator" if _part(given, "generator_") else "discriminator"
    table = given.pop(_TABLE, None)
    # What our writer makes of an empty network is what has to be there.
    empty = _empty(config, vocab_size, kind).state_dict()
    if not with_heads:
        empty = _part(empty, "encoder.")
        if not _part(given, "electra."):  # ElectraModel itself has no prefix
            given = {f"electra.{name}": t for name, t in given.items()}
        given = _part(given, "electra.")
    given = {name: t for name, t in given.items() if name not in _BUFFERS}
    expected = to_transformers(Network(kind, config, vocab_size, empty))
    problems = [f"missing: {name}" for name in expected if name not in given]
    problems += [f"unknown: {name}" for name in given if name not in expected]
    for name, tensor in expected.items():
        found, wanted = tuple(given.get(name, tensor).shape), tuple(tensor.shape)
        if found != wanted:
            problems.append(f"{name} has shape {found}, the sizes say {wanted}")
    if table is not None and not torch.equal(table, given.get(_WORDS, table)):
        problems.append(f"{_TABLE} differs from the word embeddings, which have to be tied to it")
    if problems:
        what = f"The tensors do not fit; {', '.join(problems[:9])}."
        fix = "give settings and tensors of one and the same ElectraForPreTraining or "
        fix += "ElectraForMaskedLM; of a fine-tuned model, only the encoder can be used"
        raise ElectraError(what, where=str(place), fix=fix)
    tensors = {name: torch.cat([given[part] for part in _names(kind, name)]) for name in empty}
    tensors = _without_dense_head(tensors) if with_heads else tensors
    return Network(kind, config, vocab_size, tensors)


def _read_config(path: Path, values: dict[str, Any]) -> tuple[EncoderConfig, int]:
    """Encoder settings and vocabulary size of a transformers config.json."""
    values = {"vocab_size": 30522, **values}
    vocab_size = values["vocab_size"]
    wrong = [key for key, only in _FIXED.items() if values.get(key, only) != only]
    if type(vocab_size) is not int or not 1 <= vocab_size < 1 << 31:
        wrong.append("vocab_size")
    wrong += [key for key in ("auto_map", "trust_remote_code") if values.get(key)]  # code to run
    if wrong:
        found = ", ".join(f"{key} is {values[key]!r}" for key in wrong)
        fix = f"only models with {_FIXED} can be read"
        raise ElectraError(f"This is no ELECTRA model: {found}.", where=str(path), fix=fix)
    given = {ours: values[theirs] for ours, theirs in _FIELDS.items() if theirs in values}
    try:
        return from_dict(EncoderConfig, given, where="encoder"), vocab_size
    except ElectraError as error:  # names the setting, but not the file it comes from
        raise ElectraError(error.what, where=f"{path}: {error.where}", fix=error.fix) from error


# ---------------------------------------------------------------------- continue training


def config_of(pretrained: Pretrained, base: PretrainConfig) -> PretrainConfig:
    """`base` with sizes, sharing and head such that training continues from `pretrained`.

    What the two networks share is seen from their tensors. A generator that is missing takes its
    size from `base`, a missing discriminator is made as large as the generator. A warm-up in steps,
    which `base` has for a million of them, becomes a share of the run.
    """
    d, g = pretrained.discriminator, pretrained.generator
    generator, objective = base.generator, base.objective
    if d is None or objective.kind in ("mlm", "replace_mlm"):
        encoder = pretrained.network("generator").config
        generator = replace(generator, width=1.0, depth=1.0)
    else:
        encoder, objective = d.config, replace(objective, disc_head=d.disc_head)
        if g is not None:
            width = g.config.hidden_size / d.config.hidden_size
            depth = g.config.layers / d.config.layers
            generator = replace(generator, width=width, depth=depth, sharing=_sharing(d, g))
    encoder = replace(encoder, init=base.encoder.init)  # which no file of transformers knows
    data = replace(base.data, sequence_length=min(base.data.sequence_length, encoder.max_positions))
    optim = base.optim
    if optim.warmup_percent is None:
        optim = replace(optim, warmup_percent=_REWARM)
    changed = {"encoder": encoder, "generator": generator, "objective": objective, "data": data}
    return replace(base, optim=optim, **changed)


def _sharing(d: Network, g: Network) -> Sharing:
    """The closest sharing under which the tensors could have been trained."""
    theirs = _part(g.tensors, "encoder.")
    both = theirs.keys() & d.tensors.keys()
    apart = [name for name in both if not torch.equal(d.tensors[name], theirs[name])]
    if not apart and d.config == g.config:
        return "all"
    return "none" if any("embeddings" in name for name in apart) else "embeddings"


def initial_state(pretrained: Pretrained, config: PretrainConfig, vocab_size: int) -> InitialState:
    """Every parameter that `config` trains: those of `pretrained`, and new ones where it has none.

    Raises when a network that is there does not fit the settings.
    """
    special = SpecialIds(0, 1, 2, 3, 4)  # of no weight: nothing is masked
    objective, notes = objective_of(pretrained, config, vocab_size, special)
    return InitialState({name: p.detach() for name, p in objective.named_parameters()}, notes)


def objective_of(
    pretrained: Pretrained,
    config: PretrainConfig,
    vocab_size: int,
    special: SpecialIds,
    frequencies: Tensor | None = None,
) -> tuple[Objective, tuple[str, ...]]:
    """The objective of `config` with these parameters, and what is new in them; frequencies: (V,)
    for a generator that is no network."""
    if config.objective.kind in ("mlm", "replace_mlm") or config.generator.frozen:
        pretrained.network("generator")  # nothing else learns, or this never will: it must be there
    notes = list[str]()
    with torch.device("meta"):  # what does not fit is said before anything is drawn
        asked_for = _pairs(objective_class(config)(config, vocab_size, special))
    for kind, pair in asked_for.items():
        network: Network | None = getattr(pretrained, kind)
        if network is None:
            notes.append(f"{pretrained.path} holds no {kind}: it starts from new weights")
            continue
        fresh = Network(kind, pair.encoder.config, vocab_size, pair.state_dict())
        facts, asked = _facts(network), _facts(fresh)
        wrong = [f"{k} is {facts[k]}, not {asked[k]}" for k in asked if facts[k] != asked[k]]
        if wrong:
            what = f"The {kind} does not fit the settings: {', '.join(wrong)}."
            fix = "use the model's own tokenizer, and leave out its sizes: they are taken from it"
            raise ElectraError(what, where=str(pretrained.path), fix=fix)
    objective = build_objective(config, vocab_size, special, frequencies=frequencies)
    pairs, d, g = _pairs(objective), pretrained.discriminator, pretrained.generator
    if g is not None and "generator" in pairs:
        pairs["generator"].load_state_dict(g.tensors)
    if d is not None and "discriminator" in pairs:  # comes last and decides on what is shared
        pairs["discriminator"].load_state_dict(d.tensors)
        embeddings = pairs["discriminator"].encoder.embeddings
        if embeddings.base is not None:  # what was loaded are tables, not differences
            for name in ("word", "position", "segment"):
                with torch.no_grad():
                    own = getattr(embeddings, name).weight
                    own.sub_(getattr(embeddings.base, name).weight)
    now = pairs["generator"].state_dict() if "generator" in pairs else {}
    if g is not None and any(not torch.equal(t, g.tensors[name]) for name, t in now.items()):
        shared = "embeddings" if config.generator.sharing == "embeddings" else "encoder"
        notes.append(f"the generator gives up its own {shared} for the discriminator's")
    return objective, tuple(notes)


def _facts(network: Network) -> dict[str, Any]:
    """What has to be equal for one network to take the place of the other: not the dropout."""
    sizes = {key: getattr(network.config, key) for key in _FIELDS if "dropout" not in key}
    return {"vocab_size": network.vocab_size, **sizes, "disc_head": network.disc_head}


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
        other, info = getattr(transformers, _CLASSES[network.kind][0]).from_pretrained(
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
