"""On emulated cards: two ranks, whose collectives stand in captured programs. A Gaudi's `hccl` is gloo.

Runs with VGS_DEVICE=hpu-emulated or ascend-emulated in a process of its own, like test_emulated.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
from vllm import SamplingParams

from tests.full_tests.engines import Job, data_parallel, engine, generate
from tests.full_tests.prompts import random_prompts
from tests.full_tests.speculation import ngram, speculating
from tests.full_tests.test_distributed import (
    ACCOUNTS,
    EXPERTS,
    Said,
    Setup,
    Work,
    check,
    deepseek,
    even,
    ranks_agree,
    said,
    setup_of,
)
from tests.full_tests.tiny_models import VOCAB
from vllm_gaudi_spec.device_table import describe_device
from vllm_gaudi_spec.self_test.run import COLLECTIVES

__all__ = ["deepseek", "even", "said", "setup_of"]  # fixtures

pytestmark = [pytest.mark.emulated, pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

# Few rows and short contexts: each size is a program.
SIZES: dict[str, Any] = dict(max_num_seqs=3, max_model_len=256, max_num_batched_tokens=64)
MEASURED = SIZES | dict(kv_cache_memory_bytes=None, num_gpu_blocks_override=40)
FEW = Work.of(random_prompts([3, 33, 90], VOCAB))


@pytest.mark.parametrize("method", ["draft_model", "universal_draft, slem", "eagle", "medusa"])
def test_whole_drafter_on_each_card(method: str, setup_of: Callable[[str], Setup], said: Said) -> None:
    """Memory is measured too: the largest steps, with their collectives, run on both before there is a KV cache."""
    given = setup_of(method)._replace(work=FEW)
    drafter = given.drafter | dict(draft_tensor_parallel_size=1)
    with speculating(given.target, drafter, tensor_parallel_size=2, **MEASURED, **given.options) as llm:
        outputs = generate(llm, *FEW)
        ranks_agree(llm, 2)
        assert llm.collective_rpc(lambda worker: worker.self_test.passed(COLLECTIVES)) == [True] * 2
        for rank in llm.collective_rpc("step_report"):
            assert rank["device"]["emulator"]["total"]["collectives"] > 0
    check(given, outputs, said, f"2 cards, {method}, drafter on each", least_accepted=1)


@pytest.mark.skipif(describe_device() != {"device": "hpu-emulated", "mode": "lazy"}, reason="refused or not read there")
def test_long_prompts_in_chunks_give_the_same_bits(looping_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row-parallel layers split forwards of 32 tokens or more into three parts, each with an all-reduce of its own."""
    monkeypatch.setenv("VLLM_ROW_PARALLEL_CHUNK_THRESHOLD", "32")
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=5, prompt_logprobs=5)
    found, collectives = [], []
    for num_chunks in ("1", "3"):
        monkeypatch.setenv("VLLM_ROW_PARALLEL_CHUNKS", num_chunks)
        with engine(looping_llama, tensor_parallel_size=2, **SIZES) as llm:
            before = llm.collective_rpc("step_report")[0]["device"]["emulator"]["total"]["collectives"]
            outputs = generate(llm, random_prompts([3, 33, 90], VOCAB), params)
            after = llm.collective_rpc("step_report")[0]["device"]["emulator"]["total"]["collectives"]
            ranks_agree(llm, 2)
        collectives.append(after - before)
        found.append([(each.prompt_logprobs, each.outputs[0].logprobs) for each in outputs])
    assert found[0] == found[1]
    assert collectives[1] > collectives[0]


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle"])
def test_two_stages(method: str, setup_of: Callable[[str], Setup], said: Said) -> None:
    """Each stage's graphs are its own; what stages exchange is the input of a graph. Leaving the engine checks that no
    stage has compiled anything after its warm-up."""
    given = setup_of(method)._replace(work=FEW)
    with speculating(given.target, given.drafter, pipeline_parallel_size=2, **MEASURED, **given.options) as llm:
        outputs = generate(llm, *FEW)
        for rank in llm.collective_rpc("step_report"):
            assert rank["device"]["emulator"]["total"]["collectives"] > 0
    check(given, outputs, said, f"2 stages, {method}", least_accepted=1)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fp8_copies_of_the_parts_of_an_output_matrix(
    num_ranks: int, setup_of: Callable[[str], Setup], said: Said
) -> None:
    """Each card rounds its own rows, whether the head is split or whole."""
    given = setup_of("eagle")._replace(work=FEW)
    drafter = given.drafter | dict(draft_tensor_parallel_size=num_ranks, draft_lm_head_quantization="fp8")
    with speculating(given.target, drafter, tensor_parallel_size=2, **SIZES, **given.options) as llm:
        outputs = generate(llm, *FEW)
        ranks_agree(llm, 2)
    check(given, outputs, said, f"2 cards, FP8 matrix, head on {num_ranks}", least_accepted=1)


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_experts_of_tensor_parallel_cards(family: str, made: Callable[[str], str], said: Said) -> None:
    given = Setup(made(family), ngram(3), FEW, {})
    with speculating(given.target, given.drafter, tensor_parallel_size=2, **EXPERTS, **SIZES) as llm:
        outputs = generate(llm, *FEW)
        ranks_agree(llm, 2)
    check(given, outputs, said, f"2 cards, experts of {family}", least_accepted=1)


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_experts_of_data_parallel_cards(family: str, made: Callable[[str], str], said: Said) -> None:
    """First with a card that has nothing to do but to take part; then with work of its own on each."""
    given = Setup(made(family), ngram(3) | dict(method="ngram_gpu"), FEW, {})
    options = dict(speculative_config=given.drafter, **ACCOUNTS, **EXPERTS, **SIZES)
    jobs = [Job(FEW.prompts, FEW.params, ranks) for ranks in ([0] * 6, [0, 1] * 3)]
    for outputs, what in zip(data_parallel(given.target, jobs, **options), ("idle", "both"), strict=True):
        check(given, outputs, said, f"2 cards, data parallel, experts of {family}, {what}", least_accepted=1)
