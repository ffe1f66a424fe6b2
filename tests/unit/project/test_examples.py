"""The examples as text; tests/full_tests/test_examples.py runs them."""

import re
import subprocess
from typing import Any

import pytest
import yaml

from tests.support.processes import ROOT

EXAMPLES = ROOT / "examples"
COMPOSE: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_service_builds_a_stage_and_listens_locally(name: str) -> None:
    service = COMPOSE["services"][name]
    assert (EXAMPLES / service["build"]["context"] / "Dockerfile").samefile(ROOT / "Dockerfile")
    stages = re.findall(r"(?m)^FROM .* AS (\S+)", (ROOT / "Dockerfile").read_text())
    assert service["build"]["target"] in stages
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert all(volume.partition(":")[0] in COMPOSE["volumes"] for volume in service["volumes"])


@pytest.mark.parametrize(
    ("model", "words"), [("", ["demo", "--max-model-len", "2048"]), ("m/x", ["m/x", "--max-model-len", "2048"])]
)
def test_container_runs_the_servers_command(model: str, words: list[str]) -> None:
    """As Compose hands it to bash: two dollars are one."""
    for service in COMPOSE["services"].values():
        assert service["entrypoint"] == ["bash", "-c"]
        (line,) = service["command"]
        line = line.replace("$$", "$").removeprefix("exec ")
        script = f'vllm() {{ printf "%s\\n" "$@"; }}; python() {{ echo demo; }}; {line}'
        done = subprocess.run(["bash", "-c", script], env={"MODEL": model}, capture_output=True, text=True)
        assert done.stdout.splitlines() == ["serve", *words], done.stderr
