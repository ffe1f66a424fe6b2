"""Linear layers whose weights stay 4-bit integers. An operator of the device converts them at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vllm_gaudi_spec.quantization.encodings import Words
from vllm_gaudi_spec.upstream.layers import (
    GroupQuantScaleParameter,
    LinearMethodBase,
    PackedvLLMParameter,
    UnquantizedLinearMethod,
)

_IN_WORD = 8


class Uint4Linear(LinearMethodBase):
    def __init__(self, *, convert: Callable[[Words, torch.dtype], torch.Tensor], group_size: int, prefix: str) -> None:
        """Convert weights with `convert`. `group_size` is the number of inputs that share a scale."""
        self._convert, self._group_size, self._prefix = convert, group_size, prefix

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        num_inputs, num_outputs = input_size_per_partition, sum(output_partition_sizes)
        if num_inputs % self._group_size or any(size % _IN_WORD for size in output_partition_sizes):
            # A rank's part begins or ends within a group or a word. The reader sees this method and dequantizes.
            layer.quant_method = UnquantizedLinearMethod()
            layer.quant_method.create_weights(
                layer,
                input_size_per_partition,
                output_partition_sizes,
                input_size,
                output_size,
                params_dtype,
                **extra_weight_attrs,
            )
            return
        dims = dict(input_dim=0, output_dim=1, weight_loader=extra_weight_attrs["weight_loader"])
        num_groups, num_words = num_inputs // self._group_size, num_outputs // _IN_WORD
        for name, height in (("weight_packed", num_inputs), ("weight_zero_point", num_groups)):
            words = torch.zeros(height, num_words, dtype=torch.int32)
            layer.register_parameter(
                name, PackedvLLMParameter(data=words, packed_dim=1, packed_factor=_IN_WORD, **dims)
            )
        not_loaded = torch.full((num_groups, num_outputs), torch.nan, dtype=params_dtype)
        layer.register_parameter("weight_scale", GroupQuantScaleParameter(data=not_loaded, **dims))

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if bool(layer.weight_scale.isnan().any()):
            raise RuntimeError(f"{self._prefix} is kept in 4 bits, but its checkpoint has no such weight for it.")

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        words = Words(layer.weight_packed, layer.weight_scale, layer.weight_zero_point)
        out = torch.matmul(x, self._convert(words, x.dtype))
        return out if bias is None else out + bias
