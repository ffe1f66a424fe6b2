"""Cases of parametrized tests: the quick ones run in `make test`, all of them in `make verify`."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def quick_and_slow(quick: Sequence[Any], others: Iterable[Any]) -> list[Any]:
    """Return the quick cases, and those of the others that are not among them, marked as slow."""
    return [*quick, *slow(*(case for case in others if case not in quick))]


def slow(*cases: Any) -> list[Any]:
    """Mark cases as slow. A tuple has a value for each parameter."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
