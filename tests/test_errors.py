"""Every mistake that docs/errors.md lists, made on purpose: message and exit code are those.

The page has two tables. Each row of the first is a command that must fail as it says, each row of
the second is an input for `prepare` and `check` with its outcome. A row without a case here fails,
and so does a case without a row.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from artefacts import SMALLEST, SQUAD, Artefacts, make_artefacts

import electra.data.text
from electra import cli, files
from electra.config import to_dict
from electra.data.corpus import Corpus
from electra.data.tokenizer import Tokenizer
from electra.finetuning import step
from electra.objectives import ReplacedTokenDetection
from electra.trainer import Trainer

CHECKPOINT = Path(__file__).parent / "fixtures" / "tf"
PAGE = Path(__file__).parents[1] / "docs" / "errors.md"
Args = list[str | Path]


def rows_of(title: str) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The rows of the table under a title: the first two cells lead to the others."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    cells = [tuple(cell.strip() for cell in line.strip("| ").split(" | ")) for line in lines]
    assert len({row[:2] for row in cells}) == len(cells)
    return {row[:2]: row[2:] for row in cells}


def like(cell: str) -> re.Pattern[str]:
    """What a cell says, where … stands for anything."""
    return re.compile(".*".join(map(re.escape, cell.split("…"))))


class Place(NamedTuple):
    """What a case builds its command from; `here` is its own."""

    here: Path
    text: Path
    tokenizer: Path
    made: Artefacts

    @property
    def out(self) -> Path:
        return self.here / "out"

    def file(self, name: str, content: str | bytes) -> Path:
        path = self.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def copy(self, source: Path) -> Path:
        shutil.copytree(source, self.here / source.name)
        return self.here / source.name

    def prepare(self, *more: str | Path, source: Path | None = None) -> Args:
        given = ["--input", source or self.text, "--tokenizer", self.tokenizer, "--out", self.out]
        return ["prepare", *given, *("--length", "23", "--workers", "1"), *more]

    def pretrain(self, *more: str | Path, out: Path | None = None) -> Args:
        return ["pretrain", *SIZES, "--out", out or self.out, "--quiet", *more]

    def evaluate(self, model: Path, *more: str | Path) -> Args:
        return ["evaluate", model, "--corpus", self.made.corpus, *more]

    def finetune(self, data: str | bytes | Path, *more: str | Path, name: str = "my.csv") -> Args:
        data = data if isinstance(data, Path) else self.file(name, data)
        given = ["--model", self.made.export, "--data", data, "--out", self.out, "--quiet"]
        return ["finetune", *given, "--device", "cpu", "--threads", "1", *more]

    def ablate(self, *more: str) -> Args:
        given = ["--corpus", self.made.corpus, "--data", self.here, "--out", self.out]
        return ["ablate", more[0], *given, *more[1:]]

    def extend(self, given: Path, *more: str) -> Args:
        return ["extend", self.made.export, "--input", given, "--out", self.out, *more]

    def embed(self, given: Path, *more: str | Path) -> Args:
        place = () if "--out" in more else ("--out", self.here / "a.npy")
        return ["embed", "--model", self.made.export, "--input", given, *place, *more]

    def predict(self, given: str | Path, *more: str | Path) -> Args:
        return ["predict", "--model", self.made.tuned, "--input", given, *more]


def flags(values: dict[str, Any]) -> list[str]:
    """The settings of the run in `Artefacts` as a command line."""
    return [
        part
        for group, inner in values.items()
        for name, value in inner.items()
        for part in (f"--{group}.{name.replace('_', '-')}", str(value))
    ]


e, r = SMALLEST.encoder, SMALLEST.run
SIZES = [
    "small",
    *flags(
        {
            "encoder": {
                name: getattr(e, name)
                for name in to_dict(e)
                if "dropout" not in name and name not in ("layer_norm_eps", "init")
            },
            "generator": {"width": 1.0, "depth": 1.0},
            "data": {"sequence_length": 23, "batch_size": 2},
            "run": {
                name: getattr(r, name)
                for name in ("train_steps", "device", "threads", "log_every", "eval_every")
            },
        }
    ),
]


def retokenized(run: Path) -> Path:
    """With a tokenizer that is another, though of the same size."""
    Tokenizer.load(run / "tokenizer" / "vocab.txt", lowercase=False).save(run / "tokenizer")
    return run


def prepared(p: Place, *more: str | Path) -> Path:
    assert cli.run([str(arg) for arg in p.prepare(*more)]) == 0
    return p.out


def cased(p: Place) -> Path:
    Tokenizer.load(p.tokenizer / "vocab.txt", lowercase=False).save(p.here / "cased")
    return p.here / "cased"


def damage(path: Path) -> Path:
    """One bit of the last byte."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return path


def damaged_run(p: Place) -> Path:
    run = p.copy(p.made.run)
    for file in (run / "checkpoints").glob("step-*/model.safetensors"):
        damage(file)
    return run


def damaged_corpus(p: Place) -> Path:
    corpus = p.copy(p.made.corpus)
    damage(corpus / "train-00000.tokens.bin")
    return corpus


def other_run(p: Place) -> Path:
    run = p.copy(p.made.run)
    (run / "run.json").unlink()
    return run


def without_tokenizer(p: Place) -> Path:
    model = p.copy(p.made.export / "discriminator")
    for name in ("tokenizer.json", "vocab.txt"):
        (model / name).unlink()
    return model


