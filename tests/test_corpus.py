"""Builders, `prepare` and the reader: no token lost, the same bytes always, damage noticed."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import electra.data.corpus
from electra.batches import Batches
from electra.cli import run
from electra.config import PretrainConfig
from electra.data.corpus import Corpus, prepare
from electra.data.pieces import Segments, packed, segments
from electra.data.shards import Examples, Manifest
from electra.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from electra.errors import CorruptError, ElectraError, Stopped
from electra.files import exclusive, json_bytes, json_sha256, xxh3_file
from electra.objectives import SpecialIds, build_objective
from electra.randomness import StepRng
from electra.runtime import Runtime

ORACLE = Path(__file__).parent / "oracle"
ROOT = Path(electra.data.corpus.__file__).parents[2]
RUNTIME = Runtime(
    device=torch.device("cpu"),
    dtype=torch.float32,
    compiled=False,
    cuda_graph=False,
    threads=1,
    rank=0,
    world=1,
)


# ---------------------------------------------------------------- the released builder


@pytest.mark.parametrize("key", json.loads((ORACLE / "builder_examples.json").read_text()))
def test_segments_are_those_of_the_released_code(key: str) -> None:
    max_length, seed = (int(part.split("=")[1]) for part in key.split(","))
    tokenizer = Tokenizer.load(ORACLE / "builder_vocab.txt")
    rows = json.loads((ORACLE / "builder_tokens.json").read_text())
    ids = {row["line"].strip(): row["ids"] for row in rows}
    lines = (ORACLE / "builder_text.txt").read_text().split("\n")
    documents = [
        [ids[line.strip()] for line in group]
        for filled, group in itertools.groupby(lines, key=lambda line: bool(line.strip()))
        if filled
    ]
    built = list(examples_of(segments, documents, max_length, random.Random(seed)))
    expected = json.loads((ORACLE / "builder_examples.json").read_text())[key]
    assert len(built) == len(expected)
    for (first, second), example in zip(built, expected, strict=True):
        tokens = [tokenizer.cls_id, *first, tokenizer.sep_id]
        types = [0] * len(tokens)
        if second:
            tokens += [*second, tokenizer.sep_id]
            types += [1] * (len(second) + 1)
        padding = [0] * (max_length - len(tokens))
        assert tokens + padding == example["input_ids"]
        assert types + padding == example["segment_ids"]


def examples_of(
    build, documents: list[list[list[int]]], max_length: int, rng: random.Random, *short: float
) -> list[tuple[list[int], list[int]]]:
    """A and B of each example as token ids, put together from the builder's spans."""
    lines = [line for document in documents for line in document]
    stream = [token for line in lines for token in line]
    ends = list(itertools.accumulate(map(len, documents)))
    pairs: list[Segments] = list(build(list(map(len, lines)), ends, max_length, rng, *short))
    return [
        tuple([t for start, stop in spans for t in stream[start:stop]] for spans in pair)
        for pair in pairs
    ]  # type: ignore[return-value]


def slow_segments(
    documents: list[list[list[int]]], max_length: int, rng: random.Random
) -> list[tuple[list[int], list[int]]]:
    """The released builder restated line by line on lists of tokens."""
    examples = []
    target = max_length
    for document in documents:
        waiting: list[list[int]] = []
        for number, line in enumerate(document):
            waiting.append(line)
            size = sum(map(len, waiting))
            at_end = number == len(document) - 1
            if size < target and not (at_end and size > 0):
                continue
            goal = 100_000 if rng.random() < 0.1 else (target - 3) // 2
            first: list[int] = []
            second: list[int] = []
            for sentence in waiting:
                to_first = len(first) == 0 or len(first) + len(sentence) < goal
                if not to_first and len(second) == 0 and len(first) < goal:
                    to_first = rng.random() < 0.5
                if to_first:
                    first = first + sentence
                else:
                    second = second + sentence
            first = first[: max_length - 2]
            second = second[: max(0, max_length - len(first) - 3)]
            examples.append((first, second))
            waiting = []
            target = rng.randint(5, max_length) if rng.random() < 0.05 else max_length
    return examples


def number_tokens(shape: list[list[int]]) -> list[list[list[int]]]:
    """Documents of lines of the given lengths; every token is another number."""
    counter = itertools.count()
    return [[list(itertools.islice(counter, size)) for size in document] for document in shape]


