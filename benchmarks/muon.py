"""Muon's matrices made orthogonal: by rounds on x, and by rounds on Gram matrices.

    python benchmarks/muon.py [--recipe speedrun-5] [--out FILE.json]     on a GPU
    TRITON_INTERPRET=1 python benchmarks/muon.py --small                  without one, in float32

For each network, the stacks of its matrices, all of them in one call: 20 calls in a CUDA graph, the
median of five replays. Then the optimizer's whole step on the parameters of both, by rounds on x,
with Gram matrices (eager, and with its momentum compiled: as in training on a GPU) and with Adam
for all. Results are compared with the same five rounds in float64: the distance over the norm, the
largest singular value, and the smallest that was a hundredth of the largest before. Inputs have
singular values that fall over three decades. The table comes last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernels import CALLS, REPLAYS, microseconds
from torch import Tensor

from electra import optim
from electra.gpu import kernels
from electra.objectives import SpecialIds, build_objective
from electra.recipes import recipe

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
SMALL = {"layers": 1, "hidden_size": 64, "embedding_size": 64, "ffn_size": 96, "attention_heads": 1}
WORKING = torch.bfloat16 if CUDA else torch.float32
HALVES = (torch.bfloat16, torch.float16)
Way = Callable[[list[Tensor]], list[Tensor]]
Row = dict[str, Any]


def falling(n: int, rows: int, columns: int) -> Tensor:
    """Matrices whose singular values fall evenly, in decades, to a thousandth of the largest."""
    left, values, right = torch.linalg.svd(torch.randn(n, rows, columns), full_matrices=False)
    return (1e-4 * left * torch.logspace(0, -3, values.shape[1]) @ right).to(DEVICE)


def by_chip(us: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [kernels.orthogonal(u, dtype, optim.QUINTIC) for u in us]


def by_rounds(us: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [optim.orthogonal(u, dtype) for u in us]


def ways(us: list[Tensor]) -> dict[str, Way]:
    """The first is the optimizer's without Gram matrices; one after the other, where that has
    streams."""
    types = HALVES if CUDA else (torch.float32,)
    half = types[-1]
    found: dict[str, Way] = {
        f"rounds on x, {str(t).removeprefix('torch.')}": partial(by_rounds, dtype=t) for t in types
    }
    found["gram"] = partial(optim.orthogonal_by_gram, dtype=half)
    if kernels.available() and (CUDA or os.environ.get("TRITON_INTERPRET") == "1"):
        found["gram, symmetric"] = partial(optim.orthogonal_by_gram, dtype=half, kernel=True)
        if all(kernels.turns(u) for u in us):
            found["gram, on chip"] = partial(by_chip, dtype=half)
    return found


def truth(u: Tensor) -> tuple[Tensor, ...]:
    """The five rounds in float64, and what u consists of; on the CPU, where that takes seconds."""
    wide = u.double().cpu()
    left, values, right = torch.linalg.svd(wide, full_matrices=False)
    large = values > 0.01 * values[:, :1]
    return optim.orthogonal(wide, torch.float64), left, large, right


def compare(exact: list[tuple[Tensor, ...]], found: list[Tensor]) -> Row:
    distance, largest, smallest = 0.0, 0.0, float("inf")
    for (wanted, left, large, right), given in zip(exact, found, strict=True):
        o = given.double().cpu()
        apart = (o - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)
        lifted = (left.mT @ o @ right.mT).diagonal(dim1=1, dim2=2)
        distance = max(distance, float(apart.max()))
        largest = max(largest, float(torch.linalg.matrix_norm(o, 2).max()))
        smallest = min(smallest, float(lifted[large].min()))
    return {"distance": distance, "largest": largest, "smallest": smallest}


def timed(call: Callable[[], Any]) -> float:
    """Microseconds; without a GPU, of calls one by one."""
    if CUDA:
        return microseconds(call)
    times: list[float] = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def attempt(what: tuple[str, str], work: Callable[[], Row]) -> Row:
    """One way that fails does not hide the others."""
    row: Row = {"part": what[0], "way": what[1]}
    try:
        row |= work()
    except Exception as error:
        row["failed"] = (
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
    print(row, flush=True)
    return row


def networks(name: str, small: bool) -> tuple[Any, torch.nn.Module]:
    config = recipe(name)
    if small:
        config = replace(config, encoder=replace(config.encoder, **SMALL))
        config = replace(config, generator=replace(config.generator, width=0.5))
    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    return config.optim, build_objective(config, 100 if small else 30522, special).to(DEVICE)


def stacks(module: torch.nn.Module, settings: Any) -> dict[int, list[Tensor]]:
    """Of each network, by its smaller side: matrices of the shapes and numbers it has."""
    adam = optim.Adam(module, settings)
    shapes = Counter(p.shape for family in adam._families for stack in family for p in stack.ps)
    found: dict[int, list[Tensor]] = {}
    for shape, n in shapes.items():
        found.setdefault(min(shape), []).append(falling(n, *shape))
    return found


def step(module: torch.nn.Module, settings: Any, *, gram: bool, compiled: bool) -> Row:
    """Of the optimizer alone, on gradients that are given. They change as it uses them up."""
    before, optim.by_gram = optim.by_gram, lambda _: gram
    try:
        adam = optim.Adam(module, settings, working_dtype=WORKING, kernel=CUDA)
    finally:
        optim.by_gram = before
    if compiled:
        adam.judge = torch.compile(adam.judge_norm, fullgraph=True, dynamic=False)
        if gram:
            adam.momentum = torch.compile(adam.nesterov, fullgraph=True, dynamic=False)
    grads = [1e-3 * torch.randn_like(parameter) for parameter in adam.parameters]
    adam.accumulate(grads, first=True)
    lr, number = torch.tensor([1e-4], device=DEVICE), torch.tensor(0, device=DEVICE)
    adam.step(lr, number)  # compiles
    return {"microseconds": timed(lambda: adam.step(lr, number))}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time Muon's ways and compare them with float64.")
    parser.add_argument("--recipe", default="speedrun-5")
    parser.add_argument("--small", action="store_true", help="one narrow layer")
    parser.add_argument("--out", type=Path, help="where to write the rows as JSON")
    a = parser.parse_args()
    torch.manual_seed(0)
    settings, module = networks(a.recipe, a.small)
    settings = replace(settings, kind="muon")
    rows: list[Row] = []
    for side, us in stacks(module, settings).items():
        title = f"side {side}: " + ", ".join(str(tuple(u.shape)) for u in us)
        exact = [truth(u) for u in us]
        for name, way in ways(us).items():

            def work(way: Way = way, us: list[Tensor] = us, exact: Any = exact) -> Row:
                row = compare(exact, way(us))
                return {"microseconds": timed(lambda: way(us)), **row}

            rows.append(attempt((title, name), work))
    for compiled in (False, True) if CUDA else (False,):
        for kind, gram in (("adam", False), ("muon", False), ("muon", True))[: 3 if CUDA else 2]:
            name = kind + ", gram" * gram + ", compiled" * compiled
            made = replace(settings, kind=kind)
            run = partial(step, module, made, gram=gram, compiled=compiled)
            rows.append(attempt(("optimizer's step", name), run))
    print(f"\n{'way':<28} {'µs':>9} {'distance':>9} {'smallest':>9} {'largest':>9}")
    part = ""
    for row in rows:
        if row["part"] != part:
            part = row["part"]
            print(part)
        values = (row.get(key) for key in ("microseconds", "distance", "smallest", "largest"))
        said = " ".join(
            f"{'' if v is None else f'{v:{how}}':>9}"
            for v, how in zip(values, (".1f", ".1e", ".3f", ".3f"), strict=True)
        )
        print(f"  {row['way']:<26} {row.get('failed', said)}")
    if a.out:
        where = torch.cuda.get_device_name() if CUDA else "CPU"
        record = {"device": where, "torch": torch.__version__, "recipe": a.recipe}
        record |= {"calls": CALLS, "replays": REPLAYS, "rows": rows}
        a.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
