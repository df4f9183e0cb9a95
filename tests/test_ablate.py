"""Studies: the paper's tables as settings, cells as real processes, the numbers in the report."""

from __future__ import annotations

import contextlib
import csv
import inspect
import io
import json
import os
import random
import re
import shutil
import signal
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from conftest import MODULES

from electra import cli
from electra.config import PretrainConfig, flat, to_dict
from electra.data.corpus import Corpus
from electra.errors import CorruptError, ElectraError
from electra.flops import matmul_flops_per_token
from electra.optim import learning_rate
from electra.pretrain import pretrain
from electra.recipes import masked_lm, recipe
from electra.runlog import read_metrics
from electra.studies import ablate
from electra.studies.plan import make_plan
from electra.studies.records import Spread, spread
from electra.studies.report import _verdict, report

ROOT = Path(__file__).parents[1]
VOCABULARY = 30_522

# ---------------------------------------------------------------------- the studies

WIDTHS = {"1/8": 0.125, "1/4": 0.25, "1/2": 0.5, "3/4": 0.75, "1": 1.0}
SHARES = {"1/8": 125_000, "1/4": 250_000, "1/2": 500_000, "1": 1_000_000}
EQUAL = {"generator.width": 1.0, "generator.sharing": "none"}
BERT = {
    "objective.kind": "mlm",
    "objective.mask_token_percent": 80.0,
    "objective.random_token_percent": 10.0,
}
# What makes each row of a study another one than `small`, as the paper says it.
DIFFERENCES: dict[str, dict[str, dict[str, Any]]] = {
    "efficiency": {
        "ELECTRA": {},
        "All-Tokens MLM": {
            "objective.kind": "all_tokens_mlm",
            "objective.disc_weight": pytest.approx(1 / 0.15),
        },
        "Replace MLM": {"objective.kind": "replace_mlm", "objective.disc_weight": 1.0},
        "ELECTRA 15%": {"objective.disc_positions": "masked"},
        "ELECTRA 15%, other tokens": {"objective.disc_positions": "other"},
        "ELECTRA 15%, random tokens": {"objective.disc_positions": "random"},
        "BERT": BERT,
        "BERT, 100% [MASK]": {"objective.kind": "mlm"},
    },
    "sharing": {
        "none": EQUAL,
        "token embeddings": {"generator.width": 1.0},
        "all weights": {"generator.width": 1.0, "generator.sharing": "all"},
        "gradient-disentangled": {"generator.width": 1.0, "generator.sharing": "disentangled"},
    },
    "generator-size": {
        **{f"width {w}": {"generator.width": v} if v != 0.25 else {} for w, v in WIDTHS.items()},
        "depth 1/4": {"generator.width": 1.0, "generator.depth": 0.25},
        "depth 1/2": {"generator.width": 1.0, "generator.depth": 0.5},
        "uniform": {"generator.kind": "uniform"},
        "unigram": {"generator.kind": "unigram"},
    },
    "algorithms": {
        "joint": {},
        "adversarial": {"objective.algorithm": "adversarial"},
        "joint, equal size": EQUAL,
        "adversarial, equal size": {**EQUAL, "objective.algorithm": "adversarial"},
        "two-stage": {
            **EQUAL,
            "objective.algorithm": "two_stage",
            "run.train_steps": 2_000_000,
        },
        "two-stage, no copy": {
            **EQUAL,
            "objective.algorithm": "two_stage",
            "objective.stage_two": "fresh",
            "run.train_steps": 2_000_000,
        },
    },
    "rtd-vs-mlm": {
        f"{name}, {share}": {
            **different,
            **({"run.train_steps": steps} if steps != 1_000_000 else {}),
        }
        for name, different in (("ELECTRA", {}), ("BERT", BERT))
        for share, steps in SHARES.items()
    },
}


@pytest.mark.parametrize("study", DIFFERENCES)
def test_the_rows_of_a_study_are_those_of_the_paper(study: str) -> None:
    base = ablate.starting_point("small")
    grid = ablate.make_grid(study, base, VOCABULARY, "steps")
    found = {label: ablate._differs(config, base) for label, config in grid.items()}
    assert found == DIFFERENCES[study]
    assert list(found) == list(DIFFERENCES[study])
    assert len({ablate.slug(label) for label in grid}) == len(grid)
    assert set(ablate.PAPER.get(study, {})) <= set(grid)


def test_every_study_is_looked_at() -> None:
    assert set(DIFFERENCES) == set(ablate.STUDIES) - {"two"}  # of the tests


@pytest.mark.parametrize("study", ablate.STUDIES)
@pytest.mark.parametrize("name", ["tiny", "small", "base"])
def test_every_row_can_be_built_and_equal_flops_are_equal(study: str, name: str) -> None:
    base = ablate.starting_point(name)
    wanted = matmul_flops_per_token(base, VOCABULARY) * base.tokens_per_step * base.run.train_steps
    for label, row in ablate.make_grid(study, base, VOCABULARY, "flops").items():
        plan = make_plan(row, VOCABULARY)  # builds the networks without memory
        assert plan.discriminator_parameters > 0
        share = {"1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2}.get(label.rpartition(", ")[2], 1)
        assert plan.total_flops == pytest.approx(share * wanted, rel=0.01), label
    for row in ablate.make_grid(study, base, VOCABULARY, "steps").values():
        stages = 2 if row.objective.algorithm == "two_stage" else 1
        assert row.run.train_steps <= stages * base.run.train_steps


def test_rows_that_do_more_cost_more() -> None:
    base = ablate.starting_point("small")
    cost = {
        label: matmul_flops_per_token(row, VOCABULARY)
        for study in ("efficiency", "generator-size", "algorithms")
        for label, row in ablate.make_grid(study, base, VOCABULARY, "steps").items()
    }
    vocabulary = 3 * 2 * 128 * (256 + VOCABULARY)  # for one token, forward and backward
    assert cost["All-Tokens MLM"] - cost["ELECTRA"] == pytest.approx(vocabulary)
    assert cost["ELECTRA"] == cost["ELECTRA 15%"] > cost["uniform"] == cost["unigram"]
    assert cost["All-Tokens MLM"] > cost["Replace MLM"] > cost["BERT"] == cost["BERT, 100% [MASK]"]
    assert cost["width 1/8"] < cost["width 1/4"] < cost["width 1"] == cost["joint, equal size"]
    # Half of the tokens train one network, half the other, the frozen generator costs a third.
    assert cost["two-stage"] < cost["joint, equal size"] < 2 * cost["two-stage"]


def test_widths_that_do_not_divide_are_left_out(micro: PretrainConfig) -> None:
    assert list(ablate.generator_size(micro)) == [  # 20 wide, 28 inside, 2 layers
        *("width 1/4", "width 1/2", "width 3/4", "width 1", "depth 1/2", "uniform", "unigram"),
    ]


def test_the_warm_up_keeps_its_share_of_fewer_steps(tmp_path: Path) -> None:
    assert ablate.starting_point("small", 500).optim.warmup_percent == 1.0
    file = tmp_path / "half.toml"
    file.write_text("name = 'tiny'\n[optim]\nwarmup_percent = 6\n[run]\ntrain_steps = 40\n")
    base = ablate.starting_point(str(file))
    assert (base.optim.warmup_percent, base.run.train_steps) == (6.0, 40)
    assert base.encoder == recipe("tiny").encoder
    rows = ablate.make_grid("rtd-vs-mlm", base, VOCABULARY, "steps").values()
    assert {row.optim.warmup_percent for row in rows} == {6.0}


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("bert-small", "", "starts from ELECTRA's settings; these are mlm, joint"),
        ("x.toml", "[objective]\nalgorithm = 'adversarial'", "these are rtd, adversarial"),
        ("x.toml", "[run]\nminutes = 3", "which minutes do not tell"),
        ("smal", "", "did you mean 'small'"),
        ("x.json", '{"name": ["tiny"]}', "['tiny'] is not str"),
    ],
)
def test_what_is_not_electra_is_no_start(
    tmp_path: Path, name: str, content: str, reason: str
) -> None:
    if content:
        (tmp_path / name).write_text(content)
        name = str(tmp_path / name)
    with pytest.raises(ElectraError) as caught:
        ablate.make_grid("efficiency", ablate.starting_point(name), VOCABULARY, "steps")
    assert reason in str(caught.value)


