"""What the host, or the container, gives a Gaudi: rights, huge pages, shared memory, near cores, and nobody else on it.

Everything is read from files of the kernel under `root`. No card is opened: it would not be free for a server, and one
that serves already could not be looked at. Nothing of this was compared with a machine that has a Gaudi.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from vllm_gaudi_spec import devices
from vllm_gaudi_spec.tools.doctor.findings import NOTE, OK, PROBLEM, WARNING, Finding

_GAUDI = "hpu"
_MIB = 2**20
_QUEUE_MIB = 240
"""What vLLM wants of /dev/shm for each queue between the processes of a server: ten chunks of 24 MiB."""


def host_findings(root: Path = Path("/")) -> Iterator[Finding]:
    """Nothing where no driver shows a Gaudi."""
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
    """Processes of other containers, and of other users unless this one is root, are not seen."""
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
    """A process far from its card was measurably slower (lesson H07). Virtual machines do not show the node."""
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
    """The kernel's lists: 0-3,8,10-11."""
    cores: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def _text(file: Path) -> str:
    """Empty where there is no such file."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _listed(cards: list[Path]) -> str:
    return ", ".join(card.name for card in cards)
