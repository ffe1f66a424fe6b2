"""Tests that need a process of their own: an emulated card changes torch for good, and a process has one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SECONDS = 500


def run_tests(*tests: str, **environment: str) -> None:
    """All tests of a folder, or those with these names, in a fresh process."""
    inherited = {name: value for name, value in os.environ.items() if name != "VGS_DEVICE"}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", *tests, "-q", "--no-header", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=inherited | {"PYTHONPATH": paths} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    if done.returncode:
        pytest.fail(f"{' '.join(tests)} {environment or ''}:\n{done.stdout}", pytrace=False)


def clients_python() -> str:
    """Of the environment of requirements/clients.txt, which is made once."""
    folder = ROOT / ".verify" / "clients"
    make = [sys.executable, str(ROOT / "requirements" / "environment.py"), "clients", str(folder)]
    subprocess.run(make, cwd=ROOT, check=True)
    return str(folder / "bin" / "python")


def forget_bridge(patch: pytest.MonkeyPatch) -> None:
    """Tests of the emulated Gaudi leave its bridge to those that come after them in a process."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "habana_frameworks"]:
        patch.delitem(sys.modules, name)
