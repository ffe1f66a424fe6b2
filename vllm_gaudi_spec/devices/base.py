"""Interface between the engine and a device.

A device's backend overrides defaults where necessary. Code outside `devices/` never checks which device is in use.
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
    """Properties that determine how the engine uses a device."""

    name: str
    """The VGS_DEVICE value that selects this device."""
    mode: str
    """How steps are executed: eager, lazy, compiled, or captured."""
    torch_device: torch.device
    captures: bool = False
    """Whether warm-up has to capture a graph for every combination of shapes and sampling branches.

    If so, code must keep these combinations few and pass numbers that vary between steps as tensors. If not, shapes may
    depend on tensor values, because reading a value does not block, and models skip padding.
    """
    updates_views: bool = True
    """Whether layers in a graph may write through views (docs/contributing/quirks.md, L06)."""
    compiles: bool = False
    """Whether graphs are compiled when they are captured, which takes seconds to minutes. If so, sampling passes share
    graphs."""
    block_size: int = 128
    """Default number of tokens in a KV block."""
    flat_decode: bool = False
    """Whether decode attention takes the KV blocks of all rows as one flat list, so that short rows need no padding."""
    needs_host_lengths: bool = False
    """Whether attention needs a host-side upper bound on the number of keys in each row.

    If so, attention functions receive `Blocks.lengths_B`, whose values do not affect which graph is selected.
    """
    exact_context_width: bool = False
    """Whether attention skips the unused part of a block table, so that one table width suits every context length."""
    prefill_rows: tuple[int, ...] = (1,)
    """Default numbers of equal-length prompt chunks that may share a step."""
    causal_first_chunks: bool = False
    """Whether attention needs no mask for the first chunk of a prompt. If so, first chunks have their own shapes."""
    smallest_prefill: int = 128
    """The smallest prefill bucket in tokens. All prefill buckets are multiples of it."""
    slice_tokens: int = 0
    """The length in tokens of the slices into which prompt chunks are divided (`vllm_gaudi_spec.slices`), or 0 to keep
    each chunk in a single row."""
    decode_step: int = 0
    """The minimum difference between decode batch sizes, or 0 to use only powers of two."""
    times_decode_sizes: bool = False
    """Whether warm-up measures the default decode batch sizes and drops those that are slower than a larger one."""
    prefill_step: int = 0
    """The minimum difference between prefill buckets, or 0 to use only powers of two. A device sets this if padding
    costs more than additional shapes."""
    prefill_parts: int = 4
    """The maximum number of equal steps between two powers of two in the prefill buckets."""
    shares_kv_caches: bool = False
    """Whether each layer's KV cache is a single tensor in vLLM's layout, which KV connectors can read and write."""
    runs_stages: bool = False
    """Whether pipeline parallelism was tested on the device."""
    selects_keys: bool = False
    """Whether sparse attention, in which an indexer selects the keys, was verified against another implementation."""
    media_models: tuple[str, ...] = ()
    """Model classes whose results on images were verified against transformers, in captured graphs if the device
    captures graphs."""
    recurrent_models: tuple[str, ...] = ()
    """Architectures with recurrent layers that were verified in the same way."""
    max_drafts: int = MAX_DRAFTS
    """The maximum number of drafts per row that the device's kernels can verify in one step."""
    takes_quant_config: bool = False
    """Whether the device can measure and quantize models through `Weights.loading` and `Weights.quantize`."""
    simulates_quantization: bool = False
    """Whether QUANT_CONFIG is simulated rather than applied by Intel Neural Compressor."""
    takes_cpu_weights: bool = False
    """Whether the device supports the option `cpu_weights`, which selects the weight format."""
    sleeps: bool = False
    """Whether `Memory.release` is implemented. If so, steps must access weights and KV only through tensors."""
    updates_weights: bool = False
    """Whether the weights of an unquantized model may be overwritten in place."""
    warmup_tokens: int = -1
    """The maximum number of tokens in the shapes that warm-up runs, or -1 for no limit."""