shapes = st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=15), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None)
@given(shapes, st.integers(5, 40), st.integers(0, 100))
def test_segments_equal_the_slow_restatement(
    shape: list[list[int]], max_length: int, seed: int
) -> None:
    # Lines without tokens come into being only from control characters; the released code asks
    # its generator about them in ways that depend on earlier lines, so they are left out here.
    documents = number_tokens([[max(size, 1) for size in document] for document in shape])
    fast = examples_of(segments, documents, max_length, random.Random(seed))
    assert fast == slow_segments(documents, max_length, random.Random(seed))


@settings(max_examples=300, deadline=None)
@given(shapes, st.integers(5, 40), st.integers(0, 100))
def test_segments_never_mix_documents_and_always_fit(
    shape: list[list[int]], max_length: int, seed: int
) -> None:
    documents = number_tokens(shape)
    owner = {
        token: number
        for number, document in enumerate(documents)
        for line in document
        for token in line
    }
    for first, second in examples_of(segments, documents, max_length, random.Random(seed)):
        assert first
        assert len({owner[token] for token in first + second}) == 1
        assert len(first) + len(second) + (3 if second else 2) <= max_length
        assert sorted(set(first + second)) == sorted(first + second)


# ---------------------------------------------------------------- the packed builder


@settings(max_examples=300, deadline=None)
@given(shapes, st.integers(5, 40), st.integers(0, 100), st.sampled_from([0, 10, 100]))
def test_packed_keeps_every_token_once_and_in_order(
    shape: list[list[int]], max_length: int, seed: int, short: float
) -> None:
    documents = number_tokens(shape)
    total = sum(map(sum, shape))
    line_ends = set(itertools.accumulate(itertools.chain.from_iterable(shape)))
    document_ends = set(itertools.accumulate(map(sum, shape)))
    examples = examples_of(packed, documents, max_length, random.Random(seed), short)
    assert [token for pair in examples for part in pair for token in part] == list(range(total))
    for number, (first, second) in enumerate(examples):
        size = len(first) + len(second) + (3 if second else 2)
        is_last = number == len(examples) - 1
        assert size <= max_length
        shortest = 5 if short else max_length
        assert is_last or size >= shortest or (not second and size == shortest - 1)
        start, stop = first[0], (second or first)[-1] + 1
        inside = {end for end in document_ends if start < end < stop}
        if not second:
            assert not inside
        elif inside:
            middle = (start + stop) // 2
            assert second[0] in inside
            assert abs(second[0] - middle) == min(abs(end - middle) for end in inside)
        elif any(start < end < stop for end in line_ends):
            assert second[0] in line_ends


def test_packed_rates() -> None:
    """One example in ten has one segment; the cut is uniform where there is no line end."""
    examples = list(packed([200_000], [1], 128, random.Random(0), 0))
    single = [not second for _, second in examples]
    assert 0.07 < np.mean(single) < 0.13
    splits = [first[0][1] - first[0][0] for first, second in examples if second]
    assert abs(np.mean(splits) - 62.5) < 4
    assert min(splits) < 8
    assert max(splits) > 117


def sizes(examples: list[Segments]) -> np.ndarray:
    """Lengths with [CLS] and [SEP]."""
    return np.array(
        [first[0][1] - first[0][0] + (second[0][1] - second[0][0] + 3 if second else 2)
         for first, second in examples]
    )  # fmt: skip


@pytest.mark.parametrize("short", [10, 40])
def test_the_lengths_of_short_rows_are_uniform_and_as_many_as_asked(short: float) -> None:
    length = sizes(list(packed([1_000_000], [1], 128, random.Random(0), short)))[:-1]
    some = length[length < 128]
    expected = short * 123 / 124  # a length drawn from 5 to 128 can be the full one
    assert abs(100 * len(some) / len(length) - expected) < 1.5
    assert set(some) >= set(range(6, 128))
    assert abs(np.mean(some) - 66) < 4
    assert abs(np.std(some) - 122 / 12**0.5) < 2
    first, second = np.array_split(length < 128, 2)  # everywhere in the text, not at its end
    assert abs(first.mean() - second.mean()) < 0.03


def test_without_short_rows_the_rows_are_those_from_before_there_were_any() -> None:
    """Digest of what the builder gave before it knew short rows."""
    draw = random.Random(1)
    lengths = [draw.randint(0, 60) for _ in range(1000)]
    ends = [*range(7, 1000, 7), 1000]
    rows = list(packed(lengths, ends, 64, random.Random(3), 0))
    assert hashlib.sha256(repr(rows).encode()).hexdigest()[:16] == "9cd5865b1b4b8bc8"
    assert rows != list(packed(lengths, ends, 64, random.Random(3)))


# ---------------------------------------------------------------- prepare


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(ORACLE / "builder_vocab.txt")


