"""Adam as in the paper and in the released code, Muon, and the learning-rate schedule.

All parameters live in one flat float32 buffer, the moments and gradients in three more of the same
layout. One step is then a handful of operations on long vectors instead of several per tensor, the
global norm is one reduction, processes exchange a few long pieces (`exchange.py`), and all of it
can be recorded in a CUDA graph. In a bf16 run the linear layers compute with bfloat16 copies
refreshed after each step.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .config import OptimConfig
from .errors import CorruptError
from .exchange import _ALIGN, Exchange
from .gpu import kernels

_WINDOW, _SIGMAS = 128, 6.0  # of the rule for spikes, as in OLMo-core
QUINTIC = 3.4445, -4.7750, 2.0315  # coefficients of the Muon paper: x, x³, x⁵


class Slot(NamedTuple):
    """Where one parameter lives in the flat buffers."""

    name: str
    start: int
    shape: torch.Size

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.shape.numel()].view(self.shape)

    def matrices(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The parameter as the matrices it consists of: queries, keys and values are three."""
        return self.of(flat).chunk(3 if self.name.endswith("qkv.weight") else 1)


class _Stack(NamedTuple):
    """Muon's matrices of one shape and rate."""

    factor: float
    ps: list[Tensor]
    us: list[Tensor]  # views of the gradients, which `nesterov` turns into updates


