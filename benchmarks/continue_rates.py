"""Continued pre-training: what the peak of the restarted learning rate does, on two kinds of text.

A tiny ELECTRA is trained on speeches up to --border, then goes on with the later ones: with parts
of its first learning rate, and for comparison from scratch. Written: held-out losses on both kinds
of text before and after, and the worst loss on the way. All is a function of the settings.

    python benchmarks/continue_rates.py --out results/continue/rates.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from electra.config import PretrainConfig
from electra.data.corpus import Corpus, prepare
from electra.data.tokenizer import train_tokenizer
from electra.evaluate import evaluate
from electra.formats import hf
from electra.pretrain import pretrain
from electra.recipes import tiny
from electra.rundir import load_run
from electra.runlog import read_metrics
from electra.use.demo_text import find_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--border", type=int, default=1950)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--more-steps", type=int, default=400)
    parser.add_argument("--shares", type=float, nargs="*", default=[1.0, 0.5, 0.2])
    a = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="continue-") as place:
        rows = run(Path(place), a)
    settings = {k: v for k, v in vars(a).items() if k != "out"}
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")


def run(place: Path, a: argparse.Namespace) -> list[dict[str, Any]]:
    texts = {"old": place / "old.txt", "new": place / "new.txt"}
    parts: dict[str, list[str]] = {"old": [], "new": []}
    for document in find_text().documents:
        kind = "old" if int(document.name[:4]) < a.border else "new"
        parts[kind].append("\n".join(document.paragraphs))
    for kind, path in texts.items():
        path.write_text("\n\n".join(parts[kind]), encoding="utf-8")
    tokenizer = train_tokenizer([texts["old"]], vocab_size=4000)
    corpora = dict[str, Corpus]()
    for kind, path in texts.items():
        prepare([path], tokenizer, place / kind, sequence_length=64, held_out_percent=5.0)
        corpora[kind] = Corpus.open(place / kind)

    def trained(name: str, kind: str, config: PretrainConfig, start: Path | None) -> dict[str, Any]:
        initial = None
        if start is not None:
            model = hf.load_pretrained(start)
            initial = hf.initial_state(model, config, tokenizer.vocab_size).parameters
        pretrain(config, corpora[kind], place / name, initial=initial, quiet=True)
        objective = load_run(place / name).objective
        held = {k: asdict(evaluate(objective, c.held_out, batches=32)) for k, c in corpora.items()}
        kept = ("mlm_loss", "disc_loss", "disc_auc")
        losses = [m["mlm_loss"] for m in read_metrics(place / name) if m["kind"] == "train"]
        row = {f"{k}_{key}": round(held[k][key], 4) for k in held for key in kept}
        return {"name": name, "worst_training_mlm_loss": round(max(losses), 4), **row}

    first = tiny()
    first = replace(first, run=replace(first.run, train_steps=a.steps, eval_every=10**6))
    short = replace(first.run, train_steps=a.more_steps, log_every=20)
    rows = [trained("first", "old", first, None)]
    rows.append(trained("from scratch", "new", replace(first, run=short), None))
    for share in a.shares:
        optim = replace(first.optim, learning_rate=share * first.optim.learning_rate)
        config = replace(first, run=short, optim=optim)
        rows.append(trained(f"continued, {share:g} of the rate", "new", config, place / "first"))
        print(json.dumps(rows[-1]), flush=True)
    optim = replace(first.optim, warmup_percent=0.0)
    rows.append(
        trained(
            "continued, no warm-up", "new", replace(first, run=short, optim=optim), place / "first"
        )
    )
    return rows


if __name__ == "__main__":
    main()
