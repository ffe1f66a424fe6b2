"""Mistakes in our own options stop the start-up with the option's name."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PretrainedConfig
from vllm import SamplingParams
from vllm.config import KVTransferConfig, SpeculativeConfig, VllmConfig
from vllm.config.utils import replace
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.serial_utils import MsgpackEncoder

from tests.full_tests.tiny_models import common
from tests.support.processes import run_code
from tests.support.releases import only_0_32
from vllm_gaudi_spec import config, device_table, environment, refusals, upstream
from vllm_gaudi_spec.config import LM_HEAD_QUANTIZATION, Options, Speculation, UnsupportedConfigError, get_target_config
from vllm_gaudi_spec.device_table import load_backend
from vllm_gaudi_spec.devices.ascend import compared as ascend
from vllm_gaudi_spec.devices.base import DeviceTraits
from vllm_gaudi_spec.devices.hpu import compared as hpu
from vllm_gaudi_spec.methods import METHODS
from vllm_gaudi_spec.platforms import base as platform
from vllm_gaudi_spec.quantization.fp8 import HostArithmetic
from vllm_gaudi_spec.refusals import drafters, models, speculation
from vllm_gaudi_spec.refusals.requests import check_request
from vllm_gaudi_spec.scheduling.scheduler import SpecAsyncScheduler, SpecScheduler
from vllm_gaudi_spec.upstream.release import FROM_0_33


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
        ({"prefill_buckets": [0]}, "prefill_buckets must be"),
        ({"warmup_tokens": -16}, "warmup_tokens must be an integer of -1 or more, got -16"),
        ({"universal_context": "text"}, "universal_context must be map or retokenize, got 'text'"),
        ({"state_snapshots": 0}, "state_snapshots must be an integer of 1 or more"),
        ({"cpu_weights": "int4"}, "cpu_weights must be"),
        ("text", "gaudi_spec must be an object, got 'text'"),
        ({"audit_every": True}, "audit_every must be an integer of 0 or more, got True"),
        ({"batch_buckets": [True]}, "batch_buckets must be"),
        ({"batch_buckets": "8" * 10**6}, "batch_buckets must be"),
        ({"universal_match": {"a": {"b": []}}}, "universal_match must be"),
        ({"universal_kv_len": -(10**4000)}, "universal_kv_len must be"),
        ({"universal_kv_len": float("nan")}, "universal_kv_len must be"),
        ({"x\ny" * 10**5: 1}, "unknown option"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_options_are_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=message) as refused:
        Options.from_vllm(vllm_config({"gaudi_spec": options}))
    assert len(str(refused.value)) < 1000
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("text", "additional_config must be an object"),
        ({"GAUDI-spec": {}}, r"additional_config has no 'GAUDI-spec'; did you mean gaudi_spec\?"),
        ({"audit_every": 1}, "did you mean additional_config.gaudi_spec.audit_every"),
    ],
)
def test_misplaced_options_are_refused(given: Any, message: str) -> None:
    with pytest.raises(UnsupportedConfigError, match=message):
        Options.from_vllm(vllm_config(given))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", r"are pickles \(pytorch_model\.bin\).*safetensors"),
        ("consolidated.00.pth", "are pickles"),
        ("medusa_lm_head.pt", "are pickles"),
        ("model.ckpt", "are pickles"),
        ("model-Q4_K_M.gguf", r"are in GGUF \(model-Q4_K_M\.gguf\), .*bfloat16"),
    ],
)
@pytest.mark.parametrize("of_drafter", [True, False], ids=["drafter", "target"])
def test_unsupported_weight_files_are_refused(file: str, message: str, of_drafter: bool, tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder in (target, draft):
        engine_config(folder, None)
    (draft if of_drafter else target).joinpath(file).write_bytes(b"cposix\nsystem\n(S'exit 1'\ntR.")
    speculative = dict(method="draft_model", model=str(draft))
    with pytest.raises(UnsupportedConfigError, match=message):
        engine_config(target, speculative)
    save_file({"weight": torch.ones(1)}, (draft if of_drafter else target) / "model.safetensors")
    engine_config(target, speculative)


def index(folder: Path, kind: str) -> None:
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
    with refused_with(None if is_whole else "which is missing"):
        engine_config(tmp_path, None, load_format=load_format)


def test_unknown_device_is_refused_by_vllm_itself() -> None:
    """vLLM swallows what a platform plugin raises and would go on with upstream's platform."""
    code = "from vllm.platforms import current_platform; current_platform.pre_register_and_update()"
    environment = os.environ | {"VGS_DEVICE": "tpu"}
    result = run_code(code, env=environment)
    assert result.returncode != 0
    assert (
        "VGS_DEVICE=tpu is not available; use one of cpu, hpu, hpu-emulated, ascend, ascend-emulated, cuda."
        in result.stderr.strip().splitlines()[-1]
    )


