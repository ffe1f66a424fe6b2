"""DeepSeek-V3's layers, latent attention and grouped experts, against transformers: every score, and every KV path."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import RequestOutput, SamplingParams

from tests.full_tests.engines import SMALL_KV, counter, engine, generate
from tests.full_tests.prompts import random_prompts
from tests.full_tests.reference import Reference
from tests.full_tests.speculation import accepted, speculating
from tests.full_tests.tiny_models import VOCAB, save_deepseek_with_mtp
from tests.full_tests.workload import differences, mixed_requests, run_together

CLOSE = 1e-4
# Several blocks, and several chunks of the 64 tokens that a step gets here.
LENGTHS = [3, 33, 90, 200]


def check_scores(reference: Reference, prompts: list[list[int]], outputs: list[RequestOutput]) -> None:
    """Log-probabilities of all tokens, those of the prompt too, and of the likeliest ones at each place."""
    for prompt, result in zip(prompts, outputs, strict=True):
        (output,) = result.outputs
        laws = reference.logits_after(prompt[:1], prompt[1:] + list(output.token_ids)).log_softmax(-1)
        assert result.prompt_logprobs is not None
        assert output.logprobs is not None
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


@pytest.mark.parametrize(
    ("k", "options"),
    [
        (3, dict(rejection_sample_method="strict", draft_sample_method="coupled")),
        pytest.param(1, {}, marks=pytest.mark.slow),
        pytest.param(2, {}, marks=pytest.mark.slow),
    ],
)
def test_mtp_layer_is_lossless(k: int, options: dict[str, Any], tmp_path: Path) -> None:
    """DeepSeek's MTP layer, of latent attention and experts too: whatever it drafts, greedy and seeded texts stay."""
    model, requests = save_deepseek_with_mtp(tmp_path), mixed_requests(32)
    with engine(model) as llm:
        expected = run_together(llm, requests)
    config = dict(method="mtp", num_speculative_tokens=k, **options)
    with speculating(model, config, max_num_batched_tokens=64, **SMALL_KV) as llm:
        different = differences(requests, run_together(llm, requests), expected)
        assert not different, f"{len(different)} of {len(requests)} differ\n" + "\n".join(different[:5])
        assert accepted(llm) > 0.2 * counter(llm, "vllm:spec_decode_num_draft_tokens")
