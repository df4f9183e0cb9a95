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
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import ElectraError
from .files import reading, storage_errors, write_atomic
from .runlog import read_metrics

_NONE = "–"
_FIX = "restore the file from a backup, or leave this run out"
_FORMULA = re.compile(r"\s*[=+\-@]|[\t\r\n]")
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
# Values of a run by column; those that do not apply to it are missing. Pre-training has also
# `curves`, (step, value) by name; fine-tuning `scores` of the seeds that did not fail, and `row`
# of the table of medians: the benchmark, or what a run of one task started from.
_Run = dict[str, Any]


def report(runs: Sequence[Path], out: Path | None = None) -> str:
    """Markdown tables of the runs; with `out` also report.md, report.csv and report.png there."""
    paths = list(dict.fromkeys(map(Path, runs)))
    names = [path.resolve().name for path in paths]
    pretrained: list[_Run] = []
    finetuned: list[_Run] = []
    for path, name in zip(paths, names, strict=True):
        title = name if names.count(name) == 1 else str(path)
        if (path / "run.json").is_file():
            pretrained.append(_read_pretraining(path, title))
        else:
            finetuned += _read_finetuning(path, title)
    lines = _pretraining_table(pretrained) if pretrained else []
    text = "\n".join(lines + (_finetuning_tables(finetuned) if finetuned else []))
    if out is not None:
        with storage_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / "report.md", f"# Report\n\n{text}".encode())
        write_atomic(out / "report.csv", _csv([*pretrained, *finetuned]))
        write_atomic(out / "report.png", _draw(pretrained, finetuned))
    return text


def _is_finite(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)


def _number(value: Any) -> float | None:
    """A finite number or nothing; raises on anything else."""
    if value is not None and not _is_finite(value):
        raise ValueError(f"{value!r} is no finite number")
    return value


def _read_pretraining(path: Path, title: str) -> _Run:
    with reading(path / "metrics.jsonl", _FIX):
        metrics = read_metrics(path) if (path / "metrics.jsonl").is_file() else []
        steps = max((int(m["step"]) for m in metrics), default=0)
        times = [float(m["seconds"]) for m in metrics if m["kind"] == "train"]
        held = [(int(m["step"]), m) for m in metrics if m["kind"] == "eval"]
        curves = {k: [(s, m[k]) for s, m in held if _is_finite(m.get(k))] for k in _CURVES}
    with reading(path / "run.json", _FIX):
        config = json.loads((path / "run.json").read_bytes())["config"]
        data, settings, seconds = config["data"], config["run"], max(times, default=0.0)
        tokens = steps * int(data["batch_size"]) * int(data["sequence_length"])
        budget = 60 * settings["minutes"] if settings["minutes"] else math.inf
        # The clock may end a run between two lines of its log, so 98 % of it count as all.
        share = max(steps / settings["train_steps"], min(1.0, seconds / budget / 0.98))
        recipe = str(config["name"])
    state = "finished" if share >= 1 else f"not finished: {100 * share:.0f} %"
    run: _Run = {"run": title, "kind": "pretrain", "state": state, "recipe": recipe}
    run |= {"steps": steps, "tokens": tokens, "seconds": round(seconds, 1), "curves": curves}
    return run | {key: held[-1][1].get(key) if held else None for key in _CURVES}


def _read_finetuning(path: Path, title: str) -> list[_Run]:
    """One run, or those of all tasks of a benchmark."""
    records = ("results.json", "finetune.json")
    parts = [p for p in (path, *sorted(path.glob("*"))) if any((p / n).is_file() for n in records)]
    if not parts:
        what = "There is no run here: no run.json, finetune.json or results.json."
        fix = "give the --out directory of `electra pretrain`, `finetune` or `glue`"
        raise ElectraError(what, where=str(path), fix=fix)
    if parts[0] == path:
        return [_read_results(path, title, None)]
    return [_read_results(part, f"{title}/{part.name}", title) for part in parts]


def _read_results(path: Path, title: str, row: str | None) -> _Run:
    """The results, or as much as is known of a run that has none yet."""
    begun, file = path / "finetune.json", path / "results.json"
    is_done = file.is_file()
    with reading(file if is_done else begun, _FIX):
        read = json.loads((file if is_done else begun).read_bytes())
        if read["format"] != 1:
            raise ValueError(f"format {read['format']} is not 1")
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
    return run


def code(text: object) -> str:
    """Somebody's text as Markdown code, where nothing has a meaning, on one line of a table."""
    line = "".join(c if c.isprintable() else " " for c in str(text)).strip()
    return "`" + (line.replace("`", "'").replace("|", "¦") or " ") + "`"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def long_form(summary: dict[str, Any]) -> str:
    """57.3 (mean 56.9 ± 1.2, best 58.0, 5 seeds, 0 failed)"""
    median, mean, std, best = (_percent(_number(summary[key])) for key in _SUMMARY[:4])
    seeds, failed = (int(summary[key]) for key in _SUMMARY[4:])
    return f"{median} (mean {mean} ± {std}, best {best}, {seeds} seeds, {failed} failed)"


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.1f}"


def _pretraining_table(runs: list[_Run]) -> list[str]:
    head = ["run", "recipe", "state", "steps", "tokens", "minutes", *_CURVES.values()]
    rows: list[list[str]] = []
    for run in runs:
        row = [code(run["run"]), code(run["recipe"]), run["state"], f"{run['steps']:,}"]
        row += [f"{run['tokens']:,}", f"{run['seconds'] / 60:.1f}"]
        rows.append(row + [f"{run[k]:.4g}" if _is_finite(run[k]) else _NONE for k in _CURVES])
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
    return [*lines, "", "### All numbers × 100", "", *table([*head, "ensemble"], long), ""]


def _csv(runs: Sequence[_Run]) -> bytes:
    """Text that a spreadsheet would take for a formula gets an apostrophe; numbers stay."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, extrasaction="ignore")
    writer.writeheader()
    for run in runs:
        formulas = {k: f"'{v}" for k, v in run.items() if isinstance(v, str) and _FORMULA.match(v)}
        writer.writerow(run | formulas)
    return text.getvalue().encode()


def _draw(pretrained: list[_Run], finetuned: list[_Run]) -> bytes:
    """Learning curves of all runs over steps, and every seed's score with a dash at the median."""
    from matplotlib.figure import Figure

    def label(text: str) -> str:
        """Without mathematics; matplotlib also hides what begins with an underscore."""
        return re.sub("^_", "\u200b_", text).replace("$", r"\$")

    curves = [key for key in _CURVES if any(run["curves"][key] for run in pretrained)]
    panels = max(1, len(curves) + bool(finetuned))
    figure = Figure(figsize=(5.5 * panels, 4.5), layout="constrained")
    axes: list[Any] = list(figure.subplots(1, panels, squeeze=False)[0])
    for axis, key in zip(axes, curves, strict=False):
        axis.set_title(f"{_CURVES[key]}, held out")
        axis.set_xlabel("step")
        for run in pretrained:
            if points := run["curves"][key]:
                axis.plot(*zip(*points, strict=True), label=label(run["run"]))
        axis.legend()
    if finetuned:
        axis, (columns, rows) = axes[-1], _medians(finetuned)
        axis.set_title("scores × 100: a dot per seed, a dash at the median")
        axis.set_xticks(range(len(columns)), list(map(label, columns)))
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
    picture = io.BytesIO()
    with warnings.catch_warnings():  # of letters that the font does not have
        warnings.simplefilter("ignore")
        figure.savefig(picture, format="png", dpi=110)
    return picture.getvalue()
