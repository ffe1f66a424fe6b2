"""A device is a folder of `devices/` and a row of the table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.platforms import resolve_current_platform_cls_qualname
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_gaudi_spec import device_table, devices

PACKAGE = "vllm_gaudi_spec.devices.toy"
BACKEND = "def make_backend(): return 'a backend'"
PLATFORM = """
from vllm_gaudi_spec.platforms.base import CapturingPlatform

class ToySpecPlatform(CapturingPlatform):
    device_type = "toy"
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add a folder and a row, and choose their device."""
    (tmp_path / "toy").mkdir()
    for name, text in {"__init__": "", "backend": BACKEND, "platform": PLATFORM}.items():
        (tmp_path / "toy" / f"{name}.py").write_text(text)
    monkeypatch.setattr(devices, "__path__", [*devices.__path__, str(tmp_path)])
    row = device_table.Device("toy.backend", "toy.platform.ToySpecPlatform", "toy")
    monkeypatch.setitem(device_table.DEVICES, "toy", row)
    monkeypatch.setenv("VGS_DEVICE", "toy")
    yield
    for name in loaded():
        del sys.modules[name]
    vars(devices).pop("toy", None)
    device_table.other_platform_plugins.cache_clear()


def loaded() -> set[str]:
    return {name for name in sys.modules if name.startswith(PACKAGE)}


def test_a_folder_and_a_row_are_a_device(toy: None) -> None:
    """Each module is imported when it is used: a vendor's package comes with it."""
    name = resolve_current_platform_cls_qualname()
    assert loaded() == set()
    platform = resolve_obj_by_qualname(name)
    assert platform.device_type == "toy"
    assert loaded() == {PACKAGE, f"{PACKAGE}.platform"}
    device_table.refuse_unknown_device()
    assert device_table.load_backend.__wrapped__() == "a backend"
