"""Tokens per second of the whole pre-training step: ours against other ways to make it.

    python benchmarks/pretrain_speed.py --corpus CORPUS --out results/speed
    python benchmarks/pretrain_speed.py --corpus CORPUS --out results/speed \
        --batches 16 --peer-batches 16 --rounds 5 --seconds 10      # on a CPU

First the mathematics is shown to be the same: with shared weights, masks and samples the loss and
every gradient of both networks agree, in float64, in float32 and, on a GPU, in bf16. Then all
variants are timed in one process, interleaved, in several rounds; a step is data, masking,
generator, sampling, discriminator, backward, clipping and optimizer. Dropout is 0 on both sides.
The peers are a transformers Electra pair in several forms, one of them with our fix of the
generator's head, and the steps of two well-known ports, driven here by our own code (`PEERS`). The
table comes last; a JSON record holds it with versions, hardware and settings, and a page of the day
(kept under benchmarks/results) as it was printed.

On a CPU both sides compute with the same number of threads, in float32, or with --precision bf16 in
that (ours) and under autocast (theirs). There the CPU time is shown beside the wall time, and the
load of the machine when the measurement begins and ends: other work lowers what the clock says of
both sides, and less what their CPU time says. "whole vectors" is the setting that ours computes
with on AMD's processors (`electra.runtime.whole_vectors`), given to the peer as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
import transformers
import tyro
from torch import Tensor, nn
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from electra import runtime as runtimes
from electra.batches import Batches
from electra.config import PretrainConfig, to_dict
from electra.corruption import Positions, choose_positions, mask_tokens, replace
from electra.data.corpus import Corpus
from electra.flops import matmul_flops_per_token
from electra.formats.layout import networks_of, to_transformers
from electra.objectives import (
    Batch,
    Corruption,
    ReplacedTokenDetection,
    SpecialIds,
    build_objective,
)
from electra.randomness import StepRng
from electra.recipes import recipe
from electra.trainer import Trainer


def electra_config(
    c: PretrainConfig, vocab: int, attention: str, *, generator: bool
) -> ElectraConfig:
    e = c.generator_encoder if generator else c.encoder
    return ElectraConfig(
        vocab_size=vocab,
        embedding_size=e.embedding_size,
        hidden_size=e.hidden_size,
        num_hidden_layers=e.layers,
        num_attention_heads=e.attention_heads,
        intermediate_size=e.ffn_size,
        max_position_embeddings=e.max_positions,
        hidden_dropout_prob=e.dropout,
        attention_probs_dropout_prob=e.attention_dropout,
        attn_implementation=attention,
    )


class Peer(NamedTuple):
    """How others make a training step; all of it is the same mathematics (`prove_equal`)."""

    group: str
    head: Literal["all", "gathered", "picked samples", "picked"] = "all"
    masks: bool = False
    """Whether both networks are given an attention mask, although nothing is padded."""
    autocast: bool = False
    compiled: bool | str = False
    """A string is the compiler's mode."""
    whole_vectors: bool = False
    attention: Literal["sdpa", "eager"] = "sdpa"

    def on(self, runtime: runtimes.Runtime) -> Peer:
        """A CPU gets no compiler, which costs minutes there, and autocast where ours has bf16."""
        if runtime.device.type == "cuda":
            return self
        return self._replace(autocast=runtime.dtype == torch.bfloat16, compiled=False)

    def label(self, device: torch.device) -> str:
        precision = "TF32" if device.type == "cuda" else "fp32"
        words = [self.group, "bf16 autocast" if self.autocast else precision]
        return ", ".join([*words, *(["compiled"] if self.compiled else [])]) + (
            f" ({self.compiled})" if isinstance(self.compiled, str) else ""
        )


# What is done with the generator's head is what sets them apart:
#   all             logits at all positions, loss with ignored labels, a sample at every position
#   gathered        our fix: the head sees the states of the masked positions only
#   picked samples  lucidrains/electra-pytorch: all logits, loss as above, masked rows are sampled
#   picked          richarddwang/electra_pytorch: all logits, then masked rows for loss and samples
# The second port trains in fp16 mixed precision; bf16 here needs no loss scaling and is as fast.
PEERS: dict[str, Peer] = {
    "eager": Peer("transformers"),
    "eager-attention": Peer("transformers, eager attention", attention="eager"),
    "whole-vectors": Peer("transformers + whole vectors", whole_vectors=True),
    "whole-vectors-eager": Peer(
        "transformers + whole vectors, eager attention", whole_vectors=True, attention="eager"
    ),
    "autocast": Peer("transformers", autocast=True),
    "compiled": Peer("transformers", autocast=True, compiled=True),
    "gather": Peer("transformers + gather fix", "gathered", autocast=True, compiled=True),
    "gather-graphs": Peer(
        "transformers + gather fix", "gathered", autocast=True, compiled="reduce-overhead"
    ),
    "lucidrains": Peer("lucidrains' method", "picked samples", masks=True),
    "richarddwang": Peer("richarddwang's method", "picked", masks=True, autocast=True),
}


