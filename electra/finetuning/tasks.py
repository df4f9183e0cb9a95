"""Labelled tasks as data: one row per task of GLUE, and readers for them and for a user's files.

    folder of GLUE: official .tsv, or saved by `datasets`
    .csv .tsv .jsonl .parquet with columns of text          ->  Loaded: a Task, Examples by split
    the same table in memory
    columns of words and tags, blank line between sentences

What cannot be read as meant is an error with file and line. What was decided or left out on the
way (the kind of task, a held-out part, broken rows) is said in `Loaded.notes`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from decimal import Decimal
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, Protocol, cast

import numpy as np

from ..data.text import draw, file_status, read_lines, split_suffix
from ..errors import ElectraError, nearest
from ..files import UNFIT, write_atomic

Kind = Literal["classification", "regression", "tagging", "qa"]

DEV_PART = 0.1  # of the training rows, where no dev set is given
MAX_NUMBERED = 20  # different whole numbers up to which labels are taken for classes
_MAX_FIELD = 1 << 20  # characters of one field, so that an open quotation mark is found early


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be learned, from which columns, and how it is scored."""

    name: str
    kind: Kind
    metric: str  # the score that is reported first; a key of what `metrics.score` returns
    texts: tuple[str, ...] = ("sentence",)  # columns of the one or two texts
    label: str = "label"  # column of the label
    labels: tuple[str, ...] = ()  # names of classes or tags, in the order of the head's outputs
    epochs: int = 3
    length: int = 128  # tokens of a row at most
    both_orders: bool = False  # train on (a, b) and on (b, a)
    # Targets of a regression, in the data's own unit: offset + scale · what is learned.
    scale: float = 1.0  # 5 for STS-B, the standard deviation for a user's
    offset: float = 0.0  # the mean for a user's


@dataclass(frozen=True)
class Examples:
    """One split. `labels` is empty where the answers are not known (test sets)."""

    texts: list[tuple[str, ...]]  # one or two texts each; the words of the sentence for tagging
    labels: list[Any]  # class index | float in the data's own unit | tag index of each word
    ids: list[str]


@dataclass(frozen=True)
class Loaded:
    """A task with its data."""

    task: Task
    splits: dict[str, Examples]  # train, dev, test; MNLI: dev_mismatched, test_mismatched, ax
    notes: list[str] = field(default_factory=list[str])


class Frame(Protocol):
    """What is used of a DataFrame of pandas, which need not be installed."""

    @property
    def columns(self) -> Any: ...
    @property
    def dtypes(self) -> Any: ...
    def itertuples(self, index: bool = ..., name: str | None = ...) -> Iterable[Any]: ...


Table = Frame | Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Rows:
    """A table in memory: a DataFrame of pandas, or a dictionary for each row."""

    table: Table
    name: str  # of the argument, for errors: data, dev or test

    def __str__(self) -> str:
        return self.name


Source = Path | Rows


# ------------------------------------------------------------------ the tasks of GLUE

_classes = partial(Task, kind="classification", metric="accuracy")
_ENTAILED, _NLI = ("entailment", "not_entailment"), ("contradiction", "entailment", "neutral")
_TWO, _QUESTIONS = ("sentence1", "sentence2"), ("question1", "question2")
_PREMISE = ("premise", "hypothesis")

# fmt: off
GLUE: dict[str, Task] = {task.name: task for task in (  # with the column names of the hub
    _classes(name="cola", labels=("0", "1"), metric="matthews"),
    _classes(name="sst2", labels=("0", "1")),
    _classes(name="mrpc", labels=("0", "1"), texts=_TWO, both_orders=True),
    Task(name="stsb", kind="regression", metric="spearman", texts=_TWO, epochs=10,
         both_orders=True, scale=5.0),
    _classes(name="qqp", labels=("0", "1"), texts=_QUESTIONS),
    _classes(name="mnli", labels=_NLI, texts=_PREMISE),
    _classes(name="qnli", labels=_ENTAILED, texts=("question", "sentence")),
    _classes(name="rte", labels=_ENTAILED, texts=_TWO, epochs=10),
    _classes(name="wnli", labels=("0", "1"), texts=_TWO),
    _classes(name="ax", labels=_NLI, texts=_PREMISE, metric="matthews"),
)}
"""The tasks by name; `ax` has only a test set, for a model trained on `mnli`."""
_FOLDERS = dict(zip(GLUE, (  # the official ones
    "CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE", "WNLI", "AX"), strict=True))
