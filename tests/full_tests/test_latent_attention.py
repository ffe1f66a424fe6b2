"""DeepSeek-V3's layers, latent attention and grouped experts, against transformers: every score, and every KV path."""

from collections.abc import Callable

import pytest
from vllm import RequestOutput, SamplingParams

from tests.full_tests.engines import engine, generate
from tests.full_tests.prompts import random_prompts
from tests.full_tests.reference import Reference
from tests.full_tests.tiny_models import VOCAB

CLOSE = 1e-4
# Several blocks, and several chunks of the 64 tokens that a step gets here.
LENGTHS = [3, 33, 90, 200]


def check_scores(reference: Reference, prompts: list[list[int]], outputs: list[RequestOutput]) -> None:
    """Log-probabilities of all tokens, those of the prompt too, and of the likeliest ones at each place."""
    for prompt, result in zip(prompts, outputs, strict=True):
        (output,) = result.outputs
        laws = reference.logits_after(prompt[:1], prompt[1:] + list(output.token_ids)).log_softmax(-1)
        reported = [*result.prompt_logprobs[1:], *output.logprobs]
        assert len(reported) == len(laws)
        for law, scores in zip(laws, reported, strict=True):
            assert scores is not None
            for token, score in scores.items():
                assert score.logprob == pytest.approx(float(law[token]), abs=CLOSE)


@pytest.mark.parametrize("family", ["deepseek", "deepseek_lite"])
def test_logprobs_equal_transformers(family: str, tiny: Callable[[str], str]) -> None:
    prompts = random_prompts(LENGTHS, VOCAB)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=5, prompt_logprobs=5)
    with engine(tiny(family), max_num_batched_tokens=64) as llm:
        outputs = generate(llm, prompts, params)
    check_scores(Reference(tiny(family)), prompts, outputs)
