"""The e4m3 numbers, listed one by one, and rounding by searching all of them."""

import torch


def table(largest: float) -> torch.Tensor:
    """Return float64 in the order of codes. A number with an even index has an even mantissa."""
    small = [mantissa * 2.0**-9 for mantissa in range(8)]
    normal = [(1 + mantissa / 8) * 2.0 ** (code - 7) for code in range(1, 16) for mantissa in range(8)]
    return torch.tensor([number for number in small + normal if number <= largest], dtype=torch.float64)


def nearest(x: torch.Tensor, largest: float) -> torch.Tensor:
    """Return the nearest numbers in float64: the even one of a tie, and the largest for anything beyond it."""
    numbers = table(largest)
    distance = (x.double().abs().unsqueeze(-1) - numbers).abs()
    closest = distance == distance.amin(-1, keepdim=True)
    even = torch.arange(len(numbers)) % 2 == 0
    index = (closest.int() * 2 + (closest & even).int()).argmax(-1)
    return numbers[index] * torch.where(x < 0, -1.0, 1.0).double()
