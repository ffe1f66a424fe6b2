"""Sessions, whose input comes turn by turn: after which token the next turn starts."""

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

from tests.support.schedulers import NUM_DRAFTS, PROMPT, answer, scheduler_of
from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.scheduling.scheduler import SpecAsyncScheduler, SpecScheduler

STOP = 99
MORE = [20, 21, 22]


def turn(tokens: list[int], max_tokens: int = 40) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    params.update_from_generation_config({}, eos_token_id=None)
    params.stop_token_ids = [STOP]
    return Request("session", [*tokens], params, None, resumable=True)


def opened(kind: type[Scheduler], folder: Path, *, max_tokens: int = 40, has_states: bool = False) -> Any:
    """A scheduler with a session whose prompt was computed."""
    upstream.apply()
    scheduler: Any = scheduler_of(kind, folder, enable_prefix_caching=False)
    scheduler.has_states = has_states
    scheduler.add_request(turn(PROMPT, max_tokens))
    return scheduler


def starts_of_next_turn(scheduler: Any) -> tuple[int, int]:
    """The tokens before it, and all of the session's."""
    scheduler.add_request(turn(MORE))
    (new,) = scheduler.schedule().scheduled_new_reqs
    return new.num_computed_tokens, len(new.prompt_token_ids)


@pytest.mark.parametrize("tokens", [[9, STOP], [9, STOP, 10], [STOP, 10, 11, 12]])
def test_drafts_after_a_stop_token_are_not_computed_tokens(tokens: list[int], tmp_path: Path) -> None:
    scheduler = opened(SpecScheduler, tmp_path)
    scheduler.update_from_output(scheduler.schedule(), answer({"session": [8]}, {}))
    scheduler.requests["session"].spec_token_ids = [9, 9, 9]
    scheduler.update_from_output(scheduler.schedule(), answer({"session": tokens}, {"session": NUM_DRAFTS}))
    num_kept = len(PROMPT) + 1 + tokens.index(STOP)
    assert starts_of_next_turn(scheduler) == (num_kept, num_kept + len(MORE))


@pytest.mark.parametrize("has_states", [True, False])
def test_state_that_read_ahead_is_recomputed(has_states: bool, tmp_path: Path) -> None:
    scheduler = opened(SpecAsyncScheduler, tmp_path, has_states=has_states)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update_from_output(first, answer({"session": [STOP]}, {}))
    scheduler.update_from_output(second, answer({"session": [8]}, {}))
    num_kept = len(PROMPT)
    assert starts_of_next_turn(scheduler) == (0 if has_states else num_kept, num_kept + len(MORE))
    assert not scheduler.read_ahead


def test_session_continues_without_step_in_flight(tmp_path: Path) -> None:
    scheduler = opened(SpecAsyncScheduler, tmp_path, max_tokens=1, has_states=True)
    scheduler.update_from_output(scheduler.schedule(), answer({"session": [8]}, {}))
    assert starts_of_next_turn(scheduler) == (len(PROMPT), len(PROMPT) + len(MORE))


def test_finished_session_is_forgotten(tmp_path: Path) -> None:
    scheduler = opened(SpecAsyncScheduler, tmp_path, has_states=True)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update_from_output(first, answer({"session": [STOP]}, {}))
    assert scheduler.read_ahead == {"session"}
    scheduler.update_from_output(second, answer({"session": [8]}, {}))
    scheduler.add_request(Request("session", [0], SamplingParams(), None))  # the end of its input
    assert not scheduler.read_ahead


def test_waiting_turn_restarts_after_reading_ahead(tmp_path: Path) -> None:
    scheduler = opened(SpecAsyncScheduler, tmp_path, has_states=True)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.add_request(turn(MORE))
    scheduler.update_from_output(first, answer({"session": [STOP]}, {}))
    scheduler.update_from_output(second, answer({"session": [8]}, {}))
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert (new.num_computed_tokens, new.prompt_token_ids) == (0, [*PROMPT, *MORE])
    assert not scheduler.read_ahead


def test_restarted_session_frees_its_row(tmp_path: Path) -> None:
    """Others, who come first now, may need it."""
    scheduler = opened(SpecAsyncScheduler, tmp_path, has_states=True)
    first, _ = scheduler.schedule(), scheduler.schedule()
    scheduler.add_request(turn(MORE))
    scheduler.update_from_output(first, answer({"session": [STOP]}, {}))
    assert scheduler.schedule().preempted_req_ids == {"session"}


def test_too_long_session_ends_without_affecting_others(tmp_path: Path) -> None:
    scheduler = opened(SpecScheduler, tmp_path, max_tokens=1)
    scheduler.update_from_output(scheduler.schedule(), answer({"session": [8]}, {}))
    scheduler.add_request(turn([7] * scheduler.max_model_len))
    scheduled = scheduler.schedule()
    assert not scheduled.num_scheduled_tokens
    (output,) = scheduler.update_from_output(scheduled, answer({}, {}))[0].outputs
    assert output.finish_reason == FinishReason.ERROR
    assert "session" not in scheduler.requests


