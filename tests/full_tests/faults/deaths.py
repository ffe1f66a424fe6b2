"""How a server dies as it should, whatever killed it."""

import contextlib
import time
from collections.abc import Callable

import httpx
import psutil

from tests.full_tests.faults.clients import asking, bodies
from tests.full_tests.server import Server
from tests.support.processes import still_alive

PATIENCE = 60
"""Seconds, for what ends within ten on a machine that has nothing else to do: it is printed how long it took."""


def processes(server: Server, name: str) -> list[psutil.Process]:
    """By the titles that vLLM gives them."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    return [process for process in family if name in " ".join(process.cmdline())]


def check_death(server: Server, strike: Callable[[], None], reason: str, num_tokens: int = 900) -> None:
    """Check that a death under load ends as docs/how_to/troubleshoot.md says, and that the log has `reason`.

    `num_tokens` is so large that no answer is complete when it strikes, even if this process is slower than the server.
    """
    with asking(server, bodies(8, num_tokens)) as answers:
        family = psutil.Process(server.process.pid).children(recursive=True)
        struck = time.monotonic()
        strike()
        ended = [answer.result(timeout=PATIENCE) for answer in answers]
        answered = time.monotonic() - struck
    assert not any(answer.finished for answer in ended)
    whole, streams = ended[::2], ended[1::2]
    assert {answer.status for answer in whole} <= {500, 503, None}, "an error, or none came through any more"
    assert 500 in {answer.status for answer in whole}
    assert all('"error"' in answer.text for answer in streams if answer.status == 200)
    with contextlib.suppress(httpx.TransportError):  # it may have ended already
        assert server.client.get("/health").status_code == 503
    check_failed(server, family)
    assert reason in server.log.read_text()
    statuses = [answer.status for answer in ended]
    print(f"answers {statuses} after {answered:.1f} s, no process after {time.monotonic() - struck:.1f} s")


def check_failed(server: Server, family: list[psutil.Process]) -> None:
    """It ends by itself, as what has failed, and so do its processes."""
    began = time.monotonic()
    assert server.process.wait(timeout=PATIENCE) == 1, server.log.read_text()[-3000:]
    print(f"exit code 1 after {time.monotonic() - began:.1f} s more")
    check_ended(family)


def check_ended(family: list[psutil.Process]) -> None:
    assert not still_alive(family, PATIENCE)
