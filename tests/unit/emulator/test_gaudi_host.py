"""What a host reports of its Gaudis, and what a Gaudi process finds in its environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_gaudi_spec import config, devices, environment


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    devices.has_card.cache_clear()
    yield
    devices.has_card.cache_clear()


@pytest.fixture
def software(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda name: object())


def nodes(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()
    nodes = (str(folder), "accel[0-9]*"), (str(folder), "hl[0-9]*")
    monkeypatch.setitem(devices.DEVICES, "hpu", devices.DEVICES["hpu"]._replace(nodes=nodes))


@pytest.mark.parametrize(
    ("names", "there"), [((), False), (("accel0",), True), (("hl3",), True), (("accel_c",), False)]
)
def test_a_card_shows_in_dev(
    software: None, names: tuple[str, ...], there: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes(monkeypatch, tmp_path, *names)
    assert devices.has_card("hpu") is there
    monkeypatch.setattr(devices, "other_platform_plugins", tuple)
    monkeypatch.delenv("VGS_DEVICE", raising=False)
    assert devices.choose_device() == ("hpu" if there else "cpu")


def test_a_card_without_its_software_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes(monkeypatch, tmp_path, "accel0")
    monkeypatch.setattr(devices, "find_spec", lambda name: None)  # this process may have the emulated one
    assert not devices.has_card("hpu")


@pytest.mark.parametrize("error", [ImportError, OSError, ValueError])
def test_asking_never_raises(error: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(name: str) -> Any:
        raise error(name)

    nodes(monkeypatch, tmp_path, "accel0")
    monkeypatch.setattr(devices, "find_spec", broken)
    assert devices.has_card("hpu") is False


@pytest.mark.parametrize(("value", "lazy"), [(None, True), ("1", True), ("0", False), ("2", True)])
def test_lazy_mode_is_the_default(value: str | None, lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment._GAUDI_DEFAULTS:
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    if value is not None:
        monkeypatch.setenv("PT_HPU_LAZY_MODE", value)
    assert environment.gaudi_is_lazy() is lazy
    assert os.environ["PT_HPU_WEIGHT_SHARING"] == "0"
    assert environment.gaudi_has_lazy_collectives()
    monkeypatch.setenv("PT_HPU_ENABLE_LAZY_COLLECTIVES", "false")
    assert not environment.gaudi_has_lazy_collectives(), "what the user set stays"


def test_an_unknown_generation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VGS_EMULATED_GENERATION", "gaudi1")
    with pytest.raises(config.UnsupportedConfigError, match="use gaudi2 or gaudi3"):
        environment.emulated_generation()
