"""The architectures: NAME -> class of transformers, configuration, and what a published checkpoint has besides."""

from dataclasses import dataclass, field
from typing import Any

from tests.full_tests import tiny_models
from tests.full_tests.tiny_models import MAX_LEN

WINDOW = 16


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one tiny checkpoint is made, and run."""

    architecture: str
    """The class of transformers that makes it and, unless `published` names another, the class of vLLM's registry."""
    config: dict[str, Any]
    """Keyword arguments of its configuration class."""
    published: dict[str, Any] = field(default_factory=dict)
    """What the config.json of published checkpoints has and the configuration class does not write."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments of `LLM`."""
    embedding: float | None = None
    """Standard deviation of the embedding; it decides how much of the next token follows from the last one alone."""
    pooling: bool = False


def shape(**overrides: Any) -> dict[str, Any]:
    """The sizes that most configuration classes name alike. None as a value leaves one out."""
    found = tiny_models.common(**overrides)
    del found["initializer_range"]  # weights are drawn in checkpoints.py
    return {name: value for name, value in found.items() if value is not None}


ARCHITECTURES: dict[str, Recipe] = {
    "llama": Recipe(architecture="LlamaForCausalLM", config=shape()),
    "llama-tied": Recipe(architecture="LlamaForCausalLM", config=shape(tie_word_embeddings=True)),
    "qwen3": Recipe(architecture="Qwen3ForCausalLM", config=shape()),
    "qwen3-moe": Recipe(
        architecture="Qwen3MoeForCausalLM",
        config=shape(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True),
    ),
    "gemma3n": Recipe(
        architecture="Gemma3nForCausalLM",
        config=shape(
            num_hidden_layers=4,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=WINDOW,
            vocab_size_per_layer_input=400,
            hidden_size_per_layer_input=16,
            laurel_rank=8,
            altup_num_inputs=2,
            activation_sparsity_pattern=[0.0] * 4,
            intermediate_size=[256] * 4,
            tie_word_embeddings=True,
        ),
    ),
}
