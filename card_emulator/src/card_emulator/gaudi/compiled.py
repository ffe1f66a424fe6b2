"""`hpu_backend`, the bridge's torch.compile backend for compiled mode.

As in the bridge (1.19, dynamo/compile_backend/backends.py), torch's `aot_autograd` prepares inference graphs, which may
change their inputs in place. This module emulates the compiler: the operations that it accepts (shared_layer.py), the
results that it is known to get wrong, and the compilation of each graph on its first run. Decompositions are emulated
only where these rules depend on them. The only emulated compiler pass is the one that updates caches in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions
from torch.utils._pytree import tree_leaves

from card_emulator.card import DEVICE, DeviceRefusal, GraphRecord
from card_emulator.counters import Tally
from card_emulator.ops import INT_ARITHMETIC, names
from card_emulator.program import Capture, Program, count_replay
from card_emulator.source import here
from card_emulator.tensor import DeviceTensor, execute, info_of, real

aten = torch.ops.aten

BACKEND = "hpu_backend"

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

# Operations at which the compiled graph is split, because they run eagerly (shared_layer.py, hpu_fallback_op_list).
_LEAVE = names(
    "seed manual_seed initial_seed get_rng_state set_rng_state slice_backward addcmul index nonzero _unique2 bincount"
)

# The bridge's decompositions (decomposition.py) that affect which operations the checks below see.
_DECOMPOSED = [
    aten.addcmul,
    aten.new_ones,
    aten.new_zeros,
    aten.ones,
    aten.ones_like,
    aten.zeros,
    aten.zeros_like,
]


def hpu_backend(module: fx.GraphModule, examples: Sequence[torch.Tensor], **kwargs: Any) -> Any:
    from torch._dynamo.backends.common import aot_autograd  # imported here because the import takes a second

    if DEVICE.lazy:
        raise DeviceRefusal(f"torch.compile with {BACKEND} in lazy mode, at {here()}; disable Dynamo")
    backend = aot_autograd(
        fw_compiler=_no_training,
        inference_compiler=_compile,
        decompositions={**get_decompositions(_DECOMPOSED), aten.full_like.default: _full_like},
        keep_inference_input_mutations=True,
    )
    return backend(module, examples)


def _full_like(like: torch.Tensor, value: Any, *, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
    return torch.full(like.shape, value, dtype=dtype or like.dtype, device=like.device)


def _no_training(module: fx.GraphModule, examples: Any) -> Any:
    raise DeviceRefusal("cannot compile a graph with gradients, because training is not emulated")


def _compile(module: fx.GraphModule, examples: Sequence[Any]) -> Any:
    for node in module.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            _check(node)
    _write_in_place(module.graph)
    for node in module.graph.nodes:
        _lay_out(node)
    module.recompile()
    region = _Region(module)

    def boxed(arguments: list[Any]) -> list[Any]:
        inputs = list(arguments)
        arguments.clear()
        return region(inputs)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


def _write_in_place(graph: fx.Graph) -> None:
    """Update rows of a tensor in place if the graph would otherwise copy the whole tensor, change rows of the copy, and
    write it back (passes.py, pass_reinplace_index_copy_ops)."""
    for node in list(graph.nodes):
        if node.target is not aten.index_copy.default:
            continue
        changed = node.args[0]
        back = [user for user in changed.users if user.target is aten.copy_.default]
        if len(changed.users) == 2 and back and changed.op == "placeholder":
            node.target = aten.index_copy_.default
            back[0].replace_all_uses_with(node)
            graph.erase_node(back[0])


def _lay_out(node: fx.Node) -> None:
    """Give an operation's result the memory layout that it has in the trace, because views in the graph rely on it.

    When torch traces for a Gaudi, the results of elementwise operations are contiguous (_subclasses/fake_impls.py,
    is_noncontiguous_supported). Torch's CPU kernels, in contrast, keep the dimension order of the operands.
    """
    traced = node.meta.get("val")
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(traced, torch.Tensor):
        return
    info = info_of(node.target)
    operands = [item.meta.get("val") for item in node.all_input_nodes]
    if info.handler is not None or info.decompose or not info.fresh or all(map(_is_dense, (traced, *operands))):
        return
    run = _laid_out(info.run, traced.stride())

    def laid_out(*args: Any, **kwargs: Any) -> Any:
        return execute(info, args, kwargs, run)

    node.target = laid_out


def _is_dense(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.is_contiguous()


def _laid_out(run: Callable[..., Any], stride: Sequence[int]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        made = run(*args, **kwargs)
        if made.stride() == stride:
            return made
        return torch.empty_strided(made.shape, stride, dtype=made.dtype, device=made.device).copy_(made)

    return kernel


def _check(node: fx.Node) -> None:
    target: Any = node.target
    name = target._schema.name.partition("::")[2]
    where = _line(node)
    found = node.meta["val"]
    if any(
        isinstance(size, torch.SymInt)
        for tensor in tree_leaves(found)
        if isinstance(tensor, torch.Tensor)
        for size in tensor.shape
    ):
        raise DeviceRefusal(f"{node.target} would be compiled for a symbolic shape, from {where}")
    if target.namespace in ("c10d", "_c10d_functional"):  # C23: optimum-habana, tensorparallel.py
        raise DeviceRefusal(f"{node.target} in a compiled graph is known to compute wrong sums, from {where}")
    if _computes_in_64_bits(node, name):
        DEVICE.counters.event("int64 arithmetic in a compiled graph", str(node.target), where)
    if _leaves(node, name):
        DEVICE.counters.event("leaves the compiled graph", str(node.target), where)
        if DEVICE.hostile:
            raise DeviceRefusal(
                f"{node.target} leaves the compiled graph and runs eagerly, from {where} (an error where "
                "PT_HPU_USE_EAGER_FALLBACK=0)"
            )
    if node.target is aten.where.self and DEVICE.hostile and found.dtype in _INTEGERS:
        node.target = _wrong_where


def _leaves(node: fx.Node, name: str) -> bool:
    """Whether an operation runs outside the compiled graph (C16: shared_layer.py, check_for_default_fallback and
    index_put_support_check). Views with a different dtype also do: see schema_matching.cpp and the bridge's test file
    compile_eager_fallback_list.json (both 1.19)."""
    if name in _LEAVE or node.target is aten.view.dtype:
        return True
    if name == "permute" and node.meta["val"].dtype is torch.int64:
        return True
    if name in ("full", "mul") and isinstance(node.args[1], bool):
        return True
    if name in ("index_put", "index_put_"):
        indices: Any = node.args[1]
        return any(index is None or index.meta["val"].device.type != DEVICE.where.type for index in indices)
    return any(isinstance(item, float) and item != item for item in node.args)


def _computes_in_64_bits(node: fx.Node, name: str) -> bool:
    """Whether an operation does int64 arithmetic, which uses 64 bits in compiled mode (O01). Such operations are never
    fused and take twice as long as those on int32 (HabanaAI/Intel_Gaudi3_Software, tpc_fuser.cpp)."""
    made = [tensor for tensor in tree_leaves(node.meta["val"]) if isinstance(tensor, torch.Tensor)]
    operands = [item.meta.get("val") for item in node.all_input_nodes]
    return name in INT_ARITHMETIC and any(
        isinstance(tensor, torch.Tensor) and tensor.dtype is torch.int64 for tensor in (*made, *operands)
    )


def _wrong_where(condition: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Select the wrong operand, like a compiled `where` on integers (C17: vllm-gaudi, ops/causal_conv1d_pytorch.py)."""
    return torch.where(condition, right, left)


