"""The compiler of `hpu_backend`: what it takes, what it counts, and what it is known to get wrong.

Letters and numbers in names are rows of docs/contributing/quirks.md.
"""

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import fx
from torch._dynamo import lookup_backend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from card_emulator.card import DeviceRefusal
from vllm_gaudi_spec.attention.row_operations import append, locate_rectangle, take_newest
from vllm_gaudi_spec.devices.base import Graphs
from vllm_gaudi_spec.devices.common.regions import RegionCompiler
from vllm_gaudi_spec.devices.hpu.backend import HpuMemory
from vllm_gaudi_spec.devices.hpu.bridge import open_bridge
from vllm_gaudi_spec.devices.hpu.compiled import make_region_compiler


@pytest.fixture
def regions(card: Any) -> RegionCompiler:
    return make_region_compiler()


def hpu(*values: Any) -> torch.Tensor:
    return torch.tensor(values).to("hpu")


def unguarded() -> RegionCompiler:
    """Without what compiled.py replaces."""
    return RegionCompiler(lambda module, examples: lookup_backend("hpu_backend")(module, examples), "hpu")


@pytest.mark.parametrize(("exported", "reuses"), [(None, False), ("1", True)])
def test_c33_a_bridge_that_torch_loaded_first_reuses_no_inputs_either(
    exported: str | None, reuses: bool, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read the variable by then, as its users left it."""
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    monkeypatch.setenv("PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE", exported or "")
    if exported is None:
        monkeypatch.delenv("PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE")
    config = SimpleNamespace(enable_synapse_input_reuse=True)
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch.dynamo.compile_backend.config", cast("Any", config))
    open_bridge()
    assert config.enable_synapse_input_reuse is reuses


def test_a_region_is_compiled_at_its_first_run_and_launched_once(card: Any, regions: RegionCompiler) -> None:
    run = regions.compiled(lambda x, y: (x + y).relu() * 2)
    x, y = hpu(1.0, -5.0), hpu(2.0, 3.0)
    before = card.counters.total
    assert run(x, y).tolist() == [6.0, 0.0]
    assert run(y, x).tolist() == [6.0, 0.0]
    after = card.counters.total
    assert after.graph_captures - before.graph_captures == 1
    assert after.launches - before.launches == 2
    assert after.stray_ops == before.stray_ops


def test_memory_of_weights_may_move(card: Any, regions: RegionCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host keeps the values during sleep."""
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0")
    memory = HpuMemory(open_bridge(), Graphs())
    weight, kv = hpu(1.0, 2.0), hpu(5.0, 5.0)
    run = regions.compiled(lambda x: x * weight + kv)
    assert run(hpu(3.0, 4.0)).tolist() == [8.0, 13.0]
    wake = [memory.release([weight], keep=True), memory.release([kv], keep=False)]
    assert weight.numel() == kv.numel() == 0
    for bring_back in wake:
        bring_back()
    assert run(hpu(3.0, 4.0)).tolist() == [3.0, 8.0]
    assert sum(regions.functions.values()) == 1


def test_results_are_new_each_time(card: Any, regions: RegionCompiler) -> None:
    run = regions.compiled(lambda x: x + 1)
    first = run(hpu(1.0))
    second = run(hpu(5.0))
    assert (first.tolist(), second.tolist()) == ([2.0], [6.0])


def test_rows_of_a_cache_are_written_in_place(card: Any, regions: RegionCompiler) -> None:
    """passes.py, pass_reinplace_index_copy_ops: a copy of the whole cache would cost as much as the cache is large."""
    cache = torch.zeros(1000, 8).to("hpu")

    def write(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cache.index_copy_(0, rows, x)
        return cache.index_select(0, rows)

    run = regions.compiled(write)
    for number in (1.0, 2.0):
        card.next_step()
        found = run(hpu(3), torch.full((1, 8), number).to("hpu"))
        assert card.counters.step.bytes_moved < cache.nbytes / 10
        assert found.tolist() == [[number] * 8] == cache[3:4].tolist()
    assert float(cache.sum()) == 16.0


def test_a_cache_that_is_read_as_it_was_is_copied(card: Any, regions: RegionCompiler) -> None:
    cache = torch.zeros(4).to("hpu")

    def write(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        changed = cache.index_copy(0, rows, x)
        before = cache.sum()
        cache.copy_(changed)
        return before

    assert float(regions.compiled(write)(hpu(3), hpu(5.0))) == 0.0
    assert cache.tolist() == [0.0, 0.0, 0.0, 5.0]


def test_c31_in_compile_only_mode_nothing_is_computed(card: Any, regions: RegionCompiler) -> None:
    state = hpu(1.0)
    run = regions.compiled(lambda x: state.add_(x))
    card.compile_only = True
    run(hpu(2.0))
    compiled = card.counters.total.graph_captures
    run(hpu(2.0))
    card.compile_only = False
    assert state.tolist() == [1.0]
    run(hpu(2.0))
    assert state.tolist() == [3.0]
    assert card.counters.total.graph_captures == compiled


def test_c02_symbolic_shapes_are_refused(card: Any) -> None:
    graph = torch.fx.symbolic_trace(lambda x: (torch.ops.aten.relu.default(x),))
    example = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(7, 3), static_shapes=False)
    with pytest.raises(DeviceRefusal, match="symbolic shape"):
        lookup_backend("hpu_backend")(graph, [example])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(1, 2)[(x > 9).long(), (x > 1).long()],
        lambda x: x.long().view(1, -1).permute(1, 0),
        lambda x: torch.full_like(x, float("nan")),
        lambda x: x.view(torch.int32) + 1,
    ],
    ids=["index of two dimensions", "permute of int64", "NaN", "view as another dtype"],
)
def test_c16_operations_that_leave_the_graph(function: Any, card: Any, regions: RegionCompiler) -> None:
    with pytest.raises(DeviceRefusal, match=r"leaves the compiled graph and runs eagerly, from .*test_compiler\.py"):
        regions.compiled(function)(hpu(1.0, 2.0))
    card.hostile = False
    regions.compiled(function)(hpu(1.0, 2.0))
    assert [event.kind for event in card.counters.events].count("leaves the compiled graph") >= 1


