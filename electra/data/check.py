"""What is wrong with my data, asked before training and not after.

Comes in: text as `prepare` takes it, or a prepared corpus. Goes out: a `Report` of facts and of
findings with their remedies. Nothing stops at the first problem: a file that cannot be read is one
finding, and the rest is still looked at. Memory is bounded; from large texts, lines and hashes are
sampled by fixed rules, so the report is the same every time.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import xxhash

from ..errors import EXIT_OK, EXIT_USER, ElectraError
from .corpus import Corpus
from .text import Document, Source, TextStats, expand_inputs, read_documents
from .tokenizer import MAX_ACCENTS, accents_share

Level = Literal["ok", "warning", "error"]

SMALL_RECIPE_TOKENS = 1_000_000 * 128 * 128  # steps, batch and length of `small`
BYTES_PER_TOKEN = 4.5  # of English and a vocabulary of 30,000; a rough figure for planning
MAX_EPOCHS = 40  # of `small`; beyond, the same sentences come too often to teach anything new
MAX_NAMED = 20  # findings of one kind that are listed one by one

_SHORT_LINE, _LONG_LINE = 20, 10_000  # characters
_LINES = "write one sentence or paragraph per line"

# Fact, the share up to which it is no worry, what is said about it, what to do.
_Rules = tuple[tuple[str, float, str, str], ...]
_CORPUS_RULES: _Rules = (
    ("unknown_share", 0.01, "of the tokens are [UNK].", "train a tokenizer on this text"),
    ("padding_share", 0.20, "of each batch is padding.", "use the packed builder or shorter rows"),
    ("thrown_away_share", 0.10, "of the tokens are in no example.", "use the packed builder"),
)
_TEXT_RULES: _Rules = (
    (
        "duplicate_documents_share",
        0.05,
        "of the documents are copies of another.",
        "remove them: they are learned by heart and leak into the held-out part",
    ),
    ("duplicate_lines_share", 0.30, "of the lines are copies of another.", "remove menus, notices"),
    ("short_lines_share", 0.50, f"of the lines have fewer than {_SHORT_LINE} characters.", _LINES),
    ("long_lines_share", 0.05, f"of the lines have more than {_LONG_LINE:,} characters.", _LINES),
    ("markup_lines_share", 0.05, "of the lines hold HTML markup.", "extract the text"),
    (
        "control_lines_share",
        0.01,
        "of the lines hold control or replacement characters.",
        "find out which conversion made them",
    ),
    (
        "symbol_lines_share",
        0.10,
        "of the lines are mostly digits and symbols, not words.",
        "remove tables, code and encoded data, unless you want them learned",
    ),
    (
        "accents_share",
        MAX_ACCENTS,
        "of the letters bear a mark (ä, é, й) that a tokenizer in lower case removes by default.",
        "train it with --no-lowercase, or with --strip-accents False, if words differ by them",
    ),
)

# ASCII alone: in many scripts marks that are no letters abound.
_SYMBOL = re.compile(r"[!-@\[-`{-~]")
_LOOKED_FOR: dict[str, Callable[[str], object]] = {
    "markup_lines_share": re.compile(r"</?[A-Za-z][^<>]{0,200}>|&(?:[a-z]{2,8}|#\d{2,6});").search,
    "control_lines_share": re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd]").search,
    "symbol_lines_share": lambda line: (
        len(line) >= _SHORT_LINE and len(_SYMBOL.findall(line)) > len(line) / 2
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was noticed, where, and what to do about it."""

    level: Level
    what: str
    where: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Facts, and the findings that follow from them; errors come first."""

    findings: tuple[Finding, ...]
    facts: dict[str, Any]
    exit_code: int = EXIT_OK


def check_text(inputs: Sequence[str | Path], column: str = "text") -> Report:
    """Reads all of the text once and reports what training on it would suffer from."""
    unreadable, paths = list[Finding](), set[Source]()
    for given in inputs:
        try:
            paths.update(expand_inputs([given]))
        except ElectraError as error:
            unreadable.append(_finding("error", error))
    total, survey = Counter[str](), _Survey()
    for path in sorted(paths, key=str):
        stats = TextStats()
        try:
            for document in read_documents([path], column=column, stats=stats):
                survey.add(document)
        except ElectraError as error:
            # `prepare` skips a file without text as long as another file has some.
            unreadable.append(_finding("warning" if stats.files else "error", error))
        if stats.long_documents_cut >= 4 and stats.documents == stats.long_documents_cut + 1:
            what = f"The file is one single document of {stats.characters:,} characters."
            fix = "put a blank line between documents, so that no example joins two of them"
            unreadable.append(Finding("warning", what, str(path), fix))
        total.update(vars(stats))
    findings = list[Finding]()
    for level in ("error", "warning"):
        of_level = [finding for finding in unreadable if finding.level == level]
        findings += of_level[:MAX_NAMED]
        if len(of_level) > MAX_NAMED:
            findings.append(Finding(level, f"{len(of_level) - MAX_NAMED:,} more of this kind."))
    if not total["documents"]:
        fix, where = "give files that hold text", ", ".join(map(str, inputs))
        findings.append(Finding("error", "No text was found at all.", where, fix))
    tokens = total["bytes"] / BYTES_PER_TOKEN
    if not total["documents"] or not tokens:  # no text, or none that could be read to its end
        return _report(findings, {}, 0)
    facts: dict[str, Any] = {
        **vars(TextStats(**total)),
        **survey.facts(),
        "estimated_tokens": round(tokens),
        "estimated_epochs_of_small": SMALL_RECIPE_TOKENS / tokens,
    }
    findings += _apply(_TEXT_RULES, facts, survey.examples)
    scripts: dict[str, float] = facts["scripts"]
    if len([share for share in scripts.values() if share >= 0.05]) > 1:
        mix = ", ".join(f"{name} {share:.0%}" for name, share in scripts.items())
        fix = "fine if it is meant; the scripts have to share one vocabulary"
        findings.append(Finding("warning", f"The text mixes scripts: {mix}.", fix=fix))
    return _report(findings, facts, tokens)


def check_corpus(path: Path) -> Report:
    """Verifies every byte of a corpus and reports what training on it would suffer from."""
    try:
        corpus = Corpus.open(path)
    except ElectraError as error:
        return Report((_finding("error", error),), {}, error.exit_code)
    manifest = corpus.manifest
    train, held_out = manifest.counts("train"), manifest.counts("held-out")
    tokens = max(train.tokens, 1)
    facts: dict[str, Any] = {
        "fingerprint": corpus.fingerprint,
        "vocabulary": corpus.vocab_size,
        "sequence_length": corpus.sequence_length,
        "documents": train.documents,
        "tokens": train.tokens,
        "examples": train.examples,
        "held_out_examples": held_out.examples,
        "tokens_per_example": train.stored / max(train.examples, 1),
        "padding_share": manifest.padding_share("train"),
        "thrown_away_share": train.thrown_away / tokens,
        "unknown_share": train.unknown / tokens,
        "epochs_of_small": SMALL_RECIPE_TOKENS / max(train.stored, 1),
    }
    findings = _apply(_CORPUS_RULES, facts, dict.fromkeys(facts, str(path)))
    if not held_out.examples:
        what = "Nothing is held out: the run cannot tell learning from memorising."
        fix = "prepare with held_out_percent above 0"
        findings.append(Finding("warning", what, str(path), fix))
    return _report(findings, facts, train.tokens)


class _Survey:
    """Running shares over documents and lines, in bounded memory."""

    def __init__(self) -> None:
        self.documents, self.lines = _Duplicates(), _Duplicates()
        self.seen = self.short = self.long = self.sampled = 0
        self.kinds, self.characters = Counter[str](), Counter[str]()
        self.examples: dict[str, str] = {}  # kind to the first place where it was found

    def add(self, document: Document) -> None:
        self.documents.add("\n".join(document.lines))
        for line in document.lines:
            self.lines.add(line)
            self.seen += 1
            self.short += len(line) < _SHORT_LINE
            self.long += len(line) > _LONG_LINE
            # Looking at characters is slow, and a sixteenth of a large text says enough.
            if self.seen > 10_000 and self.seen % 16:
                continue
            self.sampled += 1
            line = line[:1000]
            self.characters.update(line)
            for name, is_found in _LOOKED_FOR.items():
                if is_found(line):
                    self.kinds[name] += 1
                    where = f"{document.file}, document at line {document.line}"
                    self.examples.setdefault(name, where)

    def facts(self) -> dict[str, Any]:
        scripts: Counter[str] = Counter()
        for character, count in self.characters.items():
            if character.isalpha():
                scripts[_script(character)] += count
        most, letters = scripts.most_common(8), scripts.total()
        return {
            "duplicate_documents_share": self.documents.share,
            "duplicate_lines_share": self.lines.share,
            "short_lines_share": self.short / max(self.seen, 1),
            "long_lines_share": self.long / max(self.seen, 1),
            **{name: self.kinds[name] / max(self.sampled, 1) for name in _LOOKED_FOR},
            "accents_share": accents_share(self.characters),
            "scripts": {s: round(n / letters, 4) for s, n in most if n >= letters / 1000},
        }


class _Duplicates:
    """The share of texts seen before, by 64-bit hashes; of many, only a fixed fraction is kept."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self._counts: dict[int, int] = {}
        self._mask, self._limit = 0, limit

    def add(self, text: str) -> None:
        digest = xxhash.xxh3_64_intdigest(text.encode())
        if digest & self._mask:
            return
        self._counts[digest] = self._counts.get(digest, 0) + 1
        while len(self._counts) > self._limit:
            self._mask = 2 * self._mask + 1
            self._counts = {key: n for key, n in self._counts.items() if not key & self._mask}

    @property
    def share(self) -> float:
        total = sum(self._counts.values())
        return 1 - len(self._counts) / total if total else 0.0


