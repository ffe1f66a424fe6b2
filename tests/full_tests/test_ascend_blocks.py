"""On the emulated Ascend NPU: rows that share a prefix have more KV blocks together than there are.

The fused attention refuses that by its page. Runs with VGS_DEVICE=ascend-emulated in a process of its own.
"""

import pytest
from vllm import SamplingParams, TokensPrompt

from tests.full_tests.speculation import accepted, ngram, speculating

pytestmark = [pytest.mark.ascend, pytest.mark.slow]

NUM_ROWS, NUM_BLOCKS = 6, 12
PREFIX = [3 + 7 * index % 40 for index in range(300)]


def test_npu_a04_rows_that_share_a_prefix(looping_llama: str) -> None:
    """Of 3 blocks each, 2 of them shared: 18 together, with fewer in the cache."""
    prompts = [TokensPrompt(prompt_token_ids=[*PREFIX, 50 + row]) for row in range(NUM_ROWS)]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    sizes = dict(max_num_seqs=NUM_ROWS, max_model_len=512, max_num_batched_tokens=512)
    cache = dict(num_gpu_blocks_override=NUM_BLOCKS, enable_prefix_caching=True)
    with speculating(looping_llama, ngram(3), **sizes, **cache) as llm:
        alone = [llm.generate([prompt], sampling, use_tqdm=False)[0] for prompt in prompts]
        together = llm.generate(prompts, sampling, use_tqdm=False)
        assert accepted(llm) > 5
    assert sum(answer.num_cached_tokens or 0 for answer in together) >= (NUM_ROWS - 1) * 256
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