@pytest.mark.parametrize("read", [lambda x, at: x[at], lambda x, at: x[:, at], lambda x, at: x[:, at, None]])
@pytest.mark.parametrize("at", [[2, 0, -1], [[1, -3], [0, 2]]])
def test_c16_rows_are_read_in_the_graph(read: Any, at: list[Any], card: Any, regions: RegionCompiler) -> None:
    """As the windows of an encoder are, and positions of several dimensions."""
    x, index = torch.arange(9.0).view(3, 3), torch.tensor(at)
    with pytest.raises(DeviceRefusal, match="leaves the compiled graph"):
        unguarded().compiled(read)(x.to("hpu"), index.to("hpu"))
    assert regions.compiled(read)(x.to("hpu"), index.to("hpu")).tolist() == read(x, index).tolist()


def test_c17_where_on_integers_is_compiled_wrongly_and_not_used(card: Any, regions: RegionCompiler) -> None:
    def choose(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 1, x, -x)

    assert unguarded().compiled(choose)(hpu(1, 2)).tolist() == [1, -2]
    assert regions.compiled(choose)(hpu(1, 2)).tolist() == [-1, 2]
    assert unguarded().compiled(choose)(hpu(1.0, 2.0)).tolist() == [-1.0, 2.0]
    largest = torch.iinfo(torch.int64).max
    extremes = torch.tensor([largest, -largest, 5]).to("hpu")

    def pick(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where(y > 0, x, -x)

    assert regions.compiled(pick)(extremes, hpu(1, 0, 0)).tolist() == [largest, largest, -5]


def test_o01_int64_has_64_bits_in_compiled_mode_and_arithmetic_with_it_is_counted(
    card: Any, regions: RegionCompiler
) -> None:
    large = hpu(1 << 40)
    assert regions.compiled(lambda x: x * 2)(large).tolist() == [1 << 41]
    kind = "int64 arithmetic in a compiled graph"
    (line,) = card.counters.lines(kind)
    assert "test_compiler.py" in line
    rows = hpu(1.0, 2.0)
    regions.compiled(lambda x, at: x.index_select(0, at) + at.int())(rows, hpu(0))
    assert card.counters.lines(kind) == [line], "an index is no arithmetic"


def test_o01_rows_are_addressed_without_int64_arithmetic(card: Any, regions: RegionCompiler) -> None:
    def whole(rows: torch.Tensor, history: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
        lengths = torch.ones_like(rows, dtype=torch.int32)
        newest = take_newest(history.view(4, 8), rows, lengths + 2, lengths, 2)
        append(history, rows, lengths, newest.tokens_BN, lengths, width=8, pad_row=3)
        located = locate_rectangle(newest.tokens_BN, newest.starts_B, newest.num_real_B, (tables,), (4,))
        return located.slots[0]

    given = [torch.tensor([0, 2]), torch.arange(32, dtype=torch.int32), torch.ones(2, 3, dtype=torch.int32)]
    found = regions.compiled(whole)(*(tensor.to("hpu") for tensor in given))
    assert card.counters.lines("int64 arithmetic in a compiled graph") == []
    assert found.tolist() == whole(*given).tolist()


def test_c17_the_dtype_of_a_choice_is_torchs(card: Any, regions: RegionCompiler) -> None:
    number, vector = torch.tensor(7).to("hpu"), torch.tensor([1, 2], dtype=torch.int32).to("hpu")

    def choose(number: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        return torch.where(vector > 1, number, vector)

    found = regions.compiled(choose)(number, vector)
    assert (found.dtype, found.tolist()) == (torch.int32, [1, 7])


def test_c16_booleans_are_made_in_the_graph(card: Any, regions: RegionCompiler) -> None:
    """Those that are filled would leave it: the bridge makes `full` of them (decomposition.py)."""

    def fill(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.ones_like(x, dtype=torch.bool),
            torch.zeros(2, dtype=torch.bool, device="hpu"),
            torch.full((2,), True, device="hpu"),
            x.new_full((2,), False, dtype=torch.bool),
            torch.zeros_like(x > 0),
            x * True,
        )

    with pytest.raises(DeviceRefusal, match="leaves the compiled graph"):
        unguarded().compiled(fill)(hpu(1.0, 2.0))
    found = regions.compiled(fill)(hpu(1.0, 2.0))
    assert [one.tolist() for one in found] == [
        [True] * 2,
        *[[False] * 2, [True] * 2, [False] * 2, [False] * 2],
        [1.0, 2.0],
    ]
    assert [one.dtype for one in found] == [torch.bool] * 5 + [torch.float32]


def test_results_lie_as_they_were_traced(card: Any, regions: RegionCompiler) -> None:
    """Torch traces results of elementwise operations on a Gaudi as contiguous, and so a reshape of one as a view."""
    values = torch.arange(96.0).view(1, 3, 32)

    def turn(x: torch.Tensor) -> torch.Tensor:
        heads = x[..., :16].view(1, 3, 2, 8).transpose(1, 2)
        turned = heads * 2 + torch.cat((-heads[..., 4:], heads[..., :4]), dim=-1)
        return turned.reshape(1, -1, 8) + 1

    run = regions.compiled(turn)
    for factor in (1, 3):
        assert run((values * factor).to("hpu")).tolist() == turn(values * factor).tolist()
    assert regions.compiled(lambda x: x.mT * 2)(values.to("hpu")).is_contiguous()


def test_c23_a_collective_in_a_region_is_refused(card: Any) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "a group")),))
    with FakeTensorMode() as fakes, pytest.raises(DeviceRefusal, match="known to compute wrong sums"):
        lookup_backend("hpu_backend")(fx.GraphModule({}, graph), [fakes.from_tensor(hpu(1.0))])


