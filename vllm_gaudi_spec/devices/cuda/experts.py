"""torch's grouped product for experts."""

from __future__ import annotations

from functools import partial

import torch

from vllm_gaudi_spec.devices.common.experts import Call, Fused, grouped
from vllm_gaudi_spec.devices.common.layers import find_kernel

_WITH_KERNEL = (9, 10)
"""Major versions of the compute capability (torch 2.11 and 2.13, GroupedBlas.cpp)."""


def fused() -> Fused | None:
    grouped_mm = find_kernel("torch.nn.functional", "grouped_mm")

    def product(rows: torch.Tensor, matrices: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = grouped_mm(rows, matrices, offs=counts_E.cumsum(0).int())
        return result

    return None if grouped_mm is None else Fused(partial(grouped, product), _takes, 1)


def _takes(call: Call) -> bool:
    """Elsewhere torch reads the counts on the host, which a captured graph must not. Rows start at multiples of 16
    bytes."""
    x, rows = call.x_TH, (call.w13_EJH, call.w2_EHI)
    if x.dtype != torch.bfloat16 or not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] not in _WITH_KERNEL:
        return False
    return all(matrix.shape[-1] % 8 == 0 for matrix in rows) and call.w13_EJH.shape[1] % 8 == 0
