"""Fuzzing: whatever a file or a command line holds, the outcome is a value or an ElectraError.

Every property takes inputs that hypothesis makes: any bytes, and valid files with a few changes.
Another exception, or an error that does not say what, where and what to do, is a bug. `make test`
tries about a thousand inputs, always the same ones; `make test-long` tries over a hundred thousand
new ones and prints how many.
"""

from __future__ import annotations

import bz2
import copy
import gzip
import io
import json
import lzma
import os
import shutil
import time
import tomllib
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from artefacts import SMALLEST, SQUAD, Artefacts, make_artefacts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from electra import cli
from electra.checkpoint import read_checkpoint
from electra.config import FinetuneConfig, PretrainConfig, from_dict, read_settings_file, to_dict
from electra.data.check import check_corpus, check_text
from electra.data.corpus import Corpus, prepare
from electra.data.text import TextStats, expand_inputs, read_documents
from electra.data.tokenizer import LineEncoder, Tokenizer
from electra.errors import CorruptError, ElectraError, Stopped
from electra.files import json_sha256, read_json, sha256_file
from electra.finetuning import squad, tasks
from electra.finetuning.squad import Question
from electra.finetuning.tasks import GLUE, Task
from electra.formats import hf
from electra.recipes import recipe
from electra.rundir import load_run
from electra.studies.plan import make_plan
from electra.studies.report import report

LONGER = 102  # times as many inputs in the long tier


class World(NamedTuple):
    """What the properties read and damage; `place` is theirs to write to."""

    place: Path
    artefacts: Artefacts
    tokenizer: Tokenizer


class Property(NamedTuple):
    check: Callable[[World, Any], None]
    inputs: st.SearchStrategy[Any]
    number: int


PROPERTIES: dict[str, Property] = {}


def fuzz(number: int, *inputs: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], None]:
    """Registers a property with its inputs and how many of them the normal tier tries."""

    def register(check: Callable[..., None]) -> None:
        PROPERTIES[check.__name__] = Property(check, st.tuples(*inputs), number)

    return register


@contextmanager
def explained() -> Generator[None]:
    """An error in the block is fine if a person can act on it."""
    try:
        yield
    except ElectraError as error:
        if not (error.what and error.where and error.fix):
            raise AssertionError(f"not explained: {error!r}") from error


# ---------------------------------------------------------------- inputs


HOSTILE = (
    *(b"\0", b"\xff", b"\r", b"\n", b"\t", b'"', b"\\", b"{", b"null", b"NaN", b"-1", b"1e999"),
    *(b"\xed\xa0\x80", b"\\ud800", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"[" * 2000, b"9" * 400),
)


def edits(most: int = 4) -> st.SearchStrategy[list[tuple[float, str, bytes]]]:
    """Changes to some bytes: where (a share of the length), what, and new bytes."""
    kinds = st.sampled_from(["put", "insert", "delete", "cut", "repeat"])
    hostile = st.sampled_from(HOSTILE)
    edit = st.tuples(st.floats(0, 1), kinds, st.binary(max_size=6) | hostile)
    return st.lists(edit, min_size=1, max_size=most)


def edited(data: bytes, changes: list[tuple[float, str, bytes]]) -> bytes:
    for share, kind, new in changes:
        at = int(share * len(data))
        if kind == "put":
            data = data[:at] + new + data[at + len(new) :]
        elif kind == "insert":
            data = data[:at] + new + data[at:]
        elif kind == "delete":
            data = data[:at] + data[at + max(1, len(new)) :]
        elif kind == "cut":
            data = data[:at]
        else:
            data = data + data[at:]
    return data


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 130)
    | st.sampled_from([10**400, -(2**63), 2**63, 1e308, float("inf"), float("nan"), "", "../x"])
    | st.floats()
    | st.text(max_size=8)
)
values = st.recursive(
    scalars,
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3),
    max_leaves=5,
)
# Which child is gone into at each level (a share of their number), what is done there, with what.
change = st.tuples(
    st.lists(st.floats(0, 0.999), min_size=1, max_size=7),
    st.sampled_from(["replace", "replace", "delete", "add"]),
    values,
)
changes = st.lists(change, min_size=1, max_size=3)


