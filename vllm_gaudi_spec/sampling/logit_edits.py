"""Logit bias, bad words and min-tokens as one kind of logit edit: add a bias to a token, until so many tokens are out,
after a certain prefix. See `sampling.logits.apply_logit_edits`."""

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


class _Edit(NamedTuple):
    token: int
    bias: float
    until: int = _ALWAYS
    prefix: tuple[int, ...] = ()


class LogitEdits:
    """N edits a row with prefixes of M tokens. Unused entries add 0 to token 0."""

    def __init__(self, max_rows: int, num_edits: int, prefix_len: int) -> None:
        self._rows = max_rows + 1
        self._usual = num_edits, prefix_len
        self._needed = np.zeros((self._rows, 2), dtype=np.int64)
        """By row: how many edits its newest request has, and the longest prefix."""
        self._allocate(num_edits, prefix_len)

    def _allocate(self, num_edits: int, prefix_len: int) -> None:
        self._token = np.zeros((self._rows, num_edits), dtype=np.int32)
        self._bias = np.zeros((self._rows, num_edits), dtype=np.float32)
        self._until = np.full((self._rows, num_edits), _ALWAYS, dtype=np.int32)
        self._prefix = np.full((self._rows, num_edits, prefix_len), _ANY, dtype=np.int32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Edits a row and tokens a prefix: more than usual only while a request with more has a row."""
        return self._prefix.shape[1:]

    def admit(self, request: Request) -> bool:
        """Write a request's edits into its row; False when it has none."""
        edits = _edits_of(request)
        row = request.row
        self._needed[row] = len(edits), max((len(edit.prefix) for edit in edits), default=0)
        self._fit()
        self._token[row], self._bias[row], self._until[row], self._prefix[row] = 0, 0.0, _ALWAYS, _ANY
        for index, edit in enumerate(edits):
            self._token[row, index], self._bias[row, index], self._until[row, index] = (
                edit.token,
                edit.bias,
                edit.until,
            )
            if edit.prefix:
                self._prefix[row, index, -len(edit.prefix) :] = edit.prefix
        return bool(edits)

    def forget(self, rows: list[int]) -> None:
        """Rows that lost their request."""
        if rows:
            self._needed[rows] = 0
            self._fit()

    def _fit(self) -> None:
        """Rare: a longer list than usual changes the shapes of the branch that has edits. They change back, to those
        whose graphs warm-up made."""
        size = tuple(_grown(usual, needed) for usual, needed in zip(self._usual, self._needed.max(0), strict=True))
        if size == self.shape:
            return
        logger.info("There are %d logit edits a request now, with prefixes of %d tokens.", *size)
        old = (self._token, self._bias, self._until, self._prefix)
        width, length = map(min, size, self.shape)
        self._allocate(*size)
        # What is cut off is unused, or of a row without a request.
        for new, values in zip((self._token, self._bias, self._until), old[:3], strict=True):
            new[:, :width] = values[:, :width]
        self._prefix[:, :width, size[1] - length :] = old[3][:, :width, old[3].shape[2] - length :]

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


def _edits_of(request: Request) -> list[_Edit]:
    params = request.params
    edits = [_Edit(int(token), float(bias)) for token, bias in (params.logit_bias or {}).items()]
    for bad_word in params.bad_words_token_ids or ():
        edits.append(_Edit(bad_word[-1], -np.inf, prefix=tuple(bad_word[:-1])))
    if params.min_tokens:
        # Negative: not where a grammar leaves nothing else.
        until = params.min_tokens if params.structured_outputs is None else -params.min_tokens
        edits += [_Edit(token, -np.inf, until=until) for token in sorted(params.all_stop_token_ids)]
    return edits
