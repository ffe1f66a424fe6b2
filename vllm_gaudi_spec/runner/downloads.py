"""When results travel to the host: behind the next step where steps overlap, at once where they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from vllm_gaudi_spec.devices.base import DeviceBackend

Wait = Callable[[], "torch.Tensor"]


class Downloads:
    def __init__(self, backend: DeviceBackend, *, overlap: bool) -> None:
        self._backend = backend
        self._overlap = overlap

    def start(self, tensor: torch.Tensor) -> Wait:
        """What waits for the copy. The tensor may be overwritten as soon as this has returned."""
        if self._overlap:
            return self._backend.start_download(tensor)
        host = self._backend.download(tensor)
        return lambda: host
