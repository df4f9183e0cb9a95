"""Adam against two independent ones, and the schedule against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import reference
import torch
from torch import Tensor, nn

from electra import optim
from electra.config import OptimConfig
from electra.encoder import LayerNorm
from electra.errors import CorruptError
from electra.exchange import Exchange
from electra.gpu import kernels
from electra.gpu.kernels import update
from electra.optim import Adam, is_decayed, learning_rate, orthogonal, orthogonal_by_gram


class Net(nn.Module):
    """One tensor of every kind, with sizes that do not fill the alignment."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(13, 7)
        self.dense = nn.Linear(7, 11)
        self.norm = LayerNorm(11, 1e-12)
        self.w = nn.Linear(11, 1)


def drawn(module: Any, seed: int) -> Any:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return module


def net(seed: int = 0) -> Net:
    return drawn(Net(), seed)


def gradients(module: nn.Module, step: int, scale: float = 0.01) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(100 + step)
    return {n: scale * torch.randn(p.shape, generator=draw) for n, p in module.named_parameters()}


def apply(adam: Adam, grads: dict[str, Tensor], lr: float, step: int) -> Tensor:
    adam.accumulate([grads[slot.name] for slot in adam.slots], first=True)
    return adam.step(torch.tensor([lr]), torch.tensor(step))


def snapshot(adam: Adam) -> dict[str, dict[str, Tensor]]:
    return {key: {n: t.clone() for n, t in group.items()} for key, group in adam.state().items()}


def assert_same(a: dict[str, dict[str, Tensor]], b: dict[str, dict[str, Tensor]]) -> None:
    for key in ("model", "m", "v"):
        for name, tensor in a[key].items():
            assert torch.equal(tensor, b[key][name]), (key, name)


# ---------------------------------------------------------------------- the update


def test_with_bias_correction_it_is_torchs_adamw() -> None:
    ours, theirs = net(), net()
    config = OptimConfig(weight_decay=0.1, max_grad_norm=1e9)
    adam = Adam(ours, config)
    named = dict(theirs.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if is_decayed(n)], "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if not is_decayed(n)], "weight_decay": 0.0},
    ]
    other = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.epsilon)
    for step in range(10):
        lr = 0.01 * (step + 1)
        grads = gradients(ours, step)
        apply(adam, grads, lr, step)
        for group in other.param_groups:
            group["lr"] = lr
        for name, parameter in named.items():
            parameter.grad = grads[name]
        other.step()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_ten_steps_are_the_textbooks(bias_correction: bool) -> None:
    module = net()
    config = OptimConfig(bias_correction=bias_correction, weight_decay=0.1, max_grad_norm=1e9)
    adam = Adam(module, config)
    slow = {
        name: reference.TextbookAdam(
            p.detach().numpy(),
            beta1=0.9,
            beta2=0.999,
            epsilon=1e-6,
            decay=0.1 if name in ("word.weight", "dense.weight", "w.weight") else 0.0,
            bias_correction=bias_correction,
        )
        for name, p in module.named_parameters()
    }
    for step in range(10):
        grads = gradients(module, step)
        apply(adam, grads, 0.003, step)
        for name, each in slow.items():
            each.step(grads[name].double().numpy(), 0.003)
    for name, parameter in module.named_parameters():
        moved = np.abs(slow[name].p - net().get_parameter(name).detach().double().numpy()).max()
        assert moved > 0.003
        np.testing.assert_allclose(parameter.detach().numpy(), slow[name].p, rtol=2e-6, atol=2e-6)


def test_the_released_first_update_is_larger_by_the_missing_correction() -> None:
    first = {}
    for corrected in (True, False):
        module = net()
        before = module.dense.bias.detach().clone()
        config = OptimConfig(bias_correction=corrected, epsilon=1e-30, max_grad_norm=1e9)
        apply(Adam(module, config), gradients(module, 0), 0.1, 0)
        first[corrected] = (module.dense.bias.detach() - before).abs()
    ratio = first[False] / first[True]
    torch.testing.assert_close(ratio, torch.full((11,), 0.1 / 0.001**0.5), rtol=1e-3, atol=0)


