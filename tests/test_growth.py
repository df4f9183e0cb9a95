"""benchmarks/growth.py: its tables are what they say, and its rows come from real steps.

And benchmarks/start_speed.py: a start is timed until a step was made. And
benchmarks/kernel_bits.py: calls with other bits are counted. And benchmarks/kernels.py: it takes
all kernels unless some are named.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import growth
import kernel_bits
import kernels
import pytest
import start_speed
import torch
from conftest import SEQUENCE_LENGTH

from electra.data.shards import Corpus


def test_a_table_of_growth_changes_one_thing() -> None:
    rows = {table: growth.rows_of(table, small=False) for table in growth.TABLES}
    for table in ("length", "layers", "width"):
        assert {row.config.tokens_per_step for row in rows[table]} == {growth.TOKENS}, table
    assert [row.config.data.sequence_length for row in rows["length"]] == [
        *(128, 256, 512, 1024, 2048)
    ]
    assert all(row.config.encoder.head_size == 64 for row in rows["width"])
    assert {row.config.data.sequence_length for row in rows["sizes"]} == {512}
    # Where the tables meet, they have the same row.
    shared = [{row.name for row in rows[table]} for table in ("length", "batch", "layers", "width")]
    assert len(set.intersection(*shared)) == 1


def test_growth_is_measured_and_written(text: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, growth.__file__, "--text", str(text)]
    command += ["--tokenizer", str(tokenizer_dir), "--out", str(tmp_path / "out"), "--small"]
    command += ["--only", "batch", "--rounds", "2", "--seconds", "0.1", "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "out" / "growth.json").read_bytes())
    assert [label for label, _ in record["tables"]["batch"]] == ["batch 4", "batch 8"]
    for label, name in record["tables"]["batch"]:
        row = record["rows"][name]
        assert row["config"]["data"]["batch_size"] == int(label.split()[1])
        assert len(row["tokens_per_second"]) == 2
        assert row["predicted"] > 0
        line = next(line for line in done.stdout.splitlines() if line.startswith(label))
        assert f"{row['tokens_per_second_median']:,.0f}" in line


def test_starts_are_timed_until_the_first_step(corpus: Corpus, tmp_path: Path) -> None:
    settings = ("--run.train-steps=3", f"--data.sequence-length={SEQUENCE_LENGTH}")
    out, bad = tmp_path / "start.json", ("--encoder.layers=0",)
    given = {"corpus": corpus.path, "recipe": "tiny", "starts": 1}
    start_speed.main(start_speed.Arguments(out=out, settings=settings, **given))
    record = json.loads(out.read_bytes())
    assert len(record["seconds"]) == 1
    assert min(record["seconds"]) > 1  # nobody imports torch faster
    assert record["config"]["run"]["train_steps"] == 3
    assert record["environment"]["torch"]
    with pytest.raises(RuntimeError, match="without a step"):
        start_speed.main(start_speed.Arguments(out=out, settings=bad, **given))


def test_calls_with_other_bits_are_counted() -> None:
    calls: list[int] = []

    def ours(x: torch.Tensor, config: dict[str, int]) -> tuple[torch.Tensor, ...]:
        calls.append(config["by"])
        x += 1  # in place, as some kernels work
        changed = x.clone()
        changed[1, 1] = float("nan") if len(calls) == 2 else len(calls) // 3
        return x, changed

    case = kernel_bits.Case((torch.zeros(2, 3),), ours, ours, 0)
    assert kernel_bits.repeat(case, {"by": 7}, seconds=1.0) == (3, [0, 2])
    assert calls == [7, 7, 7]


def test_all_kernels_are_looked_at_unless_some_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()
    monkeypatch.setattr(kernels, "compile_for_h200", seen.append)
    for flags, names in (
        ([], [*kernels.ENTRIES]),
        (["--only", "attention"], ["attention"]),
        (
            ["--dropout"],
            [n for name in kernels.DROPPING for n in (name.removesuffix(", dropout"), name)],
        ),
    ):
        seen.clear()
        monkeypatch.setattr(sys, "argv", ["kernels.py", "--compile", *flags])
        kernels.main()
        assert seen == names
