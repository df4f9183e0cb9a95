"""Vectors of lines: those of transformers, in the order of the lines, in files that are whole."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers

from electra import cli
from electra.config import DataConfig, EncoderConfig, GeneratorConfig, PretrainConfig
from electra.data.tokenizer import Tokenizer
from electra.errors import ElectraError, Stopped
from electra.formats import hf_export
from electra.objectives import SpecialIds, build_objective
from electra.use import embed as module
from electra.use.embed import embed, embed_file, for_sentence_transformers

ROOT = Path(__file__).parents[1]
CONFIG = EncoderConfig(
    layers=2, hidden_size=22, ffn_size=34, attention_heads=2, embedding_size=14, max_positions=29
)
LINES = [
    "one old river sees stone .",
    "",
    "all quiet songs follow all bright birds " * 9,  # cut off
    "FIRE",
    "  \t ",
    "東京 is [SEP] no river , [MASK] road",
    *(" ".join(["green", "tree", "wind"] * n) for n in range(1, 20)),
]
EMPTY = [1, 4]


@pytest.fixture(scope="module")
def model(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The discriminator of an export, with lively weights."""
    out = tmp_path_factory.mktemp("embed") / "export"
    config = PretrainConfig(
        encoder=CONFIG, generator=GeneratorConfig(width=0.5), data=DataConfig(sequence_length=23)
    )
    vocab_size = Tokenizer.load(tokenizer_dir).vocab_size
    objective = build_objective(config, vocab_size, SpecialIds(*range(5)))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=draw)
    hf_export.export(objective, config, tokenizer_dir, out)
    return out / "discriminator"


