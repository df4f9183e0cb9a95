"""Labelled tasks as data: one row per task of GLUE, and readers for them and for a user's files.

    folder of GLUE: official .tsv, or saved by `datasets`
    .csv .tsv .jsonl .parquet with columns of text          ->  Loaded: a Task, Examples by split
    columns of words and tags, blank line between sentences

What cannot be read as meant is an error with file and line. What was decided or left out on the
way (the kind of task, a held-out part, broken rows) is said in `Loaded.notes`.
"""

from __future__ import annotations

import csv
import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, cast

from .errors import ElectraError
from .files import write_atomic
from .text import TextStats, _decoded_lines, _split_suffix, _status, draw

Kind = Literal["classification", "regression", "tagging", "qa"]

DEV_PART = 0.1  # of the training rows, where no dev set is given
MAX_NUMBERED = 20  # different whole numbers up to which labels are taken for classes
_MAX_FIELD = 1 << 20  # characters of one field, so that an open quotation mark is found early


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be learned, from which columns, and how it is scored."""

    name: str
    kind: Kind
    metric: str
    """The score that is reported first; a key of what `metrics.score` returns."""
    texts: tuple[str, ...] = ("sentence",)
    """Columns of the one or two texts."""
    label: str = "label"
    """Column of the label."""
    labels: tuple[str, ...] = ()
    """Names of the classes or tags, in the order of the head's outputs."""
    epochs: int = 3
    length: int = 128
    """Tokens of a row at most."""
    both_orders: bool = False
    """Train on (a, b) and on (b, a)."""
    scale: float = 1.0
    """Targets of a regression are divided by it (5 for STS-B)."""


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
    splits: dict[str, Examples]
    """train, dev, test; also dev_mismatched, test_mismatched and ax for MNLI."""
    notes: list[str] = field(default_factory=list[str])
    test_files: dict[str, str] | None = None
    """The file name the GLUE server wants for the predictions of each test split."""


# ------------------------------------------------------------------ the tasks of GLUE


@dataclass(frozen=True)
class _Layout:
    """A task of GLUE and the form of its files."""

    task: Task  # with the column names of the hub
    folder: str  # the official one; also the name of the server's file
    hub: tuple[str, ...] = ()  # the hub's class names in the hub's order
    texts: tuple[str, ...] = ()  # columns of the official files, where they differ from the hub's
    label: str = "label"
    header: tuple[str, ...] = ()  # columns of train and dev where the files do not name them
    broken: int = 0  # at most so many rows of the official training file have too few columns
    files: tuple[tuple[str, str], ...] = (("train", "train"), ("dev", "dev"), ("test", "test"))
    server: tuple[tuple[str, str], ...] = ()  # file by split, where it is not test and the folder

    @property
    def codes(self) -> dict[str, int]:
        """Class index by every way a label is written: official name, hub's name, hub's number."""
        labels, found = self.task.labels, dict[str, int]()
        for number, name in enumerate(self.hub or labels):
            found[name] = found[str(number)] = labels.index(name) if name in labels else number
        return found | {name: index for index, name in enumerate(labels)}


_classes = partial(Task, kind="classification", metric="accuracy")
_NUMBERED, _ENTAILED = ("0", "1"), ("entailment", "not_entailment")
_NLI = ("contradiction", "entailment", "neutral")
_HUB_NLI = ("entailment", "neutral", "contradiction")
_TWO, _QUESTIONS = ("sentence1", "sentence2"), ("question1", "question2")
_PREMISE = ("premise", "hypothesis")

