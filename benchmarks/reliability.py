"""Kills, damage and restarts by the hundred: what a run survives, counted.

    python benchmarks/reliability.py --out results/reliability
    python benchmarks/reliability.py --out DIR --only R1 R7 --scale 0.1

Comes in: nothing; text, tokenizer, corpus and models are made here, small enough that a life of a
process takes a second. Goes out: reliability.json with what was seen in each entry, how long it
took, and which code on which machine, and a table: test, figure to meet, seen. Entries that are not
run again keep what an earlier run stored in the same file, with the code and scale of that run.

Most lives are forked from a process that has imported everything already (`Warm`), because a start
costs seconds and a fork nothing; a tenth of R1's lives, the uninterrupted runs and whatever needs
torchrun begin as any command does. `tests/test_long.py` runs the same entries as tests, but for
those that are tests already (`TESTED`). The entry `Trainer` needs the package accelerate, which
nothing else here does.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import random
import resource
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import test_checkpoint
import test_corpus
import test_kill
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from conftest import SEQUENCE_LENGTH, language

from electra import runtime
from electra.checkpoint import load_newest
from electra.config import PretrainConfig, from_dict, to_dict
from electra.data.corpus import Corpus, prepare
from electra.data.tokenizer import Tokenizer, train_tokenizer
from electra.errors import CorruptError, ElectraError, Stopped
from electra.files import exclusive
from electra.objectives import Batch, Corruption, ReplacedTokenDetection
from electra.pretrain import pretrain
from electra.randomness import Purpose, StepRng
from electra.runlog import read_metrics

ROOT = Path(__file__).parents[1]
LIMIT = 300  # seconds after which a life that should have ended is a failure


@dataclass(frozen=True)
class Seen:
    """What an entry found, in a sentence and in numbers, and whether that meets its figure."""

    holds: bool
    text: str
    counts: dict[str, Any]


@dataclass(frozen=True)
class Entry:
    what: str
    figure: str
    measure: Callable[[Path, float], Seen]

    def run(self, work: Path, scale: float) -> Seen:
        """Measure, and leave no process behind whatever happens."""
        here = psutil.Process()
        before = here.children(recursive=True)
        try:
            return self.measure(work, scale)
        finally:
            for child in set(here.children(recursive=True)) - set(before):
                with suppress(psutil.Error):
                    child.kill()


def many(number: int, scale: float) -> int:
    return max(2, round(number * scale))


# ---------------------------------------------------------------------- lives of processes

SERVER = """
import importlib, json, os, sys
sys.path[:0] = json.loads(sys.argv[1])
import torch
torch.set_num_threads(1)
for name in sys.argv[2].split(","):
    importlib.import_module(name)
