"""Tiny processors of transformers, as published checkpoints have them: from texts and items to what a model reads.

Each takes a tokenizer of bytes and gives it the special tokens that its model's configuration names, from
`media.FIRST_SPECIAL` on. transformers is imported in them, since it decides at its import whether there is torchvision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, ProcessorMixin

SAMPLING_RATE = 16_000


def qwen(kind: str, patch_size: int) -> Callable[[PreTrainedTokenizerFast], ProcessorMixin]:
    def make(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
        import transformers

        tokenizer.add_special_tokens(
            {"additional_special_tokens": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]}
        )
        video = "Qwen3VL" if kind == "Qwen3VL" else "Qwen2VL"
        side = 2 * patch_size
        # vLLM brings colors into range in the model: alike for images and video, as published checkpoints have them.
        half = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3) if kind == "Qwen3VL" else {}
        pixels = dict(shortest_edge=2 * side * side, longest_edge=16 * side * side)
        of_both: dict[str, Any] = dict(patch_size=patch_size, size=pixels, **half)
        return getattr(transformers, f"{kind}Processor")(
            image_processor=transformers.Qwen2VLImageProcessor(**of_both),
            video_processor=getattr(transformers, f"{video}VideoProcessor")(**of_both),
            tokenizer=tokenizer,
        )

    return make


def llava(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
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


def llava_next(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    import transformers

    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return transformers.LlavaNextProcessor(
        image_processor=transformers.LlavaNextImageProcessor(
            size={"shortest_edge": 28},
            crop_size=dict(height=28, width=28),
            image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]],
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def pixtral(merged: int) -> Callable[[PreTrainedTokenizerFast], ProcessorMixin]:
    """`merged`: the side of the squares of patches that are a token each."""

    def make(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
        import transformers

        tokenizer.add_special_tokens({"additional_special_tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]})
        return transformers.PixtralProcessor(
            image_processor=transformers.PixtralImageProcessor(
                size={"longest_edge": 84}, patch_size={"height": 14, "width": 14}
            ),
            tokenizer=tokenizer,
            patch_size=14,
            spatial_merge_size=merged,
        )

    return make


def _with_names(tokenizer: PreTrainedTokenizerFast, named: dict[str, str]) -> PreTrainedTokenizerFast:
    """One whose attributes name special tokens, as processors ask for them."""
    import transformers

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.eos_token,
        chat_template=tokenizer.chat_template,
        extra_special_tokens={f"{name}_token": word for name, word in named.items()},
    )


def internvl(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
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


def gemma3(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
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


def gemma4(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    import transformers

    named = dict(image="<|image|>", boi="<|image>", eoi="<image|>", audio="<|audio|>", boa="<|audio>", eoa="<audio|>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*named.values(), "<|video|>"]})
    of_both: dict[str, Any] = dict(patch_size=4, max_soft_tokens=70)
    return transformers.Gemma4Processor(
        feature_extractor=transformers.Gemma4AudioFeatureExtractor(),
        image_processor=transformers.Gemma4ImageProcessor(**of_both),
        video_processor=transformers.Gemma4VideoProcessor(**of_both),
        tokenizer=_with_names(tokenizer, named),
        image_seq_length=70,
    )


def cohere2(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    import transformers

    named = dict(
        image="<|IMG_PATCH|>", boi="<|START_OF_IMG|>", eoi="<|END_OF_IMG|>", img_line_break="<|IMG_LINE_BREAK|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(named.values())})
    return transformers.Cohere2VisionProcessor(
        image_processor=transformers.Cohere2VisionImageProcessor(
            size={"height": 56, "width": 56},
            max_patches=2,
            patch_size=2,  # of a tile: its tokens in a row
        ),
        tokenizer=_with_names(tokenizer, named),
    )


def qwen_audio(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    import transformers

    tokenizer.add_special_tokens({"additional_special_tokens": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]})
    return transformers.Qwen2AudioProcessor(
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=16, sampling_rate=SAMPLING_RATE),
        tokenizer=tokenizer,
    )


def idefics3(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    """With images in one part each: the words for the parts of a split one are long."""
    import transformers

    words = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    return transformers.Idefics3Processor(
        image_processor=transformers.Idefics3ImageProcessor(
            size={"longest_edge": 56}, max_image_size={"longest_edge": 56}, do_image_splitting=False
        ),
        tokenizer=tokenizer,
        image_seq_len=4,
    )


def llama4(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    import transformers

    words = ["<|patch|>", "<|image_start|>", "<|image_end|>", "<|image|>", "<|tile_x_separator|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*words, "<|tile_y_separator|>"]})
    return transformers.Llama4Processor(
        image_processor=transformers.Llama4ImageProcessor(size={"height": 28, "width": 28}, max_patches=4),
        tokenizer=tokenizer,
        patch_size=14,
        pixel_shuffle_ratio=0.5,
    )


def glm4v(tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    import transformers

    words = ["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": [*words, "<|end_of_video|>"]})
    size = dict(shortest_edge=28 * 28, longest_edge=16 * 28 * 28)
    return transformers.Glm4vProcessor(
        image_processor=transformers.Glm4vImageProcessor(size=size),
        video_processor=transformers.Glm4vVideoProcessor(size=size),
        tokenizer=tokenizer,
    )