# fmt: off
_GLUE = {layout.task.name: layout for layout in (
    _Layout(_classes(name="cola", labels=_NUMBERED, metric="matthews"), "CoLA",
            hub=("unacceptable", "acceptable"), header=("source", "label", "mark", "sentence")),
    _Layout(_classes(name="sst2", labels=_NUMBERED), "SST-2", hub=("negative", "positive")),
    _Layout(_classes(name="mrpc", labels=_NUMBERED, texts=_TWO, both_orders=True), "MRPC",
            hub=("not_equivalent", "equivalent"), texts=("#1 String", "#2 String"),
            label="Quality"),
    _Layout(Task(name="stsb", kind="regression", metric="spearman", texts=_TWO, epochs=10,
                 both_orders=True, scale=5.0), "STS-B", label="score"),
    _Layout(_classes(name="qqp", labels=_NUMBERED, texts=_QUESTIONS), "QQP",
            hub=("not_duplicate", "duplicate"), label="is_duplicate", broken=8),
    _Layout(_classes(name="mnli", labels=_NLI, texts=_PREMISE), "MNLI",
            hub=_HUB_NLI, texts=_TWO, label="gold_label",
            files=(("train", "train"), ("dev", "dev_matched"),
                   ("dev_mismatched", "dev_mismatched"), ("test", "test_matched"),
                   ("test_mismatched", "test_mismatched")),
            server=(("test", "MNLI-m.tsv"), ("test_mismatched", "MNLI-mm.tsv"), ("ax", "AX.tsv"))),
    _Layout(_classes(name="qnli", labels=_ENTAILED, texts=("question", "sentence")), "QNLI"),
    _Layout(_classes(name="rte", labels=_ENTAILED, texts=_TWO, epochs=10), "RTE"),
    _Layout(_classes(name="wnli", labels=_NUMBERED, texts=_TWO), "WNLI",
            hub=("not_entailment", "entailment")),
    _Layout(_classes(name="ax", labels=_NLI, texts=_PREMISE, metric="matthews"), "AX",
            hub=_HUB_NLI, texts=_TWO, files=(("test", "diagnostic AX ax test"),)),
)}
# fmt: on

GLUE: dict[str, Task] = {name: layout.task for name, layout in _GLUE.items()}
"""The tasks by name; `ax` has only a test set, for a model trained on `mnli`."""
_PART = r"[-_]\d+k$"  # the end of MNLI-10k


def _plain(name: str) -> str:
    """SST-2, sst_2 and SST-2-10k as sst2: how folders and tasks are told apart."""
    plain = re.sub(_PART, "", name.lower()).replace("-", "").replace("_", "")
    return "ax" if plain == "diagnostic" else plain


def _sources(name: str, folder: Path) -> dict[str, Path]:
    """The splits in a folder, each an official file or a folder written by `datasets`."""
    found = dict[str, Path]()
    for split, stems in _GLUE[name].files:
        for stem in stems.split():
            for path in (folder / stem.replace("dev", "validation"), folder / f"{stem}.tsv"):
                if path.is_file() or (path / "state.json").is_file():
                    found[split] = path
    return found


def _folder(name: str, directory: Path) -> Path | None:
    """The folder of a task below `directory`; the whole task rather than a part like MNLI-10k."""
    _status(directory)
    named = [folder for folder in directory.glob("*/") if _plain(folder.name) == name]
    return min(
        (folder for folder in named if _sources(name, folder)),
        key=lambda folder: (len(folder.name), folder.name),
        default=None,
    )


def available(directory: Path) -> list[str]:
    """The tasks that can be trained from a folder of GLUE, in the order of the table."""
    folders = {name: _folder(name, directory) for name in _GLUE}
    return [name for name, at in folders.items() if at and "train" in _sources(name, at)]


def load_glue(name: str, directory: Path) -> Loaded:
    """A task of GLUE from the folder that holds all tasks, or from the task's own folder."""
    if (plain := _plain(name)) not in _GLUE:
        fix = _nearest(plain, _GLUE) + "; leave the task out to read your own files"
        raise ElectraError(f"There is no task {name!r} in GLUE.", where="task", fix=fix)
    layout, name, notes = _GLUE[plain], plain, list[str]()
    folder = _folder(name, directory) or directory
    another = _plain(folder.name) in _GLUE.keys() - {name}
    sources = {} if another else _sources(name, folder)
    if missing := [split for split, _ in layout.files[:2] if split not in sources]:
        raise ElectraError(
            f"The {missing[0]} set of {layout.folder} is not here.",
            where=str(folder),
            fix="put the official .tsv there, or the folders that datasets writes to disk",
        )
    if re.search(_PART, folder.name):
        notes.append(f"{folder.name} is a part of the task: compare only runs on the same part")
    if name == "mnli" and (beside := _folder("ax", folder.parent)):
        sources["ax"] = _sources("ax", beside)["test"]
    splits = {
        split: _examples(_glue_rows(layout, split, source, notes), layout.task, layout.codes, split)
        for split, source in sources.items()
    }
    files = {split: file for split, file in _server(layout).items() if split in splits}
    return Loaded(layout.task, splits, notes, files or None)


