"""Arithmetic of float8 e4m3 numbers, exact but for the roundings that a Gaudi makes too.

A number is cast to e4m3 by its scale s: x / s, cut to the range and rounded to the nearest, ties to even. A product of
two such numbers is a multiple of 2**-18 below 2**18, so float64 adds tens of thousands of them without rounding: what
comes out does not depend on their order, and so not on how many rows a matmul has. What follows is one rounding, to the
model's dtype; where that is bfloat16, the sum and the scale are rounded to it before they are multiplied.
"""

from __future__ import annotations

from typing import Protocol

import torch

from vllm_gaudi_spec.attention.operations import Matmul


def to_e4m3(x: torch.Tensor, largest: float) -> torch.Tensor:
    """Saturates, where torch's own cast gives nan."""
    return x.clamp(-largest, largest).to(torch.float8_e4m3fn)


class Arithmetic(Protocol):
    """As a device does it. Scales are float32 tensors: [], or of a shape that the numbers' is broadcast with."""

    @property
    def matmul(self) -> Matmul:
        """Of numbers that were uncast, in the model's dtype."""
        ...

    def cast(self, x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        """x * inverse as e4m3 numbers, in the form that `multiply` and `uncast` take."""
        ...

    def keep(self, weight_KN: torch.Tensor) -> torch.Tensor:
        """A weight that is e4m3 already, in that form."""
        ...

    def multiply(
        self, x: torch.Tensor, y: torch.Tensor, x_scale: torch.Tensor, y_scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """x @ y * x_scale * y_scale."""
        ...

    def uncast(self, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """x * scale."""
        ...


class WideMatmul(Matmul):
    """Sums in float64, rounded once: which of a library's kernels adds up a row, and so how many rows there are, shows
    in float32 sums, and what a verify step wrote to an FP8 cache would now and then not be what a plain step writes."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x.double(), y.double()).to(x.dtype)


class HostArithmetic:
    """In plain torch; e4m3 numbers are multiplied as float64."""

    matmul = WideMatmul()

    def __init__(self, largest: float) -> None:
        self._largest = largest

    def cast(self, x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        # In bfloat16 where x is: see `multiply`.
        scaled = x * inverse.bfloat16() if x.dtype is torch.bfloat16 else x.float() * inverse
        return to_e4m3(scaled, self._largest).double()

    def keep(self, weight_KN: torch.Tensor) -> torch.Tensor:
        # Rows of outputs: a product of few rows reads them one after the other.
        return weight_KN.t().double().contiguous().t()

    def multiply(
        self, x: torch.Tensor, y: torch.Tensor, x_scale: torch.Tensor, y_scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        out, scale = torch.matmul(x, y), x_scale.double() * y_scale.double()
        # As two layers from real checkpoints in vllm-gaudi's tests have it (v0.26.0, test_hpu_compressed_tensors.py).
        return out.bfloat16() * scale.bfloat16() if dtype is torch.bfloat16 else (out * scale).to(dtype)

    def uncast(self, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (x.float() * scale).to(dtype)
