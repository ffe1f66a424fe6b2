"""The pure parts of `python -m benchmarks upstream`: drawing cells, writing prompts, ratios and their intervals."""

from __future__ import annotations

import pytest

from benchmarks.shared.cells import (
    GREEDY,
    PLAIN,
    Cell,
    Limits,
    draw_cells,
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


def test_cells_stay_within_the_limits_and_vary() -> None:
    cells = draw_cells(0, 200, METHODS, 3, LIMITS)
    assert all(cell.fits(LIMITS) for cell in cells)
    assert {1, 16} <= {cell.batch for cell in cells}
    assert len({len({*cell.prompts}) for cell in cells}) > 1
    greedy = [cell for cell in cells if (cell.temperature, cell.top_p) == GREEDY]
    assert 70 < len(greedy) < 130
    assert all(0.5 <= cell.temperature <= 1 and 0.8 <= cell.top_p <= 1 for cell in cells if cell not in greedy)


# ---- prompts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [[], [[1, 2, 3], [4, 5, 6, 7]]], ids=["random", "texts"])
def test_prompts_have_the_lengths_of_the_cell_and_differ_by_turn(texts: list[list[int]]) -> None:
    first, again, next_turn = (write_prompts(CELL, (7, 0, turn), texts) for turn in (1, 1, 2))
    assert tuple(map(len, first)) == CELL.prompts
    assert first == again != next_turn


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