def _server(layout: _Layout) -> dict[str, str]:
    return dict(layout.server or (("test", f"{layout.folder}.tsv"),))


def _glue_rows(layout: _Layout, split: str, source: Path, notes: list[str]) -> list[_Row]:
    def fields() -> _Fields:
        if source.is_dir():
            return _columnar(source)
        broken = layout.broken if split == "train" else 0
        return _official(source, layout.header if labelled else (), broken, notes)

    labelled = split.startswith(("train", "dev"))
    _, first = next(fields(), ("", dict[str, Any]()))
    texts = layout.texts if set(layout.texts) <= first.keys() else ()
    label = layout.label if layout.label in first else "label"
    rows = _collect(source, fields(), texts or layout.task.texts, label, labelled, empty=True)
    known = [row for row in rows if row.label != "-"]
    if len(known) < len(rows):
        notes.append(f"{source.name}: {len(rows) - len(known)} rows without a gold label left out")
    return known


def write_predictions(
    task: Task, split: str, ids: Sequence[str], predictions: Sequence[Any], directory: Path
) -> Path:
    """A .tsv of index and class name or number, named and written as the GLUE server takes it."""
    layout = _GLUE.get(task.name)
    lines = ["index\tprediction"]
    for number, value in zip(ids, predictions, strict=True):
        if task.kind == "regression":
            shown = f"{min(max(value, 0.0), task.scale) if layout else value:.3f}"
        elif task.kind == "tagging":
            shown = " ".join(task.labels[tag] for tag in value)
        else:
            shown = task.labels[value]
        lines.append(f"{number}\t{shown}")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / (_server(layout) if layout else {}).get(split, f"{task.name}-{split}.tsv")
    write_atomic(path, "\n".join([*lines, ""]).encode())
    return path


# ------------------------------------------------------------------ a user's own data

_DEV = dict.fromkeys(("dev", "val", "valid", "validation", "testa"), "dev")
_SPLITS = {"train": "train", "test": "test", "testb": "test"} | _DEV
_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet")
_WORDS = (".txt", ".conll", ".bio", ".iob", ".iob2")
_TEXTS = (_TWO, _QUESTIONS, _PREMISE, ("question", "sentence"), ("text",), ("sentence",))


def load(
    name: str | None,
    data: Path,
    *,
    texts: Sequence[str] = (),
    label: str | None = None,
    kind: Kind | None = None,
    dev: Path | None = None,
    test: Path | None = None,
) -> Loaded:
    """A task of GLUE by its name or, without one, the user's own data.

    `data` is a file, or a directory with files called train, dev and test. Without a dev set a
    tenth of the training rows is held out.
    """
    if name is None:
        files = _split_files(data, dev, test)
        words = _split_suffix(files["train"])[0] in _WORDS
        if kind == "tagging" or (kind is None and words):
            return load_conll(files, data.name.split(".")[0])
        return load_table(files, data.name.split(".")[0], texts, label, kind)
    if texts or label or kind or dev or test:
        fix = "leave them out, or leave the task out to read your own files"
        what = f"The columns, kind and files of {name} are fixed."
        raise ElectraError(what, where="texts, label, kind, dev, test", fix=fix)
    return load_glue(name, data)


def _split_files(path: Path, dev: Path | None, test: Path | None) -> dict[str, Path]:
    """The file of each split: given, or found in a directory by its name."""
    _status(path)
    found = {"train": path}
    if path.is_dir() and not (path / "state.json").is_file():
        found = dict[str, Path]()
        for file in sorted(path.iterdir()):
            split = _SPLITS.get(re.split(r"[^a-z]", file.name.lower())[0])
            saved = (file / "state.json").is_file()
            if split is None or not (saved or _split_suffix(file)[0] in _TABLES + _WORDS):
                continue
            if found.setdefault(split, file) != file:
                what = f"Two files for {split}: {found[split].name} and {file.name}."
                raise ElectraError(what, where=str(path), fix="join them, or give one by its name")
    if "train" not in found:
        fix = f"call it train, with one of {' '.join(_TABLES + _WORDS)}"
        raise ElectraError("There is no training file.", where=str(path), fix=fix)
    return found | {split: file for split, file in (("dev", dev), ("test", test)) if file}


