"""The mapping between two models' vocabularies, which is built from their tokenizers at startup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from vllm_gaudi_spec.config import UNIVERSAL_DRAFT, UnsupportedConfigError
from vllm_gaudi_spec.drafting.universal.token_bytes import ModelTokenizer, load_tokenizer, read_vocabulary
from vllm_gaudi_spec.drafting.universal.vocab_map import VocabMap, match_vocabularies
from vllm_gaudi_spec.drafting.vocabulary import MappedVocabulary, SameVocabulary

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)


def require_same_vocabulary(vllm_config: VllmConfig) -> SameVocabulary:
    """Check that equal token IDs represent equal tokens, as the method `draft_model` requires."""
    speculative = vllm_config.speculative_config
    assert speculative is not None
    target, draft = vllm_config.model_config, speculative.draft_model_config
    # vLLM assigns the target's tokenizer to the drafter; the drafter's own tokenizer is stored with its weights.
    draft_vocab = load_tokenizer(draft.model, draft.revision, draft.trust_remote_code).tokenizer.get_vocab()
    if draft_vocab != _load_tokenizer(target).tokenizer.get_vocab():
        raise UnsupportedConfigError(
            f"{draft.model} has a different vocabulary than {target.model}; use method {UNIVERSAL_DRAFT} in "
            "--speculative-config."
        )
    return SameVocabulary(target.get_vocab_size(), draft.get_vocab_size())


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two models with different vocabularies, as defined by their tokenizers."""

    target: ModelTokenizer
    drafter: ModelTokenizer
    map: VocabMap

    @classmethod
    def load(cls, vllm_config: VllmConfig) -> Pair:
        speculative = vllm_config.speculative_config
        assert speculative is not None
        target, draft = vllm_config.model_config, speculative.draft_model_config
        tokenizers = _load_tokenizer(target), _load_tokenizer(draft)
        ours, theirs = map(read_vocabulary, tokenizers)
        found = match_vocabularies(ours, theirs, target.get_vocab_size(), draft.get_vocab_size())
        logger.info(
            "Universal drafting: %d tokens in common, %.1f%% of the target's and %.1f%% of the drafter's.",
            found.num_matched,
            *(100 * share for share in found.compute_coverage().values()),
        )
        return cls(*tokenizers, found)

    def make_mapped_vocabulary(self, device: torch.device) -> MappedVocabulary:
        return MappedVocabulary(self.map.target_to_draft, self.map.draftable, _choose_stand_in(self.drafter), device)


def _load_tokenizer(model: ModelConfig) -> ModelTokenizer:
    loaded = load_tokenizer(model.tokenizer, model.tokenizer_revision, model.trust_remote_code)
    ids, size = loaded.tokenizer.get_vocab().values(), model.get_vocab_size()
    # IDs beyond the model's vocabulary are harmless padding, but the token list extends to the largest ID.
    if (largest := max(ids, default=0)) >= max(len(ids), size):
        raise UnsupportedConfigError(
            f"The tokenizer of {model.model} has {len(ids)} tokens, but its largest id is {largest}, and the model has "
            f"{size} ids. Repair its tokenizer.json, or use another model."
        )
    return loaded


def _choose_stand_in(drafter: ModelTokenizer) -> int:
    """Return the token that the drafter reads in place of tokens it lacks, so every target token has a position.

    The result is a space, the most neutral choice. The drafter's unk token is often also its end-of-text token, which
    marks the end of a document.
    """
    ids: list[int] = drafter.tokenizer.encode(" ", add_special_tokens=False)
    return ids[0] if ids else 0
