"""The reference accelerator: every program a CUDA graph, on one NVIDIA GPU, without vLLM's compiled parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from vllm.logger import init_logger

from vllm_gaudi_spec.attention import padded
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec
from vllm_gaudi_spec.attention.operations import PLAIN, Operations
from vllm_gaudi_spec.backends import kv_pair
from vllm_gaudi_spec.backends.cuda_graphs import Captures, Graphed
from vllm_gaudi_spec.backends.kv_pair import KVPair
from vllm_gaudi_spec.config import MAX_DRAFTS, UnsupportedConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheLayout

    from vllm_gaudi_spec.backends.base import Function
    from vllm_gaudi_spec.quantization.config import QuantConfig
    from vllm_gaudi_spec.quantization.place import Measuring, Place
    from vllm_gaudi_spec.sample.rules import Rules

logger = init_logger(__name__)

# The share of free memory that is kept for what captured programs compute in.
_GRAPH_RESERVE = 0.1


class Backend:
    name = "cuda"
    mode = "captured"
    captures = True
    block_size = 64
    flat_decode = False
    exact_context_width = True
    prefill_rows: tuple[int, ...] = (1,)
    smallest_prefill = 32
    prefill_growth = 2.0
    fp8_range = None
    max_drafts = MAX_DRAFTS
    warmup_tokens = -1

    def __init__(self) -> None:
        # vLLM's front end makes a backend too, and does not open the card. These look without opening it.
        if not torch.cuda.is_available() or find_spec("triton") is None:
            raise UnsupportedConfigError(
                "VGS_DEVICE=cuda needs an NVIDIA GPU, a torch built for it and Triton, which torch "
                f"{torch.__version__} here does not have; set VGS_DEVICE to cpu or hpu-emulated."
            )
        # Helpers of vLLM that are decorated with torch.compile are a part of the captured step.
        torch.compiler.set_stance("force_eager")
        self.torch_device = torch.device("cuda", 0)
        self.num_host_reads = 0
        self.rules = _rules()
        self._captures = Captures(self.torch_device)
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

    def prepare_model(self, model: nn.Module) -> None:
        """Weights were loaded where they stay. float32 is to be what it is everywhere else."""
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False

    def allocate_kv(self, kv_cache_config: KVCacheConfig, layout: KVCacheLayout) -> dict[str, Any]:
        return dict(kv_pair.allocate(kv_cache_config, self.torch_device))

    def kv_block_size(self, kv_cache: KVPair) -> int:
        return kv_cache.block_size

    def block_copier(self, kv_caches: dict[str, Any]) -> Callable[[list[tuple[int, int]]], None]:
        return kv_pair.block_copier(kv_caches, self)

    def available_memory(self, utilization: float, num_ranks: int) -> int:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        logger.info("%.1f of %.1f GiB are free after loading.", free / 2**30, total / 2**30)
        return int(free * utilization * (1 - _GRAPH_RESERVE))

    # --- attention ---

    def supports_attention(self, spec: AttentionLayerSpec) -> bool:
        return True

    def write_kv(
        self,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor | None,
        kv_cache: KVPair,
        slots_T: torch.Tensor,
        spec: AttentionLayerSpec,
        operations: Operations = PLAIN,
    ) -> None:
        if value_TKD is None:
            kv_cache.write(key_TKD, None, slots_T)
        else:
            _kernels().write_kv(key_TKD, value_TKD, kv_cache, slots_T)

    def attend(
        self,
        query_THD: torch.Tensor,
        kv_cache: KVPair,
        call: AttentionCall,
        spec: AttentionLayerSpec,
        out_THD: torch.Tensor,
        operations: Operations = PLAIN,
    ) -> None:
        if kv_cache.values is None:
            # Latent keys are too long for the kernel's tiles.
            padded.attend(query_THD, *kv_cache.blocks(), call, spec, out_THD)
        else:
            _kernels().attend(query_THD, kv_cache, call, spec, out_THD)

    # --- to and from the host ---

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        # From pinned memory, which torch keeps and does not hand out again before the copy is done.
        return host.pin_memory().to(self.torch_device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.start_download(tensor)()

    def start_download(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.num_host_reads += 1
        # Between two programs: the next one overwrites the tensor behind this. A stream beside them would want a copy
        # of it, which takes the GPU as long, and costs the host more.
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return partial(_wait_for, done, host)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def describe_warm_up(self, num_programs: int) -> str:
        return ""

    def warmed_up(self) -> None:
        # What was computed besides the programs has left memory behind.
        torch.cuda.empty_cache()
        self._captured_in_warmup = len(self._captures.names)

    def step_done(self) -> None:
        """It was given as it came."""

    def counts(self) -> dict[str, Any]:
        names = self._captures.names
        return {
            "compiled_in_warmup": self._captured_in_warmup,
            "compiled_after_warmup": len(names) - self._captured_in_warmup,
            "captured": dict(Counter(names)),
        }


def _rules() -> Rules:
    """Imported late, as Triton is missing elsewhere."""
    from vllm_gaudi_spec.backends.cuda_rules import RULES

    return RULES


def _kernels() -> Any:
    """Imported late, as Triton is missing elsewhere."""
    from vllm_gaudi_spec.backends import cuda_attention

    return cuda_attention


def _wait_for(done: torch.cuda.Event, host: torch.Tensor) -> torch.Tensor:
    done.synchronize()
    return host
