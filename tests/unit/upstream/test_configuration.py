"""Patches of the configuration still have their reasons: these fail when upstream moves; then review the patch."""

import inspect
import json
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import pytest
from pydantic import ValidationError
from transformers import XLMRobertaConfig
from vllm import SamplingParams
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.config import speculative as upstream_speculative
from vllm.config import vllm as upstream_vllm
from vllm.config.utils import replace
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, JinaRobertaModelConfig

from tests.support.releases import only_0_32
from tests.support.schedulers import drafter
from tests.unit.test_config import CUSTOM, NGRAM, SUFFIX, engine_config, here
from vllm_gaudi_spec import config, upstream
from vllm_gaudi_spec.methods import METHODS
from vllm_gaudi_spec.upstream import configuration
from vllm_gaudi_spec.upstream.release import FROM_0_33

if not FROM_0_33:
    from vllm.transformers_utils.configs.step3p5 import Step3p5Config

MEDUSA = dict(method="medusa")


def values_of(kind: Any) -> tuple[str, ...]:
    """Of a Literal, or of an optional one."""
    values = get_args(kind)
    return get_args(values[0]) or values


def test_upstream_still_lacks_our_rules() -> None:
    """Fails when upstream has one of the values: then it leaves `_MORE_VALUES`, and its meaning is compared."""
    upstreams = {
        "rejection_sample_method": upstream_speculative.RejectionSampleMethod,
        "draft_sample_method": upstream_speculative.DraftSampleMethod,
        "method": upstream_speculative.SpeculativeMethod,
    }
    for name, more in configuration._MORE_VALUES.items():
        assert values_of(upstreams[name])
        assert not set(values_of(upstreams[name])) & set(more)


@pytest.mark.skipif(not FROM_0_33, reason="vLLM 0.32 has Medusa")
def test_medusa_is_refused_in_one_line(tmp_path: Path) -> None:
    upstream.apply()
    with pytest.raises(config.UnsupportedConfigError, match=r"^vLLM removed Medusa in 0.33; set method to eagle3 .*$"):
        engine_config(tmp_path, here(MEDUSA, tmp_path))


@pytest.mark.parametrize(
    ("typo", "nearest"), [("egale3", "eagle3"), ("N-gram", "ngram"), ("draftmodel", "draft_model")]
)
def test_mistyped_method_names_the_nearest_ones(typo: str, nearest: str, tmp_path: Path) -> None:
    upstream.apply()
    words = rf"^Speculative method '{typo}' does not exist; set method in --speculative-config to {nearest}( or .*)?\.$"
    with pytest.raises(config.UnsupportedConfigError, match=words):
        engine_config(tmp_path, dict(method=typo, num_speculative_tokens=3))


@pytest.mark.skipif(not FROM_0_33, reason="new in vLLM 0.33")
def test_flys_rule_is_refused(tmp_path: Path) -> None:
    upstream.apply()
    with pytest.raises(config.UnsupportedConfigError, match="rejection_sample_method fly is not supported"):
        engine_config(tmp_path, dict(method="ngram", num_speculative_tokens=3, rejection_sample_method="fly"))


UNIVERSAL = [
    dict(method="universal_draft"),
    dict(method="universal_draft", draft_sample_method="probabilistic"),
    dict(method="draft_model", use_heterogeneous_vocab=True, draft_sample_method="coupled"),
]


@pytest.mark.parametrize("spelling", UNIVERSAL, ids=str)
def test_universal_drafting_is_a_draft_model_with_a_mark(spelling: dict[str, Any], tmp_path: Path) -> None:
    """All the rest of vLLM sees a draft model, here and in the process that the configuration is sent to."""
    upstream.apply()
    made = engine_config(tmp_path, spelling | dict(model=str(tmp_path)))
    sent = pickle.loads(pickle.dumps(made)).speculative_config
    for given in (made.speculative_config, sent):
        assert given.method == "draft_model"
        assert given.draft_sample_method == spelling.get("draft_sample_method", "greedy")
        assert getattr(given, config.IS_UNIVERSAL) is True
    plain = engine_config(tmp_path, dict(method="draft_model", model=str(tmp_path)))
    assert not hasattr(plain.speculative_config, config.IS_UNIVERSAL)


