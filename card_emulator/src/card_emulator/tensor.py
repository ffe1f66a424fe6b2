"""Tensors that report the card as their device and store their values in CPU tensors, and operations on them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from card_emulator import kernels
from card_emulator.card import DEVICE, Allocation, DeviceRefusal
from card_emulator.ops import OpInfo, classify
from card_emulator.queue import Queue
from card_emulator.source import here
from card_emulator.traffic import changed_bytes, gathered_bytes, read_bytes

_make = torch.Tensor._make_wrapper_subclass
_infos: dict[Any, OpInfo] = {}
_INT32 = torch.iinfo(torch.int32)


class DeviceTensor(torch.Tensor):
    inner: torch.Tensor  # type: ignore[assignment]  # hides torch.inner
    """The values, or a meta tensor if the tensor was created in compile-only mode."""
    memory: Allocation
    # The defaults are class attributes, so that creating a tensor sets only a few attributes.
    part = False
    """Whether the tensor is a view of another tensor, unless it covers all of it like `detach`."""
    ghost = False
    """Whether the tensor has no values, because it was created in compile-only mode."""
    twin: torch.Tensor | None = None
    """A meta tensor that replaces `inner` in compile-only mode, or None until it is needed."""
    epoch = 0
    index = 0  # type: ignore[assignment]
    pending = False
    capture: Any = None
    slot = -1

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, inner: torch.Tensor, memory: Allocation | None = None, part: bool = False) -> DeviceTensor:
        tensor: DeviceTensor = _make(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=DEVICE.where
        )
        tensor.inner = inner
        if part:
            tensor.part = True
        if inner.is_meta:
            tensor.ghost = True
        if inner.dtype in DEVICE.model.lacks_dtypes and DEVICE.hostile:
            raise DeviceRefusal(f"{inner.dtype} does not exist on the device, at {here()}")
        tensor.memory = memory or Allocation(inner.nbytes)
        return tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        info = _infos.get(func) or info_of(func)
        kwargs = kwargs or {}
        if info.handler is not None:
            return info.handler(info, args, kwargs)
        if info.decompose:
            return func.decompose(*args, **kwargs)
        return execute(info, args, kwargs)

    # -- attributes and methods that do not reach the dispatcher --

    @property
    def data(self) -> DeviceTensor:
        # If this is a parameter, return a plain tensor, which can be changed in place regardless of autograd.
        return self.detach() if isinstance(self, torch.nn.Parameter) else self  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value is self:
            return
        if not isinstance(value, DeviceTensor):
            if not isinstance(self, torch.nn.Parameter):
                raise RuntimeError(f"cannot assign a tensor on {value.device} to the data of one on {DEVICE.where}")
            self.leave(value)
            return
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.inner, self.memory, self.part = value.inner, value.memory, value.part
        self.ghost, self.twin = value.ghost, None

    leave: Callable[[torch.Tensor], None]
    """Move a parameter to the host."""

    def data_ptr(self) -> int:
        return real(self).data_ptr()

    def cpu(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.to("cpu")

    def tolist(self) -> Any:
        refuse_values("tolist")
        return download("tolist", self).tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"can't convert {DEVICE.where} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    def pin_memory(self, *args: Any, **kwargs: Any) -> DeviceTensor:
        raise RuntimeError(f"cannot pin a tensor on {DEVICE.where}; only dense CPU tensors can be pinned")

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        if self.ghost or DEVICE.compile_only:
            return f"tensor(..., device='{DEVICE.where}', size={tuple(self.shape)}, dtype={self.dtype})"
        text = repr(download("print", self))
        return f"{text[:-1]}, device='{DEVICE.where}')"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 and spec else repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        if id(self) not in memo:
            copy = DeviceTensor.__new__(type(self), real(self).clone())
            for name in ("_is_param", *(key for key in self.__dict__ if key not in OWN_STATE)):
                if name in self.__dict__:
                    setattr(copy, name, self.__dict__[name])
            memo[id(self)] = copy
        found: DeviceTensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _from_host, (download("pickle", self),)


OWN_STATE = frozenset(
    ("inner", "memory", "part", "ghost", "twin", "epoch", "index", "pending", "capture", "slot", "_is_param")
)


def _from_host(host: torch.Tensor) -> DeviceTensor:
    return DeviceTensor(host)


def real(tensor: DeviceTensor) -> torch.Tensor:
    """Return the tensor's values. If they were never computed because of compile-only mode, return garbage."""
    if tensor.ghost:
        DEVICE.counters.step.garbage_reads += 1
        DEVICE.counters.event("garbage read", "a tensor created in compile-only mode")
        meta = tensor.inner
        tensor.inner = garbage(torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype))
        tensor.ghost = False
    return tensor.inner


