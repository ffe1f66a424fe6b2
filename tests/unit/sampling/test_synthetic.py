"""The synthetic rule: given acceptance rates, then the target's own token."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.reference import rules as loops
from tests.support.verify_cases import Case, counted, loop_noise, random_case
from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling.rules import strict, synthetic
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


def test_step_with_fewer_drafts_takes_the_first_rates() -> None:
    case = random_case(300, 2)
    few, many = verify(case, RATES[:2]), verify(case, RATES)
    assert torch.equal(few.tokens_BQ, many.tokens_BQ)
    assert torch.equal(few.num_sampled_B, many.num_sampled_B)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_token_of_target_follows_accepted_drafts(rate: float) -> None:
    """Rows with temperature 0 take their argmax; drafts that are not real never count."""
    case = random_case(200, 4)
    case.drafts_BK.clamp_(0, 5)
    case.temperature_B[::2] = 0
    case.drafts_BK[torch.arange(4) >= case.num_drafts_B[:, None]] = -1
    verification = verify(case, [rate] * 4)
    expected = case.num_drafts_B if rate else torch.zeros_like(case.num_drafts_B)
    assert torch.equal(verification.num_sampled_B, expected + 1)
    own = strict.sample_random(case.logits_BQV, case.temperature_B, case.keys_B2, case.positions_BQ)
    for row, accepted in enumerate(expected.tolist()):
        assert counted(verification, row) == [*case.drafts_BK[row, :accepted].tolist(), own[row, accepted].item()]


def test_rows_do_not_depend_on_batch() -> None:
    case = random_case(50, 3)
    together = verify(case, RATES[:3])
    for row in range(50):
        alone = synthetic.verify(
            TORCH,
            **{name: value for name, value in case.row(row).items() if name != "draft_probs_BKV"},
            rates_K=torch.tensor(RATES[:3]),
        )
        assert torch.equal(alone.tokens_BQ[0], together.tokens_BQ[row])
        assert torch.equal(alone.num_sampled_B[0], together.num_sampled_B[row])
