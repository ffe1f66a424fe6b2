"""The NPU's grouped matmul for mixture-of-experts layers."""

from __future__ import annotations

from functools import partial

import torch

from vllm_gaudi_spec.devices.common.experts import Call, Fused, grouped
from vllm_gaudi_spec.devices.common.layers import find_kernel

# The maximum number of groups if all matrices are in one tensor. Some CANN pages say 128, which applies to lists of
# matrices (op-plugin 517f2e7d, npu_grouped_matmul; aclnn_grouped_matmul.cpp in CANN 8.5, CheckGroupListCommonTensor).
_MAX_EXPERTS = 1024


def fused() -> Fused | None:
    matmul = find_kernel("torch_npu", "npu_grouped_matmul")

    def product(rows: torch.Tensor, matrices: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        """Call the operator in the same way as vllm-ascend (ops/fused_moe/moe_mlp.py, unquant_apply_mlp).

        All rows are in a single tensor, divided into groups of the given sizes.
        """
        result: torch.Tensor = matmul(
            [rows], [matrices], group_list=counts_E, split_item=2, group_type=0, group_list_type=1
        )[0]
        return result

    return None if matmul is None else Fused(partial(grouped, product), _takes, 1)


def _takes(call: Call) -> bool:
    return len(call.w13_EJH) <= _MAX_EXPERTS