def only_a_pickle(p: Place) -> Path:
    model = p.copy(p.made.export / "discriminator")
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"no torch file")
    return model


def half_a_checkpoint(p: Place) -> Path:
    folder = p.copy(CHECKPOINT)
    for data in folder.glob("*.data-*"):
        data.unlink()
    return folder


def begun_otherwise(p: Place) -> Args:
    assert cli.run([str(arg) for arg in p.prepare()]) == 0
    return p.prepare("--seed", "5")


def unreadable_notes(p: Place) -> Args:
    p.file("out/progress.json", '{"job": ')
    return p.prepare()


def tuned_otherwise(p: Place) -> Args:
    shutil.copytree(p.made.tuned, p.out)
    return p.finetune(p.made.table, "--epochs", "1", "--learning-rate", "0.5")


def fewer_seeds(p: Place) -> Args:
    """As if of two seeds the second had been the best."""
    shutil.copytree(p.made.tuned, p.out)
    record = json.loads((p.out / "finetune.json").read_bytes())
    record["settings"]["seeds"] = 2
    (p.out / "finetune.json").write_text(json.dumps(record))
    (p.out / "seed-0" / "weights.safetensors").unlink()
    return p.finetune(p.made.table, "--epochs", "1")


def damaged_model(p: Place) -> Args:
    tuned = p.copy(p.made.tuned)
    damage(tuned / "model" / "model.safetensors")
    return ["predict", "--model", tuned, "--input", "a"]


def text_for_a_tagger(p: Place) -> Args:
    words = "".join(f"a O\nriver{n} B-X\n\n" for n in range(40))
    tune = p.finetune(words, "--epochs", "1", name="my.conll")
    assert cli.run([str(arg) for arg in tune]) == 0
    return ["predict", "--model", p.out, "--input", p.file("a.txt", "a river runs\nby one stone\n")]


def damaged_results(p: Place) -> Args:
    tuned = p.copy(p.made.tuned)
    (tuned / "results.json").write_text('{"format": 1}')
    return ["report", tuned]


def wrong_passage(p: Place) -> Args:
    text = json.dumps(SQUAD).replace('"answer_start": 8', '"answer_start": 9')
    p.file("squad/train-v1.1.json", text)
    return p.finetune(p.file("squad/dev-v1.1.json", text).parent, "--task", "squad1")


COLA = "x\t1\t\tone river\nx\t0\t\tone stone\n"
ROWS = "".join(f"one {i},{i % 2}\n" for i in range(40))

