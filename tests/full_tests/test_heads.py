"""Heads on the target's hidden states: texts are those without drafts, and drafts are the same in every company.

A head cannot make the target's states again. One that reads a wrong one, or skips one, drafts worse, and no text would
show it: so drafts are compared one by one, by the context behind which they were made.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
from vllm import LLM, SamplingParams

from tests.full_tests.engines import SMALL_KV, counter, engine, first_tokens, generate, preemptions
from tests.full_tests.heads import (
    MAX_LEN,
    METHODS,
    Rounds,
    busy_requests,
    compare,
    greedy,
    head,
    target,
    text,
    texts,
    watched,
)
from tests.full_tests.speculation import Account, accepted, accounts, speculating
from tests.full_tests.test_draft_model import COUPLED, PROBABILISTIC, STRICT, name
from tests.full_tests.workload import Answer, Request, differences, run_together

UNCACHED = dict(enable_prefix_caching=False)
CHUNKED = dict(max_num_batched_tokens=64)
SCHEDULES: dict[str, dict[str, Any]] = {
    "overlapping": {},
    "one by one": dict(async_scheduling=False),
    "chunked, cached, preempted": CHUNKED | SMALL_KV,
}
# Longest context that the drafter sees: some requests are past it from the start, others get there.
SHORT = dict(max_model_len=150)


def hits(llm: LLM) -> int:
    return counter(llm, "vllm:prefix_cache_hits")


def reads_per_step(llm: LLM) -> float:
    reads: float = llm.collective_rpc("step_report")[0]["host_syncs_per_step"]
    return reads


# --- lossless ---


@pytest.fixture(scope="module")
def busy() -> list[Request]:
    return busy_requests()


@pytest.fixture(scope="module")
def answers(busy: list[Request]) -> Callable[[str], list[list[Answer]]]:
    """What a method's target says without drafts."""

    @cache
    def of(path: str) -> list[list[Answer]]:
        with engine(path, max_model_len=MAX_LEN) as llm:
            return run_together(llm, busy)

    return lambda method: of(target(method))


# EAGLE is in adversary/test_adversary.py, EAGLE-3 and Medusa in test_heads_rule.py.
CASES = [
    ("mtp", 1, STRICT | SHORT, "overlapping"),
]
ALL = [
    (method, k, options, schedule)
    for method in METHODS
    for k in (1, 2, 4)
    for options in ({}, STRICT, COUPLED, SHORT)
    for schedule in SCHEDULES
]


@pytest.mark.parametrize(
    ("method", "k", "options", "schedule"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in CASES)],
    ids=name,
)
def test_lossless(
    method: str,
    k: int,
    options: dict[str, Any],
    schedule: str,
    busy: list[Request],
    answers: Callable[[str], list[list[Answer]]],
) -> None:
    """64 requests, greedy and seeded, of which some draft less or nothing."""
    expected = answers(method)
    with speculating(target(method), head(method, k, **options), max_model_len=MAX_LEN, **SCHEDULES[schedule]) as llm:
        different = differences(busy, run_together(llm, busy), expected)
        assert not different, f"{len(different)} of {len(busy)} differ\n" + "\n".join(different[:5])
        assert counter(llm, "vllm:spec_decode_num_draft_tokens") > 500
        assert accepted(llm) > 100
        assert reads_per_step(llm) <= 1
        if "preempted" in schedule:
            assert preemptions(llm) > 0
        assert hits(llm) > 0


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_requests_among_drawn_drafts(
    method: str, rule: str, busy: list[Request], answers: Callable[[str], list[list[Answer]]]
) -> None:
    """Those that are sampled have another text then, of the same law; those beside them have what they had."""
    options = PROBABILISTIC | dict(rejection_sample_method=rule)
    with speculating(target(method), head(method, 4, **options), max_model_len=MAX_LEN, **CHUNKED) as llm:
        said = run_together(llm, busy)
        assert accepted(llm) > 100
    exact = [index for index, request in enumerate(busy) if request.params.temperature == 0]
    plain = answers(method)
    requests, ours, expected = ([whole[index] for index in exact] for whole in (busy, said, plain))
    different = differences(requests, ours, expected)
    assert not different, f"{len(different)} of {len(exact)} differ\n" + "\n".join(different[:5])
    assert said != plain, "drawn drafts change what is sampled"


# --- drafts ---

K = 4
NUM_TOKENS = 60
SHARED = text(160)
# They part from what they share at a block's border, before it and behind it: the head's KV at the last token of a
# block belongs to the first token of the next.
PARTING = [SHARED[:length] + text(1, first) for first, length in enumerate((63, 64, 65, 95, 96, 97), start=1)]
PROMPTS = [SHARED, *PARTING, *texts()]
# Of the first draft of each round, how many are right at least, on this text.
RIGHT = {"eagle": 0.6, "eagle3": 0.6, "mtp": 0.5, "medusa": 0.25}


class Plain(NamedTuple):
    """One run of everything at once, without a prefix cache, and another of the second turns."""

    outputs: list[list[int]]
    accounts: list[Account]
    rounds: Rounds
    turns: list[list[int]]
    turn_rounds: Rounds


