"""DFlash, DFlash2 and DSpark: drafters that fill a whole block of tokens in one forward pass.

The drafter stores the context in its own KV: each of its layers projects the target's hidden states to keys and values
(`BlockModel.write_context`). To draft, it processes one padded batch, which contains the newest token and a mask token
for each position to fill. Its queries attend to the whole context and, in most checkpoints, to each other.

Once the target has computed the drafted positions, the KV written while drafting is overwritten with KV from the
target's hidden states. Like a head, the drafter therefore follows its target at every step (`HeadKVSync`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.attention.metadata import Inputs, Packed, build_rectangle
from vllm_gaudi_spec.drafting.draft_model import stack_drafts
from vllm_gaudi_spec.drafting.head import HeadKVSync, HeadProposer, make_head_translation
from vllm_gaudi_spec.drafting.models import LoadedHead
from vllm_gaudi_spec.records import Drafts
from vllm_gaudi_spec.upstream.block_drafters import (
    DFlash2Qwen3ForCausalLM,
    Qwen3DSparkForCausalLM,
    allow_mixed_windows,
)

if TYPE_CHECKING:
    from vllm_gaudi_spec.drafting.base import DraftingContext
    from vllm_gaudi_spec.drafting.vocabulary import Translation
    from vllm_gaudi_spec.records import Drafted, DraftRequest
    from vllm_gaudi_spec.scheduling.limits import RowLimits
    from vllm_gaudi_spec.step_inputs import StepInputs


class BlockModel(LoadedHead):
    """A block drafter's model, which uses vLLM's Qwen3 classes."""

    def __init__(self, *args: Any, **named: Any) -> None:
        with allow_mixed_windows():
            super().__init__(*args, **named)
        # Remove vLLM's copies of the layers' weights, which only its CUDA and CPU kernels use.
        inner = self.model.model
        inner._fused_kv_weight = inner._fused_kv_bias = inner._k_norm_weights = None
        for layer in inner.layers:
            layer.self_attn.attn.impl.is_causal = layer.self_attn.causal

    def write_context(self, inputs: Inputs, states_TH: torch.Tensor) -> None:
        """Write the KV for tokens whose target hidden states are `states_TH`."""
        packed = Packed.from_counts(inputs.num_real_B, inputs.call.num_queries) if self._packs else None
        if packed is not None:
            inputs, states_TH = inputs.pack(packed), states_TH.index_select(0, packed.index_T)
        slots = {name: slots_T for names, slots_T in zip(self._groups, inputs.slots, strict=True) for name in names}
        with upstream.tensor_parallel_group(self.group), self.counting(inputs):
            normed_TH = self.model.model.hidden_norm(states_TH)
            for layer in self.model.model.layers:
                attention = layer.self_attn
                qkv, _ = attention.qkv_proj(normed_TH)
                key, value = qkv[:, attention.q_size :].chunk(2, dim=-1)
                key_TKD = attention.k_norm(key.unflatten(-1, (attention.num_kv_heads, attention.head_dim)))
                key, _ = attention.rotary_emb(inputs.positions_T, key_TKD.flatten(1), None)
                if attention.v_scale is not None:
                    value = value * attention.v_scale
                cache = attention.attn
                key_TKD, value_TKD = (part.unflatten(-1, key_TKD.shape[1:]) for part in (key, value))
                cache.impl.do_kv_cache_update(cache, key_TKD, value_TKD, cache.kv_cache, slots[cache.layer_name])

    def compute_candidates(self, hidden_NH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits and the token IDs of DFlash2's candidates, both [N, C].

        vLLM's method exchanges int64 IDs between ranks, which the collectives of some devices do not support.
        """
        with upstream.tensor_parallel_group(self._output_group):
            logits_NV = self.model.candidate_logits_processor(self.model.lm_head, hidden_NH)
        return logits_NV.topk(self.model.model.candidate_selector.top_k, dim=-1)


# --- from a block's hidden states to draft tokens ---


Scores = Callable[[int, torch.Tensor], torch.Tensor]
"""Function that returns a draft token's logits over the target's token IDs, [B, V].

The arguments are the index of the draft token and the preceding token, int32 [B]. The first draft token is preceded by
the newest token."""


def score_independently(model: BlockModel, translation: Translation, hidden_BKH: torch.Tensor) -> Scores:
    """Score draft tokens independently of each other (DFlash)."""
    logits_BKU = model.logits(hidden_BKH.flatten(0, 1)).view(*hidden_BKH.shape[:2], -1)
    return lambda step, previous_B: translation.to_target(logits_BKU.select(1, step))


def score_by_previous(
    model: BlockModel, translation: Translation, hidden_BKH: torch.Tensor, is_drafting_B: torch.Tensor
) -> Scores:
    """Score draft tokens with a low-rank bias that depends on the preceding token (DSpark)."""
    logits_BKU = model.logits(hidden_BKH.flatten(0, 1)).view(*hidden_BKH.shape[:2], -1)

    def score(step: int, previous_B: torch.Tensor) -> torch.Tensor:
        with upstream.tensor_parallel_group(model.group), model.counting_rows(is_drafting_B):
            bias_BU = model.model.markov_bias(model.model.markov_embed(previous_B))
        return translation.to_target(logits_BKU.select(1, step) + bias_BU)

    return score


