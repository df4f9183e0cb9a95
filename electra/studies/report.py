"""Runs side by side: Markdown to read, report.csv to compute with, report.png for a look, and
report.html with all there is to know of them on one page (`report_html.py`).

Comes in: directories of pre-training runs (run.json, metrics.jsonl), of fine-tuning runs
(results.json), of benchmarks, which hold one fine-tuning run per task, and of studies
(ablate.json). Goes out: a table of each sort, one for records of a study that differ in their seeds
alone, and the paper's order by scale where a study was run at several. Names of runs, tasks and
models are somebody else's text, so they are shown as code in Markdown, never start a formula in
CSV, and are no mathematics in the picture.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import json
import math
import re
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..config import PretrainConfig, flat, to_dict
from ..errors import ElectraError
from ..files import reading, storage_errors, write_atomic
from ..finetuning.metrics import EPOCH_CHOICE
from ..runlog import read_metrics
from .ablate import CURVES, PAPER, STUDIES

_NONE = "–"
_FIX = "restore the file from a backup, or leave this run out"
_SQUARE = 12  # classes up to which a whole table of answers is shown; pairs of more
_FORMULA = re.compile(r"\s*[=+\-@]|[\t\r\n]")
_SUMMARY = ("median", "mean", "std", "best", "seeds", "failed")
HELD_OUT = {  # held-out numbers of a pre-training run
    "mlm_loss": "generator loss",
    "disc_loss": "discriminator loss",
    "disc_auc": "AUC of replaced tokens",
}
_HEALTH = {  # and what training itself tells
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second",
}
_COLUMNS = (
    *("run", "kind", "state", "task", "metric", "model", *_SUMMARY, "ensemble"),
    *("recipe", "steps", "tokens", "seconds", *HELD_OUT),
)
_STUDY_COLUMNS = ("label", "seed", "flops", "parameters", "mlm_accuracy", "score")
# Values of a run by column; those that do not apply to it are missing. Pre-training has also
# `curves`, (step, value) by name, held out and in training; fine-tuning `scores` of the seeds that
# did not fail, `losses` of each seed, and `row` of the table of medians: the benchmark, or what a
# run of one task started from. A cell of a study has `scores`, by task, and `curve`. `record` is
# what the run says of itself, `metrics` its log, `warnings` what somebody should look at.
_Run = dict[str, Any]
Panel = Callable[[Any], None]  # draws one picture on an axis


class _Study(NamedTuple):
    """A directory of `electra ablate`: its cells by label, in the order of the study."""

    title: str
    name: str
    tasks: list[str]
    rows: dict[str, list[_Run]]
    settings: dict[str, Any]  # all but the seeds, by dotted name
    made: dict[str, str]  # by title: which program and machine; several where records were joined
    notes: list[str]


class Section(NamedTuple):
    """One sort of runs: its tables, the pictures that belong to them, and the runs themselves."""

    lines: list[str]
    panels: list[Panel]
    more: list[Panel]  # of the page only
    runs: list[_Run]


def report(runs: Sequence[Path], out: Path | None = None) -> str:
    """Markdown tables of the runs; with `out` also report.md, .csv, .png and .html there."""
    return report_sections(read_sections(runs), out)


def report_sections(sections: Sequence[Section], out: Path | None = None) -> str:
    """The same of what was read already."""
    text = "\n".join(line for section in sections for line in section.lines)
    if out is not None:
        from .report_html import page

        with storage_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        found = [run for section in sections for run in section.runs]
        columns = _COLUMNS + (_STUDY_COLUMNS if any(r["kind"] == "ablate" for r in found) else ())
        columns += ("macro_f1",) * any("macro_f1" in run for run in found)
        panels = [panel for section in sections for panel in section.panels]
        write_atomic(out / "report.md", f"# Report\n\n{text}".encode())
        write_atomic(out / "report.csv", _csv(found, columns))
        write_atomic(out / "report.png", draw(panels))
        write_atomic(out / "report.html", page(sections).encode())
    return text


def read_sections(runs: Sequence[Path]) -> list[Section]:
    """The runs by sort: pre-training, fine-tuning, and each study."""
    paths = list(dict.fromkeys(map(Path, runs)))
    if not paths:
        fix = "give the --out directories of `electra pretrain`, `finetune`, `glue` or `ablate`"
        raise ElectraError("No run is named.", where="RUN", fix=fix)
    names = [path.resolve().name for path in paths]
    pretrained: list[_Run] = []
    finetuned: list[_Run] = []
    studies: list[_Study] = []
    for path, name in zip(paths, names, strict=True):
        title = name if names.count(name) == 1 else str(path)
        if (path / "ablate.json").is_file():
            studies.append(_read_study(path, title))
        elif (path / "run.json").is_file():
            pretrained.append(read_pretraining(path, title))
        else:
            finetuned += _read_finetuning(path, title)
    sections: list[Section] = []
    if pretrained:
        panels, more = curve_panels(pretrained, HELD_OUT), curve_panels(pretrained, _HEALTH)
        sections.append(Section(_pretraining_table(pretrained), panels, more, pretrained))
    if finetuned:
        more = [loss_panel(finetuned)] * any(run["losses"] for run in finetuned)
        table = _finetuning_tables(finetuned)
        sections.append(Section(table, [_scores_panel(finetuned)], more, finetuned))
    same: dict[tuple[str, ...], list[_Study]] = {}
    for study in _joined(studies):
        figures, cells = _study_figures(study), _study_runs(study)
        sections.append(Section(_study_table(study), figures, [], cells))
        if study.rows:
            same.setdefault((study.name, *sorted(study.tasks)), []).append(study)
    for several in same.values():
        sections += _by_scale(several) if len(several) > 1 else []
    return sections


def is_finite(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)


def _number(value: Any) -> float | None:
    """A finite number or nothing; raises on anything else."""
    if value is not None and not is_finite(value):
        raise ValueError(f"{value!r} is no finite number")
    return value


def _needed(value: Any) -> float:
    if (number := _number(value)) is None:
        raise ValueError("a number is missing")
    return number


def read_log(path: Path) -> list[dict[str, Any]]:
    """The metrics of a run that may have none yet."""
    return read_metrics(path) if (path / "metrics.jsonl").is_file() else []


def read_pretraining(path: Path, title: str, *, until: float = math.inf) -> _Run:
    """A run of `electra pretrain`, up to the step `until`."""
    with reading(path / "metrics.jsonl", _FIX):
        metrics = [m for m in read_log(path) if m["step"] <= until]
        steps = max((int(m["step"]) for m in metrics), default=0)
        times = [float(m["seconds"]) for m in metrics if m["kind"] == "train"]
        held = [m for m in metrics if m["kind"] == "eval"]
        curves = {
            kind: {key: _points(metrics, kind, key) for key in (*HELD_OUT, *_HEALTH)}
            for kind in ("eval", "train")
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
    run: _Run = {"run": title, "kind": "pretrain", "state": state, "recipe": recipe}
    run |= {"steps": steps, "tokens": tokens, "seconds": round(seconds, 1), "curves": curves}
    run |= {"record": record, "warnings": [f"step {step:,}: {text}" for step, text in told]}
    return run | {key: held[-1].get(key) if held else None for key in HELD_OUT}


def _points(metrics: list[dict[str, Any]], kind: str, key: str) -> list[tuple[float, float]]:
    """(step, value) where there is a value."""
    return [(m["step"], m[key]) for m in metrics if m["kind"] == kind and is_finite(m.get(key))]


def _read_finetuning(path: Path, title: str) -> list[_Run]:
    """One run, or those of all tasks of a benchmark."""
    records = ("results.json", "finetune.json")
    parts = [p for p in (path, *sorted(path.glob("*"))) if any((p / n).is_file() for n in records)]
    if not parts:
        what = "There is no run here: no run.json, finetune.json, results.json or ablate.json."
        fix = "give the --out directory of `electra pretrain`, `finetune`, `glue` or `ablate`"
        raise ElectraError(what, where=str(path), fix=fix)
    if parts[0] == path:
        return [read_results(path, title, None)]
    return [read_results(part, f"{title}/{part.name}", title) for part in parts]


def read_results(path: Path, title: str, row: str | None) -> _Run:
    """The results, or as much as is known of a run that has none yet."""
    begun, told = path / "finetune.json", list[str]()
    is_done = (path / "results.json").is_file()
    with _record(path / "results.json" if is_done else begun) as read:
        metric, model = str(read["task"]["metric"]), str(read["model"])
        run: _Run = {"run": title, "kind": "finetune", "state": "finished", "row": row or model}
        run |= {"task": str(read["task"]["name"]), "metric": metric, "model": model}
        found = len(read["seeds"]) if is_done else len(list(path.glob("seed-*/result.json")))
        # finetune.json also tells of seeds that were asked for later.
        wanted = json.loads(begun.read_bytes())["settings"]["seeds"] if begun.is_file() else found
        if found < int(wanted):
            run["state"] = f"not finished: {found} of {wanted} seeds"
        if is_done:
            run |= {key: _number(read["summary"][key]) for key in _SUMMARY}
            run |= {key: int(read["summary"][key]) for key in ("seeds", "failed")}
            ensemble = next(iter(dict(read["ensemble"] or {}).values()), {})
            run["ensemble"] = _number(dict(ensemble).get(metric))
            scores = [_number(seed["score"]) for seed in read["seeds"] if not seed["failed"]]
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
        for m in read_log(path):
            if m["kind"] == "train" and is_finite(m.get("loss")):
                seeds.setdefault(m.get("seed"), []).append(m["loss"])
    return [
        [(100 * (i + 1) / len(values), value) for i, value in enumerate(values)]
        for values in seeds.values()
    ]


def _read_study(path: Path, title: str) -> _Study:
    rows: dict[str, list[_Run]] = {}
    with _record(path / "ablate.json") as read:
        tasks = [str(task) for task in read["tasks"]]
        for one in read["cells"]:
            cell: _Run = {k: str(one[k]) for k in ("label", "state")}
            cell |= {k: int(one[k]) for k in ("seed", "steps", "tokens", "parameters")}
            cell |= {"flops": _needed(one["flops"]), "differs": dict(one["differs"])}
            if one["state"] == "finished":
                cell |= {key: _number(one["held_out"][key]) for key in CURVES}
                cell |= {key: _needed(one[key]) for key in ("score", "seconds")}
                cell["scores"] = {
                    task: {"metric": str(one["scores"][task]["metric"])}
                    | {key: _needed(one["scores"][task][key]) for key in _SUMMARY}
                    for task in tasks
                }
                columns = ("step", *CURVES)
                cell["curve"] = [{k: _number(point[k]) for k in columns} for point in one["curve"]]
            cell["run"] = title
            rows.setdefault(cell["label"], []).append(cell)
        # A setting that is younger than the record had its default.
        settings = flat(to_dict(PretrainConfig())) | flat(dict(read["base"]))
        del settings["run.seed"]
        more = ("equal", "corpus_fingerprint", "tuning", "tuning_seeds")
        settings |= {key: read[key] for key in more} | {"tasks": sorted(tasks)}
        return _Study(title, str(read["study"]), tasks, rows, settings, {title: _made(read)}, [])


def _made(record: dict[str, Any]) -> str:
    """The program of a study's record and the machines of its cells."""
    places = [dict(cell["environment"]) for cell in record["cells"] if "environment" in cell]
    kinds = dict.fromkeys(f"{p.get('device', '?')}, torch {p.get('torch', '?')}" for p in places)
    return "; ".join([f"program {record['environment'].get('source', '?')}", *kinds])


