"""`prepare` on a Ray cluster of two nodes on this machine: the same bytes, whatever is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from test_corpus import ORACLE, ROOT, content, make_text

from electra.data.corpus import prepare
from electra.data.tokenizer import Tokenizer

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra ray"),
]
PATIENCE = 240
SETTINGS = {"sequence_length": 32, "shard_bytes": 1 << 20}  # every piece is a shard
SCRIPT = f"""
import sys
from pathlib import Path
from electra.data.corpus import prepare
from electra.errors import ElectraError, Stopped
from electra.errors import StopRequest
from electra.data.tokenizer import Tokenizer
text, vocabulary, out, cluster = sys.argv[1:]
try:
    with StopRequest() as stop:
        prepare([text], Tokenizer.load(vocabulary), Path(out), cluster=cluster, should_stop=stop,
                **{SETTINGS})
except (ElectraError, Stopped) as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def wait_until(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.02)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    errors = process.communicate(timeout=PATIENCE)[1]
    return process.returncode, errors


class Node:
    """A node of one CPU. Ray listens on every interface, so that only a token may come in."""

    def __init__(self, ip: str, log: Path, environment: dict[str, str], *options: str) -> None:
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
        more = [f"--node-ip-address={ip}", "--object-store-memory=100000000", *options]
        with log.open("wb") as file:
            self.process = psutil.Popen(
                [*ray, *more], env=environment, stdout=file, stderr=file, start_new_session=True
            )
        wait_until(
            lambda: b"block forever" in log.read_bytes() or self.process.poll() is not None, "node"
        )
        assert self.process.poll() is None, log.read_text()

    def building(self) -> list[psutil.Process]:
        """The workers that build a piece at this moment; Ray names them so."""
        found = []
        for process in self.process.children(recursive=True):
            with suppress(psutil.Error):  # it may have ended just now
                if process.cmdline()[:1] == ["ray::_build"]:
                    found.append(process)
        return found

    def kill(self) -> None:
        if self.process.poll() is None:
            family = [*self.process.children(recursive=True), self.process]
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(family, timeout=PATIENCE)


