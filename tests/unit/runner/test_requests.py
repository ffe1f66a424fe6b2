"""The rows of running requests: which request has which row, and that nothing of an ended request is left in it."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.fakes import HostBackend, cached, make_requests, new_request, step
from vllm_gaudi_spec.attention.metadata import FlatBlocks
from vllm_gaudi_spec.records import DECODE, NO_ROW, Shape
from vllm_gaudi_spec.runner.requests import Requests


@pytest.fixture
def requests() -> Requests:
    return make_requests()


def table(requests: Requests, req_id: str) -> list[int]:
    return requests.tables_np[0][requests.by_id[req_id].row].tolist()


def history(requests: Requests, req_id: str, length: int) -> list[int]:
    return requests.history_RM[requests.by_id[req_id].row, :length].tolist()


def test_simultaneous_admissions_are_written_in_groups() -> None:
    backend = HostBackend()
    shapes: list[int] = []

    def graph(function: Any) -> Any:
        def run(rows_N: torch.Tensor, *tensors: torch.Tensor) -> None:
            shapes.append(len(rows_N))
            function(rows_N, *tensors)

        return run

    backend.graphs.graph = graph
    requests = make_requests(backend, max_rows=20)
    requests.warm_up()
    assert shapes == [1, 8]
    requests.num_drafts_R[:] = 3
    names = [f"request-{number}" for number in range(19)]
    requests.apply(step({}, new=[new_request(name, [5, number], [number + 1]) for number, name in enumerate(names)]))
    assert shapes[2:] == [8, 8, 1, 1, 1]
    for number, name in enumerate(names):
        assert history(requests, name, 3) == [5, number, 0]
        assert requests.num_drafts_R[requests.by_id[name].row] == 0, "drafts of the row's last request are dropped"


class Backwards(set[str]):
    """Sets of texts have another order in each process."""

    def __iter__(self) -> Iterator[str]:
        return reversed(list(super().__iter__()))


@pytest.mark.parametrize("kind", ["finished", "preempted"])
def test_every_rank_assigns_the_same_rows(kind: str) -> None:
    given = []
    for order in (set, Backwards):
        ranks = make_requests()
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


def test_unseeded_requests_get_different_seeds(requests: Requests) -> None:
    from vllm.sampling_params import SamplingParams

    words = set()
    for _ in range(20):
        requests.apply(step({"a": 1}, new=[new_request("a", [1], [1], params=SamplingParams())], finished={"a"}))
        words.add(requests.by_id["a"].seed_words)
    assert len(words) == 20


class FlatBackend(HostBackend):
    traits = replace(HostBackend.traits, flat_decode=True)


def flat_requests(block_sizes: list[int], **options: Any) -> Requests:
    return make_requests(FlatBackend(), max_rows=4, max_len=256, block_sizes=block_sizes, max_context=192, **options)


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


@pytest.mark.parametrize("in_flight", [0, 6])
def test_blocks_outside_the_window_are_not_listed(in_flight: int) -> None:
    """A running request keeps its old blocks in the table even if they were reused. The host's count of its tokens may
    be too high by `in_flight`."""
    requests = flat_requests([16, 16], windows=[None, 20], in_flight=in_flight)
    rows_np = admitted(requests, {"a": (list(range(1, 9)), list(range(11, 19)))})
    for end in range(1, 129):
        every, some = requests.decode_blocks(rows_np, [end], Shape(DECODE, 2, 1, 16)).flat
        assert [entry[2] for entry in entries(every) if entry[0]] == list(range(-(-end // 16)))
        # The earliest query stands `in_flight` before the end at most, and sees itself and 19 keys before it.
        first_key = max(end - in_flight - 20, 0)
        assert [entry[2] for entry in entries(some) if entry[0]] == list(range(first_key // 16, -(-end // 16)))
        assert (every.shape, some.shape) == ((3, 16), (3, 6)), "no longer than needed, whatever the context"


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
    found = requests.decode_blocks(rows_np, ends[::-1], Shape(DECODE, len(rows_np), 1, num_blocks))
    for flat, table, size in zip(found.flat, found.tables, found.sizes, strict=True):
        needed = [
            (int(table[row, place]), row, place)
            for row, end in enumerate(ends[::-1])
            for place in range(-(-end // size))
        ]
        assert [entry for entry in entries(flat) if entry[0]] == needed
        assert {entry for entry in entries(flat) if not entry[0]} <= {(0, len(rows_np), 0)}


def test_blocks_read_in_place_are_listed_with_their_owners() -> None:
    requests, rng = flat_requests([16]), random.Random(0)
    ends = [rng.randint(1, 192) for _ in range(4)]
    free = rng.sample(range(1, 60), 59)
    blocks = {str(row): ([free.pop() for _ in range(-(-end // 16))],) for row, end in enumerate(ends)}
    rows_np = admitted(requests, blocks)
    last_block = requests.find_last_block([*requests.by_id.values()])
    assert last_block == max(max(ids) for (ids,) in blocks.values())
    (owners_np,) = requests.decode_blocks(rows_np, ends[::-1], Shape(DECODE, 5, 1, 60, in_place=True)).flat
    assert owners_np.dtype == np.int32
    expected = {ids[index]: [3 - row, index] for row, (ids,) in enumerate(blocks.values()) for index in range(len(ids))}
    assert owners_np.T.tolist() == [expected.get(block, [5, 0]) for block in range(60)]


def test_long_rows_have_entries_of_two_blocks() -> None:
    """Entries begin at even blocks, also the one in which a window begins at an odd block."""
    requests = flat_requests([2, 2], windows=[None, 140])
    ids = list(range(1, 89))
    rows_np = admitted(requests, {"a": (ids, ids)})
    every, some = requests.decode_blocks(rows_np, [175], Shape(DECODE, 2, 1, 150)).flat
    assert (every.shape, some.shape) == ((4, (150 + 2) // 2), (4, (2 * 71 + 4) // 2))
    assert entries(every)[:88] == [(block, 0, block - 1) for block in ids]
    assert entries(some)[:71] == [(block, 0, block - 1) for block in ids[17:]]
    assert FlatBlocks.unpack(torch.from_numpy(some)).index_N[:36].tolist() == list(range(16, 88, 2))


def test_encoder_rows_have_consecutive_blocks() -> None:
    """Encoders keep no KV, so the scheduler gives their requests no blocks."""
    requests = make_requests(keeps_kv=False)
    (table_BW,) = requests.blocks(np.array([0, 1, 2, 3]), [33, 1, 16], 64).tables
    assert table_BW.tolist() == [[1, 2, 3, 0], [4, 0, 0, 0], [5, 0, 0, 0], [0, 0, 0, 0]]
