"""Devices, the tools that come with their drivers, and which device this process would take."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from vllm_gaudi_spec import devices, versions
from vllm_gaudi_spec.environment import requested_device
from vllm_gaudi_spec.tools.doctor.findings import NOTE, OK, PROBLEM, WARNING, Finding

_SECONDS = 20
# The devices whose drivers show cards.
_CARDS = {name: device.title for name, device in devices.DEVICES.items() if device.nodes}


class _Tool(NamedTuple):
    command: tuple[str, ...]
    driver: str
    """The driver's version in the tool's output."""


# hl-smi names the network's driver, "Nic Driver Version", after the card's; npu-smi has its own version in front.
_TOOLS = {
    "hl-smi": _Tool(("hl-smi",), r"^\|\s*Driver Version:\s*([\w.-]+)"),
    "npu-smi": _Tool(("npu-smi", "info"), r"^\|\s*npu-smi\s.*\sVersion:\s*([\w.-]+)"),
    "nvidia-smi": _Tool(("nvidia-smi",), r"Driver Version:\s*([\w.-]+)"),
}


def device_findings() -> Iterator[Finding]:
    requested = requested_device()
    if requested is None:
        yield from _chosen_device()
    else:
        yield from _requested_device(requested)
    yield from _unused_cards()


def _requested_device(device: str) -> Iterator[Finding]:
    if device not in devices.DEVICES:
        names = ", ".join(devices.DEVICES)
        yield Finding(PROBLEM, "device", f"VGS_DEVICE={device} is not available", f"use one of {names}")
        return
    if (software := devices.missing_software(device)) is not None:
        yield Finding(
            PROBLEM,
            "device",
            f"VGS_DEVICE={device} needs {software}, which is not installed",
            f"use the vendor's image, which has it, or VGS_DEVICE={device}-emulated without a card",
        )
    elif device in _CARDS and not devices.cards(device):
        yield Finding(
            PROBLEM,
            "device",
            f"VGS_DEVICE={device}, and no driver shows a {_CARDS[device]} here",
            f"give the container its devices, load the driver, or use VGS_DEVICE={device}-emulated",
        )
    else:
        yield Finding(OK, "device", f"{device}, set by VGS_DEVICE")


def _chosen_device() -> Iterator[Finding]:
    if others := devices.other_platform_plugins():
        yield Finding(NOTE, "device", f"left to the platform plugin {', '.join(others)}: VGS_DEVICE is not set")
    elif (device := devices.choose_device()) in _CARDS:
        software = devices.DEVICES[device].software
        yield Finding(OK, "device", f"{device}: {_shown(devices.cards(device))}, and {software} is installed")
    else:
        no_cards = " and ".join(f"no {title}" for title in _CARDS.values())
        yield Finding(OK, "device", f"cpu: {no_cards} can be used here, and VGS_DEVICE is not set")


def _unused_cards() -> Iterator[Finding]:
    for device, name in _CARDS.items():
        if (found := devices.cards(device)) and (software := devices.missing_software(device)):
            yield Finding(
                WARNING,
                "device",
                f"there is a {name} ({_shown(found)}), and {software} is not installed, so it is not used",
                f"use the vendor's image, which has {software}",
            )


def _shown(cards: list[str]) -> str:
    return cards[0] if len(cards) == 1 else f"{len(cards)} cards, {cards[0]} to {cards[-1]}"


def driver_findings(root: Path = Path("/")) -> Iterator[Finding]:
    """Of tools that are here; a machine without cards has none. A container may lack hl-smi, and its kernel knows."""
    version = root / "sys/module/habanalabs/version"
    if shutil.which("hl-smi") is None and version.is_file():
        driver = version.read_text().strip()
        yield Finding(OK, "driver", f"habanalabs: {driver}")
        yield from _beside_the_bridge(driver)
    for name, tool in _TOOLS.items():
        if shutil.which(name) is None:
            continue
        try:
            done = subprocess.run(
                tool.command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            yield Finding(WARNING, "driver", f"{name} does not answer: {error}", "load the driver again, or reboot")
            continue
        if done.returncode:
            message = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()[0]
            yield Finding(WARNING, "driver", f"{name} fails: {message}", "load the driver again, or reboot")
            continue
        found = re.search(tool.driver, done.stdout, re.MULTILINE)
        yield Finding(OK, "driver", f"{name}: {found[1] if found else 'its version is not in what it prints'}")
        if name == "hl-smi" and found:
            yield from _beside_the_bridge(found[1])
        if name == "npu-smi" and found:
            yield from _of_npus(found[1])


def _beside_the_bridge(driver: str) -> Iterator[Finding]:
    """Intel releases driver and software together."""
    bridge = versions.installed("habana-torch-plugin")
    if bridge is not None and _release(bridge) != _release(driver):
        yield Finding(
            WARNING,
            "driver",
            f"the driver is {driver}, and habana-torch-plugin is {bridge}: they are made for each other's release",
            f"install the driver of release {_release(bridge)}, or use the image of release {_release(driver)}",
        )


def _of_npus(driver: str) -> Iterator[Finding]:
    numbers = tuple(int(number) for number in re.findall(r"\d+", driver)[:3])
    if numbers < (25, 0):
        yield Finding(
            WARNING,
            "driver",
            f"the driver is {driver}: updates of a graph's tasks need HDK 25.0.RC1 (error 207000 before)",
            "install the driver of HDK 25.5.1 or newer",
        )
    elif numbers < (25, 5, 1):
        yield Finding(
            WARNING,
            "driver",
            f"the driver is {driver}: before 25.5.1 there is room for fewer graphs (`alloc sq cq fail`)",
            "install the driver of HDK 25.5.1 or newer",
        )


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])
