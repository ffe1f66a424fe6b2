"""Logit bias, bad words and min-tokens, all represented as logit edits.

An edit adds a bias to a token after a given prefix, until the output has a given number of tokens.
`sampling.logits.apply_logit_edits` applies the edits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm_gaudi_spec.config import MAX_BAD_WORD_TOKENS, MAX_LOGIT_EDITS

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.records import Request

_ALWAYS = np.iinfo(np.int32).max
ANY_TOKEN = -1
_MULTIPLE = 8
"""Numbers of columns are rounded up to multiples of this number, except where whole tables are read."""


class EditTables(NamedTuple):
    """Logit edits of B rows on the device. Each row has N edits and P prefix tokens in total."""

    edits_B2N: torch.Tensor
    """int32: the token, and the output length at which the edit ends. The length is 0 for unused edits."""
    bias_BN: torch.Tensor
    """float32."""
    prefix_B3P: torch.Tensor
    """int32: the token, its required distance from the newest output token, and the index of its edit.

    Unused entries are ANY_TOKEN.
    """

    def select_rows(self, row_N: torch.Tensor) -> EditTables:
        return EditTables(*(table.index_select(0, row_N) for table in self))


class LogitEdits:
    """Logit edits of all requests that have a row, in device tables."""

    def __init__(self, backend: DeviceBackend, max_rows: int, tables: EditTables) -> None:
        self._has_fixed_shapes = backend.traits.captures
        """Whether whole tables are read even if a batch needs only some of the columns."""
        self._tables = tables
        self._sizes_np = np.zeros((max_rows + 1, 2), dtype=np.int32)
        """Numbers of edits and of prefix tokens in each row."""

    def admit(self, request: Request) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        """Return the request's row for each table, or None for each table if the request has no edits."""
        num_edits, num_tokens = count_edits(request.params)
        if num_edits > MAX_LOGIT_EDITS or num_tokens > MAX_BAD_WORD_TOKENS:
            raise ValueError(
                f"Request {request.req_id} has {num_edits} logit edits and {num_tokens} tokens in bad words; vLLM's "
                f"front end should have rejected more than {MAX_LOGIT_EDITS} and {MAX_BAD_WORD_TOKENS}."
            )
        self._sizes_np[request.row] = num_edits, num_tokens
        return _build_rows(request.params) if num_edits else (None, None, None)

    def get_sizes(self, rows_np: np.ndarray) -> tuple[int, int]:
        """Return the numbers of edit columns and prefix columns that a batch with these rows reads."""
        if self._has_fixed_shapes:
            return MAX_LOGIT_EDITS, MAX_BAD_WORD_TOKENS
        num_edits, num_prefix = self._sizes_np[rows_np].max(axis=0).tolist()
        return min(_round_up(num_edits), MAX_LOGIT_EDITS), min(_round_up(num_prefix), MAX_BAD_WORD_TOKENS)

    def gather(self, rows_B: torch.Tensor, sizes: tuple[int, int]) -> EditTables:
        """Gather the table rows for a batch. This method runs inside a graph."""
        num_edits, num_prefix = sizes
        return EditTables(
            self._tables.edits_B2N.narrow(2, 0, num_edits).index_select(0, rows_B),
            self._tables.bias_BN.narrow(1, 0, num_edits).index_select(0, rows_B),
            self._tables.prefix_B3P.narrow(2, 0, num_prefix).index_select(0, rows_B),
        )


def count_edits(params: SamplingParams) -> tuple[int, int]:
    """Return the number of edits in a request and the number of tokens in its bad words."""
    bad_words = params.bad_words_token_ids or ()
    num_stops = len(params.all_stop_token_ids) if params.min_tokens else 0
    return len(params.logit_bias or ()) + len(bad_words) + num_stops, sum(map(len, bad_words))


def make_empty_rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a row without edits for each table in `EditTables`."""
    edits_2N = np.zeros((2, MAX_LOGIT_EDITS), dtype=np.int32)
    bias_N = np.zeros(MAX_LOGIT_EDITS, dtype=np.float32)
    prefix_3P = np.zeros((3, MAX_BAD_WORD_TOKENS), dtype=np.int32)
    prefix_3P[0] = ANY_TOKEN
    return edits_2N, bias_N, prefix_3P


def _build_rows(params: SamplingParams) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the row of a request for each table in `EditTables`."""
    edits = [(int(token), _ALWAYS, float(bias)) for token, bias in (params.logit_bias or {}).items()]
    prefix: list[tuple[int, int, int]] = []
    for *before, token in params.bad_words_token_ids or ():
        prefix += [(other, len(before) - 1 - index, len(edits)) for index, other in enumerate(before)]
        edits.append((token, _ALWAYS, -np.inf))
    if params.min_tokens:
        # A negative limit means that the edit is skipped where a grammar allows no other token.
        num_tokens = min(params.min_tokens, _ALWAYS)  # the table is int32, and no context is longer than that
        until = num_tokens if params.structured_outputs is None else -num_tokens
        edits += [(token, until, -np.inf) for token in sorted(params.all_stop_token_ids)]
    tokens, untils, biases = zip(*edits, strict=True)
    edits_2N, bias_N, prefix_3P = make_empty_rows()
    edits_2N[:, : len(edits)] = tokens, untils
    bias_N[: len(edits)] = biases
    prefix_3P[:, : len(prefix)] = np.array(prefix, dtype=np.int32).reshape(-1, 3).T
    return edits_2N, bias_N, prefix_3P


def _round_up(size: int) -> int:
    return -(-max(size, 1) // _MULTIPLE) * _MULTIPLE
