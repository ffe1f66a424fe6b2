"""Tiny processors of transformers, as published checkpoints have them: from texts and items to what a model reads.

Each takes a tokenizer of bytes and gives it the special tokens that its model's configuration names, from
`media.FIRST_SPECIAL` on. transformers is imported when one is made, since it decides at its import whether there is
torchvision.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, ProcessorMixin

SAMPLING_RATE = 16_000


@dataclass(frozen=True)
class Processor:
    kind: str
    """The class without its ending."""
    words: tuple[str, ...]
    """Special tokens."""
    parts: dict[str, tuple[str, dict[str, Any]]]
    """By argument, the class of a part and its options."""
    options: dict[str, Any] = field(default_factory=dict)
    named: tuple[str, ...] = ()
    """Attributes of the tokenizer that name the first of the words."""
    line_breaks: bool = False

    def __call__(self, tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
        import transformers

        tokenizer.add_special_tokens({"additional_special_tokens": list(self.words)})
        if self.line_breaks:
            tokenizer.add_tokens(["\n" * count for count in range(1, 5)])
        if self.named:
            tokenizer = transformers.PreTrainedTokenizerFast(
                tokenizer_object=tokenizer.backend_tokenizer,
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                pad_token=tokenizer.eos_token,
                chat_template=tokenizer.chat_template,
                extra_special_tokens={
                    f"{name}_token": word for name, word in zip(self.named, self.words, strict=False)
                },
            )
        parts = {name: getattr(transformers, kind)(**options) for name, (kind, options) in self.parts.items()}
        return getattr(transformers, f"{self.kind}Processor")(tokenizer=tokenizer, **parts, **self.options)


def _images(kind: str, **options: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    return dict(image_processor=(f"{kind}ImageProcessor", options))


def _videos(kind: str, **options: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    return dict(video_processor=(f"{kind}VideoProcessor", options))


def _square(size: int) -> dict[str, int]:
    return dict(height=size, width=size)


def qwen(kind: str, patch_size: int) -> Processor:
    # vLLM brings colors into range in the model: alike for images and video, as published checkpoints have them.
    half = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3) if kind == "Qwen3VL" else {}
    area = (2 * patch_size) ** 2
    both: dict[str, Any] = dict(
        patch_size=patch_size, size=dict(shortest_edge=2 * area, longest_edge=16 * area), **half
    )
    words = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    video = "Qwen3VL" if kind == "Qwen3VL" else "Qwen2VL"
    return Processor(kind, words, _images("Qwen2VL", **both) | _videos(video, **both))


def pixtral(merged: int) -> Processor:
    """`merged`: the side of the squares of patches that are a token each."""
    image = _images("Pixtral", size=dict(longest_edge=84), patch_size=_square(14))
    return Processor(
        "Pixtral", ("[IMG]", "[IMG_BREAK]", "[IMG_END]"), image, dict(patch_size=14, spatial_merge_size=merged)
    )


_CLIP = dict(size=dict(shortest_edge=28), crop_size=_square(28))
_TILES = dict(image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]])
_LLAVA = dict(patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1)
llava = Processor("Llava", ("<image>",), _images("CLIP", **_CLIP), _LLAVA)
llava_next = Processor("LlavaNext", ("<image>",), _images("LlavaNext", **_CLIP, **_TILES), _LLAVA)
internvl = Processor(
    "InternVL",
    ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
    _images("GotOcr2", size=_square(28), crop_to_patches=False) | _videos("InternVL", size=_square(28)),
    dict(image_seq_length=1),
    named=("context_image", "start_image", "end_image", "video"),
)
# The words around an image end in line breaks, which vLLM joins to those of the text, by the tokens of Gemma's own.
gemma3 = Processor(
    "Gemma3",
    ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    _images("Gemma3", size=_square(42)),
    dict(image_seq_length=9),
    named=("image", "boi", "eoi"),
    line_breaks=True,
)
_GEMMA4 = dict(patch_size=4, max_soft_tokens=70)
gemma4 = Processor(
    "Gemma4",
    ("<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>", "<|video|>"),
    dict(feature_extractor=("Gemma4AudioFeatureExtractor", {}))
    | _images("Gemma4", **_GEMMA4)
    | _videos("Gemma4", **_GEMMA4),
    dict(image_seq_length=70),
    named=("image", "boi", "eoi", "audio", "boa", "eoa"),
)
cohere2 = Processor(
    "Cohere2Vision",
    ("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"),
    # `patch_size`: of a tile, its tokens in a row.
    _images("Cohere2Vision", size=_square(56), max_patches=2, patch_size=2),
    named=("image", "boi", "eoi", "img_line_break"),
)
qwen_audio = Processor(
    "Qwen2Audio",
    ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
    dict(feature_extractor=("WhisperFeatureExtractor", dict(feature_size=16, sampling_rate=SAMPLING_RATE))),
)
# With images in one part each: the words for the parts of a split one are long.
_WHOLE = dict(size=dict(longest_edge=56), max_image_size=dict(longest_edge=56), do_image_splitting=False)
idefics3 = Processor(
    "Idefics3",
    ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    _images("Idefics3", **_WHOLE),
    dict(image_seq_len=4),
)
llama4 = Processor(
    "Llama4",
    ("<|patch|>", "<|image_start|>", "<|image_end|>", "<|image|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    _images("Llama4", size=_square(28), max_patches=4),
    dict(patch_size=14, pixel_shuffle_ratio=0.5),
)
_GLM = dict(size=dict(shortest_edge=28 * 28, longest_edge=16 * 28 * 28))
glm4v = Processor(
    "Glm4v",
    (
        "<|image|>",
        "<|video|>",
        *(f"<|{where}_of_{what}|>" for what in ("image", "video") for where in ("begin", "end")),
    ),
    _images("Glm4v", **_GLM) | _videos("Glm4v", **_GLM),
)
