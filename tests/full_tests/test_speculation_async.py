"""Asynchronous scheduling with every drafter that works on the device: the tokens are those of synchronous steps and of
none with drafts, under both of vLLM's runner contracts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from vllm.config import VllmConfig

from tests.full_tests import heads
from tests.full_tests.engines import SMALL_KV, counter, preemptions
from tests.full_tests.speculation import accepted, ngram, speculating
from tests.full_tests.test_draft_model import COUPLED, name
from tests.full_tests.workload import Plain, Request, check_same, run_together
from tests.support.marks import quick_and_slow


class Drafter(NamedTuple):
    method: str
    model: str = ""
    """A fixture: `looping_llama` is the target itself, `twin` the same with tokens of its own; both are always right.
    `cousin` and `stranger` are nearly always wrong. Heads come with a target of their own."""

    def __str__(self) -> str:
        return self.model or self.method

    @property
    def is_head(self) -> bool:
        return self.method in heads.METHODS

    def schedule(self, name: str) -> dict[str, Any]:
        if name == "roomy":
            return {}
        # A model as large as the target has as much KV.
        kv = SMALL_KV["kv_cache_memory_bytes"] * (2 if self.model else 1)
        return SMALL_KV | dict(kv_cache_memory_bytes=kv, max_num_batched_tokens=256)


NGRAM, MEDUSA = Drafter("ngram_gpu"), Drafter("medusa")
COUSIN = Drafter("draft_model", "cousin")
DRAFTERS = [
    NGRAM,
    Drafter("draft_model", "looping_llama"),
    COUSIN,
    Drafter("universal_draft", "twin"),
    Drafter("universal_draft", "stranger"),
    *map(Drafter, heads.METHODS),
]

# n-grams are drafted in one way only.
WAYS = [(drafter, options) for drafter in DRAFTERS for options in ([{}] if drafter == NGRAM else [{}, COUPLED])]


class Pair(NamedTuple):
    target: str
    config: Callable[..., dict[str, Any]]
    """From k and options to the speculative configuration."""


@pytest.fixture
def pair(drafter: Drafter, looping_llama: str, request: pytest.FixtureRequest) -> Pair:
    method, model = drafter
    if drafter.is_head:
        return Pair(heads.target(method), lambda k, **options: heads.head(method, k, **options))
    if not model:
        return Pair(looping_llama, lambda k, **options: ngram(k, **options) | dict(method=method))
    path = request.getfixturevalue(model)
    return Pair(
        looping_llama, lambda k, **options: dict(method=method, model=path, num_speculative_tokens=k, **options)
    )


# The contracts differ in how a request comes back after preemption.
SETTINGS = [(True, False, "roomy"), *((overlap, v2, "preempted") for overlap in (True, False) for v2 in (False, True))]
EQUAL = [(*way, *setting) for way in WAYS for setting in SETTINGS]
QUICK = [(MEDUSA, COUPLED, True, True, "preempted")]


@pytest.mark.parametrize(("drafter", "options", "overlap", "v2", "schedule"), quick_and_slow(QUICK, EQUAL), ids=name)
def test_async_scheduling_is_lossless(
    drafter: Drafter,
    options: dict[str, Any],
    overlap: bool,
    v2: bool,
    schedule: str,
    pair: Pair,
    requests: list[Request],
    plain: Plain,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """48 requests, greedy and seeded, some of which find blocks of others in the prefix cache; and once more."""
    expected = plain(pair.target)
    # vLLM picks a contract by what its own runners can do. Ours serves both.
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", property(lambda self: v2))
    monkeypatch.setattr(VllmConfig, "_validate_v2_model_runner", lambda self: None)
    with speculating(
        pair.target, pair.config(4, **options), async_scheduling=overlap, **drafter.schedule(schedule)
    ) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == overlap
        for _ in range(2):
            check_same(requests, run_together(llm, requests), expected)
        assert counter(llm, "vllm:spec_decode_num_draft_tokens") > 200
        if drafter.model not in ("cousin", "stranger"):
            assert accepted(llm) > 50
        assert (preemptions(llm) > 0) == (schedule == "preempted")
        assert counter(llm, "vllm:prefix_cache_hits") > 0
        assert llm.collective_rpc("step_report")[0]["host_syncs_per_step"] <= 1
