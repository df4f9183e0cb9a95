"""What everything that listens refuses, on real sockets: see the table in electra/use/web.py."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from electra.commands import ServeCommand, UiCommand
from electra.errors import ElectraError
from electra.use import web

ROOT = Path(__file__).parents[1]
APP = """
import asyncio, json, sys
from electra.errors import ElectraError
from electra.use.web import *

async def echo(request):
    return JSONResponse({"text": text_field(await read_object(request), "text", app.limits.text)})

async def hang(request):
    await request.body()
    print("hanging", flush=True)
    await asyncio.sleep(float(request.query_params.get("seconds", 600)))
    return JSONResponse({})

async def bug(request):
    raise RuntimeError("the secret of /home/me")

async def user(request):
    raise ElectraError("The run is damaged.", where="/home/me/run", fix="train again")

app = application(
    [Route("/" + f.__name__, f, methods=["GET", "POST"]) for f in (echo, hang, bug, user)],
    Limits(**json.loads(sys.argv[1])),
    hosts=["model.example"],
)
sys.exit(listen(app, sys.argv[2], 0, title="test"))
"""
Answer = tuple[int, dict[str, str], Any]


class Server(NamedTuple):
    process: subprocess.Popen[str]
    port: int

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Status, headers and JSON; a body that is no bytes is sent as JSON."""
        connection = self.connect()
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json"} if data is not None else {}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(connection):
            connection.request(method, path, data, given)
            return answer_of(connection.getresponse())

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.ask("POST", path, body, **headers)

    @contextlib.contextmanager
    def hanging(self, path: str) -> Iterator[http.client.HTTPConnection]:
        """A request that the server is at work on."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("POST", path, "")
            assert self.process.stdout is not None
            assert self.process.stdout.readline() == "hanging\n"
            yield connection


def answer_of(response: http.client.HTTPResponse) -> Answer:
    headers = {name.lower(): value for name, value in response.getheaders()}
    return response.status, headers, json.loads(response.read())


@contextlib.contextmanager
def running(host: str = "127.0.0.1", *, token: str = "", **limits: Any) -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-c", APP, json.dumps({"per_minute": None, **limits}), host],
        env={**os.environ, "PYTHONPATH": str(ROOT), "ELECTRA_TOKEN": token},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+:(\d+) ", process.stdout.readline())
        assert found, process.communicate()
        yield Server(process, int(found[1]))
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(text=10, body=2000, bodies={"/hang": 4000}) as started:
        yield started


def test_an_answer_comes_with_headers_that_allow_nothing_from_elsewhere(server: Server) -> None:
    for path, status in (("/echo", 200), ("/nothing", 404), ("/bug", 500)):
        found, headers, _ = server.post(path, {"text": "hé 😀"})
        assert found == status
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert not re.search(r"http|unsafe|\*", policy)
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers
        assert "access-control-allow-origin" not in headers
    assert server.post("/echo", {"text": "hé 😀"})[2] == {"text": "hé 😀"}


def test_an_answer_is_not_held_back_by_the_network() -> None:
    """Nagle's algorithm and delayed acknowledgements together take 40 ms for every one."""

    async def accepted() -> int:
        options = asyncio.get_running_loop().create_future()

        def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            del reader
            taken = writer.get_extra_info("socket")
            options.set_result(taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with web._bind("127.0.0.1", 0) as bound:
            async with await asyncio.start_server(client, sock=bound):
                _, writer = await asyncio.open_connection(*bound.getsockname())
                writer.close()
                return await options

    assert asyncio.run(accepted()) == 1


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("192.168.1.7:8000", 200),
        ("Model.Example:80", 200),
        ("evil.example", 421),
        ("localhost.evil.example:8000", 421),
        ("model.example.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("[", 421),
        ("", 421),
    ],
)
def test_a_name_that_somebody_pointed_here_is_refused(
    server: Server, host: str, status: int
) -> None:
    assert server.post("/echo", {"text": ""}, host=host)[0] == status
    if status != 200:
        assert server.ask("GET", "/user", host=host)[0] == status


def test_no_page_of_another_origin_can_send_anything(server: Server) -> None:
    for host in ("localhost:8000", "Model.Example"):
        own = {"host": host, "origin": f"http://{host.lower()}", "sec_fetch_site": "same-origin"}
        assert server.post("/echo", {"text": ""}, **own)[0] == 200
    for origin in ("http://evil.example", "null", "http://localhost:9000", "file://", ""):
        status, _, error = server.post("/echo", {"text": ""}, host="localhost:8000", origin=origin)
        assert (status, error["where"]) == (403, "origin"), origin
    for site in ("cross-site", "same-site"):
        assert server.post("/echo", {"text": ""}, sec_fetch_site=site)[0] == 403
    # Nor can a form, which some old browser might send without an origin.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        status, _, error = server.post("/echo", {"text": ""}, content_type=kind)
        assert (status, error["where"]) == (415, "content-type"), kind


def test_a_body_is_measured_and_not_believed(server: Server) -> None:
    def starts(head: str, *parts: bytes) -> bytes:
        """What comes back for a request that is never finished."""
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            start = f"POST {head}\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            connection.sendall(start.encode() + b"".join(parts))
            return connection.recv(1 << 16)

    announced = starts("/echo HTTP/1.1", b"content-length: 2001\r\n\r\n")
    assert announced.startswith(b"HTTP/1.1 413 ")
    chunk = b"64\r\n" + 100 * b" " + b"\r\n"
    chunked = b"transfer-encoding: chunked\r\n\r\n"
    assert starts("/echo HTTP/1.1", chunked, 21 * chunk).startswith(b"HTTP/1.1 413 ")
    assert starts("/hang HTTP/1.1", chunked, 41 * chunk).startswith(b"HTTP/1.1 413 ")
    status, _, error = server.post("/echo", b" " * 2001)
    assert (status, error["what"]) == (413, "The request is larger than 2,000 bytes.")
    assert server.post("/echo", b'{"text": "fits"}' + b" " * 1984)[0] == 200


@pytest.mark.parametrize(
    ("body", "status", "where"),
    [
        (b'{"text": "0123456789x"}', 413, "text"),
        (b'{"text": 1}', 422, "text"),
        (b'{"text": null}', 422, "text"),
        (b"{}", 422, "text"),
        (rb'{"text": "\ud800"}', 422, "text"),
        (b"", 400, "body"),
        (b"[]", 400, "body"),
        (b'{"text": NaN}', 400, "body"),
        (b'{"text": "\xff"}', 400, "body"),
        (b'{"text": "a"', 400, "body"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, 422, "text"),
        (b"[" * 1999, 400, "body"),
        (b'{"a": ' + b"1" * 1900 + b"}", 422, "text"),
    ],
)
def test_a_body_that_is_not_as_it_should_be(
    server: Server, body: bytes, status: int, where: str
) -> None:
    found, _, error = server.post("/echo", body)
    assert (found, error["where"]) == (status, where)
    assert error["what"].endswith(".")
    assert error["fix"]
    assert server.post("/echo", {"text": "0123456789"})[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        f"{start}{up}etc/passwd"
        for start in ("/", "/echo/", "/file=", "/static/")
        for up in ("../" * 9, "%2e%2e/" * 9, "..%2f" * 9, "%252e%252e%252f" * 9, "..\\" * 9, "//")
    ],
)
def test_no_path_leads_to_a_file(server: Server, path: str) -> None:
    status, _, error = server.ask("GET", path)
    assert status == 404
    assert "root:" not in json.dumps(error)


