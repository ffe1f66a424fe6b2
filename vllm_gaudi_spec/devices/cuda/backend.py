"""The reference accelerator: every step a CUDA graph, on NVIDIA GPUs, without vLLM's compiled parts."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm_gaudi_spec.attention import padded, row_operations
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec, FreshKV
from vllm_gaudi_spec.attention.operations import PLAIN, Operations, finite
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.devices.base import DeviceBackend, DeviceTraits
from vllm_gaudi_spec.devices.common.kv_pair import KVPair, PairAttention
from vllm_gaudi_spec.devices.common.stream_device import StreamGraphs, StreamMemory, StreamWeights
from vllm_gaudi_spec.devices.common.stream_graphs import Captures

if TYPE_CHECKING:
    from vllm_gaudi_spec.sampling.rules.registry import Rules


def make_backend() -> DeviceBackend:
    # vLLM's front end makes a backend too, and does not open the card. These look without opening it.
    if not torch.cuda.is_available() or find_spec("triton") is None:
        raise UnsupportedConfigError(
            "VGS_DEVICE=cuda needs an NVIDIA GPU, a torch built for it and Triton, which torch "
            f"{torch.__version__} here does not have; set VGS_DEVICE to cpu or hpu-emulated."
        )
    # Each process is given one card (`Platform.set_device`), which this means without its number.
    device = torch.device("cuda")
    traits = DeviceTraits(
        name="cuda",
        mode="captured",
        torch_device=device,
        captures=True,
        block_size=64,
        exact_context_width=True,
        smallest_prefill=32,
        prefill_rows=(1, 2, 4, 8, 16),
        offers_batch_invariance=True,
    )
    row_operations.use("cuda", _row_kernels())
    graphs = StreamGraphs(torch.cuda, Captures(torch.cuda, torch.cuda.CUDAGraph, device))
    memory = StreamMemory(torch.cuda, device, graphs)
    return DeviceBackend(
        traits=traits,
        graphs=graphs,
        memory=memory,
        attention=CudaAttention(),
        weights=CudaWeights(memory),
        rules=_rules(),
    )


class CudaWeights(StreamWeights):
    def prepare_model(self, model: nn.Module) -> None:
        """Weights were loaded where they stay. float32 is to be what it is everywhere else."""
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        for layers in _layers():
            layers.use_in(model)

    def make_batch_invariant(self, model: nn.Module) -> None:
        linear, _ = _layers()
        linear.make_batch_invariant(model)


class CudaAttention(PairAttention):
    def is_batch_invariant(self, spec: AttentionLayerSpec) -> bool:
        return spec.value_size is None and not _needs_plain_torch(spec)

    def finite(self, tensor: torch.Tensor) -> torch.Tensor:
        """As it is: the kernel that writes makes it finite, where operations would be two kernels each."""
        return tensor

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
            kv_cache.write(finite(key_TKD), None, slots_T)
        else:
            _kernels().write_kv(key_TKD, value_TKD, kv_cache, slots_T)

    def attend(
        self,
        query_THD: torch.Tensor,
        kv_cache: KVPair,
        call: AttentionCall,
        spec: AttentionLayerSpec,
        operations: Operations = PLAIN,
        fresh: FreshKV | None = None,
    ) -> torch.Tensor:
        if kv_cache.values is None or _needs_plain_torch(spec) or call.spans is not None:
            # Latent keys are too long for the kernel's tiles.
            return padded.attend(query_THD, *kv_cache.blocks(), call, spec)
        attended: torch.Tensor = _kernels().attend(query_THD, kv_cache, call, spec, fresh)
        return attended


def _needs_plain_torch(spec: AttentionLayerSpec) -> bool:
    """Whether a layer has chunks, sinks, slopes or later keys, which the kernel does not know."""
    has_more = spec.attention_chunk is not None or spec.sinks_H is not None or spec.slopes_H is not None
    return has_more or not spec.is_causal


def _rules() -> Rules:
    """Imported late, as Triton is missing elsewhere."""
    from vllm_gaudi_spec.devices.cuda.rules import RULES

    return RULES


def _row_kernels() -> Any:
    """Imported late, as Triton is missing elsewhere."""
    from vllm_gaudi_spec.devices.cuda import row_kernels

    return row_kernels.KERNELS


def _layers() -> tuple[Any, ...]:
    """Imported late, as Triton is missing elsewhere."""
    from vllm_gaudi_spec.devices.cuda import decoder, linear

    return linear, decoder


def _kernels() -> Any:
    """Imported late, as Triton is missing elsewhere."""
    from vllm_gaudi_spec.devices.cuda import attention as cuda_attention

    return cuda_attention