def _joined(studies: Sequence[_Study]) -> list[_Study]:
    """Records with the same settings and no cell in common as one study, the others as they are."""
    result: list[_Study] = []
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


def _apart(a: _Study, b: _Study) -> str:
    """Why two records of a study are not one, or nothing."""
    if changed := _changed([a, b]):
        return "; ".join(changed)
    for key in a.rows.keys() & b.rows.keys():
        if a.rows[key][0]["differs"] != b.rows[key][0]["differs"]:
            return f"{code(key)} has other settings"
    if twice := sorted(_finished(a).keys() & _finished(b).keys()):
        more = f" and {len(twice) - 1} more" if len(twice) > 1 else ""
        return f"both have {code(twice[0][0])}, seed {twice[0][1]}{more}"
    return ""


def _changed(studies: Sequence[_Study]) -> list[str]:
    """The settings that are not the same in all studies, as Markdown."""
    keys = sorted({key for study in studies for key in study.settings})
    values = {key: [study.settings.get(key) for study in studies] for key in keys}
    return [
        f"{code(key)} is {', '.join(code(value) for value in each)}"
        for key, each in values.items()
        if any(value != each[0] for value in each)
    ]


def _finished(study: _Study) -> dict[tuple[str, int], _Run]:
    """The cells that have a score, by label and seed."""
    cells = (cell for cells in study.rows.values() for cell in cells if "score" in cell)
    return {(cell["label"], cell["seed"]): cell for cell in cells}


