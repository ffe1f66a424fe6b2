"""Transfer of a step's results to the host in a single copy, and their conversion to vLLM's records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput, LogprobsLists, LogprobsTensors, ModelRunnerOutput

from vllm_gaudi_spec.graphs import report_signature, report_sizes
from vllm_gaudi_spec.outputs import CountedOutput, SpeculativeOutput
from vllm_gaudi_spec.records import (
    FAULTY,
    UNVERIFIED,
    DraftRound,
    Drafts,
    NoDraftReason,
    PromptScores,
    StepResult,
    Verification,
    WorkerCounts,
)
from vllm_gaudi_spec.sampling.branches import Branch

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.graphs import StepRecorder
    from vllm_gaudi_spec.records import SampleShape


Wait = Callable[[], "torch.Tensor"]


class Downloads:
    def __init__(self, backend: DeviceBackend, *, overlap: bool) -> None:
        self._backend = backend
        self._overlap = overlap

    def start(self, tensor: torch.Tensor) -> Wait:
        """Start a copy to the host and return a function that waits for the copy and returns it.

        The tensor may be overwritten as soon as this method returns.
        """
        if self._overlap:
            return self._backend.memory.start_download(tensor)
        host = self._backend.memory.download(tensor)
        return lambda: host


def _move_tensors(
    step: StepResult, move: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Verification | None, Drafts | None]:
    """Apply `move` to each tensor in a step's verification and drafts, in a fixed order, and return both records."""

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


def drop_scores(step: StepResult, shape: SampleShape) -> None:
    """Remove log-probabilities that no request asked for from a step, so that they are not copied to the host.

    A full sampling branch always computes log-probabilities. Without them, the report has the same shape as in other
    steps of this size, which saves a graph.
    """
    assert step.verification is not None
    step.verification = step.verification._replace(logprobs=None, scores=None)
    step.signature = report_sizes(shape, Branch())


class Reports:
    """Sends the results of a step to the host as one float32 tensor."""

    def __init__(self, backend: DeviceBackend, downloads: Downloads, recorder: StepRecorder) -> None:
        self._downloads = downloads
        self._recorder = recorder
        self._pack = backend.graphs.graph(_pack)

    def send(self, step: StepResult) -> Report:
        """Start copying a step's results. The step's tensors may be overwritten after this method has returned."""
        if step.packed is not None and not _has_scores(step.verification):
            return Report(step, self._downloads.start(step.packed))
        parts = _list_tensors(step)
        if step.verification is not None:
            self._recorder.saw(report_signature(step.signature, has_drafts=step.drafts is not None))
        return Report(step, self._downloads.start(self._pack(*parts)) if parts else None)


def _list_tensors(step: StepResult) -> list[torch.Tensor]:
    parts: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        parts.append(tensor)
        return tensor

    _move_tensors(step, collect)
    return parts


def _has_scores(verification: Verification | None) -> bool:
    return verification is not None and (verification.logprobs is not None or verification.scores is not None)


def pack_report(verification: Verification, drafts: Drafts | None) -> torch.Tensor:
    """Return the packed report of a step without log-probabilities."""
    return _pack(*_list_tensors(StepResult([], verification._replace(logprobs=None, scores=None), drafts=drafts)))


def _pack(*parts: torch.Tensor) -> torch.Tensor:
    """Return all values as float32, which represents token IDs, ranks, and counts below 2**24 exactly.

    Values are converted rather than reinterpreted, because `view(dtype)` also converts on a Gaudi in lazy mode.
    """
    return torch.cat([part.flatten().float() for part in parts])


