"""What a host reports of its Gaudis, and what a Gaudi process finds in its environment."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_gaudi_spec import config, device_table, environment
from vllm_gaudi_spec.devices.hpu import backend


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    device_table.has_card.cache_clear()
    yield
    device_table.has_card.cache_clear()


def test_a_card_without_its_software_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "accel0").touch()
    device = device_table.DEVICES["hpu"]._replace(nodes=((str(tmp_path), "accel[0-9]*"),))
    monkeypatch.setitem(device_table.DEVICES, "hpu", device)
    monkeypatch.setattr(device_table, "find_spec", lambda name: None)  # this process may have the emulated one
    assert not device_table.has_card("hpu")


def without_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*environment._GAUDI_DEFAULTS, environment.INPUT_REUSE.name, "PT_HPU_LAZY_MODE"):
        monkeypatch.setenv(name, "")  # so that what is set afterwards is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("VGS_DEVICE", "hpu-emulated")


def in_mode(variable: environment.Variable, asked: str, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What it is in compiled mode, in compiled mode if `asked` is set, in lazy mode and in that of no variable."""
    found = []
    for mode, value in (("0", None), ("0", asked), ("1", None), (None, None)):
        without_defaults(monkeypatch)
        for name, setting in (("PT_HPU_LAZY_MODE", mode), (variable.name, value)):
            if setting is not None:
                monkeypatch.setenv(name, setting)
        environment.set_gaudi_defaults()
        found.append(variable.value)
    return found


def test_s09_graphs_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_mode(environment.PARALLEL_COMPILATION, "0", monkeypatch) == ["1", "0", "1", "1"]


def test_c33_no_recipe_computes_in_the_memory_of_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_mode(environment.INPUT_REUSE, "1", monkeypatch) == ["0", "1", None, None]


@pytest.mark.parametrize(("value", "lazy"), [(None, True), ("1", True), ("0", False), ("2", True)])
def test_lazy_mode_is_the_default(value: str | None, lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    without_defaults(monkeypatch)
    if value is not None:
        monkeypatch.setenv("PT_HPU_LAZY_MODE", value)
    assert environment.gaudi_is_lazy() is lazy
    assert os.environ["PT_HPU_WEIGHT_SHARING"] == "0"
    assert environment.gaudi_has_lazy_collectives()
    monkeypatch.setenv("PT_HPU_ENABLE_LAZY_COLLECTIVES", "false")
    assert not environment.gaudi_has_lazy_collectives(), "what the user set stays"


@pytest.mark.parametrize(
    ("torch_version", "has_it"),
    [("2.11.0a0+git009b5f6", True), ("2.11.0+hpu", True), ("2.11.0+cpu", False), ("2.11.0", False)],
)
def test_s04_stock_torch_has_no_lazy_mode(torch_version: str, has_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the default follows; a bridge that is loaded knows best."""
    monkeypatch.setenv("VGS_DEVICE", "hpu")
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "")
    monkeypatch.delenv("PT_HPU_LAZY_MODE")
    internal = "habana_frameworks.torch.utils.internal"
    monkeypatch.setitem(sys.modules, internal, ModuleType(internal))  # so that it is put back
    monkeypatch.delitem(sys.modules, internal)
    monkeypatch.setattr(environment, "version", lambda name: torch_version)
    assert environment.gaudi_is_lazy() is environment.gaudi_has_lazy_mode() is has_it
    loaded = ModuleType(internal)
    loaded.is_lazy = lambda: not has_it
    monkeypatch.setitem(sys.modules, internal, loaded)
    assert environment.gaudi_has_lazy_mode() is not has_it


LAZY_ONLY = r"not supported in Lazy mode.*leave PT_HPU_LAZY_MODE unset"
OTHER_TORCH = r"^(?!.*LAZY_MODE).*this torch.*reinstall"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (AssertionError("Stock PyTorch version 2.11.0 is not supported in Lazy mode."), LAZY_ONLY),
        (AssertionError("Current PyTorch version 2.13.0+cu130 is detected as neither HPU fork nor CPU."), OTHER_TORCH),
        (AssertionError("Compile-time major/minor PyTorch version 2.11.0 differs from run-time 2.13.0."), OTHER_TORCH),
        (AttributeError("'NoneType' object has no attribute 'startswith'"), OTHER_TORCH),
    ],
)
def test_s04_a_torch_that_the_bridge_refuses_is_refused_in_a_line(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bridges up to 1.24 refuse it. Up to 1.24.0 they ask a local version that is not there for its beginning."""

    def refuse(name: str) -> Any:
        raise error

    monkeypatch.setattr(backend.importlib, "import_module", refuse)
    with pytest.raises(config.UnsupportedConfigError, match=words):
        backend.make_backend()
