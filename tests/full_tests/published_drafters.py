"""Drafters as they are published: the config.json of real checkpoints, at a reduced size, with random weights.

Sizes shrink, and layers are fewer. Flags, kinds of layers, constants, formats, and names of tensors are kept. `source`
says whose configuration it is, and where its fields were read if not in the checkpoint itself.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.full_tests import mtp_checkpoints, parallel_checkpoints, tiny_models
from tests.full_tests.block_drafters import make_weights, write_checkpoint
from tests.models.architectures import ARCHITECTURES
from tests.models.checkpoints import build

NUM_TARGET_LAYERS = 6
SMALL: dict[str, Any] = dict(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=32,
    vocab_size=tiny_models.VOCAB,
    sliding_window=24,
    swa_window_size=24,
    markov_rank=8,
    selector_rank=8,
    num_target_layers=NUM_TARGET_LAYERS,
    mask_token_id=7,
    dtype="float32",
)
"""Sizes, of those that a configuration has."""


@dataclass(frozen=True)
class Block:
    """A DFlash, DFlash2 or DSpark drafter."""

    source: str
    target: str
    """Name of the target in architectures.py."""
    config: dict[str, Any]
    owns_output: bool = False
    """Whether the checkpoint has copies of the target's embeddings and output matrix."""

    @property
    def is_apart(self) -> bool:
        """Whether it runs in a process of its own: the target's class in vLLM needs torchvision."""
        return ARCHITECTURES[self.target].vision

    @property
    def num_drafts(self) -> int:
        if speculators := self.config.get("speculators_config"):
            return int(speculators["proposal_methods"][0]["speculative_tokens"])
        fields = self.config | self.config.get("dflash_config", {})
        return int(fields["block_size"]) - (0 if "markov_rank" in fields else 1)

    def reduce(self) -> dict[str, Any]:
        """Return the fields of config.json at the reduced size."""
        found = _shrink(self.config)
        for name in ("dflash_config", "transformer_layer_config"):
            if name in found:
                found[name] = _shrink(found[name])
        return found

    def read(self) -> dict[str, Any]:
        """Return the fields of `reduce` under the names of the method's authors."""
        found = self.reduce()
        if "transformer_layer_config" not in found:
            return found
        found |= found.pop("transformer_layer_config")
        found["target_layer_ids"] = [layer - 1 for layer in found.pop("aux_hidden_state_layer_ids")]
        return found | (dict(is_causal=False) if found["sliding_window_non_causal"] else {})

    def save(self, folder: Path) -> tuple[str, dict[str, Any]]:
        """Write the target and the drafter. Return the target's folder and the speculative configuration."""
        target, config = _save_target(self.target, folder / "target"), self.reduce()
        fields, generator = self.read(), np.random.default_rng(0)
        weights = make_weights(fields, generator)
        if fields.get("enable_confidence_head"):
            width = fields["hidden_size"] + fields["markov_rank"] * fields["confidence_head_with_markov"]
            weights["confidence_head.proj.weight"] = torch.tensor(generator.standard_normal((1, width))).float()
            weights["confidence_head.proj.bias"] = torch.zeros(1)
        if self.owns_output:
            weights["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
            weights["lm_head.weight"] = target.get_output_embeddings().weight.detach().clone()
        if "d2t" in weights:
            weights["t2d"] = torch.zeros(fields["vocab_size"], dtype=torch.bool)
            weights["t2d"][weights["d2t"] + torch.arange(len(weights["d2t"]))] = True
        if "speculators_config" in config:
            config["speculators_config"]["verifier"]["name_or_path"] = str(folder / "target")
            options = {}  # the checkpoint names its method and k
        else:
            options = dict(
                method="dspark" if "markov_rank" in fields else "dflash", num_speculative_tokens=self.num_drafts
            )
        write_checkpoint(folder / "drafter", config, weights)
        return str(folder / "target"), dict(model=str(folder / "drafter")) | options


def _shrink(fields: dict[str, Any]) -> dict[str, Any]:
    found = fields | {name: size for name, size in SMALL.items() if name in fields}
    if "num_attention_heads" in fields:
        per_key = fields["num_attention_heads"] // fields["num_key_value_heads"]
        found["num_key_value_heads"] = max(1, SMALL["num_attention_heads"] // per_key)
    if "layer_types" in fields:
        found["layer_types"] = fields["layer_types"][-SMALL["num_hidden_layers"] :]
    for name, first in (("target_layer_ids", 0), ("aux_hidden_state_layer_ids", 1)):
        if name in fields:
            found[name] = list(range(first, first + len(fields[name])))
    if "draft_vocab_size" in fields:
        is_full = fields["draft_vocab_size"] == (fields | fields.get("transformer_layer_config", {}))["vocab_size"]
        found["draft_vocab_size"] = SMALL["vocab_size"] if is_full else 300
    return found


def _save_target(name: str, folder: Path) -> Any:
    recipe = ARCHITECTURES[name]
    config = recipe.config | dict(num_hidden_layers=NUM_TARGET_LAYERS)
    if "layer_types" in config:
        config["layer_types"] = (config["layer_types"] * NUM_TARGET_LAYERS)[:NUM_TARGET_LAYERS]
    model = build(replace(recipe, config=config))
    mtp_checkpoints.save_model(model, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | recipe.published))
    return model


# --- drafters in parallel ---


@dataclass(frozen=True)
class Parallel:
    """A P-EAGLE head or a PARD model. parallel_checkpoints.py writes them as published."""

    source: str
    family: str
    make: Callable[[Path, str, str], str]
    """Takes a folder, the family and the target's folder."""
    method: str
    num_drafts: int
    is_apart = False

    def save(self, folder: Path) -> tuple[str, dict[str, Any]]:
        target = parallel_checkpoints.make_target(folder / "target", self.family)
        drafter = self.make(folder / "drafter", self.family, target)
        for written in (target, drafter):  # vocabularies are compared
            parallel_checkpoints.save_tokenizer(written)
        named = dict(method=self.method, parallel_drafting=True, num_speculative_tokens=self.num_drafts)
        return target, dict(model=drafter) | named


# --- MTP layers ---

# Fields of which the reduced checkpoint has what the target's recipe in architectures.py has.
_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "layer_types"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "n_routed_experts", "num_experts"),
    *("num_experts_per_tok", "n_group", "topk_group", "first_k_dense_replace"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_value_head_dim"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}


@dataclass(frozen=True)
class MTP:
    """MTP layers in the target's checkpoint."""

    source: str
    family: str
    """Name in mtp_checkpoints.FAMILIES."""
    config: dict[str, Any]
    num_drafts: int

    @property
    def is_apart(self) -> bool:
        return mtp_checkpoints.needs_vision(self.family)

    def save(self, folder: Path) -> tuple[str, dict[str, Any]]:
        family = mtp_checkpoints.FAMILIES[self.family]
        recipe = ARCHITECTURES[family.recipe]
        sizes = {name: size for name, size in recipe.config.items() if name in _SIZES}
        config = {name: sizes.get(name, value) for name, value in self.config.items()}
        count = config.pop(family.count_field)
        read = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
        # `save` sets the fields that describe layers, since it turns the last layers into MTP layers.
        published = {name: value for name, value in config.items() if name not in ("num_hidden_layers", "layer_types")}
        mtp_checkpoints.save(
            self.family, folder, count, recipe=replace(recipe, config=sizes | read, published=published)
        )
        path = folder / "config.json"
        saved = json.loads(path.read_text())
        path.write_text(json.dumps({name: saved[name] for name in self.config} | dict(dtype="float32")))
        return str(folder), dict(method="mtp", num_speculative_tokens=self.num_drafts)


@dataclass(frozen=True)
class Assistant:
    """A Gemma 4 assistant, whose layers read the target's KV."""

    source: str
    target: str
    config: dict[str, Any]
    num_drafts: int
    is_apart = False

    def save(self, folder: Path) -> tuple[str, dict[str, Any]]:
        target, assistant = mtp_checkpoints.save_gemma4(self.target, folder)
        path = Path(assistant) / "config.json"
        saved = json.loads(path.read_text())
        text = saved["text_config"]
        sizes = {name: text[name] for name in (*_SIZES, "num_kv_shared_layers", "sliding_window") if name in text}
        sizes |= dict(global_head_dim=text["per_layer_config"]["1"]["head_dim"], dtype="float32")
        config = self.config | dict(backbone_hidden_size=saved["backbone_hidden_size"])
        config["text_config"] = self.config["text_config"] | sizes
        path.write_text(json.dumps(config))
        return target, dict(method="mtp", model=assistant, num_speculative_tokens=self.num_drafts)


# --- the table ---

_QWEN3_4B = dict(
    model_type="qwen3",
    hidden_act="silu",
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    vocab_size=151936,
)
_QWEN38_27B = dict(
    model_type="qwen3",
    hidden_act="silu",
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=248320,
    max_position_embeddings=262144,
    rms_norm_eps=1e-6,
    attention_bias=False,
    num_target_layers=64,
    sliding_window=2048,
    tie_word_embeddings=False,
    dtype="bfloat16",
)
_GREEDY = dict(accept_tolerance=0.0, proposal_type="greedy", verifier_accept_k=1)


def _speculators(method: str, num_drafts: int, architecture: str) -> dict[str, Any]:
    return dict(
        speculators_model_type=method,
        speculators_config=dict(
            algorithm=method,
            default_proposal_method="greedy",
            proposal_methods=[_GREEDY | dict(speculative_tokens=num_drafts)],
            verifier=dict(architectures=[architecture], name_or_path=""),
        ),
        dtype="bfloat16",
        target_hidden_size=None,
    )


PUBLISHED: dict[str, Block | Parallel | MTP | Assistant] = {
    "Qwen3-4B-DFlash-b16": Block(
        "z-lab/Qwen3-4B-DFlash-b16, config.json",
        "qwen3-tied",
        _QWEN3_4B
        | dict(
            architectures=["DFlashDraftModel"],
            block_size=16,
            dflash_config=dict(mask_token_id=151669, target_layer_ids=[1, 9, 17, 25, 33]),
            num_target_layers=36,
            rope_theta=1000000,
            tie_word_embeddings=True,
            dtype="bfloat16",
        ),
    ),
    "gpt-oss-20b-DFlash": Block(
        "z-lab/gpt-oss-20b-DFlash, as public code quotes its config.json; sources disagree on model_type",
        "gpt-oss",
        dict(
            architectures=["DFlashDraftModel"],
            model_type="gpt_oss",
            attention_bias=True,
            attention_dropout=0.0,
            block_size=8,
            bos_token_id=199998,
            dflash_config=dict(mask_token_id=200000, target_layer_ids=[1, 6, 11, 16, 21]),
            dtype="bfloat16",
            eos_token_id=200002,
            head_dim=64,
            hidden_act="silu",
            hidden_size=2880,
            initializer_range=0.02,
            intermediate_size=7680,
            layer_types=["full_attention"] * 8,
            max_position_embeddings=131072,
            num_attention_heads=64,
            num_hidden_layers=8,
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            rope_scaling=dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=4096),
            rope_theta=150000,
            vocab_size=201088,
        ),
    ),
    "Qwen3.6-27B-DFlash": Block(
        "z-lab/Qwen3.6-27B-DFlash, config.json",
        "qwen3.5-text",
        _QWEN38_27B
        | dict(
            architectures=["DFlashDraftModel"],
            block_size=16,
            dflash_config=dict(mask_token_id=248070, target_layer_ids=[1, 16, 31, 46, 61]),
            layer_types=["sliding_attention"] * 4 + ["full_attention"],
            rope_parameters=dict(rope_theta=10000000, rope_type="default"),
            use_sliding_window=True,
        ),
    ),
    "Qwen3.8-27B-DFlash2": Block(
        "z-lab/Qwen3.8-27B-DFlash2, config.json",
        "qwen3.5-text",
        _QWEN38_27B
        | dict(
            architectures=["DFlash2DraftModel"],
            dflash_config=dict(
                block_size=8,
                conv_group_size=16,
                conv_kernel_size=2,
                mask_token_id=248070,
                selector_rank=256,
                selector_top_k=16,
                target_layer_ids=[5, 19, 33, 47, 61],
            ),
            is_causal=False,
            layer_types=["sliding_attention"] * 5,
            max_window_layers=5,
            rope_parameters=dict(rope_theta=10000000, rope_type="default"),
            use_sliding_window=True,
        ),
    ),
    "GLM-5.3-Flash-DFlash2": Block(
        "incoai/GLM-5.3-Flash-DFlash2, config.json",
        "glm-moe-dsa",
        dict(
            architectures=["DFlash2DraftModel"],
            attention_bias=False,
            attention_dropout=0.0,
            bos_token_id=None,
            dflash_config=dict(
                block_size=8,
                conv_group_size=16,
                conv_kernel_size=2,
                mask_token_id=154856,
                selector_rank=256,
                selector_top_k=16,
                target_layer_ids=[5, 14, 24, 33, 42],
            ),
            dtype="bfloat16",
            eos_token_id=[154820, 154827, 154829],
            head_dim=128,
            hidden_act="silu",
            hidden_size=4096,
            initializer_range=0.02,
            intermediate_size=12288,
            is_causal=False,
            layer_types=["sliding_attention"] * 5,
            max_position_embeddings=1048576,
            max_window_layers=5,
            model_type="qwen3",
            num_attention_heads=32,
            num_hidden_layers=5,
            num_key_value_heads=8,
            num_target_layers=45,
            pad_token_id=154820,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope_theta=10000.0, rope_type="default"),
            sliding_window=2048,
            tie_word_embeddings=False,
            use_cache=False,
            use_sliding_window=True,
            vocab_size=154880,
        ),
    ),
    "Qwen3-4B-speculator.dflash2": Block(
        "mgoin/Qwen3-4B-speculator.dflash2: block size; other fields as the library speculators 0.9.0 writes them",
        "qwen3-tied",
        _speculators("dflash2", 7, "Qwen3ForCausalLM")
        | dict(
            architectures=["DFlash2DraftModel"],
            aux_hidden_state_layer_ids=[2, 10, 18, 26, 34],
            block_size=8,
            conv_group_size=16,
            conv_kernel_size=2,
            draft_vocab_size=151936,
            mask_token_id=151669,
            sample_from_anchor=False,
            selector_rank=256,
            selector_top_k=16,
            sliding_window_non_causal=True,
            transformer_layer_config=_QWEN3_4B
            | dict(
                attention_bias=False,
                layer_types=["sliding_attention"] * 5,
                rope_parameters=dict(rope_theta=1000000, rope_type="default"),
                sliding_window=2048,
                use_sliding_window=True,
            ),
        ),
    ),
    "dspark_qwen3_8b_block7": Block(
        "deepseek-ai/dspark_qwen3_8b_block7, config.json",
        "qwen3",
        _QWEN3_4B
        | dict(
            architectures=["Qwen3DSparkModel"],
            attention_bias=False,
            block_size=7,
            confidence_head_with_markov=True,
            enable_confidence_head=True,
            hidden_size=4096,
            intermediate_size=12288,
            layer_types=["full_attention"] * 5,
            markov_head_type="vanilla",
            markov_rank=256,
            mask_token_id=151669,
            num_anchors=512,
            num_target_layers=36,
            rope_scaling=None,
            rope_theta=1000000,
            sliding_window=None,
            target_layer_ids=[1, 9, 17, 25, 33],
            tie_word_embeddings=False,
            use_sliding_window=False,
        ),
        owns_output=True,
    ),
    "Qwen3.8-27B-DSpark": Block(
        "RadixArk/Qwen3.8-27B-DSpark, config.json; model_type as vLLM requires",
        "qwen3.5-text",
        {name: value for name, value in _QWEN38_27B.items() if name != "sliding_window"}
        | dict(
            architectures=["DSparkDraftModel"],
            block_size=7,
            markov_rank=256,
            mask_token_id=248070,
            rope_scaling=dict(
                beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=8192, rope_type="yarn"
            ),
            rope_theta=10000000,
            target_layer_ids=[5, 19, 33, 47, 61],
        ),
    ),
    "GLM-5.3-speculator.dspark": Block(
        "RedHatAI/GLM-5.3-speculator.dspark, config.json",
        "glm-moe-dsa",
        _speculators("dspark", 8, "GlmMoeDsaForCausalLM")
        | dict(
            architectures=["DSparkDraftModel"],
            aux_hidden_state_layer_ids=[2, 20, 39, 58, 75],
            block_size=8,
            confidence_head_with_markov=True,
            draft_vocab_size=154880,
            enable_confidence_head=True,
            markov_head_type="vanilla",
            markov_rank=256,
            mask_token_id=154856,
            sample_from_anchor=True,
            sliding_window_non_causal=False,
            tie_word_embeddings=False,
            transformer_layer_config=dict(
                attention_bias=False,
                attention_dropout=0.0,
                head_dim=64,
                hidden_act="silu",
                hidden_size=6144,
                intermediate_size=12288,
                layer_types=["sliding_attention"] * 3,
                max_position_embeddings=1048576,
                model_type="qwen3",
                num_attention_heads=64,
                num_hidden_layers=3,
                num_key_value_heads=64,
                rms_norm_eps=1e-5,
                rope_parameters=dict(rope_theta=8000000, rope_type="default"),
                sliding_window=2048,
                use_sliding_window=True,
                vocab_size=154880,
            ),
        ),
    ),
    "Qwen3.6-35B-A3B-speculator.dspark": Block(
        "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark: vocabulary, windows and anchor; other fields as for GLM-5.3",
        "qwen3.5-moe-text",
        _speculators("dspark", 8, "Qwen3_5MoeForConditionalGeneration")
        | dict(
            architectures=["DSparkDraftModel"],
            aux_hidden_state_layer_ids=[2, 11, 20, 29, 38],
            block_size=8,
            confidence_head_with_markov=True,
            draft_vocab_size=32000,
            enable_confidence_head=True,
            markov_head_type="vanilla",
            markov_rank=256,
            mask_token_id=248070,
            sample_from_anchor=True,
            sliding_window_non_causal=False,
            transformer_layer_config=dict(
                attention_bias=False,
                head_dim=128,
                hidden_act="silu",
                hidden_size=2048,
                intermediate_size=6144,
                layer_types=["sliding_attention"] * 5,
                max_position_embeddings=262144,
                model_type="qwen3",
                num_attention_heads=32,
                num_hidden_layers=5,
                num_key_value_heads=4,
                rms_norm_eps=1e-6,
                rope_parameters=dict(rope_theta=10000000, rope_type="default"),
                sliding_window=2048,
                use_sliding_window=True,
                vocab_size=248320,
            ),
        ),
    ),
    "Qwen3-8B-speculator.peagle": Parallel(
        "RedHatAI/Qwen3-8B-speculator.peagle, as the library speculators 0.9.0 writes it",
        "qwen3",
        parallel_checkpoints.make_peagle,
        "eagle3",
        num_drafts=7,
    ),
    "PARD-Llama-3.2-1B": Parallel(
        "amd/PARD-Llama-3.2-1B, config.json",
        "llama",
        lambda folder, family, _: parallel_checkpoints.make_pard(folder, family),
        "draft_model",
        num_drafts=8,
    ),
    "PARD-Qwen3-0.6B": Parallel(
        "amd/PARD-Qwen3-0.6B: the fields of Qwen/Qwen3-0.6B, and pard_token",
        "qwen3",
        lambda folder, family, _: parallel_checkpoints.make_pard(folder, family),
        "draft_model",
        num_drafts=12,
    ),
    "GLM-4.5": MTP(
        "zai-org/GLM-4.5, fields as transformers and vLLM read them; not compared with its config.json",
        "glm4-moe",
        dict(
            architectures=["Glm4MoeForCausalLM"],
            attention_bias=True,
            attention_dropout=0.0,
            bos_token_id=151329,
            eos_token_id=[151329, 151336, 151338],
            first_k_dense_replace=3,
            head_dim=128,
            hidden_act="silu",
            hidden_size=5120,
            initializer_range=0.02,
            intermediate_size=12288,
            max_position_embeddings=131072,
            model_type="glm4_moe",
            moe_intermediate_size=1536,
            n_group=1,
            n_routed_experts=160,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_attention_heads=96,
            num_experts_per_tok=8,
            num_hidden_layers=92,
            num_key_value_heads=8,
            num_nextn_predict_layers=1,
            partial_rotary_factor=0.5,
            rms_norm_eps=1e-5,
            rope_scaling=None,
            rope_theta=1000000,
            routed_scaling_factor=2.5,
            tie_word_embeddings=False,
            topk_group=1,
            use_cache=True,
            use_qk_norm=True,
            vocab_size=151552,
        ),
        num_drafts=3,
    ),
    "DeepSeek-V3": MTP(
        "deepseek-ai/DeepSeek-V3, fields as transformers and vLLM read them; not compared with its config.json",
        "deepseek-v3",
        dict(
            architectures=["DeepseekV3ForCausalLM"],
            attention_bias=False,
            attention_dropout=0.0,
            bos_token_id=0,
            eos_token_id=1,
            ep_size=1,
            first_k_dense_replace=3,
            hidden_act="silu",
            hidden_size=7168,
            initializer_range=0.02,
            intermediate_size=18432,
            kv_lora_rank=512,
            max_position_embeddings=163840,
            model_type="deepseek_v3",
            moe_intermediate_size=2048,
            moe_layer_freq=1,
            n_group=8,
            n_routed_experts=256,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_attention_heads=128,
            num_experts_per_tok=8,
            num_hidden_layers=61,
            num_key_value_heads=128,
            num_nextn_predict_layers=1,
            q_lora_rank=1536,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            rms_norm_eps=1e-6,
            rope_scaling=dict(
                beta_fast=32,
                beta_slow=1,
                factor=40,
                mscale=1.0,
                mscale_all_dim=1.0,
                original_max_position_embeddings=4096,
                type="yarn",
            ),
            rope_theta=10000,
            routed_scaling_factor=2.5,
            scoring_func="sigmoid",
            tie_word_embeddings=False,
            topk_group=4,
            topk_method="noaux_tc",
            use_cache=True,
            v_head_dim=128,
            vocab_size=129280,
        ),
        num_drafts=2,
    ),
    "Qwen3-Next-80B-A3B": MTP(
        "Qwen/Qwen3-Next-80B-A3B, fields as transformers and vLLM read them; not compared with its config.json",
        "qwen3-next",
        dict(
            architectures=["Qwen3NextForCausalLM"],
            attention_dropout=0.0,
            bos_token_id=151643,
            decoder_sparse_step=1,
            eos_token_id=151645,
            head_dim=256,
            hidden_act="silu",
            hidden_size=2048,
            initializer_range=0.02,
            intermediate_size=5120,
            layer_types=["linear_attention", "full_attention"],
            linear_conv_kernel_dim=4,
            linear_key_head_dim=128,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_value_head_dim=128,
            max_position_embeddings=262144,
            mlp_only_layers=[],
            model_type="qwen3_next",
            moe_intermediate_size=512,
            norm_topk_prob=True,
            num_attention_heads=16,
            num_experts=512,
            num_experts_per_tok=10,
            num_hidden_layers=48,
            num_key_value_heads=2,
            num_nextn_predict_layers=1,
            output_router_logits=False,
            partial_rotary_factor=0.25,
            rms_norm_eps=1e-6,
            rope_scaling=None,
            rope_theta=10000000,
            shared_expert_intermediate_size=512,
            tie_word_embeddings=False,
            vocab_size=151936,
        ),
        num_drafts=2,
    ),
    "Qwen3.8-27B": MTP(
        "Qwen/Qwen3.8-27B, text_config of config.json",
        "qwen3.5",
        dict(
            architectures=["Qwen3_5ForCausalLM"],
            attn_output_gate=True,
            head_dim=256,
            hidden_act="silu",
            hidden_size=5120,
            intermediate_size=17408,
            layer_types=["linear_attention", "full_attention"],
            linear_conv_kernel_dim=4,
            linear_key_head_dim=128,
            linear_num_key_heads=16,
            linear_num_value_heads=48,
            linear_value_head_dim=128,
            mamba_ssm_dtype="float32",
            max_position_embeddings=262144,
            model_type="qwen3_5_text",
            mtp_num_hidden_layers=1,
            mtp_use_dedicated_embeddings=False,
            num_attention_heads=24,
            num_hidden_layers=64,
            num_key_value_heads=4,
            output_gate_type="swish",
            partial_rotary_factor=0.25,
            rms_norm_eps=1e-6,
            rope_parameters=dict(
                mrope_interleaved=True,
                mrope_section=[2, 1, 1],  # [11, 11, 10] of a head of 256
                partial_rotary_factor=0.25,
                rope_theta=10000000,
                rope_type="default",
            ),
            tie_word_embeddings=False,
            vocab_size=248320,
        ),
        num_drafts=3,
    ),
    "MiMo-7B": MTP(
        "XiaomiMiMo/MiMo-7B-RL, config.json",
        "mimo",
        dict(
            architectures=["MiMoForCausalLM"],
            attention_bias=True,
            attention_dropout=0.0,
            bos_token_id=151643,
            eos_token_id=151645,
            head_dim=128,
            hidden_act="silu",
            hidden_size=4096,
            initializer_range=0.02,
            intermediate_size=11008,
            max_position_embeddings=32768,
            model_type="mimo",
            num_attention_heads=32,
            num_hidden_layers=36,
            num_key_value_heads=8,
            num_nextn_predict_layers=1,
            rms_norm_eps=1e-5,
            rope_theta=640000,
            tie_word_embeddings=False,
            vocab_size=151680,
        ),
        num_drafts=1,
    ),
    "gemma-4-12B-it-assistant": Assistant(
        "google/gemma-4-12B-it-assistant, config.json",
        "gemma4-k-eq-v",
        dict(
            architectures=["Gemma4UnifiedAssistantForCausalLM"],
            backbone_hidden_size=3840,
            centroid_intermediate_top_k=32,
            model_type="gemma4_unified_assistant",
            num_centroids=2048,
            text_config=dict(
                attention_bias=False,
                attention_k_eq_v=True,
                bos_token_id=2,
                dtype="bfloat16",
                enable_moe_block=False,
                eos_token_id=1,
                final_logit_softcapping=None,
                global_head_dim=512,
                head_dim=256,
                hidden_activation="gelu_pytorch_tanh",
                hidden_size=1024,
                hidden_size_per_layer_input=0,
                intermediate_size=8192,
                layer_types=["sliding_attention"] * 3 + ["full_attention"],
                max_position_embeddings=262144,
                model_type="gemma4_unified_text",
                num_attention_heads=16,
                num_global_key_value_heads=1,
                num_hidden_layers=4,
                num_key_value_heads=8,
                num_kv_shared_layers=4,
                pad_token_id=0,
                rms_norm_eps=1e-6,
                rope_parameters=dict(
                    full_attention=dict(partial_rotary_factor=0.25, rope_theta=1000000.0, rope_type="proportional"),
                    sliding_attention=dict(rope_theta=10000.0, rope_type="default"),
                ),
                sliding_window=1024,
                tie_word_embeddings=True,
                use_bidirectional_attention="vision",
                use_double_wide_mlp=False,
                vocab_size=262144,
                vocab_size_per_layer_input=0,
            ),
            tie_word_embeddings=True,
            use_ordered_embeddings=False,
        ),
        num_drafts=4,
    ),
}