CASES: dict[tuple[str, str], Callable[[Place], Args]] = {
    ("any", "the command is not known"): lambda _: ["pretrian"],
    ("any", "an argument is not UTF-8"): lambda _: ["check", "--input", "caf\udce9"],
    ("any", "a flag is not known"): lambda p: p.prepare("--lenght", "3"),
    ("any", "a flag is missing"): lambda _: ["tokenizer"],
    ("any", "a value is not of its type"): lambda p: p.prepare("--seed", "many"),
    # tokenizer
    ("tokenizer", "the input does not exist"): lambda p: [
        *("tokenizer", "--input", p.here / "none", "--out", p.out),
    ],
    ("tokenizer", "the files hold no text"): lambda p: [
        *("tokenizer", "--input", p.file("a.txt", "\n \n"), "--out", p.out),
    ],
    ("tokenizer", "the vocabulary is too small"): lambda p: [
        *("tokenizer", "--input", p.text, "--out", p.out, "--vocab-size", "9"),
    ],
    ("tokenizer", "a file stands where the output goes"): lambda p: [
        *("tokenizer", "--input", p.text, "--out", p.file("out", ""), "--vocab-size", "97"),
    ],
    # prepare
    ("prepare", "no file matches a pattern"): lambda p: p.prepare(source=p.here / "*.txt"),
    ("prepare", "a folder has no text file"): lambda p: p.prepare(
        source=p.file("pictures/one.png", "x").parent
    ),
    ("prepare", "hf: names no dataset"): lambda p: p.prepare(source=Path("hf:")),
    ("prepare", "the format is not known"): lambda p: p.prepare(source=p.file("a.pdf", "x")),
    ("prepare", "the text is one single line"): lambda p: p.prepare(source=p.file("a.txt", "one")),
    ("prepare", "the text has no token"): lambda p: p.prepare(
        *("--held-out-percent", "0"), source=p.file("a.txt", "\x01\x02")
    ),
    ("prepare", "the tokenizer does not exist"): lambda p: p.prepare(
        "--tokenizer", p.here / "none"
    ),
    ("prepare", "the folder has no tokenizer"): lambda p: p.prepare("--tokenizer", p.here),
    ("prepare", "special tokens are missing"): lambda p: p.prepare(
        "--tokenizer", p.file("vocab.txt", "[PAD]\n[UNK]\na\n")
    ),
    ("prepare", "a token stands twice"): lambda p: p.prepare(
        "--tokenizer", p.file("vocab.txt", "[PAD]\na\na\n")
    ),
    ("prepare", "tokenizer.json is broken"): lambda p: p.prepare(
        "--tokenizer", p.file("tokenizer.json", "{")
    ),
    ("prepare", "a setting is out of range"): lambda p: p.prepare("--length", "2"),
    ("prepare", "the output holds something else"): lambda p: p.prepare(
        "--out", p.file("mine/notes", "").parent
    ),
    ("prepare", "a file stands where the output goes"): lambda p: p.prepare(
        "--out", p.file("mine", "")
    ),
    ("prepare", "the output holds another corpus"): begun_otherwise,
    ("prepare", "the output lies inside of the text"): lambda p: p.prepare(
        source=p.file("a.txt", "one\ntwo\n").parent
    ),
    ("prepare", "the notes of an earlier try are damaged"): unreadable_notes,
    # check
    ("check", "neither text nor corpus is given"): lambda _: ["check"],
    ("check", "there is no corpus"): lambda p: ["check", "--corpus", p.here],
    ("check", "the corpus is damaged"): lambda p: ["check", "--corpus", damaged_corpus(p)],
    ("check", "a pipe is given"): lambda _: ["check", "--input", "-"],
    ("check", "no file can be read"): lambda p: ["check", "--input", p.here / "none.txt"],
    # plan
    ("plan", "the recipe is not known"): lambda _: ["plan", "smal"],
    ("plan", "the settings file does not exist"): lambda p: [
        *("plan", "--config", p.here / "none"),
    ],
    ("plan", "the settings file is broken"): lambda p: [
        *("plan", "--config", p.file("a.toml", "[run]\nseed = \n")),
    ],
    ("plan", "a setting is not known"): lambda p: [
        *("plan", "--config", p.file("a.toml", "[optim]\nlearning_rte = 1\n")),
    ],
    ("plan", "a setting has the wrong type"): lambda p: [
        *("plan", "--config", p.file("a.toml", '[run]\nseed = "1"\n')),
    ],
    ("plan", "a setting is out of range"): lambda _: ["plan", "--optim.learning-rate", "-1"],
    ("plan", "a number is not above 0"): lambda _: ["plan", "--tokens-per-second", "0"],
    ("plan", "heads do not divide the width"): lambda _: ["plan", "--encoder.hidden-size", "250"],
    ("plan", "the generator has no whole size"): lambda _: ["plan", "--generator.width", "0.3"],
    ("plan", "sequences are longer than the positions"): lambda _: [
        *("plan", "--data.sequence-length", "600"),
    ],
    ("plan", "there are no figures for a device"): lambda _: ["plan", "--prices", "H300", "1"],
    ("plan", "the batch cannot be split"): lambda _: ["plan", "--gpus", "3"],
    # pretrain
    ("pretrain", "neither corpus nor text is given"): lambda p: p.pretrain(),
    ("pretrain", "the corpus does not exist"): lambda p: p.pretrain("--corpus", p.here),
    ("pretrain", "the corpus is not complete"): lambda p: p.pretrain(
        "--corpus", p.file("c/progress.json", "{}").parent
    ),
    ("pretrain", "the corpus is damaged"): lambda p: p.pretrain("--corpus", damaged_corpus(p)),
    ("pretrain", "the manifest was edited"): lambda p: p.pretrain(
        "--corpus", p.file("c/manifest.json", '{"format": 1}').parent
    ),
    ("pretrain", "the corpus has another length"): lambda p: p.pretrain(
        "--corpus", p.made.corpus, "--data.sequence-length", "24"
    ),
    ("pretrain", "the run has other settings"): lambda p: p.pretrain(
        "--corpus", p.made.corpus, "--run.seed", "9", out=p.copy(p.made.run)
    ),
    ("pretrain", "the output is something else of electra"): lambda p: p.pretrain(
        "--corpus", p.made.corpus, out=p.copy(p.made.corpus)
    ),
    ("pretrain", "the output has the text of the corpus"): lambda p: p.pretrain(
        "--corpus", prepared(p), out=p.text.parent
    ),
    ("pretrain", "checkpoints without run.json"): lambda p: p.pretrain(
        "--corpus", p.made.corpus, out=other_run(p)
    ),
    ("pretrain", "run.json is damaged"): lambda p: p.pretrain(
        "--corpus", p.made.corpus, out=p.file("run/run.json", "{").parent
    ),
    ("pretrain", "no checkpoint is intact"): lambda p: p.pretrain(
        "--corpus", p.made.corpus, out=damaged_run(p)
    ),
    ("pretrain", "another process uses the directory"): lambda p: p.pretrain(
        "--corpus", p.made.corpus, out=p.file("locked/.lock", "").parent
    ),
    ("pretrain", "--init is no model"): lambda p: p.pretrain("--init", p.here),
    ("pretrain", "a frozen generator was never trained"): lambda p: p.pretrain(
        *("--corpus", p.made.corpus, "--generator.frozen", "--generator.sharing", "none"),
    ),
    ("pretrain", "there is no GPU"): lambda p: p.pretrain(
        "--corpus", p.made.corpus, "--run.device", "cuda"
    ),
    ("pretrain", "a CUDA graph without a GPU"): lambda p: p.pretrain(
        "--corpus", p.made.corpus, "--run.cuda-graph", "yes"
    ),
    ("pretrain", "own kernels without a GPU"): lambda p: p.pretrain(
        "--corpus", p.made.corpus, "--run.kernels", "yes"
    ),
    ("pretrain", "gradients are not finite"): lambda p: p.pretrain(
        *("--corpus", p.made.corpus, "--run.train-steps", "12", "--optim.warmup-steps", "0"),
        *("--optim.learning-rate", "1e38", "--run.eval-every", "99"),
    ),
    ("pretrain", "the model is larger than the memory"): lambda p: p.pretrain(
        *("--corpus", p.made.corpus, "--encoder.hidden-size", "1048574"),
    ),
    ("pretrain", "the batch is larger than the memory"): lambda p: p.pretrain(
        *("--corpus", p.made.corpus),
    ),
    ("pretrain", "no sequence fits in the memory"): lambda p: p.pretrain(
        *("--corpus", p.made.corpus, "--data.micro-batch", "auto"),
    ),
    ("pretrain", "deterministic mode has no way to do an operator"): lambda p: p.pretrain(
        *("--corpus", p.made.corpus),
    ),
    # export
    ("export", "it is no run"): lambda p: ["export", p.here, "--out", p.out],
    ("export", "no checkpoint is intact"): lambda p: ["export", damaged_run(p), "--out", p.out],
    ("export", "the step has no checkpoint"): lambda p: [
        *("export", p.made.run, "--out", p.out, "--step", "1"),
    ],
    ("export", "the licence is no name"): lambda p: [
        *("export", p.made.run, "--out", p.out, "--license", "My own: yes"),
    ],
    ("export", "the tokenizer is another"): lambda p: [
        *("export", retokenized(p.copy(p.made.run)), "--out", p.out),
    ],
    ("export", "the output holds something else"): lambda p: [
        *("export", p.made.run, "--out", p.file("mine/notes", "").parent),
    ],
    ("export", "the output is a model of a task"): lambda p: [
        *("export", p.made.run, "--out", p.copy(p.made.tuned / "model")),
    ],
    # evaluate
    ("evaluate", "there is no corpus"): lambda p: p.evaluate(p.made.export, "--corpus", p.here),
    ("evaluate", "it is no model"): lambda p: p.evaluate(p.here),
    ("evaluate", "the corpus has another tokenizer"): lambda p: p.evaluate(
        *(p.made.run, "--corpus", prepared(p, "--tokenizer", cased(p)))
    ),
    ("evaluate", "the corpus has longer rows than the model"): lambda p: p.evaluate(
        *(p.made.export, "--corpus", prepared(p, "--length", "30"))
    ),
    ("evaluate", "nothing is held out"): lambda p: p.evaluate(
        *(p.made.export, "--corpus", prepared(p, "--held-out-percent", "0"))
    ),
    ("evaluate", "there is no generator"): lambda p: p.evaluate(
        p.copy(p.made.export / "discriminator")
    ),
    ("evaluate", "there is nothing to do"): lambda p: p.evaluate(p.made.run, "--batches", "0"),
    ("evaluate", "it is started as several processes"): lambda p: p.evaluate(p.made.run),
    ("evaluate", "there is no GPU"): lambda p: p.evaluate(p.made.run, "--device", "cuda"),
    ("evaluate", "the model is larger than the memory"): lambda p: p.evaluate(p.made.run),
    # finetune
    ("finetune", "it is no model"): lambda p: [
        *("finetune", "--model", p.here, "--data", p.made.table, "--out", p.out),
    ],
    ("finetune", "the path of the model is mistyped"): lambda p: [
        *("finetune", "--model", p.here / "modell", "--data", p.made.table, "--out", p.out),
    ],
    ("finetune", "the model is a name on the Hub"): lambda p: [
        *("finetune", "--model", "google/electra", "--data", p.made.table, "--out", p.out),
    ],
    ("finetune", "the weights are no safetensors"): lambda p: [
        "finetune",
        "--model",
        p.file(f"{p.copy(p.made.export / 'discriminator').name}/model.safetensors", "x").parent,
        *("--data", p.made.table, "--out", p.out),
    ],
    ("finetune", "the model has no tokenizer"): lambda p: [
        *("finetune", "--model", without_tokenizer(p), "--data", p.made.table, "--out", p.out),
    ],
    ("finetune", "the profile is not known"): lambda p: p.finetune("", "--profile", "best"),
    ("finetune", "the data does not exist"): lambda p: p.finetune(p.here / "none.csv"),
    ("finetune", "a folder has no training file"): lambda p: p.finetune(p.here),
    ("finetune", "two files for one part"): lambda p: p.finetune(
        p.file("d/train.tsv", p.file("d/train.csv", "x").name).parent
    ),
    ("finetune", "the format is not known"): lambda p: p.finetune("x", name="my.pdf"),
    ("finetune", "there are no rows"): lambda p: p.finetune("text,label\n"),
    ("finetune", "a column is missing"): lambda p: p.finetune("txt,label\na,b\n"),
    ("finetune", "a text is empty"): lambda p: p.finetune("text,label\n ,b\n"),
    ("finetune", "a row has too many columns"): lambda p: p.finetune("text,label\na,b,c\n"),
    ("finetune", "a quotation mark is not closed"): lambda p: p.finetune('text,label\n"a,b\n'),
    ("finetune", "two columns have one name"): lambda p: p.finetune("text,text\na,b\n"),
    ("finetune", "the columns are no texts and a label"): lambda p: p.finetune(
        f"text,label\n{ROWS}", "--text", "text,text"
    ),
    ("finetune", "a label is a list"): lambda p: p.finetune(
        '{"text": "a", "label": ["b"]}\n', name="my.jsonl"
    ),
    ("finetune", "a label is missing"): lambda p: p.finetune(f"text,label\na,\n{ROWS}"),
    ("finetune", "a label is no number"): lambda p: p.finetune(
        f"text,label\na,b\n{ROWS}", "--kind", "regression"
    ),
    ("finetune", "all labels are the same"): lambda p: p.finetune("text,label\na,b\nc,b\n"),
    ("finetune", "there are too few rows"): lambda p: p.finetune("text,label\na,b\nc,d\n"),
    ("finetune", "words and tags do not match"): lambda p: p.finetune(
        "one O\nriver\n", name="my.conll"
    ),
    ("finetune", "the task is not in the folder"): lambda p: p.finetune(p.here, "--task", "cola"),
    ("finetune", "columns are given with a task"): lambda p: p.finetune(
        p.here, "--task", "cola", "--text", "a"
    ),
    ("finetune", "a file of SQuAD is missing"): lambda p: p.finetune(p.here, "--task", "squad1"),
    ("finetune", "an answer is not in its passage"): wrong_passage,
    ("finetune", "the best epoch of unscored ones is wanted"): lambda p: p.finetune(
        p.made.table, "--keep-epoch", "best", "--eval-every", "end"
    ),
    ("finetune", "patience has no best epoch"): lambda p: p.finetune(
        p.made.table, "--patience", "2"
    ),
    ("finetune", "it is started as several processes"): lambda p: p.finetune(p.made.table),
    ("finetune", "a batch is larger than the memory"): lambda p: p.finetune(p.made.table),
    ("finetune", "deterministic mode has no way to do an operator"): lambda p: p.finetune(
        p.made.table
    ),
    ("finetune", "the run has other settings"): tuned_otherwise,
    ("finetune", "the output is something else of electra"): lambda p: p.finetune(
        p.made.table, "--out", p.copy(p.made.run)
    ),
    ("finetune", "the best of fewer seeds was not kept"): fewer_seeds,
    # glue
    ("glue", "there is no task"): lambda p: [
        *("glue", "--model", p.made.export, "--data", p.here, "--out", p.out),
    ],
    ("glue", "a task is not there"): lambda p: [
        *("glue", "--model", p.made.export, "--data", p.here, "--out", p.out, "--tasks", "rte"),
    ],
    # predict
    ("predict", "it is no fine-tuned model"): lambda p: [
        *("predict", "--model", p.here, "--input", "a"),
    ],
    ("predict", "the model is a pre-trained one"): lambda p: [
        *("predict", "--model", p.made.export, "--input", "a"),
    ],
    ("predict", "the model is damaged"): damaged_model,
    ("predict", "two texts where one is read"): lambda p: p.predict("a\tb"),
    ("predict", "a column is missing"): lambda p: p.predict(p.file("a.csv", "txt\na\n")),
    ("predict", "the input is a folder"): lambda p: p.predict(p.here),
    ("predict", "the file does not exist"): lambda p: p.predict(p.here / "none.csv"),
    ("predict", "text is given for words in a column"): text_for_a_tagger,
    ("predict", "answers have no such format"): lambda p: p.predict(
        "a", "--out", p.here / "a.xlsx"
    ),
    ("predict", "the output cannot be written"): lambda p: p.predict(
        "a river", "--out", p.file("mine", "") / "a.csv"
    ),
    # ablate
    ("ablate", "the study is not known"): lambda p: p.ablate("efficency", "--dry-run"),
    ("ablate", "a grid names a row twice"): lambda p: p.ablate(
        str(p.file("mine.toml", "['a b']\n['A b']\n")), "--dry-run"
    ),
    ("ablate", "a row has networks that cannot be built"): lambda p: p.ablate(
        str(p.file("mine.toml", "[a]\nencoder.embedding_size = 2\n")), "--base", "tiny", "--dry-run"
    ),
    ("ablate", "it does not start from ELECTRA"): lambda p: p.ablate(
        "sharing", "--base", "bert-small"
    ),
    ("ablate", "a task is not there"): lambda p: p.ablate("sharing"),
    ("ablate", "there is nothing to do"): lambda p: p.ablate("sharing", "--seeds", "0"),
    # report, detect, demo
    ("report", "the folder does not exist"): lambda p: ["report", p.here / "none"],
    ("report", "there is no run"): lambda p: ["report", p.here],
    ("report", "a record is damaged"): damaged_results,
    ("detect", "the text has no token"): lambda p: ["detect", " ", "--model", p.made.export],
    ("detect", "there is no discriminator"): lambda p: [
        *("detect", "a", "--model", p.made.export / "generator"),
    ],
    ("detect", "the model is one of a task"): lambda p: ["detect", "a", "--model", p.made.tuned],
    ("detect", "no model is named, none is shipped"): lambda _: ["detect", "a"],
    ("serve", "there is no model"): lambda p: ["serve", p.here],
    ("serve", "a limit is out of range"): lambda p: ["serve", p.here, "--queue", "0"],
    ("serve", "the port does not exist"): lambda p: ["serve", p.made.export, "--port", "65536"],
    ("serve", "other machines could reach it"): lambda p: [
        *("serve", p.made.export, "--port", "0", "--host", "0.0.0.0"),
    ],
    ("ui", "there is no model"): lambda p: ["ui", "--model", p.here],
    ("ui", "the model is a generator alone"): lambda p: [
        *("ui", "--model", p.made.export / "generator"),
    ],
    ("ui", "no request would be let through"): lambda _: ["ui", "--per-minute", "0"],
    # import, extend
    ("import", "it is no model"): lambda p: ["import", p.here, "--out", p.out],
    ("import", "the model has no tokenizer"): lambda p: [
        *("import", without_tokenizer(p), "--out", p.out),
    ],
    ("import", "a .bin without --allow-bin"): lambda p: [
        *("import", only_a_pickle(p), "--out", p.out),
    ],
    ("import", "the .bin is no torch file"): lambda p: [
        *("import", only_a_pickle(p), "--out", p.out, "--allow-bin"),
    ],
    ("import", "a part of the checkpoint is missing"): lambda p: [
        *("import", half_a_checkpoint(p), "--out", p.out),
    ],
    ("import", "the output holds something else"): lambda p: [
        *("import", p.made.export, "--out", p.file("out/notes.txt", "x").parent),
    ],
    ("extend", "no tokens are asked for"): lambda p: p.extend(p.text, "--tokens", "0"),
    ("extend", "the text has no new word"): lambda p: p.extend(p.file("a.txt", "one one .\n")),
    # embed, onnx
    ("embed", "the output is no kind of file for vectors"): lambda p: p.embed(
        p.text, "--out", p.here / "a.txt"
    ),
    ("embed", "the text does not exist"): lambda p: p.embed(p.here / "none"),
    ("embed", "there is no line"): lambda p: p.embed(p.file("a.txt", "")),
    ("embed", "the length is out of range"): lambda p: p.embed(p.text, "--length", "9999"),
    ("embed", "it is no model"): lambda p: [
        *("embed", "--model", p.here, "--input", p.text, "--out", p.here / "a.npy"),
    ],
    ("onnx", "there is no exported model"): lambda p: ["onnx", "--model", p.here],
    ("onnx", "neither a model nor a place is named"): lambda _: ["onnx"],
    ("onnx", "data without int8"): lambda p: [
        *("onnx", "--model", p.made.tuned, "--data", p.made.table),
    ],
    ("demo", "the demo is done already"): lambda p: [
        *("demo", "--out", p.file("out/demo.json", "{}").parent),
    ],
    ("demo", "the text is too short"): lambda p: [
        *("demo", "--out", p.out, "--input", p.file("a.txt", "one\n\ntwo\n\nthree\n")),
    ],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus) -> Artefacts:
    return make_artefacts(tmp_path_factory.mktemp("made"), corpus)


