"""The newcomer's path by the commands in README.md: a fresh clone, an empty cache, nothing of ours around it."""

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.full_tests.server import Running
from tests.pages import README, commands_for
from tests.support.ports import free_port
from tests.support.processes import ROOT

# What this test run brings and a newcomer does not.
OURS = ("PYTHONPATH", "LD_PRELOAD", "KMP_BLOCKTIME", "HF_HUB_OFFLINE", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")
SECONDS = 1500


def newcomer(cache: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "VGS_", "PYTEST"))}
    return {name: value for name, value in inherited.items() if name not in OURS} | {"XDG_CACHE_HOME": str(cache)}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_first_steps_of_the_readme(tmp_path: Path) -> None:
    taken_by = "tests/full_tests/test_first_steps.py::test_first_steps_of_the_readme"
    setup, serve, *ask, demo, show = commands_for(taken_by, README)  # the request takes several lines
    environment = newcomer(tmp_path / "cache")

    def run(command: str, folder: Path) -> str:
        done = subprocess.run(
            ["bash", "-euc", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    run(f"git clone --quiet {shlex.quote(str(ROOT))} vllm-gaudi-spec", tmp_path)
    checkout = tmp_path / "vllm-gaudi-spec"
    run(setup, checkout)
    port, log = free_port(), tmp_path / "serve.log"
    server = Running(["bash", "-c", f"{serve} PORT={port}"], port, log, environment, checkout)
    try:
        assert "Application startup complete" in log.read_text(), "README says so"
        assert "Paris" in run("\n".join(ask).replace(":8000/", f":{port}/"), checkout)
    finally:
        ending = server.stop(signal.SIGINT, to_all=True)  # as Ctrl-C in a terminal
    assert not ending.survivors

    said = run(demo, checkout)
    page = checkout / shlex.split(show)[1]
    assert said.splitlines()[-1] == f"report: {page}"
    assert page.read_text().startswith("<!DOCTYPE html>")
