"""From the target's tokens to the drafter's and back, by way of text.

A timeline is a row's text in the drafter's own tokens: the part that the drafter has read, and the rest.
A rewriter turns drafts, in the drafter's tokens, into tokens of the target that spell the same: string-level exact
match. The drafter's whole vocabulary may be drafted, whether the target has its tokens or not.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_gaudi_spec.drafting.universal.encoder import Encoded, Encoder, num_equal
from vllm_gaudi_spec.drafting.universal.token_bytes import Vocabulary


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """How the drafter reads the target's output."""

    target: Vocabulary
    drafter: Vocabulary
    encoder: Encoder
    """The drafter's."""
    target_to_draft: np.ndarray

    def text_of(self, token: int) -> bytes | None:
        """None for special tokens, and for ids beyond the tokenizer."""
        return self.target.bytes_by_id[token] if token < len(self.target.bytes_by_id) else None

    def partner(self, token: int) -> int:
        """The drafter's token with the same bytes or the same role, -1 if there is none."""
        return int(self.target_to_draft[token])


class Timeline:
    """Ordinary tokens are text, encoded again at its end. Special ones are translated by role, and left
    out where the drafter has none of that kind."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._closed = list(reader.encoder.opening)
        """Tokens before the open segment of text, which cannot change any more."""
        self._open = Encoded()
        self._text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tail: list[int] = []
        """A token for each byte at the end that is no whole character yet."""
        self._drops_space = reader.target.leading_space
        self._kv: list[int] = []
        """The tokens whose KV exists, those of accepted drafts included."""
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
        """How many tokens at the beginning have KV."""
        return min(len(self._kv), len(self))

    @property
    def open_text(self) -> str | None:
        """The segment of text at the end; None if it ends within a character."""
        return None if self._incomplete_bytes() else self._text

    def read(self, num_tokens: int) -> None:
        """The drafter has read `num_tokens` tokens."""
        self._kv[self.num_read :] = self.tokens(self.num_read, num_tokens)

    def drafted(self, num_drafts: int, tokens: Sequence[int] = ()) -> None:
        """The drafter has read all and wrote `num_drafts` drafts after the end; the last has no KV. `tokens`: the
        drafts in its own vocabulary, where they are on the host."""
        self._num_drafts = num_drafts
        self._kv.extend(tokens[:-1])

    def verified(self, accepted: Sequence[int]) -> None:
        """The target accepted these tokens of its vocabulary; once after each verification."""
        if len(self._kv) == len(self):  # else the host had the drafts
            self._kv.extend(self._reader.partner(token) for token in accepted[: max(self._num_drafts - 1, 0)])
        self._num_drafts = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends the target's new tokens."""
        same = len(self._closed) + len(self._open.ids)
        for segment, special in self._segments(tokens):
            same = min(same, len(self._closed) + self._write(segment))
            if special is not None:
                self._close(special)
        incomplete = self._incomplete_bytes()
        found = [self._reader.drafter.id_by_bytes.get(bytes([byte])) for byte in incomplete]
        self._tail = [token for token in found if token is not None]
        self.is_complete = len(self._tail) == len(incomplete)
        same = min(same, len(self._kv))
        ahead = self._kv[same:]
        del self._kv[same + num_equal(ahead, self.tokens(same, min(same + len(ahead), len(self)))) :]

    def _segments(self, tokens: Sequence[int]) -> Iterator[tuple[bytes, int | None]]:
        """Text, each with the special token after it."""
        pieces: list[bytes] = []
        for token in tokens:
            piece = self._reader.text_of(token)
            if piece is None:
                yield b"".join(pieces), token
                pieces = []
            else:
                pieces.append(piece)
        if pieces:
            yield b"".join(pieces), None

    def _write(self, segment: bytes) -> int:
        """Returns how many tokens of the open segment stayed as they were."""
        if segment and self._drops_space:
            segment, self._drops_space = segment.removeprefix(b" "), False
        more = self._decoder.decode(segment)
        if not more:
            return len(self._open.ids)
        self._text += more
        return self._reader.encoder.extend(self._open, self._text)

    def _close(self, special: int) -> None:
        partner = self._reader.partner(special)
        self._closed += [*self._open.ids, *([partner] if partner >= 0 else [])]
        # The target's bos and the one that the drafter's tokenizer puts in front are one.
        if self._closed == [*self._reader.encoder.opening, *self._reader.encoder.opening]:
            self._closed = list(self._reader.encoder.opening)
        self._open, self._text = Encoded(), ""
        self._decoder.reset()

    def _incomplete_bytes(self) -> bytes:
        return self._decoder.getstate()[0]


# How many characters before the draft are encoded with it: its first word may continue the last one of the text.
_CONTEXT = 48


class Rewriter:
    def __init__(self, target: Vocabulary, drafter: Vocabulary, encoder: Encoder, draft_to_target: np.ndarray) -> None:
        """`encoder`: the target's."""
        self._target = target
        self._drafter = drafter
        self._encoder = encoder
        self._draft_to_target = draft_to_target

    def rewrite(self, drafts: Sequence[int], text_before: str) -> list[int]:
        """Drafts in the target's tokens, after a text that ends in `text_before`. Bytes at the end that are no whole
        character are left out; so is everything after a special token."""
        spelled, special = b"", None
        for token in drafts:
            piece = self._drafter.bytes_by_id[token] if token < len(self._drafter.bytes_by_id) else None
            if piece is None:
                special = int(self._draft_to_target[token])
                break
            spelled += piece
        text = spelled.decode(errors="ignore")
        if not spelled.startswith(text.encode()):
            return []  # bytes that are no text are in between
        ids = self._encode(text, text_before[-_CONTEXT:])
        whole = len(text.encode()) == len(spelled)
        return [*ids, special] if special is not None and special >= 0 and whole else ids

    def _encode(self, text: str, text_before: str) -> list[int]:
        together = self._encoder.encode(text_before + text)
        begin = together.tokens_before(len(text_before))
        # None if a token extends from the text before into the draft: the tokens of that text end between them.
        ids = self._encoder.encode(text).ids if begin is None else together.ids[begin:]
        spelled = b"".join(self._target.bytes_by_id[token] or b"" for token in ids)
        # Some tokenizers put a space in front, some write signs in another way.
        return ids if spelled == text.encode() else []
