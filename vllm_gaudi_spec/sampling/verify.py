"""The sampling pass: logits processing, the acceptance rule, and log-probabilities.

Sampling parameters apply at each of the Q positions in the same way as without drafts: each position treats the draft
tokens before it as if they had been sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from vllm.v1.outputs import LogprobsTensors

from vllm_gaudi_spec.methods import RULES, STRICT, SYNTHETIC
from vllm_gaudi_spec.records import Drafts, Verification
from vllm_gaudi_spec.sampling import logits as edit
from vllm_gaudi_spec.sampling.branches import SEARCHED
from vllm_gaudi_spec.sampling.logprobs import gather_logprobs
from vllm_gaudi_spec.sampling.rules import strict
from vllm_gaudi_spec.sampling.thinking import force_tokens

if TYPE_CHECKING:
    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.records import PositionList
    from vllm_gaudi_spec.runner.extensions.custom_processors import CustomProcessors
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.sampling.branches import Branch
    from vllm_gaudi_spec.sampling.params import SamplingInputs
    from vllm_gaudi_spec.sampling.rules.registry import Rules
    from vllm_gaudi_spec.sampling.thinking import ThinkingMarkers


class Rule(Protocol):
    """An acceptance rule, which takes processed logits."""

    def __call__(
        self, logits_BQV: torch.Tensor, positions_BQ: torch.Tensor, proposed: Drafts, inputs: SamplingInputs
    ) -> Verification: ...


def choose_rule(speculation: Speculation | None, backend: DeviceBackend) -> Rule:
    """Return the acceptance rule that the user has chosen.

    If drafts have no probabilities, their distributions are one-hot, and all exact rules sample from the same
    distribution. In this case, the strict rule runs, because only this rule preserves the tokens of seeded requests.
    """
    rules = backend.rules
    strict = partial(_verify_strict, rules)
    if speculation is None or speculation.rule == STRICT:
        return strict
    verify = rules.verify[speculation.rule]
    if RULES[speculation.rule].needs_probs:
        return partial(_verify_with_probs, rules, verify) if speculation.keeps_probs else strict
    if speculation.rule == SYNTHETIC:
        with torch.inference_mode():  # steps slice this tensor in inference mode, which the emulated card checks
            rates_K = torch.tensor(speculation.synthetic_rates, device=backend.traits.torch_device)
        verify = partial(verify, rates_K=rates_K)
    return partial(_verify_without_probs, rules, verify)


def needs_rectangle(speculation: Speculation | None, *, random: bool) -> bool:
    """Return whether the rule for a verify step needs all positions of a row together.

    If not, the strict rule applies: the token at each position is chosen independently and compared with the draft.

    Args:
        random: Whether the step samples with a temperature above 0.
    """
    if speculation is None or speculation.rule == STRICT:
        return False
    if RULES[speculation.rule].needs_probs:
        return random and speculation.keeps_probs
    return True


def _verify_strict(
    rules: Rules,
    logits_BQV: torch.Tensor,
    positions_BQ: torch.Tensor,
    proposed: Drafts,
    inputs: SamplingInputs,
) -> Verification:
    drafts = proposed.tokens_BK, proposed.num_drafts_B
    if inputs.branch.random:
        temperature_B = inputs.floats["temperature"]
        return rules.strict_random(logits_BQV, *drafts, temperature_B, inputs.keys_B2, positions_BQ)
    return rules.strict_greedy(logits_BQV, *drafts)


def _verify_with_probs(
    rules: Rules,
    verify: Callable[..., Verification],
    logits_BQV: torch.Tensor,
    positions_BQ: torch.Tensor,
    proposed: Drafts,
    inputs: SamplingInputs,
) -> Verification:
    if not inputs.branch.random or proposed.probs_BKV is None or not proposed.tokens_BK.shape[1]:
        return _verify_strict(rules, logits_BQV, positions_BQ, proposed, inputs)
    verification = verify(
        logits_BQV,
        proposed.probs_BKV,
        proposed.tokens_BK,
        proposed.num_drafts_B,
        inputs.floats["temperature"],
        inputs.keys_B2,
        positions_BQ,
    )
    if inputs.free_B is None:
        return verification
    # A grammar withdraws drafts because of their tokens, which would make these rules inexact. The strict rule stays
    # exact, because the target's own token does not depend on any draft.
    exact = _verify_strict(rules, logits_BQV, positions_BQ, proposed, inputs)
    return Verification(
        torch.where(inputs.free_B[:, None], verification.tokens_BQ, exact.tokens_BQ),
        torch.where(inputs.free_B, verification.num_sampled_B, exact.num_sampled_B),
    )


def _verify_without_probs(
    rules: Rules,
    verify: Callable[..., Verification],
    logits_BQV: torch.Tensor,
    positions_BQ: torch.Tensor,
    proposed: Drafts,
    inputs: SamplingInputs,
) -> Verification:
    if not proposed.tokens_BK.shape[1]:
        return _verify_strict(rules, logits_BQV, positions_BQ, proposed, inputs)
    return verify(
        rules,
        logits_BQV=logits_BQV,
        drafts_BK=proposed.tokens_BK,
        num_drafts_B=proposed.num_drafts_B,
        temperature_B=inputs.floats["temperature"],
        keys_B2=inputs.keys_B2,
        positions_BQ=positions_BQ,
    )


class Verifier:
    """Verifies drafts and samples tokens for the rows that sample in a step."""

    def __init__(
        self,
        requests: Requests,
        rule: Rule,
        rules: Rules,
        logprobs_mode: str,
        custom: CustomProcessors | None = None,
        thinking: ThinkingMarkers | None = None,
    ) -> None:
        self._requests = requests
        self.rule = rule
        self._rules = rules
        self._logprobs_mode = logprobs_mode
        self.custom = custom
        self._thinking = thinking

    def verify(
        self,
        logits_BQV: torch.Tensor,
        positions_BQ: torch.Tensor,
        rows_B: torch.Tensor,
        num_drafts_B: torch.Tensor,
        inputs: SamplingInputs,
        draft_probs_BKV: torch.Tensor | None,
    ) -> Verification:
        """Choose the tokens that follow the first position of each row, and gather the requested log-probabilities."""

        def penalize(logits_BQV: torch.Tensor) -> torch.Tensor:
            history_BM = self._requests.history_RM.index_select(0, rows_B)
            return edit.apply_penalties(logits_BQV, history_BM, inputs.prompt_len_B, positions_BQ, inputs.penalties)

        forced_BQ = self._find_forced_tokens(positions_BQ, rows_B, inputs)
        logits_BQV, raw = self._process_logits(
            logits_BQV, positions_BQ, rows_B, inputs, penalize, forced_BQ, num_drafts_B + 1
        )
        proposed = Drafts(self._requests.tokens_at(rows_B, positions_BQ[:, 1:]), num_drafts_B, draft_probs_BKV)
        verification = self.rule(logits_BQV, positions_BQ, proposed, inputs)
        reported, sampled_N = logits_BQV if raw is None else raw, verification.tokens_BQ.flatten()
        logprobs, scores = self._gather_logprobs(reported, sampled_N, inputs, positions_BQ.shape[1])
        return verification._replace(logprobs=logprobs, scores=scores)

    def verify_listed(
        self,
        logits_NV: torch.Tensor,
        position_list: PositionList,
        positions_BQ: torch.Tensor,
        rows_B: torch.Tensor,
        num_drafts_B: torch.Tensor,
        inputs: SamplingInputs,
    ) -> Verification:
        """Verify with logits for listed positions only. Each position is sampled as if it were a row with one position.

        This method supports the strict rule and, if rows have only one position, all other rules. Results at unlisted
        positions are undefined.
        """
        row_N, query_N = position_list.index_2N.unbind(0)
        position_inputs = inputs.select_rows(row_N)
        listed_N = row_N * positions_BQ.shape[1] + query_N
        positions_N1 = positions_BQ.flatten().index_select(0, listed_N)[:, None]
        forced_BQ = self._find_forced_tokens(positions_BQ, rows_B, inputs)
        forced_N1 = None if forced_BQ is None else forced_BQ.flatten().index_select(0, listed_N)[:, None]

        def penalize(logits_N1V: torch.Tensor) -> torch.Tensor:
            history_BM = self._requests.history_RM.index_select(0, rows_B)
            return edit.apply_penalties_at(
                logits_N1V.squeeze(1),
                position_list.index_2N,
                history_BM,
                inputs.prompt_len_B,
                positions_BQ,
                position_inputs.penalties,
            )[:, None]

        def spread(values_NX: torch.Tensor) -> torch.Tensor:
            """Expand values from the listed positions to all positions of all rows, [B * Q, X]."""
            return values_NX.index_select(0, position_list.slots_BQ.flatten())

        rows_N = rows_B.index_select(0, row_N)
        logits_N1V, raw = self._process_logits(
            logits_NV[:, None], positions_N1, rows_N, position_inputs, penalize, forced_N1
        )
        if inputs.branch.random:
            temperature_N = position_inputs.floats["temperature"]
            sampled_N1 = self._rules.sample_random(logits_N1V, temperature_N, position_inputs.keys_B2, positions_N1)
        else:
            sampled_N1 = self._rules.sample_greedy(logits_N1V)
        sampled_N = sampled_N1.flatten()
        drafts_BK = self._requests.tokens_at(rows_B, positions_BQ[:, 1:])
        verification = strict.verify(spread(sampled_N).view(positions_BQ.shape), drafts_BK, num_drafts_B)
        found = self._gather_logprobs(logits_N1V if raw is None else raw, sampled_N, position_inputs, 1)
        logprobs, scores = (part and LogprobsTensors(*map(spread, part[:3])) for part in found)
        return verification._replace(logprobs=logprobs, scores=scores)

    def _find_forced_tokens(
        self, positions_BQ: torch.Tensor, rows_B: torch.Tensor, inputs: SamplingInputs
    ) -> torch.Tensor | None:
        """Return the tokens forced by thinking budgets, [B, Q], or None if no request can have a budget."""
        if self._thinking is None or not inputs.branch.edited:
            return None
        history_BM = self._requests.history_RM.index_select(0, rows_B)
        return self._thinking.find_forced_tokens(history_BM, positions_BQ, inputs.thinking_budget_B)

    def _process_logits(
        self,
        logits_BQV: torch.Tensor,
        positions_BQ: torch.Tensor,
        rows_B: torch.Tensor,
        inputs: SamplingInputs,
        penalize: Callable[[torch.Tensor], torch.Tensor],
        forced_BQ: torch.Tensor | None,
        num_sampling_B: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply masks, logit edits, penalties, thinking budgets, temperature and filters.

        Returns the processed logits, and the raw logits if they are reported.

        Args:
            forced_BQ: See `_find_forced_tokens`.
            num_sampling_B: Number of positions that may be sampled in each row, or None for all.
        """
        branch = inputs.branch
        needs_scores = branch.reported or branch.scored
        if branch.constrained:
            # Apply the grammar first, because raw log-probabilities cover only the tokens that it allows.
            assert inputs.grammars is not None
            logits_BQV = edit.apply_bitmask(logits_BQV, inputs.grammars.masks_BQW)
        # Copy the logits, because custom processors modify them in place.
        raw = logits_BQV.clone() if needs_scores and self._logprobs_mode.startswith("raw") else None
        if branch.masked:
            assert inputs.allowed_B1W is not None
            logits_BQV = edit.apply_bitmask(logits_BQV, inputs.allowed_B1W)
        if branch.edited:
            assert inputs.logit_edits is not None
            recent, num_outputs = gather_recent_outputs(self._requests, rows_B, positions_BQ, inputs)
            logits_BQV = edit.apply_logit_edits(logits_BQV, inputs.logit_edits, recent, num_outputs)
        if self.custom is not None:
            self.custom.change_logits(logits_BQV, rows_B, argmax_invariant=False)
        if branch.penalized:
            logits_BQV = penalize(logits_BQV)
        if forced_BQ is not None:
            logits_BQV = force_tokens(logits_BQV, forced_BQ)
        if branch.random:
            logits_BQV = edit.apply_temperature(logits_BQV, inputs.floats["temperature"])
            if self.custom is not None:
                self.custom.change_logits(logits_BQV, rows_B, argmax_invariant=True)
            logits_BQV = _apply_filters(self._rules, logits_BQV, inputs, branch, num_sampling_B)
        return logits_BQV, raw

    def _gather_logprobs(
        self, logits_BQV: torch.Tensor, sampled_N: torch.Tensor, inputs: SamplingInputs, num_queries: int
    ) -> tuple[LogprobsTensors | None, LogprobsTensors | None]:
        """Gather the log-probabilities of the most likely tokens and of requested tokens, at N = B * Q positions."""
        branch = inputs.branch
        if not (branch.reported or branch.scored):
            return None, None
        scores_NV = logits_BQV.flatten(0, 1)
        if self._logprobs_mode.endswith("logprobs"):
            scores_NV = scores_NV.log_softmax(-1)
        likeliest = gather_logprobs(scores_NV, sampled_N, branch.num_logprobs) if branch.reported else None
        if not branch.scored:
            return likeliest, None
        assert inputs.scored_ids_BE is not None
        ids_NE = inputs.scored_ids_BE[:, None].expand(-1, num_queries, -1).flatten(0, 1)
        return likeliest, gather_logprobs(scores_NV, sampled_N, 0, ids_NE)


