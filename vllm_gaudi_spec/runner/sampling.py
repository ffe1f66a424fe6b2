"""From requests' sampling parameters to sampled tokens: host tables by row, and the order in which they are applied."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm_gaudi_spec.runner.logit_rules import LogitRules
from vllm_gaudi_spec.sample import logits as edit
from vllm_gaudi_spec.sample import strict
from vllm_gaudi_spec.sample.logprobs import gather_logprobs

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import LogprobsTensors

    from vllm_gaudi_spec.backends.base import DeviceBackend
    from vllm_gaudi_spec.runner.batch import SampleBatch
    from vllm_gaudi_spec.runner.custom_processors import CustomProcessors
    from vllm_gaudi_spec.runner.requests import Request, Requests

_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_NEUTRAL = (0.0, np.inf, 0.0, 0.0, 0.0, 1.0)


# Sizes that depend on a request come from closed lists, so that what one asks for makes no new shape.
_TOP_K_LISTS = (64, 1024)
_SCORED_COUNTS = (8, 32, 128)
_LISTED, _SEARCHED = 1, 2


class Branch(NamedTuple):
    """Which parts of sampling a batch needs: a graph of its own on devices that capture one per branch.

    The branch of a batch is the largest of each field over its requests.
    """

    random: bool = False
    min_p: bool = False
    top_k: int = 0
    """Length of the list of best logits that holds everybody's k; the vocabulary when it is too long for a list."""
    top_p: int = 0
    """1: within that list; 2: over the whole vocabulary."""
    ruled: bool = False
    constrained: bool = False
    """Somebody has a grammar."""
    masked: bool = False
    """Somebody allows certain tokens only."""
    penalized: bool = False
    scored: int = 0
    """Somebody named so many tokens whose log-probabilities it wants."""
    reported: bool = False
    """Somebody wants the log-probability of the sampled token,"""
    num_logprobs: int = 0
    """and of so many of the likeliest."""

    @classmethod
    def every(cls, vocab_size: int, logprob_counts: tuple[int, ...]) -> Iterator[Branch]:
        lists = [size for size in _TOP_K_LISTS if size < vocab_size]
        filters = [(0, 0), (0, _SEARCHED), (vocab_size, _SEARCHED), (vocab_size, 0)]
        filters += [(size, mass) for size in lists for mass in (0, _LISTED, _SEARCHED)]
        choices = [(False, False, 0, 0), *((True, m, *f) for m in (False, True) for f in filters)]
        reports = [(False, 0), *((True, count) for count in logprob_counts)]
        for choice, edits in product(choices, product((False, True), repeat=4)):
            for scored, report in product((0, *_SCORED_COUNTS), reports):
                yield cls._make((*choice, *edits, scored, *report))


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    branch: Branch
    floats: dict[str, torch.Tensor]
    """float32 [B] each, by parameter name."""
    top_k_B: torch.Tensor
    prompt_len_B: torch.Tensor
    keys_B2: torch.Tensor
    grammar_BQW: torch.Tensor | None
    allowed_BQW: torch.Tensor | None
    rules: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None
    scored_ids_BE: torch.Tensor | None


