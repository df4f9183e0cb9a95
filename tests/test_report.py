"""Reports: the right numbers in the right places, and names that stay names."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from electra.config import PretrainConfig, to_dict
from electra.errors import CorruptError, ElectraError
from electra.finetuning.tasks import Task
from electra.formats.card import results_text
from electra.runlog import read_metrics
from electra.studies.figures import draw_curves
from electra.studies.records import code
from electra.studies.report import report

EVIL = "a`b\n| x | <script>alert(1)</script> [l](http://e) ![i](j) **b** \x1b[31m &amp; $\\frac"
SCORES = (0.5, 0.62, 0.587)


def results(
    task: str = "cola",
    scores: tuple[float, ...] = SCORES,
    failed: int = 0,
    model: str = "runs/small",
    metric: str = "matthews",
    **changed: Any,
) -> dict[str, Any]:
    seeds = [
        {"seed": i, "score": score, "failed": i < failed, "scores": {"dev": {metric: score}}}
        for i, score in enumerate(scores)
    ]
    summary = {
        "median": statistics.median(scores),
        "mean": statistics.mean(scores),
        "best": max(scores),
        "std": statistics.stdev(scores) if len(scores) > 1 else None,
        "failed": failed,
        "seeds": len(scores),
    }
    return {
        "format": 1,
        "task": {"name": task, "kind": "classification", "metric": metric},
        "model": model,
        "settings": {"seeds": len(scores)},
        "seeds": seeds,
        "summary": summary,
        "ensemble": {"dev": {metric: 0.654}},
        "environment": {},
        **changed,
    }


def write(directory: Path, values: dict[str, Any], name: str = "results.json") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(json.dumps(values))
    return directory


def pretraining(directory: Path, steps: int = 1000, name: str = "tiny", **run: Any) -> Path:
    config = to_dict(PretrainConfig(name=name))
    config["run"].update({"train_steps": 1000, **run})
    write(directory, {"config": config, "corpus_fingerprint": "0"}, "run.json")
    lines: list[dict[str, Any]] = []
    for step in range(100, steps + 1, 100):
        lines.append({"kind": "train", "step": step, "mlm_loss": 9.0, "seconds": step * 0.12})
        held = {"mlm_loss": 5 + 100 / step, "disc_loss": 0.25, "disc_auc": 0.5 + step / 4000}
        lines.append({"kind": "eval", "step": step, **held})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text + '{"kind": "tr')  # cut off by a crash
    return directory


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, its head first."""
    lines = text.split(heading)[1].split("\n\n")[1].splitlines()
    cells = [re.split(r" ?\| ?", line)[1:-1] for line in lines]
    return [cells[0], *cells[2:]]


def in_csv(out: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((out / "report.csv").read_text())))


# ---------------------------------------------------------------------- numbers


def test_one_fine_tuning_run(tmp_path: Path) -> None:
    run = write(tmp_path / "run", results(failed=1))
    out = tmp_path / "out"
    text = report([run], out)
    assert "## Fine-tuning: median of the seeds × 100" in text
    head, row = rows(text, "## Fine-tuning")
    assert head == ["run", "`cola, matthews`", "mean over tasks"]
    assert row == ["`runs/small`", "58.7", "58.7"]
    _, long = rows(text, "### All numbers")
    score = "58.7 (mean 56.9 ± 6.2, best 62.0, 3 seeds, 1 failed)"
    assert long == ["`run`", "`cola`", "`matthews`", "`runs/small`", "finished", score, "65.4"]
    (line,) = in_csv(out)
    assert (line["run"], line["kind"], line["task"]) == ("run", "finetune", "cola")
    assert float(line["median"]) == 0.587
    assert (line["seeds"], line["failed"], line["ensemble"]) == ("3", "1", "0.654")
    assert (out / "report.md").read_text() == f"# Report\n\n{text}"
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")


def own_classes(labels: int) -> dict[str, Any]:
    """Results on a user's own table: of its first class half is taken for the second."""
    counts = {"c0": {"c0": 7, "c1": 6}, "c1": {"c1": 5}}
    made = results("mine", metric="accuracy", confusion={"dev": counts})
    made["task"]["labels"] = [f"c{i}" for i in range(labels)]
    for seed, macro in zip(made["seeds"], (0.2, 0.9, 0.4), strict=True):
        seed["scores"]["dev"]["macro_f1"] = macro
    return made