def _join(a: _Study, b: _Study) -> _Study:
    cells = {(c["label"], c["seed"]): c for s in (a, b) for row in s.rows.values() for c in row}
    cells |= _finished(a) | _finished(b)  # whichever record has what the other lacks
    rows: dict[str, list[_Run]] = {key: [] for key in (*a.rows, *b.rows)}
    for (key, _), cell in sorted(cells.items(), key=lambda item: item[0][1]):
        rows[key].append(cell)
    title, made = f"{a.title} + {b.title}", a.made | b.made
    said = [f"{code(name)} by {code(what)}" for name, what in made.items()]
    alike = "the same" if len(set(made.values())) == 1 else "not the same"
    notes = [note for note in (*a.notes, *b.notes) if not note.startswith(_JOINED)]
    notes.append(f"{_JOINED}: {', '.join(said)}. Program and machine are {alike}.")
    return _Study(title, a.name, a.tasks, rows, a.settings, made, notes)


_JOINED = "Records with the same settings, corpus and tasks and other seeds or rows, joined"


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def code(text: object) -> str:
    """Somebody's text as Markdown code, where nothing has a meaning, on one line of a table."""
    line = _one_line(str(text)).strip()
    return "`" + (line.replace("`", "'").replace("|", "¦") or " ") + "`"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def long_form(summary: dict[str, Any]) -> str:
    """57.3 (mean 56.9 ± 1.2, best 58.0, 5 seeds, 0 failed)"""
    median, mean, std, best = (_percent(_number(summary[key])) for key in _SUMMARY[:4])
    seeds, failed = (int(summary[key]) for key in _SUMMARY[4:])
    return f"{median} (mean {mean} ± {std}, best {best}, {seeds} seeds, {failed} failed)"


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


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.1f}"


