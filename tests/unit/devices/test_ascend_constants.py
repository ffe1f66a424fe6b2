"""Constants of NPU graphs: which tensors are kept, which are computed again, and that results stay the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_gaudi_spec.devices.ascend.constants import Constants

X = torch.tensor([[5, -3, 8], [1 << 20, 0, 2]], dtype=torch.int32)


class Counting(TorchDispatchMode):
    """Counts operations that compute something, by name; views do not."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns[0]
        if str(returns.type) == "Tensor" and (returns.alias_info is None or func._schema.is_mutable):
            self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def recorded(constants: Constants, function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[str]]:
    """Return the result of the captured run, and what it computed."""
    with torch.inference_mode():
        expected = function()
        with constants.finding():
            first = function()
        counting = Counting()
        with counting, constants.using():
            second = function()
    assert first.dtype == second.dtype == expected.dtype
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)
    return second, counting.names


def ranges_and_what_is_made_of_them() -> torch.Tensor:
    offsets = torch.arange(3, dtype=torch.int32)
    return X + (offsets * 7)[None] + offsets.long()[None, :].int()


FOLDED: dict[str, tuple[Callable[[], torch.Tensor], list[str]]] = {
    "a number in where": (lambda: torch.where(X > 2, X, 0), ["gt", "where"]),
    "of another dtype": (lambda: torch.where(X > 2, X, math.inf), ["gt", "where"]),
    "in front": (lambda: torch.where(X > 2, -1, X), ["gt", "where"]),
    "two of them": (lambda: torch.where(X > 2, 1, 2), ["gt", "where"]),
    "a shift": (lambda: (X >> 3) << 1, ["__rshift__", "__lshift__"]),
    "ranges": (ranges_and_what_is_made_of_them, ["add", "add"]),
}


@pytest.mark.parametrize("case", FOLDED)
def test_npu_g15_constants_are_computed_once(case: str) -> None:
    function, left = FOLDED[case]
    assert recorded(Constants(), function)[1] == left


def test_constants_of_equal_numbers_of_different_types_differ() -> None:
    constants, mask = Constants(), torch.tensor([True])
    x = torch.ones(1)
    zeros = [recorded(constants, lambda zero=zero: torch.where(~mask, x, zero))[0] for zero in (0.0, -0.0)]  # type: ignore[misc]
    assert [math.copysign(1, float(zero)) for zero in zeros] == [1, -1]
    dtypes = [recorded(constants, lambda end=end: torch.arange(end))[0].dtype for end in (3, 3.0)]  # type: ignore[misc]
    assert dtypes == [torch.int64, torch.float32]


def test_written_range_is_no_constant() -> None:
    constants = Constants()
    _, names = recorded(constants, lambda: torch.arange(4).mul_(3) + 1)
    assert names == ["arange", "mul_", "add"]
    _, names = recorded(constants, lambda: torch.arange(4) + torch.ones(4))
    assert names == ["ones", "add"]
    # The constant stays unchanged for other functions that use it.
    recorded(constants, lambda: torch.arange(4).fill_(0))
    assert recorded(constants, lambda: torch.arange(4) + 0)[0].tolist() == [0, 1, 2, 3]


def test_results_from_a_written_range_are_no_constants() -> None:
    def function() -> torch.Tensor:
        numbers = torch.arange(4)
        doubled = numbers * 2
        numbers[None, 1:].add_(10)
        return doubled + numbers * 2

    constants = Constants()
    recorded(constants, lambda: torch.arange(4) * 2)
    found, _ = recorded(constants, function)
    assert found.tolist() == [0, 24, 28, 32]


def test_random_numbers_and_large_tensors_are_not_kept() -> None:
    constants, others = Constants(), Constants()
    with torch.inference_mode(), constants.finding():
        numbers = torch.arange(2).float()
    with torch.inference_mode(), others.finding():
        numbers = torch.arange(2).float()
        torch.bernoulli(numbers)
        torch.arange((1 << 20) + 1)
    assert len(others) == len(constants) > 0
