"""Fine-tuned models: the same predictions in transformers, every bit back, or a clear error."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from electra.config import EncoderConfig, PretrainConfig
from electra.data.tokenizer import Tokenizer
from electra.encoder import Embeddings, Encoder, initialise
from electra.errors import CorruptError, ElectraError
from electra.finetuning.features import TaskBatch
from electra.finetuning.heads import Form, TaskModel, build_head
from electra.finetuning.tasks import Kind, Task
from electra.formats import hf, hf_export, layout
from electra.objectives import SpecialIds, build_objective

CONFIG = EncoderConfig(
    layers=2,
    hidden_size=22,
    ffn_size=34,
    attention_heads=2,
    embedding_size=14,
    max_positions=29,
    dropout=0.2,
)
LABELS = ("no", "maybe so", "yes")
SUMMARY = {"median": 0.5731, "mean": 0.561, "best": 0.6, "std": 0.0123, "seeds": 5, "failed": 1}
RESULTS = {"summary": SUMMARY, "model": "runs/small", "settings": {"learning_rate": 3e-4}}
AUTO: dict[Kind, Any] = {
    "classification": transformers.AutoModelForSequenceClassification,
    "regression": transformers.AutoModelForSequenceClassification,
    "tagging": transformers.AutoModelForTokenClassification,
    "qa": transformers.AutoModelForQuestionAnswering,
}
IN_TRANSFORMERS: list[tuple[Kind, Form]] = [
    ("classification", "paper"),
    ("classification", "hf"),
    ("regression", "paper"),
    ("regression", "hf"),
    ("tagging", "paper"),
    ("tagging", "hf"),
    ("qa", "hf"),
]


def task_of(kind: Kind, **changed: Any) -> Task:
    labels = LABELS if kind in ("classification", "tagging") else ()
    task = Task(name="mine", kind=kind, metric="accuracy", labels=labels)
    if kind == "regression":
        task = replace(task, scale=5.0, offset=-70.0)
    return replace(task, **changed)


def model_of(task: Task, form: Form, tokenizer: Tokenizer, **options: Any) -> TaskModel:
    """With weights large enough that every part matters, and a zero that has a sign."""
    encoder = Encoder(CONFIG, Embeddings(CONFIG, tokenizer.vocab_size))
    head = build_head(task.kind, CONFIG, len(task.labels) or 1, form, **options)
    model = TaskModel(encoder, head)
    initialise(model, "paper", 0)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
        next(head.parameters()).view(-1)[0] = -0.0
    return model


def export(
    out: Path, task: Task, form: Form, tokenizer: Tokenizer, results: Any = RESULTS, **options: Any
) -> TaskModel:
    model = model_of(task, form, tokenizer, **options)
    hf_export.export_finetuned(model, task, form, tokenizer, out, results=results, length=23)
    return model


@pytest.fixture(scope="module")
def exported(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "model"
    export(out, task_of("classification"), "paper", tokenizer)
    return out


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "model"))


def batch(vocab_size: int) -> TaskBatch:
    """Three padded rows of two segments."""
    length, position = torch.tensor([[13], [7], [2]]), torch.arange(13)
    mask = position < length
    x = torch.randint(0, vocab_size, (3, 13), generator=torch.Generator().manual_seed(1))
    segment = ((position >= length // 2) & mask).long()
    return TaskBatch(torch.where(mask, x, 0), segment, mask, {})


@torch.no_grad()
def raw(model: TaskModel, kind: Kind) -> Tensor:
    """What the class of transformers gives."""
    given = batch(model.encoder.embeddings.word.num_embeddings)
    if kind == "qa":
        head: Any = model.head
        h = model.encoder(given.x, given.segment, given.mask, None)
        return torch.stack(head.logits(h))[:, given.mask]
    logits = model.predict(given)["logits"]
    return logits[given.mask] if kind == "tagging" else logits


@torch.no_grad()
def raw_in_transformers(directory: Path, kind: Kind) -> Tensor:
    model, info = AUTO[kind].from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    given = batch(model.config.vocab_size)
    output = model.eval()(
        input_ids=given.x, token_type_ids=given.segment, attention_mask=given.mask.long()
    )
    if kind == "qa":
        return torch.stack([output.start_logits, output.end_logits])[:, given.mask]
    return output.logits[given.mask] if kind == "tagging" else output.logits


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor.view(torch.int32), b[name].view(torch.int32)), name


# ---------------------------------------------------------------------- predictions


@pytest.mark.parametrize(("kind", "form"), IN_TRANSFORMERS)
def test_predictions_are_the_same_in_transformers(
    kind: Kind, form: Form, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    task = task_of(kind)
    model = export(tmp_path / "out", task, form, tokenizer)
    theirs = raw_in_transformers(tmp_path / "out", kind)
    ours = task.scale * raw(model, kind) + task.offset
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    loaded = hf.load_finetuned(tmp_path / "out")
    torch.testing.assert_close(raw(loaded.model, kind), theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "form"), [*IN_TRANSFORMERS, ("qa", "paper")])
def test_every_bit_comes_back(kind: Kind, form: Form, tokenizer: Tokenizer, tmp_path: Path) -> None:
    task = task_of(kind)
    model = export(tmp_path / "out", task, form, tokenizer)
    loaded = hf.load_finetuned(tmp_path / "out")
    expected = model.state_dict()
    if kind == "regression":
        for end in ("weight", "bias"):
            expected[f"head.out.{end}"] = 5.0 * expected[f"head.out.{end}"]
        expected["head.out.bias"] = expected["head.out.bias"] - 70.0
    assert_same_bits(loaded.model.state_dict(), expected)
    assert not loaded.model.training
    assert loaded.task == replace(task, scale=1.0, offset=0.0)
    assert (loaded.form, loaded.length, loaded.results) == (form, 23, RESULTS)
    assert loaded.tokenizer.hash == tokenizer.hash
    assert loaded.model.head.form == form
    assert all(p.requires_grad for p in loaded.model.parameters())


def test_a_regression_is_in_the_units_of_the_data(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Not in those it was trained with, and not scaled twice by whoever reads `task.scale`."""
    model = export(tmp_path / "out", task_of("regression"), "paper", tokenizer)
    loaded = hf.load_finetuned(tmp_path / "out")
    ours, again = raw(model, "regression"), raw(loaded.model, "regression")
    again = again * loaded.task.scale + loaded.task.offset
    torch.testing.assert_close(5 * ours - 70, again, rtol=1e-5, atol=1e-5)
    record = json.loads((tmp_path / "out" / "electra.json").read_bytes())
    assert (record["scale_in_head"], record["offset_in_head"]) == (5, -70)


