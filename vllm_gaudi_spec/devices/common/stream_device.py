"""Graphs and memory of accelerators that capture streams as graphs.

They have torch modules of the form of `torch.cuda`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from vllm.logger import init_logger

from vllm_gaudi_spec.devices.base import Function, Graphs
from vllm_gaudi_spec.devices.common.kv_pair import PairMemory
from vllm_gaudi_spec.devices.common.stream_graphs import Captures, Graphed

logger = init_logger(__name__)

# The share of free memory that is kept for captured graphs.
_GRAPH_RESERVE = 0.1


class StreamGraphs(Graphs):
    def __init__(self, runtime: Any, captures: Captures) -> None:
        # Functions of vLLM that are decorated with torch.compile are a part of the captured step.
        torch.compiler.set_stance("force_eager")
        self._runtime = runtime
        self._captures = captures
        self._captured_in_warmup = 0

    def graph(self, function: Function) -> Function:
        return cast("Function", Graphed(function, self._captures))

    def warmed_up(self) -> None:
        # Eager runs have left memory in torch's cache.
        self._runtime.empty_cache()
        self._captured_in_warmup = len(self._captures.names)

    def compiled_after_warmup(self) -> int:
        return len(self._captures.names) - self._captured_in_warmup

    def counts(self) -> dict[str, Any]:
        return {
            "compiled_in_warmup": self._captured_in_warmup,
            "compiled_after_warmup": self.compiled_after_warmup(),
            "captured": dict(Counter(self._captures.names)),
        }


class StreamMemory(PairMemory):
    def __init__(self, runtime: Any, torch_device: torch.device, graphs: Graphs) -> None:
        super().__init__(torch_device, graphs)
        self._runtime = runtime

    def free_bytes(self) -> int:
        return int(self._runtime.mem_get_info()[0])

    def available_memory(self, utilization: float, num_ranks: int) -> int:
        # Each rank has its own card.
        free, total = self._runtime.mem_get_info()
        logger.info("%.1f of %.1f GiB are free after loading.", free / 2**30, total / 2**30)
        return int(free * utilization * (1 - _GRAPH_RESERVE))

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        # Torch does not reuse pinned memory before its copy is done.
        return host.pin_memory().to(self.torch_device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.start_download(tensor)()

    def start_download(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.num_host_syncs += 1
        # On the stream of the graphs, before the next one overwrites the tensor. Another stream would need a clone,
        # which takes the device as long and costs the host more.
        host = self._host_buffer(tensor)
        host.copy_(tensor, non_blocking=True)
        done = self._runtime.Event()
        done.record()
        return partial(self._wait_for, done, host)

    def _host_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def _wait_for(self, done: Any, host: torch.Tensor) -> torch.Tensor:
        done.synchronize()
        return host

    def synchronize(self) -> None:
        self._runtime.synchronize()
