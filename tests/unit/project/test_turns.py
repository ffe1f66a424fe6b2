"""The ratios of `python -m benchmarks upstream` and their intervals."""

import pytest

from benchmarks.shared.turns import is_range, ratio


def turns(ratios: list[float]) -> list[dict[str, float]]:
    return [{"ours": 2.0, "theirs": 2.0 * value} for value in ratios]


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
