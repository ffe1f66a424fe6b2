"""A call by vLLM that workers refuse leaves the engine unchanged."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import UniProcExecutor

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.base import Graphs, Memory
from vllm_gaudi_spec.platforms import base
from vllm_gaudi_spec.refusals.features import refuse_new_weights, refuse_sleep
from vllm_gaudi_spec.runner.residence import Residence
from vllm_gaudi_spec.worker import Worker

TRAITS = SimpleNamespace(name="hpu", mode="lazy", sleeps=False, updates_weights=True)
LAZY: Any = SimpleNamespace(traits=TRAITS, memory=Memory(), graphs=Graphs())


def paused_engine() -> Any:
    """vLLM's engine and executor without a model, after `sleep(level=0)`."""
    executor: Any = UniProcExecutor.__new__(UniProcExecutor)
    worker: Any = Worker.__new__(Worker)
    worker.model_runner = SimpleNamespace(residence=Residence(LAZY, None, None))
    worker.vllm_config, worker.backend = None, LAZY
    executor.sleeping_tags, executor.driver_worker = set(), worker
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
    with pytest.raises(UnsupportedConfigError, match="Sleep is not supported on hpu in lazy mode"):
        engine.release_kv_cache_memory()
    assert engine.is_sleeping()
    assert engine.wake_up()
    assert not engine.is_sleeping()


def test_refusal_of_sleep_says_that_requests_wait() -> None:
    """vLLM pauses the engine before it asks the workers, so clients would wait forever after the refusal."""
    engine = paused_engine()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.scheduler.finish_requests = lambda *of_all: None
    with pytest.raises(UnsupportedConfigError, match="call wake_up if requests wait"):
        engine.sleep(level=1)
    assert engine.is_scheduler_paused()
    assert engine.wake_up()
    assert not engine.is_scheduler_paused()


def config(
    drafter: dict[str, Any] | None = None,
    lora: object = None,
    connector: object = None,
    num_stages: int = 1,
    **target: Any,
) -> Any:
    plain = dict(quantization=None, use_mla=False, is_moe=False, has_inner_state=False)
    draft_config = None if drafter is None else SimpleNamespace(**plain | drafter)
    speculative = SimpleNamespace(draft_model_config=draft_config, parallel_drafting=False)
    return SimpleNamespace(
        model_config=SimpleNamespace(**plain | target),
        speculative_config=None if drafter is None else speculative,
        lora_config=lora,
        kv_transfer_config=connector,
        parallel_config=SimpleNamespace(pipeline_parallel_size=num_stages),
        additional_config={},
    )


def test_plain_weights_may_change() -> None:
    refuse_new_weights(config(), LAZY)
    refuse_new_weights(config(drafter={}), LAZY)


@pytest.mark.parametrize(
    "changed",
    [
        config(quantization="fp8"),
        config(use_mla=True),
        config(is_moe=True),
        config(has_inner_state=True),
        config(lora=object()),
        config(connector=object()),
        config(num_stages=2),
        config(drafter=dict(quantization="awq")),
    ],
    ids=["quantized", "latent", "experts", "recurrent", "adapters", "connector", "stages", "quantized drafter"],
)
def test_weights_that_steps_do_not_read_as_loaded_are_refused(changed: Any) -> None:
    worker: Any = Worker.__new__(Worker)
    worker.vllm_config, worker.backend = changed, LAZY
    with pytest.raises(UnsupportedConfigError, match="start another engine"):
        worker.reload_weights()


def test_devices_that_change_weights_at_load_are_refused() -> None:
    other: Any = SimpleNamespace(traits=SimpleNamespace(name="ascend", updates_weights=False))
    with pytest.raises(UnsupportedConfigError, match="engine with device ascend cannot replace its weights"):
        refuse_new_weights(config(), other)


def test_device_that_cannot_sleep_refuses_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "load_backend", lambda: LAZY)
    with pytest.raises(UnsupportedConfigError, match=r"in lazy mode, .*leave out --enable-sleep-mode"):
        base.SpecPlatform.is_sleep_mode_available()


def test_sleep_that_ends_with_other_weights_names_the_level() -> None:
    awake: Any = SimpleNamespace(traits=SimpleNamespace(**vars(TRAITS) | dict(sleeps=True)))
    refuse_sleep(config(is_moe=True), awake)
    with pytest.raises(UnsupportedConfigError, match="with experts cannot load again; use level 1, and call wake_up"):
        refuse_sleep(config(is_moe=True), awake, level=2)
    with pytest.raises(UnsupportedConfigError, match="leave out --kv-transfer-config, and call wake_up"):
        refuse_sleep(config(connector=object()), awake)


def test_memory_that_cannot_be_restored_stays_asleep() -> None:
    residence: Any = Residence(LAZY, SimpleNamespace(), None)
    residence._asleep["kv_cache"] = lambda: [][0]
    with pytest.raises(IndexError):
        residence.wake_up(None)
    assert [*residence._asleep] == ["kv_cache"]


def test_updates_wait_until_weights_are_awake_and_steps_until_they_are_complete() -> None:
    residence: Any = Residence(LAZY, SimpleNamespace(), None)
    residence._asleep["weights"] = lambda: None
    with pytest.raises(UnsupportedConfigError, match="wake_up with the tag weights"):
        residence.reload()
    residence.check_step(step())
    residence._incomplete = [residence._target]
    with pytest.raises(UnsupportedConfigError, match="call reload_weights"):
        residence.check_step(step())


def step(*, running: tuple[str, ...] = (), resumed: tuple[str, ...] = (), new: dict[str, int] | None = None) -> Any:
    """Return a step with requests that run, that start again after a preemption, and new ones with cached tokens."""
    cached = SimpleNamespace(req_ids=[*running, *resumed], resumed_req_ids=set(resumed))
    added = [SimpleNamespace(req_id=name, num_computed_tokens=number) for name, number in (new or {}).items()]
    tokens = dict.fromkeys([*cached.req_ids, *(new or {})], 1)
    return SimpleNamespace(scheduled_cached_reqs=cached, scheduled_new_reqs=added, num_scheduled_tokens=tokens)


@pytest.mark.parametrize(
    ("scheduled", "mixed"),
    [
        (step(running=("b", "a"), resumed=("c",)), "2 requests.* a"),
        (step(resumed=("a",), new={"b": 0, "c": 32}), None),
    ],
    ids=["running", "read again"],
)
def test_requests_that_read_kv_of_old_weights_are_named_once(
    scheduled: Any, mixed: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    residence: Any = Residence(LAZY, SimpleNamespace(), None)
    residence.check_step(scheduled)
    assert not caplog.messages
    residence._is_new = True
    residence.check_step(step())
    residence.check_step(scheduled)
    residence.check_step(scheduled)
    assert len(caplog.messages) == (mixed is not None)
    assert mixed is None or re.search(mixed, caplog.messages[0])
