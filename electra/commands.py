"""What each `electra <command>` does: one dataclass per command, whose fields are its flags.

What stands behind a field, or below it where that is long, is the help of its flag. Heavy imports
happen inside the commands, so that `--help` answers at once.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Union, dataclass_transform

import tyro

from .config import FinetuneConfig, PretrainConfig, flat, to_dict
from .errors import EXIT_OK, EXIT_STOPPED, ElectraError, Stopped, StopRequest
from .recipes import RECIPES, Profile

Settings = Annotated[PretrainConfig, tyro.conf.arg(name="")]
RecipeName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(help=f"{', '.join(RECIPES)}.")]
TuneSettings = Annotated[FinetuneConfig, tyro.conf.arg(name="")]
# fmt: off
TaskName = Literal[
    "cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "ax", "squad1", "squad2"
]
# fmt: on


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Command:
    """What `electra NAME` does, for every class NAMECommand below: a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def run(self) -> int | None:
        """Do it; returns an exit code, or nothing where all went well."""
        raise NotImplementedError

    def given(self, *names: str) -> dict[str, Any]:
        """Flags that go on under their own names."""
        return {name: getattr(self, name) for name in names}


class TokenizerCommand(Command):
    """Train a WordPiece tokenizer on text; the same text gives the same file, bit for bit."""

    input: tuple[str, ...]
    """Files, folders or patterns (txt, jsonl, parquet, warc, …), hf:NAME, or - for a pipe."""
    out: Path  # Where the tokenizer goes.
    vocab_size: int = 30_522  # Entries of the vocabulary.
    lowercase: bool = True  # Read everything in lower case.
    strip_accents: bool | None = None  # Remove accents; by default exactly when lower-casing.
    column: str = "text"  # Column of jsonl and parquet files that holds the text.
    max_bytes: int = 1 << 30  # Text that is used for training; of more, a fixed sample is taken.

    def run(self) -> None:
        from .data.sources import receive
        from .data.tokenizer import train_tokenizer
        from .files import exclusive

        inputs = receive(self.input, self.out, lambda: False)
        reading = self.given("lowercase", "strip_accents", "column", "max_bytes")
        tokenizer = train_tokenizer(inputs, vocab_size=self.vocab_size, note=tell, **reading)
        with exclusive(self.out):
            tokenizer.save(self.out)
            if "-" in self.input:
                (self.out / "stdin.txt").unlink()
        print(f"{tokenizer.vocab_size:,} tokens in {self.out} (hash {tokenizer.hash[:12]})")
        if tokenizer.vocab_size < self.vocab_size:
            print(f"the text has no more than that; {self.vocab_size:,} were asked for")


class PrepareCommand(Command):
    """Turn text into a corpus of token sequences; the same command again continues."""

    input: tuple[str, ...]
    """Files, folders or patterns (txt, jsonl, parquet, warc, …), hf:NAME, or - for a pipe."""
    tokenizer: Path  # Folder, tokenizer.json or vocab.txt.
    out: Path  # Where the corpus goes.
    length: int = 128  # Tokens of a sequence.
    builder: Literal["packed", "segments"] = "packed"
    """packed: every token is used once. segments: the released code's two-segment examples."""
    short_percent: float | None = None
    """Share of the sequences that get a random shorter length; default: packed 10, segments 5."""
    held_out_percent: float = 1.0  # Share of the documents that is set aside for evaluation.
    workers: int | None = None  # Processes; default: one per core.
    cluster: str | None = None
    """Work on the Ray cluster at host:port, of which this machine is a node (extra ray)."""
    column: str = "text"  # Column of jsonl and parquet files that holds the text.
    seed: int = 0  # Seed of the builder's random choices.

    def run(self) -> None:
        from .data.tokenizer import Tokenizer

        shares = self.given("short_percent", "held_out_percent")
        options = self.given("builder", "workers", "cluster", "column", "seed") | shares
        tokenizer = Tokenizer.load(self.tokenizer)
        _prepare(self.input, tokenizer, self.out, sequence_length=self.length, **options)


