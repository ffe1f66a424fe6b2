"""Two machines serve one model over Ray, with drafts: texts, a slow machine, a cable pulled out, a dead machine.

The machines are namespaces of this one, so the numbers that are printed say how long a fault takes to be noticed, not
how fast two machines are.
"""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.full_tests.equality import Tally
from tests.full_tests.faults.clients import Answer, asking, bodies, texts
from tests.full_tests.reference import Reference
from tests.full_tests.server import Running, serve_command, serve_environment
from tests.full_tests.speculation import ngram
from tests.full_tests.test_distributed import NOISE, SIZES, STORE_BYTES, Said, said
from tests.support.machines import Machine, machines

__all__ = ["said"]  # a fixture

pytestmark = pytest.mark.slow

PORT = 8000
PARTITION_SECONDS = 20
BACK_SECONDS = 30
"""How long after a partition answers may take: TCP sends lost packets again after up to as long as it has waited."""
NOTICED_SECONDS = 90
"""How long a machine may be dead before each request has an error: Ray gives up one that is silent after a minute."""


def draft_model(model: str) -> dict[str, Any]:
    return dict(method="draft_model", model=model, num_speculative_tokens=3, draft_tensor_parallel_size=1)


TWO_ENGINES = ["--tensor-parallel-size=2", "--data-parallel-size=2", "--api-server-count=1"]
# Options, drafts, and CPUs that Ray has on each machine: half as many as there are ranks. Ray keeps an engine
# together, so each of the two engines runs on one machine.
LAYOUTS: dict[str, tuple[list[str], Callable[[str], dict[str, Any]], int]] = {
    "TP 2, draft model": (["--tensor-parallel-size=2"], draft_model, 1),
    "PP 2, draft model": (["--pipeline-parallel-size=2"], draft_model, 1),
    "PP 2, n-grams": (["--pipeline-parallel-size=2"], lambda model: ngram(3), 1),
    "TP 2 x DP 2, n-grams": (TWO_ENGINES, lambda model: ngram(3), 2),
}


class Cluster:
    """Ray on two machines, and a server on the first."""

    def __init__(self, one: Machine, two: Machine, command: list[str], logs: Path, num_cpus: int) -> None:
        self.one, self.two, self.command, self.logs, self.num_cpus = one, two, command, logs, num_cpus
        self.environment = serve_environment(
            RAY_USAGE_STATS_ENABLED="0",
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="1",
            RAY_memory_monitor_refresh_ms="0",  # other tests take memory too
            GLOO_SOCKET_IFNAME="lan0",
        )
        self.start_ray(one, "--head", f"--port={PORT + 1}", "--include-dashboard=false")
        self.join()
        self.server = self.serve()

    def start_ray(self, machine: Machine, *options: str) -> None:
        ray = [str(Path(sys.executable).with_name("ray")), "start", f"--node-ip-address={machine.address}", *options]
        size = [f"--num-cpus={self.num_cpus}", f"--object-store-memory={STORE_BYTES}"]
        command = machine.command(*ray, *size)
        log = self.logs / f"{machine.name}.txt"
        with log.open("a") as out:
            code = subprocess.run(command, env=self.environment, stdout=out, stderr=out, timeout=100).returncode
        assert code == 0, log.read_text()

    def join(self) -> None:
        self.start_ray(self.two, f"--address={self.one.address}:{PORT + 1}")

    def serve(self) -> Running:
        log = self.logs / f"server-{time.monotonic():.0f}.txt"
        server = Running(self.one.command(*self.command), PORT, log, self.environment, waits=False)
        server.client = httpx.Client(base_url=f"http://{self.one.address}:{PORT}", timeout=120)
        server.wait_ready()
        return server


