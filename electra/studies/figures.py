"""Pictures of runs and studies.

Comes in: runs and studies as `records` reads them. Goes out: panels, each a function that draws one
picture on an axis, and, by `draw`, several of them as the bytes of one PNG or SVG. Names are
somebody else's text: they are no mathematics in a picture.
"""

from __future__ import annotations

import functools
import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..files import write_atomic
from .records import (
    HEALTH,
    HELD_OUT,
    Run,
    Spread,
    Study,
    gap_of,
    one_line,
    read_pretraining,
    rows_of,
    spread,
    values_of,
)

Panel = Callable[[Any], None]  # draws one picture on an axis


def curve_panels(runs: list[Run], names: dict[str, str]) -> list[Panel]:
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
            unigram = [point[1] for point in run["curves"]["eval"].get("unigram_entropy", [])]
            if key == "mlm_loss" and unigram:
                axis.axhline(
                    unigram[0], color="grey", linestyle=":", label="token frequencies alone"
                )
        if key == "grad_norm":
            axis.set_yscale("log")
        axis.legend()

    curves = [curves for run in runs for curves in run["curves"].values()]
    return [functools.partial(draw, key) for key in names if any(c[key] for c in curves)]


def draw_curves(directory: Path) -> None:
    """curves.png of a run of pre-training."""
    run = read_pretraining(directory, directory.name)
    write_atomic(directory / "curves.png", draw(curve_panels([run], HELD_OUT | HEALTH)))


def loss_panel(runs: list[Run]) -> Panel:
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


def scores_panel(finetuned: list[Run]) -> Panel:
    """Every seed's score with a dash at the median."""

    def draw(axis: Any) -> None:
        columns, rows = rows_of(finetuned)
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


def study_figures(study: Study) -> list[Panel]:
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


def _scores(study: Study, rows: dict[str, float]) -> list[tuple[float, Spread | None]]:
    """Those of some settings over a number, in its order."""
    found = sorted(rows.items(), key=lambda row: row[1])
    return [(x, spread(values_of(study.rows[key], "score"))) for key, x in found]


def _over_flops(study: Study, axis: Any) -> None:
    families: dict[str, dict[str, float]] = {}
    for key, cells in study.rows.items():
        families.setdefault(key.partition(",")[0], {})[key] = cells[0]["flops"]
    for name, rows in families.items():
        _errorbars(axis, name, _scores(study, rows))
    axis.set(xscale="log", xlabel="training FLOPs (matrix products)")


def _over_size(study: Study, axis: Any) -> None:
    sizes = {key: re.fullmatch(r"(width|depth) (\d)(?:/([1-9]))?", key) for key in study.rows}
    for part in ("width", "depth"):
        of_part = {key: m for key, m in sizes.items() if m and m[1] == part}
        shares = {key: int(m[2]) / int(m[3] or 1) for key, m in of_part.items()}
        _errorbars(axis, part, _scores(study, shares))
    for i, key in enumerate(key for key, m in sizes.items() if not m):
        if found := spread(values_of(study.rows[key], "score")):
            axis.axhline(100 * found.mean, color=f"C{i + 2}", linestyle=":", label=label(key))
    axis.set(xlabel="generator as a share of the discriminator")


def _by_setting(study: Study, axis: Any) -> None:
    names = list[str]()
    for i, (key, cells) in enumerate(study.rows.items()):
        if scores := [100 * score for score in values_of(cells, "score")]:
            # A colour of its own, also where other settings were not run.
            point = [(len(names), spread(values_of(cells, "score")))]
            _errorbars(axis, "", point, linestyle="none", color=f"C{i % 10}")
            axis.scatter([len(names)] * len(scores), scores, color="grey", s=9, zorder=3)
            names.append(label(key))
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right")


def scale_figures(
    sizes: Sequence[tuple[Run, Study]], pairs: Sequence[tuple[str, str]]
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
            found = [(row[0]["flops"], spread(values_of(row, "score"))) for row in cells]
            _errorbars(axis, key, found, "std", markersize=4, color=f"C{i % 10}")
        finish(axis, "mean over tasks × 100, ± standard deviation", "of each setting")

    def differences(axis: Any) -> None:
        for i, (a, b) in enumerate(pairs):
            aside = 1.03 ** (i - (len(pairs) - 1) / 2)  # so that bars do not hide each other
            found = [(cell["flops"] * aside, gap_of(study, a, b)) for cell, study in sizes]
            _errorbars(axis, f"{a} above {b}", found, markersize=4, color=f"C{i % 10}")
        axis.axhline(0, color="grey", linewidth=0.8)
        finish(axis, "not held at every scale, 95 % confidence", "of the scale")

    return [scores, *[differences] * bool(pairs)]


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


def label(text: str) -> str:
    """For a picture, without mathematics; matplotlib also hides what begins with an underscore."""
    return re.sub("^_", "\u200b_", one_line(text)).replace("$", r"\$")


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
