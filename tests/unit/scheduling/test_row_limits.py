"""Each row by itself: how far it may be speculated on."""

from __future__ import annotations

import numpy as np
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


def test_long_row_does_not_limit_others() -> None:
    rows = make_limits(drafter_max_len=64)
    for row in range(3):
        rows.admit(row, SamplingParams(max_tokens=500), num_prompt=10)
    assert max_drafts(rows, {0: 20, 1: 200, 2: 62}) == [4, 0, 2]
    assert max_drafts(rows, {0: 20}) == [4], "whoever is in the batch"


def test_drafts_end_at_drafters_maximum_length() -> None:
    rows = make_limits(drafter_max_len=64)
    rows.admit(0, SamplingParams(max_tokens=None), num_prompt=10)
    for length in range(64 - K - 1, 64 + 2):
        (count,) = max_drafts(rows, {0: length})
        assert count == max(0, min(K, 64 - length))


def test_drafts_end_at_models_maximum_length() -> None:
    rows = make_limits(max_model_len=100)
    rows.admit(0, SamplingParams(max_tokens=None), num_prompt=10)
    for length in range(90, 100):
        (count,) = max_drafts(rows, {0: length})
        assert count == min(K, 100 - length - 1), "the drafts and one more token fit exactly"


def test_drafts_end_at_max_tokens() -> None:
    rows = make_limits()
    rows.admit(0, SamplingParams(max_tokens=6), num_prompt=10)
    assert [max_drafts(rows, {0: length})[0] for length in range(11, 17)] == [4, 3, 2, 1, 0, 0]


def test_request_and_scheduler_can_lower_number_of_drafts() -> None:
    rows = make_limits()
    for row, option in enumerate((0, 2, 99)):
        rows.admit(row, SamplingParams(max_tokens=500, extra_args={"num_speculative_tokens": option}), num_prompt=10)
    assert max_drafts(rows, {0: 20, 1: 20, 2: 20}) == [0, 2, 4]
    assert max_drafts(rows, {0: 20, 1: 20, 2: 20}, limit=1) == [0, 1, 1]
    assert max_drafts(rows, {0: 20, 1: 20, 2: 20}, limit=0) == [0, 0, 0]


def test_pad_row_has_no_drafts() -> None:
    assert max_drafts(make_limits(), {3: 0}) == [0]
