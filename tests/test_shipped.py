"""The model that comes with the checkout: taken where none is named and nowhere else, and fit to be
taken."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artefacts import Artefacts, make_artefacts
from conftest import MODULES
from rich.console import Console

import electra
from electra import cli, files
from electra.data.corpus import Corpus
from electra.use import demo as demo_module
from electra.use.demo_text import Prose

SHIPPED = files.SHIPPED
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Artefacts:
    return make_artefacts(tmp_path_factory.mktemp("made"), corpus)


@pytest.fixture
def shipped(made: Artefacts, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model in its place."""
    monkeypatch.setattr(files, "SHIPPED", made.export)
    return made.export


@pytest.fixture
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "SHIPPED", tmp_path / "none")
    return tmp_path / "none"


def test_it_lies_in_the_checkout() -> None:
    assert SHIPPED == ROOT / "models" / "small-en"


# ---------------------------------------------------------------------- which model is taken


def test_detect_takes_it_and_says_so(shipped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["detect", "one old river"]) == 0
    implied = capsys.readouterr()
    assert cli.run(["detect", "one old river", "--model", str(shipped)]) == 0
    named = capsys.readouterr()
    assert implied.out == named.out
    assert implied.err.splitlines() == [f"model: {shipped}, as none was named"]
    assert named.err == ""


