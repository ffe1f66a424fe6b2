"""LoRA adapters, which are loaded when a step needs them. The device stores the adapter slot of each row.

Only the target has adapters. A head that shares layers with the target uses these layers without the wrapper. A
user-defined drafter uses the wrapped target, whose layers apply no adapter while no slots are set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_gaudi_spec.lora.application import NO_SLOT
from vllm_gaudi_spec.lora.manager import AdapterLoader
from vllm_gaudi_spec.runner.extensions import Extension

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.outputs import SpecSchedulerOutput
    from vllm_gaudi_spec.runner.requests import Requests


class Adapters(Extension):
    def __init__(self, vllm_config: VllmConfig, model: nn.Module, backend: DeviceBackend) -> None:
        """Wrap the layers of `model`, which must already be on the device."""
        self._backend = backend
        with torch.inference_mode():  # steps also run in inference mode
            self.loader = AdapterLoader(vllm_config, model, backend.traits.torch_device, backend.memory.upload)
            num_rows = vllm_config.scheduler_config.max_num_seqs + 1
            self._slots_np = np.full(num_rows, NO_SLOT, dtype=np.int32)
            self._slots_R = torch.full((num_rows,), NO_SLOT, dtype=torch.int32, device=backend.traits.torch_device)
        self._put = backend.graphs.graph(self._put_slots)

    def apply(self, scheduled: SpecSchedulerOutput, requests: Requests) -> None:
        """Load adapters that a step needs, and update the slots of the rows in the step.

        Rows that are not part of the step keep their slots. A slot may contain a different adapter than in the previous
        step, either because another request needs it or because the user has loaded it.
        """
        admitted = [request.lora for request in requests.admitted if request.lora is not None]
        for again in {lora.lora_int_id: lora for lora in admitted if lora.load_inplace}.values():
            self.loader.add_adapter(again)
        members = [requests.by_id[req_id] for req_id in scheduled.num_scheduled_tokens]
        adapters = {request.lora.lora_int_id: request.lora for request in members if request.lora is not None}
        slots = self.loader.load_into_slots(adapters.values()) if adapters else {}
        before = self._slots_np.copy()
        self._slots_np[requests.freed_rows] = NO_SLOT  # otherwise, `gather_slots` would consider an adapter to be used
        for request in members:
            self._slots_np[request.row] = NO_SLOT if request.lora is None else slots[request.lora.lora_int_id]
        if not np.array_equal(before, self._slots_np):
            self._send()

    def warm_up(self) -> None:
        """Run the graph that updates slots."""
        self._send()

    def _send(self) -> None:
        # Copy the slots, because the device might read them only after the next step has changed the original array.
        self._put(self._backend.memory.upload(torch.from_numpy(self._slots_np.copy())))

    # --- device functions ---

    def _put_slots(self, slots_R: torch.Tensor) -> None:
        self._slots_R.copy_(slots_R)

    def gather_slots(self, rows_B: torch.Tensor, queries: int = 1) -> torch.Tensor | None:
        """Return the adapter slot of each token in these rows, int32 [B * Q].

        On devices that do not capture steps, the result is None if no row has an adapter.
        """
        if not self._backend.traits.captures and (self._slots_np == NO_SLOT).all():
            return None
        return self._slots_R.index_select(0, rows_B)[:, None].expand(-1, queries).flatten()

    @contextmanager
    def applied(self, slots_T: torch.Tensor | None) -> Iterator[None]:
        """Apply adapters in the model's layers within this context. `slots_T` contains the slot of each token."""
        if slots_T is None:
            yield
            return
        with self.loader.slots.applied(slots_T):
            yield
