"""Models in the layout of transformers, read: ours and other people's.

Comes in: a directory that `hf_export` or transformers wrote, a run, or a TensorFlow checkpoint.
Goes out: tensors under our own names, from which training continues (`load_pretrained`,
`load_encoder`) and inference starts (`load_finetuned`). Only safetensors and JSON are read, and
TensorFlow's checkpoints; a pickle only by `hf_export.import_model`, when it is told to.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_safetensors
from safetensors.torch import load_file
from torch import Tensor

from ..config import EncoderConfig, PretrainConfig, Sharing, from_dict, read_settings_file
from ..data.tokenizer import Tokenizer
from ..encoder import DiscriminatorHead, Encoder
from ..errors import CorruptError, ElectraError
from ..files import (
    read_json,
    reading,
    xxh3_file,
)
from ..finetuning import heads
from ..finetuning.tasks import Task
from ..objectives import (
    Objective,
    SpecialIds,
    build_objective,
    objective_class,
)
from . import tf_checkpoint
from .layout import (
    BUFFERS,
    CLASSES,
    FIELDS,
    FIXED,
    INDEX,
    TABLE,
    WEIGHTS,
    WORDS,
    Kind,
    Network,
    Tensors,
    build_discriminator,
    empty_network,
    names_of,
    networks_of,
    pairs_of,
    to_transformers,
    with_prefix,
    without_dense_head,
)

_REWARM = 6.0  # percent of a run that goes on from a model ("Don't Stop Pretraining", ACL 2020)


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
            fix = f"give a directory that holds one, saved as {CLASSES[kind][0]}"
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
        encoder = empty_network(self.config, self.vocab_size, "encoder")["encoder"]
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


class InitialState(NamedTuple):
    """Parameters to start from, and what is new in them."""

    parameters: Tensors
    notes: tuple[str, ...]


# ---------------------------------------------------------------------- read


def load_pretrained(path: Path) -> Pretrained:
    """The networks of an export, a transformers directory, a run or a TensorFlow checkpoint."""
    return read_model(Path(path), with_heads=True)


def load_encoder(path: Path) -> LoadedEncoder:
    """The encoder of anything that `load_pretrained` reads, and of models with another head.

    These are directories of any ElectraFor… class, and what fine-tuning made: a run of it or its
    export. Where there are a discriminator and a generator, it is the discriminator's.
    """
    model = _model_of(Path(path))
    if (model / "electra.json").is_file() and (model / "config.json").is_file():
        _read_record(model)  # refuses damaged files
    return encoder_of(replace(read_model(model, with_heads=False), path=Path(path)))


def encoder_of(pretrained: Pretrained) -> LoadedEncoder:
    """Its encoder, the discriminator's if there is one."""
    network = pretrained.discriminator or pretrained.network("generator")
    encoder = with_prefix(network.tensors, "encoder.").items()
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


def _refuse_missing(path: Path) -> None:
    """A mistyped path is told as one; it may also be meant as the name of a model on the Hub."""
    if not os.path.exists(path):
        fix = "check the path"
        if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path)):
            fix += "; models are not downloaded, so for one on the Hugging Face Hub: "
            fix += f"hf download {path} --local-dir {path.name}, then give {path.name}"
        raise ElectraError("There is nothing at this path.", where=str(path), fix=fix)


def _read_record(directory: Path) -> dict[str, Any]:
    """electra.json of a fine-tuned model whose files are those that were written."""
    _refuse_missing(directory)
    place = directory / "electra.json"
    record = read_settings_file(place) if place.is_file() else {}
    files = record.get("files")
    if record.get("format") != 1 or not isinstance(files, dict):
        what = "This is no fine-tuned model: there is no electra.json that lists its files."
        fix = "give a run of `electra finetune`, or the folder model in it"
        with suppress(ElectraError):  # whatever is wrong with it as a model before a task as well
            load_pretrained(directory)
            what = "This is a pre-trained model, not a fine-tuned one."
            fix = f"fine-tune it first: electra finetune --model {shlex.quote(str(directory))} …"
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


