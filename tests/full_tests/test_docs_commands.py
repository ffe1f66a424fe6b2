"""Commands of the pages that users read, run as they stand there.

Each runs in a folder that looks like the checkout after `make setup`. Where a page says MODEL, TARGET or DRAFTER, tiny
ones stand, and a server has a port of its own; all options are those of the page.
"""

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.full_tests import adapters
from tests.full_tests.server import Running, serve_environment
from tests.pages import ROOT, SERVER_ADDRESS, Block, pages, scenes
from tests.support.ports import free_port
from tests.support.processes import run

# Of one block; a server has its own patience.
SECONDS = 2400
COMMANDS = ("gaudi-spec", "python", "vllm")
# Nothing that a command leaves lands in the checkout.
NOT_SHARED = {".venv", ".git", ".bench", ".demo", ".calibration", ".verify", "calibrated", "build"}


@pytest.fixture(scope="module")
def names(looping_llama: str, cousin: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What stands for what a page leaves to its reader."""
    folder = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate(("sql", "chat"), 1):
        adapters.make(looping_llama, folder / name, number)
    models = {"MODEL": looping_llama, "TARGET": looping_llama, "DRAFTER": cousin}
    return models | {f"/adapters/{name}": str(folder / name) for name in ("sql", "chat")}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files of this one, and an environment whose commands are those of the running one."""
    folder = tmp_path / "checkout"
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for path in ROOT.iterdir():
        if path.name not in NOT_SHARED:
            (folder / path.name).symlink_to(path)
    for command in COMMANDS:
        found = Path(sys.executable).with_name(command)
        more = " $SERVE_WITH" if command == "vllm" else ""
        (binaries / command).write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}:$PYTHONPATH" exec "{found}" "$@"{more}\n')
        (binaries / command).chmod(0o755)
    (folder / ".venv" / ".stamp").touch()  # what `make` looks at: set up, and newer than the locks
    return folder


def filled_in(text: str, names: dict[str, str]) -> str:
    for name, path in names.items():
        text = re.sub(rf"(?<![\w$/{{]){re.escape(name)}(?![\w=/}}])", path, text)
    return text


def command(block: Block, text: str) -> list[str]:
    return [".venv/bin/python", "-c", text] if block.language == "python" else ["bash", "-euo", "pipefail", "-c", text]


def environment(block: Block, port: int) -> dict[str, str]:
    """Its PATH has no environment's commands, no more than a reader's; size and address come from here, since options
    are the page's."""
    ours = Path(sys.executable).parent
    path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if Path(part) != ours)
    serve_with = f"--host 127.0.0.1 --port {port}" if block.num_servers else ""
    return serve_environment(PATH=path, VLLM_CPU_KVCACHE_SPACE="1", SERVE_WITH=serve_with)


def cases() -> list[Any]:
    return [
        pytest.param(scene, id=scene[0].name, marks=[] if scene[0].is_quick else pytest.mark.slow)
        for page in pages()
        for scene in scenes(page)
    ]


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("scene", cases())
def test_commands_of_the_pages_run(scene: list[Block], names: dict[str, str], checkout: Path, tmp_path: Path) -> None:
    with ExitStack() as servers:
        port = 0
        for number, block in enumerate(scene):
            if block.num_servers:
                port = free_port()
            text = filled_in(block.text, names).replace(SERVER_ADDRESS, f"127.0.0.1:{port}")
            where = environment(block, port)
            if block.num_servers:
                log = tmp_path / f"log-{number}.txt"
                server = servers.enter_context(serving(command(block, text), port, log, where, checkout))
                check(server, speculates="speculative-config" in text)
            else:
                print(output(command(block, text), checkout, where))


@contextmanager
def serving(*how: Any) -> Iterator[Running]:
    server = Running(*how)
    try:
        yield server
    finally:
        ending = server.stop(signal.SIGINT, to_all=True)
    assert not ending.survivors


def check(server: Running, speculates: bool) -> None:
    model = server.client.get("/v1/models").json()["data"][0]["id"]
    prompt = "one two three one two three one two"
    answer = server.complete(model=model, prompt=prompt, max_tokens=24, temperature=0, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 24
    if speculates:
        assert server.metric("vllm:spec_decode_num_draft_tokens_total") > 0
        assert server.metric("gaudi_spec:drafter_faults_total") == 0


def output(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = run(command, cwd=folder, env=environment, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout
