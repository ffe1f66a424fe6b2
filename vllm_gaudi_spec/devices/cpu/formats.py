"""Determines which weight formats this CPU supports by running a small layer in each format before loading a model.

vLLM chooses kernels while it creates layers, but it detects some missing kernels only in the first forward pass. Its
AVX-512 build has more kernels than its AVX2 build, and no table lists them.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.logger import init_logger

from vllm_gaudi_spec.config import NATIVE, Options
from vllm_gaudi_spec.quantization.dequantized import described
from vllm_gaudi_spec.upstream import tensor_parallel_group

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)

# A substitute for the tensor-parallel group, which does not exist yet. vLLM's parameters query their rank in it.
_ALONE = SimpleNamespace(rank_in_group=0, world_size=1)
# A multiple of the group and block sizes of all formats.
_SIZE = 256
# Layers that exist in nearly every model, used if the checkpoint is not on this machine.
_LAYERS = ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj")
# Suffixes of tensor names that identify layers with quantized weights.
_QUANTIZED = (".weight_packed", ".weight_scale", ".weight_scale_inv", ".qweight")


def missing_kernel(vllm_config: VllmConfig, model: ModelConfig) -> str | None:
    """Implement `Weights.missing_kernel`. Slow kernels are accepted only if the user requested native kernels or the
    format itself."""
    from vllm_gaudi_spec.upstream.cpu_kernels import has_expert_kernels  # imports vLLM's layers

    takes_slow = Options.from_vllm(vllm_config).weight_kernels == NATIVE or not described(model)
    if model.is_moe and not has_expert_kernels():
        return "for whose experts vLLM has no kernel on this CPU"
    for name in _find_quantized_layers(Path(model.model)) or _LAYERS:
        called = _Called()
        try:
            with called:
                _compute(vllm_config, model, name)
        except Exception as error:  # a missing kernel may raise any exception
            logger.debug("Layer %s of %s was tried:", name, model.model, exc_info=True)
            reason = str(error).strip().splitlines()
            return f"for which vLLM has no kernel on this CPU ({reason[0] if reason else type(error).__name__})"
        if not takes_slow and (slow := _find_slow_product(called.names)) is not None:
            return f"for which vLLM has only {slow} on this CPU, which is far slower than one in float32"
    return None


class _Called(TorchDispatchMode):
    """Records the names of all torch operations called in a `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(operation.overloadpacket))
        return operation(*args, **(kwargs or {}))


def _find_slow_product(names: set[str]) -> str | None:
    """Return an operation in `names` for which this CPU lacks instructions, so that it would be slow, or None."""
    # On CPUs with AMX, torch's `_scaled_mm` (aten/src/ATen/native/Blas.cpp) uses oneDNN for FP8. oneDNN 3.12 has a
    # kernel for AMX-FP16 and later (`check_isa_with_datatype` in src/cpu/x64/matmul/brgemm_matmul_utils.cpp; its
    # AVX10.2 condition is reached only with AMX). On other CPUs, torch and oneDNN convert the operands. A matmul took
    # 10 to 70 times as long as in float32 on AVX2, and 40 to 80 times with AMX but without AMX-FP16.
    if "aten._scaled_mm" in names and not torch.cpu._is_amx_fp16_supported():
        return "torch's product of FP8"
    # The same oneDNN function requires AVX-512 for int8, or AVX2 with VNNI, which torch cannot detect. On AVX2 alone,
    # a matmul took 7 to 17 times as long as in float32 for one row, and 2 to 5 times for four rows.
    if "_C.onednn_scaled_mm" in names and not torch.cpu._is_avx512_supported():
        return "oneDNN's product of int8"
    return None


def _find_quantized_layers(folder: Path) -> tuple[str, ...]:
    """Return the names of two quantized layers, one in attention and one elsewhere, or fewer if there are not both.

    They are the first ones in the first file that contains any quantized layers.
    """
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as opened:
                names = sorted(opened.keys())
        except (OSError, SafetensorError):
            continue  # another check rejects unreadable files
        layers = [name.rpartition(".")[0] for name in names if name.endswith(_QUANTIZED)]
        kinds = {"attn" in layer: layer for layer in reversed(layers) if ".experts." not in layer}
        if kinds:
            return tuple(kinds.values())
    return ()


@torch.inference_mode()
def _compute(vllm_config: VllmConfig, model: ModelConfig, name: str) -> None:
    """Create a small linear layer with zero weights in the model's format, and run it on one token."""
    from vllm.config import VllmConfig, set_current_vllm_config

    from vllm_gaudi_spec.upstream.layers import ReplicatedLinear
    from vllm_gaudi_spec.upstream.worker import set_default_torch_dtype

    quant_config = VllmConfig.get_quantization_config(model, vllm_config.load_config)
    with (
        set_current_vllm_config(vllm_config),
        set_default_torch_dtype(model.dtype),
        tensor_parallel_group(_ALONE),
    ):
        layer = ReplicatedLinear(
            _SIZE, _SIZE, bias=False, quant_config=quant_config, prefix=name, return_bias=False, disable_tp=True
        )
        for parameter in layer.parameters():
            parameter.data.zero_()
        layer.quant_method.process_weights_after_loading(layer)
        layer(torch.zeros(1, _SIZE))
