"""Small Triton kernels for operations between matmuls: norms, rotary embeddings, and gated activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_gaudi_spec.devices.cuda import launch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty_like(rows)
    _norm[(rows.shape[0],)](
        rows,
        rows,
        weight,
        out,
        out,
        rows.stride(0),
        0,
        epsilon,
        **_sizes(rows.shape[-1]),
        ADDS=False,
        **launch.options(),
    )
    return out.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of `x + residual`, and the sum."""
    rows, others = x.reshape(-1, x.shape[-1]), residual.reshape(-1, x.shape[-1])
    out, added = torch.empty_like(rows), torch.empty_like(rows)
    _norm[(rows.shape[0],)](
        rows,
        others,
        weight,
        out,
        added,
        rows.stride(0),
        others.stride(0),
        epsilon,
        **_sizes(rows.shape[-1]),
        ADDS=True,
        **launch.options(),
    )
    return out.view(x.shape), added.view(x.shape)


def _sizes(size: int) -> dict[str, int]:
    tile = triton.next_power_of_2(size)
    return dict(SIZE=size, TILE=tile, num_warps=min(max(tile // 512, 1), 16))


@triton.jit
def _norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    added_ptr,
    x_stride,
    residual_stride,
    epsilon,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ADDS: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, TILE)
    used = offset < SIZE
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + offset, mask=used, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(residual_ptr + row * residual_stride + offset, mask=used, other=0.0).to(tl.float32)
        tl.store(added_ptr + row * SIZE + offset, x.to(dtype), mask=used)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + epsilon)
    weight = tl.load(weight_ptr + offset, mask=used, other=0.0)
    # Round before applying the weight, like vLLM.
    normed = (x * scale).to(dtype) * weight
    tl.store(out_ptr + row * SIZE + offset, normed, mask=used)


def rotate(
    positions_T: torch.Tensor,
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor | None,
    table: torch.Tensor,
    rotary_dim: int,
) -> None:
    """Rotate the first `rotary_dim` elements of each head in place, in pairs that are `rotary_dim / 2` elements apart.

    Each row of `table` contains the cosines for a position, followed by its sines.
    """
    other = query_THD if key_TKD is None else key_TKD
    heads, half = max(query_THD.shape[1], other.shape[1]), rotary_dim // 2
    _rotate[(query_THD.shape[0], 1 if key_TKD is None else 2)](
        positions_T,
        query_THD,
        other,
        table,
        *query_THD.stride()[:2],
        *other.stride()[:2],
        query_THD.shape[1],
        other.shape[1],
        HALF=half,
        TILE_H=triton.next_power_of_2(heads),
        TILE_R=triton.next_power_of_2(half),
        **launch.options(),
    )


@triton.jit
def _rotate(
    positions_ptr,
    query_ptr,
    key_ptr,
    table_ptr,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    query_heads,
    key_heads,
    HALF: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_R: tl.constexpr,
    EARLY: tl.constexpr,
):
    launch.begin(EARLY)
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        heads_ptr = query_ptr + token * query_stride
        head_stride = query_head_stride
        num_heads = query_heads
    else:
        heads_ptr = key_ptr + token * key_stride
        head_stride = key_head_stride
        num_heads = key_heads
    position = tl.load(positions_ptr + token)
    head_H = tl.arange(0, TILE_H)
    offset_R = tl.arange(0, TILE_R)
    used_R = offset_R < HALF
    used_HR = (head_H < num_heads)[:, None] & used_R[None, :]
    entry = table_ptr + position * (2 * HALF)
    cos_R = tl.load(entry + offset_R, mask=used_R, other=0.0).to(tl.float32)
    sin_R = tl.load(entry + HALF + offset_R, mask=used_R, other=0.0).to(tl.float32)
    at_HR = heads_ptr + head_H[:, None] * head_stride + offset_R[None, :]
    first_HR = tl.load(at_HR, mask=used_HR, other=0.0).to(tl.float32)
    second_HR = tl.load(at_HR + HALF, mask=used_HR, other=0.0).to(tl.float32)
    dtype = query_ptr.dtype.element_ty
    tl.store(at_HR, (first_HR * cos_R[None, :] - second_HR * sin_R[None, :]).to(dtype), mask=used_HR)
    tl.store(at_HR + HALF, (second_HR * cos_R[None, :] + first_HR * sin_R[None, :]).to(dtype), mask=used_HR)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Apply silu to the first half of the last dimension and multiply the result by the second half."""
    rows = x.reshape(-1, x.shape[-1])
    size, tile = x.shape[-1] // 2, 1024
    out = rows.new_empty((rows.shape[0], size))
    grid = (rows.shape[0], triton.cdiv(size, tile))
    _silu_and_mul[grid](rows, out, rows.stride(0), SIZE=size, TILE=tile, **launch.options())
    return out.view(*x.shape[:-1], size)


@triton.jit
def _silu_and_mul(x_ptr, out_ptr, x_stride, SIZE: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr):
    launch.begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * TILE + tl.arange(0, TILE)
    used = offset < SIZE
    at = x_ptr + row * x_stride + offset
    gated = gate(tl.load(at, mask=used, other=0.0))
    tl.store(out_ptr + row * SIZE + offset, gated * tl.load(at + SIZE, mask=used, other=0.0), mask=used)


@triton.jit
def gate(x):
    """Compute silu and round the result before multiplying, like vLLM."""
    wide = x.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(x.dtype)
