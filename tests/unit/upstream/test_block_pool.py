"""The order in which vLLM's block pool assigns free blocks without a prefix cache."""

import random

import pytest
from vllm.v1.core.block_pool import BlockPool

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


def test_pool_with_a_prefix_cache_keeps_its_order_of_eviction() -> None:
    with pytest.raises(AssertionError, match="evicted"):
        assign_lowest_blocks_first(BlockPool(100, enable_caching=True, hash_block_size=16))
