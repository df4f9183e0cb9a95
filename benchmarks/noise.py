"""How much dropout a discriminator bears, place by place.

    python benchmarks/noise.py --model RUN --input HELD_OUT_TEXT --out OUT.json

Of the text, which the model must not have been trained on, 12 % of the tokens are replaced by
random tokens of the same text, as in `short_rows.py`. The number is the area under the ROC curve
over the tokens of rows of 128 when states are dropped at single places of the encoder, or at all of
them: fine-tuning with dropout begins from there.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
import tyro
from short_rows import Arguments as Text
from short_rows import encode

from electra.encoder import Block
from electra.evaluate import roc_auc
from electra.formats.hf import load_discriminator
from electra.randomness import StepRng

PLACES = ("embeddings", "attention output", "feed-forward output", "attention probabilities")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    model: Path
    """A run, an export or a transformers ELECTRA discriminator."""
    input: tuple[str, ...]
    """Text files that the model was not trained on."""
    tokens: int = 20_000
    """Text that is looked at."""
    rates: tuple[float, ...] = (0.02, 0.05, 0.1)
    replaced_percent: float = 12.0
    seed: int = 0
    out: Path | None = None
    """JSON file for the result."""


class Dropout(StepRng):
    """Drops at the chosen places only; `Encoder` and `Block` count their places one by one."""

    first = 0
    chosen: frozenset[str] = frozenset()

    def dropout(self, x: torch.Tensor, p: float, site: int) -> torch.Tensor:
        place = PLACES[0] if site == self.first else PLACES[1 + (site - self.first - 1) % 3]
        return super().dropout(x, p, site) if place in self.chosen else x


def main() -> None:
    a = tyro.cli(Arguments)
    encoder, head, tokenizer = load_discriminator(a.model)
    text = Text(model=(a.model,), input=a.input, tokens=a.tokens)
    tokens = np.concatenate(encode(tokenizer, text))
    draw = np.random.default_rng(a.seed)
    original = tokens[: len(tokens) // 126 * 126].reshape(-1, 126)
    other = draw.choice(tokens, original.shape)
    corrupt = np.where(draw.random(original.shape) < a.replaced_percent / 100, other, original)
    x = np.pad(corrupt, ((0, 0), (1, 1)))
    x[:, 0], x[:, -1] = tokenizer.cls_id, tokenizer.sep_id
    trained_with = encoder.config.dropout

    def auc(places: tuple[str, ...], p: float) -> float:
        config = replace(encoder.config, dropout=p, attention_dropout=p)
        encoder.config = config
        for block in encoder.blocks:
            assert isinstance(block, Block)
            block.config = config
        scores: list[torch.Tensor] = []
        for step, rows in enumerate(torch.from_numpy(x).split(64)):
            rng = Dropout(a.seed, torch.tensor(step), torch.arange(len(rows)))
            rng.first, rng.chosen = encoder.site, frozenset(places)
            with torch.no_grad():
                scores.append(head(encoder(rows, torch.zeros_like(rows), None, rng))[:, 1:-1])
        return roc_auc(torch.cat(scores).double().numpy().ravel(), (corrupt != original).ravel())

    rows: list[dict[str, Any]] = [{"places": [], "auc": {"0": auc((), 0.0)}}]
    hidden = PLACES[:3]
    for places in (hidden, *((place,) for place in PLACES), PLACES):
        rows.append({"places": list(places), "auc": {str(p): auc(places, p) for p in a.rates}})
    print(f"{'dropped':70}" + "".join(f"{p:>8}" for p in a.rates))
    for row in rows:
        shown = "".join(f"{value:8.3f}" for value in row["auc"].values())
        print(f"{', '.join(row['places']) or 'nothing':70}{shown}")
    if a.out is not None:
        record = {
            "what": "AUC of telling tokens replaced by random tokens of the text under dropout",
            "model": str(a.model),
            "trained_with_dropout": trained_with,
            "tokens": original.size,
            "replaced_percent": a.replaced_percent,
            "seed": a.seed,
            "rows": rows,
        }
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
