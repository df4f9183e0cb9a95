"""What a run will take, before it is started: parameters, FLOPs, memory, tokens, time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .config import EncoderConfig, PretrainConfig
from .flops import matmul_flops_per_token, paper_flops
from .objectives import SpecialIds, objective_class


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Figures of a recipe; times are for a given rate of the device."""

    discriminator_parameters: int  # kept, heads included
    generator_parameters: int  # added by the generator
    tokens_per_step: int
    total_tokens: int
    flops_per_token: float  # matrix products only, forward and backward
    total_flops: float
    paper_flops: float  # of the whole run by the paper's rules, to compare with its tables
    # Weights, gradients, both moments and an average, if any, in float32, and bf16 working copies.
    state_bytes: int
    # Roughly what one sequence keeps for the backward pass in bf16; twice as much in fp32.
    activation_bytes_per_sequence: int
    kernel_bytes_per_sequence: int  # the same where own kernels compute (`fused.py`)

    @property
    def gradient_bytes(self) -> int:
        """The flat float32 gradient of `optim.Adam`."""
        return 4 * (self.discriminator_parameters + self.generator_parameters)


def make_plan(config: PretrainConfig, vocab_size: int = 30_522) -> Plan:
    """The figures of `config` for a vocabulary of `vocab_size`."""
    kept, extra = count_parameters(config, vocab_size)
    flops = matmul_flops_per_token(config, vocab_size)
    tokens = config.tokens_per_step * config.run.train_steps
    both = [config.encoder]
    if config.objective.kind != "mlm" and config.generator.kind == "network":
        both += [config.generator_encoder] * (2 if config.objective.kind == "electric" else 1)
    logits = 2 * config.masked_slots * vocab_size
    return Plan(
        discriminator_parameters=kept,
        generator_parameters=extra,
        tokens_per_step=config.tokens_per_step,
        total_tokens=tokens,
        flops_per_token=flops,
        total_flops=flops * tokens,
        paper_flops=paper_flops(config, vocab_size),
        state_bytes=(kept + extra) * (4 * (5 if config.optim.average else 4) + 2),
        activation_bytes_per_sequence=sum(_activations(config, e, 2) for e in both) + 3 * logits,
        kernel_bytes_per_sequence=sum(_activations(config, e, 1) for e in both) + 2 * logits,
    )


def count_parameters(config: PretrainConfig, vocab_size: int) -> tuple[int, int]:
    """Parameters of the kept network with its head, and those training adds to it."""
    with torch.device("meta"):  # shapes without memory
        objective = objective_class(config)(config, vocab_size, SpecialIds(0, 1, 2, 3, 4))
    total = sum(p.numel() for p in objective.parameters())
    head = "generator_head" if config.objective.kind == "mlm" else "main_head"
    if hasattr(objective, "discriminator_head"):
        head = "discriminator_head"
    parts = (objective.encoder, getattr(objective, head))
    kept = sum(p.numel() for part in parts for p in part.parameters())
    return kept, total - kept


def _activations(config: PretrainConfig, c: EncoderConfig, wide: int) -> int:
    """bf16 tensors a block keeps: inputs of its four products, q, k, v, both norms' inputs, GELU's
    input; plus the attention matrix when dropout makes it explicit. wide: how many of them have the
    width of the feed-forward layer; own kernels compute GELU's output again."""
    T = config.data.sequence_length
    block = T * (8 * c.hidden_size + wide * c.ffn_size) * 2
    if c.attention_dropout > 0:
        block += c.attention_heads * T * T * 6
    return c.layers * block