class Graphs:
    """Wraps functions so that they run as graphs. The default implementation runs them eagerly."""

    def graph(self, function: Function) -> Function:
        """Wrap `function` to run as one graph per combination of tensor shapes and non-tensor arguments.

        Arguments may be tensors, numbers, strings, None, and tuples of these. The function must not wait for the device
        or read a tensor's value. If the function modifies a tensor that is not an argument, it must overwrite the whole
        tensor, not write through a view, and the tensor must remain the same object with the same shape. If the device
        captures graphs, the next run of the same graph may overwrite the result.
        """
        return function

    def uncaptured(self) -> Graphs:
        """Return a `Graphs` object that runs functions eagerly, for functions that run only once."""
        graphs = Graphs()
        graphs.step_done = self.step_done  # type: ignore[method-assign]
        return graphs

    def compiling_only(self) -> AbstractContextManager[None]:
        """Return a context in which warm-up compiles graphs without running them, if the device has such a mode."""
        return nullcontext()

    def num_recipes(self) -> int:
        """Return the number of compilations so far, or 0 if the device does not count them."""
        return 0

    def warmed_up(self) -> None:
        """Mark the end of warm-up. Graphs that are compiled later are counted separately."""

    def step_done(self) -> None:
        """Signal that all work of a step has been issued. The default does nothing, because work starts immediately."""

    def compiled_after_warmup(self) -> int:
        """Return the number of graphs compiled after warm-up, or 0 if the device does not count them."""
        return 0

    def counts(self) -> dict[str, Any]:
        """Return all of the device's counters, including `compiled_after_warmup`."""
        return {}


class Memory:
    """Device memory: copies to and from the host, and the KV cache. By default, device memory is the host's memory."""

    num_host_syncs = 0
    """The number of calls to `download` and `start_download`."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the device without waiting for the copy to complete."""
        return host

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the host and wait for the copy. Every call is counted as a device-to-host sync."""
        self.num_host_syncs += 1
        return tensor

    def start_download(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start a copy to the host and return a function that waits for it.

        Every call is counted as a device-to-host sync. The next step may overwrite `tensor` before the returned
        function is called.
        """
        return partial(self.download, tensor)

    def synchronize(self) -> None:
        """Wait for all issued work. The default does nothing, because by default all work is synchronous."""

    def free_bytes(self) -> int | None:
        """Return the device's free memory in bytes, or None if the device uses the host's memory."""
        return None

    measures_peak = False
    """Whether `measure_peak` is implemented."""

    def measure_peak(self, run: Callable[[], object]) -> int:
        """Return the peak number of bytes that `run` allocates in addition to existing allocations."""
        raise NotImplementedError

    def bytes_asked(self, error: RuntimeError) -> int | None:
        """Return the size of the failed allocation, or 0 if the error message does not state the size.

        Returns None if `error` is not an out-of-memory error.
        """
        return None

    def available_memory(self, utilization: float, num_ranks: int) -> int:
        """Return the number of bytes that each of the `num_ranks` processes on this host may use for KV."""
        raise NotImplementedError

    def allocate_kv(self, kv_cache_config: KVCacheConfig, layout: KVCacheLayout) -> dict[str, Any]:
        """Allocate a zeroed KV cache for each layer, keyed by layer name."""
        raise NotImplementedError

    def release(self, tensors: Iterable[torch.Tensor], *, keep: bool) -> Callable[[], None]:
        """Free the device memory that the tensors occupy and return a function that restores it.

        The returned function restores the tensors' contents if `keep` is set; otherwise, it fills the tensors with
        zeros.
        """
        raise NotImplementedError

    def make_block_copier(self, kv_caches: dict[str, Any]) -> Callable[[list[tuple[int, int]]], None]:
        """Return a function that takes (source, target) pairs of block IDs and copies the blocks in all `kv_caches`."""
        raise NotImplementedError


