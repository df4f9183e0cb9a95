"""The paper's ablations, or a grid of one's own: settings by pre-training seeds.

Comes in: the settings of the study's ELECTRA, a corpus, a folder of GLUE; for a grid of one's own
a file with a table per row that says what it changes (`own_grid`). Goes out:

    DIR/ablate.json                     what was asked and, cell by cell, what came out
    DIR/LABEL/seed-N/settings.json      every setting of a cell
    DIR/LABEL/seed-N/log.txt            what its two commands said
    DIR/LABEL/seed-N/pretrain, glue     their directories

A study is a function from ELECTRA's settings to {label: settings}, to be read as a table of the
paper. A cell is `electra pretrain` and `electra glue` in processes of their own. Both continue
where they were and a cell is done when its scores are on the disk, so the same command again
continues the study.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..config import PretrainConfig, flat, from_dict, read_settings_file, to_dict
from ..errors import EXIT_BUG, EXIT_OK, ElectraError, Stopped, StopRequest, nearest
from ..files import exclusive, json_bytes, read_json, reading, storage_errors, write_atomic
from ..recipes import RECIPES, masked_lm, recipe

if TYPE_CHECKING:  # its neighbours import torch
    from .plan import Plan

Equal = Literal["steps", "flops"]
Grid = dict[str, PretrainConfig]
CURVES = ("mlm_loss", "mlm_accuracy", "disc_auc")  # what is kept of every look at held-out text

# ---------------------------------------------------------------------- the studies


def efficiency(electra: PretrainConfig) -> Grid:
    """Table 5: which part of ELECTRA makes it efficient?"""
    # λ = 50 lifts a binary cross-entropy beside L_MLM; the paper gives no weight for losses over
    # the vocabulary, which need no lifting. As the paper's sums over tokens they have weight 1
    # here, so a masked token counts alike in L_MLM, Replace MLM and All-Tokens MLM. The last is
    # coded as a mean over all tokens, hence the share of those that are masked.
    every = {"kind": "all_tokens_mlm", "disc_weight": 100 / electra.objective.mask_percent}
    bert = masked_lm(electra)
    all_masked = {"mask_token_percent": 100.0, "random_token_percent": 0.0}
    return {
        "ELECTRA": electra,
        "All-Tokens MLM": change(electra, objective=every),
        "Replace MLM": change(electra, objective={"kind": "replace_mlm", "disc_weight": 1.0}),
        "ELECTRA 15%": change(electra, objective={"disc_positions": "masked"}),
        "ELECTRA 15%, other tokens": change(electra, objective={"disc_positions": "other"}),
        "ELECTRA 15%, random tokens": change(electra, objective={"disc_positions": "random"}),
        "BERT": bert,
        "BERT, 100% [MASK]": change(bert, objective=all_masked),
    }


def sharing(electra: PretrainConfig) -> Grid:
    """Section 3.2: what should a generator as large as the discriminator share with it?"""
    return {
        label: change(electra, generator={"width": 1.0, "depth": 1.0, "sharing": shared})
        for label, shared in (
            ("none", "none"),
            ("token embeddings", "embeddings"),  # with positions, segments and their layer norm
            ("all weights", "all"),
            ("gradient-disentangled", "disentangled"),  # DeBERTa-v3's, not in the paper
        )
    }


def generator_size(electra: PretrainConfig) -> Grid:
    """Figure 3, left: how large should the generator be?"""
    sizes = {f"width {w}": (Fraction(w), 1.0) for w in ("1/8", "1/4", "1/2", "3/4", "1")}
    sizes |= {f"depth {d}": (1.0, Fraction(d)) for d in ("1/4", "1/2")}
    rows = {
        label: change(electra, generator={"width": float(width), "depth": float(depth)})
        for label, (width, depth) in sizes.items()
    }
    kinds = {kind: change(electra, generator={"kind": kind}) for kind in ("uniform", "unigram")}
    return {label: row for label, row in rows.items() if _divides(row)} | kinds


def algorithms(electra: PretrainConfig) -> Grid:
    """Figure 3, right, and appendix F: how should the two networks be trained?"""
    # Two stages need a generator of the same size that shares nothing. Joint and adversarial
    # training have a row with that generator as well, so that like is compared with like.
    equal = change(electra, generator={"width": 1.0, "depth": 1.0, "sharing": "none"})
    two_stage = change(equal, objective={"algorithm": "two_stage"})
    return {
        "joint": electra,
        "adversarial": change(electra, objective={"algorithm": "adversarial"}),
        "joint, equal size": equal,
        "adversarial, equal size": change(equal, objective={"algorithm": "adversarial"}),
        "two-stage": two_stage,
        "two-stage, no copy": change(two_stage, objective={"stage_two": "fresh"}),
    }


def rtd_vs_mlm(electra: PretrainConfig) -> Grid:
    """Figure 4: the two objectives at four budgets, each a run with a schedule of its own."""
    rows: Grid = {}
    for name, row in (("ELECTRA", electra), ("BERT", masked_lm(electra))):
        for share in ("1/8", "1/4", "1/2", "1"):
            steps = max(1, round(row.run.train_steps * Fraction(share)))
            rows[f"{name}, {share}"] = change(row, run={"train_steps": steps})
    return rows


def own_grid(file: Path, electra: PretrainConfig) -> Grid:
    """The rows of a TOML or JSON file: a table per label, what is not in it is as in `electra`.

    [baseline]
    ["muon, twice the rate"]
    optim.kind = "muon"
    optim.muon_rate = 3e-3
    """
    rows: Grid = {}
    for label, values in read_settings_file(file).items():
        where = f"{file}: {label}"
        if not isinstance(values, dict) or not slug(label) or slug(label) in map(slug, rows):
            what = f"{label!r} is no row: a row is a table with a name that no other row has."
            raise ElectraError(what, where=where, fix='write ["its name"] above its settings')
        rows[label] = from_dict(PretrainConfig, values, where=where, base=electra)
    if not rows:
        raise ElectraError("The grid has no row.", where=str(file), fix='write a table: ["a name"]')
    return rows


STUDIES: dict[str, Callable[[PretrainConfig], Grid]] = {
    "efficiency": efficiency,
    "sharing": sharing,
    "generator-size": generator_size,
    "algorithms": algorithms,
    "rtd-vs-mlm": rtd_vs_mlm,
}

# What the paper reports for a row: mean GLUE score on dev of models of Base size (table 5, section
# 3.2), or the generator's MLM accuracy (appendix F).
PAPER: dict[str, dict[str, str]] = {
    "efficiency": {
        "ELECTRA": "85.0",
        "All-Tokens MLM": "84.3",
        "Replace MLM": "82.4",
        "ELECTRA 15%": "82.4",
        "BERT": "82.2",
    },
    "sharing": {"none": "83.6", "token embeddings": "84.3", "all weights": "84.4"},
    "algorithms": {"joint": "MLM accuracy 65 %", "adversarial": "MLM accuracy 58 %"},
}


def change(config: PretrainConfig, **groups: dict[str, Any]) -> PretrainConfig:
    """`config` with some settings of some groups replaced."""
    changed = {name: replace(getattr(config, name), **new) for name, new in groups.items()}
    return replace(config, **changed)


def _divides(config: PretrainConfig) -> bool:
    try:
        return bool(config.generator_encoder)
    except ElectraError:
        return False


# ---------------------------------------------------------------------- the grid


def starting_point(name: str, steps: int | None = None) -> PretrainConfig:
    """ELECTRA's settings of a study: a recipe or a settings file, for `steps` if they are given.

    The warm-up is a share of the steps from here on, that of the recipe or file, because the rows
    of a study may have different numbers of steps.
    """
    if Path(name).suffix in (".json", ".toml"):
        values = read_settings_file(Path(name))
        begun = str(values.get("name"))
        start = recipe(begun if begun in RECIPES else "small")
        base = from_dict(PretrainConfig, values, where=name, base=start)
    else:
        base = recipe(name)
    kind, algorithm = base.objective.kind, base.objective.algorithm
    if (kind, algorithm) != ("rtd", "joint"):
        what = f"A study starts from ELECTRA's settings; these are {kind}, {algorithm}."
        fix = "give settings with objective.kind rtd and objective.algorithm joint"
        raise ElectraError(what, where=f"--base {name}", fix=fix)
    if base.optim.warmup_percent is None:
        share = min(100.0, 100 * base.optim.warmup_steps / base.run.train_steps)
        base = change(base, optim={"warmup_percent": share})
    return base if steps is None else change(base, run={"train_steps": steps})


def make_grid(study: str, base: PretrainConfig, vocab_size: int, equal: Equal) -> Grid:
    """The rows of a study with equal steps, or as many steps as cost what ELECTRA's cost.

    study: a name, or the file of a grid of one's own, whose rows may have steps or minutes.
    """
    from ..flops import matmul_flops_per_token  # its neighbours import torch

    is_own = Path(study).suffix in (".json", ".toml")
    if not is_own and study not in STUDIES:
        fix = f"{nearest(study, STUDIES)} (or give the file of a grid)"
        raise ElectraError(f"There is no study {study!r}.", where="electra ablate", fix=fix)

    def with_steps(row: PretrainConfig) -> PretrainConfig:
        steps = row.run.train_steps
        if equal == "flops":
            cost = matmul_flops_per_token(row, vocab_size)
            steps = max(1, round(steps * matmul_flops_per_token(base, vocab_size) / cost))
        elif row.objective.algorithm == "two_stage":
            steps *= 2  # the paper's n and n
        return change(row, run={"train_steps": steps})

    rows = own_grid(Path(study), base) if is_own else STUDIES[study](base)
    if (not is_own or equal == "flops") and any(row.run.minutes for row in rows.values()):
        what = "Equal steps or FLOPs are compared here, which minutes do not tell."
        fix = "remove run.minutes, or give a grid of your own with --equal steps"
        raise ElectraError(what, where=f"electra ablate {study}", fix=fix)
    for label, row in rows.items():  # a cell would only find out when its turn comes
        try:
            row.check_sizes()
            row.check_start(from_model=False)
        except ElectraError as error:
            error.where = f"{study}: {label}: {error.where}"
            raise
    return {label: with_steps(row) for label, row in rows.items()}


@dataclass(frozen=True)
class Cell:
    """One setting with one pre-training seed."""

    label: str
    config: PretrainConfig
    directory: Path


def make_cells(grid: Grid, seeds: Sequence[int], out: Path) -> list[Cell]:
    """Seed by seed, so that a study that is cut short has all of its rows.

    seeds: what is added to the seed of each row.
    """
    cells: list[Cell] = []
    for more in seeds:
        for label, config in grid.items():
            seed = config.run.seed + more
            folder = out / slug(label) / f"seed-{seed}"
            cells.append(Cell(label, change(config, run={"seed": seed}), folder))
    return cells


def slug(label: str) -> str:
    """A label as the name of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")


