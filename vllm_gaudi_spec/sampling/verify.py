"""One pass over the positions that sample: logit processing, then the acceptance rule, then scores.

Every parameter applies at each of the Q positions as it would have without drafts: a position sees the drafts before
it as if they had been sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from vllm_gaudi_spec.records import Drafts, Verification
from vllm_gaudi_spec.sampling import logits as edit
from vllm_gaudi_spec.sampling.logprobs import gather_logprobs
from vllm_gaudi_spec.sampling.params import LISTED, SEARCHED
from vllm_gaudi_spec.sampling.rules.table import RULES, STRICT, SYNTHETIC

if TYPE_CHECKING:
    from vllm.v1.outputs import LogprobsTensors

    from vllm_gaudi_spec.config import Speculation
    from vllm_gaudi_spec.devices.base import DeviceBackend
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.sampling.custom_processors import CustomProcessors
    from vllm_gaudi_spec.sampling.params import Branch, SamplingInputs
    from vllm_gaudi_spec.sampling.rules.registry import Rules


class Rule(Protocol):
    """An acceptance rule over processed logits."""

    def __call__(
        self, logits_BQV: torch.Tensor, positions_BQ: torch.Tensor, proposed: Drafts, inputs: SamplingInputs
    ) -> Verification: ...


def choose_rule(speculation: Speculation | None, backend: DeviceBackend) -> Rule:
    """The rule that the user asked for.

    Drafts without probabilities are one-hot, for which all exact rules have the same distribution. Then the strict rule
    runs, the only one that keeps a seeded request's tokens.
    """
    rules = backend.rules
    strict = partial(_strict, rules)
    if speculation is None or speculation.rule == STRICT:
        return strict
    verify = rules.verify[speculation.rule]
    if RULES[speculation.rule].needs_probs:
        return partial(_with_probs, rules, verify) if speculation.keeps_probs else strict
    if speculation.rule == SYNTHETIC:
        with torch.inference_mode():  # as in steps: an emulated card requires it of tensors that they slice
            rates_K = torch.tensor(speculation.synthetic_rates, device=backend.traits.torch_device)
        verify = partial(verify, rates_K=rates_K)
    return partial(_without_probs, rules, verify)


def _strict(
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


def _with_probs(
    rules: Rules,
    verify: Callable[..., Verification],
    logits_BQV: torch.Tensor,
    positions_BQ: torch.Tensor,
    proposed: Drafts,
    inputs: SamplingInputs,
) -> Verification:
    if not inputs.branch.random or proposed.probs_BKV is None or not proposed.tokens_BK.shape[1]:
        return _strict(rules, logits_BQV, positions_BQ, proposed, inputs)
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
    # A grammar withdraws drafts because of their tokens, and then these rules are not exact. The strict rule always
    # is: the target's own token does not depend on a draft.
    exact = _strict(rules, logits_BQV, positions_BQ, proposed, inputs)
    return Verification(
        torch.where(inputs.free_B[:, None], verification.tokens_BQ, exact.tokens_BQ),
        torch.where(inputs.free_B, verification.num_sampled_B, exact.num_sampled_B),
    )


def _without_probs(
    rules: Rules,
    verify: Callable[..., Verification],
    logits_BQV: torch.Tensor,
    positions_BQ: torch.Tensor,
    proposed: Drafts,
    inputs: SamplingInputs,
) -> Verification:
    if not proposed.tokens_BK.shape[1]:
        return _strict(rules, logits_BQV, positions_BQ, proposed, inputs)
    return verify(
        rules,
        logits_BQV=logits_BQV,
        drafts_BK=proposed.tokens_BK,
        num_drafts_B=proposed.num_drafts_B,
        temperature_B=inputs.floats["temperature"],
        keys_B2=inputs.keys_B2,
        positions_BQ=positions_BQ,
    )


def verify(
    logits_BQV: torch.Tensor,
    *,
    positions_BQ: torch.Tensor,
    rows_B: torch.Tensor,
    num_drafts_B: torch.Tensor,
    draft_probs_BKV: torch.Tensor | None,
    requests: Requests,
    inputs: SamplingInputs,
    rule: Rule,
    custom: CustomProcessors | None,
    logprobs_mode: str,
) -> Verification:
    """Choose the tokens after each row's first position, and gather the log-probabilities that requests ask for."""
    logits_BQV, raw = _process(logits_BQV, positions_BQ, rows_B, requests, inputs, custom, logprobs_mode)
    proposed = Drafts(requests.tokens_at(rows_B, positions_BQ[:, 1:]), num_drafts_B, draft_probs_BKV)
    verification = rule(logits_BQV, positions_BQ, proposed, inputs)
    branch = inputs.branch
    if not (branch.reported or branch.scored):
        return verification
    scores = (logits_BQV if raw is None else raw).flatten(0, 1)
    if logprobs_mode.endswith("logprobs"):
        scores = scores.log_softmax(-1)
    tokens_BQ = verification.tokens_BQ
    return verification._replace(
        logprobs=gather_logprobs(scores, tokens_BQ.flatten(), branch.num_logprobs) if branch.reported else None,
        scores=_scored(scores, tokens_BQ, inputs) if branch.scored else None,
    )


