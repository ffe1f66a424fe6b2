"""The patch of prompt embeddings still has its reason: these fail when upstream moves; then review the patch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.renderers.base import BaseRenderer

from vllm_gaudi_spec import upstream


class Renderer:
    """What `_process_embeds` of vLLM's reads."""

    model_config = SimpleNamespace(enable_prompt_embeds=True, get_inputs_embeds_size=lambda: 4, dtype=torch.float16)

    def validate_token_ids(self, tokens: list[int]) -> None:
        if max(tokens) > 9:
            raise ValueError("out of vocabulary")


ROWS_LH = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        pytest.param(dict(prompt_embeds=ROWS_LH[:, 1:]), "are 3 numbers wide, where the model has 4", id="width"),
        pytest.param(dict(prompt_embeds=ROWS_LH.int()), "int32, which is not a floating-point", id="dtype"),
        pytest.param(dict(prompt_embeds=ROWS_LH * torch.nan), "not finite", id="nan"),
        pytest.param(dict(prompt_embeds=ROWS_LH * -1e5), "beyond 7e\\+04", id="large"),
        pytest.param(dict(prompt_embeds=ROWS_LH.to_sparse()), "have to be a dense tensor", id="sparse"),
        pytest.param(dict(prompt_embeds=ROWS_LH, prompt_token_ids=[1, 2]), "are 3, which is not the length", id="ids"),
        pytest.param(
            dict(prompt_embeds=ROWS_LH, prompt_token_ids=[1, 2, 3], prompt_is_token_ids=[True]),
            "are 3, which is not the length",
            id="mask",
        ),
        pytest.param(
            dict(prompt_embeds=ROWS_LH, prompt_is_token_ids=[True] * 3), "without prompt_token_ids", id="mask alone"
        ),
    ],
)
def test_bad_embeddings_are_refused(prompt: dict[str, Any], words: str) -> None:
    """And upstream does not; fails when it does: then `refuse_bad_embeds` can go."""
    upstream.refuse_bad_embeds()
    process: Any = BaseRenderer._process_embeds
    assert process.__wrapped__(Renderer(), prompt)["type"] == "embeds"
    with pytest.raises(VLLMValidationError, match=words):
        process(Renderer(), prompt)


def test_good_embeddings_pass() -> None:
    upstream.refuse_bad_embeds()
    process: Any = BaseRenderer._process_embeds
    tokens = dict(prompt_token_ids=[1, 99, 3], prompt_is_token_ids=[True, False, True])
    for prompt in (dict(prompt_embeds=ROWS_LH[None].bfloat16()), dict(prompt_embeds=ROWS_LH) | tokens):
        made = process(Renderer(), prompt)
        assert made["prompt_embeds"].shape == (3, 4)
    with pytest.raises(ValueError, match="vocabulary"):
        process(Renderer(), dict(prompt_embeds=ROWS_LH, prompt_token_ids=[1, 99, 3]))


def test_unlike_prompts_are_hashed_unlike() -> None:
    """Upstream hashes the bytes of embeddings alone; fails when it does otherwise: then `_hashed_apart` can go."""
    upstream.refuse_bad_embeds()
    process: Any = BaseRenderer._process_embeds
    tokens = dict(prompt_token_ids=[1, 2, 3], prompt_embeds=ROWS_LH)
    masked, plain = (process(Renderer(), tokens | mask) for mask in (dict(prompt_is_token_ids=[True, False, True]), {}))
    assert masked["prompt_embeds"].isinf().all(1).tolist() == [True, False, True]
    assert torch.equal(plain["prompt_embeds"], ROWS_LH.half())
    assert process(Renderer(), dict(prompt_embeds=ROWS_LH.bfloat16()))["prompt_embeds"].dtype == torch.float16
