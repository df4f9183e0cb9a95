"""SQuAD: reading what others wrote, windows and offsets, decoding, and the official scores."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from electra.config import EncoderConfig
from electra.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from electra.errors import ElectraError, NumericError
from electra.finetuning import squad
from electra.finetuning.features import Features, TaskBatch
from electra.finetuning.heads import build_head
from electra.finetuning.squad import Answers, Question, Window


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Knows single letters only, so that words are many tokens and odd ones are [UNK]."""
    singles = [*string.ascii_lowercase, *string.digits, *string.punctuation, *"ßøαω東京"]
    path = tmp_path_factory.mktemp("letters") / "vocab.txt"
    tokens = [*SPECIAL_TOKENS, *singles, *(f"##{single}" for single in singles)]
    path.write_text("".join(f"{token}\n" for token in tokens))
    return Tokenizer.load(path)


def question(context: str, answer: str | None, *, text: str = "who is it") -> Question:
    """About the first place where the answer is found."""
    if answer is None:
        return Question("q", text, context, (), -1)
    return Question("q", text, context, (answer,), context.index(answer))


# ---------------------------------------------------------------------- reading


def document(**changes: Any) -> dict[str, Any]:
    """A file with one question; changes go into the question."""
    qa: dict[str, Any] = {
        "id": "7",
        "question": "Where?",
        "answers": [{"text": "Rome", "answer_start": 3}, {"text": "In Rome", "answer_start": 0}],
        "is_impossible": False,
    }
    qa |= changes
    qa = {key: value for key, value in qa.items() if value is not ...}
    return {"data": [{"paragraphs": [{"context": "In Rome, today.", "qas": [qa]}]}]}


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_reads_what_is_there(tmp_path: Path) -> None:
    write(tmp_path / "dev-v2.0.json", document())
    splits = squad.load(tmp_path, "squad2")
    expected = Question("7", "Where?", "In Rome, today.", ("Rome", "In Rome"), 3)
    assert splits == {"dev": [expected]}
    assert not expected.impossible
    write(tmp_path / "train-v2.0.json", document(answers=[], is_impossible=True))
    (impossible,) = squad.load(tmp_path, "squad2", needed=("train", "dev"))["train"]
    assert impossible.impossible
    assert (impossible.answers, impossible.start) == ((), -1)
    write(tmp_path / "dev-v1.1.json", document(is_impossible=...))
    assert squad.load(tmp_path, "squad1") == {"dev": [expected]}


def test_questions_to_be_answered_need_no_answers(tmp_path: Path) -> None:
    path = write(tmp_path / "file.json", document(answers=..., is_impossible=...))
    assert squad.read(path, labelled=False) == [Question("7", "Where?", "In Rome, today.", (), -1)]
    with pytest.raises(ElectraError, match="no answers"):
        squad.read(path)


@pytest.mark.parametrize("missing", ["train", "dev"])
def test_names_the_file_that_is_missing(tmp_path: Path, missing: str) -> None:
    for split in {"train", "dev"} - {missing}:
        write(tmp_path / f"{split}-v1.1.json", document())
    with pytest.raises(ElectraError, match=f"{missing}-v1.1.json is missing") as error:
        squad.load(tmp_path, "squad1", needed=("train", "dev"))
    assert error.value.where == str(tmp_path)
    assert error.value.fix


