"""HPU graphs, which record a module's forward pass once for each combination of input shapes and then replay it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from card_emulator.card import DEVICE, DeviceRefusal, GraphRecord
from card_emulator.counters import Tally
from card_emulator.ops import OpInfo
from card_emulator.program import Capture, Program, count_replay
from card_emulator.source import Line, describe, here
from card_emulator.tensor import DeviceTensor, real


class GraphCapture(Capture):
    """A graph capture that identifies recipes. A recipe is the part of a graph between two markers, and it is
    determined by its operations, scalars and tensor layouts. If every layer of a model ends with a marker, identical
    layers share one recipe."""

    what = "HPU graph capture"

    def __init__(self, name: str, track_results: bool = False) -> None:
        super().__init__(name, track_results)
        self.recipes: list[int] = []
        self._begin_recipe()

    def _begin_recipe(self) -> None:
        self._recipe = 0
        self._numbers: dict[tuple[str, int], int] = {}
        """Maps the tensors in the current recipe to IDs, in the order in which they first occur."""

    def _append(
        self, run: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], outs: int | list[int], line: Line
    ) -> None:
        operation = getattr(run, "__qualname__", str(run))
        self._recipe = hash((self._recipe, operation, self._form(args), self._form(tuple(kwargs.items()))))
        super()._append(run, args, kwargs, outs, line)
        for slot in (outs,) if isinstance(outs, int) else outs:
            self._numbers[("made", slot)] = len(self._numbers)

    def _form(self, value: Any) -> Any:
        if isinstance(value, DeviceTensor):
            of = ("made", value.slot) if self.owns(value) else ("outside", id(value))
            number = self._numbers.setdefault(of, len(self._numbers))
            inner = value.inner
            return number, inner.dtype, inner.shape, inner.stride()
        if isinstance(value, (list, tuple)):
            return tuple(map(self._form, value))
        return str(value)

    def mark_step(self) -> None:
        if self._recipe:
            self.recipes.append(self._recipe)
        self._begin_recipe()

    def check_write(self, target: DeviceTensor, info: OpInfo, line: Line) -> None:
        # From Intel's HPU Graphs documentation: views cannot be updated in place, regardless of the memory they share.
        if not target.part or not DEVICE.hostile:
            return
        raise DeviceRefusal(
            f"during {self.what}: aten.{info.name} changes a view in place, at {describe(line)}; a captured "
            "graph has no in-place update through views: call it on the tensor itself (index_copy_, scatter_) "
            "or build a new tensor (where, cat)"
        )

    def check_collective(self, name: str) -> None:
        if not DEVICE.lazy_collectives:
            raise DeviceRefusal(
                f"during {self.what}: {name} at {here()}; a collective inside a graph needs "
                "PT_HPU_ENABLE_LAZY_COLLECTIVES"
            )


# A replay uses its arguments' memory without conversion and checks only sizes (bridge 1.19, HPUGraph.cpp, replayV3).
# Because 64-bit values are stored in 32 bits (get_n_bytes.h; PT_ENABLE_INT64_SUPPORT is off by default), a graph
# captured with one width also accepts the other. For example, vllm-gaudi's decode graphs get int32 positions in warm-up
# and int64 positions in steps with drafts (v0.26.0, hpu_model_runner.py, _create_decode_input_data).
_STORED_AS = {torch.int64: torch.int32, torch.float64: torch.float32}


class Form(NamedTuple):
    """The memory layout of a tensor argument."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    number: int
    """The index of the tensor in `Inputs.tensors`. If a tensor is passed twice, both arguments have the same number."""


