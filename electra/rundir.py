"""The directory of a pre-training run: entered, continued, and read again.

    RUN/config.json      every setting          RUN/metrics.jsonl   what happened, step by step
    RUN/run.json         corpus, machine        RUN/checkpoints/    see checkpoint.py
    RUN/tokenizer/       as the corpus had it   RUN/curves.png      a look at metrics.jsonl

A directory is continued only as the same experiment: settings are compared one by one, corpus and
tokenizer by their hashes.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from . import __version__
from .checkpoint import Checkpoint, has_any, load_newest, read_checkpoint, saved_steps
from .config import PretrainConfig, RunConfig, flat, from_dict, to_dict
from .data.corpus import Corpus
from .data.tokenizer import Tokenizer
from .errors import DiskFull, ElectraError
from .files import json_bytes, read_json, reading, refuse_another, storage_errors, write_atomic
from .objectives import Objective, SpecialIds, build_objective
from .optim import Adam
from .runlog import read_metrics
from .runtime import Runtime
from .studies.plan import count_parameters

# What may differ when a run is continued; anything else would make it another experiment.
_MAY_CHANGE = {
    *("optim.learning_rate", "optim.muon_rate", "data.micro_batch", "data.on_device"),
    *(f"run.{field.name}" for field in fields(RunConfig) if field.name != "seed"),
}
# What cannot differ even by force: the saved tensors would not fit, or mean something else.
_SHAPES = (
    "encoder.layers",
    "encoder.hidden_size",
    "encoder.ffn_size",
    "encoder.attention_heads",
    "encoder.embedding_size",
    "encoder.max_positions",
    "generator.width",
    "generator.depth",
    "generator.kind",
    "generator.sharing",
    "objective.kind",
    "objective.algorithm",
    "objective.disc_head",
)


def check_fits(config: PretrainConfig, corpus: Corpus) -> None:
    """The corpus has the settings' sequence length and at least one example."""
    if corpus.sequence_length != config.data.sequence_length:
        raise ElectraError(
            f"The corpus holds sequences of {corpus.sequence_length} tokens, the settings ask for "
            f"{config.data.sequence_length}.",
            where="data.sequence_length",
            fix=f"prepare the corpus with --length {config.data.sequence_length}, or train with "
            f"--data.sequence-length {corpus.sequence_length}",
        )
    if len(corpus.train) == 0:
        raise ElectraError(
            "The corpus holds no training example.",
            where=str(corpus.path),
            fix="prepare it from more text",
        )


def record_of(out: Path) -> dict[str, Any]:
    """What run.json says; nothing where nothing was saved: such a run has no past and begins again
    as whatever is asked for, be it that its settings were refused behind `enter_run`."""
    record = read_json(out / "run.json")
    return record if has_any(out / "checkpoints") else {}


def enter_run(
    config: PretrainConfig,
    corpus: Corpus,
    out: Path,
    runtime: Runtime,
    before: dict[str, Any],
    initial_from: str | None,
    force: bool,
) -> list[str]:
    """Create the run directory, or make sure that an existing one is the same experiment.

    Returns what has changed, in words.
    """
    changed: dict[str, str] = {}
    refuse_another(out, "run.json")
    texts = corpus.manifest.inputs["files"]
    if before:
        changed = _compare(config, corpus, out, before, force)
    elif (out / "checkpoints").exists() and not (out / "run.json").exists():
        raise ElectraError(
            "This directory has checkpoints but no run.json.",
            where=str(out),
            fix="restore run.json, or choose another --out",
        )
    elif any(Path(f["path"]).absolute().parent == out.absolute() for f in texts):
        raise ElectraError(
            "The corpus was made from text in this directory.",
            where=str(out),
            fix="choose another --out: the run's files would be read as text next time",
        )
    config.check_sizes()
    if not before and (out / "run.json").exists():  # of a run that never saved anything
        shutil.rmtree(out / "tokenizer", ignore_errors=True)
        (out / "metrics.jsonl").unlink(missing_ok=True)
    _copy_tokenizer(corpus, out, is_new=not before)
    write_atomic(out / "config.json", json_bytes(to_dict(config), indent=1))
    history = list(before.get("history", []))
    if changed:
        newest = max(saved_steps(out / "checkpoints"), default=0)
        history.append({"step": newest, "changed": list(changed.values()), "force": force})
    manifest = corpus.manifest
    record = {
        "format": 1,
        "version": __version__,
        "config": to_dict(config),
        "data": {  # by name: a model card tells of it, and paths are nobody's business
            "files": [Path(file["path"]).name for file in manifest.inputs["files"][:10]],
            **{key: manifest.inputs[key] for key in ("count", "bytes")},
            "documents": manifest.text["documents"],
            "tokens": manifest.counts("train").tokens,
        },
        "corpus_fingerprint": corpus.fingerprint,
        "tokenizer_hash": corpus.tokenizer_hash,
        "vocab_size": corpus.vocab_size,
        "special_ids": corpus.special_ids,
        "train_examples": len(corpus.train),
        "environment": runtime.describe(),
        "threads": runtime.threads,
        "micro_batch": before.get("micro_batch", {}) if config.data.micro_batch == "auto" else {},
        "init": before.get("init") if before else initial_from,
        "history": history,
    }
    write_atomic(out / "run.json", json_bytes(record, indent=1))
    if initial_from not in (None, record["init"]):
        other = f"init: {record['init']} → {initial_from} (without effect: the run goes on from its"
        changed["init"] = f"{other} own checkpoint)"
    return list(changed.values())


