"""Puts a device's rotary embedding in place of those classes of vLLM's that turn queries and keys alike."""

from __future__ import annotations

from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase


def register(prefix: str, mixin: type, base: type[RotaryEmbeddingBase]) -> None:
    """`mixin` stands before `base` and before each class below it that turns as `base` does, whatever its table
    holds."""
    for cls in _with_subclasses(base):
        if cls.forward_native is base.forward_native:
            cls.register_oot(type(f"{prefix}{cls.__name__}", (mixin, cls), {}))


def _with_subclasses(cls: type[RotaryEmbeddingBase]) -> list[type[RotaryEmbeddingBase]]:
    return [cls, *(found for own in cls.__subclasses__() for found in _with_subclasses(own))]
