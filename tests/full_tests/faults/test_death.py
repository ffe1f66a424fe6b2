"""Deaths of a server's parts, each in a server of its own."""

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.full_tests.faults.clients import bodies, texts
from tests.full_tests.faults.deaths import PATIENCE, check_death, check_ended, check_failed, processes
from tests.full_tests.faults.injected import Injected
from tests.full_tests.faults.test_server import DRAFTS, OPTIONS
from tests.full_tests.server import Server

pytestmark = pytest.mark.slow


NO_MEMORY = ("vllm_gaudi_spec.runner.model_runner.ModelRunner.forward", "import torch; raise torch.OutOfMemoryError")
NO_BYTES = ("vllm.v1.serial_utils.MsgpackEncoder.encode_into", "raise RuntimeError")


@pytest.mark.parametrize(
    ("options", "fault"),
    [(DRAFTS, NO_MEMORY), (OPTIONS, NO_MEMORY), (DRAFTS, NO_BYTES)],
    ids=["no memory, one rank", "no memory, two ranks", "an output that cannot be sent"],
)
def test_requests_fail_when_a_step_fails(
    options: tuple[str, ...], fault: tuple[str, str], looping_llama: str, tmp_path: Path
) -> None:
    where, error = fault
    injected = Injected(tmp_path / "injected", where, f'{error}("injected: this step fails")')
    environment = injected.environment(os.environ.get("PYTHONPATH"))
    server = Server(looping_llama, tmp_path / "log.txt", *options, environment=environment)
    check_death(server, injected.arm, "injected: this step fails")


def test_server_ends_when_its_idle_engine_is_killed(looping_llama: str, tmp_path: Path) -> None:
    server = Server(looping_llama, tmp_path / "log.txt", *DRAFTS)
    expected = texts(server, bodies(12))
    family = psutil.Process(server.process.pid).children(recursive=True)
    os.kill(processes(server, "EngineCore")[0].pid, signal.SIGKILL)
    check_failed(server, family)
    again = Server(looping_llama, tmp_path / "again.txt", *DRAFTS)
    try:
        assert texts(again, bodies(12)) == expected
    finally:
        assert again.stop().code == 0, "one that is asked to end has not failed"


def test_engine_ends_when_its_server_is_killed(looping_llama: str, tmp_path: Path) -> None:
    server = Server(looping_llama, tmp_path / "log.txt", *OPTIONS)
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert len(family) >= 3
    server.process.kill()
    server.process.wait(timeout=PATIENCE)
    try:
        check_ended(family)
    finally:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
