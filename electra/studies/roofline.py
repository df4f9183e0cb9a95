"""How fast a recipe trains on a device nobody has to own: tokens per second, memory, scaling.

Comes in: a recipe, a device of `DEVICES`. Goes out: predictions, which is all they are.

A training step is a list of kernels (`step`). Each takes the longer of its arithmetic and its
memory traffic, and a floor that every kernel has however small its work:

    seconds = Σ max(FLOPs / (e · peak), bytes / (e · bandwidth)) + floor

The share e of the data sheet's figures that a kernel reaches depends on its kind alone, and there
is one set of them for compiled steps on all GPUs, one for steps with own kernels (`run.kernels`)
where those are used, and one for CPUs (`GPU`, `OWN`, `CPU`):

| kind      | what it is                                                                  |
|-----------|-----------------------------------------------------------------------------|
| product   | matrix products of blocks, heads and the vocabulary, by their shapes        |
| attention | the fused kernel; its backward pass computes the scores again               |
| traffic   | layer norms, GELU, bias gradients, softmax and samples, embeddings, Adam    |

Calibrated once. GPU: the compiled step of `small` on an H200. The floor is how its time grows with
the batch (results/speed: 3 to 4.4 ms do not depend on it, in 734 kernels), the shares are its GPU
time by kind. A padding mask makes attention twice as long (1.93 M tokens/s against 2.13 M). OWN:
the same with own kernels, which are fewer and move fewer bytes: fitted to twelve steps of batches
from 32 to 4,096, 3 to 24 layers and widths from 128 to 1,024 (results/speed/growth_h200.json). That
a mask costs own kernels nothing is a guess. CPU: the CPU time of `small` and
`tiny` in one thread of a Xeon (results/speed). docs/cost.md has measured and predicted values side
by side; a test holds them to 25 %, those with own kernels to 10 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..config import EncoderConfig, PretrainConfig
from ..errors import ElectraError
from ..exchange import PIECES
from ..flops import KINDS, _runs
from ..gpu import fused
from .plan import Plan

Kind = Literal["product", "attention", "traffic"]


class Shares(NamedTuple):
    """Of peak and bandwidth by kind of kernel, and the seconds every kernel takes at least."""

    product: float
    attention: float
    traffic: float
    floor: float


GPU = Shares(product=0.66, attention=0.40, traffic=0.62, floor=5e-6)
OWN = Shares(product=0.68, attention=0.50, traffic=0.82, floor=2.6e-6)
CPU = Shares(product=0.88, attention=0.36, traffic=0.32, floor=130e-6)


class Device(NamedTuple):
    """Data sheet: dense FLOP/s in the type we train in, bytes/s, bytes; dollars an hour."""

    peak: float
    bandwidth: float
    memory: float
    price: float
    itemsize: int = 2  # bf16; 4 where only fp32 is fast
    shares: Shares = GPU
    seen: bool = False  # whether the model has been compared with it
    kernels: bool = False  # whether own kernels run on it: `trainer.use_kernels`


PRICES_OF = "May 2026"  # rough medians of public offers, on demand
USABLE = 0.92  # of the memory: the rest is the driver's, or in pieces too small
DEVICES = {
    "V100": Device(15.7e12, 0.90e12, 16e9, 1.00, itemsize=4),
    "T4": Device(8.1e12, 0.32e12, 16e9, 0.50, itemsize=4),
    "L4": Device(121e12, 0.30e12, 24e9, 0.80),
    "A10G": Device(70e12, 0.60e12, 24e9, 1.00),
    "RTX 3090": Device(71e12, 0.94e12, 24e9, 0.25),
    "RTX 4090": Device(165e12, 1.01e12, 24e9, 0.40),
    "A100-40": Device(312e12, 1.56e12, 40e9, 1.20),
    "A100-80": Device(312e12, 2.04e12, 80e9, 1.50),
    "H100": Device(989e12, 3.35e12, 80e9, 3.00, kernels=True),
    "H200": Device(989e12, 4.80e12, 141e9, 4.00, seen=True, kernels=True),
    "B200": Device(2250e12, 8.00e12, 180e9, 6.00, kernels=True),
    "Xeon, 2 cores": Device(320e9, 50e9, 16e9, 0.10, itemsize=4, shares=CPU, seen=True),
    "EPYC, 2 cores": Device(525e9, 50e9, 16e9, 0.10, itemsize=4, shares=CPU, seen=True),
}


class Link(NamedTuple):
    """What connects the GPUs of a node, or one GPU to its like on the other nodes."""

    bandwidth: float  # bytes/s of each process in each direction
    latency: float  # seconds of one hop


LINKS = {
    "NVLink": Link(450e9, 3e-6),
    "InfiniBand 400 Gb/s": Link(50e9, 5e-6),
    "Ethernet 25 Gb/s": Link(3.125e9, 30e-6),
}
NVLINKED = 8  # GPUs of one node


@dataclass(frozen=True, kw_only=True)
class Model:
    """The predictions for a recipe."""

    config: PretrainConfig
    plan: Plan
    vocab_size: int = 30_522
    padded: bool = False  # whether the corpus has short sequences: attention needs a mask

    def has_kernels(self, device: Device) -> bool:
        """Whether a run would use own kernels there, and the model takes them into account."""
        config = self.config
        wanted = config.run.kernels != "no" and config.run.precision != "fp32"
        is_electric = config.objective.kind == "electric"  # its towers do without
        fits = fused.unfit(config, torch.bfloat16, padded=self.padded) is None
        fits &= config.data.sequence_length <= fused.LONGEST  # beyond, OWN is not fitted
        return device.kernels and wanted and fits and not is_electric

    def sequence_bytes(self, device: Device) -> float:
        """What one sequence keeps for the backward pass, with as many beside it as go at once."""
        if self.has_kernels(device):
            d, c = self.config.data, self.config.encoder
            kept = fused.kept_layers(c, d.at_once(d.batch_size) * d.sequence_length)
            each = 2 * d.sequence_length * (c.hidden_size + c.ffn_size)
            return self.plan.kernel_bytes_per_sequence + kept * each
        return self.plan.activation_bytes_per_sequence * device.itemsize / 2

    def micro_batch(self, device: Device) -> int:
        """The most sequences whose activations fit beside weights, gradients and moments."""
        room, each = USABLE * device.memory - self.plan.state_bytes, self.sequence_bytes(device)
        if self.has_kernels(device):  # however many there are
            room, each = room - fused.KEPT, self.plan.kernel_bytes_per_sequence
        return max(0, int(room / each))

    def rate(self, device: Device, rows: int | None = None) -> float:
        """Tokens per second of one device that has `rows` of the batch (default: all)."""
        d = self.config.data
        rows = rows or d.batch_size
        micro = min(d.at_once(rows), max(1, self.micro_batch(device)))
        whole, rest = divmod(rows, micro)
        if own := self.has_kernels(device):
            device = device._replace(shares=OWN)
        # Gradients gathered and widened, norm, weights and moments read and written: 44 bytes each.
        seconds = _seconds([Kernels("traffic", 10, 0, 1.1 * self.plan.gradient_bytes)], device)
        for count, size in ((whole, micro), (1, rest)):
            if size:
                seconds += count * _seconds(self._step(size, device.itemsize, own), device)
        return rows * d.sequence_length / seconds

    def exchange(self, gpus: int, link: Link, *, node: int = 1, pieces: int = 1) -> float:
        """Seconds in which the gradients are summed, over NVLink in nodes of `node` GPUs first.

        Of n members each sends (n - 1) / n of its bytes twice; the first byte of a piece passes a
        tree up and down. Between the nodes every GPU moves its part alone, over a link of its own.
        """
        seconds, size = 0.0, self.plan.gradient_bytes
        hops = (node, size, LINKS["NVLink"]), (-(-gpus // node), size / node, link)
        for members, each, wire in hops:
            seconds += 2 * (members - 1) / members * each / wire.bandwidth
            seconds += 2 * math.ceil(math.log2(members)) * pieces * wire.latency
        return seconds

    @property
    def late(self) -> float:
        """Share of the gradient that is whole only at the end of the backward pass.

        Those are the pieces (`exchange.py`) with embeddings, and the last with biases and norms.
        """
        c = self.config.encoder
        embeddings = 4 * c.embedding_size * (self.vocab_size + c.max_positions + 2)
        return min(1.0, (1 + math.ceil(PIECES * embeddings / self.plan.gradient_bytes)) / PIECES)

    def scaling(self, rate: float, gpus: int, link: Link, *, node: int = 1) -> tuple[float, float]:
        """Share of `gpus` times the speed of one: all gradients sent after the pass, and in pieces.

        rate: of one device with its part of the batch. Pieces travel during the backward pass, two
        thirds of the step, but for the late ones.
        """
        compute = self.config.tokens_per_step / gpus / rate
        after = self.exchange(gpus, link, node=node)
        pieces = self.exchange(gpus, link, node=node, pieces=PIECES)
        early = max(0.0, (1 - self.late) * pieces - compute * 2 / 3)
        return compute / (compute + after), compute / (compute + early + self.late * pieces)

    def _step(self, rows: int, size: int, own: bool) -> Iterator[Kernels]:
        """All kernels on `rows` sequences but the optimizer's; `size` bytes per number."""
        config, V = self.config, self.vocab_size
        R = rows * config.data.sequence_length
        for network, heads in KINDS[config.objective.kind]:
            c = config.encoder if network == "encoder" else config.generator_encoder
            forward, backward = _runs(config, network)
            if not forward:
                continue
            D, E = c.hidden_size, c.embedding_size
            yield from self._encoder(c, rows, size, own, forward, backward)
            for head, positions in heads.items():
                P = R if positions == "all" else rows * config.masked_slots
                shapes = [(D, D)] if config.objective.disc_head == "dense" else []
                if head != "replaced":
                    shapes = [(2 * D if head == "both_towers" else D, E), (E, V)]
                    # Loss, samples, best guess; then the gradient of the logits.
                    first, then = (1, 2) if own and config.objective.kind == "rtd" else (4, 3)
                    yield Kernels("traffic", first * forward, 0, size * P * V)
                    yield Kernels("traffic", backward, 0, then * size * P * V)
                for K, N in shapes:
                    yield _product(forward + 2 * backward, P, K, N, size)
        yield Kernels("traffic", 40, 0, 8 * R)  # choosing, masking, replacing token ids

    def _encoder(
        self, c: EncoderConfig, rows: int, size: int, own: bool, forward: float, backward: float
    ) -> Iterator[Kernels]:
        """The kernels of one encoder; forward, backward: how often each pass is made."""
        D, E, F, L, H = c.hidden_size, c.embedding_size, c.ffn_size, c.layers, c.attention_heads
        T = self.config.data.sequence_length
        R = rows * T
        for K, N in ((D, 3 * D), (D, D), (D, F), (F, D)):  # once forward, twice backward
            yield _product(L * (forward + 2 * backward), R, K, N, size)
        yield Kernels("traffic", L * forward, 0, 2 * size * R * F)  # GELU
        if own:  # those of `fused`: every one reads what it needs once and writes what is kept
            yield Kernels("attention", L * forward, 4 * R * T * D, 4 * size * R * D)
            yield Kernels("attention", L * backward, 10 * R * T * D, 7 * size * R * D)
            yield Kernels("traffic", 2 * L * forward, 0, 4 * size * R * D)  # residual and norm
            yield Kernels("traffic", 2 * L * backward, 0, 3.5 * size * R * D)
            yield Kernels("traffic", L * backward, 0, 4 * size * R * F)
            yield Kernels("traffic", 4 * L * backward, 0, 0)  # the last of their bias gradients
        else:
            slower = 2 if self.padded else 1
            traffic = slower * 4 * size * R * D
            yield Kernels("attention", L * forward, slower * 4 * R * T * D, traffic)
            yield Kernels("attention", 2 * L * backward, slower * 5 * R * T * D, traffic)
            if c.attention_dropout > 0:  # written out: the probabilities go through memory
                yield Kernels("traffic", L * (3 * forward + 4 * backward), 0, 2 * size * R * T * H)
            yield Kernels("traffic", 2 * L * forward, 0, 3 * size * R * D)
            yield Kernels("traffic", 4 * L * backward, 0, 3 * size * R * D)
            yield Kernels("traffic", L * backward, 0, 3 * size * R * F)
            yield Kernels("traffic", 4 * L * backward, 0, size * R * (5 * D + F) / 4)
        yield Kernels("traffic", 3 * forward + 5 * backward, 0, 3 * size * R * E)  # embeddings
        if E != D:
            yield _product(forward + 2 * backward, R, E, D, size)