def garbage(values: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with values that are too large to be valid indices, token IDs or activations. On a kind card, fill
    it with zeros."""
    if not DEVICE.hostile:
        return values.zero_()
    if values.dtype is torch.bool:
        return values.fill_(True)
    by_byte = values.view(torch.uint8) if values.element_size() == 1 else values
    return by_byte.fill_(0x5A if by_byte.element_size() == 1 else 0x5A5A if by_byte.element_size() == 2 else 0x5A5A5A5A)


def _shape_only(tensor: DeviceTensor) -> torch.Tensor:
    if tensor.ghost:
        return tensor.inner
    twin = tensor.twin
    if twin is None:
        inner = tensor.inner
        twin = tensor.twin = torch.empty_strided(inner.shape, inner.stride(), dtype=inner.dtype, device="meta")
    return twin


class Operation(NamedTuple):
    """An operation that was called during a graph capture."""

    info: OpInfo
    run: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: Sequence[Any]
    new: Sequence[DeviceTensor]
    """The results that are not arguments changed in place."""
    single: bool
    """Whether the operation returned a single result instead of a sequence."""


def execute(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any], run: Callable[..., Any] | None = None) -> Any:
    """Run an operation on the CPU tensors, record it, and wrap its results."""
    device = DEVICE
    if device.blocked is not None:
        raise DeviceRefusal(device.blocked)
    if info.special:
        kwargs = _before(info, args, kwargs)
    run = run or info.run
    capture = device.capture
    compile_only = device.compile_only
    call = Operands(info, device.queue if capture is None and device.queue.keyed else None, compile_only)
    inner_args = call.unwrap_all(args)
    inner_kwargs = {}
    for name, value in kwargs.items():
        call.key.append(name)
        inner_kwargs[name] = call.unwrap(value)
    if compile_only and "generator" in inner_kwargs:
        inner_kwargs["generator"] = None
    out = run(*inner_args, **inner_kwargs)

    new = call.new
    single = isinstance(out, torch.Tensor)
    if single:
        result: Any = call.wrap(out)
        results: Sequence[Any] = (result,)
    elif isinstance(out, (tuple, list)):
        results = [call.wrap(item) if isinstance(item, torch.Tensor) else item for item in out]
        result = tuple(results) if isinstance(out, tuple) else results
    elif out is None and info.writes:
        # In-place operations on lists of tensors return nothing.
        single, result, results = True, None, (None,)
    else:
        return out

    computes = info.computes(new)
    if computes:
        _account(info, args, kwargs, call, results)
    if capture is not None:
        capture.record(Operation(info, run, args, kwargs, results, new, single))
    else:
        device.counters.step.stray_ops += computes
        device.queue.record(call.key, new, written(info, args, kwargs) if info.writes else (), computes)
    if info.int_arithmetic and device.lazy and not compile_only:
        for item in results:
            if item.dtype is torch.int64:
                check_range(item.inner, info.name)
    if computes and not compile_only:
        for item in new:
            if item.dtype is torch.float64:
                wide(item, info.name)
    return result


class Operands:
    """Unwraps an operation's arguments, wraps its results, and builds its key in the lazy graph."""

    __slots__ = ("compile_only", "graph", "info", "inners", "key", "new", "wrappers")

    def __init__(self, info: OpInfo, graph: Queue | None, compile_only: bool) -> None:
        self.info = info
        self.graph = graph
        self.compile_only = compile_only
        self.wrappers: list[DeviceTensor] = []
        self.inners: list[torch.Tensor] = []
        self.new: list[DeviceTensor] = []
        self.key: list[Any] = [info.name]

    def unwrap_all(self, args: Sequence[Any]) -> list[Any]:
        """Unwrap the arguments. For speed, the two most common types of arguments are handled inline."""
        found: list[Any] = []
        graph, key = self.graph, self.key
        for arg in args:
            kind = type(arg)
            if kind is DeviceTensor:
                inner = _values(arg, self.compile_only) if self.compile_only or arg.ghost else arg.inner
                self.wrappers.append(arg)
                self.inners.append(inner)
                found.append(inner)
                if graph is not None:
                    key.append(arg.index if arg.epoch == graph.epoch else graph.enter(arg))
            elif kind in _PLAIN:
                found.append(arg)
                key.append(arg)
            else:
                found.append(self.unwrap(arg))
        return found

    def unwrap(self, arg: Any) -> Any:
        if isinstance(arg, DeviceTensor):
            inner = _values(arg, self.compile_only)
            self.wrappers.append(arg)
            self.inners.append(inner)
            if self.graph is not None:
                self.key.append(arg.index if arg.epoch == self.graph.epoch else self.graph.enter(arg))
            return inner
        if isinstance(arg, (list, tuple)):
            self.key.append(len(arg))
            return self.unwrap_all(arg)
        if isinstance(arg, torch.Tensor):
            if arg.dim() != 0:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{DEVICE.where} and {arg.device}! (aten.{self.info.name} at {here()})"
                )
            # Treat a zero-dimensional host tensor like a Python scalar, which is part of the recipe.
            self.key.append(arg.item())
            return arg.to("meta") if self.compile_only else arg
        self.key.append(arg if isinstance(arg, Hashable) else type(arg))
        return arg

    def wrap(self, out: torch.Tensor) -> DeviceTensor:
        info = self.info
        if info.fresh:
            tensor = DeviceTensor(out)
        else:
            for wrapper, inner in zip(self.wrappers, self.inners, strict=True):
                if out is inner:
                    return wrapper
            base = self.wrappers[0]
            if info.view or (
                info.maybe_view and out.untyped_storage()._cdata == self.inners[0].untyped_storage()._cdata
            ):
                tensor = view_of(base, out, base.memory, base.part if info.same else True)
            else:
                tensor = DeviceTensor(out)
        self.new.append(tensor)
        return tensor


