"""Runs side by side: Markdown to read, report.csv to compute with, report.png for a look.

Comes in: directories of pre-training runs (run.json, metrics.jsonl), of fine-tuning runs
(results.json), and of benchmarks, which hold one fine-tuning run per task. Goes out: a table of
each sort. Names of runs, tasks and models are somebody else's text, so they are shown as code in
Markdown, never start a formula in CSV, and are no mathematics in the picture.
"""

from __future__ import annotations

import csv
import io
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CorruptError, ElectraError
from .files import storage_errors, write_atomic
from .runlog import read_metrics

_NONE = "–"
_SUMMARY = ("median", "mean", "std", "best", "seeds", "failed")
_CURVES = {  # held-out numbers of a pre-training run
    "mlm_loss": "generator loss",
    "disc_loss": "discriminator loss",
    "disc_auc": "AUC of replaced tokens",
}
_COLUMNS = (
    *("run", "kind", "state", "task", "metric", "model", *_SUMMARY, "ensemble"),
    *("recipe", "steps", "tokens", "seconds", *_CURVES),
)


@dataclass(frozen=True)
class Pretraining:
    """A run of `electra pretrain`, by its own record and metrics."""

    run: str
    values: dict[str, Any]  # by names of _COLUMNS
    curves: dict[str, list[tuple[int, float]]]  # (step, value), by names of _CURVES


@dataclass(frozen=True)
class Finetuning:
    """A task that a model was fine-tuned on, with some seeds; without any it has only begun."""

    run: str
    row: str  # of the table of medians: the benchmark, or what a run of one task started from
    values: dict[str, Any]  # by names of _COLUMNS
    scores: tuple[float, ...] = ()  # of the seeds that did not fail


def report(runs: Sequence[Path], out: Path | None = None) -> str:
    """Markdown tables of the runs; with `out` also report.md, report.csv and report.png there."""
    paths = list(dict.fromkeys(map(Path, runs)))
    names = [path.resolve().name for path in paths]
    pretrained: list[Pretraining] = []
    finetuned: list[Finetuning] = []
    for path, name in zip(paths, names, strict=True):
        title = name if names.count(name) == 1 else str(path)
        if (path / "run.json").is_file():
            pretrained.append(_read_pretraining(path, title))
        else:
            finetuned += _read_finetuning(path, title)
    text = "\n".join(_pretraining_table(pretrained) + _finetuning_tables(finetuned))
    if out is not None:
        with storage_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / "report.md", f"# Report\n\n{text}".encode())
        write_atomic(out / "report.csv", _csv([*pretrained, *finetuned]))
        write_atomic(out / "report.png", _draw(pretrained, finetuned))
    return text


# ---------------------------------------------------------------------- reading


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> CorruptError:
    return CorruptError(
        f"The record of a run cannot be read: {type(error).__name__}: {error}.",
        where=str(path),
        fix="restore the file from a backup, or leave this run out",
    )


