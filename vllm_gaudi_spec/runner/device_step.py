"""The part of a step on the device: the target's forward pass, verification, and gathering drafts for the host."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vllm_gaudi_spec.records import DECODE, PREFILL
from vllm_gaudi_spec.runner.planning import build_inputs, locate
from vllm_gaudi_spec.runner.report import pack_report
from vllm_gaudi_spec.slices import keep_last_slices

if TYPE_CHECKING:
    from vllm_gaudi_spec.attention.metadata import MultimodalInputs
    from vllm_gaudi_spec.drafting.base import Drafting
    from vllm_gaudi_spec.model import LoadedModel
    from vllm_gaudi_spec.records import Drafts, Verification
    from vllm_gaudi_spec.runner.hidden_states import HiddenStateBuffer
    from vllm_gaudi_spec.runner.requests import Requests
    from vllm_gaudi_spec.sampling.params import SamplePass, Sampling
    from vllm_gaudi_spec.sampling.verify import Verifier
    from vllm_gaudi_spec.step_inputs import StepInputs


class DeviceStep:
    """Device functions, whose arguments are tensors and static values.

    There is one graph for each combination of tensor shapes and static values. The functions never wait for the device,
    and they update the request state in place. Each call to a function overwrites the result of the previous call.
    """

    def __init__(
        self,
        *,
        target: LoadedModel,
        requests: Requests,
        hidden_states: HiddenStateBuffer,
        sampling: Sampling,
        verifier: Verifier,
        drafting: Drafting,
        slices: bool,
    ) -> None:
        """Create the device functions. `slices` specifies whether prompt chunks may span several rows."""
        self._target = target
        self._requests = requests
        self._hidden_states = hidden_states
        self._sampling = sampling
        self.verifier = verifier
        self._drafting = drafting
        self._slices = slices
        graph = requests.backend.graphs.graph
        self.forward = graph(self._forward)
        # Custom processors may run arbitrary code on the host, so `_finish` cannot be captured.
        self.finish = self._finish if verifier.custom is not None else graph(self._finish)
        self.drafts = graph(self._drafts)

    def _forward(
        self,
        phase: str,
        queries: int,
        from_start: bool,
        step: StepInputs,
        multimodal: MultimodalInputs | None = None,
        token_types_T: torch.Tensor | None = None,
        received_TW: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Run the target on a batch and store its hidden states. With `from_start`, all rows start at position 0.

        Return the target's output if it is for the next pipeline stage.
        """
        target, requests = self._target, self._requests
        rows = step.split()
        if rows.more_BX is not None:
            self._drafting.put_host_drafts(requests, rows)
        located = locate(phase, rows, requests)
        inputs = build_inputs(queries, rows, located, requests)
        if from_start:
            inputs = replace(inputs, calls=tuple(replace(call, from_start=True) for call in inputs.calls))
        if token_types_T is not None:
            inputs = replace(inputs, token_types_T=token_types_T)
        if (adapters_T := target.gather_adapters(rows.rows_B, queries)) is not None:
            inputs = replace(inputs, adapters_T=adapters_T)
        if phase == DECODE and target.rotary_offsets_R is not None:
            inputs = inputs.shift_rotary(target.rotary_offsets_R.index_select(0, rows.rows_B))
        if multimodal is not None:
            inputs = inputs.add_media(multimodal)
        if target.states is not None:
            call = target.states.call(rows.rows_B, *located, queries, is_prompt=phase != DECODE)
            inputs = replace(inputs, states=call)
        rows_B = rows.rows_B
        if phase == PREFILL and self._slices:
            rows_B = keep_last_slices(rows_B, requests.pad_row)
        output = self._hidden_states.put(phase, queries, rows_B, located, target.forward(inputs, received_TW))
        # `finish` advances the rows that sample; this call advances prompts that continue in a later step.
        requests.set_computed(rows_B, located.starts_B + located.num_real_B)
        return output

    def _finish(self, sample_pass: SamplePass) -> tuple[Verification, torch.Tensor, Drafts | None, torch.Tensor]:
        """Compute logits at the positions to sample, apply the acceptance rule, and advance the rows.

        Return the verification, the rows (an input of `drafts`), the drafts if this sampling pass generates them, and
        the packed report. Most steps send this report, so packing it here saves a separate graph.
        """
        rows_B, max_drafts_B, position_list, grammars = sample_pass.split()
        num_queries = sample_pass.shape.queries
        inputs = self._sampling.gather(rows_B, sample_pass.branch, sample_pass.edit_sizes, grammars)
        index_2N = None if position_list is None else position_list.index_2N
        hidden_NH, positions_BQ, num_drafts_B = self._hidden_states.take(rows_B, num_queries, index_2N)
        bound_B = inputs.acceptable_B
        acceptable_B = num_drafts_B if bound_B is None else torch.minimum(num_drafts_B, bound_B)
        if position_list is None:
            adapters_N = self._target.gather_adapters(rows_B, num_queries)
            logits_NV = self._target.compute_row_logits(hidden_NH, 1 + num_drafts_B, adapters_N).float()
            probs_BKV = self._drafting.gather_probs(rows_B, num_queries - 1) if num_queries > 1 else None
            logits_BQV = logits_NV.view(*positions_BQ.shape, -1)
            verification = self.verifier.verify(logits_BQV, positions_BQ, rows_B, acceptable_B, inputs, probs_BKV)
        else:
            adapters_N = self._target.gather_adapters(rows_B.index_select(0, position_list.index_2N[0]))
            logits_NV = self._target.logits(hidden_NH, adapters_N).float()
            verification = self.verifier.verify_listed(
                logits_NV, position_list, positions_BQ, rows_B, acceptable_B, inputs
            )
        last_B = positions_BQ[:, 0]
        lengths_B = last_B + 1 + verification.num_sampled_B
        if self._drafting.verifies_drafts:  # count them before `advance` clears them
            reported_B = self._requests.count_reported_drafts(rows_B, acceptable_B)
            verification = verification._replace(num_drafts_B=reported_B)
        self._requests.advance(rows_B, last_B, verification)
        self._drafting.on_verified(rows_B, lengths_B)
        drafts = None
        if num_drafts := sample_pass.num_drafts:
            self._drafting.draft_in_pass(rows_B, max_drafts_B, sample_pass.branch, num_drafts)
            drafts = self._drafts(rows_B, num_drafts)
        return verification, rows_B, drafts, pack_report(verification, drafts)

    def _drafts(self, rows_B: torch.Tensor, num_drafts: int) -> Drafts:
        """Return the drafts of the rows that sampled, to be copied to the host."""
        return self._requests.drafts(rows_B, num_drafts)
