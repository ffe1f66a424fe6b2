"""Additional metrics: Prometheus series, and the transport of their values from the scheduler to the front end.

The scheduler counts its own decisions and the events that the worker reports. vLLM's `SchedulerStats` carries the
values to the front end, whose Prometheus logger exports them (`upstream.carry_metrics`). A new metric needs an entry in
`SERIES` and a call to `StepMetrics.count`, `count_total` or `set`. docs/reference/metrics.md is also generated from
`SERIES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from vllm_gaudi_spec.records import NoDraftReason

# Audit outcomes.
IDENTICAL = "identical"
TIE = "tie"
DIFFERENT = "different"
AUDIT_RESULTS = (IDENTICAL, TIE, DIFFERENT)
# Reasons for not auditing a request that was selected for an audit.
BUSY = "busy"
ABORTED = "aborted"
RESET = "reset"
LORA = "lora"
GRAMMAR = "grammar"
PENALTIES = "penalties"
PROBABILISTIC = "probabilistic"
INPUTS = "inputs"
AUDIT_REASONS = (BUSY, ABORTED, RESET, LORA, GRAMMAR, PENALTIES, PROBABILISTIC, INPUTS)

# Kinds of tokens in forward passes on prompt chunks.
REAL = "real"
PADDING = "padding"

NUM_DRAFTS = "num_drafts"
"""A label with the values 0 to k."""


class Series(NamedTuple):
    help: str
    label: str = ""
    """An additional label, or empty if the series has only the labels of all vLLM series."""
    values: tuple[str, ...] = ("",)
    """All values of the label. Not used for `NUM_DRAFTS`, whose values depend on k."""
    is_gauge: bool = False
    speculative: bool = True
    """Whether the series exists only with speculation."""

    def list_label_values(self, num_drafts: int) -> Iterable[str]:
        return map(str, range(num_drafts + 1)) if self.label == NUM_DRAFTS else self.values


PREFIX = "gaudi_spec:"
"""Prefix of this plugin's series. vLLM's own series begin with `vllm:`."""
STEPS = "gaudi_spec:steps"
HOST_SYNCS = "gaudi_spec:host_syncs"
PREFILL_TOKENS = "gaudi_spec:prefill_tokens"
COMPILED = "gaudi_spec:compiled_after_warmup"
ROWS = "gaudi_spec:rows"
ROWS_BY_CHOICE = "gaudi_spec:rows_by_choice"
ROWS_WITHOUT_DRAFTS = "gaudi_spec:rows_without_drafts"
SKIPPED_STEPS = "gaudi_spec:skipped_steps"
COVERAGE = "gaudi_spec:vocabulary_coverage"
DRAFTER_FAULTS = "gaudi_spec:drafter_faults"
DRAFTER_SWITCHED_OFF = "gaudi_spec:drafter_switched_off"
AUDITS = "gaudi_spec:audits"
AUDITS_SKIPPED = "gaudi_spec:audits_skipped"

SERIES = {
    STEPS: Series("Steps of the worker (of rank 0) that had something to compute.", speculative=False),
    HOST_SYNCS: Series(
        "Device-to-host syncs (of rank 0). Divide the rate by that of gaudi_spec:steps_total to get the number of syncs"
        " per step. This is at most 1, except that universal_match slem, and a grammar with universal_context "
        "retokenize, need a second sync, and prompt log-probabilities need one for every 64 tokens.",
        speculative=False,
    ),
    PREFILL_TOKENS: Series(
        "Tokens computed in forward passes over prompt chunks (of rank 0). real: tokens of prompts. "
        "padding: tokens that fill a chunk up to its bucket, and empty rows; 0 on devices that skip padding.",
        "kind",
        (REAL, PADDING),
        speculative=False,
    ),
    COMPILED: Series(
        "Graphs compiled after warm-up (of rank 0), while requests waited: shapes missing from the warm-up or, if "
        "larger, the device's own count. The device is queried at every 16th step and when no request is left, so the "
        "value may be up to 16 steps late. It should be 0.",
        speculative=False,
    ),
    ROWS: Series(
        "Requests that decoded in a step, by the number of drafts verified for them. The last step of a prompt is "
        "not counted.",
        NUM_DRAFTS,
    ),
    ROWS_BY_CHOICE: Series(
        "Requests that decoded in a step, by the maximum number of drafts that they could have: the limit set by "
        "adaptive verification and the schedule by batch size, or 0 once the drafter is switched off.",
        NUM_DRAFTS,
    ),
    ROWS_WITHOUT_DRAFTS: Series(
        "Requests that decoded in a step in which no draft was verified for them, by reason. "
        "request: it asked for no drafts. length: its context has reached the drafter's maximum, or the model's. "
        "ending: its next token is its last. load: the schedule by batch size allows no drafts. "
        "goodput: decoding without drafts was expected to be faster. "
        "nothing: the drafter had nothing to propose, or has not read the request yet. "
        "unverified: a grammar or the token budget left no drafts to verify, or, with async scheduling, max_model_len "
        "did, because the scheduler has to count all drafts in flight as accepted. "
        "fault: its drafts could not be used. off: the drafter is switched off after faults.",
        "reason",
        tuple(NoDraftReason),
    ),
    SKIPPED_STEPS: Series("Steps that skipped drafting because it would not have paid off (adaptive verification)."),
    COVERAGE: Series(
        "The fraction of a vocabulary's tokens that have a match in the other one, computed at load. Universal "
        "drafting only; shown from the first step on.",
        "vocabulary",
        ("target", "drafter"),
        is_gauge=True,
    ),
    DRAFTER_FAULTS: Series(
        "Steps whose drafts could not be used: the drafter failed, or returned an invalid token or number."
    ),
    DRAFTER_SWITCHED_OFF: Series(
        "1 if the drafter is switched off until a restart, after three steps in a row whose drafts could not be used."
    ),
    AUDITS: Series(
        "Finished requests that were decoded again without drafts (audit_every), by result. "
        "identical: the same tokens. tie: the same up to a rounding error. different: neither; should be 0.",
        "result",
        AUDIT_RESULTS,
    ),
    AUDITS_SKIPPED: Series(
        "Requests that were chosen for an audit but not audited, by cause. "
        "busy: too few idle steps. aborted: it had no output, or its client or an error ended it. "
        "reset: the engine was paused, or its prefix cache reset. lora: it used an adapter. "
        "grammar: it used a grammar. penalties: it had a repetition penalty and another one. "
        "probabilistic: its rule preserves the distribution, but not each token. "
        "inputs: it had inputs other than token ids.",
        "cause",
        AUDIT_REASONS,
    ),
}


Figures = dict[str, dict[str, float]]
"""Maps a metric and a label value to the increment of a counter or the value of a gauge."""


STATS_FIELD = "gaudi_spec"
"""The field of vLLM's `SchedulerStats` that carries the values."""


