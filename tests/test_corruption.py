"""Masking and sampling: what is chosen, what is shown, what is written back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from electra import corruption
from electra.config import (
    DataConfig,
    EncoderConfig,
    GeneratorConfig,
    ObjectiveConfig,
    PretrainConfig,
)
from electra.corruption import (
    Positions,
    choose_positions,
    mask_tokens,
    num_masked,
    proposal_logits,
    replace,
    resolve_duplicates,
    sample,
)
from electra.objectives import Batch, ReplacedTokenDetection, SpecialIds
from electra.randomness import StepRng

PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL = SpecialIds(PAD, UNK, CLS, SEP, MASK)
B, T, V = 5, 31, 101
DISTINCT = ObjectiveConfig()
DRAWN = ObjectiveConfig(mask_count="round", mask_positions="with_replacement")

percents = st.integers(1, 99_999).map(lambda thousandths: f"{thousandths / 1000:.3f}")


def rng(seed: int = 0, rows: int = B) -> StepRng:
    return StepRng(seed, torch.tensor(3), torch.arange(rows))


def sentences(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """[CLS] words [SEP] padding, with a second [SEP] in the middle of long ones."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(5, V, (len(lengths), T), generator=draw)
    x[:, 0] = CLS
    for row, length in enumerate(lengths):
        x[row, length - 1] = SEP
        if length > 8:
            x[row, length // 2] = SEP
        x[row, length:] = PAD
    return x, torch.tensor(lengths)


def is_candidate(x: Tensor) -> Tensor:
    return (x != PAD) & (x != CLS) & (x != SEP) & (x != MASK)


def slots_of(config: ObjectiveConfig) -> int:
    data = DataConfig(sequence_length=T)
    return PretrainConfig(objective=config, data=data).masked_slots


# ---------------------------------------------------------------------- how many


@given(percent=percents, length=st.integers(0, 5000))
def test_ceil_counts_like_exact_fractions(percent: str, length: int) -> None:
    config = ObjectiveConfig(mask_percent=float(percent))
    k = num_masked(torch.tensor(length), 10**6, config)
    assert int(k) == reference.ceil_count(length, percent)


@given(percent=percents, length=st.integers(8, 5000))
def test_the_slots_of_a_full_sequence_are_its_count(percent: str, length: int) -> None:
    config = PretrainConfig(
        encoder=EncoderConfig(max_positions=length),
        objective=ObjectiveConfig(mask_percent=float(percent)),
        data=DataConfig(sequence_length=length),
    )
    assert config.masked_slots == reference.ceil_count(length, percent)


def test_seven_percent_of_a_hundred_are_seven() -> None:
    assert math.ceil(0.07 * 100) == 8  # what floating point makes of it
    assert int(num_masked(torch.tensor(100), 99, ObjectiveConfig(mask_percent=7.0))) == 7


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 1), (3, 1), (10, 2), (30, 4), (50, 8), (70, 10), (128, 19)]
)
def test_round_counts_half_to_even_and_at_least_one(length: int, expected: int) -> None:
    assert int(num_masked(torch.tensor(length), 99, DRAWN)) == expected


def test_the_count_never_exceeds_the_slots() -> None:
    for config in (DISTINCT, DRAWN):
        assert num_masked(torch.tensor([[500, 7]]), 11, config).tolist()[0][0] == 11


# ---------------------------------------------------------------------- where


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(2, T), min_size=B, max_size=B),
    percent=percents,
    drawn=st.booleans(),
    count=st.sampled_from(["ceil", "round"]),
    seed=st.integers(0, 2**31),
)
def test_positions_are_tokens_and_as_many_as_documented(
    lengths: list[int], percent: str, drawn: bool, count: Any, seed: int
) -> None:
    config = ObjectiveConfig(
        mask_percent=float(percent),
        mask_count=count,
        mask_positions="with_replacement" if drawn else "distinct",
    )
    x, length = sentences(lengths, seed)
    candidates = is_candidate(x)
    m = choose_positions(candidates, length, slots_of(config), config, rng(seed))
    for row in range(B):
        chosen = m.at[row][m.valid[row]].tolist()
        available = int(candidates[row].sum())
        k = int(num_masked(length[row], slots_of(config), config))
        if drawn:
            assert len(chosen) == (k if available else 0)
        else:
            assert len(chosen) == len(set(chosen)) == min(k, available)
        assert all(candidates[row, position] for position in chosen)
    assert not m.at[~m.valid].any()


