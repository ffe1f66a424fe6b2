"""Operators of the Ascend Transformer Boost library, which torch_npu has under names of its own."""

from typing import Any

import pytest
import torch
from cann_processes import run_python

TOKENS, SIZE = 5, 16


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    """Cosines and sines. One for all tests: torch_npu keeps the table of its first call."""
    angles = torch.randn(32, SIZE // 2, generator=torch.Generator().manual_seed(0))
    return torch.cat([angles.cos(), angles.sin()], -1).half()


@pytest.mark.parametrize("neox", [True, False])
def test_rotary_embedding(neox: bool, table: torch.Tensor, npu: Any) -> None:
    import torch_npu

    places = torch.tensor([3, 1, 7, 31, 0])
    given = [torch.randn(TOKENS, heads * SIZE).half() for heads in (4, 2)]
    turned = [it.npu() for it in given]
    torch_npu._npu_rotary_embedding(places.npu(), *turned, SIZE, table.npu(), neox)
    cos, sin = (it[places].float()[:, None] for it in table.chunk(2, -1))
    for before, after in zip(given, turned, strict=True):
        heads = before.float().view(TOKENS, -1, SIZE)
        a, b = heads.chunk(2, -1) if neox else (heads[..., ::2], heads[..., 1::2])
        parts = (a * cos - b * sin, b * cos + a * sin)
        expected = torch.cat(parts, -1) if neox else torch.stack(parts, -1).flatten(-2)
        torch.testing.assert_close(after.cpu(), expected.flatten(1).half())


def test_keys_and_values_into_slots(npu: Any) -> None:
    import torch_npu

    key, value = torch.randn(2, TOKENS, 2, SIZE).half()
    caches = [torch.zeros(3, 128, 2, SIZE).half().npu() for _ in range(2)]
    slots = [0, 130, -1, 2, 383]  # one is not kept
    where = torch.tensor(slots, dtype=torch.int32).npu()
    torch_npu._npu_reshape_and_cache(key.npu(), value.npu(), *caches, where)
    for given, cache in zip((key, value), caches, strict=True):
        flat = cache.cpu().flatten(0, 1)
        kept = [row for row, slot in enumerate(slots) if slot >= 0]
        assert torch.equal(flat[[slots[row] for row in kept]], given[kept])
        assert flat.count_nonzero() == given[kept].count_nonzero()


def test_product_that_is_added(npu: Any) -> None:
    import torch_npu

    a, b, total = torch.randn(2, 4).half(), torch.randn(2, 3).half(), torch.randn(4, 3)
    result = total.npu()
    torch_npu._npu_matmul_add_fp32(a.npu(), b.npu(), result)
    torch.testing.assert_close(result.cpu(), total + a.float().T @ b.float())


def write(slots: torch.Tensor) -> None:
    import torch_npu

    caches = [torch.zeros(2, 128, 2, SIZE).npu() for _ in range(2)]
    torch_npu._npu_reshape_and_cache(*torch.zeros(2, 1, 2, SIZE).npu(), *caches, slots.npu())


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("torch_npu._npu_group_topk(torch.rand(4, 8).npu(), 2, 4, 1)", "GroupTopkOperation: is not emulated"),
        ("write(torch.tensor([1], dtype=torch.int64))", "slots are int32"),
        ("write(torch.tensor([256], dtype=torch.int32))", "a slot outside"),
    ],
)
def test_what_is_refused(call: str, reason: str) -> None:
    """In a process of its own: a call that failed fails every later wait."""
    found = run_python(
        "import torch\n"
        "from test_atb import write\n"
        "import torch_npu\n"
        "try:\n"
        f"    {call}\n"
        "    torch.npu.synchronize()\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
        "import os; os._exit(0)\n"
    )
    assert reason in found
