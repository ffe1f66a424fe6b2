"""Device memory during warm-up: how much memory captured graphs keep, and which option to lower if it runs out.

After running out of memory, a Gaudi cannot serve any more requests, so nothing is retried. Instead, a one-line error
names the option to change.
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
    """Measures the memory that warm-up runs keep, on devices that report their free memory."""

    def __init__(self, memory: Memory, vllm_config: VllmConfig, kv_bytes: int, *, where: str = "in warm-up") -> None:
        """Prepare for measuring. `kv_bytes` is the KV cache size, or 0 before it exists. Errors mention `where`."""
        self._where = where
        self._memory = memory
        self._vllm_config = vllm_config
        self._kv_bytes = kv_bytes
        self._kept: Counter[str] = Counter()
        """Number of bytes kept by warm-up runs of each kind."""
        self._runs: Counter[str] = Counter()

    @contextmanager
    def measure(self, job: Job, rest: Sequence[Job]) -> Iterator[None]:
        """Measure the warm-up run that takes place in this context. `rest` lists the runs that follow it."""
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
        """Return a line for the log, or None if the device does not report its free memory."""
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
        """Return the number of bytes that a run will probably keep: the average for its kind so far, or 0 initially.

        The largest runs of each kind are first, so this is an upper bound.
        """
        return max(self._kept[job.kind], 0) // max(self._runs[job.kind], 1)


def suggest_option(vllm_config: VllmConfig, kind: str, kv_bytes: int, missing: int) -> str:
    """Return the option to lower, with its current value and a value that frees `missing` bytes for runs of this kind.

    If the KV cache would have to shrink by more than half, the result is the number of sequences or the chunk length.
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

    The memory required does not depend on the number of requests or the chunk length. If the number of
    log-probabilities is not the cause, only fewer weights per rank would free memory.
    """
    max_logprobs = vllm_config.model_config.max_logprobs
    if not 0 <= max_logprobs <= USUAL_LOGPROBS:
        return f"--max-logprobs {max_logprobs} -> {USUAL_LOGPROBS}"
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return f"the weights of a rank: --tensor-parallel-size {ranks} -> {2 * ranks}"