def test_every_candidate_is_chosen_equally_often() -> None:
    x, length = sentences([17])
    candidates = is_candidate(x)
    available, trials = int(candidates.sum()), 4000
    for config in (DISTINCT, DRAWN):
        many = StepRng(5, torch.tensor(0), torch.arange(trials))
        m = choose_positions(
            candidates.expand(trials, T), length.expand(trials), slots_of(config), config, many
        )
        counts = torch.bincount(m.at[m.valid], minlength=T)
        share = int(m.valid.sum()) / available / trials
        error = 5 * math.sqrt(trials * share)
        assert ((counts[candidates[0]] - trials * share).abs() < error).all()
        assert counts[~candidates[0]].sum() == 0


def test_draws_with_replacement_repeat_as_often_as_chance_has_it() -> None:
    n, k, trials = 125, 19, 3000
    candidates = torch.zeros(trials, 128, dtype=torch.bool)
    candidates[:, 1 : n + 1] = True
    many = StepRng(1, torch.tensor(0), torch.arange(trials))
    m = choose_positions(candidates, torch.full((trials,), 128), k, DRAWN, many)
    distinct = [len(set(row)) for row in m.at.tolist()]
    expected = n * (1 - (1 - 1 / n) ** k)  # 17.7: the released code masks 13.8 %, not 15
    spread = math.sqrt(k**2 / n / trials)
    assert abs(sum(distinct) / trials - expected) < 5 * spread


# ---------------------------------------------------------------------- what the generator sees


@pytest.mark.parametrize(("shown", "random"), [(100.0, 0.0), (85.0, 0.0), (80.0, 10.0)])
def test_shares_of_mask_random_and_kept_are_as_set(shown: float, random: float) -> None:
    config = ObjectiveConfig(
        mask_percent=50.0, mask_token_percent=shown, random_token_percent=random
    )
    rows, vocab = 1009, 50_021  # so large that a random token is hardly ever the original
    x, length = sentences([T] * rows)
    many = StepRng(2, torch.tensor(1), torch.arange(rows))
    m = choose_positions(is_candidate(x), length, slots_of(config), config, many)
    x_masked = mask_tokens(x, m, MASK, vocab, config, many)
    seen, original = x_masked.gather(1, m.at)[m.valid], x.gather(1, m.at)[m.valid]
    n = len(seen)
    shares = {
        shown: (seen == MASK).sum() / n,
        random: ((seen != MASK) & (seen != original)).sum() / n,
        100 - shown - random: (seen == original).sum() / n,
    }
    for percent, measured in shares.items():
        p = percent / 100
        # Five standard errors; a random token can by chance be [MASK] or the original.
        assert abs(measured - p) <= 5 * math.sqrt(p * (1 - p) / n) + 1e-4


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(2, T), min_size=B, max_size=B),
    shown=st.sampled_from([(100.0, 0.0), (85.0, 0.0), (80.0, 10.0), (0.0, 100.0)]),
    drawn=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_only_chosen_positions_change(
    lengths: list[int], shown: tuple[float, float], drawn: bool, seed: int
) -> None:
    config = ObjectiveConfig(
        mask_percent=35.0,
        mask_positions="with_replacement" if drawn else "distinct",
        mask_token_percent=shown[0],
        random_token_percent=shown[1],
    )
    x, length = sentences(lengths, seed)
    m = choose_positions(is_candidate(x), length, slots_of(config), config, rng(seed))
    x_masked = mask_tokens(x, m, MASK, V, config, rng(seed))
    x_corrupt = replace(x, m, torch.full_like(m.at, 77))
    for row in range(B):
        chosen = set(m.at[row][m.valid[row]].tolist())
        for t in range(T):
            if t not in chosen:
                assert x_masked[row, t] == x[row, t]
                assert x_corrupt[row, t] == x[row, t]
            else:
                assert x_corrupt[row, t] == 77
                if shown[0] == 100:
                    assert x_masked[row, t] == MASK


