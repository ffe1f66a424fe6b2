"""Grammar masks for a step, and the number of draft tokens that each grammar allows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm_gaudi_spec.records import SampleBatch
    from vllm_gaudi_spec.upstream.scheduler import GrammarOutput, SchedulerOutput


class Grammar(NamedTuple):
    """The grammar masks of a request for one step."""

    mask_NW: np.ndarray
    """int32 bitmask for the first N positions. Later drafts are not constrained and must not be accepted."""
    num_acceptable: int
    """Number of drafts that the grammar allows."""


def read_grammars(output: GrammarOutput, scheduled: SchedulerOutput) -> dict[str, Grammar]:
    """Return the grammars for a step, keyed by request ID.

    vLLM concatenates the masks of all grammars. Each request has one mask per scheduled draft token, plus one.
    """
    grammars, begin = {}, 0
    for index, req_id in enumerate(output.structured_output_request_ids):
        num_drafts = len(scheduled.scheduled_spec_decode_tokens.get(req_id, ()))
        end = begin + 1 + num_drafts
        acceptable = num_drafts if output.num_acceptable_drafts is None else output.num_acceptable_drafts[index]
        grammars[req_id] = Grammar(output.grammar_bitmask[begin:end], acceptable)
        begin = end
    return grammars


class GrammarInputs(NamedTuple):
    masks_BQW: torch.Tensor
    """int32 bitmasks. The shape is [N, 1, W] if the sampling pass lists positions."""
    bounds_2B: torch.Tensor
    """int32: in the first row, the number of drafts that each grammar allows; in the second, 1 for rows without a
    grammar and 0 for others."""


def pack_grammars(batch: SampleBatch, grammars: dict[str, Grammar], mask_words: int) -> list[np.ndarray]:
    """Return the host arrays for the `GrammarInputs` of a sampling pass."""
    return [_make_masks(batch, grammars, mask_words), _get_bounds(batch, grammars)]


def _make_masks(batch: SampleBatch, grammars: dict[str, Grammar], mask_words: int) -> np.ndarray:
    """Return masks, int32 [B, Q, W], or [N, 1, W] if the batch lists positions.

    A grammar provides masks for the first few positions in its row. All other masks allow every token.
    """
    if batch.index_np is None:
        row_BQ, query_BQ = np.indices((len(batch.rows_np), batch.shape.queries))
    else:
        row_BQ, query_BQ = batch.index_np[..., None]
    mask = np.full((*row_BQ.shape, mask_words), -1, dtype=np.int32)
    for index, request in enumerate(batch.requests):
        if (grammar := grammars.get(request.req_id)) is not None:
            # vLLM may pad a new request with draft placeholders, so there may be more masks than positions.
            where = np.nonzero((row_BQ == index) & (query_BQ < len(grammar.mask_NW)))
            mask[where] = grammar.mask_NW[query_BQ[where], :mask_words]
    return mask


def _get_bounds(batch: SampleBatch, grammars: dict[str, Grammar]) -> np.ndarray:
    """Return the number of drafts that each row's grammar allows, and which rows have no grammar, as int32 [2, B]."""
    bounds = np.full((2, len(batch.rows_np)), batch.shape.queries - 1, dtype=np.int32)
    bounds[1] = 1
    for index, request in enumerate(batch.requests):
        if (grammar := grammars.get(request.req_id)) is not None:
            bounds[:, index] = grammar.num_acceptable, 0
    return bounds
