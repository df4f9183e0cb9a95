"""Ours beside transformers, sentence-transformers and litgpt: weight, first step, mistakes.

    python benchmarks/comparison.py --environments DIR --out results/comparison

Each program gets an environment of its own under DIR, made with pip where it is not there yet; it
sees torch of DIR/base, and its weight is what pip put beside torch. Then, from the same 30 texts:
how long until the first training step is done, and what is said about a misspelt option, a file
that is not UTF-8 and a table with a label missing. Lines are those of the scripts in
benchmarks/peers, without blank ones and comments. --only chooses what is measured again.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from electra import runtime
from electra.demo_text import find_text

ROOT = Path(__file__).parents[1]
PEERS = Path(__file__).parent / "peers"
PACKAGES = {
    "electra": [str(ROOT)],
    "transformers": ["transformers[torch]", "datasets", "evaluate", "scikit-learn"],
    "sentence-transformers": ["sentence-transformers[train]"],
    "litgpt": ["litgpt", "litdata"],
}
PRETRAIN = {
    "electra": "electra pretrain tiny --input texts --out run --run.log-every 1",
    "transformers": f"python {PEERS}/pretrain_transformers.py",
    "litgpt": "litgpt pretrain pythia-14m --tokenizer_dir tokens --data TextFiles "
    "--data.train_data_path texts --data.num_workers 1 --train.global_batch_size 16 "
    "--train.micro_batch_size 16 --train.max_seq_length 64 --train.log_interval 1 "
    "--train.max_tokens 1000000 --train.lr_warmup_steps 10 --precision 32-true --devices 1 "
    "--logger_name csv --out_dir out",
}
LIMIT = 400.0  # seconds for a first step
FIRST_STEP = {"transformers": r"'loss'", "litgpt": r"step 1 \|"}  # ours is seen in metrics.jsonl
TUNE = {
    "electra": "electra finetune --model model --data reviews.csv --text text --label stars "
    "--out tuned",
    "transformers": f"python {PEERS}/classify_transformers.py",
    "sentence-transformers": f"python {PEERS}/classify_sentence_transformers.py",
}
_ARGUMENTS = (
    "from transformers import HfArgumentParser, TrainingArguments as T;"
    "print(HfArgumentParser(T).parse_args_into_dataclasses()[0].learning_rate)"
)
_CONFIG = "from transformers import ElectraConfig as C; print(C(hiden_size=64).hidden_size)"
_SENTENCE = (
    "from sentence_transformers import SentenceTransformerTrainingArguments as T;"
    "T('out', learnin_rate=1e-4)"
)
TYPO = {
    "electra": "electra pretrain tiny --input texts --out run --optim.learnin-rate 1e-4",
    "transformers": f'python -c "{_ARGUMENTS}" --output_dir out --learnin_rate 1e-4',
    "transformers, size of the model": f'python -c "{_CONFIG}"',
    "sentence-transformers": f'python -c "{_SENTENCE}"',
    "litgpt": PRETRAIN["litgpt"].replace("--train.max_tokens", "--train.max_tokns"),
}

Part = Literal["weight", "lines", "first step", "typo", "bad text", "bad table", "google"]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    environments: Path
    """Gets a virtual environment per program; those that are there are used as they are."""
    out: Path
    """Gets comparison.json; entries that are not measured now stay."""
    rounds: int = 3
    """Of the first step, interleaved."""
    only: tuple[Part, ...] = (
        "weight", "lines", "first step", "typo", "bad text", "bad table", "google"
    )  # fmt: skip


def main() -> None:
    a = tyro.cli(Arguments)
    pythons = {name: make_environment(a.environments.absolute(), name) for name in PACKAGES}
    path = a.out / "comparison.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    a.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        seed = Path(folder) / "seed"
        make_seed(seed)
        for part in a.only:
            print(part, file=sys.stderr, flush=True)
            value = measure(part, pythons, seed, a)
            record[part] = {**value, "load_average": os.getloadavg(), "cpu": runtime.cpu_name()}
            path.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def measure(part: Part, pythons: dict[str, Path], seed: Path, a: Arguments) -> dict[str, Any]:
    match part:
        case "weight":
            return {name: weight(python) for name, python in pythons.items()}
        case "lines":
            return {path.name: count_lines(path) for path in sorted(PEERS.glob("*.py"))}
        case "first step":
            seconds: dict[str, list[Any]] = {name: [] for name in PRETRAIN}
            for _ in range(a.rounds):
                for name, line in PRETRAIN.items():
                    seconds[name].append(first_step(name, pythons[name], line, seed))
            walls = {n: [s["seconds"] for s in rounds] for n, rounds in seconds.items()}
            cpus = {n: [s["cpu_seconds"] for s in rounds] for n, rounds in seconds.items()}
            return {
                "what": "from the start of the program to the end of the first optimizer step, "
                "with tokenizer and data preparation; litgpt is given a tokenizer",
                "commands": tidy(PRETRAIN),
                "seconds": walls,
                "cpu_seconds": cpus,
                "median_seconds": {n: statistics.median(w) for n, w in walls.items()},
                "median_cpu_seconds": {n: statistics.median(w) for n, w in cpus.items()},
            }
        case "typo":
            found = {n: outcome(pythons[n.split(",")[0]], line, seed) for n, line in TYPO.items()}
            return {"commands": tidy(TYPO), **found}
        case "bad text":
            return {
                "what": "the second of three lines of texts/b.txt has a byte of Latin-1",
                "commands": tidy(PRETRAIN),
                **{n: outcome(pythons[n], c, seed, spoil_text) for n, c in PRETRAIN.items()},
            }
        case "bad table":
            return {
                "what": "line 8 of reviews.csv has no label",
                "commands": tidy(TUNE),
                "right table": {n: outcome(pythons[n], c, seed)["exit"] for n, c in TUNE.items()},
                **{n: outcome(pythons[n], c, seed, spoil_table) for n, c in TUNE.items()},
            }
        case "google":
            pip = [str(pythons["electra"]), "-m", "pip", "download", "--no-deps", "--dest"]
            with tempfile.TemporaryDirectory() as folder:
                line = [*pip, folder, "tensorflow==1.15"]
                done = subprocess.run(line, capture_output=True, text=True)
            told = [s for s in done.stderr.splitlines() if "matching" in s]
            return {"exit": done.returncode, "said": told, "python": sys.version.split()[0]}


def make_environment(folder: Path, name: str) -> Path:
    """The Python of a program's environment; torch lies in one that all of them see."""
    base, place = folder / "base", folder / name
    packages = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    if not base.exists():
        venv.create(base, with_pip=True)
        subprocess.run([base / "bin/python", *pip, "torch==2.13.0"], check=True)
    python = place / "bin/python"
    if not place.exists():
        venv.create(place)
        (place / packages / "base.pth").write_text(str(base / packages))
        subprocess.run([python, *pip, *PACKAGES[name], "torch==2.13.0"], check=True)
    return python


