"""What is counted: vLLM's counters are the sum of what single requests report, both of real drafts only; a step reads
from the device once at most."""

import pytest
from vllm import LLM, SamplingParams

from tests.full_tests import drafters
from tests.full_tests.engines import SMALL_KV, counter, engine, first_tokens, generate, preemptions
from tests.full_tests.prompts import random_prompts
from tests.full_tests.speculation import METHODS, accounts, custom, speculating
from tests.full_tests.tiny_models import VOCAB
from tests.full_tests.workload import mixed_requests
from vllm_gaudi_spec.metrics import ROWS, ROWS_WITHOUT_DRAFTS

PREFIX = "vllm:spec_decode_"


EXPECTED = ("nothing", "ending", "unverified")
"""Reasons for no drafts in such a workload."""


def by_label(llm: LLM, name: str, label: str) -> dict[str, int]:
    found = {metric.labels[label]: int(metric.value) for metric in llm.get_metrics() if metric.name == name}
    assert found, f"no metric named {name}"
    return found


def per_position(llm: LLM) -> list[int]:
    [metric] = [m for m in llm.get_metrics() if m.name == PREFIX + "num_accepted_tokens_per_pos"]
    return [int(value) for value in metric.values]


QUICK = [("ngram", {}), ("suffix", SMALL_KV)]
ALL = [(method, small) for method in METHODS for small in ({}, SMALL_KV)]


@pytest.mark.parametrize(
    ("method", "small"), [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in ALL if c not in QUICK)]
)
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


def test_row_counters_match_generated_tokens(looping_llama: str) -> None:
    """A step in which a row is admitted, or comes back, yields a token and is no row that decodes; every other row
    yields one token beside its accepted drafts."""
    prompts = random_prompts([40 + 20 * (place % 9) for place in range(24)], VOCAB)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with speculating(looping_llama, METHODS["ngram"](4), **SMALL_KV) as llm:
        generate(llm, prompts, params)
        rows = sum(by_label(llm, ROWS, "num_drafts").values())
        accepted = counter(llm, PREFIX + "num_accepted_tokens")
        generated = counter(llm, "vllm:generation_tokens")
        resumed = preemptions(llm)
    assert generated == len(prompts) * 40
    assert accepted > 100
    assert resumed > 0
    assert rows == generated - accepted - len(prompts) - resumed


def test_padding_is_not_counted_as_drafts(tiny_llama: str) -> None:
    """Two drafts now and then where four are possible: the places that stay empty count for nothing."""
    prompts = random_prompts([10, 20, 30], VOCAB)
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    with engine(tiny_llama) as llm:
        record = drafters.Record.of(prompts, first_tokens(generate(llm, prompts, params)))
    script = drafters.play(lambda context, k: record.next(context, 2) if len(context) % 3 == 0 else [])
    with speculating(tiny_llama, custom("Scripted", 4)) as llm:
        steps = accounts(generate(llm, prompts, params))
        totals = [counter(llm, PREFIX + name) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")]
        assert per_position(llm)[2:] == [0, 0]
    said = [drafts for _, drafts in script.rows() if drafts]
    assert len(said) > 15
    # The last of a request's drafts may come too late for a step.
    assert len(said) - len(prompts) <= totals[0] <= len(said)
    assert totals[1] == totals[2] <= 2 * totals[0]
    assert all(n <= 2 for step in steps for n in step.drafted)
