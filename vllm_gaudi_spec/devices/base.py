"""The contract between the engine and a device: a record of traits and four objects with defaults.

A device overrides what it does otherwise than the defaults. Nothing above `devices/` asks which device it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_gaudi_spec.attention import row_operations
from vllm_gaudi_spec.attention.operations import PLAIN, finite
from vllm_gaudi_spec.config import MAX_DRAFTS
from vllm_gaudi_spec.sampling.rules.registry import TORCH

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import ModelConfig, VllmConfig

    from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec, KVShape
    from vllm_gaudi_spec.attention.operations import Operations
    from vllm_gaudi_spec.attention.row_operations import RowOperations
    from vllm_gaudi_spec.quantization.config import QuantConfig
    from vllm_gaudi_spec.quantization.encodings import Words
    from vllm_gaudi_spec.quantization.fp8 import Arithmetic
    from vllm_gaudi_spec.quantization.load_context import LoadContext, Measuring
    from vllm_gaudi_spec.records import WarmUpWork
    from vllm_gaudi_spec.sampling.rules.registry import Rules
    from vllm_gaudi_spec.upstream.kv_cache import KVCacheConfig, KVCacheLayout


Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTraits:
    """Facts about a device that decide how the engine uses it."""

    name: str
    """The value of VGS_DEVICE."""
    mode: str
    """How steps are run: eager, lazy, captured."""
    torch_device: torch.device
    captures: bool = False
    """True when each shape of a step, and each branch of it, is a graph of its own that warm-up has to make: then
    branches are few, and a number that changes from step to step is a tensor. False where shapes may follow values,
    which are read without a wait: then models compute no padding."""
    updates_views: bool = True
    """False when no graph takes a layer that changes a tensor through a view, as some of vLLM's models do
    (lesson L06)."""
    compiles: bool = False
    """True when each of those graphs is compiled, which takes seconds to minutes: then sampling passes share few."""
    block_size: int = 128
    """Tokens in a KV block unless the user chose otherwise."""
    flat_decode: bool = False
    """True when decodes read the blocks of all rows as one list, and so do not pay for the longest row."""
    needs_host_lengths: bool = False
    """True when attention needs an upper bound of each row's keys on the host: then functions that attend get
    `Blocks.lengths_B`, whose values make no new graph."""
    exact_context_width: bool = False
    """True when attention reads only the blocks a row has, so that one table width serves every context."""
    prefill_rows: tuple[int, ...] = (1,)
    """How many prompt chunks of one length may share a step, unless the user chose otherwise."""
    smallest_prefill: int = 128
    """The smallest prefill bucket, of which the others are multiples."""
    prefill_growth: float = 2.0
    """Ratio of neighboring prefill buckets: small where padding costs more than another shape."""
    max_drafts: int = MAX_DRAFTS
    """The largest number of drafts of a row that its kernels verify in one step."""
    takes_quant_config: bool = False
    """True when it measures and quantizes models: `Weights.loading` and `Weights.quantize`."""
    simulates_quantization: bool = False
    """True when QUANT_CONFIG is simulated here, and not done by Intel Neural Compressor."""
    takes_cpu_weights: bool = False
    """True when the option `cpu_weights` chooses the format of weights."""
    offers_batch_invariance: bool = False
    """True when it can compute a row bit for bit alike in every batch: `Weights.make_batch_invariant` and
    `Attention.is_batch_invariant`."""
    warmup_tokens: int = -1
    """Shapes of up to this many tokens are worth running during warm-up; -1 means all."""


class Graphs:
    """How functions are run. The defaults run them as they are."""

    def graph(self, function: Function) -> Function:
        """`function`, run as one graph for each set of shapes and of arguments that are not tensors.

        Arguments are tensors, numbers, texts, None, and tuples of those. The function waits for nothing and reads no
        value; what it changes besides, it changes as a whole tensor and not through a view. What it reads
        besides stays the same tensor, which may get other values but no other shape. Where a device captures,
        the result may be overwritten when the same graph runs again.
        """
        return function

    def compiling_only(self) -> AbstractContextManager[None]:
        """For warm-up: graphs are made in here and compute nothing, where the device knows such a mode."""
        return nullcontext()

    def describe_warm_up(self, work: WarmUpWork) -> str:
        """What is to be compiled and how long it may take, as a text; empty where that is unknown."""
        return ""

    def num_recipes(self) -> int:
        """What was compiled so far, as the device itself counts it; 0 where it does not count."""
        return 0

    def warming_up_later(self) -> AbstractContextManager[None]:
        """As `compiling_only`, for warm-up between two steps: what is compiled in here is none of serving's."""
        return nullcontext()

    def warmed_up(self) -> None:
        """From here on nothing should be compiled. A no-op where nothing is."""

    def step_done(self) -> None:
        """All work of a step was issued. A no-op where work starts as it is issued."""

    def compiled_after_warmup(self) -> int:
        """Graphs, as the device itself counts them; 0 where it does not count."""
        return 0

    def counts(self) -> dict[str, Any]:
        """What the device itself counts, `compiled_after_warmup` above all; empty where it does not count."""
        return {}


def size_text(num_bytes: int) -> str:
    """For messages."""
    gib, mib = num_bytes / 2**30, num_bytes / 2**20
    return f"{gib:.2f} GiB" if abs(gib) >= 1 else f"{mib:.1f} MiB"


