"""On emulated cards: latent attention and experts say what transformers says, with all programs made in warm-up."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm import SamplingParams

from tests.full_tests.engines import counter, engine, first_tokens, generate
from tests.full_tests.equality import Tally
from tests.full_tests.prompts import random_prompts
from tests.full_tests.reference import Reference
from tests.full_tests.tiny_models import VOCAB
from vllm_gaudi_spec.devices import describe_device
from vllm_gaudi_spec.environment import requested_device

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("own_cache")]

SIZES: dict[str, Any] = dict(max_num_seqs=4, max_model_len=512, max_num_batched_tokens=256)


@pytest.mark.parametrize(
    "family",
    [
        "deepseek",
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("deepseek_lite", "mixtral", "qwen3_moe")),
    ],
)
def test_greedy_tokens_are_those_of_transformers(family: str, tiny: Callable[[str], str]) -> None:
    assert describe_device()["device"] == requested_device()
    # Within a block, over a block's end, and in two chunks of which the second reads the first; the last two share it.
    prompts = random_prompts([5, 120, 300], VOCAB)
    prompts.append(prompts[-1][:290] + prompts[0])
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with engine(tiny(family), enable_prefix_caching=True, **SIZES) as llm:
        outputs = first_tokens(generate(llm, prompts[:-1], params)) + first_tokens(generate(llm, prompts[-1:], params))
        assert counter(llm, "vllm:prefix_cache_hits") > 0
    reference, tally = Reference(tiny(family)), Tally()
    for prompt, output in zip(prompts, outputs, strict=True):
        tally.greedy(f"{family}, prompt of {len(prompt)}", output, reference.logits_after(prompt, output))
    tally.check()
