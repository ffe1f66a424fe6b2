"""Drafting with a separate model, which runs k forward passes after each verification.

The drafter's KV is stored in the target's blocks. A draft token's KV is written when the next token is drafted, so the
last of the k draft tokens has no KV. If all drafts are accepted, the drafter therefore has no KV for the two newest
tokens. For this reason, the first forward pass in drafting always processes the two newest tokens.

`DraftModelKVSync` tracks the number of tokens that the drafter has read in each row. The device has exact numbers. The
host has lower bounds, because drafts may be in flight. These bounds determine which rows must catch up, and in which
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm_gaudi_spec.attention.metadata import build_columns, build_rectangle
from vllm_gaudi_spec.drafting.base import DeviceProposer, DrafterKVSync
from vllm_gaudi_spec.drafting.universal.pairs import require_same_vocabulary
from vllm_gaudi_spec.graphs import DRAFTERS_READS, Job
from vllm_gaudi_spec.records import PREFILL, DraftRequest, Drafts, Hidden
from vllm_gaudi_spec.slices import count_before_slices, keep_last_slices
from vllm_gaudi_spec.step_inputs import Packing, StepInputs

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.metadata import Inputs
    from vllm_gaudi_spec.drafting.base import DraftingContext, Model
    from vllm_gaudi_spec.drafting.vocabulary import Translation
    from vllm_gaudi_spec.records import Batch, DraftBatch, Drafted, Request, SampledRows, Shape
    from vllm_gaudi_spec.scheduling.limits import RowLimits

NUM_NEWEST = 2
"""The number of tokens that the first forward pass in drafting reads."""


class AutoregressiveProposer(DeviceProposer):
    drafts_one_by_one = True

    def __init__(self, model: Model, translation: Translation) -> None:
        self._model = model
        self._translation = translation

    @classmethod
    def build(cls, context: DraftingContext) -> AutoregressiveProposer:
        assert context.drafter is not None
        return cls(context.drafter, make_translation(context))

    def make_kv_sync(self, context: DraftingContext, row_limits: RowLimits) -> DraftModelKVSync:
        return DraftModelKVSync(self.read, context)

    def read(self, chunk: Inputs) -> None:
        """Write the drafter's KV for target tokens, such as a prompt chunk."""
        self._model.forward(replace(chunk, token_ids_T=self._translation.to_drafter(chunk.token_ids_T)))

    def propose(self, request: DraftRequest) -> Drafts:
        return draft_chain(self._model, self._translation, request, self._read_newest(request), request.lengths_B)

    def _read_newest(self, request: DraftRequest) -> Hidden:
        """Return the hidden state after each row's newest token, [B, H]."""
        tokens_BN, starts_B, num_real_B = request.row_operations.take_newest(
            request.history_RM, request.rows_B, request.lengths_B, request.max_drafts_B, NUM_NEWEST
        )
        tokens_BN = self._translation.to_drafter(tokens_BN)
        hidden = self._model.forward(
            build_rectangle(tokens_BN, starts_B, num_real_B, request.blocks, request.row_operations)
        )
        return Hidden(hidden.last.view(*tokens_BN.shape, -1).select(1, NUM_NEWEST - 1))


def make_translation(context: DraftingContext) -> Translation:
    """Return the translation for a draft model whose input is translated by token ID."""
    if context.pair is not None:
        return context.pair.make_mapped_vocabulary(context.device)
    return require_same_vocabulary(context.vllm_config)


def draft_chain(
    model: Model, translation: Translation, request: DraftRequest, hidden: Hidden, starts_B: torch.Tensor
) -> Drafts:
    """Draft one token after another, starting from the hidden states [B, H] that predict the first draft token.

    Args:
        starts_B: Position of the first draft token in the drafter's own numbering.
    """
    drafted: list[Drafted] = []
    steps: list[Inputs] = []
    if num_steps := request.num_drafts - 1:
        steps = build_columns(starts_B, request.max_drafts_B - 1, num_steps, request.blocks, request.row_operations)
    for step in range(request.num_drafts):
        if step:
            inputs = steps[step - 1]
            tokens_B = translation.to_drafter(drafted[-1].tokens_B) * inputs.num_real_B
            hidden = model.forward(replace(inputs, token_ids_T=tokens_B), hidden.carried)
        logits_BV = translation.to_target(model.logits(hidden.last))
        drafted.append(request.choose(logits_BV, step))
    return stack_drafts(drafted, request.max_drafts_B)


