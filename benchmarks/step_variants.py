"""Where the time of a training step goes, and what compiler settings make of it.

    python benchmarks/step_variants.py --corpus CORPUS --out OUT --variants plain gemm pointwise

Every variant is a process of its own: they compile side by side, and when all have, take turns on
the device by a lock to measure. A variant is settings of the run (dotted, as on the command line),
of torch's inductor, and values of the package's modules (`set`), where a way that is not measured
yet can have a switch; by its values it has a folder of compiled code of its own, since torch's key
does not know what our operators are made of. The table at the end has tokens per second, memory,
the seconds until the first step, and the mean loss of the first steps, which are the same for all
variants of a batch with the same dropout (the paper's in those called so, else none): they have to
agree to about a thousandth. With `--profile` it has the kernels by kind of what is called plain and
of all variants of own kernels.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from electra import runtime as runtimes
from electra.batches import Batches
from electra.config import PretrainConfig, from_dict, to_dict
from electra.data.corpus import Corpus
from electra.flops import matmul_flops_per_token
from electra.micro_batch import device_errors
from electra.objectives import SpecialIds, build_objective
from electra.recipes import recipe
from electra.trainer import Meter, Trainer

CACHE = "TORCHINDUCTOR_CACHE_DIR"
TOGETHER = "STEP_VARIANTS_TOGETHER"  # how many processes were started
FIRST = 64  # steps whose losses are compared
GEMM = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON"}
KERNELS = {"run.kernels": "yes"}
PAPER = {"encoder.dropout": 0.1, "encoder.attention_dropout": 0.1}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "kernels": {"settings": KERNELS},
    "kept": {"settings": KERNELS, "set": {"fused.KEPT": 2**40}},
    "computed again": {"settings": KERNELS, "set": {"fused.KEPT": 0}},
    "plain": {},
    "dropout kernels": {"settings": {**KERNELS, **PAPER}, "set": {"fused.DROPOUT": True}},
    "dropout plain": {"settings": PAPER},
    "muon": {"settings": {**KERNELS, "optim.kind": "muon"}},
    "gemm": {"inductor": GEMM},
    "pointwise": {"inductor": {"max_autotune_pointwise": True, "coordinate_descent_tuning": True}},
    "combo": {"inductor": {"combo_kernels": True}},
    "all": {"inductor": {**GEMM, "max_autotune_pointwise": True, "combo_kernels": True}},
    "generator 6 x 128": {"settings": {"generator.width": 0.5, "generator.depth": 0.5}},
    "flash": {"attention": {"backend": "FLASH_ATTENTION"}},
    "cudnn": {"attention": {"backend": "CUDNN_ATTENTION"}},
    "efficient": {"attention": {"backend": "EFFICIENT_ATTENTION"}},
}
# The first that fits a kernel's name.
KINDS = {
    "attention": r"attention|flash|fmha|sdpa|cudnn.*(fprop|bprop|sdpa)",
    "matrix product": r"gemm|nvjet|cutlass|cublas|xmma|addmm|_mm|splitK",
    "optimizer": r"adam|multi_tensor|foreach",
    "layer norm": r"layer_norm|native_layer",
    "gelu": r"gelu|erf",
    "softmax, sampling": r"softmax|exp|cumsum|argmax|amax",
    "embedding": r"embedding|index|scatter|gather",
    "other": r"",
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    corpus: Path
    """A prepared corpus; one with short rows is timed with its attention mask."""
    out: Path
    """Folder for step_variants.json."""
    recipe: str = "small"
    batch: tuple[int, ...] = (128,)
    variants: tuple[str, ...] = tuple(VARIANTS)
    rounds: int = 3
    seconds: float = 3.0
    profile: bool = False
    """Also list the kernels of a step."""
    child: tuple[str, int] | None = None
    """Used by the program itself."""


def main() -> None:
    a = tyro.cli(Arguments)
    a.out.mkdir(parents=True, exist_ok=True)
    if a.child:
        name, batch = a.child
        (a.out / f"{name} {batch}.json").write_text(json.dumps(measure(a, name, batch), indent=1))
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--child"]
    for old in a.out.glob("*.ready"):
        old.unlink()
    many = str(len(a.batch) * len(a.variants))
    children: dict[str, subprocess.Popen[bytes]] = {}
    for batch in a.batch:
        for name in a.variants:
            with open(a.out / f"{name} {batch}.log", "w") as log:
                children[f"{name} {batch}"] = subprocess.Popen(
                    [*command, name, str(batch)],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {TOGETHER: many},
                )
    while running := [c for c in children.values() if c.poll() is None]:
        for child in children.values():
            if child not in running:  # nobody waits for one that failed
                (a.out / f"{child.pid}.ready").touch()
        time.sleep(0.2)
    rows: list[dict[str, Any]] = []
    for name, child in children.items():
        if child.wait() == 0:
            rows.append(json.loads((a.out / f"{name}.json").read_bytes()))
        else:
            last = (a.out / f"{name}.log").read_text().strip().splitlines()[-1:]
            rows.append({"variant": name, "failed": last})
    (a.out / "step_variants.json").write_text(json.dumps(rows, indent=1))
    print(
        f"{'variant':26} {'batch':>6} {'tokens/s':>11} {'from':>11} {'to':>11} {'ms':>7} {'GiB':>6}"
        f" {'MFU':>6} {'ready':>6} {'mlm':>8} {'disc':>8} {'norm':>7}"
    )
    for row in rows:
        if "failed" in row:
            print(f"{row['variant']:26} failed: {row['failed']}")
            continue
        least, *_, most = rates = sorted(row["tokens_per_second"])
        best = rates[len(rates) // 2]
        tokens = row["batch"] * row["config"]["data"]["sequence_length"]
        first = row["first_losses"]
        print(
            f"{row['variant']:26} {row['batch']:>6} {best:11,.0f} {least:11,.0f} {most:11,.0f}"
            f" {1000 * tokens / best:7.3f} {row.get('peak_memory_gib', 0):6.2f}"
            f" {best * row['share']:6.1%} {row['ready_seconds']:4.0f} s"
            f" {first['mlm']:8.4f} {first['disc']:8.5f} {first['norm']:7.3f}"
        )
    for row in rows:
        if "kinds" not in row:
            continue
        times, counts = zip(*row["kinds"].values(), strict=True)
        print(f"{row['variant']} {row['batch']}: {sum(times):.3f} ms in {sum(counts):.0f} kernels")
        for kind, (milliseconds, count) in row["kinds"].items():
            print(f"  {kind:20} {milliseconds:8.3f} ms in {count:5.0f} kernels")
        for name, milliseconds in row.get("kernels", []):
            print(f"    {milliseconds:8.3f} ms  {name[:110]}")


def measure(a: Arguments, name: str, batch: int) -> dict[str, Any]:
    """Build the step of a variant and time it alone on the device."""
    variant = VARIANTS[name]
    import torch._inductor.config as inductor

    for key, value in variant.get("inductor", {}).items():
        setattr(inductor, key, value)
    for path, value in variant.get("set", {}).items():
        put(path, value)
    corpus = Corpus.open(a.corpus)
    config = changed(
        recipe(a.recipe),
        {
            "encoder.dropout": 0.0,
            "encoder.attention_dropout": 0.0,
            "data.batch_size": batch,
            "run.kernels": "no",
            **variant.get("settings", {}),
        },
    )
    runtime = runtimes.start(config.run)
    os.environ[CACHE] = cache_of(os.environ[CACHE], variant.get("set", {}))
    backend = variant.get("attention", {}).get("backend")
    if backend:
        for other in ("flash", "mem_efficient", "math", "cudnn"):
            short = {"flash": "FLASH", "mem_efficient": "EFFICIENT", "cudnn": "CUDNN"}
            on = short.get(other, "MATH") in backend
            getattr(torch.backends.cuda, f"enable_{other}_sdp")(on)
    look = a.profile and ("plain" in name or "run.kernels" in variant.get("settings", {}))
    row = timed(config, corpus, runtime, a.out, a.rounds, a.seconds, profile=look, first=FIRST)
    return {"variant": name, "batch": batch, **row}


def cache_of(folder: str, values: dict[str, Any]) -> str:
    """Where to keep what is compiled with these values of the package's modules."""
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    return f"{folder}/{digest[:16]}" if values else folder