NESTED = "[" * 100_000


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "not readable as JSON"),
        ("{", "not readable as JSON"),
        (NESTED, "not readable as JSON"),
        ("\udcff", "not readable as JSON"),
        ([], "no data"),
        ({"data": {}}, "no data"),
        ({"data": []}, "no question"),
        ({"data": [3]}, "no paragraphs"),
        ({"data": [{"paragraphs": [{"context": None, "qas": []}]}]}, "no context"),
        (document(id=...), "no id"),
        (document(id=7), "no id"),
        (document(question=None), "no question"),
        (document(answers=...), "no answers"),
        (document(answers=["Rome"]), "no answer_start"),
        (document(answers=[{"text": "Rome", "answer_start": "3"}]), "no answer_start"),
        (document(answers=[{"text": "Rome", "answer_start": True}]), "no answer_start"),
        (document(answers=[{"text": "Rome", "answer_start": 2}]), "not in the passage at 2"),
        (document(answers=[{"text": "Rome", "answer_start": 10**40}]), "not in the passage"),
        (document(answers=[{"text": "y.", "answer_start": -2}]), "not in the passage at -2"),
        (document(answers=[{"text": "", "answer_start": 3}]), "not in the passage at 3"),
        (document(answers=[]), "disagree"),
        (document(is_impossible=True), "disagree"),
        (document(question="\ud800"), "surrogate"),
        ({"data": 2 * document()["data"]}, "occurs twice"),
    ],
)
def test_refuses_with_the_place(tmp_path: Path, content: Any, what: str) -> None:
    path = tmp_path / "file.json"
    if isinstance(content, str):
        path.write_bytes(content.encode(errors="surrogateescape"))
    else:
        write(path, content)
    with pytest.raises(ElectraError, match=what) as error:
        squad.read(path)
    assert str(path) in error.value.where
    assert error.value.fix
    if what in ("no question", "disagree", "surrogate", "occurs twice") and content != {"data": []}:
        assert "question 7" in error.value.where


def values() -> st.SearchStrategy[Any]:
    keys = ("data", "paragraphs", "context", "qas", "id", "question", "answers", "text")
    keys += ("answer_start", "is_impossible")
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(keys) | st.text(max_size=2), inner, max_size=5)
        ),
        max_leaves=20,
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given_value=values(), place=st.integers(0, 8))
def test_ragged_files_never_crash(tmp_path: Path, given_value: Any, place: int) -> None:
    """Any value anywhere is either read or refused."""
    content = document()
    paragraph = content["data"][0]["paragraphs"][0]
    holders = [
        (content, "data"),
        (content["data"], 0),
        (content["data"][0], "paragraphs"),
        (paragraph, "context"),
        (paragraph, "qas"),
        (paragraph["qas"], 0),
        (paragraph["qas"][0], "answers"),
        (paragraph["qas"][0]["answers"], 0),
        (paragraph["qas"][0]["answers"][0], "answer_start"),
    ]
    holder, key = holders[place]
    holder[key] = given_value
    try:
        found = squad.read(write(tmp_path / "file.json", content))
    except ElectraError:
        return
    assert all(isinstance(q, Question) for q in found)


# ---------------------------------------------------------------------- windows


CONTEXT = "In Rome the old river sees one quiet bird, and all small houses follow the wind home."


def rows_of(features: Features) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(features.tokens, features.lengths, strict=True)]


def test_layout_and_targets(letters: Tokenizer) -> None:
    asked = [question("ab cd", "cd", text="xy"), question("ab", None, text="x" * 9)]
    features, found = squad.windows(asked, letters, length=12, query=3, stride=4, training=True)
    texts = [letters.decode_tokens(row) for row in rows_of(features)]
    assert texts == [
        ["[CLS]", "x", "##y", "[SEP]", "a", "##b", "c", "##d", "[SEP]"],
        ["[CLS]", "x", "##x", "##x", "[SEP]", "a", "##b", "[SEP]"],  # the question is cut
    ]
    assert features.first.tolist() == [4, 5]
    assert features.example.tolist() == [0, 1]
    assert (features.tokens[1, 8:] == letters.pad_id).all()
    assert features.targets["start"].tolist() == [6, 0]
    assert features.targets["end"].tolist() == [7, 0]
    assert features.targets["impossible"].tolist() == [0, 1]
    assert [window.question for window in found] == [0, 1]
    assert found[0].offsets.tolist() == [[0, 1], [1, 2], [3, 4], [4, 5]]