class Memory:
    """Copies to and from the device, and its KV cache. Copies are the host's own by default."""

    num_host_syncs = 0
    """How often `download` and `start_download` were called."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Copy to the device without waiting for it."""
        return host

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to the host and wait. Every call counts as one device-to-host sync."""
        self.num_host_syncs += 1
        return tensor

    def start_download(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin a copy to the host, counted as well; the answer waits for it. The tensor may be overwritten by the next
        step before that."""
        return partial(self.download, tensor)

    def synchronize(self) -> None:
        """Wait for all issued work. A no-op where work is done when the call returns."""

    def free_bytes(self) -> int | None:
        """What is free on the card, by its own count; None where the memory is the host's, which others use too."""
        return None

    measures_peak = False
    """Whether `peak_of` measures."""

    def peak_of(self, run: Callable[[], object]) -> int:
        """The most bytes that `run` needs at once, beside what is there before it."""
        raise NotImplementedError

    def bytes_asked(self, error: RuntimeError) -> int | None:
        """How much was asked for by an operation that failed for want of memory, 0 where the error has no number; None
        for one that failed for another reason."""
        return None

    def available_memory(self, utilization: float, num_ranks: int) -> int:
        """Bytes that may be used for KV by this one of the host's `num_ranks` processes."""
        raise NotImplementedError

    def allocate_kv(self, kv_cache_config: KVCacheConfig, layout: KVCacheLayout) -> dict[str, Any]:
        """The KV cache of each layer, by layer name; zero."""
        raise NotImplementedError

    def block_copier(self, kv_caches: dict[str, Any]) -> Callable[[list[tuple[int, int]]], None]:
        """A function that copies KV blocks (from, to) in all layers of what `allocate_kv` made."""
        raise NotImplementedError


class Attention:
    """Attention over the KV caches that `Memory.allocate_kv` made. T tokens, H query heads, K KV heads, D head size."""

    def kv_shape(self, kv_cache: Any) -> KVShape:
        """The shape of one layer's KV cache."""
        raise NotImplementedError

    def supports_attention(self, spec: AttentionLayerSpec) -> bool:
        """Whether the device's own kernel takes this layer; else `torch_ops` serves it."""
        return True

    def is_batch_invariant(self, spec: AttentionLayerSpec) -> bool:
        """Whether the kernel adds up a query's keys in an order that depends on nothing but their positions, where
        `spec.batch_invariant` asks for it."""
        return False

    def finite(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keys or values as `write_kv` takes them, maybe the tensor itself: `attention.operations.finite`, unless the
        kernel that writes does that."""
        return finite(tensor)

    def write_kv(
        self,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor | None,
        kv_cache: Any,
        slots_T: torch.Tensor,
        spec: AttentionLayerSpec,
        operations: Operations = PLAIN,
    ) -> None:
        """Store keys and values, made finite before, at their slots; values are None where they are a part of the keys.
        Duplicated slots may only be pad slots. `operations`: the layer's, to be called where `spec.layer_operations` is
        set."""
        raise NotImplementedError

    def attend(
        self,
        query_THD: torch.Tensor,
        kv_cache: Any,
        call: AttentionCall,
        spec: AttentionLayerSpec,
        operations: Operations = PLAIN,
    ) -> torch.Tensor:
        """[T, H, output size]: causal attention of Q queries a row over the row's blocks; each block is read once. A
        tensor of its own: a captured graph on a Gaudi must not write through a view, nor into a given buffer."""
        raise NotImplementedError


class Weights:
    """What a device does with a model's weights. By default layers keep them as they were loaded, and no format of
    weights has a kernel."""

    device_name = "this device"
    """For messages."""
    fp8_arithmetic: Callable[[float], Arithmetic] | None = None
    """Makes the arithmetic of e4m3 numbers up to a largest one; None: KV is not kept in FP8."""
    multiplies_fp8 = False
    """Whether it multiplies them faster than floats, so that linear layers of FP8 checkpoints keep them."""
    converts_uint4 = False
    """Whether it has an operator for `from_uint4`, so that linear layers can keep 4-bit integers."""

    @property
    def fp8_range(self) -> str | None:
        """Whose e4m3 numbers it computes with, gaudi2's or gaudi3's; None where that is the user's choice."""
        return None

    def loading(self, quant_config: QuantConfig) -> AbstractContextManager[None]:
        """Around the loading of a model that is going to be measured or quantized."""
        raise NotImplementedError("refused at start-up")

    def quantize(self, model: nn.Module, quant_config: QuantConfig, load_context: LoadContext) -> Measuring | None:
        """Measure or quantize a loaded model, before `prepare_model`. The answer has what was measured."""
        raise NotImplementedError("refused at start-up")

    def from_uint4(self, words: Words, dtype: torch.dtype) -> torch.Tensor:
        """The weight [K, N] that words stand for."""
        raise NotImplementedError("refused at start-up")

    def missing_kernel(self, vllm_config: VllmConfig, model: ModelConfig) -> str | None:
        """Why the device does not compute with a model whose weights have a format of their own; None where it does.
        Asked before anything is loaded, and in processes that must not open the card."""
        return f"for which there are no kernels yet on {self.device_name}"

    def prepare_model(self, model: nn.Module) -> None:
        """Bring weights to the device and lay them out as it needs them, after loading. A no-op where they are."""

    def make_batch_invariant(self, model: nn.Module) -> None:
        """Make each row of the linear layers' results independent of the other rows, after `prepare_model`."""
        raise NotImplementedError("refused at start-up")

    def unpacked_weights(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """By name, the weights that only a kernel has in a form of its own, as they were loaded."""
        return iter(())

    def weights_changed(self, model: nn.Module) -> None:
        """Make again what was made of weights, after others were copied into their storages. A no-op where nothing
        was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceBackend:
    traits: DeviceTraits
    memory: Memory
    attention: Attention
    graphs: Graphs = field(default_factory=Graphs)
    weights: Weights = field(default_factory=Weights)
    rules: Rules = TORCH
    """The functions of sampling and acceptance."""
    row_operations: RowOperations = row_operations.TORCH
    """The functions that keep the state of requests."""