def test_an_error_tells_the_client_nothing_of_this_machine() -> None:
    with running() as server:
        status, _, error = server.ask("GET", "/user")
        assert (status, error) == (
            400,
            {"what": "The run is damaged.", "where": "", "fix": "train again"},
        )
        status, _, error = server.ask("GET", "/bug")
        assert status == 500
        assert not re.search("secret|home|Traceback|Error", json.dumps(error))
        assert server.ask("PUT", "/bug")[0] == 405
        server.process.terminate()
        log = server.process.communicate(timeout=60)[1]
    assert log.count("Traceback") == 1
    assert "the secret of /home/me" in log


def test_what_takes_too_long_is_ended() -> None:
    with running(seconds=0.5, requests=2) as server:
        status, _, error = server.post("/hang", {})
        assert (status, error["what"]) == (504, "There was no answer within 0.5 seconds.")
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            head = b"POST /echo HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            connection.sendall(head + b"content-length: 13\r\n\r\n{")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
        # One that goes away meanwhile leaves nothing behind: there is room for the next ones.
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
                connection.sendall(head + b"content-length: 13\r\n\r\n{")
        end = time.monotonic() + 60
        while server.post("/hang?seconds=0", {})[0] != 200:
            assert time.monotonic() < end


def test_the_limits_of_a_page_that_nobody_changed() -> None:
    """Most tests take smaller ones; these are what a user gets."""
    given = web.Limits()
    assert (given.text, given.body, given.requests) == (2_000, 64 << 10, 18)  # 2 computed, 16 wait
    assert (given.per_minute, given.seconds) == (30, 10.0)
    assert UiCommand().per_minute == 30
    assert UiCommand().host == ServeCommand().host == "127.0.0.1"


def test_more_requests_than_fit_are_told_to_come_back() -> None:
    with running(requests=2) as server, contextlib.ExitStack() as held:
        for _ in range(2):
            held.enter_context(server.hanging("/hang"))
        status, headers, error = server.post("/echo", {"text": "a"})
        assert (status, headers["retry-after"]) == (503, "1")
        assert error["what"] == "2 requests are at work or waiting."
        assert server.ask("GET", "/user")[0] == 400  # reading goes on


def test_a_client_has_so_many_requests_a_minute() -> None:
    with running(per_minute=3) as server:
        assert all(server.ask("GET", "/user")[0] == 400 for _ in range(5))
        answers = [server.post("/echo", {"text": "a"}) for _ in range(8)]  # in two minutes at most
    statuses = [status for status, *_ in answers]
    assert statuses[:3].count(200) >= 2
    assert 2 <= statuses.count(429) <= 5
    wait = next(headers["retry-after"] for status, headers, _ in answers if status == 429)
    assert 1 <= int(wait) <= 60


def test_a_token_is_asked_for_where_there_is_one() -> None:
    token = "a-token-of-24-characters"
    with running(token=token) as server:
        for given in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": token},
            {"authorization": "Bearer "},
            {"authorization": "Basic !!!"},
            {"authorization": "Basic " + base64.b64encode(f"{token}:".encode()).decode()},
        ):
            for method in ("GET", "POST"):
                status, headers, _ = server.ask(method, "/user", **given)
                assert status == 401, given
                assert headers["www-authenticate"].startswith("Basic ")
        basic = base64.b64encode(f"me:{token}".encode()).decode()
        for value in (f"Bearer {token}", f"bearer {token}", f"Basic {basic}"):
            assert server.post("/echo", {"text": "a"}, authorization=value)[0] == 200
        server.process.terminate()
        assert token not in "".join(server.process.communicate(timeout=60))


