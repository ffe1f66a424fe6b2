"""Mistakes in our own options stop the start-up with the option's name."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig
from vllm import SamplingParams
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.config.utils import replace
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.sample.logits_processor import STR_SPEC_DEC_REJECTS_LOGITSPROCS
from vllm.v1.serial_utils import MsgpackEncoder

from tests.full_tests.tiny_models import common
from tests.support.releases import only_0_32
from vllm_gaudi_spec import config, devices, environment, refusals, upstream
from vllm_gaudi_spec.config import Options, Speculation, UnsupportedConfigError, get_target_config
from vllm_gaudi_spec.devices import load_backend
from vllm_gaudi_spec.devices.base import DeviceTraits
from vllm_gaudi_spec.methods import METHODS
from vllm_gaudi_spec.platforms import base as platform
from vllm_gaudi_spec.refusals import check_request, drafters, models, speculation
from vllm_gaudi_spec.scheduling.scheduler import SpecScheduler
from vllm_gaudi_spec.upstream.release import FROM_0_33
from vllm_gaudi_spec.worker import Worker


def vllm_config(options: dict[str, Any] | None) -> Any:
    return SimpleNamespace(additional_config=options)


def test_defaults_and_lists() -> None:
    assert Options.from_vllm(vllm_config(None)) == Options()
    given = Options.from_vllm(vllm_config({"gaudi_spec": {"batch_buckets": [8, 1, 8], "warmup_tokens": -1}}))
    assert given == Options(batch_buckets=(1, 8), warmup_tokens=-1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_bucket": [1]}, "unknown option.*batch_bucket.*known are batch_buckets"),
        ({"batch_buckets": 4}, "batch_buckets must be a list of positive integers, got 4"),
        ({"prefill_buckets": [0]}, "prefill_buckets must be a list of positive integers"),
        ({"warmup_tokens": "all"}, "warmup_tokens must be an integer"),
        ({"warmup_tokens": -16}, "warmup_tokens must be an integer of -1 or more, got -16"),
        ({"universal_context": "text"}, "universal_context must be map or retokenize, got 'text'"),
        ({"universal_match": 1}, "universal_match must be tli or slem, got 1"),
        ({"universal_kv_len": 0}, "universal_kv_len must be an integer of 1 or more, got 0"),
        ({"state_snapshots": 0}, "state_snapshots must be an integer of 1 or more"),
        ({"cpu_weights": "int4"}, "cpu_weights must be float32 or float16, got 'int4'"),
        ("text", "gaudi_spec must be an object with options by name, got 'text'"),
        ({"audit_every": -1}, "audit_every must be an integer of 0 or more, got -1"),
        ({"audit_every": True}, "audit_every must be an integer of 0 or more, got True"),
        ({"batch_buckets": [True]}, "batch_buckets must be a list of positive integers"),
        ({"batch_buckets": "8" * 10**6}, "batch_buckets must be a list of positive integers"),
        ({"universal_match": {"a": {"b": []}}}, "universal_match must be tli or slem"),
        ({"universal_kv_len": -(10**4000)}, "universal_kv_len must be an integer of 1 or more"),
        ({"universal_kv_len": float("nan")}, "universal_kv_len must be an integer"),
        ({"x\ny" * 10**5: 1}, "unknown option"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_options_are_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=message) as refused:
        Options.from_vllm(vllm_config({"gaudi_spec": options}))
    assert len(str(refused.value)) < 1000
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("given", ["text", [1], 5])
def test_additional_config_is_an_object(given: Any) -> None:
    with pytest.raises(UnsupportedConfigError, match="additional_config must be an object"):
        Options.from_vllm(vllm_config(given))


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("gaudi-spec", "gaudi_spec"),
        ("gaudi_specs", "gaudi_spec"),
        ("GAUDI_SPEC", "gaudi_spec"),
        ("audit_every", "additional_config.gaudi_spec.audit_every"),
    ],
)
def test_misspelled_key_is_refused(key: str, meant: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=rf"^additional_config has no '{key}'; did you mean {meant}\?$"):
        Options.from_vllm(vllm_config({key: {"audit_every": 1}}))


@pytest.mark.parametrize("name", ["batch_buckets", "prefill_buckets"])
def test_oversized_bucket_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfigError, match=f"{name} goes up to {2**40}, .*leave the large ones out"):
        engine_config(tmp_path, None, additional_config={"gaudi_spec": {name: [4096, 2**40]}})


PICKLES = ["pytorch_model.bin", "consolidated.00.pth", "medusa_lm_head.pt", "model.ckpt"]


@pytest.mark.parametrize("file", PICKLES)
@pytest.mark.parametrize("of_drafter", [True, False], ids=["drafter", "target"])
def test_pickled_weights_are_refused(file: str, of_drafter: bool, tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder in (target, draft):
        engine_config(folder, None)
    (draft if of_drafter else target).joinpath(file).write_bytes(b"cposix\nsystem\n(S'exit 1'\ntR.")
    speculative = dict(method="draft_model", model=str(draft))
    with pytest.raises(UnsupportedConfigError, match=rf"are pickles \({file}\).*safetensors"):
        engine_config(target, speculative)
    save_file({"weight": torch.ones(1)}, (draft if of_drafter else target) / "model.safetensors")
    engine_config(target, speculative)


def test_gguf_weights_are_refused(tmp_path: Path) -> None:
    engine_config(tmp_path, None)
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedConfigError, match=r"are in GGUF \(model-Q4_K_M\.gguf\), .*bfloat16") as refused:
        engine_config(tmp_path, None)
    assert len(str(refused.value).splitlines()) == 1
    save_file({"weight": torch.ones(1)}, tmp_path / "model.safetensors")
    engine_config(tmp_path, None)


def test_load_formats_that_read_pickles_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfigError, match=r"format pt reads pickles; .*\.safetensors"):
        engine_config(tmp_path, None, load_format="pt")
    draft = dict(method="draft_model", model=str(tmp_path), draft_load_config={"load_format": "npcache"})
    with pytest.raises(UnsupportedConfigError, match="format npcache reads pickles"):
        engine_config(tmp_path, draft)


def index(folder: Path, kind: str) -> None:
    """Of weights that stand in one file."""
    weight_map = {"weight_map": {"weight": f"{kind}-00001-of-00001.safetensors"}}
    (folder / f"{kind}.safetensors.index.json").write_text(json.dumps(weight_map))


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    """--load-format dummy with a folder of which only the small files were copied."""
    index(tmp_path, "model")
    with pytest.raises(UnsupportedConfigError, match=r"names model-00001-of-00001\.safetensors, which is missing"):
        engine_config(tmp_path, None)
    engine_config(tmp_path, None, load_format="dummy")
    draft = tmp_path / "draft"
    engine_config(draft, None)
    index(draft, "model")
    drafter = dict(method="draft_model", model=str(draft))
    with pytest.raises(UnsupportedConfigError, match=r"draft.*is missing"):
        engine_config(tmp_path, drafter | dict(draft_load_config={"load_format": "hf"}), load_format="dummy")
    engine_config(tmp_path, drafter, load_format="dummy")


@pytest.mark.parametrize(
    ("there", "load_format", "is_whole"),
    [
        ("model", "auto", True),
        ("model", "mistral", False),
        ("consolidated", "auto", True),
        ("consolidated", "mistral", True),
        ("consolidated", "hf", False),
    ],
)
def test_unused_index_is_not_checked(there: str, load_format: str, is_whole: bool, tmp_path: Path) -> None:
    """Repositories have the same weights twice, and who copies one leaves both indexes."""
    for kind in ("model", "consolidated"):
        index(tmp_path, kind)
    save_file({"weight": torch.ones(1)}, tmp_path / f"{there}-00001-of-00001.safetensors")
    if is_whole:
        engine_config(tmp_path, None, load_format=load_format)
    else:
        with pytest.raises(UnsupportedConfigError, match="which is missing"):
            engine_config(tmp_path, None, load_format=load_format)


def test_unknown_device_is_refused_by_vllm_itself() -> None:
    """vLLM swallows what a platform plugin raises and would go on with upstream's platform."""
    code = "from vllm.platforms import current_platform; current_platform.pre_register_and_update()"
    environment = os.environ | {"VGS_DEVICE": "tpu"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert (
        "VGS_DEVICE=tpu is not available; use one of cpu, hpu, hpu-emulated, ascend, ascend-emulated, cuda."
        in result.stderr.strip().splitlines()[-1]
    )


def test_start_method_is_chosen_for_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    monkeypatch.delenv("VGS_START_METHOD_CHOSEN_BY", raising=False)
    for answer in ("fork", "spawn"):
        environment.choose_start_method(lambda answer=answer: answer)
        assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == answer
    monkeypatch.setenv("VGS_START_METHOD_CHOSEN_BY", "0")  # as in an engine process
    environment.choose_start_method(lambda: "fork")
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_stays_inactive_beside_another_platform_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plugin:
        name, value = "gaudi", "vllm_gaudi:register"

    monkeypatch.delenv("VGS_DEVICE", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(devices, "entry_points", lambda group: [Plugin])
    devices.other_platform_plugins.cache_clear()
    try:
        assert devices.choose_device() is None
        monkeypatch.setenv("VGS_DEVICE", "cpu")
        assert devices.choose_device() == "cpu"
        monkeypatch.delenv("VGS_DEVICE")
        monkeypatch.setenv("VLLM_PLUGINS", "gaudi_spec")
        devices.other_platform_plugins.cache_clear()
        assert devices.choose_device() == "cpu"
    finally:
        devices.other_platform_plugins.cache_clear()


TARGET_MAX_LEN = 512


def engine_config(folder: Path, speculative: dict[str, Any] | None, **options: Any) -> VllmConfig:
    """What the front end makes of a speculative configuration. No weights: none are looked for."""
    made = LlamaConfig(**common())
    made.architectures = ["LlamaForCausalLM"]
    made.save_pretrained(folder)
    defaults: dict[str, Any] = dict(dtype="float32", max_model_len=TARGET_MAX_LEN, skip_tokenizer_init=True)
    if speculative is not None:
        given = {"num_speculative_tokens": 3} | speculative
        speculative = {name: value for name, value in given.items() if value is not None}
    return EngineArgs(str(folder), speculative_config=speculative, **(defaults | options)).create_engine_config()


def test_diffusion_language_models_are_refused(tmp_path: Path) -> None:
    with refused_with("is a diffusion language model"):
        engine_config(tmp_path, None, hf_overrides={"canvas_length": 8})


def save_block_drafter(folder: Path, architecture: str) -> str:
    """Write a configuration, without weights, of a drafter for the target of `engine_config`."""
    fields = dict(architectures=[architecture], target_layer_ids=[0], mask_token_id=0, markov_rank=8, block_size=4)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LlamaConfig(**common()).to_dict() | fields))
    return str(folder)


