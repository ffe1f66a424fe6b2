"""LoRA adapters apply to the target, request by request: each says what its weights put into the model would say,
whatever shares its batch, with and without drafts."""

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import LLM, SamplingParams

from tests.full_tests import adapters
from tests.full_tests.adapters import LORA, Adapter, Job, Tokens, check_same, greedy, mixed, run
from tests.full_tests.engines import SMALL_KV, engine, preemptions
from tests.full_tests.equality import Tally
from tests.full_tests.heads import head, target
from tests.full_tests.prompts import random_prompts
from tests.full_tests.reference import Reference
from tests.full_tests.server import Server
from tests.full_tests.speculation import accepted, ngram, speculating, suffix
from tests.full_tests.tiny_models import VOCAB
from tests.full_tests.workload import Request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def made(looping_llama: str, folder: Path) -> list[Adapter]:
    """Of the looping Llama: of both ranks, of all modules and of few."""
    return [
        adapters.make(looping_llama, folder / "a", 1, rank=4),
        adapters.make(looping_llama, folder / "b", 2, rank=8, alpha=16),
        adapters.make(looping_llama, folder / "c", 3, rank=8, modules=("q_proj", "v_proj", "down_proj")),
        adapters.make(looping_llama, folder / "d", 4, rank=4, modules=adapters.BOTH_ENDS),
    ]


@pytest.fixture(scope="module")
def whole(looping_llama: str, folder: Path) -> Callable[[Adapter | None], Reference]:
    """transformers on the model that has the adapter's weights in it."""

    @cache
    def reference(adapter: Adapter | None) -> Reference:
        if adapter is None:
            return Reference(looping_llama)
        return Reference(adapters.merged(looping_llama, adapter, folder / f"merged {adapter.number}"))

    return reference


@pytest.fixture(scope="module")
def adapted(looping_llama: str) -> Iterator[LLM]:
    """One engine for what needs no other."""
    with engine(looping_llama, **LORA, max_cpu_loras=3) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(adapted: LLM, made: list[Adapter]) -> dict[str, list[Tokens]]:
    """What requests of all kinds say, one after the other: by the names of the adapters they take in turn."""
    jobs = mixed(24, made[0], None, made[1])
    return {"a, none, b": [run(adapted, [job])[0] for job in jobs]}


PROMPTS = random_prompts([3, 40, 70, 150], VOCAB, seed=5)


def test_an_adapter_is_its_weights_put_into_the_model(
    adapted: LLM, made: list[Adapter], whole: Callable[[Adapter | None], Reference]
) -> None:
    """Four adapters and none at a time, where there is room for two; the prompts are the same, and longer than blocks
    that the prefix cache shares."""
    jobs = [job for adapter in (*made, None) for job in greedy(PROMPTS, adapter)]
    random.Random(0).shuffle(jobs)
    tally = Tally()
    for _ in range(2):
        outputs = run(adapted, jobs)
        for job, output in zip(jobs, outputs, strict=True):
            logits_TV = whole(job.adapter).logits_after(job.request.prompt, output)
            tally.greedy(f"{job.adapter and job.adapter.folder.name}, {job.request.name}", output, logits_TV)
    tally.check()
    said = {(job.request.name, tuple(output)) for job, output in zip(jobs, outputs, strict=True)}
    assert len(said) == len(jobs), "each adapter makes a text of its own"


def test_scores_of_prompts_are_the_adapters(
    adapted: LLM, made: list[Adapter], whole: Callable[[Adapter | None], Reference]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=0)
    jobs = [Job(Request("scores", PROMPTS[3], params), adapter) for adapter in (made[0], None, made[1])]
    outputs = adapted.generate(
        [{"prompt_token_ids": job.request.prompt} for job in jobs],
        params,
        lora_request=[job.adapter and job.adapter.request() for job in jobs],
        use_tqdm=False,
    )
    for job, output in zip(jobs, outputs, strict=True):
        prompt = job.request.prompt
        expected_TV = whole(job.adapter).logits_after(prompt[:1], prompt[1:]).log_softmax(-1)
        places = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        ours_T = torch.tensor([place[token].logprob for place, token in places])
        torch.testing.assert_close(
            ours_T, expected_TV.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], rtol=0, atol=1e-3
        )


