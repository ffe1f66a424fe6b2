"""`gaudi-spec top`: the metrics of a running server on one screen."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_gaudi_spec import metrics
from vllm_gaudi_spec.tools.io import output
from vllm_gaudi_spec.tools.io.command_line import positive
from vllm_gaudi_spec.tools.io.output import FINE, PROBLEMS, fail
from vllm_gaudi_spec.tools.server import DEFAULT_URL, Server, ServerError, find_base

if TYPE_CHECKING:
    from rich.console import Group

DESCRIPTION = """\
Show what a running server does, from its /metrics: tokens/s, queue and KV cache, acceptance by position, the numbers of
drafts in use, why requests went without drafts, graphs compiled after warm-up, results of audits. Press Ctrl-C to quit.

Examples:
  gaudi-spec top
  gaudi-spec top http://127.0.0.1:8000 --once

Figures are sums over the server's engines; KV cache usage is that of the fullest engine. With --once, with --json and
in a pipe, it reads twice, an interval apart, prints once, and exits.

Exit status: 0 if it was shown, 1 if no server answers or the server runs without this plugin, 2 for invalid options.
"""
_WINDOW = 10.0


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "top", help="live view of a running server: throughput, queue, acceptance", description=DESCRIPTION
    )
    add = parser.add_argument
    add("url", nargs="?", default=DEFAULT_URL, metavar="URL", help="address of the server")
    add("--once", action="store_true", help="print once, as plain text")
    add("--interval", type=positive, default=1, metavar="S", help="seconds between two readings")
    output.add_json(add, "the figures once")


def start(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    try:
        find_base(options.url)
    except ValueError as error:
        return fail("top", str(error))
    if mistake := output.find_mistake("--json", options.json):
        return fail("top", mistake)
    server = Server(options.url)
    is_live = not options.once and options.json is None and sys.stdout.isatty()
    history = History(max(_WINDOW, 2 * options.interval) if is_live else options.interval)
    try:
        history.add(read(server))
        if is_live:
            show_live(history, server, options.interval)
        else:
            time.sleep(options.interval)
            history.add(read(server))
            show_once(history, server, options.json)
    except ServerError as error:
        return fail("top", str(error), PROBLEMS)
    except NotMetrics as error:
        return fail("top", f"{server.base}/metrics is not in Prometheus' format: {error}", PROBLEMS)
    return FINE


def read(server: Server) -> Reading:
    """Read the metrics of a server. Raises an error if the server does not run this plugin."""
    reading = Reading(server.read_metrics(), time.monotonic())
    if reading.has(_STEPS):
        return reading
    if reading.has(_GENERATED):
        raise ServerError(f"{server.base} is vLLM, but without this plugin: it exports no {_STEPS}")
    raise ServerError(
        f"{server.base}/metrics has no series of vLLM: it is not a vLLM server, or runs with --disable-log-stats"
    )


def show_once(history: History, server: Server, json_file: str | None) -> None:
    rows = list(history.make_rows())
    if json_file != output.STDOUT:
        print(f"{server.base}\n")
        for line in output.align([name_columns(history), *((row.title, row.now, row.since_start) for row in rows)]):
            print(line)
    figures = {row.title: row.values for row in rows}
    output.write_json({"server": server.base, "seconds": history.seconds, "figures": figures}, json_file)


def name_columns(history: History) -> tuple[str, ...]:
    return "", f"last {history.seconds:.0f} s", "since its start"


def show_live(history: History, server: Server, interval: float) -> None:
    """Update the screen until Ctrl-C is pressed. If the server is unavailable, wait for it."""
    from rich.console import Console
    from rich.live import Live

    with Live(make_screen(history, server, ""), console=Console(), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                try:
                    history.add(read(server))
                    trouble = ""
                except ServerError as error:
                    trouble = f"{error}; trying again"
                live.update(make_screen(history, server, trouble), refresh=True)
        except KeyboardInterrupt:
            return


def make_screen(history: History, server: Server, trouble: str) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", expand=True, box=None, pad_edge=False)
    title, *spans = name_columns(history)
    table.add_column(title, no_wrap=True)
    for name in spans:
        table.add_column(name, ratio=1)
    for row in history.make_rows():
        table.add_row(row.title, Text(row.now, row.style), Text(row.since_start, row.style))
    return Group(Text.assemble((f"{server.base}  ", "bold"), (trouble, "bold red")), table)


# ---- readings ----------------------------------------------------------------------------------------------


_GENERATED = "vllm:generation_tokens_total"
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_TTFT = "vllm:time_to_first_token_seconds"
_TPOT = "vllm:request_time_per_output_token_seconds"
_STEPS = f"{metrics.STEPS}_total"
_ROWS = f"{metrics.ROWS}_total"


class NotMetrics(ValueError):
    """Raised for text that is not in the Prometheus format."""


class Reading:
    """All samples read at one time, summed over all engines."""

    def __init__(self, text: str, at: float) -> None:
        """Parse the text of the metrics. `at` is the time in seconds on a clock shared by all readings."""
        from prometheus_client.parser import text_string_to_metric_families

        self.at = at
        self._samples: dict[str, list[Any]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    self._samples.setdefault(sample.name, []).append(sample)
        except ValueError as error:
            raise NotMetrics(" ".join(str(error).split())[:80]) from None

    def has(self, name: str) -> bool:
        return name in self._samples

    def sum(self, name: str) -> float:
        """Return the sum over all engines and labels, or 0 if there are no samples."""
        return sum(sample.value for sample in self._samples.get(name, ()))

    def max(self, name: str) -> float:
        return max((sample.value for sample in self._samples.get(name, ())), default=0.0)

    def sum_by(self, label: str, name: str) -> dict[str, float]:
        """Return the sum for each value of a label, in the order in which the values occur."""
        found: dict[str, float] = {}
        for sample in self._samples.get(name, ()):
            if (value := sample.labels.get(label)) is not None:
                found[value] = found.get(value, 0.0) + sample.value
        return found


class Span(NamedTuple):
    """Two readings, between which increases are counted. If there is no first reading, increases are counted from the
    start of the server."""

    first: Reading | None
    last: Reading

    def increase(self, name: str) -> float:
        return self.last.sum(name) - (self.first.sum(name) if self.first else 0.0)

    def increase_by(self, label: str, name: str) -> dict[str, float]:
        before = self.first.sum_by(label, name) if self.first else {}
        return {value: number - before.get(value, 0.0) for value, number in self.last.sum_by(label, name).items()}

    def divide(self, name: str, by: str) -> float | None:
        whole = self.increase(by)
        return self.increase(name) / whole if whole > 0 else None

    def divide_by_label(self, label: str, name: str, by: str) -> dict[str, float]:
        whole = self.increase(by)
        return {value: number / whole for value, number in self.increase_by(label, name).items()} if whole > 0 else {}


class History:
    """The readings of the last few seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._readings: deque[Reading] = deque()

    def add(self, reading: Reading) -> None:
        if self._readings and any(reading.sum(name) < self._readings[-1].sum(name) for name in (_STEPS, _GENERATED)):
            self._readings.clear()  # the server has been restarted
        self._readings.append(reading)
        # Keep one reading from before the window, so that rates cover the whole window.
        while len(self._readings) > 2 and reading.at - self._readings[1].at >= self._seconds:
            self._readings.popleft()

    @property
    def seconds(self) -> float:
        """Number of seconds between the first and last readings, over which rates are computed."""
        return self._readings[-1].at - self._readings[0].at

    def make_rows(self) -> Iterator[Row]:
        return _make_rows(Span(self._readings[0], self._readings[-1]), self.seconds)


