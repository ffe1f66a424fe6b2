"""Text between two vocabularies: the drafter's tokens of a growing text, and rewritten drafts."""

import random
from collections.abc import Iterator
from itertools import takewhile

import pytest
from tokenizers import Regex, pre_tokenizers

from tests.unit.drafting.test_token_bytes import byte_level, random_texts, sentencepiece_bpe, unigram, word_piece
from vllm_gaudi_spec.drafting.universal.encoder import Encoder
from vllm_gaudi_spec.drafting.universal.timeline import Reader, Rewriter, Timeline
from vllm_gaudi_spec.drafting.universal.token_bytes import ModelTokenizer, read_vocabulary
from vllm_gaudi_spec.drafting.universal.vocab_map import match_vocabularies

SPECIAL = dict(bos_token="<s>", eos_token="</s>")
NAMED_OTHERWISE = dict(bos_token="<|begin|>", eos_token="<|end|>")
TOKENIZERS = {
    "byte_level": lambda: byte_level(420, **NAMED_OTHERWISE),
    "small byte_level": lambda: byte_level(300, **NAMED_OTHERWISE),
    "sentencepiece": lambda: sentencepiece_bpe(**SPECIAL),
    "sentencepiece with a space in front": lambda: sentencepiece_bpe(prefix=True, **SPECIAL),
    "unigram": lambda: unigram(**SPECIAL),
    "word_piece": word_piece,
}


class Languages:
    def __init__(self, target: str, drafter: str) -> None:
        self.name = drafter
        self.tokenizers = TOKENIZERS[target](), TOKENIZERS[drafter]()
        self.models = [ModelTokenizer(tokenizer) for tokenizer in self.tokenizers]
        self.target, self.drafter = (read_vocabulary(model) for model in self.models)
        self.map = match_vocabularies(self.target, self.drafter, *map(len, self.tokenizers))
        self.reader = Reader(
            self.target, self.drafter, Encoder(self.models[1], len(self.tokenizers[1])), self.map.target_to_draft
        )

    def target_ids(self, text: str) -> list[int]:
        return self.tokenizers[0].encode(text, add_special_tokens=False)

    def spelled(self, ids: list[int]) -> bytes:
        return b"".join(self.drafter.bytes_by_id[token] or b"" for token in ids)

    def rewriter(self) -> Rewriter:
        return Rewriter(
            self.target, self.drafter, Encoder(self.models[0], len(self.tokenizers[0])), self.map.draft_to_target
        )


EVERY_PAIR = [(target, drafter) for target in TOKENIZERS for drafter in TOKENIZERS if "word_piece" not in target]


@pytest.fixture(params=EVERY_PAIR, ids=" reads ".join, scope="module")
def languages(request: pytest.FixtureRequest) -> Languages:
    return Languages(*request.param)


def pieces(ids: list[int], rng: random.Random, most: int = 5) -> Iterator[list[int]]:
    begin = 0
    while begin < len(ids):
        count = rng.randint(1, most)
        yield ids[begin : begin + count]
        begin += count


# ---- reading -------------------------------------------------------------------------------------------


def test_growing_text_is_encoded_like_whole_text(languages: Languages) -> None:
    rng = random.Random(1)
    # Without words, the best segmentation depends on the whole text.
    compared = languages.spelled if "unigram" in languages.name else list
    for text in [*random_texts(3, 10), " ".join(random_texts(5, 40))]:
        ids = languages.target_ids(text)
        grown = Timeline(languages.reader)
        for piece in pieces(ids, rng):
            grown.extend(piece)
        whole = Timeline(languages.reader)
        whole.extend(ids)
        assert compared(grown.tokens(0)) == compared(whole.tokens(0))


def test_split_characters_are_reassembled() -> None:
    """The target writes characters that its vocabulary lacks byte by byte."""
    languages = Languages("byte_level", "byte_level")
    text = "né 東京 🙂!"
    timeline = Timeline(languages.reader)
    for byte in text.encode():
        token = languages.target.id_by_bytes[bytes([byte])]
        timeline.extend([token])
        spelled = languages.spelled(timeline.tokens(0))
        assert timeline.is_complete
        assert text.encode().startswith(spelled)
        assert (timeline.open_text is None) == (spelled.decode(errors="ignore").encode() != spelled)
    assert timeline.tokens(0) == languages.reader.encoder.encode(text).ids


def test_special_tokens_are_translated_by_role() -> None:
    languages = Languages("sentencepiece", "byte_level")
    target, drafter = languages.target.roles, languages.drafter.roles
    timeline = Timeline(languages.reader)
    timeline.extend([target.bos, *languages.target_ids("one"), target.eos[0], *languages.target_ids("two")])
    encode = languages.reader.encoder.encode
    assert timeline.tokens(0) == [drafter.bos, *encode("one").ids, drafter.eos[0], *encode("two").ids]
    assert timeline.open_text == "two"


def test_special_token_names_in_text_are_text() -> None:
    languages = Languages("sentencepiece", "byte_level")
    timeline = Timeline(languages.reader)
    timeline.extend([languages.target.id_by_bytes[bytes([byte])] for byte in b"a<|end|>b"])
    assert not set(timeline.tokens(0)) & set(languages.drafter.special_names)


