"""The benchmark of two servers leaves neither behind, however it ends."""

from __future__ import annotations

import contextlib
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import common
import dummy
import upstream_server

from tests.full_tests.server import Running
from tests.support.processes import still_alive

# Answers, and has a child that outlives it: what is printed is the child's process id.
SERVER = """
import http.server, subprocess, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
if {loads_upstream}:
    print("[cpu_model_runner.py:1] Loading", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


@pytest.fixture
def serves() -> list[str]:
    """Whose servers start, one after the other."""
    return ["ours", "upstream"]


@pytest.fixture
def benchmark(serves: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    platforms = iter(serves)

    def serve_command(model: str, *words: str) -> list[str]:
        script = SERVER.format(loads_upstream=next(platforms) == "upstream")
        return [sys.executable, "-c", script, words[words.index("--port") + 1]]

    monkeypatch.setattr(common, "LOGS", tmp_path)
    monkeypatch.setattr(dummy, "write_weights", lambda model: None)
    monkeypatch.setattr(upstream_server, "demo_model_path", lambda: "")
    monkeypatch.setattr(upstream_server, "serve_command", serve_command)
    options = Namespace(size="tiny", max_concurrency=[1], input_len=8, tokens=1, all_cores=False, turns=1)
    return lambda: upstream_server.measure(options)


def assert_all_ended(logs: Path, names: tuple[str, ...] = ("ours", "upstream")) -> None:
    for name in names:
        child = int((logs / f"upstream_server-{name}.log").read_text().split()[0])
        with contextlib.suppress(psutil.NoSuchProcess):
            assert not still_alive([psutil.Process(child)])


def raises(error: type[BaseException]) -> Callable[..., None]:
    def ask(*_: object, **__: object) -> None:
        raise error

    return ask


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_client_ends_both_servers(
    error: type[BaseException],
    benchmark: Callable[[], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upstream_server, "bench", raises(error))
    with pytest.raises(error):
        benchmark()
    assert_all_ended(tmp_path)


def test_ctrl_c_while_one_starts_ends_both(
    benchmark: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_ready = Running.wait_ready

    def interrupted(server: Running) -> None:
        wait_ready(server)
        if "upstream" in server.log.name.removeprefix("upstream_server"):
            raise KeyboardInterrupt

    monkeypatch.setattr(Running, "wait_ready", interrupted)
    with pytest.raises(KeyboardInterrupt):
        benchmark()
    assert_all_ended(tmp_path)


def test_the_wrong_platform_ends_both(serves: list[str], benchmark: Callable[[], object], tmp_path: Path) -> None:
    serves.reverse()
    with pytest.raises(RuntimeError, match="wanted the platform ours"):
        benchmark()
    assert_all_ended(tmp_path, ("ours",))
