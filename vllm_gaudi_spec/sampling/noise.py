"""Counter-based noise: a hash of (request seed, absolute position, stream, token id).

The hash uses wrapping 32-bit arithmetic with logical shifts, so that every device computes the same bits for every
batch composition and number of drafts. Each use of noise has its own stream: noise shared between two uses would make
an acceptance rule lossy. Only coupled drafts share the target's stream, on purpose.
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
# Multipliers of the "lowbias32" integer finalizer.
_MIX_1 = 0x7FEB352D
_MIX_2 = 0x846CA68B - (1 << 32)


def fold_seed(seed: int) -> tuple[int, int]:
    """Return a seed of any size as two signed 32-bit words; computed on the host, once per request."""
    digest = hashlib.blake2b(seed.to_bytes(16, "little", signed=True), digest_size=8).digest()
    low, high = (int.from_bytes(part, "little", signed=True) for part in (digest[:4], digest[4:]))
    return low, high


def fresh_seed(*parts: object) -> int:
    """Return a seed for a request without one: equal on every rank, different for every admission."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift logically, as torch shifts signed integers arithmetically."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """Apply a bijective finalizer over int32, in place."""
    x.bitwise_xor_(_shift_right(x, 16)).mul_(_MIX_1)
    x.bitwise_xor_(_shift_right(x, 15)).mul_(_MIX_2)
    return x.bitwise_xor_(_shift_right(x, 16))


def derive_block_keys(keys_B2: torch.Tensor, starts_B: torch.Tensor) -> torch.Tensor:
    """Return keys for noise that is used in one verify step only.

    Two steps of a request never start at the same position, so they share no noise under these keys.

    Args:
        starts_B: Position of the step's first query.
    """
    low = _mix_(keys_B2[:, 0] ^ _mix_(starts_B * _SPREAD_START))
    high = _mix_(keys_B2[:, 1] + low)
    return torch.stack((low, high), dim=1)


def bits(
    keys_B2: torch.Tensor, positions_BQ: torch.Tensor, stream: Stream | torch.Tensor, tokens_V: torch.Tensor
) -> torch.Tensor:
    """Return the hash of request key, position, stream and token id, int32 [B, Q, V].

    Streams may differ between positions: then they are int32 with the positions' shape.
    """
    position_hash = _mix_(positions_BQ * _SPREAD_POSITION + stream * _SPREAD_STREAM)
    first = _mix_(position_hash ^ keys_B2[:, :1])
    second = _mix_(first + keys_B2[:, 1:])
    hashed = _mix_(tokens_V * _SPREAD_TOKEN + first[..., None])
    return _mix_(hashed.bitwise_xor_(second[..., None]))


def exponential(hashed: torch.Tensor) -> torch.Tensor:
    """Return unit exponential variates from hash bits.

    They are finite, positive, and fine-grained near 0, where argmax decides.
    """
    # A float keeps 24 significant bits of 31, so small values are exact multiples of 2**-31.
    unit = _shift_right(hashed, 1).float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    if unit.device.type in _ACCURATE_LOG1P:
        return unit.neg_().log1p_().neg_()
    return neg_log1p_neg(unit)


_ACCURATE_LOG1P = ("cpu", "cuda")
"""Device types with an accurate log1p.

Gaudi and Ascend publish no error bound; if theirs is log(1 + x), the noise of one in 2**25 tokens is infinite.
"""
_SERIES_BELOW = 2.0**-6


def neg_log1p_neg(unit: torch.Tensor) -> torch.Tensor:
    """Return -log1p(-unit) for (0, 1), from logarithms of numbers that are not near 1."""
    # Four terms: the fifth is smaller than half of the last bit.
    series = unit * (unit * (unit * (unit * (1 / 4) + 1 / 3) + 1 / 2) + 1)
    far = unit.clamp(min=_SERIES_BELOW)
    left = 1 - far
    # The first term is the rounding error of `left`.
    logarithm = (far - (1 - left)) / left - left.log()
    return torch.where(unit < _SERIES_BELOW, series, logarithm)


def uniform(keys_B2: torch.Tensor, positions_BQ: torch.Tensor, stream: Stream) -> torch.Tensor:
    """Return uniform noise in [0, 1), float32 [B, Q]."""
    token_0 = torch.zeros(1, dtype=torch.int32, device=positions_BQ.device)
    hashed = bits(keys_B2, positions_BQ, stream, token_0).flatten(1)
    # A float32 holds 24 bits exactly, so no value is rounded up to 1.
    return _shift_right(hashed, 8).float().mul_(2.0**-24)


def gumbel(
    keys_B2: torch.Tensor, positions_BQ: torch.Tensor, stream: Stream | torch.Tensor, tokens_V: torch.Tensor
) -> torch.Tensor:
    """Return standard Gumbel noise [B, Q, V].

    Adding it to log-probabilities and taking the argmax samples from them.
    """
    return exponential(bits(keys_B2, positions_BQ, stream, tokens_V)).log_().neg_()
