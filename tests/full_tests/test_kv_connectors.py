"""Prompts whose KV another engine computed get the texts of one engine, with the same acceptance rate."""

import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import quantiles
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.utils.network_utils import get_open_port

from tests.full_tests import heads, tiny_models
from tests.full_tests.engines import counter, engine, first_tokens, generate
from tests.full_tests.prompts import random_prompts
from tests.full_tests.server import Server
from tests.full_tests.speculation import accepted, ngram, speculating
from tests.support.marks import quick_and_slow

TARGET = heads.target("eagle")
DRAFT_MODEL = dict(method="draft_model", model=TARGET, num_speculative_tokens=3)
UNIVERSAL = DRAFT_MODEL | dict(method="universal_draft")
RETOKENIZE = dict(additional_config={"gaudi_spec": {"universal_context": "retokenize"}})


METHODS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "ngram": (None, ngram()),
    "draft_model": (None, DRAFT_MODEL),
    "universal_draft": (None, UNIVERSAL),
    **{method: (heads.head(method, 3), heads.head(method, 3)) for method in ("eagle", "eagle3", "mtp")},
}
"""The `--speculative-config` of the first and the second of two servers."""
COUNTERS = (
    "vllm:external_prefix_cache_hits",
    *(f"vllm:spec_decode_num_{kind}_tokens" for kind in ("draft", "accepted")),
)


# --- a folder, one engine after the other ---


@dataclass
class Said:
    texts: list[list[int]]
    accepted: int
    drafted: int
    loaded: int
    """Tokens of prompts whose KV came from the folder."""


PROMPTS = heads.texts()
OTHERS = [list(range(10 + 20 * index, 140 + 20 * index)) for index in range(8)]


def params_for(index: int) -> SamplingParams:
    sampled = {} if index % 2 else dict(temperature=0.8, seed=index)
    return SamplingParams(**(dict(temperature=0) | sampled), max_tokens=24, ignore_eos=True)


def say(
    folder: Path, speculation: dict[str, Any], *, model: str = TARGET, connector: str = "ExampleConnector", **more: Any
) -> Said:
    """Answer all prompts, in blocks that have held something else before."""
    example = dict(kv_connector="ExampleConnector", kv_role="kv_both")
    example["kv_connector_extra_config"] = {"shared_storage_path": str(folder)}
    config = example
    if connector == "MultiConnector":
        config = dict(kv_connector=connector, kv_role="kv_both", kv_connector_extra_config={"connectors": [example]})
    options = dict(
        kv_transfer_config=KVTransferConfig(**config),
        enable_chunked_prefill=False,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=64,
        max_num_seqs=8,
    )
    with speculating(model, speculation, **options, **more) as llm:
        generate(llm, OTHERS, heads.greedy(8))
        before = accepted(llm), counter(llm, "vllm:spec_decode_num_draft_tokens")
        texts = first_tokens(generate(llm, PROMPTS, [params_for(index) for index in range(len(PROMPTS))]))
        after = accepted(llm), counter(llm, "vllm:spec_decode_num_draft_tokens")
        return Said(texts, after[0] - before[0], after[1] - before[1], counter(llm, "vllm:external_prefix_cache_hits"))


def check_same(first: Said, second: Said) -> None:
    assert not first.loaded
    assert second.loaded > 800
    assert second.texts == first.texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def stored(folder: Path) -> Said:
    """Return the texts of an engine that computes all prompts and stores their KV, without that of a drafter."""
    return say(folder, ngram())


@pytest.mark.parametrize("connector", quick_and_slow(["MultiConnector"], ["ExampleConnector"]))
def test_ngrams_draft_from_the_tokens_of_a_loaded_prompt(folder: Path, stored: Said, connector: str) -> None:
    said = say(folder, ngram(), connector=connector)
    check_same(stored, said)
    assert (said.accepted, said.drafted) == (stored.accepted, stored.drafted)


@pytest.mark.parametrize("overlap", quick_and_slow([True], [False]))
def test_draft_model_reads_a_loaded_prompt_itself(folder: Path, stored: Said, overlap: bool) -> None:
    """The engine that stored it had no draft model. This one is its own target, so its drafts are right."""
    coupled = dict(draft_sample_method="coupled", rejection_sample_method="strict")
    said = say(folder, DRAFT_MODEL | coupled, async_scheduling=overlap)
    check_same(stored, said)
    assert said.accepted / said.drafted > 0.98


@pytest.mark.slow
def test_retokenizing_drafter_reads_a_loaded_prompt_itself(folder: Path, stored: Said) -> None:
    coupled = dict(draft_sample_method="coupled", rejection_sample_method="strict")
    said = say(folder, DRAFT_MODEL | coupled | dict(method="universal_draft"), **RETOKENIZE)
    check_same(stored, said)
    assert said.accepted / said.drafted > 0.9


