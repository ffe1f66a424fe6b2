"""Read a server's /metrics, and turn two readings into rows: for the time between them and since the server's start."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from vllm_gaudi_spec.scheduling.metrics import (
    AUDIT_EVIDENCE,
    AUDITS,
    COMPILED,
    DIFFERENT,
    DRAFTER_FAULTS,
    DRAFTER_SWITCHED_OFF,
    HOST_SYNCS,
    NUM_DRAFTS,
    ROWS,
    ROWS_WITHOUT_DRAFTS,
    STEPS,
)

T = TypeVar("T")

# Counters of vLLM's.
_GENERATED = "vllm:generation_tokens_total"
_PROMPT = "vllm:prompt_tokens_total"
_PREEMPTIONS = "vllm:num_preemptions_total"
_FINISHED = "vllm:request_success_total"
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
# Histograms and gauges of vLLM's.
_TTFT = "vllm:time_to_first_token_seconds"
_TPOT = "vllm:request_time_per_output_token_seconds"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_KV = "vllm:kv_cache_usage_perc"

_LATE_COMPILES = f"{COMPILED}_total"
_STEPS = f"{STEPS}_total"
_ROWS = f"{ROWS}_total"
_REASONS = f"{ROWS_WITHOUT_DRAFTS}_total"
_HOST_SYNCS = f"{HOST_SYNCS}_total"
_DRAFTER_FAULTS = f"{DRAFTER_FAULTS}_total"
_AUDITS = f"{AUDITS}_total"
_SWITCHED_OFF = f"{DRAFTER_SWITCHED_OFF}_total"

_LEVELS = "▁▂▃▄▅▆▇█"
_NONE = "–"
_FIGURES_OF_HISTORY = 16
_ALARMING_EVIDENCE = 3
_ALARM, _WARNING = "bold red", "yellow"


class NotOurs(ValueError):
    """The server does not export our metrics; the message explains what it lacks."""


class Row(NamedTuple):
    """A line of the screen: `now` and `since_start` are text, `values` are the same as numbers."""

    title: str
    now: str
    since_start: str
    values: dict[str, Any]
    style: str = ""
    """rich's, where the figure wants attention."""


def check_is_ours(reading: Reading, base: str) -> None:
    if reading.has(_STEPS):
        return
    if any(name.startswith("vllm:") for name in reading.names()):
        raise NotOurs(f"{base} is vLLM, but not with this plugin: it exports no {_STEPS}")
    raise NotOurs(f"{base}/metrics has nothing of vLLM: another server, or one started with --disable-log-stats")


class History:
    """The readings of the last seconds, and the throughput between earlier ones."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._readings: deque[Reading] = deque()
        self.throughput: deque[float] = deque(maxlen=_FIGURES_OF_HISTORY)

    def add(self, reading: Reading) -> None:
        if self._readings:
            last = self._readings[-1]
            if reading.sum(_STEPS) < last.sum(_STEPS) or reading.sum(_GENERATED) < last.sum(_GENERATED):
                self._readings.clear()  # the server has started again
            else:
                self.throughput.append((reading.sum(_GENERATED) - last.sum(_GENERATED)) / (reading.at - last.at))
        self._readings.append(reading)
        # One that is older than the time asked for is kept, to look back that far.
        while len(self._readings) > 2 and reading.at - self._readings[1].at >= self._seconds:
            self._readings.popleft()

    @property
    def seconds(self) -> float:
        """Seconds between the first and the last reading, over which rates are computed."""
        return self._readings[-1].at - self._readings[0].at

    def rows(self) -> list[Row]:
        return rows(self._readings[0], self._readings[-1], self.throughput)


class _Span:
    """Increments of counters, and of the sums and counts of histograms."""

    def __init__(self, first: Reading | None, last: Reading) -> None:
        """Compare two readings. Without `first`, increments count from the server's start."""
        self._first, self._last = first, last

    def more(self, name: str) -> float:
        return self._last.sum(name) - (self._first.sum(name) if self._first else 0.0)

    def more_by(self, label: str, name: str) -> dict[str, float]:
        before = self._first.by(label, name) if self._first else {}
        return {value: number - before.get(value, 0.0) for value, number in self._last.by(label, name).items()}

    def ratio(self, name: str, of: str) -> float | None:
        return _ratio(self.more(name), self.more(of))

    def shares(self, label: str, name: str, of: str) -> dict[str, float]:
        """Return the increments by label as shares of the increment of `of`; empty if it did not grow."""
        whole = self.more(of)
        return {value: number / whole for value, number in self.more_by(label, name).items()} if whole > 0 else {}


