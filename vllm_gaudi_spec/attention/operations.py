"""A layer's matmuls, softmax and caches as modules, for layers that are calibrated or quantized only.

The names of these classes, and of the modules in `RectangleAttentionImpl`, are those by which Intel Neural Compressor
finds and replaces them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

LARGEST = 2.0**56
"""Of numbers that attention and recurrent layers take: far from any that models make, and in float32 a sum of thousands
of their products is finite."""


def finite(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with 0 in place of what is no number, infinite or larger than any number that a model makes.

    Kernels leave tokens out by multiplying them by 0, or by adding a large negative number to their scores. Of NaN both
    make NaN: in KV it would reach whoever has the block next, through the pad block everybody, and in a matmul over a
    batch its neighbors.
    """
    # Three operations that a compiler makes one of; nan_to_num is nine on a Gaudi (bridge, nantonum_gen.cpp).
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
    # Read by replacements: blocks are gathered by their ids, wherever they are.
    use_contiguous_pa = False

    def forward(self, input: torch.Tensor, cache: Rows, slot_mapping: torch.Tensor) -> Rows:
        """Write `input` [T, K, D] to its slots."""
        cache.index_copy_(0, slot_mapping, input)
        return cache

    def fetch_from_cache(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Blocks of `cache` [blocks, ...] by their ids."""
        return cache.index_select(0, blocks)


class Operations(Protocol):
    """The operations of one layer's attention over paged KV."""

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
