"""Encodes a growing text incrementally instead of from its start each time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.drafting.universal.token_bytes import encode_text

if TYPE_CHECKING:
    from vllm_gaudi_spec.drafting.universal.token_bytes import ModelTokenizer

# Number of tokens to encode again when text is appended. New text may change the last word or, for tokenizers without
# words, the last few tokens. The first `_UNSURE` tokens of a window may differ from the tokens of the whole text.
_WINDOW = 32
_UNSURE = 8


@dataclass(slots=True)
class Encoded:
    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """The end of each token, in characters. Tokens that share a character all end after that character."""

    def count_tokens_before(self, position: int) -> int | None:
        """Return the number of tokens before a text position, or None if the position is inside a token."""
        count = bisect_right(self.ends, position)
        return count if position == (self.ends[count - 1] if count else 0) else None


class Encoder:
    """A fast tokenizer that adds no special tokens to a text."""

    def __init__(self, model: ModelTokenizer, size: int) -> None:
        """
        Args:
            size: Size of the model's vocabulary. The tokenizer may have more tokens than the model.
        """
        from tokenizers import processors

        backend: Any = getattr(model.tokenizer, "backend_tokenizer", None)
        if backend is None:
            name = getattr(model.tokenizer, "name_or_path", "") or type(model.tokenizer).__name__
            raise UnsupportedConfigError(
                f"universal_context retokenize and universal_match slem need a fast tokenizer (tokenizer.json), which "
                f"{name} does not have; remove both from additional_config.gaudi_spec."
            )
        self._size = size
        self._backend = type(backend).from_str(backend.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        bare, whole = self._backend.encode("a", add_special_tokens=False).ids, self._backend.encode("a").ids
        self.opening: list[int] = [token for token in whole[: _find_sublist(whole, bare)] if token < size]
        """Tokens that the tokenizer adds before a text, such as bos."""
        # If the target writes the name of a special token, treat the name as ordinary text.
        self._backend.encode_special_tokens = True
        # Some post-processors exclude spaces from token offsets.
        self._backend.post_processor = processors.ByteLevel(trim_offsets=False)

    def encode(self, text: str) -> Encoded:
        found = encode_text(self._backend, text)
        pairs = [(token, end) for token, (_, end) in zip(found.ids, found.offsets, strict=True) if token < self._size]
        return Encoded([token for token, _ in pairs], [end for _, end in pairs])

    def extend(self, encoded: Encoded, text: str) -> int:
        """Update the tokens for a text that has grown to `text`. Returns the number of unchanged tokens."""
        before = max(len(encoded.ids) - _WINDOW, 0)
        begin = encoded.ends[before - 1] if before else 0
        before = bisect_right(encoded.ends, begin) if before else 0
        window = self.encode(text[begin:])
        window.ends = [begin + end for end in window.ends]
        if before:
            for position in encoded.ends[before + _UNSURE :]:
                old, new = encoded.count_tokens_before(position), window.count_tokens_before(position)
                if old is not None and new:
                    return _splice(encoded, old, window, new)
            window = self.encode(text)
        return _splice(encoded, 0, window, 0)


def _splice(encoded: Encoded, old: int, window: Encoded, new: int) -> int:
    """Replace the tokens that start at index `old` with the window's tokens that start at index `new`."""
    fresh = window.ids[new:]
    same = old + count_common_prefix(encoded.ids[old:], fresh)
    encoded.ids[old:] = fresh
    encoded.ends[old:] = window.ends[new:]
    return same


def count_common_prefix(some: Sequence[int], others: Sequence[int]) -> int:
    pairs = enumerate(zip(some, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(some), len(others)))


def _find_sublist(whole: list[int], part: list[int]) -> int:
    found = (i for i in range(len(whole) - len(part) + 1) if whole[i : i + len(part)] == part)
    return next(found, 0)