# ---------------------------------------------------------------------- a grid of one's own


def test_the_rows_of_a_file_change_what_they_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[base]\n['two, three']\noptim.beta2 = 0.98\nrun.minutes = 2\n")
    start = ablate.starting_point("tiny", 40)
    rows = ablate.make_grid(str(file), start, VOCABULARY, "steps")
    assert rows["base"] == start
    assert list(rows) == ["base", "two, three"]
    both = {"optim": {"beta2": 0.98}, "run": {"minutes": 2}}
    assert rows["two, three"] == ablate.change(start, **both)
    with pytest.raises(ElectraError, match="minutes"):
        ablate.make_grid(str(file), start, VOCABULARY, "flops")
    file.write_text("[a]\noptim.warmup_steps = 8\n")  # no file can take back the share of a base
    optim = ablate.make_grid(str(file), start, VOCABULARY, "steps")["a"].optim
    assert learning_rate(optim, 3, 3 / 40, 40) == optim.learning_rate / 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("x = 3", "'x' is no row"),
        ("['a b']\n['A-b']", "'A-b' is no row"),
        ("['??']", "'??' is no row"),
        ("[a]\noptim.beta3 = 1", "did you mean 'beta2'"),
        ("[a]\noptim.beta2 = 'x'", "'x' is not float"),
        ("[a", "not valid TOML"),
        ("", "no row"),
    ],
)
def test_a_file_that_is_no_grid_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(content)
    with pytest.raises(ElectraError) as caught:
        ablate.make_grid(str(file), ablate.starting_point("tiny"), VOCABULARY, "steps")
    assert reason in str(caught.value)
    assert "mine.toml" in caught.value.where


@pytest.mark.parametrize("equal", ["steps", "flops"])
@pytest.mark.parametrize(
    ("setting", "where"),
    [
        ("encoder.init = 'local'\nencoder.embedding_size = 2", "encoder.init"),
        ("generator.width = 0.3", "generator.width, generator.depth"),
        ("generator.sharing = 'none'\ngenerator.frozen = true", "generator.frozen"),
    ],
)
def test_a_row_that_cannot_start_is_refused_before_any_runs(
    tmp_path: Path, setting: str, where: str, equal: ablate.Equal
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f"[good]\n['bad one']\n{setting}")
    with pytest.raises(ElectraError) as caught:
        ablate.make_grid(str(file), ablate.starting_point("tiny"), VOCABULARY, equal)
    assert caught.value.where == f"{file}: bad one: {where}"


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("one_change", "base"),
        ("muon", "base"),
        ("wsd", "wsd_base"),
        ("linear", "linear_base"),
        ("other_text", "linear_base"),
        ("together", "together_base"),
    ],
)
def test_every_written_attempt_can_be_run(name: str, base: str) -> None:
    folder = ROOT / "benchmarks" / "attempts"
    file, start = folder / f"{name}.toml", ablate.starting_point(str(folder / f"{base}.toml"))
    rows = ablate.make_grid(str(file), start, VOCABULARY, "steps")
    assert start in rows.values()
    lines = file.read_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith("["):
            assert lines[number - 1].startswith("# "), f"{line} has no prediction"
    for label, row in rows.items():
        # Nothing that is exported is larger than the track allows.
        assert make_plan(row).discriminator_parameters <= 14e6, label


# ---------------------------------------------------------------------- running

STEPS = 150
TUNING = "epochs=1 learning-rate=5e-3 batch-size=8 length=24 device=cpu threads=1"


def two(electra: PretrainConfig) -> ablate.Grid:
    return {"ELECTRA": electra, "BERT": masked_lm(electra)}


@pytest.fixture(autouse=True)
def a_study_of_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ablate.STUDIES, "two", two)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RTE with a few pairs."""
    out, draw = tmp_path_factory.mktemp("GLUE"), random.Random(0)
    nouns = ["river", "stone", "bird", "house", "wind"]
    for split, n in (("train", 24), ("dev", 12)):
        texts = [" ".join(draw.choices(nouns, k=4)) for _ in range(2 * n)]
        (out / "RTE").mkdir(exist_ok=True)
        names = ("entailment", "not_entailment")
        lines = [f"{i}\t{texts[i]}\t{texts[n + i]}\t{names[i % 2]}\n" for i in range(n)]
        head = "index\tsentence1\tsentence2\tlabel\n"
        (out / "RTE" / f"{split}.tsv").write_text(head + "".join(lines))
    return out


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Complete settings of a run of two seconds."""
    values: dict[str, Any] = {
        "name": "micro",
        "encoder": {
            "layers": 1,
            "hidden_size": 20,
            "ffn_size": 28,
            "attention_heads": 2,
            "embedding_size": 14,
            "max_positions": 29,
        },
        "generator": {"width": 0.5},
        "optim": {"learning_rate": 3e-3, "warmup_percent": 10.0},
        "data": {"sequence_length": 23, "batch_size": 8},
        "run": {
            "train_steps": STEPS,
            "seed": 7,
            "device": "cpu",
            "threads": 1,
            "log_every": 1,
            "eval_every": 50,
            "eval_batches": 1,
            "save_every": 20,
        },
    }
    file = tmp_path_factory.mktemp("settings") / "micro.json"
    file.write_text(json.dumps(values))
    return file


def arguments(settings: Path, corpus: Corpus, folder: Path, out: Path, *more: str) -> list[str]:
    places = ["--corpus", corpus.path, "--data", folder, "--out", out, "--base", settings]
    few = ["--seeds", "1", "--tuning-seeds", "2", "--tasks", "rte", "--jobs", "2"]
    return ["ablate", "two", *map(str, places), *few, "--tuning", *TUNING.split(), *more]


class Done(NamedTuple):
    out: Path
    said: str
    obstacle: Path


