"""The self-test of a card, on every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gaudi_spec.self_test import run
from vllm_gaudi_spec.self_test.result import PASSED

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend


def test_the_self_test_passes(backend: DeviceBackend) -> None:
    from vllm.platforms import current_platform

    for dtype in current_platform.supported_dtypes:
        result = run.self_test(backend, dtype, seconds=0.5)
        assert not result.failed, [str(check) for check in result.failed]
        missing = {check.name for check in result.checks if check.status != PASSED}
        assert missing == {run.COLLECTIVES} | (set() if backend.traits.captures else {run.SECOND_CALL, run.MEMORY})
