"""ONNX: the outputs of transformers for any shape, int8 with its cost, or a clear error."""

from __future__ import annotations

import importlib.util
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from electra import cli
from electra.config import DataConfig, EncoderConfig, GeneratorConfig, PretrainConfig
from electra.data.tokenizer import Tokenizer
from electra.encoder import Embeddings, Encoder, initialise
from electra.errors import CorruptError, ElectraError
from electra.finetuning.heads import Form, TaskModel, build_head
from electra.finetuning.tasks import Kind, Task
from electra.formats import hf, hf_export, onnx_export
from electra.formats.onnx_export import export_onnx
from electra.objectives import SpecialIds, build_objective

CONFIG = EncoderConfig(
    layers=1, hidden_size=24, ffn_size=34, attention_heads=2, embedding_size=14, max_positions=29
)
needs_onnx = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("onnxruntime", "onnxscript"))),
    reason="the extra onnx is not installed",
)


def lively(module: Any) -> Any:
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    return module


def finetuned(out: Path, kind: Kind, form: Form, tokenizer: Tokenizer) -> Path:
    labels = ("no", "yes", "maybe") if kind == "classification" else ()
    task = Task(name="mine", kind=kind, metric="accuracy", texts=("text",), labels=labels)
    head = build_head(kind, CONFIG, len(labels) or 1, form)
    model = TaskModel(Encoder(CONFIG, Embeddings(CONFIG, tokenizer.vocab_size)), head)
    initialise(model, "paper", 0)
    hf_export.export_finetuned(lively(model), task, form, tokenizer, out, results={}, length=23)
    return out


