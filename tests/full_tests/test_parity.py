"""Greedy tokens equal those of transformers in float32: on the demo model, and on families of models."""

from collections.abc import Callable

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams

from tests.full_tests.engines import engine, first_tokens, generate
from tests.full_tests.equality import Tally
from tests.full_tests.prompts import PROMPTS, random_prompts
from tests.full_tests.reference import Reference
from tests.full_tests.tiny_models import VOCAB

# Shorter than a block, around a power of two, and well past both families' sliding windows (32 and 64).
LENGTHS = [3, 17, 32, 63, 90, 150]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def test_demo_model_equals_transformers(demo_model: str) -> None:
    """20 prompts x 64 tokens. Each token is held against transformers' logits after all tokens before it, which is what
    transformers' greedy loop would have seen, at the price of one forward pass per prompt."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    assert len(prompts) == 20
    with engine(demo_model, kv_cache_memory_bytes=256 << 20) as llm:
        outputs = first_tokens(generate(llm, prompts, greedy(64)))
    reference, tally = Reference(demo_model), Tally()
    for text, prompt, output in zip(PROMPTS, prompts, outputs, strict=False):
        assert len(output) == 64
        tally.greedy(text[:30], output, reference.logits_after(prompt, output))
    # One prompt through transformers' own loop, so that the short cut above is not taken on trust.
    logits = reference.logits_after(prompts[0], outputs[0])
    tally.compare("generate", outputs[0], reference.greedy(prompts[0], 64), logits.__getitem__)
    tally.check()


# test_models.py and `make verify-models` compare the others, with drafts and without.
@pytest.mark.parametrize("family", ["mixtral", "deepseek_lite"])
def test_family_equals_transformers(family: str, tiny: Callable[[str], str]) -> None:
    prompts = random_prompts(LENGTHS, VOCAB)
    with engine(tiny(family)) as llm:
        together = first_tokens(generate(llm, prompts, greedy(40)))
        alone = [first_tokens(generate(llm, [prompt], greedy(40)))[0] for prompt in prompts]
    reference, tally = Reference(tiny(family)), Tally()
    for prompt, *outputs in zip(prompts, together, alone, strict=False):
        expected = reference.greedy(prompt, 40)
        logits = reference.logits_after(prompt, expected)
        for output in outputs:
            tally.compare(f"{family}, prompt of {len(prompt)}", output, expected, logits.__getitem__)
    # A model that repeats one token would agree with anything that gets the first step right.
    assert len({token for output in together for token in output}) > 40
    tally.check()
