"""Planning of batches from the scheduler's output."""

import pytest
import torch

from tests.support.fakes import batches_of, cached, make_requests, new_request, step
from tests.unit.runner.test_shapes import shapes
from vllm_gaudi_spec.records import FAULTY, UNVERIFIED, Batch, Drafts
from vllm_gaudi_spec.runner.hidden_states import Located
from vllm_gaudi_spec.runner.planning import build_inputs, locate
from vllm_gaudi_spec.runner.requests import Requests
from vllm_gaudi_spec.runner.shapes import Shapes


@pytest.fixture
def small() -> Shapes:
    return shapes(max_num_seqs=4, max_tokens=64, max_len=96)


@pytest.fixture
def requests(small: Shapes) -> Requests:
    return make_requests(max_rows=4, max_len=small.max_context + 1, max_context=small.max_context)


def located(batch: Batch, requests: Requests) -> Located:
    return locate(batch.shape.phase, batch.inputs.split(), requests)


def plan(
    requests: Requests, small: Shapes, scheduled: object, num_drafts: dict[str, int] | None = None
) -> list[tuple[str, list[str], list[int], list[bool]]]:
    requests.apply(scheduled)
    return [
        (batch.shape.phase, [request.req_id for request in batch.requests], batch.counts, batch.finishes)
        for batch in batches_of(scheduled, requests, small, num_drafts or {})
    ]


def test_running_decodes_come_first(requests: Requests, small: Shapes) -> None:
    first = step(
        {"a": 3, "b": 40, "c": 1, "d": 2},
        new=[
            new_request("a", [1, 2, 3], [1]),
            new_request("b", list(range(50)), [2, 3, 4]),
            # One token left after a prefix hit: a decode, but behind the chunk whose blocks it may read, and before the
            # one that may read its own.
            new_request("c", list(range(17)), [5, 6], num_computed=16),
            new_request("d", list(range(18)), [5, 7], num_computed=16),
        ],
    )
    assert plan(requests, small, first) == [
        ("prefill", ["a"], [3], [True]),
        ("prefill", ["b"], [40], [False]),
        ("decode", ["c"], [1], [True]),
        ("prefill", ["d"], [2], [True]),
    ]
    second = step({"b": 10, "a": 1, "c": 1}, running=cached({"a": 3, "b": 40, "c": 17}))
    assert plan(requests, small, second) == [
        # First, since a block that a decode fills may be hit by a prompt of this very step.
        ("decode", ["a", "c"], [1, 1], [True, True]),
        ("prefill", ["b"], [10], [True]),
    ]


def test_a25_pad_rows_touch_only_the_pad_block(requests: Requests, small: Shapes) -> None:
    wide = shapes(max_num_seqs=4, max_tokens=64, max_len=96, batch_buckets=(4,))
    scheduled = step({"a": 1}, new=[new_request("a", [1], [5])])
    requests.apply(scheduled)
    (batch,) = batches_of(scheduled, requests, wide, {})
    inputs = build_inputs(batch.shape.queries, batch.inputs.split(), located(batch, requests), requests)
    assert inputs.slots[0].tolist() == [80, 1, 2, 3], "each to a slot of its own"
    assert torch.equal(inputs.calls[0].block_table_BW[1:], torch.zeros(3, wide.max_context // 16, dtype=torch.int32))


def drafting() -> tuple[Requests, Shapes]:
    """Return three requests that decode from position 3 on: "a" has two drafts, "b" three, and "c" none."""
    wide = shapes(max_num_seqs=4, max_tokens=64, max_len=96, drafts=3)
    requests = make_requests(max_rows=4, max_len=wide.max_context + 4, max_context=wide.max_context)
    names = {"a": [5], "b": [6], "c": [7]}
    requests.apply(step(dict.fromkeys(names, 4), new=[new_request(n, [1, 2, 3, 4], ids) for n, ids in names.items()]))
    rows = torch.tensor([requests.by_id[name].row for name in names])
    requests.set_computed(rows, torch.tensor([3, 3, 3]))
    tokens = torch.tensor([[50, 51, 0], [60, 61, 62], [0, 0, 0]], dtype=torch.int32)
    requests.put_drafts(rows, torch.tensor([4, 4, 4]), Drafts(tokens, torch.tensor([2, 3, 0], dtype=torch.int32)))
    return requests, wide


def test_faulty_row_is_a_plain_decode() -> None:
    requests, wide = drafting()
    rows = torch.tensor([requests.by_id["a"].row])
    requests.put_drafts(rows, torch.tensor([4]), Drafts(torch.tensor([[9, 9, 9]]).int(), torch.tensor([FAULTY]).int()))
    scheduled = step({"a": 4, "b": 3}, running=cached({"a": 4, "b": 4}))
    requests.apply(scheduled)
    (batch,) = batches_of(scheduled, requests, wide, {"a": 3, "b": 2})
    assert located(batch, requests).num_real_B.tolist()[:2] == [1, 3]
    assert requests.count_reported_drafts(rows, torch.zeros(1)).tolist() == [FAULTY]


def test_drafts_removed_by_a_grammar_are_unverified() -> None:
    requests, _ = drafting()
    rows = torch.tensor([requests.by_id[name].row for name in "ab"])
    drafts = Drafts(torch.tensor([[9, 9, 9]] * 2).int(), torch.tensor([2, 0]).int())
    requests.put_drafts(rows, torch.tensor([4, 4]), drafts)
    assert requests.count_reported_drafts(rows, torch.tensor([0, 0])).tolist() == [UNVERIFIED, 0]
    assert requests.count_reported_drafts(rows, torch.tensor([1, 0])).tolist() == [1, 0]
