"""How the cost of a training step grows with length, batch, depth, width and size of the model.

    python benchmarks/growth.py --text TEXT --tokenizer vocab.txt --out OUT
    python benchmarks/growth.py --text TEXT --tokenizer vocab.txt --out OUT --small   # on a CPU

Comes in: some text, of which a corpus of each length is made, without short rows. Goes out: a table
for each of `TABLES`, and OUT/growth.json with every round, the settings and the machine. All rows
but `sizes` are recipe `small` with one thing changed, around 512 sequences of 128 tokens; dropout
is 0. What OUT already holds of corpora and rows is used as it is.

Every row is a process of its own, as in step_variants.py: they compile side by side, as many as
`jobs` and the device's memory allow, and take turns by a lock when they measure; rounds that the
first steps of another row disturbed show in the spread. A row stands in several tables where they
meet, and is measured once. `growth` is tokens/s over those of the row before; `1/FLOPs` is what it
would be if only matrix products counted. `predicted` is what `electra plan` says of this device.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import tyro
from step_variants import changed, timed

from electra import runtime as runtimes
from electra.config import PretrainConfig
from electra.data.corpus import Corpus, prepare
from electra.data.text import TextStats, expand_inputs, read_documents
from electra.data.tokenizer import Tokenizer
from electra.errors import ElectraError
from electra.flops import matmul_flops_per_token
from electra.gpu.fused import LONGEST
from electra.recipes import recipe
from electra.studies.plan import make_plan
from electra.studies.roofline import DEVICES, Device, Model

Table = Literal["length", "batch", "layers", "width", "sizes"]
TABLES: tuple[Table, ...] = get_args(Table)
TOKENS = 65_536  # of a step, where the batch is not what changes
ROOM = 0.85  # of the device's memory, for all processes on it together


@dataclass(frozen=True, kw_only=True)
class Arguments:
    text: tuple[str, ...]
    """Text files, as for `electra prepare`."""
    tokenizer: Path
    out: Path
    """Folder for growth.json, the corpora and a log of every row."""
    only: tuple[Table, ...] = TABLES
    megabytes: float = 4.0
    """Of text that are read."""
    rounds: int = 5
    seconds: float = 1.0
    jobs: int = 8
    """Processes that compile at once."""
    small: bool = False
    """Tiny sizes, to try the program on a CPU."""
    child: str | None = None
    """Used by the program itself."""


@dataclass(frozen=True)
class Row:
    label: str
    recipe: str = "small"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> PretrainConfig:
        none = {"encoder.dropout": 0.0, "encoder.attention_dropout": 0.0}
        return changed(recipe(self.recipe), {**none, **self.settings})

    @property
    def name(self) -> str:
        """Equal for equal settings, in whatever table."""
        c = self.config
        parts = (c.data.sequence_length, c.data.batch_size, c.encoder.layers, c.encoder.hidden_size)
        return f"{self.recipe}-" + "x".join(map(str, parts))


def rows_of(table: Table, *, small: bool) -> list[Row]:
    tokens, T, D = (256, 32, 64) if small else (TOKENS, 128, 256)
    least = {"encoder.hidden_size": 64, "encoder.ffn_size": 256, "encoder.attention_heads": 1}
    shared = {**least, "encoder.layers": 2} if small else {}

    def row(value: int, settings: dict[str, Any]) -> Row:
        length = {"data.sequence_length": T, "data.batch_size": tokens // T}
        return Row(f"{table} {value}", settings={**shared, **length, **settings})

    if table == "length":
        return [
            row(
                n,
                {
                    "data.sequence_length": n,
                    "data.batch_size": tokens // n,
                    "encoder.max_positions": max(512, n),
                },
            )
            for n in ((32, 64) if small else (128, 256, 512, 1024, 2048))
        ]
    if table == "batch":
        sizes = (4, 8) if small else (32, 128, 512, 1024, 2048, 4096)
        return [row(n, {"data.batch_size": n}) for n in sizes]
    if table == "layers":
        return [row(n, {"encoder.layers": n}) for n in ((1, 2) if small else (3, 6, 12, 24))]
    if table == "width":
        return [
            row(
                n,
                {
                    "encoder.hidden_size": n,
                    "encoder.ffn_size": 4 * n,
                    "encoder.attention_heads": n // 64,
                },
            )
            for n in ((D, 2 * D) if small else (128, 256, 512, 1024))
        ]
    sizes_at = {"tiny": (4, 8)} if small else {"base": (32, 128), "large": (16, 64)}
    short = {"data.sequence_length": 32} if small else {}
    return [
        Row(f"{name}, batch {n}", name, {**short, "data.batch_size": n})
        for name, batches in sizes_at.items()
        for n in batches
    ]


def main() -> None:
    a = tyro.cli(Arguments)
    tables = {table: rows_of(table, small=a.small) for table in a.only}
    rows = {row.name: row for table in tables.values() for row in table}
    if a.child:
        (a.out / f"{a.child}.json").write_text(json.dumps(measure(a, rows[a.child])))
        return
    begin = time.perf_counter()
    a.out.mkdir(parents=True, exist_ok=True)
    prepare_all(a, {row.config.data.sequence_length for row in rows.values()})
    measured = measure_all(a, rows)
    for name, row in rows.items():
        add_figures(measured[name], row)
    record = {
        "what": "tokens per second of the whole pre-training step, dropout 0",
        "tables": {t: [[row.label, row.name] for row in table] for t, table in tables.items()},
        "rows": measured,
        "rounds": a.rounds,
        "seconds_per_round": a.seconds,
        "seconds_in_all": time.perf_counter() - begin,
    }
    (a.out / "growth.json").write_text(json.dumps(record, indent=1))
    for table in tables.values():
        show([(row.label, measured[row.name]) for row in table])
    print(f"\n{len(rows)} rows in {record['seconds_in_all']:.0f} s")


def prepare_all(a: Arguments, lengths: set[int]) -> None:
    """A corpus of each length from the same text, unless it is there."""
    text = a.out / f"text-{a.megabytes:g}.txt"
    if not text.exists():
        size, taken = 0, []
        for document in read_documents(expand_inputs(a.text), stats=TextStats()):
            taken.append("\n".join(document.lines))
            size += len(taken[-1])
            if size >= 1e6 * a.megabytes:
                break
        text.write_text("\n\n".join(taken) + "\n", encoding="utf-8")
    tokenizer = Tokenizer.load(a.tokenizer)
    for n in sorted(lengths):
        out = a.out / f"corpus-{n}"
        prepare([text], tokenizer, out, sequence_length=n, short_percent=0, workers=1)


class Running(NamedTuple):
    process: subprocess.Popen[bytes]
    needs: float  # bytes


def measure_all(a: Arguments, rows: dict[str, Row]) -> dict[str, dict[str, Any]]:
    """Rows as their processes leave them; those that take longest to compile begin first."""
    vocab = Corpus.open(next(a.out.glob("corpus-*"))).vocab_size
    room = float("inf")
    if torch.cuda.is_available():
        room = ROOM * torch.cuda.get_device_properties(0).total_memory
    needs: dict[str, float] = {}
    for name, row in rows.items():
        plan = make_plan(row.config, vocab)
        batch = row.config.data.batch_size * plan.activation_bytes_per_sequence
        needs[name] = 1.3 * (plan.state_bytes + batch) + 2 * 2**30

    def compiling(name: str) -> tuple[bool, int]:  # own kernels are for short sequences
        return rows[name].config.data.sequence_length > LONGEST, rows[name].config.encoder.layers

    missing = [name for name in rows if not (a.out / f"{name}.json").exists()]
    waiting = sorted(missing, key=compiling, reverse=True)
    running: dict[str, Running] = {}
    while waiting or running:
        for name in list(waiting):
            used = sum(r.needs for r in running.values())
            if running and (len(running) >= a.jobs or used + needs[name] > room):
                continue
            waiting.remove(name)
            with open(a.out / f"{name}.log", "w") as log:
                command = [sys.executable, __file__, *sys.argv[1:], "--child", name]
                child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            running[name] = Running(child, needs[name])
        time.sleep(0.1)
        for name in [n for n, r in running.items() if r.process.poll() is not None]:
            print(f"{name}: exit {running.pop(name).process.returncode}", flush=True)
    return {name: outcome(a.out, name) for name in rows}


def outcome(out: Path, name: str) -> dict[str, Any]:
    if (out / f"{name}.json").exists():
        return json.loads((out / f"{name}.json").read_bytes())
    last = (out / f"{name}.log").read_text(errors="replace").strip().splitlines()[-1:]
    return {"failed": " ".join(last)}


def measure(a: Arguments, row: Row) -> dict[str, Any]:
    config = row.config
    corpus = Corpus.open(a.out / f"corpus-{config.data.sequence_length}")
    try:
        runtime = runtimes.start(config.run)
        result = timed(config, corpus, runtime, a.out, a.rounds, a.seconds)
    except ElectraError as error:  # no memory left, in most cases
        return {"failed": f"batch {config.data.batch_size}: {error.what}"}
    return {**result, "vocab_size": corpus.vocab_size}


def add_figures(result: dict[str, Any], row: Row) -> None:
    """What follows from what was measured."""
    if "failed" in result:
        return
    config, vocab = row.config, result["vocab_size"]
    rate = statistics.median(result["tokens_per_second"])
    device = device_of(result["environment"])
    model = Model(
        config=config, plan=make_plan(config, vocab), vocab_size=vocab, padded=result["padded"]
    )
    result |= {
        "tokens_per_second_median": rate,
        "milliseconds": 1e3 * config.tokens_per_step / rate,
        "flops_per_token": matmul_flops_per_token(config, vocab),
        "mfu_of_measured_matmul": rate * result.pop("share"),
        "predicted": model.rate(device) if device else None,
    }


def device_of(environment: dict[str, Any]) -> Device | None:
    """The one of roofline.py that was measured on, if it is known."""
    if environment["dtype"] == "float32" and environment["cuda_graph"] is False:
        return DEVICES["Xeon, 2 cores"]
    return next((d for name, d in DEVICES.items() if name in environment["device"]), None)


def show(rows: list[tuple[str, dict[str, Any]]]) -> None:
    head = ("tokens/s", 12), ("spread", 7), ("ms", 9), ("GiB", 7), ("MFU", 7), ("predicted", 11)
    head += ("off", 6), ("growth", 8), ("1/FLOPs", 8), ("kernels", 8), ("ready", 7)
    print(f"\n{'':18}" + "".join(f"{title:>{width}}" for title, width in head))
    before: dict[str, Any] | None = None
    for label, r in rows:
        if "failed" in r:
            print(f"{label:18} {r['failed']}")
            continue
        rates, rate = r["tokens_per_second"], r["tokens_per_second_median"]
        said, growth, ideal = r["predicted"], "-", "-"
        if before:
            growth = f"{rate / before['tokens_per_second_median']:.2f}"
            ideal = f"{before['flops_per_token'] / r['flops_per_token']:.2f}"
        print(
            f"{label:18}{rate:12,.0f}{(max(rates) - min(rates)) / rate:7.1%}"
            f"{r['milliseconds']:9,.1f}{r.get('peak_memory_gib', float('nan')):7.1f}"
            f"{r['mfu_of_measured_matmul']:7.1%}"
            + (f"{said:11,.0f}{said / rate - 1:+6.0%}" if said else f"{'-':>11}{'-':>6}")
            + f"{growth:>8}{ideal:>8}{'own' if r['own_kernels'] else 'torch':>8}"
            f"{r['ready_seconds']:6.0f}s" + ("  padded" if r["padded"] else "")
        )
        before = r


if __name__ == "__main__":
    main()