class Inputs:
    """A call's arguments: its device tensors, their layouts, and the key that selects a graph."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        self.tensors: list[DeviceTensor] = []
        self._seen: dict[int, int] = {}
        self.wiring = (self._walk(args), self._walk(kwargs))
        # The bridge selects a graph by a hash of shapes, strides and Python values, which ignores dtypes (1.19,
        # graphs.py, input_hash). A kind card compares the arguments themselves.
        self.key = input_hash((args, kwargs)) if DEVICE.hostile else self.wiring

    def _walk(self, value: Any) -> Any:
        if isinstance(value, DeviceTensor):
            twin = self._seen.setdefault(id(value), len(self.tensors))
            if twin == len(self.tensors):
                self.tensors.append(value)
            inner = value.inner
            dtype = _STORED_AS.get(inner.dtype, inner.dtype) if DEVICE.hostile else inner.dtype
            return Form(inner.shape, inner.stride(), int(inner.storage_offset()), dtype, twin)
        kind = type(value)
        if isinstance(value, (list, tuple)):
            return (kind, *[self._walk(item) for item in value])
        if isinstance(value, dict):
            return (kind, *[(key, self._walk(item)) for key, item in value.items()])
        if isinstance(value, torch.Tensor):
            return (value.shape, value.stride(), value.dtype, "host")
        if _is_record(value) and not DEVICE.hostile:
            return (kind, *[self._walk(getattr(value, name)) for name in _field_names(kind)])
        _plain_hash(value)
        return (kind, value)


def _difference(wiring: Any, now: Any) -> str:
    """Describe the first argument that differs between two calls."""
    (_, *unnamed), (_, *named) = wiring
    (_, *unnamed_now), (_, *named_now) = now
    pairs = [(f"argument {number}", *pair) for number, pair in enumerate(zip(unnamed, unnamed_now, strict=False))]
    pairs += [(name, form, other) for (name, form), (_, other) in zip(named, named_now, strict=False)]
    for name, before, after in pairs:
        if before != after:
            before, after = _first_different(before, after)
            return f"{name}: {before} and now {after}"
    return f"the first {len(pairs)} arguments are equal"


def _first_different(before: Any, now: Any) -> tuple[Any, Any]:
    """Return the innermost pair of parts that differ."""
    if isinstance(before, tuple) and isinstance(now, tuple) and len(before) == len(now):
        for part, other in zip(before, now, strict=True):
            if part != other:
                return _first_different(part, other)
    return before, now


def input_hash(value: Any) -> int:
    """Return the bridge's hash of the arguments. Tensors are found only in dicts, lists and tuples. Any other object is
    represented by its own hash, which often depends only on its identity."""
    if isinstance(value, dict):
        return input_hash(tuple(value.items()))
    if isinstance(value, (list, tuple)):
        return hash(tuple(input_hash(item) for item in value))
    if isinstance(value, torch.Tensor):
        inner = value.inner if isinstance(value, DeviceTensor) else value
        return hash((inner.shape, inner.stride(), inner.storage_offset()))
    return _plain_hash(value)


def _plain_hash(value: Any) -> int:
    try:
        return hash(value)
    except TypeError as error:
        raise TypeError(
            f"an HPU graph is looked up by the hash of its arguments, but {type(value)} is not hashable"
        ) from error


def _is_record(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


_fields: dict[type, tuple[str, ...]] = {}


def _field_names(kind: Any) -> tuple[str, ...]:
    names = _fields.get(kind)
    if names is None:
        names = _fields[kind] = tuple(field.name for field in dataclasses.fields(kind))
    return names


def _map(value: Any, convert: Callable[[DeviceTensor], Any]) -> Any:
    """Return a copy of a nested structure in which each device tensor is replaced with the result of `convert`."""
    if isinstance(value, DeviceTensor):
        return convert(value)
    if isinstance(value, tuple):
        items = [_map(item, convert) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_map(item, convert) for item in value]
    if isinstance(value, dict):
        changed = copy.copy(value)  # keep the class: optimum-habana uses dicts whose items are also attributes
        for key, item in value.items():
            changed[key] = _map(item, convert)
        return changed
    if _is_record(value):
        changes = {name: _map(getattr(value, name), convert) for name in _field_names(type(value))}
        return dataclasses.replace(value, **changes)
    return value


def _tensors(value: Any) -> list[DeviceTensor]:
    found: list[DeviceTensor] = []
    _map(value, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


class CapturedGraph:
    """A recorded graph and its output tensors. Every replay returns the same tensor objects with new values."""

    def __init__(
        self, record: GraphRecord, program: Program, work: Tally, outputs: Any, capture: Capture, wiring: Any
    ) -> None:
        self.record = record
        self.outputs = outputs
        self.wiring = wiring
        self.unread: list[tuple[int, DeviceTensor]] = []
        """The first call's inputs that the graph does not read, with their positions. See `copy_unread`."""
        self.read = capture.read_inputs({tensor.slot for tensor in _tensors(outputs) if capture.owns(tensor)})
        self._dtypes = capture.input_dtypes
        self._program = program
        self._work = work
        shared = {id(tensor.memory) for tensor in capture.externals.values()}
        self._copied: list[tuple[DeviceTensor, int]] = []
        self._passed_on: dict[int, int] = {}
        for tensor in _tensors(outputs):
            if capture.is_input(tensor):
                self._passed_on[id(tensor)] = tensor.slot
            elif capture.owns(tensor):
                self._copied.append((tensor, tensor.slot))
        self._rebound = {slot for tensor, slot in self._copied if id(tensor.memory) in shared | capture.input_memory}

    def replay(self, inputs: Sequence[DeviceTensor]) -> Any:
        values = [real(tensor) for tensor in inputs]
        as_captured = [one.to(dtype) for one, dtype in zip(values, self._dtypes, strict=True)]
        slots = self._program.run(as_captured)
        for one, changed in zip(values, as_captured, strict=True):
            if changed is not one:
                one.copy_(changed)
        for tensor, slot in self._copied:
            value = slots[slot]
            if tensor.ghost or slot in self._rebound:
                tensor.inner, tensor.ghost = value, False
            else:
                tensor.inner.copy_(value)
            tensor.epoch = 0
        count_replay(self._work, self.record)
        if self._passed_on:
            return _map(self.outputs, lambda tensor: self._current(tensor, inputs))
        return self.outputs

    def copy_unread(self, inputs: Sequence[DeviceTensor]) -> None:
        """Copy this call's inputs that the graph does not read into the corresponding tensors of the first call.

        The bridge makes these copies before each replay (1.19, graphs.py, copy_to). They form a separate graph, which
        is compiled on the second call.
        """
        for index, first in self.unread:
            DEVICE.counters.event("copy of an unread input", f"{index} of {self.record.name}")
            first.copy_(inputs[index])

    def release(self) -> None:
        DEVICE.graph_bytes -= self.record.nbytes
        DEVICE.graphs_held -= 1

    def _current(self, tensor: DeviceTensor, inputs: Sequence[DeviceTensor]) -> DeviceTensor:
        """If an output is an input that the graph returns unchanged, return the current call's input instead."""
        slot = self._passed_on.get(id(tensor))
        return tensor if slot is None else inputs[slot]


