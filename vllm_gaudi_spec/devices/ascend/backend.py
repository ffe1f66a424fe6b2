"""The backend for Ascend NPUs, which runs steps as NPU graphs through torch_npu.

This backend has not yet run on a real NPU. It runs unchanged on the emulated NPU in `card_emulator/`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from vllm.logger import init_logger

from vllm_gaudi_spec import environment
from vllm_gaudi_spec.attention import padded
from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec
from vllm_gaudi_spec.config import in_one_line
from vllm_gaudi_spec.devices.ascend import attention as ascend_attention
from vllm_gaudi_spec.devices.ascend import downloads
from vllm_gaudi_spec.devices.ascend.compared import RECURRENT
from vllm_gaudi_spec.devices.ascend.device import usable_torch_npu
from vllm_gaudi_spec.devices.ascend.graphs import HostLengthsOperation, NpuCaptures
from vllm_gaudi_spec.devices.base import DeviceBackend, DeviceTraits, Memory, Weights
from vllm_gaudi_spec.devices.common.kv_pair import KVPair, PairAttention
from vllm_gaudi_spec.devices.common.stream_device import StreamGraphs, StreamMemory

if TYPE_CHECKING:
    from vllm_gaudi_spec.upstream.kv_cache import KVCacheConfig, KVCacheLayout

logger = init_logger(__name__)

_BLOCK_SIZE = 128
FUSED_DTYPES = frozenset({torch.float16, torch.bfloat16})
"""The dtypes that the fused attention and KV write operators support. For all others, plain torch is used."""


class Card(NamedTuple):
    """Functions of the NPU that attention uses."""

    torch_npu: Any
    torch_device: torch.device
    captures: NpuCaptures


def make_traits(name: str, torch_device: torch.device) -> DeviceTraits:
    return DeviceTraits(
        name=name,
        mode="captured",
        torch_device=torch_device,
        captures=True,
        block_size=_BLOCK_SIZE,
        needs_host_lengths=True,
        recurrent_models=RECURRENT,
        # vllm-ascend verifies at most 16 tokens per row in a step.
        max_drafts=15,
    )


# Matches torch_npu's out-of-memory message (NPUCachingAllocator.cpp, NPUWorkspaceAllocator.cpp).
_OUT_OF_MEMORY = re.compile(r"NPU out of memory\.(?:.*?ried to allocate (\d+(?:\.\d+)?) (bytes|[KMG]iB))?")
# CANN's out-of-memory error codes (`acl/error_codes`).
_NO_MEMORY = re.compile(r"(?<![\d.])207(?:001|018)(?!\d)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class AscendMemory(StreamMemory):
    measures_peak = True
    _measure_cann: int | None = None
    """The number of bytes in use before the first measured run that torch_npu had not allocated, such as CANN's own."""
    _fault: RuntimeError | None = None
    """The error that ended a copy to the host. torch_npu raises it only once and accepts no work afterwards."""

    def _host_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        self._refuse_after_a_fault()
        return downloads.mark(super()._host_buffer(tensor))

    def _wait_for(self, done: Any, host: torch.Tensor) -> torch.Tensor:
        self._refuse_after_a_fault()
        try:
            downloads.wait_for(done, host, self._runtime)
        except RuntimeError as error:
            self._fault = error
            raise
        return host

    def _refuse_after_a_fault(self) -> None:
        if self._fault is not None:
            raise RuntimeError(f"the NPU failed earlier: {in_one_line(self._fault)}") from self._fault

    def measure_peak(self, run: Callable[[], object]) -> int:
        # Only the card's free memory shows how much CANN itself and operator workspaces use. CANN never frees this
        # memory, so what one run takes adds to what the next one needs.
        self.synchronize()
        self._runtime.empty_cache()
        if self._measure_cann is None:
            self._measure_cann = self._not_of_torch()
        allocated = int(self._runtime.memory_allocated())
        self._runtime.reset_peak_memory_stats()
        run()
        self.synchronize()
        of_torch = max(int(self._runtime.max_memory_allocated()), int(self._runtime.memory_reserved())) - allocated
        return max(of_torch + self._not_of_torch() - self._measure_cann, 0)

    def _not_of_torch(self) -> int:
        free, total = self._runtime.mem_get_info()
        return int(total - free - self._runtime.memory_reserved())

    def bytes_asked(self, error: RuntimeError) -> int | None:
        text = str(error)
        if (found := _OUT_OF_MEMORY.search(text)) is not None:
            amount, unit = found.groups()
            return 0 if amount is None else int(float(amount) * _UNITS[unit])
        return 0 if _NO_MEMORY.search(text) else None

    def allocate_kv(self, kv_cache_config: KVCacheConfig, layout: KVCacheLayout) -> dict[str, KVPair]:
        by_layer = super().allocate_kv(kv_cache_config, layout)
        for size in {pair.block_size for pair in by_layer.values()}:
            if not ascend_attention.takes_blocks(size):
                logger.warning_once(
                    "The fused attention does not support KV blocks of %d tokens, so slower plain torch operations are "
                    "used. Use --block-size %d.",
                    size,
                    _BLOCK_SIZE,
                )
        return by_layer


class AscendWeights(Weights):
    device_name = "ascend"

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def prepare_model(self, model: nn.Module) -> None:
        with torch.inference_mode():
            model.to(torch.device("npu"))
        self._memory.synchronize()