@dataclass(frozen=True, kw_only=True)
class _Spans:
    recent: _Span
    whole: _Span
    """The increments since the server's start."""
    seconds: float
    """Length of `recent`."""

    def row(self, title: str, figure: Callable[[_Span], T], show: Callable[[T], str], style: str = "") -> Row:
        """Build a row with the same figure for both spans."""
        recent, whole = figure(self.recent), figure(self.whole)
        return Row(title, show(recent), show(whole), {"now": recent, "since_start": whole}, style)

    def rate(self, title: str, name: str, history: str = "") -> Row:
        rate, count = _ratio(self.recent.more(name), self.seconds), self.whole.more(name)
        values = {"now": rate, "since_start": count}
        return Row(title, f"{_number(rate)} {history}".rstrip(), f"{count:,.0f} in all", values)

    def count(self, title: str, name: str, style: str) -> Row:
        """Build a row of a counter, shown in `style` while it grows."""
        return self.row(title, lambda span: span.more(name), _whole_number, self.style(lambda s: s.more(name), style))

    def style(self, count: Callable[[_Span], float], growing: str = _ALARM) -> str:
        """Return the style of a fault: `growing` while it recurs, yellow once it has stopped, else none."""
        return growing if count(self.recent) else _WARNING if count(self.whole) else ""


def rows(first: Reading, last: Reading, throughput: Sequence[float]) -> list[Row]:
    spans = _Spans(recent=_Span(first, last), whole=_Span(None, last), seconds=last.at - first.at)
    found = [*_traffic(spans, last, throughput), *_device(spans)]
    if not last.has(_ROWS):
        return [*found, Row("speculation", "off", "", {"now": "off"})]
    return [*found, *_faults(spans, last), *_speculation(spans)]


def _traffic(spans: _Spans, last: Reading, throughput: Sequence[float]) -> list[Row]:
    return [
        spans.rate("tokens/s", _GENERATED, _line_of(throughput)),
        spans.rate("prompt tokens/s", _PROMPT),
        spans.rate("finished requests/s", _FINISHED),
        _gauge("requests running", last.sum(_RUNNING), _whole_number),
        _gauge("requests waiting", waiting := last.sum(_WAITING), _whole_number, _WARNING if waiting else ""),
        _gauge("KV cache in use", last.highest(_KV), _percent),
        spans.count("preemptions", _PREEMPTIONS, _WARNING),
        spans.row("TTFT", lambda span: span.ratio(f"{_TTFT}_sum", f"{_TTFT}_count"), _milliseconds),
        spans.row("TPOT", lambda span: span.ratio(f"{_TPOT}_sum", f"{_TPOT}_count"), _milliseconds),
    ]


def _device(spans: _Spans) -> list[Row]:
    return [
        spans.rate("steps/s", _STEPS),
        spans.row("device-to-host syncs/step", lambda span: span.ratio(_HOST_SYNCS, _STEPS), _two_digits),
        spans.count("late compiles", _LATE_COMPILES, _ALARM),
    ]


