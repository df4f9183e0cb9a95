"""report.html: one page with the tables, curves, settings, warnings and machines of runs.

Comes in: the sections of `report.read_sections`. Goes out: HTML that asks nobody for anything, with
pictures inside it, in the reader's light or dark colours. The tables are those of the Markdown
report: all that is somebody else's text stands between backticks there, and here all text is
escaped first. Even so the page allows no script.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..config import flat
from ..formats.card import training_facts
from .figures import Panel, draw
from .records import code, table
from .report import Section

_INK = "#010203"  # of text and axes in a picture, which become the reader's own
_STYLE = """
.electra { font: 15px/1.5 system-ui, sans-serif; color: CanvasText; }
.electra h1 { font-size: 1.7em; margin: 0 0 .2em; }
.electra h2 { font-size: 1.25em; margin: 1.8em 0 .5em; }
.electra h3 { font-size: 1.05em; margin: 1.2em 0 .4em; }
.electra code { font: .9em ui-monospace, monospace; overflow-wrap: break-word; }
.electra .wide { overflow-x: auto; }
.electra table { border-collapse: collapse; margin: .3em 0; }
.electra th, .electra td { text-align: left; vertical-align: top; padding: .3em .9em .3em 0;
  border-bottom: 1px solid color-mix(in srgb, currentColor 18%, transparent); }
.electra th { font-weight: 600; }
.electra td.n, .electra th.n { text-align: right; font-variant-numeric: tabular-nums; }
.electra .plots { display: flex; flex-wrap: wrap; gap: 1em; margin: 1em 0; }
.electra .plots svg { flex: 1 1 19em; max-width: 32em; min-width: 0; width: 100%; height: auto; }
.electra details { border: 1px solid color-mix(in srgb, currentColor 18%, transparent);
  border-radius: 6px; padding: .5em .9em; margin: .6em 0; }
