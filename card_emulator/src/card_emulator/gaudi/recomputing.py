"""`hpu::sdpa_recomp_fwd` and its FP8 variant in plain torch.

These fused attention operations also return each query's maximum score and inverse softmax sum, so that results over
parts of the keys can be combined. The signatures come from the bridge (v1.19, kernels_register.cpp) and
vllm-gaudi's calls (v0.26.0, extension/utils.py). The dtypes of the maxima and sums are not published; this module uses
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from card_emulator import kernels
from card_emulator.card import DEVICE
from card_emulator.gaudi.fused import check_fp8, check_sdpa, define, hidden_keys

_SCHEMAS = """
sdpa_recomp_fwd(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale, bool is_causal,
 bool requires_backward, str softmax_mode, Tensor? valid_seq_len, str seq_padding_type)
 -> (Tensor, Tensor, Tensor, Tensor)
fp8_sdpa_recomp_fwd(Tensor q, Tensor k, Tensor v, Tensor? attention_mask, float p, float scale, bool is_causal,
 bool requires_backward, str softmax_mode, Tensor? d_scale_q, Tensor? d_scale_k, Tensor? d_scale_v,
 Tensor? q_scale_s, Tensor? q_scale_o, Tensor? d_scale_s, bool is_amax_s, bool is_amax_o, Tensor? valid_seq_len,
 str seq_padding_type, int[] window=[-1, -1], Tensor? sink=None)
 -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)
"""
# The factor by which vllm-gaudi corrects inverse sums in the "fast" mode (extension/utils.py, SlicedFP8FusedSDPA).
_FAST_FP8 = 128.0

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, hidden: torch.Tensor | None,
    scale: float,
) -> Parts:  # fmt: skip
    """Return the output, the maxima and the inverse sums, all in float32."""
    if q.dim() == k.dim() and q.shape[-3] != k.shape[-3] and k.shape[-3] != 1:
        k, v = (part.repeat_interleave(q.shape[-3] // part.shape[-3], -3) for part in (k, v))
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask.float()
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - top)
    inverse = weights.sum(-1, keepdim=True).reciprocal()
    return (weights * inverse) @ v.float(), top, inverse


def sdpa_recomp_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, p: float, scale: float,
    is_causal: bool, requires_backward: bool, softmax_mode: str, valid_seq_len: torch.Tensor | None,
    seq_padding_type: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    if DEVICE.hostile:
        check_sdpa(q, mask, is_causal, softmax_mode, valid_seq_len, seq_padding_type)
    hidden = hidden_keys(q, k, is_causal, valid_seq_len, seq_padding_type, (-1, -1))
    out, top, inverse = _attend(q, k, v, mask, hidden, scale)
    return out.to(q.dtype), top, inverse, torch.zeros(1, dtype=torch.int32, device=q.device)


def fp8_sdpa_recomp_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, p: float, scale: float,
    is_causal: bool, requires_backward: bool, softmax_mode: str, d_scale_q: torch.Tensor | None,
    d_scale_k: torch.Tensor | None, d_scale_v: torch.Tensor | None, q_scale_s: torch.Tensor | None,
    q_scale_o: torch.Tensor | None, d_scale_s: torch.Tensor | None, is_amax_s: bool, is_amax_o: bool,
    valid_seq_len: torch.Tensor | None, seq_padding_type: str, window: Sequence[int] = (-1, -1),
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Compute attention on FP8 inputs. Softmax weights are not rounded, because no source says how the kernel uses
    their scale."""
    if sink is not None:
        raise NotImplementedError("fp8_sdpa_recomp_fwd: sinks are not emulated")
    check_fp8(d_scale_q, d_scale_k, d_scale_v, q_scale_s, q_scale_o, d_scale_s)
    if DEVICE.hostile:
        check_sdpa(q, mask, is_causal, softmax_mode, valid_seq_len, seq_padding_type)
    wide = [
        part.float() * (1.0 if scale is None else scale)
        for part, scale in ((q, d_scale_q), (k, d_scale_k), (v, d_scale_v))
    ]
    hidden = hidden_keys(q, k, is_causal, valid_seq_len, seq_padding_type, window)
    out, top, inverse = _attend(wide[0], wide[1], wide[2], mask, hidden, scale)
    largest_out = out.abs().amax().reshape(1) if is_amax_o else q.new_empty(0, dtype=torch.float32)
    largest_weight = inverse.amax().reshape(1) if is_amax_s else q.new_empty(0, dtype=torch.float32)
    result = out.bfloat16() if q_scale_o is None else kernels.to_e4m3(out * q_scale_o.float(), DEVICE.e4m3_max)
    if softmax_mode == "fast":
        inverse = inverse / _FAST_FP8
    seed = torch.zeros(1, dtype=torch.int32, device=q.device)
    return result, top, inverse, seed, largest_weight, largest_out


def fp8_fused_sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, softmax_mode: str = "None",
    d_scale_q: torch.Tensor | None = None, d_scale_k: torch.Tensor | None = None,
    d_scale_v: torch.Tensor | None = None, q_scale_s: torch.Tensor | None = None,
    q_scale_o: torch.Tensor | None = None, d_scale_s: torch.Tensor | None = None, is_amax_s: bool = False,
    is_amax_o: bool = False, valid_seq_len: torch.Tensor | None = None, seq_padding_type: str = "left",
) -> Any:  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.ops.hpu.fp8_sdpa_recomp_fwd(
        q, k, v, attn_mask, dropout_p, scale, is_causal, False, softmax_mode, d_scale_q, d_scale_k, d_scale_v,
        q_scale_s, q_scale_o, d_scale_s, is_amax_s, is_amax_o, valid_seq_len, seq_padding_type,
    )  # fmt: skip


# --- grouped-query attention: query heads that share a KV head form an extra dimension ---


def is_gqa(q: torch.Tensor, k: torch.Tensor) -> bool:
    return q.dim() == 4 and q.shape[1] != k.shape[1]


def gqa_input_reshape_fwd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    groups = k.shape[1]
    grouped = q.reshape(q.shape[0], groups, q.shape[1] // groups, *q.shape[2:])
    return grouped, k.unsqueeze(2), v.unsqueeze(2), None if mask is None else mask.unsqueeze(1)


def gqa_output_reshape(out: torch.Tensor) -> torch.Tensor:
    return out.flatten(1, 2)


def register() -> None:
    define(_SCHEMAS, {"sdpa_recomp_fwd": sdpa_recomp_fwd, "fp8_sdpa_recomp_fwd": fp8_sdpa_recomp_fwd})
