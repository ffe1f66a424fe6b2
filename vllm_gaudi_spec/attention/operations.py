"""Modules for matmuls, softmax and caches in layers that are calibrated or quantized.

Intel Neural Compressor (INC) finds and replaces these classes, and the modules in `RectangleAttentionImpl`, by name.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

LARGEST = 2.0**56
"""The largest magnitude that attention and recurrent layers accept. Models never produce values this large, and float32
sums of thousands of products of such values remain finite."""


def finite(tensor: torch.Tensor) -> torch.Tensor:
    """Replace NaN, infinities, and values with a magnitude above `LARGEST` with 0.

    Kernels mask tokens by multiplying by 0 or by adding a large negative number to scores, and neither removes NaN. NaN
    in the KV cache would reach the next request that uses the block or, in the pad block, all requests. NaN in a
    batched matmul would reach neighboring rows.
    """
    # A compiler fuses these three operations, whereas `nan_to_num` takes nine on a Gaudi (bridge, nantonum_gen.cpp).
    largest = min(LARGEST, torch.finfo(tensor.dtype).max)
    return torch.where(tensor.abs() <= largest, tensor, 0)


class Matmul(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, y)


class Softmax(nn.Module):
    def forward(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.softmax(x, dim)


class Rows(Protocol):
    """A tensor, or an object that represents a tensor in another layout."""

    def index_copy_(self, dim: int, index: torch.Tensor, source: torch.Tensor) -> object: ...


class VLLMKVCache(nn.Module):
    # Read by INC's replacement modules. False means that blocks are gathered by ID, wherever they are.
    use_contiguous_pa = False

    def forward(self, input: torch.Tensor, cache: Rows, slot_mapping: torch.Tensor) -> Rows:
        """Write `input` [T, K, D] to the slots in `slot_mapping`."""
        cache.index_copy_(0, slot_mapping, input)
        return cache

    def fetch_from_cache(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Return the blocks with the given IDs from `cache` [blocks, ...]."""
        return cache.index_select(0, blocks)


class Operations(Protocol):
    k_cache: VLLMKVCache
    v_cache: VLLMKVCache
    matmul_qk: Matmul
    softmax: Softmax
    matmul_av: Matmul


class Plain:
    """Operations for layers that are neither calibrated nor quantized."""

    k_cache = v_cache = VLLMKVCache()
    matmul_qk = matmul_av = Matmul()
    softmax = Softmax()


PLAIN: Operations = Plain()

OWN: dict[str, str] = {name: type(getattr(PLAIN, name)).__name__ for name in Operations.__annotations__}
"""Maps the names of a layer's operation modules to the names of their classes."""
