"""Log-probabilities of prompt tokens: computed chunk by chunk, handed over when the prompt is done."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_gaudi_spec.records import PREFILL, PromptScores
from vllm_gaudi_spec.runner.graphs import PROMPT_LOGPROBS, Job
from vllm_gaudi_spec.sampling.logprobs import gather_logprobs

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.records import Batch, Request
    from vllm_gaudi_spec.runner.model import LoadedModel
    from vllm_gaudi_spec.runner.report import Downloads, Wait
    from vllm_gaudi_spec.sampling.params import Sampling

# Prompt positions whose logits are computed at a time: a whole chunk's would not fit beside the KV cache.
_SLICE = 64


class PromptLogprobs:
    def __init__(
        self,
        target: LoadedModel,
        chunk_TH: torch.Tensor,
        sampling: Sampling,
        backend: DeviceBackend,
        downloads: Downloads,
    ) -> None:
        """`chunk_TH`: the buffer of the hidden states of each prompt chunk."""
        self._target = target
        self._chunk_TH = chunk_TH
        self._sampling = sampling
        self._backend = backend
        self._downloads = downloads
        self._score = backend.graphs.graph(self._score_slice)

    def collect(self, batch: Batch, saw: Callable[[Hashable], None]) -> None:
        """Score the prompt tokens that this chunk predicts, for requests that ask for it."""
        if batch.shape.phase != PREFILL:
            return
        for index, request in enumerate(batch.requests):
            num_requested = request.params.prompt_logprobs
            # After a preemption the outputs are prefilled too; the user already has the prompt's scores.
            if num_requested is None or len(request.all_token_ids) > request.num_prompt:
                continue
            begin = request.num_computed
            following = request.all_token_ids[begin + 1 : min(begin + batch.counts[index], request.num_prompt - 1) + 1]
            count = self._sampling.prompt_logprob_count(num_requested)
            for first in range(0, len(following), _SLICE):
                saw(self._signature(count))
                chunk_index = index * batch.shape.queries + first
                wait, num_tokens = self._piece(chunk_index, following[first : first + _SLICE], count, request.row)
                request.prompt_logprobs.append(
                    PromptScores(
                        wait=wait,
                        num_tokens=num_tokens,
                        num_computed=count,
                        num_requested=count if num_requested < 0 else num_requested,
                    )
                )

    def _piece(self, begin: int, tokens: list[int], count: int, row: int) -> tuple[Wait, int]:
        """Scores of `tokens`, which follow the chunk's tokens from index `begin` on. The last slice is padded to the
        same shape."""
        small = np.zeros((3, _SLICE), dtype=np.int64)
        small[0] = np.minimum(begin + np.arange(_SLICE), self._chunk_TH.shape[0] - 1)
        small[1, : len(tokens)] = tokens
        small[2] = row
        packed = self._score(self._backend.memory.upload(torch.from_numpy(small)), count)
        return self._downloads.start(packed), len(tokens)

    def _score_slice(self, small_3S: torch.Tensor, count: int) -> torch.Tensor:
        """int32 [S, 2 * (1 + count) + 1]: token ids, their scores, the rank of the first."""
        index_S, tokens_S, rows_S = small_3S.unbind(0)
        adapters = self._target.adapters
        slots_S = None if adapters is None else adapters.of_rows(rows_S)
        scores = self._target.logits(self._chunk_TH.index_select(0, index_S), slots_S)
        if self._sampling.logprobs_mode.endswith("logprobs"):
            scores = scores.log_softmax(-1)
        result = gather_logprobs(scores, tokens_S.int(), count)
        ids, values, ranks = result.logprob_token_ids, result.logprobs, result.selected_token_ranks
        return torch.cat((ids.int(), values.float().view(torch.int32), ranks.int()[:, None]), dim=1)

    def jobs(self, saw: Callable[[Hashable], None]) -> Iterator[Job]:
        # A device that captures compiles these for prompts of any length, so no limit on tokens excludes them.
        num_tokens = 0 if self._backend.traits.captures else _SLICE
        for count in self._sampling.prompt_logprob_counts():
            run = partial(self._run_padding, count, saw)
            yield Job(PROMPT_LOGPROBS, run, (self._signature(count),), num_tokens)

    def _run_padding(self, count: int, saw: Callable[[Hashable], None]) -> None:
        saw(self._signature(count))
        wait, _ = self._piece(0, [0], count, 0)
        wait()

    @staticmethod
    def _signature(count: int) -> Hashable:
        return ("prompt logprobs", count)


def take(finishing: list[Request]) -> list[tuple[Request, list[PromptScores]]]:
    """Scores that are complete with this step: vLLM expects a prompt's scores in the step that ends it, not before."""
    done = []
    for request in finishing:
        if request.prompt_logprobs:
            done.append((request, list(request.prompt_logprobs)))
            request.prompt_logprobs.clear()
    return done