def test_the_confusion_of_own_classes(tmp_path: Path) -> None:
    few, many = write(tmp_path / "few", own_classes(3)), write(tmp_path / "many", own_classes(13))
    glue = write(tmp_path / "glue", results())
    text = report([few, many, glue], tmp_path / "out")
    title = "### `few`, macro-F1 × 100 40.0 (median of the seeds)\n\nRows of `dev`"
    table = [["`c0`", "7", "6", "0"], ["`c1`", "0", "5", "0"], ["`c2`", "0", "0", "0"]]
    assert rows(text, title)[1:] == table
    assert rows(text, title.replace("few", "many"))[1:] == [["`c0`", "`c1`", "6"]]
    assert "`glue`, macro" not in text
    perfect = own_classes(13) | {"confusion": {"dev": {"c0": {"c0": 7}}}}
    assert report([write(tmp_path / "p", perfect)]).endswith("(median of the seeds)\n\n")
    assert [line["macro_f1"] for line in in_csv(tmp_path / "out")] == ["0.4", "0.4", ""]
    report([glue], tmp_path / "out")
    assert "macro_f1" not in in_csv(tmp_path / "out")[0]
    task = Task(name="mine", kind="classification", metric="accuracy")
    assert "| `c0` | 7 | 6 | 0 |" in results_text(task, own_classes(3))


@pytest.mark.parametrize("wrong", [3, {"dev": {"c0": 3}}, {"dev": {"c0": {"c0": "many"}}}])
def test_a_confusion_of_another_form(wrong: Any, tmp_path: Path) -> None:
    refused(write(tmp_path / "run", own_classes(3) | {"confusion": wrong}))