def _pretraining_table(runs: list[_Run]) -> list[str]:
    head = ["run", "recipe", "state", "steps", "tokens", "minutes", *HELD_OUT.values()]
    rows: list[list[str]] = []
    for run in runs:
        row = [code(run["run"]), code(run["recipe"]), run["state"], f"{run['steps']:,}"]
        row += [f"{run['tokens']:,}", f"{run['seconds'] / 60:.1f}"]
        rows.append(row + [f"{run[k]:.4g}" if is_finite(run[k]) else _NONE for k in HELD_OUT])
    return ["## Pre-training: the last look at held-out text", "", *table(head, rows), ""]


def _medians(runs: list[_Run]) -> tuple[list[str], dict[str, dict[str, _Run]]]:
    """The columns, and row -> column -> run; a place that is taken opens a row of its own."""
    rows: dict[str, dict[str, _Run]] = {}
    columns = [f"{run['task']}, {run['metric']}" for run in runs]
    for run, column in zip(runs, columns, strict=True):
        row = run["run"] if column in rows.get(run["row"], {}) else run["row"]
        rows.setdefault(row, {})[column] = run
    return list(dict.fromkeys(columns)), rows


def _finetuning_tables(runs: list[_Run]) -> list[str]:
    columns, cells = _medians(runs)
    short: list[list[str]] = []
    for name, row in cells.items():
        found = [row.get(column, {"state": "finished"}) for column in columns]
        medians: list[Any] = [run.get("median") for run in found]
        # A mean over other tasks than those of the next row would compare what cannot be.
        mean = None if None in medians else sum(medians) / len(medians)
        shown = [_percent(run.get("median")) + " †" * (run["state"] != "finished") for run in found]
        short.append([code(name), *shown, _percent(mean)])
    long: list[list[str]] = []
    for run in runs:
        names = [code(run[key]) for key in ("run", "task", "metric", "model")]
        score = long_form(run) if "median" in run else _NONE
        long.append([*names, run["state"], score, _percent(run.get("ensemble"))])
    lines = ["## Fine-tuning: median of the seeds × 100", ""]
    lines += table(["run", *map(code, columns), "mean over tasks"], short)
    lines += ["", "† not finished"] * any(run["state"] != "finished" for run in runs)
    head = ["run", "task", "metric", "starts from", "state", "median (mean ± std, best)"]
    lines += ["", "### All numbers × 100", "", *table([*head, "ensemble"], long), ""]
    for run in (run for run in runs if "epoch_choice" in run["record"]):
        lines += [f"{code(run['run'])}: {EPOCH_CHOICE}", ""]
    for run in (run for run in runs if "macro_f1" in run):
        score = f", macro-F1 × 100 {_percent(run['macro_f1'])} (median of the seeds)"
        lines += [f"### {code(run['run'])}{score}", "", *run["confusion"], ""]
    return lines


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
    return Spread(float(np.mean(values)), std, _half_width(len(values)) * std)


@functools.cache
def _half_width(n: int) -> float:
    """Half of the 95 % confidence interval of n values by Student's t, in standard deviations."""
    # With t = √f tan θ the density of Student's t with f degrees of freedom is cosᶠ⁻¹ θ.
    middle = np.pi * ((np.arange(1_000_000) + 0.5) / 1_000_000 - 0.5)
    mass = np.cumsum(np.cos(middle) ** (n - 2))
    theta = np.interp(0.975 * mass[-1], mass, middle + np.pi / 2e6)
    return math.sqrt((n - 1) / n) * math.tan(theta)


