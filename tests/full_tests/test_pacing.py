"""Pacing changes how much is drafted and never what is said."""

from typing import Any

import pytest

from tests.full_tests import heads
from tests.full_tests.engines import SMALL_KV, counter
from tests.full_tests.speculation import accepted, ngram, speculating
from tests.full_tests.workload import Plain, Request, check_same, mixed_requests, run_together

SPARED = "gaudi_spec:skipped_steps"


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return mixed_requests(48)


# A draft model, here one that is nearly always wrong, reads what it missed when drafting is taken up again; a head
# reads all the time.
WAYS = [("ngram_gpu", True), ("ngram_gpu", False), ("ngram", False)]
WAYS += [(method, overlap) for method in ("draft_model", "eagle") for overlap in (True, False)]
ALL = [(method, overlap, small) for method, overlap in WAYS for small in (False, True)]
QUICK = [("draft_model", True, False)]


@pytest.mark.parametrize(
    ("method", "overlap", "small"), [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in ALL if c not in QUICK)]
)
def test_the_same_is_said(
    method: str,
    overlap: bool,
    small: bool,
    looping_llama: str,
    cousin: str,
    requests: list[Request],
    plain: Plain,
) -> None:
    target, config = looping_llama, ngram(4) | dict(method=method)
    if method == "draft_model":
        config = dict(method=method, model=cousin, num_speculative_tokens=4)
    if method == "eagle":
        target, config = heads.target(method), heads.head(method, 4)
    options: dict[str, Any] = dict(
        async_scheduling=overlap, additional_config={"gaudi_spec": {"adaptive": True, "goodput": True}}
    )
    if small:
        # A model as large as the target has as much KV.
        twice = 2 if method == "draft_model" else 1
        options |= SMALL_KV | dict(kv_cache_memory_bytes=SMALL_KV["kv_cache_memory_bytes"] * twice)
    expected = plain(target)
    with speculating(target, config, **options) as llm:
        for _ in range(2):
            check_same(requests, run_together(llm, requests), expected)
        assert counter(llm, "vllm:spec_decode_num_draft_tokens") > 0
        if method != "draft_model":
            assert accepted(llm) > 0
        assert counter(llm, SPARED) > 0, "trials at least go without drafts"
        assert llm.collective_rpc("step_report")[0]["host_syncs_per_step"] <= 1
