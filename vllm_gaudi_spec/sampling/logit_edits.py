"""Logit bias, bad words and min-tokens as one kind of logit edit: add a bias to a token, until so many tokens are out,
after a certain prefix. See `sampling.logits.apply_logit_edits`."""

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
"""Tables that are not of full size have a multiple of so many columns."""


class EditTables(NamedTuple):
    """The edits of B rows on the device: N edits a row, and P prefix tokens for all of them."""

    edits_B2N: torch.Tensor
    """int32: the token, and the number of outputs until which the edit applies. Unused ones never apply."""
    bias_BN: torch.Tensor
    """float32."""
    prefix_B3P: torch.Tensor
    """int32: a token, how many outputs it is before the newest one, and the index of its edit. Unused ones are
    ANY_TOKEN."""

    def at(self, row_N: torch.Tensor) -> EditTables:
        return EditTables(*(table.index_select(0, row_N) for table in self))


class _RowEdits(NamedTuple):
    """One row of `EditTables`, without unused columns."""

    edits_2N: np.ndarray
    bias_N: np.ndarray
    prefix_3P: np.ndarray


class LogitEdits:
    """The edits of the requests that have a row."""

    def __init__(self, *, has_fixed_shapes: bool) -> None:
        """`has_fixed_shapes`: tables have room for the largest request, whatever those of a batch need."""
        self._has_fixed_shapes = has_fixed_shapes
        self._by_row: dict[int, _RowEdits] = {}

    def admit(self, request: Request) -> bool:
        """Keep the edits of a request's row; False when it has none."""
        self._by_row.pop(request.row, None)
        num_edits, num_tokens = count_edits(request.params)
        if num_edits > MAX_LOGIT_EDITS or num_tokens > MAX_BAD_WORD_TOKENS:
            raise ValueError(
                f"Request {request.req_id} has {num_edits} logit edits, and {num_tokens} tokens in bad words; "
                f"vLLM's front end should have refused more than {MAX_LOGIT_EDITS} and {MAX_BAD_WORD_TOKENS}."
            )
        if num_edits:
            self._by_row[request.row] = _edits_of(request.params)
        return bool(num_edits)

    def gather(self, rows_np: np.ndarray, backend: DeviceBackend) -> EditTables:
        """Build the tables of a batch's rows on the device."""
        members = {index: self._by_row[row] for index, row in enumerate(rows_np.tolist()) if row in self._by_row}
        num_edits, num_prefix = MAX_LOGIT_EDITS, MAX_BAD_WORD_TOKENS
        if not self._has_fixed_shapes:
            num_edits = _round_up(max((row.bias_N.size for row in members.values()), default=0))
            num_prefix = _round_up(max((row.prefix_3P.shape[1] for row in members.values()), default=0))
        edits = np.zeros((len(rows_np), 2, num_edits), dtype=np.int32)
        bias = np.zeros((len(rows_np), num_edits), dtype=np.float32)
        prefix = np.zeros((len(rows_np), 3, num_prefix), dtype=np.int32)
        prefix[:, 0] = ANY_TOKEN
        for index, row in members.items():
            edits[index, :, : row.bias_N.size], bias[index, : row.bias_N.size] = row.edits_2N, row.bias_N
            prefix[index, :, : row.prefix_3P.shape[1]] = row.prefix_3P
        return EditTables(*(backend.memory.upload(torch.from_numpy(table)) for table in (edits, bias, prefix)))


def count_edits(params: SamplingParams) -> tuple[int, int]:
    """Return the number of a request's edits, and of the tokens in its bad words."""
    bad_words = params.bad_words_token_ids or ()
    num_stops = len(params.all_stop_token_ids) if params.min_tokens else 0
    return len(params.logit_bias or ()) + len(bad_words) + num_stops, sum(map(len, bad_words))


def _edits_of(params: SamplingParams) -> _RowEdits:
    edits = [(int(token), _ALWAYS, float(bias)) for token, bias in (params.logit_bias or {}).items()]
    prefix: list[tuple[int, int, int]] = []
    for *before, token in params.bad_words_token_ids or ():
        prefix += [(other, len(before) - 1 - index, len(edits)) for index, other in enumerate(before)]
        edits.append((token, _ALWAYS, -np.inf))
    if params.min_tokens:
        # Negative: not where a grammar leaves nothing else.
        num_tokens = min(params.min_tokens, _ALWAYS)  # no context is that long, and the table is int32
        until = num_tokens if params.structured_outputs is None else -num_tokens
        edits += [(token, until, -np.inf) for token in sorted(params.all_stop_token_ids)]
    tokens, untils, biases = zip(*edits, strict=True)
    return _RowEdits(
        np.array((tokens, untils), dtype=np.int32),
        np.array(biases, dtype=np.float32),
        np.array(prefix, dtype=np.int32).reshape(-1, 3).T,
    )


def _round_up(size: int) -> int:
    return -(-max(size, 1) // _MULTIPLE) * _MULTIPLE