def test_windows_that_miss_the_answer_stay_answerable(letters: Tokenizer) -> None:
    asked = [question(CONTEXT, "quiet bird"), question(CONTEXT, None)]
    features, found = squad.windows(asked, letters, length=30, query=8, stride=6, training=True)
    t = features.targets
    held = t["start"] > 0
    mine = features.example == 0
    assert 0 < held.sum() < mine.sum()
    assert not held[~mine].any()
    assert (t["end"][~held] == 0).all()
    assert (t["impossible"] == ~mine).all()
    for i in np.nonzero(held)[0]:
        s, e = (int(t[key][i]) - found[i].first for key in ("start", "end"))
        assert CONTEXT[found[i].offsets[s, 0] : found[i].offsets[e, 1]] == "quiet bird"


def test_evaluation_has_no_targets(letters: Tokenizer) -> None:
    assert squad.windows([question("ab", "ab")], letters, training=False)[0].targets == {}


def test_answer_without_a_token(letters: Tokenizer) -> None:
    """A blank cannot be pointed at; an empty passage has a window all the same."""
    asked = [question("ab cd", " "), question("", None)]
    features, found = squad.windows(asked, letters, training=True)
    assert features.targets["start"].tolist() == features.targets["end"].tolist() == [0, 0]
    assert features.targets["impossible"].tolist() == [0, 1]
    assert len(found[1].offsets) == 0


@pytest.mark.parametrize("sizes", [(66, 64, 128), (512, 0, 128), (512, 64, 0)])
def test_windows_need_room(letters: Tokenizer, sizes: tuple[int, int, int]) -> None:
    length, query, stride = sizes
    with pytest.raises(ElectraError, match="no room"):
        squad.windows([], letters, length=length, query=query, stride=stride, training=False)