class CheckCommand(Command):
    """Find out what is wrong with the data before training on it."""

    input: tuple[str, ...] = ()  # Text files, folders or patterns.
    corpus: Path | None = None  # A prepared corpus.
    column: str = "text"  # Column of jsonl and parquet files that holds the text.

    def run(self) -> int:
        from .data.check import check_corpus, check_text

        if bool(self.input) == (self.corpus is not None):
            what = "check needs --input or --corpus, one of them."
            fix = "give text files with --input, or a prepared corpus with --corpus"
            raise ElectraError(what, where="electra check", fix=fix)
        report = check_corpus(self.corpus) if self.corpus else check_text(self.input, self.column)
        for name, value in report.facts.items():
            form = ",.3g" if isinstance(value, float) else "," if isinstance(value, int) else ""
            print(f"{name.replace('_', ' '):32} {value:{form}}")
        for finding in report.findings:
            print(f"{finding.level:7} {finding.what}")
            for label, text in (("where", finding.where), ("to do", finding.fix)):
                if text:
                    print(f"        {label}: {text}")
        return report.exit_code


class PlanCommand(Command):
    """Show what a run takes: parameters, FLOPs, memory, tokens; time and money by device."""

    recipe: RecipeName = "small"
    profile: Profile = "best"  # Which side to take where paper and released code differ.
    config: Path | None = None  # TOML or JSON file whose settings replace the recipe's.
    vocab_size: int = 30_522  # Entries of the vocabulary.
    tokens_per_second: float | None = None
    """Measured speed of one device to plan with, instead of those a model of the hardware
    predicts."""
    gpu: str | None = None
    """Device of --tokens-per-second, for its price, of the memory shown and of --gpus (for these
    two H200 by default)."""
    gpus: tuple[int, ...] = ()
    """Numbers of GPUs to predict the speed on several for, such as 8 64 512."""
    prices: dict[str, float] = field(default_factory=dict)
    """Dollars an hour instead of the listed ones: --prices H200 3.1 L4 0.6."""
    padded: bool = False  # Predict for a corpus with short sequences, whose attention needs a mask.
    settings: Settings = field(default_factory=PretrainConfig)

    def run(self) -> None:
        from .studies.plan import make_plan
        from .studies.roofline import Model, cost_table, device_named, hours_at, scaling_table

        for name in ("vocab_size", "tokens_per_second"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                fix = "use a number above 0"
                raise ElectraError(f"{name} is {value}.", where=f"--{name}", fix=fix)
        self.settings.check_sizes()
        plan, rate = make_plan(self.settings, self.vocab_size), self.tokens_per_second
        s, name = self.settings, self.gpu or "H200"
        model = Model(config=s, plan=plan, **self.given("vocab_size", "padded"))
        each, generator = model.sequence_bytes(device_named(name)), s.generator.kind
        if s.objective.kind == "mlm":
            generator = "none"
        elif s.generator.kind == "network":
            generator = f"{s.generator_encoder.layers} x {s.generator_encoder.hidden_size}"
        batch = plan.state_bytes + s.data.at_once(s.data.batch_size) * each
        most = "at most " if s.run.minutes else ""
        limit = f" in {s.run.minutes:g} minutes" if s.run.minutes else ""
        rows = {
            "recipe": s.name,
            "encoder": f"{s.encoder.layers} x {s.encoder.hidden_size}, {s.encoder.attention_heads} "
            f"heads, feed-forward {s.encoder.ffn_size}, embeddings {s.encoder.embedding_size}",
            "generator": generator,
            "parameters kept": f"{plan.discriminator_parameters:,}",
            "parameters of the generator": f"{plan.generator_parameters:,}",
            "tokens per step": f"{plan.tokens_per_step:,}",
            "steps": f"{most}{s.run.train_steps:,}{limit}",
            "tokens in all": f"{most}{plan.total_tokens:,}",
            "FLOPs per token": f"{plan.flops_per_token / 1e6:,.1f} M",
            "FLOPs in all": f"{most}{plan.total_flops:.3g}",
            "FLOPs by the paper's rules": f"{most}{plan.paper_flops:.3g}",
            "memory for weights and optimizer": f"{plan.state_bytes / 2**30:.2f} GiB",
            "memory per sequence": f"{each / 2**20:.1f} MiB on {name}",
            "memory for a whole batch": f"{batch / 2**30:.2f} GiB",
        }
        if rate is not None:
            hours = hours_at(model, rate)
            time = f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:,.1f} min"
            rows["time"] = f"{time} at {rate:,.0f} tokens/s, as given"
            if self.gpu is not None:
                price = self.prices.get(name, device_named(name).price)
                rows["cost"] = f"${hours * price:,.0f} at ${price:.2f} an hour ({name})"
        for label, value in rows.items():
            print(f"{label:34} {value}")
        if rate is None:
            print("", *cost_table(model, self.prices), sep="\n")
        if self.gpus:
            print("", *scaling_table(model, name, self.gpus, rate), sep="\n")


