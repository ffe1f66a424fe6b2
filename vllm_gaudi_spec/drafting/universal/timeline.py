"""Conversion between target tokens and drafter tokens by way of text.

A timeline contains the text of a row as drafter tokens and tracks how much of it the drafter has read. A rewriter
converts drafter tokens to target tokens with the same spelling (string-level exact match). The drafter can then use its
whole vocabulary, including tokens that the target does not have.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_gaudi_spec.drafting.universal.encoder import Encoded, Encoder, count_common_prefix
from vllm_gaudi_spec.drafting.universal.token_bytes import Vocabulary


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """The vocabularies and the encoder that convert the target's output for the drafter."""

    target: Vocabulary
    drafter: Vocabulary
    encoder: Encoder
    """The drafter's encoder."""
    target_to_draft: np.ndarray

    def get_bytes(self, token: int) -> bytes | None:
        """Return a token's bytes, or None for special tokens and for IDs that the tokenizer does not have."""
        return self.target.bytes_by_id[token] if token < len(self.target.bytes_by_id) else None

    def get_partner(self, token: int) -> int:
        """Return the drafter token with the same bytes or role, or -1 if there is none."""
        return int(self.target_to_draft[token])


class Timeline:
    """The text of a row as drafter tokens.

    Ordinary tokens are treated as text, and the end of the text is encoded again when it grows. Special tokens are
    translated by role and omitted if the drafter has no token with that role.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._closed = list(reader.encoder.opening)
        """Tokens before the open text segment. These tokens no longer change."""
        self._open = Encoded()
        self._text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tail: list[int] = []
        """One token for each byte of an incomplete character at the end of the text."""
        self._drops_space = reader.target.leading_space
        self._kv: list[int] = []
        """Tokens that have KV, including accepted drafts."""
        self._num_drafts = 0
        self.is_complete = True
        """False while the text ends with bytes for which the drafter has no tokens."""

    def __len__(self) -> int:
        return len(self._closed) + len(self._open.ids) + len(self._tail)

    def tokens(self, begin: int, end: int | None = None) -> list[int]:
        end = len(self) if end is None else end
        closed, whole = len(self._closed), len(self._closed) + len(self._open.ids)
        return [
            *self._closed[begin:end],
            *self._open.ids[max(begin - closed, 0) : max(end - closed, 0)],
            *self._tail[max(begin - whole, 0) : max(end - whole, 0)],
        ]

    @property
    def num_read(self) -> int:
        """Number of leading tokens that have KV."""
        return min(len(self._kv), len(self))

    @property
    def open_text(self) -> str | None:
        """The text segment at the end, or None if it ends inside a character."""
        return None if self._get_incomplete_bytes() else self._text

    def read(self, num_tokens: int) -> None:
        """Record that the drafter has read the first `num_tokens` tokens."""
        self._kv[self.num_read :] = self.tokens(self.num_read, num_tokens)

    def drafted(self, num_drafts: int, tokens: Sequence[int] = ()) -> None:
        """Record that the drafter has read all tokens and drafted `num_drafts` tokens, of which the last one has no KV.

        Args:
            tokens: The drafts as drafter tokens, if they are on the host.
        """
        self._num_drafts = num_drafts
        self._kv.extend(tokens[:-1])

    def verified(self, accepted: Sequence[int]) -> None:
        """Record the accepted drafts, given as target tokens.

        This method is called once after each verification.
        """
        if len(self._kv) == len(self):  # otherwise, `drafted` has recorded the tokens
            self._kv.extend(self._reader.get_partner(token) for token in accepted[: max(self._num_drafts - 1, 0)])
        self._num_drafts = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append new target tokens."""
        same = len(self._closed) + len(self._open.ids)
        for segment, special in self._segments(tokens):
            same = min(same, len(self._closed) + self._write(segment))
            if special is not None:
                self._close(special)
        incomplete = self._get_incomplete_bytes()
        found = [self._reader.drafter.id_by_bytes.get(bytes([byte])) for byte in incomplete]
        self._tail = [token for token in found if token is not None]
        self.is_complete = len(self._tail) == len(incomplete)
        same = min(same, len(self._kv))
        ahead = self._kv[same:]
        del self._kv[same + count_common_prefix(ahead, self.tokens(same, min(same + len(ahead), len(self)))) :]

    def _segments(self, tokens: Sequence[int]) -> Iterator[tuple[bytes, int | None]]:
        """Yield each text segment with the special token that follows it."""
        pieces: list[bytes] = []
        for token in tokens:
            piece = self._reader.get_bytes(token)
            if piece is None:
                yield b"".join(pieces), token
                pieces = []
            else:
                pieces.append(piece)
        if pieces:
            yield b"".join(pieces), None

    def _write(self, segment: bytes) -> int:
        """Append text to the open segment.

        Returns the number of unchanged tokens in the segment.
        """
        if segment and self._drops_space:
            segment, self._drops_space = segment.removeprefix(b" "), False
        more = self._decoder.decode(segment)
        if not more:
            return len(self._open.ids)
        self._text += more
        return self._reader.encoder.extend(self._open, self._text)

    def _close(self, special: int) -> None:
        partner = self._reader.get_partner(special)
        self._closed += [*self._open.ids, *([partner] if partner >= 0 else [])]
        # Do not keep both the target's bos token and the bos token that the drafter's tokenizer adds.
        if self._closed == [*self._reader.encoder.opening, *self._reader.encoder.opening]:
            self._closed = list(self._reader.encoder.opening)
        self._open, self._text = Encoded(), ""
        self._decoder.reset()

    def _get_incomplete_bytes(self) -> bytes:
        return self._decoder.getstate()[0]


# Number of preceding characters to encode together with a draft, whose first word may continue the last word.
_CONTEXT = 48


class Rewriter:
    def __init__(self, target: Vocabulary, drafter: Vocabulary, encoder: Encoder, draft_to_target: np.ndarray) -> None:
        """
        Args:
            encoder: The target's encoder.
        """
        self._target = target
        self._drafter = drafter
        self._encoder = encoder
        self._draft_to_target = draft_to_target

    def rewrite(self, drafts: Sequence[int], text_before: str) -> list[int]:
        """Return drafts as target tokens, for a text that ends with `text_before`.

        The result omits an incomplete character at the end and everything after a special token.
        """
        spelled, special = b"", None
        for token in drafts:
            piece = self._drafter.bytes_by_id[token] if token < len(self._drafter.bytes_by_id) else None
            if piece is None:
                special = int(self._draft_to_target[token])
                break
            spelled += piece
        text = spelled.decode(errors="ignore")
        if not spelled.startswith(text.encode()):
            return []  # there are invalid bytes before the end
        ids = self._encode(text, text_before[-_CONTEXT:])
        whole = len(text.encode()) == len(spelled)
        return [*ids, special] if special is not None and special >= 0 and whole else ids

    def _encode(self, text: str, text_before: str) -> list[int]:
        together = self._encoder.encode(text_before + text)
        begin = together.count_tokens_before(len(text_before))
        # None means that a token extends across the start of the draft, although the last token of the text ends there.
        ids = self._encoder.encode(text).ids if begin is None else together.ids[begin:]
        spelled = b"".join(self._target.bytes_by_id[token] or b"" for token in ids)
        # Some tokenizers add a leading space or normalize characters.
        return ids if spelled == text.encode() else []
