"""Floating-point operations of a training step.

`matmul_flops_per_token` counts what the matrix units must do: a multiply-add is 2, the backward
pass twice the forward pass, and only the masked positions reach the vocabulary. It is the yardstick
of model FLOPs utilisation (MFU), for our code and for others' alike.
"""

from __future__ import annotations

from .config import EncoderConfig, PretrainConfig


def matmul_flops_per_token(config: PretrainConfig, vocab_size: int) -> float:
    """Forward and backward, per token of a full sequence, generator and discriminator."""
    T, share = config.data.sequence_length, config.masked_slots / config.data.sequence_length
    d = config.encoder
    if config.objective.kind == "mlm":
        return 3 * (encoder_flops(d, T) + share * _mlm_head(d, vocab_size))
    g = config.generator_encoder
    disc_head = 2 * d.hidden_size * (d.hidden_size * (config.objective.disc_head == "dense") + 1)
    forward = encoder_flops(d, T) + disc_head + encoder_flops(g, T)
    return 3 * (forward + share * _mlm_head(g, vocab_size))


def encoder_flops(c: EncoderConfig, sequence_length: int) -> float:
    """Forward, per token: projections, attention, feed-forward, embedding projection."""
    D, F, E = c.hidden_size, c.ffn_size, c.embedding_size
    linears = 2 * (4 * D * D + 2 * D * F)
    attention = 2 * 2 * sequence_length * D
    project = 2 * E * D if E != D else 0
    return c.layers * (linears + attention) + project


def _mlm_head(c: EncoderConfig, vocab_size: int) -> float:
    return 2 * c.embedding_size * (c.hidden_size + vocab_size)
