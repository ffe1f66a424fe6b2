"""Matching of two vocabularies."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from tests.unit.drafting.test_token_bytes import byte_level, id_of, sentencepiece_bpe, unigram, word_piece, wrapped
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.drafting.universal import pairs
from vllm_gaudi_spec.drafting.universal.token_bytes import ModelTokenizer, Roles, Vocabulary, read_vocabulary
from vllm_gaudi_spec.drafting.universal.vocab_map import match_vocabularies

PADDING = 37
"""Padding ids of the models' vocabularies beyond their tokenizers'."""
NAMES = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
OTHER_NAMES = dict(bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>", unk_token="<|unk|>")
PAIRS = {
    "byte_level x sentencepiece": lambda: (byte_level(500, **OTHER_NAMES), sentencepiece_bpe(**NAMES)),
    "sentencepiece x byte_level": lambda: (sentencepiece_bpe(prefix=True, **NAMES), byte_level(**OTHER_NAMES)),
    "sentencepiece x unigram": lambda: (sentencepiece_bpe(**NAMES), unigram(**NAMES)),
    "unigram x byte_level": lambda: (unigram(**NAMES), byte_level(380, **OTHER_NAMES)),
    "byte_level x byte_level": lambda: (byte_level(450, **OTHER_NAMES), byte_level(300, **OTHER_NAMES)),
    "byte_level x word_piece": lambda: (byte_level(450, **OTHER_NAMES), word_piece()),
}


class Pair:
    def __init__(self, target: Any, draft: Any, ends: tuple[int, ...] = (), draft_ends: tuple[int, ...] = ()) -> None:
        self.target, self.draft = target, draft
        self.models = ModelTokenizer(target, ends), ModelTokenizer(draft, draft_ends)
        self.sizes = len(target) + PADDING, len(draft) + 2 * PADDING
        self.vocabularies = read_vocabulary(self.models[0]), read_vocabulary(self.models[1])
        self.map = match_vocabularies(*self.vocabularies, *self.sizes)


@pytest.fixture(params=PAIRS, scope="module")
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(*PAIRS[request.param]())


def test_pairs_are_mutual_and_never_padding(pair: Pair) -> None:
    made = pair.map
    assert made.target_to_draft.dtype == made.draft_to_target.dtype == np.int32
    assert (made.target_to_draft.shape, made.draft_to_target.shape) == ((pair.sizes[0],), (pair.sizes[1],))
    target_ids = np.flatnonzero(made.target_to_draft >= 0)
    draft_ids = np.flatnonzero(made.draft_to_target >= 0)
    assert len(target_ids) == len(draft_ids) == made.num_matched > 20
    assert (made.draft_to_target[made.target_to_draft[target_ids]] == target_ids).all()
    assert target_ids.max() < len(pair.target)
    assert draft_ids.max() < len(pair.draft)
    assert not made.draftable[made.draft_to_target < 0].any()


def test_matched_tokens_have_equal_text(pair: Pair) -> None:
    """Decoded after another token, since some decoders remove a space at the start of a text.

    Decoders differ for bytes that are not UTF-8.
    """
    made, rng = pair.map, random.Random(0)
    target = pair.vocabularies[0]
    ordinary = [i for i in np.flatnonzero(made.target_to_draft >= 0).tolist() if target.bytes_by_id[i] is not None]
    front = target.id_by_bytes[b"e"]
    draft_front = int(made.target_to_draft[front])
    compared = 0
    for _ in range(3000):
        ids = [rng.choice(ordinary) for _ in range(rng.randint(1, 8))]
        draft_ids = made.target_to_draft[ids].tolist()
        try:
            text = b"".join(target.bytes_by_id[i] or b"" for i in ids).decode()
        except UnicodeDecodeError:
            continue
        compared += 1
        assert pair.target.decode([front, *ids]) == pair.target.decode([front]) + text
        assert pair.draft.decode([draft_front, *draft_ids]) == pair.draft.decode([draft_front]) + text
    assert compared > 300


def test_whitespace_bytes_and_accents_match_between_families() -> None:
    pair = Pair(sentencepiece_bpe(), byte_level(600))
    for token, partner in [("▁", "Ġ"), ("▁▁", "ĠĠ"), ("▁the", "Ġthe"), ("\n", "Ċ"), ("<0x0B>", "ċ"), ("<0xE4>", "ä")]:
        assert pair.map.target_to_draft[id_of(pair.target, token)] == id_of(pair.draft, partner), token
    # "Ċ" in a text is not the newline that it stands for in the other alphabet.
    friend = wrapped(Tokenizer(models.BPE({"Ċ": 0, "▁": 1, "\n": 2}, [])))
    friend.backend_tokenizer.decoder = sentencepiece_bpe().backend_tokenizer.decoder
    false = Pair(friend, byte_level())
    assert false.map.target_to_draft[:3].tolist() == [-1, id_of(false.draft, "Ġ"), id_of(false.draft, "Ċ")]


def test_ids_beyond_model_have_no_partner() -> None:
    """A tokenizer can have more ids than its model."""
    vocabulary = read_vocabulary(ModelTokenizer(byte_level(eos_token="<eos>")))
    made = match_vocabularies(vocabulary, vocabulary, 300, 200)
    assert (made.target_to_draft.size, made.draft_to_target.size, made.num_matched) == (300, 200, 200)
    assert made.compute_coverage() == {"target": 200 / 300, "drafter": 1}
    assert (made.target_to_draft[200:] == -1).all()


def test_special_tokens_beyond_model_have_no_partner() -> None:
    vocabulary = special("<a> <b> <c>")
    for sizes in ((2, 4), (4, 2)):
        assert match_vocabularies(vocabulary, vocabulary, *sizes).num_matched == 2


def test_empty_intersection_is_refused() -> None:
    def vocabulary(piece: bytes) -> Vocabulary:
        return Vocabulary(
            bytes_by_id=(piece, None),
            id_by_bytes={piece: 0},
            special_names={1: "</s>"},
            roles=Roles(eos=(1,)),
            leading_space=False,
        )

    with pytest.raises(UnsupportedConfigError, match="Use another model"):
        match_vocabularies(vocabulary(b"a"), vocabulary(b"b"), 2, 2)
    with pytest.raises(UnsupportedConfigError):  # only in the padding of the drafter
        match_vocabularies(vocabulary(b"a"), vocabulary(b"a"), 2, 0)
    assert match_vocabularies(vocabulary(b"a"), vocabulary(b"a"), 2, 2).num_matched == 2


@pytest.mark.parametrize(("largest", "is_refused"), [(9, False), (400_000_000, True)])
def test_tokenizer_with_a_huge_id_is_refused(largest: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of tokens by id would fill the memory. Ids up to the model's last one are padding."""
    loaded = SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 0, "b": largest}))
    monkeypatch.setattr(pairs, "load_tokenizer", lambda *args: loaded)
    options: dict[str, Any] = dict(tokenizer="x", tokenizer_revision=None, trust_remote_code=False)
    model = SimpleNamespace(model="x", get_vocab_size=lambda: 10, **options)
    if is_refused:
        with pytest.raises(UnsupportedConfigError, match=r"largest id is 400000000, .*tokenizer\.json"):
            pairs._load_tokenizer(model)
    else:
        assert pairs._load_tokenizer(model) is loaded


