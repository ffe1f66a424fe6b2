"""A stand-in for the `torch_npu` package: the part of it that a worker calls."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from vllm_gaudi_spec.emulator import runtime
from vllm_gaudi_spec.emulator.ascend import graphs, tasks
from vllm_gaudi_spec.emulator.ascend.attention import NOT_EMULATED
from vllm_gaudi_spec.emulator.ascend.streams import STREAMS, Event, Stream, synchronize
from vllm_gaudi_spec.emulator.card import DEVICE


def get_device_name(device: Any = None) -> str:
    return DEVICE.model.name


def make_npu_module() -> ModuleType:
    return runtime.make_module(
        {
            "Stream": Stream,
            "Event": Event,
            "synchronize": synchronize,
            "get_device_name": get_device_name,
            "memory_reserved": runtime.memory_allocated,
            **STREAMS.contents(),
            **graphs.CONTENTS,
            **tasks.CONTENTS,
        }
    )


def _emulated(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Without arguments that are left at nothing."""
    refused = sorted(name for name in NOT_EMULATED if kwargs.get(name) is not None)
    if refused:
        raise NotImplementedError(f"npu_fused_infer_attention_score: {', '.join(refused)}: not emulated")
    lists = ("actual_seq_lengths", "actual_seq_lengths_kv")
    for name in lists:
        if isinstance(kwargs.get(name), torch.Tensor):
            raise TypeError(f"npu_fused_infer_attention_score: {name} is a list of numbers on the host, not a tensor")
    return {name: value for name, value in kwargs.items() if name not in NOT_EMULATED}


class FusedInferAttention:
    """torch_npu.npu_fused_infer_attention_score: to be called, and with a form that writes into given tensors."""

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> Any:
        return torch.ops.npu.npu_fused_infer_attention_score.default(query, key, value, **_emulated(kwargs))

    def out(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, out: list[torch.Tensor], **kwargs: Any
    ) -> Any:
        attention_out, softmax_lse = out
        return torch.ops.npu.npu_fused_infer_attention_score.out(
            query, key, value, attention_out=attention_out, softmax_lse=softmax_lse, **_emulated(kwargs)
        )


def max_workspace(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    workspace: torch.Tensor = torch.ops.npu._npu_fused_infer_attention_score_get_max_workspace(
        query, key, value, **_emulated(kwargs)
    )
    return workspace


def _private() -> ModuleType:
    module = ModuleType("torch_npu._C")
    vars(module)["_weak_ref_tensor"] = graphs.weak_ref_tensor
    return module


def npu_fusion_attention(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("npu_fusion_attention is not emulated; transformers imports it")


def enter_modules(npu: ModuleType) -> None:
    module = ModuleType("torch_npu")
    module.__spec__ = ModuleSpec("torch_npu", None)
    module.__path__ = []  # a package, so that its submodules can be imported
    vars(module).update(
        __version__="2.13.0",
        npu=npu,
        _C=_private(),
        npu_fusion_attention=npu_fusion_attention,
        npu_fused_infer_attention_score=FusedInferAttention(),
        _npu_fused_infer_attention_score_get_max_workspace=max_workspace,
        _npu_reshape_and_cache=torch.ops.atb._npu_reshape_and_cache,
        **{
            name: getattr(torch.ops.npu, name)
            for name in (
                "npu_rms_norm",
                "npu_add_rms_norm",
                "npu_rotary_mul",
                "npu_swiglu",
                "npu_scatter_pa_kv_cache",
            )
        },
    )
    sys.modules.update({"torch_npu": module, "torch_npu.npu": npu})
