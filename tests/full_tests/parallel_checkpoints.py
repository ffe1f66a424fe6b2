"""Parallel drafters as published, at a reduced size, with weights from a formula.

A P-EAGLE head has the configuration and the weight names that the library speculators 0.9.0 writes, as
`RedHatAI/Qwen3-8B-speculator.peagle` does. `peagle_logits.json` has the logits that the library's `PEagleDraftModel`
computes from these weights, which this file recorded at commit 6e63f5e8.

PARD is `amd/PARD-Llama-3.2-1B`: a tied model whose configuration names a `pard_token`.
"""

from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from tests.full_tests.block_drafters import write_checkpoint

EXPECTED = Path(__file__).with_name("peagle_logits.json")
FAMILIES = {"llama": LlamaConfig, "qwen3": Qwen3Config}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
NUM_DRAFTS, NUM_LAYERS, AUX_LAYERS, MASK = 4, 2, [1, 2, 3], 95
VOCAB, DRAFT_VOCAB, HIDDEN = 96, 16, 32
PROMPT = [5, 17, 80, 33, 61, 9, 44, 70, 12]
LENGTHS = [10, 13, 14, 21]
"""Numbers of tokens behind which logits are compared."""
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=1,
    dtype="float32",
)


def weight(name: str, *shape: int) -> torch.Tensor:
    """Numbers that depend on the name and on nothing else. Norms are close to 1."""
    mixed = (torch.arange(torch.Size(shape).numel()) + crc32(name.encode())) * 2654435761 & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 & 0xFFFFFFFF
    spread = ((mixed ^ (mixed >> 13)).double() / (1 << 31) - 1).view(shape)
    return (1 + 0.2 * spread if len(shape) == 1 else 0.5 * spread).float()


def fill(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weight(name, *parameter.shape))
    return model.float().eval()


def save_tokenizer(folder: Path | str, vocab_size: int = VOCAB, *, shift: int = 0) -> None:
    """Write a tokenizer of single bytes.

    Args:
        shift: How much higher the id of each byte is; the highest ids come first.
    """
    bytes_by_id = sorted(pre_tokenizers.ByteLevel.alphabet())[:vocab_size]
    ids = {byte: (number + shift) % vocab_size for number, byte in enumerate(bytes_by_id)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def make_target(folder: Path, family: str) -> str:
    fill(AutoModelForCausalLM.from_config(FAMILIES[family](**SHAPE))).save_pretrained(folder)
    return str(folder)


def make_peagle(folder: Path, family: str, target: str) -> str:
    """The two families have different norms around the projection of the target's states."""
    is_llama = family == "llama"
    config = {
        "architectures": ["PEagleDraftModel"],
        "draft_vocab_size": DRAFT_VOCAB,
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
        "embed_requires_grad": True,
        "fc_norm": False,
        "mask_token_id": MASK,
        "norm_before_fc": is_llama,
        "norm_before_residual": is_llama,
        "norm_output": False,
        "speculators_config": {
            "algorithm": "peagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": NUM_DRAFTS}],
            "verifier": {"architectures": [ARCHITECTURES[family]], "name_or_path": target},
        },
        "speculators_model_type": "peagle",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "transformer_layer_config": FAMILIES[family](**SHAPE | dict(num_hidden_layers=NUM_LAYERS)).to_dict(),
    }
    return write_checkpoint(folder, config, peagle_weights(family))


def peagle_weights(family: str) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "mask_hidden": (1, 1, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
    }
    if family == "llama":
        shapes["input_norm.weight"] = (3 * HIDDEN,)
    for layer in range(NUM_LAYERS):
        width = HIDDEN if layer else 2 * HIDDEN
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (32, width),
            "self_attn.k_proj": (16, width),
            "self_attn.v_proj": (16, width),
            "self_attn.o_proj": (HIDDEN, 32),
            "mlp.gate_proj": (64, HIDDEN),
            "mlp.up_proj": (64, HIDDEN),
            "mlp.down_proj": (HIDDEN, 64),
        }
        if not layer:
            parts["hidden_norm"] = (HIDDEN,)
        if family == "qwen3":
            parts |= {"self_attn.q_norm": (16,), "self_attn.k_norm": (16,)}
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    ids = 2 * torch.arange(DRAFT_VOCAB) + 1
    is_drafted = torch.zeros(VOCAB, dtype=torch.bool)
    is_drafted[ids] = True
    vocabulary = {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": is_drafted}
    return {name: weight(name, *shape) for name, shape in shapes.items()} | vocabulary


PARD_ROPE = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=32.0,
    high_freq_factor=4.0,
    low_freq_factor=1.0,
    original_max_position_embeddings=64,
)


def make_pard(folder: Path) -> str:
    shape = SHAPE | dict(tie_word_embeddings=True, num_hidden_layers=2)
    config = LlamaConfig(**shape, rope_parameters=PARD_ROPE, pard_token=MASK)
    fill(AutoModelForCausalLM.from_config(config)).save_pretrained(folder)
    return str(folder)
