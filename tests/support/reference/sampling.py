"""Slow, obvious versions of what sampling/ does with whole tensors: one row and one position in plain Python."""

from __future__ import annotations

import math


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(value - top) for value in logits]
    return [weight / sum(weights) for weight in weights]


def keep_top_k(logits: list[float], k: int) -> set[int]:
    """Keep the k best tokens, and those equal to the last of them."""
    last = sorted(logits, reverse=True)[min(k, len(logits)) - 1]
    return {token for token, value in enumerate(logits) if value >= last}


def keep_top_p(logits: list[float], p: float) -> set[int]:
    """Keep the best tokens until their probability reaches p, and those equal to the last of them."""
    probabilities = softmax(logits)
    reached, last = 0.0, -math.inf
    for token in sorted(range(len(logits)), key=lambda t: -logits[t]):
        last = logits[token]
        reached += probabilities[token]
        if reached >= p:
            break
    return {token for token, value in enumerate(logits) if value >= last}


def keep_min_p(logits: list[float], min_p: float) -> set[int]:
    probabilities = softmax(logits)
    return {token for token, value in enumerate(probabilities) if value >= min_p * max(probabilities)}


def penalize(
    logits: list[float], prompt: list[int], output: list[int], presence: float, frequency: float, repetition: float
) -> list[float]:
    result = list(logits)
    for token in range(len(logits)):
        if token in prompt or token in output:
            result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
        result[token] -= frequency * output.count(token) + presence * (token in output)
    return result


def accept(drafts: list[int], sampled: list[int]) -> list[int]:
    """Apply the strict rule: return the target's own tokens up to and including the first that differs from its
    draft."""
    out: list[int] = []
    for index, token in enumerate(sampled):
        out.append(token)
        if index >= len(drafts) or drafts[index] != token:
            break
    return out
