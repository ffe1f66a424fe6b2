"""Which constraint a contradiction with a grammar is blamed on."""

from __future__ import annotations

import pytest
from vllm import SamplingParams

from vllm_gaudi_spec.scheduling.scheduler import _contradiction

END = frozenset({7, 8})


@pytest.mark.parametrize(
    ("params", "names"),
    [
        (dict(stop_token_ids=[7, 8]), None),
        (dict(stop_token_ids=[7, 9]), "stop_token_ids"),
        (dict(allowed_token_ids=[3], bad_words=["a"]), "allowed_token_ids and bad_words"),
        ({}, None),
    ],
    ids=str,
)
def test_only_constraints_of_the_client_are_named(params: dict[str, list[int]], names: str | None) -> None:
    found = _contradiction(SamplingParams(**params), END)  # type: ignore[arg-type]
    assert found == (names and f"No token satisfies structured_outputs together with {names}; leave one of them out.")
