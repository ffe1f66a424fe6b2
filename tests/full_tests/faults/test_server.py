"""Clients that misbehave on a server that drafts, of one rank and of two; at last one of its processes is killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.full_tests.faults.clients import bodies, check_storm, texts
from tests.full_tests.faults.deaths import check_death, processes
from tests.full_tests.faults.injected import Injected
from tests.full_tests.server import Server
from tests.full_tests.tiny_models import MAX_LEN
from vllm_gaudi_spec.metrics import DRAFTER_FAULTS, DRAFTER_SWITCHED_OFF
from vllm_gaudi_spec.scheduling.health import MAX_FAULTS_IN_A_ROW

DRAFTS = ("--speculative-config", '{"method": "suffix", "num_speculative_tokens": 3}')
OPTIONS = (*DRAFTS, "--tensor-parallel-size", "2", "--max-num-seqs", "32", "--max-model-len", "1024")


class Case(NamedTuple):
    options: tuple[str, ...]
    num_leaving: int
    """The number of requests whose clients leave."""
    victim: str
    """The title of the process that is killed."""
    reason: str
    num_tokens: int


ONE_RANK = Case(
    (*DRAFTS, "--max-num-seqs", "32", "--max-model-len", str(MAX_LEN)),
    60,
    "EngineCore",
    "engine core exited unexpectedly",
    MAX_LEN - 256,
)
TWO_RANKS = Case(OPTIONS, 2000, "Worker", "died unexpectedly", 900)
two_ranks = pytest.param(TWO_RANKS, marks=pytest.mark.slow, id="two ranks")


@pytest.fixture(scope="module", params=[pytest.param(ONE_RANK, id="one rank"), two_ranks])
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def one_rank_fails(tmp_path_factory: pytest.TempPathFactory) -> Injected:
    """Once armed: of two drafters that work alike one raises, each time."""
    return Injected(
        tmp_path_factory.mktemp("injected"),
        "vllm_gaudi_spec.drafting.suffix.SuffixProposer.propose",
        "import torch; assert torch.distributed.get_rank() == 0, 'injected: this rank fails'",
    )


@pytest.fixture(scope="module")
def server(
    case: Case, looping_llama: str, one_rank_fails: Injected, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    environment = one_rank_fails.environment(os.environ.get("PYTHONPATH"))
    log = tmp_path_factory.mktemp("server") / "log.txt"
    server = Server(looping_llama, log, *case.options, environment=environment)
    yield server
    if server.process.poll() is None:
        server.stop()


@pytest.fixture(scope="module")
def quiet(server: Server) -> list[str]:
    return texts(server, bodies(12))


def test_clients_that_leave_disturb_no_others(case: Case, server: Server, quiet: list[str]) -> None:
    check_storm(server, case.num_leaving, quiet)


@pytest.mark.parametrize("case", [two_ranks], indirect=True)
def test_drafter_that_fails_on_one_rank_is_off_on_all(
    server: Server, one_rank_fails: Injected, quiet: list[str]
) -> None:
    """Steps of ranks that drafted differently would differ, and nobody could tell from the texts of one of them."""
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
    assert server.metric(f"{DRAFTER_FAULTS}_total") == 0
    one_rank_fails.arm()
    faults = []
    for _ in range(2):
        assert texts(server, bodies(12)) == quiet
        faults.append(server.metric(f"{DRAFTER_FAULTS}_total"))
        assert server.metric(f"{DRAFTER_SWITCHED_OFF}_total") == 1
    # More where requests arrived one by one: the same request again, alone, does not count towards switching off.
    assert MAX_FAULTS_IN_A_ROW <= faults[0] <= 2 * MAX_FAULTS_IN_A_ROW
    assert faults[1] == faults[0], "it drafted although it was off"
    said = server.log.read_text()
    assert said.count("Speculative decoding is disabled until") == 1
    assert "injected: this rank fails" in said


def test_requests_fail_when_a_process_is_killed(
    case: Case, server: Server, quiet: list[str], looping_llama: str, tmp_path: Path
) -> None:
    """The last test of a server: it ends it."""
    victim = processes(server, case.victim)[-1]
    check_death(server, lambda: os.kill(victim.pid, signal.SIGKILL), case.reason, case.num_tokens)
    if case is ONE_RANK:  # test_death.py starts another one
        return
    again = Server(looping_llama, tmp_path / "again.txt", *case.options)
    try:
        assert texts(again, bodies(12)) == quiet
    finally:
        assert again.stop().code == 0, "one that is asked to end has not failed"
