"""A record of the speedrun (docs/speedrun.md) from a run and its results on GLUE.

    python benchmarks/speedrun.py --run RUN --glue GLUE --who NAME --what "what is new"

Comes in: a run of `electra pretrain` and the folder that `electra glue --seeds 5` made of it. Goes
out: results/speedrun/TITLE.json, and the table of docs/speedrun.md with it. An entry that breaks a
rule which these files show is refused. Without --run and --glue the table is only written anew.
"""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro

from electra.config import FinetuneConfig, PretrainConfig, from_dict, to_dict
from electra.errors import ElectraError
from electra.files import read_json
from electra.finetuning.finetune import resolve
from electra.finetuning.tasks import Task
from electra.formats.card import table
from electra.studies.plan import make_plan
from electra.studies.records import read_pretraining

ROOT = Path(__file__).parents[1]
PAGE, RECORDS = ROOT / "docs" / "speedrun.md", ROOT / "results" / "speedrun"
BUDGETS = (5, 10, 25)
SIX = ("cola", "sst2", "mrpc", "stsb", "qnli", "rte")
SEEDS = [0, 1, 2, 3, 4]
MOST_PARAMETERS = 14_000_000
# Settings of fine-tuning that do not change what is computed, or only its last bits.
FREE = {"at_once", "compile", "deterministic", "device", "keep", "license", "precision"} | {
    *("save_every", "threads")
}
BEFORE = {"eval_every": "end", "keep_epoch": "last", "patience": None}  # there was no other way
HEAD = ["who", "what", "track", "minutes", "score", "tokens", "FLOPs", "record"]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    run: Path | None = None
    """The run of `electra pretrain`."""
    glue: Path | None = None
    """The --out of `electra glue`."""
    who: str = ""
    what: str = ""
    """What is new in it, in a few words."""
    track: Literal["faithful", "open"] = "faithful"
    title: str = ""
    """Name of the record's file; default: that of the run's directory."""


def main() -> None:
    a = tyro.cli(Arguments)
    if a.run is not None and a.glue is not None:
        record = {"who": a.who, "what": a.what, "track": a.track, **measured(a.run, a.glue)}
        RECORDS.mkdir(parents=True, exist_ok=True)
        name = f"{a.title or a.run.resolve().name}.json"
        (RECORDS / name).write_text(json.dumps(record, indent=1) + "\n")
    text = PAGE.read_text(encoding="utf-8")
    pattern = r"(?<=<!-- records -->\n).*?(?=\n<!-- end of records -->)"
    PAGE.write_text(re.sub(pattern, lambda _: records_table(), text, flags=re.S), encoding="utf-8")
    print(records_table())


def refuse(what: str, where: object, fix: str) -> ElectraError:
    return ElectraError(what, where=str(where), fix=fix)


def measured(run: Path, glue: Path) -> dict[str, Any]:
    """Everything in a record that is not said by a person."""
    found = read_pretraining(run, run.name)
    about = found["record"]
    config = from_dict(PretrainConfig, about["config"], where=str(run / "run.json"))
    plan = make_plan(config, about["vocab_size"])
    if plan.discriminator_parameters > MOST_PARAMETERS:
        what = f"The model has {plan.discriminator_parameters:,} parameters."
        raise refuse(what, run, f"the speedrun has at most {MOST_PARAMETERS:,}")
    if found["state"] != "finished" or config.run.minutes not in BUDGETS:
        what = f"The run is {found['state']}, its minutes are {config.run.minutes}."
        raise refuse(what, run, f"use run.minutes {BUDGETS}, and let it end")
    scores = {p.parent.name: read_scores(p, config) for p in sorted(glue.glob("*/results.json"))}
    if missing := [name for name in SIX if name not in scores]:
        raise refuse(f"Not in this folder: {missing}.", glue, "run electra glue on all six tasks")
    by_seed = [100 * statistics.mean(scores[t][i] for t in SIX) for i in range(len(SEEDS))]
    return {
        "budget_minutes": config.run.minutes,
        "minutes": round(found["seconds"] / 60, 2),
        "score": round(100 * statistics.mean(statistics.median(scores[t]) for t in SIX), 2),
        "spread": round(statistics.stdev(by_seed), 2),
        "seeds": scores,
        "steps": found["steps"],
        "tokens": found["tokens"],
        "flops": float(f"{plan.flops_per_token * found['tokens']:.3g}"),
        "parameters": plan.discriminator_parameters,
        "curve": found["curves"]["eval"],
        "environment": about["environment"],
        "corpus": about["corpus_fingerprint"],
        "config": to_dict(config),
    }


def read_scores(path: Path, config: PretrainConfig) -> list[float]:
    """The score of each seed, if they are the seeds and the settings that all entries have."""
    read = read_json(path)
    if [seed["seed"] for seed in read["seeds"]] != SEEDS:
        raise refuse(f"The seeds are not {SEEDS}.", path, "give electra glue --seeds 5")
    task = Task(**{k: tuple(v) if isinstance(v, list) else v for k, v in read["task"].items()})
    wanted = to_dict(replace(resolve(FinetuneConfig(), config.encoder, task), seeds=len(SEEDS)))
    had = BEFORE | read["settings"]
    other = [k for k, v in wanted.items() if k not in FREE and had.get(k) != v]
    if other:
        fix = "all entries are fine-tuned by the defaults of electra glue"
        raise refuse(f"Other settings of fine-tuning: {', '.join(other)}.", path, fix)
    return [float(seed["score"]) for seed in read["seeds"]]


def records_table() -> str:
    """The table of the page: each budget's best first."""
    read = {p.name: json.loads(p.read_text()) for p in RECORDS.glob("*.json")}
    best_first = sorted(
        read.items(), key=lambda item: (item[1]["budget_minutes"], -item[1]["score"])
    )
    rows = [
        [
            *(r["who"], r["what"], r["track"], f"{r['minutes']:.1f} of {r['budget_minutes']:g}"),
            *(f"{r['score']:.1f} ± {r['spread']:.1f}", f"{r['tokens'] / 1e6:,.0f} M"),
            *(f"{r['flops']:.2e}", f"`results/speedrun/{name}`"),
        ]
        for name, r in best_first
    ]
    return "\n".join(table(HEAD, rows)) if rows else "No record yet."


if __name__ == "__main__":
    main()
