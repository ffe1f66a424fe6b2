"""From the target's tokens to the drafter's and back, by way of text.

A timeline is a row's text in the drafter's own tokens: what the drafter has read of it and what it has still to read.
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
    """How the drafter reads what the target wrote."""

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
    """Ordinary tokens are text, encoded anew where it ends. Special ones are translated by what they are for, and left
    out where the drafter has none of that kind."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._settled = list(reader.encoder.opening)
        """Tokens before the open stretch of text, which cannot change any more."""
        self._open = Encoded()
        self._text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tail: list[int] = []
        """For bytes at the end that are no whole character yet, a token each."""
        self._drops_space = reader.target.leading_space
        self._kv: list[int] = []
        """The tokens whose KV exists, those of accepted drafts included."""
        self._num_drafts = 0
        self.is_complete = True
        """False while the text ends in bytes that the drafter has no tokens for."""

    def __len__(self) -> int:
        return len(self._settled) + len(self._open.ids) + len(self._tail)

    def tokens(self, begin: int, end: int | None = None) -> list[int]:
        end = len(self) if end is None else end
        settled, whole = len(self._settled), len(self._settled) + len(self._open.ids)
        return [
            *self._settled[begin:end],
            *self._open.ids[max(begin - settled, 0) : max(end - settled, 0)],
            *self._tail[max(begin - whole, 0) : max(end - whole, 0)],
        ]

    @property
    def num_read(self) -> int:
        """How many tokens at the beginning have KV."""
        return min(len(self._kv), len(self))

    @property
    def open_text(self) -> str | None:
        """The stretch of text at the end; None if it ends within a character."""
        return None if self._loose_bytes() else self._text

    def read(self, num_tokens: int) -> None:
        """The drafter has read so many."""
        self._kv[self.num_read :] = self.tokens(self.num_read, num_tokens)

    def drafted(self, num_drafts: int, tokens: Sequence[int] = ()) -> None:
        """Behind the end, all of which it has read, the drafter wrote so many drafts: the last has no KV. `tokens` are
        its own, where the host knows them."""
        self._num_drafts = num_drafts
        self._kv.extend(tokens[:-1])

    def verified(self, accepted: Sequence[int]) -> None:
        """The target took these, its own tokens; once behind each verification."""
        if len(self._kv) == len(self):  # else they are known already
            self._kv.extend(self._reader.partner(token) for token in accepted[: max(self._num_drafts - 1, 0)])
        self._num_drafts = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """What the target wrote since."""
        same = len(self._settled) + len(self._open.ids)
        for stretch, special in self._stretches(tokens):
            same = min(same, len(self._settled) + self._write(stretch))
            if special is not None:
                self._close(special)
        loose = self._loose_bytes()
        found = [self._reader.drafter.id_by_bytes.get(bytes([byte])) for byte in loose]
        self._tail = [token for token in found if token is not None]
        self.is_complete = len(self._tail) == len(loose)
        same = min(same, len(self._kv))
        ahead = self._kv[same:]
        del self._kv[same + num_equal(ahead, self.tokens(same, min(same + len(ahead), len(self)))) :]

    def _stretches(self, tokens: Sequence[int]) -> Iterator[tuple[bytes, int | None]]:
        """Text, each with the special token behind it."""
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

    def _write(self, stretch: bytes) -> int:
        """Returns how many tokens of the open stretch stayed as they were."""
        if stretch and self._drops_space:
            stretch, self._drops_space = stretch.removeprefix(b" "), False
        more = self._decoder.decode(stretch)
        if not more:
            return len(self._open.ids)
        self._text += more
        return self._reader.encoder.extend(self._open, self._text)

    def _close(self, special: int) -> None:
        partner = self._reader.partner(special)
        self._settled += [*self._open.ids, *([partner] if partner >= 0 else [])]
        # The target's bos and the one that the drafter's tokenizer puts in front are one.
        if self._settled == [*self._reader.encoder.opening, *self._reader.encoder.opening]:
            self._settled = list(self._reader.encoder.opening)
        self._open, self._text = Encoded(), ""
        self._decoder.reset()

    def _loose_bytes(self) -> bytes:
        return self._decoder.getstate()[0]


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
