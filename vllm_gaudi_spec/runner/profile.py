"""The profile run, which measures the peak memory of the largest steps in order to choose the size of the KV cache.

Steps run on padding without being captured, and the KV cache has only a few blocks. Their sizes are those of a warm-up
whose KV cache has all of the remaining memory, slightly more than the cache will actually get.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_gaudi_spec.config import UnsupportedConfigError, format_size
from vllm_gaudi_spec.graphs import StepRecorder
from vllm_gaudi_spec.runner.memory import WarmUpMemory, suggest_option
from vllm_gaudi_spec.runner.warmup import jobs, manifest
from vllm_gaudi_spec.upstream.kv_cache import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm_gaudi_spec.upstream.worker import clear_layer_kv_caches

if TYPE_CHECKING:
    from vllm_gaudi_spec.graphs import Job
    from vllm_gaudi_spec.runner.model_runner import ModelRunner
    from vllm_gaudi_spec.upstream.kv_cache import KVCacheConfig

logger = init_logger(__name__)

_BLOCKS = 2
"""Number of KV blocks in a profile run: the pad block and one more."""


def peak_bytes(runner: ModelRunner, budget: int) -> int:
    """Return the number of bytes that the largest steps need in addition to weights and KV, or 0 if unknown.

    `budget` is the number of bytes that the KV cache would get if steps needed no memory.
    """
    if not runner.backend.memory.measures_peak:
        return 0
    before = dict(vars(runner))
    try:
        peaks = _peaks(runner, *_kv_cache_configs(runner, budget))
    finally:
        vars(runner).clear()
        vars(runner).update(before)
        clear_layer_kv_caches(runner.vllm_config.compilation_config.static_forward_context.values())
        gc.collect()  # parts of the runner form reference cycles
    needed = ", ".join(f"{format_size(peak)} ({kind})" for kind, peak in peaks.items())
    logger.info("The largest steps need %s.", needed)
    kind = max(peaks, key=lambda kind: peaks[kind])
    if peaks[kind] >= budget:
        raise UnsupportedConfigError(
            f"The largest steps need {format_size(peaks[kind])} ({kind}), but only {format_size(budget)} are available "
            f"for them and the KV cache; lower {suggest_option(runner.vllm_config, kind, kv_bytes=0, missing=0)}."
        )
    return peaks[kind]


def _peaks(runner: ModelRunner, few: KVCacheConfig, num_blocks: int) -> dict[str, int]:
    """Return the peak memory use of each kind of warm-up run. This function modifies the runner."""
    memory = runner.backend.memory
    runner.backend = replace(runner.backend, graphs=runner.backend.graphs.uncaptured())
    runner.recorder = StepRecorder()
    runner.initialize_kv_cache(few, profiled_blocks=num_blocks)
    runner.recorder.expect(manifest(runner))
    peaks: dict[str, int] = {}
    measured = WarmUpMemory(memory, runner.vllm_config, kv_bytes=0, where="in the profile run")
    chosen = list(_largest(jobs(runner)))
    for number, job in enumerate(chosen, start=1):
        with measured.measure(job, chosen[number:]):
            peaks[job.kind] = max(peaks.get(job.kind, 0), memory.measure_peak(job.run))
    return peaks


def _largest(jobs: Iterator[Job]) -> Iterator[Job]:
    """Yield two of the largest runs of each kind: one with the longest context and one with the most complex branch.

    The first run of a kind has the longest context, and the last has the most complex branch. If both are the same run,
    it is yielded twice, so that all ranks perform the same number of runs.
    """
    by_kind: dict[str, list[Job]] = {}
    for job in jobs:
        if job.signatures:
            by_kind.setdefault(job.kind, []).append(job)
    for found in by_kind.values():
        num_tokens = max(job.num_tokens for job in found)
        largest = [job for job in found if job.num_tokens == num_tokens]
        yield largest[0]
        yield largest[-1]


def _kv_cache_configs(runner: ModelRunner, budget: int) -> tuple[KVCacheConfig, int]:
    """Return a KV cache config with only a few blocks, and the number of blocks that would fit in `budget`."""
    vllm_config = runner.vllm_config
    groups = get_kv_cache_groups(vllm_config, runner.kv_cache_spec())
    expected = get_kv_cache_config_from_groups(vllm_config, groups, budget).num_blocks
    cache = vllm_config.cache_config
    override = cache.num_gpu_blocks_override
    cache.num_gpu_blocks_override = _BLOCKS
    try:
        return get_kv_cache_config_from_groups(vllm_config, groups, 0), expected
    finally:
        cache.num_gpu_blocks_override = override
