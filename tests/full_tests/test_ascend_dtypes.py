"""On the emulated Ascend NPU: dtypes as a card computes in them, of which the emulated one fuses more than a card.

Runs with VGS_DEVICE=ascend-emulated in a process of its own.
"""

from typing import Any

import pytest
import torch

from tests.full_tests.engines import engine
from tests.full_tests.speculation import accepted, speculating
from tests.full_tests.workload import differences, mixed_requests, run_together
from vllm_gaudi_spec.devices import load_backend

pytestmark = pytest.mark.ascend

SIZES: dict[str, Any] = dict(max_num_seqs=2, max_model_len=512, max_num_batched_tokens=256)
REQUESTS = mixed_requests(8)


def drafting(model: str) -> dict[str, Any]:
    return dict(method="draft_model", model=model, num_speculative_tokens=3)


@pytest.mark.slow
def test_bfloat16_through_the_fused_attention(looping_llama: str) -> None:
    """Nothing is captured behind warm-up, as `engine` sees to; texts may round otherwise than without drafts."""
    with speculating(looping_llama, drafting(looping_llama), dtype="bfloat16", **SIZES) as llm:
        run_together(llm, REQUESTS)
        assert accepted(llm) > 20


@pytest.mark.slow
def test_float32_through_plain_torch(looping_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend: Any = load_backend()
    monkeypatch.setattr(backend.attention, "fused_dtypes", backend.attention.fused_dtypes - {torch.float32})
    with engine(looping_llama, **SIZES) as llm:
        expected = run_together(llm, REQUESTS)
    with speculating(looping_llama, drafting(looping_llama), **SIZES) as llm:
        assert not differences(REQUESTS, run_together(llm, REQUESTS), expected)
        assert accepted(llm) > 20