def view_of(base: DeviceTensor, inner: torch.Tensor, memory: Allocation, part: bool) -> DeviceTensor:
    if torch.is_inference_mode_enabled() and not base.is_inference():
        with torch.inference_mode(False):  # a tensor created outside inference mode shares its version with its views
            return DeviceTensor(inner, memory, part)
    return DeviceTensor(inner, memory, part)


_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size})


def _values(tensor: DeviceTensor, compile_only: bool) -> torch.Tensor:
    return _shape_only(tensor) if compile_only else real(tensor)


def written(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> list[DeviceTensor]:
    """Return the device tensors that the operation changes in place."""
    found: list[DeviceTensor] = []
    for key in info.writes:
        value = kwargs.get(key) if isinstance(key, str) else (args[key] if key < len(args) else None)
        found.extend(item for item in (value if isinstance(value, (list, tuple)) else (value,)) if _is_ours(item))
    return found


def _is_ours(value: Any) -> bool:
    return isinstance(value, DeviceTensor)


def _before(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Count or reject an operation before it runs, and return its keyword arguments."""
    device = DEVICE
    name = f"aten.{info.name}"
    if check := _CHECKS.get(info.name):
        check(args, kwargs)
    if info.on_host:
        device.fallback(name)
    if info.dynamic and kwargs.get("output_size") is None:
        device.dynamic(name)
    if info.reads:
        refuse_values(name)
        device.host_read(name, args[0].element_size())
    if info.sorts and isinstance(args[0], DeviceTensor):
        step = device.counters.step
        length = args[0].shape[-1] if args[0].dim() else 1
        step.sorts += 1
        step.sort_elements += args[0].numel()
        asked = f"{name} of {length}" if info.packet != "topk" else f"{name} k={args[1]} of {length}"
        device.counters.event("sort", asked)
    if info.random and kwargs.get("generator") is None:
        return {**kwargs, "generator": device.generator}
    return kwargs


def refuse_values(what: str) -> None:
    """Raise an error during a graph capture and in compile-only mode, where no values can be read."""
    DEVICE.refuse_in_capture(f"{what} reads a value on the host")
    if DEVICE.compile_only:
        raise DeviceRefusal(f"{what} at {here()} reads a value, and compile-only mode computes none")


def check_range(values: torch.Tensor, what: str) -> None:
    """Reject int64 values that do not fit in 32 bits. Only lazy mode needs this check: compiled mode stores int64 in 64
    bits (bridge 1.19 and 1.24, env_flags: PT_ENABLE_INT64_SUPPORT is on if PT_HPU_LAZY_MODE=0)."""
    if values.numel() == 0:
        return
    low, high = values.aminmax()
    if low < _INT32.min or high > _INT32.max:
        raise DeviceRefusal(
            f"{what} at {here()}: lazy mode stores int64 in 32 bits, but the values range from {int(low)} "
            f"to {int(high)}"
        )


def wide(tensor: DeviceTensor, what: str) -> None:
    """Round a float64 result to float32, in which the card computes it."""
    DEVICE.counters.step.float64_ops += 1
    DEVICE.counters.event("float64 computed as float32", what)
    kernels.through_float32(tensor.inner)
    if DEVICE.capture is not None:
        DEVICE.capture.record_kernel(kernels.through_float32, [tensor])


_WITHIN_REACH = (1 << 31) - 1
"""The number of bytes that every engine of a card can address in any memory layout."""


def _account(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any], call: Operands, results: Sequence[Any]) -> None:
    """Add the operation's work to the current step."""
    step = DEVICE.counters.step
    step.ops += 1
    made = 0
    for item in call.new:
        made += item.memory.nbytes
        if item.memory.nbytes > _WITHIN_REACH:
            DEVICE.model.check_reach(info.packet, item.inner)
    moved = made
    targets = written(info, args, kwargs) if info.writes else []
    for position, (wrapper, inner) in enumerate(zip(call.wrappers, call.inners, strict=True)):
        target = next((i for i, item in enumerate(targets) if item is wrapper), None) if targets else None
        if target is not None:
            del targets[target]  # if the tensor is passed twice, the second argument is an ordinary operand
            read, changed = changed_bytes(info.packet, info.overload, args, inner)
            moved += changed
        elif info.gathers and position == 0:
            read = gathered_bytes(inner, made)
        else:
            read = read_bytes(info.packet, position, args, kwargs, inner)
        if wrapper.memory.nbytes > _WITHIN_REACH:
            DEVICE.model.check_reach(info.packet, inner)
        moved += read
        if wrapper.memory.kv:
            step.kv_bytes_read += read
    step.bytes_moved += moved
    if info.flops is not None:
        step.flops += info.flops(args, kwargs, results[0])


def download(what: str, tensor: DeviceTensor) -> torch.Tensor:
    DEVICE.host_read(what, tensor.inner.nbytes)
    if DEVICE.compile_only:
        return garbage(torch.empty(tensor.shape, dtype=tensor.dtype))
    return real(tensor).clone()


Handler = Callable[[OpInfo, Sequence[Any], dict[str, Any]], Any]
# Handlers for operations that do more than compute, by name or by namespace (such as that of collectives). Other
# modules register them.
_HANDLERS: dict[str, Handler] = {}
_NAMESPACES: dict[str, Handler] = {}
Check = Callable[[Sequence[Any], dict[str, Any]], None]
# Maps the name of a torch operation to a function that rejects certain arguments. Other modules register these
# functions.
_CHECKS: dict[str, Check] = {}


def handle(name: str, handler: Handler) -> None:
    _HANDLERS[name] = handler


def handle_namespace(name: str, handler: Handler) -> None:
    _NAMESPACES[name] = handler


def check_before(name: str, check: Check) -> None:
    _CHECKS[name] = check


def info_of(func: Any) -> OpInfo:
    info = _infos.get(func)
    if info is None:
        info = _infos[func] = classify(func, DEVICE.model.lacks)
        name = "reshapes in place" if info.reshapes else info.name
        info.handler = _HANDLERS.get(name) if func.namespace == "aten" else _NAMESPACES.get(func.namespace)
        info.special = info.special or (func.namespace == "aten" and name in _CHECKS)
    return info