def _compare(
    config: PretrainConfig, corpus: Corpus, out: Path, before: dict[str, Any], force: bool
) -> dict[str, str]:
    """What is not as it was `before`, in words; raises if that makes it another experiment."""
    with reading(out / "run.json"):
        then = before["config"]
        corpus_then, tokenizer_then = before["corpus_fingerprint"], before["tokenizer_hash"]
    # A setting that is younger than the run had its default.
    old = from_dict(PretrainConfig, then, where=f"{out / 'run.json'}: config")
    changed = differences(to_dict(old), to_dict(config))
    if "optim.kind" in changed and config.optim.kind == "adam":
        changed["optim.kind"] += " (the second moments of Muon's matrices begin at zero: their"
        changed["optim.kind"] += " first updates are many times as large as the rate says)"
    # With stages of another length one of the two would take up the weights of the other.
    fixed = (*_SHAPES, "run.train_steps") if config.switch_step is not None else _SHAPES
    free = changed if force else _MAY_CHANGE
    if forbidden := [changed[key] for key in changed if key in fixed or key not in free]:
        could = changed.keys().isdisjoint(fixed)
        raise ElectraError(
            "This directory holds a run with other settings: " + "; ".join(forbidden) + ".",
            where=str(out),
            fix="give the settings the run began with, or choose another --out"
            + (", or continue it as another experiment with --force" if could else ""),
        )
    for key, mine, theirs in (
        ("tokenizer", corpus.tokenizer_hash, tokenizer_then),
        ("corpus", corpus.fingerprint, corpus_then),
    ):
        if mine != theirs and force and key == "corpus":
            changed[key] = f"corpus: {theirs[:12]}… → {mine[:12]}…"
        elif mine != theirs:
            raise ElectraError(
                f"This run was started with another {key}: {theirs[:12]}…, now {mine[:12]}….",
                where=str(out),
                fix=f"give the {key} the run began with, or choose another --out",
            )
    return changed


def _copy_tokenizer(corpus: Corpus, out: Path, *, is_new: bool) -> None:
    tokenizer = out / "tokenizer"
    if tokenizer.exists():
        if is_new and Tokenizer.load(tokenizer).hash != corpus.tokenizer_hash:
            what = "There is another tokenizer at the place of the run's."
            raise ElectraError(what, where=str(tokenizer), fix="choose another --out")
        return
    copy = out / ".tokenizer.tmp"
    with storage_errors(tokenizer):
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        for file in corpus.tokenizer_dir.iterdir():
            write_atomic(copy / file.name, file.read_bytes())
        os.replace(copy, tokenizer)


def found_micro_batch(out: Path, stage: str) -> int | None:
    """What `data.micro_batch auto` found for a stage of this run before, if it did."""
    with reading(out / "run.json"):
        size = read_json(out / "run.json")["micro_batch"].get(stage)
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"micro_batch is {size}")
        return size


