"""What accelerators have in common whose streams are recorded as graphs: programs, memory, KV, and the way to the host.

Their modules of torch, `torch.cuda` and those made after it, have one form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from vllm.logger import init_logger

from vllm_gaudi_spec.devices.common import kv_pair
from vllm_gaudi_spec.devices.common.kv_pair import KVPair
from vllm_gaudi_spec.devices.common.stream_graphs import Captures, Graphed

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheLayout

    from vllm_gaudi_spec.attention.metadata import AttentionLayerSpec, KVShape
    from vllm_gaudi_spec.devices.base import Function
    from vllm_gaudi_spec.quantization.config import QuantConfig
    from vllm_gaudi_spec.quantization.place import Measuring, Place

logger = init_logger(__name__)

# The share of free memory that is kept for what captured programs compute in.
_GRAPH_RESERVE = 0.1


class StreamDevice:
    mode = "captured"
    captures = True
    flat_decode = False
    needs_host_lengths = False
    prefill_rows: tuple[int, ...] = (1,)
    prefill_growth = 2.0
    fp8_range = None
    takes_quant_config = False
    warmup_tokens = -1

    def __init__(self, runtime: Any, torch_device: torch.device, captures: Captures) -> None:
        # Helpers of vLLM that are decorated with torch.compile are a part of the captured step.
        torch.compiler.set_stance("force_eager")
        self.torch_device = torch_device
        self.num_host_reads = 0
        self._runtime = runtime
        self._captures = captures
        self._captured_in_warmup = 0

    # --- programs ---

    def graph(self, function: Function) -> Function:
        return cast("Function", Graphed(function, self._captures))

    def compiling_only(self) -> AbstractContextManager[None]:
        return nullcontext()

    # --- models and memory ---

    def loading(self, given: QuantConfig) -> AbstractContextManager[None]:
        raise NotImplementedError("refused at start-up")

    def quantize(self, model: nn.Module, given: QuantConfig, place: Place) -> Measuring | None:
        raise NotImplementedError("refused at start-up")

    def allocate_kv(self, kv_cache_config: KVCacheConfig, layout: KVCacheLayout) -> dict[str, Any]:
        return dict(kv_pair.allocate(kv_cache_config, self.torch_device))

    def kv_shape(self, kv_cache: KVPair) -> KVShape:
        return kv_cache.shape

    def block_copier(self, kv_caches: dict[str, Any]) -> Callable[[list[tuple[int, int]]], None]:
        return kv_pair.block_copier(kv_caches, cast(Any, self))

    def available_memory(self, utilization: float, num_ranks: int) -> int:
        # A rank has a card of its own.
        free, total = self._runtime.mem_get_info()
        logger.info("%.1f of %.1f GiB are free after loading.", free / 2**30, total / 2**30)
        return int(free * utilization * (1 - _GRAPH_RESERVE))

    def supports_attention(self, spec: AttentionLayerSpec) -> bool:
        return True

    # --- to and from the host ---

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        # From pinned memory, which torch keeps and does not hand out again before the copy is done.
        return host.pin_memory().to(self.torch_device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.start_download(tensor)()

    def start_download(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.num_host_reads += 1
        # Between two programs: the next one overwrites the tensor behind this. A stream beside them would want a copy
        # of it, which takes the device as long, and costs the host more.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        done = self._runtime.Event()
        done.record()
        return partial(_wait_for, done, host)

    def unpacked_weights(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """None: layers keep their weights."""
        return iter(())

    def weights_changed(self, model: nn.Module) -> None:
        """Nothing is made of them: graphs read them where they are."""
        self.synchronize()

    def synchronize(self) -> None:
        self._runtime.synchronize()

    def describe_warm_up(self, num_programs: int) -> str:
        return ""

    def warmed_up(self) -> None:
        # What was computed besides the programs has left memory behind.
        self._runtime.empty_cache()
        self._captured_in_warmup = len(self._captures.names)

    def step_done(self) -> None:
        """It was given as it came."""

    def compiled_after_warmup(self) -> int:
        return len(self._captures.names) - self._captured_in_warmup

    def counts(self) -> dict[str, Any]:
        return {
            "compiled_in_warmup": self._captured_in_warmup,
            "compiled_after_warmup": self.compiled_after_warmup(),
            "captured": dict(Counter(self._captures.names)),
        }


def _wait_for(done: Any, host: torch.Tensor) -> torch.Tensor:
    done.synchronize()
    return host
