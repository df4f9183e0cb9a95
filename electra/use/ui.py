"""`electra ui`: one page to try a model, watch runs, fine-tune on a table and look inside.

Comes in: a model with its generator (or a discriminator alone, or none), and a folder of runs. Goes
out: the files in page/ and, for them, a small JSON interface behind the limits of web.py. Runs,
tables and classifiers are known by their names in that folder: a request only ever picks one of the
names that are there, so no path is made of what a client says. Training is `electra finetune` in a
process of its own, one at a time; what is dropped in lies in RUNS/uploads and nowhere else.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from ..config import ObjectiveConfig, PretrainConfig, flat, from_dict, to_dict
from ..corruption import choose_positions, num_masked, sample
from ..encoder import Block
from ..errors import EXIT_STOPPED, ElectraError
from ..files import read_json, reading, storage_errors, write_atomic
from ..finetuning import tasks
from ..finetuning.features import encode_texts
from ..finetuning.step import predict
from ..formats import hf, layout
from ..randomness import Purpose, StepRng
from ..runlog import read_metrics
from ..runtime import whole_vectors
from ..studies.records import HELD_OUT, is_finite, read_pretraining, read_results
from . import web
from .detect import LIKELY, Row, cut, hidden_in_turn, probabilities, with_generator
from .web import JSONResponse, Refused, Request, read_object, text_field

UPLOAD_BYTES = 16 << 20  # of one table
UPLOADS_BYTES = 256 << 20  # of all tables in the folder
_WORKERS = 2  # requests that compute at the same time
_ALTERNATIVES = 8  # of the generator, per place
_EXPLORED = 96  # tokens of a text in Explore, where each of them is asked apart
_MOST_RUNS = 200
_MOST_SHOWN = 8  # runs in one picture
_POINTS = 400  # of a curve
_TABLES = (".csv", ".tsv", ".jsonl")
_PAGE = Path(__file__).parent / "page"
_TYPES = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}

Json = dict[str, Any]


def ui(model: Path | None, runs: Path, host: str, port: int, per_minute: int) -> int:
    """Answer until the process is asked to stop."""
    return web.listen(Page(model, runs, per_minute).app, host, port, title="electra ui")


class Page:
    """The page's state: the model, the folder of runs, and the job under way."""

    def __init__(self, model: Path | None, runs: Path, per_minute: int) -> None:
        self.path, self.folder = model, runs
        self.limits = web.Limits(bodies={"/api/upload": UPLOAD_BYTES}, per_minute=per_minute)
        self.model = hf.load_pretrained(with_generator(model)) if model else None
        if self.model is not None:
            self.model.network("discriminator")
            self.model.needed_tokenizer()
        self.work: Job | None = None
        self._pool = ThreadPoolExecutor(_WORKERS, "compute")
        self._seen: dict[Path, tuple[Any, Any]] = {}
        self._loaded: tuple[Path, float, hf.FineTuned] | None = None
        self._uploading = False
        read = (self.info, self.runs, self.job, self.download)
        write = (self.detect, self.explore, self.upload, self.finetune, self.cancel, self.classify)
        pages = {
            name: web.Response((_PAGE / name).read_bytes(), media_type=kind)
            for name, kind in _TYPES.items()
        }
        pages[""] = pages["index.html"]
        routes = [web.Route(f"/{name}", page, methods=["GET"]) for name, page in pages.items()]
        routes += [web.Route(f"/api/{work.__name__}", work) for work in read]
        routes += [web.Route(f"/api/{work.__name__}", work, methods=["POST"]) for work in write]
        self.app = web.application(routes, self.limits, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncGenerator[None]:
        yield
        if self.work is not None:
            await asyncio.to_thread(self.work.end)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _compute(self, work: Callable[..., Any], *args: Any) -> JSONResponse:
        loop = asyncio.get_running_loop()
        return JSONResponse(await loop.run_in_executor(self._pool, work, *args))

    def _needed_model(self) -> hf.Pretrained:
        if self.model is None:
            raise Refused(409, "There is no model.", fix="start electra ui with --model")
        return self.model

    async def info(self, _: Request) -> JSONResponse:
        about: Json | None = None
        if self.model is not None and self.path is not None:
            name = "/".join(self.path.resolve().parts[-2:])
            about = {"name": name, "generator": self.model.generator is not None}
        limits = {"text": self.limits.text, "upload": UPLOAD_BYTES}
        info = {"version": __version__, "model": about, "limits": limits}
        return JSONResponse(info | {"runs": self.folder.resolve().name})

    # ------------------------------------------------------------------ the networks

    async def detect(self, request: Request) -> JSONResponse:
        model, given = self._needed_model(), await read_object(request)
        text = text_field(given, "text", self.limits.text)
        masked, seed, forced = given.get("masked"), given.get("seed", 0), given.get("forced", {})
        if not _is_count(seed, 1 << 32):
            raise Refused(422, "The seed is no whole number below 2³².", where="seed")
        places = cast(list[Any], masked) if isinstance(masked, list) else [None]
        if masked is not None and not all(_is_count(i, 1 << 16) for i in places):
            raise Refused(422, "The places are no list of whole numbers.", where="masked")
        try:
            choices = {int(place): int(token) for place, token in dict(forced).items()}
        except (TypeError, ValueError) as error:
            raise Refused(422, "No token is forced like this.", where="forced") from error
        return await self._compute(corrupt, model, text, masked, seed, choices)

    async def explore(self, request: Request) -> JSONResponse:
        model, given = self._needed_model(), await read_object(request)
        return await self._compute(explore, model, text_field(given, "text", self.limits.text))

    # ------------------------------------------------------------------ runs

    async def runs(self, request: Request) -> JSONResponse:
        return await self._compute(self._runs, request.query_params.getlist("show"))

    def _runs(self, names: Sequence[str]) -> Json:
        found = find_runs(self.folder)
        locked = _locked_files()
        listed = [self._describe(path, name, locked) for name, path in found.items()]
        whole = {run["name"] for run in listed if run["state"] != "damaged"}
        shown = [name for name in names if name in whole][:_MOST_SHOWN]
        curves: dict[str, Json] = {}
        changed: list[list[str]] = []
        with contextlib.suppress(ElectraError):  # of a run that is being deleted or written anew
            for name in shown:
                curves[name] = self._once(found[name], _curves)
            with reading(self.folder):
                changed = _settings(found, shown)
        return {"runs": listed, "curves": curves, "differences": changed}

    def _once(self, path: Path, read: Callable[[Path], Json]) -> Json:
        """What `read` makes of a run's files, read again when they have changed."""
        files = [path / name for name in ("metrics.jsonl", "run.json", "results.json")]
        stats = [(f.stat().st_mtime_ns, f.stat().st_size) if f.is_file() else 0 for f in files]
        key = path / read.__name__
        if key not in self._seen or self._seen[key][0] != stats:
            with reading(path):
                self._seen[key] = (stats, read(path))
        return self._seen[key][1]

    def _describe(self, path: Path, name: str, locked: set[int]) -> Json:
        try:
            about = dict(self._once(path, _summary))
        except ElectraError as error:
            what = error.what.replace(str(path), name)
            return {"name": name, "state": "damaged", "running": False, "warnings": [what]}
        lock, log = path / ".lock", path / "metrics.jsonl"
        about["running"] = lock.is_file() and lock.stat().st_ino in locked
        age = time.time() - log.stat().st_mtime if log.is_file() else 0.0
        about["warnings"] = [*about["warnings"], *_moment_warnings(path, about, age)]
        return {**about, "name": name, "age": round(age)}

    # ------------------------------------------------------------------ fine-tuning

    async def upload(self, request: Request) -> JSONResponse:
        """A table as the body, its name in the query; answers with a preview of it."""
        name = Path(request.query_params.get("name", "").replace("\\", "/")).name
        suffix = Path(name).suffix.lower()
        if suffix not in _TABLES:
            what = f"This is no {' '.join(_TABLES)} file."
            raise Refused(415, what, where="name", fix="save the table as CSV")
        if self._uploading:
            raise Refused(503, "Another table is coming in.", fix="try again", retry_after="2")
        self._uploading = True
        try:
            data = await request.body()
            return await self._compute(self._store, Path(name).stem, suffix, data)
        finally:
            self._uploading = False

    def _store(self, stem: str, suffix: str, data: bytes) -> Json:
        folder = self.folder / "uploads"
        used = sum(path.stat().st_size for path in self._tables().values())
        if used + len(data) > UPLOADS_BYTES:
            what = f"The tables in {folder.name} already take {used / 2**20:,.0f} MB."
            raise Refused(507, what, where="uploads", fix="delete those you no longer need")
        path = folder / hashlib.sha256(data).hexdigest()[:12] / f"{_plain(stem)}{suffix}"
        with storage_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
        try:
            return {"table": str(path.relative_to(folder)), "name": stem + suffix, **preview(path)}
        except ElectraError as error:
            path.unlink()
            with contextlib.suppress(OSError):  # the same content has another name
                path.parent.rmdir()
            where = error.where.replace(str(path), stem + suffix)
            raise Refused(422, error.what, where=where, fix=error.fix) from error

    def _tables(self) -> dict[str, Path]:
        folder = self.folder / "uploads"
        return {str(path.relative_to(folder)): path for path in folder.glob("*/*.*")}

    async def finetune(self, request: Request) -> JSONResponse:
        self._needed_model()
        given = await read_object(request)
        table = self._tables().get(str(given.get("table")))
        if table is None:
            raise Refused(404, "There is no such table.", where="table", fix="drop it in again")
        known = [c["name"] for c in (await asyncio.to_thread(preview, table))["columns"]]
        listed, label = given.get("columns"), str(given.get("label"))
        columns = [str(name) for name in cast(Any, listed)] if isinstance(listed, list) else []
        wanted = {*columns, label}
        if not 1 <= len(columns) <= 2 or len(wanted) != len(columns) + 1 or not wanted <= {*known}:
            what = "One or two columns of text and another one of labels are needed."
            raise Refused(422, what, where="columns", fix=f"known here: {', '.join(known[:20])}")
        if "" in wanted or any("," in name for name in columns):
            what = "The name of a column is empty or has a comma."
            raise Refused(422, what, where="columns", fix="rename it in the table")
        epochs, seeds = given.get("epochs", 3), given.get("seeds", 1)
        if not (_is_count(epochs, 51) and _is_count(seeds, 6) and epochs and seeds):
            raise Refused(422, "1 to 50 passes and 1 to 5 seeds are possible.", where="epochs")
        if self.work is not None and self.work.state == "running":
            what = f"{self.work.name} is being trained; there is one at a time."
            raise Refused(409, what, where="job", fix="wait for it, or cancel it")
        names = (f"{table.stem}-{i}" for i in range(1, 100))
        name = next((name for name in names if not (self.folder / name).exists()), None)
        if name is None:
            what = f"There are 99 fine-tunings of {table.stem} already."
            raise Refused(507, what, where="runs", fix="delete those you no longer need")
        out = self.folder / name
        command = ["--model", str(self.path), "--data", str(table), "--out", str(out)]
        command += [f"--text={','.join(columns)}", f"--label={label}"]
        command += ["--epochs", str(epochs), "--seeds", str(seeds)]
        self.work = Job(name, out, command)
        return JSONResponse(self.work.describe())

    async def cancel(self, _: Request) -> JSONResponse:
        if self.work is None or self.work.state != "running":
            raise Refused(409, "Nothing is being trained.", where="job")
        self.work.cancel()
        return JSONResponse(self.work.describe())

    async def job(self, _: Request) -> JSONResponse:
        return await self._compute(self._job)

    def _job(self) -> Json:
        job = self.work.describe() if self.work else None
        return {"job": job, "classifiers": list(self._classifiers().values())}

    def _classifiers(self) -> dict[str, Json]:
        """What fine-tuning made of one or two texts, and can be tried: by name."""
        found: dict[str, Json] = {}
        for name, path in find_runs(self.folder).items():
            with contextlib.suppress(ElectraError):
                about = self._once(path, _results) if (path / "model").is_dir() else {}
                if about.get("kind") in ("classification", "regression"):
                    found[name] = {"name": name, **about}
        return dict(sorted(found.items(), key=lambda item: -item[1]["written"]))

    def _classifier(self, name: object) -> Path:
        if str(name) not in self._classifiers():
            raise Refused(404, "There is no such classifier.", where="run", fix="choose another")
        return self.folder / str(name)

    async def classify(self, request: Request) -> JSONResponse:
        given = await read_object(request)
        texts = given.get("texts")
        if not isinstance(texts, list) or not 1 <= len(cast(Any, texts)) <= 2:
            raise Refused(422, "One text or two are needed.", where="texts")
        both = [text_field({"text": text}, "text", self.limits.text) for text in cast(Any, texts)]
        return await self._compute(self._classify, given.get("run"), both)

    def _classify(self, name: object, texts: list[str]) -> Json:
        path = self._classifier(name)
        written = (path / "model" / "electra.json").stat().st_mtime
        if self._loaded is None or self._loaded[:2] != (path, written):
            self._loaded = (path, written, hf.load_finetuned(path))
        tuned = self._loaded[2]
        if len(texts) != len(tuned.task.texts):
            raise Refused(422, f"The model reads {len(tuned.task.texts)} texts.", where="texts")
        features = encode_texts([tuple(texts)], np.zeros(1), tuned.tokenizer, tuned.length)
        logits = torch.from_numpy(predict(tuned.model, features, torch.device("cpu"))["logits"][0])
        if tuned.task.kind == "regression":
            return {"value": float(logits[0])}
        both = zip(tuned.task.labels, logits.softmax(-1).tolist(), strict=True)
        return {"classes": [{"label": label, "p": share} for label, share in both]}

    async def download(self, request: Request) -> web.StreamingResponse:
        name = request.query_params.get("run")
        folder = await asyncio.to_thread(self._classifier, name) / "model"
        plain = _plain(str(name))
        head = {"content-disposition": f'attachment; filename="{plain}.zip"'}
        head["content-type"] = "application/zip"
        return web.StreamingResponse(_zipped(folder, plain), headers=head)


# ---------------------------------------------------------------------- the networks


def _is_count(value: object, below: int) -> bool:
    return type(value) is int and 0 <= value < below


def _pieces(encoding: Any, text: str) -> list[Json]:
    """The tokens with their characters, and whether white space stands before them."""
    pieces: list[Json] = []
    end = 0
    for start, stop in encoding.offsets:
        gap = text[end:start]
        pieces.append({"text": text[start:stop], "space": bool(gap), "break": "\n" in gap})
        end = stop
    return pieces


@whole_vectors
@torch.no_grad()
def corrupt(
    model: hf.Pretrained, text: str, masked: list[int] | None, seed: int, forced: dict[int, int]
) -> Json:
    """The text as training would corrupt it, and what the discriminator says of every token.

    masked: places of tokens, or None for 15 % of them as in training. forced: tokens that the
    generator has to put, by place. Every place has its own draw, whatever else is masked.
    """
    network, tokenizer = model.network("discriminator"), model.needed_tokenizer()
    encoding, rows = cut(model, text)
    x = torch.tensor(encoding.ids)  # (N,)
    count, vocab_size = len(x), tokenizer.vocab_size
    rng = StepRng(seed, torch.tensor(0), torch.tensor([0]))
    pieces = _pieces(encoding, text)
    if model.generator is None:  # which would fill in what is masked
        masked = []
    if masked is None:
        at = _as_in_training(count, rng)
    else:
        at = torch.tensor(sorted({i for i in masked if i < count}), dtype=torch.int64)
    x_corrupt = x.clone()
    if len(at):
        g = _guess(model, rows, x, at)[:, :vocab_size].float()  # (M, V)
        drawn = sample(g, rng.uniform(Purpose.SAMPLE, count)[0, at])
        p, best = g.softmax(-1), g.topk(min(_ALTERNATIVES, vocab_size)).indices
        for k, place in enumerate(at.tolist()):
            put = forced.get(place, int(drawn[k]))
            if not 0 <= put < vocab_size:
                raise Refused(422, "There is no such token.", where="forced")
            x_corrupt[place] = put
            likely = [i for i in best[k].tolist() if p[k, i] >= LIKELY]
            ids = list(dict.fromkeys([*likely, int(drawn[k]), put, encoding.ids[place]]))
            named = zip(ids, tokenizer.decode_tokens(ids), p[k, ids].tolist(), strict=True)
            pieces[place] |= {
                "masked": True,
                "drawn": int(drawn[k]),
                "put": put,
                "own": encoding.ids[place],
                "alternatives": [{"id": i, "token": name, "p": share} for i, name, share in named],
            }
    before, after = (
        torch.cat([row.of(probabilities(network, row.filled(ids))) for row in rows])
        for ids in (x, x_corrupt)
    )
    changed, now = (x_corrupt != x).tolist(), tokenizer.decode_tokens(x_corrupt.tolist())
    for i, piece in enumerate(pieces):
        piece |= {"replaced": changed[i], "before": float(before[i]), "p": float(after[i])}
        piece["shown"] = now[i] if changed[i] else piece["text"]
    return {"tokens": pieces, "masked": at.tolist(), "seed": seed}


def _as_in_training(count: int, rng: StepRng) -> Tensor:
    """Places to mask in a text of `count` tokens, in order."""
    inside = torch.ones(1, count + 2, dtype=torch.bool)
    inside[0, [0, -1]] = False
    length, settings = torch.tensor([count + 2]), ObjectiveConfig()
    slots = int(num_masked(length, count, settings))
    return choose_positions(inside, length, slots, settings, rng).at[0].sort().values - 1


def _guess(model: hf.Pretrained, rows: list[Row], x: Tensor, at: Tensor) -> Tensor:
    """The generator's logits at these places, all of them masked, (M, V)."""
    encoder, head = layout.build_generator(model.network("generator"))
    x_masked, states = x.index_fill(0, at, model.needed_tokenizer().mask_id), list[Tensor]()
    for row in rows:
        if len(places := row.places(at)):
            seen = row.filled(x_masked)  # (1, T)
            states.append(encoder(seen, torch.zeros_like(seen), None, None)[0, places])
    return head(torch.cat(states), encoder.embeddings.word.weight)


@whole_vectors
@torch.no_grad()
def explore(model: hf.Pretrained, text: str) -> Json:
    """How surprising each token is to either network, and what every head looks at.

    Attention is (L, H, T, T) in 255ths, base64, with [CLS] and [SEP]; `looks` says for each head
    which share of it goes to the token before, itself, the one after, the two ends and the rest.
    """
    network, tokenizer = model.network("discriminator"), model.needed_tokenizer()
    encoding, rows = cut(model, text)
    if len(encoding.ids) > (most := min(_EXPLORED, len(rows[0].x[0]) - 2)):
        what = f"The text has {len(encoding.ids)} tokens, {most} can be explored at once."
        raise Refused(413, what, where="text", fix="give a shorter text")
    x = rows[0].x  # attention goes no further than a row
    pieces = _pieces(encoding, text)
    for piece, p in zip(pieces, probabilities(network, x).tolist(), strict=True):
        piece["p"] = p
    if model.generator is not None:
        for places, g in hidden_in_turn(model, x, torch.arange(len(pieces)) + 1):
            log_p = g[:, : tokenizer.vocab_size].float().log_softmax(-1)  # (S, V)
            best = tokenizer.decode_tokens(log_p.argmax(-1).tolist())
            own = log_p[torch.arange(len(places)), x[0, places]]
            for i, name, value in zip(places.tolist(), best, own.tolist(), strict=True):
                pieces[i - 1] |= {"bits": -value / math.log(2), "best": name}
    a = _attention(network, x)  # (L, H, T, T)
    T = x.shape[1]
    ends = a[..., [0, T - 1]].sum(-1)[..., 1:-1].mean(-1)  # of the tokens in between
    looks = [a.diagonal(k, -2, -1)[..., 1:-1].sum(-1) / max(1, T - 2) for k in (-1, 0, 1)]
    shares = torch.stack([*looks, ends], -1)  # (L, H, 4)
    shares = torch.cat([shares, (1 - shares.sum(-1, keepdim=True)).clamp(min=0)], -1)
    packed = (a * 255).round().to(torch.uint8).numpy().tobytes()
    return {
        "tokens": pieces,
        "shape": list(a.shape),
        "attention": base64.b64encode(packed).decode(),
        "looks": [[[round(v, 3) for v in head] for head in layer] for layer in shares.tolist()],
    }


def _attention(network: Any, x: Tensor) -> Tensor:
    """softmax(q kᵀ / √K) of every block and head, (L, H, T, T)."""
    encoder, _ = layout.build_discriminator(network)
    c, found = encoder.config, list[Tensor]()
    h = encoder.embeddings(x, torch.zeros_like(x))
    h = h if encoder.project is None else encoder.project(h)
    for block in encoder.blocks:
        assert isinstance(block, Block)
        q, k, _ = block.qkv(h).view(*h.shape[:2], 3, c.attention_heads, c.head_size).unbind(2)
        score = torch.einsum("bthk,bshk->bhts", q, k)[0] / math.sqrt(c.head_size)
        found.append(score.float().softmax(-1))
        h = block(h, None, None)
    return torch.stack(found)


# ---------------------------------------------------------------------- runs


def find_runs(folder: Path) -> dict[str, Path]:
    """Runs of pre-training and fine-tuning in a folder, at most three levels down, by name."""
    found: dict[str, Path] = {}
    for root, names, files in os.walk(folder):
        path = Path(root)
        depth = len(path.relative_to(folder).parts)
        names[:] = sorted(n for n in names if n.isprintable() and not n.startswith("."))
        if depth and {"run.json", "finetune.json", "results.json"} & {*files}:
            found[str(path.relative_to(folder))] = path
            names.clear()
        elif depth == 3:
            names.clear()
        if len(found) == _MOST_RUNS:
            break
    return found


def _locked_files() -> set[int]:
    """Numbers of the files that processes hold (`files.exclusive`).

    Asked for at the kernel: to try the lock would hold it for a moment, and a run that starts in
    this moment would refuse. Devices are left out: some file systems tell another one in `stat`.
    """
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return set()
    held = (line.split() for line in lines if " FLOCK " in line and "->" not in line)
    return {int(line[5].rpartition(":")[2]) for line in held}


def _summary(path: Path) -> Json:
    """What is known of a run until its files change."""
    if not (path / "run.json").is_file():
        run = read_results(path, path.name, None)
        newest = {} if "median" not in run else {f"median {run['metric']}": run["median"]}
        about: Json = {"kind": "fine-tuning", "recipe": run["task"], "newest": newest}
        done = run["state"] == "finished"
        return about | {"state": run["state"], "share": float(done), "warnings": []}
    run = read_pretraining(path, path.name)
    metrics = read_metrics(path)
    share = re.search(r"(\d+) %", run["state"])
    numbers = {name: run[key] for key, name in HELD_OUT.items() if is_finite(run[key])}
    about = {"kind": "pre-training", "recipe": run["recipe"], "state": run["state"]}
    about |= {"share": int(share[1]) / 100 if share else 1.0, "steps": run["steps"]}
    about |= {"newest": numbers, "warnings": health(metrics)}
    times = [m["seconds"] for m in metrics if m["kind"] == "train"]
    about["every"] = float(np.median(np.diff(times))) if len(times) > 2 else 60.0
    return about


def health(metrics: Sequence[Json]) -> list[str]:
    """Sentences on what the log of a pre-training run shows to be wrong."""
    train = [m for m in metrics if m["kind"] == "train"]
    held = [m for m in metrics if m["kind"] == "eval"]
    found: list[str] = []
    if bad := max((int(m.get("bad_steps") or 0) for m in train), default=0):
        found.append(f"{bad:,} steps gave a gradient that is not finite; they were left out.")
    if odd := next((m for m in train if isinstance(m.get("loss"), str)), None):
        found.append(f"The loss was {odd['loss']} at step {odd['step']:,}.")
    last = held[-1]["step"] if held else 0
    told = [m["warning"] for m in metrics if m.get("warning") and m["step"] >= last]
    found += [text[:1].upper() + text[1:] for text in dict.fromkeys(map(str, told))]
    # Where the generator gets better the discriminator's loss may rise: its AUC tells more.
    part = len(held) // 3
    if part >= 2:
        for key, sign in (("mlm_loss", -1), ("disc_auc", 1)):
            values = [sign * m[key] if isinstance(m.get(key), float) else -math.inf for m in held]
            if max(values[-part:]) > max(values[:-part]) + 2e-3 * abs(max(values[:-part])):
                break
        else:
            what = "On held-out text neither the generator nor the discriminator has improved since"
            found.append(f"{what} step {held[-part - 1]['step']:,}.")
    return found


def _moment_warnings(path: Path, about: Json, age: float) -> list[str]:
    """Sentences on what only this moment shows."""
    if about["state"] == "finished":
        return []
    found: list[str] = []
    if not about["running"]:
        found.append("Stopped before its end; the same command continues it.")
    elif "every" in about and age > max(120, 10 * about["every"]):  # fine-tuning logs at its end
        found.append(f"No new number for {age / 60:,.0f} minutes.")
    checkpoints = sorted((path / "checkpoints").glob("step-*"))
    size = sum(file.stat().st_size for file in checkpoints[-1].iterdir()) if checkpoints else 0
    if size and shutil.disk_usage(path).free < 2 * size:
        found.append("The disk has no room for two more checkpoints.")
    return found


def _curves(path: Path) -> Json:
    """Numbers by kind and name, with their steps and minutes; at most so many points."""
    metrics = read_metrics(path)
    clock = [(m["step"], m["seconds"]) for m in metrics if isinstance(m.get("seconds"), float)]
    curves: Json = {}
    for kind in ("train", "eval"):
        lines = [m for m in metrics if m["kind"] == kind]
        lines.sort(key=lambda m: m["step"])  # seeds at once tell their epochs in turn
        stride = -(-len(lines) // _POINTS) or 1
        lines = lines[::-stride][::-1]  # the newest is always there
        # Seeds follow each other in one log: a line without numbers parts them.
        for i in range(len(lines) - 1, 0, -1):
            if lines[i].get("seed") != lines[i - 1].get("seed"):
                lines.insert(i, {"step": lines[i]["step"]})
        steps = [m["step"] for m in lines]
        one: Json = {"step": steps}
        if clock:
            at, seconds = zip(*clock, strict=True)
            one["minutes"] = (np.interp(steps, at, seconds) / 60).round(3).tolist()
        for key in dict.fromkeys(key for m in lines for key in m):
            values = [m.get(key) for m in lines]
            is_number = any(isinstance(v, float) for v in values)
            if is_number and key not in ("kind", "step", "seconds", "seed", "tokens"):
                one[key] = [v if is_finite(v) else None for v in values]
        curves[kind] = one
    return curves


def _settings(found: dict[str, Path], names: Sequence[str]) -> list[list[str]]:
    """The settings in which runs of one kind differ: name, then the value of each run."""
    for file in ("run.json", "finetune.json"):
        records = [read_json(found[name] / file) for name in names]
        if len(names) > 1 and all(records):
            break
    else:
        return []
    settings: list[Json] = [r.get("config") or r.get("settings") or {} for r in records]
    with contextlib.suppress(ElectraError):  # what a run knew nothing of yet has its default
        settings = [to_dict(from_dict(PretrainConfig, one, where="")) for one in settings]
    first, *others = settings = [flat(one) for one in settings]
    keys = {k for other in others for k in first.keys() | other if first.get(k) != other.get(k)}
    values = {key: [one.get(key) for one in settings] for key in sorted(keys)}
    return [[key, *("–" if v is None else str(v) for v in row)] for key, row in values.items()]


# ---------------------------------------------------------------------- fine-tuning


def preview(path: Path) -> Json:
    """The columns of a table, its first rows, and which of them are likely text and label."""
    seen: dict[str, set[str]] = {}
    lengths: dict[str, int] = {}
    head: list[list[str]] = []
    rows = 0
    for _, row in tasks._table(path):
        values = {name: "" if value is None else str(value) for name, value in row.items()}
        if len(head) < 5:
            head.append([value[:200] for value in values.values()])
        for name, value in values.items():
            if len(seen.setdefault(name, set())) <= tasks.MAX_NUMBERED:
                seen[name].add(value.strip())
            lengths[name] = lengths.get(name, 0) + len(value)
        rows += 1
    if rows == 0 or len(seen) < 2:
        what = "A table with rows and at least two columns is needed."
        raise ElectraError(what, where=str(path), fix="put names of columns into the first line")
    names = list(seen)
    known = next(([*texts] for texts in tasks._TEXTS if {*texts} <= {*names}), None)
    texts = known or [max(names, key=lambda name: lengths[name])]
    left = [n for n in names if n not in texts and len(seen[n]) > 1] or names
    label = "label" if "label" in left else min(left, key=lambda name: len(seen[name]))
    columns = [
        {"name": n, "values": sorted(seen[n])[:6], "many": len(seen[n]) > tasks.MAX_NUMBERED}
        for n in names
    ]
    return {"rows": rows, "columns": columns, "head": head, "texts": texts, "label": label}


class Job:
    """`electra finetune` in a process of its own."""

    def __init__(self, name: str, out: Path, arguments: list[str]) -> None:
        self.name, self.out, self.begin = name, out, time.monotonic()
        self.cancelled, self.seconds = False, 0.0
        with storage_errors(out):
            out.mkdir(parents=True)
        with open(out / "log.txt", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "electra", "finetune", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"},
            )

    @property
    def state(self) -> str:
        code = self.process.poll()
        if code is None:
            self.seconds = time.monotonic() - self.begin
            return "running"
        if self.cancelled or code == EXIT_STOPPED:
            return "cancelled"
        return "done" if code == 0 else "failed"

    def describe(self) -> Json:
        state = self.state
        with open(self.out / "log.txt", "rb") as log:
            log.seek(max(0, log.seek(0, io.SEEK_END) - 8192))
            lines = log.read().decode(errors="replace").splitlines()
        told = [found for line in lines if (found := re.match(r"\s*([\d.]+) %  (.*)", line))]
        about: Json = {"name": self.name, "state": state, "seconds": round(self.seconds, 1)}
        about |= {"share": float(told[-1][1]) / 100 if told else None}
        about["line"] = told[-1][2].strip() if told else "reading the model and the table"
        if state == "failed":  # what went wrong and what to do; not the place, which is a path

            def said(mark: str) -> str:
                return next((x.removeprefix(mark) for x in lines if x.startswith(mark)), "")

            what, fix = said("electra: "), said("  to do: ")
            about["error"] = {
                "what": what or "The training failed.",
                "where": said("  where: ").rpartition("/")[2],
                "fix": fix or f"see log.txt in {self.name}",
            }
        return about

    def cancel(self) -> None:
        self.cancelled = True
        self.process.terminate()  # it saves, so that the command line can go on with it

    def end(self) -> None:
        """No process stays behind."""
        if self.process.poll() is None:
            self.cancel()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def _results(path: Path) -> Json:
    """What the page shows of a finished fine-tuning."""
    run = read_results(path, path.name, None)
    record = read_json(path / "results.json")
    if not record:
        return {}
    task, seeds = record["task"], record["seeds"]
    about: Json = {key: task[key] for key in ("kind", "metric", "labels", "texts")}
    about |= {"rows": record.get("train_rows"), "median": run["median"], "state": run["state"]}
    about["written"] = (path / "results.json").stat().st_mtime
    about["seeds"] = [
        {key: seed.get(key) for key in ("seed", "failed", "seconds")}
        | {"scores": next(iter(seed["scores"].values()), {})}
        for seed in seeds
    ]
    return about


def _plain(name: str) -> str:
    """A name for a file, of harmless characters."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-")[:60] or "table"


def _zipped(folder: Path, name: str) -> Generator[bytes]:
    """The files of a folder as a zip."""
    with tempfile.TemporaryFile() as whole:
        with zipfile.ZipFile(whole, "w") as archive:
            for file in sorted(folder.iterdir()):
                if file.is_file() and not file.is_symlink():
                    archive.write(file, f"{name}/{file.name}")
        whole.seek(0)
        while block := whole.read(1 << 20):
            yield block
