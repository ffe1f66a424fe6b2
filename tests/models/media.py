"""Checkpoints that are asked about images, video and sound: their processors, the prompts, and what transformers
answers.

python -m tests.models.media CASE FOLDER makes one. It is a process of its own, since transformers decides at its
import whether there is torchvision, which other checkpoints are made without.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, ProcessorMixin

Size = tuple[int, int]
WIDE, TALL, SMALL = (84, 56), (56, 84), (28, 28)
IMAGE, VIDEO, AUDIO = "image", "video", "audio"
"""As vLLM names them."""


def picture(size: Size) -> Image.Image:
    width, height = size
    return Image.fromarray(_noise((height, width, 3), seed=width * 1000 + height))


def _noise(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


class Picture(NamedTuple):
    size: Size
    modality: str = IMAGE

    def made(self) -> Image.Image:
        return picture(self.size)


class Clip(NamedTuple):
    size: Size
    frames: int
    fps: float
    modality: str = VIDEO

    def made(self) -> tuple[np.ndarray, dict[str, Any]]:
        """With what vLLM and transformers want to know of a video."""
        width, height = self.size
        frames_THWC = _noise((self.frames, height, width, 3), seed=width * self.frames)
        known = dict(fps=self.fps, duration=self.frames / self.fps, total_num_frames=self.frames)
        return frames_THWC, known | dict(frames_indices=list(range(self.frames)), video_backend="opencv")


class Sound(NamedTuple):
    samples: int
    modality: str = AUDIO

    def made(self) -> np.ndarray:
        return np.random.default_rng(self.samples).standard_normal(self.samples).astype(np.float32)


SAMPLING_RATE = 16_000
Item = Picture | Clip | Sound
Prompt = tuple[str, list[Item]]
MARK = "<an item>"
"""In a prompt; each model has its own words for it."""


def _prompts(one: Item, other: Item, third: Item) -> list[Prompt]:
    """Texts, and the items in them. One order and the other: an item at the place of another would show."""
    return [
        (f"what is {MARK} and then {MARK} the end", [one, other]),
        ("the quick brown fox jumps over", []),
        (f"{MARK} the other way {MARK} round, and {MARK} once more", [other, one, third]),
    ]


IMAGES = _prompts(Picture(WIDE), Picture(TALL), Picture(SMALL))
# Where the seconds of a clip take more positions than its width and height, what follows it has others in vLLM (after
# the last second, as transformers 4 had it) than in transformers 5 (after the width or height).
VIDEOS = _prompts(Clip(WIDE, 4, fps=4), Clip(TALL, 2, fps=4), Clip(SMALL, 2, fps=4))
# Of three frames the last stands for a fourth.
VIDEOS[2] = (VIDEOS[2][0], [Clip(TALL, 2, fps=4), Picture(SMALL), Clip(WIDE, 3, fps=8)])
SOUNDS = _prompts(Sound(5_000), Sound(8_000), Sound(3_000))


class Question(NamedTuple):
    """A model and what it is asked."""

    words: dict[str, str]
    """By modality: what stands for an item in a prompt."""
    processor: Callable[[PreTrainedTokenizerFast], ProcessorMixin]
    prompts: list[Prompt] = IMAGES

    def text(self, prompt: Prompt) -> str:
        text, items = prompt
        for item in items:
            text = text.replace(MARK, self.words[item.modality], 1)
        return text


def _by_modality(items: Sequence[Item]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        found[item.modality].append(item.made())
    return dict(found)


def requests(asked: Question) -> list[dict[str, Any]]:
    """As vLLM takes them."""
    return [
        {"prompt": asked.text(prompt)} | ({"multi_modal_data": _by_modality(prompt[1])} if prompt[1] else {})
        for prompt in asked.prompts
    ]


def for_processor(items: Sequence[Item]) -> dict[str, Any]:
    """As processors of transformers take them."""
    found = _by_modality(items)
    named: dict[str, Any] = {}
    if IMAGE in found:
        named["images"] = found[IMAGE]
    if VIDEO in found:
        named["videos"] = [frames for frames, _ in found[VIDEO]]
        named |= dict(video_metadata=[known for _, known in found[VIDEO]], do_sample_frames=False)
    if AUDIO in found:
        named |= dict(audio=found[AUDIO], sampling_rate=SAMPLING_RATE)
    return named


# ---- processors ------------------------------------------------------------------------------------------


def _qwen(kind: str, patch_size: int) -> Callable[[PreTrainedTokenizerFast], ProcessorMixin]:
    def make(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
        import transformers

        tokenizer.add_special_tokens(
            {"additional_special_tokens": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]}
        )
        video = "Qwen3VL" if kind == "Qwen3VL" else "Qwen2VL"
        side = 2 * patch_size
        # vLLM brings colours into range in the model: alike for images and video, as published checkpoints have them.
        half = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3) if kind == "Qwen3VL" else {}
        pixels = dict(shortest_edge=2 * side * side, longest_edge=16 * side * side)
        of_both: dict[str, Any] = dict(patch_size=patch_size, size=pixels, **half)
        return getattr(transformers, f"{kind}Processor")(
            image_processor=transformers.Qwen2VLImageProcessor(**of_both),
            video_processor=getattr(transformers, f"{video}VideoProcessor")(**of_both),
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


def _qwen_audio(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    import transformers

    tokenizer.add_special_tokens({"additional_special_tokens": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]})
    return transformers.Qwen2AudioProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=16, sampling_rate=SAMPLING_RATE),
        tokenizer=tokenizer,
    )


_QWEN = {
    IMAGE: "<|vision_start|><|image_pad|><|vision_end|>",
    VIDEO: "<|vision_start|><|video_pad|><|vision_end|>",
}
ASKED: dict[str, Question] = {
    "qwen2-vl-images": Question(_QWEN, _qwen("Qwen2VL", 14)),
    "qwen2.5-vl-images": Question(_QWEN, _qwen("Qwen2_5_VL", 14)),
    "qwen3-vl-images": Question(_QWEN, _qwen("Qwen3VL", 16)),
    "llava-images": Question({IMAGE: "<image>"}, _llava),
    "mistral3-images": Question({IMAGE: "[IMG]"}, _pixtral),
    "internvl-images": Question({IMAGE: "<IMG_CONTEXT>"}, _internvl),
    "gemma3-mm-images": Question({IMAGE: "<start_of_image>"}, _gemma3),
    "qwen2-vl-video": Question(_QWEN, _qwen("Qwen2VL", 14), VIDEOS),
    "qwen2.5-vl-video": Question(_QWEN, _qwen("Qwen2_5_VL", 14), VIDEOS),
    "qwen3-vl-video": Question(_QWEN, _qwen("Qwen3VL", 16), VIDEOS),
    "qwen2-audio-sound": Question({AUDIO: "<|audio_bos|><|AUDIO|><|audio_eos|>"}, _qwen_audio, SOUNDS),
}
"""By case: the name of a model of architectures.py, and what it is asked about."""
_TOWER = (r"^(model\.)?vision_tower\.", "vision_tower.vision_model.")
_TEXT = (r"^language_model\.model\.model\.", "language_model.model.")
PUBLISHED_NAMES = {"llava-images": _TOWER, "gemma3-mm-images": _TOWER, "qwen2-audio-sound": _TEXT}
"""Weights whose names transformers changes when it reads a published checkpoint, and does not change back when it
writes."""
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
    assert recipe.media is not None
    asked = ASKED[recipe.media]
    model = checkpoints.build(recipe)
    model.save_pretrained(folder)
    if recipe.media in PUBLISHED_NAMES:
        path = folder / "model.safetensors"
        ours, published = PUBLISHED_NAMES[recipe.media]
        weights = safetensors.torch.load_file(path)
        renamed = {re.sub(ours, published, name): tensor for name, tensor in weights.items()}
        safetensors.torch.save_file(renamed, path, {"format": "pt"})
    tokenizer = tiny_models.byte_tokenizer(FIRST_SPECIAL)
    assert len(tokenizer) == FIRST_SPECIAL
    processor = asked.processor(tokenizer)
    processor.save_pretrained(folder)
    answers = reference(model, processor, asked)
    (folder / checkpoints.REFERENCE).write_text(json.dumps(answers))
    checkpoints.write_drafter(answers, folder)


def reference(model: Any, processor: Any, asked: Question) -> dict[str, Any]:
    """As `checkpoints.reference` of prompts of text alone."""
    import torch

    from tests.models import checkpoints

    found = checkpoints.no_answers()
    for prompt in asked.prompts:
        inputs = processor(text=[asked.text(prompt)], **for_processor(prompt[1]), return_tensors="pt")
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
