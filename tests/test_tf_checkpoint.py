"""Google's checkpoints: a real one, those of a writer of our own and of TensorFlow, damaged ones.

tests/fixtures/tf is the checkpoint that the arrays of tests/oracle come from, as TensorFlow wrote
it. The writer here shares nothing with the reader: a checksum byte by byte, its own encoding.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as example_settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from electra import cli
from electra.config import (
    DataConfig,
    EncoderConfig,
    GeneratorConfig,
    ObjectiveConfig,
    PretrainConfig,
)
from electra.data.tokenizer import Tokenizer
from electra.errors import CorruptError, ElectraError
from electra.formats import hf, hf_export, layout
from electra.formats.tf_checkpoint import crc32c, find, read_bundle
from electra.objectives import SpecialIds, build_objective

REAL = Path(__file__).parent / "fixtures" / "tf"
ORACLE = Path(__file__).parent / "oracle"
NUMBERS = {"float32": 1, "int32": 3, "int64": 9, "bfloat16": 14, "float16": 19}

# ---------------------------------------------------------------------- a writer


def slow_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data) if len(data) > 9999 else slow_crc(data)
    return ((((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32).to_bytes(4, "little")


def number(value: int) -> bytes:
    value %= 2**64
    return bytes([value]) if value < 128 else bytes([value % 128 + 128]) + number(value // 128)


def field(index: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return number(8 * index) + number(value)
    return number(8 * index + 2) + number(len(value)) + value


def table(
    rows: dict[bytes, bytes],
    *,
    per_block: int = 1000,
    kind: int = 0,
    interval: int = 16,
    again: int = 1,
) -> bytes:
    """A sorted table; `rows` come in the order they are written in."""
    out = b""

    def block(pairs: list[tuple[bytes, bytes]]) -> bytes:
        nonlocal out
        body, starts, before = b"", [0], b""
        for i, (key, value) in enumerate(pairs):
            shared = 0
            if i and i % interval == 0:
                starts.append(len(body))
            else:
                while shared < len(before) and before[shared] == key[shared]:
                    shared += 1
            body += number(shared) + number(len(key) - shared) + number(len(value))
            body += key[shared:] + value
            before = key
        body += b"".join(start.to_bytes(4, "little") for start in [*starts, len(starts)])
        place = number(len(out)) + number(len(body))
        out += body + bytes([kind]) + masked(body + bytes([kind]))
        return place

    pairs = list(rows.items())
    parts = [pairs[i : i + per_block] for i in range(0, len(pairs), per_block)]
    places = [(part[-1][0] + b"~", block(part)) for part in parts]
    footer = block([]) + block(places * again)
    return out + footer.ljust(40, b"\0") + 0xDB4775248B80FB57.to_bytes(8, "little")


def header(shards: int) -> bytes:
    return field(1, shards) + field(3, field(1, 1))


def entry(tensor: Tensor, shard: int, offset: int, data: bytes) -> bytes:
    dims = b"".join(field(2, field(1, size)) for size in tensor.shape)
    made = field(1, NUMBERS[str(tensor.dtype).removeprefix("torch.")]) + field(2, dims)
    made += (field(3, shard) if shard else b"") + (field(4, offset) if offset else b"")
    return made + field(5, len(data)) + number(8 * 6 + 5) + masked(data)


def write(
    prefix: Path,
    tensors: dict[str, Tensor],
    *,
    shards: int = 1,
    change: Callable[[dict[bytes, bytes]], object] = lambda _: None,
    **options: Any,
) -> Path:
    """A bundle as TensorFlow writes it; `change` may spoil the rows of its index."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    contents = [bytearray() for _ in range(shards)]
    rows = {b"": header(shards)}
    for i, (name, tensor) in enumerate(sorted(tensors.items(), key=lambda item: item[0].encode())):
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        content = contents[i % shards]
        rows[name.encode()] = entry(tensor, i % shards, len(content), data)
        content += data
    change(rows)
    for i, content in enumerate(contents):
        prefix.with_name(f"{prefix.name}.data-{i:05}-of-{shards:05}").write_bytes(content)
    prefix.with_name(f"{prefix.name}.index").write_bytes(table(rows, **options))
    return prefix


