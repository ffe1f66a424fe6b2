"""A tokenizer of the drafter's own: byte-level BPE, trained on the sampled text, and the samples in its tokens."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from training_prompts import TEXT_END, TURN_END, TURN_START

CHUNK = 4096


def make_tokenizer(target: Path, work: Path, folder: Path, vocab_size: int, num_texts: int) -> None:
    """Writes the tokenizer into `folder`, and samples.npz in its tokens as other.npz into `work`."""
    started = time.time()
    stored = np.load(work / "samples.npz")
    samples = {name: stored[name] for name in stored.files}
    bytes_of = token_bytes(Tokenizer.from_file(str(target / "tokenizer.json")))

    def text(start: int, end: int) -> str:
        return b"".join(bytes_of[i] for i in samples["tokens"][start:end].tolist()).decode("utf-8", "replace")

    tokenizer = train_tokenizer(samples, text, vocab_size, num_texts)
    save_tokenizer(tokenizer, folder, target)
    mine, theirs = token_bytes(tokenizer), set(bytes_of.values())
    common = sum(name in theirs for name in mine.values())
    print(f"{len(mine)} tokens, {common} of them also the target's, {time.time() - started:.0f} s", flush=True)
    tokens, lengths, prompt_lengths = encode_samples(tokenizer, samples, text)
    np.savez(
        work / "other.npz",
        tokens=tokens,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompt_lengths=np.maximum(1, np.array(prompt_lengths, np.int32)),
        held_out=samples["held_out"],
    )
    print(f"{samples['offsets'][-1]} tokens of the target are {len(tokens)} of these", flush=True)


def train_tokenizer(
    samples: dict[str, np.ndarray], text: Callable[[int, int], str], vocab_size: int, num_texts: int
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[TEXT_END, TURN_START, TURN_END],  # in the target's order, so with its ids
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    offsets, prompt_lengths = samples["offsets"], samples["prompt_lengths"]
    chosen = np.random.default_rng(0).permutation(np.flatnonzero(~samples["held_out"]))[:num_texts]
    # Most texts without their prompts, whose templates would else take up the vocabulary.
    starts = (offsets[i] + (prompt_lengths[i] if i % 8 else 0) for i in chosen)
    texts = (text(start, offsets[i + 1]) for start, i in zip(starts, chosen, strict=True))
    tokenizer.train_from_iterator((t.replace(TURN_START, "\n").replace(TURN_END, "\n") for t in texts), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, target: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    template = target / "chat_template.jinja"
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token=TURN_START,
        eos_token=TURN_END,
        unk_token=TEXT_END,
        pad_token=TURN_END,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        add_prefix_space=False,
        chat_template=template.read_text() if template.exists() else None,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def encode_samples(
    tokenizer: Tokenizer, samples: dict[str, np.ndarray], text: Callable[[int, int], str]
) -> tuple[np.ndarray, list[int], list[int]]:
    """All tokens in a row, the length of each sample, and of its prompt: the tokens that begin within it."""
    offsets, prompt_ends = samples["offsets"], samples["offsets"][:-1] + samples["prompt_lengths"]
    tokens, prompt_lengths = [], []
    for first in range(0, len(prompt_ends), CHUNK):
        members = range(first, min(first + CHUNK, len(prompt_ends)))
        encodings = tokenizer.encode_batch([text(offsets[i], offsets[i + 1]) for i in members])
        for i, encoding in zip(members, encodings, strict=True):
            starts = np.array([start for start, _ in encoding.offsets], np.int64)
            prompt_lengths.append(int(np.searchsorted(starts, len(text(offsets[i], prompt_ends[i])))))
            tokens.append(np.array(encoding.ids, np.uint16))
    return np.concatenate(tokens), [len(ids) for ids in tokens], prompt_lengths


# ---- what a token stands for -------------------------------------------------------------------------------


def token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The bytes of every token; special ones stand for their own names."""
    table, special = byte_alphabet(), set(tokenizer.get_added_tokens_decoder())

    def bytes_of(token: int, name: str) -> bytes:
        if token in special or any(char not in table for char in name):
            return name.encode()
        return bytes(table[char] for char in name)

    return {token: bytes_of(token, name) for name, token in tokenizer.get_vocab().items()}


def byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte, the other way round."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}
