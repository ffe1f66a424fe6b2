"""LoRA adapters apply to the target, request by request: each says what its weights put into the model would say,
whatever shares its batch, with and without drafts."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams

from tests.full_tests import adapters
from tests.full_tests.adapters import LORA, PROMPTS, Adapter, Job, Merged, Tokens, check_same, greedy, mixed, run
from tests.full_tests.engines import engine
from tests.full_tests.workload import Request


@pytest.fixture(scope="module")
def adapted(looping_llama: str) -> Iterator[LLM]:
    with engine(looping_llama, **LORA, max_cpu_loras=3) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(adapted: LLM, loras: list[Adapter]) -> dict[str, list[Tokens]]:
    """What requests of all kinds say, one after the other: by the names of the adapters they take in turn."""
    jobs = mixed(24, loras[0], None, loras[1])
    return {"a, none, b": [run(adapted, [job])[0] for job in jobs]}


def test_adapter_equals_the_merged_model(adapted: LLM, loras: list[Adapter], merged_loras: Merged) -> None:
    """Four adapters and none at a time, where there is room for two; the prompts are the same, and longer than blocks
    that the prefix cache shares."""
    jobs = [job for adapter in (*loras, None) for job in greedy(PROMPTS, adapter)]
    random.Random(0).shuffle(jobs)
    for _ in range(2):
        outputs = run(adapted, jobs)
        merged_loras.check(jobs, outputs)
    said = {(job.request.name, tuple(output)) for job, output in zip(jobs, outputs, strict=True)}
    assert len(said) == len(jobs), "each adapter makes a text of its own"


def test_prompt_logprobs_are_the_adapters(adapted: LLM, loras: list[Adapter], merged_loras: Merged) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=0)
    jobs = [Job(Request("scores", PROMPTS[3], params), adapter) for adapter in (loras[0], None, loras[1])]
    outputs = adapted.generate(
        [{"prompt_token_ids": job.request.prompt} for job in jobs],
        params,
        lora_request=[job.adapter and job.adapter.request() for job in jobs],
        use_tqdm=False,
    )
    for job, output in zip(jobs, outputs, strict=True):
        prompt = job.request.prompt
        expected_TV = merged_loras.of(job.adapter).logits_after(prompt[:1], prompt[1:]).log_softmax(-1)
        places = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        ours_T = torch.tensor([place[token].logprob for place, token in places])
        torch.testing.assert_close(
            ours_T, expected_TV.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], rtol=0, atol=1e-3
        )


def test_adapters_loaded_and_removed_while_requests_run(
    adapted: LLM, loras: list[Adapter], alone: dict[str, list[Tokens]]
) -> None:
    """By hand, between requests and while some run: nobody notices but who names it."""
    core, jobs = adapted.llm_engine, mixed(24, loras[0], None, loras[1])
    for adapter in loras:
        core.remove_lora(adapter.number)
    assert core.list_loras() == set()
    for adapter in (loras[2], loras[3]):
        assert core.add_lora(adapter.request())
    assert core.list_loras() == {loras[2].number, loras[3].number}
    check_same(jobs, run(adapted, jobs), alone["a, none, b"])  # which drives them out
    assert core.pin_lora(loras[0].number)
    with pytest.raises(Exception, match="--max-loras"):
        core.pin_lora(loras[1].number)
    for index, job in enumerate(jobs):
        core.add_request(
            str(index),
            {"prompt_token_ids": job.request.prompt},
            job.request.params,
            lora_request=job.adapter and job.adapter.request(),
        )
    said, step = {}, 0
    while core.has_unfinished_requests():
        for output in core.step():
            said[int(output.request_id)] = [token for part in output.outputs for token in part.token_ids]
        step += 1
        if step % 3 == 0:  # out of its slot, or out of the engine
            core.add_lora(loras[2 + step % 2].request())
            core.remove_lora(loras[1].number)
    check_same(jobs, [said[index] for index in range(len(jobs))], alone["a, none, b"])
    core.remove_lora(loras[0].number)


def test_adapter_is_reloaded_in_place(adapted: LLM, loras: list[Adapter], lora_folder: Path) -> None:
    """One name, other weights, from another folder: the next request gets them."""
    one, other = (Adapter(adapter.folder, 9) for adapter in loras[:2])
    (job,) = greedy(PROMPTS[:1], one)
    before = run(adapted, [job])
    request = other.request()
    request.load_inplace = True
    adapted.llm_engine.add_lora(request)
    (again,) = greedy(PROMPTS[:1], other)
    (expected,) = greedy(PROMPTS[:1], loras[1])
    after = run(adapted, [again])
    assert after == run(adapted, [expected])
    assert after != before


def spoiled(
    adapter: Adapter, folder: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]
) -> Adapter:
    tensors, config = adapters.read(adapter)
    change(tensors, config)
    return adapters.write(folder, 20, tensors, **config)


def _rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def _drop_second(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del tensors["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]


def _narrow(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    tensors[name] = tensors[name][:, :-8]


def _infinite(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    tensors["base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"][3, 1] = torch.inf


BAD: dict[str, tuple[Callable[[dict[str, torch.Tensor], dict[str, Any]], None], str]] = {
    "rank too high": (lambda _, config: config.update(r=64), "rank 64 is greater than max_lora_rank"),
    "another rank": (lambda _, config: config.update(r=2), "have shapes"),
    "no such module": (_rename("q_proj", "qq_proj"), "qq_proj"),
    "no such layer": (_rename("layers.1.", "layers.7."), "layers.7"),
    "half of a pair": (_drop_second, "is missing"),
    "another size": (_narrow, "have shapes"),
    "infinite": (_infinite, "not all numbers"),
    "empty": (lambda tensors, _: tensors.clear(), "no matrices"),
    "dora": (lambda _, config: config.update(use_dora=True), "DoRA"),
    "no rank": (lambda _, config: config.pop("r"), "'r'"),
}


def _files(adapter: Adapter, folder: Path) -> dict[str, tuple[Adapter, str]]:
    """Folders that are wrong as such."""

    def copy(name: str) -> Adapter:
        return spoiled(adapter, folder / name, lambda *_: None)

    found = {"nothing there": (Adapter(folder / "nowhere", 20), "No adapter found")}
    pickled = copy("pickle")
    torch.save(adapters.read(adapter)[0], pickled.folder / "adapter_model.bin")
    (pickled.folder / "adapter_model.safetensors").unlink()
    found["pickle"] = (pickled, "is a pickle")
    for name, file, words in (
        ("cut", "adapter_model.safetensors", "cannot"),
        ("no json", "adapter_config.json", "cannot"),
    ):
        broken = copy(name)
        content = (broken.folder / file).read_bytes()
        (broken.folder / file).write_bytes(content[: len(content) // 2])
        found[name] = (broken, words)
    without = copy("no weights")
    (without.folder / "adapter_model.safetensors").unlink()
    found["no weights"] = (without, "doesn't contain tensors")
    return found


def test_bad_adapter_is_refused_and_changes_nothing(
    adapted: LLM, loras: list[Adapter], alone: dict[str, list[Tokens]], tmp_path: Path
) -> None:
    jobs = mixed(24, loras[0], None, loras[1])[:3]
    run(adapted, jobs)
    cases = {name: (spoiled(loras[1], tmp_path / name, change), words) for name, (change, words) in BAD.items()}
    cases |= _files(loras[1], tmp_path)
    before = adapted.llm_engine.list_loras()
    for name, (bad, words) in cases.items():
        with pytest.raises(Exception) as refused:
            adapted.llm_engine.add_lora(bad.request())
        message = str(refused.value)
        assert words in message, f"{name}: {message}"
        assert len(message.splitlines()) == 1, f"{name}: {message}"
        assert adapted.llm_engine.list_loras() == before, name
    check_same(jobs, run(adapted, jobs), alone["a, none, b"][:3])
