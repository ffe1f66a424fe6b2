"""Requests to a server, for `chat` and `top`. Every failure is a one-line `ServerError` with a remedy."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import httpx

DEFAULT_URL = "http://127.0.0.1:8000"
# A server that is processing a large prompt responds late.
_SECONDS = 10.0
_SECONDS_OF_A_STREAM = 600.0


class ServerError(Exception):
    """Raised if a request failed. The message contains the server's address and a remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(make_printable(message))


def make_printable(text: str) -> str:
    """Replace control characters except newlines and tabs, because they could control the terminal."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(one) == "Cc" and one not in "\n\t" else one for one in text
    )


def find_base(url: str) -> str:
    """Return the root URL of a server, given any of its URLs, such as those of /v1 or /metrics."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        is_address = False
    if not is_address:
        raise ValueError(f"{url} is not the address of a server; write it like {DEFAULT_URL}")
    path = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


class Server:
    def __init__(self, url: str, key: str | None = None) -> None:
        """Prepare requests to `url`. The key is secret: it is sent to no other address and appears in no message."""
        import httpx

        self.base = find_base(url)
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ValueError("OPENAI_API_KEY has a character that is not allowed in a header")
        # A proxy in the environment cannot reach addresses that are local to this machine.
        is_local = urlsplit(self.base).hostname in ("localhost", "127.0.0.1", "::1")
        self._client = httpx.Client(
            headers={} if key is None else {"Authorization": f"Bearer {key}"}, timeout=_SECONDS, trust_env=not is_local
        )

    def read_metrics(self) -> str:
        with self._request("GET", "/metrics") as response:
            return make_printable(response.read().decode(errors="replace"))

    def find_model(self) -> str:
        """Return the ID of the server's first model."""
        with self._request("GET", "/v1/models") as response:
            try:
                return str(json.loads(response.read())["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ServerError(
                    f"{self.base} names no model at /v1/models, so it is not an OpenAI-compatible server"
                ) from None

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the events of a streamed answer as they arrive. Raises an error if the server sends one."""
        with self._request("POST", path, json=body, timeout=_SECONDS_OF_A_STREAM) as response:
            for line in _split_lines(response.iter_bytes()):
                if not line.startswith("data:"):
                    continue
                if (data := line.removeprefix("data:").strip()) == "[DONE]":
                    return
                try:
                    event = json.loads(data)
                except ValueError:
                    raise ServerError(f"{self.base} sent an event that is not JSON: {data[:60]}") from None
                if "error" in event:
                    raise ServerError(f"{self.base}: {_find_message(event)}")
                yield event
            raise ServerError(f"{self.base} stopped in the middle of an answer; its log has the reason")

    @contextmanager
    def _request(self, method: str, path: str, **options: Any) -> Iterator[httpx.Response]:
        import httpx

        try:
            with self._client.stream(method, f"{self.base}{path}", **options) as response:
                if not response.is_success:
                    response.read()
                    raise ServerError(f"{self.base}{path}: {_explain_refusal(response)}")
                yield response
        except httpx.ConnectError as error:
            raise ServerError(f"no server answers at {self.base} ({error}); check the address") from None
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"{self.base} gave no complete answer: {reason}") from None


def _split_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Split only at line feeds, because the text of an event may contain Unicode's other line separators."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").strip()


def _explain_refusal(response: httpx.Response) -> str:
    if response.status_code == 401:
        is_wrong = "Authorization" in response.request.headers
        return "the server needs an API key" + (
            "; the one in OPENAI_API_KEY is wrong" if is_wrong else ", which gaudi-spec chat reads from OPENAI_API_KEY"
        )
    try:
        return _find_message(response.json())
    except ValueError:
        return f"{response.status_code} {response.reason_phrase}"


def _find_message(answer: Any) -> str:
    """Return the message of an error, which vLLM nests in `error` and its web framework calls `detail`."""
    for name in ("error", "detail", "message"):
        if isinstance(answer, dict) and name in answer:
            answer = answer[name]
    return " ".join(str(answer).split())
