"""Two processes do what one does: the same masks, the same losses, one writer."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import runtime
from test_pretrain import assert_same_run
from torch import Tensor
from torch.distributed.tensor import DTensor

from electra import checkpoint, exchange
from electra import runtime as runtimes
from electra.batches import Batches
from electra.checkpoint import load_newest, read_checkpoint
from electra.config import PretrainConfig, from_dict, to_dict
from electra.data import shards
from electra.data.corpus import Corpus
from electra.errors import CorruptError, ElectraError, LostProcess, Stopped
from electra.exchange import Exchange
from electra.files import json_bytes, read_json
from electra.objectives import (
    Batch,
    Losses,
    ReplacedTokenDetection,
    SpecialIds,
    build_objective,
)
from electra.optim import Adam
from electra.pretrain import open_corpus, pretrain
from electra.randomness import StepRng
from electra.runlog import read_metrics
from electra.runtime import bf16_survives
from electra.studies import ablate
from electra.trainer import Meter, Trainer

ROOT = Path(__file__).parents[1]
STEPS = 10


def with_run(config: PretrainConfig, **changes: Any) -> PretrainConfig:
    return replace(config, run=replace(config.run, **changes))


def two_processes(rank: int, work: Path, corpus_path: Path, settings: dict[str, Any]) -> None:
    """All scenes one after the other in one pair of processes: starting them is what costs."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    rendezvous = f"file://{work / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    config = from_dict(PretrainConfig, settings, where="test")
    corpus = Corpus.open(corpus_path)
    written: list[str] = []
    if rank == 1:
        watch_writes(written, work / "runs")

    pretrain(config, corpus, work / "runs" / "whole", quiet=True)
    pretrain(with_run(config, train_steps=1), corpus, work / "runs" / "one-step", quiet=True)

    kept, done = Trainer.step, [0]

    def signalled(self: Trainer) -> None:
        """Only the second process is asked to stop; both have to."""
        kept(self)
        done[0] += 1
        if rank == 1 and done[0] == 6:
            signal.raise_signal(signal.SIGTERM)

    sharded = with_run(config, sharding="optimizer")
    in_shares = with_run(config, sharding="weights")
    rare = with_run(config, log_every=5)  # a line that spans the stop
    rare_sharded = with_run(sharded, log_every=5)
    rare_in_shares = with_run(in_shares, log_every=5)
    write = checkpoint.write_checkpoint

    def slow(*given: Any) -> Path:
        time.sleep(0.5)
        return write(*given)

    begun = {
        "stopped": rare_sharded,
        "stopped-whole": rare,
        "stopped-in-shares": rare_in_shares,
        "continued-in-shares": rare,
    }
    for name, before in begun.items():
        Trainer.step, done[0], checkpoint.write_checkpoint = signalled, 0, slow
        try:
            pretrain(before, corpus, work / "runs" / name, quiet=True)
        except Stopped:  # what one process writes is there when the other one leaves
            if (work / "runs" / name / "checkpoints" / "step-00000006").exists():
                (work / f"{name}-{rank}").touch()
        Trainer.step, checkpoint.write_checkpoint = kept, write
    dist.barrier()

    if rank == 0:
        os.truncate(
            work / "runs" / "stopped" / "checkpoints" / "step-00000006" / "model.safetensors", 99
        )
    dist.barrier()
    pretrain(rare, corpus, work / "runs" / "stopped", quiet=True)  # the newest one is damaged
    pretrain(rare_sharded, corpus, work / "runs" / "stopped-whole", quiet=True)
    pretrain(rare, corpus, work / "runs" / "stopped-in-shares", quiet=True)
    pretrain(rare_in_shares, corpus, work / "runs" / "continued-in-shares", quiet=True)
    # In one piece after the backward pass, and what of the pieces leaves during it.
    exchange.PIECES, pieces = 1, exchange.PIECES
    pretrain(config, corpus, work / "runs" / "at-once", quiet=True)
    exchange.PIECES = pieces
    send, finish, events = Exchange.send, Adam.finish, list[str]()

    def sent(self: Exchange, grad: Tensor, number: int) -> None:
        events.append(str(number))
        send(self, grad, number)

    def finished(self: Adam, grads: Sequence[Tensor]) -> None:
        events.append("end of the backward pass")
        finish(self, grads)

    Exchange.send, Adam.finish = sent, finished
    micro = replace(sharded, data=replace(sharded.data, micro_batch=2))
    pretrain(micro, corpus, work / "runs" / "sharded", quiet=True)
    Exchange.send, Adam.finish = send, finish
    (work / f"events-{rank}").write_text("\n".join(events))
    kept_weights(rank, work, corpus, config, in_shares)
    if bf16_survives():
        for name, each in (("whole", config), ("shares", in_shares)):
            narrow = with_run(each, precision="bf16", train_steps=4, eval_every=2)
            pretrain(narrow, corpus, work / "runs" / f"bf16-{name}", quiet=True)
    micro = replace(in_shares, data=replace(config.data, micro_batch=2))
    pretrain(micro, corpus, work / "runs" / "in-shares", quiet=True)

    learn = ReplacedTokenDetection.learn
    found_by_trying(rank, work, config, corpus)

    def poisoned(self: ReplacedTokenDetection, *given: Any) -> Losses:
        """A loss that is not a number, in one process only."""
        losses = learn(self, *given)
        bad = rank == 1 and int(given[-1].step) in (2, 3, 7)
        return losses._replace(total=losses.total * float("nan")) if bad else losses

    ReplacedTokenDetection.learn = poisoned
    weights: list[Tensor] = []

    def watched(self: Trainer) -> None:
        kept(self)
        weights.append(self.optimizer.master.clone())

    Trainer.step = watched
    for name, poisonous in (("poisoned", sharded), ("poisoned-in-shares", in_shares)):
        weights.clear()
        pretrain(poisonous, corpus, work / "runs" / name, quiet=True)
        torch.save(torch.stack(weights), work / f"{name}-{rank}")
    Trainer.step = kept
    ReplacedTokenDetection.learn = learn

    odd = replace(config, data=replace(config.data, batch_size=7))
    try:
        pretrain(odd, corpus, work / "runs" / "odd", quiet=True)
    except ElectraError as error:
        (work / f"odd-{rank}").write_text(f"{error.what} {error.where}")
    (work / f"writes-{rank}").write_text("\n".join(written))
    dist.barrier()
    dist.destroy_process_group()


