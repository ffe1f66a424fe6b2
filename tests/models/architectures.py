"""The architectures: NAME -> class of transformers, configuration, and what a published checkpoint has besides."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from tests.full_tests import tiny_models
from tests.models.media import ASKED
from vllm_gaudi_spec.recurrent.table import SERVED


@dataclass(frozen=True)
class Recipe:
    """How one tiny checkpoint is made, and run."""

    architecture: str
    """The class of transformers that makes it and, unless `published` names another, the class of vLLM's registry."""
    config: dict[str, Any]
    """Keyword arguments of its configuration class."""
    published: dict[str, Any] = field(default_factory=dict)
    """What the config.json of published checkpoints has and the configuration class does not write."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Patterns of names of weights as transformers writes them, and what published checkpoints have there. Those of one
    name are joined."""
    transposed: str | None = None
    """A pattern of names of weights that published checkpoints have with inputs before outputs."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Arguments of `LLM`."""
    embedding: float | None = None
    """Standard deviation of the embedding; it decides how much of the next token follows from the last one alone."""
    final_norm: float = 0.0
    """Added to the weight of the last norm: logits spread where a tied embedding is small."""
    suppressed: tuple[int, ...] = ()
    """Tokens that its generation_config.json forbids."""
    pooling: str | None = None
    """What a pooling model is asked for: `embed`, `classify`, `token_embed` or `token_classify`."""
    vision: bool = False
    """Whether its class cannot be imported without torchvision."""
    media: str | None = None
    """Of media.py: its processor, and the images, video or sound that it is asked about."""
    format: str | None = None
    """Of formats.py: what its weights are rounded to."""
    tolerance: float = 0.02
    """How far a token's log-probability may be off: rounding in the worst of the models, and some."""


def shape(**overrides: Any) -> dict[str, Any]:
    """The sizes that most configuration classes name alike. None as a value leaves one out."""
    found = tiny_models.common(**overrides)
    del found["initializer_range"]  # weights are drawn in checkpoints.py
    return {name: value for name, value in found.items() if value is not None}


ABSENT = "absent"
_READ: dict[str, dict[str, Any]] = yaml.safe_load(
    f"shape: &shape {json.dumps(shape())}\n{Path(__file__).with_suffix('.yaml').read_text()}"
)
PARTS: dict[str, dict[str, Any]] = {
    name: {key: None if value == ABSENT else value for key, value in part.items()}
    for name, part in _READ["parts"].items()
    if isinstance(part, dict)
}
"""Overrides for `shape` that several have."""


def gemma4(**overrides: Any) -> dict[str, Any]:
    return shape(**PARTS["gemma4"] | overrides)


def _copy(value: Any) -> Any:
    """Copy what aliases share, without the fields that are absent."""
    if isinstance(value, dict):
        return {name: _copy(field) for name, field in value.items() if field != ABSENT}
    return [_copy(one) for one in value] if isinstance(value, list) else value


def _recipes(section: str) -> dict[str, Recipe]:
    found = {}
    for name, row in _READ[section].items():
        options = _copy({key: value for key, value in row.items() if key not in ("class", "shape", "config")})
        if "renamed" in options:
            options["renamed"] = tuple(map(tuple, options["renamed"]))
        config = _copy(row.get("config") or _READ["shape"] | row.get("shape", {}))
        found[name] = Recipe(row["class"], config, **options)
    return found


TEXT = _recipes("text")

STATEFUL = _recipes("stateful")

# Chunked prompts, and fewer KV blocks than three requests take: one is preempted, and its states are computed again.
BUSY = dict(max_num_batched_tokens=32, block_size=32, num_gpu_blocks_override=8)
STATEFUL |= {f"{name}@busy": replace(STATEFUL[name], engine=BUSY) for name in ("qwen3.5-text", "qwen3.5-moe-text")}
# The prompts are asked twice. vLLM's default for models without attention is no prefix cache.
CACHED = dict(enable_prefix_caching=True, block_size=16)
STATEFUL |= {
    f"{name}@again": replace(recipe, engine=recipe.engine | CACHED)
    for name, recipe in (TEXT | STATEFUL).items()
    if recipe.architecture in SERVED and "@" not in name
}