def make_text(directory: Path, *, files: int = 3, documents: int = 60, seed: int = 0) -> Path:
    """Files of several formats with sentences that the small vocabulary knows."""
    rng = random.Random(seed)
    sentences = [line for line in (ORACLE / "builder_text.txt").read_text().split("\n") if line]
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        groups = [rng.choices(sentences, k=rng.randint(1, 12)) for _ in range(documents)]
        if number == 1:
            rows = [json.dumps({"text": "\n".join(group)}) for group in groups]
            (directory / f"{number}.jsonl").write_text("\n".join(rows))
        else:
            text = "\n\n".join("\n".join(group) for group in groups)
            (directory / f"{number}.txt").write_text(text)
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


def decode(tokenizer: Tokenizer, examples: Examples) -> list[int]:
    """The text tokens of all examples in order, without [CLS] and [SEP]."""
    tokens = examples.read_all().tolist()
    return [token for token in tokens if token not in (tokenizer.cls_id, tokenizer.sep_id)]


@pytest.mark.parametrize("builder", ["packed", "segments"])
def test_prepare_writes_what_the_reader_reads(
    tmp_path: Path, tokenizer: Tokenizer, builder
) -> None:
    text = make_text(tmp_path / "text")
    manifest = prepare(
        [text],
        tokenizer,
        tmp_path / "corpus",
        sequence_length=64,
        builder=builder,
        held_out_percent=10,
        workers=1,
        shard_bytes=20_000,
    )
    assert (
        sorted(path.name for path in (tmp_path / "corpus").iterdir())[-1]
        == "train-00002.tokens.bin"
    )
    corpus = Corpus.open(tmp_path / "corpus")
    assert corpus.manifest == manifest
    assert Tokenizer.load(corpus.tokenizer_dir).hash == corpus.tokenizer_hash == tokenizer.hash
    assert (corpus.sequence_length, corpus.vocab_size) == (64, tokenizer.vocab_size)
    assert corpus.special_ids == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    assert manifest.text["documents"] == 180
    assert sum(manifest.counts(part).documents for part in ("train", "held-out")) == 180
    assert 8 <= manifest.counts("held-out").documents <= 30
    for part, examples in (("train", corpus.train), ("held-out", corpus.held_out)):
        counts = manifest.counts(part)
        assert len(examples) == counts.examples == len(examples.offsets) - 1
        ids, segment, lengths = examples.gather(np.arange(len(examples)))
        assert ids.shape == segment.shape == (len(examples), 64)
        assert (ids.dtype, segment.dtype, lengths.dtype) == (np.int32,) * 3
        flat = examples.read_all()
        assert flat.dtype == examples.tokens_dtype == np.uint16
        assert int(lengths.sum()) == counts.stored == len(flat)
        for row in range(len(examples)):
            size, split = int(examples.lengths[row]), int(examples.splits[row])
            stored = flat[examples.offsets[row] : examples.offsets[row + 1]].tolist()
            assert ids[row].tolist() == stored + [0] * (64 - size)
            assert segment[row].tolist() == [0] * split + [1] * (size - split) + [0] * (64 - size)
            assert (stored[0], stored[-1], stored[split - 1]) == (2, 3, 3)
        kept = len(decode(tokenizer, examples))
        assert kept == counts.tokens - counts.thrown_away
        assert (counts.thrown_away == 0) == (builder == "packed")
        slots = 64 * len(examples)
        assert manifest.padding_share(part) == pytest.approx(1 - counts.stored / slots)
    summary = manifest.summary()
    assert f"{len(corpus.train):,} examples" in summary
    assert "180 documents" in summary


def test_packed_examples_hold_the_text_in_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = make_text(tmp_path / "text", files=1)
    prepare([text], tokenizer, tmp_path / "c", workers=1, held_out_percent=0, shard_bytes=5000)
    lines = [line for line in (text / "0.txt").read_text().split("\n") if line]
    encodings = tokenizer.backend.encode_batch(lines, add_special_tokens=False)
    expected = [token for encoding in encodings for token in encoding.ids]
    corpus = Corpus.open(tmp_path / "c")
    assert decode(tokenizer, corpus.train) == expected
    assert len(corpus.held_out) == 0
    assert corpus.held_out.read_all().shape == (0,)
    assert len(list((tmp_path / "c").glob("train-*.tokens.bin"))) > 2