def _make_form_key(spec: AttentionLayerSpec) -> tuple[Hashable, ...]:
    """Return the layer properties that determine which kernel the operator selects."""
    return spec.num_heads, spec.num_kv_heads, spec.head_size, spec.dtype, spec.block_size


class AscendAttention(PairAttention):
    def __init__(self, card: Card, fused_dtypes: frozenset[torch.dtype]) -> None:
        self._torch_npu = card.torch_npu
        self._torch_device = card.torch_device
        self._captures = card.captures
        self._adds_up: dict[Hashable, bool] = {}
        self._compresses: dict[Hashable, bool] = {}
        self.fused_dtypes = fused_dtypes

    @cached_property
    def _fused(self) -> HostLengthsOperation | None:
        return ascend_attention.fused_operation(self._torch_npu)

    @cached_property
    def _compressed_mask(self) -> torch.Tensor | None:
        """The compressed mask, which an eager run creates and all graphs share, or None to use dense masks."""
        if not environment.compresses_prompt_masks():
            return None
        return ascend_attention.compressed_mask(self._torch_device)

    def _choose_prompt_mask(self, spec: AttentionLayerSpec) -> torch.Tensor | None:
        """Return the compressed mask for prompt chunks if the card supports it, or None to use a dense mask."""
        mask = self._compressed_mask
        if mask is None:
            return None
        form = *_make_form_key(spec), spec.sliding_window
        if form not in self._compresses:
            self._compresses[form] = ascend_attention.compresses_masks(self._torch_npu, self._torch_device, spec, mask)
            if not self._compresses[form]:
                logger.info_once(
                    "The fused attention of this CANN does not support compressed masks with head size %d, dtype %s, "
                    "block size %d and window %s, so prompts use dense masks.",
                    spec.head_size,
                    spec.dtype,
                    spec.block_size,
                    spec.sliding_window,
                )
        return mask if self._compresses[form] else None

    def _adds_up_blocks(self, spec: AttentionLayerSpec, num_queries: int, mask: torch.Tensor | None) -> bool:
        """Whether the operator rejects rows that together have more KV blocks than the cache.

        The card is tested in the eager run that precedes a capture. Calls with one query per row are tested separately.
        """
        queries = min(num_queries, 2)
        form = *_make_form_key(spec), queries, mask is not None
        if form not in self._adds_up:
            self._adds_up[form] = ascend_attention.adds_up_blocks(
                self._torch_npu, self._torch_device, spec, queries, mask
            )
            if self._adds_up[form]:
                logger.info_once(
                    "The fused attention of this CANN rejects rows that together have more KV blocks than the cache. "
                    "If this may happen, as with shared prefixes, fewer rows are processed at a time."
                )
        return self._adds_up[form]

    @cached_property
    def _scatter_kv(self) -> Any:
        return getattr(self._torch_npu, "npu_scatter_pa_kv_cache", None)

    def write_kv(
        self,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor | None,
        kv_cache: KVPair,
        slots_T: torch.Tensor,
        spec: AttentionLayerSpec,
    ) -> None:
        keys, values = kv_cache.blocks()
        fused = self._scatter_kv is not None and key_TKD.dtype in self.fused_dtypes
        if value_TKD is None or values is None or not fused:
            kv_cache.write(key_TKD, value_TKD, slots_T, spec.operations)
        else:
            # The operator rejects calls with more tokens than the cache has slots, which occur in the profile run.
            num_slots = keys.shape[0] * keys.shape[1]
            parts = (tensor.split(num_slots) for tensor in (key_TKD.contiguous(), value_TKD.contiguous(), slots_T))
            for key, value, slots in zip(*parts, strict=True):
                # Select this layout explicitly, because it is not the default in some builds.
                self._scatter_kv(key, value, keys, values, slots, cache_mode="Norm")

    def attend(
        self, query_THD: torch.Tensor, kv_cache: KVPair, call: AttentionCall, spec: AttentionLayerSpec
    ) -> torch.Tensor:
        num_keys = call.block_table_BW.shape[1] * spec.block_size
        if self._fused is not None and ascend_attention.takes(spec, call.num_queries, num_keys, self.fused_dtypes):
            mask = self._choose_prompt_mask(spec) if ascend_attention.takes_compressed_masks(spec, call) else None
            adds_up_blocks = self._adds_up_blocks(spec, call.num_queries, mask)
            return ascend_attention.attend(
                self._fused, self._captures, query_THD, kv_cache, call, spec, adds_up_blocks=adds_up_blocks, mask=mask
            )
        return padded.attend(query_THD, *kv_cache.blocks(), call, spec)


def make_backend(
    name: str = "ascend",
    graphs_class: type[StreamGraphs] = StreamGraphs,
    memory_class: type[AscendMemory] = AscendMemory,
    weights_class: type[AscendWeights] = AscendWeights,
    fused_dtypes: frozenset[torch.dtype] = FUSED_DTYPES,
) -> DeviceBackend:
    """Create the backend without opening the card, because vLLM's front-end process also creates a backend."""
    torch_npu = usable_torch_npu()
    # Without an index, "npu" refers to the card that `Platform.set_device` selected for this process.
    device = torch.device("npu")
    npu = torch_npu.npu
    card = Card(torch_npu, device, NpuCaptures(npu, device))
    graphs = graphs_class(npu, card.captures)
    memory = memory_class(npu, device, graphs)
    return DeviceBackend(
        traits=make_traits(name, device),
        graphs=graphs,
        memory=memory,
        attention=AscendAttention(card, fused_dtypes),
        weights=weights_class(memory),
    )
