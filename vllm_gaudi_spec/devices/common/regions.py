"""Compiles functions in regions. Each function is traced once with fake tensors and split into regions at markers.

A region consists of the operations between two markers. It is an FX graph whose inputs are all the tensors it reads:
arguments, weights, caches, and results of earlier regions. No Python code runs in a region, so there are no guards or
graph breaks. Regions with the same operations and tensor geometry, such as a model's layers, are compiled only once.
torch.compile, in contrast, would guard on every layer name and Python branch, and it would compile every layer.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import fx

from vllm_gaudi_spec.devices.common.arguments import find_tensors, flatten, get_name, make_key, rebuild
from vllm_gaudi_spec.devices.common.tracing import (
    Operation,
    Segment,
    Tracer,
    check_equal,
    fill_in,
)

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import Function

Compiler = Callable[[fx.GraphModule, list[torch.Tensor]], Callable[..., Sequence[Any]]]
"""A torch.compile backend, which is called with fake tensors."""


class _Step(NamedTuple):
    run: Callable[..., Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]
    """The numbers of the tensors to free after this step, because no later step reads them."""


class RegionCompiler:
    """Compiles functions in regions. Regions with equal descriptions share compiled code."""

    def __init__(
        self,
        compiler: Compiler,
        device_type: str,
        rewrites: Mapping[Any, Callable[..., Any]] | None = None,
    ) -> None:
        """Initialize the compiler.

        Args:
            rewrites: Maps operations to functions that replace them. Such a function takes the operation's arguments
            and
                returns its result, or NotImplemented to use the original operation.
        """
        self._compiler = compiler
        self._device_type = device_type
        self._rewrites = rewrites or {}
        self._compiled: dict[Hashable, Callable[..., Sequence[Any]]] = {}
        self.functions: Counter[str] = Counter()
        """The number of compilations for each function name. A function is compiled for each combination of argument
        shapes and strides."""
        self.traces_twice = False
        """Whether to trace each function twice and compare the traces. They differ if the function uses a number that
        changes between calls, which would be compiled as a constant."""
        self._tracer: Tracer | None = None

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    def cut(self) -> None:
        """End the current region at this point of the trace."""
        if self._tracer is not None:
            self._tracer.cut()

    def compiled(self, function: Function) -> Function:
        """Return `function`, compiled for each combination of tensor shapes and non-tensor arguments."""
        made: dict[Hashable, list[CompiledFunction]] = {}

        def run(*args: Any) -> Any:
            tensors, rest = flatten(args)
            candidates = made.setdefault((make_key(tensors, rest), _find_sharing(tensors)), [])
            found = next((one for one in candidates if one.fits(tensors)), None)
            if found is None:
                found = self.compile(function, tensors, rest)
                candidates.append(found)
            return found(tensors)

        return cast("Function", run)

    def compile(self, function: Callable[..., Any], tensors: Sequence[torch.Tensor], rest: Any) -> CompiledFunction:
        """Compile a function for the given arguments, which `flatten` has split into `tensors` and `rest`."""
        tracer, results, form = self._trace(function, tensors, rest)
        steps = self._steps(tracer, results)
        if self.traces_twice:
            again, _, _ = self._trace(function, tensors, rest)
            check_equal(tracer, again)
        self.functions[get_name(function)] += 1
        return CompiledFunction(tensors, steps, tracer, results, form)

    def _trace(
        self, function: Callable[..., Any], tensors: Sequence[torch.Tensor], rest: Any
    ) -> tuple[Tracer, list[int], Any]:
        assert self._tracer is None, "a function that is compiled calls no other"
        tracer = self._tracer = Tracer(self._rewrites, self._device_type)
        try:
            arguments: list[torch.Tensor] = [tracer.fakes.enter(tensor) for tensor in tensors]
            with tracer:
                result = function(*rebuild(arguments, rest))
        finally:
            self._tracer = None
        found, form = flatten(result)
        return tracer, [tracer.get_number(tensor) for tensor in found], form

    def _steps(self, tracer: Tracer, results: Sequence[int]) -> list[_Step]:
        segments = [segment for segment in tracer.segments if segment.operations]
        last_use = {
            number: index
            for index, segment in enumerate(segments)
            for operation in segment.operations
            for number in (*operation.inputs, *operation.outputs)
        }
        made: set[int] = set()
        steps = []
        for index, segment in enumerate(segments):
            inputs: dict[int, None] = {}
            new: dict[int, None] = {}
            for operation in segment.operations:
                inputs.update(dict.fromkeys(number for number in operation.inputs if number not in new))
                # An output that is also an input was modified in place and is not new.
                new.update(dict.fromkeys(number for number in operation.outputs if number not in inputs))
            outputs = tuple(number for number in new if last_use[number] > index or number in results)
            made.update(new)
            dead = tuple(
                number
                for number in (*inputs, *outputs)
                if number in made and last_use[number] == index and number not in results
            )
            steps.append(_Step(self._callable(segment, tracer, tuple(inputs), outputs), tuple(inputs), outputs, dead))
        return steps

    def _callable(
        self, segment: Segment, tracer: Tracer, inputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> Callable[..., Any]:
        if not segment.is_compiled:
            return _collective(segment.operations[0], inputs, outputs)
        key = _form(segment, tracer, inputs, outputs)
        if key not in self._compiled:
            module = _build_graph(segment, inputs, outputs)
            self._compiled[key] = self._compiler(module, [tracer.fakes.values[number] for number in inputs])
        return self._compiled[key]


class CompiledFunction:
    """A function compiled for one combination of argument shapes and strides, as a list of steps."""

    def __init__(
        self,
        arguments: Sequence[torch.Tensor],
        steps: Sequence[_Step],
        tracer: Tracer,
        results: Sequence[int],
        form: Any,
    ) -> None:
        self._steps = steps
        self._num_arguments = len(arguments)
        self._num_values = len(tracer.fakes.values)
        self._outside = tracer.outside
        self._number_by_storage = {_storage(tensor): number for number, tensor in self._outside.items()}
        self._sharing = self._sharing_outside(arguments)
        self._results = results
        self._form = form

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these arguments share memory with other tensors, such as weights, in the same way as during
        compilation."""
        return self._sharing_outside(tensors) == self._sharing

    def _sharing_outside(self, tensors: Sequence[torch.Tensor]) -> tuple[int | None, ...]:
        """Return, for each tensor, the index of the non-argument tensor that shares its memory, or None.

        The current storages are compared, because sleep mode may have replaced those from compilation.
        """
        found = ((self._number_by_storage.get(storage), storage) for storage in map(_storage, tensors))
        return tuple(
            number if number is not None and _storage(self._outside[number]) == storage else None
            for number, storage in found
        )

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        values: list[Any] = [None] * self._num_values
        values[: self._num_arguments] = tensors
        for number, tensor in self._outside.items():
            values[number] = tensor
        for run, inputs, outputs, dead in self._steps:
            for number, value in zip(outputs, run(*[values[number] for number in inputs]), strict=True):
                values[number] = value
            for number in dead:
                values[number] = None
        return rebuild([values[number] for number in self._results], self._form)


