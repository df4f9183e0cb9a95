"""From a corpus to the batches of any step.

Which examples a step sees is a function of (seed, step); processes and micro-batches only decide
who computes which rows. Several steps are fetched together as one `Block` that lies on the device,
either gathered there from a resident token array or copied from the memory-mapped shards.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .config import PretrainConfig
from .corpus import Examples
from .corruption import num_masked
from .objectives import Batch
from .randomness import shuffled
from .runtime import Runtime


class Block(NamedTuple):
    """The batches of S consecutive steps; R rows of the B of each step belong to this process."""

    x: Tensor  # (S, R, T) int32
    split: Tensor  # (S, R) int32, where the second segment begins
    length: Tensor  # (S, R) int32
    all_lengths: Tensor  # (S, B) int32, of the whole global batch

    def batch(self, slot: Tensor, rows: slice, config: PretrainConfig) -> Batch:
        """The micro-batch `rows` of the step at `slot`, a () int64 tensor on the device."""
        x = self.x.index_select(0, slot.view(1))[0, rows].long()  # (R', T)
        length = self.length.index_select(0, slot.view(1))[0, rows].long()
        split = self.split.index_select(0, slot.view(1))[0, rows]
        masked, tokens = self.counts(slot, config)
        position = torch.arange(x.shape[1], device=x.device)
        return Batch(
            x=x,
            segment=((position >= split[:, None]) & (position < length[:, None])).long(),
            length=length,
            tokens=tokens,
            masked=masked,
        )

    def counts(self, slot: Tensor, config: PretrainConfig) -> tuple[Tensor, Tensor]:
        """Masked positions and tokens of the global batch at `slot`, () float32 each."""
        every = self.all_lengths.index_select(0, slot.view(1))[0]  # (B,)
        masked = num_masked(every, config.masked_slots, config.objective)
        return masked.sum().float(), every.sum().float()


class Batches:
    """The training order of one process's share of the batches.

    A packed corpus without short sequences still has one at the end of every piece of text, less
    than one in a thousand. They sit out, `padded` is false, and attention needs no mask.
    """

    def __init__(self, examples: Examples, config: PretrainConfig, runtime: Runtime) -> None:
        self.examples, self.config, self.runtime = examples, config, runtime
        full = np.flatnonzero(examples.lengths == config.data.sequence_length)
        self.padded = examples.short_percent > 0 or len(full) < 0.99 * len(examples)
        self._used = np.arange(len(examples)) if self.padded else full
        size = config.data.batch_size
        share = size // runtime.world
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
        room = torch.cuda.get_device_properties(device).total_memory / 4
        return wish == "yes" or (wish == "auto" and need < room)

    def block(self, step: int, steps: int) -> Block:
        """The batches of `steps` steps beginning with `step`."""
        size = self.config.data.batch_size
        place = np.arange(step * size, (step + steps) * size).reshape(steps, size)
        index = self._used[shuffled(place, len(self._used), self.config.run.seed)]  # (S, B)
        mine = np.ascontiguousarray(index[:, self.rows])  # (S, R)
        device = self.runtime.device

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(device)

        # What the host has to read comes before the first copy, which waits for the device.
        ids = None if self._resident else self.examples.gather(mine.reshape(-1))[0]
        length = put(self.examples.lengths[mine])
        if ids is None:
            x = self._gather(torch.from_numpy(mine).to(device), length)
        else:
            x = put(ids).view(*mine.shape, -1)
        return Block(x, put(self.examples.splits[mine]), length, put(self.examples.lengths[index]))

    def _gather(self, index: Tensor, length: Tensor) -> Tensor:
        """Rows of the resident token array, padded, (S, R, T) int32."""
        assert self._resident is not None
        tokens, offsets = self._resident
        position = torch.arange(self.config.data.sequence_length, device=index.device)
        at = (offsets[index][..., None] + position).clamp(max=len(tokens) - 1)
        x = tokens[at].int()
        if tokens.dtype == torch.int16:
            x = x & 0xFFFF
        return torch.where(position < length[..., None], x, self.examples.pad_id)