def test_upstream_still_refuses_what_universal_drafting_needs() -> None:
    """When one of these goes, so does that part of `describe_drafters`."""
    source = inspect.getsource(SpeculativeConfig._verify_args)
    assert "use_heterogeneous_vocab currently only supports greedy" in source
    assert "verify_equal_vocab_size_if_draft_model" in source
    sizes = SpeculativeConfig.verify_equal_vocab_size_if_draft_model.__wrapped__
    assert "should have the same vocabulary size" in inspect.getsource(sizes)


def test_refusals_are_value_errors_of_one_line(tmp_path: Path) -> None:
    """From the front end's door, from a configuration that a program makes by itself, and from a changed one."""
    upstream.apply()
    made = engine_config(tmp_path, None)
    too_many = SpeculativeConfig(method="ngram", num_speculative_tokens=17)
    ways = (
        lambda: engine_config(tmp_path, dict(method="ngram", num_speculative_tokens=17)),
        lambda: VllmConfig(model_config=made.model_config, speculative_config=too_many),
        lambda: replace(made, speculative_config=too_many),
    )
    for way in ways:
        with pytest.raises(config.UnsupportedConfigError) as refused:
            way()
        assert isinstance(refused.value, ValueError)
        assert str(refused.value).startswith("17 drafts per step are too many;")
        assert len(str(refused.value).splitlines()) == 1
        # Whoever prints the traceback ends with that line as well: pydantic's report is not part of it.
        assert refused.value.__suppress_context__
        assert type(pickle.loads(pickle.dumps(refused.value))) is config.UnsupportedConfigError


def test_pydantic_still_catches_refusals(tmp_path: Path) -> None:
    """Fails when it lets them pass: then `raise_refusals_unchanged` goes. Reports of others stay what they are."""
    upstream.apply()
    made = engine_config(tmp_path, None)
    report = r"(?s)1 validation error for VllmConfig.*17 drafts per step.*For further information visit"
    construct = inspect.unwrap(VllmConfig.__init__)
    with pytest.raises(ValidationError, match=report):
        construct(
            object.__new__(VllmConfig),
            model_config=made.model_config,
            speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=17),
        )
    with pytest.raises(ValidationError, match="greater than 0"):
        SpeculativeConfig(method="ngram", num_speculative_tokens=0)


def test_min_p_and_logit_bias_are_still_all_that_upstream_refuses() -> None:
    upstream.apply()
    upstreams = SamplingParams._validate_spec_decode.__wrapped__
    assert set(re.findall(r"self\.(\w+)", inspect.getsource(upstreams))) == {"min_p", "logit_bias"}
    assert "self._validate_spec_decode(" in inspect.getsource(SamplingParams.verify)
    for params in (SamplingParams(min_p=0.1), SamplingParams(logit_bias={3: 1.0})):
        with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
            upstreams(params, drafter())
        params._validate_spec_decode(drafter())


@pytest.mark.parametrize(("depth", "drafts"), [(8, 8), (24, config.SUFFIX_DRAFTS)])
def test_suffix_without_a_number_of_drafts_takes_the_depth_up_to_the_maximum(depth: int, drafts: int) -> None:
    upstream.apply()
    made = SpeculativeConfig(method="suffix", suffix_decoding_max_tree_depth=depth)
    assert made.num_speculative_tokens == drafts


def test_suffix_needs_no_arctic_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    upstream.apply()
    options = dict(method="suffix", num_speculative_tokens=3)
    assert SpeculativeConfig(**options).method == "suffix"
    with pytest.raises(ValueError, match="suffix_decoding_max_tree_depth=0 must be >= 1"):
        SpeculativeConfig(**options, suffix_decoding_max_tree_depth=0)
    monkeypatch.setattr(upstream_speculative, "has_arctic_inference", lambda: False)
    with pytest.raises(ImportError, match="Arctic Inference is required"):
        SpeculativeConfig(**options)


