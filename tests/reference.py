"""Slow, obvious restatements of what the fast code does: loops over positions, textbook Adam.

Nothing here is clever and nothing is imported from the modules under test; a reader checks these
functions against the paper, and the tests check the package against these functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction

import numpy as np


def softmax(logits: Sequence[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def inverse_cdf(logits: Sequence[float], u: float) -> int:
    """The token in which u falls when all probabilities are laid end to end."""
    probabilities = softmax(logits)
    reached = 0.0
    for token, probability in enumerate(probabilities):
        reached += probability
        if probability > 0 and u < reached:
            return token
    return max(token for token, probability in enumerate(probabilities) if probability > 0)


def ceil_count(length: int, percent: str) -> int:
    """k = ceil(p n) in exact arithmetic; the percentage as it is written."""
    return math.ceil(Fraction(percent) / 100 * length)


def mlm_loss(logits: np.ndarray, x: np.ndarray, at: np.ndarray, valid: np.ndarray) -> float:
    """Mean of −log p_G(x_i | x_masked) over the masked positions i of all sequences."""
    terms = []
    for b in range(len(x)):
        for slot in range(at.shape[1]):
            if valid[b, slot]:
                terms.append(-math.log(softmax(logits[b, slot])[x[b, at[b, slot]]]))
    return math.fsum(terms) / len(terms)


def disc_loss(d: np.ndarray, x: np.ndarray, x_corrupt: np.ndarray, length: np.ndarray) -> float:
    """Mean over all tokens of −log D where original, −log(1 − D) where replaced; D = 1 − σ(d)."""
    terms = []
    for b in range(len(x)):
        for t in range(length[b]):
            original = 1 - 1 / (1 + math.exp(-d[b, t]))
            terms.append(-math.log(original if x_corrupt[b, t] == x[b, t] else 1 - original))
    return math.fsum(terms) / len(terms)


def disc_loss_at(
    d: np.ndarray, x: np.ndarray, x_corrupt: np.ndarray, places: Iterable[tuple[int, int]]
) -> float:
    """The same sum over some places (b, t) only, not yet divided by how many there are."""
    terms = []
    for b, t in places:
        original = 1 / (1 + math.exp(d[b, t]))
        terms.append(-math.log(original if x_corrupt[b, t] == x[b, t] else 1 - original))
    return math.fsum(terms)


def copy_gate_nll(d: float, log_p: float, copied: bool) -> float:
    """−log(D · copied + (1 − D) · p), D = 1 / (1 + e^d), where no float64 is small enough."""
    stay, speak = 1 / (1 + Decimal(d).exp()), 1 / (1 + Decimal(-d).exp())
    return -float((stay * copied + speak * Decimal(log_p).exp()).ln())


Weights = Mapping[str, np.ndarray]


def encode(w: Weights, x: np.ndarray, segment: np.ndarray, sees: np.ndarray, K: int) -> np.ndarray:
    """One sequence (n,) through an encoder, position by position; sees[t, s]: t looks at s."""
    n = len(x)
    word, place, kind = (w[f"embeddings.{name}.weight"] for name in ("word", "position", "segment"))
    h = normalised(w, "embeddings.norm", word[x] + place[:n] + kind[segment])
    if "project.weight" in w:
        h = linear(w, "project", h)
    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))
    for block in (f"blocks.{i}" for i in range(layers)):
        q, k, v = np.split(linear(w, f"{block}.qkv", h), 3, axis=1)
        a = np.zeros_like(h)
        for t in range(n):
            seen = np.flatnonzero(sees[t])
            for head in range(0, h.shape[1], K):
                of = slice(head, head + K)
                p = softmax([float(k[s, of] @ q[t, of]) / math.sqrt(K) for s in seen])
                a[t, of] = sum(share * v[s, of] for share, s in zip(p, seen, strict=True))
        h = normalised(w, f"{block}.attention_norm", h + linear(w, f"{block}.out", a))
        f = linear(w, f"{block}.down", gelu(linear(w, f"{block}.up", h)))
        h = normalised(w, f"{block}.ffn_norm", h + f)
    return h


def vocabulary_log_probabilities(w: Weights, h: np.ndarray, table: np.ndarray) -> np.ndarray:
    """(n, V): the output layer of a masked language model over token embeddings (V, E)."""
    e = normalised(w, "norm", gelu(linear(w, "dense", h)))
    logits = e @ table.T + w["bias"]
    logits = logits - logits.max(1, keepdims=True)  # the log of a softmax may have no float64
    return np.array([row - math.log(math.fsum(np.exp(row))) for row in logits])


def detector_logits(w: Weights, h: np.ndarray) -> np.ndarray:
    """(n,): logits of replaced, or Electric's energies."""
    if "dense.weight" in w:
        h = gelu(linear(w, "dense", h))
    return linear(w, "w", h)[:, 0]


