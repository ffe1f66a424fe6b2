"""Tables on the device that are written at admission."""

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
    return DeviceRows(backend, MAX_ROWS, np.array([7, 8], dtype=np.int32))


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


@pytest.mark.parametrize("backend", [HostBackend, CapturingBackend])
def test_tables_are_written_together_and_defaults_are_not_copied(backend: type[HostBackend]) -> None:
    defaults = np.array([7, 8], dtype=np.int32), np.array(0.5, dtype=np.float32)
    rows = DeviceRows(backend(), MAX_ROWS, *defaults)  # type: ignore[arg-type]
    rows.warm_up()
    copied: list[torch.Tensor] = []
    upload = rows._upload
    rows._upload = lambda tensor: copied.append(tensor) or upload(tensor)  # type: ignore[func-returns-value]
    for values in ((np.array([1, 2], dtype=np.int32), np.array(3, dtype=np.float32)), (None, defaults[1]), (None,) * 2):
        copied.clear()
        rows.set(5, *values)
        rows.set(6, *values)
        rows.flush()
        for row in (5, 6):
            for table_RX, value, default in zip(rows.tables, values, defaults, strict=True):
                assert np.array_equal(table_RX[row].numpy(), default if value is None else value)
        assert len(copied) == 2 * (1 + sum(value is not None for value in values))
    for table_RX, default in zip(rows.tables, defaults, strict=True):
        assert np.array_equal(table_RX.numpy(), np.broadcast_to(default, table_RX.shape)), "defaults were overwritten"
    copied.clear()
    rows.set(5, None, None)
    rows.flush()
    assert not copied


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
    rows = runner.sampling._rows
    assert len(rows.tables) == 6
    kept = [*rows.tables, *(default_NX for group in rows._default_NX.values() for default_NX in group)]
    assert counted["sampling parameters of all sequences"] == sum(tensor.nbytes for tensor in kept)


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
    sampling = engine.runner.sampling
    assert not sampling._rows._changed
    assert (sampling._allowed_RW == -1).all()
    engine.finish()
