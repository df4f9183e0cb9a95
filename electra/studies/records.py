"""What is on disk of runs and studies, and what several seeds of them come to.

Comes in: directories of pre-training runs (run.json, metrics.jsonl), of fine-tuning runs
(results.json), of studies (ablate.json), of benchmarks, which hold one fine-tuning run per task,
and folders that hold any of these. Goes out: each run as a dictionary of its numbers, each study
with its cells by setting, records of a study that differ in their seeds alone as one; and the mean,
deviation and confidence interval of seeds. What cannot be read as what it should be raises
`CorruptError`. Names of runs, tasks and models are somebody else's text, which `code` makes
harmless in Markdown.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ..config import PretrainConfig, flat, to_dict
from ..errors import ElectraError
from ..files import reading
from ..runlog import read_metrics
from .ablate import CURVES

Sort = Literal["study", "pretraining", "finetuning"]
_SORTS: dict[str, Sort] = {  # what a directory is, by the first of these files that it has
    "ablate.json": "study",
    "run.json": "pretraining",
    "results.json": "finetuning",
    "finetune.json": "finetuning",
}
_FIX = "restore the file from a backup, or leave this run out"
_NAME = "give the --out directory of `electra pretrain`, `finetune`, `glue` or `ablate`"
_SQUARE = 12  # classes up to which a whole table of answers is shown; pairs of more
SUMMARY = ("median", "mean", "std", "best", "seeds", "failed")
_JOINED = "Records with the same settings, corpus and tasks and other seeds or rows, joined"
HELD_OUT = {  # held-out numbers of a pre-training run
    "mlm_loss": "generator loss",
    "disc_loss": "discriminator loss",
    "disc_auc": "AUC of replaced tokens",
}
HEALTH = {  # and what training itself tells
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second",
}
# Values of a run by column; those that do not apply to it are missing. Pre-training has also
# `curves`, (step, value) by name, held out and in training; fine-tuning `scores` of the seeds that
# did not fail, `losses` of each seed, and `row` of the table of medians: the benchmark, or what a
# run of one task started from. A cell of a study has `scores`, by task, and `curve`. `record` is
# what the run says of itself, `metrics` its log, `warnings` what somebody should look at.
Run = dict[str, Any]


class Study(NamedTuple):
    """A directory of `electra ablate`: its cells by label, in the order of the study."""

    title: str
    name: str
    tasks: list[str]
    rows: dict[str, list[Run]]
    settings: dict[str, Any]  # all but the seeds, by dotted name
    made: dict[str, str]  # by title: which program and machine; several where records were joined
    notes: list[str]


def is_finite(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)


def number_or_none(value: Any) -> float | None:
    """A finite number or nothing; raises on anything else."""
    if value is not None and not is_finite(value):
        raise ValueError(f"{value!r} is no finite number")
    return value


def _needed(value: Any) -> float:
    if (number := number_or_none(value)) is None:
        raise ValueError("a number is missing")
    return number


class Place(NamedTuple):
    """A run or a study on disk."""

    path: Path
    sort: Sort
    title: str  # by which it is shown
    row: str | None = None  # of the table of medians; None: that of the model it started from


def places(path: Path, title: str) -> tuple[list[Place], list[ElectraError]]:
    """The run or study in a directory; or all that it holds, itself or in folders of it, and which
    of these cannot be read."""
    unread: list[ElectraError] = []
    try:
        found = _below(path, title, None, unread, levels=2)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not found:
        what = "There is no run here: no run.json, finetune.json, results.json or ablate.json."
        raise unread[0] if unread else ElectraError(what, where=str(path), fix=_NAME)
    return found, unread


def _below(
    path: Path, title: str, row: str | None, unread: list[ElectraError], *, levels: int
) -> list[Place]:
    if sort := _sort(path):  # what a run or a study holds is its own
        return [Place(path, sort, title, row)]
    parts = sorted(path.iterdir())
    if levels == 0:
        return []
    # Fine-tuning runs are a benchmark, one row, unless they lie among runs of another sort.
    inner = title if {_sort(part) for part in parts} <= {"finetuning", None} else None
    found: list[Place] = []
    for part in parts:
        try:
            found += _below(part, f"{title}/{part.name}", inner, unread, levels=levels - 1)
        except (NotADirectoryError, FileNotFoundError):  # a file, or a link to nothing
            pass
        except OSError as error:
            unread.append(_unreadable(part, error))
    return found


def _unreadable(path: Path, error: OSError) -> ElectraError:
    return ElectraError(f"The folder cannot be read: {error.strerror}.", where=str(path), fix=_NAME)


def _sort(path: Path) -> Sort | None:
    # Not Path.is_file, which raises where a folder may not be read.
    return next((s for name, s in _SORTS.items() if os.path.isfile(path / name)), None)


def read_pretraining(path: Path, title: str, *, until: float = math.inf) -> Run:
    """A run of `electra pretrain`, up to the step `until`."""
    with reading(path / "metrics.jsonl", _FIX):
        metrics = [m for m in read_metrics(path) if m["step"] <= until]
        steps = max((int(m["step"]) for m in metrics), default=0)
        times = [float(m["seconds"]) for m in metrics if m["kind"] == "train"]
        held = [m for m in metrics if m["kind"] == "eval"]
        keys = (*HELD_OUT, *HEALTH, "unigram_entropy")
        curves = {
            kind: {key: _points(metrics, kind, key) for key in keys} for kind in ("eval", "train")
        }
        told = [(m["step"], str(m["warning"])) for m in metrics if "warning" in m]
    with reading(path / "run.json", _FIX):
        record = dict(json.loads((path / "run.json").read_bytes()))
        config = record["config"]
        data, settings, seconds = config["data"], config["run"], max(times, default=0.0)
        tokens = steps * int(data["batch_size"]) * int(data["sequence_length"])
        budget = 60 * settings["minutes"] if settings["minutes"] else math.inf
        # The clock may end a run between two lines of its log, so 98 % of it count as all.
        share = max(steps / settings["train_steps"], min(1.0, seconds / budget / 0.98))
        recipe = str(config["name"])
    state = "finished" if share >= 1 else f"not finished: {100 * share:.0f} %"
    run: Run = {"run": title, "kind": "pretrain", "state": state, "recipe": recipe}
    run |= {"steps": steps, "tokens": tokens, "seconds": round(seconds, 1), "curves": curves}
    run |= {"record": record, "warnings": [f"step {step:,}: {text}" for step, text in told]}
    return run | {key: held[-1].get(key) if held else None for key in HELD_OUT}


def _points(metrics: list[dict[str, Any]], kind: str, key: str) -> list[tuple[float, float]]:
    """(step, value) where there is a value."""
    return [(m["step"], m[key]) for m in metrics if m["kind"] == kind and is_finite(m.get(key))]


def read_results(path: Path, title: str, row: str | None) -> Run:
    """The results, or as much as is known of a run that has none yet."""
    begun, told = path / "finetune.json", list[str]()
    is_done = (path / "results.json").is_file()
    with _record(path / "results.json" if is_done else begun) as read:
        metric, model = str(read["task"]["metric"]), str(read["model"])
        run: Run = {"run": title, "kind": "finetune", "state": "finished", "row": row or model}
        run |= {"task": str(read["task"]["name"]), "metric": metric, "model": model}
        found = len(read["seeds"]) if is_done else len(list(path.glob("seed-*/result.json")))
        # finetune.json also tells of seeds that were asked for later.
        wanted = json.loads(begun.read_bytes())["settings"]["seeds"] if begun.is_file() else found
        if found < int(wanted):
            run["state"] = f"not finished: {found} of {wanted} seeds"
        if is_done:
            run |= {key: number_or_none(read["summary"][key]) for key in SUMMARY}
            run |= {key: int(read["summary"][key]) for key in ("seeds", "failed")}
            ensemble = next(iter(dict(read["ensemble"] or {}).values()), {})
            run["ensemble"] = number_or_none(dict(ensemble).get(metric))
            scores = [number_or_none(seed["score"]) for seed in read["seeds"] if not seed["failed"]]
            run["scores"] = [score for score in scores if score is not None]
            reported = [next(iter(dict(s.get("scores", {})).values()), {}) for s in read["seeds"]]
            if macro := [_needed(s["macro_f1"]) for s in reported if "macro_f1" in s]:
                run["macro_f1"] = float(np.median(macro))
            run["confusion"] = confusion_table(read)
            for key, what in (("failed", "learned nothing"), ("bad_steps", "had steps left out")):
                found_bad = [str(int(seed["seed"])) for seed in read["seeds"] if seed.get(key)]
                told += [f"seed {', '.join(found_bad)} {what}"] * bool(found_bad)
        run |= {"record": dict(read), "warnings": told}
    return run | {"losses": seed_losses(path)}


def rows_of(runs: list[Run]) -> tuple[list[str], dict[str, dict[str, Run]]]:
    """The columns, and row -> column -> run; a place that is taken opens a row of its own."""
    rows: dict[str, dict[str, Run]] = {}
    columns = [f"{run['task']}, {run['metric']}" for run in runs]
    for run, column in zip(runs, columns, strict=True):
        row = run["run"] if column in rows.get(run["row"], {}) else run["row"]
        rows.setdefault(row, {})[column] = run
    return list(dict.fromkeys(columns)), rows


@contextmanager
def _record(file: Path) -> Generator[dict[str, Any]]:
    """A record of format 1; what goes wrong in the block is its fault."""
    with reading(file, _FIX):
        read = json.loads(file.read_bytes())
        if read["format"] != 1:
            raise ValueError(f"format {read['format']} is not 1")
        yield read


def seed_losses(path: Path) -> list[list[tuple[float, float]]]:
    """Training loss of each seed of a fine-tuning run, over the share of its steps in percent."""
    with reading(path / "metrics.jsonl", _FIX):
        seeds: dict[Any, list[float]] = {}
        for m in read_metrics(path):
            if m["kind"] == "train" and is_finite(m.get("loss")):
                seeds.setdefault(m.get("seed"), []).append(m["loss"])
    return [
        [(100 * (i + 1) / len(values), value) for i, value in enumerate(values)]
        for values in seeds.values()
    ]


# ---------------------------------------------------------------------- studies


def read_study(path: Path, title: str) -> Study:
    rows: dict[str, list[Run]] = {}
    with _record(path / "ablate.json") as read:
        tasks = [str(task) for task in read["tasks"]]
        for one in read["cells"]:
            cell: Run = {k: str(one[k]) for k in ("label", "state")}
            cell |= {k: int(one[k]) for k in ("seed", "steps", "tokens", "parameters")}
            cell |= {"flops": _needed(one["flops"]), "differs": dict(one["differs"])}
            if one["state"] == "finished":
                cell |= {key: number_or_none(one["held_out"][key]) for key in CURVES}
                cell |= {key: _needed(one[key]) for key in ("score", "seconds")}
                cell["scores"] = {
                    task: {"metric": str(one["scores"][task]["metric"])}
                    | {key: _needed(one["scores"][task][key]) for key in SUMMARY}
                    for task in tasks
                }
                columns = ("step", *CURVES)
                cell["curve"] = [
                    {k: number_or_none(point[k]) for k in columns} for point in one["curve"]
                ]
            cell["run"] = title
            rows.setdefault(cell["label"], []).append(cell)
        # A setting that is younger than the record had its default.
        settings = flat(to_dict(PretrainConfig())) | flat(dict(read["base"]))
        del settings["run.seed"]
        more = ("equal", "corpus_fingerprint", "tuning", "tuning_seeds")
        settings |= {key: read[key] for key in more} | {"tasks": sorted(tasks)}
        return Study(title, str(read["study"]), tasks, rows, settings, {title: _made(read)}, [])


def _made(record: dict[str, Any]) -> str:
    """The program of a study's record and the machines of its cells."""
    places = [dict(cell["environment"]) for cell in record["cells"] if "environment" in cell]
    kinds = dict.fromkeys(f"{p.get('device', '?')}, torch {p.get('torch', '?')}" for p in places)
    return "; ".join([f"program {record['environment'].get('source', '?')}", *kinds])


