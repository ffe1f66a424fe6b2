"""Which token of a drafter matches which token of its target.

Two tokens match if they stand for the same bytes. Special tokens, which stand for no text, match if both sides give
them the same name (such as <

im_start

>), unless their roles contradict. The others match by role: end of turn with end of turn, end of text with end of text,
then any remaining end with any other; bos with bos, pad with pad, unk with unk. Names come first so that a tokenizer
matches itself id by id even if one model's configuration names another end than the other's.

All pairs are mutual, and any pair may be read. Pairs that share nothing but the role of pad or unk are never drafted:
no target writes those, while the drafter's unk can be a token that it does write (<

endoftext

>). The bos token may be drafted; in some models it opens every turn.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from vllm.logger import init_logger

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.drafting.universal.token_bytes import ModelTokenizer, Vocabulary, hash_content, read_vocabulary
from vllm_gaudi_spec.environment import cached_files

logger = init_logger(__name__)

# Increment when the matching or the file layout changes.
FORMAT = 2


@dataclass(frozen=True, slots=True, eq=False)
class VocabMap:
    target_to_draft: np.ndarray
    """int32 [target's vocabulary size, with padding]: the drafter's id, -1 if there is none."""
    draft_to_target: np.ndarray
    """int32 [drafter's vocabulary size]: the target's id, -1 if there is none."""
    draftable: np.ndarray
    """bool [drafter's vocabulary size]: tokens that may be proposed; all of them have a partner."""
    num_matched: int

    def compute_coverage(self) -> dict[str, float]:
        """Return the share of tokens with a partner, on either side."""
        sides = {"target": self.target_to_draft, "drafter": self.draft_to_target}
        return {side: self.num_matched / len(tokens) for side, tokens in sides.items()}

    @classmethod
    def from_pairs(cls, pairs: np.ndarray, draftable: np.ndarray, target_size: int, draft_size: int) -> VocabMap:
        """Build a map from pairs of a target's and a drafter's id, int32 [n, 2], and `draftable`, bool [n].

        Raises ValueError if ids are out of range or in two pairs.
        """
        target_ids, draft_ids = pairs.T
        for ids, size in ((target_ids, target_size), (draft_ids, draft_size)):
            if ids.size and (ids.min() < 0 or ids.max() >= size or np.bincount(ids).max() > 1):
                raise ValueError("ids out of range or in two pairs")
        target_to_draft = np.full(target_size, -1, dtype=np.int32)
        draft_to_target = np.full(draft_size, -1, dtype=np.int32)
        may_draft = np.zeros(draft_size, dtype=bool)
        target_to_draft[target_ids] = draft_ids
        draft_to_target[draft_ids] = target_ids
        may_draft[draft_ids] = draftable
        for array in (target_to_draft, draft_to_target, may_draft):
            array.setflags(write=False)
        return cls(target_to_draft, draft_to_target, may_draft, len(pairs))


def load_vocab_map(
    target: ModelTokenizer, draft: ModelTokenizer, target_size: int, draft_size: int, cache: Path | None = None
) -> VocabMap:
    """Return the map of two models.

    Args:
        target_size: Size of the target's logits, including padding; `draft_size` likewise.
        cache: Folder for the result. A file there is used only if it is intact and was made from the same input.
    """
    if cache is None:
        return match_vocabularies(read_vocabulary(target), read_vocabulary(draft), target_size, draft_size)
    inputs = [FORMAT, hash_content(target), hash_content(draft), target_size, draft_size]
    key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
    path = cache / f"vocab-map-{key[:32]}"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        return _read(path, key, target_size, draft_size)
    made = match_vocabularies(read_vocabulary(target), read_vocabulary(draft), target_size, draft_size)
    try:
        _write(path, key, made)
    except OSError as error:
        logger.warning("The vocabulary map cannot be saved in %s and is rebuilt at each start: %s", cache, error)
    return made


def match_vocabularies(target: Vocabulary, draft: Vocabulary, target_size: int, draft_size: int) -> VocabMap:
    """Match two vocabularies. Ids beyond a tokenizer or beyond its model have no partner."""
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
    """Yield the target's id, the drafter's id, and whether the pair may be drafted."""
    taken: set[int] = set()
    taken_draft: set[int] = set()
    draft_ids = {name: token_id for token_id, name in draft.special_names.items()}
    for target_id, name in target.special_names.items():
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
        (ours.ends, theirs.ends, True),  # the end of a turn comes first
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


# ---- file ------------------------------------------------------------------------------------------------
#
# A line of JSON that describes the file, then the pairs as little-endian int32, then a byte for each pair.


def _write(path: Path, key: str, made: VocabMap) -> None:
    draft_ids = np.flatnonzero(made.draft_to_target >= 0)
    pairs = np.stack([made.draft_to_target[draft_ids], draft_ids], axis=1).astype("<i4")
    payload = pairs.tobytes() + made.draftable[draft_ids].tobytes()
    header = {"format": FORMAT, "key": key, "pairs": len(pairs), "sha256": hashlib.sha256(payload).hexdigest()}
    # The checksum detects a file that is incomplete after a crash.
    cached_files.write(path, json.dumps(header).encode() + b"\n" + payload)


_PAIR_BYTES, _MOST_HEADER_BYTES = 9, 1024


def _read(path: Path, key: str, target_size: int, draft_size: int) -> VocabMap:
    """Read a map.

    Raises OSError, ValueError, KeyError, TypeError or RecursionError unless it is an intact file made for `key`.
    """
    largest = _MOST_HEADER_BYTES + _PAIR_BYTES * min(target_size, draft_size)
    line, _, payload = cached_files.read(path, largest).partition(b"\n")
    header: dict[str, Any] = json.loads(line)
    count = header["pairs"]
    if (header["format"], header["key"]) != (FORMAT, key) or header["sha256"] != hashlib.sha256(payload).hexdigest():
        raise ValueError("not this map, or damaged")
    if not isinstance(count, int) or len(payload) != _PAIR_BYTES * count:
        raise ValueError("damaged")
    pairs = np.frombuffer(payload, dtype="<i4", count=2 * count).astype(np.int32).reshape(count, 2)
    draftable = np.frombuffer(payload, dtype=np.uint8, offset=8 * count)
    if draftable.max(initial=0) > 1:
        raise ValueError("damaged")
    return VocabMap.from_pairs(pairs, draftable.astype(bool), target_size, draft_size)
