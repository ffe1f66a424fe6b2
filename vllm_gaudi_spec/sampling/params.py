"""Sampling parameters in device tables, and the other inputs of a sampling pass that are copied to the device.

Parameters are written at admission. Each sampling pass copies only the indices of its rows and its grammar masks.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm_gaudi_spec.device_rows import DeviceRows
from vllm_gaudi_spec.records import PositionList
from vllm_gaudi_spec.sampling.branches import (
    IN_LIST,
    SCORED_COUNTS,
    SEARCHED,
    TOP_K_LISTS,
    USUAL_LOGPROBS,
    Branch,
    fit_size,
    select_coarse_counts,
)
from vllm_gaudi_spec.sampling.grammars import Grammar, GrammarInputs, pack_grammars
from vllm_gaudi_spec.sampling.logit_edits import EditTables, LogitEdits, make_empty_rows
from vllm_gaudi_spec.sampling.logits import Penalties
from vllm_gaudi_spec.sampling.thinking import NO_BUDGET
from vllm_gaudi_spec.step_inputs import Packing

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.records import Request, SampleBatch, SampleShape

_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_NEUTRAL = (0.0, np.inf, 0.0, 0.0, 0.0, 1.0)
_INT32_MAX = np.iinfo(np.int32).max
_NUM_INTS = 5
"""Top-k, prompt length, two seed words, and the thinking budget."""


class SamplePass(NamedTuple):
    """Everything that a sampling pass needs from the host, in a single copy that is split inside the graph."""

    branch: Branch
    shape: SampleShape
    edit_sizes: tuple[int, int]
    """Numbers of columns to read from the tables of logit edits."""
    num_drafts: int
    """Number of drafts per row that the sampling pass proposes after verification."""
    packing: Packing

    def split(self) -> tuple[torch.Tensor, torch.Tensor, PositionList | None, GrammarInputs | None]:
        """Return the rows (int64), the maximum number of drafts per row, and any listed positions and grammars."""
        parts = iter(self.packing.split())
        rows_B, max_drafts_B = next(parts).unbind(0)
        position_list = PositionList(next(parts).long(), next(parts).long()) if self.shape.positions else None
        grammars = GrammarInputs(next(parts), next(parts)) if self.branch.constrained else None
        return rows_B.long(), max_drafts_B, position_list, grammars


class SamplingInputs(NamedTuple):
    """Device inputs of a sampling pass, without the logits.

    B is the number of rows in the batch or, after `select_rows`, the number of listed positions.
    """

    branch: Branch
    floats_FB: torch.Tensor
    """float32, in the order of `_FLOATS`."""
    ints_B5: torch.Tensor
    """int32: top-k, prompt length, two seed words, thinking budget."""
    grammars: GrammarInputs | None = None
    allowed_B1W: torch.Tensor | None = None
    """int32 bitmask of allowed tokens."""
    logit_edits: EditTables | None = None
    scored_ids_BE: torch.Tensor | None = None
    """int32: IDs of the tokens whose log-probabilities were requested."""

    @property
    def floats(self) -> dict[str, torch.Tensor]:
        """The parameters by name, each with shape [B]."""
        return dict(zip(_FLOATS, self.floats_FB.unbind(0), strict=True))

    @property
    def penalties(self) -> Penalties:
        floats = self.floats
        return Penalties(floats["presence_penalty"], floats["frequency_penalty"], floats["repetition_penalty"])

    @property
    def top_k_B(self) -> torch.Tensor:
        return self.ints_B5[:, 0]

    @property
    def prompt_len_B(self) -> torch.Tensor:
        return self.ints_B5[:, 1]

    @property
    def keys_B2(self) -> torch.Tensor:
        return self.ints_B5[:, 2:4]

    @property
    def thinking_budget_B(self) -> torch.Tensor:
        """Maximum number of thinking tokens in each row, or `NO_BUDGET`."""
        return self.ints_B5[:, 4]

    @property
    def acceptable_B(self) -> torch.Tensor | None:
        return None if self.grammars is None else self.grammars.bounds_2B[0]

    @property
    def free_B(self) -> torch.Tensor | None:
        return None if self.grammars is None else self.grammars.bounds_2B[1] > 0

    def select_rows(self, row_N: torch.Tensor) -> SamplingInputs:
        """Return inputs for N positions, selected from the inputs of the rows."""
        return self._replace(
            floats_FB=self.floats_FB.index_select(1, row_N),
            ints_B5=self.ints_B5.index_select(0, row_N),
            allowed_B1W=None if self.allowed_B1W is None else self.allowed_B1W.index_select(0, row_N),
            logit_edits=self.logit_edits and self.logit_edits.select_rows(row_N),
            scored_ids_BE=None if self.scored_ids_BE is None else self.scored_ids_BE.index_select(0, row_N),
        )


class Sampling:
    def __init__(
        self,
        backend: DeviceBackend,
        *,
        max_rows: int,
        vocab_size: int,
        max_logprobs: int,
        logprobs_mode: str,
        joint: bool = False,
    ) -> None:
        """Allocate the tables. `Branch.merge` describes `joint`."""
        self.backend = backend
        self._joint = joint
        self.vocab_size = vocab_size
        largest = vocab_size if max_logprobs < 0 else min(max_logprobs, vocab_size)
        self.logprob_counts = tuple(sorted({0, *(count for count in (5, USUAL_LOGPROBS) if count < largest), largest}))
        self.logprobs_mode = logprobs_mode
        self._branches_np = np.zeros((max_rows + 1, len(Branch._fields)), dtype=np.int32)
        self.mask_words = _count_mask_words(vocab_size)
        self._rows = DeviceRows(backend, max_rows, *_make_neutral_rows(vocab_size), *make_empty_rows())
        self._floats_RF, self._ints_RX, self._allowed_RW, *edits = self._rows.tables
        self._logit_edits = LogitEdits(backend, max_rows, EditTables(*edits))

    @staticmethod
    def count_bytes(max_rows: int, vocab_size: int) -> int:
        return DeviceRows.count_bytes(max_rows, *_make_neutral_rows(vocab_size), *make_empty_rows())

    def admit(self, request: Request) -> None:
        """Stage the parameters of a request for its row. `flush` copies them to the device."""
        params, row = request.params, request.row
        floats = np.array([getattr(params, name) for name in _FLOATS], dtype=np.float32)
        if params.top_p >= 1:
            floats[1] = np.inf  # no cumulative probability reaches inf, so rounding cannot mask a token
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        scored = params.logprob_token_ids or []
        ints = np.zeros(_NUM_INTS + SCORED_COUNTS[-1], dtype=np.int32)
        budget = NO_BUDGET if params.thinking_token_budget is None else min(params.thinking_token_budget, _INT32_MAX)
        ints[: _NUM_INTS + len(scored)] = (top_k, request.num_prompt, *request.seed_words, budget, *scored)
        allowed = self._pack_mask(params.allowed_token_ids) if params.allowed_token_ids else None
        edits = self._logit_edits.admit(request)
        self._rows.set(row, floats, ints, allowed, *edits)
        random = params.temperature > 0
        list_length, top_p = self._fit_top_k(top_k) if random else 0, 0
        if random and params.top_p < 1:
            top_p = IN_LIST if 0 < list_length < self.vocab_size else SEARCHED
        self._branches_np[row] = Branch(
            random=random,
            min_p=random and params.min_p > 0,
            top_k=list_length,
            top_p=top_p,
            edited=edits[0] is not None or budget != NO_BUDGET,
            masked=bool(params.allowed_token_ids),
            penalized=bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1),
            scored=fit_size(SCORED_COUNTS, len(scored)),
            reported=params.logprobs is not None and not params.logprob_token_ids,
            num_logprobs=self._fit_logprob_count(params),
        )

    def _fit_top_k(self, top_k: int) -> int:
        if top_k == self.vocab_size:
            return 0
        return next((size for size in TOP_K_LISTS if top_k <= size < self.vocab_size), self.vocab_size)

    def _fit_logprob_count(self, params: SamplingParams) -> int:
        if params.logprobs is None or params.logprob_token_ids:
            return 0
        return fit_size(self.logprob_counts, self.vocab_size if params.logprobs < 0 else params.logprobs)

    def prompt_logprob_counts(self) -> tuple[int, ...]:
        """Return the supported numbers of top tokens to report for each prompt token."""
        return select_coarse_counts(self.logprob_counts) if self.backend.traits.captures else self.logprob_counts

    def prompt_logprob_count(self, num_requested: int) -> int:
        """Return the smallest element of `prompt_logprob_counts` that is at least `num_requested`."""
        num_requested = self.vocab_size if num_requested < 0 else num_requested
        return next(count for count in self.prompt_logprob_counts() if count >= num_requested)

    def _pack_mask(self, token_ids: list[int]) -> np.ndarray:
        allowed = np.zeros(self.mask_words * 32, dtype=bool)
        allowed[np.array(token_ids)] = True
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def branch(self, requests: list[Request], grammars: Collection[str]) -> Branch:
        """Return the sampling branch for requests that sample together. `grammars` lists requests with a grammar."""
        branch = Branch.largest(self._branches_np[[request.row for request in requests]])
        if grammars:
            branch = branch._replace(constrained=any(request.req_id in grammars for request in requests))
        if branch.top_k == self.vocab_size and branch.top_p:
            branch = branch._replace(top_p=SEARCHED)  # top-k needs no list here
        return self._reduce(branch)

    def _reduce(self, branch: Branch) -> Branch:
        """Return a branch that covers this one, from the set that the device captures or compiles."""
        if self.backend.traits.compiles:
            return branch.merge(self.vocab_size, self.logprob_counts, joint=self._joint)
        if self.backend.traits.captures:
            return branch.coarsen(self.vocab_size, self.logprob_counts)
        return branch

    @cached_property
    def branches(self) -> tuple[Branch, ...]:
        """All sampling branches that a step may use, sorted."""
        return tuple(sorted({self._reduce(branch) for branch in Branch.iter_all(self.vocab_size, self.logprob_counts)}))

    def reports(self, requests: list[Request], branch: Branch) -> bool:
        """Return whether any request asks for log-probabilities. A merged branch may compute them anyway."""
        if not any(branch.select_reports()):
            return False
        return any(Branch.largest(self._branches_np[[request.row for request in requests]]).select_reports())

    def flush(self) -> None:
        """Copy the parameters of newly admitted requests to the device."""
        self._rows.flush()

    def warm_up(self) -> None:
        """Run the graphs that are used for admissions."""
        self._rows.warm_up()

    def make_pass(
        self, batch: SampleBatch, branch: Branch, grammars: dict[str, Grammar], num_drafts: int = 0, max_drafts: int = 0
    ) -> SamplePass:
        """Copy the inputs of a batch's sampling pass to the device. `branch` must cover all requests in the batch.

        The sampling pass proposes `num_drafts` drafts per row, of which a row keeps at most `max_drafts`.
        """
        header_2B = np.zeros((2, len(batch.rows_np)), dtype=np.int32)
        header_2B[0], header_2B[1, : len(batch.requests)] = batch.rows_np, max_drafts
        parts = [header_2B]
        if batch.index_np is not None and batch.slots_np is not None:
            parts += [batch.index_np, batch.slots_np]
        if branch.constrained:
            parts += pack_grammars(batch, grammars, self.mask_words)
        sizes = self._logit_edits.get_sizes(batch.rows_np) if branch.edited else (0, 0)
        return SamplePass(branch, batch.shape, sizes, num_drafts, Packing.pack(parts, self.backend.memory.upload))

    def gather(
        self,
        rows_B: torch.Tensor,
        branch: Branch,
        edit_sizes: tuple[int, int] = (0, 0),
        grammars: GrammarInputs | None = None,
    ) -> SamplingInputs:
        """Gather the parameters that a branch uses, for the given rows. This method runs inside a graph."""
        scored_RE = self._ints_RX.narrow(1, _NUM_INTS, branch.scored) if branch.scored else None
        return SamplingInputs(
            branch,
            self._floats_RF.index_select(0, rows_B).T.contiguous(),
            self._ints_RX.narrow(1, 0, _NUM_INTS).index_select(0, rows_B),
            grammars,
            self._allowed_RW.index_select(0, rows_B)[:, None] if branch.masked else None,
            self._logit_edits.gather(rows_B, edit_sizes) if branch.edited else None,
            None if scored_RE is None else scored_RE.index_select(0, rows_B),
        )


def _count_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def _make_neutral_rows(vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a neutral row for each parameter table: floats, ints and allowed tokens."""
    ints = np.zeros(_NUM_INTS + SCORED_COUNTS[-1], dtype=np.int32)
    ints[0], ints[_NUM_INTS - 1] = vocab_size, NO_BUDGET
    return np.array(_NEUTRAL, dtype=np.float32), ints, np.full(_count_mask_words(vocab_size), -1, dtype=np.int32)