def variables(network: layout.Network, scope: str, embeddings: str) -> dict[str, Tensor]:
    """The variables that Google's code has for one of our networks."""
    places = {"encoder.embeddings": f"{embeddings}/embeddings", "encoder": scope}
    places |= {"head": f"{network.kind}_predictions"}
    names = {
        "word": "word_embeddings",
        "position": "position_embeddings",
        "project": "embeddings_project",
    }
    names |= {
        "segment": "token_type_embeddings",
        "up": "intermediate/dense",
        "down": "output/dense",
    }
    names |= {"out": "attention/output/dense", "attention_norm": "attention/output/LayerNorm"}
    names |= {"ffn_norm": "output/LayerNorm", "norm": "LayerNorm", "w": "dense_1"}
    found: dict[str, Tensor] = {}
    for name, tensor in network.tensors.items():
        module, end = name.rsplit(".", 1)
        part = next((p for p in places if module.startswith(f"{p}.")), module)
        steps = [s for s in module.removeprefix(part).split(".") if s]
        if steps[:1] == ["blocks"]:
            steps = [f"encoder/layer_{steps[1]}", *steps[2:]]
        if part == "head" and not steps:
            found["generator_predictions/output_bias"] = tensor
            continue
        last, kernel = steps.pop(), {"weight": "kernel"}.get(end, end)
        stem = "/".join([places[part], *steps])
        if last == "qkv":
            for theirs, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                found[f"{stem}/attention/self/{theirs}/{kernel}"] = piece.t()
        elif tensor.ndim == 2 and part == "encoder.embeddings":
            found[f"{stem}/{names[last]}"] = tensor
        elif "norm" in last:
            found[f"{stem}/{names[last]}/{'gamma' if end == 'weight' else 'beta'}"] = tensor
        else:
            found[f"{stem}/{names.get(last, last)}/{kernel}"] = tensor.t()
    return found


# ---------------------------------------------------------------------- the format


def oracle(name: str) -> dict[str, Tensor]:
    with np.load(ORACLE / name) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_the_checksum_is_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    data = np.random.default_rng(0).bytes(3000)
    for size in (*range(70), 1023, 1024, 2999):
        assert crc32c(data[:size]) == slow_crc(data[:size])


def test_a_checkpoint_of_tensorflow_has_the_oracles_arrays() -> None:
    tensors, names = read_bundle(REAL / "model.ckpt-0")
    assert tensors.pop("global_step").equal(torch.tensor(0))
    assert_same(tensors, oracle("weights.npz"))
    assert len(names) == len(tensors) + 1


