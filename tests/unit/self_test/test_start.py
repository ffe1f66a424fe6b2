"""What a worker makes of its self-test."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_gaudi_spec import worker as module
from vllm_gaudi_spec.self_test import run
from vllm_gaudi_spec.self_test.result import FAILED, PASSED, CheckResult, Result, SelfTestError
from vllm_gaudi_spec.worker import Worker


def result(failing: str | None) -> Result:
    checks = [
        CheckResult(
            name=check.name,
            status=FAILED if check.name == failing else PASSED,
            detail="as measured",
            advice=check.advice if check.name == failing else "",
            needed_by=check.needed_by,
            seconds=0.25,
        )
        for check in run.CHECKS
    ]
    return Result(device="hpu", mode="lazy", dtype="bfloat16", checks=tuple(checks))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    logged: list[tuple[int, str]] = []

    def log(level: int) -> Any:
        return lambda text, *args: logged.append((level, text % args))

    for level, name in ((logging.INFO, "info"), (logging.WARNING, "warning")):
        monkeypatch.setattr(module.logger, name, log(level))
    return logged


def start(
    monkeypatch: pytest.MonkeyPatch,
    failing: str | None = None,
    *,
    async_scheduling: bool = True,
    speculation: object = "drafts",
    kv_bytes: int | None = None,
    kv_dtype: str = "fp8_e4m3",
    ranks: int = 1,
    captures: bool = True,
) -> tuple[Worker, list[Any]]:
    given: list[Any] = []

    def check_device_once(*arguments: Any) -> Result:
        given.extend(arguments)
        return result(failing)

    monkeypatch.setattr(module, "check_device_once", check_device_once)
    monkeypatch.setattr(module, "get_tp_group", lambda: SimpleNamespace(world_size=ranks))
    worker = Worker.__new__(Worker)
    worker.backend = SimpleNamespace(traits=SimpleNamespace(captures=captures))
    worker.model_config = SimpleNamespace(dtype=torch.bfloat16)
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=kv_bytes, cache_dtype=kv_dtype)
    worker.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=async_scheduling), speculative_config=speculation
    )
    worker._test_device()
    return worker, given


def test_self_test_runs_where_steps_are_captured(monkeypatch: pytest.MonkeyPatch, lines: list[tuple[int, str]]) -> None:
    """Unless the user skips it."""
    worker, given = start(monkeypatch)
    assert lines == [(logging.INFO, "Self-test of the card: 15 checks passed in 3.8 s.")]
    assert given == [torch.bfloat16, None]
    assert worker.self_test is not None
    assert start(monkeypatch, ranks=2)[1][1].world_size == 2
    assert start(monkeypatch, run.HASH, captures=False)[0].self_test is None
    monkeypatch.setenv("VGS_SELF_TEST", "0")
    assert start(monkeypatch, run.HASH)[0].self_test is None


SWITCHED_OFF: dict[str, tuple[str, dict[str, Any]]] = {
    run.DOWNLOADS: ("set --no-async-scheduling", {"async_scheduling": False}),
    run.VERIFY_ATTENTION: ("leave out --speculative-config", {"speculation": None}),
    run.FP8_KV: ("leave out --kv-cache-dtype", {"kv_dtype": "auto"}),
    run.MEMORY: ("set --kv-cache-memory-bytes", {"kv_bytes": 1 << 30}),
}


@pytest.mark.parametrize("failing", [check.name for check in run.CHECKS if check.name != run.COLLECTIVES])
def test_engine_starts_after_following_the_advice(
    failing: str, monkeypatch: pytest.MonkeyPatch, lines: list[tuple[int, str]]
) -> None:
    """A check that everything needs ends the start with any options."""
    with pytest.raises(SelfTestError, match=f"The self-test of hpu failed. {failing}: as measured; "):
        start(monkeypatch, failing)
    assert not lines
    if failing not in SWITCHED_OFF:
        everything = {name: value for _, off in SWITCHED_OFF.values() for name, value in off.items()}
        with pytest.raises(SelfTestError, match=f"{failing}: as measured; "):
            start(monkeypatch, failing, **everything)
        return
    advice, switched_off = SWITCHED_OFF[failing]
    start(monkeypatch, failing, **switched_off)
    assert [level for level, _ in lines] == [logging.INFO, logging.WARNING]
    assert f"{failing}: as measured; {advice} (not needed" in lines[1][1]
