"""Pacing changes how much is drafted and never what is said."""

from typing import Any

import pytest

from tests.full_tests.engines import SMALL_KV, counter, engine
from tests.full_tests.speculation import accepted, ngram, speculating
from tests.full_tests.workload import Answer, Request, differences, mixed_requests, run_together

SPARED = "vllm:gaudi_spec_spared_steps"


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return mixed_requests(48)


@pytest.fixture(scope="module")
def expected(looping_llama: str, requests: list[Request]) -> list[list[Answer]]:
    with engine(looping_llama) as llm:
        return run_together(llm, requests)


QUICK = [("ngram_gpu", True, SMALL_KV)]
ALL = [
    (method, overlap, small)
    for method, overlap in (("ngram_gpu", True), ("ngram_gpu", False), ("ngram", False))
    for small in ({}, SMALL_KV)
]


@pytest.mark.parametrize(
    ("method", "overlap", "small"), [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in ALL if c not in QUICK)]
)
def test_the_same_is_said(
    method: str,
    overlap: bool,
    small: dict[str, int],
    looping_llama: str,
    requests: list[Request],
    expected: list[list[Answer]],
) -> None:
    options: dict[str, Any] = dict(
        async_scheduling=overlap, additional_config={"gaudi_spec": {"adaptive": True, "goodput": True}}
    )
    with speculating(looping_llama, ngram(4) | dict(method=method), **options, **small) as llm:
        for _ in range(2):
            different = differences(requests, run_together(llm, requests), expected)
            assert not different, f"{len(different)} of {len(requests)} requests differ\n" + "\n".join(different[:5])
        assert accepted(llm) > 0
        assert counter(llm, SPARED) > 0, "trials at least go without drafts"
        assert llm.collective_rpc("step_report")[0]["host_syncs_per_step"] <= 1
