"""What a Gaudi compiles in warm-up, and how long that takes: an estimate from what others published.

A recipe is what is compiled: equal ones are compiled once. With a marker after each layer a graph is several recipes,
and many of them are equal; the emulated card counts them, and the numbers here are its.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_spec.records import PREFILL

if TYPE_CHECKING:
    from vllm_gaudi_spec.records import Shape, WarmUpWork

# vllm-gaudi's documentation (warmup.md, performance_tuning.md), an 8B model with a marker after each layer: 24 prompt
# and 48 decode graphs took 49 s, 24 and 1 took 32 s. Without a recipe cache it starts in 66 s, with one in 23 s.
_DECODE_GRAPH = (49 - 32) / (48 - 1)
_PROMPT_GRAPH = (32 - _DECODE_GRAPH) / 24
CACHED = 23 / 66
# Inferred: the first layer with the embedding, the other layers, and the end of the model.
_RECIPES_OF_A_GRAPH = 3
PROMPT_SECONDS = _PROMPT_GRAPH / _RECIPES_OF_A_GRAPH
SECONDS = _DECODE_GRAPH / _RECIPES_OF_A_GRAPH
"""Of any other recipe. Those of a sampling pass or a drafter may take longer or shorter: nobody published it."""


class Recipes(NamedTuple):
    """Different ones."""

    prompts: int
    others: int

    @property
    def total(self) -> int:
        return self.prompts + self.others

    def seconds(self, *, cached: bool = False) -> float:
        """Estimate of compiling them, for either card: of Gaudi 3 no times are published. `cached`: from a recipe
        cache."""
        return (self.prompts * PROMPT_SECONDS + self.others * SECONDS) * (CACHED if cached else 1)


def recipes_of(work: WarmUpWork) -> Recipes:
    """As the emulated card counts them, of a model with equal layers and a marker after each."""
    prompts = [shape for shape in work.forwards if shape.phase == PREFILL]
    decodes = [shape for shape in work.forwards if shape.phase != PREFILL]
    others = _of_forwards(decodes, work.num_ranks) + work.num_passes + _RECIPES_OF_A_GRAPH * work.num_drafter_runs
    if work.num_ranks > 1:
        others += work.num_pass_sizes  # the logits of a rank, before they are gathered
    return Recipes(_of_forwards(prompts, work.num_ranks), others)


def _of_forwards(shapes: list[Shape], num_ranks: int) -> int:
    """What does not attend is the same for every context. A collective ends a recipe too: what is between two of them
    depends on the number of tokens alone."""
    rectangles = len({(shape.rows, shape.queries) for shape in shapes})
    if num_ranks == 1:
        return 2 * len(shapes) + rectangles
    return 3 * len(shapes) + 2 * rectangles + len({shape.tokens for shape in shapes})