def linear(w: Weights, name: str, h: np.ndarray) -> np.ndarray:
    return h @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def normalised(w: Weights, name: str, h: np.ndarray) -> np.ndarray:
    centred = h - h.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
    return centred / deviation * w[f"{name}.weight"] + w[f"{name}.bias"]


def gelu(h: np.ndarray) -> np.ndarray:
    return h * np.vectorize(lambda value: 0.5 * (1 + math.erf(value / math.sqrt(2))))(h)


def one_token_per_position(
    at: Sequence[int], valid: Sequence[bool], sampled: Sequence[int], rule: str
) -> dict[int, int]:
    """Position -> token where a position may have been drawn several times."""
    draws: dict[int, list[int]] = {}
    for position, is_used, token in zip(at, valid, sampled, strict=True):
        if is_used:
            draws.setdefault(position, []).append(token)
    if rule == "first":
        return {position: tokens[0] for position, tokens in draws.items()}
    return {position: sum(tokens) // len(tokens) for position, tokens in draws.items()}


class TextbookAdam:
    """Adam of Kingma and Ba in float64 with decoupled weight decay; the released code corrects no
    bias."""

    def __init__(
        self,
        p: np.ndarray,
        *,
        beta1: float,
        beta2: float,
        epsilon: float,
        decay: float,
        bias_correction: bool,
    ) -> None:
        self.p = p.astype(np.float64)
        self.m, self.v = np.zeros_like(self.p), np.zeros_like(self.p)
        self.beta1, self.beta2, self.epsilon, self.decay = beta1, beta2, epsilon, decay
        self.bias_correction = bias_correction
        self.t = 0

    def step(self, g: np.ndarray, lr: float) -> None:
        self.t += 1
        self.m = self.beta1 * self.m + (1 - self.beta1) * g
        self.v = self.beta2 * self.v + (1 - self.beta2) * g**2
        m, v = self.m, self.v
        if self.bias_correction:
            m, v = m / (1 - self.beta1**self.t), v / (1 - self.beta2**self.t)
        self.p = self.p - lr * (m / (np.sqrt(v) + self.epsilon) + self.decay * self.p)


class SlowMuon:
    """Muon on one matrix, by its singular values, which the iteration lifts one by one."""

    def __init__(self, p: np.ndarray, *, momentum: float, decay: float) -> None:
        self.p, self.m = p.astype(np.float64), np.zeros(p.shape)
        self.momentum, self.decay = momentum, decay

    def step(self, g: np.ndarray, lr: float) -> None:
        self.m = self.momentum * self.m + (1 - self.momentum) * g
        left, s, right = np.linalg.svd(
            (1 - self.momentum) * g + self.momentum * self.m, full_matrices=False
        )
        s = s / np.sqrt((s**2).sum())
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        update = 0.2 * math.sqrt(max(self.p.shape)) * (left * s) @ right
        self.p = self.p - lr * (update + self.decay * self.p)


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10 with Python's own integers (Salmon et al. 2011)."""
    c, k, word = list(counter), list(key), 2**32
    for _ in range(10):
        high_0, low_0 = divmod(c[0] * 0xD2511F53, word)
        high_1, low_1 = divmod(c[2] * 0xCD9E8D57, word)
        c = [high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0]
        k = [(k[0] + 0x9E3779B9) % word, (k[1] + 0xBB67AE85) % word]
    return c