def capture_call(
    name: str, wiring: Any, forward: Callable[..., Any], args: Any, kwargs: Any, inputs: Sequence[DeviceTensor]
) -> CapturedGraph:
    """Run `forward` once and record it. In compile-only mode, its operations do not compute anything."""
    device = DEVICE
    device.queue.flush("graph capture")
    capture = GraphCapture(name)
    for tensor in inputs:
        capture.add_input(tensor)
    counters = device.counters
    outside, counters.step = counters.step, Tally()
    device.capture = capture
    where = here()
    try:
        outputs = forward(*args, **kwargs)
    except BaseException:
        if device.hostile:
            # The bridge's wrapper ends a capture only if the forward pass returns normally (1.19, graphs.py).
            device.blocked = f"an exception interrupted the capture of {name}, so its stream is still capturing"
        raise
    finally:
        device.capture = None
        work, counters.step = counters.step, outside
    return _finish(capture, work, outputs, wiring, where)


def _finish(capture: GraphCapture, work: Tally, outputs: Any, wiring: Any, where: str) -> CapturedGraph:
    device = DEVICE
    if device.hostile:
        _check_outputs(outputs)
    output_slots = {tensor.slot for tensor in _tensors(outputs) if capture.owns(tensor)}
    capture.mark_step()
    program, nbytes = capture.finish(output_slots)
    device.charge_graph(nbytes)
    device.graphs_held += 1
    device.graph_recipes.update(capture.recipes)
    record = GraphRecord(capture.name, _describe(wiring), where, len(program.calls), nbytes, len(capture.recipes))
    device.graphs.append(record)
    if not device.compile_only:
        device.counters.step.add(work)
        device.counters.step.launches += 1
    graph = CapturedGraph(record, program, work, outputs, capture, wiring)
    device.compiled("graph capture", f"{capture.name} {record.key}", where)
    return graph


