"""The library: `import electra` in a notebook or a script.

    corpus = electra.prepare("texts/", out="corpus", vocab_size=8192, length=64)
    model = electra.train("tiny", corpus, out="run")
    model.detect("The senate and the house of elephants met today.")
    tuned = model.finetune("reviews.csv", text="text", label="stars", out="tuned")
    tuned.predict(["a text of yours"])

Each call does what the command line does and leaves the same directories, so one can go on where
the other stopped; the same call again continues. Settings have the names of the command line.
Nothing is printed unless `quiet=False`, which prints plain lines. What is wrong with an argument or
a file is an `ElectraError` that says what, where and what to do.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch

from .config import FinetuneConfig, PretrainConfig, from_dict
from .data.corpus import Corpus
from .data.corpus import prepare as prepare_corpus
from .data.tokenizer import Tokenizer, train_tokenizer
from .errors import ElectraError, Stopped, StopRequest, nearest
from .evaluate import evaluate_model
from .files import shipped_model
from .finetuning import tasks
from .finetuning.glue import answer_questions, answer_texts, finetune_task
from .finetuning.squad import Question
from .formats import card, hf, hf_export
from .pretrain import open_corpus, pretrain
from .recipes import Profile, recipe
from .runtime import whole_vectors
from .studies.records import code, table
from .studies.report import Section, long_form, read_sections, report_sections
from .studies.report_html import fragment, to_html
from .use import detect, embed
from .use.detect import Detection
from .use.embed import Vectors

Place = str | Path
# Settings that are passed on, beside those that a call has as arguments.
_PREPARING = ("builder", "short_percent", "held_out_percent", "seed", "cluster", "shard_bytes")
_EMBEDDING = ("length", "batch_tokens", "threads")


@contextlib.contextmanager
def _interruptible() -> Generator[None]:
    """Stopped becomes KeyboardInterrupt, as a notebook expects; everything is saved."""
    try:
        yield
    except Stopped:
        raise KeyboardInterrupt("stopped and saved; the same call continues") from None


def _say(quiet: bool) -> Callable[[str], None]:
    return (lambda _: None) if quiet else print


def _each(given: object, where: str) -> Iterable[object]:
    """One text alone, or what several are in: no table, which would give the names of its columns
    as if they were its texts."""
    if isinstance(given, Mapping) or hasattr(given, "columns"):
        what = f"A whole table is given, not texts: {type(cast(object, given)).__name__}."
        raise ElectraError(what, where=where, fix="give a list of strings, such as df['text']")
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    return cast(Iterable[object], [given] if is_one else given)


def _texts(given: object, where: str) -> tuple[str, ...]:
    """A text, or several of them, with nothing that has no tokens among them."""
    texts = tuple(_each(given, where))
    for text in texts:
        if not isinstance(text, str) or text != text.encode(errors="ignore").decode():
            what = f"{text!r:.99} is no text of whole characters."
            raise ElectraError(what, where=where, fix="give strings; fill or drop what is missing")
    return cast(tuple[str, ...], texts)


def _text(given: object, where: str) -> str:
    """One text, for a call that takes no more."""
    texts = _texts(given, where)
    if len(texts) != 1:
        what = f"{where} takes one text, given are {len(texts)}."
        raise ElectraError(what, where=where, fix="call it for each")
    return texts[0]


def _source(given: Place | tasks.Table, name: str) -> tasks.Source:
    return Path(given) if isinstance(given, str | os.PathLike) else tasks.Rows(given, name)


def _columns(given: object) -> tuple[str, ...]:
    """The columns that are named: title,body, one name or several, also numbers, as a table in
    memory may have them."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        given = () if given is None else str(given).split(",")
    return tuple(map(str, cast(Iterable[object], given)))


def _refuse_unknown(
    settings: Iterable[str], known: Sequence[str], call: Callable[..., Any]
) -> None:
    """Before anything is done, and with the nearest name."""
    names = [*inspect.signature(call).parameters, *known]
    for name in settings:
        if name not in known:
            what = f"There is no setting {name!r}."
            raise ElectraError(what, where=call.__name__, fix=nearest(name, names))


def prepare(
    input: Place | Sequence[Place],
    out: Place,
    *,
    tokenizer: Place | None = None,
    vocab_size: int = 30_522,
    lowercase: bool = True,
    column: str = "text",
    length: int = 128,
    workers: int = 1,
    quiet: bool = True,
    **settings: Any,
) -> Corpus:
    """A corpus of `length` tokens a sequence, from text files, folders or patterns.

    Without a `tokenizer` one of `vocab_size` entries is trained on the same text, and is kept in
    the corpus. `workers` above 1 are processes, which a script has to start below its
    `if __name__ == "__main__":`. Other settings are those of `electra prepare`.
    """
    inputs = [input] if isinstance(input, str | Path) else list(input)
    say = _say(quiet)
    _refuse_unknown(settings, _PREPARING, prepare)
    with _interruptible(), StopRequest() as stop:
        if tokenizer is None:
            say(f"training a tokenizer of {vocab_size:,} entries")
            options: dict[str, Any] = {"lowercase": lowercase, "column": column}
            made = train_tokenizer(inputs, vocab_size=vocab_size, should_stop=stop, **options)
        else:
            made = Tokenizer.load(Path(tokenizer))
        settings |= {"sequence_length": length, "column": column, "workers": workers}
        prepare_corpus(inputs, made, Path(out), progress=say, should_stop=stop, **settings)
    return Corpus.open(Path(out))


