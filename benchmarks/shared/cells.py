"""Cells of a comparison: the workload of each cell, random cells, and prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

PLAIN = "no speculation"
GREEDY, SAMPLED = (0.0, 1.0), (0.7, 0.9)
"""Temperature and top-p of the fixed cells."""
MOST_DRAFTS = 5
Histogram = Sequence[tuple[float, int]]
"""Pairs of a fraction and a number of tokens, where this fraction of requests has fewer tokens, ascending."""
# Table 1 of "Llumnix: Dynamic Scheduling for Large Language Model Serving" (OSDI 2024, arXiv 2406.03243) contains the
# fractions from 0.5 to 0.99 for ShareGPT conversations with GPT-4. The first and last entries are our choice; those for
# outputs ensure that there are steps to measure.
PROMPT_TOKENS: Histogram = ((0, 4), (0.5, 74), (0.8, 348), (0.95, 1484), (0.99, 3388), (1, 4096))
OUTPUT_TOKENS: Histogram = ((0, 16), (0.5, 487), (0.8, 781), (0.95, 988), (0.99, 1234), (1, 2048))


@dataclass(frozen=True)
class Cell:
    method: str
    num_drafts: int
    prompts: tuple[int, ...]
    """Number of tokens in the prompt of each request."""
    tokens: int
    """Number of tokens to generate for each request."""
    temperature: float
    top_p: float

    @property
    def setup(self) -> tuple[str, int]:
        """Return the setup of the engines. Cells with the same setup share engines."""
        return self.method, self.num_drafts

    @property
    def batch(self) -> int:
        return len(self.prompts)

    @property
    def length(self) -> int:
        """Return the maximum number of tokens in a request, including drafts."""
        return max(self.prompts) + self.tokens + self.num_drafts + 1

    def fits(self, limits: Limits) -> bool:
        return (
            self.batch <= limits.batch
            and max(self.prompts) <= limits.prompt_tokens
            and self.tokens <= limits.output_tokens
        )


@dataclass(frozen=True)
class Limits:
    """Upper limits for the size of random cells."""

    batch: int
    prompt_tokens: int
    output_tokens: int


def draw_lengths(rng: np.random.Generator, histogram: Histogram, count: int, most: int) -> list[int]:
    """Return random lengths from a histogram, limited to requests with at most `most` tokens."""
    shares, lengths = zip(*histogram, strict=True)
    drawn = rng.uniform(0, np.interp(most, lengths, shares), count)
    return [int(length) for length in np.interp(drawn, shares, lengths).round()]


def draw_cells(seed: int, count: int, methods: Sequence[str], num_setups: int, limits: Limits) -> list[Cell]:
    """Return random cells: every other one without drafts, and the rest with one of `num_setups` random combinations of
    a method and a number of drafts.

    Batch sizes are uniform on a logarithmic scale. Half of the cells are greedy; the others have a temperature from 0.5
    to 1 and a top-p from 0.8 to 1. With the same seed, a larger number of cells begins with the same cells.
    """
    rng = np.random.default_rng(seed)
    drafting = rng.permutation([method for method in methods if method != PLAIN])
    setups = [
        (str(drafting[index % len(drafting)]), int(rng.integers(1, MOST_DRAFTS + 1)))
        for index in range(num_setups if len(drafting) else 0)
    ]
    if PLAIN in methods:
        setups = [setup for drafts in setups or [(PLAIN, 0)] for setup in ((PLAIN, 0), drafts)]
    cells = []
    for index in range(count):
        batch = int(np.exp(rng.uniform(0, np.log(limits.batch + 1))))
        prompts = tuple(draw_lengths(rng, PROMPT_TOKENS, batch, limits.prompt_tokens))
        (tokens,) = draw_lengths(rng, OUTPUT_TOKENS, 1, limits.output_tokens)
        sampling = round(rng.uniform(0.5, 1), 2), round(rng.uniform(0.8, 1), 2)
        if rng.integers(2):
            sampling = GREEDY
        cells.append(Cell(*setups[index % len(setups)], prompts, tokens, *sampling))
    return cells


def draw_prompt_cells(seed: int, count: int, longest: int) -> list[Cell]:
    """Choose random prompt lengths of at least 100 tokens, and return a cell for each length with 1, 8 and 32 requests.

    Lengths are uniformly distributed on a logarithmic scale.
    """
    lengths = np.exp(np.random.default_rng(seed).uniform(np.log(100), np.log(longest), count)).round()
    return [Cell(PLAIN, 0, (int(length),) * batch, 4, *GREEDY) for length in sorted(lengths) for batch in (1, 8, 32)]


def tail(texts: Sequence[Sequence[int]], last: int, length: int) -> list[int]:
    """Return the last tokens of the texts up to index `last`, continuing from the last text at the first."""
    prompt: list[int] = []
    while len(prompt) < length:
        prompt[:0] = texts[last % len(texts)]
        last -= 1
    return prompt[-length:]


def write_prompts(cell: Cell, seed: Iterable[int], texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the prompts of a cell: the ends of texts or, if there are no texts, random IDs in every vocabulary."""
    rng = np.random.default_rng(list(seed))
    if texts:
        return [tail(texts, int(rng.integers(len(texts))), length) for length in cell.prompts]
    return [rng.integers(3, 512, length).tolist() for length in cell.prompts]