class Sampling:
    def __init__(
        self, backend: DeviceBackend, max_rows: int, vocab_size: int, max_logprobs: int, logprobs_mode: str
    ) -> None:
        self.backend = backend
        self.vocab_size = vocab_size
        most = vocab_size if max_logprobs < 0 else min(max_logprobs, vocab_size)
        self.logprob_counts = tuple(sorted({0, *(count for count in (5, 20) if count < most), most}))
        self.logprobs_mode = logprobs_mode
        self._floats_np = np.tile(np.array(_NEUTRAL, dtype=np.float32), (max_rows + 1, 1))
        # top-k, prompt length, two words of the seed
        self._ints_np = np.zeros((max_rows + 1, 4), dtype=np.int32)
        self._ints_np[:, 0] = vocab_size
        self._branches = [Branch()] * (max_rows + 1)
        self._allowed_np: dict[int, np.ndarray] = {}
        self.rules = LogitRules(max_rows)
        self.words = -(-vocab_size // 32)

    def admit(self, request: Request) -> None:
        """Write a request's parameters into its row."""
        params, row = request.params, request.row
        self._floats_np[row] = [getattr(params, name) for name in _FLOATS]
        if params.top_p >= 1:
            self._floats_np[row, 1] = np.inf  # no sum of probabilities reaches it, so nothing is cut by rounding
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self._ints_np[row] = (top_k, request.num_prompt, *request.seed_words)
        self._allowed_np.pop(row, None)
        if params.allowed_token_ids:
            self._allowed_np[row] = self._pack(params.allowed_token_ids)
        random = params.temperature > 0
        listed = self._top_k_list(top_k) if random else 0
        self._branches[row] = Branch(
            random=random,
            min_p=random and params.min_p > 0,
            top_k=listed,
            top_p=self._top_p_kind(listed) if random and params.top_p < 1 else 0,
            ruled=self.rules.admit(request),
            masked=row in self._allowed_np,
            penalized=bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1),
            scored=_fit(_SCORED_COUNTS, len(params.logprob_token_ids or ())),
            reported=params.logprobs is not None and not params.logprob_token_ids,
            num_logprobs=self._logprob_count(params),
        )

    def _top_k_list(self, top_k: int) -> int:
        if top_k == self.vocab_size:
            return 0
        return next((size for size in _TOP_K_LISTS if top_k <= size < self.vocab_size), self.vocab_size)

    def _top_p_kind(self, listed: int) -> int:
        return _LISTED if 0 < listed < self.vocab_size else _SEARCHED

    def _logprob_count(self, params: SamplingParams) -> int:
        if params.logprobs is None or params.logprob_token_ids:
            return 0
        return _fit(self.logprob_counts, self.vocab_size if params.logprobs < 0 else params.logprobs)

    def _pack(self, token_ids: list[int]) -> np.ndarray:
        allowed = np.zeros(self.words * 32, dtype=bool)
        allowed[np.array(token_ids)] = True
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def prepare(self, batch: SampleBatch, grammar: dict[str, np.ndarray]) -> SamplingInputs:
        """Gather the rows of a batch and upload them. `grammar` has a bitmask [rows, W] for some requests."""
        upload = self.backend.upload
        branches = [self._branches[request.row] for request in batch.requests]
        branch = Branch(*map(max, zip(*branches, strict=True))) if branches else Branch()
        branch = branch._replace(constrained=any(request.req_id in grammar for request in batch.requests))
        if branch.top_k == self.vocab_size and branch.top_p:
            branch = branch._replace(top_p=_SEARCHED)  # there is no list to look in
        ints = upload(torch.from_numpy(self._ints_np[batch.rows_np]))
        floats = upload(torch.from_numpy(self._floats_np[batch.rows_np].T.copy())).unbind(0)
        return SamplingInputs(
            branch=branch,
            floats=dict(zip(_FLOATS, floats, strict=True)),
            top_k_B=ints[:, 0],
            prompt_len_B=ints[:, 1],
            keys_B2=ints[:, 2:],
            grammar_BQW=self._masks(batch, {r.row: grammar[r.req_id] for r in batch.requests if r.req_id in grammar})
            if branch.constrained
            else None,
            allowed_BQW=self._masks(batch, self._allowed_np) if branch.masked else None,
            rules=self.rules.gather(batch.rows_np, self.backend) if branch.ruled else None,
            scored_ids_BE=self._scored_ids(batch, branch.scored) if branch.scored else None,
        )

    def _masks(self, batch: SampleBatch, by_row: dict[int, np.ndarray]) -> torch.Tensor:
        """int32 [B, Q, W], all ones where nothing is forbidden. A mask may be for all positions or one for each."""
        mask = np.full((len(batch.rows_np), batch.num_queries, self.words), -1, dtype=np.int32)
        for index, request in enumerate(batch.requests):
            if (own := by_row.get(request.row)) is not None:
                own = own[..., : self.words]
                mask[index, : len(own) if own.ndim > 1 else None] = own
        return self.backend.upload(torch.from_numpy(mask))

    def _scored_ids(self, batch: SampleBatch, width: int) -> torch.Tensor:
        ids = np.zeros((len(batch.rows_np), width), dtype=np.int32)
        for row, request in zip(ids, batch.requests, strict=False):
            wanted = request.params.logprob_token_ids or []
            row[: len(wanted)] = wanted
        return self.backend.upload(torch.from_numpy(ids))

    def signature(self, batch: SampleBatch, branch: Branch) -> Hashable:
        """What a captured finish depends on."""
        return (len(batch.rows_np), batch.num_queries, branch, self.rules.shape if branch.ruled else None)

    def every_signature(self, num_rows: int, num_queries: int) -> Iterator[Hashable]:
        for branch in Branch.every(self.vocab_size, self.logprob_counts):
            yield (num_rows, num_queries, branch, self.rules.shape if branch.ruled else None)


def _fit(sizes: tuple[int, ...], needed: int) -> int:
    """The smallest of the sizes that holds what is needed; 0 for nothing."""
    return next((size for size in sizes if size >= needed), needed) if needed else 0