@pytest.fixture(scope="module")
def done(
    settings: Path, corpus: Corpus, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Done:
    """A study whose second row cannot even begin."""
    out = tmp_path_factory.mktemp("study") / "out"
    obstacle = Path("bert") / "seed-7" / "pretrain" / "checkpoints"
    (out / obstacle).mkdir(parents=True)
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setitem(ablate.STUDIES, "two", two)
        patch.setenv("PYTHONPATH", str(ROOT))
        assert cli.run(arguments(settings, corpus, folder, out)) == 1
    return Done(out, said.getvalue(), obstacle)


def test_a_cell_that_fails_is_told_and_ends_no_other(done: Done) -> None:
    record = json.loads((done.out / "ablate.json").read_bytes())
    states = {cell["label"]: cell["state"] for cell in record["cells"]}
    assert states == {"ELECTRA": "finished", "BERT": "failed: exit code 2"}
    assert "failed: BERT, seed 7, exit code 2" in done.said
    assert str(done.out / "bert" / "seed-7" / "log.txt") in done.said
    assert "This directory has checkpoints but no run.json" in done.said
    assert done.said.count("finished: ELECTRA, seed 7") == 1


def test_the_record_tells_what_a_cell_did(done: Done, settings: Path, corpus: Corpus) -> None:
    record = json.loads((done.out / "ablate.json").read_bytes())
    base = ablate.starting_point(str(settings))
    assert record["base"] == json.loads(json.dumps(to_dict(base)))
    assert record["corpus_fingerprint"] == corpus.fingerprint
    assert len(record["environment"]["source"]) == 16
    cell, other = record["cells"]
    assert (cell["differs"], other["differs"]) == ({}, BERT)
    assert (cell["steps"], cell["tokens"]) == (STEPS, STEPS * 8 * 23)
    here = done.out / "electra" / "seed-7"
    assert json.loads((here / "settings.json").read_bytes()) == record["base"]
    assert cell["state"] == "finished"
    last = [m for m in read_metrics(here / "pretrain") if m["kind"] == "eval"][-1]
    assert cell["held_out"] == {key: last[key] for key in ablate.CURVES}
    assert [point["step"] for point in cell["curve"]] == [50, 100, 150]
    assert cell["environment"]["device"]
    results = json.loads((here / "glue" / "rte" / "results.json").read_bytes())
    assert results["settings"]["learning_rate"] == 5e-3
    scores = [seed["score"] for seed in results["seeds"]]
    assert cell["scores"]["rte"]["scores"] == scores
    assert cell["score"] == pytest.approx(sum(scores) / 2)  # the median of two


def test_a_cell_that_is_done_starts_no_process(
    done: Done,
    settings: Path,
    corpus: Corpus,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: list[str] = []

    def refuse(cell: ablate.Cell, *_: Any) -> None:
        started.append(cell.label)
        raise ElectraError("no process")

    monkeypatch.setattr(ablate, "_Running", refuse)
    out = shutil.copytree(done.out, tmp_path / "out")
    command = arguments(settings, corpus, folder, out)
    assert cli.run(command) == 2
    assert "2 cells, 1 of them done before" in capsys.readouterr().err
    assert started == ["BERT"]
    assert cli.run([*command, "--rows", "ELECTRA"]) == 0  # the other row is not asked for
    assert "| `ELECTRA` | 1 of 1 |" in (said := capsys.readouterr().out)
    assert "| `BERT` | 0 of 1 |" in said
    assert started == ["BERT"]
    monkeypatch.setitem(ablate.STUDIES, "two", lambda electra: {"ELECTRA": electra})
    assert cli.run(command) == 0
    assert "| `ELECTRA` | 1 of 1 |" in capsys.readouterr().out
    assert cli.run([*command, "--tuning-seeds", "3"]) == 2  # there is more to do now
    assert started == ["BERT", "ELECTRA"]


def test_more_seeds_are_run_alone_and_the_record_keeps_those_it_had(
    done: Done,
    settings: Path,
    corpus: Corpus,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: list[tuple[str, int]] = []

    class Ended:
        def __init__(self, cell: ablate.Cell, *_: Any) -> None:
            self.cell, self.process, self.told, self.rest = cell, self, False, []
            written = json.loads((cell.directory / "settings.json").read_bytes())
            assert cell.directory.name == f"seed-{written['run']['seed']}"
            started.append((cell.label, written["run"]["seed"]))
            (cell.directory / "log.txt").write_text("ended")

        def poll(self) -> int:
            return 1

    monkeypatch.setattr(ablate, "_Running", Ended)
    alone, out = tmp_path / "alone", shutil.copytree(done.out, tmp_path / "out")
    for place in (alone, out):
        command = arguments(settings, corpus, folder, place, "--first-seed", "9", "--seeds", "2")
        assert cli.run(command) == 1
        assert "two: 4 cells, 0 of them done before" in capsys.readouterr().err
        assert started == [("ELECTRA", 9), ("BERT", 9), ("ELECTRA", 10), ("BERT", 10)]
        started.clear()

    def seeds(place: Path) -> dict[int, str]:
        record = json.loads((place / "ablate.json").read_bytes())
        assert record["base"]["run"]["seed"] == 7  # of every record of these settings
        found = {c["seed"]: c["state"] for c in record["cells"] if c["label"] == "ELECTRA"}
        assert record["seeds"] == len(found)
        return found

    failed = "failed: exit code 1"
    assert seeds(alone) == {9: failed, 10: failed}
    assert seeds(out) == {7: "finished", 9: failed, 10: failed}
    assert cli.run(arguments(settings, corpus, folder, out, "--rows", "ELECTRA")) == 0
    assert seeds(out) == {7: "finished"}  # of the others nothing is there
    assert not started


def test_a_finished_cell_whose_run_json_is_gone_is_named(
    done: Done,
    settings: Path,
    corpus: Corpus,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shutil.copytree(done.out, tmp_path / "out")
    record = out / "electra" / "seed-7" / "pretrain" / "run.json"
    record.unlink()
    assert cli.run(arguments(settings, corpus, folder, out)) == 3
    assert str(record) in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--steps", "20"], "another study: base.run.train_steps: 150 → 20"),
        (["--equal", "flops"], "another study: equal: steps → flops"),
        (["--tasks", "rte", "qnli"], "Not in this folder: qnli"),
        (["--jobs", "0"], "There are 0 jobs"),
        (["--rows", "ELECTRO"], "no row 'ELECTRO'"),
        (["--first-seed", "-1"], "seed is -1"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(
    done: Done,
    settings: Path,
    corpus: Corpus,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    more: Sequence[str],
    reason: str,
) -> None:
    assert cli.run([*arguments(settings, corpus, folder, done.out), *more]) == 2
    assert reason in capsys.readouterr().err


def test_rows_are_added_to_a_grid_but_not_changed_in_it(
    settings: Path,
    corpus: Corpus,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run that minutes end has the steps that it made."""
    grid, out = tmp_path / "mine.toml", tmp_path / "out"
    moment = "['a moment']\nrun.minutes = 0.001\n"
    grid.write_text(moment)
    command = arguments(settings, corpus, folder, out)
    command[1] = str(grid)
    assert cli.run(command) == 0
    (cell,) = json.loads((out / "ablate.json").read_bytes())["cells"]
    assert (cell["label"], cell["differs"]) == ("a moment", {"run.minutes": 0.001})
    assert 0 < cell["steps"] < STEPS
    assert cell["tokens"] == cell["steps"] * 8 * 23
    plan = make_plan(ablate.starting_point(str(settings)), corpus.vocab_size)
    assert cell["flops"] == pytest.approx(cell["steps"] / STEPS * plan.total_flops)
    last = [m for m in read_metrics(out / "a-moment" / "seed-7" / "pretrain") if "loss" in m][-1]
    assert cell["train"] == {key: last[key] for key in ("loss", "mlm_loss", "disc_loss")}

    def refuse(cell: ablate.Cell, *_: Any) -> None:
        raise ElectraError(f"no process for {cell.label}")

    monkeypatch.setattr(ablate, "_Running", refuse)
    grid.write_text(f"[six]\nrun.train_steps = 6\n{moment}")
    assert cli.run(command) == 2
    said = capsys.readouterr().err
    assert "mine: 2 cells, 1 of them done before" in said
    assert "no process for six" in said
    grid.write_text(f"{moment}optim.beta2 = 0.9\n")
    assert cli.run(command) == 2
    assert "'a moment' had other settings: optim.beta2: 0.999 → 0.9" in capsys.readouterr().err


def test_a_wrong_setting_of_glue_is_refused_before_anything_runs(
    settings: Path, corpus: Corpus, folder: Path, tmp_path: Path
) -> None:
    command = arguments(settings, corpus, folder, tmp_path / "out", "--tuning", "epoch=1")
    with pytest.raises(SystemExit) as ended:
        cli.run(command)
    assert ended.value.code == 2
    assert not (tmp_path / "out").exists()


def test_a_dry_run_prints_the_grid_and_leaves_nothing(
    settings: Path,
    corpus: Corpus,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert cli.run(arguments(settings, corpus, folder, out, "--dry-run", "--steps", "40")) == 0
    electra, bert = (line for line in capsys.readouterr().out.splitlines() if line[0] != " ")
    base = ablate.starting_point(str(settings), 40)
    for line, row in ((electra, base), (bert, masked_lm(base))):
        plan = make_plan(row, corpus.vocab_size)
        assert f"{plan.discriminator_parameters:,}" in line
        assert f"{plan.total_flops:.3g} FLOPs" in line
        assert line.endswith(" 40 steps")
    assert not out.exists()


def test_a_stopped_and_killed_cell_goes_on_to_the_same_weights(
    done: Done,
    settings: Path,
    corpus: Corpus,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shutil.copytree(done.out, tmp_path / "out")
    here = out / "bert" / "seed-7"
    (out / done.obstacle).rmdir()
    command = arguments(settings, corpus, folder, out)

    def until(lines: int, action: Callable[[psutil.Process], object]) -> int:
        """The study's exit code; something happens to its cell after some lines of metrics."""
        metrics, over, happened = here / "pretrain" / "metrics.jsonl", threading.Event(), []

        def wait() -> None:
            while not metrics.exists() or metrics.read_bytes().count(b"\n") < lines:
                if over.wait(0.002):
                    return
            for child in psutil.Process().children():
                if str(here) in " ".join(child.cmdline()):
                    action(child)
                    happened.append(child)

        thread = threading.Thread(target=wait)
        thread.start()
        code = cli.run(command)
        over.set()
        thread.join()
        (child,) = happened
        assert not child.is_running()
        return code

    assert until(10, lambda _: os.kill(os.getpid(), signal.SIGTERM)) == 75
    assert "stopped and saved; the same command continues" in capsys.readouterr().err
    assert "stopped and saved" in (here / "log.txt").read_text()
    assert until(60, lambda child: child.kill()) == 1
    assert json.loads((out / "ablate.json").read_bytes())["cells"][1]["state"] == (
        "failed: exit code -9"
    )
    assert not (here / "glue").exists()

    assert cli.run(command) == 0
    assert json.loads((out / "ablate.json").read_bytes())["cells"][1]["state"] == "finished"
    base = ablate.starting_point(str(settings))
    pretrain(masked_lm(base), corpus, tmp_path / "whole", quiet=True)
    last = Path("checkpoints") / f"step-{STEPS:08d}" / "model.safetensors"
    weights = [(run / last).read_bytes() for run in (here / "pretrain", tmp_path / "whole")]
    assert weights[0] == weights[1]


def test_two_studies_do_not_share_a_directory_at_the_same_time(
    done: Done, settings: Path, corpus: Corpus, folder: Path
) -> None:
    with ablate.exclusive(done.out):
        assert cli.run(arguments(settings, corpus, folder, done.out)) == 2


def test_cells_take_turns_on_the_gpus_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro: PretrainConfig
) -> None:
    """Five cells at once on two GPUs; nothing but the environment is looked at."""
    seen: list[str] = []

    class Ended:
        def __init__(self, *_: Any, env: dict[str, str], **__: Any) -> None:
            seen.append(env["CUDA_VISIBLE_DEVICES"])

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(ablate.subprocess, "Popen", Ended)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    cells = [ablate.Cell(f"row {i}", micro, tmp_path) for i in range(5)]
    ended: list[str] = []
    ablate._run_cells(
        cells, lambda _: [["a"]], 5, lambda: False, lambda cell, _: ended.append(cell.label)
    )
    assert seen == ["2", "5", "2", "5", "2"]
    assert ended == [cell.label for cell in cells]


def test_a_cell_that_takes_its_time_to_stop_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro: PretrainConfig
) -> None:
    """A second request would end it without saving; the next cell is not started any more."""
    started, asked = list[str](), list[str]()

    class Slow:
        def __init__(self, command: list[str], **_: Any) -> None:
            self.name, self.left = command[-1], 4
            started.append(self.name)

        def poll(self) -> int | None:
            self.left -= self.name in asked
            return None if self.left else 75

        def terminate(self) -> None:
            asked.append(self.name)

    monkeypatch.setattr(ablate.subprocess, "Popen", Slow)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cells = [ablate.Cell(f"row {i}", micro, tmp_path) for i in range(3)]
    ended: list[tuple[str, int]] = []
    ablate._run_cells(
        cells,
        lambda cell: [[cell.label], ["never"]],
        2,
        lambda: len(started) == 2,
        lambda cell, code: ended.append((cell.label, code)),
    )
    assert started == asked == ["row 0", "row 1"]
    assert ended == [("row 0", 0), ("row 1", 0)]  # no failure


# ---------------------------------------------------------------------- the report


def a_cell(label: str, seed: int, scores: dict[str, list[float]], **changed: Any) -> dict[str, Any]:
    medians = {task: sorted(values)[1] for task, values in scores.items()}
    return {
        "label": label,
        "seed": seed,
        "state": "finished",
        "differs": {} if label == "ELECTRA" else {"objective.kind": "mlm"},
        "steps": 1000,
        "tokens": 128_000,
        "flops": 2.5e15,
        "parameters": 14_000_000,
        "generator_parameters": 4_000_000,
        "scores": {
            task: {
                "metric": "accuracy",
                "scores": values,
                "median": medians[task],
                "mean": sum(values) / 3,
                "best": max(values),
                "std": 0.01,
                "failed": 0,
                "seeds": 3,
            }
            for task, values in scores.items()
        },
        "score": sum(medians.values()) / max(1, len(medians)),
        "held_out": {"mlm_loss": 4.0, "mlm_accuracy": 0.25 + seed / 100, "disc_auc": 0.8},
        "curve": [
            {"step": step, "mlm_loss": 5.0, "mlm_accuracy": 0.2, "disc_auc": None}
            for step in (500, 1000)
        ],
        "seconds": 10.0,
        **changed,
    }


def a_study(
    directory: Path,
    cells: list[dict[str, Any]],
    name: str = "efficiency",
    steps: int = 1000,
    **changed: Any,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    record = {
        "format": 1,
        "study": name,
        "base": to_dict(ablate.starting_point("small", steps)),
        "equal": "steps",
        "corpus_fingerprint": "c0",
        "tuning": ["--max-train=10000"],
        "tuning_seeds": 3,
        "tasks": ["cola", "rte"],
        "environment": {"source": "5a"},
        "cells": cells,
        **changed,
    }
    (directory / "ablate.json").write_text(json.dumps(record))
    return directory


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Task means 0.60, 0.62, 0.67 and 0.59, 0.61, 0.64; of a third row nothing yet."""
    cells: list[dict[str, Any]] = []
    for seed, (ours, theirs) in enumerate([(0.5, 0.48), (0.54, 0.52), (0.64, 0.58)]):
        for label, value in (("ELECTRA", ours), ("BERT", theirs)):
            scores = {"cola": [0.1, value, 0.9], "rte": [0.7, 0.0, 0.8]}
            cells.append(a_cell(label, seed, scores))
    cells.append(a_cell("Replace MLM", 0, {}, state="failed: exit code 4"))
    return a_study(tmp_path / "study", cells)


def test_the_report_has_the_numbers_computed_by_hand(study: Path) -> None:
    lines = report([study]).splitlines()
    rows = {line.split(" | ")[0]: [c.strip(" |") for c in line.split(" | ")] for line in lines}
    # Half of the interval: 4.302653 (t, 2 degrees of freedom) × 0.0361 / √3.
    electra = rows["| `ELECTRA`"]
    assert electra[1:5] == ["3 of 3", "63.0 ± 3.6 (54.0 to 72.0)", "–", "85.0"]
    assert electra[5:7] == ["56.0", "70.0"]  # medians by task, mean over pre-training seeds
    assert electra[7:] == ["2.5e+15", "1,000", "26.0", "0.800"]
    bert = rows["| `BERT`"]
    # 0.59, 0.61, 0.64; seed by seed 0.01, 0.01 and 0.03 below.
    assert bert[1:5] == [
        "3 of 3",
        "61.3 ± 2.5 (55.1 to 67.6)",
        "-1.7 ± 1.2 (-4.5 to 1.2)",
        "82.2",
    ]
    assert rows["| `Replace MLM`"][1:7] == ["0 of 1", "–", "–", "82.4", "–", "–"]
    assert "- `Replace MLM`, seed 0: `failed: exit code 4`" in lines
    assert " | minus `ELECTRA` | " in lines[2]


def test_the_report_says_of_the_papers_order_what_the_seeds_show(
    study: Path, tmp_path: Path
) -> None:
    # 0.01, 0.01 and 0.03 apart, as computed above; a row without scores is not in it.
    lines = [line for line in report([study]).splitlines() if " above " in line]
    # Half of the interval at this spread is 2.87 with 3 seeds, 3.182446 × 1.1547 / 2 = 1.84 with 4.
    assert lines == [
        "| `ELECTRA` above `BERT` | 2.8 | 1.7 ± 1.2 (-1.2 to 4.5) | not shown (4 seeds) |"
    ]
    values = {"none": (0.30, 0.32), "token embeddings": (0.40, 0.42), "all weights": (0.1, 0.12)}
    cells = [
        a_cell(label, seed, {"cola": [0, value, 1], "rte": [0, 0.5, 1]})
        for label, both in values.items()
        for seed, value in enumerate(both)
    ]
    shown = report([a_study(tmp_path / "clear", cells, "sharing")])
    assert "| `token embeddings` above `none` | 0.7 | 5.0 ± 0.0 (5.0 to 5.0) | held |" in shown
    assert (
        "| `all weights` above `none` | 0.8 | -10.0 ± 0.0 (-10.0 to -10.0) | the reverse |" in shown
    )
    alone = report([a_study(tmp_path / "alone", cells[::2], "sharing")])
    assert "| `token embeddings` above `none` | 0.7 | 5.0 | too few seeds to say |" in alone


def at_scale(directory: Path, steps: int, above_bert: Mapping[str, Sequence[float]]) -> Path:
    """A study whose rows are so many points above BERT's 50.0, seed by seed."""
    cells = [
        a_cell(label, seed, {"cola": [0, 0.5 + points / 50, 1], "rte": [0, 0.5, 1]}, **more)
        for label, all_points in {**above_bert, "BERT": [0, 0, 0, 0]}.items()
        for seed, points in enumerate(all_points)
        for more in [{"steps": steps, "flops": steps * 2e12}]
    ]
    cells.append(a_cell("ELECTRA 15%", 0, {}, state="not finished"))
    return a_study(directory, cells, steps=steps)


def test_the_papers_order_is_told_scale_by_scale(tmp_path: Path) -> None:
    """Half of an interval: 4 seeds 3.182446 × s / 2, 2 seeds 6.3531 × the difference of the two."""
    studies = [
        at_scale(
            tmp_path / "long",
            4000,
            {"ELECTRA": [3, 4, 4, 5], "All-Tokens MLM": [2], "Replace MLM": [0, 2, 2, 4]},
        ),
        at_scale(
            tmp_path / "short",
            1000,
            {"ELECTRA": [3, 3.2], "All-Tokens MLM": [2, 2.2], "Replace MLM": [-2, -2.2]},
        ),
        at_scale(tmp_path / "middle", 2000, {"ELECTRA": [0, 2], "Replace MLM": [1.9, 2.1]}),
        a_study(tmp_path / "nothing", [], steps=500),
    ]
    text = report(studies, tmp_path / "out")
    head, _, *rows = text.partition("the paper's order by scale\n\n")[2].splitlines()
    assert text.count("by scale") == 1
    short, middle, long = (
        f"{n},000 steps ({2 * n}e+15 FLOPs) in `{name}`"
        for n, name in ((1, "short"), (2, "middle"), (4, "long"))
    )
    assert (
        head
        == f"| the paper's order | by | {short} | {middle} | {long} | per doubling | held from |"
    )
    found = {line.split(" | ")[0]: line.split(" | ")[1:] for line in rows if "` above `" in line}
    assert found["| `ELECTRA` above `BERT`"] == [
        "2.8",
        "3.1 ± 0.1 (1.8 to 4.4): held",
        "1.0 ± 1.4 (-11.7 to 13.7): not shown (4 seeds)",  # 3: 3.51; 4: 2.25
        "4.0 ± 0.8 (2.7 to 5.3): held",
        "+0.7 (-0.9 to +2.2)",
        "4,000 steps (8e+15 FLOPs) |",  # and not from 1,000 on
    ]
    assert found["| `All-Tokens MLM` above `BERT`"] == [
        "2.1",
        "2.1 ± 0.1 (0.8 to 3.4): held",
        "not run",
        "2.0: too few seeds to say",
        "-0.1 (-1.2 to +1.1)",
        "1,000 steps (2e+15 FLOPs) |",  # the other two say nothing
    ]
    assert found["| `Replace MLM` above `BERT`"] == [
        "0.2",
        "-2.1 ± 0.1 (-3.4 to -0.8): the reverse",
        "2.0 ± 0.1 (0.7 to 3.3): held",
        "2.0 ± 1.6 (-0.6 to 4.6): not shown (259 seeds)",  # 1.96920 × 1.6330 / √259 = 0.19981
        "+1.9 (+0.3 to +3.5)",
        "not yet |",
    ]
    assert set(found) == {
        "| `ELECTRA` above `All-Tokens MLM`",
        "| `ELECTRA` above `Replace MLM`",
        "| `ELECTRA` above `BERT`",
        "| `All-Tokens MLM` above `Replace MLM`",
        "| `All-Tokens MLM` above `BERT`",
        "| `Replace MLM` above `BERT`",
    }
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<td>4,000 steps (8e+15 FLOPs)</td>" in page
    assert "by scale" not in report(studies[:1])


def rescaled(directory: Path, steps: int, shift: Mapping[str, float], missing: str) -> Path:
    """The stored record of table 5 as of another number of steps, some rows moved by points."""
    record = json.loads((ROOT / "results" / "ablate" / "efficiency" / "ablate.json").read_bytes())
    record["base"]["run"]["train_steps"] = steps
    for cell in record["cells"]:
        cell["flops"] *= steps / 4000
        cell["steps"] = steps
        if cell["label"] == missing:
            for key in ("scores", "score", "curve", "held_out"):
                cell.pop(key, None)
            cell["state"] = "not finished"
        elif cell["state"] == "finished":
            cell["score"] += shift.get(cell["label"], 0.0) / 100
    directory.mkdir()
    (directory / "ablate.json").write_text(json.dumps(record))
    return directory


def test_a_scale_may_lack_rows_and_shows_whether_a_gap_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of the real format: at 16,000 steps one row was never started, one is not there."""
    stats = pytest.importorskip("scipy.stats")
    stored = ROOT / "results" / "ablate" / "efficiency"
    small = rescaled(tmp_path / "few", 1000, {"Replace MLM": -3, "ELECTRA": -9}, "")
    large = rescaled(tmp_path / "many", 16_000, {"ELECTRA 15%": 8.9}, "All-Tokens MLM")
    record = json.loads((large / "ablate.json").read_bytes())
    record["cells"] = [cell for cell in record["cells"] if cell["label"] != "Replace MLM"]
    record["environment"]["source"] = "another"
    (large / "ablate.json").write_text(json.dumps(record))
    text = report([large, stored, small])
    shown = text.partition("the paper's order by scale\n\n")[2]
    head, _, *lines = shown.splitlines()
    columns = head.strip("| ").split(" | ")[2:]
    assert columns == [
        "1,000 steps (4.31e+14 FLOPs) in `few`",
        "4,000 steps (1.73e+15 FLOPs) in `efficiency`",
        "16,000 steps (6.9e+15 FLOPs) in `many`",
        "per doubling",
        "held from",
    ]
    rows = {
        cells[0].replace("`", ""): cells[2:]
        for line in lines
        if len(cells := line.strip("| ").split(" | ")) == 7 and " above " in line
    }
    assert len(rows) == 9
    # Of All-Tokens MLM the largest scale has nothing, and so takes nothing away.
    assert rows["ELECTRA above All-Tokens MLM"][2] == "not run"
    assert rows["ELECTRA above All-Tokens MLM"][4] == columns[1].partition(" in ")[0]
    assert rows["All-Tokens MLM above BERT"][2] == "not run"
    assert rows["All-Tokens MLM above BERT"][4] == columns[0].partition(" in ")[0]
    assert rows["Replace MLM above BERT"][2] == "not run"
    assert rows["Replace MLM above BERT"][4] == "not yet"
    assert rows["Replace MLM above BERT"][0].startswith("-7.1 ± 3.6 (-16.0 to 1.8): not shown")
    assert rows["Replace MLM above BERT"][1].startswith("-4.1 ± 3.6 (-13.0 to 4.8): not shown")
    gap = rows["ELECTRA 15% above BERT"]
    assert gap[1].startswith("-3.6 ± 2.2 (-9.1 to 1.9): not shown")
    assert gap[2].startswith("5.3 ± 2.2 (-0.2 to 10.8): not shown")
    # Its 8.9 points in the last of two times four, by another program's regression.
    cells = json.loads((stored / "ablate.json").read_bytes())["cells"]
    ours, theirs = (
        [cell["score"] for cell in cells if cell["label"] == label and "score" in cell]
        for label in ("ELECTRA 15%", "BERT")
    )
    apart = [100 * (a - b) for a, b in zip(ours, theirs, strict=True)]
    x = [step for step in (0, 2, 4) for _ in apart]
    line = stats.linregress(x, [*apart, *apart, *(more + 8.9 for more in apart)])
    half = stats.t.ppf(0.975, 7) * line.stderr
    low, high = line.slope - half, line.slope + half
    assert gap[3] == f"{line.slope:+.1f} ({low:+.1f} to {high:+.1f})"
    assert low > 0  # the gap closes, though at no scale it is shown to be closed
    assert "Program or machine are not the same" in shown
    assert "`many` by `program another" in shown
    assert "Besides the steps" not in shown

    axes = seen_in(monkeypatch, [large, stored, small], tmp_path / "out")
    assert len(axes) == 5
    scores, gaps = axes[3:]
    found = {c.get_label(): c.lines[0].get_xydata() for c in scores.containers}
    assert {key: len(points) for key, points in found.items()} == {
        "ELECTRA": 3,
        "All-Tokens MLM": 2,
        "Replace MLM": 2,
        "ELECTRA 15%": 3,
        "BERT": 3,
    }
    flops = next(cell["flops"] for cell in cells if cell["label"] == "BERT")
    assert found["BERT"][:, 0].tolist() == pytest.approx([flops / 4, flops, flops * 4])
    assert found["BERT"][:, 1].tolist() == pytest.approx([100 * sum(theirs) / 3] * 3)
    bars = {c.get_label(): c.lines[2][0].get_segments() for c in scores.containers}
    assert bars["BERT"][0][1][1] - bars["BERT"][0][0][1] == pytest.approx(
        200 * statistics.stdev(theirs)
    )
    named = {c.get_label() for c in gaps.containers}
    assert {"Replace MLM above BERT", "ELECTRA 15% above BERT"} <= named
    assert "ELECTRA above BERT" in named  # moved away at the smallest scale
    assert "All-Tokens MLM above BERT" not in named  # held wherever it was run


def test_a_scale_without_electra_is_measured_by_a_row_that_all_have(tmp_path: Path) -> None:
    few = at_scale(tmp_path / "few", 1000, {"ELECTRA": [3, 4], "Replace MLM": [1, 2]})
    many = at_scale(tmp_path / "many", 2000, {"Replace MLM": [1, 2]})
    record = json.loads((few / "ablate.json").read_bytes())
    for cell in record["cells"]:  # costs more than the rows of the larger scale do
        cell["flops"] *= 3 if cell["label"] == "ELECTRA" else 1
    (few / "ablate.json").write_text(json.dumps(record))
    text = report([many, few])
    head = text.partition("by scale\n\n")[2].splitlines()[0]
    assert head.index("1,000 steps (2e+15 FLOPs)") < head.index("2,000 steps (4e+15 FLOPs)")
    assert "Besides the steps" not in text
    (few / "ablate.json").write_text(
        (few / "ablate.json").read_text().replace('"c0"', '"another text"')
    )
    text = report([many, few])
    assert "in this order: `corpus_fingerprint` is `another text`, `c0`." in text


# ---------------------------------------------------------------------- records of other seeds


def with_seeds(directory: Path, seeds: Sequence[int], **changed: Any) -> Path:
    """Joint training at 50 + the seed, adversarial at a point less."""
    cells = [
        a_cell(
            label,
            seed,
            {"cola": [0, value, 1], "rte": [0, value, 1]},
            differs={} if label == "joint" else {"objective.algorithm": label},
        )
        for seed in seeds
        for label, value in (("joint", 0.5 + seed / 100), ("adversarial", 0.49 + seed / 100))
    ]
    return a_study(directory, cells, "algorithms", **changed)


def test_records_of_other_seeds_are_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = with_seeds(tmp_path / "first", [0])
    second = with_seeds(tmp_path / "second", [1], environment={"source": "5b"})
    text = report([second, first], tmp_path / "out")
    assert text.count("## Study") == 1
    assert "## Study `algorithms` in `second + first`" in text
    # 0.50 and 0.51: half of the interval is 12.7062 × 0.00707 / √2.
    assert "| `joint` | 2 of 2 | 50.5 ± 0.7 (44.1 to 56.9) | – |" in text
    assert "| `adversarial` | 2 of 2 | 49.5 ± 0.7 (43.1 to 55.9) | -1.0 ± 0.0 (" in text
    assert "`second` by `program 5b`, `first` by `program 5a`" in text
    assert "Program and machine are not the same." in text
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "report.csv").read_text())))
    assert {(row["run"], row["seed"]) for row in rows} == {("first", "0"), ("second", "1")}
    axes = seen_in(monkeypatch, [first, second], tmp_path / "out")
    assert len(axes) == 3
    assert len(axes[1].lines) == 4  # two settings, two seeds

    # What one began and the other has is there once; three are joined as two are.
    begun = with_seeds(tmp_path / "begun", [1, 2])
    record = json.loads((begun / "ablate.json").read_bytes())
    for cell in record["cells"]:
        if cell["seed"] == 1:
            cell["state"] = "not finished"
    (begun / "ablate.json").write_text(json.dumps(record))
    for order in ([begun, first, second], [second, first, begun]):
        text = report(order)
        assert text.count("## Study") == 1
        assert "| `joint` | 3 of 3 | 51.0 ± 1.0 (" in text
        assert "not finished" not in text
        assert text.count("joined:") == 1
    text = report([first, with_seeds(tmp_path / "third", [3])])
    assert "Program and machine are the same." in text


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"corpus_fingerprint": "c1"}, "`corpus_fingerprint` is `c0`, `c1`"),
        ({"tuning": []}, "`tuning` is"),
        ({"tuning_seeds": 2}, "`tuning_seeds` is `3`, `2`"),
        ({"equal": "flops"}, "`equal` is `steps`, `flops`"),
        ({"tasks": ["rte"]}, "`tasks` is"),
        ({"base": {"optim": {"beta2": 0.98}}}, "`optim.beta2` is `0.999`, `0.98`"),
        ({"seeds_of": [1, 0]}, "both have `adversarial`, seed 0 and 1 more"),
        ({"differs": {"objective.disc_weight": 3}}, "`adversarial` has other settings"),
    ],
    ids=["text", "flags", "tuning seeds", "equal", "tasks", "base", "same seed", "a row"],
)
def test_records_that_differ_in_more_than_seeds_stay_apart(
    tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    first = with_seeds(tmp_path / "first", [0])
    second = with_seeds(tmp_path / "second", changed.get("seeds_of", [1]))
    record = json.loads((second / "ablate.json").read_bytes())
    for group, values in changed.pop("base", {}).items():
        record["base"][group] |= values
    for cell in record["cells"] if "differs" in changed else ():
        cell["differs"] |= changed["differs"] if cell["label"] == "adversarial" else {}
    (second / "ablate.json").write_text(json.dumps(record | changed))
    text = report([first, second])
    assert text.count("## Study") == 2
    assert "Not joined with `first`: " in text
    assert reason in text
    assert "joined:" not in text
    assert "| 2 of 2 |" not in text or "seeds_of" in changed


def test_a_younger_setting_with_its_default_parts_no_records(tmp_path: Path) -> None:
    first, second = (with_seeds(tmp_path / str(seed), [seed]) for seed in (0, 1))
    record = json.loads((first / "ablate.json").read_bytes())
    del record["base"]["optim"]["skip_spikes"]
    record["base"]["run"]["seed"] = 5  # said cell by cell
    (first / "ablate.json").write_text(json.dumps(record))
    assert report([first, second]).count("## Study") == 1
    steps = with_seeds(tmp_path / "steps", [2], steps=2000)
    text = report([first, steps])  # another scale, of which nothing need be said
    assert text.count("## Study") == 2
    assert "Not joined" not in text


def test_other_tasks_are_no_other_scale(tmp_path: Path) -> None:
    rows = {"ELECTRA": [3, 4]}
    one, two = (at_scale(tmp_path / name, 10, rows) for name in ("one", "two"))
    assert "by scale" in report([one, two])
    record = json.loads((two / "ablate.json").read_bytes())
    (two / "ablate.json").write_text(json.dumps(record | {"tasks": ["rte"]}))
    assert "by scale" not in report([one, two])


@pytest.mark.parametrize("theirs", [0.1, 0.7, 2.8, 9.0])
def test_the_seeds_that_are_named_are_the_fewest_that_show_the_papers_difference(
    theirs: float,
) -> None:
    stats = pytest.importorskip("scipy.stats")

    def half(n: int, std: float) -> float:
        return stats.t.ppf(0.975, n - 1) * std / n**0.5

    for std in (0.0, 0.04, 0.3, 1.1, 2.9, 8.5):
        said = _verdict(Spread(0.0, std / 100, 1.0), theirs)
        n = int(said.removeprefix("not shown (").removesuffix(" seeds)").replace(",", ""))
        assert half(n, std) <= theirs
        assert n == 2 or half(n - 1, std) > theirs
    for std in (10.0, 1e300, float("nan")):  # no such record stops the report
        assert _verdict(Spread(0.0, std, float("inf")), theirs) == "not shown"


def test_without_a_row_of_electra_the_first_one_is_compared_with(tmp_path: Path) -> None:
    cells = [
        a_cell(label, 0, {"cola": [0, value, 1], "rte": [0, 0.5, 1]})
        for label, value in (("none", 0.4), ("all weights", 0.5))
    ]
    shown = report([a_study(tmp_path / "study", cells, "sharing")])
    assert " | minus `none` | " in shown
    assert "| `none` | 1 of 1 | 45.0 | – | 83.6 |" in shown
    assert "| `all weights` | 1 of 1 | 50.0 | 5.0 | 84.4 |" in shown
    assert "| setting |" in report([a_study(tmp_path / "empty", [])])


def test_a_grid_of_ones_own_is_shown_from_the_best_row_down(tmp_path: Path) -> None:
    cells = [
        a_cell(label, 0, {"cola": [0, value, 1], "rte": [0, 0.5, 1]} if value else {}, **more)
        for label, value, more in (
            ("base", 0.4, {"differs": {}}),
            ("failed", None, {"state": "failed: exit code 4"}),
            ("worse", 0.3, {}),
            ("better", 0.5, {}),
        )
    ]
    shown = report([a_study(tmp_path / "study", cells, "mine")])
    rows = [line.split("`")[1] for line in shown.splitlines() if line.startswith("| `")]
    assert rows == ["better", "base", "worse", "failed"]
    assert " | minus `base` | " in shown
    assert "The paper's numbers" not in shown


def test_the_confidence_interval_is_that_of_students_t() -> None:
    stats = pytest.importorskip("scipy.stats")
    draw = random.Random(0)
    for n in (2, 3, 4, 5, 10, 30):
        values = [draw.gauss(0.6, 0.1) for _ in range(n)]
        found = spread(values)
        assert found is not None
        assert found.std is not None
        assert found.half is not None
        low, high = stats.t.interval(0.95, n - 1, found.mean, found.std / n**0.5)
        assert found.mean - found.half == pytest.approx(low, rel=1e-4, abs=1e-5)
        assert found.mean + found.half == pytest.approx(high, rel=1e-4, abs=1e-5)
    assert spread([]) is None
    assert str(spread([0.5])) == "50.0"


def test_the_studies_of_a_folder_are_shown(study: Path, tmp_path: Path) -> None:
    """Where a cell keeps its run is the study's own business."""
    alone = report([study])
    (study / "cell").mkdir()
    (study / "cell" / "run.json").write_text("no record")
    found = report([tmp_path])
    assert found == alone.replace("`study`", f"`{tmp_path.name}/study`")


def test_the_csv_has_a_line_per_cell_and_task(study: Path, tmp_path: Path) -> None:
    report([study], tmp_path / "out")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "report.csv").read_text())))
    assert len(rows) == 6 * 2 + 1
    assert {row["kind"] for row in rows} == {"ablate"}
    one = rows[0]
    assert (one["label"], one["seed"], one["task"]) == ("ELECTRA", "0", "cola")
    assert (float(one["median"]), float(one["score"])) == (0.5, 0.6)
    assert float(one["flops"]) == 2.5e15
    assert float(one["mlm_accuracy"]) == 0.25
    assert (rows[-1]["label"], rows[-1]["state"]) == ("Replace MLM", "failed: exit code 4")


def seen_in(monkeypatch: pytest.MonkeyPatch, study: Path | Sequence[Path], out: Path) -> list[Any]:
    """The axes of the picture that is saved."""
    from matplotlib.figure import Figure

    save, axes = Figure.savefig, list[Any]()

    def look(figure: Figure, *args: Any, **kwargs: Any) -> None:
        axes.extend(figure.axes if kwargs["format"] == "png" else [])
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", look)
    report([study] if isinstance(study, Path) else study, out)
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    return axes


def test_score_over_flops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [
        a_cell(
            f"{name}, {share}",
            seed,
            {"cola": [0, 0.5 + part / 4 + seed / 100, 1], "rte": [0, 0.5, 1]},
            flops=part * cost,
        )
        for seed in (0, 1)
        for name, cost in (("ELECTRA", 4e15), ("BERT", 3e15))
        for share, part in (("1/2", 0.5), ("1", 1.0))
    ]
    path = a_study(tmp_path / "study", cells, "rtd-vs-mlm")
    (axis,) = seen_in(monkeypatch, path, tmp_path / "out")
    lines = {c.get_label(): c.lines[0].get_xydata().tolist() for c in axis.containers}
    assert lines["ELECTRA"] == [[2e15, pytest.approx(56.5)], [4e15, pytest.approx(62.75)]]
    assert [x for x, _ in lines["BERT"]] == [1.5e15, 3e15]
    # Seeds 0.5 points apart; half of the interval: 12.7062 (t, 1 degree of freedom) × 0.25.
    bars = {c.get_label(): c.lines[2][0].get_segments() for c in axis.containers}
    assert [end for _, end in bars["ELECTRA"][1].tolist()] == [
        pytest.approx(62.75 - 3.1766, abs=1e-3),
        pytest.approx(62.75 + 3.1766, abs=1e-3),
    ]


def test_score_over_generator_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"width 1": 0.6, "width 1/4": 0.7, "depth 1/2": 0.65, "uniform": 0.4, "_$x$": 0.5}
    cells = [
        a_cell(label, 0, {"cola": [0, value, 1], "rte": [0, value, 1]})
        for label, value in sizes.items()
    ]
    path = a_study(tmp_path / "study", cells, "generator-size")
    (axis,) = seen_in(monkeypatch, path, tmp_path / "out")
    lines = {c.get_label(): c.lines[0].get_xydata().tolist() for c in axis.containers}
    assert lines == {
        "width": [[0.25, pytest.approx(70)], [1.0, pytest.approx(60)]],
        "depth": [[0.5, pytest.approx(65)]],
    }
    heights = [line.get_ydata()[0] for line in axis.lines if line.get_linestyle() == ":"]
    assert heights == pytest.approx([40, 50])


