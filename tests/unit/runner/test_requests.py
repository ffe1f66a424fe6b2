"""The rows of running requests: which request has which row, and that nothing of an ended request is left in it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.fakes import HostBackend, cached, new_request, step
from vllm_gaudi_spec.attention.metadata import FlatBlocks
from vllm_gaudi_spec.records import NO_ROW, Drafts, Verification
from vllm_gaudi_spec.runner.requests import Requests
from vllm_gaudi_spec.sampling.noise import fold_seed


@pytest.fixture
def requests() -> Requests:
    return Requests(HostBackend(), max_rows=3, max_len=64, block_sizes=[16], max_context=64, seed=0)  # type: ignore[arg-type]


def table(requests: Requests, req_id: str) -> list[int]:
    return requests.tables_np[0][requests.by_id[req_id].row].tolist()


def history(requests: Requests, req_id: str, length: int) -> list[int]:
    return requests.history_RM[requests.by_id[req_id].row, :length].tolist()


def test_admission_and_growth(requests: Requests) -> None:
    requests.apply(step({"a": 5}, new=[new_request("a", [7, 8, 9, 7, 5], [4])]))
    assert history(requests, "a", 6) == [7, 8, 9, 7, 5, 0]
    assert requests.by_id["a"].seed_words == fold_seed(1)
    requests.apply(step({"a": 1}, running=cached({"a": 16}, blocks={"a": [9]})))
    assert table(requests, "a") == [4, 9, 0, 0]
    assert requests.by_id["a"].num_computed == 16


def test_id_may_finish_and_return_in_one_step(requests: Requests) -> None:
    requests.apply(step({"a": 2}, new=[new_request("a", [1, 2, 3], [1, 2])]))
    requests.apply(step({"a": 1}, new=[new_request("a", [4], [3])], finished={"a"}))
    assert history(requests, "a", 4) == [4, 0, 0, 0], "nothing of the old request is left"
    assert table(requests, "a") == [3, 0, 0, 0]


def test_simultaneous_admissions_are_written_in_groups() -> None:
    backend = HostBackend()
    shapes: list[int] = []

    def graph(function: Any) -> Any:
        def run(rows_N: torch.Tensor, *tensors: torch.Tensor) -> None:
            shapes.append(len(rows_N))
            function(rows_N, *tensors)

        return run

    backend.graphs.graph = graph
    requests = Requests(backend, max_rows=20, max_len=64, block_sizes=[16], max_context=64, seed=0)  # type: ignore[arg-type]
    requests.warm_up()
    assert shapes == [1, 8]
    requests.num_drafts_R[:] = 3
    names = [f"request-{number}" for number in range(19)]
    requests.apply(step({}, new=[new_request(name, [5, number], [number + 1]) for number, name in enumerate(names)]))
    assert shapes[2:] == [8, 8, 1, 1, 1]
    for number, name in enumerate(names):
        assert history(requests, name, 3) == [5, number, 0]
        assert requests.num_drafts_R[requests.by_id[name].row] == 0, "drafts of the row's last request are dropped"


class Forwards(set[str]):
    """Sets of texts have another order in each process."""

    backwards = False

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__(), reverse=self.backwards))


class Backwards(Forwards):
    backwards = True


@pytest.mark.parametrize("kind", ["finished", "preempted"])
def test_every_rank_assigns_the_same_rows(kind: str) -> None:
    given = []
    for order in (Forwards, Backwards):
        ranks = Requests(HostBackend(), max_rows=3, max_len=64, block_sizes=[16], max_context=64, seed=0)  # type: ignore[arg-type]
        ranks.apply(step({}, new=[new_request(name, [1, 2], [block]) for block, name in enumerate("abc", 1)]))
        ranks.apply(step({}, **{kind: order({"a", "b", "c"})}))
        ended = list(ranks.ended)
        ranks.apply(step({}, new=[new_request(name, [1, 2], [block]) for block, name in enumerate("def", 1)]))
        given.append((ended, [ranks.by_id[name].row for name in "def"]))
    assert given[0] == given[1]


@pytest.mark.parametrize("contract", ["V1", "V2"])
def test_preemption_replaces_blocks_and_keeps_the_seed(requests: Requests, contract: str) -> None:
    requests.apply(step({"a": 3}, new=[new_request("a", [1, 2, 3], [1])]))
    requests.by_id["a"].seed_words = (11, 12)  # as if it had come without a seed
    requests.apply(step({}, preempted={"a"}))
    assert requests.by_id["a"].row == NO_ROW
    known = [1, 2, 3, 40, 41]
    if contract == "V1":
        resumed = cached({"a": 2}, blocks={"a": [5, 6]}, resumed={"a": known})
        requests.apply(step({"a": 3}, running=resumed))
    else:
        again = new_request("a", [1, 2, 3], [5, 6], num_computed=2, prefill=known)
        requests.apply(step({"a": 3}, new=[again]))
    assert table(requests, "a") == [5, 6, 0, 0]
    assert history(requests, "a", 6) == [*known, 0]
    assert requests.by_id["a"].seed_words == (11, 12)
    assert requests.by_id["a"].outputs == [40, 41]


def test_preempted_request_may_be_aborted(requests: Requests) -> None:
    requests.apply(step({"a": 3}, new=[new_request("a", [1, 2, 3], [1])]))
    requests.apply(step({}, preempted={"a"}, finished={"a"}))
    assert "a" not in requests.by_id
    for name in "bcd":
        requests.apply(step({name: 1}, new=[new_request(name, [1], [1])]))


def test_rows_run_out_only_when_all_are_in_use(requests: Requests) -> None:
    for name in "abc":
        requests.apply(step({name: 1}, new=[new_request(name, [1], [1])]))
    assert {requests.by_id[name].row for name in "abc"} == {0, 1, 2}
    requests.apply(step({"d": 1}, new=[new_request("d", [9], [2])], finished={"b"}))
    assert len({requests.by_id[name].row for name in "acd"}) == 3


def test_unseeded_requests_get_different_seeds(requests: Requests) -> None:
    from vllm.sampling_params import SamplingParams

    words = set()
    for _ in range(20):
        requests.apply(step({"a": 1}, new=[new_request("a", [1], [1], params=SamplingParams())], finished={"a"}))
        words.add(requests.by_id["a"].seed_words)
    assert len(words) == 20


def test_advance_writes_only_sampled_tokens(requests: Requests) -> None:
    requests.apply(step({"a": 3, "b": 2}, new=[new_request("a", [1, 2, 3], [1]), new_request("b", [4, 5], [2])]))
    row_a, row_b = requests.by_id["a"].row, requests.by_id["b"].row
    rows = torch.tensor([row_b, row_a, requests.pad_row])
    verification = Verification(
        tokens_BQ=torch.tensor([[50, 51, 52], [60, 61, 62], [70, 71, 72]], dtype=torch.int32),
        num_sampled_B=torch.tensor([2, 3, 1], dtype=torch.int32),
    )
    requests.advance(rows, torch.tensor([1, 2, 0], dtype=torch.int32), verification)
    assert history(requests, "b", 6) == [4, 5, 50, 51, 0, 0]
    assert history(requests, "a", 7) == [1, 2, 3, 60, 61, 62, 0]
    assert requests.computed_R[row_b] == 3, "all but the newest token have KV"
    assert requests.computed_R[row_a] == 5
    assert requests.computed_R[requests.pad_row] == 0


def test_drafts_follow_the_last_token_until_advance(requests: Requests) -> None:
    requests.apply(step({"a": 3, "b": 2}, new=[new_request("a", [1, 2, 3], [1]), new_request("b", [4, 5], [2])]))
    row_a, row_b = requests.by_id["a"].row, requests.by_id["b"].row
    rows = torch.tensor([row_a, row_b, requests.pad_row])
    tokens = torch.tensor([[50, 51, 52], [60, 61, 62], [70, 71, 72]], dtype=torch.int32)
    lengths = torch.tensor([3, 2, 0], dtype=torch.int32)
    requests.put_drafts(rows, lengths, Drafts(tokens, torch.tensor([2, 0, 3], dtype=torch.int32)))
    assert history(requests, "a", 6) == [1, 2, 3, 50, 51, 0]
    assert history(requests, "b", 4) == [4, 5, 0, 0]
    assert requests.num_drafts_R[rows].tolist() == [2, 0, 0], "padding never has a draft"
    verification = Verification(torch.tensor([[80]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32))
    requests.advance(rows[:1], torch.tensor([2], dtype=torch.int32), verification)
    assert history(requests, "a", 4) == [1, 2, 3, 80]
    assert requests.num_drafts_R[row_a] == 0, "what stands behind the new token was drafted for another"


# --- blocks of a decode, listed for all rows at once ---

WINDOW = 0  # what a sliding window has passed


class FlatBackend(HostBackend):
    traits = replace(HostBackend.traits, flat_decode=True)


def flat_requests(block_sizes: list[int]) -> Requests:
    return Requests(FlatBackend(), max_rows=4, max_len=256, block_sizes=block_sizes, max_context=192, seed=0)  # type: ignore[arg-type]


def admitted(requests: Requests, blocks: dict[str, tuple[list[int], ...]]) -> np.ndarray:
    """Return rows of a batch: the last admitted first, then one of padding."""
    new = []
    for name, ids in blocks.items():
        record = new_request(name, [1, 2], [])
        record.block_ids = ids
        new.append(record)
    requests.apply(step(dict.fromkeys(blocks, 1), new=new))
    return np.array([*reversed([requests.by_id[name].row for name in blocks]), requests.pad_row])


def entries(packed_np: np.ndarray) -> list[tuple[int, ...]]:
    """Return block, row and index of each block of the entries, without the padding of those that have one."""
    assert packed_np.dtype == np.int32
    listed = FlatBlocks.unpack(torch.from_numpy(packed_np))
    group = listed.group_size
    found = []
    for number, (row, place) in enumerate(zip(listed.rows_N.tolist(), listed.index_N.tolist(), strict=True)):
        blocks = listed.ids[number * group : (number + 1) * group].tolist()
        found += [(block, row, place + i) for i, block in enumerate(blocks) if block] or [(0, row, place)]
    return found


def test_decode_lists_blocks_of_each_row_once_in_order() -> None:
    requests = flat_requests([16])
    rows_np = admitted(requests, {"a": ([4, 9, 5],), "b": ([7],), "c": ([3, 8],)})
    found = requests.decode_blocks(rows_np, [17, 16, 48], 10)
    assert found.sizes == (16,)
    (flat,) = found.flat
    used = [(3, 0, 0), (8, 0, 1), (7, 1, 0), (4, 2, 0), (9, 2, 1), (5, 2, 2)]
    assert entries(flat) == used + [(0, 4, 0)] * 4
    (table,) = found.tables
    assert table[:, :4].tolist() == [[3, 8, 0, 0], [7, 0, 0, 0], [4, 9, 5, 0], [0, 0, 0, 0]]
    assert table.shape[1] * 16 >= 192, "wide enough for every position, so that its shape says nothing of the rows"


def test_blocks_after_the_end_of_a_row_are_not_listed() -> None:
    """The scheduler may have allocated more blocks than this step reads. Blocks that are not allocated cannot be
    listed."""
    requests = flat_requests([16])
    rows_np = admitted(requests, {"a": ([4, 9, 5],), "b": ([7],)})
    (flat,) = requests.decode_blocks(rows_np, [200, 16], 4).flat
    assert entries(flat) == [(7, 0, 0), (4, 1, 0)] + [(0, 3, 0)] * 2


def test_null_blocks_of_a_sliding_window_are_not_listed() -> None:
    requests = flat_requests([16])
    rows_np = admitted(requests, {"a": ([WINDOW, WINDOW, 5, 6],), "b": ([2, 3],)})
    (flat,) = requests.decode_blocks(rows_np, [32, 64], 6).flat
    assert entries(flat) == [(2, 0, 0), (3, 0, 1), (5, 1, 2), (6, 1, 3), (0, 3, 0), (0, 3, 0)]


@pytest.mark.parametrize("in_flight", [0, 6])
def test_blocks_outside_the_window_are_not_listed(in_flight: int) -> None:
    """A running request keeps its old blocks in the table even if they were reused. The host's count of its tokens may
    be too high by `in_flight`."""
    backend: Any = FlatBackend()
    requests = Requests(
        backend,
        max_rows=4,
        max_len=256,
        block_sizes=[16, 16],
        max_context=192,
        seed=0,
        windows=[None, 20],
        in_flight=in_flight,  # type: ignore[arg-type]
    )
    rows_np = admitted(requests, {"a": (list(range(1, 9)), list(range(11, 19)))})
    for end in range(1, 129):
        every, some = requests.decode_blocks(rows_np, [end], 16).flat
        assert [entry[2] for entry in entries(every) if entry[0]] == list(range(-(-end // 16)))
        # The earliest query stands `in_flight` before the end at most, and sees itself and 19 keys before it.
        first_key = max(end - in_flight - 20, 0)
        assert [entry[2] for entry in entries(some) if entry[0]] == list(range(first_key // 16, -(-end // 16)))
        assert (every.shape, some.shape) == ((3, 16), (3, 6)), "no longer than needed, whatever the context"


def test_each_block_size_has_its_own_list() -> None:
    requests = flat_requests([16, 64])
    rows_np = admitted(requests, {"a": ([4, 9, 5], [2]), "b": ([7, 8, 10, 11, 12], [3, 6])})
    found = requests.decode_blocks(rows_np, [70, 40], 8)
    assert found.sizes == (16, 64)
    small, large = found.flat
    rows_of_b = [(block, 0, place) for place, block in enumerate([7, 8, 10, 11, 12])]
    assert entries(small) == [*rows_of_b, (4, 1, 0), (9, 1, 1), (5, 1, 2)]
    assert entries(large) == [(3, 0, 0), (6, 0, 1), (2, 1, 0)] + [(0, 3, 0)] * 5


@pytest.mark.parametrize("seed", range(20))
def test_block_lists_agree_with_block_tables(seed: int) -> None:
    """Both name the blocks that hold a row's tokens."""
    rng = random.Random(seed)
    requests, free = flat_requests([4, 32]), list(range(1, 300))
    rng.shuffle(free)
    ends = [rng.randint(1, 192) for _ in range(rng.randint(1, 4))]
    blocks = {
        str(i): tuple([free.pop() for _ in range(-(-end // size))] for size in (4, 32)) for i, end in enumerate(ends)
    }
    rows_np = admitted(requests, blocks)
    num_blocks = sum(-(-end // 4) for end in ends)  # no more than fit
    found = requests.decode_blocks(rows_np, ends[::-1], num_blocks)
    for flat, table, size in zip(found.flat, found.tables, found.sizes, strict=True):
        needed = [
            (int(table[row, place]), row, place)
            for row, end in enumerate(ends[::-1])
            for place in range(-(-end // size))
        ]
        assert [entry for entry in entries(flat) if entry[0]] == needed
        assert {entry for entry in entries(flat) if not entry[0]} <= {(0, len(rows_np), 0)}


def test_long_rows_have_entries_of_two_blocks() -> None:
    """Entries begin at even blocks, also the one in which a window begins at an odd block."""
    backend: Any = FlatBackend()
    requests = Requests(
        backend,
        max_rows=4,
        max_len=256,
        block_sizes=[2, 2],
        max_context=192,
        seed=0,
        windows=[None, 140],  # type: ignore[arg-type]
    )
    ids = list(range(1, 89))
    rows_np = admitted(requests, {"a": (ids, ids)})
    every, some = requests.decode_blocks(rows_np, [175], 150).flat
    assert (every.shape, some.shape) == ((4, (150 + 2) // 2), (4, (2 * 71 + 4) // 2))
    assert entries(every)[:88] == [(block, 0, block - 1) for block in ids]
    assert entries(some)[:71] == [(block, 0, block - 1) for block in ids[17:]]
    assert FlatBlocks.unpack(torch.from_numpy(some)).index_N[:36].tolist() == list(range(16, 88, 2))


def test_warm_up_and_steps_copy_tensors_of_the_same_shapes() -> None:
    """Otherwise steps would need graphs that warm-up has not made."""
    requests = flat_requests([16])
    rows_np = admitted(requests, {"a": ([1, 2, 3],)})
    warm = requests.decode_blocks(np.full_like(rows_np, requests.pad_row), [], 8)
    used = requests.decode_blocks(rows_np, [40], 8)
    assert [part.shape for part in (*warm.tables, *warm.flat)] == [part.shape for part in (*used.tables, *used.flat)]


def test_decode_has_only_tables_without_flat_decode(requests: Requests) -> None:
    requests.apply(step({"a": 2}, new=[new_request("a", [1, 2], [4, 9])]))
    found = requests.decode_blocks(np.array([requests.by_id["a"].row, requests.pad_row]), [2], 32)
    assert found.flat == ()
    assert found.tables[0].tolist() == [[4, 9], [0, 0]]


def test_encoder_rows_have_consecutive_blocks() -> None:
    """Encoders keep no KV, so the scheduler gives their requests no blocks."""
    requests = Requests(
        HostBackend(),  # type: ignore[arg-type]
        max_rows=3,
        max_len=64,
        block_sizes=[16],
        max_context=64,
        seed=0,
        keeps_kv=False,
    )
    (table_BW,) = requests.blocks(np.array([0, 1, 2, 3]), [33, 1, 16], 64).tables
    assert table_BW.tolist() == [[1, 2, 3, 0], [4, 0, 0, 0], [5, 0, 0, 0], [0, 0, 0, 0]]
