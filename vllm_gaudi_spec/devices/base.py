"""The contract between the engine and a device.

A device overrides the defaults where it differs from them. Nothing above `devices/` asks which device it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_gaudi_spec.attention import row_operations
from vllm_gaudi_spec.attention.operations import finite
from vllm_gaudi_spec.config import MAX_DRAFTS
from vllm_gaudi_spec.sampling.rules.registry import TORCH

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import ModelConfig, VllmConfig

    from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec, KVShape
    from vllm_gaudi_spec.attention.row_operations import RowOperations
    from vllm_gaudi_spec.quantization.config import LoadContext, Measuring, QuantConfig
    from vllm_gaudi_spec.quantization.encodings import Words
    from vllm_gaudi_spec.quantization.fp8 import Arithmetic
    from vllm_gaudi_spec.sampling.rules.registry import Rules
    from vllm_gaudi_spec.upstream.kv_cache import KVCacheConfig, KVCacheLayout


Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTraits:
    """Facts about a device that determine how the engine uses it."""

    name: str
    """The value of VGS_DEVICE."""
    mode: str
    """How steps run: eager, lazy, compiled or captured."""
    torch_device: torch.device
    captures: bool = False
    """Whether every shape and branch of a step is a graph that warm-up has to capture.

    If so, branches are few, and a number that changes from step to step is a tensor. Otherwise shapes may depend on
    values, since reading a value does not wait, and models compute no padding.
    """
    updates_views: bool = True
    """Whether a graph may contain a layer that writes through a view (docs/contributing/quirks.md, L06)."""
    compiles: bool = False
    """Whether capturing a graph compiles it, which takes seconds to minutes: sampling passes then share few graphs."""
    block_size: int = 128
    """Default number of tokens in a KV block."""
    flat_decode: bool = False
    """Whether decodes read the blocks of all rows as one list, so that short rows do not pay for the longest."""
    needs_host_lengths: bool = False
    """Whether attention needs an upper bound of each row's number of keys on the host.

    If so, functions that attend are given `Blocks.lengths_B`, whose values do not select a graph.
    """
    exact_context_width: bool = False
    """Whether attention reads only the blocks that a row has, so that one table width serves every context."""
    prefill_rows: tuple[int, ...] = (1,)
    """Default numbers of prompt chunks of one length that may share a step."""
    causal_first_chunks: bool = False
    """Whether attention needs no mask over a prompt's first chunk, which then has shapes of its own."""
    smallest_prefill: int = 128
    """The number of tokens of which prefill buckets are multiples."""
    slice_tokens: int = 0
    """The length of the slices into which prompt chunks are cut (`vllm_gaudi_spec.slices`); 0 to give each chunk a row
    of its own."""
    decode_step: int = 0
    """The smallest step between decode batch sizes; 0 for powers of two only."""
    decode_parts: int = 4
    """The maximum number of steps from a power of two to the next."""
    prefill_step: int = 0
    """The smallest difference of prefill buckets between powers of two, where padding costs more than another shape. 0:
    only powers of two."""
    shares_kv_caches: bool = False
    """Whether a layer's KV cache is one tensor in vLLM's layout, which KV connectors can read and write."""
    selects_keys: bool = False
    """Whether sparse attention, whose keys an indexer selects, was compared with another implementation."""
    media_models: tuple[str, ...] = ()
    """Classes of models whose images were compared with transformers in captured graphs, if the device captures."""
    recurrent_models: tuple[str, ...] = ()
    """The same for architectures with recurrent layers."""
    max_drafts: int = MAX_DRAFTS
    """The largest number of drafts per row that the device's kernels verify in one step."""
    takes_quant_config: bool = False
    """Whether the device measures and quantizes models, by `Weights.loading` and `Weights.quantize`."""
    simulates_quantization: bool = False
    """Whether QUANT_CONFIG is simulated instead of applied by Intel Neural Compressor."""
    takes_cpu_weights: bool = False
    """Whether the option `cpu_weights` chooses the format of weights."""
    sleeps: bool = False
    """Whether `Memory.release` is implemented: steps read weights and KV through tensors, not at fixed addresses."""
    updates_weights: bool = False
    """Whether new weights of an unquantized model may be copied over those that steps read."""
    warmup_tokens: int = -1
    """Run shapes of up to this many tokens during warm-up; -1 means all."""


