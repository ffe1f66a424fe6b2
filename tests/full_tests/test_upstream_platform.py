"""Upstream's own CPU platform, brought back as the README has it."""

import shlex
import sys
from pathlib import Path

import pytest

from tests.full_tests.server import Running, serve_environment
from tests.pages import README, commands_for
from tests.support.ports import free_port

TAKEN_BY = "tests/full_tests/test_upstream_platform.py::test_readme_command_serves_with_upstream_platform"


@pytest.mark.slow  # test_parity has upstream's platform as its reference
def test_readme_command_serves_with_upstream_platform(tiny_llama: str, tmp_path: Path) -> None:
    """In a shell, in every process of the server, without an address or a dtype of ours."""
    (command,) = commands_for(TAKEN_BY, README)
    assert command.startswith("VLLM_PLUGINS='' .venv/bin/vllm serve MODEL ")
    command = command.replace(".venv/bin/", f"{shlex.quote(str(Path(sys.executable).parent))}/")
    command = command.replace("MODEL", shlex.quote(tiny_llama))
    port, log = free_port(), tmp_path / "serve.log"
    server = Running(["bash", "-c", f"{command} --port {port}"], port, log, serve_environment())
    try:
        (answer,) = server.complete(model=tiny_llama, prompt="The capital", max_tokens=8, temperature=0)["choices"]
        assert answer["finish_reason"] == "length"
    finally:
        ending = server.stop(to_all=True)
    assert not ending.survivors
    assert "[cpu_model_runner.py:" in log.read_text(), "upstream's runner did not load the model"