def refused_with(message: str | None) -> AbstractContextManager[object]:
    """Expect a refusal, or none without a message."""
    return nullcontext() if message is None else pytest.raises(UnsupportedConfigError, match=message)


def backend_of(device: str, *, captures: bool = False) -> Any:
    """What refusals ask of it."""
    traits = DeviceTraits(
        name=device,
        mode="",
        torch_device=torch.device("cpu"),
        captures=captures,
        takes_cpu_weights=device == "cpu",
        takes_quant_config=device in ("cpu", "hpu"),
        simulates_quantization=device == "cpu",
    )
    return SimpleNamespace(traits=traits, weights=SimpleNamespace(missing_kernel=lambda *_: None))


@pytest.fixture(autouse=True)
def start_method_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a configuration chooses one for this process."""
    for name in (environment.START_METHOD.name, environment._CHOSEN_BY):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


NGRAM = dict(method="ngram")
SUFFIX = dict(method="suffix")
CUSTOM = dict(method="custom_class", model="package.Class")
DRAFT = dict(method="draft_model", model="the target's folder")


def here(speculative: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A drafter's model has to be somewhere: the target's folder will do."""
    own = speculative.get("method") in ("draft_model", "universal_draft", "eagle", "medusa")
    return speculative | dict(model=str(folder)) if own else speculative


