"""What a check gets, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.devices.common.group_check import Group


class Failed(Exception):
    """The text is what was measured."""


class NotChecked(Exception):
    """The text is why nothing was measured."""


@dataclass(slots=True, kw_only=True)
class Subject:
    """The device under test. Its graphs, copies and kernels are those of the backend; all else is on the host."""

    backend: DeviceBackend
    dtype: torch.dtype
    """The model's."""
    group: Group | None
    """None: one rank."""
    seconds: float
    """For the check that repeats as long as it may."""
    _started: float = field(default_factory=time.perf_counter)

    @property
    def is_time_up(self) -> bool:
        return time.perf_counter() - self._started > self.seconds

    def compute(self, function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        """The tuple of tensors that a graph of `function` returns, on the host."""
        found = self.backend.graphs.graph(function)(*map(self.backend.memory.upload, inputs))
        return tuple(map(self.backend.memory.download, found))


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers on the host, that the process's own generator knows nothing of."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
