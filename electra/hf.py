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

import contextlib
import importlib
import json
import os
import shutil
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from . import __version__
from .config import (
    DataConfig,
    EncoderConfig,
    GeneratorConfig,
    PretrainConfig,
    Sharing,
    from_dict,
    to_dict,
)
from .encoder import DiscriminatorHead, Embeddings, Encoder, GeneratorHead
from .errors import CorruptError, ElectraError
from .files import fsync_dir, json_bytes, storage_errors, write_atomic
from .objectives import MaskedLM, Objective, ReplacedTokenDetection, SpecialIds, build_objective
from .tokenizer import Tokenizer

Kind = Literal["discriminator", "generator"]
DiscHead = Literal["dense", "linear"]
Head = TypeVar("Head", DiscriminatorHead, GeneratorHead)

_ARCHITECTURE: dict[Kind, str] = {
    "discriminator": "ElectraForPreTraining",
    "generator": "ElectraForMaskedLM",
}
_AUTO_CLASS: dict[Kind, str] = {
    "discriminator": "AutoModelForPreTraining",
    "generator": "AutoModelForMaskedLM",
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
    "dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "layer_norm_eps": "layer_norm_eps",
}
# What the encoder of the paper cannot be otherwise.
_FIXED: dict[str, Any] = {
    "hidden_act": "gelu",
    "type_vocab_size": 2,
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}
_TABLE = "generator_lm_head.weight"  # tied to the word embeddings; some files hold it nevertheless
_IGNORED = {"electra.embeddings.position_ids", "electra.embeddings.token_type_ids"}  # old buffers
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

    @property
    def networks(self) -> tuple[Network, ...]:
        return tuple(n for n in (self.discriminator, self.generator) if n is not None)

    def network(self, kind: Kind) -> Network:
        """The network of that kind; an error that says so when it is not there."""
        found = self.discriminator if kind == "discriminator" else self.generator
        if found is None:
            raise ElectraError(
                f"There is no {kind} here.",
                where=str(self.path),
                fix=f"give a directory that holds one, with {_ARCHITECTURE[kind]} in config.json",
            )
        return found

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

    out: Path
    directories: tuple[Path, ...]
    checks: tuple[str, ...]
    max_difference: float | None  # of logits to transformers; None where it is not installed


class InitialState(NamedTuple):
    """Parameters to start from, and what is new in them."""

    parameters: dict[str, Tensor]
    notes: tuple[str, ...]


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
    for network in networks:
        _check_vocabulary(tokenizer, network, tokenizer_dir)
    record = {
        "format": 1,
        "version": __version__,
        "networks": [network.kind for network in networks],
        "step": step,
        "config": to_dict(config),
        "tokenizer_hash": tokenizer.hash,
    }
    with _replacing(out) as temporary:
        for network in networks:
            directory = temporary / network.kind
            directory.mkdir()
            _write_network(network, directory, pad_id=tokenizer.pad_id)
            tokenizer.save(directory, max_length=network.config.max_positions)
            card = _model_card(network, config, step)
            write_atomic(directory / "README.md", card.encode())
        write_atomic(temporary / "electra.json", json_bytes(record, indent=1))
        checks, difference = _verify(networks, tokenizer, temporary)
    return ExportReport(out, tuple(out / n.kind for n in networks), checks, difference)


def networks_of(objective: Objective) -> tuple[Network, ...]:
    """The networks of an objective, each with its own copy of what they share."""
    if isinstance(objective, ReplacedTokenDetection):
        return (
            _network("discriminator", objective.discriminator, objective.discriminator_head),
            _network("generator", objective.generator, objective.generator_head),
        )
    assert isinstance(objective, MaskedLM)
    return (_network("generator", objective.generator, objective.generator_head),)


def _network(kind: Kind, encoder: Encoder, head: nn.Module) -> Network:
    tensors = {
        f"{part}.{name}": tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        for part, module in (("encoder", encoder), ("head", head))
        for name, tensor in module.state_dict().items()
    }
    return Network(kind, encoder.config, len(encoder.embeddings.word.weight), tensors)


