"""The hidden states from which tokens are sampled, stored by request row.

Row `pad_row` of `Requests` belongs to no request. Writes for padding go to this row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_gaudi_spec.records import DECODE, PREFILL

if TYPE_CHECKING:
    from vllm_gaudi_spec.records import Hidden


class Located(NamedTuple):
    """The start position and the number of real tokens for each row in a padded batch."""

    starts_B: torch.Tensor
    """int32: position of each row's first token."""
    num_real_B: torch.Tensor
    """int32: number of real tokens among each row's Q tokens."""


class SampledStates(NamedTuple):
    hidden_NH: torch.Tensor
    """Hidden states at all N = B * Q positions, or at the listed positions."""
    positions_BQ: torch.Tensor
    num_drafts_B: torch.Tensor
    """int32: number of drafts that each row had in the forward pass."""


class HiddenStateBuffer:
    """Hidden states of each row, with the position of the first one and the number of drafts among the row's tokens.

    Forward passes store hidden states here, so that one sampling pass can serve any combination of batches in a step.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        num_queries: int,
        max_chunk_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        carried_size: int | None = None,
    ) -> None:
        """Allocate the buffer. `carried_size` is the size of the hidden states that heads read, if it differs."""
        self.dtype = dtype
        self._num_queries = num_queries
        self._hidden_NH = torch.zeros(num_rows * num_queries, hidden_size, dtype=dtype, device=device)
        """N = R * Q. The tensor is flat, because devices that capture steps can change a tensor only as a whole."""
        self.chunk_TH = torch.zeros(max_chunk_tokens, hidden_size, dtype=dtype, device=device)
        """All hidden states of the latest batch of prompt chunks, which are used to score prompt tokens."""
        self._carried_NH, self._carried_chunk_TH = self._hidden_NH, self.chunk_TH
        if carried_size is not None:
            self._carried_NH, self._carried_chunk_TH = (
                torch.zeros(tensor.shape[0], carried_size, dtype=dtype, device=device)
                for tensor in (self._hidden_NH, self.chunk_TH)
            )
        self._first_R = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._num_drafts_R = torch.zeros(num_rows, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        tensors = {self._hidden_NH, self.chunk_TH, self._carried_NH, self._carried_chunk_TH}
        return sum(tensor.nbytes for tensor in tensors)

    def put(
        self, phase: str, queries: int, rows_B: torch.Tensor, located: Located, hidden: Hidden
    ) -> torch.Tensor | None:
        """Store the hidden states of the T tokens in a forward pass. Returns None, as no other stage needs them.

        A decode samples at all of its tokens, whereas a prompt chunk samples only at its last token.
        """
        last_B = (located.num_real_B - 1).clamp(min=0)
        if phase == DECODE:
            chosen_N, first_B, num_drafts_B = None, located.starts_B, last_B
        else:
            chunks_B = torch.arange(len(rows_B), dtype=torch.int32, device=rows_B.device)
            chosen_N, first_B = chunks_B * queries + last_B, located.starts_B + last_B
            num_drafts_B = torch.zeros_like(last_B)
        index_N = self._index(rows_B, queries if phase == DECODE else 1)
        for states_TH, rows_NH, chunk_TH in self._destinations(hidden):
            rows_NH.index_copy_(0, index_N, states_TH if chosen_N is None else states_TH.index_select(0, chosen_N))
            if phase == PREFILL:
                offsets_T = torch.arange(states_TH.shape[0], dtype=torch.int64, device=rows_B.device)
                chunk_TH.index_copy_(0, offsets_T, states_TH)
        self._first_R.index_copy_(0, rows_B, first_B)
        self._num_drafts_R.index_copy_(0, rows_B, num_drafts_B)
        return None

    def take(self, rows_B: torch.Tensor, num_queries: int, index_2N: torch.Tensor | None = None) -> SampledStates:
        """Return the hidden states from which to sample: either all of them or those listed in `index_2N`."""
        offsets_Q = torch.arange(num_queries, dtype=torch.int32, device=rows_B.device)
        if index_2N is None:
            index_N = self._index(rows_B, num_queries)
        else:
            row_N, query_N = index_2N.unbind(0)
            index_N = (rows_B.int().index_select(0, row_N) * self._num_queries + query_N.int()).long()
        return SampledStates(
            self._hidden_NH.index_select(0, index_N),
            self._first_R.index_select(0, rows_B)[:, None] + offsets_Q,
            self._num_drafts_R.index_select(0, rows_B),
        )

    # --- hidden states that heads read ---

    def _destinations(self, hidden: Hidden) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return each kind of hidden states with its row buffer and chunk buffer."""
        pairs = [(hidden.last, self._hidden_NH, self.chunk_TH)]
        if self._carried_NH is not self._hidden_NH:
            assert hidden.carried is not None
            pairs.append((hidden.carried, self._carried_NH, self._carried_chunk_TH))
        return pairs

    def first(self, rows_B: torch.Tensor) -> torch.Tensor:
        """Return the position of the first hidden state in each row, int32 [B]."""
        return self._first_R.index_select(0, rows_B)

    def carried(self, rows_B: torch.Tensor, num_queries: int) -> torch.Tensor:
        """Return the hidden states that heads read, starting with the first one in each row, [B * Q, H]."""
        return self._carried_NH.index_select(0, self._index(rows_B, num_queries))

    def chunk(self, num_tokens: int) -> torch.Tensor:
        """Return the hidden states that heads read for the latest batch of prompt chunks, [T, H]."""
        return self._carried_chunk_TH.narrow(0, 0, num_tokens)

    def last_accepted(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """Return the hidden state from which the last of the `lengths_B` tokens in each row was sampled, [B, H]."""
        offset_B = (lengths_B - 2 - self.first(rows_B)).clamp(min=0, max=self._num_queries - 1)
        return self._hidden_NH.index_select(0, (rows_B.int() * self._num_queries + offset_B).long())

    def _index(self, rows_B: torch.Tensor, num_queries: int) -> torch.Tensor:
        offsets_Q = torch.arange(num_queries, dtype=torch.int32, device=rows_B.device)
        return (rows_B.int()[:, None] * self._num_queries + offsets_Q).flatten().long()
