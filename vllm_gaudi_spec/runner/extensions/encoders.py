"""Image, video, and audio encoders on devices that capture steps. Each item is padded to one of a few sizes.

The sizes depend on the class of the model (`FORMS`). If an item exceeds all sizes, its graph is captured while serving.

N: rows of an encoder's output, one per token in the prompt. P: patches.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.multimodal import MULTIMODAL_REGISTRY

from vllm_gaudi_spec.runner.buckets import geometric
from vllm_gaudi_spec.upstream.models import MultiModalBudget, group_and_batch_mm_kwargs

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalKwargsItem

IMAGE, VIDEO = "image", "video"
"""Names of modalities in vLLM."""
_PIXELS = {IMAGE: "pixel_values", VIDEO: "pixel_values_videos"}
_SMALLEST = 64
"""Number of tokens in a 224 x 224 image, the smallest for which vLLM captures encoder CUDA graphs."""


class Item(NamedTuple):
    """An image, a video or an audio clip."""

    modality: str
    data: MultiModalKwargsItem
    num_rows: int
    """Number of tokens in the prompt that the item replaces."""


class Encoding(NamedTuple):
    modality: str
    num_rows: int
    """Number of output rows (N): the rows of the item, followed by padding rows."""
    inputs: dict[str, torch.Tensor]
    """Tensors in host memory."""

    @property
    def signature(self) -> Hashable:
        return ("encoder", self.modality, *((name, tuple(value.shape)) for name, value in self.inputs.items()))


class WholeItems:
    """Encoders with a single input size, such as those that scale every image to the same square."""

    def __init__(self, model: Any, width: int) -> None:
        """Initialize the encoders. `width` is the size of a token embedding."""
        self._model = model
        self.width = width
        """Size of a row in the output."""
        self._sizes: dict[str, tuple[int, ...]] = {}
        """Maps each modality to the sizes that warm-up captures. Only encoders with padded inputs use this field."""

    def _fit(self, modality: str, size: int) -> int:
        """Return the smallest listed size that fits or, if none does, the largest one times a power of two."""
        fitting = next((listed for listed in self._sizes[modality] if listed >= size), self._sizes[modality][-1])
        while fitting < size:
            fitting *= 2
        return fitting

    def _list_rows(self, largest: Item) -> tuple[int, ...]:
        """Choose and return the token counts to capture, for encoders whose inputs are padded with patches."""
        self._sizes[largest.modality] = geometric(min(_SMALLEST, largest.num_rows), largest.num_rows, 2.0)
        return self._sizes[largest.modality]

    def list_encodings(self, largest: Item) -> Iterator[Encoding]:
        """Yield a sample input for each size that warm-up captures."""
        yield self.encoding(largest)

    def encoding(self, item: Item) -> Encoding:
        return Encoding(item.modality, item.num_rows, _take_inputs(item))

    def run(self, modality: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return encoded rows, [N, H]. This runs inside a graph, so it must not read tensor values on the host."""
        outputs = [output.flatten(0, -2) for output in self._model.embed_multimodal(**inputs)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class Tiles(WholeItems):
    """Encoders that split an image into tiles of equal size and encode each tile separately.

    Inputs are padded with tiles. A video frame is one tile, so images and videos share a list of sizes.
    """

    def list_encodings(self, largest: Item) -> Iterator[Encoding]:
        pixels = self._take_pixels(largest)
        sizes = geometric(1, len(pixels), 2.0)
        self._sizes[IMAGE] = max(self._sizes.get(IMAGE, ()), sizes, key=len)
        for num_tiles in sizes:
            yield self._pad(largest, pixels[: min(num_tiles, len(pixels))], num_tiles)

    def encoding(self, item: Item) -> Encoding:
        pixels = self._take_pixels(item)
        return self._pad(item, pixels, self._fit(IMAGE, len(pixels)))

    def _take_pixels(self, item: Item) -> torch.Tensor:
        return _take_inputs(item)[_PIXELS[item.modality]]

    def _pad(self, item: Item, pixels: torch.Tensor, num_tiles: int) -> Encoding:
        rows_of_tile = item.num_rows // len(self._take_pixels(item))
        return Encoding(IMAGE, rows_of_tile * num_tiles, {"pixel_values": _with_rows(pixels, num_tiles)})

    def run(self, modality: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().run(modality, inputs | self._as_one_image(len(inputs["pixel_values"])))

    def _as_one_image(self, num_tiles: int) -> dict[str, torch.Tensor]:
        """Return the remaining arguments of vLLM's `embed_multimodal` as tensors in host memory."""
        return {"image_num_patches": torch.tensor([num_tiles]), "image_token_id": torch.tensor(0)}


class Crops(Tiles):
    """The Gemma 3 encoder, whose inputs are the whole image and any crops that the processor makes ("pan and scan")."""

    def _as_one_image(self, num_tiles: int) -> dict[str, torch.Tensor]:
        return {"num_patches": torch.tensor([num_tiles])}


class Patches(WholeItems):
    """The Qwen-VL encoders, which represent an image of any size as patches, and a video as the patches of all frames.

    Inputs are padded with patches. vLLM's class computes the other inputs on the host from the patch grid.
    """

    def __init__(self, model: Any, width: int) -> None:
        visual = model.visual
        super().__init__(model, visual.out_hidden_size)
        self._merged: int = visual.spatial_merge_size**2
        self._on_host: Any = copy.copy(visual)
        self._on_host._modules = dict(visual._modules)
        for name in ("rotary_pos_emb", "patch_embed"):  # `patch_embed` determines the device
            self._on_host._modules[name] = _copy_on_host(getattr(visual, name))

    def list_encodings(self, largest: Item) -> Iterator[Encoding]:
        for num_rows in self._list_rows(largest):
            # Treat each token as one frame, because a single long image would exceed vLLM's position tables.
            grid = [num_rows, self._side, self._side]
            example = _take_inputs(largest)[_PIXELS[largest.modality]]
            pixels = example.new_zeros(num_rows * self._merged, *example.shape[1:])
            yield self._pad(largest.modality, pixels, grid, num_rows)

    @property
    def _side(self) -> int:
        """Return the number of patches along each side of the square that becomes one token."""
        return int(self._merged**0.5)

    def encoding(self, item: Item) -> Encoding:
        inputs, num_rows = _take_inputs(item), self._fit(item.modality, item.num_rows)
        grid = inputs[f"{item.modality}_grid_thw"].flatten().tolist()
        return self._pad(item.modality, inputs[_PIXELS[item.modality]], grid, num_rows)

    def _pad(self, modality: str, pixels: torch.Tensor, grid: list[int], num_rows: int) -> Encoding:
        num_patches = num_rows * self._merged
        found = self._on_host.prepare_encoder_metadata([grid], device=torch.device("cpu"))
        inputs = {"pixels": _with_rows(pixels, num_patches)}
        for name, value in sorted(found.items()):
            if name.startswith("cu_"):
                # Pad to the maximum number of sequences. Padding patches form a separate sequence.
                inputs[name] = _with_rows(value, num_rows + 1, fill=int(value[-1]))
            elif name in ("window_index", "reverse_indices"):
                inputs[name] = torch.cat((value, torch.arange(len(value), num_rows)))
            elif name in ("rotary_pos_emb_cos", "rotary_pos_emb_sin"):
                inputs[name] = _with_rows(value, num_patches)
        return Encoding(modality, num_rows, inputs)

    def run(self, modality: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        # Only other attention kernels need these lengths, and they need them on the host.
        unused = dict.fromkeys(("max_seqlen", "max_seqlen_full", "max_seqlen_window"))
        metadata = unused | {name: value for name, value in inputs.items() if name != "pixels"}
        found: torch.Tensor = self._model.visual(inputs["pixels"], None, encoder_metadata=metadata)
        return found


class PlacedPatches(Patches):
    """The Qwen3-VL encoder, which also adds position embeddings interpolated from a table.

    The host computes which table rows each patch needs, and the graph gathers these rows. Each output row also contains
    the values that are added to hidden states after each of the first layers of the model.
    """

    def __init__(self, model: Any, width: int) -> None:
        super().__init__(model, width)
        # vLLM's method would read the table on the host.
        self._on_host.fast_pos_embed_interpolate = lambda grids: None

    def _pad(self, modality: str, pixels: torch.Tensor, grid: list[int], num_rows: int) -> Encoding:
        encoding = super()._pad(modality, pixels, grid, num_rows)
        visual = self._on_host
        _, height, width = grid
        indices_P2 = visual.rot_pos_ids(height, width, visual.spatial_merge_size)
        corners = compute_corners(indices_P2, height, width, visual.num_grid_per_side)
        frames, num_patches = grid[0], len(encoding.inputs["pixels"])
        padded = (_with_rows(part.repeat(frames, 1), num_patches) for part in corners)
        return encoding._replace(inputs=encoding.inputs | dict(zip(("corners", "shares"), padded, strict=True)))

    def run(self, modality: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        table = self._model.visual.pos_embed.weight
        corners_P4, shares_P4 = inputs["corners"], inputs["shares"].to(table.dtype)
        found_P4H = table.index_select(0, corners_P4.flatten()).unflatten(0, corners_P4.shape)
        others = {name: value for name, value in inputs.items() if name not in ("corners", "shares")}
        return super().run(modality, others | {"pos_embeds": (found_P4H * shares_P4.unsqueeze(-1)).sum(1)})


def compute_corners(indices_P2: torch.Tensor, height: int, width: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the table rows around each patch, int64 [P, 4], and their interpolation weights, float32 [P, 4].

    The table has `side` x `side` positions. The outermost of the `height` x `width` patches are at its edges.
    """
    rows, columns = (
        torch.linspace(0, side - 1, size)[indices_P2[:, axis]] for axis, size in enumerate((height, width))
    )
    (top, low), (left, right) = ((at.long(), (at.long() + 1).clamp(max=side - 1)) for at in (rows, columns))
    down, across = rows - top, columns - left
    corners = (top * side + left, top * side + right, low * side + left, low * side + right)
    shares = ((1 - down) * (1 - across), (1 - down) * across, down * (1 - across), down * across)
    return torch.stack(corners, 1), torch.stack(shares, 1)


class SquaresOfPatches(WholeItems):
    """The Mistral 3 (Pixtral) encoder, which represents an image of any size as patches.

    Inputs are padded with patches. vLLM's classes use image sizes to extract patches, embed positions, and merge
    squares of patches. In this class, the host extracts patches and embeds positions, and it orders patches so that the
    patches of a square are adjacent.
    """

    def __init__(self, model: Any, width: int) -> None:
        # Import this function here, because it requires torchvision, which other models do not need.
        from vllm_gaudi_spec.upstream.models import position_ids_in_meshgrid

        super().__init__(model, width)
        self._indices_of = position_ids_in_meshgrid
        self._turns_at = _copy_on_host(model.vision_tower.patch_positional_embedding)
        self._side: int = model.config.spatial_merge_size

    def list_encodings(self, largest: Item) -> Iterator[Encoding]:
        inputs = self._make_patches(largest)
        for num_rows in self._list_rows(largest):
            part = {name: value[: num_rows * self._side**2] for name, value in inputs.items()}
            yield self._pad(largest.modality, part, num_rows)

    def encoding(self, item: Item) -> Encoding:
        return self._pad(item.modality, self._make_patches(item), self._fit(item.modality, item.num_rows))

    def _make_patches(self, item: Item) -> dict[str, torch.Tensor]:
        """Return the pixels, and the rotary embeddings for queries and keys, each [P, ...]."""
        (image,) = _take_inputs(item)[_PIXELS[item.modality]]
        tower, side = self._model.vision_tower, self._side
        size = tower.config.patch_size
        height, width = (length // size for length in image.shape[1:])
        index = torch.arange(height * width).view(height // side, side, width // side, side).transpose(1, 2).flatten()
        pixels = image.unflatten(2, (width, size)).unflatten(1, (height, size)).permute(1, 3, 0, 2, 4).flatten(0, 1)
        indices = self._indices_of([image.new_empty(height, width)], tower.config.image_size // size)
        cos, sin = self._turns_at(image.new_empty(0, dtype=tower.dtype), indices)
        return {name: value[index] for name, value in (("cos", cos), ("pixels", pixels.flatten(1)), ("sin", sin))}

    def _pad(self, modality: str, inputs: dict[str, torch.Tensor], num_rows: int) -> Encoding:
        num_patches = len(inputs["pixels"])
        padded = {name: _with_rows(value, num_rows * self._side**2) for name, value in inputs.items()}
        # The padding after the patches of the image forms a separate sequence.
        return Encoding(modality, num_rows, padded | {"ends": torch.tensor([0, num_patches], dtype=torch.int32)})

    def run(self, modality: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        tower, projector = self._model.vision_tower, self._model.multi_modal_projector
        weight = tower.patch_conv.weight
        pixels = tower.input_norm(inputs["pixels"], weight.dtype)
        states_1PH = tower.ln_pre(torch.nn.functional.linear(pixels, weight.flatten(1))[None])
        lengths = (None, None)  # only other attention kernels need these values
        turns = inputs["cos"], inputs["sin"]
        encoded_PH = tower.transformer(states_1PH, turns, inputs["ends"], *lengths, return_all_hidden_states=False)[0]
        # Order by channel and then by position within the square, like vLLM's `unfold`.
        squares = projector.norm(encoded_PH).unflatten(0, (-1, self._side**2)).transpose(1, 2).flatten(1)
        hidden, _ = projector.linear_1(projector.patch_merger.merging_layer(squares))
        found: torch.Tensor = projector.linear_2(projector.act(hidden))[0]
        return found


FORMS: dict[str, type[WholeItems]] = {
    "Gemma3ForConditionalGeneration": Crops,
    "InternVLForConditionalGeneration": Tiles,
    "LlavaForConditionalGeneration": WholeItems,
    "Mistral3ForConditionalGeneration": SquaresOfPatches,
    "Qwen2VLForConditionalGeneration": Patches,
    "Qwen2_5_VLForConditionalGeneration": Patches,
    "Qwen3VLForConditionalGeneration": PlacedPatches,
    "Qwen3VLMoeForConditionalGeneration": PlacedPatches,
}
"""Maps each supported architecture to the class for its encoders. Other architectures are rejected at start-up."""


def _take_inputs(item: Item) -> dict[str, torch.Tensor]:
    ((_, _, named),) = group_and_batch_mm_kwargs([(item.modality, item.data)])
    return {name: value for name, value in sorted(named.items()) if isinstance(value, torch.Tensor)}


def _with_rows(tensor: torch.Tensor, num_rows: int, fill: int = 0) -> torch.Tensor:
    return torch.cat((tensor, tensor.new_full((num_rows - len(tensor), *tensor.shape[1:]), fill)))


def _copy_on_host(module: nn.Module) -> nn.Module:
    """Return a copy of the module with its own tensors in host memory. Everything else is shared."""
    made = copy.copy(module)
    for kind in ("_parameters", "_buffers"):
        tensors: dict[str, Any] = getattr(module, kind)
        setattr(made, kind, {name: None if value is None else value.cpu() for name, value in tensors.items()})
    made._modules = {name: _copy_on_host(part) for name, part in module._modules.items() if part is not None}
    return made


class Encoders:
    """The encoders of a model and the sizes that warm-up captures."""

    def __init__(self, vllm_config: VllmConfig, model: nn.Module) -> None:
        config = vllm_config.model_config
        make = next(FORMS[name] for name in config.architectures if name in FORMS)
        form = make(model, config.get_inputs_embeds_size())
        budget = MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY, enable_cache=False)
        self.num_kept = budget.encoder_cache_size
        """Maximum number of multimodal tokens that vLLM's scheduler keeps in the encoder cache."""
        self.width = form.width
        self.dtype = config.dtype
        listed: dict[Hashable, Encoding] = {}
        for modality in budget.mm_max_toks_per_item:
            made = budget.processor.get_dummy_mm_inputs({modality: 1}, cache=None)
            (position,) = made["mm_placeholders"][modality]
            largest = Item(modality, made["mm_kwargs"][modality][0], position.get_num_embeds())
            listed |= {one.signature: one for one in form.list_encodings(largest)}
        self.listed = tuple(listed.values())
        self.encoding, self.run = form.encoding, form.run

    @property
    def num_pads(self) -> int:
        """Number of rows needed for padding and for warm-up."""
        return max(encoding.num_rows for encoding in self.listed)

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the buffer for cached outputs."""
        return (self.num_pads + self.num_kept) * self.width * self.dtype.itemsize