def test_matrices_and_embeddings_decay_and_nothing_else() -> None:
    module = net()
    adam = Adam(module, OptimConfig(weight_decay=0.5))
    before = snapshot(adam)["model"]
    zeros = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    apply(adam, zeros, 0.1, 0)
    for name, parameter in module.named_parameters():
        decays = name in ("word.weight", "dense.weight", "w.weight")
        assert is_decayed(name) == decays
        factor = 1 - 0.1 * 0.5 if decays else 1.0
        torch.testing.assert_close(parameter.detach(), factor * before[name])


def test_the_clip_is_over_all_parameters_together() -> None:
    module = net()
    config = OptimConfig(max_grad_norm=0.25)
    grads = gradients(module, 0, scale=3.0)
    norm = torch.cat([g.flatten() for g in grads.values()]).norm()
    adam = Adam(module, config)
    returned = apply(adam, grads, 0.1, 0)
    torch.testing.assert_close(returned, norm)
    for name, m in adam.state()["m"].items():
        torch.testing.assert_close(m, 0.1 * grads[name] * 0.25 / norm)


def test_a_gradient_below_the_clip_stays_as_it_is() -> None:
    module = net()
    adam = Adam(module, OptimConfig(max_grad_norm=100.0))
    grads = gradients(module, 0)
    apply(adam, grads, 0.1, 0)
    for name, m in adam.state()["m"].items():
        torch.testing.assert_close(m, (1 - 0.9) * grads[name])


# ---------------------------------------------------------------------- muon


