"""A drafter that reads the target's text in its own tokens drafts better for it."""

from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.full_tests.engines import counter
from tests.full_tests.prompts import PROMPTS
from tests.full_tests.speculation import accepted, speculating
from vllm_gaudi_spec.config import Speculation
from vllm_gaudi_spec.tools.doctor import pair

OTHER_VOCAB = str(Path(__file__).parents[2] / "demo" / "draft-other-vocab")


def reading(context: str, match: str = "tli", **more: Any) -> dict[str, Any]:
    return dict(additional_config=dict(gaudi_spec=dict(universal_context=context, universal_match=match, **more)))


def drafting(model: str, k: int, **options: Any) -> dict[str, Any]:
    return dict(method="universal_draft", model=model, num_speculative_tokens=k, **options)


@pytest.mark.slow
def test_doctor_estimates_the_memory_of_the_worker(looping_llama: str, stranger: str) -> None:
    """Laws of drafts and the drafter's slab, of models that it does not load."""
    sampled = dict(draft_sample_method="probabilistic", rejection_sample_method="standard")
    with speculating(
        looping_llama, drafting(stranger, 3, **sampled), **reading("retokenize", universal_kv_len=96)
    ) as llm:
        config = llm.llm_engine.vllm_config
        taken = (
            llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.bytes_beside_kv()
        )
        drafter = config.speculative_config.draft_model_config
        estimate = pair.estimate_drafting(config, Speculation.from_vllm(config), drafter)
        assert len(estimate) == 2
        assert estimate.items() <= taken.items()


def acceptance(llm: LLM) -> float:
    return accepted(llm) / counter(llm, "vllm:spec_decode_num_draft_tokens")


@pytest.mark.slow
def test_retokenized_context_drafts_better_than_mapped_ids(demo_model: str) -> None:
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