class PretrainCommand(Command):
    """Pre-train generator and discriminator; the same command again continues."""

    recipe: RecipeName = "small"
    out: Path  # The run directory.
    corpus: Path | None = None  # A corpus made by `electra prepare`.
    input: tuple[str, ...] = ()
    """Text instead of a corpus: a tokenizer is trained and the corpus prepared inside the run."""
    tokenizer: Path | None = None
    """Tokenizer for --input instead of training one; with --init the model's own."""
    vocab_size: int = 30_522  # Entries of the tokenizer trained for --input.
    lowercase: bool = True  # Whether that tokenizer reads everything in lower case.
    builder: Literal["packed", "segments"] | None = None
    """How --input is cut into sequences; default: packed, and segments with --profile released."""
    column: str = "text"  # Column of jsonl and parquet files in --input.
    force: bool = False
    """Continue although settings that make it another experiment, or the corpus, have changed."""
    init: Path | None = None
    """Go on from an export, a run, a transformers ELECTRA or a TensorFlow checkpoint."""
    profile: Profile = "best"  # Which side to take where paper and released code differ.
    config: Path | None = None  # TOML or JSON file whose settings replace the recipe's.
    dry_run: bool = False  # Print the resolved settings and stop.
    quiet: bool = False  # Say nothing while training.
    settings: Settings = field(default_factory=PretrainConfig)

    def run(self) -> None:
        self.settings.check_sizes()
        is_begun = os.path.isdir(self.out / "checkpoints")
        self.settings.check_start(from_model=self.init is not None or is_begun)
        if self.dry_run:
            _print_settings(to_dict(self.settings))
            return
        if bool(self.input) == (self.corpus is not None):
            what = "pretrain needs --corpus or --input, one of them."
            fix = "give a corpus made by `electra prepare`, or text files with --input"
            raise ElectraError(what, where="electra pretrain", fix=fix)
        from .pretrain import open_corpus, pretrain

        for name in self._without_effect():
            tell(f"warning: --{name.replace('_', '-')} has no effect here")
        corpus = open_corpus(self.corpus or self._prepare_inside())
        options = self.given("force", "quiet")
        if self.init is not None:
            from .formats.hf import initial_state, load_pretrained

            state = initial_state(load_pretrained(self.init), self.settings, corpus.vocab_size)
            options |= {"initial": state.parameters, "initial_from": str(self.init)}
            for note in state.notes:
                tell(note)
        pretrain(self.settings, corpus, self.out, **options)
        if int(os.environ.get("RANK", 0)) == 0 and not self.quiet:
            here, export = shlex.quote(str(self.out)), shlex.quote(f"{self.out}/export")
            print(f"done: {self.out}\nnext: electra export {here} --out {export}")

    def _without_effect(self) -> list[str]:
        """Flags that were given for what is there already: a corpus, or a tokenizer."""
        of_tokenizer, of_corpus = ("vocab_size", "lowercase"), ("tokenizer", "builder", "column")
        names = of_tokenizer if self.corpus or self.tokenizer or self.init else ()
        names += of_corpus if self.corpus else ()
        return [name for name in names if getattr(self, name) != getattr(type(self), name)]

    def _prepare_inside(self) -> Path:
        """Tokenizer and corpus of --input, inside the run directory."""
        from .data.sources import receive
        from .data.tokenizer import Tokenizer, train_tokenizer
        from .files import exclusive, json_bytes, read_json, write_atomic

        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            what = "Several processes cannot prepare one corpus."
            fix = "run `electra prepare` first and give --corpus"
            raise ElectraError(what, where="--input", fix=fix)
        made = self.out / "made"
        inputs = receive(self.input, made, lambda: False)
        source = self.tokenizer or made / "tokenizer"
        if self.init is not None and self.tokenizer is None:  # with another one it knows no word
            from .formats.hf import load_pretrained

            load_pretrained(self.init).needed_tokenizer().save(source)
        elif self.tokenizer is None:
            asked, record = self.given("vocab_size", "lowercase"), made / "asked.json"
            before = read_json(record) or asked
            if not (source / "tokenizer.json").exists():
                with exclusive(self.out):
                    made.mkdir(exist_ok=True)
                    write_atomic(record, json_bytes(asked))
                    train_tokenizer(inputs, column=self.column, note=tell, **asked).save(source)
            elif before != asked:
                what = f"The tokenizer of this run was asked for with {before}, now with {asked}."
                fix = "give what it was trained with, or choose another --out"
                raise ElectraError(what, where=str(source), fix=fix)
        length, tokenizer = self.settings.data.sequence_length, Tokenizer.load(source)
        builder = self.builder or ("segments" if self.profile == "released" else "packed")
        options = {"builder": builder, "column": self.column}
        _prepare(inputs, tokenizer, made / "corpus", sequence_length=length, **options)
        return made / "corpus"


