"""The supported architectures with recurrent layers, and what is known of their layers before they are built."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_gaudi_spec.recurrent.states import LayerShape

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig


class Gates(NamedTuple):
    """How many numbers gate a token in a layer, per head of its state."""

    per_head: int = 0
    per_key: int = 0
    """In addition, for each number of a head's key."""

    def count_gates(self, state: tuple[int, ...]) -> int:
        """Count the gates for a `state` of heads, numbers of a key and of a value; empty for a convolution alone."""
        return state[0] * (self.per_head + self.per_key * state[1]) if state else 0


_DELTA_NET, _KIMI_DELTA, _MAMBA_2, _MAMBA_1, _SHORT_CONVOLUTION = Gates(2), Gates(1, 1), Gates(1), Gates(), Gates()
SERVED = {
    "ColBERTLfm2Model": _SHORT_CONVOLUTION,
    "Qwen3NextForCausalLM": _DELTA_NET,
    "Qwen3_5ForCausalLM": _DELTA_NET,
    "Qwen3_5MoeForCausalLM": _DELTA_NET,
    "Qwen3_5ForConditionalGeneration": _DELTA_NET,
    "Qwen3_5MoeForConditionalGeneration": _DELTA_NET,
    "FalconH1ForCausalLM": _MAMBA_2,
    "FalconMambaForCausalLM": _MAMBA_1,
    "GraniteMoeHybridForCausalLM": _MAMBA_2,
    "JambaForCausalLM": _MAMBA_1,
    "JambaForSequenceClassification": _MAMBA_1,
    "KimiLinearForCausalLM": _KIMI_DELTA,
    "Lfm2ForCausalLM": _SHORT_CONVOLUTION,
    "Lfm2MoeForCausalLM": _SHORT_CONVOLUTION,
    "Mamba2ForCausalLM": _MAMBA_2,
    "MambaForCausalLM": _MAMBA_1,
    "NemotronHForCausalLM": _MAMBA_2,
    "NemotronHPuzzleForCausalLM": _MAMBA_2,
    "OlmoHybridForCausalLM": _DELTA_NET,
    "Zamba2ForCausalLM": _MAMBA_2,
}
"""Architectures that were compared with transformers as a whole, on the CPU."""
_ON_THE_CPU_ALONE = (
    "ColBERTLfm2Model",
    "JambaForSequenceClassification",
    "NemotronHPuzzleForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
)
CAPTURED: dict[tuple[str, str], tuple[str, ...]] = {
    ("hpu", "lazy"): tuple(name for name in SERVED if name not in _ON_THE_CPU_ALONE),
    ("hpu", "compiled"): (
        "FalconH1ForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "JambaForCausalLM",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "MambaForCausalLM",
        "NemotronHForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Zamba2ForCausalLM",
    ),
    ("npu", "captured"): (
        "FalconH1ForCausalLM",
        "FalconMambaForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "JambaForCausalLM",
        "Lfm2ForCausalLM",
        "MambaForCausalLM",
        "NemotronHForCausalLM",
        "Qwen3NextForCausalLM",
    ),
}
"""By device type and mode: architectures that were also compared with transformers in captured graphs."""

# Types of layers in configurations. A hybrid layer has both.
_WITH_STATE = ("linear_attention", "mamba", "conv", "hybrid")
_WITH_KV = ("full_attention", "attention", "hybrid")


def num_pending(num_drafts: int) -> int:
    """Return the most tokens of a row that a step leaves to the next one, which knows how many were accepted."""
    return 1 + num_drafts if num_drafts else 0


def describe_states(num_rows: int) -> str:
    """Name the states in messages about memory."""
    return f"recurrent states of {num_rows} requests (--max-num-seqs)"


def describe_snapshots(num_slots: int) -> str:
    return f"{num_slots} snapshots of recurrent states (state_snapshots)"


_MOST_SNAPSHOTS = 32
"""The default number of snapshots is that of requests, up to this. For large models a state is 75 MB and more."""


def num_snapshots(vllm_config: VllmConfig, requested: int | None) -> int:
    """Return how many states are kept for the prefix cache; 0 without one.

    `requested` is the option `state_snapshots`.
    """
    model = vllm_config.model_config
    if model is None or not (has_states(model) and vllm_config.cache_config.enable_prefix_caching):
        return 0
    return requested or min(vllm_config.scheduler_config.max_num_seqs, _MOST_SNAPSHOTS)


def has_states(model: ModelConfig) -> bool:
    return bool(model.is_hybrid or model.is_attention_free)


def num_layers_with_kv(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the number of layers with KV on one rank."""
    if model.is_attention_free:
        return 0
    if model.is_hybrid:
        return _count(model, parallel, _WITH_KV)
    # vLLM counts none if a checkpoint has MTP layers without giving their number.
    return max(int(model.get_num_layers(parallel)), 1)


def state_bytes(vllm_config: VllmConfig, num_rows: int, num_pending: int) -> int:
    """Return the size of the states of `num_rows` rows on one rank; 0 for targets without recurrent layers."""
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
    """List the types of Kimi Linear's layers, which vLLM's configuration gives as numbers from 1 on."""
    recurrent = config.linear_attn_config["kda_layers"]
    numbers = range(1, config.num_hidden_layers + 1)
    return ["linear_attention" if number in recurrent else "full_attention" for number in numbers]


def _layer_shape(vllm_config: VllmConfig) -> LayerShape:
    """Return the shape that vLLM's class would keep without drafts, with which its convolution has more inputs."""
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
        num_gates=SERVED[architecture].count_gates(state),
        state=state,
        dtype=dtypes[0],
        state_dtype=dtypes[-1],
    )