def score_candidates(
    model: BlockModel, vocab_size: int, hidden_BKH: torch.Tensor, newest_B: torch.Tensor, is_drafting_B: torch.Tensor
) -> Scores:
    """Score pairs of neighboring tokens among the C most likely candidates for each position (DFlash2)."""
    logits_NC, ids_NC = model.compute_candidates(hidden_BKH.flatten(0, 1))
    places = hidden_BKH.shape[:2]
    ids_BKC = ids_NC.view(*places, -1).long()
    with model.counting_rows(is_drafting_B):
        scores_BKCC = model.model.model.candidate_selector(
            ids_BKC, logits_NC.view(*places, -1), hidden_BKH, newest_B.long()
        )

    def score(step: int, previous_B: torch.Tensor) -> torch.Tensor:
        scores_BCC = scores_BKCC.select(1, step)
        if step:
            is_previous_BC = ids_BKC.select(1, step - 1) == previous_B[:, None]
            index_B = is_previous_BC.int().argmax(1)
        else:  # at the first position, all score rows are equal, because the newest token precedes every candidate
            index_B = torch.zeros_like(previous_B, dtype=torch.int64)
        index_B1C = index_B[:, None, None].expand(-1, 1, scores_BCC.shape[2])
        scores_BC = scores_BCC.gather(1, index_B1C).squeeze(1).float()
        lowest_BV = scores_BC.new_full((len(scores_BC), vocab_size), -torch.inf)
        return lowest_BV.scatter(1, ids_BKC.select(1, step), scores_BC)

    return score


class BlockProposer(HeadProposer):
    drafts_one_by_one = False

    def __init__(
        self, model: BlockModel, translation: Translation, vocab_size: int, mask_token: int, block_size: int
    ) -> None:
        super().__init__(model, translation)
        self._model: BlockModel = model
        self._mask_token = mask_token
        self._block_size = block_size
        self._vocab_size = vocab_size

    @classmethod
    def build(cls, context: DraftingContext) -> BlockProposer:
        model, speculation = cast(BlockModel, context.drafter), context.speculation
        assert speculation.mask_token is not None
        translation = make_head_translation(model, context.vocab_size)
        return cls(model, translation, context.vocab_size, speculation.mask_token, speculation.block_size)

    def make_kv_sync(self, context: DraftingContext, row_limits: RowLimits) -> BlockKVSync:
        return BlockKVSync(self._model, context, row_limits)

    def propose(self, request: DraftRequest) -> Drafts:
        newest_B, hidden_BKH = self._fill_block(request)
        score = self._make_scores(newest_B, hidden_BKH, request.max_drafts_B > 0)
        drafted: list[Drafted] = []
        previous_B = newest_B
        for step in range(request.num_drafts):
            drafted.append(request.choose(score(step, previous_B), step))
            previous_B = drafted[-1].tokens_B
        return stack_drafts(drafted, request.max_drafts_B)

    def _fill_block(self, request: DraftRequest) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's newest token, int32 [B], and the hidden states of its draft tokens, [B, K, H]."""
        num_queries = self._block_size
        newest_B1, starts_B, is_drafting_B = request.row_operations.take_newest(
            request.history_RM, request.rows_B, request.lengths_B, request.max_drafts_B, 1
        )
        masks_BM = torch.full_like(newest_B1, self._mask_token).expand(-1, num_queries - 1)
        inputs = build_rectangle(
            torch.cat((newest_B1, masks_BM), dim=1),
            starts_B,
            is_drafting_B * num_queries,
            request.blocks,
            request.row_operations,
        )
        hidden_TH = self._model.forward(inputs).last
        hidden_BQH = hidden_TH.view(len(starts_B), num_queries, -1)
        # In some checkpoints, no draft token is predicted at the position of the newest token.
        return newest_B1.squeeze(1), hidden_BQH.narrow(1, num_queries - request.num_drafts, request.num_drafts)

    def _make_scores(self, newest_B: torch.Tensor, hidden_BKH: torch.Tensor, is_drafting_B: torch.Tensor) -> Scores:
        if isinstance(self._model.model, DFlash2Qwen3ForCausalLM):
            return score_candidates(self._model, self._vocab_size, hidden_BKH, newest_B, is_drafting_B)
        if isinstance(self._model.model, Qwen3DSparkForCausalLM):
            return score_by_previous(self._model, self._translation, hidden_BKH, is_drafting_B)
        return score_independently(self._model, self._translation, hidden_BKH)


# --- drafter KV sync ---


class BlockKVSync(HeadKVSync):
    """Writes the drafter's KV from the target's hidden states, without shifting positions as other heads do."""

    def __init__(self, model: BlockModel, context: DraftingContext, row_limits: RowLimits) -> None:
        # Drafting starts from tokens, so no hidden states are kept between drafting steps.
        super().__init__(model, context, row_limits, head_size=0)
        self._model = model
        self._end = context.speculation.get_drafting_end(context.max_model_len)
        """The minimum row length at which a block would extend past the drafter's last position."""

    def gather_hidden(self, rows_B: torch.Tensor, lengths_B: torch.Tensor) -> None:
        return None

    def limit_drafts(self, rows_B: torch.Tensor, lengths_B: torch.Tensor, max_drafts_B: torch.Tensor) -> torch.Tensor:
        return torch.where(lengths_B < self._end, max_drafts_B, 0)

    def _read_chunk(self, queries: int, step: StepInputs) -> None:
        rows = step.split()
        inputs = self._shift_inputs(queries, rows.rows_B, rows.starts_B, rows.counts_B, rows.blocks, ahead=0)
        self._model.write_context(inputs, self._hidden_states.chunk(step.num_rows * queries))

    def _read_newest(self, queries: int, step: StepInputs) -> None:
        rows = step.split()
        first_B, blocks = self._hidden_states.first(rows.rows_B), rows.blocks._replace(counts_B=None)
        # The newest token has no hidden state yet. The hidden states of rejected drafts are not read.
        num_read_B = self._requests.lengths(rows.rows_B) - 1 - first_B
        inputs = self._shift_inputs(queries, rows.rows_B, first_B, num_read_B, blocks, ahead=0)
        self._model.write_context(inputs, self._hidden_states.carried(rows.rows_B, queries))