class Graphs:
    """How functions are run. By default they run eagerly."""

    def graph(self, function: Function) -> Function:
        """Return `function` so that it runs as one graph per set of tensor shapes and non-tensor arguments.

        Arguments are tensors, numbers, strings, None, and tuples of these. The function must not wait for the device
        or read a value. A tensor that is not an argument must be written as a whole, not through a view, and must keep
        its identity and shape between calls. If the device captures, the next run of the same graph may overwrite the
        result.
        """
        return function

    def uncaptured(self) -> Graphs:
        """Return graphs that run functions directly, since nothing that runs once is worth a capture."""
        graphs = Graphs()
        graphs.step_done = self.step_done  # type: ignore[method-assign]
        return graphs

    def compiling_only(self) -> AbstractContextManager[None]:
        """Return a context in which warm-up compiles graphs without computing, if the device has such a mode."""
        return nullcontext()

    def num_recipes(self) -> int:
        """Return the device's count of compilations so far; 0 if it does not count."""
        return 0

    def warmed_up(self) -> None:
        """Mark the end of warm-up: nothing should be compiled from here on."""

    def step_done(self) -> None:
        """Mark that all work of a step was issued. No-op: by default work starts as it is issued."""

    def compiled_after_warmup(self) -> int:
        """Return the device's count of graphs compiled after warm-up; 0 if it does not count."""
        return 0

    def counts(self) -> dict[str, Any]:
        """Return everything that the device counts, `compiled_after_warmup` above all."""
        return {}


class Memory:
    """Copies to and from the device, and its KV cache. By default the device's memory is the host's."""

    num_host_syncs = 0
    """Number of calls of `download` and `start_download`."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device without waiting."""
        return host

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host and wait. Every call counts as one device-to-host sync."""
        self.num_host_syncs += 1
        return tensor

    def start_download(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start a copy to the host, and return a function that waits for it.

        Counts as one device-to-host sync. The next step may overwrite the tensor before the function is called.
        """
        return partial(self.download, tensor)

    def synchronize(self) -> None:
        """Wait for all issued work. No-op: by default work is done when its call returns."""

    def free_bytes(self) -> int | None:
        """Return the free memory that the card reports; None if the device uses the host's memory."""
        return None

    measures_peak = False
    """Whether `measure_peak` is implemented."""

    def measure_peak(self, run: Callable[[], object]) -> int:
        """Return the most bytes that `run` allocates at once, in addition to what is allocated before."""
        raise NotImplementedError

    def bytes_asked(self, error: RuntimeError) -> int | None:
        """Return the size of a failed allocation, or 0 if the error does not name it.

        Returns None if `error` is not an out-of-memory error.
        """
        return None

    def available_memory(self, utilization: float, num_ranks: int) -> int:
        """Return how many bytes one of the host's `num_ranks` processes may use for KV."""
        raise NotImplementedError

    def allocate_kv(self, kv_cache_config: KVCacheConfig, layout: KVCacheLayout) -> dict[str, Any]:
        """Allocate a zeroed KV cache for each layer, keyed by layer name."""
        raise NotImplementedError

    def release(self, tensors: Iterable[torch.Tensor], *, keep: bool) -> Callable[[], None]:
        """Free the device's memory of tensors, and return a function that restores it.

        The tensors get their contents back if the host has to `keep` them, and zeros otherwise. Only devices with the
        trait `sleeps` implement this.
        """
        raise NotImplementedError

    def make_block_copier(self, kv_caches: dict[str, Any]) -> Callable[[list[tuple[int, int]]], None]:
        """Return a function that copies KV blocks, as (source, target) pairs, in all caches from `allocate_kv`."""
        raise NotImplementedError


