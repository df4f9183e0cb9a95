"""Ours beside transformers, sentence-transformers, litgpt and Google's: weight, mistakes, kills.

    python benchmarks/comparison.py --environments DIR --out results/comparison
    python benchmarks/comparison.py --environments DIR --out DIR --google CLONE --old-python PYTHON

Each program gets an environment of its own under DIR, made with pip where it is not there yet; it
sees torch of DIR/base, and its weight is what pip put beside torch. Then, from the same 30 texts:
how long until the first training step is done, and what is said about a misspelt option, a file
that is not UTF-8 and a table with a label missing, and how often somebody has to help when the
training is killed again and again. Lines are those of the scripts in benchmarks/peers, without
blank ones and comments. --only chooses what is measured again, --programs of whom.

Google's repository wants TensorFlow 1.15, which no Python after 3.7 has: it is measured where
--google names a clone of it and --old-python such a Python.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
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
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from electra import runtime
from electra.formats import tf_checkpoint
from electra.use.demo_text import find_text

ROOT = Path(__file__).parents[1]
PEERS = Path(__file__).parent / "peers"
PACKAGES = {
    "electra": [str(ROOT)],
    "transformers": ["transformers[torch]", "datasets", "evaluate", "scikit-learn"],
    "sentence-transformers": ["sentence-transformers[train]"],
    "litgpt": ["litgpt", "litdata"],
    # What its README asks for; pip then takes a protobuf with which TensorFlow 1.15 cannot start.
    "google as its README says": ["tensorflow==1.15", "numpy", "scikit-learn", "scipy"],
    "google": ["tensorflow==1.15", "numpy", "scikit-learn", "scipy", "protobuf<3.21"],
}
_BUILD = (
    "python $GOOGLE/build_pretraining_dataset.py --corpus-dir texts --vocab-file vocab.txt "
    "--output-dir pretrain_tfrecords --max-seq-length 64"
)
_SIZE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
_HPARAMS: dict[str, Any] = {
    "model_hparam_overrides": {**_SIZE, "max_position_embeddings": 128},
    "max_seq_length": 64,
    "train_batch_size": 16,
    "learning_rate": 6e-4,
}


def _google(name: str = "model", **more: Any) -> str:
    hparams = json.dumps({**_HPARAMS, **more})
    return (
        f"python $GOOGLE/run_pretraining.py --data-dir . --model-name {name} --hparams '{hparams}'"
    )


PRETRAIN = {
    "electra": "electra pretrain tiny --input texts --out run --run.log-every 1",
    "transformers": f"python {PEERS}/pretrain_transformers.py",
    "litgpt": "litgpt pretrain pythia-14m --tokenizer_dir tokens --data TextFiles "
    "--data.train_data_path texts --data.num_workers 1 --train.global_batch_size 16 "
    "--train.micro_batch_size 16 --train.max_seq_length 64 --train.log_interval 1 "
    "--train.max_tokens 1000000 --train.lr_warmup_steps 10 --precision 32-true --devices 1 "
    "--logger_name csv --out_dir out",
    "google": f"{_BUILD} && {_google()}",
}
LIMIT = 400.0  # seconds for a first step, or for a life
STEP = {  # a line that tells of a step; ours are seen in metrics.jsonl
    "transformers": r"'loss'",
    "sentence-transformers": r"'loss'",
    "litgpt": r"step \d+ \|",
    "google": r"\d+/\d+ = ",
}
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
    "google": _google(learnin_rate=1e-4),
    "google, size of the model": f"{_BUILD} && "
    + _google(model_hparam_overrides={**_SIZE, "hiden_size": 64}, num_train_steps=1),
}


@dataclass(frozen=True)
class Training:
    """A training that is killed; the same line starts it and goes on with it, out is put in."""

    line: str
    out: str
    saves: str  # what a save makes in out, as a pattern; its first number is the step
    weights: Callable[[Path], dict[str, bytes]]  # of the end


def _bundle(folder: Path) -> dict[str, bytes]:
    step = max(int(p.stem.split("-")[1]) for p in folder.glob("model.ckpt-*.index"))
    tensors, _ = tf_checkpoint.read_bundle(folder / f"model.ckpt-{step}")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def _lit(folder: Path) -> dict[str, bytes]:
    state = torch.load(folder / "final" / "lit_model.pth", weights_only=True)["model"]
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


KILLED_STEPS = 270
KILLED = {
    "sentence-transformers": Training(
        f"python {PEERS}/train_sentence_transformers.py OUT {KILLED_STEPS}",
        "OUT",
        "checkpoint-*",
        lambda out: {"": (out / "final" / "model.safetensors").read_bytes()},
    ),
    "litgpt": Training(
        "litgpt pretrain pythia-14m --model_config.name pythia-14m --model_config.n_layer 1 "
        "--model_config.n_embd 64 --model_config.n_head 2 --model_config.intermediate_size 128 "
        "--model_config.block_size 64 --model_config.padded_vocab_size 30592 "
        "--tokenizer_dir tokens --data TextFiles --data.train_data_path texts "
        "--data.num_workers 1 --train.global_batch_size 4 --train.micro_batch_size 4 "
        "--train.max_seq_length 32 --train.log_interval 1 --train.save_interval 3 "
        f"--train.max_tokens {KILLED_STEPS * 4 * 32} --train.lr_warmup_steps 10 "
        "--eval.interval 100000 --eval.initial_validation false --eval.final_validation false "
        "--resume auto --precision 32-true --devices 1 --logger_name csv --out_dir OUT",
        "OUT",
        "step-*",
        _lit,
    ),
    "google": Training(
        _google(
            "OUT",
            model_hparam_overrides={**_SIZE, "num_hidden_layers": 1},
            train_batch_size=4,
            save_checkpoints_steps=3,
            num_train_steps=120,  # each takes a second
        ),
        "models/OUT",
        "model.ckpt-*",
        _bundle,
    ),
}

BAD_TEXT = {**PRETRAIN, "google, two processes": f"{_BUILD} --num-processes 2"}
Popen = subprocess.Popen[str]
Part = Literal["weight", "lines", "first step", "typo", "bad text", "bad table", "kills", "google"]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    environments: Path
    """Gets a virtual environment per program; those that are there are used as they are."""
    out: Path
    """Gets comparison.json; entries that are not measured now stay."""
    rounds: int = 3
    """Of the first step, interleaved."""
    kills: int = 20
    """Of each training, a quarter of them while it saves."""
    google: Path | None = None
    """A clone of google-research/electra."""
    old_python: Path | None = None
    """A Python 3.7, for TensorFlow 1.15."""
    programs: tuple[str, ...] = tuple(PACKAGES)
    """Measured again; what is known of the others stays."""
    only: tuple[Part, ...] = (
        "weight", "lines", "first step", "typo", "bad text", "bad table", "kills", "google"
    )  # fmt: skip


def main() -> None:
    a = tyro.cli(Arguments)
    without = [] if a.google and a.old_python else [n for n in PACKAGES if n.startswith("google")]
    os.environ["GOOGLE"] = str((a.google or Path()).absolute())
    names = [n for n in PACKAGES if n in a.programs and n not in without]
    pythons = {n: make_environment(a.environments.absolute(), n, a.old_python) for n in names}
    path = a.out / "comparison.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    a.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        seed = Path(folder) / "seed"
        make_seed(seed)
        for part in a.only:
            print(part, file=sys.stderr, flush=True)
            value = measure(part, pythons, seed, a)
            value |= {"load_average": os.getloadavg(), "cpu": runtime.cpu_name()}
            record[part] = merged(record.get(part, {}), value)
            path.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What was measured of other programs stays, in the tables of the first step too."""
    tables = [k for k in new if k.endswith("seconds") or k in ("commands", "right table")]
    return {**old, **new, **{k: {**old.get(k, {}), **new[k]} for k in tables}}


