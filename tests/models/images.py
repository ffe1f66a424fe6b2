"""Checkpoints that are asked about images: their processors, the prompts, and what transformers answers.

python -m tests.models.images CASE FOLDER makes one. It is a process of its own, since transformers decides at its
import whether there is torchvision, which other checkpoints are made without.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, ProcessorMixin

Size = tuple[int, int]
MARK = "<an image>"
"""In a prompt; each model has its own words for it."""
WIDE, TALL, SMALL = (84, 56), (56, 84), (28, 28)
PROMPTS: list[tuple[str, list[Size]]] = [
    (f"what is {MARK} and then {MARK} the end", [WIDE, TALL]),
    ("the quick brown fox jumps over", []),
    (f"{MARK} the other way {MARK} round, and {MARK} once more", [TALL, WIDE, SMALL]),
]
"""Texts, and the images in them. One order and the other: an image at the place of another would show."""


def picture(size: Size) -> Image.Image:
    width, height = size
    noise = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def requests(words: str) -> list[dict[str, Any]]:
    """As vLLM takes them."""
    return [
        {"prompt": text.replace(MARK, words)}
        | ({"multi_modal_data": {"image": [picture(size) for size in sizes]}} if sizes else {})
        for text, sizes in PROMPTS
    ]


# ---- processors ------------------------------------------------------------------------------------------


def _qwen(kind: str, patch_size: int) -> Callable[[PreTrainedTokenizerFast], ProcessorMixin]:
    def make(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
        import transformers

        tokenizer.add_special_tokens(
            {"additional_special_tokens": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]}
        )
        video = "Qwen3VL" if kind == "Qwen3VL" else "Qwen2VL"
        side = 2 * patch_size
        return getattr(transformers, f"{kind}Processor")(
            image_processor=transformers.Qwen2VLImageProcessor(
                patch_size=patch_size, min_pixels=2 * side * side, max_pixels=16 * side * side
            ),
            video_processor=getattr(transformers, f"{video}VideoProcessor")(patch_size=patch_size),
            tokenizer=tokenizer,
        )

    return make


def _llava(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    import transformers

    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 28}, crop_size=dict(height=28, width=28)
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _pixtral(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    import transformers

    tokenizer.add_special_tokens({"additional_special_tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]})
    return transformers.PixtralProcessor(
        image_processor=transformers.PixtralImageProcessor(
            size={"longest_edge": 84}, patch_size={"height": 14, "width": 14}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        spatial_merge_size=2,
    )


def _with_names(tokenizer: PreTrainedTokenizerFast, named: dict[str, str]) -> PreTrainedTokenizerFast:
    """One whose attributes name special tokens, as processors ask for them."""
    import transformers

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        chat_template=tokenizer.chat_template,
        extra_special_tokens={f"{name}_token": word for name, word in named.items()},
    )


def _internvl(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    import transformers

    tokenizer.add_special_tokens({"additional_special_tokens": ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"]})
    named = dict(start_image="<img>", end_image="</img>", context_image="<IMG_CONTEXT>", video="<video>")
    tokenizer = _with_names(tokenizer, named)
    return transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(size={"height": 28, "width": 28}, crop_to_patches=False),
        video_processor=transformers.InternVLVideoProcessor(size={"height": 28, "width": 28}),
        tokenizer=tokenizer,
        image_seq_length=1,
    )


def _gemma3(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    import transformers

    named = dict(image="<image_soft_token>", boi="<start_of_image>", eoi="<end_of_image>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(named.values())})
    # The words around an image end in line breaks, which vLLM joins to those of the text, by the tokens of Gemma's own.
    tokenizer.add_tokens(["\n" * count for count in range(1, 5)])
    tokenizer = _with_names(tokenizer, named)
    return transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessor(size={"height": 42, "width": 42}),
        tokenizer=tokenizer,
        image_seq_length=9,
    )


_QWEN_WORDS = "<|vision_start|><|image_pad|><|vision_end|>"
PROCESSORS: dict[str, tuple[str, Callable[[PreTrainedTokenizerFast], ProcessorMixin]]] = {
    "qwen2-vl": (_QWEN_WORDS, _qwen("Qwen2VL", 14)),
    "qwen2.5-vl": (_QWEN_WORDS, _qwen("Qwen2_5_VL", 14)),
    "qwen3-vl": (_QWEN_WORDS, _qwen("Qwen3VL", 16)),
    "llava": ("<image>", _llava),
    "mistral3": ("[IMG]", _pixtral),
    "internvl": ("<IMG_CONTEXT>", _internvl),
    "gemma3-mm": ("<start_of_image>", _gemma3),
}
"""By model: what stands for an image in a prompt, and its processor."""
_TOWER = (r"^(model\.)?vision_tower\.", "vision_tower.vision_model.")
PUBLISHED_NAMES = {"llava": _TOWER, "gemma3-mm": _TOWER}
"""Weights whose names transformers changes when it reads a published checkpoint, and keeps when it writes."""
FIRST_SPECIAL = 300
"""The first of the tokens that the recipes' configurations name."""


# ---- checkpoints -----------------------------------------------------------------------------------------


def make(case: str, folder: Path) -> None:
    """In a process that has torchvision."""
    import safetensors.torch

    from tests.full_tests import tiny_models
    from tests.models import checkpoints
    from tests.models.architectures import ARCHITECTURES

    recipe = ARCHITECTURES[case]
    assert recipe.images is not None
    words, processor_of = PROCESSORS[recipe.images]
    model = checkpoints.build(recipe)
    model.save_pretrained(folder)
    if recipe.images in PUBLISHED_NAMES:
        path = folder / "model.safetensors"
        ours, published = PUBLISHED_NAMES[recipe.images]
        weights = safetensors.torch.load_file(path)
        renamed = {re.sub(ours, published, name): tensor for name, tensor in weights.items()}
        safetensors.torch.save_file(renamed, path, {"format": "pt"})
    tokenizer = tiny_models.byte_tokenizer(FIRST_SPECIAL)
    assert len(tokenizer) == FIRST_SPECIAL
    processor = processor_of(tokenizer)
    processor.save_pretrained(folder)
    answers = reference(model, processor, words)
    (folder / checkpoints.REFERENCE).write_text(json.dumps(answers))
    checkpoints.write_drafter(answers, folder)


def reference(model: Any, processor: Any, words: str) -> dict[str, Any]:
    """As `checkpoints.reference` of prompts without images."""
    import torch

    from tests.models import checkpoints

    found = checkpoints.no_answers()
    for text, sizes in PROMPTS:
        images = [picture(size) for size in sizes] or None
        inputs = processor(text=[text.replace(MARK, words)], images=images, return_tensors="pt")
        with torch.no_grad():
            made = model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=checkpoints.NUM_TOKENS,
                min_new_tokens=checkpoints.NUM_TOKENS,
                output_logits=True,
                return_dict_in_generate=True,
            )
        checkpoints.add_answer(found, inputs["input_ids"][0].tolist(), [logits[0] for logits in made.logits])
    return found


def main() -> int:
    from tests.models import vision

    vision.make_importable()
    make(sys.argv[1], Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
