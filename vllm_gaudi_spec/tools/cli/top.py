"""`gaudi-spec top`: a running server's metrics on one screen."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.tools.io import output
from vllm_gaudi_spec.tools.io.command_line import positive
from vllm_gaudi_spec.tools.io.output import FINE, PROBLEMS, fail
from vllm_gaudi_spec.tools.live.http import DEFAULT_URL, Server, ServerError, base_of

if TYPE_CHECKING:
    from rich.console import Group

    from vllm_gaudi_spec.tools.live.figures import History, Row

DESCRIPTION = """\
Show what a running server does, from its /metrics: tokens/s, queue and KV cache, acceptance by position, the numbers of
drafts in use, why requests went without drafts, graphs compiled after warm-up, results of audits. Ctrl-C ends it.

Examples:
  gaudi-spec top
  gaudi-spec top http://127.0.0.1:8000 --once

Figures are sums over the server's engines; KV cache usage is that of the fullest engine. With --once, with --json and
in a pipe it reads twice, an interval apart, prints once and ends.

Exit status: 0 when it was shown, 1 when no server answers or the server runs without this plugin, 2 for wrong options.
"""
_WINDOW = 10.0
_COLUMNS = ("", "last {seconds:.0f} s", "since its start")


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "top",
        help="live view of a running server: throughput, queue, acceptance",
        description=DESCRIPTION,
    )
    add = parser.add_argument
    add("url", nargs="?", default=DEFAULT_URL, metavar="URL", help="address of the server")
    add("--once", action="store_true", help="print once, as plain text")
    add("--interval", type=positive, default=1, metavar="S", help="seconds between two readings")
    output.add_json(add, "the figures, once,")


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    try:
        base_of(options.url)
    except ValueError as error:
        return fail("top", str(error))
    if mistake := output.mistake("--json", options.json):
        return fail("top", mistake)
    from vllm_gaudi_spec.tools.live.figures import History, NotMetrics, NotOurs

    server = Server(options.url)
    is_live = not options.once and options.json is None and sys.stdout.isatty()
    history = History(max(_WINDOW, 2 * options.interval) if is_live else options.interval)
    try:
        read_into(history, server)
        if is_live:
            show_live(history, server, options.interval)
        else:
            time.sleep(options.interval)
            read_into(history, server)
            show_once(history, server, options.json)
    except (ServerError, NotOurs) as error:
        return fail("top", str(error), PROBLEMS)
    except NotMetrics as error:
        return fail("top", f"{server.base}/metrics is not in Prometheus' format: {error}", PROBLEMS)
    return FINE


def read_into(history: History, server: Server, clock: Callable[[], float] = time.monotonic) -> None:
    from vllm_gaudi_spec.tools.live.figures import Reading, check_is_ours

    text = server.metrics()
    reading = Reading(text, clock())
    check_is_ours(reading, server.base)
    history.add(reading)


# ---- once ------------------------------------------------------------------------------------------------


def show_once(history: History, server: Server, json_file: str | None) -> None:
    rows = history.rows()
    if json_file != output.STDOUT:
        print(f"{server.base}\n")
        for line in output.aligned([columns(history), *((row.title, row.now, row.since_start) for row in rows)]):
            print(line)
    output.write_json(as_json(history, server, rows), json_file)


def columns(history: History) -> tuple[str, ...]:
    return tuple(name.format(seconds=history.seconds) for name in _COLUMNS)


def as_json(history: History, server: Server, rows: list[Row]) -> dict[str, Any]:
    return {
        "server": server.base,
        "seconds": history.seconds,
        "figures": {row.title: row.values for row in rows},
    }


# ---- live ------------------------------------------------------------------------------------------------


def show_live(history: History, server: Server, interval: float) -> None:
    """Show the screen until Ctrl-C, and wait for a server that goes away."""
    from rich.console import Console
    from rich.live import Live

    with Live(screen(history, server, ""), console=Console(), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                try:
                    read_into(history, server)
                    trouble = ""
                except ServerError as error:
                    trouble = f"{error}; trying again"
                live.update(screen(history, server, trouble), refresh=True)
        except KeyboardInterrupt:
            return


def screen(history: History, server: Server, trouble: str) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", expand=True, box=None, pad_edge=False)
    title, *spans = columns(history)
    table.add_column(title, no_wrap=True)
    for name in spans:
        table.add_column(name, ratio=1)
    for row in history.rows():
        table.add_row(row.title, Text(row.now, row.style), Text(row.since_start, row.style))
    return Group(Text.assemble((f"{server.base}  ", "bold"), (trouble, "bold red")), table)