class Blocks(nn.Module):
    """Two layers of what Muon takes, square, tall and wide, and what it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(13, 7)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"qkv": nn.Linear(7, 21), "up": nn.Linear(7, 11), "down": nn.Linear(11, 7)}
            )
            for _ in range(2)
        )
        self.norm = LayerNorm(7, 1e-12)
        self.head = nn.Linear(7, 5)


MUON = OptimConfig(kind="muon", weight_decay=0.1, learning_rate=0.01, muon_rate=0.03)


def blocks(seed: int = 0) -> Blocks:
    return drawn(Blocks(), seed)


def apart(name: str, tensor: Tensor) -> list[np.ndarray]:
    """The matrices of a parameter, in float64."""
    values = tensor.detach().double().numpy()
    return list(values.reshape(3, 7, 7)) if "qkv" in name else [values]


def test_ten_steps_of_muon_are_those_of_one_matrix_after_the_other() -> None:
    module = blocks()
    factors = {"blocks.1.up.weight": 0.5, "blocks.1.down.weight": 0.0}
    optimizer = Adam(module, MUON, multipliers=factors)
    slow = {
        name: [reference.SlowMuon(p, momentum=0.95, decay=0.1) for p in apart(name, parameter)]
        for name, parameter in module.named_parameters()
        if "blocks" in name and name.endswith("weight")
    }
    assert len(slow) == 6
    for step in range(10):
        rate, grads = 0.01 / (step + 1), gradients(module, step, scale=3.0)
        norm = apply(optimizer, grads, rate, step)
        assert norm > 1.0  # clipped, by all parameters together
        for name, matrices in slow.items():
            lr = 3 * rate * factors.get(name, 1.0)  # muon_rate / learning_rate is 3
            for one, grad in zip(matrices, apart(name, grads[name]), strict=True):
                one.step(grad / float(norm), lr)
    for name, matrices in slow.items():
        ours = apart(name, module.get_parameter(name))
        for one, p, before in zip(
            matrices, ours, apart(name, blocks().get_parameter(name)), strict=True
        ):
            assert (np.abs(one.p - before).max() > 0.01) == (factors.get(name) != 0.0)
            np.testing.assert_allclose(p, one.p, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["blocks.0.up.weight", "blocks.0.down.weight"])
def test_one_matrix_moves_as_with_torchs_muon(name: str) -> None:
    """Which computes in bfloat16, ours on a CPU in float32: the same to its precision."""
    module = blocks()
    config = dataclasses.replace(MUON, max_grad_norm=1e9)
    optimizer = Adam(module, config)
    alone = nn.Parameter(module.get_parameter(name).detach().clone())
    before = alone.detach().clone()
    theirs = torch.optim.Muon(
        [alone], lr=0.03, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(5):
        grads = gradients(module, step)
        apply(optimizer, grads, 0.01, step)
        alone.grad = grads[name]
        theirs.step()
    moved, wanted = module.get_parameter(name).detach() - before, alone.detach() - before
    assert (moved - wanted).norm() < 0.02 * wanted.norm()


def test_all_else_is_adams_under_muon_too() -> None:
    one, two = blocks(), blocks()
    muon, adam = Adam(one, MUON), Adam(two, dataclasses.replace(MUON, kind="adam"))
    for step in range(3):
        for optimizer, module in ((muon, one), (adam, two)):
            apply(optimizer, gradients(module, step), 0.01, step)
    for name, parameter in one.named_parameters():
        same = torch.equal(parameter, two.get_parameter(name))
        assert same == (not (name.startswith("blocks.") and name.endswith("weight"))), name


@pytest.mark.parametrize("shape", [(7, 7), (30, 8), (8, 30)])
def test_singular_values_come_near_one_and_their_vectors_stay(shape: tuple[int, int]) -> None:
    u = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))
    left, values, right = torch.linalg.svd(u, full_matrices=False)
    ours = left.mT @ orthogonal(1e-3 * u, torch.float32) @ right.mT
    lifted = ours.diagonal(dim1=1, dim2=2)
    known = values > 0.05 * values[:, :1]
    assert lifted[known].min() > 0.6
    assert lifted.max() < 1.25
    torch.testing.assert_close(
        ours - torch.diag_embed(lifted), torch.zeros_like(ours), atol=1e-4, rtol=0
    )
    assert not orthogonal(torch.zeros(2, *shape), torch.float32).any()


SHAPES = [(3, 16, 16), (2, 40, 16), (1, 16, 70)]  # square, tall, wide


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize(("decades", "bound"), [(1, 1e-5), (4, 1e-3)])
def test_rounds_on_gram_matrices_lead_to_the_same(decades: int, bound: float, kernel: bool) -> None:
    """Of stacks of one smaller side together, in float32; small singular values lose more bits."""
    if kernel and not kernels.available():
        pytest.skip("Triton is not installed")
    device = torch.device("cuda" if torch.cuda.is_available() and kernel else "cpu")
    draw = torch.Generator().manual_seed(2)
    falling = torch.logspace(0, -decades, 16)
    us: list[Tensor] = []
    for shape in SHAPES:
        left, _, right = torch.linalg.svd(torch.randn(shape, generator=draw), full_matrices=False)
        us.append((1e-3 * (left * falling) @ right).to(device))
    for u, ours in zip(us, orthogonal_by_gram(us, torch.float32, kernel=kernel), strict=True):
        for one, other in zip(ours, orthogonal(u, torch.float32), strict=True):
            assert (one - other).norm() < bound * other.norm()
    zeros = [torch.zeros_like(u) for u in us]
    for nothing in orthogonal_by_gram(zeros, torch.float32, kernel=kernel):
        assert not nothing.any()


@pytest.mark.parametrize("way", ["torch", "on chip", "symmetric"])
def test_ten_steps_by_gram_matrices_are_those_without(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    kernel = way != "torch"
    if kernel and not kernels.available():
        pytest.skip("Triton is not installed")
    if way == "symmetric":
        monkeypatch.setattr(update, "MOST_TURNED", (4, 4))  # too small for what follows
    factors = {"blocks.1.up.weight": 0.5, "blocks.1.down.weight": 0.0}
    plain = Adam(blocks(), MUON, multipliers=factors)
    assert len(plain._families) == 4  # (7, 7), (11, 7) twice, (7, 11)
    monkeypatch.setattr(optim, "by_gram", lambda _: True)
    ways: set[str] = set()
    for place, name in ((kernels, "orthogonal"), (kernels, "symmetric"), (torch, "bmm")):
        own = getattr(place, name)

        def noted(*a: Any, own: Any = own, name: str = name, **k: Any) -> Any:
            ways.add(name)
            return own(*a, **k)

        monkeypatch.setattr(place, name, noted)
    device = torch.device("cuda" if torch.cuda.is_available() and kernel else "cpu")
    gram = Adam(blocks().to(device), MUON, multipliers=factors, kernel=kernel)
    assert len(gram._families) == 1  # all have a side of seven
    for step in range(10):
        grads = gradients(blocks(), step, scale=3.0)
        if step == 4:
            grads["blocks.0.up.weight"][0, 0] = float("nan")
        apply(plain, grads, 0.01, step)
        gram.accumulate([grads[slot.name].to(device) for slot in gram.slots], first=True)
        gram.step(torch.tensor([0.01], device=device), torch.tensor(step, device=device))
    assert ways == {{"torch": "bmm", "on chip": "orthogonal"}.get(way, way)}
    bound = 1e-4 if device.type == "cpu" else 1e-2  # float16 on a GPU
    one, two, before = snapshot(plain), snapshot(gram), snapshot(Adam(blocks(), MUON))
    for name, tensor in one["model"].items():
        moved = (tensor - before["model"][name]).norm()
        assert (two["model"][name].cpu() - tensor).norm() <= bound * moved, name
        torch.testing.assert_close(two["m"][name].cpu(), one["m"][name])


def test_gram_matrices_are_for_a_gpu() -> None:
    assert not optim.by_gram(torch.device("cpu"))
    assert optim.by_gram(torch.device("cuda"))


# ---------------------------------------------------------------------- broken gradients


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_a_broken_gradient_changes_no_bit_and_is_counted(kind: Any, value: float) -> None:
    module = net() if kind == "adam" else blocks()
    adam = Adam(module, OptimConfig(kind=kind))
    place = "w.weight" if kind == "adam" else "blocks.1.up.weight"
    apply(adam, gradients(module, 0), 0.1, 0)
    before = snapshot(adam)
    broken = gradients(module, 1)
    broken[place][0, 5] = value
    norm = apply(adam, broken, 0.1, 1)
    assert not torch.isfinite(norm)
    assert_same(before, snapshot(adam))
    apply(adam, broken, 0.1, 2)
    assert (int(adam.bad_steps), int(adam.bad_in_a_row)) == (2, 2)
    apply(adam, gradients(module, 3), 0.1, 3)
    assert (int(adam.bad_steps), int(adam.bad_in_a_row)) == (2, 0)
    assert not torch.equal(before["model"][place], adam.state()["model"][place])


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_a_step_that_is_not_live_changes_nothing_and_counts_nothing(kind: Any) -> None:
    module = net() if kind == "adam" else blocks()
    adam = Adam(module, OptimConfig(kind=kind))
    before = snapshot(adam)
    adam.live.fill_(False)
    apply(adam, gradients(module, 0), 0.1, 0)
    apply(adam, {n: g * torch.nan for n, g in gradients(module, 1).items()}, 0.1, 1)
    assert_same(before, snapshot(adam))
    assert int(adam.bad_steps) == int(adam.bad_in_a_row) == 0


# ---------------------------------------------------------------------- the average


def test_the_average_is_that_of_the_weights_of_every_good_step() -> None:
    module = net()
    adam = Adam(module, OptimConfig(average=0.9))
    mean = {name: p.detach().clone() for name, p in module.named_parameters()}
    for step in range(120):
        grads = gradients(module, step)
        if step == 50:
            grads["w.bias"][0] = torch.nan
        apply(adam, grads, 0.01, step)
        share = max(0.1, 9 / (10 + step))
        for name, p in module.named_parameters():
            mean[name] += (p.detach() - mean[name]) * (share if step != 50 else 0.0)
    for name, tensor in adam.state()["average"].items():
        torch.testing.assert_close(tensor, mean[name])
        assert not torch.allclose(tensor, module.get_parameter(name), atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_module_computes_with_the_average_for_a_while(dtype: torch.dtype) -> None:
    module = net()
    adam = Adam(module, OptimConfig(average=0.5), working_dtype=dtype)
    for step in range(30):
        grads = gradients(module, step)
        grads = {n: g.to(module.get_parameter(n).dtype) for n, g in grads.items()}
        apply(adam, grads, 0.1, step)
    before = snapshot(adam)
    with adam.averaged():
        for name, tensor in before["average"].items():
            parameter = module.get_parameter(name)
            assert torch.equal(parameter, tensor.to(parameter.dtype))
            assert not torch.equal(tensor, before["model"][name])
    assert_same(before, snapshot(adam))
    for name, tensor in before["model"].items():
        parameter = module.get_parameter(name)
        assert torch.equal(parameter, tensor.to(parameter.dtype))


def test_an_average_that_was_not_saved_starts_at_the_weights() -> None:
    old, new = Adam(net(1), OptimConfig()), Adam(net(2), OptimConfig(average=0.9))
    assert "average" not in old.state()
    new.load(snapshot(old))
    for name, tensor in new.state()["average"].items():
        assert torch.equal(tensor, old.state()["model"][name])


# ---------------------------------------------------------------------- spikes


@pytest.mark.parametrize("wanted", [True, False])
def test_a_spike_is_left_out_only_after_128_good_steps_and_only_on_request(wanted: bool) -> None:
    module = net()
    adam = Adam(module, OptimConfig(skip_spikes=wanted))
    draw = torch.Generator().manual_seed(3)

    def go(step: int, factor: float) -> None:
        noise = 1 + 0.1 * torch.randn((), generator=draw)
        grads = {n: factor * noise * g for n, g in gradients(module, 0).items()}
        apply(adam, grads, 1e-3, step)

    for step in range(128):
        go(step, 100.0 if step == 64 else 1.0)  # too early to judge; it widens the window
    for step in range(128, 320):  # and leaves it after 128 more
        go(step, 1.0)
    assert int(adam.bad_steps) == 0
    before = snapshot(adam)
    go(320, 100.0)
    assert int(adam.bad_steps) == int(adam.bad_in_a_row) == int(adam.spikes) == wanted
    if wanted:
        assert_same(before, snapshot(adam))
    go(321, 1.2)  # no spike; and the one before is not part of what the next is judged by
    assert int(adam.bad_steps) == wanted
    assert int(adam.bad_in_a_row) == 0
    go(322, 30.0)
    assert int(adam.bad_steps) == 2 * wanted


def test_the_rule_for_spikes_is_six_standard_deviations() -> None:
    module = net()
    grads = gradients(module, 0)
    unit = torch.sqrt(sum(g.square().sum() for g in grads.values()))
    norms = 1 + 0.1 * torch.rand(128, generator=torch.Generator().manual_seed(1))
    limit = norms.mean() + 6 * norms.std()
    for norm, skipped in ((limit * 1.001, 1), (limit * 0.999, 0), (torch.tensor(1e-3), 0)):
        adam = Adam(net(), OptimConfig(skip_spikes=True))
        for step, n in enumerate([*norms, norm]):
            apply(adam, {k: g * (n / unit) for k, g in grads.items()}, 1e-3, step)
        assert int(adam.spikes) == skipped


def test_what_is_not_live_or_not_finite_is_not_remembered() -> None:
    module = net()
    adam = Adam(module, OptimConfig(skip_spikes=True))
    apply(adam, gradients(module, 0), 0.1, 0)
    kept = {name: tensor.clone() for name, tensor in adam.counters().items()}
    adam.live.fill_(False)
    apply(adam, gradients(module, 1), 0.1, 1)
    adam.live.fill_(True)
    apply(adam, {n: g * torch.nan for n, g in gradients(module, 1).items()}, 0.1, 1)
    for name in ("good_norms", "good_steps", "spikes"):
        assert torch.equal(kept[name], adam.counters()[name])


# ---------------------------------------------------------------------- buffers


@pytest.mark.skipif(not kernels.available(), reason="Triton is not installed")
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_kernel_does_what_torchs_adam_does(
    bias_correction: bool, micro_batches: int, dtype: torch.dtype
) -> None:
    """Norm, clip, skip, rates of parts, decay, moments, averages and working copies."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = OptimConfig(
        weight_decay=0.1, bias_correction=bias_correction, max_grad_norm=0.1, average=0.9
    )
    both = [
        Adam(
            net().to(device),
            config,
            working_dtype=dtype,
            multipliers={"dense.weight": 0.3, "norm.bias": 0.0},
            kernel=kernel,
        )
        for kernel in (False, True)
    ]
    norms: list[list[float]] = []
    for step in range(6):
        norms.append([])
        for adam in both:
            adam.live.fill_(step != 4)
            for i in range(micro_batches):
                grads = gradients(net(), 10 * step + i, scale=0.01 if step < 3 else 0.3)
                if step == 2:
                    grads["w.bias" if i else "word.weight"].flatten()[0] = float("nan")
                given = [
                    grads[slot.name].to(device, parameter.dtype)
                    for slot, parameter in zip(adam.slots, adam.parameters, strict=True)
                ]
                adam.accumulate(given, first=i == 0)
            rate, number = torch.tensor(0.02, device=device), torch.tensor(step, device=device)
            norms[-1].append(float(adam.step(rate, number)))
    for i, (a, b) in enumerate(norms):
        assert a == pytest.approx(b, rel=1e-6, nan_ok=i == 2)
    assert torch.equal(*(adam.bad_steps for adam in both))
    one, two = (snapshot(adam) for adam in both)
    assert not two["v"]["norm.bias"].eq(0).any()
    for key in ("model", "m", "v", "average"):
        for name, tensor in one[key].items():
            torch.testing.assert_close(two[key][name], tensor, rtol=2e-6, atol=1e-7)
    for parameter, slot in zip(both[1].parameters, both[1].slots, strict=True):
        assert torch.equal(parameter, two["model"][slot.name].to(parameter.dtype))


