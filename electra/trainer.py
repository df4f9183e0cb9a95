"""The optimizer step of pre-training: batch, losses, gradients, sum over processes, Adam, meter.

`Trainer.train_step` is that step, to be read from top to bottom; on a GPU it is compiled and
recorded as one CUDA graph, which `Trainer.step` replays. All it needs lies on the device before:
`Trainer.load_block` brings batches and learning rates of many steps at a time. The loop around it
is in `pretrain.py`.
"""

from __future__ import annotations

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .batches import Batches, Block
from .config import PretrainConfig
from .encoder import Block as EncoderBlock
from .encoder import Embeddings
from .errors import ElectraError
from .exchange import Exchange, compiler_in_parts
from .gpu import fused, kernels
from .objectives import (
    Batch,
    Losses,
    Objective,
    ReplacedTokenDetection,
    WithGenerator,
)
from .optim import Adam, added, by_gram
from .randomness import StepRng
from .runtime import Runtime, is_out_of_memory, sent, usable_memory

SPARE = 0.02  # of the usable memory, kept free by an automatic micro-batch


@dataclass
class Meter:
    """Sums over the finite steps since the last line of metrics, kept on the device."""

    sums: Tensor  # (FIELDS,) float64

    FIELDS = (
        *("mlm", "disc", "mlm_correct", "replaced", "disc_correct"),  # this process's share
        *("masked", "tokens", "norm", "steps"),  # of the whole step
        *("scored", "total"),  # this process's share again
    )

    def __post_init__(self) -> None:
        self._losses = torch.zeros_like(self.sums[:7])  # of the step under way
        self.shares = (self.sums[:5], self.sums[9:])  # what is of this process

    def add_losses(self, losses: Losses) -> None:
        """The share of one micro-batch."""
        terms = (*losses[1:], losses.total)
        self._losses.add_(torch.stack([p.double() for p in terms]))

    def add_step(self, counts: tuple[Tensor, Tensor], norm: Tensor) -> None:
        """What is known of the step as a whole: masked positions, tokens, gradient norm."""
        whole = torch.stack([p.double() for p in (*counts, norm, torch.ones_like(norm))])
        parts = torch.cat([self._losses[:5], whole, self._losses[5:]])
        self.sums.add_(torch.where(parts.isfinite().all(), parts, 0.0))
        self.forget()

    def forget(self) -> None:
        """Drop the step under way."""
        self._losses.zero_()


def close_step(
    meter: Meter, block: Block, norm: Tensor, slot: Tensor, counter: Tensor, config: PretrainConfig
) -> None:
    """After an update: what the step as a whole was, and on to the next."""
    meter.add_step(block.counts(slot, config), norm)
    slot.add_(1)
    counter.add_(1)


