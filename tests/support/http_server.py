"""An HTTP server with a few fixed answers, for testing clients."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answers = dict[str, Callable[[Any], tuple[int, str]]]
"""Maps a path to a function of the request's body (None without one) that returns status and text."""


@contextmanager
def answering(answers: Answers, by_headers: Answers | None = None) -> Iterator[str]:
    """Serve the answers and yield the address. Functions in `by_headers` get the request's headers instead."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            answer = answers.get(self.path)
            status, text = answer(body) if answer else (404, "{}")
            if by_headers and self.path in by_headers:
                status, text = by_headers[self.path](self.headers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            """Log nothing, since tests read stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def events(*found: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(one)}\n\n" for one in found) + "data: [DONE]\n\n"