_HUB = {  # class names of the hub in its order, where they are not those of the official files
    "cola": ("unacceptable", "acceptable"), "sst2": ("negative", "positive"),
    "mrpc": ("not_equivalent", "equivalent"), "qqp": ("not_duplicate", "duplicate"),
    "mnli": ("entailment", "neutral", "contradiction"), "wnli": ("not_entailment", "entailment"),
    "ax": ("entailment", "neutral", "contradiction"),
}
_STEMS = {  # of the files of each split; `datasets` says validation for dev
    "train": ("train",), "dev": ("dev_matched", "dev"), "dev_mismatched": ("dev_mismatched",),
    "test": ("diagnostic", "AX", "ax", "test_matched", "test"),
    "test_mismatched": ("test_mismatched",),
}
_SERVER = {(name, "test"): f"{folder}.tsv" for name, folder in _FOLDERS.items()} | {  # its files
    ("mnli", "test"): "MNLI-m.tsv", ("mnli", "test_mismatched"): "MNLI-mm.tsv",
    ("mnli", "ax"): "AX.tsv",
}
# fmt: on
_GLUE_TEXTS = (("#1 String", "#2 String"), _TWO)  # columns of official files
_GLUE_LABELS = ("gold_label", "is_duplicate", "Quality", "score", "label")
_COLA_COLUMNS = ("source", "label", "mark", "sentence")  # which train and dev do not name
_QQP_BROKEN = 8  # at most so many rows of its training file have too few columns
_PART = r"[-_]\d+k$"  # the end of MNLI-10k
_FLOAT = re.compile(r"^(-?\d+)\.0+$")  # of a whole number


def _plain(name: str) -> str:
    """SST-2, sst_2 and SST-2-10k as sst2: how folders and tasks are told apart."""
    plain = re.sub(_PART, "", name.lower()).replace("-", "").replace("_", "")
    return "ax" if plain == "diagnostic" else plain


def _is_saved(path: Path) -> bool:
    """Whether it is a folder written by `datasets`."""
    return (path / "state.json").is_file()


def _sources(folder: Path) -> dict[str, Path]:
    """The splits in a folder, each an official file or a folder written by `datasets`."""
    found = dict[str, Path]()
    for split, stems in _STEMS.items():
        for stem in stems:
            for path in (folder / stem.replace("dev", "validation"), folder / f"{stem}.tsv"):
                if path.is_file() or _is_saved(path):
                    found[split] = path
    return found


def _folder(name: str, directory: Path) -> Path | None:
    """The folder of a task below `directory`; the whole task rather than a part like MNLI-10k."""
    file_status(directory)
    named = [folder for folder in directory.glob("*/") if _plain(folder.name) == name]
    found = [folder for folder in named if _sources(folder)]
    return min(found, key=lambda folder: (len(folder.name), folder.name), default=None)


def available(directory: Path) -> list[str]:
    """The tasks that can be trained from a folder of GLUE, in the order of the table."""
    folders = {name: _folder(name, directory) for name in GLUE}
    return [name for name, at in folders.items() if at and "train" in _sources(at)]


def _load_glue(name: str, directory: Path) -> Loaded:
    """A task from the folder that holds all tasks, or from the task's own folder."""
    if (plain := _plain(name)) not in GLUE:
        fix = nearest(plain, GLUE) + "; leave the task out to read your own files"
        raise _bad(f"There is no task {name!r} in GLUE.", "task", fix)
    task, name, notes, splits = GLUE[plain], plain, list[str](), dict[str, Examples]()
    folder = _folder(name, directory) or directory
    sources = {} if _plain(folder.name) in GLUE.keys() - {name} else _sources(folder)
    for split in ("test",) if name == "ax" else ("train", "dev"):
        if split not in sources:
            fix = "put the official .tsv there, or the folders that datasets writes to disk"
            raise _bad(f"The {split} set of {_FOLDERS[name]} is not here.", folder, fix)
    if re.search(_PART, folder.name):
        notes.append(f"{folder.name} is a part of the task: compare only runs on the same part")
    if name == "mnli" and (beside := _folder("ax", folder.parent)):
        sources["ax"] = _sources(beside)["test"]
    codes = dict[str, int]()  # by every way a label is written: a name, or the hub's number
    for number, label in enumerate(_HUB.get(name, task.labels)):
        index = task.labels.index(label) if label in task.labels else number
        codes |= {label: index, str(number): index}
    for split, source in sources.items():
        rows = _glue_rows(task, split, source, notes)
        splits[split] = _examples(rows, task, codes, split)
    return Loaded(task, splits, notes)


