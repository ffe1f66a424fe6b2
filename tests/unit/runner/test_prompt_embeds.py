"""Prompts of embeddings: which rows a batch takes, and where they go."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.fakes import HostBackend, new_request, step
from tests.support.media import batch
from vllm_gaudi_spec.attention.metadata import MultimodalInputs
from vllm_gaudi_spec.config import UnsupportedConfigError
from vllm_gaudi_spec.model import LoadedModel
from vllm_gaudi_spec.records import DECODE, PREFILL
from vllm_gaudi_spec.runner.extensions.prompt_embeds import PromptEmbeds
from vllm_gaudi_spec.runner.requests import Requests

CONFIG = SimpleNamespace(dtype=torch.float32, architecture="Tiny", hf_text_config=None)
ROWS_LH = torch.arange(12.0).view(6, 2)
NO_TOKEN = 10**6


def model(forward: Any) -> Any:
    return SimpleNamespace(forward=forward)


@pytest.fixture
def embeds() -> PromptEmbeds:
    return PromptEmbeds(CONFIG, model(lambda input_ids, positions, inputs_embeds: None), HostBackend())  # type: ignore[arg-type]


@pytest.fixture
def requests() -> Requests:
    """Return requests with embeddings, with text, and with both."""
    made = Requests(HostBackend(), max_rows=3, max_len=64, block_sizes=[16], max_context=64, seed=0)  # type: ignore[arg-type]
    all_embeds = replace(new_request("embeds", [0], [4]), prompt_token_ids=None, prompt_embeds=ROWS_LH.double())
    both = replace(
        new_request("both", [5, NO_TOKEN, 6, NO_TOKEN], [5]),
        prompt_embeds=-ROWS_LH[:4],
        prompt_is_token_ids=[True, False, True, False],
    )
    new = [all_embeds, new_request("text", [5, 6, 7], [3]), both]
    made.apply(step({"embeds": 6, "text": 3, "both": 4}, new=new))
    return made


def test_tokens_of_embeddings_are_zero(requests: Requests) -> None:
    assert requests.by_id["embeds"].prompt == [0] * 6
    assert requests.by_id["both"].prompt == [5, 0, 6, 0]
    assert requests.by_id["text"].embeds is None


def test_embeddings_keep_the_tokens_passed_by_the_user(requests: Requests) -> None:
    named = replace(new_request("named", [5, 6, 7, 8, 9, 10], [6]), prompt_embeds=ROWS_LH)
    requests.apply(step({"named": 6}, new=[named], finished={"text"}))
    assert requests.by_id["named"].prompt == [5, 6, 7, 8, 9, 10]
    assert requests.by_id["named"].embeds is not None
    assert requests.by_id["named"].embeds.is_embeds_np.all()


def test_chunk_takes_its_embeddings(requests: Requests, embeds: PromptEmbeds) -> None:
    asked = batch(requests, PREFILL, 4, {"embeds": 3, "text": 2, "both": 3}, computed=1, name="embeds")
    found = embeds.add_to(asked).multimodal
    assert found is not None
    assert found.is_embeds_T is not None
    assert found.embeds_NH is not None
    assert found.is_embeds_T.nonzero().flatten().tolist() == [0, 1, 2, 9]
    assert found.embeds_NH.dtype == torch.float32
    assert found.embeds_NH[:, 0].tolist() == [2, 4, 6, -2]


def test_last_prompt_embedding_may_come_as_a_decode(requests: Requests, embeds: PromptEmbeds) -> None:
    found = embeds.add_to(batch(requests, DECODE, 1, {"embeds": 1}, computed=5, name="embeds")).multimodal
    assert found is not None
    assert found.embeds_NH is not None
    assert found.embeds_NH.tolist() == [[10, 11]]


def test_no_embeddings_after_the_prompt(requests: Requests, embeds: PromptEmbeds) -> None:
    """Drafts and the outputs of a resumed request have none either."""
    assert embeds.add_to(batch(requests, DECODE, 3, {"embeds": 3}, computed=6, name="embeds")).multimodal is None
    found = embeds.add_to(batch(requests, PREFILL, 4, {"embeds": 4}, computed=4, name="embeds")).multimodal
    assert found is not None
    assert found.is_embeds_T is not None
    assert found.is_embeds_T.tolist() == [True, True, False, False]


def test_prompt_embeddings_keep_multimodal_inputs(requests: Requests, embeds: PromptEmbeds) -> None:
    rotary_DT = torch.ones(3, 1)
    asked = replace(
        batch(requests, DECODE, 1, {"embeds": 1}, computed=5, name="embeds"),
        multimodal=MultimodalInputs(rotary_DT=rotary_DT),
    )
    found = embeds.add_to(asked).multimodal
    assert found is not None
    assert found.rotary_DT is rotary_DT
    assert found.embeds_NH is not None


def test_packing_drops_padding_from_masks() -> None:
    packed = MultimodalInputs(is_embeds_T=torch.tensor([True, False, False])).pack(torch.tensor([0, 2]))
    assert packed.is_embeds_T is not None
    assert packed.is_embeds_T.tolist() == [True, False]
    assert packed.is_media_T is None


def test_embeddings_replace_their_tokens() -> None:
    class Loaded(LoadedModel):
        def __init__(self) -> None:
            self.model = SimpleNamespace(embed_input_ids=lambda tokens_T: tokens_T[:, None].repeat(1, 2).float())

    media = MultimodalInputs(embeds_NH=ROWS_LH[:2] + 0.5, is_embeds_T=torch.tensor([False, True, False, True]))
    found, deeper = Loaded()._embed(torch.tensor([7, 0, 8, 0]), media)
    assert deeper is None
    assert found.tolist() == [[7, 7], [0.5, 1.5], [8, 8], [2.5, 3.5]]


def test_model_class_without_inputs_embeds_is_refused() -> None:
    with pytest.raises(UnsupportedConfigError, match="Tiny takes no embeddings; leave out --enable-prompt-embeds"):
        PromptEmbeds(CONFIG, model(lambda input_ids, positions: None), HostBackend())  # type: ignore[arg-type]


def test_model_with_per_layer_embeddings_is_refused() -> None:
    """In Gemma 3n and 4, vLLM would leave these embeddings out for all requests of the batch."""
    config = SimpleNamespace(**vars(CONFIG) | dict(hf_text_config=SimpleNamespace(hidden_size_per_layer_input=8)))
    with pytest.raises(UnsupportedConfigError, match=r"of their own.*leave out --enable-prompt-embeds"):
        PromptEmbeds(config, model(lambda input_ids, positions, inputs_embeds: None), HostBackend())  # type: ignore[arg-type]
