"""Linear layers of vLLM with a method that keeps a checkpoint's numbers."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase

from tests.models.formats import GROUP
from vllm_gaudi_spec.upstream import tensor_parallel_group

LAYER = "model.layers.0.mlp.up_proj"


def matrix(rows: int, seed: int = 0, columns: int = 2 * GROUP) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def layer(kind: type[LinearBase], method: Any, *sizes: int, rank: int = 0, world: int = 1, **options: Any) -> Any:
    """Return the part of a layer that a rank has."""
    config = SimpleNamespace(get_quant_method=lambda *_: method, online_quantization_config=None)
    group = SimpleNamespace(rank_in_group=rank, world_size=world)
    with set_current_vllm_config(VllmConfig()), tensor_parallel_group(group):
        return kind(*sizes, quant_config=config, prefix=LAYER, return_bias=False, **options)


def load(made: Any, found: dict[str, torch.Tensor], *shard: str) -> None:
    for name, tensor in found.items():
        parameter = getattr(made, name)
        parameter.weight_loader(parameter, tensor, *shard)