@contextlib.contextmanager
def _replacing(out: Path) -> Generator[Path]:
    """A directory beside `out` that takes its place when the block ends, or vanishes with it."""
    is_export = (out / "electra.json").is_file()
    if out.exists() and not is_export and (not out.is_dir() or any(out.iterdir())):
        raise ElectraError(
            "There is something else at the place of the export.",
            where=str(out),
            fix="choose a new or empty directory, or an earlier export, which is replaced",
        )
    temporary, old = (out.with_name(f".{out.name}.{suffix}") for suffix in ("tmp", "old"))
    with storage_errors(out):
        for left_over in (temporary, old):
            shutil.rmtree(left_over, ignore_errors=True)
        temporary.mkdir(parents=True)
    try:
        yield temporary
        with storage_errors(out):
            if out.exists():
                os.replace(out, old)
            os.replace(temporary, out)
            fsync_dir(out.parent)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_network(network: Network, directory: Path, *, pad_id: int) -> None:
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURE[network.kind]],
        "model_type": "electra",
        **{theirs: getattr(network.config, ours) for ours, theirs in _FIELDS.items()},
        **_FIXED,
        "vocab_size": network.vocab_size,
        "pad_token_id": pad_id,
        "initializer_range": 0.02,
        "classifier_dropout": None,
        "summary_type": "first",
        "summary_use_proj": True,
        "summary_activation": "gelu",
        "summary_last_dropout": 0.1,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    data = to_safetensors(_to_transformers(network), metadata={"format": "pt"})
    write_atomic(directory / "config.json", json_bytes(config, indent=2))
    write_atomic(directory / "model.safetensors", data)


# ---------------------------------------------------------------------- names


def _names(kind: Kind, config: EncoderConfig) -> dict[str, tuple[str, ...]]:
    """Our tensors, and the tensors of transformers they consist of, one below the other."""
    modules: dict[str, tuple[str, ...]] = {
        "encoder.embeddings.norm": ("electra.embeddings.LayerNorm",),
    }
    if config.embedding_size != config.hidden_size:
        modules["encoder.project"] = ("electra.embeddings_project",)
    for i in range(config.layers):
        ours, theirs = f"encoder.blocks.{i}", f"electra.encoder.layer.{i}"
        modules |= {
            f"{ours}.qkv": tuple(
                f"{theirs}.attention.self.{part}" for part in ("query", "key", "value")
            ),
            f"{ours}.out": (f"{theirs}.attention.output.dense",),
            f"{ours}.attention_norm": (f"{theirs}.attention.output.LayerNorm",),
            f"{ours}.up": (f"{theirs}.intermediate.dense",),
            f"{ours}.down": (f"{theirs}.output.dense",),
            f"{ours}.ffn_norm": (f"{theirs}.output.LayerNorm",),
        }
    if kind == "discriminator":
        modules["head.dense"] = ("discriminator_predictions.dense",)
        modules["head.w"] = ("discriminator_predictions.dense_prediction",)
    else:
        modules["head.dense"] = ("generator_predictions.dense",)
        modules["head.norm"] = ("generator_predictions.LayerNorm",)
    names: dict[str, tuple[str, ...]] = {
        "encoder.embeddings.word.weight": ("electra.embeddings.word_embeddings.weight",),
        "encoder.embeddings.position.weight": ("electra.embeddings.position_embeddings.weight",),
        "encoder.embeddings.segment.weight": ("electra.embeddings.token_type_embeddings.weight",),
    }
    for ours, theirs in modules.items():
        for end in ("weight", "bias"):
            names[f"{ours}.{end}"] = tuple(f"{part}.{end}" for part in theirs)
    if kind == "generator":
        names["head.bias"] = ("generator_lm_head.bias",)
    return names


def _to_transformers(network: Network) -> dict[str, Tensor]:
    tensors = network.tensors
    if network.kind == "discriminator" and network.disc_head == "linear":
        tensors = _with_dense_head(tensors)
    return {
        part: piece.contiguous()
        for ours, theirs in _names(network.kind, network.config).items()
        for part, piece in zip(theirs, tensors[ours].chunk(len(theirs)), strict=True)
    }


def _from_transformers(
    given: dict[str, Tensor], names: dict[str, tuple[str, ...]]
) -> dict[str, Tensor]:
    tensors = {
        ours: torch.cat([given[part].float() for part in theirs]) for ours, theirs in names.items()
    }
    return _with_linear_head(tensors) if "head.w.weight" in names else tensors


