"""What fine-tuning puts on top of the encoder: one head per kind of task, and its loss.

|                | paper (and the released code)               | hf (what transformers does)       |
|----------------|---------------------------------------------|-----------------------------------|
| sentences      | one linear layer on [CLS]                   | dense, GELU, linear on [CLS]      |
| tagging        | linear; mean over the words of each example | linear; mean over the batch       |
| questions      | end given the start, answerability apart    | start and end by one linear layer |
| initialisation | Glorot uniform, TensorFlow's default        | normal, 0.02                      |

Losses are one number per example; whether a step adds them up (released code) or averages them is
the trainer's choice. Nothing waits for the device or has a shape that depends on the data: a step
can be recorded as a CUDA graph. Shapes: B examples · T tokens · D hidden · C outputs · K beam.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import EncoderConfig
from ..encoder import Embeddings, Encoder, Rng, dropout, wide
from ..errors import ElectraError
from .features import TaskBatch
from .tasks import Kind

Form = Literal["paper", "hf"]
End = Literal["joint", "independent"]
Answerability = Literal["pooled", "plain", "none"]

HEAD_SITES = 10_000  # dropout keys of the heads begin here, far from those of any encoder
ANSWER_TOKENS = 30  # the longest answer
NOT_A_TAG = -1  # label of tokens that do not begin a word
_HIDDEN = 512  # of the layers for ends and answerability, whatever the size of the encoder


class Head(nn.Module):
    """Base of all heads; what they read of `batch.targets` is in their docstrings."""

    only_first = False  # whether h holds the state of [CLS] alone

    def __init__(self, form: Form = "paper", **options: Any):
        """options: what `build_head` has to be told besides task and form to build this one."""
        super().__init__()
        self.form, self.options = form, options

    @abstractmethod
    def loss(self, h: Tensor, batch: TaskBatch, rng: Rng | None) -> Tensor:
        """(B,), one loss per example. h: (B, T, D). rng draws dropout; None means evaluation."""

    @abstractmethod
    def predict(self, h: Tensor, batch: TaskBatch) -> dict[str, Tensor]:
        """Scores by name, without dropout."""


class SentenceHead(Head):
    """One class or one number per example, read off [CLS]. Target: label (B,)."""

    only_first = True

    def __init__(self, config: EncoderConfig, outputs: int, form: Form, *, regression: bool):
        super().__init__(form)
        self.regression, self.p = regression, config.dropout
        D = config.hidden_size
        self.dense = nn.Linear(D, D) if form == "hf" else None
        self.out = nn.Linear(D, outputs)

    def logits(self, h: Tensor, rng: Rng | None) -> Tensor:
        """(B, C)"""
        h = dropout(h[:, 0], self.p, rng, HEAD_SITES)  # (B, D)
        if self.dense is not None:
            h = dropout(F.gelu(_apply(self.dense, h)), self.p, rng, HEAD_SITES + 1)
        return wide(_apply(self.out, h))

    def loss(self, h: Tensor, batch: TaskBatch, rng: Rng | None) -> Tensor:
        logits, label = self.logits(h, rng), batch.targets["label"]
        if self.regression:
            return (logits[:, 0] - label.to(logits.dtype)).square()
        return F.cross_entropy(logits, label, reduction="none")

    def predict(self, h: Tensor, batch: TaskBatch) -> dict[str, Tensor]:  # noqa: ARG002
        return {"logits": self.logits(h, None)}


class TaggingHead(Head):
    """One tag per word, read off its first token. Target: labels (B, T), −1 on all other tokens,
    and the weight (B,) of each row, if some do not count.

    paper: the mean over the words of each example, so that examples count alike, long or short.
    hf: words count alike; the mean over the examples is that over all words of the batch.
    """

    def __init__(self, config: EncoderConfig, outputs: int, form: Form):
        super().__init__(form)
        self.p, self.out = config.dropout, nn.Linear(config.hidden_size, outputs)

    def logits(self, h: Tensor, rng: Rng | None) -> Tensor:
        """(B, T, C)"""
        return wide(_apply(self.out, dropout(h, self.p, rng, HEAD_SITES)))

    def loss(self, h: Tensor, batch: TaskBatch, rng: Rng | None) -> Tensor:
        logits, labels = self.logits(h, rng), batch.targets["labels"]
        nll = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=NOT_A_TAG
        ).view_as(labels)  # (B, T)
        words = (labels != NOT_A_TAG).sum(1).to(nll.dtype)  # (B,)
        if self.form == "hf":  # rows of weight 0 only fill up the batch
            weight = batch.targets.get("weight", torch.ones_like(words))
            words = (words * weight).sum() / weight.sum()
        return nll.sum(1) / torch.where(words > 0, words, 1.0)

    def predict(self, h: Tensor, batch: TaskBatch) -> dict[str, Tensor]:  # noqa: ARG002
        return {"logits": self.logits(h, None)}


class SpanHead(Head):
    """A span of the passage, its end given its start, and whether there is one (released code).

    Targets: start, end (B,), both 0 ([CLS]) where the window does not hold the answer; impossible
    (B,), whether the question has none at all. In training the end is predicted from the true
    start, in evaluation from each of the best K starts. There is no dropout.

    end: joint, or independent of the start. answerable: pooled (from [CLS] and the states weighted
    by the start probabilities), plain ([CLS] only, linear) or none.
    """

    def __init__(self, config: EncoderConfig, end: End, answerable: Answerability, beam: int):
        super().__init__("paper", end=end, answerable=answerable, beam=beam)
        self.beam, D = beam, config.hidden_size
        joint, pooled = end == "joint", answerable == "pooled"
        self.start = nn.Linear(D, 1)
        self.end_hidden = nn.Linear(2 * D, _HIDDEN) if joint else None
        self.end = nn.Linear(_HIDDEN if joint else D, 1)
        self.answer_hidden = nn.Linear(2 * D, _HIDDEN) if pooled else None
        self.answer = nn.Linear(_HIDDEN if pooled else D, 1) if answerable != "none" else None

    def start_logits(self, h: Tensor, batch: TaskBatch) -> Tensor:
        """(B, T)"""
        return _in_passage(_apply(self.start, h), batch)

    def end_logits(self, h: Tensor, h_start: Tensor, batch: TaskBatch) -> Tensor:
        """(B, K, T), given the states (B, K, D) of K starts."""
        if self.end_hidden is None:
            logits = _in_passage(_apply(self.end, h), batch)  # (B, T)
            return logits[:, None].expand(-1, h_start.shape[1], -1)
        # W [h_start ; h_t] = W_1 h_start + W_2 h_t: the larger part is the same for all starts.
        w_start, w_end = self.end_hidden.weight.chunk(2, dim=1)
        from_start = F.linear(h_start.to(w_start.dtype), w_start)  # (B, K, 512)
        from_end = F.linear(h.to(w_end.dtype), w_end, self.end_hidden.bias)  # (B, T, 512)
        # One start after another: all at once would hold B x K x T x 512 numbers.
        rows = [self.end(F.gelu(row[:, None] + from_end)) for row in from_start.unbind(1)]
        return torch.stack([_in_passage(row, batch) for row in rows], 1)

    def answer_logits(self, h: Tensor, start: Tensor) -> Tensor:
        """(B,) logits of *impossible*; start: (B, T) logits. Zeros without answerability."""
        if self.answer is None:
            return torch.zeros_like(start[:, 0])
        a = h[:, 0]  # (B, D)
        if self.answer_hidden is not None:
            pooled = torch.einsum("bt,btd->bd", start.softmax(1), wide(h))  # (B, D)
            a = F.gelu(_apply(self.answer_hidden, torch.cat([a, pooled.to(a.dtype)], 1)))
        return wide(_apply(self.answer, a).squeeze(1))

    def loss(self, h: Tensor, batch: TaskBatch, rng: Rng | None) -> Tensor:  # noqa: ARG002
        t = batch.targets
        start = self.start_logits(h, batch)
        end = self.end_logits(h, _at(h, t["start"][:, None]), batch)[:, 0]
        loss = _span_loss(start, end, batch)
        if self.answer is None:
            return loss
        answer = self.answer_logits(h, start)
        impossible = t["impossible"].to(answer.dtype)
        bce = F.binary_cross_entropy_with_logits(answer, impossible, reduction="none")
        return loss + 0.5 * bce

    def predict(self, h: Tensor, batch: TaskBatch) -> dict[str, Tensor]:
        """The best starts, the best ends of each, their log-probabilities; logit of impossible."""
        logits = self.start_logits(h, batch)
        K = min(self.beam, h.shape[1])
        start, at = logits.log_softmax(1).topk(K)  # (B, K)
        end, end_at = self.end_logits(h, _at(h, at), batch).log_softmax(2).topk(K)  # (B, K, K)
        return {
            "start_log_probs": start,
            "start_index": at,
            "end_log_probs": end,
            "end_index": end_at,
            "answerable": self.answer_logits(h, logits),  # (B,)
        }


class LinearSpanHead(Head):
    """Start and end by one linear layer over all tokens, as transformers has it.

    Targets: start, end (B,). The loss has no mask: padding and the question are outcomes too. A
    question without answer has its span on [CLS]; what answerability is to the other head is here
    by how much that span beats the best one of the passage.
    """

    def __init__(self, config: EncoderConfig, beam: int):
        super().__init__("hf", beam=beam)
        self.beam, self.out = beam, nn.Linear(config.hidden_size, 2)

    def logits(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Of start and end, (B, T) each."""
        start, end = wide(_apply(self.out, h)).unbind(2)
        return start, end

    def loss(self, h: Tensor, batch: TaskBatch, rng: Rng | None) -> Tensor:  # noqa: ARG002
        return _span_loss(*self.logits(h), batch)

    def predict(self, h: Tensor, batch: TaskBatch) -> dict[str, Tensor]:
        start, end = (_in_passage(logits, batch).log_softmax(1) for logits in self.logits(h))
        # The best end for each start, at most ANSWER_TOKENS long; [CLS] starts none.
        within = F.pad(end, (0, ANSWER_TOKENS - 1), value=-torch.inf).unfold(1, ANSWER_TOKENS, 1)
        best = (start + within.amax(2))[:, 1:].amax(1)  # (B,)
        K = min(self.beam, h.shape[1])
        starts, ends = start.topk(K), end.topk(K)
        return {
            "start_log_probs": starts.values,
            "start_index": starts.indices,
            "end_log_probs": ends.values[:, None].expand(-1, K, -1),
            "end_index": ends.indices[:, None].expand(-1, K, -1),
            "answerable": start[:, 0] + end[:, 0] - best,
        }


