"""Images where steps are captured: each token of a prompt chunk gets the number of a row in the media store."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from tests.support import media
from tests.support.fakes import HostBackend, make_requests, new_request, step
from tests.support.media import CONFIG
from vllm_gaudi_spec.attention.encoders import MaskedEncoderAttention
from vllm_gaudi_spec.attention.metadata import NO_MEDIA, MultimodalInputs
from vllm_gaudi_spec.devices.hpu import compared
from vllm_gaudi_spec.graphs import StepRecorder
from vllm_gaudi_spec.model import LoadedModel
from vllm_gaudi_spec.records import DECODE, PREFILL, Batch, Shape
from vllm_gaudi_spec.runner.extensions import encoders
from vllm_gaudi_spec.runner.extensions.encoders import (
    FORMS,
    Encoding,
    Item,
    Patches,
    Tiles,
    WholeItems,
    compute_corners,
)
from vllm_gaudi_spec.runner.extensions.media_store import MediaStore
from vllm_gaudi_spec.runner.extensions.multimodal import Multimodal
from vllm_gaudi_spec.runner.planning import plan_batches
from vllm_gaudi_spec.runner.requests import Requests

batch = partial(media.batch, num_rows=2)

NUM_PADS, NUM_KEPT, WIDTH = 4, 8, 2
PROMPT = [7, 8, 0, 0, 0, 9]
"""Its third token begins an image of three tokens."""


class Padding:
    """The encoders of a model that pads each item to four rows. Rows hold the numbers of their tokens, starting at
    1."""

    num_pads, num_kept, width, dtype = NUM_PADS, NUM_KEPT, WIDTH, torch.float32
    listed = (Encoding("image", NUM_PADS, {"pixels": torch.zeros(NUM_PADS, 1)}),)

    def encoding(self, item: Item) -> Encoding:
        pixels = torch.zeros(NUM_PADS, 1)
        pixels[: item.num_rows, 0] = torch.arange(item.num_rows) + 1
        return Encoding(item.modality, NUM_PADS, {"pixels": pixels})

    def run(self, modality: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return inputs["pixels"].expand(-1, WIDTH)


class Model:
    supports_mrope = True
    _has_oov_mm_tokens = False

    def get_mrope_input_positions(self, tokens: list[int], features: list[Any]) -> tuple[torch.Tensor, int]:
        return torch.arange(len(tokens)).expand(3, -1), -2


@pytest.fixture
def requests() -> Requests:
    return make_requests()


@pytest.fixture
def store() -> MediaStore:
    return MediaStore(Padding(), HostBackend(), StepRecorder())


def image(name: str, offset: int, length: int, is_embed: list[bool] | None = None) -> MultiModalFeatureSpec:
    place = PlaceholderRange(offset, length, None if is_embed is None else torch.tensor(is_embed))
    data: Any = object()
    return MultiModalFeatureSpec(data=data, modality="image", identifier=name, mm_position=place)


def admit(
    requests: Requests, store: MediaStore, images: list[MultiModalFeatureSpec], prompt: list[int] = PROMPT
) -> Multimodal:
    multimodal = Multimodal(CONFIG, Model(), HostBackend(), 3, store)
    asked = replace(new_request("image", prompt, [4]), mm_features=images)
    scheduled = step({"text": 3, "image": len(prompt)}, new=[new_request("text", [5, 6, 7], [3]), asked])
    scheduled.scheduled_encoder_inputs["image"] = list(range(len(images)))
    requests.apply(scheduled)
    multimodal.apply(scheduled, requests)
    return multimodal


def merged(store: MediaStore, multimodal: Multimodal, asked: Batch) -> list[int]:
    """Return the number of the image token at each token of a rectangle, starting at 1, and 0 for text."""
    inputs = multimodal.add_to(asked).multimodal
    found = store.rows_SW.index_select(0, inputs.rows_T)[:, 0]
    return [int(value) for value in torch.where(inputs.rows_T == NO_MEDIA, 0, found)]


def test_chunk_reads_its_part_of_an_image(requests: Requests, store: MediaStore) -> None:
    multimodal = admit(requests, store, [image("one", 2, 3)])
    assert merged(store, multimodal, batch(requests, PREFILL, 4, {"text": 3, "image": 4}, 0)) == [0] * 6 + [1, 2]
    assert merged(store, multimodal, batch(requests, PREFILL, 4, {"text": 3, "image": 2}, 4)) == [0] * 4 + [3, 0, 0, 0]


def test_tokens_around_an_image_are_text(requests: Requests, store: MediaStore) -> None:
    multimodal = admit(requests, store, [image("one", 1, 4, [False, True, True, False])])
    assert merged(store, multimodal, batch(requests, PREFILL, 6, {"image": 6}, 0))[:6] == [0, 0, 1, 2, 0, 0]
    assert merged(store, multimodal, batch(requests, PREFILL, 6, {"image": 3}, 3))[:3] == [2, 0, 0]


def test_captured_inputs_have_one_form_per_phase(requests: Requests, store: MediaStore) -> None:
    """Otherwise steps would need graphs that warm-up does not list."""
    multimodal = admit(requests, store, [image("one", 2, 3)])
    forms = set()
    for counts in ({}, {"text": 1}, {"text": 1, "image": 1}):
        inputs = multimodal.add_to(batch(requests, PREFILL, 4, counts, 0)).multimodal
        forms.add(tuple(part.shape if isinstance(part, torch.Tensor) else part for part in inputs))
        assert multimodal.add_to(batch(requests, DECODE, 2, counts, 0)).multimodal is None
    assert len(forms) == 1


def test_rows_belong_to_one_image_until_it_is_freed(requests: Requests, store: MediaStore) -> None:
    multimodal = admit(requests, store, [image("one", 0, 3), image("two", 3, 3), image("one", 6, 3)], [0] * 9)
    assert merged(store, multimodal, batch(requests, PREFILL, 9, {"image": 9}, 0))[:9] == [1, 2, 3] * 3
    rows = multimodal.add_to(batch(requests, PREFILL, 9, {"image": 9}, 0)).multimodal.rows_T[:9].tolist()
    assert rows[:3] == rows[6:], "the same image once"
    assert len(set(rows)) == 6
    assert min(rows) >= NUM_PADS, "what padding writes is not read"
    item = Item("image", None, 3)
    with pytest.raises(AssertionError, match="than it has room for"):
        store.encode("three", item)
    store.free("one")
    store.encode("three", item)
    store.reset()
    assert sorted(store._free_np.tolist()) == list(range(NUM_PADS, NUM_PADS + NUM_KEPT))


def test_last_prompt_token_is_a_chunk_if_it_belongs_to_an_image(requests: Requests, store: MediaStore) -> None:
    shapes: Any = SimpleNamespace(
        split_chunks=lambda counts: [len(counts)],
        prefill=lambda num_rows, longest, end, start: Shape(PREFILL, num_rows, longest, 16),
        decode=lambda queries, ends, last_block: Shape(DECODE, len(ends), queries, 16),
        decode_queries=(1, 3),
        slice_tokens=0,
        longest_chunk=64,
    )
    for images, phase in (([image("one", 3, 3)], PREFILL), ([image("one", 2, 3)], DECODE)):
        requests = make_requests()
        admit(requests, store, images)
        requests.by_id["image"].num_computed = len(PROMPT) - 1
        (planned,) = plan_batches(step({"image": 3}), requests, shapes, {})
        assert planned.shape.phase == phase
        assert planned.counts == [1]


def test_warm_up_runs_listed_sizes_and_late_sizes_are_counted() -> None:
    recorder = StepRecorder()
    store = MediaStore(Padding(), HostBackend(), recorder)
    (job,) = store.jobs()
    recorder.expect(job.signatures)
    job.run()
    store.encode("one", Item("image", None, 2))
    assert not recorder.unexpected
    store._run(Encoding("image", 8, {"pixels": torch.zeros(8, 1)}))
    assert len(recorder.unexpected) == 1


def test_captured_spans_have_the_shape_of_the_rectangle(requests: Requests, store: MediaStore) -> None:
    """`lasts_BQ` holds the last position that each token sees besides those before it."""
    multimodal = admit(requests, store, [image("one", 2, 3)])
    multimodal._sees_both_ways = True
    expected = {(3, 6): [[0] * 6, [0, 0, 4, 4, 4, 0]], (3, 0): [[0] * 6] * 2}
    for (text, with_image), lasts in expected.items():
        counts = {"text": text} | ({"image": with_image} if with_image else {})
        inputs = multimodal.add_to(batch(requests, PREFILL, 6, counts, 0)).multimodal
        assert inputs.spans.rows is None
        assert inputs.spans.lasts_BQ.tolist() == lasts


def test_first_layers_add_to_image_tokens_only() -> None:
    """A row of the store has an embedding and what two layers add. Rows read for text hold leftovers."""
    target = LoadedModel.__new__(LoadedModel)
    target.media_SW = torch.tensor([[9.0, 9.0, 9.0], [1.0, 2.0, 3.0]]).repeat_interleave(WIDTH, dim=1)
    calls: list[dict[str, Any]] = []

    class Language:
        def model(self, tokens: None, positions: torch.Tensor, **named: Any) -> torch.Tensor:
            calls.append(named)
            return positions

    class Whole(torch.nn.Module):
        language_model = Language()

        def embed_input_ids(self, tokens_T: torch.Tensor) -> torch.Tensor:
            return tokens_T[:, None].expand(-1, WIDTH).float()

    target.model = Whole()
    media = MultimodalInputs(rows_T=torch.tensor([NO_MEDIA, 1]))
    inputs: Any = SimpleNamespace(
        token_ids_T=torch.tensor([5, 6]), positions_T=torch.arange(2), rotary=None, token_types_T=None, multimodal=media
    )
    target._call(inputs, None)
    (named,) = calls
    assert named["inputs_embeds"][:, 0].tolist() == [5, 1]
    added = named["deepstack_input_embeds"]
    assert len(added) == 2
    assert [added[f"deepstack_input_embeds_{layer}"].tolist() for layer in range(2)] == [
        [[0.0] * WIDTH, [2.0] * WIDTH],
        [[0.0] * WIDTH, [3.0] * WIDTH],
    ]


# ---- forms -----------------------------------------------------------------------------------------------


def test_every_supported_architecture_has_an_encoder_form() -> None:
    assert {name for names in compared.MEDIA.values() for name in names} <= set(FORMS)


def test_items_are_padded_to_listed_sizes() -> None:
    form = WholeItems(None, WIDTH)
    form._sizes["image"] = (64, 128, 192)
    assert [form._fit("image", size) for size in (1, 64, 65, 192, 193, 400)] == [64, 64, 128, 192, 384, 768]


def item(num_rows: int, **parts: torch.Tensor) -> Item:
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

    field = MultiModalBatchedField()
    return Item("image", MultiModalKwargsItem({k: MultiModalFieldElem(v, field) for k, v in parts.items()}), num_rows)


def test_tiles_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tower:
        def embed_multimodal(self, **named: torch.Tensor) -> tuple[torch.Tensor, ...]:
            assert named["image_num_patches"].tolist() == [4]
            return (named["pixel_values"].mean((1, 2, 3))[:, None, None].expand(-1, 2, 1).flatten(0, 1),)

    pixels = torch.arange(3.0)[:, None, None, None].expand(-1, 3, 2, 2)
    monkeypatch.setattr(
        "vllm_gaudi_spec.runner.extensions.encoders._take_inputs", lambda asked: {"pixel_values": asked.data}
    )
    form = Tiles(Tower(), WIDTH)
    listed = list(form.list_encodings(Item("image", pixels.repeat(2, 1, 1, 1), 12)))
    assert [len(one.inputs["pixel_values"]) for one in listed] == [1, 2, 4, 6]
    found = form.encoding(Item("image", pixels, 6))
    assert found.num_rows == 8
    assert form.run("image", found.inputs).flatten().tolist() == [0, 0, 1, 1, 2, 2, 0, 0]


def test_warm_up_patches_stay_within_the_position_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's tables have 8,192 rows. An example with more patches than that would not fit if it were a single strip."""

    class Tower(torch.nn.Module):
        spatial_merge_size, out_hidden_size = 2, WIDTH

        def __init__(self) -> None:
            super().__init__()
            self.rotary_pos_emb, self.patch_embed = torch.nn.Identity(), torch.nn.Identity()

        def prepare_encoder_metadata(self, grids: list[list[int]], device: torch.device) -> dict[str, torch.Tensor]:
            ((frames, height, width),) = grids
            assert max(height, width) <= 8192
            ends = torch.arange(0, frames * height * width + 1, height * width)
            return {"rotary_pos_emb_cos": torch.zeros(int(ends[-1]), 1), "cu_seqlens": ends}

    pixels = {"pixel_values": torch.zeros(4 * 16_384, 1)}
    monkeypatch.setattr(encoders, "_take_inputs", lambda asked: pixels)
    listed = list(Patches(SimpleNamespace(visual=Tower()), WIDTH).list_encodings(Item("image", None, 16_384)))
    for one in listed:
        assert {name: len(value) for name, value in one.inputs.items()} == {
            "pixels": 4 * one.num_rows,
            "rotary_pos_emb_cos": 4 * one.num_rows,
            "cu_seqlens": one.num_rows + 1,
        }
    assert [one.num_rows for one in listed][-1] == 16_384