def test_the_linear_head_inside_the_dense_one(exported: Path) -> None:
    """Three units for y, three for −y, and nothing in the others."""
    tensors = load_file(exported / "model.safetensors")
    dense, out = tensors["classifier.dense.weight"], tensors["classifier.out_proj.weight"]
    head = load_file(exported / "head.safetensors")
    assert torch.equal(dense[:3], head["head.out.weight"])
    assert torch.equal(out @ dense, 2 * head["head.out.weight"])
    assert dense[6:].count_nonzero() == 0


@pytest.mark.parametrize("end", ["joint", "independent"])
@pytest.mark.parametrize("answerable", ["pooled", "plain", "none"])
def test_the_joint_head_lies_beside_the_encoder(
    end: str, answerable: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = {"end": end, "answerable": answerable, "beam": 4}
    model = export(out, task_of("qa"), "paper", tokenizer, **options)
    loaded = hf.load_finetuned(out)
    given = batch(tokenizer.vocab_size)
    assert_same_bits(loaded.model.state_dict(), model.state_dict())
    assert_equal = torch.testing.assert_close
    for name, tensor in model.predict(given).items():
        # Not to the bit: on some processors a sum depends on where in memory its numbers lie.
        assert_equal(loaded.model.predict(given)[name], tensor, rtol=1e-5, atol=1e-5)
    theirs, info = transformers.AutoModel.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        states = theirs(
            input_ids=given.x, token_type_ids=given.segment, attention_mask=given.mask.long()
        )[0]
        ours = model.encoder(given.x, given.segment, given.mask, None)
    assert_equal(ours[given.mask], states[given.mask], rtol=0, atol=1e-5)
    assert "no class for its head" in (out / "README.md").read_text("utf-8")


def test_more_outputs_than_the_dense_layer_has_room_for(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Eleven classes take all 22 units; twelve go beside the encoder."""
    for count in (11, 12):
        out = tmp_path / str(count)
        task = task_of("classification", labels=tuple(map(str, range(count))))
        model = export(out, task, "paper", tokenizer)
        loaded = hf.load_finetuned(out)
        assert_same_bits(loaded.model.state_dict(), model.state_dict())
        names = load_file(out / "model.safetensors").keys()
        assert any(name.startswith("classifier") for name in names) == (count == 11)
    theirs = raw_in_transformers(tmp_path / "11", "classification")
    again = hf.load_finetuned(tmp_path / "11").model
    torch.testing.assert_close(raw(again, "classification"), theirs, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- what is written


def test_what_transformers_is_told(exported: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(exported)
    assert config.architectures == ["ElectraForSequenceClassification"]
    assert config.problem_type == "single_label_classification"
    assert config.num_labels == 3
    assert config.id2label == dict(enumerate(LABELS))
    assert config.label2id == {name: i for i, name in enumerate(LABELS)}
    assert config.hidden_dropout_prob == 0.2
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    assert theirs.model_max_length == 23
    assert theirs("one old bird")["input_ids"] == tokenizer.encode("one old bird")
    export(tmp_path / "r", task_of("regression"), "hf", tokenizer)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "r")
    assert (config.problem_type, config.num_labels) == ("regression", 1)
    export(tmp_path / "t", task_of("tagging"), "hf", tokenizer)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "t")
    assert config.architectures == ["ElectraForTokenClassification"]
    assert config.id2label == dict(enumerate(LABELS))
    export(tmp_path / "q", task_of("qa"), "hf", tokenizer)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "q")
    assert (config.architectures, config.num_labels) == (["ElectraForQuestionAnswering"], 2)


def test_a_pipeline_names_the_labels(exported: Path) -> None:
    pipeline = transformers.pipeline("text-classification", model=str(exported))
    assert pipeline("one old bird sees .")[0]["label"] in LABELS


def test_an_answer_does_not_load_the_compiler(exported: Path) -> None:
    """Which takes as long as importing torch does."""
    code = "import sys, electra; electra.load_finetuned(sys.argv[1]).predict('one old bird'); "
    code += "sys.exit('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, exported], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("kind", ["classification", "regression", "tagging", "qa"])
def test_a_card_says_what_no_pipeline_does(
    kind: Kind, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Its tag is a name of the Hub's, which offers pipelines that transformers no longer has."""
    export(tmp_path / "out", task_of(kind), "hf", tokenizer)
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    tag = re.search('^pipeline_tag: "(.*)"$', card, re.M)
    assert tag is not None
    offered = transformers.pipelines.get_supported_tasks()
    assert ("transformers has no pipeline" in card) == (tag[1] not in offered)
    assert ("tuned.predict([(question, passage)])" in card) == (kind == "qa")


def test_the_card(exported: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    card = (exported / "README.md").read_text("utf-8")
    score = "57.3 (mean 56.1 ± 1.2, best 60.0, 5 seeds, 1 failed)"
    for words in (score, "`mine`", "`maybe so`", "from `small`", "| `learning_rate` | `0.0003` |"):
        assert words in card
    flat = {**SUMMARY, "model": "runs/small"}  # the summary itself does as well
    export(tmp_path / "out", task_of("tagging"), "hf", tokenizer, flat)
    assert score in (tmp_path / "out" / "README.md").read_text("utf-8")
    export(tmp_path / "none", task_of("tagging"), "hf", tokenizer, {})
    assert "× 100" not in (tmp_path / "none" / "README.md").read_text("utf-8")


EVIL = "a`b\n---\ntags: [x]\n# head | <img src=x onerror=alert(1)> [l](http://e) \u202e **b** &lt;"


def test_a_card_takes_no_orders(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Names of tasks, labels, models and settings end up inside code, on their own line."""
    task = task_of("classification", name=EVIL, metric=EVIL, labels=(EVIL, "b" + EVIL))
    results = {"summary": SUMMARY, "model": EVIL, "settings": {EVIL: EVIL}}
    export(tmp_path / "out", task, "hf", tokenizer, results)
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert [line for line in card.splitlines() if line == "---"] == ["---", "---"]
    metadata, plain = card.split("\n---\n", 1)
    assert plain.startswith("\n# ELECTRA")
    keys = [line.partition(":")[0] for line in metadata.splitlines()[1:]]
    assert keys == ["library_name", "license", "pipeline_tag", "tags", "model-index"]
    plain = re.sub("```.*?```|`[^`\n]*`", "", plain, flags=re.S)
    for word in ("<img", "](", "**b**", "# head", "onerror", "\u202e", "`", "&lt;"):
        assert word not in plain, word
    assert all(line.count("|") == 3 for line in card.splitlines() if "|" in line)
    assert hf.load_finetuned(tmp_path / "out").task.labels == (EVIL, "b" + EVIL)


def test_an_export_appears_whole_or_not_at_all(
    exported: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export(out, task_of("tagging"), "hf", tokenizer, {"is": "first"})
    a, b = "encoder.blocks.{i}.attention_norm", "encoder.blocks.{i}.ffn_norm"
    crossed = {a: layout.MODULES[b], b: layout.MODULES[a]}
    with monkeypatch.context() as patch:
        patch.setattr(layout, "MODULES", layout.MODULES | crossed)
        with pytest.raises(CorruptError, match="logits differ"):
            export(out, task_of("tagging"), "hf", tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(layout, "_dense_head", lambda *_: _broken(*_))
        with pytest.raises(CorruptError, match="logits differ"):
            export(tmp_path / "other", task_of("classification"), "paper", tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert hf.load_finetuned(out).results == {"is": "first"}
    export(out, task_of("qa"), "hf", tokenizer)
    assert hf.load_finetuned(out).task.kind == "qa"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    with pytest.raises(ElectraError, match="something else"):
        export(tmp_path / "mine", task_of("qa"), "hf", tokenizer)
    assert exported.exists()


def _broken(tensors: dict[str, Tensor], last: str) -> dict[str, Tensor]:
    """A dense head without the second half of its units."""
    w = tensors[f"{last}.weight"]
    C, D = w.shape
    return {
        "head.dense.weight": torch.cat([w, torch.zeros(D - C, D)]),
        "head.dense.bias": torch.zeros(D),
        f"{last}.weight": torch.eye(C, D),
    }


def test_without_transformers(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    export(tmp_path / "out", task_of("classification"), "paper", tokenizer)
    assert hf.load_finetuned(tmp_path / "out").form == "paper"


# ---------------------------------------------------------------------- a start for another task


def test_starting_from_a_fine_tuned_model(
    exported: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """From its directory, from the run around it, and from the joint head's."""
    model = model_of(task_of("classification"), "paper", tokenizer)
    run = tmp_path / "run"
    shutil.copytree(exported, run / "model")
    (run / "finetune.json").write_text("{}")
    for path in (exported, run):
        start = hf.load_encoder(path)
        assert_same_bits(start.tensors, model.encoder.state_dict())
        assert replace(start.config, init=CONFIG.init) == CONFIG
        assert start.vocab_size == tokenizer.vocab_size
        assert start.tokenizer.hash == tokenizer.hash
        assert start.description == str(path)
        fresh = Encoder(start.config, Embeddings(start.config, start.vocab_size))
        fresh.load_state_dict(start.tensors)
    assert hf.load_finetuned(run).task.name == "mine"
    joint = export(tmp_path / "joint", task_of("qa"), "paper", tokenizer)
    start = hf.load_encoder(tmp_path / "joint")
    assert_same_bits(start.tensors, joint.encoder.state_dict())


def test_starting_from_pre_training(tokenizer_dir: Path, tmp_path: Path) -> None:
    """The discriminator where there is one; both give the tensors of the encoder alone."""
    config = PretrainConfig(encoder=replace(CONFIG, max_positions=128))
    config = replace(config, generator=replace(config.generator, width=0.5))
    size = Tokenizer.load(tokenizer_dir).vocab_size
    objective: Any = build_objective(config, size, SpecialIds(*range(5)))
    hf_export.export(objective, config, tokenizer_dir, tmp_path / "out")
    for path, encoder in (
        (tmp_path / "out", objective.discriminator),
        (tmp_path / "out" / "discriminator", objective.discriminator),
        (tmp_path / "out" / "generator", objective.generator),
    ):
        start = hf.load_encoder(path)
        assert_same_bits(start.tensors, encoder.state_dict())


@pytest.mark.parametrize(
    "name",
    [
        "ElectraModel",
        "ElectraForPreTraining",
        "ElectraForMaskedLM",
        "ElectraForSequenceClassification",
        "ElectraForTokenClassification",
        "ElectraForQuestionAnswering",
        "ElectraForMultipleChoice",
    ],
)
def test_starting_from_any_class_of_transformers(
    name: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    config = transformers.ElectraConfig(
        vocab_size=tokenizer.vocab_size,
        embedding_size=14,
        hidden_size=22,
        intermediate_size=34,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=29,
    )
    model = getattr(transformers, name)(config).eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(ElectraError, match="no tokenizer"):
        hf.load_encoder(tmp_path)
    tokenizer.save(tmp_path)
    start = hf.load_encoder(tmp_path)
    encoder = Encoder(start.config, Embeddings(start.config, start.vocab_size))
    encoder.load_state_dict(start.tensors)
    given = batch(tokenizer.vocab_size)
    base = getattr(model, "electra", model)
    with torch.no_grad():
        theirs = base(
            input_ids=given.x, token_type_ids=given.segment, attention_mask=given.mask.long()
        )[0]
        ours = encoder(given.x, given.segment, given.mask, None)
    torch.testing.assert_close(ours[given.mask], theirs[given.mask], rtol=0, atol=1e-5)
    with pytest.raises(ElectraError, match=r"(no|not a) fine-tuned"):
        hf.load_finetuned(tmp_path)


def test_a_fingerprint_sees_every_change(exported: Path) -> None:
    start = hf.load_encoder(exported)
    same = replace(start, tensors=dict(reversed(start.tensors.items())), description="moved")
    assert same.fingerprint == start.fingerprint
    assert re.fullmatch("[0-9a-f]{64}", start.fingerprint)
    name, tensor = next(iter(start.tensors.items()))
    nudged = tensor.clone()
    nudged.view(-1)[-1] += 1e-6
    for changed in (
        {**start.tensors, name: nudged},
        {**start.tensors, name: tensor.view(-1)},
        {("other" if n == name else n): t for n, t in start.tensors.items()},
    ):
        assert replace(start, tensors=changed).fingerprint != start.fingerprint


# ---------------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize(
    "name", ["model.safetensors", "head.safetensors", "config.json", "tokenizer.json"]
)
def test_damaged_and_missing_files(name: str, copy: Path) -> None:
    file = copy / name
    data = bytearray(file.read_bytes())
    data[-3] ^= 1  # one bit, which no format notices by itself
    for content in (bytes(data), file.read_bytes()[:-1], b"", None):
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        for load in (hf.load_finetuned, hf.load_encoder):
            if content is None and name == "config.json" and load is hf.load_encoder:
                continue  # then it is no model at all, which is another error
            with pytest.raises(CorruptError, match="not the one that was written") as error:
                load(copy)
            assert name in error.value.where
            assert error.value.fix


def test_files_of_another_model(copy: Path) -> None:
    """Tensors that fit, but are not those of this model: transformers trained it further."""
    tensors = load_file(copy / "model.safetensors")
    tensors["classifier.out_proj.bias"] += 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptError, match="not the one"):
        hf.load_finetuned(copy)
    (copy / "electra.json").unlink()
    assert hf.load_encoder(copy).vocab_size > 0
    with pytest.raises(ElectraError, match="no fine-tuned model"):
        hf.load_finetuned(copy)


@pytest.mark.parametrize(
    "changed",
    [
        {"task": None},
        {"task": {"name": "x"}},
        {"task": {"name": "x", "kind": "classification", "metric": "m", "labels": ["a", "b"]}},
        {"form": "hf"},
        {"form": None},
        {"head": {"size": 3}},
        {"head": None},
        {"length": "long"},
        {"results": 3},
    ],
)
def test_a_record_that_does_not_fit(changed: dict[str, Any], copy: Path) -> None:
    record = json.loads((copy / "electra.json").read_bytes())
    (copy / "electra.json").write_text(json.dumps({**record, **changed}))
    with pytest.raises(ElectraError) as error:
        hf.load_finetuned(copy)
    assert str(copy) in error.value.where


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"format": 2, "files": {}}', '{"format": 1}']
)
def test_a_record_that_is_none(content: str, copy: Path) -> None:
    (copy / "electra.json").write_text(content)
    with pytest.raises(ElectraError):
        hf.load_finetuned(copy)


def test_a_pickle_is_never_read(copy: Path) -> None:
    (copy / "head.safetensors").unlink()
    (copy / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CorruptError):
        hf.load_finetuned(copy)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ElectraError, match="no fine-tuned model"):
        hf.load_finetuned(tmp_path)
    with pytest.raises(ElectraError, match="This is no model"):
        hf.load_encoder(tmp_path)


def test_notes_in_the_card_are_allowed(copy: Path) -> None:
    (copy / "README.md").write_text("my own words")
    assert hf.load_finetuned(copy).task.name == "mine"
