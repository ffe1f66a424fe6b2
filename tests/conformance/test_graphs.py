"""`graph`: one graph for each set of shapes and static values, whose results the next run overwrites."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from tests.conformance.graphs import compiled
from vllm_gaudi_spec.devices.base import DeviceBackend

# Devices that have a mode in which graphs are made and nothing is computed.
KNOW_COMPILING_ONLY = ("hpu", "hpu-emulated")


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


def numbers(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_one_graph_for_each_set_of_shapes_and_static_values(backend: DeviceBackend) -> None:
    calls: list[int] = []

    def scale(x: torch.Tensor, by: int, pair: Pair, how: tuple[str, bool]) -> Pair:
        calls.append(by)
        return Pair(x * by + pair.left, pair.right if how == ("plain", True) else None)

    graph, upload, one = backend.graphs.graph(scale), backend.memory.upload, numbers(1.0)
    cases: list[tuple[torch.Tensor, int, Pair, tuple[str, bool]]] = [
        (numbers(1, 2), 3, Pair(one, None), ("plain", True)),
        (numbers(1, 2), 4, Pair(one, None), ("plain", True)),
        (numbers(1, 2, 3), 3, Pair(one, None), ("plain", True)),
        (numbers(1, 2, dtype=torch.int32), 3, Pair(one, None), ("plain", True)),
        (numbers(1, 2), 3, Pair(one, numbers(7)), ("plain", True)),
        (numbers(1, 2), 3, Pair(one, numbers(7)), ("plain", False)),
        (numbers(1, 2), 3, Pair(one, numbers(7)), ("other", True)),
    ]
    made, asked = compiled(backend), []
    # Regions do not read what is returned as it is: for three of the cases they are those of others.
    num_different = len(cases) - (3 if backend.traits.mode == "compiled" else 0)
    for added in range(3):
        for x, by, pair, how in cases:
            right = None if pair.right is None else upload(pair.right + added)
            found = graph(upload(x + added), by, Pair(upload(pair.left), right), how)
            assert isinstance(found, Pair)
            assert backend.memory.download(found.left).tolist() == ((x + added) * by + pair.left).tolist()
            assert (found.right is None) == (pair.right is None or how != ("plain", True))
            if found.right is not None:
                assert backend.memory.download(found.right).tolist() == [7.0 + added]
        asked.append(len(calls))
        if backend.traits.captures:
            assert compiled(backend) == made + num_different
    if backend.traits.captures:
        assert asked[0] == asked[1] == asked[2], "the function is asked for new graphs only"


def test_results_stay_until_their_graph_runs_again(backend: DeviceBackend) -> None:
    """Whatever other graphs compute in between; a result may be what was given."""
    give, negate = backend.graphs.graph(lambda x: x), backend.graphs.graph(lambda x: (x.repeat(500) * -1)[: x.shape[0]])
    large = backend.graphs.graph(lambda x: ((x.repeat(1000) * 3).cumsum(0) + 1).sum())
    first, given = negate(backend.memory.upload(numbers(1, 2))), give(backend.memory.upload(numbers(5, 6)))
    for _ in range(2):
        large(backend.memory.upload(numbers(8, 9)))
    assert backend.memory.download(first).tolist() == [-1, -2]
    assert backend.memory.download(given).tolist() == [5, 6]
    second = negate(backend.memory.upload(numbers(3, 4)))
    assert backend.memory.download(second).tolist() == [-3, -4]
    is_overwritten = backend.traits.captures and backend.traits.mode != "compiled"
    assert backend.memory.download(first).tolist() == ([-3, -4] if is_overwritten else [-1, -2])
    assert backend.memory.download(given).tolist() == [5, 6]


def test_a_result_goes_into_the_next_graph(backend: DeviceBackend) -> None:
    """As drafts and verifications do, also into the graph that they come from."""
    double, add = backend.graphs.graph(lambda x: x * 2), backend.graphs.graph(lambda x, y: x + y)
    found = double(backend.memory.upload(numbers(1, 2)))
    for _ in range(3):
        found = double(found)
    assert backend.memory.download(add(found, backend.memory.upload(numbers(1, 1)))).tolist() == [17, 33]


def test_l01_l33_arguments_that_a_hash_takes_for_one(backend: DeviceBackend) -> None:
    """Python's hash does of -1 and -2, of 1, 1.0 and True; the bridge's, of tensors that differ in their dtype."""
    graph = backend.graphs.graph(lambda x, by: x * by)
    for _ in range(2):
        for by in (-1, -2, 1, True, 1.0, 2):
            for dtype in (torch.int32, torch.float32):
                found = backend.memory.download(graph(backend.memory.upload(numbers(3, 5, dtype=dtype)), by))
                assert found.tolist() == [3 * by, 5 * by]
                assert found.dtype == (torch.float32 if isinstance(by, float) else dtype)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, given, alone: (x + 1, given),
        lambda x, given, alone: (given * 2, x + 1, alone.view(-1))[1],
        lambda x, given, alone: x.clone().add_(1),
    ],
)
def test_l04_l32_arguments_that_are_not_read(backend: DeviceBackend, function: Callable[..., Any]) -> None:
    """They are not written over by a later call's, and no call but the first makes a graph."""
    graph = backend.graphs.graph(function)
    kept, made = backend.memory.upload(numbers(7, 8)), 0
    for number in range(3):
        given = kept if number == 0 else backend.memory.upload(numbers(number, number))
        alone = backend.memory.upload(numbers(9, number, 9))
        found = graph(backend.memory.upload(numbers(number)), given, alone)
        if isinstance(found, tuple):
            found, same = found
            assert backend.memory.download(same).tolist() == ([7, 8] if number == 0 else [number, number])
        assert backend.memory.download(found).tolist() == [number + 1]
        backend.graphs.step_done()
        made = made or compiled(backend)
    assert backend.memory.download(kept).tolist() == [7, 8]
    assert compiled(backend) == made