def _form(segment: Segment, tracer: Tracer, inputs: Sequence[int], outputs: Sequence[int]) -> Hashable:
    """Describe a region independently of how its tensors are numbered in the trace. Regions with equal descriptions may
    share compiled code."""
    local: dict[int, int] = {}
    storages: dict[int, int] = {}
    geometries = []
    for number in inputs:
        local[number] = len(local)
        geometry, storage = tracer.fakes.get_geometry(number)
        geometries.append((geometry, storages.setdefault(storage, len(storages))))
    operations = [
        (
            one.form,
            tuple([local[number] for number in one.inputs]),
            tuple([local.setdefault(number, len(local)) for number in one.outputs]),
        )
        for one in segment.operations
    ]
    return tuple(geometries), tuple(operations), tuple(local[number] for number in outputs)


def _find_sharing(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return, for each tensor, the index of the first tensor that uses the same memory."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(_storage(tensor), index) for index, tensor in enumerate(tensors))


def _storage(tensor: torch.Tensor) -> int:
    storage: int = tensor.untyped_storage()._cdata
    return storage


def _build_graph(segment: Segment, inputs: Sequence[int], outputs: Sequence[int]) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: dict[int, fx.Node] = {number: graph.placeholder(f"input_{index}") for index, number in enumerate(inputs)}
    for one in segment.operations:
        arguments, named = fill_in((one.args, dict(one.kwargs)), nodes)
        node = graph.call_function(one.target, arguments, named)
        node.stack_trace = one.source
        if one.positions is None:
            nodes.setdefault(one.outputs[0], node)
            continue
        for position, number in zip(one.positions, one.outputs, strict=True):
            if number not in nodes:
                nodes[number] = graph.call_function(operator.getitem, (node, position))
    graph.output(tuple(nodes[number] for number in outputs))
    return fx.GraphModule(torch.nn.Module(), graph)


def _collective(operation: Operation, inputs: Sequence[int], outputs: Sequence[int]) -> Callable[..., Any]:
    def run(*tensors: torch.Tensor) -> Sequence[Any]:
        arguments, named = fill_in((operation.args, dict(operation.kwargs)), dict(zip(inputs, tensors, strict=True)))
        result = operation.target(*arguments, **named)
        result[-1].wait() if isinstance(result, tuple) else result.wait()
        found = dict(zip(operation.outputs, find_tensors(result), strict=True))
        return [found[number] for number in outputs]

    return run
