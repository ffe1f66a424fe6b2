"""vLLM's C++ rotary embedding for the CPU, called with contiguous heads. Importing this module registers it.

The kernel (csrc/cpu/pos_encoding.cpp of vLLM 0.32) takes the size of the last dimension as all heads of a token, and
the stride before it as the distance between tokens. Given queries [T, H, D], as LFM2 passes them, it rotates the wrong
numbers by the wrong positions without an error, and vLLM's own CPU platform returns wrong text.
"""

from __future__ import annotations

import torch

from vllm_gaudi_spec.devices.common import layers
from vllm_gaudi_spec.upstream.layers import RotaryEmbedding


class _SideBySide:
    """Mixin for vLLM's classes that rotate queries and keys as `RotaryEmbedding` does."""

    def forward_cpu(
        self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        flat_query, flat_key = query.flatten(1), None if key is None else key.flatten(1)
        RotaryEmbedding.forward_cpu(self, positions, flat_query, flat_key)
        return flat_query.view(query.shape), None if flat_key is None or key is None else flat_key.view(key.shape)


layers.register_rotary_class("Cpu", _SideBySide, RotaryEmbedding)
