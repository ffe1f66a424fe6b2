"""Quantized checkpoints, target and drafter: the texts of what they stand for, with drafts and without."""

import shutil
from pathlib import Path

import pytest

from tests.full_tests import adapters
from tests.full_tests.adapters import LORA, PROMPTS, Merged, greedy, run
from tests.full_tests.engines import engine
from tests.full_tests.quantized_checkpoints import PACKED, check_reference, rewritten
from tests.full_tests.test_refusals import refusal
from tests.models.formats import kernels
from vllm_gaudi_spec.config import NATIVE, REFERENCE


def test_packed_weights_equal_what_they_stand_for(looping_llama: str, tmp_path: Path) -> None:
    check_reference(looping_llama, PACKED, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [PACKED, "ct-fp8-dynamic", "ct-int8", "fp8-block"])
def test_quantized_weights_on_two_ranks(name: str, looping_llama: str, tmp_path: Path) -> None:
    check_reference(looping_llama, name, tmp_path, tensor_parallel_size=2)


def test_adapters_on_quantized_weights(looping_llama: str, tmp_path: Path) -> None:
    """Beside transformers on what the weights stand for, with the adapter's put into them."""
    quantized, meant = rewritten(looping_llama, PACKED, tmp_path)
    for file in Path(looping_llama).glob("*token*"):
        shutil.copy(file, meant)
    made = [adapters.make(meant, tmp_path / name, number) for number, name in ((1, "a"), (2, "b"))]
    jobs = [job for adapter in (*made, None) for job in greedy(PROMPTS[:2], adapter)]
    with engine(quantized, **LORA, **kernels(REFERENCE)) as llm:
        outputs = run(llm, jobs)
    Merged(meant, tmp_path).check(jobs, outputs)


def test_adapters_beside_native_kernels_are_refused(looping_llama: str, tmp_path: Path) -> None:
    quantized, _ = rewritten(looping_llama, "ct-int8", tmp_path)
    options = LORA | kernels(NATIVE) | dict(dtype="bfloat16")  # with AMX int8 has kernels for it alone
    assert "gaudi_spec to reference, or leave out --enable-lora" in refusal(quantized, **options)
