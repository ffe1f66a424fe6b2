"""e4m3 numbers against a table of all of them and torch's own, and sums of their products in any order."""

import pytest
import torch

from tests.support.reference.e4m3 import nearest, table
from vllm_gaudi_spec.config import E4M3_MAX
from vllm_gaudi_spec.quantization.fp8 import HostArithmetic, to_e4m3

ONE = torch.tensor(1.0)


def between(largest: float) -> torch.Tensor:
    """All numbers, what lies half way and a little beside that, what is beyond, and noise of all sizes."""
    numbers = table(largest)
    half_way = (numbers[1:] + numbers[:-1]) / 2
    beside = torch.cat((half_way * (1 + 2**-20), half_way * (1 - 2**-20)))
    beyond = largest * torch.tensor([1.01, 1.04, 1.1, 2.0, 1e4, 1e9], dtype=torch.float64)
    noise = torch.randn(4000, generator=torch.Generator().manual_seed(0)).double() * torch.logspace(-4, 4, 4000, 10)
    some = torch.cat((numbers, half_way, beside, beyond, noise)).float()
    return torch.cat((some, -some))


@pytest.mark.parametrize("card", E4M3_MAX)
def test_the_nearest_number_and_the_even_one_of_two(card: str) -> None:
    x = between(E4M3_MAX[card])
    assert torch.equal(to_e4m3(x, E4M3_MAX[card]).double(), nearest(x, E4M3_MAX[card]))


def test_a_gaudi_3_has_torchs_numbers() -> None:
    largest = torch.finfo(torch.float8_e4m3fn).max
    assert E4M3_MAX["gaudi3"] == largest == table(1e9).max() - 32  # torch's last code is nan
    x = between(largest)
    inside = x[x.abs() <= largest]
    assert torch.equal(to_e4m3(inside, largest).view(torch.uint8), inside.to(torch.float8_e4m3fn).view(torch.uint8))


def numbers(*shape: int, seed: int) -> torch.Tensor:
    """Of all sizes: sums of their products in float32 depend on the order."""
    generator = torch.Generator().manual_seed(seed)
    chosen = table(448.0)[torch.randint(0, 127, shape, generator=generator)]
    return chosen * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)


def test_sums_of_products_are_exact_in_any_order() -> None:
    arithmetic = HostArithmetic(448.0)
    x, w = numbers(33, 4096, seed=1), numbers(4096, 50, seed=2)
    out = arithmetic.multiply(x, w, ONE, ONE, torch.float64)
    # In units of 2**-18 they are whole numbers, which Python adds without an end.
    whole_x, whole_w = (x * 512).long().tolist(), (w * 512).long().t().tolist()
    for row, column in ((0, 0), (7, 49), (32, 3)):
        assert int(out[row, column] * 2**18) == sum(a * b for a, b in zip(whole_x[row], whole_w[column], strict=True))
    order = torch.randperm(4096, generator=torch.Generator().manual_seed(3))
    assert torch.equal(out, arithmetic.multiply(x[:, order], w[order], ONE, ONE, torch.float64))
    for rows in (1, 2, 5, 32):
        assert torch.equal(out[:rows], arithmetic.multiply(x[:rows], w, ONE, ONE, torch.float64))
    assert not torch.equal(x.float() @ w.float(), x.float()[:, order] @ w.float()[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_is_divided_by_its_scale_and_back(dtype: torch.dtype) -> None:
    arithmetic, scale = HostArithmetic(240.0), torch.tensor(0.37)
    x = (torch.randn(100, generator=torch.Generator().manual_seed(0)) * 60).to(dtype)
    values = arithmetic.cast(x, 1 / scale)
    # In bfloat16 the inverse is rounded, and the product.
    scaled = x * (1 / scale).bfloat16() if dtype is torch.bfloat16 else x * (1 / scale)
    assert torch.equal(values, nearest(scaled.float(), 240.0))
    back = arithmetic.uncast(values, scale, dtype)
    assert back.dtype == dtype
    assert torch.equal(back, (values.float() * scale).to(dtype))
    assert torch.equal(arithmetic.cast(arithmetic.uncast(values, scale, torch.float32), 1 / scale), values)
