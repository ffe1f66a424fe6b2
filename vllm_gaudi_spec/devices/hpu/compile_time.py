"""Estimates how many recipes a Gaudi compiles during warm-up, and how long that takes, from published figures.

Equal recipes are compiled once. With a graph break after each layer, a graph is several recipes, many of them equal.
The counts here are those of the emulated card.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_spec.records import PREFILL

if TYPE_CHECKING:
    from vllm_gaudi_spec.records import Shape, WarmUpWork

# From vllm-gaudi's documentation (warmup.md, performance_tuning.md), for an 8B model with a graph break after each
# layer: 24 prompt and 48 decode graphs took 49 s, 24 and 1 took 32 s. It starts in 66 s without a recipe cache, and in
# 23 s with one.
_DECODE_GRAPH = (49 - 32) / (48 - 1)
_PROMPT_GRAPH = (32 - _DECODE_GRAPH) / 24
CACHED = 23 / 66
# Inferred: the embedding with the first layer, the other layers, and the end of the model.
_RECIPES_OF_A_GRAPH = 3
PROMPT_SECONDS = _PROMPT_GRAPH / _RECIPES_OF_A_GRAPH
SECONDS = _DECODE_GRAPH / _RECIPES_OF_A_GRAPH
"""Time to compile any other recipe. No figures are published for recipes of sampling passes and drafters."""


class Recipes(NamedTuple):
    """Numbers of distinct recipes."""

    prompts: int
    others: int

    @property
    def total(self) -> int:
        return self.prompts + self.others

    def seconds(self, *, cached: bool = False) -> float:
        """Estimate the time to compile them, or to load them from a recipe cache if `cached`.

        The figures are of Gaudi 2; none are published for Gaudi 3.
        """
        return (self.prompts * PROMPT_SECONDS + self.others * SECONDS) * (CACHED if cached else 1)


def estimate_recipes(work: WarmUpWork) -> Recipes:
    """Count the recipes of a model with equal layers and a graph break after each."""
    prompts = [shape for shape in work.forwards if shape.phase == PREFILL]
    decodes = [shape for shape in work.forwards if shape.phase != PREFILL]
    others = (
        _count_forward_recipes(decodes, work.num_ranks) + work.num_passes + _RECIPES_OF_A_GRAPH * work.num_drafter_runs
    )
    if work.num_ranks > 1:
        others += work.num_pass_sizes  # each rank's logits, before they are gathered
    return Recipes(_count_forward_recipes(prompts, work.num_ranks), others)


def _count_forward_recipes(shapes: list[Shape], num_ranks: int) -> int:
    """Count the recipes of the target's forwards.

    What does not attend is the same for every context. A collective ends a recipe as well, and what lies between two of
    them depends on the number of tokens alone.
    """
    rectangles = len({(shape.rows, shape.queries) for shape in shapes})
    if num_ranks == 1:
        return 2 * len(shapes) + rectangles
    return 3 * len(shapes) + 2 * rectangles + len({shape.tokens for shape in shapes})