def slow_max_context(spans: list[tuple[int, int]], token: int) -> int:
    """The window of a token, by the words of BERT's rule: most context on the poorer side."""
    best, chosen = -1.0, -1
    for w, (start, end) in enumerate(spans):
        if start <= token < end:
            left, right = token - start, end - 1 - token
            score = min(left, right) + 0.01 * (end - start)
            if score > best:
                best, chosen = score, w
    return chosen


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(0, 70),
    query=st.integers(1, 6),
    room=st.integers(1, 30),
    stride=st.integers(1, 40),
)
@example(n=340, query=1, room=200, stride=128)  # here the length of a window decides
def test_windows_cover_everything(
    letters: Tokenizer, n: int, query: int, room: int, stride: int
) -> None:
    draw = np.random.default_rng(n)
    context = "".join(draw.choice(list(string.punctuation), n))  # one token each
    asked = [question(context, None, text="xyzuvw")]
    features, found = squad.windows(
        asked, letters, length=query + 3 + room, query=query, stride=stride, training=True
    )
    whole = letters.backend.encode(context, add_special_tokens=False).ids
    spans: list[tuple[int, int]] = []
    for row, window in zip(rows_of(features), found, strict=True):
        assert len(row) <= query + 3 + room
        part = row[window.first : -1]
        start = int(window.offsets[0, 0]) if len(part) else 0
        assert part == whole[start : start + len(part)]
        spans.append((start, start + len(part)))
    assert {t for span in spans for t in range(*span)} == set(range(len(whole)))
    starts = [start for start, _ in spans]
    step = min(stride, max(room // 2, 1))
    assert set(np.diff(starts).tolist()) <= {step}
    for first in range(len(whole) - (overlap := min(room - step, len(whole)))):
        assert any(a <= first and first + overlap < b for a, b in spans)  # across a border too
    assert all(end < len(whole) for _, end in spans[:-1])  # none is contained in the one before
    for w, window in enumerate(found):
        expected = [slow_max_context(spans, t) == w for t in range(*spans[w])]
        assert window.max_context.tolist() == expected


# ---------------------------------------------------------------------- decoding


def beams(rows: int, length: int, spans: list[tuple[int, int]]) -> dict[str, Any]:
    """Predictions that are sure of one span per row."""
    K = min(20, length)
    start = np.tile(np.arange(K), (rows, 1))
    end = np.tile(np.arange(K), (rows, K, 1))
    start_scores, end_scores = np.full((rows, K), -50.0), np.full((rows, K, K), -50.0)
    for i, (s, e) in enumerate(spans):
        start[i, 0], end[i, 0, 0] = s, e
        start_scores[i, 0] = end_scores[i, 0, 0] = -0.1 * (s == 0)
    return {
        "start_log_probs": start_scores,
        "start_index": start,
        "end_log_probs": end_scores,
        "end_index": end,
        "answerable": np.zeros(rows),
    }


BASE = st.characters(categories=["L", "N", "P", "S"], exclude_characters="\ufffd")
WORDS = st.builds(
    str.__add__,
    BASE,
    st.text(st.characters(categories=["L", "N", "P", "S", "Mn"], exclude_characters="\ufffd")),
)


@settings(deadline=None, max_examples=150)
@given(
    words=st.lists(WORDS, min_size=1, max_size=12),
    spaces=st.lists(st.sampled_from([" ", "  ", "\n", "\u00a0", "\u3000"]), min_size=12),
    ends=st.tuples(st.integers(0, 11), st.integers(0, 11)),
)
def test_offsets_lead_back_to_the_source(
    letters: Tokenizer, words: list[str], spaces: list[str], ends: tuple[int, int]
) -> None:
    """An answer of whole words comes back character by character, through targets and beams."""
    i, j = sorted(end % len(words) for end in ends)
    pieces = [piece for pair in zip(words, spaces, strict=False) for piece in pair]
    context = "".join(pieces)
    start = len("".join(pieces[: 2 * i]))
    answer = "".join(pieces[2 * i : 2 * j + 1])
    asked = [Question("q", "who", context, (answer,), start)]
    features, found = squad.windows(asked, letters, length=48, query=4, stride=10, training=True)
    spans = list(zip(features.targets["start"], features.targets["end"], strict=True))
    assume(any(s > 0 for s, _ in spans))  # some answers are longer than a window
    given_ = squad.answers(
        asked, found, beams(len(found), features.tokens.shape[1], spans), max_tokens=100
    )
    assume(given_.nbest["q"][0][1] > -1)  # where no window is the right one for the start
    assert given_.texts["q"] == answer


def test_answers_keep_the_marks_of_their_last_letter(letters: Tokenizer) -> None:
    context = "le cafe\u0301 noir"
    asked = [question(context, "cafe\u0301")]
    features, found = squad.windows(asked, letters, training=True)
    span = (features.targets["start"][0], features.targets["end"][0])
    assert squad.answers(asked, found, beams(1, 20, [span])).texts == {"q": "cafe\u0301"}


def slow_answers(
    asked: list[Question], found: list[Window], p: dict[str, Any], n_best: int, longest: int
) -> dict[str, list[tuple[str, float]]]:
    result: dict[str, list[tuple[str, float]]] = {}
    for number, q in enumerate(asked):
        candidates: dict[str, float] = {}
        for w, window in enumerate(found):
            if window.question != number:
                continue
            for i, j in itertools.product(range(p["start_index"].shape[1]), repeat=2):
                s = int(p["start_index"][w, i]) - window.first
                e = int(p["end_index"][w, i, j]) - window.first
                in_passage = 0 <= s < len(window.offsets) and 0 <= e < len(window.offsets)
                if not in_passage or e < s or e - s + 1 > longest or not window.max_context[s]:
                    continue
                text = q.context[window.offsets[s, 0] : window.offsets[e, 1]]
                score = float(p["start_log_probs"][w, i] + p["end_log_probs"][w, i, j])
                candidates[text] = max(score, candidates.get(text, -np.inf))
        best = sorted(candidates.items(), key=lambda item: -item[1])
        result[q.id] = best[:n_best]
    return result


@pytest.mark.parametrize("form", ["paper", "hf"])
def test_decoding_of_a_model_against_all_its_candidates(letters: Tokenizer, form: Any) -> None:
    """Several windows per question, spans that cross their borders, beams of a real head."""
    asked = [
        Question("a", "who", CONTEXT, ("Rome",), 3),
        Question("b", "what is it now", CONTEXT[20:], (), -1),
        Question("c", "x", "ab", ("ab",), 0),
    ]
    features, found = squad.windows(asked, letters, length=40, query=6, stride=9, training=False)
    assert len(found) > 8
    config = EncoderConfig(layers=1, hidden_size=16, ffn_size=8, attention_heads=1)
    head = build_head("qa", config, 2, form)
    draw = torch.Generator().manual_seed(4)
    N, L = features.tokens.shape
    position = torch.arange(L)
    mask = position < torch.from_numpy(features.lengths)[:, None]
    segment = ((position >= torch.from_numpy(features.first)[:, None]) & mask).long()
    batch = TaskBatch(torch.from_numpy(features.tokens).long(), segment, mask, {})
    with torch.no_grad():
        scores = head.predict(4 * torch.randn(N, L, 16, generator=draw), batch)
    p = {name: value.numpy() for name, value in scores.items()}
    given_ = squad.answers(asked, found, p, n_best=15, max_tokens=7)
    expected = slow_answers(asked, found, p, 15, 7)
    assert len(expected["a"]) == 15
    for q in asked:
        mine, theirs = given_.nbest[q.id], expected[q.id]
        assert [text for text, _ in mine] == [text for text, _ in theirs]
        assert [s for _, s in mine] == pytest.approx([s for _, s in theirs])
        assert given_.texts[q.id] == mine[0][0]
    of = features.example
    for number, q in enumerate(asked):
        assert given_.null[q.id] == pytest.approx(p["answerable"][of == number].min())


def test_no_span_is_an_empty_text_and_no_number_is_an_error(letters: Tokenizer) -> None:
    asked = [question("ab cd", "ab")]
    _, found = squad.windows(asked, letters, training=False)
    p = beams(1, 20, [(0, 0)])
    p["end_index"][:] = 0  # nothing but [CLS]
    empty = squad.answers(asked, found, p)
    assert empty.texts == {"q": ""}
    assert empty.nbest == {"q": []}
    p["answerable"][:] = np.nan
    with pytest.raises(NumericError, match="not finite"):
        squad.answers(asked, found, p)


def test_written_predictions(tmp_path: Path) -> None:
    given_ = Answers({"a": "Röm", "b": "x"}, {"a": -3.0, "b": -2.5}, {"a": [], "b": []})
    squad.write_predictions(tmp_path / "1", given_, None)
    squad.write_predictions(tmp_path / "2", given_, squad.RELEASED_THRESHOLD)
    files = {
        str(path.relative_to(tmp_path)): json.loads(path.read_text())
        for path in tmp_path.rglob("*.json")
    }
    assert files == {
        "1/predictions.json": {"a": "Röm", "b": "x"},
        "2/predictions.json": {"a": "Röm", "b": ""},
        "2/spans.json": {"a": "Röm", "b": "x"},
        "2/null_odds.json": {"a": -3.0, "b": -2.5},
    }


# ---------------------------------------------------------------------- scores


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Cat,\tsat!", "cat sat"),
        ("a an the A AN THE", ""),
        ("theatre Anna a-b", "theatre anna ab"),
        ("U.S.A.", "usa"),
        ("Straße ÉCOLE", "straße école"),
        ("New\u00a0York", "new york"),
        ("“quoted” — 5°", "“quoted” — 5°"),  # only ASCII punctuation goes
        ("$1,000.50", "100050"),
        ("l'a b", "la b"),  # punctuation goes first
        (" \n ", ""),
    ],
)
def test_normalisation(text: str, expected: str) -> None:
    assert squad.normalise(text) == expected


