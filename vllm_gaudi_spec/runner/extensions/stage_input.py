"""The output of the previous pipeline stage, which a stage's layers read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.runner.extensions import Extension

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.model import LoadedModel
    from vllm_gaudi_spec.records import Batch


class StageInput(Extension):
    def __init__(self, target: LoadedModel, backend: DeviceBackend) -> None:
        self._stages = target.stages
        self._width = sum(target.stage_sizes.values())
        self._dtype = target.vllm_config.model_config.dtype
        self._device = backend.traits.torch_device

    @classmethod
    def load(cls, target: LoadedModel, backend: DeviceBackend) -> StageInput | None:
        """Return the extension, or None on the first or only stage."""
        return cls(target, backend) if target.stage_sizes and not target.stages.is_first_rank else None

    def add_to(self, batch: Batch) -> Batch:
        """Wait for the previous stage's output. Warm-up runs on zeros, so that stages need not run the same jobs."""
        size = torch.Size((batch.shape.tokens, self._width))
        if batch.requests:
            received_TW = self._stages.recv(size, self._dtype)
        else:
            received_TW = torch.zeros(size, dtype=self._dtype, device=self._device)
        return replace(batch, received_TW=received_TW)