def test_later_inputs_of_too_long_session_get_errors(tmp_path: Path) -> None:
    """Its front end sends it all the same: it must start no session of its own, and nobody may wait for it."""
    scheduler = opened(SpecScheduler, tmp_path, max_tokens=1)
    first = scheduler.schedule()
    for tokens in ([7] * scheduler.max_model_len, MORE):
        scheduler.add_request(turn(tokens))
    scheduler.update_from_output(first, answer({"session": [8]}, {}))
    for num_turns, following in ((2, turn(MORE)), (1, Request("session", [0], SamplingParams(), None))):
        scheduled = scheduler.schedule()
        assert not scheduled.num_scheduled_tokens
        outputs = scheduler.update_from_output(scheduled, answer({}, {}))[0].outputs
        assert [output.finish_reason for output in outputs] == [FinishReason.ERROR] * num_turns
        scheduler.add_request(following)
    assert not scheduler.requests
    assert not scheduler.failed


def waiting_turn_and_others(folder: Path, turn_of_session: Request) -> Any:
    """A scheduler with room for one, with a session after its first turn whose next one came before `others`."""
    scheduler = scheduler_of(SpecScheduler, folder, enable_prefix_caching=False, max_num_seqs=1)
    scheduler.add_request(turn(PROMPT, max_tokens=1))
    scheduler.update_from_output(scheduler.schedule(), answer({"session": [8]}, {}))
    scheduler.add_request(Request("other", [*PROMPT], SamplingParams(max_tokens=4), None))
    scheduler.add_request(turn_of_session)
    return scheduler


def test_too_long_session_frees_its_row_for_another(tmp_path: Path) -> None:
    """There are as many rows as running requests."""
    scheduler = waiting_turn_and_others(tmp_path, turn([7] * 4096))
    scheduled = scheduler.schedule()
    assert [*scheduled.num_scheduled_tokens] == ["other"]
    assert scheduled.preempted_req_ids == {"session"}


@pytest.mark.parametrize("has_states", [False, True])
def test_session_without_adapter_slot_frees_its_row_for_another(has_states: bool, tmp_path: Path) -> None:
    """A recurrent state is in the row, and the tokens that it has read are computed again."""
    first, second = (LoRARequest(name, number, name) for number, name in ((1, "first"), (2, "second")))
    scheduler: Any = scheduler_of(SpecScheduler, tmp_path, enable_prefix_caching=False, max_num_seqs=2)
    scheduler.lora_config, scheduler.has_states = LoRAConfig(max_loras=1), has_states
    session = turn(PROMPT, max_tokens=1)
    session.lora_request = first
    scheduler.add_request(session)
    scheduler.update_from_output(scheduler.schedule(), answer({"session": [8]}, {}))
    for name in ("running", "other"):
        scheduler.add_request(Request(name, [*PROMPT], SamplingParams(max_tokens=4), None, lora_request=second))
    scheduled = scheduler.schedule()
    assert not scheduled.preempted_req_ids
    scheduler.update_from_output(scheduled, answer({"running": [8]}, {}))
    scheduler.add_request(turn(MORE))
    scheduled = scheduler.schedule()
    assert [*scheduled.num_scheduled_tokens] == ["running", "other"]
    assert scheduled.preempted_req_ids == {"session"}
    scheduler.finish_requests(["running", "other"], RequestStatus.FINISHED_ABORTED)
    scheduled = scheduler.schedule()
    assert [new.num_computed_tokens for new in scheduled.scheduled_new_reqs] == [0 if has_states else len(PROMPT)]


def test_waiting_input_gets_its_error_after_the_end_of_inputs(tmp_path: Path) -> None:
    """In a full engine it waits for long. It is not answered as if it were the first of a session."""
    scheduler = waiting_turn_and_others(tmp_path, turn([7] * 4096))
    other = scheduler.schedule()
    scheduler.update_from_output(other, answer({"other": [8]}, {}))
    assert scheduler.failed == {"session"}
    scheduler.add_request(turn(MORE))
    scheduler.add_request(Request("session", [0], SamplingParams(), None))
    scheduler.finish_requests("other", RequestStatus.FINISHED_ABORTED)
    (output,) = scheduler.update_from_output(scheduler.schedule(), answer({}, {}))[0].outputs
    assert output.finish_reason == FinishReason.ERROR
    assert not scheduler.requests
    assert not scheduler.failed


def test_session_preempted_while_its_turn_ends_is_resumed(tmp_path: Path) -> None:
    scheduler = opened(SpecAsyncScheduler, tmp_path)
    first, second = scheduler.schedule(), scheduler.schedule()
    (session,) = scheduler.running
    scheduler.running.remove(session)
    scheduler._preempt_request(session, 0.0)
    scheduler.update_from_output(first, answer({"session": [STOP]}, {}))
    scheduler.update_from_output(second, answer({"session": [8]}, {}))
    resumed = scheduler.schedule()
    assert resumed.scheduled_cached_reqs.resumed_req_ids == {"session"}
    scheduler.update_from_output(resumed, answer({"session": [STOP]}, {}))
    assert starts_of_next_turn(scheduler) == (len(PROMPT), len(PROMPT) + len(MORE))
