"""The shapes of the tiny family's models, and their folders: as vLLM loads them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from eagle import EagleHead, Head, eagle_config
from llama import Shape, llama_config, save_weights
from safetensors.torch import load_file
from tiny_heads import DRAFTED_TOKENS, LAYERS_READ, MEDUSA_HEADS, Eagle3Head, Medusa, MtpHead
from tiny_text import END, VOCAB
from torch import Tensor, nn

MTP_PREFIX = "model.mtp_layers.0."
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
TOKENS = dict(bos_token_id=END, eos_token_id=END)


def target_config() -> dict[str, Any]:
    return llama_config(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        **TOKENS,
    )


def config_of(kind: str) -> dict[str, Any]:
    target = target_config()
    if kind == "eagle":
        common = dict(max_position_embeddings=target["max_position_embeddings"], pad_token_id=None, **TOKENS)
        return eagle_config(Shape.of(target)) | common
    if kind == "eagle3":
        return target | dict(
            architectures=["LlamaForCausalLMEagle3"],
            num_hidden_layers=1,
            draft_vocab_size=DRAFTED_TOKENS,
            eagle_aux_hidden_state_layer_ids=list(LAYERS_READ),
            tie_word_embeddings=False,
        )
    if kind == "medusa":
        return dict(
            architectures=["MedusaModel"],
            model_type="medusa",
            hidden_size=target["hidden_size"],
            vocab_size=VOCAB,
            num_heads=MEDUSA_HEADS,
            num_hidden_layers=1,
            original_lm_head=True,
            medusa_fc_bias=False,
            dtype="bfloat16",
            torch_dtype="bfloat16",
        )
    # MiMo is Qwen2 with layers after it; `transformers` has no name for it.
    changes = dict(architectures=["MiMoForCausalLM"], model_type="qwen2", num_nextn_predict_layers=1)
    left_out = ("head_dim", "attention_bias", "mlp_bias")
    return {name: value for name, value in target.items() if name not in left_out} | changes


# ---- folders -----------------------------------------------------------------------------------------------------


def save_drafter(folder: Path, kind: str, head: nn.Module, target_folder: Path) -> None:
    weights = head.state_dict()
    if kind == "mtp":
        # One checkpoint of both, whose attention has biases.
        in_checkpoint = {mtp_name(name): value for name, value in weights.items()}
        weights = with_biases(load_file(target_folder / "model.safetensors") | in_checkpoint)
    save_weights(folder, config_of(kind), weights)
    if kind == "mtp":
        for name in TOKENIZER_FILES:
            shutil.copy(target_folder / name, folder / name)


def load_drafter(folder: Path, kind: str, device: str) -> Head | Medusa:
    shape = Shape.of(target_config())
    kinds = {"eagle": EagleHead, "eagle3": Eagle3Head, "mtp": MtpHead}
    head = Medusa(shape) if kind == "medusa" else kinds[kind](replace(shape, layers=1))
    stored = load_file(folder / "model.safetensors")
    name_of = mtp_name if kind == "mtp" else str
    head.load_state_dict({name: stored[name_of(name)] for name in head.state_dict()})
    return head.to(device=device, dtype=torch.float32).eval().requires_grad_(False)


def mtp_name(name: str) -> str:
    return MTP_PREFIX + name.removeprefix("block.")


def with_biases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    projections = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    biased = [name for name in weights if name.endswith(projections)]
    return weights | {f"{name.removesuffix('weight')}bias": torch.zeros(len(weights[name])) for name in biased}
