"""Deaths of a server's parts, each in a server of its own: as of a killed worker, which stands in test_server.py.

Expected:
* SIGKILL to the engine: /health fails, pending requests get an error, exit code 1 within seconds, nothing survives
* no memory in a step of the target: the same, and the log's error says so
* SIGKILL to the engine while nobody asks anything: the same
* SIGKILL to the server itself: engine and workers end by themselves
"""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.full_tests.faults.clients import bodies, texts
from tests.full_tests.faults.injected import Injected
from tests.full_tests.faults.test_server import DRAFTS, ENDS_WITHIN, ENVIRONMENT, OPTIONS, check_death, processes
from tests.full_tests.server import Server

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("options", [DRAFTS, OPTIONS], ids=["one rank", "two ranks"])
def test_the_engine_is_killed(options: tuple[str, ...], looping_llama: str, tmp_path: Path) -> None:
    server = Server(looping_llama, tmp_path / "log.txt", *options, environment=ENVIRONMENT)
    victim = processes(server, "EngineCore")[0]
    check_death(server, lambda: os.kill(victim.pid, signal.SIGKILL), "engine core exited unexpectedly")


@pytest.mark.parametrize("options", [DRAFTS, OPTIONS], ids=["one rank", "two ranks"])
def test_no_memory_in_a_step(options: tuple[str, ...], looping_llama: str, tmp_path: Path) -> None:
    fault = Injected(
        tmp_path / "injected",
        "vllm_gaudi_spec.runner.model_runner.ModelRunner.forward",
        'import torch; raise torch.OutOfMemoryError("injected: the device has no memory left")',
    )
    environment = ENVIRONMENT | fault.environment(os.environ.get("PYTHONPATH"))
    server = Server(looping_llama, tmp_path / "log.txt", *options, environment=environment)
    check_death(server, fault.arm, "injected: the device has no memory left")


def test_the_engine_is_killed_while_nobody_asks(looping_llama: str, tmp_path: Path) -> None:
    server = Server(looping_llama, tmp_path / "log.txt", *DRAFTS, environment=ENVIRONMENT)
    texts(server, bodies(2))
    os.kill(processes(server, "EngineCore")[0].pid, signal.SIGKILL)
    assert server.process.wait(timeout=ENDS_WITHIN) == 1


def test_the_server_is_killed(looping_llama: str, tmp_path: Path) -> None:
    server = Server(looping_llama, tmp_path / "log.txt", *OPTIONS, environment=ENVIRONMENT)
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert len(family) >= 3
    server.process.kill()
    server.process.wait(timeout=ENDS_WITHIN)
    _, alive = psutil.wait_procs(family, timeout=ENDS_WITHIN)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