@pytest.mark.skipif(not kernels.available(), reason="Triton is not installed")
def test_more_numbers_than_the_kernel_can_tell_apart_are_torchs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = len(Adam(net(), OptimConfig()).master)
    for most, own in ((there, True), (there - 1, False)):
        monkeypatch.setattr(kernels, "MOST_PLACES", most)
        adam = Adam(net(), OptimConfig(), kernel=True)
        assert adam.kernel == own
        apply(adam, gradients(net(), 1), 0.1, 0)


def test_the_first_corrections_of_the_kernel_are_exact_enough() -> None:
    """1 − 0.999 is a thousandth of what it is made of; ten steps against float64."""
    adam = Adam(net(), OptimConfig(weight_decay=0.0, beta2=0.9999), kernel=kernels.available())
    exact = {n: p.detach().double() for n, p in net().named_parameters()}
    m, v = ({n: torch.zeros_like(p) for n, p in exact.items()} for _ in "mv")
    for step in range(3):
        grads = gradients(net(), step)
        apply(adam, grads, 0.1, step)
        for n, p in exact.items():
            g = grads[n].double()
            m[n] = 0.9 * m[n] + 0.1 * g
            v[n] = 0.9999 * v[n] + 0.0001 * g * g
            first, second = m[n] / (1 - 0.9 ** (step + 1)), v[n] / (1 - 0.9999 ** (step + 1))
            p -= 0.1 * first / (second.sqrt() + adam.config.epsilon)
    for n, p in adam.state()["model"].items():
        assert (p - exact[n]).abs().max() < 2e-6