def test_embed_takes_it(shipped: Path, text: Path, tmp_path: Path) -> None:
    common = ["embed", "--input", str(text), "--quiet", "--out"]
    assert cli.run([*common, str(tmp_path / "a.npy")]) == 0
    assert cli.run([*common, str(tmp_path / "b.npy"), "--model", str(shipped)]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy"))


@pytest.mark.parametrize(
    ("command", "work"),
    [
        (["finetune", "--data", "d", "--out", "o"], "glue.finetune_task"),
        (["glue", "--data", "d", "--out", "o"], "glue.glue"),
        (["extend", "--input", "t", "--out", "o"], "extend.extend"),
        (["onnx", "--out", "o"], "onnx_export.export_onnx"),
        (["serve"], "serve.serve"),
        (["ui"], "ui.ui"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
@pytest.mark.parametrize("named", [False, True])
def test_the_other_commands_take_it_unless_one_is_named(
    command: list[str],
    work: str,
    named: bool,
    shipped: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Taken(Exception):
        pass

    def note(model: Any, *_: Any, **__: Any) -> Any:
        raise Taken(model)

    monkeypatch.chdir(tmp_path)
    module, _, function = work.partition(".")
    monkeypatch.setattr(importlib.import_module(MODULES[module]), function, note)
    other = {"serve": ["mine"], "extend": ["mine"]}.get(command[0], ["--model", "mine"])
    with pytest.raises(Taken) as taken:
        cli.run([command[0], *(other if named else []), *command[1:]])
    assert taken.value.args == ((Path("mine") if named else shipped),)
    assert (str(shipped) in capsys.readouterr().err) == (not named)


def test_the_library_takes_it(shipped: Path) -> None:
    assert electra.load().path == shipped
    assert electra.load().detect("one river").words


def test_a_model_that_was_named_is_never_replaced(
    shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["detect", "a", "--model", str(tmp_path / "mine")]) == 2
    told = capsys.readouterr()
    assert str(tmp_path / "mine") in told.err
    assert str(shipped) not in told.err + told.out
    with pytest.raises(electra.ElectraError):
        electra.load(tmp_path / "mine")


def test_where_it_is_missing_that_is_told(
    nothing: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["detect", "a"]) == 2
    told = capsys.readouterr().err
    assert str(nothing) in told
    assert "name a model" in told
    out = tmp_path / "a.npy"
    assert cli.run(["embed", "--input", str(text), "--out", str(out)]) == 2
    assert not out.exists()
    with pytest.raises(electra.ElectraError, match="No model is named"):
        electra.load()


def test_the_page_shows_runs_where_it_is_missing(
    nothing: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Any] = []
    monkeypatch.setattr("electra.use.ui.ui", lambda *args: given.extend(args) or 0)
    assert cli.run(["ui"]) == 0
    assert given[0] is None
    assert "only runs are shown" in capsys.readouterr().err
    assert not nothing.exists()


# ---------------------------------------------------------------------- the demo's second half


def half(out: Path) -> tuple[dict[str, Any] | None, str]:
    sentences = [f"one {a} river sees all {b} stones hear one {c} bird." for a in ADJECTIVES
                 for b in ADJECTIVES for c in ADJECTIVES]  # fmt: skip
    documents = [Prose("all", tuple(sentences))]
    examples = demo_module._swapped_or_not(documents, 40, seed=1)
    console = Console(record=True, width=200, quiet=False, highlight=False)
    exchanged, task = {"found": 3, "sentences": 200}, {"pretrained": [0.5, 0.6]}
    splits = {"train": examples, "dev": examples}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_module, "console", console)
        done = demo_module._shipped(splits, documents, out, exchanged, task)
    return done, console.export_text()


ADJECTIVES = ("old", "small", "green", "quiet", "bright")


@pytest.mark.usefixtures("shipped")
def test_the_demo_shows_it_beside_the_tiny_model(tmp_path: Path) -> None:
    done, told = half(tmp_path / "tuned")
    assert done is not None
    assert done["exchanged_words"]["sentences"] == 125
    assert len(done["labelled_task"]) == 3
    mean = 100 * sum(done["labelled_task"]) / 3
    assert re.search(r"tiny +3 of 200 exchanged words found first, 55\.0 % right", told)
    assert f"of 125 exchanged words found first, {mean:.1f} % right" in told
    assert (tmp_path / "tuned" / "small-en" / "model" / "model.safetensors").is_file()


def test_the_demo_goes_on_without_it(nothing: Path, tmp_path: Path) -> None:
    done, told = half(tmp_path / "tuned")
    assert done is None
    assert told.replace("\n", "").startswith(f"left out: {nothing}")
    assert not (tmp_path / "tuned").exists()


# ---------------------------------------------------------------------- the model itself

real = pytest.mark.skipif(not SHIPPED.is_dir(), reason="models/small-en is not in this checkout")


@real
def test_its_files_are_small_enough_for_a_repository() -> None:
    sizes = {str(p): p.stat().st_size for p in SHIPPED.rglob("*") if p.is_file()}
    assert {name: size for name, size in sizes.items() if size > 15e6} == {}
    assert sum(sizes.values()) < 45e6


@real
def test_transformers_loads_both_networks_whole() -> None:
    transformers = pytest.importorskip("transformers")
    wanted = {
        "AutoModel": ("discriminator", "ElectraModel"),
        "AutoModelForPreTraining": ("discriminator", "ElectraForPreTraining"),
        "AutoModelForMaskedLM": ("generator", "ElectraForMaskedLM"),
    }
    for auto, (part, name) in wanted.items():
        load = getattr(transformers, auto).from_pretrained
        model, info = load(SHIPPED / part, output_loading_info=True)
        assert type(model).__name__ == name
        assert not info["missing_keys"], auto
        assert not info["mismatched_keys"], auto
        # The encoder alone leaves its head aside.
        assert auto == "AutoModel" or not info["unexpected_keys"], auto
        assert model.num_parameters() <= 14_000_000
        tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED / part)
        assert tokenizer.vocab_size == model.config.vocab_size


@real
def test_absurd_words_are_what_it_suspects_most(capsys: pytest.CaptureFixture[str]) -> None:
    absurd = {
        "banana": "The president signed the banana into law yesterday.",
        "elephant": "She drank a cup of elephant before she went to work.",
        "library": "The doctor told him to take the medicine twice a library.",
        "chocolate": "The capital of France is chocolate.",
        "swimming": "The army crossed the swimming and took the city.",
        "spoon": "The river flows through the spoon and into the sea.",
        "quickly": "He opened the quickly and looked out of the window.",
        "mountain": "They were married in the church and had three mountain.",
        "window": "The king died and his window became the new king of England.",
        "engine": "The engine barked loudly at the cat in the garden.",
        "tuesday": "He was born in a small tuesday near the coast of Norway.",
        "sleep": "The film was directed by John Ford and released in sleep.",
    }
    right = 0
    for word, sentence in absurd.items():
        assert cli.run(["detect", sentence]) == 0
        suspected = re.findall(r"^(\S+)  replaced (\d+)%", capsys.readouterr().out, re.M)
        right += max(suspected, key=lambda found: int(found[1]))[0] == word
    assert right >= 6  # by chance one or two


@real
@pytest.mark.parametrize("part", ["discriminator", "generator"])
def test_its_card_has_licences_and_results(part: str) -> None:
    card = (SHIPPED / part / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^license: (?!\"unknown\")", card, re.M)
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", card, re.M | re.S))
    assert re.search("licen[cs]e", sections["Data"], re.I)  # of the text it was trained on
    results = "\n".join(text for title, text in sections.items() if title.startswith("Results"))
    assert part == "generator" or all(
        task in results for task in ("CoLA", "SST-2", "MRPC", "STS-B", "QNLI", "RTE")
    )
    assert results
