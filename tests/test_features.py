"""Texts to arrays, and arrays to the batches of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from electra.data.tokenizer import Tokenizer
from electra.finetuning.features import (
    BUCKETS,
    DeviceFeatures,
    Features,
    Plan,
    encode_texts,
    encode_words,
)

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "dog",
    "ran",
    "away",
    "from",
    "it",
    "über",
    "x",
    "y",
    "z",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("vocabulary") / "vocab.txt"
    pieces = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")]
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    path.write_text("\n".join(dict.fromkeys([*specials, *WORDS[:-4], *pieces])) + "\n")
    return Tokenizer.load(path)


def truncated(a: list[int], b: list[int], room: int) -> tuple[list[int], list[int]]:
    """Slow and obvious: take tokens off the longer text, the second if both are equal."""
    a, b = list(a), list(b)
    while len(a) + len(b) > room:
        (a if len(a) > len(b) else b).pop()
    return a, b


sentence = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(sentence, sentence), min_size=1, max_size=8), st.integers(5, 20))
def test_pairs_are_those_of_the_slow_reference(
    tokenizer: Tokenizer, texts: list[tuple[str, str]], length: int
) -> None:
    got = encode_texts(texts, np.zeros(len(texts), np.int64), tokenizer, length)
    for i, pair in enumerate(texts):
        plain = [tokenizer.backend.encode(t, add_special_tokens=False).ids for t in pair]
        a, b = truncated(*plain, length - 3)
        cls, sep = tokenizer.cls_id, tokenizer.sep_id
        want = [cls, *a, sep, *b, sep]
        assert got.lengths[i] == len(want)
        assert got.first[i] == len(a) + 2
        assert got.tokens[i, : len(want)].tolist() == want
        assert (got.tokens[i, len(want) :] == tokenizer.pad_id).all()


def test_single_texts_are_cut_at_the_end(tokenizer: Tokenizer) -> None:
    got = encode_texts([("the cat sat on a mat",), ("dog",)], np.array([1, 0]), tokenizer, 5)
    assert got.lengths.tolist() == [5, 3]
    assert got.first.tolist() == [5, 3]  # everything is segment 0
    assert tokenizer.decode_tokens(got.tokens[0][:5]) == ["[CLS]", "the", "cat", "sat", "[SEP]"]
    assert got.targets["label"].tolist() == [1, 0]


def test_words_keep_their_labels_across_rows(tokenizer: Tokenizer) -> None:
    words = ("the", "cat", "qq", "sat", "\x00", "away")  # qq: two pieces; NUL: none
    got = encode_words([words, ("dog",)], [[1, 2, 3, 4, 5, 6], [7]], tokenizer, 6)
    assert got.example.tolist() == [0, 0, 1]
    labels = got.targets["labels"]
    assert [row[row >= 0].tolist() for row in labels] == [[1, 2, 3], [4, 5, 6], [7]]
    assert tokenizer.decode_tokens(got.tokens[0]) == ["[CLS]", "the", "cat", "q", "##q", "[SEP]"]
    assert labels[0].tolist() == [-1, 1, 2, 3, -1, -1]
    assert tokenizer.decode_tokens(got.tokens[1][:5]) == ["[CLS]", "sat", "[UNK]", "away", "[SEP]"]
    unlabelled = encode_words([words], [], tokenizer, 6)
    assert (unlabelled.targets["labels"] >= 0).sum() == len(words)


def features(lengths: list[int]) -> Features:
    n, L = len(lengths), max(lengths)
    tokens = np.arange(n * L, dtype=np.int32).reshape(n, L)
    size = np.array(lengths, np.int32)
    return Features(
        tokens, size, size // 2, {"label": np.arange(n), "labels": tokens}, np.arange(n)
    )


def plan(f: Features, **changes: Any) -> Plan:
    given = {"batch": 4, "epochs": 2.0, "seed": 3, "padding": "bucketed", "buckets": BUCKETS}
    return Plan.make(f, **{**given, **changes})


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(2, 130), min_size=1, max_size=60),
    st.sampled_from(["bucketed", "dynamic", "full"]),
    st.integers(1, 9),
)
def test_every_epoch_uses_every_row_once(lengths: list[int], padding: str, batch: int) -> None:
    f = features(lengths)
    p = plan(f, padding=padding, batch=batch)
    per_epoch = -(-len(lengths) // batch)
    assert p.rows.shape == p.weight.shape == (2 * per_epoch, batch)
    for epoch in range(2):
        part = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        used = p.rows[part][p.weight[part] > 0]
        assert sorted(used.tolist()) == list(range(len(lengths)))
    for rows, weight, T in zip(p.rows, p.weight, p.lengths, strict=True):
        assert f.lengths[rows[weight > 0]].max() <= T
        assert T in (*BUCKETS, max(lengths))
        assert max(lengths) >= T


def test_the_plan_follows_from_the_seed() -> None:
    f = features([5 + i % 40 for i in range(400)])
    assert (plan(f).rows == plan(f).rows).all()
    assert (plan(f).rows != plan(f, seed=4).rows).any()
    first, second = np.split(plan(f).rows, 2)
    assert (first != second).any()


def test_sorting_by_length_saves_tokens() -> None:
    f = features([8] * 300 + [120] * 100)
    total = {p: sum(plan(f, padding=p).lengths) for p in ("bucketed", "dynamic", "full")}
    assert total["bucketed"] < 0.6 * total["dynamic"] < total["full"]


def test_part_of_an_epoch() -> None:
    f = features([10] * 40)
    assert len(plan(f, epochs=0.5).rows) == 5
    assert len(plan(f, epochs=1.5).rows) == 15


def test_a_batch_is_cut_from_the_arrays() -> None:
    f = features([6, 3, 8])
    rows = torch.tensor([2, 1])
    batch = DeviceFeatures(f, torch.device("cpu")).batch(rows, 6)
    assert batch.x.tolist() == [[16, 17, 18, 19, 20, 21], [8, 9, 10, 11, 12, 13]]
    assert batch.mask.tolist() == [[True] * 6, [True] * 3 + [False] * 3]
    assert batch.segment.tolist() == [[0, 0, 0, 0, 1, 1], [0, 1, 1, 0, 0, 0]]
    assert batch.targets["label"].tolist() == [2, 1]
    assert batch.targets["labels"].shape == (2, 6)
