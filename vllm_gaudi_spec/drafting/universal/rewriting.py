"""From what the drafter says, in its own tokens, to tokens of the target that spell the same: string-level exact match.

The drafter's whole vocabulary may be drafted, whether the target has its tokens or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_gaudi_spec.drafting.universal.encoder import Encoder
from vllm_gaudi_spec.drafting.universal.token_bytes import Vocabulary

# How many characters before the draft are encoded with it: its first word may go on with the last one known.
_CONTEXT = 48


class Rewriter:
    def __init__(self, target: Vocabulary, drafter: Vocabulary, encoder: Encoder, draft_to_target: np.ndarray) -> None:
        """`encoder`: the target's."""
        self._target = target
        self._drafter = drafter
        self._encoder = encoder
        self._draft_to_target = draft_to_target

    def rewrite(self, drafts: Sequence[int], known: str) -> list[int]:
        """In the target's tokens, behind a text that ends in `known`. Bytes at the end that are no whole character are
        left out; so is everything behind a special token."""
        spelled, special = b"", None
        for token in drafts:
            piece = self._drafter.bytes_by_id[token] if token < len(self._drafter.bytes_by_id) else None
            if piece is None:
                special = int(self._draft_to_target[token])
                break
            spelled += piece
        text = spelled.decode(errors="ignore")
        if not spelled.startswith(text.encode()):
            return []  # bytes that are no text stand between
        ids = self._encode(text, known[-_CONTEXT:])
        whole = len(text.encode()) == len(spelled)
        return [*ids, special] if special is not None and special >= 0 and whole else ids

    def _encode(self, text: str, known: str) -> list[int]:
        together = self._encoder.encode(known + text)
        begin = together.tokens_before(len(known))
        # If a token reaches from the known text into the draft: the known text ends in one of its own.
        ids = self._encoder.encode(text).ids if begin is None else together.ids[begin:]
        spelled = b"".join(self._target.bytes_by_id[token] or b"" for token in ids)
        # Some tokenizers put a space in front, some write signs in another way.
        return ids if spelled == text.encode() else []
