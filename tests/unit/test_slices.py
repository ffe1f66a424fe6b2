"""Prompt chunks as several rows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.fakes import CapturingBackend
from tests.support.small_engine import ROOMY, SmallEngine, Variant
from vllm_gaudi_spec.step_inputs import StepInputs


@pytest.fixture
def sync(tmp_path: Path) -> Any:
    """The KV sync of a draft model whose rows the tests set."""
    engine: Any = SmallEngine(Variant("draft_model", backend=CapturingBackend, num_blocks=ROOMY), tmp_path)
    return engine.runner.drafting._kv_sync


@torch.inference_mode()
def read(sync: Any, rows: list[int], starts: list[int], state: dict[int, tuple[int, int]]) -> dict[int, int]:
    """Read slices of 8 tokens. `state` maps rows to what the drafter had read and the target computed.

    Returns what the drafter has read then.
    """
    for row, (reach, computed) in state.items():
        sync._reach_R[row], sync._requests.computed_R[row] = reach, computed
    header_np = np.zeros((4, len(rows)), dtype=np.int32)
    header_np[0], header_np[1] = rows, starts
    blocks = sync._requests.blocks(header_np[0], [0] * len(rows), 64)
    sync._read_rows(StepInputs.pack(header_np, blocks, sync._requests.backend.memory.upload), 8)
    return {row: int(sync._reach_R[row]) for row in state}


def test_a_gap_before_a_sliced_chunk_is_not_recorded_as_read(sync: Any) -> None:
    rows, starts = [0, 0, 0, 1, 1, 1], [0, 8, 16, 16, 24, 32]
    assert read(sync, rows, starts, {0: (0, 20), 1: (4, 40)}) == {0: 20, 1: 4}
    assert read(sync, rows, starts, {0: (0, 20), 1: (16, 40)}) == {0: 20, 1: 40}


def test_a_sliced_chunk_is_read_up_to_the_drafters_last_position(sync: Any) -> None:
    sync._max_len = 50
    assert read(sync, [0, 0, 0], [40, 48, 56], {0: (40, 64)}) == {0: 50}


def test_rows_catch_up_together_in_slices(sync: Any) -> None:
    lags: Any = [SimpleNamespace(gap=gap, end=gap, request=row) for row, gap in enumerate((9, 7))]
    group, offsets, shape = sync._take_gaps(lags)
    rows = [lag.request for lag in group]
    assert (rows, offsets) == ([0, 0, 1], [0, 8, 0])
    assert shape in sync._shapes.prefills()
    assert all(lag.gap <= 0 for lag in lags)
    assert read(sync, rows, offsets, {0: (3, 12), 1: (0, 7)}) == {0: 12, 1: 7}
