"""What everything that listens has in common: limits, refusals and a clean end.

Comes in: starlette routes. Goes out: an application that refuses what it must before a route sees
it (`application`), and a server that binds to this machine alone unless told otherwise (`listen`).

|                                            | answer                                          |
|--------------------------------------------|-------------------------------------------------|
| a Host that is neither an address nor ours | 421: a name that was pointed here (rebinding)   |
| no or a wrong token, where there is one    | 401; Bearer, or the password of Basic           |
| a POST from a page of another origin       | 403                                             |
| too many requests of a client per minute   | 429 with Retry-After, if `Limits` has a number  |
| too many requests at work or waiting       | 503 with Retry-After                            |
| a body over the limit, announced or not    | 413, counted while it comes in                  |
| a body or an answer that takes too long    | 408, 504                                        |

Errors are JSON with what, where and fix, as everywhere else; paths and tracebacks stay here.

    app = application([Route("/try", handler, methods=["POST"])], Limits())
    raise SystemExit(listen(app, host, port, title="electra ui"))

A handler reads its JSON with `read_object` and `text_field`, raises `Refused` (or an ElectraError)
and computes in a thread of its own pool: a time-out ends the wait, not the thread.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import hmac
import ipaddress
import json
import os
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import EXIT_BUG, EXIT_STOPPED, EXIT_USER, ElectraError, StopRequest

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse as HTMLResponse
    from starlette.responses import JSONResponse, Response
    from starlette.responses import StreamingResponse as StreamingResponse
    from starlette.routing import BaseRoute
    from starlette.routing import Route as Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ImportError as error:
    raise ElectraError(
        f"A server needs the package {error.name}.",
        where="electra serve, electra ui",
        fix="pip install 'electra[serve]'",
    ) from error

TOKEN = "ELECTRA_TOKEN"  # the environment variable; an argument could be seen by every user
_TOKEN_CHARACTERS = 16  # the fewest
_CONNECTIONS = 500  # open at once
_HEADER_BYTES = 16 << 10
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data: blob:; connect-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Limits:
    """What a client may ask for; the defaults are for a page that people try out."""

    text: int = 2_000  # characters of a text
    body: int = 64 << 10  # bytes of a request
    bodies: Mapping[str, int] = field(default_factory=dict[str, int])  # of these paths instead
    requests: int = 18  # at work and waiting; reading (GET) is not counted
    per_minute: int | None = 30  # of one client, not counting GET
    seconds: float = 10.0  # until the answer begins


class Refused(ElectraError):
    """A request that is not carried out, and its HTTP status."""

    def __init__(
        self, status: int, what: str, *, where: str = "", fix: str = "", **headers: str
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.status, self.headers = status, {k.replace("_", "-"): v for k, v in headers.items()}


# ---------------------------------------------------------------------- what handlers use


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body; its content type must say that it is JSON.

    No form of another page can send that type, so this is a second fence beside the Origin.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        what = "The request is not marked as JSON."
        raise Refused(415, what, where="content-type", fix="send content-type: application/json")

    def no_number(name: str) -> Any:
        raise ValueError(f"{name} is no number of JSON")

    try:
        value = json.loads(await request.body(), parse_constant=no_number)
        if not isinstance(value, dict):
            raise ValueError("it is no object")
    except (ValueError, RecursionError) as error:
        what, fix = "The body is not the JSON it should be.", 'send an object such as {"text": "…"}'
        raise Refused(400, what, where="body", fix=fix) from error
    return value  # pyright: ignore[reportUnknownVariableType]


def text_field(values: Mapping[str, Any], name: str, limit: int) -> str:
    """A text of a JSON object, of `limit` characters at most."""
    text = values.get(name)
    if not isinstance(text, str):
        what = f"There is no text {name!r}." if text is None else f"{name!r} is no text."
        raise Refused(422, what, where=name, fix=f'send {{"{name}": "…"}}')
    if len(text) > limit:
        what = f"The text has {len(text):,} characters, {limit:,} are allowed."
        raise Refused(413, what, where=name, fix="send a shorter text, or one part after the other")
    if any("\ud800" <= c <= "\udfff" for c in text):
        what = "The text holds half of a character (a lone surrogate)."
        raise Refused(422, what, where=name, fix="send whole Unicode characters")
    return text


# ---------------------------------------------------------------------- the application


def application(
    routes: Sequence[BaseRoute],
    limits: Limits,
    *,
    hosts: Sequence[str] = (),
    lifespan: Callable[[Starlette], contextlib.AbstractAsyncContextManager[None]] | None = None,
) -> Guard:
    """Routes behind the limits. hosts: names, other than localhost, under which it is reached."""
    handlers: Any = {ElectraError: _answer, HTTPException: _answer, Exception: _answer}
    inner = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    inner.router.redirect_slashes = False
    return Guard(inner, limits, hosts)


class Guard:
    """Refuses before a route sees the request, and puts the headers on every answer."""

    def __init__(self, app: ASGIApp, limits: Limits, hosts: Sequence[str] = ()) -> None:
        self.app, self.limits = app, limits
        self.hosts = {"localhost", *(name.lower() for name in hosts)}
        self.token: str | None = None  # `listen` sets it
        self._at_work = 0
        self._minute, self._counts = 0, Counter[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # a websocket: closed unopened
            await send({"type": "websocket.close"})
            return
        failed: Exception | None = None
        started, body_read, seen = False, False, 0
        limit = self.limits.bodies.get(scope["path"], self.limits.body)

        async def counted() -> Message:
            nonlocal seen, body_read
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if seen > limit:
                    raise _too_large(limit)
                body_read = not message.get("more_body", False)
            return message

        async def with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if failed is None:  # else the time is no longer counted
                    deadline.reschedule(None)
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        counts = scope["method"] not in ("GET", "HEAD", "OPTIONS")
        self._at_work += counts
        try:
            try:
                async with asyncio.timeout(self.limits.seconds) as deadline:
                    self._check(scope, counts, limit)
                    await self.app(scope, counted, with_headers)
            except TimeoutError:
                failed = _too_late(self.limits.seconds, body_read)
            except Exception as error:
                failed = error
            # A route's own errors are answered already; starlette raises them once more.
            if failed is not None and not started:
                answer = await _answer(Request(scope, counted), failed)
                await answer(scope, counted, with_headers)
        finally:
            self._at_work -= counts

    def _check(self, scope: Scope, counts: bool, limit: int) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        name = _name(host)
        if name not in self.hosts and not _is_address(name):
            # Whoever points a name of his own at this machine (DNS rebinding) sends that name; what
            # is sent with an address was meant for this address.
            what = f"This server is not {name or 'nameless'}."
            raise Refused(421, what, where="host", fix="use its address, or allow the name")
        if self.token is not None and not _is_given(self.token, headers.get("authorization", "")):
            raise Refused(
                401,
                "The token is missing or wrong.",
                where="authorization",
                fix="send authorization: Bearer TOKEN; a browser asks for it as the password",
                www_authenticate='Basic realm="electra", charset="UTF-8"',
            )
        if not counts:
            return
        origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
        own = (f"http://{host}".lower(), f"https://{host}".lower())
        is_same = origin is None or origin.lower() in own
        if not is_same or site not in ("none", "same-origin"):
            what = "A page of another origin sent this request."
            raise Refused(403, what, where="origin", fix="open the page of this server itself")
        if self.limits.per_minute is not None:
            self._count(scope, self.limits.per_minute)
        if self._at_work > self.limits.requests:
            what = f"{self.limits.requests:,} requests are at work or waiting."
            raise Refused(503, what, fix="send it again in a second", retry_after="1")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise _too_large(limit)

    def _count(self, scope: Scope, most: int) -> None:
        now = time.monotonic()
        if (minute := int(now // 60)) != self._minute:
            self._minute = minute
            self._counts.clear()
        client = scope["client"][0] if scope.get("client") else ""
        self._counts[client] += 1
        if self._counts[client] > most:
            wait = str(60 - int(now % 60))
            what = f"{most:,} requests a minute are allowed."
            raise Refused(429, what, fix=f"wait {wait} seconds", retry_after=wait)


def _name(host: str) -> str:
    """A Host header without its port."""
    name = host.strip().lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]


def _is_address(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def _is_given(token: str, authorization: str) -> bool:
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "basic":
        with contextlib.suppress(ValueError):
            value = base64.b64decode(value, validate=True).decode().partition(":")[2]
    return hmac.compare_digest(value.strip().encode("utf-8", "replace"), token.encode())


def _too_large(limit: int) -> Refused:
    what = f"The request is larger than {limit:,} bytes."
    return Refused(413, what, where="body", fix="send less at once", connection="close")


def _too_late(seconds: float, body_read: bool) -> Refused:
    what = "There was no answer" if body_read else "The request was not complete"
    what, fix = f"{what} within {seconds:g} seconds.", "send less, or send it again later"
    return Refused(504 if body_read else 408, what, fix=fix, connection="close")


async def _answer(request: Request, error: Exception) -> Response:
    """An error as JSON; what only this machine's user should see goes to the log."""
    headers: Mapping[str, str] = {}
    path = request.scope["path"]  # not request.url, which is built from what the client says
    if isinstance(error, Refused):
        status, headers = error.status, error.headers
        shown = error
    elif isinstance(error, HTTPException):
        status, headers = error.status_code, error.headers or {}
        what = "There is no such page." if status == 404 else f"{error.detail}."
        shown = ElectraError(what, where=path, fix="see /")
    elif isinstance(error, ElectraError) and error.exit_code == EXIT_USER:
        status, where = 400, "" if "/" in error.where else error.where
        shown = ElectraError(error.what, where=where, fix=error.fix)
    else:
        status = 500
        shown = ElectraError("The server failed at this request.", fix="its log says why")
        if not isinstance(error, ClientDisconnect):
            print(f"electra: {request.method} {path!a} failed:", file=sys.stderr)
            traceback.print_exception(error)
    body = {"what": shown.what, "where": shown.where, "fix": shown.fix}
    return JSONResponse(body, status, headers=dict(headers))