@pytest.fixture(scope="module")
def plain() -> Callable[[str], Plain]:
    @cache
    def run(method: str) -> Plain:
        with speculating(target(method), head(method, K), **UNCACHED) as llm:
            with watched() as rounds:
                outputs = generate(llm, PROMPTS, greedy(NUM_TOKENS))
            said = first_tokens(outputs)
            turns = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(PROMPTS, said, strict=True)]
            with watched() as turn_rounds:
                generate(llm, turns, greedy(NUM_TOKENS))
            assert reads_per_step(llm) <= 1
        return Plain(said, accounts(outputs), rounds, turns, turn_rounds)

    return run


@pytest.mark.parametrize("method", ["eagle", *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS[1:])])
def test_drafts_are_often_right(method: str, plain: Callable[[str], Plain]) -> None:
    steps = plain(method).accounts
    first = [
        bool(right) for drafted, accepted in steps for count, right in zip(drafted, accepted, strict=True) if count
    ]
    rate = sum(first) / len(first)
    print(f"{method}: {rate:.3f} of the first drafts, {sum(sum(s.accepted) for s in steps)} in {len(first)} rounds")
    assert rate > RIGHT[method]


COMPANY: dict[str, dict[str, Any]] = {
    "one by one": UNCACHED | dict(async_scheduling=False),
    "few": UNCACHED | dict(max_num_seqs=3),
    "chunked": UNCACHED | CHUNKED,
    "cached": {},
    "preempted": UNCACHED | SMALL_KV,
    "chunked, cached, preempted": CHUNKED | SMALL_KV,
}
QUICK_COMPANY = [("eagle", "chunked, cached, preempted")]
ALL_COMPANY = [(method, company) for method in METHODS for company in COMPANY]


@pytest.mark.parametrize(
    ("method", "company"),
    [*QUICK_COMPANY, *(pytest.param(*c, marks=pytest.mark.slow) for c in ALL_COMPANY if c not in QUICK_COMPANY)],
)
def test_the_same_drafts_in_every_company(method: str, company: str, plain: Callable[[str], Plain]) -> None:
    """And as many of them accepted, step by step, unless preemption cuts the steps otherwise."""
    known = plain(method)
    with watched() as rounds, speculating(target(method), head(method, K), **COMPANY[company]) as llm:
        generate(llm, [SHARED], greedy(4))
        for _ in range(2 if "cached" in company else 1):
            outputs = generate(llm, PROMPTS, greedy(NUM_TOKENS))
            assert first_tokens(outputs) == known.outputs
            steps = accounts(outputs)
        assert (preemptions(llm) > 0) == ("preempted" in company)
        assert (hits(llm) > 0) == ("cached" in company)
    ties = compare(rounds, known.rounds, least=len(known.rounds) * 3 // 4)
    if "preempted" not in company and not ties:
        assert steps == known.accounts


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_same_drafts_alone(method: str, plain: Callable[[str], Plain]) -> None:
    known = plain(method)
    with watched() as rounds, speculating(target(method), head(method, K), **UNCACHED) as llm:
        outputs = [generate(llm, [prompt], greedy(NUM_TOKENS))[0] for prompt in PROMPTS]
    assert first_tokens(outputs) == known.outputs
    if not compare(rounds, known.rounds, least=len(known.rounds) * 9 // 10):
        assert accounts(outputs) == known.accounts


# vLLM does not let steps overlap with Medusa.
BOTH_WAYS = [
    pytest.param(method, overlapping, marks=[] if (method, overlapping) == ("eagle", True) else pytest.mark.slow)
    for method in METHODS
    for overlapping in (False, True)
    if not (method == "medusa" and overlapping)
]


@pytest.mark.parametrize(("method", "overlapping"), BOTH_WAYS)
def test_blocks_of_requests_without_drafts(method: str, overlapping: bool, plain: Callable[[str], Plain]) -> None:
    """A head reads of those too: what comes next may share their blocks."""
    known, off = plain(method), {"num_speculative_tokens": 0}
    options = dict(async_scheduling=overlapping, block_size=16)
    with watched() as rounds, speculating(target(method), head(method, K), **options) as llm:
        assert first_tokens(generate(llm, PROMPTS, greedy(NUM_TOKENS, extra_args=off))) == known.outputs
        assert not rounds
        outputs = generate(llm, known.turns, greedy(NUM_TOKENS))
        # Of the answer as well, which was written without drafts.
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output.num_cached_tokens > len(prompt)
    compare(rounds, known.turn_rounds, least=len(known.turn_rounds) * 3 // 4)


@pytest.mark.parametrize(("method", "overlapping"), BOTH_WAYS)
def test_drafting_comes_back_with_the_load(method: str, overlapping: bool, plain: Callable[[str], Plain]) -> None:
    """Up to two requests at a time draft, more of them do not; the last two then draft as if they always had."""
    known, four = plain(method), [0, 4, 9, 20]
    prompts = [PROMPTS[index] for index in four]
    config = head(method, K, num_speculative_tokens_per_batch_size=[[1, 2, K], [3, 64, 0]])
    params: list[SamplingParams] = [greedy(length) for length in (NUM_TOKENS // 2, NUM_TOKENS // 2, *[NUM_TOKENS] * 2)]
    with watched() as rounds, speculating(target(method), config, async_scheduling=overlapping, **UNCACHED) as llm:
        outputs = generate(llm, prompts, params)
    for index, output, wish in zip(four, outputs, params, strict=True):
        assert list(output.outputs[0].token_ids) == known.outputs[index][: wish.max_tokens]
    for drafted, _ in accounts(outputs)[2:]:
        assert max(drafted) == K
        assert sum(drafted) > 15
    compare(rounds, known.rounds, least=4)
