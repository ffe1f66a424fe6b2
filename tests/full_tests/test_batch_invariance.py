"""Check that `batch_invariant` keeps answers equal bit for bit under neighbors, chunks, preemptions and drafts."""

from typing import Any

import pytest
import torch
from vllm import RequestOutput, SamplingParams

from tests.full_tests import drafters
from tests.full_tests.engines import SMALL_KV, engine, generate, preemptions
from tests.full_tests.speculation import accepted, custom, ngram, speculating
from vllm_gaudi_spec.platforms.cpu import CpuSpecPlatform

INVARIANT: dict[str, Any] = {"additional_config": {"gaudi_spec": {"batch_invariant": True}}}
DTYPES = [str(dtype).removeprefix("torch.") for dtype in CpuSpecPlatform().supported_dtypes if dtype != torch.float16]
"""float32, and bfloat16 where the CPU has instructions for it."""


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 120, (16,), generator=generator).tolist()
    return [torch.randint(3, 400, (length,), generator=generator).tolist() for length in lengths]


def parameters(count: int) -> list[SamplingParams]:
    """Greedy and seeded requests in turns, of different lengths."""
    return [
        SamplingParams(temperature=index % 2, seed=index, max_tokens=24 + index, ignore_eos=True, logprobs=1)
        for index in range(count)
    ]


def answers(outputs: list[RequestOutput]) -> list[list[tuple[int, float]]]:
    """The tokens of each request with their log-probabilities, which are compared as they are."""
    found = []
    for output in outputs:
        completion = output.outputs[0]
        assert completion.logprobs is not None
        scores = zip(completion.token_ids, completion.logprobs, strict=True)
        found.append([(token, scored[token].logprob) for token, scored in scores])
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_answers_are_equal_bit_for_bit(looping_llama: str, dtype: str) -> None:
    asked, params = prompts(), parameters(16)
    with engine(looping_llama, dtype=dtype, max_num_seqs=1, **INVARIANT) as llm:
        alone = answers(generate(llm, asked, params))
    # The same number of blocks, too few for all requests, in either dtype.
    kv = SMALL_KV | {"kv_cache_memory_bytes": SMALL_KV["kv_cache_memory_bytes"] * getattr(torch, dtype).itemsize // 4}
    with engine(looping_llama, dtype=dtype, max_num_batched_tokens=64, **kv, **INVARIANT) as llm:
        assert answers(generate(llm, asked, params)) == alone
        assert preemptions(llm) > 0
    with speculating(looping_llama, ngram(k=5), dtype=dtype, **INVARIANT) as llm:
        assert answers(generate(llm, asked, params)) == alone
        assert accepted(llm) > 0


def test_rejected_drafts_do_not_change_a_bit(looping_llama: str) -> None:
    dtype, asked, params = DTYPES[0], prompts(), parameters(16)
    with engine(looping_llama, dtype=dtype, max_num_seqs=1, **INVARIANT) as llm:
        alone = answers(generate(llm, asked, params))
    drafters.play(lambda context, k: [(context[-1] + step) % 400 for step in range(1, k + 1)])
    with speculating(looping_llama, custom("Scripted", k=3), dtype=dtype, **INVARIANT) as llm:
        assert answers(generate(llm, asked, params)) == alone