# What is within rounding; of bf16 the loss, and all gradients as one vector.
LIMITS = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 1e-2}
Name = Literal[
    "eager",
    "eager-attention",
    "whole-vectors",
    "whole-vectors-eager",
    "autocast",
    "compiled",
    "gather",
    "gather-graphs",
    "lucidrains",
    "richarddwang",
]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    corpus: Path
    """A prepared corpus."""
    out: Path
    """Where the JSON record and the page of the day go."""
    recipe: str = "small"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of the recipe; auto: bf16 on a GPU, fp32 on a CPU."""
    batches: tuple[int, ...] = (128, 512, 1024)
    """Batch sizes of ours."""
    peer_batches: tuple[int, ...] = (128, 512)
    """Batch sizes of the peers."""
    peers: tuple[Name, ...] = (
        "eager",
        "autocast",
        "compiled",
        "gather",
        "lucidrains",
        "richarddwang",
    )
    more_peers: tuple[Name, ...] | None = None
    """Peers at all but the first of these batch sizes; default: the same."""
    rounds: int = 3
    seconds: float = 3.0
    """Length of one round of one variant."""
    side_by_side: bool = False
    """Let a process for each variant that is compiled fill the compiler's cache first, all at once
    and while equality is shown; the measurement is as without, setup_seconds are not."""
    child: int | None = None
    """Used by the program itself."""


class TransformersPair(nn.Module):
    """What one writes with transformers: two models, tied embeddings, and a head by `peer`."""

    def __init__(self, c: PretrainConfig, vocab: int, peer: Peer) -> None:
        super().__init__()
        self.c, self.vocab, self.peer = c, vocab, peer
        first, second = (
            electra_config(c, vocab, peer.attention, generator=generator)
            for generator in (True, False)
        )
        self.generator = ElectraForMaskedLM(first)
        self.discriminator = ElectraForPreTraining(second)
        self.generator.electra.embeddings = self.discriminator.electra.embeddings
        self.generator.generator_lm_head.weight = (
            self.discriminator.electra.embeddings.word_embeddings.weight
        )

    def forward(
        self,
        x: Tensor,
        x_masked: Tensor,
        segment: Tensor,
        m: Positions,
        x_corrupt: Tensor | None = None,
    ) -> Tensor:
        """The loss; x_corrupt: samples of somebody else, in place of own ones."""
        head, original = self.peer.head, x.gather(1, m.at)
        given: dict[str, Tensor] = {"token_type_ids": segment}
        if self.peer.masks:
            given["attention_mask"] = torch.ones_like(x)
        if head == "gathered":
            h = self.generator.electra(x_masked, **given)[0]  # (B, T, D)
            h = h.gather(1, m.at[:, :, None].expand(-1, -1, h.shape[2]))
            logits = self.generator.generator_lm_head(self.generator.generator_predictions(h))
            labels = torch.where(m.valid, original, -100)
            mlm = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
            sampled = replace(x, m, gumbel(logits))
        else:
            chosen = replace(torch.zeros_like(x), m, torch.ones_like(m.at)).bool()
            logits = self.generator(x_masked, **given)[0]  # (B, T, V)
            if head == "picked":
                logits = logits[chosen]
                mlm = F.cross_entropy(logits, x[chosen])
            else:
                labels = torch.where(chosen, x, -100)
                mlm = F.cross_entropy(logits.view(-1, self.vocab), labels.view(-1))
            if head == "all":
                sampled = torch.where(chosen, gumbel(logits), x)
            else:
                sampled = x.clone()
                sampled[chosen] = gumbel(logits if head == "picked" else logits[chosen])
        x_corrupt = sampled if x_corrupt is None else x_corrupt
        labels = (x_corrupt != x).long()
        d = self.discriminator(input_ids=x_corrupt, labels=labels, **given)
        return mlm + self.c.objective.disc_weight * d.loss


@torch.no_grad()
def gumbel(logits: Tensor) -> Tensor:
    """One sample for each row of logits, by the Gumbel trick."""
    noise = -torch.log(-torch.log(torch.rand_like(logits, dtype=torch.float32)))
    return (logits.float() + noise).argmax(-1)


def peer_step(
    peer: Peer, c: PretrainConfig, corpus: Corpus, batches: Batches
) -> Callable[[], None]:
    """One training step of a peer as a function."""
    device = batches.runtime.device
    special = SpecialIds(**corpus.special_ids)
    pair = TransformersPair(c, corpus.vocab_size, peer).to(device).train()
    model: Any = pair
    if peer.compiled:
        mode = peer.compiled if isinstance(peer.compiled, str) else None
        model = torch.compile(pair, dynamic=False, mode=mode)
    optimizer = torch.optim.AdamW(pair.parameters(), lr=1e-4, eps=1e-6, fused=True)
    rows = torch.arange(c.data.batch_size, device=device)
    step = 0
    block = batches.block(0, 32)

    def one() -> None:
        nonlocal step, block
        if step % 32 == 0:
            block = batches.block(step, 32)
        slot = torch.tensor(step % 32, device=device)
        batch = block.batch(slot, slice(None), c)
        rng = StepRng(0, torch.tensor(step, device=device), rows)
        m = choose_positions(
            candidates(batch.x, special), batch.length, c.masked_slots, c.objective, rng
        )
        x_masked = mask_tokens(batch.x, m, special.mask, corpus.vocab_size, c.objective, rng)
        with torch.autocast(device.type, torch.bfloat16, enabled=peer.autocast):
            loss = model(batch.x, x_masked, batch.segment, m)
        loss.backward()
        nn.utils.clip_grad_norm_(pair.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1

    return runtimes.whole_vectors(one) if peer.whole_vectors else one


def candidates(x: Tensor, s: SpecialIds) -> Tensor:
    return (x != s.pad) & (x != s.cls) & (x != s.sep) & (x != s.mask)


def ours(c: PretrainConfig, corpus: Corpus, runtime: runtimes.Runtime) -> Callable[[], None]:
    objective = build_objective(
        c, corpus.vocab_size, SpecialIds(**corpus.special_ids), padded=False
    ).to(runtime.device)
    trainer = Trainer(objective, Batches(corpus.train, c, runtime), c, runtime)
    trainer.record()
    step = 0

    def one() -> None:
        nonlocal step
        if trainer.needs_block:
            trainer.load_block(step, [1e-4] * trainer.block_steps)
        trainer.step()
        step += 1

    # As in a run; `main` has ended that of the process.
    return one if runtime.device.type == "cuda" else runtimes.whole_vectors(one)


class Side(NamedTuple):
    """What one side says of a batch: loss, and every gradient under transformers' names."""

    loss: float
    gradients: dict[str, Tensor]  # float32 on the CPU

    def differences(self, other: Side) -> dict[str, float]:
        """Of the loss and of each gradient: norm of the difference over the other's norm.

        The gradient of a key's bias is zero in exact arithmetic (softmax does not see it), and
        what rounding leaves there is measured by the norm of the whole gradient instead.
        """
        assert self.gradients.keys() == other.gradients.keys()
        whole = norm(other.gradients.values())
        result = {"loss": abs(self.loss - other.loss) / abs(other.loss)}
        for name, theirs in other.gradients.items():
            size = whole if name.endswith("key.bias") else norm([theirs])
            result[name] = norm([self.gradients[name] - theirs]) / size
        return result

    def as_one(self, other: Side) -> float:
        """The same for all gradients as one vector."""
        pairs = [(self.gradients[name], t) for name, t in other.gradients.items()]
        return norm([a - b for a, b in pairs]) / norm([b for _, b in pairs])


def norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def prove_equal(c: PretrainConfig, corpus: Corpus, runtime: runtimes.Runtime) -> dict[str, Any]:
    """Differences of losses and of all gradients on one real batch, and which are too large.

    Weights, masks and samples are shared. In float32 (TF32 off) ours is compared with every way to
    compute the head in `PEERS`, in float64, where nothing hides in rounding, with the first. In
    bf16, where there is a GPU, our training path (own kernels, working weights in bf16) is compared
    with transformers in float32, beside what autocast makes of the same pair.
    """
    on_gpu = runtime.device.type == "cuda"
    if on_gpu:
        torch.set_float32_matmul_precision("highest")
    c = dataclasses.replace(c, data=dataclasses.replace(c.data, batch_size=16))
    special = SpecialIds(**corpus.special_ids)
    device = runtime.device
    batches = Batches(corpus.train, c, runtime)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    batch: Batch = batches.block(0, 1).batch(zero, slice(None), c)
    rng = StepRng(0, zero, torch.arange(16, device=device))

    def fresh() -> ReplacedTokenDetection:  # the same weights every time: they follow from the seed
        objective = build_objective(c, corpus.vocab_size, special, padded=False)
        assert isinstance(objective, ReplacedTokenDetection)
        return objective.to(device)

    weights = {n.kind: to_transformers(n) for n in networks_of(fresh())}

    def ours(dtype: torch.dtype) -> tuple[Side, Corruption]:
        objective = fresh()
        if dtype == torch.bfloat16:  # this casts the working weights and switches the kernels on
            result["own kernels"] = Trainer(objective, batches, c, runtime).has_kernels
        else:
            objective.to(dtype)
        corrupt, kept = objective.corrupt, list[Corruption]()

        def keep(*args: Any, **options: Any) -> Corruption:
            kept.append(corrupt(*args, **options))
            return kept[-1]

        # Of this very pass: in another one, rounding alone can make a sample another token.
        objective.corrupt = keep
        losses = objective(batch, rng)
        parameters = list(objective.parameters())
        grads = torch.autograd.grad(losses.total, parameters)
        with torch.no_grad():  # gradients take the names of the weights, whose place they take
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.copy_(grad)
        named = {n.kind: to_transformers(n) for n in networks_of(objective)}
        return Side(
            float(losses.total.detach()),
            {f"{k}.{name}": t for k in named for name, t in named[k].items()},
        ), kept[0]

    def theirs(peer: Peer, k: Corruption, dtype: torch.dtype) -> Side:
        pair = TransformersPair(c, corpus.vocab_size, peer)
        for kind, tensors in weights.items():
            missing = pair.get_submodule(kind).load_state_dict(tensors, strict=False)
            assert not missing.unexpected_keys, missing
        pair.to(device, dtype)
        with torch.autocast(device.type, torch.bfloat16, enabled=peer.autocast):
            loss = pair(batch.x, k.x_masked, batch.segment, k.m, k.x_corrupt)
        loss.backward()
        places = [f"{kind}.{name}" for kind, tensors in weights.items() for name in tensors]
        gradients = {}
        for place in places:
            grad = pair.get_parameter(place).grad
            assert grad is not None, place
            gradients[place] = grad.float().cpu()
        seen = {id(pair.get_parameter(place)) for place in places}
        assert seen == {id(p) for p in pair.parameters()}, "a parameter was not compared"
        return Side(float(loss.detach()), gradients)

    result: dict[str, Any] = {"too large": []}

    def claim(what: str, value: float, limit: float) -> None:
        if not value < limit:
            result["too large"].append(f"{what}: {value:.1e}, not below {limit:.1e}")

    plain = [p for p in PEERS.values() if not p.whole_vectors]
    every = {p.head: p._replace(autocast=False, compiled=False) for p in plain}
    for dtype, heads in ((torch.float64, {"all": every["all"]}), (torch.float32, every)):
        with contextlib.nullcontext() if on_gpu else runtimes.whole_vectors:
            mine, k = ours(dtype)
        for head, peer in heads.items():
            found = mine.differences(theirs(peer, k, dtype))
            worst = max(found, key=lambda name: found[name])
            name = str(dtype).removeprefix("torch.")
            print(
                f"equality, {name}, head {head!r}: loss {found['loss']:.1e}, the worst of"
                f" {len(found) - 1} gradients {found[worst]:.1e} ({worst})",
                flush=True,
            )
            claim(f"{name}, head {head!r}, {worst}", found[worst], LIMITS[dtype])
            result[f"{name}, {head}"] = found
    if runtime.dtype == torch.bfloat16:
        mine, k = ours(torch.bfloat16)
        exact = theirs(PEERS["eager"], k, torch.float32)
        auto = theirs(PEERS["autocast"], k, torch.float32)
        found = {
            "loss": mine.differences(exact)["loss"],
            "all gradients": mine.as_one(exact),
            "transformers' autocast: loss": auto.differences(exact)["loss"],
            "transformers' autocast: all gradients": auto.as_one(exact),
            "each gradient": mine.differences(exact),
            "transformers' autocast: each gradient": auto.differences(exact),
        }
        shown = {k: f"{v:.1e}" for k, v in found.items() if isinstance(v, float)}
        print("equality, bfloat16 against float32:", shown, flush=True)
        result["bfloat16"] = found
        claim("bfloat16, loss", found["loss"], LIMITS[torch.bfloat16])
        # Where bf16 itself is coarser than the limit, ours may not be coarser than autocast.
        limit = max(LIMITS[torch.bfloat16], auto.as_one(exact))
        claim("bfloat16, all gradients as one", found["all gradients"], limit)
    if on_gpu:
        torch.set_float32_matmul_precision("high")
    return result