def _glue_rows(task: Task, split: str, source: Path, notes: list[str]) -> list[_Row]:
    labelled = split.startswith(("train", "dev"))
    header = _COLA_COLUMNS if task.name == "cola" and labelled else ()
    broken = _QQP_BROKEN if (task.name, split) == ("qqp", "train") else 0
    official = partial(_separated, quoted=False, broken=broken, notes=notes)
    fields = _columnar(source) if source.is_dir() else official(source, "\t", header)
    texts = (*_GLUE_TEXTS, task.texts)
    rows, _ = _collect(source, fields, texts, _GLUE_LABELS, labelled, empty=True)
    known = [row for row in rows if row.label != "-"]
    if len(known) < len(rows):
        notes.append(f"{source.name}: {len(rows) - len(known)} rows without a gold label left out")
    return known


def write_predictions(
    task: Task, split: str, ids: Sequence[str], predictions: Sequence[Any], directory: Path
) -> Path:
    """A .tsv of index and class name or number, named and written as the GLUE server takes it."""
    text, places = io.StringIO(), max(3, 3 - math.floor(math.log10(task.scale)))
    writer = csv.writer(text, delimiter="\t", lineterminator="\n")
    writer.writerow(("index", "prediction"))
    for number, value in zip(ids, predictions, strict=True):
        if task.kind == "regression":
            shown = min(max(value, 0.0), task.scale) if task.name in GLUE else value
            shown = f"{shown:.{places}f}"
        elif task.kind == "tagging":
            shown = " ".join(task.labels[tag] for tag in value)
        else:
            shown = task.labels[value]
        writer.writerow((number, shown))
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _SERVER.get((task.name, split), f"{task.name}-{split}.tsv")
    write_atomic(path, text.getvalue().encode())
    return path


# ------------------------------------------------------------------ a user's own data

_DEV = dict.fromkeys(("dev", "val", "valid", "validation", "testa"), "dev")
_SPLITS = {"train": "train", "test": "test", "testb": "test"} | _DEV
_OWN_KINDS = ("classification", "regression", "tagging")
_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet")
_WORDS = (".txt", ".conll", ".bio", ".iob", ".iob2")
SUFFIXES = _TABLES + _WORDS  # of the files that can be read
_SINGLE = (("text",), ("sentence",), ("text",))  # the last is missed where there is none
_TEXTS = (_TWO, _QUESTIONS, _PREMISE, ("question", "sentence"), *_SINGLE)


def load(
    name: str | None,
    data: Source,
    *,
    texts: Sequence[str] = (),
    label: str | None = None,
    kind: Kind | None = None,
    dev: Source | None = None,
    test: Source | None = None,
) -> Loaded:
    """A task of GLUE by its name or, without one, the user's own data.

    `data` is a file, a directory with files called train, dev and test, or a table in memory.
    Without a dev set a tenth of the training rows is held out.
    """
    if kind not in (None, *_OWN_KINDS):
        raise _bad(f"There is no kind {kind!r}.", "kind", f"use {', '.join(_OWN_KINDS)}")
    if name is None:
        files, own = _split_files(data, dev, test), data.name.split(".")[0]
        if kind == "tagging" or (kind is None and _has_words(files["train"])):
            if texts or label:
                what, fix = "Words and tags have no columns to name.", "leave out text and label"
                raise _bad(what, "text, label", fix)
            return _load_words(files, own)
        return _load_table(files, own, tuple(texts), label or "label", kind)
    if texts or label or kind or dev or test:
        what = f"The columns, kind and files of {name} are fixed."
        fix = "leave them out, or leave the task out to read your own files"
        raise _bad(what, "texts, label, kind, dev, test", fix)
    return _load_glue(name, need_files(data, f"The data of {name}"))


def need_files(source: Source, what: str) -> Path:
    """A path, where rows in memory cannot be read as what is meant."""
    if isinstance(source, Rows):
        raise _bad(f"{what} is read from files, not from rows.", source, "give the path")
    return source


def _has_words(source: Source) -> bool:
    return isinstance(source, Path) and split_suffix(source)[0] in _WORDS


