"""Prompt chunks as several rows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.support.fakes import CapturingBackend
from tests.support.small_engine import BLOCK_DRAFTER, PARALLEL, ROOMY, SmallEngine, Variant, greedy_text
from vllm_gaudi_spec.records import Batch, Planned
from vllm_gaudi_spec.step_inputs import StepInputs


@pytest.mark.parametrize("method", ["draft_model", PARALLEL, BLOCK_DRAFTER])
@pytest.mark.parametrize("overlap", [False, True])
def test_drafters_read_prompts_in_slices(method: str, overlap: bool, tmp_path: Path) -> None:
    """A drafter that is right is always accepted, so it has read every slice at its own positions."""
    variant = Variant(method, overlap=overlap, backend=CapturingBackend, num_blocks=ROOMY)
    engine = SmallEngine(variant, tmp_path)
    runner: Any = engine.runner
    put, make_batch, num_cut = runner.hidden_states.put, runner.make_batch, 0

    def put_once(phase: str, queries: int, rows_B: torch.Tensor, *rest: Any) -> None:
        used = [row for row in rows_B.tolist() if row != runner.requests.pad_row]
        assert len(set(used)) == len(used), "the order of writes to one row is undefined on a card"
        put(phase, queries, rows_B, *rest)

    def count_cut(planned: Planned, *rest: Any) -> Batch:
        nonlocal num_cut
        num_cut += len(set(planned.requests)) < len(planned.requests)
        return make_batch(planned, *rest)

    runner.hidden_states.put, runner.make_batch = put_once, count_cut
    prompts = {f"{length}": list(range(20, 20 + length)) for length in (13, 2, 12, 3, 33)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    engine.finish()
    for name, prompt in prompts.items():
        assert engine.texts[name] == greedy_text(prompt, 12)
    assert engine.num_accepted == engine.num_verified > 0
    assert num_cut


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
