"""What the runner needs from a device. One implementation a file; nobody above asks which one it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vllm_gaudi_spec.attention.metadata import AttentionCall, AttentionLayerSpec


class DeviceBackend(Protocol):
    """Shapes: B rows, Q queries a row, H query heads, K key/value heads, D head size."""

    name: str
    """What VGS_DEVICE calls it."""
    mode: str
    """How steps are run on it: eager, lazy, captured."""
    torch_device: torch.device
    block_size: int
    """Tokens in a KV block unless the user chose otherwise."""
    exact_context_width: bool
    """True when attention reads only the blocks a row has, so that one table width serves every context."""
    prefill_rows: tuple[int, ...]
    """How many prompt chunks of one length may share a step, unless the user chose otherwise."""
    prefill_growth: float
    """Ratio of neighbouring prefill buckets: small where padding costs more than another shape."""
    num_host_reads: int
    """How often `download` was called."""
    max_drafts: int
    """The most drafts of a row that its kernels verify in one step."""
    warmup_tokens: int
    """Shapes of up to this many tokens are worth running during warm-up; -1 means all."""

    def prepare_model(self, model: nn.Module) -> None:
        """Lay out weights as this device likes them, after loading."""
        ...

    def supports_attention(self, spec: AttentionLayerSpec) -> bool:
        """Whether the device's own kernel takes this layer; else `torch_ops` serves it."""
        ...

    def write_kv(
        self,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        slots_T: torch.Tensor,
        spec: AttentionLayerSpec,
    ) -> None:
        """Store keys and values at their slots. Duplicated slots may only be pad slots."""
        ...

    def attend(
        self,
        query_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        call: AttentionCall,
        spec: AttentionLayerSpec,
        out_THD: torch.Tensor,
    ) -> None:
        """Causal attention of Q queries a row over the row's blocks; each block is read once."""
        ...

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        """Copy to the device without waiting for it."""
        ...

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to the host and wait. Every call is counted as a host read."""
        ...

    def available_memory(self, utilization: float) -> int:
        """Bytes that may be used for KV."""
        ...

    def synchronize(self) -> None: ...
