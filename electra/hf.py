"""Both networks in the layout of transformers: export, import, and the proof that they agree.

Comes in: a run, an objective in memory, or a directory that transformers wrote. Goes out: an export

    OUT/electra.json         what was trained: settings, step, tokenizer hash
    OUT/discriminator/       loads as ElectraForPreTraining (and AutoModel for fine-tuning)
    OUT/generator/           loads as ElectraForMaskedLM; the only one of a masked language model
        config.json  model.safetensors  tokenizer.json …  README.md

or a `Pretrained`: the same tensors under our own names, from which training continues
(`initial_state`) and inference starts (`load_discriminator`). An export is read back and compared
before it takes its name; transformers, if it is installed, has to compute the same logits and the
same token ids. Only safetensors and JSON are ever read, never a pickle.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from . import __version__
from .config import EncoderConfig, PretrainConfig, Sharing, from_dict, read_settings_file, to_dict
from .encoder import DiscriminatorHead, Embeddings, Encoder, GeneratorHead
from .errors import CorruptError, ElectraError
from .files import fsync_dir, json_bytes, storage_errors, write_atomic
from .objectives import MaskedLM, Objective, ReplacedTokenDetection, SpecialIds, build_objective
from .tokenizer import Tokenizer

Kind = Literal["discriminator", "generator"]
DiscHead = Literal["dense", "linear"]

_ARCHITECTURE: dict[Kind, str] = {
    "discriminator": "ElectraForPreTraining",
    "generator": "ElectraForMaskedLM",
}
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
# What the encoder of the paper cannot be otherwise.
_FIXED: dict[str, Any] = {
    "model_type": "electra",
    "hidden_act": "gelu",
    "type_vocab_size": 2,
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
# Our modules and those of transformers whose tensors they hold, one below the other.
_MODULES: dict[str, tuple[str, ...]] = {
    "encoder.embeddings.word": ("electra.embeddings.word_embeddings",),
    "encoder.embeddings.position": ("electra.embeddings.position_embeddings",),
    "encoder.embeddings.segment": ("electra.embeddings.token_type_embeddings",),
    "encoder.embeddings.norm": ("electra.embeddings.LayerNorm",),
    "encoder.project": ("electra.embeddings_project",),
    "encoder.blocks.{i}.qkv": tuple(
        "electra.encoder.layer.{i}.attention.self." + part for part in ("query", "key", "value")
    ),
    "encoder.blocks.{i}.out": ("electra.encoder.layer.{i}.attention.output.dense",),
    "encoder.blocks.{i}.attention_norm": ("electra.encoder.layer.{i}.attention.output.LayerNorm",),
    "encoder.blocks.{i}.up": ("electra.encoder.layer.{i}.intermediate.dense",),
    "encoder.blocks.{i}.down": ("electra.encoder.layer.{i}.output.dense",),
    "encoder.blocks.{i}.ffn_norm": ("electra.encoder.layer.{i}.output.LayerNorm",),
    "head.dense": ("{kind}_predictions.dense",),
    "head.norm": ("{kind}_predictions.LayerNorm",),
    "head.w": ("{kind}_predictions.dense_prediction",),
    "head": ("{kind}_lm_head",),  # has a bias only; its table is that of the embeddings
}
_WORDS, _TABLE = "electra.embeddings.word_embeddings.weight", "generator_lm_head.weight"
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

    kind: Kind
    config: EncoderConfig
    vocab_size: int
    tensors: dict[str, Tensor]

    @property
    def disc_head(self) -> DiscHead:
        return "dense" if "head.dense.weight" in self.tensors else "linear"


@dataclass(frozen=True)
class Pretrained:
    """What a directory holds: at least one of the networks, and the tokenizer if it is there."""

    path: Path
    discriminator: Network | None
    generator: Network | None
    tokenizer: Tokenizer | None

    def network(self, kind: Kind) -> Network:
        """The network of that kind; an error that says so when it is not there."""
        network = self.discriminator if kind == "discriminator" else self.generator
        if network is None:
            raise ElectraError(
                f"There is no {kind} here.",
                where=str(self.path),
                fix=f"give a directory that holds one, saved as {_ARCHITECTURE[kind]}",
            )
        return network

    def needed_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ElectraError(
                "The model has no tokenizer beside it.",
                where=str(self.path),
                fix="copy its tokenizer.json or vocab.txt into the directory",
            )
        return self.tokenizer


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how it was checked."""

    directories: tuple[Path, ...]
    checks: tuple[str, ...]
    max_difference: float | None  # of logits to transformers; None where it is not installed


