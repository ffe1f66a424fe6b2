"""Check the worker methods that programs call when they use vLLM as a library."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams
from vllm.v1.worker.worker_base import WorkerBase

from tests.full_tests.engines import engine

PROMPTS = [[5, 6, 7], [9, 3, 200, 41], [17] * 20]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
DRAFT = dict(method="draft_model", num_speculative_tokens=3)


class Extension:
    """A `worker_extension_cls`: what it takes of the worker, programs written for upstream take."""

    def describe(self: Any) -> dict[str, Any]:
        runner = self.model_runner
        assert runner.model is runner.get_model() is self.get_model()
        assert runner.vllm_config is self.vllm_config
        assert runner.model_config is self.model_config
        assert runner.get_draft_model() is self.get_draft_model()
        assert runner.device.type == self.device.type
        return {"model": type(runner.model).__name__, "drafter": type(self.get_draft_model()).__name__}


@pytest.fixture(scope="module")
def speculating(looping_llama: str, cousin: str) -> Iterator[LLM]:
    extension = f"{__name__}.Extension"
    with engine(looping_llama, speculative_config=DRAFT | dict(model=cousin), worker_extension_cls=extension) as llm:
        yield llm


def test_worker_extension_finds_the_runner(speculating: LLM) -> None:
    found = {"model": "LlamaForCausalLM", "drafter": "LlamaForCausalLM"}
    assert speculating.collective_rpc("describe") == [found]
    assert speculating.collective_rpc(lambda worker: type(worker.model_runner.model).__name__) == ["LlamaForCausalLM"]
    assert speculating.apply_model(lambda model: type(model).__name__) == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("profile", ValueError, "Profiling is not enabled"),
        ("start_weight_update", NotImplementedError, "not implemented"),
        ("save_sharded_state", NotImplementedError, "not implemented"),
    ],
)
def test_unsupported_worker_calls_are_refused(name: str, error: type[Exception], words: str, speculating: LLM) -> None:
    with pytest.raises(error, match=words):
        speculating.collective_rpc(name)


def test_worker_methods_have_upstream_names() -> None:
    """Fails when upstream's worker loses or renames one: then the name goes here as well."""
    from vllm.v1.worker.gpu_worker import Worker as Upstream

    from vllm_gaudi_spec.worker import Worker

    names = set(vars(Worker)) - set(vars(WorkerBase)) - {"step_report", "save_measurements", "self_test", "profiler"}
    assert {name for name in names if not name.startswith("_")} - set(dir(Upstream)) == {"backend"} & names


def test_profiler_writes_a_trace_between_start_and_stop(looping_llama: str, tmp_path: Path) -> None:
    profiler = dict(profiler="torch", torch_profiler_dir=str(tmp_path), torch_profiler_use_gzip=False)
    with engine(looping_llama, profiler_config=profiler) as llm:
        for name, prompt in zip("ab", PROMPTS, strict=False):
            llm.start_profile(name)
            llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)
            llm.stop_profile()
        llm.generate({"prompt_token_ids": PROMPTS[2]}, GREEDY, use_tqdm=False)
    traces = [tmp_path.glob(f"{name}_*rank0*.json") for name in "ab"]
    calls = [[event["name"] for event in json.loads(trace.read_text())["traceEvents"]] for (trace,) in traces]
    assert min(names.count("aten::index_select") for names in calls) > 12, "one or more in each step"
    assert len([*tmp_path.glob("*.json")]) == 2