def _split_files(path: Source, dev: Source | None, test: Source | None) -> dict[str, Source]:
    """The source of each split: given, or found in a directory by its name."""
    found: dict[str, Source] = {"train": path}
    if isinstance(path, Path):
        file_status(path)
    if isinstance(path, Path) and path.is_dir() and not _is_saved(path):
        found = {}
        for file in sorted(path.iterdir()):
            split = _SPLITS.get(re.split(r"[^a-z]", file.name.lower())[0])
            is_data = _is_saved(file) or split_suffix(file)[0] in SUFFIXES
            if split and is_data and (other := found.setdefault(split, file)) != file:
                what = f"Two files for {split}: {other.name} and {file.name}."
                raise _bad(what, path, "join them, or give one by its name")
    if "train" not in found:
        fix = f"call it train, with one of {' '.join(SUFFIXES)}"
        raise _bad("There is no training file.", path, fix)
    return found | {split: file for split, file in (("dev", dev), ("test", test)) if file}


def _load_table(
    files: dict[str, Source], name: str, texts: tuple[str, ...], label: str, kind: Kind | None
) -> Loaded:
    """Rows with one or two columns of text and a label; the kind of task is found from them."""
    if len(texts) > 2 or len({*texts, label}) <= len(texts):
        what = f"{', '.join(texts)} and {label} are not one or two texts and a label beside them."
        fix = "name one column of text, or two that are read as a pair, and another for the label"
        raise _bad(what, "text, label", fix)
    rows, notes = dict[str, list[_Row]](), list[str]()
    for split, file in sorted(files.items(), key=lambda item: item[0] != "train"):
        columns = (texts,) if texts else _TEXTS  # the training file decides for all
        rows[split], found = _collect(file, _table(file, notes), columns, (label,), split != "test")
        if not texts:
            notes.append(f"text is read from {' and '.join(found)}")
        texts = found
    answers = [row.label for row in rows["train"] if row.label is not None]
    numbers = [number for answer in answers if (number := _number(answer)) is not None]
    whole = {int(number) for number in numbers if number.is_integer()}
    few = len(whole) <= MAX_NUMBERED or whole == set(range(len(whole)))
    if not whole.issuperset(numbers) and 2 * len(numbers) > len(answers):
        guess, why = "regression", "labels are numbers with decimals"
    elif len(numbers) < len(answers):
        guess, why = "classification", _not_numbers(answers)
    else:
        guess = "classification" if few else "regression"
        why = f"labels are {len(whole)} different whole numbers"
    other = "regression" if guess == "classification" else "classification"
    notes.append(f"{kind}: as asked" if kind else f"{guess}: {why}; --kind {other} if not so")
    task = _classes(name=name, texts=texts, label=label)
    if (kind or guess) == "regression":
        spread = dict(zip(("offset", "scale"), _mean_and_deviation(numbers), strict=True))
        task = replace(task, kind="regression", metric="spearman", **spread)
    else:
        order = float if len(numbers) == len(answers) else str
        task = replace(task, labels=tuple(sorted(set(answers), key=order)))
    return _finish(task, rows, notes, files["train"])


def _not_numbers(answers: list[str]) -> str:
    """The classes these make, and the label that would have to be corrected for numbers."""
    names = sorted(set(answers))
    shown = ", ".join(f"{name!r:.20}" for name in names[:3]) + (", …" if len(names) > 3 else "")
    odd = [name for name in names if _number(name) is None]
    commas = [name for name in odd if re.fullmatch(r"[+-]?\d+,\d+", name)]
    one = (commas or odd)[0]
    fix = f" (write {one.replace(',', '.')} if it is one)" if commas else ""
    return f"{len(names)} classes ({shown}), as {one!r:.40} is not a number{fix}"


def _mean_and_deviation(numbers: list[float]) -> tuple[float, float]:
    """Of numbers of any size; the deviation is 1 where all are the same."""
    largest = max(map(abs, numbers), default=0.0) or 1.0
    shares = np.array(numbers or [0.0]) / largest  # whose squares stay finite
    differ = shares.min() < shares.max()
    return largest * float(shares.mean()), largest * float(shares.std()) if differ else 1.0


