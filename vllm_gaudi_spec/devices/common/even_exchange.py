"""Token exchange between data-parallel ranks, using collectives that every device supports.

vLLM's expert layers require this exchange. It assumes that all ranks have the same number of tokens, which
`runner/extensions/data_parallel.py` ensures.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_gaudi_spec.upstream.distributed import DeviceCommunicatorBase, make_all_to_all


class EvenExchange(DeviceCommunicatorBase):
    all2all_manager: Any

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        if self.use_all2all and self.all2all_manager is None:
            self.all2all_manager = make_all_to_all(self.cpu_group)

    def all_gatherv(
        self, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> torch.Tensor | list[torch.Tensor]:
        assert sizes is None or len(set(sizes)) == 1
        if isinstance(input_, list):
            return [self.all_gather(tensor, dim) for tensor in input_]
        return self.all_gather(input_, dim)

    def reduce_scatterv(self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
        assert sizes is None or len(set(sizes)) == 1
        return self.reduce_scatter(input_, dim)

    # vLLM's base class does not implement token exchange.

    def dispatch_router_logits(self, *tensors: Any, **named: Any) -> Any:
        return self.all2all_manager.dispatch_router_logits(*tensors, **named)

    def dispatch(self, *tensors: Any, **named: Any) -> Any:
        return self.all2all_manager.dispatch(*tensors, **named)

    def combine(self, *tensors: Any, **named: Any) -> Any:
        return self.all2all_manager.combine(*tensors, **named)
