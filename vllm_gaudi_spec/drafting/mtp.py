"""MTP with several chained layers, and the assistant models of Gemma 4. A single MTP layer drafts like any other head.

In a chain, layer j generates draft j. At position p, it reads token p + 1 + j and state j. State 0 is the target's
hidden state, and state j + 1 is layer j's output at the same position, which predicts token p + 2 + j. Each layer has
its own KV at every position.

The inputs to layer j at the j newest positions depend on drafts. `ChainedKVSync` therefore runs each layer only up to
these positions, which leaves each layer one position behind the previous one. It also keeps the state that each layer
reads first in the next step. The remaining positions are read while drafting: before draft j, layer j reads the j
newest positions, whose tokens are the drafts so far. The next call of the KV sync overwrites the KV of these positions.

If more drafts are requested than there are layers, the last layer continues as a single layer would: it reads the next
position and uses its own output as the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.attention.metadata import build_rectangle
from vllm_gaudi_spec.config import UnsupportedConfigError, count_mtp_layers
from vllm_gaudi_spec.device_rows import DeviceRows
from vllm_gaudi_spec.drafting.draft_model import stack_drafts
from vllm_gaudi_spec.drafting.head import HeadKVSync, HeadProposer, make_head_translation
from vllm_gaudi_spec.drafting.medusa import StateKVSync
from vllm_gaudi_spec.drafting.models import LoadedHead
from vllm_gaudi_spec.graphs import Job
from vllm_gaudi_spec.records import Drafted, Hidden

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig

    from vllm_gaudi_spec.attention.metadata import Blocks, Inputs
    from vllm_gaudi_spec.drafting.base import DrafterKVSync, DraftingContext, Model
    from vllm_gaudi_spec.drafting.vocabulary import Translation
    from vllm_gaudi_spec.model import LoadedModel
    from vllm_gaudi_spec.records import Batch, DraftBatch, DraftRequest, Drafts, SampledRows
    from vllm_gaudi_spec.scheduling.limits import RowLimits
    from vllm_gaudi_spec.step_inputs import StepInputs


class MTPModel(LoadedHead):
    def __init__(self, vllm_config: VllmConfig, *args: Any, **named: Any) -> None:
        num_layers = _limit_layers(vllm_config)
        super().__init__(vllm_config, *args, **named)
        self.layers = [_Layer(self, layer) for layer in range(num_layers)]
        """The layers that are used for drafting."""

    @property
    def reads_slices(self) -> bool:
        # Each layer after the first reads the state that the KV sync keeps for the row of a request.
        return len(self.layers) == 1 and super().reads_slices

    def _adapt(self, target: LoadedModel, head: nn.Module) -> None:
        super()._adapt(target, head)
        assert self.vllm_config.speculative_config is not None
        if self.vllm_config.speculative_config.use_gemma4_mtp():
            _share_kv(self.vllm_config, target.layer_names, head)

    def compute_layer_logits(self, hidden: torch.Tensor, layer: int) -> torch.Tensor:
        if not layer:  # some classes do not have this argument
            return self.logits(hidden)
        with upstream.tensor_parallel_group(self._output_group):
            logits: torch.Tensor = self.model.compute_logits(hidden, spec_step_idx=layer)
        return logits


class _Layer:
    """A single layer of a head, as a `Model`."""

    output_ids: torch.Tensor | None = None

    def __init__(self, head: MTPModel, layer: int) -> None:
        self._head = head
        self._layer = layer

    def forward(self, inputs: Inputs, carried_TH: torch.Tensor | None = None) -> Hidden:
        return self._head.forward(replace(inputs, head_layer=self._layer), carried_TH)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.compute_layer_logits(hidden, self._layer)


def _limit_layers(vllm_config: VllmConfig) -> int:
    """Return the number of layers used for drafting, and configure vLLM to build only these layers."""
    spec_config = vllm_config.speculative_config
    assert spec_config is not None
    num_layers = count_mtp_layers(spec_config)
    if num_layers > spec_config.num_speculative_tokens:
        num_layers = spec_config.num_speculative_tokens
        # Most classes read the target's configuration, but GLM-OCR's class reads its text model's configuration.
        for config in (spec_config.draft_model_config.hf_config, vllm_config.model_config.hf_config):
            for read in (config, getattr(config, "text_config", config)):
                read.update({"num_nextn_predict_layers": num_layers})
    return num_layers


def _share_kv(vllm_config: VllmConfig, target_layers: list[str], assistant: Any) -> None:
    """Let each layer of a Gemma 4 assistant read the KV of the target's last layer of the same kind.

    Target layers that share the KV of another layer are ignored.
    """
    assert vllm_config.speculative_config is not None
    target_config = vllm_config.model_config.hf_text_config
    num_owners = target_config.num_hidden_layers - getattr(target_config, "num_kv_shared_layers", 0)
    owners = {kind: index for index, kind in enumerate(target_config.layer_types[:num_owners])}
    kinds = vllm_config.speculative_config.draft_model_config.hf_text_config.layer_types
    for layer, kind in zip(assistant.model.layers, kinds, strict=True):
        if kind not in owners:
            raise UnsupportedConfigError(
                f"The assistant has a layer of {kind}, but {vllm_config.model_config.model} has none with KV of its "
                "own; use this model's assistant in --speculative-config."
            )
        (owner,) = (name for name in target_layers if f".layers.{owners[kind]}." in name)
        attention = layer.self_attn.attn
        attention.kv_sharing_target_layer_name = attention.impl.kv_sharing_target_layer_name = owner


class ChainedProposer(HeadProposer):
    def __init__(self, layers: Sequence[Model], translation: Translation) -> None:
        super().__init__(layers[0], translation)
        self._layers = layers

    @classmethod
    def build(cls, context: DraftingContext) -> HeadProposer:
        """Return a proposer with as many layers as the configured number of drafts needs."""
        head = context.drafter
        assert isinstance(head, MTPModel)
        if context.spec_config.use_gemma4_mtp():
            return AssistantProposer.build(context)
        layers = head.layers[: context.speculation.num_drafts]
        if len(layers) == 1:
            return HeadProposer.build(context)
        return cls(layers, make_head_translation(head, context.vocab_size))

    def make_kv_sync(self, context: DraftingContext, row_limits: RowLimits) -> ChainedKVSync:
        return ChainedKVSync(self._layers, context, row_limits)

    def propose(self, request: DraftRequest) -> Drafts:
        assert request.hidden is not None
        assert request.hidden.carried is not None
        unread_BJH = request.hidden.carried
        num_layers = len(self._layers)
        newest_B = request.lengths_B - 2
        """The newest position for which the next token is known."""
        drafted = [self._choose(request, request.hidden.last, 0)]
        states_BQH = unread_BJH[:, :0]
        for step in range(1, request.num_drafts):
            if step < num_layers:
                tokens_BQ = torch.stack([draft.tokens_B for draft in drafted], dim=1)
                starts_B = newest_B + 1 - step
                states_BQH = torch.cat([unread_BJH.narrow(1, step - 1, 1), states_BQH], dim=1)
            else:
                tokens_BQ = drafted[-1].tokens_B[:, None]
                starts_B = newest_B + 1 + step - num_layers
                states_BQH = states_BQH[:, -1:]
            inputs = self._make_inputs(request, tokens_BQ, starts_B, request.max_drafts_B > step)
            output = self._layers[min(step, num_layers - 1)].forward(inputs, states_BQH.flatten(0, 1))
            assert output.carried is not None
            states_BQH = output.carried.view(*tokens_BQ.shape, -1)
            drafted.append(self._choose(request, output.last.view(*tokens_BQ.shape, -1)[:, -1], step))
        return stack_drafts(drafted, request.max_drafts_B)

    def _choose(self, request: DraftRequest, hidden_BH: torch.Tensor, step: int) -> Drafted:
        layer = self._layers[min(step, len(self._layers) - 1)]
        return request.choose(self._translation.to_target(layer.logits(hidden_BH)), step)

    def _make_inputs(
        self, request: DraftRequest, tokens_BQ: torch.Tensor, starts_B: torch.Tensor, drafts_B: torch.Tensor
    ) -> Inputs:
        """Return the inputs for a forward pass. Rows that need no more drafts have no tokens."""
        tokens_BQ = self._translation.to_drafter(tokens_BQ) * drafts_B[:, None]
        num_real_B = (drafts_B * tokens_BQ.shape[1]).int()
        blocks = request.blocks._replace(counts_B=None)
        return build_rectangle(tokens_BQ.int(), starts_B * drafts_B, num_real_B, blocks, request.row_operations)


class AssistantProposer(HeadProposer):
    def make_kv_sync(self, context: DraftingContext, row_limits: RowLimits) -> DrafterKVSync:
        return TargetKVSync(context.hidden_states)

    def propose(self, request: DraftRequest) -> Drafts:
        assert request.hidden is not None
        carried_BH = request.hidden.last
        newest_B = request.lengths_B - 1
        width = request.history_RM.shape[1]
        tokens_B = request.history_RM.flatten().index_select(0, request.rows_B * width + newest_B)
        drafted: list[Drafted] = []
        for step in range(request.num_drafts):
            num_real_B = (request.max_drafts_B > step).int()
            inputs = build_rectangle(
                self._translation.to_drafter(tokens_B)[:, None].int() * num_real_B[:, None],
                (newest_B - 1) * num_real_B,
                num_real_B,
                request.blocks._replace(counts_B=None),
                request.row_operations,
            )
            output = self._model.forward(inputs, carried_BH)
            assert output.carried is not None
            carried_BH = output.carried
            drafted.append(request.choose(self._translation.to_target(self._model.logits(output.last)), step))
            tokens_B = drafted[-1].tokens_B
        return stack_drafts(drafted, request.max_drafts_B)


# --- drafter KV sync ---


class TargetKVSync(StateKVSync):
    """KV sync for a drafter that reads the target's KV."""

    has_kv = True


