"""Recurrences in chunks against the same token by token."""

import pytest
import torch

from vllm_gaudi_spec.recurrent.scans import scan, scan_each

ROWS, HEADS, KEY, VALUE = 2, 3, 8, 5


def token_by_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    state: torch.Tensor,
    beta: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = []
    for at in range(query.shape[1]):
        state = state * decay[:, at, :, :, None].exp()
        added = value[:, at]
        if beta is not None:
            added = beta[:, at, :, None] * (added - torch.einsum("bhk,bhkv->bhv", key[:, at], state))
        state = state + key[:, at, :, :, None] * added[:, :, None, :]
        out.append(torch.einsum("bhk,bhkv->bhv", query[:, at], state))
    return torch.stack(out, 1), state


@pytest.mark.parametrize("has_beta", [False, True])
@pytest.mark.parametrize("num_decays", [1, KEY])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 65, 150])
def test_chunked_scan_equals_recurrence(length: int, num_decays: int, has_beta: bool) -> None:
    torch.manual_seed(length)
    query, key = torch.randn(2, ROWS, length, HEADS, KEY).div(KEY**0.5).unbind(0)
    value, decay = torch.randn(ROWS, length, HEADS, VALUE), -torch.rand(ROWS, length, HEADS, num_decays)
    beta = torch.rand(ROWS, length, HEADS) if has_beta else None
    state = torch.randn(ROWS, HEADS, KEY, VALUE)
    expected_out, expected = token_by_token(query, key, value, decay, state, beta)
    out, after = scan(query, key, value, decay, state, beta)
    torch.testing.assert_close(out, expected_out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 17, 50])
def test_scan_with_decay_per_number(length: int) -> None:
    torch.manual_seed(length)
    channels = 4
    query, key = torch.randn(2, ROWS, length, KEY).unbind(0)
    value, step = torch.randn(ROWS, length, channels), torch.rand(ROWS, length, channels)
    rate, state = -torch.rand(channels, KEY) * 3, torch.randn(ROWS, channels, KEY)
    expected, expected_out = state, []
    for at in range(length):
        expected = expected * (step[:, at, :, None] * rate).exp()
        expected = expected + (step * value)[:, at, :, None] * key[:, at, None]
        expected_out.append((expected * query[:, at, None]).sum(-1))
    out, after = scan_each(query, key, value, step, rate, state)
    torch.testing.assert_close(out, torch.stack(expected_out, 1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_decays", [1, KEY])
def test_v09_equal_keys_keep_precision(num_decays: int) -> None:
    """As in a prompt that repeats one token: powers of such a triangle have entries of 1e18."""
    key = torch.ones(1, 64, 1, KEY) / KEY**0.5
    value, beta = torch.randn(1, 64, 1, VALUE), torch.full((1, 64, 1), 0.99)
    arguments = key, key, value, torch.zeros(1, 64, 1, num_decays), torch.zeros(1, 1, KEY, VALUE), beta
    for found, expected in zip(scan(*arguments), token_by_token(*arguments), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_decays", [1, KEY])
def test_strong_decay_does_not_overflow(num_decays: int) -> None:
    key, value = torch.randn(1, 64, 1, KEY), torch.randn(1, 64, 1, VALUE)
    arguments = key, key, value, torch.full((1, 64, 1, num_decays), -50.0), torch.ones(1, 1, KEY, VALUE)
    for found, expected in zip(scan(*arguments), token_by_token(*arguments, None), strict=True):
        torch.testing.assert_close(found, expected)
