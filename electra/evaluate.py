"""What the two networks can do on held-out text, and whether a run looks dead.

The masks of an evaluation are those of step 0 under a fixed seed, so that different steps, and runs
with the same batch and masking settings, are compared on the same positions. So that they are
compared on samples of the same kind, a generator whose temperature falls samples at 1 here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from .batches import Block
from .corpus import Examples
from .errors import Stopped
from .objectives import Batch, Objective, Predictions
from .randomness import StepRng

EVAL_SEED = 20_200_323  # the day the paper came out


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out numbers of one moment; the disc_ fields are None without a discriminator."""

    mlm_loss: float
    """Mean negative log-likelihood of the masked tokens, in nats."""
    mlm_accuracy: float
    """Share of masked tokens the best guess gets right."""
    disc_loss: float | None = None
    """Mean binary cross-entropy over all tokens."""
    disc_auc: float | None = None
    """Area under the ROC curve of telling replaced tokens from originals, over all tokens."""
    disc_precision: float | None = None
    """Share of tokens called replaced that are."""
    disc_recall: float | None = None
    """Share of replaced tokens that are called so."""
    replaced_percent: float | None = None
    """Share of the tokens that differ from the original."""
    tokens: int
    """Tokens looked at."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def evaluate(
    objective: Objective,
    examples: Examples,
    *,
    batches: int,
    at_once: int = 64,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Corrupt and judge up to `batches` batches of held-out examples, at most `at_once` together.

    Raises Stopped soon after `should_stop` says so.
    """
    config = objective.config
    count = min(len(examples), batches * config.data.batch_size)
    # Evenly spread, so that a small evaluation sees all of the held-out part.
    index = np.linspace(0, len(examples) - 1, count).astype(np.int64)
    nll, right, logits, labels = (list[np.ndarray]() for _ in range(4))
    size = min(config.data.batch_size, at_once)
    for begin in range(0, count, size):
        if should_stop():
            raise Stopped
        batch, p = _predict(objective, examples, index[begin : begin + size], begin)
        original = batch.x.gather(1, p.m.at)
        each = F.cross_entropy(
            p.mlm_logits.float().flatten(0, 1), original.flatten(), reduction="none"
        )
        valid = p.m.valid.flatten()
        nll.append(each[valid].cpu().numpy())
        right.append((p.mlm_logits.argmax(-1) == original).flatten()[valid].cpu().numpy())
        if p.d is not None and p.replaced is not None:
            token = objective.attention_mask(batch)
            logits.append(p.d[token].cpu().numpy())
            labels.append(p.replaced[token].cpu().numpy())
    found = Evaluation(
        mlm_loss=float(np.concatenate(nll).mean()),
        mlm_accuracy=float(np.concatenate(right).mean()),
        tokens=int(examples.lengths[index].sum()),
    )
    if not logits:
        return found
    d, replaced = np.concatenate(logits).astype(np.float64), np.concatenate(labels)
    called = d > 0
    return replace(
        found,
        disc_loss=float((np.logaddexp(0, d) - d * replaced).mean()),
        disc_auc=roc_auc(d, replaced),
        disc_precision=float(replaced[called].mean()) if called.any() else 0.0,
        disc_recall=float(called[replaced].mean()) if replaced.any() else 0.0,
        replaced_percent=100 * float(replaced.mean()),
    )


def _predict(
    objective: Objective, examples: Examples, rows: NDArray[np.int64], begin: int
) -> tuple[Batch, Predictions]:
    """These examples, the first of which has the number `begin` in the evaluation."""
    device = next(objective.parameters()).device
    ids, segment, lengths = examples.gather(rows)

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int32))[None].to(device)

    length = put(lengths[:, None])
    block = Block(put(ids), put(segment), length, length)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    batch = block.batch(zero, slice(None), objective.config)
    number = torch.arange(begin, begin + len(rows), device=device)
    return batch, objective.predict(batch, StepRng(EVAL_SEED, zero, number), training=False)


def roc_auc(score: np.ndarray, positive: np.ndarray) -> float:
    """P(score of a positive > score of a negative), ties counting one half; 0.5 without both."""
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if positives == 0 or negatives == 0:
        return 0.5
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2  # ranks from 1, ties share their mean
    rank_sum = float(mean_rank[inverse][positive].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def token_counts(
    examples: Examples, special_ids: tuple[int, ...], vocab_size: int
) -> NDArray[np.float64]:
    """(V,) how often each token comes up in up to 16,384 of the examples; specials do not."""
    some = np.linspace(0, len(examples) - 1, min(len(examples), 16_384)).astype(np.int64)
    counts = np.zeros(vocab_size)
    for begin in range(0, len(some), 2048):
        ids, _, _ = examples.gather(some[begin : begin + 2048])
        counts += np.bincount(ids.reshape(-1), minlength=vocab_size)
    counts[list(special_ids)] = 0
    return counts


def unigram_entropy(counts: NDArray[np.float64]) -> float:
    """Entropy of the token frequencies in nats: what a generator reaches that reads no context."""
    share = counts[counts > 0] / max(1.0, counts.sum())
    return float(-(share * np.log(share)).sum())


def diagnose(
    evaluation: Evaluation, unigram: float, progress: float, disc_start: float = 0.0
) -> list[str]:
    """Sentences about what looks wrong and what to try; empty when the run looks alive.

    Before a tenth of the run nothing is said: every run starts at the unigram entropy. Nor of a
    discriminator that has learned for less, if it begins when `disc_start` of the run is done.
    """
    if progress < 0.1:
        return []
    found: list[str] = []
    if evaluation.mlm_loss > unigram - 0.1:
        found.append(
            f"the generator predicts no better than token frequencies ({evaluation.mlm_loss:.2f} "
            f"against an entropy of {unigram:.2f} nats). Try a longer warm-up, a lower learning "
            "rate, a smaller batch with more steps, or --encoder.init local."
        )
    auc, has_learned = evaluation.disc_auc, progress >= disc_start + 0.1
    if auc is not None and auc < 0.53 and has_learned:
        found.append(
            f"the discriminator cannot tell replaced tokens (AUC {auc:.2f}). Wait "
            "for the generator to learn first; if that does not help, lower the learning rate or "
            "make the generator smaller."
        )
    return found
