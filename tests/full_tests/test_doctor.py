"""Compare the estimates of doctor, which loads no model, with what engines take."""

import pytest

from tests.full_tests.speculation import speculating
from vllm_gaudi_spec.config import Speculation
from vllm_gaudi_spec.tools.doctor import pair


@pytest.mark.slow
def test_doctor_estimates_the_memory_of_the_worker(looping_llama: str, stranger: str) -> None:
    """The estimate covers the distributions of drafts and the drafter's slab."""
    drafting = dict(method="universal_draft", model=stranger, num_speculative_tokens=3)
    sampled = dict(draft_sample_method="probabilistic", rejection_sample_method="standard")
    own = dict(gaudi_spec=dict(universal_context="retokenize", universal_kv_len=96))
    with speculating(looping_llama, drafting | sampled, additional_config=own) as llm:
        config = llm.llm_engine.vllm_config
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        taken = worker.model_runner.bytes_beside_kv()
        drafter = config.speculative_config.draft_model_config
        estimate = pair.estimate_drafting(config, Speculation.from_vllm(config), drafter)
        assert len(estimate) == 2
        assert estimate.items() <= taken.items()