@cache
def _script(character: str) -> str:
    """The first word of the character's Unicode name is its script: LATIN, CYRILLIC, CJK, ..."""
    return unicodedata.name(character, "UNNAMED").split()[0].split("-")[0].lower()


def _finding(level: Level, error: ElectraError) -> Finding:
    return Finding(level, error.what, error.where, error.fix)


def _apply(rules: _Rules, facts: dict[str, Any], places: dict[str, str]) -> list[Finding]:
    return [
        Finding("warning", f"{facts[name]:.1%} {what}", places.get(name, ""), fix)
        for name, limit, what, fix in rules
        if facts[name] > limit
    ]


def _report(findings: list[Finding], facts: dict[str, Any], tokens: float) -> Report:
    epochs = SMALL_RECIPE_TOKENS / tokens if tokens else 0.0
    if epochs > MAX_EPOCHS:
        what = f"{tokens:,.0f} tokens are little: `small` would go over them {epochs:,.0f} times."
        findings.append(Finding("warning", what, fix="add text, or train fewer steps"))
    findings.sort(key=lambda finding: finding.level != "error")
    found = tuple(findings) or (Finding("ok", "Nothing is wrong with the data."),)
    return Report(found, facts, EXIT_USER if found[0].level == "error" else EXIT_OK)
