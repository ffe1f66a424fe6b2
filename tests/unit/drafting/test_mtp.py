"""The number of MTP layers that are built."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PretrainedConfig

from vllm_gaudi_spec.drafting.mtp import _limit_layers


@pytest.mark.parametrize(("num_drafts", "num_built"), [(1, 1), (2, 2), (3, 3), (6, 3)])
@pytest.mark.parametrize("in_text_config", [False, True])
def test_no_more_layers_are_built_than_draft(in_text_config: bool, num_drafts: int, num_built: int) -> None:
    """vLLM's classes read the number in the target's configuration, some in the drafter's, and GLM-OCR's in the text
    configuration, with an `n_predict` of None."""
    configs: list[Any] = []
    for _ in range(2):
        numbers = PretrainedConfig(num_nextn_predict_layers=3, n_predict=None if in_text_config else 3)
        configs.append(PretrainedConfig(n_predict=None, text_config=numbers) if in_text_config else numbers)
    drafter, target = (SimpleNamespace(hf_config=config) for config in configs)
    speculative = SimpleNamespace(draft_model_config=drafter, num_speculative_tokens=num_drafts)
    vllm_config: Any = SimpleNamespace(speculative_config=speculative, model_config=target)
    assert _limit_layers(vllm_config) == num_built
    for config in configs:
        assert (config.text_config if in_text_config else config).num_nextn_predict_layers == num_built
