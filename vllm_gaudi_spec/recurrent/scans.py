"""Recurrences over padded batches, computed with torch operations. Shapes and loop lengths do not depend on values.

B  rows      Q  positions         C  convolution channels   W  convolution taps     L  positions per chunk
H  heads     K  key size          V  value size             G  gates per token      N  chunks
D  decays per head
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

_CHUNK = 64
"""The maximum number of positions that are computed at once with matrix products. It must be a power of two."""


def convolve(
    history_BWC: torch.Tensor, inputs_BQC: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor | None
) -> torch.Tensor:
    """Return the causal convolution of each channel, float32 [B, Q, C].

    `history_BWC` contains the W - 1 inputs that precede the first input.
    """
    num_queries = inputs_BQC.shape[1]
    inputs = torch.cat((history_BWC, inputs_BQC), dim=1).float()
    weight_WC = weight_CW.float().T
    out_BQC = inputs.narrow(1, 0, num_queries) * weight_WC[0]
    for tap in range(1, weight_WC.shape[0]):
        out_BQC = out_BQC + inputs.narrow(1, tap, num_queries) * weight_WC[tap]
    return out_BQC if bias_C is None else out_BQC + bias_C.float()


def scan(
    query_BQHK: torch.Tensor,
    key_BQHK: torch.Tensor,
    value_BQHV: torch.Tensor,
    decay_BQHD: torch.Tensor,
    state_BHKV: torch.Tensor,
    beta_BQH: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what each position reads from the state, [B, Q, H, V], and the state after the last position, in float32.

    At each position, the state is multiplied by exp(decay), the outer product of key and value is added, and the query
    reads the state. D is 1, or K if each component of a key has its own decay. If `beta_BQH` is given (the delta rule),
    beta times the difference between the value and what the key reads from the state is added instead of the value. A
    position leaves the state unchanged if its decay is 0 and its value or beta is 0.
    """
    num_queries = query_BQHK.shape[1]
    length = min(_CHUNK, 1 << (num_queries - 1).bit_length())
    missing = -num_queries % length

    def chunked(tensor: torch.Tensor) -> torch.Tensor:
        """Reshape to [B, N, H, L, ...].

        The result is a copy, because a compiler may assume wrong strides for a transposed tensor.
        """
        padded = F.pad(tensor, (*[0, 0] * (tensor.dim() - 2), 0, missing)) if missing else tensor
        return padded.unflatten(1, (-1, length)).transpose(2, 3).contiguous()

    query, key, value = chunked(query_BQHK), chunked(key_BQHK), chunked(value_BQHV)
    since_BNHLD = chunked(decay_BQHD).cumsum(-2)
    """The cumulative decay since the start of the chunk."""
    products = _decay_per_head(since_BNHLD) if since_BNHLD.shape[-1] == 1 else _decay_per_number(since_BNHLD)
    kept_BNHLD = since_BNHLD.exp()
    read = None
    if beta_BQH is not None:
        # In a chunk, each value depends on earlier ones, so solve the triangular system for all values at once.
        beta_BNHL1 = chunked(beta_BQH).unsqueeze(-1)
        scaled = key * beta_BNHL1
        solved = _invert_unit_triangular(products(scaled, key).tril(-1))
        value, read = solved @ (value * beta_BNHL1), solved @ (scaled * kept_BNHLD)
    weights_BNHLL = products(query, key)
    query = query * kept_BNHLD
    last_BNH1D = since_BNHLD[..., -1:, :]
    added_BNHKL = (key * (last_BNH1D - since_BNHLD).exp()).transpose(-1, -2)
    kept_BNHD1 = last_BNH1D.exp().transpose(-1, -2)
    outputs = []
    for chunk in range(query.shape[1]):
        values = value[:, chunk]
        if read is not None:
            values = values - read[:, chunk] @ state_BHKV
        outputs.append(query[:, chunk] @ state_BHKV + weights_BNHLL[:, chunk] @ values)
        state_BHKV = state_BHKV * kept_BNHD1[:, chunk] + added_BNHKL[:, chunk] @ values
    out_BQHV = torch.stack(outputs, dim=1).transpose(2, 3).flatten(1, 2)
    return out_BQHV.narrow(1, 0, num_queries), state_BHKV