# --- in the scheduler ---


class StepMetrics:
    """A scheduler's metrics since the last call to `take`."""

    def __init__(self) -> None:
        self._news: Figures = {}
        self._reported: dict[tuple[str, str], float] = {}
        """Maps a metric and a label value to the most recent total or gauge value."""

    def count(self, name: str, more: float = 1, value: str = "") -> None:
        """Increment a counter or set a gauge. `value` is the label value, if the series has a label."""
        series = SERIES[name]
        assert bool(value) == bool(series.label), name
        figures = self._news.setdefault(name, {})
        figures[value] = more if series.is_gauge else figures.get(value, 0) + more

    def count_total(self, name: str, so_far: float, value: str = "") -> None:
        """Update a counter whose total is kept elsewhere. Smaller totals are ignored, as counters never decrease."""
        if (more := so_far - self._reported.get((name, value), 0)) > 0:
            self._reported[name, value] = so_far
            self.count(name, more, value)

    def set(self, name: str, number: float, value: str) -> None:
        """Set a gauge, which is sent only if its value has changed."""
        if self._reported.get((name, value)) != number:
            self._reported[name, value] = number
            self.count(name, number, value)

    def take(self) -> Figures:
        """Return the metrics since the last call."""
        news, self._news = self._news, {}
        return news


# --- in the front end ---


class Shown:
    """This plugin's series, registered in one of vLLM's Prometheus loggers."""

    def __init__(
        self, counter: Any, gauge: Any, labels: list[str], engines: Mapping[int, list[object]], num_drafts: int | None
    ) -> None:
        """Register the series.

        Args:
            counter: The logger's counter class.
            gauge: The logger's gauge class.
            labels: The labels that all vLLM series have.
            engines: The values of `labels` for each engine.
            num_drafts: k, or None without speculation.
        """
        self._engines = engines
        self._metrics: dict[str, Any] = {}
        self._by_engine: dict[tuple[str, int, str], Any] = {}
        for name, series in SERIES.items():
            if series.speculative and num_drafts is None:
                continue
            labelnames = [*labels, *filter(None, [series.label])]
            if series.is_gauge:  # exported once it has a value
                self._metrics[name] = gauge(name, series.help, labelnames, multiprocess_mode="mostrecent")
                continue
            self._metrics[name] = counter(name, series.help, labelnames)
            for engine in engines:
                for value in series.list_label_values(num_drafts or 0):
                    self._find_metric(name, engine, value)

    def update(self, engine: int, news: Figures) -> None:
        for name, figures in news.items():
            for value, number in figures.items():
                metric = self._find_metric(name, engine, value)
                if SERIES[name].is_gauge:
                    metric.set(number)
                else:
                    metric.inc(number)

    def _find_metric(self, name: str, engine: int, value: str) -> Any:
        key = name, engine, value
        if key not in self._by_engine:
            labels = (*self._engines[engine], *filter(None, [value]))
            self._by_engine[key] = self._metrics[name].labels(*labels)
        return self._by_engine[key]