def describe(study: str, base: PretrainConfig, vocab_size: int, equal: Equal) -> str:
    """What would be run: parameters, FLOPs, steps and in what each row differs."""
    from .plan import make_plan

    lines: list[str] = []
    for label, config in make_grid(study, base, vocab_size, equal).items():
        plan = make_plan(config, vocab_size)
        lines.append(
            f"{label:26} {plan.discriminator_parameters:>12,} + {plan.generator_parameters:>11,} "
            f"parameters {plan.total_flops:>9.3g} FLOPs {config.run.train_steps:>10,} steps"
        )
        lines += [f"    {name} = {value}" for name, value in _differs(config, base).items()]
    return "\n".join(lines)


# ---------------------------------------------------------------------- running it


def ablate(
    study: str,
    base: PretrainConfig,
    corpus: Path,
    data: Path,
    out: Path,
    *,
    tasks: Sequence[str],
    rows: Sequence[str] = (),
    seeds: int = 3,
    first_seed: int | None = None,
    tuning_seeds: int = 3,
    tuning: Sequence[str] = (),
    equal: Equal = "steps",
    jobs: int = 1,
    note: Callable[[str], object] = print,
) -> int:
    """Run what is not done yet; returns an exit code, 1 if a cell failed.

    rows: labels of those to run now, all if empty; the record has every row. seeds: how many, from
    first_seed on, default: that of `base`; the record keeps the seeds that it had. tuning: more
    flags of `electra glue`. jobs: cells that run at the same time, spread over the visible GPUs.
    Raises Stopped after a signal, once every cell has saved its state.
    """
    from ..data.corpus import Corpus
    from ..rundir import check_fits
    from .plan import make_plan

    _require_tasks(tasks, data)
    opened = Corpus.open(corpus)
    check_fits(base, opened)
    grid = make_grid(study, base, opened.vocab_size, equal)
    if unknown := [label for label in rows if label not in grid]:
        what = f"This study has no row {', '.join(map(repr, unknown))}."
        raise ElectraError(what, where="--rows", fix=f"its rows: {'; '.join(grid)}")
    start = 0 if first_seed is None else first_seed - base.run.seed
    added = range(start, start + seeds)  # to the seed of each row
    cells = make_cells(grid, added, out)
    plans = {label: make_plan(config, opened.vocab_size) for label, config in grid.items()}
    asked: dict[str, Any] = {
        "study": Path(study).stem,
        "base": to_dict(base),
        "equal": equal,
        "corpus_fingerprint": opened.fingerprint,
        "tuning": list(tuning),
    }
    flags = ["--quiet", *tuning, "--seeds", str(tuning_seeds), "--tasks", *tasks]
    commands = partial(_commands, corpus=corpus, data=data, flags=flags)
    with exclusive(out), StopRequest() as stop:
        known = _enter(out, asked, grid, added)
        record = _Record(out, asked, tasks, tuning_seeds, base, plans, known)
        todo = [cell for cell in cells if record.outcome(cell) is None]
        note(f"{asked['study']}: {len(cells)} cells, {len(cells) - len(todo)} of them done before")
        record.write()
        todo = [cell for cell in todo if not rows or cell.label in rows]
        _run_cells(todo, commands, jobs, stop, partial(record.finished, note=note))
        if stop():
            raise Stopped
    return EXIT_BUG if record.failed else EXIT_OK


