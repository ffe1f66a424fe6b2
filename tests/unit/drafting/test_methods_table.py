"""The table of drafting methods."""

from importlib import import_module

import pytest
from vllm.config import speculative as upstream

from tests.unit.upstream.test_configuration import values_of
from vllm_gaudi_spec import drafting
from vllm_gaudi_spec.methods import MEDUSA, METHODS, has_model
from vllm_gaudi_spec.upstream.release import FROM_0_33


@pytest.mark.parametrize("name", METHODS)
def test_each_method_names_a_proposer(name: str) -> None:
    module, proposer = METHODS[name].proposer.split(".")
    found = getattr(import_module(f"{drafting.__name__}.{module}"), proposer)
    assert callable(found.build)
    assert callable(found.propose)


def test_in_vllm_matches_vllm_methods() -> None:
    vllms = {*values_of(upstream.SpeculativeMethod)} | ({MEDUSA} if FROM_0_33 else set())  # refused there
    assert {name for name, method in METHODS.items() if method.in_vllm} == vllms & set(METHODS)


def test_unknown_method_counts_as_model() -> None:
    """vLLM loads a model for it before it can be refused."""
    assert has_model("mlp_speculator")
    assert not has_model("ngram")
