"""Greedy tokens with n-gram and suffix drafts equal those without: 20 prompts x 128 tokens on the demo model, however
the scheduler cuts and interrupts them, for few and many drafts."""

from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

from tests.full_tests.engines import counter, engine, first_tokens, generate, preemptions
from tests.full_tests.equality import Tally
from tests.full_tests.prompts import PROMPTS
from tests.full_tests.reference import Reference
from tests.full_tests.speculation import METHODS, accepted, speculating

NUM_TOKENS = 128
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

# 45 KiB of KV a token: room for all of the 20 requests, or for about a thousand tokens where they want four thousand.
ROOMY = dict(kv_cache_memory_bytes=256 << 20)
SMALL = dict(kv_cache_memory_bytes=48 << 20, block_size=32)
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": ROOMY | dict(enable_prefix_caching=False),
    "cached": ROOMY | dict(enable_prefix_caching=True),
    "chunked": ROOMY | dict(enable_prefix_caching=False, max_num_batched_tokens=64),
    "preempted": SMALL | dict(enable_prefix_caching=False),
    "everything": SMALL | dict(enable_prefix_caching=True, max_num_batched_tokens=64),
}


class Run(NamedTuple):
    prompts: list[list[int]]
    outputs: list[list[int]]


@pytest.fixture(scope="module")
def reference(demo_model: str) -> Reference:
    return Reference(demo_model)


@pytest.fixture(scope="module")
def plain(demo_model: str) -> Run:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    assert len(prompts) == 20
    with engine(demo_model, **ROOMY, max_num_seqs=32) as llm:
        return Run(prompts, first_tokens(generate(llm, prompts, GREEDY)))


def check(llm: LLM, plain: Run, reference: Reference) -> None:
    before, tally = accepted(llm), Tally()
    outputs = first_tokens(generate(llm, plain.prompts, GREEDY))
    assert accepted(llm) - before > 200, "too little was accepted for this to show anything"
    for text, prompt, output, expected in zip(PROMPTS, plain.prompts, outputs, plain.outputs, strict=True):

        def scores(position: int, prompt: list[int] = prompt, expected: list[int] = expected) -> Any:
            return reference.next_logits(prompt + expected[:position])

        tally.compare(text[:30], output, expected, scores)
    tally.check()


ALL = [(method, k, schedule) for method in METHODS for k in (1, 3, 5, 8) for schedule in SCHEDULES]
QUICK = [("ngram", 5, "everything")]


@pytest.mark.parametrize(
    ("method", "k", "schedule"), [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in ALL if c not in QUICK)]
)
def test_greedy(method: str, k: int, schedule: str, demo_model: str, plain: Run, reference: Reference) -> None:
    with speculating(demo_model, METHODS[method](k), max_num_seqs=32, **SCHEDULES[schedule]) as llm:
        check(llm, plain, reference)
        if schedule == "cached":  # once more, with every prompt in the cache
            check(llm, plain, reference)
            assert counter(llm, "vllm:prefix_cache_hits") > 0
        assert (preemptions(llm) > 0) == (schedule in ("preempted", "everything"))
