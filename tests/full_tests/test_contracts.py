"""Check contracts with vLLM that users hardly see: aborts, logits processors, sleep, engines one after another."""

from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from tests.full_tests.engines import engine, first_tokens, generate
from tests.full_tests.prompts import random_prompts
from tests.full_tests.tiny_models import VOCAB

PROMPTS = random_prompts([5, 70, 33, 150, 12, 64], VOCAB)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def greedy(tiny_llama: str) -> list[list[int]]:
    with engine(tiny_llama) as llm:
        return first_tokens(generate(llm, PROMPTS, GREEDY))


def test_abort_leaves_no_trace(tiny_llama: str, greedy: list[list[int]]) -> None:
    """Requests that go away mid-flight, one of them while waiting, and their ids used again."""
    with engine(tiny_llama, max_num_seqs=4, enable_prefix_caching=False) as llm:
        step = llm.llm_engine
        ids = [add(step, index) for index in range(len(PROMPTS))]
        for _ in range(6):
            step.step()
        # The first is running, the last still waits: only four may run at once.
        step.abort_request([ids[0], ids[-1]], internal=True)
        assert finish(step) == {index: greedy[index] for index in range(1, len(PROMPTS) - 1)}
        for index in (0, len(PROMPTS) - 1):
            add(step, index)
        assert finish(step) == {index: greedy[index] for index in (0, len(PROMPTS) - 1)}


def add(step: Any, index: int) -> str:
    return step.add_request(str(index), {"prompt_token_ids": PROMPTS[index]}, GREEDY)


def finish(step: Any) -> dict[int, list[int]]:
    done = {}
    while step.has_unfinished_requests():
        for output in step.step():
            if output.finished:
                done[int(output.request_id.split("-")[0])] = list(output.outputs[0].token_ids)
    return done


class Only(AdapterLogitsProcessor):
    """From its second token on, a request with `extra_args={"only": id}` may say nothing but that token."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        wanted = (params.extra_args or {}).get("only")
        if wanted is None:
            return None

        def apply(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if not output_ids:
                return logits
            kept = logits[wanted].item()
            logits.fill_(float("-inf"))
            logits[wanted] = kept
            return logits

        return apply


def test_custom_logits_processor(tiny_llama: str, greedy: list[list[int]]) -> None:
    """Every second request is under it; they end at different times, so that rows move or are used again."""
    lengths = [3, 24, 9, 24, 24, 2]
    params = [
        SamplingParams(
            temperature=0, max_tokens=n, ignore_eos=True, extra_args={"only": 100 + i} if i % 2 == 0 else None
        )
        for i, n in enumerate(lengths)
    ]
    with engine(tiny_llama, logits_processors=[Only], max_num_seqs=4) as llm:
        outputs = first_tokens(generate(llm, PROMPTS, params))
    for index, (output, length) in enumerate(zip(outputs, lengths, strict=False)):
        free = greedy[index][:length]
        assert output == (free if index % 2 else free[:1] + [100 + index] * (length - 1))


def test_engine_starts_after_another_ended_or_failed(tiny_llama: str, greedy: list[list[int]]) -> None:
    with pytest.raises(Exception, match=r"(?i)kv cache"), engine(tiny_llama, kv_cache_memory_bytes=100_000):
        pass
    with engine(tiny_llama) as llm:
        assert first_tokens(generate(llm, PROMPTS, GREEDY)) == greedy


def test_paused_requests_continue(tiny_llama: str, greedy: list[list[int]]) -> None:
    """Sleep level 0 stops scheduling and keeps the requests; every platform has it."""
    with engine(tiny_llama) as llm:
        ids = [add(llm.llm_engine, index) for index in range(len(PROMPTS))]
        assert len(ids) == len(PROMPTS)
        for _ in range(5):
            llm.llm_engine.step()
        llm.sleep(level=0, mode="keep")
        llm.wake_up(tags=["scheduling"])
        assert finish(llm.llm_engine) == dict(enumerate(greedy))
