"""Checks: each fault is found, sound data is not blamed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from electra.data import check
from electra.data.check import Finding, Report, check_corpus, check_text
from electra.data.corpus import prepare
from electra.data.tokenizer import Tokenizer

ORACLE = Path(__file__).parent / "oracle"


def sentence(rng: random.Random, words: int = 15) -> str:
    return " ".join("".join(rng.choices("abcdefghijklmnop", k=6)) for _ in range(words))


def sound_text(path: Path, documents: int = 200) -> Path:
    rng = random.Random(0)
    texts = ["\n".join(sentence(rng) for _ in range(5)) for _ in range(documents)]
    path.write_text("\n\n".join(texts))
    return path


@pytest.fixture(autouse=True)
def enough_text_is_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the text is a matter of one test; the others would all trip over it."""
    monkeypatch.setattr(check, "SMALL_RECIPE_TOKENS", 1000)


def the_warning(report: Report, what: str) -> Finding:
    found = [finding for finding in report.findings if what in finding.what]
    assert len(found) == 1, report.findings
    assert found[0].level == "warning"
    assert found[0].fix
    return found[0]


def test_sound_text_is_fine(tmp_path: Path) -> None:
    report = check_text([sound_text(tmp_path / "a.txt")])
    assert [finding.level for finding in report.findings] == ["ok"]
    assert report.facts["documents"] == 200
    assert report.facts["lines"] == 1000
    assert report.facts["scripts"] == {"latin": 1.0}
    assert report.facts["duplicate_lines_share"] == 0
    json.dumps(report.facts)


def test_all_unreadable_files_are_found(tmp_path: Path) -> None:
    sound_text(tmp_path / "a.txt")
    (tmp_path / "b.txt").write_bytes(b"\xff\xff")
    (tmp_path / "c.jsonl").write_text('{"other": 1}')
    (tmp_path / "d.txt").write_bytes(b"")
    report = check_text([tmp_path, tmp_path / "missing.txt"])
    errors = [finding for finding in report.findings if finding.level == "error"]
    assert [Path(finding.where.split(",")[0]).name for finding in errors] == [
        "missing.txt",
        "b.txt",
        "c.jsonl",
    ]
    assert "d.txt" in the_warning(report, "no text").where
    assert report.findings[0].level == "error"
    assert report.facts["documents"] == 200


