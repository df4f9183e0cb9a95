"""Seconds from the command `electra pretrain` to the end of its first training step.

    python benchmarks/start_speed.py --corpus CORPUS --out results/speed/start_h200.json

Every start is a new process with a new run. The first has an empty folder for all that is compiled,
the others find what it left there, as a user's second start does. That folder has Python's own
compiled modules too: an installation that cannot be written, as in many containers, keeps none, and
would compile torch's 2,400 files of Python at every start. The step is seen in the run's
`metrics.jsonl`, with a line for every step, so the time is that until a step is logged.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

LIMIT = 600.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Arguments:
    corpus: Path
    """Prepared text, of the recipe's length or shorter."""
    out: Path
    """The JSON record."""
    recipe: str = "small"
    settings: tuple[str, ...] = ("--encoder.dropout=0", "--encoder.attention-dropout=0")
    """More of `electra pretrain`'s own flags."""
    starts: int = 4
    """The first one included."""


def start(arguments: Arguments, cache: Path, run: Path) -> float:
    """Seconds of one start; the process is killed once its first step is logged."""
    # Triton's own folder is moved too: else kernels compiled for another program would be found.
    own = {"XDG_CACHE_HOME": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    own |= {"PYTHONPYCACHEPREFIX": str(cache / "python")}
    others = ("TORCHINDUCTOR_CACHE_DIR", "PYTHONDONTWRITEBYTECODE")
    environment = {k: v for k, v in os.environ.items() if k not in others} | own
    command = [
        *(sys.executable, "-m", "electra", "pretrain", arguments.recipe),
        *("--corpus", str(arguments.corpus), "--out", str(run), "--run.log-every", "1"),
        *("--run.tracker", "none", *arguments.settings),
    ]
    log, metrics, said = run.with_suffix(".log"), run / "metrics.jsonl", ""
    begin = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        while '"train"' not in said:
            if process.poll() is not None:
                raise RuntimeError(f"it ended without a step\n{log.read_text()}")
            if time.perf_counter() - begin > LIMIT:
                raise RuntimeError(f"no step within {LIMIT:g} s\n{log.read_text()}")
            time.sleep(0.01)
            said = metrics.read_text() if metrics.exists() else ""
        seconds = time.perf_counter() - begin
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return round(seconds, 2)


def measure(arguments: Arguments) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        rows = []
        for n in range(arguments.starts):
            rows.append(start(arguments, here / "cache", here / f"run-{n}"))
            print(f"start {n + 1}: {rows[-1]:.1f} s", flush=True)
        run = json.loads((here / "run-0" / "run.json").read_text())
    return {
        "what": "seconds from `electra pretrain` to its first logged step; the first start has "
        "an empty cache of compiled code",
        "command": f"python benchmarks/start_speed.py --recipe {arguments.recipe} --corpus CORPUS",
        "config": run["config"],
        "seconds": rows,
        "environment": run["environment"],
    }


def main(arguments: Arguments) -> None:
    record = measure(arguments)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    half = arguments.out.with_name(arguments.out.name + ".half")
    half.write_text(json.dumps(record, indent=1) + "\n")
    half.replace(arguments.out)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
