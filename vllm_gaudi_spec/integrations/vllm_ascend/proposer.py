"""vllm-ascend's draft model proposer for a drafter whose vocabulary differs from the target's.

vllm-ascend's drafting loop is unchanged. Inside the loop, the drafter uses its own tokens, which are translated only
before and after the loop. Logits are restricted to shared tokens before the best token is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm_ascend.ascend_config import get_ascend_config
from vllm_ascend.spec_decode.draft_proposer import AscendDraftModelProposer

from vllm_gaudi_spec.config import UNIVERSAL_DRAFT, UnsupportedConfigError
from vllm_gaudi_spec.drafting.universal.pairs import Pair
from vllm_gaudi_spec.drafting.vocabulary import DrafterVocabulary, MappedVocabulary
from vllm_gaudi_spec.integrations.vllm_ascend.versions import VLLM_ASCEND


class AscendUniversalDraftProposer(AscendDraftModelProposer):
    def __init__(self, vllm_config: Any, device: torch.device, runner: Any = None) -> None:
        super().__init__(vllm_config, device, runner=runner)
        if self.use_cuda_graph and vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
            # vllm-ascend creates the stream for updating full graphs in a method that DraftModelProposer overrides.
            raise UnsupportedConfigError(
                f"vllm-ascend {VLLM_ASCEND} cannot run draft models in full graphs. For method {UNIVERSAL_DRAFT} "
                """start with --compilation-config '{"cudagraph_mode": "PIECEWISE"}', or keep full graphs for the """
                """target alone with "enforce_eager": true in --speculative-config."""
            )
        if get_ascend_config().enable_reduce_sample:
            raise UnsupportedConfigError(
                f"Method {UNIVERSAL_DRAFT} needs logits for the whole vocabulary; turn enable_reduce_sample off in "
                f"additional_config."
            )
        if vllm_config.model_config.enable_sleep_mode:
            raise UnsupportedConfigError(
                f"Method {UNIVERSAL_DRAFT} keeps token maps next to the drafter's weights, and sleep level 2 discards "
                "them: leave --enable-sleep-mode out."
            )

    def _raise_if_vocab_size_mismatch(self) -> None:
        """No-op: vocabularies are compared when the models are loaded, and loading fails if they share no tokens."""

    def load_model(self, model: torch.nn.Module) -> None:
        super().load_model(model)
        pair = Pair.load(self.vllm_config)
        self._read: MappedVocabulary = pair.make_mapped_vocabulary(self.device)
        # Tokens without a match in the target are never drafted, but the map needs an ID for them.
        self._target_U = torch.tensor(pair.map.draft_to_target, device=self.device).clamp(min=0)
        self._last_target = len(pair.map.target_to_draft) - 1
        shared = DrafterVocabulary(pair.map.draftable, self.device)
        self.model.compute_logits = _then(shared.to_target, self.model.compute_logits)

    def set_inputs_first_pass(
        self, target_token_ids: torch.Tensor, next_token_ids: torch.Tensor, *args: Any, **named: Any
    ) -> Any:
        return super().set_inputs_first_pass(
            self._to_drafter(target_token_ids), self._to_drafter(next_token_ids), *args, **named
        )

    def _to_drafter(self, tokens: torch.Tensor) -> torch.Tensor:
        # With async scheduling, tokens not sampled yet have the ID -1. Their translations are not used.
        return self._read.to_drafter(tokens.clamp(0, self._last_target)).to(tokens.dtype)

    def _run_merged_draft(self, *args: Any, **named: Any) -> torch.Tensor:
        # Restrict logits to tokens in both vocabularies, because each step's best token is the drafter's next input.
        drafts = super()._run_merged_draft(*args, **named)
        return self._target_U.index_select(0, drafts.flatten()).view(drafts.shape).to(drafts.dtype)


def _then(
    last: Callable[[torch.Tensor], torch.Tensor], first: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    return lambda *args, **named: last(first(*args, **named))
