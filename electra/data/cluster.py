"""Where `prepare` has its pieces built: in processes of this machine, or on a Ray cluster.

Comes in: pieces in order, and what makes a builder. Goes out: the built pieces in the same order,
the same from every place. Ray belongs to the extra `ray` and is imported when a cluster is asked
for. It moves pieces and results between its own processes as pickles, and whoever reaches a cluster
without a token can run code on it: the cluster is the border of trust. No file becomes a pickle.
"""

from __future__ import annotations

import importlib
import os
import platform
import re
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache, partial
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any, cast

import tokenizers

from ..errors import ElectraError, LostWorker, Stopped
from ..files import json_sha256, xxh3_file
from .pieces import BuiltPiece, Piece, PieceBuilder

RETRIES = 3  # of a piece whose worker or node died; a piece that kills every worker must end

_Submit = Callable[
    [Piece], Callable[[], BuiltPiece]
]  # hands a piece over; gives a way to its result


def build_in_order(
    pieces: Iterator[Piece],
    make: partial[PieceBuilder],
    workers: int | None,
    cluster: str | None,
    should_stop: Callable[[], bool],
) -> Generator[BuiltPiece]:
    """Built pieces in the order of `pieces`, with only a few of them in memory."""
    if cluster is None:
        place = _processes(make, workers or len(os.sched_getaffinity(0)))
    else:
        place = _connect(cluster, make, workers, should_stop)
    running: deque[Callable[[], BuiltPiece]] = deque()
    with _single_threaded_tokenizers(), place as (submit, count):
        for piece in pieces:
            running.append(submit(piece))
            if len(running) > 2 * count:
                yield running.popleft()()
        while running:
            yield running.popleft()()


@contextmanager
def _single_threaded_tokenizers() -> Generator[None]:
    """`workers` is the number of cores in use: the library must not start threads of its own."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def _processes(make: Callable[[], PieceBuilder], workers: int) -> Generator[tuple[_Submit, int]]:
    """What hands a piece to a process of this machine, and how many there are."""
    if workers == 1:
        build = make()
        yield (lambda piece: partial(build, piece)), 0
        return
    # Processes are spawned: a fork would copy the threads and devices of whoever calls this.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (make,))
    try:
        yield (lambda piece: pool.submit(_build_in_worker, piece).result), workers
    except BrokenProcessPool as error:
        what = "A worker process ended by itself, most likely for want of memory."
        fix = "give the same command again: full shards are kept; with fewer workers if that "
        raise LostWorker(what, "workers", fix + "repeats") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: PieceBuilder | None = None


def _start_worker(make: Callable[[], PieceBuilder]) -> None:
    global _worker
    # Ctrl-C reaches the whole process group, but only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker = make()


def _end_with_parent() -> None:
    """A killed parent cannot end its workers, and they would wait for work for ever."""
    connection.wait([cast(Any, parent_process()).sentinel])
    os._exit(1)


def _build_in_worker(piece: Piece) -> BuiltPiece:
    return cast(PieceBuilder, _worker)(piece)


@contextmanager
def _connect(
    address: str, make: partial[PieceBuilder], workers: int | None, should_stop: Callable[[], bool]
) -> Generator[tuple[_Submit, int]]:
    """What hands a piece to the cluster and gets a way to its result, and the cluster's workers."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read at import: nothing is told to anyone
    try:
        ray: Any = importlib.import_module("ray")
    except ModuleNotFoundError as error:
        what = "A cluster needs the package ray, which is not installed."
        raise ElectraError(what, "cluster", "pip install 'electra[ray]'") from error
    if not re.fullmatch(r"[\w.-]+:\d+", address):  # Ray would start a cluster for some other words
        raise ElectraError(f"{address} is no address.", "cluster", "give host:port")
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        host, port = address.split(":")
        socket.create_connection((host, int(port)), timeout=10).close()  # Ray tries for minutes
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        what = f"There is no Ray cluster to work on: {str(error).splitlines()[0]}"
        fix = "start one that this machine is a node of, and give its host:port"
        raise ElectraError(what, f"cluster {address}", fix) from error
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate)  # Ray has put its own in this place
        workers = workers or int(ray.cluster_resources().get("CPU", 0))
        if not workers:
            fix = "add a node with CPUs, or give --workers for nodes that will come"
            raise ElectraError("The cluster has no CPU.", f"cluster {address}", fix)
        build = ray.remote(num_cpus=1, max_retries=RETRIES)(_build)
        settings = ray.put((_code(), *make.args))

        def submit(piece: Piece) -> Callable[[], BuiltPiece]:
            # Ray repeats a lost piece only while someone holds what went in: here, the partial.
            text = ray.put(piece)
            return partial(fetch, text, build.remote(settings, text))

        def fetch(text: Any, result: Any) -> BuiltPiece:
            del text
            while not ray.wait([result], timeout=1)[0]:  # it may be for ever: nodes can all be gone
                if should_stop():
                    raise Stopped
            try:
                return ray.get(result)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayError as error:
                name = type(error).__name__
                what = f"The cluster lost a piece of text {RETRIES + 1} times ({name})."
                fix = "look for nodes without memory; the same command goes on behind full shards"
                raise ElectraError(what, f"cluster {address}", fix) from error

        yield submit, workers
    finally:
        ray.shutdown()  # ends what still runs for us


def _build(settings: tuple[Any, ...], piece: Piece) -> BuiltPiece:
    return _builder(*settings)(piece)


@lru_cache(maxsize=1)
def _builder(code: str, *settings: Any) -> PieceBuilder:
    """A worker's builder, kept with its cache of words."""
    if code != _code():
        what = "A node of the cluster has another electra or tokenizers, "
        what += "which can give other bytes."
        raise ElectraError(what, platform.node(), "install the same on every node")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a piece has one core
    return PieceBuilder(*settings)


def _code() -> str:
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return json_sha256([tokenizers.__version__, *map(xxh3_file, files)])
