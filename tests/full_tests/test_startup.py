"""Starting and ending: SIGTERM leaves nothing behind, and what cannot start says why in its last line."""

import re
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.full_tests.server import Ending, Server, last_line, serve_command, serve_environment
from tests.support.processes import run

START_SECONDS = 240


def stream_to_its_end(server: Server) -> None:
    body = dict(model="tiny", prompt="hi", max_tokens=4000, ignore_eos=True, stream=True)
    try:
        with server.client.stream("POST", "/v1/completions", json=body) as response:
            for _ in response.iter_lines():
                pass
    except httpx.TransportError:
        pass  # the server may also just close the connection


def check_ended(server: Server, ending: Ending) -> None:
    assert ending.code == 0, server.log.read_text()[-3000:]
    assert not ending.survivors
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", server.port))


@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_shutdown_under_load(how: signal.Signals, tiny_llama: str, tmp_path: Path) -> None:
    """With a request in flight, whose client sees the end of its stream and does not hang."""
    server = Server(tiny_llama, tmp_path / "log.txt")
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(stream_to_its_end, server)
        while server.metric("vllm:num_requests_running") == 0 and not reader.done():
            time.sleep(0.05)
        ending = server.stop(how)
        reader.result(timeout=30)
    check_ended(server, ending)


def test_second_platform_plugin_is_named(tiny_llama: str, tmp_path: Path) -> None:
    """A second plugin that wants to be the platform. With VGS_DEVICE set ours wants to be it too."""
    package = tmp_path / "other_platform-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: other-platform\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[vllm.platform_plugins]\nother_device = other_platform:register\n")
    code = 'def register() -> str:\n    return "vllm.platforms.cpu.CpuPlatform"\n'
    (tmp_path / "other_platform.py").write_text(code)
    variables = serve_environment(PYTHONPATH=str(tmp_path), VGS_DEVICE="cpu")
    done = run(serve_command(tiny_llama), env=variables, stdin=subprocess.DEVNULL, timeout=START_SECONDS)
    assert done.returncode != 0, done.stdout[-2000:]
    line = last_line(done.stdout)
    assert "other_device" in line, line
    assert re.search(r"VLLM_PLUGINS|VGS_DEVICE|uninstall", line), f"does not say what to do: {line}"