def _values(cells: Sequence[_Run], key: str) -> list[float]:
    """The numbers of the cells that have one."""
    return [cell[key] for cell in cells if cell.get(key) is not None]


def _study_table(study: _Study) -> list[str]:
    """Per setting the mean over tasks of medians, over pre-training seeds, beside the paper's."""
    paper = PAPER.get(study.name, {})
    first = _first(study)
    head = ["setting", "seeds", "mean over tasks", f"minus {code(first)}", "paper"]
    head += [*map(code, study.tasks), "FLOPs", "steps", "MLM accuracy", "AUC"]
    rows: list[list[str]] = []
    scores = {label: spread(_values(cells, "score")) for label, cells in study.rows.items()}
    order = list(study.rows)
    if study.name not in STUDIES:  # a grid of one's own: the best first
        order.sort(key=lambda label: -(s.mean if (s := scores[label]) else -math.inf))
    for label in order:
        cells = study.rows[label]
        done = [cell for cell in cells if "score" in cell]
        medians = [spread([c["scores"][task]["median"] for c in done]) for task in study.tasks]
        accuracy, auc = (spread(_values(done, key)) for key in ("mlm_accuracy", "disc_auc"))
        gap = None if label == first else _gap(study, label, first)
        row = [code(label), f"{len(done)} of {len(cells)}", str(scores[label] or _NONE)]
        row += [str(gap or _NONE), paper.get(label, _NONE)]
        row += [_percent(m and m.mean) for m in medians]
        row += [f"{cells[0]['flops']:.3g}", f"{cells[0]['steps']:,}"]
        row += [_percent(accuracy and accuracy.mean), f"{auc.mean:.3f}" if auc else _NONE]
        rows.append(row)
    said = "Scores × 100: mean ± standard deviation (95 % confidence interval) over pre-training "
    said += "seeds."
    if study.name in STUDIES:
        said += " The paper's numbers are of Base size, all of GLUE, and far longer training."
    troubles = [
        f"- {code(cell['label'])}, seed {cell['seed']}: {code(cell['state'])}"
        for cells in study.rows.values()
        for cell in cells
        if "score" not in cell
    ]
    title = f"## Study {code(study.name)} in {code(study.title)}"
    lines = [title, "", *table(head, rows), "", said, "", *_paper_order(study)]
    lines += [line for note in study.notes for line in (note, "")]
    return [*lines, *troubles, *[""] * bool(troubles)]


def _first(study: _Study) -> str:
    """The row that is ELECTRA itself, where the study has one, else the first."""
    return min(study.rows, key=lambda label: bool(study.rows[label][0]["differs"]), default="")


def _gap(study: _Study, label: str, other: str) -> Spread | None:
    """How far a setting is above another one."""
    return spread(_gaps(study, label, other))


def _gaps(study: _Study, label: str, other: str) -> list[float]:
    """The same of every seed that both have: the seeds share text and masks."""
    ours, theirs = (
        {cell["seed"]: cell["score"] for cell in study.rows.get(key, []) if "score" in cell}
        for key in (label, other)
    )
    return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]


def _paper_pairs(name: str) -> dict[tuple[str, str], float]:
    """Every two settings that the paper has in an order, and by how much."""
    scores = PAPER.get(name, {}).items()
    paper = {label: float(score) for label, score in scores if re.fullmatch(r"[\d.]+", score)}
    pairs = itertools.permutations(paper, 2)
    return {(a, b): paper[a] - paper[b] for a, b in pairs if paper[a] > paper[b]}


def _verdict(gap: Spread, theirs: float) -> str:
    """What a difference says of the paper's; if nothing, the seeds that would show one as large.

    Those are as many as make half of the interval as small, at the spread that is seen.
    """
    if gap.std is None or gap.half is None:
        return "too few seeds to say"
    if abs(gap.mean) > gap.half:
        return "held" if gap.mean > 0 else "the reverse"
    ratio = 100 * gap.std / theirs
    if not ratio < 100:  # tens of thousands, or no number
        return "not shown"
    n = max(2, math.ceil((1.9599 * ratio) ** 2))  # t is above it for every n
    while _half_width(n) * ratio > 1:
        n += 1
    return f"not shown ({n:,} seeds)"


_SEEDS = "In brackets: how many seeds would show the paper's difference at the spread seen here."


def _paper_order(study: _Study) -> list[str]:
    """What our differences say of every two settings that the paper has in an order."""
    rows = [
        [f"{code(a)} above {code(b)}", f"{theirs:.1f}", str(gap), _verdict(gap, theirs)]
        for (a, b), theirs in _paper_pairs(study.name).items()
        if (gap := _gap(study, a, b))
    ]
    if not rows:
        return []
    head = ["the paper's order", "by", "here, 95 % confidence interval", "verdict"]
    return [*table(head, rows), "", *[_SEEDS, ""] * any("not shown" in row[-1] for row in rows)]


