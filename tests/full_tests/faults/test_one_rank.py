"""Clients that go away from a server of one rank, then the death of its engine; the quick part of test_server.py."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.full_tests.faults.clients import bodies, check_storm, texts
from tests.full_tests.faults.deaths import check_death, processes
from tests.full_tests.server import Server
from tests.full_tests.tiny_models import MAX_LEN

OPTIONS = (
    *("--speculative-config", '{"method": "suffix", "num_speculative_tokens": 3}'),
    *("--max-num-seqs", "32", "--max-model-len", str(MAX_LEN)),
)


@pytest.fixture(scope="module")
def one_rank(looping_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(looping_llama, tmp_path_factory.mktemp("one_rank") / "log.txt", *OPTIONS)
    yield server
    if server.process.poll() is None:
        server.stop()


@pytest.fixture(scope="module")
def quiet(one_rank: Server) -> list[str]:
    return texts(one_rank, bodies(12))


def test_clients_that_leave_disturb_no_others(one_rank: Server, quiet: list[str]) -> None:
    check_storm(one_rank, 60, quiet)


def test_requests_fail_when_the_engine_is_killed(one_rank: Server, quiet: list[str]) -> None:
    """The last test of this file: it ends the server."""
    victim = processes(one_rank, "EngineCore")[0]
    reason = "engine core exited unexpectedly"
    check_death(one_rank, lambda: os.kill(victim.pid, signal.SIGKILL), reason, num_tokens=MAX_LEN - 256)
