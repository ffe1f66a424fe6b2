"""Quantized copies of tiny checkpoints, and what is asked of each: the texts of what its weights stand for."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase

from tests.full_tests.engines import engine
from tests.full_tests.quantized import ask, check_drafts, drafting
from tests.models.formats import kernels, rewrite
from vllm_gaudi_spec.config import REFERENCE

# Few shapes: on an emulated card each is a program.
SIZES: dict[str, Any] = dict(max_num_seqs=2, max_model_len=128, max_num_batched_tokens=128, skip_tokenizer_init=True)
PACKED = "ct-w4a16-asym"


def rewritten(model: str, name: str, folder: Path) -> tuple[str, str]:
    """A checkpoint in the format, and one of what its weights stand for."""
    quantized, meant = folder / name, folder / f"{name}-meant"
    shutil.copytree(model, quantized)
    rewrite(quantized, name, meant)
    return str(quantized), str(meant)


def dtypes_of_linears(model: nn.Module) -> set[torch.dtype]:
    return {next(module.parameters()).dtype for module in model.modules() if isinstance(module, LinearBase)}


MTP = dict(method="mtp", num_speculative_tokens=2, rejection_sample_method="strict")


def texts_with_and_without_drafts(
    model: str,
    which: str,
    *,
    speculative: dict[str, Any] | None = None,
    least: int = 20,
    kept_as: set[torch.dtype] | None = None,
    **options: Any,
) -> list[list[int]]:
    """`least`: of accepted drafts. `kept_as`: dtypes of linear layers' weights."""
    with engine(model, speculative_config=speculative or drafting(model), **kernels(which), **SIZES, **options) as llm:
        plain = check_drafts(llm, least, 4, detokenize=False)
        assert kept_as is None or all(found == kept_as for found in llm.apply_model(dtypes_of_linears))
    return plain


def check_reference(model: str, name: str, folder: Path, **options: Any) -> None:
    quantized, meant = rewritten(model, name, folder)
    found = texts_with_and_without_drafts(quantized, REFERENCE, **options)
    with engine(meant, **SIZES) as llm:
        assert ask(llm, 4, detokenize=False) == found
