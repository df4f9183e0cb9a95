"""`import electra`: quick and silent, the same as the command line, at home in a notebook."""

from __future__ import annotations

import contextlib
import csv
import importlib
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import notebook as notebooks
import numpy as np
import pytest
import torch
from conftest import MODULES, SEQUENCE_LENGTH, language

import electra
from electra.data.corpus import Corpus
from electra.errors import ElectraError, Stopped
from electra.finetuning import tasks
from electra.finetuning.glue import predict_rows
from electra.formats import hf
from electra.rundir import load_run
from electra.runlog import read_metrics
from electra.studies import records
from electra.use.demo_text import find_text
from electra.use.detect import Alternative, Detection, Token, Word, detect
from electra.use.embed import embed

ROOT = Path(__file__).parents[1]
SETTINGS: dict[str, Any] = {
    "encoder": {"layers": 2, "hidden_size": 20, "ffn_size": 28, "attention_heads": 2,
                "embedding_size": 14, "max_positions": 29},
    "generator": {"width": 0.5, "depth": 0.5},
    "data": {"sequence_length": SEQUENCE_LENGTH, "batch_size": 8},
    "run": {"train_steps": 12, "threads": 1, "device": "cpu", "log_every": 4, "eval_every": 6},
}  # fmt: skip
TUNE: dict[str, Any] = {"text": "text", "label": "label", "epochs": 2, "threads": 1, "seeds": 2}


class Made(NamedTuple):
    here: Path
    corpus: Corpus
    model: electra.Model
    tuned: electra.Finetuned
    told: str


