"""Linear layers for few rows, as Triton kernels that read each weight once and are faster than library kernels.

N: outputs. K: inputs. M: rows. With few rows, most of the time is spent reading memory, so a kernel may start to load
its weight while the preceding kernel is still running. With one or two rows, each program instance computes a few
outputs from all inputs and may also compute the preceding norm. With more rows, the kernel uses tensor cores. If there
are few outputs, several instances split the inputs, and the last instance to finish adds up the results.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import nn

from vllm_gaudi_spec.devices.cuda import kernels, launch
from vllm_gaudi_spec.upstream.layers import (
    LinearBase,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
    VocabParallelEmbedding,
)

FEW_ROWS = 2
"""Up to this number of rows, the kernel without tensor cores is faster."""
_MANY_INPUTS = 4096
"""With this many inputs or more, the kernel without tensor cores is faster only for one row. On an H200, a step of an
8B model took 5.5 ms with two rows but 4.6 ms with three, which use tensor cores."""
SOME_ROWS = 64
"""Up to this number of rows, the kernel with tensor cores is faster for some layers."""
MOST_NORMED = 1024
"""Up to this number of inputs, each instance computes the norm itself from values in registers."""


class Unnormed:
    """The deferred norm of `x` or of its sum with a residual. The linear layer that follows computes the norm while it
    loads the input."""

    def __init__(self, x: torch.Tensor, residual: torch.Tensor | None, weight_K: torch.Tensor, epsilon: float) -> None:
        self.x = x.reshape(-1, x.shape[-1])
        self.residual = None if residual is None else residual.reshape(self.x.shape)
        self.weight_K = weight_K
        self.epsilon = epsilon
        self.added = self.x if residual is None else torch.empty_like(self.x)
        """The sum, which is valid after the linear layer has run."""


def linear(
    x: torch.Tensor | Unnormed,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute `torch.nn.functional.linear` with the fastest kernel for the given sizes.

    If `gated` is set, the result is silu of the first half of the outputs times the second half. `dtype` is float32 for
    a float32 result from 16-bit weights, or None for the dtype of `x`. It must be None if `gated` is set or if `x` is
    an `Unnormed`.
    """
    if isinstance(x, Unnormed):
        return multiply_few_rows(x, weight_NK, bias_N, gated=gated)
    num_rows = x.numel() // x.shape[-1]
    if weight_NK.stride(-1) == 1:
        if 0 < num_rows <= (FEW_ROWS if x.shape[-1] < _MANY_INPUTS else 1):
            return multiply_few_rows(x, weight_NK, bias_N, gated=gated, dtype=dtype)
        if num_rows and (splits := _num_splits(num_rows, weight_NK, gated=gated)):
            return multiply_some_rows(x, weight_NK, bias_N, splits, gated=gated, dtype=dtype)
    if dtype is not None:
        return _multiply_float32(x, weight_NK, bias_N)
    out = nn.functional.linear(x, weight_NK, bias_N)
    return kernels.silu_and_mul(out) if gated else out


