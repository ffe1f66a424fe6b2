"""Counter-based noise: a hash of (request seed, absolute position, stream, token ID).

The hash uses wrapping 32-bit arithmetic with logical shifts, so the result depends neither on the device nor on
the batch or the number of drafts. Each use of noise has its own stream, because an acceptance rule would be lossy if
two uses had the same noise. The only exception is intentional: coupled drafts use the target's stream.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum

import torch


class Stream(IntEnum):
    TARGET = 0
    ACCEPT = 1
    DRAFT = 2
    RESIDUAL = 3


# Odd constants that spread neighboring inputs (golden ratio and three primes), as signed 32-bit values.
_SPREAD_TOKEN = 0x9E3779B1 - (1 << 32)
_SPREAD_POSITION = 0x85EBCA6B - (1 << 32)
_SPREAD_STREAM = 0x27D4EB2F
_SPREAD_START = 0xC2B2AE3D - (1 << 32)
# Multipliers from the "lowbias32" integer finalizer.
_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B - (1 << 32)


def fold_seed(seed: int) -> tuple[int, int]:
    """Hash a seed to two signed 32-bit words. This function runs on the host, once per request."""
    digest = hashlib.blake2b(seed.to_bytes(16, "little", signed=True), digest_size=8).digest()
    low, high = (int.from_bytes(part, "little", signed=True) for part in (digest[:4], digest[4:]))
    return low, high


def fresh_seed(*parts: object) -> int:
    """Return a seed for a request that has none. The seed is the same on every rank but differs between admissions."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right logically, because torch shifts signed integers arithmetically."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """Apply a bijective int32 hash finalizer in place."""
    x.bitwise_xor_(_shift_right(x, 16)).mul_(_MIX_1)
    x.bitwise_xor_(_shift_right(x, 15)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift_right(x, 16))


def derive_block_keys(keys_B2: torch.Tensor, starts_B: torch.Tensor) -> torch.Tensor:
    """Return keys for noise that is used in only one verify step.

    Two steps of a request never start at the same position, so these keys never give two steps the same noise.

    Args:
        starts_B: Position of the first query in the step.
    """
    low = _mix_(keys_B2[:, 0] ^ _mix_(starts_B * _SPREAD_START))
    high = _mix_(keys_B2[:, 1] + low)
    return torch.stack((low, high), dim=1)


def bits(
    keys_B2: torch.Tensor, positions_BQ: torch.Tensor, stream: Stream | torch.Tensor, tokens_V: torch.Tensor
) -> torch.Tensor:
    """Return the hash of request key, position, stream and token ID, as int32 [B, Q, V].

    If `stream` is a tensor (int32, in the shape of the positions), it selects a stream for each position.
    """
    position_hash = _mix_(positions_BQ * _SPREAD_POSITION + stream * _SPREAD_STREAM)
    first = _mix_(position_hash ^ keys_B2[:, :1])
    second = _mix_(first + keys_B2[:, 1:])
    hashed = _mix_(tokens_V * _SPREAD_TOKEN + first[..., None])
    return _mix_(hashed.bitwise_xor_(second[..., None]))


def exponential(hashed: torch.Tensor) -> torch.Tensor:
    """Return unit exponential variates computed from hash bits.

    The variates are finite, positive, and most closely spaced near 0, where they determine the argmax.
    """
    # A float32 keeps 24 of the 31 bits, so small values are exact multiples of 2**-31.
    unit = _shift_right(hashed, 1).float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    if unit.device.type in _ACCURATE_LOG1P:
        return unit.neg_().log1p_().neg_()
    return neg_log1p_neg(unit)


_ACCURATE_LOG1P = ("cpu", "cuda")
"""Device types with an accurate `log1p`.

Gaudi and Ascend do not publish an error bound. If a device computes `log1p(x)` as log(1 + x), one token in 2**25 gets
infinite noise.
"""
_SERIES_BELOW = 2.0**-6


def neg_log1p_neg(unit: torch.Tensor) -> torch.Tensor:
    """Return -log1p(-unit) for values in (0, 1), without computing logarithms of values near 1."""
    # Four terms are enough, because the fifth is less than half a unit in the last place.
    series = unit * (unit * (unit * (unit * (1 / 4) + 1 / 3) + 1 / 2) + 1)
    far = unit.clamp(min=_SERIES_BELOW)
    left = 1 - far
    # The first term corrects for the rounding error of `left`.
    logarithm = (far - (1 - left)) / left - left.log()
    return torch.where(unit < _SERIES_BELOW, series, logarithm)


def uniform(keys_B2: torch.Tensor, positions_BQ: torch.Tensor, stream: Stream) -> torch.Tensor:
    """Return uniform noise in [0, 1) as float32 [B, Q]."""
    token_0 = torch.zeros(1, dtype=torch.int32, device=positions_BQ.device)
    hashed = bits(keys_B2, positions_BQ, stream, token_0).flatten(1)
    # Keep 24 bits, which float32 represents exactly, so that no value is rounded up to 1.
    return _shift_right(hashed, 8).float().mul_(2.0**-24)


def gumbel(
    keys_B2: torch.Tensor, positions_BQ: torch.Tensor, stream: Stream | torch.Tensor, tokens_V: torch.Tensor
) -> torch.Tensor:
    """Return standard Gumbel noise [B, Q, V].

    The argmax of log-probabilities plus this noise is a sample from the distribution.
    """
    return exponential(bits(keys_B2, positions_BQ, stream, tokens_V)).log_().neg_()
