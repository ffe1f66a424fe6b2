"""Runs Llama-style decoder layers with fewer kernels.

Each norm is computed in the linear layer that follows it, each gated activation in the linear layer that precedes it,
and rotary embeddings and KV writes in the attention kernel.

A layer is recognized by the forward method of its class. It runs as before, except that its attention and MLP may
receive unnormalized inputs. Both modules pass their inputs only to a linear layer, which applies the norm.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from vllm_gaudi_spec.devices.cuda import few_queries, linear
from vllm_gaudi_spec.devices.cuda.layers import RotatesInPlace
from vllm_gaudi_spec.upstream.attention_backend import get_forward_context
from vllm_gaudi_spec.upstream.decoders import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    Qwen2Attention,
    Qwen2DecoderLayer,
    Qwen2MLP,
    Qwen3Attention,
    Qwen3DecoderLayer,
)
from vllm_gaudi_spec.upstream.layers import MergedColumnParallelLinear, QKVParallelLinear, RMSNorm, SiluAndMul

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_LAYERS = {cls.forward for cls in (LlamaDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)}
_ATTENTIONS = {cls.forward for cls in (LlamaAttention, Qwen2Attention, Qwen3Attention)}
_MLPS = {cls.forward for cls in (LlamaMLP, Qwen2MLP)}

_States = tuple["torch.Tensor", "torch.Tensor"]


def install(model: nn.Module) -> None:
    """Replace the forward methods of a model's decoder layers. Call this after `linear.install`."""
    for module in model.modules():
        forward = type(module).forward
        if forward in _MLPS and isinstance(module.act_fn, SiluAndMul):
            module.forward = partial(_mlp, module, module.forward)
        elif forward in _ATTENTIONS and _turns_halves(module.rotary_emb):
            module.forward = partial(_attention, module, module.forward)
        elif forward in _LAYERS and _takes(module):
            module.forward = partial(_layer, module, module.forward)


def _turns_halves(rotary: Any) -> bool:
    return isinstance(rotary, RotatesInPlace) and bool(rotary.is_neox_style)  # type: ignore[attr-defined]


def _takes(layer: Any) -> bool:
    """Whether the linear layers that follow a layer's norms can compute these norms."""
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return (
        type(layer.self_attn).forward in _ATTENTIONS
        and type(layer.mlp).forward in _MLPS
        # The first layer in an EAGLE head has no norm before its attention.
        and all(isinstance(norm, RMSNorm) and norm.has_weight for norm in norms)
        and all(norm.variance_size_override is None for norm in norms)
        and layer.input_layernorm.weight.shape[0] <= linear.MOST_NORMED
    )


def _is_plain(layer: Any, cls: type) -> bool:
    """Whether a layer is unquantized and not wrapped for LoRA adapters."""
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


def _attention(
    attention: Any,
    original: Callable[..., torch.Tensor],
    positions: torch.Tensor,
    hidden_states: torch.Tensor | linear.Unnormed,
) -> torch.Tensor:
    layer, rotary, context = attention.attn, attention.rotary_emb, get_forward_context()
    call = context.attn_metadata[layer.layer_name]
    reads_own_kv = layer.impl.kv_sharing_target_layer_name is None
    if not reads_own_kv or not few_queries.takes(call, layer.impl.spec):
        return original(positions=positions, hidden_states=hidden_states)
    sizes = [attention.q_size, attention.kv_size, attention.kv_size]
    query, key, value = attention.qkv_proj(hidden_states)[0].split(sizes, dim=-1)
    if (norm := getattr(attention, "q_norm", None)) is not None:
        query, key = (
            normed(states.unflatten(-1, (-1, attention.head_dim))).flatten(-2)
            for normed, states in ((norm, query), (attention.k_norm, key))
        )
    projected = few_queries.Projected(query, key, value, context.slot_mapping[layer.layer_name])
    turning = few_queries.Rotary(positions, rotary._match_cos_sin_cache_dtype(query), rotary.rotary_dim)
    attended = few_queries.attend(projected, turning, layer.kv_cache, call, layer.impl.spec)
    layer.impl.has_written = True
    output: torch.Tensor = attention.o_proj(attended)[0]
    return output


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
