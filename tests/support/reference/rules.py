"""Slow, obvious versions of the acceptance rules: one row, plain Python, the noise given as numbers.

`target` has a distribution for every position, `drafter` for every draft. Noise: one uniform number for each draft;
standard Gumbel noise for each position and token, one set for residuals and one for the target's own tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Probs = Sequence[float]


@dataclass(frozen=True)
class Noise:
    accept: Sequence[float]
    residual: Sequence[Sequence[float]]
    target: Sequence[Sequence[float]]


def race(weights: Probs, gumbel: Sequence[float]) -> int:
    """Return the token with the largest sum of log-weight and noise."""
    best, best_score = 0, -math.inf
    for token, (weight, noise) in enumerate(zip(weights, gumbel, strict=True)):
        score = math.log(weight) + noise if weight > 0 else -math.inf
        if score > best_score:
            best, best_score = token, score
    return best


def ratio(p: Probs, q: Probs, token: int) -> float:
    return p[token] / q[token] if 0 <= token < len(p) and q[token] > 0 else 0.0


def left_over(p: Probs, q: Probs, weight: float = 1.0) -> list[float]:
    return [max(weight * a - b, 0.0) for a, b in zip(p, q, strict=True)]


def ending(target: Sequence[Probs], drafts: list[int], accepted: int, left: Probs | None, noise: Noise) -> list[int]:
    if left is None or not any(left):
        return [*drafts[:accepted], race(target[accepted], noise.target[accepted])]
    return [*drafts[:accepted], race(left, noise.residual[accepted])]


def standard(target: Sequence[Probs], drafter: Sequence[Probs], drafts: list[int], noise: Noise) -> list[int]:
    for index, draft in enumerate(drafts):
        p, q = target[index], drafter[index]
        if noise.accept[index] >= min(1.0, ratio(p, q, draft)):
            return ending(target, drafts, index, left_over(p, q), noise)
    return ending(target, drafts, len(drafts), None, noise)


def block(target: Sequence[Probs], drafter: Sequence[Probs], drafts: list[int], noise: Noise) -> list[int]:
    accepted, weight, weight_accepted = 0, 1.0, 1.0
    for length in range(1, len(drafts) + 1):
        weight = min(weight * ratio(target[length - 1], drafter[length - 1], drafts[length - 1]), 1.0)
        if length == len(drafts):
            chance = weight
        else:
            surplus = sum(left_over(target[length], drafter[length], weight))
            chance = surplus / (surplus + 1 - weight) if surplus else 0.0
        if noise.accept[length - 1] < chance:
            accepted, weight_accepted = length, weight
    if accepted == len(drafts):
        return ending(target, drafts, accepted, None, noise)
    return ending(target, drafts, accepted, left_over(target[accepted], drafter[accepted], weight_accepted), noise)


def synthetic(target: Sequence[Probs], rates: Sequence[float], drafts: list[int], noise: Noise) -> list[int]:
    accepted, before = 0, 1.0
    for index, draft in enumerate(drafts):
        chance = rates[index] / before if before else 0.0
        if noise.accept[index] >= chance or not 0 <= draft < len(target[index]):
            break
        accepted, before = index + 1, rates[index]
    return ending(target, drafts, accepted, None, noise)
