"""Warm-up and length limits of each kind of drafter on the device that reads KV."""

from __future__ import annotations

import pytest

from tests.support.fakes import CapturingBackend, HostBackend
from tests.unit.drafting.test_autoregressive import Rows
from tests.unit.drafting.test_heads import HeadRows
from tests.unit.drafting.test_mtp import ChainedRows

every_kind = pytest.mark.parametrize("kind", [Rows, HeadRows, ChainedRows])


@every_kind
@pytest.mark.parametrize("device", [HostBackend, CapturingBackend])
def test_warm_up_covers_every_shape(kind: type[Rows], device: type[HostBackend]) -> None:
    kind(num_drafts=3, drafter_max_len=600, max_len=600, exact_context=False, backend=device()).check_warm_up()


@every_kind
def test_row_beyond_drafter_length_continues_without_drafts(kind: type[Rows]) -> None:
    rows = kind(num_drafts=4, drafter_max_len=32)
    rows.start({"a": [5, 6, 7], "long": list(range(1, 60)), "near": list(range(2, 30))})
    drafted = rows.sample({"a": [1], "long": [2], "near": [3]})
    assert drafted == {"a": rows.expected("a"), "long": [], "near": rows.expected("near")}
    assert len(drafted["near"]) == 3
    rows.sample({"a": [2], "near": [4, 5, 6]})
    assert rows.sample({"near": [4, 5]})["near"] == []
    assert rows.sample({"a": [9]})["a"] == rows.expected("a")
