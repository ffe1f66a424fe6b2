"""Snapshots of recurrent states on the device: rows of them that no request has, after those of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.recurrent.states import RecurrentStates
    from vllm_gaudi_spec.runner.requests import Requests


class SnapshotRows:
    """Copies one row at a time: a state is large, so padding to a number of rows would cost more than it saves, and
    there is one graph."""

    def __init__(self, states: RecurrentStates, requests: Requests, backend: DeviceBackend) -> None:
        self._requests = requests
        self._first = requests.pad_row + 1
        self._upload = backend.memory.upload
        self._run_copy = backend.graphs.graph(states.copy_rows)

    def load(self, slots: Mapping[str, int]) -> None:
        """Before the forwards of a step: requests start from these slots."""
        for req_id, slot in slots.items():
            self._copy(self._first + slot, self._requests.by_id[req_id].row)

    def save(self, slots: Mapping[str, int]) -> None:
        """After them."""
        for req_id, slot in slots.items():
            self._copy(self._requests.by_id[req_id].row, self._first + slot)

    def warm_up(self) -> None:
        """Run what a copy runs, on the pad row."""
        self._copy(self._requests.pad_row, self._requests.pad_row)

    def _copy(self, source: int, target: int) -> None:
        self._run_copy(self._upload(torch.tensor([source])), self._upload(torch.tensor([target])))