def _require_tasks(tasks: Sequence[str], data: Path) -> None:
    from ..finetuning.tasks import available

    present = available(data)
    if missing := [task for task in tasks if task not in present]:
        what = f"Not in this folder: {', '.join(missing)}."
        fix = f"present: {', '.join(present) or 'none'}; choose among them with --tasks"
        raise ElectraError(what, where=str(data), fix=fix)


def _enter(out: Path, asked: dict[str, Any], grid: Grid, added: Iterable[int]) -> list[Cell]:
    """The cells of the record: of the seeds `added` now, and of those that finished one before.

    What is in `out` has to be the same study, with the same settings in every cell.
    """
    from ..rundir import differences

    with reading(out / "ablate.json"):
        before = read_json(out / "ablate.json") or {**asked, "cells": []}
        changed = differences({key: before[key] for key in asked}, asked)
        had = {
            int(cell["seed"]) - grid[cell["label"]].run.seed
            for cell in before["cells"]
            if cell["state"] == "finished" and cell["label"] in grid
        }
    if changed:
        what = "This directory holds another study: " + "; ".join(changed.values()) + "."
        raise ElectraError(what, where=str(out), fix="choose another --out")
    known = make_cells(grid, sorted({*had, *added}), out)
    for cell in known:  # a row of a grid may have been rewritten
        if then := read_json(file := cell.directory / "settings.json"):
            was = from_dict(PretrainConfig, then, where=str(file))
            if changed := differences(to_dict(was), to_dict(cell.config)):
                what = f"{cell.label!r} had other settings: {'; '.join(changed.values())}."
                fix = "give the row another name, or choose another --out"
                raise ElectraError(what, where=str(cell.directory), fix=fix)
    return known


