"""Float8 e4m3 arithmetic that rounds only where a Gaudi rounds, too.

To cast a value x to e4m3 with scale s, x / s is computed, clamped to the range, and rounded to the nearest value (ties
to even). The product of two e4m3 values is a multiple of 2**-18 and less than 2**18, so tens of thousands of products
can be added exactly in float64. The sum therefore depends neither on their order nor on the number of rows in a matmul.
It is rounded once, to the model's dtype. In bfloat16, the sum and the scale are both rounded before they are
multiplied.
"""

from __future__ import annotations

from typing import Protocol

import torch

from vllm_gaudi_spec.attention.operations import Matmul


def to_e4m3(x: torch.Tensor, largest: float) -> torch.Tensor:
    """Cast to e4m3, clamping values to the range. Torch's own cast returns NaN for values outside its range."""
    return x.clamp(-largest, largest).to(torch.float8_e4m3fn)


class Arithmetic(Protocol):
    """A device's FP8 arithmetic. Scales are float32 tensors that broadcast with the values."""

    @property
    def matmul(self) -> Matmul:
        """The matmul for values in the model's dtype that `uncast` has returned."""
        ...

    def cast(self, x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        """Return x * inverse as e4m3 values, in the representation that `multiply` and `uncast` accept."""
        ...

    def keep(self, weight_KN: torch.Tensor) -> torch.Tensor:
        """Return an e4m3 weight in the representation that `multiply` accepts."""
        ...

    def multiply(
        self, x: torch.Tensor, y: torch.Tensor, x_scale: torch.Tensor, y_scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor: ...

    def uncast(self, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...


class WideMatmul(Matmul):
    """A matmul that accumulates in float64 and rounds the result once.

    The order of float32 sums depends on the number of rows, so with float32, a verify step would sometimes write
    different values to an FP8 cache than a plain decode step.
    """

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x.double(), y.double()).to(x.dtype)


class HostArithmetic:
    """FP8 arithmetic in plain torch, with e4m3 values stored as float64."""

    matmul = WideMatmul()

    def __init__(self, largest: float) -> None:
        self._largest = largest

    def cast(self, x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        # Compute in bfloat16 for bfloat16 inputs, for the same reason as in `multiply`.
        scaled = x * inverse.bfloat16() if x.dtype is torch.bfloat16 else x.float() * inverse
        return to_e4m3(scaled, self._largest).double()

    def keep(self, weight_KN: torch.Tensor) -> torch.Tensor:
        # Store the weights of each output contiguously, because a matmul with few rows reads one output at a time.
        return weight_KN.t().double().contiguous().t()

    def multiply(
        self, x: torch.Tensor, y: torch.Tensor, x_scale: torch.Tensor, y_scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        out, scale = torch.matmul(x, y), x_scale.double() * y_scale.double()
        # Round both factors, because the stored results for two layers of real checkpoints in vllm-gaudi's tests are
        # reproduced in this way (v0.26.0, test_hpu_compressed_tensors.py).
        return out.bfloat16() * scale.bfloat16() if dtype is torch.bfloat16 else (out * scale).to(dtype)

    def uncast(self, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (x.float() * scale).to(dtype)
