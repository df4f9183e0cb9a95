"""Metrics against scipy and scikit-learn, spans against the CoNLL scorer's rules by hand."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sk

from electra.finetuning.metrics import (
    accuracy,
    confusion,
    f1,
    is_degenerate,
    macro_f1,
    matthews,
    pearson,
    score,
    span_scores,
    spans,
    spearman,
    summary,
)
from electra.finetuning.tasks import GLUE, Task

TAGS = Task(name="t", kind="tagging", metric="f1", labels=("O", "B-A", "I-A", "B-C"))


def pairs(values: st.SearchStrategy[float]) -> st.SearchStrategy[list[tuple[float, float]]]:
    return st.lists(st.tuples(values, values), min_size=2, max_size=40)


# ---------------------------------------------------------------- classes


@settings(deadline=None)
@given(pairs(st.integers(0, 1)))
def test_two_classes_agree_with_scikit_learn(rows: list[tuple[int, int]]) -> None:
    p, y = zip(*rows, strict=True)
    assert accuracy(p, y) == pytest.approx(sk.accuracy_score(y, p))
    assert f1(p, y) == pytest.approx(sk.f1_score(y, p, zero_division=0))


@settings(deadline=None)
@given(pairs(st.integers(0, 3)))
def test_matthews_agrees_with_scikit_learn(rows: list[tuple[int, int]]) -> None:
    p, y = zip(*rows, strict=True)
    constant = len(set(p)) == 1 or len(set(y)) == 1
    assert matthews(p, y) == pytest.approx(0 if constant else sk.matthews_corrcoef(y, p))


@settings(deadline=None)
@given(pairs(st.integers(0, 4)))
def test_macro_f1_and_confusion_agree_with_scikit_learn(rows: list[tuple[int, int]]) -> None:
    p, y = zip(*rows, strict=True)
    assert macro_f1(p, y) == pytest.approx(sk.f1_score(y, p, average="macro", zero_division=0))
    one_by_one = list[float]()
    for c in {*p, *y}:
        hits = sum(a == b == c for a, b in rows)
        wrong = sum((a == c) != (b == c) for a, b in rows)
        one_by_one.append(2 * hits / (2 * hits + wrong))
    assert macro_f1(p, y) == pytest.approx(sum(one_by_one) / len(one_by_one))
    names = tuple("abcde")
    found = confusion(Task(name="t", kind="classification", metric="f1", labels=names), p, y)
    table = [[found.get(label, {}).get(answer, 0) for answer in names] for label in names]
    assert table == sk.confusion_matrix(y, p, labels=range(5)).tolist()
    assert all(n for row in found.values() for n in row.values())


def test_more_is_told_of_own_tables_than_of_glue() -> None:
    own = Task(name="cola", kind="classification", metric="accuracy", labels=("no", "yes"))
    mine, theirs = (score(task, [0, 1, 1], [0, 1, 0]) for task in (own, GLUE["cola"]))
    assert mine.keys() - theirs.keys() == {"macro_f1"}


def test_class_one_is_the_positive_one() -> None:
    assert f1([1, 1, 1, 0], [1, 0, 0, 0]) == pytest.approx(0.5)
    assert f1([0, 0, 0, 1], [0, 1, 1, 1]) == pytest.approx(0.5)


# ---------------------------------------------------------------- numbers


@settings(deadline=None)
@given(pairs(st.integers(-9, 9).map(lambda n: n / 2)))
def test_correlations_agree_with_scipy(rows: list[tuple[float, float]]) -> None:
    p, y = zip(*rows, strict=True)
    if len(set(p)) == 1 or len(set(y)) == 1:
        assert pearson(p, y) == spearman(p, y) == 0
    else:
        assert pearson(p, y) == pytest.approx(stats.pearsonr(p, y).statistic, abs=1e-12)
        assert spearman(p, y) == pytest.approx(stats.spearmanr(p, y).statistic, abs=1e-12)


@given(pairs(st.floats(allow_nan=True, allow_infinity=True)))
def test_correlations_are_finite_for_any_numbers(rows: list[tuple[float, float]]) -> None:
    p, y = zip(*rows, strict=True)
    for found in (pearson(p, y), spearman(p, y)):
        assert -1 <= found <= 1


def test_equal_values_share_the_mean_rank() -> None:
    # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: 4.5 / sqrt(4.5 · 5)
    assert spearman([1, 5, 5, 7], [0, 1, 2, 3]) == pytest.approx(4.5 / math.sqrt(22.5))
    assert spearman([1, 10, 100], [1, 2, 3]) == pytest.approx(1)
    assert pearson([1, 10, 100], [1, 2, 3]) < 0.95


def test_correlations_of_extreme_numbers() -> None:
    expected = pearson([1, 2, 4], [3, 5, 4])
    for size in (1e-200, 1e200):
        assert pearson([size, 2 * size, 4 * size], [3, 5, 4]) == pytest.approx(expected)
    assert pearson([1e308, -1e308], [1, 2]) == pytest.approx(-1)
    for length in range(2, 40):  # the mean of equal numbers is not always that number
        assert pearson([0.1] * length, range(length)) == 0


def test_rows_have_to_match() -> None:
    for predicted, gold in (([1], [1, 0]), ([], []), ([[1]], [[1]])):
        with pytest.raises(ValueError, match="labels"):
            accuracy(predicted, gold)  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------- spans


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("B-NP I-NP O B-NP", {(0, 2, "NP"), (3, 4, "NP")}),
        ("B-NP B-NP I-NP", {(0, 1, "NP"), (1, 3, "NP")}),  # adjacent
        ("I-NP I-NP O I-VP", {(0, 2, "NP"), (3, 4, "VP")}),  # I- after nothing and after O begins
        ("B-NP I-VP I-VP", {(0, 1, "NP"), (1, 3, "VP")}),  # the type changes
        ("I-NP B-NP", {(0, 1, "NP"), (1, 2, "NP")}),
        ("O O", set()),
        ("", set()),
        ("B-NP I-NP", {(0, 2, "NP")}),  # open at the end
        ("B-a-b I-a-b", {(0, 2, "a-b")}),
        ("B-X I-X E-X S-X S-X", {(0, 3, "X"), (3, 4, "X"), (4, 5, "X")}),  # IOBES
        ("B-X E-X I-X E-X E-X", {(0, 2, "X"), (2, 4, "X"), (4, 5, "X")}),  # E ends, any begins
        ("S-X I-X O E-X", {(0, 1, "X"), (1, 2, "X"), (3, 4, "X")}),
        ("B-X L-X U-X I-X", {(0, 2, "X"), (2, 3, "X"), (3, 4, "X")}),  # BILOU
    ],
)
def test_spans_by_the_conll_rule(tags: str, expected: set[tuple[int, int, str]]) -> None:
    assert spans(tags.split()) == expected


def test_span_scores_need_borders_and_type() -> None:
    gold = [["B-NP", "I-NP", "O", "B-VP"], ["B-PP", "B-NP"]]
    found = [["B-NP", "I-NP", "O", "B-NP"], ["B-PP", "I-PP"]]
    # right: NP of the first sentence; found: 2 + 1; there: 2 + 2
    expected = {"f1": pytest.approx(2 / 7), "precision": pytest.approx(1 / 3), "recall": 0.25}
    assert span_scores(found, gold) == expected
    assert span_scores([["O"]], [["O"]]) == {"f1": 0, "precision": 0, "recall": 0}


@given(
    st.lists(st.lists(st.sampled_from(["O", "B-A", "I-A", "B-C", "I-C", "E-A", "S-C"]), max_size=9))
)
def test_spans_cover_every_tagged_word_once(sentences: list[list[str]]) -> None:
    for tags in sentences:
        covered = sorted(place for a, b, _ in spans(tags) for place in range(a, b))
        assert covered == [place for place, tag in enumerate(tags) if tag != "O"]
    perfect = span_scores(sentences, sentences)["f1"]
    assert perfect == any(tag != "O" for tags in sentences for tag in tags)


# ---------------------------------------------------------------- tasks and seeds


def test_every_task_reports_its_metric() -> None:
    for task in GLUE.values():
        assert task.metric in score(task, [0, 1, 1], [0, 1, 0])
    assert score(GLUE["mrpc"], [0, 1, 1], [0, 1, 0]).keys() == {"accuracy", "f1", "matthews"}
    assert score(GLUE["mnli"], [0, 1, 2], [0, 1, 1])["accuracy"] == pytest.approx(2 / 3)
    assert score(GLUE["stsb"], [1.0, 2.0], [0.5, 5.0]) == pytest.approx(
        {"spearman": 1, "pearson": 1}
    )


def test_tags_are_scored_by_word_and_by_span() -> None:
    found = score(TAGS, [[1, 2, 0], [3]], [[1, 0, 0], [3]])
    assert found["accuracy"] == 0.75
    assert found["f1"] == 0.5
    words = Task(name="t", kind="tagging", metric="accuracy", labels=("X", "Y"))
    assert score(words, [[0, 1]], [[1, 1]]) == {"accuracy": 0.5}
    with pytest.raises(ValueError, match="tags"):
        score(TAGS, [[1, 2], [3]], [[1], [0, 3]])


def test_failed_runs_are_recognised() -> None:
    assert is_degenerate(GLUE["rte"], [1, 1, 1], [1, 0, 1])
    assert not is_degenerate(GLUE["rte"], [1, 0, 1], [1, 1, 1])
    assert not is_degenerate(GLUE["rte"], [1, 1], [1, 1])
    assert is_degenerate(GLUE["stsb"], [2.5, 2.5], [1.0, 5.0])
    assert is_degenerate(GLUE["stsb"], [2.5, float("nan")], [1.0, 5.0])
    assert not is_degenerate(GLUE["stsb"], [2.5, 2.6], [1.0, 5.0])
    assert is_degenerate(TAGS, [[0, 0], [0]], [[1, 0], [0]])
    assert not is_degenerate(TAGS, [[0, 0], [1]], [[1, 0], [0]])


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=9))
def test_summary_keeps_every_run(runs: list[tuple[float, bool]]) -> None:
    scores, failed = (list(column) for column in zip(*runs, strict=True))
    found = summary(scores, failed)
    assert found["median"] == pytest.approx(statistics.median(scores))
    assert found["mean"] == pytest.approx(statistics.fmean(scores))
    assert found["best"] == max(scores)
    expected = statistics.stdev(scores) if len(scores) > 1 else 0
    assert found["std"] == pytest.approx(expected, abs=1e-9)
    assert (found["failed"], found["seeds"]) == (sum(failed), len(scores))


def test_summary_of_nothing() -> None:
    with pytest.raises(ValueError, match="0 scores"):
        summary([], [])
    assert np.isfinite(list(summary([0.5], [True]).values())).all()
