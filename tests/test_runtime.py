"""How float32 products are computed on AMD's processors: faster, the same numbers, and put back."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from electra import runtime as runtimes
from electra.config import EncoderConfig, RunConfig
from electra.encoder import Block, initialise
from electra.runtime import _WholeVectors, whole_vectors

AMD = "vendor_id : AuthenticAMD\nflags : fpu avx512f avx512_bf16 sse4a\n"


def precision() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision


def paying(pays: bool = True) -> _WholeVectors:
    vectors = _WholeVectors()
    vectors.__dict__["pay"] = pays  # the cached answer of another processor
    return vectors


def told(monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    def read(self: Path, **_: object) -> str:
        assert str(self) == "/proc/cpuinfo"
        if text is None:
            raise FileNotFoundError
        return text

    monkeypatch.setattr(Path, "read_text", read)


def test_blocks_nest_and_the_last_one_puts_the_setting_back() -> None:
    vectors, before = paying(), precision()
    with vectors:
        with vectors:
            assert precision() == "bf16"
        assert precision() == "bf16"
        assert vectors.active
    assert precision() == before
    assert not vectors.active


def test_an_error_inside_puts_the_setting_back() -> None:
    vectors, before = paying(), precision()
    with contextlib.suppress(ZeroDivisionError), vectors:
        _ = 1 / 0
    assert precision() == before


def test_a_thread_that_ends_leaves_the_others_what_they_have() -> None:
    vectors, before, inside, done = paying(), precision(), threading.Event(), threading.Event()
    seen: list[str] = []

    def other() -> None:
        with vectors:
            inside.set()
            done.wait(20)
        seen.append(precision())

    thread = threading.Thread(target=other)
    with vectors:
        thread.start()
        assert inside.wait(20)
        done.set()
        thread.join()
        assert seen == ["bf16"]
    assert precision() == before


def test_where_it_does_not_pay_nothing_is_set() -> None:
    vectors, before = paying(False), precision()
    with vectors:
        assert precision() == before
        assert not vectors.active
    assert precision() == before


@pytest.mark.parametrize(
    "text",
    [
        AMD.replace("AuthenticAMD", "GenuineIntel"),
        AMD.replace(" avx512f", ""),
        AMD + "flags : amx_tile\n",
        None,
    ],
    ids=["another maker", "half the width", "a faster unit for bfloat16", "no answer"],
)
def test_only_processors_known_for_it_are_tried(
    monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    told(monkeypatch, text)
    assert not _WholeVectors().pay


def test_products_that_are_not_those_of_float32_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a later oneDNN might compute them, which takes the permission at its word."""
    told(monkeypatch, AMD)
    before, exact = precision(), Tensor.__matmul__

    def coarse(a: Tensor, b: Tensor) -> Tensor:
        narrow = precision() == "bf16" and a.dtype == torch.float32
        return exact(a.bfloat16().float(), b.bfloat16().float()) if narrow else exact(a, b)

    monkeypatch.setattr(Tensor, "__matmul__", coarse)
    assert not _WholeVectors().pay
    monkeypatch.setattr(Tensor, "__matmul__", exact)
    assert precision() == before


def test_here_its_products_are_those_of_float32() -> None:
    """Of all shapes of a layer, or it is off."""
    draw = torch.Generator().manual_seed(0)
    with whole_vectors:
        for n, k, m in ((2048, 256, 768), (2048, 1024, 256), (304, 128, 30522), (7, 64, 5)):
            a, b = (torch.randn(*s, generator=draw) for s in ((n, k), (k, m)))
            exact = a.double() @ b.double()
            for product in (a @ b, torch.addmm(torch.zeros(m), a, b)):
                assert (product - exact).norm() < 1e-6 * exact.norm()


def test_a_run_begins_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "whole_vectors", paying())
    before = precision()
    runtime = runtimes.start(RunConfig(device="cpu"))
    try:
        assert precision() == "bf16"
    finally:
        runtime.leave()
    assert precision() == before


@pytest.mark.parametrize("padded", [False, True])
def test_attention_written_out_is_torchs(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EncoderConfig(layers=1, hidden_size=32, ffn_size=64, attention_heads=2, dropout=0.0)
    block = Block(config, site=0)
    initialise(block, "paper", seed=0)
    h = torch.randn(3, 9, 32, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, 1, 1, 9, dtype=torch.bool)
    if padded:
        mask[1, ..., 4:] = False
    ways: list[Tensor] = []
    for vectors in (paying(False), paying()):
        monkeypatch.setattr("electra.encoder.whole_vectors", vectors)
        with vectors:
            ways.append(block.attend(h, mask if padded else None, None))
    assert not torch.equal(*ways)  # two ways indeed
    torch.testing.assert_close(*ways, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["bf16", "meta"])
def test_attention_of_other_types_and_devices_stays_torchs(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written out it would round its scores to bf16; on a GPU it would only be slower."""
    config = EncoderConfig(layers=1, hidden_size=32, ffn_size=64, attention_heads=2)
    block, h = Block(config, site=0), torch.zeros(3, 9, 32)
    block, h = (each.bfloat16() if kind == "bf16" else each.to("meta") for each in (block, h))
    torchs, calls = torch.nn.functional.scaled_dot_product_attention, list[str]()

    def watched(*given: Any, **how: Any) -> Tensor:
        calls.append(kind)
        return torchs(*given, **how) if kind == "meta" else given[0]  # bf16 kills some CPUs

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", watched)
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, w, *_: x.new_zeros(*x.shape[:-1], len(w))
    )
    vectors = paying()
    monkeypatch.setattr("electra.encoder.whole_vectors", vectors)
    with vectors:
        block.attend(h, None, None)
    assert calls == [kind]


def test_a_run_that_leaves_puts_everything_back() -> None:
    threads, filled = torch.get_num_threads(), torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        runtimes.start(RunConfig(device="cpu", deterministic=True, threads=threads + 1)).leave()
        assert torch.get_num_threads() == threads
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.utils.deterministic.fill_uninitialized_memory == filled  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        torch.use_deterministic_algorithms(False)