def kept_weights(
    rank: int, work: Path, corpus: Corpus, config: PretrainConfig, in_shares: PretrainConfig
) -> None:
    """Bytes that each process keeps from step to step, with whole weights and with shares."""
    sizes: dict[str, int] = {}
    wide = replace(config.encoder, hidden_size=128, ffn_size=512)  # few numbers are padding
    for name, each in (("whole", config), ("shares", in_shares)):
        each = replace(each, encoder=wide)
        here = runtime(rank=rank, world=2)
        batches = Batches(corpus.train, each, here)
        objective = build_objective(each, corpus.vocab_size, SpecialIds(**corpus.special_ids))
        trainer = Trainer(objective, batches, each, here)
        o = trainer.optimizer
        buffers = [t for t in (o.master, o.grad, o.m, o.v, o.mean) if t is not None]
        o.collect()
        saved = [t for tensors in o.state().values() for t in tensors.values()]
        assert not any(t.requires_grad for t in (*buffers, *saved))  # no graph grows behind them
        held = {t.untyped_storage() for t in buffers}
        held |= {
            (p.to_local() if isinstance(p, DTensor) else p.data).untyped_storage()
            for p in o.parameters
        }
        sizes[name] = sum(storage.nbytes() for storage in held)
    (work / f"kept-{rank}").write_bytes(json_bytes(sizes))


