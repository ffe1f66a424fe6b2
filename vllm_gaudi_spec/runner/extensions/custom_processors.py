"""User-defined logits processors (`--logits-processors`, entry points), run on the host and indexed by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.runner.extensions import Extension
from vllm_gaudi_spec.upstream.sampling import BUILTIN_LOGITS_PROCESSORS, BatchUpdate, build_logitsprocs

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.outputs import SpecSchedulerOutput
    from vllm_gaudi_spec.records import Request
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.upstream.sampling import LogitsProcessor


class CustomProcessors(Extension):
    @classmethod
    def load(cls, vllm_config: VllmConfig, device: torch.device, max_rows: int) -> CustomProcessors | None:
        """Return the user's processors, or None if there are none.

        The functions of vLLM's built-in processors are implemented in `sampling/`.
        """
        if vllm_config.speculative_config is not None:
            return None  # processors together with speculation are rejected at start-up
        model_config = vllm_config.model_config
        is_pooling = model_config.runner_type == "pooling"
        built = build_logitsprocs(vllm_config, device, False, is_pooling, model_config.logits_processors or ())
        processors = [processor for processor in built.all if type(processor) not in BUILTIN_LOGITS_PROCESSORS]
        return cls(processors, max_rows) if processors else None

    def __init__(self, processors: list[LogitsProcessor], max_rows: int) -> None:
        self._processors = processors
        self._max_rows = max_rows

    def apply(self, scheduled: SpecSchedulerOutput, requests: Requests) -> None:
        """Inform processors of added and removed requests. They keep references to requests' output lists."""
        update, freed_rows, admitted = None, requests.freed_rows, requests.admitted
        if freed_rows or admitted:
            added = [(request.row, request.params, request.prompt, request.outputs) for request in admitted]
            taken = {request.row for request in admitted}
            removed = [row for row in freed_rows if row not in taken]
            update = BatchUpdate(batch_size=self._max_rows, removed=removed, added=added, moved=())
        for processor in self._processors:
            processor.update_state(update)

    def after_read(self, requests: list[Request], sampled: list[list[int]]) -> None:
        for request, new in zip(requests, sampled, strict=False):
            request.outputs.extend(new)

    def change_logits(self, logits_BQV: torch.Tensor, rows_B: torch.Tensor, *, argmax_invariant: bool) -> None:
        """Scatter logits to the rows of their requests, apply the processors, and gather the results."""
        chosen = [p for p in self._processors if p.is_argmax_invariant() == argmax_invariant]
        if not chosen:
            return
        spread = logits_BQV.new_zeros(self._max_rows + 1, logits_BQV.shape[-1])
        spread.index_copy_(0, rows_B, logits_BQV[:, 0])
        logits = spread[: self._max_rows]
        for processor in chosen:
            logits = processor.apply(logits)
        spread[: self._max_rows] = logits
        logits_BQV[:, 0] = spread.index_select(0, rows_B)
