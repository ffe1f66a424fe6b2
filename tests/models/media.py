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

from tests.models import processors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, ProcessorMixin

Size = tuple[int, int]
WIDE, TALL, SMALL = (84, 56), (56, 84), (28, 28)
IMAGE, VIDEO, AUDIO = "image", "video", "audio"
"""As vLLM names them."""


def picture(size: Size, seed: int = 0) -> Image.Image:
    width, height = size
    return Image.fromarray(_noise((height, width, 3), seed=width * 1000 + height + seed))


def _noise(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


class Picture(NamedTuple):
    size: Size
    modality: str = IMAGE

    def made(self, seed: int) -> Image.Image:
        return picture(self.size, seed)


class Clip(NamedTuple):
    size: Size
    frames: int
    fps: float
    modality: str = VIDEO

    def made(self, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
        """With what vLLM and transformers want to know of a video."""
        width, height = self.size
        frames_THWC = _noise((self.frames, height, width, 3), seed=width * self.frames + seed)
        known = dict(fps=self.fps, duration=self.frames / self.fps, total_num_frames=self.frames)
        return frames_THWC, known | dict(frames_indices=list(range(self.frames)), video_backend="opencv")


class Sound(NamedTuple):
    samples: int
    modality: str = AUDIO

    def made(self, seed: int) -> np.ndarray:
        return np.random.default_rng(self.samples + seed).standard_normal(self.samples).astype(np.float32)


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
    words: dict[str, str]
    """By modality: what stands for an item in a prompt."""
    processor: Callable[[PreTrainedTokenizerFast], ProcessorMixin]
    prompts: list[Prompt] = IMAGES

    def text(self, prompt: Prompt) -> str:
        text, items = prompt
        for item in items:
            text = text.replace(MARK, self.words[item.modality], 1)
        return text


def _by_modality(items: Sequence[Item], seed: int = 0) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        found[item.modality].append(item.made(seed))
    return dict(found)


OTHER = 1_000_000
"""A seed of items of the same sizes that are not those which transformers was asked about."""


def requests(asked: Question, seed: int = 0) -> list[dict[str, Any]]:
    return [
        {"prompt": asked.text(prompt)} | ({"multi_modal_data": _by_modality(prompt[1], seed)} if prompt[1] else {})
        for prompt in asked.prompts
    ]


def for_processor(items: Sequence[Item]) -> dict[str, Any]:
    found = _by_modality(items)
    named: dict[str, Any] = {}
    if IMAGE in found:
        named["images"] = found[IMAGE]
    if VIDEO in found:
        named["videos"] = [frames for frames, _ in found[VIDEO]]
        named |= dict(video_metadata=[known for _, known in found[VIDEO]], do_sample_frames=False)
    if AUDIO in found:
        named |= dict(audio=found[AUDIO], sampling_rate=processors.SAMPLING_RATE)
    return named


# ---- what is asked ----------------------------------------------------------------------------------------

_QWEN_WORDS = {
    IMAGE: "<|vision_start|><|image_pad|><|vision_end|>",
    VIDEO: "<|vision_start|><|video_pad|><|vision_end|>",
}
ASKED: dict[str, Question] = {
    "qwen2-vl-images": Question(_QWEN_WORDS, processors.qwen("Qwen2VL", 14)),
    "qwen2.5-vl-images": Question(_QWEN_WORDS, processors.qwen("Qwen2_5_VL", 14)),
    "qwen3-vl-images": Question(_QWEN_WORDS, processors.qwen("Qwen3VL", 16)),
    "qwen3-vl-moe-images": Question(_QWEN_WORDS, processors.qwen("Qwen3VL", 16)),
    "llava-images": Question({IMAGE: "<image>"}, processors.llava),
    "llava-next-images": Question({IMAGE: "<image>"}, processors.llava_next),
    "pixtral-images": Question({IMAGE: "[IMG]"}, processors.pixtral(merged=1)),
    "cohere2-vision-images": Question({IMAGE: "<|IMG_PATCH|>"}, processors.cohere2),
    "qwen3.5-mm-images": Question(_QWEN_WORDS, processors.qwen("Qwen3VL", 16)),
    "qwen3.5-moe-mm-images": Question(_QWEN_WORDS, processors.qwen("Qwen3VL", 16)),
    "mistral3-images": Question({IMAGE: "[IMG]"}, processors.pixtral(merged=2)),
    "internvl-images": Question({IMAGE: "<IMG_CONTEXT>"}, processors.internvl),
    "gemma3-mm-images": Question({IMAGE: "<start_of_image>"}, processors.gemma3),
    "gemma4-mm-images": Question({IMAGE: "<|image|>"}, processors.gemma4),
    "gemma4-ple-images": Question({IMAGE: "<|image|>"}, processors.gemma4),
    "gemma4-both-ways-images": Question({IMAGE: "<|image|>"}, processors.gemma4),
    "idefics3-images": Question({IMAGE: "<image>"}, processors.idefics3),
    "llama4-mm-images": Question({IMAGE: "<|image|>"}, processors.llama4),
    "glm4v-images": Question({IMAGE: "<|begin_of_image|><|image|><|end_of_image|>"}, processors.glm4v),
    "qwen2-vl-video": Question(_QWEN_WORDS, processors.qwen("Qwen2VL", 14), VIDEOS),
    "qwen2.5-vl-video": Question(_QWEN_WORDS, processors.qwen("Qwen2_5_VL", 14), VIDEOS),
    "qwen3-vl-video": Question(_QWEN_WORDS, processors.qwen("Qwen3VL", 16), VIDEOS),
    "qwen2-audio-sound": Question({AUDIO: "<|audio_bos|><|AUDIO|><|audio_eos|>"}, processors.qwen_audio, SOUNDS),
}
"""By case: the name of a model of architectures.yaml, and what it is asked about."""
_TOWER = (r"^(model\.)?vision_tower\.", "vision_tower.vision_model.")
_TEXT = (r"^language_model\.model\.model\.", "language_model.model.")
PUBLISHED_NAMES = {
    "llava-images": _TOWER,
    "gemma3-mm-images": _TOWER,
    "llava-next-images": _TOWER,
    "cohere2-vision-images": _TOWER,
    "qwen2-audio-sound": _TEXT,
}
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
    if recipe.transposed is not None:
        checkpoints.transpose(recipe.transposed, folder)
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
    model.generation_config.eos_token_id = None  # else another token goes on where that of the end is the likeliest
    for prompt in asked.prompts:
        inputs = processor(text=[asked.text(prompt)], **for_processor(prompt[1]), return_tensors="pt")
        with torch.no_grad():
            made = model.generate(
                **{name: _in_float32(value) for name, value in inputs.items()},
                do_sample=False,
                max_new_tokens=checkpoints.NUM_TOKENS,
                output_logits=True,
                return_dict_in_generate=True,
            )
        checkpoints.add_answer(found, inputs["input_ids"][0].tolist(), [logits[0] for logits in made.logits])
    return found


def _in_float32(value: Any) -> Any:
    """Some processors round colors to bfloat16, which vLLM makes the model's dtype again."""
    return value.float() if hasattr(value, "is_floating_point") and value.is_floating_point() else value


def main() -> int:
    from tests.models import vision

    vision.make_importable()
    make(sys.argv[1], Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
