"""The byte string that each token of a tokenizer represents, and the roles of special tokens.

The tokenizer's own decoder defines how a token is spelled. The name of the model is never considered.

- Byte-level BPE (with GPT-2's alphabet of printable characters, including converted tiktoken vocabularies): each
  character is one byte.
- SentencePiece, BPE or Unigram: `▁` is a space, and `<0x0A>` is that byte if the decoder has byte fallback. Many of
  these tokenizers add a leading space, which becomes part of the first token (see `Vocabulary.leading_space`).
- WordPiece: `##` continues a word and is not part of the text. Any other token starts a word, and its ID does not tell
  whether a space preceded it. Such a token represents what the decoder writes within a text: a space and the word, or
  only the character if the decoder removes the space (for example, before a comma).
- tiktoken and mistral-common (Tekken): the tokenizer objects return the bytes of each token.
Slow tokenizers that wrap a SentencePiece model are read in the same way as fast ones. Other slow tokenizers are
rejected, because they do not define how tokens are spelled.

Added tokens represent their literal text. Special tokens have roles and names but do not represent text.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_gaudi_spec.config import UnsupportedConfigError, in_one_line

# Known tokenizers replace single characters with single characters. Chains of longer replacements could fill memory.
_MAX_GROWTH = 4096


@dataclass(frozen=True, slots=True)
class ModelTokenizer:
    tokenizer: Any
    """A transformers tokenizer, or an object with the part of its interface that is used here."""
    end_ids: tuple[int, ...] = ()
    """End tokens from the model's configurations, in addition to the tokenizer's own eos token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Roles of special tokens. A token may have several roles; for example, a pad token may also be the eos token."""

    bos: int | None = None
    end_of_turn: int | None = None
    """The token that the chat template writes after a message."""
    eos: tuple[int, ...] = ()
    """All other tokens that end a generation, starting with the tokenizer's own eos token."""
    pad: int | None = None
    unk: int | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        return self.eos if self.end_of_turn is None else (self.end_of_turn, *self.eos)

    def get_roles(self, token_id: int) -> set[str]:
        """Return the roles of a token.

        The end of a turn and the end of a text count as one role, because some models have only one of these tokens.
        """
        held = {"bos": (self.bos,), "end": self.ends, "pad": (self.pad,), "unk": (self.unk,)}
        return {role for role, ids in held.items() if token_id in ids}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    bytes_by_id: tuple[bytes | None, ...]
    """The bytes of each token, or None for special tokens, tokens without text, and unused IDs."""
    id_by_bytes: dict[bytes, int]
    """Maps bytes to a token. If several tokens have the same bytes, it is the one that the tokenizer emits."""
    special_names: dict[int, str]
    roles: Roles
    leading_space: bool
    """Whether the tokenizer adds a leading space to a text. If so, the tokens represent one additional byte."""


