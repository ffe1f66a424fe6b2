"""Tiny checkpoints with MTP layers of the families that have them, under the names of their published ones.

A model of transformers is made with layers to spare; the last ones become the MTP layers.
"""

import json
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, PreTrainedModel

from tests.full_tests import tiny_models
from tests.models.architectures import ARCHITECTURES, Recipe, gemma4
from tests.models.checkpoints import SEED, build

Weights = dict[str, Tensor]
LANGUAGE = "model.language_model."
"""Prefix of the text part of a checkpoint that has others."""
LARGE, SMALL = 6.0, 0.1
"""How much of the token's embedding, and of the hidden state, goes into a layer."""


@dataclass(frozen=True)
class Family:
    """How the MTP layers of a family are stored."""

    recipe: str
    """Name of the target in architectures.yaml."""
    rename: Callable[[Weights, int, int], Weights]
    """Takes the weights of a model, the number of its layers and that of its MTP layers, the last."""
    config: tuple[tuple[str, Any], ...] = ()
    """Fields of config.json besides the number of layers."""
    count_field: str = "num_nextn_predict_layers"
    mlp: str = "sparse"
    """The kind of the MTP layers' MLP, where layers have several."""


def make_model(name: str, layers: int, share: float) -> PreTrainedModel:
    """Make the target's model with the MTP layers as its last ones, whose layers add `share` of what they would."""
    family = FAMILIES[name]
    model = build(extend(ARCHITECTURES[family.recipe], layers, family.mlp))
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if re.search(r"o_proj|out_proj|down_proj|\bw2\b", weight_name):
                weight.mul_(share)
    return model