def test_gather_takes_rows_in_any_order_across_shards(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = make_text(tmp_path / "text")
    prepare([text], tokenizer, tmp_path / "c", workers=1, sequence_length=32, shard_bytes=5000)
    train = Corpus.open(tmp_path / "c").train
    every = train.gather(np.arange(len(train)))
    rows = np.random.default_rng(0).integers(0, len(train), 500)
    for some, all_rows in zip(train.gather(rows), every, strict=True):
        assert np.array_equal(some, all_rows[rows])


def test_every_piece_has_its_own_random_choices(tmp_path: Path, tokenizer: Tokenizer) -> None:
    document = " ".join(["the old light at the end"] * 400)
    (tmp_path / "a.txt").write_text("\n\n".join([document] * 2))
    size = len(document)
    prepare(
        [tmp_path / "a.txt"],
        tokenizer,
        tmp_path / "c",
        workers=1,
        held_out_percent=0,
        short_percent=0,
        shard_bytes=size,
    )
    train = Corpus.open(tmp_path / "c").train
    first, second = np.split(train.splits, 2)
    assert np.array_equal(*np.split(train.read_all()[train.offsets[:-1]], 2))
    assert not np.array_equal(first, second)


def test_any_number_of_workers_and_any_order_give_the_same_bytes(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    text = make_text(tmp_path / "text")
    inputs = sorted(text.iterdir())
    results = []
    for workers, order in (
        *((1, inputs), (2, inputs[::-1])),
        *((4, [text, *inputs[1:]]), (8, inputs[1:] + inputs[:1])),
    ):
        out = tmp_path / f"workers-{workers}"
        prepare(order, tokenizer, out, workers=workers, sequence_length=32, shard_bytes=6000)
        results.append(content(out))
    assert results == [results[0]] * 4
    assert len(results[0]) > 10
    lengths = Corpus.open(tmp_path / "workers-2").train.lengths
    assert 0.05 < np.mean(lengths < 32) < 0.2  # short rows, and the last one of each piece


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_digest_of_the_inputs_is_that_of_their_json(tmp_path: Path, count: int) -> None:
    """Unfinished corpora of before have it; there are too many files to hold all of it."""
    paths = [tmp_path / f'{i}"ü.txt' for i in range(count)]
    for i, path in enumerate(paths):
        path.write_text("x" * i)
    rows = [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in paths]
    described = electra.data.corpus._describe(list(paths))
    assert described["identity"] == json_sha256(rows)
    assert (described["count"], described["bytes"]) == (count, sum(range(count)))
    assert described["files"] == [{"path": path, "size": size} for path, size, _ in rows]


def test_the_fingerprint_is_of_the_content(tmp_path: Path, tokenizer: Tokenizer) -> None:
    def fingerprint(name: str, text: Path, **settings) -> str:
        return prepare([text], tokenizer, tmp_path / name, workers=1, **settings).fingerprint

    a, b = make_text(tmp_path / "a"), make_text(tmp_path / "b")
    other = make_text(tmp_path / "other", seed=1)
    same = fingerprint("1", a)
    assert fingerprint("2", b) == same
    changes = [fingerprint("3", a, seed=1), fingerprint("4", a, sequence_length=64)]
    changes += [fingerprint("5", other), fingerprint("6", a, builder="segments")]
    changes += [fingerprint("7", a, short_percent=0), fingerprint("8", a, short_percent=20)]
    assert len({same, *changes}) == 7
    assert fingerprint("9", a, short_percent=10) == same
    released = fingerprint("10", a, builder="segments", short_percent=5)
    assert released == changes[3] != fingerprint("11", a, builder="segments", short_percent=40)


def test_a_vocabulary_over_65536_is_stored_in_four_bytes(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(70_000)]
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL_TOKENS, *words]))
    (tmp_path / "a.txt").write_text("\n\n".join(["w0 w1", "w69999 w65530 w5", "w3"]))
    tokenizer = Tokenizer.load(tmp_path / "vocab.txt")
    prepare([tmp_path / "a.txt"], tokenizer, tmp_path / "c", workers=1)
    corpus = Corpus.open(tmp_path / "c")
    assert corpus.train.tokens_dtype == np.uint32
    assert decode(tokenizer, corpus.train) == [5, 6, 8]
    assert corpus.held_out.gather(np.array([0]))[0][0, :7].tolist().count(70_004) == 1


# ---------------------------------------------------------------- short rows in training


