"""What an answer may be: 2xx or 4xx. Anything else is a fault; those that are known to be upstream's stand here."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.full_tests.server import Server

# Of one answer. A step takes milliseconds and a request has 512 tokens at most: longer is a hang.
ANSWER_SECONDS = 60


@dataclass(frozen=True)
class UpstreamFault:
    """A 5xx of vLLM's own front end, which never reaches the engine: it is the same on upstream's platform."""

    path: str
    words: str
    """In the message."""
    reason: str
    asks: Callable[[Any], bool] | None = None
    """Whether a body asks for it: where the words alone would fit faults of another cause as well, also of ours."""

    def fits(self, path: str, asked: object, text: str) -> bool:
        return path == self.path and self.words in text and (self.asks is None or self.asks(body_of(asked)))


def has_an_assistants_message_without_parts(body: Any) -> bool:
    given = body.get("input") if isinstance(body, dict) else None
    return isinstance(given, list) and any(
        isinstance(item, dict) and item.get("role") == "assistant" and item.get("content") == [] for item in given
    )


UPSTREAM_FAULTS = [
    UpstreamFault(
        "/v1/systemone",
        "The model does not support the structured decision API",
        "the server offers it whatever the model is, and answers 501",
    ),
    UpstreamFault(
        "/v1/chat/completions",
        "'list' object has no attribute 'get'",
        "structured_outputs that is a list is asked for its keys before its type is looked at",
    ),
    UpstreamFault(
        "/v1/responses",
        "list index out of range",
        "the first part is taken of an assistant's message whose content is []",
        asks=has_an_assistants_message_without_parts,
    ),
    UpstreamFault(
        "/v1/responses",
        "'ResponseOutputRefusal' object has no attribute 'text'",
        "the text is taken of an assistant's message that begins with a refusal",
    ),
]


@dataclass
class Judge:
    server: Server
    tried: Counter[str] = field(default_factory=Counter)
    """Requests by path."""
    answers: Counter[int] = field(default_factory=Counter)
    """By status."""
    tolerated: Counter[str] = field(default_factory=Counter)
    """Faults of upstream's, by their words."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def num_tried(self) -> int:
        return self.tried.total()

    def check(self, path: str, asked: object, status: int, text: str) -> None:
        """`asked`: the request's body, or a case of schemathesis; `text`: all of the answer's, of a stream as well."""
        with self._lock:
            self.tried[path] += 1
            self.answers[status] += 1
        codes = [status, *(code for code in map(_error_code, text.splitlines()) if code is not None)]
        if (200 <= status < 300 or 400 <= status < 500) and max(codes) < 500:
            return
        fault = next((f for f in UPSTREAM_FAULTS if f.fits(path, asked, text)), None)
        assert fault is not None, f"{path} answered {max(codes)} to {str(asked)[:1000]}: {text[:500]}"
        with self._lock:
            self.tolerated[fault.words] += 1

    def send(self, path: str, body: bytes | str) -> httpx.Response:
        """A JSON body as it is, and the judged answer."""
        headers = {"content-type": "application/json"}
        response = self.server.client.post(path, content=body, headers=headers, timeout=ANSWER_SECONDS)
        self.check(path, body, response.status_code, response.text)
        return response

    def send_json(self, path: str, **body: object) -> httpx.Response:
        """Numbers that JSON does not have and lone surrogates go out as Python writes them."""
        return self.send(path, json.dumps({"model": "tiny"} | body))


def body_of(asked: object) -> Any:
    """What was sent, read; None where it is no JSON."""
    if not isinstance(asked, bytes | str):
        return getattr(asked, "body", None)
    try:
        return json.loads(asked)
    except (ValueError, RecursionError):
        return None


def _error_code(line: str) -> int | None:
    """Of an error inside a stream, whose status was sent long before."""
    try:
        event = json.loads(line.removeprefix("data: "))
        return int(event["error"]["code"])
    except (ValueError, TypeError, KeyError):
        return None
