"""Each acceptance rule by itself, compared with loops. See test_exact_rules.py for exactness."""

import math
from pathlib import Path

import pytest
import torch
from vllm.config import speculative as upstream

from tests.support.reference import rules as loops
from tests.support.reference.sampling import accept
from tests.support.verify_cases import Case, counted, loop_noise, random_case
from tests.unit.upstream.test_configuration import values_of
from vllm_gaudi_spec.methods import RULES, STRICT
from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling import rules
from vllm_gaudi_spec.sampling.rules import block, strict, synthetic
from vllm_gaudi_spec.sampling.rules.registry import TORCH

NO_RULES = {"__init__", "registry"}


def test_rules_and_modules_correspond() -> None:
    modules = {path.stem for path in Path(rules.__path__[0]).glob("*.py")} - NO_RULES
    assert modules == set(RULES)
    assert set(TORCH.verify) == set(RULES) - {STRICT}


def test_in_vllm_matches_vllm_rules() -> None:
    lossless = {*values_of(upstream.RejectionSampleMethod)} - {"fly"}  # which is in vLLM 0.33
    assert {name for name, rule in RULES.items() if rule.in_vllm} == lossless


def test_verify_equals_reference_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    for drafts in range(6):
        sampled = torch.randint(0, 2, (200, drafts + 1), generator=generator, dtype=torch.int32)
        proposed = torch.randint(-1, 2, (200, drafts), generator=generator, dtype=torch.int32)
        num = torch.randint(0, drafts + 1, (200,), generator=generator, dtype=torch.int32)
        verification = strict.verify(sampled, proposed, num)
        for row in range(200):
            expected = accept(proposed[row, : num[row]].tolist(), sampled[row].tolist())
            assert verification.tokens_BQ[row, : verification.num_sampled_B[row]].tolist() == expected


def test_smallest_draft_probabilities_stay_finite() -> None:
    """p / q may overflow, and may be multiplied by a weight of 0."""
    probs = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    draft_probs = torch.tensor([[[1.0, 0.0], [1e-45, 1.0]]])
    num = torch.tensor([2], dtype=torch.int32)
    accept, weights = block.accept_probs(probs, draft_probs, torch.zeros(1, 2, dtype=torch.int32), num)
    assert weights.tolist() == [[1.0, 0.0, 0.0]]
    assert accept.tolist() == [[0.0, 0.0]]


RATES = [0.9, 0.6, 0.6, 0.1]


def verify(case: Case, rates: list[float]) -> Verification:
    inputs = case.tensors()
    del inputs["draft_probs_BKV"]
    return synthetic.verify(TORCH, **inputs, rates_K=torch.tensor(rates))


def test_rule_equals_reference_loop() -> None:
    case = random_case(300, 4)
    verification = verify(case, RATES)
    for row in range(300):
        target = case.logits_BQV[row].double().softmax(-1).tolist()
        drafts = case.drafts_BK[row, : case.num_drafts_B[row]].tolist()
        expected = loops.synthetic(target, torch.tensor(RATES).tolist(), drafts, loop_noise(case, row, False))
        assert counted(verification, row) == expected, row


@pytest.mark.parametrize("rates", [RATES, [0.5, 0.0, 0.0, 0.0], [1.0, 1.0, 0.3, 0.3]])
def test_rates_are_unconditional(rates: list[float]) -> None:
    rows = 20_000
    case = random_case(rows, 4, vocab=3)
    case.drafts_BK.clamp_(0, 2)
    case.num_drafts_B.fill_(4)
    num_accepted = verify(case, rates).num_sampled_B - 1
    for place, rate in enumerate(rates):
        seen = (num_accepted > place).float().mean().item()
        assert abs(seen - rate) <= 4 * math.sqrt(rate * (1 - rate) / rows), place
