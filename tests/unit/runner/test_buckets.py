"""Lists of sizes, and batches that exceed lists of users."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams

from tests.support.small_engine import RETOKENIZE, ROOMY, SmallEngine, Variant, greedy_text
from vllm_gaudi_spec.records import Shape
from vllm_gaudi_spec.runner.buckets import divided_powers, geometric, round_up


@pytest.mark.parametrize(("step", "parts", "most_sizes"), [(0, 4, 10), (1, 4, 30), (16, 4, 18), (16, 2, 13)])
def test_batch_sizes_cover_every_batch_and_end_at_the_largest(step: int, parts: int, most_sizes: int) -> None:
    for largest in range(1, 300):
        sizes = divided_powers(1, largest, step, parts)
        assert sizes[0] == 1
        assert sizes[-1] == largest
        assert len(sizes) <= most_sizes
        for small, large in pairwise(sizes):
            assert small < large <= 2 * small, "at most half of a step is padding"
            assert not step or large - small <= max(step, small // parts)


@pytest.mark.parametrize("smallest", [1, 16, 128])
@pytest.mark.parametrize("growth", [1.25, 2.0])
def test_growing_lists_are_multiples_that_cover_the_largest(smallest: int, growth: float) -> None:
    for largest in (1, 7, 16, 17, 100, 127, 128, 129, 1000, 2048, 8191):
        sizes = geometric(smallest, largest, growth)
        assert sizes[0] == smallest
        assert sizes[-1] == round_up(max(largest, 1), smallest)
        assert all(size % smallest == 0 for size in sizes)
        assert all(small < large <= max(small * growth, small + smallest) for small, large in pairwise(sizes))


@pytest.mark.parametrize("method", [None, "ngram", "ngram_gpu", "draft_model", RETOKENIZE], ids=str)
def test_batches_beyond_short_lists_are_served(method: str | None, tmp_path: Path) -> None:
    """Batches exceed a list that ends at two rows, and prompt chunks one that ends at 8 tokens. The engine checks every
    step."""
    engine = SmallEngine(Variant(method, num_blocks=ROOMY, short_lists=True), tmp_path)
    prompts = {f"r{size}": [7 + size % 3] * size for size in (3, 18, 19, 20, 2)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    with torch.inference_mode():
        engine.finish()
    assert engine.texts == {name: greedy_text(prompt, 24) for name, prompt in prompts.items()}
    late = [signature for signature in engine.runner.recorder.unexpected if isinstance(signature, Shape)]
    assert {shape.phase for shape in late} == {"decode", "prefill"}
