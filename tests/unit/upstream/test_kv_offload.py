"""KV blocks come back from host memory unchanged, into other blocks than they were in."""

from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    OffloadingSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from vllm_gaudi_spec.refusals.features import OFFLOADING


def test_blocks_of_each_group_return_to_the_blocks_that_are_named() -> None:
    kind: type[OffloadingSpec] = OffloadingSpecFactory.get_spec_cls(OFFLOADING)
    spec: Any = object.__new__(kind)
    spec.num_chunks = 5
    pages = [torch.randint(-128, 127, (8, size), dtype=torch.int8) for size in (6, 6, 4)]
    before = [page.clone() for page in pages]
    # The first group has two layers, and the second has one.
    worker = spec.get_worker(
        CanonicalKVCaches(
            [CanonicalKVCacheTensor(page, page.shape[1]) for page in pages],
            [[CanonicalKVCacheRef(0, 6), CanonicalKVCacheRef(1, 6)], [CanonicalKVCacheRef(2, 4)]],
        )
    )
    stored = GPULoadStoreSpec([1, 2, 7], group_sizes=(2, 1), block_indices=(0, 0))
    assert worker.submit_store(10, stored, CPULoadStoreSpec([4, 0, 3]))
    for page in pages:
        page.zero_()
    loaded = GPULoadStoreSpec([5, 6, 3], group_sizes=(2, 1), block_indices=(0, 0))
    assert worker.submit_load(11, CPULoadStoreSpec([4, 0, 3]), loaded)
    finished = worker.get_finished()
    assert [(one.job_id, one.success) for one in finished] == [(10, True), (11, True)]
    # vLLM's metrics of offloading count these. The first two pages have two blocks of 6 bytes, and the third one of 4.
    assert [one.transfer_size for one in finished] == [28, 28]
    assert all(0 < one.transfer_time < 10 for one in finished)
    assert not worker.get_finished()
    for page, old, blocks in zip(pages, before, ([(1, 5), (2, 6)], [(1, 5), (2, 6)], [(7, 3)]), strict=True):
        for source, target in blocks:
            assert page[target].equal(old[source])
        assert page.count_nonzero(dim=1).nonzero().flatten().tolist() == sorted(target for _, target in blocks)
