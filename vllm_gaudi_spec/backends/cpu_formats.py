"""Which formats of weights this CPU computes with: a small layer of each is tried before anything is loaded.

vLLM chooses kernels while it makes the layers and finds some of them missing in the first forward: its build for CPUs
with AVX-512 has more than the one for AVX2, and no table says which.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.compat import tensor_parallel_group

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

# There are no groups of ranks yet, and vLLM's parameters ask for their place in one.
_ALONE = SimpleNamespace(rank_in_group=0, world_size=1)
# Every format's groups and blocks divide it.
_SIZE = 256
# Layers that nearly every model has: the checkpoint may leave some of them as they are.
_LAYERS = ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj")


def missing_kernel(vllm_config: VllmConfig, model: ModelConfig) -> str | None:
    """As `DeviceBackend.missing_kernel`."""
    if model.is_moe:
        return "for whose experts vLLM has no kernel on a CPU"
    for name in _LAYERS:
        try:
            _compute(vllm_config, model, name)
        except Exception as error:  # whatever a kernel, or the lack of one, comes to
            reason = str(error).strip().splitlines()
            return f"for which vLLM has no kernel on this CPU ({reason[0] if reason else type(error).__name__})"
    return None


@torch.inference_mode()
def _compute(vllm_config: VllmConfig, model: ModelConfig, name: str) -> None:
    """One product of a layer of zeros."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.utils.torch_utils import set_default_torch_dtype

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
