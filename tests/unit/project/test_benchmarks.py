"""The runner of the benchmarks finds every program, and ratios of turns have intervals."""

import sys

import pytest

from benchmarks.__main__ import PROGRAMS, main
from benchmarks.shared.turns import is_range, ratio

NAMES = [path.stem for path in PROGRAMS]


@pytest.mark.parametrize("name", NAMES)
def test_program_explains_its_options(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)  # main replaces it
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"python -m benchmarks {name}" in capsys.readouterr().out


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
