"""Habana's fused operations (`torch.ops.hpu`) in plain torch. Each of them is counted as a single operation.

The results follow the bridge's public sources and documentation. Real kernels may round intermediate results
differently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.library import Library

from card_emulator import kernels
from card_emulator.card import DEVICE, GIB, DeviceRefusal

_library: Library | None = None

_SCHEMAS = """
rms_norm(Tensor x, Tensor gamma, float eps) -> (Tensor, Tensor)
rms_norm_fast(Tensor x, Tensor gamma, float eps) -> (Tensor, Tensor)
rotary_pos_embedding(Tensor input, Tensor sin, Tensor cos, Tensor? position_ids, int offset, int mode) -> Tensor
sdpa_fwd(Tensor q, Tensor k, Tensor v, Tensor? mask, float p, float scale, bool is_causal, str softmax_mode,
 Tensor? valid_seq_len, str seq_padding_type, int[] window, Tensor? sink=None) -> Tensor
block_softmax(Tensor attn, Tensor block_bias, Tensor block_groups) -> (Tensor, Tensor, Tensor)
block_softmax_adjustment(Tensor block_max, Tensor block_sums, Tensor block_groups, int batch_size,
 int[] out_shape) -> Tensor
cast_to_fp8_v2(Tensor input, Tensor? scale=None, bool stochastic_rounding=False, bool is_amax=False,
 ScalarType? dtype=None, int[]? scale_shape=None) -> (Tensor, Tensor)
cast_to_fp8_v2.scalar(Tensor input, float scale, bool stochastic_rounding=False, bool is_amax=False,
 ScalarType? dtype=None, int[]? scale_shape=None) -> (Tensor, Tensor)
cast_to_fp8_v2.scalar_list(Tensor input, float[] scale, bool stochastic_rounding=False, bool is_amax=False,
 ScalarType? dtype=None, int[]? scale_shape=None) -> (Tensor, Tensor)
cast_from_fp8(Tensor input, Tensor? scale, ScalarType out_dtype, int[]? scale_shape=None) -> Tensor
cast_from_fp8.scalar(Tensor input, float scale, ScalarType out_dtype, int[]? scale_shape=None) -> Tensor
cast_from_fp8.scalar_list(Tensor input, float[] scale, ScalarType out_dtype, int[]? scale_shape=None) -> Tensor
fp8_gemm_v2(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype,
 Tensor? A_scale_inv=None, Tensor? B_scale_inv=None, Tensor? bias=None, bool accumulate=False,
 int[]? B_scale_shape=None) -> Tensor
fp8_gemm_v2.scalar(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype,
 float A_scale_inv, float B_scale_inv, Tensor? bias=None, bool accumulate=False,
 int[]? B_scale_shape=None) -> Tensor
fp8_gemm_v2.scalar_list(Tensor A, bool trans_A, Tensor B, bool trans_B, Tensor? D, ScalarType out_dtype,
 float[] A_scale_inv, float[] B_scale_inv, Tensor? bias=None, bool accumulate=False,
 int[]? B_scale_shape=None) -> Tensor
convert_from_uint4(Tensor input, Tensor scale, Tensor? zero_point, ScalarType out_dtype, Tensor? g_idx=None) -> Tensor
"""


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalized input, and the reciprocal of its root mean square."""
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * inverse * gamma.float()).to(x.dtype), inverse


def rotary_pos_embedding(
    x: torch.Tensor,
    sin: torch.Tensor,
    cos: torch.Tensor,
    position_ids: torch.Tensor | None,
    offset: int,
    mode: int,
) -> torch.Tensor:
    """Rotate halves (mode 0, NeoX) or adjacent pairs (mode 1). `sin` and `cos` are as wide as the rotary dimension."""
    if position_ids is not None:
        sin, cos = (table[position_ids.long()].unsqueeze(1) for table in (sin, cos))
    elif offset:
        sin, cos = (table[..., offset : offset + x.shape[-2], :] for table in (sin, cos))
    sin, cos = sin.to(x.dtype), cos.to(x.dtype)
    if mode == 0:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    else:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