def _line(node: fx.Node) -> str:
    trace = (node.meta.get("stack_trace") or "").strip().splitlines()
    return trace[-1].strip() if trace else "an unknown line"


class _RegionCapture(Capture):
    what = "a compiled region's first run"


class _Region:
    """A graph that is compiled on its first run. Every run returns new tensors."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._program: Program | None = None
        self._where = here()

    def __call__(self, inputs: list[Any]) -> list[Any]:
        DEVICE.refuse_in_capture("a compiled graph is called")
        if self._program is None:
            return self._first(inputs)
        if DEVICE.compile_only:
            return self._without_values(inputs)
        slots = self._program.run([real(tensor) for tensor in inputs])
        count_replay(self._work, self._record)
        return [inputs[slot] if slot < len(inputs) else DeviceTensor(slots[slot]) for slot in self._returns]

    def _first(self, inputs: list[Any]) -> list[Any]:
        device = DEVICE
        device.queue.flush("compiled graph")
        capture = _RegionCapture("region")
        for tensor in inputs:
            capture.add_input(tensor)
        counters = device.counters
        outside, counters.step = counters.step, Tally()
        device.capture = capture
        try:
            outputs = self._module(*inputs)
        finally:
            device.capture = None
            self._work, counters.step = counters.step, outside
        self._returns = [tensor.slot for tensor in outputs]
        self._program, nbytes = capture.finish(set(self._returns))
        shapes = " ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in inputs[:8])
        self._record = GraphRecord("region", shapes, self._where, len(self._program.calls), nbytes)
        device.graphs.append(self._record)
        device.graph_recipes.add(id(self))
        if not device.compile_only:
            counters.step.add(self._work)
            counters.step.launches += 1
        device.compiled("region compile", f"{len(self._program.calls)} operations on {shapes}", self._where)
        self._geometry = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in outputs]
        return list(outputs)

    def _without_values(self, inputs: list[Any]) -> list[Any]:
        return [
            inputs[slot]
            if slot < len(inputs)
            else DeviceTensor(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
            for slot, (shape, stride, dtype) in zip(self._returns, self._geometry, strict=True)
        ]