def _load_words(files: dict[str, Source], name: str) -> Loaded:
    """Sentences of words and tags in columns. Tags seen only in dev or test are kept and noted."""
    told = "Text of words and tags"
    rows = {split: _sentences(need_files(file, told)) for split, file in files.items()}
    tags = {split: {tag for row in part for tag in row.label or ()} for split, part in rows.items()}
    labels = sorted(set[str]().union(*tags.values()), key=lambda tag: (tag != "O", tag[2:], tag))
    spans = all(label == "O" or re.match(r"[BIESMLU]-.", label) for label in labels)
    metric = "f1" if spans else "accuracy"
    notes = [f"tagging: {len(labels)} tags, scored by {metric}"]
    if unseen := sorted(set(labels) - tags["train"]):
        notes.append(f"tags that never occur in training: {', '.join(unseen)}")
    task = Task(name=name, kind="tagging", metric=metric, texts=("words",), length=256)
    return _finish(replace(task, labels=tuple(labels)), rows, notes, files["train"])


def _finish(task: Task, rows: dict[str, list[_Row]], notes: list[str], train: Source) -> Loaded:
    _need_labels(rows["train"])  # of the whole file, before some of it is held out
    if task.kind != "regression" and len(task.labels) == 1:
        fix = "check the column of the label; at least two classes are needed"
        raise _bad(f"All labels of the training set are {task.labels[0]!r}.", train, fix)
    if "dev" not in rows:
        total = len(rows["train"])
        rows["train"], rows["dev"] = _hold_out(rows["train"], task.kind != "regression")
        if not rows["dev"] or not rows["train"]:
            what = f"{total} rows are too few to hold some out and keep every class in training."
            # Numbers taken for classes end here: each is a class of one row.
            raise _bad(what, train, f"give a dev file ({notes[-1]})")
        notes.append(f"dev is {len(rows['dev'])} of {total} rows, chosen by their text")
    codes = {label: index for index, label in enumerate(task.labels)}
    order = [split for split in ("train", "dev", "test") if split in rows]
    return Loaded(task, {s: _examples(rows[s], task, codes, s) for s in order}, notes)


def _hold_out(rows: list[_Row], named: bool) -> tuple[list[_Row], list[_Row]]:
    """A tenth for dev. Rows with the same text, also in other case or order, stay together, and a
    class that would be missing in training (`named`) keeps its rows there."""
    keys = [" ".join(" ".join(sorted(row.texts)).lower().split()) for row in rows]
    held = {key for key in keys if draw(0, f"dev {key}", 0) < DEV_PART}
    if named:
        names = [set(row.label) if isinstance(row.label, list) else {row.label} for row in rows]
        kept = (found for key, found in zip(keys, names, strict=True) if key not in held)
        seen = set[str | None]().union(*kept)
        held -= {key for key, found in zip(keys, names, strict=True) if not found <= seen}
    parts = list[_Row](), list[_Row]()
    for key, row in zip(keys, rows, strict=True):
        parts[key in held].append(row)
    return parts


def read_inputs(path: Path, task: Task) -> Examples:
    """Rows without answers, for a trained task: a table with its columns, a .txt with one row per
    line and a tab between two texts, or for tagging the words of sentences, one per line."""
    if task.kind == "tagging":
        rows = _sentences(path, task.labels)
    else:
        is_plain = split_suffix(path)[0] == ".txt"
        fields = _separated(path, "\t", task.texts, quoted=False) if is_plain else _table(path)
        rows, _ = _collect(path, fields, (task.texts,), (task.label,), labelled=False)
    return Examples([row.texts for row in rows], [], [row.id for row in rows])


# ------------------------------------------------------------------ rows


class _Row(NamedTuple):
    where: str
    texts: tuple[str, ...]
    label: Any  # str | list of tags | None
    id: str


# With the same text wherever they come from: that of another object may name where it lies.
_LABELS = str | int | float | Decimal | date | None  # also bool and datetime
_Fields = Iterator[tuple[str, dict[str, Any]]]  # where a row is, and its values by column


def _bad(what: str, where: object, fix: str) -> ElectraError:
    return ElectraError(what, where=str(where), fix=fix)