# ---------------------------------------------------------------------- the server


def listen(app: Guard, host: str = "127.0.0.1", port: int = 0, *, title: str = "electra") -> int:
    """Answer requests until SIGTERM or SIGINT, then finish what is at work; the exit code.

    Beyond this machine only with a token from the environment, and not without a word. port 0:
    any that is free; the address is printed when it answers.
    """
    app.token = os.environ.get(TOKEN) or None
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=max(1, round(app.limits.seconds)),
        h11_max_incomplete_event_size=_HEADER_BYTES,
    )
    server = _Server(config)
    with _bind(host, port) as bound:
        address, port = bound.getsockname()[:2]
        if not ipaddress.ip_address(address).is_loopback:
            if app.token is None or len(app.token) < _TOKEN_CHARACTERS:
                what = f"Beyond this machine, a token of {_TOKEN_CHARACTERS} characters is needed."
                fix = f"set {TOKEN}, for example to what `openssl rand -hex 16` prints"
                raise ElectraError(what, where=f"--host {host}", fix=fix)
            print(
                f"electra: LISTENING BEYOND THIS MACHINE on {address}, without encryption: whoever "
                "reads the network reads texts and token; put a proxy with TLS in front",
                file=sys.stderr,
                flush=True,
            )
        name = f"[{address}]" if ":" in address else address
        server.greeting = f"{title}: http://{name}:{port} (Ctrl-C ends it)"
        try:
            server.run(sockets=[bound])
        except SystemExit:  # uvicorn's way to say that the application did not start; it says why
            return EXIT_BUG
    return EXIT_STOPPED


class _Server(uvicorn.Server):
    """Ends by the signals of this project, and says when it answers."""

    greeting = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.greeting, flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        with StopRequest() as self._stop:
            yield

    async def on_tick(self, counter: int) -> bool:
        return self._stop() or await super().on_tick(counter)


def _bind(host: str, port: int) -> socket.socket:
    try:
        if not 0 <= port < 1 << 16:  # getaddrinfo takes the rest of a division
            raise OverflowError("a port is a number from 0 to 65,535")
        # The protocol by name, or asyncio leaves Nagle's delay on: 40 ms for every answer.
        *form, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(*form)  # family, kind, protocol
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except (OSError, OverflowError, UnicodeError) as error:
        what, fix = f"Cannot listen: {error}.", "check --host and --port"
        if isinstance(error, PermissionError):
            fix = "choose one of 1024 or more with --port"
        elif getattr(error, "errno", None) == errno.EADDRINUSE:
            what = f"Port {port} is in use."
            fix = "end what listens there, or choose another with --port"
        raise ElectraError(what, where=f"{host}:{port}", fix=fix) from error
    return bound
