"""What README and docs say is so: their commands run, the files they name exist, numbers add up."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from electra.demo_text import find_text

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def test_the_readme_commands_run_in_their_order(tmp_path: Path) -> None:
    """As printed, on a little real text; only the training is cut short."""
    text = (ROOT / "README.md").read_text()
    blocks = [
        re.search(rf"## {title}\n\n```sh\n(.*?)```", text, re.S)
        for title in ("Your own text", "Fine-tune")
    ]
    lines = [line for block in blocks if block is not None for line in block[1].splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines]
    assert [c[1] for c in commands] == [
        "check", "tokenizer", "prepare", "plan", "pretrain", "export", "detect",
        "finetune", "predict", "glue", "report",
    ]  # fmt: skip
    texts = tmp_path / "texts"
    texts.mkdir()
    paragraphs: list[str] = []
    for document in find_text().documents[:30]:
        name = re.sub(r"\W", "_", document.name)[-60:]
        (texts / f"{name}.txt").write_text("\n".join(document.paragraphs), encoding="utf-8")
        paragraphs += [p[:200].replace("\t", " ").replace('"', "") for p in document.paragraphs]
    rows = [f'"{p}",{1 + i % 5}' for i, p in enumerate(paragraphs[:60])]
    (tmp_path / "reviews.csv").write_text("\n".join(["text,stars", *rows]))
    cola = tmp_path / "glue" / "CoLA"
    cola.mkdir(parents=True)
    for split in ("train", "dev"):
        lines = [f"x\t{i % 2}\t\t{p}" for i, p in enumerate(paragraphs[:60])]
        (cola / f"{split}.tsv").write_text("\n".join(lines))
    for command in commands:
        if command[1] == "pretrain":
            command += ["--run.train-steps", "12", "--run.log-every", "4"]
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        if command[1] == "detect":
            assert "elephants" in done.stdout  # it shows the sentence it was given
    assert "cola" in done.stdout
    assert (tmp_path / "report" / "report.png").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_named_on_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for name in re.findall(r"`((?:electra|tests|docs|benchmarks|results)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    for name in re.findall(r"`(\w+\.py)`", text):
        places = [ROOT / part / name for part in ("electra", "tests", "benchmarks")]
        assert any(p.exists() for p in places), f"{page.name} names {name}"


def test_every_module_is_in_the_readme_map() -> None:
    text = (ROOT / "README.md").read_text()
    modules = {p.name for p in (ROOT / "electra").glob("*.py")} - {"__init__.py", "__main__.py"}
    missing = {m for m in modules if f"`{m}`" not in text} - {"errors.py"}
    assert not missing


def test_at_most_35_distributions_come_with_the_package() -> None:
    """The closure of the requirements without extras, torch and what torch needs left out."""

    def closure(name: str, seen: set[str]) -> set[str]:
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in seen:
            return seen
        seen.add(key)
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                closure(requirement.name, seen)
        return seen

    torch = closure("torch", set())
    ours = closure("electra", set()) - torch - {"electra"}
    assert len(ours) <= 35, sorted(ours)
    said = re.search(r"(\d+) distributions", (ROOT / "docs" / "dependencies.md").read_text())
    assert said is not None
    assert int(said[1]) == len(ours), sorted(ours)


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["pyright", "--pythonpath"]],
    ids=" ".join,
)
def test_the_code_is_clean(command: list[str]) -> None:
    extra = [sys.executable] if command[0] == "pyright" else []
    tool = [str(BIN / command[0]), *command[1:], *extra]
    done = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
