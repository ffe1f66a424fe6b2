"""The first steps in README.md can be taken; tests/full_tests/test_first_steps.py takes them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess

import pytest

from tests.first_steps import QUICK_START, README, SCREEN, TAKEN_BY, commands
from tests.pages import commands_for
from tests.support.processes import ROOT
from vllm_gaudi_spec.tools.cli import demo


def test_the_first_screen() -> None:
    """What it is and why, its status on each device, what is served, how to install it; no address that is none."""
    text = README.read_text()
    screen = "\n".join(text.splitlines()[:SCREEN])
    for word in ("Speculative decoding for vLLM", "| status |", "| served, ", "pip install"):
        assert word in screen
    assert len(re.findall(r"(?m)^- \*\*", screen)) == 5
    assert "REPOSITORY" not in text
    assert text.index("## First steps") < text.index("## What `make demo` shows")
    assert [command.split()[0] for command in commands()] == ["make", "xdg-open", "make", "curl"]
    assert "never run on a Gaudi, nor on an Ascend NPU" in screen


def test_the_site_begins_with_the_same() -> None:
    assert commands_for(TAKEN_BY, QUICK_START) == commands()


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("make ")])
def test_make_knows_them(command: str) -> None:
    done = subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    if command == "make serve":
        (asked,) = (word for line in commands() for word in shlex.split(line) if word.startswith("http://"))
        assert "--host 127.0.0.1 --port 8000" in done.stdout
        assert asked.startswith("http://127.0.0.1:8000/v1/")


def test_the_rest_of_them() -> None:
    _, show, _, ask = map(shlex.split, commands())
    assert all(shutil.which(name) for name in ("make", "curl"))
    assert show[1] == str(demo.DEFAULTS["report"])
    assert json.loads(ask[ask.index("-d") + 1])["prompt"]
