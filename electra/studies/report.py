"""Runs side by side: Markdown to read, report.csv to compute with, report.png for a look, and
report.html with all there is to know of them on one page (`report_html.py`).

Comes in: directories of runs and studies, or folders of them, which `records` reads. Goes out: a
table of each sort, one for records of a study that differ in their seeds alone, and the paper's
order by scale where a study was run at several; the pictures beside them are those of `figures`.
Names of runs, tasks and models are somebody else's text, so they are shown as code in Markdown and
never start a formula in CSV.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ElectraError
from ..files import storage_errors, write_atomic
from ..finetuning.metrics import EPOCH_CHOICE
from .ablate import PAPER, STUDIES
from .figures import (
    Panel,
    curve_panels,
    draw,
    loss_panel,
    scale_figures,
    scores_panel,
    study_figures,
)
from .records import (
    HEALTH,
    HELD_OUT,
    SUMMARY,
    Run,
    Spread,
    Study,
    changes,
    code,
    gap_of,
    gaps_of,
    half_width,
    is_finite,
    joined,
    number_or_none,
    places,
    read_pretraining,
    read_results,
    read_study,
    rows_of,
    spread,
    table,
    values_of,
)

_NONE = "–"
_FORMULA = re.compile(r"\s*[=+\-@]|[\t\r\n]")
_COLUMNS = (
    *("run", "kind", "state", "task", "metric", "model", *SUMMARY, "ensemble"),
    *("recipe", "steps", "tokens", "seconds", *HELD_OUT),
)
_STUDY_COLUMNS = ("label", "seed", "flops", "parameters", "mlm_accuracy", "score")


class Section(NamedTuple):
    """One sort of runs: its tables, the pictures that belong to them, and the runs themselves."""

    lines: list[str]
    panels: list[Panel]
    more: list[Panel]  # of the page only
    runs: list[Run]


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
    """The runs, also those in folders, by sort: pre-training, fine-tuning, and each study; at the
    end what folders hold that cannot be read. A run that is named itself has to be readable."""
    paths = {os.path.realpath(run): Path(run) for run in runs}  # each run once, whatever its names
    if not paths:
        fix = "give the --out directories of `electra pretrain`, `finetune`, `glue` or `ablate`"
        raise ElectraError("No run is named.", where="RUN", fix=fix)
    names = list(map(os.path.basename, paths))
    pretrained: list[Run] = []
    finetuned: list[Run] = []
    studies: list[Study] = []
    left_out: list[ElectraError] = []
    seen: set[str] = set()
    for path, name in zip(paths.values(), names, strict=True):
        found, unread = places(path, name if names.count(name) == 1 else str(path))
        left_out += unread
        for place in found:
            if (there := os.path.realpath(place.path)) in seen:
                continue
            seen.add(there)
            try:
                if place.sort == "study":
                    studies.append(read_study(place.path, place.title))
                elif place.sort == "pretraining":
                    pretrained.append(read_pretraining(place.path, place.title))
                else:
                    finetuned.append(read_results(place.path, place.title, place.row))
            except ElectraError as error:
                if there in paths:
                    raise
                left_out.append(error)
    if not (pretrained or finetuned or studies):
        raise left_out[0]
    sections: list[Section] = []
    if pretrained:
        panels, more = curve_panels(pretrained, HELD_OUT), curve_panels(pretrained, HEALTH)
        sections.append(Section(_pretraining_table(pretrained), panels, more, pretrained))
    if finetuned:
        more = [loss_panel(finetuned)] * any(run["losses"] for run in finetuned)
        table = _finetuning_tables(finetuned)
        sections.append(Section(table, [scores_panel(finetuned)], more, finetuned))
    same: dict[tuple[str, ...], list[Study]] = {}
    for study in joined(studies):
        figures, cells = study_figures(study), _study_runs(study)
        sections.append(Section(_study_table(study), figures, [], cells))
        if study.rows:
            same.setdefault((study.name, *sorted(study.tasks)), []).append(study)
    for several in same.values():
        sections += _by_scale(several) if len(several) > 1 else []
    if left_out:
        items = dict.fromkeys(f"- {code(error.where)}: {code(error.what)}" for error in left_out)
        sections.append(Section(["## Left out: what cannot be read", "", *items, ""], [], [], []))
    return sections


def long_form(summary: dict[str, Any]) -> str:
    """57.3 (mean 56.9 ± 1.2, best 58.0, 5 seeds, 0 failed)"""
    median, mean, std, best = (_percent(number_or_none(summary[key])) for key in SUMMARY[:4])
    seeds, failed = (int(summary[key]) for key in SUMMARY[4:])
    return f"{median} (mean {mean} ± {std}, best {best}, {seeds} seeds, {failed} failed)"


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.1f}"


def _pretraining_table(runs: list[Run]) -> list[str]:
    head = ["run", "recipe", "state", "steps", "tokens", "minutes", *HELD_OUT.values()]
    rows: list[list[str]] = []
    for run in runs:
        row = [code(run["run"]), code(run["recipe"]), run["state"], f"{run['steps']:,}"]
        row += [f"{run['tokens']:,}", f"{run['seconds'] / 60:.1f}"]
        rows.append(row + [f"{run[k]:.4g}" if is_finite(run[k]) else _NONE for k in HELD_OUT])
    return ["## Pre-training: the last look at held-out text", "", *table(head, rows), ""]


def _finetuning_tables(runs: list[Run]) -> list[str]:
    columns, cells = rows_of(runs)
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


def _study_table(study: Study) -> list[str]:
    """Per setting the mean over tasks of medians, over pre-training seeds, beside the paper's."""
    paper = PAPER.get(study.name, {})
    first = _first(study)
    head = ["setting", "seeds", "mean over tasks", f"minus {code(first)}", "paper"]
    head += [*map(code, study.tasks), "FLOPs", "steps", "MLM accuracy", "AUC"]
    rows: list[list[str]] = []
    scores = {label: spread(values_of(cells, "score")) for label, cells in study.rows.items()}
    order = list(study.rows)
    if study.name not in STUDIES:  # a grid of one's own: the best first
        order.sort(key=lambda label: -(s.mean if (s := scores[label]) else -math.inf))
    for label in order:
        cells = study.rows[label]
        done = [cell for cell in cells if "score" in cell]
        medians = [spread([c["scores"][task]["median"] for c in done]) for task in study.tasks]
        accuracy, auc = (spread(values_of(done, key)) for key in ("mlm_accuracy", "disc_auc"))
        gap = None if label == first else gap_of(study, label, first)
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


