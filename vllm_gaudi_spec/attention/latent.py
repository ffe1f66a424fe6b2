"""Multi-head latent attention, where each token has one vector that serves as key and value for all heads.

Dimensions: T tokens, H query heads. Queries are projected into the latent space before attention, and results are
projected out of it afterwards, so prompt chunks, decodes and verify steps use the same padded batches as other layers.
Importing this module replaces vLLM's wrapper, and `upstream.make_mla_layers` replaces the layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from vllm.config import get_current_vllm_config

from vllm_gaudi_spec.attention.backend import RectangleAttentionImpl, attend_layer
from vllm_gaudi_spec.attention.metadata import IndexQueries
from vllm_gaudi_spec.upstream.attention_backend import get_forward_context
from vllm_gaudi_spec.upstream.kv_cache import MLAAttentionSpec
from vllm_gaudi_spec.upstream.layers import MLAAttention, MultiHeadLatentAttentionWrapper

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.upstream.kv_cache import KVCacheSpec
    from vllm_gaudi_spec.upstream.models import Indexer


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
        indexer: Indexer | None,
        topk_indices_buffer: torch.Tensor | None = None,
        index_group_builder: object | None = None,
        **common: Any,
    ) -> None:
        """Get the number of selected keys from the size of `topk_indices_buffer`, if there is one.

        The buffer itself is not used, because the selection is a mask that layers share during a forward pass.
        """
        super().__init__(**common)
        self.value_size = kv_lora_rank
        if topk_indices_buffer is not None:
            self.num_selected = topk_indices_buffer.shape[-1]
        if indexer is not None:
            self.index_size = indexer.head_dim
            self.head_size += self.index_size


class Index(NamedTuple):
    """An indexer's keys and queries for a batch of tokens."""

    key_TR: torch.Tensor
    queries: IndexQueries | None
    """None if every row is too short to require a selection of keys."""


class LatentAttention(MLAAttention):
    """vLLM's MLA layer with the interface of an attention layer, still registered as a KV layer with its weights.

    With sparse attention, a token's KV also contains the indexer's key, after the latent vector. Both are written and
    read together, so block management, prefix caching and drafting work unchanged.
    """

    impl: LatentAttentionImpl

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        spec = super().get_kv_cache_spec(vllm_config)
        # vLLM groups layers that share a selection, but vLLM's index tables are not used here.
        groups = dict(is_index_group_leader=False) if isinstance(spec, MLAAttentionSpec) else {}
        return replace(spec, head_size=self.impl.head_size, **groups)

    def bind_kv_cache(self, kv_cache: Any) -> None:
        self.kv_cache = kv_cache

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        # Only the two halves of this weight, `W_UK_T` and `W_UV`, are used.
        self.kv_b_proj.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        output_shape: torch.Size | None = None,
        q_dcp_replicated: torch.Tensor | None = None,
        index: Index | None = None,
    ) -> torch.Tensor:
        nope_THN, rope_THR = q.split((self.qk_nope_head_dim, self.qk_rope_head_dim), dim=-1)
        row, query = [kv_c_normed.unsqueeze(1), k_pe], [_by_head(nope_THN, self.W_UK_T), rope_THR]
        if index is not None:
            row.append(index.key_TR.unsqueeze(1))
            # Pad queries with zeros at the index keys, because removing the index keys would copy all stored keys.
            query.append(rope_THR.new_zeros(*rope_THR.shape[:-1], self.impl.index_size))
        attended_THR = attend_layer(
            self, torch.cat(query, dim=-1), torch.cat(row, dim=-1), None, index and index.queries
        )
        return _by_head(attended_THR, self.W_UV).flatten(1)


def _by_head(x_THI: torch.Tensor, weight_HIO: torch.Tensor) -> torch.Tensor:
    """Multiply each head's input by the head's matrix. Returns [T, H, O]."""
    return torch.bmm(x_THI.transpose(0, 1), weight_HIO).transpose(0, 1)


