"""Requests that schemathesis makes of the server's own description of its interface."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.strategies import SearchStrategy
from schemathesis import APIOperation, Case, GenerationMode

from tests.full_tests.abuse.judge import ANSWER_SECONDS, Judge

# Path -> why it is left out.
LEFT_OUT = {
    "/scale_elastic_ep": "starts engines anew, by design",
}
# Where a request reaches the engine: most of the requests go there.
SERVING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
_SERVING_SHARE = 6
"""To one of any other path."""
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

    # There is nothing that an operation without parameters does not describe.
    with suppress(Unsatisfiable):
        keep()
    return made


def operations(judge: Judge) -> list[APIOperation]:
    described = judge.server.client.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(described)
    found = [result.ok() for result in schema.get_all_operations()]
    return [operation for operation in found if operation.path not in LEFT_OUT]


def shares(found: list[APIOperation], total: int) -> Iterator[tuple[APIOperation, GenerationMode, int]]:
    """How many requests each operation gets: as its description says, and as it does not."""
    weights = {operation.label: _SERVING_SHARE if operation.path in SERVING else 1 for operation in found}
    unit = total / (2 * sum(weights.values()))
    for operation in found:
        for mode in GenerationMode:
            yield operation, mode, max(2, round(unit * weights[operation.label]))


def together(send: Callable[[Any], object], requests: Sequence[Any], after_each: Callable[[], None]) -> None:
    """Several at a time: most of them are answered with as many tokens as there is room for."""
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        for _ in pool.map(send, requests):
            after_each()


def send_all(judge: Judge, total: int, after_each: Callable[[], None]) -> None:
    """About `total` requests; an operation without parameters has only one to make."""
    address = str(judge.server.client.base_url)

    def send(case: Case) -> None:
        response = case.call(base_url=address, timeout=ANSWER_SECONDS)
        judge.check(case.operation.path, case, response.status_code, response.text)

    for operation, mode, count in shares(operations(judge), total):
        together(send, examples(operation.as_strategy(generation_mode=mode), count), after_each)
