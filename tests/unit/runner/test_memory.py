"""How much memory graphs keep, and the option that an out-of-memory error names."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.base import Memory
from vllm_gaudi_spec.devices.hpu.backend import HpuMemory
from vllm_gaudi_spec.graphs import Job
from vllm_gaudi_spec.runner.memory import WarmUpMemory, suggest_option

GIB = 1 << 30


class Card(Memory):
    """Memory of which each run takes as many bytes as the test sets."""

    def __init__(self, free: int) -> None:
        self.free = free

    def free_bytes(self) -> int:
        return self.free

    def bytes_asked(self, error: RuntimeError) -> int | None:
        return HpuMemory.bytes_asked(self, error)

    def take(self, num_bytes: int) -> None:
        if num_bytes > self.free:
            raise RuntimeError(
                f"[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::{num_bytes} (1)MB"
            )
        self.free -= num_bytes


def config(**options: Any) -> Any:
    values = dict(kv_cache_memory_bytes=None, num_gpu_blocks_override=None, gpu_memory_utilization=0.9)
    values |= dict(max_num_seqs=256, max_num_batched_tokens=8192) | options
    values = dict(max_logprobs=20, tensor_parallel_size=1) | values
    parts = ("cache_config", "scheduler_config", "model_config", "parallel_config")
    return SimpleNamespace(**{part: SimpleNamespace(**values) for part in parts})


def warm_up(card: Card, runs: list[tuple[str, int]], **options: Any) -> WarmUpMemory:
    memory = WarmUpMemory(card, config(**options), kv_bytes=60 * GIB)
    jobs = [Job(kind, lambda size=size: card.take(size)) for kind, size in runs]
    for number, job in enumerate(jobs, start=1):
        with memory.measure(job, jobs[number:]):
            job.run()
    return memory


def test_l30_r08_out_of_memory_error_names_the_option_to_lower() -> None:
    """3 GiB are requested and 1 is free. Two more runs like the first will keep a GiB each, so 4 of 60 GiB are
    missing."""
    decode = ("decodes", GIB)
    with pytest.raises(UnsupportedConfigError) as raised:
        warm_up(Card(3 * GIB), [decode, decode, ("prompt chunks", 3 * GIB), decode, decode])
    assert str(raised.value) == (
        "The card ran out of memory in warm-up, in run 3 of 5 (prompt chunks): 3.00 GiB requested, 1.00 GiB free; "
        "lower --gpu-memory-utilization 0.9 -> 0.84."
    )


@pytest.mark.parametrize(
    ("missing", "kind", "options", "words"),
    [
        (6, "decodes", {}, "--gpu-memory-utilization 0.9 -> 0.81"),
        (0, "decodes", {}, "--gpu-memory-utilization 0.9 -> 0.89"),
        (6, "decodes", {"kv_cache_memory_bytes": 60 * GIB}, f"--kv-cache-memory-bytes {60 * GIB} -> {54 * GIB}"),
        (6, "decodes", {"num_gpu_blocks_override": 1000}, "--num-gpu-blocks-override 1000 -> 900"),
        (40, "decodes", {}, "--max-num-seqs 256 -> 128"),
        (40, "prompt chunks", {}, "--max-num-batched-tokens 8192 -> 4096"),
        (40, "decodes", {"max_num_seqs": 1}, "--max-num-batched-tokens 8192 -> 4096"),
    ],
)
def test_suggested_option(missing: int, kind: str, options: dict[str, Any], words: str) -> None:
    assert suggest_option(config(**options), kind, 60 * GIB, missing * GIB) == words


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("[Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::939524096 (896)MB", 939524096),
        ("FATAL ERROR :: MODULE:PT_SYNHELPER workspace Allocation of size ::52561502464 failed!", 52561502464),
        ("Graph compile failed. synStatus 26 [Generic failure]", None),
    ],
)
def test_r16_out_of_memory_messages_of_a_gaudi(text: str, asked: int | None) -> None:
    assert Card(0).bytes_asked(RuntimeError(text)) == asked


def test_out_of_memory_message_of_torch() -> None:
    from vllm_gaudi_spec.devices.common.kv_pair import PairMemory

    asked = PairMemory.bytes_asked
    assert asked(Memory(), torch.OutOfMemoryError("no memory")) == 0
    assert asked(Memory(), RuntimeError("no memory")) is None
