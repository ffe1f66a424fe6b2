"""Functions as compiled regions, on the CPU with torch's own backends."""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch._dynamo.backends.registry import lookup_backend

from vllm_gaudi_spec.devices.common.arguments import flatten
from vllm_gaudi_spec.devices.common.regions import CompiledFunction, RegionCompiler
from vllm_gaudi_spec.devices.common.tracing import NotCompilableError


class Compiler:
    def __init__(self, backend: str = "aot_eager") -> None:
        self.graphs: list[fx.GraphModule] = []
        self._backend = lookup_backend(backend)

    def __call__(self, module: fx.GraphModule, examples: list[torch.Tensor]) -> Callable[..., Sequence[Any]]:
        self.graphs.append(module)
        return self._backend(module, examples)


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def regions(compiler: Compiler) -> RegionCompiler:
    return RegionCompiler(compiler, "cpu")


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.inference_mode():
        yield


class Layers:
    """A model of equal layers, with a cache for each and a marker after each."""

    def __init__(self, regions: RegionCompiler | None, count: int = 4) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(8, 8, generator=generator) for _ in range(count)]
        self.caches = [torch.zeros(6, 8) for _ in range(count)]
        self._regions = regions

    def forward(self, x: torch.Tensor, slots: torch.Tensor, scale: float) -> tuple[tuple[torch.Tensor, ...], int]:
        for weight, cache in zip(self.weights, self.caches, strict=True):
            cache.index_copy_(0, slots, torch.tanh(x @ weight))
            x = x + cache.index_select(0, slots) * scale
            if self._regions is not None:
                self._regions.cut()
        return (x, slots), 7


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_function_returns_the_same(backend: str) -> None:
    regions = RegionCompiler(Compiler(backend), "cpu")
    plain, layers = Layers(None), Layers(regions)
    run = regions.compiled(layers.forward)
    for seed, slots in enumerate(([0, 3], [5, 1], [3, 0])):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
        rows = torch.tensor(slots)
        (found, passed), seven = run(x, rows, 0.5)
        (expected, _), _ = plain.forward(x.clone(), rows, 0.5)
        torch.testing.assert_close(found, expected)
        assert passed is rows
        assert seven == 7
    torch.testing.assert_close(layers.caches, plain.caches)


def test_c01_c04_equal_layers_are_compiled_once(regions: RegionCompiler, compiler: Compiler) -> None:
    layers = Layers(regions)
    run = regions.compiled(layers.forward)
    run(torch.randn(2, 8), torch.tensor([0, 1]), 0.5)
    assert regions.num_compiled == len(compiler.graphs) == 1
    run(torch.randn(2, 8), torch.tensor([4, 5]), 0.5)
    assert regions.num_compiled == 1
    run(torch.randn(2, 8), torch.tensor([4, 5]), 0.25)  # another number
    assert regions.num_compiled == 2
    run(torch.randn(3, 8), torch.tensor([1, 4, 5]), 0.25)  # other shapes
    assert regions.num_compiled == 3
    assert regions.functions.total() == 3


@pytest.mark.parametrize("is_cut", [False, True])
def test_views_stay_views(is_cut: bool, regions: RegionCompiler) -> None:
    """A change through one view shows in all, within a region and across regions."""
    table = torch.zeros(4, 3)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made = x * 2
        row = made[1]
        if is_cut:
            regions.cut()
        row.add_(1)
        table[2].copy_(made[1])
        if is_cut:
            regions.cut()
        x[0].zero_()
        return made, made.sum(), x

    run = regions.compiled(function)
    for _ in range(2):
        x = torch.ones(2, 3)
        made, total, passed = run(x)
        assert made.tolist() == [[2.0] * 3, [3.0] * 3]
        assert float(total) == 15.0
        assert passed is x
        assert x.tolist() == [[0.0] * 3, [1.0] * 3]
        assert table.tolist() == [[0.0] * 3, [0.0] * 3, [3.0] * 3, [0.0] * 3]
        table.zero_()