@pytest.mark.parametrize("short", [0, 0.5, 30])
def test_short_rows_are_counted_as_padding_and_trained_on(
    tmp_path: Path, micro: PretrainConfig, short: float
) -> None:
    text = make_text(tmp_path / "text", documents=200)
    command = f"prepare --input {text} --tokenizer {ORACLE / 'builder_vocab.txt'} --workers 1"
    flags = f"--out {tmp_path / 'c'} --length 23 --short-percent {short}"
    assert run([*command.split(), *flags.split()]) == 0
    corpus = Corpus.open(tmp_path / "c")
    train, padding = corpus.train, corpus.manifest.padding_share("train")
    assert corpus.manifest.settings["short_percent"] == short
    assert f"{padding:.1%} padding" in corpus.manifest.summary()
    assert padding == pytest.approx(short / 100 * (23 - 14) / 23, abs=0.02)
    batches = Batches(train, micro, RUNTIME)
    assert batches.padded == (short > 0)
    seen = batches.block(0, len(train) // 8).length.flatten().numpy()
    # All rows but those that fill no batch; without short rows the last of each piece sits out.
    assert abs((seen < 23).sum() - (train.lengths < 23).sum() * (short > 0)) < 8


def test_nothing_behind_the_end_of_a_short_row_matters(
    tmp_path: Path, tokenizer: Tokenizer, micro: PretrainConfig
) -> None:
    text = make_text(tmp_path / "text")
    prepare([text], tokenizer, tmp_path / "c", workers=1, sequence_length=23, short_percent=50)
    corpus = Corpus.open(tmp_path / "c")
    batches = Batches(corpus.train, micro, RUNTIME)
    block = batches.block(0, 1)
    assert (block.length < 23).any()
    special = SpecialIds(**corpus.special_ids)
    objective = build_objective(micro, corpus.vocab_size, special, padded=batches.padded)
    behind = torch.arange(23) >= block.length
    other = block._replace(x=block.x.masked_fill(behind, 7))
    zero = torch.tensor(0)
    results = [
        objective(some.batch(zero, slice(None), micro), StepRng(0, zero, torch.arange(8)))
        for some in (block, other)
    ]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------- what is held out


@pytest.mark.parametrize(
    ("text", "train", "held_out"),
    [
        ("the old\n\nlight", "the old", "light"),
        ("the old\nlight\nat\nend", "the old light at", "end"),
        ("the\n\nold\n\nlight", "the light", "old"),
    ],
)
def test_small_texts_still_hold_something_out(
    tmp_path: Path, tokenizer: Tokenizer, text: str, train: str, held_out: str
) -> None:
    (tmp_path / "a.txt").write_text(text)
    prepare([tmp_path / "a.txt"], tokenizer, tmp_path / "c", workers=1)
    corpus = Corpus.open(tmp_path / "c")
    for examples, expected in ((corpus.train, train), (corpus.held_out, held_out)):
        assert tokenizer.decode_tokens(decode(tokenizer, examples)) == expected.split()


def test_a_single_line_cannot_be_divided(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("the old light")
    with pytest.raises(ElectraError, match="single line") as caught:
        prepare([tmp_path / "a.txt"], tokenizer, tmp_path / "c", workers=1)
    assert "line 1" in caught.value.where
    prepare([tmp_path / "a.txt"], tokenizer, tmp_path / "d", workers=1, held_out_percent=0)


def test_the_share_that_is_held_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(["the old light"] * 5000))
    manifest = prepare(
        [tmp_path / "a.txt"], tokenizer, tmp_path / "c", workers=1, held_out_percent=5
    )
    assert 200 < manifest.counts("held-out").documents < 300


# ---------------------------------------------------------------- interruptions

PREPARE = """
import sys
from pathlib import Path
from electra.data.corpus import prepare
from electra.data.tokenizer import Tokenizer
text, vocabulary, out, workers = sys.argv[1:]
if __name__ == "__main__":
    prepare([text], Tokenizer.load(vocabulary), Path(out), workers=int(workers),
            sequence_length=32, shard_bytes=6000)
"""


def command(tmp_path: Path, text: Path, out: Path, workers: int) -> list[str]:
    script = tmp_path / "prepare.py"
    script.write_text(PREPARE)
    return [sys.executable, str(script), str(text), str(ORACLE / "builder_vocab.txt"), str(out),
            str(workers)]  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_prepare_goes_on_to_the_same_bytes(
    tmp_path: Path, tokenizer: Tokenizer, workers: int
) -> None:
    text = make_text(tmp_path / "text", documents=400)
    prepare([text], tokenizer, tmp_path / "whole", workers=1, sequence_length=32, shard_bytes=6000)
    out = tmp_path / "killed"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    finished_shards = list[int]()
    for wanted in (1, 8, 20):
        process = subprocess.Popen(command(tmp_path, text, out, workers), env=environment)
        while process.poll() is None and len(list(out.glob("train-*.tokens.bin"))) < wanted:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (out / "progress.json").exists():
            finished_shards.append(len(json.loads((out / "progress.json").read_bytes())["shards"]))
    assert finished_shards, "the process was never caught half way"
    assert finished_shards == sorted(finished_shards)
    subprocess.run(command(tmp_path, text, out, workers), env=environment, check=True)
    assert content(out) == content(tmp_path / "whole")


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    import psutil

    text = make_text(tmp_path / "text", documents=3000)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command(tmp_path, text, tmp_path / "out", 2), env=environment)
    parent = psutil.Process(process.pid)
    while process.poll() is None and not list((tmp_path / "out").glob("train-*.tokens.bin")):
        time.sleep(0.005)
    children = parent.children(recursive=True)
    process.kill()
    process.wait()
    assert len(children) >= 2
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


