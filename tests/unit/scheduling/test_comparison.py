"""What an audit runs and what it makes of the results; and the evidence against a rule, over many requests."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from tests.support.small_engine import _HASHED, _logits, _number
from vllm_gaudi_spec import metrics
from vllm_gaudi_spec.config import REQUEST_OPTION
from vllm_gaudi_spec.sampling import drafts
from vllm_gaudi_spec.sampling.rules import standard
from vllm_gaudi_spec.sampling.rules.registry import TORCH
from vllm_gaudi_spec.scheduling.comparison import (
    ALARM,
    Evidence,
    Finished,
    Job,
    Outcome,
    Result,
    compare_scores,
    compare_tokens,
    find_first_difference,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def result(tokens: list[int], prompt_scores: list[float] | None = None) -> Result:
    return Result(tokens, dict.fromkeys([*tokens, 0], -1.0), prompt_scores or [])


def compare(finished: Finished, again: list[int], raised: int = 0, lowered: int = 0) -> tuple[Outcome, list[Job]]:
    """The outcome, and the jobs of the second round, which choose `raised` and `lowered`."""
    comparison, jobs = compare_tokens(finished, 0.5), list[Job]()
    (job,) = next(comparison)
    assert job.prompt == finished.prompt
    answers = [result(again)]
    while True:
        try:
            jobs = comparison.send(answers)
        except StopIteration as end:
            return end.value, jobs
        answers = [result([raised]), result([lowered])]


PARAMS = SamplingParams(temperature=0.7, seed=4, max_tokens=50, logprobs=2, top_p=0.9, min_tokens=2)
FINISHED = Finished([1, 2], [5, 6, 7, 5], PARAMS)


def test_first_difference() -> None:
    assert find_first_difference([1, 2], [1, 2]) is None
    assert find_first_difference([1, 2], [1, 3]) == 1
    assert find_first_difference([1, 2], [1]) == find_first_difference([1], [1, 2]) == 1


def test_audit_job_disables_drafts_and_reports() -> None:
    (job,) = next(compare_tokens(Finished([1], [5, 6], PARAMS), 0.5))
    params = job.params
    assert (params.temperature, params.seed, params.top_p, params.min_tokens) == (0.7, 4, 0.9, 2)
    assert (params.max_tokens, params.logprobs, params.extra_args) == (2, None, {REQUEST_OPTION: 0})
    assert params.skip_reading_prefix_cache
    assert (PARAMS.max_tokens, PARAMS.logprobs, PARAMS.extra_args) == (50, 2, None)


def test_same_tokens_are_identical() -> None:
    assert compare(FINISHED, [5, 6, 7, 5]) == (Outcome(metrics.IDENTICAL), [])


@pytest.mark.parametrize(
    ("raised", "lowered", "kind"),
    [
        (7, 9, metrics.TIE),
        (9, 9, metrics.DIFFERENT),
        (7, 7, metrics.DIFFERENT),
        (9, 7, metrics.DIFFERENT),
    ],
)
def test_tie_needs_both_candidates_within_tolerance(raised: int, lowered: int, kind: str) -> None:
    outcome, (up, down) = compare(FINISHED, [5, 6, 9, 9], raised, lowered)
    assert outcome.kind == kind
    assert outcome.difference is not None
    assert outcome.difference.position == 2
    assert outcome.difference.without_drafts == [5, 6, 9, 9]
    assert up.prompt == down.prompt == [1, 2, 5, 6]
    assert (up.params.logit_bias, down.params.logit_bias) == ({7: 0.5, 9: 0.0}, {7: -0.5, 9: 0.0})
    for params in (up.params, down.params):
        assert (params.temperature, params.seed) == (0.7, 4), "the noise of the position"
        assert (params.max_tokens, params.min_tokens, params.top_p) == (1, 0, 1.0)
        assert params.allowed_token_ids == [7, 9]


def test_output_penalties_become_biases() -> None:
    """The outputs before the difference are prompt in the second round."""
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=2.0, logit_bias={7: 1.0})
    _, (up, _) = compare(Finished([1, 7], [5, 7, 5, 7], params), [5, 7, 5, 5])
    assert up.params.logit_bias == {7: 0.5 + 1.0 - 0.5 - 2.0, 5: -2 * 0.5 - 2.0}
    assert up.params.frequency_penalty == up.params.presence_penalty == 0


@pytest.mark.parametrize("again", [[5, 6], [5, 6, 7, 5, 8]])
def test_different_length_is_not_a_tie(again: list[int]) -> None:
    outcome, jobs = compare(FINISHED, again)
    assert outcome.kind == metrics.DIFFERENT
    assert not jobs


def score(outputs: list[int], again: list[int], scores: list[list[float]], max_len: int = 100) -> tuple[float, Any]:
    params = SamplingParams(temperature=1.0, max_tokens=50, min_tokens=3)
    comparison = compare_scores(Finished([1, 2], outputs, params), max_len)
    (job,) = next(comparison)
    assert (job.prompt, job.params.max_tokens, job.params.seed, job.params.min_tokens) == ([1, 2], 50, None, 3)
    jobs = comparison.send([result(again)])
    with pytest.raises(StopIteration) as end:
        comparison.send([result([0], of_one) for of_one in scores])
    assert end.value.value.kind == metrics.SAMPLED
    return end.value.value.score_gap, jobs


def test_both_texts_are_scored_as_prompts() -> None:
    gap, jobs = score([5, 6], [7, 8, 9, 9], [[-9.0, -1.0, -2.0], [-9.0, -3.0, -3.0, -3.0, -5.0]])
    assert [job.prompt for job in jobs] == [[1, 2, 5, 6], [1, 2, 7, 8, 9, 9]]
    assert {(job.params.prompt_logprobs, job.params.max_tokens, job.params.min_tokens) for job in jobs} == {(0, 1, 0)}
    assert gap == pytest.approx((-1.5 + 3.5) * math.sqrt(8 / 6))
    back, _ = score([7, 8, 9, 9], [5, 6], [[-9.0, -3.0, -3.0, -3.0, -5.0], [-9.0, -1.0, -2.0]])
    assert back == pytest.approx(-gap)


def test_scored_text_is_cut_to_leave_room_for_a_token() -> None:
    _, jobs = score([5, 6, 7], [8, 9, 9], [[-9.0, -1.0, -1.0], [-9.0, -2.0, -2.0]], max_len=5)
    assert [job.prompt for job in jobs] == [[1, 2, 5, 6], [1, 2, 8, 9]]


# --- over many requests ---


def highest(gaps: np.ndarray) -> np.ndarray:
    """The highest `log10_ratio` of each row on its way, [R]."""
    sums, squares = gaps.cumsum(-1), (gaps**2).cumsum(-1)
    spread = 1 + Evidence._SPREAD * squares
    found: np.ndarray = (Evidence._SPREAD * sums**2 / (2 * spread) - np.log(spread) / 2).max(-1) / math.log(10)
    return found


def test_evidence_matches_numerical_integration() -> None:
    gaps = np.random.default_rng(0).normal(0.1, 1.5, 500)
    evidence, seen = Evidence(), []
    for gap in gaps.tolist():
        evidence.add(gap)
        seen.append(evidence.log10_ratio)
    assert max(seen) == pytest.approx(highest(gaps[None])[0])


@pytest.mark.parametrize("tails", ["normal", "heavy", "signs"])
def test_symmetric_gaps_raise_no_alarm_in_20000_requests(tails: str) -> None:
    """400 servers. Of 1000 one may give a false alarm; 10 times as many may come to a tenth of it."""
    random = np.random.default_rng(1)
    draw = dict(normal=random.standard_normal, heavy=lambda size: random.standard_t(1.5, size), signs=None)[tails]
    reached = []
    for _ in range(8):
        size = (50, 20_000)
        gaps = random.choice([-3.0, 3.0], size) if draw is None else 2.6 * draw(size)
        reached.append(highest(gaps))
    assert (np.concatenate(reached) >= ALARM).sum() <= 2
    assert (np.concatenate(reached) >= ALARM - 1).sum() <= 12


K, PROMPT_LEN = 3, 20


def drafter(sums: torch.Tensor) -> torch.Tensor:
    """Logits that have nothing in common with those of a small engine's model."""
    return _logits((sums * 7919 + 13) % _HASHED)


