"""Quantised checkpoints, target and drafter: the texts of what they stand for, with drafts and without."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase

from tests.full_tests import adapters
from tests.full_tests.adapters import LORA, PROMPTS, Merged, greedy, run
from tests.full_tests.engines import engine
from tests.full_tests.quantized import ask
from tests.full_tests.speculation import accepted
from tests.full_tests.test_refusals import refusal
from tests.models.formats import FORMATS, kernels, rewrite
from vllm_gaudi_spec.config import NATIVE, REFERENCE, REQUEST_OPTION

# Few shapes: on an emulated card each is a program.
SIZES: dict[str, Any] = dict(max_num_seqs=2, max_model_len=128, max_num_batched_tokens=128, skip_tokenizer_init=True)
PACKED, FP8 = "ct-w4a16-asym", "ct-fp8-dynamic"


def rewritten(model: str, name: str, folder: Path) -> tuple[str, str]:
    """A checkpoint in the format, and one of what its weights stand for."""
    quantised, meant = folder / name, folder / f"{name}-meant"
    shutil.copytree(model, quantised)
    rewrite(quantised, name, meant)
    return str(quantised), str(meant)


def dtypes_of_linears(model: nn.Module) -> set[torch.dtype]:
    return {module.weight.dtype for module in model.modules() if isinstance(module, LinearBase)}


def texts_with_and_without_drafts(
    model: str, which: str, kept_as: torch.dtype | None = None, **options: Any
) -> list[list[int]]:
    drafting = dict(method="draft_model", model=model, num_speculative_tokens=3, rejection_sample_method="strict")
    with engine(model, speculative_config=drafting, **kernels(which), **SIZES, **options) as llm:
        plain = ask(llm, 4, extra_args={REQUEST_OPTION: 0}, detokenize=False)
        before = accepted(llm)
        assert ask(llm, 4, detokenize=False) == plain
        assert accepted(llm) > before + 20
        assert kept_as is None or llm.apply_model(dtypes_of_linears) == [{kept_as}]
    return plain


def check_reference(model: str, name: str, folder: Path, **options: Any) -> None:
    quantised, meant = rewritten(model, name, folder)
    found = texts_with_and_without_drafts(quantised, REFERENCE, **options)
    with engine(meant, **SIZES) as llm:
        assert ask(llm, 4, detokenize=False) == found


def test_texts_are_those_of_what_the_weights_stand_for(looping_llama: str, tmp_path: Path) -> None:
    check_reference(looping_llama, PACKED, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [PACKED, FP8, "fp8-block"])
def test_on_two_ranks(name: str, looping_llama: str, tmp_path: Path) -> None:
    check_reference(looping_llama, name, tmp_path, tensor_parallel_size=2)


@pytest.mark.emulated
@pytest.mark.every_card
def test_on_an_emulated_card(looping_llama: str, tmp_path: Path) -> None:
    check_reference(looping_llama, PACKED, tmp_path)


@pytest.mark.emulated
def test_fp8_stays_fp8_on_a_gaudi(looping_llama: str, tmp_path: Path) -> None:
    quantised, _ = rewritten(looping_llama, FP8, tmp_path)
    texts_with_and_without_drafts(quantised, NATIVE, kept_as=torch.float8_e4m3fn)


def test_adapters(looping_llama: str, tmp_path: Path) -> None:
    """Beside transformers on what the weights stand for, with the adapter's put into them."""
    quantised, meant = rewritten(looping_llama, PACKED, tmp_path)
    for file in Path(looping_llama).glob("*token*"):
        shutil.copy(file, meant)
    made = [adapters.make(meant, tmp_path / name, number) for number, name in ((1, "a"), (2, "b"))]
    jobs = [job for adapter in (*made, None) for job in greedy(PROMPTS[:2], adapter)]
    with engine(quantised, **LORA, **kernels(REFERENCE)) as llm:
        outputs = run(llm, jobs)
    Merged(meant, tmp_path).check(jobs, outputs)


def test_adapters_beside_native_kernels_are_refused(looping_llama: str, tmp_path: Path) -> None:
    quantised, _ = rewritten(looping_llama, "ct-int8", tmp_path)
    assert "gaudi_spec to reference, or leave out --enable-lora" in refusal(quantised, **LORA, **kernels(NATIVE))


def test_what_is_not_read_is_refused(looping_llama: str, tmp_path: Path) -> None:
    assert FORMATS["gptq"].config["sym"]
    quantised, _ = rewritten(looping_llama, "gptq", tmp_path)
    config = Path(quantised) / "config.json"
    config.write_text(config.read_text().replace('"sym": true', '"sym": false'))
    assert "zero points in GPTQ's first layout" in refusal(quantised)
