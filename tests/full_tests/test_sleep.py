"""Sleep, wake and new weights in a running engine that drafts: texts are those of an engine that never slept, or that
started with the new weights."""

import gc
import json
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams

from tests.full_tests import heads, tiny_models
from tests.full_tests.engines import counter, engine, first_tokens, generate
from tests.full_tests.server import Server
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


MODES = ("abort", "wait", "keep")
"""Modes that determine what happens to running requests when vLLM pauses or sleeps."""
REQUESTS = [
    dict(prompt=heads.text(length, first), temperature=0.8 * (first % 2), seed=first, max_tokens=60)
    for first, length in enumerate((3, 9, 33, 40, 64, 65, 130, 300))
]


def answer_alone(model: str, prompts: list[list[int]], requests: list[dict[str, Any]]) -> list[list[int]]:
    """Return the texts of an engine that never drafts or changes."""
    names = ("temperature", "seed", "max_tokens")
    params = [SamplingParams(ignore_eos=True, **{name: one[name] for name in names}) for one in requests]
    with engine(model) as llm:
        return first_tokens(generate(llm, prompts, params))


class Answer(NamedTuple):
    began: int
    ended: int
    index: int
    """Number of the request."""
    reason: str
    tokens: list[int]


class Load:
    """Clients that send one request after the other, and what they got."""

    def __init__(self, server: Server, num_clients: int = 8) -> None:
        self.time = 0
        """Even while nothing changes, odd during a change, and negative at the end."""
        self.answers: list[Answer] = []
        self._server = server
        self._served: set[int] = set()
        """Clients that have had an answer during which nothing changed."""
        self._pool = ThreadPoolExecutor(num_clients)
        self._clients = [self._pool.submit(self._send, client) for client in range(num_clients)]

    def _send(self, client: int) -> None:
        for number in count(client):
            began, index = self.time, number % len(REQUESTS)
            if began < 0:
                return
            answer = self._server.complete(ignore_eos=True, return_token_ids=True, **REQUESTS[index])["choices"][0]
            ended = self.time
            self.answers.append(Answer(began, ended, index, answer["finish_reason"], answer["token_ids"]))
            if began == ended:
                self._served.add(client)

    def wait(self) -> None:
        """Wait until each client has another answer during which nothing changed."""
        self._served.clear()
        deadline = time.monotonic() + 60
        while len(self._served) < len(self._clients):
            assert time.monotonic() < deadline, self._served
            time.sleep(0.02)
            for client in self._clients:
                if client.done():
                    client.result()

    def end(self) -> None:
        self.time = -1
        self._pool.shutdown()


@pytest.mark.slow
def test_new_weights_and_sleep_under_load(pair: tuple[Models, Models], tmp_path: Path) -> None:
    """Each request gets a text of one state of the weights, unless it was told to continue with others."""
    old, new = pair
    prompts = [request["prompt"] for request in REQUESTS]
    expected = [answer_alone(models.target, prompts, REQUESTS) for models in (old, new)]
    options = ["--max-model-len", "512", "--enable-sleep-mode"]
    coupled = dict(draft_sample_method="coupled", rejection_sample_method="strict")
    options += ["--speculative-config", json.dumps(old.options()["speculative_config"] | coupled)]
    sizes: list[int] = []
    counts: list[np.ndarray] = []
    # oneDNN keeps up to 1,024 compiled kernels by default, which would hide whether anything else grows.
    environment = {"VLLM_SERVER_DEV_MODE": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
    with Server(old.target, tmp_path / "log", *options, environment=environment) as server:
        load = Load(server)
        try:
            for number in range(42):
                before = count_drafts(server)
                load.wait()
                counts.append(np.subtract(count_drafts(server), before))
                sizes.append(resident_mebibytes(server))
                load.time += 1
                replace_weights(server, number, (new, old)[number % 2])
                load.time += 1
            load.wait()
        finally:
            load.end()
    kept: tuple[list[tuple[Answer, int]], ...] = ([], [])
    for answer in load.answers:
        change = answer.began // 2
        before, after = (expected[(change + late) % 2][answer.index] for late in (0, 1))
        if answer.began == answer.ended and answer.began % 2 == 0:
            assert answer.tokens == before
        elif answer.reason == "abort":
            assert MODES[change % 3] == "abort"
            assert answer.tokens == before[: len(answer.tokens)]
        elif answer.tokens not in (before, after):
            assert MODES[change % 3] == "keep"
            kept[(change + 1) % 2].append((answer, count_equal(answer.tokens, before)))
    assert Counter(answer.reason for answer in load.answers)["abort"] > 10
    # The new weights continue from the tokens of the old ones, after they have read all of them.
    for models, continued in zip((old, new), kept, strict=True):
        assert len(continued) > 5
        starts = [REQUESTS[answer.index]["prompt"] + answer.tokens[:length] for answer, length in continued]
        rest = [answer.tokens[length:] for answer, length in continued]
        requests = [
            REQUESTS[answer.index] | dict(max_tokens=len(tokens))
            for (answer, _), tokens in zip(continued, rest, strict=True)
        ]
        assert answer_alone(models.target, starts, requests) == rest
    for weights in range(2):
        # Which requests an interval has varies, and a draft model with the target's weights is always right.
        thirds = [np.sum(part, axis=0) for part in np.array_split(counts[weights::2], 3)]
        rates = [accepted / drafted for drafted, accepted in thirds]
        assert rates[-1] > rates[0] - 0.05, rates
        assert old.method == "eagle" or min(rates) > 0.95, rates
    assert max(sizes[5:]) - sizes[5] <= 64, sizes


def count_equal(first: list[int], second: list[int]) -> int:
    return sum(takewhile(bool, (one == other for one, other in zip(first, second, strict=False))))


def count_drafts(server: Server) -> list[float]:
    """Return the drafted and the accepted tokens. One response has both, so that they are of the same time."""
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    found = {sample.name: sample.value for family in families for sample in family.samples}
    return [found[f"vllm:spec_decode_num_{kind}_tokens_total"] for kind in ("draft", "accepted")]


def resident_mebibytes(server: Server) -> int:
    process = psutil.Process(server.process.pid)
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True))) >> 20


def replace_weights(server: Server, number: int, models: Models) -> None:
    """Pause or sleep, in one of vLLM's modes, and load a target with its drafter."""

    def call(path: str, **body: Any) -> None:
        response = server.client.post(path, json=body)
        assert response.status_code == 200, response.text

    mode, sleeps = MODES[number % 3], number // 3 % 2
    call(f"/sleep?level=2&mode={mode}" if sleeps else f"/pause?mode={mode}")
    if sleeps:
        call("/wake_up?tags=weights")
    call("/collective_rpc", method="reload_weights", kwargs=dict(weights_path=models.target))
    call("/collective_rpc", method="reload_weights", kwargs=dict(weights_path=models.drafter, is_draft=True))
    call("/wake_up?tags=kv_cache" if sleeps else "/resume")


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