@pytest.mark.parametrize(
    "speculative",
    [
        NGRAM,
        dict(model="ngram"),
        dict(model="[ngram]"),
        dict(method="ngram_gpu"),
        dict(method="ngram_gpu", model="ngram"),
        SUFFIX,
        CUSTOM,
        dict(model="package.Class"),
        NGRAM | dict(prompt_lookup_min=2, prompt_lookup_max=4),
        SUFFIX | dict(suffix_decoding_max_tree_depth=8, suffix_decoding_min_token_prob=0.0),
        NGRAM | dict(num_speculative_tokens=config.MAX_DRAFTS, max_model_len=TARGET_MAX_LEN),
        NGRAM | dict(rejection_sample_method="block"),
        NGRAM | dict(rejection_sample_method="synthetic", synthetic_acceptance_length=2.5),
        DRAFT,
        DRAFT | dict(draft_sample_method="probabilistic", rejection_sample_method="block", max_model_len=128),
        DRAFT | dict(draft_sample_method="coupled", rejection_sample_method="strict"),
        DRAFT | dict(method="universal_draft", rejection_sample_method="probabilistic"),
        dict(method="eagle", disable_eagle_block_drop=True),
    ],
    ids=str,
)
def test_supported_speculation_is_accepted(speculative: dict[str, Any], tmp_path: Path) -> None:
    made = engine_config(tmp_path, here(speculative, tmp_path))
    # As for a drafter that is loaded with a copy of the configuration: the platform looks at it again.
    again = replace(made, parallel_config=made.parallel_config)
    assert Speculation.from_vllm(again) == Speculation.from_vllm(made)


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        (
            dict(method="extract_hidden_states"),
            "extract_hidden_states is not supported yet; use one of ngram, ngram_gpu",
        ),
        pytest.param(
            dict(method="medusa", disable_eagle_block_drop=True),
            "disable_eagle_block_drop has no effect with .* medusa",
            marks=only_0_32,
        ),
        (NGRAM | dict(num_speculative_tokens=17), "17 drafts .* set num_speculative_tokens .* to 16 or less"),
        # Upstream takes the tree's depth.
        (SUFFIX | dict(num_speculative_tokens=None), "24 drafts .* set num_speculative_tokens .* to 16 or less"),
        (NGRAM | dict(max_model_len=TARGET_MAX_LEN + 1), "max_model_len 513 .* more than the target's 512; use less"),
        (NGRAM | dict(model="some/model"), "^model has no effect with method ngram; leave it out"),
        (dict(method="suffix", model="ngram"), "^model has no effect with method suffix"),
        (SUFFIX | dict(prompt_lookup_max=4), "prompt_lookup_max has no effect with method suffix"),
        (SUFFIX | dict(prompt_lookup_min=4), "prompt_lookup_min has no effect with method suffix"),
        (NGRAM | dict(suffix_decoding_max_tree_depth=8), "suffix_decoding_max_tree_depth has no effect with .* ngram"),
        (CUSTOM | dict(suffix_decoding_min_token_prob=0.0), "suffix_decoding_min_token_prob has no effect with"),
        (DRAFT | dict(suffix_decoding_max_tree_depth=8), "suffix_decoding_max_tree_depth has no effect with"),
        (
            DRAFT | dict(rejection_sample_method="probabilistic", draft_sample_method="coupled"),
            "rejection_sample_method probabilistic keeps .* use strict with coupled",
        ),
    ],
    ids=str,
)
def test_unsupported_speculation_is_refused(speculative: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfigError, match=message):
        engine_config(tmp_path, here(speculative, tmp_path))


@pytest.mark.parametrize("speculative", [NGRAM, SUFFIX, CUSTOM], ids=str)
def test_weightless_method_needs_no_target(speculative: dict[str, Any], tmp_path: Path) -> None:
    """`EngineArgs` sets the target in it; a program that makes a `VllmConfig` by itself may leave it out."""
    upstream.apply()
    made = engine_config(tmp_path, None)
    alone = SpeculativeConfig(**speculative, num_speculative_tokens=3, max_model_len=TARGET_MAX_LEN)
    assert alone.target_model_config is None
    target = replace(made, speculative_config=alone)
    assert get_target_config(target) is made.model_config
    # Whose options are the target's: a drafter's copy of a configuration is not checked for them.
    target.additional_config = {"gaudi_spec": {"cpu_weights": "float16"}}
    with pytest.raises(UnsupportedConfigError, match="cpu_weights is for device cpu"):
        refusals.refuse_unsupported(target, backend_of("hpu"))
    too_long = SpeculativeConfig(**speculative, num_speculative_tokens=3, max_model_len=TARGET_MAX_LEN + 1)
    with pytest.raises(UnsupportedConfigError, match=f"is more than the target's {TARGET_MAX_LEN}"):
        replace(made, speculative_config=too_long)


def test_model_without_layers_for_the_method_is_refused(tmp_path: Path) -> None:
    upstream.apply()
    with pytest.raises(UnsupportedConfigError, match=rf"Method mtp finds nothing that drafts in {tmp_path} \(llama\);"):
        engine_config(tmp_path, dict(method="mtp", num_speculative_tokens=1))


@pytest.mark.parametrize(
    ("method", "architecture", "named"),
    [
        ("dflash", "DFlash2DraftModel", None),
        ("dflash", "LagunaForCausalLM", "DFlashLagunaForCausalLM"),
        ("dflash", "LiLiCorrDraftModel", "LiLiCorrDraftModel"),
        ("dspark", "Qwen3DSparkModel", None),
        ("dspark", "Gemma4DSparkModel", "Gemma4DSparkModel"),
        ("dspark", "K3DSparkModel", "K3DSparkModel"),
        ("dspark", "DSparkDraftModel", "DSparkDraftModel"),
    ],
)
def test_block_drafters_of_other_classes_are_refused(
    method: str, architecture: str, named: str | None, tmp_path: Path
) -> None:
    drafter = save_block_drafter(tmp_path / "drafter", architecture)
    speculative = dict(method=method, model=drafter)
    if named is None:
        engine_config(tmp_path, speculative)
        return
    message = rf"^{drafter} has the architecture {named}, which is not supported with method {method}; give a drafter"
    with pytest.raises(UnsupportedConfigError, match=message) as refused:
        engine_config(tmp_path, speculative)
    assert len(str(refused.value).splitlines()) == 1