class EvaluateCommand(Command):
    """Measure both networks on a corpus, as a run does on its held-out text."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """A run, an export, a transformers ELECTRA or a TensorFlow checkpoint; default: models/small-en
    of the checkout."""
    corpus: Path  # A corpus made by `electra prepare` with the model's tokenizer.
    part: Literal["held-out", "all"] = "held-out"  # Its held-out documents, or all of it.
    batches: int | None = None
    """Batches at most, spread evenly; default: as many as the model's run looked at."""
    out: Path | None = None  # A .json file for the numbers, with model, corpus and machine.
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto takes the GPU when there is one.

    def run(self) -> None:
        from .data.corpus import Corpus
        from .evaluate import evaluate_model
        from .files import json_bytes
        from .runlog import in_json

        options = self.given("part", "batches", "device")
        found = evaluate_model(_model(self.model), Corpus.open(self.corpus), **options)
        rows = {
            "generator's loss": "{mlm_loss:.3f} nats (token frequencies alone "
            "{unigram_entropy:.3f})",
            "generator's best guess": "{mlm_accuracy:.1%} right",
        }
        if found["disc_loss"] is not None:
            rows["discriminator's loss"] = "{disc_loss:.4f}"
            rows["discriminator's AUC"] = "{disc_auc:.3f}"
            rows["precision, recall"] = "{disc_precision:.2f}, {disc_recall:.2f}"
            rows["tokens replaced"] = "{replaced_percent:.1f} %"
        rows["tokens looked at"] = "{tokens:,} of the part {part}"
        rows["masked and sampled as by"] = "{masks_of}"
        for label, form in rows.items():
            print(f"{label:34} {form.format(**found)}")
        if self.out is not None:
            _write(self.out, json_bytes(in_json(found), indent=1))
            print(self.out)


class ExportCommand(Command):
    """Write a run's networks in the layout that transformers loads."""

    run_directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run of `electra pretrain`."""
    out: Path  # Gets the folders discriminator and generator.
    step: int | None = None  # Step of the checkpoint; default: the newest.
    sentence_transformers: bool = False
    """Add to the first of them what makes it one that SentenceTransformer loads as well."""
    license: str = "unknown"  # Licence that the model cards state.
    half: bool = False
    """Store the weights as float16, which is half the bytes; transformers reads them as float32."""
    shard_megabytes: float | None = None
    """Put the weights into files of at most so many megabytes each."""

    def run(self) -> None:
        from .formats.hf_export import Storage, export_run

        limit = self.shard_megabytes
        if limit is not None and not 0 < limit < math.inf:
            what = f"Files of {limit} megabytes hold nothing."
            raise ElectraError(what, where="--shard-megabytes", fix="use a number above 0")
        storage = Storage(self.half, None if limit is None else int(1e6 * limit))
        options = self.given("step", "license")
        report = export_run(self.run_directory, self.out, storage=storage, **options)
        if self.sentence_transformers:
            from .use.embed import for_sentence_transformers

            for_sentence_transformers(report.directories[0])
        _print_export(report)


class ImportCommand(Command):
    """Write a model of transformers or of Google's TensorFlow code as `electra export` does."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A transformers ELECTRA, or a TensorFlow checkpoint: its folder or FOLDER/model.ckpt-N."""
    out: Path  # Gets the folders discriminator and generator, as far as the model has them.
    tokenizer: Path | None = None  # Its vocab.txt or tokenizer.json, if that is not beside it.
    allow_bin: bool = False
    """Also read a pytorch_model.bin: a pickle, read apart and with nothing but tensors in it."""

    def run(self) -> None:
        from .formats.hf_export import import_model

        _print_export(import_model(self.model, self.out, **self.given("tokenizer", "allow_bin")))