@MultiHeadLatentAttentionWrapper.register_oot
class LatentAttentionWrapper(MultiHeadLatentAttentionWrapper):
    """Replacement for vLLM's wrapper around the layer, which contains projections, norms and the rotary embedding."""

    rotary_emb: nn.Module | None
    mla_attn: LatentAttention

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        if (indexer := self.indexer) is not None:
            # The indexer's keys are stored in the same KV cache as its layer's.
            del get_current_vllm_config().compilation_config.static_forward_context[indexer.k_cache.prefix]
            del indexer.k_cache, indexer.indexer_op
            self.topk_indices_buffer = indexer.topk_indices_buffer = None

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, llama_4_scaling: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Do the same as vLLM's `forward` without writing to views, which captured Gaudi graphs do not support."""
        index: Index | None = None
        latent_size = self.kv_lora_rank + self.qk_rope_head_dim
        if self.q_lora_rank is None:
            latent = self.kv_a_proj_with_mqa(hidden_states)[0]
            query = self.q_proj(hidden_states)[0]
        else:
            query, latent = self.fused_qkv_a_proj(hidden_states)[0].split((self.q_lora_rank, latent_size), dim=-1)
            query = self.q_a_layernorm(query)
            if self.indexer is not None:
                index = self._index(hidden_states, query, positions)
            query = self.q_b_proj(query)[0]
        compressed, key = latent.split((self.kv_lora_rank, self.qk_rope_head_dim), dim=-1)
        query_THD, key_T1R = query.view(-1, self.num_heads, self.qk_head_dim), key.unsqueeze(1)
        if self.rotary_emb is not None:
            nope_THN, rope_THR = query_THD.split((self.qk_nope_head_dim, self.qk_rope_head_dim), dim=-1)
            rope_THR, key_T1R = self.rotary_emb(positions, rope_THR, key_T1R)
            query_THD = torch.cat((nope_THN, rope_THR), dim=-1)
        if llama_4_scaling is not None:
            query_THD = query_THD * llama_4_scaling
        attended = self.mla_attn(query_THD, self.kv_a_layernorm(compressed), key_T1R, index=index)
        if self.g_proj is not None:
            attended = attended * self.g_proj(hidden_states)[0].sigmoid()
        output: torch.Tensor = self.o_proj(attended)[0]
        return output

    def _index(self, hidden_TH: torch.Tensor, compressed_query: torch.Tensor, positions: torch.Tensor) -> Index:
        """Compute index keys and queries in the model's dtype, like transformers; vLLM's kernels use FP8."""
        indexer = self.indexer
        rope_size, head_size, num_heads = indexer.rope_dim, indexer.head_dim, indexer.n_head
        key_TR, weights_TI = indexer.wk_weights_proj(hidden_TH)[0].split((head_size, num_heads), dim=-1)
        query_TIR = indexer.wq_b(compressed_query)[0].view(-1, num_heads, head_size)
        sizes = (rope_size, head_size - rope_size)
        key_rope, key_rest = indexer.k_norm(key_TR).unsqueeze(1).split(sizes, dim=-1)
        query_rope, query_rest = query_TIR.split(sizes, dim=-1)
        query_rope, key_rope = self.indexer_rope_emb(positions, query_rope, key_rope)
        key_TR = torch.cat((key_rope.view(key_rest.shape[0], 1, rope_size), key_rest), dim=-1).squeeze(1)
        call = get_forward_context().attn_metadata[self.mla_attn.layer_name]
        if call.block_table_BW.shape[1] * self.mla_attn.impl.spec.block_size <= indexer.topk_tokens:
            return Index(key_TR, None)
        query_TIR = torch.cat((query_rope.view(-1, num_heads, rope_size), query_rest), dim=-1)
        scale = indexer.softmax_scale * indexer.n_head_scale
        return Index(key_TR, IndexQueries(query_TIR, weights_TI.float() * scale))
