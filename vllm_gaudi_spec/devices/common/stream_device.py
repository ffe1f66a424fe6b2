"""Graphs and memory for devices that capture streams, such as NVIDIA GPUs.

A graph is captured for each combination of tensor shapes and non-tensor arguments. The runtime is the device's torch
module, such as `torch.cuda`, or a module with the same interface.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from vllm.logger import init_logger

from vllm_gaudi_spec.devices.base import Function, Graphs
from vllm_gaudi_spec.devices.common.arguments import flatten, get_name, rebuild
from vllm_gaudi_spec.devices.common.kv_pair import PairMemory

logger = init_logger(__name__)


class Recorded(Protocol):
    def replay(self) -> None: ...


class _Captured(NamedTuple):
    graph: Recorded
    inputs: list[list[torch.Tensor]]
    """The buffers that the graph reads, in groups with the same device and dtype. One copy operation fills a group."""
    argument_indices: list[list[int]]
    """The indices of the arguments that are copied to the buffers of each group."""
    result: Any


class Captures:
    """Captures graphs that share memory and input buffers."""

    def __init__(self, runtime: Any, new_graph: Callable[[], Any], device: torch.device) -> None:
        self.names: list[str] = []
        """The graphs' names, in capture order."""
        self._runtime = runtime
        self._new_graph = new_graph
        self._device = device
        self._buffers: dict[Hashable, torch.Tensor] = {}
        self._stream: Any = None
        self._pool: Any = None
        self._keeper: Any = None
        """A tiny graph that keeps the memory pool alive, because a pool without graphs could not be reused by the next
        engine in the process."""

    def buffer(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """Return the buffer for argument `index`. Graphs share a buffer if this argument has the same shape and dtype
        in all of them.

        A buffer on the device is filled in stream order, right before a graph runs. A buffer on the host is filled
        immediately.
        """
        key = index, like.shape, like.dtype, like.device
        if key not in self._buffers:
            self._buffers[key] = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        return self._buffers[key]

    def record(self, run: Callable[[], None]) -> Recorded:
        """Capture `run` as a graph without executing it."""
        self._give_back_cached()
        if self._keeper is None:
            self._pool, self._stream = self._runtime.graph_pool_handle(), self._runtime.Stream()
            self._keeper = self._record(partial(torch.zeros, 1, device=self._device))
        return self._record(run)

    def _record(self, run: Callable[[], Any]) -> Recorded:
        graph = self._new_graph()
        with _pause_collector(), self._runtime.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        recorded: Recorded = graph
        return recorded

    def _give_back_cached(self) -> None:
        """If torch's cache is larger than the free memory, release the cache, because graphs cannot use it."""
        cached = self._runtime.memory_reserved() - self._runtime.memory_allocated()
        if cached > self._runtime.mem_get_info()[0]:
            self._runtime.empty_cache()


@contextmanager
def _pause_collector() -> Iterator[None]:
    """Pause the garbage collector during a capture, which would fail if a graph of an earlier engine were freed."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class Graphed:
    def __init__(self, function: Callable[..., Any], captures: Captures) -> None:
        self._function = function
        self._captures = captures
        self._graphs: dict[Hashable, _Captured] = {}

    def __call__(self, *args: Any) -> Any:
        tensors, rest = flatten(args)
        key = rest, tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._graphs[key] = self._make(tensors, rest)
            return captured.result
        for inputs, argument_indices in zip(captured.inputs, captured.argument_indices, strict=True):
            torch._foreach_copy_(inputs, [tensors[index] for index in argument_indices])
        captured.graph.replay()
        return captured.result

    def _make(self, tensors: list[torch.Tensor], rest: Any) -> _Captured:
        """Run the function eagerly once, to compile its kernels and to get the result of this call, and then capture
        it.

        Capturing does not execute the function, so its side effects on the device happen only once.
        """
        buffers = [self._captures.buffer(i, tensor) for i, tensor in enumerate(tensors)]
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)
        arguments = rebuild(buffers, rest)
        first, form = flatten(self._function(*arguments))
        # Keep results outside the memory that graphs share, because another graph may run before they are read.
        results = [tensor.clone(memory_format=torch.contiguous_format) for tensor in first]
        del first

        def run() -> None:
            again, form_again = flatten(self._function(*arguments))
            assert form_again == form, "every run returns the same non-tensor values"
            for result, tensor in zip(results, again, strict=True):
                result.copy_(tensor)

        graph = self._captures.record(run)
        self._captures.names.append(get_name(self._function))
        by_kind: dict[Hashable, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(index)
        argument_indices = list(by_kind.values())
        return _Captured(
            graph, [[buffers[i] for i in some] for some in argument_indices], argument_indices, rebuild(results, form)
        )


class StreamGraphs(Graphs):
    def __init__(self, runtime: Any, captures: Captures) -> None:
        # Run vLLM functions decorated with torch.compile eagerly, because they are captured as part of the step.
        torch.compiler.set_stance("force_eager")
        self._runtime = runtime
        self._captures = captures
        self._captured_in_warmup = 0

    def graph(self, function: Function) -> Function:
        return cast("Function", Graphed(function, self._captures))

    def warmed_up(self) -> None:
        # Release the memory that eager runs left in torch's cache.
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
    """Memory for accelerators whose torch module has the same interface as `torch.cuda`."""

    def __init__(self, runtime: Any, torch_device: torch.device, graphs: Graphs) -> None:
        super().__init__(torch_device, graphs)
        self._runtime = runtime

    def free_bytes(self) -> int:
        return int(self._runtime.mem_get_info()[0])

    def available_memory(self, utilization: float, num_ranks: int) -> int:
        # Each rank has its own card.
        (free, total), reserve = self._runtime.mem_get_info(), self.get_graph_reserve()
        logger.info(
            "%.1f of %.1f GiB are free after loading; %.0f %% of that is reserved for graphs.",
            free / 2**30,
            total / 2**30,
            100 * reserve,
        )
        return int(free * utilization * (1 - reserve))

    def get_graph_reserve(self) -> float:
        return 0.1

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        # Torch does not reuse pinned memory before its copy has finished.
        return host.pin_memory().to(self.torch_device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.start_download(tensor)()

    def start_download(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.num_host_syncs += 1
        # Copy on the graphs' stream, before the next graph overwrites the tensor. Copying on another stream would
        # require a clone, which takes the device just as long and costs the host more time.
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
