"""From a person's files to scores and answers: finetune, glue, predict and report as commands."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from electra import cli
from electra.config import FinetuneConfig
from electra.data.tokenizer import Tokenizer
from electra.errors import ElectraError, NumericError
from electra.finetuning import glue
from electra.formats.hf import load_encoder, load_finetuned

ROOT = Path(__file__).parents[1]
NOUNS = ["river", "stone", "bird", "house", "wind", "child", "tree", "song", "road", "fire"]
FLAGS = "--learning-rate 5e-3 --layer-decay 1 --batch-size 8 --threads 1 --device cpu --quiet"


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random encoder as transformers writes it, and our tokenizer beside it."""
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.ElectraConfig(
        vocab_size=tokenizer.vocab_size,
        embedding_size=14,
        hidden_size=20,
        intermediate_size=28,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=80,
    )
    transformers.ElectraModel(config).save_pretrained(directory)
    tokenizer.save(directory)
    return directory


def electra(*arguments: str | Path) -> None:
    """One command in this process, which succeeds."""
    parts = [part for a in arguments for part in ([str(a)] if isinstance(a, Path) else a.split())]
    assert cli.run(parts) == 0


def in_a_process(*arguments: str | Path) -> str:
    """One command of its own; what it prints."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-m", "electra", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout


def text(draw: random.Random, river: bool, most: int = 7) -> str:
    words = [draw.choice(NOUNS[1:]) for _ in range(draw.randint(2, most))]
    if river:
        words[draw.randrange(len(words))] = NOUNS[0]
    return " ".join(words)


def write_csv(path: Path, rows: Sequence[Sequence[Any]]) -> Path:
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def read_jsonl(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def answers(model: Path, given: str | Path, capsys: pytest.CaptureFixture[str]) -> Any:
    capsys.readouterr()
    assert cli.run(["predict", "--model", str(model), "--input", str(given)]) == 0
    return read_jsonl(capsys.readouterr().out)


# ---------------------------------------------------------------------- a table of one's own


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, str, str]]:
    """title, body, label: wet if the body has a river."""
    draw = random.Random(0)
    found = list[tuple[str, str, str]]()
    for i in range(240):
        title, body = text(draw, draw.random() < 0.5, 3), text(draw, i % 2 == 0)
        found.append((title, body, "wet" if i % 2 == 0 else "dry"))
    return found


@pytest.fixture(scope="module")
def run(
    model: Path, rows: list[tuple[str, str, str]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """The run of one command of its own, and what it printed."""
    place = tmp_path_factory.mktemp("own")
    data = write_csv(place / "my.csv", [("title", "body", "label"), *rows])
    flags = ["--text", "title,body", "--label", "label", "--epochs", "12", *FLAGS.split()]
    out = place / "run"
    shown = in_a_process("finetune", "--model", model, "--data", data, "--out", out, *flags)
    return out, shown


def test_a_table_is_learned_and_reported(run: tuple[Path, str]) -> None:
    out, shown = run
    results = json.loads((out / "results.json").read_bytes())
    assert results["summary"]["median"] > 0.9
    assert results["task"]["texts"] == ["title", "body"]
    assert f"{100 * results['summary']['median']:.1f}" in shown
    assert shown.endswith(f"next: electra predict --model {out} --input FILE\n")


def test_all_forms_of_input_give_the_same_answers(
    run: tuple[Path, str],
    rows: list[tuple[str, str, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, _ = run
    asked = rows[:9]
    table = write_csv(tmp_path / "in.csv", [("id", "body", "title")] + [
        (f"row {i}", body, title) for i, (title, body, _) in enumerate(asked)
    ])  # fmt: skip
    jsonl = tmp_path / "in.jsonl"
    jsonl.write_text("".join(json.dumps({"title": a, "body": b}) + "\n" for a, b, _ in asked))
    plain = tmp_path / "in.txt"
    plain.write_text("".join(f"{a}\t{b}\n" for a, b, _ in asked))
    found = read_jsonl(in_a_process("predict", "--model", out, "--input", table))
    assert [row["id"] for row in found] == [f"row {i}" for i in range(9)]
    assert [row["prediction"] for row in found] == [label for *_, label in asked]
    assert all(0.5 <= row["probability"] <= 1 for row in found)

    def bare(rows: list[dict[str, Any]]) -> list[tuple[str, float]]:
        return [(row["prediction"], pytest.approx(row["probability"], abs=1e-6)) for row in rows]

    for given in (jsonl, plain):
        assert bare(answers(out, given, capsys)) == bare(found)
    literal = "\t".join(asked[3][:2])
    assert bare(answers(out / "model", literal, capsys)) == bare(found[3:4])


def test_answers_go_to_a_file(
    run: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "in.txt"
    given.write_text("stone\triver bird\nstone\tbird\n")
    found = answers(run[0], given, capsys)
    for separator, name in ((",", "out.csv"), ("\t", "new/out.tsv")):
        electra("predict --model", run[0], "--input", given, "--out", tmp_path / name)
        with open(tmp_path / name, newline="") as file:
            written = list(csv.DictReader(file, delimiter=separator))
        assert [row["prediction"] for row in written] == [row["prediction"] for row in found]
    assert "2 answers in" in capsys.readouterr().out


def test_a_long_text_is_a_text_and_a_wrong_name_is_none(
    run: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given in ("river " * 99 + "\tstone", "river\tsee in.csv", "river\tstone\0"):
        assert len(glue.predict_rows(run[0], given)) == 1
    for given in ("in.csv", "new/in.jsonl.gz"):
        with pytest.raises(ElectraError, match="Cannot open: No such file") as caught:
            glue.predict_rows(run[0], given)
        assert caught.value.where == given
    (tmp_path / "inputs").mkdir()
    with pytest.raises(ElectraError, match="This is a folder, not a file") as caught:
        glue.predict_rows(run[0], "inputs")
    assert caught.value.where == "inputs"


def test_answers_have_a_format(
    run: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", "--model", str(run[0]), "--input", "a\tb", "--out", f"{tmp_path}/a.xlsx"]
    assert cli.run(command) == 2
    assert "cannot be written as '.xlsx'" in capsys.readouterr().err


def test_a_model_that_diverged_answers_nothing(run: tuple[Path, str]) -> None:
    """NaN is no JSON, and the first class would be no answer."""
    loaded = load_finetuned(run[0])
    with torch.no_grad():
        next(loaded.model.head.parameters()).fill_(math.nan)
    with pytest.raises(NumericError, match="not finite"):
        glue.answer_texts(loaded, [("a", "b")], torch.device("cpu"))


def test_one_text_where_two_are_read(run: tuple[Path, str]) -> None:
    with pytest.raises(ElectraError, match="reads 2 texts, given are 1") as caught:
        glue.predict_rows(run[0], "no tab in here")
    assert "put a tab between" in caught.value.fix


def test_the_report_of_a_process(run: tuple[Path, str], tmp_path: Path) -> None:
    shown = in_a_process("report", run[0], "--out", tmp_path)
    assert "accuracy" in shown
    assert {p.name for p in tmp_path.iterdir()} == {
        "report.md",
        "report.csv",
        "report.png",
        "report.html",
    }


def test_transformers_gives_the_same_answers(
    run: tuple[Path, str], rows: list[tuple[str, str, str]]
) -> None:
    network = transformers.AutoModelForSequenceClassification.from_pretrained(run[0] / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run[0] / "model")
    expected = glue.predict_rows(run[0], str(run[0].parent / "my.csv"))
    titles, bodies = [row[0] for row in rows], [row[1] for row in rows]
    given = tokenizer(titles, bodies, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        p = network.eval()(**given).logits.softmax(1)
    for i, row in enumerate(expected):
        assert row["prediction"] == network.config.id2label[int(p[i].argmax())]
        assert row["probability"] == pytest.approx(p[i].max().item(), abs=1e-4)


def test_a_damaged_run_ends_with_its_own_code(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(0)
    table = [(text(draw, i % 2 == 0), i % 2) for i in range(60)]
    data, out = write_csv(tmp_path / "my.csv", [("text", "label"), *table]), tmp_path / "run"
    command = ["finetune", "--model", model, "--data", data, "--out", out, f"--epochs 1 {FLAGS}"]
    electra(*command)
    (out / "seed-0" / "result.json").write_bytes(b"{")
    parts = [part for a in command for part in str(a).split()]
    assert cli.run(parts) == 3
    assert f"delete {out}/seed-0; the same command trains this seed again" in (
        capsys.readouterr().err
    )


# ---------------------------------------------------------------------- numbers and tags


def test_numbers_of_ones_own(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(0)
    table = [(text(draw, i % 2 == 0), 7.5 if i % 2 == 0 else -2.5) for i in range(200)]
    data, out = write_csv(tmp_path / "my.csv", [("text", "score"), *table]), tmp_path / "run"
    command = f"--text text --label score --epochs 10 {FLAGS}"
    electra("finetune --model", model, "--data", data, "--out", out, command)
    found = [row["prediction"] for row in answers(out, data, capsys)]
    error = [abs(value - wanted) for value, (_, wanted) in zip(found, table, strict=True)]
    assert sorted(error)[150] < 2.5  # in the data's own unit
    network = transformers.AutoModelForSequenceClassification.from_pretrained(out / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "model")
    given = tokenizer([row[0] for row in table], padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = network.eval()(**given).logits[:, 0]
    assert found == pytest.approx(theirs.tolist(), abs=1e-3)


def test_tags_of_ones_own(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(0)
    sentences = [text(draw, i % 2 == 0, 9).split() for i in range(160)]
    data, out = tmp_path / "my.conll", tmp_path / "run"
    data.write_text(
        "\n\n".join(
            "\n".join(f"{word} {'B-WATER' if word == 'river' else 'O'}" for word in sentence)
            for sentence in sentences
        )
    )
    electra("finetune --model", model, "--data", data, "--out", out, f"--epochs 10 {FLAGS}")
    results = json.loads((out / "results.json").read_bytes())
    assert results["task"]["metric"] == "f1"
    assert results["summary"]["median"] > 0.9
    (row,) = answers(out, "bird river stone", capsys)
    assert row["words"] == ["bird", "river", "stone"]
    assert row["prediction"] == ["O", "B-WATER", "O"]
    given = tmp_path / "in.txt"
    given.write_text("tree\nriver\n\nsong\n")
    found = answers(out, given, capsys)
    assert [r["prediction"] for r in found] == [["O", "B-WATER"], ["O"]]
    network = transformers.AutoModelForTokenClassification.from_pretrained(out / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "model")
    for sentence in sentences[:20]:
        batch = tokenizer(sentence, is_split_into_words=True, return_tensors="pt")
        with torch.no_grad():
            logits = network.eval()(**batch).logits[0]
        first = [batch.word_ids().index(i) for i in range(len(sentence))]
        theirs = [network.config.id2label[int(logits[i].argmax())] for i in first]
        (row,) = answers(out, " ".join(sentence), capsys)
        assert row["prediction"] == theirs


# ---------------------------------------------------------------------- questions


def squad_file(path: Path, n: int, seed: int, *, second: bool, known: bool = True) -> list[str]:
    """What follows the river? In the second version some passages have none."""
    draw = random.Random(seed)
    paragraphs, ids = list[dict[str, Any]](), list[str]()
    for i in range(n):
        n_words = 90 if i == 1 else draw.randint(4, 12)  # one takes several windows
        words = [draw.choice(NOUNS[1:]) for _ in range(n_words)]
        item: dict[str, Any] = {"id": f"{seed}-{i}", "question": "all river"}
        impossible = second and i % 3 == 0
        found = list[dict[str, Any]]()
        if not impossible:
            place = draw.randrange(len(words) - 1)
            words[place] = "river"
            before = " ".join(words[: place + 1])
            found.append({"text": words[place + 1], "answer_start": len(before) + 1})
        if known:
            item |= {"answers": found} | ({"is_impossible": impossible} if second else {})
        ids.append(item["id"])
        paragraphs.append({"context": " ".join(words), "qas": [item]})
    path.write_text(json.dumps({"version": "x", "data": [{"paragraphs": paragraphs}]}))
    return ids


@pytest.mark.parametrize(("task", "version"), [("squad1", "1.1"), ("squad2", "2.0")])
@pytest.mark.parametrize("head", ["paper", "hf"])
def test_questions(
    task: str,
    version: str,
    head: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    second, out = task == "squad2", tmp_path / "run"
    squad_file(tmp_path / f"train-v{version}.json", 40, 0, second=second)
    ids = squad_file(tmp_path / f"dev-v{version}.json", 15, 1, second=second)
    flags = f"--task {task} --head {head} --epochs 2 {FLAGS}"
    electra("finetune --model", model, "--data", tmp_path, "--out", out, flags)
    files = {p.name: json.loads(p.read_bytes()) for p in (out / "test").iterdir()}
    expected = {"predictions.json"} | ({"spans.json", "null_odds.json"} if second else set())
    assert files.keys() == expected
    assert all(list(content) == sorted(ids) for content in files.values())
    (scores,) = (
        seed["scores"]["dev"] for seed in json.loads((out / "results.json").read_bytes())["seeds"]
    )
    assert ("best_f1" in scores) == second
    assert all(0 <= v <= 1 for name, v in scores.items() if "threshold" not in name)

    given = tmp_path / "asked.json"
    assert squad_file(given, 15, 1, second=second, known=False) == ids
    spans = {row["id"]: row["prediction"] for row in answers(out, given, capsys)}
    assert spans == files["spans.json" if second else "predictions.json"]
    assert all(spans.values())


# ---------------------------------------------------------------------- GLUE


def write_tsv(path: Path, lines: Sequence[Sequence[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(map(str, line)) + "\n" for line in lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five tasks and the diagnostic set, in the official form."""
    out, draw = tmp_path_factory.mktemp("GLUE"), random.Random(0)

    def pairs(n: int) -> list[tuple[int, str, str]]:
        return [(i, text(draw, i % 2 == 0), text(draw, i % 3 == 0)) for i in range(n)]

    for split, n in (("train", 40), ("dev", 12)):
        write_tsv(out / f"CoLA/{split}.tsv", [("x", i % 2, "", b) for i, b, _ in pairs(n)])
    write_tsv(out / "CoLA/test.tsv", [("index", "sentence"), *(r[:2] for r in pairs(5))])

    def task(name: str, columns: Sequence[str], label: str, values: Sequence[Any]) -> None:
        for split, n in (("train", 40), ("dev", 12), ("test", 5)):
            head, lines = ["index", *columns], [list(row) for row in pairs(n)]
            if split != "test":
                head.append(label)
                lines = [[*line, values[i % len(values)]] for i, line in enumerate(lines)]
            suffixes = ("_matched", "_mismatched") if name == "MNLI" and split != "train" else ("",)
            for suffix in suffixes:
                write_tsv(out / name / f"{split}{suffix}.tsv", [head, *lines])

    two = ("sentence1", "sentence2")
    task("RTE", two, "label", ("entailment", "not_entailment"))
    task("MNLI", two, "gold_label", ("contradiction", "entailment", "neutral"))
    task("STS-B", two, "score", (0.5, 4.25, 3.0))
    task("WNLI", two, "label", (1, 0, 1))
    write_tsv(out / "diagnostic/diagnostic.tsv", [("index", *two), *pairs(7)])
    return out


