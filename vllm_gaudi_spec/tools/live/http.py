"""Requests to a server; every failure is reported in one line with the remedy."""

from __future__ import annotations

import http.client
import json
import unicodedata
import urllib.error
import urllib.request
from collections.abc import Generator
from typing import Any
from urllib.parse import urlsplit

DEFAULT_URL = "http://127.0.0.1:8000"
# A server that is busy with a large prompt answers late.
_SECONDS = 10.0
_SECONDS_OF_A_STREAM = 600.0
_DONE = "[DONE]"


class ServerError(Exception):
    """A request failed; the message names the server and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """Replace control characters other than newlines and tabs, which could steer the terminal."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(one) == "Cc" and one not in "\n\t" else one for one in text
    )


def base_of(url: str) -> str:
    """Return the root of the server from any of its addresses, such as that of /v1 or /metrics."""
    text = url if "://" in url else f"http://{url}"
    parts = urlsplit(text)
    try:
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port that is no number
        is_address = False
    if not is_address:
        raise ValueError(f"{url} is no address of a server; write it like {DEFAULT_URL}")
    path = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


class Server:
    def __init__(self, url: str, key: str | None = None) -> None:
        """`key` is a secret: it is sent to `url` only and appears in no error message."""
        self.base = base_of(url)
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ValueError("OPENAI_API_KEY has a character that no header can have")
        self._key = key
        # A proxy of the environment cannot reach this machine's own addresses.
        is_here = urlsplit(self.base).hostname in ("localhost", "127.0.0.1", "::1")
        self._opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here else []))

    def metrics(self) -> str:
        return printable(self._open("/metrics", None, _SECONDS).decode(errors="replace"))

    def model(self) -> str:
        """Return the id of the server's first model."""
        answer = self._open("/v1/models", None, _SECONDS)
        try:
            return str(json.loads(answer)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{self.base} names no model at /v1/models: it is no OpenAI-compatible server") from None

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the events of a streamed answer as they arrive; raise an error that the server sends among them."""
        with self._response(path, body, _SECONDS_OF_A_STREAM) as response:
            lines = iter(response)
            while True:
                try:
                    line = next(lines, None)
                except (OSError, http.client.HTTPException) as error:
                    raise ServerError(f"{self.base} ended in the middle of an answer: {error}") from None
                if line is None:
                    raise ServerError(f"{self.base} ended in the middle of an answer; its log has the reason")
                text = line.decode(errors="replace").strip()
                if not text.startswith("data:"):
                    continue
                if (data := text.removeprefix("data:").strip()) == _DONE:
                    return
                try:
                    event = json.loads(data)
                except ValueError:
                    raise ServerError(f"{self.base} sent an event that is not JSON: {data[:60]}") from None
                if "error" in event:
                    raise ServerError(f"{self.base}: {_message_of(event)}")
                yield event

    def _open(self, path: str, body: dict[str, Any] | None, seconds: float) -> bytes:
        try:
            with self._response(path, body, seconds) as response:
                content: bytes = response.read()
                return content
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.base} gives no whole answer: {error}") from None

    def _response(self, path: str, body: dict[str, Any] | None, seconds: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.base}{path}", data, {"Content-Type": "application/json"})
        if self._key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self._key}")
        try:
            return self._opener.open(request, timeout=seconds)
        except urllib.error.HTTPError as error:
            raise ServerError(f"{self.base}{path}: {_refusal(error, self._key is not None)}") from None
        except urllib.error.URLError as error:
            raise ServerError(f"no server answers at {self.base} ({error.reason}); is the address right?") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{self.base} does not speak HTTP, or not in time ({error})") from None


def _refusal(error: urllib.error.HTTPError, has_key: bool) -> str:
    if error.code == 401:
        return "the server wants an API key, " + (
            "another than OPENAI_API_KEY has" if has_key else "which gaudi-spec chat reads from OPENAI_API_KEY"
        )
    try:
        return _message_of(json.loads(error.read()))
    except ValueError:
        return f"{error.code} {error.reason}"


def _message_of(answer: Any) -> str:
    """vLLM answers with an `error` that has a `message`, the web framework under it with a `detail`."""
    found = answer
    for name in ("error", "detail", "message"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    return " ".join(str(found).split())