def _multiply_float32(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    out_MN = torch.mm(x.reshape(-1, x.shape[-1]), weight_NK.t(), out_dtype=torch.float32)
    out_MN = out_MN if bias_N is None else out_MN + bias_N
    return out_MN.view(*x.shape[:-1], weight_NK.shape[0])


# --- one or two rows ---


class _Tile(NamedTuple):
    outputs: int
    inputs: int
    num_warps: int

    @classmethod
    def choose(cls, num_outputs: int, num_inputs: int, *, is_normed: bool, gated: bool) -> _Tile:
        """Choose a tile that was among the fastest of ten candidates in an H100 measurement of two models' layers."""
        if gated:
            return _GATED if num_inputs <= 1024 else cls(1, 2048, 8)
        if num_inputs > 1024:
            return cls(2, 2048, 8)
        return cls(8, 256, 4) if num_outputs >= 4096 and not is_normed else cls(2, 1024, 4)


_GATED = _Tile(2, 1024, 4)


def multiply_few_rows(
    x: torch.Tensor | Unnormed,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    *,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply one or two rows. `dtype` is the result's dtype, by default that of `x`. It must be None with a norm."""
    norm = x if isinstance(x, Unnormed) else None
    rows = x.x if isinstance(x, Unnormed) else x
    x_MK = rows.reshape(-1, rows.shape[-1])
    residual_MK = x_MK if norm is None or norm.residual is None else norm.residual
    num_outputs, num_inputs = weight_NK.shape
    num_outputs = num_outputs // 2 if gated else num_outputs
    tile = _Tile.choose(num_outputs, num_inputs, is_normed=norm is not None, gated=gated)
    out_MN = x_MK.new_empty(x_MK.shape[0], num_outputs, dtype=dtype)
    _few_rows[(triton.cdiv(num_outputs, tile.outputs),)](
        x_MK,
        residual_MK,
        None if norm is None else norm.weight_K,
        weight_NK,
        bias_N,
        out_MN,
        out_MN if norm is None else norm.added,
        num_outputs,
        num_inputs,
        x_MK.stride(0),
        residual_MK.stride(0),
        weight_NK.stride(0),
        0.0 if norm is None else norm.epsilon,
        ROWS=x_MK.shape[0],
        BIAS=bias_N is not None,
        GATED=gated,
        NORM=norm is not None,
        ADDS=norm is not None and norm.residual is not None,
        TILE_N=tile.outputs,
        TILE_K=tile.inputs,
        num_warps=tile.num_warps,
        **launch.options(),
    )
    return out_MN.view(*rows.shape[:-1], num_outputs)


@triton.jit
def _few_rows(
    x_ptr,
    residual_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    added_ptr,
    num_outputs,
    num_inputs,
    x_stride,
    residual_stride,
    weight_stride,
    epsilon,
    ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    ADDS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.let_next_start(EARLY)
    output_N = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    input_K = tl.arange(0, TILE_K)
    used_N = output_N < num_outputs
    dtype = out_ptr.dtype.element_ty
    at_NK = weight_ptr + output_N.to(tl.int64)[:, None] * weight_stride + input_K[None, :]
    # The offset of the weights that produce the second half of a gated layer's outputs.
    half = num_outputs * weight_stride
    used_NK = used_N[:, None] & (input_K < num_inputs)[None, :]
    weight_NK = tl.load(at_NK, mask=used_NK, other=0.0)
    weights = (weight_NK, tl.load(at_NK + half, mask=used_NK, other=0.0)) if GATED else (weight_NK,)
    launch.wait(EARLY)
    parts: tl.constexpr = 2 if GATED else 1
    sums = ()
    if NORM:
        # The tile contains all inputs.
        used_K = input_K < num_inputs
        norm_K = tl.load(norm_ptr + input_K, mask=used_K, other=0.0)
        for row in tl.static_range(ROWS):
            x_K = tl.load(x_ptr + row * x_stride + input_K, mask=used_K, other=0.0).to(tl.float32)
            if ADDS:
                x_K += tl.load(residual_ptr + row * residual_stride + input_K, mask=used_K, other=0.0).to(tl.float32)
                tl.store(added_ptr + row * num_inputs + input_K, x_K.to(dtype), mask=used_K & (tl.program_id(0) == 0))
            scale = tl.rsqrt(tl.sum(x_K * x_K, 0) / num_inputs + epsilon)
            # Round at the same point as a separate norm.
            x_K = ((x_K * scale).to(dtype) * norm_K).to(tl.float32)
            for part in tl.static_range(parts):
                # Triton does not support tuple unpacking.
                total_NK = weights[part].to(tl.float32) * x_K[None, :]
                sums = sums + (total_NK,)  # type: ignore[assignment]  # noqa: RUF005
    else:
        for _ in tl.static_range(ROWS * parts):
            sums = sums + (tl.zeros((TILE_N, TILE_K), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        for start in range(0, num_inputs, TILE_K):
            more = ()
            for row in tl.static_range(ROWS):
                x_K = tl.load(x_ptr + row * x_stride + start + input_K, mask=start + input_K < num_inputs, other=0.0)
                for part in tl.static_range(parts):
                    total_NK = sums[row * parts + part] + weights[part].to(tl.float32) * x_K.to(tl.float32)[None, :]
                    more = more + (total_NK,)  # type: ignore[assignment]  # noqa: RUF005
            sums = more
            # Load the next part of the weight. After the last part, this load is fully masked.
            next_NK = at_NK + start + TILE_K
            follows_NK = used_N[:, None] & (start + TILE_K + input_K < num_inputs)[None, :]
            weight_NK = tl.load(next_NK, mask=follows_NK, other=0.0)
            weights = (weight_NK, tl.load(next_NK + half, mask=follows_NK, other=0.0)) if GATED else (weight_NK,)
    for row in tl.static_range(ROWS):
        out_N = tl.sum(sums[row * parts], 1)
        if BIAS:
            out_N += tl.load(bias_ptr + output_N, mask=used_N, other=0.0).to(tl.float32)
        out_N = out_N.to(dtype)
        if GATED:
            up_N = tl.sum(sums[row * parts + 1], 1)
            if BIAS:
                up_N += tl.load(bias_ptr + num_outputs + output_N, mask=used_N, other=0.0).to(tl.float32)
            out_N = kernels.gate(out_N) * up_N.to(dtype)
        tl.store(out_ptr + row * num_outputs + output_N, out_N, mask=used_N)


# --- more rows ---

_TILE_N, _TILE_K = 64, 128
_AT_ONCE = 264
"""The number of instances that run concurrently on an H100."""
_MOST_STAGES = 8
_MOST_TILES = 16
"""The maximum number of output tiles at which several instances split the inputs."""


def _num_splits(num_rows: int, weight_NK: torch.Tensor, *, gated: bool) -> int:
    """Return the number of instances that split the inputs, or 0 to use a library kernel.

    The choice is based on timings of two models' layers on an H100.
    """
    num_outputs, num_inputs = weight_NK.shape
    if num_rows > SOME_ROWS or weight_NK.itemsize != 2 or num_inputs % _TILE_K:
        return 0
    if gated:
        return 1 if num_outputs % _TILE_N == 0 else 0
    if num_outputs > _MOST_TILES * _TILE_N:
        return 1 if num_inputs <= 1024 else 0
    return min(4, triton.cdiv(num_inputs, 1024))


@cache
def _get_arrivals(device: torch.device) -> torch.Tensor:
    """Return arrival counters for output tiles, which kernels on the same stream share and reset to zero."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a linear layer with shared inputs must run once before it is captured")
    return torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)


def multiply_some_rows(
    x: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    splits: int = 1,
    *,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply up to `SOME_ROWS` rows by a weight. `dtype` is the result's dtype, by default that of `x`."""
    x_MK = x.reshape(-1, x.shape[-1])
    (num_rows, num_inputs), num_outputs = x_MK.shape, weight_NK.shape[0]
    num_tiles = triton.cdiv(num_outputs, _TILE_N)
    out_MN = x_MK.new_empty(num_rows, num_outputs // 2 if gated else num_outputs, dtype=dtype)
    parts_SMN, arrivals = out_MN, out_MN
    if splits > 1:
        parts_SMN = torch.empty(splits, num_rows, num_outputs, dtype=torch.float32, device=x.device)
        arrivals = _get_arrivals(x.device)
    tile_m = max(triton.next_power_of_2(num_rows), 16)
    _some_rows[(num_tiles, splits)](
        x_MK,
        weight_NK,
        bias_N,
        out_MN,
        parts_SMN,
        arrivals,
        num_rows,
        out_MN.shape[1],
        num_inputs,
        x_MK.stride(0),
        weight_NK.stride(0),
        BIAS=bias_N is not None,
        GATED=gated,
        SPLITS=splits,
        # Prefetching pays off only if all instances run concurrently.
        AHEAD=8 if num_tiles * splits <= _AT_ONCE else 0,
        TILE_M=tile_m,
        TILE_N=_TILE_N,
        TILE_K=_TILE_K,
        STAGES=_num_stages(tile_m, splits, x.device),
        num_warps=4,
        **launch.options(),
    )
    return out_MN.view(*x.shape[:-1], out_MN.shape[1])


def _num_stages(tile_m: int, splits: int, device: torch.device) -> int:
    """Return the number of tiles that an instance loads ahead.

    If inputs are split, there are few instances, and each can use all shared memory of a multiprocessor. Otherwise, two
    instances share a multiprocessor's memory.
    """
    if splits == 1:
        return 4 if tile_m <= 32 else 3
    # Inputs and weights take two bytes per element.
    return min(_MOST_STAGES, _get_shared_memory(device) // (2 * _TILE_K * (_TILE_N + tile_m)))


@cache
def _get_shared_memory(device: torch.device) -> int:
    """Return the number of bytes of shared memory available to an instance."""
    if device.type != "cuda":
        return 96 << 10
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@triton.jit(do_not_specialize=["num_rows"])
def _some_rows(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    num_rows,
    num_outputs,
    num_inputs,
    x_stride,
    weight_stride,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.let_next_start(EARLY)
    lane_N = tl.arange(0, TILE_N)
    row_M = tl.arange(0, TILE_M)
    input_K = tl.arange(0, TILE_K)
    half: tl.constexpr = TILE_N // 2
    if GATED:
        # The first half of a tile contains gates, and the second half contains the values that they multiply.
        output_N = tl.program_id(0) * half + lane_N % half + lane_N // half * num_outputs
    else:
        # Lanes after the last output compute the last output again but store nothing.
        output_N = tl.minimum(tl.program_id(0) * TILE_N + lane_N, num_outputs - 1)
    share = tl.cdiv(num_inputs, SPLITS * TILE_K) * TILE_K
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, num_inputs)
    first_N = weight_ptr + output_N.to(tl.int64) * weight_stride
    if AHEAD > 0:
        line_A = tl.minimum(begin + tl.arange(0, AHEAD) * 64, num_inputs - 1)
        launch.fetch(first_N[:, None] + line_A[None, :], EARLY)
    launch.wait(EARLY)
    at_NK = first_N[:, None] + input_K[None, :]
    at_KM = x_ptr + row_M[None, :] * x_stride + input_K[:, None]
    used_M = row_M < num_rows
    sums_NM = tl.zeros((TILE_N, TILE_M), tl.float32)
    for start in tl.range(begin, end, TILE_K, num_stages=STAGES):
        x_KM = tl.load(at_KM + start, mask=used_M[None, :], other=0.0)
        sums_NM = tl.dot(tl.load(at_NK + start), x_KM, sums_NM)
    is_last = True
    if SPLITS > 1:
        used_NM = (tl.program_id(0) * TILE_N + lane_N < num_outputs)[:, None] & used_M[None, :]
        part_NM = parts_ptr + row_M[None, :] * num_outputs + output_N[:, None]
        size = num_rows * num_outputs
        tl.store(part_NM + tl.program_id(1) * size, sums_NM, mask=used_NM)
        # All threads must have stored their results before the arrival is counted.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals_ptr + tl.program_id(0), 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.store(arrivals_ptr + tl.program_id(0), 0)
            sums_NM = tl.zeros((TILE_N, TILE_M), tl.float32)
            # Add partial results in an order that does not depend on which instance arrives last.
            for split in tl.static_range(SPLITS):
                sums_NM += tl.load(part_NM + split * size, mask=used_NM, other=0.0)
    if BIAS:
        sums_NM += tl.load(bias_ptr + output_N).to(tl.float32)[:, None]
    out_NM = sums_NM.to(out_ptr.dtype.element_ty)
    if GATED:
        gate_HM, up_HM = tl.split(tl.permute(tl.reshape(out_NM, (2, half, TILE_M)), (1, 2, 0)))
        output_H = tl.program_id(0) * half + tl.arange(0, half)
        at_HM = out_ptr + row_M[None, :] * num_outputs + output_H[:, None]
        tl.store(at_HM, kernels.gate(gate_HM) * up_HM, mask=used_M[None, :])
    else:
        used_N = tl.program_id(0) * TILE_N + lane_N < num_outputs
        at_NM = out_ptr + row_M[None, :] * num_outputs + output_N[:, None]
        tl.store(at_NM, out_NM, mask=used_N[:, None] & used_M[None, :] & is_last)


# --- vLLM's layers ---


class FewRowsLinear(UnquantizedLinearMethod):
    def apply(self, layer: LinearBase, x: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, layer.weight, bias)


class _FewRowsEmbedding(UnquantizedEmbeddingMethod):
    """The linear method for embedding tables and output matrices."""

    def apply(self, layer: VocabParallelEmbedding, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        # If logits were rounded to 16 bits, the two best logits would often be equal.
        return linear(x, layer.weight, bias, dtype=torch.float32 if layer.weight.itemsize == 2 else None)


_METHODS = {UnquantizedLinearMethod: FewRowsLinear, UnquantizedEmbeddingMethod: _FewRowsEmbedding}


def install(model: nn.Module) -> None:
    """Replace the methods of a model's unquantized layers. All other layers keep their own methods."""
    layer: Any
    for layer in model.modules():
        method = _METHODS.get(type(getattr(layer, "quant_method", None)))
        if method is not None:
            layer.quant_method = method()
