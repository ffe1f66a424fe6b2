"""Arithmetic of float8 e4m3 numbers, exact but for the roundings that a Gaudi makes too.

A number is cast to e4m3 by its scale s: x / s, cut to the range and rounded to the nearest, ties to even. A product of
two such numbers is a multiple of 2**-18 below 2**18, so float64 adds tens of thousands of them without rounding: what
comes out does not depend on their order, and so not on how many rows a matmul has. What follows is one rounding, to the
model's dtype.
"""

from __future__ import annotations

from typing import Protocol

import torch


def to_e4m3(x: torch.Tensor, largest: float) -> torch.Tensor:
    """Saturates, where torch's own cast gives nan."""
    return x.clamp(-largest, largest).to(torch.float8_e4m3fn)


class Arithmetic(Protocol):
    """As a device does it. Scales are float32 tensors, [] or [channels]."""

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


class HostArithmetic:
    """In plain torch; e4m3 numbers are kept as float64."""

    def __init__(self, largest: float) -> None:
        self._largest = largest

    def cast(self, x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        return to_e4m3(x.float() * inverse, self._largest).double()

    def keep(self, weight_KN: torch.Tensor) -> torch.Tensor:
        # Rows of outputs: a product of few rows reads them one after the other.
        return weight_KN.t().double().contiguous().t()

    def multiply(
        self, x: torch.Tensor, y: torch.Tensor, x_scale: torch.Tensor, y_scale: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        return (torch.matmul(x, y) * (x_scale.double() * y_scale.double())).to(dtype)

    def uncast(self, x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (x.float() * scale).to(dtype)