class Attention:
    """Attention over the KV caches from `Memory.allocate_kv`. T: tokens, H: query heads, K: KV heads, D: head size."""

    def kv_shape(self, kv_cache: Any) -> KVShape:
        raise NotImplementedError

    def supports_attention(self, spec: AttentionLayerSpec) -> bool:
        """Whether the device's attention supports this layer. If not, the layer's attention is computed by
        `torch_ops`."""
        return True

    def reads_slices(self, spec: AttentionLayerSpec) -> bool:
        """Whether a call can split a request into several rows at roughly the cost of one row."""
        return True

    def finite(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace non-finite keys or values before `write_kv` is called. If `write_kv` itself replaces them, return the
        tensor unchanged."""
        return finite(tensor)

    def write_kv(
        self,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor | None,
        kv_cache: Any,
        slots_T: torch.Tensor,
        spec: AttentionLayerSpec,
    ) -> None:
        """Write finite keys and values to their slots.

        `value_TKD` is None if the values are part of the keys. Slots must be distinct, except for padding slots. If
        `spec.layer_operations` is set, the implementation must write through `spec.operations`.
        """
        raise NotImplementedError

    def attend(
        self, query_THD: torch.Tensor, kv_cache: Any, call: AttentionCall, spec: AttentionLayerSpec
    ) -> torch.Tensor:
        """Compute causal attention for Q queries per row, reading each KV block of the row once.

        Returns a new tensor [T, H, output size], because a captured graph on Gaudi must not write through a view or
        into a buffer passed by the caller.
        """
        raise NotImplementedError


class Weights:
    """Device-specific weight handling. By default, weights stay as loaded, and quantized formats are rejected."""

    device_name = "this device"
    """The device's name in error messages."""
    fp8_arithmetic: Callable[[float], Arithmetic] | None = None
    """Returns the e4m3 arithmetic for a given maximum value, or None if the device does not store KV in FP8."""
    fp8_logits: Callable[[float], Arithmetic] | None = None
    """Returns the arithmetic for a drafter's logits for a given maximum value, or None if FP8 matmuls are not
    faster."""
    multiplies_fp8 = False
    """Whether FP8 matmuls are faster than higher-precision ones, so that linear layers in FP8 checkpoints should stay
    in FP8."""
    converts_uint4 = False
    """Whether the device has a `from_uint4` operator, so that linear layers can keep 4-bit integers."""

    @property
    def fp8_range(self) -> str | None:
        """The card whose e4m3 range applies (gaudi2 or gaudi3), or None if the user may choose it."""
        return None

    def loading(self, quant_config: QuantConfig) -> AbstractContextManager[None]:
        """Return a context manager for loading a model that will be measured or quantized."""
        raise NotImplementedError("this device does not support it, so the configuration is rejected at start-up")

    def quantize(self, model: nn.Module, quant_config: QuantConfig, load_context: LoadContext) -> Measuring | None:
        """Measure or quantize a loaded model, and return the measurement, or None if the model was quantized.

        This method is called before `prepare_model`.
        """
        raise NotImplementedError("this device does not support it, so the configuration is rejected at start-up")

    def from_uint4(self, words: Words, dtype: torch.dtype) -> torch.Tensor:
        """Unpack the weight [K, N] from `words`."""
        raise NotImplementedError("this device does not support it, so the configuration is rejected at start-up")

    def missing_kernel(self, vllm_config: VllmConfig, model: ModelConfig) -> str | None:
        """Return the reason why the device cannot run a model's quantized weights, or None if it can.

        The reason is a relative clause that follows the name of a format, such as "for which there are no kernels".
        This method is called before anything is loaded, and it may be called in a process that must not open the
        device.
        """
        return f"for which there are no kernels yet on {self.device_name}"

    def refresh(self, model: nn.Module, *, dropped: bool = False) -> None:
        """Rebuild the data derived from weights that vLLM does not rebuild after a weight update. If `dropped` is set,
        free this data instead."""

    def prepare_model(self, model: nn.Module) -> None:
        """Move loaded weights to the device and convert them to the layout that its kernels need.

        The default does nothing, which is sufficient if weights are loaded to the device directly.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBackend:
    """The implementation of a device. The engine uses devices only through this class."""

    traits: DeviceTraits
    memory: Memory
    attention: Attention
    graphs: Graphs = field(default_factory=Graphs)
    weights: Weights = field(default_factory=Weights)
    rules: Rules = TORCH
    """The sampling and acceptance functions."""
    row_operations: RowOperations = row_operations.TORCH
    """The functions that maintain request state."""
