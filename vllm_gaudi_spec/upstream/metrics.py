"""This plugin's metrics, in addition to vLLM's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from vllm_gaudi_spec import metrics
from vllm_gaudi_spec.upstream.patching import patches, wrap

_FIELD = metrics.STATS_FIELD


def carry_metrics() -> None:
    """Add the metrics in `metrics.py` to vLLM's, with and without speculation.

    Reason: vLLM's scheduler sends its statistics to the front end in a dataclass, and loggers use only its fields. This
    patch adds a field, which our schedulers set.
    Remove when: upstream lets a platform send additional metrics.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.stats import SchedulerStats

    if _FIELD not in SchedulerStats.__dataclass_fields__:
        # Undo the changes of the dataclass decorator, so that it can run again.
        for field in dataclasses.fields(SchedulerStats):
            setattr(SchedulerStats, field.name, field)
        for made in ("__init__", "__repr__", "__eq__"):
            delattr(SchedulerStats, made)
        SchedulerStats.__annotations__[_FIELD] = metrics.Figures
        setattr(SchedulerStats, _FIELD, dataclasses.field(default_factory=dict))
        dataclasses.dataclass(SchedulerStats)
    wrap(PrometheusStatLogger, "__init__", _add_metrics)
    wrap(PrometheusStatLogger, "record", _show_metrics)


@patches("vllm.v1.engine.llm_engine:get_metrics_snapshot")
def list_metrics_of_ours(original: Callable[[], list[Any]]) -> list[Any]:
    """Include this plugin's metrics in the result of `LLM.get_metrics()`.

    Reason: upstream lists only metrics whose names start with `vllm:`.
    Remove when: upstream lists the metrics that platforms add.
    """
    from prometheus_client import REGISTRY
    from vllm.v1.metrics.reader import Counter, Gauge

    found = original()
    for metric in REGISTRY.collect():
        if not metric.name.startswith(metrics.PREFIX):
            continue
        for sample in metric.samples:
            if sample.name == metric.name:
                found.append(Gauge(metric.name, sample.labels, sample.value))
            elif sample.name == f"{metric.name}_total":
                found.append(Counter(metric.name, sample.labels, int(sample.value)))
    return found


_LABELS = ["model_name", "engine"]
"""The labels of all vLLM metrics."""


def _add_metrics(
    original: Callable[..., None], logger: Any, vllm_config: Any, engine_indexes: list[int] | None = None
) -> None:
    original(logger, vllm_config, engine_indexes)
    _forget_those_of_another_engine()
    spec_config = vllm_config.speculative_config
    setattr(
        logger,
        _FIELD,
        metrics.Shown(
            logger._counter_cls,
            logger._gauge_cls,
            _LABELS,
            logger.per_engine_labelvalues,
            None if spec_config is None else spec_config.num_speculative_tokens,
        ),
    )


def _forget_those_of_another_engine() -> None:
    """Unregister the metrics of an earlier engine in this process, as vLLM's logger does with its own metrics."""
    from prometheus_client import REGISTRY

    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", "").startswith(metrics.PREFIX):
            REGISTRY.unregister(collector)


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
        getattr(logger, _FIELD).update(engine_idx, getattr(scheduler_stats, _FIELD))
