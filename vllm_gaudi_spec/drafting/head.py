"""EAGLE, EAGLE-3 and MTP heads, which read each of the target's hidden states together with the token that follows it.

At position p, a head reads token p + 1 and the target's hidden state for token p, and writes its own KV. The head's
output approximates the target's hidden state for token p + 1. This output predicts the next draft token, and the next
forward pass reads it in place of the target's hidden state. After verification, the KV of accepted draft tokens is
overwritten from the target's hidden states (`HeadKVSync`).

The target's hidden states cannot be recomputed later. A head therefore reads all rows at every step, with or without
drafts, up to its maximum context length. As a result, shared blocks always contain the head's KV, and no row has to
catch up. If a read fails, the affected rows and all rows that share their blocks never draft again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.attention.metadata import Blocks, Inputs, build_rectangle
from vllm_gaudi_spec.drafting.base import DeviceProposer, DrafterKVSync
from vllm_gaudi_spec.drafting.draft_model import draft_chain
from vllm_gaudi_spec.drafting.vocabulary import ReducedVocabulary, SameVocabulary
from vllm_gaudi_spec.graphs import DRAFTERS_READS, Job
from vllm_gaudi_spec.records import PREFILL, Hidden, Planned
from vllm_gaudi_spec.step_inputs import StepInputs

if TYPE_CHECKING:
    import numpy as np

    from vllm_gaudi_spec.drafting.base import DraftingContext, Model
    from vllm_gaudi_spec.drafting.vocabulary import Translation
    from vllm_gaudi_spec.records import Batch, DraftBatch, DraftRequest, Drafts, Request, SampledRows, Shape
    from vllm_gaudi_spec.scheduling.limits import RowLimits


class HeadProposer(DeviceProposer):
    drafts_one_by_one = True

    def __init__(self, model: Model, translation: Translation) -> None:
        self._model = model
        self._translation = translation

    @classmethod
    def build(cls, context: DraftingContext) -> HeadProposer:
        assert context.drafter is not None
        return cls(context.drafter, make_head_translation(context.drafter, context.vocab_size))

    def make_kv_sync(self, context: DraftingContext, row_limits: RowLimits) -> DrafterKVSync:
        return HeadKVSync(self._model, context, row_limits)

    def propose(self, request: DraftRequest) -> Drafts:
        assert request.hidden is not None
        # A head reads each token with the preceding hidden state, so its positions are one less than the target's.
        starts_B = request.lengths_B - 1
        return draft_chain(self._model, self._translation, request, request.hidden, starts_B)


def make_head_translation(head: Model, vocab_size: int) -> Translation:
    """Return the translation for a head that reads all target tokens but may predict only some of them."""
    return (
        SameVocabulary(vocab_size, vocab_size)
        if head.output_ids is None
        else ReducedVocabulary(head.output_ids, vocab_size)
    )


# --- drafter KV sync ---


class HeadKVSync(DrafterKVSync):
    has_kv = True
    reads_every_step = True

    def __init__(
        self, head: Model, context: DraftingContext, row_limits: RowLimits, head_size: int | None = None
    ) -> None:
        """Initialize the KV sync. `head_size` is the head's hidden size, by default the one in its configuration."""
        self._head = head
        self._hidden_states = context.hidden_states
        self._requests = requests = context.requests
        self._recorder = context.recorder
        self._shapes = context.shapes
        self._row_limits = row_limits
        self._blocks = context.make_read_blocks(keeps_up=True)
        self._max_len = context.drafter_max_len
        """Maximum number of positions that the head supports."""
        if head_size is None:
            head_size = context.spec_config.draft_model_config.get_hidden_size()
        shape = (requests.pad_row + 1, head_size)
        device, dtype = requests.backend.traits.torch_device, context.hidden_states.dtype
        self._last_RH, self._carried_RH = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        """The head's output for the last token that it has read in each row."""
        self._run_chunk = requests.backend.graphs.graph(self._read_chunk)
        self._run_newest = requests.backend.graphs.graph(self._read_newest)

    # --- host ---

    def on_admitted(self) -> None:
        self._blocks.load(self._requests.loaded_blocks)
        for request in self._requests.admitted:
            self._blocks.admit(request.row, request.num_computed)
        self._blocks.clear_new()
        for request in self._requests.admitted:
            if self._blocks.count_read(request.row, request.num_computed) < request.num_computed:
                self.invalidate([request])

    def invalidate(self, requests: list[Request]) -> None:
        for request in requests:
            self._blocks.forget(request.row)
            self._row_limits.exclude(request.row)

    def on_forward(self, batch: Batch) -> None:
        """Read prompt chunks."""
        if batch.shape.phase == PREFILL and min(request.num_computed for request in batch.requests) < self._max_len:
            self._read(batch)

    def _read(self, batch: Batch) -> None:
        self._recorder.saw(self._chunk_signature(batch.shape))
        self._run_chunk(batch.shape.queries, batch.inputs)

    def before_round(self, sampled: SampledRows, max_drafts_np: np.ndarray, batch: DraftBatch | None) -> None:
        """Read the tokens that this step sampled in decodes and at the ends of prompts."""
        assert batch is not None
        # The host counts this step's drafts as accepted, and with async scheduling also those of the step in flight.
        ahead = 2 * self._shapes.decode_queries[-1]
        if min(end - ahead for end in sampled.ends) < self._max_len:
            self._read_sampled(batch, sampled.num_queries)

    def _read_sampled(self, batch: DraftBatch, num_queries: int) -> None:
        self._recorder.saw(self._signature(batch.shape, num_queries))
        self._run_newest(num_queries, batch.inputs)

    # --- device ---

    def gather_hidden(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> Hidden | None:
        return Hidden(self._last_RH.index_select(0, rows_B), self._carried_RH.index_select(0, rows_B))

    def _read_chunk(self, queries: int, step: StepInputs) -> None:
        """Read a prompt chunk.

        A prompt's last position is paired with a token that does not exist yet, so it is read again after that token is
        sampled.
        """
        rows = step.split()
        inputs = self._shift_inputs(queries, rows.rows_B, rows.starts_B, rows.counts_B, rows.blocks)
        self._head.forward(inputs, self._hidden_states.chunk(step.num_rows * queries))

    def _read_newest(self, queries: int, step: StepInputs) -> None:
        rows = step.split()
        rows_B, blocks = rows.rows_B, rows.blocks._replace(counts_B=None)
        first_B = self._hidden_states.first(rows_B)
        # The newest token has no hidden state yet, and the hidden states of rejected drafts are not read.
        num_read_B = self._requests.lengths(rows_B) - 1 - first_B
        inputs = self._shift_inputs(queries, rows_B, first_B, num_read_B, blocks)
        output = self._head.forward(inputs, self._hidden_states.carried(rows_B, queries))
        row_B = torch.arange(rows_B.shape[0], dtype=torch.int32, device=rows_B.device)
        index_B = row_B * queries + (num_read_B - 1).clamp(min=0, max=queries - 1)
        assert output.carried is not None
        self._last_RH.index_copy_(0, rows_B, output.last.index_select(0, index_B))
        self._carried_RH.index_copy_(0, rows_B, output.carried.index_select(0, index_B))

    def _shift_inputs(
        self,
        queries: int,
        rows_B: torch.Tensor,
        starts_B: torch.Tensor,
        counts_B: torch.Tensor,
        blocks: Blocks,
        ahead: int = 1,
    ) -> Inputs:
        """Return inputs for the positions from `starts_B` to the head's last one.

        Each position is paired with the token that is `ahead` positions later.
        """
        num_real_B = torch.minimum(counts_B, self._max_len - starts_B).clamp(min=0).int()
        starts_B = torch.where(num_real_B > 0, starts_B, 0)
        offsets_Q = torch.arange(queries, dtype=torch.int32, device=rows_B.device)
        tokens_BQ = self._requests.tokens_at(rows_B, starts_B[:, None] + ahead + offsets_Q)
        return build_rectangle(tokens_BQ, starts_B, num_real_B, blocks, self._requests.backend.row_operations)

    # --- warm-up ---

    def _chunk_signature(self, shape: Shape) -> Hashable:
        return ("head chunk", *shape)

    def _signature(self, shape: Shape, num_queries: int) -> Hashable:
        return ("head", *shape._replace(queries=num_queries))

    def jobs(self) -> Iterator[Job]:
        for shape in reversed(self._shapes.prefills()):  # largest first, because its memory is enough for all
            run = partial(self._read_padding, shape)
            yield Job(DRAFTERS_READS, run, (self._chunk_signature(shape),), shape.tokens)
        for shape, num_queries in product(self._shapes.plain_decodes(), self._shapes.decode_queries):
            run = partial(self._read_no_samples, shape, num_queries)
            yield Job(DRAFTERS_READS, run, (self._signature(shape, num_queries),), shape.rows)

    def _read_padding(self, shape: Shape) -> None:
        self._read(self._requests.make_batch(Planned.make_padding(shape)))

    def _read_no_samples(self, shape: Shape, num_queries: int) -> None:
        self._read_sampled(self._requests.make_draft_batch([], [], shape), num_queries)
