"""The standard rule compared with manual computation. See test_exact_rules.py for exactness."""

from __future__ import annotations

import torch

from tests.support import distributions
from tests.support.distributions import ALPHA, random_table, write
from vllm_gaudi_spec.sampling import stop
from vllm_gaudi_spec.sampling.rules import standard

P = torch.tensor([[[0.5, 0.3, 0.2, 0.0]]])
Q = torch.tensor([[[0.2, 0.6, 0.0, 0.2]]])


def test_acceptance_equals_probability_ratio() -> None:
    drafts = torch.tensor([[0], [1], [2], [3], [-1], [4]], dtype=torch.int32)
    num = torch.ones(6, dtype=torch.int32)
    accept = standard.accept_probs(P.expand(6, 1, 4), Q.expand(6, 1, 4), drafts, num)
    assert torch.equal(accept[:, 0], torch.tensor([1.0, 0.5, 0.0, 0.0, 0.0, 0.0]))
    assert standard.accept_probs(P, Q, drafts[:1], num[:1] * 0).item() == 0


def test_residual_is_mass_that_drafter_lacks() -> None:
    left = stop.compute_residual(P[0], Q[0], torch.ones(1))
    torch.testing.assert_close(left, torch.tensor([[0.3, 0.0, 0.2, 0.0]]))


def test_position_keyed_noise_is_exact() -> None:
    """The next step may reuse the noise of rejected drafts, which nothing emitted depends on."""
    target, drafter = random_table(3, 2, seed=1), random_table(3, 2, seed=2)
    texts, _ = write(
        standard.verify, target, drafter, num_positions=2, steps=2, length=6, rows=200_000, draft_starts=False
    )
    p_values = distributions.p_values(texts, target)
    assert min(p_values) > ALPHA, p_values
