"""Warm-up and length limits of each kind of drafter on the device that reads KV."""

import pytest
import torch

from tests.support.fakes import CapturingBackend, HostBackend
from tests.unit.drafting.test_autoregressive import BLOCK, PROMPTS, VOCAB, Remembers, Rows
from tests.unit.drafting.test_heads import HeadRows, ReadsStates, carry
from tests.unit.drafting.test_mtp import ChainedRows
from vllm_gaudi_spec.attention.metadata import Inputs
from vllm_gaudi_spec.drafting.on_device import DeviceDrafting
from vllm_gaudi_spec.drafting.parallel import ParallelHeadProposer, ParallelModelProposer
from vllm_gaudi_spec.drafting.vocabulary import SameVocabulary
from vllm_gaudi_spec.records import Hidden

MASK, MASK_STATE = VOCAB + 1, 53.0
GARBAGE = 1000
"""The KV that parallel drafters write for a mask token, which they read as the token that they predict there."""


class FillsMasks(Remembers):
    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        hidden, call = super().forward(inputs, carried_TH), inputs.call
        is_mask_T = inputs.token_ids_T == MASK
        self.kv[inputs.slots[0][is_mask_T]] = GARBAGE
        predicted_BQ = hidden.last[:, 0].view(call.num_rows, call.num_queries)
        for row, query in is_mask_T.view(call.num_rows, call.num_queries).nonzero().tolist():
            position, before = int(call.starts_B[row]) + query, predicted_BQ[row, query - 1]
            predicted_BQ[row, query] = (before + (position + 1) * before) % VOCAB
        return hidden


class HeadFillsMasks(ReadsStates):
    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        hidden, call = super().forward(inputs, carried_TH), inputs.call
        is_mask_T = inputs.token_ids_T == MASK
        assert (carried_TH[is_mask_T] == MASK_STATE).all()
        self.kv[inputs.slots[0][is_mask_T]] = GARBAGE
        for row in range(call.num_rows):
            block_table = call.block_table_BW[row].long()
            state = self.kv.view(-1, BLOCK)[block_table].flatten()[: int(call.starts_B[row])].sum() % VOCAB
            for query in is_mask_T.view(call.num_rows, call.num_queries)[row].nonzero().flatten().tolist():
                position = int(call.starts_B[row]) + query
                state = (state + (position + 1) * state + 5 * carry(state)) % VOCAB
                hidden.last[row * call.num_queries + query] = state
        return hidden


class ParallelRows(Rows):
    def build(self, drafter_max_len: int) -> DeviceDrafting:
        self.model = FillsMasks(drafter_max_len)
        proposer = ParallelModelProposer(self.model, SameVocabulary(VOCAB, VOCAB + 3), MASK)
        return self.make_drafting("draft_model", proposer, drafter_max_len)


class ParallelHeadRows(HeadRows):
    def build(self, drafter_max_len: int) -> DeviceDrafting:
        self.head = HeadFillsMasks(drafter_max_len)
        mask_state_H = torch.tensor([MASK_STATE])
        proposer = ParallelHeadProposer(self.head, SameVocabulary(VOCAB, VOCAB), MASK, mask_state_H)
        return self.make_drafting("eagle3", proposer, drafter_max_len)


PARALLEL = [ParallelRows, ParallelHeadRows]
every_kind = pytest.mark.parametrize("kind", [Rows, HeadRows, ChainedRows, *PARALLEL])


@pytest.mark.parametrize("kind", PARALLEL)
@pytest.mark.parametrize("num_drafts", [1, 4])
@pytest.mark.parametrize("device", [HostBackend, CapturingBackend])
def test_parallel_drafts_follow_from_whole_context(
    kind: type[Rows], num_drafts: int, device: type[HostBackend]
) -> None:
    """Steps accept none, some or all drafts, and some rows or steps do not draft."""
    rows = kind(num_drafts, backend=device())
    rows.start(PROMPTS)
    rows.check_steps(seed=0, share_off=0.3)


@every_kind
@pytest.mark.parametrize("device", [HostBackend, CapturingBackend])
def test_warm_up_covers_every_shape(kind: type[Rows], device: type[HostBackend]) -> None:
    kind(num_drafts=3, drafter_max_len=600, max_len=600, exact_context=False, backend=device()).check_warm_up()


@every_kind
def test_row_beyond_drafter_length_continues_without_drafts(kind: type[Rows]) -> None:
    rows = kind(num_drafts=4, drafter_max_len=32)
    rows.start({"a": [5, 6, 7], "long": list(range(1, 60)), "near": list(range(2, 30))})
    drafted = rows.sample({"a": [1], "long": [2], "near": [3]})
    assert drafted == {"a": rows.expected("a"), "long": [], "near": rows.expected("near")}
    assert len(drafted["near"]) == 3
    rows.sample({"a": [2], "near": [4, 5, 6]})
    assert rows.sample({"near": [4, 5]})["near"] == []
    assert rows.sample({"a": [9]})["a"] == rows.expected("a")