def _with_dense_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The linear head y = wᵀh + b as the dense one that transformers has, dense → GELU → dense.

    GELU(y) − GELU(−y) = y Φ(y) + y Φ(−y) = y holds for every y. So one unit computes y, a second
    one −y, all others 0, and the last layer takes the difference. It is exact up to the rounding
    of Φ(y) + Φ(−y), and the other way round (`_with_linear_head`) to the last bit.
    """
    w, b = tensors["head.w.weight"], tensors["head.w.bias"]  # (1, D), (1,)
    D = w.shape[1]
    units = torch.zeros(D, 1)
    units[0], units[1] = 1.0, -1.0
    return {
        **tensors,
        "head.dense.weight": units * w,  # (D, D)
        "head.dense.bias": units[:, 0] * b,
        "head.w.weight": units.T.contiguous(),
        "head.w.bias": torch.zeros(1),
    }


def _with_linear_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undoes `_with_dense_head`; any other dense head stays as it is."""
    head = {name: t for name, t in tensors.items() if name.startswith("head.")}
    rest = {name: t for name, t in tensors.items() if name not in head}
    if len(head["head.dense.bias"]) < 2:
        return tensors
    linear = {
        "head.w.weight": head["head.dense.weight"][:1].clone(),
        "head.w.bias": head["head.dense.bias"][:1].clone(),
    }
    folded = _with_dense_head(linear)
    is_folded = all(torch.equal(folded[name], tensor) for name, tensor in head.items())
    return rest | linear if is_folded else tensors


# ---------------------------------------------------------------------- import


def load_pretrained(path: Path) -> Pretrained:
    """The networks of an export, of one transformers directory, or of a run's newest checkpoint."""
    path = Path(path)
    if (path / "run.json").is_file():
        return _from_run(path)
    kinds: tuple[Kind, ...] = ("discriminator", "generator")
    places = [path] if (path / "config.json").is_file() else [path / kind for kind in kinds]
    directories = [place for place in places if (place / "config.json").is_file()]
    if not directories:
        raise ElectraError(
            "This is no model: there is neither a config.json nor an export with its folders "
            "discriminator and generator.",
            where=str(path),
            fix="give a run, an export, or a directory written by transformers' save_pretrained",
        )
    found = {network.kind: network for network in map(_read_network, directories)}
    first = directories[0]
    has_tokenizer = any((first / name).is_file() for name in ("tokenizer.json", "vocab.txt"))
    tokenizer = Tokenizer.load(first) if has_tokenizer else None
    if tokenizer is not None:
        for network in found.values():
            _check_vocabulary(tokenizer, network, first)
    return Pretrained(path, found.get("discriminator"), found.get("generator"), tokenizer)


def load_discriminator(path: Path) -> tuple[Encoder, DiscriminatorHead, Tokenizer]:
    """Encoder, head and tokenizer, ready for inference; `path` as for `load_pretrained`."""
    pretrained = load_pretrained(path)
    encoder, head = build_discriminator(pretrained.network("discriminator"))
    return encoder, head, pretrained.needed_tokenizer()


def load_generator(path: Path) -> tuple[Encoder, GeneratorHead, Tokenizer]:
    """Encoder, head and tokenizer, ready for inference; `path` as for `load_pretrained`."""
    pretrained = load_pretrained(path)
    encoder, head = build_generator(pretrained.network("generator"))
    return encoder, head, pretrained.needed_tokenizer()


def build_discriminator(network: Network) -> tuple[Encoder, DiscriminatorHead]:
    encoder, head = _modules("discriminator", network.config, network.vocab_size, network.disc_head)
    assert isinstance(head, DiscriminatorHead)
    return _fill(encoder, head, network)


def build_generator(network: Network) -> tuple[Encoder, GeneratorHead]:
    encoder, head = _modules("generator", network.config, network.vocab_size)
    assert isinstance(head, GeneratorHead)
    return _fill(encoder, head, network)


def _modules(
    kind: Kind, config: EncoderConfig, vocab_size: int, disc_head: DiscHead = "dense"
) -> tuple[Encoder, DiscriminatorHead | GeneratorHead]:
    """Both modules of a network as shapes without memory."""
    with torch.device("meta"):
        encoder = Encoder(config, Embeddings(config, vocab_size))
        if kind == "discriminator":
            return encoder, DiscriminatorHead(config, disc_head)
        return encoder, GeneratorHead(config, vocab_size)


def _fill(encoder: Encoder, head: Head, network: Network) -> tuple[Encoder, Head]:
    for part, module in (("encoder.", encoder), ("head.", head)):
        state = {n.removeprefix(part): t for n, t in network.tensors.items() if n.startswith(part)}
        module.load_state_dict(state, assign=True)
        module.requires_grad_(False).eval()
    return encoder, head