def _number(value: Any) -> float | None:
    """A finite number or nothing; raises on anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return value


def _read_pretraining(path: Path, title: str) -> Pretraining:
    try:
        metrics = read_metrics(path) if (path / "metrics.jsonl").is_file() else []
        rows = {kind: [m for m in metrics if m["kind"] == kind] for kind in ("train", "eval")}
        points = {
            key: [(int(m["step"]), m[key]) for m in rows["eval"] if _is_finite(m.get(key))]
            for key in _CURVES
        }
        steps = max((int(m["step"]) for m in metrics), default=0)
        seconds = max((float(m["seconds"]) for m in rows["train"]), default=0.0)
        last = rows["eval"][-1] if rows["eval"] else {}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path / "metrics.jsonl", error) from error
    try:
        config = _read_json(path / "run.json")["config"]
        data, settings = config["data"], config["run"]
        tokens = steps * data["batch_size"] * data["sequence_length"]
        budget = 60 * settings["minutes"] if settings["minutes"] else math.inf
        # The clock may end a run between two lines of its log, so 98 % of it count as all.
        share = max(steps / settings["train_steps"], min(1.0, seconds / budget / 0.98))
        recipe = str(config["name"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise _damaged(path / "run.json", error) from error
    state = "finished" if share >= 1 else f"not finished: {100 * share:.0f} %"
    values = {"recipe": recipe, "steps": steps, "tokens": tokens, "seconds": round(seconds, 1)}
    values |= {"kind": "pretrain", "state": state, **{key: last.get(key) for key in _CURVES}}
    return Pretraining(title, values, points)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _read_finetuning(path: Path, title: str) -> list[Finetuning]:
    """One run, or those of all tasks of a benchmark."""
    if _has_begun(path):
        return [_read_results(path, title, None)]
    parts = [part for part in sorted(path.glob("*")) if _has_begun(part)]
    found = [_read_results(part, f"{title}/{part.name}", title) for part in parts]
    if not found:
        raise ElectraError(
            "There is no run here: no run.json, finetune.json or results.json.",
            where=str(path),
            fix="give the --out directory of `electra pretrain`, `finetune` or `glue`",
        )
    return found


def _has_begun(path: Path) -> bool:
    return any((path / name).is_file() for name in ("results.json", "finetune.json"))


def _read_results(path: Path, title: str, row: str | None) -> Finetuning:
    """The results, or as much as is known of a run that has none yet."""
    is_done = (path / "results.json").is_file()
    file = path / ("results.json" if is_done else "finetune.json")
    read = _read_json(file)
    try:
        if read["format"] != 1:
            raise ValueError(f"format {read['format']} is not 1")
        metric = str(read["task"]["metric"])
        values: dict[str, Any] = {"task": str(read["task"]["name"]), "metric": metric}
        values |= {"kind": "finetune", "model": str(read["model"]), "state": "finished"}
        row = row or str(read["model"])
        begun = path / "finetune.json"  # also tells of seeds that were asked for later
        found = len(read["seeds"]) if is_done else len(list(path.glob("seed-*/result.json")))
        wanted = int(_read_json(begun)["settings"]["seeds"]) if begun.is_file() else found
        if found < wanted:
            values["state"] = f"not finished: {found} of {wanted} seeds"
        if not is_done:
            return Finetuning(title, row, values)
        values |= {key: _number(read["summary"][key]) for key in _SUMMARY}
        values |= {key: int(read["summary"][key]) for key in ("seeds", "failed")}
        ensemble = next(iter((read["ensemble"] or {}).values()), {}).get(metric)
        values["ensemble"] = _number(ensemble)
        scores = [_number(seed["score"]) for seed in read["seeds"] if not seed["failed"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(file, error) from error
    return Finetuning(title, row, values, tuple(score for score in scores if score is not None))


# ---------------------------------------------------------------------- Markdown


def code(text: object) -> str:
    """Somebody's text as Markdown code, where nothing has a meaning, on one line of a table."""
    line = "".join(c if c.isprintable() else " " for c in str(text)).strip()
    return "`" + (line.replace("`", "'").replace("|", "¦") or " ") + "`"


def percent(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.1f}"