@pytest.mark.parametrize("workers", [1, 2])
def test_a_request_to_stop_keeps_full_shards(
    tmp_path: Path, tokenizer: Tokenizer, workers: int
) -> None:
    text = make_text(tmp_path / "text")
    settings = {"workers": workers, "sequence_length": 32, "shard_bytes": 6000}
    out = tmp_path / "stopped"
    seen = list[str]()
    with pytest.raises(Stopped):
        prepare(
            [text],
            tokenizer,
            out,
            progress=seen.append,
            should_stop=lambda: len(seen) >= 3,
            **settings,
        )
    assert "documents" in seen[0]
    assert "tokens" in seen[0]
    assert len(json.loads((out / "progress.json").read_bytes())["shards"]) >= 3
    with pytest.raises(ElectraError, match="not complete"):
        Corpus.open(out)
    prepare([text], tokenizer, out, **settings)
    prepare([text], tokenizer, tmp_path / "whole", **settings)
    assert content(out) == content(tmp_path / "whole")


def test_finished_shards_are_not_encoded_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = make_text(tmp_path / "text")
    seen = list[str]()
    settings = {"workers": 1, "shard_bytes": 6000, "progress": seen.append}
    with pytest.raises(Stopped):
        prepare([text], tokenizer, tmp_path / "c", should_stop=lambda: len(seen) == 4, **settings)
    prepare([text], tokenizer, tmp_path / "c", **settings)
    resumed = len(seen) - 4
    prepare([text], tokenizer, tmp_path / "whole", **settings)
    assert resumed == len(seen) - 4 - resumed - 4
    seen.clear()
    prepare([text], tokenizer, tmp_path / "c", **settings)
    assert seen == []


def test_changed_settings_or_inputs_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = make_text(tmp_path / "text")
    out, unfinished = tmp_path / "complete", tmp_path / "unfinished"
    prepare([text], tokenizer, out, workers=1)
    with pytest.raises(Stopped):
        prepare([text], tokenizer, unfinished, workers=1, should_stop=lambda: True)
    cased = Tokenizer.load(ORACLE / "builder_vocab.txt", lowercase=False)
    for directory in (out, unfinished):
        with pytest.raises(ElectraError, match="sequence_length was 128 and is now 64"):
            prepare([text], tokenizer, directory, sequence_length=64)
        with pytest.raises(ElectraError, match=r"short_percent was 10\.0 and is now 20\.0"):
            prepare([text], tokenizer, directory, short_percent=20)
        with pytest.raises(ElectraError, match="tokenizer is another"):
            prepare([text], cased, directory)
        with pytest.raises(ElectraError, match="input files are others") as caught:
            prepare([text / "0.txt"], tokenizer, directory)
        assert "another --out" in caught.value.fix
    (text / "0.txt").write_text("the old light")
    with pytest.raises(ElectraError, match="input files are others"):
        prepare([text], tokenizer, unfinished, workers=1)


def test_directories_that_are_not_ours(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = make_text(tmp_path / "text")
    with pytest.raises(ElectraError, match="not empty and holds no corpus"):
        prepare([text], tokenizer, text)
    with pytest.raises(ElectraError, match="file in the way"):
        prepare([text], tokenizer, text / "0.txt")
    with exclusive(tmp_path / "busy"), pytest.raises(ElectraError, match="Another process"):
        prepare([text], tokenizer, tmp_path / "busy")
    with pytest.raises(ElectraError, match="no corpus here"):
        Corpus.open(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"sequence_length": 4},
        {"sequence_length": 65_536},
        {"builder": "other"},
        {"short_percent": -1},
        {"short_percent": 101},
        {"short_percent": float("nan")},
        {"held_out_percent": -1},
        {"held_out_percent": 51},
        {"shard_bytes": 0},
        {"workers": 0},
    ],
)
def test_wrong_settings(tmp_path: Path, tokenizer: Tokenizer, settings) -> None:
    with pytest.raises(ElectraError) as caught:
        prepare([make_text(tmp_path / "text")], tokenizer, tmp_path / "c", **settings)
    assert caught.value.where in settings
    assert not (tmp_path / "c").exists()


