"""`gaudi-spec chat`: a conversation with a running server, accepted drafts in color."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_gaudi_spec import environment
from vllm_gaudi_spec.tools.io.command_line import not_negative, positive
from vllm_gaudi_spec.tools.io.output import FINE, PROBLEMS, fail
from vllm_gaudi_spec.tools.live.http import DEFAULT_URL, Server, ServerError

DESCRIPTION = """\
Talk to a running server. Answers come as they are made, and on a terminal accepted drafts are green. The conversation
so far goes along with each message; /clear forgets it, Ctrl-C stops an answer, Ctrl-D ends.

Examples:
  gaudi-spec chat
  echo "Why is the sky blue?" | gaudi-spec chat http://127.0.0.1:8000

green    accepted drafts: all tokens of a step but its last one
plain    the target's own tokens: the last one of each step
yellow   not known: several steps came in one event, or a step ended the reasoning
dim      reasoning, where the server separates it

Colors are inferred: the stream does not mark drafts. Where two steps came in one event that one step could have
filled, a token of the target is green; the last token of an answer is plain even if it was a draft. The line after each
answer has the server's own count of accepted drafts, which includes other requests. In a pipe there is only the text,
and each line of the input is a message.

The environment variable OPENAI_API_KEY has the key for a server with --api-key.

Exit status: 0 at the end of the conversation, 1 when the server does not answer, 2 for wrong options.
"""
_PROMPT = "> "
_CLEAR = "/clear"


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "chat",
        help="chat with a running server; accepted drafts are colored",
        description=DESCRIPTION,
    )
    add = parser.add_argument
    add("url", nargs="?", default=DEFAULT_URL, metavar="URL", help="address of the server")
    add("--model", metavar="NAME", help="as the server names it (default: the server's first model)")
    add("--max-tokens", type=positive, default=512, metavar="N", help="longest answer, in tokens")
    add("--temperature", type=not_negative, default=0.0, metavar="T", help="sampling temperature; 0: greedy")


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    try:
        server = Server(options.url, environment.api_key())
    except ValueError as error:
        return fail("chat", str(error))
    try:
        talk(server, options)
    except ServerError as error:
        return fail("chat", str(error), PROBLEMS)
    return FINE


def talk(server: Server, options: argparse.Namespace) -> None:
    from vllm_gaudi_spec.tools.live.answers import INTERRUPTED, Conversation, counted
    from vllm_gaudi_spec.tools.live.transcript import Transcript

    model = options.model or server.model()
    shown = Transcript(sys.stdout)
    k = counted(server).k
    shown.begin(server.base, model, k)
    conversation = Conversation(
        server=server, model=model, k=k, max_tokens=options.max_tokens, temperature=options.temperature
    )
    for message in messages():
        if message == _CLEAR:
            conversation.clear()
            continue
        began = time.monotonic()
        try:
            answer = conversation.ask(message, shown.piece)
        except ServerError as error:
            if not sys.stdin.isatty():
                raise
            print(f"error: {error}", file=sys.stderr)  # such as a conversation that is too long: /clear helps
            continue
        if answer.finish_reason == INTERRUPTED and not sys.stdin.isatty():
            raise KeyboardInterrupt
        shown.end(answer, time.monotonic() - began)


def messages() -> Iterator[str]:
    """Yield the lines that are not blank; a terminal has a history."""
    if not sys.stdin.isatty():
        yield from filter(None, map(str.strip, sys.stdin))
        return
    import readline  # noqa: F401 - gives input() its history and its editing

    while True:
        try:
            message = input(_PROMPT).strip()
        except EOFError:
            print()
            return
        if message:
            yield message