TEXT_ONLY = dict(language_model_only=True)
MULTIMODAL = _recipes("multimodal")
# Classes that import nothing of torchvision.
_WITHOUT_VISION = ("smolvlm", "qwen2-audio")
MULTIMODAL = {name: replace(recipe, vision=name not in _WITHOUT_VISION) for name, recipe in MULTIMODAL.items()}
MULTIMODAL |= {name: replace(MULTIMODAL[name.rpartition("-")[0]], media=name) for name in ASKED}


def otherwise(suffix: str, *names: str, **engine: Any) -> dict[str, Recipe]:
    """Those cases, run in another way."""
    return {name + suffix: replace(MULTIMODAL[name], engine=MULTIMODAL[name].engine | engine) for name in names}


MULTIMODAL |= (
    # Borders of chunks lie within items, but for images of Gemma, of which a chunk has all or nothing. Qwen3-VL adds to
    # states of image tokens in its first layers too.
    otherwise(
        "@chunks",
        *("qwen2.5-vl-images", "qwen3-vl-images", "mistral3-images", "gemma3-mm-images"),
        "idefics3-images",
        *("qwen2-vl-video", "qwen2.5-vl-video", "qwen3-vl-video", "qwen2-audio-sound"),
        *("qwen3-vl-moe-images", "qwen3.5-mm-images", "pixtral-images", "llava-next-images"),
        *("cohere2-vision-images", "gemma4-ple-images"),
        max_num_batched_tokens=16,
    )
    # Room for one image and not for two.
    | otherwise("@chunks", "gemma4-both-ways-images", max_num_batched_tokens=96)
    # Less KV than the prompts and answers take, so that a request waits, and its items are encoded again.
    | otherwise(
        "@busy",
        *("qwen2.5-vl-images", "qwen3.5-mm-images", "qwen2.5-vl-video", "qwen2-audio-sound"),
        num_gpu_blocks_override=7,
        enable_prefix_caching=False,
    )
    # With a block for each of four kinds of layers.
    | otherwise(
        "@busy", "gemma3-mm-images", num_gpu_blocks_override=22, max_num_batched_tokens=32, enable_prefix_caching=False
    )
    # The prompts are asked twice, after the same with other items in them.
    | otherwise(
        "@again",
        *("qwen2.5-vl-images", "gemma3-mm-images", "qwen3-vl-video", "qwen2-audio-sound"),
        *("qwen3.5-mm-images", "pixtral-images"),
        num_gpu_blocks_override=100,
        block_size=16,
    )
    # Its layers and its drafter's are of three kinds, which share the blocks.
    | otherwise("@again", "gemma4-both-ways-images", num_gpu_blocks_override=200, block_size=16)
)
# The same with every other modality switched off, by either of vLLM's options: what is left is a text model.
MULTIMODAL |= {
    f"{name}@text": replace(recipe, engine=recipe.engine | TEXT_ONLY)
    for name, recipe in MULTIMODAL.items()
    if recipe.media is None
} | {
    f"{name}@limits": replace(MULTIMODAL[name], engine=dict(limit_mm_per_prompt=limits))
    for name, limits in {
        "qwen2.5-vl": dict(image=0, video=0),
        "gemma3-mm": dict(image=0),
        "mistral3": dict(image=0),
    }.items()
}
# The published checkpoint suppresses its placeholders. Here they are ids that no prompt has, since transformers embeds
# placeholders differently.
_PLACEHOLDERS = dict(zip(PARTS["gemma4_ids"], range(294, 301), strict=True))
MULTIMODAL["gemma4-mm@suppressed"] = replace(
    MULTIMODAL["gemma4-mm@text"],
    config=MULTIMODAL["gemma4-mm@text"].config | _PLACEHOLDERS,
    suppressed=(*range(3, 256, 2), *_PLACEHOLDERS.values()),
)

POOLING = _recipes("pooling")
ARCHITECTURES: dict[str, Recipe] = TEXT | STATEFUL | MULTIMODAL | POOLING