def load_table(
    files: Mapping[str, Path],
    name: str,
    texts: Sequence[str] = (),
    label: str | None = None,
    kind: Kind | None = None,
) -> Loaded:
    """Rows with one or two columns of text and a label; the kind of task is found from them."""
    notes, label = list[str](), label or "label"
    if not texts:
        _, first = next(_fields(files["train"]), ("", dict[str, Any]()))
        texts = next((known for known in _TEXTS if set(known) <= first.keys()), ("text",))
        notes.append(f"text is read from {' and '.join(texts)}")
    rows = {
        split: _collect(file, _fields(file), texts, label, labelled=split != "test")
        for split, file in files.items()
    }
    answers = [row.label for row in rows["train"] if row.label is not None]
    numbers = [number for answer in answers if (number := _number(answer)) is not None]
    whole = {int(number) for number in numbers if number.is_integer()}
    few = len(whole) <= MAX_NUMBERED or whole == set(range(len(whole)))
    if not whole.issuperset(numbers) and 2 * len(numbers) > len(answers):
        found, why = "regression", "labels are numbers with decimals"
    elif len(numbers) < len(answers):
        found, why = "classification", "labels are not numbers"
    else:
        found = "classification" if few else "regression"
        why = f"labels are {len(whole)} different whole numbers"
    notes.append(f"{kind}: as asked" if kind else f"{found}: {why}; ask for another kind if not so")
    make = partial(Task, name=name, texts=tuple(texts), label=label)
    if (kind or found) == "regression":
        scale = max(map(abs, numbers), default=0.0) or 1.0
        return _finish(make(kind="regression", metric="spearman", scale=scale), rows, notes, files)
    order = float if len(numbers) == len(answers) else str
    labels = tuple(sorted({_class_name(answer) for answer in answers}, key=order))
    return _finish(_classes(**make.keywords, labels=labels), rows, notes, files)


def load_conll(files: Mapping[str, Path], name: str, *, word: int = 0, tag: int = -1) -> Loaded:
    """Sentences of words and tags in columns. Tags seen only in dev or test are kept and noted."""
    rows = {split: _sentences(file, word, tag) for split, file in files.items()}
    tags = {split: {tag for row in part for tag in row.label or ()} for split, part in rows.items()}
    labels = sorted(set[str]().union(*tags.values()), key=lambda tag: (tag != "O", tag[2:], tag))
    spans = all(label == "O" or re.match(r"[BIESMLU]-.", label) for label in labels)
    metric = "f1" if spans else "accuracy"
    notes = [f"tagging: {len(labels)} tags, scored by {metric}"]
    if unseen := sorted(set(labels) - tags["train"]):
        notes.append(f"tags that never occur in training: {', '.join(unseen)}")
    task = Task(name=name, kind="tagging", metric=metric, texts=("words",), length=256)
    return _finish(replace(task, labels=tuple(labels)), rows, notes, files)


def _finish(
    task: Task, rows: dict[str, list[_Row]], notes: list[str], files: Mapping[str, Path]
) -> Loaded:
    if task.kind != "regression" and len(task.labels) == 1:
        raise ElectraError(
            f"All labels of the training set are {task.labels[0]!r}.",
            where=f"{files['train']}",
            fix="check the column of the label; at least two classes are needed",
        )
    if "dev" not in rows:
        total = len(rows["train"])
        rows["train"], rows["dev"] = _hold_out(rows["train"], task.kind != "regression")
        if not rows["dev"] or not rows["train"]:
            what = f"{total} rows are too few to hold some out and keep every class in training."
            raise ElectraError(what, where=str(files["train"]), fix="give a dev file")
        notes.append(f"dev is {len(rows['dev'])} of {total} rows, chosen by their text")
    codes = {name: index for index, name in enumerate(task.labels)}
    order = sorted(rows, key=["train", "dev", "test"].index)
    return Loaded(task, {s: _examples(rows[s], task, codes, s) for s in order}, notes)


def _hold_out(rows: list[_Row], named: bool) -> tuple[list[_Row], list[_Row]]:
    """A tenth for dev. Rows with the same text, also in other case or order, stay together, and a
    class that would be missing in training (`named`) keeps its rows there."""
    keys = [" ".join(" ".join(sorted(row.texts)).lower().split()) for row in rows]
    names = [set(row.label) if isinstance(row.label, list) else {row.label} for row in rows]
    held = {key for key in keys if draw(0, f"dev {key}", 0) < DEV_PART}
    if named:
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
        rows = _sentences(path, 0, None)
    else:
        plain = _split_suffix(path)[0] == ".txt"
        fields = _official(path, task.texts, 0, []) if plain else _fields(path)
        rows = _collect(path, fields, task.texts, "", labelled=False)
    return _examples([row._replace(label=None) for row in rows], task, {}, "test")


