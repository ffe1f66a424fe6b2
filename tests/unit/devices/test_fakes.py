"""Cached results of operations without values equal those that PyTorch derives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from vllm_gaudi_spec.devices.common.fakes import Results
from vllm_gaudi_spec.devices.common.tracing import Tracer


@pytest.fixture(autouse=True, params=[True, False], ids=["inference mode", "without gradients"])
def without_gradients(request: pytest.FixtureRequest) -> Any:
    with torch.inference_mode(request.param), torch.no_grad():
        yield


class Asked(Tracer):
    def __init__(self, results: Results) -> None:
        super().__init__({}, "cpu", results)
        self.asked: list[str] = []

    def _run_fake(self, func: Any, args: Any, kwargs: Any, source: str) -> Any:
        self.asked.append(func._schema.name.partition("::")[2])
        return super()._run_fake(func, args, kwargs, source)


def trace(function: Callable[..., Any], tensors: list[torch.Tensor], results: Results) -> tuple[Asked, list[Any]]:
    tracer = Asked(results)
    arguments = [tracer.fakes.enter(tensor) for tensor in tensors]
    with tracer:
        found = function(*arguments)
    return tracer, [tracer.get_number(one) for one in tree_leaves(found)]


def shown(tracer: Asked) -> list[Any]:
    """Return each value's geometry, and the first value with the same memory."""
    first: dict[int, int] = {}
    return [
        (
            *(one.dtype, one.shape, one.stride(), one.storage_offset(), one.device, one.is_neg(), one.is_inference()),
            *(one.untyped_storage().nbytes(), first.setdefault(one.untyped_storage()._cdata, number)),
        )
        for number, one in enumerate(tracer.fakes.values)
    ]


def _writes(x: torch.Tensor, y: torch.Tensor) -> Any:
    rows = x[1:]
    rows.add_(1)
    x.copy_(y)
    torch.add(x, y, out=x)
    return rows, x.index_put_((torch.zeros(1, dtype=torch.long),), y[:1]), x.mul_(x)


def _returns(x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.add(x, x, out=y)  # which may be the first operand as well


def _views(x: torch.Tensor, y: torch.Tensor) -> Any:
    turned = x.t()
    return turned, turned.expand(2, *turned.shape), x.reshape(-1), y.view(-1)[2:], x.as_strided((2,), (1,), 3), x[0, 1]


def _several(x: torch.Tensor, y: torch.Tensor) -> Any:
    return x.topk(2), x.split([1, 2], dim=-1), x.unbind(), torch.cat([x, y, x]), y.sort(descending=True), x.chunk(2)


def _makes(x: torch.Tensor, y: torch.Tensor) -> Any:
    made = torch.full((2, 3), 1.0), torch.arange(4), x.new_zeros(2), torch.empty_like(x.t()), torch.tensor([1, 2])
    return *made, x.to(torch.float64), x > 0, x.sum(), x.float(), x * 2, x * 2.0, x * True


def _numbers(x: torch.Tensor, y: torch.Tensor) -> Any:
    whole = torch.arange(3)
    return whole * 2, whole * 2.0, whole * True, whole + whole, whole.sum(0), whole.sum(0, keepdim=True), whole / 2


def _complex(x: torch.Tensor, y: torch.Tensor) -> Any:
    turned = torch.view_as_complex(torch.stack([x, y], -1)).conj()
    return turned.imag, turned.imag.t(), torch.view_as_real(turned.resolve_conj()).flatten()


@pytest.mark.parametrize("function", [_writes, _returns, _views, _several, _makes, _numbers, _complex])
@pytest.mark.parametrize("arguments", ["apart", "one", "views"])
def test_results_are_cached_by_geometry(function: Callable[..., Any], arguments: str) -> None:
    x = torch.randn(3, 3)
    tensors = {"apart": [x, torch.randn(3, 3)], "one": [x, x], "views": [x, x.view(3, 3)]}[arguments]
    results = Results()
    for other in ([x, torch.randn(3, 3)], [x, x], [x, x.view(3, 3)], tensors):
        trace(function, other, results)
    again, numbers = trace(function, tensors, results)
    alone, expected = trace(function, tensors, Results())
    assert shown(again) == shown(alone)
    assert numbers == expected
    assert [(one.inputs, one.outputs, one.positions) for segment in again.segments for one in segment.operations] == [
        (one.inputs, one.outputs, one.positions) for segment in alone.segments for one in segment.operations
    ]
    assert function is _complex or not again.asked  # lazily conjugated tensors are not cached


def test_equal_layers_ask_once() -> None:
    def layers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.tanh(x @ y) + x
        return x

    tracer, _ = trace(layers, [torch.randn(3, 3), torch.randn(3, 3)], Results())
    assert len(tracer.asked) == 3
    assert sum(len(segment.operations) for segment in tracer.segments) == 24


def test_result_that_is_a_view_of_an_operand() -> None:
    def found(y: torch.Tensor) -> bool:
        tracer = Tracer({}, "cpu", results)
        _, second = tracer.fakes.enter(x), tracer.fakes.enter(y)
        with tracer.fakes.mode:
            result, _, _ = tracer.fakes.result("a row of the second", (0, 1), lambda: second[1])
        return bool(result.untyped_storage()._cdata == second.untyped_storage()._cdata)

    x, results = torch.randn(3, 3), Results()
    assert [found(y) for y in (x.view(3, 3), torch.randn(3, 3))] == [True, True]


def test_cache_depends_on_the_default_dtype() -> None:
    results, x = Results(), torch.ones(2, dtype=torch.int64)
    first, (number,) = trace(lambda x: x / 2, [x], results)
    torch.set_default_dtype(torch.float64)
    try:
        second, (other,) = trace(lambda x: x / 2, [x], results)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (first.fakes.values[number].dtype, second.fakes.values[other].dtype) == (torch.float32, torch.float64)


def test_operations_that_change_geometry_are_not_cached() -> None:
    def turn(x: torch.Tensor) -> torch.Tensor:
        x.t_()
        return x + 1

    results = Results()
    for _ in range(2):
        tracer, (number,) = trace(turn, [torch.randn(2, 3)], results)
        assert tracer.fakes.values[number].shape == (3, 2)
        assert "t_" in tracer.asked
