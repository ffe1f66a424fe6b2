"""On emulated cards: quantized checkpoints have the texts of what they stand for, with drafts and without."""

from pathlib import Path

import pytest
import torch

from tests.full_tests import mtp_checkpoints
from tests.full_tests.engines import engine
from tests.full_tests.quantized import ask
from tests.full_tests.quantized_checkpoints import (
    MTP,
    PACKED,
    SIZES,
    check_reference,
    rewritten,
    texts_with_and_without_drafts,
)
from tests.full_tests.test_refusals import refusal
from tests.models.formats import kernels
from vllm_gaudi_spec.config import NATIVE, REFERENCE
from vllm_gaudi_spec.environment import DEVICE

pytestmark = pytest.mark.emulated


@pytest.mark.every_card
def test_packed_weights_equal_what_they_stand_for(looping_llama: str, tmp_path: Path) -> None:
    check_reference(looping_llama, PACKED, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [PACKED, "ct-int8", "fp8-block"])
def test_quantized_weights_on_two_ranks(name: str, looping_llama: str, tmp_path: Path) -> None:
    check_reference(looping_llama, name, tmp_path, tensor_parallel_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_ranks"), [("awq", 1), ("gptq", 1), (PACKED, 1), (PACKED, 2)])
def test_four_bit_weights_stay_packed(name: str, num_ranks: int, looping_llama: str, tmp_path: Path) -> None:
    """The operator of a Gaudi makes the weights that reference kernels' layers have. An NPU has none."""
    quantized, _ = rewritten(looping_llama, name, tmp_path)
    in_bfloat16 = dict(dtype="bfloat16", tensor_parallel_size=num_ranks)
    if DEVICE.value != "hpu-emulated":
        assert "leave weight_kernels out" in refusal(quantized, **kernels(NATIVE), **in_bfloat16)
        return
    # Half of a group is decoded.
    kept_as = {torch.int32} if num_ranks == 1 else {torch.int32, torch.bfloat16}
    found = texts_with_and_without_drafts(quantized, NATIVE, kept_as=kept_as, **in_bfloat16)
    with engine(quantized, **SIZES, **kernels(REFERENCE), **in_bfloat16) as llm:
        assert ask(llm, 4, detokenize=False) == found


@pytest.mark.slow
def test_deepseek_mtp_in_fp8_blocks(tmp_path: Path) -> None:
    """As DeepSeek-V3 is published: latent attention, experts and the layer that drafts in blocks of FP8."""
    model = mtp_checkpoints.save("deepseek-v3", tmp_path / "plain")
    check_reference(model, "fp8-block", tmp_path, speculative=MTP, least=5)
