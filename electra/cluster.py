"""Pieces of text on a Ray cluster: the other place where `prepare` can have them built.

Comes in: a cluster's address, what makes a builder, pieces one at a time. Goes out: the same built
pieces as from this process. Ray belongs to the extra `ray` and is imported when a cluster is asked
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
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import tokenizers

from .errors import ElectraError, Stopped
from .files import json_sha256, xxh3_file
from .pieces import BuiltPiece, Piece, PieceBuilder

RETRIES = 3  # of a piece whose worker or node died; a piece that kills every worker must end

Submit = Callable[[Piece], Callable[[], BuiltPiece]]


@contextmanager
def connect(
    address: str, make: partial[PieceBuilder], workers: int | None, should_stop: Callable[[], bool]
) -> Generator[tuple[Submit, int]]:
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
    files = sorted(Path(__file__).parent.glob("*.py"))
    return json_sha256([tokenizers.__version__, *map(xxh3_file, files)])