@pytest.mark.parametrize("token", ["", "too-short"])
def test_beyond_this_machine_a_token_is_needed(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELECTRA_TOKEN", token)
    with pytest.raises(ElectraError, match="a token of 16 characters is needed") as told:
        web.listen(web.application([], web.Limits()), "0.0.0.0")
    assert "ELECTRA_TOKEN" in told.value.fix
    assert "too-short" not in str(told.value)


def test_beyond_this_machine_it_says_so_loudly() -> None:
    with running("0.0.0.0", token="a-token-of-24-characters") as server:
        assert server.ask("GET", "/user")[0] == 401
        server.process.terminate()
        assert "LISTENING BEYOND THIS MACHINE" in server.process.communicate(timeout=60)[1]


def test_a_port_in_use_and_a_host_that_is_not_there() -> None:
    app = web.application([], web.Limits())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ElectraError, match=f"Port {port} is in use") as told:
            web.listen(app, port=port)
        assert "--port" in told.value.fix
    for host, port in (("no.such.host.invalid", 0), ("127.0.0.1", 1 << 17), ("x" * 300, 0)):
        with pytest.raises(ElectraError, match="Cannot listen"):
            web.listen(app, host, port)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_when_what_is_at_work_is_done(number: signal.Signals) -> None:
    with running() as server:
        with server.hanging("/hang?seconds=1") as connection:
            server.process.send_signal(number)
            assert answer_of(connection.getresponse())[0] == 200
        assert server.process.wait(60) == 75
        assert "Traceback" not in server.process.communicate()[1]
        with pytest.raises(ConnectionRefusedError):
            server.ask("GET", "/user")


def test_a_second_signal_ends_it_at_once() -> None:
    with running(seconds=600) as server, server.hanging("/hang"):
        server.process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(1)
        server.process.terminate()
        assert server.process.wait(60) == 128 + signal.SIGTERM
