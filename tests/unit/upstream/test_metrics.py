"""Metrics of our own still need a patch: these fail when upstream has a place for them."""

from __future__ import annotations

import dataclasses

from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_gaudi_spec import upstream


def test_upstream_still_has_no_place_for_our_series() -> None:
    """Fails when upstream's record has other fields: then `carry_metrics` may go, or has to know of them."""
    names = [field.name for field in dataclasses.fields(SchedulerStats) if field.name != "gaudi_spec"]
    assert names == [
        "num_running_reqs",
        "num_waiting_reqs",
        "num_skipped_waiting_reqs",
        "num_kv_fetch_reqs_by_stage",
        "step_counter",
        "current_wave",
        "kv_cache_usage",
        "iteration_details",
        "prefix_cache_stats",
        "connector_prefix_cache_stats",
        "kv_cache_eviction_events",
        "spec_decoding_stats",
        "kv_connector_stats",
        "ec_connector_stats",
        "waiting_lora_adapters",
        "running_lora_adapters",
        "cudagraph_stats",
        "perf_stats",
    ]


def test_ours_is_the_last_field_and_the_others_are_as_they_were() -> None:
    upstream.apply()
    made, other = SchedulerStats(1, 2, kv_cache_usage=0.5), SchedulerStats(1, 2, kv_cache_usage=0.5)
    assert [field.name for field in dataclasses.fields(SchedulerStats)][-1] == "gaudi_spec"
    assert made == other
    made.gaudi_spec["name"] = {"": 1}  # type: ignore[attr-defined]
    assert made != other
    assert other == SchedulerStats(1, 2, kv_cache_usage=0.5)
    assert made.prefix_cache_stats is not other.prefix_cache_stats
    assert (made.spec_decoding_stats, made.waiting_lora_adapters) == (None, {})


def test_what_is_told_of_speculation_is_upstreams() -> None:
    upstream.apply()
    assert [field.name for field in dataclasses.fields(SpecDecodingStats)] == [
        "num_spec_tokens",
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_accepted_tokens_per_pos",
        "num_draft_tokens_per_pos",
    ]