class ChainedKVSync(HeadKVSync):
    def __init__(self, layers: Sequence[Model], context: DraftingContext, row_limits: RowLimits) -> None:
        super().__init__(layers[0], context, row_limits)
        self._layers = layers
        self._unread_RH = [torch.zeros_like(self._carried_RH) for _ in layers[1:]]
        """The state of each row at the first position that a layer has not read, for every layer except the first."""
        self._starts = DeviceRows(self._requests.backend, self._requests.pad_row, np.zeros(2, dtype=np.int32))
        """Two numbers per row: the first position computed since admission, before which no states are known, and the
        number of tokens at admission."""

    # --- host ---

    def on_admitted(self) -> None:
        for request in self._requests.admitted:
            self._starts.set(request.row, np.array([request.num_computed, len(request.all_token_ids)], dtype=np.int32))
        super().on_admitted()

    def on_forward(self, batch: Batch) -> None:
        self._starts.flush()
        super().on_forward(batch)

    def before_round(self, sampled: SampledRows, max_drafts_np: np.ndarray, batch: DraftBatch | None) -> None:
        self._starts.flush()
        super().before_round(sampled, max_drafts_np, batch)

    # --- device ---

    def gather_hidden(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> Hidden:
        """Return layer 0's output for the newest token and the next state of each later layer, [B, J, H]."""
        unread = [unread_RH.index_select(0, rows_B) for unread_RH in self._unread_RH]
        return Hidden(self._last_RH.index_select(0, rows_B), torch.stack(unread, dim=1))

    def limit_drafts(self, rows_B: torch.Tensor, lengths_B: torch.Tensor, max_drafts_B: torch.Tensor) -> torch.Tensor:
        """Return `max_drafts_B`, reduced in rows with too few positions for the later layers."""
        begins_B, _ = self._get_starts(rows_B)
        available_B = lengths_B - begins_B
        limit_B = torch.where(available_B < len(self._layers), available_B, max_drafts_B)
        return torch.minimum(max_drafts_B, limit_B).int()

    def _get_starts(self, rows_B: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._starts.table_RX.index_select(0, rows_B).unbind(1)

    def _read_chunk(self, queries: int, step: StepInputs) -> None:
        """Read a prompt chunk, except for a prompt's last position, whose next token does not exist yet."""
        rows = step.split()
        _, known_B = self._get_starts(rows.rows_B)
        ends_B = torch.minimum(rows.starts_B + rows.counts_B, known_B - 1)
        states_TH = self._hidden_states.chunk(step.num_rows * queries)
        self._read_layers(queries, rows.rows_B, rows.starts_B, ends_B, states_TH, rows.blocks)

    def _read_newest(self, queries: int, step: StepInputs) -> None:
        rows = step.split()
        starts_B = self._hidden_states.first(rows.rows_B)
        ends_B = self._requests.lengths(rows.rows_B) - 1
        states_TH = self._hidden_states.carried(rows.rows_B, queries)
        self._read_layers(queries, rows.rows_B, starts_B, ends_B, states_TH, rows.blocks)

    def _read_layers(
        self,
        queries: int,
        rows_B: torch.Tensor,
        starts_B: torch.Tensor,
        ends_B: torch.Tensor,
        states_TH: torch.Tensor,
        blocks: Blocks,
    ) -> None:
        """Read new positions in every layer.

        Args:
            starts_B: First position that layer 0 reads. Layer j begins j positions earlier.
            ends_B: End of the positions that layer 0 reads. Layer j ends j positions earlier.
            states_TH: The target's hidden states from position `starts_B`, Q per row.
        """
        blocks = blocks._replace(counts_B=None)  # later layers begin at earlier positions
        begins_B, _ = self._get_starts(rows_B)
        for number, layer in enumerate(self._layers):
            if number:
                before_B, starts_B = starts_B, torch.maximum(starts_B - 1, begins_B)
                ends_B = ends_B - 1
                unread_RH = self._unread_RH[number - 1]
                unread_BH = unread_RH.index_select(0, rows_B)
                next_B = ends_B - before_B
                next_BH = torch.where(next_B[:, None] >= 0, _take(states_TH, next_B, queries), unread_BH)
                unread_RH.index_copy_(0, rows_B, next_BH)
                states_TH = _shift_in(unread_BH, states_TH, starts_B < before_B, queries)
            counts_B = ends_B - starts_B
            output = layer.forward(
                self._shift_inputs(queries, rows_B, starts_B, counts_B, blocks, 1 + number), states_TH
            )
            if number == 0:
                self._last_RH.index_copy_(0, rows_B, _take(output.last, counts_B - 1, queries))
            assert output.carried is not None
            states_TH = output.carried

    # --- warm-up ---

    def jobs(self) -> Iterator[Job]:
        yield Job("states", self._starts.warm_up)
        yield from super().jobs()


def _take(states_TH: torch.Tensor, index_B: torch.Tensor, queries: int) -> torch.Tensor:
    """Return the state at `index_B` among the Q states of each row, [B, H]."""
    row_B = torch.arange(len(index_B), dtype=torch.int32, device=index_B.device)
    return states_TH.index_select(0, row_B * queries + index_B.clamp(min=0, max=queries - 1))


def _shift_in(first_BH: torch.Tensor, states_TH: torch.Tensor, shifts_B: torch.Tensor, queries: int) -> torch.Tensor:
    """In rows where `shifts_B` is set, prepend a state to the Q states and drop the last one."""
    states_BQH = states_TH.view(len(first_BH), queries, -1)
    shifted_BQH = torch.cat([first_BH[:, None], states_BQH[:, :-1]], dim=1)
    return torch.where(shifts_B[:, None, None], shifted_BQH, states_BQH).flatten(0, 1)
