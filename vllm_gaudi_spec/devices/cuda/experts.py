"""Torch's grouped matmul for mixture-of-experts layers."""

from __future__ import annotations

from functools import partial

import torch

from vllm_gaudi_spec.devices.common.experts import Call, Fused, grouped
from vllm_gaudi_spec.devices.common.layers import find_kernel

_WITH_KERNEL = (9, 10)
"""Major compute capabilities for which torch has a kernel (torch 2.11 and 2.13, GroupedBlas.cpp)."""
# Measured on an H100 (benchmarks/results/experts.json): sorting and unsorting tokens takes as long as reading this many
# bytes of weights. Multiplying this many tokens by all experts takes as long as reading all weights again.
_BYTES_OF_SORTING = 270e6
_TOKENS_OF_READING = 400
_FEWEST_BYTES = 400e6
"""The size in bytes of the weights in the measured layer. Smaller layers are assumed to have this size."""


def fused() -> Fused | None:
    grouped_mm = find_kernel("torch.nn.functional", "grouped_mm")

    def product(rows: torch.Tensor, matrices: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = grouped_mm(rows, matrices, offs=counts_E.cumsum(0).int())
        return result

    return None if grouped_mm is None else Fused(partial(grouped, product), _serves, 1)


def _serves(call: Call) -> bool:
    return _takes(call) and _is_faster(call)


def _is_faster(call: Call) -> bool:
    """Whether the grouped matmul is faster than sending every token through every expert.

    The grouped matmul reads the weights of only the chosen experts. With many tokens, nearly all experts are chosen.
    """
    num_tokens, num_experts = call.weights_TE.shape
    sorting = _BYTES_OF_SORTING / max(call.w13_EJH.nbytes + call.w2_EHI.nbytes, _FEWEST_BYTES)
    reading = 1 - (1 - call.top_k / num_experts) ** num_tokens
    return sorting + reading < 1 + num_tokens / _TOKENS_OF_READING


def _takes(call: Call) -> bool:
    """Whether torch has a kernel for a call, which requires rows that are aligned to 16 bytes.

    Without the kernel, torch would read the group sizes on the host, which is impossible in a captured graph.
    """
    x, rows = call.x_TH, (call.w13_EJH, call.w2_EHI)
    if x.dtype != torch.bfloat16 or not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] not in _WITH_KERNEL:
        return False
    return all(matrix.shape[-1] % 8 == 0 for matrix in rows) and call.w13_EJH.shape[1] % 8 == 0
