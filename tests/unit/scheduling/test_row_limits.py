"""Each row by itself: how far it may be speculated on."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams

from tests.support.fakes import HostBackend
from vllm_gaudi_spec.config import Speculation
from vllm_gaudi_spec.drafting.on_device import DeviceRowLimits

K = 4


def make_limits(drafter_max_len: int | None = None, max_model_len: int = 1000) -> DeviceRowLimits:
    speculation = Speculation(
        method="ngram", num_drafts=K, rule="strict", drafting="greedy", drafter_max_len=drafter_max_len
    )
    return DeviceRowLimits(HostBackend(), 3, speculation, max_model_len)  # type: ignore[arg-type]


def max_drafts(row_limits: DeviceRowLimits, lengths: dict[int, int], limit: int = K) -> list[int]:
    rows, values = np.array(list(lengths), dtype=np.int64), np.array(list(lengths.values()), dtype=np.int32)
    on_host = row_limits.compute_max_drafts(rows, values, limit)
    row_limits.table.flush()
    limits = torch.full((len(rows),), limit, dtype=torch.int32)
    on_device = row_limits.compute_max_drafts_on_device(torch.from_numpy(rows), torch.from_numpy(values), limits)
    assert on_host.tolist() == on_device.tolist()
    return on_host.tolist()


@pytest.mark.parametrize(
    ("limits", "params", "lengths", "expected"),
    [
        # The drafter's maximum length
        (dict(drafter_max_len=64), dict(max_tokens=None), range(59, 66), [4, 4, 3, 2, 1, 0, 0]),
        # The model's: the drafts and one more token fit exactly.
        (dict(max_model_len=100), dict(max_tokens=None), range(94, 100), [4, 4, 3, 2, 1, 0]),
        ({}, dict(max_tokens=6), range(11, 17), [4, 3, 2, 1, 0, 0]),
        ({}, dict(max_tokens=500, extra_args={"num_speculative_tokens": 0}), [20], [0]),
        ({}, dict(max_tokens=500, extra_args={"num_speculative_tokens": 2}), [20], [2]),
        ({}, dict(max_tokens=500, extra_args={"num_speculative_tokens": 99}), [20], [4]),
    ],
)
def test_drafts_end_at_each_limit(
    limits: dict[str, int], params: dict[str, Any], lengths: Sequence[int], expected: list[int]
) -> None:
    rows = make_limits(**limits)
    rows.admit(0, SamplingParams(**params), num_prompt=10)
    for length, count in zip(lengths, expected, strict=True):
        assert max_drafts(rows, {0: length}) == [count]
        assert max_drafts(rows, {0: length}, limit=1) == [min(count, 1)]
        assert max_drafts(rows, {0: length}, limit=0) == [0]


def test_long_row_does_not_limit_others() -> None:
    rows = make_limits(drafter_max_len=64)
    for row in range(3):
        rows.admit(row, SamplingParams(max_tokens=500), num_prompt=10)
    assert max_drafts(rows, {0: 20, 1: 200, 2: 62, 3: 0}) == [4, 0, 2, 0], "the last row is padding"
    assert max_drafts(rows, {0: 20}) == [4], "whoever is in the batch"