class Kernels(NamedTuple):
    """So many kernels of a kind, with the work of one of them."""

    kind: Kind
    number: float
    flops: float
    bytes: float


def _product(number: float, R: int, K: int, N: int, size: int) -> Kernels:
    """(R, K) times (K, N); the two products of its backward pass have the same work."""
    return Kernels("product", number, 2 * R * K * N, size * (R * K + K * N + R * N))


def _seconds(kernels: Iterable[Kernels], device: Device) -> float:
    total = 0.0
    for kind, number, flops, traffic in kernels:
        share: float = getattr(device.shares, kind)
        work = max(flops / device.peak, traffic / device.bandwidth) / share
        total += number * (work + device.shares.floor)
    return total


# ------------------------------------------------------------------ as tables


def device_named(name: str) -> Device:
    """One of `DEVICES`, or an error that names them."""
    if name not in DEVICES:
        what, known = f"There are no figures for a device {name!r}.", ", ".join(DEVICES)
        raise ElectraError(what, where="gpu", fix=f"known: {known}")
    return DEVICES[name]


def cost_table(model: Model, prices: Mapping[str, float]) -> Iterator[str]:
    """Speed, hours and money on every device; `prices` an hour replace the listed ones."""
    for name in prices:
        device_named(name)
    batch = model.config.data.batch_size
    head = ("tokens/s", 12), ("hours", 12), ("$/h", 7), ("$", 10)
    yield f"{'predicted for':17}{''.join(f'{t:>{w}}' for t, w in head)}  sequences at once"
    for name, device in DEVICES.items():
        fit = model.micro_batch(device)
        if not fit:
            yield f"{name:17} does not fit into {device.memory / 1e9:.0f} GB"
            continue
        rate, price = model.rate(device), prices.get(name, device.price)
        hours = hours_at(model, rate)
        note = "" if device.seen else ", not measured on this GPU"
        if device.itemsize == 4 and device.shares is GPU:
            note += ", needs --run.precision fp32"
        yield (
            f"{name:17}{rate:12,.0f}{hours:12,.1f}{price:7.2f}{hours * price:10,.0f}"
            f"  {min(fit, batch):,} of {batch:,}{note}"
        )
    yield f"prices: rough, on demand, {PRICES_OF}; check your provider and give --prices NAME VALUE"


