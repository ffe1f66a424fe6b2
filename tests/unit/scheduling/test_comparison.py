"""What an audit runs, and what it makes of the results."""

import pytest
from vllm import SamplingParams

from vllm_gaudi_spec import metrics
from vllm_gaudi_spec.config import REQUEST_OPTION
from vllm_gaudi_spec.scheduling.comparison import Finished, Job, Outcome, Result, compare_tokens

pytestmark = pytest.mark.usefixtures("one_thread")


def result(tokens: list[int]) -> Result:
    return Result(tokens, dict.fromkeys([*tokens, 0], -1.0))


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


def test_audit_job_disables_drafts_and_reports() -> None:
    (job,) = next(compare_tokens(Finished([1], [5, 6], PARAMS), 0.5))
    params = job.params
    assert (params.temperature, params.seed, params.top_p, params.min_tokens) == (0.7, 4, 0.9, 2)
    assert (params.max_tokens, params.logprobs, params.extra_args) == (2, None, {REQUEST_OPTION: 0})
    assert params.skip_reading_prefix_cache
    assert (PARAMS.max_tokens, PARAMS.logprobs, PARAMS.extra_args) == (50, 2, None)


@pytest.mark.parametrize(
    ("raised", "lowered", "kind"),
    [(7, 9, metrics.TIE), (9, 9, metrics.DIFFERENT), (7, 7, metrics.DIFFERENT), (9, 7, metrics.DIFFERENT)],
)
def test_tie_needs_both_candidates_within_tolerance(raised: int, lowered: int, kind: str) -> None:
    outcome, (up, down) = compare(FINISHED, [5, 6, 9, 9], raised, lowered)
    assert outcome.kind == kind
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