def _first(study: Study) -> str:
    """The row that is ELECTRA itself, where the study has one, else the first."""
    return min(study.rows, key=lambda label: bool(study.rows[label][0]["differs"]), default="")


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
    while half_width(n) * ratio > 1:
        n += 1
    return f"not shown ({n:,} seeds)"


_SEEDS = "In brackets: how many seeds would show the paper's difference at the spread seen here."


def _paper_order(study: Study) -> list[str]:
    """What our differences say of every two settings that the paper has in an order."""
    rows = [
        [f"{code(a)} above {code(b)}", f"{theirs:.1f}", str(gap), _verdict(gap, theirs)]
        for (a, b), theirs in _paper_pairs(study.name).items()
        if (gap := gap_of(study, a, b))
    ]
    if not rows:
        return []
    head = ["the paper's order", "by", "here, 95 % confidence interval", "verdict"]
    return [*table(head, rows), "", *[_SEEDS, ""] * any("not shown" in row[-1] for row in rows)]


def _by_scale(studies: Sequence[Study]) -> list[Section]:
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
        found = [gaps_of(study, a, b) for _, study in sizes]
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
    besides = [text for text in changes(ordered) if "`run.train_steps`" not in text]
    if besides:
        lines += [f"Besides the steps these differ, in this order: {'; '.join(besides)}.", ""]
    made = {name: what for study in ordered for name, what in study.made.items()}
    if len(set(made.values())) > 1:
        each = [f"{code(name)} by {code(what)}" for name, what in made.items()]
        lines += [f"Program or machine are not the same: {', '.join(each)}.", ""]
    return [Section(lines, scale_figures(sizes, pairs), [], [])]


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
    half = error * half_width(freedom + 1) * math.sqrt(freedom + 1)  # the t of `freedom`
    return f"{100 * slope:+.1f} ({100 * (slope - half):+.1f} to {100 * (slope + half):+.1f})"


def _study_runs(study: Study) -> list[Run]:
    """A line of CSV per cell and task, or one for a cell without scores."""
    lines: list[Run] = []
    for cell in (cell for cells in study.rows.values() for cell in cells):
        run = {**cell, "kind": "ablate", "recipe": study.name}
        scores: dict[str, Run] = cell.get("scores", {})
        lines += [{**run, "task": task, **score} for task, score in scores.items()] or [run]
    return lines


def _csv(runs: Sequence[Run], columns: Sequence[str]) -> bytes:
    """Text that a spreadsheet would take for a formula gets an apostrophe; numbers stay."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore")
    writer.writeheader()
    for run in runs:
        formulas = {k: f"'{v}" for k, v in run.items() if isinstance(v, str) and _FORMULA.match(v)}
        writer.writerow(run | formulas)
    return text.getvalue().encode()