def _collect(
    path: Source,
    fields: _Fields,
    texts_of: Sequence[tuple[str, ...]],
    label_of: Sequence[str],
    labelled: bool,
    empty: bool = False,
) -> tuple[list[_Row], tuple[str, ...]]:
    """The columns that matter: the first of those given that are there, or else the last.

    Also returns which texts these are. `empty` lets them be empty, as some of QQP are.
    """
    rows, texts, label = list[_Row](), texts_of[-1], label_of[-1]
    for where, row in fields:
        if not rows:
            texts = next((known for known in texts_of if set(known) <= row.keys()), texts)
            label = next((known for known in label_of if known in row), label)
        for column in (*texts, label) if labelled else texts:
            if column not in row:
                raise _bad(f"There is no column {column!r}.", where, nearest(column, row))
        values = list[str]()
        for column in texts:
            value = "" if row[column] is None else row[column]
            if not isinstance(value, str) or not (empty or value.strip()):
                found = "empty" if isinstance(value, str) else f"{value!r}, not a text"
                raise _bad(f"Column {column!r} is {found}.", where, "correct or remove the row")
            values.append(value)
        answer, known = row.get(label), (row.get(name) for name in ("index", "idx", "id"))
        if not isinstance(answer, _LABELS):
            what = f"Column {label!r} is {answer!r:.99}, not a label."
            raise _bad(what, where, "write one class or number a row")
        number = next((value for value in known if value is not None), len(rows))
        rows.append(_Row(where, tuple(values), _label(answer), str(number)))
    return rows or _no_rows(path), texts


def _no_rows(path: Source) -> NoReturn:
    right = "table" if isinstance(path, Rows) else "file"
    raise _bad("There are no rows.", path, f"check that it is the right {right}")


def _label(value: Any) -> str | None:
    """A label as text, as pandas writes it; none where the field is empty, null or not-a-number.
    1.0 is the class 1: a column of numbers with gaps is often stored as floats."""
    is_missing = value is None or value != value
    return None if is_missing else _FLOAT.sub(r"\1", str(value).strip()) or None


def _number(answer: str) -> float | None:
    try:
        number = float(answer.replace("_", "no digit"))  # Python takes 1_2 for 12
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _examples(rows: list[_Row], task: Task, codes: Mapping[str, int], split: str) -> Examples:
    hidden = all(row.label in (None, "-1") for row in rows)  # -1: the hub keeps answers back
    is_known = split.startswith(("train", "dev")) or not hidden
    if is_known:
        _need_labels(rows)
    labels = [_coded(row, task, codes) for row in rows] if is_known else []
    return Examples([row.texts for row in rows], labels, [row.id for row in rows])


def _need_labels(rows: list[_Row]) -> None:
    """The error says how many rows lack one: whether to correct a line or the whole file."""
    if missing := [row.where for row in rows if row.label is None]:
        what = f"The label is missing (in {len(missing)} of {len(rows)} rows)."
        raise _bad(what, missing[0], "write it in, or drop the row")


def _coded(row: _Row, task: Task, codes: Mapping[str, int]) -> Any:
    if task.kind == "tagging":
        return [codes[tag] for tag in row.label]
    is_number = task.kind == "regression"
    value = _number(row.label) if is_number else codes.get(row.label)
    if value is None:
        wanted = "a number" if is_number else "a class of the training set"
        fix = "correct it" if is_number else nearest(row.label, task.labels)
        raise _bad(f"The label {row.label!r} is not {wanted}.", row.where, fix)
    return value


# ------------------------------------------------------------------ formats


def _table(path: Source, notes: list[str] | None = None) -> _Fields:
    """The rows of a table in any of the formats."""
    if isinstance(path, Rows):
        return _in_memory(path)
    file_status(path)
    suffix, _ = split_suffix(path)
    if path.is_dir() or suffix == ".parquet":
        return _columnar(path)
    if suffix in (".csv", ".tsv"):
        return _separated(path, "," if suffix == ".csv" else "\t", notes=notes)
    if suffix in _TABLES:
        return _json(path)
    fix = f"known are {' '.join(_TABLES)}; words and tags in columns are of kind tagging"
    raise _bad(f"A '{suffix}' file is not a table.", path, fix)


