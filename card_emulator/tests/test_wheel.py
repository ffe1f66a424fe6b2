"""A wheel has every module, and the sources that the emulated CANN is compiled from."""

import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]


def files(folder: Path) -> set[Path]:
    kept = (path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h", ".typed"))
    return {path.relative_to(folder) for path in kept}


def test_every_source_is_packed(tmp_path: Path) -> None:
    steps = ["egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", str(tmp_path / "lib")]
    command = [sys.executable, "-c", "from setuptools import setup; setup()", "--quiet", *steps]
    subprocess.run(command, cwd=PROJECT, check=True)
    assert files(tmp_path / "lib" / "card_emulator") == files(PROJECT / "src" / "card_emulator")
