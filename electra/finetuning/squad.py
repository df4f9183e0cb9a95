"""SQuAD 1.1 and 2.0: questions into windows a model reads, beams into answers, answers into scores.

    load  ->  windows  ->  (model)  ->  answers  ->  evaluate, write_predictions

A passage is cut into overlapping windows: [CLS] question [SEP] part of the passage [SEP]. Token
offsets lead back to characters of the passage as it was given, so an answer is always a substring
of it. Scores are those of the official scripts, in percent.
A file that differs from the official format is an error with its path and question. A question
that is too long is cut; one whose answer has no token, as a blank, trains answerability only.
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ..data.tokenizer import Tokenizer
from ..errors import ElectraError, NumericError
from ..files import json_bytes, write_atomic
from .features import Features
from .heads import ANSWER_TOKENS

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
RELEASED_THRESHOLD = -2.75  # logit of impossible above which the released code does not answer
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Question:
    """One question; the first of its answers is the one to learn."""

    id: str
    text: str
    context: str
    answers: tuple[str, ...]
    start: int  # character of the context where the first answer begins; −1 if there is none

    @property
    def impossible(self) -> bool:
        return not self.answers


@dataclass(frozen=True, slots=True)
class Window:
    """Where the passage tokens of one row of Features come from."""

    question: int
    first: int  # place in the row of the first passage token
    offsets: Ints  # (n, 2) characters of the context, of each passage token
    max_context: NDArray[np.bool_]  # (n,) no other window has more of the passage around the token


@dataclass(frozen=True)
class Answers:
    """What the model says about each question, by id, whether or not it has an answer."""

    texts: dict[str, str]  # the best span; empty only if no window has one
    null: dict[str, float]  # logit of impossible; the window with the least decides
    nbest: dict[str, list[tuple[str, float]]]  # different texts, best first, and log-probabilities

    def at(self, threshold: float | None) -> dict[str, str]:
        """The answers given: empty where `null` is above the threshold; None always answers."""
        limit = np.inf if threshold is None else threshold
        return {key: "" if self.null[key] > limit else text for key, text in self.texts.items()}


def load(
    path: Path, version: Literal["squad1", "squad2"], *, needed: Sequence[str] = ("dev",)
) -> dict[str, list[Question]]:
    """The splits `train` and `dev` of a directory, as far as they are there or `needed`."""
    number = "2.0" if version == "squad2" else "1.1"
    files = {split: path / f"{split}-v{number}.json" for split in ("train", "dev")}
    for split in needed:
        if not files[split].is_file():
            fix = f"put SQuAD {number} there under its official names"
            raise ElectraError(f"{files[split].name} is missing.", where=str(path), fix=fix)
    return {split: read(file) for split, file in files.items() if file.is_file()}


def read(path: Path, *, labelled: bool = True) -> list[Question]:
    """All questions of a file in the official format; without `labelled` answers are not read."""
    try:
        document: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _bad(f"This is not readable as JSON: {error}.", str(path)) from error
    questions: dict[str, Question] = {}
    for i, article in enumerate(_field(document, "data", list, str(path))):
        for j, paragraph in enumerate(_field(article, "paragraphs", list, f"{path}, data[{i}]")):
            place = f"{path}, data[{i}].paragraphs[{j}]"
            context = _field(paragraph, "context", str, place)
            for k, item in enumerate(_field(paragraph, "qas", list, place)):
                key = _field(item, "id", str, f"{place}.qas[{k}]")
                where = f"{path}, question {key}"
                if key in questions:
                    raise _bad("The id occurs twice.", where)
                questions[key] = _question(item, context, where, labelled)
    if not questions:
        raise _bad("There is no question.", str(path))
    return list(questions.values())


def _question(item: dict[str, Any], context: str, where: str, labelled: bool) -> Question:
    found = list[tuple[int, str]]()
    for answer in _field(item, "answers", list, where) if labelled else []:
        start, text = _field(answer, "answer_start", int, where), _field(answer, "text", str, where)
        if not text or start < 0 or not context.startswith(text, start):
            raise _bad(f"{text!r:.99} is not in the passage at {start}.", where)
        found.append((start, text))
    if labelled and bool(item.get("is_impossible", False)) == bool(found):
        raise _bad("A question has answers unless it is_impossible; here both disagree.", where)
    text, start = _field(item, "question", str, where), found[0][0] if found else -1
    return Question(item["id"], text, context, tuple(text for _, text in found), start)


def _field(item: Any, key: str, kind: type[_T], where: str) -> _T:
    value = cast(dict[str, Any], item).get(key) if isinstance(item, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _bad(f"There is no {key}, or it is not of type {kind.__name__}.", where)
    if isinstance(value, str) and value.encode(errors="ignore").decode() != value:
        raise _bad(f"{key} has an unpaired surrogate.", where)
    return value


def _bad(what: str, where: str) -> ElectraError:
    return ElectraError(what, where=where, fix="correct the file, or download it again")


def windows(
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    *,
    length: int = 512,
    query: int = 64,
    stride: int = 128,
    training: bool,
) -> tuple[Features, list[Window]]:
    """One row per window; the windows of a passage begin `stride` tokens apart, or half a window.

    training: with the targets start, end (0 where the window does not hold the whole answer) and
    impossible, which is about the question: a window that misses the answer is not impossible.
    """
    if min(length - query - 3, query, stride) < 1:
        what = f"Windows of {length} tokens have no room for questions of {query} and a passage."
        raise ElectraError(what, where="length, query, stride", fix="use 512, 64 and 128")
    contexts = {context: n for n, context in enumerate(dict.fromkeys(q.context for q in questions))}
    passages = list(tokenizer.encode_with_offsets(list(contexts)))
    asked = tokenizer.encode_with_offsets([question.text for question in questions])
    cls, sep = np.array([[tokenizer.cls_id], [tokenizer.sep_id]], np.int32)
    rows, found, spans = list[Ints](), list[Window](), list[tuple[int, int]]()
    for number, (question, (ids, _)) in enumerate(zip(questions, asked, strict=True)):
        ids = ids[:query]
        passage, offsets = passages[contexts[question.context]]
        stop = question.start + sum(map(len, question.answers[:1]))
        gold = np.flatnonzero((offsets[:, 0] < stop) & (offsets[:, 1] > question.start))
        n, room, first = len(passage), length - 3 - len(ids), len(ids) + 2
        # In short rows half a window: side by side they would lose every answer on their border.
        step = min(stride, max(room // 2, 1))
        starts = np.arange(0, max(n - room, 0) + step, step)
        ends = np.minimum(starts + room, n)
        spans_of = list(enumerate(zip(starts.tolist(), ends.tolist(), strict=True)))
        most, best = np.full(n, -1.0), np.zeros(n, np.int64)
        for w, (start, end) in spans_of:
            # Most passage on its poorer side: longer windows, then earlier ones, win ties, as in
            # BERT. One window at a time: all at once take the square of the passage's length.
            token = np.arange(end - start)
            poorer = np.minimum(token, token[::-1]) + 0.01 * (end - start)
            better = poorer > most[start:end]
            most[start:end][better], best[start:end][better] = poorer[better], w
        for w, (start, end) in spans_of:
            rows.append(np.concatenate([cls, ids, sep, passage[start:end], sep]))
            found.append(Window(number, first, offsets[start:end], best[start:end] == w))
            held = len(gold) > 0 and start <= gold[0] and gold[-1] < end
            spans.append((gold[0] - start + first, gold[-1] - start + first) if held else (0, 0))
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.full((len(rows), lengths.max(initial=0)), tokenizer.pad_id, np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = row
    firsts = np.array([window.first for window in found], np.int32)
    example = np.array([window.question for window in found], np.int32)
    targets: dict[str, NDArray[Any]] = {}
    if training:
        impossible = np.array([question.impossible for question in questions], np.float32)
        both = np.array(spans, np.int64).reshape(-1, 2)
        targets = {"start": both[:, 0], "end": both[:, 1], "impossible": impossible[example]}
    return Features(tokens, lengths, firsts, targets, example), found


def answers(
    questions: Sequence[Question],
    windows: Sequence[Window],
    predictions: Mapping[str, NDArray[Any]],
    *,
    n_best: int = 20,
    max_tokens: int = ANSWER_TOKENS,
) -> Answers:
    """The best spans of each question over all of its windows.

    predictions: what `heads` predicts for question answering, one row per window. A span starts and
    ends on passage tokens of its window, starts where the window has the token's largest context,
    and has at most `max_tokens` tokens.
    """
    if not np.isfinite(predictions["answerable"]).all():
        raise NumericError("The model's scores are not finite.", fix="lower the learning rate")
    null = [float("inf")] * len(questions)
    spans: list[list[tuple[float, int, int]]] = [[] for _ in questions]
    names = ("start_log_probs", "start_index", "end_log_probs", "end_index", "answerable")
    for window, p, s, q, e, no in zip(windows, *(predictions[n] for n in names), strict=True):
        null[window.question] = min(null[window.question], float(no))
        s, n = s - window.first, len(window.offsets)
        own = np.flatnonzero((s >= 0) & (s < n))
        own = own[window.max_context[s[own]]]
        s, e = s[own, None], e[own] - window.first  # (k, 1), (k, K)
        valid = (s <= e) & (e < np.minimum(s + max_tokens, n))
        s, e, score = np.repeat(s, valid.sum(1)), e[valid], (p[own, None] + q[own])[valid]
        top = np.argsort(-score, kind="stable")[:n_best]
        begins, stops = window.offsets[s[top], 0].tolist(), window.offsets[e[top], 1].tolist()
        spans[window.question] += zip(score[top].tolist(), begins, stops, strict=True)
    nbest: dict[str, list[tuple[str, float]]] = {}
    for question, candidates in zip(questions, spans, strict=True):
        context, texts = question.context, dict[str, float]()
        for score, begin, stop in sorted(candidates, key=lambda span: -span[0]):
            # The marks on the last letter belong to it, but tokens can leave them out.
            while stop < len(context) and unicodedata.category(context[stop]) == "Mn":
                stop += 1
            texts.setdefault(context[begin:stop], score)
        nbest[question.id] = list(texts.items())[:n_best]
    best = {key: found[0][0] if found else "" for key, found in nbest.items()}
    return Answers(best, dict(zip(nbest, null, strict=True)), nbest)


def write_predictions(directory: Path, given: Answers, threshold: float | None) -> None:
    """predictions.json as the official scripts take it; with a threshold also spans.json
    and null_odds.json, from which the one of SQuAD 2.0 searches a threshold of its own."""
    files: dict[str, Mapping[str, str | float]] = {"predictions": given.at(threshold)}
    if threshold is not None:
        files |= {"spans": given.texts, "null_odds": given.null}
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomic(directory / f"{name}.json", json_bytes(content, indent=1))


def evaluate(
    questions: Sequence[Question], given: Answers, threshold: float | None
) -> dict[str, float]:
    """The official scores in percent. threshold None: SQuAD 1.1, every question is answered.

    exact, f1: at the fixed threshold; has_ans_… and no_ans_… are parts of them. best_…: at the
    threshold beside it, the best for these very questions, and so not comparable with the former.
    """
    raw = 100 * np.array([_score(given.texts[q.id], q, threshold is not None) for q in questions])
    none = np.array([question.impossible for question in questions])
    null = np.array([given.null[question.id] for question in questions])
    silent = 100.0 * none  # scores of giving no answer
    result: dict[str, float] = {}
    for name, answered in zip(("exact", "f1"), raw.T, strict=True):
        fixed = answered if threshold is None else np.where(null > threshold, silent, answered)
        result[name] = fixed.mean().item()
        if threshold is None:
            continue
        for part, which in (("has_ans", ~none), ("no_ans", none)):
            if which.any():
                result[f"{part}_{name}"] = fixed[which].mean().item()
        best, at = _best_threshold(null, answered, silent)
        result |= {f"best_{name}": best, f"best_{name}_threshold": at}
    return result


def _best_threshold(null: Floats, raw: Floats, silent: Floats) -> tuple[float, float]:
    """The best mean score of any threshold, and the lowest threshold that gives it.

    Questions with equal scores are answered together, which the official script overlooks.
    """
    order = np.argsort(null, kind="stable")
    gain = np.concatenate([[0.0], np.cumsum((raw - silent)[order])])  # of answering the first k
    at = np.concatenate([[null.min() - 1], null[order]])
    last = np.append(at[:-1] != at[1:], True)  # of a run of equal scores
    k = int(np.where(last, gain, -np.inf).argmax())
    return float((silent.sum() + gain[k]) / len(null)), float(at[k])


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, articles and extra white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _score(text: str, question: Question, second: bool) -> tuple[float, float]:
    """Exact match and F1, each with the answer that fits best, by the rules of SQuAD 1.1 or 2.0.

    An answer such as "a" normalises to nothing. The second script leaves it out, and two empty
    texts have an F1 of 1 there, in the first of 0.
    """
    words, exact, f1 = normalise(text).split(), 0.0, 0.0
    golds = [normalise(answer).split() for answer in question.answers]
    if second:
        golds = [gold for gold in golds if gold] or [[]]
    for gold in golds:
        same, equal = sum((Counter(words) & Counter(gold)).values()), float(words == gold)
        exact = max(exact, equal)
        f1 = max(f1, 2 * same / max(len(words) + len(gold), 1), equal if second else 0.0)
    return exact, f1
