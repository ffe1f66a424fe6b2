"""doctor's look at the host of a Gaudi, over a root folder made for the test: no machine is looked at."""

import inspect
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from vllm_gaudi_spec import versions
from vllm_gaudi_spec.tools.doctor import machine
from vllm_gaudi_spec.tools.doctor.findings import Finding

GOOD = {
    "dev/accel/accel0": "",
    "dev/accel/accel1": "",
    "dev/accel/accel_controlD0": "",
    "dev/shm/psm_1": "",
    "proc/meminfo": "MemTotal: 9 kB\nHugePages_Total: 47500\nHugePages_Free: 40000\nHugepagesize: 2048 kB\n",
    "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-3,8\n",
    "sys/class/accel/accel0/device/numa_node": "0\n",
    "sys/class/accel/accel1/device/numa_node": "1\n",
    "sys/devices/system/node/node0/cpulist": "0-3\n",
    "sys/devices/system/node/node1/cpulist": "8-11\n",
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with two cards, and nothing wrong."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=16 << 30))
    for name, text in GOOD.items():
        write(tmp_path / name, text)
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def hold(root: Path, process: int, command: str, *files: str) -> None:
    write(root / f"proc/{process}/comm", command + "\n")
    for number, file in enumerate(files):
        (root / f"proc/{process}/fd").mkdir(exist_ok=True)
        (root / f"proc/{process}/fd/{number}").symlink_to(file)


def only_fault(root: Path, about: str) -> Finding:
    found = list(machine.check_host(root))
    (fault,) = (one for one in found if one.severity != "ok")
    assert fault.about == about
    assert fault.remedy
    assert "\n" not in fault.text + fault.remedy
    return fault


def test_a_good_host(root: Path) -> None:
    hold(root, os.getpid(), "python", "/dev/accel/accel0")
    hold(root, 44, "hl-smi", "/dev/accel/accel_controlD0", "/dev/null")
    found = {one.about: (one.severity, one.text) for one in machine.check_host(root)}
    assert found == {
        "rights": ("ok", "accel0, accel1: may be opened by this user"),
        "huge pages": ("ok", "40000 of 47500 are free, of 2 MiB each"),
        "shared memory": ("ok", "16384 MiB are free in /dev/shm"),
        "cores": ("ok", "this process runs on the cards' NUMA nodes (0,1)"),
    }


def test_a_host_without_cards(tmp_path: Path) -> None:
    assert not list(machine.check_host(tmp_path))


@pytest.mark.parametrize(("refused", "severity"), [({"accel1"}, "warning"), ({"accel0", "accel1"}, "problem")])
def test_cards_that_this_user_may_not_open(
    refused: set[str], severity: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda file, mode: not (mode == os.R_OK | os.W_OK and file.name in refused))
    fault = only_fault(root, "rights")
    assert fault.severity == severity
    assert fault.text == f"{', '.join(sorted(refused))}: not readable and writable for user {os.getuid()}"
    assert f"group {(root / 'dev/accel/accel1').stat().st_gid} " in fault.remedy


def test_s28_a_card_that_another_process_holds(root: Path) -> None:
    hold(root, 41, "python3", "/dev/null", "/dev/accel/accel1", "/dev/accel/accel1")
    fault = only_fault(root, "card")
    assert fault.severity == "warning"
    assert fault.text.startswith("process 41 (python3) holds accel1: ")
    assert fault.remedy.startswith("end process 41, ")


@pytest.mark.parametrize(
    ("file", "content", "about", "severity", "text", "remedy"),
    [
        (
            "proc/meminfo",
            "HugePages_Total: 0\nHugePages_Free: 0\nHugepagesize: 2048 kB\n",
            *("huge pages", "warning", "", "vm.nr_hugepages"),
        ),
        ("sys/fs/cgroup/hugetlb.2MB.max", "0\n", "huge pages", "warning", "container may use none", "hugepages-2Mi"),
        ("proc/self/status", "Cpus_allowed_list:\t8-11\n", "cores", "warning", "NUMA node 0,", ""),
        ("proc/self/status", "Cpus_allowed_list:\t0-63\n", "cores", "note", "", "--cpunodebind=0,1 "),
    ],
)
def test_file_of_the_host_shows_a_fault(
    file: str, content: str, about: str, severity: str, text: str, remedy: str, root: Path
) -> None:
    write(root / file, content)
    fault = only_fault(root, about)
    assert fault.severity == severity
    assert text in fault.text
    assert remedy in fault.remedy


def test_s20_a_container_with_little_shared_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=64 << 20)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    fault = only_fault(root, "shared memory")
    assert asked == [root / "dev/shm"]
    assert fault.text.startswith("64 MiB are free in /dev/shm")
    assert "--ipc=host" in fault.remedy
    assert "emptyDir" in fault.remedy


def test_vllm_wants_as_much_for_a_queue() -> None:
    """What it would ask of /dev/shm, without asking."""
    defaults = {name: one.default for name, one in inspect.signature(MessageQueue.__init__).parameters.items()}
    assert defaults["max_chunk_bytes"] * defaults["max_chunks"] == machine._QUEUE_MIB << 20


def test_the_driver_of_a_container_without_hl_smi(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(root))
    monkeypatch.setattr(versions, "installed", {"habana-torch-plugin": "1.24.1.482"}.get)
    assert not list(machine.check_drivers(root))
    write(root / "sys/module/habanalabs/version", "1.22.0-a1b2\n")
    driver, beside = machine.check_drivers(root)
    assert driver.text == "habanalabs: 1.22.0-a1b2"
    assert beside.severity == "warning"
    assert beside.remedy == "install the driver of release 1.24, or use the image of release 1.22"
    write(root / "sys/module/habanalabs/version", "1.24.1-fb0\n")
    assert len(list(machine.check_drivers(root))) == 1