def put(path: str, value: Any) -> None:
    """Set a value of a module of the package. Settings of a kernel change in place: functions have
    them as defaults."""
    module, *names, last = path.split(".")
    folder = "electra.gpu" if module in ("fused", "kernels") else "electra"
    holder: Any = importlib.import_module(f"{folder}.{module}")
    for name in names:
        holder = holder[name] if isinstance(holder, dict) else getattr(holder, name)
    old = holder[last] if isinstance(holder, dict) else getattr(holder, last)
    if isinstance(old, dict):
        old.update(value)
    else:
        assert type(old) is type(value), (path, old, value)
        setattr(holder, last, value)


def timed(
    config: PretrainConfig,
    corpus: Corpus,
    runtime: runtimes.Runtime,
    out: Path,
    rounds: int,
    seconds: float,
    *,
    profile: bool = False,
    first: int = 1,
) -> dict[str, Any]:
    """Compile the step beside others, make the `first` steps, then time it alone on the device."""
    begin = time.perf_counter()
    batches = Batches(corpus.train, config, runtime)
    special = SpecialIds(**corpus.special_ids)
    objective = build_objective(config, corpus.vocab_size, special, padded=batches.padded)
    trainer = Trainer(objective.to(runtime.device), batches, config, runtime)
    done = 0

    def steps(count: int) -> float:
        """Seconds that `count` steps take."""
        nonlocal done
        start = time.perf_counter()
        for _ in range(count):
            if trainer.needs_block:
                trainer.load_block(done, [1e-4] * trainer.block_steps)
            trainer.step()
            done += 1
        if runtime.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    with device_errors(lambda: trainer):
        trainer.record()
        steps(first)
    sums = dict(zip(Meter.FIELDS, trainer.meter.sums.tolist(), strict=True))
    row: dict[str, Any] = {
        "padded": batches.padded,
        "own_kernels": trainer.has_kernels,
        "ready_seconds": time.perf_counter() - begin,
        "first_losses": {name: sums[name] / first for name in ("mlm", "disc", "norm", "steps")},
        "config": to_dict(config),
        "environment": runtime.describe(),
    }
    if runtime.device.type == "cuda":
        row["peak_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    with alone(out):
        peak = runtimes.matmul_rate(runtime.device, runtime.dtype)
        row["share"] = matmul_flops_per_token(config, corpus.vocab_size) / peak
        at_once = min(10, max(1, int(seconds / 4 / steps(1))))  # between two looks at the clock
        rates: list[float] = []
        for _ in range(rounds):
            steps(min(3, at_once))
            start, before = time.perf_counter(), done
            while time.perf_counter() - start < seconds:
                steps(at_once)
            rates.append((done - before) * config.tokens_per_step / (time.perf_counter() - start))
        row["tokens_per_second"] = rates
        if profile:
            row |= kernels(lambda: steps(10), 10)
    return row


def kernels(work: Any, steps: int) -> dict[str, Any]:
    """Milliseconds of a step by kind of kernel, and the 25 kernels that take most."""
    with torch.profiler.profile() as profile:
        work()
    time_of, count_of = Counter[str](), Counter[str]()
    for event in profile.events() or []:
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if on_gpu or not torch.cuda.is_available():
            time_of[event.name] += (
                event.device_time if on_gpu else event.self_cpu_time_total
            ) / 1e3
            count_of[event.name] += 1
    kinds: dict[str, list[float]] = {kind: [0.0, 0.0] for kind in KINDS}
    for name, milliseconds in time_of.items():
        kind = next(k for k, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
        kinds[kind][0] += milliseconds / steps
        kinds[kind][1] += count_of[name] / steps
    top = [(name, milliseconds / steps) for name, milliseconds in time_of.most_common(25)]
    return {"kinds": kinds, "kernels": top}


def changed(config: PretrainConfig, settings: dict[str, Any]) -> PretrainConfig:
    values = to_dict(config)
    for name, value in settings.items():
        group, field = name.split(".")
        values[group][field] = value
    return from_dict(PretrainConfig, values, where="variant")


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """One variant at a time on the device, once no other one keeps the cores busy."""
    (out / f"{os.getpid()}.ready").touch()
    while len(list(out.glob("*.ready"))) < int(os.environ.get(TOGETHER, "1")):
        time.sleep(0.2)
    with open(out / "device.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
