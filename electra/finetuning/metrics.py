"""Scores of fine-tuned models, as fractions of 1, and what many seeds say together.

Defined for every input: a coefficient whose formula is 0/0 (constant predictions, one class only)
or that meets a number that is not finite is 0. Several seeds are summed up with all of them in;
failed runs are counted, never left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .tasks import GLUE, Task

Numbers = Sequence[int] | Sequence[float] | NDArray[Any]
EPOCH_CHOICE = (
    "The epoch of each seed was chosen by its score on the dev set, so the scores on that set are "
    "optimistic; last_score is that of the last epoch, which nobody chose."
)


def accuracy(predicted: Numbers, gold: Numbers) -> float:
    p, y = _pair(predicted, gold)
    return float((p == y).mean())


def f1(predicted: Numbers, gold: Numbers) -> float:
    """Of class 1, in a task of two classes; 0 where class 1 is neither predicted nor there."""
    p, y = _pair(predicted, gold)
    hits = int(((p == 1) & (y == 1)).sum())
    return _harmonic(hits, int((p == 1).sum()), int((y == 1).sum()))


def macro_f1(predicted: Numbers, gold: Numbers) -> float:
    """The mean F1 of the classes that are predicted or there, each of which counts the same."""
    p, y = _pair(predicted, gold)
    classes = np.unique(np.concatenate([p, y]))
    sizes = [[int(part.sum()) for part in ((p == c) & (y == c), p == c, y == c)] for c in classes]
    return float(np.mean([_harmonic(*of_class) for of_class in sizes]))


def matthews(predicted: Numbers, gold: Numbers) -> float:
    """Correlation of classes, for any number of them."""
    p, y = _pair(predicted, gold)
    classes = np.unique(np.concatenate([p, y]))
    # Exact whole numbers: n·hits and sums of n_p·n_y cancel where a class is never predicted.
    of_p = [int((p == c).sum()) for c in classes]
    of_y = [int((y == c).sum()) for c in classes]
    n, hits = len(p), int((p == y).sum())
    covariance = n * hits - sum(a * b for a, b in zip(of_p, of_y, strict=True))
    square = (n * n - sum(a * a for a in of_p)) * (n * n - sum(b * b for b in of_y))
    return float(covariance / np.sqrt(float(square))) if square else 0.0


def pearson(predicted: Numbers, gold: Numbers) -> float:
    p, y = (values.astype(np.float64) for values in _pair(predicted, gold))
    if not np.isfinite([p, y]).all() or p.min() == p.max() or y.min() == y.max():
        return 0.0
    p, y = (_centred(values) for values in (p, y))
    return float(np.clip(p @ y / np.sqrt((p @ p) * (y @ y)), -1, 1)) if p.any() and y.any() else 0.0


def spearman(predicted: Numbers, gold: Numbers) -> float:
    """Pearson correlation of ranks; equal values share the mean of their ranks."""
    p, y = _pair(predicted, gold)
    return pearson(_ranks(p), _ranks(y)) if np.isfinite(p).all() and np.isfinite(y).all() else 0.0


def _pair(predicted: Numbers, gold: Numbers) -> tuple[NDArray[Any], NDArray[Any]]:
    p, y = np.asarray(predicted), np.asarray(gold)
    if p.shape != y.shape or p.ndim != 1 or not len(p):
        raise ValueError(f"{p.shape} predictions for {y.shape} labels")
    return p, y


def _centred(values: NDArray[np.float64]) -> NDArray[np.float64]:
    values = values / np.abs(values).max()  # squares of very small or large values stay finite
    values = values - values.mean()
    return values / (np.abs(values).max() or 1.0)


def _ranks(values: NDArray[Any]) -> NDArray[np.float64]:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def _harmonic(hits: int, predicted: int, gold: int) -> float:
    return 2 * hits / (predicted + gold) if predicted + gold else 0.0


# ------------------------------------------------------------------ spans of tags

Span = tuple[int, int, str]  # first word, word behind the last, type


def spans(tags: Sequence[str]) -> set[Span]:
    """The spans of one sentence by the rule of the CoNLL scorer.

    B (also S, U) always begins one. Any other tag begins one after O, after an E, L, S or U, and
    where the type changes; so an I- that follows nothing of its type counts as a beginning.
    """
    found, start, before, kind = set[Span](), 0, "O", ""
    for place, tag in enumerate([*tags, "O"]):
        mark, _, name = tag.partition("-")
        ends = before in ("O", *"ELSU") or mark in ("O", *"BSU") or name != kind
        if ends and before != "O":
            found.add((start, place, kind))
        if ends:
            start = place
        before, kind = mark, name
    return found


def span_scores(
    predicted: Sequence[Sequence[str]], gold: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Precision, recall and F1 of spans whose borders and type are all right, over all sentences;
    0 where there is nothing to divide by."""
    both = [(spans(p), spans(y)) for p, y in zip(predicted, gold, strict=True)]
    hits = sum(len(p & y) for p, y in both)
    ours, theirs = sum(len(p) for p, _ in both), sum(len(y) for _, y in both)
    return {
        "f1": _harmonic(hits, ours, theirs),
        "precision": hits / ours if ours else 0.0,
        "recall": hits / theirs if theirs else 0.0,
    }


