"""Logit bias, bad words and min-tokens as one kind of rule: add a bias to a token, until so many tokens are out, after
a certain prefix. See `sample.logits.apply_rules`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.records import Request

logger = init_logger(__name__)

_ALWAYS = np.iinfo(np.int32).max
_ANY = -1


class _Rule(NamedTuple):
    token: int
    bias: float
    until: int = _ALWAYS
    prefix: tuple[int, ...] = ()


class LogitRules:
    """N rules a row with prefixes of M tokens. Unused places bias token 0 by nothing."""

    def __init__(self, max_rows: int, num_rules: int, prefix_len: int) -> None:
        self._rows = max_rows + 1
        self._allocate(num_rules, prefix_len)

    def _allocate(self, num_rules: int, prefix_len: int) -> None:
        self._token = np.zeros((self._rows, num_rules), dtype=np.int32)
        self._bias = np.zeros((self._rows, num_rules), dtype=np.float32)
        self._until = np.full((self._rows, num_rules), _ALWAYS, dtype=np.int32)
        self._prefix = np.full((self._rows, num_rules, prefix_len), _ANY, dtype=np.int32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Rules a row and tokens a prefix: changes only when a request brings more than any before."""
        return self._prefix.shape[1:]

    def admit(self, request: Request) -> bool:
        """Write a request's rules into its row; False when it has none."""
        rules = _rules_of(request)
        row = request.row
        self._make_room(len(rules), max((len(rule.prefix) for rule in rules), default=0))
        self._token[row], self._bias[row], self._until[row], self._prefix[row] = 0, 0.0, _ALWAYS, _ANY
        for place, rule in enumerate(rules):
            self._token[row, place], self._bias[row, place], self._until[row, place] = (
                rule.token,
                rule.bias,
                rule.until,
            )
            if rule.prefix:
                self._prefix[row, place, -len(rule.prefix) :] = rule.prefix
        return bool(rules)

    def _make_room(self, num_rules: int, prefix_len: int) -> None:
        """Rare: a longer list than any before changes the shapes of the branch that has rules."""
        old = (self._token, self._bias, self._until, self._prefix)
        width, length = self._prefix.shape[1:]
        if num_rules <= width and prefix_len <= length:
            return
        width, length = _grown(width, num_rules), _grown(length, prefix_len)
        logger.info("Logit rules grow to %d a request with prefixes of %d tokens.", width, length)
        self._allocate(width, length)
        for new, values in zip((self._token, self._bias, self._until), old[:3], strict=True):
            new[:, : values.shape[1]] = values
        self._prefix[:, : old[3].shape[1], length - old[3].shape[2] :] = old[3]

    def gather(
        self, rows_np: np.ndarray, backend: DeviceBackend
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token, bias, until [B, N] and prefix [B, N, M] of a batch, on the device."""
        token, bias, until, prefix = (
            backend.memory.upload(torch.from_numpy(table[rows_np]))
            for table in (self._token, self._bias, self._until, self._prefix)
        )
        return token, bias, until, prefix


def _grown(size: int, needed: int) -> int:
    while size < needed:
        size *= 2
    return size


def _rules_of(request: Request) -> list[_Rule]:
    params = request.params
    rules = [_Rule(int(token), float(bias)) for token, bias in (params.logit_bias or {}).items()]
    for word in params.bad_words_token_ids or ():
        rules.append(_Rule(word[-1], -np.inf, prefix=tuple(word[:-1])))
    if params.min_tokens:
        rules += [_Rule(token, -np.inf, until=params.min_tokens) for token in sorted(params.all_stop_token_ids)]
    return rules
