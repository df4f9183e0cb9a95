"""What the discriminator takes for replaced in a text, and what the generator would put there.

Comes in: a run, an export or a transformers directory, and a text. Goes out: a `Detection` with
P(replaced) = σ(d) of every token (paper, section 2), its place in the text, and what the
generator would rather see where it is suspicious; `render` colours it for the terminal. A text
longer than the rows of pre-training is read in overlapping rows: a model may have more positions,
but has never seen them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby, pairwise
from pathlib import Path

import torch
from rich.style import Style
from rich.text import Text
from tokenizers import Encoding
from torch import Tensor

from ..data.tokenizer import Tokenizer
from ..errors import ElectraError
from ..formats.hf import Pretrained, load_pretrained
from ..formats.layout import Network, build_discriminator, build_generator
from ..runtime import whole_vectors

_SUSPICIOUS = 0.5  # P(replaced) from which alternatives are asked for
LIKELY = 0.01  # the generator's probability from which an alternative is worth naming
_SHOWN = 0.05  # P(replaced) below which a token stays without colour
_ROWS = 16  # masked copies of the text that go through the generator at once


@dataclass(frozen=True)
class Alternative:
    """A token that the generator would put at a place, and how likely it finds it."""

    token: str
    probability: float


@dataclass(frozen=True)
class Token:
    """One token, the characters [start, end) of the text it stands for, and the verdict on it."""

    token: str
    start: int
    end: int
    replaced: float  # P(replaced)
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Word:
    """Tokens that belong together: a word and its ## pieces."""

    tokens: tuple[Token, ...]

    @property
    def start(self) -> int:
        return self.tokens[0].start

    @property
    def end(self) -> int:
        return self.tokens[-1].end

    @property
    def replaced(self) -> float:
        """P(replaced) of the most suspicious token."""
        return max(token.replaced for token in self.tokens)


@dataclass(frozen=True)
class Detection:
    """A text and what the model says of each word."""

    text: str
    words: tuple[Word, ...]

    @property
    def tokens(self) -> tuple[Token, ...]:
        return tuple(token for word in self.words for token in word.tokens)

    def _repr_html_(self) -> str:
        """For a notebook: the redder a token, the more likely it was replaced."""
        text, parts, at = _printable(self.text), list[str](), 0
        for token in self.tokens:
            start, end = max(at, token.start), max(at, token.end)
            shade = f"rgba(220, 38, 38, {token.replaced:.2f})"
            own = f'<span title="{token.replaced:.0%}" style="background: {shade}">'
            parts += [escape(text[at:start]), own, escape(text[start:end]), "</span>"]
            at = end
        lines = [f"<div style='white-space: pre-wrap'>{''.join(parts)}{escape(text[at:])}</div>"]
        for token in (token for token in self.tokens if token.alternatives):
            own = escape(text[token.start : token.end])
            options = escape(_printable(_listed(token.alternatives)))
            verdict = f"replaced {token.replaced:.0%}; the generator's: {options}"
            lines.append(f"<div><b>{own}</b> {verdict}</div>")
        return "".join(lines)


@dataclass(frozen=True)
class Row:
    """A part of a text as the model reads it, and the tokens of the text that it judges."""

    x: Tensor  # (1, T) with [CLS] and [SEP]
    first: int  # the text's token that stands behind [CLS]
    own: range  # of the text's tokens

    def of(self, replaced: Tensor) -> Tensor:
        """What is said of its own tokens in (T − 2,) numbers of all that it reads."""
        return replaced[self.own.start - self.first : self.own.stop - self.first]

    def places(self, at: Tensor) -> Tensor:
        """Where in x those of the text's tokens `at` stand that are its own."""
        return at[(at >= self.own.start) & (at < self.own.stop)] - self.first + 1

    def filled(self, ids: Tensor) -> Tensor:
        """x (1, T) where the tokens of the text are `ids`, (N,)."""
        x = self.x.clone()
        x[0, 1:-1] = ids[self.first : self.first + x.shape[1] - 2]
        return x


@whole_vectors
def detect(model: Path | Pretrained, text: str, *, alternatives: int = 3) -> Detection:
    """P(replaced) of every token of `text`, by a model or the one in a directory.

    The generator's `alternatives` most likely tokens, of those that it gives 1 % or more, are added
    where P(replaced) is above 0.5, and at the most suspicious place in any case, if the model comes
    with its generator.
    """
    if not isinstance(model, Pretrained):
        model = load_pretrained(with_generator(model))
    network = model.network("discriminator")
    encoding, rows = cut(model, text)
    replaced = torch.cat([row.of(probabilities(network, row.x)) for row in rows])
    return verdict(model, text, encoding, rows, replaced, alternatives)