def changed(value: Any, given: list[tuple[list[float], str, Any]]) -> Any:
    """A JSON value with some of its parts replaced, deleted or added."""
    root = [copy.deepcopy(value)]
    for path, kind, new in copy.deepcopy(given):
        node: Any = root
        key: Any = 0
        for share in path:
            inner = node[key]
            if not isinstance(inner, dict | list) or not inner:
                break
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            node, key = inner, keys[int(share * len(keys))]
        if kind == "replace" or node is root:
            node[key] = new
        elif kind == "delete":
            del node[key]
        elif isinstance(node, dict):
            node[f"{key}x"] = new
        else:
            node.insert(key, new)
    return root[0]


def dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=True).encode()


words = st.sampled_from(["river", "stones", "É", "😀", "\u200d", "\u2028", "ש", "<b>", "x" * 90])
lines = st.lists(words | st.text(max_size=12), max_size=8).map(" ".join)
texts = st.lists(lines, max_size=9).map("\n".join)
prose = texts.map(lambda text: text.encode("utf-8", "surrogatepass"))


# ---------------------------------------------------------------- text

PACK: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}
ROWS = b'{"text": "one river\\nand stones", "n": 1}\r\n\n{"text": "caf\\u00e9"}\n'
SHEET = pa.table({"text": ["one", "two\n\nthree", ""], "n": [1, 2, 3]})


def parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


raw_text = st.tuples(
    st.sampled_from([".txt", ".jsonl", ".json", ""]),
    st.sampled_from(list(PACK)),
    st.binary(max_size=60)
    | prose
    | st.just(ROWS)
    | changes.map(lambda c: dumped(changed({"text": "a"}, c))),
    st.none() | edits(),
    st.none() | edits(1),
)


def write_text(world: World, given: Any) -> Path:
    suffix, packing, content, inner, outer = given
    content = edited(content, inner) if inner else content
    packed = PACK[packing](content)
    path = world.place / f"text{suffix}{packing}"
    path.write_bytes(edited(packed, outer) if outer else packed)
    return path


@fuzz(160, raw_text)
def text_files(world: World, given: Any) -> None:
    path, stats = write_text(world, given), TextStats()
    with explained():
        documents = list(read_documents(expand_inputs([path]), stats=stats))
        found = [line for document in documents for line in document.lines]
        assert all(line and not line.isspace() and "\n" not in line for line in found)
        assert (stats.documents, stats.lines) == (len(documents), len(found))
        assert stats.characters == sum(map(len, found))
        for line in found:
            line.encode()


@fuzz(60, edits(), st.sampled_from(["text", "n", "none"]))
def parquet_files(world: World, changes: Any, column: str) -> None:
    path = world.place / "text.parquet"
    path.write_bytes(edited(parquet(SHEET), changes))
    with explained():
        list(read_documents([path], column=column, stats=TextStats()))
    with explained():
        tasks.load(None, path, texts=["text"], label="n")


@fuzz(40, raw_text)
def checks_of_text(world: World, given: Any) -> None:
    found = check_text([write_text(world, given)])
    assert found.findings
    dumped(found.facts)
    for finding in found.findings:
        assert finding.level == "ok" or (finding.what and finding.fix), finding


# ---------------------------------------------------------------- labelled data

TABLE = "text,label,index\n" + "".join(f'"a, ""{i}""",{i % 3}.5,{i}\n' for i in range(30))
kinds = st.sampled_from([None, "classification", "regression", "tagging"])
columns = st.sampled_from([(), ("text",), ("text", "label"), ("none",)])


@fuzz(
    90,
    st.sampled_from([".csv", ".tsv", ".jsonl", ".txt", ".conll"]),
    st.sampled_from([TABLE, TABLE.replace(",", "\t"), TABLE.replace(",", " ")]).map(str.encode)
    | prose
    | st.binary(max_size=80)
    | st.lists(changes, max_size=20).map(
        lambda rows: b"\n".join(dumped(changed({"text": "a", "label": 1}, c)) for c in rows)
    ),
    st.none() | edits(),
    kinds,
    columns,
)
def tables_of_ones_own(
    world: World, suffix: str, content: bytes, changes: Any, kind: Any, texts: Any
) -> None:
    path = world.place / f"table{suffix}"
    path.write_bytes(edited(content, changes) if changes else content)
    with explained():
        loaded = tasks.load(None, path, texts=texts, kind=kind)
        for examples in loaded.splits.values():
            assert len(examples.texts) == len(examples.ids)
            assert len(examples.labels) in (0, len(examples.texts))
    for task in (GLUE["cola"], Task(name="t", kind="tagging", metric="f1", texts=("words",))):
        with explained():
            tasks.read_inputs(path, task)