# ------------------------------------------------------------------ rows


class _Row(NamedTuple):
    where: str
    texts: tuple[str, ...]
    label: Any  # str | list of tags | None
    id: str


_Fields = Iterator[tuple[str, dict[str, Any]]]  # where a row is, and its values by column


def _collect(
    path: Path,
    fields: _Fields,
    texts: Sequence[str],
    label: str,
    labelled: bool,
    empty: bool = False,
) -> list[_Row]:
    """The columns that matter. `empty` lets texts be empty, as some of QQP are."""
    rows = list[_Row]()
    for where, row in fields:
        for column in (*texts, label) if labelled else texts:
            if column not in row:
                what = f"There is no column {column!r}."
                raise ElectraError(what, where=where, fix=_nearest(column, row))
        for column in texts:
            value = "" if row[column] is None else row[column]
            if not isinstance(value, str) or not (empty or value.strip()):
                found = "empty" if isinstance(value, str) else f"{value!r}, not a text"
                fix = "correct or remove the row"
                raise ElectraError(f"Column {column!r} is {found}.", where=where, fix=fix)
        number = next((row[name] for name in ("index", "idx", "id") if name in row), len(rows))
        values = tuple(row[column] or "" for column in texts)
        rows.append(_Row(where, values, _answer(row.get(label)), str(number)))
    return rows or _no_rows(path)


