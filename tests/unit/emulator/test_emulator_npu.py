"""The emulated NPU: tests/emulated_npu, in a process of its own."""

from __future__ import annotations

from tests.support.processes import run_tests


def test_the_emulated_npu() -> None:
    run_tests("tests/emulated_npu")