def test_many_unreadable_files_are_counted(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.txt").write_bytes(b"\xff")
    report = check_text([tmp_path])
    assert len([finding for finding in report.findings if "UTF-8" in finding.what]) == 20
    assert any("10 more" in finding.what for finding in report.findings)
    assert any("No text was found" in finding.what for finding in report.findings)


def test_no_text_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but that is said: all numbers would be zeros."""
    monkeypatch.setattr(check, "SMALL_RECIPE_TOKENS", 1_000_000 * 128 * 128)
    (tmp_path / "a.txt").write_text("\n")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    for name, word in (("a.txt", "no text"), ("b.txt", "UTF-8"), ("mistyped", "No such file")):
        report = check_text([tmp_path / name])
        assert any(word in finding.what for finding in report.findings)
        assert report.findings[0].level == "error"
        assert not any("little" in finding.what for finding in report.findings)
        assert report.facts == {}
        assert report.exit_code == 2


def test_duplicates(tmp_path: Path) -> None:
    path = sound_text(tmp_path / "a.txt")
    path.write_text(path.read_text() + "\n\n" + path.read_text())
    report = check_text([path])
    assert report.facts["duplicate_documents_share"] == 0.5
    the_warning(report, "50.0% of the documents are copies")
    the_warning(report, "50.0% of the lines are copies")


def test_duplicates_in_bounded_memory() -> None:
    rng = random.Random(0)
    counter = check._Duplicates(limit=500)
    texts = [str(number) for number in range(10_000)] + [str(n) for n in range(0, 10_000, 2)]
    rng.shuffle(texts)
    for text in texts:
        counter.add(text)
    assert len(counter._counts) <= 500
    assert abs(counter.share - 1 / 3) < 0.08


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("ok {}", "fewer than 20 characters"),
        ("<p class='x'>Some text in a paragraph {}</p>", "HTML markup"),
        ("Fish &amp; chips for everyone in the house {}", "HTML markup"),
        ("A line with a replacement \ufffd character {}", "control or replacement"),
        ("0x3f 12.5% | 99 | 1/2 | ==== 7777 #{}", "digits and symbols"),
        ("long words in one line " * 500 + "{}", "more than 10,000 characters"),
    ],
)
def test_lines_that_are_no_prose(tmp_path: Path, line: str, what: str) -> None:
    path = sound_text(tmp_path / "a.txt", documents=5)
    lines = "\n".join(line.format(number) for number in range(100))
    path.write_text(path.read_text() + "\n\n" + lines)
    report = check_text([path])
    finding = the_warning(report, what)
    if what in ("HTML markup", "control or replacement", "digits and symbols"):
        assert f"{path}, document at line 31" in finding.where


def test_other_scripts_are_not_taken_for_symbols(tmp_path: Path) -> None:
    text = "हिन्दी भाषा में लिखा हुआ एक साधारण वाक्य {}\n\nОбычное русское предложение номер {}\n\n"
    (tmp_path / "a.txt").write_text("".join(text.format(n, n) for n in range(100)))
    report = check_text([tmp_path / "a.txt"])
    assert report.facts["symbol_lines_share"] == 0
    assert set(report.facts["scripts"]) == {"devanagari", "cyrillic"}
    assert "cyrillic" in the_warning(report, "mixes scripts").what


@pytest.mark.parametrize(
    ("line", "is_marked"),
    [
        ("Plain words of English prose, and a café now and then, number {}.", False),
        ("Die Größe der Bücher schätzte er auf {} Zentimeter.", True),
        ("Ποτέ δεν ξέρει πότε έρχεται ο {}ος.", True),
        ("हिन्दी में मात्राएँ शब्द का भाग हैं {}", True),
        ("Straße und Maß, Øre, 東京, 한국어 {}", False),  # nothing that would be removed
    ],
)
def test_marks_that_are_removed_by_default(tmp_path: Path, line: str, is_marked: bool) -> None:
    english = "Sentences without any marks follow here, so that they are rare. " * 4
    text = "".join(f"{line.format(n)} {'' if is_marked else english}\n" for n in range(200))
    (tmp_path / "a.txt").write_text(text, "utf-8")
    found = [f for f in check_text([tmp_path]).findings if "bear a mark" in f.what]
    assert bool(found) == is_marked
    assert all("--strip-accents False" in f.fix for f in found)


def test_one_giant_document(tmp_path: Path) -> None:
    rng = random.Random(0)
    path = tmp_path / "a.txt"
    path.write_text("\n".join(sentence(rng, 100) for _ in range(2000)))
    assert str(path) == the_warning(check_text([path]), "one single document").where


def test_little_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SMALL_RECIPE_TOKENS", 1_000_000 * 128 * 128)
    report = check_text([sound_text(tmp_path / "a.txt")])
    the_warning(report, "tokens are little")
    assert report.facts["estimated_epochs_of_small"] > 1000


# ---------------------------------------------------------------- corpora


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.load(ORACLE / "builder_vocab.txt")


def known_text(path: Path) -> Path:
    lines = (ORACLE / "builder_text.txt").read_text().split("\n")
    known = [line for line in lines if line and "z" not in line]  # the vocabulary has no z
    path.write_text("\n\n".join("\n".join(known[n : n + 8]) for n in range(40)))
    return path


def test_a_sound_corpus_is_fine(tmp_path: Path, tokenizer: Tokenizer) -> None:
    manifest = prepare([known_text(tmp_path / "a.txt")], tokenizer, tmp_path / "c", workers=1)
    report = check_corpus(tmp_path / "c")
    assert [finding.level for finding in report.findings] == ["ok"]
    assert report.facts["examples"] == manifest.counts("train").examples
    assert report.facts["fingerprint"] == manifest.fingerprint
    assert 100 < report.facts["tokens_per_example"] <= 128
    json.dumps(report.facts)


def test_a_corpus_that_wastes_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prepare(
        [known_text(tmp_path / "a.txt")],
        tokenizer,
        tmp_path / "c",
        workers=1,
        builder="segments",
        sequence_length=24,
        held_out_percent=0,
    )
    report = check_corpus(tmp_path / "c")
    the_warning(report, "of the tokens are in no example")
    the_warning(report, "Nothing is held out")


def test_padding_and_unknown_words(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(["the zzz end"] * 50))
    prepare([tmp_path / "a.txt"], tokenizer, tmp_path / "c", workers=1, builder="segments")
    report = check_corpus(tmp_path / "c")
    the_warning(report, "of each batch is padding")
    the_warning(report, "33.3% of the tokens are [UNK]")


def test_a_damaged_corpus_is_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prepare([known_text(tmp_path / "a.txt")], tokenizer, tmp_path / "c", workers=1)
    path = tmp_path / "c" / "train-00000.tokens.bin"
    path.write_bytes(path.read_bytes()[::-1])
    report = check_corpus(tmp_path / "c")
    assert [(finding.level, finding.where) for finding in report.findings] == [("error", str(path))]
    assert check_corpus(tmp_path).findings[0].level == "error"