def test_learning_curves_of_algorithms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {"cola": [0, 0.5, 1], "rte": [0, 0.5, 1]}
    cells = [a_cell(label, 0, scores) for label in ("joint", "adversarial")]
    cells.append(a_cell("two-stage", 0, {}, state="not finished"))
    path = a_study(tmp_path / "study", cells, "algorithms")
    _, accuracy, auc = seen_in(monkeypatch, path, tmp_path / "out")
    assert [line.get_label() for line in accuracy.lines] == ["joint", "adversarial"]
    assert accuracy.lines[0].get_xydata().tolist() == [[500, 0.2], [1000, 0.2]]
    assert not auc.lines
    assert "MLM accuracy 58 %" in report([path])


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"cells": 3},
        {"cells": [{"label": "x"}]},
        {"cells": [a_cell("x", 0, {"cola": [0, 0.5, 1]})]},  # no RTE
        {"tasks": None},
        {"cells": [a_cell("x", 0, {"cola": [0, 1, 1], "rte": [0, 1, 1]}, score=float("nan"))]},
    ],
    ids=["format", "cells", "half a cell", "a task", "tasks", "no number"],
)
def test_a_damaged_record_is_refused(study: Path, change: dict[str, Any]) -> None:
    file = study / "ablate.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | change))
    with pytest.raises(CorruptError) as caught:
        report([study])
    assert str(file) in caught.value.where