def stack_drafts(drafted: list[Drafted], num_drafts_B: torch.Tensor) -> Drafts:
    """Combine the draft tokens from successive steps into one record."""
    probs = [draft.probs_BV for draft in drafted if draft.probs_BV is not None]
    sound = [draft.sound_B for draft in drafted if draft.sound_B is not None]
    return Drafts(
        torch.stack([draft.tokens_B for draft in drafted], dim=1),
        num_drafts_B,
        torch.stack(probs, dim=1) if probs else None,
        torch.stack(sound, dim=1) if sound else None,
    )


# --- drafter KV sync ---


class Read(NamedTuple):
    """Tokens that the drafter reads next, in the shape of a prompt chunk."""

    shape: Shape
    inputs: StepInputs
    """`starts_B` is the host's lower bound. Rows in which the drafter has read fewer tokens are skipped."""


@dataclass(slots=True)
class _Lag:
    """A row in which the drafter must catch up with the target."""

    request: Request
    end: int = 0
    gap: int = 0
    """Upper bound on the number of tokens before `end` that the drafter has not read."""


class DraftModelKVSync(DrafterKVSync):
    has_kv = True

    def __init__(self, read: Callable[[Inputs], None], context: DraftingContext) -> None:
        """Initialize the KV sync. `read` writes the drafter's KV for the given tokens on the device."""
        self._read = read
        self._requests = requests = context.requests
        self._recorder = context.recorder
        self._shapes = context.shapes
        self._slices = context.shapes.slice_tokens > 0
        self._max_len = context.drafter_max_len
        self._num_drafts = context.speculation.num_drafts
        num_rows = requests.pad_row + 1
        self._reach_R = torch.zeros(num_rows, dtype=torch.int32, device=requests.backend.traits.torch_device)
        """Number of tokens in each row for which the drafter has KV, assuming that all drafts are accepted."""
        self._reach_np = np.zeros(num_rows, dtype=np.int32)
        """The host's lower bound on `_reach_R`."""
        self._keeps_up_np = np.zeros(num_rows, dtype=bool)
        """Rows in which the drafter has read all but the newest tokens, as far as the host knows."""
        self._arrived: set[int] = set()
        """Rows that have been admitted but have not run a forward pass yet."""
        self._blocks = context.make_read_blocks(keeps_up=False)
        self._run_read = requests.backend.graphs.graph(self._read_rows)
        self._set_reach = requests.backend.graphs.graph(self._put_reach)

    # --- host ---

    def on_admitted(self) -> None:
        self._blocks.load(self._requests.loaded_blocks)
        for request in self._requests.admitted:
            self._blocks.admit(request.row, request.num_computed)
            self._arrived.add(request.row)
        self._blocks.clear_new()

    def on_forward(self, batch: Batch) -> None:
        if (read := self._take_chunk(batch)) is not None:
            self._read_chunk(read)

    def before_round(self, sampled: SampledRows, max_drafts_np: np.ndarray, batch: DraftBatch | None) -> None:
        for read in self._catch_up(sampled.requests, max_drafts_np):
            self._read_chunk(read)

    def _read_chunk(self, read: Read) -> None:
        self._recorder.saw(self._signature(read.shape))
        self._run_read(read.inputs, read.shape.queries)

    def _take_chunk(self, batch: Batch) -> Read | None:
        """Return the part of a batch that the drafter reads: prompt chunks, up to its maximum context length."""
        self._start_rows(batch.requests)
        if batch.shape.phase != PREFILL:
            return None
        if all(request.num_computed >= self._max_len for request in batch.requests):
            return None
        follows = [self._reach_np[request.row] >= request.num_computed for request in batch.requests]
        if not any(follows):
            return None
        # If a request has several rows, the last row determines how many tokens are read.
        ends = dict(compress(zip(batch.requests, batch.ends, strict=True), follows))
        self._record_read([*ends], [*ends.values()])
        # Omit the counts. If some tokens before a row's chunk are unread, the row reads those tokens and the chunk when
        # it catches up. Only the device knows their number.
        return Read(batch.shape, batch.inputs._replace(counts_B=None))

    def _start_rows(self, requests: list[Request]) -> None:
        """Initialize `_reach` for new rows at their first forward pass.

        Admission would be too early, because a row may share blocks that another row writes earlier in the same step.
        """
        started = dict.fromkeys(request for request in requests if request.row in self._arrived)
        if not started:
            return
        rows = [request.row for request in started]
        for request in started:
            reach = self._blocks.count_read(request.row, request.num_computed)
            self._reach_np[request.row] = reach
            self._keeps_up_np[request.row] = reach == request.num_computed
        self._arrived.difference_update(rows)
        # Include all rows, with padding, so that every step runs the same graph.
        rows_np = np.full(len(self._reach_np), self._requests.pad_row, dtype=np.int64)
        rows_np[: len(rows)] = rows
        self._upload_reach(rows_np)

    def _upload_reach(self, rows_np: np.ndarray) -> None:
        packing = Packing.pack([rows_np, self._reach_np[rows_np]], self._requests.backend.memory.upload)
        self._set_reach(packing)

    def _record_read(self, requests: list[Request], reach: list[int]) -> None:
        """Record that the drafter has read each request up to `reach`, or to the drafter's maximum context."""
        rows_np = np.array([request.row for request in requests], dtype=np.int64)
        reach_np = np.minimum(np.array(reach, dtype=np.int32), self._max_len)
        before_np = self._reach_np[rows_np]
        further_np = reach_np > before_np
        self._blocks.record_read(rows_np[further_np], before_np[further_np], reach_np[further_np])
        self._reach_np[rows_np[further_np]] = reach_np[further_np]

    def _catch_up(self, requests: list[Request], max_drafts_np: np.ndarray) -> Iterator[Read]:
        """Yield the reads that rows need before they can draft again, in the shapes of prompt chunks.

        Rows that currently may not draft do not catch up.
        """
        rows_np = np.array([request.row for request in requests], dtype=np.int64)
        lags = [_Lag(requests[index]) for index in np.flatnonzero((max_drafts_np > 0) & ~self._keeps_up_np[rows_np])]
        for lag in lags:
            # Compute an upper bound on the row's length that includes all tokens in flight.
            request = lag.request
            lag.end = min(max(request.num_computed + 1 + self._num_drafts, len(request.all_token_ids)), self._max_len)
            lag.gap = lag.end - int(self._reach_np[request.row])
        while lags := [lag for lag in lags if lag.gap > 0]:
            yield self._pack_read(*self._take_gaps(lags))
        self._keeps_up_np[rows_np] = max_drafts_np > 0

    def _take_gaps(self, lags: list[_Lag]) -> tuple[list[_Lag], list[int], Shape]:
        """Return the next tokens to read in rows that have to catch up.

        Returns:
            The `_Lag` of each batch row, the row's offset in the tokens of its lag, and the shape of the batch.
        """
        shapes, size = self._shapes, self._shapes.slice_tokens
        group: list[_Lag] = []
        offsets: list[int] = []
        if size:
            for lag in lags:
                num_rows = min(-(-lag.gap // size), shapes.slice_rows[-1] - len(group))
                group += [lag] * num_rows
                offsets += range(0, num_rows * size, size)
                lag.gap -= num_rows * size
            return group, offsets, shapes.prefill_slices(len(group), max(lag.end for lag in group))
        count = min(max(lag.gap for lag in lags), shapes.prefill_queries[-1])
        group = lags[: shapes.prefill_rows_at(count)]
        for lag in group:
            lag.gap -= count
        return group, [0] * len(group), shapes.prefill(len(group), count, max(lag.end for lag in group))

    def _pack_read(self, group: list[_Lag], offsets: list[int], shape: Shape) -> Read:
        header_np = np.zeros((4, shape.rows), dtype=np.int32)
        header_np[0] = rows_np = self._requests.pad_rows([lag.request for lag in group], shape.rows)
        header_np[1, : len(offsets)] = offsets
        blocks = self._requests.blocks(rows_np, [lag.end for lag in group], shape.context)
        return Read(shape, StepInputs.pack(header_np, blocks, self._requests.backend.memory.upload))

    def on_drafted(self, requests: list[Request], max_drafts_np: np.ndarray) -> None:
        drafted = list(compress(requests, max_drafts_np > 0))
        self._record_read(drafted, [request.num_computed - self._num_drafts for request in drafted])

    def invalidate(self, requests: list[Request]) -> None:
        """Make these rows read all of their tokens again when they next catch up."""
        for request in requests:
            self._blocks.forget(request.row)
        rows_np = np.full(len(self._reach_np), self._requests.pad_row, dtype=np.int64)
        rows_np[: len(requests)] = [request.row for request in requests]
        self._reach_np[rows_np] = 0
        self._keeps_up_np[rows_np] = False
        self._upload_reach(rows_np)

    on_faulty = invalidate

    # --- device ---

    def _read_rows(self, step: StepInputs, queries: int) -> None:
        """Read the next tokens, except the newest, in rows in which the drafter has read at least `starts_B` tokens."""
        rows = step.split()
        rows_P = rows.rows_B
        reach_P = self._reach_R.index_select(0, rows_P)
        ends_P = self._requests.computed_R.index_select(0, rows_P).clamp(max=self._max_len)
        starts_P, begins_P = reach_P, rows.starts_B
        if self._slices:
            before_P = count_before_slices(rows_P, begins_P)
            starts_P, begins_P = reach_P + before_P, begins_P - before_P
        follows_P = reach_P >= begins_P
        num_real_P = torch.where(follows_P, (ends_P - starts_P).clamp(min=0, max=queries), 0).int()
        if self._slices:
            read_P = torch.where(follows_P, torch.maximum(reach_P, torch.minimum(starts_P + queries, ends_P)), reach_P)
            self._put(keep_last_slices(rows_P, self._requests.pad_row), read_P.int())
        else:
            self._put(rows_P, reach_P + num_real_P)
        starts_P = torch.where(num_real_P > 0, starts_P, 0)
        offsets_L = torch.arange(queries, dtype=torch.int32, device=rows_P.device)
        tokens_PL = self._requests.tokens_at(rows_P, starts_P[:, None] + offsets_L)
        self._read(build_rectangle(tokens_PL, starts_P, num_real_P, rows.blocks, self._requests.backend.row_operations))

    def on_verified(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> None:
        """Exclude the KV of rejected drafts from the number of tokens that have KV."""
        self._put(rows_B, torch.minimum(self._reach_R.index_select(0, rows_B), lengths_B - 1))

    def limit_drafts(self, rows_B: torch.Tensor, lengths_B: torch.Tensor, max_drafts_B: torch.Tensor) -> torch.Tensor:
        """Return `max_drafts_B`, with 0 for rows that have more than `NUM_NEWEST` unread tokens."""
        return torch.where(self._reach_R.index_select(0, rows_B) >= lengths_B - NUM_NEWEST, max_drafts_B, 0)

    def on_round_written(self, rows_B: torch.Tensor, lengths_B: torch.Tensor, drafts: Drafts) -> None:
        """Include the newest tokens and all draft tokens except the last in the number of tokens that have KV."""
        reach_B = self._reach_R.index_select(0, rows_B)
        wrote_B = lengths_B + drafts.num_drafts_B - 1
        self._put(rows_B, torch.where(drafts.num_drafts_B > 0, wrote_B, reach_B))

    def _put_reach(self, packing: Packing) -> None:
        rows_R, reach_R = packing.split()
        self._put(rows_R.long(), reach_R)

    def _put(self, rows_B: torch.Tensor, reach_B: torch.Tensor) -> None:
        put = self._requests.backend.row_operations.put
        put(self._reach_R, rows_B, reach_B, pad_row=self._requests.pad_row)

    # --- warm-up ---

    def _signature(self, shape: Shape) -> Hashable:
        return ("draft", *shape)

    def jobs(self) -> Iterator[Job]:
        nobody_np = np.full(len(self._reach_np), self._requests.pad_row, dtype=np.int64)
        yield Job("states", partial(self._upload_reach, nobody_np))
        for shape in reversed(self._shapes.prefills()):  # largest first, because its memory is enough for all
            yield Job(DRAFTERS_READS, partial(self._read_padding, shape), (self._signature(shape),), shape.tokens)

    def _read_padding(self, shape: Shape) -> None:
        self._read_chunk(self._pack_read([], [], shape))
