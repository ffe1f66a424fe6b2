"""vLLM's offloading of KV to host memory, using torch operations instead of CUDA copies.

This module breaks if vLLM numbers blocks differently or transfers KV at a different point in a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, CanonicalKVCaches, GPULoadStoreSpec


class HostOffloadingSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return _HostOffloadingWorker(kv_caches, self.num_chunks)


class _HostOffloadingWorker(OffloadingWorker):
    """Copies KV blocks to and from host memory. Copies are synchronous."""

    def __init__(self, kv_caches: CanonicalKVCaches, num_blocks: int) -> None:
        self._groups = [[layer.tensor_idx for layer in layers] for layers in kv_caches.group_data_refs]
        self._device = [cache.tensor for cache in kv_caches.tensors]
        self._host = [torch.zeros(num_blocks, cache.shape[1], dtype=cache.dtype) for cache in self._device]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec.group_sizes, (self._device, src_spec), (self._host, dst_spec))

    def submit_load(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return self._copy(job_id, dst_spec.group_sizes, (self._host, src_spec), (self._device, dst_spec))

    def _copy(self, job_id: int, sizes: Sequence[int], *ends: tuple[list[torch.Tensor], BlockIDsLoadStoreSpec]) -> bool:
        (sources, _), (targets, _) = ends
        started, num_bytes = time.perf_counter(), 0
        blocks = [torch.from_numpy(spec.block_ids).split(list(sizes)) for _, spec in ends]
        for group, reads, writes in zip(self._groups, *blocks, strict=True):
            for index in group:
                copied = sources[index][reads]
                targets[index][writes] = copied.to(targets[index].device)
                num_bytes += copied.nbytes
        seconds = time.perf_counter() - started
        self._finished.append(TransferResult(job_id, success=True, transfer_size=num_bytes, transfer_time=seconds))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass
