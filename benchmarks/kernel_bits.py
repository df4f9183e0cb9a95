"""Does every kernel of electra/gpu/kernels give the same bits in every call?

    python benchmarks/kernel_bits.py [--seconds 4] [--only NAME ...] [--out FILE.json]
    TRITON_INTERPRET=1 python benchmarks/kernel_bits.py --small    without a GPU: three calls each

Before each call runs a large product of NaNs or of noise, which leaves its operands in shared
memory and registers: what a kernel reads before it was written shows. Thousands of calls, in a CUDA
graph, are compared on the device: a copy that overtakes a product goes wrong in one of thousands.
Calls that gave other bits are counted for every output; the exit code is 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from kernels import ENTRIES, Case, Config
from torch import Tensor

CALLS = 10  # in a graph
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(BITS[x.itemsize])


def call(case: Case, config: Config) -> list[Tensor]:
    """Of copies: some kernels work in place."""
    inputs = (x.clone() if isinstance(x, Tensor) else x for x in case.inputs)
    return [bits(x) for x in case.ours(*inputs, config=config)]


def other(found: list[Tensor], expected: list[Tensor]) -> Tensor:
    return torch.stack([(x != y).any() for x, y in zip(found, expected, strict=True)])


def repeat(case: Case, config: Config, seconds: float) -> tuple[int, list[int]]:
    """How many calls, and for every output how many of them gave other bits than the first."""
    expected = [x.clone() for x in call(case, config)]
    device = expected[0].device
    wrong = torch.zeros(len(expected), dtype=torch.int64, device=device)
    if device.type == "cpu":
        for _ in range(2):
            wrong += other(call(case, config), expected)
        return 3, wrong.tolist()
    noise = torch.randn(4096, 2048, dtype=torch.bfloat16, device=device)
    before = (noise, torch.full_like(noise, float("nan")))

    def calls() -> None:
        for i in range(CALLS):
            torch.mm(before[i % 2], before[i % 2].t())
            wrong.add_(other(call(case, config), expected))

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    wrong.zero_()
    many, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        many += 10 * CALLS
    return many, wrong.tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the bits of many calls of each kernel.")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each kernel")
    parser.add_argument("--only", nargs="*", default=list(ENTRIES), choices=list(ENTRIES))
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--out", type=Path, help="where to write the counts as JSON")
    a = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    like = {"device": device, "dtype": torch.bfloat16 if cuda else torch.float32}
    rows: list[dict[str, Any]] = []
    for name in a.only:
        entry = ENTRIES[name]
        config = next((c for c in entry.configs if c), {})  # an empty one is cuBLAS
        torch.manual_seed(0)
        case = entry.make(*(entry.small if a.small else entry.sizes[0]), like)
        many, wrong = repeat(case, config, a.seconds)
        rows.append({"entry": name, "calls": many, "other_bits": wrong})
        print(f"{name:<44} {many:>7} calls, other bits in {wrong} of them", flush=True)
    if a.out:
        where = torch.cuda.get_device_name() if cuda else "interpreter"
        record = {"device": where, "torch": torch.__version__, "seconds": a.seconds, "rows": rows}
        a.out.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(any(n for row in rows for n in row["other_bits"]))


if __name__ == "__main__":
    main()
