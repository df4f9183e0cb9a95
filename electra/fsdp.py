"""Weights in shares (`run.sharding weights`): torch's FSDP2, and Adam on one process's share.

Every process has some rows of each parameter, of its gradient and of its moments. FSDP2 gathers a
block's rows before it computes, drops them behind it, gathers them once more in the backward pass,
and leaves each process its rows of the sum of all gradients. The optimizer is `optim.Adam` on flat
buffers of those rows alone, which FSDP2's copies are refreshed from after each step. Linear layers
are gathered and computed in the run's type, all else in float32, and gradients are added up in
float32: the mathematics, and the checkpoints, are those of whole weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from .config import OptimConfig
from .encoder import Block, Encoder
from .exchange import Exchange
from .objectives import Objective
from .optim import Adam, Slot
from .runtime import Runtime


def share(objective: Objective, runtime: Runtime) -> None:
    """Leave this process its rows of every parameter."""
    # What a layer returns may be a view, of which FSDP2 warns: nothing here writes into one.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view", UserWarning)
    mesh = init_device_mesh(runtime.device.type, (runtime.world,))
    narrow = MixedPrecisionPolicy(
        param_dtype=runtime.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    parts = [*objective.modules()]
    for part in parts:
        if isinstance(part, Encoder):
            part.narrow = runtime.dtype
        if isinstance(part, Block):
            # Without its norms, which are float32; they are small, and gathered with the rest.
            linear: list[nn.Module] = [part.qkv, part.out, part.up, part.down]
            fully_shard(linear, mesh=mesh, mp_policy=narrow)
    for part in parts:  # of the heads, and where the embeddings' width differs
        if isinstance(part, nn.Linear) and not isinstance(part, FSDPModule):
            fully_shard(part, mesh=mesh, mp_policy=narrow)
    fully_shard(objective, mesh=mesh)  # the rest, whole from its forward to its backward pass
    register_fsdp_forward_method(objective, "predict")
    for part in parts:
        if isinstance(part, FSDPModule):  # losses are shares of the global mean, so they add up
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def take_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This process's rows of the gradients, summed over all processes; leaves none behind."""
    found: list[Tensor] = []
    for parameter in parameters:
        grad, parameter.grad = parameter.grad, None
        found.append(torch.zeros_like(_rows(parameter)) if grad is None else _rows(grad))
    return found


def _rows(tensor: Tensor) -> Tensor:
    return cast(DTensor, tensor).to_local()


class _OfRows(Exchange):
    """FSDP2 has added up the gradients, and no process has the others' rows: of all that the
    buffers' owners exchange, only the norm is left."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._all = runtime

    def norm(self, grad: Tensor) -> Tensor:
        return self._all.sum_(grad.norm().square()).sqrt()


class ShardedAdam(Adam):
    """`Adam` of this process's rows of what `share` has cut up."""

    def __init__(
        self,
        module: nn.Module,
        config: OptimConfig,
        runtime: Runtime,
        multipliers: Mapping[str, float],
    ) -> None:
        self._runtime = runtime
        super().__init__(module, config, multipliers=multipliers, exchange=_OfRows(runtime))
        # Whole tensors in the main process's host memory, for a checkpoint.
        whole = [(s.name, p.shape) for s, p in self._pairs()] if runtime.is_main else []
        self._gathered = {key: {n: torch.empty(shape) for n, shape in whole} for key in self._whole}

    def _pairs(self) -> Iterator[tuple[Slot, nn.Parameter]]:
        return zip(self.slots, self.parameters, strict=True)

    def held(self, whole: Tensor) -> Tensor:
        size = -(-len(whole) // self._runtime.world)  # as torch.chunk cuts; the last have less
        return whole[self._runtime.rank * size :][:size]

    @torch.no_grad()
    def _adopt(self) -> list[Tensor]:
        for slot, parameter in self._pairs():
            slot.of(self.master).copy_(_rows(parameter))
        return [slot.of(self.grad) for slot in self.slots]

    @torch.no_grad()
    def _refresh(self) -> None:
        for slot, parameter in self._pairs():
            _rows(parameter).copy_(slot.of(self.master))

    @torch.no_grad()
    def collect(self) -> None:
        for key, flat in self._whole.items():
            for slot, p in self._pairs():
                mesh, cut = cast(DTensor, p).device_mesh, cast(DTensor, p).placements
                own = DTensor.from_local(
                    slot.of(flat), mesh, cut, run_check=False, shape=p.shape, stride=p.stride()
                )
                with self._runtime.together():
                    whole = own.full_tensor()
                if self._runtime.is_main:
                    self._gathered[key][slot.name].copy_(whole)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """As `Adam.state`, but of the last `collect`; on the other processes, nothing."""
        return self._gathered
