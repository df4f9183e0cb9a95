"""Model cards: metadata that the Hub's own library reads, facts that are those of the run, and
names that stay names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from electra.config import FinetuneConfig, PretrainConfig, to_dict
from electra.data.corpus import Corpus
from electra.errors import ElectraError
from electra.finetuning.tasks import Task
from electra.flops import matmul_flops_per_token, paper_flops
from electra.formats import card, hf, hf_export
from electra.pretrain import pretrain
from electra.runlog import read_metrics

EVIL = 'x"\n---\nlicense: mit\n# h `c` <script>alert(1)</script> [l](http://e) **b** | '
EVIL += "\x85\u2028\u202e 😀"
SEEDS = [
    {"seed": 3, "score": 0.5, "failed": True, "scores": {"dev": {"accuracy": 0.5, "f1": 0.25}}},
    {"seed": 4, "score": 0.75, "failed": False, "scores": {"dev": {"accuracy": 0.75, "f1": 0.5}}},
]
SUMMARY = {"median": 0.625, "mean": 0.625, "best": 0.75, "std": 0.17, "seeds": 2, "failed": 1}


@pytest.fixture
def run(corpus: Corpus, micro: PretrainConfig, tmp_path: Path) -> Path:
    pretrain(micro, corpus, tmp_path / "run", quiet=True)
    return tmp_path / "run"


def facts(text: str) -> dict[str, str]:
    """The rows of all tables with two columns."""
    return dict(re.findall(r"^\| (.*?) \| (.*?) \|$", text, re.M))


def test_the_card_of_a_run_says_what_the_run_was(
    run: Path, corpus: Corpus, micro: PretrainConfig, text: Path, tmp_path: Path
) -> None:
    hf_export.export_run(run, tmp_path / "out", license="cc-by-sa-4.0")
    for kind in ("discriminator", "generator"):
        place = tmp_path / "out" / kind
        read = ModelCard.load(place / "README.md")
        assert read.data.license == "cc-by-sa-4.0"
        assert read.data.library_name == "transformers"
        told = facts(read.text)
        assert told["text"] == f"`{text.name}`"
        assert str(text.parent) not in read.content
        assert told["corpus, SHA-256"] == f"`{corpus.fingerprint}`"
        assert f"{corpus.manifest.counts('train').tokens:,} tokens" in told["amount of text"]
        assert told["length"] == "20 steps of 8 × 23 tokens"
        products = 20 * 8 * 23 * matmul_flops_per_token(micro, corpus.vocab_size)
        by_paper = paper_flops(micro, corpus.vocab_size, 20)
        assert told["FLOPs"] == f"{products:.3g} in products, {by_paper:.3g} by the paper's rules"
        assert told["seed"] == "7"
        assert "energy" not in read.content  # of a CPU nothing is known
        assert told["`optim.learning_rate`"] == "`0.003`"
        assert 0 <= float(told["discriminator, AUC (0.5 is chance)"]) <= 1
        assert (place / card.PICTURE).read_bytes().startswith(b"\x89PNG")
        assert f"({card.PICTURE})" in read.text
        loads = "ElectraForPreTraining" if kind == "discriminator" else "ElectraForMaskedLM"
        assert f'{loads}.from_pretrained("' in read.text
        assert 'electra.load("' in read.text
    assert hf.load_pretrained(tmp_path / "out").discriminator is not None


def test_the_card_of_an_earlier_step_tells_nothing_of_later_ones(run: Path, tmp_path: Path) -> None:
    hf_export.export_run(run, tmp_path / "out", step=16)
    told = facts((tmp_path / "out" / "discriminator" / "README.md").read_text())
    assert told["length"] == "16 steps of 8 × 23 tokens"
    held = {m["step"]: m for m in read_metrics(run) if m["kind"] == "eval"}
    assert sorted(held) == [6, 12, 18, 20]
    assert told["discriminator, AUC (0.5 is chance)"] == f"{held[12]['disc_auc']:.4g}"
    assert held[12]["disc_auc"] != held[18]["disc_auc"] != held[20]["disc_auc"]


def test_without_a_licence_the_reader_is_told_to_choose(run: Path, tmp_path: Path) -> None:
    hf_export.export_run(run, tmp_path / "out")
    read = ModelCard.load(tmp_path / "out" / "discriminator" / "README.md")
    assert read.data.license == "unknown"
    assert "--license" in read.text.split("## Licence")[1]


@pytest.mark.parametrize("licence", ["mit\nx: y", "", "MIT License", "<b>", "a" * 65])
def test_a_licence_is_a_name(licence: str, micro: PretrainConfig) -> None:
    with pytest.raises(ElectraError, match="licence is"):
        card.readme("generator", "X", micro.encoder, 97, card.Story({}), licence)
    with pytest.raises(ElectraError, match="license is"):
        FinetuneConfig(license=licence)


def test_energy_is_estimated_where_the_device_is_known(micro: PretrainConfig) -> None:
    assert card.energy("NVIDIA H200", 7200, 4) == pytest.approx(0.7 * 4 * 2 * 1.56)
    assert card.energy("Abacus 3000", 7200) is None
    record = {"config": to_dict(micro), "environment": {"device": "NVIDIA H200", "processes": 4}}
    told = card.training_facts(record, 20, 7200.0)
    assert told["energy, estimated"].startswith("8.74 kWh: 700 W (rated) × 4 × 2 h × 1.56")
    record["environment"]["device"] = "Abacus 3000"
    assert not [key for key in card.training_facts(record, 20, 7200.0) if "energy" in key]


def rendered(text: str) -> str:
    """As the strictest reader would see it: with raw HTML let through, and code left out."""
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    return re.sub(r"<code.*?</code>", "", html, flags=re.S)


def test_hostile_names_of_a_run_stay_names(
    run: Path, micro: PretrainConfig, tmp_path: Path
) -> None:
    record = json.loads((run / "run.json").read_bytes())
    record |= {"init": f"/secret/{EVIL}", "corpus_fingerprint": EVIL}
    record["config"]["name"] = EVIL
    record["data"]["files"] = [EVIL]
    record["environment"] |= {"device": EVIL, "dtype": EVIL}
    (tmp_path / "run.json").write_text(json.dumps(record))
    (tmp_path / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes())
    story = card.of_pretraining(replace(micro, name=EVIL), 20, tmp_path)
    content = card.readme("discriminator", "X", micro.encoder, 97, story, "mit").decode()
    read = ModelCard(content)
    keys = {"library_name", "license", "pipeline_tag", "tags"}
    assert read.data.to_dict().keys() == keys
    html = rendered(read.text)
    for word in ("<script", "<a ", "<strong", "alert", "secret"):
        assert word not in html, word
    assert "secret" not in read.text


def test_the_scores_of_fine_tuning_are_metadata_and_text(micro: PretrainConfig) -> None:
    task = Task(name="reviews", kind="classification", metric="accuracy", labels=("bad", "good"))
    results = {"seeds": SEEDS, "summary": SUMMARY, "model": "/home/me/models/small", "settings": {}}
    results["environment"] = {"device": "NVIDIA L4", "dtype": "bfloat16", "processes": 1}
    results["seeds"] = [{**seed, "seconds": 3600.0, "seeds_at_once": 2} for seed in SEEDS]
    story = card.of_finetuning(task, results, 64, has_class=True, run=None)
    read = ModelCard(card.readme("classification", "X", micro.encoder, 97, story, "mit").decode())
    (result,) = read.data.eval_results or []
    assert (result.task_type, result.dataset_name) == ("text-classification", "reviews")
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.625)
    told = facts(read.text)
    assert told["3"] == "`accuracy` 50.0, `f1` 25.0 (failed)"
    assert told["4"] == "`accuracy` 75.0, `f1` 50.0"
    assert told["time"] == "1.00 h"
    assert told["energy, estimated"].startswith("0.112 kWh")
    assert "Started from `small`." in read.text
    assert "/home/me" not in read.content
    assert 'electra.load_finetuned("' in read.text


def test_hostile_names_of_a_task_stay_names(micro: PretrainConfig) -> None:
    task = Task(name=EVIL, kind="tagging", metric=EVIL, labels=(EVIL,))
    seeds: list[Any] = [{**SEEDS[0], "scores": {EVIL: {EVIL: 0.5}}}]
    results = {"seeds": seeds, "summary": SUMMARY, "model": EVIL, "settings": {EVIL: EVIL}}
    story = card.of_finetuning(task, results, 64, has_class=False, run=None)
    content = card.readme("tagging", "X", micro.encoder, 97, story, "mit").decode()
    read = ModelCard(content)
    (result,) = read.data.eval_results or []
    assert re.fullmatch(r"[\w .,+-]+", result.dataset_name)
    html = rendered(content)
    for word in ("<script", "<a ", "<strong", "onerror"):
        assert word not in html, word