def _check_outputs(outputs: Any) -> None:
    """Reject outputs that hide tensors from the bridge, which searches only lists, tuples, dicts and objects with a
    `__dict__` (1.19, extract_tensors)."""
    if isinstance(outputs, dict):
        outputs = tuple(outputs.values())
    if isinstance(outputs, (list, tuple)):
        for item in outputs:
            _check_outputs(item)
    elif _is_record(outputs) and not hasattr(outputs, "__dict__") and _tensors(outputs):
        raise DeviceRefusal(
            f"a captured forward pass returns a {type(outputs).__name__}; the bridge does not find its tensors, "
            "because it has slots instead of a __dict__"
        )


def _describe(wiring: Any) -> str:
    """Describe the arguments by their shapes and Python numbers, to distinguish a module's graphs in reports."""
    shapes: list[str] = []

    def walk(part: Any) -> None:
        if isinstance(part, torch.Size):
            shapes.append("x".join(map(str, part)) or "scalar")
        elif isinstance(part, tuple):
            if len(part) == 2 and isinstance(part[0], type) and part[0] in (int, bool, float, str):
                shapes.append(repr(part[1]))
                return
            for item in part if not (part and isinstance(part[0], torch.Size)) else part[:1]:
                walk(item)

    walk(wiring)
    text = " ".join(shapes)
    return text if len(text) <= 200 else text[:197] + "..."


