"""Which constraint a contradiction with a grammar is blamed on."""

import pytest
from vllm import SamplingParams

from vllm_gaudi_spec.scheduling.scheduler import _explain_contradiction

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
def test_contradiction_names_only_the_clients_constraints(params: dict[str, list[int]], names: str | None) -> None:
    found = _explain_contradiction(SamplingParams(**params), END)
    assert found == (names and f"No token satisfies structured_outputs together with {names}; leave one of them out.")