@dataclass
class _Record:
    """ablate.json: what was asked and, cell by cell, what came out."""

    out: Path
    asked: dict[str, Any]  # anything else would be another study
    tasks: Sequence[str]
    tuning_seeds: int
    base: PretrainConfig
    plans: dict[str, Plan]
    cells: list[Cell]
    failed: dict[Cell, int] = field(default_factory=dict[Cell, int])  # exit codes

    def outcome(self, cell: Cell) -> dict[str, Any] | None:
        return outcome(cell.directory, self.tasks, self.tuning_seeds)

    def finished(self, cell: Cell, code: int, note: Callable[[str], object]) -> None:
        """Take note of how a cell ended: done, failed, or stopped on its way."""
        name = f"{cell.label}, seed {cell.config.run.seed}"
        if code:
            self.failed[cell] = code
            log = cell.directory / "log.txt"
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
            note(f"failed: {name}, exit code {code}; {log} ends with\n  " + "\n  ".join(last))
        self.write()
        if result := self.outcome(cell):
            note(f"finished: {name}, mean over tasks {100 * result['score']:.1f}")

    def write(self) -> None:
        from ..runtime import source

        seeds = len({cell.config.run.seed for cell in self.cells})
        more = {"seeds": seeds, "tuning_seeds": self.tuning_seeds, "tasks": list(self.tasks)}
        cells = [self._entry(cell) for cell in self.cells]
        whole = {"format": 1, **self.asked, **more, "environment": source(), "cells": cells}
        write_atomic(self.out / "ablate.json", json_bytes(whole, indent=1))

    def _entry(self, cell: Cell) -> dict[str, Any]:
        plan, result = self.plans[cell.label], self.outcome(cell)
        planned = cell.config.run.train_steps
        steps = result["steps"] if result else planned  # fewer where minutes end the run
        code = self.failed.get(cell)
        state = "not finished" if code is None else f"failed: exit code {code}"
        return {
            "label": cell.label,
            "seed": cell.config.run.seed,
            "state": "finished" if result else state,
            "differs": _differs(cell.config, self.base),
            "steps": steps,
            "tokens": steps * plan.tokens_per_step,
            "flops": plan.total_flops * steps / planned,
            "paper_flops": plan.paper_flops * steps / planned,
            "parameters": plan.discriminator_parameters,
            "generator_parameters": plan.generator_parameters,
            **(result or {}),
        }


