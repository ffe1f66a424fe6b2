"""Sleep, wake and new weights in a running engine that drafts: texts are those of an engine that never slept, or that
started with the new weights."""

import gc
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM

from tests.full_tests import heads, tiny_models
from tests.full_tests.engines import counter, engine, first_tokens, generate
from tests.pages import ROOT, text_for
from vllm_gaudi_spec.devices.common.arguments import find_tensors
from vllm_gaudi_spec.scheduling import adaptive

GUIDE = ROOT / "docs" / "how_to" / "monitor.md"
PROMPTS = [heads.text(length, first) for first, length in enumerate((9, 40, 130))]
GREEDY = heads.greedy(12)


class Models(NamedTuple):
    target: str
    drafter: str
    method: str

    def options(self) -> dict[str, Any]:
        drafter = dict(method=self.method, model=self.drafter, num_speculative_tokens=3)
        return dict(model=self.target, speculative_config=drafter)


def change(folder: str, copy: Path) -> str:
    """Write a checkpoint with other weights."""
    shutil.copytree(folder, copy)
    torch.manual_seed(1)
    weights = load_file(f"{folder}/model.safetensors")
    for name, weight in weights.items():
        weights[name] = (weight + 0.2 * weight.float().std() * torch.randn(weight.shape)).to(weight.dtype)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return str(copy)


