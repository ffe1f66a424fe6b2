"""Table of devices. A device's modules, in its folder under `devices/`, are imported only if it is selected."""

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
"""The plugin name under which vLLM knows this package."""
_FOLDER = "vllm_gaudi_spec.devices"

EMULATOR = "card_emulator"
"""The package that emulates cards."""
GET_EMULATOR = "install it from the folder card_emulator/ of a checkout, or from its wheel beside this project's"


class Device(NamedTuple):
    backend: str
    """The module in `devices/` whose `make_backend` returns the device's backend."""
    platform: str
    """The module in `devices/` and the name of the vLLM platform class that it defines."""
    title: str
    """The device's name in messages."""
    software: str | None = None
    """The package in the vendor's image that the device requires."""
    nodes: tuple[tuple[str, str], ...] = ()
    """Where the driver creates device files: folders and file name patterns."""
    computes_on_host: bool = False
    """Whether the device uses the host's memory and cores, as the CPU and emulated cards do."""
    has_graph_check: bool = False
    """Whether `graph-check` can count graphs that are compiled or captured after warm-up."""


# The keys are the values of VGS_DEVICE. An entry contains everything that a device needs outside its folder. If a
# machine has several kinds of cards, the one listed first is used.
DEVICES = {
    "cpu": Device("cpu.backend", "cpu.platform.CpuSpecPlatform", "CPU", computes_on_host=True),
    "hpu": Device(
        "hpu.backend",
        "hpu.platform.HpuSpecPlatform",
        "Gaudi",
        "habana_frameworks",
        # The first pattern is for current drivers, and the second for drivers older than Linux's accelerator class.
        (("/dev/accel", "accel[0-9]*"), ("/dev", "hl[0-9]*")),
        has_graph_check=True,
    ),
    "hpu-emulated": Device(
        "hpu.emulated", "hpu.platform.HpuSpecPlatform", "emulated Gaudi", computes_on_host=True, has_graph_check=True
    ),
    "ascend": Device(
        "ascend.backend",
        "ascend.platform.AscendSpecPlatform",
        "Ascend NPU",
        "torch_npu",
        (("/dev", "davinci[0-9]*"),),
        has_graph_check=True,
    ),
    "ascend-emulated": Device(
        "ascend.emulated",
        "ascend.platform.AscendSpecPlatform",
        "emulated Ascend NPU",
        computes_on_host=True,
        has_graph_check=True,
    ),
    "cuda": Device("cuda.backend", "cuda.platform.CudaSpecPlatform", "NVIDIA GPU"),
}


# The platform for unsupported vLLM releases. Importing its module raises an error with the reason.
REFUSING_PLATFORM = "vllm_gaudi_spec.platforms.refusing.Platform"


def is_requested() -> bool:
    """Whether the user explicitly requested this platform, as opposed to only installing it."""
    return environment.DEVICE.value is not None or PLUGIN in (environment.list_allowed_plugins() or ())


def choose_device() -> str | None:
    """Return the device for this process, or None to leave it to another platform plugin."""
    if (requested := environment.DEVICE.value) is not None:
        return requested
    if others := other_platform_plugins():
        _log_inactive(others)
        return None
    return next((name for name in DEVICES if has_card(name)), "cpu")


@cache
def has_card(device: str) -> bool:
    """Whether a card and its software are present.

    This function opens no device and raises no error, because it is called while vLLM is still being imported.
    """
    try:
        return missing_software(device) is None and bool(cards(device))
    except (ImportError, OSError, ValueError):
        return False


def missing_software(device: str) -> str | None:
    """Return the package that a card requires if it is not installed, or None."""
    software = DEVICES[device].software
    return software if software is not None and find_spec(software) is None else None


def cards(device: str, root: Path = Path("/")) -> list[str]:
    """List the device files for all cards of the given kind."""
    folders = ((root / folder.removeprefix("/"), pattern) for folder, pattern in DEVICES[device].nodes)
    return sorted(str(found) for folder, pattern in folders for found in folder.glob(pattern))


@cache
def other_platform_plugins() -> tuple[str, ...]:
    """Return the names of other platform plugins that vLLM would load."""
    allowed = environment.list_allowed_plugins()
    return tuple(
        plugin.name
        for plugin in entry_points(group="vllm.platform_plugins")
        if not plugin.value.startswith("vllm_gaudi_spec:") and (allowed is None or plugin.name in allowed)
    )


@cache
def _log_inactive(others: tuple[str, ...]) -> None:
    logger = logging.getLogger("vllm")
    if others == ("ascend",):  # integrations/ logs later whether this package is used
        logger.info("The platforms of vllm_gaudi_spec are inactive because vllm-ascend is installed.")
    else:
        logger.warning(
            "vllm_gaudi_spec is inactive because of the platform plugin %s; set VLLM_PLUGINS=%s to use it.",
            ", ".join(others),
            PLUGIN,
        )


@cache
def log_wrong_vllm(reason: str) -> None:
    logging.getLogger("vllm").warning("vllm_gaudi_spec stays inactive: %s.", reason)


def platform_class(device: str) -> str:
    """Return a device's platform class.

    For an unknown device, return the CPU's class, which rejects it: vLLM suppresses exceptions from plugins.
    """
    return f"{_FOLDER}.{DEVICES.get(device, DEVICES['cpu']).platform}"


def refuse_unknown_device() -> None:
    requested = environment.DEVICE.value
    if requested is not None and requested not in DEVICES:
        raise UnsupportedConfigError(f"VGS_DEVICE={requested} is not available; use one of {', '.join(DEVICES)}.")


@cache
def load_backend(device: str | None = None) -> DeviceBackend:
    """Return a device's backend, by default the one for this process. The backend is created only once."""
    name = device or choose_device() or "cpu"
    try:
        backend: DeviceBackend = importlib.import_module(f"{_FOLDER}.{DEVICES[name].backend}").make_backend()
    except ImportError as error:
        if (error.name or "").partition(".")[0] != EMULATOR:
            raise
        raise UnsupportedConfigError(f"Device {name} needs the package {EMULATOR}; {GET_EMULATOR}.") from error
    return backend


def describe_device() -> dict[str, str]:
    """Return the device and mode for use in reports."""
    backend = load_backend()
    return {"device": backend.traits.name, "mode": backend.traits.mode}
