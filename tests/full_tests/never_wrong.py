"""What a head that follows its target's rule (rule_models.py) is asked on a card: it is never wrong, past its own limit
and through blocks that the prefix cache shares, so a slot of KV that is wrong shows as a draft that is."""

from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams

from tests.full_tests import rule_models
from tests.full_tests.engines import first_tokens, generate
from tests.full_tests.speculation import accounts

SIZES: dict[str, Any] = dict(max_num_seqs=3, max_model_len=256, max_num_batched_tokens=64, skip_tokenizer_init=True)
SIZES["async_scheduling"] = False  # else the host allows for more than there is
LIMIT = dict(max_model_len=200)
"""Of the head."""


def ask(llm: LLM, beside: Sequence[tuple[list[int], SamplingParams]] = ()) -> None:
    """`beside`: requests that run before and after these, whose answers are not looked at."""
    prompts = [*rule_models.prompts(3, length=112), *rule_models.prompts(2, length=30, seed=2)]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False)
    asked = [*beside, *((prompt, params) for prompt in prompts), *beside]
    outputs = generate(llm, [prompt for prompt, _ in asked], [params for _, params in asked])
    outputs = outputs[len(beside) : len(beside) + len(prompts)]
    assert first_tokens(outputs) == [rule_models.continuation(prompt, 100) for prompt in prompts]
    for steps in accounts(outputs):
        assert steps.accepted == steps.drafted
        assert sum(steps.drafted) > 30