@pytest.mark.parametrize("method", quick_and_slow(["eagle"], ["eagle3", "medusa", "mtp"]))
def test_head_drafts_as_well_after_a_loaded_prompt(method: str, tmp_path: Path) -> None:
    """A head cannot read the prompt itself, so its KV is transferred with the target's."""
    model, head = heads.target(method), heads.head(method, 3)
    first, second = say(tmp_path, head, model=model), say(tmp_path, head, model=model)
    check_same(first, second)
    assert (second.accepted, second.drafted) == (first.accepted, first.drafted)


# --- host memory ---


@pytest.mark.parametrize("method", quick_and_slow(["eagle"], ["draft_model", "retokenize", "ngram", "mtp"]))
def test_prompts_of_four_times_the_kv_cache_are_loaded_from_host_memory(method: str) -> None:
    model = heads.target(method)
    speculation = METHODS["universal_draft" if method == "retokenize" else method][1]
    options: dict[str, Any] = dict(block_size=32, num_gpu_blocks_override=33, max_num_seqs=4)
    options |= RETOKENIZE if method == "retokenize" else {}
    prompts = [heads.text(129, first) for first in range(16)] + random_prompts([129] * 16, 250)
    params = [params_for(index) for index in range(len(prompts))]
    with speculating(model, speculation, **options) as llm:
        expected = first_tokens(generate(llm, prompts, params))
        rate = accepted(llm) / counter(llm, "vllm:spec_decode_num_draft_tokens")
    offload = dict(kv_connector="OffloadingConnector", kv_role="kv_both")
    config = KVTransferConfig(**offload, kv_connector_extra_config={"cpu_bytes_to_use": 64 << 20})
    with speculating(model, speculation, kv_transfer_config=config, **options) as llm:
        assert first_tokens(generate(llm, prompts, params)) == expected
        before = [counter(llm, name) for name in COUNTERS]
        assert first_tokens(generate(llm, prompts, params)) == expected
        loaded, drafted, right = (counter(llm, name) - old for name, old in zip(COUNTERS, before, strict=True))
        assert loaded > 0.7 * 128 * len(prompts)
        assert right / drafted == pytest.approx(rate, abs=0.02)


# --- two servers ---


def make_request(index: int, prompt: list[int]) -> dict[str, Any]:
    params = params_for(index)
    sampled = dict(temperature=params.temperature, max_tokens=params.max_tokens, seed=params.seed or 0)
    return dict(prompt=prompt, ignore_eos=True, return_token_ids=True) | sampled


LENGTHS = (3, 9, 17, 31, 32, 33, 48, 64, 65, 100, 129, 200, 257, 333, 400)
MIXED = [heads.text(LENGTHS[index % len(LENGTHS)], index % 19) for index in range(125)]
"""Prompts of many lengths, some of which begin in the same way."""
REQUESTS = [make_request(*each) for each in enumerate(MIXED)]


def token_ids(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


class Pair:
    """A server that computes prompts, and one that goes on from their KV, which it reads over TCP."""

    def __init__(
        self,
        folder: Path,
        model: str,
        first: dict[str, Any] | None,
        second: dict[str, Any] | None,
        policy: str = "fail",
        num_ranks: tuple[int, int] = (1, 1),
    ) -> None:
        self._servers = ExitStack()
        self.first, self.second = (
            self._servers.enter_context(serve(folder / role, model, speculation, role, policy, size, waits=False))
            for role, speculation, size in zip(("kv_producer", "kv_consumer"), (first, second), num_ranks, strict=True)
        )
        with ExitStack() as failed:
            failed.push(self._servers)
            self.first.wait_ready()
            self.second.wait_ready()
            failed.pop_all()

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *raised: object) -> None:
        self._servers.close()

    def begin(self, request: dict[str, Any]) -> dict[str, Any]:
        """Compute a prompt, and return the request with where its KV is."""
        alone: dict[str, Any] = dict(max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        return request | dict(kv_transfer_params=self.first.complete(**(request | alone))["kv_transfer_params"])

    def ask(self, request: dict[str, Any]) -> list[int]:
        return token_ids(self.second.complete(**self.begin(request)))

    def stream(self, request: dict[str, Any]) -> tuple[list[int], float]:
        """Return the tokens, and the seconds until the first of them."""
        began = time.monotonic()
        return stream(self.second, self.begin(request), began)


def serve(
    log: Path,
    model: str,
    speculation: dict[str, Any] | None = None,
    role: str | None = None,
    policy: str = "fail",
    num_ranks: int = 1,
    *,
    waits: bool = True,
) -> Server:
    options = ["--max-model-len", "512", "--tensor-parallel-size", str(num_ranks)]
    if speculation is not None:
        options += ["--speculative-config", json.dumps(speculation)]
    if role is not None:
        config: dict[str, Any] = dict(kv_connector="NixlConnector", kv_role=role, kv_load_failure_policy=policy)
        config["kv_connector_extra_config"] = {"kv_lease_duration": 600}  # longer than a test on a busy machine
        options += ["--kv-transfer-config", json.dumps(config)]
    environment = {"UCX_TLS": "tcp", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(get_open_port())}
    return Server(model, log, *options, environment=environment, waits=waits)


def stream(server: Server, request: dict[str, Any], began: float | None = None) -> tuple[list[int], float]:
    """Return the tokens, and the seconds from `began`, or from now, until the first of them."""
    began = time.monotonic() if began is None else began
    tokens, seconds = list[int](), 0.0
    with server.client.stream("POST", "/v1/completions", json=dict(model="tiny", stream=True) | request) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                seconds = seconds or time.monotonic() - began
                tokens += token_ids(json.loads(line.removeprefix("data: ")))
    return tokens, seconds


needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="needs `pip install nixl`")