def test_a_benchmark_is_one_row(tmp_path: Path) -> None:
    write(tmp_path / "a" / "cola", results("cola"))
    write(tmp_path / "a" / "rte", results("rte", (0.7,), model="runs/a/mnli", metric="accuracy"))
    write(tmp_path / "b" / "cola", results("cola", (0.4, 0.41)))
    (tmp_path / "a" / "notes").mkdir()
    text = report([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    head, a, b = rows(text, "## Fine-tuning")
    assert head == ["run", "`cola, matthews`", "`rte, accuracy`", "mean over tasks"]
    assert a == ["`a`", "58.7", "70.0", "64.3"]  # (58.7 + 70) / 2
    assert b == ["`b`", "40.5", "–", "–"]  # no mean over other tasks than those of a
    assert [line[0] for line in rows(text, "### All")[1:]] == ["`a/cola`", "`a/rte`", "`b/cola`"]
    assert "70.0 (mean 70.0 ± –, best 70.0, 1 seeds, 0 failed)" in text


def test_runs_of_one_model_share_a_row(tmp_path: Path) -> None:
    """Until a task comes twice: then the run has a row under its own name."""
    paths = [
        write(tmp_path / "x", results("cola")),
        write(tmp_path / "y", results("rte")),
        write(tmp_path / "z", results("cola", (0.1,))),
        write(tmp_path / "w", results("cola", (0.2,), metric="accuracy")),
    ]
    _, *found = rows(report(paths), "## Fine-tuning")
    assert found == [
        ["`runs/small`", "58.7", "58.7", "20.0", "45.8"],
        ["`z`", "10.0", "–", "–", "–"],
    ]


def test_a_folder_of_mixed_runs(tmp_path: Path) -> None:
    """Everything in it is shown, in whatever order the names are, a benchmark as a row of its own;
    what is part of a run is not."""
    work = tmp_path / "work"
    pretraining(work / "a-run")
    pretraining(work / "a-run" / "old")
    write(work / "b-tuned", results("rte"))
    write(work / "c-scores" / "cola", results("cola"))
    write(work / "c-scores" / "rte", results("rte", (0.7,), model="work/c-scores/mnli"))
    pretraining(work / "d-more" / "run", name="other")
    write(work / "d-more" / "tuned", results("cola", (0.4,), model="other"))
    write(work / "e" / "deep" / "down", results())
    (work / "notes.txt").write_text("no run")
    text = report([work], tmp_path / "out")
    assert [line[:2] for line in rows(text, "## Pre-training")[1:]] == [
        ["`work/a-run`", "`tiny`"],
        ["`work/d-more/run`", "`other`"],
    ]
    assert [line[0] for line in rows(text, "### All")[1:]] == [
        "`work/b-tuned`",
        "`work/c-scores/cola`",
        "`work/c-scores/rte`",
        "`work/d-more/tuned`",
    ]
    assert rows(text, "## Fine-tuning")[1:] == [
        ["`runs/small`", "58.7", "–", "–"],
        ["`work/c-scores`", "70.0", "58.7", "64.3"],
        ["`other`", "–", "40.0", "–"],
    ]
    kinds = [line["kind"] for line in in_csv(tmp_path / "out")]
    assert kinds == ["pretrain"] * 2 + ["finetune"] * 4
    assert report([work / "a-run"]).count("`a-run`") == 1
    pretraining(tmp_path / "alone" / "run")
    assert "`alone/run`" in report([tmp_path / "alone"])


def test_directories_of_the_same_name(tmp_path: Path) -> None:
    paths = [write(tmp_path / part / "run", results()) for part in "ab"]
    text = report([*paths, paths[0]])
    assert [line[0] for line in rows(text, "### All")[1:]] == [f"`{path}`" for path in paths]


def test_pre_training_runs(tmp_path: Path) -> None:
    a = pretraining(tmp_path / "a")
    b = pretraining(tmp_path / "b", steps=400)
    c = pretraining(tmp_path / "c", steps=400, minutes=0.8)  # 48 s: the clock ended it
    d = pretraining(tmp_path / "d")
    (d / "metrics.jsonl").unlink()
    text = report([a, b, c, d], tmp_path / "out")
    head, *found = rows(text, "## Pre-training")
    assert head[2:6] == ["state", "steps", "tokens", "minutes"]
    tokens = f"{1000 * 128 * 128:,}"
    assert found[0] == ["`a`", "`tiny`", "finished", "1,000", tokens, "2.0", "5.1", "0.25", "0.75"]
    assert [row[2] for row in found] == [
        "finished",
        "not finished: 40 %",
        "finished",
        "not finished: 0 %",
    ]
    assert found[3][3:] == ["0", "0", "0.0", "–", "–", "–"]
    assert "Fine-tuning" not in text
    assert in_csv(tmp_path / "out")[1]["disc_auc"] == "0.6"


def test_numbers_that_are_none_are_no_curve(tmp_path: Path) -> None:
    run = pretraining(tmp_path / "run")
    bad = {"kind": "eval", "step": 1100, "mlm_loss": "nan", "disc_loss": None, "disc_auc": None}
    (run / "metrics.jsonl").write_text(json.dumps(bad) + "\n")
    _, row = rows(report([run], tmp_path / "out"), "## Pre-training")
    assert row[-3:] == ["–", "–", "–"]


def test_everything_at_once(tmp_path: Path) -> None:
    pretraining(tmp_path / "p")
    write(tmp_path / "f", results())
    text = report([tmp_path / "f", tmp_path / "p"], tmp_path / "out")
    assert text.index("## Pre-training") < text.index("## Fine-tuning")
    assert [line["kind"] for line in in_csv(tmp_path / "out")] == ["pretrain", "finetune"]


def test_runs_that_are_not_finished(tmp_path: Path) -> None:
    begun = {**results("rte"), "settings": {"seeds": 5}}
    run = write(tmp_path / "glue" / "rte", begun, "finetune.json")
    for seed in (0, 1):
        write(run / f"seed-{seed}", {}, "result.json")
    write(tmp_path / "glue" / "cola", results())
    more = write(tmp_path / "glue" / "mrpc", results("mrpc"))
    write(more, begun, "finetune.json")
    text = report([tmp_path / "glue"], tmp_path / "out")
    states = {line[0]: line[4] for line in rows(text, "### All")[1:]}
    assert states == {
        "`glue/cola`": "finished",
        "`glue/mrpc`": "not finished: 3 of 5 seeds",
        "`glue/rte`": "not finished: 2 of 5 seeds",
    }
    _, row = rows(text, "## Fine-tuning")
    assert row == ["`glue`", "58.7", "58.7 †", "– †", "–"]
    assert "† not finished" in text


def test_all_seeds_failed(tmp_path: Path) -> None:
    values = results(scores=(0.0, 0.0), failed=2)
    values["summary"].update(median=None, mean=None, std=None, best=None)
    text = report([write(tmp_path / "run", values)], tmp_path / "out")
    assert "– (mean – ± –, best –, 2 seeds, 2 failed)" in text


# ---------------------------------------------------------------------- what cannot be read


def refused(path: Path, kind: type[ElectraError] = CorruptError, what: str = ".") -> None:
    with pytest.raises(kind, match=what) as error:
        report([path])
    assert str(path) in error.value.where
    assert error.value.fix


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "null", "[[[" * 9999, "\udcff"])
def test_damaged_records(content: str, tmp_path: Path) -> None:
    for name in ("results.json", "run.json", "finetune.json"):
        path = tmp_path / name
        path.mkdir()
        (path / name).write_bytes(content.encode(errors="surrogateescape"))
        refused(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"format": 2},
        {"task": None},
        {"task": {"name": "x"}},
        {"summary": None},
        {"summary": {"median": 0.5}},
        {"seeds": [{"seed": 0}]},
        {"seeds": [{"seed": 0, "score": "good", "failed": False}]},
        {"seeds": [{"seed": 0, "score": float("nan"), "failed": False}]},
        {"ensemble": {"dev": 3}},
        {"ensemble": 3},
    ],
)
def test_results_of_another_form(changed: dict[str, Any], tmp_path: Path) -> None:
    refused(write(tmp_path / "run", {**results(), **changed}))
    (tmp_path / "missing").mkdir()
    values = results()
    for key in changed:
        del values[key]
    refused(write(tmp_path / "missing", values))


