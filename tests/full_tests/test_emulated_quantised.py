"""On emulated cards: quantised checkpoints have the texts of what they stand for, with drafts and without."""

from pathlib import Path

import pytest

from tests.full_tests.quantised_checkpoints import MTP, PACKED, check_reference
from tests.full_tests.tiny_models import save_deepseek_with_mtp

pytestmark = pytest.mark.emulated


@pytest.mark.every_card
def test_a_model_that_drafts_for_itself(looping_llama: str, tmp_path: Path) -> None:
    check_reference(looping_llama, PACKED, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [PACKED, "ct-int8", "fp8-block"])
def test_on_two_ranks(name: str, looping_llama: str, tmp_path: Path) -> None:
    check_reference(looping_llama, name, tmp_path, tensor_parallel_size=2)


@pytest.mark.slow
def test_deepseek_and_its_own_layer_in_blocks(tmp_path: Path) -> None:
    """As DeepSeek-V3 is published: latent attention, experts and the layer that drafts in blocks of FP8."""
    model = save_deepseek_with_mtp(tmp_path / "plain")
    check_reference(model, "fp8-block", tmp_path, speculative=MTP, least=5)