def answer_alone(model: str, prompts: list[list[int]]) -> list[list[int]]:
    """Return the texts of one engine without drafts."""
    with engine(model) as llm:
        return first_tokens(generate(llm, prompts, [params_for(index) for index in range(len(prompts))]))


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    """Return the texts of one engine, by model."""
    return {model: answer_alone(model, MIXED) for model in (TARGET, heads.target("mtp"))}


@needs_nixl
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [(2, 1), (1, 2)], ids=["from two ranks to one", "from one rank to two"])
def test_servers_of_different_sizes(num_ranks: tuple[int, int], looping_llama: str, tmp_path: Path) -> None:
    prompts = random_prompts([17, 31, 32, 33, 40, 100, 200], tiny_models.VOCAB)
    requests = [make_request(*each) for each in enumerate(prompts)]
    expected = answer_alone(looping_llama, prompts)
    drafter = DRAFT_MODEL | dict(model=looping_llama)
    with Pair(tmp_path, looping_llama, None, drafter, num_ranks=num_ranks) as pair, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(pair.ask, requests)) == expected
        assert pair.second.metric("vllm:external_prefix_cache_hits_total") > 400


def ask_or_none(server: Server, request: dict[str, Any]) -> list[int] | None:
    """Return the server's answer, or None if it is an error."""
    response = server.client.post("/v1/completions", json=dict(model="tiny") | request)
    if response.status_code != 200 or response.json()["choices"][0]["finish_reason"] == "error":
        return None
    return token_ids(response.json())


@needs_nixl
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_servers_say_what_one_says(
    method: str, alone: dict[str, list[list[int]]], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """`--junitxml` saves what these requests cost on two servers and on one."""
    model = heads.target(method)

    def ask_all(where: str, server: Server, asks: Callable[[dict[str, Any]], tuple[list[int], float]]) -> None:
        with ThreadPoolExecutor(8) as pool:
            tokens, seconds = zip(*pool.map(asks, REQUESTS), strict=True)
        assert list(tokens) == alone[model]
        record_property(f"{where}: deciles of seconds to the first token", quantiles(seconds, n=10))
        drafted, right = (server.metric(f"{name}_total") for name in COUNTERS[1:])
        record_property(f"{where}: acceptance rate", right / drafted)

    with serve(tmp_path / "one", model, METHODS[method][1]) as server:
        ask_all("one server", server, partial(stream, server))
    with Pair(tmp_path, model, *METHODS[method]) as pair:
        ask_all("two servers", pair.second, pair.stream)
        record_property("two servers: bytes", pair.second.metric("vllm:nixl_bytes_transferred_sum"))
        record_property("two servers: tokens in them", pair.second.metric("vllm:external_prefix_cache_hits_total"))
        assert pair.second.metric("vllm:external_prefix_cache_hits_total") > 5000
        assert pair.second.metric("vllm:nixl_bytes_transferred_sum") > 5e6
        assert pair.second.metric("vllm:spec_decode_num_accepted_tokens_total") > 500


@needs_nixl
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_death_of_the_first_server_is_an_error_or_recomputed(
    policy: str, alone: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    with Pair(tmp_path, TARGET, None, DRAFT_MODEL, policy) as pair, ThreadPoolExecutor(8) as pool:
        begun = list(pool.map(pair.begin, REQUESTS))
        answers = [pool.submit(ask_or_none, pair.second, request) for request in begun]
        pair.first.stop(signal.SIGKILL, to_all=True)
        found = [answer.result() for answer in answers]
        wrong = [index for index, ids in enumerate(found) if ids is not None and ids != alone[TARGET][index]]
        assert not wrong
        assert policy == "fail" or None not in found
        # Whatever came of them, the server goes on.
        assert token_ids(pair.second.complete(**REQUESTS[0])) == alone[TARGET][0]
