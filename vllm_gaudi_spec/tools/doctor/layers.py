"""Counts a model's layers with KV or with recurrent state, and computes the size of states before layers are built."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.recurrent.states import LayerShape
from vllm_gaudi_spec.recurrent.table import SERVED, Gates, has_states

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

# Layer types in the configurations of models. A hybrid layer has both KV and recurrent state.
_WITH_STATE = ("linear_attention", "mamba", "conv", "hybrid")
_WITH_KV = ("full_attention", "attention", "hybrid")


def num_layers_with_kv(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the number of layers with KV on a rank."""
    if model.is_attention_free:
        return 0
    if model.is_hybrid:
        return _count(model, parallel, _WITH_KV)
    # vLLM counts no layers if a checkpoint has MTP layers without specifying their number.
    return max(int(model.get_num_layers(parallel)), 1)


def state_bytes(vllm_config: VllmConfig, num_rows: int, num_pending: int) -> int:
    """Return the size of `num_rows` rows of recurrent state on a rank, or 0 for targets without recurrent layers."""
    model = vllm_config.model_config
    if not has_states(model):
        return 0
    if model.is_attention_free:
        num_layers = int(model.get_num_layers(vllm_config.parallel_config))
    else:
        num_layers = _count(model, vllm_config.parallel_config, _WITH_STATE)
    return num_rows * num_layers * _layer_shape(vllm_config).num_bytes(num_pending)


def _count(model: ModelConfig, parallel: ParallelConfig, kinds: tuple[str, ...]) -> int:
    config = model.hf_text_config
    types = (
        getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None) or _list_kimi_types(config)
    )
    start, end = model.get_layers_start_end_indices(parallel)
    return sum(kind in kinds for kind in types[start:end])


def _list_kimi_types(config: Any) -> list[str]:
    """List the types of Kimi Linear's layers, whose numbers in the configuration start at 1."""
    recurrent = config.linear_attn_config["kda_layers"]
    numbers = range(1, config.num_hidden_layers + 1)
    return ["linear_attention" if number in recurrent else "full_attention" for number in numbers]


def _layer_shape(vllm_config: VllmConfig) -> LayerShape:
    """Return the shape of the state in vLLM's class without drafts. With drafts, the convolution stores more inputs."""
    from vllm_gaudi_spec.upstream.models import ModelRegistry, is_conv_state_dim_first

    model = vllm_config.model_config
    made_by: Any
    made_by, architecture = ModelRegistry.resolve_model_cls(model.architectures, model_config=model)
    without_drafts = copy(vllm_config)
    without_drafts.speculative_config = None
    inputs, *states = made_by.get_mamba_state_shape_from_config(without_drafts)
    dtypes = made_by.get_mamba_state_dtype_from_config(vllm_config)
    num_channels, num_before = inputs if is_conv_state_dim_first() else reversed(inputs)
    state = tuple(states[0]) if states else ()
    return LayerShape(
        num_channels=num_channels,
        num_taps=num_before + 1,
        num_gates=count_gates(SERVED[architecture], state),
        state=state,
        dtype=dtypes[0],
        state_dtype=dtypes[-1],
    )


def count_gates(gates: Gates, state: tuple[int, ...]) -> int:
    """Return the number of gates, given `state` as (heads, key size, value size), or () for a convolution only."""
    return state[0] * (gates.per_head + gates.per_key * state[1]) if state else 0
