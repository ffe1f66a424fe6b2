"""Sessions: requests whose input arrives turn by turn (`AsyncLLM.generate` with several inputs).

vLLM counts drafts after a stop token as computed, and takes back tokens that a recurrent state has already read, so
turns would differ with and without drafts. This class can go when vLLM does both right.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.recurrent.table import has_states
from vllm_gaudi_spec.upstream.scheduler import (
    EngineCoreOutput,
    FinishReason,
    PauseState,
    RequestStatus,
    Scheduler,
    end_with_error,
)

if TYPE_CHECKING:
    from vllm_gaudi_spec.upstream.scheduler import Request, SchedulerOutput, StreamingUpdate


class Sessions(Scheduler):
    """vLLM's scheduler with sessions that support drafts, recurrent states and preemption.

    A session longer than the model's maximum length ends with an error.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.has_states = has_states(self.vllm_config.model_config)
        self.read_ahead: set[str] = set()
        """Sessions between turns whose recurrent states may have read tokens after which their next turn starts."""
        self.failed: set[str] = set()
        """Sessions that ended with an error. Front ends still send their remaining inputs, and the end of those."""

    def add_request(self, request: Request) -> None:
        is_end = request.request_id in self.failed and not request.resumable
        if is_end and request.request_id not in self.requests:  # otherwise an input still waits for its error
            self.failed.remove(request.request_id)
            return
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Schedule a step, and free the rows of sessions that vLLM passes over.

        Between turns a session keeps its row and its recurrent state in the workers. If vLLM skips a session that is
        too long, or whose adapter has no slot, and admits another request instead, the row is needed for that.
        """
        scheduled = super().schedule(throttle_prefills)
        if len(self.running) + len(self.kv_holding_waiting) > self.max_num_running_reqs:
            passed_over = [session for session in self.kv_holding_waiting if session.status == RequestStatus.WAITING]
            assert scheduled.preempted_req_ids is not None
            scheduled.preempted_req_ids.update(session.request_id for session in passed_over)
            if self.has_states:
                for session in passed_over:
                    self._restart(session)
        elif not (self.running or scheduled.total_num_scheduled_tokens or throttle_prefills):
            self._free_memory_of_waiting_sessions(scheduled)
        return scheduled

    def _free_memory_of_waiting_sessions(self, scheduled: SchedulerOutput) -> None:
        """Restart the last waiting session if waiting sessions block each other.

        vLLM preempts running requests only. If nothing runs, waiting sessions may hold the memory that each of them
        lacks. One session restarts per step until the first has enough.
        """
        is_full = self.num_waiting_for_streaming_input >= self.max_num_active_reqs
        if is_full or self.grammar_compile_error_reqs or self.pause_state != PauseState.UNPAUSED:
            return  # they wait for something else
        queued = [*self.kv_holding_waiting, *self.waiting]
        ready = [request for request in queued if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)]
        holding = [request for request in ready[1:] if request.resumable and request.num_computed_tokens]
        if holding:
            self._restart(holding[-1])
            assert scheduled.preempted_req_ids is not None
            scheduled.preempted_req_ids.add(holding[-1].request_id)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Process a step's output. A session that ends with an error also answers all waiting turns with an error."""
        found = map(self.requests.get, self.grammar_compile_error_reqs)
        failing = [request for request in found if request is not None and request.resumable]
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for session in failing:
            turns = [*(session.streaming_queue or ())]
            if None in turns:  # the end of its inputs has already arrived
                self.failed.discard(session.request_id)
            else:
                self.failed.add(session.request_id)
            error = EngineCoreOutput(session.request_id, [], finish_reason=FinishReason.ERROR)
            outputs[session.client_index].outputs += [error for turn in turns if turn is not None]
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        if finished_status == RequestStatus.FINISHED_ABORTED:
            ended = [request_ids] if isinstance(request_ids, str) else request_ids
            self.failed.difference_update([*self.failed] if ended is None else ended)
        return super().finish_requests(request_ids, finished_status)

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        # If a step in flight ended the turn while the session waits to be resumed, vLLM would remove the session from
        # both queues and never schedule it again. Dropping that output makes the step's tokens be sampled again.
        super()._preempt_request(request, timestamp, drop_stale_output or request.resumable)

    def _handle_stopped_request(self, request: Request) -> bool:
        if request.resumable:
            # The next turn starts after all tokens but the last. Without async scheduling, vLLM also counts drafts that
            # were accepted after a stop token.
            last = request.num_tokens - 1 + request.num_output_placeholders
            request.num_computed_tokens = min(request.num_computed_tokens, last)
            if self.has_states and request.num_in_flight_tokens:
                self.read_ahead.add(request.request_id)
        return super()._handle_stopped_request(request)

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        # A recurrent state that a step in flight has advanced cannot be rolled back, so it is computed again.
        super()._update_request_as_session(session, update)
        if session.request_id in self.read_ahead:
            self.read_ahead.discard(session.request_id)
            self._restart(session)
            # Other requests are now scheduled before it, and may get its row in the worker.
            self.reset_preempted_req_ids.add(session.request_id)

    def _restart(self, session: Request) -> None:
        """Compute all of the session's tokens again, or those after a snapshot, as after a preemption."""
        self._free_request_blocks(session)
        self.encoder_cache_manager.free(session)
        session.num_computed_tokens = 0

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        # vLLM checks the length of each input, but not of all inputs together. A session that is too long ends like a
        # request whose grammar does not compile.
        is_next_turn = request.resumable and request.status == RequestStatus.WAITING
        is_over = request.num_tokens >= self.max_model_len or request.request_id in self.failed
        if is_next_turn and is_over:
            end_with_error(self, request, f"The session is longer than the maximum of {self.max_model_len} tokens.")
            return False
        return super()._handle_blocked_waiting_request(request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self.read_ahead.discard(request.request_id)
        return super()._free_request(request, delay_free_blocks)