GLUE_ROWS = {
    "cola": "x\t1\t\tone river\nx\t0\t*\tone stones\n",
    "sst2": "sentence\tlabel\none river\t1\none stone\t0\n",
    "mrpc": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t1\t2\ta b\tc d\n0\t1\t2\te\tf\n",
    "stsb": "index\tsentence1\tsentence2\tscore\n0\ta\tb\t4.5\n1\tc\td\t1.0\n",
    "qqp": "id\tquestion1\tquestion2\tis_duplicate\n0\ta\tb\t1\n1\tc\td\t0\n",
    "mnli": "index\tsentence1\tsentence2\tgold_label\n0\ta\tb\tneutral\n1\tc\td\tentailment\n",
    "qnli": "index\tquestion\tsentence\tlabel\n0\ta\tb\tentailment\n1\tc\td\tnot_entailment\n",
}
FOLDERS = {name: folder for name, folder in tasks._FOLDERS.items() if name in GLUE_ROWS}


@fuzz(40, st.sampled_from(list(GLUE_ROWS)), edits())
def folders_of_glue(world: World, name: str, changes: Any) -> None:
    folder = world.place / "GLUE" / FOLDERS[name]
    folder.mkdir(parents=True, exist_ok=True)
    stem = "dev_matched" if name == "mnli" else "dev"
    (folder / f"{stem}.tsv").write_text(GLUE_ROWS[name])
    (folder / "train.tsv").write_bytes(edited(GLUE_ROWS[name].encode(), changes))
    with explained():
        loaded = tasks.load(name, folder.parent)
        assert len(loaded.splits["dev"].texts) == 2


STATE = {"_data_files": [{"filename": "data.arrow"}]}
INFO = {"features": {"label": {"names": ["no", "yes"]}, "sentence": {"dtype": "string"}}}


@fuzz(40, changes, changes, st.none() | edits(2))
def folders_of_datasets(world: World, state: Any, info: Any, changes: Any) -> None:
    folder = world.place / "saved"
    folder.mkdir(exist_ok=True)
    table = pa.table({"sentence": ["one", "two", "three"] * 9, "label": [0, 1, -1] * 9})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    (folder / "data.arrow").write_bytes(edited(sink.getvalue(), changes or []))
    (folder / "state.json").write_bytes(dumped(changed(STATE, state) if not changes else STATE))
    (folder / "dataset_info.json").write_bytes(dumped(changed(INFO, info)))
    with explained():
        tasks.load(None, folder)


# ---------------------------------------------------------------- questions


@fuzz(50, changes | edits(), st.booleans())
def files_of_questions(world: World, given: Any, labelled: bool) -> None:
    path = world.place / "questions.json"
    is_bytes = isinstance(given[0][0], float)
    path.write_bytes(edited(dumped(SQUAD), given) if is_bytes else dumped(changed(SQUAD, given)))
    with explained():
        for question in squad.read(path, labelled=labelled):
            for answer in question.answers[:1]:
                assert question.context.startswith(answer, question.start)


@fuzz(
    60,
    st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" a.é̈한नि😀"), min_size=1),
    st.floats(0, 0.999),
    st.floats(0, 1),
)
def answers_in_any_script(world: World, context: str, first: float, share: float) -> None:
    """The tokens of an answer lead back to a text that holds it."""
    start = int(first * len(context))
    stop = start + max(1, int(share * (len(context) - start)))
    answer = context[start:stop]
    question = Question("q", "who ?", context, (answer,), start)
    features, found = squad.windows([question], world.tokenizer, training=True)
    if len(found) > 1:
        return  # longer than a window: other tests
    window, covered = found[0], set[int]()
    for begin, end in window.offsets.tolist():
        assert 0 <= begin <= end <= len(context)
        covered |= set(range(begin, end))
    inside = [i for i in range(start, stop) if i in covered]
    s, e = (int(features.targets[name][0]) - window.first for name in ("start", "end"))
    if not inside:
        assert features.targets["start"][0] == features.targets["end"][0] == 0
        return
    begin, end = window.offsets[s, 0], window.offsets[e, 1]
    assert begin <= inside[0]
    assert inside[-1] < end
    assert context[inside[0] : inside[-1] + 1] in context[begin:end]


# ---------------------------------------------------------------- the corpus