class Trainer:
    """One process's share of the optimizer steps, eager or as a recorded CUDA graph."""

    def __init__(
        self, objective: Objective, batches: Batches, config: PretrainConfig, runtime: Runtime
    ) -> None:
        self.objective, self.batches = objective, batches
        self.config, self.runtime = config, runtime
        self.idle = objective.idle()
        self.has_kernels = use_kernels(objective, config, runtime)
        # The first step that this optimizer makes: the second of two stages has one of its own.
        self.first_step = (config.switch_step or 0) if objective.stage == "discriminator" else 0
        multipliers = {
            **dict.fromkeys(objective.generators_own(), config.optim.generator_rate),
            **dict.fromkeys(self.idle, 0.0),
        }
        self.in_shares = shares_weights(config, runtime)
        if self.in_shares:
            from . import fsdp  # its imports take a second

            fsdp.share(objective, runtime)
            self.optimizer = fsdp.ShardedAdam(objective, config.optim, runtime, multipliers)
        else:
            self.optimizer = Adam(
                objective,
                config.optim,
                working_dtype=runtime.dtype,
                multipliers=multipliers,
                exchange=Exchange(runtime, sharded=config.run.sharding == "optimizer"),
                kernel=self.has_kernels,
            )
        self.forward: Callable[[Batch, StepRng], Losses] = objective
        # The same in two parts, where the generator learns first.
        self.parts: tuple[Callable[..., Any], Callable[..., Losses]] | None = None
        self.read: Callable[..., Batch] = Block.batch
        self.note: Callable[[Meter, Losses], None] = Meter.add_losses
        self.close: Callable[..., None] = close_step
        self._compile()
        self.rows = config.data.batch_size // runtime.world
        self.split(config.data.at_once(self.rows))
        # A GPU is fed many steps ahead so that it never waits for Python.
        on_gpu = runtime.device.type == "cuda"
        self.block_steps = steps_ahead(self.rows * config.data.sequence_length) if on_gpu else 1
        device = runtime.device
        self.seed: int | Tensor = config.run.seed
        if runtime.compiled:  # what was compiled for one seed is found again by the others
            self.seed = torch.tensor(config.run.seed % 2**32, device=device)
        self.slot = torch.zeros((), dtype=torch.int64, device=device)  # place in the block
        self.counter = torch.zeros((), dtype=torch.int64, device=device)  # steps done
        self.rates = torch.zeros(self.block_steps, device=device)
        self.shares = torch.ones(self.block_steps, device=device)  # of λ
        self.row = torch.arange(batches.rows.start, batches.rows.stop, device=device)
        self.meter = Meter(torch.zeros(len(Meter.FIELDS), dtype=torch.float64, device=device))
        self.block: Block | None = None
        self._left = 0  # steps left in the block
        self._under_way: deque[torch.cuda.Event] = deque()  # ends of steps that a GPU was asked for
        self._graph: torch.cuda.CUDAGraph | None = None

    def _compile(self) -> None:
        o = self.objective
        if self.runtime.compiled:  # no more than eight versions of a function, says torch
            torch.compiler.reset()

        def compiled(work: Callable[..., Any]) -> Callable[..., Any]:
            if not self.runtime.compiled:
                return work
            backend = compiler_in_parts(o) if self.runtime.world > 1 else "inductor"
            return torch.compile(work, fullgraph=True, dynamic=False, backend=backend)

        self.forward = compiled(o)
        if isinstance(o, WithGenerator) and o.generator_is_first and not self.in_shares:
            self.parts = compiled(o.generate_alone), compiled(o.learn)
        if self.runtime.world == 1:  # some seventy small operations around the networks
            self.read, self.note = compiled(Block.batch), compiled(Meter.add_losses)
            self.close = compiled(close_step)
            self.optimizer.judge = compiled(self.optimizer.judge_norm)
            if by_gram(self.runtime.device):  # one pass over long vectors instead of four
                self.optimizer.momentum = compiled(self.optimizer.nesterov)

    # ------------------------------------------------------------------ the step

    def train_step(self) -> None:
        """One optimizer step; every number it needs is already on the device."""
        assert self.block is not None
        alone = len(self.micro_batches) == 1  # else each would be compiled anew
        for i, rows in enumerate(self.micro_batches):
            read = self.read if alone else Block.batch
            batch = read(self.block, self.slot, rows, self.config)
            if self.config.objective.disc_start_percent:
                share = self.shares.index_select(0, self.slot.view(1))[0]
                batch = batch._replace(disc_share=share)
                self.optimizer.good_steps *= share >= 1  # norms grow with λ: that is no spike
            rng = StepRng(self.seed, self.counter, self.row[rows])
            earlier = None
            if self.parts is None:
                losses = self.forward(batch, rng)
            else:  # what the generator's gradient needs is gone before the discriminator begins
                generate, learn = self.parts
                k, mlm, correct = generate(batch, rng)
                earlier = torch.autograd.grad(
                    self.config.objective.gen_weight * mlm,
                    self.optimizer.parameters,
                    allow_unused=True,
                )
                losses = learn(k, mlm.detach(), correct, batch, rng)
            if last := i == len(self.micro_batches) - 1:
                self.optimizer.expect(first=i == 0, earlier=earlier)
            grads = self.gradients(losses.total, may_miss=bool(self.idle or earlier))
            self.note(self.meter, losses._replace(total=losses.total.detach()))
            if last:  # of all processes: losses are shares of the global mean, so they add up
                self.optimizer.finish(grads)
            else:
                self.optimizer.accumulate(added(earlier, grads), first=i == 0)
        rate = self.rates.index_select(0, self.slot.view(1))[0]
        norm = self.optimizer.step(rate, self.counter - self.first_step)
        self.close(self.meter, self.block, norm, self.slot, self.counter, self.config)

    def gradients(self, loss: Tensor, *, may_miss: bool) -> Sequence[Tensor]:
        """Of this process's loss; where weights are in shares, this process's rows of the sum."""
        if self.in_shares:
            from .fsdp import take_gradients

            loss.backward()
            return take_gradients(self.optimizer.parameters)
        return torch.autograd.grad(
            loss,
            self.optimizer.parameters,
            allow_unused=may_miss,
            materialize_grads=bool(self.idle),
        )

    # ------------------------------------------------------------------ around it

    def forget_whole_weights(self) -> None:
        """Where weights are in shares: after an evaluation, which has no backward pass to do it, or
        the next step would compute with weights that are old by then."""
        if self.in_shares:
            shared: Any = self.objective
            shared.reshard()

    @property
    def needs_block(self) -> bool:
        return self._left == 0

    @property
    def may_stop(self) -> bool:
        """Whether all processes are at the same place and can agree on stopping."""
        return self.runtime.world == 1 or self.needs_block

    @property
    def at_once(self) -> int:
        """The most sequences of this process that go through the model together."""
        return self.micro_batches[0].stop

    def split(self, size: int) -> None:
        """Send so many sequences of this process through the model at once."""
        ends = range(size, self.rows + size, size)
        self.micro_batches = [slice(end - size, min(end, self.rows)) for end in ends]

    def load_block(self, step: int, rates: list[float], shares: list[float] | None = None) -> None:
        """Bring the batches, learning rates and shares of λ of the next steps to the device.

        Asked for while a GPU works on the block before, so that it never waits.
        """
        block, device = self.batches.block(step, self.block_steps), self.runtime.device
        if self.block is None:
            self.block = block
        else:  # a recorded graph reads these addresses
            for old, new in zip(self.block, block, strict=True):
                old.copy_(new)
        self.rates.copy_(sent(torch.tensor(rates), device))
        if shares is not None:
            self.shares.copy_(sent(torch.tensor(shares), device))
        self.slot.zero_()
        self._left = self.block_steps

    def step(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif self.in_shares:  # weights come and go in the middle of it
            with self.runtime.together():
                self.train_step()
        else:
            self.train_step()
        self._left -= 1
        if self.runtime.device.type == "cuda":
            self._keep_pace()

    def _keep_pace(self) -> None:
        """Limit how many steps are queued: by so many the host, its clock and its signals are ahead
        of the device."""
        end = torch.cuda.Event(blocking=True)  # a core that waits is free for others
        end.record()
        self._under_way.append(end)
        if len(self._under_way) > steps_under_way(self.rows * self.config.data.sequence_length):
            self._under_way.popleft().synchronize()

    def second_stage(self) -> Trainer:
        """Half-way of two_stage: the generator is frozen, the discriminator starts at its weights.

        Other parameters move from here on, so the optimizer is a new one.
        """
        weights = {name: t.clone() for name, t in self.optimizer.state()["model"].items()}
        if self.config.objective.stage_two == "copy":
            for name in [name for name in weights if name.startswith("discriminator.")]:
                weights[name] = weights[name.replace("discriminator.", "generator.", 1)]
        self.objective.stage = "discriminator"
        for hook in self.optimizer.hooks:
            hook.remove()
        second = Trainer(self.objective, self.batches, self.config, self.runtime)
        second.optimizer.load({"model": weights})
        second.counter.copy_(self.counter)
        second.meter.sums.copy_(self.meter.sums)
        for name, counter in second.optimizer.counters().items():
            if not name.startswith("good"):  # norms of another loss judge none of these
                counter.copy_(self.optimizer.counters()[name])
        return second

    def record(self) -> None:
        """Compile the step and record it as a CUDA graph; training state stays as it was."""
        if not (self.runtime.compiled or self.runtime.cuda_graph):
            return
        with self._without_effect():
            if self.runtime.cuda_graph:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(3):
                        self.train_step()
                torch.cuda.current_stream().wait_stream(side)
                self._graph = torch.cuda.CUDAGraph()
                # Other threads may use the device meanwhile: NCCL's watchdog, a save.
                with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                    self.train_step()
            else:
                self.train_step()

    @contextlib.contextmanager
    def _without_effect(self) -> Generator[None]:
        """Steps inside leave the training as it was, whether or not they come to their end."""
        saved_step = int(self.counter)
        kept = [(t, t.clone()) for t in (self.meter.sums, *self.optimizer.counters().values())]
        self.load_block(saved_step, [0.0] * self.block_steps)
        self.optimizer.live.fill_(False)
        try:
            yield
        finally:
            self.optimizer.live.fill_(True)
            self.optimizer.forget()
            self.meter.forget()
            self.counter.fill_(saved_step)
            for tensor, value in kept:
                tensor.copy_(value)
            self._left = 0

    def fits(self, glance: Callable[[], None]) -> bool:
        """Whether every process has the memory for a step, for the copies of a save beside it, and
        for `glance`, a part of an evaluation. Leaves nothing behind."""
        ran_out = False
        try:
            # Nothing is sent: a process that runs out of memory must not keep the others waiting.
            with self.optimizer.exchange.alone():
                self._rehearse(glance)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            ran_out = True
        # Outside the except block: inside, the error still holds every tensor of the step.
        failed = self.runtime.any(ran_out)
        if failed:
            self._compile()  # drop the code compiled for this size
        gc.collect()
        if self.runtime.device.type == "cuda":
            torch.cuda.empty_cache()
        return not failed

    def _rehearse(self, glance: Callable[[], None]) -> None:
        device, beside = self.runtime.device, list[Tensor]()

        def occupy(size: int) -> None:
            beside.append(torch.empty(size, dtype=torch.uint8, device=device))

        if on_gpu := device.type == "cuda":
            occupy(int(SPARE * usable_memory(device)))  # for what is not seen here
            tensors = [t for group in self.state().values() for t in group.values()]
            copied = {t.untyped_storage() for t in tensors if t.is_cuda}
            if self.runtime.is_main:
                occupy(sum(storage.nbytes() for storage in copied))
            torch.cuda.reset_peak_memory_stats(device)
        with self._without_effect():
            self.train_step()
        if on_gpu and self.runtime.cuda_graph:  # a graph keeps for itself what its step needs
            occupy(torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device))
        with self._without_effect():  # the next block of batches comes beside all that
            pass
        glance()

    def collect(self) -> None:
        """Before `state` on the main process, on all of them: it gets what each has a share of."""
        self.optimizer.collect()
        for share in self.meter.shares:
            self.runtime.sum_(share)
            share.mul_(self.runtime.is_main)  # the others go on from nothing

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Tensors of a checkpoint, by file."""
        state = self.optimizer.state()
        moments = {f"{key}.{name}": t for key in ("m", "v") for name, t in state[key].items()}
        extra = {"meter": self.meter.sums, **self.optimizer.counters()}
        average = {"average": state["average"]} if "average" in state else {}
        return {"model": state["model"], "optimizer": {**moments, **extra}, **average}

    def load(self, tensors: dict[str, dict[str, Tensor]], step: int) -> None:
        optimizer = tensors["optimizer"]
        self.optimizer.load(
            {
                **{key: tensors[key] for key in ("model", "average") if key in tensors},
                **{
                    key: {n[2:]: t for n, t in optimizer.items() if n.startswith(f"{key}.")}
                    for key in ("m", "v")
                },
            }
        )
        meter = optimizer["meter"]  # of an earlier version, it is shorter
        self.meter.sums[: len(meter)].copy_(meter)
        for share in self.meter.shares:
            share.mul_(self.runtime.is_main)
        for name, counter in self.optimizer.counters().items():
            if name in optimizer:  # early checkpoints, or --force, may lack one
                counter.copy_(optimizer[name])
        self.counter.fill_(step)


def shares_weights(config: PretrainConfig, runtime: Runtime) -> bool:
    """Whether each process has some rows of each parameter only."""
    return config.run.sharding == "weights" and runtime.world > 1


def use_kernels(objective: Objective, config: PretrainConfig, runtime: Runtime) -> bool:
    """Let the blocks compute with their own kernels, where that is wanted and they fit."""
    reasons = [fused.unfit(config, runtime.dtype, padded=objective.padded)]
    if shares_weights(config, runtime):
        reasons.append("weights in shares")
    if not kernels.available():
        reasons.append("anything without Triton")
    if runtime.device.type != "cuda":
        reasons.append("a device that is no GPU")
    elif torch.version.hip or torch.cuda.get_device_capability(runtime.device)[0] not in (9, 10):
        # Others, also newer ones for desktops, have too little memory on a multiprocessor. AMD's
        # count in their own way: an MI300 says 9 as well.
        reasons.append("GPUs other than H100, H200, B200 and their like")
    reason = next((r for r in reasons if r is not None), None)
    if config.run.kernels == "yes" and reason is not None:
        raise ElectraError(
            f"The blocks' own kernels do not do {reason}.",
            where="run.kernels",
            fix="use --run.kernels auto, which takes them where they fit",
        )
    wanted = config.run.kernels != "no" and reason is None
    in_order = torch.are_deterministic_algorithms_enabled()
    for part in objective.modules():
        if isinstance(part, EncoderBlock):
            part.fused = wanted
        elif isinstance(part, Embeddings):
            part.in_order = wanted and in_order
    g = config.generator
    is_plain = g.temperature == 1.0 and not g.temperature_steps and not g.disallow_correct
    joint = type(objective) is ReplacedTokenDetection and objective.stage == "joint"
    objective.fused = wanted and is_plain and joint
    return wanted


def steps_ahead(tokens: int) -> int:
    """How many steps of so many tokens come to the GPU at a time: 32, unless that takes memory
    (about 50 bytes a token for a moment)."""
    return max(1, min(32, 2**23 // tokens))


def steps_under_way(tokens: int) -> int:
    """How many steps of so many tokens a GPU is asked for before one has ended: on a fast one work
    for a tenth of a second, in which the host prepares a block, and always another step."""
    return max(2, min(64, 2**18 // tokens))
