"""Checks of sampling noise: its bits must be the same on every device, and its logarithms must be accurate."""

from __future__ import annotations

import torch

from vllm_gaudi_spec.sampling import noise
from vllm_gaudi_spec.sampling.noise import Stream
from vllm_gaudi_spec.self_test.subject import Failed, Subject

_SEEDS = (0, 1, -5, 2**63 - 1)
_POSITIONS = (0, 77, 4095, 131_071)
_VOCAB = 512
_ULPS = 2.0
"""The maximum error of a logarithm, in units of its last bit."""


def check_hash(subject: Subject) -> str:
    """Check that hashes are bitwise equal to those on the host, in all of their uses."""
    inputs = _hash_inputs()
    found, expected = subject.compute(self_test_hash, *inputs), self_test_hash(*inputs)
    names = "noise of tokens", "uniform noise", "keys of a block"
    for name, theirs, ours in zip(names, found, expected, strict=True):
        wrong = (theirs != ours).flatten().nonzero().flatten()
        if len(wrong):
            first = int(wrong[0])
            raise Failed(
                f"{len(wrong)} of {ours.numel()} hashes ({name}) differ from the CPU's, the first is "
                f"{theirs.flatten()[first].item()} instead of {ours.flatten()[first].item()}"
            )
    return f"{sum(part.numel() for part in expected):,} hashes equal the CPU's"


def _hash_inputs() -> tuple[torch.Tensor, ...]:
    keys_B2 = torch.tensor([noise.fold_seed(seed) for seed in _SEEDS], dtype=torch.int32)
    positions_BQ = torch.tensor(_POSITIONS, dtype=torch.int32) + torch.arange(len(_SEEDS), dtype=torch.int32)[:, None]
    streams_BQ = torch.tensor(list(Stream), dtype=torch.int32).expand(len(_SEEDS), -1).contiguous()
    return keys_B2, positions_BQ, streams_BQ, torch.arange(_VOCAB, dtype=torch.int32)


def self_test_hash(
    keys_B2: torch.Tensor, positions_BQ: torch.Tensor, streams_BQ: torch.Tensor, tokens_V: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return (
        noise.bits(keys_B2, positions_BQ, streams_BQ, tokens_V),
        noise.uniform(keys_B2, positions_BQ, Stream.ACCEPT),
        noise.derive_block_keys(keys_B2, positions_BQ.select(1, 0)),
    )


def check_noise(subject: Subject) -> str:
    """Compare noise with float64 results, especially for extreme hashes, which determine the argmax in large
    vocabularies."""
    hashed = _hashes()
    keys_B2, positions_BQ, _, tokens_V = _hash_inputs()
    # Compute the exact noise from the device's own hashes, which `check_hash` has verified.
    found, bits, gumbel = subject.compute(self_test_noise, hashed, keys_B2, positions_BQ, tokens_V)
    expected = _exponential(hashed)
    ulps = torch.nan_to_num((found.double() - expected).abs() / _last_bit(expected), nan=torch.inf)
    worst = int(ulps.argmax())
    if not ulps[worst] <= _ULPS:
        raise Failed(
            f"exponential noise of hash {hashed[worst].item()} is {found[worst].item():.9g}, "
            f"{ulps[worst].item():.3g} ulp from float64's {expected[worst].item():.9g} ({_ULPS:g} are "
            f"allowed), as of {int((ulps > _ULPS).sum() + ulps.isnan().sum())} of {len(ulps)} hashes"
        )
    exact = -_exponential(bits).log()
    # A relative error of an exponential value becomes an absolute error of its logarithm, so allow for both.
    off = (gumbel.double() - exact).abs() / (_ULPS * (torch.finfo(torch.float32).eps + _last_bit(exact)))
    worst = int(off.argmax())
    if not off.flatten()[worst] <= 1:
        raise Failed(
            f"Gumbel noise of hash {bits.flatten()[worst].item()} is {gumbel.flatten()[worst].item():.9g}, float64's "
            f"{exact.flatten()[worst].item():.9g}"
        )
    return f"{len(hashed) + bits.numel():,} variates, at most {ulps.max().item():.2f} ulp off"


def _hashes() -> torch.Tensor:
    """Return int32 hashes to check: the smallest and largest ones, powers of two, and some in between."""
    powers = 2 ** torch.arange(32, dtype=torch.int64)
    edges = (powers[:, None] + torch.arange(-4, 5)).flatten().clamp_(0, 2**32 - 1)
    smallest, largest = torch.arange(2048), 2**32 - 1 - torch.arange(2048)
    between = torch.arange(0, 2**32, 2**32 // 4096 + 1)
    found = torch.cat((smallest, largest, edges, between))
    return torch.where(found < 2**31, found, found - 2**32).int()


def self_test_noise(
    hashed: torch.Tensor, keys_B2: torch.Tensor, positions_BQ: torch.Tensor, tokens_V: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    inputs = keys_B2, positions_BQ, Stream.TARGET, tokens_V
    return noise.exponential(hashed), noise.bits(*inputs), noise.gumbel(*inputs)


def _exponential(hashed: torch.Tensor) -> torch.Tensor:
    """Return exponential values as float64, computed from the same uniform float32 values as in `noise.exponential`."""
    unit = ((hashed >> 1) & (2**31 - 1)).float().add(0.5).mul(2.0**-31).clamp(max=1.0 - 2.0**-24)
    return -torch.log1p(-unit.double())


def _last_bit(exact: torch.Tensor) -> torch.Tensor:
    """Return the value of the last bit of a float32 near `exact`, as float64."""
    near = exact.abs().float()
    return torch.nextafter(near, torch.tensor(torch.inf)).double() - near.double()
