"""How well discriminators find replaced tokens in rows shorter than those they were trained on.

    python benchmarks/short_rows.py --model RUN... --input HELD_OUT_TEXT --lengths 128 64 32 16

Of the text, which the models must not have been trained on, 12 % of the tokens are replaced by
random tokens of the same text: the same ones for all models that share a tokenizer, and for all
lengths. It is then cut into rows [CLS] tokens [SEP] without padding, and each number is the area
under the ROC curve over the tokens between. A short row shows less context, so that some loss is in
the nature of things: models are to be compared at the same length.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
import tyro

from electra.data.text import TextStats, expand_inputs, read_documents
from electra.data.tokenizer import LineEncoder, Tokenizer
from electra.errors import ElectraError
from electra.evaluate import roc_auc
from electra.formats.hf import load_discriminator
from electra.runlog import read_metrics


@dataclass(frozen=True, kw_only=True)
class Arguments:
    model: tuple[Path, ...]
    """Runs, exports or transformers ELECTRA discriminators."""
    input: tuple[str, ...]
    """Text files that no model was trained on."""
    lengths: tuple[int, ...] = (128, 64, 32, 16)
    """Tokens of a row, with [CLS] and [SEP]."""
    replaced_percent: float = 12.0
    tokens: int = 100_000
    """Text that is looked at."""
    seed: int = 0
    out: Path | None = None
    """JSON file for the result."""


def main() -> None:
    a = tyro.cli(Arguments)
    record: dict[str, Any] = {
        "what": "AUC of telling tokens replaced by random tokens of the text, by row length",
        "replaced_percent": a.replaced_percent,
        "seed": a.seed,
        "models": [measure(path, a) for path in a.model],
    }
    print(f"{'tokens of a row':40}" + "".join(f"{length:>8}" for length in a.lengths))
    for row in record["models"]:
        print(f"{row['model'][-39:]:40}" + "".join(f"{v:8.3f}" for v in row["auc"].values()))
    if a.out is not None:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text(json.dumps(record, indent=1) + "\n")


def measure(path: Path, a: Arguments) -> dict[str, Any]:
    encoder, head, tokenizer = load_discriminator(path)
    if max(a.lengths) > encoder.config.max_positions or min(a.lengths) < 3:
        raise ElectraError(
            f"{path} reads rows of 3 to {encoder.config.max_positions} tokens.",
            where="--lengths",
            fix="leave out the others",
        )
    documents = encode(tokenizer, a)
    original = np.concatenate(documents)
    draw = np.random.default_rng(a.seed)
    other = draw.choice(original, len(original))
    corrupt = np.where(draw.random(len(original)) < a.replaced_percent / 100, other, original)
    ends = np.cumsum([0] + [len(document) for document in documents])
    areas: dict[int, float] = {}
    for length in a.lengths:
        inside = length - 2
        starts = np.concatenate(  # rows do not cross documents; the rest of each is left out
            [np.arange(start, end - inside + 1, inside) for start, end in pairwise(ends)]
        )
        at = starts[:, None] + np.arange(inside)  # (N, T − 2)
        x = np.pad(corrupt[at], ((0, 0), (1, 1)))
        x[:, 0], x[:, -1] = tokenizer.cls_id, tokenizer.sep_id
        with torch.no_grad():
            scores = [
                head(encoder(rows, torch.zeros_like(rows), None, None))[:, 1:-1]
                for rows in torch.from_numpy(x).split(max(1, 8192 // length))
            ]
        score = torch.cat(scores).double().numpy().ravel()
        areas[length] = roc_auc(score, (corrupt != original)[at].ravel())
    row: dict[str, Any] = {"model": str(path), "tokens": len(original), "auc": areas}
    if (path / "run.json").is_file():
        train = [m for m in read_metrics(path) if m["kind"] == "train"]
        corpus = json.loads((path / "run.json").read_bytes())["corpus_fingerprint"]
        row |= {"corpus": corpus, "steps": train[-1]["step"], "seconds": train[-1]["seconds"]}
    return row


def encode(tokenizer: Tokenizer, a: Arguments) -> list[np.ndarray]:
    """The first `tokens` tokens of the text, one array per document."""
    lines, found, size = LineEncoder(tokenizer), list[np.ndarray](), 0
    for document in read_documents(expand_inputs(a.input), stats=TextStats()):
        ids = lines.encode_lines(document.lines)[0].astype(np.int64)[: a.tokens - size]
        found.append(ids)
        size += len(ids)
        if size == a.tokens:
            break
    return found


if __name__ == "__main__":
    main()
