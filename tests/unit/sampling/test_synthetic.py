"""The synthetic rule: given acceptance rates, then the target's own token."""

import math

import pytest
import torch

from tests.support.reference import rules as loops
from tests.support.verify_cases import Case, counted, loop_noise, random_case
from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling.rules import synthetic
from vllm_gaudi_spec.sampling.rules.registry import TORCH

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
