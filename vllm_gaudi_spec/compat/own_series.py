"""Metrics of our own beside vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from vllm_gaudi_spec import series
from vllm_gaudi_spec.patching import wrap

_OWN = "gaudi_spec"
"""The field of vLLM's record that carries our series."""


def carry_own_series() -> None:
    """Metrics of our own, those of `series.py`.

    Reason: what vLLM's scheduler tells its front end about speculation is a closed record, and its loggers know how to
    show that record alone.
    Remove when: upstream lets a platform send figures of its own.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm, SpecDecodingStats

    if _OWN not in SpecDecodingStats.__dataclass_fields__:
        # What the decorator took from the class or put there, so that it starts anew.
        for known in dataclasses.fields(SpecDecodingStats):
            setattr(SpecDecodingStats, known.name, known)
        for made in ("__init__", "__repr__", "__eq__"):
            delattr(SpecDecodingStats, made)
        SpecDecodingStats.__annotations__[_OWN] = dict[str, int]
        setattr(SpecDecodingStats, _OWN, dataclasses.field(default_factory=dict))
        dataclasses.dataclass(SpecDecodingStats)
    wrap(Scheduler, "make_stats", _send_own_series)
    wrap(SpecDecodingProm, "__init__", _add_own_series)
    wrap(SpecDecodingProm, "observe", _observe_own_series)
    wrap(SpecDecodingLogging, "observe", _log_drafted_steps_only)


def _send_own_series(
    original: Callable[..., Any], scheduler: Any, spec_decoding_stats: Any = None, *args: Any, **kwargs: Any
) -> Any:
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    counts = series.take(scheduler)
    if counts and scheduler.log_stats:
        spec_decoding_stats = spec_decoding_stats or SpecDecodingStats.new(scheduler.num_spec_tokens)
        setattr(spec_decoding_stats, _OWN, counts)
    return original(scheduler, spec_decoding_stats, *args, **kwargs)


def _add_own_series(
    original: Callable[..., None],
    metrics: Any,
    speculative_config: Any,
    labelnames: list[str],
    per_engine_labelvalues: dict[int, list[object]],
    *more: Any,
    **named: Any,
) -> None:
    from vllm.v1.metrics.utils import create_metric_per_engine

    original(metrics, speculative_config, labelnames, per_engine_labelvalues, *more, **named)
    if speculative_config is not None:
        metrics.gaudi_spec = {
            name: create_metric_per_engine(
                metrics._counter_cls(name=name, documentation=text, labelnames=labelnames), per_engine_labelvalues
            )
            for name, text in series.SERIES.items()
        }


def _observe_own_series(
    original: Callable[..., None], metrics: Any, spec_decoding_stats: Any, engine_idx: int = 0
) -> None:
    original(metrics, spec_decoding_stats, engine_idx)
    if metrics.spec_decoding_enabled:
        for name, more in getattr(spec_decoding_stats, _OWN).items():
            metrics.gaudi_spec[name][engine_idx].inc(more)


def _log_drafted_steps_only(original: Callable[..., None], log: Any, spec_decoding_stats: Any) -> None:
    if spec_decoding_stats.num_drafts:  # its averages are over those
        original(log, spec_decoding_stats)
