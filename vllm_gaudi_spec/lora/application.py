"""Adds the contributions of adapters to layer outputs, in a single computation for all slots.

T: tokens. S: slots of rank R. C = S * R columns. A layer multiplies its input by the first matrices of all slots in one
matmul. In the result, each token keeps only the columns of its own slot, and all other columns become zero. The result
is then multiplied by the second matrices of all slots. For a token without an adapter, all columns are zero, so its
output does not change.

vLLM writes a slot's matrices on the host. Whole tensors are then copied in place to the device, where captured graphs
read them, so nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.upstream.distributed import get_tp_group
from vllm_gaudi_spec.upstream.lora import (
    BaseLayerWithLoRA,
    BaseLinearLayerWithLoRA,
    LogitsProcessorWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)

if TYPE_CHECKING:
    from vllm.config import LoRAConfig

    from vllm_gaudi_spec.upstream.distributed import GroupCoordinator

NO_SLOT = -1
"""The slot for tokens without an adapter. This value is only compared and never used as an index."""

Upload = Callable[[torch.Tensor], torch.Tensor]


class TokenSlots:
    """The adapter slot of each token during a forward pass.

    vLLM creates one instance for all layers of a model as the platform's "punica wrapper".
    """

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device, lora_config: LoRAConfig
    ) -> None:
        slots_S = torch.arange(lora_config.max_loras, dtype=torch.int32)
        self._slot_of_column_C = slots_S.repeat_interleave(lora_config.max_lora_rank).to(device)
        self._slots_T: torch.Tensor | None = None
        self._mask_TC: torch.Tensor | None = None

    @contextmanager
    def applied(self, slots_T: torch.Tensor) -> Iterator[None]:
        """Set int32 slots for the tokens or hidden states that layers process in this context."""
        self._slots_T, self._mask_TC = slots_T, self._slot_of_column_C == slots_T[:, None]
        try:
            yield
        finally:
            self._slots_T = self._mask_TC = None

    @property
    def are_set(self) -> bool:
        """Whether slots are set. They are not set while a drafter calls a layer that it shares with the target."""
        return self._mask_TC is not None

    def mask_columns(self, columns_TNC: torch.Tensor) -> torch.Tensor:
        """Set the columns of other slots to zero, even if these columns are not finite."""
        assert self._mask_TC is not None
        return torch.where(self._mask_TC[:, None], columns_TNC, 0)

    def first_rows(self, rows_per_slot: int) -> torch.Tensor:
        """Return the first row of each token's slot in a table with `rows_per_slot` rows per slot, [T], or [1] without
        slots."""
        if self._slots_T is None:
            return torch.zeros_like(self._slot_of_column_C[:1])
        return self._slots_T.clamp(min=0) * rows_per_slot


class _Adapters:
    """The adapter tensors of a layer, which vLLM writes on the host and the device reads."""

    def __init__(self, slots: TokenSlots, hosts: list[torch.Tensor], upload: Upload) -> None:
        self._slots, self._hosts = slots, hosts
        self._first, *self._second = map(upload, hosts)

    def send(self) -> None:
        """Copy the tensors to the device in place."""
        for host, table in zip(self._hosts, (self._first, *self._second), strict=True):
            if table is not host:
                table.copy_(host)


class LinearAdapters(_Adapters):
    """Adapters for vLLM's wrapper around a linear layer or the output matrix. A layer may be a fusion of N slices."""

    def __init__(self, module: Any, slots: TokenSlots, upload: Upload, group: GroupCoordinator | None = None) -> None:
        """Replace the wrapper's tensors. `group` contains the ranks of the output matrix if there are several."""
        self._group = group
        one = isinstance(module.lora_a_stacked, torch.Tensor)
        first, second = module.lora_a_stacked, module.lora_b_stacked
        if one:
            first, second = (first,), (second,)
        num_slots, _, rank, num_inputs = first[0].shape
        host_NSRI = torch.zeros(len(first), num_slots, rank, num_inputs, dtype=first[0].dtype)
        hosts_OSR = [torch.zeros(part.shape[2], num_slots, rank, dtype=part.dtype) for part in second]
        # vLLM writes into tensors of shapes [S, 1, R, I] and [S, 1, O, R].
        first = tuple(part.unsqueeze(1) for part in host_NSRI)
        second = tuple(part.permute(1, 0, 2).unsqueeze(1) for part in hosts_OSR)
        module.lora_a_stacked, module.lora_b_stacked = (first[0], second[0]) if one else (first, second)
        hosts = [host_NSRI.view(-1, num_inputs), *(part.view(-1, num_slots * rank) for part in hosts_OSR)]
        super().__init__(slots, hosts, upload)

    def add_lora_linear(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        return y + self._added(x) if self._slots.are_set else y

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        # `y` may be wider than the vocabulary and may have a different dtype.
        if not self._slots.are_set:
            return y
        added = self._added(x).to(y.dtype)
        return y.narrow(1, 0, added.shape[1]) + added

    def _added(self, x_TI: torch.Tensor) -> torch.Tensor:
        columns_TC = functional.linear(x_TI, self._first)
        if self._group is not None:
            # Logits must be bitwise equal on all ranks, unlike hidden states, so all ranks add the columns of one rank.
            communicator = self._group.device_communicator
            assert communicator is not None
            columns_TC = communicator.broadcast(columns_TC.contiguous())
        columns_TNC = columns_TC.unflatten(1, (len(self._second), -1))
        parts = zip(self._slots.mask_columns(columns_TNC).unbind(1), self._second, strict=True)
        return torch.cat([functional.linear(columns_TC, table) for columns_TC, table in parts], dim=1)


class EmbeddingAdapters(_Adapters):
    """Adapters for vLLM's wrapper around an embedding table, in which a lookup replaces the first matmul."""

    def __init__(self, module: Any, slots: TokenSlots, upload: Upload) -> None:
        num_slots, num_tokens, rank = module.lora_a_stacked.shape
        self._num_slots, self._num_tokens = num_slots, num_tokens
        host_SVR = torch.zeros(num_slots, num_tokens, rank, dtype=module.lora_a_stacked.dtype)
        host_ESR = torch.zeros(module.lora_b_stacked.shape[2], num_slots, rank, dtype=host_SVR.dtype)
        module.lora_a_stacked, module.lora_b_stacked = host_SVR, host_ESR.permute(1, 0, 2).unsqueeze(1)
        super().__init__(slots, [host_SVR.view(-1, rank), host_ESR.view(-1, num_slots * rank)], upload)
        module.lora_a_stacked_2d = self._first

    @property
    def _embeddings_indices(self) -> torch.Tensor:
        return self._slots.first_rows(self._num_tokens)

    def add_lora_embedding(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        if not self._slots.are_set:
            return y
        columns_TNC = x.repeat(1, self._num_slots)[:, None]
        return y + functional.linear(self._slots.mask_columns(columns_TNC)[:, 0], self._second[0])


def make_adapters(module: BaseLayerWithLoRA, slots: TokenSlots, upload: Upload) -> LinearAdapters | EmbeddingAdapters:
    """Create adapter tensors for one of vLLM's wrappers, which then writes to these tensors on the host."""
    if isinstance(module, VocabParallelEmbeddingWithLoRA):
        return EmbeddingAdapters(module, slots, upload)
    if isinstance(module, LogitsProcessorWithLoRA):
        group = get_tp_group()
        return LinearAdapters(module, slots, upload, group if group.world_size > 1 else None)
    if isinstance(module, BaseLinearLayerWithLoRA):
        return LinearAdapters(module, slots, upload)
    raise UnsupportedConfigError(
        f"LoRA adapters of a {type(module).__name__} are not supported; leave out --enable-lora."
    )