def _from_run(run: Path) -> Pretrained:
    from .pretrain import load_run  # as in export_run

    loaded = load_run(run)
    found = {network.kind: network for network in networks_of(loaded.objective)}
    tokenizer = Tokenizer.load(loaded.tokenizer_dir)
    return Pretrained(run, found.get("discriminator"), found.get("generator"), tokenizer)


def _read_network(directory: Path) -> Network:
    """The one network of a transformers directory; its keys tell which one it is."""
    config, vocab_size = _read_config(directory / "config.json")
    tensors = _read_tensors(directory)
    path = directory / "model.safetensors"
    kind = _kind_of(tensors, path)
    names = _names(kind, config)
    expected = {part for theirs in names.values() for part in theirs}
    table = tensors.pop(_TABLE, None) if kind == "generator" else None
    _check_keys(expected, tensors.keys() - _IGNORED, path)
    _check_shapes(tensors, names, kind, config, vocab_size, path)
    if table is not None and not torch.equal(
        table, tensors["electra.embeddings.word_embeddings.weight"]
    ):
        raise ElectraError(
            f"{_TABLE} differs from the word embeddings, but ELECTRA has one table for both.",
            where=str(path),
            fix="only models with tied embeddings can be read",
        )
    return Network(kind, config, vocab_size, _from_transformers(tensors, names))


