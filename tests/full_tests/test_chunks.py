"""Where the scheduler cuts a prompt makes no difference, a last piece of a single token included."""

import pytest
from vllm import SamplingParams

from tests.full_tests.engines import engine, first_tokens, generate
from tests.full_tests.prompts import random_prompts
from tests.full_tests.tiny_models import VOCAB

BUDGET = 64
# One more than one and two budgets leaves one token for a step of its own; so do prompts that share a step.
LENGTHS = [1, 2, BUDGET - 1, BUDGET, BUDGET + 1, BUDGET + 2, 2 * BUDGET, 2 * BUDGET + 1]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    "caching", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "prefix-caching"]
)
def test_prompts_in_chunks_give_the_same_tokens(caching: bool, tiny_llama: str) -> None:
    prompts = random_prompts(LENGTHS, VOCAB)
    with engine(tiny_llama, enable_prefix_caching=caching) as llm:
        whole = first_tokens(generate(llm, prompts, GREEDY))
    with engine(tiny_llama, enable_prefix_caching=caching, max_num_batched_tokens=BUDGET) as llm:
        alone = [first_tokens(generate(llm, [prompt], GREEDY))[0] for prompt in prompts]
        together = first_tokens(generate(llm, prompts, GREEDY))
    assert alone == whole
    assert together == whole


def test_same_prompt_many_times_with_few_blocks(tiny_llama: str) -> None:
    """Requests that say the same hit blocks which others fill in the very step that admits them."""
    prompt = random_prompts([40], VOCAB)[0]
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with engine(tiny_llama) as llm:
        expected = first_tokens(generate(llm, [prompt], long))[0]
    with engine(tiny_llama, kv_cache_memory_bytes=1 << 20, block_size=32) as llm:
        assert first_tokens(generate(llm, [prompt] * 24, long)) == [expected] * 24
