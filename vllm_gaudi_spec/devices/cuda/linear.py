"""Linear layers of few rows: one Triton kernel that reads a weight once, where a library's kernels are slower.

N outputs of K inputs. A step of few rows costs what it reads. An instance has a few outputs and all of their inputs,
so nothing is added up between instances, and starts to read its weight while the kernel before it still runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from vllm_gaudi_spec.devices.cuda import launch

MOST_ROWS = 2
"""Up to so many rows it is the faster one."""


class _Tile(NamedTuple):
    outputs: int
    inputs: int
    num_warps: int

    @classmethod
    def of(cls, num_outputs: int, num_inputs: int) -> _Tile:
        """The fastest of ten for the layers of two models on an H100, or near it."""
        if num_inputs > 1024:
            return cls(2, 2048, 8)
        return cls(8, 256, 4) if num_outputs >= 4096 else cls(2, 1024, 4)


def linear(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """As `torch.nn.functional.linear`."""
    num_rows = x.numel() // x.shape[-1]
    if not 0 < num_rows <= MOST_ROWS or weight_NK.stride(-1) != 1:
        return nn.functional.linear(x, weight_NK, bias_N)
    return few_rows(x, weight_NK, bias_N)


def few_rows(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    x_MK = x.reshape(-1, x.shape[-1])
    num_outputs, num_inputs = weight_NK.shape
    tile = _Tile.of(num_outputs, num_inputs)
    out_MN = x_MK.new_empty(x_MK.shape[0], num_outputs)
    _few_rows[(triton.cdiv(num_outputs, tile.outputs),)](
        x_MK,
        weight_NK,
        bias_N,
        out_MN,
        num_outputs,
        num_inputs,
        x_MK.stride(0),
        weight_NK.stride(0),
        ROWS=x_MK.shape[0],
        BIAS=bias_N is not None,
        TILE_N=tile.outputs,
        TILE_K=tile.inputs,
        num_warps=tile.num_warps,
        **launch.options(),
    )
    return out_MN.view(*x.shape[:-1], num_outputs)


@triton.jit
def _few_rows(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_outputs,
    num_inputs,
    x_stride,
    weight_stride,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.let_next_start(EARLY)
    output_N = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    input_K = tl.arange(0, TILE_K)
    used_N = output_N < num_outputs
    at_NK = weight_ptr + output_N.to(tl.int64)[:, None] * weight_stride + input_K[None, :]
    weight_NK = tl.load(at_NK, mask=used_N[:, None] & (input_K < num_inputs)[None, :], other=0.0)
    launch.wait(EARLY)
    sums = ()
    for _ in tl.static_range(ROWS):
        # Triton does not unpack tuples.
        sums = sums + (tl.zeros((TILE_N, TILE_K), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for start in range(0, num_inputs, TILE_K):
        more = ()
        for row in tl.static_range(ROWS):
            x_K = tl.load(x_ptr + row * x_stride + start + input_K, mask=start + input_K < num_inputs, other=0.0)
            total_NK = sums[row] + weight_NK.to(tl.float32) * x_K.to(tl.float32)[None, :]
            more = more + (total_NK,)  # type: ignore[assignment]  # noqa: RUF005
        sums = more
        # The next part; nothing after the last.
        follows_K = start + TILE_K + input_K < num_inputs
        weight_NK = tl.load(at_NK + start + TILE_K, mask=used_N[:, None] & follows_K[None, :], other=0.0)
    for row in tl.static_range(ROWS):
        out_N = tl.sum(sums[row], 1)
        if BIAS:
            out_N += tl.load(bias_ptr + output_N, mask=used_N, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * num_outputs + output_N, out_N.to(out_ptr.dtype.element_ty), mask=used_N)


# --- vLLM's layers ---


class _FewRowsLinear(UnquantizedLinearMethod):
    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, layer.weight, bias)


class _FewRowsEmbedding(UnquantizedEmbeddingMethod):
    """Of output matrices too."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, layer.weight, bias)


_METHODS = {UnquantizedLinearMethod: _FewRowsLinear, UnquantizedEmbeddingMethod: _FewRowsEmbedding}


def use_in(model: nn.Module) -> None:
    """For the model's layers with weights of 2 dimensions as they were loaded; others keep their method."""
    for layer in model.modules():
        method = _METHODS.get(type(getattr(layer, "quant_method", None)))
        if method is not None:
            layer.quant_method = method()
