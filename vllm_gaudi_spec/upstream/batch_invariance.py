"""vLLM's batch-invariant matrix product for CUDA, used without its VLLM_BATCH_INVARIANT mode."""

from __future__ import annotations

import torch


def batch_invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute `torch.nn.functional.linear` so that a row's bits do not depend on the number of rows.

    Reason: vLLM's Triton kernel adds up the products of a row in one order whatever the number of rows. The mode that
    it belongs to replaces operators of torch for the whole process, drafters included.
    Remove when: vLLM offers the kernel outside its private modules.
    """
    from vllm.model_executor.determinism.batch_invariant import linear_batch_invariant

    out: torch.Tensor = linear_batch_invariant(x, weight, bias)
    return out