# No drafter without a model can do these. Value, and the way out that the message names.
MODEL_ONLY = {
    "draft_sample_method": ("probabilistic", "greedy"),
    "draft_sample_method ": ("coupled", "greedy"),
    "rejection_sample_method": ("probabilistic", "strict, standard,? (or )?block"),
    "code_revision": ("main", "leave it out"),
    "disable_eagle_block_drop": (True, "leave it out"),
    "draft_load_config": ({"load_format": "dummy"}, "leave it out"),
    "draft_tensor_parallel_size": (1, "leave it out"),
    "dspark_draft_topk": (4, "leave it out"),
    "enforce_eager": (True, "leave it out"),
    "kv_cache_dtype": ("fp8", "leave it out"),
    "moe_backend": ("triton", "leave it out"),
    "quantization": ("fp8", "leave it out"),
    "revision": ("main", "leave it out"),
    "disable_padded_drafter_batch": (True, "leave it out"),
    "parallel_drafting": (True, "leave it out"),
    "use_local_argmax_reduction": (True, "leave it out"),
    **({"disable_lookahead_block_hashes": (True, "leave it out")} if FROM_0_33 else {}),
}


@pytest.mark.parametrize("drafter", [NGRAM, dict(method="ngram_gpu"), SUFFIX, CUSTOM], ids=str)
def test_drafter_model_options_are_refused_without_a_model(drafter: dict[str, Any], tmp_path: Path) -> None:
    for name, (value, way_out) in MODEL_ONLY.items():
        with pytest.raises(UnsupportedConfigError, match=f"^{name.strip()} .*{way_out}"):
            engine_config(tmp_path, drafter | {name.strip(): value})


def test_lists_of_options_match_vllm() -> None:
    """Each option of upstream's is used, refused by us, or refused by upstream: a new one has to be thought about."""
    refused_upstream = {"tensor_parallel_size", "use_heterogeneous_vocab"}
    filled_in = {"target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config"}
    used = {"method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "max_model_len"}
    used |= {"rejection_sample_method", "draft_sample_method", "enable_adaptive_verification"}
    used |= {"synthetic_acceptance_rates", "synthetic_acceptance_length"}
    used |= {"attention_backend"}  # a warning says that it is not
    new = {"disable_lookahead_block_hashes", "draft_lm_head_quantization", "xpress_topc"}
    if FROM_0_33:  # those of a rule that is refused
        refused_upstream |= {"fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"}
    ours = {*refusals.speculation._NO_EFFECT, *drafters._DRAFTER_MODEL_OPTIONS}
    of_methods = {name for method in METHODS.values() for name in method.options}
    listed = refused_upstream | filled_in | used | ours | of_methods
    assert {*SpeculativeConfig.__dataclass_fields__} == listed - (set() if FROM_0_33 else new)


def test_vllms_batch_invariance_variable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(UnsupportedConfigError, match="unset VLLM_BATCH_INVARIANT"):
        engine_config(tmp_path, None)


UNIVERSAL = DRAFT | dict(method="universal_draft")
RETOKENIZE = dict(universal_context="retokenize")


@pytest.mark.parametrize(
    ("speculative", "options", "message"),
    [
        (
            None,
            RETOKENIZE,
            "universal_context has no effect with no speculation; leave it out, or use method universal",
        ),
        (NGRAM, dict(universal_match="tli"), "universal_match has no effect with method ngram; leave it out"),
        (DRAFT, RETOKENIZE, "universal_context has no effect with method draft_model; leave it out"),
        (UNIVERSAL, dict(universal_match="slem"), "set universal_context in .*gaudi_spec to retokenize"),
        (UNIVERSAL, dict(universal_kv_len=64), "universal_kv_len is for universal_context retokenize; leave it out"),
        (
            UNIVERSAL | dict(draft_sample_method="coupled"),
            RETOKENIZE | dict(universal_match="slem"),
            "leave draft_sample_method and rejection_sample_method out",
        ),
        (
            UNIVERSAL | dict(rejection_sample_method="probabilistic"),
            RETOKENIZE | dict(universal_match="slem"),
            "leave draft_sample_method and rejection_sample_method out",
        ),
    ],
    ids=str,
)
def test_unsupported_universal_options_are_refused(
    speculative: dict[str, Any] | None, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = None if speculative is None else here(speculative, tmp_path)
    with pytest.raises(UnsupportedConfigError, match=message):
        engine_config(tmp_path, given, additional_config=dict(gaudi_spec=options))


@pytest.mark.parametrize(
    ("more", "options", "kv_len"),
    [
        ({}, RETOKENIZE, 2 * TARGET_MAX_LEN),
        ({}, RETOKENIZE | dict(universal_kv_len=100), 100),
        (dict(max_model_len=64), RETOKENIZE, 64),
        ({}, {}, 0),
    ],
)
def test_universal_kv_len_default_and_limit(
    more: dict[str, Any], options: dict[str, Any], kv_len: int, tmp_path: Path
) -> None:
    made = engine_config(tmp_path, here(UNIVERSAL | more, tmp_path), additional_config=dict(gaudi_spec=options))
    speculation = Speculation.from_vllm(made)
    assert speculation is not None
    assert speculation.universal_kv_len == kv_len


@pytest.mark.parametrize("overlap", [True, False])
def test_scheduler_is_one_of_ours(overlap: bool, tmp_path: Path) -> None:
    for speculative in (None, dict(method="ngram_gpu")):
        made = engine_config(tmp_path, speculative, async_scheduling=overlap)
        scheduler = made.scheduler_config.get_scheduler_cls()
        assert scheduler.__name__ == ("SpecAsyncScheduler" if overlap else "SpecScheduler")
        assert issubclass(scheduler, AsyncScheduler) == overlap
        replace(made, parallel_config=made.parallel_config)  # looked at again, it may keep the scheduler that it got


class Theirs(SpecScheduler):
    """A user's."""


@pytest.mark.parametrize("name", [Theirs, f"{__name__}.Theirs"])
def test_users_scheduler_must_derive_from_ours(name: Any, tmp_path: Path) -> None:
    more = dict(async_scheduling=False, scheduler_cls=name)
    made = engine_config(tmp_path, NGRAM, **more)
    assert made.scheduler_config.get_scheduler_cls().__name__ == "Theirs"
    for wrong, overlap in ((name, True), ("vllm.v1.core.sched.scheduler.Scheduler", False)):
        with pytest.raises(
            UnsupportedConfigError, match=r"does not derive from .*Scheduler, .*leave out --scheduler-cls"
        ):
            engine_config(tmp_path, dict(method="ngram_gpu"), scheduler_cls=wrong, async_scheduling=overlap)
    with pytest.raises(
        UnsupportedConfigError, match=r"somebody.Scheduler cannot be loaded: No module named 'somebody'; correct it"
    ):
        engine_config(tmp_path, None, scheduler_cls="somebody.Scheduler")


GEMMA4 = {
    "model.hf_config": SimpleNamespace(model_type="gemma4"),
    "model.hf_text_config": SimpleNamespace(use_bidirectional_attention="vision", sliding_window=512),
}
COMPILED = {"traits.captures": True, "traits.torch_device": SimpleNamespace(type="hpu"), "traits.mode": "compiled"}


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        ({}, None),
        ({"traits.captures": True}, "Images, audio and video are not served on a device in mode captured yet"),
        (
            COMPILED,
            "Images, audio and video are served on a device in mode compiled for Qwen2VLForConditionalGeneration",
        ),
        ({**COMPILED, "model.architectures": ["Qwen2VLForConditionalGeneration"]}, None),
        (
            {
                **COMPILED,
                "parallel.tensor_parallel_size": 2,
                "model.architectures": ["Qwen2VLForConditionalGeneration"],
            },
            "not supported on a device with --tensor-parallel-size",
        ),
        (
            {
                **COMPILED,
                "traits.mode": "lazy",
                "model.architectures": ["LlavaForConditionalGeneration"],
                "model.hf_config": SimpleNamespace(vision_config=SimpleNamespace(model_type="pixtral")),
                "model.model": "m",
            },
            "Images of m keep their sizes",
        ),
        ({"model.is_mm_prefix_lm": True}, "see each other in both directions are supported for gemma3"),
        ({"model.is_mm_prefix_lm": True, "model.hf_config": SimpleNamespace(model_type="gemma3")}, None),
        (
            {"model.hf_text_config": SimpleNamespace(use_bidirectional_attention="vision", sliding_window=512)},
            "see each other in both directions are supported for gemma3",
        ),
        (GEMMA4, None),
        (GEMMA4 | {"model.disable_sliding_window": True}, "--disable-sliding-window"),
        (
            GEMMA4 | {"media.mm_processor_kwargs": {"images_kwargs": {"max_soft_tokens": 1120}}},
            "longer than the sliding window of 512 tokens",
        ),
        ({"model.hf_text_config": SimpleNamespace(use_bidirectional_attention=None)}, None),
        ({"model.architectures": ["Gemma3nForConditionalGeneration"]}, "of paligemma are not supported yet"),
        ({"model.is_multimodal_raw_input_only_model": True}, "without tokens"),
        ({"model.runner_type": "pooling"}, "for pooling models"),
        ({"model.is_hybrid": True}, "beside recurrent layers"),
        ({"model.is_hybrid": True, "model.architectures": ["Qwen3_5ForConditionalGeneration"]}, None),
        ({"parallel.data_parallel_size": 2}, "--data-parallel-size"),
        ({"media.is_multimodal_pruning_enabled": lambda: True}, "--video-pruning-rate"),
        ({"media.enable_mm_embeds": True}, "--enable-mm-embeds"),
        ({"media.mm_encoder_only": True}, "--mm-encoder-only"),
        ({"asked.lora_config": object()}, "LoRA"),
    ],
    ids=lambda value: next(iter(value), "images") if isinstance(value, dict) else "",
)
def test_unsupported_images_are_refused(changed: dict[str, Any], refused: str | None) -> None:
    media = SimpleNamespace(
        is_multimodal_pruning_enabled=lambda: False,
        enable_mm_embeds=False,
        mm_encoder_only=False,
        mm_processor_kwargs=None,
    )
    model = SimpleNamespace(
        architecture="paligemma",
        architectures=["PaliGemmaForConditionalGeneration"],
        is_mm_prefix_lm=False,
        is_multimodal_raw_input_only_model=False,
        is_hybrid=False,
        disable_sliding_window=False,
        runner_type="generate",
        hf_config=SimpleNamespace(model_type="paligemma"),
        hf_text_config=SimpleNamespace(),
        get_multimodal_config=lambda: media,
    )
    parallel = SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1)
    traits = SimpleNamespace(captures=False, name="a device", mode="captured", torch_device=torch.device("cuda"))
    asked: Any = SimpleNamespace(model_config=model, lora_config=None, parallel_config=parallel)
    parts = {"traits": traits, "model": model, "media": media, "asked": asked, "parallel": parallel}
    for path, value in changed.items():
        part, _, name = path.partition(".")
        setattr(parts[part], name, value)
    device: Any = SimpleNamespace(traits=traits)
    found = list(refusals.models._multimodal_refusals(asked, device))
    assert len(found) == (refused is not None)
    assert refused is None or refused in found[0]


