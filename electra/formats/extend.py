"""A vocabulary that grows: words of a domain become tokens of a model that is there already.

Comes in: a model with its tokenizer, and text of the domain. Goes out: an export with more tokens,
from which `electra pretrain --init` goes on. A new token starts as the mean of the pieces that its
word was made of, in the embeddings of both networks and in the generator's output. Text in which no
new token occurs keeps its ids, and the networks say the same about it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from .. import __version__
from ..data.tokenizer import SPECIAL_TOKENS, Tokenizer, count_words
from ..errors import ElectraError
from ..studies.records import code
from . import card
from .hf import load_pretrained
from .hf_export import ExportReport, export_networks
from .layout import Network


class Extended(NamedTuple):
    """What was added, and what it does to the text it was chosen from."""

    tokens: tuple[str, ...]
    before: float  # tokens per word
    after: float
    report: ExportReport


def extend(
    model: Path,
    inputs: Sequence[str | Path],
    out: Path,
    *,
    tokens: int,
    column: str = "text",
    max_bytes: int = 1 << 30,
) -> Extended:
    """Add up to `tokens` words of the text, those that save the most tokens, and export.

    `model` as for `load_pretrained`; text beyond `max_bytes` is sampled.
    """
    pretrained = load_pretrained(model)
    old = pretrained.needed_tokenizer()
    if not old.is_word_local or tokens < 1:
        what = f"{tokens} tokens cannot be added to this tokenizer."
        fix = "give a number above 0, and a model with a WordPiece vocabulary as BERT splits words"
        raise ElectraError(what, where=str(model), fix=fix)
    split = (old.backend.normalizer, old.backend.pre_tokenizer)
    words = count_words(inputs, *split, column=column, max_bytes=max_bytes)
    chosen = choose(words, old, tokens)
    new = old.with_tokens(chosen)
    pieces = [_pieces(old, token) for token in chosen]
    both = (pretrained.discriminator, pretrained.generator)
    networks = tuple(_grow(network, old.vocab_size, pieces) for network in both if network)
    record = {"version": __version__, "extended_from": str(model), "tokens_added": len(chosen)}
    text = f"{code(model.name)} with {len(chosen):,} more tokens, not yet trained with them."
    report = export_networks(networks, new, out, record, card.Story({"Training": text}))
    before, after = (
        sum(n * len(t.backend.model.tokenize(word)) for word, n in words.items()) / words.total()
        for t in (old, new)
    )
    return Extended(tuple(chosen), before, after, report)


def choose(words: Counter[str], tokenizer: Tokenizer, tokens: int) -> list[str]:
    """The words that would save the most tokens, if each were one; a word counts from twice on.

    Before them come the single characters inside words that the vocabulary lacks: with these a word
    that begins with a new token can always be ended, if it could be written before.
    """
    vocabulary = tokenizer.backend.get_vocab()
    split = tokenizer.backend.get_vocab(with_added_tokens=False).keys() - set(SPECIAL_TOKENS)
    ends = (t.removeprefix("##") if t.startswith("##") else t[1:] for t in split)
    inside = {f"##{character}" for end in ends for character in end}
    gains: dict[str, int] = {}
    for word, count in words.items():
        ids = [token.id for token in tokenizer.backend.model.tokenize(word)]
        gain = count if ids == [tokenizer.unk_id] else count * (len(ids) - 1)
        if count > 1 and gain and any(map(str.isalpha, word)) and word not in vocabulary:
            gains[word] = gain
    if not gains:
        what = "No word of the text is split into pieces twice or more often."
        fix = "keep the vocabulary as it is, or give more text of the domain"
        raise ElectraError(what, where="the text", fix=fix)
    ranked = sorted(gains, key=lambda word: (-gains[word], word))[:tokens]
    return [*sorted(inside - vocabulary.keys()), *ranked]


def _pieces(tokenizer: Tokenizer, token: str) -> list[int]:
    """What stood for it so far; the start of a word is the nearest thing to a lone ##character."""
    return [t.id for t in tokenizer.backend.model.tokenize(token.removeprefix("##"))]


def _grow(network: Network, first: int, pieces: list[list[int]]) -> Network:
    """With a row for each new token, from `first` on; rows that no token used are taken first."""
    size, tensors = max(network.vocab_size, first + len(pieces)), dict(network.tensors)
    for name in ("encoder.embeddings.word.weight", "head.bias"):  # the output's table is the first
        if (table := tensors.get(name)) is not None:
            grown = table.new_zeros(size, *table.shape[1:])
            grown[: len(table)] = table
            grown[first : first + len(pieces)] = torch.stack([table[p].mean(0) for p in pieces])
            tensors[name] = grown
    return replace(network, vocab_size=size, tensors=tensors)
