"""Clients that misbehave on a server of two ranks that drafts; at last one of its workers is killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.full_tests.faults.clients import bodies, check_storm, texts
from tests.full_tests.faults.deaths import check_death, processes
from tests.full_tests.faults.injected import Injected
from tests.full_tests.server import Server
from vllm_gaudi_spec.metrics import DRAFTER_FAULTS, DRAFTER_SWITCHED_OFF
from vllm_gaudi_spec.scheduling.health import MAX_FAULTS_IN_A_ROW

pytestmark = pytest.mark.slow

DRAFTS = ("--speculative-config", '{"method": "suffix", "num_speculative_tokens": 3}')
OPTIONS = (*DRAFTS, "--tensor-parallel-size", "2", "--max-num-seqs", "32", "--max-model-len", "1024")


@pytest.fixture(scope="module")
def one_rank_fails(tmp_path_factory: pytest.TempPathFactory) -> Injected:
    """Once armed: of two drafters that work alike one raises, each time."""
    return Injected(
        tmp_path_factory.mktemp("injected"),
        "vllm_gaudi_spec.drafting.suffix.SuffixProposer.propose",
        "import torch; assert torch.distributed.get_rank() == 0, 'injected: this rank fails'",
    )


@pytest.fixture(scope="module")
def two_ranks(
    looping_llama: str, one_rank_fails: Injected, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("two_ranks") / "log.txt"
    environment = one_rank_fails.environment(os.environ.get("PYTHONPATH"))
    server = Server(looping_llama, log, *OPTIONS, environment=environment)
    yield server
    if server.process.poll() is None:
        server.stop()


@pytest.fixture(scope="module")
def quiet(two_ranks: Server) -> list[str]:
    return texts(two_ranks, bodies(12))


def test_clients_that_leave_disturb_no_others(two_ranks: Server, quiet: list[str]) -> None:
    check_storm(two_ranks, 2000, quiet)


def test_drafter_that_fails_on_one_rank_is_off_on_all(
    two_ranks: Server, one_rank_fails: Injected, quiet: list[str]
) -> None:
    """Steps of ranks that drafted differently would differ, and nobody could tell from the texts of one of them."""
    assert two_ranks.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
    assert two_ranks.metric(f"{DRAFTER_FAULTS}_total") == 0
    one_rank_fails.arm()
    faults = []
    for _ in range(2):
        assert texts(two_ranks, bodies(12)) == quiet
        faults.append(two_ranks.metric(f"{DRAFTER_FAULTS}_total"))
        assert two_ranks.metric(f"{DRAFTER_SWITCHED_OFF}_total") == 1
    # More where requests arrived one by one: the same request again, alone, does not count towards switching off.
    assert MAX_FAULTS_IN_A_ROW <= faults[0] <= 2 * MAX_FAULTS_IN_A_ROW
    assert faults[1] == faults[0], "it drafted although it was off"
    said = two_ranks.log.read_text()
    assert said.count("Speculative decoding is disabled until") == 1
    assert "injected: this rank fails" in said


def test_requests_fail_when_a_worker_is_killed(
    two_ranks: Server, quiet: list[str], looping_llama: str, tmp_path: Path
) -> None:
    """The last test of this file: it ends the server."""
    victim = processes(two_ranks, "Worker")[-1]
    check_death(two_ranks, lambda: os.kill(victim.pid, signal.SIGKILL), "died unexpectedly")
    again = Server(looping_llama, tmp_path / "again.txt", *OPTIONS)
    try:
        assert texts(again, bodies(12)) == quiet
    finally:
        assert again.stop().code == 0, "one that is asked to end has not failed"
