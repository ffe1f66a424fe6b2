"""The GPU's kernels for row operations return what the torch functions return.

Run on a GPU, or without one with TRITON_INTERPRET=1.
"""

from typing import Any

import pytest
import torch

from vllm_gaudi_spec.attention import row_operations

pytestmark = pytest.mark.cuda

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAD_ROW, WIDTH = 9, 40


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def there(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(there, value))
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def apart(value: Any) -> Any:
    """Return the same numbers as a column of a wider tensor, as host-to-device copies have them."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.stack([value, torch.full_like(value, 1)], dim=-1)[..., 0]


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.cpu()]
    return [tensor for part in value or () for tensor in tensors_of(part)]


def check(name: str, *args: Any, changes: bool = False, **named: Any) -> list[torch.Tensor]:
    """Compare a kernel with the reference, and return the kernel's result.

    `changes`: the function changes its first argument, which is then the result.
    """
    from vllm_gaudi_spec.devices.cuda.row_kernels import ROW_OPERATIONS

    # Tensors that are written to, and the history, are contiguous.
    first = args[0].clone() if changes or name == "take_newest" else apart(args[0])
    given = there((first, *map(apart, args[1:])))
    found = tensors_of(getattr(ROW_OPERATIONS, name)(*given, **named))
    expected = tensors_of(getattr(row_operations.TORCH, name)(*args, **named))
    if changes:
        found, expected = [given[0].cpu()], [args[0]]
    assert found
    for ours, wanted in zip(found, expected, strict=True):
        assert (ours.dtype, ours.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(ours, wanted)
    return found


def test_every_operation_has_a_kernel() -> None:
    from vllm_gaudi_spec.devices.cuda.row_kernels import ROW_OPERATIONS

    assert not set(ROW_OPERATIONS) & set(row_operations.TORCH)


# Decodes, and prompt chunks longer than a tile; one row is padding, and one's padding extends past its blocks.
STARTS_B, REAL_B = int32(5, 0, 3, 120), int32(2, 3, -1, 1)
TABLES = (torch.arange(1, 129, dtype=torch.int32).view(4, 32), torch.arange(200, 264, dtype=torch.int32).view(4, 16))


@pytest.mark.parametrize("queries", [1, 5, 70])
@pytest.mark.parametrize("groups", [0, 1, 2])
def test_locate_rectangle(queries: int, groups: int) -> None:
    tokens_BQ = torch.arange(1, 4 * queries + 1, dtype=torch.int32).view(4, queries)
    real_B = REAL_B if queries < 70 else int32(70, 33, 0, 7)
    _, positions_T, *slots = check("locate_rectangle", tokens_BQ, STARTS_B, real_B, TABLES[:groups], (4, 8)[:groups])
    assert positions_T.dtype == torch.int64
    assert all(slots_T.dtype == torch.int64 for slots_T in slots)
    assert len(slots) == groups


@pytest.mark.parametrize("queries", [1, 3, 50])
@pytest.mark.parametrize("groups", [0, 1, 2])
def test_locate_columns(queries: int, groups: int) -> None:
    check("locate_columns", STARTS_B, REAL_B, queries, TABLES[:groups], (4, 8)[:groups])


def test_take_newest() -> None:
    history_RM = torch.randint(100, (PAD_ROW + 1, WIDTH), dtype=torch.int32)
    rows_B, lengths_B, wanted_B = torch.tensor([3, 0, PAD_ROW]), int32(7, 2, 1), int32(2, 1, 0)
    tokens_BN, *_ = check("take_newest", history_RM, rows_B, lengths_B, wanted_B, 2)
    assert tokens_BN[0].tolist() == history_RM[3, 5:7].tolist()


def test_append() -> None:
    history = torch.randint(100, ((PAD_ROW + 1) * WIDTH,), dtype=torch.int32)
    # The contents of the pad row are never read.
    history[PAD_ROW * WIDTH :] = int32(7, 8, 9, *[0] * (WIDTH - 3))
    tokens_BN = int32(7, 8, 9).repeat(4, 1)
    rows_B, first_B, num_B = torch.tensor([3, 0, PAD_ROW, 5]), int32(7, 2, 1, WIDTH - 3), int32(2, 0, 3, 3)
    before = history.clone()
    [after] = check("append", history, rows_B, first_B, tokens_BN, num_B, changes=True, width=WIDTH, pad_row=PAD_ROW)
    assert (after != before).view(PAD_ROW + 1, WIDTH).any(1).nonzero().flatten().tolist() == [3, 5]


def test_put() -> None:
    state_R = torch.arange(PAD_ROW + 1, dtype=torch.int32)
    [after] = check(
        "put", state_R, torch.tensor([3, PAD_ROW, 0, PAD_ROW]), int32(7, 8, -1, 9), changes=True, pad_row=PAD_ROW
    )
    assert after.tolist() == [-1, 1, 2, 7, 4, 5, 6, 7, 8, 0]


@pytest.mark.parametrize("vocab_size", [10, None])
@pytest.mark.parametrize("is_sound", [True, False])
def test_check_drafts(vocab_size: int | None, is_sound: bool) -> None:
    tokens_BK = torch.randint(-1, 12, (200, 3), dtype=torch.int32)
    num_B, most_B = (torch.randint(low, 4, (200,), dtype=torch.int32) for low in (-1, 0))
    sound_BK = torch.rand(200, 3) < 0.8 if is_sound else None
    _, counts_B = check("check_drafts", tokens_BK, num_B, most_B, sound_BK, vocab_size, mark=-5)
    assert 0 < int((counts_B == -5).sum()) < 200