def joined(studies: Sequence[Study]) -> list[Study]:
    """Records with the same settings and no cell in common as one study, the others as they are."""
    result: list[Study] = []
    for study in studies:
        for i, other in enumerate(result):
            if other.name != study.name:
                continue
            if not (reason := _apart(other, study)):
                result[i] = _join(other, study)
                break
            if other.settings["run.train_steps"] == study.settings["run.train_steps"]:
                study.notes.append(f"Not joined with {code(other.title)}: {reason}.")
        else:
            result.append(study)
    return result


def _apart(a: Study, b: Study) -> str:
    """Why two records of a study are not one, or nothing."""
    if changed := changes([a, b]):
        return "; ".join(changed)
    for key in a.rows.keys() & b.rows.keys():
        if a.rows[key][0]["differs"] != b.rows[key][0]["differs"]:
            return f"{code(key)} has other settings"
    if twice := sorted(_finished(a).keys() & _finished(b).keys()):
        more = f" and {len(twice) - 1} more" if len(twice) > 1 else ""
        return f"both have {code(twice[0][0])}, seed {twice[0][1]}{more}"
    return ""


def changes(studies: Sequence[Study]) -> list[str]:
    """The settings that are not the same in all studies, as Markdown."""
    keys = sorted({key for study in studies for key in study.settings})
    values = {key: [study.settings.get(key) for study in studies] for key in keys}
    return [
        f"{code(key)} is {', '.join(code(value) for value in each)}"
        for key, each in values.items()
        if any(value != each[0] for value in each)
    ]


