"""Decoder layers of Llama's form in fewer kernels: a norm within the linear layer that reads it, and the gated
activation within the one before it.

A layer that is known by its class's forward is run as that forward runs it, save that what its attention and its MLP
get may not be normed yet: both hand it to a linear layer first, and use it for nothing else.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP
from vllm.model_executor.models.qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2MLP
from vllm.model_executor.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer

from vllm_gaudi_spec.devices.cuda import linear

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_LAYERS = {cls.forward for cls in (LlamaDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)}
_ATTENTIONS = {cls.forward for cls in (LlamaAttention, Qwen2Attention, Qwen3Attention)}
_MLPS = {cls.forward for cls in (LlamaMLP, Qwen2MLP)}

_States = tuple["torch.Tensor", "torch.Tensor"]


def use_in(model: nn.Module) -> None:
    """After `linear.use_in`."""
    for module in model.modules():
        forward = type(module).forward
        if forward in _MLPS and isinstance(module.act_fn, SiluAndMul):
            module.forward = partial(_mlp, module, module.forward)
        elif forward in _LAYERS and _takes(module):
            module.forward = partial(_layer, module, module.forward)


def _takes(layer: Any) -> bool:
    """Whether a norm may be left to the linear layers that read it."""
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return (
        type(layer.self_attn).forward in _ATTENTIONS
        and type(layer.mlp).forward in _MLPS
        # An EAGLE head's first layer has none before its attention.
        and all(isinstance(norm, RMSNorm) and norm.has_weight for norm in norms)
        and all(norm.variance_size_override is None for norm in norms)
        and layer.input_layernorm.weight.shape[0] <= linear.MOST_NORMED
    )


def _is_plain(layer: Any, cls: type) -> bool:
    """False for a wrapper with adapters, and for quantised weights."""
    return type(layer) is cls and isinstance(getattr(layer, "quant_method", None), linear.FewRowsLinear)


def _layer(
    layer: Any,
    original: Callable[..., _States],
    positions: torch.Tensor,
    hidden_states: torch.Tensor,
    residual: torch.Tensor | None,
) -> _States:
    is_plain = _is_plain(layer.self_attn.qkv_proj, QKVParallelLinear) and _gates(layer.mlp)
    if not 0 < hidden_states.shape[0] <= linear.FEW_ROWS or not is_plain:
        return original(positions, hidden_states, residual)
    first = _unnormed(hidden_states, residual, layer.input_layernorm)
    attended = layer.self_attn(positions=positions, hidden_states=first)
    second = _unnormed(attended, first.added, layer.post_attention_layernorm)
    return layer.mlp(second), second.added


def _mlp(mlp: Any, original: Callable[..., torch.Tensor], x: torch.Tensor | linear.Unnormed) -> torch.Tensor:
    if not _gates(mlp):
        return original(x)
    layer = mlp.gate_up_proj
    output: torch.Tensor = mlp.down_proj(linear.linear(x, layer.weight, layer.bias, gated=True))[0]
    return output


def _gates(mlp: Any) -> bool:
    return _is_plain(mlp.gate_up_proj, MergedColumnParallelLinear)


def _unnormed(x: torch.Tensor, residual: torch.Tensor | None, norm: RMSNorm) -> linear.Unnormed:
    return linear.Unnormed(x, residual, norm.weight, norm.variance_epsilon)
