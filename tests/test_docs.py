"""What README and docs say is so: their commands run, the files they name exist, numbers add up.

Every block of `sh`, `bash` or `python` on a page is run, in order, in a directory of the page's own
that holds some text and labelled data; what another page makes (a corpus, a model) is put there
when a command asks for it. Commands of `electra` run in this process with a few steps only. A block
under `<!-- not run: REASON -->` is not run, but its flags have to exist.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tyro
from conftest import MODULES
from packaging.requirements import Requirement
from torch.distributed.run import get_args_parser

from electra import cli, files
from electra.use.demo_text import find_text

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])

# ---------------------------------------------------------------------- commands

FEW = {  # what is added to a command so that it takes a second
    "pretrain": "--run.train-steps 4 --data.batch-size 8 --run.log-every 2 --run.eval-batches 1 "
    "--run.threads 1",
    "finetune": "--max-train 32 --epochs 1 --length 32 --threads 1",
    "glue": "--max-train 32 --epochs 1 --length 32 --threads 1",
}


class Block(NamedTuple):
    """Code on a page, and why it is not run if it is not."""

    place: str
    language: str
    code: str
    reason: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    pattern = r"(?:^<!-- not run: (.+?) -->\n)?^ *```(sh|bash|python)\n(.*?)^ *```$"
    return [
        Block(f"{page.name}:{text[: m.start()].count(chr(10)) + 1}", m[2], m[3], m[1] or "")
        for m in re.finditer(pattern, text, re.M | re.S)
    ]


def lines(block: Block) -> list[str]:
    joined = block.code.replace("\\\n", " ")
    return [line for line in joined.splitlines() if shlex.split(line, comments=True)]


@functools.cache
def flags(command: str) -> set[str]:
    """Every flag that the help of a command shows."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        cli.run([command, "--help"])
    return set(re.findall(r"--[\w.-]+", shown.getvalue())) | {"--debug", "--help"}


def parse(words: list[str]) -> None:
    """Refuse a command whose program, flags or values do not exist; others than ours pass."""
    match words:
        case ["torchrun", *rest]:
            given = get_args_parser().parse_args(rest)
            assert given.module, words
            parse([given.training_script, *given.training_script_args])
        case ["srun", *rest]:
            parse([word for word in rest[rest.index("torchrun") :] if word != "&"])
        case ["electra", name, *rest]:
            tyro.cli(cli.COMMANDS[name], args=rest)
        case ["make", target]:
            assert f"\n{target}:" in (ROOT / "Makefile").read_text(), target
        case ["pip", "install", *what]:
            project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            extras = re.findall(r"(?:electra|\.)\[([\w,]+)\]", " ".join(what))
            known = set(project["optional-dependencies"])
            assert {e for some in extras for e in some.split(",")} <= known, what
        case ["python", script, *rest]:
            source = (ROOT / script).read_text()
            for flag in (w for w in rest if w.startswith("--")):
                assert f"    {flag[2:].replace('-', '_')}: " in source, (script, flag)
        case _:
            pass