# ---------------------------------------------------------------------- the paper map


def test_every_line_of_the_paper_map_is_an_experiment_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
    lines = re.findall(r"`(--[^`]+)`", page.partition("## One line each")[2].partition("\n## ")[0])
    assert len(lines) == 21
    found = set[str]()
    for line in lines:
        plan: Any = cli.parse(["plan", "small", *line.replace("--init RUN ", "").split()])
        plan.run()
        shown = re.search(r"^generator +(.*)", capsys.readouterr().out, re.M)
        config = plan.settings
        found.add(json.dumps(to_dict(config)))
        kind, size = config.generator.kind, config.generator
        network = f"{round(12 * size.depth)} x {round(256 * size.width)}"
        wanted = "none" if config.objective.kind == "mlm" else network
        assert shown
        assert shown[1] == (wanted if kind == "network" else kind)
    assert len(found) == len(lines)


def test_the_numbers_of_the_paper_map_are_those_of_the_records() -> None:
    page = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
    records = sorted(ROOT.glob("results/**/ablate.json"))
    shown = report([file.parent for file in records])
    shown += "".join(report([file.parent]) for file in records)  # joined they have other seeds
    numbers = set(re.findall(r"\d+\.\d ± \d+\.\d", page))
    assert len(numbers) > 12
    assert not {number for number in numbers if number not in shown}
    of_table_5 = report([ROOT / "results" / "ablate" / "efficiency"])
    assert len(re.findall(r"above `.*\| held \|$", of_table_5, re.M)) == 7
    assert len(re.findall(r"above `.*\| not shown .*\|$", of_table_5, re.M)) == 2
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for text in (page, (said := re.findall(r"^\| the paper's studies .*", readme, re.M)[0])):
        assert "seven of nine pairs" in text
    quoted = re.findall(r"\d+\.\d ± \d+\.\d", said)
    assert len(quoted) == 3
    assert all(number in of_table_5 for number in quoted)
    # The same settings and seed in two studies.
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for file in records:
        record = json.loads(file.read_bytes())
        source = record["environment"]["source"]  # by the same program
        for cell in record["cells"]:
            setting = flat(record["base"]) | cell["differs"] | {"run.seed": cell["seed"]}
            same = cells.setdefault(
                json.dumps([setting, record["tuning"], source], sort_keys=True), {}
            )
            if "score" in cell:
                same[file.parent.name] = cell
    twice = [list(same.values()) for same in cells.values() if len(same) > 1]
    assert len(twice) == 12
    apart = [100 * abs(a["score"] - b["score"]) for a, b in twice]
    assert f"differ by {min(apart):.1f} to {max(apart):.1f}" in page
    of_rte = [
        100 * abs(a["scores"]["rte"]["median"] - b["scores"]["rte"]["median"]) for a, b in twice
    ]
    assert f"up to {max(of_rte):.1f}" in page