def _process(
    logits_BQV: torch.Tensor,
    positions_BQ: torch.Tensor,
    rows_B: torch.Tensor,
    requests: Requests,
    inputs: SamplingInputs,
    custom: CustomProcessors | None,
    logprobs_mode: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits after masks, logit edits, penalties, temperature and filters; and the raw ones if they are reported."""
    branch, floats = inputs.branch, inputs.floats
    needs_scores = branch.reported or branch.scored
    if branch.constrained:
        # Before the raw log-probabilities are taken, as those are over what the grammar allows.
        assert inputs.grammar_BQW is not None
        logits_BQV = edit.apply_bitmask(logits_BQV, inputs.grammar_BQW)
    # A copy: custom processors change logits in place.
    raw = logits_BQV.clone() if needs_scores and logprobs_mode.startswith("raw") else None
    if branch.masked:
        assert inputs.allowed_BQW is not None
        logits_BQV = edit.apply_bitmask(logits_BQV, inputs.allowed_BQW)
    if branch.edited:
        assert inputs.logit_edits is not None
        recent, num_outputs = recent_outputs(requests, rows_B, positions_BQ, inputs)
        logits_BQV = edit.apply_logit_edits(logits_BQV, *inputs.logit_edits, recent, num_outputs)
    if custom is not None:
        custom.apply(logits_BQV, rows_B, argmax_invariant=False)
    if branch.penalized:
        logits_BQV = edit.apply_penalties(
            logits_BQV,
            requests.history_RM.index_select(0, rows_B),
            inputs.prompt_len_B,
            positions_BQ,
            floats["presence_penalty"],
            floats["frequency_penalty"],
            floats["repetition_penalty"],
        )
    if branch.random:
        logits_BQV = edit.apply_temperature(logits_BQV, floats["temperature"])
        if custom is not None:
            custom.apply(logits_BQV, rows_B, argmax_invariant=True)
        logits_BQV = _filter(logits_BQV, inputs, branch)
    return logits_BQV, raw


def restrict(logits_BQV: torch.Tensor, inputs: SamplingInputs, branch: Branch) -> torch.Tensor:
    """Temperature and filters alone: what a drafter applies."""
    return _filter(edit.apply_temperature(logits_BQV, inputs.floats["temperature"]), inputs, branch)


def _filter(logits_BQV: torch.Tensor, inputs: SamplingInputs, branch: Branch) -> torch.Tensor:
    top_p_B = inputs.floats["top_p"]
    if branch.min_p:
        logits_BQV = edit.apply_min_p(logits_BQV, inputs.floats["min_p"])
    if branch.top_k == logits_BQV.shape[-1]:
        logits_BQV = edit.search_top_k(logits_BQV, inputs.top_k_B)
    elif branch.top_k:
        listed_p_B = top_p_B if branch.top_p == LISTED else torch.full_like(top_p_B, torch.inf)
        logits_BQV = edit.apply_top_k_top_p(logits_BQV, inputs.top_k_B, listed_p_B, branch.top_k)
    if branch.top_p == SEARCHED:
        logits_BQV = edit.search_top_p(logits_BQV, top_p_B)
    return logits_BQV


def _scored(scores_NV: torch.Tensor, sampled_BQ: torch.Tensor, inputs: SamplingInputs) -> LogprobsTensors:
    assert inputs.scored_ids_BE is not None
    ids = inputs.scored_ids_BE[:, None].expand(-1, sampled_BQ.shape[1], -1).flatten(0, 1)
    return gather_logprobs(scores_NV, sampled_BQ.flatten(), 0, ids)


def recent_outputs(
    requests: Requests, rows_B: torch.Tensor, positions_BQ: torch.Tensor, inputs: SamplingInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last M output tokens up to each position, newest last ([B, Q, M], -2 before the output), and their number."""
    assert inputs.logit_edits is not None
    num_recent = inputs.logit_edits[3].shape[-1]
    back = torch.arange(num_recent - 1, -1, -1, dtype=torch.int32, device=rows_B.device)
    recent_BQM = positions_BQ[..., None] - back
    tokens = requests.tokens_at(rows_B, recent_BQM.clamp(min=0))
    is_output = recent_BQM >= inputs.prompt_len_B[:, None, None]
    num_outputs = positions_BQ + 1 - inputs.prompt_len_B[:, None]
    return torch.where(is_output, tokens, -2), num_outputs