def test_l30_an_error_in_a_new_graph_is_not_the_end(backend: DeviceBackend) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        x + 1
        raise ValueError("as a drafter may")

    failing, graph = backend.graphs.graph(fail), backend.graphs.graph(lambda x: x + 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="as a drafter may"):
            failing(backend.memory.upload(numbers(1)))
        assert backend.memory.download(graph(backend.memory.upload(numbers(1)))).tolist() == [2]


class Counter:
    """State on the device, changed as whole tensors; two graphs know it."""

    def __init__(self, backend: DeviceBackend) -> None:
        self.total_R = torch.zeros(4, dtype=torch.int32, device=backend.traits.torch_device)
        self.last = torch.zeros(2, dtype=torch.int32, device=backend.traits.torch_device)
        self.add = backend.graphs.graph(self._add)
        self.look = backend.graphs.graph(partial(self._look, 10))

    def _add(self, rows_B: torch.Tensor, by_B: torch.Tensor) -> torch.Tensor:
        total_B = self.total_R.index_select(0, rows_B) + by_B
        self.total_R.index_copy_(0, rows_B, total_B)
        self.last.copy_(by_B)
        return total_B

    def _look(self, factor: int, offset: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.total_R, self.last)) * factor + offset


def test_state_is_changed_once_a_call(backend: DeviceBackend) -> None:
    """Whether the graph is new, known, or made late."""
    state = Counter(backend)
    rows, by = torch.tensor([2, 0]), numbers(1, 5, dtype=torch.int32)
    zero = numbers(0, dtype=torch.int32)
    for late in (False, True):
        state = Counter(backend)
        if late:
            backend.graphs.warmed_up()
        for times in (1, 2, 3):
            found = state.add(backend.memory.upload(rows), backend.memory.upload(by))
            assert backend.memory.download(found).tolist() == [times, 5 * times]
            seen = backend.memory.download(state.look(backend.memory.upload(zero))).tolist()
            assert seen == [50 * times, 0, 10 * times, 0, 10, 50]


def test_graphs_of_an_engine_that_is_gone(backend: DeviceBackend) -> None:
    """The next one's are made anew."""
    for _ in range(2):
        graph = backend.graphs.graph(torch.neg)
        for _ in range(2):
            assert backend.memory.download(graph(backend.memory.upload(numbers(1, 2)))).tolist() == [-1, -2]
        del graph
        gc.collect()


def test_what_is_made_while_compiling_only_is_known_afterwards(backend: DeviceBackend) -> None:
    state = torch.zeros(3, device=backend.traits.torch_device)

    def step(by: torch.Tensor) -> torch.Tensor:
        state.add_(by)
        return state * 1.0

    graph = backend.graphs.graph(step)
    with backend.graphs.compiling_only():
        graph(backend.memory.upload(numbers(1, 1, 1)))
    made = compiled(backend)
    found = backend.memory.download(graph(backend.memory.upload(numbers(2, 2, 2)))).tolist()
    assert compiled(backend) == made
    assert found == ([2.0] * 3 if backend.traits.name in KNOW_COMPILING_ONLY else [3.0] * 3)


def test_counts(backend: DeviceBackend) -> None:
    """What warm-up made is counted apart from what came after it, also for a second engine of the process."""
    graph = backend.graphs.graph(lambda x: x + 1)

    def run(*values: float) -> None:
        graph(backend.memory.upload(numbers(*values)))
        backend.graphs.step_done()

    def late() -> Any:
        return backend.graphs.counts()["compiled_after_warmup"] if backend.traits.captures else 0

    run(1)
    for shape, next_shape in (((1,), (1, 2)), ((1, 2), (1, 2, 3))):
        backend.graphs.warmed_up()
        assert late() == 0
        run(*shape)
        assert late() == 0
        run(*next_shape)
        run(*next_shape)
        assert late() == (1 if backend.traits.captures else 0)
    assert backend.traits.captures or backend.graphs.counts() == {}