def verdict(
    model: Pretrained,
    text: str,
    encoding: Encoding,
    rows: list[Row],
    replaced: Tensor,
    alternatives: int,
) -> Detection:
    """What P(replaced) of its tokens, (N,), says of a text."""
    places = zip(encoding.tokens, encoding.offsets, replaced.tolist(), strict=True)
    tokens = [Token(token, start, end, p) for token, (start, end), p in places]
    if model.generator is not None and alternatives > 0:
        at = (replaced > _SUSPICIOUS).index_fill(0, replaced.argmax(), True).nonzero().squeeze(1)
        tokenizer = model.needed_tokenizer()
        for row in rows:
            for positions, g in hidden_in_turn(model, row.x, row.places(at)):
                g = g[:, : tokenizer.vocab_size].softmax(-1)  # (S, V)
                p, best = g.topk(min(alternatives, tokenizer.vocab_size))  # (S, k)
                found = zip(positions.tolist(), best.tolist(), p.tolist(), strict=True)
                for position, ids, shares in found:
                    named = map(Alternative, tokenizer.decode_tokens(ids), shares)
                    likely = tuple(one for one in named if one.probability >= LIKELY)
                    i = position - 1 + row.first
                    tokens[i] = replace(tokens[i], alternatives=likely)
    return Detection(text, _words(tokens, encoding.word_ids))


def cut(model: Pretrained, text: str) -> tuple[Encoding, list[Row]]:
    """The tokens of a text, and the rows of pre-training's length that judge them.

    Rows of a longer text begin half a row apart, and each token is judged by the row in whose
    middle it is nearest to standing.
    """
    encoding, tokenizer = _tokens(model, text), model.needed_tokenizer()
    room, n = max(model.row_length - 2, 1), len(encoding.ids)
    firsts = [*range(0, n - room, max(room // 2, 1)), max(n - room, 0)]
    borders = [0, *((before + room + first) // 2 for before, first in pairwise(firsts)), n]
    rows = [
        Row(_framed(encoding.ids[first : first + room], tokenizer), first, range(*own))
        for first, own in zip(firsts, pairwise(borders), strict=True)
    ]
    return encoding, rows


def _tokens(model: Pretrained, text: str) -> Encoding:
    encoding = model.needed_tokenizer().backend.encode(text, add_special_tokens=False)
    if not encoding.ids:
        raise ElectraError("The text holds no token.", where="text", fix="give at least one word")
    return encoding


def _framed(ids: list[int], tokenizer: Tokenizer) -> Tensor:
    return torch.tensor([[tokenizer.cls_id, *ids, tokenizer.sep_id]])  # (1, T)


def with_generator(path: Path) -> Path:
    """The export that a directory is part of, so that its generator is found as well."""
    whole = path.absolute().parent
    is_part = path.name == "discriminator" and (whole / "electra.json").is_file()
    return whole if is_part else path


@torch.no_grad()
def probabilities(network: Network, x: Tensor) -> Tensor:
    """P(replaced) of the tokens between [CLS] and [SEP], (T − 2,)."""
    encoder, head = build_discriminator(network)
    return head(encoder(x, torch.zeros_like(x), None, None))[0, 1:-1].sigmoid()


@torch.no_grad()
def hidden_in_turn(model: Pretrained, x: Tensor, at: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some of the positions `at` at a time, (S,), and the generator's logits there, (S, V).

    Each position of x (1, T) is masked apart, so that the rest of the text is as it stands.
    """
    encoder, head = build_generator(model.network("generator"))
    mask_id, x = model.needed_tokenizer().mask_id, x.to(encoder.embeddings.word.weight.device)
    for rows in at.to(x.device).split(_ROWS) if len(at) else ():
        x_masked = x.repeat(len(rows), 1).scatter(1, rows[:, None], mask_id)  # (S, T)
        h = encoder(x_masked, torch.zeros_like(x_masked), None, None)  # (S, T, D)
        yield rows, head(h[torch.arange(len(rows)), rows], encoder.embeddings.word.weight)


def _words(tokens: list[Token], word_ids: list[int | None]) -> tuple[Word, ...]:
    """Tokens of the same word of the pre-tokenizer together; one without a word stands alone."""
    keyed = [(-i - 1 if word is None else word) for i, word in enumerate(word_ids)]
    groups = groupby(zip(keyed, tokens, strict=True), key=lambda pair: pair[0])
    return tuple(Word(tuple(token for _, token in group)) for _, group in groups)


def render(detection: Detection) -> Text:
    """The text with a background from none to red; below it what is suspicious, which a pipe shows
    in no colour, and the alternatives."""
    shown = Text(_printable(detection.text))
    for token in detection.tokens:
        shown.stylize(_style(token.replaced), token.start, token.end)
    for token in detection.tokens:
        if token.alternatives or token.replaced > _SUSPICIOUS:
            own = _printable(detection.text[token.start : token.end])
            shown.append("\n")
            shown.append(own, _style(token.replaced))
            shown.append(f"  replaced {token.replaced:.0%}")
        if token.alternatives:
            shown.append(f"; the generator's: {_printable(_listed(token.alternatives))}")
    return shown


def _listed(alternatives: tuple[Alternative, ...]) -> str:
    return ", ".join(f"{a.token} {a.probability:.0%}" for a in alternatives)


def _style(p: float) -> Style:
    """Black, or nothing, to red."""
    if p < _SHOWN:
        return Style.null()
    return Style.parse(f"bold white on rgb({round(255 * p)},0,0)")


def _printable(text: str) -> str:
    """The text as long as before, without characters that steer a terminal.

    The two joiners stay: Persian, Hindi and many emoji are written with them.
    """
    harmless = "\n\t\u200c\u200d"
    return "".join(
        "\ufffd" if unicodedata.category(c) in ("Cc", "Cf") and c not in harmless else c
        for c in text
    )
