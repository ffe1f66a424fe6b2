"""The benchmark of heads counts as its reference does, and compares two runs prompt by prompt."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import heads

END = heads.END_OF_TURN


def test_counts_until_the_length_is_reached() -> None:
    # After 1, 4, 5 and 8 tokens; the step that begins with 8 of 8 no longer counts, whatever it drafted.
    counted = heads.by_reference([7] * 11, [3, 3, 3, 2], [2, 0, 2, 1], k=3, tokens=8)
    assert counted == {"tokens": 7, "steps": 3, "accepted": [2, 0, 2]}


def test_last_step_counts_in_full() -> None:
    counted = heads.by_reference([7] * 11, [3, 3, 3], [2, 2, 3], k=3, tokens=8)
    assert counted == {"tokens": 10, "steps": 3, "accepted": [2, 2, 3]}


def test_step_with_the_end_token_counts_in_full() -> None:
    token_ids = [7, 7, 7, END, 7, 7, 7, 7, 7, 7, 7]
    counted = heads.by_reference(token_ids, [3, 3, 3], [1, 3, 2], k=3, tokens=8)
    assert counted == {"tokens": 6, "steps": 2, "accepted": [1, 3]}


def test_end_token_out_of_the_prompt_leaves_nothing() -> None:
    counted = heads.by_reference([END] + [7] * 10, [3, 3, 3], [3, 3, 1], k=3, tokens=8)
    assert counted == {"tokens": 0, "steps": 0, "accepted": []}


def test_short_drafts_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="after 4 tokens a step drafted less than 3"):
        heads.by_reference([7] * 11, [3, 2, 3, 3], [2, 2, 3, 0], k=3, tokens=8)


def test_steps_without_drafts_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="without drafts"):
        heads.by_reference([7] * 11, [3, 3], [3, 3], k=3, tokens=8)


def test_figures_and_their_intervals() -> None:
    requests = [{"tokens": 30, "steps": 10, "accepted": [2] * 10}, {"tokens": 10, "steps": 10, "accepted": [0] * 10}]
    whole, first, second, third = heads.Rates(requests, 3).figures()
    assert (whole.value, first.value, second.value, third.value) == (2.0, 0.5, 0.5, 0.0)
    assert (whole.low, whole.high) == (1.0, 3.0)  # a quarter of all resamples holds either prompt alone
    assert (third.low, third.high) == (0.0, 0.0)


def test_differences_are_taken_in_pairs() -> None:
    """Prompts differ widely, the two runs by the same everywhere: the interval of the difference has no width."""
    some = [{"tokens": 10 * n, "steps": 10, "accepted": [n - 1] * 10} for n in (1, 2, 3)]
    more = [{**each, "tokens": each["tokens"] + 1} for each in some]
    difference = heads.Rates(more, 2).less(heads.Rates(some, 2))
    assert difference[0].low == pytest.approx(0.1)
    assert difference[0].high == pytest.approx(0.1)
    assert vars(difference[1]) == {"value": 0.0, "low": 0.0, "high": 0.0}


def test_reference_is_known_to_its_digits_only() -> None:
    found = heads.Estimate(2.0, 1.9049, 2.1)
    assert heads.is_inside(found, 1.90, 2)
    assert not heads.is_inside(found, 1.90, 3)


def test_texts_are_equal_tied_or_different() -> None:
    ties = {"1": [5, 6]}
    assert heads.conclusion([4, 5, 8], ties, [4, 5, 8]) == "equal"
    assert heads.conclusion([4, 5, 8], ties, [4, 6, 9]) == "tied"
    assert heads.conclusion([4, 5, 8], ties, [4, 5, 9]) == "different"