class ExtendCommand(Command):
    """Give a model tokens for the words of a domain, before it is trained further on its text."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """An export, a run, a transformers ELECTRA or a TensorFlow checkpoint; default: models/small-en
    of the checkout."""
    input: tuple[str, ...]
    """Text of the domain: files, folders or patterns (txt, jsonl, parquet, warc, …), or hf:NAME."""
    out: Path  # Gets the folders discriminator and generator, as far as the model has them.
    tokens: int = 1000  # How many words become tokens: those that save the most.
    column: str = "text"  # Column of jsonl and parquet files that holds the text.
    max_bytes: int = 1 << 30  # Text that is looked at; of more, a fixed sample is taken.

    def run(self) -> None:
        from .formats.extend import extend

        options = self.given("tokens", "column", "max_bytes")
        done = extend(_model(self.model), self.input, self.out, **options)
        print(f"{len(done.tokens):,} tokens added: {', '.join(done.tokens[:8])}, …")
        print(f"the text has {done.after:.3f} tokens a word, {done.before:.3f} before")
        _print_export(done.report)


class FinetuneCommand(Command):
    """Fine-tune on a task of GLUE, SQuAD or your own data; the same command again continues."""

    model: Path | None = None
    """An export, a run, a transformers ELECTRA or a TensorFlow checkpoint (model.ckpt-N); default:
    models/small-en of the checkout."""
    data: Path
    """The GLUE or SQuAD folder, or your csv, tsv, jsonl, parquet or CoNLL file or folder."""
    out: Path  # The run directory.
    task: TaskName | None = None  # A known task; without one the data is your own.
    text: str | None = None
    """Your column with the text, or two with a comma between them: title,body."""
    label: str | None = None  # Your column with the label.
    kind: Literal["classification", "regression", "tagging"] | None = None
    """What your labels are; default: found from the data."""
    dev: Path | None = None  # Your evaluation data; default: a tenth of --data.
    test: Path | None = None  # Your data without labels, to be answered in RUN/test.
    profile: Literal["paper", "released"] = "paper"
    """released: the defaults of Google's code (docs/finetuning.md)."""
    dry_run: bool = False  # Print the settings and stop.
    quiet: bool = False  # Say nothing while training.
    settings: TuneSettings = field(default_factory=FinetuneConfig)

    def run(self) -> None:
        if self.dry_run:
            _print_settings(to_dict(self.settings))
            return
        from .finetuning.glue import finetune_task
        from .studies.report import report

        options = self.given("task", "label", "kind", "dev", "test", "quiet")
        options["texts"] = tuple(self.text.split(",")) if self.text else ()
        model = _model(self.model)
        finetune_task(model, self.data, self.out, self.settings, note=tell, **options)
        print(report([self.out]))
        here = shlex.quote(str(self.out))
        print(f"model: {self.out}/model\nnext: electra predict --model {here} --input FILE")


class GlueCommand(Command):
    """Fine-tune and score every GLUE task that is present; the same command again continues."""

    model: Path | None = None
    """An export, a run of `electra pretrain`, or a transformers ELECTRA; default: models/small-en
    of the checkout."""
    data: Path  # Folder with CoLA, SST-2, MRPC, … as GLUE distributes them.
    out: Path  # Gets one run directory per task.
    tasks: tuple[str, ...] = ()  # Only these.
    from_mnli: bool = False
    """Start RTE and STS-B from the MNLI model, as the paper does for the test set."""
    wnli: Literal["majority", "train"] = "majority"
    """WNLI is answered with its majority class, or trained like the others."""
    profile: Literal["paper", "released"] = "paper"
    """released: the defaults of Google's code (docs/finetuning.md)."""
    quiet: bool = False  # Say nothing while training.
    settings: TuneSettings = field(default_factory=FinetuneConfig)

    def run(self) -> None:
        from .finetuning.glue import glue
        from .studies.report import report

        options = self.given("from_mnli", "wnli", "quiet")
        options |= {"only": self.tasks, "note": tell}
        glue(_model(self.model), self.data, self.out, self.settings, **options)
        print(report([self.out]))