class TaskModel(nn.Module):
    """An encoder and the head of a task."""

    def __init__(self, encoder: Encoder, head: Head):
        super().__init__()
        self.encoder, self.head = encoder, head

    def loss(self, batch: TaskBatch, rng: Rng | None) -> Tensor:
        """(B,), one loss per example; `rng` None leaves dropout out."""
        return self.head.loss(self._states(batch, rng), batch, rng)

    @torch.no_grad()
    def predict(self, batch: TaskBatch) -> dict[str, Tensor]:
        return self.head.predict(self._states(batch, None), batch)

    def _states(self, batch: TaskBatch, rng: Rng | None) -> Tensor:
        """(B, T, D), or (B, 1, D) where the head reads no more."""
        first = self.head.only_first
        return self.encoder(batch.x, batch.segment, batch.mask, rng, only_first=first)


def build_head(
    kind: Kind,
    config: EncoderConfig,
    outputs: int,
    form: Form = "paper",
    *,
    end: End = "joint",
    answerable: Answerability = "pooled",
    beam: int = 20,
) -> Head:
    """The head of a task. outputs: classes or tags; 1 for a regression; not read for qa.

    `end` and `answerable` choose variants of the paper's question answering; `beam` is the number
    of starts, and of ends for each, that evaluation looks at.
    """
    fewest = {"classification": 2, "regression": 1, "tagging": 1, "qa": 0}[kind]
    if outputs < fewest or (kind == "regression" and outputs > 1):
        many = "exactly" if kind == "regression" else "at least"
        what = f"A {kind} head cannot have {outputs} outputs."
        fix = f"name the labels; a {kind} task has {many} {fewest}"
        raise ElectraError(what, where="task", fix=fix)
    if kind == "qa" and form == "hf":
        return LinearSpanHead(config, beam)
    if kind == "qa":
        return SpanHead(config, end, answerable, beam)
    if kind == "tagging":
        return TaggingHead(config, outputs, form)
    return SentenceHead(config, outputs, form, regression=kind == "regression")


