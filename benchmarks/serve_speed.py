"""Latency and requests/s of `electra serve` against transformers' pipeline behind the same server.

    python benchmarks/serve_speed.py --out results/serve

A classifier of the size of --recipe (random weights, or --model) answers sentences of mixed length.
Every arm is a process of its own, all listen through electra/use/web.py on starlette and uvicorn,
and give the same answers, which is checked. The arms of transformers call `pipeline(text)` for each
request: in starlette's thread pool, as a plain `def` handler would, and in as many threads as there
are cores, each with one core, which is the best that it does. Clients send their next request when
they have the answer to the last one. Rounds are interleaved; the median of the rounds counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tyro

OURS = "electra serve"
PIPELINES = {
    "pipeline, plain handler": "plain",
    "pipeline, a thread per core": "threads",
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    out: Path
    input: Path | None = None
    """A text, one paragraph a line, whose sentences are sent; default: the demo's text."""
    model: Path | None = None
    """A fine-tuned classifier of one text; default: random weights."""
    recipe: str = "small"
    clients: tuple[int, ...] = (1, 32)
    seconds: float = 10.0
    """That each arm is measured for, with each number of clients, in each round."""
    rounds: int = 3


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[1] == "pipeline":  # one of the arms, started by `_server`
        raise SystemExit(_pipeline_server(sys.argv[2], sys.argv[3]))
    a = tyro.cli(Arguments)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        sentences = _sentences(a.input)
        texts = random.Random(0).sample(sentences, min(2000, len(sentences)))
        model = a.model or _random_model(sentences, a.recipe, Path(folder))
        servers = {OURS: [sys.executable, "-m", "electra", "serve", str(model), "--port", "0"]}
        for name, kind in PIPELINES.items():
            servers[name] = [sys.executable, __file__, "pipeline", kind, str(model)]
        started = {n: stack.enter_context(_server(command)) for n, command in servers.items()}
        first = {n: asyncio.run(_load(s.port, texts[:64], 1, None)) for n, s in started.items()}
        apart = {n: _difference(first[n].answers, first[OURS].answers) for n in started}
        results: dict[str, dict[str, list[dict[str, float]]]] = {n: {} for n in started}
        for round_ in range(a.rounds):
            for clients in a.clients:
                for name, server in started.items():
                    used = server.cpu_seconds()
                    load = asyncio.run(_load(server.port, texts, clients, a.seconds))
                    row = {
                        "cpu_ms": 1000 * (server.cpu_seconds() - used) / len(load.seconds),
                        "requests_per_second": len(load.seconds) / load.wall,
                        "p50_ms": 1000 * float(np.percentile(load.seconds, 50)),
                        "p99_ms": 1000 * float(np.percentile(load.seconds, 99)),
                    }
                    results[name].setdefault(str(clients), []).append(row)
                    told = f"{row['requests_per_second']:.1f} requests/s"
                    print(f"round {round_}: {name}, {clients} clients: {told}", flush=True)
    medians = {
        name: {
            clients: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            for clients, rows in by_clients.items()
        }
        for name, by_clients in results.items()
    }
    from electra.runtime import cpu_name, source

    record = {
        "what": f"median of {a.rounds} interleaved rounds of {a.seconds:g} s",
        "medians": medians,
        "rounds": results,
        "times_faster": {
            name: {
                clients: medians[OURS][clients]["requests_per_second"] / row["requests_per_second"]
                for clients, row in by_clients.items()
            }
            for name, by_clients in medians.items()
        },
        "difference_of_probabilities": apart,
        "texts": len(texts),
        "characters_per_text": statistics.mean(map(len, texts)),
        "settings": {"recipe": a.recipe, "model": str(a.model) if a.model else "random weights"},
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg(),
        "versions": {
            name: version(name) for name in ("torch", "transformers", "starlette", "uvicorn")
        },
        "code": source(),
    }
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / "serve_speed.json").write_text(json.dumps(record, indent=1))
    head = "| server | clients | requests/s | p50 ms | p99 ms | CPU ms of a request "
    print(f"{head}| electra serve is faster by |\n{'|---' * 7}|")
    for clients in map(str, a.clients):
        for name, by_clients in medians.items():
            row, times = by_clients[clients], record["times_faster"][name][clients]
            print(
                f"| {name} | {clients} | {row['requests_per_second']:,.1f} | {row['p50_ms']:,.1f} "
                f"| {row['p99_ms']:,.1f} | {row['cpu_ms']:,.1f} | {times:.2f} |"
            )
    print(
        f"load average {os.getloadavg()[0]:.1f}, of which the benchmark is about "
        f"{len(os.sched_getaffinity(0))}; above that the numbers are indicative only"
    )


