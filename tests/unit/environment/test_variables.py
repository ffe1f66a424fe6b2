"""The table of environment variables, and vllm-gaudi's variables that have an equivalent here."""

import re
from typing import Any

import pytest

from tests.support.processes import ROOT
from vllm_gaudi_spec import environment
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.hpu import platform as hpu
from vllm_gaudi_spec.environment import VARIABLES


def test_the_table_has_every_variable_that_is_read() -> None:
    """Ours and those of the Gaudi bridge, by name; two of ours are notes to child processes."""
    source = (ROOT / "vllm_gaudi_spec" / "environment" / "__init__.py").read_text()
    read = set(re.findall(r'"((?:VGS|PT_HPU|VLLM_CPU)_[A-Z_]+|QUANT_CONFIG|VLLM_GRAPH_RESERVED_MEM)"', source))
    assert read - {variable.name for variable in VARIABLES} == {"VGS_START_METHOD_CHOSEN_BY", "VGS_START_FAILURE"}


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VGS_SKIP_WARMUP", "VLLM_SKIP_WARMUP"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "skipped"),
    [
        ({}, False),
        ({"VLLM_SKIP_WARMUP": "true"}, True),
        ({"VLLM_SKIP_WARMUP": "True"}, True),
        ({"VLLM_SKIP_WARMUP": "1"}, True),
        ({"VLLM_SKIP_WARMUP": "false"}, False),
        ({"VLLM_SKIP_WARMUP": "0"}, False),
        *(({"VLLM_SKIP_WARMUP": word}, True) for word in ("t", "yes", "Y", "on")),
        ({"VLLM_SKIP_WARMUP": ""}, False),
        ({"VGS_SKIP_WARMUP": ""}, False),
        ({"VLLM_SKIP_WARMUP": "true", "VGS_SKIP_WARMUP": ""}, True),
        ({"VLLM_SKIP_WARMUP": "true", "VGS_SKIP_WARMUP": "0"}, False),
        ({"VLLM_SKIP_WARMUP": "false", "VGS_SKIP_WARMUP": "1"}, True),
    ],
)
def test_skip_warmup_reads_both_variables(
    variables: dict[str, str], skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.skip_warmup() is skipped


def test_vendors_numbers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of memory that graphs may take, and the layers of a recipe."""
    for name in ("VLLM_GRAPH_RESERVED_MEM", "VLLM_CONFIG_HIDDEN_LAYERS"):
        monkeypatch.delenv(name, raising=False)
    assert (environment.gaudi_memory_reserve(), environment.gaudi_layers_of_a_recipe()) == (0.1, 1)
    monkeypatch.setenv("VLLM_GRAPH_RESERVED_MEM", "0.4")
    monkeypatch.setenv("VLLM_CONFIG_HIDDEN_LAYERS", "4")
    assert (environment.gaudi_memory_reserve(), environment.gaudi_layers_of_a_recipe()) == (0.4, 4)
    monkeypatch.setenv("VLLM_CONFIG_HIDDEN_LAYERS", "all")
    with pytest.raises(
        UnsupportedConfigError, match="VLLM_CONFIG_HIDDEN_LAYERS must be an integer of 0 or more, got all"
    ):
        environment.gaudi_layers_of_a_recipe()


def test_chunks_of_row_parallel_layers_need_lazy_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_ROW_PARALLEL_CHUNKS", "VLLM_ROW_PARALLEL_CHUNK_THRESHOLD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    assert environment.gaudi_chunks() == (1, 8192)
    monkeypatch.setenv("VLLM_ROW_PARALLEL_CHUNKS", "4")
    with pytest.raises(UnsupportedConfigError, match="VLLM_ROW_PARALLEL_CHUNKS=4 has no effect, because compiled mode"):
        environment.gaudi_chunks()
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    assert environment.gaudi_chunks() == (4, 8192)
    monkeypatch.setenv("VLLM_ROW_PARALLEL_CHUNKS", "0")
    with pytest.raises(UnsupportedConfigError, match="VLLM_ROW_PARALLEL_CHUNKS must be an integer of 1 or more, got 0"):
        environment.gaudi_chunks()


@pytest.mark.parametrize("value", ["10%", "10", "-1", "1", "nan"])
def test_graph_memory_outside_0_to_1_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused where the configuration is checked, before a model is loaded."""
    monkeypatch.setenv("VLLM_GRAPH_RESERVED_MEM", value)
    monkeypatch.setattr(hpu, "set_gaudi_defaults", lambda: None)
    nothing_else: Any = None
    with pytest.raises(
        UnsupportedConfigError, match=f"VLLM_GRAPH_RESERVED_MEM must be at least 0 and less than 1, got {value}"
    ):
        hpu.HpuSpecPlatform.check_and_update_config(nothing_else)
