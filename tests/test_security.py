"""Nothing let in: no unpickling, no network, no secrets on disk, and hostile files are refused.

Every command runs once, in a process of its own that is watched and has no network; the tests look
at what it did and what it left. Its output is then poisoned in one place at a time and read again.
"""

from __future__ import annotations

import ast
import bz2
import csv
import gzip
import hashlib
import html.parser
import importlib.metadata
import io
import json
import lzma
import os
import pickle
import re
import shutil
import stat
import struct
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from artefacts import SMALLEST
from conftest import language
from markdown_it import MarkdownIt
from packaging.requirements import Requirement
from pyarrow import parquet
from safetensors.torch import save_file
from test_cli import MICRO, electra

from electra import runtime
from electra.config import RunConfig, to_dict
from electra.data.tokenizer import LineEncoder, Tokenizer
from electra.files import json_bytes, json_sha256, sha256_file, xxh3_file
from electra.finetuning import squad

ROOT = Path(__file__).parents[1]
EVIL = "<script>alert(1)<!--x--> [l](javascript:1) ![i](j) `b` **c** | &amp;"  # fits a file name
FORMULA = "=1+1|x"
SECRETS = {
    name: f"planted-secret-{i:02d}-{name[::-1].lower()}"
    for i, name in enumerate(
        ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")
    )
} | {
    "GITHUB_TOKEN": "ghp_0123456789abcdefghijklmnopqrstuvwxyz",
    "DATABASE_URL": "postgres://me:correct-horse@db.example/x",  # of no meaning to any library
}
UMASK = 0o027

# Imported by every Python process of the flow before anything else, as `sitecustomize`.
WATCHER = """
import os, socket, sys

NETWORK = ("connect", "getaddrinfo", "gethostbyname", "gethostbyaddr", "sendto", "sendmsg", "bind")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
log = os.open(os.environ["WATCH_LOG"], os.O_WRONLY | os.O_APPEND)

def hook(event, args):
    if event == "pickle.find_class":
        told = (event, sys._getframe(1).f_code.co_filename, ".".join(map(str, args)))
    elif event.startswith("socket.") and event[7:] in NETWORK:
        told = (event, "", repr(args[isinstance(args[0], socket.socket):]))
    elif event == "open" and isinstance(args[0], str) and args[2] & WRITES:
        told = (event, "", os.path.abspath(args[0]))
    else:
        return
    os.write(log, ("\\t".join(told) + "\\n").encode(errors="replace"))

sys.addaudithook(hook)
"""

# Commands of one process, as JSON in its first argument. Each ends by SystemExit, as in a shell.
DRIVER = """
import json, os, sys
from electra.cli import main
os.umask(int(sys.argv[2]))
for command in json.loads(sys.argv[1]):
    try:
        main(command)
    except SystemExit as end:
        print(command[0], "ended with", end.code, flush=True)
        if end.code:
            sys.exit(end.code)
"""


class Flow(NamedTuple):
    """What the watched process left and did."""

    here: Path
    told: str
    events: list[tuple[str, str, str]]  # event, caller, what
    home: Path
    temporary: Path

    def copy(self, to: Path, *names: str) -> None:
        for name in names:
            shutil.copytree(self.here / name, to / name)