@pytest.fixture
def place(
    tmp_path: Path,
    text: Path,
    tokenizer_dir: Path,
    made: Artefacts,
    monkeypatch: pytest.MonkeyPatch,
) -> Place:
    monkeypatch.setattr(files, "SHIPPED", tmp_path / "models" / "small-en")  # which is not there
    return Place(tmp_path, text, tokenizer_dir, made)


def told_by(capsys: pytest.CaptureFixture[str], args: Args) -> tuple[int, str]:
    """Exit code and everything that was printed."""
    try:
        code = cli.run([str(arg) for arg in args])
    except SystemExit as end:  # from the parser of the flags
        code = int(end.code or 0)
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def without_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def undetermined(*_: Any) -> None:
    """What torch itself says of an operator that it cannot do so."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        torch.empty(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
    finally:
        torch.use_deterministic_algorithms(was)


@pytest.mark.parametrize("case", CASES, ids=" - ".join)
def test_a_mistake_is_answered_as_the_page_says(
    case: tuple[str, str],
    place: Place,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    message, code, to_do = rows_of("Errors")[case]
    if "memory" in case[1]:  # a model that is too large does not even come to its first step
        monkeypatch.setattr(Trainer, "train_step", without_memory)
        monkeypatch.setattr(step.Trainer, "train_step", without_memory)
        monkeypatch.setattr(ReplacedTokenDetection, "detect", without_memory)
    if "deterministic" in case[1]:
        monkeypatch.setattr(Trainer, "train_step", undetermined)
        monkeypatch.setattr(step.Trainer, "train_step", undetermined)
    if "as several processes" in case[1]:
        monkeypatch.setenv("WORLD_SIZE", "2")
    if "GPU" in case[1] and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    if case[0] == "onnx":
        pytest.importorskip("onnxruntime", reason="extra onnx is not installed")
    locked = place.here / "locked" / ".lock"
    args = CASES[case](place)
    with open(locked if locked.exists() else os.devnull) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        answer, told = told_by(capsys, args)
        assert str(answer) == code, told
        assert "Traceback" not in told
        by_parser = "full helptext" in told
        plain = " ".join(re.sub("[│╭╮╰╯─]", " ", told).split()) if by_parser else told
        assert like(message).search(plain), plain
        assert like(to_do).search(plain), plain
        if not by_parser:
            assert re.search(r"^ +where: .", told, re.M), told
            assert re.search(r"^ +to do: .", told, re.M), told


@pytest.mark.parametrize("command", sorted({name for name, _ in CASES}))
def test_debug_shows_the_traceback_and_keeps_the_exit_code(
    command: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    case = next(case for case in CASES if case[0] == command)
    code, told = told_by(capsys, [*CASES[case](place), "--debug"])
    assert str(code) == rows_of("Errors")[case][1]
    assert "Traceback (most recent call last)" in told
    assert "ElectraError" in told


def test_the_page_and_the_cases_are_the_same() -> None:
    assert set(rows_of("Errors")) == set(CASES)
    assert len(CASES) >= 40


# ---------------------------------------------------------------- hostile inputs

GOOD = "one river hears .\nall stones see .\n\none bird loves .\nall birds hear .\n"
Source = Callable[[Place], Path]


def text_file(content: str | bytes, name: str = "odd.txt") -> Source:
    return lambda p: p.file(name, content)


def parquet(content: dict[str, list[Any]], cut: int = 0) -> Source:
    def write(p: Place) -> Path:
        pq.write_table(pa.table(content), p.here / "odd.parquet")
        data = (p.here / "odd.parquet").read_bytes()
        return p.file("odd.parquet", data[: len(data) - cut])

    return write


def arrow(content: dict[str, list[Any]], cut: int = 0) -> Source:
    def write(p: Place) -> Path:
        table, sink = pa.table(content), pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        data = sink.getvalue().to_pybytes()
        return p.file("odd.arrow", data[: len(data) - cut])

    return write


def row(value: str) -> Source:
    return text_file(f'{{"text": "fine\\nfine"}}\n{value}\n', "odd.jsonl")


def fifo(p: Place) -> Path:
    os.mkfifo(p.here / "odd.txt")
    return p.here / "odd.txt"


def link_to_itself(p: Place) -> Path:
    (p.here / "odd.txt").symlink_to("odd.txt")
    return p.here / "odd.txt"


def link_to_above(p: Place) -> Path:
    p.file("odd/a.txt", GOOD)
    (p.here / "odd" / "again").symlink_to(p.here / "odd")
    return p.here / "odd"


def beside_a_good_file(content: str) -> Source:
    return lambda p: (p.file("odd/a.txt", GOOD), p.file("odd/b.txt", content))[0].parent


def odd_name(p: Place) -> Path:
    p.file("odd/a.txt", GOOD)
    (p.here / "odd" / "caf\udce9.txt").write_text(GOOD)
    return p.here / "odd"


RECORD = (
    "WARC/1.0\r\nWARC-Type: {}\r\nContent-Type: text/plain\r\nContent-Length: 4\r\n\r\n{}\r\n\r\n"
)
WARC = "".join(
    RECORD.format(*record)
    for record in [("metadata", "http"), ("conversion", "text"), ("conversion", "a\nb.")]
)
ARTICLE = "<page><ns>{}</ns><revision><text>one river\nall stones</text></revision></page>"
WIKI = f"<mediawiki>{ARTICLE.format(0)}{ARTICLE.format(1)}</mediawiki>"
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01" + bytes(range(256))
SHEET = {"text": ["one river", "two", "three"], "n": [1, 2, 3]}

INPUTS: dict[str, Source] = {
    "no line end at the end of the file": text_file(GOOD.rstrip("\n")),
    "U+2028, U+2029, U+0085, form feed": text_file(f"one\u2028two\u2029x\x85y\x0cz\n{GOOD}"),
    "emoji, joiners, right-to-left, unassigned": text_file(
        f"👩\u200d👧 שלום \u202e \U000e0fff\n{GOOD}"
    ),
    "byte order mark of UTF-8": text_file(f"\ufeff{GOOD}"),
    "CRLF": text_file(GOOD.replace("\n", "\r\n")),
    "CR alone": text_file(GOOD.replace("\n", "\r")),
    "NUL inside a JSON string": row('{"text": "a\\u0000b"}'),
    "line over 65,536 characters": text_file("word " * 20_000 + "\n" + GOOD),
    "document over 262,144 characters": text_file("some words in a line\n" * 20_000),
    "empty file beside others": beside_a_good_file(""),
    "file of blank lines beside others": beside_a_good_file("\n \n\t\n"),
    "blank lines": text_file(f"\n\n \n{GOOD}"),
    "empty text in a row": row('{"text": " "}'),
    "only empty files": text_file(""),
    "invalid UTF-8": text_file(b"one\ntwo\nthr\xe9e\n"),
    "UTF-8 cut off at the end": text_file("one\ntwo ü".encode()[:-1]),
    "UTF-16": text_file(GOOD.encode("utf-16")),
    "UTF-32": text_file(GOOD.encode("utf-32")),
    "NUL byte in plain text": text_file(b"one\ntw\0o\n"),
    "picture or other binary file": text_file(JPEG),
    "broken JSON": row('{"text": "one"'),
    "JSON row that is no object": row('["one"]'),
    "null": row('{"text": null}'),
    "key missing": row('{"body": "one"}'),
    "value that is no string": row('{"text": 3}'),
    "half of a surrogate pair": row(r'{"text": "a\ud800"}'),
    "JSON row over 64 MiB": row('{"text": "' + "x" * (1 << 18)),
    "half a gzip file": text_file(
        gzip.compress(os.urandom(3000).hex().encode())[:999], "odd.txt.gz"
    ),
    "gzip by name only": text_file(GOOD, "odd.txt.gz"),
    "Parquet without the column": parquet({"n": [1]}),
    "Parquet with a null": parquet({"text": ["one", None]}),
    "Parquet cut short": parquet(SHEET, cut=20),
    "Arrow without the column": arrow({"n": [1]}),
    "Arrow cut short": arrow(SHEET, cut=300),
    "web archive with other records": text_file(WARC, "odd.warc"),
    "web archive with a web page": text_file(WARC.replace("metadata", "response"), "odd.warc"),
    "web archive with a wrong length": text_file(WARC.replace(": 4", ": 3"), "odd.warc"),
    "web archive in latin-1": text_file(
        WARC.replace("text\r", "tex\xe4\r").encode("latin-1"), "odd.warc"
    ),
    "web archive that is none": text_file(GOOD, "odd.warc"),
    "Wikipedia dump with other pages": text_file(WIKI, "odd.xml"),
    "XML that is no Wikipedia dump": text_file("<html><p>one</p></html>", "odd.xml"),
    "Wikipedia dump cut short": text_file(WIKI[:-30], "odd.xml"),
    "pipe, socket or device": fifo,
    "link that leads to itself": link_to_itself,
    "link to a folder above": link_to_above,
    "name of a file that is not UTF-8": odd_name,
    "file that grows while it is read": text_file(GOOD),
}


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read gets a line more while it is read."""
    read = electra.data.text._document_lines

    def grow(path: Path, *rest: Any) -> Iterator[tuple[int, str]]:
        for line in read(path, *rest):
            yield line
            with path.open("a") as file:
                file.write("more\n")
            break

    monkeypatch.setattr(electra.data.text, "_document_lines", grow)


