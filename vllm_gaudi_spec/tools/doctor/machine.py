"""Checks of devices, their drivers, and the host or container of a Gaudi.

Information about the host is read from kernel files under `root`. No card is opened, so these checks can run while a
server uses the cards. These checks have never run on a machine with a Gaudi.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from vllm_gaudi_spec import device_table, versions
from vllm_gaudi_spec.environment import DEVICE
from vllm_gaudi_spec.tools.doctor.findings import Finding, note, ok, problem, warning

_SECONDS = 20
# Devices whose drivers create device files for cards.
_CARDS = {name: device.title for name, device in device_table.DEVICES.items() if device.nodes}
# Maps each tool to its arguments and a pattern for the driver version in its output. hl-smi also prints the version of
# the network driver, and npu-smi also prints its own version.
_TOOLS = {
    "hl-smi": ((), r"^\|\s*Driver Version:\s*([\w.-]+)"),
    "npu-smi": (("info",), r"^\|\s*npu-smi\s.*\sVersion:\s*([\w.-]+)"),
    "nvidia-smi": ((), r"Driver Version:\s*([\w.-]+)"),
}


def check_devices() -> Iterator[Finding]:
    requested = DEVICE.value
    if requested is not None:
        yield _check_requested_device(requested)
    elif others := device_table.other_platform_plugins():
        yield note("device", f"left to the platform plugin {', '.join(others)}, because VGS_DEVICE is not set")
    elif (device := device_table.choose_device()) in _CARDS:
        software = device_table.DEVICES[device].software
        yield ok("device", f"{device}: {_count(device_table.cards(device))}, and {software} is installed")
    else:
        no_cards = " and ".join(f"no {title}" for title in _CARDS.values())
        yield ok("device", f"cpu: {no_cards} can be used here, and VGS_DEVICE is not set")
    for device, name in _CARDS.items():
        if (found := device_table.cards(device)) and (missing := device_table.missing_software(device)):
            text = f"there is a {name} ({_count(found)}), which is not used because {missing} is not installed"
            yield warning("device", text, f"use the vendor's image, which has {missing}")


def _check_requested_device(device: str) -> Finding:
    emulated = f"VGS_DEVICE={device}-emulated"
    if device not in device_table.DEVICES:
        names = ", ".join(device_table.DEVICES)
        return problem("device", f"VGS_DEVICE={device} is not available", f"use one of {names}")
    if (software := device_table.missing_software(device)) is not None:
        text = f"VGS_DEVICE={device} needs {software}, which is not installed"
        return problem("device", text, f"use the vendor's image, which has it, or {emulated} without a card")
    if device in _CARDS and not device_table.cards(device):
        text = f"VGS_DEVICE={device}, but no driver reports a {_CARDS[device]} here"
        return problem("device", text, f"pass the devices to the container, load the driver, or use {emulated}")
    return ok("device", f"{device}, set by VGS_DEVICE")


def _count(cards: list[str]) -> str:
    return cards[0] if len(cards) == 1 else f"{len(cards)} cards, {cards[0]} to {cards[-1]}"


def check_drivers(root: Path = Path("/")) -> Iterator[Finding]:
    """Report driver versions from the available tools or, if hl-smi is missing, from the kernel."""
    version = root / "sys/module/habanalabs/version"
    if shutil.which("hl-smi") is None and version.is_file():
        driver = version.read_text().strip()
        yield ok("driver", f"habanalabs: {driver}")
        yield from _compare_with_bridge(driver)
    for name, (arguments, pattern) in _TOOLS.items():
        if shutil.which(name) is None:
            continue
        try:
            done = subprocess.run(
                (name, *arguments), capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            yield warning("driver", f"{name} does not answer: {error}", "load the driver again, or reboot")
            continue
        if done.returncode:
            message = (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}").splitlines()[0]
            yield warning("driver", f"{name} fails: {message}", "load the driver again, or reboot")
            continue
        found = re.search(pattern, done.stdout, re.MULTILINE)
        yield ok("driver", f"{name}: {found[1] if found else 'its output does not have the version'}")
        if found and name == "hl-smi":
            yield from _compare_with_bridge(found[1])
        if found and name == "npu-smi":
            yield from check_npu_driver(found[1])


def _compare_with_bridge(driver: str) -> Iterator[Finding]:
    """Compare the release of the driver with that of the software, because Intel publishes them together."""
    bridge = versions.installed("habana-torch-plugin")
    if bridge is not None and (new := _find_release(bridge)) != (old := _find_release(driver)):
        text = f"the driver is {driver}, but habana-torch-plugin is {bridge}: their releases must be the same"
        yield warning("driver", text, f"install the driver of release {new}, or use the image of release {old}")


def check_npu_driver(driver: str) -> Iterator[Finding]:
    numbers = tuple(int(number) for number in re.findall(r"\d+", driver)[:3])
    remedy = "install the driver of HDK 25.5.1 or newer"
    if numbers < (25, 0):
        yield warning(
            "driver", f"the driver is {driver}: graph task updates need HDK 25.0.RC1 (else error 207000)", remedy
        )
    elif numbers < (25, 5, 1):
        yield warning("driver", f"the driver is {driver}: before 25.5.1, fewer graphs fit (`alloc sq cq fail`)", remedy)


def _find_release(version: str) -> str:
    return ".".join(version.split(".")[:2])


# ---- a Gaudi's host ----------------------------------------------------------------------------------------


_MIB = 2**20
_QUEUE_MIB = 240
"""Size of each of vLLM's queues between processes in /dev/shm: ten chunks of 24 MiB."""


