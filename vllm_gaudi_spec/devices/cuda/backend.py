"""The backend for NVIDIA GPUs, which captures every step as CUDA graphs and does not use torch.compile."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import nn

from vllm_gaudi_spec.attention import padded
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec
from vllm_gaudi_spec.attention.operations import finite
from vllm_gaudi_spec.config import GAUDI3, UnsupportedConfigError
from vllm_gaudi_spec.devices.base import DeviceBackend, DeviceTraits, Weights
from vllm_gaudi_spec.devices.common.kv_pair import KVPair, PairAttention
from vllm_gaudi_spec.devices.common.stream_device import Captures, StreamGraphs, StreamMemory
from vllm_gaudi_spec.devices.cuda.fp8 import CudaArithmetic


def make_backend() -> DeviceBackend:
    # vLLM's front end also creates a backend and must not open the GPU. These checks do not open it.
    if not torch.cuda.is_available() or find_spec("triton") is None:
        raise UnsupportedConfigError(
            "VGS_DEVICE=cuda needs an NVIDIA GPU, a torch built for it and Triton, but at least one is missing (torch "
            f"{torch.__version__}); set VGS_DEVICE to cpu or hpu-emulated."
        )
    # Without an index, "cuda" refers to the GPU that `Platform.set_device` selected for this process.
    device = torch.device("cuda")
    traits = DeviceTraits(
        name="cuda",
        mode="captured",
        torch_device=device,
        captures=True,
        block_size=64,
        exact_context_width=True,
        smallest_prefill=32,
        decode_step=8,
        times_decode_sizes=True,
        prefill_step=128,
        prefill_rows=(1, 2, 4, 8, 16),
        slice_tokens=32,  # more than `few_queries` supports, which reads new keys of a row only from the projection
    )
    # Import Triton modules late, both here and below, because Triton may be missing.
    from vllm_gaudi_spec.devices.cuda.row_kernels import ROW_OPERATIONS
    from vllm_gaudi_spec.devices.cuda.rules import RULES

    graphs = StreamGraphs(torch.cuda, Captures(torch.cuda, torch.cuda.CUDAGraph, device))
    memory = StreamMemory(torch.cuda, device, graphs)
    return DeviceBackend(
        traits=traits,
        graphs=graphs,
        memory=memory,
        attention=CudaAttention(),
        weights=CudaWeights(),
        rules=RULES,
        row_operations=ROW_OPERATIONS,
    )


class CudaWeights(Weights):
    fp8_logits = CudaArithmetic
    fp8_range = GAUDI3  # FP8 on NVIDIA GPUs has the full e4m3 range

    def prepare_model(self, model: nn.Module) -> None:
        """Install the faster linear and decoder layers. This also disables TF32, so that float32 matmuls are exact."""
        from vllm_gaudi_spec.devices.cuda import decoder, linear

        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        linear.install(model)
        decoder.install(model)


class CudaAttention(PairAttention):
    def reads_slices(self, spec: AttentionLayerSpec) -> bool:
        from vllm_gaudi_spec.devices.cuda import prompts

        # Kernels outside `prompts` read all keys again for each row. The extra reads matter less in float32, which is
        # used for exact comparisons.
        has_kernel = spec.value_size is None and not _needs_plain_torch(spec)
        return has_kernel and (spec.dtype == torch.float32 or prompts.supports(spec))

    def finite(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor unchanged, because the kernel that writes it replaces non-finite elements."""
        return tensor

    def write_kv(
        self,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor | None,
        kv_cache: KVPair,
        slots_T: torch.Tensor,
        spec: AttentionLayerSpec,
    ) -> None:
        from vllm_gaudi_spec.devices.cuda import attention

        if value_TKD is None:
            kv_cache.write(finite(key_TKD), None, slots_T)
        else:
            attention.write_kv(key_TKD, value_TKD, kv_cache, slots_T)

    def attend(
        self, query_THD: torch.Tensor, kv_cache: KVPair, call: AttentionCall, spec: AttentionLayerSpec
    ) -> torch.Tensor:
        from vllm_gaudi_spec.devices.cuda import attention, prompts

        if kv_cache.values is None or _needs_plain_torch(spec) or call.spans is not None:
            # Latent keys are too long for the kernel's tiles.
            return padded.attend(query_THD, *kv_cache.blocks(), call, spec)
        if prompts.takes(call, spec):
            return prompts.attend(query_THD, kv_cache, call, spec)
        return attention.attend(query_THD, kv_cache, call, spec)


def _needs_plain_torch(spec: AttentionLayerSpec) -> bool:
    """Whether a layer has attention chunks, sinks, or ALiBi slopes, which the kernel does not support."""
    return spec.attention_chunk is not None or spec.sinks_H is not None or spec.slopes_H is not None