@pytest.fixture(scope="module")
def made(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The whole way, once, and what it said on the way."""
    here = tmp_path_factory.mktemp("library")
    rows = [line for line in language(30, seed=1).splitlines() if line]
    with open(here / "mine.csv", "w", newline="") as file:
        table = [("text", "label"), *((row, "many" if "all" in row else "one") for row in rows)]
        csv.writer(file).writerows(table)
    with pytest.MonkeyPatch.context() as patch:
        told: list[str] = []
        for stream in (sys.stdout, sys.stderr):
            patch.setattr(stream, "write", told.append)
        corpus = electra.prepare(
            text, here / "corpus", vocab_size=97, length=SEQUENCE_LENGTH, held_out_percent=10.0
        )
        model = electra.train("tiny", corpus, here / "run", **SETTINGS)
        tuned = model.finetune(here / "mine.csv", here / "tuned", **TUNE)
    return Made(here, corpus, model, tuned, "".join(told))


# ---------------------------------------------------------------------- import


def test_the_import_is_quick_and_loads_nothing() -> None:
    code = (
        "import sys, time; begin = time.process_time(); import electra\n"
        "seconds = time.process_time() - begin\n"
        "heavy = {'torch', 'numpy', 'rich', 'pyarrow', 'matplotlib', 'tyro'} & set(sys.modules)\n"
        "print(seconds, *heavy)\n"
    )
    seconds = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        taken, *heavy = done.stdout.split()
        assert heavy == [], done.stderr
        seconds.append(float(taken))
    assert min(seconds) < 0.1


def test_every_public_name_is_there_and_documented() -> None:
    assert set(electra.__all__) <= set(dir(electra))
    for name in set(electra.__all__) - {"__version__"}:
        assert getattr(electra, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = electra.trian
    assert (ROOT / "electra" / "py.typed").exists()


def test_no_function_hides_behind_a_module_of_its_name() -> None:
    """A module that is imported becomes an attribute of the package, whatever stood there."""
    for name in MODULES.values():
        if name != "electra.formats.unpickle":
            importlib.import_module(name)
    assert all(callable(getattr(electra, n)) for n in electra.__all__ if n != "__version__")


# ---------------------------------------------------------------------- the same as the commands


def test_nothing_is_printed(made: Made) -> None:
    assert made.told == ""


def test_lines_are_printed_when_asked(
    made: Made, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    electra.prepare(text, tmp_path / "c", tokenizer=made.here / "corpus" / "tokenizer", quiet=False)
    run = {**SETTINGS, "run": {**SETTINGS["run"], "train_steps": 2}}
    electra.train("tiny", made.corpus, tmp_path / "run", quiet=False, **run)
    shown = capsys.readouterr()
    assert "documents" in shown.out
    assert "100.0 %" in shown.err
    assert "\x1b" not in shown.err


def test_the_same_calls_again_continue(made: Made, text: Path, tmp_path: Path) -> None:
    before = (made.here / "run" / "metrics.jsonl").read_bytes()
    again = electra.prepare(
        text, made.here / "corpus", vocab_size=97, length=SEQUENCE_LENGTH, held_out_percent=10.0
    )
    assert again.fingerprint == made.corpus.fingerprint
    run = shutil.copytree(made.here / "run", tmp_path / "run")
    electra.train("tiny", str(made.here / "corpus"), run, **SETTINGS)
    assert (run / "metrics.jsonl").read_bytes() == before
    longer = {**SETTINGS, "run": {**SETTINGS["run"], "train_steps": 16}}
    electra.train("tiny", made.corpus, run, **longer)
    assert max(m["step"] for m in read_metrics(run)) == 16


def test_a_misspelt_setting_is_told_with_the_nearest_name(made: Made, tmp_path: Path) -> None:
    with pytest.raises(ElectraError, match="no setting 'minuts'") as told:
        electra.train("tiny", made.corpus, tmp_path / "run", run={"minuts": 3})
    assert "did you mean 'minutes'?" in told.value.fix
    with pytest.raises(ElectraError, match="no setting 'epoch'"):
        made.model.finetune(made.here / "mine.csv", tmp_path / "t", **{**TUNE, "epoch": 3})


def test_a_misspelt_argument_is_told_before_anything_is_done(
    made: Made, text: Path, tmp_path: Path
) -> None:
    calls = {
        "length": lambda: electra.prepare(text, tmp_path / "c", sequence_length=32),
        "held_out_percent": lambda: electra.prepare(text, tmp_path / "c", heldout_percent=1),
        "threads": lambda: made.model.embed(["a"], thread=1),
    }
    for name, call in calls.items():
        with pytest.raises(ElectraError) as caught:
            call()
        assert caught.value.fix == f"did you mean {name!r}?"
    assert not (tmp_path / "c").exists()


def test_words_for_a_choice_are_one_of_them(made: Made, tmp_path: Path) -> None:
    """Not what the last branch of an if happens to do."""
    unknown: Any = "none of them"
    for call in (
        lambda: made.model.embed(["a"], pooling=unknown),
        lambda: made.model.finetune(made.here / "mine.csv", tmp_path / "r", kind=unknown),
        lambda: electra.train("tiny", made.corpus, tmp_path / "r", profile=unknown),
    ):
        with pytest.raises(ElectraError, match="'none of them'"):
            call()


def test_one_line_is_one_vector_and_no_texts_are_no_answers(made: Made) -> None:
    assert np.array_equal(made.model.embed("one bird"), made.model.embed(["one bird"]))
    assert made.tuned.predict([]) == []


@pytest.mark.parametrize("nothing", [None, float("nan"), 3, "\ud800", b"a"])
def test_what_is_no_text_is_refused(made: Made, nothing: Any) -> None:
    """A column with gaps, above all."""
    for call in (
        lambda: made.model.detect(nothing),
        lambda: made.model.encode(nothing),
        lambda: made.model.embed(["one bird", nothing]),
        lambda: made.tuned.predict(["one bird", nothing]),
    ):
        with pytest.raises(ElectraError, match="is no text of whole characters"):
            call()


def test_several_texts_where_one_is_taken(made: Made) -> None:
    for call in (made.model.detect, made.model.encode):
        several: Any = ["one bird", "two"]
        with pytest.raises(ElectraError, match="takes one text, given are 2") as told:
            call(several)
        assert told.value.fix == "call it for each"


def test_a_table_is_not_its_columns(made: Made) -> None:
    """Whose names are what a loop over it gives."""
    rows = {"text": ["one bird", "all birds"]}
    for table in (rows, pytest.importorskip("pandas").DataFrame(rows)):
        one, many = (made.model.detect, made.model.encode), (made.model.embed, made.tuned.predict)
        for call, given in (
            *itertools.product((*one, *many), [table]),
            *itertools.product(many, [[table]]),
        ):
            with pytest.raises(ElectraError, match="table is given") as told:
                call(given)
            assert told.value.where == call.__name__
            assert "df['text']" in told.value.fix
        assert len(made.model.embed(table["text"])) == len(made.tuned.predict(table["text"])) == 2


def test_training_can_start_from_a_model(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"run": SETTINGS["run"] | {"train_steps": 1}, "data": SETTINGS["data"]}
    optim = {"learning_rate": 1e-12}
    made.model.export(tmp_path / "model")
    start = tmp_path / "model"
    electra.train("tiny", made.corpus, tmp_path / "run", init=start, optim=optim, **settings)
    electra.train("small", made.corpus, tmp_path / "small", init=start, **settings)
    a, b = (hf.load_encoder(tmp_path / name) for name in ("run", "model"))
    for name, tensor in a.tensors.items():
        torch.testing.assert_close(tensor, b.tensors[name], rtol=0, atol=1e-6)
    assert json.loads((tmp_path / "run" / "run.json").read_bytes())["init"].endswith("model")
    # As the command does, which has the warm-up of a million steps in a share of these.
    used = json.loads((tmp_path / "small" / "config.json").read_bytes())
    assert used["optim"]["warmup_percent"] == 6.0
    capsys.readouterr()
    half = start / "discriminator"
    generator = {"depth": 1.0, "width": 1.0}
    electra.train(
        *("tiny", made.corpus, tmp_path / "half"),
        **settings,
        init=half,
        quiet=False,
        generator=generator,
    )
    assert "holds no generator" in capsys.readouterr().err


def test_detect_embed_and_encode_are_those_of_the_commands(made: Made) -> None:
    sentence = "one old river sees all songs ."
    assert made.model.detect(sentence) == detect(made.here / "run", sentence)
    lines = [sentence, "", "all birds"]
    for _ in range(2):
        assert np.array_equal(made.model.embed(lines), embed(made.here / "run", lines))
    first = made.model.embed(lines, pooling="cls")
    assert np.array_equal(first, embed(made.here / "run", lines, pooling="cls"))
    tokens, states = made.model.encode(sentence)
    assert (tokens[0], tokens[-1]) == ("[CLS]", "[SEP]")
    assert states.shape == (len(tokens), 20)
    np.testing.assert_allclose(states[0], first[0], atol=1e-5)
    np.testing.assert_allclose(states.mean(0), made.model.embed(lines)[0], atol=1e-5)
    with pytest.raises(ElectraError, match="reads at most 29"):
        made.model.encode("old " * 40)


def test_an_export_opens_as_the_run_does(made: Made, tmp_path: Path) -> None:
    done = made.model.export(tmp_path / "model", license="mit")
    assert [path.name for path in done.directories] == ["discriminator", "generator"]
    assert 'license: "mit"' in (done.directories[0] / "README.md").read_text("utf-8")
    sentence = "one old river sees all songs ."
    seen = made.model.detect(sentence)
    for place in (tmp_path / "model", str(tmp_path / "model" / "discriminator")):
        assert electra.load(place).detect(sentence) == seen
    electra.load(tmp_path / "model").export(tmp_path / "copy")
    assert electra.load(tmp_path / "copy").detect(sentence) == seen
    assert "discriminator of 2 × 20" in repr(electra.load(tmp_path / "model"))


def test_any_checkpoint_of_a_run_can_be_exported(made: Made, tmp_path: Path) -> None:
    run = {**SETTINGS["run"], "save_every": 6, "keep_checkpoints": 3}
    model = electra.train("tiny", made.corpus, tmp_path / "run", **{**SETTINGS, "run": run})
    model.export(tmp_path / "newest")
    model.export(tmp_path / "early", step=6)
    steps = [
        json.loads((tmp_path / n / "electra.json").read_bytes())["step"]
        for n in ("newest", "early")
    ]
    assert steps == [12, 6]
    for name, step in (("newest", 12), ("early", 6)):
        trained = dict(load_run(tmp_path / "run", step=step).objective.encoder.named_parameters())
        for part, tensor in hf.load_encoder(tmp_path / name).tensors.items():
            assert torch.equal(tensor, trained[part])
    with pytest.raises(ElectraError, match="5"):
        model.export(tmp_path / "none", step=5)
    with pytest.raises(ElectraError, match="Only a run has checkpoints"):
        electra.load(tmp_path / "early").export(tmp_path / "none", step=6)
    assert not (tmp_path / "none").exists()


def test_own_classes_are_told_apart(made: Made) -> None:
    results, labels = made.tuned.results, ("many", "one")
    best = max(results["seeds"], key=lambda seed: seed["score"])
    counts = results["confusion"]["dev"]
    cells = [[counts.get(y, {}).get(p, 0) for p in labels] for y in labels]
    (a, b), (c, d) = cells
    assert best["scores"]["dev"]["accuracy"] == pytest.approx((a + d) / (a + b + c + d))
    halves = [2 * hits / (2 * hits + b + c) if hits + b + c else 1.0 for hits in (a, d)]
    assert best["scores"]["dev"]["macro_f1"] == pytest.approx(sum(halves) / 2)
    card = (made.here / "tuned" / "model" / "README.md").read_text()
    shown = str(electra.compare(made.here / "tuned"))
    for text in (card, shown):
        assert f"| `many` | {a} | {b} |\n| `one` | {c} | {d} |" in text
    assert "macro-F1 × 100" in shown


def test_answers_are_those_of_the_command(made: Made) -> None:
    results = json.loads((made.here / "tuned" / "results.json").read_bytes())
    assert made.tuned.results == results
    assert made.tuned.scores == [seed["score"] for seed in results["seeds"]]
    texts = ["all old rivers see songs .", "one bird holds fire ."]
    answers = made.tuned.predict(texts)
    (expected,) = predict_rows(made.here / "tuned", texts[1])
    assert [a["text"] for a in answers] == texts
    assert answers[1]["prediction"] == expected["prediction"]
    assert answers[1]["probability"] == pytest.approx(expected["probability"], abs=1e-5)
    assert made.tuned.predict(texts[0])[0]["prediction"] == answers[0]["prediction"]
    with pytest.raises(ElectraError, match="reads 1 texts, given are 2") as told:
        made.tuned.predict([("a", "b")])
    assert "one string for each" in told.value.fix
    assert electra.load_finetuned(made.here / "tuned" / "model").task.labels == ("many", "one")
    for place in ("tuned", "tuned/model"):
        with pytest.raises(ElectraError, match="was fine-tuned for a task") as told:
            electra.load(made.here / place)
        assert "load_finetuned" in told.value.fix
    with pytest.raises(ElectraError, match="pre-trained model, not a fine-tuned one") as told:
        electra.load_finetuned(made.model.path)
    assert f"electra finetune --model {made.model.path}" in told.value.fix


def _frame(rows: list[dict[str, Any]]) -> Any:
    return pytest.importorskip("pandas").DataFrame(rows)


@pytest.mark.parametrize("form", [list, _frame])
def test_rows_in_memory_are_those_of_a_file(made: Made, tmp_path: Path, form: Any) -> None:
    with open(made.here / "mine.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    parts = {"data": rows[:20], "dev": rows[20:], "test": [{"text": r["text"]} for r in rows[20:]]}
    for name, part in parts.items():
        lines = [json.dumps(row) + "\n" for row in part]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    given = {name: form(part) for name, part in parts.items()}
    files = {name: tmp_path / f"{name}.jsonl" for name in parts}
    tuned = made.model.finetune(out=tmp_path / "memory", **given, **TUNE)
    same = made.model.finetune(out=tmp_path / "files", **files, **TUNE)
    for name in ("model/model.safetensors", "model/head.safetensors", "test/data-test.tsv"):
        a, b = ((tmp_path / place / name).read_bytes() for place in ("memory", "files"))
        assert a == b, name
    records = [
        json.loads((tmp_path / place / "finetune.json").read_bytes())
        for place in ("memory", "files")
    ]
    assert records[0] == records[1]
    assert tuned.scores == same.scores
    # The same rows again continue, from either side; others are refused.
    kept = (tmp_path / "memory" / "results.json").read_bytes()
    made.model.finetune(out=tmp_path / "memory", **given, **TUNE)
    made.model.finetune(out=tmp_path / "memory", **files, **TUNE)
    other_name = {**files, "data": (tmp_path / "data.jsonl").rename(tmp_path / "mine.jsonl")}
    made.model.finetune(out=tmp_path / "memory", **other_name, **TUNE)
    assert (tmp_path / "memory" / "results.json").read_bytes() == kept
    given["data"] = form([*rows[1:20], {"text": "all others", "label": "one"}])
    with pytest.raises(ElectraError, match="another data"):
        made.model.finetune(out=tmp_path / "memory", **given, **TUNE)


_ROW, _OTHER = {"text": "one bird", "label": "one"}, {"text": "all birds", "label": "many"}


@pytest.mark.parametrize(
    ("rows", "what", "where"),
    [
        ([], "There are no rows", "data"),
        ([_ROW, {**_ROW, "text": " "}], "Column 'text' is empty", "data, row 2"),
        ([_ROW, {**_ROW, "text": float("nan")}], "Column 'text' is empty", "data, row 2"),
        ([{**_ROW, "text": 3}], "Column 'text' is 3, not a text", "data, row 1"),
        ([{**_ROW, "text": "a\ud800"}], "no text of whole characters", "data, row 1"),
        ([{"text": "a"}], "There is no column 'label'", "data, row 1"),
        ([_ROW, {**_ROW, "label": None}, _OTHER], "The label is missing", "data, row 2"),
        ([_OTHER, _ROW, {**_ROW, "label": np.float32("nan")}], "label is missing", "data, row 3"),
        ([{**_ROW, "label": ("one",)}], "not a label", "data, row 1"),
        ([{**_ROW, "label": object()}], "not a label", "data, row 1"),
        ([{**_ROW, "label": torch.tensor([1, 0])}], "not a label", "data, row 1"),
        (["one bird"], "The row is no dictionary: str", "data, row 1"),
        ({"text": ["a"], "label": ["b"]}, "These are no rows: dict", "data"),
        (None, "These are no rows: NoneType", "data"),
    ],
)
def test_rows_that_cannot_be_read_are_told(
    made: Made, tmp_path: Path, rows: Any, what: str, where: str
) -> None:
    with pytest.raises(ElectraError, match=what) as told:
        made.model.finetune(rows, tmp_path, dev=[_ROW, _OTHER], **TUNE)
    assert told.value.where == where
    if rows is None:  # a call without dev
        return
    with pytest.raises(ElectraError, match=what) as told:
        made.model.finetune(made.here / "mine.csv", tmp_path, dev=rows, **TUNE)
    assert told.value.where == where.replace("data", "dev")


def test_what_pandas_has_for_missing_values_is_an_empty_field(made: Made, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    for missing in (pandas.NA, pandas.NaT, None, float("nan")):
        for column, what in (("text", "Column 'text' is empty"), ("label", "label is missing")):
            frame = pandas.DataFrame([_ROW, {**_ROW, column: missing}, _OTHER])
            with pytest.raises(ElectraError, match=what) as told:
                made.model.finetune(frame, tmp_path, dev=[_ROW, _OTHER], **TUNE)
            assert told.value.where == "data, row 2"
    frame = pandas.DataFrame([["a", "b", "c"]], columns=["text", "label", "label"])
    with pytest.raises(ElectraError, match="Two columns have the name 'label'"):
        made.model.finetune(frame, tmp_path, dev=[_ROW, _OTHER], **TUNE)


def test_numbers_and_classes_of_pandas_are_those_of_a_file(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    texts = [f"text {i}" for i in range(40)]
    for labels in (
        [i % 2 for i in range(40)],
        [i % 2 == 0 for i in range(40)],
        [i / 8 for i in range(40)],
        np.arange(40, dtype=np.float32) / 10,
        np.array([0.1, 0.7] * 20, np.float16),
        pandas.array([0.1, 0.7] * 20, "Float32"),
        pandas.Categorical(["a", "b"] * 20),
    ):
        frame = pandas.DataFrame({"text": texts, "label": labels})
        frame.to_csv(tmp_path / "data.csv", index=False)
        frame.to_parquet(tmp_path / "data.parquet")
        expected = tasks.load(None, tmp_path / "data.csv")
        assert tasks.load(None, tmp_path / "data.parquet") == expected
        assert tasks.load(None, tasks.Rows(frame, "data")) == expected
        rows = [{"text": t, "label": label} for t, label in zip(texts, labels, strict=True)]
        assert tasks.load(None, tasks.Rows(rows, "data")) == expected
        if str(frame.dtypes["label"]).lower() not in ("float16", "float32"):  # which it has longer
            frame.to_json(tmp_path / "data.jsonl", orient="records", lines=True)
            assert tasks.load(None, tmp_path / "data.jsonl") == expected


def test_a_table_of_datasets_is_that_of_its_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = [f"text {i}" for i in range(40)]
    for kind, labels, names in (
        (datasets.ClassLabel(names=["no", "yes"]), [0, 1] * 20, ("no", "yes")),
        (datasets.Value("float32"), [i / 10 for i in range(40)], ()),
    ):
        features = datasets.Features({"text": datasets.Value("string"), "label": kind})
        table = datasets.Dataset.from_dict({"text": texts, "label": labels}, features=features)
        table.save_to_disk(tmp_path / "data")
        expected = tasks.load(None, tmp_path / "data")
        assert expected.task.labels == names
        if not names:
            assert {*expected.splits["dev"].labels} <= {*labels}
        for form in (None, "numpy", "torch"):
            assert tasks.load(None, tasks.Rows(table.with_format(form), "data")) == expected
    rows = [*table.with_format("torch")]  # tensors, of which nothing else is known
    assert tasks.load(None, tasks.Rows(rows, "data")) == expected


@pytest.mark.parametrize("name", [0, "0", [0], ("0",), np.int64(0)])
def test_columns_may_be_numbers(made: Made, tmp_path: Path, name: Any) -> None:
    """As those of a table without a header are."""
    rows = [{0: f"text {i}", 1: "ab"[i % 2]} for i in range(40)]
    for label in (1, "1"):
        options = {**TUNE, "seeds": 1, "text": name, "label": label}
        tuned = made.model.finetune(rows, tmp_path, **options)
        assert (tuned.task.texts, tuned.task.label) == (("0",), "1")
    with pytest.raises(ElectraError, match="There is no column '2'"):
        made.model.finetune(rows, tmp_path, text=name, label=2)


def test_no_columns_are_named(made: Made, tmp_path: Path) -> None:
    options = {**TUNE, "seeds": 1, "text": None, "label": None}
    tuned = made.model.finetune(made.here / "mine.csv", tmp_path, **options)
    assert (tuned.task.texts, tuned.task.label) == (("text",), "label")


def test_tasks_and_tags_are_read_from_files(made: Made, tmp_path: Path) -> None:
    for how in ({"task": "mrpc"}, {"task": "squad1"}, {"kind": "tagging"}):
        with pytest.raises(ElectraError, match="is read from files, not from rows") as told:
            made.model.finetune([_ROW], tmp_path, epochs=1, **how)
        assert told.value.where == "data"


def test_a_tagger_answers_words(made: Made, tmp_path: Path) -> None:
    sentences = [line.split() for line in language(20, seed=2).splitlines() if line]
    tagged = ["\n".join(f"{w} {'N' if len(w) > 4 else 'O'}" for w in s) for s in sentences]
    (tmp_path / "words.conll").write_text("\n\n".join(tagged))
    tuned = made.model.finetune(
        tmp_path / "words.conll", tmp_path / "tags", kind="tagging", epochs=1, threads=1
    )
    (answer,) = tuned.predict("one old river sees")
    assert answer["words"] == ["one", "old", "river", "sees"]
    assert len(answer["prediction"]) == 4


def test_an_interrupted_cell_says_that_all_is_saved(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise Stopped

    monkeypatch.setattr("electra.api.pretrain", stopped)
    with pytest.raises(KeyboardInterrupt, match="the same call continues"):
        electra.train("tiny", made.corpus, tmp_path / "run", **SETTINGS)


# ---------------------------------------------------------------------- what a notebook shows


def test_a_detection_as_html() -> None:
    text = "a <b>\x1b & c"
    words = (
        Word((Token("a", 0, 1, 0.031),)),
        Word((Token("<", 2, 3, 0.5), Token("b>", 3, 5, 0.75, (Alternative("<i>", 0.25),)))),
        Word((Token("c", 9, 10, 1.0), Token("c", 9, 10, 0.2))),  # two tokens of one character
    )
    html = Detection(text, words)._repr_html_()
    assert re.sub("<[^>]*>", "", html).startswith("a &lt;b&gt;\ufffd &amp; c")
    assert "rgba(220, 38, 38, 0.75)" in html
    assert "replaced 75%; the generator&#x27;s" not in html  # our own words need no escaping
    assert "<b>b&gt;</b> replaced 75%; the generator's: &lt;i&gt; 25%" in html
    assert not re.search("<(?!/?(span|div|b)\\b)", html)


def test_answers_and_scores_as_html(made: Made) -> None:
    html = made.tuned.predict(["<script>alert(1)</script> one"])._repr_html_()
    assert "<code>&lt;script&gt;alert(1)&lt;/script&gt; one</code>" in html
    assert "<script" not in html
    html = made.tuned._repr_html_()
    assert "accuracy" in html
    assert html.count("<tr>") == 6  # two seeds, two classes, and a head of each
    assert "2 seeds" in repr(made.tuned)


def test_a_comparison_shows_tables_and_curves(made: Made, tmp_path: Path) -> None:
    shown = electra.compare(made.here / "run")
    html = shown._repr_html_()
    assert "<svg" in html
    assert "<html" not in html
    assert "Pre-training" in str(shown) == repr(shown)
    electra.compare(made.here / "tuned", out=tmp_path / "out")
    assert (tmp_path / "out" / "report.html").exists()


def test_a_comparison_reads_each_run_once(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, seen = records.read_metrics, list[Path]()

    def look(path: Path) -> list[dict[str, Any]]:
        seen.append(path)
        return read(path)

    monkeypatch.setattr(records, "read_metrics", look)
    runs = [made.here / "run", made.here / "tuned"]
    shown = electra.compare(*runs, out=tmp_path)
    assert seen == runs
    assert (tmp_path / "report.md").read_text() == f"# Report\n\n{shown}"


# ---------------------------------------------------------------------- notebooks and the page

NOTEBOOKS = ("own_language", "detect", "finetune_csv")  # each uses what those before it made


def read(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text("utf-8"))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Where the notebooks ran, and what they showed: a little text, seconds of training."""
    here, shown = tmp_path_factory.mktemp("notebooks"), dict[str, Any]()
    (here / "texts").mkdir()
    for i, document in enumerate(find_text().documents[:12]):
        text = "\n".join(document.paragraphs)
        (here / "texts" / f"{i}.txt").write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(here):
        for name, value in (("TEXT", "texts"), ("MINUTES", "0.05"), ("ROWS", "120")):
            patch.setenv(f"ELECTRA_{name}", value)
        patch.delenv("ELECTRA_MODEL", raising=False)
        for name in NOTEBOOKS:
            shown[name] = notebooks.run(read(name), name)
    return here, shown


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_shows_what_it_showed(name: str, ran: tuple[Path, dict[str, Any]]) -> None:
    """What is committed came from 15 minutes of training, so only its form is the same."""
    committed = [c["outputs"] for c in read(name)["cells"] if c["cell_type"] == "code"]
    assert notebooks.shape(committed) == notebooks.shape(ran[1][name])


def test_the_code_of_the_page_runs(
    ran: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ran[0] / "texts", "texts")
    shutil.copytree(ran[0] / "own-language" / "model", "model")
    rows = [f"this is text {i},{i % 2}" for i in range(40)]
    Path("reviews.csv").write_text("\n".join(["text,stars", *rows]))
    page = (ROOT / "docs" / "library.md").read_text("utf-8")
    blocks = re.findall("```python\n(.*?)```", page, re.S)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block.replace('"minutes": 15', '"minutes": 0.02'), names)
    assert len(names["answers"]) == 2
    assert (tmp_path / "report" / "report.html").exists()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_one(name: str) -> None:
    """What the format asks for, and nothing of the machine it was run on."""
    stored = read(name)
    assert (stored["nbformat"], stored["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in stored["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in stored["cells"]:
        keys = {"cell_type", "id", "metadata", "source"}
        is_code = cell["cell_type"] == "code"
        assert cell.keys() == (keys | {"outputs", "execution_count"} if is_code else keys)
    text = json.dumps(stored, ensure_ascii=False)
    assert not re.search(r"/(home|root|tmp|work)/|Traceback|<script", text)
    assert len(text) < 250_000
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / "notebooks" / target).exists(), target
