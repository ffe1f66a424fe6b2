"""Asynchronous scheduling with every drafter that works on the device: the tokens are those of synchronous steps and of
none with drafts, under both of vLLM's runner contracts, and a place that was scheduled for a draft that came to nothing
leaves no trace."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from vllm import LLM
from vllm.config import VllmConfig

from tests.full_tests import heads
from tests.full_tests.engines import SMALL_KV, counter, preemptions
from tests.full_tests.speculation import accepted, ngram, speculating
from tests.full_tests.test_draft_model import COUPLED, name
from tests.full_tests.workload import Answer, Plain, Request, answers, check_same, mixed_requests, run_together


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


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return mixed_requests(48)


def quick_and_slow(cases: list[Any], quick: list[Any]) -> list[Any]:
    assert all(case in cases for case in quick)
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


# --- tokens ---

# The contracts differ in how a request comes back after preemption.
SETTINGS = [
    (True, False, "roomy"),
    *((overlap, v2, "preempted") for overlap in (True, False) for v2 in (False, True)),
]
EQUAL = [(*way, *setting) for way in WAYS for setting in SETTINGS]
QUICK = [(MEDUSA, COUPLED, True, True, "preempted")]


@pytest.mark.parametrize(("drafter", "options", "overlap", "v2", "schedule"), quick_and_slow(EQUAL, QUICK), ids=name)
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


# --- what is left behind ---

K = 4
TRACES = [(drafter, overlap) for drafter in DRAFTERS for overlap in (True, False)]


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "overlap"), TRACES, ids=str)
def test_rejected_and_aborted_drafts_leave_no_trace(
    drafter: Drafter, overlap: bool, pair: Pair, requests: list[Request], plain: Plain
) -> None:
    """Of rejected places, which are given back to the last one; of requests that were aborted with drafts in flight,
    among them some that still wait, and whose names come again; and of those that have ended."""
    single = [index for index, request in enumerate(requests) if request.params.n == 1]
    expected = plain(pair.target)
    options = dict(max_num_seqs=16, async_scheduling=overlap, **drafter.schedule("preempted"))
    with speculating(pair.target, pair.config(K), **options) as llm:
        flight = Flight(llm, requests)
        for index in single:
            flight.add(index)
        free = flight.free_blocks()
        for number in range(8):
            for _ in range(3 + number % 3):
                flight.step()
            flight.land()
            flight.check_state()
        # Two that run, one that waits.
        aborted = [*flight.running()[:2], single[-1]]
        flight.abort(aborted)
        flight.step()
        flight.land()
        flight.check_state()
        for index in aborted:
            flight.add(index)
        while llm.llm_engine.has_unfinished_requests():
            flight.step()
        check_same([requests[i] for i in single], [[flight.done[i]] for i in single], [expected[i] for i in single])
        assert counter(llm, "vllm:spec_decode_num_draft_tokens") > accepted(llm)
        assert flight.free_blocks() == free


class Flight:
    """An engine that is led step by step."""

    def __init__(self, llm: LLM, requests: list[Request]) -> None:
        self._llm = llm
        self._requests = requests
        self._core = llm.llm_engine.engine_core.engine_core
        self._runner = self._core.model_executor.driver_worker.worker.model_runner
        self._names: dict[int, str] = {}
        self.done: dict[int, Answer] = {}

    def add(self, index: int) -> None:
        request = self._requests[index]
        prompt = {"prompt_token_ids": request.prompt}
        self._names[index] = self._llm.llm_engine.add_request(str(index), prompt, request.params)

    def abort(self, chosen: list[int]) -> None:
        self._llm.llm_engine.abort_request([self._names[index] for index in chosen], internal=True)

    def step(self) -> None:
        for output in self._llm.llm_engine.step():
            if output.finished:
                [[self.done[int(output.request_id.split("-")[0])]]] = answers([output])

    def land(self) -> None:
        """Schedule nothing more until no step is in flight."""
        self._llm.sleep(level=0, mode="keep")
        while self._core.batch_queue:
            self.step()
        self._llm.wake_up(tags=["scheduling"])

    def running(self) -> list[int]:
        names = {name: index for index, name in self._names.items()}
        return [names[request.request_id] for request in self._core.scheduler.running]

    def free_blocks(self) -> int:
        return self._core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def check_state(self) -> None:
        """With nothing in flight the scheduler and the device agree on each running request, and no place is left that
        was only scheduled."""
        scheduler, rows = self._core.scheduler, self._runner.requests
        assert scheduler.running
        for request in scheduler.running:
            known = rows.by_id[request.request_id]
            tokens, num_computed, row = list(request.all_token_ids), request.num_computed_tokens, known.row
            assert request.num_output_placeholders == 0
            assert num_computed == len(tokens) - 1 or request.is_prefill_chunk
            assert rows.computed_R[row] == num_computed
            assert rows.history_RM[row, : len(tokens)].tolist() == tokens
            self._check_blocks(request.request_id, row, len(tokens))

    def _check_blocks(self, name: str, row: int, num_tokens: int) -> None:
        rows = self._runner.requests
        theirs = self._core.scheduler.kv_cache_manager.get_block_ids(name)
        groups = zip(theirs, rows.tables_np, rows.num_blocks, rows.block_sizes, strict=True)
        for blocks, table_np, counts_np, size in groups:
            assert table_np[row, : counts_np[row]].tolist() == blocks
            # Two steps may be in flight, and a drafter may write behind the second.
            assert len(blocks) <= -(-(num_tokens + 2 * (1 + K) + K) // size)