# ---- rows --------------------------------------------------------------------------------------------------


_NONE = "–"
_ALARM, _WARNING = "bold red", "yellow"


class Row(NamedTuple):
    """A line on the screen. `now` and `since_start` are text, and `values` contains the same data as numbers."""

    title: str
    now: str
    since_start: str
    values: dict[str, Any]
    style: str = ""


def _make_rows(recent: Span, seconds: float) -> Iterator[Row]:
    last = recent.last
    whole = Span(None, last)

    def rate(title: str, name: str) -> Row:
        now = recent.increase(name) / seconds if seconds else None
        total = last.sum(name)
        return Row(title, _show(now, "{:,.1f}"), f"{total:,.0f} in all", {"now": now, "since_start": total})

    def gauge(title: str, value: float, pattern: str, style: str = "") -> Row:
        return Row(title, pattern.format(value), "", {"now": value}, style)

    def figure(title: str, compute: Callable[[Span], Any], show: Callable[[Any], str], style: str = "") -> Row:
        now, since_start = compute(recent), compute(whole)
        return Row(title, show(now), show(since_start), {"now": now, "since_start": since_start}, style)

    def ratio(title: str, name: str, by: str, pattern: str, scale: float = 1.0, offset: float = 0.0) -> Row:
        def compute(span: Span) -> float | None:
            found = span.divide(name, by)
            return None if found is None else offset + found

        return figure(title, compute, lambda value: _show(value and scale * value, pattern))

    def faults(title: str, name: str, growing: str) -> Row:
        """Show a count in the style `growing` while it increases, and in yellow afterwards."""
        style = growing if recent.increase(name) else _WARNING if whole.increase(name) else ""
        return figure(title, lambda span: span.increase(name), "{:,.0f}".format, style)

    yield rate("tokens/s", _GENERATED)
    yield rate("prompt tokens/s", "vllm:prompt_tokens_total")
    yield rate("finished requests/s", "vllm:request_success_total")
    yield gauge("requests running", last.sum("vllm:num_requests_running"), "{:,.0f}")
    waiting = last.sum("vllm:num_requests_waiting")
    yield gauge("requests waiting", waiting, "{:,.0f}", _WARNING if waiting else "")
    yield gauge("KV cache in use", last.max("vllm:kv_cache_usage_perc"), "{:.1%}")
    yield faults("preemptions", "vllm:num_preemptions_total", _WARNING)
    yield ratio("TTFT", f"{_TTFT}_sum", f"{_TTFT}_count", "{:,.1f} ms", 1000)
    yield ratio("TPOT", f"{_TPOT}_sum", f"{_TPOT}_count", "{:,.1f} ms", 1000)
    yield rate("steps/s", _STEPS)
    yield ratio("device-to-host syncs/step", f"{metrics.HOST_SYNCS}_total", _STEPS, "{:.2f}")
    yield faults("late compiles", f"{metrics.COMPILED}_total", _ALARM)
    if not last.has(_ROWS):
        yield Row("speculation", "off", "", {"now": "off"})
        return
    yield faults("drafter faults", f"{metrics.DRAFTER_FAULTS}_total", _ALARM)
    is_off = last.sum(f"{metrics.DRAFTER_SWITCHED_OFF}_total") > 0
    state = "switched off" if is_off else "on"
    yield Row("drafter", state, "", {"now": state}, _ALARM if is_off else "")
    audits = f"{metrics.AUDITS}_total"
    if any(last.sum_by("result", audits).values()):
        new, old = (span.increase_by("result", audits).get(metrics.DIFFERENT) for span in (recent, whole))
        style = _ALARM if new else _WARNING if old else ""
        yield figure("audits", lambda span: span.increase_by("result", audits), _show_named("{:,.0f}"), style)
    yield ratio("acceptance rate", ACCEPTED, _DRAFT_TOKENS, "{:.1%}")
    yield ratio("mean acceptance length", ACCEPTED, _DRAFTS, "{:.2f}", offset=1)
    yield figure(
        "acceptance by position", lambda span: span.divide_by_label("position", PER_POSITION, _DRAFTS), _show_positions
    )
    for title, label, name in (
        ("k in use", metrics.NUM_DRAFTS, _ROWS),
        ("without drafts", "reason", f"{metrics.ROWS_WITHOUT_DRAFTS}_total"),
    ):
        yield figure(
            title,
            lambda span, label=label, name=name: span.divide_by_label(label, name, _ROWS),  # type: ignore[misc]
            _show_named("{:.0%}"),
        )


def _show(value: float | None, pattern: str) -> str:
    return _NONE if value is None else pattern.format(value)


def _show_positions(rates: Mapping[str, float]) -> str:
    return " ".join(f"{rates[position]:.0%}" for position in sorted(rates, key=int)) or _NONE


def _show_named(pattern: str) -> Callable[[Mapping[str, float]], str]:
    def show(found: Mapping[str, float]) -> str:
        return ", ".join(f"{name}: {pattern.format(value)}" for name, value in found.items() if value > 0) or _NONE

    return show