@pytest.mark.parametrize("name", INPUTS)
def test_a_hostile_input_has_the_outcome_of_the_page(
    name: str,
    place: Place,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    ((outcome, said),) = (
        (row[0][1], row[1]) for row in rows_of("Inputs").items() if row[0][0] == name
    )
    monkeypatch.setattr(electra.data.text, "MAX_ROW", 1 << 17)
    if "grows" in name:
        request.getfixturevalue("growing")
    source = INPUTS[name](place)
    code, told = told_by(capsys, place.prepare(source=source))
    checked, found = told_by(capsys, ["check", "--input", source])
    assert "Traceback" not in told + found
    if outcome == "refused":
        message, where = said
        assert (code, checked) == (2, 2), told + found
        for shown in (told, found):
            assert like(message).search(shown), shown
            assert like(f"where: …odd…{where}").search(shown), shown
            assert "to do: " in shown
        assert not (place.out / "manifest.json").exists()
        return
    assert (code, checked) == (0, 0), told + found
    stored = json.loads((place.out / "manifest.json").read_bytes())["text"]
    plain = ("files", "bytes", "documents", "lines", "characters", "blank_lines")
    counted = {key for key in stored if stored[key] and key not in plain}
    expected = set() if outcome == "kept" else {said[0].replace(" ", "_")}
    assert counted | {"blank_lines"} == expected | {"blank_lines"}, stored
    for key in expected:
        assert re.search(rf"noticed .*{stored[key]:,} {said[0]}", told), told
        assert re.search(rf"^{said[0]} +{stored[key]:,}$", found, re.M), found


def test_the_page_lists_every_input() -> None:
    assert [key[0] for key in rows_of("Inputs")] == list(INPUTS)
    assert {key[1] for key in rows_of("Inputs")} == {"kept", "repaired", "skipped", "refused"}


def prepare_in_a_process(text: Path, tokenizer: Path, out: Path) -> tuple[dict[str, Any], int]:
    """The manifest, and the most memory that the process took, in MB."""
    code = """
import re, sys
from pathlib import Path
from electra.cli import run
code = run(sys.argv[1:])
# Not from getrusage, whose figure a process takes over from the one that started it.
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024)
sys.exit(code)
"""
    flags = ["--input", text, "--tokenizer", tokenizer, "--out", out]
    flags += ["--held-out-percent", "0", "--workers", "1"]
    done = subprocess.run(
        [sys.executable, "-c", code, "prepare", *map(str, flags)],
        env={**os.environ, "PYTHONPATH": str(PAGE.parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "manifest.json").read_bytes()), int(done.stdout.split()[-1])


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("megabytes", [5, pytest.param(1000, marks=pytest.mark.long)])
def test_a_single_huge_line_takes_little_memory(
    megabytes: int,
    place: Place,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    path = place.file("huge.txt", "")
    with path.open("w") as file:
        for _ in range(megabytes):
            file.write("all old rivers hear " * 50_000)
    began = time.monotonic()
    manifest, memory = prepare_in_a_process(path, place.tokenizer, place.out)
    with capsys.disabled():
        print(
            f"\n{megabytes} MB in one line: {memory} MB, {time.monotonic() - began:.0f} s", end=" "
        )
    request.node.user_properties.append(("MB of memory", memory))
    assert manifest["text"]["characters"] == megabytes * 1_000_000
    assert manifest["text"]["long_lines_cut"] >= megabytes * 1_000_000 // (1 << 16)
    assert memory <= 500


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("files", [10_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_very_many_tiny_files(
    files: int,
    place: Place,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    for i in range(files):
        folder = place.here / "tiny" / str(i // 1000)
        if i % 1000 == 0:
            folder.mkdir(parents=True)
        (folder / f"{i}.txt").write_text("one river\n")
    began = time.monotonic()
    manifest, memory = prepare_in_a_process(place.here / "tiny", place.tokenizer, place.out)
    with capsys.disabled():
        print(f"\n{files:,} files: {memory} MB, {time.monotonic() - began:.0f} s", end=" ")
    request.node.user_properties.append(("MB of memory", memory))
    assert memory <= 150 + 0.8e-3 * files  # MB: only their names are held
    assert manifest["text"]["files"] == manifest["text"]["documents"] == files
    assert manifest["inputs"]["count"] == files
    assert len(manifest["inputs"]["files"]) == 1000  # the manifest stays small
    shutil.rmtree(place.here / "tiny")
