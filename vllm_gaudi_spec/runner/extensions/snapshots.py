"""Snapshots of recurrent states, which are stored on the device in the rows after those of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.runner.extensions import Extension

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.outputs import SpecSchedulerOutput
    from vllm_gaudi_spec.recurrent.states import RecurrentStates
    from vllm_gaudi_spec.runner.requests import Requests


class SnapshotRows(Extension):
    """Copies snapshots one row at a time, using a single graph.

    A state is large, so padding to a fixed number of rows would take more time than it saves.
    """

    def __init__(self, states: RecurrentStates, requests: Requests, backend: DeviceBackend) -> None:
        self._requests = requests
        self._first = requests.pad_row + 1
        self._upload = backend.memory.upload
        self._run_copy = backend.graphs.graph(states.copy_rows)

    def apply(self, scheduled: SpecSchedulerOutput, requests: Requests) -> None:
        """Initialize requests from the snapshots that the scheduler has selected."""
        for req_id, slot in scheduled.state_loads.items():
            self._copy(self._first + slot, requests.by_id[req_id].row)

    def after_forwards(self, scheduled: SpecSchedulerOutput) -> None:
        for req_id, slot in scheduled.state_saves.items():
            self._copy(self._requests.by_id[req_id].row, self._first + slot)

    def warm_up(self) -> None:
        """Copy the pad row to itself."""
        self._copy(self._requests.pad_row, self._requests.pad_row)

    def _copy(self, source: int, target: int) -> None:
        self._run_copy(self._upload(torch.tensor([source])), self._upload(torch.tensor([target])))
