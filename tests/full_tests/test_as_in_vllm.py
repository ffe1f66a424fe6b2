"""vLLM's front end treats answers with drafts as it does those without: reasoning, traces."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.full_tests.server import Server

pytestmark = pytest.mark.slow

DRAFTER = Path(__file__).parents[2] / "demo" / "draft-same-vocab"
DRAFTS = {"method": "draft_model", "model": str(DRAFTER), "num_speculative_tokens": 3}
HELLO = [{"role": "user", "content": "The quick brown fox"}]


class Collector(HTTPServer):
    """Takes traces, as OpenTelemetry's collector does over HTTP."""

    def __init__(self) -> None:
        received: list[bytes] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """A no-op: nothing on stderr."""

        super().__init__(("127.0.0.1", 0), Handler)
        self.received = received
        threading.Thread(target=self.serve_forever, daemon=True).start()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running
        running.shutdown()


@pytest.fixture(scope="module")
def answering(demo_model: str, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {
        "--speculative-config": json.dumps(DRAFTS),
        "--max-model-len": "1024",
        "--otlp-traces-endpoint": f"http://127.0.0.1:{collector.server_port}/v1/traces",
    }
    words = [word for pair in options.items() for word in pair]
    traces = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    log = tmp_path_factory.mktemp("server") / "serve.log"
    server = Server(demo_model, log, *words, environment=traces)
    yield server
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
    server.stop()


def message(server: Server, **body: Any) -> dict[str, Any]:
    (choice,) = server.post("/v1/chat/completions", {"messages": HELLO, "temperature": 0} | body)["choices"]
    return choice["message"]


def test_reasoning_is_separated(demo_model: str, tmp_path: Path) -> None:
    """The grammar makes the model write what the parser splits."""
    grammars = '{"backend": "xgrammar", "enable_in_reasoning": true}'
    options = ["--reasoning-parser", "olmo3", "--structured-outputs-config", grammars, "--max-model-len", "512"]
    with Server(demo_model, tmp_path / "serve.log", *options, "--speculative-config", json.dumps(DRAFTS)) as server:
        found = message(server, structured_outputs={"regex": "<think>[a-z]{3,6}</think>[a-z]{3,6}"}, max_tokens=60)
    assert found["reasoning"].isalpha()
    assert found["content"].isalpha()


def test_traces_are_sent(answering: Server, collector: Collector) -> None:
    answering.complete(prompt="The quick", max_tokens=4)
    deadline = time.monotonic() + 20
    while not any(b"llm_request" in sent for sent in collector.received):
        assert time.monotonic() < deadline, f"{len(collector.received)} messages without a request's span"
        time.sleep(0.2)
