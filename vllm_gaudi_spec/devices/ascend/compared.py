"""Models whose results in captured graphs on an NPU, real or emulated, were verified against transformers."""

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
