"""SQuAD 1.1 and 2.0: questions into windows a model reads, beams into answers, answers into scores.

    load  ->  windows  ->  (model)  ->  answers  ->  evaluate, write_predictions

A passage is cut into overlapping windows: [CLS] question [SEP] part of the passage [SEP]. Token
offsets lead back to characters of the passage as it was given, so an answer is always a substring
of it. Scores are those of the official scripts, in percent.

| what is found                                          | outcome                               |
|--------------------------------------------------------|---------------------------------------|
| file missing, not UTF-8, not JSON, nested too deep     | error with the path                   |
| field missing or of another type, unpaired surrogate   | error with file and question          |
| two questions with the same id                         | error with file and question          |
| answer that is not in the passage where it should be   | error with file and question          |
| no answer, but not impossible; impossible with answers | error with file and question          |
| answer without a token, such as a blank                | the question trains answerability only|
| question longer than `query` tokens                    | cut                                   |
"""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from .errors import ElectraError, NumericError
from .features import Features
from .files import json_bytes, write_atomic
from .heads import ANSWER_TOKENS
from .tokenizer import Tokenizer

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Version = Literal["squad1", "squad2"]
RELEASED_THRESHOLD = -2.75
"""Logit of impossible above which the released code gives no answer; fixed, not searched."""
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBERS = {"squad1": "1.1", "squad2": "2.0"}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Question:
    """One question; the first of its answers is the one to learn."""

    id: str
    text: str
    context: str
    answers: tuple[str, ...]
    start: int
    """Character of the context where the first answer begins; −1 if there is none."""

    @property
    def impossible(self) -> bool:
        return not self.answers


@dataclass(frozen=True, slots=True)
class Window:
    """Where the passage tokens of one row of Features come from."""

    question: int
    first: int
    """Place in the row of the first passage token."""
    offsets: Ints  # (n, 2) characters of the context, of each passage token
    max_context: NDArray[np.bool_]  # (n,) no other window has more of the passage around the token


@dataclass(frozen=True)
class Answers:
    """What the model says about each question, by id, whether or not it has an answer."""

    texts: dict[str, str]
    """The best span; empty only if no window has one."""
    null: dict[str, float]
    """Logit of impossible, the least over the windows: one window with an answer is enough."""
    nbest: dict[str, list[tuple[str, float]]]
    """Different texts, best first, with their log-probabilities."""

    def at(self, threshold: float | None) -> dict[str, str]:
        """The answers given: empty where `null` is above the threshold; None always answers."""
        return {
            key: "" if threshold is not None and self.null[key] > threshold else text
            for key, text in self.texts.items()
        }


# ---------------------------------------------------------------------- reading


def load(
    path: Path, version: Version, *, needed: Sequence[str] = ("dev",)
) -> dict[str, list[Question]]:
    """The splits `train` and `dev` of a directory, as far as they are there.

    A split in `needed` has to be; training adds "train" to them.
    """
    found: dict[str, list[Question]] = {}
    for split in ("train", "dev"):
        file = path / f"{split}-v{_NUMBERS[version]}.json"
        if file.is_file():
            found[split] = read(file)
        elif split in needed:
            raise ElectraError(
                f"{file.name} is missing.",
                where=str(path),
                fix=f"put SQuAD {_NUMBERS[version]} there under its official names",
            )
    return found


def read(path: Path, *, labelled: bool = True) -> list[Question]:
    """All questions of a file in the official format; without `labelled` answers are not read."""
    try:
        document: Any = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ElectraError(
            f"This is not readable as JSON: {error}.",
            where=str(path),
            fix="download the file again",
        ) from error
    questions: dict[str, Question] = {}
    for i, article in enumerate(_field(document, "data", list, str(path))):
        where = f"{path}, data[{i}]"
        for j, paragraph in enumerate(_field(article, "paragraphs", list, where)):
            place = f"{where}.paragraphs[{j}]"
            context = _field(paragraph, "context", str, place)
            for k, item in enumerate(_field(paragraph, "qas", list, place)):
                key = _field(item, "id", str, f"{place}.qas[{k}]")
                if key in questions:
                    raise _bad("The id occurs twice.", f"{path}, question {key}")
                questions[key] = _question(item, context, f"{path}, question {key}", labelled)
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
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise _bad(f"{key} has an unpaired surrogate: {error.reason}.", where) from error
    return value


def _bad(what: str, where: str) -> ElectraError:
    return ElectraError(what, where=where, fix="correct the file, or download it again")


