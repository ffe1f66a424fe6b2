"""Tensors without values for tracing, and a cache of what operations return for them.

The sizes of a result follow from those of the operands. PyTorch's FakeTensorMode derives them in 0.25 ms per operation,
even with its own cache, and a model issues the same operations for each of its layers.
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
    """The operand whose memory the output shares; None if it has memory of its own."""
    geometry: int | None
    """None if the output is that operand."""


class Results:
    """Results of operations by the geometry of their operands, shared by all traces."""

    def __init__(self) -> None:
        self.geometries: list[Geometry] = []
        self._numbers: dict[Geometry, int] = {}
        self.by_operation: dict[Hashable, tuple[type | None, list[_Output]]] = {}
        """With the type of the list for operations that return several tensors."""

    def get_number(self, geometry: Geometry) -> int:
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
        self._get_number: dict[int, int] = {}
        self._geometry: list[int | None] = []
        """Geometries by number; None for a tensor that a geometry does not describe."""
        self._storage: list[int] = []
        self._entered: dict[int, FakeTensor] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        """Storages without values, for those of tensors with values."""

    def enter(self, tensor: torch.Tensor) -> FakeTensor:
        """Add a tensor without values under the next number. Tensors that share memory share it here."""
        fake = self._entered.get(id(tensor))
        if fake is None:
            fake = self._entered[id(tensor)] = self._make_fake(tensor)
        self._add(fake)
        return fake

    def _make_fake(self, tensor: torch.Tensor) -> FakeTensor:
        geometry = _get_geometry(tensor)
        if geometry is None:
            return self.mode.from_tensor(tensor, static_shapes=True)
        storage = tensor.untyped_storage()
        shared = self._storages.get(storage._cdata)
        if shared is None:
            shared = self._storages[storage._cdata] = torch.UntypedStorage(storage.nbytes(), device="meta")
        return self._view(geometry, shared, tensor.is_inference())

    def get_number(self, fake: torch.Tensor) -> int | None:
        return self._get_number.get(id(fake))

    def get_geometry(self, number: int) -> tuple[Hashable, int]:
        """Return the geometry of a tensor and the memory that it has."""
        geometry = self._geometry[number]
        if geometry is None:
            fake = self.values[number]
            plain = (fake.dtype, fake.shape, fake.stride(), fake.storage_offset(), fake.device)
            return plain, self._storage[number]
        return geometry, self._storage[number]

    def result(
        self, form: Hashable, inputs: Sequence[int], run: Callable[[], Any]
    ) -> tuple[Any, tuple[int, ...], tuple[int, ...] | None]:
        """Return an operation's result, the numbers of its tensors, and their positions in it.

        The positions are None for a single tensor. `form` describes the operation without its `inputs`, which are
        numbers; None if the form does not determine the result. `run` derives the result by PyTorch.
        """
        key = None if form is None else self._key(form, inputs)
        remembered = None if key is None else self._results.by_operation.get(key)
        if remembered is not None:
            kind, outputs = remembered
            made = [self._recall(output, inputs) for output in outputs]
            if kind is None:
                return made[0], (self._get_number[id(made[0])],), None
            return kind(made), tuple(self._get_number[id(one)] for one in made), tuple(range(len(made)))
        result = run()
        changed = self._refresh(inputs)
        found, positions = _make_tensors(result)
        numbers = tuple(self._get_number[id(one)] if id(one) in self._get_number else self._add(one) for one in found)
        if key is not None and not changed:
            self._remember(key, inputs, result, numbers)
        return result, numbers, positions

    def _key(self, form: Hashable, inputs: Sequence[int]) -> Hashable | None:
        geometries = [self._geometry[number] for number in inputs]
        if None in geometries:
            return None
        # Shared memory determines which operand a result is a view of.
        first: dict[int, int] = {}
        sharing = [first.setdefault(self._storage[number], index) for index, number in enumerate(inputs)]
        same = [inputs.index(number) for number in inputs]
        return (form, torch.get_default_dtype(), *geometries, *sharing, *same)

    def _remember(self, key: Hashable, inputs: Sequence[int], result: Any, numbers: Sequence[int]) -> None:
        is_list = isinstance(result, (list, tuple))
        if (len(result) if is_list else 1) != len(numbers):
            return  # the result has items that are not tensors
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

    def _recall(self, output: _Output, inputs: Sequence[int]) -> torch.Tensor:
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
        # Torch counts changes of a tensor made outside of inference mode together with those of its views.
        with nullcontext() if is_inference == torch.is_inference_mode_enabled() else torch.inference_mode(is_inference):
            meta = torch.empty_strided((), (), dtype=dtype, device="meta").set_(storage, offset, shape, stride)
            return FakeTensor(self.mode, meta, device)

    def _add(self, fake: torch.Tensor, geometry: int | None = None) -> int:
        if geometry is None and (found := _get_geometry(fake)) is not None:
            geometry = self._results.get_number(found)
        self.values.append(fake)
        self._geometry.append(geometry)
        self._storage.append(fake.untyped_storage()._cdata)
        return self._get_number.setdefault(id(fake), len(self.values) - 1)

    def _refresh(self, inputs: Sequence[int]) -> bool:
        """Whether the operation changed an operand's geometry, as `resize_` does."""
        changed = False
        for number in dict.fromkeys(inputs):
            fake = self.values[number]
            found = _get_geometry(fake)
            geometry = None if found is None else self._results.get_number(found)
            storage = fake.untyped_storage()._cdata
            if (geometry, storage) != (self._geometry[number], self._storage[number]):
                self._geometry[number], self._storage[number] = geometry, storage
                changed = True
        return changed


def _make_tensors(result: Any) -> tuple[list[torch.Tensor], tuple[int, ...] | None]:
    if isinstance(result, torch.Tensor):
        return [result], None
    items = result if isinstance(result, (list, tuple)) else ()
    found = {position: item for position, item in enumerate(items) if isinstance(item, torch.Tensor)}
    return list(found.values()), tuple(found)


def _get_geometry(tensor: torch.Tensor) -> Geometry | None:
    """Return a tensor's geometry; None if it has no such description."""
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or getattr(tensor, "constant", None) is not None
    ):
        return None
    return Geometry(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.device)


def _is_whole(fake: torch.Tensor) -> bool:
    """Whether a tensor occupies its memory as a new tensor of its geometry would."""
    meta = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="meta")
    return fake.storage_offset() == 0 and fake.untyped_storage().nbytes() == meta.untyped_storage().nbytes()
