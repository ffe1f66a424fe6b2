"""The backend for CPUs, which is the default. It uses vLLM's CPU kernels if the build has them, or else plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from vllm import envs
from vllm.logger import init_logger

from vllm_gaudi_spec.attention import torch_ops
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec, KVShape, SpanRows
from vllm_gaudi_spec.devices.base import Attention, DeviceBackend, DeviceTraits, Memory, Weights
from vllm_gaudi_spec.devices.common import host_memory
from vllm_gaudi_spec.devices.cpu import formats as cpu_formats
from vllm_gaudi_spec.devices.cpu import linear as cpu_linear
from vllm_gaudi_spec.devices.cpu.rules import RULES
from vllm_gaudi_spec.quantization import simulation
from vllm_gaudi_spec.quantization.config import LoadContext, Measuring, QuantConfig
from vllm_gaudi_spec.quantization.fp8 import HostArithmetic
from vllm_gaudi_spec.upstream.cpu_kernels import choose_instruction_set
from vllm_gaudi_spec.upstream.cpu_kernels import custom_ops as vllm_ops
from vllm_gaudi_spec.upstream.kv_cache import KVCacheConfig, KVCacheLayout
from vllm_gaudi_spec.upstream.worker import allocate_kv_cache

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)

_DEVICE = torch.device("cpu")
# Head sizes that vLLM's CPU attention kernel supports.
_KERNEL_HEAD_SIZES = frozenset({32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512})


def make_backend() -> DeviceBackend:
    has_kernel = hasattr(torch.ops._C, "cpu_attention_with_kv_cache")
    if torch.cpu._is_amx_tile_supported():
        # A process has to request AMX tiles from Linux, which oneDNN does before its first matmul. vLLM's bfloat16
        # attention does not, so a process that runs it first would be killed by SIGILL without this call.
        torch.cpu._init_amx()
    traits = DeviceTraits(
        name="cpu",
        mode="eager",
        torch_device=_DEVICE,
        block_size=32,
        exact_context_width=has_kernel,
        prefill_rows=(1, 2, 4, 8, 16),
        smallest_prefill=16,
        decode_step=1,
        prefill_step=16,
        shares_kv_caches=True,
        runs_stages=True,
        selects_keys=True,
        takes_quant_config=True,
        simulates_quantization=True,
        takes_cpu_weights=True,
        sleeps=True,
        updates_weights=True,
        # Nothing is compiled for specific shapes on a CPU. Small shapes are enough to warm up caches and reveal errors.
        warmup_tokens=16,
    )
    return DeviceBackend(
        traits=traits, memory=CpuMemory(), attention=CpuAttention(has_kernel), weights=CpuWeights(), rules=RULES
    )


class CpuMemory(Memory):
    def available_memory(self, utilization: float, num_ranks: int) -> int:
        return host_memory.choose_kv_bytes(utilization) // num_ranks

    def allocate_kv(self, kv_cache_config: KVCacheConfig, layout: KVCacheLayout) -> dict[str, Any]:
        return allocate_kv_cache(kv_cache_config, _DEVICE, layout)

    def release(self, tensors: Iterable[torch.Tensor], *, keep: bool) -> Callable[[], None]:
        # The KV caches of all layers are views of one storage.
        found = {} if keep else {storage._cdata: storage for storage in map(torch.Tensor.untyped_storage, tensors)}
        sizes = [(storage, storage.nbytes()) for storage in found.values()]
        for storage, _ in sizes:
            storage.resize_(0)

        def bring_back() -> None:
            for storage, num_bytes in sizes:
                storage.resize_(num_bytes)
                torch.empty(0, dtype=torch.uint8).set_(storage).zero_()

        return bring_back

    def make_block_copier(self, kv_caches: dict[str, Any]) -> Callable[[list[tuple[int, int]]], None]:
        return partial(torch_ops.copy_blocks, kv_caches)


class CpuAttention(Attention):
    def __init__(self, has_kernel: bool) -> None:
        self._has_kernel = has_kernel

    def kv_shape(self, kv_cache: torch.Tensor) -> KVShape:
        num_blocks, num_kv_heads, block_size, row_size = kv_cache.shape
        return KVShape(num_blocks, block_size, num_kv_heads, row_size, kv_cache.dtype)

    def supports_attention(self, spec: AttentionLayerSpec) -> bool:
        if spec.value_size is not None:
            return False  # the latent KV kernel supports only one query per row
        if spec.layer_operations or spec.kv_dtype is not None or spec.attention_chunk is not None:
            return False
        supported = self._has_kernel and spec.head_size in _KERNEL_HEAD_SIZES and spec.block_size % 16 == 0
        if not supported:
            logger.info_once("No CPU attention kernel for head size %d; using plain torch.", spec.head_size)
        return supported

    def finite(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace non-finite elements with a single operation, if possible in place.

        More operations would slow down the steps of a small model by a few percent. Large finite elements are kept,
        because CPU kernels overwrite masked scores and models skip padding on a CPU.
        """
        is_expanded = 0 in tensor.stride()
        return (torch.nan_to_num if is_expanded else torch.nan_to_num_)(tensor, nan=0.0, posinf=0.0, neginf=0.0)

    def write_kv(
        self,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor | None,
        kv_cache: torch.Tensor,
        slots_T: torch.Tensor,
        spec: AttentionLayerSpec,
    ) -> None:
        keys, values = _split_cache(kv_cache)
        vllm_ops.cpu_attn_reshape_and_cache(key_TKD, value_TKD, keys, values, slots_T, _choose_instruction_set(spec))

    def attend(
        self, query_THD: torch.Tensor, kv_cache: torch.Tensor, call: AttentionCall, spec: AttentionLayerSpec
    ) -> torch.Tensor:
        keys, values = _split_cache(kv_cache)
        rows = call.plan(("rows", spec.is_causal), lambda: _build_rows(call, spec))
        attended_THD = _attend(query_THD, keys, values, rows, call, spec)
        if call.spans is not None:
            # Compute attention again for spans, treating each span as a row whose queries attend to all of its keys.
            assert call.spans.rows is not None
            of_spans = call.spans.rows
            index_T, spans = call.plan("spans", lambda: _build_span_rows(of_spans, call, rows.query_starts))
            found = _attend(query_THD.index_select(0, index_T), keys, values, spans, call, spec)
            attended_THD.index_copy_(0, index_T, found)
        return attended_THD


