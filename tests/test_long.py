"""The entries of benchmarks/reliability.py that are not tests already: their figures at full scale,
and a few kills or steps of those that no other test has a small count of.

RELIABILITY_SCALE=0.1 makes the long ones short while something is being changed.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import reliability

FULL = float(os.environ.get("RELIABILITY_SCALE", "1"))
SMALL = {"R14": 0.15, "R15": 0.12, "R24": 0.06}  # 3 workers, 6 restarts, 600 steps


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        *SMALL.items(),
        *(
            pytest.param(name, FULL, marks=pytest.mark.long)
            for name in reliability.ENTRIES
            if name not in reliability.TESTED
        ),
    ],
)
def test_the_figure_is_met(name: str, scale: float, tmp_path: Path) -> None:
    if missing := reliability.why_not(name):
        pytest.skip(missing)
    seen = reliability.ENTRIES[name].run(tmp_path, scale)
    assert seen.holds, f"{seen.text}\n{seen.counts}"


def test_the_script_finds_all_that_its_entries_import(tmp_path: Path) -> None:
    """Some of it only when they run; pytest finds it anyway, whoever starts the script may not."""
    script = Path(reliability.__file__)
    lazily = {
        alias.name
        for function in ast.walk(ast.parse(script.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.startswith("test_")
    }
    assert {"test_distributed", "test_finetune", "test_tokenizer"} <= lazily
    root = str(script.parents[1])  # an editable installation may or may not have it on the path
    code = f"import runpy, sys; runpy.run_path({str(script)!r})\n"
    code += f"sys.path[:] = [place for place in sys.path if place != {root!r}]\n"
    code += f"import {', '.join(sorted(lazily))}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