class GraphCache:
    """A replacement for a module's forward method. It captures one graph for each key and then replays it."""

    def __init__(self, module: torch.nn.Module, hold_inputs: bool, max_graphs: int | None) -> None:
        self._module = module
        self._forward = module.forward
        self._hold_inputs = hold_inputs
        self._max_graphs = max_graphs
        self._graphs: dict[Any, CapturedGraph] = {}
        self._held: dict[Any, list[DeviceTensor]] = {}

    def __call__(self, *args: Any, bypass_hpu_graphs: bool = False, warmup_mode: bool = False, **kwargs: Any) -> Any:
        if bypass_hpu_graphs:
            return self._forward(*args, **kwargs)
        device = DEVICE
        name = getattr(self._module, "graph_name", None) or type(self._module).__name__
        device.refuse_in_capture(f"the graph of {name} is called while another graph is being captured")
        inputs = Inputs(args, kwargs)
        graph = self._graphs.get(inputs.key)
        if graph is None:
            if self._max_graphs is not None and len(self._graphs) >= self._max_graphs:
                return self._forward(*args, **kwargs)
            return self._capture(name, inputs, args, kwargs)
        if graph.wiring != inputs.wiring:
            raise DeviceRefusal(
                f"the graph of {name} for {_describe(graph.wiring)} is replayed with different arguments: its key is a "
                "hash of shapes, views and Python values, which ignores dtypes and does not distinguish -1 from -2 "
                f"or 1 from True; {_difference(graph.wiring, inputs.wiring)}"
            )
        if device.hostile and not self._hold_inputs:
            graph.copy_unread(inputs.tensors)
        device.queue.flush("graph replay")
        if device.compile_only or warmup_mode:
            return graph.outputs
        return graph.replay(self._hold(inputs) if self._hold_inputs else inputs.tensors)

    def _capture(self, name: str, inputs: Inputs, args: Any, kwargs: Any) -> Any:
        tensors = inputs.tensors
        if self._hold_inputs:
            tensors = self._hold(inputs)
            held = {id(theirs): ours for theirs, ours in zip(inputs.tensors, tensors, strict=True)}
            args, kwargs = (_map(value, lambda tensor: held[id(tensor)]) for value in (args, kwargs))
        graph = capture_call(name, inputs.wiring, self._forward, args, kwargs, tensors)
        if not self._hold_inputs:
            graph.unread = [(index, tensor) for index, tensor in enumerate(tensors) if tensor.slot not in graph.read]
        self._graphs[inputs.key] = graph
        return graph.outputs

    def _hold(self, inputs: Inputs) -> list[DeviceTensor]:
        """Copy the inputs into tensors that belong to the graph, and return these tensors."""
        held = self._held.get(inputs.key)
        if held is None:
            held = self._held[inputs.key] = [DeviceTensor(_like(tensor)) for tensor in inputs.tensors]
        if not DEVICE.compile_only:
            for ours, theirs in zip(held, inputs.tensors, strict=True):
                real(ours).copy_(real(theirs))
        return held

    def clear_cache(self) -> None:
        for graph in self._graphs.values():
            graph.release()
        self._graphs.clear()
        self._held.clear()

    def clear_inputs(self) -> None:
        self._held.clear()


def _like(tensor: DeviceTensor) -> torch.Tensor:
    inner = tensor.inner
    return torch.empty_strided(inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device)


def wrap_in_hpu_graph(
    module: torch.nn.Module,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
    max_graphs: int | None = None,
) -> torch.nn.Module:
    cache = GraphCache(module, not disable_tensor_cache, max_graphs)
    # Use setattr, because type checkers reject assignments of these attributes to an instance of nn.Module.
    for name, value in (
        ("forward", cache),
        ("clear_cache", cache.clear_cache),
        ("clear_inputs", cache.clear_inputs),
    ):
        setattr(module, name, value)
    return module


class HPUGraph:
    """The low-level interface to HPU graphs. A replay reads the tensors that existed before the capture and overwrites
    those that were created during the capture."""

    def __init__(self) -> None:
        self._graph: CapturedGraph | None = None

    def capture_begin(self, dry_run: bool = False) -> None:
        DEVICE.refuse_in_capture("a second capture is started")
        DEVICE.queue.flush("graph capture")
        self._where = here()
        self._outside, DEVICE.counters.step = DEVICE.counters.step, Tally()
        DEVICE.capture = GraphCapture("HPUGraph", track_results=True)

    def capture_end(self) -> None:
        capture = DEVICE.capture
        if not isinstance(capture, GraphCapture) or capture.made is None:
            raise DeviceRefusal("capture_end without capture_begin")
        DEVICE.capture = None
        work, DEVICE.counters.step = DEVICE.counters.step, self._outside
        outputs = [tensor for tensor in (ref() for ref in capture.made) if tensor is not None]
        self._graph = _finish(capture, work, outputs, (), self._where)

    def replay(self, asynchronous: bool = False) -> None:
        if self._graph is None:
            raise DeviceRefusal("replay of a graph that was never captured")
        DEVICE.refuse_in_capture("a graph is replayed")
        DEVICE.queue.flush("graph replay")
        if not DEVICE.compile_only:
            self._graph.replay([])

    def reset(self) -> None:
        if self._graph is not None:
            self._graph.release()
        self._graph = None