def read_model(path: Path, *, with_heads: bool, allow_bin: bool = False) -> Pretrained:
    of_task = ("finetune.json", "head.safetensors")
    if with_heads and any((path / name).is_file() for name in of_task):
        fix = "use electra predict or electra.load_finetuned; this needs the pre-trained model "
        fix += "that it was fine-tuned from, a run or an export"
        raise ElectraError("This model was fine-tuned for a task.", where=str(path), fix=fix)
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
        _refuse_missing(path)
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
    path, place = directory / "config.json", directory / WEIGHTS
    sizes = _read_config(path, read_settings_file(path))
    pickled = directory / "pytorch_model.bin"
    if allow_bin and pickled.is_file() and not place.exists():
        place, tensors = pickled, _unpickled(pickled)
    elif (index := directory / INDEX).is_file() and not place.exists():
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
    kind: Kind = "generator" if with_prefix(given, "generator_") else "discriminator"
    table = given.pop(TABLE, None)
    # What our writer makes of an empty network is what has to be there.
    empty = empty_network(config, vocab_size, kind).state_dict()
    if not with_heads:
        empty = with_prefix(empty, "encoder.")
        if not with_prefix(given, "electra."):  # ElectraModel itself has no prefix
            given = {f"electra.{name}": t for name, t in given.items()}
        given = with_prefix(given, "electra.")
    given = {name: t for name, t in given.items() if name not in BUFFERS}
    expected = to_transformers(Network(kind, config, vocab_size, empty))
    problems = [f"missing: {name}" for name in expected if name not in given]
    problems += [f"unknown: {name}" for name in given if name not in expected]
    for name, tensor in expected.items():
        found, wanted = tuple(given.get(name, tensor).shape), tuple(tensor.shape)
        if found != wanted:
            problems.append(f"{name} has shape {found}, the sizes say {wanted}")
    if table is not None and not torch.equal(table, given.get(WORDS, table)):
        problems.append(f"{TABLE} differs from the word embeddings, which have to be tied to it")
    if problems:
        what = f"The tensors do not fit; {', '.join(problems[:9])}."
        fix = "give settings and tensors of one and the same ElectraForPreTraining or "
        fix += "ElectraForMaskedLM; of a fine-tuned model, only the encoder can be used"
        raise ElectraError(what, where=str(place), fix=fix)
    tensors = {name: torch.cat([given[part] for part in names_of(kind, name)]) for name in empty}
    tensors = without_dense_head(tensors) if with_heads else tensors
    return Network(kind, config, vocab_size, tensors)


def _read_config(path: Path, values: dict[str, Any]) -> tuple[EncoderConfig, int]:
    """Encoder settings and vocabulary size of a transformers config.json."""
    values = {"vocab_size": 30522, **values}
    vocab_size = values["vocab_size"]
    wrong = [key for key, only in FIXED.items() if values.get(key, only) != only]
    if type(vocab_size) is not int or not 1 <= vocab_size < 1 << 31:
        wrong.append("vocab_size")
    wrong += [key for key in ("auto_map", "trust_remote_code") if values.get(key)]  # code to run
    if wrong:
        found = ", ".join(f"{key} is {values[key]!r}" for key in wrong)
        fix = f"only models with {FIXED} can be read"
        raise ElectraError(f"This is no ELECTRA model: {found}.", where=str(path), fix=fix)
    given = {ours: values[theirs] for ours, theirs in FIELDS.items() if theirs in values}
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
    theirs = with_prefix(g.tensors, "encoder.")
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
        asked_for = pairs_of(objective_class(config)(config, vocab_size, special))
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
    pairs, d, g = pairs_of(objective), pretrained.discriminator, pretrained.generator
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
    sizes = {key: getattr(network.config, key) for key in FIELDS if "dropout" not in key}
    return {"vocab_size": network.vocab_size, **sizes, "disc_head": network.disc_head}
