"""What several tests share: a language with rules, its tokenizer and corpora, a micro model,
and objectives whose every number is looked at."""

from __future__ import annotations

import os
import random
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

# Read when Triton is imported: without a GPU its interpreter runs the kernels.
os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")

from electra.config import (
    DataConfig,
    EncoderConfig,
    GeneratorConfig,
    ObjectiveConfig,
    OptimConfig,
    PretrainConfig,
    RunConfig,
)
from electra.corruption import num_masked
from electra.data.corpus import Corpus, prepare
from electra.data.tokenizer import Tokenizer, train_tokenizer
from electra.objectives import Batch, Objective, SpecialIds, build_objective
from electra.randomness import StepRng
from electra.runtime import Runtime, whole_vectors

SEQUENCE_LENGTH = 23

PACKAGE = Path(__file__).parents[1] / "electra"
# A module or folder by its last name, which no two share: the docs name them by it.
_PLACES = [path.relative_to(PACKAGE.parent) for path in sorted(PACKAGE.glob("*/**/*.py"))]
_PLACES += [path.relative_to(PACKAGE.parent) for path in sorted(PACKAGE.glob("[!_]*.py"))]
MODULES = {
    place.stem: ".".join(place.parts)
    for path in _PLACES
    for place in [path.parent if path.stem == "__init__" else path.with_suffix("")]
}


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """No test changes the arithmetic of the next one."""
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    assert not whole_vectors.active, "a runtime was started and not left"
    if dist.is_initialized():
        dist.destroy_process_group()


def language(documents: int, seed: int = 0) -> str:
    """Documents whose words depend on each other, so that there is something to learn.

    Every sentence has a number: its nouns, adjectives and verb all agree with it. Every document
    has a subject that comes back in each of its sentences.
    """
    draw = random.Random(seed)
    nouns = ["river", "stone", "bird", "house", "wind", "child", "tree", "song", "road", "fire"]
    verbs = ["sees", "finds", "holds", "loves", "follows", "hears", "leaves"]
    adjectives = ["old", "small", "green", "quiet", "bright"]
    written = []
    for _ in range(documents):
        subject = draw.choice(nouns)
        lines = []
        for _ in range(draw.randint(5, 9)):
            plural = draw.random() < 0.5
            verb, other = draw.choice(verbs), draw.choice(nouns)
            if plural:
                words = ["all", draw.choice(adjectives), f"{subject}s", verb[:-1], f"{other}s"]
            else:
                words = ["one", draw.choice(adjectives), subject, verb, other]
            lines.append(" ".join(words) + " .")
        written.append("\n".join(lines))
    return "\n\n".join(written) + "\n"


def commands_of(page: str) -> list[list[str]]:
    """The command lines of a page's first block of them, without the program's name."""
    text = (Path(__file__).parents[1] / "docs" / page).read_text(encoding="utf-8")
    block = text.split("```sh\n")[1].split("```")[0]
    return [shlex.split(line)[1:] for line in block.splitlines()]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "language.txt"
    path.write_text(language(300))
    return path


@pytest.fixture(scope="session")
def tokenizer(text: Path) -> Tokenizer:
    return train_tokenizer([text], vocab_size=97)