def test_micro_batches_add_up_and_the_first_overwrites() -> None:
    module = net()
    adam = Adam(module, OptimConfig())
    parts = [gradients(module, step) for step in range(3)]
    for stale in (True, False):
        for i, part in enumerate(parts):
            adam.accumulate([part[slot.name] for slot in adam.slots], first=i == 0)
        for slot in adam.slots:
            total = parts[0][slot.name] + parts[1][slot.name] + parts[2][slot.name]
            torch.testing.assert_close(slot.of(adam.grad), total)
        assert stale or int((adam.grad != 0).sum()) == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_arrive_in_pieces_are_those_that_come_at_once(dtype: torch.dtype) -> None:
    """With parameters across the border of two pieces, and one that no gradient reaches."""
    at_once = Adam(net(), OptimConfig(), working_dtype=dtype)
    module, exchange, sent = net(), Exchange(), list[tuple[int, Tensor]]()
    exchange.pieces = 3

    def send(grad: Tensor, number: int) -> None:
        sent.append((number, grad[exchange.piece(number, len(grad))].clone()))

    exchange.send = send  # type: ignore[method-assign]
    adam = Adam(module, OptimConfig(), working_dtype=dtype, exchange=exchange)
    before: set[int] = set()
    for i in range(2):
        part = gradients(module, i)
        del part["norm.bias"]
        used = [(p.float() * part[n]).sum() for n, p in module.named_parameters() if n in part]
        if last := i == 1:
            adam.expect(first=False)
        found = torch.autograd.grad(
            torch.stack(used).sum(), adam.parameters, allow_unused=True, materialize_grads=True
        )
        at_once.accumulate(found, first=i == 0)
        if last:
            before = {number for number, _ in sent}
            adam.finish(found)
        else:
            adam.accumulate(found, first=True)
            assert not sent
    assert 0 < len(before) < 3  # one waited for the gradient that did not come
    assert sorted(number for number, _ in sent) == [0, 1, 2]
    for number, piece in sent:  # as it was when it was sent
        wanted = at_once.grad.new_zeros(len(adam.grad))
        wanted[: len(at_once.grad)] = at_once.grad
        assert torch.equal(piece, wanted[exchange.piece(number, len(wanted))]), number