class Rate(NamedTuple):
    """Tokens per second of one round, by the clock and by the CPU time of all threads."""

    wall: float
    cpu: float


def rate(step: Callable[[], None], tokens: int, seconds: float, device: torch.device) -> Rate:
    """Rates over about `seconds`."""
    at_once = 10 if device.type == "cuda" else 1  # steps between two looks at the clock
    for _ in range(3 if device.type == "cuda" else 1):
        step()
    wait(device)
    steps, begin, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - begin < seconds:
        for _ in range(at_once):
            step()
        wait(device)
        steps += at_once
    done = steps * tokens
    return Rate(done / (time.perf_counter() - begin), done / (time.process_time() - cpu))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    a = tyro.cli(Arguments)
    corpus = Corpus.open(a.corpus)
    base = recipe(a.recipe)
    base = dataclasses.replace(
        base,
        encoder=dataclasses.replace(base.encoder, dropout=0.0, attention_dropout=0.0),
        run=dataclasses.replace(base.run, precision=a.precision),
    )
    runtime = runtimes.start(base.run)
    environment = runtime.describe()
    runtime.leave()  # the peers compute as torch does by itself
    if Batches(corpus.train, base, runtime).padded:
        raise SystemExit("both sides are timed without padding: prepare with --short-percent 0")
    if runtime.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True

    def at(batch: int) -> PretrainConfig:
        return dataclasses.replace(base, data=dataclasses.replace(base.data, batch_size=batch))

    variants: dict[tuple[str, int], Callable[[], Callable[[], None]]] = {}
    groups: dict[str, str] = {}  # of peers, by label
    for batch in a.batches:  # first: a new trainer drops what was compiled in its process
        mine = at(batch)
        variants["electra", batch] = lambda c=mine: ours(c, corpus, runtime)
    for batch in a.peer_batches:
        is_first = batch == a.peer_batches[0] or a.more_peers is None
        for name in a.peers if is_first else a.more_peers or ():
            c, peer = at(batch), PEERS[name].on(runtime)
            label = peer.label(runtime.device)
            groups[label] = peer.group
            variants[label, batch] = lambda c=c, peer=peer: peer_step(
                peer, c, corpus, Batches(corpus.train, c, runtime)
            )

    if a.child is not None:
        list(variants.values())[a.child]()()
        wait(runtime.device)
        return
    compiled = [i for i, key in enumerate(variants) if "compiled" in key[0] or key[0] == "electra"]
    a.out.mkdir(parents=True, exist_ok=True)
    children: list[subprocess.Popen[bytes]] = []
    for i in compiled if a.side_by_side else []:
        with open(a.out / f"compile-{i}.log", "w") as log:
            command = [sys.executable, __file__, *sys.argv[1:], "--child", str(i)]
            children.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    equality = prove_equal(base, corpus, runtime)
    for text in equality["too large"]:
        print("NOT EQUAL:", text, flush=True)
    for child in children:  # one that fails will fail here again, and be reported
        print("compiled in advance: exit", child.wait(), flush=True)

    flops = matmul_flops_per_token(base, corpus.vocab_size)
    on_gpu = runtime.device.type == "cuda"
    with contextlib.nullcontext() if on_gpu else runtimes.whole_vectors:
        peak = runtimes.matmul_rate(runtime.device, runtime.dtype)
    load = os.getloadavg()
    rows: list[dict[str, object]] = []
    steps: dict[tuple[str, int], Callable[[], None]] = {}
    memory: dict[tuple[str, int], float] = {}
    setup: dict[tuple[str, int], float] = {}
    failed: dict[tuple[str, int], str] = {}
    for key, make in variants.items():
        gc.collect()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before, begin = torch.cuda.memory_allocated(), time.perf_counter()
        try:
            steps[key] = make()
            for _ in range(3 if on_gpu else 1):
                steps[key]()
            wait(runtime.device)
            ready = time.perf_counter()
        except Exception as error:  # a peer that fails is reported as failed, not left out
            print(key, "failed:", type(error).__name__, str(error)[:300])
            failed[key] = f"{type(error).__name__}: {str(error)[:200]}"
            steps.pop(key, None)
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()  # what one variant needed once must not be in another's way
        if key in failed:
            continue
        setup[key] = ready - begin
        if on_gpu:
            memory[key] = (torch.cuda.max_memory_allocated() - before) / 2**30
        print(f"ready: {key[0]}, batch {key[1]}, {setup[key]:.0f} s", flush=True)
    rates: dict[tuple[str, int], list[Rate]] = {key: [] for key in steps}
    for _ in range(a.rounds):
        for key, step in steps.items():
            if key in failed:
                continue
            tokens = key[1] * base.data.sequence_length
            try:
                rates[key].append(rate(step, tokens, a.seconds, runtime.device))
            except torch.OutOfMemoryError as error:
                failed[key] = f"OutOfMemoryError: {str(error)[:200]}"
                torch.cuda.empty_cache()
    rows += [{"variant": k[0], "batch": k[1], "failed": why} for k, why in failed.items()]
    rates = {key: values for key, values in rates.items() if key not in failed}
    for key, both in rates.items():
        values, by_cpu = zip(*both, strict=True)
        median = statistics.median(values)
        rows.append(
            {
                "variant": key[0],
                "batch": key[1],
                "tokens_per_second_median": median,
                "tokens_per_second_all": values,
                **({} if on_gpu else {"tokens_per_cpu_second_all": by_cpu}),
                "mfu_of_measured_matmul": median * flops / peak,
                **({"peak_memory_gib": memory[key]} if on_gpu else {}),
                "setup_seconds": setup[key],
            }
        )
    record = {
        "what": "tokens per second of the whole pre-training step, dropout 0, length "
        f"{base.data.sequence_length}",
        "equality": equality,
        "rows": rows,
        "rounds": a.rounds,
        "compiled_in_advance": a.side_by_side,
        "seconds_per_round": a.seconds,
        "matmul_flops": peak,
        "flops_per_token": flops,
        "vocab_size": corpus.vocab_size,
        "config": to_dict(base),
        "load_average": {"before": load, "after": os.getloadavg()},
        "peers": {name: peer._asdict() for name, peer in PEERS.items()},
        "environment": {**environment, "transformers": transformers.__version__},
    }
    (a.out / "pretrain_speed.json").write_text(json.dumps(record, indent=1))
    lines = [f"{'variant':50} {'batch':>6} {'tokens/s':>12} {'spread':>8} {'MFU':>6} {'GiB':>6}"]
    for row in rows:
        if "failed" in row:
            lines.append(f"{row['variant']:50} {row['batch']:>6} failed")
            continue
        values = row["tokens_per_second_all"]
        median = row["tokens_per_second_median"]
        lines.append(
            f"{row['variant']:50} {row['batch']:>6} {median:12,.0f}"
            f" {(max(values) - min(values)) / median:8.1%}"
            f" {row['mfu_of_measured_matmul']:6.1%} {row.get('peak_memory_gib', float('nan')):6.1f}"
        )
    for batch in a.peer_batches:
        for clock in Rate._fields if not on_gpu else Rate._fields[:1]:
            best: dict[str, float] = {}  # of ours and of each group
            for (label, size), values in rates.items():
                if size == batch:
                    median = statistics.median(getattr(r, clock) for r in values)
                    group = groups.get(label, label)
                    best[group] = max(best.get(group, 0.0), median)
            mine = best.pop("electra", None)
            for group, theirs in best.items() if mine else ():
                times = f"{mine / theirs:.2f} x the best of {group}"
                lines.append(f"batch {batch}: {times}, {clock} time")
    table = "\n".join(lines)
    print(f"\n{table}")
    # The page of the day, to be kept under benchmarks/results.
    around = "\n".join(f"- {name}: {value}" for name, value in record["environment"].items())
    command = "python benchmarks/pretrain_speed.py " + shlex.join(sys.argv[1:])
    (a.out / f"{datetime.date.today()}.md").write_text(
        f"# {record['what']}\n\n{around}\n\n    {command}\n\n```\n{table}\n```\n"
    )
    if equality["too large"]:
        raise SystemExit(
            "the two sides were not shown to be equal:\n" + "\n".join(equality["too large"])
        )


if __name__ == "__main__":
    main()