class PredictCommand(Command):
    """Answer new rows with a fine-tuned model."""

    model: Path  # A run of `electra finetune`, or an exported fine-tuned model.
    input: str  # A file (csv, tsv, jsonl, parquet, txt, CoNLL, SQuAD json), or a text itself.
    out: Path | None = None  # Where the answers go, as .jsonl, .csv or .tsv; default: the screen.

    def run(self) -> None:
        from .finetuning.glue import format_rows, predict_rows

        suffix = self.out.suffix if self.out else ".jsonl"
        if suffix not in (".jsonl", ".ndjson", ".json", ".csv", ".tsv"):
            what, fix = f"Answers cannot be written as '{suffix}'.", "use .jsonl, .csv or .tsv"
            raise ElectraError(what, where=str(self.out), fix=fix)
        rows = predict_rows(self.model, self.input)
        data = format_rows(rows, suffix)
        if self.out is None:
            print(data.decode(), end="")
        else:
            _write(self.out, data)
            print(f"{len(rows):,} answers in {self.out}")


class AblateCommand(Command):
    """Run a study of the paper or your own, scored on GLUE; the same command continues."""

    study: tyro.conf.Positional[str]
    """efficiency, sharing, generator-size, algorithms, rtd-vs-mlm, or a TOML or JSON file with a
    table per row that names its settings."""
    corpus: Path  # A corpus made by `electra prepare`.
    data: Path  # Folder with CoLA, SST-2, MRPC, … as GLUE distributes them.
    out: Path  # Gets ablate.json and a directory per setting and seed.
    base: str = "small"
    """ELECTRA's settings: a recipe, or a TOML or JSON file as for pretrain --config."""
    steps: int | None = None
    """Steps of ELECTRA; default: those of --base. The warm-up keeps its share of them."""
    seeds: int = 3  # Pre-training seeds of every setting.
    first_seed: int | None = None
    """The first of them; default: run.seed of --base. Seeds that were run elsewhere are not run
    again, and `electra report` of both directories has one table."""
    equal: Literal["steps", "flops"] = "steps"
    """What the settings have in common; two-stage training has these steps twice."""
    rows: tuple[str, ...] = ()
    """Rows of the study to run, by their labels as --dry-run prints them; default: all."""
    tasks: tuple[str, ...] = ("cola", "sst2", "mrpc", "stsb", "rte", "qnli")
    """Tasks whose scores are averaged."""
    tuning_seeds: int = 3  # Fine-tuning seeds, of which a task's median is taken.
    tuning: tuple[str, ...] = ()  # Settings of `electra glue`: max-train=2000 epochs=1.
    jobs: int = 1  # Pairs of setting and seed that run at once, in turn on the visible GPUs.
    dry_run: bool = False  # Print the settings with their parameters, FLOPs and steps, and stop.

    def run(self) -> int:
        from .cli import parse
        from .data.corpus import Corpus
        from .studies.ablate import ablate, describe, starting_point
        from .studies.report import report

        counts = {"seeds": self.seeds, "tuning-seeds": self.tuning_seeds, "jobs": self.jobs}
        for name, count in {**counts, "tasks": len(self.tasks)}.items():
            if count < 1:
                what = f"There are {count} {name}."
                raise ElectraError(what, where=f"--{name}", fix="use 1 or more")
        base = starting_point(self.base, self.steps)
        if self.dry_run:
            print(describe(self.study, base, Corpus.open(self.corpus).vocab_size, self.equal))
            return EXIT_OK
        tuning = [f"--{setting}" for setting in self.tuning]
        # A wrong setting is told now, not when the first model waits for it.
        parse(["glue", "--model", "m", "--data", "d", "--out", "o", *tuning])
        options = self.given("tasks", "rows", "seeds", "first_seed", "tuning_seeds", "equal")
        options |= {"jobs": self.jobs, "tuning": tuning, "note": tell}
        code = ablate(self.study, base, self.corpus, self.data, self.out, **options)
        print(report([self.out]))
        return code


class ReportCommand(Command):
    """Compare runs: a Markdown table, CSV, a picture, and a page with all of it."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Runs of pretrain, finetune, glue or ablate, or folders that hold them (two levels deep)."""
    out: Path | None = None  # Gets report.md, report.csv, report.png and the page report.html.

    def run(self) -> None:
        from .studies.report import report

        print(report(self.runs, self.out))