TASKS = ["cola", "mnli", "rte", "stsb", "wnli"]
QUICK = f"--epochs 1 {FLAGS}"


@pytest.fixture(scope="module")
def whole(model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("glue") / "out"
    electra("glue --model", model, "--data", folder, "--out", out, QUICK)
    return out


def test_a_folder_for_every_task(whole: Path) -> None:
    assert sorted(p.name for p in whole.iterdir()) == TASKS
    for name in TASKS:
        results = json.loads((whole / name / "results.json").read_bytes())
        assert results["task"]["name"] == name
        assert "confusion" not in results
        assert not any(
            "macro_f1" in s for seed in results["seeds"] for s in seed["scores"].values()
        )
    assert list(results["seeds"][0]["scores"]) == ["dev"]
    mnli = json.loads((whole / "mnli" / "results.json").read_bytes())
    assert list(mnli["seeds"][0]["scores"]) == ["dev", "dev_mismatched"]


@pytest.mark.parametrize(
    ("task", "files"),
    [
        ("cola", {"CoLA.tsv": 5}),
        ("mnli", {"MNLI-m.tsv": 5, "MNLI-mm.tsv": 5, "AX.tsv": 7}),
        ("rte", {"RTE.tsv": 5}),
        ("stsb", {"STS-B.tsv": 5}),
        ("wnli", {"WNLI.tsv": 5}),
    ],
)
def test_files_for_the_server(task: str, files: dict[str, int], whole: Path) -> None:
    found = {p.name: p.read_text().splitlines() for p in (whole / task / "test").iterdir()}
    assert {name: len(lines) - 1 for name, lines in found.items()} == files
    for lines in found.values():
        assert lines[0] == "index\tprediction"
        assert [line.split("\t")[0] for line in lines[1:]] == [
            str(i) for i in range(len(lines) - 1)
        ]
    answers = {line.split("\t")[1] for lines in found.values() for line in lines[1:]}
    if task == "mnli":
        assert answers <= {"contradiction", "entailment", "neutral"}
    if task == "stsb":
        assert all(0 <= float(answer) <= 5 for answer in answers)


def test_the_majority_answers_wnli(whole: Path) -> None:
    results = json.loads((whole / "wnli" / "results.json").read_bytes())
    assert results["model"] == "the majority answer, no model"
    assert results["summary"]["median"] == pytest.approx(8 / 12)  # 1 0 1 1 0 1 …
    written = (whole / "wnli" / "test" / "WNLI.tsv").read_text()
    assert written == "index\tprediction\n" + "".join(f"{i}\t1\n" for i in range(5))
    assert not (whole / "wnli" / "model").exists()


def test_wnli_can_be_trained(model: Path, folder: Path, tmp_path: Path) -> None:
    notes = list[str]()
    settings = FinetuneConfig(epochs=1.0, batch_size=8, length=4, device="cpu", threads=1)
    told: dict[str, Any] = {"only": ("wnli", "cola"), "quiet": True, "note": notes.append}
    results = glue.glue(model, folder, tmp_path, settings, wnli="train", **told)
    assert [note.partition(": ")[0] for note in notes] == ["cola", "wnli"]  # what each is about
    assert list(results) == ["cola", "wnli"]  # in the order of the table
    for name, result in results.items():
        assert result == json.loads((tmp_path / name / "results.json").read_bytes())
    assert (tmp_path / "wnli" / "model" / "model.safetensors").is_file()


def test_again_is_only_a_table(
    whole: Path,
    model: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def times() -> dict[Path, int]:
        found = [
            *whole.glob("*/seed-*/*"),
            *whole.glob("*/model/*"),
            *whole.glob("*/metrics.jsonl"),
        ]
        return {p: p.stat().st_mtime_ns for p in found}

    before = times()
    assert len(before) > 20
    monkeypatch.delattr("electra.finetuning.step.Trainer.step")
    electra("glue --model", model, "--data", folder, "--out", whole, QUICK)
    assert times() == before
    shown = capsys.readouterr().out
    assert all(name in shown for name in TASKS)


def test_from_the_mnli_model(model: Path, folder: Path, whole: Path, tmp_path: Path) -> None:
    """RTE and STS-B start there, the others do not, and MNLI comes first."""
    places = ("--model", model, "--data", folder, "--out", tmp_path)
    electra("glue", *places, f"--tasks rte mnli stsb cola --from-mnli {QUICK}")
    begun = {
        name: json.loads((tmp_path / name / "finetune.json").read_bytes())["encoder"]
        for name in ("cola", "mnli", "rte", "stsb")
    }
    plain = json.loads((whole / "rte" / "finetune.json").read_bytes())["encoder"]
    trained = load_encoder(tmp_path / "mnli").fingerprint
    assert trained != plain
    assert begun == {"cola": plain, "mnli": plain, "rte": trained, "stsb": trained}


def test_an_mnli_model_from_before(model: Path, folder: Path, tmp_path: Path) -> None:
    places = ["--model", model, "--data", folder, "--out", tmp_path]
    settings = ["--tasks", "rte", "--from-mnli", *QUICK.split()]
    assert cli.run(["glue", *map(str, places), *settings]) == 2
    assert not list(tmp_path.iterdir())
    electra("glue", *places, f"--tasks mnli {QUICK}")
    electra("glue", *places, *settings)
    begun = json.loads((tmp_path / "rte" / "finetune.json").read_bytes())
    assert begun["encoder"] == load_encoder(tmp_path / "mnli").fingerprint


def test_one_task_by_its_name(model: Path, folder: Path, whole: Path, tmp_path: Path) -> None:
    """The same as the task within all of them."""
    places = ("--model", model, "--data", folder, "--out", tmp_path)
    electra("finetune", *places, f"--task rte {QUICK}")
    name = "seed-0/weights.safetensors"
    assert (tmp_path / name).read_bytes() == (whole / "rte" / name).read_bytes()


@pytest.mark.parametrize(
    ("part", "flags", "told"),
    [
        ("", "--tasks cola qqp", "Not in this folder: qqp."),
        ("RTE", "", "There is no GLUE task here."),
        ("diagnostic", "", "There is no GLUE task here."),
        ("nowhere", "", "nowhere"),
    ],
)
def test_what_is_not_there(
    part: str,
    flags: str,
    told: str,
    model: Path,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = ["--model", str(model), "--data", str(folder / part), "--out", str(tmp_path / "out")]
    assert cli.run(["glue", *places, *flags.split()]) == 2
    shown = capsys.readouterr().err
    assert told in shown
    assert "to do:" in shown
    if flags:
        assert "present: cola, stsb, mnli, rte, wnli" in shown
    assert not (tmp_path / "out").exists()


def test_the_diagnostic_set_is_answered_by_mnli(model: Path, folder: Path, tmp_path: Path) -> None:
    notes = list[str]()
    settings = FinetuneConfig(epochs=1.0, batch_size=8, device="cpu", threads=1)
    results = glue.finetune_task(
        model, folder, tmp_path, settings, task="ax", quiet=True, note=notes.append
    )
    assert results["task"]["name"] == "mnli"
    assert (tmp_path / "test" / "AX.tsv").is_file()
    assert "no training set of its own" in notes[0]


def test_a_setting_without_effect_is_told(
    model: Path, rows: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    data = write_csv(tmp_path / "my.csv", [("text", "label"), *((b, c) for _, b, c in rows)])
    base = FinetuneConfig(epochs=1.0, batch_size=8, device="cpu", threads=1, seeds=2)
    told = list[str]()
    for changes in ({}, {"both_orders": True}, {"keep": "all"}):
        notes, out = list[str](), tmp_path / ("other" if "both_orders" in changes else "run")
        settings = replace(base, **changes)
        glue.finetune_task(model, data, out, settings, label="label", quiet=True, note=notes.append)
        told += [note for note in notes if note.startswith("warning: ")]
    first, second = told
    assert first.startswith("warning: both_orders True has no effect: it needs two texts")
    assert second.startswith("warning: keep all has no effect on seed-")


def test_what_of_the_rows_is_not_read_is_said(
    model: Path, rows: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    encoder = load_encoder(model)
    long = [(f"{title} {body} {body}", label) for title, body, label in rows]
    strange = [(f"{text} \u2603\u2603", label) for text, label in long]
    for table, length, told in (
        (long, 5, ("100% of the training rows fill all 5 tokens", "--length reads more")),
        (long, 80, ()),
        (strange, 80, ("of the tokens are [UNK]",)),
    ):
        data = write_csv(tmp_path / "my.csv", [("text", "label"), *table])
        notes = list[str]()
        config = FinetuneConfig(length=length)
        glue.open_data(encoder, data, config, None, note=notes.append, label="label")
        worries = [n for n in notes if "not read" in n or "UNK" in n]
        assert len(worries) == bool(told)
        assert all(word in worries[0] for word in told)
