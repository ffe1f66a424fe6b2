"""Tracking of the blocks that a drafter has read, compared with a reference that counts token by token."""

import random
from types import SimpleNamespace

import numpy as np

from vllm_gaudi_spec.drafting.base import ReadBlocks

ROWS, SIZES, LONGEST = 5, (4, 8), 40


def test_loaded_block_has_what_a_connector_transfers() -> None:
    """A loaded block counts as read only if the drafter's KV came with it, whatever it held before."""
    requests = SimpleNamespace(
        tables_np=[np.array([[3, 5, 0, 0]])], block_sizes=(4,), num_blocks=[np.array([2], dtype=np.int64)]
    )
    for keeps_up, read in ((True, 8), (False, 4)):
        blocks = ReadBlocks(requests, 6, [0], keeps_up=keeps_up)
        blocks.record_read(*(np.array([number]) for number in (0, 0, 8)))
        blocks.load([5])
        assert blocks.count_read(0, 8) == read
    assert blocks.count_read(0, 3) == 3
    blocks.load([3, 5])
    assert blocks.count_read(0, 8) == 0


def test_recording_many_rows_equals_recording_each() -> None:
    rng = random.Random(0)
    widths = [LONGEST // size for size in SIZES]
    # Each block belongs to one row of one group.
    ids = np.arange(1, 1 + ROWS * sum(widths), dtype=np.int32)
    tables = [part.reshape(ROWS, -1) for part in np.split(ids, [ROWS * widths[0]])]
    counts = [np.full(ROWS, width, dtype=np.int64) for width in widths]
    requests = SimpleNamespace(tables_np=tables, block_sizes=SIZES, num_blocks=counts)
    blocks = ReadBlocks(requests, 1 + ROWS * sum(widths), [0, 1])
    known = [0] * ROWS
    while min(known) < LONGEST:
        rows = [row for row in rng.sample(range(ROWS), rng.randint(0, ROWS)) if known[row] < LONGEST]
        reach = [rng.randint(known[row] + 1, LONGEST) for row in rows]
        begins = np.array([known[row] for row in rows], dtype=np.int32)
        blocks.record_read(np.array(rows, dtype=np.int64), begins, np.array(reach, dtype=np.int32))
        for row, end in zip(rows, reach, strict=True):
            known[row] = end
        assert [blocks.count_read(row, LONGEST) for row in range(ROWS)] == known
        for row, end in enumerate(known):
            assert blocks.count_read(row, end) == end