def _by_scale(studies: Sequence[_Study]) -> list[Section]:
    """One study at several scales, the smallest first: the paper's order, from which scale on it is
    held, and how its differences change with the scale."""
    # A row that all have tells the scale, ELECTRA where it is one of them: some may lack rows.
    shared = [key for key in studies[0].rows if all(key in study.rows for study in studies)]
    row = min(shared, key=lambda key: bool(studies[0].rows[key][0]["differs"]), default=None)
    sizes = [(study.rows[row or _first(study)][0], study) for study in studies]
    sizes.sort(key=lambda size: size[0]["flops"])
    scales = [f"{cell['steps']:,} steps ({cell['flops']:.3g} FLOPs)" for cell, _ in sizes]
    rows: list[list[str]] = []
    pairs: list[tuple[str, str]] = []  # those that are not held at every scale
    for (a, b), theirs in _paper_pairs(studies[0].name).items():
        found = [_gaps(study, a, b) for _, study in sizes]
        gaps, since = list(map(spread, found)), ""
        for scale, gap in zip(scales, gaps, strict=True):
            if gap and gap.half is not None:  # a scale with fewer than two seeds says nothing
                since = (since or scale) if gap.mean > gap.half else ""
        if any(gaps):
            shown = [f"{gap}: {_verdict(gap, theirs)}" if gap else "not run" for gap in gaps]
            points = [
                (math.log2(cell["flops"]), gap)
                for (cell, _), each in zip(sizes, found, strict=True)
                for gap in each
            ]
            pair = [f"{code(a)} above {code(b)}", f"{theirs:.1f}"]
            rows.append([*pair, *shown, _slope(points), since or "not yet"])
            if any(gap and not gap.mean > (gap.half or 0) for gap in gaps):
                pairs.append((a, b))
    if not rows:
        return []
    where = [f"{scale} in {code(s.title)}" for scale, (_, s) in zip(scales, sizes, strict=True)]
    head = ["the paper's order", "by", *where, "per doubling", "held from"]
    title = f"## Study {code(studies[0].name)}: the paper's order by scale"
    said = "Held from: the smallest scale that was run from which on the interval is above 0; "
    said += "what is held at the smallest of all may be held below it. Per doubling: by how much "
    said += "the difference grows when the FLOPs double (least squares over all seeds; 95 % "
    said += "confidence interval); above 0 it moves towards the paper's order."
    lines = [title, "", *table(head, rows), "", said, "", _SEEDS, ""]
    ordered = [study for _, study in sizes]
    besides = [text for text in _changed(ordered) if "`run.train_steps`" not in text]
    if besides:
        lines += [f"Besides the steps these differ, in this order: {'; '.join(besides)}.", ""]
    made = {name: what for study in ordered for name, what in study.made.items()}
    if len(set(made.values())) > 1:
        each = [f"{code(name)} by {code(what)}" for name, what in made.items()]
        lines += [f"Program or machine are not the same: {', '.join(each)}.", ""]
    return [Section(lines, _scale_figures(sizes, pairs), [], [])]


def _slope(points: Sequence[tuple[float, float]]) -> str:
    """Of the line through them, × 100, with its 95 % confidence interval by Student's t."""
    x, y = (np.array(values, dtype=np.float64) for values in zip(*points, strict=True))
    x, y = x - x.mean(), y - y.mean()
    square, freedom = float(x @ x), len(points) - 2
    if square < 1e-9:  # a single scale
        return _NONE
    slope = float(x @ y) / square
    if freedom < 1:
        return f"{100 * slope:+.1f}"
    rest = y - slope * x
    error = math.sqrt(float(rest @ rest) / freedom / square)
    half = error * _half_width(freedom + 1) * math.sqrt(freedom + 1)  # the t of `freedom`
    return f"{100 * slope:+.1f} ({100 * (slope - half):+.1f} to {100 * (slope + half):+.1f})"


def _study_runs(study: _Study) -> list[_Run]:
    """A line of CSV per cell and task, or one for a cell without scores."""
    lines: list[_Run] = []
    for cell in (cell for cells in study.rows.values() for cell in cells):
        run = {**cell, "kind": "ablate", "recipe": study.name}
        scores: dict[str, _Run] = cell.get("scores", {})
        lines += [{**run, "task": task, **score} for task, score in scores.items()] or [run]
    return lines


