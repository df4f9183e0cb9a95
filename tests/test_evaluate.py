"""`electra evaluate`: the numbers of a run again, from the run, its export or any other model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from conftest import SEQUENCE_LENGTH, language

import electra
from electra import cli
from electra import evaluate as module
from electra.config import PretrainConfig
from electra.data.corpus import Corpus, prepare
from electra.data.tokenizer import Tokenizer, train_tokenizer
from electra.errors import ElectraError
from electra.evaluate import EVAL_SEED, evaluate, evaluate_model
from electra.formats import card, hf, hf_export
from electra.formats.extend import _grow
from electra.pretrain import pretrain
from electra.runlog import read_metrics


def changed(config: PretrainConfig, **groups: dict[str, Any]) -> PretrainConfig:
    return replace(config, **{k: replace(getattr(config, k), **v) for k, v in groups.items()})


def logged(run: Path) -> dict[str, Any]:
    """The last evaluation of the run itself."""
    (*_, last) = (m for m in read_metrics(run) if m["kind"] == "eval")
    return {key: value for key, value in last.items() if key not in ("kind", "step")}


def numbers(found: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    return {key: found[key] for key in like}


@pytest.fixture(scope="module")
def other(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Corpus]:
    """A corpus of other text."""

    def made(tokenizer: Tokenizer = tokenizer, length: int = 23, held_out: float = 10.0) -> Corpus:
        here = tmp_path_factory.mktemp("other")
        (here / "a.txt").write_text(language(40, seed=9))
        options: dict[str, Any] = {"sequence_length": length, "held_out_percent": held_out}
        prepare([here / "a.txt"], tokenizer, here / "corpus", workers=1, **options)
        return Corpus.open(here / "corpus")

    return made


@pytest.fixture
def run(micro: PretrainConfig, corpus: Corpus, tmp_path: Path) -> Path:
    pretrain(micro, corpus, tmp_path / "run", quiet=True)
    return tmp_path / "run"


@pytest.fixture
def export(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hf_export, "_compare", lambda *_: [])
    hf_export.export_run(run, run.parent / "export")
    return run.parent / "export"


# ---------------------------------------------------------------------- the run's own numbers

RUNS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "average": {"optim": {"average": 0.9}},
    "nothing shared": {"generator": {"sharing": "none"}},
    "all shared": {"generator": {"sharing": "all", "width": 1.0, "depth": 1.0}},
    "disentangled": {"generator": {"sharing": "disentangled"}},
    "other masks": {
        "objective": {"mask_percent": 30.0, "mask_token_percent": 85.0, "disc_head": "linear"},
        "generator": {"disallow_correct": True, "temperature": 2.0},
    },
    "masked language model": {"objective": {"kind": "mlm"}},
    "all tokens": {"objective": {"kind": "all_tokens_mlm"}},
    "adversarial": {"objective": {"algorithm": "adversarial"}},
    "two stages": {
        "objective": {"algorithm": "two_stage", "stage_two": "fresh"},
        "generator": {"sharing": "none"},
    },
    "a head start": {
        "objective": {"disc_start_percent": 20.0, "disc_positions": "masked"},
        "optim": {"generator_rate": 0.5},
    },
    "unigram": {"generator": {"kind": "unigram"}},
    "parts": {"data": {"micro_batch": 3}},
    "electric": {"objective": {"kind": "electric"}},
    "replace": {"objective": {"kind": "replace_mlm"}},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_and_its_export_have_the_numbers_that_the_run_logged(
    micro: PretrainConfig,
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    monkeypatch.setattr(hf_export, "_compare", lambda *_: [])
    run, export = tmp_path / "run", tmp_path / "export"
    pretrain(changed(micro, **RUNS[name]), corpus, run, quiet=True)
    own = logged(run)
    assert own.keys() >= {"mlm_loss", "disc_auc", "tokens", "unigram_entropy"}
    found = evaluate_model(run, corpus)
    assert numbers(found, own) == own
    assert (found["step"], found["masks_of"], found["batches"]) == (20, "the run", 2)
    hf_export.export_run(run, export)
    if name in ("electric", "replace"):  # what corrupts their text is not exported
        with pytest.raises(ElectraError, match="corrupts text") as caught:
            evaluate_model(export, corpus)
        assert "give the run" in caught.value.fix
        return
    exported = evaluate_model(export, corpus)
    assert numbers(exported, own) == own
    assert (exported["step"], exported["masks_of"]) == (20, "the run")
    if name != "masked language model":
        assert numbers(evaluate_model(export / "discriminator", corpus), own) == own


def test_not_more_sequences_at_once_than_in_training(
    run: Path, corpus: Corpus, micro: PretrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def watched(*args: Any, **named: Any) -> Any:
        asked.append(named["at_once"])
        return evaluate(*args, **named)

    monkeypatch.setattr(module, "evaluate", watched)
    evaluate_model(run, corpus)
    record = json.loads((run / "run.json").read_bytes())
    record["config"]["data"]["micro_batch"] = 3
    (run / "run.json").write_text(json.dumps(record))
    evaluate_model(run, corpus)
    assert asked == [64, 3]
    assert micro.data.micro_batch is None


# ---------------------------------------------------------------------- other text, other models


def test_other_text_has_other_numbers_and_the_same_ones_again(
    run: Path, corpus: Corpus, other: Callable[..., Corpus]
) -> None:
    there = other()
    found = evaluate_model(run, there)
    assert evaluate_model(run, there) == found
    assert found["corpus_fingerprint"] == there.fingerprint
    assert found["mlm_loss"] != evaluate_model(run, corpus)["mlm_loss"]
    assert EVAL_SEED == 20_200_323  # numbers that were written down stay what they are


def test_all_of_a_corpus_is_its_text_for_training_and_that_held_out(
    run: Path, other: Callable[..., Corpus]
) -> None:
    there = other()
    whole = evaluate_model(run, there, part="all", batches=10_000)
    held_out = evaluate_model(run, there, batches=10_000)
    train = int(there.train.lengths.sum())
    assert held_out["tokens"] == there.held_out.lengths.sum() > 0
    assert whole["tokens"] == train + held_out["tokens"]
    assert evaluate_model(run, there, batches=1)["tokens"] <= 8 * SEQUENCE_LENGTH
    parts = [part.gather(np.arange(len(part))) for part in (there.train, there.held_out)]
    for both, *apart in zip(there.whole.gather(np.arange(len(there.whole))), *parts, strict=True):
        assert np.array_equal(both, np.concatenate(apart))


def test_where_nothing_is_held_out_all_can_be_looked_at(
    run: Path, other: Callable[..., Corpus]
) -> None:
    there = other(held_out=0.0)
    with pytest.raises(ElectraError, match="holds out no document") as caught:
        evaluate_model(run, there)
    assert "--part all" in caught.value.fix
    assert evaluate_model(run, there, part="all")["tokens"] > 0


def test_rows_of_another_length_are_read_as_far_as_the_model_has_positions(
    run: Path, other: Callable[..., Corpus]
) -> None:
    short, longer = (evaluate_model(run, other(length=n), part="all") for n in (11, 29))
    assert longer["tokens"] > 2 * short["tokens"]  # of equally many rows
    assert longer["config"]["data"]["sequence_length"] == 29
    with pytest.raises(ElectraError, match="of 30 tokens, the model reads at most 29") as caught:
        evaluate_model(run, other(length=30))
    assert caught.value.fix == "prepare it with --length 29"


def test_another_tokenizer_is_refused_and_both_are_named(
    run: Path, export: Path, other: Callable[..., Corpus], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "b.txt").write_text(language(40, seed=9))
    another = train_tokenizer([tmp_path / "b.txt"], vocab_size=90)
    for model in (run, export):
        with pytest.raises(ElectraError, match="another tokenizer than the model's") as caught:
            evaluate_model(model, other(another))
        assert another.hash[:12] in caught.value.what
        assert tokenizer.hash[:12] in caught.value.what


def test_one_network_alone_is_measured_if_it_is_the_generator(
    export: Path, corpus: Corpus, tmp_path: Path
) -> None:
    alone = evaluate_model(export / "generator", corpus)
    assert alone["disc_auc"] is alone["disc_loss"] is None
    assert alone["mlm_loss"] > 0
    assert (alone["masks_of"], alone["step"]) == ("the recipe small", None)
    shutil.copytree(export / "discriminator", tmp_path / "alone")
    with pytest.raises(ElectraError, match="no network here that corrupts") as caught:
        evaluate_model(tmp_path / "alone", corpus)
    assert "put a generator" in caught.value.fix


def test_a_model_of_transformers_is_measured(export: Path, corpus: Corpus, tmp_path: Path) -> None:
    """With the masks of the recipe small, which are those of this run; only the batches differ."""
    for kind, name in (
        ("discriminator", "ElectraForPreTraining"),
        ("generator", "ElectraForMaskedLM"),
    ):
        loaded = getattr(transformers, name).from_pretrained(export / kind)
        loaded.save_pretrained(tmp_path / "theirs" / kind)
        shutil.copy(export / kind / "tokenizer.json", tmp_path / "theirs" / kind)
    theirs = evaluate_model(tmp_path / "theirs", corpus)
    ours = evaluate_model(export, corpus, batches=10_000)
    assert theirs["masks_of"] == "the recipe small"
    assert theirs["tokens"] == ours["tokens"]  # fewer than 8 batches of 128
    for key in ("mlm_loss", "disc_loss", "disc_auc"):
        assert theirs[key] == pytest.approx(ours[key], rel=1e-5)


def test_rows_to_spare_are_no_tokens_that_come_up(
    export: Path, corpus: Corpus, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model, first = hf.load_pretrained(export), tokenizer.vocab_size
    both = tuple(_grow(n, first, [[5], [6]]) for n in (model.discriminator, model.generator) if n)
    hf_export.export_networks(both, tokenizer, tmp_path / "wide", {}, card.Story({}))
    assert hf.load_pretrained(tmp_path / "wide").network("generator").vocab_size == first + 2
    found = evaluate_model(tmp_path / "wide", corpus)
    assert found["unigram_entropy"] == evaluate_model(export, corpus)["unigram_entropy"]
    assert found["disc_auc"] > 0


# ---------------------------------------------------------------------- the command and the library


def test_the_command_shows_and_stores_what_the_library_gives(
    run: Path, corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "numbers.json"
    argv = ["evaluate", run, "--corpus", corpus.path, "--out", out]
    assert cli.run([str(arg) for arg in argv]) == 0
    shown = capsys.readouterr().out
    stored = json.loads(out.read_bytes())
    found = electra.load(run).evaluate(corpus.path)
    assert stored == found
    own = logged(run)
    assert numbers(stored, own) == own
    assert f"{own['mlm_loss']:.3f} nats (token frequencies alone " in shown
    assert f"{own['disc_auc']:.3f}" in shown
    assert stored["corpus_fingerprint"] == corpus.fingerprint
    assert stored["model"] == str(run)
    assert stored["environment"].keys() >= {"device", "torch", "threads", "source"}
    assert stored["environment"]["threads"] == 1  # of the run
    before = out.read_bytes()
    assert cli.run([str(arg) for arg in argv]) == 0
    assert out.read_bytes() == before


def test_a_number_that_is_none_is_stored_as_a_word(
    run: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverged(*args: Any, **named: Any) -> Any:
        return replace(evaluate(*args, **named), mlm_loss=float("nan"))

    monkeypatch.setattr(module, "evaluate", diverged)
    argv = ["evaluate", run, "--corpus", corpus.path, "--out", tmp_path / "a.json"]
    assert cli.run([str(arg) for arg in argv]) == 0
    assert json.loads((tmp_path / "a.json").read_bytes())["mlm_loss"] == "nan"
