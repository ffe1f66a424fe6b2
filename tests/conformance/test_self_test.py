"""The self-test of a card, on every backend."""

from vllm_gaudi_spec.devices.base import DeviceBackend
from vllm_gaudi_spec.self_test import run
from vllm_gaudi_spec.self_test.result import PASSED


def test_the_self_test_passes(backend: DeviceBackend) -> None:
    from vllm.platforms import current_platform

    for number, dtype in enumerate(current_platform.supported_dtypes):
        result = run.self_test(backend, dtype, seconds=0.5)
        assert not result.failed, [str(check) for check in result.failed]
        missing = {check.name for check in result.checks if check.status != PASSED}
        no_fp8 = set() if backend.weights.fp8_arithmetic is not None else {run.FP8_KV}
        # What was compiled once is not again.
        compiled = {run.SECOND_CALL} if number and backend.traits.mode == "compiled" else set()
        assert missing == {run.COLLECTIVES} | no_fp8 | compiled | (
            set() if backend.traits.captures else {run.SECOND_CALL, run.MEMORY}
        )
