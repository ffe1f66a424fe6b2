"""The argument of each check, and the exceptions that end a check."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.upstream.distributed import GroupCoordinator


class Failed(Exception):
    """Raised by a check that failed. The message contains the measured values."""


class NotChecked(Exception):
    """Raised by a check that cannot run. The message is the reason."""


@dataclass(slots=True, kw_only=True)
class Subject:
    """The device under test. Checks access it only through the backend's graphs, copies, and kernels."""

    backend: DeviceBackend
    dtype: torch.dtype
    """The model's dtype."""
    group: GroupCoordinator | None
    """The ranks of the model, or None for a single rank."""
    seconds: float
    """The time limit for checking copies to the host."""
    _started: float = field(default_factory=time.perf_counter)

    @property
    def is_time_up(self) -> bool:
        return time.perf_counter() - self._started > self.seconds

    def compute(self, function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        """Run `function` as a graph and return its tuple of tensors on the host."""
        found = self.backend.graphs.graph(function)(*map(self.backend.memory.upload, inputs))
        return tuple(map(self.backend.memory.download, found))


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normally distributed values on the host, without using the random generator of the process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