def found_by_trying(rank: int, work: Path, config: PretrainConfig, corpus: Corpus) -> None:
    """The second process has memory for two sequences at once, the first for all of its four."""
    generate, add = ReplacedTokenDetection.generate_alone, Meter.add_losses
    tried = list[int]()

    def watched(self: ReplacedTokenDetection, batch: Batch, rng: StepRng) -> Any:
        tried.append(len(batch.x))
        return generate(self, batch, rng)

    def add_losses(self: Meter, losses: Losses) -> None:
        add(self, losses)
        if rank == 1 and tried[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    for sharding in ("none", "optimizer"):
        short = with_run(config, train_steps=3, sharding=sharding)
        by_hand, auto = (
            replace(short, data=replace(short.data, micro_batch=size)) for size in (2, "auto")
        )
        pretrain(by_hand, corpus, work / "runs" / f"by-hand-{sharding}", quiet=True)
        ReplacedTokenDetection.generate_alone, Meter.add_losses = watched, add_losses
        pretrain(auto, corpus, work / "runs" / f"found-{sharding}", quiet=True)
        ReplacedTokenDetection.generate_alone, Meter.add_losses = generate, add
    (work / f"tried-{rank}").write_text(" ".join(map(str, tried)))


def watch_writes(written: list[str], runs: Path) -> None:
    """Every file this process opens for writing and every name it changes below the runs."""

    changes = ("os.rename", "os.remove", "os.mkdir", "shutil.rmtree")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        is_write = event == "open" and bool(args[2] & (os.O_WRONLY | os.O_RDWR))
        if (is_write or event in changes) and str(args[0]).startswith(str(runs)):
            written.append(f"{event} {args[0]}")

    sys.addaudithook(hook)


@pytest.fixture(scope="module")
def pair(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("pair")
    settings = to_dict(config_of_pair())
    mp.spawn(two_processes, (work, corpus.path, settings), nprocs=2)
    return work


def config_of_pair() -> PretrainConfig:
    """With dropout: its draws must not depend on the split either."""
    values = {
        "name": "pair",
        "encoder": {
            "layers": 2,
            "hidden_size": 20,
            "ffn_size": 28,
            "attention_heads": 2,
            "embedding_size": 14,
            "max_positions": 29,
            "init": "local",
        },
        "generator": {"width": 0.5},
        "optim": {"learning_rate": 3e-3, "warmup_percent": 10.0, "average": 0.9},
        "data": {"sequence_length": 23, "batch_size": 8},
        "run": {
            "train_steps": STEPS,
            "device": "cpu",
            "threads": 1,
            "log_every": 1,
            "eval_every": 5,
            "eval_batches": 2,
            "save_every": 4,
        },
    }
    return from_dict(PretrainConfig, values, where="test")


@pytest.fixture(scope="module")
def single(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("single") / "run"
    pretrain(config_of_pair(), corpus, out, quiet=True)
    return out


@pytest.fixture(scope="module")
def rare_lines(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rare") / "run"
    pretrain(with_run(config_of_pair(), log_every=5), corpus, out, quiet=True)
    return out


def assert_close_runs(a: Path, b: Path) -> None:
    one, two = ([m for m in read_metrics(out) if m["kind"] in ("train", "eval")] for out in (a, b))
    assert [(m["kind"], m["step"]) for m in one] == [(m["kind"], m["step"]) for m in two]
    for left, right in zip(one, two, strict=True):
        for name in ("loss", "mlm_loss", "disc_loss", "grad_norm", "learning_rate"):
            if name in left:
                assert left[name] == pytest.approx(right[name], rel=1e-5), (left["step"], name)
    first, other = load_newest(a / "checkpoints"), load_newest(b / "checkpoints")
    assert first is not None
    assert other is not None
    for file in ("model", "average"):
        for name, tensor in first.tensors[file].items():
            torch.testing.assert_close(tensor, other.tensors[file][name], rtol=1e-3, atol=1e-4)


def test_two_processes_train_like_one(pair: Path, single: Path) -> None:
    assert_close_runs(pair / "runs" / "whole", single)
    one, two = (
        [m for m in read_metrics(out) if m["kind"] == "train"]
        for out in (single, pair / "runs" / "whole")
    )
    # Counts are whole numbers: equal masks and samples give them exactly.
    for name in ("replaced_percent", "mlm_accuracy"):
        assert [m[name] for m in one[:3]] == [m[name] for m in two[:3]]


def test_the_gradients_of_the_first_step_are_those_of_one_process(
    pair: Path, corpus: Corpus, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """By the first moments, which after one step are a tenth of them; every parameter has one."""
    pretrain(with_run(config_of_pair(), train_steps=1), corpus, tmp_path, quiet=True)
    one, two = (load_newest(r / "checkpoints") for r in (tmp_path, pair / "runs" / "one-step"))
    assert one is not None
    assert two is not None
    names = [name for name in one.tensors["optimizer"] if name.startswith("m.")]
    assert len(names) == len(one.tensors["model"])
    whole, split = (
        torch.cat([c.tensors["optimizer"][n].double().flatten() for n in names]) for c in (one, two)
    )
    assert whole.norm() > 0
    apart = float((whole - split).norm() / whole.norm())
    request.node.user_properties.append(("relative difference of gradients", f"{apart:.1e}"))
    assert apart <= 1e-6
    assert all(one.tensors["optimizer"][name].any() for name in names)


def test_gradients_leave_in_pieces_during_the_backward_pass_with_the_same_sum(pair: Path) -> None:
    one, two = ((pair / f"events-{rank}").read_text().splitlines() for rank in (0, 1))
    assert one == two
    end, size = one.index("end of the backward pass"), exchange.PIECES + 1
    assert 3 <= end < size
    assert sorted(one[:size]) == sorted({*map(str, range(exchange.PIECES)), one[end]})
    assert one == one[:size] * STEPS
    whole, at_once = (load_newest(pair / "runs" / n / "checkpoints") for n in ("whole", "at-once"))
    assert whole is not None
    assert at_once is not None
    for file, tensors in whole.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, at_once.tensors[file][name]), (file, name)


def test_shares_of_the_moments_train_like_whole_ones(
    pair: Path, single: Path, rare_lines: Path
) -> None:
    """Gathered in micro-batches besides; stopped with whole moments and continued with shares."""
    for name, like in (("sharded", single), ("stopped-whole", rare_lines)):
        assert_close_runs(pair / "runs" / name, like)
        saved, alone = (load_newest(r / "checkpoints") for r in (pair / "runs" / name, like))
        assert saved is not None
        assert alone is not None
        for key, tensor in alone.tensors["optimizer"].items():
            if key.startswith(("m.", "v.")):
                torch.testing.assert_close(
                    tensor, saved.tensors["optimizer"][key], rtol=1e-3, atol=1e-5
                )


def test_both_stop_when_one_is_asked_and_a_damaged_checkpoint_is_set_aside_once(
    pair: Path, rare_lines: Path
) -> None:
    """Stopped with shares of the moments, continued with whole ones."""
    for name in ("stopped", "stopped-whole", "stopped-in-shares", "continued-in-shares"):
        assert (pair / f"{name}-0").exists()
        assert (pair / f"{name}-1").exists()
    aside = [p.name for p in (pair / "runs" / "stopped" / "checkpoints").glob("damaged-*")]
    assert aside == ["damaged-step-00000006"]
    assert_close_runs(pair / "runs" / "stopped", rare_lines)


def test_shares_of_the_weights_train_like_whole_ones(
    pair: Path, single: Path, rare_lines: Path
) -> None:
    """In micro-batches; stopped with shares and continued with whole weights, and vice versa."""
    likes = {
        "in-shares": single,
        "stopped-in-shares": rare_lines,
        "continued-in-shares": rare_lines,
    }
    for name, like in likes.items():
        assert_close_runs(pair / "runs" / name, like)
        saved, alone = (load_newest(r / "checkpoints") for r in (pair / "runs" / name, like))
        assert saved is not None
        assert alone is not None
        assert saved.tensors["optimizer"].keys() == alone.tensors["optimizer"].keys()
        for key, tensor in alone.tensors["optimizer"].items():
            if key.startswith(("m.", "v.")):
                torch.testing.assert_close(
                    tensor, saved.tensors["optimizer"][key], rtol=1e-3, atol=1e-5
                )


def test_a_process_keeps_its_share_of_the_weights_alone(pair: Path) -> None:
    """Whole: weights, gradients, moments and average. Shares: FSDP2's copy of weights as well."""
    for rank in (0, 1):
        sizes = read_json(pair / f"kept-{rank}")
        assert sizes["shares"] == pytest.approx(sizes["whole"] * 6 / 5 / 2, rel=0.1)


@pytest.mark.parametrize("sharding", ["none", "optimizer"])
def test_processes_agree_on_the_micro_batch_that_fits_in_the_smallest_memory(
    pair: Path, sharding: str
) -> None:
    one, two = ((pair / f"tried-{rank}").read_text().split() for rank in (0, 1))
    assert one[:3] == two[:3] == ["4", "2", "2"]
    assert read_json(pair / "runs" / f"found-{sharding}" / "run.json")["micro_batch"] == {
        "joint": 2
    }
    hand, found = (
        load_newest(pair / "runs" / f"{name}-{sharding}" / "checkpoints")
        for name in ("by-hand", "found")
    )
    assert hand is not None
    assert found is not None
    for file, tensors in hand.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, found.tensors[file][name]), (file, name)


@pytest.mark.parametrize("name", ["poisoned", "poisoned-in-shares"])
def test_not_a_number_in_one_process_stops_the_step_in_all(pair: Path, name: str) -> None:
    one, two = (torch.load(pair / f"{name}-{rank}", weights_only=True) for rank in (0, 1))
    assert torch.equal(one, two) == (name == "poisoned")  # else each has a half
    for weights in (one, two):
        for step in range(1, STEPS):
            assert torch.equal(weights[step], weights[step - 1]) == (step in (2, 3, 7)), step
    lines = [m for m in read_metrics(pair / "runs" / name) if m["kind"] == "train"]
    assert [m["bad_steps"] for m in lines] == [0, 0, 1, 2, 2, 2, 2, 3, 3, 3]
    events = [m for m in read_metrics(pair / "runs" / name) if m["kind"] == "event"]
    assert [m["step"] for m in events if "left out" in m["warning"]] == [3, 4, 8]


def test_only_the_main_process_writes(pair: Path) -> None:
    assert (pair / "writes-1").read_text() == ""


def test_a_batch_that_cannot_be_split_is_refused_by_both(pair: Path) -> None:
    for rank in (0, 1):
        told = (pair / f"odd-{rank}").read_text()
        assert "7 cannot be split over 2" in told
        assert "data.batch_size" in told
    assert not (pair / "runs" / "odd").exists()


def test_torchrun_starts_a_run_that_one_process_finishes(
    corpus: Corpus, tmp_path: Path, rare_lines: Path
) -> None:
    """Two processes, with shares of the moments, die in the middle of a save; a single one goes on
    from what is there."""
    out = tmp_path / "run"
    config = tmp_path / "pair.json"
    config.write_bytes(json_bytes(to_dict(with_run(config_of_pair(), log_every=5))))
    arguments = ["pretrain", "--config", str(config), "--corpus", str(corpus.path)]
    arguments += ["--out", str(out), "--quiet"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shares = ["--run.sharding", "optimizer"]
    result = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "-m", "electra", *arguments, *shares],
        env={**environment, "ELECTRA_FAULT": "before_rename:2"},
        capture_output=True,
        timeout=120,
    )
    assert result.returncode != 0
    assert [p.name for p in (out / "checkpoints").glob("step-*")] == ["step-00000004"]
    finished = subprocess.run(
        [sys.executable, "-m", "electra", *arguments],
        env=environment,
        capture_output=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    assert_close_runs(out, rare_lines)


def test_a_whole_job_of_torchrun_that_is_asked_to_stop_saves_and_is_not_started_again(
    corpus: Corpus, tmp_path: Path
) -> None:
    """As a scheduler asks: torchrun and its processes get the signal at once, and they torchrun's
    own besides (docs/gpus.md)."""
    out, config = tmp_path / "run", tmp_path / "pair.json"
    endless = with_run(config_of_pair(), train_steps=10**6, save_every=10**6, eval_every=10**6)
    config.write_bytes(json_bytes(to_dict(endless)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--max-restarts", "3", "-m", "electra", "pretrain"]
    arguments = ["--config", config, "--corpus", corpus.path, "--out", out, "--quiet"]
    run = subprocess.Popen(
        [*torchrun, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    family = [psutil.Process(run.pid)]
    try:
        while not (out / "metrics.jsonl").exists() or len(read_metrics(out)) < 5:
            assert run.poll() is None
            time.sleep(0.1)
        family += family[0].children(recursive=True)
        for process in family:
            process.send_signal(signal.SIGTERM)
        told = run.communicate(timeout=60)[1]
        assert run.returncode == 1
        assert told.count("stopped and saved; the same command continues") == 2
        assert "SignalException" in told
        assert not any(process.is_running() for process in family[1:])
    finally:
        for process in reversed(family):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        run.wait()
    saved = load_newest(out / "checkpoints")
    assert saved is not None
    assert saved.step == read_metrics(out)[-1]["step"]


def test_a_signal_ends_a_process_that_waits_for_the_others(corpus: Corpus, tmp_path: Path) -> None:
    """They never come: torch waits for them in C++, where no handler of Python's is run."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    config = tmp_path / "pair.json"
    config.write_bytes(json_bytes(to_dict(with_run(config_of_pair(), timeout_seconds=60.0))))
    first = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments = ["--config", config, "--corpus", corpus.path, "--out", tmp_path / "run", "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-m", "electra", "pretrain", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **first},
    )
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            time.sleep(0.05)
        time.sleep(0.5)
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()


# ---------------------------------------------------------------------- the corpus is checked once


def damage(corpus: Path) -> Path:
    """Another token somewhere, in a file of the same size."""
    path = corpus / "train-00000.tokens.bin"
    with open(path, "r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))
    return path


def two_processes_open(rank: int, work: Path, settings: dict[str, Any]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    meet = f"file://{work / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    config = with_run(from_dict(PretrainConfig, settings, where="test"), train_steps=1)
    hash_file, hashed = shards.xxh3_file, list[str]()

    def noted(path: Path) -> str:
        hashed.append(path.name)
        if name == "stopped" and "tokens" in path.name:
            signal.raise_signal(signal.SIGTERM)
        return hash_file(path)

    shards.xxh3_file = noted
    scenes = {  # of each process: its number on its machine, and the corpus that it sees
        "one machine": ((0, "whole"), (1, "whole")),
        "two machines": ((0, "whole"), (0, "copy")),
        "no numbers": ((None, "whole"), (None, "copy")),
        "damaged": ((0, "damaged"), (1, "damaged")),
        "damaged there": ((0, "whole"), (0, "damaged")),
        "damaged here": ((0, "damaged"), (0, "whole")),
        "not the same": ((0, "whole"), (1, "other")),
        "stopped": ((0, "whole"), (1, "whole")),
    }
    for name, scene in scenes.items():
        local, place = scene[rank]
        os.environ.pop("LOCAL_RANK", None)
        if local is not None:
            os.environ["LOCAL_RANK"] = str(local)
        hashed.clear()
        told = ""
        try:
            pretrain(config, open_corpus(work / place), work / "runs" / name, quiet=True)
        except ElectraError as error:
            told = f"{type(error).__name__}: {error}"
        except Stopped:
            told = "stopped"
        tokens = sorted(file for file in hashed if "tokens" in file)
        record = {"told": told, "tokens": tokens, "others": len(hashed) - len(tokens)}
        (work / f"{name}-{rank}").write_bytes(json_bytes(record))
    dist.barrier()
    dist.destroy_process_group()


def test_one_process_of_a_machine_reads_all_tokens_and_damage_stops_every_process(
    corpus: Corpus, segments: Corpus, tmp_path: Path
) -> None:
    for place in ("whole", "copy", "damaged"):
        shutil.copytree(corpus.path, tmp_path / place)
    shutil.copytree(segments.path, tmp_path / "other")
    where = damage(tmp_path / "damaged")
    mp.spawn(two_processes_open, (tmp_path, to_dict(config_of_pair())), nprocs=2)

    def seen(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        one, two = (read_json(tmp_path / f"{name}-{rank}") for rank in (0, 1))
        started = (tmp_path / "runs" / name).exists()
        assert started == (one["told"] == two["told"] == ""), name
        assert one["others"] == two["others"] > 0  # what every process reads whole anyway
        return one, two

    files = sorted(file.name for file in corpus.token_files)
    one, two = seen("one machine")
    assert one["tokens"] == files
    assert two["tokens"] == []
    for name in ("two machines", "no numbers"):
        one, two = seen(name)
        assert one["tokens"] == two["tokens"] == files
    told = (
        f"CorruptError: The file is not what was written: its checksum is wrong.\n  where: {where}"
    )
    for name, finder in (("damaged", 0), ("damaged here", 0), ("damaged there", 1)):
        both = seen(name)
        assert both[finder]["told"].startswith(f"{told}\n"), name
        assert both[1 - finder]["told"].startswith(f"{told} (process {finder} found it)\n"), name
        assert all(each["told"].endswith("copy it again") for each in both)
    one, two = seen("stopped")
    assert one["told"] == two["told"] == "stopped"
    assert len(one["tokens"]) == 1 < len(files)
    for each in seen("not the same"):
        assert each["told"].startswith("ElectraError: The processes see different corpora.")
        assert each["tokens"] == []


def test_processes_that_meet_a_damaged_corpus_end_with_its_exit_code(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Without torchrun, which would end the other one: each leaves by itself, and soon."""
    where = damage(shutil.copytree(corpus.path, tmp_path / "damaged"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    config = tmp_path / "pair.json"
    config.write_bytes(json_bytes(to_dict(with_run(config_of_pair(), timeout_seconds=600.0))))
    arguments = ["--config", config, "--corpus", where.parent, "--out", tmp_path / "run", "--quiet"]
    common = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "electra", "pretrain", *map(str, arguments)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        for process in both:
            told = process.communicate(timeout=120)[1]
            assert process.returncode == CorruptError.exit_code, told
            assert f"its checksum is wrong.\n  where: {where}" in told
            assert "Traceback" not in told
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert not (tmp_path / "run" / "run.json").exists()


# ---------------------------------------------------------------------- one of two is lost

LOST = """
import os, signal, sys, time
from pathlib import Path
import torch
from electra import checkpoint, cli
from electra.trainer import Trainer
work, way, losses = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(",")  # rank:step, once each
rank, step = int(os.environ["RANK"]), Trainer.step
(work / f"pid-{rank}").write_text(str(os.getpid()))
def lost(self):
    here = f"{rank}:{int(self.counter)}"
    if way != "in the step" and here in losses and not (work / f"lost-{here}").exists():
        (work / f"lost-{here}").touch()
        if way == "no memory":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if way != "raising":
            os.kill(os.getpid(), signal.SIGSTOP if way == "frozen" else signal.SIGKILL)
        raise ValueError("of all things")
    step(self)
Trainer.step = lost
gradients = Trainer.gradients
def broken(self, *given, **how):
    here = f"{rank}:{int(self.counter)}"
    if way == "in the step" and here in losses:
        (work / f"lost-{here}").touch()
        raise RuntimeError("CUDA error: of all things")
    return gradients(self, *given, **how)
Trainer.gradients = broken
write = checkpoint.write_checkpoint
def slow(*given):
    time.sleep(5 if way == "slow save" else 0)
    return write(*given)
checkpoint.write_checkpoint = slow
sys.argv = ["electra", *sys.argv[4:]]
cli.main()
"""


def lose_one(
    corpus: Corpus,
    work: Path,
    way: str,
    rank: int,
    step: int,
    limit: float,
    sharding: str = "none",
) -> tuple[str, float]:
    """What the other process said, and how many seconds after the loss it was gone."""
    work.mkdir()
    (work / "lost.py").write_text(LOST)
    config = with_run(config_of_pair(), train_steps=10**6, timeout_seconds=limit, sharding=sharding)
    (work / "pair.json").write_bytes(json_bytes(to_dict(config)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--log-dir", str(work / "logs"), "--redirects", "3"]
    arguments = [work / "lost.py", work, way, f"{rank}:{step}", "pretrain", "--config"]
    arguments += [work / "pair.json", "--corpus", corpus.path, "--out", work / "run", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        [*torchrun, *map(str, arguments)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not (work / f"lost-{rank}:{step}").exists():
            assert run.poll() is None
            time.sleep(0.02)
        lost_at = time.monotonic()
        other, frozen = (int((work / f"pid-{r}").read_text()) for r in (1 - rank, rank))
        gone = [p for p in psutil.Process(run.pid).children() if p.pid == other]
        if gone:
            gone[0].wait(120)
        seconds = time.monotonic() - lost_at
        if way == "frozen":  # torchrun would give it half a minute to end by itself
            os.kill(frozen, signal.SIGKILL)
        assert run.wait(120) != 0
    finally:
        run.kill()
        run.wait()
    (log,) = (work / "logs").rglob(f"{1 - rank}/stderr.log")
    return log.read_text(), seconds


@pytest.mark.skipif(not bf16_survives(), reason="bf16 arithmetic kills the process on this CPU")
def test_in_bf16_shares_of_the_weights_give_the_weights_of_whole_ones(pair: Path) -> None:
    one, other = (
        load_newest(pair / "runs" / f"bf16-{name}" / "checkpoints") for name in ("whole", "shares")
    )
    assert one is not None
    assert other is not None
    assert (one.step, other.step) == (4, 4)
    for name, tensor in one.tensors["model"].items():
        torch.testing.assert_close(other.tensors["model"][name], tensor, rtol=1e-5, atol=1e-6)


def test_a_fault_of_this_process_is_told_though_another_one_leaves_no_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits where this one failed, and cannot know: that it does not answer is not all."""
    monkeypatch.setattr(runtimes, "_GRACE", timedelta(0))
    here = replace(runtime(world=2), store=dist.HashStore())
    with pytest.raises(LostProcess) as caught, here.together():
        raise dist.DistBackendError("NCCL error: no memory for a ring\nLast error:")
    assert caught.value.what == (
        "Process 1 does not answer. Seen from here: NCCL error: no memory for a ring"
    )
    here.store.set("electra/word/1", "ValueError: of all things")
    with pytest.raises(LostProcess) as caught, here.together():
        raise RuntimeError("[third_party/gloo/pair.cc:547] Connection closed by peer")
    assert caught.value.what == "Process 1 failed: ValueError: of all things"
    with pytest.raises(RuntimeError, match="CUDA error"), here.together():
        raise RuntimeError("CUDA error: of this process")  # in the middle of a step, for example


WORDS = {
    "frozen": "does not answer",
    "raising": "failed: ValueError: of all things",
    "no memory": "failed: ElectraError: The device has no memory left with 4 sequences at once.",
    "in the step": "failed: RuntimeError: CUDA error: of all things",
}


@pytest.mark.parametrize(
    ("way", "rank", "sharding"),
    [
        ("frozen", 1, "none"),
        ("raising", 0, "none"),
        ("no memory", 1, "none"),
        ("in the step", 1, "weights"),
    ],
)
def test_a_process_that_is_lost_is_named_and_the_other_one_leaves(
    corpus: Corpus, tmp_path: Path, way: str, rank: int, sharding: str
) -> None:
    told, seconds = lose_one(corpus, tmp_path / "work", way, rank, 6, limit=3.0, sharding=sharding)
    assert f"Process {rank} {WORDS[way]}" in told
    assert "Traceback" not in told
    assert seconds < 3 + 10
    saved = load_newest(tmp_path / "work" / "run" / "checkpoints")
    assert saved is not None
    assert saved.step == 4


def test_a_last_save_that_takes_longer_than_the_patience_is_waited_for(
    corpus: Corpus, tmp_path: Path
) -> None:
    (tmp_path / "lost.py").write_text(LOST)
    config = with_run(config_of_pair(), train_steps=2, timeout_seconds=2.0)
    (tmp_path / "pair.json").write_bytes(json_bytes(to_dict(config)))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", str(tmp_path / "lost.py")]
    arguments = [tmp_path, "slow save", "none", "pretrain", "--config", tmp_path / "pair.json"]
    arguments += ["--corpus", corpus.path, "--out", tmp_path / "run", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, *map(str, arguments)], env=environment, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert load_newest(tmp_path / "run" / "checkpoints").step == 2  # type: ignore[union-attr]


@pytest.mark.long
@pytest.mark.parametrize("way", ["frozen", "raising"])
@pytest.mark.parametrize("number", range(10))
def test_ten_of_ten_lost_processes_are_named(
    corpus: Corpus, tmp_path: Path, way: str, number: int
) -> None:
    draw = random.Random(number)
    rank = number % 2
    step = draw.randint(0, 40)
    told, seconds = lose_one(corpus, tmp_path / "work", way, rank, step, limit=20.0)
    assert f"Process {rank} " in told, told
    assert seconds < 20 + 10


# ---------------------------------------------------------------------- four; started again


def several_processes(
    rank: int, world: int, work: Path, corpus_path: Path, settings: dict[str, Any]
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    meet = f"file://{work / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    config = from_dict(PretrainConfig, settings, where="test")
    corpus = Corpus.open(corpus_path)
    pretrain(config, corpus, work / "whole", quiet=True)
    pretrain(with_run(config, sharding="optimizer"), corpus, work / "sharded", quiet=True)
    if config.objective.algorithm != "two_stage":
        pretrain(with_run(config, sharding="weights"), corpus, work / "in-shares", quiet=True)
    dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own
def test_a_step_compiled_in_parts_is_the_step_and_gives_its_gradients_part_by_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor import compile_fx

    # The graph is cut and differentiated as on a GPU; generating code for it would take minutes.
    monkeypatch.setattr(compile_fx, "compile_fx", aot_eager)
    config = config_of_pair()
    objective = build_objective(
        config, 60, SpecialIds(0, 1, 2, 3, 4), padded=False, frequencies=torch.ones(60)
    )
    x = torch.randint(5, 60, (4, 23), generator=torch.Generator().manual_seed(0))
    counts = torch.tensor(92.0), torch.tensor(16.0)
    batch = Batch(x, torch.zeros_like(x), torch.full((4,), 23), *counts)
    rng = StepRng(0, torch.tensor(0), torch.arange(4))
    backend = exchange.compiler_in_parts(objective)
    in_parts = torch.compile(objective, fullgraph=True, dynamic=False, backend=backend)(batch, rng)
    found, parts, todo = set[Any](), 0, [in_parts.total.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            parts += node.name() == "CompiledFunctionBackward"
            todo += [following for following, _ in node.next_functions]
    assert parts >= 3
    parameters = list(objective.parameters())
    ours = torch.autograd.grad(in_parts.total, parameters)
    theirs = torch.autograd.grad(objective(batch, rng).total, parameters)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_four_processes_train_like_one_also_in_two_stages(corpus: Corpus, tmp_path: Path) -> None:
    """Two stages: parameters that no gradient reaches, and a second optimizer half-way."""
    joint = config_of_pair()
    two_stage = replace(
        joint,
        objective=replace(joint.objective, algorithm="two_stage"),
        generator=replace(joint.generator, sharing="none", width=1.0),
    )
    for name, each in (("joint", joint), ("two_stage", two_stage)):
        (tmp_path / name).mkdir()
        pretrain(each, corpus, tmp_path / name / "single", quiet=True)
        arguments = (4, tmp_path / name, corpus.path, to_dict(each))
        mp.spawn(several_processes, arguments, nprocs=4)
        for run in ("whole", "sharded", *(["in-shares"] if name == "joint" else [])):
            assert_close_runs(tmp_path / name / run, tmp_path / name / "single")


def rows_of_all_studies() -> dict[str, PretrainConfig]:
    """Every row of the paper's ablations that is another model or loss, for two small steps."""
    base = config_of_pair()
    base = replace(
        base,
        encoder=replace(base.encoder, hidden_size=32, attention_heads=8, layers=4),
        # Unclipped: torch's sum of many float32 squares is off by more than a millionth.
        optim=replace(base.optim, average=0.0, max_grad_norm=1e9),
        # One thread: how many there are would be measured, and sums round by their number.
        run=replace(base.run, train_steps=2, save_every=1, eval_every=2, threads=1),
    )
    rows: dict[str, PretrainConfig] = {}
    for study, grid in ablate.STUDIES.items():
        for label, row in grid(base).items():
            row = replace(row, name="x", run=base.run)
            if row not in rows.values():
                rows[f"{study}, {label}"] = row
    return rows


def shardings(row: PretrainConfig) -> list[str]:
    whole = row.objective.algorithm == "two_stage"
    return ["none", "optimizer", *([] if whole else ["weights"])]


def two_processes_of_studies(rank: int, work: Path, corpus_path: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    meet = f"file://{work / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    corpus = Corpus.open(corpus_path)
    for number, row in enumerate(rows_of_all_studies().values()):
        for sharding in shardings(row):
            out = work / f"{number}-{sharding}"
            pretrain(with_run(row, sharding=sharding), corpus, out, quiet=True)
    dist.destroy_process_group()
    # After so many runs in one process torch aborts about one interpreter in ten on its way out
    # (a thread of its own that is not joined); never seen after a single run.
    os._exit(0)


def gradients(run: Path, step: int) -> dict[str, Tensor]:
    """The first moments, which are a tenth of them after an optimizer's first step."""
    found = read_checkpoint(run / "checkpoints" / f"step-{step:08d}").tensors["optimizer"]
    return {name: tensor.double() for name, tensor in found.items() if name.startswith("m.")}


@pytest.mark.long
def test_two_processes_have_the_gradients_of_one_in_each_ablation(
    corpus: Corpus, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """And no parameter is without one, as torch's own wrappers ask of a model."""
    rows, most = rows_of_all_studies(), 0.0
    mp.spawn(two_processes_of_studies, (tmp_path, corpus.path), nprocs=2)
    for number, (label, row) in enumerate(rows.items()):
        pretrain(row, corpus, tmp_path / f"{number}", quiet=True)
        # The second step of two stages is the first one of the other network.
        steps = (1, 2) if row.objective.algorithm == "two_stage" else (1,)
        reached = set[str]()
        for step, sharding in itertools.product(steps, shardings(row)):
            one, two = (gradients(tmp_path / f"{number}{n}", step) for n in ("", f"-{sharding}"))
            assert one.keys() == two.keys()
            whole, split = (torch.cat([g.flatten() for g in each.values()]) for each in (one, two))
            assert whole.norm() > 0
            apart = float((whole - split).norm() / whole.norm())
            assert apart <= 1e-6, (label, sharding, step)
            most = max(most, apart)
            reached |= {name for name, gradient in one.items() if gradient.any()}
        assert reached == gradients(tmp_path / f"{number}", 1).keys(), label
    request.node.user_properties.append(("relative difference of gradients", f"{most:.1e}"))


@pytest.mark.parametrize(
    "sharding",
    ["none", *(pytest.param(s, marks=pytest.mark.long) for s in ("optimizer", "weights"))],
)
def test_torchrun_starts_killed_processes_again(
    corpus: Corpus, tmp_path: Path, pair: Path, single: Path, sharding: str
) -> None:
    """The main one before it has saved anything, the other one later."""
    (tmp_path / "lost.py").write_text(LOST)
    config = tmp_path / "pair.json"
    config.write_bytes(json_bytes(to_dict(with_run(config_of_pair(), sharding=sharding))))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--max-restarts", "2", str(tmp_path / "lost.py")]
    arguments = [tmp_path, "killed", "0:3,1:7", "pretrain", "--config", config]
    arguments += ["--corpus", corpus.path]
    arguments += ["--out", tmp_path / "run", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # docs/reliability.md
    result = subprocess.run(
        [*torchrun, *map(str, arguments)], env=environment, capture_output=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert {p.name for p in tmp_path.glob("lost-*")} == {"lost-0:3", "lost-1:7"}
    assert_close_runs(tmp_path / "run", single)
    if sharding == "none":
        assert_same_run(tmp_path / "run", pair / "runs" / "whole")