def _finished(study: Study) -> dict[tuple[str, int], Run]:
    """The cells that have a score, by label and seed."""
    cells = (cell for cells in study.rows.values() for cell in cells if "score" in cell)
    return {(cell["label"], cell["seed"]): cell for cell in cells}


def _join(a: Study, b: Study) -> Study:
    cells = {(c["label"], c["seed"]): c for s in (a, b) for row in s.rows.values() for c in row}
    cells |= _finished(a) | _finished(b)  # whichever record has what the other lacks
    rows: dict[str, list[Run]] = {key: [] for key in (*a.rows, *b.rows)}
    for (key, _), cell in sorted(cells.items(), key=lambda item: item[0][1]):
        rows[key].append(cell)
    title, made = f"{a.title} + {b.title}", a.made | b.made
    said = [f"{code(name)} by {code(what)}" for name, what in made.items()]
    alike = "the same" if len(set(made.values())) == 1 else "not the same"
    notes = [note for note in (*a.notes, *b.notes) if not note.startswith(_JOINED)]
    notes.append(f"{_JOINED}: {', '.join(said)}. Program and machine are {alike}.")
    return Study(title, a.name, a.tasks, rows, a.settings, made, notes)


# ---------------------------------------------------------------------- what several seeds come to


class Spread(NamedTuple):
    """Mean, standard deviation of a sample, and half of the 95 % confidence interval by t."""

    mean: float
    std: float | None
    half: float | None

    def __str__(self) -> str:
        """71.2 ± 0.4 (70.2 to 72.2), × 100"""
        if self.std is None or self.half is None:
            return f"{100 * self.mean:.1f}"
        low, high = 100 * (self.mean - self.half), 100 * (self.mean + self.half)
        return f"{100 * self.mean:.1f} ± {100 * self.std:.1f} ({low:.1f} to {high:.1f})"


