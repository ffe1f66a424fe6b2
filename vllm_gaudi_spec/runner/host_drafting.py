"""Drafters that look at token histories on the host, behind a step's one read."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds

from vllm_gaudi_spec.proposers.base import Context, Drafts, HostProposer

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_gaudi_spec.proposers.length_split import LengthSplit
    from vllm_gaudi_spec.runner.batch import Batch, SampleBatch
    from vllm_gaudi_spec.runner.report import Step
    from vllm_gaudi_spec.runner.requests import Request, Requests
    from vllm_gaudi_spec.runner.sampling import Sampling, SamplingInputs
    from vllm_gaudi_spec.sample.verdict import Verdict


class HostDrafting:
    """Keeps a copy of the token histories on the host, brought up to date by each step's read."""

    def __init__(self, proposer: HostProposer, split: LengthSplit, requests: Requests, num_drafts: int) -> None:
        self._proposer = proposer
        self._split = split
        self._requests = requests
        self._num_drafts = num_drafts
        self._history_np = np.zeros(tuple(requests.history_RM.shape), dtype=np.int32)
        self._lengths_np = np.zeros(len(self._history_np), dtype=np.int32)
        self._drafts: dict[str, list[int]] = {}

    def apply(self, requests: Requests) -> None:
        for request in requests.admitted:
            self._split.admit(request.row, request.params, request.num_prompt)
            self._history_np[request.row, : len(request.known)] = request.known
            self._lengths_np[request.row] = len(request.known)
        if requests.ended:
            self._proposer.forget(requests.ended)

    def most(self, requests: list[Request], num_scheduled: list[int]) -> np.ndarray:
        return np.array(num_scheduled)

    def follow(self, batch: Batch) -> None:
        """It reads what the host reads."""

    def probs(self, rows_B: torch.Tensor) -> torch.Tensor | None:
        return None

    def propose(self, batch: SampleBatch, lengths_B: torch.Tensor, inputs: SamplingInputs, most: int) -> Drafts | None:
        return None

    def propose_behind(self, step: Step, most: int) -> None:
        self._drafts = {}
        if step.verdict is None:
            return
        rows_np = np.array([request.row for request in step.requests], dtype=np.int64)
        counts_np = step.verdict.num_sampled_B.numpy()[: len(rows_np)]
        self._append(rows_np, step.verdict, counts_np)
        lengths_np = self._lengths_np[rows_np]
        wanted_np = self._split.wanted_np(rows_np, lengths_np, most)
        new = step.verdict.tokens_BQ.tolist()
        chosen = [
            index
            for index in np.flatnonzero(wanted_np).tolist()
            # What stands behind a stop is nobody's: the scheduler drops it and ends the request.
            if not _stops(step.requests[index].params, new[index][: counts_np[index]])
        ]
        if not chosen:
            return
        contexts = [
            Context(
                step.requests[index].req_id,
                self._history_np[rows_np[index], : lengths_np[index]],
                step.requests[index].num_prompt,
                int(wanted_np[index]),
            )
            for index in chosen
        ]
        answers = self._proposer.propose(contexts)
        self._drafts = {
            context.req_id: list(answer) for context, answer in zip(contexts, answers, strict=True) if len(answer)
        }
        if self._drafts:
            self._put(rows_np, lengths_np, [self._drafts.get(request.req_id, []) for request in step.requests])

    def _append(self, rows_np: np.ndarray, verdict: Verdict, counts_np: np.ndarray) -> None:
        tokens_np = verdict.tokens_BQ.numpy()[: len(rows_np)]
        place = np.arange(tokens_np.shape[1])
        new = place < counts_np[:, None]
        target = rows_np[:, None] * self._history_np.shape[1] + self._lengths_np[rows_np][:, None] + place
        self._history_np.reshape(-1)[target[new]] = tokens_np[new]
        self._lengths_np[rows_np] += counts_np

    def _put(self, rows_np: np.ndarray, lengths_np: np.ndarray, drafts: list[list[int]]) -> None:
        """Upload, in the shape of a whole bucket so that it is the same program in every step."""
        num_rows = len(self._history_np)
        all_rows_np = np.full(num_rows, self._requests.pad_row, dtype=np.int64)
        all_rows_np[: len(rows_np)] = rows_np
        small = np.zeros((num_rows, 2 + self._num_drafts), dtype=np.int32)
        small[: len(rows_np), 0] = lengths_np
        for row, answer in zip(small, drafts, strict=False):
            row[1] = len(answer)
            row[2 : 2 + len(answer)] = answer
        upload = self._requests.backend.upload
        device = upload(torch.from_numpy(small))
        self._requests.put_drafts(
            upload(torch.from_numpy(all_rows_np)), device[:, 0], Drafts(device[:, 2:], device[:, 1])
        )

    def drafts_of(self, step: Step) -> DraftTokenIds:
        names = [request.req_id for request in step.requests]
        return DraftTokenIds(names, [self._drafts.get(name, []) for name in names])

    def signatures(self, sampling: Sampling) -> Iterator[Hashable]:
        return iter(())


def _stops(params: SamplingParams, tokens: list[int]) -> bool:
    """Whether the scheduler ends a request at one of these. An end token that is to be ignored is no stop."""
    return params.eos_token_id in tokens or not set(params.stop_token_ids or ()).isdisjoint(tokens)
