"""Tests that need a process of their own, because an emulated card changes torch for good."""

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
_SECONDS = 500


def run_tests(*tests: str, **environment: str) -> None:
    """Run the tests of a folder, or those with these names, in a new process."""
    inherited = {name: value for name, value in os.environ.items() if name != "VGS_DEVICE"}
    command = [sys.executable, "-m", "pytest", *tests, "-q", "--no-header", "-p", "no:cacheprovider"]
    done = run(command, cwd=ROOT, env=inherited | {"PYTHONPATH": python_path()} | environment, timeout=_SECONDS)
    if done.returncode:
        pytest.fail(f"{' '.join(tests)} {environment or ''}:\n{done.stdout}", pytrace=False)


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command, and return everything that it prints in `stdout`."""
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)


def run_code(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python, in which no other test has installed a card or imported a package."""
    settings = {"capture_output": True, "text": True, "check": False, "timeout": _SECONDS} | options
    return subprocess.run([sys.executable, "-c", code, *arguments], **settings)


def python_path(*folders: str | Path) -> str:
    """Return the PYTHONPATH by which a new Python finds the packages in `folders`, then those of the repository."""
    return os.pathsep.join(filter(None, [*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH")]))


def kubernetes_python() -> str:
    """Return the Python of the environment of requirements/kubernetes.txt, which is created once."""
    folder = ROOT / ".verify" / "kubernetes"
    make = [sys.executable, str(ROOT / "requirements" / "environment.py"), "kubernetes", str(folder)]
    subprocess.run(make, cwd=ROOT, check=True)
    return str(folder / "bin" / "python")


def forget_bridge(patch: pytest.MonkeyPatch) -> None:
    """Unload a bridge that earlier tests in this process left behind."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "habana_frameworks"]:
        patch.delitem(sys.modules, name)


def still_alive(processes: Iterable[psutil.Process], seconds: float = 60) -> list[psutil.Process]:
    """Return the processes that have not ended after the timeout.

    A dead process counts as ended even if its exit status was not collected: that of an orphan is left to init.
    """
    alive, until = list(processes), time.monotonic() + seconds
    while True:
        alive = [process for process in alive if _is_alive(process)]
        if not alive or time.monotonic() > until:
            return alive
        time.sleep(0.02)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