@pytest.mark.parametrize(
    ("options", "widths"),
    [
        (dict(num_speculative_tokens=7), [7]),
        (dict(num_speculative_tokens=7, enable_adaptive_verification=True), [1, 3, 7]),
        (dict(num_speculative_tokens=1, enable_adaptive_verification=True), [1]),
        # No batch is that large.
        (dict(num_speculative_tokens=3, num_speculative_tokens_per_batch_size=[[1, 9999, 3], [10000, 10000, 2]]), [3]),
        (
            dict(num_speculative_tokens=5, num_speculative_tokens_per_batch_size=[[1, 2, 5], [3, 8, 4], [9, 9, 0]]),
            [4, 5],
        ),
    ],
    ids=str,
)
def test_steps_have_shapes_for_each_scheduled_number_of_drafts(
    options: dict[str, Any], widths: list[int], tmp_path: Path
) -> None:
    speculation = Speculation.from_vllm(engine_config(tmp_path, NGRAM | options))
    assert speculation is not None
    assert [*speculation.widths] == widths


def test_audits_without_speculation_are_refused(tmp_path: Path) -> None:
    more = dict(additional_config={"gaudi_spec": {"audit_every": 10}})
    engine_config(tmp_path, NGRAM, **more)
    with pytest.raises(UnsupportedConfigError, match=r"audit_every in .* has no effect without speculation"):
        engine_config(tmp_path, None, **more)


def test_adaptive_verification_of_data_parallel_experts_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = engine_config(tmp_path, NGRAM | dict(enable_adaptive_verification=True))
    assert not [*speculation.speculation_refusals(made, load_backend())]
    monkeypatch.setattr(speculation, "ranks_in_step", lambda _: 2)
    (reason,) = speculation.speculation_refusals(made, load_backend())
    assert reason.startswith(
        "enable_adaptive_verification is not supported with data parallelism of a mixture of experts"
    )


