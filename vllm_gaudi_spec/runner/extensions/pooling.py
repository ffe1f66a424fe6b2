"""Pooling models, in which vLLM's pooler computes a request's output from hidden states and no tokens are sampled.

vLLM's poolers take lists of requests and run on the host, so they are never captured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_gaudi_spec.outputs import CountedOutput
from vllm_gaudi_spec.records import DECODE
from vllm_gaudi_spec.runner.extensions import Extension
from vllm_gaudi_spec.runner.report import copy_contiguous
from vllm_gaudi_spec.upstream.sampling import LateInteractionRunner, PoolingMetadata, PoolingStates

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.pooling_params import PoolingParams

    from vllm_gaudi_spec.devices.base import Memory
    from vllm_gaudi_spec.outputs import SpecSchedulerOutput
    from vllm_gaudi_spec.records import Batch, Planned, Request, WorkerCounts
    from vllm_gaudi_spec.runner.hidden_states import HiddenStateBuffer
    from vllm_gaudi_spec.runner.requests import Requests

TASKS = ("embed", "classify", "token_embed", "token_classify")
_SECOND_TEXT = "compressed_token_type_ids"


def list_tasks(model: Any) -> tuple[str, ...]:
    return tuple(sorted(model.pooler.get_supported_tasks().intersection(TASKS)))


def get_output_format(model: Any, config: ModelConfig) -> tuple[int, torch.dtype]:
    """Return the size and dtype of a forward pass's output for each token.

    In vLLM's token classification models, the forward pass itself returns class scores.
    """
    if config.architecture.endswith("ForTokenClassification") and hasattr(model, "num_labels"):
        return model.num_labels, config.head_dtype
    return config.get_hidden_size(), config.dtype


class Pooling(Extension):
    def __init__(self, model: Any, hidden_states: HiddenStateBuffer, memory: Memory) -> None:
        self._pooler = model.pooler
        self._hidden_states = hidden_states
        self._memory = memory
        self.comparisons = LateInteractionRunner(enable_flash=False)
        """Cached token embeddings of queries. A query is kept until all of its documents have been compared with it."""
        self._states: dict[str, PoolingStates] = {}
        """Maps a request to its chunks' hidden states, which are kept until the last chunk if all are returned."""
        self._pooled: dict[str, torch.Tensor] = {}
        """Maps each request whose prompt ended in this step to its output."""

    def apply(self, scheduled: SpecSchedulerOutput, requests: Requests) -> None:
        for req_id in requests.ended:
            self._states.pop(req_id, None)
        self.comparisons.on_requests_finished(requests.ended)
        for request in requests.admitted:
            params = _get_params(request)
            self._pooler.get_pooling_updates(params.task).apply(params)
            self.comparisons.register_request(request.req_id, params)
            self._states[request.req_id] = PoolingStates()

    def add_to(self, batch: Batch) -> Batch:
        """Return the batch with token types if one of its requests has two texts.

        vLLM provides the position at which the second text begins.
        """
        firsts = [(_get_params(request).extra_kwargs or {}).get(_SECOND_TEXT) for request in batch.requests]
        if all(first is None for first in firsts):
            return batch
        types_np = np.zeros((batch.shape.rows, batch.shape.queries), dtype=np.int32)
        for row_np, request, first in zip(types_np, batch.requests, firsts, strict=False):  # other rows are padding
            if first is not None:
                row_np[max(first - request.num_computed, 0) :] = 1
        return replace(batch, token_types_T=self._memory.upload(torch.from_numpy(types_np.reshape(-1))))

    def after_forward(self, batch: Batch) -> None:
        states_TH = self._gather_states(batch)
        looks = any(_get_params(request).requires_token_ids for request in batch.requests)
        metadata = PoolingMetadata(
            prompt_lens=torch.tensor([request.num_prompt for request in batch.requests]),
            prompt_token_ids=None,
            prompt_token_ids_cpu=_pad([request.prompt for request in batch.requests]) if looks else None,
            pooling_params=[_get_params(request) for request in batch.requests],
            pooling_states=[self._states[request.req_id] for request in batch.requests],
        )
        counts_np = np.array(batch.counts)
        ends = torch.tensor([request.num_computed for request in batch.requests]) + torch.from_numpy(counts_np)
        metadata.build_pooling_cursor(counts_np, ends, states_TH.device)
        pooled = self.comparisons.postprocess_pooler_output(
            self._pooler(hidden_states=states_TH, pooling_metadata=metadata),
            metadata.pooling_params,
            [request.req_id for request in batch.requests],
            batch.finishes,
        )
        for request, finishes, output in zip(batch.requests, batch.finishes, pooled, strict=True):
            if finishes:
                self._pooled[request.req_id] = output

    def _gather_states(self, batch: Batch) -> torch.Tensor:
        """Return the hidden states of the real tokens in the batch, [T, H]."""
        if batch.shape.phase == DECODE:  # these prompts have only one token left
            return self._hidden_states.take(batch.inputs.split().rows_B, 1).hidden_NH[: len(batch.requests)]
        begins = range(0, batch.shape.tokens, batch.shape.queries)
        parts = [self._hidden_states.chunk_TH.narrow(0, *part) for part in zip(begins, batch.counts, strict=False)]
        return torch.cat(parts)

    def report(self, pending: list[Planned], worked: WorkerCounts | None) -> CountedOutput:
        pooled, self._pooled = self._pooled, {}
        names = [request.req_id for batch in pending for request in batch.requests]
        return CountedOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            pooler_output=[copy_contiguous(pooled[name]) if name in pooled else None for name in names],
            worked=worked,
        )


def _get_params(request: Request) -> PoolingParams:
    assert request.pooling is not None  # an engine supports either generation or pooling
    return request.pooling


def _pad(prompts: list[list[int]]) -> torch.Tensor:
    """Return prompts as a padded tensor, for poolers that need token IDs."""
    padded_np = np.zeros((len(prompts), max(map(len, prompts))), dtype=np.int64)
    for row_np, prompt in zip(padded_np, prompts, strict=True):
        row_np[: len(prompt)] = prompt
    return torch.from_numpy(padded_np)