print(0, flush=True)
child = 0
for line in sys.stdin:
    order = json.loads(line)
    if order is None:  # only now does the number of the child become free for others
        print(os.waitpid(child, 0)[1], flush=True)
        continue
    child = os.fork()
    if child == 0:
        os.environ |= order["environment"]
        log = os.open(order["log"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        module, _, name = order["call"].partition(":")
        code = 1
        try:
            code = getattr(importlib.import_module(module), name)(*order["arguments"]) or 0
        except BaseException:
            import traceback
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    print(child, flush=True)
"""


class Warm:
    """A process with everything imported that forks one life after the other."""

    def __init__(self, *modules: str) -> None:
        names = ",".join(["electra.cli", "electra.pretrain", "tensorboard", *modules])
        places = json.dumps([str(ROOT), str(ROOT / "benchmarks")])
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SERVER, places, names],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def ask(self, order: object) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        for life in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.Error):
                life.kill()
        with self._process:  # closes its pipes, which ends it
            pass


class Life:
    """One forked process, with the methods of Popen that are used here."""

    def __init__(
        self, warm: Warm, call: str, arguments: Sequence[Any], log: Path, **environment: str
    ) -> None:
        self._warm, self.log, self.returncode = warm, log, None
        order = {"call": call, "arguments": arguments, "log": str(log), "environment": environment}
        self.pid = warm.ask(order)
        self._descriptor = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            if not select.select([self._descriptor], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("life", timeout)
            os.close(self._descriptor)
            self.returncode = os.waitstatus_to_exitcode(self._warm.ask(None))
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def told(self) -> str:
        return self.log.read_text(errors="replace")


Process = Any  # Life or Popen


@contextmanager
def warm(*modules: str) -> Iterator[Warm]:
    server = Warm(*modules)
    try:
        yield server
    finally:
        server.close()


def until(
    holds: Callable[[], bool], process: Process | None = None, seconds: float = LIMIT
) -> bool:
    """Waits for a condition, or for the end of the process, or for the time to run out."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end or (process is not None and process.poll() is not None):
            return False
        time.sleep(0.002)
    return True


def pause(process: Process, seconds: float) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def end(process: Process) -> int:
    process.kill()
    return process.wait(LIMIT)


def micro_corpus(work: Path) -> Corpus:
    """Text, tokenizer and corpus that every entry on pre-training uses."""
    (work / "text.txt").write_text(language(300))
    tokenizer = train_tokenizer([work / "text.txt"], vocab_size=97)
    tokenizer.save(work / "tokenizer")
    settings: dict[str, Any] = {"sequence_length": SEQUENCE_LENGTH, "short_percent": 0}
    prepare(
        [work / "text.txt"],
        tokenizer,
        work / "corpus",
        held_out_percent=10.0,
        workers=1,
        **settings,
    )
    return Corpus.open(work / "corpus")


def fresh(command: Sequence[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """A process as a user starts it."""
    everything = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    with open(log, "wb") as file:
        return subprocess.Popen(command, env=everything, stdout=file, stderr=file)


def leftovers(out: Path) -> list[str]:
    found = [p for p in out.rglob("*") if p.name.startswith((".", "damaged-"))]
    return [str(p.relative_to(out)) for p in found if p.name != ".lock"]


# ---------------------------------------------------------------------- R1, and the Trainer


def killed_run(
    start: Callable[[int, str], Process],
    out: Path,
    kills: int,
    faults: Sequence[str],
    repair: Callable[[], None],
) -> Counter[str]:
    """Start and kill until it has happened `kills` times: every fourth time inside a save, else
    at a random moment of the start or of the steps. A start that fails is repaired and counted."""
    draw, counts = random.Random(1), Counter[str]()
    usual = 3.0
    while counts["kills"] < kills:
        number = counts["kills"]
        fault = faults[number // 4 % len(faults)] if number % 4 == 0 else ""
        before, begun = test_kill.lines(out), time.monotonic()
        process = start(number, f"{fault}:{draw.randint(2, 3)}" if fault else "")
        if fault:
            process.wait(LIMIT)
        elif number % 4 == 1:  # in the start: at the latest when it has come back to work
            until(
                lambda n=before: test_kill.lines(out) > n,
                process,
                draw.uniform(0, usual),
            )
        else:
            test_kill.wait_for_lines(process, out, draw.randint(1, 6))
            usual = time.monotonic() - begun
            counts["restarts"] += process.poll() is None
            pause(process, draw.uniform(0, 0.02))
        code = end(process)
        if code == -signal.SIGKILL:
            counts["kills"] += 1
            counts["kills in a save"] += bool(fault)
        elif code == 0:
            raise RuntimeError(f"the run was over after {counts['kills']} kills")
        else:
            counts["starts that failed"] += 1
            repair()
    return counts


def r1(work: Path, scale: float) -> Seen:
    corpus, out, kills = micro_corpus(work), work / "run", many(200, scale)
    steps = 10 * kills + 30
    whole = fresh(test_kill.command(corpus, work / "whole", steps), work / "whole.log")
    assert whole.wait(4 * LIMIT) == 0, (work / "whole.log").read_text()
    command = test_kill.command(corpus, out, steps)

    def start(number: int, fault: str) -> Process:
        environment = {"ELECTRA_FAULT": fault}
        if number % 10 == 9:
            return fresh(command, work / "life.log", **environment)
        return Life(server, "electra.cli:run", [command[3:]], work / "life.log", **environment)

    def nothing() -> None:
        shutil.copy(work / "life.log", work / "failed.log")

    with warm("torch.utils.tensorboard") as server:
        counts = killed_run(start, out, kills, test_checkpoint.fault_points(), nothing)
    last = fresh(command, work / "life.log")
    assert last.wait(4 * LIMIT) == 0, (work / "life.log").read_text()
    (weights, logged), (ours, log) = (test_kill.outcome(p, steps) for p in (work / "whole", out))
    losses = sum(a == b for a, b in zip(logged, log, strict=False))
    left = leftovers(out)
    found = {
        **counts,
        "steps": steps,
        "starts that failed": counts["starts that failed"],
        "weights equal": weights == ours,
        "sha256": ours,
        "log lines equal": f"{losses} of {len(logged)}",
        "left over": left,
    }
    same = weights == ours and logged == log
    text = f"{kills} kills, {counts['kills in a save']} in a save: weights "
    text += f"{'equal' if weights == ours else 'DIFFERENT'}, {losses} of {len(logged)} lines equal"
    text += f", {counts['starts that failed']} repairs, {len(left)} left over"
    enough = 4 * counts["kills in a save"] >= kills
    return Seen(same and enough and not left and not counts["starts that failed"], text, found)


TRAINER_FAULTS = (
    *("before model", "after model", "half optimizer.pt", "after optimizer.pt"),
    *("half scheduler.pt", "half rng_state.pth", "half trainer_state.json"),
)


def trainer_run(folder: str, steps: int) -> None:
    """One life of a micro ELECTRA in the Trainer of transformers, continued from its newest
    checkpoint as its documentation says; RELIABILITY_FAULT names where in a save it dies."""
    import transformers
    from transformers.trainer_utils import get_last_checkpoint

    out = Path(folder)
    out.mkdir(exist_ok=True)
    name, _, count = os.environ.get("RELIABILITY_FAULT", "").partition(":")
    left = int(count or 0)

    def die_at(point: str, path: str = "", data: bytes = b"") -> None:
        nonlocal left
        if point == name:
            left -= 1
            if left == 0:
                if path:
                    Path(path).write_bytes(data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)

    def torch_save(value: Any, path: str, *more: Any, **named: Any) -> None:
        save(value, path, *more, **named)
        file = Path(path)
        die_at(f"half {file.name}", path, file.read_bytes())
        die_at(f"after {file.name}")

    save, torch.save = torch.save, torch_save
    save_state = transformers.TrainerState.save_to_json

    def state_saved(self: Any, path: str) -> None:
        save_state(self, path)
        die_at(f"half {Path(path).name}", path, Path(path).read_bytes())

    transformers.TrainerState.save_to_json = state_saved

    class Watched(transformers.Trainer):
        def save_model(self, output_dir: str | None = None, **more: Any) -> None:  # type: ignore[override]
            os.makedirs(output_dir or folder, exist_ok=True)
            die_at("before model")
            super().save_model(output_dir, **more)
            die_at("after model")

    class Steps(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            del args, control, more
            with open(out / "metrics.jsonl", "a") as file:
                file.write(f"{state.global_step}\n")

    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        save_steps=3,
        save_total_limit=2,
        logging_steps=1,
        learning_rate=5e-4,
        full_determinism=True,
        seed=7,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )
    transformers.set_seed(7)
    config = transformers.ElectraConfig(
        vocab_size=97,
        embedding_size=14,
        hidden_size=20,
        intermediate_size=28,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=29,
    )
    draw = torch.Generator().manual_seed(7)
    rows = torch.randint(5, 97, (1200, SEQUENCE_LENGTH), generator=draw)
    labels = (torch.rand(rows.shape, generator=draw) < 0.15).long()
    data = [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]
    trainer = Watched(
        model=transformers.ElectraForPreTraining(config),
        args=arguments,
        train_dataset=data,  # type: ignore[arg-type]
        callbacks=[Steps()],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))


def trainer(work: Path, scale: float) -> Seen:
    """The kill test of R1 on the Trainer; what a person would have to do is done and counted."""
    from transformers.trainer_utils import get_last_checkpoint

    kills, out = many(40, scale), work / "run"
    steps = 12 * kills + 30
    errors = Counter[str]()

    def start(number: int, fault: str) -> Life:
        del number
        arguments = [str(out), steps]
        log = work / "life.log"
        return Life(server, "reliability:trainer_run", arguments, log, RELIABILITY_FAULT=fault)

    def repair() -> None:
        """The newest checkpoint cannot be read: someone has to find that out and delete it."""
        errors[(work / "life.log").read_text().strip().splitlines()[-1].split(":")[0]] += 1
        newest = get_last_checkpoint(str(out))
        if newest is None:
            raise RuntimeError((work / "life.log").read_text())
        shutil.rmtree(newest)

    def result(folder: Path) -> tuple[str, list[Any]]:
        newest = folder / f"checkpoint-{steps}"
        state = json.loads((newest / "trainer_state.json").read_bytes())
        losses = [(m["step"], m["loss"]) for m in state["log_history"] if "loss" in m]
        weights = (newest / "model.safetensors").read_bytes()
        return hashlib.sha256(weights).hexdigest(), losses

    with warm("transformers", "transformers.trainer", "accelerate", "reliability") as server:
        for name in ("whole", "again"):  # it must agree with itself to be compared at all
            life = Life(
                server, "reliability:trainer_run", [str(work / name), steps], work / "w.log"
            )
            assert life.wait(4 * LIMIT) == 0, life.told()
        repeats = result(work / "whole") == result(work / "again")
        counts = killed_run(start, out, kills, TRAINER_FAULTS, repair)
        while (life := start(0, "")).wait(4 * LIMIT) != 0:
            counts["starts that failed"] += 1
            repair()
    (weights, losses), (ours, log) = result(work / "whole"), result(out)
    equal = sum(a == b for a, b in zip(losses, log, strict=False))
    found = {
        **counts,
        "steps": steps,
        "starts that failed": counts["starts that failed"],
        "errors": dict(errors),
        "uninterrupted run repeats itself": repeats,
        "weights equal": weights == ours,
        "log lines equal": f"{equal} of {len(losses)}",
        "left over": leftovers(out),
    }
    text = f"{kills} kills, {counts['kills in a save']} in a save: "
    text += f"{counts['starts that failed']} starts failed and needed a repair by hand, weights "
    text += f"{'equal' if weights == ours else 'DIFFERENT'}, {equal} of {len(losses)} losses equal"
    return Seen(repeats, text, found)


# ---------------------------------------------------------------------- R3: torchrun


def torchrun(command: Sequence[str], log: Path, restarts: int = 0) -> subprocess.Popen[bytes]:
    """The same electra command in two processes.

    Processes that torchrun starts again would find the addresses of those before them in a store it
    keeps, and fail to connect (pytorch issue 135712); the variable gives them a store of their own.
    """
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    start += ["--nproc-per-node", "2", "--max-restarts", str(restarts)]
    return fresh([*start, *command[1:]], log, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")


def ranks(agent: subprocess.Popen[bytes]) -> dict[int, psutil.Process]:
    """The two processes of a torchrun, by rank; fewer while they are being started."""
    found: dict[int, psutil.Process] = {}
    with suppress(psutil.Error):
        for child in psutil.Process(agent.pid).children():
            with suppress(psutil.Error, KeyError):
                found[int(child.environ()["RANK"])] = child
    return found


def r3(work: Path, scale: float) -> Seen:
    """torchrun itself starts the processes again: nobody has to do anything."""
    corpus, kills, draw = micro_corpus(work), many(20, scale), random.Random(3)
    steps = 40 * kills
    whole = torchrun(test_kill.command(corpus, work / "whole", steps), work / "whole.log")
    assert whole.wait(4 * LIMIT) == 0, (work / "whole.log").read_text()
    out, seconds = work / "run", list[float]()
    agent = torchrun(test_kill.command(corpus, out, steps), work / "run.log", restarts=kills)
    test_kill.wait_for_lines(agent, out, 5)
    for kill in range(kills):
        pause(agent, draw.uniform(0, 0.1))
        two = ranks(agent)
        assert len(two) == 2, f"the run was over after {kill} kills"
        old = {process.pid for process in two.values()}
        two[kill % 2].kill()
        begin = time.monotonic()
        back = until(
            lambda old=old: (
                len(new := {p.pid for p in ranks(agent).values()}) == 2 and not new & old
            ),
            agent,
        )
        assert back, (work / "run.log").read_text()[-3000:]
        test_kill.wait_for_lines(agent, out, 1)
        seconds.append(time.monotonic() - begin)
        test_kill.wait_for_lines(agent, out, draw.randint(1, 8))
    assert agent.wait(4 * LIMIT) == 0, (work / "run.log").read_text()[-3000:]
    one, two = test_kill.outcome(work / "whole", steps), test_kill.outcome(out, steps)
    left = leftovers(out)
    counts = {
        "kills": len(seconds),
        "steps": steps,
        "equal": one == two,
        "seconds back to training": [round(s, 2) for s in seconds],
        "left over": left,
    }
    if max(seconds) > 30:  # torchrun says when it asked a process to end, and when it ended it
        told = (work / "run.log").read_text(errors="replace").splitlines()
        words = ("signal", "exitcode", "electra: ")
        counts["told"] = [line for line in told if any(word in line for word in words)]
    text = f"{len(seconds)} kills: {'bit-equal' if one == two else 'DIFFERENT'}, back after at most"
    text += f" {max(seconds):.1f} s (median {statistics.median(seconds):.1f} s)"
    return Seen(one == two and max(seconds) <= 30 and not left, text, counts)


# ---------------------------------------------------------------------- R6: world sizes


def several(rank: int, world: int, work: Path, out: Path, values: Any, stop_at: int) -> None:
    """One of `world` processes that train until `stop_at`, then the first is asked to stop.

    Every row that is trained on is noted by step and place: a digest of the tokens, the mask and
    the random draws for it, and one of the corrupted tokens.
    """
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    if world > 1:
        meet = f"file://{out}-{stop_at}.meet"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
    rows: dict[str, tuple[str, str]] = {}
    corrupt = ReplacedTokenDetection.corrupt

    def noted(
        self: ReplacedTokenDetection, batch: Batch, rng: StepRng, *, training: bool
    ) -> Corruption:
        p = corrupt(self, batch, rng, training=training)
        if training:
            draws = rng.uniform(Purpose.SAMPLE, p.m.at.shape[1])
            inputs = (batch.x, batch.segment, p.m.at, p.m.valid, p.x_masked, draws)
            for i, row in enumerate(rng.rows.tolist()):
                content = b"".join(part[i].numpy().tobytes() for part in inputs)
                replaced = p.x_corrupt[i].numpy().tobytes()
                digests = (hashlib.sha256(b).hexdigest()[:16] for b in (content, replaced))
                rows[f"{int(rng.step)}/{row}"] = tuple(digests)  # type: ignore[assignment]
            if rank == 0 and int(rng.step) + 1 == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
        return p

    ReplacedTokenDetection.corrupt = noted  # type: ignore[method-assign]
    config = from_dict(PretrainConfig, values, where="reliability")
    stopped = False
    try:
        pretrain(config, Corpus.open(work / "corpus"), out, quiet=True)
    except Stopped:
        stopped = True
    assert stopped == (stop_at > 0), "the request to stop was not made, or not heard"
    (work / f"rows-{out.name}-{stop_at}-{rank}.json").write_text(json.dumps(rows))


def rows_of(work: Path, out: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in work.glob(f"rows-{out.name}-*.json"):
        for key, value in json.loads(path.read_bytes()).items():
            assert key not in found, f"step and row {key} was trained on twice"
            found[key] = value
    return found


def r6(work: Path, scale: float) -> Seen:
    import test_distributed

    micro_corpus(work)
    steps = max(12, round(200 * min(1.0, scale)))
    values = to_dict(
        test_distributed.with_run(test_distributed.config_of_pair(), train_steps=steps)
    )
    whole = work / "whole"
    mp.spawn(several, (1, work, whole, values, 0), nprocs=1)  # type: ignore[attr-defined]
    one, expected = rows_of(work, whole), train_losses(whole)
    assert len(one) == steps * values["data"]["batch_size"], f"{len(one)} rows were noted"
    found: list[dict[str, Any]] = []
    for trial in range(many(2, scale)):
        out = work / f"run-{trial}"
        draw = random.Random(trial)
        stops = [round(steps * draw.uniform(n, n + 0.9) / 4) for n in (0.1, 1, 2)]
        for world, stop_at in zip((1, 2, 1, 4), (*stops, 0), strict=True):
            arguments = (world, work, out, values, stop_at)
            mp.spawn(several, arguments, nprocs=world)  # type: ignore[attr-defined]
        rows, losses = rows_of(work, out), train_losses(out)
        same = [sum(rows.get(k, [""] * 2)[i] == one[k][i] for k in one) for i in range(2)]
        apart = max(abs(losses[s] / expected[s] - 1) for s in expected)
        found.append(
            {
                "changes at steps": stops,
                "rows": len(one),
                "rows with equal samples, masks and draws": same[0],
                "rows with equal replaced tokens": same[1],
                "largest relative difference of a loss": apart,
                "holds": rows.keys() == one.keys() and same[0] == len(one) and apart <= 1e-3,
            }
        )
    worst = max(f["largest relative difference of a loss"] for f in found)
    total = sum(f["rows"] for f in found)
    text = f"{len(found)} runs of {steps} steps: {sum(f[_EQUAL] for f in found)} of {total} rows "
    text += f"with equal samples, masks and draws, {sum(f[_TOKENS] for f in found)} with equal "
    text += f"replaced tokens, losses within {worst:.1e}"
    return Seen(all(f["holds"] for f in found), text, {"runs": found, "steps": steps})


_EQUAL, _TOKENS = "rows with equal samples, masks and draws", "rows with equal replaced tokens"


def train_losses(out: Path) -> dict[int, float]:
    return {m["step"]: m["loss"] for m in read_metrics(out) if m["kind"] == "train"}


# ---------------------------------------------------------------------- R7, R10: damage on disk


def damage_file(path: Path, kind: str, draw: random.Random, other: Path) -> None:
    """Change the bytes of one file, or of two in a swap, so that they are not what they were."""
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content))
    if kind == "truncate":
        del content[place:]
    elif kind == "flip a bit":
        content[place] ^= 1 << draw.randrange(8)
    elif kind == "zero a block":
        while not any(content[place : place + 64]):
            place = draw.randrange(len(content))
        content[place : place + 64] = bytes(len(content[place : place + 64]))
    elif kind == "delete":
        path.unlink()
        return
    elif kind == "swap":
        theirs = other.read_bytes()
        assert theirs != content
        other.write_bytes(content)
        content = bytearray(theirs)
    path.write_bytes(content)


def r7(work: Path, scale: float) -> Seen:
    draw, counts = random.Random(7), Counter[str]()
    edits = [d for n, d in test_checkpoint.DAMAGES.items() if n.startswith("manifest")]
    kinds = ("truncate", "flip a bit", "zero a block", "delete", "swap", "edit the manifest")
    for number in range(many(300, scale)):
        directory = work / "checkpoints"
        shutil.rmtree(directory, ignore_errors=True)
        *_, newest = test_checkpoint.written(directory, 4, 8, 12)
        kind = kinds[number % len(kinds)]
        if kind == "edit the manifest":
            draw.choice(edits)(newest)
        else:
            one, two = draw.sample(sorted(newest.iterdir()), 2)
            damage_file(one, kind, draw, two)
        damaged = test_corpus.content(newest)
        warnings: list[str] = []
        found = load_newest(directory, warn=warnings.append)
        counts["damaged"] += 1
        counts["noticed"] += len(warnings) == 1 and newest.name in warnings[0]
        with suppress(AssertionError):
            test_checkpoint.assert_is(found, 8)
            counts["fell back"] += 1
        aside = directory / f"damaged-{newest.name}"
        counts["kept"] += aside.is_dir() and test_corpus.content(aside) == damaged
    whats = ("damaged", "noticed", "fell back", "kept")
    holds = all(counts[what] == many(300, scale) for what in whats)
    return Seen(holds, numbers(counts), dict(counts))


def numbers(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def r10(work: Path, scale: float) -> Seen:
    draw, counts = random.Random(10), Counter[str]()
    tokenizer = Tokenizer.load(test_corpus.ORACLE / "builder_vocab.txt")
    for name, seed in (("good", 0), ("other", 1)):
        text = test_corpus.make_text(work / f"text-{name}", documents=200, seed=seed)
        prepare([text], tokenizer, work / name, workers=1, shard_bytes=20_000)
    good = work / "good"
    files = sorted(path for path in good.glob("*.bin") if path.stat().st_size)
    trials = [("flip a bit", many(100, scale)), ("truncate", many(20, scale))]
    trials += [("swap", many(20, scale)), ("wrong index", many(20, scale))]
    for kind, trials_of_kind in trials:
        for _ in range(trials_of_kind):
            copy = work / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(good, copy)
            if kind == "wrong index":
                wrong_index(copy, work / "other", draw)
            else:
                one, two = (copy / path.name for path in draw.sample(files, 2))
                damage_file(one, kind, draw, two)
            counts[f"{kind}: tried"] += 1
            with suppress(CorruptError):
                Corpus.open(copy)
                continue
            counts[f"{kind}: found"] += 1
    Corpus.open(good)
    text = ", ".join(f"{n}: {counts[f'{n}: found']} of {counts[f'{n}: tried']}" for n, _ in trials)
    found = all(counts[f"{n}: found"] == counts[f"{n}: tried"] for n, _ in trials)
    return Seen(found, text, dict(counts))


def wrong_index(corpus: Path, other: Path, draw: random.Random) -> None:
    """The manifest of another corpus, or this one with an entry that belongs elsewhere."""
    path = corpus / "manifest.json"
    manifest = json.loads(path.read_bytes())
    shards = manifest["shards"]
    a, b = draw.sample(range(len(shards)), 2)
    match draw.randrange(4):
        case 0:
            shutil.copy(other / "manifest.json", path)
            return
        case 1:
            shards[a], shards[b] = shards[b], shards[a]
        case 2:
            shards[a]["tokens"]["xxh3"] = shards[b]["tokens"]["xxh3"]
        case _:
            shards[a]["counts"]["examples"] += draw.choice([-1, 1])
    path.write_text(json.dumps(manifest))


# ---------------------------------------------------------------------- R14, R17: prepare, finetune

TINY_SHARDS = {"sequence_length": 32, "shard_bytes": 6000}


def prepare_run(inputs: list[str], out: str, workers: int) -> int:
    """`electra prepare` with shards so small that there are hundreds."""
    tokenizer = Tokenizer.load(test_corpus.ORACLE / "builder_vocab.txt")
    try:
        prepare(inputs, tokenizer, Path(out), workers=workers, **TINY_SHARDS)  # type: ignore[arg-type]
    except ElectraError as error:
        print(f"electra: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def shards(out: Path) -> int:
    return len(list(out.glob("train-*.tokens.bin")))


def workers_of(pid: int) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            with suppress(psutil.Error):
                if any("spawn_main" in part for part in child.cmdline()):
                    found.append(child)
    return found


def r14(work: Path, scale: float) -> Seen:
    kills, draw, counts = many(20, scale), random.Random(14), Counter[str]()
    text, out = test_corpus.make_text(work / "text", documents=80 * kills), work / "killed"
    seconds = list[float]()
    with warm("electra.data.corpus", "reliability") as server:

        def start(out: Path) -> Life:
            arguments = [[str(text)], str(out), 2]
            return Life(server, "reliability:prepare_run", arguments, work / "life.log")

        assert start(work / "whole").wait(LIMIT) == 0
        while counts["kills"] < kills:
            life, before = start(out), shards(out)
            if counts["kills"] % 4:  # else while the workers are being started
                more = before + draw.randint(1, 4)
                until(lambda n=more: shards(out) >= n, life)
            assert until(lambda p=life.pid: len(workers_of(p)) == 2, life), life.told()
            draw.choice(workers_of(life.pid)).kill()
            counts["kills"] += 1
            begin = time.monotonic()
            code = life.wait(LIMIT)
            seconds.append(time.monotonic() - begin)
            counts[f"exit {code}"] += 1
            told = life.told()
            counts["clear message"] += "worker process ended" in told and "Traceback" not in told
        shards_before = shards(out)
        assert start(out).wait(LIMIT) == 0
    same = test_corpus.content(out) == test_corpus.content(work / "whole")
    left = leftovers(out)
    text_ = f"{numbers(counts)}; noticed within {max(seconds):.2f} s; "
    text_ += f"hashes {'equal' if same else 'DIFFERENT'} after the same command"
    found = {**counts, "slowest notice in seconds": max(seconds), "equal": same, "left over": left}
    found["shards kept, of"] = [shards_before, shards(out)]
    clear = counts["clear message"] == counts["exit 75"] == kills and max(seconds) <= 10
    return Seen(clear and same and not left, text_, found)


def r17(work: Path, scale: float) -> Seen:
    import test_finetune

    draw, kills = random.Random(17), many(20, scale)
    text = test_corpus.make_text(work / "text", files=5, documents=40 * kills)
    files = sorted(map(str, text.iterdir()))
    counts = Counter[str]()
    with warm(
        "electra.data.corpus",
        "electra.finetuning.finetune",
        "electra.finetuning.glue",
        "reliability",
    ) as server:

        def start(inputs: list[str], out: Path, workers: int) -> Life:
            arguments = [inputs, str(out), workers]
            return Life(server, "reliability:prepare_run", arguments, work / "life.log")

        assert start(files, work / "whole", 1).wait(LIMIT) == 0
        whole = test_corpus.content(work / "whole")
        for workers in (1, 2, 4, 8):
            for order in range(2):
                out = work / f"workers-{workers}-{order}"
                life = start(draw.sample(files, len(files)), out, workers)
                assert life.wait(LIMIT) == 0, life.told()
                counts["prepared"] += 1
                counts["equal"] += test_corpus.content(out) == whole
                shutil.rmtree(out)
        out = work / "killed"
        finished = list[int]()
        for kill in range(kills):
            life, before = start(files, out, 1 + kill % 2), shards(out)
            if kill % 4 == 3:
                pause(life, draw.uniform(0, 0.5))
            else:
                wanted = before + draw.randint(1, 5)
                until(lambda n=wanted: shards(out) >= n, life)
                pause(life, draw.uniform(0, 0.01))
            assert end(life) == -signal.SIGKILL, life.told()
            finished.append(shards(out))
        assert start(files, out, 2).wait(LIMIT) == 0
        same = test_corpus.content(out) == whole
        left = leftovers(out)

        tokenizer = train_on(work)
        (work / "table").mkdir()
        (work / "model").mkdir()
        table = test_finetune.write_table(work / "table")
        model = test_finetune.write_model(work / "model", tokenizer)

        def tune(out: Path, fault: str = "") -> Life:
            command = test_finetune.command(model, table, out)
            log = work / "life.log"
            return Life(server, "electra.cli:run", [command], log, ELECTRA_FAULT=fault)

        assert tune(work / "tuned").wait(LIMIT) == 0
        tune_kills = tune_and_kill(tune, work / "tune-killed", many(10, scale), draw)
        assert tune(work / "tune-killed").wait(LIMIT) == 0
    one, two = (test_finetune.outcome(work / name) for name in ("tuned", "tune-killed"))
    found = {
        **counts,
        "kills of prepare": kills,
        "finished shards at each kill": finished,
        "equal after kills": same,
        "left over": left,
        "kills of finetune": tune_kills,
        "finetune equal": one == two,
    }
    text_ = f"{counts['equal']} of {counts['prepared']} equal; {kills} kills of prepare: hashes "
    text_ += f"{'equal' if same else 'DIFFERENT'}; {tune_kills} kills of finetune: every file "
    text_ += f"{'equal' if one == two else 'DIFFERENT'}"
    holds = counts["equal"] == counts["prepared"] and same and one == two and not left
    enough = 2 * tune_kills >= many(10, scale)  # the others came after its end
    return Seen(holds and enough, text_, found)


def train_on(work: Path) -> Tokenizer:
    (work / "language.txt").write_text(language(300))
    return train_tokenizer([work / "language.txt"], vocab_size=97)


def tune_and_kill(
    tune: Callable[[Path, str], Life], out: Path, kills: int, draw: random.Random
) -> int:
    """At random moments of starts, steps and results, every fourth time inside a save."""
    points = test_checkpoint.fault_points()
    points = [p for p in points if p not in ("after_model", "after_optimizer", "after_log")]

    def saved() -> int:
        return sum(int(p.name[5:]) for p in out.glob("seed-*/checkpoints/step-*"))

    done = 0
    for kill in range(kills):
        if kill % 4 == 0:
            life = tune(out, f"{draw.choice(points)}:{draw.randint(1, 2)}")
            life.wait(LIMIT)
        else:
            life, before = tune(out, ""), saved()
            if kill % 4 == 1:
                pause(life, draw.uniform(0, 1))
            else:
                until(lambda n=before: saved() not in (0, n), life)
                pause(life, draw.uniform(0, 0.05))
        done += end(life) == -signal.SIGKILL
    return done


# ---------------------------------------------------------------------- R15, R16


def traces(tree: Sequence[psutil.Process]) -> tuple[set[str], set[tuple[str, int]]]:
    """Shared memory by name and ports that these processes hold."""
    memory: set[str] = set()
    ports: set[tuple[str, int]] = set()
    for process in tree:
        with suppress(psutil.Error, OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                if "/dev/shm/" in line and not line.endswith("(deleted)"):
                    memory.add(line[line.index("/dev/shm/") :])
            for c in process.net_connections("tcp"):
                if c.status == psutil.CONN_LISTEN:
                    ports.add((c.laddr.ip, c.laddr.port))
    return memory, ports


def is_free(directory: Path) -> bool:
    """Whether nobody holds it; a dying process lets go when its last thread has ended."""
    with suppress(ElectraError), exclusive(directory):
        return True
    return False


def is_alive(process: psutil.Process) -> bool:
    """A zombie does nothing and holds nothing; it waits for whoever adopted it."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def r15(work: Path, scale: float) -> Seen:
    """Kill, look for what holds on, start again: pretrain, prepare and torchrun in turn."""
    corpus, draw, restarts = micro_corpus(work), random.Random(15), many(50, scale)
    text = test_corpus.make_text(work / "text", documents=80 * restarts)
    counts = Counter[str]()
    problems: list[str] = []
    with warm("electra.data.corpus", "torch.utils.tensorboard", "reliability") as server:

        def start(kind: str, out: Path) -> Process:
            log = work / f"{kind}.log"
            if kind == "prepare":
                arguments: list[Any] = [[str(text)], str(out), 2]
                return Life(server, "reliability:prepare_run", arguments, log)
            command = test_kill.command(corpus, out, 50 * restarts)
            if kind == "torchrun":
                return torchrun(command, log)
            return Life(server, "electra.cli:run", [command[3:]], log)

        def is_back(kind: str, out: Path, process: Process, before: int) -> bool:
            if kind == "prepare":
                return until(lambda: shards(out) > before, process)
            test_kill.wait_for_lines(process, out, draw.randint(1, 4))
            return process.poll() is None

        for number in range(restarts + 1):
            kind = ("pretrain", "prepare", "pretrain", "torchrun", "pretrain")[number % 5]
            out = work / f"run-{kind}"
            process = start(kind, out)
            back = is_back(kind, out, process, shards(out))
            counts["starts"] += 1
            if not back:
                told = (work / f"{kind}.log").read_text(errors="replace")
                problems.append(f"{kind} did not start: {told[-300:]}")
                continue
            tree = [psutil.Process(process.pid)]
            tree += tree[0].children(recursive=True)
            memory, ports = traces(tree)
            counts["shared memory objects held"] += len(memory)
            counts["ports held"] += len(ports)
            end(process)
            counts["kills"] += 1
            if not until(lambda t=tree: not any(map(is_alive, t)), seconds=10):
                problems.append(f"{kind}: {sum(map(is_alive, tree))} processes still there")
                for survivor in filter(is_alive, tree):
                    survivor.kill()
                until(lambda t=tree: not any(map(is_alive, t)), seconds=10)
            if not until(lambda m=memory: not any(map(os.path.exists, m)), seconds=10):
                problems.append(f"{kind}: shared memory left: {memory}")
            if until(lambda o=out: is_free(o), seconds=10):
                counts["locks free"] += 1
            else:
                problems.append(f"{kind}: the directory is still locked")
    counts["problems"] = len(problems)
    found = {**counts, "list of problems": problems[:20]}
    holds = not problems and counts["locks free"] == counts["kills"] == restarts + 1
    text_ = f"{counts['starts'] - 1} restarts after {counts['kills'] - 1} kills, "
    text_ += f"{counts['locks free'] - 1} locks free, {len(problems)} problems; held before: "
    text_ += f"{counts['shared memory objects held']} shared memory objects, "
    text_ += f"{counts['ports held']} ports"
    return Seen(holds, text_, found)


def worked() -> float:
    """Processor seconds of the children of this process that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def r16(work: Path, scale: float) -> Seen:
    corpus, trials = micro_corpus(work), many(10, scale)
    steps, counts = 60 * trials, Counter[str]()
    for name in ("whole", "run"):
        (work / name).mkdir()
    clock, seconds = list[float](), list[float]()
    with warm("torch.utils.tensorboard") as server:

        def start(out: Path) -> Life:
            arguments = test_kill.command(corpus, out, steps)[3:]
            return Life(server, "electra.cli:run", [arguments], work / "life.log")

        assert start(work / "whole").wait(LIMIT) == 0
        run = start(work / "run")
        for _ in range(trials):
            test_kill.wait_for_lines(run, work / "run", 3)
            assert run.poll() is None, run.told()
            before, begin = worked(), time.monotonic()
            other = fresh(test_kill.command(corpus, work / "run", steps), work / "other.log")
            code = other.wait(LIMIT)
            clock.append(time.monotonic() - begin)
            seconds.append(worked() - before)
            told = (work / "other.log").read_text()
            counts["tried"] += 1
            counts["refused"] += code == 2 and "Another process" in told
        assert run.wait(LIMIT) == 0, run.told()
    same = test_kill.outcome(work / "run", steps) == test_kill.outcome(work / "whole", steps)
    # Other work on the machine stretches the clock, not the work that there is to do.
    found = {**counts, "processor seconds": max(seconds), "clock seconds": clock}
    found["first unharmed"] = same
    text = f"{counts['refused']} of {counts['tried']} refused, imports included, after at most "
    text += f"{max(seconds):.2f} s of work (median {statistics.median(clock):.2f} s on the clock), "
    text += f"the first run {'unharmed' if same else 'CHANGED'}"
    return Seen(counts["refused"] == trials and max(seconds) <= 1 and same, text, found)


# ---------------------------------------------------------------------- R18, R24


def r18(work: Path, scale: float) -> Seen:
    import test_tokenizer

    text = test_tokenizer.sentences(work / "text.txt")
    results = Counter[str]()
    for number in range(many(10, scale)):
        out = work / f"tokenizer-{number}"
        command = ["tokenizer", "--input", str(text), "--out", str(out), "--vocab-size", "300"]
        process = fresh(
            [sys.executable, "-m", "electra", *command],
            work / "life.log",
            PYTHONHASHSEED=str(number + 1),
        )
        assert process.wait(LIMIT) == 0, (work / "life.log").read_text()
        content = test_corpus.content(out)
        assert content
        results[hashlib.sha256(repr(sorted(content.items())).encode()).hexdigest()] += 1
    times = results.most_common(1)[0][1]
    seen = f"{times} of {results.total()} processes wrote identical files"
    return Seen(times == results.total(), seen, {"processes": results.total(), "identical": times})


def anonymous(pid: int) -> int:
    """Bytes of resident memory that are no file's."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def r24(work: Path, scale: float) -> Seen:
    corpus, steps = micro_corpus(work), max(600, round(10_000 * scale))
    since = max(100, steps // 20)  # until then whatever is kept has been made once
    command = test_kill.command(corpus, work / "run", steps)
    shares = {"log-every": 10, "eval-every": steps // 50, "save-every": steps // 100}
    for flag, value in shares.items():
        command[command.index(f"--run.{flag}") + 1] = str(value)
    process = fresh(command, work / "life.log")
    watched = psutil.Process(process.pid)
    samples: list[tuple[int, int, int, int]] = []  # step, resident, of that its own, files
    step = 0
    while process.poll() is None:
        with suppress(psutil.Error, OSError, ValueError, IndexError):  # not there, or half a line
            with open(work / "run" / "metrics.jsonl", "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 2000))
                now = json.loads(file.read().splitlines()[-1])["step"]
            if now != step:
                step = now
                own = anonymous(process.pid)
                samples.append((now, watched.memory_info().rss, own, watched.num_fds()))
        pause(process, 0.02)
    assert process.wait(LIMIT) == 0, (work / "life.log").read_text()
    samples = [s for s in samples if s[0] < steps - 50]  # the process is at its end after that
    _, first, first_own, _ = next(sample for sample in samples if sample[0] >= since)
    later = [s for s in samples if s[0] > since]
    growth = max(rss for _, rss, _, _ in later) / first - 1
    # The kernel takes back pages of programs when it likes, and would hide what is added.
    own_growth = max(own for _, _, own, _ in later) / first_own - 1
    files = Counter(number for *_, number in later)
    usual = files.most_common(1)[0][0]
    # A save in progress holds one file more for a moment; what leaks stays open.
    last = min(number for *_, number in later[-20:])
    counts = {
        "steps": steps,
        "samples": len(samples),
        f"rss at step {since}": first,
        f"largest growth of rss after step {since}": growth,
        f"rss at the end over that at step {since}": later[-1][1] / first - 1,
        f"own memory at step {since}": first_own,
        f"largest growth of own memory after step {since}": own_growth,
        "open files": dict(sorted(files.items())),
    }
    text = f"{steps:,} steps: resident memory at most {100 * growth:+.2f} % on that at step "
    text += f"{since} ({first / 2**20:.0f} MiB), its own part {100 * own_growth:+.2f} % "
    text += f"({first_own / 2**20:.0f} MiB), {usual} open files, {last} at the end"
    holds = growth <= 0.02 and own_growth <= 0.02 and last == min(files)
    return Seen(holds, text, counts)


# ---------------------------------------------------------------------- what tests show


MEASURED = (
    *("seconds a megabyte", "MB of memory", "seconds from signal to end"),
    "relative difference of gradients",
)


def tested(*names: str) -> Callable[[Path, float], Seen]:
    """An entry that is a list of tests, those of the long tier included: they assert its figure."""

    def measure(work: Path, scale: float) -> Seen:
        report = work / "tests.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir"]
        command += [str(ROOT), "-m", "" if scale >= 1 else "not long", f"--junitxml={report}"]
        process = fresh([*command, *(str(ROOT / "tests" / name) for name in names)], work / "log")
        code = process.wait(60 * LIMIT)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
        tags = ([part.tag for part in case if part.tag != "properties"] for case in cases)
        results = Counter(next(iter(tag), "passed") for tag in tags)
        counts = Counter(case.attrib["name"].partition("[")[0] for case in cases)
        found: dict[str, Any] = {**results, "tests": dict(counts)}
        inputs = Counter[str]()  # what tests tell of themselves
        measured: dict[str, dict[str, float]] = {what: {} for what in MEASURED}
        counted: dict[str, str] = {}
        for case in cases:
            kind = case.attrib["name"].partition("[")[2].rstrip("]")
            for told in case.iter("property"):
                if told.attrib["name"] == "counted":
                    counted[case.attrib["name"]] = told.attrib["value"]
                elif told.attrib["name"] == "inputs":
                    inputs[kind.partition("-")[0]] += int(told.attrib["value"])
                elif told.attrib["name"] in measured:
                    which = kind or case.attrib["name"]
                    measured[told.attrib["name"]][which] = float(told.attrib["value"])
        if code:
            found["told"] = (work / "log").read_text(errors="replace")[-2000:]
        text = f"{results['passed']} of {len(cases)} tests passed"
        if counted:
            found["counted"] = counted
            text += ": " + ", ".join(counted.values())
        for what, each in measured.items():
            if each:
                found[what] = each
                text += f", at most {max(each.values()):.4g} {what}"
        if inputs:
            found["inputs"] = dict(inputs)
            text += f", {inputs.total():,} inputs of {len(inputs)} kinds"
        return Seen(code == 0 and results["passed"] == len(cases) > 0, text, found)

    return measure


TESTED = {
    "R2": Entry(
        "kill -9 at every fault point of a save",
        "12 of 12 leave a verified checkpoint",
        tested(
            "test_checkpoint.py::test_there_are_fault_points_all_over_a_save",
            "test_checkpoint.py::test_a_crash_at_any_point_leaves_a_good_checkpoint",
        ),
    ),
    "R4": Entry(
        "one of two processes is frozen or fails",
        "10 of 10 of each named, the other gone within the time-out of 20 s + 10 s",
        tested(
            "test_distributed.py::test_a_process_that_is_lost_is_named_and_the_other_one_leaves",
            "test_distributed.py::test_ten_of_ten_lost_processes_are_named",
        ),
    ),
    "R5": Entry(
        "SIGTERM, SIGINT, SIGUSR1 at any moment of pretrain, prepare and finetune",
        "50 of 50 stops with exit code 75 and no step lost, a second signal quits at once",
        tested(
            "test_kill.py::test_a_signal_at_any_moment_costs_no_step",
            "test_kill.py::test_a_signal_to_prepare_at_any_moment_costs_no_full_shard",
            "test_kill.py::test_a_signal_while_torch_is_imported_ends_at_once",
            "test_kill.py::test_a_signal_during_the_first_compilation_ends_at_once_and_damages_nothing",
            "test_kill.py::test_a_second_signal_quits_at_once_without_damage",
            "test_finetune.py::test_stops_at_many_places_change_nothing",
            "test_finetune.py::test_a_late_signal_loses_no_step",
        ),
    ),
    "R8": Entry(
        "the disk is full or refuses",
        "50 of 50 checkpoints before it intact; commands end with code 2, or wait for room",
        tested(
            "test_safety.py::test_the_checkpoint_before_survives_fifty_saves_without_room",
            "test_safety.py::test_full_disks_cost_no_checkpoint",
            "test_safety.py::test_a_full_disk_ends_the_run_and_room_lets_it_go_on",
            "test_safety.py::test_a_run_can_wait_until_there_is_room",
            "test_safety.py::test_a_disk_without_room_for_two_checkpoints_is_refused_at_the_start",
            "test_safety.py::test_a_command_without_room_says_so_and_does_it_all_when_given_again",
        ),
    ),
    "R9": Entry(
        "an output that cannot be written to",
        "exit code 2 before data is read or torch imported",
        tested(
            "test_safety.py::test_a_place_that_cannot_be_written_is_refused_before_anything_is_read",
            "test_safety.py::test_refusing_a_place_takes_no_heavy_import",
        ),
    ),
    "R11": Entry(
        "hostile inputs, a line of 1 GB, 1,000,000 tiny files",
        "each has the outcome of docs/errors.md, at most 500 MB for the line",
        tested(
            "test_errors.py::test_a_hostile_input_has_the_outcome_of_the_page",
            "test_errors.py::test_a_single_huge_line_takes_little_memory",
            "test_errors.py::test_very_many_tiny_files",
        ),
    ),
    "R12": Entry(
        "losses and gradients that are not finite, on one of two processes too",
        "50 of 50 leave weights and moments untouched; too many in a row end with exit code 4",
        tested(
            "test_pretrain.py::test_fifty_broken_losses_and_gradients_never_reach_the_weights",
            "test_pretrain.py::test_too_many_bad_steps_in_a_row_end_the_run_with_good_weights",
            "test_distributed.py::test_not_a_number_in_one_process_stops_the_step_in_all",
        ),
    ),
    "R13": Entry(
        "a gradient a hundred times too large",
        "left out and counted, off by default",
        tested(
            "test_pretrain.py::test_a_spike_is_left_out_and_its_rule_survives_a_resume",
            "test_pretrain.py::test_a_spike_in_a_compiled_step_is_left_out",
        ),
    ),
    "R19": Entry(
        "another tokenizer, vocabulary or special tokens at resume, export and fine-tuning",
        "10 of 10 refused by hash, both named",
        tested("test_safety.py::test_another_tokenizer_is_refused_and_both_are_named"),
    ),
    "R20": Entry(
        "changed settings on resume",
        "listed; another experiment is refused without --force, another model always",
        tested(
            "test_pretrain.py::test_changed_settings_are_refused_and_listed",
            "test_pretrain.py::test_what_does_not_make_another_experiment_may_change",
            "test_pretrain.py::test_what_changed_is_in_the_log_and_in_the_record",
            "test_pretrain.py::test_force_continues_another_experiment_and_says_so",
            "test_pretrain.py::test_force_cannot_make_another_model_of_it",
        ),
    ),
    "R22": Entry(
        "two processes against one, moments whole or in shares, in each row of each ablation",
        "gradients of the first step within 1e-6, none of them missing",
        tested(
            "test_distributed.py::test_the_gradients_of_the_first_step_are_those_of_one_process",
            "test_distributed.py::test_two_processes_have_the_gradients_of_one_in_each_ablation",
        ),
    ),
    "R28": Entry(
        "checkpoints deleted under a run, a clock set back, a network's file system that fails",
        "the run goes on to the same end, or ends with a reason and loses no checkpoint",
        tested(
            "test_safety.py::test_checkpoints_that_someone_deletes_do_not_end_the_run",
            "test_safety.py::test_a_checkpoint_deleted_while_it_is_pruned_is_no_error",
            "test_safety.py::test_a_clock_that_is_set_back_changes_nothing",
            "test_safety.py::test_a_file_system_of_the_network_that_fails_at_any_call_costs_no_checkpoint",
        ),
    ),
    "S12": Entry(
        "nine kinds of endless text in tokenizer, line encoder, SQuAD windows and scores",
        "time grows with the length; at most 1 s of an idle core a megabyte",
        tested("test_security.py::test_the_time_of_endless_text_grows_with_its_length"),
    ),
    "Fuzz": Entry(
        "files and command lines that hypothesis makes",
        "at least 100,000 inputs; each has a value or an error that explains",
        tested("test_fuzz.py"),
    ),
}

# ---------------------------------------------------------------------- all of them

ENTRIES = {
    "R1": Entry(
        "kill -9 at random moments, a quarter inside a save",
        "200 kills: weights and every logged loss equal, 0 repairs, 0 left over",
        r1,
    ),
    "Trainer": Entry(
        "the same on the Trainer of transformers, for comparison",
        "none: shown beside R1",
        trainer,
    ),
    "R3": Entry(
        "kill -9 of either of two processes under torchrun",
        "20 kills: bit-equal, back to training within 30 s",
        r3,
    ),
    "R6": Entry(
        "1, 2, 1, 4 processes, changed at random steps",
        "samples, masks and draws 100 % equal, losses within 1e-3 over 200 steps",
        r6,
    ),
    "R7": Entry(
        "the newest checkpoint is damaged",
        "300 of 300 noticed, the one before taken, the damaged one kept",
        r7,
    ),
    "R10": Entry(
        "shards flipped, cut or swapped, wrong index",
        "100 of 100 flipped bits and everything else found",
        r10,
    ),
    "R14": Entry(
        "a worker of prepare is killed",
        "20 kills: noticed within 10 s, exit 75, then the same hashes",
        r14,
    ),
    "R15": Entry(
        "what a kill leaves: shared memory, ports, locks, processes",
        "50 of 50 restarts, nothing left that stops them",
        r15,
    ),
    "R16": Entry(
        "a second run on the same directory",
        "refused within 1 s, the first unharmed",
        r16,
    ),
    "R17": Entry(
        "1, 2, 4, 8 workers, files in any order; prepare and finetune killed",
        "identical hashes; 20 kills of prepare and 10 of finetune change nothing",
        r17,
    ),
    "R18": Entry(
        "tokenizer training in separate processes",
        "10 of 10 identical files",
        r18,
    ),
    "R24": Entry(
        "10,000 steps in one process",
        "resident memory at most 2 % up after step 500, open files constant",
        r24,
    ),
    **TESTED,
}


def why_not(name: str) -> str:
    """What an entry needs and does not find here, or nothing."""
    if name == "Trainer" and importlib.util.find_spec("accelerate") is None:
        return "needs the package accelerate, which the Trainer of transformers imports"
    return ""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    out: Path
    """Gets reliability.json."""
    only: tuple[str, ...] = ()
    """Run only these entries."""
    scale: float = 1.0
    """Share of the repetitions of each entry."""


def main() -> None:
    a = tyro.cli(Arguments)
    if unknown := set(a.only) - set(ENTRIES):
        raise SystemExit(f"no entry {sorted(unknown)}; known: {', '.join(ENTRIES)}")
    a.out.mkdir(parents=True, exist_ok=True)
    path = a.out / "reliability.json"
    record: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {"entries": {}}
    anywhere: Any = SimpleNamespace(path="CORPUS")
    record["run"] = " ".join(["electra", *test_kill.command(anywhere, Path("RUN"), 0)[3:]])
    for name in a.only or ENTRIES:
        entry = ENTRIES[name]
        if missing := why_not(name):
            print(f"{name}: left out, {missing}", flush=True)
            continue
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
            try:
                seen = entry.run(Path(folder), a.scale)
            except Exception as error:  # the others still run, and the record says what happened
                seen = Seen(False, f"{type(error).__name__}: {error}"[-2000:], {})
        record["entries"][name] = {
            "what": entry.what,
            "figure": entry.figure,
            **asdict(seen),
            "scale": a.scale,
            "seconds": round(time.monotonic() - begin, 1),
            "load_average": os.getloadavg(),
            "environment": environment(),
        }
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{name}: {seen.text} ({time.monotonic() - begin:.0f} s)", flush=True)
    rows = [("test", "figure to meet", "seen")]
    for name in (n for n in ENTRIES if n in record["entries"]):
        e = record["entries"][name]
        mark = "" if e["figure"].startswith("none") else ("met: " if e["holds"] else "NOT MET: ")
        rows.append((f"{name} {e['what']}", e["figure"], mark + e["text"]))
    print("\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ("---",) * 3, *rows[1:]]))
    wanted = [n for n in a.only or ENTRIES if n in record["entries"]]
    raise SystemExit(not all(record["entries"][n]["holds"] for n in wanted))


def environment() -> dict[str, Any]:
    """Versions, hardware and the code that ran."""
    versions: dict[str, str] = {}
    for package in ("torch", "numpy", "safetensors", "tokenizers", "transformers", "accelerate"):
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "cpu": runtime.cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "python": platform.python_version(),
        **versions,
        **runtime.source(),
    }


if __name__ == "__main__":
    main()
