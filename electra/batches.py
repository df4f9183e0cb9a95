"""From a corpus to the batches of any step.

Which examples a step sees is a function of (seed, step); processes and micro-batches only decide
who computes which rows. Several steps are fetched together as one `Block` that lies on the device,
either gathered there from a resident token array or copied from the memory-mapped shards.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .config import PretrainConfig
from .corruption import lay_out, num_masked
from .data.corpus import Examples
from .objectives import Batch
from .packing import Packing
from .randomness import shuffled
from .runtime import Runtime, sent, usable_memory


class Block(NamedTuple):
    """The batches of S consecutive steps; R rows of the B of each step belong to this process.

    A row holds up to P examples one after another; the lengths of those that are not there are 0.
    """

    x: Tensor  # (S, R, T) int32
    segment: Tensor  # (S, R, T) int32, 0 or 1
    length: Tensor  # (S, R, P) int32
    all_lengths: Tensor  # (S, B, P) int32, of the whole global batch

    def batch(self, slot: Tensor, rows: slice, config: PretrainConfig) -> Batch:
        """The micro-batch `rows` of the step at `slot`, a () int64 tensor on the device."""
        x = self.x.index_select(0, slot.view(1))[0, rows].long()  # (R', T)
        length = self.length.index_select(0, slot.view(1))[0, rows].long()  # (R', P)
        masked, tokens = self.counts(slot, config)
        return Batch(
            x=x,
            segment=self.segment.index_select(0, slot.view(1))[0, rows].long(),
            length=length.sum(1),
            tokens=tokens,
            masked=masked,
            parts=length if length.shape[1] > 1 else None,
        )

    def counts(self, slot: Tensor, config: PretrainConfig) -> tuple[Tensor, Tensor]:
        """Masked positions and tokens of the global batch at `slot`, () float32 each."""
        every = self.all_lengths.index_select(0, slot.view(1))[0]  # (B, P)
        masked = num_masked(every, config.masked_slots, config.objective)
        return masked.sum().float(), every.sum().float()


class Batches:
    """The training order of one process's share of the batches.

    A packed corpus without short sequences still has one at the end of every piece of text, less
    than one in a thousand. They are left out, `padded` is false, and attention needs no mask.
    Where there is padding, `data.examples_per_row` lets examples share rows (`packing.py`).
    """

    def __init__(self, examples: Examples, config: PretrainConfig, runtime: Runtime) -> None:
        self.examples, self.config, self.runtime = examples, config, runtime
        length = config.data.sequence_length
        full = np.flatnonzero(examples.lengths == length)
        self.padded = examples.short_percent > 0 or len(full) < 0.99 * len(examples)
        self._full = None if self.padded else full
        self._packing: Packing | None = None
        if self.padded and config.data.examples_per_row > 1:
            most = min(config.data.examples_per_row, length)  # tables are that wide
            self._packing = Packing(examples.lengths, length, most)
        self._count = len(self._packing or examples) if self.padded else len(full)  # of all rows
        share = config.data.batch_size // runtime.world
        self.rows = slice(runtime.rank * share, (runtime.rank + 1) * share)
        self._resident: tuple[Tensor, Tensor] | None = None
        if self._keep_on_device():
            tokens = examples.read_all()
            self._resident = (
                # torch has no uint16 gather; the bits travel as int16.
                torch.from_numpy(tokens.view(np.int16 if tokens.itemsize == 2 else np.int32)).to(
                    runtime.device
                ),
                torch.from_numpy(examples.offsets).to(runtime.device),
            )

    def _keep_on_device(self) -> bool:
        wish, device = self.config.data.on_device, self.runtime.device
        if device.type != "cuda":
            return False
        need = int(self.examples.offsets[-1]) * self.examples.tokens_dtype.itemsize
        room = usable_memory(device) / 4
        return wish == "yes" or (wish == "auto" and need < room)

    def block(self, step: int, steps: int) -> Block:
        """The batches of `steps` steps beginning with `step`."""
        size = self.config.data.batch_size
        place = np.arange(step * size, (step + steps) * size).reshape(steps, size)
        row = shuffled(place, self._count, self.config.run.seed)  # (S, B)
        if self._packing is not None:
            index = self._packing.examples(row)  # (S, B, P), −1 where there is none
        else:
            index = (row if self._full is None else self._full[row])[..., None]
        lengths = np.where(index >= 0, self.examples.lengths[index], 0)
        mine = np.ascontiguousarray(index[:, self.rows])  # (S, R, P)
        device = self.runtime.device

        def put(array: np.ndarray) -> Tensor:
            return sent(torch.from_numpy(array.astype(np.int32)), device)

        ids = None if self._resident else self._read(mine, lengths[:, self.rows])
        length, T = put(lengths[:, self.rows]), self.config.data.sequence_length
        example, position = lay_out(length, T)  # (S, R, T)
        if ids is None:
            x = self._gather(sent(torch.from_numpy(mine), device), example, position)
        else:
            x = put(ids)
        split = F.pad(put(self.examples.splits[mine]), (0, 1), value=T)  # padding has no second
        segment = (position >= split.gather(-1, example)).int()
        return Block(x, segment, length, put(lengths))

    def _read(self, index: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Rows of tokens from the shards, padded, (S, R, T)."""
        examples, _, length = self.examples.gather(index[index >= 0])
        position = np.arange(examples.shape[1])
        filled = position < lengths.sum(-1)[..., None]
        x = np.full(filled.shape, self.examples.pad_id)
        x[filled] = examples[position < length[:, None]]
        return x

    def _gather(self, index: Tensor, example: Tensor, position: Tensor) -> Tensor:
        """Rows of the resident token array, padded, (S, R, T) int32."""
        assert self._resident is not None
        tokens, offsets = self._resident
        first = F.pad(offsets[index], (0, 1)).gather(-1, example)
        x = tokens[(first + position).clamp(max=len(tokens) - 1)].int()
        if tokens.dtype == torch.int16:
            x = x & 0xFFFF
        return torch.where(example < index.shape[-1], x, self.examples.pad_id)