def test_parameters_live_in_the_flat_buffer() -> None:
    module = net()
    values = {n: p.detach().clone() for n, p in net().named_parameters()}
    adam = Adam(module, OptimConfig())
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, values[name])
        assert parameter.untyped_storage().data_ptr() == adam.master.untyped_storage().data_ptr()
    starts = [slot.start for slot in adam.slots]
    assert all(start % 64 == 0 for start in starts)
    assert len({id(p) for p in adam.parameters}) == len(list(module.parameters()))


def test_state_and_load_are_a_round_trip() -> None:
    one, two = net(0), net(1)
    a, b = Adam(one, OptimConfig()), Adam(two, OptimConfig())
    for step in range(3):
        apply(a, gradients(one, step), 0.1, step)
    b.load(snapshot(a))
    assert_same(snapshot(a), snapshot(b))
    for adam, module in ((a, one), (b, two)):
        apply(adam, gradients(module, 3), 0.1, 3)
    assert_same(snapshot(a), snapshot(b))
    for name, parameter in two.named_parameters():
        assert torch.equal(parameter, one.get_parameter(name))


def test_other_names_and_shapes_are_refused() -> None:
    adam = Adam(net(), OptimConfig())
    saved = snapshot(adam)
    renamed = {"model": {f"x.{n}": t for n, t in saved["model"].items()}}
    with pytest.raises(CorruptError, match=r"dense\.bias"):
        adam.load(renamed)
    missing = {"v": {n: t for n, t in saved["v"].items() if n != "w.bias"}}
    with pytest.raises(CorruptError, match=r"w\.bias"):
        adam.load(missing)
    saved["m"]["dense.weight"] = saved["m"]["dense.weight"].T
    with pytest.raises(
        CorruptError, match=r"dense\.weight has shape \(7, 11\), expected \(11, 7\)"
    ):
        adam.load(saved)