def measure(part: Part, pythons: dict[str, Path], seed: Path, a: Arguments) -> dict[str, Any]:
    def those(lines: dict[str, Any]) -> dict[str, Any]:
        return {n: line for n, line in lines.items() if n.split(",")[0] in pythons}

    def outcomes(lines: dict[str, str], spoil: Any = None) -> dict[str, dict[str, Any]]:
        found = those(lines).items()
        return {n: outcome(pythons[n.split(",")[0]], line, seed, spoil) for n, line in found}

    match part:
        case "weight":
            return {n: weight(python) for n, python in pythons.items() if " " not in n}
        case "lines":
            return {path.name: count_lines(path) for path in sorted(PEERS.glob("*.py"))}
        case "first step":
            lines = those(PRETRAIN)
            seconds: dict[str, list[Any]] = {name: [] for name in lines}
            for _ in range(a.rounds):
                for name, line in lines.items():
                    seconds[name].append(first_step(name, pythons[name], line, seed))
            walls = {n: [s["seconds"] for s in rounds] for n, rounds in seconds.items()}
            cpus = {n: [s["cpu_seconds"] for s in rounds] for n, rounds in seconds.items()}
            return {
                "what": "from the start of the program to the end of the first optimizer step, "
                "with tokenizer and data preparation; litgpt is given a tokenizer, Google's a "
                "vocabulary",
                "commands": tidy(lines),
                "seconds": walls,
                "cpu_seconds": cpus,
                "median_seconds": {n: statistics.median(w) for n, w in walls.items()},
                "median_cpu_seconds": {n: statistics.median(w) for n, w in cpus.items()},
            }
        case "typo":
            return {"commands": tidy(those(TYPO)), **outcomes(TYPO)}
        case "bad text":
            return {
                "what": "the second of three lines of texts/b.txt has a byte of Latin-1",
                "commands": tidy(those(BAD_TEXT)),
                **outcomes(BAD_TEXT, spoil_text),
            }
        case "bad table":
            return {
                "what": "line 8 of reviews.csv has no label",
                "commands": tidy(those(TUNE)),
                "right table": {n: found["exit"] for n, found in outcomes(TUNE).items()},
                **outcomes(TUNE, spoil_table),
            }
        case "kills":
            return {
                "what": f"kill -9 of a training of {KILLED_STEPS} steps (Google's: 120) with a "
                "save every third: of four kills one in a save, one in the start, two between "
                "steps; the same command goes on; after a start that fails the newest save is "
                "deleted by hand",
                "commands": tidy({n: t.line for n, t in those(KILLED).items()}),
                **{n: kill_test(n, pythons[n], seed, a.kills) for n in those(KILLED)},
            }
        case "google":
            return google(pythons, a)


