"""Weights of another format serve target and drafter, and speculation says what the same weights say without it."""

from typing import Any

import pytest
from vllm import SamplingParams

from tests.full_tests.engines import counter, engine, first_tokens, generate
from tests.full_tests.prompts import PROMPTS
from tests.support.marks import quick_and_slow

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
OPTIONS: dict[str, Any] = dict(max_num_seqs=4, max_model_len=256, enable_prefix_caching=False)


@pytest.mark.parametrize("weights", quick_and_slow(["float16"], ["float32"]))
def test_speculation_changes_nothing(weights: str, looping_llama: str) -> None:
    """Rows are computed alike whatever stands beside them, so there are no ties. The target drafts for itself."""
    chosen = dict(additional_config={"gaudi_spec": {"cpu_weights": weights}}, **OPTIONS)
    prompts = [[ord(letter) % 200 + 2 for letter in text] for text in PROMPTS[:4]]
    drafts = dict(method="draft_model", model=looping_llama, num_speculative_tokens=3)
    with engine(looping_llama, **chosen) as llm:
        plain = first_tokens(generate(llm, prompts, GREEDY))
    with engine(looping_llama, speculative_config=drafts, **chosen) as llm:
        assert first_tokens(generate(llm, prompts, GREEDY)) == plain
        assert counter(llm, "vllm:spec_decode_num_accepted_tokens") > 0
