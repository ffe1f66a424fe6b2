"""Tables on the device with one row per running request, written when a request is admitted.

The host notes which rows changed, and `flush` copies just those to the device before the next step reads them. A step
gathers its rows on the device, so that it does not copy what changes only at admission.

R: rows of the request state. N: rows that are written together. X: shape of a row.
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
    """Yield groups of eight, then the rest one by one.

    Two graphs are then enough to write any number of rows.
    """
    while items:
        size = _ROWS_AT_ONCE if len(items) >= _ROWS_AT_ONCE else 1
        yield items[:size]
        items = items[size:]


def group_sizes(max_rows: int) -> tuple[int, ...]:
    """Return the sizes of the groups that `group_rows` yields for up to `max_rows` rows."""
    return (1,) if max_rows < _ROWS_AT_ONCE else (1, _ROWS_AT_ONCE)


class DeviceRows:
    def __init__(self, backend: DeviceBackend, max_rows: int, default_X: np.ndarray) -> None:
        """Make a table of default values.

        `default_X` holds the values of a row without a request, which the pad row, `max_rows`, keeps.
        """
        self._upload = backend.memory.upload
        self._max_rows = max_rows
        self._default_X = default_X
        host_RX = torch.from_numpy(default_X).expand(max_rows + 1, *default_X.shape).contiguous()
        self.table_RX = host_RX.to(backend.traits.torch_device)
        """The table, from which graphs gather rows. It is always the same tensor."""
        self._changed: dict[int, np.ndarray] = {}
        self._differs: set[int] = set()
        """Rows whose values are not the default."""
        self._run_put = backend.graphs.graph(self._put_rows)

    @staticmethod
    def count_bytes(max_rows: int, default_X: np.ndarray) -> int:
        """Return the size of a table."""
        return (max_rows + 1) * default_X.nbytes

    def set(self, row: int, values_X: np.ndarray | None) -> None:
        """Set a row, where None stands for the default.

        A row that already has the default values is not copied again.
        """
        if values_X is not None:
            self._changed[row] = values_X
            self._differs.add(row)
        elif row in self._differs:
            self._changed[row] = self._default_X
            self._differs.discard(row)

    def flush(self) -> None:
        """Copy the changed rows to the device. This is a no-op in steps without admissions."""
        for group in group_rows(list(self._changed.items())):
            self._write([row for row, _ in group], [values_X for _, values_X in group])
            for row, _ in group:  # only now: an error leaves the rest for the next call
                del self._changed[row]

    def warm_up(self) -> None:
        """Run the writes of an admission on the pad row."""
        for size in group_sizes(self._max_rows):
            self._write([self._max_rows] * size, [self._default_X] * size)

    def _write(self, rows: list[int], values: list[np.ndarray]) -> None:
        self._run_put(self._upload(torch.tensor(rows)), self._upload(torch.from_numpy(np.stack(values))))

    def _put_rows(self, rows_N: torch.Tensor, values_NX: torch.Tensor) -> None:
        self.table_RX.index_copy_(0, rows_N, values_NX)