def watched(here: Path, *command: str, **environment: str) -> tuple[str, list[Any]]:
    """What a command says and does, with every Python process under it watched."""
    watcher, log = here / "watcher", here / "watcher" / "log"
    watcher.mkdir()
    (watcher / "sitecustomize.py").write_text(WATCHER)
    log.touch()
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "COV_", "ORT_"))}
    variables |= {"PYTHONPATH": f"{watcher}:{ROOT}", "WATCH_LOG": str(log), **environment}
    done = subprocess.run(
        command, env=variables, cwd=here, capture_output=True, text=True, timeout=580
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    lines = [line.split("\t") for line in log.read_text().splitlines()]
    return told, [(line[0], line[1], line[2]) for line in lines]


def without_network() -> list[str]:
    """A prefix that takes all network interfaces away, where the system lets us."""
    prefix = ["unshare", "--user", "--map-root-user", "--net"]
    allowed = (
        shutil.which("unshare")
        and not subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode
    )
    return prefix if allowed else []


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Flow:
    base = tmp_path_factory.mktemp("flow")
    here, home, temporary = (base / name for name in ("here", "home", "temporary"))
    for folder in (here, home, temporary):
        folder.mkdir()
    (here / "text.txt").write_text(language(300) + f"\n{EVIL}\n{FORMULA}\n")
    (here / "domain.txt").write_text("stonewind riverfire\n" * 9)
    words = [line for line in language(30, seed=1).splitlines() if line]
    table = [("text", "label"), *((line, FORMULA if "all" in line else EVIL) for line in words)]
    for name in (f"{EVIL}.csv", "dev.csv"):
        with open(here / name, "w", newline="") as file:
            csv.writer(file).writerows(table)
    (base / "given/RTE").mkdir(parents=True)
    names, head = ("entailment", "not_entailment"), "index\tsentence1\tsentence2\tlabel\n"
    pairs = [f"{i}\t{line}\t{line}\t{names[i % 2]}\n" for i, line in enumerate(words[:20])]
    for split in ("train", "dev"):
        (base / f"given/RTE/{split}.tsv").write_text(head + "".join(pairs))
    (base / "given/micro.json").write_text(json.dumps(to_dict(SMALLEST)))
    (base / "given/grid.toml").write_text("[one]\n")
    stories = re.sub(r" \.\n(\w.*\n)", r" and \1", language(70, seed=2))  # 12 words a sentence
    (base / "given/stories.txt").write_text(stories)
    short = ["--epochs", "1", "--threads", "1"]
    tune = ["--text", "text", "--label", "label", *short, "--seeds", "2", "--out", "tuned"]
    train = ["pretrain", *MICRO, "--corpus", "corpus", "--out", "run", "--run.train-steps", "8"]
    commands = [
        ["check", "--input", "text.txt"],
        ["tokenizer", "--input", "text.txt", "--out", "tokenizer", "--vocab-size", "200"],
        [*PREPARE[:-1], "corpus", "--length", "23", "--workers", "2"],
        ["check", "--corpus", "corpus"],
        train,
        train,  # reads its checkpoint
        ["export", "run", "--out", "export"],
        ["evaluate", "export", "--corpus", "corpus", "--part", "all", "--out", "numbers.json"],
        ["finetune", "--model", "export", "--data", f"{EVIL}.csv", "--dev", "dev.csv", *tune],
        ["predict", "--model", "tuned", "--input", "dev.csv", "--out", "answers.csv"],
        ["report", "run", "tuned", "--out", "report"],
        ["detect", "one old river sees all songs .", "--model", "export"],
        ["embed", "--model", "export", "--input", "text.txt", "--out", "vectors.npy"],
        ["import", "export", "--out", "imported"],
        ["extend", "export", "--input", "domain.txt", "--out", "extended", "--tokens", "2"],
        ["onnx", "--model", "tuned", "--out", "onnx"],
        ["glue", "--model", "export", "--data", "../given", "--out", "glue", *short],
        [
            *("ablate", "../given/grid.toml", "--base", "../given/micro.json", "--out", "study"),
            *("--corpus", "corpus", "--data", "../given", "--tasks", "rte", "--seeds", "1"),
            *("--tuning-seeds", "1", "--tuning", "epochs=1", "threads=1"),
        ],
        ["plan", "tiny"],
        ["env"],
        ["completion", "bash"],
        ["demo", "--input", "../given/stories.txt", "--minutes", "0.02", "--out", "demo"],
    ]
    told, events = watched(
        base,
        *without_network(),
        *("sh", "-c", 'cd here && exec "$@"', "sh", sys.executable, "-c", DRIVER),
        *(json.dumps(commands), str(UMASK)),
        HOME=str(home),
        TMPDIR=str(temporary),
        XDG_CACHE_HOME=str(home),
        **SECRETS,
    )
    return Flow(here, told, events, home, temporary)


# ---------------------------------------------------------------------- no code from files


FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve"}
FORBIDDEN_MODULES |= {"marshal", "yaml", "tarfile", "zipfile", "torch.distributed.checkpoint"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load"}
FORBIDDEN_CALLS |= {"dcp.load", "yaml.load", "shutil.unpack_archive", "torch.hub.load"}
FORBIDDEN_CALLS |= {"tempfile.mktemp", "torch.jit.load", "torch.package.PackageImporter"}
FORBIDDEN_VALUES = {"allow_pickle": True, "shell": True, "trust_remote_code": True}


def forbidden_in(source: str) -> list[str]:
    """What a module must not do, with the line it does it on."""
    found: list[tuple[int, str]] = []
    names: dict[str, str] = {}  # as bound by imports -> what it is
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                whole = module + alias.name
                names[alias.asname or alias.name.split(".")[0]] = (
                    whole if alias.asname or module else alias.name.split(".")[0]
                )
                parts = whole.split(".")
                prefixes = {".".join(parts[:i]) for i in range(1, len(parts) + 1)}
                if prefixes & FORBIDDEN_MODULES or whole in FORBIDDEN_CALLS:
                    found.append((node.lineno, whole))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg in FORBIDDEN_VALUES:
            is_off = isinstance(node.value, ast.Constant) and not node.value.value
            if not is_off:
                found.append((node.value.lineno, f"{node.arg}={ast.unparse(node.value)}"))
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            first, _, rest = ast.unparse(node).partition(".")
            whole = f"{names.get(first, first)}.{rest}".rstrip(".")
            if whole in FORBIDDEN_CALLS or whole.startswith("torch.distributed.checkpoint"):
                found.append((node.lineno, whole))
    return [f"line {line}: {what}" for line, what in sorted(set(found))]


@pytest.mark.parametrize("path", sorted((ROOT / "electra").rglob("*.py")), ids=lambda p: p.name)
def test_no_module_unpickles_evaluates_or_unpacks(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    found = [what.partition(": ")[2] for what in forbidden_in(source)]
    if path.name == "unpickle.py":  # the one place, in a process of its own, by an explicit flag
        assert found == ["torch.load"]
        assert 'torch.load(path, map_location="cpu", weights_only=True)' in source
    elif path.name == "ui.py":  # packs a model for its download, and opens no archive
        assert found == ["zipfile"]
        assert re.findall(r"zipfile\.\w+\(.*", source) == [
            'zipfile.ZipFile(whole, "w") as archive:'
        ]
    else:
        assert not found


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load as read\nread('x')",
        "import torch.distributed.checkpoint as d",
        "from torch.distributed import checkpoint",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
        "flag = 1\nrun('x', shell=flag)",
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
        "from yaml import load",
        "eval('1')",
        "f = exec",
        "import os as o\no.system('x')",
        "import tarfile",
        "from shutil import unpack_archive",
    ],
)
def test_the_check_of_the_sources_finds(line: str) -> None:
    assert forbidden_in(line)
    assert not forbidden_in("import torch, subprocess\nmodel.eval()\nrun('x', shell=False)")


def unpickled(events: Iterable[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Classes looked up while unpickling, but for what processes of one pool tell each other.

    That is known by who called `pickle.loads`: the standard library's own modules for pipes.
    """
    pool = Path(os.__file__).parent / "multiprocessing"
    return [e for e in events if e[0] == "pickle.find_class" and Path(e[1]).parent != pool]


def test_no_command_unpickles_a_file(flow: Flow) -> None:
    assert not unpickled(flow.events)


SERVERS = """
import json, re, subprocess, sys, urllib.request
for path, *command in json.loads(sys.argv[1]):
    command = [sys.executable, "-m", "electra", *command, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        url = re.search(r"http://127.0.0.1:[0-9]+", server.stdout.readline())[0]
        given = json.dumps({"text": "one old river"}).encode()
        request = urllib.request.Request(url + path, given, {"content-type": "application/json"})
        assert urllib.request.urlopen(request, timeout=120).status == 200
        server.terminate()
        assert server.wait(60) == 75
"""


def test_no_server_unpickles_a_file_or_asks_for_the_network(flow: Flow, tmp_path: Path) -> None:
    runs, model = str(flow.here), str(flow.here / "run")
    servers = [["/api/detect", "ui", "--model", model, "--runs", runs], ["/detect", "serve", model]]
    _, events = watched(tmp_path, sys.executable, "-c", SERVERS, json.dumps(servers))
    assert not unpickled(events)
    asked = {what for event, _, what in events if event.startswith("socket.")}
    assert asked  # the request itself, and where it is waited for
    assert not [what for what in asked if "127.0.0.1" not in what]


def test_the_watcher_sees_what_it_is_there_for(tmp_path: Path) -> None:
    """A file that is unpickled, a connection, a file outside; in a child process too."""
    (tmp_path / "file").write_bytes(Payload(tmp_path / "canary").pickled(4))
    code = (
        "import multiprocessing, pickle, socket, subprocess, sys, pathlib\n"
        'inner = \'import pickle; pickle.load(open("file", "rb"))\'\n'
        "subprocess.run([sys.executable, '-c', inner], check=True)\n"
        "with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "    assert pool.map(pathlib.Path, ['a']) == [pathlib.Path('a')]\n"
        "with socket.socket() as s:\n"
        "    s.connect_ex(('127.0.0.1', 9))\n"
    )
    _, events = watched(tmp_path, sys.executable, "-c", code)
    assert [what for _, _, what in unpickled(events)] == ["io.open"]
    assert sum(e[0] == "pickle.find_class" for e in events) > 1  # of the pool
    assert any(e[0] == "socket.connect" and "127.0.0.1" in e[2] for e in events)
    assert ("open", "", str(tmp_path / "canary")) in events


# ---------------------------------------------------------------------- the flow


def test_no_command_asks_for_the_network(flow: Flow) -> None:
    assert [e for e in flow.events if e[0].startswith("socket.")] == []
    assert flow.told.count(" ended with ") == 22  # one that does not end well ends all


def test_what_is_written_goes_where_it_was_asked_for(flow: Flow) -> None:
    """Nothing in the home or in a shared folder for temporary files, where names can be guessed."""
    written = {what for event, _, what in flow.events if event == "open"}
    outside = {p for p in written if not p.startswith((f"{flow.here}/", "/dev/", "/proc/"))}
    outside -= {str(flow.here)}  # where a nameless file shows that the place can be written to
    outside -= {p for p in outside if p.startswith(f"{flow.home}/")}  # caches of matplotlib
    probe = re.escape(str(flow.temporary)) + "/[a-z0-9_]{8}"  # the standard library tries it out
    assert not [path for path in outside if not re.fullmatch(probe, path)]
    assert list(flow.temporary.iterdir()) == []
    left = [p for p in flow.here.rglob("*") if p.name.endswith(".tmp") or ".tmp-" in p.name]
    assert left == []


def test_files_have_the_modes_that_the_umask_leaves(flow: Flow) -> None:
    ours = {flow.here / name for name in ("text.txt", "domain.txt", f"{EVIL}.csv", "dev.csv")}
    made = [p for p in flow.here.rglob("*") if p not in ours]
    assert {p.name for p in made} >= {"answers.csv", "report.csv", "vocab.txt", "metrics.jsonl"}
    assert len(made) > 40
    for path in made:
        wanted = (0o777 if path.is_dir() else 0o666) & ~UMASK
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_secrets_of_the_environment_are_never_written(flow: Flow) -> None:
    files = [p for p in flow.here.rglob("*") if p.is_file()]
    assert len(files) > 40
    places = {**{str(p): p.read_bytes() for p in files}, "the screen": flow.told.encode()}
    found = [
        (name, place)
        for place, content in places.items()
        for name, secret in SECRETS.items()
        if secret.encode() in content or b"correct-horse" in content
    ]
    assert not found


class Seen(html.parser.HTMLParser):
    """The tags of a page, and its text outside of code."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text, self._code = "", 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        del attrs
        self.tags.add(tag)
        self._code += tag == "code"

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag == "code"

    def handle_data(self, data: str) -> None:
        self.text += data if not self._code else ""


def test_cards_and_reports_show_hostile_names_as_text(flow: Flow) -> None:
    """Rendered with raw HTML let through, as the strictest reader would see it."""
    pages = [*flow.here.glob("**/README.md"), flow.here / "report" / "report.md"]
    assert len(pages) == 15
    harmless = {"h1", "h2", "h3", "p", "hr", "code", "pre", "em", "ul", "li"}
    harmless |= {"table", "thead", "tbody", "tr", "th", "td"}
    render = MarkdownIt("commonmark", {"html": True}).enable("table")
    for page in pages:
        text = page.read_text(encoding="utf-8")
        seen = Seen(render.render(text.replace("![learning curves](curves.png)", "")))
        assert seen.tags <= harmless, page
        assert "alert(" not in seen.text, page
    page = Seen((flow.here / "report" / "report.html").read_text(encoding="utf-8"))
    assert "details" in page.tags
    assert not page.tags & {"script", "img", "a", "iframe", "object", "link"}
    card = (flow.here / "tuned" / "model" / "README.md").read_text(encoding="utf-8")
    assert "<script>" in card  # it is there, as code
    with open(flow.here / "report" / "report.csv", newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not [c for c in cells if re.match(r"\s*[=+@\t\r]", c)]


# ---------------------------------------------------------------------- hostile files


class Payload:
    """Unpickling it creates the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return open, (str(self.canary), "w")

    def pickled(self, protocol: int) -> bytes:
        return pickle.dumps(self, protocol)

    def saved(self) -> bytes:
        file = io.BytesIO()
        torch.save({"model": self}, file)
        return file.getvalue()

    def array(self) -> bytes:
        file = io.BytesIO()
        np.save(file, np.array([self], dtype=object), allow_pickle=True)
        return file.getvalue()


DEEP = b"[" * 100_000
BOMB = b'{"a":' * 100_000
HUGE = b'{"format": ' + b"9" * 5000 + b"}"


def header(description: Any, data: bytes = b"") -> bytes:
    text = json.dumps(description).encode()
    return struct.pack("<Q", len(text)) + text + data


OVERLAP = header(
    {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    },
    bytes(12),
)
OUTSIDE = header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 1 << 40]}}, bytes(8))
TOO_LARGE = struct.pack("<Q", 1 << 60) + b"{}"
STRANGE = header({"a": {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 8]}}, bytes(8))


def edit(path: Path, **changed: Any) -> None:
    values = json.loads(path.read_bytes()) | changed
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def checkpoint_of(here: Path) -> Path:
    return next((here / "run" / "checkpoints").glob("step-*"))


def seal(path: Path, *more: tuple[str, Any]) -> None:
    """A manifest of a checkpoint that says what is there, and what else is asked for."""
    (path / "MANIFEST.json").unlink(missing_ok=True)
    files = {
        p.name: {"size": p.stat().st_size, "sha256": sha256_file(p)} for p in path.iterdir()
    } | dict(more)
    manifest: dict[str, Any] = {"format": 1, "step": int(path.name[5:]), "files": files}
    manifest["checksum"] = json_sha256(manifest)
    (path / "MANIFEST.json").write_bytes(json_bytes(manifest))


def seal_corpus(here: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """A manifest of a corpus that was changed, with the fingerprint and sum that fit the change."""
    path = here / "corpus" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    del manifest["checksum"]
    change(manifest)
    files = [shard[kind] for shard in manifest["shards"] for kind in ("tokens", "examples")]
    content = {key: manifest[key] for key in ("format", "settings")} | {"files": files}
    manifest["fingerprint"] = json_sha256({**content, "tokenizer": manifest["tokenizer_hash"]})
    path.write_bytes(signed(manifest))


def signed(content: dict[str, Any]) -> bytes:
    return json_bytes(content | {"checksum": json_sha256(content)})


def seal_model(here: Path, **changed: Any) -> None:
    """electra.json of a fine-tuned model with the digests of the files that are there."""
    model = here / "tuned" / "model"
    files = {p.name: xxh3_file(p) for p in model.iterdir() if p.name != "electra.json"}
    edit(model / "electra.json", **{"files": files, **changed})


DETECT = ("detect", "one old river", "--model", "export/discriminator")
EXPORT = ("export", "run", "--out", "new")
RESUME = ("pretrain", *MICRO, "--corpus", "corpus", "--out", "run", "--run.train-steps", "9")
FRESH = ("pretrain", *MICRO, "--corpus", "corpus", "--out", "new")
PREPARE = ("prepare", "--input", "text.txt", "--tokenizer", "tokenizer", "--out", "new")
PREDICT = ("predict", "--model", "tuned", "--input", "one old river")
REPORT = ("report", "run")
TUNE = ("finetune", "--model", "export", "--data", "rows", "--out", "new", "--text", "text")

Plant = Callable[[Path, Payload], object]
ARTEFACTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Plant]] = {}


def hostile(command: tuple[str, ...], *needs: str) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        ARTEFACTS[plant.__name__] = (command, needs, plant)
        return plant

    return register


def each(command: tuple[str, ...], needs: tuple[str, ...], at: str, **contents: bytes) -> None:
    """One artefact for each content of the file `at`."""
    for name, content in contents.items():

        def plant(here: Path, _: Payload, content: bytes = content) -> None:
            (here / at).write_bytes(content)

        ARTEFACTS[f"{command[0]} {at} {name}"] = (command, needs, plant)


WEIGHTS = "export/discriminator/model.safetensors"
each(
    DETECT, ("export",), WEIGHTS,
    too_large=TOO_LARGE, overlap=OVERLAP, outside=OUTSIDE, strange=STRANGE,
    empty=b"", deep=struct.pack("<Q", len(DEEP)) + DEEP,
)  # fmt: skip
JSON_BOMBS = {"deep": DEEP, "nested": BOMB, "huge": HUGE, "list": b"[1]", "text": b'"x"'}
JSON_BOMBS |= {"nan": b'{"format": NaN}', "bytes": b"\xff\xfe\x00"}
each(DETECT, ("export",), "export/discriminator/config.json", **JSON_BOMBS)
each(DETECT, ("export",), "export/discriminator/tokenizer.json", **JSON_BOMBS)
each(EXPORT, ("run",), "run/run.json", **JSON_BOMBS)
each(RESUME, ("run", "corpus"), "run/run.json", **JSON_BOMBS)
each(FRESH, ("corpus",), "corpus/manifest.json", **JSON_BOMBS)
each(PREDICT, ("tuned",), "tuned/model/electra.json", **JSON_BOMBS)
each(REPORT, ("run",), "run/run.json", **JSON_BOMBS)
each(("report", "tuned"), ("tuned",), "tuned/results.json", **JSON_BOMBS)
each((*FRESH, "--config", "a.json"), ("corpus",), "a.json", **JSON_BOMBS)
each((*FRESH, "--config", "a.toml"), ("corpus",), "a.toml", deep=b"a=" + DEEP, yaml=b"a: !!x")


@hostile(DETECT, "export")
def a_pickle_as_bin_instead_of_safetensors(here: Path, payload: Payload) -> None:
    (here / WEIGHTS).unlink()
    (here / "export/discriminator/pytorch_model.bin").write_bytes(payload.saved())


@hostile(("finetune", "--model", "export/discriminator", *TUNE[3:]), "export")
def a_pickle_as_bin_to_fine_tune_from(here: Path, payload: Payload) -> None:
    a_pickle_as_bin_instead_of_safetensors(here, payload)
    (here / "rows").mkdir()


@hostile(DETECT, "export")
def weights_that_are_a_pickle(here: Path, payload: Payload) -> None:
    (here / WEIGHTS).write_bytes(payload.pickled(4))


@hostile(DETECT, "export")
def weights_that_are_a_renamed_pt(here: Path, payload: Payload) -> None:
    (here / WEIGHTS).write_bytes(payload.saved())


@hostile((*FRESH, "--init", "export"), "export", "corpus")
def weights_to_start_from_that_are_a_renamed_pt(here: Path, payload: Payload) -> None:
    (here / WEIGHTS).write_bytes(payload.saved())


@hostile(DETECT, "export")
def weights_in_a_file_for_code_objects(here: Path, payload: Payload) -> None:
    (here / WEIGHTS).write_bytes(payload.array())


@hostile(DETECT, "export")
def a_config_that_names_code_of_its_own(here: Path, payload: Payload) -> None:
    auto = {"AutoModel": "modeling.Model", "AutoConfig": "modeling.Config"}
    edit(here / "export/discriminator/config.json", auto_map=auto, trust_remote_code=True)
    code = f"open({str(payload.canary)!r}, 'w')\nclass Model: pass\nclass Config: pass\n"
    (here / "export/discriminator/modeling.py").write_text(code)


@hostile(DETECT, "export")
def a_config_with_layers_without_end(here: Path, _: Payload) -> None:
    edit(here / "export/discriminator/config.json", num_hidden_layers=10**9)


@hostile(DETECT, "export")
def a_config_with_a_width_without_end(here: Path, _: Payload) -> None:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "embedding_size"), 2 * 10**18)
    edit(here / "export/discriminator/config.json", **sizes)


@hostile(DETECT, "export")
def a_vocabulary_without_end(here: Path, _: Payload) -> None:
    edit(here / "export/discriminator/config.json", vocab_size=10**30)


@hostile(EXPORT, "run")
def a_run_with_layers_without_end(here: Path, _: Payload) -> None:
    config = json.loads((here / "run/run.json").read_bytes())["config"]
    config["encoder"]["layers"] = 10**9
    edit(here / "run/run.json", config=config)


@hostile(EXPORT, "run")
def a_run_with_another_width(here: Path, _: Payload) -> None:
    config = json.loads((here / "run/run.json").read_bytes())["config"]
    config["encoder"]["hidden_size"] = 40
    edit(here / "run/run.json", config=config)


@hostile(EXPORT, "run")
def a_run_without_its_settings(here: Path, _: Payload) -> None:
    edit(here / "run/run.json", config=None)


@hostile(RESUME, "run", "corpus")
def an_optimizer_that_is_a_pickle(here: Path, payload: Payload) -> None:
    (checkpoint_of(here) / "optimizer.safetensors").write_bytes(payload.pickled(2))
    seal(checkpoint_of(here))


@hostile(EXPORT, "run")
def a_checkpoint_that_is_a_renamed_pt(here: Path, payload: Payload) -> None:
    (checkpoint_of(here) / "model.safetensors").write_bytes(payload.saved())
    seal(checkpoint_of(here))


@hostile(RESUME, "run", "corpus")
def an_optimizer_pt_instead_of_safetensors(here: Path, payload: Payload) -> None:
    (checkpoint_of(here) / "optimizer.safetensors").unlink()
    (checkpoint_of(here) / "optimizer.pt").write_bytes(payload.saved())
    seal(checkpoint_of(here))


@hostile(RESUME, "run", "corpus")
def a_distributed_checkpoint_with_metadata(here: Path, payload: Payload) -> None:
    path = checkpoint_of(here)
    for file in path.iterdir():
        file.unlink()
    (path / ".metadata").write_bytes(payload.pickled(4))
    (path / "__0_0.distcp").write_bytes(payload.saved())


@hostile(RESUME, "run", "corpus")
def a_distributed_checkpoint_that_is_sealed(here: Path, payload: Payload) -> None:
    (checkpoint_of(here) / ".metadata").write_bytes(payload.pickled(4))
    seal(checkpoint_of(here))


@hostile(RESUME, "run", "corpus")
def a_checkpoint_with_other_tensors(here: Path, _: Payload) -> None:
    save_file({"x": torch.zeros(3)}, checkpoint_of(here) / "model.safetensors")
    seal(checkpoint_of(here))


@hostile(EXPORT, "run")
def a_checkpoint_to_export_with_other_tensors(here: Path, payload: Payload) -> None:
    a_checkpoint_with_other_tensors(here, payload)


@hostile(RESUME, "run", "corpus")
def a_trainer_state_that_is_a_bomb(here: Path, _: Payload) -> None:
    (checkpoint_of(here) / "state.json").write_bytes(BOMB)
    seal(checkpoint_of(here))


@hostile(RESUME, "run", "corpus")
def a_trainer_state_of_another_form(here: Path, _: Payload) -> None:
    (checkpoint_of(here) / "state.json").write_bytes(b"[]")
    seal(checkpoint_of(here))


@hostile(RESUME, "run", "corpus")
def a_manifest_that_is_a_bomb(here: Path, _: Payload) -> None:
    (checkpoint_of(here) / "MANIFEST.json").write_bytes(DEEP)


@hostile(RESUME, "run", "corpus")
def a_manifest_that_is_a_pickle(here: Path, payload: Payload) -> None:
    (checkpoint_of(here) / "MANIFEST.json").write_bytes(payload.pickled(0))


@hostile(FRESH, "corpus")
def tokens_that_are_an_array_of_objects(here: Path, payload: Payload) -> None:
    path = here / "corpus/train-00000.tokens.bin"
    path.write_bytes(payload.array())

    def change(manifest: dict[str, Any]) -> None:
        shard = next(s for s in manifest["shards"] if s["part"] == "train")
        shard["tokens"] |= {"size": path.stat().st_size, "xxh3": xxh3_file(path)}

    seal_corpus(here, change)


@hostile(FRESH, "corpus")
def tokens_that_no_vocabulary_has(here: Path, _: Payload) -> None:
    path = here / "corpus/train-00000.tokens.bin"
    path.write_bytes(b"\xff" * path.stat().st_size)

    def change(manifest: dict[str, Any]) -> None:
        next(s for s in manifest["shards"] if s["part"] == "train")["tokens"]["xxh3"] = xxh3_file(
            path
        )

    seal_corpus(here, change)


@hostile(FRESH, "corpus")
def a_sealed_manifest_without_settings(here: Path, _: Payload) -> None:
    seal_corpus(here, lambda manifest: manifest["settings"].clear())


@hostile(FRESH, "corpus")
def a_sealed_manifest_with_numbers_for_names(here: Path, _: Payload) -> None:
    seal_corpus(here, lambda manifest: manifest["shards"][0]["tokens"].update(name=7))


@hostile(PREPARE, "tokenizer")
def text_that_is_an_array_of_objects(here: Path, payload: Payload) -> None:
    (here / "text.txt").write_bytes(payload.array())


@hostile(PREPARE, "tokenizer")
def text_that_is_a_pickle(here: Path, payload: Payload) -> None:
    (here / "text.txt").write_bytes(payload.pickled(4))


@hostile((*PREPARE[:2], "text.pkl", *PREPARE[3:]), "tokenizer")
def text_in_a_file_named_pkl(here: Path, payload: Payload) -> None:
    (here / "text.pkl").write_bytes(payload.pickled(0))


@hostile((*PREPARE[:2], "text.jsonl", *PREPARE[3:]), "tokenizer")
def rows_of_text_that_are_a_bomb(here: Path, _: Payload) -> None:
    (here / "text.jsonl").write_bytes(b'{"text": ' + DEEP)


@hostile((*FRESH, "--config", "settings.yaml"), "corpus")
def settings_with_yaml_tags(here: Path, payload: Payload) -> None:
    line = f"run: !!python/object/apply:builtins.open [{payload.canary}, w]\n"
    (here / "settings.yaml").write_text(line)


@hostile(PREPARE, "tokenizer")
def a_tokenizer_that_is_a_pickle(here: Path, payload: Payload) -> None:
    (here / "text.txt").write_text("a")
    (here / "tokenizer/tokenizer.json").write_bytes(payload.pickled(0))


@hostile(PREPARE, "tokenizer")
def a_vocabulary_that_is_a_pickle(here: Path, payload: Payload) -> None:
    (here / "text.txt").write_text("a")
    (here / "tokenizer/tokenizer.json").unlink()
    (here / "tokenizer/vocab.txt").write_bytes(payload.pickled(0))


@hostile(PREPARE, "tokenizer")
def a_tokenizer_config_that_is_a_bomb(here: Path, _: Payload) -> None:
    (here / "text.txt").write_text("a")
    (here / "tokenizer/tokenizer.json").unlink()
    (here / "tokenizer/tokenizer_config.json").write_bytes(BOMB)


@hostile(PREPARE, "tokenizer")
def a_tokenizer_config_that_is_a_list(here: Path, payload: Payload) -> None:
    a_tokenizer_config_that_is_a_bomb(here, payload)
    (here / "tokenizer/tokenizer_config.json").write_bytes(b"[1]")


@hostile(PREPARE, "tokenizer")
def a_tokenizer_config_of_other_types(here: Path, payload: Payload) -> None:
    a_tokenizer_config_that_is_a_bomb(here, payload)
    (here / "tokenizer/tokenizer_config.json").write_bytes(b'{"do_lower_case": {"a": []}}')


@hostile(PREPARE, "tokenizer")
def a_tokenizer_with_ids_without_end(here: Path, _: Payload) -> None:
    (here / "text.txt").write_text("a b c\n")
    values = json.loads((here / "tokenizer/tokenizer.json").read_bytes())
    values["model"]["vocab"]["a"] = 2**32 - 1
    (here / "tokenizer/tokenizer.json").write_text(json.dumps(values))


@hostile(PREPARE, "tokenizer", "corpus")
def notes_of_a_corpus_that_are_a_bomb(here: Path, _: Payload) -> None:
    (here / "text.txt").write_text("a b c\n")
    (here / "new").mkdir()
    (here / "new/progress.json").write_bytes(DEEP)


@hostile(PREPARE, "tokenizer", "corpus")
def notes_of_a_corpus_of_another_form(here: Path, payload: Payload) -> None:
    notes_of_a_corpus_that_are_a_bomb(here, payload)
    (here / "new/progress.json").write_bytes(b'{"shards": {}, "job": []}')


@hostile(PREDICT, "tuned")
def a_head_that_is_a_pickle(here: Path, payload: Payload) -> None:
    (here / "tuned/model/head.safetensors").write_bytes(payload.pickled(4))
    seal_model(here)


@hostile(PREDICT, "tuned")
def a_head_with_options_that_do_not_exist(here: Path, _: Payload) -> None:
    seal_model(here, head={"activation": "os.system"})


@hostile(PREDICT, "tuned")
def a_record_of_a_task_that_is_a_list(here: Path, _: Payload) -> None:
    seal_model(here, task=["a"])


@hostile(("finetune", *TUNE[1:4], "rows.csv", *TUNE[5:]), "export")
def a_table_that_is_a_pickle(here: Path, payload: Payload) -> None:
    (here / "rows.csv").write_bytes(payload.pickled(0))


@hostile(("finetune", *TUNE[1:4], "rows.jsonl", *TUNE[5:]), "export")
def a_table_that_is_a_bomb(here: Path, _: Payload) -> None:
    (here / "rows.jsonl").write_bytes(b'{"text": ' + DEEP)


def parquet_rows(here: Path, metadata: dict[bytes, bytes], field: dict[bytes, bytes]) -> None:
    texts = pa.array([b"one old river"] * 40, pa.binary() if field else pa.string())
    text = pa.field("text", texts.type, metadata=field or None)
    schema = pa.schema([text, pa.field("label", pa.int64())], metadata=metadata or None)
    table = pa.table([texts, pa.array([0, 1] * 20)], schema=schema)
    parquet.write_table(table, here / "rows.parquet")


@hostile(("finetune", *TUNE[1:4], "rows.parquet", *TUNE[5:]), "export")
def a_parquet_type_that_is_a_pickle(here: Path, payload: Payload) -> None:
    """What pyarrow below 14.0.1 unpickled on reading (CVE-2023-47248)."""
    name, data = b"ARROW:extension:name", b"ARROW:extension:metadata"
    parquet_rows(here, {}, {name: b"arrow.py_extension_type", data: payload.pickled(2)})


@hostile(("finetune", *TUNE[1:4], "rows.parquet", *TUNE[5:]), "export")
def parquet_metadata_that_is_a_bomb(here: Path, _: Payload) -> None:
    parquet_rows(here, {b"huggingface": BOMB}, {})


@hostile(("finetune", *TUNE[1:4], "rows.parquet", *TUNE[5:]), "export")
def parquet_metadata_of_another_form(here: Path, _: Payload) -> None:
    parquet_rows(here, {b"huggingface": b'{"info": {"features": ["label"]}}'}, {})


@hostile(("finetune", *TUNE[1:4], "rows.parquet", *TUNE[5:]), "export")
def parquet_metadata_that_is_a_pickle(here: Path, payload: Payload) -> None:
    parquet_rows(here, {b"huggingface": payload.pickled(4)}, {})


@hostile((*PREPARE[:2], "rows.parquet", *PREPARE[3:]), "tokenizer")
def parquet_text_of_a_type_that_is_a_pickle(here: Path, payload: Payload) -> None:
    a_parquet_type_that_is_a_pickle(here, payload)


@hostile(("finetune", *TUNE[1:4], "squad", "--out", "new", "--task", "squad1"), "export")
def questions_that_are_a_bomb(here: Path, _: Payload) -> None:
    (here / "squad").mkdir()
    (here / "squad/train-v1.1.json").write_bytes(BOMB)
    (here / "squad/dev-v1.1.json").write_bytes(BOMB)


@hostile(REPORT, "run")
def metrics_that_are_a_bomb(here: Path, _: Payload) -> None:
    (here / "run/metrics.jsonl").write_bytes(DEEP + b"\n")


@hostile(RESUME, "run", "corpus")
def metrics_of_a_run_to_resume_that_are_a_bomb(here: Path, _: Payload) -> None:
    (here / "run/metrics.jsonl").write_bytes(DEEP + b"\n")


@hostile(RESUME, "run", "corpus")
def metrics_of_a_run_to_resume_of_another_form(here: Path, _: Payload) -> None:
    (here / "run/metrics.jsonl").write_bytes(b"[1]\n")


RETUNE = ("finetune", "--model", "export", "--data", "dev.csv", "--dev", "dev.csv", "--text")
RETUNE += ("text", "--label", "label", "--epochs", "1", "--threads", "1", "--out", "tuned")


@hostile((*RETUNE, "--seeds", "2"), "tuned", "export")
def a_record_of_fine_tuning_that_is_a_bomb(here: Path, _: Payload) -> None:
    (here / "tuned/finetune.json").write_bytes(BOMB)


@hostile((*RETUNE, "--seeds", "2"), "tuned", "export")
def a_record_of_fine_tuning_of_another_form(here: Path, _: Payload) -> None:
    (here / "tuned/finetune.json").write_bytes(b'{"a": 1}')


@hostile((*RETUNE, "--seeds", "2"), "tuned", "export")
def a_result_of_a_seed_that_is_a_bomb(here: Path, _: Payload) -> None:
    _as_dev(here)
    (here / "tuned/seed-0/result.json").write_bytes(BOMB)


@hostile((*RETUNE, "--seeds", "2"), "tuned", "export")
def predictions_of_a_seed_that_are_a_pickle(here: Path, payload: Payload) -> None:
    _as_dev(here)
    (here / "tuned/seed-0/predictions.safetensors").write_bytes(payload.pickled(4))


def _as_dev(here: Path) -> None:
    """Makes the run in `tuned` one of the table dev.csv, which has a name that fits."""
    values = json.loads((here / "tuned/finetune.json").read_bytes())
    values["task"]["name"] = "dev"
    (here / "tuned/finetune.json").write_text(json.dumps(values))


@pytest.mark.parametrize("name", ARTEFACTS)
def test_a_hostile_file_is_refused(
    name: str,
    flow: Flow,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2 or 3, three lines that say why, no traceback, and no code of the file ran."""
    command, needs, plant = ARTEFACTS[name]
    canary = tmp_path / "canary"
    flow.copy(tmp_path, *needs)
    shutil.copy(flow.here / "dev.csv", tmp_path)
    plant(tmp_path, Payload(canary))
    monkeypatch.chdir(tmp_path)
    code = electra(*command)
    told = capsys.readouterr().err
    assert code in (2, 3), told
    assert "to do:" in told
    assert "Traceback" not in told
    assert not canary.exists()


def test_the_payload_would_have_worked(tmp_path: Path) -> None:
    """Otherwise the absence of the canary proves nothing."""
    for i, content in enumerate(
        [Payload(tmp_path / "c").pickled(n) for n in (0, 2, 4)] + [Payload(tmp_path / "c").saved()]
    ):
        if i < 3:
            pickle.loads(content).close()
        else:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                (inner,) = (n for n in archive.namelist() if n.endswith("data.pkl"))
                pickle.loads(archive.read(inner))["model"].close()
        (tmp_path / "c").unlink()


def test_what_is_sealed_by_the_tests_is_accepted(
    flow: Flow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a wrong sum could be all that is found in what is hostile."""
    flow.copy(tmp_path, "run", "corpus", "tuned")
    monkeypatch.chdir(tmp_path)
    seal(checkpoint_of(tmp_path))
    seal_corpus(tmp_path, lambda manifest: manifest["settings"].update(seed=99))
    seal_model(tmp_path)
    for command in (EXPORT, ("check", "--corpus", "corpus"), PREDICT):
        assert electra(*command) == 0


def test_at_least_25_artefacts_are_tried() -> None:
    assert len(ARTEFACTS) >= 25


@pytest.mark.parametrize("pickled", ["pytorch_model.bin", "model.bin"])
def test_a_pickle_is_refused_with_the_way_to_safetensors(
    pickled: str, flow: Flow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flow.copy(tmp_path, "export")
    (tmp_path / WEIGHTS).rename(tmp_path / "export/discriminator" / pickled)
    assert electra("detect", "one", "--model", tmp_path / "export/discriminator") == 2
    told = capsys.readouterr().err
    assert pickled in told
    assert "model.safetensors" in told
    assert "save_pretrained" in told


# ---------------------------------------------------------------------- names inside of files

NAMES = {
    "above": "../secret",
    "absolute": "/etc/hostname",
    "below": "a/b",
    "nul": "a\0b",
    "endless": "a" * 5000,
    "here": ".",
    "none": "",
}


@pytest.mark.parametrize("kind", ["checkpoint", "shard", "tokenizer", "notes", "model", "arrow"])
@pytest.mark.parametrize("name", NAMES)
def test_files_are_named_by_plain_names_only(
    name: str,
    kind: str,
    flow: Flow,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In manifests that are otherwise in order, sums included: the file meant is really there."""
    named = NAMES[name]
    entry: dict[str, Any] = {"name": named, "size": 6, "xxh3": ""}
    command: tuple[str, ...] = FRESH
    monkeypatch.chdir(tmp_path)
    flow.copy(tmp_path, *{"model": ("tuned",), "checkpoint": ("run",)}.get(kind, ("corpus",)))
    places = {"checkpoint": checkpoint_of(tmp_path).parent} if kind == "checkpoint" else {}
    target = places.get(kind, tmp_path / {"model": "tuned", "tokenizer": "corpus"}.get(kind, ""))
    (target / "secret").write_text("secret")
    entry["xxh3"] = xxh3_file(target / "secret")
    if kind == "checkpoint":
        seal(
            checkpoint_of(tmp_path), (named, {"size": 6, "sha256": sha256_file(target / "secret")})
        )
        command = EXPORT
    elif kind == "shard":
        seal_corpus(tmp_path, lambda manifest: manifest["shards"][0].update(tokens=entry))
    elif kind == "tokenizer":
        seal_corpus(tmp_path, lambda manifest: manifest["tokenizer_files"].append(entry))
    elif kind == "notes":  # of a corpus that is not complete: its shards are checked, then kept
        manifest = json.loads((tmp_path / "corpus/manifest.json").read_bytes())
        inputs, tokenizer = manifest["inputs"]["identity"], manifest["tokenizer_hash"]
        job = {"settings": manifest["settings"], "inputs": inputs, "tokenizer": tokenizer}
        shards = [{**shard, "tokens": entry} for shard in manifest["shards"]]
        (tmp_path / "corpus/manifest.json").unlink()
        (tmp_path / "corpus/progress.json").write_bytes(signed({"job": job, "shards": shards}))
        monkeypatch.chdir(flow.here)  # where the text has the identity that was noted
        command = (*PREPARE[:-1], str(tmp_path / "corpus"), "--length", "23")
    elif kind == "model":
        record = json.loads((tmp_path / "tuned/model/electra.json").read_bytes())
        seal_model(tmp_path, files=record["files"] | {named: entry["xxh3"]})
        command = PREDICT
    else:
        (tmp_path / "rows/train").mkdir(parents=True)
        state = {"_data_files": [{"filename": named}]}
        (tmp_path / "rows/train/state.json").write_text(json.dumps(state))
        (tmp_path / "rows/secret").write_text("secret")
        shutil.copytree(flow.here / "export", tmp_path / "export")
        (tmp_path / "rows").rename(tmp_path / "CoLA")
        (tmp_path / "CoLA/dev.tsv").write_text("a\t1\t\tb\n")
        command = ("finetune", *TUNE[1:4], "CoLA", "--out", "new", "--task", "cola")
    code = electra(*command)
    told = capsys.readouterr().err
    assert code in (2, 3), told
    assert "to do:" in told
    assert "Traceback" not in told
    assert "checksum" not in told  # all are right; it is the name
    if kind in ("shard", "tokenizer", "notes", "arrow") and name not in ("nul", "endless", "none"):
        assert "plain file name" in told  # nor what the file holds


# ---------------------------------------------------------------------- bombs and endless text


BOMB_BYTES = 64 << 20
READ_BOMB = """
import resource, sys
from pathlib import Path
from electra.data.text import TextStats, read_documents
import pyarrow
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
stats = TextStats()
for document in read_documents([Path(sys.argv[1])], stats=stats):
    pass
print(stats.bytes, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zst"])
def test_a_compression_bomb_is_read_in_flat_memory(suffix: str, tmp_path: Path) -> None:
    """No archive is ever unpacked; compressed text streams, whatever it grows to."""
    path, content = tmp_path / f"bomb.txt.{suffix}", (b"a" * 1023 + b"\n") * (BOMB_BYTES >> 10)
    pack: dict[str, Callable[[bytes], Any]] = {
        "gz": lambda data: gzip.compress(data, 1),
        "bz2": lambda data: bz2.compress(data, 1),
        "xz": lambda data: lzma.compress(data, preset=0),
        "zst": lambda data: pa.compress(data, "zstd", asbytes=True),
    }
    path.write_bytes(pack[suffix](content))
    assert BOMB_BYTES / path.stat().st_size > 100
    done = subprocess.run(
        [sys.executable, "-c", READ_BOMB, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    size, grown = map(int, done.stdout.split())
    assert size == BOMB_BYTES
    assert grown < 40  # MiB


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> Any:
    found = tarfile.TarInfo(name)
    found.type, found.linkname, found.size = kind, link, size
    return found


# What an unpacker could be made to write, and where.
MEMBERS: dict[str, list[Any]] = {
    "above": [member("../canary", size=5)],
    "absolute": [member("/canary", size=5)],
    "link": [member("a", tarfile.SYMTYPE, ".."), member("a/canary", size=5)],
    "hard link": [member("a", tarfile.LNKTYPE, "../text.txt"), member("a", size=5)],
    "fifo": [member("canary", tarfile.FIFOTYPE)],
    "device": [member("canary", tarfile.CHRTYPE)],
    "bomb": [member("canary", size=64 << 20)],
    "many": [member(f"canary{i}") for i in range(10_000)],
    "twice": [member("canary", size=5)] * 2,
    "plain": [member("canary.txt", size=5)],
}


def pack(archive: Path, kind: str) -> None:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for name, size in {each.name: each.size for each in MEMBERS[kind]}.items():
                file.writestr(name, bytes(size))
        return
    mode = "w:gz" if archive.suffix == ".gz" else "w"
    with tarfile.open(archive, mode) as file:
        for each in MEMBERS[kind]:
            file.addfile(each, io.BytesIO(bytes(each.size)))


def pack_a_million(archive: Path, _: str) -> None:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as file:
            for i in range(1_000_000):
                file.writestr(f"canary{i}", b"")
        return
    entries = member("canary").tobuf() * 10_000
    with gzip.open(archive, "wb", 1) if archive.suffix == ".gz" else archive.open("wb") as file:
        for _ in range(100):
            file.write(entries)


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".zip", ".txt"])
@pytest.mark.parametrize(
    ("kind", "pack"),
    [
        *((kind, pack) for kind in MEMBERS),
        pytest.param("a million", pack_a_million, marks=pytest.mark.long),
    ],
)
def test_an_archive_is_refused_and_nothing_of_it_written(
    kind: str,
    pack: Callable[[Path, str], None],
    suffix: str,
    flow: Flow,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    flow.copy(inside, "tokenizer", "export")
    (inside / "text.txt").write_text("mine")
    archive = inside / f"given{suffix}"
    pack(archive, kind)
    before = set(tmp_path.rglob("*"))
    for command in (
        ("prepare", "--input", archive, "--tokenizer", "tokenizer", "--out", "new"),
        ("tokenizer", "--input", archive, "--out", "new-tokenizer"),
        ("finetune", "--model", "export", "--data", archive, "--out", "new-tuned"),
        ("detect", "one", "--model", archive),
    ):
        assert electra(*command) in (2, 3)
        told = capsys.readouterr().err
        assert "to do:" in told
        assert "Traceback" not in told
    made = {p for p in set(tmp_path.rglob("*")) - before if "/b/new" not in str(p)}
    assert not made
    assert not list(tmp_path.rglob("canary*"))
    assert (inside / "text.txt").read_text() == "mine"


MB = 1 << 20
ENDLESS: dict[str, Callable[[int], str]] = {
    "one_letter": lambda n: "a" * n,
    "one_mark": lambda n: "!" * n,
    "combining_marks": lambda n: "a" + "\u0301\u0323" * (n // 4),
    "punctuation": lambda n: ("a.'`-" * n)[:n],
    "articles": lambda n: ("the a an " * n)[:n],
    "spaces": lambda n: " \t" * (n // 2),
    "brackets": lambda n: ("[MASK" * n)[:n],
    "chinese": lambda n: "東" * (n // 3),
    "quotes": lambda n: '"' * n,
}


def tokenized(tokenizer: Tokenizer, text: str) -> None:
    list(tokenizer.encode_with_offsets([text]))


def whole(tokenizer: Tokenizer, text: str) -> None:
    tokenizer.backend.encode(text, add_special_tokens=False)


def encoded(tokenizer: Tokenizer, text: str) -> None:
    LineEncoder(tokenizer).encode_lines([text])


def scored(_: Tokenizer, text: str) -> None:
    question = squad.Question("0", "who?", text, (text,), 0)
    given = squad.Answers({"0": text + "x"}, {"0": 0.0}, {"0": [(text, 0.0)]})
    squad.evaluate([question], given, 0.0)


def cut_into_windows(tokenizer: Tokenizer, text: str) -> None:
    question = squad.Question("0", "who?", text, (text[:1],), 0)
    features, windows = squad.windows([question], tokenizer, training=True)
    wanted = squad.answers([question], windows, beams(len(features), features.tokens.shape[1]))
    assert set(wanted.texts) == {"0"}


def beams(rows: int, length: int) -> dict[str, Any]:
    """What a model could predict: every span of the first 20 places."""
    at = np.tile(np.minimum(np.arange(10, 30), length - 1), (rows, 1))
    zeros = np.zeros(at.shape)
    ends = np.broadcast_to(at[:, None], (rows, 20, 20))
    return {
        "start_log_probs": zeros,
        "start_index": at,
        "end_log_probs": np.zeros(ends.shape),
        "end_index": ends,
        "answerable": np.zeros(rows),
    }


@pytest.mark.alone
@pytest.mark.parametrize("work", [tokenized, encoded, scored, cut_into_windows])
@pytest.mark.parametrize("endless", ENDLESS)
@pytest.mark.parametrize("size", [MB // 16, pytest.param(MB, marks=pytest.mark.long)])
def test_the_time_of_endless_text_grows_with_its_length(
    size: int,
    endless: str,
    work: Callable[[Tokenizer, str], None],
    tokenizer: Tokenizer,
    request: pytest.FixtureRequest,
) -> None:
    """Twice the text takes about twice the time, never the square, and a megabyte about a second.

    Nor much more than the tokenizers library alone, which takes that second for a text in which
    every character is a token and which it is given whole: a measure on machines that are slower.
    """

    def seconds(length: int, work: Callable[[Tokenizer, str], None] = work) -> float:
        given, begin = ENDLESS[endless](length), time.process_time()
        work(tokenizer, given)
        return time.process_time() - begin

    work(tokenizer, ENDLESS[endless](1000))
    one, two = (min(seconds(n) for _ in range(2)) for n in (size, 2 * size))
    assert two < 3 * one + 0.1, (one, two)
    assert two < 3 * (2 * size / MB)  # a third of it on an idle machine
    if size == MB:
        request.node.user_properties.append(("seconds a megabyte", f"{min(one, two / 2):.2f}"))
        alone = min(seconds(size, whole) for _ in range(2))
        assert one < 1.5 * alone + 0.2, (one, alone)


# ---------------------------------------------------------------------- what we depend on


def licence_of(name: str) -> str:
    """As the installed distribution tells it, in the short form of SPDX where it is a long one."""
    told = importlib.metadata.metadata(name)
    classifiers = [c for c in told.get_all("Classifier") or [] if c.startswith("License ::")]
    short = {"Apache Software License": "Apache-2.0", "MIT License": "MIT"}
    short |= {"Python Software Foundation License": "PSF-2.0"}
    long = classifiers[0].rsplit(" :: ", 1)[-1] if classifiers else ""
    return told.get("License-Expression") or short.get(long, long) or told.get("License") or "?"


def test_every_dependency_is_listed_with_its_licence() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("|")][2:]
    listed = {row[1].strip(): row[-2].strip() for row in rows}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {Requirement(line).name for line in project["dependencies"]}
    assert listed.keys() == needed
    assert listed == {name: licence_of(name) for name in needed}


def test_the_list_of_packages_has_all_that_is_needed_with_hashes() -> None:
    """docs/sbom.py, against what the installed metadata says of each package by itself."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "sbom.py")], capture_output=True, check=True
    )
    told = json.loads(done.stdout)
    assert (told["bomFormat"], told["specVersion"]) == ("CycloneDX", "1.6")
    parts = {part["name"].lower().replace("_", "-"): part for part in told["components"]}
    assert len(parts) == len(told["components"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {Requirement(line).name for line in project["dependencies"]} <= parts.keys()
    assert {"sympy", "mpmath", "markdown-it-py", "mdurl"} <= parts.keys()  # torch's, rich's
    for name, part in parts.items():
        installed = importlib.metadata.distribution(name)
        assert part["version"] == installed.version
        record = hashlib.sha256((installed.read_text("RECORD") or "").encode()).hexdigest()
        assert part["properties"] == [{"name": "electra:sha256-of-RECORD", "value": record}]
        assert part["licenses"][0]["license"]["name"] not in ("", "unknown"), name
    known = {part["bom-ref"] for part in parts.values()} | {told["metadata"]["component"]["purl"]}
    assert {edge["ref"] for edge in told["dependencies"]} == known
    edges = {edge["ref"]: edge["dependsOn"] for edge in told["dependencies"]}
    (sympy,) = (ref for ref in edges if ref.startswith("pkg:pypi/sympy@"))
    assert [ref.partition("@")[0] for ref in edges[sympy]] == ["pkg:pypi/mpmath"]


def test_every_dependency_has_a_lowest_version_and_none_comes_from_elsewhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    for line in [*project["dependencies"], *extras]:
        requirement = Requirement(line)
        if requirement.name == project["name"]:
            continue
        bounds = {part.operator for part in requirement.specifier}
        assert bounds & {">=", "==", "~="}, line
        assert requirement.url is None, line
    lowest = {Requirement(line).name: Requirement(line) for line in project["dependencies"]}
    # Below these, known holes: code run from Parquet types, from weights-only files, by overflow.
    for name, hole in (("pyarrow", "14.0.0"), ("torch", "2.5.1"), ("safetensors", "0.2.0")):
        assert not lowest[name].specifier.contains(hole), name


def test_what_was_compiled_is_kept_apart_by_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's key of a compiled graph knows the names of our operators, not what they do."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    places = list[str]()
    for source in ("now", "then"):
        monkeypatch.setattr(runtime, "source_hash", lambda source=source: source)
        runtime.start(RunConfig(device="cpu", threads=1)).leave()
        places.append(os.environ.pop("TORCHINDUCTOR_CACHE_DIR"))
    assert places == [f"{tmp_path}/electra/compiled/{name}" for name in ("now", "then")]
