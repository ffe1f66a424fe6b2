"""Planning of batches from the scheduler's output."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.fakes import HostBackend, batches_of, cached, new_request, step
from tests.unit.runner.test_shapes import shapes
from vllm_gaudi_spec.attention.metadata import Inputs
from vllm_gaudi_spec.records import FAULTY, UNVERIFIED, Batch, Drafts, Shape
from vllm_gaudi_spec.runner.hidden_states import Located
from vllm_gaudi_spec.runner.planning import build_inputs, locate
from vllm_gaudi_spec.runner.requests import Requests
from vllm_gaudi_spec.runner.shapes import Shapes


@pytest.fixture
def small() -> Shapes:
    return shapes(max_num_seqs=4, max_tokens=64, max_len=96)


@pytest.fixture
def requests(small: Shapes) -> Requests:
    backend = HostBackend()
    return Requests(
        backend, max_rows=4, max_len=small.max_context + 1, block_sizes=[16], max_context=small.max_context, seed=0
    )  # type: ignore[arg-type]


def located(batch: Batch, requests: Requests) -> Located:
    return locate(batch.shape.phase, batch.inputs.split(), requests)


def inputs_of(batch: Batch, requests: Requests) -> Inputs:
    place = located(batch, requests)
    return build_inputs(batch.shape.queries, batch.inputs.split(), place, requests)


def plan(
    requests: Requests, small: Shapes, scheduled: object, num_drafts: dict[str, int] | None = None
) -> list[tuple[str, list[str], list[int], list[bool]]]:
    requests.apply(scheduled)  # type: ignore[arg-type]
    return [
        (batch.shape.phase, [request.req_id for request in batch.requests], batch.counts, batch.finishes)
        for batch in batches_of(scheduled, requests, small, num_drafts or {})  # type: ignore[arg-type]
    ]


def test_context_is_that_of_the_longest_row() -> None:
    """No row has both the context of one request and the chunk of another."""
    two = shapes(max_num_seqs=2, max_tokens=1024, max_len=2000, exact=False, prefill_rows=(1, 2))
    requests = Requests(
        HostBackend(), max_rows=2, max_len=two.max_context + 1, block_sizes=[16], max_context=two.max_context, seed=0
    )  # type: ignore[arg-type]
    ending = new_request("ending", [1] * 1990, list(range(1, 126)), num_computed=1900)
    scheduled = step({"ending": 90, "new": 400}, new=[ending, new_request("new", [2] * 400, list(range(126, 151)))])
    requests.apply(scheduled)
    (batch,) = batches_of(scheduled, requests, two, {})
    assert batch.shape in two.all()
    assert (batch.shape.rows, batch.shape.context) == (2, 2000)


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


def test_adjacent_chunks_share_a_rectangle_if_allowed(requests: Requests) -> None:
    wide = shapes(max_num_seqs=4, max_tokens=64, max_len=96, prefill_rows=(1, 2))
    scheduled = step(
        {"a": 9, "b": 12, "c": 5},
        new=[new_request(name, list(range(size)), [1]) for name, size in (("a", 9), ("b", 12), ("c", 5))],
    )
    assert [names for _, names, _, _ in plan(requests, wide, scheduled)] == [["a", "b"], ["c"]]


def test_chunks_are_split_where_padding_is_computed(requests: Requests) -> None:
    lists: dict[str, Any] = dict(prefill_buckets=(16, 512), prefill_rows=(1, 2, 4), max_tokens=2048, max_len=256)
    counts = {"a": 9, "b": 12, "c": 180, "d": 5}
    scheduled = step(counts, new=[new_request(name, list(range(size)), [1]) for name, size in counts.items()])
    padded = shapes(max_num_seqs=4, captures=True, **lists)
    assert [names for _, names, _, _ in plan(requests, padded, scheduled)] == [["a", "b"], ["c"], ["d"]]


def test_last_token_after_a_chunk_is_a_decode(requests: Requests, small: Shapes) -> None:
    """It must start where the chunk ended, not where the request was admitted."""
    first = step({"a": 24}, new=[new_request("a", list(range(100, 125)), [7, 9])])
    requests.apply(first)
    (chunk,) = batches_of(first, requests, small, {})
    place = located(chunk, requests)
    requests.set_computed(chunk.inputs.split().rows_B, place.starts_B + place.num_real_B)
    second = step({"a": 1}, running=cached({"a": 24}))
    requests.apply(second)
    (batch,) = batches_of(second, requests, small, {})
    inputs = inputs_of(batch, requests)
    assert inputs.token_ids_T.tolist() == [124]
    assert inputs.positions_T.tolist() == [24]
    assert inputs.slots[0].tolist() == [9 * 16 + 8]


def test_inputs_of_a_padded_rectangle(requests: Requests, small: Shapes) -> None:
    """The chunk covers positions 16 to 19. Real tokens go to their blocks; padding is token 0 at position 0 in the pad
    block."""
    scheduled = step({"a": 4}, new=[new_request("a", list(range(100, 125)), [7, 9], num_computed=16)])
    requests.apply(scheduled)
    (batch,) = batches_of(scheduled, requests, small, {})
    assert batch.shape == Shape("prefill", 1, 16, small.max_context)
    inputs = inputs_of(batch, requests)
    assert inputs.token_ids_T.tolist() == [116, 117, 118, 119] + [0] * 12
    assert inputs.positions_T.tolist() == [16, 17, 18, 19] + [0] * 12
    assert inputs.slots[0].tolist() == [9 * 16 + offset for offset in range(4)] + list(range(4, 16))
    assert inputs.calls[0].starts_B.tolist() == [16]


def test_decodes_start_at_the_device_count(requests: Requests, small: Shapes) -> None:
    requests.apply(step({"a": 3}, new=[new_request("a", [1, 2, 3], [5])]))
    requests.computed_R[requests.by_id["a"].row] = 7  # the device is ahead of what the host was told
    scheduled = step({"a": 1}, running=cached({"a": 4}))
    requests.apply(scheduled)
    (batch,) = batches_of(scheduled, requests, small, {})
    inputs = inputs_of(batch, requests)
    assert inputs.positions_T.tolist() == [7]
    assert inputs.slots[0].tolist() == [5 * 16 + 7]


def test_a25_pad_rows_touch_only_the_pad_block(requests: Requests, small: Shapes) -> None:
    wide = shapes(max_num_seqs=4, max_tokens=64, max_len=96, batch_buckets=(4,))
    scheduled = step({"a": 1}, new=[new_request("a", [1], [5])])
    requests.apply(scheduled)
    (batch,) = batches_of(scheduled, requests, wide, {})
    inputs = inputs_of(batch, requests)
    assert inputs.slots[0].tolist() == [80, 1, 2, 3], "each to a slot of its own"
    assert torch.equal(inputs.calls[0].block_table_BW[1:], torch.zeros(3, wide.max_context // 16, dtype=torch.int32))


def drafting() -> tuple[Requests, Shapes]:
    """Return three requests that decode from position 3 on: "a" has two drafts, "b" three, and "c" none."""
    wide = shapes(max_num_seqs=4, max_tokens=64, max_len=96, drafts=3)
    backend = HostBackend()
    requests = Requests(
        backend, max_rows=4, max_len=wide.max_context + 4, block_sizes=[16], max_context=wide.max_context, seed=0
    )  # type: ignore[arg-type]
    names = {"a": [5], "b": [6], "c": [7]}
    requests.apply(step(dict.fromkeys(names, 4), new=[new_request(n, [1, 2, 3, 4], ids) for n, ids in names.items()]))
    rows = torch.tensor([requests.by_id[name].row for name in names])
    requests.set_computed(rows, torch.tensor([3, 3, 3]))
    tokens = torch.tensor([[50, 51, 0], [60, 61, 62], [0, 0, 0]], dtype=torch.int32)
    requests.put_drafts(rows, torch.tensor([4, 4, 4]), Drafts(tokens, torch.tensor([2, 3, 0], dtype=torch.int32)))
    return requests, wide


def test_verify_step_shape_does_not_depend_on_drafts() -> None:
    requests, wide = drafting()
    # The scheduler had room for two of b's three drafts; in c's places the device knows no draft.
    scheduled = step({"a": 4, "b": 3, "c": 4}, running=cached({"a": 4, "b": 4, "c": 4}))
    requests.apply(scheduled)
    (batch,) = batches_of(scheduled, requests, wide, {"a": 3, "b": 2, "c": 3})
    assert batch.shape == Shape("decode", 3, 4, wide.max_context)
    assert located(batch, requests).num_real_B.tolist() == [3, 3, 1]
    inputs = inputs_of(batch, requests)
    assert inputs.token_ids_T.view(3, 4).tolist() == [[4, 50, 51, 0], [4, 60, 61, 0], [4, 0, 0, 0]]
    assert inputs.positions_T.view(3, 4).tolist() == [[3, 4, 5, 0], [3, 4, 5, 0], [3, 0, 0, 0]]
    # What is not verified writes to the pad block.
    blocks = (inputs.slots[0] // 16).view(3, 4).tolist()
    assert blocks == [[5, 5, 5, 0], [6, 6, 6, 0], [7, 0, 0, 0]]


def test_step_has_the_narrowest_shape_for_its_drafts() -> None:
    requests, wide = drafting()
    widths = replace(wide, decode_queries=(1, 2, 4))
    scheduled = step({"a": 4, "b": 3, "c": 4}, running=cached({"a": 4, "b": 4, "c": 4}))
    requests.apply(scheduled)
    for max_drafts, num_queries in ((0, 1), (1, 2), (2, 4), (3, 4)):
        (batch,) = batches_of(scheduled, requests, widths, {"a": max_drafts, "b": 0})
        assert batch.shape.queries == num_queries


def test_step_without_drafts_has_one_query() -> None:
    requests, wide = drafting()
    scheduled = step({"c": 1, "a": 1}, running=cached({"c": 4, "a": 4}))
    requests.apply(scheduled)
    (batch,) = batches_of(scheduled, requests, wide, {"c": 0})
    assert batch.shape == Shape("decode", 2, 1, wide.max_context)
    assert located(batch, requests).num_real_B.tolist() == [1, 1], "drafts that the scheduler dropped are not verified"


def test_placeholders_of_a_new_request_are_not_drafts(requests: Requests) -> None:
    """vLLM schedules 1 + k positions for a request admitted with a single token left."""
    wide = shapes(max_num_seqs=4, max_tokens=64, max_len=96, drafts=3)
    new = new_request("c", list(range(17)), [5, 6], num_computed=16)
    assert plan(requests, wide, step({"c": 4}, new=[new]), {"c": 3}) == [("decode", ["c"], [1], [True])]


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
