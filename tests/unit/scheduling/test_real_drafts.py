"""Drafts that were verified are what is counted: these fail when upstream counts them itself."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request

from tests.support.schedulers import NUM_DRAFTS, PROMPT, answer, scheduler_of
from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.scheduling.scheduler import SpecAsyncScheduler, SpecScheduler


def verified(
    kind: type[SpecScheduler | SpecAsyncScheduler], folder: Path, num_real: dict[str, int] | None
) -> SimpleNamespace:
    """Three requests with all positions scheduled, of which `a` has one draft accepted and the others none."""
    scheduler = scheduler_of(kind, folder)
    requests = {name: Request(name, PROMPT, SamplingParams(max_tokens=20), None) for name in "abc"}
    for request in requests.values():
        scheduler.add_request(request)
    first = scheduler.schedule()
    if kind is SpecAsyncScheduler:  # the next step is scheduled before the first one's result is known
        second = scheduler.schedule()
        scheduler.update_from_output(first, answer({name: [9] for name in requests}, num_real and {}))
    else:
        scheduler.update_from_output(first, answer({name: [9] for name in requests}, num_real and {}))
        scheduler.update_draft_token_ids(DraftTokenIds([*requests], [[1, 2, 3]] * 3))
        second = scheduler.schedule()
    assert {len(positions) for positions in second.scheduled_spec_decode_tokens.values()} == {NUM_DRAFTS}
    outputs = scheduler.update_from_output(second, answer({"a": [1, 4], "b": [4], "c": [4]}, num_real))
    return SimpleNamespace(
        stats=outputs[0].scheduler_stats.spec_decoding_stats,
        metrics={name: request.spec_decode_metrics for name, request in requests.items()},
        state=[(r.num_computed_tokens, r.num_output_placeholders, [*r.all_token_ids]) for r in requests.values()],
    )


@pytest.mark.parametrize("kind", [SpecScheduler, SpecAsyncScheduler])
def test_padding_is_not_counted_as_drafts(kind: type[SpecScheduler | SpecAsyncScheduler], tmp_path: Path) -> None:
    """Fails when upstream counts what was verified by itself, or rolls back by another count."""
    upstream.apply()
    positions = verified(kind, tmp_path, None)
    assert (positions.stats.num_drafts, positions.stats.num_draft_tokens) == (3, 9)
    real = verified(kind, tmp_path, {"a": 2, "b": 1, "c": 0})
    assert (real.stats.num_drafts, real.stats.num_draft_tokens, real.stats.num_accepted_tokens) == (2, 3, 1)
    assert real.stats.num_draft_tokens_per_pos == [2, 1, 0]
    assert real.stats.num_accepted_tokens_per_pos == [1, 0, 0]
    steps = {name: (m.per_step_drafted, m.per_step_accepted, m.histogram) for name, m in real.metrics.items()}
    assert steps == {"a": ([2], [1], [0, 1, 0, 0]), "b": ([1], [0], [1, 0, 0, 0]), "c": ([], [], [0, 0, 0, 0])}
    # Rejected positions are given back by what was scheduled, whatever is counted.
    assert real.state == positions.state
    assert real.state[0][0] - real.state[1][0] == 1


def test_step_without_real_drafts_is_not_counted(tmp_path: Path) -> None:
    """A request that `num_real_drafts` does not name has none. No average of nothing is made of it."""
    upstream.apply()
    assert verified(SpecScheduler, tmp_path, {"x": 1}).stats is None


def test_output_in_flight_is_delivered_after_preemption(tmp_path: Path) -> None:
    """vllm-gaudi lost it, and such a request was preempted again when it resumed (its pull request 1794)."""
    upstream.apply()
    scheduler = scheduler_of(SpecAsyncScheduler, tmp_path)
    request = Request("a", PROMPT, SamplingParams(max_tokens=20), None)
    scheduler.add_request(request)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    for scheduled, tokens, num_real in ((first, [9], {}), (second, [1, 4], {"a": 2})):
        (output,) = scheduler.update_from_output(scheduled, answer({"a": tokens}, num_real))[0].outputs
        assert output.new_token_ids == tokens
    resumed = scheduler.schedule()
    assert resumed.num_scheduled_tokens == {"a": len(PROMPT) + 3}
    scheduler.update_from_output(resumed, answer({"a": [5]}, {}))
    assert [*request.output_token_ids] == [9, 1, 4, 5]