def test_bos_appears_once() -> None:
    """The drafter's tokenizer adds bos, and the target may have written one too."""
    from tokenizers.processors import TemplateProcessing

    languages = Languages("sentencepiece", "byte_level")
    bos = languages.drafter.roles.bos
    languages.tokenizers[1].backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", bos)]
    )
    reader = Reader(
        languages.target, languages.drafter, Encoder(languages.models[1], 1000), languages.map.target_to_draft
    )
    for start in ([], [languages.target.roles.bos]):
        timeline = Timeline(reader)
        timeline.extend([*start, *languages.target_ids("one")])
        assert timeline.tokens(0) == [bos, *reader.encoder.encode("one").ids]


def test_tokens_beyond_model_are_left_out() -> None:
    languages = Languages("sentencepiece", "byte_level")
    languages.tokenizers[1].add_tokens(["lovely"])
    size = len(languages.tokenizers[1]) - 1
    assert size in languages.tokenizers[1].encode("a lovely day")
    found = Encoder(languages.models[1], size).encode("a lovely day")
    assert max(found.ids) < size
    assert len(found.ids) == len(found.ends)


def test_backtracking_pattern_raises_exception() -> None:
    """A panic of the tokenizers library would end the engine."""
    languages = Languages("sentencepiece", "byte_level")
    split = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    languages.tokenizers[1].backend_tokenizer.pre_tokenizer = split
    encoder = Encoder(languages.models[1], len(languages.tokenizers[1]))
    with pytest.raises(RuntimeError, match="retry-limit"):
        encoder.encode("a" * 40 + "!")


# ---- what has been read --------------------------------------------------------------------------------


class Device:
    """Stores, by position, the token whose KV was written last."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.kv = timeline, [-1] * 5000

    def write(self, begin: int, tokens: list[int]) -> None:
        self.kv[begin : begin + len(tokens)] = tokens

    def read_all(self, rng: random.Random) -> None:
        timeline = self.timeline
        while timeline.num_read < len(timeline):
            begin, end = timeline.num_read, rng.randint(timeline.num_read + 1, len(timeline))
            self.write(begin, timeline.tokens(begin, end))
            timeline.read(end)

    def check(self) -> None:
        count = self.timeline.num_read
        assert self.kv[:count] == self.timeline.tokens(0, count)


@pytest.mark.parametrize("host_knows_drafts", [False, True])
def test_num_read_counts_only_read_tokens(languages: Languages, host_knows_drafts: bool) -> None:
    """Rounds have any number of drafts and accept any number of them."""
    rng = random.Random(5)
    kept = 0
    for text in random_texts(13, 15):
        device = Device(timeline := Timeline(languages.reader))
        ids, begin = languages.target_ids(text), 0
        while begin < len(ids):
            accepted = 0
            if begin and rng.random() < 0.8:
                device.read_all(rng)
                wanted = rng.randint(1, 5)
                right = ids[begin : begin + rng.randint(0, wanted)]
                accepted = next((i for i, t in enumerate(right) if languages.reader.get_partner(t) < 0), len(right))
                drafts = [languages.reader.get_partner(token) for token in right[:accepted]]
                drafts += [rng.randrange(300) for _ in range(wanted - accepted)]
                device.write(len(timeline), drafts[:-1])
                timeline.drafted(wanted, drafts if host_knows_drafts else ())
            new = ids[begin : begin + accepted + 1]
            begin += accepted + 1
            timeline.verified(new[:accepted])
            before = timeline.num_read
            timeline.extend(new)
            device.check()
            kept += timeline.num_read > before
    # Most WordPiece tokens have no partner.
    assert kept > (0 if languages.name == "word_piece" else 5), "accepted drafts are read again"


# ---- writing -------------------------------------------------------------------------------------------


def draft(languages: Languages, text: str) -> list[int]:
    return languages.reader.encoder.encode(text).ids


def spelled(languages: Languages, ids: list[int]) -> bytes:
    return b"".join(languages.target.bytes_by_id[token] or b"" for token in ids)


def test_drafts_are_rewritten_in_target_tokens(languages: Languages) -> None:
    """The result spells the start of the draft, and mostly all of it."""
    rewriter, rng, whole = languages.rewriter(), random.Random(3), 0
    texts = random_texts(17, 30)
    for text in texts:
        cut = rng.randrange(len(text) + 1)
        known, rest = text[:cut], text[cut:]
        drafts = draft(languages, rest)
        spellings = takewhile(
            lambda piece: piece is not None, (languages.drafter.bytes_by_id[token] for token in drafts)
        )
        meant = b"".join(spellings)  # type: ignore[arg-type]  # what a drafter has no tokens for is a special one
        found = spelled(languages, rewriter.rewrite(drafts, known))
        assert found == meant or not found
        whole += found == meant
    assert whole > len(texts) / 2


def test_incomplete_character_is_cut_from_draft() -> None:
    languages = Languages("byte_level", "byte_level")
    rewriter = languages.rewriter()
    drafts = [languages.drafter.id_by_bytes[bytes([byte])] for byte in "ok é".encode()]
    assert spelled(languages, rewriter.rewrite(drafts[:-1], "")) == b"ok "
    assert spelled(languages, rewriter.rewrite(drafts, "")) == "ok é".encode()
    assert rewriter.rewrite(drafts[-1:], "") == []


def test_end_token_ends_rewritten_draft() -> None:
    languages = Languages("sentencepiece", "byte_level")
    (end,), (target_end,) = languages.drafter.roles.eos, languages.target.roles.eos
    found = languages.rewriter().rewrite([*draft(languages, "yes"), end, *draft(languages, "no")], "")
    assert spelled(languages, found) == b"yes"
    assert found[-1] == target_end