def test_both_networks_of_it_compute_what_tensorflow_computes() -> None:
    pretrained = hf.load_pretrained(REAL)
    given = oracle("pretrain_forward.npz")
    segment, mask = given["in/segment_ids"].long(), given["in/input_mask"].bool()
    with torch.no_grad():
        encoder, discriminator = layout.build_discriminator(pretrained.network("discriminator"))
        h = encoder(given["out/corrupted_ids"].long(), segment, mask, None)
        real = given["in/input_mask"].bool()
        assert (h - given["out/disc_all_layers"][-1])[real].abs().max() < 5e-6
        assert (discriminator(h) - given["out/disc_logits"])[real].abs().max() < 5e-6
        encoder, generator = layout.build_generator(pretrained.network("generator"))
        h = encoder(given["in/masked_input_ids"].long(), segment, mask, None)
        assert (h - given["out/gen_all_layers"][-1])[real].abs().max() < 5e-6
        at = given["in/masked_lm_positions"].long()[..., None].expand(-1, -1, h.shape[-1])
        logits = generator(h.gather(1, at), encoder.embeddings.word.weight)
        assert (logits - given["out/gen_logits"]).abs().max() < 5e-6


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("per_block", [1, 5, 1000])
def test_types_shards_and_blocks(shards: int, per_block: int, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    floats = [torch.float32, torch.float16, torch.bfloat16]
    tensors = {
        f"part/{'x' * (i % 7)}/{i}": torch.randn(i, 3, generator=draw).to(floats[i % 3])
        for i in range(1, 40)
    }
    tensors |= {"whole": torch.arange(-3, 4), "short": torch.arange(-3, 4, dtype=torch.int32)}
    tensors |= {"global_step": torch.tensor(2**40), "scalar": torch.tensor(1.5), "ä": torch.ones(1)}
    tensors["large"] = torch.randn(200, 301, generator=draw)
    prefix = write(tmp_path / "model.ckpt-7", tensors, shards=shards, per_block=per_block)
    found, names = read_bundle(prefix)
    assert_same(found, tensors)
    assert set(names) == set(tensors)
    some, names = read_bundle(prefix, lambda name: name == "whole")
    assert_same(some, {"whole": tensors["whole"]})
    assert len(names) == len(tensors)


WITH_TENSORFLOW = """
import sys
import numpy as np
import tensorflow as tf

v1, out, arrays = tf.compat.v1, sys.argv[1], np.load(sys.argv[2])
with tf.Graph().as_default(), v1.Session() as session:
    made = [v1.get_variable(n, initializer=arrays[n]) for n in arrays.files]
    made += [v1.get_variable("half", initializer=tf.cast(arrays[arrays.files[0]], tf.bfloat16))]
    made += [v1.get_variable("counter", initializer=np.int64(2**40))]
    session.run(v1.global_variables_initializer())
    v1.train.Saver(made).save(session, out + "/model.ckpt", global_step=3, write_meta_graph=False)
    values = dict(zip([v.op.name for v in made], session.run(made), strict=True))
with tf.Graph().as_default(), v1.Session() as session:
    parts = v1.fixed_size_partitioner(2)
    made = [v1.get_variable("electra/cut", [4, 3], partitioner=parts)]
    session.run(v1.global_variables_initializer())
    v1.train.Saver().save(session, out + "/sliced.ckpt")
names = [[*values][i::3] for i in range(3)]
for i, some in enumerate(names):
    given = [tf.constant(values[n]) for n in some]
    empty = [""] * len(some)
    tf.raw_ops.SaveV2(
        prefix=f"{out}/part{i}", tensor_names=some, shape_and_slices=empty, tensors=given
    )
tf.raw_ops.MergeV2Checkpoints(
    checkpoint_prefixes=[f"{out}/part{i}" for i in range(3)], destination_prefix=out + "/merged"
)
"""


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="needs TensorFlow")
def test_what_tensorflow_writes_is_read(tmp_path: Path) -> None:
    arrays = oracle("weights.npz") | {"large": torch.randn(300, 1000), "s": torch.tensor(2)}
    np.savez(tmp_path / "arrays.npz", **{name: t.numpy() for name, t in arrays.items()})
    command = [sys.executable, "-c", WITH_TENSORFLOW, tmp_path, tmp_path / "arrays.npz"]
    subprocess.run([*map(str, command)], check=True, timeout=300)
    wanted = arrays | {"counter": torch.tensor(2**40)}
    wanted["half"] = next(iter(arrays.values())).bfloat16()
    assert len(list(tmp_path.glob("merged.data-*-of-00003"))) == 3
    for prefix in (tmp_path / "model.ckpt-3", tmp_path / "merged"):
        assert_same(read_bundle(prefix)[0], wanted)
    with pytest.raises(ElectraError, match="slices"):
        read_bundle(tmp_path / "sliced.ckpt")


# ---------------------------------------------------------------------- the networks


def config_of(sharing: Any, *, width: int = 64, **objective: Any) -> PretrainConfig:
    encoder = EncoderConfig(
        layers=3,
        hidden_size=128,
        ffn_size=40,
        attention_heads=2,
        embedding_size=width,
        max_positions=29,
    )
    return PretrainConfig(
        encoder=encoder,
        generator=GeneratorConfig(width=1.0 if sharing == "all" else 0.5, sharing=sharing),
        objective=ObjectiveConfig(**objective),
        data=DataConfig(sequence_length=23),
    )


def networks(config: PretrainConfig, vocab_size: int) -> dict[str, layout.Network]:
    objective = build_objective(config, vocab_size, SpecialIds(*range(5)))
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    return {network.kind: network for network in layout.networks_of(objective)}


