"""Device tables with one row per running request, which are written when a request is admitted.

The host tracks which rows have changed, and `flush` copies only those rows to the device before the next step. Each
step gathers its rows on the device instead of copying data that changes only at admission.

R: rows in the request state. N: rows written together. X: row shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend

_ROWS_AT_ONCE = 8
_T = TypeVar("_T")


def group_rows(items: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Yield groups of eight rows, then the remaining rows one by one.

    Two graphs are therefore enough to write any number of rows.
    """
    while items:
        size = _ROWS_AT_ONCE if len(items) >= _ROWS_AT_ONCE else 1
        yield items[:size]
        items = items[size:]


def group_sizes(max_rows: int) -> tuple[int, ...]:
    return (1,) if max_rows < _ROWS_AT_ONCE else (1, _ROWS_AT_ONCE)


class DeviceRows:
    def __init__(self, backend: DeviceBackend, max_rows: int, *defaults: np.ndarray) -> None:
        """Create tables filled with default values, whose rows are written together.

        `defaults` contains the values for a row without a request, which the padding row, `max_rows`, always has.
        """
        self._upload = backend.memory.upload
        self._max_rows = max_rows
        self._defaults = defaults

        def repeat(num_rows: int) -> list[torch.Tensor]:
            rows = [torch.from_numpy(default_X).expand(num_rows, *default_X.shape) for default_X in defaults]
            return [rows_NX.contiguous().to(backend.traits.torch_device) for rows_NX in rows]

        self.tables = repeat(max_rows + 1)
        """The tables from which graphs gather rows. These tensors are never replaced."""
        self.table_RX = self.tables[0]
        self._default_NX = {size: repeat(size) for size in group_sizes(max_rows)}
        self._changed: dict[int, tuple[np.ndarray | None, ...]] = {}
        self._differs: set[int] = set()
        """Rows whose values differ from the defaults."""
        self._run_put = backend.graphs.graph(self._put_rows)

    @staticmethod
    def count_bytes(max_rows: int, *defaults: np.ndarray) -> int:
        """Return the total size in bytes of the tables and the separately stored default rows."""
        num_rows = max_rows + 1 + sum(group_sizes(max_rows))
        return num_rows * sum(default_X.nbytes for default_X in defaults)

    def set(self, row: int, *values: np.ndarray | None) -> None:
        """Set a row in each table. None stands for the table's default.

        A row that already has the default in every table is not copied again.
        """
        differs = any(values_X is not None for values_X in values)
        if differs or row in self._differs:
            self._changed[row] = values
            (self._differs.add if differs else self._differs.discard)(row)

    def flush(self) -> None:
        """Copy the changed rows to the device. Steps without admissions copy nothing."""
        for group in group_rows(list(self._changed.items())):
            self._write([row for row, _ in group], [values for _, values in group])
            for row, _ in group:  # if writing a later group fails, the next call writes the remaining rows
                del self._changed[row]

    def warm_up(self) -> None:
        """Run the writes that an admission needs, using the padding row."""
        for size in group_sizes(self._max_rows):
            # Use copies of the defaults, because a replay may overwrite the inputs of the captured run.
            self._write([self._max_rows] * size, [self._defaults] * size)

    def _write(self, rows: list[int], values: Sequence[tuple[np.ndarray | None, ...]]) -> None:
        """Write rows, without copying anything for tables in which all of them have the default."""
        inputs = [self._upload(torch.tensor(rows))]
        tables = zip(self._defaults, self._default_NX[len(rows)], zip(*values, strict=True), strict=True)
        for default_X, default_NX, each in tables:
            if any(values_X is not None for values_X in each):
                stacked_NX = np.stack([default_X if values_X is None else values_X for values_X in each])
                default_NX = self._upload(torch.from_numpy(stacked_NX))
            inputs.append(default_NX)
        self._run_put(*inputs)

    def _put_rows(self, rows_N: torch.Tensor, *values: torch.Tensor) -> None:
        for table_RX, values_NX in zip(self.tables, values, strict=True):
            table_RX.index_copy_(0, rows_N, values_NX)
