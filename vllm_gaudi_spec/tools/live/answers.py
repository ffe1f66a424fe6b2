"""A streamed answer, as pieces that know whether they were drafts.

A server sends the tokens of one step in one event: the accepted drafts, then the token that the target added. So all
but the last token of an event were drafts. That is wrong in four cases:
- the server was faster than its stream, and put several steps into one event. With more than k + 1 tokens that is
  certain, and the piece is `UNKNOWN`; with fewer it is not seen, and a token of the target looks like a draft;
- a step's text is split between reasoning and answer, or held back: its tokens are `UNKNOWN` too;
- the last token of an answer that ended at a draft (end token, max_tokens, stop string): that draft looks like the
  target's;
- a character of several tokens has the kind of the event that it came with.
`Counted` has the server's own count of accepted drafts, to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

from vllm_gaudi_spec.tools.live.figures import ACCEPTED, PER_POSITION, NotMetrics, Reading
from vllm_gaudi_spec.tools.live.http import Server, ServerError

TARGET = "target"
DRAFT = "draft"
UNKNOWN = "unknown"
REASONING = "reasoning"

INTERRUPTED = "interrupted"
"""The finish reason of an answer that the user interrupted."""


class Piece(NamedTuple):
    text: str
    kind: str


class Counted(NamedTuple):
    """The server's figures of one moment."""

    k: int
    """Maximum number of drafts per step; 0 without speculation or metrics."""
    accepted: float | None
    """Accepted drafts of all requests since the server's start; None if /metrics is missing or late."""


def counted(server: Server) -> Counted:
    try:
        reading = Reading(server.metrics(), 0.0)
    except (ServerError, NotMetrics):  # another server than vLLM, or one that is busy
        return Counted(0, None)
    return Counted(len(reading.by("position", PER_POSITION)), reading.sum(ACCEPTED))


class Answer:
    """An answer, which is complete when its pieces have been read."""

    def __init__(self, k: int) -> None:
        """`k` is the maximum number of drafts per step, or 0 if it is not known."""
        self.k = k
        self.text = ""
        self.num_tokens = 0
        self.num_drafts = 0
        """Number of tokens shown as accepted drafts."""
        self.num_unknown = 0
        self.num_accepted: float | None = None
        """Accepted drafts by the server's count, which includes other requests; None if it is not known."""
        self.finish_reason = ""

    def pieces(self, events: Iterable[dict[str, Any]]) -> Iterator[Piece]:
        for event in events:
            for choice in event.get("choices", ()):
                yield from self._pieces_of(choice)

    def _pieces_of(self, choice: dict[str, Any]) -> Iterator[Piece]:
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        delta = choice.get("delta") or {}
        if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
            yield Piece(reasoning, REASONING)
        text = delta.get("content") or ""
        self.text += text
        num_tokens = len(choice.get("token_ids") or ())
        self.num_tokens += num_tokens
        # Where reasoning ends, and of text that is held back, nobody knows which tokens are shown here.
        is_split = num_tokens > 1 and (reasoning or not text)
        if num_tokens > self.k + 1 or is_split:
            self.num_unknown += num_tokens
            found = [Piece(text, UNKNOWN)]
        else:
            self.num_drafts += max(num_tokens - 1, 0)
            split = len(text) - _length_of_last(choice, text) if num_tokens > 1 else 0
            found = [Piece(text[:split], DRAFT), Piece(text[split:], TARGET)]
        yield from (piece for piece in found if piece.text)


def _length_of_last(choice: dict[str, Any], text: str) -> int:
    """Return the length of the last token's text in its event; 0 for an end token or a partial character."""
    entries = (choice.get("logprobs") or {}).get("content") or ()
    last = entries[-1]["token"] if entries else ""
    return len(last) if text.endswith(last) else 0


# ---- a conversation ----------------------------------------------------------------------------------------


class Conversation:
    def __init__(self, *, server: Server, model: str, k: int, max_tokens: int, temperature: float) -> None:
        """`k` is the maximum number of drafts per step, or 0 if it is not known."""
        self._server = server
        self._k = k
        self._options = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self._messages: list[dict[str, str]] = []

    def clear(self) -> None:
        self._messages.clear()

    def ask(self, message: str, show: Callable[[Piece], None]) -> Answer:
        """The conversation grows by both, or by none where the server refuses. A KeyboardInterrupt ends the answer
        where it is, at the server too."""
        question = {"role": "user", "content": message}
        before = counted(self._server).accepted
        answer = Answer(self._k)
        with closing(self._server.stream("/v1/chat/completions", self._body(question))) as events:
            try:
                for piece in answer.pieces(events):
                    show(piece)
            except KeyboardInterrupt:
                answer.finish_reason = INTERRUPTED
        after = counted(self._server).accepted
        if before is not None and after is not None and after >= before:  # less: it has started again
            answer.num_accepted = after - before
        self._messages += [question, {"role": "assistant", "content": answer.text}]
        return answer

    def _body(self, question: dict[str, str]) -> dict[str, object]:
        body = {**self._options, "messages": [*self._messages, question], "stream": True}
        # Tokens show what is a draft, and their texts where it ends. Servers without drafts are not asked for them.
        return body | {"return_token_ids": True, "logprobs": True, "top_logprobs": 0} if self._k else body
