"""Token histories on the host, for drafters that run after the results of each step have been copied there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_gaudi_spec.records import Request, StepResult
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.scheduling.limits import RowLimits


@dataclass(frozen=True, slots=True)
class DraftingRow:
    """A batch row that may have drafts after a step."""

    request: Request
    index: int
    """Index of the row in the step's batch."""
    max_drafts: int
    """Maximum number of drafts, at least 1."""


class RequestHistory:
    def __init__(self, row_limits: RowLimits, requests: Requests, num_drafts: int) -> None:
        self._row_limits = row_limits
        self._requests = requests
        self._history_np = np.zeros(tuple(requests.history_RM.shape), dtype=np.int32)
        self._lengths_np = np.zeros(len(self._history_np), dtype=np.int32)
        self._drafts_np = np.zeros((len(self._history_np), 1 + num_drafts), dtype=np.int32)
        """Number of draft tokens in each row that await verification, followed by these tokens."""

    def exclude(self, row: int) -> None:
        self._row_limits.exclude(row)

    def admit(self, request: Request) -> None:
        self._row_limits.admit(request.row, request.params, request.num_prompt)
        self._history_np[request.row, : len(request.all_token_ids)] = request.all_token_ids
        self._lengths_np[request.row] = len(request.all_token_ids)
        self._drafts_np[request.row] = 0

    def get_tokens(self, row: int, begin: int = 0) -> np.ndarray:
        """Return a row's tokens as an int32 view that is valid until the next step."""
        return self._history_np[row, begin : self._lengths_np[row]]

    def append(self, step: StepResult) -> list[list[int]]:
        """Append the tokens sampled in a step and return the new tokens of each row in the step."""
        verification = step.verification
        if verification is None:
            return []
        rows_np = _get_rows(step)
        counts_np = verification.num_sampled_B.numpy()[: len(rows_np)]
        tokens_np = verification.tokens_BQ.numpy()[: len(rows_np)]
        offsets_Q = np.arange(tokens_np.shape[1])
        new_BQ = offsets_Q < counts_np[:, None]
        index_BQ = rows_np[:, None] * self._history_np.shape[1] + self._lengths_np[rows_np][:, None] + offsets_Q
        self._history_np.reshape(-1)[index_BQ[new_BQ]] = tokens_np[new_BQ]
        self._lengths_np[rows_np] += counts_np
        self._drafts_np[rows_np] = 0
        return [row[:count].tolist() for row, count in zip(tokens_np, counts_np, strict=True)]

    def select_drafting_rows(self, step: StepResult, new: list[list[int]], limit: int) -> list[DraftingRow]:
        """Return the rows that can use drafts, each with at most `limit` drafts.

        Rows with a stop token are excluded, because the scheduler discards later tokens and ends the request.
        """
        rows_np = _get_rows(step)
        max_drafts_np = self._row_limits.compute_max_drafts(rows_np, self._lengths_np[rows_np], limit)
        return [
            DraftingRow(step.requests[index], index, int(max_drafts_np[index]))
            for index in np.flatnonzero(max_drafts_np).tolist()
            if not _stops(step.requests[index].params, new[index])
        ]

    def keep_drafts(self, step: StepResult, drafts: dict[str, list[int]]) -> None:
        """Keep draft tokens until they are copied to the device for verification."""
        for request in step.requests:
            if tokens := drafts.get(request.req_id):
                self._drafts_np[request.row, : 1 + len(tokens)] = len(tokens), *tokens

    def get_drafts(self, requests: list[Request]) -> np.ndarray:
        """Return the number of draft tokens for each request, followed by the tokens, as int32 [requests, 1 + K]."""
        found: np.ndarray = self._drafts_np[[request.row for request in requests]]
        return found


def _get_rows(step: StepResult) -> np.ndarray:
    return np.array([request.row for request in step.requests], dtype=np.int64)


def _stops(params: SamplingParams, tokens: list[int]) -> bool:
    """Return whether one of these tokens makes the scheduler end the request. Ignored end tokens do not count."""
    return params.eos_token_id in tokens or not set(params.stop_token_ids or ()).isdisjoint(tokens)
