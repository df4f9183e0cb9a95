"""The entries of benchmarks/reliability.py that are not tests already: their figures at full scale.

RELIABILITY_SCALE=0.1 makes them short while something is being changed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import reliability


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [n for n in reliability.ENTRIES if n not in reliability.TESTED])
def test_the_figure_is_met(name: str, tmp_path: Path) -> None:
    if missing := reliability.why_not(name):
        pytest.skip(missing)
    scale = float(os.environ.get("RELIABILITY_SCALE", "1"))
    seen = reliability.ENTRIES[name].run(tmp_path, scale)
    assert seen.holds, f"{seen.text}\n{seen.counts}"