@torch.no_grad()
def expected(model: Path, pooling: str, length: int = 29) -> np.ndarray:
    """What transformers gives, one line after the other."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    encoder: Any = transformers.AutoModel.from_pretrained(model).eval()
    rows = []
    for line in LINES:
        given = tokenizer(line, truncation=True, max_length=length, return_tensors="pt")
        h = encoder(**given).last_hidden_state[0]
        rows.append((h[0] if pooling == "cls" else h.mean(0)).numpy())
    vectors = np.stack(rows)
    vectors[EMPTY] = 0
    return vectors


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_those_of_transformers(model: Path, pooling: str) -> None:
    ours = embed(model, LINES, pooling=pooling)
    assert ours.dtype == np.float32
    assert np.abs(ours).max() > 0.1
    assert np.abs(ours - expected(model, pooling)).max() <= 1e-5
    short = embed(model, LINES, pooling=pooling, length=7)
    assert np.abs(short - expected(model, pooling, 7)).max() <= 1e-5


def test_the_same_bits_whatever_the_threads_and_nearly_so_whatever_the_batch(model: Path) -> None:
    first = embed(model, LINES)
    for threads in (1, 2, 5):
        assert np.array_equal(embed(model, LINES, threads=threads), first)
    for batch_tokens in (1, 40, 97):
        other = embed(model, LINES, batch_tokens=batch_tokens)
        assert np.abs(other - first).max() <= 1e-5


def test_torch_has_as_many_threads_after_as_before(model: Path) -> None:
    torch.set_num_threads(2)
    before = torch.__config__.parallel_info()  # of all libraries: some share one setting
    embed(model, LINES, threads=3)
    assert torch.__config__.parallel_info() == before


def test_no_lines_are_no_vectors(model: Path) -> None:
    assert embed(model, []).shape == (0, CONFIG.hidden_size)


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_a_file_of_many_parts_has_row_i_of_line_i(
    model: Path, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "lines.txt.gz", tmp_path / "new" / f"vectors{suffix}"
    source.write_bytes(gzip.compress("\r\n".join(LINES).encode()))
    monkeypatch.setattr(module, "_PART", 4)
    done = embed_file(model, str(source), out)
    assert done == (len(LINES), len(EMPTY), CONFIG.hidden_size)
    if suffix == ".npy":
        vectors = np.load(out, mmap_mode="r")
        assert isinstance(vectors, np.memmap)
    else:
        assert pq.ParquetFile(out).num_row_groups == -(-len(LINES) // 4)
        vectors = np.array(pq.read_table(out)["vector"].to_pylist(), np.float32)
    assert np.abs(vectors - expected(model, "mean")).max() <= 1e-5
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_memory_is_bounded_by_the_characters_of_a_part() -> None:
    line = "a" * (module._CHARACTERS // 3)
    assert [len(part) for part in module._parts([line] * 8)] == [4, 4]


def test_the_command_reads_what_is_piped_in(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "vectors.npy"
    command = ["embed", "--model", model, "--input", "-", "--out", out, "--pooling", "cls"]
    done = subprocess.run(
        [sys.executable, "-m", "electra", *map(str, command)],
        input="\n".join(LINES) + "\n",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(LINES)} vectors of 22 numbers" in done.stdout
    assert "2 of them are zeros" in done.stdout
    assert np.array_equal(np.load(out), embed(model, LINES, pooling="cls"))


def test_a_signal_leaves_the_old_file_and_nothing_else(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "lines.txt", tmp_path / "vectors.npy"
    source.write_text("\n".join(LINES))
    out.write_bytes(b"old")
    pooled = module.Embedder._pooled

    def signalled(self: module.Embedder, *given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(module.Embedder, "_pooled", pooled)
        return pooled(self, *given)

    monkeypatch.setattr(module.Embedder, "_pooled", signalled)
    monkeypatch.setattr(module, "_PART", 2)
    command = ["embed", "--model", model, "--input", source, "--out", out, "--threads", "1"]
    assert cli.run(list(map(str, command))) == 75
    assert "no vectors were written" in capsys.readouterr().err
    assert out.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines.txt", "vectors.npy"]


def test_a_library_call_can_be_stopped(model: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("fire\n")
    out = tmp_path / "vectors.parquet"
    with pytest.raises(Stopped):
        embed_file(model, str(tmp_path / "lines.txt"), out, should_stop=lambda: True)
    assert not list(tmp_path.glob("*parquet*"))


@pytest.mark.parametrize(
    ("content", "name", "settings", "said"),
    [
        (b"fire\n", "vectors.csv", {}, "ends in .npy or .parquet"),
        (b"", "vectors.npy", {}, "no line to embed"),
        (b"fire\n\xff\n", "vectors.npy", {}, "line 2, byte 5"),
        (None, "vectors.npy", {}, "Cannot open"),
        (b"fire\n", "vectors.npy", {"length": 30}, "use 2 to 29"),
        (b"fire\n", "vectors.npy", {"length": 1}, "use 2 to 29"),
        (b"fire\n", "vectors.npy", {"batch_tokens": -1}, "batch_tokens is -1"),
        (b"fire\n", "vectors.npy", {"threads": -1}, "threads is -1"),
        (b"fire\n", "vectors.npy", {"batch_tokens": 0}, "batch_tokens is 0"),
        (b"fire\n", "vectors.npy", {"threads": 0}, "threads is 0"),
    ],
)
def test_mistakes_are_refused(
    model: Path, tmp_path: Path, content: bytes | None, name: str, settings: Any, said: str
) -> None:
    source, out = tmp_path / "lines.txt", tmp_path / name
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(ElectraError) as caught:
        embed_file(model, str(source), out, **settings)
    assert said in str(caught.value)
    assert not list(tmp_path.glob("*vectors*"))


def test_a_folder_is_no_text(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ElectraError, match="Cannot open: Is a directory") as caught:
        embed_file(model, str(tmp_path), tmp_path / "vectors.npy")
    assert caught.value.where == str(tmp_path)


def test_sentence_transformers_loads_the_directory_with_the_same_vectors(model: Path) -> None:
    reason = "sentence-transformers is not installed"
    package = pytest.importorskip("sentence_transformers", reason=reason)
    for_sentence_transformers(model)
    lines = [line for line in LINES if line.strip()]
    theirs = package.SentenceTransformer(str(model), device="cpu").encode(lines)
    assert np.abs(theirs - embed(model, lines)).max() <= 1e-5


def test_export_makes_such_a_directory_on_demand(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path(shutil.copytree(model, tmp_path / "out" / "discriminator"))
    for name in ("modules.json", "sentence_bert_config.json"):
        (place / name).unlink(missing_ok=True)
    report = hf_export.ExportReport((place,), (), None)
    monkeypatch.setattr(hf_export, "export_run", lambda *_, **__: report)
    command = ["export", "RUN", "--out", str(tmp_path / "out")]
    assert cli.run(command) == 0
    assert not (place / "modules.json").exists()
    assert cli.run([*command, "--sentence-transformers"]) == 0
    paths = [part["path"] for part in json.loads((place / "modules.json").read_text())]
    assert all((place / path).is_dir() for path in paths)
