"""Float8 e4m3 arithmetic, exact except for the rounding that Gaudi performs as well.

A value x is cast to e4m3 with scale s by computing x / s, clamping it to the range, and rounding it to nearest even. A
product of two such values is a multiple of 2**-18 below 2**18, and float64 can add tens of thousands of products
without rounding, so the sum depends neither on their order nor on the number of rows in a matmul. The sum is rounded
once, to the model's dtype. In bfloat16, the sum and the scale are rounded before they are multiplied.
"""

from __future__ import annotations

from typing import Protocol

import torch

from vllm_gaudi_spec.attention.operations import Matmul


def to_e4m3(x: torch.Tensor, largest: float) -> torch.Tensor:
    """Cast to e4m3 with saturation. Torch's own cast produces NaN instead."""
    return x.clamp(-largest, largest).to(torch.float8_e4m3fn)


class Arithmetic(Protocol):
    """A device's FP8 arithmetic. Scales are float32 tensors that broadcast with the values."""

    @property
    def matmul(self) -> Matmul:
        """The matmul for values returned by `uncast`, in the model's dtype."""
        ...

    def cast(self, x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        """Return x * inverse as e4m3 values, in the form that `multiply` and `uncast` accept."""
        ...

    def keep(self, weight_KN: torch.Tensor) -> torch.Tensor:
        """Return an e4m3 weight in the form that `multiply` accepts."""
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
    """Matmul that accumulates in float64 and rounds once.

    float32 sums depend on a library's kernel and thus on the number of rows. With them, a verify step would sometimes
    write different values to an FP8 cache than a plain decode step.
    """

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x.double(), y.double()).to(x.dtype)


class HostArithmetic:
    """FP8 arithmetic in plain torch, with e4m3 values stored as float64."""

    matmul = WideMatmul()

    def __init__(self, largest: float) -> None:
        self._largest = largest

    def cast(self, x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        # Compute in bfloat16 if x is bfloat16; see `multiply`.
        scaled = x * inverse.bfloat16() if x.dtype is torch.bfloat16 else x.float() * inverse
        return to_e4m3(scaled, self._largest).double()

    def keep(self, weight_KN: torch.Tensor) -> torch.Tensor:
        # Store each output's weights contiguously, because a matmul with few rows reads the outputs one by one.
        return weight_KN.t().double().contiguous().t()

    def multiply(
        self, x: torch.Tensor, y: torch.Tensor, x_scale: torch.Tensor, y_scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        out, scale = torch.matmul(x, y), x_scale.double() * y_scale.double()
        # This matches two layers from real checkpoints in vllm-gaudi's tests (v0.26.0, test_hpu_compressed_tensors.py).
        return out.bfloat16() * scale.bfloat16() if dtype is torch.bfloat16 else (out * scale).to(dtype)

    def uncast(self, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (x.float() * scale).to(dtype)
