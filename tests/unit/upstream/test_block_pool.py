"""The order in which vLLM's block pool assigns free blocks without a prefix cache."""

import random
from pathlib import Path

import pytest
from vllm.v1.core.block_pool import BlockPool

from tests.support.schedulers import scheduler_of
from vllm_gaudi_spec.scheduling.scheduler import SpecScheduler
from vllm_gaudi_spec.upstream.block_pool import assign_lowest_blocks_first


def test_pool_assigns_the_lowest_free_blocks() -> None:
    pool, rng = BlockPool(100, enable_caching=False, hash_block_size=16), random.Random(0)
    assign_lowest_blocks_first(pool)
    used = []
    for _ in range(300):
        if used and rng.random() < 0.5:
            pool.free_blocks(used.pop(rng.randrange(len(used))))
        elif (count := rng.randint(1, 9)) <= pool.get_num_free_blocks():
            taken = {block.block_id for blocks in used for block in blocks}
            used.append(pool.get_new_blocks(count))
            assert [block.block_id for block in used[-1]] == sorted(set(range(1, 100)) - taken)[:count]
        assert pool.get_num_free_blocks() == 99 - sum(map(len, used))


@pytest.mark.parametrize("caches_prefixes", [False, True])
def test_scheduler_assigns_the_lowest_blocks_only_without_a_prefix_cache(tmp_path: Path, caches_prefixes: bool) -> None:
    scheduler = scheduler_of(SpecScheduler, tmp_path, enable_prefix_caching=caches_prefixes)
    pool = scheduler.kv_cache_manager.block_pool
    for blocks in (pool.get_new_blocks(2), pool.get_new_blocks(2)):
        pool.free_blocks(blocks)
    assert {block.block_id for block in pool.get_new_blocks(2)} == ({3, 4} if caches_prefixes else {1, 2})