def google(
    directory: Path, config: PretrainConfig, tokenizer: Tokenizer
) -> dict[str, layout.Network]:
    """A folder as Google's code leaves it in mid-training, and the networks in it."""
    found = networks(config, tokenizer.vocab_size)
    sharing = config.generator.sharing
    tensors: dict[str, Tensor] = {}
    for kind, network in found.items():
        is_apart = kind == "generator" and len(found) == 2
        scope = "generator" if is_apart and sharing != "all" else "electra"
        tables = "generator" if is_apart and sharing == "none" else "electra"
        tensors |= variables(network, scope, tables)
    slots = {f"{name}/adam_{k}": torch.ones(1) for name in tensors for k in "mv"}
    write(directory / "model.ckpt-20", tensors | slots | {"global_step": torch.tensor(20)})
    vocabulary = tokenizer.backend.get_vocab()
    words = sorted(vocabulary, key=vocabulary.__getitem__)
    (directory / "vocab.txt").write_text("".join(f"{word}\n" for word in words), "utf-8")
    return found


@pytest.mark.parametrize(
    "config",
    [
        config_of("embeddings"),
        config_of("embeddings", width=128),
        config_of("none"),
        config_of("all"),
        config_of("embeddings", kind="mlm"),
    ],
    ids=["shared embeddings", "generator alone projects", "apart", "one encoder", "BERT"],
)
def test_every_form_of_sharing(
    config: PretrainConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    written = google(tmp_path, config, tokenizer)
    for path in (tmp_path, tmp_path / "model.ckpt-20", tmp_path / "model.ckpt-20.index"):
        found = hf.load_pretrained(path)
        assert {kind for kind in ("discriminator", "generator") if getattr(found, kind)} == set(
            written
        )
        for kind, network in written.items():
            read = getattr(found, kind)
            assert_same(read.tensors, network.tensors)
            assert read.config == network.config
        assert found.needed_tokenizer().hash == tokenizer.hash
        assert found.note == ""
    start = hf.load_encoder(tmp_path)
    first = written.get("discriminator") or written["generator"]
    tensors = {f"encoder.{name}": t for name, t in start.tensors.items()}
    assert_same(tensors, {n: t for n, t in first.tensors.items() if n.startswith("encoder.")})


def test_of_a_fine_tuned_checkpoint_the_encoder_is_used(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    network = google(tmp_path, config_of("embeddings"), tokenizer)["discriminator"]
    tensors = variables(network, "electra", "electra")
    tensors = {n: t for n, t in tensors.items() if not n.startswith("discriminator_predictions")}
    head = {"task_specific/mnli/dense/kernel": torch.ones(128, 3)}
    slots = {f"{name}/adam_m": torch.ones(1) for name in head}
    write(tmp_path / "model.ckpt-20", tensors | head | slots)
    start = hf.load_encoder(tmp_path)
    for name, tensor in start.tensors.items():
        assert torch.equal(tensor, network.tensors[f"encoder.{name}"])
    assert start.description == f"{tmp_path} without task_specific/mnli"
    with pytest.raises(ElectraError, match=r"missing: discriminator_predictions.*dense") as error:
        hf.load_pretrained(tmp_path)
    assert "only the encoder" in error.value.fix


def test_sizes_that_shapes_do_not_tell_are_asked_for(tmp_path: Path) -> None:
    shutil.copytree(REAL, tmp_path / "m")
    (tmp_path / "m" / "bert_config.json").unlink()
    with pytest.raises(ElectraError, match="how many attention heads share 20") as error:
        hf.load_pretrained(tmp_path / "m")
    assert "bert_config.json" in error.value.fix
    for name in ("bert_config.json", "config.json"):
        (tmp_path / "m" / name).write_text(json.dumps({"num_attention_heads": 4}))
        pretrained = hf.load_pretrained(tmp_path / "m")
        assert pretrained.network("discriminator").config.attention_heads == 4
        assert pretrained.network("generator").config.attention_heads == 1  # below 64 units
        (tmp_path / "m" / name).unlink()
    for told, message in (
        ({"num_attention_heads": 3}, "no multiple of 3"),
        ({"num_attention_heads": 2, "hidden_size": 24}, "the sizes say"),
        ({"num_attention_heads": 2, "hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"num_attention_heads": "2"}, "attention_heads"),
    ):
        (tmp_path / "m" / "config.json").write_text(json.dumps(told))
        with pytest.raises(ElectraError, match=message):
            hf.load_pretrained(tmp_path / "m")


def test_the_newest_checkpoint_of_a_folder(tmp_path: Path) -> None:
    for step in (5, 10):
        write(tmp_path / f"model.ckpt-{step}", {"a": torch.ones(2)})
    with pytest.raises(ElectraError, match="which of its checkpoints") as error:
        find(tmp_path)
    assert "model.ckpt-5" in error.value.fix
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/gone/model.ckpt-5"\n')
    assert find(tmp_path) == tmp_path / "model.ckpt-5"
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-15"\n')
    with pytest.raises(ElectraError, match="which of its checkpoints"):
        find(tmp_path)
    assert find(tmp_path / "model.ckpt-10") == tmp_path / "model.ckpt-10"
    with pytest.raises(ElectraError, match=r"no network of ELECTRA.*word_embeddings"):
        hf.load_pretrained(tmp_path / "model.ckpt-10")
    assert find(tmp_path / "nowhere") is None


def test_commands_take_a_checkpoint(
    tokenizer: Tokenizer, corpus: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    google(tmp_path / "m", config_of("embeddings"), tokenizer)
    prefix = str(tmp_path / "m" / "model.ckpt-20")
    assert cli.run(["detect", "one old river sees all songs .", "--model", prefix]) == 0
    assert "generator's" in capsys.readouterr().out
    small = ["--run.train-steps", "1", "--data.batch-size", "2", "--run.device", "cpu", "--quiet"]
    small += ["--data.sequence-length", "23", "--run.threads", "1"]
    where = ["--corpus", str(corpus.path), "--out", str(tmp_path / "run")]
    assert cli.run(["pretrain", "--init", str(tmp_path / "m"), *where, *small]) == 0
    assert hf.load_pretrained(tmp_path / "run").network("generator").config.hidden_size == 64
    rows = "".join(f"a {'river' if i % 2 else 'stone'},{i % 2}\n" for i in range(20))
    (tmp_path / "t.csv").write_text(f"text,label\n{rows}")
    tune = ["--data", str(tmp_path / "t.csv"), "--out", str(tmp_path / "tuned"), "--epochs", "1"]
    tune += ["--dev", str(tmp_path / "t.csv"), "--device", "cpu", "--threads", "1", "--quiet"]
    assert cli.run(["finetune", "--model", prefix, *tune]) == 0


def test_import_writes_an_export(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = google(tmp_path / "m", config_of("embeddings"), tokenizer)
    (tmp_path / "m" / "vocab.txt").rename(tmp_path / "vocab.txt")
    command = ["import", str(tmp_path / "m"), "--out", str(tmp_path / "out")]
    assert cli.run(command) == 2
    assert "no tokenizer" in capsys.readouterr().err
    assert cli.run([*command, "--tokenizer", str(tmp_path / "vocab.txt")]) == 0
    assert "read back bit for bit" in capsys.readouterr().out
    found = hf.load_pretrained(tmp_path / "out")
    for kind, network in written.items():
        assert_same(getattr(found, kind).tensors, network.tensors)
    assert found.needed_tokenizer().hash == tokenizer.hash


# ---------------------------------------------------------------------- a pickle


@pytest.fixture
def pickled(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An export whose discriminator is a .bin."""
    monkeypatch.setattr(hf_export, "_compare", lambda *_: [])
    google(tmp_path / "m", config_of("embeddings"), tokenizer)
    hf_export.import_model(tmp_path / "m", tmp_path / "export")
    directory = tmp_path / "export" / "discriminator"
    weights = directory / "model.safetensors"
    torch.save(load_file(weights), directory / "pytorch_model.bin")
    weights.rename(tmp_path / "weights")
    return directory


def test_a_bin_is_read_by_an_explicit_flag(pickled: Path, tmp_path: Path) -> None:
    command = ["import", str(pickled), "--out", str(tmp_path / "out")]
    assert cli.run(command) == 2
    assert cli.run([*command, "--allow-bin"]) == 0
    found = load_file(tmp_path / "out" / "discriminator" / "model.safetensors")
    assert_same(found, load_file(tmp_path / "weights"))


class Payload:
    """Unpickling it creates a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return open, (str(self.canary), "w")


@pytest.mark.parametrize("how", ["payload", "legacy", "pickle", "large", "no tensors", "cut off"])
def test_a_hostile_bin_does_nothing(
    how: str, pickled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, payload = pickled / "pytorch_model.bin", Payload(tmp_path / "canary")
    if how in ("payload", "legacy"):
        torch.save({"a": payload}, path, _use_new_zipfile_serialization=how == "payload")
    elif how == "pickle":
        path.write_bytes(pickle.dumps(payload))
    elif how == "large":
        torch.save({"a": torch.zeros(1).expand(10**10)}, path)
    elif how == "no tensors":
        torch.save([1, 2], path)
    else:
        path.write_bytes(path.read_bytes()[:-100])
    told = ["import", str(pickled), "--out", str(tmp_path / "out"), "--allow-bin"]
    assert cli.run(told) == 2
    error = capsys.readouterr().err
    assert "pytorch_model.bin" in error
    assert "Traceback" not in error
    assert not (tmp_path / "canary").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "code",
    [
        "open(PATH, 'w')",
        "import os; os.remove(__file__)",
        "import subprocess; subprocess.run(['true'])",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import os; os.fork()",
    ],
)
def test_the_process_that_reads_a_pickle_can_do_little(code: str, tmp_path: Path) -> None:
    """Even if torch's reader had a fault: here in the place of that reader."""
    file = tmp_path / "x.bin"
    torch.save({"a": torch.ones(2)}, file)
    fake = f"PATH = {str(tmp_path / 'made')!r}\n__file__ = {str(file)!r}\n{code}\n"
    start = f"import sys, torch\nsys.path.insert(0, {str(Path(hf.__file__).parent)!r})\n"
    start += "import unpickle, subprocess, socket\n"
    start += f"torch.load = lambda *a, **k: exec({fake!r}, {{}})\nunpickle.main({str(file)!r})\n"
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, timeout=60)
    assert "wants to do more than be read" in done.stderr
    assert done.returncode == 1
    assert file.exists()
    assert not (tmp_path / "made").exists()


# ---------------------------------------------------------------------- damage


def read(prefix: Path) -> dict[str, Tensor] | ElectraError:
    """What a checkpoint holds, or the error that explains why it cannot be read."""
    try:
        return read_bundle(prefix)[0]
    except ElectraError as raised:
        error = raised
    assert error.exit_code in (2, 3)
    assert error.where
    assert error.fix
    return error


@example_settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(["model.ckpt-0.index", "model.ckpt-0.data-00000-of-00001"]),
    st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4
    ),
    st.sampled_from(["flip", "cut", "insert"]),
)
def test_no_damage_goes_unseen(
    tmp_path: Path, name: str, edits: list[tuple[float, int]], how: str
) -> None:
    copy = tmp_path / "m"
    if not copy.exists():
        shutil.copytree(REAL, copy)
    data = bytearray((REAL / name).read_bytes())
    for place, value in edits:
        at = int(place * len(data))
        if how == "flip":
            data[at] ^= value
        elif how == "cut":
            del data[at : at + value]
        else:
            data[at:at] = bytes([value])
    if bytes(data) == (REAL / name).read_bytes():  # two flips of one byte
        return
    (copy / name).write_bytes(data)
    found = read(copy / "model.ckpt-0")
    if not isinstance(found, ElectraError):  # damaged behind the last tensor, where nothing is read
        assert name != "model.ckpt-0.index"
        found.pop("global_step")
        assert_same(found, oracle("weights.npz"))
    shutil.copy(REAL / name, copy / name)


@example_settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from([b"", b"a", b"b", b"c"]),
    st.binary(max_size=40)
    | st.builds(field, st.integers(0, 9), st.integers(0, 2**64 - 1) | st.binary(max_size=9)),
    st.booleans(),
)
def test_rows_with_a_right_checksum_and_wrong_content(
    tmp_path: Path, key: bytes, row: bytes, is_added: bool
) -> None:
    def change(rows: dict[bytes, bytes]) -> None:
        rows[key] = (rows.get(key, b"") if is_added else b"") + row

    tensors = {"a": torch.ones(4), "b": torch.ones(2, 3), "c": torch.tensor(3)}
    prefix = write(tmp_path / "m" / "x", tensors, change=change)
    found = read(prefix)
    if not isinstance(found, ElectraError):
        assert sum(t.nbytes for t in found.values()) <= 16 + 24 + 8


def spoiled(key: bytes, made: bytes) -> Callable[[dict[bytes, bytes]], object]:
    return lambda rows: rows.update({key: made})


HUGE = 2**60
FLOAT = field(1, 1)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (spoiled(b"a", FLOAT + field(7, b"")), ElectraError, "'a' is stored in slices"),
        (spoiled(b"", header(1) + field(2, 1)), ElectraError, "not understood"),
        (spoiled(b"", field(1, 1) + field(3, field(2, 2))), ElectraError, "not understood"),
        (spoiled(b"a", field(1, 7)), ElectraError, "has the type 7"),
        (spoiled(b"a", FLOAT + field(2, field(2, field(1, HUGE)))), CorruptError, "has 0 bytes"),
        (
            spoiled(b"a", FLOAT + field(2, field(2, field(1, HUGE))) + field(5, 4 * HUGE)),
            CorruptError,
            "larger than the files",
        ),
        (
            spoiled(b"a", FLOAT + field(2, field(2, field(1, b"xx")) + field(2, field(1, HUGE)))),
            CorruptError,
            "of another kind",
        ),
        (
            spoiled(b"a", FLOAT + field(2, field(2, field(1, HUGE)) * 10**5)),
            CorruptError,
            "has 0 bytes",
        ),
        (
            spoiled(b"a", FLOAT + field(2, field(2, field(1, 2))) + field(4, HUGE) + field(5, 8)),
            CorruptError,
            r"data-00000-of-00001|checksum",
        ),
        (spoiled(b"a", FLOAT + field(3, HUGE) + field(5, 4)), ElectraError, "part .* is missing"),
        (spoiled(b"a", b"\xff" * 20), CorruptError, "more than 64 bits"),
        (spoiled(b"a", field(2, b"123")[:-1]), CorruptError, "cut off"),
        (lambda rows: rows.pop(b""), CorruptError, "KeyError"),
        (lambda rows: rows.update({b"a\xff": rows.pop(b"a")}), None, ""),
        (lambda rows: rows.update({b"Z": rows[b"a"]}), CorruptError, "not in order"),
        (
            lambda rows: rows.update({b"a%d" % i: rows[b"a"] for i in range(100, 999)}),
            CorruptError,
            "larger than the files",
        ),
        (spoiled(b"b" * 2000, b""), CorruptError, "too long"),
        (
            lambda rows: rows.update({b"b%06d" % i: b"" for i in range(70000)}),
            CorruptError,
            "too many",
        ),
    ],
)  # fmt: skip
def test_a_hostile_index_is_refused(
    change: Callable[[dict[bytes, bytes]], object],
    kind: type[ElectraError] | None,
    message: str,
    tmp_path: Path,
) -> None:
    prefix = write(tmp_path / "x", {"a": torch.ones(2)}, change=change, per_block=80000)
    if kind is None:
        assert len(read_bundle(prefix)[0]) == 1
        return
    with pytest.raises(kind, match=message) as error:
        read_bundle(prefix)
    assert type(error.value) is kind


def test_compressed_and_foreign_tables_are_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", {"a": torch.ones(2)}, kind=1)
    with pytest.raises(ElectraError, match="compressed") as error:
        read_bundle(prefix)
    assert error.value.exit_code == 2
    index = tmp_path / "x.index"
    for content in (
        b"",
        b"x" * 100,
        index.read_bytes()[:-1],
        b"\0" * (1 << 24) + index.read_bytes(),
    ):
        index.write_bytes(content)
        with pytest.raises(CorruptError, match="no index of a TensorFlow checkpoint"):
            read_bundle(prefix)


def test_a_block_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    """A list of blocks that names one block again and again would take long."""
    prefix = write(tmp_path / "x", {"a": torch.ones(2)}, again=2)
    with pytest.raises(CorruptError, match="blocks overlap"):
        read_bundle(prefix)


def test_every_byte_of_the_footer_counts(tmp_path: Path) -> None:
    shutil.copytree(REAL, tmp_path / "m")
    index = tmp_path / "m" / "model.ckpt-0.index"
    data = index.read_bytes()
    for i in range(1, 49):
        index.write_bytes(data[:-i] + bytes([data[-i] ^ 1]) + data[len(data) - i + 1 :])
        assert isinstance(read(tmp_path / "m" / "model.ckpt-0"), CorruptError), i


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", {"a": torch.ones(2), "b": torch.ones(2)}, shards=2)
    (tmp_path / "x.data-00001-of-00002").unlink()
    with pytest.raises(ElectraError, match="missing") as error:
        read_bundle(prefix)
    assert error.value.where.endswith("x.data-00001-of-00002")
    assert list(read_bundle(prefix, lambda name: name == "a")[0]) == ["a"]