def _read_config(path: Path) -> tuple[EncoderConfig, int]:
    """Encoder settings and vocabulary size of a transformers config.json."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ElectraError(
            f"Cannot read the model's settings: {error}.", where=str(path), fix="check the file"
        ) from error
    if not isinstance(values, dict) or cast(Any, values).get("model_type") != "electra":
        raise ElectraError(
            "This is not the config.json of an ELECTRA model.",
            where=f"{path}: model_type",
            fix='give a model whose model_type is "electra"',
        )
    values = cast(dict[str, Any], values)
    for key, wanted in _FIXED.items():
        if values.get(key, wanted) != wanted:
            raise ElectraError(
                f"{key} is {values[key]!r}.",
                where=f"{path}: {key}",
                fix=f"only models with {wanted!r} can be read",
            )
    given = {ours: values[theirs] for ours, theirs in _FIELDS.items() if theirs in values}
    vocab_size = values.get("vocab_size", 30522)
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ElectraError(
            f"vocab_size is {vocab_size!r}.", where=f"{path}: vocab_size", fix="check the file"
        )
    try:
        return from_dict(EncoderConfig, given, where=str(path)), vocab_size
    except ElectraError as error:
        where = error.where if str(path) in error.where else f"{path}: {error.where}"
        raise ElectraError(error.what, where=where, fix=error.fix) from error


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    path = directory / "model.safetensors"
    if not path.is_file():
        pickled = sorted(p.name for p in directory.glob("*.bin"))
        raise ElectraError(
            f"The weights are in {pickled[0]}, a pickle, which can run any code when it is read."
            if pickled
            else "There is no model.safetensors.",
            where=str(directory),
            fix="save the model with transformers' save_pretrained, which writes one "
            "model.safetensors, if you trust where it comes from",
        )
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CorruptError(
            f"The weights cannot be read: {error}.", where=str(path), fix="get the file again"
        ) from error


def _kind_of(names: Iterable[str], path: Path) -> Kind:
    prefixes = {name.split(".")[0] for name in names}
    found: list[Kind] = []
    if "discriminator_predictions" in prefixes:
        found.append("discriminator")
    if "generator_predictions" in prefixes:
        found.append("generator")
    if len(found) != 1:
        raise ElectraError(
            "The weights hold the head of a generator and of a discriminator."
            if found
            else "The weights hold neither the head of a discriminator nor that of a generator: "
            f"{_listed(prefixes)}.",
            where=str(path),
            fix="give a model saved as ElectraForPreTraining or ElectraForMaskedLM",
        )
    return found[0]


def _check_keys(expected: set[str], given: set[str], path: Path) -> None:
    missing, unknown = expected - given, given - expected
    if not missing and not unknown:
        return
    parts: list[str] = []
    if missing:
        parts.append(f"missing: {_listed(missing)}")
    if unknown:
        parts.append(f"unknown: {_listed(unknown)}")
    raise ElectraError(
        f"The tensors do not fit config.json; {'; '.join(parts)}.",
        where=str(path),
        fix="give config.json and model.safetensors of one and the same model",
    )


def _check_shapes(
    tensors: dict[str, Tensor],
    names: dict[str, tuple[str, ...]],
    kind: Kind,
    config: EncoderConfig,
    vocab_size: int,
    path: Path,
) -> None:
    encoder, head = _modules(kind, config, vocab_size)
    for part, module in (("encoder", encoder), ("head", head)):
        for name, empty in module.state_dict().items():
            pieces = names[f"{part}.{name}"]
            wanted = (empty.shape[0] // len(pieces), *empty.shape[1:])
            for piece in pieces:
                if tuple(tensors[piece].shape) != wanted:
                    raise ElectraError(
                        f"{piece} has shape {tuple(tensors[piece].shape)}, config.json says "
                        f"{wanted}.",
                        where=str(path),
                        fix="give config.json and model.safetensors of one and the same model",
                    )


def _check_vocabulary(tokenizer: Tokenizer, network: Network, where: Path) -> None:
    if tokenizer.vocab_size > network.vocab_size:
        raise ElectraError(
            f"The tokenizer has {tokenizer.vocab_size:,} tokens, the {network.kind} embeds only "
            f"{network.vocab_size:,}.",
            where=str(where),
            fix="use the tokenizer the model was trained with",
        )


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    shown = ", ".join(names[:6])
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown


# ---------------------------------------------------------------------- continue training


def config_of(pretrained: Pretrained) -> tuple[EncoderConfig, GeneratorConfig]:
    """Sizes and sharing that continue from `pretrained`, whatever of it is there.

    What the two networks share is seen from their tensors. A network that is missing takes the
    usual size beside the other: a generator of a quarter of the width, or a discriminator as large
    as the generator.
    """
    d, g = pretrained.discriminator, pretrained.generator
    if g is None:
        return pretrained.network("discriminator").config, GeneratorConfig()
    if d is None:
        return g.config, GeneratorConfig(width=1.0)
    width = Fraction(g.config.hidden_size, d.config.hidden_size)
    depth = Fraction(g.config.layers, d.config.layers)
    generator = GeneratorConfig(width=float(width), depth=float(depth), sharing=_sharing(d, g))
    data = DataConfig(sequence_length=min(128, d.config.max_positions))  # has to fit, no more
    derived = PretrainConfig(encoder=d.config, generator=generator, data=data).generator_encoder
    for field, theirs in _FIELDS.items():
        mine, other = getattr(derived, field), getattr(g.config, field)
        if mine != other and "dropout" not in field:
            raise ElectraError(
                f"A generator {float(width):g} times as wide as its discriminator has {theirs} "
                f"{mine}, this one has {other}.",
                where=str(pretrained.path),
                fix="continue from the discriminator alone, with a new generator",
            )
    return d.config, generator


def _sharing(d: Network, g: Network) -> Sharing:
    """The closest sharing under which the tensors could have been trained."""

    def are_equal(prefix: str) -> bool:
        names = {n for n in (*d.tensors, *g.tensors) if n.startswith(prefix)}
        return all(
            n in d.tensors and n in g.tensors and torch.equal(d.tensors[n], g.tensors[n])
            for n in names
        )

    if d.config == g.config and are_equal("encoder."):
        return "all"
    return "embeddings" if are_equal("encoder.embeddings.") else "none"


def initial_state(pretrained: Pretrained, config: PretrainConfig, vocab_size: int) -> InitialState:
    """Every parameter that `config` trains: those of `pretrained`, and new ones where it has none.

    Raises when a network that is there does not fit the settings.
    """
    # The special ids are of no weight here: nothing is masked.
    objective = build_objective(config, vocab_size, SpecialIds(0, 1, 2, 3, 4))
    fresh = {name: p.detach().clone() for name, p in objective.named_parameters()}
    wanted: list[tuple[Kind, EncoderConfig]] = [("generator", config.encoder)]
    if config.objective.kind == "rtd":
        wanted = [("discriminator", config.encoder), ("generator", config.generator_encoder)]
    parameters, notes, given_up = dict[str, Tensor](), list[str](), list[str]()
    # The discriminator goes first: what is shared is trained under its name.
    for kind, sizes in wanted:
        network = pretrained.discriminator if kind == "discriminator" else pretrained.generator
        if network is None:
            notes.append(f"{pretrained.path} holds no {kind}: it starts from new weights")
            continue
        _check_fits(network, sizes, config, vocab_size, pretrained.path)
        for name, tensor in network.tensors.items():
            ours = _parameter_name(kind, name, fresh)
            if ours not in parameters:
                parameters[ours] = tensor.clone()
            elif not torch.equal(parameters[ours], tensor):
                given_up.append(name)
    if given_up:
        notes.append(
            "the generator shares the discriminator's weights from now on and gives up its own: "
            f"{_listed(given_up)}"
        )
    if not parameters:
        raise ElectraError(
            "Nothing of this model can be used: it holds no generator, and masked language "
            "modelling trains nothing else.",
            where=str(pretrained.path),
            fix="use --objective.kind rtd, or start from a generator",
        )
    return InitialState(fresh | parameters, tuple(notes))


def _parameter_name(kind: Kind, name: str, known: Iterable[str]) -> str:
    """What the objective calls a network's tensor: shared ones are the discriminator's."""
    part, rest = name.split(".", 1)
    own = f"{kind}.{rest}" if part == "encoder" else f"{kind}_head.{rest}"
    return own if own in known else f"discriminator.{rest}"


def _check_fits(
    network: Network, sizes: EncoderConfig, config: PretrainConfig, vocab_size: int, path: Path
) -> None:
    """The network has the sizes that the settings ask for; the error names the setting."""

    def misfit(what: str, fix: str) -> ElectraError:
        return ElectraError(f"The {network.kind} does not fit: {what}.", where=str(path), fix=fix)

    encoder, head = _modules(network.kind, sizes, vocab_size, config.objective.disc_head)
    shapes = {
        f"{part}.{name}": tuple(tensor.shape)
        for part, module in (("encoder", encoder), ("head", head))
        for name, tensor in module.state_dict().items()
    }
    tensor = next(
        (n for n, t in network.tensors.items() if n in shapes and shapes[n] != tuple(t.shape)), None
    )
    detail = ""
    if tensor is not None:
        detail = (
            f", so {tensor} has shape {tuple(network.tensors[tensor].shape)} instead of "
            f"{shapes[tensor]}"
        )
    if network.vocab_size != vocab_size:
        raise misfit(
            f"it embeds {network.vocab_size:,} tokens, the corpus has {vocab_size:,}{detail}",
            "prepare the corpus with the model's own tokenizer",
        )
    for field in _FIELDS:
        mine, asked = getattr(network.config, field), getattr(sizes, field)
        if mine != asked and "dropout" not in field:
            raise misfit(
                f"its {field} is {mine}, the settings ask for {asked}{detail}",
                f"set {_setting(network.kind, field, config)} to fit, or leave sizes out: they are "
                "taken from the model",
            )
    if network.kind == "discriminator" and network.disc_head != config.objective.disc_head:
        raise misfit(
            f"its head is {network.disc_head}, the settings ask for {config.objective.disc_head}",
            f"set objective.disc_head to {network.disc_head}",
        )


def _setting(kind: Kind, field: str, config: PretrainConfig) -> str:
    if kind == "discriminator" or config.objective.kind == "mlm":
        return f"encoder.{field}"
    own = {"layers": "generator.depth"} | dict.fromkeys(
        ("hidden_size", "ffn_size", "attention_heads"), "generator.width"
    )
    return own.get(field, f"encoder.{field}")


# ---------------------------------------------------------------------- verification


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
        if not is_same or replace(read.config, init=network.config.init) != network.config:
            raise _unequal(f"the {network.kind} reads back otherwise than it was written")
    if again.needed_tokenizer().hash != tokenizer.hash:
        raise _unequal("the tokenizer reads back otherwise than it was written")
    checks = ("read back bit for bit",)
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError:  # not installed, or not for this torch: it is only a second opinion
        return checks, None
    with _quiet(transformers):
        difference = max(
            _compare_with_transformers(transformers, network, tokenizer, out / network.kind)
            for network in networks
        )
    done = f"logits and token ids equal in transformers {transformers.__version__}"
    return (*checks, done), difference


@torch.no_grad()
def _compare_with_transformers(
    transformers: Any, network: Network, tokenizer: Tokenizer, directory: Path
) -> float:
    """The largest difference of logits; raises if it, or a single token id, is wrong."""
    theirs = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model, info = getattr(transformers, _AUTO_CLASS[network.kind]).from_pretrained(
        directory, local_files_only=True, output_loading_info=True, dtype=torch.float32
    )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[key]:
            raise _unequal(f"{key} in transformers: {_listed(map(str, info[key]))}")
    rows = [tokenizer.encode(text) for text in _TEXTS]
    for text, row in zip(_TEXTS, rows, strict=True):
        if theirs(text)["input_ids"] != row:
            raise _unequal(f"transformers gives other token ids for {text!r}")
    x, segment, mask = _padded(rows, network.config.max_positions, tokenizer.pad_id)
    if network.kind == "discriminator":
        encoder, head = build_discriminator(network)
        ours = head(encoder(x, segment, mask, None))
    else:
        encoder, head = build_generator(network)
        h = encoder(x, segment, mask, None)
        ours = head(h.flatten(0, 1), encoder.embeddings.word.weight).unflatten(0, x.shape)
    other = model.eval()(input_ids=x, token_type_ids=segment, attention_mask=mask.long()).logits
    difference = float((ours - other)[mask].abs().max())
    if not difference <= _TOLERANCE * max(1.0, float(ours[mask].abs().max())):
        raise _unequal(f"the {network.kind}'s logits differ by {difference:.1e} in transformers")
    return difference


def _padded(rows: list[list[int]], longest: int, pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, segments (the second half of each row is segment 1) and mask, all (B, T)."""
    length = torch.tensor([min(len(row), longest) for row in rows])
    x = torch.full((len(rows), int(length.max())), pad_id)
    for i, row in enumerate(rows):
        x[i, : length[i]] = torch.tensor(row[:longest])
    position = torch.arange(x.shape[1])
    mask = position < length[:, None]
    return x, ((position >= length[:, None] // 2) & mask).long(), mask


@contextlib.contextmanager
def _quiet(transformers: Any) -> Generator[None]:
    """No progress bars, load reports or hints on long texts: what matters in them is checked."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _unequal(what: str) -> CorruptError:
    return CorruptError(
        f"The export was not kept: {what}.",
        fix="this is a bug or a broken disk; please report it with this message",
    )


# ---------------------------------------------------------------------- model card


def _model_card(network: Network, config: PretrainConfig, step: int | None) -> str:
    """README.md of one network; texts that users wrote are quoted."""
    is_discriminator = network.kind == "discriminator"
    tags = ["electra", "replaced-token-detection" if is_discriminator else "masked-lm"]
    pipeline = "" if is_discriminator else "pipeline_tag: fill-mask\n"
    name = _escaped(config.name)
    c, data = network.config, config.data
    role = {
        "discriminator": "tells for every token whether it was replaced; its encoder is what is "
        "fine-tuned",
        "generator": "proposes tokens for masked positions",
    }[network.kind]
    result = {
        "discriminator": "P = model(**inputs).logits.sigmoid()  # that a token was replaced",
        "generator": "P = model(**inputs).logits.softmax(-1)  # over the vocabulary",
    }[network.kind]
    note = (
        "\n`AutoModel` loads the encoder alone and names the tensors of the head as unexpected, "
        "which is right.\n"
        if is_discriminator
        else ""
    )
    trained = f"{step:,} steps" if step is not None else "an unknown number of steps"
    return f"""\
---
library_name: transformers
{pipeline}tags:
{"".join(f"- {tag}{chr(10)}" for tag in tags)}---

# ELECTRA {network.kind}, recipe {name}

This network {role} (Clark et al., ICLR 2020).

```python
from transformers import {_AUTO_CLASS[network.kind]}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{network.kind}")
model = {_AUTO_CLASS[network.kind]}.from_pretrained("{network.kind}")
inputs = tokenizer("The chef ate the meal.", return_tensors="pt")
{result}
```
{note}
| | |
|---|---|
| parameters | {sum(t.numel() for t in network.tensors.values()):,} |
| layers, hidden size, heads | {c.layers}, {c.hidden_size}, {c.attention_heads} |
| vocabulary, longest sequence | {network.vocab_size:,}, {c.max_positions} |
| trained for | {trained} of {data.batch_size} × {data.sequence_length} tokens |
| masked | {config.objective.mask_percent:g} % of the tokens |
| learning rate | {config.optim.learning_rate:g} |

Written by electra {__version__}; all settings are in `electra.json` of the export.
"""


def _escaped(text: str) -> str:
    """One line of text without any meaning to Markdown or HTML."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return "".join(f"\\{c}" if c in "\\`*_{}[]()<>#+-.!|&~" else c for c in line)
