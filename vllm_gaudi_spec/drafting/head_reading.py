"""What heads read: the target's hidden states, as the target makes them.

They can not be made again later. So a head reads with the target at every step, drafts or none, of every row up to its
longest context: then all blocks that requests share hold its KV, and no row has to catch up. Where reading failed, or
a row failed beside good ones, that row drafts no more, nor does one that shares its blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import product
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.attention.inputs import Blocks, Inputs, rectangle
from vllm_gaudi_spec.drafting.reading import Placed, Reading
from vllm_gaudi_spec.records import PREFILL, Hidden

if TYPE_CHECKING:
    import numpy as np

    from vllm_gaudi_spec.drafting.base import Model
    from vllm_gaudi_spec.drafting.limits import LengthSplit
    from vllm_gaudi_spec.drafting.read_blocks import ReadBlocks
    from vllm_gaudi_spec.records import Batch, Request, SampleBatch
    from vllm_gaudi_spec.runner.graphs import StepRecorder
    from vllm_gaudi_spec.runner.hidden_states import HiddenStateBuffer
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.runner.shapes import Shapes


class LastState(Reading):
    """Nothing but the target's state from which each row's newest token was sampled."""

    def __init__(self, hidden_states: HiddenStateBuffer) -> None:
        self._hidden_states = hidden_states

    def hidden(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> Hidden:
        return Hidden(self._hidden_states.behind(rows_B, lengths_B))


class HeadReading(Reading):
    has_kv = True
    every_step = True

    def __init__(
        self,
        head: Model,
        hidden_states: HiddenStateBuffer,
        requests: Requests,
        recorder: StepRecorder,
        shapes: Shapes,
        split: LengthSplit,
        blocks: ReadBlocks,
        head_size: int,
        longest: int,
    ) -> None:
        """`head_size`: of its hidden states. `longest`: positions that it has."""
        self._head = head
        self._hidden_states = hidden_states
        self._requests = requests
        self._recorder = recorder
        self._shapes = shapes
        self._split = split
        self._blocks = blocks
        self._longest = longest
        shape = (requests.pad_row + 1, head_size)
        device, dtype = requests.backend.torch_device, hidden_states.dtype
        self._last_RH, self._carried_RH = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        """Of each row, what the head said behind the last that it read."""
        self._run_chunk = requests.backend.graph(self._read_chunk)
        self._run_newest = requests.backend.graph(self._read_newest)

    # --- host ---

    def apply(self) -> None:
        for request in self._requests.admitted:
            self._blocks.admit(request.row, request.num_computed)
        self._blocks.clear_new()
        for request in self._requests.admitted:
            if self._blocks.reach(request.row, request.num_computed) < request.num_computed:
                self.missed([request])

    def missed(self, requests: list[Request]) -> None:
        for request in requests:
            self._blocks.forget(request.row)
            self._split.exclude(request.row)

    def follow(self, batch: Batch) -> None:
        """Prompt chunks."""
        starts = [request.num_computed for request in batch.requests]
        if batch.shape.phase != PREFILL or min(starts, default=0) >= self._longest:
            return
        self._recorder.saw(("head chunk", *batch.shape))
        rows_P, host_2P, blocks = batch.uploaded
        self._run_chunk(batch.shape.queries, rows_P, host_2P, blocks)

    def before_round(self, batch: SampleBatch, lengths_B: torch.Tensor, able_np: np.ndarray, placed: Placed) -> None:
        """What this step sampled: decodes, and the ends of prompts."""
        # The host counts its own drafts as accepted, and asynchronously those of the step in flight.
        ahead = 2 * self._shapes.decode_queries[-1]
        if min((end - ahead for end in batch.ends), default=0) >= self._longest:
            return
        self._recorder.saw(self._signature(len(batch.rows_np), batch.num_queries, placed.context))
        self._run_newest(batch.num_queries, batch.rows_B, lengths_B, placed.blocks)

    # --- device ---

    def hidden(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> Hidden:
        return Hidden(self._last_RH.index_select(0, rows_B), self._carried_RH.index_select(0, rows_B))

    def _read_chunk(
        self,
        queries: int,
        rows_P: torch.Tensor,
        host_2P: torch.Tensor,
        blocks: Blocks,
    ) -> None:
        """Of a prompt that ends here the last position is read as well, beside a token that is not there yet: it is
        read again once that is sampled."""
        starts_P, counts_P = host_2P.unbind(0)
        inputs = self._shifted(queries, rows_P, starts_P, counts_P, blocks)
        self._head.forward(inputs, self._hidden_states.chunk(rows_P.shape[0] * queries))

    def _read_newest(self, queries: int, rows_B: torch.Tensor, lengths_B: torch.Tensor, blocks: Blocks) -> None:
        first_B = self._hidden_states.first(rows_B)
        # The newest token has no state of its own yet. Rejected drafts have one, and are not read.
        num_read_B = lengths_B - 1 - first_B
        inputs = self._shifted(queries, rows_B, first_B, num_read_B, blocks)
        said = self._head.forward(inputs, self._hidden_states.carried(rows_B, queries))
        row_B = torch.arange(rows_B.shape[0], dtype=torch.int32, device=rows_B.device)
        place_B = row_B * queries + (num_read_B - 1).clamp(min=0, max=queries - 1)
        assert said.carried is not None
        self._last_RH.index_copy_(0, rows_B, said.last.index_select(0, place_B))
        self._carried_RH.index_copy_(0, rows_B, said.carried.index_select(0, place_B))

    def _shifted(
        self,
        queries: int,
        rows_B: torch.Tensor,
        starts_B: torch.Tensor,
        counts_B: torch.Tensor,
        blocks: Blocks,
    ) -> Inputs:
        """Positions from `starts_B` on, and beside each the token that follows it; no further than the head goes."""
        num_real_B = torch.minimum(counts_B, self._longest - starts_B).clamp(min=0).int()
        starts_B = torch.where(num_real_B > 0, starts_B, 0)
        place_Q = torch.arange(queries, dtype=torch.int32, device=rows_B.device)
        tokens_BQ = self._requests.tokens_at(rows_B, starts_B[:, None] + 1 + place_Q)
        return rectangle(tokens_BQ, starts_B, num_real_B, blocks)

    # --- warm-up ---

    def _signature(self, num_rows: int, num_queries: int, context: int) -> Hashable:
        return ("head", num_rows, num_queries, context)

    def signatures(self) -> Iterator[Hashable]:
        for shape in self._shapes.prefills():
            yield ("head chunk", *shape)
        for num_rows, num_queries, context in self.read_padding():
            yield self._signature(num_rows, num_queries, context)

    def read_padding(self) -> Iterator[tuple[int, int, int]]:
        for (num_rows, context), num_queries in product(self._shapes.decode_sizes(), self._shapes.decode_queries):
            yield num_rows, num_queries, context