class Cluster:
    def __init__(self, directory: Path) -> None:
        self.directory, self.nodes = directory, list[Node]()
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        with socket.socket() as free:
            free.bind(("127.0.0.2", 0))
            self.address = f"127.0.0.2:{free.getsockname()[1]}"

    def add(self, **environment: str) -> Node:
        if self.nodes:
            where = [f"--address={self.address}"]
        else:
            port = self.address.split(":")[1]
            where = ["--head", f"--port={port}", f"--temp-dir={self.directory}"]
            where += ["--include-dashboard=false"]
        number = len(self.nodes)
        log = self.directory / f"{number}.log"
        self.nodes.append(
            Node(f"127.0.0.{2 + number}", log, {**self.environment, **environment}, *where)
        )
        return self.nodes[-1]

    def start(self, text: Path, out: Path, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SCRIPT, text, ORACLE / "builder_vocab.txt", out]
        return subprocess.Popen(
            [*map(str, command), self.address],
            env={**self.environment, **environment},
            cwd=self.directory,  # Ray shows its workers the code in the folder of the command
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, text: Path, out: Path, **environment: str) -> tuple[int, str]:
        return end(self.start(text, out, **environment))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    directory = Path(tempfile.mkdtemp(prefix="ray-"))  # short: sockets lie in it
    made = Cluster(directory)
    try:
        yield made
    finally:
        for node in reversed(made.nodes):
            node.kill()
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("text"), documents=30_000)


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process makes of the text."""
    out = tmp_path_factory.mktemp("corpus") / "whole"
    prepare([text], Tokenizer.load(ORACLE / "builder_vocab.txt"), out, workers=1, **SETTINGS)
    return content(out)


def shards(out: Path) -> int:
    try:
        return len(json.loads((out / "progress.json").read_bytes())["shards"])
    except FileNotFoundError:
        return 0


def wait_for(process: subprocess.Popen[str], holds: Callable[[], object], what: str) -> None:
    wait_until(lambda: holds() or process.poll() is not None, what)
    assert process.poll() is None, f"it ended before {what}: {process.communicate()[1]}"


def test_two_nodes_give_the_bytes_of_one_process_and_both_work(
    cluster: Cluster, text: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    nodes = cluster.add(), cluster.add()
    process = cluster.start(text, tmp_path / "out")
    for number, node in enumerate(nodes):
        wait_for(process, node.building, f"node {number} had work")
    assert end(process) == (0, "")
    assert content(tmp_path / "out") == whole


def test_a_killed_worker_is_replaced_and_its_piece_built_again(
    cluster: Cluster, text: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    nodes, out = (cluster.add(), cluster.add()), tmp_path / "out"
    process = cluster.start(text, out)
    for number, node in enumerate(nodes):
        wait_for(process, lambda n=number: shards(out) >= 3 * (n + 1), "some shards were full")
        wait_for(process, node.building, f"node {number} had work")
        for worker in node.building():
            worker.kill()
    code, errors = end(process)
    assert code == 0, errors
    assert content(out) == whole


def test_a_node_that_goes_takes_nothing_with_it(
    cluster: Cluster, text: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    cluster.add()
    going, out = cluster.add(), tmp_path / "out"
    process = cluster.start(text, out)
    wait_for(process, lambda: shards(out) >= 3 and going.building(), "the node had work")
    going.kill()
    assert process.poll() is None
    code, errors = end(process)
    assert code == 0, errors
    assert content(out) == whole


def test_a_piece_that_kills_every_worker_ends_the_command_and_it_goes_on_later(
    cluster: Cluster, text: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    node, out = cluster.add(), tmp_path / "out"
    process = cluster.start(text, out)
    wait_for(process, lambda: shards(out) >= 3, "some shards were full")
    late = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < late:
        for worker in node.building():
            worker.kill()
    code, errors = end(process)
    assert code == 2
    assert "lost a piece" in errors
    assert shards(out) >= 3
    assert cluster.run(text, out) == (0, "")
    assert content(out) == whole


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_is_heard_and_the_same_command_goes_on(
    cluster: Cluster, text: Path, whole: dict[str, bytes], tmp_path: Path, number: int
) -> None:
    node, out = cluster.add(), tmp_path / "out"
    process = cluster.start(text, out)
    wait_for(process, lambda: shards(out) >= 3 and node.building(), "some shards were full")
    process.send_signal(number)
    assert end(process)[0] == 75
    assert shards(out) >= 3
    assert not (out / "manifest.json").exists()
    wait_until(lambda: not node.building(), "the workers of a command that ended")
    assert cluster.run(text, out) == (0, "")
    assert content(out) == whole


def test_a_request_to_stop_is_heard_while_no_node_can_work(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    cluster.add()
    going, out = cluster.add(), tmp_path / "out"
    process = cluster.start(text, out)
    wait_for(process, lambda: shards(out) >= 1 and going.building(), "the nodes had work")
    for node in cluster.nodes:  # a worker that is stopped looks like one that works for ever
        for worker in node.building():
            worker.suspend()
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 75


def test_nodes_with_other_code_are_refused(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "electra", tmp_path / "other" / "electra")
    with (tmp_path / "other" / "electra" / "pieces.py").open("a") as file:
        file.write("# another version\n")
    cluster.add(PYTHONPATH=str(tmp_path / "other"))
    code, errors = cluster.run(text, tmp_path / "out")
    assert code == 2
    assert "another electra" in errors


def test_who_has_not_the_token_is_refused(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    cluster.add()
    code, errors = cluster.run(text, tmp_path / "out", RAY_AUTH_TOKEN=secrets.token_hex(32))
    assert code == 2
    assert "no Ray cluster" in errors


def test_an_address_where_nobody_is_is_said_at_once(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    code, errors = cluster.run(text, tmp_path / "out")
    assert code == 2
    assert "no Ray cluster" in errors
    assert cluster.address in errors
