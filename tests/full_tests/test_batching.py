"""64 concurrent requests give the outputs that each gives alone, however the scheduler cuts and interrupts them."""

import pytest
from vllm import SamplingParams

from tests.full_tests.engines import counter, engine, first_tokens, generate
from tests.full_tests.prompts import random_prompts
from tests.full_tests.tiny_models import VOCAB
from tests.full_tests.workload import Answer, Request, check_same, mixed_requests, run_alone, run_together

CACHED = dict(enable_prefix_caching=True)
UNCACHED = dict(enable_prefix_caching=False)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return mixed_requests()


@pytest.fixture(scope="module")
def alone(tiny_llama: str, requests: list[Request]) -> list[list[Answer]]:
    """The reference: one after the other, whole prompts, no prefix cache, all the memory there is."""
    with engine(tiny_llama, **UNCACHED) as llm:
        result = run_alone(llm, requests)
    reasons = {answer.finish_reason for answers in result for answer in answers}
    assert reasons == {"stop", "length"}, "the workload should end in more than one way"
    assert any(isinstance(answer.stop_reason, str) for answers in result for answer in answers)
    return result


def test_together(tiny_llama: str, requests: list[Request], alone: list[list[Answer]]) -> None:
    with engine(tiny_llama, **UNCACHED) as llm:
        check_same(requests, run_together(llm, requests), alone)
        # Another order, other neighbors, other rows.
        backwards = requests[::-1]
        check_same(backwards, run_together(llm, backwards), alone[::-1])


def test_prefix_cache(tiny_llama: str, requests: list[Request], alone: list[list[Answer]]) -> None:
    with engine(tiny_llama, **CACHED) as llm:
        check_same(requests, run_together(llm, requests), alone)
        before = counter(llm, "vllm:prefix_cache_hits")
        check_same(requests, run_together(llm, requests), alone)
        assert counter(llm, "vllm:prefix_cache_hits") - before > 1000


def test_same_prompt_many_times_with_few_blocks(tiny_llama: str) -> None:
    """Requests that say the same hit blocks which others fill in the very step that admits them."""
    prompt = random_prompts([40], VOCAB)[0]
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with engine(tiny_llama) as llm:
        expected = first_tokens(generate(llm, [prompt], long))[0]
    with engine(tiny_llama, kv_cache_memory_bytes=1 << 20, block_size=32) as llm:
        assert first_tokens(generate(llm, [prompt] * 24, long)) == [expected] * 24
