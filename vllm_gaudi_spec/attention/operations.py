"""A layer's matmuls, softmax and caches as modules: of layers that are measured or quantised, and of no others.

The names of these classes, and of the modules in `RectangleAttentionImpl`, are those by which Intel Neural Compressor
finds and replaces them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class Matmul(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, y)


class Softmax(nn.Module):
    def forward(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.softmax(x, dim)


class Rows(Protocol):
    """A tensor, or what stands in for one whose layout is another."""

    def index_copy_(self, dim: int, index: torch.Tensor, source: torch.Tensor) -> object: ...


class VLLMKVCache(nn.Module):
    # Replacements ask: blocks are gathered by their ids, wherever they stand.
    use_contiguous_pa = False

    def forward(self, input: torch.Tensor, cache: Rows, slot_mapping: torch.Tensor) -> Rows:
        """Write `input` [T, K, D] to its slots."""
        cache.index_copy_(0, slot_mapping, input)
        return cache

    def fetch_from_cache(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Blocks of `cache` [blocks, ...] by their ids."""
        return cache.index_select(0, blocks)


class Operations(Protocol):
    """What attention over paged KV is made of, one layer's."""

    k_cache: VLLMKVCache
    v_cache: VLLMKVCache
    matmul_qk: Matmul
    softmax: Softmax
    matmul_av: Matmul


class Plain:
    """What everybody computes with who is neither measured nor quantised."""

    k_cache = v_cache = VLLMKVCache()
    matmul_qk = matmul_av = Matmul()
    softmax = Softmax()


PLAIN: Operations = Plain()

OWN: dict[str, str] = {name: type(getattr(PLAIN, name)).__name__ for name in Operations.__annotations__}
"""Names of the modules that a layer may have for itself, and of their classes."""