def _in_memory(given: Rows) -> _Fields:
    """As from a file: what pandas has for a missing value is an empty field, and the classes of a
    table of `datasets` have their names."""
    table: Any = given.table
    turned = dict[str, Callable[..., Any]]()  # what a column's type says of its values
    fix = "give a path, a DataFrame of pandas, or a list with a dictionary for each row"
    if hasattr(table, "itertuples") and hasattr(table, "columns"):
        names = [str(name) for name in table.columns]
        _refuse_twice(names, given)
        # Not to_dict("records"): this one leaves out columns of one name.
        rows = (dict(zip(names, row, strict=True)) for row in table.itertuples(False, None))
        kinds = (str(kind).lower() for kind in table.dtypes)  # Float32, if it has missing values
        turned = {name: partial(_decimal, kind) for name, kind in zip(names, kinds, strict=True)}
    elif isinstance(table, Iterable) and not isinstance(table, Mapping | str | bytes):
        rows = cast(Iterable[object], table)
        features: dict[str, Any] = getattr(table, "features", None) or {}
        for name, spec in features.items():
            if hasattr(spec, "names"):
                turned[name] = partial(_class_name, spec.names)
            elif hasattr(spec, "dtype"):
                turned[name] = partial(_decimal, spec.dtype)
    else:
        raise _bad(f"These are no rows: {type(table).__name__}.", given, fix)
    for number, row in enumerate(rows, start=1):
        where = f"{given}, row {number}"
        if not isinstance(row, Mapping):
            raise _bad(f"The row is no dictionary: {type(row).__name__}.", where, fix)
        fields = {str(k): _plain_value(v) for k, v in cast(Mapping[object, object], row).items()}
        fields |= {name: turn(fields[name]) for name, turn in turned.items() if name in fields}
        for column, value in fields.items():
            if isinstance(value, str) and value != value.encode(errors="ignore").decode():
                what = f"Column {column!r} is {value!r:.99}, no text of whole characters."
                raise _bad(what, where, "correct or remove the row")
        yield where, fields


def _class_name(names: Sequence[str], value: Any) -> Any:
    """Of a class by its number; none below 0, where the answer is kept back."""
    if not isinstance(value, int):
        return value
    return names[value] if value >= 0 else None


def _decimal(kind: str, value: Any) -> Any:
    """A number of few bits as text has it: 0.1 rather than 0.10000000149."""
    is_short = kind in ("float16", "float32") and isinstance(value, float)
    return float(str(np.dtype(kind).type(value))) if is_short else value


def _plain_value(value: Any) -> object:
    """A value of numpy, or a tensor of one, as one of Python; None where it is missing."""
    if getattr(value, "shape", None) == ():
        value = _decimal(str(value.dtype).removeprefix("torch."), value.item())
    is_missing = value != value if isinstance(value, float) else False
    return None if is_missing or type(value).__name__ in ("NAType", "NaTType") else value


def _refuse_twice(names: Sequence[str], where: object) -> None:
    """Columns without a name, as spreadsheets leave behind the last one, cannot be mixed up."""
    if twice := {name for name in names if name.strip() and names.count(name) > 1}:
        raise _bad(f"Two columns have the name {min(twice)!r}.", where, "rename or remove one")


_SEPARATORS = "correct it: a separator is missing or too many"


def _ragged(where: str, found: int, wanted: int, fix: str = _SEPARATORS) -> ElectraError:
    return _bad(f"The row has {found} columns, not {wanted}.", where, fix)


def _separator(lines: Iterator[str], usual: str) -> tuple[str, Iterator[str]]:
    """What is between the columns, and the lines to read: spreadsheets write semicolons where the
    comma is the decimal sign, and some say so in a first line `sep=;`, which becomes a blank one.
    """
    start = list[str]()
    for line in lines:
        if said := re.fullmatch(r"sep=([;,\t|])\n", line):
            return said[1], chain(start, ["\n"], lines)
        start.append(line)
        if line != "\n":
            break
    header, marks = start[-1:], (usual, *";,\t")
    found = {mark: len(next(csv.reader(header, delimiter=mark), ())) for mark in marks}
    other = max(found, key=lambda mark: found[mark])
    return usual if found[usual] > 1 else other, chain(start, lines)


def _separated(
    path: Path,
    separator: str,
    header: Sequence[str] = (),
    *,
    quoted: bool = True,
    broken: int = 0,
    notes: list[str] | None = None,
) -> _Fields:
    """Not `quoted`, as the files of GLUE: quotation marks are text, blank lines are rows, and the
    separator is the one given.

    Up to `broken` rows that are too short are left out, with a note.
    """
    csv.field_size_limit(_MAX_FIELD)
    lines = (f"{line}\n" for _, line in read_lines(path))
    quoting = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    short, where, usual = 0, f"{path}, line 1", separator
    try:
        if quoted:
            separator, lines = _separator(lines, usual)
        if separator != usual and notes is not None:
            notes.append(f"{path.name}: read with {separator!r} between columns")
        reader = csv.reader(lines, delimiter=separator, quoting=quoting, strict=True)
        for row in reader:
            row = row if row or quoted else [""]
            if not header:
                header = row
                _refuse_twice(header, where)
            elif len(row) == len(header):
                yield where, dict(zip(header, row, strict=True))
            elif len(row) > len(header) or (row and (short := short + 1) > broken):
                raise _ragged(where, len(row), len(header))
            where = f"{path}, line {reader.line_num + 1}"
    except csv.Error as error:
        fix = "close every quotation mark, and write one inside a quoted field twice"
        raise _bad(f"Broken row: {error}.", where, fix) from error
    if short and notes is not None:
        notes.append(f"{path.name}: {short} broken rows with too few columns left out")