def google(pythons: dict[str, Path], a: Arguments) -> dict[str, Any]:
    """Whether what Google's repository needs can be installed: here, and on a Python 3.7."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder]
        done = subprocess.run([*pip, "tensorflow==1.15"], capture_output=True, text=True)
    told = [line for line in done.stderr.splitlines() if "matching" in line]
    found: dict[str, Any] = {"exit": done.returncode, "said": told}
    found["python"] = sys.version.split()[0]
    if a.google is not None and a.old_python is not None:
        source = a.google / "SOURCE"  # where it is no clone, what it is
        line = ["git", "-C", str(a.google), "rev-parse", "HEAD"]
        head = "" if source.exists() else subprocess.check_output(line, text=True).strip()
        found["source"] = head or source.read_text().strip()
        version = subprocess.check_output([a.old_python, "-V"], text=True)
        found["old python"] = version.split()[1]
        for name in (n for n in pythons if n.startswith("google")):
            code = "import tensorflow as t; print(t.__version__)"
            line = [str(pythons[name]), "-W", "ignore", "-c", code]
            done = subprocess.run(line, capture_output=True, text=True)
            told = (done.stdout + done.stderr).replace(f"{pythons[name].parents[2]}/", "")
            lines = [line.strip() for line in told.splitlines() if line.strip()]
            packages = PACKAGES[name]
            found[name] = {"packages": packages, "exit": done.returncode, "end": lines[-8:]}
    return found


def make_environment(folder: Path, name: str, old_python: Path | None) -> Path:
    """The Python of a program's environment; torch lies in one that all of them see."""
    base, place = folder / "base", folder / name.replace(" ", "-")
    packages = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    python = place / "bin/python"
    if name.startswith("google"):
        if not place.exists():
            subprocess.run([str(old_python), "-m", "venv", place], check=True)
            subprocess.run([python, *pip, *PACKAGES[name]], check=True)
        return python
    if not base.exists():
        venv.create(base, with_pip=True)
        subprocess.run([base / "bin/python", *pip, "torch==2.13.0"], check=True)
    if not place.exists():
        venv.create(place)
        (place / packages / "base.pth").write_text(str(base / packages))
        subprocess.run([python, *pip, *PACKAGES[name], "torch==2.13.0"], check=True)
        if name == "litgpt":  # the torchvision it brings does not start beside a torch for CPUs
            subprocess.run(
                [python, "-m", "pip", "uninstall", "-q", "-y", "torchvision"], check=True
            )
    return python


