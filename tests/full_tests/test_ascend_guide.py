"""On the emulated Ascend NPU: what the vllm-ascend guide configures runs, or is refused in one line; shared KV blocks.

Runs with VGS_DEVICE=ascend-emulated in a process of its own. docs/how_to/migrate.md has a row for each case.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from vllm import SamplingParams, TokensPrompt

from tests.full_tests import mtp_checkpoints
from tests.full_tests.engines import counter, engine
from tests.full_tests.heads import head, target, with_four_heads
from tests.full_tests.speculation import accepted, ngram, speculating
from tests.full_tests.test_refusals import refusal
from tests.full_tests.workload import Answer, differences, mixed_requests, run_together
from vllm_gaudi_spec.device_table import describe_device

pytestmark = pytest.mark.ascend

SIZES: dict[str, Any] = dict(max_num_seqs=2, max_model_len=512, max_num_batched_tokens=256)
REQUESTS = mixed_requests(8)
# The guide's own: with a drafter on the device it asks for overlapping steps, and heads have no tensor parallelism.
OPTIONS: dict[str, Any] = dict(async_scheduling=True, enforce_eager=True)
PADDED: dict[str, Any] = dict(disable_padded_drafter_batch=False)
ALONE: dict[str, Any] = dict(draft_tensor_parallel_size=1, **PADDED)


@pytest.fixture(scope="module", autouse=True)
def on_the_emulated_npu(own_cache: None) -> None:
    assert describe_device() == {"device": "ascend-emulated", "mode": "captured"}


@pytest.fixture(scope="module")
def model(looping_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    @cache
    def path(method: str) -> str:
        if method == "deepseek_mtp":
            return mtp_checkpoints.save("deepseek-v3", tmp_path_factory.mktemp("deepseek"))
        if method == "two cards":  # the tiny target has three heads
            return with_four_heads(target("eagle"), tmp_path_factory.mktemp("even") / "target")
        return target(method) if method in ("eagle", "eagle3", "medusa", "mtp") else looping_llama

    return path


@pytest.fixture(scope="module")
def answers() -> Callable[[str], list[list[Answer]]]:
    @cache
    def of(path: str) -> list[list[Answer]]:
        with engine(path, **SIZES) as llm:
            return run_together(llm, REQUESTS)

    return of


def drafter(config: dict[str, Any], looping_llama: str, twin: str) -> dict[str, Any]:
    models = {"draft_model": looping_llama, "universal_draft": twin}
    return config | ({"model": models[config["method"]]} if config["method"] in models else {})


NGRAM: dict[str, Any] = dict(method="ngram", num_speculative_tokens=5, prompt_lookup_max=4)
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ngram": (NGRAM, {}),
    "ngram, most drafts": (NGRAM | dict(num_speculative_tokens=15), {}),
    "eagle": (head("eagle", 2, **ALONE), OPTIONS),
    "eagle3": (head("eagle3", 2, **ALONE), OPTIONS),
    "eagle3, drafts by batch size": (
        head("eagle3", 3, num_speculative_tokens_per_batch_size=[[1, 1, 3], [2, 512, 1]]),
        {},
    ),
    "medusa": (head("medusa", 3), {}),
    "mtp": (head("mtp", 2, **PADDED), {}),
    "deepseek_mtp": (dict(method="deepseek_mtp", num_speculative_tokens=2, **PADDED), OPTIONS),
    "suffix": (dict(method="suffix", num_speculative_tokens=15), dict(enforce_eager=True)),
    "draft_model": (dict(method="draft_model", num_speculative_tokens=3, **ALONE), OPTIONS),
    # The guide's own example, on two cards in place of four.
    "eagle, its target on two cards": (head("eagle", 2, **ALONE), dict(tensor_parallel_size=2)),
    "eagle3, its target on two cards": (head("eagle3", 2, **ALONE), dict(tensor_parallel_size=2)),
    "universal_draft": (dict(method="universal_draft", num_speculative_tokens=3, **ALONE), OPTIONS),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_configuration_of_the_guide_runs(
    case: str, model: Callable[[str], str], answers: Callable[[str], list[list[Answer]]], looping_llama: str, twin: str
) -> None:
    """Answers are those without speculation, and nothing is captured behind warm-up, as `engine` sees to."""
    config, options = RUNS[case]
    path = model("two cards" if "two cards" in case else config["method"])
    expected = answers(path)
    with speculating(path, drafter(config, looping_llama, twin), **SIZES, **options) as llm:
        assert not differences(REQUESTS, run_together(llm, REQUESTS), expected)
        assert accepted(llm) > 0
        assert llm.collective_rpc("step_report")[0]["host_syncs_per_step"] <= 1
        assert bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling) == (config["method"] != "suffix")


@pytest.mark.slow
def test_synthetic_acceptance(looping_llama: str) -> None:
    rates = dict(rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.9, 0.6, 0.3])
    config = dict(method="draft_model", model=looping_llama, num_speculative_tokens=3, **rates)
    with speculating(looping_llama, config, **SIZES) as llm:
        run_together(llm, REQUESTS)
        share = accepted(llm) / counter(llm, "vllm:spec_decode_num_draft_tokens")
        assert 0.3 < share < 0.9


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "drafts of their own lengths": (
        head("eagle3", 2, disable_padded_drafter_batch=True),
        {},
        "disable_padded_drafter_batch is not supported, since all rows of a batch draft in one shape",
    ),
    "more drafts than the attention takes": (NGRAM | dict(num_speculative_tokens=16), {}, "at most 15 drafts per step"),
    "extract_hidden_states": (
        dict(
            method="extract_hidden_states",
            num_speculative_tokens=1,
            draft_model_config={"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}},
        ),
        {},
        "Speculative method extract_hidden_states is not supported yet",
    ),
    "block verify": (
        NGRAM,
        dict(additional_config={"rejection_sampler_config": {"enable_block_verify": True}}),
        "set rejection_sample_method in --speculative-config to block",
    ),
    "verifying less": (
        NGRAM,
        dict(additional_config={"dynamic_spec_config": {"method": "dspark"}}),
        "additional_config.dynamic_spec_config is vllm-ascend's",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configuration_is_refused(case: str, model: Callable[[str], str], looping_llama: str, twin: str) -> None:
    config, options, words = REFUSED[case]
    config = drafter(config, looping_llama, twin)
    assert words in refusal(model(config["method"]), speculative_config=config, **options)


NUM_ROWS, NUM_BLOCKS = 6, 12
PREFIX = [3 + 7 * index % 40 for index in range(300)]


@pytest.mark.slow
def test_npu_a04_rows_that_share_a_prefix(looping_llama: str) -> None:
    """Each request lists 3 blocks and shares 2 of them, so 18 are listed, more than the cache has."""
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
