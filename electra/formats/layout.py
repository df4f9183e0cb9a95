"""A network under our names and under those of transformers.

Comes in: an objective in memory, or tensors of the one kind; goes out: tensors of the other.
Nothing is read or written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..config import EncoderConfig
from ..encoder import DiscriminatorHead, Embeddings, Encoder, GeneratorHead
from ..finetuning import tasks
from ..objectives import (
    MaskedLM,
    Objective,
    ReplacedTokenDetection,
    ReplaceMLM,
)

Kind = Literal["discriminator", "generator"]
DiscHead = Literal["dense", "linear"]
Layout = Kind | tasks.Kind | Literal["encoder"]
Tensors = dict[str, Tensor]

# Our settings and what transformers calls them. Defaults agree on both sides, so a config.json
# that leaves out what is at its default reads right.
FIELDS = {
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
FIXED: dict[str, Any] = {
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
MODULES = {
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
CLASSES: dict[Layout, tuple[str, dict[str, str]]] = {
    "discriminator": ("ElectraForPreTraining", _PRETRAINING),
    "generator": ("ElectraForMaskedLM", _MASKED | {"head": "generator_lm_head"}),
    "classification": ("ElectraForSequenceClassification", _SENTENCE),
    "regression": ("ElectraForSequenceClassification", _SENTENCE),
    "tagging": ("ElectraForTokenClassification", {"head.out": "classifier"}),
    "qa": ("ElectraForQuestionAnswering", {"head.out": "qa_outputs"}),
    "encoder": ("ElectraModel", {}),  # for a head that transformers does not have
}
WORDS, TABLE = "electra.embeddings.word_embeddings.weight", "generator_lm_head.weight"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BUFFERS = {"electra.embeddings.position_ids", "electra.embeddings.token_type_ids"}  # in old files


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
        pair = empty_network(self.config, self.vocab_size, self.kind, self.disc_head)
        pair.load_state_dict(self.tensors, assign=True)
        return pair.requires_grad_(False).eval()


def pairs_of(objective: Objective) -> dict[Kind, Any]:
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


def empty_network(
    c: EncoderConfig, vocab_size: int, kind: Layout, disc_head: DiscHead = "dense"
) -> Any:
    """The modules of a network, shapes without memory."""
    with torch.device("meta"):
        is_generator = kind == "generator"
        head = GeneratorHead(c, vocab_size) if is_generator else DiscriminatorHead(c, disc_head)
        return nn.ModuleDict({"encoder": Encoder(c, Embeddings(c, vocab_size)), "head": head})


def build_discriminator(network: Network) -> tuple[Encoder, DiscriminatorHead]:
    return network.modules["encoder"], network.modules["head"]


def build_generator(network: Network) -> tuple[Encoder, GeneratorHead]:
    return network.modules["encoder"], network.modules["head"]


def tensors_of(module: nn.Module) -> Tensors:
    """A copy of its state, float32 on the CPU."""
    state = module.state_dict().items()
    return {n: t.detach().to("cpu", torch.float32, copy=True).contiguous() for n, t in state}


def with_prefix(tensors: Tensors, prefix: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def networks_of(objective: Objective) -> tuple[Network, ...]:
    """The networks of an objective, each with its own copy of what they share."""
    networks: list[Network] = []
    for kind, pair in pairs_of(objective).items():
        tensors = tensors_of(pair)
        for name in ("word", "position", "segment"):  # a difference becomes the table it stands for
            table = pair.encoder.embeddings.table(name).detach()
            tensors[f"encoder.embeddings.{name}.weight"] = table.to("cpu", torch.float32, copy=True)
        networks.append(Network(kind, pair.encoder.config, objective.vocab_size, tensors))
    return tuple(networks)


def names_of(kind: Layout, ours: str) -> tuple[str, ...]:
    """The tensors of transformers that our tensor `ours` consists of."""
    module, end = ours.rsplit(".", 1)
    i = "".join(filter(str.isdigit, module))  # of the block
    theirs = (MODULES | CLASSES[kind][1])[module.replace(i, "{i}") if i else module]
    parts = ("query", "key", "value") if "{qkv}" in theirs else ("",)
    return tuple(f"{theirs.format(i=i, qkv=part)}.{end}" for part in parts)


def to_transformers(network: Network) -> Tensors:
    """The tensors of `network` as transformers names and shapes them."""
    tensors, kind = network.tensors, network.kind
    last = "head.w" if kind == "discriminator" else "head.out"
    needs_dense = "head.dense" in CLASSES[kind][1] and "head.dense.weight" not in tensors
    if kind == "encoder":
        tensors = with_prefix(tensors, "encoder.")
    elif needs_dense and f"{last}.weight" in tensors:
        tensors = tensors | _dense_head(tensors, last)
    result: Tensors = {}
    for ours, tensor in tensors.items():
        names = names_of(kind, ours)
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


def without_dense_head(tensors: Tensors) -> Tensors:
    """Undoes `_dense_head` of a discriminator; any other head stays as it is."""
    ends = ("weight", "bias")
    w = {f"head.w.{end}": tensors[f"head.dense.{end}"][:1].clone() for end in ends}
    dense = _dense_head(w, "head.w")
    if all(name in tensors and torch.equal(tensors[name], t) for name, t in dense.items()):
        return {name: t for name, t in tensors.items() if name not in dense} | w
    return tensors
