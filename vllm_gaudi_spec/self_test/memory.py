"""Checks the free memory that a device reports, by which the KV cache is sized."""

from __future__ import annotations

import torch

from vllm_gaudi_spec.devices.base import format_size
from vllm_gaudi_spec.self_test.subject import Failed, NotChecked, Subject

_SIZE = 128 << 20
# Allocators round up, and other work on the device changes it slightly.
_LEAST, _MOST = 0.5, 2.0
# The first allocations may reuse memory that torch holds, as after self-tests of other dtypes.
_ATTEMPTS = 4


def check_memory(subject: Subject) -> str:
    """Check that an allocation reduces the reported free memory by its size."""
    backend = subject.backend
    before = backend.memory.free_bytes()
    if before is None:
        raise NotChecked("the device does not report its free memory")
    if before < 2 * _SIZE:
        raise Failed(f"{format_size(before)} are reported as free before anything was loaded")
    held = []
    for _ in range(_ATTEMPTS):
        free = backend.memory.free_bytes() or 0
        held.append(torch.zeros(_SIZE, dtype=torch.uint8, device=backend.traits.torch_device))
        backend.graphs.step_done()
        backend.memory.synchronize()
        taken = free - (backend.memory.free_bytes() or 0)
        if _LEAST * _SIZE <= taken <= _MOST * _SIZE:
            return f"{format_size(before)} free"
    raise Failed(f"free memory fell by {format_size(taken)} when {format_size(_SIZE)} were taken")
