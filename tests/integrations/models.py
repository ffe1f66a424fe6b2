"""A target and a drafter whose tokens have other ids, other texts and another number, and share some."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

# What they learn their tokens from.
TEXTS = {
    "target": "The quick brown fox jumps over the lazy dog, and the dog does not mind. 0123456789 bucket by bucket, "
    "seconds go by while requests wait for one another; who comes late finds nothing left to read or to write. ",
    "drafter": "A compile costs seconds; the decode step has one shape per bucket, whatever the fox says. Drafts are "
    "proposed by a small model, verified by a large one, and forgotten when they were wrong. Nothing else changes, "
    "neither what is written nor how probable it was: the lazy dog sleeps through all of it, every single night. ",
}
SIZES = {"target": 360, "drafter": 460}
# All tokens, then the one that ends a text. Other numbers of them give even single bytes other ids.
SPECIAL = {"target": (["<s>", "</s>"], "</s>"), "drafter": (["<pad>", "<mask>", "<s>", "<|end|>"], "<|end|>")}
PADDING = 8  # rows that a model has more than its tokenizer has tokens


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special, end = SPECIAL[name]
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES[name], special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator([TEXTS[name] * 4], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token=end)


def save(name: str, folder: Path, padding: int = PADDING) -> str:
    """The model of that name with its tokenizer."""
    set_seed(len(name))
    shape = LlamaConfig(
        vocab_size=len(tokenizer(name)) + padding,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.3,  # wide, so that no two logits are nearly the same
        tie_word_embeddings=False,
        bos_token_id=tokenizer(name).bos_token_id,
        eos_token_id=tokenizer(name).eos_token_id,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    tokenizer(name).save_pretrained(folder)
    return str(folder)


def save_twin(of: str, folder: Path) -> str:
    """The saved model again, with other ids for the same tokens: all that it drafts is accepted."""
    content = json.loads(AutoTokenizer.from_pretrained(of).backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    last = len(vocabulary) - 1
    content["model"]["vocab"] = {token: last - number for token, number in vocabulary.items()}
    for token in content["added_tokens"]:
        token["id"] = last - token["id"]
    bos, end = SPECIAL["target"][0]
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), bos_token=bos, eos_token=end
    )
    made.save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(of)
    with torch.no_grad():
        for rows in (model.model.embed_tokens.weight, model.lm_head.weight):
            rows[: last + 1] = rows[: last + 1].flip(0)
    model.config.bos_token_id, model.config.eos_token_id = made.bos_token_id, made.eos_token_id
    model.generation_config.bos_token_id, model.generation_config.eos_token_id = made.bos_token_id, made.eos_token_id
    model.save_pretrained(folder)
    return str(folder)
