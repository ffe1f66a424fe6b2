"""Filters keep the tokens that a sort keeps, on the devices that run here."""

import pytest
import torch

from tests.support.filter_cases import OFF, Filter, Filters, check_kept, check_rows
from vllm_gaudi_spec.devices.cpu.rules import filter_logits as filter_on_cpu
from vllm_gaudi_spec.sampling.filters import filter_logits

HOST = torch.device("cpu")
EITHER = pytest.mark.parametrize("keep", [filter_logits, filter_on_cpu], ids=["torch", "cpu"])
LOGITS = torch.randn(6, 2, 40, generator=torch.Generator().manual_seed(0)) * 3


def in_every_row(number: float) -> torch.Tensor:
    return torch.full((len(LOGITS),), number)


@EITHER
@pytest.mark.parametrize("vocab", [1, 40, 3500])
def test_kept_tokens_equal_sort(keep: Filter, vocab: int) -> None:
    """Rows that are even, steep, masked, equal, of few values, of neighboring numbers; filters alone and together."""
    num_rows, num_open = check_rows(keep, 16, vocab, seed=vocab, device=HOST)
    assert num_open < num_rows / 10


def test_list_equals_search_if_it_covers_every_k() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 1, 700, generator=random) * 4
    top_k = torch.randint(1, 64, (20,), generator=random).int()
    top_k[::5] = 700
    top_p = torch.rand(20, generator=random)
    top_p[::5] = OFF
    filters = Filters(torch.full((20,), 0.01), top_k, top_p)
    check_kept(logits[:, 0], filters, filter_logits(logits, *filters, longest=64)[:, 0])


@EITHER
def test_filters_do_not_depend_on_other_rows(keep: Filter) -> None:
    """Alone, and next to a row whose list is too short."""
    logits = torch.cat((torch.zeros(1, 1, 5000), torch.randn(3, 1, 5000) * 4))
    top_p = torch.tensor([0.9, 0.9, 0.5, OFF])
    together = keep(logits, None, None, top_p)
    for row in range(4):
        assert torch.equal(keep(logits[row : row + 1], None, None, top_p[row : row + 1])[0], together[row])


@EITHER
@pytest.mark.parametrize("broken", [float("nan"), torch.inf])
def test_nan_rows_do_not_affect_others(keep: Filter, broken: float) -> None:
    logits = LOGITS.clone()
    logits[1, 0, 3] = broken
    filters = Filters(in_every_row(0.01), in_every_row(9).int(), in_every_row(0.8))
    filtered, expected = keep(logits, *filters), keep(LOGITS, *filters)
    assert filtered.shape == expected.shape
    sound = [0, 2, 3, 4, 5]
    assert torch.equal(filtered[sound], expected[sound])


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0])
def test_threshold_lies_anywhere_in_sorted_vocabulary(spread: float) -> None:
    """All tokens around a threshold are then in one block, and many of them are equal."""
    vocab = 20_000
    values = torch.randint(vocab // 4, (vocab,), generator=torch.Generator().manual_seed(0)).float()
    top_k = torch.tensor([1, 2, 31, 32, 33, 1023, 1024, 1025, 9999, vocab - 1, vocab], dtype=torch.int32)
    top_p = torch.tensor([1e-6, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 0.999999, OFF])
    logits = (values.sort(descending=True).values * spread / vocab).expand(len(top_k), vocab).contiguous()
    off = torch.zeros(len(top_k)), torch.full_like(top_k, vocab), torch.full_like(top_p, OFF)
    for filters in (Filters(off[0], top_k, off[2]), Filters(off[0], off[1], top_p), Filters(off[0], top_k, top_p)):
        for ordered in (logits, logits.flip(-1)):
            check_kept(ordered, filters, filter_logits(ordered[:, None], *filters)[:, 0])
