"""Warm-up, which runs every step signature once on padding, with the functions that serve requests."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tqdm import tqdm
from vllm.logger import init_logger

from vllm_gaudi_spec import environment
from vllm_gaudi_spec.config import ranks_in_step
from vllm_gaudi_spec.graphs import PROMPT_CHUNKS, Job, drafts_signature, report_signature, report_sizes
from vllm_gaudi_spec.records import DECODE, Planned, Shape
from vllm_gaudi_spec.runner.buckets import expected_padding
from vllm_gaudi_spec.runner.memory import WarmUpMemory
from vllm_gaudi_spec.runner.planning import make_sample_batch
from vllm_gaudi_spec.sampling.branches import Branch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from vllm_gaudi_spec.records import SampleShape
    from vllm_gaudi_spec.runner.model_runner import ModelRunner

logger = init_logger(__name__)

_TIMED_STEPS, _TIMED_ROUNDS = 3, 3
"""Number of decodes to average in a measurement, and number of measurements. Only the fastest measurement counts."""
_MAX_SLOWDOWN = 1.03
"""A size is dropped if its decode takes more than this factor times as long as a larger decode."""


def jobs(runner: ModelRunner) -> Iterator[Job]:
    """Yield warm-up runs for every step signature that the configuration can produce, largest forward passes first."""
    yield Job("states", partial(_touch_states, runner))
    for extension in runner.extensions:
        yield from extension.jobs()
    for shape in runner.shapes.all():
        kind = "decodes" if shape.phase == DECODE else PROMPT_CHUNKS
        yield Job(kind, partial(_forward, runner, shape), (shape,), shape.tokens)
    if runner.pooling is not None or not runner.samples:
        return
    for of_pass, branch in runner.sample_shapes.every(runner.sampling.branches):
        for num_drafts in runner.drafting.pass_drafts:
            yield _sampling_pass(runner, of_pass, branch, num_drafts)
    yield from runner.drafting.jobs()


def manifest(runner: ModelRunner) -> set[Hashable]:
    """Return every step signature that the configuration can produce, without running anything."""
    return {signature for job in jobs(runner) for signature in job.signatures}


def should_run(job: Job, max_tokens: int) -> bool:
    """Whether warm-up runs a job instead of only listing its signatures.

    A job runs if `max_tokens` is -1, or if it is common and has at most `max_tokens` tokens. On devices that do not
    compile each shape, running all other jobs would only take time.
    """
    return max_tokens < 0 or (job.is_common and job.num_tokens <= max_tokens)


def warm_up(runner: ModelRunner) -> None:
    """Run warm-up jobs with up to `warmup_tokens` tokens, or all of them if that option is -1."""
    recorder, backend = runner.recorder, runner.backend
    asked = runner.options.warmup_tokens
    max_tokens = backend.traits.warmup_tokens if asked is None else asked
    memory = WarmUpMemory(backend.memory, runner.vllm_config, runner.kv_cache.num_bytes)
    found = [*jobs(runner)]
    recorder.expect(signature for job in found for signature in job.signatures)
    if environment.skip_warmup():
        logger.warning("Warm-up skipped (VGS_SKIP_WARMUP, or VLLM_SKIP_WARMUP): first steps of each shape may be slow.")
        _finish_warm_up(runner)
        return
    chosen = [job for job in found if should_run(job, max_tokens)]
    kinds = Counter(job.kind for job in chosen)
    logger.info("Warm-up: %s.", ", ".join(f"{count} {kind}" for kind, count in kinds.items()))
    shapes = runner.shapes
    logger.info(
        "Decodes of %s rows, %s queries and %s; prompt chunks of %s tokens over contexts of %s.",
        _join_sizes(shapes.decode_rows),
        _join_sizes(shapes.decode_queries),
        f"{_join_sizes(shapes.entries)} blocks" if shapes.entries else f"contexts of {_join_sizes(shapes.contexts)}",
        _join_sizes(shapes.chunk_lengths),
        _join_sizes(tuple(sorted({shape.context for shape in shapes.prefills()}))),
    )
    if shapes.computes_padding:
        logger.info(
            "If the lengths of prompt chunks are evenly distributed, %.0f %% of the tokens computed for them are "
            "padding%s.",
            100 * expected_padding(shapes.chunk_lengths),
            f", in slices of {shapes.slice_tokens} tokens" if shapes.slice_tokens else "",
        )
    started = time.perf_counter()
    with (
        backend.graphs.compiling_only(),
        tqdm(chosen, desc="Warm-up", unit="run", disable=not runner.shows_progress) as bar,
    ):
        for number, job in enumerate(bar, start=1):
            recipes = backend.graphs.num_recipes()
            bar.set_postfix_str(f"{job.kind}, {recipes} recipes" if recipes else job.kind, refresh=False)
            with memory.measure(job, chosen[number:]):
                job.run()
    backend.memory.synchronize()
    if summary := memory.summary():
        logger.info(summary)
    if kinds["decodes"]:
        for loaded in (runner.target, runner.drafter):
            if loaded is not None:
                loaded.check_kv_is_written()
    else:
        logger.info("Warm-up ran no decode, so it could not check that every layer writes its KV.")
    if backend.traits.times_decode_sizes and not runner.options.batch_buckets:
        _drop_slow_sizes(runner, max_tokens)
    if runner.speculation is not None and runner.speculation.is_adaptive:
        recorder.step_times = _time_steps(runner, runner.speculation.widths, max_tokens)
    _finish_warm_up(runner)
    logger.info("Warm-up took %.1f s and ran %d step signatures.", time.perf_counter() - started, len(recorder.warmed))


def _join_sizes(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


def _finish_warm_up(runner: ModelRunner) -> None:
    runner.recorder.warm_up_done(runner.backend.memory.num_host_syncs)
    runner.backend.graphs.warmed_up()


def _touch_states(runner: ModelRunner) -> None:
    runner.requests.warm_up()
    runner.kv_cache.warm_up()
    if runner.pooling is None:
        runner.sampling.warm_up()
    for extension in runner.extensions:
        extension.warm_up()


def _forward(runner: ModelRunner, shape: Shape) -> None:
    runner.compute(runner.make_batch(Planned.make_padding(shape)))


def _drop_slow_sizes(runner: ModelRunner, max_tokens: int) -> None:
    """Stop padding decodes to numbers of rows that take longer than a larger number.

    Matmul kernels are slow at some sizes. For example, an 8B model on an H200 takes longer for 448 tokens than for 512.
    """
    parallel = runner.vllm_config.parallel_config
    if parallel.world_size > 1 or ranks_in_step(runner.vllm_config) > 1:
        return  # ranks measure different times but must choose the same shapes
    queries, sizes = runner.shapes.decode_queries[-1], runner.shapes.decode_rows
    timed = [rows for rows in sizes if max_tokens < 0 or rows * queries <= max_tokens]
    runs = [partial(_forward, runner, runner.shapes.decode(queries, [], rows)) for rows in timed]
    rounds = [[_time_runs(runner, run) for run in runs] for _ in range(_TIMED_ROUNDS)]
    shortest = math.inf
    dropped: list[int] = []
    for rows, *seconds in reversed([*zip(timed, *rounds, strict=True)]):
        if min(seconds) > _MAX_SLOWDOWN * shortest:
            dropped.insert(0, rows)
        shortest = min(shortest, *seconds)
    if dropped:
        logger.info(
            "Decodes of %s rows take longer than some with more rows, so they are padded to those.",
            _join_sizes(tuple(dropped)),
        )
        runner.shapes = replace(runner.shapes, decode_rows=tuple(rows for rows in sizes if rows not in dropped))


def _time_runs(runner: ModelRunner, run: Callable[[], None]) -> float:
    """Return the seconds per run in a series of identical runs, between which the host does not wait."""
    run()  # the first run may be slower
    runner.backend.memory.synchronize()
    started = time.perf_counter()
    for _ in range(_TIMED_STEPS):
        run()
    runner.backend.memory.synchronize()
    return (time.perf_counter() - started) / _TIMED_STEPS


def _time_steps(runner: ModelRunner, widths: tuple[int, ...], max_tokens: int) -> dict[int, list[float]]:
    """Return the seconds that a decode on padding takes, by number of rows and then by number of drafts per row.

    There is no graph yet for decodes of more than `max_tokens` tokens, so their times are extrapolated from fewer rows.
    Measurements alternate between numbers of drafts, so that a brief pause does not make one look slow.
    """
    sizes = [*dict.fromkeys(shape.rows for shape in runner.shapes.plain_decodes())]
    numbers = (0, *widths)
    measured: dict[int, dict[int, float]] = {num: {} for num in numbers}
    for rows in sizes:
        timed = [num for num in numbers if rows == sizes[0] or max_tokens < 0 or rows * (1 + num) <= max_tokens]
        runs = [partial(_run_step, runner, rows, num) for num in timed]
        turns = [[_time_runs(runner, run) for run in runs] for _ in range(_TIMED_ROUNDS)]
        for num, *seconds in zip(timed, *turns, strict=True):
            measured[num][rows] = min(seconds)
    largest = {num: max(measured[num]) for num in numbers}
    # Decodes without drafts cover the widest range of rows. Differences between a few rows would be mostly noise.
    slope = (measured[0][largest[0]] - measured[0][sizes[0]]) / max(largest[0] - sizes[0], 1)

    def extrapolate(rows: int, num: int) -> float:
        return measured[num][largest[num]] + max(slope, 0.0) * (1 + num) * (rows - largest[num])

    times = {
        rows: [measured[num][rows] if rows in measured[num] else extrapolate(rows, num) for num in numbers]
        for rows in sizes
    }
    logger.debug("Seconds per decode by number of rows, for %s drafts per row: %s.", numbers, times)
    return times


def _run_step(runner: ModelRunner, rows: int, num_drafts: int) -> None:
    _forward(runner, runner.shapes.decode(1 + num_drafts, [], rows))
    sample_shape = runner.sample_shapes.fit(1 + num_drafts, [1 + num_drafts] * min(rows, runner.max_rows), Branch())
    batch = make_sample_batch(runner.requests, sample_shape, [])
    pass_drafts = runner.drafting.choose_pass_drafts(num_drafts)
    runner.sample(batch, runner.sampling.make_pass(batch, Branch(), {}, *pass_drafts))
    runner.drafting.propose_for_padding(rows, num_drafts)
    runner.backend.graphs.step_done()


def _sampling_pass(runner: ModelRunner, shape: SampleShape, branch: Branch, num_drafts: int) -> Job:
    """Create the warm-up job for a sampling pass and for the reports that its step may send.

    The sampling pass packs its report, unless it includes log-probabilities or drafts from another graph.
    """
    sizes, has_drafts = report_sizes(shape, branch), runner.drafting.reports_drafts
    reports = [report_signature(sizes, has_drafts=True)] if has_drafts else []
    if any(branch.select_reports()):
        reports.append(report_signature(sizes, has_drafts=num_drafts > 0))
    drafts = [drafts_signature(shape.rows)] if has_drafts else []
    signatures = ((*shape, branch, num_drafts), *reports, *drafts)
    run = partial(_sample, runner, shape, branch, num_drafts)
    num_tokens = shape.positions or shape.rows * shape.queries
    return Job("sampling passes", run, signatures, num_tokens, branch == Branch())


def _sample(runner: ModelRunner, shape: SampleShape, branch: Branch, num_drafts: int) -> None:
    batch = make_sample_batch(runner.requests, shape, [])
    step = runner.sample(batch, runner.sampling.make_pass(batch, branch, {}, num_drafts))
    if runner.drafting.pass_error is not None:
        raise runner.drafting.pass_error
    # Wait for the copy, because a device may reuse its host buffer for the next copy.
    runner.reports.send(step).to_host()
    if runner.drafting.reports_drafts:
        step.drafts, step.packed = runner.drafts_after(step), None
        runner.reports.send(step).to_host()
