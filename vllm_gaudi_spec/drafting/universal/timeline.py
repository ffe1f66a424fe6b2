"""Conversion of the target's tokens to the drafter's and back, through text.

A timeline is a row's text in the drafter's tokens, and how much of it the drafter has read. A rewriter turns the
drafter's tokens into tokens of the target that spell the same: string-level exact match. The drafter may then use its
whole vocabulary, whether the target has its tokens or not.
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
    """The vocabularies and the encoder with which the drafter reads the target's output."""

    target: Vocabulary
    drafter: Vocabulary
    encoder: Encoder
    """The drafter's encoder."""
    target_to_draft: np.ndarray

    def get_bytes(self, token: int) -> bytes | None:
        """Return a token's text; None for special tokens and for ids beyond the tokenizer."""
        return self.target.bytes_by_id[token] if token < len(self.target.bytes_by_id) else None

    def get_partner(self, token: int) -> int:
        """Return the drafter's token with the same bytes or role; -1 if there is none."""
        return int(self.target_to_draft[token])


class Timeline:
    """A row's text in the drafter's tokens.

    Ordinary tokens are text, which is encoded again at its end. Special tokens are translated by role, and left out if
    the drafter has none with that role.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._closed = list(reader.encoder.opening)
        """Tokens before the open segment of text, which cannot change any more."""
        self._open = Encoded()
        self._text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tail: list[int] = []
        """A token for each byte of an incomplete character at the end."""
        self._drops_space = reader.target.leading_space
        self._kv: list[int] = []
        """Tokens that have KV, including those of accepted drafts."""
        self._num_drafts = 0
        self.is_complete = True
        """False while the text ends in bytes that the drafter has no tokens for."""

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
        """Number of tokens at the start that have KV."""
        return min(len(self._kv), len(self))

    @property
    def open_text(self) -> str | None:
        """The segment of text at the end; None if it ends within a character."""
        return None if self._get_incomplete_bytes() else self._text

    def read(self, num_tokens: int) -> None:
        """Record that the drafter has read the first `num_tokens` tokens."""
        self._kv[self.num_read :] = self.tokens(self.num_read, num_tokens)

    def drafted(self, num_drafts: int, tokens: Sequence[int] = ()) -> None:
        """Record that the drafter has read everything and drafted `num_drafts` tokens; the last has no KV.

        Args:
            tokens: The drafts in the drafter's vocabulary, if they are on the host.
        """
        self._num_drafts = num_drafts
        self._kv.extend(tokens[:-1])

    def verified(self, accepted: Sequence[int]) -> None:
        """Record the tokens that the target accepted, in its vocabulary.

        Called once after each verification.
        """
        if len(self._kv) == len(self):  # otherwise `drafted` got the tokens
            self._kv.extend(self._reader.get_partner(token) for token in accepted[: max(self._num_drafts - 1, 0)])
        self._num_drafts = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append new tokens of the target."""
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
        """Yield text, each with the special token after it."""
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

        Return how many of its tokens are unchanged.
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
        # The target's bos and the one that the drafter's tokenizer adds must not both appear.
        if self._closed == [*self._reader.encoder.opening, *self._reader.encoder.opening]:
            self._closed = list(self._reader.encoder.opening)
        self._open, self._text = Encoded(), ""
        self._decoder.reset()

    def _get_incomplete_bytes(self) -> bytes:
        return self._decoder.getstate()[0]


# How many characters of the text are encoded with a draft, whose first word may continue the last one.
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
        """Return drafts in the target's tokens, after a text that ends in `text_before`.

        Leaves out an incomplete character at the end, and everything after a special token.
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
            return []  # there are invalid bytes within
        ids = self._encode(text, text_before[-_CONTEXT:])
        whole = len(text.encode()) == len(spelled)
        return [*ids, special] if special is not None and special >= 0 and whole else ids

    def _encode(self, text: str, text_before: str) -> list[int]:
        together = self._encoder.encode(text_before + text)
        begin = together.count_tokens_before(len(text_before))
        # None: a token extends across the start of the draft, although the text's last token ends there.
        ids = self._encoder.encode(text).ids if begin is None else together.ids[begin:]
        spelled = b"".join(self._target.bytes_by_id[token] or b"" for token in ids)
        # Some tokenizers add a space in front or normalize characters.
        return ids if spelled == text.encode() else []