def empty_model(
    kind: Kind, config: EncoderConfig, vocab_size: int, outputs: int, form: Form, **options: Any
) -> TaskModel:
    """Shapes without memory, for a state that is loaded with `assign`."""
    with torch.device("meta"):
        head = build_head(kind, config, outputs, form, **options)
        return TaskModel(Encoder(config, Embeddings(config, vocab_size)), head)


@torch.no_grad()
def initialise_head(head: Head, seed: int) -> None:
    """Draw the weights from one seed, in the way of the head's form; biases are zero."""
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        value = torch.zeros(parameter.shape)
        if name.endswith("weight") and head.form == "paper":
            nn.init.xavier_uniform_(value, generator=draw)
        elif name.endswith("weight"):
            nn.init.normal_(value, std=0.02, generator=draw)
        parameter.copy_(value)


def _apply(layer: nn.Linear, h: Tensor) -> Tensor:
    """The layer in the type of its weights."""
    return layer(h.to(layer.weight.dtype))


def _at(h: Tensor, positions: Tensor) -> Tensor:
    """States (B, K, D) of h (B, T, D) at positions (B, K)."""
    return h.gather(1, positions[:, :, None].expand(-1, -1, h.shape[2]))


def _in_passage(logits: Tensor, batch: TaskBatch) -> Tensor:
    """Logits (B, T), or (B, T, 1) as a layer gives them, lowered outside the passage and its [SEP].

    [CLS] keeps its logit: it is the span of windows without an answer.
    """
    first = torch.arange(logits.shape[1], device=logits.device) == 0
    allowed = ((batch.segment == 1) & batch.mask) | first
    logits = wide(logits.view(allowed.shape))
    return torch.where(allowed, logits, logits - 1000.0)


def _span_loss(start: Tensor, end: Tensor, batch: TaskBatch) -> Tensor:
    """(B,), the mean of both cross entropies."""
    at_start = F.cross_entropy(start, batch.targets["start"], reduction="none")
    return (at_start + F.cross_entropy(end, batch.targets["end"], reduction="none")) / 2