def long_form(summary: dict[str, Any]) -> str:
    """57.3 (mean 56.9 ± 1.2, best 58.0, 5 seeds, 0 failed)"""
    median, mean, std, best = (percent(_number(summary[key])) for key in _SUMMARY[:4])
    return (
        f"{median} (mean {mean} ± {std}, best {best}, {int(summary['seeds'])} seeds, "
        f"{int(summary['failed'])} failed)"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = (head, ["---"] * len(head), *rows)
    return [f"| {' | '.join(line)} |" for line in lines]


def _pretraining_table(runs: list[Pretraining]) -> list[str]:
    if not runs:
        return []
    head = ["run", "recipe", "state", "steps", "tokens", "minutes", *_CURVES.values()]
    rows: list[list[str]] = []
    for run in runs:
        v = run.values
        row = [code(run.run), code(v["recipe"]), v["state"], f"{v['steps']:,}", f"{v['tokens']:,}"]
        row.append(f"{v['seconds'] / 60:.1f}")
        rows.append([*row, *(f"{v[k]:.4g}" if _is_finite(v[k]) else _NONE for k in _CURVES)])
    return ["## Pre-training: the last look at held-out text", "", *table(head, rows), ""]


def _medians(runs: list[Finetuning]) -> tuple[list[str], dict[str, dict[str, Finetuning]]]:
    """The columns, and row -> column -> run; a place that is taken opens a row of its own."""
    columns: dict[str, None] = {}
    rows: dict[str, dict[str, Finetuning]] = {}
    for run in runs:
        column = f"{run.values['task']}, {run.values['metric']}"
        columns[column] = None
        row = run.run if column in rows.get(run.row, {}) else run.row
        rows.setdefault(row, {})[column] = run
    return list(columns), rows


def _finetuning_tables(runs: list[Finetuning]) -> list[str]:
    if not runs:
        return []
    columns, cells_of = _medians(runs)
    rows: list[list[str]] = []
    for name, cells in cells_of.items():
        medians = [cells[c].values.get("median") if c in cells else None for c in columns]
        known = [median for median in medians if median is not None]
        # A mean over other tasks than those of the next row would compare what cannot be.
        mean = sum(known) / len(known) if len(known) == len(columns) else None
        marks = [c in cells and cells[c].values["state"] != "finished" for c in columns]
        shown = [percent(m) + " †" * mark for m, mark in zip(medians, marks, strict=True)]
        rows.append([code(name), *shown, percent(mean)])
    long: list[list[str]] = []
    for run in runs:
        v = run.values
        score = long_form(v) if "median" in v else _NONE
        names = [code(v[key]) for key in ("task", "metric", "model")]
        long.append([code(run.run), *names, v["state"], score, percent(v.get("ensemble"))])
    head = ["run", "task", "metric", "starts from", "state", "median (mean ± std, best)"]
    return [
        "## Fine-tuning: median of the seeds × 100",
        "",
        *table(["run", *map(code, columns), "mean over tasks"], rows),
        *(["", "† not finished"] if any("†" in cell for row in rows for cell in row) else []),
        "",
        "### All numbers × 100",
        "",
        *table([*head, "ensemble"], long),
        "",
    ]


# ---------------------------------------------------------------------- CSV and picture


def _csv(runs: Sequence[Pretraining | Finetuning]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, restval="")
    writer.writeheader()
    for run in runs:
        writer.writerow({k: _cell(v) for k, v in {"run": run.run, **run.values}.items()})
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula gets an apostrophe; numbers stay."""
    is_formula = isinstance(value, str) and value.lstrip()[:1] in tuple("=+-@")
    is_formula |= isinstance(value, str) and value[:1] in tuple("\t\r\n")
    return f"'{value}" if is_formula else value


def _label(text: str) -> str:
    """Without mathematics; matplotlib also hides what begins with an underscore."""
    return ("\u200b" + text if text.startswith("_") else text).replace("$", r"\$")


def _draw(pretrained: list[Pretraining], finetuned: list[Finetuning]) -> bytes:
    """Learning curves of all runs over steps, and every seed's score with a dash at the median."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = [key for key in _CURVES if any(run.curves[key] for run in pretrained)]
    panels = max(1, len(curves) + bool(finetuned))
    figure, axes = plt.subplots(
        1, panels, figsize=(5.5 * panels, 4.5), layout="constrained", squeeze=False
    )
    for axis, key in zip(axes[0], curves, strict=False):
        axis.set_title(f"{_CURVES[key]}, held out")
        axis.set_xlabel("step")
        for run in pretrained:
            if run.curves[key]:
                axis.plot(*zip(*run.curves[key], strict=True), label=_label(run.run))
        axis.legend()
    if finetuned:
        axis, (columns, rows) = axes[0][-1], _medians(finetuned)
        axis.set_title("scores × 100: a dot per seed, a dash at the median")
        axis.set_xticks(range(len(columns)), list(map(_label, columns)))
        axis.tick_params("x", rotation=30)
        for i, (name, cells) in enumerate(rows.items()):
            shift = (i - (len(rows) - 1) / 2) * 0.8 / len(rows)
            colour, width = f"C{i % 10}", 0.3 / len(rows)
            axis.scatter([], [], color=colour, label=_label(name))
            for x, column in enumerate(columns):
                run = cells.get(column)
                if run is None or run.values.get("median") is None:
                    continue
                at, scores = x + shift, [100 * score for score in run.scores]
                axis.scatter([at] * len(scores), scores, color=colour, alpha=0.6)
                axis.hlines(100 * run.values["median"], at - width, at + width, color=colour)
        axis.legend()
    picture = io.BytesIO()
    with warnings.catch_warnings():  # of letters that the font does not have
        warnings.simplefilter("ignore")
        figure.savefig(picture, format="png", dpi=110)
    plt.close(figure)
    return picture.getvalue()