@pytest.mark.parametrize("speculative", [pytest.param(MEDUSA, marks=only_0_32), NGRAM, SUFFIX, CUSTOM], ids=str)
def test_upstream_still_refuses_to_overlap_steps(
    speculative: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails for a method that upstream admits. When none is left `leave_async_scheduling_to_the_platform` can go."""
    speculative = here(speculative, tmp_path)
    monkeypatch.setattr(upstream, "leave_async_scheduling_to_the_platform", lambda: None)
    monkeypatch.setattr(upstream_vllm, "NgramGPUTypes", upstream_speculative.NgramGPUTypes)
    with pytest.raises(ValueError, match=r"sync scheduling is (only supported with EAGLE|not supported by the V1)"):
        engine_config(tmp_path, speculative, async_scheduling=True)
    assert engine_config(tmp_path, speculative).scheduler_config.async_scheduling is False


def test_the_list_of_methods_that_overlap_is_used_for_nothing_else() -> None:
    upstream.apply()
    uses = re.findall(r"\bNgramGPUTypes\b", inspect.getsource(upstream_vllm))
    decides = re.findall(r"method not in get_args\(NgramGPUTypes\)", inspect.getsource(upstream_vllm.VllmConfig))
    assert len(uses) == len(["import", *decides]) == (2 if FROM_0_33 else 3)
    assert set(METHODS) <= set(get_args(upstream_vllm.NgramGPUTypes))
    assert upstream_speculative.NgramGPUTypes == Literal["ngram_gpu"]


@pytest.mark.parametrize("has_file", [True, False])
def test_inc_is_read_from_quant_config(has_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vllm-gaudi's users have both. Without the file vLLM looks for another of its own."""
    upstream.apply()
    if has_file:
        file = tmp_path / "measure.json"
        file.write_text(json.dumps({"mode": "MEASURE", "dump_stats_path": str(tmp_path / "measured")}))
        monkeypatch.setenv("QUANT_CONFIG", str(file))
        options = dict(quantization="inc", worker_extension_cls="the.calibration")
        assert engine_config(tmp_path / "model", None, **options).model_config.quantization is None
    else:
        monkeypatch.delenv("QUANT_CONFIG", raising=False)
        with pytest.raises(ValueError, match="Cannot find the config file for inc"):
            engine_config(tmp_path / "model", None, quantization="inc")


def test_xlm_roberta_without_a_kind_of_positions() -> None:
    """Fails when upstream gets along without it: then `read_positions_of_xlm_roberta` can go."""
    upstream.read_positions_of_xlm_roberta()
    patched: Any = JinaRobertaModelConfig.verify_and_update_model_config
    read = XLMRobertaConfig(hidden_size=32, num_attention_heads=2)
    assert not hasattr(read, "position_embedding_type"), "transformers writes it"
    with pytest.raises(AttributeError, match="position_embedding_type"):
        patched.__wrapped__(SimpleNamespace(hf_config=read))
    patched(SimpleNamespace(hf_config=read))
    assert read.position_embedding_type == "absolute"
    assert MODELS_CONFIG_MAP["XLMRobertaModel"] is JinaRobertaModelConfig


@only_0_32
def test_step_config_keeps_the_kinds_of_mtp_layers() -> None:
    upstream.apply()
    kinds = ["full_attention", *["sliding_attention"] * 5]
    sizes = dict(num_hidden_layers=3, num_nextn_predict_layers=2, layer_types=kinds)
    assert Step3p5Config(**sizes).layer_types == kinds[:5]
    assert Step3p5Config(num_hidden_layers=3).layer_types is None


@only_0_32
def test_upstream_still_cuts_the_kinds_of_mtp_layers() -> None:
    """When this fails, `keep_layer_types_of_step_mtp` can go."""
    upstream.apply()
    config = object.__new__(Step3p5Config)
    Step3p5Config.__init__.__wrapped__(config, num_hidden_layers=1, layer_types=["full_attention"] * 2)
    assert config.layer_types == ["full_attention"]