def load_tokenizer(path: str, revision: str | None = None, trust_remote_code: bool = False) -> ModelTokenizer:
    """Load a model's tokenizer and the end tokens from the model's configurations."""
    from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except Exception as error:  # the exception type depends on which file is missing or invalid, and on remote code
        reason = in_one_line(error).rstrip(".")
        raise UnsupportedConfigError(
            f"A draft model needs its own tokenizer, and that of {path} cannot be loaded: {reason}. Use a model whose "
            f"folder contains its tokenizer files (tokenizer.json, tokenizer_config.json). If it is a head, which "
            f"needs no tokenizer, set `method` to its kind."
        ) from error
    ends: list[int] = []
    # Many models have no generation config, and a folder that contains only a tokenizer has no config at all.
    with contextlib.suppress(OSError, ValueError):
        ends += _to_ids(GenerationConfig.from_pretrained(path, revision=revision).eos_token_id)
    with contextlib.suppress(OSError, ValueError):
        config, _ = PretrainedConfig.get_config_dict(path, revision=revision)
        ends += _to_ids(config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id")))
    return ModelTokenizer(tokenizer, tuple(dict.fromkeys(ends)))


def read_vocabulary(model: ModelTokenizer) -> Vocabulary:
    pieces = _read_pieces(model.tokenizer)
    roles = _find_roles(model, pieces)
    # Added tokens with a role are special even if they are not marked as such. An ordinary word that is one of the end
    # tokens (as in "stop at a line break") is still treated as a word.
    special = pieces.special | {i: text for i, text in pieces.added.items() if roles.get_roles(i)}
    by_id = list(pieces.by_id)
    for token_id in special:
        if token_id < len(by_id):
            by_id[token_id] = None
    emitted = _index_by_bytes(pieces, by_id)
    return Vocabulary(
        bytes_by_id=tuple(by_id),
        id_by_bytes=emitted,
        special_names=special,
        roles=roles,
        leading_space=_spell(by_id, pieces.encode("a")) == b" a",
    )


# ---- families ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pieces:
    by_id: list[bytes | None]
    special: dict[int, str]
    """Maps token IDs to literal text."""
    added: dict[int, str]
    """All added tokens, including the special ones."""
    fallback: frozenset[int]
    """Single-byte tokens, which SentencePiece uses only if no other token matches."""
    encode: Callable[[str], Sequence[int]]


def _read_pieces(tokenizer: Any) -> _Pieces:
    if getattr(tokenizer, "backend_tokenizer", None) is not None:
        return _read_fast_pieces(tokenizer)
    if hasattr(tokenizer, "sp_model"):
        return _read_sentencepiece_pieces(tokenizer)
    for part in _iter_inner_objects(tokenizer):
        if hasattr(part, "decode_single_token_bytes"):
            names = {part.encode_single_token(name): name for name in part.special_tokens_set}
            return _read_byte_pieces(tokenizer, part.decode_single_token_bytes, names)
        if hasattr(part, "id_to_byte_piece"):
            return _read_byte_pieces(tokenizer, part.id_to_byte_piece, {})
    raise _make_refusal(tokenizer, "it is a slow tokenizer other than SentencePiece, tiktoken or mistral-common")


def _read_fast_pieces(tokenizer: Any) -> _Pieces:
    backend = tokenizer.backend_tokenizer
    try:
        components = [*_flatten_steps(backend.normalizer), *_flatten_steps(backend.decoder)]
    except Exception as error:
        raise _make_refusal(tokenizer, f"its normalizer or decoder cannot be read ({error})") from error
    if math.prod(map(_bound_growth, components)) > _MAX_GROWTH:
        raise _make_refusal(tokenizer, "its replacements would make a text far longer")
    ids = backend.get_vocab(with_added_tokens=True)
    if not ids:
        raise _make_refusal(tokenizer, "its vocabulary is empty")
    tokens: list[str | None] = [None] * (max(ids.values()) + 1)
    for token, token_id in ids.items():
        tokens[token_id] = token
    added_tokens = backend.get_added_tokens_decoder()
    added = {i: token.content for i, token in added_tokens.items()}
    special = {i: token.content for i, token in added_tokens.items() if token.special}
    special |= {i: tokens[i] or "" for i in tokenizer.all_special_ids if i < len(tokens)}
    # These tokens are literal text, which is not in the decoder's alphabet.
    literal = {i for i, text in added.items() if backend.model.token_to_id(text) is None}
    steps = _get_decoder_steps(tokenizer)
    by_id, fallback = _decode_tokens(tokenizer, tokens, steps, literal)
    return _Pieces(
        by_id=by_id,
        special=special,
        added=added | special,
        fallback=fallback,
        encode=lambda text: encode_text(backend, text).ids,
    )


def _bound_growth(step: dict[str, Any]) -> int:
    """Return the maximum factor by which a step of a normalizer or decoder may lengthen a text."""
    num_added = len(step.get("content") or "") + len(step.get("prepend") or "")
    # A pattern that is not literal text may match between any two characters, and both characters remain.
    is_literal = bool((step.get("pattern") or {}).get("String"))
    return max(num_added + (not is_literal), 1)


def encode_text(backend: Any, text: str) -> Any:
    """Return a fast tokenizer's encoding of a text, or raise RuntimeError if it cannot encode it."""
    try:
        return backend.encode(text, add_special_tokens=False)
    except BaseException as error:  # the library panics if a pattern needs too much backtracking
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(f"The tokenizer cannot encode a text: {error}") from error


def _read_sentencepiece_pieces(tokenizer: Any) -> _Pieces:
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
    by_id, fallback = _decode_tokens(tokenizer, tokens, [{"type": "Metaspace"}, {"type": "ByteFallback"}], set())
    special = {i: tokens[i] for i in tokenizer.all_special_ids if i < len(tokens)}
    return _Pieces(
        by_id=by_id,
        special=special,
        added=added | special,
        fallback=fallback,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


def _read_byte_pieces(tokenizer: Any, ask: Callable[[int], bytes], special: dict[int, str]) -> _Pieces:
    """Read a vocabulary whose tokens are byte strings. `special` contains tokens that the wrapper may not have."""
    by_id: list[bytes | None] = []
    for token_id in range(len(tokenizer)):
        # tiktoken raises KeyError for gaps in its vocabulary, and wrappers may add tokens to a vocabulary.
        try:
            by_id.append(ask(token_id) or None)
        except (KeyError, IndexError, ValueError):
            by_id.append(None)
    added_tokens = getattr(tokenizer, "added_tokens_decoder", None)
    # mistral-common has a method with this name but no added tokens.
    added = {i: str(token) for i, token in added_tokens.items()} if isinstance(added_tokens, dict) else {}
    for token_id, text in added.items():
        if token_id < len(by_id) and by_id[token_id] is None:
            by_id[token_id] = text.encode()
    special = special | {i: str(tokenizer.convert_ids_to_tokens(i)) for i in tokenizer.all_special_ids}
    return _Pieces(
        by_id=by_id,
        special=special,
        added=added | special,
        fallback=frozenset(),
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


def _iter_inner_objects(tokenizer: Any) -> Iterator[Any]:
    """Yield a tokenizer and the objects that it wraps."""
    yield tokenizer
    for path in ("tokenizer", "_tokenizer", "model", "encoding", "tokenizer.instruct_tokenizer.tokenizer"):
        part = tokenizer
        for name in path.split("."):
            part = getattr(part, name, None)
        if part is not None:
            yield part


# ---- spelling ------------------------------------------------------------------------------------------

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Replacements that the WordPiece decoder makes in each token, in this order.
_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def _get_decoder_steps(tokenizer: Any) -> list[dict[str, Any]]:
    """Return the decoder's steps or, without a decoder, steps that undo the pre-tokenizer and the normalizer."""
    backend = tokenizer.backend_tokenizer
    steps = list(_flatten_steps(backend.decoder))
    if steps:
        return steps
    for step in [*_flatten_steps(backend.pre_tokenizer), *_flatten_steps(backend.normalizer)]:
        undo: dict[str, Any] | None = None
        if step["type"] in ("ByteLevel", "Metaspace"):
            undo = step
        elif step["type"] == "Replace" and step["pattern"] == {"String": " "}:
            undo = {"type": "Replace", "pattern": {"String": step["content"]}, "content": " "}
        if undo is not None:
            return [undo, {"type": "ByteFallback"}] if getattr(backend.model, "byte_fallback", False) else [undo]
    raise _make_refusal(tokenizer, "its tokenizer.json has no decoder and no pre-tokenizer that defines a space")


def _flatten_steps(component: Any) -> Iterator[dict[str, Any]]:
    """Yield the JSON of a component, with sequences flattened."""
    if component is not None:
        todo = [json.loads(component.__getstate__())]
        while todo:
            step = todo.pop(0)
            inner = [step[key] for key in ("decoders", "pretokenizers", "normalizers") if key in step]
            if inner:
                todo = [*inner[0], *todo]
            elif step.get("type"):
                yield step


def _decode_tokens(
    tokenizer: Any, tokens: Sequence[str | None], steps: Iterable[dict[str, Any]], literal: set[int]
) -> tuple[list[bytes | None], frozenset[int]]:
    """Return the bytes that the decoder steps write for each token inside a text, and the byte-fallback tokens."""
    texts = ["" if token is None else token for token in tokens]
    found: dict[int, bytes] = {}
    byte_level = fused = False
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            byte_level = True
        elif kind == "Metaspace":
            sign = step.get("replacement", "▁")
            texts = [text.replace(sign, " ") for text in texts]
        elif kind == "Replace" and "String" in step["pattern"]:
            sign, content = step["pattern"]["String"], step["content"]
            texts = [text.replace(sign, content) for text in texts]
        elif kind == "ByteFallback":
            found = {
                i: bytes([int(match[1], 16)])
                for i, token in enumerate(tokens)
                if token is not None and len(token) == 6 and (match := _BYTE.fullmatch(token))
            }
        elif kind == "WordPiece":
            texts = [_decode_word_piece(text, step) for text in texts]
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip":
            # After Fuse, Strip receives the whole text and removes only its leading space.
            if not fused:
                texts = [_strip_token(text, step) for text in texts]
        else:
            raise _make_refusal(tokenizer, f"its decoder has a step {json.dumps(step)}")
    if byte_level:
        by_id = [text.encode() if i in literal else _decode_alphabet(text) for i, text in enumerate(texts)]
    else:
        by_id = [text.encode() for text in texts]
    for i, byte in found.items():
        by_id[i] = byte
    # An empty token does not extend the text and could be drafted forever.
    return [piece or None for piece in by_id], frozenset(found)


def _make_alphabet() -> dict[int, str]:
    """Map characters in GPT-2's alphabet to bytes, with both as code points.

    Printable bytes are represented by themselves, and all others by the characters starting at 256, in order.
    """
    prints = {*range(33, 127), *range(161, 173), *range(174, 256)}
    table = {byte: chr(byte) for byte in prints}
    others = [byte for byte in range(256) if byte not in prints]
    # These characters are not in the alphabet. Code points below 256 would be mistaken for bytes.
    table |= dict.fromkeys(others, "\uffff")
    return table | {256 + index: chr(byte) for index, byte in enumerate(others)}


_ALPHABET = _make_alphabet()


def _decode_alphabet(text: str) -> bytes:
    try:
        return text.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # the decoder leaves a token unchanged if it contains a character outside the alphabet
        return text.encode()


def _decode_word_piece(text: str, step: dict[str, Any]) -> str:
    text = text.removeprefix(step["prefix"]) if text.startswith(step["prefix"]) else f" {text}"
    if step.get("cleanup", True):
        for before, after in _CLEANUP:
            text = text.replace(before, after)
    return text


def _strip_token(text: str, step: dict[str, Any]) -> str:
    sign = step["content"]
    for _ in range(step["start"]):
        text = text.removeprefix(sign)
    for _ in range(step["stop"]):
        text = text.removesuffix(sign)
    return text


# ---- duplicates and roles --------------------------------------------------------------------------------


def _spell(by_id: Sequence[bytes | None], ids: Iterable[int]) -> bytes:
    return b"".join(by_id[i] or b"" for i in ids if i < len(by_id))


def _index_by_bytes(pieces: _Pieces, by_id: Sequence[bytes | None]) -> dict[bytes, int]:
    first: dict[bytes, int] = {}
    several: dict[bytes, list[int]] = {}
    for token_id, piece in enumerate(by_id):
        if piece is not None and first.setdefault(piece, token_id) != token_id:
            several.setdefault(piece, [first[piece]]).append(token_id)
    for piece, candidates in several.items():
        first[piece] = _choose_emitted(pieces, by_id, piece, candidates)
    return first


def _choose_emitted(pieces: _Pieces, by_id: Sequence[bytes | None], piece: bytes, candidates: list[int]) -> int:
    # After a line break, no tokenizer adds the leading space that some of them add to a text.
    with contextlib.suppress(UnicodeDecodeError, RuntimeError):
        text = piece.decode()
        for front in ("", "\n"):
            ids = pieces.encode(front + text)
            whole = (front + text).encode()
            if ids and ids[-1] in candidates and _spell(by_id, ids) in (whole, b" " + whole):
                return ids[-1]
    return min(candidates, key=lambda token_id: (token_id in pieces.fallback, token_id))


def _find_roles(model: ModelTokenizer, pieces: _Pieces) -> Roles:
    tokenizer = model.tokenizer

    def marked(token_id: Any) -> bool:
        return token_id in pieces.added

    def named(role: str) -> int | None:
        token_id = getattr(tokenizer, f"{role}_token_id", None)
        return token_id if marked(token_id) else None

    ends = dict.fromkeys(i for i in (named("eos"), *model.end_ids) if i is not None and marked(i))
    end_of_turn = _find_end_of_turn(tokenizer, {i: pieces.added[i] for i in ends})
    return Roles(
        bos=named("bos"),
        end_of_turn=end_of_turn,
        eos=tuple(i for i in ends if i != end_of_turn),
        pad=named("pad"),
        unk=named("unk"),
    )


def _find_end_of_turn(tokenizer: Any, ends: dict[int, str]) -> int | None:
    """Return the first end token that the chat template writes after the content of a message.

    The template is searched but never rendered, because it is code, and a drafter's template might run forever.
    """
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    _, _, after = template.partition("content") if isinstance(template, str) else ("", "", "")
    by_position = {after.find(name): token_id for token_id, name in ends.items() if name and name in after}
    if by_position:
        return by_position[min(by_position)]
    eos: int | None = getattr(tokenizer, "eos_token_id", None)
    return eos if eos in ends and "eos_token" in after else None


def _to_ids(value: Any) -> list[int]:
    """Return a list of token IDs. A configuration contains a single ID, a list, or nothing."""
    if value is None:
        return []
    return [int(i) for i in value] if isinstance(value, list | tuple) else [int(value)]


def _make_refusal(tokenizer: Any, reason: str) -> UnsupportedConfigError:
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    return UnsupportedConfigError(
        f"Universal drafting cannot derive which bytes the tokens of {name} stand for: {reason}. Use a model with a "
        f"fast tokenizer (tokenizer.json) of a known family: byte-level BPE, SentencePiece or WordPiece."
    )
