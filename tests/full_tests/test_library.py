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
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def speculating(looping_llama: str, cousin: str, traces: Path) -> Iterator[LLM]:
    with engine(
        looping_llama,
        speculative_config=DRAFT | dict(model=cousin),
        worker_extension_cls=f"{__name__}.Extension",
        profiler_config=dict(profiler="torch", torch_profiler_dir=str(traces), torch_profiler_use_gzip=False),
    ) as llm:
        yield llm


def test_worker_extension_finds_the_runner(speculating: LLM) -> None:
    found = {"model": "LlamaForCausalLM", "drafter": "LlamaForCausalLM"}
    assert speculating.collective_rpc("describe") == [found]
    assert speculating.collective_rpc(lambda worker: type(worker.model_runner.model).__name__) == ["LlamaForCausalLM"]
    assert speculating.apply_model(lambda model: type(model).__name__) == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sleep", "Sleep mode is not supported"),
        ("discard", "Sleep mode is not supported"),
        ("reload_weights", "start another engine with the new ones"),
        ("update_weights", "start another engine with the new ones"),
        ("save_sharded_state", "read the checkpoint's files"),
    ],
)
def test_unsupported_worker_calls_are_refused(name: str, words: str, speculating: LLM) -> None:
    with pytest.raises(ValueError, match=words):
        speculating.collective_rpc(name)


def test_profiler_traces_the_requested_steps(speculating: LLM, traces: Path) -> None:
    speculating.start_profile("drafts")
    speculating.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY, use_tqdm=False)
    speculating.stop_profile()
    speculating.generate({"prompt_token_ids": PROMPTS[1]}, GREEDY, use_tqdm=False)
    (trace,) = traces.glob("drafts_*rank0*.json")
    events = json.loads(trace.read_text())["traceEvents"]
    assert "aten::index_select" in {event["name"] for event in events}


def test_worker_methods_have_upstream_names() -> None:
    """Fails when upstream's worker loses or renames one: then the name goes here as well."""
    from vllm.v1.worker.gpu_worker import Worker as Upstream

    from vllm_gaudi_spec.worker import Worker

    names = set(vars(Worker)) - set(vars(WorkerBase)) - {"step_report", "save_measurements", "self_test", "profiler"}
    assert {name for name in names if not name.startswith("_")} - set(dir(Upstream)) == {"backend"} & names
