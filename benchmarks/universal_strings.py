"""Matching two vocabularies by the strings that their tokenizers show, as upstream's vLLM 0.32 does."""

from pathlib import Path

import numpy as np
from vllm.v1.spec_decode.vocab_mapping import VocabMapping

from vllm_gaudi_spec.drafting.universal import pairs
from vllm_gaudi_spec.drafting.universal.token_bytes import ModelTokenizer
from vllm_gaudi_spec.drafting.universal.vocab_map import VocabMap


def match_strings() -> None:
    """From now on, this process maps as upstream does; a token without a partner is read as the drafter's unk or end
    of text."""
    pairs.vocab_map = string_map
    pairs._stand_in = lambda drafter: VocabMapping(drafter.tokenizer, drafter.tokenizer, 1, 1, "cpu").draft_unk_token_id


def string_map(
    target: ModelTokenizer, draft: ModelTokenizer, target_size: int, draft_size: int, cache: Path | None = None
) -> VocabMap:
    found = VocabMapping(target.tokenizer, draft.tokenizer, target_size, draft_size, "cpu")
    target_ids = found.draft_to_target_ids.numpy()
    draft_ids = np.flatnonzero(target_ids >= 0)
    pairs = np.stack([target_ids[draft_ids], draft_ids], axis=1).astype(np.int32)
    return VocabMap.of_pairs(pairs, np.ones(len(pairs), dtype=bool), target_size, draft_size)
