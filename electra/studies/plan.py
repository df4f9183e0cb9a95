"""What a run will take, before it is started: parameters, FLOPs, memory, tokens, time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import EncoderConfig, PretrainConfig
from ..flops import matmul_flops_per_token, paper_flops
from ..objectives import MaskedLM, SpecialIds, WithGenerator, objective_class


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
    # The same where own kernels compute, without what `fused.KEPT` adds.
    kernel_bytes_per_sequence: int

    @property
    def gradient_bytes(self) -> int:
        """The flat float32 gradient of `optim.Adam`."""
        return 4 * (self.discriminator_parameters + self.generator_parameters)


def make_plan(config: PretrainConfig, vocab_size: int = 30_522) -> Plan:
    """The figures of `config` for a vocabulary of `vocab_size`."""
    kept, extra = count_parameters(config, vocab_size)
    flops = matmul_flops_per_token(config, vocab_size)
    tokens = config.tokens_per_step * config.run.train_steps
    return Plan(
        discriminator_parameters=kept,
        generator_parameters=extra,
        tokens_per_step=config.tokens_per_step,
        total_tokens=tokens,
        flops_per_token=flops,
        total_flops=flops * tokens,
        paper_flops=paper_flops(config, vocab_size),
        state_bytes=(kept + extra) * (4 * (5 if config.optim.average else 4) + 2),
        activation_bytes_per_sequence=_activations(config, vocab_size, wide=2, logits=3),
        kernel_bytes_per_sequence=_activations(config, vocab_size, wide=1, logits=2),
    )


def count_parameters(config: PretrainConfig, vocab_size: int) -> tuple[int, int]:
    """Parameters of the kept network with its head, and those training adds to it."""
    objective = _objective(config, vocab_size)
    total = sum(p.numel() for p in objective.parameters())
    head = "generator_head" if config.objective.kind == "mlm" else "main_head"
    if hasattr(objective, "discriminator_head"):
        head = "discriminator_head"
    parts = (objective.encoder, getattr(objective, head))
    kept = sum(p.numel() for part in parts for p in part.parameters())
    return kept, total - kept


def _objective(config: PretrainConfig, vocab_size: int) -> MaskedLM | WithGenerator:
    """Shapes without memory."""
    with torch.device("meta"):
        return objective_class(config)(config, vocab_size, SpecialIds(0, 1, 2, 3, 4))


def _activations(config: PretrainConfig, vocab_size: int, *, wide: int, logits: int) -> int:
    """What a sequence keeps at most: of one network at a time, where the generator learns first.

    wide: tensors of a block with the width of the feed-forward layer. logits: copies of them.
    """
    kind, T = config.objective.kind, config.data.sequence_length
    copy = 2 * vocab_size * logits  # of one position
    positions = {
        "mlm": config.masked_slots,
        "replace_mlm": config.masked_slots,
        "all_tokens_mlm": T,
    }
    main = _encoder(config, config.encoder, wide) + positions.get(kind, 0) * copy
    if kind == "mlm" or config.generator.kind != "network":
        return main
    towers = 2 if kind == "electric" else 1
    generator = towers * _encoder(config, config.generator_encoder, wide)
    generator += config.masked_slots * copy
    objective = _objective(config, vocab_size)
    first = isinstance(objective, WithGenerator) and objective.generator_is_first
    return max(main, generator) if first else main + generator


def _encoder(config: PretrainConfig, c: EncoderConfig, wide: int) -> int:
    """bf16 tensors a block keeps: inputs of its four products, q, k, v, both norms' inputs, GELU's
    input; plus the attention matrix when dropout makes it explicit. Own kernels compute GELU's
    output again."""
    T = config.data.sequence_length
    block = T * (8 * c.hidden_size + wide * c.ffn_size) * 2
    if c.attention_dropout > 0:
        block += c.attention_heads * T * T * 6
    return c.layers * block
