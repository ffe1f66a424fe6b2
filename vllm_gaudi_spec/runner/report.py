"""Transfer of a step's results to the host: all in one copy, then as vLLM's records.

Log-probabilities of prompt tokens have copies of their own: each chunk's are computed and sent with the chunk, and
reported in the step that ends the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, LogprobsTensors, ModelRunnerOutput

from vllm_gaudi_spec.outputs import CountedOutput, SpeculativeOutput
from vllm_gaudi_spec.records import (
    FAULTY,
    PREFILL,
    UNVERIFIED,
    DraftRound,
    Drafts,
    NoDraftReason,
    PromptScores,
    StepResult,
    Verification,
    WorkerCounts,
)
from vllm_gaudi_spec.runner.graphs import PROMPT_LOGPROBS, Job, sizes_of_report
from vllm_gaudi_spec.sampling.logprobs import gather_logprobs
from vllm_gaudi_spec.sampling.params import Branch

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.records import Batch, Request, SampleShape
    from vllm_gaudi_spec.runner.model import LoadedModel
    from vllm_gaudi_spec.sampling.params import Sampling


Wait = Callable[[], "torch.Tensor"]


class Downloads:
    def __init__(self, backend: DeviceBackend, *, overlap: bool) -> None:
        self._backend = backend
        self._overlap = overlap

    def start(self, tensor: torch.Tensor) -> Wait:
        """Start a copy to the host. The result waits for it; the tensor may be overwritten once this has returned."""
        if self._overlap:
            return self._backend.memory.start_download(tensor)
        host = self._backend.memory.download(tensor)
        return lambda: host


def _moved(step: StepResult, move: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Verification | None, Drafts | None]:
    """The parts of a step that are on the device, with `move` applied to every tensor, always in the same order."""

    def scores(record: LogprobsTensors | None) -> LogprobsTensors | None:
        return record and LogprobsTensors(*(move(tensor) for tensor in record[:3]))

    verified, drafts = step.verification, step.drafts
    if verified is not None:
        verified = Verification(
            move(verified.tokens_BQ),
            move(verified.num_sampled_B),
            logprobs=scores(verified.logprobs),
            scores=scores(verified.scores),
            num_drafts_B=None if verified.num_drafts_B is None else move(verified.num_drafts_B),
        )
    return verified, drafts and Drafts(move(drafts.tokens_BK), move(drafts.num_drafts_B))


def leave_out_scores(step: StepResult, shape: SampleShape) -> None:
    """For a step in which a full branch computed log-probabilities that nobody asked for: they stay on the device. Its
    report is that of a step of the same size that computed none, so it is no graph more."""
    assert step.verification is not None
    step.verification = step.verification._replace(logprobs=None, scores=None)
    step.signature = sizes_of_report(shape, Branch())


class Reports:
    """Sends a step's results as one int32 tensor."""

    def __init__(self, backend: DeviceBackend, downloads: Downloads) -> None:
        self._downloads = downloads
        self._pack = backend.graphs.graph(_pack)

    def send(self, step: StepResult) -> Report:
        parts: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            parts.append(tensor)
            return tensor

        _moved(step, collect)
        return Report(step, self._downloads.start(self._pack(*parts)) if parts else None)


def _pack(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.contiguous().view(torch.int32).flatten() for part in parts])


class Report(AsyncModelRunnerOutput):
    """A step's results; the copy is started before this is made and before the next step changes them. `get_output`
    waits for it."""

    def __init__(self, sent: StepResult, wait: Wait | None) -> None:
        """`wait`: returns all tensors of `sent` in one, on the host; None if there are none."""
        self._sent = sent  # on the device; the host may add to it until `get_output` is called
        self._wait = wait
        self.step: StepResult | None = None
        """The step on the host; None until `get_output` was called."""
        self.worker_counts: WorkerCounts | None = None
        """The worker's counters, reported with this step."""

    def to_host(self) -> StepResult:
        """Wait for the device."""
        if self._wait is None:
            return self._sent
        packed, begin = self._wait(), 0
        self._wait = None  # it holds the device's copy

        def cut(like: torch.Tensor) -> torch.Tensor:
            nonlocal begin
            piece = packed[begin : begin + like.numel()]
            begin += like.numel()
            return piece.view(like.dtype).view(like.shape)

        verified, drafts = _moved(self._sent, cut)
        return replace(self._sent, verification=verified, drafts=drafts)

    def get_output(self) -> ModelRunnerOutput:
        """Called once."""
        step = self.step = self.to_host()
        sampled = _sampled_tokens(step)
        names = [request.req_id for request in (*step.requests, *step.unfinished)]
        common: dict[str, Any] = dict(
            worked=self.worker_counts,
            req_ids=names,
            req_id_to_index=dict(zip(names, range(len(names)), strict=True)),
            sampled_token_ids=[*sampled, *([] for _ in step.unfinished)],
            logprobs=_join(step, sampled),
            prompt_logprobs_dict={
                request.req_id: LogprobsTensors.cat([_prompt_tensors(piece) for piece in pieces])
                for request, pieces in step.prompt_logprobs
            },
        )
        if step.verification is None or step.verification.num_drafts_B is None:
            return CountedOutput(**common)
        verified = dict(zip(names[: len(sampled)], step.verification.num_drafts_B.tolist(), strict=False))
        return SpeculativeOutput(
            **common,
            num_real_drafts={req_id: max(number, 0) for req_id, number in verified.items()},
            started=tuple(request.req_id for request in step.started),
            why={req_id: _REASONS[number] for req_id, number in verified.items() if number < 0},
            draft_rounds=[*_verified_round(verified), *step.draft_rounds],
        )