def test_a_position_drawn_twice_is_masked_if_either_draw_says_so() -> None:
    """Probability 1 − 0.15² for two draws, and both slots show the same."""
    rows = 2003
    config = ObjectiveConfig(mask_positions="with_replacement", mask_token_percent=85.0)
    x = torch.full((rows, T), 9)
    m = Positions(torch.full((rows, 2), 6), torch.ones(rows, 2, dtype=torch.bool))
    x_masked = mask_tokens(x, m, MASK, V, config, StepRng(3, torch.tensor(0), torch.arange(rows)))
    share = float((x_masked[:, 6] == MASK).double().mean())
    p = 1 - 0.15**2
    assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / rows)


def test_unused_slots_write_nothing() -> None:
    x, _ = sentences([T, 9])
    m = Positions(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.bool))
    assert torch.equal(replace(x, m, torch.full((2, 3), 99)), x)
    assert torch.equal(mask_tokens(x, m, MASK, V, DISTINCT, rng(rows=2)), x)


# ---------------------------------------------------------------------- duplicates


@settings(deadline=None, max_examples=80)
@given(
    at=st.lists(st.integers(1, 6), min_size=7, max_size=7),
    used=st.integers(0, 7),
    tokens=st.lists(st.integers(0, V - 1), min_size=7, max_size=7),
    rule=st.sampled_from(["first", "average"]),
)
def test_one_token_is_written_per_position(
    at: list[int], used: int, tokens: list[int], rule: Any
) -> None:
    config = ObjectiveConfig(mask_positions="with_replacement", duplicate_draws=rule)
    valid = [slot < used for slot in range(7)]
    positions = torch.tensor([[p if v else 0 for p, v in zip(at, valid, strict=True)]])
    m = Positions(positions, torch.tensor([valid]))
    x = torch.full((1, 11), 99)
    written = replace(x, m, resolve_duplicates(m, torch.tensor([tokens]), config))[0].tolist()
    expected = reference.one_token_per_position(at, valid, tokens, rule)
    assert written == [expected.get(t, 99) for t in range(11)]


# ---------------------------------------------------------------------- samples


def forced_to_be_right(config: PretrainConfig, x: Tensor) -> ReplacedTokenDetection:
    """A generator whose head knows the answer: all its mass is on the original token."""

    class Knows(nn.Module):
        def forward(self, h: Tensor, table: Tensor) -> Tensor:
            del table
            m = objective.choose(batch_of(x), rng(rows=len(x)))
            assert m.at.shape == h.shape[:2]
            return nn.functional.one_hot(x.gather(1, m.at), V).float() * 200

    objective = ReplacedTokenDetection(config, V, SPECIAL)
    objective.generator_head = Knows()  # pyright: ignore
    return objective


def batch_of(x: Tensor) -> Batch:
    length = (x != PAD).sum(1)
    one = torch.tensor(1.0)
    return Batch(x, torch.zeros_like(x), length, one, one)


def small(**objective: Any) -> PretrainConfig:
    return PretrainConfig(
        encoder=EncoderConfig(
            layers=1,
            hidden_size=22,
            ffn_size=34,
            attention_heads=2,
            embedding_size=14,
            max_positions=37,
        ),
        generator=GeneratorConfig(width=0.5),
        objective=ObjectiveConfig(**objective),
        data=DataConfig(sequence_length=T, batch_size=B),
    )


@pytest.mark.parametrize("rule", ["first", "average"])
def test_a_correct_sample_counts_as_original(rule: Any) -> None:
    config = small(mask_percent=40.0, mask_positions="with_replacement", duplicate_draws=rule)
    x, _ = sentences([T, 19, 7, 3, 2])
    objective = forced_to_be_right(config, x)
    p = objective.predict(batch_of(x), rng())
    assert (p.x_masked != x).any()
    assert torch.equal(p.x_corrupt, x)
    assert int(objective(batch_of(x), rng()).replaced) == 0


