"""What the runner needs from a device. One implementation a file; nobody above asks which one it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import nn
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheLayout

    from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec, KVShape
    from vllm_gaudi_spec.attention.operations import Operations
    from vllm_gaudi_spec.quantization.config import QuantConfig
    from vllm_gaudi_spec.quantization.place import Measuring, Place
    from vllm_gaudi_spec.sampling.rules.registry import Rules


Function = TypeVar("Function", bound=Callable[..., Any])


class DeviceBackend(Protocol):
    """Shapes: B rows, Q queries a row, H query heads, K key/value heads, D head size."""

    name: str
    """What VGS_DEVICE calls it."""
    mode: str
    """How steps are run on it: eager, lazy, captured."""
    torch_device: torch.device
    captures: bool
    """True when each shape of a step, and each branch of it, is a program of its own that warm-up has to make: then
    branches are few, and a number that changes from step to step is a tensor. False where shapes may follow values,
    which are read without a wait: then models compute no padding."""
    block_size: int
    """Tokens in a KV block unless the user chose otherwise."""
    flat_decode: bool
    """True when decodes read the blocks of all rows as one list, and so do not pay for the longest row."""
    needs_host_lengths: bool
    """True when attention is told on the host how many keys each row may have at most: then programs that attend get
    `Blocks.lengths_B`, which is no part of what programs are told apart by."""
    exact_context_width: bool
    """True when attention reads only the blocks a row has, so that one table width serves every context."""
    prefill_rows: tuple[int, ...]
    """How many prompt chunks of one length may share a step, unless the user chose otherwise."""
    smallest_prefill: int
    """The smallest prefill bucket, of which the others are multiples."""
    prefill_growth: float
    """Ratio of neighbouring prefill buckets: small where padding costs more than another shape."""
    num_host_reads: int
    """How often `download` and `start_download` were called."""
    max_drafts: int
    """The most drafts of a row that its kernels verify in one step."""
    takes_quant_config: bool
    """True when it measures and quantises models: `loading` and `quantize`."""
    rules: Rules
    """Sampling and acceptance, as it runs them."""
    warmup_tokens: int
    """Shapes of up to this many tokens are worth running during warm-up; -1 means all."""

    def graph(self, function: Function) -> Function:
        """`function`, run as one program for each set of shapes and of arguments that are not tensors.

        Arguments are tensors, numbers, texts, None, and tuples of those. The function waits for nothing and reads no
        value; what it changes besides, it changes as a whole tensor and not through a view. Where `captures`, what it
        returns is overwritten when the same program runs again.
        """
        ...

    def compiling_only(self) -> AbstractContextManager[None]:
        """For warm-up: programs are made in here and compute nothing, where the device knows such a mode."""
        ...

    @property
    def fp8_range(self) -> str | None:
        """Whose e4m3 numbers it computes with, gaudi2's or gaudi3's; None where that is the user's choice."""
        ...

    def loading(self, given: QuantConfig) -> AbstractContextManager[None]:
        """Around the loading of a model that is going to be measured or quantised."""
        ...

    def quantize(self, model: nn.Module, given: QuantConfig, place: Place) -> Measuring | None:
        """Measure or quantise a loaded model, before `prepare_model`. The answer has what was measured."""
        ...

    def missing_kernel(self, vllm_config: VllmConfig, model: ModelConfig) -> str | None:
        """Why it does not compute with a model whose weights have a format of their own; None where it does. Asked
        before anything is loaded, and in processes that must not open the card."""
        ...

    def prepare_model(self, model: nn.Module) -> None:
        """Bring weights to the device and lay them out as it likes them, after loading."""
        ...

    def unpacked_weights(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """By name, the weights that only a kernel has in a form of its own, as they were loaded."""
        ...

    def weights_changed(self, model: nn.Module) -> None:
        """Make anew what was made of weights, after others were copied into their storages."""
        ...

    def allocate_kv(self, kv_cache_config: KVCacheConfig, layout: KVCacheLayout) -> dict[str, Any]:
        """What each layer keeps its KV in, by layer name; zero."""
        ...

    def block_copier(self, kv_caches: dict[str, Any]) -> Callable[[list[tuple[int, int]]], None]:
        """What copies KV blocks (from, to) in all layers of what `allocate_kv` made."""
        ...

    def kv_shape(self, kv_cache: Any) -> KVShape:
        """What a layer's part of what `allocate_kv` made holds."""
        ...

    def supports_attention(self, spec: AttentionLayerSpec) -> bool:
        """Whether the device's own kernel takes this layer; else `torch_ops` serves it."""
        ...

    def write_kv(
        self,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor | None,
        kv_cache: Any,
        slots_T: torch.Tensor,
        spec: AttentionLayerSpec,
        operations: Operations = ...,
    ) -> None:
        """Store keys and values at their slots; values are None where they are a part of the keys. Duplicated slots may
        only be pad slots. `operations`: the layer's, to be called where `spec` says that they are its own."""
        ...

    def attend(
        self,
        query_THD: torch.Tensor,
        kv_cache: Any,
        call: AttentionCall,
        spec: AttentionLayerSpec,
        out_THD: torch.Tensor,
        operations: Operations = ...,
    ) -> None:
        """Causal attention of Q queries a row over the row's blocks; each block is read once."""
        ...

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Copy to the device without waiting for it."""
        ...

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to the host and wait. Every call is counted as a host read."""
        ...

    def start_download(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin a copy to the host, counted as well; the answer waits for it. The tensor may be overwritten by the next
        step before that."""
        ...

    def available_memory(self, utilization: float, num_ranks: int) -> int:
        """Bytes that may be used for KV by this one of the host's `num_ranks` processes."""
        ...

    def synchronize(self) -> None: ...

    def describe_warm_up(self, num_programs: int) -> str:
        """How long it may take to make so many programs, as a text; empty where that says nothing."""
        ...

    def warmed_up(self) -> None:
        """From here on nothing should be compiled."""
        ...

    def step_done(self) -> None:
        """All work of a step was given to the device."""
        ...

    def compiled_after_warmup(self) -> int:
        """Programs, as the device itself counts them; 0 where it does not count."""
        ...

    def counts(self) -> dict[str, Any]:
        """What the device itself counts, `compiled_after_warmup` above all; nothing where it does not count."""
        ...
