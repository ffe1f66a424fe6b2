"""Arithmetic of float8 e4m3 numbers, exact except for the roundings that a Gaudi makes too.

A number x is cast to e4m3 with scale s: x / s, clamped to the range and rounded to nearest even. A product of two such
numbers is a multiple of 2**-18 below 2**18, so float64 adds tens of thousands of them without rounding: the sum does
not depend on their order, and so not on the number of rows of a matmul. It is rounded once, to the model's dtype. In
bfloat16, the sum and the scale are rounded before they are multiplied.
"""

from __future__ import annotations

from typing import Protocol

import torch

from vllm_gaudi_spec.attention.operations import Matmul


def to_e4m3(x: torch.Tensor, largest: float) -> torch.Tensor:
    """Cast to e4m3 with saturation. torch's own cast gives NaN instead."""
    return x.clamp(-largest, largest).to(torch.float8_e4m3fn)


class Arithmetic(Protocol):
    """A device's FP8 arithmetic. Scales are float32 tensors that broadcast with the numbers."""

    @property
    def matmul(self) -> Matmul:
        """The matmul of numbers after `uncast`, in the model's dtype."""
        ...

    def cast(self, x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        """Return x * inverse as e4m3 numbers, in the form that `multiply` and `uncast` take."""
        ...

    def keep(self, weight_KN: torch.Tensor) -> torch.Tensor:
        """Return an e4m3 weight in that form."""
        ...

    def multiply(
        self, x: torch.Tensor, y: torch.Tensor, x_scale: torch.Tensor, y_scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return x @ y * x_scale * y_scale."""
        ...

    def uncast(self, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return x * scale."""
        ...


class WideMatmul(Matmul):
    """Matmul with float64 sums, rounded once.

    float32 sums depend on a library's kernel, and so on the number of rows: a verify step would sometimes write other
    numbers to an FP8 cache than a decode.
    """

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x.double(), y.double()).to(x.dtype)


class HostArithmetic:
    """FP8 arithmetic in plain torch, with e4m3 numbers as float64."""

    matmul = WideMatmul()

    def __init__(self, largest: float) -> None:
        self._largest = largest

    def cast(self, x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        # In bfloat16 if x is, see `multiply`.
        scaled = x * inverse.bfloat16() if x.dtype is torch.bfloat16 else x.float() * inverse
        return to_e4m3(scaled, self._largest).double()

    def keep(self, weight_KN: torch.Tensor) -> torch.Tensor:
        # Stored by output: a product of few rows reads the outputs one by one.
        return weight_KN.t().double().contiguous().t()

    def multiply(
        self, x: torch.Tensor, y: torch.Tensor, x_scale: torch.Tensor, y_scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        out, scale = torch.matmul(x, y), x_scale.double() * y_scale.double()
        # As in two layers of real checkpoints in vllm-gaudi's tests (v0.26.0, test_hpu_compressed_tensors.py).
        return out.bfloat16() * scale.bfloat16() if dtype is torch.bfloat16 else (out * scale).to(dtype)

    def uncast(self, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (x.float() * scale).to(dtype)
