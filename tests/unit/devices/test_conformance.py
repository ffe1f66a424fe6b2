"""Runs tests/conformance for every backend, each device in its own process."""

import pytest

from tests.support.processes import run_tests
from vllm_gaudi_spec.device_table import DEVICES

ON_HOST = [name for name, device in DEVICES.items() if device.computes_on_host]


@pytest.mark.parametrize("device", [*ON_HOST, pytest.param("cuda", marks=pytest.mark.cuda)])
def test_backend_conformance(device: str) -> None:
    run_tests("tests/conformance", VGS_DEVICE=device, PT_HPU_LAZY_MODE="1")


# What compiled mode implements by other code than lazy mode: graphs, and each form of attention and states in regions.
IN_REGIONS = (
    "test_graphs.py",
    "test_attention.py::test_contexts_at_the_ends_of_blocks[heads in groups-4]",
    "test_attention.py::test_contexts_at_the_ends_of_blocks[latent-4]",
    "test_kv.py::test_o14_blocks_are_copied_in_all_layers[keys and values]",
    "test_rules.py::test_samples[None]",
    "test_selection.py::test_a24_selected_keys[4-padded]",
    "test_selection.py::test_a24_selected_keys[4-flat]",
    "test_states.py::test_prompts_and_verify_steps[Mamba 2-nan]",
)


def test_compiled_gaudi_conformance() -> None:
    run_tests(*(f"tests/conformance/{one}" for one in IN_REGIONS), VGS_DEVICE="hpu-emulated", PT_HPU_LAZY_MODE="0")


@pytest.mark.slow
def test_compiled_gaudi_conformance_in_full() -> None:
    run_tests("tests/conformance", VGS_DEVICE="hpu-emulated", PT_HPU_LAZY_MODE="0")
