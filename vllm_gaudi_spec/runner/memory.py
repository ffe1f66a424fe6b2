"""Memory of a card during warm-up: what captured graphs keep, by kind, and what to lower where it ends.

A card without memory left serves nothing any more (lessons L30, R08), so nothing is tried again: the error is one line
with the option to change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vllm_gaudi_spec.config import UnsupportedConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.devices.base import Memory
    from vllm_gaudi_spec.runner.graphs import Job

_GIB = 2**30


class WarmUpMemory:
    """Measures runs of warm-up on a card that reports its free memory; elsewhere it measures nothing."""

    def __init__(self, memory: Memory, vllm_config: VllmConfig, kv_bytes: int) -> None:
        """`kv_bytes`: the size of the KV cache, the only part that a user can make smaller without other options."""
        self._memory = memory
        self._vllm_config = vllm_config
        self._kv_bytes = kv_bytes
        self._kept: Counter[str] = Counter()
        """Bytes by kind of run."""
        self._runs: Counter[str] = Counter()

    @contextmanager
    def measuring(self, job: Job, rest: Sequence[Job]) -> Iterator[None]:
        """Around a run. `rest`: those that come after it."""
        free = self._memory.free_bytes()
        try:
            yield
        except RuntimeError as error:
            asked = self._memory.bytes_asked(error)
            if asked is None:
                raise
            raise UnsupportedConfigError(self._advice(job, rest, asked)) from error
        if free is not None:
            self._kept[job.kind] += free - (self._memory.free_bytes() or 0)
            self._runs[job.kind] += 1

    def summary(self) -> str | None:
        """One line; None where the device does not report its memory."""
        if not self._runs:
            return None
        kinds = ", ".join(f"{self._kept[kind] / _GIB:.2f} in {runs} {kind}" for kind, runs in self._runs.items())
        left = (self._memory.free_bytes() or 0) / _GIB
        return f"Graphs keep {self._kept.total() / _GIB:.2f} GiB ({kinds}); {left:.2f} GiB are free."

    def _advice(self, job: Job, rest: Sequence[Job], asked: int) -> str:
        free = self._memory.free_bytes()
        missing = asked - (free or 0) + sum(map(self._expected, rest))
        found = f"{asked / _GIB:.2f} GiB were asked for" if asked else "a run asked for more than there is"
        found += "" if free is None else f", {free / _GIB:.2f} GiB are free"
        return (
            f"The card's memory ended in warm-up at {self._runs.total() + 1} of {self._runs.total() + 1 + len(rest)} "
            f"runs, in {job.kind}: {found}; lower {lower(self._vllm_config, self._kv_bytes, missing)}."
        )

    def _expected(self, job: Job) -> int:
        """What a run will keep, as those of its kind did so far; the largest come first."""
        kind = {job.kind} & self._runs.keys()
        runs = sum(self._runs[name] for name in kind or self._runs)
        return max(0, sum(self._kept[name] for name in kind or self._kept)) // max(runs, 1)


def lower(vllm_config: VllmConfig, kv_bytes: int, missing: int) -> str:
    """The option to lower, its value, and one with which `missing` bytes more would be free. A KV cache of less than
    half is of less use than fewer sequences."""
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    share = 1 - max(missing, 1) / max(kv_bytes, 1)
    if share >= 0.5:
        if cache.kv_cache_memory_bytes is not None:
            return (
                f"--kv-cache-memory-bytes {cache.kv_cache_memory_bytes} -> {int(cache.kv_cache_memory_bytes * share)}"
            )
        if cache.num_gpu_blocks_override is not None:
            return f"--num-gpu-blocks-override {cache.num_gpu_blocks_override} -> " + str(
                int(cache.num_gpu_blocks_override * share)
            )
        percent = min(int(100 * cache.gpu_memory_utilization * share), round(100 * cache.gpu_memory_utilization) - 1)
        return f"--gpu-memory-utilization {cache.gpu_memory_utilization:g} -> {percent / 100:g}"
    if scheduler.max_num_seqs > 1:
        return f"--max-num-seqs {scheduler.max_num_seqs} -> {scheduler.max_num_seqs // 2}"
    return f"--max-num-batched-tokens {scheduler.max_num_batched_tokens} -> {scheduler.max_num_batched_tokens // 2}"
