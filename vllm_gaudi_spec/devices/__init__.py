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


EMULATOR = "card_emulator"
"""The package that plays cards."""
GET_EMULATOR = "install it from the folder card_emulator/ of a checkout, or from its wheel beside this project's"


class Device(NamedTuple):
    backend: str
    """The module whose `make_backend` makes the device's backend."""
    platform: str
    """The platform class through which vLLM sees the device."""
    title: str
    """What users call the card."""
    software: str | None = None
    """The package that comes with a card's image, without which there is no such card."""
    nodes: tuple[tuple[str, str], ...] = ()
    """Where its driver shows cards: folders and patterns of files."""
    computes_on_host: bool = False
    """True for the CPU and for emulated cards: the host's memory and cores are the device's."""
    has_graph_check: bool = False
    """True where `graph-check` can count graphs that are made late."""


_HPU = "vllm_gaudi_spec.platforms.hpu.HpuSpecPlatform"
_ASCEND = "vllm_gaudi_spec.platforms.ascend.AscendSpecPlatform"
# By the value of VGS_DEVICE. A device that is here and nowhere else is complete; where several cards are found, the
# first one serves.
DEVICES = {
    "cpu": Device(
        "vllm_gaudi_spec.devices.cpu.backend",
        "vllm_gaudi_spec.platforms.cpu.CpuSpecPlatform",
        "CPU",
        computes_on_host=True,
    ),
    "hpu": Device(
        "vllm_gaudi_spec.devices.hpu.backend",
        _HPU,
        "Gaudi",
        "habana_frameworks",
        # Current Gaudis, and those before the kernel's accelerator class.
        (("/dev/accel", "accel[0-9]*"), ("/dev", "hl[0-9]*")),
        has_graph_check=True,
    ),
    "hpu-emulated": Device(
        "vllm_gaudi_spec.devices.hpu.emulated", _HPU, "emulated Gaudi", computes_on_host=True, has_graph_check=True
    ),
    "ascend": Device(
        "vllm_gaudi_spec.devices.ascend.backend",
        _ASCEND,
        "Ascend NPU",
        "torch_npu",
        (("/dev", "davinci[0-9]*"),),
        has_graph_check=True,
    ),
    "ascend-emulated": Device(
        "vllm_gaudi_spec.devices.ascend.emulated",
        _ASCEND,
        "emulated Ascend NPU",
        computes_on_host=True,
        has_graph_check=True,
    ),
    "cuda": Device(
        "vllm_gaudi_spec.devices.cuda.backend", "vllm_gaudi_spec.platforms.cuda.CudaSpecPlatform", "NVIDIA GPU"
    ),
}


# Where vLLM cannot run: the module refuses as it is imported.
REFUSING_PLATFORM = "vllm_gaudi_spec.platforms.refusing.Platform"


def asked_for() -> bool:
    """Whether the user named this platform, rather than just installed it."""
    return environment.requested_device() is not None or PLUGIN in (environment.list_allowed_plugins() or ())


def choose_device() -> str | None:
    """The device this process runs on; None when another platform plugin should serve it."""
    if (requested := environment.requested_device()) is not None:
        return requested
    if others := other_platform_plugins():
        _log_inactive(others)
        return None
    return next((name for name in DEVICES if has_card(name)), "cpu")


@cache
def has_card(device: str) -> bool:
    """Whether there are a card and its software. Opens nothing, and raises nothing: vLLM asks while it is imported."""
    try:
        return missing_software(device) is None and bool(cards(device))
    except (ImportError, OSError, ValueError):
        return False


def missing_software(device: str) -> str | None:
    """The package that a card needs and that is not installed."""
    software = DEVICES[device].software
    return software if software is not None and find_spec(software) is None else None


def comes_with_an_image(package: str) -> bool:
    return any(package == entry.software for entry in DEVICES.values())


def cards(device: str, root: Path = Path("/")) -> list[str]:
    """The cards of a kind that a driver shows, by the files through which they are opened."""
    folders = ((root / folder.removeprefix("/"), pattern) for folder, pattern in DEVICES[device].nodes)
    return sorted(str(found) for folder, pattern in folders for found in folder.glob(pattern))


@cache
def other_platform_plugins() -> tuple[str, ...]:
    """Platform plugins of others that vLLM would load."""
    allowed = environment.list_allowed_plugins()
    return tuple(
        plugin.name
        for plugin in entry_points(group="vllm.platform_plugins")
        if not plugin.value.startswith("vllm_gaudi_spec:") and (allowed is None or plugin.name in allowed)
    )


@cache
def _log_inactive(others: tuple[str, ...]) -> None:
    logger = logging.getLogger("vllm")
    if others == ("ascend",):  # whether integrations/ serves there is logged as soon as it is known
        logger.info("The platforms of vllm_gaudi_spec stay inactive beside vllm-ascend's.")
    else:
        logger.warning(
            "vllm_gaudi_spec stays inactive beside the platform plugin %s; set VLLM_PLUGINS=%s to use it.",
            ", ".join(others),
            PLUGIN,
        )


@cache
def log_wrong_vllm(reason: str) -> None:
    logging.getLogger("vllm").warning("vllm_gaudi_spec stays inactive: %s.", reason)


def platform_class(device: str) -> str:
    """An unknown device gets the CPU's: vLLM swallows what a plugin raises, so the platform has to refuse it."""
    return DEVICES.get(device, DEVICES["cpu"]).platform


def refuse_unknown_device() -> None:
    requested = environment.requested_device()
    if requested is not None and requested not in DEVICES:
        raise UnsupportedConfigError(f"VGS_DEVICE={requested} is not available; use one of {', '.join(DEVICES)}.")


@cache
def load_backend(device: str | None = None) -> DeviceBackend:
    """The backend of a device (this process's device by default), made once."""
    name = device or choose_device() or "cpu"
    try:
        backend: DeviceBackend = importlib.import_module(DEVICES[name].backend).make_backend()
    except ImportError as error:
        if (error.name or "").partition(".")[0] != EMULATOR:
            raise
        raise UnsupportedConfigError(f"Device {name} needs the package {EMULATOR}; {GET_EMULATOR}.") from error
    return backend


def describe_device() -> dict[str, str]:
    """Device and mode, as every report prints them."""
    backend = load_backend()
    return {"device": backend.traits.name, "mode": backend.traits.mode}
