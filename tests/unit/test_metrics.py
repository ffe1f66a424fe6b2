"""Our series on their way: from a scheduler, through vLLM's record, to what its Prometheus logger shows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.engine import EngineCoreOutputs, llm_engine
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.reader import Counter, Gauge
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.unit.test_config import engine_config
from vllm_gaudi_spec import metrics, upstream
from vllm_gaudi_spec.metrics import COMPILED, COVERAGE, DRAFTER_FAULTS, HOST_SYNCS, ROWS, SERIES, STEPS


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    upstream.apply()
    yield
    unregister_vllm_metrics()


def logger_of(folder: Path, speculative: dict[str, Any] | None, engines: list[int]) -> PrometheusStatLogger:
    return PrometheusStatLogger(engine_config(folder, speculative, served_model_name="tiny"), engines)


def record(logger: PrometheusStatLogger, engine: int, news: metrics.Figures) -> None:
    """As it comes from an engine's process."""
    made = EngineCoreOutputs(scheduler_stats=SchedulerStats(gaudi_spec=news))
    came = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(made))
    logger.record(came.scheduler_stats, None, engine_idx=engine)


def shown(name: str, engine: int = 0, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "tiny", "engine": str(engine)} | labels)


def test_all_series_are_exported_from_the_start(tmp_path: Path) -> None:
    """With its labels, at 0: a rate over what was not there before would miss the first one."""
    logger_of(tmp_path, dict(method="ngram"), [0])
    families = {f.name: f for f in text_string_to_metric_families(generate_latest(REGISTRY).decode())}
    vllms = families["vllm:num_requests_running"].samples[0].labels
    for name, one in SERIES.items():
        assert families[name].documentation == one.help
        assert families[name].type == ("gauge" if one.is_gauge else "counter")
        samples = [sample for sample in families[name].samples if sample.name == f"{name}_total"]
        if one.is_gauge:
            assert not families[name].samples, "nothing is known yet, which is not 0"
            continue
        labels_of_one = {"": [{}]}.get(one.label, [{one.label: value} for value in one.list_label_values(3)])
        assert [sample.labels for sample in samples] == [vllms | more for more in labels_of_one]
        assert {sample.value for sample in samples} == {0}


def test_engines_have_separate_figures(tmp_path: Path) -> None:
    logger = logger_of(tmp_path, dict(method="ngram"), [0, 1])
    for _ in range(2):
        record(logger, 1, {ROWS: {"0": 3, "2": 1}, DRAFTER_FAULTS: {"": 1}, COVERAGE: {"target": 0.25}})
    record(logger, 0, {ROWS: {"2": 5}})
    assert shown(f"{ROWS}_total", 1, num_drafts="0") == 6
    assert [shown(f"{ROWS}_total", engine, num_drafts="2") for engine in (0, 1)] == [5, 2]
    assert shown(f"{DRAFTER_FAULTS}_total", 1) == 2
    assert shown(COVERAGE, 1, vocabulary="target") == 0.25, "it is set, not added to"
    assert shown(COVERAGE, 0, vocabulary="target") is None


def test_offline_metrics_include_ours(tmp_path: Path) -> None:
    record(logger_of(tmp_path, dict(method="ngram"), [0]), 0, {STEPS: {"": 7}, COVERAGE: {"drafter": 0.5}})
    upstream.list_metrics_of_ours()
    listed = llm_engine.get_metrics_snapshot()
    found = {metric.name: metric for metric in listed if metric.name in (STEPS, COVERAGE)}
    labels = {"model_name": "tiny", "engine": "0"}
    assert found == {
        STEPS: Counter(STEPS, labels, 7),
        COVERAGE: Gauge(COVERAGE, labels | {"vocabulary": "drafter"}, 0.5),
    }


def test_device_metrics_exist_without_speculation(tmp_path: Path) -> None:
    logger = logger_of(tmp_path, None, [0])
    record(logger, 0, {STEPS: {"": 2}, HOST_SYNCS: {"": 1}})
    ours = {f.name for f in REGISTRY.collect() if f.name.startswith(metrics.PREFIX)}
    assert ours == {STEPS, HOST_SYNCS, metrics.PREFILL_TOKENS, COMPILED}
    assert (shown(f"{STEPS}_total"), shown(f"{HOST_SYNCS}_total"), shown(f"{COMPILED}_total")) == (2, 1, 0)
