"""A call by vLLM that workers refuse leaves the engine unchanged."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import UniProcExecutor

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.worker import Worker


def paused_engine() -> Any:
    """vLLM's engine and executor without a model, after `sleep(level=0)`."""
    executor: Any = UniProcExecutor.__new__(UniProcExecutor)
    executor.sleeping_tags, executor.driver_worker = set(), Worker.__new__(Worker)
    states: list[PauseState] = [PauseState.PAUSED_ALL]
    engine: Any = EngineCore.__new__(EngineCore)
    engine.model_executor, engine.batch_queue = executor, None
    engine.is_scheduler_paused = lambda: states[-1] != PauseState.UNPAUSED
    engine.scheduler = SimpleNamespace(
        has_requests=lambda: False, set_pause_state=states.append, get_kv_connector=lambda: None
    )
    engine._reset_caches = lambda: None
    return engine


def test_engine_continues_after_refused_release_of_kv_memory() -> None:
    """vLLM would believe that the memory was released, and such an engine schedules nothing."""
    engine = paused_engine()
    with pytest.raises(UnsupportedConfigError, match="Sleep mode is not supported"):
        engine.release_kv_cache_memory()
    assert engine.is_sleeping()
    assert engine.wake_up()
    assert not engine.is_sleeping()


def test_refusal_of_sleep_says_that_requests_wait() -> None:
    """vLLM pauses the engine before it asks the workers, so clients would wait forever after the refusal."""
    engine = paused_engine()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.scheduler.finish_requests = lambda *of_all: None
    engine.model_executor.driver_worker.backend = SimpleNamespace(memory=SimpleNamespace(synchronize=lambda: None))
    with pytest.raises(UnsupportedConfigError, match="requests wait until wake_up"):
        engine.sleep(level=1)
    assert engine.is_scheduler_paused()
    assert engine.wake_up()
    assert not engine.is_scheduler_paused()