@pytest.mark.parametrize(("device", "default"), [("cpu", False), ("hpu-emulated", None)])
def test_servers_schedule_synchronously_by_default_on_a_cpu(device: str, default: bool | None) -> None:
    code = f"""
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
found = [parser.parse_args(words).async_scheduling for words in ([], ["--async-scheduling"])]
assert found == [{default}, True], found
"""
    result = run_code(code, env=os.environ | {"VGS_DEVICE": device})
    assert result.returncode == 0, result.stderr


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
    monkeypatch.setattr(device_table, "entry_points", lambda group: [Plugin])
    device_table.other_platform_plugins.cache_clear()
    try:
        assert device_table.choose_device() is None
        monkeypatch.setenv("VGS_DEVICE", "cpu")
        assert device_table.choose_device() == "cpu"
        monkeypatch.delenv("VGS_DEVICE")
        monkeypatch.setenv("VLLM_PLUGINS", "gaudi_spec")
        device_table.other_platform_plugins.cache_clear()
        assert device_table.choose_device() == "cpu"
    finally:
        device_table.other_platform_plugins.cache_clear()


TARGET_MAX_LEN = 512


def engine_config(
    folder: Path, speculative: dict[str, Any] | None, model: PretrainedConfig | None = None, **options: Any
) -> VllmConfig:
    """What the front end makes of a speculative configuration. No weights: none are looked for."""
    (model or LlamaConfig(**common(), architectures=["LlamaForCausalLM"])).save_pretrained(folder)
    defaults: dict[str, Any] = dict(dtype="float32", max_model_len=TARGET_MAX_LEN, skip_tokenizer_init=True)
    if speculative is not None:
        given = {"num_speculative_tokens": 3} | speculative
        speculative = {name: value for name, value in given.items() if value is not None}
    return EngineArgs(str(folder), speculative_config=speculative, **(defaults | options)).create_engine_config()


def save_block_drafter(folder: Path, architecture: str) -> str:
    """Write a configuration, without weights, of a drafter for the target of `engine_config`."""
    fields = dict(architectures=[architecture], target_layer_ids=[0], mask_token_id=0, markov_rank=8, block_size=4)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LlamaConfig(**common()).to_dict() | fields))
    return str(folder)


def refused_with(message: str | None) -> AbstractContextManager[Any]:
    """Expect a refusal, or none without a message."""
    return nullcontext() if message is None else pytest.raises(UnsupportedConfigError, match=message)


def backend_of(device: str, *, captures: bool = False) -> Any:
    traits = DeviceTraits(
        name=device,
        mode="",
        torch_device=torch.device("cpu"),
        captures=captures,
        takes_cpu_weights=device == "cpu",
        takes_quant_config=device in ("cpu", "hpu"),
        simulates_quantization=device == "cpu",
        runs_stages=device == "cpu",
    )
    weights = SimpleNamespace(missing_kernel=lambda *_: None, fp8_logits=None if device == "cpu" else HostArithmetic)
    return SimpleNamespace(traits=traits, weights=weights)


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
        *(dict(model=name) for name in ("ngram", "[ngram]", "package.Class")),
        dict(method="ngram_gpu", model="ngram"),
        CUSTOM,
        NGRAM | dict(prompt_lookup_min=2, prompt_lookup_max=4),
        SUFFIX | dict(suffix_decoding_max_tree_depth=8, suffix_decoding_min_token_prob=0.0),
        NGRAM | dict(num_speculative_tokens=config.MAX_DRAFTS, max_model_len=TARGET_MAX_LEN),
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


UNIVERSAL = DRAFT | dict(method="universal_draft")
RETOKENIZE = dict(universal_context="retokenize")
SLEM = RETOKENIZE | dict(universal_match="slem")
FP8_MATRIX = dict(draft_lm_head_quantization="fp8")
ON_MATRIX = {f"speculative_config.{LM_HEAD_QUANTIZATION}": "fp8"}
ASSISTANT = {"speculative_config.method": "mtp", "speculative_config.use_gemma4_mtp": lambda: True}
EXTENSION = dict(worker_extension_cls="the.calibration")
PROCESSORS = dict(logits_processors=["vllm.v1.sample.logits_processor:MinPLogitsProcessor"])
WHOLE_PROMPTS = dict(enable_chunked_prefill=False, max_num_batched_tokens=2048)


