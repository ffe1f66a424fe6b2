"""LoRA adapters with drafts, which change nothing of what is said; other ways to run the target; a server."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.full_tests import adapters
from tests.full_tests.adapters import LORA, PROMPTS, Adapter, Merged, Tokens, check_same, greedy, mixed, run
from tests.full_tests.engines import SMALL_KV, engine, preemptions
from tests.full_tests.heads import head, target, texts
from tests.full_tests.server import Server
from tests.full_tests.speculation import MODES, accepted, ngram, speculating, suffix
from tests.support.marks import quick_and_slow


@pytest.fixture(scope="module")
def expected(looping_llama: str, loras: list[Adapter]) -> list[Tokens]:
    with engine(looping_llama, **LORA) as llm:
        return run(llm, mixed(24, loras[0], None, loras[1]))


DRAFTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "draft_model, coupled": (
        dict(method="draft_model", num_speculative_tokens=3, **MODES["coupled"]),
        dict(enable_prefix_caching=True),
    ),
    "draft_model, preempted": (
        dict(method="draft_model", num_speculative_tokens=2),
        SMALL_KV | dict(kv_cache_memory_bytes=2 << 20),  # the drafter's lies beside it
    ),
    "ngram, preempted": (ngram(3), SMALL_KV),
    "ngram_gpu": (dict(ngram(3), method="ngram_gpu"), dict(async_scheduling=True)),
    "suffix": (suffix(4), {}),
}
QUICK = ("draft_model, coupled",)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in DRAFTERS]
)
def test_drafts_are_lossless_with_adapters(
    case: str, looping_llama: str, loras: list[Adapter], expected: list[Tokens]
) -> None:
    """The drafter is the target without an adapter."""
    config, options = DRAFTERS[case]
    if config["method"] == "draft_model":
        config = dict(config, model=looping_llama)
    jobs = mixed(24, loras[0], None, loras[1])
    with speculating(looping_llama, config, **LORA, **options) as llm:
        for _ in range(2):
            check_same(jobs, run(llm, jobs), expected)
        assert accepted(llm) > 50
        if "preempted" in case:
            assert preemptions(llm) > 0


HEADS = quick_and_slow(["eagle3"], ("eagle", "mtp", "medusa", "dflash"))


@pytest.mark.parametrize("method", HEADS)
def test_head_does_not_apply_adapters(method: str, lora_folder: Path) -> None:
    """It shares embeddings and output matrix with the target as they are without, and reads states that are made with
    them."""
    model = target(method)
    # One matrix is embeddings and outputs: merged into it, an adapter for one of them would change the other as well.
    layers = (*adapters.ATTENTION, *adapters.MLP)
    made = [adapters.make(model, lora_folder / f"{method} {rank}", rank, rank=rank, modules=layers) for rank in (4, 8)]
    jobs = [job for adapter in (*made, None) for job in greedy(texts()[::3], adapter, num_tokens=24)]
    with speculating(model, head(method, 3), **LORA) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        Merged(model, lora_folder).check(jobs, run(llm, jobs))
        assert accepted(llm) > 50
        (modules,) = llm.collective_rpc(lambda worker: [*worker.model_runner.drafter.model.modules()])
        assert modules
        assert not [module for module in modules if "LoRA" in type(module).__name__]


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
def test_adapters_under_other_engine_options(
    case: str, looping_llama: str, loras: list[Adapter], merged_loras: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else ranks want memory nodes of their own
    jobs = [job for adapter in (*loras, None) for job in greedy(PROMPTS, adapter)]
    random.Random(1).shuffle(jobs)
    with engine(looping_llama, **(LORA | OPTIONS[case])) as llm:
        merged_loras.check(jobs, run(llm, jobs))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "granite", "gemma3"])
def test_adapters_of_other_families(family: str, made: Callable[[str], str], tmp_path: Path) -> None:
    model = made(family)
    loras = [
        adapters.make(model, tmp_path / name, number, rank=4, modules=(*adapters.ATTENTION, *adapters.MLP))
        for number, name in ((1, "a"), (2, "b"))
    ]
    jobs = [job for adapter in (*loras, None) for job in greedy(PROMPTS, adapter)]
    with speculating(model, ngram(3), **LORA) as llm:
        Merged(model, tmp_path).check(jobs, run(llm, jobs))


@pytest.mark.slow
def test_lora_target_modules_limit_adapters(looping_llama: str, lora_folder: Path, loras: list[Adapter]) -> None:
    """A deployment may leave modules out; then an adapter is what is left of it."""
    tensors, config = adapters.read(loras[0])
    few = {name: tensor for name, tensor in tensors.items() if "o_proj" in name}
    part = adapters.write(lora_folder / "part", 2, few, **config)
    jobs, left = greedy(PROMPTS, loras[0]), greedy(PROMPTS, part)
    with engine(looping_llama, **LORA, lora_target_modules=["o_proj"]) as llm:
        assert run(llm, jobs) == run(llm, left) != run(llm, greedy(PROMPTS, None))


@pytest.mark.slow
def test_adapters_are_loaded_over_http(
    looping_llama: str,
    loras: list[Adapter],
    lora_folder: Path,
    merged_loras: Merged,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    options = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--max-model-len", "512"]
    modules = ["--lora-modules", *(f"{adapter.folder.name}={adapter.folder}" for adapter in loras[:2])]
    drafts = ["--speculative-config.method", "ngram_gpu", "--speculative-config.num_speculative_tokens", "3"]
    with Server(looping_llama, tmp_path / "log", *options, *modules, *drafts) as server:
        ids = [model["id"] for model in server.client.get("/v1/models").json()["data"]]
        assert ids == ["tiny", "a", "b"]

        def ask(name: str) -> Tokens:
            body = dict(model=name, prompt=PROMPTS[1], max_tokens=12, temperature=0, ignore_eos=True)
            return server.complete(**body, return_token_ids=True)["choices"][0]["token_ids"]

        def load(adapter: Adapter, **more: Any) -> Any:
            body = dict(lora_name=adapter.folder.name, lora_path=str(adapter.folder), **more)
            return server.client.post("/v1/load_lora_adapter", json=body)

        assert load(loras[2]).status_code == 200
        jobs = [
            job for adapter in (loras[0], loras[2], None, loras[1], loras[0]) for job in greedy(PROMPTS[1:2], adapter)
        ]
        merged_loras.check(jobs, [ask("tiny" if job.adapter is None else job.adapter.folder.name) for job in jobs])

        tensors, config = adapters.read(loras[1])
        bad = adapters.write(
            tmp_path / "bad",
            20,
            {name: tensor[:, 1:] if "q_proj" in name else tensor for name, tensor in tensors.items()},
            **config,
        )
        assert load(bad).status_code == 400
        assert "have shapes" in load(bad).json()["error"]["message"]
        assert load(Adapter(tmp_path / "nowhere", 1)).status_code == 404
        assert load(loras[2]).status_code == 400  # it is there
        gone = server.client.post("/v1/unload_lora_adapter", json=dict(lora_name="c"))
        assert gone.status_code == 200
        assert server.client.post("/v1/completions", json=dict(model="c", prompt="x")).status_code == 404
        assert ask("a")
