"""Multi-head latent attention: one row of numbers a token, which is the key of all heads and holds their value.

T tokens, H query heads. Queries are multiplied into the latent space before attention, and results out of it after,
so that prompt chunks, decodes and verify steps are one rectangle over the same rows as anywhere else. Importing this
module replaces vLLM's wrapper; `compat.make_mla_layers` does it for the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper

from vllm_gaudi_spec.attention.backend import RectangleAttentionBackend, RectangleAttentionImpl, attend_layer


class LatentAttentionBackend(RectangleAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[LatentAttentionImpl]:
        return LatentAttentionImpl

    @classmethod
    def is_mla(cls) -> bool:
        return True


class LatentAttentionImpl(RectangleAttentionImpl):
    def __init__(
        self,
        *,
        kv_lora_rank: int,
        q_lora_rank: int | None,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: nn.Module,
        indexer: object | None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.value_size = kv_lora_rank


class NoPrefill:
    """A no-op: vLLM's layer requires a second kernel, for prompts."""

    def __init__(self, **of_the_layer: Any) -> None:
        pass

    @staticmethod
    def get_name() -> str:
        return "no separate"


class LatentAttention(MLAAttention):
    """vLLM's layer, with its weights and its entry among the layers that keep KV, called as the others are."""

    def bind_kv_cache(self, kv_cache: Any) -> None:
        self.kv_cache = kv_cache

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        # Its halves are kept in the form that queries and results are multiplied with; the whole is not needed.
        self.kv_b_proj.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        output_shape: torch.Size | None = None,
        q_dcp_replicated: torch.Tensor | None = None,
    ) -> torch.Tensor:
        latent_T1D = torch.cat((kv_c_normed.unsqueeze(1), k_pe), dim=-1)
        nope_THN, rope_THR = q.split((self.qk_nope_head_dim, self.qk_rope_head_dim), dim=-1)
        query_THD = torch.cat((_by_head(nope_THN, self.W_UK_T), rope_THR), dim=-1)
        return _by_head(attend_layer(self, query_THD, latent_T1D, None), self.W_UV).flatten(1)


def _by_head(x_THI: torch.Tensor, weight_HIO: torch.Tensor) -> torch.Tensor:
    """[T, H, O]: each head's input times its own matrix."""
    return torch.bmm(x_THI.transpose(0, 1), weight_HIO).transpose(0, 1)


@MultiHeadLatentAttentionWrapper.register_oot
class LatentAttentionWrapper(MultiHeadLatentAttentionWrapper):
    """vLLM's work around its layer: projections, norms, rotary embedding."""

    rotary_emb: nn.Module | None

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, llama_4_scaling: torch.Tensor | None = None
    ) -> torch.Tensor:
        """vLLM's writes rotated and scaled queries into views, which a captured graph on a Gaudi does not take."""
        latent_size = self.kv_lora_rank + self.qk_rope_head_dim
        if self.q_lora_rank is None:
            latent = self.kv_a_proj_with_mqa(hidden_states)[0]
            query = self.q_proj(hidden_states)[0]
        else:
            query, latent = self.fused_qkv_a_proj(hidden_states)[0].split((self.q_lora_rank, latent_size), dim=-1)
            query = self.q_b_proj(self.q_a_layernorm(query))[0]
        compressed, key = latent.split((self.kv_lora_rank, self.qk_rope_head_dim), dim=-1)
        query_THD, key_T1R = query.view(-1, self.num_heads, self.qk_head_dim), key.unsqueeze(1)
        if self.rotary_emb is not None:
            nope_THN, rope_THR = query_THD.split((self.qk_nope_head_dim, self.qk_rope_head_dim), dim=-1)
            rope_THR, key_T1R = self.rotary_emb(positions, rope_THR, key_T1R)
            query_THD = torch.cat((nope_THN, rope_THR), dim=-1)
        if llama_4_scaling is not None:
            query_THD = query_THD * llama_4_scaling
        attended = self.mla_attn(query_THD, self.kv_a_layernorm(compressed), key_T1R)
        if self.g_proj is not None:
            attended = attended * self.g_proj(hidden_states)[0].sigmoid()
        output: torch.Tensor = self.o_proj(attended)[0]
        return output