class DetectCommand(Command):
    """Colour each token of a text by the probability that it was replaced."""

    text: tyro.conf.Positional[str]  # The text to look at.
    model: Path | None = None
    """An export, a transformers ELECTRA discriminator, or a run; default: models/small-en of the
    checkout."""
    alternatives: int = 3
    """How many of the generator's alternatives, of those it gives 1 % or more, are shown for a
    suspicious token."""

    def run(self) -> None:
        from rich.console import Console

        from .use.detect import detect, render

        found = detect(_model(self.model), self.text, alternatives=self.alternatives)
        console = Console(highlight=False)
        console.print(render(found), soft_wrap=not console.is_terminal)


class EmbedCommand(Command):
    """Turn each line of a text file into a vector; a line without text into zeros."""

    model: Path | None = None
    """An export, a transformers ELECTRA, or a run; default: models/small-en of the checkout."""
    input: str  # A UTF-8 file, also .gz .bz2 .xz .zst, or - for what is piped in.
    out: Path  # The vectors: .npy, or .parquet with a column vector.
    pooling: Literal["mean", "cls"] = "mean"
    """The mean over a line's tokens with [CLS] and [SEP], or the state of [CLS]."""
    length: int | None = None
    """Tokens of a line that are read; default: 128, or what the model reads."""
    batch_tokens: int | None = None
    """Tokens that are computed together; default: 4,096, on a GPU 65,536."""
    threads: int | None = None  # Batches computed at the same time on a CPU; default: one per core.
    quiet: bool = False  # Show no progress.

    def run(self) -> int:
        from rich.console import Console

        from .use.embed import embed_file

        model = _model(self.model)
        options = self.given("pooling", "length", "batch_tokens", "threads")
        console = Console(file=sys.stderr, highlight=False, quiet=self.quiet)
        try:
            with StopRequest() as stop, console.status("reading …") as status:
                options |= {"should_stop": stop, "progress": status.update}
                done = embed_file(model, self.input, self.out, **options)
        except Stopped:
            tell("electra: stopped; no vectors were written")
            return EXIT_STOPPED
        print(f"{done.lines:,} vectors of {done.width} numbers in {self.out}")
        if done.empty:
            print(f"{done.empty:,} of them are zeros: their lines hold no token")
        return EXIT_OK


class OnnxCommand(Command):
    """Write an exported or fine-tuned model as ONNX and check it in onnxruntime (extra onnx)."""

    model: Path | None = None
    """An export, a run of `electra finetune`, or a transformers ELECTRA; default: models/small-en
    of the checkout, which needs --out."""
    out: Path | None = None
    """A directory for model.onnx, config.json and the tokenizer; default: beside the model."""
    part: Literal["model", "encoder"] = "model"
    """The whole model, or the encoder alone, which gives last_hidden_state."""
    int8: bool = False
    """Also write model_quantized.onnx, with weights of 8 bits, and tell what that costs."""
    data: Path | None = None
    """Labelled rows on which a classifier's accuracy is compared with that of int8."""

    def run(self) -> None:
        from .formats.onnx_export import export_onnx

        if self.model is None and self.out is None:
            what, fix = "Nothing is written into the checkout's model.", "say where with --out"
            raise ElectraError(what, where="electra onnx", fix=fix)
        model = _model(self.model)
        report = export_onnx(model, self.out, part=self.part, int8=self.int8, data=self.data)
        for file in report.files:
            print(f"{file} ({file.stat().st_size / 1e6:,.1f} MB)")
        print(f"checked: outputs within {report.difference:.1e} in onnxruntime")
        cost = report.int8
        if cost:
            print(f"int8: outputs within {cost['largest']:.2g}, {cost['mean']:.2g} on average")
        if "accuracy" in cost:
            print(f"int8: accuracy {cost['accuracy_int8']:.2%}, before {cost['accuracy']:.2%}")


