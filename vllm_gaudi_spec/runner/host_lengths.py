"""What a device is told on the host about the rows of a program, where its attention asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend


def host_lengths(backend: DeviceBackend, num_rows: int, ends: Sequence[int], context: int) -> torch.Tensor | None:
    """For `Blocks.lengths_B`: the first rows have at most `ends` tokens of KV when the program ends, and none has more
    than `context`, for which there are blocks. The rest is padding, which looks at one key."""
    if not backend.needs_host_lengths:
        return None
    lengths_np = np.ones(num_rows, dtype=np.int32)
    lengths_np[: len(ends)] = np.clip(ends, 1, context)
    return torch.from_numpy(lengths_np)
