"""A layer's matmuls, softmax and caches as modules, for layers that are calibrated or quantized.

Intel Neural Compressor finds and replaces these classes, and the modules of `RectangleAttentionImpl`, by their names.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

LARGEST = 2.0**56
"""The largest number that attention and recurrent layers accept: far above any that models make, and a float32 sum of
thousands of such products is finite."""


def finite(tensor: torch.Tensor) -> torch.Tensor:
    """Replace NaN, infinities and numbers above `LARGEST` by 0.

    Kernels mask tokens by multiplying by 0 or by adding a large negative number to scores. Either turns NaN into NaN:
    in KV it would reach the next owner of the block, through the pad block everyone, and in a batched matmul the row's
    neighbors.
    """
    # A compiler fuses these three operations; nan_to_num is nine on a Gaudi (bridge, nantonum_gen.cpp).
    largest = min(LARGEST, torch.finfo(tensor.dtype).max)
    return torch.where(tensor.abs() <= largest, tensor, 0)


class Matmul(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, y)


class Softmax(nn.Module):
    def forward(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.softmax(x, dim)


class Rows(Protocol):
    """A tensor, or a stand-in for one with another layout."""

    def index_copy_(self, dim: int, index: torch.Tensor, source: torch.Tensor) -> object: ...


class VLLMKVCache(nn.Module):
    # Read by INC's replacements: blocks are gathered by ids, wherever they are.
    use_contiguous_pa = False

    def forward(self, input: torch.Tensor, cache: Rows, slot_mapping: torch.Tensor) -> Rows:
        """Write `input` [T, K, D] to its slots."""
        cache.index_copy_(0, slot_mapping, input)
        return cache

    def fetch_from_cache(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Return blocks of `cache` [blocks, ...] by their ids."""
        return cache.index_select(0, blocks)


class Operations(Protocol):
    k_cache: VLLMKVCache
    v_cache: VLLMKVCache
    matmul_qk: Matmul
    softmax: Softmax
    matmul_av: Matmul


class Plain:
    """The operations of layers that are neither calibrated nor quantized."""

    k_cache = v_cache = VLLMKVCache()
    matmul_qk = matmul_av = Matmul()
    softmax = Softmax()


PLAIN: Operations = Plain()

OWN: dict[str, str] = {name: type(getattr(PLAIN, name)).__name__ for name in Operations.__annotations__}
"""Names of a layer's operation modules, and of their classes."""
