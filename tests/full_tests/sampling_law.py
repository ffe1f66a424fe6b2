"""The law a sampled token should follow, computed plainly, and a test of counts against it."""

from collections.abc import Sequence

import numpy as np
from scipy.stats import chisquare

# Cells that expect fewer are pooled: below this the chi-square distribution is a poor approximation.
MIN_EXPECTED = 5


def token_law(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """vLLM's order: temperature, min-p, top-k, top-p; each filter sees what the ones before it left."""
    scaled = logits.astype(np.float64) / temperature
    law = softmax(scaled)
    law = np.where(law >= min_p * law.max(), law, 0)
    if top_k:
        law = np.where(law >= np.sort(law)[-top_k], law, 0)
    law = law / law.sum()
    # The smallest set of likeliest tokens that holds at least top_p of the mass.
    order = np.argsort(-law, kind="stable")
    before = np.cumsum(law[order]) - law[order]
    law[order[before >= top_p]] = 0
    return law / law.sum()


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def pair_law(first: np.ndarray, second: Sequence[np.ndarray]) -> np.ndarray:
    """[V, V]: P(first token, second token), from P(first) and P(second | first)."""
    return first[:, None] * np.stack(second)


def chi_square(counts: np.ndarray, law: np.ndarray) -> float:
    """p-value of `counts` under `law`, rare cells pooled; 0 if anything impossible was seen."""
    counts, law = counts.ravel(), law.ravel()
    if counts[law == 0].any():
        return 0.0
    expected = law / law.sum() * counts.sum()
    order = np.argsort(expected)
    expected, counts = expected[order], counts[order]
    pooled = int(np.searchsorted(np.cumsum(expected), MIN_EXPECTED * 2))
    rare = max(pooled, int((expected < MIN_EXPECTED).sum()))
    expected = np.concatenate([[expected[:rare].sum()], expected[rare:]])
    counts = np.concatenate([[counts[:rare].sum()], counts[rare:]])
    keep = expected > 0
    return float(chisquare(counts[keep], expected[keep]).pvalue)
