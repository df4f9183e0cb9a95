"""MB/s and memory of `electra prepare` against bare `tokenizers` on the same text, one core each.

    python benchmarks/prepare_speed.py --input TEXT... --tokenizer TOK --out results/prepare

The bare side only encodes lines in batches, single-threaded, and keeps nothing; ours reads,
encodes, builds examples, hashes and writes the corpus. Rounds are interleaved. Then memory: peak
resident size of a whole `electra prepare` on the first 10 MB and on all of the text.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import tyro

from electra.data.corpus import Corpus, prepare
from electra.data.text import TextStats, expand_inputs, read_documents
from electra.data.tokenizer import LineEncoder, Tokenizer
from electra.runtime import cpu_name


@dataclass(frozen=True, kw_only=True)
class Arguments:
    input: tuple[str, ...]
    tokenizer: Path
    out: Path
    megabytes: float = 20.0
    """Text for the speed comparison."""
    rounds: int = 3


def main() -> None:
    a = tyro.cli(Arguments)
    tokenizer = Tokenizer.load(a.tokenizer)
    paths = expand_inputs(a.input)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        some = _first(paths, work / "some.txt", a.megabytes)
        lines = some.read_text(encoding="utf-8").split("\n")
        size = some.stat().st_size / 1e6
        same = _ids_are_equal(tokenizer, lines[:20_000])
        rates: dict[str, list[float]] = {"bare": [], "prepare_1": [], "prepare_2": []}
        for _ in range(a.rounds):
            begin = time.perf_counter()
            for i in range(0, len(lines), 1000):
                tokenizer.backend.encode_batch(lines[i : i + 1000], add_special_tokens=False)
            rates["bare"].append(size / (time.perf_counter() - begin))
            for workers in (1, 2):
                begin = time.perf_counter()
                prepare([some], tokenizer, work / "corpus", workers=workers)
                rates[f"prepare_{workers}"].append(size / (time.perf_counter() - begin))
                shutil.rmtree(work / "corpus")
        memory = {}
        small = _first(paths, work / "small.txt", 10.0)
        for name, inputs in (("10 MB", [small]), ("all", paths)):
            begin = time.perf_counter()
            peak = _peak_rss(inputs, a.tokenizer, work / "corpus")
            seconds = time.perf_counter() - begin
            characters = Corpus.open(work / "corpus").manifest.text["characters"]
            memory[name] = {"peak_rss_mb": peak, "seconds": seconds, "characters": characters}
            shutil.rmtree(work / "corpus")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    record = {
        "what": f"MB/s on {size:.1f} MB of text, median of {a.rounds} interleaved rounds",
        "ids_equal": same,
        "mb_per_second": rates,
        "medians": medians,
        "ratio_one_worker": medians["prepare_1"] / medians["bare"],
        "memory": memory,
        "cpu": cpu_name(),
        "load_average": os.getloadavg(),
        "vocab_size": tokenizer.vocab_size,
    }
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / "prepare_speed.json").write_text(json.dumps(record, indent=1))
    print(json.dumps(record, indent=1))


def _first(paths: list[Path], target: Path, megabytes: float) -> Path:
    """The first documents of the text as one plain file."""
    written = 0
    with open(target, "w", encoding="utf-8") as file:
        for document in read_documents(paths, stats=TextStats()):
            text = "\n".join(document.lines) + "\n\n"
            written += len(text.encode())
            if written > megabytes * 1e6:
                break
            file.write(text)
    return target


def _ids_are_equal(tokenizer: Tokenizer, lines: list[str]) -> bool:
    ids, lengths = LineEncoder(tokenizer).encode_lines(lines)
    bare = tokenizer.backend.encode_batch(lines, add_special_tokens=False)
    return ids.tolist() == [i for e in bare for i in e.ids] and lengths.tolist() == [
        len(e.ids) for e in bare
    ]


def _peak_rss(inputs: list[Path], tokenizer: Path, out: Path) -> float:
    """Largest resident size in MB of a `prepare` command or one of its workers.

    Its own comes from /proc: ru_maxrss would begin with that of the process that started it.
    """
    code = (
        "import re, resource, sys\n"
        "from pathlib import Path\n"
        "from electra.cli import run\n"
        "if __name__ == '__main__':\n"
        "    assert run(sys.argv[1:]) == 0\n"
        "    mine = re.search(r'VmHWM:\\s*(\\d+)', Path('/proc/self/status').read_text())[1]\n"
        "    workers = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
        "    print(max(int(mine), workers))\n"
    )
    script = out.with_name("peak.py")
    script.write_text(code)
    command = ["prepare", "--tokenizer", str(tokenizer), "--out", str(out), "--workers", "2"]
    done = subprocess.run(
        [sys.executable, str(script), *command, "--input", *map(str, inputs)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[-1]) / 1024


if __name__ == "__main__":
    main()