def connecting(
    names: str | tuple[str, ...], *, recomputes: bool = False, has_folder: bool = True, **extra: Any
) -> dict[str, Any]:
    """Options that connect by this connector, or by several."""
    folder = dict(kv_connector_extra_config={"shared_storage_path": "kv"} | extra) if has_folder else {}
    config: dict[str, Any] = dict(kv_connector=names, **folder)
    if isinstance(names, tuple):
        parts = [dict(kv_connector=name, kv_role="kv_both", **folder) for name in names]
        config = dict(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": parts})
    policy = "recompute" if recomputes else "fail"
    return dict(kv_transfer_config=KVTransferConfig(**config, kv_role="kv_both", kv_load_failure_policy=policy))


STAGES: dict[str, Any] = dict(pipeline_parallel_size=2)
THRESHOLD = "scheduler_config.long_prefill_token_threshold"

# Why a configuration is refused, or None, and what it differs in: its `speculative` configuration, `options` of vLLM,
# options of `ours`, the `device`, the mode of QUANT_CONFIG (`quant`), and fields that are `changed` afterwards.
REFUSED: list[Any] = [
    # The speculative configuration
    ("extract_hidden_states is not supported yet", dict(speculative=dict(method="extract_hidden_states"))),
    ("found no layers for drafting in .* \\(llama\\)", dict(speculative=dict(method="mtp", num_speculative_tokens=1))),
    ("17 drafts .* set num_speculative_tokens", dict(speculative=NGRAM | dict(num_speculative_tokens=17))),
    ("max_model_len 513 .*; use less", dict(speculative=NGRAM | dict(max_model_len=TARGET_MAX_LEN + 1))),
    ("^model has no effect with method ngram", dict(speculative=NGRAM | dict(model="some/model"))),
    ("prompt_lookup_min has no effect with", dict(speculative=SUFFIX | dict(prompt_lookup_min=4))),
    ("suffix_decoding_max_tree_depth has no", dict(speculative=NGRAM | dict(suffix_decoding_max_tree_depth=8))),
    pytest.param(
        "disable_eagle_block_drop has no effect with .* medusa",
        dict(speculative=dict(method="medusa", disable_eagle_block_drop=True)),
        marks=only_0_32,
    ),
    ("suffix_decoding_min_token_prob has no", dict(speculative=CUSTOM | dict(suffix_decoding_min_token_prob=0.0))),
    (
        "rejection_sample_method probabilistic keeps .* use strict with coupled",
        dict(speculative=DRAFT | dict(rejection_sample_method="probabilistic", draft_sample_method="coupled")),
    ),
    ("leave out --logits-processors, or --speculative-config", dict(speculative=NGRAM, options=PROCESSORS)),
    # The output matrix in FP8
    ("draft_lm_head_quantization is not supported .* ngram; leave it out", dict(speculative=NGRAM | FP8_MATRIX)),
    ("draft_lm_head_quantization is not supported .* suffix; leave it out", dict(speculative=SUFFIX | FP8_MATRIX)),
    pytest.param(
        "draft_lm_head_quantization is not supported .* medusa; leave it out",
        dict(speculative=dict(method="medusa") | FP8_MATRIX),
        marks=only_0_32,
    ),
    (
        "draft_lm_head_quantization is not supported .* mtp; leave it out",
        dict(speculative=DRAFT, changed=ON_MATRIX | ASSISTANT, device="hpu"),
    ),
    (
        "draft_lm_head_quantization is nvfp4, but only fp8",
        dict(speculative=DRAFT | dict(draft_lm_head_quantization="nvfp4")),
    ),
    ("draft_lm_head_quantization needs FP8 .* cpu does not", dict(speculative=DRAFT | FP8_MATRIX)),
    (None, dict(speculative=DRAFT, changed=ON_MATRIX, device="hpu")),
    (None, dict(speculative=UNIVERSAL, changed=ON_MATRIX, device="hpu", options=dict(dtype="bfloat16"))),
    (
        "draft_lm_head_quantization does not work with float16",
        dict(speculative=DRAFT, changed=ON_MATRIX, device="hpu", options=dict(dtype="float16")),
    ),
    (
        "draft_lm_head_quantization does not work with a head_dtype other than dtype",
        dict(
            speculative=dict(method="eagle"),
            changed=ON_MATRIX,
            device="hpu",
            options=dict(dtype="bfloat16", hf_overrides=dict(head_dtype="float32")),
        ),
    ),
    # Universal drafting
    ("universal_context has no effect with no speculation", dict(ours=RETOKENIZE)),
    ("universal_match has no effect with method ngram", dict(speculative=NGRAM, ours=dict(universal_match="tli"))),
    ("universal_context has no effect with method draft_model", dict(speculative=DRAFT, ours=RETOKENIZE)),
    ("set universal_context in .* to retokenize", dict(speculative=UNIVERSAL, ours=dict(universal_match="slem"))),
    ("universal_kv_len has an effect only with", dict(speculative=UNIVERSAL, ours=dict(universal_kv_len=64))),
    ("leave draft_sample_method", dict(speculative=UNIVERSAL | dict(draft_sample_method="coupled"), ours=SLEM)),
    (
        "leave draft_sample_method",
        dict(speculative=UNIVERSAL | dict(rejection_sample_method="probabilistic"), ours=SLEM),
    ),
    # Other options of ours
    ("batch_buckets goes up to .*leave out the larger ones", dict(ours=dict(batch_buckets=[4096, 2**40]))),
    ("prefill_buckets goes up to", dict(ours=dict(prefill_buckets=[4096, 2**40]))),
    (None, dict(speculative=NGRAM, ours=dict(audit_every=10))),
    ("audit_every in .* has no effect without speculation", dict(ours=dict(audit_every=10))),
    (None, dict(ours=dict(cpu_weights="float16"))),
    ("cpu_weights is for device cpu, and this is hpu", dict(ours=dict(cpu_weights="float16"), device="hpu")),
    ("cpu_weights is for .* --dtype float32", dict(ours=dict(cpu_weights="float16"), options=dict(dtype="bfloat16"))),
    # Quantization
    *((None, dict(quant="MEASURE", options=EXTENSION, device=device)) for device in ("cpu", "hpu")),
    ("QUANT_CONFIG is not supported on device cuda; unset it", dict(quant="MEASURE", options=EXTENSION, device="cuda")),
    ("leave .*cpu_weights out", dict(quant="MEASURE", options=EXTENSION, ours=dict(cpu_weights="float16"))),
    ("draft_quant_config is for", dict(quant="MEASURE", options=EXTENSION, ours=dict(draft_quant_config="FILE"))),
    ("mode MEASURE is for calibration/step_3", dict(quant="MEASURE")),
    ("leave out --kv-cache-dtype", dict(quant="MEASURE", options=dict(kv_cache_dtype="fp8_inc"))),
    ("LoRA adapters are not supported", dict(quant="MEASURE", options=EXTENSION | dict(enable_lora=True))),
    # Options of vLLM
    ("is a diffusion language model", dict(options=dict(hf_overrides={"canvas_length": 8}))),
    ("profiler type for cpu.*; leave out --profiler-config", dict(options=dict(profiler_config={"profiler": "cuda"}))),
    ("format pt reads pickles", dict(options=dict(load_format="pt"))),
    ("format npcache reads", dict(speculative=DRAFT | dict(draft_load_config={"load_format": "npcache"}))),
    ("Custom schedulers .*leave out --scheduler-cls", dict(options=dict(scheduler_cls="somebody.Scheduler"))),
    # KV connectors
    (None, dict(options=connecting("NixlConnector", recomputes=True))),
    (None, dict(options=connecting("ExampleConnector") | WHOLE_PROMPTS)),
    (None, dict(options=connecting(("NixlConnector", "ExampleConnector")) | WHOLE_PROMPTS)),
    ("not supported on hpu; leave out --kv-transfer-config", dict(options=connecting("NixlConnector"), device="hpu")),
    ("LMCacheConnectorV1 is not supported; use", dict(options=connecting("LMCacheConnectorV1"))),
    ("OffloadingConnector works only alone", dict(options=connecting(("NixlConnector", "OffloadingConnector")))),
    ("set cpu_bytes_to_use", dict(options=connecting("OffloadingConnector"))),
    (None, dict(options=connecting("OffloadingConnector", cpu_bytes_to_use=1 << 20))),
    ("block_size", dict(options=connecting("OffloadingConnector", cpu_bytes_to_use=1 << 20, block_size=64))),
    ("use --no-enable-chunked-prefill", dict(options=connecting("ExampleConnector"))),
    ("Sleep frees the KV", dict(options=connecting("NixlConnector") | dict(enable_sleep_mode=True))),
    ("leave out --enable-lora", dict(options=connecting("ExampleConnector") | WHOLE_PROMPTS | dict(enable_lora=True))),
    ("set shared_storage_path", dict(options=connecting("ExampleConnector", has_folder=False) | WHOLE_PROMPTS)),
    ("MultiConnector has no connectors", dict(options=connecting(()))),
    ("recompute works only with", dict(options=connecting("ExampleConnector", recomputes=True) | WHOLE_PROMPTS)),
    ("connectors are for models", dict(options=connecting("NixlConnector") | dict(runner="pooling"))),
    (None, dict(options=dict(runner="pooling"))),
    (None, dict(options=dict(runner="pooling", hf_overrides={"is_causal": False}))),
    ("Pooling models are not served on hpu yet", dict(options=dict(runner="pooling"), device="hpu")),
    # Pipeline parallelism
    *((None, dict(speculative=given, options=STAGES)) for given in (None, NGRAM, SUFFIX, DRAFT, dict(method="eagle"))),
    ("not supported with device ascend; use --pipeline-parallel-size 1", dict(options=STAGES, device="ascend")),
    ("Pipeline .* with --enable-lora; use", dict(options=STAGES | dict(enable_lora=True))),
    ("Pipeline .* with --kv-transfer-config", dict(options=STAGES | connecting("NixlConnector"))),
    ("Pipeline .* with --enable-sleep-mode", dict(options=STAGES | dict(enable_sleep_mode=True))),
    ("Pipeline .* with custom logits processors", dict(options=STAGES | PROCESSORS)),
    ("Pipeline .* with QUANT_CONFIG", dict(quant="MEASURE", options=STAGES | EXTENSION)),
    ("Pipeline .* with draft_quant_config", dict(speculative=DRAFT, ours=dict(draft_quant_config="x"), options=STAGES)),
    ("Pipeline .* with audit_every", dict(speculative=NGRAM, ours=dict(audit_every=10), options=STAGES)),
    ("Pipeline .* with --data-parallel", dict(options=STAGES, changed={"parallel_config.data_parallel_size": 2})),
    ("Pipeline .* with pooling models", dict(options=STAGES | dict(runner="pooling"))),
    ("Pipeline .* with method custom_class", dict(speculative=CUSTOM, options=STAGES)),
    (
        "Pipeline .* with method eagle3",
        dict(speculative=DRAFT, options=STAGES, changed={"speculative_config.method": "eagle3"}),
    ),
    ("Pipeline .* with method universal_draft", dict(speculative=UNIVERSAL, options=STAGES)),
    (
        "Pipeline .* with enable_adaptive_verification",
        dict(speculative=NGRAM | dict(enable_adaptive_verification=True), options=STAGES),
    ),
    # A prompt chunk shorter than a verify step
    *((None, dict(speculative=NGRAM, changed={THRESHOLD: threshold})) for threshold in (0, 4)),
    ("--long-prefill-token-threshold .* set it to 4", dict(speculative=NGRAM, changed={THRESHOLD: 3})),
    (None, dict(changed={THRESHOLD: 3})),
    # An engine whose step failed would wait for a command that workers here do not know.
    ("--enable-fault-tolerance is not supported", dict(changed={"parallel_config.enable_fault_tolerance": True})),
]


def describe(value: Any) -> str:
    return re.sub(r"0x\w+|[^\w=-]+", " ", str(value))[:60]


@pytest.mark.parametrize(("message", "case"), REFUSED, ids=describe)
def test_unsupported_configuration_is_refused(
    message: str | None, case: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quant, speculative = tmp_path / "quant.json", case.get("speculative")
    if "quant" in case:
        quant.write_text(json.dumps({"mode": case["quant"], "dump_stats_path": str(tmp_path / "inc")}))
        monkeypatch.setenv("QUANT_CONFIG", str(quant))
    ours = {name: str(quant) if value == "FILE" else value for name, value in case.get("ours", {}).items()}
    options = dict(additional_config={"gaudi_spec": ours}) | case.get("options", {})
    device, changed = case.get("device", "cpu"), case.get("changed", {})
    with refused_with(message) as refused:
        made = engine_config(tmp_path, speculative and here(speculative, tmp_path), **options)
        for path, value in changed.items():
            part, _, name = path.partition(".")
            setattr(getattr(made, part), name, value)
        if changed or device != "cpu":  # otherwise the configuration was checked when it was made
            refusals.refuse_unsupported(made, backend_of(device, captures=device != "cpu"))
    assert message is None or len(str(refused.value).splitlines()) == 1


def test_fp8_matrix_of_a_drafter_with_its_own_quant_config_is_refused(tmp_path: Path) -> None:
    made = engine_config(tmp_path, here(DRAFT, tmp_path))
    setattr(made.speculative_config, LM_HEAD_QUANTIZATION, "fp8")
    options = [Options(), Options(draft_quant_config="quant.json")]
    found = [list(speculation._lm_head_refusals(made, one, backend_of("hpu"))) for one in options]
    assert found[0] == []
    assert [reason.partition(";")[0] for reason in found[1]] == [
        "draft_lm_head_quantization does not work with draft_quant_config"
    ]


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


@pytest.mark.parametrize(
    ("method", "architecture", "named"),
    [
        ("dflash", "DFlash2DraftModel", None),
        ("dflash", "LagunaForCausalLM", "DFlashLagunaForCausalLM"),
        ("dflash", "LiLiCorrDraftModel", "LiLiCorrDraftModel"),
        ("dspark", "Qwen3DSparkModel", None),
        ("dspark", "Gemma4DSparkModel", "Gemma4DSparkModel"),
    ],
)
def test_block_drafters_of_other_classes_are_refused(
    method: str, architecture: str, named: str | None, tmp_path: Path
) -> None:
    drafter = save_block_drafter(tmp_path / "drafter", architecture)
    message = f"^{drafter} has the architecture {named}, which is not supported with method {method}; use a drafter"
    with refused_with(named and message):
        engine_config(tmp_path, dict(method=method, model=drafter))


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
    used |= {"draft_lm_head_quantization"}
    new = {"disable_lookahead_block_hashes", "xpress_topc"}
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
    assert speculation.universal_kv_len == kv_len


BOTH_WAYS = dict(use_bidirectional_attention="vision", sliding_window=512)
GEMMA4 = {"model.hf_config": dict(model_type="gemma4"), "model.hf_text_config": BOTH_WAYS}
COMPILED = {"traits.captures": True, "traits.mode": "compiled", "traits.media_models": hpu.MEDIA["compiled"]}
QWEN2_VL = {**COMPILED, "model.architectures": ["Qwen2VLForConditionalGeneration"]}
PIXTRAL = {
    **COMPILED,
    "model.architectures": ["LlavaForConditionalGeneration"],
    "model.hf_config": dict(vision_config=SimpleNamespace(model_type="pixtral")),
}
LARGE_IMAGES = {"media.mm_processor_kwargs": {"images_kwargs": {"max_soft_tokens": 1120}}}


@pytest.mark.parametrize(
    ("refused", "changed"),
    [
        (None, {}),
        ("not served on a device in mode captured yet", {"traits.captures": True}),
        ("are served on a device in mode compiled for Qwen2VLForConditionalGeneration", COMPILED),
        (None, QWEN2_VL),
        ("not supported on a device with --tensor-parallel-size", QWEN2_VL | {"parallel.tensor_parallel_size": 2}),
        ("keep their sizes", PIXTRAL | {"traits.media_models": hpu.MEDIA["lazy"]}),
        ("within images is supported only for gemma3", {"model.is_mm_prefix_lm": True}),
        (None, {"model.is_mm_prefix_lm": True, "model.hf_config": dict(model_type="gemma3")}),
        ("within images is supported only for gemma3", {"model.hf_text_config": BOTH_WAYS}),
        (None, GEMMA4),
        ("--disable-sliding-window", GEMMA4 | {"model.disable_sliding_window": True}),
        ("longer than the sliding window of 512 tokens", GEMMA4 | LARGE_IMAGES),
        (None, {"model.hf_text_config": dict(use_bidirectional_attention=None)}),
        ("are not supported yet", {"model.architectures": ["Gemma3nForConditionalGeneration"]}),
        ("without tokens", {"model.is_multimodal_raw_input_only_model": True}),
        ("for pooling models", {"model.runner_type": "pooling"}),
        ("together with recurrent layers", {"model.is_hybrid": True}),
        (None, {"model.is_hybrid": True, "model.architectures": ["Qwen3_5ForConditionalGeneration"]}),
        ("--data-parallel-size", {"parallel.data_parallel_size": 2}),
        ("--video-pruning-rate", {"media.is_multimodal_pruning_enabled": lambda: True}),
        ("--enable-mm-embeds", {"media.enable_mm_embeds": True}),
        ("--mm-encoder-only", {"media.mm_encoder_only": True}),
        ("LoRA", {"asked.lora_config": object()}),
    ],
    ids=describe,
)
def test_unsupported_images_are_refused(refused: str | None, changed: dict[str, Any]) -> None:
    off = dict.fromkeys(("enable_mm_embeds", "mm_encoder_only", "mm_processor_kwargs"))
    media = SimpleNamespace(is_multimodal_pruning_enabled=lambda: False, **off)
    flags = ("is_mm_prefix_lm", "is_multimodal_raw_input_only_model", "is_hybrid", "disable_sliding_window")
    model = SimpleNamespace(
        model="m",
        architecture="paligemma",
        architectures=["PaliGemmaForConditionalGeneration"],
        runner_type="generate",
        hf_config=SimpleNamespace(model_type="paligemma"),
        hf_text_config=SimpleNamespace(),
        get_multimodal_config=lambda: media,
        **dict.fromkeys(flags, False),
    )
    parallel = SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1)
    traits = SimpleNamespace(captures=False, name="a device", mode="captured", media_models=())
    asked: Any = SimpleNamespace(model_config=model, lora_config=None, parallel_config=parallel)
    parts = {"traits": traits, "model": model, "media": media, "asked": asked, "parallel": parallel}
    for path, value in changed.items():
        part, _, name = path.partition(".")
        is_record = isinstance(value, dict) and part != "media"
        setattr(parts[part], name, SimpleNamespace(**value) if is_record else value)
    device: Any = SimpleNamespace(traits=traits)
    check_reasons(models._multimodal_refusals(asked, device), refused)


BY_BATCH_SIZE = dict(num_speculative_tokens=5, num_speculative_tokens_per_batch_size=[[1, 2, 5], [3, 8, 4], [9, 9, 0]])


@pytest.mark.parametrize(
    ("options", "widths"),
    [
        (dict(num_speculative_tokens=7), [7]),
        (dict(num_speculative_tokens=7, enable_adaptive_verification=True), [1, 2, 4, 7]),
        (dict(num_speculative_tokens=1, enable_adaptive_verification=True), [1]),
        # No batch is that large.
        (dict(num_speculative_tokens=3, num_speculative_tokens_per_batch_size=[[1, 9999, 3], [10000, 10000, 2]]), [3]),
        *((method | BY_BATCH_SIZE, [4, 5]) for method in (NGRAM, dict(method="ngram_gpu"), SUFFIX, CUSTOM)),
    ],
    ids=str,
)
def test_steps_have_shapes_for_each_scheduled_number_of_drafts(
    options: dict[str, Any], widths: list[int], tmp_path: Path
) -> None:
    speculation = Speculation.from_vllm(engine_config(tmp_path, NGRAM | options))
    assert [*speculation.widths] == widths


@pytest.mark.parametrize(
    ("speculative", "ours"), [(dict(enable_adaptive_verification=True), {}), ({}, dict(audit_every=10))], ids=str
)
def test_what_data_parallel_experts_exclude(
    speculative: dict[str, Any], ours: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine_config(tmp_path, NGRAM | speculative, additional_config={"gaudi_spec": ours})
    monkeypatch.setattr(speculation, "ranks_in_step", lambda _: 2)
    (reason,) = speculation.speculation_refusals(made, load_backend())
    assert "is not supported with data parallelism of a mixture of experts" in reason


@pytest.mark.parametrize(
    ("option", "changed"),
    [
        (None, {}),
        ("--long-prefill-token-threshold", dict(long_prefill_token_threshold=64)),
        ("--max-num-scheduled-tokens", dict(max_num_scheduled_tokens=511)),
        (None, dict(max_num_scheduled_tokens=512)),
        ("set --max-num-batched-tokens to 512 or more", dict(max_num_batched_tokens=511)),
    ],
    ids=str,
)
def test_options_that_split_encoder_prompts_are_refused(option: str | None, changed: dict[str, Any]) -> None:
    scheduler = dict(long_prefill_token_threshold=0, max_num_scheduled_tokens=None, max_num_batched_tokens=512)
    model = SimpleNamespace(model="m", max_model_len=512)
    made: Any = SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(**(scheduler | changed)))
    check_reasons(models._whole_prompt_refusals(made), option)


def check_reasons(found: Iterator[str], expected: str | None) -> None:
    """Check that there is one reason with these words, or none."""
    reasons = list(found)
    assert len(reasons) == (expected is not None)
    assert all(expected in reason for reason in reasons if expected is not None)


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
    with pytest.raises(UnsupportedConfigError, match=r"selects keys with an indexer \(index_topk\)"):
        make("DeepseekV2ForCausalLM")
    with pytest.raises(UnsupportedConfigError, match="use --kv-cache-dtype auto"):
        make("DeepseekV32ForCausalLM", kv_cache_dtype="fp8")


LAZY_ONLY = "leave VLLM_MLA_DISABLE unset, or set PT_HPU_LAZY_MODE=0."


@pytest.mark.parametrize(
    ("refused", "changed"),
    [
        (None, dict(architecture="MiniCPM3ForCausalLM")),  # is patched
        (LAZY_ONLY, dict(architecture="DeepseekV3ForCausalLM", is_deepseek_mla=True)),
        (None, dict(architecture="DeepseekV3ForCausalLM", is_deepseek_mla=True, use_mla=True)),
        ("set PT_HPU_LAZY_MODE=0.", dict(is_moe=True, using_transformers_backend=lambda: True)),
        (None, dict(is_moe=True)),
        (None, dict(using_transformers_backend=lambda: True)),
    ],
    ids=describe,
)
def test_l06_models_that_write_through_views_are_refused_in_lazy_mode(
    refused: str | None, changed: dict[str, Any]
) -> None:
    flags: dict[str, Any] = dict.fromkeys(("is_deepseek_mla", "use_mla", "is_moe"), False)
    plain = dict(model="M", architecture="A", using_transformers_backend=lambda: False)
    model: Any = SimpleNamespace(**(plain | flags | changed))
    traits = dataclasses.replace(backend_of("hpu", captures=True).traits, mode="lazy", updates_views=False)
    check_reasons(models._graph_refusals(model, traits), refused)
    check_reasons(models._graph_refusals(model, dataclasses.replace(traits, updates_views=True)), None)


@pytest.mark.parametrize(
    ("named", "parts", "attn_res_block_size"),
    [
        (None, {}, None),
        ("use_full_rank_gate", dict(use_full_rank_gate=True), None),
        ("gate_lower_bound", dict(gate_lower_bound=-5.0), None),
        ("attn_res_block_size", {}, 4),
    ],
)
def test_kimi_k3_is_refused(named: str | None, parts: dict[str, Any], attn_res_block_size: int | None) -> None:
    """Its text shares class and configuration with Kimi Linear."""
    config = SimpleNamespace(linear_attn_config=parts, attn_res_block_size=attn_res_block_size)
    model: Any = SimpleNamespace(model="m", architectures=["KimiLinearForCausalLM"], hf_text_config=config)
    check_reasons(models._kimi_refusals(model), named and f"m has {named}, like Kimi K3")


@pytest.mark.parametrize(
    ("captures", "compared", "architecture", "refused"),
    [
        (False, (), "Zamba2ForCausalLM", False),
        (True, hpu.RECURRENT["lazy"], "Zamba2ForCausalLM", False),
        (True, hpu.RECURRENT["lazy"], "KimiLinearForCausalLM", False),
        (True, hpu.RECURRENT["lazy"], "NemotronHPuzzleForCausalLM", True),
        (True, hpu.RECURRENT["compiled"], "NemotronHForCausalLM", False),
        (True, hpu.RECURRENT["compiled"], "Mamba2ForCausalLM", True),
        (True, ascend.RECURRENT, "Qwen3NextForCausalLM", False),
        (True, ascend.RECURRENT, "NemotronHForCausalLM", False),
        (True, ascend.RECURRENT, "Zamba2ForCausalLM", True),
        (True, (), "Qwen3NextForCausalLM", True),
    ],
)
def test_recurrent_layers_never_compared_in_graphs_are_refused(
    captures: bool, compared: tuple[str, ...], architecture: str, refused: bool
) -> None:
    backend = backend_of("cpu", captures=captures)
    backend.traits = dataclasses.replace(backend.traits, recurrent_models=compared)
    made: Any = SimpleNamespace(
        model_config=SimpleNamespace(model="m", architectures=[architecture], is_attention_free=False),
        cache_config=SimpleNamespace(use_replayssm=False),
        scheduler_config=None,
        lora_config=None,
    )
    check_reasons(
        models._state_refusals(made, backend), "m has recurrent layers, which were not compared on" if refused else None
    )


ON_HOST: dict[str, dict[str, Any]] = {
    "method ngram": dict(speculative=NGRAM),
    "method suffix": dict(speculative=SUFFIX),
    "method custom_class": dict(speculative=CUSTOM),
    "universal_context retokenize": dict(speculative=UNIVERSAL, ours=RETOKENIZE),
    "custom logits processors": dict(options=PROCESSORS),
}


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize(
    ("why", "case"),
    [
        *ON_HOST.items(),
        *(("", dict(speculative=given)) for given in (None, dict(method="ngram_gpu"), DRAFT, UNIVERSAL)),
    ],
    ids=str,
)
def test_async_scheduling_is_on_unless_something_runs_on_the_host(
    why: str, case: dict[str, Any], asked: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(platform.logger, "info", lambda text, *values: said.append(text % values))
    speculative, options = case.get("speculative"), case.get("options", {})
    ours = dict(additional_config={"gaudi_spec": case.get("ours", {})}, async_scheduling=asked)
    made = engine_config(tmp_path, speculative and here(speculative, tmp_path), **ours, **options)
    replace(made, parallel_config=made.parallel_config)  # as for a drafter that is loaded with a copy; it may stay
    overlaps = asked is not False and not why
    assert made.scheduler_config.async_scheduling is overlaps
    assert made.scheduler_config.get_scheduler_cls() is (SpecAsyncScheduler if overlaps else SpecScheduler)
    disabled = [line for line in said if line.startswith("Async scheduling is disabled")]
    assert len(disabled) == bool(why and asked is not False)
    assert all(why in line for line in disabled)


# vLLM 0.33 rejects async scheduling with pipeline stages if it is requested.
@pytest.mark.parametrize("asked", [None, pytest.param(True, marks=only_0_32)])
def test_pipeline_stages_are_scheduled_without_async_scheduling(asked: bool | None, tmp_path: Path) -> None:
    made = engine_config(tmp_path, dict(method="ngram_gpu"), async_scheduling=asked, **STAGES)
    assert not made.scheduler_config.async_scheduling
    assert made.scheduler_config.get_scheduler_cls() is SpecScheduler
    assert made.max_concurrent_batches == 2


@pytest.mark.parametrize(("captures", "method"), [(False, "ngram"), (True, "ngram_gpu")])
def test_device_that_captures_graphs_looks_ngrams_up_itself(
    captures: bool, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = load_backend()
    traits = dataclasses.replace(cpu.traits, captures=captures)
    monkeypatch.setattr(platform, "load_backend", lambda: dataclasses.replace(cpu, traits=traits))
    for asked in (NGRAM, dict(model="[ngram]")):
        made = engine_config(tmp_path, asked)
        assert made.speculative_config.method == method
        assert bool(made.scheduler_config.async_scheduling) == captures


DRAFTS_ASKED = "num_speculative_tokens in vllm_xargs (extra_args) must be an integer, 0 or more"


@pytest.mark.parametrize(
    ("params", "words"),
    [
        *((dict(extra_args={"num_speculative_tokens": fine}), None) for fine in (0, 3)),
        *((dict(extra_args={"num_speculative_tokens": wrong}), DRAFTS_ASKED) for wrong in (-1, True, 1.0)),
        (dict(extra_args={"other": -1}), None),
        (dict(extra_args={"mine": object()}), None),
        (dict(logit_bias=dict.fromkeys(range(1024), 1.0)), None),
        (dict(logit_bias=dict.fromkeys(range(1025), 1.0)), "make 1025 logit edits; use at most 1024 "),
        (dict(stop_token_ids=list(range(1025))), None),
        (dict(min_tokens=3, stop_token_ids=list(range(1025))), "make 1025 logit edits"),
        (dict(bad_words=["w" * 8192, "x" * 8192]), None),
        (dict(bad_words=["w" * 8192, "x" * 8193]), "have 16385 characters; use at most 16384 "),
    ],
    ids=describe,
)
def test_unsupported_requests_are_refused(params: dict[str, Any], words: str | None) -> None:
    reason = check_request(SamplingParams(**params))
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
