"""Fail on any answer to a hostile request that is neither 2xx nor 4xx."""

import json
import threading
from collections import Counter
from dataclasses import dataclass, field

import httpx

from tests.full_tests.server import Server

# Of one answer. A step takes milliseconds and a request has 512 tokens at most: longer is a hang.
ANSWER_SECONDS = 60


@dataclass
class Judge:
    server: Server
    tried: Counter[str] = field(default_factory=Counter)
    """Requests by path."""
    answers: Counter[int] = field(default_factory=Counter)
    """By status."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def num_tried(self) -> int:
        return self.tried.total()

    def check(self, path: str, asked: bytes | str, status: int, text: str) -> None:
        """`text`: the whole answer, also of a stream."""
        with self._lock:
            self.tried[path] += 1
            self.answers[status] += 1
        codes = [status, *(code for code in map(_error_code, text.splitlines()) if code is not None)]
        is_fine = (200 <= status < 300 or 400 <= status < 500) and max(codes) < 500
        assert is_fine, f"{path} answered {max(codes)} to {str(asked)[:1000]}: {text[:500]}"

    def send(self, path: str, body: bytes | str) -> httpx.Response:
        """A JSON body as it is, and the judged answer."""
        headers = {"content-type": "application/json"}
        response = self.server.client.post(path, content=body, headers=headers, timeout=ANSWER_SECONDS)
        self.check(path, body, response.status_code, response.text)
        return response

    def send_json(self, path: str, **body: object) -> httpx.Response:
        """Numbers that JSON does not have and lone surrogates go out as Python writes them."""
        return self.send(path, json.dumps({"model": "tiny"} | body))


def _error_code(line: str) -> int | None:
    """Of an error inside a stream, whose status was sent long before."""
    try:
        event = json.loads(line.removeprefix("data: "))
        return int(event["error"]["code"])
    except (ValueError, TypeError, KeyError):
        return None