@settings(deadline=None, max_examples=100)
@given(
    vocab=st.integers(1, 60),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.0, 1.0, 10.0]),
    u=st.integers(0, 2**24 - 1).map(lambda bits: bits * 2.0**-24),
)
@example(vocab=28, seed=0, scale=10.0, u=1 - 2.0**-23)
def test_samples_invert_the_distribution(vocab: int, seed: int, scale: float, u: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, vocab, generator=draw) * scale
    found = sample(logits, torch.full((3,), u)).tolist()
    for row in range(3):
        values = logits[row].double().tolist()
        # On a border rounding may decide either way, also for a token hardly wider than it.
        low, high = (
            reference.inverse_cdf(values, min(max(u + e, 0.0), 1.0)) for e in (-2e-6, 2e-6)
        )
        assert low <= found[row] <= high


@settings(deadline=None, max_examples=100)
@given(
    vocab=st.integers(1, 60),
    data=st.data(),
    u=st.sampled_from([0.0, 2.0**-24, 0.25, 0.5, 1 - 2.0**-24]),
)
def test_a_token_without_probability_is_never_sampled(vocab: int, data: Any, u: float) -> None:
    possible = data.draw(st.sets(st.integers(0, vocab - 1), min_size=1))
    logits = torch.full((1, vocab), -math.inf)
    logits[0, list(possible)] = 0.0
    assert int(sample(logits, torch.tensor([u]))) in possible
    logits = torch.full((1, vocab), -1000.0)  # underflows to zero
    logits[0, list(possible)] = 3.0
    assert int(sample(logits, torch.tensor([u]))) in possible


def test_rounding_at_the_end_of_a_tile_does_not_reach_a_token_without_probability() -> None:
    """The sum of a tile and the running sum inside it are rounded differently."""
    draw = torch.Generator().manual_seed(6)
    n, vocab = 20_011, 97
    logits = 3 * torch.randn(n, vocab, generator=draw)
    logits[torch.rand(n, vocab, generator=draw) < 0.5] = -math.inf
    logits[:, 0] = 0.0
    found = sample(logits, torch.full((n,), 1 - 2.0**-24))
    assert torch.isfinite(logits.gather(1, found[:, None])).all()


@pytest.mark.parametrize("vocab", [1, 2, 10, 97, 100, 30_522])
def test_the_ends_of_the_unit_interval_are_the_first_and_the_last_token(vocab: int) -> None:
    logits = torch.zeros(1, vocab)
    assert int(sample(logits, torch.tensor([0.0]))) == 0
    assert int(sample(logits, torch.tensor([1 - 2.0**-24]))) == vocab - 1


def test_running_sums_are_let_pass_in_deterministic_mode_on_a_gpu() -> None:
    class OnGpu:
        is_cuda = True

        def cumsum(self, axis: int) -> tuple[int, bool]:
            return axis, torch.are_deterministic_algorithms_enabled()

    try:
        for warns in (False, True):
            torch.use_deterministic_algorithms(True, warn_only=warns)
            assert corruption._running_sum(OnGpu()) == (-1, False)  # pyright: ignore
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled() == warns
    finally:
        torch.use_deterministic_algorithms(False)


def test_tokens_are_sampled_as_often_as_their_probability_says() -> None:
    logits = torch.randn(1, 13, generator=torch.Generator().manual_seed(4))
    n = 40_009
    u = (torch.arange(n) + 0.5) / n
    counts = torch.bincount(sample(logits.expand(n, 13), u), minlength=13)
    # The numbers u are evenly spaced, so the counts are exact up to the two borders of a token.
    assert ((counts - n * logits[0].double().softmax(0)).abs() < 2).all()


def test_temperature_divides_and_the_correct_token_can_be_ruled_out() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0)).double()
    original = torch.tensor([[0, 6, 2], [5, 5, 1]])
    assert torch.equal(proposal_logits(logits, original, 1.0, False), logits.float())
    assert torch.allclose(proposal_logits(logits, original, 4.0, False), logits.float() / 4)
    p = proposal_logits(logits * 50, original, 1.0, True).softmax(-1)
    assert not p.gather(-1, original[..., None]).any()
    assert torch.allclose(p.sum(-1), torch.ones(2, 3))
