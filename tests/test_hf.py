"""Export to and import from transformers: the same logits, the same ids, or a clear error."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from electra.checkpoint import write_checkpoint
from electra.config import (
    DataConfig,
    EncoderConfig,
    GeneratorConfig,
    ObjectiveConfig,
    PretrainConfig,
    Sharing,
    to_dict,
)
from electra.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from electra.errors import CorruptError, ElectraError
from electra.formats import hf, hf_export, layout
from electra.objectives import Objective, SpecialIds, build_objective

# Pairwise different, so that no transposed or swapped axis can pass.
E, D, F, LAYERS, POSITIONS = 14, 22, 34, 3, 29
TEXTS = (
    "The Swedish café isn't OPEN today",
    "Ångström, naïve Straße und crème brûlée",
    "東京は日本の首都です。",
    "Unknown zebra words",
)


@pytest.fixture(scope="module", params=["cased", "uncased"])
def tokenizer_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary with accents and two Chinese characters; cased ones keep both."""
    directory = tmp_path_factory.mktemp(request.param)
    words = [
        "The",
        "the",
        "Swedish",
        "café",
        "isn",
        "'",
        "t",
        "OPEN",
        "open",
        "Ångström",
        "東",
        "京",
    ]
    letters = [f"{p}{c}" for p in ("", "##") for c in "abcdefghijklmnopqrstuvwxyåäöéèïß"]
    tokens = dict.fromkeys([*SPECIAL_TOKENS, *words, *letters, ",", ".", "。"])
    (directory / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), "utf-8")
    tokenizer = Tokenizer.load(directory / "vocab.txt", lowercase=request.param == "uncased")
    tokenizer.save(directory, max_length=POSITIONS)
    return directory


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer where it does not matter which."""
    directory = tmp_path_factory.mktemp("vocabulary")
    tokens = [*SPECIAL_TOKENS, *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghi")]
    (directory / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens), "utf-8")
    Tokenizer.load(directory / "vocab.txt").save(directory)
    (directory / "vocab.txt").unlink()
    return directory


def settings(
    sharing: Sharing = "embeddings", embedding_size: int = E, **objective: Any
) -> PretrainConfig:
    return PretrainConfig(
        encoder=EncoderConfig(
            layers=LAYERS,
            hidden_size=D,
            ffn_size=F,
            attention_heads=2,
            embedding_size=embedding_size,
            max_positions=POSITIONS,
        ),
        generator=GeneratorConfig(width=1.0 if sharing == "all" else 0.5, sharing=sharing),
        objective=ObjectiveConfig(**objective),
        data=DataConfig(sequence_length=11),
    )


def objective_of(config: PretrainConfig, tokenizer: Path) -> Objective:
    """With weights large enough that every part of the networks matters."""
    objective = build_objective(config, Tokenizer.load(tokenizer).vocab_size, SpecialIds(*range(5)))
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    return objective


@pytest.fixture(scope="module")
def exported(vocabulary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "out"
    hf_export.export(objective_of(settings(), vocabulary), settings(), vocabulary, out, step=17)
    return out


def inputs(vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three padded rows of two segments: ids, segments and mask, (3, 13)."""
    length = torch.tensor([[13], [7], [2]])
    position = torch.arange(13)
    mask = position < length
    x = torch.randint(0, vocab_size, (3, 13), generator=torch.Generator().manual_seed(1))
    return torch.where(mask, x, 0), ((position >= length // 2) & mask).long(), mask


@torch.no_grad()
def our_logits(network: layout.Network) -> Tensor:
    x, segment, mask = inputs(network.vocab_size)
    if network.kind == "discriminator":
        encoder, head = layout.build_discriminator(network)
        return head(encoder(x, segment, mask, None))[mask]
    encoder, head = layout.build_generator(network)
    return head(encoder(x, segment, mask, None)[mask], encoder.embeddings.word.weight)


@torch.no_grad()
def their_logits(model: Any) -> Tensor:
    x, segment, mask = inputs(model.config.vocab_size)
    return model.eval()(input_ids=x, token_type_ids=segment, attention_mask=mask.long()).logits[
        mask
    ]


AUTO = {
    "discriminator": transformers.AutoModelForPreTraining,
    "generator": transformers.AutoModelForMaskedLM,
}


def load_in_transformers(directory: Path) -> Any:
    model, info = AUTO[directory.name].from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


# ---------------------------------------------------------------------- ours to transformers


@pytest.mark.parametrize("disc_head", ["dense", "linear"])
@pytest.mark.parametrize("embedding_size", [E, D])
@pytest.mark.parametrize("sharing", ["none", "embeddings", "all"])
def test_logits_are_the_same_in_transformers(
    sharing: Sharing, embedding_size: int, disc_head: str, vocabulary: Path, tmp_path: Path
) -> None:
    config = settings(sharing, embedding_size, disc_head=disc_head)
    objective = objective_of(config, vocabulary)
    report = hf_export.export(objective, config, vocabulary, tmp_path / "out")
    assert [d.name for d in report.directories] == ["discriminator", "generator"]
    assert report.max_difference is not None
    assert report.max_difference <= 1e-5
    assert len(report.checks) == 2
    for network in layout.networks_of(objective):
        model = load_in_transformers(tmp_path / "out" / network.kind)
        ours, theirs = our_logits(network), their_logits(model)
        assert ours.std() > 0.1
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_the_objective_itself_computes_these_logits(vocabulary: Path) -> None:
    """`networks_of` copies what the objective trains: same numbers from its own modules."""
    objective: Any = objective_of(settings(), vocabulary)
    discriminator, generator = layout.networks_of(objective)
    x, segment, mask = inputs(discriminator.vocab_size)
    with torch.no_grad():
        h = objective.discriminator(x, segment, mask, None)
        assert torch.equal(objective.discriminator_head(h)[mask], our_logits(discriminator))
        h = objective.generator(x, segment, mask, None)[mask]
        table = objective.generator.embeddings.word.weight
        assert torch.equal(objective.generator_head(h, table), our_logits(generator))


def test_ids_are_the_same_in_transformers(tokenizer_dir: Path, tmp_path: Path) -> None:
    config = settings()
    hf_export.export(objective_of(config, tokenizer_dir), config, tokenizer_dir, tmp_path / "out")
    ours = Tokenizer.load(tokenizer_dir)
    for kind in AUTO:
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out" / kind)
        assert theirs.model_max_length == POSITIONS
        for text in TEXTS:
            given = theirs(text)
            assert given["input_ids"] == ours.encode(text)
            assert set(given) == {"input_ids", "token_type_ids", "attention_mask"}
        assert theirs(TEXTS[0], TEXTS[1])["input_ids"] == ours.encode(TEXTS[0], TEXTS[1])
    # The vocabulary tells the cases apart, so the test would see a wrong normaliser.
    assert (ours.encode("The") == ours.encode("the")) == ours.lowercase


def test_a_masked_language_model_is_a_generator(vocabulary: Path, tmp_path: Path) -> None:
    config = settings(kind="mlm")
    objective = objective_of(config, vocabulary)
    hf_export.export(objective, config, vocabulary, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["electra.json", "generator"]
    (network,) = layout.networks_of(objective)
    model = load_in_transformers(tmp_path / "out" / "generator")
    torch.testing.assert_close(our_logits(network), their_logits(model), rtol=0, atol=1e-5)
    pretrained = hf.load_pretrained(tmp_path / "out")
    assert hf.config_of(pretrained, config).encoder == config.encoder
    assert hf.config_of(pretrained, settings()).generator.width == 1
    state = hf.initial_state(pretrained, config, network.vocab_size)
    assert_equal_state(state.parameters, objective)
    with pytest.raises(ElectraError, match="no discriminator"):
        hf.load_discriminator(tmp_path / "out")


def test_what_lies_in_an_export(exported: Path) -> None:
    record = json.loads((exported / "electra.json").read_bytes())
    assert record["step"] == 17
    assert record["config"]["encoder"]["hidden_size"] == D
    assert record["tokenizer_hash"] == Tokenizer.load(exported / "generator").hash
    for kind in ("discriminator", "generator"):
        names = {path.name for path in (exported / kind).iterdir()}
        assert names >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
        card = (exported / kind / "README.md").read_text("utf-8")
        assert card.startswith('---\nlibrary_name: "transformers"\n')
        assert "17 steps" in card
    from safetensors import safe_open

    with safe_open(exported / "generator" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert "generator_lm_head.weight" not in file.keys()  # noqa: SIM118


def test_auto_model_takes_the_encoder(exported: Path) -> None:
    model = transformers.AutoModel.from_pretrained(exported / "discriminator")
    encoder, _, _ = hf.load_discriminator(exported)
    x, segment, mask = inputs(model.config.vocab_size)
    with torch.no_grad():
        theirs = model(input_ids=x, token_type_ids=segment, attention_mask=mask.long())[0]
        ours = encoder(x, segment, mask, None)
    torch.testing.assert_close(ours[mask], theirs[mask], rtol=0, atol=1e-5)


def test_without_transformers(
    vocabulary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    objective = objective_of(settings(), vocabulary)
    report = hf_export.export(objective, settings(), vocabulary, tmp_path / "out")
    assert report.max_difference is None
    assert report.checks == ("read back bit for bit",)


def test_a_run_is_exported_and_read(vocabulary: Path, tmp_path: Path) -> None:
    config = settings()
    objective = objective_of(config, vocabulary)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    shutil.copytree(vocabulary, run / "tokenizer")
    record = {
        "config": to_dict(config),
        "vocab_size": objective.vocab_size,
        "special_ids": SpecialIds(*range(5))._asdict(),
        "tokenizer_hash": Tokenizer.load(vocabulary).hash,
    }
    (run / "run.json").write_text(json.dumps(record))
    parameters = {name: p.detach() for name, p in objective.named_parameters()}
    write_checkpoint(run / "checkpoints", 23, {"model": parameters}, {})

    report = hf_export.export_run(run, tmp_path / "out")
    assert report.max_difference is not None
    assert json.loads((tmp_path / "out" / "electra.json").read_bytes())["step"] == 23
    for pretrained in (hf.load_pretrained(tmp_path / "out"), hf.load_pretrained(run)):
        for network in layout.networks_of(objective):
            read = pretrained.network(network.kind)
            assert replace(read.config, init="paper") == replace(network.config, init="paper")
            for name, tensor in network.tensors.items():
                assert torch.equal(read.tensors[name], tensor), name


@pytest.mark.parametrize("disc_head", ["dense", "linear"])
def test_half_the_bytes_in_small_files_are_the_rounded_model(
    vocabulary: Path, tmp_path: Path, disc_head: Any
) -> None:
    config = replace(settings(), objective=ObjectiveConfig(disc_head=disc_head))
    objective, limit = objective_of(config, vocabulary), 4000
    whole = hf_export.export(objective, config, vocabulary, tmp_path / "whole")
    report = hf_export.export(
        objective, config, vocabulary, tmp_path / "out", storage=hf_export.Storage(True, limit)
    )
    assert report.checks == whole.checks
    read = hf.load_pretrained(tmp_path / "out")
    for network in layout.networks_of(objective):
        place = tmp_path / "out" / network.kind
        files = {path.name: load_file(path) for path in place.glob("*.safetensors")}
        assert len(files) > 2
        assert not (place / "model.safetensors").exists()
        tensors = load_file(tmp_path / "whole" / network.kind / "model.safetensors")
        sizes = {name: sum(t.nbytes for t in part.values()) for name, part in files.items()}
        assert all(size <= limit or len(files[name]) == 1 for name, size in sizes.items())
        assert sum(sizes.values()) == sum(t.nbytes for t in tensors.values()) / 2
        index = json.loads((place / "model.safetensors.index.json").read_bytes())
        assert index["metadata"]["total_size"] == sum(sizes.values())
        for name, file in index["weight_map"].items():
            assert torch.equal(files[file][name], tensors[name].half()), name
        assert index["weight_map"].keys() == tensors.keys()
        model = load_in_transformers(place)
        assert model.dtype == torch.float32
        rounded = replace(
            network, tensors={n: t.half().float() for n, t in network.tensors.items()}
        )
        torch.testing.assert_close(
            our_logits(read.network(network.kind)), our_logits(rounded), rtol=0, atol=0
        )
        torch.testing.assert_close(their_logits(model), our_logits(rounded), rtol=0, atol=1e-5)


def test_numbers_that_float16_does_not_have_are_refused(vocabulary: Path, tmp_path: Path) -> None:
    objective = objective_of(settings(), vocabulary)
    with torch.no_grad():
        objective.encoder.embeddings.word.weight[0, 0] = 7e4
    with pytest.raises(ElectraError, match="above 65,504") as caught:
        hf_export.export(
            objective, settings(), vocabulary, tmp_path / "out", storage=hf_export.Storage(True)
        )
    assert caught.value.where == "--half"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("weight_map", "word"),
    [
        (None, "no weight_map"),
        (["a"], "no weight_map"),
        ({"x": "../other.safetensors"}, "no file beside it"),
        ({"x": "/etc/passwd"}, "no file beside it"),
        ({"x": 3}, "cannot be read"),
        ({"x": "gone.safetensors"}, "cannot be read"),
        ({"x": "one.safetensors"}, "is not in the file that it names"),
        ({"t": "one.safetensors"}, "missing: "),
    ],
)
def test_a_list_of_files_that_does_not_fit_is_refused(
    saved: Path, weight_map: Any, word: str
) -> None:
    (saved / "model.safetensors").unlink()
    save_file({"t": torch.zeros(3)}, saved / "one.safetensors")
    index = {} if weight_map is None else {"weight_map": weight_map}
    (saved / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(saved, word)


def test_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"config": to_dict(settings())}))
    with pytest.raises(ElectraError, match="not a run with a checkpoint"):
        hf_export.export_run(tmp_path, tmp_path / "out")


# ---------------------------------------------------------------------- where it is written


def test_an_export_replaces_an_export_and_nothing_else(vocabulary: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    objective = objective_of(settings(kind="mlm"), vocabulary)
    out.mkdir()
    for step in (1, 2):  # into an empty directory, then over the first one
        hf_export.export(objective, settings(kind="mlm"), vocabulary, out, step=step)
        assert json.loads((out / "electra.json").read_bytes())["step"] == step
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (out / "mine").mkdir()
    (out / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ElectraError, match="something else at the place of the export: mine"):
        hf_export.export(objective, settings(kind="mlm"), vocabulary, out)
    assert (out / "mine" / "notes.txt").read_text() == "mine"
    shutil.rmtree(out / "mine")
    (out / "electra.json").write_text('{"task": {}}')
    with pytest.raises(ElectraError, match="a model of a task"):
        hf_export.export(objective, settings(kind="mlm"), vocabulary, out)
    (out / "electra.json").write_text("{")  # damaged: who exports again wants it whole
    hf_export.export(objective, settings(kind="mlm"), vocabulary, out)
    (out / "electra.json").unlink()
    with pytest.raises(ElectraError, match="something else"):
        hf_export.export(objective, settings(kind="mlm"), vocabulary, out)
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(ElectraError, match="something else"):
        hf_export.export(objective, settings(kind="mlm"), vocabulary, file)
    assert file.read_text() == "mine"


def test_an_export_through_a_link_leaves_the_link(vocabulary: Path, tmp_path: Path) -> None:
    real, link = tmp_path / "disk" / "model", tmp_path / "link"
    real.mkdir(parents=True)
    link.symlink_to(real)
    objective = objective_of(settings(kind="mlm"), vocabulary)
    for step in (1, 2):
        hf_export.export(objective, settings(kind="mlm"), vocabulary, link, step=step)
        assert json.loads((real / "electra.json").read_bytes())["step"] == step
    assert link.is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["model"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "link"]


def test_a_failed_check_keeps_what_was_there(
    vocabulary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    objective = objective_of(settings(kind="mlm"), vocabulary)
    hf_export.export(objective, settings(kind="mlm"), vocabulary, out, step=1)

    def swapped(network: layout.Network) -> dict[str, Tensor]:
        tensors = original(network)
        first, second = (f"electra.encoder.layer.{i}.output.dense.weight" for i in (0, 1))
        return tensors | {first: tensors[second], second: tensors[first]}

    original = layout.to_transformers
    monkeypatch.setattr(hf_export, "to_transformers", swapped)
    with pytest.raises(CorruptError, match="reads back otherwise"):
        hf_export.export(objective, settings(kind="mlm"), vocabulary, out, step=2)
    assert json.loads((out / "electra.json").read_bytes())["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_transformers_has_to_agree(
    vocabulary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that both our writer and our reader get wrong is found by the second opinion."""
    a, b = "encoder.blocks.{i}.attention_norm", "encoder.blocks.{i}.ffn_norm"
    crossed = {a: layout.MODULES[b], b: layout.MODULES[a]}
    monkeypatch.setattr(layout, "MODULES", layout.MODULES | crossed)
    objective = objective_of(settings(kind="mlm"), vocabulary)
    with pytest.raises(CorruptError, match="logits differ"):
        hf_export.export(objective, settings(kind="mlm"), vocabulary, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_is_too_large_is_refused(vocabulary: Path, tmp_path: Path) -> None:
    config = settings(kind="mlm")
    objective = build_objective(config, 7, SpecialIds(*range(5)))
    with pytest.raises(ElectraError, match="embeds only 7"):
        hf_export.export(objective, config, vocabulary, tmp_path / "out")


# ---------------------------------------------------------------------- transformers to ours


def random_model(kind: str, **changed: Any) -> Any:
    config = transformers.ElectraConfig(
        vocab_size=41,
        embedding_size=E,
        hidden_size=D if kind == "discriminator" else D // 2,
        intermediate_size=F if kind == "discriminator" else F // 2,
        num_hidden_layers=LAYERS,
        num_attention_heads=2 if kind == "discriminator" else 1,
        max_position_embeddings=POSITIONS,
        **changed,
    )
    model = {
        "discriminator": transformers.ElectraForPreTraining,
        "generator": transformers.ElectraForMaskedLM,
    }[kind](config)
    draw = torch.Generator().manual_seed(len(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    return model


@pytest.mark.parametrize("embedding_size", [E, D])
@pytest.mark.parametrize("kind", ["discriminator", "generator"])
def test_reading_a_model_of_transformers(
    kind: layout.Kind, embedding_size: int, tmp_path: Path
) -> None:
    model = random_model(kind)
    if embedding_size != E:
        config = model.config
        config.embedding_size = config.hidden_size
        model = type(model)(config)
    model.save_pretrained(tmp_path)
    pretrained = hf.load_pretrained(tmp_path)
    assert (pretrained.discriminator is None) == (kind == "generator")
    network = pretrained.network(kind)
    assert network.config.attention_heads == model.config.num_attention_heads
    torch.testing.assert_close(our_logits(network), their_logits(model), rtol=0, atol=1e-5)
    with pytest.raises(ElectraError, match="no tokenizer"):
        pretrained.needed_tokenizer()


def test_half_precision_and_defaults_are_understood(tmp_path: Path) -> None:
    """A file in bfloat16 reads as float32; a setting that is left out is at its default."""
    model = random_model("discriminator").bfloat16()
    model.save_pretrained(tmp_path)
    change(tmp_path, lambda values: values.pop("layer_norm_eps"))
    network = hf.load_pretrained(tmp_path).network("discriminator")
    assert network.config.layer_norm_eps == 1e-12
    assert all(tensor.dtype == torch.float32 for tensor in network.tensors.values())
    torch.testing.assert_close(our_logits(network), their_logits(model.float()), rtol=0, atol=1e-5)


def test_both_directories_of_transformers_as_one_model(vocabulary: Path, tmp_path: Path) -> None:
    """Two downloads side by side: sizes are derived, training starts from all of their weights."""
    models = {kind: random_model(kind) for kind in ("discriminator", "generator")}
    for kind, model in models.items():
        model.save_pretrained(tmp_path / kind)
    Tokenizer.load(vocabulary).save(tmp_path / "discriminator")
    pretrained = hf.load_pretrained(tmp_path)
    config = hf.config_of(pretrained, settings("all", disc_head="linear"))
    assert config.encoder.hidden_size == D
    assert config.generator == GeneratorConfig(width=0.5, sharing="none")
    assert config.objective.disc_head == "dense"
    state = hf.initial_state(pretrained, config, 41)
    assert state.notes == ()
    objective = build_objective(config, 41, SpecialIds(*range(5)))
    with torch.no_grad():
        for name, parameter in objective.named_parameters():
            parameter.copy_(state.parameters[name])
    for network in layout.networks_of(objective):
        theirs = their_logits(models[network.kind])
        torch.testing.assert_close(our_logits(network), theirs, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------- continue training


def assert_equal_state(parameters: dict[str, Tensor], objective: Objective) -> None:
    expected = dict(objective.named_parameters())
    assert parameters.keys() == expected.keys()
    for name, tensor in parameters.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("disc_head", ["dense", "linear"])
@pytest.mark.parametrize("sharing", ["none", "embeddings", "all"])
def test_training_continues_from_an_export(
    sharing: Sharing, disc_head: layout.DiscHead, vocabulary: Path, tmp_path: Path
) -> None:
    config = settings(sharing, disc_head=disc_head)
    objective = objective_of(config, vocabulary)
    hf_export.export(objective, config, vocabulary, tmp_path / "out")
    pretrained = hf.load_pretrained(tmp_path / "out")
    base = replace(PretrainConfig(), data=config.data)
    warm = replace(config.optim, warmup_percent=6.0)
    assert hf.config_of(pretrained, base) == replace(config, optim=warm)
    state = hf.initial_state(pretrained, config, pretrained.network("generator").vocab_size)
    assert state.notes == ()
    assert_equal_state(state.parameters, objective)


def test_a_missing_network_starts_from_new_weights(exported: Path, vocabulary: Path) -> None:
    config = settings()
    objective = objective_of(config, vocabulary)
    size = objective.vocab_size
    fresh = dict(build_objective(config, size, SpecialIds(*range(5))).named_parameters())

    alone = hf.load_pretrained(exported / "discriminator")
    warm = replace(config.optim, warmup_percent=6.0)
    assert hf.config_of(alone, config) == replace(config, optim=warm)
    parameters, notes = hf.initial_state(alone, config, size)
    assert "no generator" in notes[0]
    for name, trained in objective.named_parameters():
        is_new = name.startswith("generator")
        assert torch.equal(parameters[name], fresh[name] if is_new else trained), name

    alone = hf.load_pretrained(exported / "generator")
    parameters, notes = hf.initial_state(alone, config, size)
    assert "no discriminator" in notes[0]
    for name, trained in objective.named_parameters():
        is_new = name.startswith("discriminator") and ".embeddings." not in name
        assert torch.equal(parameters[name], fresh[name] if is_new else trained), name


def test_sharing_what_was_apart_is_said(vocabulary: Path, tmp_path: Path) -> None:
    apart = settings("none")
    hf_export.export(objective_of(apart, vocabulary), apart, vocabulary, tmp_path / "out")
    pretrained = hf.load_pretrained(tmp_path / "out")
    size = pretrained.network("generator").vocab_size
    parameters, notes = hf.initial_state(pretrained, settings("embeddings"), size)
    assert "gives up its own" in notes[0]
    word = pretrained.network("discriminator").tensors["encoder.embeddings.word.weight"]
    assert torch.equal(parameters["discriminator.embeddings.word.weight"], word)


def test_masked_language_modelling_needs_a_generator(exported: Path) -> None:
    alone = hf.load_pretrained(exported / "discriminator")
    with pytest.raises(ElectraError, match="no generator"):
        hf.initial_state(alone, settings(kind="mlm"), 40)


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("encoder.layers", 2, "discriminator does not fit the settings: layers is 3, not 2"),
        ("encoder.hidden_size", 26, "hidden_size is 22, not 26"),
        ("encoder.ffn_size", 38, "ffn_size is 34, not 38"),
        ("encoder.attention_heads", 1, "attention_heads is 2, not 1"),
        ("encoder.embedding_size", 16, "embedding_size is 14, not 16"),
        ("encoder.max_positions", 31, "max_positions is 29, not 31"),
        ("encoder.layer_norm_eps", 1e-6, "layer_norm_eps is 1e-12, not 1e-06"),
        ("generator.width", 1.0, "generator does not fit the settings: hidden_size is 11, not 22"),
        ("generator.depth", 1 / 3, "generator does not fit the settings: layers is 3, not 1"),
        ("objective.disc_head", "linear", "disc_head is dense, not linear"),
    ],
)
def test_settings_that_do_not_fit(key: str, value: Any, what: str, exported: Path) -> None:
    config = settings()
    group, name = key.split(".")
    config = replace(config, **{group: replace(getattr(config, group), **{name: value})})
    with pytest.raises(ElectraError, match=what):
        hf.initial_state(hf.load_pretrained(exported), config, 40)


def test_another_vocabulary_does_not_fit(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is said before a network is drawn, which takes long for a large one."""
    monkeypatch.setattr(hf, "build_objective", None)
    with pytest.raises(ElectraError, match="vocab_size is 40, not 43"):
        hf.initial_state(hf.load_pretrained(exported), settings(), 43)


def test_a_generator_that_is_no_fraction(tmp_path: Path) -> None:
    random_model("discriminator").save_pretrained(tmp_path / "discriminator")
    odd = random_model("generator")
    odd.config.intermediate_size = 13
    type(odd)(odd.config).save_pretrained(tmp_path / "generator")
    pretrained = hf.load_pretrained(tmp_path)
    with pytest.raises(ElectraError, match="ffn_size is 13, not 17"):
        hf.initial_state(pretrained, hf.config_of(pretrained, settings()), 41)


# ---------------------------------------------------------------------- what cannot be read


def change(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads((directory / "config.json").read_bytes())
    edit(values)
    (directory / "config.json").write_text(json.dumps(values))


def change_tensors(directory: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(params=["discriminator"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A directory as transformers writes it."""
    random_model(request.param).save_pretrained(tmp_path)
    return tmp_path


def refused(directory: Path, *words: str) -> None:
    with pytest.raises(ElectraError) as error:
        hf.load_pretrained(directory)
    for word in (*words, str(directory)):
        assert word in str(error.value)
    assert error.value.fix


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"model_type": "bert"}, "no ELECTRA model: model_type is 'bert'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'"),
        ({"type_vocab_size": 3}, "type_vocab_size is 3"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_hidden_layers": "three"}, "'three' is not int"),
        ({"num_attention_heads": 5}, "multiple of 5 heads"),
        ({"num_attention_heads": 0}, "attention_heads is 0"),
        ({"max_position_embeddings": 0}, "max_positions is 0"),
        ({"hidden_size": 26}, "has shape"),
        ({"num_hidden_layers": 4}, "missing: electra.encoder.layer.3"),
        ({"num_hidden_layers": 2}, "unknown: electra.encoder.layer.2"),
        ({"embedding_size": 22}, "unknown: electra.embeddings_project"),
        ({"vocab_size": 40}, "(41, 14), the sizes say (40, 14)"),
    ],
)
def test_settings_that_cannot_be_read(values: dict[str, Any], word: str, saved: Path) -> None:
    change(saved, lambda config: config.update(values))
    refused(saved, word)


def test_broken_settings(saved: Path) -> None:
    for text in ("{", "[]"):
        (saved / "config.json").write_text(text)
        refused(saved)


def test_no_model_at_all(tmp_path: Path) -> None:
    refused(tmp_path, "This is no model")
    refused(tmp_path / "nowhere", "There is nothing at this path")


def test_a_name_on_the_hub_is_told_how_to_download_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for load in (hf.load_pretrained, hf.load_encoder, hf.load_finetuned):
        with pytest.raises(ElectraError, match="nothing at this path") as told:
            load(Path("google/electra-small"))
        assert "hf download google/electra-small --local-dir electra-small" in told.value.fix
        for typo in ("modell", "../a/b", "../b", "a/b/c", str(tmp_path / "b")):
            with pytest.raises(ElectraError, match="nothing at this path") as told:
                load(Path(typo))
            assert told.value.fix == "check the path"


def test_a_pickle_is_refused(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    (saved / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    refused(saved, "No such file", "can run code")


def test_damaged_weights(saved: Path) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(saved, "cannot be read")


def test_missing_and_unknown_tensors(saved: Path) -> None:
    change_tensors(saved, lambda t: t.pop("electra.encoder.layer.1.output.dense.bias"))
    refused(saved, "missing: electra.encoder.layer.1.output.dense.bias")
    change_tensors(saved, lambda t: t.update({"electra.pooler.weight": torch.zeros(3)}))
    refused(saved, "unknown: electra.pooler.weight", "missing:")


def test_buffers_of_old_versions_are_ignored(saved: Path) -> None:
    ids = {"electra.embeddings.position_ids": torch.arange(POSITIONS)[None]}
    change_tensors(saved, lambda t: t.update(ids))
    assert hf.load_pretrained(saved).discriminator


def test_a_model_without_or_with_both_heads(saved: Path) -> None:
    change_tensors(saved, lambda t: t.update({"generator_predictions.x": torch.zeros(3)}))
    refused(saved, "missing: generator_predictions")
    transformers.ElectraForSequenceClassification(
        random_model("discriminator").config
    ).save_pretrained(saved)
    refused(saved, "missing: discriminator_predictions", "unknown: classifier", "PreTraining")


@pytest.mark.parametrize("saved", ["generator"], indirect=True)
def test_an_output_table_of_its_own(saved: Path) -> None:
    table = load_file(saved / "model.safetensors")["electra.embeddings.word_embeddings.weight"]
    change_tensors(saved, lambda t: t.update({"generator_lm_head.weight": table.clone()}))
    assert hf.load_pretrained(saved).generator
    change_tensors(saved, lambda t: t.update({"generator_lm_head.weight": table + 1}))
    refused(saved, "generator_lm_head.weight differs")


def test_a_tokenizer_that_is_larger_than_the_table(saved: Path) -> None:
    tokens = [*SPECIAL_TOKENS, *map(str, range(37))]
    (saved / "vocab.txt").write_text("".join(f"{token}\n" for token in tokens))
    refused(saved, "The tokenizer has 42 tokens, the model embeds only 41")