Products = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function that maps two tensors [B, N, H, L, K] to [B, N, H, L, L]: the dot product of each position in the first
tensor with each position in the second, times the decay between the two. Products with later positions are 0."""


def _decay_per_head(since_BNHL1: torch.Tensor) -> Products:
    length = since_BNHL1.shape[-2]
    is_before = torch.ones(length, length, dtype=torch.bool, device=since_BNHL1.device).tril()
    between_BNHLL = torch.where(is_before, since_BNHL1 - since_BNHL1.transpose(-1, -2), 0.0)
    between_BNHLL = torch.where(is_before, between_BNHLL.exp(), 0.0)
    return lambda left, right: left @ right.transpose(-1, -2) * between_BNHLL


def _decay_per_number(since_BNHLK: torch.Tensor) -> Products:
    """Return a `Products` function for decays that differ between the components of a key.

    Storing L x L x K decays would take too much memory, and factoring them into exp(since) and exp(-since) would
    overflow. Instead, the result is built from the diagonal: pairs of diagonal blocks are merged into larger blocks. In
    the off-diagonal block of a pair, each decay is the product of the decays before and after the boundary of the two
    blocks.
    """

    def products(left_BNHLK: torch.Tensor, right_BNHLK: torch.Tensor) -> torch.Tensor:
        length = left_BNHLK.shape[-2]
        found = (left_BNHLK * right_BNHLK).sum(-1).view(-1, 1, 1)  # [M, size, size]
        size = 1
        while size < length:
            since, left, right = (
                tensor.reshape(-1, 2, size, tensor.shape[-1]) for tensor in (since_BNHLK, left_BNHLK, right_BNHLK)
            )
            border = since[:, 0, -1:]
            after = left[:, 1] * (since[:, 1] - border).exp()
            before = right[:, 0] * (border - since[:, 0]).exp()
            first, second = found.unflatten(0, (-1, 2)).unbind(1)
            found = _join_blocks(first, after @ before.transpose(-1, -2), second)
            size *= 2
        return found.view(*left_BNHLK.shape[:-1], length)

    return products


def _join_blocks(first: torch.Tensor, below: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    top = torch.cat((first, torch.zeros_like(first)), dim=-1)
    return torch.cat((top, torch.cat((below, second), dim=-1)), dim=-2)


_SHORT_CHUNK = 16
"""Like `_CHUNK`, but for `scan_each`, which stores C x K elements for each position."""


def scan_each(
    query_BQK: torch.Tensor,
    key_BQK: torch.Tensor,
    value_BQC: torch.Tensor,
    step_BQC: torch.Tensor,
    rate_CK: torch.Tensor,
    state_BCK: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what each position reads from the state, [B, Q, C], and the state after the last position, in float32.

    Each element of the state has its own decay. At each position, the element is multiplied by exp(step x rate), and
    step x value x key is added. The query then reads the state. A position with step 0 leaves the state unchanged.
    """
    num_queries = query_BQK.shape[1]
    length = min(_SHORT_CHUNK, 1 << (num_queries - 1).bit_length())
    missing = -num_queries % length
    query, key, value, step = (
        F.pad(tensor, (0, 0, 0, missing)) if missing else tensor
        for tensor in (query_BQK, key_BQK, value_BQC * step_BQC, step_BQC)
    )
    outputs = []
    for begin in range(0, query.shape[1], length):
        queries, keys, values, steps = (tensor.narrow(1, begin, length) for tensor in (query, key, value, step))
        kept_BLCK = (steps.unsqueeze(-1) * rate_CK).exp()
        added_BLCK = values.unsqueeze(-1) * keys.unsqueeze(2)
        # This is a prefix scan: in each iteration, a position covers twice as many earlier positions as before.
        reach = 1
        while reach < length:
            added_BLCK = added_BLCK + kept_BLCK * _later(added_BLCK, reach, 0.0)
            kept_BLCK = kept_BLCK * _later(kept_BLCK, reach, 1.0)
            reach *= 2
        states_BLCK = added_BLCK + kept_BLCK * state_BCK.unsqueeze(1)
        outputs.append((states_BLCK * queries.unsqueeze(2)).sum(-1))
        state_BCK = states_BLCK[:, -1]
    return torch.cat(outputs, dim=1).narrow(1, 0, num_queries), state_BCK


def _later(tensor_BLCK: torch.Tensor, positions: int, first: float) -> torch.Tensor:
    length = tensor_BLCK.shape[1]
    return F.pad(tensor_BLCK, (0, 0, 0, 0, positions, 0), value=first).narrow(1, 0, length)


def _invert_unit_triangular(strict_LL: torch.Tensor) -> torch.Tensor:
    """Invert the sum of I and a strictly lower triangular matrix [..., L, L], where L is a power of two.

    The inverses of diagonal blocks are merged in pairs, so that the block size doubles in each iteration. A sum of
    matrix powers would need fewer matmuls, but for similar keys these powers grow like binomial coefficients, so that
    float32 would lose all significant digits.
    """
    blocks, belows = strict_LL.flatten(0, -3), []  # [M, size, size]
    while (half := blocks.shape[-1] // 2) > 0:
        belows.append(blocks[:, half:, :half])
        blocks = torch.stack((blocks[:, :half, :half], blocks[:, half:, half:]), dim=1).flatten(0, 1)
    inverse = torch.ones_like(blocks)
    for below in reversed(belows):
        first, second = inverse.unflatten(0, (-1, 2)).unbind(1)
        inverse = _join_blocks(first, -(second @ below @ first), second)
    return inverse.view(strict_LL.shape)
