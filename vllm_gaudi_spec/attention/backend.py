"""Attention implementation for vLLM that calls the device's kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config_or_none

from vllm_gaudi_spec.attention import torch_ops
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec, IndexQueries
from vllm_gaudi_spec.attention.operations import PLAIN, Matmul, Softmax, VLLMKVCache
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.upstream.attention_backend import (
    AttentionImpl,
    AttentionType,
    get_forward_context,
)

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend


class RectangleAttentionImpl(AttentionImpl, nn.Module):
    value_size: int | None = None
    num_selected: int | None = None
    index_size = 0
    """See `AttentionLayerSpec`."""
    layer_operations = False
    kv_dtype: torch.dtype | None = None
    """The KV cache's dtype, if it differs from the model's dtype."""
    zero_padding: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Zeroes the padding queries while the layer is being calibrated."""
    slopes: torch.Tensor | None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        nn.Module.__init__(self)
        if attn_type not in (AttentionType.DECODER, AttentionType.ENCODER_ONLY):
            raise UnsupportedConfigError(f"attention of type {attn_type} is not supported; use a decoder-only model.")
        self.is_causal = attn_type == AttentionType.DECODER
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = float(logits_soft_cap or 0.0)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.dtype = torch.get_default_dtype()
        """The model's dtype, which is the default dtype while vLLM builds layers."""
        config = get_current_vllm_config_or_none()
        has_model = config is not None and config.model_config is not None
        self.model_type: str = config.model_config.hf_text_config.model_type if has_model else ""
        self.sinks = sinks
        """Attention sinks, which are model parameters."""
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.register_buffer("slopes", slopes, persistent=False)
        self.has_written = False
        """Whether this layer has ever written KV. The value is checked after warm-up."""

    def make_layer_operations(self) -> None:
        """Turn matmuls, softmax and caches into submodules of this layer, so that they can be replaced."""
        self.layer_operations = True
        self.k_cache, self.v_cache = VLLMKVCache(), VLLMKVCache()
        self.matmul_qk, self.softmax, self.matmul_av = Matmul(), Softmax(), Matmul()

    def quantize_kv(self, dtype: torch.dtype, k_cache: VLLMKVCache, v_cache: VLLMKVCache, matmul: Matmul) -> None:
        """Store KV in `dtype` from now on.

        `matmul` multiplies the values read from the caches, unless the layer has its own matmul module.
        """
        self.kv_dtype = dtype
        self.k_cache, self.v_cache = k_cache, v_cache
        if not self.layer_operations:
            self.matmul_qk, self.softmax, self.matmul_av = matmul, Softmax(), matmul

    def bind(self, layer: Any, kv_cache: Any, backend: DeviceBackend) -> None:
        """Choose the device's attention kernel for a layer and its KV cache.

        Raises RuntimeError if the layer and the cache differ in shape or dtype. Kernels take both from the layer, so
        they would write past the end of a smaller cache.
        """
        self.has_written = False
        found = backend.attention.kv_shape(kv_cache)
        row_size = self.head_size if self.value_size is not None else 2 * self.head_size
        needed = found._replace(num_kv_heads=self.num_kv_heads, row_size=row_size, dtype=self.kv_dtype or self.dtype)
        if found != needed:
            raise RuntimeError(f"The KV cache of {layer.layer_name} is {found}, but its kernel needs {needed}.")
        self.spec = AttentionLayerSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scale=self.scale,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            dtype=self.dtype,
            block_size=found.block_size,
            value_size=self.value_size,
            num_selected=self.num_selected,
            index_size=self.index_size,
            attention_chunk=getattr(layer, "attention_chunk_size", None),
            is_causal=self.is_causal,
            layer_operations=self.layer_operations,
            kv_dtype=self.kv_dtype,
            model_type=self.model_type,
            operations=self if self.layer_operations or self.kv_dtype is not None else PLAIN,
            sinks_H=self.sinks,
            slopes_H=self.slopes,
        )
        self._finite = backend.attention.finite
        self._ops: Any = backend.attention if backend.attention.supports_attention(self.spec) else torch_ops
        # Whether prompt chunks may be split into slices (`vllm_gaudi_spec.slices`).
        self.reads_slices = self._ops is not torch_ops and backend.attention.reads_slices(self.spec)

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor | None,
        kv_cache: Any,
        slot_mapping: torch.Tensor,
    ) -> None:
        assert key.dtype == self.dtype
        # This KV block may later be assigned to another request while it still holds the values written here.
        key, value = self._finite(key), None if value is None else self._finite(value)
        self._ops.write_kv(key, value, kv_cache, slot_mapping, self.spec)
        self.has_written = True

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        kv_cache: Any,
        attn_metadata: AttentionCall,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if output is not None:
            raise RuntimeError("attention returns its output; see upstream.return_attention_outputs")
        if self.zero_padding is not None:
            query = self.zero_padding(query)
        spans = attn_metadata.spans
        if spans is not None and spans.in_windows_only and self.sliding_window is None:
            attn_metadata = replace(attn_metadata, spans=None)  # the copy shares the cached plans
        stores_own_kv = self.kv_dtype is None and self.kv_sharing_target_layer_name is None
        if attn_metadata.from_start and stores_own_kv and key is not None and value is not None:
            attn_metadata = replace(attn_metadata, fresh_kv=(self._finite(key), self._finite(value)))
        attended: torch.Tensor = self._ops.attend(query, kv_cache, attn_metadata, self.spec)
        return attended


def attend_layer(
    layer: Any,
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor | None,
    value_TKD: torch.Tensor | None,
    index: IndexQueries | None = None,
) -> torch.Tensor:
    """Write a layer's KV and compute its attention. Returns [T, H, output size].

    Without a key, the layer reads the KV that another layer has written. `index` contains the index queries if the
    layer selects keys.
    """
    context = get_forward_context()
    if key_TKD is not None and layer.impl.kv_sharing_target_layer_name is None:
        slots_T = context.slot_mapping[layer.layer_name]
        layer.impl.do_kv_cache_update(layer, key_TKD, value_TKD, layer.kv_cache, slots_T)
    call = context.attn_metadata[layer.layer_name].replace_index(index)
    attended: torch.Tensor = layer.impl.forward(layer, query_THD, key_TKD, value_TKD, layer.kv_cache, call)
    return attended
