"""From a model and labelled data to scores: one task, all of GLUE, or answers to a user's rows."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ..config import FinetuneConfig, to_dict
from ..data.text import split_suffix
from ..errors import ElectraError, NumericError
from ..files import json_bytes, write_atomic
from ..formats.hf import FineTuned, LoadedEncoder, load_encoder, load_finetuned
from . import metrics, squad, tasks
from .features import encode_texts, encode_words
from .finetune import finetune, resolve, without_effect
from .step import Data, SquadData, TextData, predict
from .tasks import Examples, Task

_questions = partial(Task, kind="qa", texts=("question", "context"), epochs=2, length=512)
SQUAD = {
    "squad1": _questions(name="squad1", metric="f1"),
    "squad2": _questions(name="squad2", metric="best_f1"),
}
_MNLI_HELPS = ("rte", "stsb")  # the paper starts these from the MNLI model (appendix B)
_MANY_FULL, _MANY_UNKNOWN = 0.05, 0.01  # shares of cut rows and unknown tokens that are told


def finetune_task(
    model: Path,
    data: tasks.Source,
    out: Path,
    config: FinetuneConfig,
    *,
    task: str | None = None,
    quiet: bool = False,
    note: Callable[[str], object] = print,
    **own: Any,
) -> dict[str, Any]:
    """Fine-tune and score one task; returns what results.json holds.

    task: a name of GLUE or SQuAD; without one the data is the user's, and `own` says of it what
    `tasks.load` takes: texts, label, kind, dev, test.
    """
    encoder = load_encoder(model)
    settings, prepared = open_data(encoder, data, config, task, note=note, **own)
    for text in without_effect(config, settings, prepared, out):
        note(f"warning: {text}")
    return finetune(settings, encoder, prepared, out, quiet=quiet)


def open_data(
    encoder: LoadedEncoder,
    data: tasks.Source,
    config: FinetuneConfig,
    task: str | None,
    *,
    note: Callable[[str], object] = print,
    **own: Any,
) -> tuple[FinetuneConfig, Data]:
    """The settings with everything decided, and the data in tokens."""
    if task in SQUAD:
        settings = resolve(config, encoder.config, SQUAD[task])
        version = "squad2" if task == "squad2" else "squad1"
        folder = tasks.need_files(data, f"The data of {task}")
        questions = squad.load(folder, version, needed=("train", "dev"))
        return settings, SquadData(questions, SQUAD[task], encoder.tokenizer, settings)
    if task == "ax":
        note("the diagnostic set has no training set of its own: training on MNLI")
        task = "mnli"
    loaded = tasks.load(task, data, **own)
    for text in loaded.notes:
        note(text)
    settings = resolve(config, encoder.config, loaded.task)
    prepared = TextData(loaded, encoder.tokenizer, settings)
    rows, length = prepared.train, settings.length or loaded.task.length
    full = float((rows.lengths >= length).mean())
    if loaded.task.kind != "tagging" and full > _MANY_FULL:  # tagging goes on in the next row
        more = "; --length reads more" if length < encoder.config.max_positions else ""
        told = f"{full:.0%} of the training rows fill all {length} tokens"
        note(f"{told}: the rest is not read{more}")
    unknown = float((rows.tokens == encoder.tokenizer.unk_id).sum() / rows.lengths.sum())
    if unknown > _MANY_UNKNOWN:
        note(f"{unknown:.1%} of the tokens are [UNK]: the vocabulary is not one for this text")
    return settings, prepared


def glue(
    model: Path,
    data: Path,
    out: Path,
    config: FinetuneConfig,
    *,
    only: Sequence[str] = (),
    from_mnli: bool = False,
    wnli: Literal["majority", "train"] = "majority",
    quiet: bool = False,
    note: Callable[[str], object] = print,
) -> dict[str, dict[str, Any]]:
    """Every task of GLUE that is present, each in a folder of its own; returns their results.

    from_mnli: RTE and STS-B start from the MNLI model. wnli: its sentences are made so that a
    model of this size learns nothing; `majority` gives the majority answer, under that name.
    """
    present = [name for name in tasks.available(data) if name != "ax"]
    names = [name for name in present if not only or name in only]
    missing = [name for name in only if name not in present]
    if missing or not names:
        what = "There is no GLUE task here."
        if missing:
            what = f"Not in this folder: {', '.join(missing)}."
        fix = f"present: {', '.join(present) or 'none'}; give a folder with CoLA, SST-2, …"
        raise ElectraError(what, where=str(data), fix=fix)
    if from_mnli and "mnli" in names:
        names.insert(0, names.pop(names.index("mnli")))
    elif from_mnli and set(names) & set(_MNLI_HELPS) and not (out / "mnli" / "model").is_dir():
        what = "There is no MNLI model to start from."
        fix = "add mnli to the tasks, or leave out --from-mnli"
        raise ElectraError(what, where=str(out / "mnli"), fix=fix)
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        start, here = out / "mnli" if from_mnli and name in _MNLI_HELPS else model, out / name
        if name == "wnli" and wnli == "majority":
            results[name] = _majority(name, data, here)
        else:
            told: dict[str, Any] = {"task": name, "quiet": quiet}
            told["note"] = partial(_note_of, name, note)
            results[name] = finetune_task(start, data, here, config, **told)
    return {name: results[name] for name in present if name in results}


def _note_of(name: str, note: Callable[[str], object], text: str) -> None:
    note(f"{name}: {text}")


def _majority(name: str, data: Path, out: Path) -> dict[str, Any]:
    """The answer that is most common in training, as a result like any other."""
    loaded = tasks.load(name, data)
    values, counts = np.unique(loaded.splits["train"].labels, return_counts=True)
    answer = int(values[counts.argmax()])
    (out / "test").mkdir(parents=True, exist_ok=True)
    scores: dict[str, Any] = {}
    for split, examples in loaded.splits.items():
        guess = [answer] * len(examples.texts)
        if split != "train" and examples.labels:
            scores[split] = metrics.score(loaded.task, guess, examples.labels)
        elif split != "train":
            tasks.write_predictions(loaded.task, split, examples.ids, guess, out / "test")
    score = next(iter(scores.values()))[loaded.task.metric]
    record = {
        "format": 1,
        "task": to_dict(loaded.task),
        "model": "the majority answer, no model",
        "settings": {},
        "seeds": [{"seed": 0, "score": score, "failed": False, "scores": scores}],
        "summary": metrics.summary([score], [False]),
        "ensemble": None,
        "environment": {},
    }
    write_atomic(out / "results.json", json_bytes(record, indent=1))
    return record


# ---------------------------------------------------------------------- predict


def predict_rows(model: Path, given: str) -> list[dict[str, Any]]:
    """One answer per row of a file, or for a text itself."""
    loaded = load_finetuned(model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded.model.to(device)
    task = loaded.task
    if task.kind == "qa":
        questions = squad.read(Path(given), labelled=False)
        rows = answer_questions(loaded, questions, device)
        return [{"id": q.id, **row} for q, row in zip(questions, rows, strict=True)]
    if _names_file(given):
        examples = tasks.read_inputs(Path(given), task)
    else:
        texts = tuple(given.split()) if task.kind == "tagging" else tuple(given.split("\t"))
        if task.kind != "tagging" and len(texts) != len(task.texts):
            what = f"The model reads {len(task.texts)} texts, given are {len(texts)}."
            pair = len(task.texts) == 2
            fix = "put a tab between the two texts" if pair else "leave out the tab"
            raise ElectraError(what, where="--input", fix=fix)
        examples = Examples([texts], [], ["0"])
    rows = answer_texts(loaded, examples.texts, device)
    return [{"id": i, **row} for i, row in zip(examples.ids, rows, strict=True)]


def _names_file(given: str) -> bool:
    """Whether a file is meant: one that is there, or what can only be the name of one, for a typing
    error in it is no text to answer; nor is a folder."""
    if os.path.isdir(given):
        fix = "give a file in it; if the word itself is the text, write it into a .txt file"
        raise ElectraError("This is a folder, not a file of rows.", where=given, fix=fix)
    suffix, _ = split_suffix(Path(given))
    return os.path.isfile(given) or (suffix in tasks.SUFFIXES and not re.search(r"\s", given))


def answer_texts(
    loaded: FineTuned, texts: Sequence[tuple[str, ...]], device: torch.device, **batches: Any
) -> list[dict[str, Any]]:
    """What a model says of each text, each pair of them, or each sentence of words.

    batches: how they are computed, as for `predict`.
    """
    task = loaded.task
    if not texts:
        return []
    if task.kind == "tagging":
        features = encode_words(texts, [], loaded.tokenizer, loaded.length)
    else:
        nothing = np.zeros(len(texts), np.int64)
        features = encode_texts(texts, nothing, loaded.tokenizer, loaded.length)
    scores = predict(loaded.model, features, device, **batches)["logits"]
    if not np.isfinite(scores).all():
        fix = "train it again with a lower learning rate"
        raise NumericError("The model's scores are not finite.", where=task.name, fix=fix)
    if task.kind == "regression":
        return [{"prediction": value} for value in scores[:, 0].tolist()]
    shifted = np.exp(scores - scores.max(-1, keepdims=True))
    probability = shifted / shifted.sum(-1, keepdims=True)
    if task.kind == "classification":
        best = zip(probability.argmax(-1), probability.max(-1), strict=True)
        return [{"prediction": task.labels[k], "probability": float(p)} for k, p in best]
    tags = (task.labels[k] for k in probability.argmax(-1))  # of all words
    return [{"words": list(words), "prediction": [*islice(tags, len(words))]} for words in texts]


def answer_questions(
    loaded: FineTuned, questions: Sequence[squad.Question], device: torch.device, **batches: Any
) -> list[dict[str, Any]]:
    """The best span of each question's passage; questions have different ids."""
    if not questions:
        return []
    tokenizer, length = loaded.tokenizer, loaded.length
    features, windows = squad.windows(questions, tokenizer, length=length, training=False)
    scores = predict(loaded.model, features, device, **{"batch": 32, **batches})
    found = squad.answers(questions, windows, scores)
    ids = [question.id for question in questions]
    return [{"prediction": found.texts[i], "no_answer_score": found.null[i]} for i in ids]


def format_rows(rows: Sequence[dict[str, Any]], suffix: str) -> bytes:
    """Rows as .jsonl, .csv or .tsv, by the ending of the file they go to."""
    if suffix not in (".csv", ".tsv"):
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    text = io.StringIO()
    names = list(rows[0]) if rows else ["id", "prediction"]
    writer = csv.writer(text, delimiter="," if suffix == ".csv" else "\t", lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        cells = (row[name] for name in names)
        writer.writerow([" ".join(c) if isinstance(c, list) else c for c in cells])
    return text.getvalue().encode()
