"""The page of a report: one file with all of it, the numbers of the tables, names as names."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_ablate import a_cell, a_study
from test_report import EVIL, pretraining, results, write

from electra.studies.report import report
from electra.studies.report_html import to_html

SVG = {"svg", "defs", "g", "path", "use", "style", "clippath", "rect", "text", "tspan", "title"}
OURS = {"html", "head", "meta", "title", "style", "body", "div", "h1", "h2", "h3", "p", "b", "ul"}
OURS |= {"li", "table", "thead", "tbody", "tr", "th", "td", "code", "details", "summary"}


class Page(html.parser.HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text, self.open = "", list[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in ("meta", "path", "use", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("path", "use", "rect"):
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(*runs: Path, out: Path) -> Page:
    report(runs, out)
    page = Page((out / "report.html").read_text("utf-8"))
    assert page.open == []  # every tag was closed, in its turn
    assert page.tags <= SVG | OURS
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    for name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "action", "data"):
            assert value.startswith("#"), value  # nothing is fetched, not even from the same place
        if name != "xmlns" and not name.startswith("xmlns:"):
            assert "//" not in value, value
    assert ("http-equiv", "Content-Security-Policy") in page.attributes
    return page


def a_run(path: Path, **run: Any) -> Path:
    """A run of pre-training with something to worry about."""
    pretraining(path, **run)
    record = json.loads((path / "run.json").read_bytes())
    record |= {"vocab_size": 1000, "environment": {"device": "NVIDIA H200", "processes": 1}}
    (path / "run.json").write_text(json.dumps(record))
    told = {"kind": "event", "step": 300, "warning": "the generator sleeps"}
    lines = (path / "metrics.jsonl").read_text().splitlines()[:-1]
    (path / "metrics.jsonl").write_text("\n".join([*lines, json.dumps(told)]) + "\n")
    return path


def test_a_page_of_everything(tmp_path: Path) -> None:
    scores = {"cola": [0.1, 0.5, 0.6], "rte": [0.5, 0.6, 0.7]}
    study = a_study(tmp_path / "study", [a_cell("joint", 0, scores)], "algorithms")
    tuned = write(tmp_path / "tuned", results(failed=1))
    losses = [{"kind": "train", "step": 20 * i, "seed": i % 2, "loss": 1 / i} for i in range(1, 9)]
    (tuned / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in losses))
    page = page_of(
        a_run(tmp_path / "a"), a_run(tmp_path / "b", minutes=9.0), tuned, study, out=tmp_path / "o"
    )
    text = re.sub(r"\s+", " ", page.text)
    for words in (
        "58.7 (mean 56.9 ± 6.2, best 62.0, 3 seeds, 1 failed)",  # of the Markdown tables
        "step 300: the generator sleeps",
        "seed 0 learned nothing",
        "What differs",
        "run.minutes",
        "training loss, a line per seed",
        "generator loss",
        "0.0364 kWh",  # 700 W for 120 s
        "encoder.hidden_size",
        "algorithms: mean over tasks",
    ):
        assert words in text, words
    assert "Thick: held-out text" in text


def test_a_page_without_warnings_says_so(tmp_path: Path) -> None:
    page = page_of(pretraining(tmp_path / "run"), out=tmp_path / "out")
    assert "no warnings" in page.text
    assert "Worth a look" not in page.text


def test_hostile_names_are_text_on_the_page(tmp_path: Path) -> None:
    name = "<script>alert(1)<!--" + r"$\frac &amp; `b`"
    run = a_run(tmp_path / name, name=EVIL)
    told = {"kind": "event", "step": 1, "warning": EVIL}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(told) + "\n")
    record = json.loads((run / "run.json").read_bytes())
    record |= {"environment": {"device": EVIL, EVIL: EVIL}, "corpus_fingerprint": EVIL}
    record["data"] = {"files": [EVIL], "count": 9, "bytes": 9, "documents": 9, "tokens": 9}
    (run / "run.json").write_text(json.dumps(record))
    tuned = write(tmp_path / "tuned", results(EVIL, model=EVIL, metric=EVIL))
    cells = [a_cell(EVIL, 0, {"cola": [0.1, 0.5, 0.6], "rte": [0.5, 0.6, 0.7]})]
    cells.append(a_cell("b", 0, {}, state=EVIL))
    study = a_study(tmp_path / "study", cells, EVIL)
    page = page_of(run, a_run(tmp_path / "b"), tuned, study, out=tmp_path / "out")
    assert page.text.count("<script>") > 9  # it is there, as text
    assert "\x1b" not in page.text


def test_the_same_runs_give_the_same_page(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    pages = []
    for name in ("one", "two"):
        report([run], tmp_path / name)
        pages.append((tmp_path / name / "report.html").read_bytes())
    assert pages[0] == pages[1]
    assert len(pages[0]) < 200_000


@pytest.mark.parametrize(
    ("markdown", "expected"),
    [
        ("## a & `<b>`", "<h2>a &amp; <code>&lt;b&gt;</code></h2>"),
        ("- one\n- `two`", "<ul><li>one</li><li><code>two</code></li></ul>"),
        ("a <i> b", "<p>a &lt;i&gt; b</p>"),
    ],
)
def test_the_markdown_of_reports(markdown: str, expected: str) -> None:
    assert to_html(markdown) == expected
