"""The Triton kernels against float64: compiled on a GPU, by Triton's interpreter elsewhere."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from conftest import runtime
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from electra import optim
from electra.config import EncoderConfig
from electra.corruption import lay_out, sample
from electra.encoder import Block, Embeddings, Encoder
from electra.errors import ElectraError
from electra.gpu import fused, kernels
from electra.objectives import Batch, SpecialIds, build_objective
from electra.randomness import SeededDropout, StepRng, _hash32
from electra.recipes import recipe
from electra.runtime import Runtime
from electra.trainer import use_kernels

pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason="Triton is not installed"),
    # The first product of a process, if it is one of autograd's thread, warns and goes on.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# The interpreter multiplies the bits of bfloat16 as integers; float16 rounds at the same places.
NARROW = torch.bfloat16 if CUDA else torch.float16
WIDTHS = [(1, 16), (7, 48), (100, 64), (130, 80), (3, 512), (2, 1024)]
NONE = (None, [0.0, 0.0, 0.0])  # dropout, as the operators are told of it


def close(got: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Within rounding of the largest value."""
    bound = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    scale = expected.abs().max().clamp(min=1e-3)
    assert got.isfinite().all()
    assert (got.double() - expected).abs().max() <= bound * scale


def draw(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=str)
@pytest.mark.parametrize(("N", "D"), WIDTHS)
def test_layer_norm_of_a_sum_and_its_gradients_are_those_of_the_definition(
    N: int, D: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(N)
    x, a, dy, dy2 = (draw(N, D, dtype=dtype) for _ in range(4))
    gamma, beta = draw(D), draw(D)
    statistics = draw(2, N)
    y, s, mean, rstd = kernels.add_norm(x, a, gamma, beta, 0.1, statistics=statistics)
    assert torch.equal(statistics, torch.stack([mean, rstd]))
    assert y.dtype == s.dtype == dtype
    assert torch.equal(s, x + a)
    leaves = [t.double().requires_grad_() for t in (s, gamma, beta)]
    exact = F.layer_norm(leaves[0], (D,), leaves[1], leaves[2], 0.1)
    close(y, exact.detach(), dtype)
    close(mean, s.double().mean(1))
    close(rstd, (s.double().var(1, correction=0) + 0.1).rsqrt())
    few = kernels.ADD_NORM_BACKWARD | {"PROGRAMS": 2}  # which take several steps
    for second, config in ((None, kernels.ADD_NORM_BACKWARD), (dy2, few)):
        again = torch.empty_like(y)
        ds, da, partial = kernels.add_norm_backward(
            dy, second, s, mean, rstd, gamma, config, again=(beta, again)
        )
        assert da is ds  # nothing is dropped
        close(again, exact.detach(), dtype)
        gradient = dy.double() if second is None else dy.double() + second.double()
        expected = torch.autograd.grad(exact, leaves, gradient, retain_graph=True)
        close(ds, expected[0], dtype)
        # Sums are taken before rounding.
        sums = kernels.column_sums([partial])[0].view(3, D)
        for got, right in zip(sums, (*expected[1:], expected[0].sum(0)), strict=True):
            assert (got.double() - right).abs().max() <= 1e-5 * N**0.5


@pytest.mark.parametrize(("N", "C", "D"), [(1, 32, 16), (130, 48, 80), (70, 64, 256)])
def test_layer_norm_in_the_kernel_of_the_product_is_the_same(N: int, C: int, D: int) -> None:
    torch.manual_seed(N)
    x, w, b, h = (draw(*size, dtype=NARROW) for size in ((N, C), (D, C), (D,), (N, D)))
    gamma, beta = draw(D), draw(D)
    config = kernels.PRODUCT_ADD_NORM | {"ROWS": 64}
    y, s, mean, rstd = kernels.product_add_norm(x, w, b, h, gamma, beta, 0.1, config)
    close(s, h.double() + x.double() @ w.double().t() + b.double(), NARROW)
    close(y, F.layer_norm(s.double(), (D,), gamma.double(), beta.double(), 0.1), NARROW)
    close(mean, s.double().mean(1))
    close(rstd, (s.double().var(1, correction=0) + 0.1).rsqrt())


def test_layer_norm_keeps_small_differences_of_large_values() -> None:
    s = 1000 + draw(4, 64)
    one, zero = torch.ones(64, device=DEVICE), torch.zeros(64, device=DEVICE)
    y, *_ = kernels.add_norm(s, torch.zeros_like(s), one, zero, 1e-6)
    assert (y - F.layer_norm(s.double(), (64,), eps=1e-6)).abs().max() < 1e-3


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, in the interpreter
def test_gelu_is_exact_over_all_of_its_range() -> None:
    x = torch.linspace(-9, 9, 20001, device=DEVICE)
    exact = x.double() * torch.special.ndtr(x.double())
    error = (kernels.gelu(x) - exact).abs()
    assert error.max() < 4e-7
    # Where it is tiny, too: a hundredth of bfloat16's rounding; F.gelu has nothing right there.
    assert (error / exact.abs())[(x > -6) & (x != 0)].max() < 4e-5
    slope = torch.special.ndtr(x.double())
    slope += x.double() * torch.exp(-(x.double() ** 2) / 2) / (2 * torch.pi) ** 0.5
    got, *_ = kernels.gelu_backward(x[None], torch.ones_like(x)[None])
    assert (got[0] - slope).abs().max() < 5e-7
    far = torch.tensor([-1e30, -50.0, 50.0, 1e30], device=DEVICE)
    assert torch.equal(kernels.gelu(far), far.clamp(min=0))
    slopes, *_ = kernels.gelu_backward(far[None], torch.ones_like(far)[None])
    assert slopes.tolist() == [[0, 0, 1, 1]]
    assert kernels.gelu(torch.zeros(5, device=DEVICE)).tolist() == [0] * 5
    assert kernels.gelu(torch.full((1,), torch.nan, device=DEVICE)).isnan().all()


def gelu_and_gradient(pre: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = pre.double().requires_grad_()
    act = F.gelu(x)
    (dpre,) = torch.autograd.grad(act, x, g.double())
    return dpre, act.detach(), dpre.sum(0)


@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=str)
@pytest.mark.parametrize(("N", "C"), WIDTHS)
def test_gelu_and_its_gradient_are_those_of_the_definition(
    N: int, C: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(N)
    pre, g = 3 * draw(N, C, dtype=dtype), draw(N, C, dtype=dtype)
    expected = gelu_and_gradient(pre, g)
    close(kernels.gelu(pre), expected[1], dtype)
    for given in (None, expected[1].to(dtype)):
        dpre, act, partial = kernels.gelu_backward(pre, g.clone(), act=given)
        close(dpre, expected[0], dtype)
        close(act, expected[1], dtype)
        assert (partial.double().sum(0) - expected[2]).abs().max() <= 1e-5 * N**0.5


@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=str)
@pytest.mark.parametrize(("N", "D", "C"), [(1, 16, 16), (130, 48, 200), (70, 80, 8)])
@pytest.mark.parametrize("programs", [None, 1, 3], ids=str)
def test_gelu_in_the_kernel_of_the_product_is_the_same(
    N: int, D: int, C: int, programs: int | None, dtype: torch.dtype
) -> None:
    """Rows and columns that fill no tile, too, and D and C that are no powers of two; programs of
    one step and of several."""
    if CUDA and (dtype == torch.float32 or N != 130):
        pytest.skip("seconds for the compiler, and training takes bfloat16")
    torch.manual_seed(N)
    change = {} if programs is None else {"ROWS": 64, "COLUMNS": 32, "PROGRAMS": programs}
    x, w, b = draw(N, D, dtype=dtype), draw(C, D, dtype=dtype), draw(C, dtype=dtype)
    w /= D**0.5
    pre, act = kernels.product_gelu(x, w, b, kernels.PRODUCT_GELU | change)
    assert pre.dtype == act.dtype == dtype
    exact = x.double() @ w.double().t() + b.double()
    close(pre, exact, dtype)
    close(act, F.gelu(exact), dtype)
    ds, down = draw(N, D, dtype=dtype), draw(D, C, dtype=dtype) / D**0.5
    expected = gelu_and_gradient(pre, ds.double() @ down.double())
    config = kernels.PRODUCT_GELU_BACKWARD | change
    dpre, partial = kernels.product_gelu_backward(ds, down, pre, config)
    assert dpre.dtype == dtype
    close(dpre, expected[0], dtype)
    assert (partial.double().sum(0) - expected[2]).abs().max() <= 1e-5 * N**0.5


def test_sums_in_the_kernel_of_the_product_are_taken_before_rounding() -> None:
    """2,048 rows of a third each: rounded ones would be off by one in thousands, all alike."""
    N = 2048
    ds = torch.ones(N, 16, device=DEVICE, dtype=NARROW)
    w = torch.full((16, 16), 1 / 16, device=DEVICE, dtype=NARROW)  # the product is 1
    pre = torch.full((N, 16), 0.3, device=DEVICE, dtype=NARROW)
    x = pre[0].double()
    slope = torch.special.ndtr(x) + x * torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5
    rounded = (slope.to(NARROW).double() - slope).abs().max() * N
    assert rounded > 0.1
    dpre, partial = kernels.product_gelu_backward(ds, w, pre)
    assert torch.equal(dpre[0], slope.to(NARROW))
    assert (partial.double().sum(0) - N * slope).abs().max() < 0.01 * rounded


def test_what_is_not_stored_is_not_rounded() -> None:
    """Half an epsilon more than 1 or −4 is 1 or −4 in memory: neither GELU's slope (1 at 20) nor
    GELU (steep at −4) gets that."""
    half = torch.finfo(NARROW).eps / 2
    x = torch.ones(64, 16, device=DEVICE, dtype=NARROW)
    w = torch.zeros(16, 16, device=DEVICE, dtype=NARROW)
    w[:, 0], w[:, 1] = 1, half
    pre = torch.full((64, 16), 20.0, device=DEVICE, dtype=NARROW)
    _, partial = kernels.product_gelu_backward(x, w.t().contiguous(), pre)
    assert partial.sum(0).tolist() == [64 + 64 * half] * 16
    w[:, 0], w[:, 1] = -4, half
    pre, act = kernels.product_gelu(x, w, torch.zeros_like(x[0]))
    exact = torch.tensor(-4 + half, dtype=torch.float64)
    assert torch.equal(act, F.gelu(exact).to(act).expand_as(act))
    assert (pre == -4).all()
    assert not torch.equal(act, kernels.gelu(pre))


def test_sums_do_not_depend_on_how_many_programs_share_the_rows() -> None:
    pre, g = draw(100, 48), draw(100, 48)
    many = kernels.gelu_backward(pre, g.clone())
    few = kernels.gelu_backward(pre, g, kernels.GELU_BACKWARD | {"PROGRAMS": 1})
    assert torch.equal(many[0], few[0])
    assert len(many[2]) > len(few[2]) == 1
    close(many[2].sum(0), few[2][0].double())


def test_sums_of_several_stand_one_behind_the_other() -> None:
    parts = [draw(P, C) for P, C in ((3, 50), (300, 7), (1, 16), (257, 33))]
    exact = [p.double().sum(0) for p in parts]
    for n in range(1, 5):
        for dtype in (torch.float32, NARROW):
            sums, narrow = kernels.column_sums(parts[:n], dtype)
            close(sums, torch.cat(exact[:n]))
            assert torch.equal(narrow, sums.to(dtype))


def test_repeated_calls_give_the_same_bits() -> None:
    s, dy, gamma = draw(100, 64), draw(100, 64), draw(64)
    mean, rstd = s.mean(1), s.std(1)
    first, second = (kernels.add_norm_backward(dy, None, s, mean, rstd, gamma) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def draws(rows: Sequence[int] | int) -> StepRng:
    row = torch.arange(rows) if isinstance(rows, int) else torch.tensor(rows)
    return StepRng(1, torch.tensor(5, device=DEVICE), row.to(DEVICE))


def drop_of(rng: StepRng | None, rate: float, site: int = 0) -> kernels.Dropout | None:
    return None if rng is None else kernels.Dropout(rng.keys(site, 1)[0], rate)


def attention_in_float64(
    qkv: Tensor, mask: Tensor | None, do: Tensor, rng: StepRng | None = None, rate: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """o, dqkv and its column sums, from the definition."""
    x = qkv.double().requires_grad_()
    q, k, v = x.permute(2, 0, 3, 1, 4)
    score = q @ k.mT / k.shape[-1] ** 0.5  # (B, H, T, T)
    p = score.softmax(-1)
    if mask is not None:
        is_of = mask[:, None, :, None] == mask[:, None, None]
        seen = mask[:, None, None] if mask.dtype == torch.bool else is_of
        p = torch.where(seen, score, -1e300).softmax(-1) * seen
    if rng is not None:
        p = rng.dropout(p, rate, 0)
    o = (p @ v).transpose(1, 2).flatten(2)
    (dqkv,) = torch.autograd.grad(o, x, do.double())
    return o, dqkv, dqkv.sum((0, 1)).flatten()


@pytest.mark.parametrize("dropped", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=str)
@pytest.mark.parametrize(
    ("T", "H", "K", "lengths"),
    [
        (1, 1, 16, [1, 1]),
        (1, 2, 64, None),
        (7, 3, 16, [7, 1, 4]),
        (16, 1, 32, None),
        (33, 2, 16, [33, 32]),
        (100, 1, 64, [100, 17, 0]),  # nothing but padding
        (128, 2, 32, [128, 1]),
        (128, 1, 64, None),
    ],
)
def test_attention_and_its_gradient_are_those_of_the_definition(
    T: int, H: int, K: int, lengths: Sequence[int] | None, dtype: torch.dtype, dropped: bool
) -> None:
    torch.manual_seed(T)
    B = len(lengths) if lengths else 2
    qkv = torch.randn(B, T, 3, H, K).to(DEVICE, dtype)
    do = torch.randn(B, T, H * K).to(DEVICE, dtype)
    mask = None
    if lengths:
        mask = torch.arange(T, device=DEVICE) < torch.tensor(lengths, device=DEVICE)[:, None]
    check_attention(qkv, mask, do, draws(B) if dropped else None)


def check_attention(
    qkv: Tensor, mask: Tensor | None, do: Tensor, rng: StepRng | None = None, **change: int
) -> None:
    """change: of the configuration, forward and backward."""
    if CUDA and qkv.dtype == torch.float32 and qkv.shape[1] > 33:
        pytest.skip("half a minute for the compiler, and training takes bfloat16")
    drop = drop_of(rng, 0.3)
    o, dqkv, dbias = attention_in_float64(qkv, mask, do, rng, 0.3)
    close(kernels.attention(qkv, mask, kernels.ATTENTION | change, drop), o, qkv.dtype)
    config = kernels.ATTENTION_BACKWARD | change
    got, partial = kernels.attention_backward(qkv, mask, do, config, drop)
    close(got, dqkv, qkv.dtype)
    close(partial.sum(0), dbias, qkv.dtype)


@pytest.mark.parametrize("dropped", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=str)
@pytest.mark.parametrize(
    ("T", "H", "K", "parts"),
    [
        (7, 1, 16, [[3, 1, 2], [7, 0, 0]]),
        (100, 2, 32, [[50, 49], [1, 99]]),
        (128, 1, 64, [[60, 30, 20, 18], [128, 0, 0, 0], [1, 1, 1, 5]]),
    ],
)
def test_examples_that_share_a_row_see_themselves_alone(
    T: int, H: int, K: int, parts: list[list[int]], dtype: torch.dtype, dropped: bool
) -> None:
    torch.manual_seed(T)
    qkv = torch.randn(len(parts), T, 3, H, K).to(DEVICE, dtype)
    do = torch.randn(len(parts), T, H * K).to(DEVICE, dtype)
    example = lay_out(torch.tensor(parts), T)[0].int().to(DEVICE)
    check_attention(qkv, example, do, draws(len(parts)) if dropped else None)
    other = torch.where(example[:, :, None, None, None] == 1, 1e4, qkv)
    same = example != 1
    got, expected = kernels.attention(other, example), kernels.attention(qkv, example)
    assert torch.equal(got[same], expected[same])


def test_large_scores_do_not_overflow() -> None:
    qkv = 30 * torch.randn(1, 20, 3, 1, 16, device=DEVICE)
    do = torch.randn(1, 20, 16, device=DEVICE)
    o, dqkv, _ = attention_in_float64(qkv, None, do)
    # Scores of thousands: their rounding is that of the probabilities.
    assert (kernels.attention(qkv, None) - o).abs().max() < 1e-3 * o.abs().max()
    got, _ = kernels.attention_backward(qkv, None, do)
    assert (got - dqkv).abs().max() < 1e-2 * dqkv.abs().max()


def test_what_is_padded_is_neither_seen_nor_learnt() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 40, 3, 2, 16, device=DEVICE)
    do = torch.randn(2, 40, 32, device=DEVICE)
    mask = torch.arange(40, device=DEVICE) < torch.tensor([[29], [3]], device=DEVICE)
    other = qkv.clone()
    other[:, :, 1:][~mask] = 1e4  # keys and values alone: padded queries see as others do
    assert torch.equal(kernels.attention(qkv, mask), kernels.attention(other, mask))
    dqkv, _ = kernels.attention_backward(qkv, mask, do)
    assert not dqkv[:, :, 1:][~mask].any()
    assert dqkv[:, :, 0][~mask].any()  # as in scaled_dot_product_attention


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_rows_at_a_time_change_nothing(rows: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(1, 60, 3, 4, 16).to(DEVICE, NARROW)
    o, _, _ = attention_in_float64(qkv, None, torch.zeros(1, 60, 64, device=DEVICE))
    close(kernels.attention(qkv, None, kernels.ATTENTION | {"ROWS": rows}), o, NARROW)


@pytest.mark.parametrize("dropped", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("programs", [2, 10, 10**6])  # 2: each takes one head of all sequences
@pytest.mark.parametrize(
    ("T", "mask"),
    [(32, "none"), (32, "padded"), (32, "packed"), (20, "none"), (20, "padded"), (128, "none")],
)
def test_attention_and_its_gradient_do_not_depend_on_how_programs_share_the_heads(
    T: int, mask: str, programs: int, dropped: bool
) -> None:
    torch.manual_seed(T)
    B, H, K = (3, 1, 64) if T == 128 else (3, 5, 16)
    qkv = torch.randn(B, T, 3, H, K).to(DEVICE, NARROW)
    do = torch.randn(B, T, H * K).to(DEVICE, NARROW)
    lengths = torch.tensor([[T, 0], [7, T - 7], [0, 0]])  # the last: nothing but padding
    example = lay_out(lengths, T)[0].to(DEVICE)
    seen = {
        "none": None,
        "padded": torch.arange(T, device=DEVICE) < lengths[:, :1].to(DEVICE),
        "packed": example.int(),
    }[mask]
    rng = draws(B) if dropped else None
    check_attention(qkv, seen, do, rng, PROGRAMS=programs)
    drop = drop_of(rng, 0.3)
    config = kernels.ATTENTION_BACKWARD | {"PROGRAMS": programs}
    first, second = (kernels.attention_backward(qkv, seen, do, config, drop) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    few = kernels.attention(qkv, seen, kernels.ATTENTION | {"PROGRAMS": programs}, drop)
    assert torch.equal(few, kernels.attention(qkv, seen, drop=drop))


# Dropout, element by element


@pytest.mark.parametrize(
    ("B", "T", "D", "rate"),
    [
        (1, 1, 16, 0.1),
        (3, 7, 48, 0.999),
        (2, 64, 80, 0.5),
        (5, 33, 32, 0.1),
        (2, 3, 512, 0.5),
        (1, 66, 1024, 0.1),
    ],
)
def test_kernels_drop_of_hidden_states_what_plain_pytorch_drops(
    B: int, T: int, D: int, rate: float
) -> None:
    """Also numbers beyond 16 bits, and rows whose numbers begin at no power of two."""
    torch.manual_seed(T)
    rng, N = draws([3, 10**6, 0, 7, 2**31][:B]), B * T
    drop = drop_of(rng, rate, 9)
    kept = rng.dropout(torch.ones(B, T, D, device=DEVICE), rate, 9).view(N, D) != 0
    one, zero = torch.ones(D, device=DEVICE), torch.zeros(D, device=DEVICE)
    a = draw(N, D)
    _, s, mean, rstd = kernels.add_norm(torch.zeros_like(a), a, one, zero, 0.1, drop=drop)
    assert torch.equal(s != 0, kept)
    close(s, rng.dropout(a.double().view(B, T, D), rate, 9).view(N, D))
    dy = draw(N, D)
    ds, da, partial = kernels.add_norm_backward(dy, None, s, mean, rstd, one, drop=drop)
    whole, _, _ = kernels.add_norm_backward(dy, None, s, mean, rstd, one)
    assert torch.equal(ds, whole)
    assert torch.equal(da != 0, kept)
    close(da, rng.dropout(ds.double().view(B, T, D), rate, 9).view(N, D))
    close(partial.sum(0)[2 * D :], da.double().sum(0))
    if D > 256:
        return
    ones = torch.ones(D, device=DEVICE, dtype=NARROW)
    x, w = torch.zeros(N, 16, dtype=NARROW).to(DEVICE), torch.zeros(D, 16, dtype=NARROW).to(DEVICE)
    h = torch.zeros(N, D, device=DEVICE, dtype=NARROW)
    config = kernels.PRODUCT_ADD_NORM | {"ROWS": 64}
    _, s, *_ = kernels.product_add_norm(x, w, ones, h, one, zero, 0.1, config, drop=drop)
    assert torch.equal(s != 0, kept)


@pytest.mark.parametrize(
    ("T", "H", "rate"),
    [(1, 3, 0.5), (16, 1, 0.1), (16, 3, 0.999), (33, 2, 0.1), (64, 17, 0.5), (100, 7, 0.1)],
)
def test_kernels_drop_of_probabilities_what_plain_pytorch_drops(
    T: int, H: int, rate: float
) -> None:
    """Probabilities are all alike, and values, or gradients, tell the keys, or queries, apart."""
    B, K = 2, 64
    rng = draws([5, 2**31])
    drop = drop_of(rng, rate)
    kept = rng.dropout(torch.ones(B, H, T, T, device=DEVICE), rate, 0) != 0
    for first in range(0, T, K):
        apart = torch.eye(T, device=DEVICE, dtype=NARROW)[:, first : first + K]
        apart = F.pad(apart, (0, K - apart.shape[1]))[None, :, None]  # (1, T, 1, K)
        qkv = torch.zeros(B, T, 3, H, K, device=DEVICE, dtype=NARROW)
        qkv[:, :, 2] = apart
        o = kernels.attention(qkv, None, drop=drop).view(B, T, H, K).transpose(1, 2)
        part = kept[..., first : first + K]
        assert torch.equal(o[..., : part.shape[3]] != 0, part)
        do = apart.expand(B, T, H, K).reshape(B, T, H * K).contiguous()
        dqkv, _ = kernels.attention_backward(qkv, None, do, drop=drop)
        dv = dqkv[:, :, 2].transpose(1, 2)  # (B, H, keys, queries)
        part = kept[:, :, first : first + K].mT
        assert torch.equal(dv[..., : part.shape[3]] != 0, part)


@pytest.mark.parametrize("element", [0, 5, 77])
def test_the_last_bit_of_a_draw_counts(element: int) -> None:
    """A rate of exactly an element's draw leaves it, one that is higher by 2⁻²⁴ does not."""
    a = torch.ones(3, 32, device=DEVICE)
    gamma, rng = torch.ones(32, device=DEVICE), draws(1)
    number = torch.tensor([element], dtype=torch.int32, device=DEVICE)
    word = int(_hash32(number ^ rng.keys(2, 1)[0])) % 2**32 >> 8
    for least, left in ((word, True), (word + 1, False)):
        rate = least / 2**24
        _, s, *_ = kernels.add_norm(0 * a, a, gamma, gamma, 1.0, drop=drop_of(rng, rate, 2))
        assert torch.equal(s != 0, rng.dropout(a[None], rate, 2)[0] != 0)
        assert bool(s.flatten()[element]) == left


@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=str)
@pytest.mark.parametrize(
    ("N", "V", "W", "width"),
    [(1, 2, 2, 2048), (5, 10, 16, 4), (6, 100, 100, 64), (3, 1000, 1024, 256), (2, 513, 576, 512)],
)
def test_cross_entropy_and_its_gradient_are_those_of_the_definition(
    N: int, V: int, W: int, width: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(V)
    logits = (4 * torch.randn(N, W)).to(DEVICE, dtype)
    logits[:, V:] = float("nan")  # not looked at
    targets = torch.randint(V, (N,), device=DEVICE)
    u, dnll = torch.rand(2, N, device=DEVICE)
    x = logits[:, :V].double().requires_grad_()
    nll = F.cross_entropy(x, targets, reduction="none")
    (gradient,) = torch.autograd.grad(nll, x, dnll.double())
    got, x_hat, best, lse = kernels.cross_entropy_and_sample(
        logits, targets, u, V, kernels.CROSS_ENTROPY | {"WIDTH": width}
    )
    close(got, nll.detach())
    assert torch.equal(x_hat, sample(logits[:, :V].float(), u))
    top = logits[:, :V].float()
    assert torch.equal(best, (top == top.amax(1, keepdim=True)).int().argmax(1))  # the first
    dlogits, dbias = kernels.cross_entropy_backward(
        logits, targets, lse, dnll, V,
        kernels.CROSS_ENTROPY_BACKWARD | {"WIDTH": 128, "ROWS": 2, "GROUPS": 2},
    )  # fmt: skip
    close(dlogits[:, :V], gradient, dtype)
    assert not dlogits[:, V:].any()
    close(dbias, gradient.sum(0))


def test_samples_are_as_frequent_as_they_are_probable() -> None:
    """u on a grid of n: every token is drawn n p times, but for the two ends of its interval."""
    torch.manual_seed(0)
    n, V = (500, 37) if CUDA else (40, 9)
    one = 2 * torch.randn(V, device=DEVICE)
    u = (torch.arange(n, device=DEVICE) + 0.5) / n
    _, x_hat, *_ = kernels.cross_entropy_and_sample(
        one.expand(n, V).contiguous(),
        torch.zeros(n, dtype=torch.int64, device=DEVICE),
        u,
        V,
        kernels.CROSS_ENTROPY | {"WIDTH": 4},
    )
    counts = torch.bincount(x_hat, minlength=V)
    assert (counts - n * one.softmax(0)).abs().max() < 1 + 1e-3


def test_a_token_without_probability_is_never_drawn() -> None:
    """Also where rounding puts u behind everything that has mass."""
    V = 50
    logits = torch.full((4, V), -1e4, device=DEVICE)
    logits[:, 5:9] = torch.tensor([0.1, -0.3, 0.7, 0.2], device=DEVICE)
    u = torch.tensor([0.0, 0.5, 1 - 2**-24, 1.0], device=DEVICE)
    targets = torch.full((4,), 6, device=DEVICE)
    for width in (4, 64):
        _, x_hat, *_ = kernels.cross_entropy_and_sample(
            logits, targets, u, V, kernels.CROSS_ENTROPY | {"WIDTH": width}
        )
        assert x_hat[0] == 5
        assert ((x_hat >= 5) & (x_hat < 9)).all()
        assert x_hat[3] == 8


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, in the interpreter
def test_logits_that_are_not_finite_show_in_the_loss() -> None:
    logits = torch.zeros(2, 20, device=DEVICE)
    logits[0, 3] = float("nan")
    logits[1, 7] = float("inf")
    u, targets = torch.tensor([0.3, 0.3], device=DEVICE), torch.tensor([1, 1], device=DEVICE)
    nll, x_hat, best, _ = kernels.cross_entropy_and_sample(logits, targets, u, 20)
    assert not nll.isfinite().any()
    for token in (x_hat, best):
        assert ((token >= 0) & (token < 20)).all()


ROWS = kernels.TABLE_GRADIENT["ROWS"]["ROWS"]
PARTS = kernels.TABLE_GRADIENT["RUNS"]["PARTS"]
RUNS: dict[str, list[int]] = {  # how often each id comes, from 0 on; V is how many there are
    "one": [1],
    "one of many": [0, 0, 1, 0],
    "all the same": [5 * ROWS],
    "all different": [1] * (3 * ROWS + 5),
    "first and last": [3] + [0] * 40 + [2],
    "to borders": [ROWS, 2 * ROWS, ROWS - 1, 1, ROWS],
    "over borders": [ROWS - 1, 2, ROWS - 2, ROWS + 1, 1, 3 * ROWS, 7],
    "two over one border": [1, 2 * ROWS - 2, 2 * ROWS, 5],
    "as many parts as are added at once": [1, PARTS * ROWS, ROWS - 1],
    "many": [0, 3, (2 * PARTS + 3) * ROWS + 5, 0, 1, 2],
    "longest": [2, 260 * ROWS, 9],  # more tiles than its end is looked for at once
}


def shuffled(counts: list[int]) -> Tensor:
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return ids[torch.randperm(len(ids))].to(DEVICE)


@pytest.mark.parametrize(
    ("runs", "E", "dtype"),
    [
        *((runs, 16, torch.float32) for runs in RUNS),
        *((runs, 64, NARROW) for runs in ("one", "over borders", "many")),
        *((runs, 128, torch.float32) for runs in ("to borders", "over borders", "many")),
        ("over borders", 48, torch.float32),  # columns that fill no tile, and several of them
        ("over borders", 200, torch.float32),
    ],
)
def test_the_gradient_of_a_look_up_is_the_sum_of_the_rows_of_each_id(
    runs: str, E: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(E)
    ids = shuffled(RUNS[runs])
    rows = draw(len(ids), E, dtype=dtype)
    exact = torch.zeros(len(RUNS[runs]), E, dtype=torch.float64, device=DEVICE)
    exact.index_add_(0, ids, rows.double())
    real = torch.empty
    # What was not written shows.
    monkeypatch.setattr(torch, "empty", lambda *a, **k: real(*a, **k).fill_(torch.nan))
    got = kernels.table_gradient(rows, ids, len(exact))
    assert got.dtype == dtype
    close(got, exact, dtype)
    assert not got[exact.abs().sum(1) == 0].any()


def test_sums_of_narrow_rows_are_rounded_once() -> None:
    """Half an epsilon many times beside 1, and beside −1 where the next rows are taken: neither is
    what one row after the other gives in the type of the rows, nor what each part gives."""
    half = torch.finfo(NARROW).eps / 2
    rows = torch.full((2 * ROWS, 16), half, device=DEVICE, dtype=NARROW)
    rows[3], rows[ROWS + 5] = 1, -1
    for part in (rows, rows[:ROWS]):
        exact = part.double().sum(0)
        got = kernels.table_gradient(part, torch.ones(len(part), dtype=torch.int64).to(DEVICE), 3)
        assert torch.equal(got[1], exact.to(NARROW))


def test_the_order_of_the_sums_of_a_look_up_is_that_of_its_ids() -> None:
    """Rows that change their places with others, but not with those of the same id, change
    nothing; with those, the last bits."""
    torch.manual_seed(0)
    ids = shuffled(RUNS["over borders"])
    rows = draw(len(ids), 64)
    got = kernels.table_gradient(rows, ids, 9)
    assert torch.equal(got, kernels.table_gradient(rows, ids, 9))
    new = ids[torch.randperm(len(ids), device=DEVICE)]
    old, to = ids.argsort(stable=True), new.argsort(stable=True)
    moved = torch.empty_like(rows)
    moved[to] = rows[old]
    assert not torch.equal(moved, rows)
    assert torch.equal(kernels.table_gradient(moved, new, 9), got)
    assert not torch.equal(kernels.table_gradient(rows.flip(0), ids.flip(0), 9), got)


def test_a_vocabulary_of_more_than_two_bytes_is_looked_up_as_well() -> None:
    V = 2**15 + 3
    ids = torch.tensor([V - 1, 2**15 - 1, 0, V - 1, 2**15], device=DEVICE)
    rows = draw(5, 16)
    for size in (V, 2**16 + V):
        got = kernels.table_gradient(rows, ids + size - V, size)
        assert torch.equal(got[size - 1], rows[0] + rows[3])
        assert torch.equal(got[[-4, -V, -3]], rows[[1, 2, 4]])
        assert got.count_nonzero() == 4 * 16


def test_a_row_that_is_not_finite_spoils_its_own_sum_alone() -> None:
    ids = shuffled(RUNS["over borders"])
    rows = draw(len(ids), 16)
    rows[ids == 3] = torch.inf
    got = kernels.table_gradient(rows, ids, 9)
    assert got.isfinite().all(1).tolist() == [n != 3 for n in range(9)]


# What is made of them


def block_of(
    D: int, width: int, heads: int, T: int, rates: tuple[float, float] = (0.0, 0.0)
) -> Block:
    """rates: of dropout of hidden states and of attention."""
    config = EncoderConfig(
        layers=1, hidden_size=D, ffn_size=width, attention_heads=heads, embedding_size=D,
        max_positions=T, dropout=rates[0], attention_dropout=rates[1],
    )  # fmt: skip
    block = Block(config, site=4).to(DEVICE)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block


def mask_of(T: int, lengths: Sequence[Any] | None) -> Tensor | None:
    """Of sequences so long, or of rows of examples so long."""
    if lengths is None:
        return None
    sizes = torch.tensor(lengths, device=DEVICE)
    if sizes.dim() == 2:
        return lay_out(sizes, T)[0].int()
    return torch.arange(T, device=DEVICE) < sizes[:, None]


def bias_of(mask: Tensor | None) -> Tensor | None:
    """What the block of plain PyTorch takes for it."""
    if mask is None or mask.dtype == torch.bool:
        return None if mask is None else mask[:, None, None]
    return (mask[:, :, None] == mask[:, None])[:, None]


@pytest.mark.parametrize(
    ("T", "lengths", "kept"),
    [
        (20, None, 2**26),
        (20, [9, 20, 1], 2**26),
        (20, [9, 20, 1], 0),  # h and act are computed again
        (20, [[5, 11, 4], [20, 0, 0], [1, 1, 7]], 0),
        (fused.LONGEST + 2, None, 2**26),  # whose attention is not ours
        (fused.LONGEST + 2, None, 0),
    ],
)
def test_a_block_of_kernels_is_the_block(
    T: int, lengths: Sequence[Any] | None, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "KEPT", kept)
    torch.manual_seed(0)
    block = block_of(48, 80, 3, T)
    h = draw(3, T, 48).requires_grad_()
    mask = mask_of(T, lengths)
    bias = None if mask is None else mask[:, None, None]
    dy = draw(3, T, 48)
    leaves = [h, *block.parameters()]
    plain = block(h, bias_of(mask), None)
    expected = torch.autograd.grad(plain, leaves, dy)
    block.fused = True
    again = block(h, bias, None)
    assert (again - plain).abs().max() < 1e-5
    for got, right in zip(torch.autograd.grad(again, leaves, dy), expected, strict=True):
        assert (got - right).abs().max() <= 2e-5 * right.abs().max()
    with torch.no_grad():
        block.up.bias += 1
    assert (block(h, bias, None) - plain).abs().max() > 1e-3  # it reads the weights it has now


RATES = [(0.3, 0.0), (0.0, 0.3), (0.3, 0.2)]


@pytest.mark.parametrize("rates", RATES, ids=str)
@pytest.mark.parametrize(
    ("T", "lengths", "kept"),
    [
        (20, None, 2**26),
        (32, [9, 32, 1], 0),  # h and act are computed again
        (20, [[5, 11, 4], [20, 0, 0], [1, 1, 7]], 2**26),
        (fused.LONGEST + 2, None, 2**26),  # whose attention is not ours
    ],
)
def test_a_block_of_kernels_drops_what_the_block_drops(
    T: int,
    lengths: Sequence[Any] | None,
    kept: int,
    rates: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused, "KEPT", kept)
    torch.manual_seed(0)
    block = block_of(48, 80, 3, T, rates)
    rng = draws(3)
    keys = rng.keys(block.site, 3)
    h, mask, dy = draw(3, T, 48).requires_grad_(), mask_of(T, lengths), draw(3, T, 48)
    leaves = [h, *block.parameters()]
    plain = block(h, bias_of(mask), rng)
    bias = None if mask is None else mask[:, None, None]
    block.fused = True
    if T > fused.LONGEST and rates[1]:
        with pytest.raises(AssertionError, match="draws of its own"):
            block(h, bias, rng, keys=keys)
        return
    again = block(h, bias, rng, keys=keys)
    assert (again - plain).abs().max() < 1e-5
    expected = torch.autograd.grad(plain, leaves, dy)
    for got, right in zip(torch.autograd.grad(again, leaves, dy), expected, strict=True):
        assert (got - right).abs().max() <= 2e-5 * right.abs().max()
    # In evaluation nothing is dropped, and without its keys nothing goes on as if it were.
    block.config = replace(block.config, dropout=0.0, attention_dropout=0.0)
    expected = block(h, bias, rng)
    block.config = replace(block.config, dropout=rates[0], attention_dropout=rates[1])
    assert torch.equal(block(h, bias, None), expected)
    for other in (rng, SeededDropout(DEVICE)):
        with pytest.raises(AssertionError, match="without its keys"):
            block(h, bias, other)


class At(NamedTuple):
    """Draws of some sites; the others are left as they are."""

    rng: StepRng
    sites: tuple[int, ...]

    def dropout(self, x: Tensor, p: float, site: int) -> Tensor:
        return self.rng.dropout(x, p, site) if site in self.sites else x


@pytest.mark.parametrize("sites", [(0,), (1,), (2,)], ids=str)
def test_each_place_of_a_block_drops_alone(sites: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    block, rng = block_of(32, 48, 2, 13, (0.4, 0.4)), draws(2)
    x, dy = draw(2, 13, 32).requires_grad_(), draw(2, 13, 32)
    leaves, eps = [x, *block.tensors()], block.config.layer_norm_eps
    plain = block(x, None, At(rng, tuple(block.site + site for site in sites)))
    rates = [0.4 * (site in sites) for site in range(3)]
    keys = rng.keys(block.site, 3)
    y = fused.block(x, None, block.tensors(), keys, rates, 2, eps, True)[0]
    assert (y - plain).abs().max() < 1e-5
    expected = torch.autograd.grad(plain, leaves, dy)
    for got, right in zip(torch.autograd.grad(y, leaves, dy), expected, strict=True):
        assert (got - right).abs().max() <= 2e-5 * right.abs().max()


@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.2, 0.2)], ids=str)
@pytest.mark.parametrize(
    ("D", "kept", "dtype", "names"),
    [
        (48, 2**26, NARROW, ["product_gelu", "product_gelu_backward"]),
        (48, 0, NARROW, ["product_gelu", "gelu_backward"]),
        (272, 2**26, NARROW, ["gelu", "gelu_backward"]),
        (48, 2**26, torch.float32, ["gelu", "gelu_backward"]),
    ],
)
def test_a_block_with_gelu_in_its_products_is_the_block(
    D: int,
    kept: int,
    dtype: torch.dtype,
    names: list[str],
    rates: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a row fits a tile, and act does not have to be computed once more."""
    torch.manual_seed(0)
    block, rng = block_of(D, 80, D // 16, 20, rates).to(dtype), draws(3)
    for norm in (block.attention_norm, block.ffn_norm):
        norm.float()
    x, dy = draw(3, 20, D, dtype=dtype).requires_grad_(), draw(3, 20, D, dtype=dtype)
    ran: list[str] = []

    def watched(name: str, real: Any, *arguments: Any, **options: Any) -> Any:
        ran.append(name)
        return real(*arguments, **options)

    for name in ("gelu", "gelu_backward", "product_gelu", "product_gelu_backward"):
        monkeypatch.setattr(kernels, name, functools.partial(watched, name, getattr(kernels, name)))
    monkeypatch.setattr(fused, "KEPT", kept)
    results: list[list[Tensor]] = []
    for block.fused in (True, False):
        y = block(x, None, rng, keys=rng.keys(block.site, 3))
        results.append([y.detach(), *torch.autograd.grad(y, [x, *block.tensors()], dy)])
    assert ran == names
    bound = 1e-4 if dtype == torch.float32 else 0.05 if CUDA else 0.02
    for got, right in zip(*results, strict=True):
        assert got.dtype == right.dtype
        assert (got - right).abs().max() <= bound * right.abs().max()


@pytest.mark.parametrize("sites", [(), (0,), (1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize(
    ("T", "D", "width", "lengths"),
    [
        (1, 16, 16, [1, 1]),
        (7, 32, 64, None),
        (33, 16, 48, [33, 1, 9, 5, 0]),  # two strips of tokens; one sequence has none
        (20, 16, 16, [[5, 11, 4], [1, 1, 7], [20, 0, 0]]),
    ],
)
def test_a_layer_that_stays_on_chip_is_the_block(
    T: int, D: int, width: int, lengths: Sequence[Any] | None, sites: tuple[int, ...]
) -> None:
    """sites: where something is dropped."""
    torch.manual_seed(T)
    B = len(lengths) if lengths else 2
    if sites and lengths == [33, 1, 9, 5, 0]:  # attention written out has no number for nothing
        lengths = [33, 1, 9, 5, 2]
    block, rng = block_of(D, width, 1, T, (0.3, 0.3)).double(), draws(B)
    drops = [drop_of(rng, 0.3, block.site + n) if n in sites else None for n in range(3)]
    weights = [w.detach().float() for w in block.tensors()]
    mask = mask_of(T, lengths)
    x, dy = draw(B, T, D), draw(B, T, D)
    leaves = [x.double().requires_grad_(), *block.tensors()]
    part = At(rng, tuple(block.site + site for site in sites)) if sites else None
    exact = block(leaves[0], bias_of(mask), part)
    expected = torch.autograd.grad(exact, leaves, dy.double())
    eps = block.config.layer_norm_eps
    y, *kept = kernels.layer(x, mask, weights, eps, drops=drops)
    dx, sums, half = kernels.layer_backward(dy, x, mask, weights, kept, eps, drops=drops)
    parts = sums.split([w.numel() for w in weights])
    for got, right in zip((y, dx, *parts), (exact.detach(), *expected), strict=True):
        assert (got.flatten() - right.flatten()).abs().max() <= 1e-5 * right.abs().max()
    assert torch.equal(half, sums)


@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.2, 0.2)], ids=str)
@pytest.mark.parametrize("lengths", [[6], [[4, 3]]])
def test_a_layer_of_one_head_of_64_stays_on_chip(
    lengths: Sequence[Any], rates: tuple[float, float]
) -> None:
    """Through autograd, in the working type, against the block of separate kernels."""
    torch.manual_seed(0)
    block = block_of(64, 64, 1, 9, rates).to(NARROW)
    rng, rate = draws(1), [rates[0], *rates]
    keys, eps = rng.keys(block.site, 3), block.config.layer_norm_eps
    for norm in (block.attention_norm, block.ffn_norm):
        norm.float()
    x = draw(1, 9, 64, dtype=NARROW).requires_grad_()
    mask = mask_of(9, lengths)
    assert mask is not None
    dy = draw(1, 9, 64, dtype=NARROW)
    leaves = [x, *block.tensors()]
    block.fused = True
    assert fused.stays_on_chip(x, block.config)
    assert not fused.stays_on_chip(x.float(), block.config)
    results: list[tuple[Tensor, ...]] = []
    for y in (
        block(x, mask[:, None, None], rng, keys=keys),
        fused.block(x, mask, block.tensors(), keys, rate, 1, eps, True)[0],
    ):
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    for got, right in zip(*results, strict=True):
        assert got.dtype == right.dtype
        assert got.shape == right.shape
        assert (got - right).abs().max() <= (0.1 if CUDA else 0.02) * right.abs().max()


def test_a_long_layer_of_one_head_of_64_is_a_block_with_other_attention() -> None:
    """In the working type, against the block of plain PyTorch."""
    torch.manual_seed(0)
    T = fused.LONGEST + 1
    block = block_of(64, 64, 1, T).to(NARROW)
    for norm in (block.attention_norm, block.ffn_norm):
        norm.float()
    x, dy = draw(2, T, 64, dtype=NARROW).requires_grad_(), draw(2, T, 64, dtype=NARROW)
    assert fused.stays_on_chip(x[:, 1:], block.config)
    assert not fused.stays_on_chip(x, block.config)
    results: list[tuple[Tensor, ...]] = []
    for block.fused in (True, False):
        y = block(x, None, None)
        results.append((y.detach(), *torch.autograd.grad(y, [x, *block.tensors()], dy)))
    for got, right in zip(*results, strict=True):
        assert got.dtype == right.dtype
        assert (got - right).abs().max() <= (0.1 if CUDA else 0.02) * right.abs().max()


def test_a_long_block_with_padding_is_that_of_plain_pytorch() -> None:
    """As when a run of full sequences is evaluated on text whose last one is short."""
    T = fused.LONGEST + 1
    block = block_of(48, 80, 3, T)
    h, mask = draw(2, T, 48), mask_of(T, [T, 9])
    results = [block(h, bias_of(mask), None) for block.fused in (False, True)]
    assert torch.equal(*results)
    with pytest.raises(AssertionError, match="no padding"):
        fused.block(h, mask, block.tensors(), *NONE, 3, 1e-6, True)


@pytest.mark.parametrize("packed", [False, True])
def test_a_long_encoder_with_padding_is_that_of_plain_pytorch(packed: bool) -> None:
    """Of several examples in a row as well, which own attention tells apart by their numbers."""
    torch.manual_seed(0)
    T = fused.LONGEST + 2
    config = block_of(48, 80, 3, T).config
    encoder = Encoder(config, Embeddings(config, 30)).to(DEVICE)
    x = torch.randint(30, (2, T)).to(DEVICE)
    mask = mask_of(T, [[T - 9, 9], [70, 0]] if packed else [T, 9])
    results: list[Tensor] = []
    for own in (False, True):
        for block in encoder.blocks:
            block.fused = own  # type: ignore[assignment]
        results.append(encoder(x, torch.zeros_like(x), mask, None))
    assert torch.equal(*results)


def test_torchs_attention_is_called_as_it_wants_to_be() -> None:
    """What it takes and returns on a GPU, without one: shapes without values."""
    B, T, H, K = 2, fused.LONGEST + 1, 3, 16
    ran: list[Any] = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            ran.append(func)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        qkv = torch.empty(B, T, 3, H, K, dtype=torch.bfloat16, device="cuda")
        with Watched():
            o, lse = fused._attention(qkv, None)
            dqkv, sums = fused._attention_backward(qkv, None, o, lse, torch.empty_like(o))
    aten = torch.ops.aten
    assert aten._scaled_dot_product_flash_attention.default in ran
    assert aten._scaled_dot_product_flash_attention_backward.default in ran
    assert aten.clone.default not in ran  # o lies as the next product reads it
    for got, shape, dtype in (
        (o, (B, T, H * K), torch.bfloat16),
        (lse, (B, H, T), torch.float32),
        (dqkv, (B, T, 3, H, K), torch.bfloat16),
        (sums, (1, 3 * H * K), torch.float32),
    ):
        assert (got.shape, got.dtype) == (shape, dtype)
        assert got.is_contiguous()


@pytest.mark.parametrize("rates", [(0.0, 0.0), (0.1, 0.1), (0.2, 0.0)], ids=str)
@pytest.mark.parametrize("kind", ["full", "padded", "packed", "one network"])
def test_a_step_of_kernels_has_the_losses_and_gradients_of_the_objective(
    kind: str, rates: tuple[float, float]
) -> None:
    padded = kind in ("padded", "packed")
    torch.manual_seed(0)
    c = recipe("tiny")
    encoder = replace(c.encoder, layers=2, dropout=rates[0], attention_dropout=rates[1])
    generator = replace(c.generator, depth=0.5)
    if kind == "one network":  # which draws otherwise in its first pass
        generator = replace(c.generator, width=1.0, depth=1.0, sharing="all")
    c = replace(c, encoder=encoder, generator=generator)
    objective = build_objective(c, 333, SpecialIds(0, 1, 2, 3, 4), padded=padded).to(DEVICE)
    for parameter in objective.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    B, T = 3, 24
    length = torch.tensor([T, 9, 17] if padded else [T] * B, device=DEVICE)
    x = torch.randint(5, 333, (B, T)).to(DEVICE) * (
        torch.arange(T, device=DEVICE) < length[:, None]
    )
    batch = Batch(x, torch.zeros_like(x), length, length.sum(), torch.tensor(9, device=DEVICE))
    if kind == "packed":
        batch = batch._replace(parts=torch.stack([length // 3, length - length // 3], 1))
    rng = StepRng(0, torch.tensor(3, device=DEVICE), torch.arange(B, device=DEVICE))
    parameters = list(objective.parameters())
    plain = objective(batch, rng)
    expected = torch.autograd.grad(plain.total, parameters)
    for part in (objective, *objective.modules()):
        if isinstance(part, Block) or part is objective:
            part.fused = True  # type: ignore[assignment]
        elif isinstance(part, Embeddings):
            part.in_order = True
    kerneled = objective(batch, rng)
    for name, a, b in zip(plain._fields, kerneled, plain, strict=True):
        assert abs(float(a.detach()) - float(b.detach())) <= 1e-5 * abs(float(b.detach())), name
    gradients = torch.autograd.grad(kerneled.total, parameters)
    for got, right in zip(gradients, expected, strict=True):
        assert (got - right).abs().max() <= 1e-4 * right.abs().max().clamp(min=1e-6)
    if kind != "padded":
        return
    total = 0.0  # of micro-batches
    for rows in (slice(2), slice(2, 3)):
        part = Batch(*(t if t is None or t.dim() == 0 else t[rows] for t in batch))
        total += objective(part, rng._replace(rows=rng.rows[rows])).total
    for got, right in zip(torch.autograd.grad(total, parameters), gradients, strict=True):
        assert (got - right).abs().max() <= 1e-4 * right.abs().max().clamp(min=1e-6)


def test_what_the_compiler_is_told_of_the_operators_is_true() -> None:
    """Shapes and types without values, and the gradient as a graph."""
    D, F_, B, T = 32, 48, 2, 5
    shapes = [(3 * D, D), (3 * D,), (D, D), (D,), (F_, D), (F_,), (D, F_), (D,), *[(D,)] * 4]
    weights = [draw(*shape).requires_grad_() for shape in shapes]
    x = draw(B, T, D).requires_grad_()
    few = [
        w if F_ not in w.shape else draw(*(D if n == F_ else n for n in w.shape)) for w in weights
    ]
    mask = torch.ones(B, T, dtype=torch.bool, device=DEVICE)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    drawn = draws(B).keys(0, 3), [0.1, 0.1, 0.2]
    for keep, drops in ((True, NONE), (False, drawn)):
        arguments = (x, mask, weights, *drops, 2, 1e-6, keep)
        torch.library.opcheck(fused.block, arguments, test_utils=tests)
    long = draw(1, fused.LONGEST + 1, D).requires_grad_()
    arguments = (long, None, weights, *NONE, 2, 1e-6, False)
    torch.library.opcheck(fused.block, arguments, test_utils=tests)
    e, table, bias = (draw(*s).requires_grad_() for s in ((4, 16), (70, 16), (70,)))
    targets, u = torch.randint(70, (4,)).to(DEVICE), torch.rand(4).to(DEVICE)
    torch.library.opcheck(fused.guess, (e, table, bias, targets, u), test_utils=tests)
    kept = list(fused.block(x, mask, weights, *NONE, 2, 1e-6, True)[1:])
    with torch.no_grad():
        for drops in (NONE, drawn):
            arguments = (draw(B, T, D), x, mask, weights, kept, *drops, 2)
            torch.library.opcheck(fused.block_backward, arguments, test_utils=tests)
        kept = list(fused.block(long, None, weights, *NONE, 2, 1e-6, False)[1:])
        arguments = (draw(*long.shape), long, None, weights, kept, *NONE, 2)
        torch.library.opcheck(fused.block_backward, arguments, test_utils=tests)
    ids = torch.randint(70, (3, 5)).to(DEVICE)
    torch.library.opcheck(fused.look_up, (ids, table), test_utils=tests)
    with torch.no_grad():
        torch.library.opcheck(fused.look_up_backward, (draw(3, 5, 16), ids, 70), test_utils=tests)
    for drops in (NONE, drawn):
        torch.library.opcheck(fused.layer, (x, mask, few, *drops, 1e-6), test_utils=tests)
        y, *kept = fused.layer(x, mask, few, *drops, 1e-6)
        with torch.no_grad():
            arguments = (y, x, mask, few, kept, *drops, 1e-6)
            torch.library.opcheck(fused.layer_backward, arguments, test_utils=tests)


@pytest.mark.parametrize("packed", [False, True])
def test_look_ups_in_order_have_the_gradients_of_the_others(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside the tables of another block, which get none."""
    torch.manual_seed(0)
    sizes: list[int] = []
    real = kernels.table_gradient

    def watched(rows: Tensor, ids: Tensor, size: int) -> Tensor:
        sizes.append(size)
        return real(rows, ids, size)

    monkeypatch.setattr(kernels, "table_gradient", watched)
    config = block_of(64, 80, 1, 20).config
    base = Embeddings(config, 30)
    embeddings = Embeddings(config, 30, base).to(DEVICE)
    base.to(DEVICE)
    x, position = (torch.randint(n, (3, 20)).to(DEVICE) for n in (30, 20))
    x[:, 5:15] = 7
    dy = draw(3, 20, 64)
    leaves = [*embeddings.parameters(), *base.parameters()]
    results: list[tuple[Tensor | None, ...]] = []
    for embeddings.in_order in (False, True):
        y = embeddings(x, x % 2, position if packed else None)
        results.append((y.detach(), *torch.autograd.grad(y, leaves, dy, allow_unused=True)))
    assert sorted(sizes) == ([20, 30] if packed else [30])
    one, other = results
    assert [g is None for g in other] == [False] * 6 + [True] * 5
    for got, right in zip(other[:6], one[:6], strict=True):
        assert got is not None
        assert right is not None
        assert got.dtype == right.dtype
        assert (got - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.parametrize(
    ("deterministic", "kernel", "said"),
    [(True, "auto", True), (False, "auto", False), (True, "no", False)],
)
def test_deterministic_runs_with_own_kernels_look_up_in_order(
    deterministic: bool, kernel: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = recipe("tiny")
    encoder = replace(c.encoder, dropout=0.0, attention_dropout=0.0)
    generator = replace(c.generator, sharing="disentangled")
    c = replace(c, encoder=encoder, generator=generator, run=replace(c.run, kernels=kernel))
    objective = build_objective(c, 333, SpecialIds(0, 1, 2, 3, 4))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    runtime = Runtime(
        device=torch.device("cuda"), dtype=torch.bfloat16, compiled=False, cuda_graph=False,
        threads=1,
    )  # fmt: skip
    assert use_kernels(objective, c, runtime) == (kernel == "auto")
    tables = [part for part in objective.modules() if isinstance(part, Embeddings)]
    assert [part.in_order for part in tables] == [said] * 2


@pytest.mark.parametrize(
    ("capability", "hip", "fits"),
    [
        ((9, 0), None, True),
        ((10, 0), None, True),
        ((8, 0), None, False),  # A100
        ((12, 0), None, False),  # for desktops
        ((9, 4), "6.4", False),  # MI300
    ],
)
def test_own_kernels_are_for_gpus_that_have_room_for_them(
    capability: tuple[int, int], hip: str | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = recipe("tiny")
    c = replace(c, encoder=replace(c.encoder, dropout=0.0, attention_dropout=0.0))
    objective = build_objective(c, 333, SpecialIds(0, 1, 2, 3, 4))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    here = replace(runtime(), device=torch.device("cuda"), dtype=torch.bfloat16)
    assert use_kernels(objective, c, here) == fits
    assert all(b.fused == fits for b in objective.modules() if isinstance(b, Block))


def test_the_last_layers_keep_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    small = recipe("small").encoder
    assert fused.kept_layers(small, 128 * 128) == 12
    assert fused.kept_layers(small, 1024 * 128) == 8
    given: list[bool] = []
    real = fused.block

    def watched(*arguments: Any) -> Any:
        given.append(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr(fused, "block", watched)
    config = block_of(48, 80, 3, 20).config
    encoder = Encoder(replace(config, layers=3), Embeddings(config, 30)).to(DEVICE)
    for block in encoder.blocks:
        block.fused = True  # pyright: ignore[reportArgumentType]
    x = torch.zeros(2, 20, dtype=torch.int64, device=DEVICE)
    monkeypatch.setattr(fused, "KEPT", 2 * x.numel() * (48 + 80) * 2)
    encoder(x, x, None, None)
    assert given == [False, True, True]


@pytest.mark.parametrize(
    ("changes", "dtype", "said"),
    [
        ({"attention_heads": 2}, torch.bfloat16, "heads of 128"),
        ({"hidden_size": 96, "attention_heads": 3}, torch.bfloat16, "heads of 24"),
        ({"ffn_size": 1020}, torch.bfloat16, "feed-forward parts of 1020"),
        ({"dropout": 0.1}, torch.bfloat16, "dropout"),
        ({}, torch.float32, "float32"),
    ],
)
def test_what_does_not_fit_is_said(changes: dict[str, Any], dtype: torch.dtype, said: str) -> None:
    small = recipe("small")
    fitting = replace(small, encoder=replace(small.encoder, dropout=0.0, attention_dropout=0.0))
    assert fused.unfit(fitting, torch.bfloat16, padded=True) is None
    config = replace(fitting, encoder=replace(fitting.encoder, **changes))
    assert re.search(said, fused.unfit(config, dtype, padded=False) or "")


def test_dropout_fits_once_it_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    small = recipe("small")
    assert small.encoder.dropout
    assert small.encoder.attention_dropout
    long = replace(small, data=replace(small.data, sequence_length=fused.LONGEST + 1))
    alone = replace(long, encoder=replace(long.encoder, attention_dropout=0.0))
    for c in (small, long, alone):
        assert fused.unfit(c, torch.bfloat16, padded=False) == "dropout"
    monkeypatch.setattr(fused, "DROPOUT", True)
    assert fused.unfit(small, torch.bfloat16, padded=True) is None
    assert fused.unfit(alone, torch.bfloat16, padded=False) is None
    said = fused.unfit(long, torch.bfloat16, padded=False)
    assert said == "attention dropout in sequences longer than 128 tokens"


def test_long_sequences_fit_if_they_are_not_padded() -> None:
    c = recipe("small")
    c = replace(
        c,
        encoder=replace(c.encoder, dropout=0.0, attention_dropout=0.0),
        data=replace(c.data, sequence_length=fused.LONGEST + 1),
        run=replace(c.run, kernels="yes"),
    )
    assert fused.unfit(c, torch.bfloat16, padded=False) is None
    here = replace(runtime(), dtype=torch.bfloat16)
    said = {True: "padding in sequences longer than 128", False: "a device that is no GPU"}
    for padded, reason in said.items():
        objective = build_objective(c, 30, SpecialIds(0, 1, 2, 3, 4), padded=padded)
        with pytest.raises(ElectraError, match=f"do not do {reason}"):
            use_kernels(objective, c, here)


@pytest.mark.parametrize("shape", [(2, 64, 64), (3, 20, 50), (2, 256, 64), (1, 64, 256)])
def test_all_rounds_of_muon_on_chip_are_the_rounds(shape: tuple[int, int, int]) -> None:
    """Singular values over three decades: in float16 that needs Gram matrices made anew."""
    torch.manual_seed(3)
    left, values, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    u = (1e-4 * left * torch.logspace(0, -3, values.shape[1]) @ right).to(DEVICE)
    exact = optim.orthogonal(u.double(), torch.float64)
    for dtype, bound in ((torch.float32, 2e-4), (torch.float16, 2e-2)):
        ours = kernels.orthogonal(u, dtype, optim.QUINTIC)
        assert ours.dtype == dtype
        assert (ours.double() - exact).norm() < bound * exact.norm()
        assert torch.linalg.matrix_norm(ours.double(), 2).max() < 1.22
        assert not kernels.orthogonal(torch.zeros_like(u), dtype, optim.QUINTIC).any()


def test_matrices_that_are_too_large_for_one_program_are_refused() -> None:
    for shape, fits in (((1, 64, 256), True), ((1, 257, 8), False), ((1, 65, 65), False)):
        assert kernels.turns(torch.zeros(shape)) == fits
    with pytest.raises(AssertionError):
        kernels.orthogonal(torch.zeros(1, 65, 65, device=DEVICE), torch.float16, optim.QUINTIC)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("S", "K", "tile"), [(64, 64, 32), (40, 70, 16), (7, 5, 128), (96, 32, 32)]
)
def test_a_symmetric_product_is_the_product(S: int, K: int, tile: int, dtype: torch.dtype) -> None:
    """One tile, several, and ones that matrices do not fill; transposed views; into a stack."""
    torch.manual_seed(S)
    config = kernels.SYMMETRIC | {"TILE": tile, "INNER": 32}
    wide, tall, z = (draw(3, *size, dtype=dtype) for size in ((S, K), (K, S), (S, S)))
    z = z + z.mT
    stack = torch.zeros(5, S, S, dtype=dtype, device=DEVICE)
    for x, y in ((wide, wide.mT), (tall.mT, tall)):
        got = kernels.symmetric(
            x, y, by=0.5, plus=(-2.0, z), unit=3.0, out=stack[1:4], config=config
        )
        assert got.data_ptr() == stack[1].data_ptr()
        exact = 0.5 * x.double() @ y.double() - 2.0 * z.double() + 3.0 * torch.eye(S, device=DEVICE)
        close(got, exact, dtype)
        # Tiles of the diagonal are as symmetric as the product of a tile: a GPU's sums (i, j) and
        # (j, i) in one order, NumPy's, which multiplies in the interpreter, on some processors.
        place = torch.arange(S, device=DEVICE) // tile
        mirrored = (place[:, None] != place) | CUDA
        assert torch.equal(got * mirrored, got.mT * mirrored)
        assert not stack[0].any()
        assert not stack[4].any()
        close(kernels.symmetric(x, y, config=config), x.double() @ y.double(), dtype)
