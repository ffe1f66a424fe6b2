"""Tensors without values for a trace, and what operations make of them, which is worked out once.

The sizes of a result follow from those of the operands. PyTorch's FakeTensorMode works them out, which takes 0.25 ms
an operation even where its own cache has the answer; a model issues the same operations for each of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class Geometry(NamedTuple):
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    device: torch.device


class _Output(NamedTuple):
    operand: int | None
    """Whose memory it has; None where it has memory of its own."""
    geometry: int | None
    """None where it is that operand."""


class Results:
    """Of operations, by the geometry of their operands: the same in all traces."""

    def __init__(self) -> None:
        self.geometries: list[Geometry] = []
        self._numbers: dict[Geometry, int] = {}
        self.by_operation: dict[Hashable, tuple[type | None, list[_Output]]] = {}
        """With the type of the list where there are several."""

    def number_of(self, geometry: Geometry) -> int:
        number = self._numbers.setdefault(geometry, len(self.geometries))
        if number == len(self.geometries):
            self.geometries.append(geometry)
        return number


class Fakes:
    """The tensors of one trace, by number."""

    def __init__(self, results: Results) -> None:
        self.mode = FakeTensorMode(static_shapes=True)
        self.values: list[torch.Tensor] = []
        self._results = results
        self._number_of: dict[int, int] = {}
        self._geometry: list[int | None] = []
        """By number of a value; None for one that its geometry does not describe."""
        self._storage: list[int] = []
        self._entered: dict[int, FakeTensor] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        """Without values, of tensors with values."""

    def enter(self, tensor: torch.Tensor) -> FakeTensor:
        """The same without values, which gets the next number. Tensors that share memory share it here."""
        fake = self._entered.get(id(tensor))
        if fake is None:
            fake = self._entered[id(tensor)] = self._without_values(tensor)
        self._add(fake)
        return fake

    def _without_values(self, tensor: torch.Tensor) -> FakeTensor:
        geometry = _geometry_of(tensor)
        if geometry is None:
            return self.mode.from_tensor(tensor, static_shapes=True)
        storage = tensor.untyped_storage()
        shared = self._storages.get(storage._cdata)
        if shared is None:
            shared = self._storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="meta")
        return self._view(geometry, shared, tensor.is_inference())

    def number_of(self, fake: torch.Tensor) -> int | None:
        return self._number_of.get(id(fake))

    def geometry_of(self, number: int) -> tuple[Hashable, int]:
        """And which memory it has."""
        geometry = self._geometry[number]
        if geometry is None:
            fake = self.values[number]
            plain = (fake.dtype, fake.shape, fake.stride(), fake.storage_offset(), fake.device)
            return plain, self._storage[number]
        return geometry, self._storage[number]

    def result(
        self, form: Hashable, inputs: Sequence[int], run: Callable[[], Any]
    ) -> tuple[Any, tuple[int, ...], tuple[int, ...] | None]:
        """Of an operation: what it returns, the numbers of the tensors in it, and where they are in it, which is None
        for a single tensor. `form` is what it does to `inputs`, which are numbers; None if that does not decide. `run`
        asks PyTorch."""
        key = None if form is None else self._key(form, inputs)
        remembered = None if key is None else self._results.by_operation.get(key)
        if remembered is not None:
            kind, outputs = remembered
            made = [self._remembered(output, inputs) for output in outputs]
            if kind is None:
                return made[0], (self._number_of[id(made[0])],), None
            return kind(made), tuple(self._number_of[id(one)] for one in made), tuple(range(len(made)))
        result = run()
        changed = self._refresh(inputs)
        found, positions = _tensors_of(result)
        numbers = tuple(self._number_of[id(one)] if id(one) in self._number_of else self._add(one) for one in found)
        if key is not None and not changed:
            self._remember(key, inputs, result, numbers)
        return result, numbers, positions

    def _key(self, form: Hashable, inputs: Sequence[int]) -> Hashable | None:
        geometries = [self._geometry[number] for number in inputs]
        if None in geometries:
            return None
        # Which of them share memory decides of which one a result is a view.
        first: dict[int, int] = {}
        sharing = [first.setdefault(self._storage[number], index) for index, number in enumerate(inputs)]
        same = [inputs.index(number) for number in inputs]
        return (form, torch.get_default_dtype(), *geometries, *sharing, *same)

    def _remember(self, key: Hashable, inputs: Sequence[int], result: Any, numbers: Sequence[int]) -> None:
        is_list = isinstance(result, (list, tuple))
        if (len(result) if is_list else 1) != len(numbers):
            return  # there is something else among the tensors
        owners = {self._storage[number]: index for index, number in reversed(list(enumerate(inputs)))}
        outputs = []
        fresh: set[int] = set()
        for number in numbers:
            geometry, storage = self._geometry[number], self._storage[number]
            if geometry is None:
                return
            if number in inputs:
                outputs.append(_Output(list(inputs).index(number), None))
            elif storage in owners:
                outputs.append(_Output(owners[storage], geometry))
            elif storage in fresh or not _is_whole(self.values[number]):
                return
            else:
                fresh.add(storage)
                outputs.append(_Output(None, geometry))
        self._results.by_operation[key] = (type(result) if is_list else None, outputs)

    def _remembered(self, output: _Output, inputs: Sequence[int]) -> torch.Tensor:
        if output.geometry is None:
            assert output.operand is not None
            return self.values[inputs[output.operand]]
        geometry = self._results.geometries[output.geometry]
        if output.operand is None:
            dtype, shape, stride, _, device = geometry
            fake = FakeTensor(self.mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)
        else:
            owner = self.values[inputs[output.operand]]
            fake = self._view(geometry, owner.untyped_storage(), owner.is_inference())
        self._add(fake, output.geometry)
        return fake

    def _view(self, geometry: Geometry, storage: torch.UntypedStorage, is_inference: bool) -> FakeTensor:
        dtype, shape, stride, offset, device = geometry
        # Torch counts the changes of a tensor that was made outside of inference mode with those of its views.
        with nullcontext() if is_inference == torch.is_inference_mode_enabled() else torch.inference_mode(is_inference):
            meta = torch.empty_strided((), (), dtype=dtype, device="meta").set_(storage, offset, shape, stride)
            return FakeTensor(self.mode, meta, device)

    def _add(self, fake: torch.Tensor, geometry: int | None = None) -> int:
        if geometry is None and (found := _geometry_of(fake)) is not None:
            geometry = self._results.number_of(found)
        self.values.append(fake)
        self._geometry.append(geometry)
        self._storage.append(fake.untyped_storage()._cdata)
        return self._number_of.setdefault(id(fake), len(self.values) - 1)

    def _refresh(self, inputs: Sequence[int]) -> bool:
        """Whether the operation gave an operand another geometry, as resize_ does."""
        changed = False
        for number in dict.fromkeys(inputs):
            fake = self.values[number]
            found = _geometry_of(fake)
            geometry = None if found is None else self._results.number_of(found)
            storage = fake.untyped_storage()._cdata
            if (geometry, storage) != (self._geometry[number], self._storage[number]):
                self._geometry[number], self._storage[number] = geometry, storage
                changed = True
        return changed


def _tensors_of(result: Any) -> tuple[list[torch.Tensor], tuple[int, ...] | None]:
    if isinstance(result, torch.Tensor):
        return [result], None
    items = result if isinstance(result, (list, tuple)) else ()
    found = {position: item for position, item in enumerate(items) if isinstance(item, torch.Tensor)}
    return list(found.values()), tuple(found)


def _geometry_of(tensor: torch.Tensor) -> Geometry | None:
    """None for a tensor that is not described by it."""
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or getattr(tensor, "constant", None) is not None
    ):
        return None
    return Geometry(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.device)


def _is_whole(fake: torch.Tensor) -> bool:
    """Whether its memory is what a new tensor of its geometry has."""
    meta = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
    return fake.storage_offset() == 0 and fake.untyped_storage().nbytes() == meta.untyped_storage().nbytes()
