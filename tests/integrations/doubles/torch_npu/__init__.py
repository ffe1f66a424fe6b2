"""In the place of torch_npu: what vllm-ascend's drafters need of it, and of vllm-ascend's own compiled parts, on a CPU.

Nothing else of either is there: whatever else is asked for is an AttributeError or an ImportError. vLLM imports models
in processes of their own, so this is a package on the path of the tests' processes.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from typing import Any

import compiled
import torch


def _module(name: str, **contents: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
    made.__path__ = []
    vars(made).update(contents)
    sys.modules[name] = made
    return made


class _Stream:
    """Everything is done when it was asked for."""

    def wait_stream(self, other: _Stream) -> None: ...

    def synchronize(self) -> None: ...


npu = _module(
    "torch.npu",
    Stream=_Stream,
    Event=type("Event", (), {}),
    ExternalEvent=type("ExternalEvent", (), {}),
    NPUGraph=type("NPUGraph", (), {}),
    is_available=lambda: False,  # transformers asks, and would run on it
    _is_in_bad_fork=lambda: False,
    manual_seed_all=lambda seed: None,
    current_device=lambda: 0,
    current_stream=_Stream,
    stream=lambda stream: contextlib.nullcontext(),
    synchronize=lambda: None,
    memory_stats=dict,
    memory_reserved=lambda: 0,
    reset_peak_memory_stats=lambda: None,
    memory=types.SimpleNamespace(NPUPluggableAllocator=None),
    config=types.SimpleNamespace(),
)
torch.utils.rename_privateuse1_backend("npu")
torch.npu = npu
torch.distributed.is_hccl_available = lambda: False

_hccl = types.SimpleNamespace(Options=type("Options", (), {}))
_C = _module(
    "torch_npu._C",
    _NPUTaskGroupHandle=type("_NPUTaskGroupHandle", (), {}),
    _distributed_c10d=_module("torch_npu._C._distributed_c10d", ProcessGroupHCCL=_hccl),
)
profiler = _module("torch_npu.profiler", dynamic_profile=None)
for _name in ("torch_npu.op_plugin", "torch_npu.op_plugin.atb"):
    _module(_name)
_module("torch_npu.op_plugin.atb._atb_ops", _register_atb_extensions=lambda: None)


def _npu_reshape_and_cache(
    *,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_indices: torch.Tensor,
) -> None:
    """Caches [blocks, block_size, K, D]; a slot below zero keeps nothing."""
    assert slot_indices.dtype == torch.int32
    kept = slot_indices >= 0
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.flatten(0, 1)[slot_indices[kept].long()] = new[kept]


def npu_fused_infer_attention_score(
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    atten_mask: torch.Tensor,
    block_table: torch.Tensor,
    input_layout: str,
    block_size: int,
    actual_seq_lengths: list[int],
    actual_seq_lengths_kv: list[int],
    num_key_value_heads: int,
    num_heads: int,
    scale: float,
    sparse_mode: int,
) -> tuple[torch.Tensor, None]:
    """Rows one behind the other, causal from each row's end, keys and values in blocks."""
    assert (input_layout, sparse_mode) == ("TND", 3)
    assert atten_mask.shape == (2048, 2048)
    shared = num_heads // num_key_value_heads
    begin, outs = 0, []
    for row, (end, length) in enumerate(zip(actual_seq_lengths, actual_seq_lengths_kv, strict=True)):
        blocks = block_table[row, : -(-length // block_size)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:length].unflatten(1, (num_key_value_heads, -1)).repeat_interleave(shared, 1)
            for cache in (key, value)
        )
        scores = torch.einsum("qnd,knd->nqk", query[begin:end], keys) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(length - (end - begin) + 1)
        # A key that is no number shows in the weights; the value of a hidden one, times zero, shall not.
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outs.append(torch.einsum("nqk,knd->qnd", weights, values.nan_to_num()))
        begin = end
    return torch.cat(outs), None


# The operator with its double; it is on the path beside this package.
compiled.define("CPU")

# There is nothing to copy from host memory to.
torch.Tensor.pin_memory = lambda self, device=None: self