class CpuWeights(Weights):
    fp8_arithmetic = HostArithmetic

    def loading(self, quant_config: QuantConfig) -> AbstractContextManager[None]:
        return cpu_linear.keep_unpacked()

    def quantize(self, model: nn.Module, quant_config: QuantConfig, load_context: LoadContext) -> Measuring | None:
        return simulation.apply(model, quant_config, load_context, HostArithmetic)

    def missing_kernel(self, vllm_config: VllmConfig, model: ModelConfig) -> str | None:
        return cpu_formats.missing_kernel(vllm_config, model)

    def refresh(self, model: nn.Module, *, dropped: bool = False) -> None:
        cpu_linear.repack(model, dropped=dropped)

    def prepare_model(self, model: nn.Module) -> None:
        """Log how many weights have float16 copies, which were created while the model was loaded (`linear.pack`)."""
        cpu_linear.log_copies(model)


def _split_cache(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    keys, values = kv_cache.view(num_blocks, num_kv_heads, block_size * 2, -1).chunk(2, dim=2)
    return keys, values


class _Rows(NamedTuple):
    """The kernel's description of the rows, as int32 tensors. Rows may have no queries."""

    query_starts: torch.Tensor
    """The index of each row's first query, followed by the total number of queries."""
    key_ends: torch.Tensor
    tables: torch.Tensor
    is_causal: bool = True
    """If False, each query attends to all keys or, with a window, to the same number of keys before and after it."""


def _build_rows(call: AttentionCall, spec: AttentionLayerSpec) -> _Rows:
    if call.packed is None:  # either all tokens are real or none are
        starts = torch.arange(call.num_rows + 1, dtype=torch.int32) * call.num_queries
        return _Rows(starts, call.starts_B + call.num_queries, call.block_table_BW, spec.is_causal)
    counts_B = call.packed.num_real_B
    return _Rows(_compute_starts(counts_B), call.starts_B + counts_B, call.block_table_BW, spec.is_causal)


def _build_span_rows(spans: SpanRows, call: AttentionCall, query_starts: torch.Tensor) -> tuple[torch.Tensor, _Rows]:
    """Return the int64 indices of the queries inside spans, and rows in which each span's queries form one row."""
    rows_S, firsts_S, lasts_S = spans
    first_queries_S = torch.maximum(firsts_S, call.starts_B.index_select(0, rows_S))
    counts_S = lasts_S + 1 - first_queries_S
    starts = _compute_starts(counts_S)
    offsets_S = query_starts.index_select(0, rows_S) + first_queries_S - call.starts_B.index_select(0, rows_S)
    index_T = torch.arange(int(starts[-1])) + (offsets_S - starts[:-1]).repeat_interleave(counts_S)
    return index_T, _Rows(starts, lasts_S + 1, call.block_table_BW.index_select(0, rows_S), is_causal=False)


def _compute_starts(counts: torch.Tensor) -> torch.Tensor:
    return torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))


def _attend(
    query_THD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: _Rows,
    call: AttentionCall,
    spec: AttentionLayerSpec,
) -> torch.Tensor:
    sinks_H = spec.sinks_H
    if sinks_H is not None and sinks_H.dtype != torch.bfloat16:
        sinks_H = sinks_H.float()  # the kernel supports only bfloat16 and float32
    schedule = call.plan((spec, "schedule", rows.is_causal), lambda: _make_schedule(rows, spec))
    out_THD = query_THD.new_empty(query_THD.shape)
    vllm_ops.cpu_attention_with_kv_cache(
        query=query_THD,
        key_cache=keys,
        value_cache=values,
        output=out_THD,
        query_start_loc=rows.query_starts,
        seq_lens=rows.key_ends,
        scale=spec.scale,
        causal=rows.is_causal,
        alibi_slopes=spec.slopes_H,
        sliding_window=_get_window(spec),
        block_table=rows.tables,
        softcap=spec.logits_soft_cap,
        scheduler_metadata=schedule,
        s_aux=sinks_H,
    )
    return out_THD


def _make_schedule(rows: _Rows, spec: AttentionLayerSpec) -> torch.Tensor:
    return vllm_ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(rows.key_ends),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        seq_lens=rows.key_ends,
        dtype=spec.dtype,
        query_start_loc=rows.query_starts,
        causal=rows.is_causal,
        sliding_window_size=_get_window(spec),
        isa=_choose_instruction_set(spec),
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
    )


def _get_window(spec: AttentionLayerSpec) -> int:
    return -1 if spec.sliding_window is None else spec.sliding_window


def _choose_instruction_set(spec: AttentionLayerSpec) -> str:
    """Return the vector instruction set that vLLM selects for this layer."""
    return choose_instruction_set(spec.dtype, spec.block_size, spec.head_size)
