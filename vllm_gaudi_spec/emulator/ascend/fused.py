"""torch_npu's fused operations as plain torch, one operation each for the counters.

Argument lists and what they take are those of op_plugin/config/op_plugin_functions.yaml and docs/zh/custom_APIs of
Ascend/op-plugin; rounding inside the real kernels differs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.library import Library

from vllm_gaudi_spec.emulator import kernels, ops, traffic
from vllm_gaudi_spec.emulator.ascend import attention
from vllm_gaudi_spec.emulator.card import DeviceRefusal

_libraries: list[Library] = []
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)

_SCHEMAS = {
    "npu": f"""
npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)
npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)
npu_rotary_mul(Tensor self, Tensor r1, Tensor r2, str rotary_mode='half') -> Tensor
npu_swiglu(Tensor self, int dim=-1) -> Tensor
npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, *, str? cache_mode='PA_NZ') -> ()
npu_fused_infer_attention_score({attention.ARGUMENTS}) -> (Tensor, Tensor)
npu_fused_infer_attention_score.out({attention.ARGUMENTS}, Tensor? workspace=None, Tensor(a!) attention_out, Tensor(b!) softmax_lse) -> (Tensor(a!), Tensor(b!))
_npu_fused_infer_attention_score_get_max_workspace({attention.ARGUMENTS}) -> Tensor
""",  # noqa: E501
    "atb": """
_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_indices) -> ()
""",  # noqa: E501
}


def _require(fine: bool, what: str) -> None:
    if not fine:
        raise DeviceRefusal(what)


def npu_rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised, reciprocal of the root mean square)"""
    _require(x.dtype in _FLOATS and x.dim() >= 2, f"npu_rms_norm of {x.dtype} in {x.dim()} dimensions")
    _require(gamma.dtype in (x.dtype, torch.float32), f"npu_rms_norm: gamma is {gamma.dtype}, x {x.dtype}")
    _require(
        0 < gamma.dim() < x.dim() and x.shape[-gamma.dim() :] == gamma.shape, "npu_rms_norm: gamma's shape ends x's"
    )
    wide = x.float()
    inverse = torch.rsqrt(wide.square().mean(tuple(range(-gamma.dim(), 0)), keepdim=True) + epsilon)
    return (wide * inverse * gamma.float()).to(x.dtype), inverse


def npu_add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(normalised sum, reciprocal of its root mean square, sum)"""
    _require(x1.dtype == x2.dtype == gamma.dtype, "npu_add_rms_norm: x1, x2 and gamma have one dtype")
    _require(x1.shape == x2.shape, "npu_add_rms_norm: x1 and x2 have one shape")
    total = x1 + x2
    return (*npu_rms_norm(total, gamma, epsilon), total)


def npu_rotary_mul(x: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half") -> torch.Tensor:
    """`r1` is the cosine and `r2` the sine, both of x's width and number of dimensions."""
    _require(
        x.dtype in _FLOATS and x.dtype == r1.dtype == r2.dtype, "npu_rotary_mul: x, r1 and r2 have one float dtype"
    )
    _require(
        x.dim() in (3, 4) and r1.shape == r2.shape and r1.dim() == x.dim(), "npu_rotary_mul: 3 or 4 dimensions each"
    )
    width = x.shape[-1]
    _require(width % 2 == 0 and width < 896 and r1.shape[-1] == width, f"npu_rotary_mul: a width of {width}")
    _require(all(of in (1, all_of) for of, all_of in zip(r1.shape, x.shape, strict=True)), "npu_rotary_mul: r1's shape")
    if rotary_mode == "half":
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    elif rotary_mode == "interleave":
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    else:
        raise DeviceRefusal(f"npu_rotary_mul: rotary_mode {rotary_mode!r}")
    return x * r1 + turned * r2


def npu_swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    _require(x.dtype in _FLOATS and x.is_contiguous(), f"npu_swiglu of {x.dtype}, contiguous: {x.is_contiguous()}")
    _require(x.numel() > 0 and x.shape[dim] % 2 == 0, f"npu_swiglu of {tuple(x.shape)} along {dim}")
    gate, value = x.chunk(2, dim=dim)
    return (F.silu(gate.float()) * value.float()).to(x.dtype)


