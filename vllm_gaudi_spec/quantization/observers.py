"""Modules that measure the largest |x| of their tensors, for real tokens only.

Padding also passes through the model: token 0 at position 0, and whatever follows a row's end. A mask of each forward
has the real tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from vllm_gaudi_spec.attention.operations import Matmul, Rows, Softmax, VLLMKVCache


class RealTokens:
    """The mask of a forward's T real tokens. None outside of forwards, where nothing is measured."""

    real_T: torch.Tensor | None = None

    @contextmanager
    def counting(self, real_T: torch.Tensor) -> Iterator[None]:
        self.real_T = real_T
        try:
            yield
        finally:
            self.real_T = None

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [T, ...] with zeros for tokens that are not real."""
        if self.real_T is None:
            return torch.zeros_like(x)
        return torch.where(self.real_T.view(-1, *[1] * (x.dim() - 1)), x, 0)


class MaxAbs(nn.Module):
    """The largest |x| so far, as [1, 1] like in a file."""

    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(1, 1), persistent=False)

    def see(self, x: torch.Tensor) -> None:
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().amax().float()))


class MeasuredLinear(nn.Module):
    """A `quant_method` that measures a linear layer."""

    def __init__(self, layer: nn.Module, tokens: RealTokens, *, measures_outputs: bool, measures_sums: bool) -> None:
        """Measure a layer, and with `measures_sums` also the sum of the ranks' outputs, which the layer returns."""
        super().__init__()
        self._method = getattr(layer, "quant_method", None)
        self._tokens = tokens
        self.weight_N1 = layer.weight.detach().float().abs().amax(1, keepdim=True)
        """The largest |x| of each output."""
        self.input = MaxAbs()
        self.output = MaxAbs() if measures_outputs else None
        self.sum = MaxAbs() if measures_sums else None
        if self.sum is not None:
            layer.register_forward_hook(self._see_sum)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.input.see(self._tokens.mask(x))
        if self.output is None:
            return self._multiply(layer, x, bias)
        out = self._multiply(layer, x, None)
        self.output.see(self._tokens.mask(out))
        return out if bias is None else out + bias

    def _multiply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._method is None:
            return nn.functional.linear(x, layer.weight, bias)
        out: torch.Tensor = self._method.apply(layer, x, bias)
        return out

    def _see_sum(self, layer: nn.Module, args: Any, output: Any) -> None:
        assert self.sum is not None
        self.sum.see(self._tokens.mask(output[0] if isinstance(output, tuple) else output))

    def outputs(self) -> list[MaxAbs]:
        return [part for part in (self.output, self.sum) if part is not None]


class MeasuredMatmul(Matmul):
    """A matmul that measures its first operand. The second comes from a cache, which measures it when it is written.

    Queries of padding must be zero. Softmax results of padding are below 1, which the first token of any request
    reaches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.input = MaxAbs()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.input.see(x)
        return super().forward(x, y)


class MeasuredSoftmax(Softmax):
    """A softmax that measures its result."""

    def __init__(self) -> None:
        super().__init__()
        self.output = MaxAbs()

    def forward(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        weights = super().forward(x, dim)
        self.output.see(weights)
        return weights


class MeasuredCache(VLLMKVCache):
    """A KV cache that measures what is written."""

    def __init__(self, tokens: RealTokens) -> None:
        super().__init__()
        self._tokens = tokens
        self.input = MaxAbs()

    def forward(self, input: torch.Tensor, cache: Rows, slot_mapping: torch.Tensor) -> Rows:
        self.input.see(self._tokens.mask(input))
        return super().forward(input, cache, slot_mapping)


def serve_linear(layer: nn.Module, linear: Any) -> None:
    """Make `linear.apply(layer, x, bias)` compute a linear layer of vLLM or of torch."""
    if isinstance(layer, nn.Linear):
        layer.served_by = linear
        layer.forward = partial(_forward, layer)
    else:
        layer.quant_method = linear


def _forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = layer.served_by.apply(layer, x, layer.bias)
    return out