# ---------------------------------------------------------------------- windows


def windows(
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    *,
    length: int = 512,
    query: int = 64,
    stride: int = 128,
    training: bool,
) -> tuple[Features, list[Window]]:
    """One row per window; the windows of a passage begin `stride` tokens apart.

    training: with the targets start, end (0 where the window does not hold the whole answer) and
    impossible, which is about the question: a window that misses the answer is not impossible.
    """
    if min(length - query - 3, query, stride) < 1:
        raise ElectraError(
            f"Windows of {length} tokens have no room for questions of {query} and a passage.",
            where="length, query, stride",
            fix="use 512, 64 and 128",
        )
    contexts = {context: n for n, context in enumerate(dict.fromkeys(q.context for q in questions))}
    passages = list(_encode(list(contexts), tokenizer))
    rows, found, spans = list[tuple[Ints, Ints]](), list[Window](), list[tuple[int, int]]()
    asked = _encode([question.text for question in questions], tokenizer)
    for number, (question, (ids, _)) in enumerate(zip(questions, asked, strict=True)):
        ids = ids[:query]
        passage, offsets = passages[contexts[question.context]]
        n, room, first = len(passage), length - 3 - len(ids), len(ids) + 2
        gold = _tokens_of(question, offsets)
        starts = np.arange(0, max(n - room, 0) + min(stride, room), min(stride, room))
        ends = np.minimum(starts + room, n)
        best = _max_context(starts, ends, n)
        for w, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            rows.append((ids, passage[start:end]))
            found.append(Window(number, first, offsets[start:end], best[start:end] == w))
            held = start <= gold[0] <= gold[1] < end
            spans.append((gold[0] - start + first, gold[1] - start + first) if held else (0, 0))

    firsts = np.array([window.first for window in found], np.int32)
    lengths = firsts + np.array([len(part) + 1 for _, part in rows], np.int32)
    tokens = np.full((len(rows), lengths.max(initial=0)), tokenizer.pad_id, np.int32)
    for row, (ids, part), first, total in zip(tokens, rows, firsts, lengths, strict=True):
        row[0], row[1 : first - 1], row[first - 1] = tokenizer.cls_id, ids, tokenizer.sep_id
        row[first : total - 1], row[total - 1] = part, tokenizer.sep_id
    example = np.array([window.question for window in found], np.int32)
    targets: dict[str, NDArray[Any]] = {}
    if training:
        impossible = np.array([question.impossible for question in questions], np.float32)
        both = np.array(spans, np.int64).reshape(-1, 2)
        targets = {"start": both[:, 0], "end": both[:, 1], "impossible": impossible[example]}
    return Features(tokens, lengths, firsts, targets, example), found


def _encode(texts: list[str], tokenizer: Tokenizer) -> Iterator[tuple[Ints, Ints]]:
    """Ids (n,) and character offsets (n, 2) of each text; in parts, since encodings are large."""
    for part in range(0, len(texts), 1000):
        batch = texts[part : part + 1000]
        for encoding in tokenizer.backend.encode_batch(batch, add_special_tokens=False):
            offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
            yield np.array(encoding.ids, np.int32), offsets


def _tokens_of(question: Question, offsets: Ints) -> tuple[int, int]:
    """First and last token that share a character with the answer; (−1, −1) if none does."""
    stop = question.start + sum(map(len, question.answers[:1]))
    (touched,) = np.nonzero((offsets[:, 0] < stop) & (offsets[:, 1] > question.start))
    return (int(touched[0]), int(touched[-1])) if len(touched) else (-1, -1)