def test_the_paper_s_order_by_scale_is_that_of_the_records() -> None:
    page = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
    names = "efficiency-1000", "efficiency", "efficiency-16000", "efficiency-16000-seeds-3-4"
    shown = report([ROOT / "results" / "ablate" / name for name in names])

    def rows(text: str) -> list[list[str]]:
        plain = text.replace("**", "").replace("−", "-").replace("`", "").replace("15 %", "15%")
        lines = [line for line in plain.splitlines() if re.match(r"\| [^|]+ above ", line)]
        return [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]

    told, seen = ([r for r in rows(text) if len(r) == 7] for text in (page, shown))
    assert len(told) == len(seen) == 9
    for ours, theirs in zip(told, seen, strict=True):
        assert ours[:2] == theirs[:2]
        for cell, one in zip(ours[2:5], theirs[2:5], strict=True):
            assert cell.split("),")[0].rstrip(")") == one.split("):")[0], (cell, one)
        assert ours[5] == theirs[5]
        assert ours[6] == theirs[6].split(" steps")[0]
    bold = [r for r in page.splitlines() if re.match(r"\| [^|]+ above ", r) and r.count("|") == 8]
    for line, theirs in zip(bold, seen, strict=True):
        assert line.count("**") // 2 == sum(cell.endswith(": held") for cell in theirs), line


