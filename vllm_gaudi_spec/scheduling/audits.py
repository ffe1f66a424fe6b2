"""Audits, which run one in N requests again without drafts while the engine is idle and compare the outputs.

Audit requests run in the engine under a separate client index, `AUDITOR`, and the scheduler removes their outputs
before they reach a client. Audit requests run only while no client has a request. A new client request aborts all
audit requests immediately. They are restarted later.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import uuid4

from vllm.logger import init_logger

from vllm_gaudi_spec import metrics
from vllm_gaudi_spec.config import Speculation
from vllm_gaudi_spec.sampling.noise import fresh_seed
from vllm_gaudi_spec.scheduling.comparison import (
    TIES,
    Comparison,
    Finished,
    Job,
    Outcome,
    Result,
    compare_tokens,
    write_difference,
)
from vllm_gaudi_spec.upstream.scheduler import FinishReason, Request, RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.metrics import StepMetrics
    from vllm_gaudi_spec.upstream.scheduler import EngineCoreOutput

logger = init_logger(__name__)

AUDITOR = -1
"""The `client_index` of audit requests, which front ends never use."""
MAX_WAITING = 64
"""Maximum number of finished requests waiting to be audited. Further requests are not audited."""
MAX_STARTS = 8
"""Number of starts after which an audit that is interrupted again is dropped."""
_LARGEST_SEED = (1 << 63) - 1
_COMPARABLE = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_ABORTED,  # audited up to the last token before the client aborted it
)


@dataclass(eq=False)
class _Audit:
    """A request that is being audited."""

    finished: Finished
    num_starts: int = 0
    comparison: Comparison | None = None
    running: dict[str, Request] = field(default_factory=dict)
    """Requests that the comparison is currently waiting for, in order."""
    results: dict[str, Result] = field(default_factory=dict)


class Audits:
    """Selects finished requests, runs their audits, and counts the results."""

    def __init__(
        self, every: int, vllm_config: VllmConfig, speculation: Speculation, step_metrics: StepMetrics
    ) -> None:
        self._every = every
        self._vllm_config = vllm_config
        self._speculation = speculation
        self._metrics = step_metrics
        self._tolerance = TIES[vllm_config.model_config.dtype]
        self._num_seen = 0
        self._chosen: set[str] = set()
        """IDs of client requests that will be audited after they end."""
        self._waiting: deque[_Audit] = deque()
        self._running: dict[str, _Audit] = {}
        """Maps the ID of an audit request to its audit."""
        self._next: list[Request] = []
        """Audit requests that have not been added to the engine yet."""
        self._has_file = False

    # --- client requests ---

    def on_added(self, request: Request) -> None:
        self._num_seen += 1
        if self._num_seen % self._every:
            return
        if reason := self._explain_skip(request):
            self._metrics.count(metrics.AUDITS_SKIPPED, 1, reason)
            return
        self._chosen.add(request.request_id)
        params = request.sampling_params
        assert params is not None
        if params.temperature > 0 and params.seed is None:
            # The audit needs the request's seed. Without one, a worker would choose a seed that is unknown here.
            request.sampling_params = copy.copy(params)
            seed = fresh_seed(self._vllm_config.model_config.seed, self._num_seen, request.request_id)
            request.sampling_params.seed = seed & _LARGEST_SEED

    def on_ended(self, request: Request) -> None:
        """Queue a finished client request for an audit. This method must be called before vLLM frees the request."""
        if request.request_id not in self._chosen:
            return
        self._chosen.remove(request.request_id)
        params, outputs = request.sampling_params, list(request.output_token_ids)
        assert params is not None
        assert request.prompt_token_ids is not None
        if not outputs or request.status not in _COMPARABLE:
            self._metrics.count(metrics.AUDITS_SKIPPED, 1, metrics.ABORTED)
        elif len(self._waiting) >= MAX_WAITING:
            self._metrics.count(metrics.AUDITS_SKIPPED, 1, metrics.BUSY)
        else:
            hasher = request._block_hasher
            finished = Finished(list(request.prompt_token_ids), outputs, params, request.cache_salt, hasher)
            self._waiting.append(_Audit(finished))

    def _explain_skip(self, request: Request) -> str:
        """Return why a request cannot be audited, or an empty string if it can be."""
        params = request.sampling_params
        if params is None or request.prompt_token_ids is None:
            return metrics.INPUTS
        if request.mm_features:
            return metrics.INPUTS
        if request.lora_request is not None:
            return metrics.LORA
        if params.structured_outputs is not None:
            return metrics.GRAMMAR
        if params.repetition_penalty != 1 and (params.presence_penalty or params.frequency_penalty):
            return metrics.PENALTIES
        if self._speculation.keeps_probs and params.temperature > 0:
            return metrics.PROBABILISTIC
        return ""

    # --- audit requests ---

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def start(self, room: int) -> list[Request]:
        """Return at most `room` audit requests to add to an idle engine."""
        room -= len(self._running)
        while self._waiting and room > 0:
            audit = self._waiting.popleft()
            audit.num_starts += 1
            audit.comparison = compare_tokens(audit.finished, self._tolerance)
            room -= self._run(audit, next(audit.comparison))
        added, self._next = self._next, []
        return added

    def observe(self, output: EngineCoreOutput) -> None:
        """Process an output of an audit request."""
        audit = self._running.get(output.request_id)
        if audit is None or output.finish_reason is None:
            return
        if output.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self._give_up(audit, metrics.ABORTED)
            return
        del self._running[output.request_id]
        scores: dict[int, float] = {}
        if output.new_logprobs is not None:
            ids, values = output.new_logprobs.logprob_token_ids[0], output.new_logprobs.logprobs[0]
            scores = dict(zip(ids.tolist(), values.tolist(), strict=True))
        tokens = list(audit.running[output.request_id].output_token_ids)
        audit.results[output.request_id] = Result(tokens, scores)
        if len(audit.results) == len(audit.running):
            self._continue(audit)

    def interrupt(self) -> list[str]:
        """Stop all running audits, which are restarted later, and return the IDs of the requests to abort."""
        ids = [*self._running]
        for audit in reversed(dict.fromkeys(self._running.values())):
            assert audit.comparison is not None
            audit.comparison.close()
            audit.running, audit.results = {}, {}
            if audit.num_starts < MAX_STARTS:
                self._waiting.appendleft(audit)
            else:
                self._metrics.count(metrics.AUDITS_SKIPPED, 1, metrics.BUSY)
        self._running.clear()
        self._next.clear()
        return ids

    def drop(self) -> list[str]:
        """Drop all audits and return the IDs of the requests to abort.

        This method is called when the engine is paused or its prefix cache is reset, because a worker extension may
        then change the model.
        """
        ids = self.interrupt()
        if num_dropped := len(self._waiting) + len(self._chosen):
            self._metrics.count(metrics.AUDITS_SKIPPED, num_dropped, metrics.RESET)
            self._waiting.clear()
            self._chosen.clear()
        return ids

    def _run(self, audit: _Audit, jobs: list[Job]) -> int:
        audit.running, audit.results = {}, {}
        for job in jobs:
            request = Request(
                # Clients can choose request IDs but must not be able to choose this one.
                f"gaudi-spec-audit-{uuid4().hex}",
                job.prompt,
                job.params,
                None,
                client_index=AUDITOR,
                cache_salt=audit.finished.cache_salt,
                block_hasher=audit.finished.block_hasher,
            )
            audit.running[request.request_id] = request
            self._running[request.request_id] = audit
            self._next.append(request)
        return len(jobs)

    def _continue(self, audit: _Audit) -> None:
        assert audit.comparison is not None
        try:
            jobs = audit.comparison.send([audit.results[req_id] for req_id in audit.running])
        except StopIteration as end:
            self._count(end.value)
        else:
            self._run(audit, jobs)

    def _give_up(self, audit: _Audit, cause: str) -> None:
        """Drop an audit. Its remaining requests finish as usual, but their results are ignored."""
        self._running = {req_id: one for req_id, one in self._running.items() if one is not audit}
        self._metrics.count(metrics.AUDITS_SKIPPED, 1, cause)

    # --- results ---

    def _count(self, outcome: Outcome) -> None:
        self._metrics.count(metrics.AUDITS, 1, outcome.kind)
        if outcome.kind == metrics.DIFFERENT and not self._has_file:
            assert outcome.difference is not None
            self._has_file = True
            path = write_difference(outcome.difference, self._vllm_config, self._speculation, self._tolerance)
            logger.warning(
                "Audit failed: output token %d of a request differs from the result without drafts, and the two "
                "candidates are not tied. The request is in %s. Later differences are only counted, in "
                "gaudi_spec:audits_total. See docs/how_to/audit.md for what to do.",
                outcome.difference.position,
                path or "no file (see the warning above)",
            )
