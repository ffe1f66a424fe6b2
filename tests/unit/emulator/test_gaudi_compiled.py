"""The emulated Gaudi in eager and compiled mode: tests/emulated_compiled, in a process of its own."""

from tests.support.processes import run_tests


def test_the_compiler() -> None:
    run_tests("tests/emulated_compiled")
