"""Prompt log-probabilities, which are computed and copied to the host after the forward pass of each prompt chunk.

These copies are separate from the report of the step. The scores are reported in the step in which the prompt ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_gaudi_spec.graphs import PROMPT_LOGPROBS, Job
from vllm_gaudi_spec.records import PREFILL, PromptScores
from vllm_gaudi_spec.runner.extensions import Extension
from vllm_gaudi_spec.sampling.logprobs import gather_logprobs

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.graphs import StepRecorder
    from vllm_gaudi_spec.model import LoadedModel
    from vllm_gaudi_spec.records import Batch, StepResult
    from vllm_gaudi_spec.runner.report import Downloads, Wait
    from vllm_gaudi_spec.sampling.params import Sampling

_SLICE = 64
"""Number of prompt positions to score at a time. Logits for a whole chunk would take too much memory."""


class PromptLogprobs(Extension):
    """Computes scores for requests that set `prompt_logprobs`. S: positions in a slice."""

    def __init__(
        self,
        target: LoadedModel,
        chunk_TH: torch.Tensor,
        sampling: Sampling,
        backend: DeviceBackend,
        downloads: Downloads,
        recorder: StepRecorder,
    ) -> None:
        """Create the extension. `chunk_TH` contains the hidden states of the latest batch of prompt chunks."""
        self._target = target
        self._chunk_TH = chunk_TH
        self._sampling = sampling
        self._backend = backend
        self._downloads = downloads
        self._recorder = recorder
        self._score = backend.graphs.graph(self._score_slice)

    def after_forward(self, batch: Batch) -> None:
        """Score the prompt tokens that are predicted by the chunks in the batch."""
        if batch.shape.phase != PREFILL:
            return
        ends = dict(zip(batch.requests, batch.ends, strict=True))
        for index, request in enumerate(batch.requests):
            if index and batch.requests[index - 1] is request:
                continue  # this slice was scored together with the previous one
            num_requested = request.params.prompt_logprobs
            # After a preemption, output tokens are also prefilled, but the user already has the scores of the prompt.
            if num_requested is None or len(request.all_token_ids) > request.num_prompt:
                continue
            begin = batch.starts[index]
            following = request.all_token_ids[begin + 1 : min(ends[request], request.num_prompt - 1) + 1]
            count = self._sampling.prompt_logprob_count(num_requested)
            for first in range(0, len(following), _SLICE):
                tokens = following[first : first + _SLICE]
                scores = PromptScores(
                    wait=self._start_scoring(index * batch.shape.queries + first, tokens, count, request.row),
                    num_tokens=len(tokens),
                    num_computed=count,
                    num_requested=count if num_requested < 0 else num_requested,
                )
                request.prompt_logprobs.append(scores)

    def add_to_result(self, step: StepResult) -> None:
        """Add the scores of prompts that end in this step, as vLLM expects."""
        for request in step.requests:
            if request.prompt_logprobs:
                step.prompt_logprobs.append((request, list(request.prompt_logprobs)))
                request.prompt_logprobs.clear()

    def _start_scoring(self, begin: int, tokens: list[int], count: int, row: int) -> Wait:
        """Score `tokens` and start to copy the scores to the host.

        `tokens[i]` follows the token at index `begin + i` of the chunk. Short slices are padded to the same shape.
        """
        self._recorder.saw(_signature(count))
        small = np.zeros((3, _SLICE), dtype=np.int64)
        small[0] = np.minimum(begin + np.arange(_SLICE), self._chunk_TH.shape[0] - 1)
        small[1, : len(tokens)] = tokens
        small[2] = row
        return self._downloads.start(self._score(self._backend.memory.upload(torch.from_numpy(small)), count))

    def _score_slice(self, small_3S: torch.Tensor, count: int) -> torch.Tensor:
        """Return token IDs, their scores, and the rank of the first token, float32 [S, 2 * (1 + count) + 1]."""
        index_S, tokens_S, rows_S = small_3S.unbind(0)
        scores = self._target.logits(
            self._chunk_TH.index_select(0, index_S), self._target.gather_adapters(rows_S)
        ).float()
        if self._sampling.logprobs_mode.endswith("logprobs"):
            scores = scores.log_softmax(-1)
        result = gather_logprobs(scores, tokens_S.int(), count)
        ids, values, ranks = result.logprob_token_ids, result.logprobs, result.selected_token_ranks
        return torch.cat((ids.float(), values.float(), ranks.float()[:, None]), dim=1)

    def jobs(self) -> Iterator[Job]:
        # Devices that capture steps need these graphs for any prompt length, so `warmup_tokens` must not exclude them.
        num_tokens = 0 if self._backend.traits.captures else _SLICE
        for count in self._sampling.prompt_logprob_counts():
            yield Job(PROMPT_LOGPROBS, partial(self._score_padding, count), (_signature(count),), num_tokens)

    def _score_padding(self, count: int) -> None:
        # Wait for the copy, because a device may reuse its host buffer for the next copy.
        self._start_scoring(0, [0], count, 0)()


def _signature(count: int) -> Hashable:
    return ("prompt logprobs", count)
