"""Warm-up jobs make the signatures that they list, and `warmup_tokens` leaves out some of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.support.fakes import CapturingBackend, CompilingBackend, HostBackend
from tests.support.small_engine import HEADS, PARALLEL, RETOKENIZE, SCARCE, STANDARD, SmallEngine, Variant, greedy_text
from tests.support.warm_up import listed, run_jobs
from vllm_gaudi_spec.drafting.ngram import DeviceNgramProposer
from vllm_gaudi_spec.graphs import Job
from vllm_gaudi_spec.records import Shape
from vllm_gaudi_spec.runner import shapes, warmup
from vllm_gaudi_spec.runner.warmup import jobs, manifest, should_run

METHODS = (None, "ngram", "ngram_gpu", "draft_model", PARALLEL, RETOKENIZE, STANDARD, *HEADS)
ALWAYS_RIGHT = ("draft_model", PARALLEL, STANDARD, *HEADS)
USUAL_BRANCHES = 40
"""A few of the thousands of branches of a device that does not compile. Sampling passes differ in nothing else."""


def some(found: list[Job]) -> list[Job]:
    """Return all jobs except sampling passes, and an even selection of those."""
    passes = [job for job in found if job.kind == "sampling passes"]
    return [job for job in found if job.kind != "sampling passes"] + passes[:: -(-len(passes) // USUAL_BRANCHES)]


@pytest.mark.parametrize("backend", [HostBackend, CapturingBackend, CompilingBackend])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_each_job_makes_the_signatures_that_it_lists(
    method: str | None, backend: type[HostBackend], tmp_path: Path
) -> None:
    engine = SmallEngine(Variant(method, backend=backend), tmp_path)
    runner = engine.runner
    assert runner.recorder.manifest == manifest(runner)
    with torch.inference_mode():
        run_jobs(some(list(jobs(runner))), runner.recorder)
    prompt = list(range(30, 56))
    engine.add("first", prompt, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    engine.finish()
    assert engine.texts["first"] == greedy_text(prompt, 30)
    if method in ALWAYS_RIGHT:
        assert engine.num_accepted == engine.num_verified > 20, "nothing is left of warm-up"


def test_warm_up_fails_if_drafting_in_a_pass_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = SmallEngine(Variant("ngram_gpu"), tmp_path).runner
    monkeypatch.setattr(DeviceNgramProposer, "propose", lambda proposer, request: 1 / 0)
    with torch.inference_mode(), pytest.raises(ZeroDivisionError):
        run_jobs(some(list(jobs(runner))), runner.recorder)


@pytest.mark.parametrize("method", ["draft_model", RETOKENIZE])
def test_warm_up_limit_lists_more_than_it_runs(method: str, tmp_path: Path) -> None:
    runner = SmallEngine(Variant(method), tmp_path).runner
    found = list(jobs(runner))
    assert all(should_run(job, -1) for job in found)
    ran = [job for job in found if should_run(job, 4)]
    assert all(job.num_tokens <= 4 and job.is_common for job in ran)
    assert {job.kind for job in ran} >= {"states", "decodes", "sampling passes"}
    assert set(listed(ran)) < set(listed(found)) == manifest(runner)


@pytest.mark.parametrize("backend", [HostBackend, CapturingBackend])
@pytest.mark.parametrize("method", METHODS[1:], ids=str)
def test_warm_up_times_decodes_of_each_size_and_number_of_drafts(
    method: str, backend: type[HostBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock counts target forwards, drafting rounds and reads of drafters."""
    engine = SmallEngine(Variant(method, backend=backend, adaptive=True), tmp_path)
    runner, recorder = engine.runner, engine.runner.recorder
    seen: list[Any] = []
    monkeypatch.setattr(recorder, "saw", seen.append)
    monkeypatch.setattr(warmup.time, "perf_counter", lambda: float(len(seen)))
    widths = runner.speculation.widths
    with torch.inference_mode():
        times = warmup._time_steps(runner, widths, -1)
    assert [*times] == [*runner.shapes.decode_rows]
    parts = next(iter(times.values()))
    assert len(parts) == len(widths) + 1 > 2
    assert times == dict.fromkeys(times, parts), "each size runs the same parts"
    has_rounds = runner.speculation.needs_device and runner.drafting.pass_drafts == (0,)
    assert {later - parts[0] for later in parts[1:]} == {1.0 if has_rounds else 0.0}, "a round of drafts"
    assert {shape.rows for shape in seen if isinstance(shape, Shape)} == set(times)
    assert {shape.queries for shape in seen if isinstance(shape, Shape)} == {1, *(1 + width for width in widths)}
    assert set(seen) <= recorder.manifest
    monkeypatch.undo()
    prompt = list(range(30, 56))
    engine.add("first", prompt, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    engine.finish()
    assert engine.texts["first"] == greedy_text(prompt, 30)


@pytest.mark.parametrize(("num_blocks", "num_timed"), [(SCARCE, 2), (1, 1)])
def test_warm_up_times_buckets_of_more_rows_than_may_run(
    num_blocks: int, num_timed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`batch_buckets` may go beyond `--max-num-seqs`, and either beyond the rows that the KV blocks are enough for."""
    divide = shapes.divided_powers

    def list_two(least: int, most: int, *others: int) -> tuple[int, ...]:
        return (most, most + 1) if least == 1 else divide(least, most, *others)

    monkeypatch.setattr(shapes, "divided_powers", list_two)
    variant = Variant("draft_model", backend=CompilingBackend, adaptive=True, num_blocks=num_blocks)
    runner = SmallEngine(variant, tmp_path).runner
    with torch.inference_mode():
        times = warmup._time_steps(runner, runner.speculation.widths, -1)
    assert [*times] == [runner.max_rows, runner.max_rows + 1][:num_timed]
    assert not runner.recorder.unexpected


def test_time_of_decode_without_graph_is_extrapolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = SmallEngine(Variant("draft_model", adaptive=True), tmp_path).runner
    measured: list[tuple[int, int]] = []

    def measure(runner: Any, run: Any) -> float:
        _, rows, num_drafts = run.args
        measured.append((rows, num_drafts))
        return 5 + rows * (1 + num_drafts)

    monkeypatch.setattr(warmup, "_time_runs", measure)
    sizes, widths = runner.shapes.decode_rows, runner.speculation.widths
    limit = 6
    for rows, row in warmup._time_steps(runner, widths, limit).items():
        for num_drafts, seconds in zip((0, *widths), row, strict=True):
            assert seconds == 5 + rows * (1 + num_drafts)
    assert all(rows == sizes[0] or rows * (1 + num_drafts) <= limit for rows, num_drafts in measured)


@pytest.mark.parametrize(
    ("is_listed", "max_tokens", "drops"),
    [(False, -1, True), (True, -1, False), (False, 2, False)],
    ids=["default", "user's", "without graphs"],
)
def test_warm_up_drops_default_sizes_that_take_longer_than_larger_ones(
    is_listed: bool, max_tokens: int, drops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause during a single measurement changes nothing."""

    class Timed(CapturingBackend):
        traits = replace(CapturingBackend.traits, times_decode_sizes=True)

    engine = SmallEngine(Variant("draft_model", backend=Timed), tmp_path)
    runner, sizes = engine.runner, engine.runner.shapes.decode_rows
    runner.options = replace(runner.options, batch_buckets=sizes if is_listed else None, warmup_tokens=max_tokens)
    seconds = {sizes[-1]: 5.0, sizes[-2]: 5.2, sizes[0]: 4.1}  # 4 and 2.5 % longer than a larger size
    assert len(sizes) > len(seconds)
    timed: list[int] = []

    def measure(runner: Any, run: Any) -> float:
        timed.append(rows := run.args[1].rows)
        return seconds.get(rows, 4.0) * (1 if timed.count(rows) > 1 else 1 + rows % 3)

    monkeypatch.setattr(warmup, "_time_runs", measure)
    with torch.inference_mode():
        warmup.warm_up(runner)
    assert runner.shapes.decode_rows == ((*sizes[:-2], sizes[-1]) if drops else sizes)
    if max_tokens > 0:
        return  # the next steps make graphs
    prompt = list(range(30, 56))
    engine.add("first", prompt, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    engine.finish()
    assert engine.texts["first"] == greedy_text(prompt, 30)
    assert not runner.recorder.unexpected
