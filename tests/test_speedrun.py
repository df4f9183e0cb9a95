"""benchmarks/speedrun.py: a record is what the files say, a broken rule is refused, and the table
on the page is that of the records."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from electra import cli
from electra.errors import ElectraError

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import speedrun

ROOT = Path(__file__).parents[1]
RUN, TUNED = ROOT / "results" / "small-10-minutes", ROOT / "results" / "finetune"


@pytest.fixture
def glue(tmp_path: Path) -> Path:
    """The layout of `electra glue`, with results of another run: only their form matters here."""
    none = {"dropout": 0.0, "attention_dropout": 0.0}  # as in the run's pre-training
    for name in (*speedrun.SIX, "qqp"):
        (tmp_path / "glue" / name).mkdir(parents=True)
        source = TUNED / "small-16000-steps" / f"{name}.json"
        shutil.copy(source, tmp_path / "glue" / name / "results.json")
        change(tmp_path / "glue" / name / "results.json", lambda r: r["settings"].update(none))
    return tmp_path / "glue"


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


def test_a_record_has_the_mean_of_six_medians_and_what_the_run_took(glue: Path) -> None:
    record = speedrun.measured(RUN, glue)
    read = [json.loads((glue / task / "results.json").read_text()) for task in speedrun.SIX]
    assert record["score"] == pytest.approx(
        100 * sum(r["summary"]["median"] for r in read) / 6, abs=0.006
    )
    seeds = [sum(r["seeds"][i]["score"] for r in read) / 6 for i in range(5)]
    assert record["spread"] == pytest.approx(100 * statistics.stdev(seeds), abs=0.006)
    assert len(record["seeds"]["qqp"]) == 5  # stored, and not counted
    assert record["tokens"] == 38_880 * 256 * 128
    assert record["minutes"] == pytest.approx(9.9, abs=0.05)
    assert record["flops"] == pytest.approx(record["tokens"] * 70.4e6, rel=0.01)
    assert record["environment"]["device"] == "NVIDIA H200"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda r: r["seeds"].pop(), "seeds are not"),
        (lambda r: r["seeds"][0].update(seed=7), "seeds are not"),
        (lambda r: r["settings"].update(epochs=9.0), "epochs"),
        (lambda r: r["settings"].update(learning_rate=1e-3), "learning_rate"),
        (lambda r: r["settings"].update(dropout=0.1), "dropout"),
        (lambda r: r["settings"].update(keep_epoch="best"), "keep_epoch"),
    ],
)
def test_other_seeds_or_settings_are_refused(
    glue: Path, edit: Callable[[dict[str, Any]], object], said: str
) -> None:
    change(glue / "rte" / "results.json", edit)
    with pytest.raises(ElectraError, match=said):
        speedrun.measured(RUN, glue)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda r: r["config"]["run"].update(minutes=7.0), "minutes"),
        (lambda r: r["config"]["run"].update(minutes=25.0), "not finished"),
        (lambda r: r["config"]["encoder"].update(hidden_size=320), "parameters"),
    ],
)
def test_other_minutes_and_larger_models_are_refused(
    glue: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], object], said: str
) -> None:
    run = shutil.copytree(RUN, tmp_path / "run")
    change(run / "run.json", edit)
    with pytest.raises(ElectraError, match=said):
        speedrun.measured(run, glue)


def test_a_task_that_was_left_out_is_missed(glue: Path) -> None:
    shutil.rmtree(glue / "stsb")
    with pytest.raises(ElectraError, match="stsb"):
        speedrun.measured(RUN, glue)


def test_the_script_writes_the_record_and_the_table(
    glue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(shutil.copy(speedrun.PAGE, tmp_path))
    monkeypatch.setattr(speedrun, "PAGE", page)
    monkeypatch.setattr(speedrun, "RECORDS", tmp_path / "records")
    given = ["--run", RUN, "--glue", glue, "--who", "someone", "--what", "a try", "--title", "one"]
    monkeypatch.setattr(sys, "argv", ["speedrun.py", *map(str, given)])
    speedrun.main()
    record = json.loads((tmp_path / "records" / "one.json").read_text())
    text = page.read_text(encoding="utf-8")
    assert speedrun.records_table() in text
    assert f"| someone | a try | faithful | 9.9 of 10 | {record['score']:.1f} ± " in text
    assert text.count("## Rules") == 1


def test_the_page_has_the_table_of_the_records() -> None:
    text = speedrun.PAGE.read_text(encoding="utf-8")
    assert f"<!-- records -->\n{speedrun.records_table()}\n<!-- end of records -->" in text


def test_a_plan_says_that_minutes_end_a_speedrun(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan", "speedrun-10"]) == 0
    told = capsys.readouterr().out
    assert "in 10 minutes" in told
    assert cli.run(["plan", "small"]) == 0
    assert "minutes" not in capsys.readouterr().out
