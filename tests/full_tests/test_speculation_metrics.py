"""What is counted: vLLM's counters are the sum of what single requests report, both of real drafts only; a step reads
from the device once at most."""

import pytest
from vllm import LLM

from tests.full_tests.engines import SMALL_KV, by_label, counter, generate, preemptions
from tests.full_tests.speculation import METHODS, accounts, speculating
from tests.full_tests.workload import mixed_requests
from tests.support.marks import quick_and_slow
from vllm_gaudi_spec.metrics import ROWS, ROWS_WITHOUT_DRAFTS

PREFIX = "vllm:spec_decode_"

EXPECTED = ("nothing", "ending", "unverified")
"""Reasons for no drafts in such a workload."""


def per_position(llm: LLM) -> list[int]:
    [metric] = [m for m in llm.get_metrics() if m.name == PREFIX + "num_accepted_tokens_per_pos"]
    return [int(value) for value in metric.values]


QUICK = [("ngram", {}), ("suffix", SMALL_KV)]
ALL = [(method, small) for method in METHODS for small in ({}, SMALL_KV)]


@pytest.mark.parametrize(("method", "small"), quick_and_slow(QUICK, ALL))
def test_counters_are_the_sum_of_the_requests(method: str, small: dict[str, int], looping_llama: str) -> None:
    # vLLM reports nothing for a request that ends by a stop string: those end behind the engine's back.
    k, requests = 4, [request for request in mixed_requests() if not request.params.stop]
    with speculating(looping_llama, METHODS[method](k), **small) as llm:
        steps = accounts(generate(llm, [r.prompt for r in requests], [r.params for r in requests]))
        totals = [counter(llm, PREFIX + name) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")]
        positions = per_position(llm)
        rows = by_label(llm, ROWS, "num_drafts")
        reasons = by_label(llm, ROWS_WITHOUT_DRAFTS, "reason")
        assert (preemptions(llm) > 0) == bool(small)
        report = llm.collective_rpc("step_report")[0]
    drafted = [n for step in steps for n in step.drafted]
    accepted = [n for step in steps for n in step.accepted]
    assert totals == [sum(n > 0 for n in drafted), sum(drafted), sum(accepted)]
    assert positions == [sum(n > position for n in accepted) for position in range(k)]
    assert sum(accepted) > 100
    assert {number: rows[str(number)] for number in range(1, k + 1)} == {
        number: sum(n == number for n in drafted) for number in range(1, k + 1)
    }
    assert sum(reasons.values()) == rows["0"] > 0
    assert all(count == 0 for reason, count in reasons.items() if reason not in EXPECTED), reasons
    assert report["steps"] > 20
    assert report["host_syncs_per_step"] <= 1
