"""Google's checkpoints without TensorFlow: a reader of tensor bundles, and the names in them.

Comes in: `model.ckpt-N.index`, a sorted table from variable names to places, and its shards
`model.ckpt-N.data-00000-of-0000M`; optionally sizes in bert_config.json or config.json. Goes out:
the networks as transformers names and shapes them, with the settings of its config.json, for
`hf.py` to check like any other directory. Every block and every tensor that is used is checked
against its CRC-32C. The files may be anybody's: lengths and places are checked before use, and what
is read never exceeds the size of the files.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import read_settings_file
from ..errors import ElectraError
from ..files import reading

Words = NDArray[np.uint32]
Tensors = dict[str, Tensor]

_AGAIN = "copy all files of the checkpoint again"
_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_FOOTER, _MAX_INDEX = 48, 1 << 22  # bytes; the index of a large model in training has 0.2 MB
_MAX_KEY, _MAX_ENTRIES = 1 << 10, 1 << 16
_DTYPES = {1: torch.float32, 3: torch.int32, 9: torch.int64, 14: torch.bfloat16, 19: torch.float16}
_SETTINGS = ("bert_config.json", "config.json")
# What a generator beside a discriminator has for itself: told under "generator", or by its shapes.
_OWN = {"hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads"}
_PARTS = ("electra/", "generator/", "discriminator_predictions/", "generator_predictions/")
_SLOT = re.compile(r"/(adam_m|adam_v|Adam|Adam_1)$|^global_step$")
_NAMES = (
    (r"/layer_(\d+)/", r"/layer/\1/"),
    (r"/(kernel|gamma)$", "/weight"),
    (r"/beta$", "/bias"),
    (r"_embeddings$", "_embeddings/weight"),
    (r"^discriminator_predictions/dense_1/", "discriminator_predictions/dense_prediction/"),
    (r"^generator_predictions/output_bias$", "generator_lm_head/bias"),
)


# ---------------------------------------------------------------------- CRC-32C


@cache
def _advance(level: int) -> Words:
    """What 4·2^level bytes of zeros make of a state: the sum of its halves' entries, (2, 65536)."""
    if level:
        once = _advance(level - 1)
        return _advanced(once, once.view(np.uint16).reshape(2, -1, 2))
    state = np.arange(1 << 16, dtype=np.uint32) << np.array([[0], [16]], dtype=np.uint32)
    for _ in range(32):
        state = (state >> 1) ^ (state & np.uint32(1)) * np.uint32(0x82F63B78)
    return state.astype(np.uint32)


def _advanced(table: Words, halves: NDArray[np.uint16]) -> Words:
    low, high = (halves[..., i].astype(np.intp) for i in (0, 1))
    return table[0].take(low, mode="clip") ^ table[1].take(high, mode="clip")


def crc32c(data: bytes | bytearray) -> int:
    """CRC-32C of `data`, in whole arrays: it is linear, so neighbours can be joined pair by pair.

    The state behind two pieces is that behind the first, advanced over the second, plus that behind
    the second alone. In front, zeros change nothing and four certain bytes give the initial state.
    """
    start = (0x641F6454).to_bytes(4, "little")
    words: Words = np.frombuffer(b"".join((bytes(-len(data) % 4), start, data)), "<u4")
    level = 0
    while len(words) > 1:
        if len(words) % 2:
            words = np.concatenate((np.zeros(1, np.uint32), words))
        first = words.view(np.uint16).reshape(-1, 4)[:, :2]
        words = _advanced(_advance(level), first) ^ words[1::2]
        level += 1
    return int(_advanced(_advance(0), words.view(np.uint16).reshape(1, 2))[0]) ^ 0xFFFFFFFF


def _is_intact(data: bytes | bytearray, stored: bytes) -> bool:
    """Whether `data` has the checksum that is stored of it: rotated, and a constant added."""
    crc = crc32c(data)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return masked == int.from_bytes(stored, "little")