def sdpa_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    p: float,
    scale: float,
    is_causal: bool,
    softmax_mode: str,
    valid_seq_len: torch.Tensor | None,
    seq_padding_type: str,
    window: Sequence[int],
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention for tensors [B, H, S, D]. Key and value heads are repeated to match the number of query heads.

    As in the real kernel, the causal mask is aligned to the first key, and `valid_seq_len` requires `is_causal`.
    """
    if DEVICE.hostile:
        check_sdpa(q, mask, is_causal, softmax_mode, valid_seq_len, seq_padding_type)
        check_sinks(q, sink)
        if mask is not None and math.prod(mask.shape[-2:]) * mask.element_size() >= MASK_OVERFLOW:
            return torch.full_like(q, float("nan"))
    hidden = hidden_keys(q, k, is_causal, valid_seq_len, seq_padding_type, window)
    bias = mask
    if hidden is not None:
        bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
        if mask is not None:
            bias = bias + mask if mask.dtype != torch.bool else bias.masked_fill(~mask, float("-inf"))
    grouped = q.shape[-3] != k.shape[-3]
    if sink is not None or (softmax_mode == "fast" and DEVICE.hostile):
        return _spelt_out(q, k, v, bias, scale, sink, is_fast=softmax_mode == "fast" and DEVICE.hostile)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=grouped).contiguous()


def hidden_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    is_causal: bool,
    valid_seq_len: torch.Tensor | None,
    seq_padding_type: str,
    window: Sequence[int],
) -> torch.Tensor | None:
    """Return a mask of the keys that causality, the window or padding hides from each query, or None if there is
    none."""
    num_queries, num_keys = q.shape[-2], k.shape[-2]
    hidden = None
    if is_causal or max(window, default=-1) >= 0:
        row = torch.arange(num_queries, device=q.device)[:, None]
        column = torch.arange(num_keys, device=q.device)
        hidden = column > row if is_causal else torch.zeros_like(column > row)
        if window and window[0] >= 0:
            hidden = hidden | (column < row - window[0])
        if window and window[1] >= 0:
            hidden = hidden | (column > row + window[1])
    if valid_seq_len is not None:
        lengths = valid_seq_len.view(-1, 1, 1, 1)
        column = torch.arange(num_keys, device=q.device)
        padding = column >= lengths if seq_padding_type == "right" else column < num_keys - lengths
        hidden = padding if hidden is None else hidden | padding
    return hidden


def _spelt_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None,
    is_fast: bool,
) -> torch.Tensor:
    """Compute attention step by step.

    If `is_fast` is set, exponentials are computed in bfloat16, which changes the output of some models (vllm-gaudi,
    features.py, fp32_softmax). `sinks` contains one additional attention score per head, with no
    corresponding value vector.
    """
    k, v = (part.repeat_interleave(q.shape[-3] // part.shape[-3], -3) for part in (k, v))
    scores = (q @ k.transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias
    num_keys = scores.shape[-1]
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)), dim=-1)
    below = scores.float() - scores.float().amax(-1, keepdim=True)
    weights = torch.exp(below.bfloat16() if is_fast else below).float()
    return (weights / weights.sum(-1, keepdim=True))[..., :num_keys].to(v.dtype) @ v


# Sources: vllm-gaudi, ops.py and utils.py; the bridge's FusedSDPA.py.
_SOFTMAX_MODES = ("None", "fast", "fp32")
_PADDING_SIDES = ("left", "right")
_MOST_QUERIES = 65536
_LARGEST_MASK = 4 * GIB
# The size in bytes of one row's mask at which signed 32-bit offsets overflow (vllm-gaudi#1749).
MASK_OVERFLOW = 2 * GIB


def check_sdpa(
    q: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    softmax_mode: str,
    valid_seq_len: torch.Tensor | None,
    seq_padding_type: str,
) -> None:
    if is_causal and mask is not None:
        raise DeviceRefusal("hpu::sdpa_fwd takes a mask or is_causal, not both")
    if valid_seq_len is not None and not is_causal:
        raise DeviceRefusal("hpu::sdpa_fwd takes valid_seq_len with is_causal only")
    if softmax_mode not in _SOFTMAX_MODES or seq_padding_type not in _PADDING_SIDES:
        raise DeviceRefusal(
            f"hpu::sdpa_fwd does not support softmax {softmax_mode!r} with padding {seq_padding_type!r}"
        )
    if not is_causal and q.shape[-2] > _MOST_QUERIES:
        raise DeviceRefusal(f"hpu::sdpa_fwd of {q.shape[-2]} queries; the limit is {_MOST_QUERIES} unless it is causal")
    if mask is not None and mask.nbytes > _LARGEST_MASK:
        raise DeviceRefusal(
            f"real cards run out of memory with a mask of {mask.nbytes / GIB:.0f} GiB; use window or is_causal"
        )


def check_sinks(q: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """Reject sinks whose shape or dtype differs from those that vllm-gaudi passes (extension/ops.py)."""
    if sinks is not None and (sinks.dtype != q.dtype or sinks.shape != q.shape[-3:-2]):
        raise DeviceRefusal(f"hpu::sdpa_fwd with sinks {list(sinks.shape)} in {sinks.dtype} for queries in {q.dtype}")


def _lanes(dtype: torch.dtype) -> int:
    """Return the number of elements in a vector of the card. `block_softmax` pads its results to whole vectors."""
    return 64 if dtype == torch.float32 else 128


def block_softmax(
    attn: torch.Tensor, block_bias: torch.Tensor, block_groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return exp(attn - block maximum), the maximum of each block, and the sum of each block.

    `attn` is [blocks, kv_heads, q_per_kv, tokens, block_size]. Maxima and sums are flattened per block and padded to
    whole vectors. The results for blocks in group -1 are zero. A hostile card accepts only what vllm-gaudi is known to
    run: one query per row, in bfloat16 (extension/features.py, ops.py).
    """
    if DEVICE.hostile and (attn.dim() != 5 or attn.shape[3] != 1 or attn.dtype != torch.bfloat16):
        raise DeviceRefusal(
            f"hpu::block_softmax with {attn.shape[3] if attn.dim() == 5 else attn.dim()} queries in {attn.dtype}: "
            "only one query per row, in bfloat16, is known to work"
        )
    scores = attn.float() + block_bias.float()
    top = scores.amax(-1)
    weights = torch.exp(scores - top.unsqueeze(-1))
    unused = (block_groups < 0).view(-1, *[1] * (attn.dim() - 1))
    weights = weights.masked_fill(unused, 0.0)
    sums = weights.sum(-1)
    top = top.masked_fill(unused.squeeze(-1), 0.0)
    blocks = attn.shape[0]
    extra = -(top.numel() // max(blocks, 1)) % _lanes(attn.dtype)
    top, sums = (F.pad(part.reshape(blocks, -1), (0, extra)).to(attn.dtype) for part in (top, sums))
    return weights.to(attn.dtype), top, sums


def block_softmax_adjustment(
    block_max: torch.Tensor,
    block_sums: torch.Tensor,
    block_groups: torch.Tensor,
    batch_size: int,
    out_shape: Sequence[int],
) -> torch.Tensor:
    """Return exp(block maximum - group maximum) / group sum, with the shape `out_shape`."""
    per_block = 1
    for size in out_shape[1:]:
        per_block *= size
    top = block_max.float().reshape(block_max.shape[0], -1)[:, :per_block]
    sums = block_sums.float().reshape(block_sums.shape[0], -1)[:, :per_block]
    used = block_groups >= 0
    group = torch.where(used, block_groups, batch_size).long()
    index = group.unsqueeze(-1).expand_as(top)
    group_top = torch.full((batch_size + 1, per_block), float("-inf"), device=top.device)
    group_top = group_top.scatter_reduce(0, index, top, "amax")
    scaled = torch.exp(top - group_top[group])
    group_sum = torch.zeros((batch_size + 1, per_block), device=top.device)
    group_sum = group_sum.scatter_add(0, index, sums * scaled)
    result = scaled / group_sum[group].clamp_min(torch.finfo(torch.float32).tiny)
    return result.masked_fill(~used.unsqueeze(-1), 0.0).reshape(list(out_shape)).to(block_max.dtype)


def cast_to_fp8_v2(
    x: torch.Tensor,
    scale: torch.Tensor | None = None,
    stochastic_rounding: bool = False,
    is_amax: bool = False,
    dtype: torch.dtype | None = None,
    scale_shape: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x * scale in FP8, and either the maximum of |x| or an empty tensor."""
    if scale is None or scale.dtype is not torch.bfloat16:  # as in vllm-gaudi (extension/ops.py, dynamic_quant)
        check_fp8(scale)
    if DEVICE.hostile and x.dtype not in (torch.float32, torch.bfloat16, *_FP8):
        raise DeviceRefusal(f"hpu::cast_to_fp8_v2 of {x.dtype}; it supports float32, bfloat16 and FP8")
    amax = x.abs().amax().float() if is_amax else x.new_empty(0, dtype=torch.float32)
    scaled = x if scale is None else _times(x, _shaped(scale, scale_shape))
    if dtype is torch.float8_e5m2:
        limit = torch.finfo(torch.float8_e5m2).max
        return scaled.clamp(-limit, limit).to(torch.float8_e5m2), amax
    return kernels.to_e4m3(scaled, DEVICE.e4m3_max), amax


def cast_from_fp8(
    x: torch.Tensor, scale: torch.Tensor | None, out_dtype: torch.dtype, scale_shape: Sequence[int] | None = None
) -> torch.Tensor:
    check_fp8(scale)
    if DEVICE.hostile and out_dtype not in (torch.float32, torch.bfloat16):
        raise DeviceRefusal(f"hpu::cast_from_fp8 to {out_dtype}; it supports float32 and bfloat16")
    wide = x.float()
    return (wide if scale is None else wide * _shaped(scale, scale_shape)).to(out_dtype)


def fp8_gemm_v2(
    A: torch.Tensor,
    trans_A: bool,
    B: torch.Tensor,
    trans_B: bool,
    D: torch.Tensor | None,
    out_dtype: torch.dtype,
    A_scale_inv: torch.Tensor | None = None,
    B_scale_inv: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    accumulate: bool = False,
    B_scale_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the matrix product multiplied by the scales.

    Sums of FP8 products are exact in float64 in any order, so a row's result does not depend on the number of rows. For
    bfloat16 output, the product and the scale are rounded before they are multiplied. Results are bitwise equal to
    those that vllm-gaudi's tests store for layers with static scales (v0.26.0, test_hpu_compressed_tensors).
    """
    check_fp8(A_scale_inv, B_scale_inv)
    left = A.double().transpose(-1, -2) if trans_A else A.double()
    right = B.double().transpose(-1, -2) if trans_B else B.double()
    out = left @ right
    scales = [A_scale_inv, None if B_scale_inv is None else _shaped(B_scale_inv, B_scale_shape)]
    scale = math.prod(scale.double() for scale in scales if scale is not None)
    if isinstance(scale, torch.Tensor):
        out = out.bfloat16() * scale.bfloat16() if out_dtype is torch.bfloat16 else out * scale
    if bias is not None:
        out = out + bias.double()
    if accumulate and D is not None:
        out = out + D.double()
    return out.to(out_dtype)


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_fp8(*scales: torch.Tensor | None) -> None:
    """Reject scales that are not float32. They are easily created in the wrong dtype, because the model's dtype is
    torch's default while vLLM loads a model (vllm-gaudi#978)."""
    for scale in scales:
        if DEVICE.hostile and scale is not None and scale.dtype is not torch.float32:
            raise DeviceRefusal(f"an FP8 kernel gets a scale in {scale.dtype}; scales must be float32")


def _times(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return `x` times the scale. If `x` is bfloat16, the scale is rounded to bfloat16 first, as in `fp8_gemm_v2`."""
    return x * scale.bfloat16() if x.dtype is torch.bfloat16 else x.float() * scale


def convert_from_uint4(
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    out_dtype: torch.dtype,
    g_idx: torch.Tensor | None = None,
) -> torch.Tensor:
    """Unpack int32 [K, N / 8] to [K, N], starting with the lowest bits, and dequantize the values.

    `g_idx` maps each row to the group whose scale and zero point it uses. The AWQ, GPTQ and compressed-tensors layers
    in vllm-gaudi's tests give correct results with this function.
    """
    weight = _nibbles(packed)
    if g_idx is None:
        rows = torch.arange(weight.shape[0], device=packed.device) // (weight.shape[0] // scale.shape[0])
    else:
        rows = g_idx.long()
    if zero_point is not None:
        weight = weight - _nibbles(zero_point)[rows]
    return (weight * scale.float()[rows]).to(out_dtype)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 15).flatten(-2).float()


# --- overloads that take Python numbers as scales ---


def _as_tensor(scale: float | Sequence[float] | None, like: torch.Tensor) -> torch.Tensor | None:
    return None if scale is None else torch.tensor(scale, dtype=torch.float32, device=like.device)


def _cast_to_fp8_scalar(x: torch.Tensor, scale: Any, *args: Any, **kwargs: Any) -> Any:
    return cast_to_fp8_v2(x, _as_tensor(scale, x), *args, **kwargs)


def _cast_from_fp8_scalar(x: torch.Tensor, scale: Any, *args: Any, **kwargs: Any) -> Any:
    return cast_from_fp8(x, _as_tensor(scale, x), *args, **kwargs)


def _fp8_gemm_scalar(
    A: torch.Tensor,
    trans_A: bool,
    B: torch.Tensor,
    trans_B: bool,
    D: torch.Tensor | None,
    out_dtype: torch.dtype,
    A_scale_inv: Any,
    B_scale_inv: Any,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    scales = _as_tensor(A_scale_inv, A), _as_tensor(B_scale_inv, B)
    return fp8_gemm_v2(A, trans_A, B, trans_B, D, out_dtype, *scales, *args, **kwargs)


def _shaped(scale: torch.Tensor, shape: Sequence[int] | None) -> torch.Tensor:
    return scale.float().view(list(shape)) if shape else scale.float()


def define(schemas: str, kernels_by_name: dict[str, Any]) -> None:
    """Define operations in `torch.ops.hpu`. In `schemas`, a line that starts with a space continues the previous
    line."""
    global _library
    _library = _library or Library("hpu", "DEF")
    for schema in schemas.replace("\n ", " ").strip().splitlines():
        _library.define(schema)
    for name, kernel in kernels_by_name.items():
        _library.impl(name, kernel, "CompositeExplicitAutograd")
        # Call these kernels directly on CPU tensors, because torch's dispatcher is slow for small operations.
        packet, _, overload = name.partition(".")
        kernels.KERNELS[f"hpu::{packet}.{overload or 'default'}"] = kernel


def register() -> None:
    define(
        _SCHEMAS,
        {
            "rms_norm": rms_norm,
            "rms_norm_fast": rms_norm,
            "rotary_pos_embedding": rotary_pos_embedding,
            "sdpa_fwd": sdpa_fwd,
            "block_softmax": block_softmax,
            "block_softmax_adjustment": block_softmax_adjustment,
            "cast_to_fp8_v2": cast_to_fp8_v2,
            **dict.fromkeys(("cast_to_fp8_v2.scalar", "cast_to_fp8_v2.scalar_list"), _cast_to_fp8_scalar),
            "cast_from_fp8": cast_from_fp8,
            **dict.fromkeys(("cast_from_fp8.scalar", "cast_from_fp8.scalar_list"), _cast_from_fp8_scalar),
            "fp8_gemm_v2": fp8_gemm_v2,
            **dict.fromkeys(("fp8_gemm_v2.scalar", "fp8_gemm_v2.scalar_list"), _fp8_gemm_scalar),
            "convert_from_uint4": convert_from_uint4,
        },
    )
