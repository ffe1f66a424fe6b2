"""Models that were compared with transformers in captured graphs on an NPU, real or emulated."""

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