def _csv(runs: Sequence[_Run], columns: Sequence[str]) -> bytes:
    """Text that a spreadsheet would take for a formula gets an apostrophe; numbers stay."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore")
    writer.writeheader()
    for run in runs:
        formulas = {k: f"'{v}" for k, v in run.items() if isinstance(v, str) and _FORMULA.match(v)}
        writer.writerow(run | formulas)
    return text.getvalue().encode()


def label(text: str) -> str:
    """For a picture, without mathematics; matplotlib also hides what begins with an underscore."""
    return re.sub("^_", "\u200b_", _one_line(text)).replace("$", r"\$")


def curve_panels(runs: list[_Run], names: dict[str, str]) -> list[Panel]:
    """Learning curves of runs over steps: held out, and thin what training saw."""

    def draw(key: str, axis: Any) -> None:
        axis.set(title=names[key], xlabel="step")
        for i, run in enumerate(runs):
            name = label(run["run"])
            for kind, what, width in (("eval", "held out", 1.8), ("train", "training", 0.7)):
                if points := run["curves"][kind][key]:
                    name = what if len(runs) == 1 else name
                    style = {"color": f"C{i % 10}", "label": name, "linewidth": width}
                    axis.plot(*zip(*points, strict=True), **style)
                    name = None
        if key == "grad_norm":
            axis.set_yscale("log")
        axis.legend()

    curves = [curves for run in runs for curves in run["curves"].values()]
    return [functools.partial(draw, key) for key in names if any(c[key] for c in curves)]


def loss_panel(runs: list[_Run]) -> Panel:
    """Training losses of fine-tuning, a line per seed."""

    def draw(axis: Any) -> None:
        axis.set(title="training loss, a line per seed", xlabel="share of the steps, %")
        for i, run in enumerate(runs):
            for j, points in enumerate(run["losses"]):
                name = None if j or len(runs) == 1 else label(run["run"])
                axis.plot(*zip(*points, strict=True), color=f"C{i % 10}", linewidth=0.9, label=name)
        if len(runs) > 1:
            axis.legend()

    return draw


def _scores_panel(finetuned: list[_Run]) -> Panel:
    """Every seed's score with a dash at the median."""

    def draw(axis: Any) -> None:
        columns, rows = _medians(finetuned)
        axis.set_title("scores × 100: a dot per seed, a dash at the median")
        axis.set_xticks(range(len(columns)), list(map(label, columns)))
        axis.set_xlim(-0.6, len(columns) - 0.4)
        axis.tick_params("x", rotation=30)
        for i, (name, row) in enumerate(rows.items()):
            shift = (i - (len(rows) - 1) / 2) * 0.8 / len(rows)
            colour, width = f"C{i % 10}", 0.3 / len(rows)
            axis.scatter([], [], color=colour, label=label(name))
            for column, run in row.items():
                if run.get("median") is not None:
                    x, scores = columns.index(column) + shift, [100 * s for s in run["scores"]]
                    axis.scatter([x] * len(scores), scores, color=colour, alpha=0.6)
                    axis.hlines(100 * run["median"], x - width, x + width, color=colour)
        axis.legend()

    return draw


def draw(
    panels: Sequence[Panel],
    *,
    form: str = "png",
    size: tuple[float, float] = (5.5, 4.5),
    dpi: int = 110,
) -> bytes:
    """The panels side by side, four in a row."""
    from matplotlib.figure import Figure

    rows = max(1, math.ceil(len(panels) / 4))
    columns = max(1, math.ceil(len(panels) / rows))
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    axes: list[Any] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis, panel in zip(axes, panels, strict=False):
        panel(axis)
    for axis in axes[max(1, len(panels)) :]:
        axis.remove()
    picture = io.BytesIO()
    about = {"Date": None} if form == "svg" else None
    with warnings.catch_warnings():  # of letters that the font does not have
        warnings.simplefilter("ignore")
        figure.savefig(picture, format=form, dpi=dpi, metadata=about)
    return picture.getvalue()


def _errorbars(
    axis: Any,
    name: str,
    points: Sequence[tuple[float, Spread | None]],
    bars: str = "half",
    **style: Any,
) -> None:
    """Mean values over a number, and what the bars show of their spread, × 100."""
    there = [(x, 100 * s.mean, 100 * (getattr(s, bars) or 0.0)) for x, s in points if s is not None]
    if there:
        axis.errorbar(*zip(*there, strict=True), marker="o", capsize=3, label=label(name), **style)


def _legend(axis: Any, **place: Any) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(**place)