def run(line: str, provide: Callable[[str], None]) -> None:
    """Carry out one line of shell in the current directory."""
    words = shlex.split(line, comments=True)
    for before, word in zip(["", *words], words, strict=False):
        if before != "--out":
            provide(word.split("/")[0])
    if words[0] in ("make", "pip"):  # what set up the environment of this test
        parse(words)
    elif {"serve", "ui"} & set(words):  # they do not end
        parse(words[words.index("electra") :])
    elif words[0] == "electra" and not {"|", ">", "<", "&"} & set(words):
        few = FEW.get(words[1] if len(words) > 1 else "", "").split()
        try:
            code = cli.run([*words[1:], *few])
        except SystemExit as end:  # the parser's own way to end
            code = end.code or 0
        assert code == 0, f"exit code {code}"
    else:
        path = os.pathsep.join([str(BIN), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
        command = ["bash", "-euo", "pipefail", "-c", line]
        subprocess.run(command, env=environment, timeout=300, check=True)


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some text and labelled data, and what the commands make of it."""
    here = tmp_path_factory.mktemp("seed")
    texts, cola = here / "texts", here / "glue" / "CoLA"
    texts.mkdir()
    cola.mkdir(parents=True)
    paragraphs: list[str] = []
    for document in find_text().documents[:30]:
        name = re.sub(r"\W", "_", document.name)[-60:]
        (texts / f"{name}.txt").write_text("\n".join(document.paragraphs), encoding="utf-8")
        paragraphs += [p[:200].replace("\t", " ").replace('"', "") for p in document.paragraphs]
    some = paragraphs[:60]
    (here / "lines.txt").write_text("\n".join(some))
    rows = [f'"{p}",{1 + i % 5}' for i, p in enumerate(some)]
    (here / "reviews.csv").write_text("\n".join(["text,stars", *rows]))
    for split in ("train", "dev"):
        tab = [f"x\t{i % 2}\t\t{p}" for i, p in enumerate(some)]
        (cola / f"{split}.tsv").write_text("\n".join(tab))
    tagged = ["\n".join(f"{w} {'O' if w.islower() else 'B-X'}" for w in p.split()) for p in some]
    (here / "words.conll").write_text("\n\n".join(tagged))
    with contextlib.chdir(here):
        for command in (
            "electra tokenizer --input texts/ --vocab-size 2048 --out tok",
            "electra prepare --input texts/ --tokenizer tok --length 64 --out corpus --workers 1",
            "electra pretrain tiny --corpus corpus --out run --quiet",
            "electra export run --out model",
            "electra finetune --model model --data reviews.csv --text text --label stars "
            "--out tuned --quiet",
        ):
            run(command, lambda _: None)
    return here


@pytest.fixture
def scratch(
    seed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
    """An empty current directory, and a function that puts a thing of the seed there; where a
    command names no model, it is the seed's small one."""
    monkeypatch.setattr(files, "SHIPPED", seed / "model")

    def provide(name: str) -> None:
        source = seed / name
        if name and source.exists() and not Path(name).exists():
            (shutil.copytree if source.is_dir() else shutil.copy)(source, name)

    with contextlib.chdir(tmp_path):
        yield provide


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name
)
def test_the_code_of_a_page_runs(page: Path, scratch: Callable[[str], None]) -> None:
    names: dict[str, Any] = {}
    for block in blocks(page):
        if block.language == "python" and not block.reason:
            for word in re.findall(r'"([^"\n]+)"', block.code):
                scratch(word.split("/")[0])
            exec(compile(block.code, block.place, "exec"), names)
            continue
        for line in lines(block) if block.language != "python" else []:
            try:
                if block.reason:
                    parse(shlex.split(line, comments=True))
                else:
                    run(line, scratch)
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{block.place}: {line}") from error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_inside_sentences_have_their_flags(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for span in re.findall(r"`(electra\s[^`]+)`", text):
        words = span.split()
        if not re.fullmatch("[a-z]+", words[1]):
            continue  # --help, COMMAND
        for name in words[1].split("|"):
            assert name in cli.COMMANDS, span
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= flags(words[1]), span


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_named_on_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for name in re.findall(r"`((?:electra|tests|docs|benchmarks|results)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    for name in re.findall(r"`(\w+\.py)`", text):
        places = [ROOT / part / name for part in ("tests", "benchmarks")]
        there = name.removesuffix(".py") in MODULES or any(p.exists() for p in places)
        assert there, f"{page.name} names {name}"


def test_every_module_is_in_the_readme_map() -> None:
    text = (ROOT / "README.md").read_text()
    named = {name for name in MODULES if f"`{name}.py`" in text or f"`{name}/`" in text}
    kernels = {name for name, place in MODULES.items() if ".kernels." in place}
    assert set(MODULES) - named == {"errors"} | kernels


def test_at_most_35_distributions_come_with_the_package() -> None:
    """The closure of the requirements without extras, torch and what torch needs left out."""

    def closure(name: str, seen: set[str]) -> set[str]:
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in seen:
            return seen
        seen.add(key)
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                closure(requirement.name, seen)
        return seen

    torch = closure("torch", set())
    ours = closure("electra", set()) - torch - {"electra"}
    assert len(ours) <= 35, sorted(ours)
    said = re.search(r"(\d+) distributions", (ROOT / "docs" / "dependencies.md").read_text())
    assert said is not None
    assert int(said[1]) == len(ours), sorted(ours)


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["pyright", "--pythonpath"]],
    ids=" ".join,
)
def test_the_code_is_clean(command: list[str]) -> None:
    extra = [sys.executable] if command[0] == "pyright" else []
    tool = [str(BIN / command[0]), *command[1:], *extra]
    done = subprocess.run(tool, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
