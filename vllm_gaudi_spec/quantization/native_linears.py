"""Linear methods for layers whose weights stay quantized as in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vllm_gaudi_spec.quantization.encodings import E4M3, Words
from vllm_gaudi_spec.quantization.fp8 import Arithmetic, to_e4m3
from vllm_gaudi_spec.upstream.layers import (
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    LinearBase,
    LinearMethodBase,
    PackedvLLMParameter,
    UnquantizedLinearMethod,
    create_fp8_scale_parameter,
    create_fp8_weight_parameter,
    replace_parameter,
)

# This is added to the scales of inputs, because a padding row contains only zeros, and 0 / 0 would be NaN.
_SMALLEST = 1e-8
_NOT_LOADED = torch.finfo(torch.float32).min  # vLLM's initial value for scales
_IN_WORD = 8
_ROWS_AT_ONCE = 4096
"""The number of rows to quantize at a time, so that the float32 copy of a large matrix does not fill the host's
memory."""


class Fp8Linear(LinearMethodBase):
    """A linear method for e4m3 weights with one scale per row. Inputs are rounded to e4m3 with one scale per token."""

    def __init__(self, *, arithmetic: Callable[[float], Arithmetic], largest: float, prefix: str) -> None:
        """Initialize the method for e4m3 values up to `largest`, the device's maximum."""
        self._arithmetic, self._largest, self._prefix = arithmetic(largest), largest, prefix

    def create_weights(
        self,
        layer: LinearBase,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        loader = extra_weight_attrs["weight_loader"]
        weight = create_fp8_weight_parameter(sum(output_partition_sizes), input_size_per_partition, loader)
        layer.register_parameter("weight", weight)
        scale = create_fp8_scale_parameter(
            ChannelQuantScaleParameter, output_partition_sizes, input_size_per_partition, None, loader
        )
        layer.register_parameter("weight_scale", scale)

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        # Do this on the host, where e4m3 values outside the card's range are finite (quirk Q03).
        weight_NK, scale_N = layer.weight.data, layer.weight_scale.data.squeeze(1)
        if bool((scale_N == _NOT_LOADED).any()):
            raise RuntimeError(f"{self._prefix} is kept in FP8, but its checkpoint has no FP8 weight for it.")
        if self._largest < E4M3:
            # Half of the largest value is in the range. Halving may round values below 2**-5, so it is applied only to
            # rows that need it (quirk Q02).
            factor_N = 1.0 + (weight_NK.float().abs().amax(1) > self._largest)
            weight_NK, scale_N = (weight_NK.float() / factor_N[:, None]).to(torch.float8_e4m3fn), scale_N * factor_N
        replace_parameter(layer, "weight", self._arithmetic.keep(weight_NK.t().contiguous()))
        replace_parameter(layer, "weight_scale", scale_N.contiguous())

    def quantize(self, weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize a float weight on the host, where nothing is compiled, and return the weight and its scales."""
        parts_NK: list[torch.Tensor] = []
        scales_N1: list[torch.Tensor] = []
        for part_NK in weight_NK.split(_ROWS_AT_ONCE):
            part_NK = part_NK.cpu().float()
            scales_N1.append(part_NK.abs().amax(1, keepdim=True) / self._largest + _SMALLEST)
            parts_NK.append(to_e4m3(part_NK / scales_N1[-1], self._largest))
        weight_KN = torch.cat(parts_NK).t().contiguous()
        return self._arithmetic.keep(weight_KN), torch.cat(scales_N1).squeeze(1)

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows_TK = x.reshape(-1, x.shape[-1])
        scale_T1 = rows_TK.abs().amax(-1, keepdim=True).float() / self._largest + _SMALLEST
        rounded_TK = self._arithmetic.cast(rows_TK, 1 / scale_T1)
        out_TN = self._arithmetic.multiply(rounded_TK, layer.weight, scale_T1, layer.weight_scale, x.dtype)
        if bias is not None:
            out_TN = out_TN + bias
        return out_TN.reshape(*x.shape[:-1], out_TN.shape[-1])


class Uint4Linear(LinearMethodBase):
    """A linear method for weights in 4-bit integers, which an operator of the device converts at each step."""

    def __init__(self, *, convert: Callable[[Words, torch.dtype], torch.Tensor], group_size: int, prefix: str) -> None:
        """Initialize the method.

        Args:
            convert: A function that converts a packed weight to the given dtype.
            group_size: The number of inputs that share a scale.
        """
        self._convert, self._group_size, self._prefix = convert, group_size, prefix

    def create_weights(
        self,
        layer: LinearBase,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        num_inputs, num_outputs = input_size_per_partition, sum(output_partition_sizes)
        if num_inputs % self._group_size or any(size % _IN_WORD for size in output_partition_sizes):
            # This rank's shard begins or ends inside a group or word. This method makes the loader dequantize the
            # weight.
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

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        if bool(layer.weight_scale.isnan().any()):
            raise RuntimeError(f"{self._prefix} is kept in 4 bits, but its checkpoint has no 4-bit weight for it.")

    def apply(self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        words = Words(layer.weight_packed, layer.weight_scale, layer.weight_zero_point)
        out = torch.matmul(x, self._convert(words, x.dtype))
        return out if bias is None else out + bias
