"""Background warm-up: how requests are served meanwhile, and that nothing is compiled while a request waits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from tests.support.fakes import CapturingBackend, CompilingBackend, CopyingMemory, HostBackend
from tests.support.small_engine import FAVORITES, ROOMY, STANDARD, SmallEngine, Variant
from vllm_gaudi_spec import metrics
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.environment import warms_up_in_background
from vllm_gaudi_spec.records import DECODE, Shape
from vllm_gaudi_spec.refusals import features


@pytest.fixture(autouse=True)
def background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VGS_WARMUP", "background")
    # The small engine's configuration is one of the CPU, on which it is refused.
    monkeypatch.setattr(features, "warms_up_in_background", lambda: False)


def started(
    method: str | None, folder: Path, backend: type[HostBackend] = CompilingBackend, *, overlap: bool = False
) -> SmallEngine:
    engine = SmallEngine(Variant(method, overlap, num_blocks=ROOMY, backend=backend), folder)
    with torch.inference_mode():
        engine.runner.warm_up()
    return engine


def left(engine: SmallEngine) -> int:
    return engine.runner.recorder.num_left


def ask(engine: SmallEngine, name: str) -> None:
    rng = random.Random(name)
    params = rng.choice((dict(temperature=0), dict(temperature=1.0), dict(temperature=1.0, top_k=5, logprobs=2)))
    prompt = rng.choices(FAVORITES, k=rng.randint(3, 25))
    engine.add(name, prompt, SamplingParams(max_tokens=rng.randint(2, 12), seed=len(name), **params))


def texts_of(engine: SmallEngine, idle_steps: int) -> dict[str, list[int]]:
    """Return the texts of requests that come in waves, with idle steps between them."""
    for wave in range(8):
        for number in range(wave % 4 + 1):
            ask(engine, f"{wave} {number}")
        while engine.running:
            engine.step()
        for _ in range(idle_steps):
            engine.step()
    engine.finish()
    return engine.texts


@pytest.mark.parametrize(
    ("method", "backend"),
    [
        *((method, CompilingBackend) for method in (None, "ngram", "ngram_gpu", "draft_model", STANDARD)),
        ("ngram", CapturingBackend),
    ],
    ids=str,
)
def test_background_warm_up_compiles_in_no_step_and_keeps_outputs(
    method: str | None, backend: type[HostBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = started(method, tmp_path, backend)
    assert left(engine) > 0
    texts = texts_of(engine, idle_steps=5)  # `finish` fails at a signature that was not made
    assert left(engine) == 0 == engine.scheduler.step_metrics._reported[metrics.WARM_UP_LEFT, ""]
    assert engine.runner.recorder.warmed == engine.runner.recorder.manifest
    monkeypatch.setenv("VGS_WARMUP", "before")
    assert texts_of(started(method, tmp_path, backend), idle_steps=0) == texts


def test_steps_are_padded_to_warm_shapes_during_background_warm_up(tmp_path: Path) -> None:
    engine = started(None, tmp_path)
    runner, seen = engine.runner, set[Shape]()
    compute = runner.compute
    runner.compute = lambda batch: (seen.add(batch.shape), compute(batch))[1]  # type: ignore[method-assign, func-returns-value]

    def shapes() -> set[Shape]:
        seen.clear()
        ask(engine, "one")
        while engine.running:
            engine.step()
        del engine.texts["one"], engine.held["one"]
        engine.ended.clear()
        return {shape for shape in seen if shape.phase == DECODE}

    largest = max(runner.shapes.decode_rows)
    before = left(engine)
    assert {shape.rows for shape in shapes()} == {largest}
    assert left(engine) == before, "a step with a request leaves it alone"
    engine.step()
    assert left(engine) == before - 1
    while left(engine):
        engine.step()
    assert {shape.rows for shape in shapes()} == {1}


def test_paused_engine_does_not_warm_up(tmp_path: Path) -> None:
    engine = started(None, tmp_path)
    assert engine.scheduler.has_requests()
    engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not engine.scheduler.has_requests()


def test_background_warm_up_continues_after_a_pause_with_abort(tmp_path: Path) -> None:
    """The pause is that of `pause_generation(mode="abort")`."""
    engine = started(None, tmp_path)
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert not engine.scheduler.has_requests()
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert engine.scheduler.has_requests()


def test_shutdown_does_not_wait_for_background_warm_up(tmp_path: Path) -> None:
    engine = started(None, tmp_path)
    ask(engine, "one")
    engine.scheduler.shut_down()
    assert engine.scheduler.has_requests()
    while engine.running:
        engine.step()
    engine.step()  # vLLM's, after the last request
    assert left(engine) > 0
    assert not engine.scheduler.has_requests()


def test_warm_up_waits_for_its_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may reuse the host buffer of a download once somebody has waited for it."""
    counts = Counter[str]()
    start_download = CopyingMemory.start_download

    def start(memory: CopyingMemory, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        counts["started"] += 1
        wait = start_download(memory, tensor)

        def waited() -> torch.Tensor:
            counts["waited"] += 1
            return wait()

        return waited

    monkeypatch.setattr(CopyingMemory, "start_download", start)
    engine = started("ngram_gpu", tmp_path, overlap=True)
    while left(engine):
        engine.step()
    assert 0 < counts["waited"] == counts["started"]


def test_start_fails_if_background_warm_up_would_run_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1000]

    def free_bytes(_: CopyingMemory) -> int:
        free[0] -= 1
        return free[0]

    monkeypatch.setattr(CopyingMemory, "free_bytes", free_bytes)
    engine = started(None, tmp_path)
    # Each of the others would keep as much as one did.
    free[0] = 1000 - free[0] + left(engine) // 2
    words = r"runs of background warm-up may keep .*, or leave out VGS_WARMUP"
    with pytest.raises(UnsupportedConfigError, match=words):
        started(None, tmp_path)


def test_serving_a_postponed_signature_is_unexpected(tmp_path: Path) -> None:
    recorder = started(None, tmp_path).runner.recorder
    postponed = sorted(recorder._postponed, key=str)
    recorder.saw(postponed[0])
    assert recorder.unexpected == postponed[:1]


def test_unknown_warm_up_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VGS_WARMUP", "never")
    with pytest.raises(UnsupportedConfigError, match="use before or background"):
        warms_up_in_background()
