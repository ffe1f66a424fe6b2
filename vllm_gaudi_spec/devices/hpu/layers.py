"""Replaces vLLM's norms, rotary embeddings, and experts with Gaudi's fused operators, and replaces its logits scaling.

Importing this module registers the replacements.
"""

from __future__ import annotations

import torch
from torch import nn

from vllm_gaudi_spec.devices.common import experts, layers
from vllm_gaudi_spec.devices.hpu import experts as hpu_experts
from vllm_gaudi_spec.upstream.layers import LogitsProcessor

PROVIDER = "vgs_hpu"


_rms_norm = layers.find_kernel("habana_frameworks.torch.hpex.normalization", "FusedRMSNorm")
_rotate = layers.find_kernel("habana_frameworks.torch.hpex.kernels", "apply_rotary_pos_emb")
_modes = layers.find_kernel("habana_frameworks.torch.hpex.kernels", "RotaryPosEmbeddingMode")


# --- norms ---


def _norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    # The kernel requires three dimensions.
    return _rms_norm.apply(x.reshape(1, -1, x.shape[-1]), weight, epsilon).view(x.shape)


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    added = x + residual
    return _norm(added, weight, epsilon), added


layers.register_norms(PROVIDER, _norm, _add_norm, available=_rms_norm is not None)


# --- rotary embeddings ---


def _turn(heads_THR: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, *, halves: bool) -> torch.Tensor:
    mode = _modes.BLOCKWISE if halves else _modes.PAIRWISE
    turned: torch.Tensor = _rotate(heads_THR, cos_T1R, sin_T1R, None, 0, mode)
    return turned


if _rotate is not None and _modes is not None:
    layers.register_rotary("Hpu", _turn)


experts.register(hpu_experts.fused())


# --- logits ---


@LogitsProcessor.register_oot
class HpuLogitsProcessor(LogitsProcessor):
    """Scales logits, as required by Granite and Cohere, without writing through a view.

    vLLM scales the logits in place. They are a view that excludes vocabulary padding, and a captured Gaudi graph cannot
    write through views (quirk L06).
    """

    def forward(
        self,
        lm_head: nn.Module,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None = None,
        skip_gather: bool = False,
    ) -> torch.Tensor | None:
        # Do not call `super()`, because `self` is a wrapper of a different class if LoRA is enabled.
        if self.logits_as_input:
            logits: torch.Tensor | None = hidden_states
        else:
            logits = self._get_logits(hidden_states, lm_head, embedding_bias, skip_gather)
        if logits is None:  # this rank does not receive the gathered logits
            return None
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits if self.scale == 1.0 else logits * self.scale
