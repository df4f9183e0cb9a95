"""Lines/s of `electra embed` against transformers, and sentence-transformers where it is installed.

    python benchmarks/embed_speed.py --input LINES.txt --out results/embed

One line of the input is one text. All arms read the same lines and the same weights, which are
those of --model or random ones in the shape of --recipe, and give the mean over a line's tokens;
how far they are apart is printed. Tokenizing counts, loading does not. Rounds are interleaved.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import tyro

from electra.data.text import read_lines
from electra.data.tokenizer import train_tokenizer
from electra.formats import hf_export
from electra.objectives import SpecialIds, build_objective
from electra.recipes import recipe
from electra.runtime import cpu_name
from electra.use.embed import Embedder, for_sentence_transformers

Arm = Callable[[list[str]], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    input: Path
    out: Path
    model: Path | None = None
    """A directory that transformers loads; default: random weights."""
    recipe: str = "small"
    lines: int = 2000
    """Drawn at random from the input."""
    length: int = 128
    batch: int = 32
    """Lines of a batch of transformers and sentence-transformers; ours counts tokens."""
    rounds: int = 3


def main() -> None:
    a = tyro.cli(Arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    every = [line for _, line in read_lines(a.input) if line.strip()]
    lines = random.Random(0).sample(every, min(a.lines, len(every)))
    with tempfile.TemporaryDirectory() as folder:
        model = a.model or _random_model(a.input, a.recipe, Path(folder))
        arms = _arms(a, model)
        first = {name: arm(lines[:64]) for name, arm in arms.items()}  # also warms up
        apart = {n: float(np.abs(v - first["electra embed"]).max()) for n, v in first.items()}
        rates: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(a.rounds):
            for name, arm in arms.items():
                begin = time.perf_counter()
                arm(lines)
                rates[name].append(len(lines) / (time.perf_counter() - begin))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    record = {
        "what": f"lines/s on {len(lines)} lines, median of {a.rounds} interleaved rounds",
        "lines_per_second": rates,
        "medians": medians,
        "times_faster": {n: medians["electra embed"] / rate for n, rate in medians.items()},
        "difference": apart,
        "characters_per_line": sum(map(len, lines)) / len(lines),
        "settings": {"recipe": a.recipe, "length": a.length, "batch": a.batch},
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / "embed_speed.json").write_text(json.dumps(record, indent=1))
    print(f"| arm | lines/s | electra embed is faster by | vectors differ by |\n{'|---' * 4}|")
    for name, rate in medians.items():
        print(
            f"| {name} | {rate:,.0f} | {medians['electra embed'] / rate:.2f} | {apart[name]:.1e} |"
        )
    print(f"load average {os.getloadavg()[0]:.1f}; above 1 the numbers are indicative only")


def _arms(a: Arguments, model: Path) -> dict[str, Arm]:
    embedder = Embedder(model, length=a.length)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    encoder: Any = transformers.AutoModel.from_pretrained(model).eval()

    @torch.inference_mode()
    def plain(lines: list[str]) -> np.ndarray:
        found = []
        for i in range(0, len(lines), a.batch):
            given = tokenizer(
                lines[i : i + a.batch],
                padding=True,
                truncation=True,
                max_length=a.length,
                return_tensors="pt",
            )
            h, mask = encoder(**given).last_hidden_state, given["attention_mask"][..., None]
            found.append(((h * mask).sum(1) / mask.sum(1)).numpy())
        return np.concatenate(found)

    def in_order(lines: list[str]) -> np.ndarray:
        order = np.argsort([len(line) for line in lines])
        return plain([lines[i] for i in order])[np.argsort(order)]

    arms: dict[str, Arm] = {
        "electra embed": lambda lines: np.concatenate([*embedder(lines)]),
        "transformers": plain,
        "transformers, sorted by length": in_order,
    }
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return arms
    whole = SentenceTransformer(str(model), device="cpu")
    whole.max_seq_length = a.length
    arms["sentence-transformers"] = lambda lines: whole.encode(lines, batch_size=a.batch)
    return arms


def _random_model(text: Path, name: str, folder: Path) -> Path:
    tokenizer, config = train_tokenizer([text]), recipe(name, "best")
    tokenizer.save(folder / "tokenizer")
    names = ("pad", "unk", "cls", "sep", "mask")
    special = SpecialIds(*(tokenizer.special_names[n] for n in names))
    objective = build_objective(config, tokenizer.vocab_size, special)
    hf_export.export(objective, config, folder / "tokenizer", folder / "export")
    for_sentence_transformers(folder / "export" / "discriminator")
    return folder / "export" / "discriminator"


if __name__ == "__main__":
    main()