@pytest.fixture(scope="session")
def tokenizer_dir(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(directory)
    return directory


@pytest.fixture(scope="session")
def corpus(text: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Packed: nearly all sequences are full."""
    out = tmp_path_factory.mktemp("packed")
    prepare(
        [text],
        tokenizer,
        out,
        sequence_length=SEQUENCE_LENGTH,
        short_percent=0,
        held_out_percent=10.0,
        workers=1,
    )
    return Corpus.open(out)


@pytest.fixture(scope="session")
def segments(text: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Two-segment examples of different lengths."""
    out = tmp_path_factory.mktemp("segments")
    prepare(
        [text],
        tokenizer,
        out,
        sequence_length=SEQUENCE_LENGTH,
        builder="segments",
        held_out_percent=10.0,
        workers=1,
    )
    return Corpus.open(out)


@pytest.fixture
def micro() -> PretrainConfig:
    """A run of a second: every part is there, none is large."""
    return PretrainConfig(
        name="micro",
        encoder=EncoderConfig(
            layers=2,
            hidden_size=20,
            ffn_size=28,
            attention_heads=2,
            embedding_size=14,
            max_positions=29,
            dropout=0.0,
            attention_dropout=0.0,
            init="local",
        ),
        generator=GeneratorConfig(width=0.5, depth=0.5),
        optim=OptimConfig(learning_rate=3e-3, warmup_percent=10.0),
        data=DataConfig(sequence_length=SEQUENCE_LENGTH, batch_size=8),
        run=RunConfig(
            train_steps=20,
            seed=7,
            device="cpu",
            threads=1,
            log_every=1,
            eval_every=6,
            eval_batches=2,
            save_every=4,
        ),
    )


# ---------------------------------------------------------------------- objectives by hand

# Pairwise different, so that no transposed or swapped axis can pass.
B, T, V, E, D, FFN, LAYERS, POSITIONS = 5, 19, 101, 14, 22, 34, 3, 29
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
LENGTHS = (19, 13, 7, 19, 3)


def settings(**changes: Any) -> PretrainConfig:
    """The small test model; a change is section_field=value."""
    config = PretrainConfig(
        encoder=EncoderConfig(
            layers=LAYERS,
            hidden_size=D,
            ffn_size=FFN,
            attention_heads=2,
            embedding_size=E,
            max_positions=POSITIONS,
            dropout=0.0,
            attention_dropout=0.0,
            init="local",
        ),
        generator=GeneratorConfig(width=0.5),
        objective=ObjectiveConfig(mask_percent=30.0),
        data=DataConfig(sequence_length=T, batch_size=B),
    )
    groups: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        section, name = path.split("_", 1)
        groups.setdefault(section, {})[name] = value
    changed = {name: replace(getattr(config, name), **group) for name, group in groups.items()}
    return replace(config, **changed)


def built(config: PretrainConfig, vocab_size: int = V, **options: Any) -> Any:
    """The objective of these settings, whichever class that is."""
    return build_objective(config, vocab_size, SPECIAL, **options)


def batch_of(
    config: PretrainConfig,
    lengths: tuple[int, ...] = LENGTHS,
    seed: int = 0,
    vocab_size: int = V,
) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    T = config.data.sequence_length
    x = torch.randint(5, vocab_size, (len(lengths), T), generator=draw)
    length = torch.tensor(lengths)
    x[:, 0] = SPECIAL.cls
    for row, n in enumerate(lengths):
        x[row, n - 1] = SPECIAL.sep
        x[row, n:] = SPECIAL.pad
    position = torch.arange(T)
    segment = (position >= length[:, None] // 2) & (position < length[:, None])
    masked = num_masked(length, config.masked_slots, config.objective).sum()
    return Batch(x, segment.long(), length, length.sum().float(), masked.float())


def rng(rows: int = B, step: int = 0, seed: int = 0) -> StepRng:
    return StepRng(seed, torch.tensor(step), torch.arange(rows))


def runtime(rank: int = 0, world: int = 1) -> Runtime:
    """One of `world` processes on a CPU, float32, nothing compiled."""
    return Runtime(
        device=torch.device("cpu"),
        dtype=torch.float32,
        compiled=False,
        cuda_graph=False,
        threads=1,
        rank=rank,
        world=world,
    )


def gradients(objective: Objective, loss: Tensor) -> dict[str, Tensor]:
    named = dict(objective.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(named.items(), grads, strict=True)
    }


def disk_events(patch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Filled from now on: "synced" or the name something got, its inode, and its size then."""
    seen: list[tuple[str, int, int]] = []
    fsync, rename = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        about = os.fstat(descriptor)
        seen.append(("synced", about.st_ino, about.st_size))

    def renamed(source: Path, target: Path) -> None:
        about = source.stat()
        rename(source, target)
        seen.append((target.name, about.st_ino, about.st_size))

    patch.setattr(os, "fsync", synced)
    patch.setattr(os, "replace", renamed)
    return seen