def keep_micro_batch(out: Path, stage: str, size: int) -> None:
    """Store it for a continued run, whose sums are then rounded in the same way."""
    record = read_json(out / "run.json")
    record["micro_batch"][stage] = size
    write_atomic(out / "run.json", json_bytes(record, indent=1))


@dataclass(frozen=True)
class LoadedRun:
    """The state of a run at one step, for export and continued use."""

    config: PretrainConfig
    objective: Objective
    step: int
    tokenizer_dir: Path
    tokenizer_hash: str


def load_run(run: Path, *, step: int | None = None, frequencies: Tensor | None = None) -> LoadedRun:
    """The networks of a run directory at its newest intact checkpoint, or that of `step`, float32
    on the CPU. Only the unigram generator needs the frequencies (V,), and only to sample."""
    record = read_json(run / "run.json")
    saved = _saved(run / "checkpoints", step) if record else None
    if not record or saved is None:
        raise ElectraError(
            "This is not a run with a checkpoint.",
            where=str(run),
            fix="give the --out directory of `electra pretrain`",
        )
    with reading(run / "run.json"):
        config = from_dict(PretrainConfig, record["config"], where=f"{run / 'run.json'}: config")
        weights = saved.tensors.get("average", saved.tensors["model"])
        vocab_size = record["vocab_size"]
        if type(vocab_size) is not int or vocab_size < 1:
            raise ValueError(f"vocab_size is {vocab_size}")
        # Before memory is taken: a damaged number would ask for any amount of it.
        found = sum(t.numel() for t in weights.values())
        wanted = sum(count_parameters(config, vocab_size))
        if found != wanted:
            raise ValueError(f"its settings give {wanted} weights, the checkpoint has {found}")
        special = SpecialIds(**record["special_ids"])
        objective = build_objective(
            config, vocab_size, special, padded=True, frequencies=frequencies
        )
        Adam(objective, config.optim).load({"model": weights})
        tokenizer, wanted = run / "tokenizer", record["tokenizer_hash"]
        Tokenizer.load(tokenizer).require(wanted, where=run)
        return LoadedRun(config, objective, saved.step, tokenizer, wanted)


def _saved(checkpoints: Path, step: int | None) -> Checkpoint | None:
    steps = saved_steps(checkpoints)
    if step is None or not steps:
        return load_newest(checkpoints, set_aside=False)
    if step not in steps:
        what, there = f"There is no checkpoint of step {step}.", ", ".join(map(str, sorted(steps)))
        raise ElectraError(what, where=checkpoints, fix=f"there are those of {there}")
    return read_checkpoint(steps[step])


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    """Dotted setting -> 'setting: old → new', for all that differ."""
    a, b = flat(old), flat(new)
    odd = [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]
    return {key: f"{key}: {a.get(key)} → {b.get(key)}" for key in odd}


def check_room(directory: Path, size: int, kept: int = 0) -> None:
    """Refuse a disk on which the next checkpoint will not fit beside the one before, or the last
    two not beside the `kept` ones that come until then and stay."""
    free, needed = shutil.disk_usage(directory).free, (2 + kept) * size
    if free < needed:
        stay = f" and the {kept:,} more that run.keep_every keeps" if kept else ""
        fix = "make room, or choose another --out"
        if kept:
            fix += ", or a larger --run.keep-every; with --run.on-disk-full pause the run begins,"
            fix += " and waits for room when there is none"
        raise DiskFull(
            f"There is no room for two checkpoints{stay}: {free:,} bytes are free, {needed:,} are "
            "needed.",
            where=str(directory),
            fix=fix,
        )


def kept_for_good(run: RunConfig, step: int, end: float) -> int:
    """How many checkpoints `run.keep_every` keeps of those made from `step` to `end`, its last two
    left out."""
    if run.keep_every is None:
        return 0
    one_before_last = (math.ceil(end) - 1) // run.save_every * run.save_every
    both = math.lcm(run.keep_every, run.save_every)
    return max(0, (one_before_last - 1) // both - step // both)


def was_evaluated(out: Path, step: int) -> bool:
    return any(m["kind"] == "eval" and m["step"] == step for m in read_metrics(out))
