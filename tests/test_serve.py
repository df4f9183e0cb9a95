"""`electra serve`: answers do not depend on who else asks, and nobody's mistake is another's."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from electra.api import load_finetuned
from electra.config import EncoderConfig, GeneratorConfig, PretrainConfig
from electra.data.tokenizer import Tokenizer
from electra.encoder import Embeddings, Encoder, initialise
from electra.finetuning.glue import SQUAD, predict_rows
from electra.finetuning.heads import TaskModel, build_head, initialise_head
from electra.finetuning.tasks import Task
from electra.formats import card, hf, hf_export, layout
from electra.objectives import SpecialIds, build_objective
from electra.use import serve
from electra.use.detect import cut, detect
from electra.use.embed import embed
from electra.use.web import Limits

ROOT = Path(__file__).parents[1]
ENCODER = EncoderConfig(
    layers=2,
    hidden_size=20,
    ffn_size=28,
    attention_heads=2,
    embedding_size=14,
    max_positions=160,
    init="local",
)
SCRIPT = "<script>alert(1)</script>"
TASKS = {
    "classify": Task(
        name="mine",
        kind="classification",
        metric="accuracy",
        texts=("text",),
        labels=("dry", "wet", SCRIPT),
    ),
    "pairs": Task(name="pairs", kind="regression", metric="pearson", texts=("a", "b")),
    "tag": Task(name="ner", kind="tagging", metric="f1", labels=("O", "B-X", "I-X")),
    "answer": SQUAD["squad2"],
}
TEXTS = [
    "one old river",
    "all green stones hear all birds . " * 12,
    "",
    "   ",
    "Ångström 東京 😀 e\u0301 \u202e x",
    "\x00 \x1f \t",
    "a",
    "x" * 900,
    "one river sees one stone",
    *(f"one {'small ' * n}child follows one song ." for n in range(23)),
]


@pytest.fixture(scope="module")
def models(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each kind, with random weights."""
    out = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_export, "_compare", lambda *_: [])  # tested elsewhere, and slow to import
        for name, task in TASKS.items():
            encoder = Encoder(ENCODER, Embeddings(ENCODER, tokenizer.vocab_size))
            initialise(encoder, "local", seed=1)
            outputs = 1 if task.kind == "regression" else max(2, len(task.labels))
            head = build_head(task.kind, ENCODER, outputs)
            initialise_head(head, seed=2)
            for parameter in head.parameters():
                parameter.data *= 5  # so that answers differ
            hf_export.export_finetuned(
                TaskModel(encoder, head),
                task,
                "paper",
                tokenizer,
                out / name,
                results={},
                length=96,
            )
        config = PretrainConfig(encoder=ENCODER, generator=GeneratorConfig(width=0.5, depth=0.5))
        names = ("pad", "unk", "cls", "sep", "mask")
        special = SpecialIds(*(tokenizer.special_names[name] for name in names))
        tokenizer.save(out / "tokenizer")
        objective = build_objective(config, tokenizer.vocab_size, special)
        hf_export.export(objective, config, out / "tokenizer", out / "detect")
    return {name: out / name for name in (*TASKS, "detect")}


def server_of(model: Path, workers: int = 2, **limits: Any) -> serve.Server:
    given: dict[str, Any] = {"text": 2000, "requests": 100, "per_minute": None, "seconds": 120}
    return serve.Server(serve.open_service(model), Limits(**given | limits), workers, model.name)


def ask(server: serve.Server, *requests: tuple[str, Any]) -> list[tuple[int, Any]]:
    """Status and JSON of requests that are sent at the same time; without a body it is a GET."""
    app = server.application()

    async def one(path: str, body: Any) -> tuple[int, Any]:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": json.dumps(body).encode()}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "GET" if body is None else "POST",
            "path": path,
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        await app(scope, receive, send)
        text = b"".join(message.get("body", b"") for message in sent[1:])
        is_json = (b"content-type", b"application/json") in sent[0]["headers"]
        return sent[0]["status"], json.loads(text) if is_json else text.decode()

    async def all_of_them() -> list[tuple[int, Any]]:
        async with server._running(None):  # type: ignore[arg-type]
            return await asyncio.gather(*(one(*request) for request in requests))

    return asyncio.run(all_of_them())