def test_bf16_copies_follow_the_float32_masters() -> None:
    module = net()
    adam = Adam(module, OptimConfig(), working_dtype=torch.bfloat16)
    assert module.dense.weight.dtype == module.w.bias.dtype == torch.bfloat16
    assert module.word.weight.dtype == module.norm.weight.dtype == torch.float32

    def assert_refreshed() -> None:
        for name, master in adam.state()["model"].items():
            assert master.dtype == torch.float32
            parameter = module.get_parameter(name)
            assert torch.equal(parameter, master.to(parameter.dtype))

    assert_refreshed()
    grads = gradients(module, 0)
    small = {
        n: g.bfloat16() if "norm" not in n and "word" not in n else g for n, g in grads.items()
    }
    apply(adam, small, 1e-6, 0)
    assert_refreshed()
    # A step too small for bfloat16 is not lost: the master has moved.
    assert not torch.equal(adam.state()["model"]["dense.weight"], net().dense.weight)
    moved = module.dense.weight.clone()
    apply(adam, small, 0.1, 1)
    assert_refreshed()
    assert not torch.equal(module.dense.weight, moved)
    adam.load({"model": {n: t + 1 for n, t in snapshot(adam)["model"].items()}})
    assert_refreshed()


# ---------------------------------------------------------------------- learning rate