def scaling_table(
    model: Model, name: str, gpus: Sequence[int], measured: float | None
) -> Iterator[str]:
    """Speed on several devices with the batch of the recipe split between them."""
    origin, size = "measured" if measured else "predicted too", model.plan.gradient_bytes
    yield f"predicted: speed of one ({origin}), {size / 1e6:,.0f} MB of gradients summed"
    yield f"{name} x  between nodes        exchange  after the pass      in pieces during it"
    batch = model.config.data.batch_size
    for n in gpus:
        if n < 1 or batch % n:
            what = f"A batch of {batch} cannot be split over {n} GPUs."
            raise ElectraError(what, where="gpus", fix="give a --data.batch-size it divides")
        rows = batch // n
        rate = measured or model.rate(device_named(name), rows)
        for label, link in LINKS.items():
            is_one = label == "NVLink"
            if is_one and n > NVLINKED:
                continue
            node = n if is_one else NVLINKED if n > NVLINKED else 1
            plain, best = model.scaling(rate, n, link, node=node)
            yield (
                f"{n:{len(name) + 2}}  {'one node' if is_one else label:20}"
                f"{1e3 * model.exchange(n, link, node=node):7,.1f} ms"
                f"{n * rate * plain:12,.0f}{plain:6.0%}{n * rate * best:14,.0f}{best:6.0%}"
            )


def hours_at(model: Model, rate: float) -> float:
    """Of the whole run, which its minutes may end first."""
    hours, minutes = model.plan.total_tokens / rate / 3600, model.config.run.minutes
    return min(hours, minutes / 60) if minutes else hours