def _answer(value: Any) -> str | None:
    """A label as it is written; none where the field is empty, null or not-a-number."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    return (str(value).lower() if isinstance(value, bool) else str(value).strip()) or None


def _class_name(answer: str) -> str:
    """1.0 is the class 1: a column of numbers with gaps is often stored as floats."""
    return re.sub(r"^(-?\d+)\.0+$", r"\1", answer)


def _number(answer: str) -> float | None:
    try:
        number = float(answer)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _examples(rows: list[_Row], task: Task, codes: Mapping[str, int], split: str) -> Examples:
    labels, hidden = list[Any](), (None, "-1", "-1.0")  # -1: how the hub keeps answers back
    if split.startswith(("train", "dev")) or not all(row.label in hidden for row in rows):
        labels = [_coded(row, task, codes) for row in rows]
    return Examples([row.texts for row in rows], labels, [row.id for row in rows])


def _coded(row: _Row, task: Task, codes: Mapping[str, int]) -> Any:
    if row.label is None:
        raise ElectraError(
            "The label is missing.", where=row.where, fix="write it in, or drop the row"
        )
    if task.kind == "tagging":
        return [codes[tag] for tag in row.label]
    if task.kind == "regression":
        value, wanted, fix = _number(row.label), "a number", "correct it"
    else:
        value, wanted = codes.get(_class_name(row.label)), "a class of the training set"
        fix = _nearest(row.label, task.labels) if value is None else ""
    if value is None:
        raise ElectraError(f"The label {row.label!r} is not {wanted}.", where=row.where, fix=fix)
    return value


def _nearest(name: str, known: Iterable[str]) -> str:
    names = [str(each) for each in known]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(names[:20])}"


def _no_rows(path: Path) -> NoReturn:
    raise ElectraError("There are no rows.", where=str(path), fix="check that it is the right file")


# ------------------------------------------------------------------ formats


def _fields(path: Path) -> _Fields:
    """The rows of a table in any of the formats."""
    _status(path)
    suffix, _ = _split_suffix(path)
    if path.is_dir() or suffix == ".parquet":
        return _columnar(path)
    if suffix in (".csv", ".tsv"):
        return _quoted(path, "," if suffix == ".csv" else "\t")
    if suffix in _TABLES:
        return _json(path)
    fix = f"known are {' '.join(_TABLES)}; words and tags in columns are of kind tagging"
    raise ElectraError(f"A '{suffix}' file is not a table.", where=str(path), fix=fix)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    _status(path)
    return _decoded_lines(path, _split_suffix(path)[1], TextStats(), cut=False)


def _ragged(where: str, found: int, wanted: int) -> ElectraError:
    what = f"The row has {found} columns, not {wanted}."
    return ElectraError(what, where=where, fix="correct it: a separator is missing or too many")


def _official(path: Path, header: Sequence[str], broken: int, notes: list[str]) -> _Fields:
    """A .tsv without any quoting, as those of GLUE are: quotation marks are text."""
    short = 0
    for number, line in _lines(path):
        row, where = line.split("\t"), f"{path}, line {number}"
        if not header:
            header = row
        elif len(row) == len(header):
            yield where, dict(zip(header, row, strict=True))
        elif len(row) > len(header) or (short := short + 1) > broken:
            raise _ragged(where, len(row), len(header))
    if short:
        notes.append(f"{path.name}: {short} broken rows with too few columns left out")


def _quoted(path: Path, separator: str) -> _Fields:
    csv.field_size_limit(_MAX_FIELD)
    lines = (f"{line}\n" for _, line in _lines(path))
    reader = csv.reader(lines, delimiter=separator, strict=True)
    header, where = list[str](), f"{path}, line 1"
    try:
        for row in reader:
            if not header:
                header = row
                if twice := {name for name in header if header.count(name) > 1}:
                    what = f"Two columns have the name {min(twice)!r}."
                    raise ElectraError(what, where=where, fix="rename or remove one")
            elif row and len(row) != len(header):
                raise _ragged(where, len(row), len(header))
            elif row:
                yield where, dict(zip(header, row, strict=True))
            where = f"{path}, line {reader.line_num + 1}"
    except csv.Error as error:
        fix = "close every quotation mark, and write one inside a quoted field twice"
        raise ElectraError(f"Broken row: {error}.", where=where, fix=fix) from error


def _json(path: Path) -> _Fields:
    for number, line in _lines(path):
        where, fix = f"{path}, line {number}", "write one JSON object per line"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "\\u" in line:
                json.dumps(row, ensure_ascii=False).encode()  # refuses halves of surrogate pairs
        except (ValueError, RecursionError) as error:
            raise ElectraError(f"Broken JSON: {error}.", where=where, fix=fix) from error
        if not isinstance(row, dict):
            raise ElectraError("The row is not a JSON object.", where=where, fix=fix)
        yield where, cast(dict[str, Any], row)


def _columnar(path: Path) -> _Fields:
    """Parquet, or a folder written by `datasets`: Arrow streams. Class numbers become names."""
    import pyarrow as pa
    from pyarrow import ipc, parquet

    number = 0
    try:
        if path.is_dir():
            files = json.loads((path / "state.json").read_bytes())["_data_files"]
            streams = [pa.memory_map(str(path / file["filename"])) for file in files]
            table = pa.concat_tables(ipc.open_stream(stream).read_all() for stream in streams)
        else:
            table = parquet.ParquetFile(path).read()
        info = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {})
        if (path / "dataset_info.json").is_file():
            info = json.loads((path / "dataset_info.json").read_bytes())
        features: dict[str, Any] = info.get("features") or {}
        classes = {name: spec["names"] for name, spec in features.items() if "names" in spec}
        for batch in table.to_batches(max_chunksize=1024):
            for row in batch.to_pylist():
                number += 1
                for column, names in classes.items():
                    value = row[column]
                    row[column] = None if value is None or value < 0 else names[value]
                yield f"{path}, row {number}", row
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        raise ElectraError(
            f"The data cannot be read: {error}.",
            where=f"{path}, row {number + 1}",
            fix="the file is damaged or of another format; copy or write it again",
        ) from error


def _sentences(path: Path, word: int, tag: int | None) -> list[_Row]:
    """Words and, where there is a second column, tags."""
    rows, words, tags = list[_Row](), list[str](), list[str]()
    width, where = 0, ""
    for number, line in chain(_lines(path), [(0, "")]):
        cells = re.split(r"[ \t]+", line.strip(" \t"))
        if cells[0] in ("", "-DOCSTART-"):
            if words:
                rows.append(_Row(where, tuple(words), tags or None, str(len(rows))))
            words, tags = list[str](), list[str]()
            continue
        width = width or len(cells)
        if len(cells) != width:
            raise _ragged(f"{path}, line {number}", len(cells), width)
        where = where if words else f"{path}, line {number}"
        words.append(cells[word])
        if tag is not None and width > 1:
            tags.append(cells[tag])
    return rows or _no_rows(path)
