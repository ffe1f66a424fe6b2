"""What a wheel of this project has in it: the steps of its build, without packing."""

import re
import subprocess
import sys
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

from vllm_gaudi_spec import __version__
from vllm_gaudi_spec.tools.compare.tasks import TASKS

ROOT = Path(__file__).parents[3]
EXTRAS = {"cpu": "cpu", "gaudi": "card", "ascend": "card", "emulator": "emulator", "bench": "bench", "dev": "dev"}
"""Name -> the file in requirements/ that lists it."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `lib`, the files to be packed, and the metadata."""
    folder = tmp_path_factory.mktemp("wheel")
    steps = ["egg_info", "--egg-base", str(folder), "build_py", "--build-lib", str(folder / "lib")]
    command = [sys.executable, "-c", "from setuptools import setup; setup()", "--quiet", *steps]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def metadata(built: Path) -> Message:
    return message_from_string((built / "vllm_gaudi_spec.egg-info" / "PKG-INFO").read_text())


def test_the_version_is_that_of_the_package(metadata: Message) -> None:
    assert metadata["Version"] == __version__


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_its_file_in_requirements(extra: str, metadata: Message) -> None:
    listed = re.findall(r"(?m)^[^#\s].*", (ROOT / "requirements" / f"{EXTRAS[extra]}.in").read_text())
    condition = f'; extra == "{extra}"'
    asked = [one.removesuffix(condition) for one in metadata.get_all("Requires-Dist", []) if one.endswith(condition)]
    assert asked == listed
    assert asked


def test_every_module_is_packed_and_nothing_of_the_training(built: Path) -> None:
    def modules(folder: Path) -> set[Path]:
        return {path.relative_to(folder) for path in (folder / "vllm_gaudi_spec").rglob("*.py")}

    assert modules(built / "lib") == modules(ROOT)
    assert {path.name for path in (built / "lib").iterdir()} == {"vllm_gaudi_spec"}
    for name in ("py.typed", "tools/report/page.css", "tools/report/page.html"):
        assert (built / "lib" / "vllm_gaudi_spec" / name).is_file(), name


def test_the_models_of_the_demo_are_packed(built: Path) -> None:
    packed, own = built / "lib" / "vllm_gaudi_spec" / "demo", ROOT / "demo"
    needed = {folder for task in TASKS.values() for folder in (task.demo_drafter, task.demo_target) if folder}
    assert needed
    for folder in needed:
        files = {path.name: path.stat().st_size for path in (own / folder).iterdir()}
        assert {path.name: path.stat().st_size for path in (packed / folder).iterdir()} == files
        assert {"config.json", "model.safetensors"} <= set(files)