# ------------------------------------------------------------------ tasks and seeds


def score(task: Task, predictions: Sequence[Any], labels: Sequence[Any]) -> dict[str, float]:
    """All scores of a task: of class indices, of numbers, or of one list of tags per sentence."""
    if task.kind == "regression":
        return {"spearman": spearman(predictions, labels), "pearson": pearson(predictions, labels)}
    if task.kind == "classification":
        found = {"accuracy": accuracy(predictions, labels)}
        if len(task.labels) == 2:
            found["f1"] = f1(predictions, labels)
        if is_own(task):
            found["macro_f1"] = macro_f1(predictions, labels)
        return found | {"matthews": matthews(predictions, labels)}
    if any(len(p) != len(y) for p, y in zip(predictions, labels, strict=True)):
        raise ValueError("a sentence has not as many tags as words")
    found = {"accuracy": accuracy(_flat(predictions), _flat(labels))}
    if task.metric == "f1":
        named = [
            [[task.labels[tag] for tag in row] for row in rows] for rows in (predictions, labels)
        ]
        found |= span_scores(*named)
    return found


def is_own(task: Task) -> bool:
    """Whether it is a user's table of classes, of which more is told than of GLUE's."""
    return task.kind == "classification" and task != GLUE.get(task.name)


def confusion(
    task: Task, predictions: Sequence[int], labels: Sequence[int]
) -> dict[str, dict[str, int]]:
    """How many rows of a class got which answer, by their names; pairs that occur."""
    table: dict[str, dict[str, int]] = {}
    for (label, answer), rows in Counter(zip(labels, predictions, strict=True)).items():
        table.setdefault(task.labels[label], {})[task.labels[answer]] = rows
    return table


def is_degenerate(task: Task, predictions: Sequence[Any], labels: Sequence[Any]) -> bool:
    """Whether a run failed: it gives every row the same answer although the right ones differ, or
    numbers that are not finite."""
    if task.kind == "tagging":
        predictions, labels = _flat(predictions), _flat(labels)
    if not np.isfinite(predictions).all():
        return True
    return len(np.unique(predictions)) == 1 and len(np.unique(labels)) > 1


def _flat(rows: Sequence[Sequence[int]]) -> list[int]:
    return list(chain.from_iterable(rows))


def summary(scores: Sequence[float], failed: Sequence[bool]) -> dict[str, float | int]:
    """Seeds together; `std` is that of a sample, 0 for a single seed."""
    if not scores or len(scores) != len(failed):
        raise ValueError(f"{len(scores)} scores, {len(failed)} marks of failure")
    return {
        "median": float(np.median(scores)),
        "mean": float(np.mean(scores)),
        "best": float(np.max(scores)),
        "std": float(np.std(scores, ddof=1)) if len(scores) > 1 else 0.0,
        "failed": sum(failed),
        "seeds": len(scores),
    }