def assert_close(found: Any, expected: Any) -> None:
    """The same JSON, with numbers within 1e-5."""
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert_close(value, expected[key])
    elif isinstance(found, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    elif isinstance(found, float):
        assert found == pytest.approx(expected, abs=1e-5)
    else:
        assert found == expected


def bodies(name: str) -> list[dict[str, Any]]:
    if name == "pairs":
        return [{"text": a, "text_pair": b} for a, b in zip(TEXTS, reversed(TEXTS), strict=True)]
    if name == "answer":
        return [{"question": f"who hears {i} ?", "context": t} for i, t in enumerate(TEXTS)]
    return [{"text": text} for text in TEXTS]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", ["classify", "pairs", "tag", "answer", "detect", "embed"])
def test_an_answer_does_not_depend_on_the_requests_beside_it(
    models: dict[str, Path], name: str, workers: int
) -> None:
    server = server_of(models["classify" if name == "embed" else name], workers)
    path = {"pairs": "classify"}.get(name, name)
    endpoint = server.service.endpoints[path]
    sizes: list[int] = []
    compute = endpoint.compute

    def counted(asked: list[Any]) -> list[Any]:
        sizes.append(len(asked))
        return compute(asked)

    object.__setattr__(endpoint, "compute", counted)
    together = ask(server, *((f"/{path}", body) for body in bodies(name)))
    assert max(sizes) > 1, "nothing was computed together"
    answered = [
        body for body, (status, _) in zip(bodies(name), together, strict=True) if status == 200
    ]
    values = [endpoint.read(body, 2000) for body in answered]
    assert_close(compute(values), [compute([one])[0] for one in values])  # nothing has to fall back
    for body, (status, found) in zip(bodies(name), together, strict=True):
        if name == "detect" and not body["text"].strip("\x00\x1f\t "):
            assert (status, found["what"]) == (400, "The text holds no token.")
        else:
            assert status == 200
            alone = compute([endpoint.read(body, 2000)])[0]
            assert_close(found, json.loads(json.dumps(alone)))


def test_answers_are_those_of_the_commands(models: dict[str, Path], tmp_path: Path) -> None:
    text = "one old river hears all birds ."
    [(_, found)] = ask(server_of(models["classify"]), ("/classify", {"text": text}))
    assert_close({"id": "0", **found}, predict_rows(models["classify"], text)[0])
    [(_, found)] = ask(server_of(models["pairs"]), ("/classify", {"text": text, "text_pair": "no"}))
    assert_close({"id": "0", **found}, predict_rows(models["pairs"], f"{text}\tno")[0])
    [(_, found)] = ask(server_of(models["tag"]), ("/tag", {"text": text}))
    assert_close({"id": "0", **found}, predict_rows(models["tag"], text)[0])
    question = {"question": "who ?", "context": text * 9}
    asked = {"paragraphs": [{"context": text * 9, "qas": [{"id": "0", "question": "who ?"}]}]}
    (tmp_path / "questions.json").write_text(json.dumps({"data": [asked]}))
    [(_, found)] = ask(server_of(models["answer"]), ("/answer", question))
    given = predict_rows(models["answer"], str(tmp_path / "questions.json"))[0]
    assert_close({"id": "0", **found}, given)
    assert found["prediction"] in text * 9
    [said] = load_finetuned(models["answer"]).predict([(question["question"], question["context"])])
    assert_close({"id": "0", **said}, {**given, **question})
    for name in ("detect", "tag"):
        answers = ask(server_of(models[name]), *(("/embed", {"text": t}) for t in (text, " ")))
        vectors = embed(models[name], [text, " "])
        assert np.abs(np.array([a["vector"] for _, a in answers]) - vectors).max() < 1e-5
        assert answers[1][1]["vector"] == [0.0] * 20
    detection = detect(models["detect"], text, alternatives=2)
    [(_, found)] = ask(server_of(models["detect"]), ("/detect", {"text": text, "alternatives": 2}))
    for token, expected in zip(found["tokens"], detection.tokens, strict=True):
        assert (token["token"], token["start"]) == (expected.token, expected.start)
        assert token["replaced"] == pytest.approx(expected.replaced, abs=1e-5)
        names = [alternative.token for alternative in expected.alternatives]
        assert [alternative["token"] for alternative in token["alternatives"]] == names
    assert any(token["alternatives"] for token in found["tokens"])


def test_a_request_that_fails_fails_alone(models: dict[str, Path]) -> None:
    server = server_of(models["classify"], workers=1)
    endpoint = server.service.endpoints["classify"]
    compute = endpoint.compute

    def fragile(asked: list[Any]) -> list[Any]:
        if any(one["text"] == "bad" for one in asked):
            raise RuntimeError("one of them cannot be computed")
        return compute(asked)

    object.__setattr__(endpoint, "compute", fragile)
    texts = ["good", "bad", "fine", "bad", *["good"] * 9, "bad"]
    found = ask(server, *(("/classify", {"text": text}) for text in texts))
    assert [status for status, _ in found] == [500 if t == "bad" else 200 for t in texts]
    assert "cannot be computed" not in json.dumps(found)


def test_what_is_computed_together_and_that_one_that_stopped_waiting_is_not() -> None:
    """Its client has gone, or its time was up, while the workers were busy with others."""
    begun, go_on = threading.Event(), threading.Event()
    computed: list[list[str]] = []

    def slow(asked: list[Any]) -> list[Any]:
        computed.append([one["text"] for one in asked])
        begun.set()
        assert go_on.wait(60)
        return asked

    endpoint = serve.Endpoint("", {}, {}, {}, slow)
    batcher = serve.Batcher(1)
    first = batcher.submit(endpoint, {"text": "first"})
    assert begun.wait(60)
    gone, stays = (batcher.submit(endpoint, {"text": text}) for text in ("gone", "stays"))
    long = [batcher.submit(endpoint, {"text": i * 7000}) for i in "abcde"]
    assert gone.cancel()
    go_on.set()
    assert first.result(60) == {"text": "first"}
    assert stays.result(60) == {"text": "stays"}
    assert [future.result(60)["text"][0] for future in long] == [*"abcde"]
    batcher.close()
    # And long texts do not wait for very many others.
    assert [[text[:5] for text in each] for each in computed] == [
        ["first"],
        ["stays", "aaaaa", "bbbbb", "ccccc"],
        ["ddddd", "eeeee"],
    ]


def test_waiting_requests_are_shared_among_idle_workers() -> None:
    """32 requests on one core while another has nothing to do would take twice as long."""
    both, threads = threading.Barrier(2), set[str]()

    def meet(asked: list[Any]) -> list[Any]:
        threads.add(threading.current_thread().name)
        both.wait(60)
        return asked

    batcher = serve.Batcher(2)
    with batcher._ready:  # so that both are there when the workers look
        futures = [batcher.submit(serve.Endpoint("", {}, {}, {}, meet), {}) for _ in range(2)]
    for future in futures:
        future.result(60)
    batcher.close()
    assert len(threads) == 2


@pytest.mark.parametrize(
    ("body", "status", "where"),
    [
        ({}, 422, "text"),
        ({"txt": "a"}, 422, "body"),
        ({"text": "a", "alternatives": 11}, 422, "alternatives"),
        ({"text": "a", "alternatives": True}, 422, "alternatives"),
        ({"text": "a", "alternatives": "3"}, 422, "alternatives"),
        ({"text": "a" * 2001}, 413, "text"),
        ({"text": " \n "}, 400, "text"),
        (["text"], 400, "body"),
    ],
)
def test_what_cannot_be_answered_is_told_why(
    models: dict[str, Path], body: Any, status: int, where: str
) -> None:
    [(found, error)] = ask(server_of(models["detect"]), ("/detect", body))
    assert (found, error["where"]) == (status, where)
    assert error["fix"]


def test_a_long_text_is_read_in_rows_beside_short_ones(models: dict[str, Path]) -> None:
    texts = ["a b", "a b c d e " * 90, "b " * 3]
    found = ask(server_of(models["detect"]), *(("/detect", {"text": text}) for text in texts))
    for text, (status, answer) in zip(texts, found, strict=True):
        wanted = detect(models["detect"], text)
        assert status == 200
        assert [t["token"] for t in answer["tokens"]] == [t.token for t in wanted.tokens]
        p = [t["replaced"] for t in answer["tokens"]]
        np.testing.assert_allclose(p, [t.replaced for t in wanted.tokens], atol=1e-5)
    assert len(cut(hf.load_pretrained(models["detect"]), texts[1])[1]) > 2


@pytest.mark.parametrize("name", [*TASKS, "detect", "encoder"])
def test_what_a_model_cannot_do_is_404_with_the_reason(
    models: dict[str, Path], name: str, tmp_path: Path
) -> None:
    model = models.get(name)
    if model is None:  # an encoder without any head, as transformers saves ElectraModel
        model = tmp_path / "encoder"
        loaded = hf.load_encoder(models["detect"])
        tensors = {f"encoder.{n}": t for n, t in loaded.tensors.items()}
        network = layout.Network("encoder", loaded.config, loaded.vocab_size, tensors)
        hf_export._write(model, network, loaded.tokenizer, card.Story({}), "unknown")
    server = server_of(model)
    can = {"pairs": {"classify"}, "encoder": set[str]()}.get(name, {name}) | {"embed"}
    (_, health), (_, openapi), (_, page), *found = ask(
        server,
        *(("/health", None), ("/openapi.json", None), ("/", None)),
        *((f"/{path}", {}) for path in serve._NAMES),
    )
    for path, (status, error) in zip(serve._NAMES, found, strict=True):
        assert status == (422 if path in can else 404), path
        if path not in can:
            assert error["what"].startswith(f"There is no /{path} here: ")
            assert f"/{path} needs a" in error["what"]
        assert (f"POST /{path}" in page) == (path in can)
        assert (f"/{path}" in openapi["paths"]) == (path in can)
    assert {path.strip("/") for path in health["endpoints"]} == can
    assert str(model.parent) not in json.dumps(health) + page


def test_the_description_is_true(models: dict[str, Path]) -> None:
    """Its examples are answered as its schemas say, and nothing in it is taken for HTML."""
    for name in (*TASKS, "detect"):
        server = server_of(models[name])
        [(_, openapi), (_, page)] = ask(server, ("/openapi.json", None), ("/", None))
        assert SCRIPT not in page
        assert not re.search(r"https?://(?!HOST)|<script|<img|@import", page)
        for path, operations in openapi["paths"].items():
            if "post" not in operations:
                continue
            body = operations["post"]["requestBody"]["content"]["application/json"]
            answer = operations["post"]["responses"]["200"]["content"]["application/json"]
            assert body["schema"]["required"] == list(body["example"])
            [(status, found)] = ask(server, (path, body["example"]))
            assert status == 200
            assert found.keys() == answer["schema"]["properties"].keys()
    assert "&lt;script&gt;" in ask(server_of(models["classify"]), ("/", None))[0][1]


@contextlib.contextmanager
def command(model: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "electra", "serve", str(model), "--port", "0", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found, process.communicate()
        yield process, int(found[1])
    finally:
        process.kill()
        process.communicate()


def memory_of(process: subprocess.Popen[str]) -> int:
    """MB that it takes now."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    assert found
    return int(found[1]) // 1024


def test_the_command_does_what_its_page_says_and_so_after_a_thousand_requests(
    models: dict[str, Path],
) -> None:
    """The commands of docs/serving.md, requests of all kinds over sixteen connections, the end."""
    page = (ROOT / "docs" / "serving.md").read_text()
    lines = [shlex.split(line) for line in page.splitlines() if line.startswith("curl ")]
    assert len(lines) == 4
    body = json.dumps({"text": "one old river"})
    wrong = (
        '{"text": 1}',
        "{",
        json.dumps({"text": "x" * 3000}),
        json.dumps({"text": "x" * 300000}),
    )
    with command(models["classify"], "--characters", "2000") as (process, port):

        def client(number: int) -> list[int]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            statuses: list[int] = []
            for i in range(63):
                sent = wrong[i // 9 % 4] if i % 9 == 8 else body
                path = "/classify" if number % 2 else "/embed"
                connection.request("POST", path, sent, {"content-type": "application/json"})
                response = connection.getresponse()
                response.read()
                statuses.append(response.status)
            connection.close()
            return statuses

        for line in lines if shutil.which("curl") else []:
            line[-1] = line[-1].replace("8000", str(port))
            done = subprocess.run([*line, "--silent"], capture_output=True, check=True, timeout=60)
            assert "what" not in json.loads(done.stdout), line
        before = memory_of(process)
        with ThreadPoolExecutor(16) as pool:
            statuses = [status for found in pool.map(client, range(16)) for status in found]
        assert len(statuses) == 1008
        assert {s: statuses.count(s) for s in set(statuses)} == {
            200: 896,
            422: 32,
            400: 32,
            413: 48,
        }
        assert memory_of(process) - before < 50
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
        assert process.communicate()[1] == ""


def test_a_worker_computes_with_one_thread(models: dict[str, Path]) -> None:
    """Or the workers fight for the cores."""
    server, seen = server_of(models["classify"]), list[int]()
    compute = server.service.endpoints["embed"].compute

    def looking(asked: list[Any]) -> list[Any]:
        seen.append(torch.get_num_threads())
        return compute(asked)

    object.__setattr__(server.service.endpoints["embed"], "compute", looking)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    ask(server, *[("/embed", {"text": "a"})] * 9)
    assert set(seen) == {1}
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