class InitialState(NamedTuple):
    """Parameters to start from, and what is new in them."""

    parameters: dict[str, Tensor]
    notes: tuple[str, ...]


class _Pair(nn.Module):
    """The modules of a network; names in its state are those of `Network.tensors`."""

    def __init__(self, encoder: Encoder, head: DiscriminatorHead | GeneratorHead) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head


def _pairs(objective: Objective) -> dict[Kind, _Pair]:
    if isinstance(objective, ReplacedTokenDetection):
        return {
            "discriminator": _Pair(objective.discriminator, objective.discriminator_head),
            "generator": _Pair(objective.generator, objective.generator_head),
        }
    assert isinstance(objective, MaskedLM)
    return {"generator": _Pair(objective.generator, objective.generator_head)}


def _empty(kind: Kind, config: EncoderConfig, vocab_size: int, disc_head: DiscHead) -> _Pair:
    """Shapes without memory."""
    with torch.device("meta"):
        encoder = Encoder(config, Embeddings(config, vocab_size))
        if kind == "discriminator":
            return _Pair(encoder, DiscriminatorHead(config, disc_head))
        return _Pair(encoder, GeneratorHead(config, vocab_size))


def _build(network: Network) -> _Pair:
    pair = _empty(network.kind, network.config, network.vocab_size, network.disc_head)
    pair.load_state_dict(network.tensors, assign=True)
    return pair.requires_grad_(False).eval()


# ---------------------------------------------------------------------- export


def export_run(run: Path, out: Path) -> ExportReport:
    """Export the newest checkpoint of a run directory."""
    from .pretrain import load_run  # imports the whole of training, which no reader here needs

    loaded = load_run(run)
    return export(loaded.objective, loaded.config, loaded.tokenizer_dir, out, step=loaded.step)


def export(
    objective: Objective,
    config: PretrainConfig,
    tokenizer_dir: Path,
    out: Path,
    *,
    step: int | None = None,
) -> ExportReport:
    """Write the networks of `objective` (float32) for transformers and check them.

    An earlier export at `out` is replaced; anything else there is left alone, with an error.
    """
    networks = networks_of(objective)
    tokenizer = Tokenizer.load(tokenizer_dir)
    record = {
        "version": __version__,
        "step": step,
        "config": to_dict(config),
        "tokenizer_hash": tokenizer.hash,
    }
    with _replacing(out) as temporary:
        for network in networks:
            directory = temporary / network.kind
            directory.mkdir()
            tokenizer.save(directory, max_length=network.config.max_positions)
            settings = {
                **_FIXED,
                **{theirs: getattr(network.config, ours) for ours, theirs in _FIELDS.items()},
                "architectures": [_ARCHITECTURE[network.kind]],
                "vocab_size": network.vocab_size,
                "pad_token_id": tokenizer.pad_id,
                "tie_word_embeddings": True,
                "dtype": "float32",
            }
            data = to_safetensors(to_transformers(network), metadata={"format": "pt"})
            write_atomic(directory / "config.json", json_bytes(settings, indent=2))
            write_atomic(directory / "model.safetensors", data)
            write_atomic(directory / "README.md", _model_card(network, config, step).encode())
        write_atomic(temporary / "electra.json", json_bytes(record, indent=1))
        checks, difference = _verify(networks, tokenizer, temporary)
    return ExportReport(tuple(out / network.kind for network in networks), checks, difference)