def test_a_cluster_without_ray_names_the_extra(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    text = make_text(tmp_path / "text", documents=5)
    with pytest.raises(ElectraError, match="not installed") as caught:
        prepare([text], tokenizer, tmp_path / "c", cluster="127.0.0.1:6379")
    assert "electra[ray]" in caught.value.fix
    prepare([text], tokenizer, tmp_path / "c", workers=1)  # what was begun is no hindrance


@pytest.mark.parametrize("address", ["local", "auto", "", "ray://127.0.0.1:10001", "host", "a b:1"])
def test_a_cluster_is_never_started_by_its_name(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))  # any use of it would fail
    text = make_text(tmp_path / "text", documents=5)
    with pytest.raises(ElectraError, match="no address") as caught:
        prepare([text], tokenizer, tmp_path / "c", cluster=address)
    assert "host:port" in caught.value.fix


def test_bad_text_leaves_no_half_shard(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = make_text(tmp_path / "text")
    (text / "9.txt").write_bytes(b"the old\n\xff")
    with pytest.raises(ElectraError, match="UTF-8"):
        prepare([text], tokenizer, tmp_path / "c", workers=2)
    assert not list((tmp_path / "c").glob("*.bin*"))
    assert not list((tmp_path / "c").glob(".*.tmp"))


def test_text_without_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("\x01\x02\n\n\x03\n")
    with pytest.raises(ElectraError, match="no example"):
        prepare([tmp_path / "a.txt"], tokenizer, tmp_path / "c", workers=1)


# ---------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    directory = tmp_path_factory.mktemp("prepared")
    text = make_text(directory / "text")
    prepare([text], tokenizer, directory / "c", workers=1, shard_bytes=20_000)
    return directory / "c"


@pytest.fixture
def copy(prepared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(prepared, tmp_path / "copy")


def corrupt_names(path: Path) -> str:
    with pytest.raises(CorruptError) as caught:
        Corpus.open(path)
    assert caught.value.exit_code == 3
    return caught.value.where


def test_one_flipped_byte_anywhere_is_found(copy: Path) -> None:
    rng = random.Random(0)
    files = [*copy.glob("*.bin"), *(copy / "tokenizer").iterdir()]
    for _ in range(100):
        path = rng.choice(files)
        original = path.read_bytes()
        damaged = bytearray(original)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        assert corrupt_names(copy) == str(path)
        path.write_bytes(original)
    Corpus.open(copy)


def open_and_check(path: Path) -> Corpus:
    corpus = Corpus.open(path, defer=True)
    for file in corpus.unchecked:
        corpus.check(file)
    return corpus


def test_what_is_deferred_is_the_content_of_the_tokens_alone(copy: Path) -> None:
    assert Corpus.open(copy).unchecked == ()
    for path in [*copy.glob("*.bin"), *(copy / "tokenizer").iterdir()]:
        original = path.read_bytes()
        path.write_bytes(bytes([original[0] ^ 1]) + original[1:])
        if ".tokens." in path.name:
            Corpus.open(copy, defer=True)
        else:
            with pytest.raises(CorruptError, match="checksum is wrong"):
                Corpus.open(copy, defer=True)
        with pytest.raises(CorruptError, match="checksum is wrong") as caught:
            open_and_check(copy)
        assert caught.value.where == str(path)
        path.unlink()
        with pytest.raises(CorruptError, match="missing"):
            Corpus.open(copy, defer=True)
        path.write_bytes(original)
    unchecked = {file.name for file in open_and_check(copy).unchecked}
    assert unchecked == {path.name for path in copy.glob("*.tokens.bin")}


@pytest.mark.parametrize("damage", ["truncate", "grow", "remove"])
def test_wrong_sizes_are_found_without_reading(copy: Path, damage: str) -> None:
    for path in (copy / "train-00000.tokens.bin", copy / "held-out-00000.examples.bin"):
        original = path.read_bytes()
        if damage == "remove":
            path.unlink()
        else:
            path.write_bytes(original[:-1] if damage == "truncate" else original + b"x")
        with pytest.raises(CorruptError):
            Corpus.open(copy, verify=False)
        assert corrupt_names(copy) == str(path)
        path.write_bytes(original)


def test_swapped_shards_are_found(copy: Path) -> None:
    first, second = copy / "train-00000.tokens.bin", copy / "train-00001.tokens.bin"
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    assert corrupt_names(copy) == str(first)


def change_manifest(path: Path, change) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())
    change(manifest)
    (path / "manifest.json").write_bytes(json_bytes(manifest))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("shards"),
        lambda m: m.update(format=99),
        lambda m: m.update(fingerprint="0" * 64),
        lambda m: m.update(checksum="0" * 64),
        lambda m: m["special_ids"].update(pad=1),
        lambda m: m["settings"].update(sequence_length=64),
        lambda m: m["shards"][0]["tokens"].update(xxh3="0" * 32),
        lambda m: m["shards"][0].update(part="other"),
        lambda m: m["shards"].reverse(),
        lambda m: m.update(tokenizer_hash="0" * 64),
        lambda m: m.update(shards=3),
    ],
)
def test_a_changed_manifest_is_not_trusted(copy: Path, change) -> None:
    change_manifest(copy, change)
    assert corrupt_names(copy) == str(copy / "manifest.json")


