"""A drafter that is the target is always right, unless it has not read all of the context: after steps without drafts,
or where the prefix cache shares blocks that only the target has written."""

from collections.abc import Callable

import pytest
from vllm import LLM, SamplingParams

from tests.full_tests.engines import counter, engine, first_tokens, generate
from tests.full_tests.prompts import random_prompts
from tests.full_tests.speculation import accepted, account, speculating
from tests.full_tests.tiny_models import VOCAB

OFF = {"num_speculative_tokens": 0}


def greedy(num_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **options)


def counts(llm: LLM) -> tuple[int, int]:
    return int(counter(llm, "vllm:spec_decode_num_draft_tokens")), int(accepted(llm))


@pytest.mark.parametrize("overlapping", [pytest.param(False, marks=pytest.mark.slow), True])
def test_drafter_reads_shared_blocks_that_only_the_target_has_written(overlapping: bool, tiny_llama: str) -> None:
    prompts = random_prompts([20, 45, 70, 150], VOCAB)
    config = dict(method="draft_model", model=tiny_llama, num_speculative_tokens=4)
    with speculating(tiny_llama, config, async_scheduling=overlapping) as llm:
        answers = first_tokens(generate(llm, prompts, greedy(100, extra_args=OFF)))
        assert counts(llm) == (0, 0)
        turns = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(prompts, answers, strict=True)]
        outputs = generate(llm, turns, greedy(40))
        assert all(output.num_cached_tokens for output in outputs)
        drafted, right = counts(llm)
    assert drafted > 100
    assert right > 0.97 * drafted, f"{right} of {drafted}"


@pytest.mark.parametrize("overlapping", [pytest.param(False, marks=pytest.mark.slow), True])
def test_drafter_catches_up_when_the_load_falls(overlapping: bool, tiny_llama: str) -> None:
    """Up to two requests at a time draft, more of them do not: the last two fall behind by some 60 tokens."""
    prompts = random_prompts([20, 45, 70, 150], VOCAB, seed=2)
    config = dict(
        method="draft_model",
        model=tiny_llama,
        num_speculative_tokens=4,
        num_speculative_tokens_per_batch_size=[[1, 2, 4], [3, 64, 0]],
    )
    with speculating(tiny_llama, config, async_scheduling=overlapping) as llm:
        outputs = generate(llm, prompts, [greedy(length) for length in (60, 60, 120, 120)])
    for output in outputs[2:]:
        drafted, right = (sum(numbers) for numbers in account(output))
        assert drafted > 30
        assert right > 0.97 * drafted, f"{right} of {drafted}"


@pytest.mark.slow
@pytest.mark.parametrize("overlapping", [False, True])
def test_drafter_with_sliding_windows_writes_no_block_of_others(overlapping: bool, tiny: Callable[[str], str]) -> None:
    """vLLM hands blocks behind a window to others, and the worker is not told: a drafter that catches up would write
    into a neighbor's."""
    target, drafter = tiny("llama"), tiny("gemma3")
    prompts = random_prompts([20, 45, 70], VOCAB, seed=2)
    params = [greedy(length) for length in (440, 440, 200)]
    config = dict(
        method="draft_model",
        model=drafter,
        num_speculative_tokens=4,
        num_speculative_tokens_per_batch_size=[[1, 2, 4], [3, 64, 0]],
    )
    with engine(target, block_size=32) as llm:
        plain = first_tokens(generate(llm, prompts, params))
    with speculating(target, config, block_size=32, async_scheduling=overlapping) as llm:
        outputs = generate(llm, prompts, params)
    assert first_tokens(outputs) == plain
    assert sum(account(outputs[0]).drafted) > 100
