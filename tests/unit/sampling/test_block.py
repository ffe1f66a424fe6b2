"""The block rule compared with manual computation, and its noise. See test_exact_rules.py for exactness."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support import distributions, exact
from tests.support.distributions import ALPHA, Table, random_table, write
from tests.support.verify_cases import random_case
from vllm_gaudi_spec.sampling import drafts as drafting
from vllm_gaudi_spec.sampling.rules import block, standard

# Two tokens with the same distribution after every context, to compute manually.
TARGET = Table(torch.tensor([[1 / 3, 2 / 3]]).log())
DRAFTER = Table(torch.tensor([[2 / 3, 1 / 3]]).log())


def test_weights_and_acceptance_equal_manual_computation() -> None:
    drafts = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=torch.int32)
    probs, draft_probs = (t.logits_CV.softmax(-1).expand(4, 2, 2) for t in (TARGET, DRAFTER))
    accept, weights = block.accept_probs(probs, draft_probs, drafts, torch.full((4,), 2, dtype=torch.int32))
    torch.testing.assert_close(weights, torch.tensor([[1, 0.5, 0.25], [1, 0.5, 1], [1, 1, 0.5], [1, 1, 1]]))
    # After A: max(1/2 * 1/3 - 2/3, 0) + max(1/2 * 2/3 - 1/3, 0) = 0; after B: no weight is missing.
    torch.testing.assert_close(accept, torch.tensor([[0, 0.25], [0, 1], [1, 0.5], [1, 1]]))


def test_accepted_lengths_equal_manual_computation() -> None:
    context, num = np.zeros(1, dtype=np.int64), np.full(1, 2)
    by_block = exact.step_distribution(exact.block_stops, TARGET, DRAFTER, context, 2, num)
    by_standard = exact.step_distribution(exact.standard_stops, TARGET, DRAFTER, context, 2, num)
    # 2/3 + 2/3 * 2/3, and the means of the weights above: 2/3 + 5/9.
    np.testing.assert_allclose(by_standard.mean_accepted, 10 / 9, atol=1e-6)
    np.testing.assert_allclose(by_block.mean_accepted, 11 / 9, atol=1e-6)


def test_single_draft_is_accepted_as_by_standard_rule() -> None:
    case = random_case(200, 3)
    inputs = (case.logits_BQV[:, :3].softmax(-1), case.draft_probs_BKV, case.drafts_BK)
    one = torch.ones(200, dtype=torch.int32)
    by_block, _ = block.accept_probs(*inputs, one)
    assert torch.equal(by_block, standard.accept_probs(*inputs, one))


def test_smallest_draft_probabilities_stay_finite() -> None:
    """p / q may overflow, and may be multiplied by a weight of 0."""
    probs = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    draft_probs = torch.tensor([[[1.0, 0.0], [1e-45, 1.0]]])
    num = torch.tensor([2], dtype=torch.int32)
    accept, weights = block.accept_probs(probs, draft_probs, torch.zeros(1, 2, dtype=torch.int32), num)
    assert weights.tolist() == [[1.0, 0.0, 0.0]]
    assert accept.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("forgotten", ["drafting", "acceptance"])
def test_position_keyed_noise_is_not_exact(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias is in the second step; the first token alone does not show it."""
    module = drafting if forgotten == "drafting" else block
    monkeypatch.setattr(module, "derive_block_keys", lambda keys_B2, starts_B: keys_B2)
    target, drafter = random_table(3, 2, seed=1), random_table(3, 2, seed=2)
    texts, _ = write(block.verify, target, drafter, num_positions=2, steps=2, length=6, rows=200_000)
    first, *joint = distributions.p_values(texts, target)
    assert first > ALPHA
    assert min(joint) < ALPHA, joint
