"""Whether a tracker holds every number of a run that was killed and continued.

    python benchmarks/trackers.py --out results/compat

For each tracker whose package is installed: a run of 120 micro steps in a process without a network
(where the system allows that), killed (SIGKILL) after 40 steps and continued by the same command.
Every number of metrics.jsonl is then looked for in what the tracker stored: it is missing, it has
another value, or it is there. Steps of which the kill took the checkpoint are trained and written
twice; one of the two has to agree. Then tests/test_trackers.py, which skips what is not installed.
Goes out: trackers.json.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import test_kill
import test_trackers
import tyro
from reliability import micro_corpus

from electra import runtime
from electra.runlog import read_metrics

STEPS, KILLED_AT = 120, 40
PACKAGES = {
    "tensorboard": ("tensorboard",),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow-skinny", "sqlalchemy", "alembic"),
}
Row = tuple[str, str, int, float]  # the run's name in the tracker, the number's, step, value


def in_tensorboard(run: Path) -> Iterator[Row]:
    for (name, step), value in test_trackers.in_tensorboard(run).items():
        yield "tensorboard", name, step, value


def in_trackio(run: Path) -> Iterator[Row]:
    with sqlite3.connect(run / "trackio" / "electra.db") as base:
        for identity, step, text in base.execute("select run_id, step, metrics from metrics"):
            for name, value in json.loads(text).items():
                if "/" in name:
                    yield identity, name, step, float(value)


def in_mlflow(run: Path) -> Iterator[Row]:
    with sqlite3.connect(run / "mlflow.db") as base:
        rows = base.execute("select run_uuid, key, step, value from metrics where not is_nan")
        yield from rows


def in_wandb(run: Path) -> Iterator[Row]:
    """Records of its logs, those of LevelDB: blocks of 32 KiB, in which a record may be cut."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted(run.glob("wandb/offline-run-*/run-*.wandb")):
        data, position, record = file.read_bytes(), 7, b""
        while position + 7 <= len(data):
            rest = (1 << 15) - position % (1 << 15)
            if rest < 7:  # no room for a header: the next record begins in the next block
                position += rest
                continue
            size = int.from_bytes(data[position + 4 : position + 6], "little")
            kind = data[position + 6]  # 1 whole, 2 begin, 3 middle, 4 end; 0 nothing written
            record += data[position + 7 : position + 7 + size]
            position += 7 + size
            if kind in (1, 4):
                items = wandb_internal_pb2.Record.FromString(record).history.item
                values = {i.key or "/".join(i.nested_key): i.value_json for i in items}
                for name in (n for n in values if not n.startswith("_")):
                    step = int(values["_step"])
                    yield file.stem, name, step, float(json.loads(values[name]))
                record = b""


READ = {
    "tensorboard": in_tensorboard,
    "trackio": in_trackio,
    "wandb": in_wandb,
    "mlflow": in_mlflow,
}


def killed_and_continued(kind: str, work: Path) -> dict[str, Any]:
    corpus, run = micro_corpus(work), work / "run"
    command = [*test_kill.command(corpus, run, STEPS), "--run.tracker", kind]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(test_kill.ROOT), "HOME": str(work)}
    warned = 0
    for is_killed in (True, False):
        with open(work / "log", "w") as log:
            process = subprocess.Popen(
                [*test_trackers.without_network(), *command],
                env={**environment, "OMP_NUM_THREADS": "1"},
                cwd=work,
                stdout=log,
                stderr=log,
            )
        if is_killed:
            test_kill.wait_for_lines(process, run, KILLED_AT)
            assert process.poll() is None, (work / "log").read_text()
            process.kill()
        assert process.wait(600) == (-9 if is_killed else 0), (work / "log").read_text()
        warned += (work / "log").read_text().count("gets no more lines")
    stored: dict[tuple[str, int], list[float]] = defaultdict(list)
    names: set[str] = set()
    for name, key, step, value in READ[kind](run):
        names.add(name)
        stored[key, step].append(value)
    numbers = {
        (f"{m['kind']}/{name}", m["step"]): float(value)
        for m in read_metrics(run)
        for name, value in m.items()
        if name not in ("kind", "step") and isinstance(value, int | float)
    }
    missing = [key for key in numbers if key not in stored]
    other = [
        key
        for key, value in numbers.items()
        if key in stored and all(abs(value - v) > 1e-6 * abs(value) for v in stored[key])
    ]
    return {
        "numbers": len(numbers),
        "missing": len(missing),
        "steps of those": sorted({step for _, step in missing}),
        "other values": len(other),
        "of those": sorted({name for name, _ in other}),
        "runs": len(names),
        "warnings": warned,
    }


@dataclass(frozen=True, kw_only=True)
class Arguments:
    out: Path
    """Gets trackers.json."""


def main() -> None:
    a = tyro.cli(Arguments)
    record: dict[str, Any] = {
        "what": f"a run of {STEPS} steps killed (SIGKILL) after {KILLED_AT} and continued: the "
        "numbers of metrics.jsonl, and what the tracker has of them",
        "command": "python benchmarks/trackers.py --out results/compat",
        "network": "none" if test_trackers.without_network() else "not closed off",
    }
    found: dict[str, Any] = {}
    versions = {"python": platform.python_version()}
    for kind, packages in PACKAGES.items():
        if importlib.util.find_spec(kind) is None:
            print(f"{kind} is not installed", file=sys.stderr)
            continue
        versions |= {package: metadata.version(package) for package in packages}
        with tempfile.TemporaryDirectory() as folder:
            found[kind] = killed_and_continued(kind, Path(folder))
        print(kind, found[kind], file=sys.stderr, flush=True)
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*tests, "tests/test_trackers.py"], cwd=test_kill.ROOT, capture_output=True, text=True
    )
    ends = re.findall(r"(\d+) (passed|failed|skipped)", done.stdout)
    record |= {"killed and continued": found, "tests": {what: int(n) for n, what in ends}}
    record |= {"versions": versions, **runtime.source()}
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / "trackers.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
