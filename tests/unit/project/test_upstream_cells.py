"""The pure parts of `python -m benchmarks upstream`: drawing cells, writing prompts, ratios and their intervals."""

from __future__ import annotations

from statistics import mean

import numpy as np
import pytest

from benchmarks.shared.cells import (
    GREEDY,
    MOST_DRAFTS,
    OUTPUT_TOKENS,
    PLAIN,
    PROMPT_TOKENS,
    Cell,
    Histogram,
    Limits,
    draw_cells,
    draw_lengths,
    write_prompts,
)
from benchmarks.shared.turns import is_range, ratio

LIMITS = Limits(batch=16, prompt_tokens=300, output_tokens=64)
METHODS = [PLAIN, "ngram", "eagle"]
CELL = Cell("ngram", 3, (5, 2, 9), 8, *GREEDY)


def turns(ratios: list[float]) -> list[dict[str, float]]:
    return [{"ours": 2.0, "theirs": 2.0 * value} for value in ratios]


# ---- cells ---------------------------------------------------------------------------------------------


def test_seed_decides_the_draw() -> None:
    assert draw_cells(3, 8, METHODS, 2, LIMITS) == draw_cells(3, 8, METHODS, 2, LIMITS)
    assert draw_cells(3, 8, METHODS, 2, LIMITS) != draw_cells(4, 8, METHODS, 2, LIMITS)


def test_longer_draw_begins_with_the_cells_of_a_shorter_one() -> None:
    assert draw_cells(3, 40, METHODS, 2, LIMITS)[:12] == draw_cells(3, 12, METHODS, 2, LIMITS)


def test_cells_stay_within_the_limits_and_vary() -> None:
    cells = draw_cells(0, 200, METHODS, 3, LIMITS)
    assert all(cell.fits(LIMITS) for cell in cells)
    assert {1, 16} <= {cell.batch for cell in cells}
    assert len({len({*cell.prompts}) for cell in cells}) > 1
    greedy = [cell for cell in cells if (cell.temperature, cell.top_p) == GREEDY]
    assert 70 < len(greedy) < 130
    assert all(0.5 <= cell.temperature <= 1 and 0.8 <= cell.top_p <= 1 for cell in cells if cell not in greedy)


def test_every_other_cell_drafts_with_one_of_few_setups() -> None:
    cells = draw_cells(0, 40, METHODS, 3, LIMITS)
    assert all(cell.setup == (PLAIN, 0) for cell in cells[::2])
    setups = {cell.setup for cell in cells[1::2]}
    assert {method for method, _ in setups} == {"ngram", "eagle"}
    assert len(setups) <= 3
    assert all(1 <= num_drafts <= MOST_DRAFTS for _, num_drafts in setups)


@pytest.mark.parametrize("methods", [[PLAIN], ["eagle"]])
def test_single_method_is_in_every_cell(methods: list[str]) -> None:
    assert {cell.method for cell in draw_cells(0, 6, methods, 2, LIMITS)} == {*methods}


@pytest.mark.parametrize(
    ("histogram", "published_mean"), [(PROMPT_TOKENS, 306), (OUTPUT_TOKENS, 500)], ids=["prompts", "outputs"]
)
def test_lengths_follow_the_histogram(histogram: Histogram, published_mean: int) -> None:
    lengths = draw_lengths(np.random.default_rng(0), histogram, 20_000, histogram[-1][1])
    for share, length in histogram[1:-1]:
        assert np.mean(np.array(lengths) <= length) == pytest.approx(share, abs=0.01)
    assert mean(lengths) == pytest.approx(published_mean, rel=0.2)


def test_limit_leaves_out_longer_requests_instead_of_shortening_them() -> None:
    lengths = draw_lengths(np.random.default_rng(0), PROMPT_TOKENS, 20_000, 348)
    assert max(lengths) <= 348
    assert np.mean(np.array(lengths) <= 74) == pytest.approx(0.5 / 0.8, abs=0.01)


# ---- prompts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [[], [[1, 2, 3], [4, 5, 6, 7]]], ids=["random", "texts"])
def test_prompts_have_the_lengths_of_the_cell_and_differ_by_turn(texts: list[list[int]]) -> None:
    first, again, next_turn = (write_prompts(CELL, (7, 0, turn), texts) for turn in (1, 1, 2))
    assert tuple(map(len, first)) == CELL.prompts
    assert first == again != next_turn


def test_prompt_is_the_end_of_a_text_with_the_texts_before_it() -> None:
    texts = [[1, 2, 3], [4, 5, 6, 7]]
    prompts = write_prompts(Cell(PLAIN, 0, (5,) * 20, 1, *GREEDY), (0,), texts)
    assert {tuple(prompt) for prompt in prompts} == {(3, 4, 5, 6, 7), (6, 7, 1, 2, 3)}


# ---- ratios --------------------------------------------------------------------------------------------


def test_one_stalled_turn_moves_neither_the_median_nor_the_interval() -> None:
    usual = [1.08, 1.09, 1.10, 1.10, 1.11, 1.11, 1.12, 1.13]
    assert ratio(turns([*usual, 1.14]), "ours", "theirs") == pytest.approx((1.11, 1.09, 1.13))
    assert ratio(turns([*usual, 40.0]), "ours", "theirs") == pytest.approx((1.11, 1.09, 1.13))
    stalled = ratio(turns([0.02, *usual]), "ours", "theirs")
    assert stalled == pytest.approx((1.10, 1.08, 1.12))


@pytest.mark.parametrize(("count", "skipped"), [(6, 0), (8, 0), (9, 1), (12, 2), (15, 3)])
def test_interval_has_the_ranks_of_the_binomial_distribution(count: int, skipped: int) -> None:
    """The ranks are those of published tables for the median's 95 % confidence interval."""
    values = [float(number) for number in range(1, count + 1)]
    assert ratio(turns(values), "ours", "theirs")[1:] == (1.0 + skipped, count - skipped)
    assert not is_range(count)


def test_few_turns_give_their_range() -> None:
    assert ratio(turns([3.0, 1.0, 2.0]), "ours", "theirs") == (2.0, 1.0, 3.0)
    assert is_range(5)
