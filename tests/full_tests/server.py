"""`vllm serve` as a subprocess, as a user starts it, and how it ends."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.support.ports import free_port
from tests.support.processes import still_alive

READY_SECONDS = 500
END_SECONDS = 60
PR_SET_PDEATHSIG = 1
CORES = os.sched_getaffinity(0)


def end_with_parent() -> None:
    """Runs in the child: a test run that is killed takes its server along (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    os.sched_setaffinity(0, CORES)  # where Intel's OpenMP is loaded, it has bound the child to one


def serve_command(model: str, *options: str) -> list[str]:
    return [str(Path(sys.executable).with_name("vllm")), "serve", model, *options]


def serve_environment(**extra: str) -> dict[str, str]:
    """A user's environment: the engine in its own process, vLLM's usual log, and its own choice of a start method.

    An engine that a test of this process configured leaves its choice in the variables.
    """
    ours = {"VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"}
    ours |= {"VLLM_WORKER_MULTIPROC_METHOD", "VGS_START_METHOD_CHOSEN_BY"}
    return {name: value for name, value in os.environ.items() if name not in ours} | extra


@dataclass
class Ending:
    code: int
    seconds: float
    survivors: list[str]
    """Processes of the server that were still alive when it had gone."""


class Running:
    """A command that serves, in a session of its own, and what can be asked of it."""

    def __init__(
        self,
        command: list[str],
        port: int,
        log: Path,
        environment: dict[str, str],
        folder: Path | None = None,
        *,
        waits: bool = True,
    ) -> None:
        """Start the command. Unless `waits`, call `wait_ready` later, so that several can start at the same time."""
        self.port, self.log = port, log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
        try:
            if waits:
                self.wait_ready()
        except BaseException:  # Ctrl-C too: nobody has this object yet who could end it
            self.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.process.poll() is None:  # a test may have killed the server
            self.stop()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()[-3000:]}"
            try:
                if self.client.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.3)
        raise AssertionError(f"no answer after {READY_SECONDS} s:\n{self.log.read_text()[-3000:]}")

    def complete(self, **body: Any) -> dict[str, Any]:
        return self.post("/v1/completions", body)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.client.post(path, json={"model": "tiny"} | body)
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name: str, **labels: str) -> float:
        """Summed over the labels that are not given; counters under the name they are exported with."""
        samples = [s for f in text_string_to_metric_families(self.client.get("/metrics").text) for s in f.samples]
        found = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, f"no metric {name}"
        return sum(found)

    def wait_idle(self, seconds: float = END_SECONDS) -> None:
        """Nothing runs and nothing waits, soon."""
        deadline = time.monotonic() + seconds
        while self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting") > 0:
            assert time.monotonic() < deadline, "requests are still running"
            time.sleep(0.1)

    def stop(self, how: signal.Signals = signal.SIGTERM, patience: float = END_SECONDS, to_all: bool = False) -> Ending:
        """`to_all`: every process of the session gets the signal, as at Ctrl-C on a terminal."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        began = time.monotonic()
        if to_all:
            os.killpg(self.process.pid, how)
        else:
            self.process.send_signal(how)
        try:
            code = self.process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise
        seconds = time.monotonic() - began
        # A child may need a moment after its parent.
        return Ending(code, seconds, [str(child) for child in still_alive(family)])

    def end(self) -> None:
        """Whatever state it is in, and with it all that it started."""
        self.process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Server(Running):
    def __init__(
        self, model: str, log: Path, *options: str, environment: dict[str, str] | None = None, waits: bool = True
    ) -> None:
        port = free_port()
        address = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "tiny"]
        small = ["--dtype", "float32", "--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager"]
        command = serve_command(model, *address, *small, *options)
        super().__init__(command, port, log, serve_environment(**(environment or {})), waits=waits)


def last_line(output: str) -> str:
    return [line for line in output.splitlines() if line.strip()][-1]