def networks_of(objective: Objective) -> tuple[Network, ...]:
    """The networks of an objective, each with its own copy of what they share."""
    found: list[Network] = []
    for kind, pair in _pairs(objective).items():
        tensors = {
            name: tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
            for name, tensor in pair.state_dict().items()
        }
        found.append(Network(kind, pair.encoder.config, objective.vocab_size, tensors))
    return tuple(found)


@contextmanager
def _replacing(out: Path) -> Generator[Path]:
    """A directory beside `out` that takes its place when the block ends, or vanishes with it."""
    is_export = (out / "electra.json").is_file()
    if out.exists() and not is_export and (not out.is_dir() or any(out.iterdir())):
        raise ElectraError(
            "There is something else at the place of the export.",
            where=str(out),
            fix="choose a new or empty directory, or an earlier export, which is replaced",
        )
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        with storage_errors(out):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        yield temporary
        with storage_errors(out):
            if out.exists():
                shutil.rmtree(out)
            os.replace(temporary, out)
            fsync_dir(out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _model_card(network: Network, config: PretrainConfig, step: int | None) -> str:
    """README.md of one network; holds no text that users wrote, so nothing has to be escaped."""
    c, data = network.config, config.data
    return f"""\
---
library_name: transformers
tags: [electra]
---

# ELECTRA {network.kind}

`{_ARCHITECTURE[network.kind]}` loads it with its head, `AutoModel` takes the encoder alone.
It has {c.layers} layers of {c.hidden_size} units, a vocabulary of {network.vocab_size:,} tokens,
and reads sequences of up to {c.max_positions}. Trained after Clark et al. (ICLR 2020) by electra
{__version__}: {f"{step:,} steps" if step is not None else "steps"} of {data.batch_size} × \
{data.sequence_length} tokens.
"""


def _names(kind: Kind, ours: str) -> tuple[str, ...]:
    """The tensors of transformers that our tensor `ours` consists of."""
    module, end = ours.rsplit(".", 1)
    i = "".join(filter(str.isdigit, module))  # of the block
    parts = _MODULES[module.replace(i, "{i}") if i else module]
    return tuple(f"{part.format(i=i, kind=kind)}.{end}" for part in parts)


def to_transformers(network: Network) -> dict[str, Tensor]:
    """The tensors of `network` as transformers names and shapes them."""
    tensors = network.tensors
    if network.kind == "discriminator" and network.disc_head == "linear":
        tensors = tensors | _dense_head(tensors["head.w.weight"], tensors["head.w.bias"])
    result: dict[str, Tensor] = {}
    for ours, tensor in tensors.items():
        names = _names(network.kind, ours)
        result |= zip(names, (t.contiguous() for t in tensor.chunk(len(names))), strict=True)
    return result


def _dense_head(w: Tensor, b: Tensor) -> dict[str, Tensor]:
    """The linear head y = wᵀh + b as the dense one that transformers has, dense → GELU → dense.

    GELU(y) − GELU(−y) = y Φ(y) + y Φ(−y) = y holds for every y. So one unit computes y, a second
    one −y, all others 0, and the last layer takes the difference. It is exact up to the rounding
    of Φ(y) + Φ(−y), and w (1, D) and b (1,) are found in it again to the last bit.
    """
    units = torch.zeros(w.shape[1], 1)  # (D, 1)
    units[:1], units[1:2] = 1.0, -1.0
    return {
        "head.dense.weight": units * w,  # (D, D)
        "head.dense.bias": units[:, 0] * b,
        "head.w.weight": units.T,
        "head.w.bias": torch.zeros(1),
    }


def _without_dense_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undoes `_dense_head`; any other head stays as it is."""
    w, b = (tensors[f"head.dense.{end}"][:1].clone() for end in ("weight", "bias"))
    dense = _dense_head(w, b)
    if all(name in tensors and torch.equal(tensors[name], t) for name, t in dense.items()):
        rest = {name: t for name, t in tensors.items() if name not in dense}
        return {**rest, "head.w.weight": w, "head.w.bias": b}
    return tensors


# ---------------------------------------------------------------------- import


def load_pretrained(path: Path) -> Pretrained:
    """The networks of an export, of one transformers directory, or of a run's newest checkpoint."""
    path = Path(path)
    places = (path, path / "discriminator", path / "generator")
    directories = [place for place in places if (place / "config.json").is_file()]
    tokenizer: Tokenizer | None = None
    if (path / "run.json").is_file():
        from .pretrain import load_run  # as in export_run

        run = load_run(path)
        networks, tokenizer = networks_of(run.objective), Tokenizer.load(run.tokenizer_dir)
    elif directories:
        networks = tuple(map(_read_network, directories))
        if any((directories[0] / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
            tokenizer = Tokenizer.load(directories[0])
    else:
        raise ElectraError(
            "This is no model: there is no config.json, neither here nor in the folders "
            "discriminator and generator.",
            where=str(path),
            fix="give a run, an export, or a directory written by transformers' save_pretrained",
        )
    smallest = min(network.vocab_size for network in networks)
    if tokenizer is not None and tokenizer.vocab_size > smallest:
        raise ElectraError(
            f"The tokenizer has {tokenizer.vocab_size} tokens, the model embeds only {smallest}.",
            where=str(path),
            fix="use the tokenizer the model was trained with",
        )
    found = {network.kind: network for network in networks}
    return Pretrained(path, found.get("discriminator"), found.get("generator"), tokenizer)


def load_discriminator(path: Path) -> tuple[Encoder, DiscriminatorHead, Tokenizer]:
    """Encoder, head and tokenizer, ready for inference; `path` as for `load_pretrained`."""
    pretrained = load_pretrained(path)
    return *build_discriminator(pretrained.network("discriminator")), pretrained.needed_tokenizer()


def load_generator(path: Path) -> tuple[Encoder, GeneratorHead, Tokenizer]:
    """Encoder, head and tokenizer, ready for inference; `path` as for `load_pretrained`."""
    pretrained = load_pretrained(path)
    return *build_generator(pretrained.network("generator")), pretrained.needed_tokenizer()


def build_discriminator(network: Network) -> tuple[Encoder, DiscriminatorHead]:
    pair = _build(network)
    assert isinstance(pair.head, DiscriminatorHead)
    return pair.encoder, pair.head


def build_generator(network: Network) -> tuple[Encoder, GeneratorHead]:
    pair = _build(network)
    assert isinstance(pair.head, GeneratorHead)
    return pair.encoder, pair.head


def _read_network(directory: Path) -> Network:
    """The one network of a transformers directory; its tensors tell which one it is."""
    config, vocab_size = _read_config(directory / "config.json")
    path = directory / "model.safetensors"
    try:
        given = {name: t.float() for name, t in load_file(path).items() if name not in _BUFFERS}
    except (SafetensorError, OSError) as error:
        raise ElectraError(
            f"The weights cannot be read: {error}.",
            where=str(path),
            fix="get the file again; a pickle (*.bin) is never read, because it can run any code: "
            "if you trust it, let transformers' save_pretrained write model.safetensors",
        ) from error
    is_generator = any(name.startswith("generator_") for name in given)
    kind: Kind = "generator" if is_generator else "discriminator"
    table = given.pop(_TABLE, None)
    # What our writer makes of an empty network is what has to be there.
    empty = _empty(kind, config, vocab_size, "dense").state_dict()
    expected = to_transformers(Network(kind, config, vocab_size, empty))
    problems = [f"missing: {name}" for name in expected if name not in given]
    problems += [f"unknown: {name}" for name in given if name not in expected]
    problems += [
        f"{name} has shape {tuple(given[name].shape)}, config.json says {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in given and given[name].shape != tensor.shape
    ]
    if table is not None and not torch.equal(table, given.get(_WORDS, table)):
        problems.append(f"{_TABLE} differs from the word embeddings, which have to be tied to it")
    if problems:
        raise ElectraError(
            f"The tensors do not fit; {', '.join(problems[:9])}.",
            where=str(path),
            fix="give config.json and model.safetensors of one and the same ElectraForPreTraining "
            "or ElectraForMaskedLM",
        )
    tensors = {name: torch.cat([given[part] for part in _names(kind, name)]) for name in empty}
    return Network(kind, config, vocab_size, _without_dense_head(tensors))


def _read_config(path: Path) -> tuple[EncoderConfig, int]:
    """Encoder settings and vocabulary size of a transformers config.json."""
    values = {"vocab_size": 30522, **read_settings_file(path)}
    vocab_size = values["vocab_size"]
    wrong = [key for key, only in _FIXED.items() if values.get(key, only) != only]
    if not isinstance(vocab_size, int) or vocab_size < 1:
        wrong.append("vocab_size")
    if wrong:
        raise ElectraError(
            f"This is no ELECTRA model: {', '.join(f'{key} is {values[key]!r}' for key in wrong)}.",
            where=str(path),
            fix=f"only models with {_FIXED} can be read",
        )
    given = {ours: values[theirs] for ours, theirs in _FIELDS.items() if theirs in values}
    try:
        return from_dict(EncoderConfig, given, where="encoder"), vocab_size
    except ElectraError as error:  # names the setting, but not the file it comes from
        raise ElectraError(error.what, where=f"{path}: {error.where}", fix=error.fix) from error


# ---------------------------------------------------------------------- continue training


def config_of(pretrained: Pretrained, base: PretrainConfig) -> PretrainConfig:
    """`base` with sizes, sharing and head such that training continues from `pretrained`.

    What the two networks share is seen from their tensors. A generator that is missing takes its
    size from `base`, a missing discriminator is made as large as the generator.
    """
    d, g = pretrained.discriminator, pretrained.generator
    generator, objective = base.generator, base.objective
    if d is None or objective.kind == "mlm":
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
    return replace(base, encoder=encoder, generator=generator, objective=objective, data=data)


def _sharing(d: Network, g: Network) -> Sharing:
    """The closest sharing under which the tensors could have been trained."""
    encoder = {name for name in d.tensors.keys() & g.tensors.keys() if name.startswith("encoder.")}
    apart = [name for name in encoder if not torch.equal(d.tensors[name], g.tensors[name])]
    if not apart and d.config == g.config:
        return "all"
    return "none" if any("embeddings" in name for name in apart) else "embeddings"


def initial_state(pretrained: Pretrained, config: PretrainConfig, vocab_size: int) -> InitialState:
    """Every parameter that `config` trains: those of `pretrained`, and new ones where it has none.

    Raises when a network that is there does not fit the settings.
    """
    if config.objective.kind == "mlm":
        pretrained.network("generator")  # nothing else is trained, so it has to be there
    # The special ids are of no weight here: nothing is masked.
    objective = build_objective(config, vocab_size, SpecialIds(0, 1, 2, 3, 4))
    notes: list[str] = []
    for fresh in networks_of(objective):
        network: Network | None = getattr(pretrained, fresh.kind)
        if network is None:
            notes.append(f"{pretrained.path} holds no {fresh.kind}: it starts from new weights")
            continue
        facts, asked = _facts(network), _facts(fresh)
        wrong = [
            f"{key} is {facts[key]}, not {asked[key]}" for key in asked if facts[key] != asked[key]
        ]
        if wrong:
            raise ElectraError(
                f"The {fresh.kind} does not fit the settings: {', '.join(wrong)}.",
                where=str(pretrained.path),
                fix="prepare the corpus with the model's own tokenizer, and leave out the sizes of "
                "encoder and generator and objective.disc_head: they are taken from the model",
            )
    pairs, d, g = _pairs(objective), pretrained.discriminator, pretrained.generator
    if g is not None:
        pairs["generator"].load_state_dict(g.tensors)
    if d is not None and "discriminator" in pairs:  # comes last and decides on what is shared
        pairs["discriminator"].load_state_dict(d.tensors)
    now = pairs["generator"].state_dict()
    if g is not None and any(not torch.equal(t, now[name]) for name, t in g.tensors.items()):
        shared = "embeddings" if config.generator.sharing == "embeddings" else "encoder"
        notes.append(f"the generator gives up its own {shared} for the discriminator's")
    parameters = {name: p.detach() for name, p in objective.named_parameters()}
    return InitialState(parameters, tuple(notes))


def _facts(network: Network) -> dict[str, Any]:
    """What has to be equal for one network to take the place of the other: not the dropout."""
    sizes = {key: getattr(network.config, key) for key in _FIELDS if "dropout" not in key}
    return {"vocab_size": network.vocab_size, **sizes, "disc_head": network.disc_head}


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise CorruptError(
            f"The export was not kept: {what}.",
            fix="this is a bug or a broken disk; please report it with this message",
        )


def _verify(
    networks: tuple[Network, ...], tokenizer: Tokenizer, out: Path
) -> tuple[tuple[str, ...], float | None]:
    """Reads back what was written; returns the checks that were made and the largest difference."""
    again = load_pretrained(out)
    for network in networks:
        read = again.network(network.kind)
        is_same = read.tensors.keys() == network.tensors.keys() and all(
            torch.equal(read.tensors[name], tensor) for name, tensor in network.tensors.items()
        )
        is_same &= replace(read.config, init=network.config.init) == network.config
        _require(is_same, f"the {network.kind} reads back otherwise")
    _require(again.needed_tokenizer().hash == tokenizer.hash, "the tokenizer reads back otherwise")
    checks = ("read back bit for bit",)
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:  # not installed, or not for this torch: it is only a second opinion
        return checks, None
    logging = transformers.utils.logging
    has_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        difference = max(
            _compare_with_transformers(transformers, network, tokenizer, out / network.kind)
            for network in networks
        )
    finally:
        if has_bars:
            logging.enable_progress_bar()
    done = f"logits and token ids equal in transformers {transformers.__version__}"
    return (*checks, done), difference


@torch.no_grad()
def _compare_with_transformers(
    transformers: Any, network: Network, tokenizer: Tokenizer, directory: Path
) -> float:
    """The largest difference of logits; raises if it, or a single token id, is wrong."""
    theirs = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model, info = getattr(transformers, _ARCHITECTURE[network.kind]).from_pretrained(
        directory, local_files_only=True, output_loading_info=True, dtype=torch.float32
    )
    _require(not any(info.values()), f"transformers finds other tensors: {info}")
    pairs = list(zip(_TEXTS, reversed(_TEXTS), strict=True))
    batch = theirs(pairs, padding=True, verbose=False, return_tensors="pt")
    for pair, row, mask in zip(pairs, batch["input_ids"], batch["attention_mask"], strict=True):
        is_same = row[mask == 1].tolist() == tokenizer.encode(*pair)
        _require(is_same, f"transformers gives other token ids for {pair}")
    given = {name: value[:, : network.config.max_positions] for name, value in batch.items()}
    x, mask = given["input_ids"], given["attention_mask"].bool()
    ours = _build(network)
    h = ours.encoder(x, given["token_type_ids"], mask, None)[mask]
    table = () if network.kind == "discriminator" else (ours.encoder.embeddings.word.weight,)
    logits = ours.head(h, *table)
    difference = float((logits - model.eval()(**given).logits[mask]).abs().max())
    _require(
        difference <= _TOLERANCE * max(1.0, float(logits.abs().max())),
        f"the {network.kind}'s logits differ by {difference:.1e} in transformers",
    )
    return difference