def test_every_symbol_command_and_setting_of_the_paper_map_exists() -> None:
    import importlib

    page = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
    quoted = re.findall(r"`([^`\n]+)`", page)
    symbols = [q for q in quoted if re.fullmatch(r"\w+(\.\w+)+", q) and q.split(".")[0] in MODULES]
    assert len(symbols) > 40
    for symbol in symbols:
        module, *names = symbol.split(".")
        if names == ["py"]:
            continue
        thing: Any = importlib.import_module(MODULES[module])
        for name in names:
            fields = getattr(thing, "__dataclass_fields__", {})
            assert hasattr(thing, name) or name in fields, symbol
            thing = getattr(thing, name, None)
            if inspect.isclass(thing) or inspect.isfunction(thing):  # at home, not imported there
                assert thing.__module__ == MODULES[module], symbol
    commands = [q.split() for q in quoted if q.startswith("electra ")]
    assert len(commands) > 10
    for _, command, *words in commands:
        assert command in cli.COMMANDS, command
        if command == "ablate" and words:
            assert words[0] in ablate.STUDIES
    dotted = {
        f"{group}.{name}"
        for group, values in to_dict(PretrainConfig()).items()
        if isinstance(values, dict)
        for name in values
    }
    for setting in re.findall(r"--((?:objective|generator|optim|run|data|encoder)\.[\w-]+)", page):
        assert setting.replace("-", "_") in dotted, setting
    for name in re.findall(r"recipe `([^`]+)`", page):
        recipe(name)
    for file in re.findall(r"`((?:results|tests|docs|benchmarks)/[\w./-]+)`", page):
        assert (ROOT / file).exists(), file