def scored(text: str, *golds: str, threshold: float | None = 0.0) -> tuple[float, float]:
    q = Question("q", "?", "", golds, 0)
    result = squad.evaluate([q], Answers({"q": text}, {"q": -1.0}, {"q": []}), threshold)
    return result["exact"] / 100, result["f1"] / 100


@pytest.mark.parametrize(
    ("text", "golds", "exact", "f1"),
    [
        ("the Cat.", ["cat"], 1, 1),
        ("a big red cat", ["the cat"], 0, 0.5),  # precision 1/3, recall 1
        ("red red cat", ["red cat cat"], 0, 2 / 3),  # words count as often as they occur
        ("cat", ["dog", "the cat", "black cat"], 1, 1),
        ("black cat sat", ["cat", "black cat"], 0, 0.8),  # the best of 0.5 and 0.8
        ("dog", ["cat"], 0, 0),
        ("", ["cat"], 0, 0),
        ("cafe", ["café"], 0, 0),
        ("CAFÉ!", ["café"], 1, 1),
        ("東京", ["東京 都"], 0, 2 / 3),
    ],
)
@pytest.mark.parametrize("threshold", [None, 0.0])
def test_exact_match_and_f1(
    text: str, golds: list[str], exact: float, f1: float, threshold: float | None
) -> None:
    assert scored(text, *golds, threshold=threshold) == pytest.approx((exact, f1))