def test_two_adapters_in_a_batch_say_what_each_says_alone(
    adapted: LLM, made: list[Adapter], alone: dict[str, list[Tokens]]
) -> None:
    jobs = mixed(24, made[0], None, made[1])
    check_same(jobs, run(adapted, jobs), alone["a, none, b"])


def test_an_adapter_that_comes_and_goes(adapted: LLM, made: list[Adapter], alone: dict[str, list[Tokens]]) -> None:
    """By hand, between requests and while some run: nobody notices but who names it."""
    core, jobs = adapted.llm_engine, mixed(24, made[0], None, made[1])
    for adapter in made:
        core.remove_lora(adapter.number)
    assert core.list_loras() == set()
    for adapter in (made[2], made[3]):
        assert core.add_lora(adapter.request())
    assert core.list_loras() == {made[2].number, made[3].number}
    check_same(jobs, run(adapted, jobs), alone["a, none, b"])  # which drives them out
    assert core.pin_lora(made[0].number)
    with pytest.raises(Exception, match="--max-loras"):
        core.pin_lora(made[1].number)
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
            core.add_lora(made[2 + step % 2].request())
            core.remove_lora(made[1].number)
    check_same(jobs, [said[index] for index in range(len(jobs))], alone["a, none, b"])
    core.remove_lora(made[0].number)


def test_reloading_in_place(adapted: LLM, made: list[Adapter], folder: Path) -> None:
    """One name, other weights, from another folder: the next request gets them."""
    one, other = (Adapter(adapter.folder, 9) for adapter in made[:2])
    (job,) = greedy(PROMPTS[:1], one)
    before = run(adapted, [job])
    request = other.request()
    request.load_inplace = True
    adapted.llm_engine.add_lora(request)
    (again,) = greedy(PROMPTS[:1], other)
    (expected,) = greedy(PROMPTS[:1], made[1])
    after = run(adapted, [again])
    assert after == run(adapted, [expected])
    assert after != before


# --- bad adapters ---


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
    "empty": (lambda tensors, _: tensors.clear(), "no matrix"),
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
        ("cut", "adapter_model.safetensors", "can not"),
        ("no json", "adapter_config.json", "can not"),
    ):
        broken = copy(name)
        content = (broken.folder / file).read_bytes()
        (broken.folder / file).write_bytes(content[: len(content) // 2])
        found[name] = (broken, words)
    without = copy("no weights")
    (without.folder / "adapter_model.safetensors").unlink()
    found["no weights"] = (without, "doesn't contain tensors")
    return found


def test_bad_adapters_are_refused_and_change_nothing(
    adapted: LLM, made: list[Adapter], alone: dict[str, list[Tokens]], tmp_path: Path
) -> None:
    jobs = mixed(3, made[0], None, made[1])
    run(adapted, jobs)
    cases = {name: (spoiled(made[1], tmp_path / name, change), words) for name, (change, words) in BAD.items()}
    cases |= _files(made[1], tmp_path)
    before = adapted.llm_engine.list_loras()
    for name, (bad, words) in cases.items():
        with pytest.raises(Exception) as refused:
            adapted.llm_engine.add_lora(bad.request())
        message = str(refused.value)
        assert words in message, f"{name}: {message}"
        assert len(message.splitlines()) == 1, f"{name}: {message}"
        assert adapted.llm_engine.list_loras() == before, name
    check_same(jobs, run(adapted, jobs), alone["a, none, b"][:3])


# --- with drafts ---


DRAFTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "draft_model, coupled": (
        dict(
            method="draft_model",
            num_speculative_tokens=3,
            draft_sample_method="coupled",
            rejection_sample_method="strict",
        ),
        dict(enable_prefix_caching=True),
    ),
    "draft_model, preempted": (dict(method="draft_model", num_speculative_tokens=2), SMALL_KV),
    "ngram, preempted": (ngram(3), SMALL_KV),
    "ngram_gpu": (dict(ngram(3), method="ngram_gpu"), dict(async_scheduling=True)),
    "suffix": (suffix(4), {}),
    "adaptive": (dict(ngram(3), method="ngram_gpu"), dict(additional_config=dict(gaudi_spec=dict(adaptive=True)))),
}
QUICK = ("draft_model, coupled",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in DRAFTERS]
)
def test_drafts_change_nothing(
    case: str, looping_llama: str, made: list[Adapter], alone: dict[str, list[Tokens]]
) -> None:
    """The drafter is the target without an adapter."""
    config, options = DRAFTERS[case]
    if config["method"] == "draft_model":
        config = dict(config, model=looping_llama)
    jobs = mixed(24, made[0], None, made[1])
    with speculating(looping_llama, config, **LORA, **options) as llm:
        for _ in range(2):
            check_same(jobs, run(llm, jobs), alone["a, none, b"])
        assert accepted(llm) > 50
        if "preempted" in case:
            assert preemptions(llm) > 0