def test_audits_of_data_parallel_experts_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = engine_config(tmp_path, NGRAM, additional_config={"gaudi_spec": {"audit_every": 10}})
    monkeypatch.setattr(speculation, "ranks_in_step", lambda _: 2)
    (reason,) = speculation._audit_refusals(made, Options.from_vllm(made))
    assert reason.endswith("is not supported with data parallelism of a mixture of experts; leave it out.")


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ("hpu", {}, "cpu_weights is for device cpu, and this is hpu; leave it out"),
        ("cpu", {"dtype": "bfloat16"}, "cpu_weights is for models that run in float32; .*--dtype float32"),
        ("cpu", {}, None),
    ],
)
def test_unsupported_weight_formats_are_refused(
    device: str, options: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    made = engine_config(tmp_path, None, **options)
    made.additional_config = {"gaudi_spec": {"cpu_weights": "float16"}}
    with refused_with(message):
        refusals.refuse_unsupported(made, backend_of(device))


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [
        ("cpu", {}, None),
        ("hpu", {}, None),
        ("cuda", {}, "QUANT_CONFIG is for a Gaudi, the emulated one, and the CPU, and this is cuda; unset it"),
        ("cpu", {"cpu_weights": "float16"}, "leave additional_config.gaudi_spec.cpu_weights out"),
        ("cpu", {"draft_quant_config": "FILE"}, "draft_quant_config is for drafters that are models; leave it out"),
        ("cpu", {"fp8_range": "gaudi1"}, "fp8_range must be gaudi2 or gaudi3, got 'gaudi1'"),
    ],
    ids=str,
)
def test_unsupported_quantization_is_refused(
    device: str, options: dict[str, str], message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "quant.json"
    path.write_text('{"mode": "MEASURE", "dump_stats_path": "x"}')
    made = engine_config(tmp_path, None, worker_extension_cls="the.calibration")
    made.additional_config = {"gaudi_spec": {k: v.replace("FILE", str(path)) for k, v in options.items()}}
    monkeypatch.setenv("QUANT_CONFIG", str(path))
    with refused_with(message):
        refusals.refuse_unsupported(made, backend_of(device))


@pytest.mark.parametrize(
    ("captures", "options", "message"),
    [
        (False, {}, None),
        (True, {}, "Pooling models are not served on hpu yet; set VGS_DEVICE=cpu"),
        (False, {"hf_overrides": {"is_causal": False}}, None),
    ],
    ids=str,
)
def test_v13_pooling_models_that_are_not_served_are_refused(
    captures: bool, options: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    backend = backend_of("hpu" if captures else "cpu", captures=captures)
    with refused_with(message):
        refusals.refuse_unsupported(engine_config(tmp_path, None, runner="pooling", **options), backend)


@pytest.mark.parametrize(
    ("changed", "option"),
    [
        ({}, None),
        ({"long_prefill_token_threshold": 64}, "--long-prefill-token-threshold"),
        ({"max_num_scheduled_tokens": 511}, "--max-num-scheduled-tokens"),
        ({"max_num_scheduled_tokens": 512}, None),
        ({"max_num_batched_tokens": 511}, "set --max-num-batched-tokens to 512 or more"),
    ],
    ids=str,
)
def test_options_that_split_encoder_prompts_are_refused(changed: dict[str, Any], option: str | None) -> None:
    scheduler = dict(long_prefill_token_threshold=0, max_num_scheduled_tokens=None, max_num_batched_tokens=512)
    made: Any = SimpleNamespace(
        model_config=SimpleNamespace(model="m", max_model_len=512),
        scheduler_config=SimpleNamespace(**(scheduler | changed)),
    )
    found = list(models._whole_prompt_refusals(made))
    assert len(found) == (option is not None)
    assert option is None or option in found[0]


def test_a24_models_that_select_keys(tmp_path: Path) -> None:
    """Of classes whose indexers were compared, and without what has no form for an indexer's key."""

    def make(architecture: str, **options: Any) -> VllmConfig:
        latent = dict(model_type="deepseek_v3", kv_lora_rank=16, index_topk=8, architectures=[architecture])
        return engine_config(tmp_path, None, hf_overrides=latent, **options)

    made = make("DeepseekV32ForCausalLM")
    for selects_keys in (True, False):
        backend = backend_of("npu")
        backend.traits = dataclasses.replace(backend.traits, selects_keys=selects_keys)
        assert bool(list(models._selection_refusals(made, backend))) is not selects_keys
    with pytest.raises(UnsupportedConfigError, match=r"selects keys by an indexer \(index_topk\), which is supported"):
        make("DeepseekV2ForCausalLM")
    with pytest.raises(UnsupportedConfigError, match="use --kv-cache-dtype auto"):
        make("DeepseekV32ForCausalLM", kv_cache_dtype="fp8")


@pytest.mark.parametrize("architecture", ["MiniCPM3ForCausalLM", "Gemma3nForCausalLM", "DeepseekV3ForCausalLM"])
def test_l06_models_that_write_through_views_are_refused_where_no_graph_takes_it(architecture: str) -> None:
    """DeepSeek's attention without latent KV does; MiniCPM3 and Gemma 3n are patched."""
    is_deepseek = architecture.startswith("Deepseek")
    for mode, use_mla in itertools.product(("lazy", "compiled"), (True, False)):
        backend = backend_of("hpu", captures=True)
        traits = dataclasses.replace(backend.traits, mode=mode, updates_views=mode == "compiled")
        model: Any = SimpleNamespace(
            model="M", architecture=architecture, is_deepseek_mla=is_deepseek, use_mla=is_deepseek and use_mla
        )
        model.using_transformers_backend = lambda: False
        found = list(models._graph_refusals(model, traits))
        assert len(found) == (is_deepseek and not use_mla and mode == "lazy")
        for line in found:
            assert line.endswith(
                "which graphs of hpu in mode lazy do not take; leave VLLM_MLA_DISABLE unset, or set PT_HPU_LAZY_MODE=0."
            )


@pytest.mark.parametrize("is_moe", [True, False])
@pytest.mark.parametrize("backend_is_transformers", [True, False])
def test_l06_experts_of_the_transformers_backend_are_refused(is_moe: bool, backend_is_transformers: bool) -> None:
    model: Any = SimpleNamespace(
        model="M",
        architecture="A",
        is_deepseek_mla=False,
        is_moe=is_moe,
        using_transformers_backend=lambda: backend_is_transformers,
    )
    traits = dataclasses.replace(backend_of("hpu", captures=True).traits, mode="lazy", updates_views=False)
    found = list(models._graph_refusals(model, traits))
    assert len(found) == (is_moe and backend_is_transformers)
    assert all(line.endswith("set PT_HPU_LAZY_MODE=0.") for line in found)
    assert not list(models._graph_refusals(model, dataclasses.replace(traits, updates_views=True)))


def test_gemma3n_without_timm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_PACKAGES", {"LlamaForCausalLM": "no_package_of_this_name"})
    line = r"\(LlamaForCausalLM\) needs the package no_package_of_this_name, for text too; run `pip install no_pack"
    with pytest.raises(UnsupportedConfigError, match=line):
        refusals.refuse_unsupported(engine_config(tmp_path, None), backend_of("cpu"))
    monkeypatch.setattr(models, "_PACKAGES", {"LlamaForCausalLM": "torch"})
    refusals.refuse_unsupported(engine_config(tmp_path, None), backend_of("cpu"))


@pytest.mark.parametrize(("threshold", "is_refused"), [(0, False), (1, True), (3, True), (4, False)])
def test_prefill_threshold_below_a_verify_step_is_refused(threshold: int, is_refused: bool, tmp_path: Path) -> None:
    ngram = dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=2)
    made, plain = (engine_config(tmp_path, spec_config) for spec_config in (ngram, None))
    for one in (made, plain):
        one.scheduler_config.long_prefill_token_threshold = threshold
    refusals.refuse_unsupported(plain, backend_of("cpu"))
    if not is_refused:
        refusals.refuse_unsupported(made, backend_of("cpu"))
        return
    with pytest.raises(UnsupportedConfigError, match=r"--long-prefill-token-threshold .* set it to 4 or more"):
        refusals.refuse_unsupported(made, backend_of("cpu"))


def test_recovery_of_failed_engines_is_refused(tmp_path: Path) -> None:
    """vLLM takes the option from data-parallel ranks of experts alone. An engine whose step failed would wait for a
    command that workers here do not know, and its clients with it."""
    made = engine_config(tmp_path, None)
    refusals.refuse_unsupported(made, backend_of("cpu"))
    made.parallel_config.enable_fault_tolerance = True
    with pytest.raises(UnsupportedConfigError, match="--enable-fault-tolerance is not supported"):
        refusals.refuse_unsupported(made, backend_of("cpu"))
    assert not hasattr(Worker, "handle_ft_command")


@pytest.mark.parametrize(
    ("parts", "attn_res_block_size", "named"),
    [
        ({}, None, None),
        (dict(use_full_rank_gate=True), None, "use_full_rank_gate"),
        (dict(gate_lower_bound=-5.0), None, "gate_lower_bound"),
        ({}, 4, "attn_res_block_size"),
    ],
)
def test_kimi_k3_is_refused(parts: dict[str, Any], attn_res_block_size: int | None, named: str | None) -> None:
    """Its text shares class and configuration with Kimi Linear."""
    config = SimpleNamespace(linear_attn_config=parts, attn_res_block_size=attn_res_block_size)
    model: Any = SimpleNamespace(model="m", architectures=["KimiLinearForCausalLM"], hf_text_config=config)
    found = list(models._kimi_refusals(model))
    assert len(found) == (named is not None)
    assert all(f"m has {named}, as Kimi K3" in line for line in found)


@pytest.mark.parametrize(
    ("device", "mode", "architecture", "refused"),
    [
        ("cpu", "eager", "Zamba2ForCausalLM", False),
        ("hpu", "lazy", "Zamba2ForCausalLM", False),
        ("hpu", "lazy", "KimiLinearForCausalLM", False),
        ("hpu", "lazy", "NemotronHPuzzleForCausalLM", True),
        ("hpu", "compiled", "NemotronHForCausalLM", False),
        ("hpu", "compiled", "Mamba2ForCausalLM", True),
        ("npu", "captured", "Qwen3NextForCausalLM", False),
        ("npu", "captured", "NemotronHForCausalLM", False),
        ("npu", "captured", "Zamba2ForCausalLM", True),
        ("cuda", "captured", "Qwen3NextForCausalLM", True),
    ],
)
def test_recurrent_layers_never_compared_in_graphs_are_refused(
    device: str, mode: str, architecture: str, refused: bool
) -> None:
    backend = backend_of(device, captures=mode != "eager")
    at = SimpleNamespace(type=device)  # torch knows no NPU here
    backend.traits = dataclasses.replace(backend.traits, mode=mode, torch_device=at)
    made: Any = SimpleNamespace(
        model_config=SimpleNamespace(model="m", architectures=[architecture], is_attention_free=False),
        cache_config=SimpleNamespace(use_replayssm=False),
        scheduler_config=None,
        lora_config=None,
    )
    found = list(models._state_refusals(made, backend))
    assert len(found) == refused
    assert all("m has recurrent layers, which were not compared on" in line for line in found)


def test_fp8_range_without_quantization_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfigError, match="fp8_range is for QUANT_CONFIG and --kv-cache-dtype fp8; leave"):
        engine_config(tmp_path, None, additional_config={"gaudi_spec": {"fp8_range": "gaudi3"}})
    engine_config(tmp_path, None, kv_cache_dtype="fp8", additional_config={"gaudi_spec": {"fp8_range": "gaudi3"}})