@pytest.fixture(scope="module", params=["draft_model", "eagle"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Models, Models]:
    """A target with its drafter, and both with other weights."""
    method, folder, target = request.param, tmp_path_factory.mktemp(request.param), heads.target("eagle")
    old = Models(target, str(heads.TINY / "eagle") if method == "eagle" else target, method)
    return old, Models(change(target, folder / "target"), change(old.drafter, folder / "drafter"), method)


class Answers(NamedTuple):
    texts: list[list[int]]
    drafted: int
    accepted: int


def ask(llm: LLM, prompts: list[list[int]] = PROMPTS) -> Answers:
    llm.reset_prefix_cache()
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    before = [counter(llm, name) for name in names]
    texts = first_tokens(generate(llm, prompts, GREEDY))
    return Answers(texts, *(counter(llm, name) - count for name, count in zip(names, before, strict=True)))


def reload(llm: LLM, **source: Any) -> None:
    llm.collective_rpc("reload_weights", kwargs=source)


def kv_bytes(worker: Any) -> int:
    caches = [layer.kv_cache for layer in worker.compilation_config.static_forward_context.values()]
    return sum({s._cdata: s.nbytes() for s in (one.untyped_storage() for one in find_tensors(caches))}.values())


def weight_bytes(worker: Any) -> int:
    """Count the bytes of parameters, and packed matrices."""
    runner = worker.model_runner
    models = [runner.target.model, *([] if runner.drafter is None else [runner.drafter.model])]
    storages = {one.untyped_storage()._cdata: one.untyped_storage() for model in models for one in model.parameters()}
    packed = sum("cpu_linear" in vars(module) for model in models for module in model.modules())
    return packed + sum(storage.nbytes() for storage in storages.values())


def test_sleep_and_new_weights(pair: tuple[Models, Models]) -> None:
    old, new = pair
    with engine(**new.options()) as llm:
        expected = ask(llm)
    with engine(**old.options(), enable_sleep_mode=True) as llm:
        before, sizes = ask(llm), []
        assert before.texts != expected.texts
        assert before.accepted > 0
        (num_bytes,) = llm.collective_rpc(kv_bytes)
        for cycle in range(20):
            level = 1 + cycle % 2
            llm.sleep(level=level)
            assert llm.collective_rpc(kv_bytes) == [0]
            assert (llm.collective_rpc(weight_bytes) == [0]) == (level == 2)
            llm.wake_up(tags=["weights"])
            if level == 2:
                reload(llm)
            llm.wake_up(tags=["kv_cache"])
            assert llm.collective_rpc(kv_bytes) == [num_bytes]
            assert ask(llm) == before
            gc.collect()
            sizes.append(psutil.Process().memory_info().rss >> 10)
        assert max(sizes[5:]) - min(sizes[5:]) < 4096, sizes

        with pytest.raises(ValueError, match="nowhere is not a folder"):
            reload(llm, weights_path="nowhere")
        assert ask(llm) == before
        for _ in range(5):
            for models, answers in ((new, expected), (old, before)):
                reload(llm, weights_path=models.target)
                reload(llm, weights_path=models.drafter, is_draft=True)
                assert ask(llm) == answers
        reload(llm, weights_iterator=load_file(f"{new.target}/model.safetensors").items())
        drafter = load_file(f"{new.drafter}/model.safetensors")
        if new.method == "eagle":  # an old copy of what the head shares with the target
            drafter |= {
                "embed_tokens.weight": load_file(f"{old.target}/model.safetensors")["model.embed_tokens.weight"]
            }
        reload(llm, weights_iterator=drafter.items(), is_draft=True)
        assert ask(llm) == expected
        with pytest.raises(ZeroDivisionError):
            reload(llm, weights_iterator=fail_half_way(f"{old.target}/model.safetensors"))
        llm.sleep(level=2)
        llm.wake_up()
        reload(llm, weights_path=new.target)
        reload(llm, weights_path=new.drafter, is_draft=True)
        assert ask(llm) == expected
        calls = text_for("tests/full_tests/test_sleep.py::test_sleep_and_new_weights", GUIDE)
        assert "sleep(level=1)" in calls
        exec(calls.replace("/models/new-drafter", old.drafter).replace("/models/new", old.target), {"llm": llm})  # noqa: S102
        assert ask(llm) == before


def fail_half_way(file: str) -> Any:
    weights = load_file(file).items()
    for number, weight in enumerate(weights):
        yield weight if number < len(weights) // 2 else 1 // 0


def test_running_requests_continue_with_new_weights(pair: tuple[Models, Models]) -> None:
    """Their tokens stay, and the new weights continue from them: no KV of the old weights is read again."""
    old, new = pair
    with engine(**old.options()) as llm:
        step = llm.llm_engine
        for index, prompt in enumerate(PROMPTS):
            step.add_request(str(index), {"prompt_token_ids": prompt}, heads.greedy(60))
        said: dict[int, list[int]] = {}

        def take() -> None:
            for output in step.step():
                said[int(output.request_id.split("-")[0])] = list(output.outputs[0].token_ids)

        while not all(said.get(index) for index in range(len(PROMPTS))):
            take()
        llm.sleep(level=2, mode="keep")
        before = [said[index] for index in range(len(PROMPTS))]
        assert all(0 < len(tokens) < 60 for tokens in before), before
        llm.wake_up(tags=["weights"])
        reload(llm, weights_path=new.target)
        reload(llm, weights_path=new.drafter, is_draft=True)
        llm.wake_up(tags=["kv_cache"])
        while step.has_unfinished_requests():
            take()
        llm.reset_prefix_cache()
        rest = [heads.greedy(60 - len(tokens)) for tokens in before]
        prompts = [prompt + tokens for prompt, tokens in zip(PROMPTS, before, strict=True)]
        after = first_tokens(generate(llm, prompts, rest))
    assert [said[index] for index in range(len(PROMPTS))] == [b + a for b, a in zip(before, after, strict=True)]


LOOPS = [[5, 6, 7], [9, 3, 200, 41], [17] * 20]


def test_stale_drafter_stops_drafting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafts are verified, so texts are right, and adaptive verification sees that few are accepted."""
    model = tiny_models.save(tiny_models.looping_llama, tmp_path / "old")
    other = tiny_models.save(tiny_models.looping_llama, tmp_path / "new", seed=5)

    def at(times: Any, num_rows: int) -> Any:
        return adaptive._Size(num_rows, np.array([1.0, 1.2, 1.3, 1.4])[: len(times._choices)])

    # Fix the times of steps, so that other load on the machine does not matter.
    monkeypatch.setattr(adaptive.StepTimes, "_at", at)
    monkeypatch.setattr(adaptive.StepTimes, "observe", lambda *measured: None)
    with engine(other) as llm:
        expected = first_tokens(generate(llm, LOOPS, heads.greedy(200)))
    config = dict(method="draft_model", model=model, num_speculative_tokens=3, enable_adaptive_verification=True)
    with engine(model, speculative_config=config) as llm:
        right = ask(llm, LOOPS)
        assert right.accepted > 0.9 * right.drafted > 0
        reload(llm, weights_path=other)
        llm.reset_prefix_cache()
        assert first_tokens(generate(llm, LOOPS, heads.greedy(200))) == expected
        assert ask(llm, LOOPS).drafted < 0.2 * right.drafted