def save(name: str, folder: Path, layers: int = 1, share: float = 0.3) -> str:
    """Write a checkpoint.

    Args:
        share: How much layers add to what they read, in the target and in MTP. With 0 the next token follows from the
            last one alone, and every draft is right.
    """
    family = FAMILIES[name]
    model = make_model(name, layers, share)
    save_model(model, folder)
    described = json.loads((folder / "config.json").read_text()) | ARCHITECTURES[family.recipe].published
    text = described.get("text_config", described)
    total = model.config.get_text_config().num_hidden_layers
    text["num_hidden_layers"] = total - layers
    for field in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if text.get(field) is not None:
            text[field] = text[field][: text["num_hidden_layers"]]
    text |= {family.count_field: layers} | dict(family.config)
    (folder / "config.json").write_text(json.dumps(described, indent=1))
    torch.manual_seed(SEED)
    saved = {key.replace(LANGUAGE, "model."): weight for key, weight in load_file(folder / "model.safetensors").items()}
    weights = family.rename(saved, total, layers)
    if text is not described:
        weights = {re.sub(r"^model\.(?!visual)", LANGUAGE, key): weight for key, weight in weights.items()}
    if not share:
        for weight_name, weight in weights.items():
            if re.search(r"eh_proj|\.fc\.|input_proj|mtp_linear_proj", weight_name):
                weight[weight.abs() < LARGE] = 0.0
            if re.search(
                r"enorm|hnorm|token_layernorm|hidden_layernorm|pre_fc_norm|mtp_(emb|hidden)_norm", weight_name
            ):
                weight.round_()
    save_file(
        {key: value.contiguous() for key, value in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return str(folder)


def save_model(model: PreTrainedModel, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tiny_models.byte_tokenizer().save_pretrained(folder)


def extend(recipe: Recipe, layers: int, last_mlp: str) -> Recipe:
    whole = deepcopy(recipe.config)
    config = whole.get("text_config", whole)
    if "layers_block_type" in config:  # Nemotron-H
        config["layers_block_type"] = [*config["layers_block_type"], *["attention"] * layers]
        return replace(recipe, config=whole)
    config["num_hidden_layers"] = config.get("num_hidden_layers", 2) + layers
    if "layer_types" in config:
        config["layer_types"] = [*config["layer_types"], *["full_attention"] * layers]
    if "mlp_layer_types" in config:
        config["mlp_layer_types"] = [*config["mlp_layer_types"], *[last_mlp] * layers]
    return replace(recipe, config=whole)


def project(size: int, *, token_first: bool = True) -> Tensor:
    """Return a projection of a token's embedding and a hidden state that keeps mostly the former."""
    parts = [LARGE * torch.eye(size), SMALL * torch.randn(size, size)]
    return torch.cat(parts if token_first else parts[::-1], dim=1)


def norm(size: int, start: float = 1.0) -> Tensor:
    return start + 0.1 * torch.randn(size)


def size_of(weights: Weights) -> int:
    return weights["model.embed_tokens.weight"].shape[1]


def in_place(
    weights: Weights, total: int, layers: int, *, final: str = "shared_head.norm", start: float = 1.0
) -> Weights:
    """DeepSeek's names: MTP layers come after the others, each with an output of its own."""
    size = size_of(weights)
    for index in range(total - layers, total):
        prefix = f"model.layers.{index}."
        for name in ("enorm", "hnorm"):
            weights[f"{prefix}{name}.weight"] = norm(size, start)
        weights[f"{prefix}{final}.weight"] = weights["model.norm.weight"].clone()
        weights[f"{prefix}eh_proj.weight"] = project(size)
        weights[f"{prefix}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{prefix}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    return weights


def apart(weights: Weights, total: int, layers: int, *, start: float = 0.0) -> Weights:
    """Qwen's names: `mtp.`, with what all layers share."""
    size = size_of(weights)
    for index in range(layers):
        weights = {
            name.replace(f"model.layers.{total - layers + index}.", f"mtp.layers.{index}."): weight
            for name, weight in weights.items()
        }
    for name in ("pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        weights[f"mtp.{name}.weight"] = norm(size, start)
    return weights | {"mtp.norm.weight": weights["model.norm.weight"].clone(), "mtp.fc.weight": project(size)}


def as_mimo(weights: Weights, total: int, layers: int) -> Weights:
    size, prefix = size_of(weights), "model.mtp_layers.0."
    weights = {name.replace(f"model.layers.{total - 1}.", prefix): weight for name, weight in weights.items()}
    return weights | {
        f"{prefix}token_layernorm.weight": norm(size),
        f"{prefix}hidden_layernorm.weight": norm(size),
        f"{prefix}final_layernorm.weight": weights["model.norm.weight"].clone(),
        f"{prefix}input_proj.weight": project(size, token_first=False),
    }


def as_ernie(weights: Weights, total: int, layers: int) -> Weights:
    """The MTP layer is a dense one."""
    size, last = size_of(weights), f"model.layers.{total - 1}."
    block = {name.replace(last, "model.mtp_block.0."): w for name, w in weights.items() if name.startswith(last)}
    dense = {name: weight for name, weight in block.items() if ".mlp." not in name}
    first = "model.layers.0.mlp."
    dense |= {
        name.replace(first, "model.mtp_block.0.mlp."): w.clone()
        for name, w in weights.items()
        if name.startswith(first)
    }
    kept = {name: weight for name, weight in weights.items() if not name.startswith(last)}
    return (
        kept
        | dense
        | {
            "model.mtp_emb_norm.0.weight": norm(size),
            "model.mtp_hidden_norm.0.weight": norm(size),
            "model.mtp_linear_proj.0.weight": project(size),
        }
    )


def as_nemotron(weights: Weights, total: int, layers: int) -> Weights:
    size, last = len(weights["backbone.norm_f.weight"]), f"backbone.layers.{total - 1}."
    weights = {name.replace(last, "mtp.layers.0."): weight for name, weight in weights.items()}
    return weights | {
        "mtp.layers.0.enorm.weight": norm(size),
        "mtp.layers.0.hnorm.weight": norm(size),
        "mtp.layers.0.eh_proj.weight": project(size),
        "mtp.layers.0.final_layernorm.weight": weights["backbone.norm_f.weight"].clone(),
    }


FAMILIES: dict[str, Family] = {
    "deepseek-v3": Family("deepseek-v3", in_place),
    "deepseek-v32": Family("deepseek-v32", in_place),
    "glm-moe-dsa": Family("glm-moe-dsa", in_place),
    "glm4-moe": Family("glm4-moe", in_place),
    "glm4-moe-lite": Family("glm4-moe-lite", in_place),
    "hy-v3": Family("hy-v3", partial(in_place, final="final_layernorm")),
    "qwen3-next": Family("qwen3-next", apart),
    "qwen3.5": Family("qwen3.5-text", apart, count_field="mtp_num_hidden_layers"),
    "qwen3.5-moe": Family("qwen3.5-moe-text", apart, count_field="mtp_num_hidden_layers"),
    "qwen3.5-mm": Family("qwen3.5-mm", apart, count_field="mtp_num_hidden_layers"),
    "exaone-moe": Family("exaone-moe", partial(apart, start=1.0), mlp="dense"),
    "mimo": Family("mimo", as_mimo, (("model_type", "qwen2"),)),
    "ernie4.5-moe": Family("ernie4.5-moe", as_ernie),
    "nemotron-h": Family("nemotron-h", as_nemotron, (("mtp_hybrid_override_pattern", "*"),)),
}
CHAINED = ("deepseek-v3", "glm4-moe", "glm4-moe-lite", "hy-v3", "exaone-moe")
"""Families whose class runs several layers."""


def needs_vision(name: str) -> bool:
    return ARCHITECTURES[FAMILIES[name].recipe].vision


# ---- Gemma 4 ---------------------------------------------------------------------------------------------


_GLOBAL_KV = ("attention_k_eq_v", "num_global_key_value_heads")
"""Options of full attention that a target and its assistant share."""


def save_gemma4(target: str, folder: Path, share: float = 0.3, *, ordered: bool = False) -> tuple[str, str]:
    """Write a Gemma 4 and its assistant, whose layers read the target's KV. Return both folders.

    Args:
        ordered: Whether the assistant scores only the tokens of some clusters.
    """
    recipe = ARCHITECTURES[target]
    model = build(recipe)
    config = model.config
    text = type(config)(
        **gemma4(
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=0,
            intermediate_size=64,
            **{name: value for name, value in recipe.config.items() if name in _GLOBAL_KV},
        )
    )
    clusters: dict[str, Any] = (
        dict(use_ordered_embeddings=True, num_centroids=20, centroid_intermediate_top_k=12) if ordered else {}
    )
    assistant = Gemma4AssistantForCausalLM(
        Gemma4AssistantConfig(text_config=text, backbone_hidden_size=config.hidden_size, **clusters)
    ).float()
    torch.manual_seed(SEED)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *assistant.named_parameters()]:
            if re.search(r"(o_proj|down_proj|per_layer_projection)(\.weight)?$", name):
                weight.mul_(share)
        embedding = model.get_input_embeddings().weight
        assistant.get_input_embeddings().weight.copy_(embedding)
        assistant.model.norm.weight.copy_(model.model.norm.weight)
        assistant.pre_projection.weight.copy_(project(config.hidden_size))
        if not share:
            assistant.pre_projection.weight[:, config.hidden_size :] = 0.0
        if ordered:
            assistant.masked_embedding.centroids.weight.normal_()
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(config.vocab_size))
    for name, made in (("target", model), ("assistant", assistant)):
        save_model(made, folder / name)
    return str(folder / "target"), str(folder / "assistant")
