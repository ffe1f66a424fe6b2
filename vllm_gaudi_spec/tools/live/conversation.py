"""Messages to a server and its answers, which the next message takes along."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from vllm_gaudi_spec.tools.live.answers import INTERRUPTED, Answer, Piece, counted
from vllm_gaudi_spec.tools.live.http import Server


class Conversation:
    def __init__(self, *, server: Server, model: str, k: int, max_tokens: int, temperature: float) -> None:
        """`k`: 0 where nothing is known of drafts."""
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