def special(names: str, **roles: Any) -> Vocabulary:
    """Return a vocabulary of one ordinary token and special tokens, with ids from 1 on."""
    held = names.split()
    return Vocabulary(
        bytes_by_id=(b"a", *[None] * len(held)),
        id_by_bytes={b"a": 0},
        special_names=dict(enumerate(held, 1)),
        roles=Roles(**roles),
        leading_space=False,
    )


def partners(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    made = match_vocabularies(target, draft, 20, 20)
    return {i: int(made.target_to_draft[i]) for i in np.flatnonzero(made.target_to_draft >= 0).tolist() if i}


def test_roles_match_tokens_with_different_names() -> None:
    target = special("<pad> <eos> <bos> <unk> <turn>", pad=1, eos=(2,), bos=3, unk=4, end_of_turn=5)
    draft = special("[t] [e] [b] [p] [u]", end_of_turn=1, eos=(2,), bos=3, pad=4, unk=5)
    assert partners(target, draft) == {1: 4, 2: 2, 3: 3, 4: 5, 5: 1}
    made = match_vocabularies(target, draft, 20, 20)
    assert np.flatnonzero(made.draftable).tolist() == [0, 1, 2, 3]


def test_names_match_before_roles_unless_contradicting() -> None:
    chat = special("<text> <turn>", end_of_turn=2, unk=1)
    base = special("<text> <turn>", eos=(1,), unk=1, bos=1)
    assert partners(chat, base) == {1: 1, 2: 2}
    swapped = special("</s> <s>", bos=1, eos=(2,))
    assert partners(special("</s> <s>", eos=(1,), bos=2), swapped) == {1: 2, 2: 1}
