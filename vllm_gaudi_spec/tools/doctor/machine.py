"""Devices, their drivers, and what the host or the container gives a Gaudi.

The host is read from files of the kernel under `root`. No card is opened: it would not be free for a server, and one
that serves already could not be examined. None of this was compared with a machine that has a Gaudi.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import groupby
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
    """Report driver versions from the tools that are here, or from the kernel where hl-smi is missing."""
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
    """Compare the releases of driver and software, which Intel publishes together."""
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


# ---- the host of a Gaudi -----------------------------------------------------------------------------------


_GAUDI = "hpu"
_MIB = 2**20
_QUEUE_MIB = 240
"""Size of each of vLLM's queues between processes in /dev/shm: ten chunks of 24 MiB."""


def host_findings(root: Path = Path("/")) -> Iterator[Finding]:
    """Check the host, if a driver shows a Gaudi."""
    cards = [Path(card) for card in devices.cards(_GAUDI, root)]
    if not cards:
        return
    yield from _rights(cards)
    yield from _holders(cards, root)
    yield from _huge_pages(root)
    yield from _shared_memory(root)
    yield from _cores(cards, root)


def _rights(cards: list[Path]) -> Iterator[Finding]:
    refused = [card for card in cards if not os.access(card, os.R_OK | os.W_OK)]
    if not refused:
        yield Finding(OK, "rights", f"{_listed(cards)}: may be opened by this user")
        return
    yield Finding(
        PROBLEM if refused == cards else WARNING,
        "rights",
        f"{_listed(refused)}: not readable and writable for user {os.getuid()}",
        f"add the user to group {refused[0].stat().st_gid} (docker: --group-add), or start the container with "
        "--runtime=habana",
    )


def _holders(cards: list[Path], root: Path) -> Iterator[Finding]:
    """Find processes that hold a card; those of other containers and users may be invisible."""
    names = {f"/{card.relative_to(root)}": card for card in cards}
    held: dict[str, list[Path]] = {}
    for process in sorted((root / "proc").glob("[0-9]*"), key=lambda folder: int(folder.name)):
        if process.name == str(os.getpid()):
            continue
        for card in sorted(_open_files(process) & names.keys()):
            held.setdefault(f"{process.name} ({_command(process)})", []).append(names[card])
    for holder, those in held.items():
        yield Finding(
            WARNING,
            "card",
            f"process {holder} holds {_listed(those)}: another one gets `Device already acquired`",
            f"end process {holder.split()[0]}, or leave its card out of HABANA_VISIBLE_MODULES",
        )


def _open_files(process: Path) -> set[str]:
    try:
        return {os.readlink(file) for file in (process / "fd").iterdir()}
    except OSError:  # another user's, or it has just ended
        return set()


def _command(process: Path) -> str:
    return _text(process / "comm") or "of unknown name"


def _huge_pages(root: Path) -> Iterator[Finding]:
    remedy = "reserve some on the host (sysctl vm.nr_hugepages), and in Kubernetes ask for hugepages-2Mi in the pod"
    if _text(root / "sys/fs/cgroup/hugetlb.2MB.max") == "0":
        yield Finding(WARNING, "huge pages", "this container may use none", remedy)
        return
    sizes = dict(line.split(":", 1) for line in _text(root / "proc/meminfo").splitlines() if ":" in line)
    total, free, size = (
        int(sizes.get(name, "0").split()[0]) for name in ("HugePages_Total", "HugePages_Free", "Hugepagesize")
    )
    if total:
        yield Finding(OK, "huge pages", f"{free} of {total} are free, of {size // 1024} MiB each")
    else:
        yield Finding(WARNING, "huge pages", "the host has reserved none, and the driver's software uses them", remedy)


def _shared_memory(root: Path) -> Iterator[Finding]:
    folder = root / "dev/shm"
    free = shutil.disk_usage(folder).free // _MIB if folder.is_dir() else 0
    if free >= _QUEUE_MIB:
        yield Finding(OK, "shared memory", f"{free} MiB are free in /dev/shm")
        return
    yield Finding(
        WARNING,
        "shared memory",
        f"{free} MiB are free in /dev/shm, and a server of several ranks does not start: vLLM wants {_QUEUE_MIB} MiB a "
        "queue",
        "docker: --ipc=host or --shm-size=16g; Kubernetes: mount an emptyDir of medium Memory at /dev/shm",
    )


def _cores(cards: list[Path], root: Path) -> Iterator[Finding]:
    """Compare NUMA nodes: a process far from its card is slower. Virtual machines do not show the node."""
    allowed = _cpu_set(_field(_text(root / "proc/self/status"), "Cpus_allowed_list"))
    located = [(_node(card, root), card) for card in cards]
    placed = sorted((node, card) for node, card in located if node is not None)
    if not placed or not allowed:
        return
    near_any: set[int] = set()
    far = False
    for node, group in groupby(placed, key=lambda pair: pair[0]):
        near = _cpu_set(_text(root / f"sys/devices/system/node/node{node}/cpulist"))
        near_any |= near
        if near and not near & allowed:
            far = True
            yield Finding(
                WARNING,
                "cores",
                f"{_listed([card for _, card in group])}: on NUMA node {node}, and this process may use no core of it",
                f"start the server with numactl --cpunodebind={node} --membind={node}, or give the container its cores",
            )
    nodes = sorted({node for node, _ in placed})
    if far:
        return
    if allowed <= near_any:
        yield Finding(OK, "cores", f"this process runs on the cards' NUMA nodes ({', '.join(map(str, nodes))})")
    else:
        listed = ",".join(map(str, nodes))
        yield Finding(
            NOTE,
            "cores",
            f"the cards are on NUMA node {listed}, and this process may leave it",
            f"start the server with numactl --cpunodebind={listed} --membind={listed}",
        )


def _node(card: Path, root: Path) -> int | None:
    found = _text(root / "sys/class/accel" / card.name / "device/numa_node")
    return int(found) if found.isdigit() else None  # -1 where the machine does not show it


def _field(text: str, name: str) -> str:
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(f"{name}:")), "")


def _cpu_set(text: str) -> set[int]:
    """Parse a list of the kernel, such as 0-3,8,10-11."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def _text(file: Path) -> str:
    """Return the text of the file, or an empty one if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _listed(cards: list[Path]) -> str:
    return ", ".join(card.name for card in cards)