HEADS = ("eagle3", *(pytest.param(method, marks=pytest.mark.slow) for method in ("eagle", "mtp", "medusa")))


@pytest.mark.parametrize("method", HEADS)
def test_a_head_sees_no_adapter(method: str, folder: Path) -> None:
    """It shares embeddings and output matrix with the target as they are without."""
    model = target(method)
    made = [adapters.make(model, folder / f"{method} {rank}", rank, rank=rank) for rank in (4, 8)]
    jobs = mixed(18, made[0], None, made[1])
    with engine(model, **LORA) as llm:
        expected = run(llm, jobs)
    with speculating(model, head(method, 3), **LORA) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        check_same(jobs, run(llm, jobs), expected)
        assert accepted(llm) > 0
        heads_layers = [type(module).__name__ for module in llm.collective_rpc(_modules_of_drafter)[0]]
        assert heads_layers
        assert not [name for name in heads_layers if "LoRA" in name]


def _modules_of_drafter(worker: Any) -> list[torch.nn.Module]:
    return list(worker.runner.drafter.model.modules())


# --- other ways to run the target ---


def test_rows_without_an_adapter_keep_their_bits(looping_llama: str, made: list[Adapter]) -> None:
    """The same batch, in an engine that knows no adapters."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5, prompt_logprobs=5)
    prompts = [{"prompt_token_ids": PROMPTS[2]}] * 3
    found = []
    for options, requests in ((LORA, [made[0].request(), None, made[1].request()]), ({}, None)):
        with engine(looping_llama, **options, enable_prefix_caching=False) as llm:
            output = llm.generate(prompts, params, lora_request=requests, use_tqdm=False)[1]
            found.append((output.prompt_logprobs, output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert found[0] == found[1]


OPTIONS: dict[str, dict[str, Any]] = {
    "tensor parallel": dict(tensor_parallel_size=2),
    "one slot": dict(max_loras=1),
    "chunks": dict(max_num_batched_tokens=64, max_num_seqs=8),
    "everything warmed": dict(
        max_num_seqs=4, max_model_len=256, additional_config=dict(gaudi_spec=dict(warmup_tokens=-1))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OPTIONS)
def test_ways_to_run(
    case: str, looping_llama: str, made: list[Adapter], whole: Callable[[Adapter | None], Reference]
) -> None:
    jobs = [job for adapter in (*made, None) for job in greedy(PROMPTS, adapter)]
    random.Random(1).shuffle(jobs)
    tally = Tally()
    with engine(looping_llama, **(LORA | OPTIONS[case])) as llm:
        for job, output in zip(jobs, run(llm, jobs), strict=True):
            logits_TV = whole(job.adapter).logits_after(job.request.prompt, output)
            tally.greedy(f"{job.adapter and job.adapter.folder.name}, {job.request.name}", output, logits_TV)
    tally.check()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "granite", "gemma3"])
def test_families(family: str, tiny: Callable[[str], str], tmp_path: Path) -> None:
    model = tiny(family)
    made = [
        adapters.make(model, tmp_path / name, number, rank=4, modules=(*adapters.ATTENTION, *adapters.MLP))
        for number, name in ((1, "a"), (2, "b"))
    ]
    references = {None: Reference(model)}
    references |= {one: Reference(adapters.merged(model, one, tmp_path / f"merged {one.number}")) for one in made}
    jobs = [job for adapter in (*made, None) for job in greedy(PROMPTS, adapter)]
    tally = Tally()
    with speculating(model, ngram(3), **LORA) as llm:
        for job, output in zip(jobs, run(llm, jobs), strict=True):
            logits_TV = references[job.adapter].logits_after(job.request.prompt, output)
            tally.greedy(f"{job.adapter and job.adapter.folder.name}, {job.request.name}", output, logits_TV)
    tally.check()


@pytest.mark.slow
def test_restricted_to_some_modules(looping_llama: str, folder: Path, made: list[Adapter]) -> None:
    """A deployment may leave modules out; then an adapter is what is left of it."""
    part = spoiled(made[0], folder / "part", _only("o_proj"))
    jobs, left = greedy(PROMPTS, made[0]), greedy(PROMPTS, Adapter(part.folder, 2))
    with engine(looping_llama, **LORA, lora_target_modules=["o_proj"]) as llm:
        assert run(llm, jobs) == run(llm, left) != run(llm, greedy(PROMPTS, None))


def _only(module: str) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    def change(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        for name in list(tensors):
            if module not in name:
                del tensors[name]

    return change


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float16", "int8"])
def test_formats_of_weights(weights: str, looping_llama: str, made: list[Adapter]) -> None:
    """The model's own are rounded; two adapters in a batch still say what each says alone."""
    options = dict(additional_config=dict(gaudi_spec=dict(cpu_weights=weights)))
    jobs = greedy(PROMPTS, made[0]) + greedy(PROMPTS, None) + greedy(PROMPTS, made[1])
    with engine(looping_llama, **LORA, **options) as llm:
        single = [run(llm, [job])[0] for job in jobs]
        check_same(jobs, run(llm, jobs), single)