def weight(python: Path) -> dict[str, Any]:
    """Distributions beside torch, and what their files weigh without byte-code."""
    code = (
        "import importlib.metadata as m, json, sysconfig\n"
        "found = list(m.distributions(path=[sysconfig.get_path('purelib')]))\n"
        "files = {f.locate().resolve() for d in found for f in d.files or ()}\n"
        "size = sum(f.stat().st_size for f in files if f.exists() and f.suffix != '.pyc')\n"
        "names = {d.name: d.version for d in found}\n"
        "print(json.dumps({'distributions': len(names), 'mb': size / 1e6, 'versions': names}))\n"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def count_lines(path: Path) -> int:
    lines = (line.strip() for line in path.read_text().splitlines())
    return sum(bool(line) and not line.startswith("#") for line in lines)


def make_seed(here: Path) -> None:
    """Thirty texts, a table with labels, and a tiny model that has seen nothing."""
    (here / "texts").mkdir(parents=True)
    paragraphs: list[str] = []
    for number, document in enumerate(find_text().documents[:30]):
        (here / "texts" / f"{number}.txt").write_text("\n".join(document.paragraphs))
        paragraphs += [p[:300].replace('"', "") for p in document.paragraphs]
    rows = [f'"{p}",{1 + i % 5}' for i, p in enumerate(paragraphs[:400])]
    (here / "reviews.csv").write_text("\n".join(["text,stars", *rows]) + "\n")
    electra = [sys.executable, "-m", "electra"]
    train = [*electra, "pretrain", "tiny", "--input", "texts", "--out", "run"]
    few = ["--run.train-steps", "2", "--quiet"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for line in ([*train, *few], [*electra, "export", "run", "--out", "model"]):
        subprocess.run(line, cwd=here, check=True, capture_output=True, env=environment)
    shutil.rmtree(here / "run")
    # litgpt trains decoders: its tokenizer needs tokens for the beginning and the end.
    (here / "tokens").mkdir()
    shutil.copy(here / "model" / "discriminator" / "tokenizer.json", here / "tokens")
    marks = {"tokenizer_class": "Any", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    (here / "tokens" / "tokenizer_config.json").write_text(json.dumps(marks))


def spoil_text(here: Path) -> None:
    (here / "texts" / "b.txt").write_bytes(b"A first line.\nA caf\xe9 in Paris.\nA third line.\n")


def spoil_table(here: Path) -> None:
    lines = (here / "reviews.csv").read_text().splitlines()
    lines[7] = lines[7].rpartition(",")[0] + ","
    (here / "reviews.csv").write_text("\n".join(lines) + "\n")


def start(python: Path, line: str, here: Path) -> subprocess.Popen[str]:
    """A command line in its environment, offline, in a process group of its own."""
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    environment |= {"HF_HOME": str(here / "cache")}
    return subprocess.Popen(
        ["bash", "-c", f"exec {line}"], cwd=here, env=environment, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def first_step(name: str, python: Path, line: str, seed: Path) -> dict[str, float]:
    """Seconds by the clock and of processor time; infinite if it takes longer than LIMIT."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / "here"
        shutil.copytree(seed, here)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begin = time.perf_counter()
        process = start(python, line, here)
        late = threading.Timer(LIMIT, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        said, log = "", here / "run" / "metrics.jsonl"
        if name == "electra":
            while process.poll() is None and not (log.exists() and '"train"' in log.read_text()):
                time.sleep(0.02)
            done = process.poll() is None
        else:
            assert process.stdout is not None
            done = any(re.search(FIRST_STEP[name], said := said + text) for text in process.stdout)
        seconds = time.perf_counter() - begin
        late.cancel()
        if done:
            os.killpg(process.pid, signal.SIGKILL)
        said += process.communicate()[0]
        if not done and seconds < LIMIT:
            raise RuntimeError(f"{name}: it ended without a step\n{said}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds = round(seconds, 2) if done else float("inf")
    return {"seconds": seconds, "cpu_seconds": round(cpu, 2)}


def outcome(python: Path, line: str, seed: Path, spoil: Any = None) -> dict[str, Any]:
    """How a command ends that should not succeed, and what it says."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / "here"
        shutil.copytree(seed, here)
        if spoil is not None:
            spoil(here)
        process = start(python, line, here)
        try:
            said = process.communicate(timeout=300)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said = process.communicate()[0] + "\n(still running after 300 s, ended)"
        for place in (here, python.parents[2], ROOT):
            said = said.replace(f"{place}/", "")
        lines = [text.strip() for text in said.splitlines() if text.strip()]
    return {
        "exit": process.returncode,
        "lines": len(lines),
        "traceback": "Traceback" in said,
        "names the file": "b.txt" in said if spoil is spoil_text else None,
        "end": [text[:200] for text in lines[-6:]],
    }


def tidy(commands: dict[str, str]) -> dict[str, str]:
    return {name: line.replace(f"{ROOT}/", "") for name, line in commands.items()}


if __name__ == "__main__":
    main()
