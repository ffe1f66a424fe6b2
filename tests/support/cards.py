"""A device on the host that keeps every promise of `DeviceBackend` and no more, for tests that break one of them."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import psutil
import torch

from tests.support.fakes import CapturingGraphs, CopyingMemory
from vllm_gaudi_spec.attention import flat
from vllm_gaudi_spec.attention.metadata import AttentionCall
from vllm_gaudi_spec.devices.base import DeviceBackend, DeviceTraits
from vllm_gaudi_spec.devices.common.kv_pair import PairAttention, PairMemory

_ADDRESSES = 1 << 47

TRAITS = DeviceTraits(
    name="card",
    mode="captured",
    torch_device=torch.device("cpu"),
    captures=True,
    block_size=32,
    smallest_prefill=32,
    flat_decode=True,
)


class CardGraphs(CapturingGraphs):
    """Graphs that count their captures."""

    num_compiled = 0

    def graph(self, function: Any) -> Any:
        run, known = super().graph(function), set()

        def call(*args: Any) -> Any:
            key = tuple((arg.shape, arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in args)
            self.num_compiled += key not in known
            known.add(key)
            return run(*args)

        return call

    def counts(self) -> dict[str, Any]:
        return {"compiled_in_warmup": 0, "compiled_after_warmup": self.num_compiled}


class CardMemory(CopyingMemory, PairMemory):
    """Memory whose copies are real and whose free bytes decrease."""

    def free_bytes(self) -> int | None:
        # Large tensors are mapped one by one, whether or not they were touched.
        return _ADDRESSES - psutil.Process().memory_info().vms


class CardAttention(PairAttention):
    def attend(self, query_THD: Any, kv_cache: Any, call: AttentionCall, spec: Any) -> torch.Tensor:
        if call.flat is None:
            return super().attend(query_THD, kv_cache, call, spec)
        return flat.attend(query_THD, *kv_cache.blocks(), call, spec)


def make_card(**parts: Any) -> DeviceBackend:
    graphs = CardGraphs()
    card = DeviceBackend(
        traits=TRAITS, graphs=graphs, memory=CardMemory(TRAITS.torch_device, graphs), attention=CardAttention()
    )
    return replace(card, **parts)


class Ranks:
    """Groups of threads that exchange tensors."""

    def __init__(self, size: int) -> None:
        self.sent: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def group(self, rank: int) -> ThreadGroup:
        return ThreadGroup(self, rank)


class ThreadGroup:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks = ranks
        self.world_size, self.rank_in_group = len(ranks.sent), rank
        self.unique_name, self.ranks = "tp:0", list(range(self.world_size))

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(input_)).sum(0)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(self._exchange(input_), dim=dim)

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._ranks.sent[self.rank_in_group] = tensor.clone()
        self._ranks.barrier.wait()
        every = list(self._ranks.sent)
        self._ranks.barrier.wait()
        return every