def rate(config: OptimConfig, step: int, total: int) -> float:
    return learning_rate(config, step, step / total, total)


THEN = OptimConfig(learning_rate=1.0, warmup_steps=10)
TIMES = dataclasses.replace(THEN, schedule="times")
COSINE = dataclasses.replace(THEN, schedule="cosine")
WSD = dataclasses.replace(THEN, schedule="wsd", decay_percent=25.0)


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (55, 0.5), (99, 1 / 90)]
)
def test_then_rises_to_the_peak_and_falls_in_a_straight_line(step: int, expected: float) -> None:
    assert rate(THEN, step, 100) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0.0), (5, 0.95 * 0.5), (10, 0.9), (50, 0.5), (99, 0.01)]
)
def test_times_decays_from_the_first_step_on(step: int, expected: float) -> None:
    assert rate(TIMES, step, 100) == pytest.approx(expected)


def test_the_released_small_run_never_reaches_its_peak() -> None:
    config = OptimConfig(schedule="times")
    highest = max(rate(config, step, 1_000_000) for step in range(0, 20_001, 100))
    assert highest == pytest.approx(4.95e-4)


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0.1), (9, 1.0), (10, 1.0), (40, 0.75), (55, 0.5), (70, 0.25)]
)
def test_cosine_rises_and_falls_as_half_a_wave(step: int, expected: float) -> None:
    assert rate(COSINE, step, 100) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0.1), (9, 1.0), (50, 1.0), (75, 1.0), (85, 0.6), (99, 0.04)]
)
def test_wsd_stays_at_the_peak_until_its_decay(step: int, expected: float) -> None:
    assert rate(WSD, step, 100) == pytest.approx(expected)


def test_wsd_without_a_decay_stays_at_the_peak() -> None:
    assert rate(dataclasses.replace(WSD, decay_percent=0.0), 99, 100) == 1.0


@pytest.mark.parametrize("config", [THEN, TIMES, COSINE, WSD])
def test_the_rate_ends_at_zero(config: OptimConfig) -> None:
    assert learning_rate(config, 100, 1.0, 100) == 0.0
    assert learning_rate(config, 500, 5.0, 100) == 0.0


@pytest.mark.parametrize("schedule", ["then", "times", "cosine", "wsd"])
def test_a_percentage_of_the_run_can_be_the_warm_up(schedule: str) -> None:
    config = dataclasses.replace(THEN, schedule=schedule, warmup_steps=777, warmup_percent=10.0)
    plain = dataclasses.replace(config, warmup_steps=10, warmup_percent=None)
    for step in range(100):
        assert rate(config, step, 100) == pytest.approx(rate(plain, step, 100))


def test_no_warm_up_starts_at_the_peak() -> None:
    config = dataclasses.replace(THEN, warmup_steps=0)
    assert rate(config, 0, 100) == 1.0
    assert rate(dataclasses.replace(config, schedule="times"), 0, 100) == 1.0


def test_a_warm_up_longer_than_the_run_rises_to_the_end() -> None:
    config = dataclasses.replace(THEN, warmup_steps=200)
    rates = [rate(config, step, 100) for step in range(100)]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(0.5)


def test_the_clock_can_drive_the_decay() -> None:
    """Halfway through the minutes, with steps enough for a thousand times as long."""
    config = dataclasses.replace(THEN, warmup_percent=10.0)
    assert learning_rate(config, 500, 0.55, 500 / 0.55) == pytest.approx(0.5)
    assert learning_rate(config, 990, 0.99, 1000) == pytest.approx(0.01 / 0.9)
