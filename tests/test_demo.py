"""The demo as a user runs it: what it claims about learning has to hold, in its own minutes.

Runs alone (`make test` starts it after everything else), because a second process on the two cores
would take the minutes it measures.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean

import pytest

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, float]:
    out = tmp_path_factory.mktemp("demo") / "out"
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "electra", "demo", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out, json.loads((out / "demo.json").read_text()), time.monotonic() - begin


def test_it_takes_at_most_five_minutes(demo: tuple[Path, dict, float]) -> None:
    assert demo[2] < 300


def test_the_generator_beats_token_frequencies(demo: tuple[Path, dict, float]) -> None:
    held_out = demo[1]["held_out"]
    assert held_out["mlm_loss"] < held_out["unigram_entropy"] - 0.2


def test_the_discriminator_passes_an_auc_of_060(demo: tuple[Path, dict, float]) -> None:
    assert demo[1]["held_out"]["disc_auc"] > 0.60


def test_exchanged_words_are_found_more_often_than_by_chance(
    demo: tuple[Path, dict, float],
) -> None:
    words = demo[1]["exchanged_words"]
    assert words["found"] > 2 * words["by_chance"]


def test_pretraining_helps_beyond_the_spread_of_three_seeds(demo: tuple[Path, dict, float]) -> None:
    task = demo[1]["labelled_task"]
    assert len(task["pretrained"]) == len(task["random"]) == 3
    assert min(task["pretrained"]) > max(task["random"])


def test_the_model_of_the_checkout_is_better_than_one_of_minutes(
    demo: tuple[Path, dict, float],
) -> None:
    tiny, small = demo[1], demo[1]["shipped_model"]
    if small is None:
        pytest.skip("models/small-en is not in this checkout")
    assert small["exchanged_words"]["found"] > tiny["exchanged_words"]["found"]
    assert mean(small["labelled_task"]) > mean(tiny["labelled_task"]["pretrained"])


def test_everything_it_names_is_there(demo: tuple[Path, dict, float]) -> None:
    out = demo[0]
    for name in (
        "run/curves.png",
        "run/metrics.jsonl",
        "export/discriminator/config.json",
        "export/generator/model.safetensors",
        "tuned/pretrained/model/model.safetensors",
    ):
        assert (out / name).stat().st_size > 0
