"""Planning of the batches in a step: which requests decode, which requests prefill, and in which padded batches."""

from __future__ import annotations

from itertools import groupby, islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_gaudi_spec.attention.metadata import Inputs, build_rectangle
from vllm_gaudi_spec.records import DECODE, Planned, SampleBatch
from vllm_gaudi_spec.runner.hidden_states import Located
from vllm_gaudi_spec.runner.shapes import fit
from vllm_gaudi_spec.slices import cut_chunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_gaudi_spec.records import Request, SampleShape
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.runner.shapes import Shapes
    from vllm_gaudi_spec.step_inputs import RowInputs
    from vllm_gaudi_spec.upstream.scheduler import SchedulerOutput


def locate(phase: str, rows: RowInputs, requests: Requests) -> Located:
    """Return where the tokens of each row begin and how many of them are real.

    Prompt chunks start at the host's number of computed tokens. Decodes start at the device's number and verify the
    drafts that the device has, up to the number that the host has scheduled.
    """
    starts_B, num_real_B = rows.starts_B, rows.counts_B
    if phase == DECODE:
        starts_B = requests.computed_R.index_select(0, rows.rows_B)
        num_drafts_B = requests.num_drafts_R.index_select(0, rows.rows_B).clamp(min=0)
        num_real_B = torch.minimum(num_real_B, 1 + num_drafts_B)
    return Located(starts_B, num_real_B)


def build_inputs(queries: int, rows: RowInputs, located: Located, requests: Requests) -> Inputs:
    """Gather the tokens of a padded batch on the device."""
    offsets_Q = torch.arange(queries, dtype=torch.int32, device=located.starts_B.device)
    tokens_BQ = requests.tokens_at(rows.rows_B, located.starts_B[:, None] + offsets_Q)
    row_operations = requests.backend.row_operations
    return build_rectangle(tokens_BQ, located.starts_B, located.num_real_B, rows.blocks, row_operations)


def make_sample_batch(
    requests: Requests, shape: SampleShape, members: list[Request], num_positions: Sequence[int] = ()
) -> SampleBatch:
    """Create the batch for the sampling pass.

    If the shape lists positions, `num_positions` contains the number of positions of each request in `members`.
    """
    rows_np = requests.pad_rows(members, shape.rows)
    if not shape.positions:
        return SampleBatch(requests=members, shape=shape, rows_np=rows_np)
    counts_np = np.zeros(shape.rows, dtype=np.int32)
    counts_np[: len(members)] = num_positions
    everywhere_np = np.indices((shape.rows, shape.queries))
    is_listed_np = everywhere_np[1] < counts_np[:, None]
    index_np = np.zeros((2, shape.positions), dtype=np.int32)
    index_np[:, : counts_np.sum()] = everywhere_np[:, is_listed_np]
    slots_np = np.where(is_listed_np, is_listed_np.cumsum().reshape(is_listed_np.shape) - 1, 0)
    return SampleBatch(
        requests=members, shape=shape, rows_np=rows_np, index_np=index_np, slots_np=slots_np.astype(np.int32)
    )


def list_finishing(planned: Planned) -> list[tuple[Request, int, int]]:
    """Return the requests that sample, each with its maximum length including this step's drafts and the maximum number
    of positions at which it may sample."""
    is_decode = planned.shape.phase == DECODE
    members = zip(planned.requests, planned.starts, planned.counts, planned.finishes, strict=True)
    return [
        (request, start + count, count if is_decode else 1) for request, start, count, finishes in members if finishes
    ]


def list_continuing(planned: Planned) -> list[Request]:
    """Return the requests whose prompts continue in a later step."""
    if planned.shape.phase == DECODE:
        return []
    last_rows = dict(zip(planned.requests, planned.finishes, strict=True))
    return [request for request, finishes in last_rows.items() if not finishes]


def plan_batches(
    scheduled: SchedulerOutput,
    requests: Requests,
    shapes: Shapes,
    num_drafts: dict[str, int],
    lookahead: int = 0,
) -> list[Planned]:
    """Plan running decodes as one padded batch, followed by all other requests in the scheduler's order.

    The order matters, because a request admitted with a prefix cache hit may read blocks that are written in the same
    step, either by a decode that fills the block or by a prompt chunk admitted earlier. A prompt with one token left
    also runs as a decode but keeps its position among the chunks.

    `num_drafts` maps each request to the maximum number of drafts that this step may verify, by default 0. The blocks
    of a decode have room for `lookahead` tokens after the first one, so that a drafter can use the same blocks.
    """
    running: list[Request] = []
    others: list[tuple[Request, int]] = []
    for req_id, num_tokens in scheduled.num_scheduled_tokens.items():
        request = requests.by_id[req_id]
        if request.num_computed >= len(request.all_token_ids):
            running.append(request)
        else:
            # A newly admitted request may have draft placeholders, which are padding.
            others.append((request, min(num_tokens, len(request.all_token_ids) - request.num_computed)))
    batches = [_decode_batch(running, requests, shapes, num_drafts, lookahead)] if running else []
    for is_last_token, group in groupby(others, key=lambda chunk: _is_last_token(chunk[0])):
        chunks = list(group)
        if is_last_token:
            batches.append(_decode_batch([request for request, _ in chunks], requests, shapes, {}, lookahead))
        else:
            remaining = iter(chunks)
            for num_rows in shapes.split_chunks([count for _, count in chunks]):
                batches.append(_prefill_batch(list(islice(remaining, num_rows)), shapes))
    return batches


def _is_last_token(request: Request) -> bool:
    num_tokens = len(request.all_token_ids)
    return request.num_computed == num_tokens - 1 and request.media_end != num_tokens


def _prefill_batch(group: list[tuple[Request, int]], shapes: Shapes) -> Planned:
    size = shapes.slice_tokens or shapes.longest_chunk
    slices = [piece for request, count in group for piece in cut_chunk(request, count, size)]
    ends = [piece.start + piece.num_tokens for piece in slices]
    if shapes.slice_tokens:
        shape = shapes.prefill_slices(len(slices), max(ends))
    else:
        longest, start = (max(getattr(piece, name) for piece in slices) for name in ("num_tokens", "start"))
        shape = shapes.prefill(len(slices), longest, max(ends), start=start)
    return Planned(
        shape=shape,
        requests=[piece.request for piece in slices],
        starts=[piece.start for piece in slices],
        counts=[piece.num_tokens for piece in slices],
        ends=ends,
        finishes=[end == len(piece.request.all_token_ids) for end, piece in zip(ends, slices, strict=True)],
    )


def _decode_batch(
    members: list[Request], requests: Requests, shapes: Shapes, num_drafts: dict[str, int], lookahead: int
) -> Planned:
    counts = [1 + num_drafts.get(request.req_id, 0) for request in members]
    num_queries = fit(shapes.decode_queries, max(counts))
    lengths = {count: max(num_queries, count + lookahead) for count in set(counts)}
    starts = [request.num_computed for request in members]
    ends = [start + lengths[count] for start, count in zip(starts, counts, strict=True)]
    shape = shapes.decode(num_queries, ends, last_block=requests.find_last_block(members))
    return Planned(
        shape=shape, requests=members, starts=starts, counts=counts, ends=ends, finishes=[True] * len(members)
    )