def test_counts_are_whole_numbers(tmp_path: Path) -> None:
    values = results()
    values["summary"]["seeds"] = None
    refused(write(tmp_path / "run", values))


@pytest.mark.parametrize("line", ["3", '"x"', "[]", "{}", '{"kind": "eval", "step": "x"}'])
def test_damaged_metrics(line: str, tmp_path: Path) -> None:
    run = pretraining(tmp_path / "run")
    (run / "metrics.jsonl").write_text(line + "\n")
    refused(run)
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe")
    refused(run)
    good = '{"kind": "eval", "step": 1}'
    (run / "metrics.jsonl").write_text(f'{good}\n{{"kind": "ev\n{good}\n')
    refused(run)
    (run / "metrics.jsonl").write_text(f"{good}\n\n{good}")  # as an editor leaves it
    assert len(read_metrics(run)) == 2


def test_settings_without_numbers(tmp_path: Path) -> None:
    refused(pretraining(tmp_path / "a", train_steps=0))
    refused(pretraining(tmp_path / "b", minutes="long"))
    refused(write(tmp_path / "c", {}, "run.json"))


def test_no_run_at_all(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "notes.txt").write_text("no run")
    for name, what in (
        ("folder", "There is no run here"),
        ("nowhere", "The folder cannot be read: No such file or directory."),
        ("notes.txt", "The folder cannot be read: Not a directory."),
        ("loop", "The folder cannot be read: Too many levels of symbolic links."),
    ):
        refused(tmp_path / name, ElectraError, what)


def left_out(text: str) -> list[str]:
    return text.rstrip().partition("## Left out: what cannot be read\n\n")[2].splitlines()


def test_a_foreign_record_in_a_folder_is_left_out(tmp_path: Path) -> None:
    """All others are shown; it is an error where it is named itself, and where nothing else is."""
    write(tmp_path / "rep" / "tuned", results())
    other = write(tmp_path / "rep" / "other", {"accuracy": 1})
    foreign = write(tmp_path / "rep" / "deep" / "a|b", {"lr": 1}, "run.json")
    text = report([tmp_path / "rep"], tmp_path / "out")
    assert [line[0] for line in rows(text, "### All")[1:]] == ["`rep/tuned`"]
    assert left_out(text) == [
        f"- {code(file)}: `The file cannot be read as what it should be: KeyError: '{key}'.`"
        for file, key in ((foreign / "run.json", "config"), (other / "results.json", "format"))
    ]
    assert "Left out" in (tmp_path / "out" / "report.html").read_text()
    assert len(in_csv(tmp_path / "out")) == 1
    with pytest.raises(CorruptError):
        report([tmp_path / "rep", other])
    with pytest.raises(CorruptError):
        report([tmp_path / "rep" / "deep"])


