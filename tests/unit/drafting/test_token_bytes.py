"""The bytes of tokens, compared with what tiny tokenizers of each family decode."""

import base64
import io
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.drafting.universal.token_bytes import ModelTokenizer, Vocabulary, load_tokenizer, read_vocabulary

CORPUS = [
    "The quick brown fox jumps over the lazy dog.\nThe dog sleeps, the fox does not.\n\n",
    "def main():\n    for line in lines:\n        print(line)\n\treturn 0\n",
    "naïve café déjà vu — über straße; 中文 中文 中国 日本語 😀😀 ok",
    "the then there these other another brother mother   spaces     here",
] * 4
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
SIGNS = [*"ab", "the", " ", "  ", "     ", "\n", "\n\n", *"\téß—中文한😀🦊", "x1", ".", "'s", "\x07"]


def random_texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    words = [word for text in CORPUS for word in text.split(" ") if word]
    return ["".join(rng.choice(rng.choice((SIGNS, words))) for _ in range(rng.randint(1, 25))) for _ in range(count)]


def wrapped(tokenizer: Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def byte_level(vocab_size: int = 420, *, with_decoder: bool = True, **special: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(alphabet),
        special_tokens=list(dict.fromkeys(special.values())),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if with_decoder:
        tokenizer.decoder = decoders.ByteLevel()
    return wrapped(tokenizer, **special)


def sentencepiece_bpe(vocab_size: int = 420, *, prefix: bool = False, **special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer like Gemma's or, with `prefix`, like Llama 2's."""
    special = {"unk_token": "<unk>", **special}
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*dict.fromkeys(special.values()), *BYTE_PIECES],
        show_progress=False,
        limit_alphabet=60,
    )
    tokenizer.train_from_iterator([word for text in CORPUS for word in text.split(" ")], trainer)
    tokenizer = with_ordinary_bytes(tokenizer, special)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return wrapped(tokenizer, **special)


def with_ordinary_bytes(tokenizer: Tokenizer, special: dict[str, str]) -> Tokenizer:
    """Make byte pieces ordinary tokens, and add words that start with a space.

    The trainer marks required tokens as special, and finds no such words without a pre-tokenizer that splits them.
    """
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special.values()]
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    for left, right in (("▁", "▁"), ("▁▁", "▁▁"), ("▁", "the"), ("▁", "a"), ("\n", "\n"), ("▁", "中")):
        if left in vocab or left == "▁":
            for piece in (left, right, left + right):
                vocab.setdefault(piece, len(vocab))
            merges.append([left, right])
    return Tokenizer.from_str(json.dumps(content))


def unigram(**special: str) -> PreTrainedTokenizerFast:
    special = {"unk_token": "<unk>", **special}
    names = list(dict.fromkeys(special.values()))
    words = ["▁", "▁▁", "▁the", "the", "▁fox", "a", "b", "e", "t", "h", "é", "中", "▁中", "\n", ".", "▁dog", "s", "x"]
    pieces = [(piece, 0.0) for piece in names]
    pieces += [(piece, -20.0) for piece in BYTE_PIECES]
    pieces += [(piece, -3.0 - 0.1 * i) for i, piece in enumerate(words)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=names.index("<unk>"), byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    tokenizer.add_special_tokens(names)
    return wrapped(tokenizer, **special)


def word_piece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoders.WordPiece()
    return wrapped(tokenizer, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")


FAMILIES: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte_level": byte_level,
    "byte_level_without_decoder": lambda: byte_level(with_decoder=False),
    "sentencepiece_bpe": sentencepiece_bpe,
    "sentencepiece_bpe_with_prefix": lambda: sentencepiece_bpe(prefix=True),
    "unigram": unigram,
}


@cache
def family(name: str) -> tuple[Any, Vocabulary]:
    tokenizer = FAMILIES[name]()
    return tokenizer, read_vocabulary(ModelTokenizer(tokenizer))


def spelled(vocabulary: Vocabulary, ids: list[int]) -> bytes:
    return b"".join(vocabulary.bytes_by_id[i] or b"" for i in ids)


def id_of(tokenizer: Any, token: str) -> int:
    return tokenizer.get_vocab()[token]


@pytest.mark.parametrize("name", FAMILIES)
def test_token_bytes_spell_encoded_text(name: str) -> None:
    tokenizer, vocabulary = family(name)
    assert vocabulary.leading_space == (name in ("sentencepiece_bpe_with_prefix", "unigram"))
    for text in [*random_texts(1, 300), *CORPUS]:
        # Metaspace adds its space only if the text does not start with one.
        space = vocabulary.leading_space and not (name == "unigram" and text.startswith(" "))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert spelled(vocabulary, ids) == b" " * space + text.encode(), text


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "byte_level_without_decoder"])
def test_token_bytes_equal_decoder_output(name: str) -> None:
    """Decoded after another token, since some decoders remove a space at the start of a text."""
    tokenizer, vocabulary = family(name)
    front = tokenizer.encode("a", add_special_tokens=False)
    before = tokenizer.decode(front)
    checked = 0
    for token_id, piece in enumerate(vocabulary.bytes_by_id):
        if piece is not None and not any(byte > 127 for byte in piece):
            assert tokenizer.decode([*front, token_id]) == before + piece.decode(), token_id
            checked += 1
    assert checked > 100 or name == "unigram"


def test_word_piece_bytes_equal_decoder_output_within_text() -> None:
    tokenizer = word_piece()
    vocabulary = read_vocabulary(ModelTokenizer(tokenizer))
    assert vocabulary.bytes_by_id[id_of(tokenizer, "the")] == b" the"
    assert vocabulary.bytes_by_id[id_of(tokenizer, "##e")] == b"e"
    assert vocabulary.bytes_by_id[id_of(tokenizer, ",")] == b","
    front = tokenizer.encode("the", add_special_tokens=False)
    for token_id, piece in enumerate(vocabulary.bytes_by_id):
        if piece is not None:
            assert tokenizer.decode([*front, token_id]) == "the" + piece.decode()
    for text in CORPUS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert spelled(vocabulary, ids) == b" " + tokenizer.decode(ids).encode() or tokenizer.unk_token_id in ids


def test_added_tokens_stand_for_literal_text() -> None:
    """Even if each character is in the alphabet, as in the Vietnamese word."""
    tokenizer = byte_level()
    tokenizer.add_tokens(["<tool_call>", "\n  \n", "không", "Ċ!"])
    vocabulary = read_vocabulary(ModelTokenizer(tokenizer))
    for text in ("<tool_call>", "\n  \n", "không", "Ċ!"):
        token_id = id_of(tokenizer, text)
        assert tokenizer.encode(text) == [token_id]
        assert vocabulary.bytes_by_id[token_id] == text.encode()


@pytest.mark.parametrize("prefix", [False, True])
def test_emitted_duplicate_is_indexed(prefix: bool) -> None:
    tokenizer = sentencepiece_bpe(prefix=prefix)
    vocabulary = read_vocabulary(ModelTokenizer(tokenizer))
    duplicates = [token for token in tokenizer.get_vocab() if len(token) == 1 and token.isascii()]
    assert len(duplicates) > 20
    for token in duplicates:
        byte_piece, piece = id_of(tokenizer, f"<0x{ord(token):02X}>"), id_of(tokenizer, token)
        assert vocabulary.bytes_by_id[byte_piece] == vocabulary.bytes_by_id[piece] == token.encode()
        assert byte_piece < piece
        assert vocabulary.id_by_bytes[token.encode()] == piece


# ---- special tokens --------------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"


def chat_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = byte_level(bos_token="<|start|>", eos_token="<|eos|>", pad_token="<|eos|>", unk_token="<|unk|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|call|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_special_tokens_have_roles_and_names() -> None:
    tokenizer = chat_tokenizer()
    end, call, eos = (id_of(tokenizer, f"<|{name}|>") for name in ("end", "call", "eos"))
    vocabulary = read_vocabulary(ModelTokenizer(tokenizer, (eos, call, end)))
    roles = vocabulary.roles
    assert (roles.end_of_turn, roles.eos) == (end, (eos, call))
    assert roles.ends == (end, eos, call)
    assert (roles.bos, roles.pad, roles.unk) == (id_of(tokenizer, "<|start|>"), eos, id_of(tokenizer, "<|unk|>"))
    assert roles.get_roles(eos) == {"end", "pad"}
    assert set(vocabulary.special_names.values()) == {"<|start|>", "<|eos|>", "<|unk|>", "<|end|>", "<|call|>"}
    assert all(vocabulary.bytes_by_id[token_id] is None for token_id in vocabulary.special_names)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}\n{{ m.content }}<|end|>\n<|eos|>{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ m.content }}<|end|>",
    ],
)
def test_end_of_turn_is_first_end_token_after_message(template: Any) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    end, call = id_of(tokenizer, "<|end|>"), id_of(tokenizer, "<|call|>")
    roles = read_vocabulary(ModelTokenizer(tokenizer, (call, end))).roles
    assert (roles.end_of_turn, roles.eos) == (end, (tokenizer.eos_token_id, call))


# ---- tokenizers that are not fast ------------------------------------------------------------------------


def test_tiktoken_returns_its_bytes() -> None:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([byte]): byte for byte in range(256)} | {b" t": 256, b"he": 257, b" the": 258}
    encoding = tiktoken.Encoding("tiny", pat_str=r"[\s\S]+", mergeable_ranks=ranks, special_tokens={"<|end|>": 261})

    class Wrapper:
        """Wraps it as remote code does."""

        tokenizer = encoding
        all_special_ids: tuple[int, ...] = ()
        eos_token_id = 261

        def __len__(self) -> int:
            return 262

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return encoding.encode(text, disallowed_special=())

    vocabulary = read_vocabulary(ModelTokenizer(Wrapper()))
    assert vocabulary.bytes_by_id[256:] == (b" t", b"he", b" the", None, None, None)
    assert vocabulary.special_names == {261: "<|end|>"}
    assert vocabulary.roles.eos == (261,)
    for text in random_texts(2, 50):
        assert spelled(vocabulary, Wrapper().encode(text, False)) == text.encode()


def test_mistral_common_returns_its_bytes(tmp_path: Path) -> None:
    pytest.importorskip("mistral_common")
    pieces = [*(bytes([byte]) for byte in range(256)), b" t", b"\n\n"]
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"]
    names += ["[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"]
    names += ["[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"]
    config = dict(pattern=r"[\s\S]+?", num_vocab_tokens=len(pieces), default_vocab_size=len(pieces) + len(names))
    vocab = [
        dict(rank=i, token_bytes=base64.b64encode(piece).decode(), token_str=None) for i, piece in enumerate(pieces)
    ]
    content = dict(
        config=config | dict(default_num_special_tokens=len(names), version="v7"),
        vocab=vocab,
        special_tokens=[dict(rank=i, token_str=name, is_control=True) for i, name in enumerate(names)],
    )
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text('{"model_type": "mistral", "eos_token_id": 2}')
    model = load_tokenizer(str(tmp_path))
    assert not hasattr(model.tokenizer, "backend_tokenizer")
    vocabulary = read_vocabulary(model)
    assert vocabulary.bytes_by_id == (*[None] * len(names), *pieces)
    assert vocabulary.special_names == dict(enumerate(names))
    assert (vocabulary.roles.bos, vocabulary.roles.ends) == (1, (2,))


def test_slow_sentencepiece_tokenizer_is_read_like_fast_one(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=380,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    special = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer = SentencePieceBackend(vocab_file=str(tmp_path / "tokenizer.model"), **special)
    vocabulary = read_vocabulary(ModelTokenizer(tokenizer))
    assert vocabulary.leading_space
    assert vocabulary.bytes_by_id[tokenizer.convert_tokens_to_ids("<0x0A>")] == b"\n"
    assert vocabulary.roles.eos == (tokenizer.eos_token_id,)
    for text in random_texts(3, 100):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert spelled(vocabulary, ids) == b" " + text.encode(), text


def lengthening(component: str, *steps: Any) -> PreTrainedTokenizerFast:
    module = {"normalizer": normalizers, "decoder": decoders}[component]
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    setattr(tokenizer, component, module.Sequence(list(steps)))
    return wrapped(tokenizer)


REPLACE_BY_MANY = ("a", "a" * 1000)
INSERT = (Regex("(?=.)"), "a")
PREPEND = [normalizers.Prepend("b" * 1000), normalizers.Replace("b", "c" * 256)]


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (SimpleNamespace(name_or_path="some/model"), "slow tokenizer"),
        (wrapped(Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))), "no decoder"),
        (wrapped(Tokenizer(models.BPE())), "empty"),
        (lengthening("normalizer", *[normalizers.Replace(*REPLACE_BY_MANY)] * 3), "far longer"),
        (lengthening("decoder", *[decoders.Replace(*REPLACE_BY_MANY)] * 3), "far longer"),
        (lengthening("decoder", *[decoders.Replace(*INSERT)] * 20), "far longer"),
        (lengthening("normalizer", *PREPEND), "far longer"),
    ],
    ids=["slow", "no_decoder", "empty", "long_normalizer", "long_decoder", "insertions", "prepended"],
)
def test_unreadable_tokenizer_is_refused(tokenizer: Any, reason: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=reason) as caught:
        read_vocabulary(ModelTokenizer(tokenizer))
    assert "Use a model with a fast tokenizer" in str(caught.value)


# ---- loading and hashing ---------------------------------------------------------------------------------


def test_loading_reads_end_tokens_of_both_configurations(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    end, call = id_of(tokenizer, "<|end|>"), id_of(tokenizer, "<|call|>")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": call}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, call]}))
    model = load_tokenizer(str(tmp_path))
    assert model.end_ids == (end, call)
    assert read_vocabulary(model).roles.end_of_turn == end
