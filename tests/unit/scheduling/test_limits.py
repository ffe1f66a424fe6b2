"""How far each row may be speculated on, on the host and the device, and why a request has no drafts."""

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.support.fakes import HostBackend, make_speculation
from vllm_gaudi_spec.drafting.on_device import DeviceRowLimits
from vllm_gaudi_spec.metrics import StepMetrics
from vllm_gaudi_spec.records import NoDraftReason
from vllm_gaudi_spec.scheduling.counts import DraftCounts
from vllm_gaudi_spec.scheduling.limits import DraftLimits, RowLimits, explain_no_drafts

K, NUM_PROMPT, MAX_MODEL_LEN = 4, 10, 40


def make_limits(drafter_max_len: int | None = None, max_model_len: int = 1000) -> DeviceRowLimits:
    return DeviceRowLimits(HostBackend(), 3, make_speculation(K, drafter_max_len), max_model_len)


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


@pytest.mark.parametrize(
    ("max_tokens", "asked", "drafter_max_len"), list(product((None, 1, 6, 300), (None, 0, 2), (None, 24)))
)
def test_reason_exists_exactly_if_row_has_no_drafts(
    max_tokens: int | None, asked: int | None, drafter_max_len: int | None
) -> None:
    speculation = make_speculation(K, drafter_max_len)
    extra = None if asked is None else {"num_speculative_tokens": asked}
    params = SamplingParams(max_tokens=max_tokens, extra_args=extra)
    row_limits = RowLimits(1, speculation, MAX_MODEL_LEN)
    row_limits.admit(0, params, NUM_PROMPT)
    max_context = speculation.longest(MAX_MODEL_LEN)
    limits = DraftLimits.from_params(params, NUM_PROMPT, num_drafts=K, max_context=max_context)
    lengths = range(NUM_PROMPT, MAX_MODEL_LEN + 1)
    rows_N, lengths_N = np.zeros(len(lengths), np.int64), np.array(lengths, dtype=np.int32)
    counts = row_limits.compute_max_drafts(rows_N, lengths_N, K).tolist()
    may_draft = [explain_no_drafts(limits, length) == NoDraftReason.NOTHING for length in lengths]
    assert may_draft == [count > 0 for count in counts]


@pytest.mark.parametrize("drafter_max_len", [None, 24, 200])
@pytest.mark.parametrize("block_size", [K, K + 1])
def test_length_is_the_reason_where_a_block_does_not_fit(drafter_max_len: int | None, block_size: int) -> None:
    speculation = make_speculation(K, drafter_max_len, method="dflash", block_size=block_size)
    counts = DraftCounts(speculation, MAX_MODEL_LEN, StepMetrics())
    for length in range(NUM_PROMPT, MAX_MODEL_LEN + 1):
        request: Any = SimpleNamespace(
            request_id="a",
            sampling_params=SamplingParams(max_tokens=None),
            num_prompt_tokens=NUM_PROMPT,
            num_tokens=length,
        )
        fits = length - 1 + block_size <= min(drafter_max_len or MAX_MODEL_LEN, MAX_MODEL_LEN)
        fits &= length < speculation.longest(MAX_MODEL_LEN)
        assert counts._reason(request, "", "") == ("nothing" if fits else "length"), length
