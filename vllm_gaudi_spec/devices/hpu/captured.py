"""One HPU graph of a function: a list of tensors goes in, all of which the graph reads, and a tuple of its own tensors
comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from vllm_gaudi_spec.devices.common.arguments import flatten, name_of, rebuild, tensors_in


class CapturedFunction(nn.Module):
    """A function and what is no tensor of its arguments."""

    def __init__(self, function: Callable[..., Any], rest: Any) -> None:
        super().__init__()
        self._function = function
        self._rest = rest
        self.graph_name = name_of(function)
        self._error: Exception | None = None
        self._form: Any = None
        self._sources: list[tuple[bool, int]] = []
        """Of each tensor of the result, whether it is an argument, and its index among those or among the outputs."""

    def forward(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        reads = _Reads(tensors)
        try:
            with reads:
                result = self._function(*rebuild(tensors, self._rest))
        except Exception as error:
            # Nothing ends a capture that an exception leaves: `result_of` raises it, outside.
            self._error = error
            return ()
        found, self._form = flatten(result)
        outputs: list[torch.Tensor] = []
        self._sources = []
        index_of = {id(tensor): index for index, tensor in enumerate(tensors)}
        for tensor in found:
            # What it was given when the graph was made would come back, and not what it is given.
            index = index_of.get(id(tensor))
            self._sources.append((False, len(outputs)) if index is None else (True, index))
            if index is None:
                outputs.append(tensor)
        # Arguments that a graph does not read are copied at each call, over the tensors that it was made with and by a
        # graph that the second call compiles (bridge 1.19, graphs.py). So it reads an element of them.
        read = reads.of(outputs)
        unread = (tensor for index, tensor in enumerate(tensors) if index not in read and tensor.numel())
        return (*outputs, *(tensor[(0,) * tensor.dim()].clone() for tensor in unread))

    def result_of(self, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Any:
        """What the function returned."""
        if self._error is not None:
            raise self._error
        found = [tensors[index] if is_argument else outputs[index] for is_argument, index in self._sources]
        return rebuild(found, self._form)


class _Reads(TorchDispatchMode):
    """Which arguments a result depends on, or what changes besides: a lazy graph has nothing else."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._needed: set[int] = set()
        # By tensor that was passed or made, the indices of the arguments that it is made of.
        self._parts: Any = WeakTensorKeyDictionary()
        self._made: Any = WeakTensorKeyDictionary()
        for index, tensor in enumerate(tensors):
            self._parts[tensor] = self._parts.get(tensor, frozenset()) | {index}

    def of(self, results: Sequence[torch.Tensor]) -> set[int]:
        return self._needed.union(*(self._parts.get(tensor, ()) for tensor in results))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands = list(tensors_in((args, tuple(kwargs.values()))))
        parts: frozenset[int] = frozenset().union(*(self._parts.get(tensor, ()) for tensor in operands))
        returned = list(tensors_in(result))
        for tensor in returned:
            if not any(tensor is other for other in operands):
                self._made[tensor] = True
            elif tensor not in self._made:
                self._needed |= parts  # changed in place, and there afterwards
            self._parts[tensor] = parts
        if not returned:
            self._needed |= parts
        return result
