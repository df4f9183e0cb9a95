"""What several processes do with the flat buffers of `optim.Adam`: add up, split, hand round.

A buffer is P pieces. A piece of the gradient is sent as soon as the backward pass has written it,
while the pass goes on:

    none        all-reduce: every process has the whole sum and updates all weights
    optimizer   reduce-scatter: each piece is cut into one share a process, which has the moments
                of its shares alone, updates their weights and hands them to the others

A compiled backward pass gives all its gradients at its end, so the step is compiled in P parts.
A share as an index: buffer.view(P, processes, k)[:, rank]. Alone, there is one piece and one share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from .runtime import Runtime

PIECES = 8
_ALIGN = 64  # elements: every tensor starts on a boundary that vector units and GPUs like

_new = hasattr(dist, "reduce_scatter_single")  # names of torch 2.13
_reduce_scatter = getattr(dist, f"reduce_scatter_{'single' if _new else 'tensor'}")
_all_gather = getattr(dist, "all_gather_single" if _new else "all_gather_into_tensor")


class Exchange:
    """The pieces and shares of this process."""

    def __init__(self, runtime: Runtime | None = None, *, sharded: bool = False) -> None:
        self.runtime = runtime if runtime and runtime.world > 1 else None
        self.pieces = PIECES if self.runtime else 1
        self.shares, self.rank = 1, 0
        if self.runtime and sharded:
            self.shares, self.rank = self.runtime.world, self.runtime.rank
        self._under_way: list[Any] = []

    def padded(self, length: int) -> int:
        """The next length that can be cut into pieces and shares."""
        unit = self.pieces * self.shares * _ALIGN
        return -(-length // unit) * unit

    def piece(self, number: int, length: int) -> slice:
        """Where a piece lies in a buffer of `length`."""
        size = length // self.pieces
        return slice(number * size, (number + 1) * size)

    def begin(self, number: int, length: int) -> int:
        """Where this process's share of a piece begins."""
        return (number * self.shares + self.rank) * (length // self.pieces // self.shares)

    def mine(self, flat: Tensor) -> Tensor:
        """This process's shares of a whole buffer, (P, k), as a view."""
        return flat.view(self.pieces, self.shares, -1)[:, self.rank]

    @contextlib.contextmanager
    def alone(self) -> Generator[None]:
        """No communication inside the block: a step aborted there blocks no other process."""
        kept, self.runtime = self.runtime, None
        try:
            yield
        finally:
            self.runtime = kept

    def send(self, grad: Tensor, number: int) -> None:
        """Begin to add up a piece of the gradient; all processes send in the same order."""
        if self.runtime is None:
            return
        piece = grad[self.piece(number, len(grad))]
        with self.runtime.together():
            if self.shares > 1:
                own = self.mine(grad)[number]
                self._under_way.append(_reduce_scatter(own, piece, async_op=True))
            else:
                self._under_way.append(dist.all_reduce(piece, async_op=True))

    def wait(self) -> None:
        """Until all that was sent has arrived; on a GPU the stream waits, not Python."""
        if self.runtime is not None:
            with self.runtime.together():
                while self._under_way:
                    self._under_way.pop(0).wait()

    def norm(self, grad: Tensor) -> Tensor:
        """Of the sum of all gradients, the same number on every process."""
        if self.runtime is None or self.shares == 1:
            return grad.norm()
        return self.runtime.sum_(self.mine(grad).norm().square()).sqrt()

    def hand_round(self, flat: Tensor) -> None:
        """Fill a whole buffer from the shares that each process has in it."""
        if self.runtime is not None and self.shares > 1:
            with self.runtime.together():
                for number, own in enumerate(self.mine(flat)):
                    piece = flat[self.piece(number, len(flat))]
                    self._under_way.append(_all_gather(piece, own, async_op=True))
            self.wait()

    def collect(self, own: Tensor, whole: Tensor) -> None:
        """A whole buffer on the host of the main process, from what each has of it."""
        assert self.runtime is not None
        piece = own.new_empty(len(whole) // self.pieces)
        for number, share in enumerate(own.chunk(self.pieces)):
            with self.runtime.together():
                _all_gather(piece, share)
            if self.runtime.is_main:
                whole[self.piece(number, len(whole))].copy_(piece)


def compiler_in_parts(module: nn.Module) -> Callable[..., Any]:
    """torch.compile's own compiler, for a graph cut where a piece's worth of parameters is used.

    The cuts are those torch makes for its DistributedDataParallel, which counts the bytes behind a
    parameter; here all parameters are views of one buffer, and blocks take theirs as a list.
    """
    from torch._dynamo.backends.distributed import Bucket, DDPOptimizer
    from torch._inductor.compile_fx import compile_fx

    class Parts(DDPOptimizer):
        def add_param_args(self, bucket: Bucket, node: Any) -> None:
            for used in node.all_input_nodes:
                if used.op == "placeholder" and isinstance(
                    parameter := used.meta["example_value"], nn.Parameter
                ):
                    bucket.size += parameter.numel()
                    bucket.params.append(str(used.target))
                    bucket.param_ids.append(id(parameter))

    size, compiler = sum(p.numel() for p in module.parameters()) // PIECES, cast("Any", compile_fx)
    return Parts(size, compiler, first_bucket_cap=size).compile_fn
