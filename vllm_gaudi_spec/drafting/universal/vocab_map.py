"""Matching between the tokens of a drafter and the tokens of its target.

Two tokens match if they represent the same bytes. Special tokens, which do not represent text, match if both models
give them the same name (such as `<|im_start|>`), unless their roles conflict. All other special tokens match by role:
first end of turn with end of turn and end of text with end of text, then any other end tokens with each other; bos with
bos, pad with pad, and unk with unk. Names are compared first so that a tokenizer matches itself ID by ID even if the
configurations of the two models specify different end tokens.

Every match is mutual, and the drafter may read all matched tokens. Tokens matched only by the pad or unk role are never
drafted: a target never writes these tokens, but the drafter's unk can be a token that the target does write
(`<|endoftext|>`). The bos token may be drafted, because it opens every turn in some models.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.drafting.universal.token_bytes import Vocabulary


@dataclass(frozen=True, slots=True, eq=False)
class VocabMap:
    target_to_draft: np.ndarray
    """int32 [target's padded vocabulary size]: the drafter's ID, or -1 if there is none."""
    draft_to_target: np.ndarray
    """int32 [drafter's vocabulary size]: the target's ID, or -1 if there is none."""
    draftable: np.ndarray
    """bool [drafter's vocabulary size]: whether a token may be proposed. Every such token has a match."""
    num_matched: int

    def compute_coverage(self) -> dict[str, float]:
        """Return the fraction of tokens that have a match, for each vocabulary."""
        sides = {"target": self.target_to_draft, "drafter": self.draft_to_target}
        return {side: self.num_matched / len(tokens) for side, tokens in sides.items()}

    @classmethod
    def from_pairs(cls, pairs: np.ndarray, draftable: np.ndarray, target_size: int, draft_size: int) -> VocabMap:
        """Create a map from pairs of target and drafter IDs, int32 [n, 2], and `draftable`, bool [n]."""
        target_ids, draft_ids = pairs.T
        target_to_draft = np.full(target_size, -1, dtype=np.int32)
        draft_to_target = np.full(draft_size, -1, dtype=np.int32)
        may_draft = np.zeros(draft_size, dtype=bool)
        target_to_draft[target_ids] = draft_ids
        draft_to_target[draft_ids] = target_ids
        may_draft[draft_ids] = draftable
        for array in (target_to_draft, draft_to_target, may_draft):
            array.setflags(write=False)
        return cls(target_to_draft, draft_to_target, may_draft, len(pairs))


def match_vocabularies(target: Vocabulary, draft: Vocabulary, target_size: int, draft_size: int) -> VocabMap:
    """Match two vocabularies. IDs beyond the vocabulary of a tokenizer or model have no match."""
    draft_ids = np.fromiter(draft.id_by_bytes.values(), dtype=np.int32)
    partners = map(target.id_by_bytes.get, draft.id_by_bytes, itertools.repeat(target_size))
    target_ids = np.fromiter(partners, dtype=np.int32)
    found = np.stack([target_ids, draft_ids], axis=1)[(target_ids < target_size) & (draft_ids < draft_size)]
    if not len(found):
        raise UnsupportedConfigError(
            "No token of the drafter stands for the same text as a token of the target, so nothing could be drafted. "
            'Use another model in speculative_config, or "method": "ngram", which needs no drafter.'
        )
    special = np.array(list(_special_pairs(target, draft)), dtype=np.int32).reshape(-1, 3)
    special = special[(special[:, 0] < target_size) & (special[:, 1] < draft_size)]
    pairs = np.concatenate([found, special[:, :2]])
    draftable = np.concatenate([np.ones(len(found), dtype=bool), special[:, 2] == 1])
    return VocabMap.from_pairs(pairs, draftable, target_size, draft_size)


def _special_pairs(target: Vocabulary, draft: Vocabulary) -> Iterator[tuple[int, int, bool]]:
    """Yield the target's ID, the drafter's ID, and whether the pair may be drafted."""
    taken: set[int] = set()
    taken_draft: set[int] = set()
    # If several IDs have the same name, the last one is used.
    target_ids, draft_ids = (
        {name: token_id for token_id, name in side.special_names.items()} for side in (target, draft)
    )
    for name, target_id in target_ids.items():
        draft_id = draft_ids.get(name)
        if draft_id is None:
            continue
        roles, draft_roles = target.roles.get_roles(target_id), draft.roles.get_roles(draft_id)
        if roles and draft_roles and not roles & draft_roles:
            continue
        taken.add(target_id)
        taken_draft.add(draft_id)
        yield target_id, draft_id, True
    ours, theirs = target.roles, draft.roles
    for left, right, draftable in (
        (ours.eos, theirs.eos, True),
        (ours.ends, theirs.ends, True),  # the end of a turn is first
        ((ours.bos,), (theirs.bos,), True),
        ((ours.pad,), (theirs.pad,), False),
        ((ours.unk,), (theirs.unk,), False),
    ):
        free = [i for i in left if i is not None and i not in taken]
        free_draft = [i for i in right if i is not None and i not in taken_draft]
        for target_id, draft_id in zip(free, free_draft, strict=False):
            taken.add(target_id)
            taken_draft.add(draft_id)
            yield target_id, draft_id, draftable