def _faults(spans: _Spans, last: Reading) -> list[Row]:
    is_off = last.sum(_SWITCHED_OFF) > 0
    found = [
        spans.count("drafter faults", _DRAFTER_FAULTS, _ALARM),
        _gauge("drafter", "switched off" if is_off else "on", str, _ALARM if is_off else ""),
    ]
    if any(last.by("result", _AUDITS).values()):
        style = spans.style(lambda span: span.more_by("result", _AUDITS).get(DIFFERENT, 0.0))
        found.append(spans.row("audits", lambda span: span.more_by("result", _AUDITS), _named_counts, style))
    if last.has(AUDIT_EVIDENCE):
        evidence = last.highest(AUDIT_EVIDENCE)
        style = _ALARM if evidence >= _ALARMING_EVIDENCE else ""
        found.append(_gauge("audit evidence", evidence, _number, style))
    return found


def _speculation(spans: _Spans) -> list[Row]:
    def length(span: _Span) -> float | None:
        accepted = span.ratio(ACCEPTED, _DRAFTS)
        return None if accepted is None else 1 + accepted

    return [
        spans.row("acceptance rate", lambda span: span.ratio(ACCEPTED, _DRAFT_TOKENS), _percent),
        spans.row("mean acceptance length", length, _two_digits),
        spans.row("acceptance by position", lambda span: span.shares("position", PER_POSITION, _DRAFTS), _positions),
        spans.row("k in use", lambda span: span.shares(NUM_DRAFTS, _ROWS, _ROWS), _named_shares),
        spans.row("without drafts", lambda span: span.shares("reason", _REASONS, _ROWS), _named_shares),
    ]


def _gauge(title: str, value: T, show: Callable[[T], str], style: str = "") -> Row:
    return Row(title, show(value), "", {"now": value}, style)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


# ---- texts -----------------------------------------------------------------------------------------------


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.1f}"


def _two_digits(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"


def _whole_number(value: float) -> str:
    return f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}"


def _milliseconds(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{1000 * seconds:,.1f} ms"


def _positions(rates: dict[str, float]) -> str:
    ordered = [rates[position] for position in sorted(rates, key=int)]
    return f"{_line_of(ordered, highest=1.0)} {' '.join(f'{rate:.0%}' for rate in ordered)}" if ordered else _NONE


def _named_shares(shares: dict[str, float]) -> str:
    return ", ".join(f"{name}: {share:.0%}" for name, share in shares.items() if share > 0) or _NONE


def _named_counts(counts: dict[str, float]) -> str:
    return ", ".join(f"{name}: {count:,.0f}" for name, count in counts.items() if count > 0) or _NONE


def _line_of(values: Sequence[float], highest: float | None = None) -> str:
    top = max(values, default=0.0) if highest is None else highest
    if top <= 0:
        return _LEVELS[0] * len(values)
    return "".join(_LEVELS[min(int(value / top * len(_LEVELS)), len(_LEVELS) - 1)] for value in values)


class NotMetrics(ValueError):
    """The text is not in Prometheus' format."""


class Reading:
    """All samples of one moment."""

    def __init__(self, text: str, at: float) -> None:
        """Parse the text; `at` is the time in seconds, on a clock that all readings share."""
        self.at = at
        self._samples: dict[str, list[Sample]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    self._samples.setdefault(sample.name, []).append(sample)
        except ValueError as error:
            raise NotMetrics(" ".join(str(error).split())[:80]) from None

    def has(self, name: str) -> bool:
        return name in self._samples

    def names(self) -> list[str]:
        return list(self._samples)

    def sum(self, name: str) -> float:
        """Return the sum over all engines and labels; 0 without samples."""
        return sum(sample.value for sample in self._samples.get(name, ()))

    def highest(self, name: str) -> float:
        return max((sample.value for sample in self._samples.get(name, ())), default=0.0)

    def by(self, label: str, name: str) -> dict[str, float]:
        """Return the sums by value of one label, in the order of the text."""
        found: dict[str, float] = {}
        for sample in self._samples.get(name, ()):
            if (value := sample.labels.get(label)) is not None:
                found[value] = found.get(value, 0.0) + sample.value
        return found
