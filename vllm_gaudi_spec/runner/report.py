"""A step's results on their way to the host: everything in one copy, then vLLM's own records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, LogprobsTensors, ModelRunnerOutput

from vllm_gaudi_spec.records import FAULTY, UNVERIFIED, DraftRound, Drafts, StepResult, Verification, WorkerCounts
from vllm_gaudi_spec.scheduling import metrics
from vllm_gaudi_spec.scheduling.outputs import CountedOutput, SpeculativeOutput

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.records import PromptScores


def _moved(step: StepResult, move: Callable[[torch.Tensor], torch.Tensor]) -> StepResult:
    """The same record with every tensor replaced by what `move` makes of it, always in one order."""

    def scores(record: LogprobsTensors) -> LogprobsTensors:
        return LogprobsTensors(*(move(tensor) for tensor in record[:3]))

    done, drafts, num_drafts_B = step.verification, step.drafts, step.num_drafts_B
    return replace(
        step,
        verification=done and Verification(move(done.tokens_BQ), move(done.num_sampled_B)),
        logprobs=step.logprobs and scores(step.logprobs),
        scores=step.scores and scores(step.scores),
        num_drafts_B=None if num_drafts_B is None else move(num_drafts_B),
        drafts=drafts and Drafts(move(drafts.tokens_BK), move(drafts.num_drafts_B)),
    )


class Reports:
    """Makes a step's results travel as one int32 tensor."""

    def __init__(self, backend: DeviceBackend, downloads: Downloads) -> None:
        self._downloads = downloads
        self._pack = backend.graph(_pack)

    def send(self, step: StepResult) -> Report:
        parts: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            parts.append(tensor)
            return tensor

        _moved(step, collect)
        return Report(step, self._downloads.start(self._pack(*parts)) if parts else None)


def _pack(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.contiguous().view(torch.int32).flatten() for part in parts])


class _Copy:
    """All results in one tensor on its way to the host, to be cut up again there."""

    def __init__(self, step: StepResult, wait: Wait | None) -> None:
        self._step = step
        self._wait = wait

    def to_host(self) -> StepResult:
        """Waits for the device."""
        if self._wait is None:
            return self._step
        words, begin = self._wait(), 0
        self._wait = None  # it holds the device's copy

        def cut(like: torch.Tensor) -> torch.Tensor:
            nonlocal begin
            piece = words[begin : begin + like.numel()]
            begin += like.numel()
            return piece.view(like.dtype).view(like.shape)

        return _moved(self._step, cut)


class Report(AsyncModelRunnerOutput):
    """A step's results, on their way when it is made, before the next step changes them; `get_output` waits."""

    def __init__(self, step: StepResult, wait: Wait | None) -> None:
        self._copy = _Copy(step, wait)
        self.step: StepResult | None = None
        """The step on the host; known once `get_output` was called."""
        self.worked: WorkerCounts | None = None
        """What the worker says of itself with this step."""

    def get_output(self) -> ModelRunnerOutput:
        """Called once."""
        step = self.step = self._copy.to_host()
        answers = _answers(step)
        names = [request.req_id for request in (*step.requests, *step.unfinished)]
        common: dict[str, Any] = dict(
            worked=self.worked,
            req_ids=names,
            req_id_to_index=dict(zip(names, range(len(names)), strict=True)),
            sampled_token_ids=[*answers, *([] for _ in step.unfinished)],
            logprobs=_join(step, answers),
            prompt_logprobs_dict={
                request.req_id: LogprobsTensors.cat([_prompt_tensors(piece) for piece in pieces])
                for request, pieces in step.prompt_logprobs
            },
        )
        if step.num_drafts_B is None:
            return CountedOutput(**common)
        told = dict(zip(names[: len(answers)], step.num_drafts_B.tolist(), strict=False))
        return SpeculativeOutput(
            **common,
            num_real_drafts={req_id: max(number, 0) for req_id, number in told.items()},
            started=tuple(request.req_id for request in step.started),
            why={req_id: _REASONS[number] for req_id, number in told.items() if number < 0},
            draft_rounds=[*_verified_round(told), *step.draft_rounds],
        )


_REASONS = {FAULTY: metrics.FAULT, UNVERIFIED: metrics.UNVERIFIED}


def _verified_round(told: dict[str, int]) -> list[DraftRound]:
    """What the device has seen of the round whose drafts this step verified."""
    faulty = tuple(req_id for req_id, number in told.items() if number == FAULTY)
    worked = any(number > 0 or number == UNVERIFIED for number in told.values())
    return [DraftRound(faulty, worked)] if faulty or worked else []


def _answers(step: StepResult) -> list[list[int]]:
    """Each sampling request's new tokens."""
    if step.verification is None:
        return []
    rows, counts = step.verification.tokens_BQ.tolist(), step.verification.num_sampled_B.tolist()
    return [row[:count] for row, count in zip(rows, counts, strict=True)][: len(step.requests)]


def _prompt_tensors(scores: PromptScores) -> LogprobsTensors:
    """What vLLM wants of them; waits for the copy."""
    words, width, kept = scores.wait()[: scores.num_tokens], 1 + scores.num_computed, 1 + scores.num_requested
    scores_NC = words[:, width : 2 * width].contiguous().view(torch.float32)
    return LogprobsTensors(words[:, :kept], scores_NC[:, :kept], words[:, 2 * width])


def _join(step: StepResult, answers: list[list[int]]) -> LogprobsLists | None:
    """One table over all tokens of the step; requests that asked for less leave columns or rows empty."""
    if step.logprobs is None and step.scores is None:
        return None
    assert step.verification is not None
    num_queries = step.verification.tokens_BQ.shape[1]
    parts: list[LogprobsLists | None] = []
    for index, (request, new) in enumerate(zip(step.requests, answers, strict=True)):
        source = step.scores if request.params.logprob_token_ids else step.logprobs
        wanted = source is not None and request.params.num_logprobs is not None
        rows = slice(index * num_queries, index * num_queries + len(new))
        parts.append(LogprobsLists(*(tensor[rows].numpy() for tensor in source[:3])) if source and wanted else None)
    width = max((part.logprobs.shape[1] for part in parts if part is not None), default=0)
    if not width:
        return None
    offsets = np.cumsum([0, *map(len, answers), *(0 for _ in step.unfinished)])
    ids = np.zeros((offsets[-1], width), dtype=np.int32)
    scores = np.full((offsets[-1], width), -np.inf, dtype=np.float32)
    ranks = np.zeros(offsets[-1], dtype=np.int32)
    for part, begin, end in zip(parts, offsets, offsets[1:], strict=False):
        if part is not None:
            columns = part.logprobs.shape[1]
            ids[begin:end, :columns], scores[begin:end, :columns] = part.logprob_token_ids, part.logprobs
            ranks[begin:end] = part.sampled_token_ranks
    return LogprobsLists(ids, scores, ranks, offsets.tolist())


Wait = Callable[[], "torch.Tensor"]


class Downloads:
    def __init__(self, backend: DeviceBackend, *, overlap: bool) -> None:
        self._backend = backend
        self._overlap = overlap

    def start(self, tensor: torch.Tensor) -> Wait:
        """What waits for the copy. The tensor may be overwritten as soon as this has returned."""
        if self._overlap:
            return self._backend.start_download(tensor)
        host = self._backend.download(tensor)
        return lambda: host
