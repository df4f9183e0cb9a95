"""`electra serve`: a model behind HTTP, with requests that wait for each other computed together.

Comes in: whatever `detect`, `predict` and `embed` read. Goes out: a server with those of POST
/detect, /classify, /tag, /answer and /embed that the model can do, GET /health, /openapi.json and a
page that describes them. What is refused, and how, is in `web.py`.

A request waits in a queue until one of the workers, a thread per core, is free; it takes its share
of those that wait, at most `_REQUESTS` or `_CHARACTERS` of them, and computes them in forward
passes of texts of similar length. Under load it waits for others for `_PATIENCE`, else not at all.
An answer does not depend on what it was computed with, but for rounding; a request that fails,
fails alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from ..data.tokenizer import Tokenizer
from ..encoder import DiscriminatorHead, Encoder
from ..errors import ElectraError, nearest
from ..finetuning.features import TaskBatch, encode_texts, marked
from ..finetuning.glue import answer_questions, answer_texts
from ..finetuning.heads import Head, TaskModel
from ..finetuning.squad import Question
from ..finetuning.step import predict
from ..formats import hf, layout
from ..runtime import whole_vectors
from . import web
from .detect import cut, verdict, with_generator

Values = dict[str, Any]

_NAMES = ("detect", "classify", "tag", "answer", "embed")
_REQUESTS = 32  # that a worker computes together
_CHARACTERS = 1 << 14  # of these requests, or one: those behind it would wait too long
_PATIENCE = 0.002  # seconds that it waits for more of them
_PADDING = {"cpu": 24, "cuda": 4096}  # tokens that cost as much as another forward pass
_EXAMPLE = "A bird sang in the old tree."
_EMBED_LENGTH = 128  # tokens of a text that /embed reads, as `electra embed`
_STYLE = """\
:root { color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif; }
main { max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
pre { padding: .5rem; border: 1px solid; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
td { border-bottom: 1px solid; padding: .25rem .5rem .25rem 0; vertical-align: top; }
"""


# ---------------------------------------------------------------------- what a model can do


@dataclass(frozen=True)
class Endpoint:
    """One thing that can be asked for. The schemas are those of OpenAPI, and what is checked."""

    summary: str
    asked: dict[str, Values]  # schema of each field; one without a default must be given
    answered: dict[str, Values]
    example: Values
    compute: Callable[[list[Values]], list[Values]]  # one answer per request, or an error for all

    def read(self, given: Values, limit: int) -> Values:
        """The fields of a request, checked and with their defaults."""
        for name in given.keys() - self.asked.keys():
            what = f"There is no field {name!r:.99}."
            raise web.Refused(422, what, where="body", fix=nearest(name, self.asked))
        values: Values = {}
        for name, schema in self.asked.items():
            if schema["type"] == "string":
                values[name] = web.text_field(given, name, limit)
                continue
            value = values[name] = given.get(name, schema["default"])
            low, high = schema["minimum"], schema["maximum"]
            if type(value) is not int or not low <= value <= high:
                fix = f"use {low} to {high}"
                raise web.Refused(422, f"{name!r} is no such number.", where=name, fix=fix)
        return values


@dataclass(frozen=True)
class Service:
    """A loaded model: what it can do, and why it cannot do the rest."""

    endpoints: dict[str, Endpoint]
    absent: dict[str, str]
    facts: Values


def open_service(path: Path) -> Service:
    """Load a model and find out what can be asked of it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (hf._model_of(path) / "head.safetensors").is_file():
        tuned = hf.load_finetuned(path)
        tuned.model.requires_grad_(False).to(device)
        name, endpoint = _of_task(tuned, device)
        endpoints = {name: endpoint}
        encoder, tokenizer = tuned.model.encoder, tuned.tokenizer
        why = f"this model was fine-tuned for {tuned.task.kind}"
        facts: Values = {"task": tuned.task.name, "kind": tuned.task.kind, "tokens": tuned.length}
    else:
        endpoints, facts = dict[str, Endpoint](), {"kind": "encoder"}
        try:
            model = hf.load_pretrained(with_generator(path))
            network = model.network("discriminator")
        except ElectraError as error:  # the encoder of another model may still be of use
            loaded, why = hf.load_encoder(path), error.what.rstrip(".")
            encoder, tokenizer = loaded.build().to(device), loaded.tokenizer
        else:
            encoder, head = layout.build_discriminator(network)
            encoder.to(device)
            tokenizer, why = model.needed_tokenizer(), "this model is not fine-tuned"
            endpoints["detect"] = _detection(model, encoder, head.to(device), device)
            facts = {"kind": "discriminator", "tokens": network.config.max_positions}
    endpoints["embed"] = _embedding(encoder, tokenizer, device)
    needed = {
        "detect": "a pre-trained discriminator with its head",
        "classify": "a model fine-tuned for classification or regression",
        "tag": "a model fine-tuned for tagging",
        "answer": "a model fine-tuned for question answering",
    }
    absent = {
        name: f"{why}; /{name} needs {what}"
        for name, what in needed.items()
        if name not in endpoints
    }
    return Service(endpoints, absent, facts)


def _schema(kind: str, what: str, **more: Any) -> Values:
    return {"type": kind, "description": what, **more}


def _object(properties: dict[str, Values]) -> Values:
    return {"type": "object", "properties": properties}


def _of_task(tuned: hf.FineTuned, device: torch.device) -> tuple[str, Endpoint]:
    """The endpoint of a fine-tuned model, and its name."""
    task, length, padding = tuned.task, tuned.length, _PADDING[device.type]
    names = ("text", "text_pair")[: len(task.texts)]
    label = _schema("string", "the answer", enum=list(task.labels))

    def answers(asked: list[Values]) -> list[Values]:
        if task.kind == "qa":
            pairs = [(one["question"], one["context"]) for one in asked]
            questions = [Question(str(i), *pair, (), -1) for i, pair in enumerate(pairs)]
            return answer_questions(tuned, questions, device, padding=padding)
        if task.kind == "tagging":
            texts = [tuple(one["text"].split()) for one in asked]
        else:
            texts = [tuple(one[name] for name in names) for one in asked]
        return answer_texts(tuned, texts, device, padding=padding)

    if task.kind == "qa":
        part = _schema("string", "a part of the passage; empty if it holds no token")
        score = _schema("number", "logit of there being no answer")
        question, passage = _schema("string", "what is asked"), _schema("string", "the passage")
        return "answer", Endpoint(
            f"The words of a passage that answer a question. A passage of more than {length} "
            "tokens is read in overlapping windows; of a question, 64 tokens are read.",
            {"question": question, "context": passage},
            {"prediction": part, "no_answer_score": score},
            {"question": "Who sang?", "context": _EXAMPLE},
            answers,
        )
    if task.kind == "tagging":
        return "tag", Endpoint(
            "A tag for each word of a text; words are what white space separates. "
            f"A text of more than {length} tokens is read in parts.",
            {"text": _schema("string", "words with white space between them")},
            {
                "words": _schema("array", "the words", items={"type": "string"}),
                "prediction": _schema("array", "their tags", items=label),
            },
            {"text": "A bird sang in the old tree ."},
            answers,
        )
    what = "class"
    answered = {"prediction": label, "probability": _schema("number", "of that class")}
    if task.kind == "regression":
        what, answered = "number", {"prediction": _schema("number", "in the unit of the data")}
    return "classify", Endpoint(
        f"The {what} of a text{' and another' * (len(names) - 1)}, of which the first {length} "
        "tokens are read.",
        {name: _schema("string", column) for name, column in zip(names, task.texts, strict=True)},
        answered,
        dict.fromkeys(names, _EXAMPLE),
        answers,
    )


class _Replaced(Head):
    """The logit of *replaced* for each token, as the head of a task that is never trained."""

    def __init__(self, head: DiscriminatorHead) -> None:
        super().__init__()
        self.head = head

    def predict(self, h: Tensor, batch: TaskBatch) -> dict[str, Tensor]:  # noqa: ARG002
        return {"logits": self.head(h)}


class _Mean(Head):
    """The mean state of a row's tokens, as the head of a task that is never trained."""

    def predict(self, h: Tensor, batch: TaskBatch) -> dict[str, Tensor]:
        share = batch.mask / batch.mask.sum(1, keepdim=True)  # (B, T)
        return {"vector": torch.bmm(share[:, None], h)[:, 0]}


def _detection(
    model: hf.Pretrained, encoder: Encoder, head: DiscriminatorHead, device: torch.device
) -> Endpoint:
    tokenizer, longest = model.needed_tokenizer(), encoder.config.max_positions
    network = TaskModel(encoder, _Replaced(head))
    if model.generator is not None:
        model.generator.modules.to(device)

    def detections(asked: list[Values]) -> list[Values]:
        parts = [cut(model, one["text"]) for one in asked]
        rows = [row.x[0].tolist() for _, of_one in parts for row in of_one]
        marks = [[-1, *[0] * (len(row) - 2), -1] for row in rows]
        features = marked(rows, marks, range(len(rows)), tokenizer, longest)
        logits = predict(network, features, device, padding=_PADDING[device.type])["logits"]
        judged = iter(torch.from_numpy(logits).sigmoid().split([len(row) - 2 for row in rows]))
        answers: list[Values] = []
        for one, (encoding, of_one) in zip(asked, parts, strict=True):
            p = torch.cat([row.of(next(judged)) for row in of_one])
            found = verdict(model, one["text"], encoding, of_one, p, one["alternatives"])
            answers.append({"tokens": [asdict(token) for token in found.tokens]})
        return answers

    other = _object({"token": _schema("string", "a token"), "probability": _schema("number", "")})
    what = "what the generator, if there is one, would put there"
    token = {
        "token": _schema("string", "as in the vocabulary"),
        "start": _schema("integer", "its first character in the text, in Unicode code points"),
        "end": _schema("integer", "the one behind its last in the text, in Unicode code points"),
        "replaced": _schema("number", "probability that it was replaced"),
        "alternatives": _schema("array", what, items=other),
    }
    what = "how many the generator gives for a suspicious token, of those with 1 % or more"
    count = _schema("integer", what, minimum=0, maximum=10, default=3)
    return Endpoint(
        f"How likely each token of a text was replaced; texts of more than {model.row_length} "
        "tokens, with [CLS] and [SEP], are read in overlapping rows, those without one refused.",
        {"text": _schema("string", "the text"), "alternatives": count},
        {"tokens": _schema("array", "the text's tokens", items=_object(token))},
        {"text": _EXAMPLE},
        detections,
    )


def _embedding(encoder: Encoder, tokenizer: Tokenizer, device: torch.device) -> Endpoint:
    network, width = TaskModel(encoder, _Mean()), encoder.config.hidden_size
    length = min(_EMBED_LENGTH, encoder.config.max_positions)

    def vectors(asked: list[Values]) -> list[Values]:
        texts = [(one["text"],) for one in asked]
        features = encode_texts(texts, np.zeros(len(texts)), tokenizer, length)
        found = predict(network, features, device, padding=_PADDING[device.type])["vector"]
        found[features.lengths == 2] = 0
        return [{"vector": vector.tolist()} for vector in found]

    return Endpoint(
        f"A text as {width} numbers: the mean state of its first {length} tokens with [CLS] and "
        "[SEP], as `electra embed` gives it; zeros for a text without a token.",
        {"text": _schema("string", "the text")},
        {"vector": _schema("array", f"{width} numbers", items={"type": "number"})},
        {"text": _EXAMPLE},
        vectors,
    )


# ---------------------------------------------------------------------- requests together


@dataclass(frozen=True, eq=False)
class _Job:
    endpoint: Endpoint
    values: Values
    answer: Future[Values] = field(default_factory=Future[Values])


class Batcher:
    """Threads that compute what waits, several requests at a time."""

    def __init__(self, workers: int) -> None:
        self._waiting = deque[_Job]()
        self._ready = threading.Condition()
        self._idle, self._is_busy, self._closed = 0, False, False
        self._threads = [
            threading.Thread(target=self._work, name=f"serve-{i}", daemon=True)
            for i in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, endpoint: Endpoint, values: Values) -> Future[Values]:
        job = _Job(endpoint, values)
        with self._ready:
            self._waiting.append(job)
            self._ready.notify()
        return job.answer

    def close(self) -> None:
        """Compute what still waits, then end the threads."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        torch.set_num_threads(1)  # of this thread: the workers share the cores among them
        while jobs := self._take():
            groups: dict[int, list[_Job]] = {}
            for job in jobs:
                if job.answer.set_running_or_notify_cancel():  # else its client has gone
                    groups.setdefault(id(job.endpoint), []).append(job)
            for group in groups.values():
                _compute(group)

    def _take(self) -> list[_Job]:
        """This worker's share of what waits; nothing once all is done and it is closed."""
        with self._ready:
            self._idle += 1
            while not self._waiting and not self._closed:
                self._ready.wait()
                if self._is_busy:  # others may take them meanwhile
                    self._ready.wait_for(lambda: len(self._waiting) >= _REQUESTS, _PATIENCE)
            share = min(-(-len(self._waiting) // self._idle), _REQUESTS)
            self._idle -= 1
            jobs, room = list[_Job](), _CHARACTERS
            while len(jobs) < share and room > 0:
                jobs.append(self._waiting.popleft())
                room -= sum(len(v) for v in jobs[-1].values.values() if isinstance(v, str))
            self._is_busy = len(jobs) > 1
            if self._waiting:
                self._ready.notify()
            return jobs


@whole_vectors
@torch.inference_mode()
def _compute(jobs: Sequence[_Job]) -> None:
    """Answer requests of one endpoint; those that fail, fail alone."""
    try:
        answers = jobs[0].endpoint.compute([job.values for job in jobs])
    except Exception as error:
        if len(jobs) == 1:
            jobs[0].answer.set_exception(error)
        else:
            half = len(jobs) // 2
            _compute(jobs[:half])
            _compute(jobs[half:])
    else:
        for job, answer in zip(jobs, answers, strict=True):
            job.answer.set_result(answer)


# ---------------------------------------------------------------------- over HTTP


class Server:
    """The routes of a service."""

    def __init__(self, service: Service, limits: web.Limits, workers: int, name: str) -> None:
        self.service, self.limits, self.workers, self.name = service, limits, workers, name
        self.openapi = _openapi(service, limits, name)

    def application(self, hosts: Sequence[str] = ()) -> web.Guard:
        facts = {"status": "ok", "model": self.name, "version": __version__, **self.service.facts}
        facts["endpoints"] = [f"/{name}" for name in self.service.endpoints]
        pages: dict[str, web.Response] = {
            "/": web.HTMLResponse(_page(self.openapi["info"]["title"], self.service)),
            "/page.css": web.Response(_STYLE, media_type="text/css"),
            "/openapi.json": web.JSONResponse(self.openapi),
            "/health": web.JSONResponse(facts),
        }
        routes = [web.Route(f"/{name}", self._post(name), methods=["POST"]) for name in _NAMES]
        routes += [web.Route(path, page, methods=["GET"]) for path, page in pages.items()]
        return web.application(routes, self.limits, hosts=hosts, lifespan=self._running)

    @contextlib.asynccontextmanager
    async def _running(self, app: web.Starlette) -> AsyncGenerator[None]:
        del app
        self.batcher = Batcher(self.workers)
        try:
            # The first of everything takes longest; nobody should have to wait for that.
            for endpoint in self.service.endpoints.values():
                values = endpoint.read(endpoint.example, 1000)
                with contextlib.suppress(ElectraError):  # a tiny model may not read even that
                    await asyncio.wrap_future(self.batcher.submit(endpoint, values))
            yield
        finally:
            await asyncio.to_thread(self.batcher.close)

    def _post(self, name: str) -> Callable[[web.Request], Any]:
        endpoint = self.service.endpoints.get(name)

        async def answer(request: web.Request) -> web.Response:
            if endpoint is None:
                what = f"There is no /{name} here: {self.service.absent[name]}."
                raise web.Refused(404, what, where=f"/{name}", fix="see / for what there is")
            values = endpoint.read(await web.read_object(request), self.limits.text)
            future = self.batcher.submit(endpoint, values)
            return web.JSONResponse(await asyncio.wrap_future(future))

        return answer


def serve(
    model: Path,
    host: str,
    port: int,
    *,
    limits: web.Limits,
    workers: int | None = None,
    hosts: Sequence[str] = (),
) -> int:
    """Serve a model until it is told to stop; the exit code."""
    service, name = open_service(model), model.resolve().name
    workers = workers or (1 if torch.cuda.is_available() else len(os.sched_getaffinity(0)))
    app = Server(service, limits, workers, name).application(hosts)
    can = ", ".join(f"/{endpoint}" for endpoint in service.endpoints)
    return web.listen(app, host, port, title=f"electra serve {name} ({can})")


# ---------------------------------------------------------------------- its description


def _openapi(service: Service, limits: web.Limits, name: str) -> Values:
    """The description of the interface in OpenAPI 3.1."""

    def content(schema: Values, **more: Any) -> Values:
        return {"content": {"application/json": {"schema": schema, **more}}}

    error = content(_object({n: _schema("string", "") for n in ("what", "where", "fix")}))
    refusals = {
        "400": "the body is not JSON, or the model cannot read it",
        "413": f"a text of more than {limits.text:,} characters, or a body that is too large",
        "415": "the body is not marked as application/json",
        "422": "a field is missing, unknown or not what it should be",
        "503": f"more than {limits.requests:,} requests wait; Retry-After says for how long",
        "504": f"there was no answer within {limits.seconds:g} seconds",
    }
    refused = {status: {"description": why, **error} for status, why in refusals.items()}
    paths: Values = {}
    for path, endpoint in service.endpoints.items():
        needed = [n for n, schema in endpoint.asked.items() if "default" not in schema]
        asked = {
            n: schema | ({"maxLength": limits.text} if schema["type"] == "string" else {})
            for n, schema in endpoint.asked.items()
        }
        body = _object(asked) | {"required": needed, "additionalProperties": False}
        answer = {"description": "the answer", **content(_object(endpoint.answered))}
        paths[f"/{path}"] = {
            "post": {
                "operationId": path,
                "summary": endpoint.summary,
                "requestBody": {"required": True, **content(body, example=endpoint.example)},
                "responses": {"200": answer, **refused},
            }
        }
    health = {"description": "it answers", **content({"type": "object"})}
    paths["/health"] = {
        "get": {"operationId": "health", "summary": "What runs here.", "responses": {"200": health}}
    }
    info = {"title": f"electra serve {name}", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths}


def _page(title: str, service: Service) -> str:
    """The same for people, on a page that needs nothing from elsewhere."""
    parts: list[str] = []
    for path, endpoint in service.endpoints.items():
        example = json.dumps(endpoint.example, ensure_ascii=False)
        curl = f"curl -H 'content-type: application/json' -d '{example}' http://HOST/{path}"
        rows = [
            f"<tr><td>{kind}</td><td><code>{html.escape(n)}</code></td>"
            f"<td>{html.escape(schema['type'])}</td>"
            f"<td>{html.escape(schema['description'])}{_choices(schema)}</td></tr>"
            for kind, fields in (("asked", endpoint.asked), ("answered", endpoint.answered))
            for n, schema in fields.items()
        ]
        parts.append(
            f"<h2>POST /{path}</h2><p>{html.escape(endpoint.summary)}</p>"
            f"<pre>{html.escape(curl)}</pre><table>{''.join(rows)}</table>"
        )
    absent = "".join(f"<li>{html.escape(why)}</li>" for why in service.absent.values())
    title = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="stylesheet" href="page.css"></head><body><main><h1>{title}</h1>'
        '<p>The same as <a href="openapi.json">OpenAPI</a>; <a href="health">what runs here</a>. '
        "Errors are JSON with what, where and fix.</p>"
        f"{''.join(parts)}<h2>Not here</h2><ul>{absent}</ul></main></body></html>"
    )


def _choices(schema: Values) -> str:
    names = cast(list[str], schema.get("enum", schema.get("items", {}).get("enum", [])))
    return ": " + ", ".join(f"<code>{html.escape(n)}</code>" for n in names) if names else ""
