"""The documentation site: it builds without a warning, needs no network, and says what is so."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from conftest import MODULES

from electra import cli

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E", str(DOCS), str(out)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return out


def test_the_site_builds_without_a_warning_and_has_every_page(site: Path) -> None:
    """A page that no menu leads to would be a warning."""
    for page in DOCS.glob("*.md"):
        assert "<h1>" in (site / f"{page.stem}.html").read_text(encoding="utf-8")
    start = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="quickstart.html"' in start


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for file in site.rglob("*.html"):
        text = file.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|link)\b[^>]*?(?:src|href)=\"([^\"]+)\"", text)
        assert [u for u in loaded if re.match(r"(?:\w+:)?//", u)] == [], file.name
    for file in site.rglob("*.css"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", text), file.name


def test_the_reference_has_every_module_and_what_is_documented_in_it(site: Path) -> None:
    text = (site / "api.html").read_text(encoding="utf-8")
    for name in MODULES.values():
        assert f'id="module-{name}"' in text
    for name in (
        "corruption.sample",
        "config.RunConfig.minutes",  # a field
        "trainer.Trainer.train_step",
        "trainer.Trainer.needs_block",
    ):
        there = f'id="electra.{name}"' in text
        assert there == (name != "trainer.Trainer.needs_block"), name  # that one says nothing
    assert "one optimizer step" in text.lower()


def test_every_name_on_the_tour_exists() -> None:
    text = (DOCS / "tour.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)\.([A-Za-z]\w*(?:\.\w+)*)`", text)
    sources = list((ROOT / "electra").rglob("*.py"))
    assert len(MODULES) == len(sources) - 2  # no two have one name: __init__ and __main__ have none
    ours = [(module, path) for module, path in named if module in MODULES and path != "py"]
    assert len(ours) > 50
    for module, path in ours:
        thing: Any = importlib.import_module(MODULES[module])
        for part in path.split("."):
            assert hasattr(thing, part), f"{module}.{path}"
            thing = getattr(thing, part)
    files = {m for m, place in MODULES.items() if (ROOT / f"{place.replace('.', '/')}.py").exists()}
    files -= {m for m, place in MODULES.items() if ".kernels." in place}  # `kernels` offers theirs
    left_out = files - {module for module, _ in ours}
    assert left_out <= {"demo", "demo_text", "environment", "features", "unpickle"}


def looked_up(record: str, key: str) -> Any:
    """A value in a record; in a key, names are separated by dots and lists have numbers."""
    value: Any = json.loads((ROOT / record).read_text(encoding="utf-8"))
    rest = key
    while rest:
        names = [rest] if isinstance(value, dict) and rest in value else []
        name = names[0] if names else rest.partition(".")[0]
        rest = rest[len(name) + 1 :]
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


@pytest.mark.parametrize("page", ["comparison.md", "performance.md"])
def test_figures_are_those_of_their_records(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    rows = re.findall(
        r"^\|[^|]*\| ([\d.,]+)( M)? \| `(results/[^`]+)` \| `([^`]+)` \|$", text, re.M
    )
    assert len(rows) == text.count("| `results/") > 10
    for figure, million, record, key in rows:
        said = Decimal(figure.replace(",", ""))
        value = looked_up(record, key) / (1e6 if million else 1)
        assert round(Decimal(value), -said.as_tuple().exponent) == said, (figure, record, key)


def test_the_questions_answer_the_twelve_demands() -> None:
    text = (DOCS / "faq.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\d+)\. ", text, re.M) == [str(n) for n in range(1, 13)]


def test_every_command_is_on_some_page() -> None:
    pages = "\n".join(
        p.read_text(encoding="utf-8") for p in [ROOT / "README.md", *DOCS.glob("*.md")]
    )
    assert {name for name in cli.COMMANDS if f"electra {name}" not in pages} == set()
