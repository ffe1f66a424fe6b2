"""Tiny randomly initialized Llamas: seeded, a few hundred kilobytes, made in a second. Others: tests/models.

The weights are drawn wide (`initializer_range` 0.2 and more), so that logits spread over several units: nearly flat
logits would make every comparison of greedy tokens a comparison of rounding errors.
"""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

BOS, EOS = "<s>", "</s>"
MAX_LEN = 4096
VOCAB = 400  # what the corpus below gives merges for; no multiple of 64, so a padded vocabulary would show

# What the tokenizer learns its merges from; every byte is in the alphabet whatever stands here.
CORPUS = """The quick brown fox jumps over the lazy dog. A device compiles a graph for every new shape, and a compile
costs seconds. So the decode step has one shape per bucket, whatever was accepted. {"name": "Ada", "age": 36,
"tags": ["x"]}
def add(left: int, right: int) -> int:\n    return left + right\n0123456789 +-*/ () [] yes no maybe"""

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def byte_tokenizer(vocab_size: int = VOCAB, corpus: str = CORPUS) -> PreTrainedTokenizerFast:
    """Byte-level BPE over all 256 bytes: any text goes in, any ids come out as text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[BOS, EOS], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([corpus * 4], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, chat_template=CHAT_TEMPLATE
    )


def common(**overrides: Any) -> dict[str, Any]:
    shape = dict(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return shape | overrides


def llama(**overrides: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**common(**overrides)))


def looping_llama(**overrides: Any) -> PreTrainedModel:
    """The next token follows mostly from the last one: greedy text soon runs in circles, which drafters foresee. What
    stands further back still has a say, but a small one. Its choices are clear, so sampled text repeats as well."""
    model = llama(**overrides)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(30)
        model.lm_head.weight.mul_(3)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.2)
    return model


def save(
    build: Callable[[], PreTrainedModel], folder: Path, vocab_size: int = VOCAB, seed: int = 0, corpus: str = CORPUS
) -> str:
    """Write one checkpoint with its tokenizer in the Hugging Face layout."""
    torch.manual_seed(seed)
    model = build().float().eval()
    # Norm weights and biases start at one and zero, where forgetting them would not show.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    byte_tokenizer(vocab_size, corpus).save_pretrained(folder)
    return str(folder)


def save_untrained_head(folder: Path) -> str:
    """An EAGLE head for any of the families of plain size. It is never right."""
    save(partial(llama, num_hidden_layers=1), folder)
    size, weights = 2 * common()["hidden_size"], load_file(folder / "model.safetensors")
    own = {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    save_file(
        own | {"fc.weight": torch.randn(size // 2, size)}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    return str(folder)


def save_renumbered(model_path: str, folder: Path) -> str:
    """A tiny Llama with all its tokens renumbered: of another vocabulary, and always of one mind with it."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    new_ids = random.Random(0).sample(range(len(tokenizer)), len(tokenizer))
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    written["model"]["vocab"] = {token: new_ids[old] for token, old in written["model"]["vocab"].items()}
    for token in written["added_tokens"]:
        token["id"] = new_ids[token["id"]]
    names = dict(bos_token=BOS, eos_token=EOS, chat_template=tokenizer.chat_template)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(written)), **names).save_pretrained(folder)

    model = AutoModelForCausalLM.from_pretrained(model_path)
    for weight in (model.model.embed_tokens.weight.data, model.lm_head.weight.data):
        weight[new_ids] = weight[: len(new_ids)].clone()
    for role in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(model.config, role, new_ids[getattr(model.config, role)])
        setattr(model.generation_config, role, getattr(model.config, role))
    model.save_pretrained(folder)
    return str(folder)
