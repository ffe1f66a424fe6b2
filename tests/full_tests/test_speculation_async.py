"""The n-gram drafter on the device works with asynchronous scheduling, under both of vLLM's runner contracts, and gives
the tokens that are given without speculation."""

import pytest
from vllm.config import VllmConfig

from tests.full_tests.engines import SMALL_KV, engine, preemptions
from tests.full_tests.speculation import accepted, ngram, speculating
from tests.full_tests.workload import Answer, Request, differences, mixed_requests, run_together


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return mixed_requests(48)


@pytest.fixture(scope="module")
def expected(looping_llama: str, requests: list[Request]) -> list[list[Answer]]:
    with engine(looping_llama) as llm:
        return run_together(llm, requests)


QUICK = [(True, True, SMALL_KV)]
ALL = [(overlap, v2, small) for overlap in (True, False) for v2 in (False, True) for small in ({}, SMALL_KV)]


@pytest.mark.parametrize(
    ("overlap", "v2", "small"), [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in ALL if c not in QUICK)]
)
def test_device_ngram(
    overlap: bool,
    v2: bool,
    small: dict[str, int],
    looping_llama: str,
    requests: list[Request],
    expected: list[list[Answer]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda self: v2))
    monkeypatch.setattr(VllmConfig, "_validate_v2_model_runner", lambda self: None)
    config = ngram(4) | dict(method="ngram_gpu")
    with speculating(looping_llama, config, async_scheduling=overlap, **small) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == overlap
        for _ in range(2):
            different = differences(requests, run_together(llm, requests), expected)
            assert not different, f"{len(different)} of {len(requests)} requests differ\n" + "\n".join(different[:5])
        assert accepted(llm) > 50
        assert (preemptions(llm) > 0) == bool(small)
        assert llm.collective_rpc("step_report")[0]["host_syncs_per_step"] <= 1


@pytest.mark.slow
def test_same_drafts_as_on_the_host(looping_llama: str, requests: list[Request]) -> None:
    """Without overlap both see the same contexts, so they draft and gain the same."""
    gained = []
    for method in ("ngram", "ngram_gpu"):
        with speculating(looping_llama, ngram(4) | dict(method=method), async_scheduling=False) as llm:
            run_together(llm, requests)
            gained.append(accepted(llm))
    assert gained[0] == gained[1]
