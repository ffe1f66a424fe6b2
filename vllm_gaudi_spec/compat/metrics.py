"""Metrics of our own beside vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from vllm_gaudi_spec.compat.patching import wrap
from vllm_gaudi_spec.scheduling import metrics

_OWN = metrics.STATS_FIELD


def carry_metrics() -> None:
    """Metrics of our own, those of `scheduling/metrics.py`, with speculation and without.

    Reason: what vLLM's scheduler sends its front end is a closed record, and its loggers show that alone. Ours travel
    in one more field of it, which our schedulers fill, so that vLLM's own figures are what they are without us.
    Remove when: upstream lets a platform send figures of its own.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.stats import SchedulerStats

    if _OWN not in SchedulerStats.__dataclass_fields__:
        # What the decorator took from the class or put there, so that it starts anew.
        for known in dataclasses.fields(SchedulerStats):
            setattr(SchedulerStats, known.name, known)
        for made in ("__init__", "__repr__", "__eq__"):
            delattr(SchedulerStats, made)
        SchedulerStats.__annotations__[_OWN] = metrics.Figures
        setattr(SchedulerStats, _OWN, dataclasses.field(default_factory=dict))
        dataclasses.dataclass(SchedulerStats)
    wrap(PrometheusStatLogger, "__init__", _add_metrics)
    wrap(PrometheusStatLogger, "record", _show_metrics)


_LABELS = ["model_name", "engine"]
"""Of all of vLLM's series."""


def _add_metrics(
    original: Callable[..., None], logger: Any, vllm_config: Any, engine_indexes: list[int] | None = None
) -> None:
    original(logger, vllm_config, engine_indexes)
    given = vllm_config.speculative_config
    setattr(
        logger,
        _OWN,
        metrics.Shown(
            logger._counter_cls,
            logger._gauge_cls,
            _LABELS,
            logger.per_engine_labelvalues,
            None if given is None else given.num_speculative_tokens,
        ),
    )


def _show_metrics(
    original: Callable[..., None],
    logger: Any,
    scheduler_stats: Any,
    iteration_stats: Any,
    mm_cache_stats: Any = None,
    engine_idx: int = 0,
) -> None:
    original(logger, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
    if scheduler_stats is not None:
        getattr(logger, _OWN).update(engine_idx, getattr(scheduler_stats, _OWN))
