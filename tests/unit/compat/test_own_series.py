"""Metrics of our own still need a patch: these fail when upstream has a place for them."""

from __future__ import annotations

import dataclasses

import pytest
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingStats

from vllm_gaudi_spec import compat


def test_upstream_still_has_no_place_for_our_series() -> None:
    """Fails when upstream's record has other fields: then `carry_own_series` may go, or has to know of them."""
    names = [field.name for field in dataclasses.fields(SpecDecodingStats) if field.name != "gaudi_spec"]
    assert names == [
        "num_spec_tokens",
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_accepted_tokens_per_pos",
        "num_draft_tokens_per_pos",
    ]
    compat.apply()
    stats = SpecDecodingStats.new(2)
    assert stats == SpecDecodingStats(2, 0, 0, 0, [0, 0], [0, 0], gaudi_spec={})
    log = SpecDecodingLogging()
    log.observe(stats)
    log.log(lambda *line: pytest.fail("an average of nothing was logged"))
