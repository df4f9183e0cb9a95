"""Examples that share rows are treated as each would be alone: same losses, same gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import SPECIAL, T, V, batch_of, built, gradients, rng, runtime, settings
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from electra.batches import Batches
from electra.checkpoint import load_newest
from electra.config import ObjectiveConfig, PretrainConfig
from electra.corruption import Positions, choose_positions, lay_out, num_masked
from electra.data.corpus import Corpus, prepare
from electra.data.tokenizer import Tokenizer
from electra.errors import ElectraError
from electra.objectives import Batch
from electra.packing import Packing
from electra.pretrain import pretrain

PARTS = ((9, 6, 4), (19, 0, 0), (11, 7, 0), (3, 3, 3))  # of rows of T = 19, the last one padded
LENGTHS = tuple(n for row in PARTS for n in row if n)


# ---------------------------------------------------------------------- the rows


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=200),
    tokens=st.integers(40, 60),
    most=st.integers(1, 9),
)
def test_rows_hold_every_example_once_and_no_more_than_fits(
    lengths: list[int], tokens: int, most: int
) -> None:
    size = np.array(lengths, np.uint16)
    packing = Packing(size, tokens, most)
    rows = packing.examples(np.arange(len(packing)))
    assert rows.shape == (len(packing), most)
    assert sorted(rows[rows >= 0].tolist()) == list(range(len(lengths)))
    assert (np.where(rows >= 0, size[rows], 0).sum(1) <= tokens).all()
    assert (rows[:, 0] >= 0).all()
    assert (np.diff((rows >= 0).astype(int), axis=1) <= 0).all()  # what is empty comes last
    any_shape = np.arange(len(packing))[::-1].reshape(1, -1, 1)
    assert np.array_equal(packing.examples(any_shape)[0, :, 0], rows[::-1])


def padding(lengths: np.ndarray, tokens: int, most: int) -> float:
    return 1 - int(lengths.sum()) / (len(Packing(lengths, tokens, most)) * tokens)


@pytest.mark.parametrize("tokens", [128, 512])
def test_hardly_any_padding_is_left(tokens: int) -> None:
    draw = np.random.default_rng(0)
    some = draw.integers(5, tokens + 1, 100_000)
    lengths = np.where(draw.random(100_000) < 0.2, some, tokens)  # --short-percent 20
    assert padding(lengths, tokens, 1) > 0.09
    assert padding(lengths, tokens, 2) < 0.005
    documents = np.minimum(draw.lognormal(4, 1, 100_000).astype(int) + 5, tokens)  # mean 68 or 90
    assert padding(documents, tokens, 1) > 0.4
    assert padding(documents, tokens, tokens // 16) < 0.01


# ---------------------------------------------------------------------- the batches


@pytest.fixture(scope="module")
def short(text: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    out = tmp_path_factory.mktemp("short")
    prepare([text], tokenizer, out, sequence_length=23, short_percent=60, workers=1)
    return Corpus.open(out)


def packed(config: PretrainConfig, most: int = 3, **changes: Any) -> PretrainConfig:
    return replace(config, data=replace(config.data, examples_per_row=most, **changes))


def test_an_epoch_has_every_example_whole_and_once(micro: PretrainConfig, short: Corpus) -> None:
    batches = Batches(short.train, packed(micro, batch_size=1), runtime())
    rows = len(Packing(short.train.lengths, 23, 3))
    block = batches.block(rows, rows)  # the second epoch
    seen = []
    fields = (block.x[:, 0], block.segment[:, 0], block.length[:, 0])
    for x, segment, lengths in zip(*fields, strict=True):
        end = 0
        for n in lengths.tolist():
            example = (x[end : end + n].tolist(), segment[end : end + n].tolist())
            seen += [example] if n else []
            end += n
        assert (x[end:] == SPECIAL.pad).all()
        assert not segment[end:].any()
    assert sum(lengths.count_nonzero().item() > 1 for lengths in block.length) > rows / 5
    ids, segment, length = short.train.gather(np.arange(len(short.train)))
    every = zip(ids.tolist(), segment.tolist(), length.tolist(), strict=True)
    assert sorted(seen) == sorted((x[:n], s[:n]) for x, s, n in every)


def test_blocks_processes_and_the_resident_tokens_give_the_same_rows(
    micro: PretrainConfig, short: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = packed(micro)
    whole = Batches(short.train, config, runtime()).block(40, 4)
    later = Batches(short.train, config, runtime()).block(42, 2)  # as after a resume
    assert all(torch.equal(a[2:], b) for a, b in zip(whole, later, strict=True))
    halves = [Batches(short.train, config, runtime(r, 2)).block(40, 4) for r in range(2)]
    for field in ("x", "segment", "length"):
        both = torch.cat([getattr(half, field) for half in halves], dim=1)
        assert torch.equal(both, getattr(whole, field))
    assert all(torch.equal(half.all_lengths, whole.length) for half in halves)
    monkeypatch.setattr(Batches, "_keep_on_device", Mock(return_value=True))
    resident = Batches(short.train, config, runtime()).block(40, 4)
    assert all(torch.equal(a, b) for a, b in zip(whole, resident, strict=True))
    batch = whole.batch(torch.tensor(1), slice(2, 5), config)
    assert batch.parts is not None
    assert torch.equal(batch.parts, whole.length[1, 2:5])
    assert torch.equal(batch.length, batch.parts.sum(1))
    assert float(batch.tokens) == int(whole.length[1].sum())
    assert float(batch.masked) == sum(-(-15 * n // 100) for n in whole.length[1].flatten().tolist())


def test_more_examples_than_fit_take_no_room(micro: PretrainConfig, short: Corpus) -> None:
    config = packed(micro, most=10**12)
    block = Batches(short.train, config, runtime()).block(0, 1)
    assert block.length.shape[-1] == config.data.sequence_length


def test_full_rows_stay_as_they_are(micro: PretrainConfig, corpus: Corpus) -> None:
    pair = [Batches(corpus.train, c, runtime()).block(0, 3) for c in (micro, packed(micro))]
    assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))


def test_a_run_on_packed_rows_resumes_and_splits_exactly(
    micro: PretrainConfig, short: Corpus, tmp_path: Path
) -> None:
    config = packed(replace(micro, run=replace(micro.run, train_steps=6)))
    half = replace(config, run=replace(config.run, train_steps=3))
    # The schedule must not know where the first half ends.
    constant = {"warmup_percent": None, "warmup_steps": 100}
    config, half = (replace(c, optim=replace(c.optim, **constant)) for c in (config, half))
    pretrain(config, short, tmp_path / "whole", quiet=True)
    pretrain(half, short, tmp_path / "halves", quiet=True)
    pretrain(config, short, tmp_path / "halves", quiet=True)
    parts = replace(config, data=replace(config.data, micro_batch=3))
    pretrain(parts, short, tmp_path / "parts", quiet=True)
    models = {}
    for name in ("whole", "halves", "parts"):
        saved = load_newest(tmp_path / name / "checkpoints", warn=pytest.fail)
        assert saved is not None
        models[name] = saved.tensors["model"]
    for name, weight in models["whole"].items():
        assert torch.equal(models["halves"][name], weight), name
        torch.testing.assert_close(models["parts"][name], weight, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------- the mathematics


def pack(padded: Batch, parts: tuple[tuple[int, ...], ...] = PARTS) -> Batch:
    """The rows of a padded batch, several in one."""
    x = torch.full((len(parts), T), SPECIAL.pad)
    segment = torch.zeros_like(x)
    example = 0
    for row, lengths in enumerate(parts):
        end = 0
        for n in (n for n in lengths if n):
            x[row, end : end + n] = padded.x[example, :n]
            segment[row, end : end + n] = padded.segment[example, :n]
            example, end = example + 1, end + n
    size = torch.tensor(parts)
    return padded._replace(x=x, segment=segment, length=size.sum(1), parts=size)


def unpack(m: Positions, parts: tuple[tuple[int, ...], ...] = PARTS) -> Positions:
    """The positions m of packed rows, as those of the padded examples."""
    chosen: list[list[int]] = []
    for at, valid, lengths in zip(m.at, m.valid, parts, strict=True):
        end = 0
        for n in (n for n in lengths if n):
            chosen.append([t - end for t in at[valid].tolist() if end <= t < end + n])
            end += n
    most = max(map(len, chosen))
    at = torch.tensor([row + [0] * (most - len(row)) for row in chosen])
    return Positions(at, torch.arange(most) < torch.tensor([[len(row)] for row in chosen]))


def losses_and_gradients(
    config: PretrainConfig, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> list[tuple[Any, dict[str, Tensor]]]:
    """Of the same examples packed and padded, with the same masks and samples."""
    torch.set_default_dtype(dtype)
    objective = built(config).to(dtype)
    for parameter in objective.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(3))
    padded = batch_of(config, LENGTHS)
    rows = pack(padded)
    draws: dict[Any, Positions] = {}

    def choose(batch: Batch, rng: Any, purpose: Any = None, *, besides: Any = None) -> Positions:
        if batch.parts is not None:
            draws[purpose] = type(objective).choose(
                objective, batch, rng, *([purpose] if purpose else []), besides=besides
            )
            return draws[purpose]
        return unpack(draws[purpose])

    def sample(_: Tensor, m: Positions, batch: Batch, *__: Any) -> Tensor:
        original = batch.x.gather(1, m.at)
        return torch.where(original % 3 == 0, original, 5 + original * 7 % (V - 5))

    monkeypatch.setattr(objective, "choose", choose)
    if config.objective.kind != "mlm":
        monkeypatch.setattr(objective, "sample", sample)
    results = []
    for batch in (rows, padded):
        losses = objective(batch, rng(len(batch.x)))
        results.append((losses, gradients(objective, losses.total)))
    return results


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"objective_kind": "mlm"},
        {"objective_kind": "replace_mlm"},
        {"objective_kind": "all_tokens_mlm"},
        {"objective_algorithm": "adversarial"},
        {"objective_disc_positions": "other", "objective_mask_percent": 20.0},
        {"objective_mask_positions": "with_replacement", "objective_mask_count": "round"},
        {"generator_sharing": "disentangled"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "rtd",
)
def test_packed_examples_have_the_losses_and_gradients_of_padded_ones(
    changes: dict[str, Any],
    dtype: torch.dtype,
    close: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = settings(data_examples_per_row=3, **changes)
    (a, grads), (b, expected) = losses_and_gradients(config, monkeypatch, dtype)
    for name, got, right in zip(a._fields, a, b, strict=True):
        assert got.item() == pytest.approx(right.item(), rel=close), name
    assert a.total > 0
    for name, right in expected.items():
        scale = right.abs().max().clamp(min=1e-3)
        assert (grads[name] - right).abs().max() <= 10 * close * scale, name


def test_no_token_sees_another_example_or_the_padding() -> None:
    config = settings(encoder_init="paper")
    objective = built(config)
    rows = pack(batch_of(config, LENGTHS))
    assert rows.parts is not None
    example, position = lay_out(rows.parts, T)
    assert position[0].tolist() == [*range(9), *range(6), *range(4)]
    assert position[2, 11:].tolist() == [*range(7), 0]
    before = objective.encode(objective.discriminator, rows.x, rows, rng(4), training=True)
    for number in range(4):  # 3 is the padding of those rows that have some
        other = torch.where(example == number, 77, rows.x)
        after = objective.encode(objective.discriminator, other, rows, rng(4), training=True)
        same = example != number
        assert torch.equal(after[same], before[same])
        assert (after[~same] != before[~same]).any(-1).all()


def test_attention_dropout_keeps_the_examples_apart() -> None:
    config = settings(encoder_attention_dropout=0.3)
    objective = built(config)
    rows = pack(batch_of(config, LENGTHS))
    assert rows.parts is not None
    example, _ = lay_out(rows.parts, T)
    pair = [
        objective.encode(objective.discriminator, x, rows, rng(4), training=True)
        for x in (rows.x, torch.where(example == 1, 77, rows.x))
    ]
    assert torch.equal(pair[0][example != 1], pair[1][example != 1])


# ---------------------------------------------------------------------- the masks


@given(
    parts=st.lists(st.lists(st.integers(3, 40), min_size=1, max_size=5), min_size=1, max_size=4),
    percent=st.sampled_from([1.0, 15.0, 25.0, 85.0]),
    count=st.sampled_from(["ceil", "round"]),
    positions=st.sampled_from(["distinct", "with_replacement"]),
    spare=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_every_example_has_as_many_masked_tokens_as_alone(
    parts: list[list[int]], percent: float, count: Any, positions: Any, spare: int, seed: int
) -> None:
    P, n = max(map(len, parts)), max(map(sum, parts)) + spare
    objective = ObjectiveConfig(mask_percent=percent, mask_count=count, mask_positions=positions)
    config = settings(data_sequence_length=max(8, n), encoder_max_positions=300)
    slots = replace(config, objective=objective).masked_slots
    length = torch.tensor([row + [0] * (P - len(row)) for row in parts])
    example, position = lay_out(length, config.data.sequence_length)
    candidates = (example < P) & (position > 0)
    m = choose_positions(candidates, length, slots, objective, rng(len(parts), seed=seed))
    k = num_masked(length, slots, objective)
    for row in range(len(parts)):
        at = m.at[row][m.valid[row]]
        assert candidates[row, at].all()
        owners = torch.bincount(example[row, at], minlength=P)
        expected = k[row] if positions != "distinct" else k[row].minimum(length[row] - 1).clamp(0)
        assert owners.tolist() == expected.tolist()
        if positions == "distinct":
            assert len(set(at.tolist())) == len(at)
    assert not m.at[~m.valid].any()


@pytest.mark.parametrize("positions", ["distinct", "with_replacement"])
def test_positions_are_uniform_inside_every_example(positions: Any) -> None:
    objective = ObjectiveConfig(mask_percent=20.0, mask_positions=positions)
    length = torch.tensor([[11, 0, 6]]).expand(6000, -1)
    example, position = lay_out(length, 20)
    m = choose_positions(
        (example < 3) & (position > 0), length.contiguous(), 4, objective, rng(6000)
    )
    share = torch.bincount(m.at[m.valid], minlength=20) / 6000
    assert share[[0, 11, 17, 18, 19]].tolist() == [0] * 5
    assert (share[1:11] - 3 / 10).abs().max() < 0.04
    assert (share[12:17] - 2 / 5).abs().max() < 0.04


def test_two_towers_want_rows_of_their_own() -> None:
    with pytest.raises(ElectraError, match="end to end"):
        settings(objective_kind="electric", data_examples_per_row=2)
