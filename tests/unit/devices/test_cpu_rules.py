"""The CPU's rules return what the reference returns."""

from __future__ import annotations

import pytest
import torch

from vllm_gaudi_spec.devices.cpu.rules import RULES
from vllm_gaudi_spec.sampling.rules.registry import TORCH


@pytest.mark.parametrize("vocab", [1, 7, 64, 49155])
def test_greedy_tokens(vocab: int) -> None:
    """The first of equal logits wins, with masked logits, and in a slice of a wider matrix."""
    generator = torch.Generator().manual_seed(0)
    logits_BQV = torch.randint(-9, 9, (5, 4, vocab + 3), generator=generator).float()[..., :vocab]
    logits_BQV[1] = -torch.inf
    logits_BQV[2, :, : vocab // 2] = -torch.inf
    expected_BQ = TORCH.sample_greedy(logits_BQV)
    assert torch.equal(RULES.sample_greedy(logits_BQV), expected_BQ)
    drafts_BK = expected_BQ[:, :3].clone()
    drafts_BK[3, 1] += 1
    given = logits_BQV, drafts_BK, torch.tensor([3, 2, 0, 3, 1], dtype=torch.int32)
    ours, theirs = RULES.strict_greedy(*given), TORCH.strict_greedy(*given)
    assert torch.equal(ours.tokens_BQ, theirs.tokens_BQ)
    assert torch.equal(ours.num_sampled_B, theirs.num_sampled_B)
