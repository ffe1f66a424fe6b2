"""vLLM's attention layers, adapted to this platform's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.upstream.patching import wrap

if TYPE_CHECKING:
    import torch


def return_attention_outputs(impl_class: type, attend_layer: Callable[..., torch.Tensor]) -> None:
    """Make attention layers with an implementation of `impl_class` return the tensor computed by `attend_layer`.

    Reason: vLLM's layer allocates the output, and the implementation writes to it through a view. HPU graphs do not
    support in-place writes through views (see the limitations in Intel's HPU Graphs documentation), so vllm-gaudi
    replaces this method, too. In addition, the output buffer would be an input that captured graphs keep in memory.
    Remove when: upstream's layer uses the output that its implementation returns.
    """
    from vllm.model_executor.layers.attention.attention import Attention

    def forward(
        original: Callable[..., torch.Tensor],
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if not isinstance(layer.impl, impl_class):
            return original(layer, query, key, value, output_shape, output_dtype)
        attended_THD = attend_layer(
            layer,
            query.view(-1, layer.num_heads, layer.head_size),
            None if key is None else key.view(-1, layer.num_kv_heads, layer.head_size),
            None if value is None else value.view(-1, layer.num_kv_heads, layer.head_size_v),
        )
        attended = attended_THD.flatten(1) if output_shape is None else attended_THD.view(-1, output_shape[-1])
        return attended if output_dtype is None else attended.to(output_dtype)

    wrap(Attention, "forward", forward)


def make_mla_layers(layer_class: type) -> None:
    """Make all MLA layers instances of `layer_class`, a subclass of vLLM's class.

    Reason: vLLM's models and its transformers backend create instances of the layer class, whose forward method expects
    the metadata of upstream's backends. A platform cannot register a replacement for this class.
    Remove when: a platform can register an `MLAAttention` subclass.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    def make(original: Callable[..., None], layer: Any, *args: Any, **named: Any) -> None:
        original(layer, *args, **named)
        if type(layer) is MLAAttention:
            layer.__class__ = layer_class

    wrap(MLAAttention, "__init__", make)