def test_measuring_with_fp8_kv_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "quant.json"
    monkeypatch.setenv("QUANT_CONFIG", str(path))
    path.write_text(json.dumps({"mode": "MEASURE", "dump_stats_path": str(tmp_path / "inc")}))
    with pytest.raises(
        UnsupportedConfigError, match="QUANT_CONFIG measures KV in the model's dtype; leave out --kv-cache-dtype"
    ):
        engine_config(tmp_path, None, kv_cache_dtype="fp8_inc")


def test_measuring_outside_of_the_calibration_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "quant.json"
    monkeypatch.setenv("QUANT_CONFIG", str(path))
    path.write_text(json.dumps({"mode": "MEASURE", "dump_stats_path": str(tmp_path / "inc")}))
    with pytest.raises(UnsupportedConfigError, match="mode MEASURE is for calibration/step_3"):
        engine_config(tmp_path, None)
    engine_config(tmp_path, None, worker_extension_cls="fp8_calibration.observers.Extension")


def test_adapters_with_quant_config_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "quant.json"
    monkeypatch.setenv("QUANT_CONFIG", str(path))
    path.write_text(json.dumps({"mode": "MEASURE", "dump_stats_path": str(tmp_path / "inc")}))
    with pytest.raises(UnsupportedConfigError, match="LoRA adapters are not supported with QUANT_CONFIG"):
        engine_config(tmp_path, None, enable_lora=True, worker_extension_cls="the.calibration")


