"""Noise follows its distribution, is equal on every device, and does not depend on the batch."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from vllm_gaudi_spec.sampling.noise import Stream, bits, exponential, fold_seed, fresh_seed, neg_log1p_neg


def keys(*seeds: int) -> torch.Tensor:
    return torch.tensor([fold_seed(seed) for seed in seeds], dtype=torch.int32)


def hashed(
    seeds: list[int], positions: list[list[int]], stream: Stream = Stream.TARGET, vocab: int = 64
) -> torch.Tensor:
    place = torch.tensor(positions, dtype=torch.int32)
    return bits(keys(*seeds), place, stream, torch.arange(vocab, dtype=torch.int32))


def reference_mix(x: int) -> int:
    mask = 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    return x ^ (x >> 16)


def reference_bits(seed: int, position: int, stream: int, token: int) -> int:
    mask = 0xFFFFFFFF
    low, high = (word & mask for word in fold_seed(seed))
    place = reference_mix((position * 0x85EBCA6B + stream * 0x27D4EB2F) & mask)
    first = reference_mix(place ^ low)
    second = reference_mix((first + high) & mask)
    return reference_mix(reference_mix((token * 0x9E3779B1 + first) & mask) ^ second)


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("stream", list(Stream))
def test_hash_equals_unbounded_arithmetic(seed: int, stream: Stream) -> None:
    """Wrapping 32-bit tensors and logical shifts, compared with Python integers."""
    result = hashed([seed], [[0, 77, 131071]], stream, vocab=50)
    for place, position in enumerate((0, 77, 131071)):
        expected = [reference_bits(seed, position, int(stream), token) for token in range(50)]
        assert (result[0, place].numpy().view(np.uint32) == np.array(expected, dtype=np.uint32)).all()


def test_hash_differs_by_stream_seed_and_position() -> None:
    base = hashed([1], [[10]], vocab=4096)
    others = [hashed([2], [[10]], vocab=4096), hashed([1], [[11]], vocab=4096)]
    others += [hashed([1], [[10]], stream, vocab=4096) for stream in Stream if stream != Stream.TARGET]
    for other in others:
        assert (base == other).float().mean() < 0.01
        correlation = np.corrcoef(exponential(base).flatten(), exponential(other).flatten())[0, 1]
        assert abs(correlation) < 5 / math.sqrt(4096)


def test_exponential_follows_distribution() -> None:
    sample = exponential(hashed(list(range(64)), [[5]] * 64, vocab=4096)).flatten().double().numpy()
    assert np.isfinite(sample).all()
    assert (sample > 0).all()
    assert stats.kstest(sample, "expon").pvalue > 1e-3


def test_small_variates_are_fine_grained() -> None:
    """The smallest of many variates decides in large vocabularies, so these must not have coarse steps."""
    smallest = exponential(torch.arange(0, 2000, 2, dtype=torch.int32))
    assert smallest.unique().numel() == smallest.numel()
    assert smallest[0] < 1e-9


def test_gumbel_extremes_are_finite() -> None:
    every = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    assert torch.isfinite(exponential(every).log()).all()


def test_seeds_fold_and_fresh_seeds_differ() -> None:
    assert len({fold_seed(seed) for seed in range(10_000)}) == 10_000
    assert fresh_seed(0, 1, "a") == fresh_seed(0, 1, "a")
    assert len({fresh_seed(0, count, "a") for count in range(1000)}) == 1000


def test_o23_noise_without_log1p_is_as_accurate() -> None:
    """At every scale, from the smallest variate to the largest, and where the series ends."""
    edges = 2.0 ** -torch.arange(1, 33) * torch.linspace(0.5, 1.5, 1001)[:, None]
    unit = torch.cat((edges.flatten(), torch.linspace(2.0**-32, 1 - 2.0**-24, 100_001)))
    unit = unit.clamp(2.0**-32, 1 - 2.0**-24)
    exact = -torch.log1p(-unit.double())
    last_bit = torch.nextafter(exact.float(), torch.tensor(torch.inf)).double() - exact.float().double()
    assert ((neg_log1p_neg(unit).double() - exact).abs() / last_bit).max() < 2
    assert ((-(1 - unit).log()).double() - exact).abs().div(last_bit).max() > 1e6, "what a naive kernel makes of it"