def check_host(root: Path = Path("/")) -> Iterator[Finding]:
    """Check the host if it has a device file for a Gaudi."""
    if cards := [Path(card) for card in device_table.cards("hpu", root)]:
        yield _check_rights(cards)
        yield from _find_holders(cards, root)
        yield _check_huge_pages(root)
        yield _check_shared_memory(root)
        yield from _check_cores(cards, root)


def _check_rights(cards: list[Path]) -> Finding:
    refused = [card for card in cards if not os.access(card, os.R_OK | os.W_OK)]
    if not refused:
        return ok("rights", f"{_list(cards)}: may be opened by this user")
    group = refused[0].stat().st_gid
    return (problem if refused == cards else warning)(
        "rights",
        f"{_list(refused)}: not readable and writable for user {os.getuid()}",
        f"add the user to group {group} (docker: --group-add), or start the container with --runtime=habana",
    )


def _find_holders(cards: list[Path], root: Path) -> Iterator[Finding]:
    """Find processes that use a card. Processes of other containers and users may not be visible."""
    names = {f"/{card.relative_to(root)}": card.name for card in cards}
    for process in sorted((root / "proc").glob("[0-9]*"), key=lambda folder: int(folder.name)):
        try:
            held = {os.readlink(file) for file in (process / "fd").iterdir()} & names.keys()
        except OSError:  # a process of another user, or one that has just ended
            continue
        if held and process.name != str(os.getpid()):
            command, listed = _read(process / "comm") or "unknown", ", ".join(sorted(names[card] for card in held))
            yield warning(
                "card",
                f"process {process.name} ({command}) holds {listed}: other processes get `Device already acquired`",
                f"end process {process.name}, or leave its card out of HABANA_VISIBLE_MODULES",
            )


def _check_huge_pages(root: Path) -> Finding:
    remedy = "reserve some on the host (sysctl vm.nr_hugepages), and in Kubernetes request hugepages-2Mi for the pod"
    if _read(root / "sys/fs/cgroup/hugetlb.2MB.max") == "0":
        return warning("huge pages", "this container may use none", remedy)
    sizes = dict(line.split(":", 1) for line in _read(root / "proc/meminfo").splitlines() if ":" in line)
    total, free, size = (
        int(sizes.get(name, "0").split()[0]) for name in ("HugePages_Total", "HugePages_Free", "Hugepagesize")
    )
    if total:
        return ok("huge pages", f"{free} of {total} are free, of {size // 1024} MiB each")
    return warning("huge pages", "the host has reserved none, but the driver's software uses them", remedy)


def _check_shared_memory(root: Path) -> Finding:
    folder = root / "dev/shm"
    free = shutil.disk_usage(folder).free // _MIB if folder.is_dir() else 0
    if free >= _QUEUE_MIB:
        return ok("shared memory", f"{free} MiB are free in /dev/shm")
    return warning(
        "shared memory",
        f"{free} MiB are free in /dev/shm; a server of several ranks does not start without {_QUEUE_MIB} MiB per queue",
        "docker: --ipc=host or --shm-size=16g; Kubernetes: mount an emptyDir of medium Memory at /dev/shm",
    )


def _check_cores(cards: list[Path], root: Path) -> Iterator[Finding]:
    """Compare NUMA nodes, because a process far from its card is slower. Virtual machines do not report NUMA nodes."""
    status = _read(root / "proc/self/status")
    allowed = _parse_cores(
        next((line[18:] for line in status.splitlines() if line.startswith("Cpus_allowed_list:")), "")
    )
    nodes = sorted({node for card in cards if (node := _find_node(card, root)) is not None})
    if not nodes or not allowed:
        return
    near = {node: _parse_cores(_read(root / f"sys/devices/system/node/node{node}/cpulist")) for node in nodes}
    listed = ",".join(map(str, nodes))
    if far := [str(node) for node in nodes if near[node] and not near[node] & allowed]:
        text = f"there are cards on NUMA node {','.join(far)}, but this process may use none of its cores"
        yield warning("cores", text, "give the container the cores of its cards, or start a server on each node")
    elif allowed <= set().union(*near.values()):
        yield ok("cores", f"this process runs on the cards' NUMA nodes ({listed})")
    else:
        remedy = f"start the server with numactl --cpunodebind={listed} --membind={listed}"
        yield note(
            "cores", f"the cards are on NUMA node {listed}, but this process may also run on other nodes", remedy
        )


def _find_node(card: Path, root: Path) -> int | None:
    text = _read(root / f"sys/class/accel/{card.name}/device/numa_node")
    return int(text) if text.isdigit() else None


def _parse_cores(text: str) -> set[int]:
    """Parse a list in the kernel's format, such as 0-3,8,10-11."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def _read(file: Path) -> str:
    """Return the text of a file, or an empty string if the file cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _list(cards: list[Path]) -> str:
    return ", ".join(card.name for card in cards)