class Report(AsyncModelRunnerOutput):
    """The results of a step while they are being copied to the host.

    The copy starts before this object is created and before the next step overwrites the results.
    """

    def __init__(self, sent: StepResult, wait: Wait | None) -> None:
        """Create the report. `wait` returns all tensors in `sent` as one host tensor. It is None if `sent` has none."""
        self._sent = sent  # the tensors are on the device; other fields may be set until `get_output` is called
        self._wait = wait
        self.step: StepResult | None = None
        """The results on the host, or None until they have been copied."""
        self.worker_counts: WorkerCounts | None = None
        """The worker's counters, which are reported with this step."""
        self.kv_connector_output: KVConnectorOutput | None = None

    def to_host(self) -> StepResult:
        if self._wait is None:
            return self._sent
        packed, begin = self._wait(), 0
        self._wait = None  # release the copy on the device

        def cut(like: torch.Tensor) -> torch.Tensor:
            nonlocal begin
            piece = packed[begin : begin + like.numel()]
            begin += like.numel()
            return piece.to(like.dtype).view(like.shape)

        verified, drafts = _move_tensors(self._sent, cut)
        return replace(self._sent, verification=verified, drafts=drafts)

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        return self.kv_connector_output

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copy and return vLLM's record. This method can be called only once."""
        step = self.step = self.to_host()
        sampled = _list_sampled_tokens(step)
        names = [request.req_id for request in (*step.requests, *step.unfinished)]
        common: dict[str, Any] = dict(
            worked=self.worker_counts,
            kv_connector_output=self.kv_connector_output,
            req_ids=names,
            req_id_to_index=dict(zip(names, range(len(names)), strict=True)),
            sampled_token_ids=[*sampled, *([] for _ in step.unfinished)],
            logprobs=_join_logprobs(step, sampled),
            prompt_logprobs_dict={
                request.req_id: LogprobsTensors.cat([_wait_for_prompt_scores(piece) for piece in pieces])
                for request, pieces in step.prompt_logprobs
            },
        )
        if step.verification is None or step.verification.num_drafts_B is None:
            return CountedOutput(**common)
        verified = dict(zip(names[: len(sampled)], step.verification.num_drafts_B.tolist(), strict=False))
        failed = {req_id: number for req_id, number in verified.items() if number < 0}
        return SpeculativeOutput(
            **common,
            num_real_drafts=verified | dict.fromkeys(failed, 0),
            started=tuple(request.req_id for request in step.started),
            why={req_id: _REASONS[number] for req_id, number in failed.items()},
            draft_rounds=[*_verified_round(verified, failed), *step.draft_rounds],
        )


def copy_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that vLLM can serialize.

    vLLM's message encoder views a tensor as bytes, which requires a last stride of 1. A contiguous tensor may have any
    stride in a dimension of size 1, so `contiguous` could return it unchanged.
    """
    return tensor.clone(memory_format=torch.contiguous_format)


_REASONS = {FAULTY: NoDraftReason.FAULT, UNVERIFIED: NoDraftReason.UNVERIFIED}


def _verified_round(verified: dict[str, int], failed: dict[str, int]) -> list[DraftRound]:
    """Return what the device has observed about the drafts that this step verified."""
    faulty = tuple(req_id for req_id, number in failed.items() if number == FAULTY)
    worked = max(verified.values(), default=0) > 0 or UNVERIFIED in failed.values()
    return [DraftRound(faulty, worked)] if faulty or worked else []


def _list_sampled_tokens(step: StepResult) -> list[list[int]]:
    if step.verification is None:
        return []
    rows, counts = step.verification.tokens_BQ.tolist(), step.verification.num_sampled_B.tolist()
    return [row[:count] for row, count in zip(rows, counts, strict=True)][: len(step.requests)]


def _join_logprobs(step: StepResult, sampled: list[list[int]]) -> LogprobsLists | None:
    """Return a single table for all tokens of the step. Entries that a request did not ask for are empty."""
    verified = step.verification
    if verified is None or not _has_scores(verified):
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


def _wait_for_prompt_scores(scores: PromptScores) -> LogprobsTensors:
    """Wait for the copy and return the scores that the request asked for."""
    packed, width, columns = scores.wait()[: scores.num_tokens], 1 + scores.num_computed, 1 + scores.num_requested
    scores_NC = copy_contiguous(packed[:, width : width + columns])
    ids_NC, ranks_N = packed[:, :columns].int(), packed[:, 2 * width].int()
    return LogprobsTensors(copy_contiguous(ids_NC), scores_NC, copy_contiguous(ranks_N))
