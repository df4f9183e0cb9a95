"""Random numbers: the published vectors, and a function of (seed, step, purpose, row, column)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch
from torch import Tensor

from electra.randomness import Purpose, StepRng, philox, shuffled

KNOWN_ANSWERS = [  # Random123, kat_vectors: counter, key, result
    (
        [0, 0, 0, 0],
        [0, 0],
        [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8],
    ),
    (
        [0xFFFFFFFF] * 4,
        [0xFFFFFFFF] * 2,
        [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def draws(seed: int = 0, step: int = 0, rows: int | list[int] = 5) -> StepRng:
    number = torch.arange(rows) if isinstance(rows, int) else torch.tensor(rows)
    return StepRng(seed, torch.tensor(step), number)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    words = philox(tuple(torch.tensor([c]) for c in counter), (key[0], key[1]))
    assert [int(word) for word in words] == expected
    assert reference.philox(counter, key) == expected


def test_bits_are_philox_of_row_block_and_step_under_seed_and_purpose() -> None:
    step = (3 << 32) + 11
    bits = draws(seed=13, step=step, rows=[0, 7]).bits(Purpose.SAMPLE, 6)
    for i, row in enumerate((0, 7)):
        words = [
            *reference.philox([row, 0, 11, 3], [13, Purpose.SAMPLE]),
            *reference.philox([row, 1, 11, 3], [13, Purpose.SAMPLE]),
        ]
        assert bits[i].tolist() == words[:6]


def test_a_seed_draws_the_same_as_a_number_and_as_a_tensor() -> None:
    for seed in (0, 13, 2**32 - 1, 2**40 + 5):
        number = draws(seed, rows=3).bits(Purpose.SAMPLE, 9)
        tensor = StepRng(torch.tensor(seed % 2**32), torch.tensor(0), torch.arange(3))
        assert torch.equal(number, tensor.bits(Purpose.SAMPLE, 9))


def test_a_row_draws_the_same_however_the_batch_is_split() -> None:
    whole = draws(rows=7).bits(Purpose.POSITIONS, 11)
    parts = [draws(rows=rows).bits(Purpose.POSITIONS, 11) for rows in ([0, 1], [2, 3, 4, 5], [6])]
    assert torch.equal(whole, torch.cat(parts))


def test_more_columns_leave_the_first_ones_as_they_were() -> None:
    assert torch.equal(draws().bits(0, 17)[:, :5], draws().bits(0, 5))


def test_seeds_steps_purposes_and_rows_all_give_other_numbers() -> None:
    variants = [
        draws(seed=1).bits(0, 13),
        draws(seed=2).bits(0, 13),
        draws(seed=1, step=1).bits(0, 13),
        draws(seed=1, step=1 << 32).bits(0, 13),
        draws(seed=1).bits(1, 13),
        draws(seed=1, rows=[5, 6, 7, 8, 9]).bits(0, 13),
    ]
    words = torch.stack(variants).flatten().tolist()
    assert len(set(words)) == len(words)


def test_uniform_numbers_fill_zero_to_below_one_evenly() -> None:
    u = draws(rows=101).uniform(Purpose.SHOWN, 997)
    n = u.numel()
    assert u.dtype == torch.float32
    assert u.min() >= 0
    assert u.max() < 1
    # Five standard errors of the mean and of the variance of a uniform variable.
    assert abs(u.double().mean() - 1 / 2) < 5 * math.sqrt(1 / 12 / n)
    assert abs(u.double().var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    counts = torch.histc(u, bins=13, min=0, max=1).double()
    chi_square = ((counts - n / 13) ** 2 / (n / 13)).sum()
    assert chi_square < 40  # 12 degrees of freedom: beyond 40 once in 10,000


# ---------------------------------------------------------------------- the order of examples


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000, 4097])
def test_every_epoch_is_a_permutation(size: int) -> None:
    order = shuffled(np.arange(3 * size), size, seed=5).reshape(3, size)
    assert np.array_equal(np.sort(order, axis=1), np.tile(np.arange(size), (3, 1)))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [
        *shuffled(np.arange(4000), 1000, seed=0).reshape(4, 1000),
        *shuffled(np.arange(4000), 1000, seed=1).reshape(4, 1000),
        np.arange(1000),
    ]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).sum() < 15  # a random pair agrees at one place on average


def test_a_shuffled_epoch_has_no_visible_order() -> None:
    order = shuffled(np.arange(4097), 4097, seed=3).astype(float)
    neighbours = np.corrcoef(order[:-1], order[1:])[0, 1]
    place = np.corrcoef(order, np.arange(4097))[0, 1]
    assert abs(neighbours) < 5 / math.sqrt(4097)
    assert abs(place) < 5 / math.sqrt(4097)


def test_any_place_is_found_without_walking_to_it() -> None:
    size = 10**9 + 7
    far = np.array([10**15, 3, 10**15 + 1])
    found = shuffled(far, size, seed=2)
    assert ((found >= 0) & (found < size)).all()
    assert found[1] == shuffled(np.array([3]), size, seed=2)[0]
    assert far.tolist() == [10**15, 3, 10**15 + 1]


# ---------------------------------------------------------------------- dropout


def dropped(x: Tensor, rows: list[int], p: float = 0.1, site: int = 3) -> Tensor:
    return draws(seed=4, step=9, rows=rows).dropout(x, p, site)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_zeroes_its_share_and_scales_the_rest(p: float) -> None:
    x = torch.ones(11, 53, 97)
    y = dropped(x, list(range(11)), p)
    n = x.numel()
    zeros = int((y == 0).sum())
    assert abs(zeros / n - p) < 5 * math.sqrt(p * (1 - p) / n)
    assert torch.all((y == 0) | (y == 1 / (1 - p)))
    for axis in (0, 1, 2):
        share = (y == 0).double().mean(dim=[a for a in range(3) if a != axis])
        spread = math.sqrt(p * (1 - p) * x.shape[axis] / n)
        assert (share - p).abs().max() < 6 * spread


def test_a_row_is_dropped_the_same_however_the_batch_is_split() -> None:
    x = torch.randn(5, 7, 13, generator=torch.Generator().manual_seed(0))
    whole = dropped(x, [0, 1, 2, 3, 4])
    assert torch.equal(whole[3:], dropped(x[3:], [3, 4]))


@pytest.mark.parametrize("step", [0, 9, (3 << 32) + 11, 1 << 62])
def test_keys_of_several_sites_are_those_of_each(step: int) -> None:
    """And of a part of the batch those of the batch."""
    rng = draws(seed=2**40 + 5, step=step, rows=[5, 0, 2, 10**6, 3])
    keys = rng.keys(7, 4)
    assert keys.shape == (4, 5)
    assert keys.dtype == torch.int32
    for site, row in enumerate(keys, start=7):
        assert torch.equal(row, rng.bits(Purpose.DROPOUT + site, 1)[:, 0].int())
    parts = [rng._replace(rows=rng.rows[rows]).keys(7, 4) for rows in (slice(2), slice(2, 5))]
    assert torch.equal(torch.cat(parts, 1), keys)
    assert keys.unique().numel() == keys.numel()


def test_rows_sites_and_steps_drop_other_elements() -> None:
    x = torch.ones(2, 31, 41)
    here = dropped(x, [0, 1], 0.5)
    for other in (
        dropped(x, [2, 3], 0.5),
        dropped(x, [0, 1], 0.5, site=4),
        draws(seed=4, step=10, rows=2).dropout(x, 0.5, 3),
        here.flip(0),
    ):
        agreement = (here == other).double().mean()
        assert abs(agreement - 0.5) < 0.05


def test_dropout_keeps_the_type_and_passes_the_gradient_where_it_keeps() -> None:
    x = torch.ones(3, 5, dtype=torch.float64, requires_grad=True)
    y = dropped(x, [0, 1, 2], 0.5)
    assert y.dtype == torch.float64
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # in torch's compiler itself
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_compiled_draws_the_same(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")

    def all_of(step: Tensor, rows: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        rng = StepRng(7, step, rows)
        return rng.bits(Purpose.SAMPLE, 37), rng.dropout(x, 0.3, 5) == 0, rng.keys(5, 3)

    compiled = torch.compile(all_of, fullgraph=True, dynamic=False)
    rows, x = torch.arange(9), torch.randn(9, 33, 17)
    for step in (0, 1, 3, 2**33):
        expected = all_of(torch.tensor(step), rows, x)
        given = (torch.tensor(step, device=device), rows.to(device), x.to(device))
        assert all(torch.equal(a, b.cpu()) for a, b in zip(expected, compiled(*given), strict=True))
