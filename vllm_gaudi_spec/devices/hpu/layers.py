"""Gaudi's fused norms and rotary embeddings, and experts, in place of vLLM's layers. Importing this registers them."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding

from vllm_gaudi_spec.devices.common import dense_experts, ir_norms, rotary_classes  # noqa: F401

logger = init_logger(__name__)

PROVIDER = "vgs_hpu"


def _load(module: str, name: str) -> Any:
    """A kernel of the bridge; None, said once, where this build has none."""
    kernel = getattr(importlib.import_module(f"habana_frameworks.torch.hpex.{module}"), name, None)
    if kernel is None:
        logger.info("This build has no %s; plain torch operations serve.", name)
    return kernel


_rms_norm = _load("normalization", "FusedRMSNorm")
_rotate = _load("kernels", "apply_rotary_pos_emb")
_modes = _load("kernels", "RotaryPosEmbeddingMode")


# --- norms ---


def _norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    # The kernel wants three dimensions.
    return _rms_norm.apply(x.reshape(1, -1, x.shape[-1]), weight, epsilon).view(x.shape)


def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    added = x + residual
    return _norm(added, weight, epsilon), added


ir_norms.register(PROVIDER, _norm, _add_norm, available=_rms_norm is not None)


# --- rotary embeddings ---


def _turn(heads_THR: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, *, halves: bool) -> torch.Tensor:
    mode = _modes.BLOCKWISE if halves else _modes.PAIRWISE
    turned: torch.Tensor = _rotate(heads_THR, cos_T1R, sin_T1R, None, 0, mode)
    return turned


if _rotate is not None and _modes is not None:
    for _base in (RotaryEmbedding, DeepseekScalingRotaryEmbedding):
        rotary_classes.register("Hpu", rotary_classes.turning(_turn), _base)
