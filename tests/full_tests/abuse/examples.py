"""Requests drawn by hypothesis, and sent several at a time."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

_AT_A_TIME = 6


def examples(strategy: SearchStrategy[Any], count: int, first_seed: int = 0) -> list[Any]:
    """About `count`; fewer where no more are to be had. Nothing is remembered from run to run."""
    made: list[Any] = []

    @seed(first_seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(one=strategy)
    def keep(one: Any) -> None:
        made.append(one)

    keep()
    return made


def together(send: Callable[[Any], object], requests: Sequence[Any], after_each: Callable[[], None]) -> None:
    """Several at a time: most of them are answered with as many tokens as there is room for."""
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        for _ in pool.map(send, requests):
            after_each()