def test_arguments_that_share_memory(regions: RegionCompiler) -> None:
    """They share it with each other or with outside tensors, before and after calls in which they do not."""
    table = torch.zeros(2)

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y + table

    def called(same: bool, tabled: bool) -> list[float]:
        table.zero_()
        x = table if tabled else torch.zeros(2)
        found: list[float] = regions.compiled(function)(x, x if same else torch.zeros(2)).tolist()
        again = kept(x.zero_(), x if same else torch.zeros(2)).tolist()
        assert again == found
        return found

    for first in (False, True):
        kept = regions.compiled(function)
        for same in (first, not first):
            for tabled in (first, not first):
                assert called(same, tabled) == [float(same + tabled)] * 2, (same, tabled)


def test_equal_numbers_of_different_types_differ(regions: RegionCompiler) -> None:
    """0.0 equals -0.0; NaN does not equal itself."""
    regions.traces_twice = True

    def scale(x: torch.Tensor, by: float) -> torch.Tensor:
        return torch.copysign(x, torch.full_like(x, by)) * 2

    run = regions.compiled(scale)
    assert [run(torch.ones(1), by).tolist() for by in (0.0, -0.0)] == [[2.0], [-2.0]]
    before = regions.num_compiled
    for _ in range(2):
        run(torch.ones(1), float("nan"))
        regions.compiled(lambda x: x.masked_fill(x > 0, float("nan")))(torch.ones(1))
    assert regions.num_compiled - before == 2


class _Keeps:
    table: torch.Tensor = torch.ones(3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table.dtype != x.dtype:
            self.table = self.table.to(x.dtype)
        return x * self.table


def test_tensor_kept_from_a_trace_is_refused(regions: RegionCompiler) -> None:
    keeps = _Keeps()
    regions.compiled(keeps.forward)(torch.ones(3))
    with pytest.raises(NotCompilableError, match=r"kept from an earlier trace .*test_regions\.py.* in forward"):
        regions.compiled(keeps.forward)(torch.ones(2, 3))


def _reads_a_value(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()  # the line


def _has_a_mask(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]  # the line


@pytest.mark.parametrize("function", [_reads_a_value, _has_a_mask])
def test_operation_that_needs_values_is_refused_with_its_line(
    function: Callable[..., Any], regions: RegionCompiler
) -> None:
    with pytest.raises(NotCompilableError) as refused:
        regions.compiled(function)(torch.randn(4))
    assert f'test_regions.py", line {function.__code__.co_firstlineno + 1}, in {function.__name__}' in str(
        refused.value
    )
    assert regions.functions.total() == 0
    assert regions.compiled(torch.neg)(torch.ones(1)).tolist() == [-1.0]  # the failed trace left nothing open


def test_number_counted_in_python_is_refused_when_traced_twice(regions: RegionCompiler) -> None:
    calls: list[None] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return x + len(calls)

    assert regions.compiled(function)(torch.zeros(1)).tolist() == [1.0]
    regions.traces_twice = True
    with pytest.raises(NotCompilableError, match=r"aten\.add\.Tensor .*differ between two traces.* in function"):
        regions.compiled(function)(torch.zeros(1))


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    if dist.is_initialized():
        yield dist.new_group([dist.get_rank()], backend="gloo")
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_c23_collectives_run_outside_of_regions(
    group: dist.ProcessGroup, regions: RegionCompiler, compiler: Compiler
) -> None:
    """They run eagerly, in order."""
    regions.traces_twice = True

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y, group=group)
        gathered = torch.empty_like(y)
        dist.all_gather_into_tensor(gathered, y + 1, group=group)
        dist.broadcast(gathered, 0, group=group)
        return gathered * 3

    tensors, rest = flatten((torch.ones(2),))
    made = regions.compile(function, tensors, rest)
    assert [made(tensors).tolist() for _ in range(2)] == [[9.0, 9.0], [9.0, 9.0]]
    assert made.num_steps == 6, "three collectives, what is before the first and the second, and the end"
    targets = [str(node.target) for graph in compiler.graphs for node in graph.graph.nodes]
    assert not any("c10d" in target for target in targets)


def test_memory_that_an_outside_tensor_had_before_sleep_is_not_its_own() -> None:
    """Memory is reused, so an argument may get that of a weight."""
    weight, argument = torch.ones(2), torch.ones(2)
    tracer: Any = SimpleNamespace(fakes=SimpleNamespace(values=[0, 0]), outside={1: weight})
    function = CompiledFunction([argument], [], tracer, [0], None)
    assert not function.fits([weight])
    former = weight.view(2)
    weight.data = torch.ones(2)
    assert function.fits([former])