def test_lazy_mode_has_no_compiler(card: Any, regions: RegionCompiler) -> None:
    card.lazy = True
    try:
        with pytest.raises(DeviceRefusal, match="in lazy mode"):
            regions.compiled(torch.neg)(hpu(1.0))
    finally:
        card.lazy = False


def test_c35_a_recipe_of_a_concatenation_serves_one_along_another_dimension(
    card: Any, regions: RegionCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of regions, and where it was made along the last dimension."""
    small, large = (torch.zeros(size, size).to("hpu") for size in (2, 3))
    assert torch.cat((small, small + 1), dim=0).shape == (4, 2)
    assert torch.cat((large, large + 1), dim=-1).shape == (3, 6), "what is along another dimension serves for all"

    def both(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat((x, y, z), dim=1), torch.cat((x, y, z), dim=0)

    three = [torch.zeros(2, 2).to("hpu") for _ in range(3)]
    assert [part.shape for part in regions.compiled(both)(*three)] == [(2, 6), (6, 2)], "regions are no such recipes"
    assert torch.cat(three, dim=1).shape == (2, 6)
    for other in (three[:2], [part.int() for part in three], [part[:, :, None] for part in three]):
        torch.cat(other, dim=0)
    with pytest.raises(DeviceRefusal, match=r"aten\.cat along dimension 0 outside of regions.*test_compiler\.py"):
        torch.cat([large, large + 1, large + 2], dim=0)
    monkeypatch.setitem(card.bridge_flags, "PT_HPU_ENABLE_EAGER_CACHE", True)
    assert torch.cat(three, dim=0).shape == (6, 2)
