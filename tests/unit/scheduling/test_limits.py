"""Why a request has no drafts: the scheduler's answer and the runner's arithmetic agree."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from vllm_gaudi_spec.config import Speculation
from vllm_gaudi_spec.metrics import StepMetrics
from vllm_gaudi_spec.records import NoDraftReason
from vllm_gaudi_spec.scheduling.counts import DraftCounts
from vllm_gaudi_spec.scheduling.limits import DraftLimits, RowLimits, explain_no_drafts

K, NUM_PROMPT, MAX_MODEL_LEN = 4, 10, 40


@pytest.mark.parametrize(
    ("max_tokens", "asked", "drafter_max_len"), list(product((None, 1, 6, 300), (None, 0, 2), (None, 24)))
)
def test_reason_exists_exactly_if_row_has_no_drafts(
    max_tokens: int | None, asked: int | None, drafter_max_len: int | None
) -> None:
    speculation = Speculation(
        method="ngram", num_drafts=K, rule="strict", drafting="greedy", drafter_max_len=drafter_max_len
    )
    extra = None if asked is None else {"num_speculative_tokens": asked}
    params = SamplingParams(max_tokens=max_tokens, extra_args=extra)
    row_limits = RowLimits(1, speculation, MAX_MODEL_LEN)
    row_limits.admit(0, params, NUM_PROMPT)
    max_context = speculation.longest(MAX_MODEL_LEN)
    limits = DraftLimits.from_params(params, NUM_PROMPT, num_drafts=K, max_context=max_context)
    lengths = range(NUM_PROMPT, MAX_MODEL_LEN + 1)
    counts = row_limits.compute_max_drafts(
        np.zeros(len(lengths), np.int64), np.array(lengths, dtype=np.int32), K
    ).tolist()
    may_draft = [explain_no_drafts(limits, length) == NoDraftReason.NOTHING for length in lengths]
    assert may_draft == [count > 0 for count in counts]


@pytest.mark.parametrize("drafter_max_len", [None, 24, 200])
@pytest.mark.parametrize("block_size", [K, K + 1])
def test_length_is_the_reason_where_a_block_does_not_fit(drafter_max_len: int | None, block_size: int) -> None:
    speculation = Speculation(
        method="dflash",
        num_drafts=K,
        rule="strict",
        drafting="greedy",
        drafter_max_len=drafter_max_len,
        block_size=block_size,
    )
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
