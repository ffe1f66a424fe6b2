"""The runner of pipeline stages before the last one.

These stages compute their layers for the same batches as the last stage, which has the drafter, samples, and reports.
The scheduler sends them the tokens that the last stage sampled and drafted, together with the step that computes these
tokens. vLLM's runner for platforms works in the same way. This protocol requires synchronous scheduling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from vllm_gaudi_spec.drafting.base import Drafting
from vllm_gaudi_spec.runner.extensions.stage_input import StageInput
from vllm_gaudi_spec.runner.hidden_states import HiddenStateBuffer
from vllm_gaudi_spec.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    import torch
    from vllm.v1.outputs import ModelRunnerOutput

    from vllm_gaudi_spec.outputs import SpecSchedulerOutput
    from vllm_gaudi_spec.records import Batch, Hidden, Request
    from vllm_gaudi_spec.runner.hidden_states import Located
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.step_inputs import RowInputs
    from vllm_gaudi_spec.upstream.kv_cache import KVCacheConfig
    from vllm_gaudi_spec.upstream.scheduler import GrammarOutput

logger = init_logger(__name__)


class StageOutput(HiddenStateBuffer):
    """Passes hidden states on instead of keeping them."""

    def __init__(self) -> None:
        """Allocate nothing."""

    def put(self, phase: str, queries: int, rows_B: torch.Tensor, located: Located, hidden: Hidden) -> torch.Tensor:
        return hidden.last


class ScheduledTokens(Drafting):
    """Provides the tokens that the last stage sampled and drafted, as the scheduler sent them."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._newest: dict[str, list[int]] = {}
        self._drafts: dict[str, list[int]] = {}

    def read(self, scheduled: SpecSchedulerOutput) -> None:
        cached = scheduled.scheduled_cached_reqs
        self._newest = dict(zip(cached.req_ids, cached.new_token_ids, strict=True))
        self._drafts = scheduled.scheduled_spec_decode_tokens

    def host_drafts(self, requests: list[Request]) -> np.ndarray:
        """Return, for each request, the number of drafts, the token before them, and the drafts: int32 [B, 2 + K]."""
        found = np.zeros((len(requests), 2 + self._num_drafts), dtype=np.int32)
        for row_np, request in zip(found, requests, strict=True):
            # The last token of a prompt may be computed in a decode as well.
            rest = request.all_token_ids[request.num_computed :] or self._newest[request.req_id]
            drafts = [token for token in self._drafts.get(request.req_id, ()) if token >= 0]
            row_np[: 2 + len(drafts)] = len(drafts), rest[0], *drafts
        return found

    def put_host_drafts(self, requests: Requests, rows: RowInputs) -> None:
        assert rows.more_BX is not None
        requests.put_scheduled_tokens(rows.rows_B, rows.starts_B, rows.more_BX)


class EarlyStage(ModelRunner):
    samples = False

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.speculation = None  # only the last stage has a drafter, but all stages run the same shapes

    def _make_kv_cache(self, kv_cache_config: KVCacheConfig, profiled_blocks: int | None) -> None:
        super()._make_kv_cache(kv_cache_config, profiled_blocks)
        self.hidden_states = StageOutput()

    def _make_extensions(self) -> None:
        self.pooling = None
        received = StageInput.load(self.target, self.backend)
        self.extensions = [] if received is None else [received]

    def _make_drafting(self, *, is_profile: bool) -> Drafting:
        self.drafting = self.scheduled_tokens = ScheduledTokens(self.num_drafts)
        return self.scheduled_tokens

    def execute_model(self, scheduled: SpecSchedulerOutput) -> ModelRunnerOutput | None:
        """Run the forward passes, or end this process if they fail.

        vLLM reports only errors of the last stage, and the next stage would mistake the next step's output for this
        step's. vLLM stops the engine when a worker ends.
        """
        try:
            return super().execute_model(scheduled)
        except Exception as error:
            logger.exception("Pipeline stage %d failed, so its process ends.", self.target.stages.rank_in_group)
            raise SystemExit(1) from error

    def apply(self, scheduled: SpecSchedulerOutput) -> None:
        super().apply(scheduled)
        self.scheduled_tokens.read(scheduled)

    def forward(self, batch: Batch) -> None:
        output_TW = self.compute(batch)
        assert output_TW is not None
        self.target.stages.send(output_TW)

    def sample_tokens(self, constraints: GrammarOutput | None) -> ModelRunnerOutput:
        self.recorder.step_done()
        self.pending, self.batches = [], []
        self.backend.graphs.step_done()
        return EMPTY_MODEL_RUNNER_OUTPUT