# ---------------------------------------------------------------------- the index


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, seven bits a byte, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
    raise ValueError("a number of more than 64 bits")


def _fields(message: bytes) -> defaultdict[int, list[Any]]:
    """The fields of a protocol buffer by number: whole numbers, and bytes for everything else."""
    found: defaultdict[int, list[Any]] = defaultdict(list)
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 0:
            value, at = _varint(message, at)
        else:
            size, at = _varint(message, at) if tag & 7 == 2 else ({1: 8, 5: 4}[tag & 7], at)
            value, at = message[at : at + size], at + size
        found[tag >> 3].append(value)
    if at > len(message):
        raise ValueError("a message is cut off")
    return found


def _last(fields: dict[int, list[Any]], number: int, default: Any) -> Any:
    """The value of a field that is there once, or its default."""
    value = (fields.get(number) or [default])[-1]
    if not isinstance(value, type(default)):
        raise TypeError(f"field {number} is of another kind")
    return value


def _block(table: bytes, offset: int, size: int, path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of one block; a key is stored without what it shares with the one before."""
    end = offset + size
    if end + 5 > len(table) or size < 4:
        raise ValueError(f"there is no block at byte {offset}")
    if not _is_intact(table[offset : end + 1], table[end + 1 : end + 5]):
        raise ValueError(f"the block at byte {offset} does not match its checksum")
    if table[end]:
        what = "The index of the checkpoint is compressed."
        fix = "let TensorFlow 1.2 or newer write the checkpoint again: it does not compress"
        raise ElectraError(what, where=str(path), fix=fix)
    end -= 4 * int.from_bytes(table[end - 4 : end], "little") + 4  # starts of whole keys
    at, key = offset, b""
    while at < end:
        shared, at = _varint(table, at)
        rest, at = _varint(table, at)
        length, at = _varint(table, at)
        if shared > len(key) or shared + rest > _MAX_KEY or at + rest + length > end:
            raise ValueError(f"an entry of the block at byte {offset} is too long")
        key = key[:shared] + table[at : at + rest]
        at += rest + length
        yield key, table[at - length : at]


def _read_index(path: Path) -> dict[str, bytes]:
    """Names and what is said of each, the header under the empty name."""
    with open(path, "rb") as file:
        table = file.read(_MAX_INDEX + 1)
    footer = table[-_FOOTER:]
    if len(table) > _MAX_INDEX or footer[40:] != _MAGIC:
        raise ValueError("no index of a TensorFlow checkpoint")
    places: list[int] = []
    at = 0
    for _ in range(4):  # offset and size of a block for extensions, then those of the blocks' list
        place, at = _varint(footer, at)
        places.append(place)
    if any(footer[at:40]):
        raise ValueError("the last bytes are damaged")
    list(_block(table, places[0], places[1], path))
    entries: dict[str, bytes] = {}
    behind, last = 0, b""
    for count, (_, handle) in enumerate(_block(table, places[2], places[3], path)):
        offset, at = _varint(handle, 0)
        size, _ = _varint(handle, at)
        if offset < behind or count >= _MAX_ENTRIES:
            raise ValueError("blocks overlap, or are too many")
        behind = offset + size
        for key, value in _block(table, offset, size, path):
            if (entries and key <= last) or len(entries) >= _MAX_ENTRIES:
                raise ValueError("names are not in order, or too many")
            last = key
            name = key.decode("utf-8", "backslashreplace")
            entries[name if name.isprintable() else ascii(name)] = value
    return entries


# ---------------------------------------------------------------------- the tensors


def _entry(
    name: str, message: bytes, path: Path
) -> tuple[torch.dtype, tuple[int, ...], int, int, int, bytes]:
    """Type, shape, shard, offset, size and checksum of a variable."""
    fields = _fields(message)
    if fields[7]:
        what = f"The variable {name!a} is stored in slices, which are not put together here."
        fix = "let TensorFlow save the checkpoint again with variables that are not partitioned"
        raise ElectraError(what, where=str(path), fix=fix)
    number, shard, offset, size = (_last(fields, i, 0) for i in (1, 3, 4, 5))
    if number not in _DTYPES:
        what = f"The variable {name!a} has the type {number} of TensorFlow."
        known = ", ".join(f"{i} ({dtype})" for i, dtype in _DTYPES.items())
        raise ElectraError(what, where=str(path), fix=f"save it as one of {known}")
    dims = _fields(_last(fields, 2, b""))[2]
    shape = tuple(_last(_fields(dim), 1, 0) for dim in dims[:9])
    if len(shape) > 8 or math.prod(shape) * _DTYPES[number].itemsize != size:
        raise ValueError(f"{name!a} of shape {shape} has {size} bytes")
    return _DTYPES[number], shape, shard, offset, size, _last(fields, 6, b"")


def read_bundle(
    prefix: Path, wanted: Callable[[str], bool] = lambda _: True
) -> tuple[Tensors, list[str]]:
    """The wanted variables of a checkpoint, and the names of all that it holds."""
    index = prefix.with_name(f"{prefix.name}.index")
    with reading(index, _AGAIN):
        messages = _read_index(index)
        header = _fields(messages.pop(""))
        if _last(header, 2, 0) or _last(_fields(_last(header, 3, b"")), 2, 0) > 1:
            what = "The checkpoint was written by a machine or a version that is not understood."
            fix = "let TensorFlow save it again on a little-endian machine"
            raise ElectraError(what, where=str(index), fix=fix)
        count = _last(header, 1, 0)
        entries = {n: _entry(n, m, index) for n, m in messages.items() if wanted(n)}
    shards: dict[Path, list[str]] = defaultdict(list)
    for name, entry in entries.items():
        part = f"data-{entry[2]:05}-of-{count:05}"
        shards[prefix.with_name(f"{prefix.name}.{part}")].append(name)
    for path in shards:
        if not path.is_file():
            raise ElectraError("A part of the checkpoint is missing.", where=str(path), fix=_AGAIN)
    with reading(index, _AGAIN):
        if sum(entry[4] for entry in entries.values()) > sum(p.stat().st_size for p in shards):
            raise ValueError("the tensors are larger than the files that should hold them")
    tensors: Tensors = {}
    for path, names in shards.items():
        with reading(path, _AGAIN), open(path, "rb") as file:
            for name in names:
                dtype, shape, _, offset, size, crc = entries[name]
                file.seek(offset)
                data = bytearray(size)
                if file.readinto(data) != size or not _is_intact(data, crc):
                    raise ValueError(f"{name!a} does not match its checksum")
                tensors[name] = torch.frombuffer(data, dtype=dtype).reshape(shape)
    return tensors, list(messages)


# ---------------------------------------------------------------------- the networks


def find(path: Path) -> Path | None:
    """The prefix of the checkpoint that a path means: it itself, or the newest of a directory."""
    prefix = str(path).removesuffix(".index")
    if Path(f"{prefix}.index").is_file():
        return Path(prefix)
    found = sorted(p.stem for p in path.glob("*.index") if p.is_file())
    if not found or (path / "model.safetensors").is_file():
        return None
    record = path / "checkpoint"
    text = record.read_bytes()[:4096].decode("utf-8", "replace") if record.is_file() else ""
    named = re.search(r'^model_checkpoint_path: *"(?:[^"]*/)?([^"/]+)"', text, re.M)
    newest = named[1] if named else found[0]
    if newest not in found or (named is None and len(found) > 1):
        what = "The directory does not say which of its checkpoints is the newest."
        fix = f"give one of them: {', '.join(str(path / name) for name in found[:9])}"
        raise ElectraError(what, where=str(path), fix=fix)
    return path / newest


def read_networks(prefix: Path) -> tuple[list[tuple[dict[str, Any], Tensors]], str]:
    """The networks of a checkpoint, and a note on what in it belongs to none of them.

    A generator shares the embeddings of the discriminator, or its whole encoder, where it has none
    of its own. A checkpoint without a head of pre-training is a fine-tuned one.
    """
    tensors, names = read_bundle(prefix, lambda n: n.startswith(_PARTS) and not _SLOT.search(n))
    kinds = [k for k in ("discriminator", "generator") if _under(tensors, f"{k}_predictions/")]
    files = [place for name in _SETTINGS if (place := prefix.with_name(name)).is_file()]
    told = read_settings_file(files[0]) if files else {}
    networks: list[tuple[dict[str, Any], Tensors]] = []
    for kind in kinds or ["discriminator"]:
        own = "generator/" if kind == "generator" else "electra/"
        encoder = own if _under(tensors, f"{own}encoder/") else "electra/"
        tables = own if _under(tensors, f"{own}embeddings/") else "electra/"
        chosen = _under(tensors, f"{encoder}encoder/", f"{encoder}embeddings_project/")
        chosen |= _under(tensors, f"{tables}embeddings/")
        chosen = {f"electra/{name.partition('/')[2]}": t for name, t in chosen.items()}
        apart = _OWN if kind == "generator" and "discriminator" in kinds else ()
        settings = {key: value for key, value in told.items() if key not in apart}
        settings |= nested if isinstance(nested := told.get(kind), dict) else {}
        settings = _sizes(chosen, kind, settings, prefix)
        chosen |= _under(tensors, f"{kind}_predictions/")
        networks.append((settings, dict(starmap(_renamed, chosen.items()))))
    others = sorted({"/".join(n.split("/")[:2]) for n in names if not _SLOT.search(n)})
    others = [ascii(name)[1:-1] for name in others if not f"{name}/".startswith(_PARTS)]
    return networks, f"without {', '.join(others[:9])}" if others else ""


def _under(tensors: Tensors, *prefixes: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}


def _sizes(tensors: Tensors, kind: str, told: dict[str, Any], prefix: Path) -> dict[str, Any]:
    """The settings of a network from its shapes, and what a file beside it says of it."""
    layer = "electra/encoder/layer_0"
    try:
        vocab_size, embedding_size = tensors["electra/embeddings/word_embeddings"].shape
        hidden_size, ffn_size = tensors[f"{layer}/intermediate/dense/kernel"].shape
        positions = tensors["electra/embeddings/position_embeddings"].shape[0]
    except (LookupError, ValueError) as error:
        what = f"The checkpoint holds no network of ELECTRA: {error}."
        fix = "give a checkpoint of google-research/electra; others have other variables"
        raise ElectraError(what, where=str(prefix), fix=fix) from error
    if hidden_size % 64 and kind == "discriminator" and "num_attention_heads" not in told:
        what = f"The checkpoint does not say how many attention heads share {hidden_size} units."
        fix = f'write {{"num_attention_heads": …}} into {prefix.with_name(_SETTINGS[0])}'
        raise ElectraError(what, where=str(prefix), fix=fix)
    return {
        "vocab_size": vocab_size,
        "embedding_size": embedding_size,
        "hidden_size": hidden_size,
        "intermediate_size": ffn_size,
        "max_position_embeddings": positions,
        "num_hidden_layers": len({name.split("/")[2] for name in _under(tensors, layer[:-1])}),
        "num_attention_heads": max(1, hidden_size // 64),  # as the released code has it
        **told,
    }


def _renamed(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """A variable as transformers names and shapes it."""
    if name.endswith("/kernel") and tensor.ndim == 2:
        tensor = tensor.T
    for pattern, new in _NAMES:
        name = re.sub(pattern, new, name)
    return name.replace("/", "."), tensor.float()