def _study_figures(study: _Study) -> list[Panel]:
    """The mean over tasks of each setting, and for some studies curves."""
    over = {"rtd-vs-mlm": _over_flops, "generator-size": _over_size}.get(study.name, _by_setting)

    def scores(axis: Any) -> None:
        over(study, axis)
        axis.set_title(label(f"{study.name}: mean over tasks × 100, 95 % confidence"))
        _legend(axis)

    def curve(key: str, title: str, axis: Any) -> None:
        for i, (name, cells) in enumerate(study.rows.items()):
            for j, cell in enumerate(cells):
                points = cell.get("curve", [])
                if known := [(p["step"], p[key]) for p in points if p[key] is not None]:
                    told = None if j else label(name)
                    axis.plot(*zip(*known, strict=True), color=f"C{i % 10}", label=told)
        axis.set(title=f"{title}, held out", xlabel="step")
        _legend(axis)

    if study.name != "algorithms":
        return [scores]
    names = {"mlm_accuracy": "generator's accuracy", "disc_auc": "AUC of replaced tokens"}
    return [scores, *(functools.partial(curve, key, title) for key, title in names.items())]


def _scores(study: _Study, rows: dict[str, float]) -> list[tuple[float, Spread | None]]:
    """Those of some settings over a number, in its order."""
    found = sorted(rows.items(), key=lambda row: row[1])
    return [(x, spread(_values(study.rows[key], "score"))) for key, x in found]


def _over_flops(study: _Study, axis: Any) -> None:
    families: dict[str, dict[str, float]] = {}
    for key, cells in study.rows.items():
        families.setdefault(key.partition(",")[0], {})[key] = cells[0]["flops"]
    for name, rows in families.items():
        _errorbars(axis, name, _scores(study, rows))
    axis.set(xscale="log", xlabel="training FLOPs (matrix products)")


def _over_size(study: _Study, axis: Any) -> None:
    sizes = {key: re.fullmatch(r"(width|depth) (\d)(?:/([1-9]))?", key) for key in study.rows}
    for part in ("width", "depth"):
        of_part = {key: m for key, m in sizes.items() if m and m[1] == part}
        shares = {key: int(m[2]) / int(m[3] or 1) for key, m in of_part.items()}
        _errorbars(axis, part, _scores(study, shares))
    for i, key in enumerate(key for key, m in sizes.items() if not m):
        if found := spread(_values(study.rows[key], "score")):
            axis.axhline(100 * found.mean, color=f"C{i + 2}", linestyle=":", label=label(key))
    axis.set(xlabel="generator as a share of the discriminator")


def _by_setting(study: _Study, axis: Any) -> None:
    names = list[str]()
    for i, (key, cells) in enumerate(study.rows.items()):
        if scores := [100 * score for score in _values(cells, "score")]:
            # A colour of its own, also where other settings were not run.
            point = [(len(names), spread(_values(cells, "score")))]
            _errorbars(axis, "", point, linestyle="none", color=f"C{i % 10}")
            axis.scatter([len(names)] * len(scores), scores, color="grey", s=9, zorder=3)
            names.append(label(key))
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right")


def _scale_figures(
    sizes: Sequence[tuple[_Run, _Study]], pairs: Sequence[tuple[str, str]]
) -> list[Panel]:
    """Scores over FLOPs by setting, and the differences of some pairs of settings."""
    name = sizes[0][1].name

    def finish(axis: Any, title: str, of: str) -> None:
        ticks = {
            cell["flops"]: f"{cell['steps']:,} steps\n{cell['flops']:.3g}" for cell, _ in sizes
        }
        axis.set(xscale="log", xlabel=f"training FLOPs {of}", title=label(f"{name}: {title}"))
        axis.set_xticks([], minor=True)
        axis.set_xticks(list(ticks), list(ticks.values()))
        # Below, where it hides no bar.
        _legend(axis, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize="small")

    def scores(axis: Any) -> None:
        for i, key in enumerate(dict.fromkeys(key for _, study in sizes for key in study.rows)):
            cells = [study.rows[key] for _, study in sizes if key in study.rows]
            found = [(row[0]["flops"], spread(_values(row, "score"))) for row in cells]
            _errorbars(axis, key, found, "std", markersize=4, color=f"C{i % 10}")
        finish(axis, "mean over tasks × 100, ± standard deviation", "of each setting")

    def differences(axis: Any) -> None:
        for i, (a, b) in enumerate(pairs):
            aside = 1.03 ** (i - (len(pairs) - 1) / 2)  # so that bars do not hide each other
            found = [(cell["flops"] * aside, _gap(study, a, b)) for cell, study in sizes]
            _errorbars(axis, f"{a} above {b}", found, markersize=4, color=f"C{i % 10}")
        axis.axhline(0, color="grey", linewidth=0.8)
        finish(axis, "not held at every scale, 95 % confidence", "of the scale")

    return [scores, *[differences] * bool(pairs)]
