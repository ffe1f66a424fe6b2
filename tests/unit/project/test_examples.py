"""The examples as text; tests/full_tests/test_examples.py runs them."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.support.processes import ROOT
from tests.unit.project.test_dockerfile import environment, global_arguments, stages, values
from vllm_gaudi_spec.environment import VARIABLES

EXAMPLES = ROOT / "examples"
COMPOSE: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
# What the Compose specification has for a service, of what is used here.
KEYS = {"build", "image", "entrypoint", "command", "environment", "ports", "volumes", "profiles"}
KEYS |= {"runtime", "ipc", "cap_add"}


def test_each_is_short_and_in_the_readme() -> None:
    told = (EXAMPLES / "README.md").read_text()
    for file in EXAMPLES.iterdir():
        if file.is_file() and file.name != "README.md":
            assert len(file.read_text().splitlines()) <= 60, file.name
            assert f"`{file.name}`" in told


def test_the_script_is_one_that_bash_reads() -> None:
    script = EXAMPLES / "bench.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.stat().st_mode & 0o111


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_a_service_fits_the_dockerfile(name: str) -> None:
    """There is no docker where this is tested."""
    service = COMPOSE["services"][name]
    assert not set(service) - KEYS
    build = service["build"]
    assert (EXAMPLES / build["context"] / "Dockerfile").samefile(ROOT / "Dockerfile")
    target = build["target"]
    assert target in stages()
    assert not set(build.get("args", ())) - set(global_arguments())
    known = {*environment(target), *(variable.name for variable in VARIABLES)}
    for variable in service["environment"]:
        assert variable.partition("=")[0] in {*known, "MODEL", "HF_TOKEN"}
    (port,) = service["ports"]
    address, _, inside = port.split(":")
    assert address == "127.0.0.1"
    assert values(target, "EXPOSE") == [inside]
    for volume in service["volumes"]:
        source, inside = volume.split(":")
        assert source in COMPOSE["volumes"]
        assert inside.startswith(environment(target)["HOME"])


def test_a_container_begins_with_the_servers_command() -> None:
    """As Compose hands it to bash: two dollars are one."""
    for service in COMPOSE["services"].values():
        assert service["entrypoint"] == ["bash", "-c"]
        (line,) = service["command"]
        line = line.replace("$$", "$")
        assert values("cpu", "ENTRYPOINT") == ['["vllm", "serve"]']
        for model, words in (("", ["demo", "--max-model-len", "2048"]), ("m/x", ["m/x", "--max-model-len", "2048"])):
            script = f'vllm() {{ printf "%s\\n" "$@"; }}; python() {{ echo demo; }}; {line.removeprefix("exec ")}'
            done = subprocess.run(["bash", "-c", script], env={"MODEL": model}, capture_output=True, text=True)
            assert done.stdout.splitlines() == ["serve", *words], done.stderr
    assert re.search(r"^exec vllm serve ", COMPOSE["x-server"]["command"][0])