def train(
    recipe_name: str,
    corpus: Corpus | Place,
    out: Place,
    *,
    init: Place | None = None,
    profile: Profile = "best",
    quiet: bool = True,
    **settings: dict[str, Any],
) -> Model:
    """Pre-train by a recipe (tiny, small, …) in the directory `out`, as `electra pretrain` does.

    `settings` by group: `run={"minutes": 10}, optim={"learning_rate": 3e-4}`. `init`: a model to
    start from instead of new weights.
    """
    corpus = corpus if isinstance(corpus, Corpus) else open_corpus(Path(corpus))
    base = recipe(recipe_name, profile)
    start = hf.load_pretrained(Path(init)) if init is not None else None
    if start is not None:
        base = hf.config_of(start, base)
    config = from_dict(PretrainConfig, settings, where="electra.train", base=base)
    options: dict[str, Any] = {"quiet": quiet}
    if start is not None:
        state = hf.initial_state(start, config, corpus.vocab_size)
        options |= {"initial": state.parameters, "initial_from": str(init)}
        if not quiet:
            print(*state.notes, sep="\n", file=sys.stderr)
    with _interruptible():
        pretrain(config, corpus, Path(out), **options)
    return Model(out)


def load(path: Place | None = None) -> Model:
    """A model before any task: a run, an export, any ELECTRA of transformers or of Google's.

    Without a path: the English one in models/small-en of the checkout.
    """
    return Model(shipped_model() if path is None else path)


def load_finetuned(path: Place) -> Finetuned:
    """A model of a task: a run of fine-tuning, or the model in it."""
    return Finetuned(path)


def compare(*runs: Place, out: Place | None = None) -> Report:
    """Runs of any sort side by side; in a notebook with their curves. `out`: also as files."""
    sections = read_sections([Path(run) for run in runs])
    return Report(report_sections(sections, Path(out) if out is not None else None), sections)


class Report(NamedTuple):
    """Tables in Markdown, which a notebook shows as tables and curves."""

    text: str
    sections: list[Section]

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return fragment(self.sections)


class Encoded(NamedTuple):
    """Tokens of a text with [CLS] and [SEP], and the encoder's state of each, (T, D)."""

    tokens: list[str]
    states: Vectors