def apply_temperature_and_filters(
    rules: Rules, logits_BQV: torch.Tensor, inputs: SamplingInputs, branch: Branch
) -> torch.Tensor:
    """Apply only the temperature and the filters, as drafters do."""
    return _apply_filters(rules, edit.apply_temperature(logits_BQV, inputs.floats["temperature"]), inputs, branch)


def _apply_filters(
    rules: Rules,
    logits_BQV: torch.Tensor,
    inputs: SamplingInputs,
    branch: Branch,
    num_sampling_B: torch.Tensor | None = None,
) -> torch.Tensor:
    if not (branch.min_p or branch.top_k or branch.top_p):
        return logits_BQV
    is_listed = branch.top_k < logits_BQV.shape[-1] and branch.top_p != SEARCHED
    return rules.filter_logits(
        logits_BQV,
        inputs.floats["min_p"] if branch.min_p else None,
        inputs.top_k_B if branch.top_k else None,
        inputs.floats["top_p"] if branch.top_p else None,
        branch.top_k if is_listed else 0,
        num_sampling_B,
    )


def gather_recent_outputs(
    requests: Requests, rows_B: torch.Tensor, positions_BQ: torch.Tensor, inputs: SamplingInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output tokens to compare with edit prefixes, [B, Q, P], and the number of output tokens, [B, Q].

    Positions before the start of the output have the token -2.
    """
    assert inputs.logit_edits is not None
    recent_BQP = positions_BQ[..., None] - inputs.logit_edits.prefix_B3P[:, None, 1]
    tokens = requests.tokens_at(rows_B, recent_BQP.clamp(min=0))
    is_output = recent_BQP >= inputs.prompt_len_B[:, None, None]
    num_outputs = positions_BQ + 1 - inputs.prompt_len_B[:, None]
    return torch.where(is_output, tokens, -2), num_outputs