def weight(python: Path) -> dict[str, Any]:
    """Distributions beside torch and pip, and what their files weigh without byte-code."""
    code = (
        "import json, sysconfig\n"
        "try: import importlib.metadata as m\n"
        "except ImportError: import importlib_metadata as m\n"
        "found = list(m.distributions(path=[sysconfig.get_path('purelib')]))\n"
        "found = [d for d in found if d.metadata['Name'] not in ('pip', 'setuptools')]\n"
        "files = {f.locate().resolve() for d in found for f in d.files or ()}\n"
        "size = sum(f.stat().st_size for f in files if f.exists() and f.suffix != '.pyc')\n"
        "names = {d.metadata['Name']: d.version for d in found}\n"
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
    shutil.copy(here / "model" / "discriminator" / "vocab.txt", here)
    marks = {"tokenizer_class": "Any", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    (here / "tokens" / "tokenizer_config.json").write_text(json.dumps(marks))


def spoil_text(here: Path) -> None:
    (here / "texts" / "b.txt").write_bytes(b"A first line.\nA caf\xe9 in Paris.\nA third line.\n")


def spoil_table(here: Path) -> None:
    lines = (here / "reviews.csv").read_text().splitlines()
    lines[7] = lines[7].rpartition(",")[0] + ","
    (here / "reviews.csv").write_text("\n".join(lines) + "\n")


def start(python: Path, line: str, here: Path, output: Any = subprocess.PIPE) -> Popen:
    """A command line in its environment, offline, in a process group of its own."""
    path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    environment |= {"HF_HOME": str(here / "cache")}
    return subprocess.Popen(
        ["bash", "-c", line], cwd=here, env=environment, text=True, errors="replace",
        stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
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
            done = any(re.search(STEP[name], said := said + text) for text in process.stdout)
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


def saved(out: Path, pattern: str) -> dict[int, dict[str, Path]]:
    """The files of every save by its step, under names without numbers."""
    found: dict[int, dict[str, Path]] = {}
    for path in out.glob(pattern):
        files = found.setdefault(int(re.findall(r"\d+", path.name)[0]), {})
        with suppress(OSError):  # it may be about to be deleted
            for file in [path] if path.is_file() else path.rglob("*"):
                files[re.sub(r"\d+", "N", str(file.relative_to(out)))] = file
    return found


def kill_test(name: str, python: Path, seed: Path, kills: int) -> dict[str, Any]:
    """Kill and start again; what a person would have to do is done and counted."""
    training, draw = KILLED[name], random.Random(1)
    counts, errors = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder) / "here"
        shutil.copytree(seed, here)
        log = here / "log"

        def place(out: str) -> Path:
            return here / training.out.replace("OUT", out)

        def begin(out: str) -> Popen:
            with open(log, "w") as file:
                return start(python, training.line.replace("OUT", out), here, file)

        def steps() -> int:
            return len(re.findall(STEP[name], log.read_text(errors="replace")))

        def until(holds: Callable[[], Any], process: Popen, seconds: float = LIMIT) -> None:
            end = time.monotonic() + seconds
            while process.poll() is None and not holds() and time.monotonic() < end:
                time.sleep(0.002)

        def weights(out: str) -> str:
            digest = hashlib.sha256()
            for key, value in sorted(training.weights(place(out)).items()):
                digest.update(key.encode() + value)
            return digest.hexdigest()

        def sizes(out: str) -> dict[str, int]:
            newest = max(saved(place(out), training.saves).items(), default=(0, {}))[1]
            return {n: file.stat().st_size for n, file in newest.items() if file.is_file()}

        def repair() -> None:
            counts["starts that failed"] += 1
            errors[log.read_text(errors="replace").strip().splitlines()[-1][:100]] += 1
            found = saved(place("run"), training.saves)
            if not found or counts["starts that failed"] > 2 * kills:
                raise RuntimeError(log.read_text(errors="replace"))
            for path in place("run").glob(training.saves):
                if int(re.findall(r"\d+", path.name)[0]) == max(found):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

        if name == "google":
            start(python, _BUILD, here).communicate()
        for out in ("whole", "again"):  # it must agree with itself to be compared at all
            if begin(out).wait(4 * LIMIT) != 0:
                raise RuntimeError(log.read_text(errors="replace"))
        complete, usual, window = sizes("whole"), LIMIT, 0.3
        while counts["kills"] < kills:
            kind = ("in a save", "in the start", "between steps", "between steps")[
                counts["kills"] % 4
            ]
            before, begun = set(saved(place("run"), training.saves)), time.monotonic()
            process = begin("run")
            match kind:
                case "in the start":
                    until(steps, process, draw.uniform(0, usual))
                case "in a save":
                    until(lambda b=before: set(saved(place("run"), training.saves)) - b, process)
                    until(lambda: False, process, draw.uniform(0, window))
                case _:
                    until(steps, process)
                    usual = time.monotonic() - begun
                    wanted = draw.randint(1, 6)
                    until(lambda n=wanted: steps() >= n, process)
                    until(lambda: False, process, draw.uniform(0, 0.1))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            if process.wait() == -signal.SIGKILL:
                now, fresh = sizes("run"), set(saved(place("run"), training.saves)) - before
                counts.update(["kills", f"kills {kind}"])
                counts["saves left half done"] += bool(fresh) and any(
                    n not in now or (size > 1e6 and now[n] < size) for n, size in complete.items()
                )
            elif process.returncode == 0:
                raise RuntimeError(f"the run was over after {counts['kills']} kills")
            else:
                repair()
            print(name, dict(counts), dict(errors), file=sys.stderr, flush=True)
        while begin("run").wait(4 * LIMIT) != 0:
            repair()
        whole = weights("whole")
        return {
            **counts,
            "starts that failed": counts["starts that failed"],
            "errors": dict(errors),
            "uninterrupted run repeats itself": whole == weights("again"),
            "weights equal": whole == weights("run"),
        }


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
        for place in (here, python.parents[2], ROOT, Path(os.environ["GOOGLE"])):
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