# ---------------------------------------------------------------------- the servers


@dataclass(frozen=True)
class Running:
    port: int
    pid: int

    def cpu_seconds(self) -> float:
        """Of all its threads; hardly depends on what else the machine does."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _server(command: list[str]) -> Iterator[Running]:
    """A server that runs until the block ends."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                yield Running(int(found[1]), process.pid)
                break
        else:
            raise SystemExit(f"{command} did not start")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _pipeline_server(kind: str, model: str) -> int:
    import torch
    import transformers
    from starlette.concurrency import run_in_threadpool

    from electra.use.web import (
        JSONResponse,
        Limits,
        Request,
        Route,
        application,
        listen,
        read_object,
    )

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    pipeline: Any = transformers.pipeline("text-classification", model=model, device="cpu")
    cores = len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,))

    def classify(text: str) -> dict[str, Any]:
        best = pipeline(text, truncation=True)[0]
        return {"prediction": best["label"], "probability": best["score"]}

    async def answer(request: Request) -> JSONResponse:
        text = (await read_object(request))["text"]
        if kind == "plain":
            return JSONResponse(await run_in_threadpool(classify, text))
        loop = asyncio.get_running_loop()
        return JSONResponse(await loop.run_in_executor(pool, classify, text))

    limits = Limits(10_000, 1 << 18, {}, 256, None, 30.0)
    return listen(application([Route("/classify", answer, methods=["POST"])], limits))


# ---------------------------------------------------------------------- the clients


@dataclass(frozen=True)
class Load:
    seconds: list[float]  # of each request
    answers: list[dict[str, Any]]
    wall: float


async def _load(port: int, texts: list[str], clients: int, seconds: float | None) -> Load:
    """Requests of some clients for so long, or, without an end, each text once."""
    took, answers, turn = list[float](), list[dict[str, Any]](), iter(range(1 << 62))
    begin = time.perf_counter()

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while True:
            number = next(turn)
            since = time.perf_counter()
            if since > begin + seconds if seconds is not None else number >= len(texts):
                break
            body = json.dumps({"text": texts[number % len(texts)]}).encode()
            head = (
                "POST /classify HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            )
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            headers = await reader.readuntil(b"\r\n\r\n")
            length = int(re.search(rb"content-length: (\d+)", headers)[1])  # type: ignore[index]
            answer = await reader.readexactly(length)
            took.append(time.perf_counter() - since)
            if not headers.startswith(b"HTTP/1.1 200"):
                raise SystemExit(answer.decode())
            if seconds is None:
                answers.append(json.loads(answer))
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return Load(took, answers, time.perf_counter() - begin)


def _difference(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> float:
    if [a["prediction"] for a in found] != [a["prediction"] for a in expected]:
        raise SystemExit("the servers do not give the same answers")
    pairs = zip(found, expected, strict=True)
    return max(abs(a["probability"] - b["probability"]) for a, b in pairs)


# ---------------------------------------------------------------------- model and texts


def _sentences(path: Path | None) -> list[str]:
    from electra.data.text import read_lines
    from electra.use.demo_text import find_text

    if path is not None:
        paragraphs = [line for _, line in read_lines(path)]
    else:
        paragraphs = [p for document in find_text().documents for p in document.paragraphs]
    split = (s.strip() for p in paragraphs for s in re.split(r"(?<=[.!?])\s+", p))
    return [s for s in split if s]


def _random_model(sentences: list[str], name: str, folder: Path) -> Path:
    from electra.data.tokenizer import train_tokenizer
    from electra.encoder import Embeddings, Encoder, initialise
    from electra.finetuning.heads import TaskModel, build_head, initialise_head
    from electra.finetuning.tasks import Task
    from electra.formats.hf_export import export_finetuned
    from electra.recipes import recipe

    (folder / "text.txt").write_text("\n".join(sentences))
    tokenizer, config = train_tokenizer([folder / "text.txt"]), recipe(name, "best").encoder
    encoder = Encoder(config, Embeddings(config, tokenizer.vocab_size))
    initialise(encoder, "paper", seed=0)
    labels = ("negative", "neutral", "positive")
    task = Task(name="random", kind="classification", metric="accuracy", labels=labels)
    head = build_head(task.kind, config, len(labels), "hf")
    initialise_head(head, seed=0)
    model = TaskModel(encoder, head)
    export_finetuned(model, task, "hf", tokenizer, folder / "model", results={}, length=128)
    return folder / "model"


if __name__ == "__main__":
    main()