def test_both_scripts_where_they_differ() -> None:
    """An answer that is only an article: SQuAD 2.0 drops it beside others, 1.1 keeps it."""
    assert scored("the", "a", "cat", threshold=None) == (1, 0)
    assert scored("the", "a", "cat") == (0, 0)
    assert scored("the", "a", threshold=None) == (1, 0)
    assert scored("the", "a") == (1, 1)


def four() -> tuple[list[Question], Answers]:
    asked = [
        Question("a", "?", "", ("red cat",), 0),
        Question("b", "?", "", ("dog",), 0),
        Question("c", "?", "", (), -1),
        Question("d", "?", "", (), -1),
    ]
    texts = {"a": "cat", "b": "dog", "c": "bird", "d": "fish"}
    return asked, Answers(texts, {"a": -4.0, "b": 1.0, "c": -3.0, "d": 2.0}, {})


def test_totals_of_both_kinds_of_questions() -> None:
    asked, given_ = four()
    # At −2.75 a and c are answered: a by halves, c wrongly; b is missed, d rightly silent.
    assert squad.evaluate(asked, given_, squad.RELEASED_THRESHOLD) == pytest.approx(
        {
            "exact": 100 / 4,
            "f1": 100 * (2 / 3 + 1) / 4,
            "has_ans_exact": 0,
            "has_ans_f1": 100 / 3,
            "no_ans_exact": 50,
            "no_ans_f1": 50,
            "best_exact": 50,  # nothing answered
            "best_exact_threshold": -5,
            "best_f1": 100 * (2 / 3 + 2) / 4,  # a answered
            "best_f1_threshold": -4,
        }
    )
    assert squad.evaluate(asked[:2], given_, None) == pytest.approx({"exact": 50, "f1": 500 / 6})
    assert "no_ans_f1" not in squad.evaluate(asked[:2], given_, 0.0)
    assert given_.at(-2.75) == {"a": "cat", "b": "", "c": "bird", "d": ""}
    assert given_.at(-3.0)["c"] == "bird"  # above the threshold, not at it
    assert given_.at(None) == given_.texts


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(["", "x", "x y"]), st.integers(-3, 3), st.booleans()),
        min_size=1,
        max_size=8,
    )
)
def test_best_threshold_is_the_best_of_all(rows: list[tuple[str, int, bool]]) -> None:
    """It can be reached, also where scores tie, and none is better."""
    asked = [
        Question(str(i), "?", "", ("x",) if has else (), 0) for i, (_, _, has) in enumerate(rows)
    ]
    given_ = Answers(
        {str(i): text for i, (text, _, _) in enumerate(rows)},
        {str(i): float(null) for i, (_, null, _) in enumerate(rows)},
        {},
    )
    for name in ("exact", "f1"):
        result = squad.evaluate(asked, given_, 0.0)
        at = squad.evaluate(asked, given_, result[f"best_{name}_threshold"])
        assert at[name] == pytest.approx(result[f"best_{name}"])
        every = [squad.evaluate(asked, given_, t)[name] for t in np.arange(-4, 4)]
        assert result[f"best_{name}"] == pytest.approx(max(every))
