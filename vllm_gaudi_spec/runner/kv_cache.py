"""The KV cache, allocated according to the engine's plan, and the function that copies its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_spec.upstream.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.upstream.kv_cache import KVCacheSpec


class KVCache:
    def __init__(self, kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, backend: DeviceBackend) -> None:
        layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
        self.by_layer = backend.memory.allocate_kv(kv_cache_config, layout)
        """Maps each layer to its KV cache."""
        self.copy_blocks = backend.memory.make_block_copier(self.by_layer)
        """Function that copies blocks, given pairs of source and destination block IDs."""
        self.num_blocks = kv_cache_config.num_blocks
        # All layers share one allocation, and each layer reports the size of the whole allocation.
        self.num_bytes = max((tensor.size for tensor in kv_cache_config.kv_cache_tensors), default=0)
        self.layer_groups = [list(group.layer_names) for group in kv_cache_config.kv_cache_groups]
        specs = [_layer_spec(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
        self.block_sizes = [spec.block_size for spec in specs]
        self.windows = [spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None for spec in specs]
        """The sliding window of the layers in each group, or None."""
        self.keeps_blocks = all(type(spec) in (FullAttentionSpec, MLAAttentionSpec) for spec in specs)
        """Whether a request keeps its blocks until it ends. vLLM assigns blocks outside a window to other requests."""

    def warm_up(self) -> None:
        """Copy the pad block to itself."""
        self.copy_blocks([(0, 0)])


def single_forward_config(specs: dict[str, FullAttentionSpec], *, max_tokens: int, max_rows: int) -> KVCacheConfig:
    """Return the KV cache config for an encoder, whose KV is needed only during a single forward pass.

    A prompt is computed in one forward pass, and the KV of a layer is not needed after the attention of that layer. All
    layers therefore share memory, which is large enough for the largest forward pass and the pad block.
    """
    (spec,) = set(specs.values())
    # The last block of each row may contain only one token.
    num_blocks = 1 + max_tokens // spec.block_size + max_rows
    size = num_blocks * spec.page_size_bytes
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(size=size, layers=[name], layer_stride=size, block_stride=spec.page_size_bytes)
            for name in specs
        ],
        kv_cache_groups=[KVCacheGroupSpec(list(specs), spec)],
    )


def _layer_spec(spec: KVCacheSpec) -> KVCacheSpec:
    return next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec
