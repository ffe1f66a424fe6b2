"""Greedy tokens on the CPU: numpy looks for the largest of a row with vectors, PyTorch one number at a time."""

from __future__ import annotations

import torch

from vllm_gaudi_spec.records import Verification
from vllm_gaudi_spec.sampling.rules import strict
from vllm_gaudi_spec.sampling.rules.registry import TORCH


def sample_greedy(logits_BQV: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(logits_BQV.numpy().argmax(-1)).int()


def strict_greedy(logits_BQV: torch.Tensor, drafts_BK: torch.Tensor, num_drafts_B: torch.Tensor) -> Verification:
    return strict.verify(sample_greedy(logits_BQV), drafts_BK, num_drafts_B)


RULES = TORCH._replace(sample_greedy=sample_greedy, strict_greedy=strict_greedy)
