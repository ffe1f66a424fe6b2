"""Requests draft as much as their drafts are worth."""

from __future__ import annotations

import random

from vllm_gaudi_spec.scheduling.lengths import Lengths, _Count

K = 5


def serve(lengths: Lengths, rates: dict[str, float], steps: int) -> list[dict[str, int]]:
    """Drafts are accepted at these rates. What was chosen at each step."""
    rng = random.Random(0)
    chosen = [dict.fromkeys(rates, K)]
    for _ in range(steps):
        for req_id, rate in rates.items():
            drafts = chosen[-1][req_id]
            accepted = next((i for i in range(drafts) if rng.random() >= rate), drafts)
            if drafts:
                lengths.observe(req_id, drafts, accepted)
        chosen.append(lengths.choose(rates))
    return chosen


def mean(chosen: list[dict[str, int]], req_id: str) -> float:
    return sum(step[req_id] for step in chosen[20:]) / len(chosen[20:])


def test_number_of_drafts_follows_acceptance_rate() -> None:
    chosen = serve(Lengths(K), {"good": 0.9, "middling": 0.4, "bad": 0.02}, 400)
    assert mean(chosen, "good") > 4.8
    assert 2 < mean(chosen, "middling") < 4.5
    assert mean(chosen, "bad") < 1.5


def test_batch_with_low_acceptance_stops_drafting_and_retries() -> None:
    chosen = serve(Lengths(K), {"a": 0.0, "b": 0.01}, 400)[100:]
    drafting = [step for step in chosen if any(step.values())]
    assert 0 < len(drafting) < len(chosen) / 16
    assert max(max(step.values()) for step in drafting) == 1


def test_batch_with_one_accepted_draft_in_fifteen_stops_drafting() -> None:
    """Each row by itself would draft one: it is right more often than 1 in 20."""
    for rate, expected in ((0.065, 0), (0.15, 1)):
        lengths = Lengths(K)
        lengths._all = _Count(100 * rate, 100 * (1 - rate))
        lengths._by_id = {name: _Count(10 * rate, 10 * (1 - rate)) for name in "ab"}
        assert lengths.choose("ab") == {"a": expected, "b": expected}


def test_rising_acceptance_raises_number_of_drafts() -> None:
    lengths = Lengths(K)
    assert mean(serve(lengths, {"a": 0.0}, 200), "a") < 1
    assert serve(lengths, {"a": 1.0}, 300)[-1]["a"] == K


def test_reused_request_id_starts_without_history() -> None:
    lengths = Lengths(K)
    serve(lengths, {"good": 0.9, "bad": 0.0}, 100)
    before = lengths.choose(["bad"])["bad"]
    lengths.forget(["bad"])
    assert lengths.choose(["bad"])["bad"] > before