@fuzz(12, texts, st.sampled_from(["packed", "segments"]), st.integers(5, 40), st.integers(0, 2))
def corpora_of_any_text(world: World, text: str, builder: Any, length: int, held: int) -> None:
    path, out = world.place / "any.txt", world.place / "any"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    shutil.rmtree(out, ignore_errors=True)
    with explained():
        prepare(
            [path],
            world.tokenizer,
            out,
            sequence_length=length,
            builder=builder,
            short_percent=0,
            held_out_percent=held * 25.0,
            workers=1,
        )
        corpus = Corpus.open(out)
        for part in (corpus.train, corpus.held_out):
            ids, _, lengths = part.gather(np.arange(len(part)))
            assert ids.shape == (len(part), length)
            assert (lengths <= length).all()
        if builder == "packed" and not held:
            kept = [line for d in read_documents([path], stats=TextStats()) for line in d.lines]
            wanted, _ = LineEncoder(world.tokenizer).encode_lines(kept)
            stored = corpus.train.read_all()
            special = (world.tokenizer.cls_id, world.tokenizer.sep_id)
            plain = stored[~np.isin(stored, special)]
            assert plain.tolist() == [i for i in wanted.tolist() if i not in special]


def signed(manifest: Any, sign: Callable[[Any], str]) -> Any:
    """The manifest with a checksum that fits, as far as it can have one."""
    if isinstance(manifest, dict):
        manifest.pop("checksum", None)
        try:
            manifest["checksum"] = sign(manifest)
        except (ValueError, TypeError, RecursionError):
            manifest["checksum"] = ""
    return manifest