def _max_context(starts: NDArray[np.int64], ends: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """(n,) the window in which each token has most passage on its poorer side.

    Longer windows and then earlier ones win ties, as in BERT's and the released code.
    """
    if len(starts) == 1:
        return np.zeros(n, np.int64)
    token, starts, ends = np.arange(n), starts[:, None], ends[:, None]
    poorer = np.minimum(token - starts, ends - 1 - token)  # (windows, n), negative outside
    return np.where(poorer < 0, -1.0, poorer + 0.01 * (ends - starts)).argmax(0)


# ---------------------------------------------------------------------- decoding


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
    null = np.full(len(questions), np.inf)
    of = np.array([window.question for window in windows], np.int64)
    np.minimum.at(null, of, predictions["answerable"].astype(np.float64))
    spans: list[list[tuple[float, int, int]]] = [[] for _ in questions]
    names = ("start_log_probs", "start_index", "end_log_probs", "end_index")
    for window, p, s, q, e in zip(windows, *(predictions[name] for name in names), strict=True):
        s, e = s[:, None] - window.first, e - window.first  # (K, 1), (K, K)
        n = len(window.offsets)
        if n == 0:
            continue
        valid = (s >= 0) & (s <= e) & (e < np.minimum(s + max_tokens, n))
        valid &= window.max_context[np.clip(s, 0, n - 1)]
        i, j = np.nonzero(valid)
        score = (p[:, None] + q)[i, j]
        top = np.argsort(-score, kind="stable")[:n_best]
        begins, stops = window.offsets[s[i[top], 0], 0], window.offsets[e[i[top], j[top]], 1]
        spans[window.question] += zip(
            score[top].tolist(), begins.tolist(), stops.tolist(), strict=True
        )
    nbest: dict[str, list[tuple[str, float]]] = {}
    for question, candidates in zip(questions, spans, strict=True):
        texts: dict[str, float] = {}
        for score, begin, stop in sorted(candidates, key=lambda span: -span[0]):
            texts.setdefault(_substring(question.context, begin, stop), score)
        nbest[question.id] = list(texts.items())[:n_best]
    return Answers(
        texts={key: best[0][0] if best else "" for key, best in nbest.items()},
        null={q.id: float(value) for q, value in zip(questions, null, strict=True)},
        nbest=nbest,
    )


def _substring(context: str, begin: int, stop: int) -> str:
    """The characters of a span, with the marks on its last letter, which tokens can leave out."""
    while stop < len(context) and unicodedata.category(context[stop]) == "Mn":
        stop += 1
    return context[begin:stop]


def write_predictions(directory: Path, given: Answers, threshold: float | None) -> None:
    """predictions.json as the official scripts read it: {id: text}.

    With a threshold, as SQuAD 2.0 wants it, also spans.json (the best span of every question,
    before the threshold) and null_odds.json: from these two the official script searches its own.
    """
    files: dict[str, Mapping[str, str | float]] = {"predictions": given.at(threshold)}
    if threshold is not None:
        files |= {"spans": given.texts, "null_odds": given.null}
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomic(directory / f"{name}.json", json_bytes(content, indent=1))


# ---------------------------------------------------------------------- scores


def evaluate(
    questions: Sequence[Question], given: Answers, threshold: float | None
) -> dict[str, float]:
    """The official scores in percent. threshold None: SQuAD 1.1, every question is answered.

    exact, f1: at the fixed threshold. best_exact, best_f1: at the threshold that is best for these
    very questions, and so not comparable with the former; it stands beside them. has_ans_… and
    no_ans_… are parts of exact and f1.
    """
    scores = [_score(given.texts[q.id], q, second=threshold is not None) for q in questions]
    raw = 100 * np.array(scores)  # (questions, 2)
    if threshold is None:
        exact, f1 = raw.mean(0)
        return {"exact": exact.item(), "f1": f1.item()}
    none = np.array([question.impossible for question in questions])
    null = np.array([given.null[question.id] for question in questions])
    silent = 100.0 * none  # scores of giving no answer
    fixed = np.where((null > threshold)[:, None], silent[:, None], raw)
    result: dict[str, float] = {}
    for column, name in enumerate(("exact", "f1")):
        result[name] = fixed[:, column].mean().item()
        for part, which in (("has_ans", ~none), ("no_ans", none)):
            if which.any():
                result[f"{part}_{name}"] = fixed[which, column].mean().item()
        best, at = _best_threshold(null, raw[:, column], silent)
        result |= {f"best_{name}": best, f"best_{name}_threshold": at}
    return result


def _best_threshold(null: Floats, raw: Floats, silent: Floats) -> tuple[float, float]:
    """The best mean score of any threshold, and the lowest threshold that gives it.

    Questions with equal scores are answered together or not at all, which the official script
    overlooks; without ties the results are the same.
    """
    order = np.argsort(null, kind="stable")
    gain = np.concatenate([[0.0], np.cumsum((raw - silent)[order])])  # of answering the first k
    at = np.concatenate([[null.min() - 1], null[order]])
    last = np.append(at[:-1] != at[1:], True)  # of a run of equal scores
    k = int(np.where(last, gain, -np.inf).argmax())
    return float((silent.sum() + gain[k]) / len(null)), float(at[k])


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, articles and extra white space."""
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def _score(text: str, question: Question, *, second: bool) -> tuple[float, float]:
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
