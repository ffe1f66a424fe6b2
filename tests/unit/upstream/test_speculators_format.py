"""The patch of how vLLM reads the format of the library speculators still has its reasons."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig, Qwen3Config
from vllm.model_executor.models.qwen3_dflash import _dflash_layer_causal
from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

from tests.full_tests.tiny_models import common
from tests.unit.test_config import engine_config
from vllm_gaudi_spec import upstream
from vllm_gaudi_spec.config import UnsupportedConfigError

TYPES = ["sliding_attention", "full_attention"]


def checkpoint(method: str, sees_later: bool | None) -> dict[str, Any]:
    flag = {} if sees_later is None else {"sliding_window_non_causal": sees_later}
    layers = dict(model_type="qwen3", num_hidden_layers=2, layer_types=TYPES)
    named = dict(aux_hidden_state_layer_ids=[1, 2], mask_token_id=7, transformer_layer_config=layers)
    return dict(speculators_model_type=method) | named | flag


def causal_layers(layers: dict[str, Any]) -> list[bool]:
    config = PretrainedConfig(**layers)
    return [_dflash_layer_causal(config, layer) for layer in range(len(TYPES))]


@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark"])
def test_only_layers_with_a_window_are_causal_and_only_if_the_checkpoint_says_so(method: str) -> None:
    upstream.apply()
    read = SpeculatorsConfig.extract_transformers_pre_trained_config
    assert causal_layers(read(checkpoint(method, False))) == [True, False]
    assert causal_layers(read(checkpoint(method, True))) == [False, False]
    assert causal_layers(read(checkpoint(method, None))) == [method == "dspark", False]  # as upstream has it


def test_upstream_still_reads_layers_otherwise() -> None:
    """When this fails, so does the reason for `mend_speculators_format`."""
    upstream.apply()
    original = SpeculatorsConfig.extract_transformers_pre_trained_config.__wrapped__
    assert causal_layers(original(checkpoint("dflash", False))) == [True, True]
    assert causal_layers(original(checkpoint("dspark", True))) == [True, False]
    with pytest.raises(ValueError, match="<function update_eagle3"):
        original(checkpoint("xpress", None))


def save_checkpoint(folder: Path, method: str, **options: Any) -> str:
    upstream.apply()
    saved = checkpoint(method, True) | dict(
        transformer_layer_config=Qwen3Config(**common()).to_dict(),
        speculators_config=dict(
            proposal_methods=[dict(speculative_tokens=5)], verifier=dict(name_or_path=str(folder / "target"))
        ),
    )
    (folder / "drafter").mkdir()
    (folder / "drafter" / "config.json").write_text(json.dumps(saved | options))
    return str(folder / "drafter")


@pytest.mark.parametrize(
    ("given", "number"), [({}, 5), (dict(num_speculative_tokens=2), 2), (dict(method="dflash"), 5)], ids=str
)
def test_speculative_configuration_takes_the_rest_from_the_checkpoint(
    given: dict[str, Any], number: int, tmp_path: Path
) -> None:
    options = dict(model=save_checkpoint(tmp_path, "dflash2"), num_speculative_tokens=None) | given
    made = engine_config(tmp_path / "target", options).speculative_config
    assert (made.method, made.num_speculative_tokens) == ("dflash", number)
    assert made.draft_model_config.architectures == ["DFlash2DraftModel"]


@pytest.mark.parametrize("method", [None, "eagle3"])
def test_adapter_in_place_of_a_drafter_is_refused(method: str | None, tmp_path: Path) -> None:
    upstream.apply()
    (tmp_path / "adapter_config.json").write_text(json.dumps(dict(peft_type="LORA")))
    with pytest.raises(UnsupportedConfigError, match=r"^.* is a LoRA adapter .* \(method UNO\), which is not"):
        engine_config(tmp_path / "target", dict(method=method, model=str(tmp_path), num_speculative_tokens=3))


@pytest.mark.parametrize(
    ("method", "changed", "message"),
    [
        ("dspark", {}, "is a drafter of method dspark; set method to it in --speculative-config."),
        (
            "peagle",
            {},
            "is a P-EAGLE head; set method to eagle3 and parallel_drafting to true in --speculative-config.",
        ),
        ("dflash2", dict(draft_vocab_size=32), "is a DFlash2 drafter with a reduced vocabulary"),
    ],
)
def test_wrong_checkpoint_is_refused(method: str, changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    drafter = save_checkpoint(tmp_path, method, **changed)
    given = "dflash" if changed else "eagle3"
    with pytest.raises(UnsupportedConfigError, match=f"^{drafter} {message}"):
        engine_config(tmp_path / "target", dict(method=given, model=drafter, num_speculative_tokens=3))