class ServeCommand(Command):
    """Answer over HTTP with a model: detect, classify, tag, answer, embed (extra serve)."""

    model: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """An export, a run, a fine-tuned model or a transformers ELECTRA; default: models/small-en of
    the checkout."""
    port: int = 8000  # Where it listens; 0: any that is free.
    host: str = "127.0.0.1"  # Beyond this machine only with a token in ELECTRA_TOKEN.
    names: tuple[str, ...] = ()  # Host names, other than localhost, under which it is reached.
    workers: int | None = None
    """Batches computed at the same time; default: one per core, on a GPU one."""
    characters: int = 10_000  # The longest text.
    queue: int = 256  # Requests at work and waiting; more are told to come back.
    seconds: float = 30.0  # The longest wait for an answer.

    def run(self) -> int:
        from .use.serve import serve
        from .use.web import Limits

        for name in ("characters", "queue", "seconds", "workers"):
            value, most = getattr(self, name), 1_000_000
            if value is not None and not 1 <= value <= most:
                fix = f"use 1 to {most:,}"
                raise ElectraError(f"{name} is {value}.", where=f"--{name}", fix=fix)
        # Two texts, in JSON at worst two escapes of six bytes a character.
        body = 24 * self.characters + 1024
        limits = Limits(self.characters, body, {}, self.queue, None, self.seconds)
        options: dict[str, Any] = {"workers": self.workers, "hosts": self.names}
        return serve(_model(self.model), self.host, self.port, limits=limits, **options)


class UiCommand(Command):
    """Open a page to try a model, watch runs, fine-tune on a table and look inside (extra ui)."""

    model: Path | None = None
    """An export or a run with both networks, or a discriminator; default: models/small-en of the
    checkout, without which only runs are shown."""
    runs: Path = Path("runs")
    """The folder whose runs are shown, and which gets tables and classifiers."""
    port: int = 7860  # Where it listens.
    host: str = "127.0.0.1"  # Beyond this machine only with a token in ELECTRA_TOKEN.
    per_minute: int = 30  # Requests of one client in a minute, without those that only read.

    def run(self) -> int:
        from .use.ui import ui

        if self.per_minute < 1:
            what = f"{self.per_minute} requests a minute are too few for a page."
            raise ElectraError(what, where="--per-minute", fix="use 1 or more")
        try:
            model = _model(self.model)
        except ElectraError as error:  # the runs are worth a page without a model
            tell(f"electra: {error.what} {error.fix}; only runs are shown")
            model = None
        return ui(model, self.runs, self.host, self.port, self.per_minute)


class DemoCommand(Command):
    """Train, try and compare a tiny ELECTRA on real English text: offline, in a few minutes."""

    out: Path = Path("runs/demo")  # Where everything goes.
    input: tuple[str, ...] = ()
    """Text to train on instead of the text that comes with an installed package."""
    minutes: float | None = None  # Minutes of pre-training at most; default: 2.5.

    def run(self) -> None:
        from .use.demo import demo

        demo(self.out, inputs=self.input, minutes=self.minutes)


class EnvCommand(Command):
    """Show versions, device and precision, and what is missing."""

    def run(self) -> None:
        from .environment import describe

        for name, value in describe().items():
            print(f"{name:16} {value}")


class CompletionCommand(Command):
    """Print the script with which a shell completes commands and flags at the Tab key."""

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """bash: eval "$(electra completion bash)"."""

    def run(self) -> None:
        from .cli import read_flags

        named = (Annotated[cls, tyro.conf.subcommand(name)] for name, cls in COMMANDS.items())
        every: Any = Union[tuple(named)]  # noqa: UP007
        read_flags(every, prog="electra", args=["--tyro-print-completion", self.shell])


def _prepare(inputs: Sequence[str | Path], tokenizer: Any, out: Path, **settings: Any) -> None:
    """Prepare a corpus with a progress line and a summary."""
    from rich.console import Console

    from .data.corpus import prepare

    console = Console(file=sys.stderr, highlight=False)
    with StopRequest() as stop, console.status("reading …") as status:
        settings |= {"progress": status.update, "should_stop": stop}
        manifest = prepare(inputs, tokenizer, out, **settings)
    print(manifest.summary())


def _model(named: Path | None) -> Path:
    """The model that was named; if none was, that of the checkout, and which one that is."""
    if named is not None:
        return named
    from .files import shipped_model

    model = shipped_model()
    tell(f"model: {model}, as none was named")
    return model


def tell(text: str) -> None:
    """Print to stderr, so that piped output stays clean."""
    print(text, file=sys.stderr, flush=True)


def _write(file: Path, data: bytes) -> None:
    from .files import storage_errors, write_atomic

    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, data)


def _print_export(report: Any) -> None:
    print(*report.directories, *(f"checked: {check}" for check in report.checks), sep="\n")


def _print_settings(values: dict[str, Any]) -> None:
    for key, value in flat(values).items():
        print(f"{key} = {value}")


COMMANDS = {cls.__name__.removesuffix("Command").lower(): cls for cls in Command.__subclasses__()}