class Attention:
    """Attention over the KV caches of `Memory.allocate_kv`. T tokens, H query heads, K KV heads, D head size."""

    def kv_shape(self, kv_cache: Any) -> KVShape:
        raise NotImplementedError

    def supports_attention(self, spec: AttentionLayerSpec) -> bool:
        """Whether the device's kernel supports this layer. If not, `torch_ops` serves it."""
        return True

    def reads_slices(self, spec: AttentionLayerSpec) -> bool:
        """Whether several rows of a call may belong to one request, at about the cost of one row."""
        return True

    def finite(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace non-finite keys or values before `write_kv`; the identity if the kernel that writes does it."""
        return finite(tensor)

    def write_kv(
        self,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor | None,
        kv_cache: Any,
        slots_T: torch.Tensor,
        spec: AttentionLayerSpec,
    ) -> None:
        """Store finite keys and values at their slots.

        `value_TKD` is None if values are a part of the keys. Only pad slots may occur twice. `spec.operations` are to
        be called if `spec.layer_operations` is set.
        """
        raise NotImplementedError

    def attend(
        self, query_THD: torch.Tensor, kv_cache: Any, call: AttentionCall, spec: AttentionLayerSpec
    ) -> torch.Tensor:
        """Attend causally with Q queries per row over the row's blocks, reading each block once.

        Returns a new tensor [T, H, output size], since a captured graph on a Gaudi must not write through a view or
        into a given buffer.
        """
        raise NotImplementedError


class Weights:
    """What a device does with a model's weights. By default they stay as loaded, and quantized formats are refused."""

    device_name = "this device"
    """The device's name in messages."""
    fp8_arithmetic: Callable[[float], Arithmetic] | None = None
    """Factory of e4m3 arithmetic, given the largest number; None if KV is not kept in FP8."""
    fp8_logits: Callable[[float], Arithmetic] | None = None
    """Likewise, for a drafter's logits; None if products of FP8 are not faster."""
    multiplies_fp8 = False
    """Whether FP8 products are faster than products of floats, so that linear layers of FP8 checkpoints stay FP8."""
    converts_uint4 = False
    """Whether there is an operator for `from_uint4`, so that linear layers can keep 4-bit integers."""

    @property
    def fp8_range(self) -> str | None:
        """The card whose e4m3 range applies, gaudi2 or gaudi3; None if the user chooses."""
        return None

    def loading(self, quant_config: QuantConfig) -> AbstractContextManager[None]:
        """Return the context in which a model is loaded that will be measured or quantized."""
        raise NotImplementedError("refused at start-up")

    def quantize(self, model: nn.Module, quant_config: QuantConfig, load_context: LoadContext) -> Measuring | None:
        """Measure or quantize a loaded model, before `prepare_model`. Returns the measurement, if it measures."""
        raise NotImplementedError("refused at start-up")

    def from_uint4(self, words: Words, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [K, N] that is packed in `words`."""
        raise NotImplementedError("refused at start-up")

    def missing_kernel(self, vllm_config: VllmConfig, model: ModelConfig) -> str | None:
        """Return why the device cannot compute with a model's quantized weights; None if it can.

        Called before anything is loaded, and in processes that must not open the card.
        """
        return f"for which there are no kernels yet on {self.device_name}"

    def refresh(self, model: nn.Module, *, dropped: bool = False) -> None:
        """Rebuild data derived from weights after an update, where vLLM's loading does not. If `dropped`, free it
        instead."""

    def prepare_model(self, model: nn.Module) -> None:
        """Move loaded weights to the device, in the layout that it needs. No-op: by default, loaded weights are on the
        device already."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBackend:
    """One device, as the engine sees it."""

    traits: DeviceTraits
    memory: Memory
    attention: Attention
    graphs: Graphs = field(default_factory=Graphs)
    weights: Weights = field(default_factory=Weights)
    rules: Rules = TORCH
    """The functions of sampling and acceptance."""
    row_operations: RowOperations = row_operations.TORCH
    """The functions that keep the state of requests."""
