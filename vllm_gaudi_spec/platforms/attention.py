"""The attention backends that this platform provides to vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from vllm_gaudi_spec.attention.backend import RectangleAttentionImpl
from vllm_gaudi_spec.config import FP8_KV
from vllm_gaudi_spec.device_table import load_backend
from vllm_gaudi_spec.upstream.attention_backend import AttentionBackend, AttentionMetadataBuilder, MultipleOf
from vllm_gaudi_spec.upstream.kv_cache import KVCacheLayout

if TYPE_CHECKING:
    from vllm.config.cache import CacheDType

    from vllm_gaudi_spec.attention.latent import LatentAttentionImpl


class NoMetadataBuilder(AttentionMetadataBuilder[Any]):
    """A placeholder, because vLLM subclasses a builder for layers with chunked attention without instantiating it."""

    def __init__(self, *args: Any, **named: Any) -> None:
        raise RuntimeError("this platform's runner does not use metadata builders")

    def build(self, *args: Any, **named: Any) -> Any:
        raise RuntimeError("this platform's runner does not use metadata builders")


class RectangleAttentionBackend(AttentionBackend):
    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto", FP8_KV]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[RectangleAttentionImpl]:
        return RectangleAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[NoMetadataBuilder]:
        return NoMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return load_backend().traits.block_size

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # The heads of a block are stored one after another, and the keys of each head precede its values.
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True


class LatentAttentionBackend(RectangleAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[LatentAttentionImpl]:
        from vllm_gaudi_spec.attention.latent import LatentAttentionImpl  # imports vLLM's layers

        return LatentAttentionImpl

    @classmethod
    def is_mla(cls) -> bool:
        return True


class NoPrefill:
    """A placeholder for the separate prefill kernel that vLLM's layer requires."""

    def __init__(self, **of_the_layer: Any) -> None:
        pass

    @staticmethod
    def get_name() -> str:
        return "no separate"
