"""The block rule compared with manual computation, and its noise. See test_exact_rules.py for exactness."""

import pytest
import torch

from tests.support import distributions
from tests.support.distributions import ALPHA, random_table, write
from vllm_gaudi_spec.sampling import drafts as drafting
from vllm_gaudi_spec.sampling.rules import block


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
