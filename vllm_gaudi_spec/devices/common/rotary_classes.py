"""Puts a device's rotary embedding in place of those classes of vLLM's that turn queries and keys alike."""

from __future__ import annotations

from typing import Protocol

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase


class Turn(Protocol):
    """A device's kernel."""

    def __call__(
        self, heads_THR: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, *, halves: bool
    ) -> torch.Tensor:
        """Numbers that turn together stand half a head apart (`halves`), or side by side; the tables name each."""
        ...


def turning(turn: Turn) -> type:
    """To stand before a class of vLLM's that turns queries and keys as `RotaryEmbedding` does."""

    class _Turning:
        def forward_oot(
            self: RotaryEmbeddingBase, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            table = self._match_cos_sin_cache_dtype(query)
            cos, sin = table.index_select(0, positions.flatten()).unsqueeze(1).chunk(2, dim=-1)
            if self.is_neox_style:
                cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
            else:
                cos, sin = (part.unsqueeze(-1).expand(*part.shape, 2).flatten(-2) for part in (cos, sin))

            def all_heads(given: torch.Tensor) -> torch.Tensor:
                split = given.view(cos.shape[0], -1, self.head_size)
                turned = turn(split[..., : self.rotary_dim], cos, sin, halves=self.is_neox_style)
                if self.rotary_dim < self.head_size:
                    turned = torch.cat((turned, split[..., self.rotary_dim :]), dim=-1)
                return turned.reshape(given.shape)

            return all_heads(query), None if key is None else all_heads(key)

    return _Turning


def register(prefix: str, mixin: type, base: type[RotaryEmbeddingBase]) -> None:
    """`mixin` stands before `base` and before each class below it that turns as `base` does, whatever its table
    holds."""
    for cls in _with_subclasses(base):
        if cls.forward_native is base.forward_native:
            cls.register_oot(type(f"{prefix}{cls.__name__}", (mixin, cls), {}))


def _with_subclasses(cls: type[RotaryEmbeddingBase]) -> list[type[RotaryEmbeddingBase]]:
    return [cls, *(found for own in cls.__subclasses__() for found in _with_subclasses(own))]