def spread(values: Sequence[float]) -> Spread | None:
    """Of the values of several seeds; a single one has no spread, none have no mean either."""
    if len(values) < 2:
        return Spread(values[0], None, None) if values else None
    std = float(np.std(values, ddof=1))
    return Spread(float(np.mean(values)), std, half_width(len(values)) * std)


@functools.cache
def half_width(n: int) -> float:
    """Half of the 95 % confidence interval of n values by Student's t, in standard deviations."""
    # With t = √f tan θ the density of Student's t with f degrees of freedom is cosᶠ⁻¹ θ.
    middle = np.pi * ((np.arange(1_000_000) + 0.5) / 1_000_000 - 0.5)
    mass = np.cumsum(np.cos(middle) ** (n - 2))
    theta = np.interp(0.975 * mass[-1], mass, middle + np.pi / 2e6)
    return math.sqrt((n - 1) / n) * math.tan(theta)


def values_of(cells: Sequence[Run], key: str) -> list[float]:
    """The numbers of the cells that have one."""
    return [cell[key] for cell in cells if cell.get(key) is not None]


def gap_of(study: Study, label: str, other: str) -> Spread | None:
    """How far a setting is above another one."""
    return spread(gaps_of(study, label, other))


def gaps_of(study: Study, label: str, other: str) -> list[float]:
    """The same of every seed that both have: the seeds share text and masks."""
    ours, theirs = (
        {cell["seed"]: cell["score"] for cell in study.rows.get(key, []) if "score" in cell}
        for key in (label, other)
    )
    return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]


# ---------------------------------------------------------------------- names of others, tables


def one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def code(text: object) -> str:
    """Somebody's text as Markdown code, where nothing has a meaning, on one line of a table."""
    line = one_line(str(text)).strip()
    return "`" + (line.replace("`", "'").replace("|", "¦") or " ") + "`"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def confusion_table(record: dict[str, Any]) -> list[str]:
    """Labels against answers where the run reports; of many classes the pairs confused most."""
    if not (tables := dict(record.get("confusion") or {})):
        return []
    split, counts = next(iter(tables.items()))
    labels = [str(label) for label in record["task"]["labels"]]
    said = f"Rows of {code(split)} by their label, and by the answer of the best seed"
    if len(labels) <= _SQUARE:
        cells = [[str(int(counts.get(y, {}).get(p, 0))) for p in labels] for y in labels]
        rows = [[code(y), *row] for y, row in zip(labels, cells, strict=True)]
        return [f"{said}:", "", *table(["label", *map(code, labels)], rows)]
    wrong = [(-int(n), y, p) for y, row in counts.items() for p, n in row.items() if p != y]
    if not wrong:
        return []
    rows = [[code(y), code(p), str(-n)] for n, y, p in sorted(wrong)[:_SQUARE]]
    return [f"{said}, where it errs most often:", "", *table(["label", "answer", "rows"], rows)]
