"""KV cache memory: allocate it as the engine planned, bind it to the layers, copy and clear blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.worker.utils import allocate_kv_cache, bind_kv_cache_to_layers, copy_kv_cache_blocks_inplace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig


class KVCache:
    def __init__(self, kv_cache_config: KVCacheConfig, vllm_config: VllmConfig, device: torch.device) -> None:
        layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
        self.tensors = allocate_kv_cache(kv_cache_config, device, layout)
        self.num_blocks = kv_cache_config.num_blocks
        self.layer_groups = [list(group.layer_names) for group in kv_cache_config.kv_cache_groups]
        self.block_sizes = [_block_size(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
        bind_kv_cache_to_layers(self.tensors, vllm_config.compilation_config.static_forward_context)

    def apply(self, scheduled: SchedulerOutput) -> None:
        """Clear, then copy, before anything of the step reads or writes."""
        for block in scheduled.new_block_ids_to_zero or ():
            for tensor in self.tensors.values():
                tensor[block].zero_()
        if copies := scheduled.kv_cache_block_copies:
            copy_kv_cache_blocks_inplace(self.tensors.values(), self.num_blocks, copies)


def _block_size(spec: object) -> int:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = next(iter(spec.kv_cache_specs.values()))
    size: int = spec.block_size  # type: ignore[attr-defined]
    return size