def copy_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that vLLM can serialize.

    Its encoder views a tensor as bytes. That requires a last stride of 1 even where a dimension has a single element:
    such a tensor counts as contiguous whatever its strides, so `contiguous` would return it as it is.
    """
    return tensor.clone(memory_format=torch.contiguous_format)


_REASONS = {FAULTY: NoDraftReason.FAULT, UNVERIFIED: NoDraftReason.UNVERIFIED}


def _verified_round(verified: dict[str, int]) -> list[DraftRound]:
    """The device's observations of the round whose drafts this step verified."""
    faulty = tuple(req_id for req_id, number in verified.items() if number == FAULTY)
    worked = any(number > 0 or number == UNVERIFIED for number in verified.values())
    return [DraftRound(faulty, worked)] if faulty or worked else []


def _sampled_tokens(step: StepResult) -> list[list[int]]:
    """Each sampling request's new tokens."""
    if step.verification is None:
        return []
    rows, counts = step.verification.tokens_BQ.tolist(), step.verification.num_sampled_B.tolist()
    return [row[:count] for row, count in zip(rows, counts, strict=True)][: len(step.requests)]


def _join(step: StepResult, sampled: list[list[int]]) -> LogprobsLists | None:
    """One table over all tokens of the step; requests that ask for fewer leave columns or rows empty."""
    verified = step.verification
    if verified is None or (verified.logprobs is None and verified.scores is None):
        return None
    num_queries = verified.tokens_BQ.shape[1]
    parts: list[LogprobsLists | None] = []
    for index, (request, new) in enumerate(zip(step.requests, sampled, strict=True)):
        source = verified.scores if request.params.logprob_token_ids else verified.logprobs
        is_requested = source is not None and request.params.num_logprobs is not None
        rows = slice(index * num_queries, index * num_queries + len(new))
        parts.append(
            LogprobsLists(*(tensor[rows].numpy() for tensor in source[:3])) if source and is_requested else None
        )
    width = max((part.logprobs.shape[1] for part in parts if part is not None), default=0)
    if not width:
        return None
    offsets = np.cumsum([0, *map(len, sampled), *(0 for _ in step.unfinished)])
    ids = np.zeros((offsets[-1], width), dtype=np.int32)
    scores = np.full((offsets[-1], width), -np.inf, dtype=np.float32)
    ranks = np.zeros(offsets[-1], dtype=np.int32)
    for part, begin, end in zip(parts, offsets, offsets[1:], strict=False):
        if part is not None:
            columns = part.logprobs.shape[1]
            ids[begin:end, :columns], scores[begin:end, :columns] = part.logprob_token_ids, part.logprobs
            ranks[begin:end] = part.sampled_token_ranks
    return LogprobsLists(ids, scores, ranks, offsets.tolist())


# --- log-probabilities of prompt tokens ---

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

    @staticmethod
    def take(finishing: list[Request]) -> list[tuple[Request, list[PromptScores]]]:
        """Scores that are complete with this step: vLLM expects those of a prompt in the step that ends it."""
        done = []
        for request in finishing:
            if request.prompt_logprobs:
                done.append((request, list(request.prompt_logprobs)))
                request.prompt_logprobs.clear()
        return done

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
        scores = self._target.logits(self._chunk_TH.index_select(0, index_S), self._target.adapters_of(rows_S)).float()
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


def _prompt_tensors(scores: PromptScores) -> LogprobsTensors:
    """The part that the request asked for; waits for the copy."""
    packed, width, columns = scores.wait()[: scores.num_tokens], 1 + scores.num_computed, 1 + scores.num_requested
    scores_NC = copy_contiguous(packed[:, width : width + columns]).view(torch.float32)
    return LogprobsTensors(copy_contiguous(packed[:, :columns]), scores_NC, copy_contiguous(packed[:, 2 * width]))
