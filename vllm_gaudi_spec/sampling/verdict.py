"""What a verify step decided."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Verdict(NamedTuple):
    tokens_BQ: torch.Tensor
    """int32; only the first `num_sampled` of a row count."""
    num_sampled_B: torch.Tensor
    """int32: accepted drafts and one more; 0 for rows that do not sample in this step."""