@pytest.fixture(scope="module")
def export(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a pre-trained pair."""
    out = tmp_path_factory.mktemp("onnx") / "export"
    config = PretrainConfig(
        encoder=CONFIG, generator=GeneratorConfig(width=0.5), data=DataConfig(sequence_length=23)
    )
    vocab_size = Tokenizer.load(tokenizer_dir).vocab_size
    objective = build_objective(config, vocab_size, SpecialIds(*range(5)))
    hf_export.export(lively(objective), config, tokenizer_dir, out)
    return out


@torch.no_grad()
def differences(file: Path, directory: Path, auto: Any) -> float:
    """The largest to transformers, over shapes that the export did not look at, with padding."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = ["input_ids", "attention_mask", "token_type_ids"]
    assert [given.name for given in session.get_inputs()] == names
    model, largest = auto.from_pretrained(directory).eval(), 0.0
    draw = torch.Generator().manual_seed(1)
    for B, T in ((1, 1), (1, 29), (6, 13), (7, 2), (17, 20), (2, 28)):
        x = torch.randint(0, model.config.vocab_size, (B, T), generator=draw)
        mask = torch.arange(T) < torch.randint(1, T + 1, (B, 1), generator=draw)
        segment = torch.randint(0, 2, (B, T), generator=draw)
        given = dict(zip(names, (x, mask.long(), segment), strict=True))
        found = session.run(None, {name: value.numpy() for name, value in given.items()})
        output = model(**given)
        for place, theirs in zip(session.get_outputs(), found, strict=True):
            apart = np.abs(output[place.name].numpy() - theirs)
            is_per_token = place.name != "logits" or apart.shape == x.shape
            largest = max(
                largest, float(apart[mask.numpy()].max() if is_per_token else apart.max())
            )
    return largest


@needs_onnx
def test_a_classifier_with_int8_and_its_cost_from_the_command_line(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = tmp_path / "run", tmp_path / "rows.csv"
    model = finetuned(run / "model", "classification", "paper", tokenizer)
    before = {path.name for path in model.iterdir()}
    texts = [f"one {word} tree sees all {word} stones" for word in ("old", "small", "green")] * 9
    rows = [f"{text} {i},{('no', 'yes', 'maybe')[i % 3]}" for i, text in enumerate(texts)]
    data.write_text("\n".join(["text,label", *rows]))
    assert cli.run(["onnx", "--model", str(run), "--int8", "--data", str(data)]) == 0
    shown = capsys.readouterr()
    assert "checked: outputs within" in shown.out
    assert "int8: accuracy" in shown.out
    assert shown.err == ""
    added = {path.name for path in model.iterdir()} - before
    assert added == {"model.onnx", "model_quantized.onnx"}
    auto = transformers.AutoModelForSequenceClassification
    assert differences(model / "model.onnx", model, auto) <= 1e-4
    cost = differences(model / "model_quantized.onnx", model, auto)
    assert 1e-4 < cost < 1.0
    for name in added:  # nor does it tell where it was made
        assert str(Path(hf.__file__).parent).encode() not in (model / name).read_bytes()
    hf.load_finetuned(run)  # is not disturbed


@needs_onnx
def test_accuracy_counts_right_answers() -> None:
    def run(rows: Any) -> list[np.ndarray]:
        return [np.eye(3)[rows[0]][None]]

    rows: Any = [(0,), (1,), (2,), (1,)]
    assert onnx_export._accuracy(run, rows, [0, 1, 1, -1]) == 0.5


@needs_onnx
def test_questions_have_two_outputs_and_weights_that_are_too_large_a_file_of_their_own(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = finetuned(tmp_path / "model", "qa", "hf", tokenizer)
    monkeypatch.setattr(onnx_export, "_ONE_FILE", 0)
    out = tmp_path / "out"
    report = export_onnx(model, out, int8=True)
    assert {file.name for file in report.files} == {
        f"{name}.onnx{end}" for name in ("model", "model_quantized") for end in ("", ".data")
    }
    assert report.difference <= 1e-4
    assert report.difference < report.int8["mean"] < report.int8["largest"] < 1.0
    assert report.opset >= 18
    assert not (model / "model.onnx").exists()
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    auto = transformers.AutoModelForQuestionAnswering
    assert differences(out / "model.onnx", model, auto) <= 1e-4


@needs_onnx
def test_the_encoder_alone_and_a_wrong_graph_that_leaves_nothing(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, place = onnx_export._trace, export / "discriminator"

    def wrong(graph: Any, rows: Any) -> Any:
        other = deepcopy(graph)
        other.encoder.embeddings.position.weight[1, 0] += 0.1
        return trace(other, rows)

    monkeypatch.setattr(onnx_export, "_trace", wrong)
    before = {path.name for path in place.iterdir()}
    with pytest.raises(CorruptError, match="in onnxruntime"):
        export_onnx(export, part="encoder")
    assert {path.name for path in place.iterdir()} == before
    monkeypatch.setattr(onnx_export, "_trace", trace)
    (place / "model_quantized.onnx").write_bytes(b"of an earlier model")
    export_onnx(export, part="encoder")
    assert not (place / "model_quantized.onnx").exists()
    assert differences(place / "model.onnx", place, transformers.AutoModel) <= 1e-4


@pytest.mark.long
@needs_onnx
@pytest.mark.parametrize("name", ["discriminator", "generator"])
def test_both_networks_of_a_pair(export: Path, name: str, tmp_path: Path) -> None:
    classes = {"discriminator": "ElectraForPreTraining", "generator": "ElectraForMaskedLM"}
    out = tmp_path / "out"
    export_onnx(export / name, out)
    auto = getattr(transformers, classes[name])
    assert differences(out / "model.onnx", export / name, auto) <= 1e-4


def test_without_the_extra_it_is_named(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ElectraError, match="onnxruntime") as caught:
        export_onnx(export)
    assert "electra[onnx]" in caught.value.fix


@needs_onnx
def test_what_has_no_form_in_onnx_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = finetuned(tmp_path / "model", "qa", "paper", tokenizer)
    with pytest.raises(ElectraError, match="joint head"):
        export_onnx(model)
    with pytest.raises(ElectraError, match="only used to score"):
        export_onnx(model, part="encoder", int8=True, data=tmp_path)
    (tmp_path / "run").mkdir()
    with pytest.raises(ElectraError, match="no exported model") as caught:
        export_onnx(tmp_path / "run")
    assert "a run, an export" in caught.value.fix
