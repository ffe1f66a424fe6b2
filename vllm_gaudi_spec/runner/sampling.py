"""From requests' sampling parameters to sampled tokens: host tables by row, and the order in which they are applied."""

from __future__ import annotations

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
    from vllm_gaudi_spec.runner.batch import Batch
    from vllm_gaudi_spec.runner.custom_processors import CustomProcessors
    from vllm_gaudi_spec.runner.requests import Request, Requests

_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_NEUTRAL = (0.0, np.inf, 0.0, 0.0, 0.0, 1.0)


class Branch(NamedTuple):
    """Which parts of sampling a batch needs: a graph of its own on devices that capture one per branch."""

    random: bool = False
    filtered: bool = False
    ruled: bool = False
    masked: bool = False
    penalized: bool = False
    scored: bool = False
    """Somebody wants the log-probabilities of tokens that it named."""
    num_logprobs: int = 0
    """How many of the likeliest tokens are reported; 0 also when only the sampled one is."""
    reported: bool = False
    """Somebody wants the log-probability of the sampled token, and perhaps of the likeliest."""

    @classmethod
    def every(cls, logprob_counts: tuple[int, ...]) -> list[Branch]:
        flags = [flag for flag in product((False, True), repeat=6) if flag[0] or not flag[1]]
        reports = [(0, False), *((count, True) for count in logprob_counts)]
        return [cls._make((*flag, *report)) for flag in flags for report in reports]


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    branch: Branch
    floats: dict[str, torch.Tensor]
    """float32 [B] each, by parameter name."""
    top_k_B: torch.Tensor
    prompt_len_B: torch.Tensor
    keys_B2: torch.Tensor
    bitmask_BQW: torch.Tensor | None
    rules: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None
    scored_ids_BE: torch.Tensor | None


class Sampling:
    def __init__(
        self, backend: DeviceBackend, max_rows: int, vocab_size: int, max_logprobs: int, logprobs_mode: str
    ) -> None:
        self.backend = backend
        self.vocab_size = vocab_size
        # Report sizes come from a closed list, so that the number asked for makes no new shape.
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
        self._branches[row] = Branch(
            random=random,
            filtered=random and (params.top_p < 1 or params.min_p > 0 or top_k < self.vocab_size),
            ruled=self.rules.admit(request),
            masked=row in self._allowed_np,
            penalized=bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1),
            scored=bool(params.logprob_token_ids),
            num_logprobs=self._logprob_count(params),
            reported=params.logprobs is not None and not params.logprob_token_ids,
        )

    def _logprob_count(self, params: SamplingParams) -> int:
        if params.logprobs is None or params.logprob_token_ids:
            return 0
        wanted = self.vocab_size if params.logprobs < 0 else params.logprobs
        return next(count for count in self.logprob_counts if count >= wanted)

    def _pack(self, token_ids: list[int]) -> np.ndarray:
        allowed = np.zeros(self.words * 32, dtype=bool)
        allowed[np.array(token_ids)] = True
        return np.packbits(allowed, bitorder="little").view(np.int32)

    def prepare(self, batch: Batch, num_queries: int, grammar: dict[str, np.ndarray]) -> SamplingInputs:
        """Gather the rows of a batch and upload them. `grammar` has a bitmask [rows, W] for some requests."""
        upload = self.backend.upload
        branches = [self._branches[request.row] for request in batch.requests]
        bitmask = self._bitmask(batch, num_queries, grammar)
        scored_ids = self._scored_ids(batch)
        # What anybody needs: the largest of each field, booleans included.
        branch = Branch(*map(max, zip(*branches, strict=True))) if branches else Branch()
        branch = branch._replace(masked=bitmask is not None)
        ints = upload(torch.from_numpy(self._ints_np[batch.rows_np]))
        floats = upload(torch.from_numpy(self._floats_np[batch.rows_np].T.copy())).unbind(0)
        return SamplingInputs(
            branch=branch,
            floats=dict(zip(_FLOATS, floats, strict=True)),
            top_k_B=ints[:, 0],
            prompt_len_B=ints[:, 1],
            keys_B2=ints[:, 2:],
            bitmask_BQW=None if bitmask is None else upload(torch.from_numpy(bitmask)),
            rules=self.rules.gather(batch.rows_np, self.backend) if branch.ruled else None,
            scored_ids_BE=None if scored_ids is None else upload(torch.from_numpy(scored_ids)),
        )

    def _bitmask(self, batch: Batch, num_queries: int, grammar: dict[str, np.ndarray]) -> np.ndarray | None:
        """int32 [B, Q, W], all ones where nothing is forbidden; None when no row forbids anything."""
        constrained = [
            (index, request)
            for index, request in enumerate(batch.requests)
            if request.req_id in grammar or request.row in self._allowed_np
        ]
        if not constrained:
            return None
        mask = np.full((batch.shape.rows, num_queries, self.words), -1, dtype=np.int32)
        for index, request in constrained:
            if (rows := grammar.get(request.req_id)) is not None:
                mask[index, : len(rows)] &= rows[:, : self.words]
            if (allowed := self._allowed_np.get(request.row)) is not None:
                mask[index] &= allowed
        return mask

    def _scored_ids(self, batch: Batch) -> np.ndarray | None:
        wanted = [request.params.logprob_token_ids or [] for request in batch.requests]
        if not any(wanted):
            return None
        ids = np.zeros((batch.shape.rows, max(map(len, wanted))), dtype=np.int32)
        for row, row_ids in zip(ids, wanted, strict=False):
            row[: len(row_ids)] = row_ids
        return ids


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
    raw = logits_BQV.clone() if wants_scores and logprobs_mode.startswith("raw") else None
    if branch.masked:
        assert inputs.bitmask_BQW is not None
        edit.apply_bitmask(logits_BQV, inputs.bitmask_BQW)
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
    if branch.filtered:
        edit.apply_min_p(logits_BQV, floats["min_p"])
        edit.apply_top_k(logits_BQV, inputs.top_k_B)
        edit.apply_top_p(logits_BQV, floats["top_p"])
    if branch.random:
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