def _json(path: Path) -> _Fields:
    for number, line in read_lines(path):
        if not line.strip():
            continue
        where, fix = f"{path}, line {number}", "write one JSON object per line"
        try:
            row = json.loads(line)
            if "\\u" in line:
                json.dumps(row, ensure_ascii=False).encode()  # refuses halves of surrogate pairs
        except (ValueError, RecursionError) as error:
            raise _bad(f"Broken JSON: {error}.", where, fix) from error
        if not isinstance(row, dict):
            raise _bad("The row is not a JSON object.", where, fix)
        yield where, cast(dict[str, Any], row)


def _columnar(path: Path) -> _Fields:
    """Parquet, or a folder written by `datasets`: Arrow streams. Class numbers become names."""
    import pyarrow as pa
    from pyarrow import ipc, parquet

    number = 0
    try:
        if path.is_dir():
            files = json.loads((path / "state.json").read_bytes())["_data_files"]
            names = [str(file["filename"]) for file in files]
            if odd := [name for name in names if Path(name).name != name]:
                raise ValueError(f"state.json names {odd[0]!r:.99}, which is no plain file name")
            streams = [(path / name).read_bytes() for name in names]
            table = pa.concat_tables(ipc.open_stream(stream).read_all() for stream in streams)
            table.validate(full=True)  # a damaged one would be read outside of its bytes
        else:
            table = parquet.ParquetFile(path).read()
        info = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {})
        if (path / "dataset_info.json").is_file():
            info = json.loads((path / "dataset_info.json").read_bytes())
        features: dict[str, Any] = info.get("features") or {}
        short = {"halffloat": "float16", "float": "float32"}  # as Arrow calls them
        kinds = {f.name: short[str(f.type)] for f in table.schema if str(f.type) in short}
        turned = {name: partial(_decimal, kind) for name, kind in kinds.items()}
        for name, spec in features.items():
            if "names" in spec:
                turned[name] = partial(_class_name, spec["names"])
        for batch in table.to_batches(max_chunksize=1024):
            for row in batch.to_pylist():
                number += 1
                row |= {name: turn(row[name]) for name, turn in turned.items()}
                yield f"{path}, row {number}", row
    except (pa.ArrowException, *UNFIT) as error:
        where, what = f"{path}, row {number + 1}", f"The data cannot be read: {error}."
        fix = "the file is damaged or of another format; copy or write it again"
        raise _bad(what, where, fix) from error


def _sentences(path: Path, known: Sequence[str] = ()) -> list[_Row]:
    """Words, in the first column, and tags, in the last if there is another.

    With the tags `known` to a model, text as it is usually written is refused, of which only the
    first word of each line would be read: one block, single spaces, and nothing like a tag.
    """
    rows, words, tags = list[_Row](), list[str](), list[str]()
    width, where, is_text = 0, "", bool(known)
    fix = "write one word per line, a blank line between sentences; or give the sentence itself"
    fix = fix if known else _SEPARATORS
    for number, line in chain(read_lines(path), [(0, "")]):
        cells = re.split(r"[ \t]+", line.strip(" \t"))
        if cells[0] in ("", "-DOCSTART-"):
            if words:
                rows.append(_Row(where, tuple(words), tags or None, str(len(rows))))
            words, tags = list[str](), list[str]()
            continue
        width = width or len(cells)
        if len(cells) != width:
            raise _ragged(f"{path}, line {number}", len(cells), width, fix)
        is_text = is_text and line == " ".join(cells) and cells[-1] not in known
        where = where if words else f"{path}, line {number}"
        words.append(cells[0])
        tags += cells[-1:] if width > 1 else []
    if is_text and width > 1 and len(rows) == 1:
        raise _bad("These are lines of text, not words in a column.", where, fix)
    return rows or _no_rows(path)
