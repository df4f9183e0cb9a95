"""Readers of labelled data: the layouts of GLUE, a user's tables, words and tags, and bad files."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import electra.finetuning.tasks
from electra.errors import EXIT_USER, ElectraError
from electra.finetuning.tasks import (
    GLUE,
    Loaded,
    Task,
    available,
    load,
    read_inputs,
    write_predictions,
)

Write = Callable[[str, bytes | str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, content: bytes | str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def tsv(*rows: str) -> str:
    """Rows with | for the tab."""
    return "".join(row.replace("|", "\t") + "\n" for row in rows)


def fails(call: Callable[[], object], what: str, where: object, fix: str = "") -> ElectraError:
    with pytest.raises(ElectraError, match=what) as caught:
        call()
    assert str(where) in caught.value.where
    assert fix in caught.value.fix
    assert caught.value.fix
    assert caught.value.exit_code == EXIT_USER
    return caught.value


def labels(loaded: Loaded, split: str) -> list[Any]:
    """The labels of a split by their names."""
    return [loaded.task.labels[label] for label in loaded.splits[split].labels]


def save_to_disk(folder: Path, names: list[str] | None = None, **columns: list[Any]) -> None:
    """A folder as `datasets` writes it, in two files and with a leftover beside them."""
    folder.mkdir(parents=True)
    table = pa.table(columns)
    half = table.num_rows // 2
    parts = {"data-0.arrow": table[:half], "data-1.arrow": table[half:], "cache-9.arrow": table}
    for name, part in parts.items():
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(part)
    files = [{"filename": "data-0.arrow"}, {"filename": "data-1.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    if names:
        label = {"names": names, "_type": "ClassLabel"}
        (folder / "dataset_info.json").write_text(json.dumps({"features": {"label": label}}))


# ---------------------------------------------------------------- the table


def test_the_facts_of_glue() -> None:
    assert list(GLUE) == "cola sst2 mrpc stsb qqp mnli qnli rte wnli ax".split()  # noqa: SIM905
    assert {name for name, task in GLUE.items() if task.epochs == 10} == {"stsb", "rte"}
    assert {name for name, task in GLUE.items() if task.both_orders} == {"stsb", "mrpc"}
    others = {name: task.metric for name, task in GLUE.items() if task.metric != "accuracy"}
    assert others == {"cola": "matthews", "stsb": "spearman", "ax": "matthews"}
    assert (GLUE["stsb"].scale, GLUE["stsb"].offset) == (5, 0)
    assert GLUE["mnli"].labels == GLUE["ax"].labels == ("contradiction", "entailment", "neutral")
    assert GLUE["qnli"].labels == GLUE["rte"].labels == ("entailment", "not_entailment")
    assert {task.length for task in GLUE.values()} == {128}


# ---------------------------------------------------------------- official files


def test_cola_has_no_header_in_train_and_dev(write: Write, tmp_path: Path) -> None:
    write("CoLA/train.tsv", tsv('gj|1||He said "no.', "gj|0|*|Him\u2028it."))
    write("CoLA/dev.tsv", tsv("gj|1||Dev"))
    write("CoLA/test.tsv", tsv("index|sentence", "0|Test", "1|More"))
    loaded = load("CoLA", tmp_path)
    assert loaded.task is GLUE["cola"]
    assert loaded.splits["train"].texts == [('He said "no.',), ("Him\u2028it.",)]
    assert loaded.splits["train"].labels == [1, 0]
    assert (loaded.splits["test"].labels, loaded.splits["test"].ids) == ([], ["0", "1"])
    assert list(loaded.splits) == ["train", "dev", "test"]


@pytest.mark.parametrize("said", ["", "sep=;\n", "\n"])
@pytest.mark.parametrize(
    ("name", "found"), [("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", ","), ("a.tsv", ";")]
)
def test_another_separator_is_found(name: str, found: str, said: str, write: Write) -> None:
    """Semicolons are what spreadsheets write where the comma is the decimal sign."""
    said = said.replace(";", found)
    text = f'{said}"text"{found}label\n"yes{found} well"{found}a\nno{found}b\n'
    loaded = load(None, write(name, text), dev=write("dev.csv", "text,label\nx,a\n"))
    assert loaded.splits["train"].texts == [(f"yes{found} well",), ("no",)]
    assert labels(loaded, "train") == ["a", "b"]
    assert [note for note in loaded.notes if "columns" in note] == [
        f"{name}: read with {found!r} between columns"
    ]
    bad = write(name, f"{text}one\n")
    line = 5 if said else 4
    fails(lambda: load(None, bad), "1 columns, not 2", f"{bad}, line {line}")


def test_columns_without_a_name_are_left_out(write: Write) -> None:
    path = write("a.csv", "text,label,,\none,a,,\ntwo,b,,note\n")
    loaded = load(None, path, dev=path)
    assert loaded.splits["train"].texts == [("one",), ("two",)]
    assert labels(loaded, "train") == ["a", "b"]


def test_a_separator_in_the_only_name_is_text(write: Write) -> None:
    task = Task(name="t", kind="classification", metric="f1", texts=("one, two; three",))
    path = write("a.csv", '"one, two; three"\n"a, b"\n')
    assert read_inputs(path, task).texts == [("a, b",)]


def test_mrpc_with_its_mark_and_column_names(write: Write, tmp_path: Path) -> None:
    content = tsv("\ufeffQuality|#1 ID|#2 ID|#1 String|#2 String", '1|7|8|" a|b', "0|7|8|c|d")
    write("mrpc/train.tsv", content.replace("\n", "\r\n"))
    write("mrpc/dev.tsv", content)
    loaded = load("mrpc", tmp_path / "mrpc")  # the task's own folder
    for split in ("train", "dev"):
        assert loaded.splits[split].texts == [('" a', "b"), ("c", "d")]
        assert loaded.splits[split].labels == [1, 0]


def test_sst2_and_stsb(write: Write, tmp_path: Path) -> None:
    for split in ("train", "dev"):
        write(f"sst_2/{split}.tsv", tsv("sentence|label", "good |1"))
        write(f"STS-B/{split}.tsv", tsv("index|sentence1|sentence2|score", "4|a|b|3.250"))
    write("sst_2/test.tsv", tsv("index|sentence", "0|bad"))
    assert load("SST-2", tmp_path).splits["test"].texts == [("bad",)]
    similar = load("stsb", tmp_path).splits["dev"]
    assert (similar.texts, similar.labels, similar.ids) == ([("a", "b")], [3.25], ["4"])
    assert available(tmp_path) == ["sst2", "stsb"]


def test_mnli_in_its_many_columns(write: Write, tmp_path: Path) -> None:
    middle = "|".join(f"p{number}" for number in range(7))
    rows = [f"{n}|{middle}|s{n}|t{n}|neutral|{gold}" for n, gold in enumerate("enc-")]
    full = {"e": "entailment", "n": "neutral", "c": "contradiction", "-": "-"}
    rows = [row[:-1] + full[row[-1]] for row in rows]
    content = tsv(f"index|{middle}|sentence1|sentence2|label1|gold_label", *rows)
    for name in ("train", "dev_matched", "dev_mismatched"):
        write(f"MNLI/{name}.tsv", content)
    for name in ("test_matched", "test_mismatched"):
        write(f"MNLI/{name}.tsv", tsv("index|sentence1|sentence2", "9|a|b"))
    write("diagnostic/diagnostic.tsv", tsv("index|sentence1|sentence2", "3|c|d"))
    write("MNLI-10k/train.tsv", "not read: the whole task is there")
    loaded = load("mnli", tmp_path)
    for split in ("train", "dev", "dev_mismatched"):
        assert loaded.splits[split].texts == [("s0", "t0"), ("s1", "t1"), ("s2", "t2")]
        assert labels(loaded, split) == ["entailment", "neutral", "contradiction"]
    assert loaded.splits["ax"].ids == ["3"]
    assert list(loaded.splits)[:2] == ["train", "dev"]
    assert "1 rows without a gold label" in " ".join(loaded.notes)
    assert list(load("ax", tmp_path).splits) == ["test"]
    assert available(tmp_path) == ["mnli"]


def test_qqp_is_known_for_broken_training_rows(write: Write, tmp_path: Path) -> None:
    header, good = "id|qid1|qid2|question1|question2|is_duplicate", "5|1|2|a||1"
    train = write("QQP-20k/train.tsv", tsv(header, good, "6|1|2|a", "b|0", good))
    dev = write("QQP-20k/dev.tsv", tsv(header, good))
    loaded = load("qqp", tmp_path)
    assert loaded.splits["train"].texts == [("a", "")] * 2
    assert any("2 broken rows" in note for note in loaded.notes)
    assert any("QQP-20k is a part" in note for note in loaded.notes)
    train.write_text(tsv(header, good, *["6|1|2|a"] * 9))
    fails(lambda: load("qqp", tmp_path), "4 columns, not 6", f"{train}, line 11")
    train.write_text(tsv(header, good, good + "|more"))
    fails(lambda: load("qqp", tmp_path), "7 columns, not 6", f"{train}, line 3")
    train.write_text(tsv(header, good))
    dev.write_text(tsv(header, "6|1|2|a"))
    fails(lambda: load("qqp", tmp_path), "4 columns, not 6", f"{dev}, line 2")


def test_bad_folders_of_glue(write: Write, tmp_path: Path) -> None:
    path = write("RTE/train.tsv", tsv("index|sentence1|sentence2|label", "0|a|b|entails"))
    fails(lambda: load("rte", tmp_path), "The dev set of RTE is not here", tmp_path / "RTE")
    write("RTE/dev.tsv", tsv("index|sentence1|sentence2|label", "0|a|b|entailment"))
    fails(lambda: load("rte", tmp_path), "'entails' is not", f"{path}, line 2", "'entailment'")
    path.write_text(tsv("index|sentence1|label", "0|a|entailment"))
    fails(lambda: load("rte", tmp_path), "no column 'sentence2'", path, "'sentence1'")
    path.write_text(tsv("index|sentence1|sentence2|label"))
    fails(lambda: load("rte", tmp_path), "no rows", path)
    fails(lambda: load("wnli", tmp_path / "RTE"), "train set of WNLI is not here", "RTE")
    fails(lambda: load("rtee", tmp_path), "no task 'rtee'", "task", "'rte'")
    fails(lambda: load("rte", tmp_path / "none"), "No such file", tmp_path / "none")
    fails(lambda: load("rte", tmp_path, label="x"), "are fixed", "label")


# ---------------------------------------------------------------- saved by `datasets`


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        (["entailment", "neutral", "contradiction"], [0, 1, 2, 0]),
        (["contradiction", "neutral", "entailment"], [2, 1, 0, 2]),
        (None, [0, 1, 2, 0]),
    ],
)
def test_saved_mnli_by_name_or_in_the_order_of_the_hub(
    tmp_path: Path, names: list[str] | None, numbers: list[int]
) -> None:
    texts = {"premise": list("abcd"), "hypothesis": list("efgh"), "idx": [7, 8, 9, 10]}
    for split in ("train", "validation_matched", "validation_mismatched"):
        save_to_disk(tmp_path / "mnli" / split, names, **texts, label=numbers)
    save_to_disk(tmp_path / "mnli" / "test_matched", names, **texts, label=[-1] * 4)
    loaded = load("mnli", tmp_path)
    expected = ["entailment", "neutral", "contradiction", "entailment"]
    assert labels(loaded, "train") == labels(loaded, "dev_mismatched") == expected
    assert loaded.splits["dev"].texts[1] == ("b", "f")
    assert loaded.splits["test"].labels == []
    assert loaded.splits["test"].ids == ["7", "8", "9", "10"]


def test_saved_tasks_of_other_kinds(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        save_to_disk(
            tmp_path / "cola" / split, ["unacceptable", "acceptable"], sentence=["a"], label=[1]
        )
        save_to_disk(tmp_path / "stsb" / split, sentence1=["a"], sentence2=["b"], label=[4.5])
        save_to_disk(
            tmp_path / "wnli" / split,
            ["not_entailment", "entailment"],
            sentence1=["a"],
            sentence2=["b"],
            label=[1],
        )
    save_to_disk(tmp_path / "stsb" / "test", sentence1=["a"], sentence2=["b"], label=[-1.0])
    assert load("cola", tmp_path).splits["dev"].labels == [1]
    assert load("wnli", tmp_path).splits["dev"].labels == [1]
    assert load("stsb", tmp_path).splits["train"].labels == [4.5]
    assert load("stsb", tmp_path).splits["test"].labels == []
    damaged = tmp_path / "cola" / "train"
    (damaged / "data-0.arrow").write_bytes(b"nonsense")
    fails(lambda: load("cola", tmp_path), "cannot be read", damaged)


# ---------------------------------------------------------------- server files


def test_predictions_as_the_server_takes_them(tmp_path: Path) -> None:
    out = tmp_path / "new" / "test"
    path = write_predictions(GLUE["mnli"], "test_mismatched", ["0", "1"], [2, 0], out)
    assert path == out / "MNLI-mm.tsv"
    assert path.read_text() == "index\tprediction\n0\tneutral\n1\tcontradiction\n"
    path = write_predictions(GLUE["stsb"], "test", ["0", "1"], [5.31, 2.71828], out)
    assert path.name == "STS-B.tsv"
    assert path.read_text() == "index\tprediction\n0\t5.000\n1\t2.718\n"
    names = ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI-m", "QNLI", "RTE", "WNLI", "AX")
    for task, name in zip(GLUE.values(), names, strict=True):
        assert write_predictions(task, "test", [], [], out).name == f"{name}.tsv"
    own = Task(name="own", kind="tagging", metric="f1", labels=("O", "B-X"))
    assert write_predictions(own, "test", ["0"], [[1, 0]], out).read_text().endswith("0\tB-X O\n")
    number = Task(name="own", kind="regression", metric="spearman")
    assert write_predictions(number, "test", ["0"], [-7.5], out).read_text().endswith("-7.500\n")
    small = replace(number, scale=2e-5)
    assert "1.234e-05" in f"{float(written(small, [1.2344e-5], out)[0][1]):.3e}"
    odd = Task(name="own", kind="classification", metric="f1", labels=('a\tb "c"', "d\ne"))
    assert written(odd, [0, 1], out) == [["x\t0", 'a\tb "c"'], ["x\t1", "d\ne"]]


def written(task: Task, predictions: Sequence[Any], out: Path) -> list[list[str]]:
    """The rows of a file of predictions, read by another program."""
    ids = [f"x\t{number}" for number in range(len(predictions))]
    path = write_predictions(task, "test", ids, predictions, out)
    with open(path, newline="") as file:
        return [*csv.reader(file, delimiter="\t")][1:]


# ---------------------------------------------------------------- a user's tables

ROWS = [{"text": f"row {n}", "label": "yes" if n % 3 else "no", "n": n} for n in range(60)]


def table(suffix: str, rows: list[dict[str, Any]], path: Path) -> Path:
    path = path.with_name(path.name + suffix)
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        join = {".csv": ",", ".tsv": "\t"}[suffix].join
        cells = [join('"' + str(v).replace('"', '""') + '"' for v in row.values()) for row in rows]
        path.write_text("\n".join([join(rows[0]), *cells]) + "\n")
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_format_gives_the_same_task(tmp_path: Path, suffix: str) -> None:
    rows = [{**row, "text": f'{row["text"]}, "x"\ty\nz é'} for row in ROWS]
    loaded = load(None, table(suffix, rows, tmp_path / "mine"))
    assert loaded.task == Task(
        name="mine",
        kind="classification",
        metric="accuracy",
        texts=("text",),
        labels=("no", "yes"),
    )
    train, dev = loaded.splits["train"], loaded.splits["dev"]
    assert list(loaded.splits) == ["train", "dev"]
    assert sorted(train.texts + dev.texts) == sorted((row["text"],) for row in rows)
    assert 1 <= len(dev.texts) <= 15
    for split in (train, dev):
        for (text,), label in zip(split.texts, split.labels, strict=True):
            assert label == bool(int(text.split()[1].rstrip(",")) % 3)
    assert any("held" in note or "dev is" in note for note in loaded.notes)
    again = load(None, table(suffix, rows[::-1], tmp_path / "again"))
    assert set(again.splits["dev"].texts) == set(dev.texts)


def test_files_of_a_directory_by_their_names(tmp_path: Path) -> None:
    table(".csv", ROWS[:40], tmp_path / "train")
    table(".jsonl", ROWS[40:50], tmp_path / "validation")
    table(".csv", [{"text": "t"}], tmp_path / "test")
    (tmp_path / "README.md").write_text("train")
    loaded = load(None, tmp_path)
    assert {s: len(e.texts) for s, e in loaded.splits.items()} == {
        "train": 40,
        "dev": 10,
        "test": 1,
    }
    assert list(loaded.splits) == ["train", "dev", "test"]
    assert loaded.splits["test"].labels == []
    given = table(".tsv", ROWS[50:], tmp_path / "other")
    loaded = load(None, tmp_path, dev=given, test=given)
    assert len(loaded.splits["dev"].texts) == len(loaded.splits["test"].labels) == 10
    table(".csv", ROWS, tmp_path / "dev")
    fails(lambda: load(None, tmp_path), "Two files for dev: dev.csv and validation", tmp_path)
    (tmp_path / "train.csv").unlink()
    (tmp_path / "dev.csv").unlink()
    fails(lambda: load(None, tmp_path), "no training file", tmp_path)


@pytest.mark.parametrize(
    ("values", "kind", "names", "note"),
    [
        (["b", "a"], "classification", ("a", "b"), "2 classes ('a', 'b'), as 'a' is not a number;"),
        (["10", "9", "-1"], "classification", ("-1", "9", "10"), "3 different whole"),
        (["1.0", "0.0", "0.0"], "classification", ("0", "1"), "2 different whole"),
        ([str(n) for n in range(30)], "classification", tuple(map(str, range(30))), "30"),
        ([str(n * n) for n in range(30)], "regression", (), "30 different whole"),
        (["0.5", "2", "-4"], "regression", (), "decimals; --kind classification if not so"),
        (["1", "2", "x"], "classification", ("1", "2", "x"), "'x' is not a number; --kind regr"),
        (["1_1", "1_2"], "classification", ("1_1", "1_2"), "'1_1' is not a number;"),
        (
            ["?", "1,5", "2", "3,6"],
            "classification",
            ("1,5", "2", "3,6", "?"),
            "4 classes ('1,5', '2', '3,6', …), as '1,5' is not a number (write 1.5 if it is one);",
        ),
    ],
)
def test_the_kind_is_found_and_said(
    tmp_path: Path, values: list[str], kind: str, names: tuple[str, ...], note: str
) -> None:
    rows = [{"text": f"t{n}", "label": value} for n, value in enumerate(values * 60)]
    loaded = load(None, table(".csv", rows, tmp_path / "a"))
    assert (loaded.task.kind, loaded.task.labels) == (kind, names)
    assert any(text.startswith(f"{kind}: ") and note in text for text in loaded.notes)
    if kind == "regression":
        assert loaded.task.metric == "spearman"
        numbers = [float(value) for value in values]
        assert loaded.task.offset == pytest.approx(statistics.fmean(numbers))
        assert loaded.task.scale == pytest.approx(statistics.pstdev(numbers))
        assert {*map(float, values)} >= {*loaded.splits["train"].labels}


def test_the_kind_can_be_forced(tmp_path: Path) -> None:
    rows = [{"a": f"t{n}", "b": "same", "y": n % 5} for n in range(100)]
    path = table(".jsonl", rows, tmp_path / "a")
    loaded = load(None, path, texts=["a", "b"], label="y", kind="regression")
    assert (loaded.task.texts, loaded.task.label) == (("a", "b"), "y")
    assert (loaded.task.offset, loaded.task.scale) == pytest.approx((2.0, math.sqrt(2)))
    assert set(loaded.splits["train"].labels) == {0.0, 1.0, 2.0, 3.0, 4.0}
    rows = [{"text": f"t{n}", "label": n % 10 / 4} for n in range(100)]
    path = table(".jsonl", rows, tmp_path / "b")
    labels = load(None, path, kind="classification").task.labels
    assert labels == ("0", "0.25", "0.5", "0.75", "1", "1.25", "1.5", "1.75", "2", "2.25")


@pytest.mark.parametrize(
    ("values", "offset", "scale"),
    [([2000.1] * 3, 2000.1, 1.0), ([-1e308, 1e308], 0.0, 1e308), ([1e-9, 3e-9], 2e-9, 1e-9)],
)
def test_numbers_of_any_size_have_a_scale(
    tmp_path: Path, values: list[float], offset: float, scale: float
) -> None:
    rows = [{"text": f"t{n}", "label": value} for n, value in enumerate(values * 60)]
    task = load(None, table(".jsonl", rows, tmp_path / "a"), kind="regression").task
    assert (task.offset, task.scale) == pytest.approx((offset, scale))


def test_class_names_stored_in_parquet(tmp_path: Path) -> None:
    rows = pa.table({"text": [f"t{n}" for n in range(50)], "label": [n % 2 for n in range(50)]})
    info = {"info": {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}}}
    path = tmp_path / "train.parquet"
    pq.write_table(rows.replace_schema_metadata({"huggingface": json.dumps(info)}), path)
    assert load(None, path).task.labels == ("no", "yes")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.sampled_from("abc")), min_size=80, max_size=120))
def test_the_same_text_is_never_in_both_parts(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, str]]
) -> None:
    values = [{"text": f"Text  {n}" if n % 2 else f"text {n}", "label": y} for n, y in rows]
    values += [{"text": f"only {y}", "label": y} for y in "abc"]
    values += [{"text": row["text"].upper().replace("  ", " "), "label": "a"} for row in values]
    values += [{"text": f"many {n}", "label": "a"} for n in range(60)]
    loaded = load(None, table(".jsonl", values, tmp_path_factory.mktemp("split") / "a"))
    parts = [
        {" ".join(text.lower().split()) for (text,) in loaded.splits[split].texts}
        for split in ("train", "dev")
    ]
    assert not parts[0] & parts[1]
    assert set(loaded.splits["train"].labels) == {0, 1, 2}


def test_a_pair_in_the_other_order_is_the_same_text(tmp_path: Path) -> None:
    pairs = [(f"a{n}", f"b{n}") for n in range(80)]
    rows = [{"sentence1": a, "sentence2": b, "label": n % 2} for n, (a, b) in enumerate(pairs)]
    rows += [{"sentence1": b, "sentence2": a, "label": 1} for a, b in pairs]
    loaded = load(None, table(".csv", rows, tmp_path / "a"))
    assert loaded.task.texts == ("sentence1", "sentence2")
    for split in loaded.splits.values():
        assert {(b, a) for a, b in split.texts} == set(split.texts)


@pytest.mark.parametrize(
    ("texts", "label"), [(("a", "b", "c"), "y"), (("a", "a"), "y"), (("a", "y"), "y")]
)
def test_columns_that_are_no_texts_and_a_label(
    tmp_path: Path, texts: tuple[str, ...], label: str
) -> None:
    rows = [{"a": f"a{n}", "b": "b", "c": "c", "y": str(n % 2)} for n in range(60)]
    path = table(".csv", rows, tmp_path / "a")
    fails(lambda: load(None, path, texts=texts, label=label), "not one or two texts", "label")


def test_words_and_tags_have_no_names(tmp_path: Path, write: Write) -> None:
    """What would have been ignored."""
    write("train.conll", "one O\n")
    fails(lambda: load(None, tmp_path, texts=["tokens"]), "no columns to name", "text, label")


@pytest.mark.parametrize("label", [["a"], {"a": 1}])
def test_a_label_of_several_values(tmp_path: Path, label: Any) -> None:
    path = table(".jsonl", [{"text": "t", "label": label}] * 60, tmp_path / "a")
    fails(lambda: load(None, path), "'label' is .*, not a label", "line 1", "one class")


def test_a_row_whose_id_is_null_has_its_number(tmp_path: Path) -> None:
    rows = [{"text": "a", "id": None}, {"text": "b", "id": 7}]
    task = Task(name="own", kind="classification", metric="f1", texts=("text",))
    assert read_inputs(table(".jsonl", rows, tmp_path / "a"), task).ids == ["0", "7"]


CSV = "text,label\none,a\ntwo,b\n"


@pytest.mark.parametrize(
    ("name", "content", "what", "where", "fix"),
    [
        ("a.csv", "txt,label\none,a\n", "no column 'text'", "line 2", "'txt'"),
        ("a.csv", "text,lable\none,a\n", "no column 'label'", "line 2", "'lable'"),
        ("a.csv", CSV + " ,a\n", "'text' is empty", "line 4", ""),
        ("a.csv", CSV + "\nthree,\n", r"label is missing \(in 1 of 3", "line 5", ""),
        ("a.csv", "text,label\none,a\ntwo,\n", "missing .in 1 of 2", "line 3", ""),
        ("a.csv", CSV + "three\n", "1 columns, not 2", "line 4", ""),
        ("a.csv", CSV + '"x\ny",a\nthree,b,c\n', "3 columns, not 2", "line 6", ""),
        ("a.csv", CSV + '"three,b\n', "Broken row", "line 4", "quotation"),
        ("a.csv", CSV + '"th"ree,b\n', "Broken row", "line 4", "quotation"),
        ("a.csv", CSV + f'"{"x" * (1 << 20)}\n",b\n', "field limit", "line 4", "quotation"),
        ("a.csv", CSV.encode() + b"thr\xe9e,a\n", "not valid UTF-8", "line 4, byte 26", "iconv"),
        ("a.csv", "text,label,text\na,b,c\n", "Two columns have the name 'text'", "line 1", ""),
        ("a.csv", "", "no rows", "a.csv", ""),
        ("a.csv", "text,label\n", "no rows", "a.csv", ""),
        ("a.csv", "text,label\none,a\ntwo,a\n", "All labels .* 'a'", "a.csv", "two classes"),
        ("a.csv", CSV, "2 rows are too few", "a.csv", "dev"),
        ("a.csv", "text,label\n1,0.5\n2,0.7\n3,x\n", "'x' is not a number", "line 4", ""),
        ("a.xls", "x", "'.xls' file is not a table", "a.xls", ".csv"),
        ("a.jsonl", '{"text": "one", "label": "a"}\n{"text"', "Broken JSON", "line 2", ""),
        ("a.jsonl", '["one"]', "not a JSON object", "line 1", ""),
        ("a.jsonl", '{"text": 3, "label": 1}', "is 3, not a text", "line 1", ""),
        ("a.jsonl", '{"text": null, "label": 1}', "is empty", "line 1", ""),
        ("a.jsonl", '{"text": "\\ud800", "label": 1}', "surrogates", "line 1", ""),
        ("a.jsonl", '{"text": "a", "label": null}', "label is missing", "line 1", ""),
        ("a.parquet", b"PAR1 nonsense", "cannot be read", "row 1", ""),
    ],
)
def test_bad_tables(
    write: Write, name: str, content: bytes | str, what: str, where: str, fix: str
) -> None:
    path = write(name, content)
    dev = write("dev.csv", "text,label\nd,1\n" if "0.5" in str(content) else "text,label\nd,a\n")
    error = fails(lambda: load(None, path, dev=None if "few" in what else dev), what, path, fix)
    assert error.where.endswith(where)


def test_labels_that_are_only_in_dev_or_test(write: Write) -> None:
    train = write("train.csv", CSV)
    for split in ("dev", "test"):
        bad = write(f"{split}.csv", "text,label\nx,a\ny,bb\n")
        place = f"{bad}, line 3"
        fails(lambda: load(None, train.parent), "'bb' is not a class", place, "'b'")
        bad.write_text(CSV)
    fails(lambda: load(None, train.with_name("none.csv")), "No such file", "none.csv")


def test_numbers_with_commas_are_named_where_rows_are_too_few(tmp_path: Path) -> None:
    rows = [{"text": f"t{n}", "label": f"{n},6"} for n in range(60)]
    path = table(".csv", rows, tmp_path / "a")
    fails(lambda: load(None, path), "60 rows are too few", path, "write 0.6 if it is one); --kind")


def test_all_missing_labels_of_a_file_are_counted(tmp_path: Path) -> None:
    """Also those of rows that would have been held out."""
    rows = [{"text": f"t{n}", "label": "ab"[n % 2] if n % 3 else ""} for n in range(1, 61)]
    path = table(".csv", rows, tmp_path / "a")
    fails(lambda: load(None, path), r"missing \(in 20 of 60 rows\)", f"{path}, line 4")


def test_a_test_set_is_answered_wholly_or_not_at_all(write: Write) -> None:
    train, dev = write("train.csv", CSV), write("dev.csv", CSV)
    test = write("test.csv", "text,label\nx,\ny,\n")
    assert load(None, train, dev=dev, test=test).splits["test"].labels == []
    test.write_text("text,label\nx,a\ny,\n")
    fails(lambda: load(None, train, dev=dev, test=test), "label is missing", f"{test}, line 3")


def test_values_that_are_no_strings(tmp_path: Path) -> None:
    rows = [{"text": f"t{n}", "label": [True, False][n % 2]} for n in range(80)]
    assert load(None, table(".parquet", rows, tmp_path / "a")).task.labels == ("False", "True")
    rows = [{"text": f"t{n}", "label": [1.0, 2.0][n % 2]} for n in range(80)]
    assert load(None, table(".parquet", rows, tmp_path / "b")).task.labels == ("1", "2")
    rows[7]["label"] = float("nan")
    path = table(".parquet", rows, tmp_path / "c")
    fails(lambda: load(None, path), "label is missing", f"{path}, row 8")


# ---------------------------------------------------------------- words and tags

CONLL = "-DOCSTART- -X- O\n\nU.N. NNP B-ORG\nsays VB O\n\n\nno\u00a0one NN O\n"


def test_words_and_tags(write: Write, tmp_path: Path) -> None:
    write("train.txt", CONLL)
    write("testa.txt", CONLL.replace(" ", "\t").replace("\n", "\r\n"))
    write("testb.txt", "Rome NNP B-LOC\n")
    loaded = load(None, tmp_path)
    assert loaded.task.labels == ("O", "B-LOC", "B-ORG")
    assert (loaded.task.kind, loaded.task.metric, loaded.task.length) == ("tagging", "f1", 256)
    for split in ("train", "dev"):
        assert loaded.splits[split].texts == [("U.N.", "says"), ("no\u00a0one",)]
        assert loaded.splits[split].labels == [[2, 0], [0]]
    assert list(loaded.splits) == ["train", "dev", "test"]
    assert any("never occur in training: B-LOC" in note for note in loaded.notes)


def test_tags_of_other_sorts_and_a_held_out_part(write: Write) -> None:
    sentences = [f"w{n} DT\nx NN\n\n" for n in range(100)]
    loaded = load(None, write("a.tsv", "".join(sentences)), kind="tagging")
    assert (loaded.task.metric, loaded.task.labels) == ("accuracy", ("DT", "NN"))
    assert 1 <= len(loaded.splits["dev"].texts) < 30
    assert not set(loaded.splits["dev"].texts) & set(loaded.splits["train"].texts)
    assert len(loaded.splits["dev"].texts) + len(loaded.splits["train"].texts) == 100


@pytest.mark.parametrize(
    ("content", "what", "where"),
    [
        ("a O\nb B-X\n\nc\n", "1 columns, not 2", "line 4"),
        ("a\nb\n", "label is missing", ""),
        ("\n\n", "no rows", ""),
        ("a O\nb O\n", "All labels", ""),
    ],
)
def test_bad_words_and_tags(write: Write, content: str, what: str, where: str) -> None:
    path = write("a.conll", content)
    dev = write("b.conll", "a O\nb O\n")
    fails(lambda: load(None, path, dev=dev if what == "All labels" else None), what, path)
    fails(lambda: load(None, path, dev=path), what, where)


# ---------------------------------------------------------------- inputs of predict


def test_inputs_in_every_format(write: Write, tmp_path: Path) -> None:
    task = GLUE["rte"]
    plain = write("a.txt", "one\ttwo\nthree\tfour\n")
    expected = [("one", "two"), ("three", "four")]
    rows = [{"id": f"r{n}", "sentence1": a, "sentence2": b} for n, (a, b) in enumerate(expected)]
    assert read_inputs(plain, task).texts == expected
    assert read_inputs(plain, task).ids == ["0", "1"]
    for suffix in (".csv", ".tsv", ".jsonl", ".parquet"):
        found = read_inputs(table(suffix, rows, tmp_path / "b"), task)
        assert (found.texts, found.labels, found.ids) == (expected, [], ["r0", "r1"])
    words = Task(name="t", kind="tagging", metric="f1", labels=("O", "B-X"))
    for content in ("Rome\nwins\n\nYes\n", "Rome NN\nwins VB\n\nYes UH\n"):
        found = read_inputs(write("c.txt", content), words)
        assert (found.texts, found.labels) == ([("Rome", "wins"), ("Yes",)], [])


def test_text_is_no_column_of_words(write: Write) -> None:
    """Only the first word of each line would be read, without a word about it."""
    task = Task(name="t", kind="tagging", metric="f1", labels=("O", "B-X"))
    fix = "one word per line, a blank line between sentences; or give the sentence"
    path = write("a.txt", "The dog runs\nThe cat sleeps\n")
    fails(lambda: read_inputs(path, task), "lines of text, not words", f"{path}, line 1", fix)
    path.write_text("The dog runs\nThe cat\n")
    fails(lambda: read_inputs(path, task), "2 columns, not 3", f"{path}, line 2", fix)
    for content in ("Rome B-X\nwins VB\n", "Rome\tNN\nwins\tVB\n", "Rome NN\n\nwins VB\n"):
        path.write_text(content)
        assert sum((words for words in read_inputs(path, task).texts), ()) == ("Rome", "wins")


def test_bad_inputs(write: Write) -> None:
    task = GLUE["rte"]
    path = write("a.txt", "one\ttwo\nthree\n")
    fails(lambda: read_inputs(path, task), "1 columns, not 2", f"{path}, line 2")
    fails(lambda: read_inputs(write("b.txt", "a\n\n"), GLUE["sst2"]), "empty", "line 2")
    fails(lambda: read_inputs(write("c.txt", ""), task), "no rows", "c.txt")
    fails(lambda: read_inputs(write("d.csv", "text\na\n"), task), "no column", "line 2")


def test_the_limit_of_a_field_is_not_that_of_a_text(write: Write) -> None:
    long = "x " * (electra.finetuning.tasks._MAX_FIELD // 4)
    task = Task(name="t", kind="classification", metric="accuracy", texts=("text",))
    assert read_inputs(write("a.csv", f"text\n{long}\n"), task).texts == [(long,)]
