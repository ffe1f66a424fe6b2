"""Each acceptance rule has a row in the table and a module of the same name."""

from pathlib import Path

from vllm.config import speculative as upstream

from tests.unit.upstream.test_configuration import values_of
from vllm_gaudi_spec.methods import RULES, STRICT
from vllm_gaudi_spec.sampling import rules
from vllm_gaudi_spec.sampling.rules.registry import TORCH

NO_RULES = {"__init__", "registry"}


def test_rules_and_modules_correspond() -> None:
    modules = {path.stem for path in Path(rules.__path__[0]).glob("*.py")} - NO_RULES
    assert modules == set(RULES)
    assert set(TORCH.verify) == set(RULES) - {STRICT}


def test_in_vllm_matches_vllm_rules() -> None:
    assert {name for name, rule in RULES.items() if rule.in_vllm} == set(values_of(upstream.RejectionSampleMethod))