def test_custom_logits_processors_are_refused_with_speculation(tmp_path: Path) -> None:
    processor = "vllm.v1.sample.logits_processor:MinPLogitsProcessor"
    way_out = "; leave out --logits-processors, or --speculative-config"
    with pytest.raises(UnsupportedConfigError, match=f"^{STR_SPEC_DEC_REJECTS_LOGITSPROCS[:-1]}{way_out}"):
        engine_config(tmp_path, NGRAM, logits_processors=[processor])


ON_HOST = {
    "ngram": (NGRAM, {}),
    "suffix": (SUFFIX, {}),
    "custom_class": (CUSTOM, {}),
    "retokenize": (UNIVERSAL, RETOKENIZE),
    "slem": (UNIVERSAL, RETOKENIZE | dict(universal_match="slem")),
}


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("name", ON_HOST)
def test_host_drafters_disable_async_scheduling_and_log_it_once(
    name: str, asked: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(platform.logger, "info", lambda text, *values: said.append(text % values))
    speculative, options = ON_HOST[name]
    more = dict(additional_config=dict(gaudi_spec=options), async_scheduling=asked)
    made = engine_config(tmp_path, here(speculative, tmp_path), **more)
    replace(made, parallel_config=made.parallel_config)  # as for a drafter that is loaded with a copy
    assert made.scheduler_config.async_scheduling is False
    drafter = "universal_context retokenize" if options else f"method {name}"
    why = f"{drafter} drafts on the host, from what it has read of a step"
    assert said == ([] if asked is False else [f"Async scheduling is disabled: {why}."])


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("speculative", [None, dict(method="ngram_gpu"), DRAFT, UNIVERSAL], ids=str)
def test_async_scheduling_is_on_unless_disabled(
    speculative: dict[str, Any] | None, asked: bool | None, tmp_path: Path
) -> None:
    given = speculative and here(speculative, tmp_path)
    made = engine_config(tmp_path, given, async_scheduling=asked)
    assert made.scheduler_config.async_scheduling is (asked is not False)


def test_custom_logits_processors_disable_async_scheduling(tmp_path: Path) -> None:
    processor = "vllm.v1.sample.logits_processor:MinPLogitsProcessor"
    made = engine_config(tmp_path, None, logits_processors=[processor], async_scheduling=True)
    assert made.scheduler_config.async_scheduling is False


@pytest.mark.parametrize(("captures", "method"), [(False, "ngram"), (True, "ngram_gpu")])
def test_device_that_captures_graphs_looks_ngrams_up_itself(
    captures: bool, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = load_backend()
    traits = dataclasses.replace(cpu.traits, captures=captures)
    monkeypatch.setattr(platform, "load_backend", lambda: dataclasses.replace(cpu, traits=traits))
    for asked in (NGRAM, dict(model="[ngram]")):
        made = engine_config(tmp_path, asked)
        assert made.speculative_config is not None
        assert made.speculative_config.method == method
        assert bool(made.scheduler_config.async_scheduling) == captures


@pytest.mark.parametrize(("wanted", "fine"), [(0, True), (3, True), (-1, False), (True, False), (1.0, False)])
def test_requested_number_of_drafts_is_checked(wanted: Any, fine: bool) -> None:
    reason = check_request(SamplingParams(extra_args={"num_speculative_tokens": wanted}))
    assert (reason is None) == fine
    if reason is not None:
        assert (
            f"num_speculative_tokens in vllm_xargs (extra_args) must be an integer, 0 or more, got {wanted}" in reason
        )
    assert check_request(SamplingParams(extra_args={"other": wanted})) is None


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(logit_bias=dict.fromkeys(range(1024), 1.0)), None),
        (SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)), "make 1025 logit edits; use at most 1024 "),
        (SamplingParams(stop_token_ids=list(range(1025))), None),
        (SamplingParams(min_tokens=3, stop_token_ids=list(range(1025))), "make 1025 logit edits"),
        (SamplingParams(bad_words=["w" * 8192, "x" * 8192]), None),
        (SamplingParams(bad_words=["w" * 8192, "x" * 8193]), "have 16385 characters; use at most 16384 "),
    ],
)
def test_too_many_logit_edits_are_refused(params: SamplingParams, words: str | None) -> None:
    reason = check_request(params)
    assert reason is None if words is None else words in str(reason)


HALF = "\ud800"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (dict(stop=["a", HALF]), "stop"),
        (dict(bad_words=["a" + HALF]), "bad_words"),
        (dict(extra_args={"other": [1, HALF]}), "extra_args"),
        (dict(extra_args={HALF: 1}), "extra_args"),
        (dict(structured_outputs=StructuredOutputsParams(choice=["a", HALF])), "structured_outputs"),
        (dict(structured_outputs=StructuredOutputsParams(json={"enum": [HALF]})), "structured_outputs"),
    ],
)
def test_lone_surrogates_are_refused(given: dict[str, Any], name: str) -> None:
    reason = check_request(SamplingParams(**given))
    assert reason is not None
    assert reason.startswith(f"{name} has a lone surrogate")
    assert reason.isascii()
    with pytest.raises(UnicodeEncodeError):  # when this passes, vLLM's own way to the engine has become another
        MsgpackEncoder().encode(SamplingParams(**given))
    assert check_request(SamplingParams(), prompt=dict(cache_salt=HALF))
    assert check_request(SamplingParams(stop=["\U00010000"], bad_words=["é"])) is None


def test_integers_beyond_64_bits_are_refused() -> None:
    """Upstream looks at those of `extra_args` itself."""
    params = SamplingParams(stream_interval=2**64)
    reason = check_request(params)
    assert reason == "stream_interval has an integer of more than 64 bits; use a smaller one."
    with pytest.raises(OverflowError):
        MsgpackEncoder().encode(params)
    assert check_request(SamplingParams(stream_interval=2**63)) is None
    assert check_request(SamplingParams(extra_args={"mine": object()})) is None
