"""A layer's parts in FP8, with the scales of a file: linears, the matmuls and the softmax of attention, caches.

As Intel Neural Compressor's on a Gaudi: operands are cast, products are scaled back in the dtype of the model, and a
bias is added after that. A cache keeps 8 bits a number, whoever asked for them: a QUANT_CONFIG or --kv-cache-dtype.
"""

from __future__ import annotations

import torch
from torch import nn

from vllm_gaudi_spec.attention.operations import Matmul, Rows, Softmax, VLLMKVCache
from vllm_gaudi_spec.config import GAUDI3
from vllm_gaudi_spec.quantization.fp8 import Arithmetic

KV_DTYPE = torch.float8_e4m3fn
"""Of quantized caches."""


def kv_range(fp8_range: str | None) -> str:
    """Whose e4m3 numbers KV is kept in. `fp8_range`: the device's, or the user's choice. Without either it is that of a
    Gaudi 3, simulated, which checkpoints' scales are made for."""
    return fp8_range or GAUDI3


class Cast(nn.Module):
    """To e4m3 by a scale, and back."""

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
        """e4m3 numbers scaled back."""
        return self._arithmetic.uncast(x, self.scale, dtype)


class CalibratedLinear(nn.Module):
    """Replaces a layer's `quant_method`; the layer gives up its weight."""

    weight_scale: torch.Tensor

    def __init__(
        self,
        layer: nn.Module,
        weight_KN: torch.Tensor,
        input_scale: torch.Tensor,
        weight_scale: torch.Tensor,
        arithmetic: Arithmetic,
    ) -> None:
        """`weight_KN`: e4m3 already, by `weight_scale`, which is [] or [N]."""
        super().__init__()
        self._arithmetic = arithmetic
        self.input = Cast(input_scale, arithmetic)
        self.weight_KN = nn.Parameter(arithmetic.keep(weight_KN), requires_grad=False)
        self.register_buffer("weight_scale", weight_scale.float(), persistent=False)
        layer.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
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
    def __init__(self, scale: torch.Tensor, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.output = Cast(scale, arithmetic)

    def forward(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return self.output.back(self.output(super().forward(x, dim)), x.dtype)


class Fp8Cache(VLLMKVCache):
    def __init__(self, scale: torch.Tensor, arithmetic: Arithmetic, dtype: torch.dtype) -> None:
        """`scale`: [], or [heads, 1]. `dtype`: the model's, in which blocks are read."""
        super().__init__()
        self.input = Cast(scale, arithmetic)
        self._dtype = dtype

    def forward(self, input: torch.Tensor, cache: Rows, slot_mapping: torch.Tensor) -> Rows:
        return super().forward(self.input(input).to(KV_DTYPE), cache, slot_mapping)

    def fetch_from_cache(self, cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        return self.input.back(super().fetch_from_cache(cache, blocks), self._dtype)