def _commands(cell: Cell, corpus: Path, data: Path, flags: list[str]) -> list[list[str]]:
    """Pre-training, for which the cell's settings are written into a file, and the tasks."""
    here = cell.directory
    with storage_errors(here):
        here.mkdir(parents=True, exist_ok=True)
    write_atomic(here / "settings.json", json_bytes(to_dict(cell.config), indent=1))
    trained, settings = str(here / "pretrain"), str(here / "settings.json")
    first = ["pretrain", "--config", settings, "--corpus", str(corpus), "--out", trained]
    second = ["glue", "--model", trained, "--data", str(data), "--out", str(here / "glue")]
    return [first, [*second, *flags]]


@dataclass
class _Running:
    cell: Cell
    rest: list[list[str]]
    device: dict[str, str]
    process: subprocess.Popen[bytes] = field(init=False)
    told: bool = False  # to stop

    def __post_init__(self) -> None:
        with open(self.cell.directory / "log.txt", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "electra", *self.rest.pop(0)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.device},
                process_group=0,  # Ctrl-C is for us, who pass it on; a second one would end at once
            )


def _run_cells(
    cells: Sequence[Cell],
    commands: Callable[[Cell], list[list[str]]],
    jobs: int,
    stop: Callable[[], bool],
    finished: Callable[[Cell, int], None],
) -> None:
    """Some cells at a time, each command of a cell after the one before has succeeded."""
    waiting, running, gpus = list(cells), dict[int, _Running](), _gpus()
    try:
        while running or (waiting and not stop()):
            for slot in range(jobs):
                if slot not in running and waiting and not stop():
                    gpu = {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}
                    cell = waiting.pop(0)
                    running[slot] = _Running(cell, commands(cell), gpu)
            for slot, one in list(running.items()):
                code = one.process.poll()
                if code is None and stop() and not one.told:
                    one.told = True
                    one.process.terminate()
                elif code == 0 and one.rest and not stop():
                    running[slot] = _Running(one.cell, one.rest, one.device)
                elif code is not None:
                    del running[slot]
                    finished(one.cell, 0 if stop() else code)
            time.sleep(0.1)
    finally:  # some are left only where something went wrong here
        for one in running.values():
            one.process.terminate()
        for one in running.values():
            one.process.wait()


def _gpus() -> list[str]:
    """The GPUs that may be used, by the names that CUDA_VISIBLE_DEVICES takes."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


# ---------------------------------------------------------------------- what came out


def outcome(directory: Path, tasks: Sequence[str], tuning_seeds: int) -> dict[str, Any] | None:
    """The numbers of a cell, or None where some of them are still to come."""
    from ..runlog import read_metrics

    scores: dict[str, dict[str, Any]] = {}
    for task in tasks:
        file = directory / "glue" / task / "results.json"
        read = read_json(file)
        with reading(file):
            if not read or len(read["seeds"]) < tuning_seeds:
                return None
            scores[task] = {
                "metric": read["task"]["metric"],
                "scores": [seed["score"] for seed in read["seeds"]],
                **read["summary"],
            }
    metrics, record = read_metrics(directory / "pretrain"), directory / "pretrain" / "run.json"
    with reading(record):
        environment = read_json(record)["environment"]
    train, held = ([m for m in metrics if m["kind"] == kind] for kind in ("train", "eval"))
    last: dict[str, Any] = max(train, key=lambda m: m["step"], default={})
    curve = [{"step": m["step"]} | {key: _finite(m.get(key)) for key in CURVES} for m in held]
    return {
        "scores": scores,
        "score": sum(s["median"] for s in scores.values()) / len(scores),
        "curve": curve,
        "held_out": {key: curve[-1][key] if curve else None for key in CURVES},
        "train": {key: _finite(last.get(key)) for key in ("loss", "mlm_loss", "disc_loss")},
        "steps": last.get("step", 0),
        "seconds": last.get("seconds", 0.0),
        "environment": environment,
    }


def _finite(value: Any) -> float | None:
    """What is not finite is a word in metrics.jsonl."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _differs(config: PretrainConfig, base: PretrainConfig) -> dict[str, Any]:
    """The settings in which a row differs from ELECTRA, by dotted name."""
    ours, theirs = flat(to_dict(config)), flat(to_dict(base))
    return {k: v for k, v in ours.items() if v != theirs[k] and k != "run.seed"}
