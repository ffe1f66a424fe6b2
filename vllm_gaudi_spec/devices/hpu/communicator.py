"""Collectives between Gaudi cards. In lazy mode, every collective ends the pending graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vllm_gaudi_spec.devices.common.even_exchange import EvenExchange
from vllm_gaudi_spec.environment import gaudi_chunks
from vllm_gaudi_spec.upstream.layers import RowParallelLinear


class HpuCommunicator(EvenExchange):
    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        _end_graph()
        dist.all_reduce(input_, group=self.device_group)
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        dim %= input_.dim()
        # Concatenating ranks along the first dimension does not require a list of tensors.
        gathered = input_.new_empty((self.world_size * input_.shape[0], *input_.shape[1:]))
        _end_graph()
        dist.all_gather_into_tensor(gathered, input_.contiguous(), group=self.device_group)
        if dim == 0:
            return gathered
        by_rank = gathered.unflatten(0, (self.world_size, input_.shape[0])).movedim(0, dim)
        return by_rank.flatten(dim, dim + 1)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        _end_graph()
        return super().broadcast(tensor, src)

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        _end_graph()
        super().send(tensor, dst)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        # Use a device without an index: vLLM's device has the rank's index, but a process sees only one card.
        received = torch.empty(size, dtype=dtype, device=self.device.type)
        _end_graph()
        dist.recv(received, self.ranks[self.rank_in_group - 1 if src is None else src], self.device_group)
        return received

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        _end_graph()
        return super().reduce_scatter(input_, dim)


def _end_graph() -> None:
    importlib.import_module("habana_frameworks.torch").core.mark_step()


def split_long_prompts(model: nn.Module) -> None:
    """Let row-parallel layers process long prompts in chunks, if VLLM_ROW_PARALLEL_CHUNKS is set.

    The all-reduce of a chunk then overlaps with the next chunk's matmul. In lazy mode, waiting for a collective only
    ends the pending graph. On the card, a recipe waits only for the collectives whose results it reads (bridge 1.19,
    process_group_lazy_hccl.cpp and hccl_kernels.cpp).
    """
    num_chunks, least_tokens = gaudi_chunks()
    for module in model.modules():
        if num_chunks > 1 and isinstance(module, RowParallelLinear) and module.reduce_results and module.tp_size > 1:
            module.forward = partial(_forward_in_chunks, module.forward, num_chunks, least_tokens)


def _forward_in_chunks(forward: Callable[..., Any], num_chunks: int, least_tokens: int, input_: torch.Tensor) -> Any:
    if input_.shape[0] < least_tokens:
        return forward(input_)
    results = [forward(chunk) for chunk in input_.chunk(num_chunks)]
    if isinstance(results[0], torch.Tensor):
        return torch.cat(results)
    return torch.cat([output for output, _ in results]), results[0][1]  # with the bias that the caller adds
