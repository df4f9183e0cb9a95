"""What a run survives on a GPU, and what that costs.

    python benchmarks/reliability_gpu.py --corpus CORPUS --out OUT

| entry         | figure                                                                          |
|---------------|---------------------------------------------------------------------------------|
| deterministic | 5 kills -9: weights and logged losses bit-equal to a run without; price in speed |
| default       | killed runs end as far apart from free ones as free ones do from each other:     |
|               | a permutation test of the difference of their means, p above 0.05                |
| memory        | a batch that does not fit is answered with a micro-batch that keeps it           |
| auto          | --data.micro-batch auto finds one that fits, compiled and as a graph, and leaves |
|               | the run that the same number by hand gives; another start takes it without tries |
| price         | saves cost at most 2 % of the time, and each holds up training less than a step, |
|               | on the clock of the GPU: the next step ends that much later than without a save  |
| check         | asking of every step whether it is finite costs at most 2 % of its time: steps   |
|               | with and without the question, interleaved                                       |

Runs are `electra pretrain` in processes of their own. The record is reliability_gpu.json. Without
a GPU the same entries run on the processor, `memory` and `auto` excepted.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro

from electra import runtime as runtimes
from electra.config import PretrainConfig, RunConfig, from_dict, to_dict
from electra.data.corpus import Corpus
from electra.recipes import recipe
from electra.runlog import read_metrics


@dataclass(frozen=True, kw_only=True)
class Arguments:
    corpus: Path
    out: Path
    recipe: str = "small"
    steps: int = 1000
    """Of each run."""
    price_steps: int = 4000
    """Of those that measure what saves cost."""
    batch: int = 128
    kills: int = 5
    free: int = 6
    """Runs without a kill in `default`, which tell the spread."""
    again: int = 3
    """Runs killed once in `default`."""
    only: tuple[str, ...] = ("deterministic", "default", "memory", "auto", "price", "check")


def main() -> None:
    a = tyro.cli(Arguments)
    a.out.mkdir(parents=True, exist_ok=True)
    entries = {
        "deterministic": deterministic,
        "default": default,
        "memory": memory,
        "auto": auto,
        "price": price,
        "check": check,
    }
    record: dict[str, Any] = {"environment": runtimes.start(RunConfig()).describe()}
    for name in a.only:
        begin = time.perf_counter()
        record[name] = entries[name](a)
        record[name]["seconds"] = time.perf_counter() - begin
        (a.out / "reliability_gpu.json").write_text(json.dumps(record, indent=1))
        print(name, json.dumps(record[name]), flush=True)


def command(a: Arguments, run: str, *more: str) -> list[str]:
    settings = ["--run.train-steps", a.steps, "--run.log-every", 50, "--run.eval-every", a.steps]
    settings += ["--run.save-every", a.steps // 10, "--data.batch-size", a.batch]
    settings += ["--encoder.init", "local", "--optim.warmup-percent", 10, *more]
    settings += ["--encoder.dropout", 0, "--encoder.attention-dropout", 0]
    program = [sys.executable, "-m", "electra", "pretrain", a.recipe]
    return [*program, "--corpus", str(a.corpus), "--out", str(a.out / run), *map(str, settings)]


def finish(a: Arguments, run: str, *more: str) -> None:
    with open(a.out / f"{run}.log", "a") as log:
        subprocess.run(command(a, run, *more), check=True, stdout=log, stderr=log)


def killed(a: Arguments, run: str, *more: str, seed: int = 0) -> int:
    """The same run, killed at random moments of its training; how often that was."""
    draw, kills = random.Random(seed), 0
    with open(a.out / f"{run}.log", "a") as log:
        while kills < a.kills:
            before = steps_done(a.out / run)
            child = subprocess.Popen(command(a, run, *more), stdout=log, stderr=log)
            # Once it trains again, and then some: between two lines, or inside a save.
            goal = before + draw.randint(1, max(1, a.steps // (a.kills + 1) - 1))
            while child.poll() is None and steps_done(a.out / run) < goal:
                time.sleep(0.005)
            if child.poll() is not None:  # it got to its end first
                break
            time.sleep(draw.uniform(0, 0.3))
            child.kill()
            child.wait()
            kills += 1
    finish(a, run, *more)
    return kills


def steps_done(run: Path) -> int:
    lines = read_metrics(run) if (run / "metrics.jsonl").exists() else []
    return max((line["step"] for line in lines if line["kind"] == "train"), default=0)


def outcome(a: Arguments, run: str) -> tuple[str, list[float]]:
    """SHA-256 of the last weights, and every logged loss."""
    newest = max((a.out / run / "checkpoints").glob("step-*"))
    weights = hashlib.sha256((newest / "model.safetensors").read_bytes()).hexdigest()
    lines = read_metrics(a.out / run)
    return weights, [line["loss"] for line in lines if line["kind"] == "train"]


def speed(a: Arguments, run: str) -> float:
    """Tokens per second between lines, the median."""
    lines = read_metrics(a.out / run)
    return statistics.median(x["tokens_per_second"] for x in lines if x["kind"] == "train")


def deterministic(a: Arguments) -> dict[str, Any]:
    finish(a, "det-whole", "--run.deterministic")
    finish(a, "default-1")
    kills = killed(a, "det-killed", "--run.deterministic")
    whole, again = outcome(a, "det-whole"), outcome(a, "det-killed")
    slow, fast = speed(a, "det-whole"), speed(a, "default-1")
    return {
        "kills": kills,
        "weights_equal": whole[0] == again[0],
        "losses_equal": sum(x == y for x, y in zip(whole[1], again[1], strict=True)),
        "losses": len(whole[1]),
        "tokens_per_second": slow,
        "tokens_per_second_default": fast,
        "price": 1 - slow / fast,
    }


def default(a: Arguments) -> dict[str, Any]:
    """All at once: their time is not looked at."""
    free = [f"default-{i}" for i in range(1, a.free + 1)]
    again = [f"default-killed-{i}" for i in range(1, a.again + 1)]
    one = replace(a, kills=1)
    with ThreadPoolExecutor(a.free + a.again) as pool:
        kills = [pool.submit(killed, one, run, seed=i) for i, run in enumerate(again)]
        list(pool.map(lambda run: finish(a, run), free))
    ends = {run: outcome(a, run)[1][-1] for run in (*free, *again)}
    whole, rest = [ends[run] for run in free], [ends[run] for run in again]
    return {
        "kills": [done.result() for done in kills],
        "final_losses": whole,
        "final_losses_killed": rest,
        "mean": statistics.mean(whole),
        "standard_deviation": statistics.stdev(whole),
        "mean_killed": statistics.mean(rest),
        "p": (p := permutation_test(whole, rest)),
        "within": p > 0.05,
        "bit_equal": len({outcome(a, run)[0] for run in (*free, *again)}) == 1,
    }


def permutation_test(a: list[float], b: list[float]) -> float:
    """Share of all ways to deal the values that put the means at least as far apart."""
    values, n = a + b, len(a)
    whole = sum(values)

    def apart(part: float) -> float:
        return abs(part / n - (whole - part) / len(b))

    seen = apart(sum(a)) * (1 - 1e-9)  # the order of a sum must not decide
    ways = [apart(sum(part)) >= seen for part in itertools.combinations(values, n)]
    return sum(ways) / len(ways)


def memory(a: Arguments) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"skipped": "no GPU"}
    batch = 1 << 17
    argv = command(a, "too-large", "--data.batch-size", str(batch), "--run.compile", "no")
    done = subprocess.run(argv, capture_output=True, text=True)
    found = re.search(r"--data\.micro-batch (\d+)", done.stderr)
    return {
        "batch": batch,
        "exit": done.returncode,
        "traceback": "Traceback" in done.stderr,
        "proposed": int(found[1]) if found else None,
        "message": done.stderr[-400:],
    }


def auto(a: Arguments) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"skipped": "no GPU"}
    batch, settings = 1 << 14, ("--run.deterministic", "--run.log-every", "1")
    settings += ("--run.eval-every", "2", "--run.save-every", "2")

    def train(run: str, size: str, steps: int) -> float:
        begin = time.perf_counter()
        rest = ("--data.batch-size", str(batch), "--run.train-steps", str(steps), *settings)
        finish(a, run, *rest, "--data.micro-batch", size)
        return time.perf_counter() - begin

    searched = train("auto", "auto", 4)
    found = json.loads((a.out / "auto" / "run.json").read_bytes())["micro_batch"]["joint"]
    by_hand = train("auto-by-hand", str(found), 4)
    whole, again = outcome(a, "auto"), outcome(a, "auto-by-hand")
    train("auto", "auto", 6)
    tried = re.findall(r"([\d,]+) sequences at once do not fit", (a.out / "auto.log").read_text())
    return {
        "batch": batch,
        "did_not_fit": tried,  # of both starts: the second has none
        "found": found,
        "weights_equal": whole[0] == again[0],
        "losses_equal": whole[1] == again[1],
        "search_seconds": searched - by_hand,
    }


def without_dropout(a: Arguments) -> dict[str, Any]:
    settings = to_dict(recipe(a.recipe))
    settings["encoder"] |= {"init": "local", "dropout": 0.0, "attention_dropout": 0.0}
    settings["optim"]["warmup_percent"] = 10.0
    settings["data"]["batch_size"] = a.batch
    return settings


def price(a: Arguments) -> dict[str, Any]:
    """The same steps with and without saves, and how much later the steps after a save end."""
    from electra import checkpoint, pretrain

    held: list[float] = []
    ends: list[Any] = []
    save, step = checkpoint.Saver.save, pretrain.Trainer.step
    on_gpu = torch.cuda.is_available()

    def timed_save(self: Any, *args: Any) -> None:
        begin = time.perf_counter()
        save(self, *args)
        held.append(time.perf_counter() - begin)

    def timed_step(self: Any) -> None:
        step(self)
        ends.append(torch.cuda.Event(enable_timing=True) if on_gpu else time.perf_counter())
        if on_gpu:
            ends[-1].record()

    checkpoint.Saver.save = timed_save  # type: ignore[method-assign]
    pretrain.Trainer.step = timed_step  # type: ignore[method-assign]
    corpus, settings = Corpus.open(a.corpus), without_dropout(a)
    settings["run"] |= {"train_steps": a.price_steps, "eval_every": a.price_steps}
    every = settings["run"]["save_every"]  # as users have it: each save ends before the next
    took: dict[str, list[float]] = {}  # seconds of each step but the first
    for run, gap in (("unsaved", a.price_steps), ("saved", every)):
        settings["run"]["save_every"] = gap
        config = from_dict(PretrainConfig, settings, where=run)
        shutil.rmtree(a.out / f"price-{run}-here", ignore_errors=True)
        held.clear()
        ends.clear()
        pretrain.pretrain(config, corpus, a.out / f"price-{run}-here", quiet=True)
        took[run] = [
            x.elapsed_time(y) / 1000 if on_gpu else y - x for x, y in itertools.pairwise(ends)
        ]
    checkpoint.Saver.save, pretrain.Trainer.step = save, step
    median = statistics.median(took["unsaved"])
    # Both runs write a line at the same steps; what is left is the save. took[s - 1] is step s + 1.
    later = [y - x for x, y in zip(took["unsaved"], took["saved"], strict=True)]
    saves = range(every, a.price_steps, every)
    return {
        "steps": a.price_steps,
        "save_every": every,
        "saves": len(saves),
        "cost": sum(took["saved"]) / sum(took["unsaved"]) - 1,
        "step_seconds": median,
        "next_step_later_in_steps": [later[s - 1] / median for s in saves],
        "next_50_steps_later_in_steps": [sum(later[s - 1 : s + 49]) / median for s in saves],
        "call_in_steps": [h / median for h in held[:-1]],
    }


def check(a: Arguments, rounds: int = 7) -> dict[str, Any]:
    """What else is asked of the norm, the clip, is asked in both ways."""
    from electra.batches import Batches
    from electra.objectives import SpecialIds, build_objective
    from electra.optim import Adam
    from electra.trainer import Trainer

    def unasked(self: Any, found: torch.Tensor, lr: Any, step: Any) -> tuple[Any, ...]:
        norm = found if found.dim() == 0 else found.sum().sqrt()
        divisor = norm.clamp(min=self.config.max_grad_norm) / self.config.max_grad_norm
        return norm, divisor, torch.zeros_like(norm), (step + 1).float(), lr * self._factors

    corpus, here = Corpus.open(a.corpus), runtimes.start(RunConfig())
    settings = without_dropout(a)
    settings["data"]["sequence_length"] = corpus.sequence_length
    settings["encoder"]["max_positions"] = max(512, corpus.sequence_length)
    config = from_dict(PretrainConfig, settings, where="check")
    on_gpu, judge = here.device.type == "cuda", Adam.judge_norm
    trainers: dict[str, Trainer] = {}
    for name, way in (("asked", judge), ("not asked", unasked)):
        Adam.judge_norm = way  # type: ignore[method-assign]
        special, batches = SpecialIds(**corpus.special_ids), Batches(corpus.train, config, here)
        objective = build_objective(config, corpus.vocab_size, special, padded=batches.padded)
        trainers[name] = Trainer(objective.to(here.device), batches, config, here)
        trainers[name].record()
    Adam.judge_norm = judge  # type: ignore[method-assign]
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(rounds + 1):  # the first one warms up
        for name, trainer in trainers.items():
            begin, steps = time.perf_counter(), 4 * trainer.block_steps
            for _ in range(steps):
                if trainer.needs_block:
                    trainer.load_block(int(trainer.counter), [1e-4] * trainer.block_steps)
                trainer.step()
            if on_gpu:
                torch.cuda.synchronize()
            if number:
                seconds[name].append((time.perf_counter() - begin) / steps)
    pairs = zip(seconds["asked"], seconds["not asked"], strict=True)
    return {
        "seconds_of_a_step": {name: statistics.median(all_) for name, all_ in seconds.items()},
        "cost_median": statistics.median(x / y - 1 for x, y in pairs),
        "rounds": seconds,
    }


if __name__ == "__main__":
    main()
