"""Adapts vLLM's tests to a machine without a GPU: a pytest plugin, and a general plugin of vLLM in every process.

It imports nothing of this project, since it also runs beside upstream's platform and vLLM's tests are a package named
`tests` as well. `python -m tests.upstream` sets the variables that it reads.
"""

import fnmatch
import functools
import gc
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

SIDE = os.environ.get("VERIFY_UPSTREAM_SIDE", "")
KV_CACHE_BYTES = 1 << 30
COLLECTION = "<collection>"
_job: dict[str, Any] = {}
_results: dict[str, dict[str, Any]] = {}


def register() -> None:
    """Drop what names a GPU's kernels, and give engines little memory and no compiled model, on both sides alike."""
    import torch
    from vllm.config import AttentionConfig
    from vllm.engine.arg_utils import EngineArgs

    if SIDE == "upstream":  # torch's functions raise without an accelerator, and tests call them to clean up
        for name in ("empty_cache", "synchronize", "reset_peak_memory_stats"):
            setattr(torch.accelerator, name, lambda *_: None)
    original = EngineArgs.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **named: Any) -> Any:
        self.enforce_eager = True
        self.attention_backend = None
        self.attention_config = AttentionConfig()
        if self.kv_cache_memory_bytes is None:
            self.kv_cache_memory_bytes = KV_CACHE_BYTES
        return original(self, *args, **named)

    EngineArgs.create_engine_config = create_engine_config


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("VERIFY_UPSTREAM_JOB"):
        _job.update(json.loads(Path(os.environ["VERIFY_UPSTREAM_JOB"]).read_text()))
    original = pytest.skip

    @functools.wraps(original)
    def skip(reason: str = "", *, allow_module_level: bool = False) -> None:
        """Modules that ask for a GPU before anything else run, since only some of their cases need one."""
        if not (allow_module_level and "V1 currently only supported on CUDA" in reason):
            original(reason, allow_module_level=allow_module_level)

    skip.Exception = original.Exception  # some tests catch it
    pytest.skip = skip
    from PIL import Image
    from vllm.assets.image import ImageAsset

    from tests import utils
    from tests.evals.gsm8k import gsm8k_eval

    utils.get_attn_backend_list_based_on_platform = lambda: ["AUTO"]  # it knows GPUs; register() drops the choice
    gsm8k_eval.load_gsm8k_data = lambda: (_sums(10), _sums(100))
    ImageAsset.pil_image = property(lambda _: Image.new("RGB", (64, 64)))  # modules load pictures when imported
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from tests.v1.e2e.spec_decode import utils as spec_decode_utils

    spec_decode_utils.evaluate_llm_for_gsm8k = _evaluate
    spec_decode_utils._skip_if_insufficient_gpus_for_tp = lambda tp_size: None  # torch counts no CPU


def _file_and_case(nodeid: str) -> tuple[str, str]:
    file, _, case = nodeid.partition("::")
    return file.removeprefix("tests/"), case or COLLECTION


def _write(file: str) -> None:
    path = Path(_job["files"][file]["results"])
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(_results[file], indent=0))
    draft.replace(path)


def _results_of(file: str) -> dict[str, Any]:
    if file not in _results:
        path = Path(_job["files"][file]["results"])
        _results[file] = json.loads(path.read_text())
    return _results[file]


def _is_chosen(file: str, case: str) -> bool:
    given = _job["files"][file]
    wanted, unwanted = given["only"], given["without"]
    if case in _results_of(file)["cases"] or (given["cases"] is not None and case not in given["cases"]):
        return False
    return any(fnmatch.fnmatchcase(case, pattern) for pattern in wanted) and not any(
        fnmatch.fnmatchcase(case, pattern) for pattern in unwanted
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [item for item in items if _is_chosen(*_file_and_case(item.nodeid))]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
    for module in {item.module for item in items}:
        with suppress(OSError):  # a name without a stand-in, on which its cases fail
            _fit(module)


def _fit(module: Any) -> None:
    """Give a module the tokens and labels of the stand-in where it has those of the published model."""
    from transformers import AutoConfig, AutoTokenizer

    name, given = getattr(module, "MODEL_NAME", ""), vars(module)
    for text, tokens in (("prompt", "prompt_token_ids"), ("input_text", "input_tokens")):
        if isinstance(given.get(text), str) and tokens in given:
            given[tokens] = AutoTokenizer.from_pretrained(name)(given[text]).input_ids
    if "num_labels" in given:
        given["num_labels"] = AutoConfig.from_pretrained(name).num_labels


def _sums(count: int) -> list[dict[str, str]]:
    return [{"question": f"What is {n} and {n + 1}?", "answer": f"#### {2 * n + 1}"} for n in range(count)]


def _evaluate(llm: Any, expected_accuracy_threshold: float = 0.0) -> None:
    """Compare greedy texts with those of transformers: the accuracy of a stand-in says nothing."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm import SamplingParams

    model = AutoModelForCausalLM.from_pretrained(llm.llm_engine.model_config.model, dtype=torch.float32)
    prompts = [f"{sum_['question']} Answer:" for sum_ in _sums(8)]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)):
        given = torch.tensor([output.prompt_token_ids])
        expected = model.generate(given, max_new_tokens=16, min_new_tokens=16, do_sample=False)
        assert list(output.outputs[0].token_ids) == expected[0, given.shape[1] :].tolist()


def pytest_collection_finish() -> None:
    """Leave what is there to no later collection: their fixtures collect garbage after each case."""
    gc.freeze()


def pytest_collectreport(report: pytest.CollectReport) -> None:
    file, _ = _file_and_case(report.nodeid)
    if file in _job["files"] and not report.passed:
        _record(file, COLLECTION, report.outcome, 0.0, _message(report))


def pytest_runtest_logstart(nodeid: str) -> None:
    file, case = _file_and_case(nodeid)
    _results_of(file)["running"] = case
    _write(file)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file, case = _file_and_case(report.nodeid)
    if report.when == "call" or not report.passed:
        _record(file, case, report.outcome, report.duration, _message(report))


def pytest_runtest_logfinish(nodeid: str) -> None:
    file, _ = _file_and_case(nodeid)
    _results_of(file)["running"] = None
    _write(file)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    for file in _job["files"]:
        found = _results_of(file)
        found["running"] = None
        found["ended"] = exitstatus in (0, 1, 5)
        _write(file)


def _record(file: str, case: str, outcome: str, seconds: float, message: str) -> None:
    _results_of(file)["cases"][case] = {"outcome": outcome, "seconds": round(seconds, 2), "message": message}
    _results_of(file)["at"] = time.time()
    _write(file)


def _message(report: Any) -> str:
    if report.passed:
        return ""
    found = report.longrepr
    crash = getattr(found, "reprcrash", None)
    text = crash.message if crash else str(found[2] if isinstance(found, tuple) else found)
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    return (lines[0] if crash else lines[-1])[:300]
