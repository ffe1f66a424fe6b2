"""Sessions whose input is streamed: vLLM takes the last token of a turn back, and the next turn answers what its tokens
give in a request of their own. A recurrent state that has read that token is of no use then."""

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import chain, count
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.v1.engine.async_llm import AsyncLLM

from tests.full_tests import drafters, tiny_models
from tests.full_tests.engines import engine, first_tokens, generate
from tests.full_tests.prompts import random_prompts
from tests.full_tests.speculation import custom, speculating
from tests.models import checkpoints

SIZES: dict[str, Any] = dict(max_num_seqs=4, block_size=32)
PROMPTS = checkpoints.prompts()
TURNS = random_prompts([9, 1, 40], tiny_models.VOCAB, seed=5)
GREEDY: dict[str, Any] = dict(temperature=0, ignore_eos=True)
_names = count()


@pytest.fixture
def hybrid(made: Callable[[str], str]) -> str:
    return made("qwen3-next")


def turn(llm: LLM, name: str, tokens: list[int], params: SamplingParams) -> list[list[int]]:
    """What each step answers in one turn of the session `name`, as vLLM's AsyncLLM sends it."""
    front = llm.llm_engine
    # A copy of the tokens: in one process the scheduler adds to this list.
    request = front.input_processor.process_inputs(
        name, {"prompt_token_ids": [*tokens]}, params, front.get_supported_tasks(), resumable=True
    )
    front.engine_core.add_request(request)
    steps: list[list[int]] = []
    while True:
        for output in front.engine_core.get_output().outputs:
            steps.append(output.new_token_ids)
            if output.finish_reason is not None:
                return steps


def check_sessions(llm: LLM, texts: list[list[int]]) -> int:
    """Each with a first turn that ends at a stop token, at all of some positions of the answer. `texts` gets what
    follows without it. The most tokens that a step of a first turn answered."""
    most = 0
    for prompt, more in zip(PROMPTS, TURNS, strict=True):
        (text,) = first_tokens(generate(llm, [prompt], SamplingParams(**GREEDY, max_tokens=12)))
        texts.append([*prompt, *text])
        for stop in (index for index in range(3, 9) if text[index] not in text[:index]):
            name = f"session-{next(_names)}"
            steps = turn(llm, name, prompt, SamplingParams(**GREEDY, max_tokens=40, stop_token_ids=[text[stop]]))
            assert [*chain(*steps)] == text[: stop + 1]
            most = max(most, *map(len, steps))
            alone = SamplingParams(**GREEDY, max_tokens=16, skip_reading_prefix_cache=True)
            (expected,) = first_tokens(generate(llm, [[*prompt, *text[:stop], *more]], alone))
            steps = turn(llm, name, more, SamplingParams(**GREEDY, max_tokens=16))
            assert [*chain(*steps)] == expected, (len(prompt), stop)
            llm.llm_engine.engine_core.abort_requests([name])
    return most


@pytest.mark.parametrize("prefix_cache", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_token_that_was_taken_back_is_in_no_state(prefix_cache: bool, hybrid: str) -> None:
    with engine(hybrid, async_scheduling=True, enable_prefix_caching=prefix_cache, **SIZES) as llm:
        assert check_sessions(llm, []) == 1


@pytest.mark.slow
def test_drafts_after_a_stop_token(hybrid: str) -> None:
    """They are accepted: whatever the answer goes on with is drafted."""
    texts: list[list[int]] = []

    def write(context: list[int], k: int) -> list[int]:
        return next((text[len(context) :][:k] for text in texts if text[: len(context)] == context), [])

    drafters.play(write)
    with speculating(hybrid, custom("Scripted"), async_scheduling=False, **SIZES) as llm:
        assert check_sessions(llm, texts) == 4


@pytest.mark.slow
def test_drafts_on_the_device(hybrid: str) -> None:
    """The next step has begun after what was accepted."""
    config = dict(method="draft_model", model=f"{hybrid}/{checkpoints.DRAFTER}", num_speculative_tokens=3)
    with speculating(hybrid, config, async_scheduling=True, **SIZES) as llm:
        assert check_sessions(llm, []) > 1


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.5])
def test_session_beyond_max_model_len_ends_alone(pause: float, tiny_llama: str) -> None:
    """In vLLM's own front end, whose client sends all turns at once, or goes on after the error."""
    params = SamplingParams(**GREEDY, max_tokens=5)
    args = AsyncEngineArgs(model=tiny_llama, max_model_len=64, max_num_seqs=4, kv_cache_memory_bytes=64 << 20)

    async def turns() -> AsyncIterator[StreamingInput]:
        for tokens in ([5] * 10, [6] * 55, [7] * 3):
            yield StreamingInput({"prompt_token_ids": tokens})
            await asyncio.sleep(pause)

    async def ended(front: AsyncLLM, asked: Any, name: str) -> list[str | None]:
        return [output.outputs[0].finish_reason async for output in front.generate(asked, params, name)]

    async def ask_both() -> tuple[list[str | None], list[str | None]]:
        front = AsyncLLM.from_engine_args(args)
        try:
            first = await asyncio.wait_for(ended(front, turns(), "session"), 60)
            return first, await ended(front, {"prompt_token_ids": [5, 6, 7]}, "other")
        finally:
            front.shutdown()

    session, other = asyncio.run(ask_both())
    assert session[-1] == "error"
    assert session.count("length") == 1, "the first turn, and none that has forgotten it"
    assert other[-1] == "length"
