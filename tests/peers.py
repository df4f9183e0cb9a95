"""The same sizes as transformers writes them, for tests that compare with it."""

from __future__ import annotations

from typing import Any

import transformers

from electra.config import EncoderConfig


def electra_config(c: EncoderConfig, vocab_size: int, **more: Any) -> transformers.ElectraConfig:
    """The encoder `c` without dropout."""
    return transformers.ElectraConfig(
        vocab_size=vocab_size,
        embedding_size=c.embedding_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.ffn_size,
        num_hidden_layers=c.layers,
        num_attention_heads=c.attention_heads,
        max_position_embeddings=c.max_positions,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **more,
    )
