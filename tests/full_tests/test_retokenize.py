"""A drafter that reads the target's text in its own tokens: lossless, and better at drafting for it."""

from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.full_tests.engines import counter, engine, preemptions
from tests.full_tests.prompts import PROMPTS
from tests.full_tests.speculation import accepted, speculating
from tests.full_tests.workload import Answer, Request, differences, run_together
from vllm_gaudi_spec.config import Speculation
from vllm_gaudi_spec.tools.doctor import pair

OTHER_VOCAB = str(Path(__file__).parents[2] / "demo" / "draft-other-vocab")
GREEDY = dict(rejection_sample_method="strict")
COUPLED = GREEDY | dict(draft_sample_method="coupled")
SCHEDULES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked, cached, preempted": dict(
        enable_chunked_prefill=True, max_num_batched_tokens=64, kv_cache_memory_bytes=1 << 20, block_size=32
    ),
}


def reading(context: str, match: str = "tli", **more: Any) -> dict[str, Any]:
    return dict(additional_config=dict(gaudi_spec=dict(universal_context=context, universal_match=match, **more)))


def drafting(model: str, k: int, **options: Any) -> dict[str, Any]:
    return dict(method="universal_draft", model=model, num_speculative_tokens=k, **options)


CASES = [("tli", 3, COUPLED, "chunked, cached, preempted"), ("slem", 5, GREEDY, "roomy")]
ALL = [
    (match, k, options, schedule)
    for match in ("tli", "slem")
    for k in (1, 3, 5)
    for options in (GREEDY, COUPLED)
    for schedule in SCHEDULES
    if match == "tli" or options is GREEDY
]


@pytest.mark.parametrize(
    ("match", "k", "options", "schedule"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in CASES)],
)
def test_lossless(
    match: str,
    k: int,
    options: dict[str, Any],
    schedule: str,
    looping_llama: str,
    stranger: str,
    mixed: list[Request],
    mixed_answers: list[list[Answer]],
) -> None:
    """64 mixed requests over random bytes, which are mostly no text at all."""
    engine_options = reading("retokenize", match) | SCHEDULES[schedule]
    with speculating(looping_llama, drafting(stranger, k, **options), **engine_options) as llm:
        different = differences(mixed, run_together(llm, mixed), mixed_answers)
        assert not different, f"{len(different)} of {len(mixed)} differ\n" + "\n".join(different[:5])
        assert counter(llm, "vllm:spec_decode_num_draft_tokens") > 100
        if "preempted" in schedule:
            assert preemptions(llm) > 0


@pytest.mark.slow
def test_doctor_reckons_what_the_worker_takes(looping_llama: str, stranger: str) -> None:
    """Laws of drafts and the drafter's slab, of models that it does not load."""
    sampled = dict(draft_sample_method="probabilistic", rejection_sample_method="standard")
    with speculating(
        looping_llama, drafting(stranger, 3, **sampled), **reading("retokenize", universal_kv_len=96)
    ) as llm:
        config = llm.llm_engine.vllm_config
        taken = (
            llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.bytes_beside_kv()
        )
        assert len(taken) == 2
        drafter = config.speculative_config.draft_model_config
        assert pair.estimate_drafting(config, Speculation.from_vllm(config), drafter) == taken


def acceptance(llm: LLM) -> float:
    return accepted(llm) / counter(llm, "vllm:spec_decode_num_draft_tokens")


@pytest.mark.slow
def test_on_a_real_pair_text_reads_better_than_ids(demo_model: str) -> None:
    """And slem says more than the tokens that both have. Twice, the second time on a prefix-cache hit."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    lengths, texts = {}, {}
    for name, options in (
        ("map", reading("map")),
        ("retokenize", reading("retokenize")),
        ("slem", reading("retokenize", "slem")),
    ):
        with speculating(demo_model, drafting(OTHER_VOCAB, 3), max_model_len=256, **options) as llm:
            prompts = PROMPTS[:8]
            texts[name] = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            first = acceptance(llm)
            llm.generate(prompts, params, use_tqdm=False)
            lengths[name] = acceptance(llm)
            assert abs(lengths[name] - first) < 0.05, "a prefix-cache hit changes what is drafted"
    print(lengths)
    assert texts["map"] == texts["retokenize"] == texts["slem"]
    assert lengths["retokenize"] > lengths["map"]
    assert lengths["slem"] > lengths["map"]


@pytest.mark.slow
def test_structured_answers_draft_too(demo_model: str) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    rule = StructuredOutputsParams(regex=r"(The|A) [a-z ]{20,60}\.")
    params = [
        SamplingParams(temperature=0, max_tokens=60, structured_outputs=rule),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    ]
    with engine(demo_model, max_model_len=256) as llm:
        plain = [output.outputs[0].text for output in llm.generate(PROMPTS[:2], params, use_tqdm=False)]
    with speculating(demo_model, drafting(OTHER_VOCAB, 3), max_model_len=256, **reading("retokenize")) as llm:
        assert [output.outputs[0].text for output in llm.generate(PROMPTS[:2], params, use_tqdm=False)] == plain
        assert accepted(llm) > 0
