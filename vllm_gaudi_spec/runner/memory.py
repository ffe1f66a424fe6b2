"""Device memory during warm-up: how much captured graphs keep and which option to lower if memory runs out.

A Gaudi that runs out of memory cannot serve any more requests, so nothing is retried. Instead, a one-line error names
the option to change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_gaudi_spec.config import UnsupportedConfigError, format_size
from vllm_gaudi_spec.graphs import DRAFTERS_READS, ENCODERS, PROMPT_CHUNKS, PROMPT_LOGPROBS
from vllm_gaudi_spec.sampling.branches import USUAL_LOGPROBS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.devices.base import Memory
    from vllm_gaudi_spec.graphs import Job


class WarmUpMemory:
    """Measures how much memory warm-up jobs keep on devices that report their free memory."""

    def __init__(self, memory: Memory, vllm_config: VllmConfig, kv_bytes: int, *, where: str = "in warm-up") -> None:
        """Prepare to measure. `kv_bytes` is the KV cache's size, or 0 before it exists. Errors mention `where`."""
        self._where = where
        self._memory = memory
        self._vllm_config = vllm_config
        self._kv_bytes = kv_bytes
        self._kept: Counter[str] = Counter()
        """Number of bytes kept by each kind of job."""
        self._runs: Counter[str] = Counter()

    @contextmanager
    def measure(self, job: Job, rest: Sequence[Job]) -> Iterator[None]:
        """Measure the job that runs in this context. `rest` lists the jobs that run after it."""
        free = self._memory.free_bytes()
        try:
            yield
        except RuntimeError as error:
            asked = self._memory.bytes_asked(error)
            if asked is None:
                raise
            raise UnsupportedConfigError(self._describe_failure(job, rest, asked)) from error
        if free is not None:
            self._kept[job.kind] += free - (self._memory.free_bytes() or 0)
            self._runs[job.kind] += 1

    def summary(self) -> str | None:
        """Return a log line, or None if the device does not report its free memory."""
        if not self._runs:
            return None
        kinds = ", ".join(f"{format_size(self._kept[kind])} in {runs} {kind}" for kind, runs in self._runs.items())
        free = self._memory.free_bytes() or 0
        return f"Graphs keep {format_size(self._kept.total())} ({kinds}); {format_size(free)} are free."

    def _describe_failure(self, job: Job, rest: Sequence[Job], asked: int) -> str:
        try:
            free = max(self._memory.free_bytes() or 0, 0)
        except RuntimeError:  # the device may no longer respond
            free = 0
        missing = asked - free + sum(map(self._estimate_kept, rest))
        found = f"{format_size(asked)} requested" if asked else "more requested than available"
        found += f", {format_size(free)} free"
        number = self._runs.total() + 1
        return (
            f"The card ran out of memory {self._where}, in run {number} of {number + len(rest)} ({job.kind}): {found}; "
            f"lower {suggest_option(self._vllm_config, job.kind, self._kv_bytes, missing)}."
        )

    def _estimate_kept(self, job: Job) -> int:
        """Return how many bytes a job will probably keep: the average for its kind so far, or 0 if none has run.

        The largest jobs of each kind run first, so this is an upper bound.
        """
        return max(self._kept[job.kind], 0) // max(self._runs[job.kind], 1)


def suggest_option(vllm_config: VllmConfig, kind: str, kv_bytes: int, missing: int) -> str:
    """Return the option to lower, with its current value and a value that frees `missing` bytes for this kind of job.

    If the KV cache would have to shrink by more than half, this is the number of sequences or the chunk length.
    """
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    share = 1 - max(missing, 1) / max(kv_bytes, 1)
    if share >= 0.5:
        if (num_bytes := cache.kv_cache_memory_bytes) is not None:
            return f"--kv-cache-memory-bytes {num_bytes} -> {int(num_bytes * share)}"
        if (num_blocks := cache.num_gpu_blocks_override) is not None:
            return f"--num-gpu-blocks-override {num_blocks} -> {int(num_blocks * share)}"
        percent = min(int(100 * cache.gpu_memory_utilization * share), round(100 * cache.gpu_memory_utilization) - 1)
        return f"--gpu-memory-utilization {cache.gpu_memory_utilization:g} -> {percent / 100:g}"
    if kind == PROMPT_LOGPROBS:
        return _suggest_for_prompt_logprobs(vllm_config)
    if kind == ENCODERS:
        return "the size of images, by --mm-processor-kwargs (for Qwen-VL max_pixels)"
    if kind not in (PROMPT_CHUNKS, DRAFTERS_READS) and scheduler.max_num_seqs > 1:
        return f"--max-num-seqs {scheduler.max_num_seqs} -> {scheduler.max_num_seqs // 2}"
    return f"--max-num-batched-tokens {scheduler.max_num_batched_tokens} -> {scheduler.max_num_batched_tokens // 2}"


def _suggest_for_prompt_logprobs(vllm_config: VllmConfig) -> str:
    """Return the option to lower for prompt log-probabilities.

    The memory that they need does not depend on the number of requests or the chunk length. If the number of
    log-probabilities is not the cause, only reducing the weights per rank frees memory.
    """
    max_logprobs = vllm_config.model_config.max_logprobs
    if not 0 <= max_logprobs <= USUAL_LOGPROBS:
        return f"--max-logprobs {max_logprobs} -> {USUAL_LOGPROBS}"
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return f"the weights of a rank: --tensor-parallel-size {ranks} -> {2 * ranks}"