@pytest.fixture(scope="module", params=LAYOUTS)
def cluster(
    request: pytest.FixtureRequest, looping_llama: str, said: Said, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    options, drafts, num_cpus = LAYOUTS[request.param]
    said(looping_llama, NOISE)  # before Ray takes both cores
    small = ["--dtype=float32", f"--kv-cache-memory-bytes={64 << 20}", "--enforce-eager", "--max-model-len=1024"]
    size = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    address = ["--host=0.0.0.0", f"--port={PORT}", "--served-model-name=tiny"]
    drafter = ["--speculative-config", json.dumps(drafts(looping_llama))]
    command = serve_command(
        looping_llama, *address, *small, *size, *options, *drafter, "--distributed-executor-backend=ray"
    )
    with contextlib.ExitStack() as stack:
        try:
            one, two = stack.enter_context(machines(2))
        except OSError as error:
            pytest.skip(f"this user or kernel may not make namespaces and links: {error}")
        yield Cluster(one, two, command, tmp_path_factory.mktemp("cluster"), num_cpus)


def strike(cluster: Cluster, fault: Callable[[], None], patience: float) -> tuple[list[Answer], float]:
    """Return the answers to requests that were under way at a fault, and how long after its end the last one came."""
    with asking(cluster.server, bodies(8, 300)) as answers:
        fault()
        since = time.monotonic()
        ended = [answer.result(timeout=patience) for answer in answers]
    seconds = time.monotonic() - since
    assert seconds < patience
    return ended, seconds


def complete(server: Running, prompt: list[int], params: Any) -> list[int]:
    body: dict[str, Any] = dict(prompt=prompt, temperature=params.temperature, max_tokens=params.max_tokens)
    if params.seed is not None:
        body |= dict(seed=params.seed)
    [choice] = server.complete(**body, ignore_eos=True, return_token_ids=True)["choices"]
    return choice["token_ids"]


def test_texts_are_those_of_one_machine(cluster: Cluster, looping_llama: str, said: Said) -> None:
    with ThreadPoolExecutor(len(NOISE.prompts)) as pool:
        found = list(pool.map(lambda each: complete(cluster.server, *each), zip(*NOISE, strict=True)))
    tally, reference = Tally(), Reference(looping_llama)
    for index, (output, expected) in enumerate(zip(found, said(looping_llama, NOISE), strict=True)):

        def scores(place: int, index: int = index, expected: list[int] = expected) -> Any:
            return reference.scores(NOISE.prompts[index] + expected[:place], NOISE.params[index])

        tally.compare(f"request {index}", output, expected, scores)
    tally.check()
    drafted, accepted = (
        cluster.server.metric(f"vllm:spec_decode_num_{name}_tokens_total") for name in ("draft", "accepted")
    )
    print(f"{accepted:.0f} of {drafted:.0f} drafts accepted")
    assert accepted > 10
    assert f"ip={cluster.two.address})" in cluster.server.log.read_text(), "no rank is on the second machine"


def test_slow_machine_delays_requests_only(cluster: Cluster) -> None:
    """The second machine stops for a second, ten times."""
    expected = texts(cluster.server, bodies(8))

    def pulse() -> None:
        for _ in range(10):
            cluster.two.send(signal.SIGSTOP)
            time.sleep(1)
            cluster.two.send(signal.SIGCONT)
            time.sleep(0.5)

    ended, seconds = strike(cluster, pulse, patience=60)
    slowest = max(answer.seconds for answer in ended)
    print(f"slowest answer {slowest:.1f} s, last one {seconds:.1f} s after the last pulse")
    assert slowest > 5, "the machine did not stop"
    assert all(answer.finished for answer in ended)
    assert texts(cluster.server, bodies(8)) == expected


def test_requests_finish_after_a_partition(cluster: Cluster) -> None:
    expected = texts(cluster.server, bodies(8))

    def part() -> None:
        cluster.two.plug(False)
        time.sleep(PARTITION_SECONDS)
        cluster.two.plug(True)

    ended, seconds = strike(cluster, part, patience=BACK_SECONDS)
    print(f"last answer {seconds:.1f} s after the partition")
    assert max(answer.seconds for answer in ended) > PARTITION_SECONDS, "no request needed the second machine"
    assert all(answer.finished for answer in ended)
    assert texts(cluster.server, bodies(8)) == expected


@pytest.mark.parametrize("how", ["killed", "powered off"])
def test_machine_that_dies_fails_requests_and_a_restart_serves(cluster: Cluster, how: str) -> None:
    """Killed: connections are closed. Powered off: nobody is told."""
    expected, server = texts(cluster.server, bodies(8)), cluster.server

    def die() -> None:
        if how == "powered off":
            cluster.two.plug(False)
        cluster.two.die()

    ended, seconds = strike(cluster, die, patience=NOTICED_SECONDS)
    failed = [answer for answer in ended if not answer.finished]
    # A machine with two CPUs has room for a whole engine, so the first machine's requests may finish.
    assert len(failed) == len(ended) or (failed and cluster.num_cpus == 2)
    lost = [answer for answer in failed if answer.status != 500 and '"error"' not in answer.text]
    code = server.process.wait(timeout=60)
    print(f"{how}: {len(failed)} errors after {seconds:.1f} s, {len(lost)} requests without one, exit code {code}")
    assert not lost
    assert code == 1
    log = server.log.read_text()
    assert re.search(r"rank=\[\d\] died", log), log[-3000:]
    if how == "powered off":
        return
    began = time.monotonic()
    cluster.two.boot()
    cluster.join()
    cluster.server = cluster.serve()
    print(f"serves again after {time.monotonic() - began:.1f} s")
    assert texts(cluster.server, bodies(8)) == expected
