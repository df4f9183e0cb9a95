"""Tokens per second of the whole pre-training step: ours against a transformers Electra pair.

    python benchmarks/pretrain_speed.py --corpus CORPUS --out results/speed
    python benchmarks/pretrain_speed.py --corpus CORPUS --out results/speed \
        --batches 16 --peer-batches 16 --rounds 5 --seconds 10      # on a CPU

First the mathematics is shown to be the same: with shared weights, masks and samples the loss and
gradients of both networks agree. Then all variants are timed in one process, interleaved, in
several rounds; a step is data, masking, generator, sampling, discriminator, backward, clipping and
optimizer. Dropout is 0 on both sides. The table comes last; a JSON record holds it with versions,
hardware and settings.

On a CPU both sides compute in float32 with the same number of threads. There the CPU time is shown
beside the wall time, and the load of the machine when the measurement begins and ends: other work
lowers what the clock says of both sides, and less what their CPU time says.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import tyro
from torch import Tensor, nn
from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

from electra import runtime as runtimes
from electra.batches import Batches
from electra.config import PretrainConfig, to_dict
from electra.corpus import Corpus
from electra.corruption import choose_positions, mask_tokens, replace
from electra.flops import matmul_flops_per_token
from electra.hf import networks_of, to_transformers
from electra.objectives import (
    Batch,
    ReplacedTokenDetection,
    SpecialIds,
    build_objective,
)
from electra.pretrain import Trainer
from electra.randomness import StepRng
from electra.recipes import recipe


@dataclass(frozen=True, kw_only=True)
class Arguments:
    corpus: Path
    """A prepared corpus."""
    out: Path
    """Where the JSON record goes."""
    recipe: str = "small"
    batches: tuple[int, ...] = (128, 512, 1024)
    """Batch sizes of ours."""
    peer_batches: tuple[int, ...] = (128, 512)
    """Batch sizes of transformers."""
    rounds: int = 3
    seconds: float = 3.0
    """Length of one round of one variant."""


def electra_config(c: PretrainConfig, vocab: int, *, generator: bool) -> ElectraConfig:
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
        attn_implementation="sdpa",
    )


class TransformersPair(nn.Module):
    """What one writes with transformers: two models, tied embeddings, all-position logits."""

    def __init__(self, c: PretrainConfig, vocab: int, special: SpecialIds) -> None:
        super().__init__()
        self.c, self.vocab, self.special = c, vocab, special
        self.generator = ElectraForMaskedLM(electra_config(c, vocab, generator=True))
        self.discriminator = ElectraForPreTraining(electra_config(c, vocab, generator=False))
        self.generator.electra.embeddings = self.discriminator.electra.embeddings
        self.generator.generator_lm_head.weight = (
            self.discriminator.electra.embeddings.word_embeddings.weight
        )

    def forward(self, x: Tensor, x_masked: Tensor, segment: Tensor, chosen: Tensor) -> Tensor:
        labels = torch.where(chosen, x, -100)
        g = self.generator(input_ids=x_masked, token_type_ids=segment, labels=labels)
        with torch.no_grad():
            noise = -torch.log(-torch.log(torch.rand_like(g.logits, dtype=torch.float32)))
            sampled = (g.logits.float() + noise).argmax(-1)
            x_corrupt = torch.where(chosen, sampled, x)
        return self.discriminate(g.loss, x, x_corrupt, segment)

    def discriminate(self, mlm: Tensor, x: Tensor, x_corrupt: Tensor, segment: Tensor) -> Tensor:
        d = self.discriminator(
            input_ids=x_corrupt,
            attention_mask=torch.ones_like(x),
            token_type_ids=segment,
            labels=(x_corrupt != x).long(),
        )
        return mlm + self.c.objective.disc_weight * d.loss


def peer(
    c: PretrainConfig, corpus: Corpus, batches: Batches, *, autocast: bool, compiled: bool
) -> Callable[[], None]:
    """One training step of the transformers pair as a function."""
    device = batches.runtime.device
    special = SpecialIds(**corpus.special_ids)
    pair = TransformersPair(c, corpus.vocab_size, special).to(device).train()
    model = torch.compile(pair, dynamic=False) if compiled else pair
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
        chosen = replace(torch.zeros_like(batch.x), m, torch.ones_like(m.at)).bool()
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = model(batch.x, x_masked, batch.segment, chosen)
        loss.backward()
        nn.utils.clip_grad_norm_(pair.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1

    return one


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

    return one


def prove_equal(c: PretrainConfig, corpus: Corpus, runtime: runtimes.Runtime) -> dict[str, float]:
    """Largest relative differences of losses and gradients, in float32, on one real batch."""
    torch.set_float32_matmul_precision("highest")
    c = dataclasses.replace(c, data=dataclasses.replace(c.data, batch_size=16))
    special = SpecialIds(**corpus.special_ids)
    objective = build_objective(c, corpus.vocab_size, special, padded=False).to(runtime.device)
    assert isinstance(objective, ReplacedTokenDetection)
    block = Batches(corpus.train, c, runtime).block(0, 1)
    zero = torch.zeros((), dtype=torch.int64, device=runtime.device)
    batch: Batch = block.batch(zero, slice(None), c)
    rng = StepRng(0, zero, torch.arange(16, device=runtime.device))
    p = objective.predict(batch, rng, training=True)
    mine = objective(batch, rng)
    grads = torch.autograd.grad(mine.total, list(objective.parameters()))
    named = dict(zip(dict(objective.named_parameters()), grads, strict=True))

    pair = TransformersPair(c, corpus.vocab_size, special).to(runtime.device)
    states = {n.kind: to_transformers(n) for n in networks_of(objective)}
    pair.discriminator.load_state_dict(states["discriminator"], strict=False)
    pair.generator.load_state_dict(states["generator"], strict=False)
    chosen = replace(torch.zeros_like(batch.x), p.m, torch.ones_like(p.m.at)).bool()
    g = pair.generator(
        input_ids=p.x_masked,
        token_type_ids=batch.segment,
        labels=torch.where(chosen, batch.x, -100),
    )
    total = pair.discriminate(g.loss, batch.x, p.x_corrupt, batch.segment)
    total.backward()
    theirs = pair.discriminator.electra
    upper, lower = c.encoder.layers - 1, c.generator_encoder.layers - 1
    pairs = {
        "embedding": (
            named["discriminator.embeddings.word.weight"],
            theirs.embeddings.word_embeddings.weight.grad,
        ),
        "discriminator_feed_forward": (
            named[f"discriminator.blocks.{upper}.up.weight"],
            theirs.encoder.layer[upper].intermediate.dense.weight.grad,
        ),
        "generator_feed_forward": (
            named[f"generator.blocks.{lower}.up.weight"],
            pair.generator.electra.encoder.layer[lower].intermediate.dense.weight.grad,
        ),
    }
    result = {"loss": float((abs(mine.total - total) / abs(total)).detach())}
    for name, (a, b) in pairs.items():
        result[name] = float((a - b).norm() / b.norm())
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
    if Batches(corpus.train, base, runtimes.start(base.run)).padded:
        raise SystemExit("both sides are timed without padding: prepare with --short-percent 0")
    base = dataclasses.replace(
        base, encoder=dataclasses.replace(base.encoder, dropout=0.0, attention_dropout=0.0)
    )
    runtime = runtimes.start(base.run)
    torch.backends.cuda.matmul.allow_tf32 = True

    def at(batch: int) -> PretrainConfig:
        return dataclasses.replace(base, data=dataclasses.replace(base.data, batch_size=batch))

    equality = prove_equal(base, corpus, runtime)
    print("relative differences, float32:", {k: f"{v:.1e}" for k, v in equality.items()})
    assert max(equality.values()) < 1e-4, equality

    variants: dict[tuple[str, int], Callable[[], Callable[[], None]]] = {}
    forms = (
        ("transformers, TF32 eager", False, False),
        ("transformers, bf16 autocast", True, False),
        ("transformers, bf16 autocast, compiled", True, True),
    )
    if runtime.device.type == "cpu":  # compiling costs minutes and buys 2 %
        forms = (("transformers, fp32 eager", False, False),)
    for batch in a.peer_batches:
        for label, autocast, compiled in forms:
            c = at(batch)
            variants[label, batch] = lambda c=c, autocast=autocast, compiled=compiled: peer(
                c, corpus, Batches(corpus.train, c, runtime), autocast=autocast, compiled=compiled
            )
    for batch in a.batches:
        mine = at(batch)
        variants["electra", batch] = lambda c=mine: ours(c, corpus, runtime)

    flops = matmul_flops_per_token(base, corpus.vocab_size)
    peak = runtimes.matmul_rate(runtime.device, runtime.dtype)
    on_gpu = runtime.device.type == "cuda"
    load = os.getloadavg()
    rows: list[dict[str, object]] = []
    steps: dict[tuple[str, int], Callable[[], None]] = {}
    memory: dict[tuple[str, int], float] = {}
    setup: dict[tuple[str, int], float] = {}
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
        except Exception as error:  # a peer that fails is reported as failed, not left out
            print(key, "failed:", type(error).__name__, str(error)[:300])
            steps.pop(key, None)
            rows.append({"variant": key[0], "batch": key[1], "failed": str(error)[:200]})
            continue
        setup[key] = time.perf_counter() - begin
        if on_gpu:
            memory[key] = (torch.cuda.max_memory_allocated() - before) / 2**30
        print(f"ready: {key[0]}, batch {key[1]}, {setup[key]:.0f} s", flush=True)
    rates: dict[tuple[str, int], list[Rate]] = {key: [] for key in steps}
    for _ in range(a.rounds):
        for key, step in steps.items():
            tokens = key[1] * base.data.sequence_length
            rates[key].append(rate(step, tokens, a.seconds, runtime.device))
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
        "equality_float32": equality,
        "rows": rows,
        "rounds": a.rounds,
        "seconds_per_round": a.seconds,
        "matmul_flops": peak,
        "flops_per_token": flops,
        "vocab_size": corpus.vocab_size,
        "config": to_dict(base),
        "load_average": {"before": load, "after": os.getloadavg()},
        "environment": runtime.describe(),
    }
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / "pretrain_speed.json").write_text(json.dumps(record, indent=1))
    print(f"\n{'variant':40} {'batch':>6} {'tokens/s':>12} {'spread':>8} {'MFU':>6} {'GiB':>6}")
    for row in rows:
        if "failed" in row:
            print(f"{row['variant']:40} {row['batch']:>6} failed")
            continue
        values = row["tokens_per_second_all"]
        median = row["tokens_per_second_median"]
        print(
            f"{row['variant']:40} {row['batch']:>6} {median:12,.0f}"
            f" {(max(values) - min(values)) / median:8.1%}"
            f" {row['mfu_of_measured_matmul']:6.1%} {row.get('peak_memory_gib', float('nan')):6.1f}"
        )
    for batch in a.peer_batches:
        for clock in Rate._fields if not on_gpu else Rate._fields[:1]:
            median = {
                key[0]: statistics.median(getattr(r, clock) for r in values)
                for key, values in rates.items()
                if key[1] == batch
            }
            mine = median.pop("electra", None)
            if mine and median:
                ratio = mine / max(median.values())
                print(f"batch {batch}: {ratio:.2f} x the best of transformers, {clock} time")


if __name__ == "__main__":
    main()
