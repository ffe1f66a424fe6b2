"""Models that were compared with transformers in captured graphs on a real or emulated NPU."""

from __future__ import annotations

RECURRENT = (
    "FalconH1ForCausalLM",
    "FalconMambaForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JambaForCausalLM",
    "Lfm2ForCausalLM",
    "MambaForCausalLM",
    "NemotronHForCausalLM",
    "Qwen3NextForCausalLM",
)
"""Architectures with recurrent layers."""