def test_a_folder_that_may_not_be_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs this: root may read everything."""
    write(tmp_path / "rep" / "tuned", results())
    closed = tmp_path / "rep" / "closed"
    write(closed / "run", results())

    def guarded(ask: Any) -> Any:
        def asked(path: Any, *rest: Any, **more: Any) -> Any:
            if not isinstance(path, int) and Path(path).is_relative_to(closed):
                raise PermissionError(13, "Permission denied", str(path))
            return ask(path, *rest, **more)

        return asked

    for name in ("listdir", "scandir", "stat"):
        monkeypatch.setattr(os, name, guarded(getattr(os, name)))
    text = report([tmp_path / "rep"])
    assert [line[0] for line in rows(text, "### All")[1:]] == ["`rep/tuned`"]
    assert left_out(text) == [f"- `{closed}`: `The folder cannot be read: Permission denied.`"]
    refused(closed, ElectraError)
    shutil.rmtree(tmp_path / "rep" / "tuned")
    refused(tmp_path / "rep", ElectraError)  # names what cannot be read, not that nothing is there


def test_a_run_of_two_names_is_listed_once(tmp_path: Path) -> None:
    tuned = write(tmp_path / "rep" / "tuned", results())
    (tmp_path / "rep" / "twice").symlink_to("tuned")
    (tmp_path / "again").symlink_to(tuned)
    for named in ((tmp_path / "rep", tuned), (tuned, tmp_path / "again"), (tmp_path / "rep",)):
        assert len(rows(report(named), "### All")) == 2  # with the head


# ---------------------------------------------------------------------- names stay names


def test_markdown_takes_no_orders(tmp_path: Path) -> None:
    name = EVIL.replace("/", "").replace("\n", " ")
    values = results(EVIL, model=EVIL, metric=EVIL)
    run = write(tmp_path / name, values)
    other = pretraining(tmp_path / ("p" + name), name=EVIL)
    text = report([run, other], tmp_path / "out")
    plain = re.sub("`[^`\n]*`", "`", text)
    for word in ("script", "](", "**b**", "&amp;", "$", "\x1b", "alert"):
        assert word not in plain, word
    head, row = rows(text, "## Fine-tuning")
    assert len(head) == len(row) == 3
    lengths = {len(line) for line in rows(text, "### All")}
    assert lengths == {7}
    assert "\x1b" not in text
    assert (tmp_path / "out" / "report.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a_b*c", "`a_b*c`"),
        ("a`b``", "`a'b''`"),
        ("a|b", "`a¦b`"),
        ("a\r\nb\u2028c\u202ed\x00", "`a  b c d`"),
        ("", "` `"),
        ("東京", "`東京`"),
    ],
)
def test_text_as_code(text: str, shown: str) -> None:
    assert code(text) == shown


@pytest.mark.parametrize(
    "name", ["=1+1", "+1", "-1", "@x", "\t=1", "\r=1", " =1", "\n=1", "=cmd|' /C calc'!A0"]
)
def test_csv_holds_no_formula(name: str, tmp_path: Path) -> None:
    run = write(tmp_path / "run", results(name, (-0.5, -0.25), model=name, metric=name))
    report([run], tmp_path / "out")
    (line,) = in_csv(tmp_path / "out")
    for key in ("task", "model", "metric"):
        assert line[key].startswith("'"), key
        assert line[key].lstrip("'").strip() == name.strip()
    assert float(line["median"]) == -0.375  # a number is no formula


@pytest.mark.parametrize("name", ["_hidden", r"$\frac", r"$\frac$", "$", "東京", r"\$"])
def test_a_picture_of_any_name(name: str, tmp_path: Path) -> None:
    write(tmp_path / "run", results(name, model=name))
    pretraining(tmp_path / name)
    report([tmp_path / "run", tmp_path / name], tmp_path / "out")
    assert (tmp_path / "out" / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["curves.png", "report.png", "report.html", "report.csv"])
def test_who_reads_an_old_picture_keeps_it_whole(name: str, tmp_path: Path) -> None:
    """A file that is replaced, not written over, stays under its second name as it was."""
    run = pretraining(tmp_path / "run")
    before = run / name
    before.write_bytes(b"the old one")
    (tmp_path / "second").hardlink_to(before)
    draw_curves(run)
    report([run], run)
    assert len(before.read_bytes()) > len(b"the old one")
    assert (tmp_path / "second").read_bytes() == b"the old one"
    assert not list(run.glob(".*.tmp"))