def test_a_manifest_that_is_no_json(copy: Path) -> None:
    (copy / "manifest.json").write_bytes(b"{")
    assert corrupt_names(copy) == str(copy / "manifest.json")


def test_file_names_cannot_lead_elsewhere(copy: Path) -> None:
    (copy.parent / "outside").write_bytes(b"x")
    manifest = Manifest.from_dict(json.loads((copy / "manifest.json").read_bytes()))
    file = replace(manifest.tokenizer_files[0], name="../../outside")
    manifest = replace(manifest, tokenizer_files=(file,))
    (copy / "manifest.json").write_bytes(json_bytes(manifest.to_dict()))
    with pytest.raises(CorruptError, match="plain file name"):
        Corpus.open(copy)


def test_examples_that_do_not_fit_the_tokens(copy: Path) -> None:
    """Every checksum is right, but the table is not the one of these tokens."""
    path = copy / "train-00000.examples.bin"
    table = np.fromfile(path, "<u2")
    table[0] -= 1
    path.write_bytes(table.tobytes())
    manifest = Manifest.from_dict(json.loads((copy / "manifest.json").read_bytes()))
    shard = manifest.shards[0]
    shard = replace(shard, examples=replace(shard.examples, xxh3=xxh3_file(path)))
    manifest = replace(manifest, shards=(shard, *manifest.shards[1:]))
    (copy / "manifest.json").write_bytes(json_bytes(manifest.to_dict()))
    with pytest.raises(CorruptError, match="do not fit"):
        Corpus.open(copy)


def test_a_damaged_finished_shard_is_found_on_resume(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text, out = make_text(tmp_path / "text"), tmp_path / "c"
    seen = list[str]()
    settings = {"workers": 1, "shard_bytes": 6000}
    with pytest.raises(Stopped):
        prepare(
            [text],
            tokenizer,
            out,
            progress=seen.append,
            should_stop=lambda: len(seen) == 3,
            **settings,
        )
    path = out / "train-00000.tokens.bin"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="checksum") as caught:
        prepare([text], tokenizer, out, **settings)
    assert caught.value.where == str(path)
    (out / "progress.json").write_bytes(b"[]")
    with pytest.raises(CorruptError, match="cannot be read"):
        prepare([text], tokenizer, out, **settings)


# ---------------------------------------------------------------- memory


def test_memory_is_flat_in_the_size_of_the_text(tmp_path: Path) -> None:
    code = PREPARE.replace("sequence_length=32, shard_bytes=6000", "shard_bytes=4 << 20") + (
        "    import re\n"
        "    status = Path('/proc/self/status').read_text()\n"
        "    print(int(re.search(r'VmHWM:\\s+(\\d+)', status)[1]) // 1024)\n"
    )
    peaks = list[int]()
    for megabytes in (10, 60):
        rng = random.Random(0)
        with (tmp_path / "a.txt").open("w") as file:
            for _ in range(megabytes * 10):
                words = [f"{rng.getrandbits(20):x}" for _ in range(500)]
                file.write("\n".join(" ".join(rng.choices(words, k=20)) for _ in range(850)))
                file.write("\n\n")
        assert abs((tmp_path / "a.txt").stat().st_size / 1e6 / megabytes - 1) < 0.2
        (tmp_path / "script.py").write_text(code)
        arguments = [tmp_path / "a.txt", ORACLE / "builder_vocab.txt", tmp_path / str(megabytes), 1]
        printed = subprocess.run(
            [sys.executable, str(tmp_path / "script.py"), *map(str, arguments)],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ).stdout
        peaks.append(int(printed))
    assert peaks[1] < peaks[0] + 100
    assert peaks[1] < 300