class Sampled(NamedTuple):
    tokens_BQ: torch.Tensor
    logprobs: LogprobsTensors | None = None
    """Of the sampled token and the likeliest, B * Q rows."""
    scores: LogprobsTensors | None = None
    """Of the sampled token and those a request named."""


def sample(
    logits_BQV: torch.Tensor,
    positions_BQ: torch.Tensor,
    rows_B: torch.Tensor,
    requests: Requests,
    inputs: SamplingInputs,
    custom: CustomProcessors | None,
    logprobs_mode: str,
) -> Sampled:
    """Sample the token behind each position. Changes `logits_BQV`."""
    branch, floats = inputs.branch, inputs.floats
    wants_scores = branch.reported or branch.scored
    if branch.constrained:
        # Before the raw log-probabilities are taken: they are those of what the grammar leaves.
        assert inputs.grammar_BQW is not None
        edit.apply_bitmask(logits_BQV, inputs.grammar_BQW)
    raw = logits_BQV.clone() if wants_scores and logprobs_mode.startswith("raw") else None
    if branch.masked:
        assert inputs.allowed_BQW is not None
        edit.apply_bitmask(logits_BQV, inputs.allowed_BQW)
    if branch.ruled:
        assert inputs.rules is not None
        recent, num_outputs = recent_outputs(requests, rows_B, positions_BQ, inputs)
        edit.apply_rules(logits_BQV, *inputs.rules, recent, num_outputs)
    if custom is not None:
        custom.apply(logits_BQV, rows_B, argmax_invariant=False)
    if branch.penalized:
        edit.apply_penalties(
            logits_BQV,
            requests.history_RM.index_select(0, rows_B),
            inputs.prompt_len_B,
            positions_BQ,
            floats["presence_penalty"],
            floats["frequency_penalty"],
            floats["repetition_penalty"],
        )
    if branch.random:
        edit.apply_temperature(logits_BQV, floats["temperature"])
        if custom is not None:
            custom.apply(logits_BQV, rows_B, argmax_invariant=True)
        _filter(logits_BQV, inputs)
        sampled = strict.sample_random(logits_BQV, floats["temperature"], inputs.keys_B2, positions_BQ)
    else:
        sampled = strict.sample_greedy(logits_BQV)
    if not wants_scores:
        return Sampled(sampled)
    scores = (logits_BQV if raw is None else raw).flatten(0, 1)
    if logprobs_mode.endswith("logprobs"):
        scores = scores.log_softmax(-1)
    return Sampled(
        sampled,
        gather_logprobs(scores, sampled.flatten(), branch.num_logprobs) if branch.reported else None,
        _scored(scores, sampled, inputs) if branch.scored else None,
    )


def _filter(logits_BQV: torch.Tensor, inputs: SamplingInputs) -> None:
    branch, top_p_B = inputs.branch, inputs.floats["top_p"]
    if branch.min_p:
        edit.apply_min_p(logits_BQV, inputs.floats["min_p"])
    if branch.top_k == logits_BQV.shape[-1]:
        edit.search_top_k(logits_BQV, inputs.top_k_B)
    elif branch.top_k:
        listed_p_B = top_p_B if branch.top_p == _LISTED else torch.full_like(top_p_B, torch.inf)
        edit.apply_top_k_top_p(logits_BQV, inputs.top_k_B, listed_p_B, branch.top_k)
    if branch.top_p == _SEARCHED:
        edit.search_top_p(logits_BQV, top_p_B)


def _scored(scores_NV: torch.Tensor, sampled_BQ: torch.Tensor, inputs: SamplingInputs) -> LogprobsTensors:
    assert inputs.scored_ids_BE is not None
    ids = inputs.scored_ids_BE[:, None].expand(-1, sampled_BQ.shape[1], -1).flatten(0, 1)
    return gather_logprobs(scores_NV, sampled_BQ.flatten(), 0, ids)


def recent_outputs(
    requests: Requests, rows_B: torch.Tensor, positions_BQ: torch.Tensor, inputs: SamplingInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last M output tokens up to each position, newest last ([B, Q, M], -2 before the output), and their number."""
    assert inputs.rules is not None
    num_recent = inputs.rules[3].shape[-1]
    back = torch.arange(num_recent - 1, -1, -1, dtype=torch.int32, device=rows_B.device)
    place = positions_BQ[..., None] - back
    tokens = requests.tokens_at(rows_B, place.clamp(min=0))
    is_output = place >= inputs.prompt_len_B[:, None, None]
    num_outputs = positions_BQ + 1 - inputs.prompt_len_B[:, None]
    return torch.where(is_output, tokens, -2), num_outputs
