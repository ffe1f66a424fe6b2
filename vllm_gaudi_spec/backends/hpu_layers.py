"""Gaudi's fused norms and rotary embeddings, and experts, in place of vLLM's layers. Importing this registers them."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding, RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding

from vllm_gaudi_spec.backends import hpu_moe, ir_norms, rotary_classes  # noqa: F401

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


class _FusedRotary:
    """Stands before a class of vLLM's that turns queries and keys as `RotaryEmbedding` does."""

    def forward_oot(
        self: RotaryEmbeddingBase, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        table = self._match_cos_sin_cache_dtype(query)
        cos, sin = table.index_select(0, positions.flatten()).unsqueeze(1).chunk(2, dim=-1)
        if self.is_neox_style:
            mode, cos, sin = _modes.BLOCKWISE, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        else:
            mode = _modes.PAIRWISE
            cos, sin = (part.unsqueeze(-1).expand(*part.shape, 2).flatten(-2) for part in (cos, sin))

        def turn(heads: torch.Tensor) -> torch.Tensor:
            split = heads.view(cos.shape[0], -1, self.head_size)
            turned = _rotate(split[..., : self.rotary_dim], cos, sin, None, 0, mode)
            if self.rotary_dim < self.head_size:
                turned = torch.cat((turned, split[..., self.rotary_dim :]), dim=-1)
            return turned.reshape(heads.shape)

        return turn(query), None if key is None else turn(key)


if _rotate is not None and _modes is not None:
    for _base in (RotaryEmbedding, DeepseekScalingRotaryEmbedding):
        rotary_classes.register("Hpu", _FusedRotary, _base)