class Model:
    """An encoder that was pre-trained, with its discriminator and generator as far as they exist.

    Made by `electra.load` and `electra.train`.
    """

    def __init__(self, path: Place) -> None:
        self.path = Path(path)
        self.networks = hf.load_pretrained(detect.with_generator(self.path))

    def __repr__(self) -> str:
        pair = {"discriminator": self.networks.discriminator, "generator": self.networks.generator}
        sizes = [
            f"{kind} of {network.config.layers} × {network.config.hidden_size}"
            for kind, network in pair.items()
            if network is not None
        ]
        return f"Model({str(self.path)!r}): {', '.join(sizes)}"

    def detect(self, text: str, *, alternatives: int = 3) -> Detection:
        """P(replaced) of each token, and what the generator would rather see."""
        text = _text(text, "detect")
        return detect.detect(self.networks, text, alternatives=alternatives)

    def embed(
        self,
        lines: str | Iterable[str],
        *,
        pooling: Literal["mean", "cls"] = "mean",
        **settings: Any,
    ) -> Vectors:
        """(N, D): one vector for each line, of which one may stand alone; settings as for `electra
        embed`."""
        _refuse_unknown(settings, _EMBEDDING, self.embed)
        checked = (line for one in _each(lines, "embed") for line in _texts(one, "embed"))
        return embed.embed(hf.encoder_of(self.networks), checked, pooling=pooling, **settings)

    def evaluate(self, corpus: Corpus | Place, **settings: Any) -> dict[str, Any]:
        """What a run's `eval` lines have, for a corpus made with the model's tokenizer, and what it
        is of; settings as for `electra evaluate`: `part="all"`."""
        corpus = corpus if isinstance(corpus, Corpus) else Corpus.open(Path(corpus))
        return evaluate_model(self.path, corpus, **settings)

    @whole_vectors
    @torch.inference_mode()
    def encode(self, text: str) -> Encoded:
        """The tokens of a text and the encoder's state of each."""
        text = _text(text, "encode")
        network = self.networks.discriminator or self.networks.network("generator")
        tokenizer, longest = self.networks.needed_tokenizer(), network.config.max_positions
        if len(ids := tokenizer.encode(text)) > longest:
            what = f"The text has {len(ids):,} tokens, the model reads at most {longest:,}."
            raise ElectraError(what, where="text", fix="give one part after the other")
        x = torch.tensor([ids])
        states = network.modules["encoder"](x, torch.zeros_like(x), None, None)[0]
        return Encoded(tokenizer.decode_tokens(ids), states.numpy())

    def finetune(
        self,
        data: Place | tasks.Table,
        out: Place,
        *,
        text: str | int | Sequence[str | int] | None = None,
        label: str | int | None = None,
        task: str | None = None,
        kind: Literal["classification", "regression", "tagging"] | None = None,
        dev: Place | tasks.Table | None = None,
        test: Place | tasks.Table | None = None,
        quiet: bool = True,
        **settings: Any,
    ) -> Finetuned:
        """Fine-tune on a table with a column of `text` (or two) and one of `label`, or on a `task`
        of GLUE or SQuAD; `settings` are those of `electra finetune`: `epochs=3, seeds=5`.

        `data`, `dev` and `test` are files, or rows in memory: a DataFrame of pandas or a list with
        a dictionary for each row.
        """
        config = from_dict(FinetuneConfig, settings, where="finetune", base=FinetuneConfig())
        with _interruptible():
            finetune_task(
                self.path,
                _source(data, "data"),
                Path(out),
                config,
                task=task,
                texts=_columns(text),
                label=None if label is None else str(label),
                kind=kind,
                dev=_source(dev, "dev") if dev is not None else None,
                test=_source(test, "test") if test is not None else None,
                quiet=quiet,
                note=_say(quiet),
            )
        return Finetuned(out)

    def export(
        self, out: Place, *, step: int | None = None, license: str = "unknown"
    ) -> hf_export.ExportReport:
        """Write the networks for transformers, with a model card; `out` is checked by reading.

        step: of a checkpoint of the run; the newest, if none is given.
        """
        if (self.path / "run.json").is_file():
            return hf_export.export_run(self.path, Path(out), step=step, license=license)
        if step is not None:
            what = "Only a run has checkpoints of several steps."
            fix = "open the run with electra.load, or leave step out"
            raise ElectraError(what, where=str(self.path), fix=fix)
        return hf_export.import_model(self.path, Path(out), license=license)


class Answers(list[dict[str, Any]]):
    """What a model says of each text; a notebook shows a table."""

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for row in self for name in row))
        given = [[row.get(name, "") for name in names] for row in self]
        rows = [[f"{v:.3f}" if isinstance(v, float) else code(v) for v in row] for row in given]
        return to_html("\n".join(table(names, rows)))


class Finetuned:
    """A model of a task, with the results of all its seeds.

    Made by `electra.load_finetuned` and `Model.finetune`.
    """

    def __init__(self, path: Place) -> None:
        self.path = Path(path)
        self._loaded = hf.load_finetuned(self.path)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._loaded.model.to(self._device)
        self.task: tasks.Task = self._loaded.task
        self.results: dict[str, Any] = self._loaded.results

    @property
    def scores(self) -> list[float]:
        """The score of each seed, by the task's metric."""
        return [seed["score"] for seed in self.results["seeds"]]

    def __repr__(self) -> str:
        summary = long_form(self.results["summary"])
        return f"Finetuned({str(self.path)!r}): {self.task.metric} × 100: {summary}"

    def _repr_html_(self) -> str:
        return to_html(card.results_text(self.task, self.results))

    def predict(self, texts: str | Sequence[str | Sequence[str]]) -> Answers:
        """An answer for each text, or each pair of texts where the task has two of them.

        Of a tagger each text is split into words at white space; to a question belongs its passage:
        (question, passage).
        """
        given = list(_each(texts, "predict"))
        if self.task.kind == "tagging":
            rows = [_texts(t.split() if isinstance(t, str) else t, "predict") for t in given]
        else:
            rows = [_texts(t, "predict") for t in given]
            if wrong := [row for row in rows if len(row) != len(self.task.texts)]:
                what = f"The model reads {len(self.task.texts)} texts, given are {len(wrong[0])}."
                pair = len(self.task.texts) == 2
                fix = "give pairs: [(a, b), …]" if pair else "give one string for each: [a, b, …]"
                raise ElectraError(what, where="predict", fix=fix)
        if self.task.kind == "qa":
            asked = [Question(str(i), row[0], row[1], (), -1) for i, row in enumerate(rows)]
            answers = answer_questions(self._loaded, asked, self._device)
        else:
            answers = answer_texts(self._loaded, rows, self._device)
        names = () if self.task.kind == "tagging" else self.task.texts
        both = zip(rows, answers, strict=True)
        return Answers({**dict(zip(names, row, strict=False)), **answer} for row, answer in both)
