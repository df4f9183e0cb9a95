"""The entries of benchmarks/reliability.py that are not tests already: their figures at full scale,
and a few kills or steps of those that no other test has a small count of.

RELIABILITY_SCALE=0.1 makes the long ones short while something is being changed.
"""

from __future__ import annotations

import os
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
