"""Replaces vLLM's norms, rotary embeddings, and gated activation with Triton kernels.

Importing this module registers the replacements.
"""

from __future__ import annotations

import torch

from vllm_gaudi_spec.devices.common import experts, layers
from vllm_gaudi_spec.devices.cuda import experts as cuda_experts
from vllm_gaudi_spec.devices.cuda import kernels as cuda_kernels
from vllm_gaudi_spec.upstream.layers import RotaryEmbedding, SiluAndMul

PROVIDER = "vgs_cuda"


def _norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    assert weight is not None
    return cuda_kernels.rms_norm(x, weight, epsilon)


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    assert weight is not None
    return cuda_kernels.add_rms_norm(x, residual, weight, epsilon)


layers.register_norms(PROVIDER, _norm, _add_norm, available=True)


class RotatesInPlace:
    """Mixin for vLLM classes that rotate queries and keys in the same way as `RotaryEmbedding`."""

    def forward_oot(
        self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.is_neox_style:
            return self.forward_native(positions, query, key)
        table = self._match_cos_sin_cache_dtype(query)
        flat = positions.flatten()

        def by_head(heads: torch.Tensor) -> torch.Tensor:
            return heads.view(flat.shape[0], -1, self.head_size)

        cuda_kernels.rotate(flat, by_head(query), None if key is None else by_head(key), table, self.rotary_dim)
        return query, key


layers.register_rotary_class("Cuda", RotatesInPlace, RotaryEmbedding)


@SiluAndMul.register_oot
class CudaSiluAndMul(SiluAndMul):
    def forward_oot(self, x: torch.Tensor) -> torch.Tensor:
        return cuda_kernels.silu_and_mul(x)


experts.register(cuda_experts.fused())
