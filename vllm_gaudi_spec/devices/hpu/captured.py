"""Wraps a function so that it can be captured as an HPU graph. The graph reads all of its inputs and returns only new
tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from vllm_gaudi_spec.devices.common.arguments import find_tensors, flatten, get_name, rebuild


class CapturedFunction(nn.Module):
    """A function and its non-tensor arguments, as a module that can be captured."""

    def __init__(self, function: Callable[..., Any], rest: Any) -> None:
        super().__init__()
        self._function = function
        self._rest = rest
        self.graph_name = get_name(function)
        self._error: Exception | None = None
        self._form: Any = None
        self._sources: list[tuple[bool, int]] = []
        """The source of each tensor in the result: whether it is an argument, and its index in the arguments or
        outputs."""

    def forward(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        reads = _Reads(tensors)
        try:
            with reads:
                result = self._function(*rebuild(tensors, self._rest))
        except Exception as error:
            # An exception would leave the capture open, so `unpack_result` raises it after the capture.
            self._error = error
            return ()
        found, self._form = flatten(result)
        outputs: list[torch.Tensor] = []
        self._sources = []
        index_of = {id(tensor): index for index, tensor in enumerate(tensors)}
        for tensor in found:
            # Do not return arguments from the graph, because replays would return the captured tensors.
            index = index_of.get(id(tensor))
            self._sources.append((False, len(outputs)) if index is None else (True, index))
            if index is None:
                outputs.append(tensor)
        # If the graph did not read an argument, the bridge would copy the argument to the captured tensor in each call,
        # with a graph that is compiled in the second call (bridge 1.19, graphs.py). Read one element to avoid this.
        read = reads.of(outputs)
        unread = (tensor for index, tensor in enumerate(tensors) if index not in read and tensor.numel())
        return (*outputs, *(tensor[(0,) * tensor.dim()].clone() for tensor in unread))

    def unpack_result(self, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Any:
        """Return the function's result, reconstructed from the outputs of the graph."""
        if self._error is not None:
            raise self._error
        found = [tensors[index] if is_argument else outputs[index] for is_argument, index in self._sources]
        return rebuild(found, self._form)


class _Reads(TorchDispatchMode):
    """Finds the arguments that affect results or tensors that are modified in place. A lazy graph reads only these."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._needed: set[int] = set()
        # Maps each tensor to the indices of the arguments that it depends on.
        self._parts: Any = WeakTensorKeyDictionary()
        self._made: Any = WeakTensorKeyDictionary()
        for index, tensor in enumerate(tensors):
            self._parts[tensor] = self._parts.get(tensor, frozenset()) | {index}

    def of(self, results: Sequence[torch.Tensor]) -> set[int]:
        return self._needed.union(*(self._parts.get(tensor, ()) for tensor in results))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands = list(find_tensors((args, tuple(kwargs.values()))))
        parts: frozenset[int] = frozenset().union(*(self._parts.get(tensor, ()) for tensor in operands))
        returned = list(find_tensors(result))
        for tensor in returned:
            if not any(tensor is other for other in operands):
                self._made[tensor] = True
            elif tensor not in self._made:
                self._needed |= parts  # modified in place
            self._parts[tensor] = parts
        if not returned:
            self._needed |= parts
        return result