@contextmanager
def copied(source: Path, copy: Path) -> Generator[Path]:
    """A fresh copy of a directory."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(source, copy)
    yield copy


@fuzz(
    60, edits(), st.sampled_from(["manifest.json", "train-00000.tokens.bin"]) | st.text(max_size=3)
)
def damaged_corpora(world: World, changes: Any, name: str) -> None:
    """A corpus of which a byte was changed is never opened."""
    path = damaged = world.place / "corpus"
    source = world.artefacts.corpus
    if not path.exists():
        shutil.copytree(source, path)
    files = sorted(p.name for p in source.iterdir() if p.is_file() and p.name[0] != ".")
    name = name if name in files else files[len(name) % len(files)]
    before = (source / name).read_bytes()
    after = edited(before, changes)
    (path / name).write_bytes(after)
    try:
        with explained():
            Corpus.open(path)
            if name == "manifest.json":
                assert json.loads(before) == json.loads(after)
            else:
                assert before == after
        assert check_corpus(damaged).findings
    finally:
        (path / name).write_bytes(before)


@fuzz(60, changes)
def forged_manifests(world: World, changes: Any) -> None:
    """Also with the right checksum a manifest that makes no sense is refused."""
    path = world.place / "corpus"
    if not path.exists():
        shutil.copytree(world.artefacts.corpus, path)
    before = (path / "manifest.json").read_bytes()
    forged = signed(changed(json.loads(before), changes), json_sha256)
    (path / "manifest.json").write_bytes(dumped(forged))
    try:
        with explained():
            corpus = Corpus.open(path)
            corpus.train.gather(np.arange(min(3, len(corpus.train))))
        check_corpus(path)
    finally:
        (path / "manifest.json").write_bytes(before)


@fuzz(10, changes | edits())
def notes_of_an_unfinished_corpus(world: World, given: Any) -> None:
    text, out = world.place / "begun.txt", world.place / "begun"
    if not text.exists():
        text.write_text("one river\n\none stone\n\nall rivers\n")
        prepare([text], world.tokenizer, out, sequence_length=8, workers=1)
        manifest = json.loads((out / "manifest.json").read_bytes())
        job = {"settings": manifest["settings"], "tokenizer": manifest["tokenizer_hash"]}
        job["inputs"] = manifest["inputs"]["identity"]
        notes = signed({"job": job, "shards": manifest["shards"]}, json_sha256)
        (world.place / "begun.json").write_bytes(dumped(notes))
        shutil.copytree(out, world.place / "begun.copy")
    shutil.rmtree(out)
    shutil.copytree(world.place / "begun.copy", out)
    notes = (world.place / "begun.json").read_bytes()
    is_bytes = isinstance(given[0][0], float)
    if is_bytes:
        after = edited(notes, given)
    else:
        after = dumped(signed(changed(json.loads(notes), given), json_sha256))
    (out / "progress.json").write_bytes(after)
    (out / "manifest.json").unlink()
    with explained():
        prepare([text], world.tokenizer, out, sequence_length=8, workers=1)
        assert Corpus.open(out).manifest.fingerprint


# ---------------------------------------------------------------- settings


def names_of(cls: Any) -> st.SearchStrategy[Any]:
    return st.dictionaries(
        st.sampled_from([f.name for f in fields(cls)]) | st.text(max_size=4), values, max_size=4
    )


groups = st.one_of(
    *(
        names_of(type(getattr(SMALLEST, f.name))).map(lambda inner, name=f.name: {name: inner})
        for f in fields(SMALLEST)
        if f.name != "name"
    )
)


@fuzz(120, groups | names_of(PretrainConfig) | changes.map(lambda c: changed(to_dict(SMALLEST), c)))
def settings_of_pretraining(world: World, given: Any) -> None:
    path = world.place / "settings.json"
    path.write_bytes(dumped(given))
    with explained():
        config = from_dict(PretrainConfig, read_settings_file(path), where="x", base=recipe("tiny"))
        assert from_dict(PretrainConfig, to_dict(config), where="x") == config
        make_plan(config)
        assert config.masked_slots >= 1


@fuzz(60, names_of(FinetuneConfig))
def settings_of_finetuning(world: World, given: Any) -> None:
    del world
    with explained():
        config = from_dict(FinetuneConfig, given, where="x")
        assert from_dict(FinetuneConfig, to_dict(config), where="x") == config
        assert config.optim.learning_rate > 0


TOML = b'name = "x"\n[run]\nseed = 5\nminutes = 2.5\n[encoder]\nlayers = 3 # c\n'


@fuzz(60, st.sampled_from([".toml", ".json"]), edits())
def settings_files(world: World, suffix: str, changes: Any) -> None:
    path = world.place / f"file{suffix}"
    path.write_bytes(
        edited(TOML if suffix == ".toml" else dumped(tomllib.loads(TOML.decode())), changes)
    )
    with explained():
        from_dict(PretrainConfig, read_settings_file(path), where=str(path))


# ---------------------------------------------------------------- tokenizer


@fuzz(60, changes | edits())
def files_of_tokenizers(world: World, given: Any) -> None:
    path = world.place / "tokenizer.json"
    before = world.tokenizer.to_json()
    is_bytes = isinstance(given[0][0], float)
    after = (
        edited(before.encode(), given) if is_bytes else dumped(changed(json.loads(before), given))
    )
    path.write_bytes(after)
    with explained():
        tokenizer = Tokenizer.load(path)
        assert tokenizer.hash
        tokenizer.encode("one river, two stones")
        LineEncoder(tokenizer).encode_lines(["one river", "[MASK] É"])


@fuzz(
    40,
    st.none() | edits(),
    names_of(FinetuneConfig)
    | st.fixed_dictionaries({"do_lower_case": values, "strip_accents": values})
    | values,
)
def vocabularies(world: World, changes: Any, config: Any) -> None:
    folder = world.place / "vocabulary"
    folder.mkdir(exist_ok=True)
    tokens = world.tokenizer.decode_tokens(range(world.tokenizer.vocab_size))
    data = "".join(f"{token}\n" for token in tokens).encode()
    (folder / "vocab.txt").write_bytes(edited(data, changes) if changes else data)
    (folder / "tokenizer_config.json").write_bytes(dumped(config))
    with explained():
        Tokenizer.load(folder).encode("one river")


# ---------------------------------------------------------------- models and runs


@fuzz(
    40,
    st.sampled_from(["model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json"]),
    edits(2),
    st.booleans(),
)
def checkpoints(world: World, name: str, changes: Any, sign: bool) -> None:
    """Damage is found; bytes that a checksum vouches for are read or refused, nothing else."""
    source = next((world.artefacts.run / "checkpoints").glob("step-*"))
    path = world.place / source.name
    if not path.exists():
        shutil.copytree(source, path)
    before, notes = (path / name).read_bytes(), (path / "MANIFEST.json").read_bytes()
    after = edited(before, changes)
    (path / name).write_bytes(after)
    is_signed = sign and name != "MANIFEST.json"
    if is_signed:
        manifest = json.loads(notes)
        manifest["files"][name] = {"size": len(after), "sha256": sha256_file(path / name)}
        (path / "MANIFEST.json").write_bytes(dumped(signed(manifest, json_sha256)))
    try:
        with explained():
            read_checkpoint(path)
            assert is_signed or before == after or name == "MANIFEST.json"
    finally:
        (path / "MANIFEST.json").write_bytes(notes)
        (path / name).write_bytes(before)


@fuzz(30, changes)
def forged_checkpoints(world: World, changes: Any) -> None:
    source = next((world.artefacts.run / "checkpoints").glob("step-*"))
    path = world.place / source.name
    if not path.exists():
        shutil.copytree(source, path)
    notes = (source / "MANIFEST.json").read_bytes()
    forged = signed(changed(json.loads(notes), changes), json_sha256)
    (path / "MANIFEST.json").write_bytes(dumped(forged))
    try:
        with explained():
            read_checkpoint(path)
    finally:
        (path / "MANIFEST.json").write_bytes(notes)


@fuzz(30, changes | edits(2))
def records_of_runs(world: World, given: Any) -> None:
    path = world.place / "run"
    if not path.exists():
        shutil.copytree(world.artefacts.run, path)
    before = (world.artefacts.run / "run.json").read_bytes()
    is_bytes = isinstance(given[0][0], float)
    after = edited(before, given) if is_bytes else dumped(changed(json.loads(before), given))
    (path / "run.json").write_bytes(after)
    with explained():
        load_run(path)
    with explained():
        report([path])
    (path / "run.json").write_bytes(before)


@fuzz(30, st.sampled_from(["results.json", "finetune.json", "metrics.jsonl"]), changes | edits(2))
def records_in_reports(world: World, name: str, given: Any) -> None:
    source = world.artefacts.run if name == "metrics.jsonl" else world.artefacts.tuned
    path = world.place / "records"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    for file in source.iterdir():
        if file.is_file() and file.suffix in (".json", ".jsonl"):
            shutil.copy(file, path)
    before = (path / name).read_bytes()
    if isinstance(given[0][0], float):
        after = edited(before, given)
    else:
        rows = before.splitlines() if name == "metrics.jsonl" else [before]
        after = b"\n".join(dumped(changed(json.loads(row), given)) for row in rows)
    (path / name).write_bytes(after)
    with explained():
        report([path])


@fuzz(30, st.sampled_from(["config.json", "model.safetensors"]), changes | edits(2))
def models_of_transformers(world: World, name: str, given: Any) -> None:
    path = world.place / "discriminator"
    if not path.exists():
        shutil.copytree(world.artefacts.export / "discriminator", path)
    before = (path / name).read_bytes()
    if isinstance(given[0][0], float) or name != "config.json":
        after = edited(
            before, [(0.5, "put", b"x")] if not isinstance(given[0][0], float) else given
        )
    else:
        after = dumped(changed(json.loads(before), given))
    (path / name).write_bytes(after)
    try:
        with explained():
            hf.load_pretrained(path)
        with explained():
            hf.load_encoder(path)
    finally:
        (path / name).write_bytes(before)


@fuzz(30, changes)
def models_of_tasks(world: World, given: Any) -> None:
    path = world.place / "tuned"
    if not path.exists():
        shutil.copytree(world.artefacts.tuned / "model", path)
    before = (world.artefacts.tuned / "model" / "electra.json").read_bytes()
    (path / "electra.json").write_bytes(dumped(changed(json.loads(before), given)))
    with explained():
        hf.load_finetuned(path)


# ---------------------------------------------------------------- command lines

FLAGS = """
--input --out --corpus --tokenizer --model --data --column --config --length --vocab-size --recipe
--profile --task --text --help --init --run.seed --encoder.layers --optim.learning-rate --epochs
--generator.width --tokens-per-second --held-out-percent --workers --no-lowercase --debug
text.txt none.txt run tuned export corpus tokenizer table.csv . 1 0 -1 1e999 nan 0.5 tiny small = --
-h * 999999999999999999999999999999
"""
arguments = st.lists(
    st.sampled_from(["", *FLAGS.split()])
    | st.text(st.characters(exclude_characters="\0"), max_size=6),
    max_size=9,
)
SAFE = {"pretrain": ["--dry-run"], "finetune": ["--dry-run"], "plan": ["--tokens-per-second", "9"]}
SAFE["serve"] = SAFE["ui"] = ["--port", "65536"]  # which there is not
commands = [name for name in cli.COMMANDS if name not in ("demo", "glue")]


@fuzz(12, st.sampled_from([*commands, "pretrian"]) | st.text(max_size=4), arguments)
def command_lines(world: World, command: str, given: list[str]) -> None:
    """Any command line ends with a documented exit code, and without a traceback."""
    here = world.place / "here"
    if not here.exists():
        here.mkdir()
        made = world.artefacts
        for name in ("run", "tuned", "export", "corpus"):
            shutil.copytree(getattr(made, name), here / name)
        shutil.copy(made.table, here / "table.csv")
        world.tokenizer.save(here / "tokenizer")
    (here / "text.txt").write_text("one river\n\none stone\n\nall rivers\n")
    given = [a for a in given if a != "--debug" or command != "--debug"]
    before, told = Path.cwd(), io.StringIO()
    os.chdir(here)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(told):
            code = cli.run([command, *given, *SAFE.get(command, [])])
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os.chdir(before)
    assert code in (0, 2, 3), told.getvalue()
    assert code == 0 or told.getvalue()
    assert "--debug" in given or "Traceback" not in told.getvalue()


# ---------------------------------------------------------------- both tiers


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, corpus: Corpus, tokenizer: Tokenizer) -> World:
    place = tmp_path_factory.mktemp("fuzz")
    (place / "made").mkdir()
    return World(place, make_artefacts(place / "made", corpus), tokenizer)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("times", [1, pytest.param(LONGER, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", PROPERTIES)
def test_any_input_gives_a_value_or_an_error_that_explains(
    name: str,
    times: int,
    world: World,
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    check, inputs, number = PROPERTIES[name]
    tried, start = 0, time.monotonic()

    def one(given: Any) -> None:
        nonlocal tried
        tried += 1
        check(world, *given)

    options = settings(
        max_examples=number * times,
        deadline=timedelta(seconds=60),  # nothing hangs
        derandomize=times == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    options(given(inputs)(one))()
    assert tried >= number * times
    request.node.user_properties.append(("inputs", tried))  # for a report of JUnit
    with capfd.disabled():
        if times > 1:
            print(f"\n{name}: {tried:,} inputs in {time.monotonic() - start:.0f} s", end="")


def test_the_long_tier_tries_a_hundred_thousand_inputs() -> None:
    """Each of them is counted when it is tried, above."""
    number = sum(each.number for each in PROPERTIES.values())
    assert number * LONGER >= 100_000


# ---------------------------------------------------------------- what was found


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "read",
    [
        lambda path: read_settings_file(path / "a.json"),
        lambda path: read_json(path / "a.json"),
        lambda path: Corpus.open(path),
        lambda path: read_checkpoint(path),
        lambda path: squad.read(path / "a.json"),
        lambda path: report([path]),
        lambda path: Tokenizer.load(path),
        lambda path: list(read_documents([path / "a.json"], stats=TextStats())),
        lambda path: tasks.load(None, path / "a.json"),
    ],
)
def test_json_without_end_is_refused(read: Callable[[Path], object], tmp_path: Path) -> None:
    for name in ("a.json", "manifest.json", "MANIFEST.json", "run.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes(DEEP)
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    with pytest.raises(ElectraError) as caught:
        read(tmp_path)
    assert caught.value.where


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": None},
        {"tokenizer_files": [{"name": None, "size": 1, "xxh3": ""}]},
        {"special_ids": {"pad": None}},
        {"settings": {"sequence_length": 2**40}},
    ],
    ids=str,
)
def test_a_manifest_that_was_signed_again_is_still_looked_at(
    change: dict[str, Any], world: World, tmp_path: Path
) -> None:
    shutil.copytree(world.artefacts.corpus, tmp_path / "c")
    path = tmp_path / "c" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    for key, value in change.items():
        manifest[key] = manifest[key] | value if isinstance(value, dict) else value
    path.write_bytes(dumped(signed(manifest, json_sha256)))
    with pytest.raises(CorruptError, match=r"cannot be read as|holds no JSON object"):
        Corpus.open(path.parent)


def test_arrow_that_points_outside_of_its_bytes_is_refused(tmp_path: Path) -> None:
    """pyarrow would read there, and the process would die."""
    table = pa.table({"text": ["one", "two", "three"] * 9, "label": [0, 1, 2] * 9})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    offsets = np.array([0, 3, 6, 11], "<i4").tobytes()
    assert sink.getvalue().count(offsets) == 1
    wrong = np.array([0, 3, 2**30, 11], "<i4").tobytes()
    (tmp_path / "data.arrow").write_bytes(sink.getvalue().replace(offsets, wrong))
    (tmp_path / "state.json").write_bytes(dumped(STATE))
    with pytest.raises(ElectraError, match="cannot be read"):
        tasks.load(None, tmp_path)


def test_a_template_that_makes_the_tokenizers_library_panic(world: World, tmp_path: Path) -> None:
    parts = json.loads(world.tokenizer.to_json())
    parts["post_processor"]["single"][0]["SpecialToken"]["id"] = "[X]"
    (tmp_path / "tokenizer.json").write_bytes(dumped(parts))
    with pytest.raises(ElectraError, match="not a tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("config", [[], {"do_lower_case": "no"}, {"strip_accents": 3}], ids=str)
def test_a_tokenizer_config_of_wrong_types(config: Any, world: World, tmp_path: Path) -> None:
    world.tokenizer.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_bytes(dumped(config))
    with pytest.raises(ElectraError, match=r"cannot be read as|holds no JSON object"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"config": None},
        {"vocab_size": 2**33},
        {"vocab_size": -1},
        {"vocab_size": True},
        {"special_ids": {}},
        {"tokenizer_hash": None},
    ],
    ids=str,
)
def test_a_record_of_a_run_that_was_changed(
    change: dict[str, Any], world: World, tmp_path: Path
) -> None:
    """A wrong number of tokens must not ask for all of the memory first."""
    shutil.copytree(world.artefacts.run, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_bytes())
    key, value = next(iter(change.items()))
    if value is None and key != "config":
        del record[key]
    else:
        record[key] = value
    (tmp_path / "run" / "run.json").write_bytes(dumped(record))
    with pytest.raises(CorruptError, match=r"cannot be read as|holds no JSON object"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize("length", [float("inf"), 0, 3, 10**6])
def test_a_length_that_is_none_is_told(world: World, tmp_path: Path, length: float) -> None:
    shutil.copytree(world.artefacts.tuned / "model", tmp_path / "m")
    record = json.loads((tmp_path / "m" / "electra.json").read_bytes())
    (tmp_path / "m" / "electra.json").write_bytes(dumped(record | {"length": length}))
    with pytest.raises(CorruptError, match="does not fit"):
        hf.load_finetuned(tmp_path / "m")


def test_a_batch_size_in_words_is_no_batch_size(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.artefacts.run, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_bytes())
    record["config"]["data"]["batch_size"] = "many"
    (tmp_path / "run" / "run.json").write_bytes(dumped(record))
    with pytest.raises(CorruptError, match=r"cannot be read as|holds no JSON object"):
        report([tmp_path / "run"])


def test_a_whole_number_that_no_float_can_hold() -> None:
    with pytest.raises(ElectraError, match="is not float"):
        from_dict(PretrainConfig, {"optim": {"learning_rate": 10**400}}, where="x")


@pytest.mark.parametrize("name", ["train_steps", "log_every", "max_bad_steps"])
def test_a_whole_number_beyond_all_bounds(name: str) -> None:
    """A plan would multiply it with a float."""
    with pytest.raises(ElectraError, match=name) as caught:
        from_dict(PretrainConfig, {"run": {name: 10**308}}, where="x")
    assert "below 2^63" in caught.value.fix


def test_notes_of_an_unfinished_corpus_that_were_changed(world: World, tmp_path: Path) -> None:
    """Without a checksum a wrong number of pieces would leave out text."""
    text, out, seen = tmp_path / "a.txt", tmp_path / "c", list[str]()
    text.write_text("one river sees .\n\n" * 50)
    options: dict[str, Any] = {"sequence_length": 8, "shard_bytes": 60, "workers": 1}
    with pytest.raises(Stopped):
        prepare(
            [text],
            world.tokenizer,
            out,
            progress=seen.append,
            should_stop=lambda: len(seen) == 3,
            **options,
        )
    notes = (out / "progress.json").read_bytes()
    assert b'"pieces": 1' in notes
    (out / "progress.json").write_bytes(notes.replace(b'"pieces": 1', b'"pieces": 2', 1))
    with pytest.raises(CorruptError, match="checksum"):
        prepare([text], world.tokenizer, out, **options)
    (out / "progress.json").write_bytes(notes)
    prepare([text], world.tokenizer, out, **options)


def test_a_vocabulary_of_true_is_no_number(world: World, tmp_path: Path) -> None:
    shutil.copytree(world.artefacts.export / "discriminator", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_bytes())
    (tmp_path / "m" / "config.json").write_bytes(dumped(config | {"vocab_size": True}))
    with pytest.raises(ElectraError, match="vocab_size is True"):
        hf.load_pretrained(tmp_path / "m")


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_a_model_of_absurd_size_is_refused_at_once(name: str, world: World, tmp_path: Path) -> None:
    shutil.copytree(world.artefacts.export / "discriminator", tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_bytes())
    (tmp_path / "m" / "config.json").write_bytes(dumped(config | {name: 10**12}))
    with pytest.raises(ElectraError, match="is 1000000000000"):
        hf.load_pretrained(tmp_path / "m")
