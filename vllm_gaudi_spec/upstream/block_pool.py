"""The order in which vLLM's block pool assigns free KV blocks.

This module breaks if the pool calls other methods of its queue of free blocks.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock


def assign_lowest_blocks_first(pool: BlockPool) -> None:
    """Make the pool assign the free block with the lowest ID.

    Reason: if the blocks in use are close together, a decode can read them in place (`Shape.in_place`). vLLM assigns
    the block that was freed last.
    Remove when: vLLM's block pool can keep the blocks in use close together.
    """
    assert not pool.enable_caching, "with a prefix cache, the order of free blocks determines which of them is evicted"
    pool.free_block_queue = LowestFirst(pool.blocks, pool.null_block)


class LowestFirst:
    """Replacement for vLLM's queue of free blocks."""

    def __init__(self, blocks: Sequence[KVCacheBlock], null_block: KVCacheBlock) -> None:
        self._blocks = blocks
        self._ids = [block.block_id for block in blocks if block is not null_block]

    @property
    def num_free_blocks(self) -> int:
        return len(self._ids)

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        return [self._blocks[heappop(self._ids)] for _ in range(n)]

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            heappush(self._ids, block.block_id)

    prepend_n = append_n
