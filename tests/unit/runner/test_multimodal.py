"""Inputs of prompts with images beyond token ids: embeddings and rotary positions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from tests.support.fakes import CapturingBackend, HostBackend, cached, make_requests, new_request, step
from tests.support.media import CONFIG, batch
from vllm_gaudi_spec.attention.metadata import Inputs, MultimodalInputs
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.records import DECODE, PREFILL, Batch
from vllm_gaudi_spec.runner.extensions.multimodal import Multimodal
from vllm_gaudi_spec.runner.requests import Requests

BEGIN, LENGTH = 2, 4
PROMPT = [7, 8, 0, 0, 0, 0]
"""It ends with an image of four tokens."""
OFFSET = -2


class Model:
    """A model in which the rows of an image of 2 x 2 tokens have positions of their own."""

    supports_mrope = True
    _has_oov_mm_tokens = False

    def get_mrope_input_positions(self, tokens: list[int], features: list[Any]) -> tuple[torch.Tensor, int]:
        return torch.tensor([[0, 1, 2, 2, 2, 2], [0, 1, 2, 2, 3, 3], [0, 1, 2, 3, 2, 3]]), OFFSET


@pytest.fixture
def requests() -> Requests:
    return make_requests()


@pytest.fixture
def multimodal(requests: Requests) -> Multimodal:
    made = Multimodal(CONFIG, Model(), HostBackend(), max_rows=3)
    made._cache.encoder_outputs["an image"] = torch.arange(LENGTH)[:, None] + torch.full((1, 2), 10.0)
    place = PlaceholderRange(offset=BEGIN, length=LENGTH)
    image = MultiModalFeatureSpec(data=None, modality="image", identifier="an image", mm_position=place)
    with_image = replace(new_request("image", PROMPT, [4]), mm_features=[image])
    scheduled = step({"text": 3, "image": 6}, new=[new_request("text", [5, 6, 7], [3]), with_image])
    requests.apply(scheduled)
    made.apply(scheduled, requests)
    return made


def found(multimodal: Multimodal, asked: Batch) -> MultimodalInputs:
    return multimodal.add_to(asked).multimodal


def find_offsets(multimodal: Multimodal, requests: Requests, *names: str) -> torch.Tensor:
    return multimodal.rotary_offsets.table_RX[[requests.by_id[name].row for name in names]]


def test_chunk_takes_its_part_of_an_image(requests: Requests, multimodal: Multimodal) -> None:
    inputs = found(multimodal, batch(requests, PREFILL, 4, {"text": 3, "image": 3}, computed=1))
    assert torch.cat(inputs.embeddings)[:, 0].tolist() == [10, 11]
    assert inputs.is_media_T.nonzero().flatten().tolist() == [5, 6], "of the second row"
    assert inputs.rotary_DT.view(3, 2, 4)[:, 0, :3].tolist() == [[0, 1, 2]] * 3, "text counts its tokens"
    assert inputs.rotary_DT.view(3, 2, 4)[:, 1, :3].tolist() == [[1, 2, 2], [1, 2, 2], [1, 2, 3]]
    resumed = found(multimodal, batch(requests, PREFILL, 4, {"image": 3}, computed=5)).rotary_DT
    assert resumed.view(3, 4)[:, :3].tolist() == [[2, 4, 5], [3, 4, 5], [3, 4, 5]], "outputs follow the image"


def test_last_prompt_token_may_belong_to_an_image(requests: Requests, multimodal: Multimodal) -> None:
    """It comes as a decode if a chunk or the prefix cache leaves a single token."""
    inputs = found(multimodal, batch(requests, DECODE, 1, {"image": 1}, computed=5))
    assert torch.cat(inputs.embeddings)[:, 0].tolist() == [13]
    assert inputs.is_media_T.tolist() == [True]
    assert inputs.rotary_DT.flatten().tolist() == [2, 3, 3]


def test_decodes_add_one_rotary_offset(requests: Requests, multimodal: Multimodal) -> None:
    requests.by_id["text"].num_computed = 3
    asked = batch(requests, DECODE, 2, {"text": 2, "image": 2}, computed=6)
    assert multimodal.add_to(asked) is asked
    inputs = Inputs(torch.zeros(4), torch.tensor([3, 4, 6, 0]), (), (), torch.tensor([2, 1]))
    rotary = inputs.shift_rotary(find_offsets(multimodal, requests, "text", "image")).rotary
    assert rotary.tolist() == [3, 4, 4, 0], "padding stays at 0"


def test_rotary_offset_follows_its_request_to_another_row(requests: Requests, multimodal: Multimodal) -> None:
    preempting = step({"text": 1}, running=cached({"text": 3}), preempted={"image"})
    requests.apply(preempting)
    multimodal.apply(preempting, requests)
    resuming = step(
        {"image": 6},
        new=[new_request("other", [5], [5])],
        running=cached({"image": 0}, blocks={"image": [4]}, resumed={"image": PROMPT}),
    )
    row = requests._free_rows[-1]
    requests.apply(resuming)
    multimodal.apply(resuming, requests)
    assert requests.by_id["other"].row == row, "it got the previous row of the image"
    assert find_offsets(multimodal, requests, "image", "other", "text").tolist() == [OFFSET, 0, 0]


def test_warm_up_covers_rotary_offsets() -> None:
    multimodal = Multimodal(CONFIG, Model(), CapturingBackend(), max_rows=20)
    written: list[int] = []
    multimodal.rotary_offsets._run_put = lambda rows_N, offsets_N: written.append(len(rows_N))
    multimodal.warm_up()
    assert written == [1, 8], "every number of rows that an admission writes at once"


def test_ended_request_leaves_no_media(requests: Requests, multimodal: Multimodal) -> None:
    scheduled = step({"text": 1}, running=cached({"text": 3}), finished={"image"})
    scheduled.free_encoder_mm_hashes.append("an image")
    requests.apply(scheduled)
    multimodal.apply(scheduled, requests)
    assert not multimodal._cache.encoder_outputs
    assert set(multimodal._cache.mm_features) == {"text"}
    assert not multimodal._rotary_np
    assert not multimodal._offsets


def test_spans_of_bidirectional_images(requests: Requests, multimodal: Multimodal) -> None:
    assert found(multimodal, batch(requests, PREFILL, 4, {"text": 3, "image": 3}, computed=1)).spans is None
    multimodal._sees_both_ways = True
    spans = found(multimodal, batch(requests, PREFILL, 8, {"text": 3, "image": 6}, computed=0)).spans
    assert [part.tolist() for part in spans.rows] == [[1], [2], [5]]
    assert spans.lasts_BQ.tolist() == [[0] * 8, [0, 0, 5, 5, 5, 5, 0, 0]]
    assert not spans.in_windows_only
    spans = found(multimodal, batch(requests, PREFILL, 4, {"image": 3}, computed=3)).spans
    assert [part.tolist() for part in spans.rows] == [[0], [2], [5]], "its beginning was in the prefix cache"
    assert spans.lasts_BQ.tolist() == [[5, 5, 5, 0]]
    assert found(multimodal, batch(requests, DECODE, 1, {"image": 1}, computed=5)).spans is None
    with pytest.raises(AssertionError, match="ends within an image"):
        multimodal.add_to(batch(requests, PREFILL, 4, {"image": 2}, computed=3))
    assert found(multimodal, batch(requests, PREFILL, 4, {"image": 2}, computed=0)).spans is None, "before it"
    multimodal._sliding_window = LENGTH - 1
    assert found(multimodal, batch(requests, PREFILL, 8, {"image": 6}, computed=0)).spans is None, "as in vLLM"


def test_placeholders_outside_the_vocabulary_are_refused() -> None:
    model = Model()
    model._has_oov_mm_tokens = True
    with pytest.raises(UnsupportedConfigError, match="add --language-model-only"):
        Multimodal(CONFIG, model, HostBackend(), max_rows=3)