class Adam:
    """Adam with decoupled weight decay on everything but layer norms and biases.

    released (`bias_correction=False`):  p ← p − lr · (m / (√v + ε) + wd · p)
    textbook (`bias_correction=True`):   the same with m / (1 − β1ᵗ) and v / (1 − β2ᵗ)
    `kind="muon"`, matrices of blocks:   see `_muon`; their v stays 0

    A step whose gradient norm is not finite changes neither parameters nor moments; it is counted
    in `bad_steps` (all) and `bad_in_a_row`, on the device, without waiting for it. With
    `skip_spikes` so is a step whose norm is far above those of the good steps before it.
    """

    def __init__(
        self,
        module: nn.Module,
        config: OptimConfig,
        *,
        working_dtype: torch.dtype = torch.float32,
        multipliers: Mapping[str, float] | None = None,
        exchange: Exchange | None = None,
        kernel: bool = False,
    ) -> None:
        """multipliers: of the learning rate, by parameter name (layer-wise decay); default 1.

        kernel: update by our own kernel where it applies (Adam alone, one process, not too many
        parameters), else by torch's. On a GPU our kernels also orthogonalise Muon's matrices.
        """
        self.config = config
        self.exchange = exchange or Exchange()
        multipliers = multipliers or {}
        copies = working_dtype != torch.float32
        self.slots, self._working, size = _laid_out(module, self.held, copies=copies)
        named = dict(module.named_parameters())
        self.parameters = [named[slot.name] for slot in self.slots]
        device = self.parameters[0].device
        self.master = torch.zeros(self.exchange.padded(size), device=device)
        self.grad = torch.zeros_like(self.master)
        self.m, self.v = (torch.zeros_like(self.exchange.mine(self.master)).flatten() for _ in "mv")
        self._shadow = self.master[self._working].to(working_dtype)
        # Gradients of working copies are gathered in their own type, then widened all at once:
        # a list of mixed types would be copied tensor by tensor.
        self._half_grad = torch.zeros_like(self._shadow)
        self._narrow = False  # gradients of working copies are not widened: the kernel does it
        begin, end = self._working.start, self._working.stop
        self._is_half = [begin <= slot.start < end for slot in self.slots]
        self._grads = self._adopt()
        self.mean = self.master.clone() if config.average else None
        self._whole = {"model": self.master, "m": self.m, "v": self.v}
        if self.exchange.shares > 1:  # brought together in the host's memory, for a checkpoint
            self._whole |= {key: torch.zeros(len(self.master)) for key in ("m", "v")}
        if self.mean is not None:
            self._whole["average"] = self.mean
        self._refresh()
        # False while a CUDA graph is recorded: the step runs and changes nothing.
        self.live = torch.ones((), dtype=torch.bool, device=device)
        self._init_update(multipliers, kernel)
        self._init_judge(device)
        self._init_exchange()

    def _adopt(self) -> list[Tensor]:
        """Make the parameters views of the buffers; returns where their gradients go."""
        grads: list[Tensor] = []
        for slot, parameter, half in zip(self.slots, self.parameters, self._is_half, strict=True):
            slot.of(self.master).copy_(parameter.detach())
            own = slot._replace(start=slot.start - self._working.start) if half else slot
            parameter.data = own.of(self._shadow if half else self.master)
            grads.append(own.of(self._half_grad if half else self.grad))
        return grads

    def _init_update(self, multipliers: Mapping[str, float], kernel: bool) -> None:
        """What is updated together, and by what."""
        is_muon, device = self.config.kind == "muon", self.master.device
        hidden = {slot.name for slot in self.slots if is_muon and is_hidden(slot.name)}
        fits = not hidden and len(self.master) <= kernels.MOST_PLACES
        self.kernel = kernel and self.exchange.runtime is None and fits
        if self.kernel:
            self._table = self._by_chunk(multipliers).to(device)
        self._groups, factors = self._by_rate(multipliers, hidden)
        self._factors = torch.tensor(factors, device=device)
        turned = {name for name in hidden if multipliers.get(name, 1.0)}
        parts = self._stretches(lambda name: name in turned).get(True, [])
        self._momenta = [(self.grad[part], self.m[part]) for part in parts]  # of Muon's matrices
        self._gram, self._by_kernel = by_gram(device), kernel
        self._families = self._by_shape(multipliers, turned)
        groups = len(factors) + len(self._families)
        many = device.type == "cuda" and groups > 2
        self._streams = [torch.cuda.Stream(device) for _ in range(groups)] if many else []
        self._at_work: list[torch.cuda.Stream] = []
        self.momentum = self.nesterov  # or the same, compiled

    def _init_judge(self, device: torch.device) -> None:
        self.bad_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.bad_in_a_row = torch.zeros_like(self.bad_steps)
        self.worst_in_a_row = torch.zeros_like(self.bad_steps)  # since it was last looked at
        self.good_norms = torch.zeros(_WINDOW, device=device)  # the last ones, as a ring
        self.good_steps = torch.zeros_like(self.bad_steps)
        self.spikes = torch.zeros_like(self.bad_steps)
        self.judge = self.judge_norm  # or the same, compiled

    def _init_exchange(self) -> None:
        # Which pieces of the gradient a parameter lies in; the last one to arrive completes it.
        size = len(self.master) // self.exchange.pieces
        self._pieces = [
            range(slot.start // size, (slot.start + slot.shape.numel() - 1) // size + 1)
            for slot in self.slots
        ]
        self._awaited: set[int] = set()  # gradients to come, between `expect` and `finish`
        self._missing: Counter[int] = Counter()  # how many of them, by piece
        self._arrived: dict[int, Tensor] = {}  # those that are not yet in the buffer
        self._first = True
        self._earlier: Sequence[Tensor | None] | None = None
        self.hooks = [
            parameter.register_hook(partial(self._arrive, i))
            for i, parameter in enumerate(self.parameters if self.exchange.pieces > 1 else [])
        ]

    def held(self, whole: Tensor) -> Tensor:
        """What the buffers hold of a parameter."""
        return whole

    def _decay(self, name: str) -> float:
        return self.config.weight_decay if is_decayed(name) else 0.0

    def _by_chunk(self, multipliers: Mapping[str, float]) -> Tensor:
        """(chunks, 2): factor of the rate, and weight decay, as `kernels.adam` takes them."""
        assert _ALIGN % kernels.CHUNK == 0, "a chunk would belong to two parameters"
        table = torch.zeros(len(self.master) // kernels.CHUNK, 2)
        for slot in self.slots:
            end = slot.start + slot.shape.numel()
            rows = slice(slot.start // kernels.CHUNK, -(-end // kernels.CHUNK))
            factor = multipliers.get(slot.name, 1.0)
            table[rows] = torch.tensor([factor, self._decay(slot.name)])
        return table

    def _stretches(self, key: Callable[[str], Any]) -> dict[Any, list[slice]]:
        """The buffers by what `key` gives for a parameter's name, in as few slices as possible;
        without those for which it gives None."""
        found: dict[Any, list[slice]] = {}
        ends = [slot.start for slot in self.slots[1:]] + [len(self.master)]
        for slot, end in zip(self.slots, ends, strict=True):
            if (group := key(slot.name)) is not None:
                parts = found.setdefault(group, [])
                joins = parts and parts[-1].stop == slot.start
                parts.append(slice(parts.pop().start if joins else slot.start, end))
        return found

    def _by_rate(
        self, multipliers: Mapping[str, float], hidden: set[str]
    ) -> tuple[list[tuple[float, list[tuple[Tensor, ...]]]], list[float]]:
        """(weight decay, own stretches of all buffers) of each group of equal rate; the rates."""

        def group(name: str) -> tuple[float, float] | None:
            return None if name in hidden else (self._decay(name), multipliers.get(name, 1.0))

        groups, pieces = self._stretches(group), self.exchange.pieces
        own: list[tuple[float, list[tuple[Tensor, ...]]]] = []
        for (decay, _), parts in groups.items():
            own.append((decay, []))
            moments = zip(self.m.chunk(pieces), self.v.chunk(pieces), strict=True)
            for number, (m, v) in enumerate(moments):
                begin = self.exchange.begin(number, len(self.master))
                for part in parts:
                    a, b = max(begin, part.start), min(begin + len(m), part.stop)
                    if a < b:
                        mine = slice(a - begin, b - begin)
                        own[-1][1].append((self.master[a:b], self.grad[a:b], m[mine], v[mine]))
        return own, [rate for _, rate in groups]

    def _by_shape(self, multipliers: Mapping[str, float], turned: set[str]) -> list[list[_Stack]]:
        """Muon's matrices by rate and shape; inside, those that are turned together."""
        stacks: dict[tuple[float, torch.Size], _Stack] = {}
        for slot in self.slots:
            if slot.name not in turned:
                continue
            factor = multipliers.get(slot.name, 1.0)
            for p, u in zip(slot.matrices(self.master), slot.matrices(self.grad), strict=True):
                stack = stacks.setdefault((factor, p.shape), _Stack(factor, [], []))
                stack.ps.append(p)
                stack.us.append(u)
        if not self._gram:
            return [[stack] for stack in stacks.values()]
        families: dict[int, list[_Stack]] = {}
        for (_, shape), stack in stacks.items():
            families.setdefault(min(shape), []).append(stack)
        return list(families.values())

    def accumulate(
        self,
        grads: Mapping[int, Tensor] | Sequence[Tensor],
        *,
        first: bool,
        piece: int | None = None,
    ) -> None:
        """Add the gradients of one micro-batch; the first one overwrites what was there.

        grads: of all parameters, or of some by their number, which complete `piece`.
        """
        by_number = grads if isinstance(grads, Mapping) else dict(enumerate(grads))
        own: list[tuple[list[Tensor], list[Tensor]]] = [([], []), ([], [])]  # by type
        for i, grad in by_number.items():
            own[self._is_half[i]][0].append(self._grads[i])
            own[self._is_half[i]][1].append(grad)
        (wide, wide_grads), (half, half_grads) = own
        if self._narrow and not first:  # a further micro-batch: widen the first one now
            self.grad[self._working].copy_(self._half_grad)
        if wide and first:
            torch._foreach_copy_(wide, wide_grads)  # pyright: ignore[reportPrivateImportUsage]
        elif wide:
            torch._foreach_add_(wide, wide_grads)  # pyright: ignore[reportPrivateImportUsage]
        if half:
            torch._foreach_copy_(half, half_grads)  # pyright: ignore[reportPrivateImportUsage]
        self._narrow = self.kernel and first
        if self._narrow:  # if no other follows, the kernel reads both buffers
            return
        begin, end = self._working.start, self._working.stop
        if piece is not None:
            part = self.exchange.piece(piece, len(self.grad))
            begin, end = max(begin, part.start), min(end, part.stop)
        if begin < end and any(self._is_half):
            offset = self._working.start
            widened = self._half_grad[begin - offset : end - offset]
            if first:
                self.grad[begin:end].copy_(widened)
            else:
                self.grad[begin:end].add_(widened)

    def expect(self, *, first: bool, earlier: Sequence[Tensor | None] | None = None) -> None:
        """Call before the last micro-batch's backward pass: its gradients are sent as they come.

        earlier: gradients of the loss's first term, if it has two; they are added.
        """
        self._first, self._awaited = first, set(range(len(self.slots)))
        self._earlier = earlier
        self._missing = Counter(number for pieces in self._pieces for number in pieces)

    def _arrive(self, i: int, grad: Tensor | None) -> None:
        """One gradient is complete. The order is that of the graph: every process has the same."""
        if i not in self._awaited:
            return
        self._awaited.remove(i)
        (self._arrived[i],) = added(self._earlier and self._earlier[i : i + 1], (grad,))
        for number in self._pieces[i]:
            self._missing[number] -= 1
            if self._missing[number] == 0:
                here = [j for j in self._arrived if number in self._pieces[j]]
                grads = {j: self._arrived.pop(j) for j in here}
                self.accumulate(grads, first=self._first, piece=number)
                self.exchange.send(self.grad, number)

    def forget(self) -> None:
        """Drop what an aborted backward pass has left behind."""
        self._awaited.clear()
        self._arrived.clear()
        self._earlier = None

    def finish(self, grads: Sequence[Tensor | None]) -> None:
        """Call after that pass: send what no hook has seen, then wait for all that was sent."""
        for i in sorted(self._awaited):
            self._arrive(i, grads[i])
        self._earlier = None
        self.exchange.wait()

    def step(self, lr: Tensor, step: Tensor) -> Tensor:
        """Clip by the global norm and update; returns the norm before clipping, on the device."""
        c = self.config
        if self.kernel:  # one pass for the norm, one for all the rest, working copies as well
            narrow = self._half_grad if self._narrow else None
            squares = kernels.sums_of_squares(self.grad, narrow, self._working)
            norm, divisor, skip, t, _ = self.judge(squares, lr, step)
            state = (self.master, self.grad, narrow, self.m, self.v, self._shadow, self._working)
            scalars, betas = (lr, divisor, skip, t), (c.beta1, c.beta2)
            kernels.adam(*state, self._table, scalars, betas, c.epsilon)
        else:
            norm, divisor, skip, t, rates = self.judge(self.exchange.norm(self.grad), lr, step)
            self._update(lr, rates, divisor, skip, t)
        self.exchange.hand_round(self.master)
        if self.mean is not None:
            weight = (9 / (step + 10)).clamp(min=1 - c.average) * (1 - skip)
            self.mean.lerp_(self.master, weight)
        if not self.kernel:
            self._refresh()
        return norm

    def _update(self, lr: Tensor, rates: Tensor, divisor: Tensor, skip: Tensor, t: Tensor) -> None:
        """By the kernel behind torch.optim.AdamW(fused=True), with the clip as its gradient scale
        and the skip as its overflow flag; matrices of Muon by `_muon`. Both overwrite it."""
        c = self.config
        for i, (decay, parts) in enumerate(self._groups):
            if not parts:  # all of them in other processes' shares
                continue
            p, g, m, v = map(list, zip(*parts, strict=True))
            with self._beside(i):
                torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                    p,
                    g,
                    m,
                    v,
                    [],
                    [t] * len(parts),
                    lr=rates[i],
                    beta1=c.beta1,
                    beta2=c.beta2,
                    weight_decay=decay,
                    eps=c.epsilon,
                    amsgrad=False,
                    maximize=False,
                    grad_scale=divisor,
                    found_inf=skip,
                )
        for g, m in self._momenta:
            self.momentum(g, m, divisor, skip)
        for i, family in enumerate(self._families, len(self._groups)):
            with self._beside(i):
                self._muon(family, lr, skip)
        while self._at_work:  # a share of the parameters has no part in some groups
            torch.cuda.current_stream().wait_stream(self._at_work.pop())

    def judge_norm(self, found: Tensor, lr: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        """Whether the step counts and how it is scaled, from its norm; bad steps are counted.

        found: () the norm, or (P,) sums of squares of parts. The norm; what the gradient is divided
        by; 1 if nothing is to change, else 0; steps for the corrections; the rate of each group.
        """
        c = self.config
        norm = found if found.dim() == 0 else found.sum().sqrt()
        good = norm.isfinite()
        if c.skip_spikes:
            good = good & ~self._is_spike(norm)
        skip = (~(good & self.live)).float()
        divisor = norm.clamp(min=c.max_grad_norm) / c.max_grad_norm
        # Far along, both corrections are exactly 1: that is Adam without them.
        t = (step + 1).float() if c.bias_correction else torch.full_like(norm, 1e9)
        self.bad_steps.add_(~good & self.live)
        in_a_row = torch.where(good, 0, self.bad_in_a_row + self.live)
        self.bad_in_a_row.copy_(in_a_row)
        self.worst_in_a_row.copy_(torch.maximum(self.worst_in_a_row, in_a_row))
        return norm, divisor, skip, t, lr * self._factors

    def nesterov(self, g: Tensor, m: Tensor, divisor: Tensor, skip: Tensor) -> None:
        """m ← μ m + (1 − μ) g / divisor, and g becomes (1 − μ) g / divisor + μ m."""
        mu = self.config.muon_momentum
        # In a step that is left out g is m: then m stays, and nothing that is not finite remains.
        torch.where(skip > 0, m, g / divisor, out=g)
        m.lerp_(g, 1 - mu)
        g.lerp_(m, mu)

    def _muon(self, family: list[_Stack], lr: Tensor, skip: Tensor) -> None:
        """Muon (Jordan et al. 2024) on the matrices of one shape, or smaller side, all at once.

        p ← p − lr · (0.2 √max(rows, columns) · O(u) + wd · p), u of `nesterov`, where O(u) has u's
        singular vectors and singular values near 1. The factor gives the update the size of Adam's
        (Liu et al. 2025), so that rates and decay are comparable.
        """
        c = self.config
        us = [torch.stack(stack.us) for stack in family]
        for (factor, ps, _), o in zip(family, self._turn(us), strict=True):
            rate = lr * (factor * c.muon_rate / c.learning_rate) * (1 - skip)
            # Three dimensions: unlike a scalar, it promotes a narrower o to float32.
            o = o * (-0.2 * math.sqrt(max(ps[0].shape)) * rate).view(1, 1, 1)
            if c.weight_decay:
                torch._foreach_mul_(ps, (1 - c.weight_decay * rate).view(()))  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_add_(ps, o.unbind())  # pyright: ignore[reportPrivateImportUsage]

    def _turn(self, us: list[Tensor]) -> list[Tensor]:
        """O(u) of the stacks of a family, in the type it is computed in."""
        if self._gram:
            dtype = torch.float16 if us[0].is_cuda else torch.float32
            if self._by_kernel and all(kernels.turns(u) for u in us):
                return [kernels.orthogonal(u, dtype, QUINTIC) for u in us]
            return orthogonal_by_gram(us, dtype, kernel=self._by_kernel)
        return [orthogonal(u, torch.bfloat16 if u.is_cuda else torch.float32) for u in us]

    def _is_spike(self, norm: Tensor) -> Tensor:
        """Judge `norm` by the good ones before it and remember it if it is one of them."""
        deviation, mean = torch.std_mean(self.good_norms)
        known = self.good_steps >= _WINDOW
        spike = known & norm.isfinite() & (norm > mean + _SIGMAS * deviation)
        keep = norm.isfinite() & ~spike & self.live
        place = (self.good_steps % _WINDOW).view(1)
        old = self.good_norms.index_select(0, place)
        self.good_norms.index_copy_(0, place, torch.where(keep, norm, old))
        self.good_steps += keep
        self.spikes += spike & self.live
        return spike

    def _beside(self, group: int) -> contextlib.AbstractContextManager[Any]:
        """A group of one rate or shape is too small to fill a GPU, so they work side by side."""
        if not self._streams:
            return contextlib.nullcontext()
        self._streams[group].wait_stream(torch.cuda.current_stream())
        self._at_work.append(self._streams[group])
        return torch.cuda.stream(self._streams[group])

    def _refresh(self) -> None:
        if self._shadow.dtype != torch.float32:
            self._shadow.copy_(self.master[self._working])

    def collect(self) -> None:
        """Before `state` on the main process, on all of them: bring the moments together."""
        if self.exchange.shares > 1:
            for key, own in (("m", self.m), ("v", self.v)):
                self.exchange.collect(own, self._whole[key])

    @contextlib.contextmanager
    def averaged(self) -> Generator[None]:
        """The module computes with the average of its weights inside the block, if there is one."""
        if self.mean is None:
            yield
            return
        now = self.master.clone()
        self.master.copy_(self.mean)
        self._refresh()
        try:
            yield
        finally:
            self.master.copy_(now)
            self._refresh()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Parameters (float32), their average if there is one, and both moments by the parameters'
        names, as views."""
        return {
            key: {slot.name: slot.of(flat) for slot in self.slots}
            for key, flat in self._whole.items()
        }

    def counters(self) -> dict[str, Tensor]:
        """What judges the steps, by name; what is not saved begins at zero."""
        names = ["bad_steps", "bad_in_a_row", "worst_in_a_row"]
        if self.config.skip_spikes:
            names += ["good_norms", "good_steps", "spikes"]
        return {name: getattr(self, name) for name in names}

    def load(self, saved: dict[str, dict[str, Tensor]]) -> None:
        """Restore what `state` gave; names and shapes must be the same. An average that is not
        given starts at the parameters."""
        if self.mean is not None and "model" in saved:
            saved = {"average": saved["model"], **saved}
        fix = "use the settings the checkpoint was made with"
        for key, own in {**self._whole, "m": self.m, "v": self.v}.items():
            if key not in saved:
                continue
            given, where = saved[key], f"checkpoint, {key}"
            if odd := sorted(given.keys() ^ {slot.name for slot in self.slots}):
                what = f"Saved tensors do not fit this model: {', '.join(odd[:5])} …"
                raise CorruptError(what, where, fix)
            whole = own if len(own) == len(self.master) else torch.zeros(len(self.master))
            for slot, parameter in zip(self.slots, self.parameters, strict=True):
                tensor, shape = given[slot.name], tuple(parameter.shape)
                if tensor.shape != shape:
                    what = f"{slot.name} has shape {tuple(tensor.shape)}, expected {shape}."
                    raise CorruptError(what, where, fix)
                slot.of(whole).copy_(self.held(tensor))
            if whole is not own:
                own.copy_(self.exchange.mine(whole).flatten())
        self._refresh()


def _laid_out(
    module: nn.Module, held: Callable[[Tensor], Tensor], *, copies: bool
) -> tuple[list[Slot], slice, int]:
    """Where each parameter, or what is held of it, lies, which stretch has working copies, and the
    length of all.

    Order: embeddings | linear weights | linear biases | norms. What decays comes first and what
    has a working copy is contiguous, so both are slices.
    """
    linear = [m for m in module.modules() if copies and isinstance(m, nn.Linear)]
    working = {id(p) for m in linear for p in m.parameters(recurse=False)}
    slots, start, bounds = list[Slot](), 0, [0]
    for decays, works in ((True, False), (True, True), (False, True), (False, False)):
        for name, parameter in module.named_parameters():
            if is_decayed(name) == decays and (id(parameter) in working) == works:
                shape = held(torch.empty(parameter.shape, device="meta")).shape
                slots.append(Slot(name, start, shape))
                start += -(-shape.numel() // _ALIGN) * _ALIGN
        bounds.append(start)
    return slots, slice(bounds[1], bounds[3]), start


def added(earlier: Sequence[Tensor | None] | None, grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients of a sum of two terms, each None where its term does not lead to a parameter."""
    total: list[Tensor] = []
    for a, b in zip(earlier or [None] * len(grads), grads, strict=True):
        one = b if a is None else a
        assert one is not None, "a parameter has no gradient"
        total.append(one if a is None or b is None else a + b)
    return total


def orthogonal(u: Tensor, dtype: torch.dtype) -> Tensor:
    """Matrices (n, rows, columns) with their singular values brought to between about 0.7 and 1.2.

    Five rounds of a quintic Newton-Schulz iteration with the coefficients of the Muon paper, which
    lift small singular values as fast as possible instead of converging to exactly 1.
    """
    a, b, c = QUINTIC
    x = _of_norm_one(u, dtype)
    tall = u.shape[1] > u.shape[2]
    for _ in range(5):
        square = x.mT @ x if tall else x @ x.mT  # of the smaller side
        by = torch.baddbmm(square, square, square, beta=b, alpha=c)
        x = torch.baddbmm(x, *((x, by) if tall else (by, x)), beta=a)
    return x


def by_gram(device: torch.device) -> bool:
    """Whether Muon's matrices of equal smaller side are turned together, by their Gram matrices."""
    return device.type == "cuda"


def orthogonal_by_gram(
    us: Sequence[Tensor], dtype: torch.dtype, *, kernel: bool = False
) -> list[Tensor]:
    """`orthogonal` of several stacks whose smaller side is the same, in products they share.

    A round multiplies x by a polynomial `by` of its Gram matrix A, so that the next Gram matrix is
    by A by: what rounds need of x has the size of its smaller side. What rounding adds to A grows
    twelvefold in a round where singular values are small, so A is computed from x once more after
    three rounds. float16 has three bits more than bfloat16, and x, of norm 1, needs no more range:
    with it the result is closer to the exact one than `orthogonal` is in bfloat16.
    kernel: multiply by an own kernel, which knows that all but the last products are symmetric.
    """
    a, b, c = QUINTIC
    xs = [_of_norm_one(u, dtype) for u in us]
    tall = [u.shape[1] > u.shape[2] for u in us]
    sizes, side = [len(u) for u in us], min(us[0].shape[1:])
    times = kernels.symmetric if kernel else torch.bmm
    unit = None if kernel else a * torch.eye(side, dtype=dtype, device=us[0].device)
    for rounds in (3, 2):
        gram = xs[0].new_empty(sum(sizes), side, side)
        for x, is_tall, own in zip(xs, tall, gram.split(sizes), strict=True):
            times(*((x.mT, x) if is_tall else (x, x.mT)), out=own)
        product = gram
        for i in range(rounds):
            if unit is None:
                by = kernels.symmetric(gram, gram, by=c, plus=(b, gram), unit=a)
            else:  # into a matrix of its own: torch would copy one that has to stay
                by = torch.add(unit, gram, alpha=b).baddbmm_(gram, gram, alpha=c)
            product = times(by, product) if i else by
            if i + 1 < rounds:
                gram = times(by, times(gram, by))
        xs = [
            x @ own.mT if is_tall else own @ x
            for x, is_tall, own in zip(xs, tall, product.split(sizes), strict=True)
        ]
    return xs


def _of_norm_one(u: Tensor, dtype: torch.dtype) -> Tensor:
    norm = u.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    return torch.div(u, norm, out=torch.empty_like(u, dtype=dtype))


def is_hidden(name: str) -> bool:
    """Whether Muon takes it: the matrices inside the blocks of an encoder."""
    return "blocks." in name and is_decayed(name)


def is_decayed(name: str) -> bool:
    """Weight decay applies to matrices and embeddings, not to layer norms and biases."""
    return not (name.endswith("bias") or "norm" in name)


def learning_rate(config: OptimConfig, step: int, progress: float, total_steps: float) -> float:
    """The rate of a step, from how far the run is.

    step: optimizer steps already done. progress: share of the run already done, by steps or by
    the clock, 0 to 1. total_steps: steps of the whole run, estimated when the clock ends it.

    then:   rises over the warm-up share w of the run, then falls in a straight line to 0.
    times:  peak · (1 − t/T) · min(1, t/W); the decay runs from the first step (released code).
    cosine: rises as `then`, then falls as half a cosine to 0.
    wsd:    rises as `then`, stays, and falls in a straight line to 0 over the last decay_percent.
    """
    if config.warmup_percent is not None:
        w = config.warmup_percent / 100
        warm = (progress + 1 / total_steps) / w if w > 0 else 1.0
    else:
        w = config.warmup_steps / total_steps
        warm = (step + 1) / config.warmup_steps if w > 0 else 1.0
    left = max(0.0, 1.0 - progress)
    if config.schedule == "times":
        warm = min(1.0, step / (w * total_steps)) if w > 0 else 1.0
        return config.learning_rate * left * warm
    # `warm` counts the step that is about to be made: a rate of 0 would waste a batch.
    share = config.decay_percent / 100 if config.schedule == "wsd" else 1 - w
    fall = min(1.0, left / share) if share > 0 else 1.0
    if config.schedule == "cosine":
        fall = (1 - math.cos(math.pi * fall)) / 2
    return config.learning_rate * min(warm, fall)