def begin(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over random prompts, and noise keys."""
    random = torch.Generator().manual_seed(0)
    sums = torch.randint(0, _HASHED, (count,), generator=random)
    return sums, torch.randint(-(2**31), 2**31, (count, 2), generator=random).int()


def mean_scores_with_drafts(count: int, length: int) -> torch.Tensor:
    """Of texts of the small engine's model, sampled at temperature 1 by the standard rule with a stranger's drafts."""
    sums_R, keys_R2 = begin(count)
    ones_R = torch.ones(count)
    lengths_R, totals_R, rows = torch.zeros(count, dtype=torch.int64), torch.zeros(count), torch.arange(count)
    while len(rows):
        last_B = (PROMPT_LEN - 1 + lengths_R[rows]).int()
        sums, tokens, probs = [sums_R[rows]], [], []
        for index in range(K):
            drafted = drafts.draft(
                TORCH, drafter(sums[-1]), "probabilistic", ones_R[rows], keys_R2[rows], last_B + index, last_B
            )
            tokens.append(drafted.tokens_B)
            probs.append(drafted.probs_BV)
            sums.append((sums[-1] + _number(drafted.tokens_B, last_B + 1 + index)) % _HASHED)
        logits_BQV = torch.stack([_logits(one) for one in sums], dim=1)
        positions_BQ = last_B[:, None] + torch.arange(K + 1, dtype=torch.int32)
        verified = standard.verify(
            logits_BQV,
            torch.stack(probs, dim=1),  # type: ignore[arg-type]
            torch.stack(tokens, dim=1),
            torch.full((len(rows),), K, dtype=torch.int32),
            ones_R[rows],
            keys_R2[rows],
            positions_BQ,
        )
        num_B = torch.minimum(verified.num_sampled_B.long(), length - lengths_R[rows])
        counts_BQ = torch.arange(K + 1) < num_B[:, None]
        tokens_BQ = verified.tokens_BQ.long()
        scores_BQ = logits_BQV.log_softmax(-1).gather(2, tokens_BQ[..., None]).squeeze(2)
        totals_R[rows] += (scores_BQ * counts_BQ).sum(1)
        sums_R[rows] = (sums_R[rows] + (_number(tokens_BQ, positions_BQ + 1) * counts_BQ).sum(1)) % _HASHED
        lengths_R[rows] += num_B
        rows = rows[lengths_R[rows] < length]
    return totals_R / length


def mean_scores_without(count: int, length: int) -> torch.Tensor:
    """From the same prompts with other noise."""
    sums_R, keys_R2 = begin(count)
    totals_R = torch.zeros(count)
    for index in range(length):
        logits_RV = _logits(sums_R)
        position_R1 = torch.full((count, 1), PROMPT_LEN - 1 + index, dtype=torch.int32)
        tokens_R = TORCH.sample_random(logits_RV[:, None], torch.ones(count), keys_R2 ^ 77, position_R1).squeeze(1)
        totals_R += logits_RV.log_softmax(-1).gather(1, tokens_R.long()[:, None]).squeeze(1)
        sums_R = (sums_R + _number(tokens_R, position_R1.squeeze(1) + 1)) % _HASHED
    return totals_R / length


def alarm_after(count: int, length: int) -> int | None:
    gaps = (mean_scores_with_drafts(count, length) - mean_scores_without(count, length)) * math.sqrt(length / 2)
    evidence = Evidence()
    for number, gap in enumerate(gaps.tolist(), 1):
        evidence.add(gap)
        if evidence.log10_ratio >= ALARM:
            return number
    return None


def bias(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    exact = standard.accept_probs
    monkeypatch.setattr(standard, "accept_probs", lambda *tensors: (exact(*tensors) + share).clamp(max=1))


def test_standard_rule_raises_no_alarm() -> None:
    assert alarm_after(400, 40) is None


def test_standard_rule_biased_by_10_percent_raises_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    bias(monkeypatch, 0.1)
    found = alarm_after(400, 40)
    print(f"found after {found} requests")
    assert found is not None


@pytest.mark.slow
def test_standard_rule_biased_by_1_percent_raises_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where texts are long and the drafter knows nothing of the target; see docs/how_to/audit.md for others."""
    bias(monkeypatch, 0.01)
    found = alarm_after(2000, 512)
    print(f"found after {found} requests")
    assert found is not None
