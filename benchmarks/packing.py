"""What sharing rows saves: tokens of text per second of CPU time, padded and packed.

    electra prepare --input TEXT --tokenizer TOKENIZER --short-percent 20 --out CORPUS
    python benchmarks/packing.py --corpora CORPUS [CORPUS ...] --out results/speed/packing_cpu.json

Whole optimizer steps of a recipe without dropout, one Trainer per way, all in one process,
interleaved in rounds. Padding is no text. On a CPU the clock is the CPU time of the process, which
other work on the machine disturbs least.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from electra import runtime as runtimes
from electra.batches import Batches
from electra.config import PretrainConfig
from electra.data.corpus import Corpus
from electra.objectives import SpecialIds, build_objective
from electra.recipes import recipe
from electra.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Arguments:
    corpora: tuple[Path, ...]
    """Prepared corpora, of the recipe's length or shorter."""
    out: Path
    """The JSON record."""
    recipe: str = "small"
    batch: int = 16
    """Rows of a step."""
    examples_per_row: tuple[int, ...] = (1, 4)
    rounds: int = 5
    steps: int = 2
    """Steps of one way in a round."""


def trainer_of(config: PretrainConfig, corpus: Corpus, runtime: runtimes.Runtime) -> Trainer:
    batches = Batches(corpus.train, config, runtime)
    special = SpecialIds(**corpus.special_ids)
    objective = build_objective(config, corpus.vocab_size, special, padded=batches.padded)
    trainer = Trainer(objective.to(runtime.device), batches, config, runtime)
    trainer.record()
    return trainer


def seconds(runtime: runtimes.Runtime) -> float:
    if runtime.device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def main() -> None:
    a = tyro.cli(Arguments)
    base = recipe(a.recipe)
    base = dataclasses.replace(
        base, encoder=dataclasses.replace(base.encoder, dropout=0.0, attention_dropout=0.0)
    )
    runtime = runtimes.start(base.run)
    load, rows = os.getloadavg(), list[dict[str, Any]]()
    for path in a.corpora:
        corpus = Corpus.open(path)
        trainers: dict[int, Trainer] = {}
        for most in a.examples_per_row:
            data = dataclasses.replace(
                base.data,
                sequence_length=corpus.sequence_length,
                batch_size=a.batch,
                examples_per_row=most,
            )
            trainers[most] = trainer_of(dataclasses.replace(base, data=data), corpus, runtime)
        rates: dict[int, list[float]] = {most: [] for most in trainers}
        tokens = dict.fromkeys(trainers, 0.0)
        for number in range(a.rounds + 1):  # the first one warms up
            for most, trainer in trainers.items():
                begin, seen = seconds(runtime), 0.0
                for _ in range(a.steps):
                    if trainer.needs_block:
                        trainer.load_block(int(trainer.counter), [1e-4] * trainer.block_steps)
                    trainer.step()
                used = seconds(runtime) - begin
                seen = float(trainer.meter.sums[trainer.meter.FIELDS.index("tokens")])
                trainer.meter.sums.zero_()
                if number:
                    rates[most].append(seen / used)
                    tokens[most] += seen
        room = a.rounds * a.steps * a.batch * corpus.sequence_length
        settings = corpus.manifest.settings
        for most, values in rates.items():
            rows.append(
                {
                    "corpus": {name: settings[name] for name in ("builder", "short_percent")},
                    "padding_of_corpus": corpus.manifest.padding_share("train"),
                    "examples_per_row": most,
                    "padding": 1 - tokens[most] / room,
                    "tokens_per_second_median": statistics.median(values),
                    "tokens_per_second_all": values,
                    "times_padded": statistics.median(
                        x / y for x, y in zip(values, rates[a.examples_per_row[0]], strict=True)
                    ),
                }
            )
    clock = "CPU time of the process" if runtime.device.type == "cpu" else "wall time"
    record = {
        "what": f"tokens of text per second of whole pre-training steps, {clock}",
        "recipe": a.recipe,
        "batch": a.batch,
        "rows": rows,
        "rounds": a.rounds,
        "steps_per_round": a.steps,
        "load_average": {"before": load, "after": os.getloadavg()},
        "environment": runtime.describe(),
    }
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps(record, indent=1))
    print(f"{'corpus':28} {'examples a row':>14} {'padding':>8} {'tokens/s':>10} {'ratio':>6}")
    for row in rows:
        name = f"{row['corpus']['builder']}, short {row['corpus']['short_percent']:g} %"
        print(
            f"{name:28} {row['examples_per_row']:>14} {row['padding']:8.2%}"
            f" {row['tokens_per_second_median']:10,.0f} {row['times_padded']:6.3f}"
        )


if __name__ == "__main__":
    main()
