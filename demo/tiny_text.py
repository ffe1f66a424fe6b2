"""The tiny family's text and tokens: what `draft-same-vocab` writes, in 1024 tokens of a byte-level BPE."""

import json
from dataclasses import dataclass
from pathlib import Path

import llama
import numpy as np
import torch
from llama import Llama
from other_tokenizer import token_bytes
from sampling import END_OF_TURN, LONGEST_PROMPT, choose_held_out, generate
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from training_prompts import TEXT_END, as_chat, build_prompts

VOCAB = 1024
END = 0  # <|endoftext|>
LONGEST_TINY_PROMPT = 160
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n\\n' }}{% endfor %}"
LEFT_TO_GENERATE = 0.99


@dataclass
class Text:
    prompt: str
    answer: str
    ended: bool
    """Whether the answer has an end, or was cut off."""
    held_out: bool
    is_chat: bool


def as_question(question: str) -> str:
    """How the tiny models are asked."""
    return f"{question}\n\n"


def questions_and_openings(num_chat: int, num_plain: int, seed: int) -> tuple[list[str], list[str]]:
    before, end_marker = as_chat("\0").split("\0")
    chat, plain = build_prompts(num_chat, num_plain, seed)
    return [text.removeprefix(before).removesuffix(end_marker) for text in chat], plain


def write_texts(
    source: Path,
    num_chat: int,
    num_plain: int,
    temperatures: list[float],
    batch: int,
    max_new: int,
    seed: int,
    device: str,
    dtype: torch.dtype,
) -> list[Text]:
    """One text for every prompt, each at one of the temperatures."""
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    bytes_of = token_bytes(tokenizer)
    chat, plain = questions_and_openings(num_chat, num_plain, seed)
    asked = [as_chat(question) for question in chat] + plain
    prompts = [encoding.ids[:LONGEST_PROMPT] for encoding in tokenizer.encode_batch(asked)]
    rng = np.random.default_rng(seed)
    held_out = choose_held_out(len(chat), len(asked), rng)
    warmth = rng.choice(temperatures, len(asked))
    rows = sampled(llama.load(source, device, dtype), prompts, warmth, batch, max_new, END_OF_TURN)
    texts = []
    for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        ended = bool(row[-1] == END_OF_TURN)
        tokens = row[len(prompt) : len(row) - ended].tolist()
        answer = b"".join(bytes_of[token] for token in tokens).decode("utf-8", "ignore")
        is_chat = i < len(chat)
        prompt_text = as_question(chat[i]) if is_chat else plain[i - len(chat)]
        texts.append(Text(prompt_text, answer, ended, bool(held_out[i]), is_chat))
    return texts


def sampled(
    model: Llama,
    prompts: list[list[int]],
    temperatures: np.ndarray,
    batch: int,
    max_new: int,
    end: int,
    past_end: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Every prompt with what the model makes of it; prompts of similar length together."""
    device = model.output.device
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    rows: dict[int, np.ndarray] = {}
    for first in range(0, len(order), batch):
        members = order[first : first + batch]
        warmth = torch.tensor(temperatures[members], device=device, dtype=torch.float32)
        on = torch.zeros(len(members), dtype=torch.bool) if past_end is None else torch.tensor(past_end[members])
        mine = [prompts[i] for i in members]
        made = generate(model, mine, warmth, on.to(device), max_new, LEFT_TO_GENERATE, end)
        rows |= zip(members, made, strict=True)
        print(f"sampled {len(rows)} of {len(prompts)}", flush=True)
    return [rows[i] for i in range(len(prompts))]


# ---- tokens ------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: list[Text], folder: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[TEXT_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.answer for text in texts if not text.held_out), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token=TEXT_END,
        eos_token=TEXT_END,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        add_prefix_space=False,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[Text], longest: int) -> tuple[list[list[int]], list[np.ndarray]]:
    """The prompts, and each with its answer, cut to `longest` tokens."""
    prompts = [e.ids[:LONGEST_TINY_PROMPT] for e in tokenizer.encode_batch([text.prompt for text in texts])]
    answers = [e.ids for e in tokenizer.encode_batch([text.answer for text in texts])]
    whole = []
    for text, prompt, answer in zip(texts, prompts, answers, strict=True):
        ids = prompt + answer + [END] * text.ended
        whole.append(np.array(ids[:longest], np.uint16))
    return prompts, whole


def pack(file: Path, samples: list[np.ndarray], prompts: list[list[int]], held_out: np.ndarray) -> None:
    """As `training.Samples` reads them."""
    offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens in samples])]).astype(np.int64)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    np.savez(file, tokens=np.concatenate(samples), offsets=offsets, prompt_lengths=lengths, held_out=held_out)
    print(f"{file.name}: {len(samples)} samples, {offsets[-1] / 1e6:.2f}M tokens", flush=True)
