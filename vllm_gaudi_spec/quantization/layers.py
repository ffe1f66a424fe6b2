"""FP8 modules with precomputed scales: linear layers, attention's matmuls and softmax, and KV caches.

These modules compute the same results as Intel Neural Compressor's modules on a Gaudi: they cast the operands, scale
the result back in the model's dtype, and then add the bias. The modules for KV caches are used for QUANT_CONFIG and for
--kv-cache-dtype.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from vllm_gaudi_spec.attention.operations import Matmul, Rows, Softmax, VLLMKVCache
from vllm_gaudi_spec.config import GAUDI3
from vllm_gaudi_spec.quantization.fp8 import Arithmetic

KV_DTYPE = torch.float8_e4m3fn
"""The dtype of quantized caches."""


def kv_range(fp8_range: str | None) -> str:
    """Return the card whose e4m3 range is used for KV: the device's own, or a simulated Gaudi 3.

    The scales in checkpoints are computed for the range of a Gaudi 3.
    """
    return fp8_range or GAUDI3


class Cast(nn.Module):
    """A module that rounds values by casting them to e4m3 with a scale and back."""

    scale: torch.Tensor
    inverse: torch.Tensor

    def __init__(self, scale: torch.Tensor, arithmetic: Arithmetic) -> None:
        super().__init__()
        self._arithmetic = arithmetic
        self.register_buffer("scale", scale.float(), persistent=False)
        self.register_buffer("inverse", 1 / self.scale, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._arithmetic.cast(x, self.inverse)

    def back(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._arithmetic.uncast(x, self.scale, dtype)


class CalibratedLinear(nn.Module):
    """A quantization method for one linear layer, which replaces the layer's weight with an FP8 weight."""

    weight_scale: torch.Tensor

    def __init__(
        self,
        layer: Any,
        weight_KN: torch.Tensor,
        input_scale: torch.Tensor,
        weight_scale: torch.Tensor,
        arithmetic: Arithmetic,
    ) -> None:
        """Store an e4m3 weight and its scale, whose shape is [] or [N]."""
        super().__init__()
        self._arithmetic = arithmetic
        self.input = Cast(input_scale, arithmetic)
        self.weight_KN = nn.Parameter(arithmetic.keep(weight_KN), requires_grad=False)
        self.register_buffer("weight_scale", weight_scale.float(), persistent=False)
        layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    def apply(  # type: ignore[override]  # as in vLLM's linear methods
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = self._arithmetic.multiply(self.input(x), self.weight_KN, self.input.scale, self.weight_scale, x.dtype)
        return out if bias is None else out + bias


class Fp8Matmul(Matmul):
    def __init__(self, x_scale: torch.Tensor, y_scale: torch.Tensor, arithmetic: Arithmetic) -> None:
        super().__init__()
        self._arithmetic = arithmetic
        self.x, self.y = Cast(x_scale, arithmetic), Cast(y_scale, arithmetic)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self._arithmetic.multiply(self.x(x), self.y(y), self.x.scale, self.y.scale, x.dtype)


class Fp8Softmax(Softmax):
    """A softmax that rounds its result to FP8."""

    def __init__(self, scale: torch.Tensor, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.output = Cast(scale, arithmetic)

    def forward(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self.output.back(self.output(super().forward(x, dim)), x.dtype)


class Fp8Cache(VLLMKVCache):
    def __init__(self, scale: torch.Tensor, arithmetic: Arithmetic, dtype: torch.dtype) -> None:
        """Initialize the module.

        Args:
            scale: The scale of the result, [] or [heads, 1].
            dtype: The model's dtype, in which the rounded result is returned.
        """
        super().__init__()
        self.input = Cast(scale, arithmetic)
        self._dtype = dtype

    def forward(self, input: torch.Tensor, cache: Rows, slot_mapping: torch.Tensor) -> Rows:
        return super().forward(self.input(input).to(KV_DTYPE), cache, slot_mapping)

    def fetch_from_cache(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        return self.input.back(super().fetch_from_cache(cache, blocks), self._dtype)


def serve_linear(layer: Any, linear: Any) -> None:
    """Make a linear layer from vLLM or torch compute its output with `linear.apply(layer, x, bias)`."""
    if isinstance(layer, nn.Linear):
        layer.served_by = linear
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    else:
        layer.quant_method = linear


def _forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = layer.served_by.apply(layer, x, layer.bias)
    return out
