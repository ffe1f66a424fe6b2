"""Supported architectures with recurrent layers, and the number of recurrent states to store."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


class Gates(NamedTuple):
    """The number of gate values per token in a layer, for each head in its state."""

    per_head: int = 0
    per_key: int = 0
    """The number of additional gate values for each component of a head's key."""


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
"""Architectures whose complete models were compared with transformers on the CPU.

`DeviceTraits.recurrent_models` lists the architectures that were compared in captured graphs.
"""


def num_pending(num_drafts: int) -> int:
    """Return the maximum number of pending tokens per row. The next step knows how many were accepted."""
    return 1 + num_drafts if num_drafts else 0


def describe_states(num_rows: int) -> str:
    """Return a description of the recurrent states for messages about memory."""
    return f"recurrent states of {num_rows} requests (--max-num-seqs)"


def describe_snapshots(num_slots: int) -> str:
    return f"{num_slots} snapshots of recurrent states (state_snapshots)"


_MOST_SNAPSHOTS = 32
"""The default number of snapshots is the number of requests, up to this limit. In large models, a state takes 75 MB or
more."""


def num_snapshots(vllm_config: VllmConfig, requested: int | None) -> int:
    """Return the number of recurrent states to keep for the prefix cache, or 0 if prefix caching is disabled.

    `requested` is the value of the option `state_snapshots`.
    """
    model = vllm_config.model_config
    if model is None or not (has_states(model) and vllm_config.cache_config.enable_prefix_caching):
        return 0
    return requested or min(vllm_config.scheduler_config.max_num_seqs, _MOST_SNAPSHOTS)


def has_states(model: ModelConfig) -> bool:
    return bool(model.is_hybrid or model.is_attention_free)
