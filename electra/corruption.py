"""How x becomes x_masked and x_corrupt (paper, section 2), as pure functions.

    m_i ~ unif{1, n} for i = 1 to k              x_masked  = REPLACE(x, m, [MASK])
    x̂_i ~ p_G(x_i | x_masked) for i in m         x_corrupt = REPLACE(x, m, x̂)

Legend for the whole code base: B sequences · T tokens · M masked slots · V vocabulary · D hidden ·
E embedding · F feed-forward · H heads · K head size · P examples that may share a sequence. M is
fixed for a run, so that shapes are static; a short sequence leaves some of its slots unused
(`valid` is false, position 0).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import ObjectiveConfig
from .randomness import Purpose, StepRng


class Positions(NamedTuple):
    """m: the chosen positions of each sequence."""

    at: Tensor  # (B, M) int64, 0 in unused slots
    valid: Tensor  # (B, M) bool


def num_masked(length: Tensor, slots: int, config: ObjectiveConfig) -> Tensor:
    """k of sequences with `length` tokens (specials included), at most `slots`; any shape, int64.

    The paper's ceil(p n) is taken in integers, because 0.07 · 100 is not 7 in floating point. The
    released code rounds in float32, half to even, and masks at least one position.
    """
    if config.mask_count == "ceil":
        thousandths = round(config.mask_percent * 1000)
        k = (length.long() * thousandths + 99_999) // 100_000
    else:
        k = (length.float() * (config.mask_percent / 100)).round().long().clamp(min=1)
        k = k.minimum(length)  # an example that is not there has none
    return k.clamp(max=slots)


def lay_out(sizes: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """Lay runs of `sizes` (..., P) end to end. For each place: the index of its run, P behind the
    last, and its offset inside the run; (..., places) int64 both."""
    end = sizes.cumsum(-1)
    place = torch.arange(places, device=sizes.device)
    run = (place[:, None] >= end[..., None, :]).sum(-1)
    return run, place - F.pad(end, (1, 0)).gather(-1, run)


def choose_positions(
    candidates: Tensor,
    length: Tensor,
    slots: int,
    config: ObjectiveConfig,
    rng: StepRng,
    purpose: Purpose = Purpose.POSITIONS,
) -> Positions:
    """k positions of each example, uniform over its `candidates` (B, T) bool.

    length: (B,), or (B, P) where sequences hold several examples, each with at most `slots`.
    """
    B, T = candidates.shape
    length = length.view(B, -1)  # (B, P)
    P = length.shape[1]
    M = min(slots if P == 1 else slots + P, T)  # every example rounds up
    k = num_masked(length, slots, config)
    position = torch.arange(T, device=candidates.device)
    example = lay_out(length, T)[0].clamp(max=P - 1)  # (B, T)
    is_of = example[:, :, None] == torch.arange(P, device=candidates.device)
    available = (candidates[:, :, None] & is_of).sum(1)  # (B, P)
    if config.mask_positions == "distinct":
        # The k largest of random keys. The position is part of the key: no ties, so every device
        # and every sort picks the same set. Candidates of the first example come first.
        key = (rng.bits(purpose, T) >> 8) * T + position + ((P - 1 - example) << 40)
        order = torch.where(candidates, key, -1).topk(M if P == 1 else T, dim=1).indices
        k = torch.minimum(k, available)
    else:
        order = torch.where(candidates, position, T).sort(dim=1).values  # candidates first
        k = torch.where(available > 0, k, 0)
    owner, draw = lay_out(k, M)  # (B, M): the example that a slot serves
    valid = owner < P
    owner = owner.clamp(max=P - 1)
    if config.mask_positions == "with_replacement":
        draw = (rng.uniform(purpose, M) * available.gather(1, owner)).long()
    first = (available.cumsum(1) - available).gather(1, owner)
    at = order.gather(1, (first + draw).clamp(max=order.shape[1] - 1))
    return Positions(torch.where(valid, at, 0), valid)


def mask_tokens(
    x: Tensor, m: Positions, mask_id: int, vocab_size: int, config: ObjectiveConfig, rng: StepRng
) -> Tensor:
    """x_masked (B, T): the chosen positions show [MASK], a random token, or stay as they are."""
    original = x.gather(1, m.at)
    masked = torch.full_like(original, mask_id)
    if config.mask_token_percent < 100:
        u = rng.uniform(Purpose.SHOWN, m.at.shape[1]) * 100
        other = original
        if config.random_token_percent > 0:
            random = rng.uniform(Purpose.RANDOM_TOKEN, m.at.shape[1]) * vocab_size
            is_random = u < config.mask_token_percent + config.random_token_percent
            other = torch.where(is_random, random.to(x.dtype), original)
        is_masked = u < config.mask_token_percent
        if config.mask_positions == "with_replacement":
            # A position drawn several times is masked if any of its slots says so.
            is_masked = (_same_position(m) & is_masked[:, None, :]).any(-1)
            other = other.gather(1, _first_draw(m))
        masked = torch.where(is_masked, masked, other)
    return replace(x, m, masked)


def replace(x: Tensor, m: Positions, tokens: Tensor) -> Tensor:
    """REPLACE(x, m, tokens): x (B, T) with `tokens` (B, M) at the positions m.

    Equal positions have to carry equal tokens. Unused slots write position 0 back to itself; it
    holds [CLS] and is never chosen.
    """
    return x.scatter(1, m.at, torch.where(m.valid, tokens, x[:, :1]).to(x.dtype))


def resolve_duplicates(m: Positions, sampled: Tensor, config: ObjectiveConfig) -> Tensor:
    """One token per position (B, M) where a position was drawn more than once.

    The released code adds up the sampled ids and divides: an unrelated token, reproduced here
    for strict comparison only.
    """
    if config.mask_positions == "distinct":
        return sampled
    if config.duplicate_draws == "first":
        return sampled.gather(1, _first_draw(m))
    same = _same_position(m)  # (B, M, M)
    return (same * sampled[:, None, :]).sum(-1) // same.sum(-1).clamp(min=1)


def proposal_logits(
    logits: Tensor, original: Tensor, temperature: float | Tensor, disallow_correct: bool
) -> Tensor:
    """The logits that are sampled from, (..., V) float32."""
    logits = logits.float()
    if isinstance(temperature, Tensor) or temperature != 1.0:
        logits = logits / temperature
    if disallow_correct:
        token = torch.arange(logits.shape[-1], device=logits.device)
        logits = torch.where(token == original.unsqueeze(-1), logits - 1000.0, logits)
    return logits


def sample(logits: Tensor, u: Tensor) -> Tensor:
    """x̂ ~ softmax(logits): logits (N, V) float32, u (N,) uniform in [0, 1) -> (N,) int64.

    Inverse of the cumulative distribution in two levels: first the tile of the vocabulary in
    which u falls, then the token inside it. One uniform number per sample instead of the V of
    the Gumbel trick, and no running sum over the whole vocabulary.
    """
    N, V = logits.shape
    width = max(1, round(V**0.5))
    tiles = -(-V // width)
    # Exponentials are taken twice, of all and of one tile: kept, they would be the largest tensor.
    z = logits - logits.amax(-1, keepdim=True)  # (N, V)
    z = F.pad(z, (0, tiles * width - V), value=-math.inf).view(N, tiles, width)
    mass = z.exp().sum(-1)  # (N, tiles)
    tile_mass = _running_sum(mass)
    target = u[:, None] * tile_mass[:, -1:]  # (N, 1)
    # Rounding can put u behind the last token that has any mass: stay on tokens that do.
    tile = _pick(tile_mass, mass > 0, target)  # (N, 1)
    before = torch.where(tile > 0, tile_mass.gather(1, (tile - 1).clamp(min=0)), 0.0)
    inside = z.gather(1, tile[:, :, None].expand(-1, -1, width)).squeeze(1).exp()  # (N, width)
    token = _pick(_running_sum(inside), inside > 0, target - before)
    return (tile * width + token).squeeze(1)


def _running_sum(x: Tensor) -> Tensor:
    """Along the last axis. torch calls it nondeterministic on a GPU, which holds for a single long
    row only: of many short ones, a thread block sums each in a fixed order."""
    strict = x.is_cuda and torch.are_deterministic_algorithms_enabled()
    if torch.compiler.is_compiling() or not strict:
        return x.cumsum(-1)
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        return x.cumsum(-1)
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns)


def _pick(mass: Tensor, has_mass: Tensor, target: Tensor) -> Tensor:
    """First index whose running mass exceeds the target, or the last one that has mass; (N, 1)."""
    index = torch.arange(mass.shape[-1], device=mass.device)
    first = (mass <= target).sum(-1, keepdim=True)
    last = torch.where(has_mass, index, 0).amax(-1, keepdim=True)
    return torch.minimum(first, last)


def _same_position(m: Positions) -> Tensor:
    """(B, M, M) bool: slots i and j hold the same position and j is in use."""
    return (m.at[:, :, None] == m.at[:, None, :]) & m.valid[:, None, :]


def _first_draw(m: Positions) -> Tensor:
    """(B, M) int64: the first slot that holds the position of each slot."""
    return _same_position(m).int().argmax(-1)
