"""Device name -> backend. A backend's module is imported only when its device was chosen."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm_gaudi_spec import environment
from vllm_gaudi_spec.config import UnsupportedConfigError

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend


PLUGIN = "gaudi_spec"
"""The name under which vLLM knows this package."""


class _Entry(NamedTuple):
    module: str
    platform: str
    software: str | None = None
    """The package that comes with a card's image, without which there is no such card."""


# One line a device: where its backend lives, and which platform class presents it to vLLM.
_DEVICES = {
    "cpu": _Entry("vllm_gaudi_spec.devices.cpu.backend", "vllm_gaudi_spec.platforms.cpu.CpuSpecPlatform"),
    "hpu": _Entry(
        "vllm_gaudi_spec.devices.hpu.backend", "vllm_gaudi_spec.platforms.hpu.HpuSpecPlatform", "habana_frameworks"
    ),
    "hpu-emulated": _Entry("vllm_gaudi_spec.devices.hpu.emulated", "vllm_gaudi_spec.platforms.hpu.HpuSpecPlatform"),
    "ascend": _Entry(
        "vllm_gaudi_spec.devices.ascend.backend", "vllm_gaudi_spec.platforms.ascend.AscendSpecPlatform", "torch_npu"
    ),
    "ascend-emulated": _Entry(
        "vllm_gaudi_spec.devices.ascend.emulated", "vllm_gaudi_spec.platforms.ascend.AscendSpecPlatform"
    ),
    "cuda": _Entry("vllm_gaudi_spec.devices.cuda.backend", "vllm_gaudi_spec.platforms.cuda.CudaSpecPlatform"),
}


# Beside another release of vLLM: the module refuses as it is imported.
REFUSING_PLATFORM = "vllm_gaudi_spec.platforms.wrong_vllm.Platform"
DEVICES = tuple(_DEVICES)


def asked_for() -> bool:
    """Whether the user named this platform, rather than just installed it."""
    return environment.requested_device() is not None or PLUGIN in (environment.vllm_plugins_allowed() or ())


def choose_device() -> str | None:
    """The device this process runs on; None when another platform plugin should serve it."""
    if (requested := environment.requested_device()) is not None:
        return requested
    if others := other_platform_plugins():
        _say_inactive(others)
        return None
    if gaudi_is_available():
        return "hpu"
    return "ascend" if ascend_is_available() else "cpu"


@cache
def gaudi_is_available() -> bool:
    """Whether there are a card and its software. Opens nothing, and raises nothing: vLLM asks while it is imported."""
    return _is_here("hpu")


@cache
def ascend_is_available() -> bool:
    """The same of an NPU."""
    return _is_here("ascend")


def missing_software(device: str) -> str | None:
    """The package that a card needs and that is not installed."""
    software = _DEVICES[device].software
    return software if software is not None and find_spec(software) is None else None


def comes_with_an_image(package: str) -> bool:
    return any(package == entry.software for entry in _DEVICES.values())


def _is_here(device: str) -> bool:
    try:
        return missing_software(device) is None and bool(cards(device))
    except (ImportError, OSError, ValueError):
        return False


def cards(device: str) -> list[str]:
    """The cards of a kind that a driver shows, by the files through which they are opened."""
    return sorted(str(found) for folder, pattern in _NODES.get(device, ()) for found in Path(folder).glob(pattern))


# Where drivers show their cards: current Gaudis, and those before the kernel's accelerator class; NPUs.
_NODES = {
    "hpu": (("/dev/accel", "accel[0-9]*"), ("/dev", "hl[0-9]*")),
    "ascend": (("/dev", "davinci[0-9]*"),),
}


@cache
def other_platform_plugins() -> tuple[str, ...]:
    """Platform plugins of others that vLLM would load."""
    allowed = environment.vllm_plugins_allowed()
    return tuple(
        plugin.name
        for plugin in entry_points(group="vllm.platform_plugins")
        if not plugin.value.startswith("vllm_gaudi_spec:") and (allowed is None or plugin.name in allowed)
    )


@cache
def _say_inactive(others: tuple[str, ...]) -> None:
    logger = logging.getLogger("vllm")
    if others == ("ascend",):  # whether integrations/ serves there is said as soon as it is known
        logger.info("The platforms of vllm_gaudi_spec stay inactive beside vllm-ascend's.")
    else:
        logger.warning(
            "vllm_gaudi_spec stays inactive beside the platform plugin %s; set VGS_DEVICE to use it.", ", ".join(others)
        )


@cache
def say_wrong_vllm(reason: str) -> None:
    logging.getLogger("vllm").warning("vllm_gaudi_spec stays inactive: %s.", reason)


def platform_class(device: str) -> str:
    """An unknown device gets the CPU's: vLLM swallows what a plugin raises, so the platform has to refuse it."""
    return _DEVICES.get(device, _DEVICES["cpu"]).platform


def refuse_unknown_device() -> None:
    requested = environment.requested_device()
    if requested is not None and requested not in _DEVICES:
        raise UnsupportedConfigError(f"VGS_DEVICE={requested} is not available; use one of {', '.join(_DEVICES)}.")


@cache
def load_backend(device: str | None = None) -> DeviceBackend:
    """The backend of a device (this process's device by default), made once."""
    name = device or choose_device() or "cpu"
    backend: DeviceBackend = importlib.import_module(_DEVICES[name].module).Backend()
    return backend


def describe_device() -> dict[str, str]:
    """Device and mode, as every report prints them."""
    backend = load_backend()
    return {"device": backend.name, "mode": backend.mode}
