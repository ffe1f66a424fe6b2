"""The distribution that a sampled token should follow, computed plainly, and a test of counts against it."""

from collections.abc import Sequence

import numpy as np
from scipy.stats import chisquare

# Cells that expect fewer are pooled: below this the chi-square distribution is a poor approximation.
MIN_EXPECTED = 5


def token_probs(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """vLLM's order: temperature, min-p, top-k, top-p; each filter sees what the ones before it left."""
    scaled = logits.astype(np.float64) / temperature
    probs = softmax(scaled)
    probs = np.where(probs >= min_p * probs.max(), probs, 0)
    if top_k:
        probs = np.where(probs >= np.sort(probs)[-top_k], probs, 0)
    probs = probs / probs.sum()
    # The smallest set of likeliest tokens that holds at least top_p of the mass.
    order = np.argsort(-probs, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= top_p]] = 0
    return probs / probs.sum()


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def pair_probs(first: np.ndarray, second: Sequence[np.ndarray]) -> np.ndarray:
    """[V, V]: P(first token, second token), from P(first) and P(second | first)."""
    return first[:, None] * np.stack(second)


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """p-value of `counts` under `probs`, rare cells pooled; 0 if anything impossible was seen."""
    counts, probs = counts.ravel(), probs.ravel()
    if counts[probs == 0].any():
        return 0.0
    expected = probs / probs.sum() * counts.sum()
    order = np.argsort(expected)
    expected, counts = expected[order], counts[order]
    pooled = int(np.searchsorted(np.cumsum(expected), MIN_EXPECTED * 2))
    rare = max(pooled, int((expected < MIN_EXPECTED).sum()))
    expected = np.concatenate([[expected[:rare].sum()], expected[rare:]])
    counts = np.concatenate([[counts[:rare].sum()], counts[rare:]])
    keep = expected > 0
    return float(chisquare(counts[keep], expected[keep]).pvalue)