def npu_scatter_pa_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    cache_mode: str | None = "PA_NZ",
) -> None:
    name = "npu_scatter_pa_kv_cache"
    _require(cache_mode in (None, "Norm"), f"{name}: cache_mode {cache_mode!r} (the default) is for the layout NZ")
    tensors = (key, value, key_cache, value_cache, slot_mapping)
    _require(all(tensor.is_contiguous() for tensor in tensors), f"{name}: something is not contiguous")
    _require(slot_mapping.dtype in (torch.int32, torch.int64), f"{name}: slot_mapping is {slot_mapping.dtype}")
    _scatter(name, *tensors)


def npu_reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    _require(slot_indices.dtype == torch.int32, f"_npu_reshape_and_cache: slot_indices is {slot_indices.dtype}")
    _scatter("_npu_reshape_and_cache", key, value, key_cache, value_cache, slot_indices)


def _scatter(
    name: str,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """key [tokens, heads, size], caches [blocks, block_size, heads, size]."""
    _require(key.dtype == value.dtype == key_cache.dtype == value_cache.dtype, f"{name}: one dtype for all")
    _require(key.dim() == 3 and key.shape[:2] == value.shape[:2], f"{name}: key is {tuple(key.shape)}")
    _require(slots.dim() == 1 and slots.shape[0] == key.shape[0], f"{name}: a slot for each token")
    _refuse_duplicates(name, slots, key_cache.shape[1])
    for new, cache in ((key, key_cache), (value, value_cache)):
        _require(cache.dim() == 4 and cache.shape[2:] == new.shape[1:], f"{name}: a cache of {tuple(cache.shape)}")
        kernels.checked(slots, cache.shape[0] * cache.shape[1], name)
        cache.flatten(0, 1).index_copy_(0, slots.long(), new)


def _refuse_duplicates(name: str, slots: torch.Tensor, block_size: int) -> None:
    """Nothing is promised of a call that writes a slot twice. Only padding, which goes to the first block, may: where
    there is more of it than the block has slots."""
    if slots.is_meta:
        return
    real_slots = slots[slots >= block_size] if len(slots) > block_size else slots
    _require(real_slots.unique().numel() == real_slots.numel(), f"{name}: two tokens for one slot")


def fused_infer_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = attention.Call(*args, **kwargs)
    return attention.attend(call), call.query.new_empty(0, dtype=torch.float32)


def fused_infer_attention_out(
    *args: Any,
    workspace: torch.Tensor | None = None,
    attention_out: torch.Tensor,
    softmax_lse: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    call = attention.Call(*args, **kwargs)
    name = "npu_fused_infer_attention_score.out"
    fine = attention_out.dtype == call.query.dtype and attention_out.shape == call.query.shape
    _require(fine and attention_out.is_contiguous(), f"{name}: attention_out has not the result's form")
    if workspace is not None:
        _require(workspace.numel() >= _workspace_elements(call), f"{name}: the workspace is too small")
    attention_out.copy_(attention.attend(call))
    return attention_out, softmax_lse


def max_workspace(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = attention.Call(*args, **kwargs)
    return call.query.new_empty(_workspace_elements(call))


def _workspace_elements(call: attention.Call) -> int:
    """Some number that grows with the queries alone. What the real one asks for is not published."""
    return call.query.numel() + 1024


_KERNELS: dict[str, Any] = {
    "npu::npu_rms_norm.default": npu_rms_norm,
    "npu::npu_add_rms_norm.default": npu_add_rms_norm,
    "npu::npu_rotary_mul.default": npu_rotary_mul,
    "npu::npu_swiglu.default": npu_swiglu,
    "npu::npu_scatter_pa_kv_cache.default": npu_scatter_pa_kv_cache,
    "npu::npu_fused_infer_attention_score.default": fused_infer_attention,
    "npu::npu_fused_infer_attention_score.out": fused_infer_attention_out,
    "npu::_npu_fused_infer_attention_score_get_max_workspace.default": max_workspace,
    "atb::_npu_reshape_and_cache.default": npu_reshape_and_cache,
}


def register() -> None:
    for namespace, schemas in _SCHEMAS.items():
        library = Library(namespace, "DEF")
        _libraries.append(library)
        for schema in schemas.strip().splitlines():
            library.define(schema)
    for name in ("npu_scatter_pa_kv_cache", "_npu_reshape_and_cache"):
        traffic.TOUCHED[name] = lambda args: int(args[0].numel())
    traffic.READS["npu_fused_infer_attention_score"] = attention.operand_bytes
    traffic.READS["_npu_fused_infer_attention_score_get_max_workspace"] = lambda *call: 0
    ops.FLOPS["npu_fused_infer_attention_score"] = attention.flops
    # Reached through the tensors of the card only, and without the dispatcher.
    kernels.KERNELS.update(_KERNELS)