@pytest.mark.parametrize(("height", "width"), [(2, 2), (4, 6), (7, 3)])
def test_position_embeddings_are_interpolated(height: int, width: int) -> None:
    """The reference scales the table to the size of the image. Patches come in any order."""
    torch.manual_seed(0)
    side = 4
    table = torch.randn(side * side, 3)
    places_P2 = torch.cartesian_prod(torch.arange(height), torch.arange(width))[torch.randperm(height * width)]
    corners_P4, shares_P4 = compute_corners(places_P2, height, width, side)
    found = (table[corners_P4] * shares_P4[..., None]).sum(1)
    image = table.T.reshape(1, 3, side, side)
    scaled = torch.nn.functional.interpolate(image, (height, width), mode="bilinear", align_corners=True)[0]
    torch.testing.assert_close(found, scaled[:, places_P2[:, 0], places_P2[:, 1]].T)


# ---- attention -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [None, [0, 3, 7], [0, 3, 6, 6]])
def test_v01_attention_within_sequences(ends: list[int] | None) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 7, 4, 8).unbind(0)
    kv_heads = 2
    key, value = key[:, :, :kv_heads], value[:, :, :kv_heads]
    layer: Any = MaskedEncoderAttention.__new__(MaskedEncoderAttention)
    torch.nn.Module.__init__(layer)
    layer.num_heads, layer.num_kv_heads, layer.head_size, layer.scale = 4, kv_heads, 8, 0.3
    layer.num_queries_per_kv = 2
    found = layer.forward_oot(query, key, value, None if ends is None else torch.tensor(ends))
    borders = sorted({*(ends or [0]), 7})
    for begin, end in pairwise(borders):
        parts = (part[:, begin:end].transpose(1, 2) for part in (query, key, value))
        expected = torch.nn.functional.scaled_dot_product_attention(*parts, scale=0.3, enable_gqa=True).transpose(1, 2)
        torch.testing.assert_close(found[:, begin:end], expected)
