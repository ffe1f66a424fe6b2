"""Tables on the device that are written at admission."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams

from tests.support.fakes import CapturingBackend, CompilingBackend, HostBackend
from tests.support.small_engine import Remembers, SmallEngine, Variant
from vllm_gaudi_spec.device_rows import DeviceRows

MAX_ROWS = 20


def make_rows(backend: HostBackend) -> DeviceRows:
    return DeviceRows(backend, MAX_ROWS, np.array([7, 8], dtype=np.int32))  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", [HostBackend, CapturingBackend])
@pytest.mark.parametrize("num_rows", [1, 7, 8, 19])
def test_flush_writes_changed_rows_only(backend: type[HostBackend], num_rows: int) -> None:
    rows = make_rows(backend())
    rows.warm_up()
    expected = torch.tensor([[7, 8]] * (MAX_ROWS + 1), dtype=torch.int32)
    assert torch.equal(rows.table_RX, expected)
    for row in range(num_rows):
        rows.set(row, np.array([row, -row], dtype=np.int32))
        expected[row] = torch.tensor([row, -row])
    rows.flush()
    assert torch.equal(rows.table_RX, expected)


def test_rows_that_could_not_be_written_are_written_by_the_next_flush() -> None:
    rows = make_rows(HostBackend())
    write, rows._run_put = rows._run_put, lambda *given: 1 / 0
    rows.set(3, np.array([1, 2], dtype=np.int32))
    with pytest.raises(ZeroDivisionError):
        rows.flush()
    rows._run_put = write
    rows.flush()
    assert rows.table_RX[3].tolist() == [1, 2]


@pytest.mark.parametrize("carried_size", [None, 24])
def test_memory_beside_kv_counts_what_steps_keep(
    carried_size: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Remembers, "carried_size", carried_size)
    runner = SmallEngine(Variant("ngram", num_snapshots=2), tmp_path).runner  # its target tells the size of its states
    runner.encoders = None
    counted = runner.bytes_beside_kv()
    assert counted["token histories of all sequences"] == runner.requests.history_RM.nbytes
    states = [value for value in vars(runner.hidden_states).values() if isinstance(value, torch.Tensor)]
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in states if tensor.ndim == 2}
    assert len(sizes) == (2 if carried_size is None else 4)
    assert counted["hidden states of all sequences and of a step's prompt chunks"] == sum(sizes.values())
    tables = [value for value in vars(runner.sampling).values() if isinstance(value, DeviceRows)]
    tables += runner.sampling._logit_edits.tables
    assert len(tables) == len(runner.sampling._tables) == 6
    assert counted["sampling parameters of all sequences"] == sum(table.table_RX.nbytes for table in tables)


def test_row_is_reset_although_its_request_never_samples(tmp_path: Path) -> None:
    """A row passes from a request with a mask to one that is aborted before it samples, then to one without a mask."""
    engine = SmallEngine(Variant(None, backend=CompilingBackend, num_blocks=200), tmp_path)
    params: dict[str, Any] = dict(temperature=0.0, max_tokens=4, ignore_eos=True)
    engine.add("masked", [1, 2, 3], SamplingParams(allowed_token_ids=[5], **params))
    while engine.running:
        engine.step()
    assert set(engine.texts["masked"]) == {5}
    engine.add("aborted", [1] * 50, SamplingParams(**params))  # longer than the token budget
    engine.step()
    engine.abort("aborted")
    allowed = engine.runner.sampling._allowed
    assert not allowed._changed
    assert (allowed.table_RX == -1).all()
    engine.finish()