.electra summary { cursor: pointer; }
.electra .warning, .electra .fine { border-left: 4px solid #d97706; padding: .5em .9em;
  background: color-mix(in srgb, #d97706 12%, transparent); border-radius: 0 6px 6px 0; }
.electra .fine { border-color: #16a34a; background: color-mix(in srgb, #16a34a 10%, transparent); }
.electra .warning ul { margin: .2em 0; padding-left: 1.2em; }
.electra .muted { opacity: .7; margin: 0 0 .8em; }
"""


def page(sections: Sequence[Section]) -> str:
    """The whole page."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>ELECTRA report</title>
<style>body {{ margin: 0 auto; max-width: 72em; padding: 1.5em; }}</style>
</head>
<body>
{fragment(sections, title="ELECTRA report")}
</body>
</html>
"""


def fragment(sections: Sequence[Section], *, title: str = "") -> str:
    """The same as part of another page, a notebook's for one."""
    parts = [f"<style>{_STYLE}</style>", '<div class="electra">']
    runs = [run for section in sections for run in section.runs]
    if title:
        names = dict.fromkeys(code(run["run"]) for run in runs)
        parts += [f"<h1>{title}</h1>", f'<p class="muted">{_inline(", ".join(names))}</p>']
    told = [f"- {code(run['run'])}: {code(w)}" for run in runs for w in run.get("warnings", [])]
    if told:
        items = to_html("\n".join(told))
        parts.append(f'<div class="warning"><b>Worth a look</b>{items}</div>')
    else:
        parts.append('<p class="fine">The runs report no warnings.</p>')
    for section in sections:
        known = [run for run in section.runs if "record" in run]
        parts.append(to_html("\n".join(section.lines)))
        if panels := [*section.panels, *section.more]:
            parts.append(f'<div class="plots">{"".join(map(_svg, panels))}</div>')
        if any("curves" in run for run in known):
            parts.append('<p class="muted">Thick: held-out text. Thin: training.</p>')
        parts += [_differences(known), *map(_details, known)]
    parts.append(f'<p class="muted">electra {__version__}</p></div>')
    return "\n".join(part for part in parts if part)


# ---------------------------------------------------------------------- what a run was


def _settings(run: dict[str, Any]) -> dict[str, Any]:
    record = run["record"]
    return flat(dict(record.get("config") or record.get("settings") or {}))


def _differences(runs: list[dict[str, Any]]) -> str:
    """A table of the settings in which the runs are not all alike."""
    settings = [_settings(run) for run in runs]
    keys = dict.fromkeys(key for one in settings for key in one)
    odd = [key for key in keys if len({str(one.get(key)) for one in settings}) > 1]
    rows = [[code(key), *(code(one.get(key, "–")) for one in settings)] for key in odd]
    head = ["setting", *(code(run["run"]) for run in runs)]
    return to_html("\n".join(["### What differs", "", *table(head, rows)])) if rows else ""


def _details(run: dict[str, Any]) -> str:
    """Settings, price and machine of one run, folded away."""
    record, lines = run["record"], list[str]()
    facts = training_facts(record, run["steps"], run["seconds"]) if "config" in record else {}
    machine = {code(k): code(v) for k, v in dict(record.get("environment", {})).items()}
    settings = {code(k): code(v) for k, v in _settings(run).items()}
    parts = {"Training": facts, "Settings": settings, "Environment": machine}
    for title, rows in parts.items():
        if rows:
            lines += [f"### {title}", "", *table(["", ""], list(rows.items())), ""]
    what = f"{code(run['run'])}: settings and environment"
    body = to_html("\n".join(lines))
    return f"<details><summary>{_inline(what)}</summary>{body}</details>"


# ---------------------------------------------------------------------- pictures and text


def _svg(panel: Panel) -> str:
    """One picture as part of the page, in its colours."""
    import matplotlib

    ink = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: Any = dict.fromkeys(ink, _INK)
    style |= {"figure.facecolor": "none", "axes.facecolor": "none", "legend.framealpha": 0}
    style |= {"svg.fonttype": "none", "svg.hashsalt": "electra", "font.family": "sans-serif"}
    style |= {"axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        picture = draw([panel], form="svg", size=(5.2, 3.8)).decode()
    picture = picture[picture.index("<svg") :].replace(_INK, "currentColor")
    return re.sub(r"<metadata>.*?</metadata>| id=\"[\w.]+_\d+\"", "", picture, flags=re.S)


def _inline(text: str) -> str:
    """Markdown of one line: code, and nothing else."""
    parts = html.escape(text).split("`")
    return "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(parts))


def to_html(markdown: str) -> str:
    """The Markdown that this package writes: headings, tables, lists, code and paragraphs."""
    result: list[str] = []
    for block in re.split(r"\n{2,}", markdown.strip()):
        lines = block.splitlines()
        if heading := re.fullmatch(r"(#+) (.*)", block):
            level = len(heading[1])
            result.append(f"<h{level}>{_inline(heading[2])}</h{level}>")
        elif block.startswith("|"):
            result.append(_table([line[1:-1].split("|") for line in lines]))
        elif block.startswith("- "):
            items = "".join(f"<li>{_inline(line[2:])}</li>" for line in lines)
            result.append(f"<ul>{items}</ul>")
        elif block:
            result.append(f"<p>{_inline(block)}</p>")
    return "\n".join(result)


def _table(lines: list[list[str]]) -> str:
    """Columns of numbers stand to the right."""
    head, _, *rows = [[cell.strip() for cell in line] for line in lines]
    number = re.compile(r"[–-]|[-+]?[\d,.]+(e[-+]?\d+)?( †)?")
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(head)
    kinds = [' class="n"' if c and all(map(number.fullmatch, c)) else "" for c in columns]

    def row(tag: str, cells: Sequence[str]) -> str:
        pairs = zip(cells, kinds, strict=True)
        return f"<tr>{''.join(f'<{tag}{k}>{_inline(cell)}</{tag}>' for cell, k in pairs)}</tr>"

    top = f"<thead>{row('th', head)}</thead>" if any(head) else ""
    body = "".join(row("td", cells) for cells in rows)
    return f'<div class="wide"><table>{top}<tbody>{body}</tbody></table></div>'