# --- served ---


def test_served(
    looping_llama: str,
    made: list[Adapter],
    folder: Path,
    whole: Callable[[Adapter | None], Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    options = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--max-model-len", "512"]
    modules = ["--lora-modules", *(f"{adapter.folder.name}={adapter.folder}" for adapter in made[:2])]
    drafts = ["--speculative-config.method", "ngram_gpu", "--speculative-config.num_speculative_tokens", "3"]
    server = Server(looping_llama, tmp_path / "log", *options, *modules, *drafts)
    try:
        ids = [model["id"] for model in server.client.get("/v1/models").json()["data"]]
        assert ids == ["tiny", "a", "b"]

        def ask(name: str) -> Tokens:
            body = dict(model=name, prompt=PROMPTS[1], max_tokens=12, temperature=0, ignore_eos=True)
            return server.complete(**body, return_token_ids=True)["choices"][0]["token_ids"]

        def load(adapter: Adapter, **more: Any) -> Any:
            body = dict(lora_name=adapter.folder.name, lora_path=str(adapter.folder), **more)
            return server.client.post("/v1/load_lora_adapter", json=body)

        assert load(made[2]).status_code == 200
        tally = Tally()
        for name, adapter in (("a", made[0]), ("c", made[2]), ("tiny", None), ("b", made[1]), ("a", made[0])):
            said = ask(name)
            tally.greedy(name, said, whole(adapter).logits_after(PROMPTS[1], said))
        tally.check()

        bad = spoiled(made[1], tmp_path / "bad", _narrow)
        assert load(bad).status_code == 400
        assert "have shapes" in load(bad).json()["error"]["message"]
        assert load(Adapter(tmp_path / "nowhere", 1)).status_code == 404
        assert load(made[2]).status_code == 400  # it is there
        gone = server.client.post("/v1/unload_lora_adapter", json=dict(lora_name="c"))
        assert gone.status_code == 200
        assert server.client.post("/v1/completions", json=dict(model="c", prompt="x")).status_code == 404
        assert ask("a")
    finally:
        server.stop()
