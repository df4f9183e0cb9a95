"""Floating-point operations of training, by two rules that are kept apart.

| function                 | used for                | counts                                    |
|--------------------------|-------------------------|-------------------------------------------|
| `matmul_flops_per_token` | model FLOPs utilisation | matrix products; backward is 2 x forward  |
| `paper_flops`            | the paper's tables, its | also element-wise operations and look-ups |
|                          | sense of equal compute  | as products; backward is 1 x forward      |

Both are sums over the same list of what one token passes through: `KINDS` says which networks and
heads a step of an objective runs, `_encoder` and `_heads` what each of them costs. A multiply-add
is 2; sampling, the optimizer and everything done on token ids count as nothing.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from .config import EncoderConfig, PretrainConfig

PAPER_OUTPUT_FRACTION = 0.15625  # 20 of 128 positions: 15 % rounded up; the paper's for all models


class Pass(NamedTuple):
    """One network that runs in a step, and at which positions its heads do."""

    network: Literal["encoder", "generator"]
    heads: dict[str, Literal["masked", "all"]]


KINDS: dict[str, tuple[Pass, ...]] = {
    "rtd": (Pass("generator", {"vocabulary": "masked"}), Pass("encoder", {"replaced": "all"})),
    "mlm": (Pass("encoder", {"vocabulary": "masked"}),),
    "replace_mlm": (
        Pass("generator", {"vocabulary": "masked"}),
        Pass("encoder", {"vocabulary": "masked"}),
    ),
    "all_tokens_mlm": (
        Pass("generator", {"vocabulary": "masked"}),
        Pass("encoder", {"vocabulary": "all", "replaced": "all"}),
    ),
    "electric": (  # two towers, and one head over both
        Pass("generator", {}),
        Pass("generator", {"both_towers": "all"}),
        Pass("encoder", {"replaced": "all"}),
    ),
}


class Work(NamedTuple):
    """Operations of a forward pass, per token."""

    products: float = 0  # of matrices: what the matrix units must do
    other: float = 0  # element by element; one-hot products for position and segment
    words: float = 0  # look-up of the word embeddings as one-hot rows times the whole table


def matmul_flops_per_token(config: PretrainConfig, vocab_size: int) -> float:
    """Forward and backward matrix products per token of a full sequence: the yardstick of MFU.

    Products that are done twice, such as the attention scores that fused attention computes again
    in its backward pass or logits that are not kept, are counted once. Of two stages it is the
    mean.
    """
    share = config.masked_slots / config.data.sequence_length
    return _step(config, vocab_size, share, backward=2).products


def paper_flops(
    config: PretrainConfig,
    vocab_size: int,
    steps: int | None = None,
    *,
    dense_lookup: bool = True,
    output_fraction: float = PAPER_OUTPUT_FRACTION,
) -> float:
    """Training FLOPs of `steps` (default: all) as the script released with the paper counts them.

    For the paper's sizes this equals the script's output. As in the script

    - backward costs what forward costs; it really costs twice as much, so three times the forward
      pass, the honest count, would be half as much again;
    - word embeddings are dense products with one-hot rows (`dense_lookup`), which nobody executes:
      40 % of the total of ELECTRA-Small;
    - `output_fraction` of the positions reaches the vocabulary, in ELECTRA-Large as well, although
      it masks 25 % (with 0.25 its total is 0.7 % higher);
    - the layer norm after attention costs 5 per token, that after feed-forward 5 per element;
    - dropout is counted, whatever its rate.

    The totals agree with the paper's tables to the digits printed there, with one exception:
    ELECTRA-Small is 1.29e18 here and in the script, 1.4e18 in the paper.
    """
    step = _step(config, vocab_size, output_fraction, backward=1)
    per_token = step.products + step.other + dense_lookup * step.words
    steps = config.run.train_steps if steps is None else steps
    return per_token * config.tokens_per_step * steps


def _step(config: PretrainConfig, vocab_size: int, masked_share: float, *, backward: int) -> Work:
    """All passes of one step, per token of a full sequence; backward costs so many forwards."""
    step = Work()
    for network, heads in KINDS[config.objective.kind]:
        c = config.encoder if network == "encoder" else config.generator_encoder
        work = _encoder(c, config.data.sequence_length, vocab_size)
        costs = _heads(c, config.objective.disc_head, vocab_size)
        for head, positions in heads.items():
            work = _add(work, costs[head], masked_share if positions == "masked" else 1)
        forward, trained = _runs(config, network)
        step = _add(step, work, forward + backward * trained)
    return step


def _runs(config: PretrainConfig, network: str) -> tuple[float, float]:
    """In which share of the steps a network runs, and in which it learns."""
    if config.objective.algorithm == "two_stage":
        return (1, 0.5) if network == "generator" else (0.5, 0.5)
    if network == "encoder":
        return 1, 1
    is_network = config.generator.kind == "network"
    return float(is_network), float(is_network and not config.generator.frozen)


def _add(a: Work, b: Work, times: float = 1) -> Work:
    return Work(*(x + times * y for x, y in zip(a, b, strict=True)))


# The paper's costs of element-wise operations, each per element.
DROPOUT = 4  # draw, compare, multiply by the mask, rescale
LAYER_NORM = 5
GELU = 8
SOFTMAX = 5
ADD = SCALE = 1


def _encoder(c: EncoderConfig, T: int, vocab_size: int) -> Work:
    """Embeddings, their projection if there is one, and the blocks."""
    E, D, F, H = c.embedding_size, c.hidden_size, c.ffn_size, c.attention_heads
    projections, scores_and_average, feed_forward = 2 * 4 * D * D, 2 * 2 * T * D, 2 * 2 * D * F
    attention = 4 * D * ADD + H * T * (SCALE + SOFTMAX + DROPOUT) + D * (DROPOUT + ADD) + LAYER_NORM
    inside = F * (ADD + GELU) + D * (ADD + DROPOUT + ADD + LAYER_NORM)
    block = Work(projections + scores_and_average + feed_forward, attention + inside)
    project = Work(2 * E * D, D * ADD) if E != D else Work()
    position_and_segment = 2 * E * (T + 2) + 2 * E * ADD
    other = position_and_segment + E * (LAYER_NORM + DROPOUT)
    embeddings = Work(other=other, words=2 * E * vocab_size)
    return _add(_add(embeddings, project), block, c.layers)


def _heads(c: EncoderConfig, disc_head: str, vocab_size: int) -> dict[str, Work]:
    """Every head on an encoder `c`, per position it is applied to.

    vocabulary: dense layer to embedding size, the output table, softmax, one-hot product with the
    target. replaced: one logit, after a dense layer or straight from the hidden state. both_towers:
    vocabulary over two hidden states.
    """
    E, D, V = c.embedding_size, c.hidden_size, vocab_size
    dense = Work(2 * D * D, D * (ADD + GELU)) if disc_head == "dense" else Work()
    after = E * (ADD + GELU + LAYER_NORM) + V * (SOFTMAX + 2)
    return {
        "vocabulary": Work(2 * E * (D + V), after),
        "both_towers": Work(2 * E * (2 * D + V), after),
        "replaced": _add(dense, Work(2 * D)),
    }
