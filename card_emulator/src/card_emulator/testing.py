"""Helpers that create tensors and graphs on the emulated Gaudi in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def hpu(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to("hpu")


def ids(*values: int) -> torch.Tensor:
    return hpu(*values, dtype=torch.int64)


class Graph(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = run


def graph(run: Callable[..., Any], disable_tensor_cache: bool = True, **kwargs: Any) -> Any:
    import habana_frameworks.torch as htorch

    return htorch.hpu.wrap_in_hpu_graph(Graph(run), disable_tensor_cache=disable_tensor_cache, **kwargs)
