"""The request history on the host, brought up to date by each step's read: for drafters that wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_gaudi_spec.records import Drafts

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_gaudi_spec.records import Request, StepResult
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.scheduling.limits import LengthSplit


@dataclass(frozen=True, slots=True)
class DraftingRow:
    """A row that may draft after a step."""

    request: Request
    index: int
    """In the step's batch."""
    max_drafts: int
    """At least 1."""


class RequestHistory:
    def __init__(self, split: LengthSplit, requests: Requests, num_drafts: int) -> None:
        self._split = split
        self._requests = requests
        self._num_drafts = num_drafts
        self._history_np = np.zeros(tuple(requests.history_RM.shape), dtype=np.int32)
        self._lengths_np = np.zeros(len(self._history_np), dtype=np.int32)
        self._write = requests.backend.graphs.graph(self._put)

    def apply(self) -> None:
        self._split.pace(self._requests.paced_rows())

    def exclude(self, row: int) -> None:
        self._split.exclude(row)

    def admit(self, request: Request) -> None:
        self._split.admit(request.row, request.params, request.num_prompt)
        self._history_np[request.row, : len(request.all_token_ids)] = request.all_token_ids
        self._lengths_np[request.row] = len(request.all_token_ids)

    def tokens_np(self, row: int, begin: int = 0) -> np.ndarray:
        """int32: a view that is valid until the next step."""
        return self._history_np[row, begin : self._lengths_np[row]]

    def append(self, step: StepResult) -> list[list[int]]:
        """Returns the tokens that each row of the step sampled."""
        verification = step.verification
        if verification is None:
            return []
        rows_np = _rows_of(step)
        counts_np = verification.num_sampled_B.numpy()[: len(rows_np)]
        tokens_np = verification.tokens_BQ.numpy()[: len(rows_np)]
        offsets_Q = np.arange(tokens_np.shape[1])
        new_BQ = offsets_Q < counts_np[:, None]
        index_BQ = rows_np[:, None] * self._history_np.shape[1] + self._lengths_np[rows_np][:, None] + offsets_Q
        self._history_np.reshape(-1)[index_BQ[new_BQ]] = tokens_np[new_BQ]
        self._lengths_np[rows_np] += counts_np
        return [row[:count].tolist() for row, count in zip(tokens_np, counts_np, strict=True)]

    def drafting_rows(self, step: StepResult, new: list[list[int]], limit: int) -> list[DraftingRow]:
        """Rows that can use drafts, each `limit` at most. Rows that stopped cannot: the scheduler drops the tokens
        after a stop and ends the request."""
        rows_np = _rows_of(step)
        max_drafts_np = self._split.max_drafts_np(rows_np, self._lengths_np[rows_np], self._split.paced(rows_np, limit))
        return [
            DraftingRow(step.requests[index], index, int(max_drafts_np[index]))
            for index in np.flatnonzero(max_drafts_np).tolist()
            if not _stops(step.requests[index].params, new[index])
        ]

    def put(self, step: StepResult, drafts: dict[str, list[int]]) -> None:
        """Upload, in the shape of all rows, so that every step runs the same graph."""
        all_rows_np, small = self._nothing()
        rows_np = _rows_of(step)
        all_rows_np[: len(rows_np)] = rows_np
        small[: len(rows_np), 0] = self._lengths_np[rows_np]
        for row, request in zip(small, step.requests, strict=False):
            tokens = drafts.get(request.req_id, ())
            row[1] = len(tokens)
            row[2 : 2 + len(tokens)] = tokens
        self._upload(all_rows_np, small)

    def warm_up(self) -> None:
        self._upload(*self._nothing())

    def _nothing(self) -> tuple[np.ndarray, np.ndarray]:
        """The pad row in each slot, and no drafts."""
        num_rows = len(self._history_np)
        rows_np = np.full(num_rows, self._requests.pad_row, dtype=np.int64)
        return rows_np, np.zeros((num_rows, 2 + self._num_drafts), dtype=np.int32)

    def _upload(self, rows_np: np.ndarray, small_np: np.ndarray) -> None:
        upload = self._requests.backend.memory.upload
        self._write(upload(torch.from_numpy(rows_np)), upload(torch.from_numpy(small_np)))

    def _put(self, rows_R: torch.Tensor, small_RN: torch.Tensor) -> None:
        """Of each row: the number of its tokens, that of its drafts, and these."""
        self._requests.put_drafts(rows_R, small_RN[:, 0], Drafts(small_RN[:, 2:], small_RN[:, 1]))


def _rows_of(step: StepResult) -> np.ndarray:
    return np.array([request.row for request in step.requests], dtype=np.int64)


def _stops(params: SamplingParams, tokens: list[int]) -> bool:
    """Whether the scheduler ends a request at one of these. An end token that is to be ignored is no stop."""
    return params.eos_token_id in tokens or not set(params.stop_token_ids or ()).isdisjoint(tokens)
